"""How much of each part is kept: AIMET's greedy search by the metric, and an exact choice from estimates.

A :class:`Space` has parts (a layer, a group of channels), each with options: left as it is, or smaller. Every option has
costs, which add up, and the error that it makes where it stands.

:func:`choose`: one option of every part is tried alone and the noise that it makes in the *outputs* is measured (not the metric);
the other options of the part are taken to make as much more or less as their own errors are larger or smaller. The
choice of least noise within the target is then found exactly (:class:`bitwright.precision.choice.Knapsack`), carried out and
measured; factors that explain the difference are fitted (:class:`~bitwright.precision.choice.Correction`), and the choice is made
again, until it stays the same. A metric, where there is one, is asked of the best choices only.

:func:`greedy`: the metric of every part at every ratio, then the largest score at which all parts meet the target (AIMET).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bitwright.compression.costs import check_cost
from bitwright.core.files import read_document
from bitwright.core.simulation.float_model import Undo
from bitwright.errors import CalibrationError, ConfigError
from bitwright.export.files.atomic import write_json
from bitwright.precision.choice import Choice, Correction, Cost, Knapsack, undominated
from bitwright.progress import progress as progress_bar

logger = logging.getLogger("bitwright")
Array = NDArray[Any]
_ROUNDS = 6  # choices whose noise is measured
_TRIED = 3  # choices whose metric is measured
_TINY = 1e-12
SCORES_FORMAT = "bitwright-compression-scores"


@dataclass(frozen=True)
class Option:
    """One way to have a part.

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
    """What is chosen for.

    Attributes:
        name: of the layer or group.
        options: the first leaves the part as it is.
    """

    name: str
    options: tuple[Option, ...]


class Space(Protocol):
    """A model whose parts can be had in several ways."""

    @property
    def parts(self) -> Sequence[Part]:
        """What is chosen for."""

    @property
    def fixed(self) -> Mapping[str, float]:
        """Costs of everything else."""

    def apply(self, choice: Sequence[int]) -> Undo:
        """Carry out an option for every part; the function returned takes it back."""

    def noise(self) -> float:
        """Noise over signal of the outputs of the model as it stands, against those of the original."""

    def runnable(self) -> Any:
        """What a metric is given."""


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
    """What a search found.

    Attributes:
        best: the choice.
        tried: all that were measured.
        sensitivity: part -> noise of the option that was tried alone.
        evaluations: of the metric.
        notes: what a reader should know.
    """

    best: Tried
    tried: tuple[Tried, ...]
    sensitivity: Mapping[str, float]
    evaluations: int
    notes: tuple[str, ...] = ()


class Tables:
    """Costs of a space as the exact choice wants them."""

    def __init__(self, space: Space, names: Iterable[str]) -> None:
        self.parts, self.width = list(space.parts), max((len(p.options) for p in space.parts), default=1)
        self.allowed = [list(range(len(part.options))) for part in self.parts]
        self.costs = {
            name: Cost(name, "", self._spread(lambda o, name=name: o.costs[name])[None], np.array([space.fixed[name]]))  # type: ignore[misc]
            for name in names
        }

    def _spread(self, value: Callable[[Option], float]) -> Array:
        table = np.zeros((len(self.parts), self.width))
        for i, part in enumerate(self.parts):
            table[i, : len(part.options)] = [value(option) for option in part.options]
        return table

    def noise(self, sensitivity: Sequence[float]) -> Array:
        """``[parts, options]``, from the noise per error of every part."""
        table = self._spread(lambda option: option.error) * np.asarray(sensitivity, float)[:, None]
        table[:, 0] = 0.0
        return np.asarray(table)


def bounds_of(space: Space, target: Mapping[str, float]) -> dict[str, float]:
    """Most of each cost, from ratios of the model as it is.

    Raises:
        ConfigError: a ratio is none, a cost is unknown, or no choice meets the target: says the nearest that can be met.
    """
    if not target:
        raise ConfigError("target", "it is empty", 'write {"macs": 0.5}')
    for name, ratio in target.items():
        check_cost(name)
        if not isinstance(ratio, (int, float)) or isinstance(ratio, bool) or not 0 < ratio <= 1:
            raise ConfigError("target", f"{ratio!r} is not a ratio of {name}", "write a number above 0, 1 at most")
        if space.parts and name not in space.parts[0].options[0].costs:
            known = ", ".join(space.parts[0].options[0].costs)
            raise ConfigError("target", f"{name} of single layers is not known here", f"use {known}")
    if not space.parts:
        raise ConfigError("target", "no layer can be made smaller", "see the reasons in the report's refused layers")
    tables = Tables(space, target)
    whole = {name: tables.costs[name].of([0] * len(tables.parts)) for name in target}
    for name, ratio in target.items():
        least = sum(min(o.costs[name] for o in part.options) for part in tables.parts) + space.fixed[name]
        if least > whole[name] * ratio * (1 + 1e-9):
            nearest = math.ceil(least / whole[name] * 1000) / 1000
            share = space.fixed[name] / whole[name]
            raise ConfigError(
                "target",
                f"{ratio:g} of the {name} cannot be met: the nearest that can is {nearest:.3f}"
                + (f", as {share:.1%} are in what cannot be made smaller" if share > 0.005 else ""),
                f"ask for {nearest:.3f} or more, give smaller ratios to choose from, or compress more layers",
            )
    return {name: whole[name] * ratio for name, ratio in target.items()}


def sensitivities(space: Space, progress: bool = True) -> list[float]:
    """Noise of the outputs per error of each part, each measured with one option alone: the one nearest to half of the cost."""
    found = []
    for i, part in enumerate(progress_bar(list(space.parts), "sensitivity of layers", enabled=progress)):
        others = [k for k in range(1, len(part.options)) if part.options[k].error > _TINY]
        if not others:
            found.append(0.0)
            continue
        middle = min(others, key=lambda k, part=part: abs(part.options[k].ratio - 0.5))  # type: ignore[misc]
        choice = [0] * len(space.parts)
        choice[i] = middle
        with _applied(space, choice):
            found.append(space.noise() / part.options[middle].error)
    return found


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
    sensitivity: Sequence[float] | None = None,
    progress: bool = True,
) -> Chosen:
    """The choice within the target that disturbs the outputs least; the model is left as it was.

    Args:
        space: what is chosen from.
        target: ratios of costs, as ``{"macs": 0.5}``; several are met together.
        metric: of the model; decides between the choices of least noise.
        lower_is_better: of the metric.
        deadline: seconds after which no further choice is measured.
        rounds: choices whose noise is measured, at most.
        tried: choices whose metric is measured, at most.
        sensitivity: what :func:`sensitivities` found before.
        progress: show a progress bar.

    Raises:
        ConfigError: see :func:`bounds_of`.
        CalibrationError: the metric is no finite number.
    """
    ends = time.monotonic() + (math.inf if deadline is None else deadline)
    notes = []
    bounds = bounds_of(space, target)
    tables = Tables(space, {**{n: 0 for n in space.parts[0].options[0].costs}, **target})
    if metric is not None:
        checked_score(metric, space.runnable(), "original")  # before any work is lost
    found = list(sensitivity) if sensitivity is not None else sensitivities(space, progress)
    correction = Correction(np.maximum(tables.noise(found), 0.0))
    knapsack = Knapsack(tables.allowed, tables.costs)
    seen: dict[Choice, Tried] = {}
    for _ in range(rounds):
        choice = knapsack.quietest(correction.noise(), bounds)
        if choice is None or choice in seen:
            break
        seen[choice] = _measured(space, tables, choice)
        correction.see(choice, seen[choice].noise)
        if time.monotonic() > ends:
            notes.append("the search ended because time was used up")
            break
    best = sorted(seen.values(), key=lambda t: t.noise)
    assert best, "bounds_of has found that some choice meets the target"
    evaluations = 0
    if metric is not None:
        best = _scored(space, best[:tried], metric, ends)
        evaluations = 1 + len(best)
        seen.update((one.choice, one) for one in best)
        best.sort(key=lambda t: t.score or 0.0, reverse=not lower_is_better)
    names = [part.name for part in tables.parts]
    return Chosen(best[0], tuple(seen.values()), dict(zip(names, found, strict=True)), evaluations, tuple(notes))


def _measured(space: Space, tables: Tables, choice: Choice) -> Tried:
    with _applied(space, choice):
        noise = space.noise()
    return Tried(choice, {name: cost.of(choice) for name, cost in tables.costs.items()}, noise)


def _scored(space: Space, choices: Iterable[Tried], metric: Callable[[Any], Any], ends: float) -> list[Tried]:
    """The metric of choices in their order, until the clock has passed ``ends``."""
    rated = []
    for one in choices:
        with _applied(space, one.choice):
            rated.append(replace(one, score=checked_score(metric, space.runnable(), "compressed")))
        if time.monotonic() > ends:
            break
    return rated


def front(
    space: Space,
    cost: str = "macs",
    *,
    points: int = 8,
    metric: Callable[[Any], Any] | None = None,
    sensitivity: Sequence[float] | None = None,
    progress: bool = True,
) -> list[Tried]:
    """Choices from the cheapest to the model as it is, none of which another one beats; each is measured once.

    Args:
        space: what is chosen from.
        cost: that is counted.
        points: how many bounds on it.
        metric: asked once per point.
        sensitivity: what :func:`sensitivities` found before.
        progress: show a progress bar.
    """
    tables = Tables(space, space.parts[0].options[0].costs if space.parts else (cost,))
    check_cost(cost)
    found = list(sensitivity) if sensitivity is not None else sensitivities(space, progress)
    noise = Cost.noise(np.maximum(tables.noise(found), 0.0))
    knapsack = Knapsack(tables.allowed, tables.costs)
    whole = tables.costs[cost].of([0] * len(tables.parts))
    least = sum(min(o.costs[cost] for o in part.options) for part in tables.parts) + space.fixed[cost]
    choices: dict[Choice, None] = {}
    for most in np.linspace(least, whole, points):
        choice = knapsack.quietest(noise, {cost: float(most)})
        if choice is not None:
            choices[choice] = None
    seen = []
    for choice in progress_bar(list(choices), "points of the front", enabled=progress):
        one = _measured(space, tables, choice)
        if metric is not None:
            with _applied(space, choice):
                one = replace(one, score=checked_score(metric, space.runnable(), "compressed"))
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
