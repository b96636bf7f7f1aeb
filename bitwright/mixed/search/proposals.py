"""Which point is measured next: where it tells most about the cheapest one that is good."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from bitwright.mixed.choosing.choice import Choice, Knapsack
from bitwright.mixed.choosing.correction import Correction
from bitwright.mixed.choosing.costs import Cost
from bitwright.mixed.search.goal import Book, Seen

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
        """All of them; whoever asks for the next one has measured the last."""
        if not self.book.goal.quality:
            yield from self._within_budget()
            return
        first = self._first()
        yield first
        if self.book.goal.min_sqnr is not None or not self.book.goal.good(self.book.seen[first]):
            yield from self._between()
        yield from self._safer()
        yield from self._single()

    def _first(self) -> Choice:
        """The cheapest; where a noise is asked for, the cheapest that should have no more."""
        goal, noise = self.book.goal, self.correction.noise()
        found = self._cheapest(noise, goal.most_noise)
        found = found or self._quietest(noise)
        assert found is not None  # the bounds of the goal leave a choice
        return found

    def _within_budget(self) -> Iterable[Choice]:
        """The quietest choice by the estimates as corrected so far, until it stays the same."""
        while True:
            choice = self._quietest(self.correction.noise())
            if choice is None or choice in self.book.seen:
                return
            yield choice

    def _unless_seen(self, choice: Choice) -> Iterable[Choice]:
        if choice not in self.book.seen:
            yield choice

    def _known_good(self, choice: Choice) -> bool:
        return choice in self.book.seen and self.book.goal.good(self.book.seen[choice])

    def _between(self) -> Iterable[Choice]:
        """Close in on the noise at which points cease to be good; each time the cheapest choice below it."""
        tries = 0
        while tries < _TRIES:
            noise = self.correction.noise()
            good, bad = self._bracket(noise)
            quietest = self._quietest(noise)
            if quietest is None:
                return
            floor = max(noise.of(quietest), 1e-30)
            if good is None and self._at_the_end(noise, bad, floor):
                yield from self._unless_seen(quietest)  # is there a good point at all
                if not self._known_good(quietest):
                    return
                continue
            aim = self._aim(noise, good, bad)
            choice = self._cheapest(noise, max(aim, floor * (1 + 1e-9)))
            if choice is not None and not self._worth(choice):
                tries += 1
                choice = self._next(noise, good, bad, floor) or self._beyond(noise, good, bad)
            if choice is None:
                return
            yield choice

    def _at_the_end(self, noise: Cost, bad: Seen | None, floor: float) -> bool:
        """Whether only the quietest point is left to be tried, or so many were bad that it should be."""
        last = bad is not None and noise.of(bad.choice) <= floor * (1 + 1e-6)
        return last or len(self.book.seen) >= _LOST

    def _bracket(self, noise: Cost) -> tuple[Seen | None, Seen | None]:
        """The good point with the most noise, and the bad one with the least that has more."""

        def loud(point: Seen) -> float:
            return noise.of(point.choice)

        good = max(self.book.good(), key=loud, default=None)
        bad = [p for p in self.book.seen.values() if not self.book.goal.good(p)]
        above = [p for p in bad if good is None or loud(p) > loud(good)]
        return good, min(above, key=loud, default=None)

    def _aim(self, noise: Cost, good: Seen | None, bad: Seen | None) -> float:
        """The noise at which the loss should be what is allowed: on a line through the logarithms of two points.

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

    def _next(self, noise: Cost, good: Seen | None, bad: Seen | None, floor: float) -> Choice | None:
        """Some choice between two points that was not measured and is worth it."""
        low = floor if good is None else noise.of(good.choice)
        high = max(low * 2, 1.0) if bad is None else noise.of(bad.choice)
        for most in np.geomspace(low, max(high, low), _BETWEEN)[1:-1][::-1]:
            choice = self._cheapest(noise, float(most))
            if choice is not None and self._worth(choice):
                return choice
        return None

    def _beyond(self, noise: Cost, good: Seen | None, bad: Seen | None) -> Choice | None:
        """Some choice that should have more noise than a bad point, where the good one has room left: estimates are estimates.

        The good point as it was measured is what counts here: its noise may grow until its loss is what is allowed.
        """
        if good is None or bad is None or self.book.goal.excess(good) > _ROOM:
            return None
        most = noise.of(good.choice) * _AIM / self.book.goal.excess(good)
        worse = noise.of(bad.choice)
        for high in np.geomspace(worse, max(min(most, worse * _FARTHER), worse), 4)[1:]:
            choice = self._cheapest(noise, float(high))
            if choice is not None and self._worth(choice):
                return choice
        return None

    def _worth(self, choice: Choice) -> bool:
        """Whether a point was not measured and could become the best one: it costs less, or there is none yet."""
        best, goal = self.book.best, self.book.goal
        if choice in self.book.seen:
            return False
        if best is None or not goal.good(best):
            return True
        return self.knapsack.costs[goal.cost].of(choice) < best.cost * (1 - _GAIN)

    def _safer(self) -> Iterable[Choice]:
        """Quieter points, until there is one that samples held back should bear out; those are not looked at here."""
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
        """The best point with one group lowered: what the estimates of all groups together passed over."""
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
        """Points with one group lowered: those that should be good, the cheapest first, and the others, the quietest first."""
        goal, noise, costs = self.book.goal, self.correction.noise(), self.knapsack.costs
        enough = best.cost * (1 - _LITTLE)
        found = [
            choice
            for choice in self.knapsack.neighbours(best.choice, noise)
            if costs[goal.cost].of(choice) <= enough
            and not self._hopeless(choice)
            and all(costs[name].of(choice) <= most for name, most in goal.bounds.items())
        ]
        room = best.noise / goal.excess(best) - best.noise
        found.sort(key=lambda c: (noise.of(c), -self._fine(c)))  # the same for fewer bits is tried last
        added = {choice: noise.of(choice) - noise.of(best.choice) for choice in found}
        return (
            sorted((c for c in found if added[c] <= room), key=costs[goal.cost].of),
            [c for c in found if room < added[c] <= _OFF * room],
        )

    def _fine(self, choice: Choice) -> int:
        """More for candidates that more others are coarser than."""
        return sum(len(self.correction.coarser[c]) for c in choice) if self.correction.coarser else 0

    def _hopeless(self, choice: Choice) -> bool:
        """Whether a point was measured, or one was bad that is nowhere coarser."""
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
