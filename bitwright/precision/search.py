"""``bitwright.mixed_precision``: the cheapest precisions that are good enough, or the best within a budget.

:class:`Explorer` prepares everything that a search needs once and measures points one by one; :class:`Proposals` chooses the
next point, where it tells most about the cheapest good one; :func:`last_word` decides on samples that chose nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.analysis.subject import Subject, listed, open_subject
from bitwright.core.graph.cost import as_bound
from bitwright.core.numerics.spec import Preset
from bitwright.errors import ConfigError, checks_arguments
from bitwright.export.files.manifest import Fingerprint
from bitwright.export.files.run_state import read_run_state, write_run_state
from bitwright.metrics.labels import inputs_and_labels, inputs_of
from bitwright.metrics.metric import find_metric, is_function, needs_labels
from bitwright.precision.candidates import (
    Candidate,
    as_candidates,
    coarser,
    distinct,
    find_groups,
    highest,
    operands,
    planned_bits,
    simulation_of,
    ties,
    without,
)
from bitwright.precision.choice import Choice, Correction, Cost, Interactions, Knapsack, told
from bitwright.precision.costs import Bits, all_costs
from bitwright.precision.measure import Metric, Noise, Score, one_sided
from bitwright.precision.prepared import PreparedPrecisions, noise_table
from bitwright.precision.result import Book, Goal, MixedPrecision, Point, Seen, alone, confirmed, decibel


def last_word(book: Book) -> tuple[Seen | None, dict[str, Any] | None]:
    """The cheapest good point that the held-back samples confirm, with the interval of its drop on them.

    No point is added to a search after this test: see :func:`confirmed`.
    """
    goal = book.goal
    good, metric = book.good(), goal.metric
    if not good:
        return None, None
    best = min(good, key=goal.rank)
    if metric is None or best.score is None:
        return best, None
    names = ("estimate", "low", "high", "confidence", "n", "test", "text")
    if metric.allowed is None or metric.held_back == 0:
        found = metric.interval(best.score, goal.confidence)
        return best, {**{name: getattr(found, name) for name in names}, "held_back": metric.held_back}
    told: list[dict[str, Any]] = []

    def passes(point: Seen) -> bool:
        assert point.score is not None
        found = metric.interval(point.score, one_sided(goal.confidence))
        told.append({name: getattr(found, name) for name in names})
        return metric.worst(found) <= allowed

    allowed = metric.allowed
    passed = confirmed(good, lambda p: (p.noise, p.cost), passes)
    chosen = min(passed, key=goal.rank, default=None)
    place = next((i for i, point in enumerate(passed) if point is chosen), 0)
    return chosen, {**told[place], "held_back": metric.held_back, "allowed": allowed}


def why_none(book: Book) -> str:
    """The reason why no point meets the goal."""
    goal = book.goal
    if not any(goal.within(p, p.drop) for p in book.seen.values()):
        return "no point keeps within what is allowed; the simulation has the best one"
    held_back = goal.metric.held_back if goal.metric is not None else 0
    return (
        f"points keep within the allowed drop on the samples that choose; on the {held_back} held back none does "
        f"with a confidence of {goal.confidence:.0%}: give more samples, or allow more"
    )


_TRIES = 4  # bounds between two that were tried, before the front counts as exhausted
_LOST = 3  # bad points after which the quietest one is measured
_SAFER = 2.0  # how much less noise the next point has, where none is good beyond doubt
_GAIN = 2e-3  # of the cost, that a point must promise
_BETWEEN = 10  # bounds on the noise from a good to a bad point, of which the inner ones are tried
_SINGLE = 4  # groups lowered alone from the best point without success, before the search ends
_OFF = 4.0  # how much less noise such a point may add than was estimated
_STEPS = 10  # such points at most
_LITTLE = 1e-4  # of the cost, that one of them must save
_AIM = 0.9  # share of what is allowed that a point is aimed at
_STEP = (0.01, 0.7)  # by how much the noise goes down in one step, while no point is good
_ROOM = 0.8  # share of what is allowed that a good point uses, below which estimates are doubted
_FARTHER = 2.0  # times the noise of a bad point that is tried then
_INSIDE = (0.15, 0.85)  # of the way from a good to a bad point


@dataclass(frozen=True)
class Proposals:
    """The points of one search, each chosen by what the earlier ones showed.

    Attributes:
        knapsack: the choices.
        correction: estimates of their noise.
        book: what was measured, and for what.
    """

    knapsack: Knapsack
    correction: Correction
    book: Book

    def points(self) -> Iterable[Choice]:
        """Yield the points to measure; the caller measures each before it asks for the next."""
        goal, seen = self.book.goal, self.book.seen
        if not goal.quality:  # the quietest choice by the estimates as corrected so far, until it stays the same
            while (quietest := self._quietest(self.correction.noise())) is not None and quietest not in seen:
                yield quietest
            return
        noise = self.correction.noise()
        first = self._cheapest(noise, goal.most_noise) or self._quietest(noise)  # of those that should be quiet enough
        assert first is not None  # the bounds of the goal leave a choice
        yield first
        if goal.min_sqnr is not None or not goal.good(seen[first]):
            yield from self._between()
        yield from self._safer()
        yield from self._single()

    def _between(self) -> Iterable[Choice]:
        """Bisect the noise at which points cease to be good; each step takes the cheapest choice below it."""
        seen, tries = self.book.seen, 0
        while tries < _TRIES:
            noise = self.correction.noise()
            good, bad = self._bracket(noise)
            quietest = self._quietest(noise)
            if quietest is None:
                return
            floor = max(noise.of(quietest), 1e-30)
            if good is None and self._at_the_end(noise, bad, floor):
                yield from () if quietest in seen else (quietest,)  # is there a good point at all
                if not self.book.good():
                    return
                continue
            choice = self._cheapest(noise, max(self._aim(noise, good, bad), floor * (1 + 1e-9)))
            if choice is not None and not self._worth(choice):
                tries += 1
                choice = next(filter(self._worth, self._others(noise, good, bad, floor)), None)
            if choice is None:
                return
            yield choice

    def _at_the_end(self, noise: Cost, bad: Seen | None, floor: float) -> bool:
        """Whether to try the quietest point: no other is left, or many were bad."""
        last = bad is not None and noise.of(bad.choice) <= floor * (1 + 1e-6)
        return last or len(self.book.seen) >= _LOST

    def _others(self, noise: Cost, good: Seen | None, bad: Seen | None, floor: float) -> Iterable[Choice]:
        """Choices between two points, then some that are estimated noisier than a bad one.

        For those the good point as it was measured counts: its noise may grow until its loss is what is allowed.
        """
        low = floor if good is None else noise.of(good.choice)
        high = max(low * 2, 1.0) if bad is None else noise.of(bad.choice)
        bounds = list(np.geomspace(low, max(high, low), _BETWEEN)[1:-1][::-1])
        if good is not None and bad is not None and self.book.goal.excess(good) <= _ROOM:
            most = noise.of(good.choice) * _AIM / self.book.goal.excess(good)
            bounds += list(np.geomspace(high, max(min(most, high * _FARTHER), high), 4)[1:])
        found = (self._cheapest(noise, float(most)) for most in bounds)
        return (choice for choice in found if choice is not None)

    def _bracket(self, noise: Cost) -> tuple[Seen | None, Seen | None]:
        """The noisiest good point, and the least noisy bad point above it."""

        def loud(point: Seen) -> float:
            return noise.of(point.choice)

        good = max(self.book.good(), key=loud, default=None)
        bad = [p for p in self.book.seen.values() if not self.book.goal.good(p)]
        above = [p for p in bad if good is None or loud(p) > loud(good)]
        return good, min(above, key=loud, default=None)

    def _aim(self, noise: Cost, good: Seen | None, bad: Seen | None) -> float:
        """The noise at which the predicted loss equals the allowed one: log-log interpolation between two points.

        A loss grows about as the noise does while both are small, which gives the line where there is one point only.
        """
        goal = self.book.goal
        if bad is None:
            assert good is not None
            return noise.of(good.choice) * max(_AIM / goal.excess(good), 1.0)
        high, worse = noise.of(bad.choice), min(goal.excess(bad), 1e3)
        if good is None:
            return high * min(max(_AIM / worse, _STEP[0]), _STEP[1])
        low, better = max(noise.of(good.choice), 1e-30), goal.excess(good)
        way = math.log(_AIM / better) / math.log(worse / better) if worse > better else 0.5
        return low * (high / low) ** min(max(way, _INSIDE[0]), _INSIDE[1])

    def _worth(self, choice: Choice) -> bool:
        """Whether a point is unmeasured and could become the best: it costs less, or there is none yet."""
        best, goal = self.book.best, self.book.goal
        if choice in self.book.seen:
            return False
        if best is None or not goal.good(best):
            return True
        return self.knapsack.costs[goal.cost].of(choice) < best.cost * (1 - _GAIN)

    def _safer(self) -> Iterable[Choice]:
        """Quieter points, until one is likely to be confirmed by held-back samples, which are not used here."""
        goal = self.book.goal
        while goal.metric is not None and goal.metric.held_back and not any(map(goal.safe, self.book.good())):
            noise = self.correction.noise()
            seen = [noise.of(p.choice) for p in self.book.seen.values()]
            quietest = self._quietest(noise)
            if quietest is None or quietest in self.book.seen:
                return
            choice = self._cheapest(noise, max(min(seen) / _SAFER, noise.of(quietest) * (1 + 1e-9)))
            yield quietest if choice is None or choice in self.book.seen else choice

    def _single(self) -> Iterable[Choice]:
        """The best point with one group lowered, which the joint estimates may have missed."""
        failed = steps = 0
        while failed < _SINGLE and steps < _STEPS:
            best = self.book.best
            if best is None or not self.book.goal.good(best):
                return
            should, others = self._lowered(best)
            if not should and not others:
                return
            yield (should or others)[0]
            steps += 1
            failed = 0 if self.book.best is not best else failed + 1

    def _lowered(self, best: Seen) -> tuple[list[Choice], list[Choice]]:
        """Points with one group lowered: those estimated good by cost, then the others by noise."""
        goal, noise, costs = self.book.goal, self.correction.noise(), self.knapsack.costs
        coarser = self.correction.coarser
        found = [
            choice
            for choice in self.knapsack.neighbours(best.choice, noise)
            if costs[goal.cost].of(choice) <= best.cost * (1 - _LITTLE)
            and not self._hopeless(choice)
            and all(costs[name].of(choice) <= most for name, most in goal.bounds.items())
        ]
        finer = {choice: sum(len(coarser[c]) for c in choice) if coarser else 0 for choice in found}
        found.sort(key=lambda c: (noise.of(c), -finer[c]))  # the same for fewer bits is tried last
        room = best.noise / goal.excess(best) - best.noise
        added = {choice: noise.of(choice) - noise.of(best.choice) for choice in found}
        return (
            sorted((c for c in found if added[c] <= room), key=costs[goal.cost].of),
            [c for c in found if room < added[c] <= _OFF * room],
        )

    def _hopeless(self, choice: Choice) -> bool:
        """Whether a point, or a bad one that is nowhere coarser, was measured."""
        coarser = self.correction.coarser
        bad = [p.choice for p in self.book.seen.values() if not self.book.goal.good(p)]
        return choice in self.book.seen or any(
            all(mine == other or mine in coarser[other] for mine, other in zip(choice, known, strict=True))
            for known in (bad if coarser else ())
        )

    def _cheapest(self, noise: Cost, most: float) -> Choice | None:
        return self.knapsack.cheapest(noise, most, self.book.goal.cost, self.book.goal.bounds)

    def _quietest(self, noise: Cost) -> Choice | None:
        return self.knapsack.quietest(noise, self.book.goal.bounds)


logger = logging.getLogger("bitwright")

#: notes of results that more time could change
OUT_OF_TIME = "the search ended because time was used up"
INTERRUPTED = "the search was interrupted; this is the best point it had"
_SHARE = 1e-3  # of the noise at the most bits, that a group has at least
_FRONT = 24  # points of the front that is drawn


class Measured:
    """Measurements stored in a folder, from which the same search continues.

    Args:
        path: of the JSON file; ``None`` keeps nothing.
        identity: hash of what decides the results. Measurements of another search are left behind.

    Attributes:
        noise: state of the simulation -> noise over signal of its outputs.
        scores: the same -> the metric.
        found: how many of either were there.

    Raises:
        ConfigError: the file is damaged.
    """

    def __init__(self, path: Path | None = None, identity: str = "") -> None:
        self._path, self._identity = path, identity
        self.noise: dict[str, float] = {}
        self.scores: dict[str, Score] = {}
        if path is not None and path.is_file():
            kept = read_run_state(path)
            if kept.get("identity") == identity:
                self.noise.update(kept["noise"])
                self.scores.update(
                    (k, Score(np.asarray(v["values"], np.float64), v["share"])) for k, v in kept["scores"].items()
                )
        self.found = max(len(self.noise), len(self.scores))

    def save(self) -> None:
        """Write the measurements, atomically."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scores = {k: {"values": score.values.tolist(), "share": score.share} for k, score in self.scores.items()}
        noise = {k: value for k, value in self.noise.items() if math.isfinite(value)}
        write_run_state(
            self._path, {"format": "bitwright-search", "identity": self._identity, "noise": noise, "scores": scores}
        )


class Explorer:
    """The parts of one search.

    Args:
        subject: the simulation.
        candidates: of every group.
        data: batches; every fifth is held out to measure the outputs on.
        begin, deadline: of the clock ``time.monotonic``, and seconds from then.
        rounding, samples, seed, times: as for :func:`bitwright.mixed_precision`.

    Attributes:
        groups: what is chosen for.
        costs: by name.
        prepared: every precision of every quantizer, ready to be set.
        knapsack: the choices.
        notes: what a reader of the result should know.
    """

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
        self.measured, self._stale = (
            Measured(),
            False,
        )  # stale: the simulation is not in the state that was asked for last
        kernels = operands(sim)
        allowed = sim.rules.allowed_kernels
        self.groups = find_groups(sim, candidates, allowed, tied=True)
        rest = list(self._noise.rest)
        self.prepared = PreparedPrecisions(subject, self.groups, candidates, least, rest, rounding=rounding)
        self.groups = without(self.groups, self.prepared.refused, candidates)
        self.groups = distinct(self.groups, self.prepared.same, candidates)
        self._table, unknown = noise_table(self.prepared, rest, samples=samples, seed=seed)
        if unknown:
            self._measure_alone(unknown)
        self.costs: dict[str, Cost] = all_costs(Bits(sim, self.groups, candidates, least), kernels, times, ())
        self._times = times
        self.knapsack = Knapsack(
            [g.candidates for g in self.groups], self.costs, ties(self.groups), [c.activation for c in candidates]
        )
        self._before = self._noise.runs
        self._fits: bool | None = None
        self._data, self._options = data, [rounding, samples, seed]
        self.notes = [f"SQNR is measured {self._noise.where}"]
        frozen = [name for name, site in sim.quantizers.items() if site.role == "weight" and site.frozen]
        self._frozen = (
            f"{len(frozen)} weights, such as {frozen[0]}, keep the width at which they were rounded and frozen, as `quantize` "
            "leaves them: pass the float model to choose their width too"
            if frozen
            else ""
        )
        if self._frozen:
            self.notes.append(self._frozen)
        if unknown:
            self.notes.append(
                f"what {len(unknown)} sites cost was measured one group at a time, as no derivative leads from them to an output"
            )

    def _measure_alone(self, unknown: Sequence[str]) -> None:
        """Measure groups without an estimate: one at a time at each candidate, the others at the most bits."""
        base = self._best()
        quiet = self.noise(base, fitted=False)
        for i, group in enumerate(self.groups):
            if not {*unknown}.intersection(group.sites):
                continue
            for c in group.candidates:
                if self.prepared.same(i, c, base[i]):
                    found = quiet / len(self.groups)
                else:
                    found = max(self.noise((*base[:i], c, *base[i + 1 :]), fitted=False) - quiet, 0.0)
                self._table[i, c] = max(found, quiet * _SHARE)
        self.prepared.restore()

    def keep(self, path: Path, goal: Goal) -> None:
        """Store measurements in a file, and reuse those of the same search.

        The same search has the same groups, candidates, estimates, data and metric: estimates follow from the model.
        """
        seen, metric = Fingerprint(), goal.metric
        names = [[g.name, *g.sites] for g in self.groups], [c.name for c in self.candidates]
        seen.update([self._table, *names, self._options])
        seen.update(list(self._data))
        if metric is not None:
            seen.update([metric.name, metric.better, str(metric.allowed), metric.reference.values])
        self.measured = Measured(path, str(seen))
        if self.measured.found:
            self.notes.append(f"{self.measured.found} measurements of an earlier run were found in {path.name}")

    def correction(self) -> Correction:
        """The estimates before any measurement."""
        order = [[i for i, c in enumerate(self.candidates) if coarser(c, of)] for of in self.candidates]
        return Correction(self._table.copy(), coarser=order)

    def noise(self, choice: Choice, *, fitted: bool = True) -> float:
        """Noise over signal of the outputs at ``choice``, as measured.

        Args:
            choice: a candidate per group.
            fitted: with weights as the result has them: rounded for this choice, if that helped the first one.
        """
        if not fitted:
            return self._remembered("alone", choice, lambda: self.prepared.apply(choice))
        if self._fits is None:
            alone = self.noise(choice, fitted=False)
            found = self._remembered("fitted", choice, lambda: self.prepared.fit(choice))
            self._fits = found <= alone
            if self._fits:
                return found
            self.notes.append("weights are rounded one layer at a time: making up for earlier layers did not help")
        return self._remembered("fitted" if self._fits else "alone", choice, lambda: self.set(choice))

    def _remembered(self, how: str, choice: Choice, bring: Callable[[], None]) -> float:
        """Noise of a state that ``bring`` brings about, measured unless an earlier run did."""
        key = f"{how} {' '.join(map(str, choice))}"
        if key in self.measured.noise:
            self._noise.runs += 1  # as it would be without the earlier run
            self._stale = True
            return self.measured.noise[key]
        bring()
        self._stale = False
        self.measured.noise[key] = self.measure()
        self.measured.save()
        return self.measured.noise[key]

    def _score(self, choice: Choice, metric: Metric) -> Score:
        """The metric at ``choice``, measured unless an earlier run did."""
        key = " ".join(map(str, choice))
        if key in self.measured.scores:
            metric.evaluations += self.measured.scores[key].share
            return self.measured.scores[key]
        if self._stale:
            self.set(choice)
        self.measured.scores[key] = metric.measure()
        self.measured.save()
        return self.measured.scores[key]

    def set(self, choice: Choice) -> None:
        """Give the simulation the precisions and weights of ``choice``, as the result has them."""
        if self._fits is False:
            self.prepared.apply(choice)
        else:
            self.prepared.fit(choice)

    def measure(self) -> float:
        """Noise-to-signal ratio of the outputs of the current state."""
        return self._noise.measure()

    @property
    def measurements(self) -> int:
        """Number of measurements of the outputs so far."""
        return self._noise.runs

    def bounds(self, cost: str, budget: float | Mapping[str, float | str] | None) -> dict[str, float]:
        """Cost -> the most that may be spent, in its own unit.

        Raises:
            ConfigError: an unknown cost, or less than the cheapest choice needs.
        """
        given = {} if budget is None else dict(budget) if isinstance(budget, Mapping) else {cost: float(budget)}
        if {cost, *given} - self.costs.keys():
            all_costs(Bits(self._subject.sim, self.groups, self.candidates, {}), {}, self._times, [cost, *given])
        found: dict[str, float] = {}
        for name, asked in given.items():
            known, most = self.costs[name], as_bound(name, asked, "budget")
            dearest = known.of([max(g.candidates, key=lambda c: sum(self.candidates[c].bits)) for g in self.groups])
            bound = most * dearest if most <= 1 else most
            self._check_room(name, bound, dearest, found)
            found[name] = bound
        return found

    def _check_room(self, name: str, bound: float, dearest: float, others: Mapping[str, float]) -> None:
        """Refuse a bound that no choice fits, alone or together with the bounds before it."""
        known = self.costs[name]
        cheapest = self.knapsack.least(name, others)
        assert cheapest is not None  # the others were checked before
        least = known.of(cheapest)
        if bound >= least * (1 - 1e-9):
            return
        within = "".join(f" within {other} of {most:.6g} {self.costs[other].unit}" for other, most in others.items())
        problem = (
            f"no choice of candidates fits {name} of {bound:.6g} {known.unit}{within}; the least possible is "
            f"{_up(least):.6g} ({_up(least / dearest, 4):.4g} of the candidate with the most bits)"
        )
        if self._frozen:
            problem = f"{problem}; {self._frozen}"
            raise ConfigError("budget", problem, "give the float model instead of this simulation")
        raise ConfigError("budget", problem, "raise the budget, or add a candidate of fewer bits")

    # -- searching

    def run(self, goal: Goal, save: Callable[[], None]) -> MixedPrecision:
        """Measure points until no candidate can improve the result, or the budget is spent."""
        book, correction = Book(goal), self.correction()
        self._before = self._noise.runs
        units = sorted([*ties(self.groups), *([i] for i, g in enumerate(self.groups) if not g.tie)])
        together = Interactions(
            correction, lambda choice: self.noise(choice, fitted=False), self._best(), units, self.candidates
        )  # fmt: skip
        try:
            for choice in Proposals(self.knapsack, correction, book).points():
                if book.seen and (why := self._spent(goal)):
                    self.notes.append(why)
                    break
                expected = correction.noise().of(choice)
                if self._measure(choice, book, correction):
                    if self._stale:
                        self.set(choice)
                    save()
                if together.worth(expected, book.seen[choice].noise):
                    self._look_into(choice, together)
        except KeyboardInterrupt:
            if book.best is None:
                raise
            self.notes.append(INTERRUPTED)
        return self._finish(book, correction, save)

    def _best(self) -> Choice:
        """The candidate with the most bits for every group."""
        best = highest(self.candidates)
        return tuple(best if best in g.candidates else g.candidates[-1] for g in self.groups)

    def _look_into(self, choice: Choice, together: Interactions) -> None:
        """Find the groups that make a point noisier than predicted; these measurements do not count as evaluations."""
        before = self._noise.runs
        found = together.find(choice)
        self._before += self._noise.runs - before
        if found:
            self.notes.append(told([g.name for g in self.groups], found))
            logger.info("%s", self.notes[-1])

    def _spent(self, goal: Goal) -> str:
        """The reason why the search ends here; empty where it continues."""
        used = goal.metric.evaluations if goal.metric is not None else self._noise.runs - self._before
        longest = goal.metric.seconds if goal.metric is not None else 0.0
        left = math.inf if self._deadline is None else self._deadline - (time.monotonic() - self._begin)
        if used > goal.evaluations - 1 + 1e-9:
            return "the search ended because evaluations were used up"
        return OUT_OF_TIME if left < longest or left < 0 else ""

    def _measure(self, choice: Choice, book: Book, correction: Correction) -> bool:
        """Measure one point; returns whether it is the best so far."""
        goal, metric = book.goal, book.goal.metric
        point = Seen(choice, self.costs[goal.cost].of(choice), self.noise(choice))
        correction.see(choice, point.noise)
        if metric is not None and (goal.min_sqnr is None or decibel(point.noise) >= goal.min_sqnr):
            point.score = self._score(choice, metric)
            point.drop = point.bound = metric.drop(point.score)
            if metric.held_back and point.score.share == 1:
                point.bound = max(point.drop, metric.bound(point.score, goal.confidence))
            if metric.suspicious(point.score, point.noise):
                metric.put_to_test(self._noise)
        name = self._label(self._told(choice))
        logger.info("%s: cost %.6g, SQNR %.1f dB, drop %.4g", name, point.cost, decibel(point.noise), point.drop)
        better = book.add(point)
        return better and (goal.good(point) or not goal.quality)

    # -- the end

    def _finish(self, book: Book, correction: Correction, save: Callable[[], None]) -> MixedPrecision:
        goal = book.goal
        chosen, interval = last_word(book)
        if chosen is None:
            self.notes.append(why_none(book))
        final = chosen or book.best
        assert final is not None
        self.set(final.choice)
        if chosen is not None and chosen is not book.best:
            save()
        noise = correction.noise()
        points = self._points(book, noise, chosen)
        metric = goal.metric
        return MixedPrecision(
            self._subject.sim,
            goal.cost,
            tuple(c.name for c in self.candidates),
            self.groups,
            points,
            next((p for p in points if p.chosen), None),
            None if metric is None else {"name": metric.name, "float": metric.reference.mean, "better": metric.better},
            interval,
            metric.evaluations if metric is not None else 0.0,
            time.monotonic() - self._begin,
            tuple(self.notes),
            alone(self.groups, [c.name for c in self.candidates], noise.table[0]),
        )

    def _points(self, book: Book, noise: Cost, chosen: Seen | None) -> tuple[Point, ...]:
        goal = book.goal
        found = [
            replace(
                self._point(p.choice, noise),
                sqnr_db=decibel(p.noise),
                metric=None if p.score is None else p.score.mean,
                drop=None if p.score is None else p.drop,
                share=0.0 if p.score is None else p.score.share,
                chosen=p is chosen,
            )
            for p in book.seen.values()
        ]
        front = self.knapsack.front(noise, goal.cost, goal.bounds, _FRONT)
        found += [self._point(choice, noise) for choice in front if choice not in book.seen]
        found.sort(key=lambda p: (p.costs[goal.cost], -p.predicted_db))
        return tuple(replace(p, front=_on_front(p, found, goal.cost)) for p in found)

    def _point(self, choice: Choice, noise: Cost) -> Point:
        told = self._told(choice)
        return Point(
            self._label(told),
            {g.name: self.candidates[c].name for g, c in zip(self.groups, told, strict=True)},
            {name: cost.of(choice) for name, cost in self.costs.items()},
            decibel(noise.of(choice)),
        )

    def _told(self, choice: Choice) -> Choice:
        """``choice`` with each group at the most common of the candidates that are equivalent for it.

        Two candidates are equivalent where they give a group the same precision at the same costs.
        """

        def alike(group: int, one: int, other: int) -> bool:
            tables = [cost.table[:, group] for cost in self.costs.values()]
            return self.prepared.same(group, one, other) and all(np.array_equal(t[:, one], t[:, other]) for t in tables)

        equals = [[o for o in range(len(self.candidates)) if alike(i, o, c)] for i, c in enumerate(choice)]
        votes = Counter(o for equal in equals for o in equal)
        return tuple(max(equal, key=lambda o: (votes[o], -o)) for equal in equals)

    def _label(self, choice: Choice) -> str:
        names = [self.candidates[c].name for c in choice]
        if len(set(names)) == 1:
            return names[0]
        counts = {name: names.count(name) for name in dict.fromkeys(c.name for c in self.candidates)}
        return " ".join(f"{n}x{name}" for name, n in counts.items() if n)


def _up(value: float, digits: int = 6) -> float:
    """``value`` rounded up, so that the printed number works as a bound."""
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits) if value > 0 else 1.0
    return math.ceil(value / unit * (1 - 1e-12)) * unit


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


CANDIDATES = ("w8a8", "w8a16", "w4a8", "w4a16")


@checks_arguments
def mixed_precision(
    model: Any,
    data: Iterable[Any],
    candidates: str | Preset | Iterable[Any] = CANDIDATES,
    *,
    cost: str = "weight_bytes",
    budget: float | Mapping[str, float | str] | None = None,
    metric: str | Mapping[str, Any] | Callable[[Any], Any] | None = None,
    lower_is_better: bool = False,
    allowed_drop: float | str | None = None,
    min_sqnr: float | None = None,
    labels: Any = None,
    transform: Callable[[Any], Any] | None = None,
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
        data: batches; every fifth is held out to measure the outputs on.
        candidates: presets by name or value, or AIMET's pairs.
        cost: what is to be small: ``weight_bytes``, ``bit_ops``, ``activation_bytes``, ``memory``, or ``ms`` (with ``times``).
        budget: the most that may be spent: of ``cost``, or cost -> bound. A bound up to 1 is a share of what the candidate with
            the most bits costs; bytes may have a unit, ``{"memory": "512KiB"}``.
        metric: a name of :data:`bitwright.metrics.metric.NAMED` (``"accuracy"``, ``"map"``, ...) or ``{name: options}``,
            an object of torchmetrics, or a function of the model (of the session in ONNX) that returns a number or, better, one
            value per sample; half of the samples are then held back for the last word.
        lower_is_better: for a function such as a perplexity.
        allowed_drop: of the metric against float: in its units, or ``"1%"`` of its float value. Of the points that keep within
            it the cheapest is taken.
        min_sqnr: instead of a metric: the least SQNR of the outputs, in dB.
        labels: one per sample of ``evaluation_data``, or a function that takes them from a batch.
        transform: makes of a batch what the model takes. Without it, and without ``labels`` that the metric needs, batches are
            pairs of an input and its labels.
        evaluation_data: what named metrics are measured on; ``data`` by default.
        times: milliseconds per layer or operator type and candidate, or the path of a JSON file of them.
        evaluations: of the metric, at most; parts of the data count as parts.
        deadline: seconds, from now.
        confidence: with which the drop on samples held back is within ``allowed_drop``.
        rounding: round weights with error feedback (``gptq``) at each width, instead of each to its nearest code.
        samples: rows that the estimates are taken on.
        seed: of what is random.
        config_file: rules for a model that is given; its ``supported_kernels`` say which candidates an operator may have.
        folder: where the best point so far is exported to, each time there is a better one, and where measurements are kept: the
            same call on the same folder goes on where a killed process ended.
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
    if budget is None and allowed_drop is None and min_sqnr is None:
        raise ConfigError(
            "mixed_precision",
            "neither a budget nor a quality is asked for",
            "pass budget=0.6 (share of the cost), allowed_drop=0.01 with a metric, or min_sqnr=20",
        )
    check_options(
        metric, allowed_drop, min_sqnr, deadline, confidence, lower_is_better=lower_is_better, labels=labels,
        evaluation_data=evaluation_data,
    )  # fmt: skip
    data, evaluation_data, labels = judged_data(metric, data, evaluation_data, labels, transform)
    batches = listed(data, "mixed_precision")
    sim = simulation_of(model, batches, wanted[highest(wanted)], config_file)
    subject = open_subject(sim)
    restore = subject.remember(parameters=True)
    try:
        with subject.exclusive():
            search = Explorer(subject, wanted, batches, begin, deadline, rounding, samples, seed, times)
            bounds = search.bounds(cost, budget)
            tester = None
            if metric is not None:
                tester = Metric(
                    subject, metric, lower_is_better=lower_is_better, allowed=allowed_drop, labels=labels, seed=seed,
                    data=batches if evaluation_data is None else list(evaluation_data),
                )  # fmt: skip
                spent = time.monotonic() - begin
                left = math.inf if deadline is None else deadline - spent
                if left < tester.seconds:
                    raise ConfigError(
                        "deadline",
                        f"one evaluation of the metric takes {tester.seconds:.3g} s, and {max(left, 0):.3g} s are left of "
                        f"{deadline:.3g} s: what comes before the first point took {spent:.3g} s",
                        f"allow more than {spent + tester.seconds:.3g} s, or let the metric look at fewer samples",
                    )
            goal = Goal(cost, bounds, tester, min_sqnr, evaluations, confidence)
            if folder is None:
                return search.run(goal, lambda: None)
            search.keep(Path(folder) / f"{filename_prefix}_search.json", goal)
            return search.run(goal, lambda: sim.export(Path(folder), filename_prefix))
    except BaseException:
        restore()
        raise


def judged_data(
    metric: Any, data: Iterable[Any], evaluation_data: Iterable[Any] | None, labels: Any, transform: Any
) -> tuple[Iterable[Any], Iterable[Any] | None, Any]:
    """Data for the model, and labels for the metric.

    Raises:
        ConfigError: there is no such metric, or it needs labels and there are none.
    """
    needed = needs_labels(metric)
    if evaluation_data is None:
        data, labels = inputs_and_labels(data, transform, labels, needed)
        return data, None, labels
    evaluation_data, labels = inputs_and_labels(evaluation_data, transform, labels, needed)
    return inputs_of(data, transform), evaluation_data, labels


def check_options(
    metric: Any, allowed_drop: Any, min_sqnr: float | None, deadline: float | None, confidence: float, **of_metric: Any
) -> None:
    """Check the options of a search before it begins.

    Args:
        of_metric: ``lower_is_better``, ``labels`` and ``evaluation_data``.

    Raises:
        ConfigError: a number that has no meaning, or an option that nothing would look at.
    """
    if min_sqnr is not None and not math.isfinite(min_sqnr):
        raise ConfigError("min_sqnr", f"{min_sqnr} is not a number of dB", "give 20, or leave it out")
    if deadline is not None and not deadline >= 0:
        raise ConfigError("deadline", f"{deadline} is not a time", "give seconds, or leave it out")
    if not 0 < confidence < 1:
        raise ConfigError("confidence", f"{confidence} is not a share", "give 0.9, or another number between 0 and 1")
    if allowed_drop is not None and metric is None:
        raise ConfigError(
            "allowed_drop", "there is no metric that could drop", "pass metric=..., or min_sqnr=... in dB instead"
        )
    given = [name for name, value in of_metric.items() if value is not None and value is not False]
    if metric is None and given:
        raise ConfigError(
            given[0], "there is no metric that it could be for", f"pass metric=..., or leave {given[0]} out"
        )
    _check_of_metric(metric, given)


def _check_of_metric(metric: Any, given: Sequence[str]) -> None:
    """Refuse options that the given kind of metric does not use."""
    data = [name for name in given if name != "lower_is_better"]
    if is_function(metric) and data:
        raise ConfigError(
            data[0],
            "the metric is a function, which looks at data of its own",
            f"leave {data[0]} out, or pass a metric by name, as metric='accuracy'",
        )
    if (
        metric is not None
        and not is_function(metric)
        and "lower_is_better" in given
        and find_metric(metric).better != "lower"
    ):
        raise ConfigError(
            "lower_is_better", f"the direction of {metric!r} is known", "leave it out; it is for functions"
        )
