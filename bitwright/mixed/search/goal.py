"""What a search for precisions is asked for, and the points that it has measured so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

from bitwright.mixed.choosing.choice import Choice
from bitwright.mixed.search.measure import Metric, Score
from bitwright.mixed.search.result import decibel

_LEAST = 0.02  # excess of a point that lost nothing


@dataclass
class Seen:
    """A point that was measured.

    Attributes:
        choice: a candidate per group.
        cost: of the kind that is to be small.
        noise: over signal of the outputs.
        score: the metric, where it was measured.
        drop: of the metric on the samples that choose.
        bound: the largest drop that these samples leave possible with the confidence asked for; the drop where there are none.
    """

    choice: Choice
    cost: float
    noise: float
    score: Score | None = None
    drop: float = math.inf
    bound: float = math.inf


@dataclass(frozen=True)
class Goal:
    """What is asked for.

    Attributes:
        cost: what is to be small.
        bounds: cost -> the most that may be spent.
        metric: of the user, if there is one.
        min_sqnr: of the outputs, in dB.
        evaluations: at most.
        confidence: of what is said about drops.
    """

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

    @property
    def most_noise(self) -> float:
        """Noise over signal that ``min_sqnr`` allows."""
        return math.inf if self.min_sqnr is None else 10 ** (-self.min_sqnr / 10)

    def good(self, seen: Seen) -> bool:
        """Whether a point keeps within what is allowed, beyond doubt by the samples that choose."""
        return self.within(seen, seen.bound)

    def within(self, seen: Seen, drop: float) -> bool:
        """Whether a point keeps within what is allowed, if its metric drops by ``drop``."""
        if self.min_sqnr is not None and decibel(seen.noise) < self.min_sqnr:
            return False
        if self.metric is None or self.metric.allowed is None:
            return True
        return seen.score is not None and seen.score.share == 1 and drop <= self.metric.allowed

    def safe(self, seen: Seen) -> bool:
        """Whether a point is so good that samples held back will say so too, 19 times of 20.

        They have an error of their own, so that the difference of the two halves has sqrt(2) times the error of one.
        """
        if self.metric is None or seen.score is None or not self.good(seen):
            return self.good(seen)
        normal = NormalDist()
        high = normal.cdf(normal.inv_cdf(min(self.confidence, 0.999)) + math.sqrt(2) * normal.inv_cdf(0.95))
        return self.within(seen, self.metric.bound(seen.score, high))

    def excess(self, seen: Seen) -> float:
        """How often a point uses up what is allowed; more than 1 where it is not good."""
        found = [seen.noise / self.most_noise]
        if self.metric is not None and self.metric.allowed is not None and seen.score is not None:
            lost, allowed = max(seen.bound, 0.0), self.metric.allowed
            found.append(lost / allowed if allowed else (math.inf if lost else 0.0))
        return max(*found, _LEAST)

    def rank(self, seen: Seen) -> tuple[float, ...]:
        """The smaller the better, among points within the budget."""
        if self.quality:
            return (0.0, seen.cost, seen.noise) if self.good(seen) else (1.0, seen.drop, seen.noise)
        return (seen.drop, seen.noise) if self.metric is not None else (seen.noise,)


@dataclass
class Book:
    """The points measured so far.

    Attributes:
        goal: what they are measured against.
        seen: by choice.
        best: of them.
    """

    goal: Goal
    seen: dict[Choice, Seen] = field(default_factory=dict)
    best: Seen | None = None

    def add(self, point: Seen) -> bool:
        """Whether it is the best so far."""
        self.seen[point.choice] = point
        if self.best is None or self.goal.rank(point) < self.goal.rank(self.best):
            self.best = point
            return True
        return False

    def good(self) -> list[Seen]:
        """Those that keep within what is allowed."""
        return [p for p in self.seen.values() if self.goal.good(p)]
