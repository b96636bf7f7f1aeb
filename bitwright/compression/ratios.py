"""Choose compression ratios per layer: AIMET's greedy search by the metric, and an exact choice from estimates.

A :class:`Space` has parts (a layer, a group of channels), each with options: left as it is, or smaller. Every option has
costs, which add up, and the error that it makes where it stands.

:func:`choose`: two options of every part are tried alone and the noise that they make in the *outputs* is measured (not the
metric); the other options of the part follow from their own errors on a curve through both (:class:`Curve`). The
choice of least noise within the target is then found exactly (:class:`bitwright.precision.choice.Knapsack`), carried out and
measured; factors that explain the difference are fitted (:class:`~bitwright.precision.choice.Correction`), and the choice is made
again, until it stays the same. A metric, where there is one, is asked of the best choices only.

:func:`greedy`: the metric of every part at every ratio, then the largest score at which all parts meet the target (AIMET).
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.compression.costs import check_cost, check_target, nearest_part
from bitwright.core.files import read_document
from bitwright.core.simulation.float_model import Undo
from bitwright.errors import CalibrationError, ConfigError
from bitwright.export.files.atomic import write_json
from bitwright.methods.switching import Kept
from bitwright.precision.choice import Choice, Correction, Cost, Knapsack, undominated
from bitwright.progress import progress as progress_bar

logger = logging.getLogger("bitwright")
Array = NDArray[Any]
_ROUNDS = 6  # choices whose noise is measured
_TRIED = 3  # choices whose metric is measured
_NEARER = 8  # programs that are solved for one choice, where costs multiply
_TINY = 1e-12
SCORES_FORMAT = "bitwright-compression-scores"


@dataclass(frozen=True)
class Option:
    """One alternative for a part: its costs and its error.

    Attributes:
        name: for tables: ``spatial, rank 12``.
        costs: of the part: ``macs``, ``params``, ``bytes``.
        error: share of the part's own output that it misses; 0 as it is.
        ratio: of its costs to those of the part as it is, as asked for.
        what: what the space needs to carry it out.
    """

    name: str
    costs: Mapping[str, float]
    error: float
    ratio: float = 1.0
    what: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Part:
    """A layer or group for which an option is chosen.

    Attributes:
        name: of the layer or group.
        options: the first leaves the part as it is.
    """

    name: str
    options: tuple[Option, ...]


class Space(ABC):
    """Search space: a model whose parts have several options.

    Attributes:
        parts: what is chosen for.
        fixed: costs of everything else.
    """

    parts: Sequence[Part]
    fixed: Mapping[str, float]

    @abstractmethod
    def apply(self, choice: Sequence[int]) -> Undo:
        """Apply an option for every part; the function returned undoes it."""

    @abstractmethod
    def noise(self) -> float:
        """Noise over signal of the present model's outputs against the original's."""

    @abstractmethod
    def runnable(self) -> Any:
        """The argument of the metric."""

    def original_costs(self) -> Mapping[str, float]:
        """Costs of the model that a target is a part of."""
        return self.costs_of([0] * len(self.parts))

    def floor(self) -> float:
        """The noise of :meth:`noise` with all parts as they are, where that is not the original."""
        return 0.0

    def costs_of(self, choice: Sequence[int]) -> dict[str, float]:
        """Costs of the whole model; the sum over parts, where costs of parts do not depend on each other."""
        picked = [part.options[k].costs for part, k in zip(self.parts, choice, strict=True)]
        return {name: sum(costs[name] for costs in picked) + held for name, held in self.fixed.items()}

    def around(self, choice: Sequence[int]) -> Mapping[str, tuple[Sequence[Sequence[float]], float]]:
        """Cost -> what options of every part cost, and the rest; exact where a choice differs from this one in one part."""
        return {n: ([[o.costs[n] for o in p.options] for p in self.parts], held) for n, held in self.fixed.items()}


@dataclass(frozen=True)
class Tried:
    """A choice that was measured.

    Attributes:
        choice: an option per part.
        costs: of the whole model, by name.
        noise: over signal of the outputs.
        score: the metric; ``None`` where it was not asked.
    """

    choice: Choice
    costs: Mapping[str, float]
    noise: float
    score: float | None = None


@dataclass(frozen=True)
class Chosen:
    """Result of a search.

    Attributes:
        best: the choice.
        tried: all that were measured.
        sensitivity: part -> noise of the outputs where it alone is at about half of its cost.
        evaluations: of the metric.
        notes: what a reader should know.
    """

    best: Tried
    tried: tuple[Tried, ...]
    sensitivity: Mapping[str, float]
    evaluations: int
    notes: tuple[str, ...] = ()


class Tables:
    """Costs of a space as the exact choice wants them.

    Args:
        space: what is chosen from.
        base: the choice near which costs are added up; as it is by default.
    """

    def __init__(self, space: Space, base: Sequence[int] | None = None) -> None:
        self.parts, self.width = list(space.parts), max((len(p.options) for p in space.parts), default=1)
        self.allowed = [list(range(len(part.options))) for part in self.parts]
        self.costs = {
            name: Cost(name, "", self._table(rows)[None], np.array([held]))
            for name, (rows, held) in space.around(base or [0] * len(self.parts)).items()
        }

    def _table(self, rows: Sequence[Sequence[float]]) -> Array:
        table = np.zeros((len(self.parts), self.width))
        for i, row in enumerate(rows):
            table[i, : len(row)] = row
        return table

    def named(self, sensitivity: Sequence[Curve]) -> dict[str, float]:
        """Part -> noise of the option that was measured near half of its cost."""
        return {part.name: curve.noise for part, curve in zip(self.parts, sensitivity, strict=True)}

    def noise(self, sensitivity: Sequence[Curve]) -> Array:
        """``[parts, options]``, from the noise by the error of every part."""
        rows = [curve.of([o.error for o in part.options]) for part, curve in zip(self.parts, sensitivity, strict=True)]
        table = self._table([row.tolist() for row in rows])
        table[:, 0] = 0.0
        return np.asarray(table)


def bounds_of(space: Space, target: Mapping[str, float]) -> dict[str, float]:
    """Most of each cost, from ratios of the model as it is.

    Raises:
        ConfigError: a ratio is none, a cost is unknown, or no choice meets the target: says the nearest that can be met.
    """
    check_target(target)
    for name in target:
        if name not in space.fixed:
            raise ConfigError(
                "target", f"{name} of single layers is not known here", f"use {', '.join(space.fixed)}"
            )  # fmt: skip
    if not space.parts:
        raise ConfigError("target", "no layer can be made smaller", "see the reasons in the report's refused layers")
    whole = space.original_costs()
    for name, ratio in target.items():
        smallest = [min(range(len(p.options)), key=lambda k, p=p: p.options[k].costs[name]) for p in space.parts]  # type: ignore[misc]
        least = space.costs_of(smallest)[name]
        if least > whole[name] * ratio * (1 + 1e-9):
            nearest = nearest_part(name, least, whole[name])
            share = space.fixed[name] / whole[name]
            raise ConfigError(
                "target",
                f"{ratio:g} of the {name} cannot be met: the nearest that can is {nearest}"
                + (f", as {share:.1%} are in what cannot be made smaller" if share > 0.005 else ""),
                f"ask for {nearest} or more, give smaller ratios to choose from, or compress more layers",
            )
    return {name: whole[name] * ratio for name, ratio in target.items()}


def quietest(space: Space, noise: Cost, bounds: Mapping[str, float], start: Sequence[int]) -> Choice | None:
    """The choice of least estimated noise within bounds; ``None`` where none was found.

    Where costs of parts multiply, as those of two layers in a row do, they are added up near a choice, the program is solved,
    and both are repeated near its solution; what was missed of a bound is made up for in the next one.
    """
    room, base = dict(bounds), tuple(start)
    within: list[Choice] = []
    for _ in range(_NEARER):
        tables = Tables(space, base)
        choice = Knapsack(tables.allowed, tables.costs).quietest(noise, room)
        if choice is None or choice in within:
            break
        real = space.costs_of(choice)
        within += [choice] if all(real[n] <= most * (1 + 1e-9) for n, most in bounds.items()) else []
        if all(math.isclose(real[n], tables.costs[n].of(choice), rel_tol=1e-9) for n in bounds):
            break
        room = {name: room[name] * most / real[name] for name, most in bounds.items()}
        base = choice
    best = min(within, key=noise.of, default=None)
    return None if best is None else _filled(space, noise, bounds, best)


def _filled(space: Space, noise: Cost, bounds: Mapping[str, float], choice: Choice) -> Choice:
    """Use the rest of the bounds: enlarge parts by one option, largest noise reduction first, until none fits.

    Where costs multiply, the programs leave room. A step that does not fit never will, since the others only grow.
    """
    waiting = {i for i, k in enumerate(choice) if k}
    while waiting:
        steps = {i: (*choice[:i], choice[i] - 1, *choice[i + 1 :]) for i in waiting}
        i = min(waiting, key=lambda i: (noise.of(steps[i]), i))  # noqa: B023
        costs = space.costs_of(steps[i])
        if noise.of(steps[i]) <= noise.of(choice) and all(costs[n] <= most * (1 + 1e-9) for n, most in bounds.items()):
            choice = steps[i]
            waiting -= set() if choice[i] else {i}
        else:
            waiting.discard(i)
    return choice


@dataclass(frozen=True)
class Curve:
    """Noise of the outputs by the error of one part alone: linear up to an option that is measured, a power beyond it.

    Attributes:
        error, noise: of the option that is measured.
        power: of the error beyond it, from a second option. Errors of small cuts add up; what is left of a part that is nearly
            removed cannot make up for the rest, so that the noise grows faster than the share of what went.
    """

    error: float = 1.0
    noise: float = 0.0
    power: float = 1.0

    @classmethod
    def through(cls, near: tuple[float, float], far: tuple[float, float] | None = None) -> Curve:
        """Through error and noise of one option, or of two."""
        if far is None or far[0] <= near[0] or far[1] <= 0:
            return cls(*near)
        if near[1] <= 0:
            return cls(*far)
        return cls(*near, max(math.log(far[1] / near[1]) / math.log(far[0] / near[0]), 0.0))

    def of(self, errors: Sequence[float]) -> Array:
        """Noise of options with these errors."""
        x = np.asarray(errors, float) / self.error
        return self.noise * np.where(x <= 1, x, np.maximum(x, 1.0) ** self.power)


def sensitivities(
    space: Space,
    progress: bool = True,
    record: Record | None = None,
    measures: Callable[[int], bool] = lambda part: True,
) -> list[Curve]:
    """Noise of the outputs by the error of each part, from two options of it alone: near half of its cost, and the smallest.

    Args:
        space: whose parts are measured.
        progress: show a progress bar.
        record: keeps what is measured.
        measures: whether a part is measured here, by its number.
    """
    record = record or Record()
    found, floor = [], space.floor()
    for i, part in enumerate(progress_bar(list(space.parts), "sensitivity of layers", enabled=progress)):
        if not measures(i):
            found.append(Curve())
            continue
        others = [k for k in range(1, len(part.options)) if part.options[k].error > _TINY]
        measured: list[tuple[float, float]] = []
        if others:
            middle = min(others, key=lambda k, part=part: abs(part.options[k].ratio - 0.5))  # type: ignore[misc]
            largest = max(others, key=lambda k, part=part: part.options[k].error)  # type: ignore[misc]
            for k in dict.fromkeys((middle, largest)):
                choice = [0] * len(space.parts)
                choice[i] = k
                noise = record.get(f"noise {choice}", lambda choice=choice: _noise(space, choice))  # type: ignore[misc]
                measured.append((part.options[k].error, max(noise - floor, 0.0)))
        found.append(Curve.through(*measured) if measured else Curve())
    return found


class Record:
    """Measurements of a search on disk, from which it continues after a kill.

    Args:
        folder: where; ``None`` keeps nothing.
        space: whose options, and whose original, the numbers are of.
        of: what else they depend on.

    Raises:
        ConfigError: the folder has measurements of something else, or a file that cannot be read.
    """

    def __init__(self, folder: str | Path | None = None, space: Space | None = None, *of: Any) -> None:
        named = "" if space is None else repr([(p.name, [(o.name, o.error) for o in p.options]) for p in space.parts])
        self._kept = Kept(folder, hashlib.sha256(repr((named, *of)).encode()).hexdigest()[:16], "compression.json")
        self._known = self._kept.load()

    def take(self, other: Record) -> None:
        """Take in the numbers of another process."""
        self._known.update(other._known)
        self._kept.save(lambda: self._known, now=True)

    def get(self, name: str, measure: Callable[[], float]) -> float:
        """The stored number, or measured and stored."""
        if name not in self._known:
            self._known[name] = measure()
            self._kept.save(lambda: self._known, now=True)
        return float(self._known[name])


def _noise(space: Space, choice: Sequence[int]) -> float:
    with _applied(space, choice):
        return space.noise()


@contextmanager
def _applied(space: Space, choice: Sequence[int]) -> Iterator[None]:
    """Carries out a choice for the length of a ``with`` block."""
    undo = space.apply(choice)
    try:
        yield
    finally:
        undo()


def checked_score(metric: Callable[[Any], Any], model: Any, which: str) -> float:
    """The metric of a model, one number.

    Raises:
        CalibrationError: it is no number, NaN, or infinite.
    """
    found = metric(model)
    try:
        score = float(found)
    except (TypeError, ValueError) as error:
        shown = "None" if found is None else f"{found!r:.80} ({type(found).__name__})"
        raise CalibrationError(
            "metric",
            f"of the {which} model it is {shown}, which is not a number",
            "end it with `return` and one number",
        ) from error
    if not math.isfinite(score):
        raise CalibrationError(
            "metric",
            f"of the {which} model it is {'NaN' if math.isnan(score) else 'infinite'}",
            "check it for empty batches and divisions by zero; run it on the original model first",
        )
    return score


def choose(
    space: Space,
    target: Mapping[str, float],
    *,
    metric: Callable[[Any], Any] | None = None,
    lower_is_better: bool = False,
    deadline: float | None = None,
    rounds: int = _ROUNDS,
    tried: int = _TRIED,
    sensitivity: Sequence[Curve] | None = None,
    start: Sequence[int] | None = None,
    record: Record | None = None,
    progress: bool = True,
) -> Chosen:
    """Choose the options of least output noise within the target; the model is restored.

    Args:
        space: what is chosen from.
        target: ratios of costs, as ``{"macs": 0.5}``; several are met together.
        metric: of the model; decides between the choices of least noise.
        lower_is_better: of the metric.
        deadline: seconds after which no further choice is measured.
        rounds: choices whose noise is measured, at most.
        tried: choices whose metric is measured, at most.
        sensitivity: what :func:`sensitivities` found before.
        start: a choice within the target, which is measured too.
        record: keeps what is measured.
        progress: show a progress bar.

    Raises:
        ConfigError: see :func:`bounds_of`.
        CalibrationError: the metric is no finite number.
    """
    ends = time.monotonic() + (math.inf if deadline is None else deadline)
    notes = []
    bounds = bounds_of(space, target)
    tables, record = Tables(space), record or Record()
    if metric is not None:
        record.get("score", lambda: checked_score(metric, space.runnable(), "original"))  # before any work is lost
    found = list(sensitivity) if sensitivity is not None else sensitivities(space, progress, record)
    correction, floor = Correction(np.maximum(tables.noise(found), 0.0)), space.floor()
    seen: dict[Choice, Tried] = {}
    if start is not None:
        seen[tuple(start)] = _measured(space, tuple(start), record)
    for _ in range(rounds):
        choice = quietest(space, correction.noise(), bounds, start or [0] * len(space.parts))
        if choice is None or choice in seen:
            break
        seen[choice] = _measured(space, choice, record)
        correction.see(choice, max(seen[choice].noise - floor, 0.0))
        if time.monotonic() > ends:
            notes.append("the search ended because time was used up")
            break
    best = sorted(seen.values(), key=lambda t: t.noise)
    assert best, "bounds_of has found that some choice meets the target"
    evaluations = 0
    if metric is not None:
        best = _scored(space, best[:tried], metric, ends, record)
        evaluations = 1 + len(best)
        seen.update((one.choice, one) for one in best)
        best.sort(key=lambda t: t.score or 0.0, reverse=not lower_is_better)
    return Chosen(best[0], tuple(seen.values()), tables.named(found), evaluations, tuple(notes))


def _measured(space: Space, choice: Choice, record: Record) -> Tried:
    noise = record.get(f"noise {list(choice)}", lambda: _noise(space, choice))
    return Tried(choice, space.costs_of(choice), noise)


def _score(space: Space, choice: Choice, metric: Callable[[Any], Any]) -> float:
    with _applied(space, choice):
        return checked_score(metric, space.runnable(), "compressed")


def _scored(
    space: Space, choices: Iterable[Tried], metric: Callable[[Any], Any], ends: float, record: Record
) -> list[Tried]:
    """The metric of choices in their order, until the clock has passed ``ends``."""
    rated = []
    for one in choices:
        score = record.get(f"score {list(one.choice)}", lambda one=one: _score(space, one.choice, metric))  # type: ignore[misc]
        rated.append(replace(one, score=score))
        if time.monotonic() > ends:
            break
    return rated


def front(
    space: Space,
    cost: str = "macs",
    *,
    points: int = 8,
    metric: Callable[[Any], Any] | None = None,
    sensitivity: Sequence[Curve] | None = None,
    record: Record | None = None,
    progress: bool = True,
) -> list[Tried]:
    """The Pareto front of choices from the cheapest to the present model, each measured once.

    Args:
        space: what is chosen from.
        cost: that is counted.
        points: how many bounds on it.
        metric: asked once per point.
        sensitivity: what :func:`sensitivities` found before.
        record: keeps what is measured.
        progress: show a progress bar.
    """
    check_cost(cost)
    tables, record = Tables(space), record or Record()
    found = list(sensitivity) if sensitivity is not None else sensitivities(space, progress, record)
    noise = Cost.noise(np.maximum(tables.noise(found), 0.0))
    whole = space.costs_of([0] * len(tables.parts))[cost]
    least = space.costs_of([len(part.options) - 1 for part in tables.parts])[cost]
    choices: dict[Choice, None] = {}
    for most in np.linspace(least, whole, points):
        choice = quietest(space, noise, {cost: float(most)}, [0] * len(tables.parts))
        if choice is not None:
            choices[choice] = None
    seen = []
    for choice in progress_bar(list(choices), "points of the front", enabled=progress):
        one = _measured(space, choice, record)
        if metric is not None:
            (one,) = _scored(space, [one], metric, math.inf, record)
        seen.append(one)
    return undominated(seen, lambda t: t.costs[cost], lambda t: t.noise)


# ------------------------------------------------------------------------------------------------ AIMET's greedy search

Scores = dict[str, dict[float, float]]
"""Part -> ratio -> metric with this part alone at that ratio."""


def measure_scores(
    space: Space,
    metric: Callable[[Any], Any],
    known: Mapping[str, Mapping[float, float]] | None = None,
    progress: bool = True,
) -> Scores:
    """The metric of every part at every option alone: as many evaluations as there are options.

    Args:
        space: whose options have the ratios that are tried.
        metric: of the model; higher is better.
        known: scores of an earlier run, which are not measured again.
        progress: show a progress bar.
    """
    known = known or {}
    found: Scores = {part.name: {} for part in space.parts}
    todo = [(i, k) for i, part in enumerate(space.parts) for k in range(1, len(part.options))]
    for i, k in progress_bar(todo, "metric of layers", enabled=progress):
        part = space.parts[i]
        ratio = round(part.options[k].ratio, 6)
        if ratio in known.get(part.name, {}):
            found[part.name][ratio] = known[part.name][ratio]
            continue
        choice = [0] * len(space.parts)
        choice[i] = k
        with _applied(space, choice):
            found[part.name][ratio] = checked_score(metric, space.runnable(), "compressed")
    return found


def monotonic(scores: Mapping[float, float]) -> dict[float, float]:
    """Scores that never fall as the ratio rises, of least squared change (pool adjacent violators).

    >>> monotonic({0.1: 1.0, 0.2: 0.5, 0.3: 2.0})
    {0.1: 0.75, 0.2: 0.75, 0.3: 2.0}
    """
    blocks: list[tuple[float, int]] = []
    for ratio in sorted(scores):
        blocks.append((scores[ratio], 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, m), (b, n) = blocks[-2:]
            blocks[-2:] = [((a * m + b * n) / (m + n), m + n)]
    flat = [value for value, count in blocks for _ in range(count)]
    return dict(zip(sorted(scores), flat, strict=True))


def greedy(
    scores: Mapping[str, Mapping[float, float]],
    cost_of: Callable[[Mapping[str, float]], float],
    most: float,
    baseline: float,
    tolerance: float = 1e-3,
) -> dict[str, float]:
    """Ratios of all parts, from scores of each alone: the largest score that every part can keep while the cost is met.

    Each part takes the smallest ratio whose score, interpolated between those measured, is at least the common score, which is
    found by bisection.

    Args:
        scores: part -> ratio -> metric.
        cost_of: ratios of all parts -> cost of the model.
        most: what the cost may be.
        baseline: metric of the model as it is, taken as the score at ratio 1.
        tolerance: of the cost, as a share, at which bisection ends.

    Raises:
        ConfigError: no common score meets the cost.
    """
    curves = {name: sorted({**row, 1.0: baseline}.items()) for name, row in scores.items()}

    def at(score: float) -> dict[str, float]:
        return {name: _smallest_ratio(curve, score) for name, curve in curves.items()}

    low = min((score for curve in curves.values() for _, score in curve), default=baseline)
    high = max(baseline, max((score for curve in curves.values() for _, score in curve), default=baseline))
    best = at(low)
    if cost_of(best) > most * (1 + 1e-9):
        raise ConfigError(
            "target_comp_ratio",
            f"it cannot be met: with every layer at its smallest ratio the cost is {cost_of(best):,.0f}, "
            f"and {most:,.0f} are asked",
            "ask for more, raise num_comp_ratio_candidates, or ignore fewer modules",
        )
    for _ in range(60):
        middle = (low + high) / 2
        found = at(middle)
        cost = cost_of(found)
        if cost <= most:
            low, best = middle, found
            if cost >= most * (1 - tolerance):
                break
        else:
            high = middle
    return best


def _smallest_ratio(curve: Sequence[tuple[float, float]], score: float) -> float:
    """The smallest ratio whose interpolated score is at least ``score``; 1 where none is."""
    for i, (ratio, value) in enumerate(curve):
        if value >= score:
            if i == 0 or curve[i - 1][1] >= value:
                return ratio
            before, less = curve[i - 1]
            return before + (ratio - before) * (score - less) / (value - less)
    return 1.0


def save_scores(path: str | Path, scores: Mapping[str, Mapping[float, float]]) -> None:
    """Write scores as JSON."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    plain = {name: {f"{ratio:g}": score for ratio, score in row.items()} for name, row in scores.items()}
    write_json(Path(path), {"format": SCORES_FORMAT, "scores": plain})


def load_scores(path: str | Path, names: Iterable[str]) -> Scores:
    """Scores that :func:`save_scores` wrote; or a plain mapping of layer -> ratio -> score in JSON.

    Raises:
        ConfigError: it is a pickle, is damaged, or knows none of the layers ``names``: of another model.
    """
    remedy = "leave it out to measure anew, or name the JSON file of an earlier run"
    if str(path).endswith((".pkl", ".pickle")):
        raise ConfigError(str(path), "pickles are not read, as they can run code", remedy)
    found = read_document(Path(path), ConfigError, remedy=remedy)
    rows = found.get("scores", found) if isinstance(found, dict) else None
    try:
        assert isinstance(rows, dict)
        scores = {str(n): {float(r): float(s) for r, s in row.items()} for n, row in rows.items()}
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(str(path), "it holds no scores of layers by ratio", remedy) from error
    wanted = set(names)
    if scores and not wanted & scores.keys():
        known = ", ".join(list(scores)[:3])
        raise ConfigError(str(path), f"its scores are of another model: it knows {known}", remedy)
    return scores
