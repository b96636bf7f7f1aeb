"""``bitwright.mixed_precision``: the cheapest precisions that are good enough, or the best within a budget."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.analysis.subject import Subject, open_subject
from bitwright.errors import CalibrationError, ConfigError
from bitwright.mixed.candidates import Candidate, as_candidates, highest
from bitwright.mixed.choice import Choice, Knapsack, total
from bitwright.mixed.correction import Correction
from bitwright.mixed.costs import Bits, Cost, all_costs
from bitwright.mixed.groups import Group, find_groups, operands, planned_bits
from bitwright.mixed.library import Library, noise_table
from bitwright.mixed.measure import Metric, Noise, Score
from bitwright.mixed.result import MixedPrecision, Point, alone, decibel
from bitwright.mixed.start import simulation_of

logger = logging.getLogger("bitwright")

CANDIDATES = ("w8a8", "w8a16", "w4a8", "w4a16")
_FRONT = 24  # points of the front that is drawn
_START_DB = 15.0  # where most metrics begin to suffer
_TRIES = 6  # bounds between two that were tried, before the front counts as exhausted
_LOST = 3  # bad points after which the quietest one is measured
_SAFER = 2.0  # how much less noise the next point has, when a good one is not borne out
_MOST_CHECKS = 4  # points that are put to the samples held back


def mixed_precision(
    model: Any,
    data: Iterable[Any],
    candidates: Iterable[Any] = CANDIDATES,
    *,
    cost: str = "weight_bytes",
    budget: float | Mapping[str, float] | None = None,
    metric: str | Callable[[Any], Any] | None = None,
    lower_is_better: bool = False,
    allowed_drop: float | str | None = None,
    min_sqnr: float | None = None,
    labels: Any = None,
    evaluation_data: Iterable[Any] | None = None,
    times: Any = None,
    evaluations: int = 12,
    deadline: float | None = None,
    confidence: float = 0.9,
    rounding: bool = True,
    samples: int = 32,
    seed: int = 0,
    config_file: Any = None,
    folder: str | Path | None = None,
    filename_prefix: str = "model",
) -> MixedPrecision:
    """Choose the precision of every layer.

    What each quantizer costs the outputs is estimated in one run forward and one back per candidate; costs add up; the choice
    of one candidate per group is an integer program that is solved exactly; a few points are then measured, each where it
    tells most, and the estimates are corrected by what was seen.

    Args:
        model: a calibrated simulation of either front end (changed in place), or a model: a module, a path, a proto.
        data: batches without labels; every fifth is held out to measure the outputs on.
        candidates: presets by name or value, or AIMET's pairs.
        cost: what is to be small: ``weight_bytes``, ``bit_ops``, ``activation_bytes``, or ``ms`` (with ``times``).
        budget: the most that may be spent: of ``cost``, or cost -> bound. A bound up to 1 is a share of what the candidate with
            the most bits costs.
        metric: ``"accuracy"``, ``"agreement"``, ``"kl"``, or a function of the model (of the session in ONNX) that returns a
            number or, better, one value per sample; half of the samples are then held back for the last word.
        lower_is_better: for a function such as a perplexity.
        allowed_drop: of the metric against float: in its units, or ``"1%"`` of its float value. Of the points that keep within
            it the cheapest is taken.
        min_sqnr: instead of a metric: the least SQNR of the outputs, in dB.
        labels: one per sample of ``evaluation_data``, for ``accuracy``.
        evaluation_data: what named metrics are measured on; ``data`` by default.
        times: milliseconds per layer or operator type and candidate, or the path of a JSON file of them.
        evaluations: of the metric, at most; parts of the data count as parts.
        deadline: seconds, from now.
        confidence: with which the drop on samples held back is within ``allowed_drop``.
        rounding: round weights with error feedback (``gptq``) at each width, instead of each to its nearest code.
        samples: rows that the estimates are taken on.
        seed: of what is random.
        config_file: rules for a model that is given; its ``supported_kernels`` say which candidates an operator may have.
        folder: where the best point so far is exported to, each time there is a better one.
        filename_prefix: stem of the files.

    Returns:
        The result; its table shows every point that was measured, its ``sim`` works with the choice.

    Raises:
        ConfigError: nothing is asked for, a budget that no choice fits (the message says what is possible), a metric that is
            constant or has the other direction, a deadline shorter than one evaluation, or a table of times with holes.
        CalibrationError: the simulation is not calibrated, or ``data`` is empty.
        KeyboardInterrupt: Ctrl-C before there was a point; later it ends the search with the best one.
    """
    begin = time.monotonic()
    wanted = as_candidates(candidates)
    _check_wish(budget, metric, allowed_drop, min_sqnr)
    batches = _batches(data)
    sim = simulation_of(model, batches, wanted[highest(wanted)], config_file)
    subject = open_subject(sim)
    restore = subject.remember(parameters=True)
    try:
        with subject.exclusive():
            search = _Search(subject, wanted, batches, begin, deadline, rounding, samples, seed, times)
            bounds = search.bounds(cost, budget)
            tester = None
            if metric is not None:
                tester = Metric(
                    subject, metric, lower_is_better=lower_is_better, allowed=allowed_drop, labels=labels, seed=seed,
                    data=batches if evaluation_data is None else list(evaluation_data),
                )  # fmt: skip
                _check_deadline(deadline, begin, tester.seconds)
            goal = _Goal(cost, bounds, tester, min_sqnr, evaluations, confidence)
            save = _saver(sim, folder, filename_prefix)
            return search.run(goal, save)
    except BaseException:
        restore()
        raise


def _check_wish(budget: Any, metric: Any, allowed_drop: Any, min_sqnr: float | None) -> None:
    if budget is None and allowed_drop is None and min_sqnr is None:
        raise ConfigError(
            "mixed_precision",
            "neither a budget nor a quality is asked for",
            "pass budget=0.6 (share of the cost), allowed_drop=0.01 with a metric, or min_sqnr=20",
        )
    if allowed_drop is not None and metric is None:
        raise ConfigError(
            "allowed_drop",
            "there is no metric that could drop",
            "pass metric=..., or min_sqnr=... in dB instead",
        )


def _check_deadline(deadline: float | None, begin: float, seconds: float) -> None:
    left = math.inf if deadline is None else deadline - (time.monotonic() - begin)
    if left < seconds:
        raise ConfigError(
            "deadline",
            f"one evaluation of the metric takes {seconds:.3g} s, and {max(left, 0):.3g} s are left of {deadline:.3g} s",
            "allow more time, or let the metric look at fewer samples",
        )


def _batches(data: Iterable[Any]) -> list[Any]:
    if isinstance(data, Mapping) or hasattr(data, "shape") or not isinstance(data, Iterable):
        raise CalibrationError(
            "mixed_precision", f"data is a {type(data).__name__}, not a list of batches", "write [batch] for a single batch"
        )  # fmt: skip
    batches = list(data)
    if not batches:
        raise CalibrationError(
            "mixed_precision",
            "the data held no batch",
            "pass a non-empty list; a few hundred samples are enough",
        )
    return batches


def _saver(sim: Any, folder: str | Path | None, prefix: str) -> Callable[[], None]:
    if folder is None:
        return lambda: None
    target = Path(folder)
    return lambda: sim.export(target, prefix) and None


@dataclass(frozen=True)
class _Goal:
    """What is asked for."""

    cost: str
    bounds: Mapping[str, float]
    metric: Metric | None
    min_sqnr: float | None
    evaluations: int
    confidence: float

    @property
    def quality(self) -> bool:
        """Whether the cheapest of the good points is wanted, not the best within the budget."""
        return self.min_sqnr is not None or (self.metric is not None and self.metric.allowed is not None)

    def good(self, seen: _Seen) -> bool:
        """Whether a point keeps within what is allowed, by the samples that choose."""
        if self.min_sqnr is not None and decibel(seen.noise) < self.min_sqnr:
            return False
        if self.metric is None or self.metric.allowed is None:
            return True
        return seen.score is not None and seen.score.share == 1 and seen.drop <= self.metric.allowed

    def rank(self, seen: _Seen) -> tuple[float, ...]:
        """The smaller the better, among points within the budget."""
        if self.quality:
            return (0.0 if self.good(seen) else 1.0, seen.cost if self.good(seen) else seen.drop, seen.noise)
        return (seen.drop, seen.noise) if self.metric is not None else (seen.noise,)


@dataclass
class _Seen:
    """A point that was measured."""

    choice: Choice
    cost: float
    noise: float
    score: Score | None = None
    drop: float = math.inf


@dataclass
class _Book:
    """The points measured so far."""

    goal: _Goal
    seen: dict[Choice, _Seen] = field(default_factory=dict)
    best: _Seen | None = None

    def add(self, point: _Seen) -> bool:
        """Whether it is the best so far."""
        self.seen[point.choice] = point
        if self.best is None or self.goal.rank(point) < self.goal.rank(self.best):
            self.best = point
            return True
        return False


class _Search:
    """The parts of one search."""

    def __init__(
        self,
        subject: Subject,
        candidates: Sequence[Candidate],
        data: Sequence[Any],
        begin: float,
        deadline: float | None,
        rounding: bool,
        samples: int,
        seed: int,
        times: Any,
    ) -> None:
        self._subject, self.candidates, self._begin, self._deadline = subject, candidates, begin, deadline
        sim, least = subject.sim, planned_bits(subject.sim)
        self._noise = Noise(subject, data)
        kernels = operands(sim)
        allowed = sim.rules.allowed_kernels
        self.groups = find_groups(sim, candidates, allowed)
        rest = list(self._noise.rest)
        self.library = Library(subject, self.groups, candidates, least, rest, rounding=rounding)
        self.groups = _without(self.groups, self.library.refused, candidates)
        table, self._together, unknown = noise_table(self.library, rest, samples=samples, seed=seed)
        self.correction = Correction(table)
        self._costs: dict[str, Cost] = all_costs(
            Bits(sim, self.groups, candidates, least), kernels, times, ()
        )
        self._times = times
        self.knapsack = Knapsack([g.candidates for g in self.groups], self._costs)
        self._trusted = False
        self.notes = [f"SQNR is measured {self._noise.where}"]
        self._frozen = _frozen_weights(sim)
        if self._frozen:
            self.notes.append(self._frozen)
        if unknown:
            self.notes.append(
                f"what {len(unknown)} sites cost is not known, as no derivative leads from them to an output"
            )
        for c, measured in self._together:
            self.correction.see((c,) * len(self.groups), measured)

    def bounds(self, cost: str, budget: float | Mapping[str, float] | None) -> dict[str, float]:
        """Cost -> the most that may be spent, in its own unit.

        Raises:
            ConfigError: an unknown cost, or less than the cheapest choice needs.
        """
        given = (
            {} if budget is None else dict(budget) if isinstance(budget, Mapping) else {cost: float(budget)}
        )
        if {cost, *given} - self._costs.keys():
            all_costs(
                Bits(self._subject.sim, self.groups, self.candidates, {}), {}, self._times, [cost, *given]
            )
        found = {}
        for name, most in given.items():
            known = self._costs[name]
            dearest = known.of(
                [max(g.candidates, key=lambda c: sum(self.candidates[c].bits)) for g in self.groups]
            )
            bound = most * dearest if most <= 1 else most
            cheapest = known.of(self.knapsack.least(name))
            if not bound >= cheapest * (1 - 1e-9):
                raise ConfigError(
                    "budget",
                    f"no choice of candidates fits {name} of {bound:.6g} {known.unit}; the least possible is "
                    f"{cheapest:.6g} ({cheapest / dearest:.3g} of the candidate with the most bits)"
                    + (f"; {self._frozen}" if self._frozen else ""),
                    "give the float model instead of this simulation"
                    if self._frozen
                    else "raise the budget, or add a candidate of fewer bits",
                )
            found[name] = bound
        return found

    # -- searching

    def run(self, goal: _Goal, save: Callable[[], None]) -> MixedPrecision:
        """Measure points until nothing more can be learnt, or there is no more to spend."""
        book = _Book(goal)
        try:
            for choice in chain(self._proposals(goal, book), self._safer(goal, book)):
                if book.seen and self._spent(goal):
                    self.notes.append("the search ended because evaluations or time were used up")
                    break
                if self._measure(choice, goal, book):
                    save()
        except KeyboardInterrupt:
            if book.best is None:
                raise
            self.notes.append("the search was interrupted; this is the best point it had")
        return self._finish(goal, book, save)

    def _spent(self, goal: _Goal) -> bool:
        used = goal.metric.evaluations if goal.metric is not None else self._noise.runs
        longest = goal.metric.seconds if goal.metric is not None else 0.0
        left = math.inf if self._deadline is None else self._deadline - (time.monotonic() - self._begin)
        return used > goal.evaluations - 1 + 1e-9 or left < longest

    def _measure(self, choice: Choice, goal: _Goal, book: _Book) -> bool:
        """Measure one point; whether it is the best so far."""
        self.library.apply(choice)
        point = _Seen(choice, self._costs[goal.cost].of(choice), self._noise.measure())
        self.correction.see(choice, point.noise)
        if goal.metric is not None and not (
            goal.min_sqnr is not None and decibel(point.noise) < goal.min_sqnr
        ):
            point.score = goal.metric.measure()
            point.drop = goal.metric.drop(point.score)
            if not self._trusted and goal.metric.suspicious(point.score, point.noise):
                self._check_metric(goal.metric)
                self.library.apply(choice)
            self._trusted = True
        logger.info(
            "%s: cost %.6g, SQNR %.1f dB, drop %.4g",
            self._label(choice),
            point.cost,
            decibel(point.noise),
            point.drop,
        )
        better = book.add(point)
        return better and (goal.good(point) or not goal.quality)

    def _check_metric(self, metric: Metric) -> None:
        """Put the metric to outputs that are noise; once, where its first value looks strange."""
        self.library.ruin()
        try:
            metric.check_direction(metric.measure(), self._noise.measure())
        finally:
            self.library.restore()

    def _proposals(self, goal: _Goal, book: _Book) -> Iterable[Choice]:
        if not goal.quality:
            yield from self._within_budget(goal, book)
            return
        noise = self.correction.noise()
        cheapest = self.knapsack.cheapest(noise, math.inf, goal.cost, goal.bounds) or self.knapsack.least(
            goal.cost
        )
        yield cheapest
        if goal.good(book.seen[cheapest]):
            return
        yield from self._between(goal, book)

    def _within_budget(self, goal: _Goal, book: _Book) -> Iterable[Choice]:
        """The quietest choice by the estimates as corrected so far, until it stays the same."""
        while True:
            choice = self.knapsack.quietest(self.correction.noise(), goal.bounds)
            if choice is None or choice in book.seen:
                return
            yield choice

    def _between(self, goal: _Goal, book: _Book) -> Iterable[Choice]:
        """Bisect the noise between what is good and what is not; each time the cheapest choice below the bound."""
        tries = 0
        while tries < _TRIES:
            noise = self.correction.noise()
            good, bad = self._bracket(goal, book)
            quietest = self.knapsack.quietest(noise, goal.bounds)
            if quietest is None:
                return
            floor = max(total(noise, quietest), 1e-30)
            last = good is None and bad is not None and bad <= floor * (1 + 1e-6)
            lost = good is None and len(book.seen) >= _LOST
            if (last or lost) and quietest not in book.seen:
                yield quietest  # is there a good point at all
                if last or not goal.good(book.seen[quietest]):
                    return
                continue
            if last:
                return
            low, high = _ends(good, bad, floor, goal.min_sqnr)
            middle = _middle(low, high, good is None and tries == 0)
            choice = self.knapsack.cheapest(noise, max(middle, floor * (1 + 1e-9)), goal.cost, goal.bounds)
            if choice is not None and (choice in book.seen or not self._worth(choice, goal, book)):
                tries += 1
                choice = self._next(noise, low, high, goal, book)
            if choice is None:
                return
            yield choice

    def _safer(self, goal: _Goal, book: _Book) -> Iterable[Choice]:
        """Better points than the best one, while the samples held back do not bear it out."""
        while goal.quality and self._last_word(goal, book)[0] is None:
            noise = self.correction.noise()
            seen = [total(noise, p.choice) for p in book.seen.values()]
            quietest = self.knapsack.quietest(noise, goal.bounds)
            if quietest is None or quietest in book.seen:
                return
            most = max(min(seen) / _SAFER, total(noise, quietest) * (1 + 1e-9))
            choice = self.knapsack.cheapest(noise, most, goal.cost, goal.bounds)
            if choice is None or choice in book.seen:
                choice = quietest
            yield choice

    def _bracket(self, goal: _Goal, book: _Book) -> tuple[float | None, float | None]:
        """The largest noise of a good point, and the smallest of a bad one that is more; in corrected estimates."""
        noise = self.correction.noise()
        good = [total(noise, p.choice) for p in book.seen.values() if goal.good(p)]
        top = max(good, default=None)
        bad = [total(noise, p.choice) for p in book.seen.values() if not goal.good(p)]
        above = [n for n in bad if top is None or n > top]
        return top, min(above, default=None)

    def _worth(self, choice: Choice, goal: _Goal, book: _Book) -> bool:
        """Whether a point could become the best one: it costs less, or there is none yet."""
        best = book.best
        return (
            best is None or not goal.good(best) or self._costs[goal.cost].of(choice) < best.cost * (1 - 1e-9)
        )

    def _next(self, noise: Any, low: float, high: float, goal: _Goal, book: _Book) -> Choice | None:
        """Some choice between two bounds that was not measured and is worth it."""
        for most in np.geomspace(low, high, 10)[1:-1][::-1]:
            choice = self.knapsack.cheapest(noise, float(most), goal.cost, goal.bounds)
            if choice is not None and choice not in book.seen and self._worth(choice, goal, book):
                return choice
        return None

    # -- the end

    def _finish(self, goal: _Goal, book: _Book, save: Callable[[], None]) -> MixedPrecision:
        chosen, interval = self._last_word(goal, book)
        if chosen is None:
            self.notes.append(self._why_none(goal, book))
        final = chosen or book.best
        assert final is not None
        self.library.apply(final.choice)
        if chosen is not None and chosen is not book.best:
            save()
        points = self._points(goal, book, chosen)
        metric = goal.metric
        return MixedPrecision(
            self._subject.sim,
            goal.cost,
            tuple(c.name for c in self.candidates),
            self.groups,
            points,
            next((p for p in points if p.chosen), None),
            None
            if metric is None
            else {"name": metric.name, "float": metric.reference.mean, "better": metric.better},
            interval,
            metric.evaluations if metric is not None else 0.0,
            time.monotonic() - self._begin,
            tuple(self.notes),
            alone(self.groups, [c.name for c in self.candidates], self.correction.noise()),
        )

    def _last_word(self, goal: _Goal, book: _Book) -> tuple[_Seen | None, dict[str, Any] | None]:
        """The best point whose drop on the samples held back is within what is allowed, and its interval."""
        good = sorted((p for p in book.seen.values() if goal.good(p)), key=goal.rank)
        if not good:
            return None, None
        metric = goal.metric
        if metric is None or good[0].score is None:
            return good[0], None
        if metric.allowed is None or metric.held_back == 0:
            found = metric.interval(good[0].score, goal.confidence)
            return good[0], {**_interval(found), "held_back": metric.held_back}
        return self._held_back(goal, metric, good)

    def _held_back(
        self, goal: _Goal, metric: Metric, good: Sequence[_Seen]
    ) -> tuple[_Seen | None, dict[str, Any] | None]:
        """Test the cheapest points first; each test takes its share of the doubt, which is on one side only."""
        assert metric.allowed is not None
        tested = good[:_MOST_CHECKS]
        doubt = 2 * (1 - goal.confidence) / _MOST_CHECKS
        first: dict[str, Any] | None = None
        for point in tested:
            assert point.score is not None
            found = metric.interval(point.score, 1 - doubt)
            told = {**_interval(found), "held_back": metric.held_back, "allowed": metric.allowed}
            first = first or told
            if metric.worst(found) <= metric.allowed:
                return point, told
        return None, first

    @staticmethod
    def _why_none(goal: _Goal, book: _Book) -> str:
        if not any(goal.good(p) for p in book.seen.values()):
            return "no point keeps within what is allowed; the simulation has the best one"
        held_back = goal.metric.held_back if goal.metric is not None else 0
        return (
            f"points keep within the allowed drop on the samples that choose; on the {held_back} held back none does "
            f"with a confidence of {goal.confidence:.0%}: give more samples, or allow more"
        )

    def _points(self, goal: _Goal, book: _Book, chosen: _Seen | None) -> tuple[Point, ...]:
        noise = self.correction.noise()
        found = [
            Point(
                self._label(p.choice),
                {g.name: self.candidates[c].name for g, c in zip(self.groups, p.choice, strict=True)},
                {name: cost.of(p.choice) for name, cost in self._costs.items()},
                decibel(total(noise, p.choice)),
                decibel(p.noise),
                None if p.score is None else p.score.mean,
                None if p.score is None else p.drop,
                0.0 if p.score is None else p.score.share,
                chosen=p is chosen,
            )
            for p in book.seen.values()
        ]
        front = self.knapsack.front(noise, goal.cost, goal.bounds, _FRONT)
        found += [
            Point(
                self._label(choice),
                {g.name: self.candidates[c].name for g, c in zip(self.groups, choice, strict=True)},
                {name: cost.of(choice) for name, cost in self._costs.items()},
                decibel(total(noise, choice)),
            )
            for choice in front
            if choice not in book.seen
        ]
        found.sort(key=lambda p: (p.costs[goal.cost], -p.predicted_db))
        return tuple(replace(p, front=_on_front(p, found, goal.cost)) for p in found)

    def _label(self, choice: Choice) -> str:
        names = [self.candidates[c].name for c in choice]
        if len(set(names)) == 1:
            return names[0]
        counts = {name: names.count(name) for name in dict.fromkeys(c.name for c in self.candidates)}
        return " ".join(f"{n}x{name}" for name, n in counts.items() if n)


def _frozen_weights(sim: Any) -> str:
    """Which weights keep their precision because a method or a file froze them; empty if none does."""
    found = [name for name, site in sim.quantizers.items() if site.role == "weight" and site.frozen]
    if not found:
        return ""
    return (
        f"{len(found)} weights, such as {found[0]}, keep the width at which they were rounded and frozen, as `quantize` "
        "leaves them: pass the float model to choose their width too"
    )


def _without(
    groups: Sequence[Group], refused: Mapping[int, Mapping[int, str]], candidates: Sequence[Candidate]
) -> tuple[Group, ...]:
    """Groups without the candidates that a site of theirs cannot have.

    Raises:
        ConfigError: a group is left with none.
    """
    found = []
    for i, group in enumerate(groups):
        why = {candidates[c].name: text for c, text in refused.get(i, {}).items()}
        left = tuple(c for c in group.candidates if candidates[c].name not in why)
        if not left:
            reasons = {**group.refused, **why}
            raise ConfigError(
                group.name,
                f"none of the candidates is possible: {'; '.join(f'{n}: {t}' for n, t in reasons.items())}",
                "add a candidate that its kernel has, or freeze its sites: sim.quantizers[...].frozen = True",
            )
        found.append(replace(group, candidates=left, refused={**group.refused, **why}))
    return tuple(found)


def _ends(good: float | None, bad: float | None, floor: float, min_sqnr: float | None) -> tuple[float, float]:
    """Noise between which the next point lies; what no point has shown yet is guessed from the other end."""
    low = good if good is not None else min(floor, (bad or 1.0) / 2)
    high = bad if bad is not None else max(low * 2, 1.0)
    return low, high if min_sqnr is None else min(high, 10 ** (-min_sqnr / 10) * 1.26)


def _middle(low: float, high: float, first: bool) -> float:
    """Between two bounds on the noise; the first time where most metrics begin to suffer."""
    start = 10 ** (-_START_DB / 10)
    return start if first and low < start < high else math.sqrt(low * high)


def _on_front(point: Point, points: Sequence[Point], cost: str) -> bool:
    def value(p: Point) -> float:
        return p.drop if p.drop is not None else -(p.sqnr_db if p.sqnr_db is not None else -math.inf)

    if point.sqnr_db is None:
        return False
    peers = [p for p in points if p.sqnr_db is not None and (p.drop is None) == (point.drop is None)]
    mine = (point.costs[cost], value(point))
    return not any(
        (p.costs[cost], value(p)) != mine and p.costs[cost] <= mine[0] and value(p) <= mine[1] for p in peers
    )


def _interval(difference: Any) -> dict[str, Any]:
    names = ("estimate", "low", "high", "confidence", "n", "test", "text")
    return {name: getattr(difference, name) for name in names}
