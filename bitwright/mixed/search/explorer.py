"""One search for precisions: what it needs made ready once, points measured one by one, and the result."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bitwright.analysis.subject.subject import Subject
from bitwright.errors import ConfigError
from bitwright.mixed.choosing.choice import Choice, Knapsack
from bitwright.mixed.choosing.correction import Correction
from bitwright.mixed.choosing.costs import Bits, Cost, all_costs
from bitwright.mixed.choosing.interactions import Interactions, told
from bitwright.mixed.precisions.candidates import Candidate, coarser, highest
from bitwright.mixed.precisions.groups import distinct, find_groups, operands, planned_bits, ties, without
from bitwright.mixed.precisions.library import Library, noise_table, ruin
from bitwright.mixed.search.confirm import last_word, why_none
from bitwright.mixed.search.goal import Book, Goal, Seen
from bitwright.mixed.search.measure import Metric, Noise
from bitwright.mixed.search.proposals import Proposals
from bitwright.mixed.search.result import MixedPrecision, Point, alone, decibel

logger = logging.getLogger("bitwright")

#: notes of results that more time could change
OUT_OF_TIME = "the search ended because time was used up"
INTERRUPTED = "the search was interrupted; this is the best point it had"
_SHARE = 1e-3  # of the noise at the most bits, that a group has at least
_FRONT = 24  # points of the front that is drawn


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
        library: the precisions, ready to be set.
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
        kernels = operands(sim)
        allowed = sim.rules.allowed_kernels
        self.groups = find_groups(sim, candidates, allowed, tied=True)
        rest = list(self._noise.rest)
        self.library = Library(subject, self.groups, candidates, least, rest, rounding=rounding)
        self.groups = without(self.groups, self.library.refused, candidates)
        self.groups = distinct(self.groups, self.library.same, candidates)
        self._table, unknown = noise_table(self.library, rest, samples=samples, seed=seed)
        if unknown:
            self._measure_alone(unknown)
        self.costs: dict[str, Cost] = all_costs(Bits(sim, self.groups, candidates, least), kernels, times, ())
        self._times = times
        self.knapsack = Knapsack(
            [g.candidates for g in self.groups], self.costs, ties(self.groups), [c.activation for c in candidates]
        )
        self._trusted, self._before = False, self._noise.runs
        self._fits: bool | None = None
        self.notes = [f"SQNR is measured {self._noise.where}"]
        self._frozen = _frozen_weights(sim)
        if self._frozen:
            self.notes.append(self._frozen)
        if unknown:
            self.notes.append(
                f"what {len(unknown)} sites cost was measured one group at a time, as no derivative leads from them to an output"
            )

    def _measure_alone(self, unknown: Sequence[str]) -> None:
        """The noise of groups that there is no estimate of: each alone at its candidates, the others at the most bits."""
        base = self._best()
        quiet = self.noise(base, fitted=False)
        for i, group in enumerate(self.groups):
            if not {*unknown}.intersection(group.sites):
                continue
            for c in group.candidates:
                if self.library.same(i, c, base[i]):
                    found = quiet / len(self.groups)
                else:
                    found = max(self.noise((*base[:i], c, *base[i + 1 :]), fitted=False) - quiet, 0.0)
                self._table[i, c] = max(found, quiet * _SHARE)
        self.library.restore()

    def correction(self) -> Correction:
        """The estimates, before anything was seen."""
        order = [[i for i, c in enumerate(self.candidates) if coarser(c, of)] for of in self.candidates]
        return Correction(self._table.copy(), coarser=order)

    def noise(self, choice: Choice, *, fitted: bool = True) -> float:
        """Noise over signal of the outputs at ``choice``, as measured.

        Args:
            choice: a candidate per group.
            fitted: with weights as the result has them: rounded for this choice, if that helped the first one.
        """
        if not fitted:
            self.library.apply(choice)
            return self.measure()
        if self._fits is None:
            alone = self.noise(choice, fitted=False)
            self.library.fit(choice)
            found = self.measure()
            self._fits = found <= alone
            if self._fits:
                return found
            self.notes.append("weights are rounded one layer at a time: making up for earlier layers did not help")
        self.set(choice)
        return self.measure()

    def set(self, choice: Choice) -> None:
        """Give the simulation the precisions and weights of ``choice``, as the result has them."""
        if self._fits is False:
            self.library.apply(choice)
        else:
            self.library.fit(choice)

    def measure(self) -> float:
        """Noise over signal of the outputs of what is set."""
        return self._noise.measure()

    @property
    def measurements(self) -> int:
        """How often the outputs were measured."""
        return self._noise.runs

    def bounds(self, cost: str, budget: float | Mapping[str, float] | None) -> dict[str, float]:
        """Cost -> the most that may be spent, in its own unit.

        Raises:
            ConfigError: an unknown cost, or less than the cheapest choice needs.
        """
        given = {} if budget is None else dict(budget) if isinstance(budget, Mapping) else {cost: float(budget)}
        if {cost, *given} - self.costs.keys():
            all_costs(Bits(self._subject.sim, self.groups, self.candidates, {}), {}, self._times, [cost, *given])
        found: dict[str, float] = {}
        for name, most in given.items():
            known = self.costs[name]
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
        raise ConfigError(
            "budget",
            f"no choice of candidates fits {name} of {bound:.6g} {known.unit}{within}; the least possible is "
            f"{_up(least):.6g} ({_up(least / dearest, 4):.4g} of the candidate with the most bits)"
            + (f"; {self._frozen}" if self._frozen else ""),
            "give the float model instead of this simulation"
            if self._frozen
            else "raise the budget, or add a candidate of fewer bits",
        )

    # -- searching

    def run(self, goal: Goal, save: Callable[[], None]) -> MixedPrecision:
        """Measure points until nothing more can be learnt, or there is no more to spend."""
        book, correction = Book(goal), self.correction()
        self._before = self._noise.runs
        proposals = Proposals(self.knapsack, correction, book)
        together = self._interactions(correction)
        try:
            for choice in proposals.points():
                if book.seen and (why := self._spent(goal)):
                    self.notes.append(why)
                    break
                expected = correction.noise().of(choice)
                if self._measure(choice, book, correction):
                    save()
                if together.worth(expected, book.seen[choice].noise):
                    self._look_into(choice, together)
        except KeyboardInterrupt:
            if book.best is None:
                raise
            self.notes.append(INTERRUPTED)
        return self._finish(book, correction, save)

    def _interactions(self, correction: Correction) -> Interactions:
        """What looks for groups that do more together than alone."""
        tied = ties(self.groups)
        units = [*tied, *([i] for i, g in enumerate(self.groups) if not g.tie)]
        return Interactions(
            correction, lambda choice: self.noise(choice, fitted=False), self._best(), sorted(units), self.candidates
        )  # fmt: skip

    def _best(self) -> Choice:
        """The candidate with the most bits for every group."""
        best = highest(self.candidates)
        return tuple(best if best in g.candidates else g.candidates[-1] for g in self.groups)

    def _look_into(self, choice: Choice, together: Interactions) -> None:
        """Find out which groups make a point louder than expected; these measurements are not counted as evaluations."""
        before = self._noise.runs
        found = together.find(choice)
        self._before += self._noise.runs - before
        if found:
            note = told([g.name for g in self.groups], found)
            logger.info("%s", note)
            self.notes.append(note)

    def _spent(self, goal: Goal) -> str:
        """Why the search has to end here; empty where it goes on."""
        used = goal.metric.evaluations if goal.metric is not None else self._noise.runs - self._before
        longest = goal.metric.seconds if goal.metric is not None else 0.0
        left = math.inf if self._deadline is None else self._deadline - (time.monotonic() - self._begin)
        if used > goal.evaluations - 1 + 1e-9:
            return "the search ended because evaluations were used up"
        return OUT_OF_TIME if left < longest or left < 0 else ""

    def _measure(self, choice: Choice, book: Book, correction: Correction) -> bool:
        """Measure one point; whether it is the best so far."""
        goal = book.goal
        point = Seen(choice, self.costs[goal.cost].of(choice), self.noise(choice))
        correction.see(choice, point.noise)
        quiet = goal.min_sqnr is None or decibel(point.noise) >= goal.min_sqnr
        if goal.metric is not None and quiet:
            self._rate(point, goal, goal.metric)
        name = self._label(self._told(choice))
        logger.info("%s: cost %.6g, SQNR %.1f dB, drop %.4g", name, point.cost, decibel(point.noise), point.drop)
        better = book.add(point)
        return better and (goal.good(point) or not goal.quality)

    def _rate(self, point: Seen, goal: Goal, metric: Metric) -> None:
        """Measure the metric of the point that is set."""
        point.score = metric.measure()
        point.drop = point.bound = metric.drop(point.score)
        if metric.held_back and point.score.share == 1:
            point.bound = max(point.drop, metric.bound(point.score, goal.confidence))
        if not self._trusted and metric.suspicious(point.score, point.noise):
            self._check_metric(metric)
            self.set(point.choice)
            self._trusted = True

    def _check_metric(self, metric: Metric) -> None:
        """Put the metric to outputs that are noise; once, where a value of it looks strange."""
        ruin(self._subject)
        try:
            metric.check_direction(metric.measure(), self._noise.measure())
        finally:
            self.library.restore()

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
        """``choice`` with the candidates that most groups can be said to have: a sum has 8-bit weights as well as 4-bit ones."""
        names = range(len(self.candidates))
        alike = [[o for o in names if self._alike(i, o, c)] for i, c in enumerate(choice)]
        votes = Counter(o for equal in alike for o in equal)
        return tuple(max(equal, key=lambda o: (votes[o], -o)) for equal in alike)

    def _alike(self, group: int, one: int, other: int) -> bool:
        """Whether two candidates make the same of a group at the same costs: tied weights cost what their inputs are too."""
        return self.library.same(group, one, other) and all(
            np.array_equal(cost.table[:, group, one], cost.table[:, group, other]) for cost in self.costs.values()
        )

    def _label(self, choice: Choice) -> str:
        names = [self.candidates[c].name for c in choice]
        if len(set(names)) == 1:
            return names[0]
        counts = {name: names.count(name) for name in dict.fromkeys(c.name for c in self.candidates)}
        return " ".join(f"{n}x{name}" for name, n in counts.items() if n)


def _up(value: float, digits: int = 6) -> float:
    """``value`` rounded up, so that who asks for what is printed gets it."""
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits) if value > 0 else 1.0
    return math.ceil(value / unit * (1 - 1e-12)) * unit


def _frozen_weights(sim: Any) -> str:
    """Which weights keep their precision because a method or a file froze them; empty if none does."""
    found = [name for name, site in sim.quantizers.items() if site.role == "weight" and site.frozen]
    if not found:
        return ""
    return (
        f"{len(found)} weights, such as {found[0]}, keep the width at which they were rounded and frozen, as `quantize` "
        "leaves them: pass the float model to choose their width too"
    )


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
