"""Goal, measured points and result of a search for mixed precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, TypeVar

from bitwright.precision.candidates import Group
from bitwright.precision.choice import Choice
from bitwright.precision.measure import Metric, Score
from bitwright.tables import Tabular, plain, text_table

_SHOWN = 24
P = TypeVar("P")


@dataclass(frozen=True)
class Point:
    """One choice of precisions.

    Attributes:
        name: ``w8a8`` where all groups have one candidate, else ``front 3`` or the like.
        choice: group -> candidate.
        costs: by name.
        predicted_db: SQNR of the outputs by the additive model, in dB.
        sqnr_db: as measured on data that nothing was chosen on; ``None`` where it was not.
        metric: as measured; ``None`` where it was not.
        drop: of the metric against float, on the samples that choose.
        share: of the data that the metric was measured on; below 1 where racing dropped the point.
        front: whether no measured point is better in both the cost and the measurement.
        chosen: whether this is the result.
    """

    name: str
    choice: Mapping[str, str]
    costs: Mapping[str, float]
    predicted_db: float
    sqnr_db: float | None = None
    metric: float | None = None
    drop: float | None = None
    share: float = 0.0
    front: bool = False
    chosen: bool = False


@dataclass(frozen=True)
class MixedPrecision(Tabular):
    """Result of :func:`bitwright.mixed_precision`.

    Attributes:
        sim: the simulation, with the chosen precisions.
        cost: the one that was to be small.
        candidates: their names.
        groups: what was chosen for.
        points: all that were measured, the cheapest first, and the front as predicted.
        chosen: the result; ``None`` where none met what was asked for, and then the simulation has the best point.
        metric: name of the metric, its value in float, and which direction is better; ``None`` without one.
        interval: of the drop of the chosen point, on samples held back; with its confidence.
        evaluations: of the metric; parts of the data count as parts.
        seconds: of the whole search.
        notes: what a reader should know.
        sensitivities: group -> candidate -> SQNR of the outputs in dB with that group alone at that candidate, as estimated.
    """

    sim: Any = field(repr=False)
    cost: str
    candidates: tuple[str, ...]
    groups: tuple[Group, ...]
    points: tuple[Point, ...]
    chosen: Point | None
    metric: Mapping[str, Any] | None
    interval: Mapping[str, Any] | None
    evaluations: float
    seconds: float
    notes: tuple[str, ...] = ()
    sensitivities: Mapping[str, Mapping[str, float]] = field(default_factory=dict, repr=False)

    _rows = "points"

    @property
    def met(self) -> bool:
        """Whether a point meets the goal."""
        return self.chosen is not None

    @property
    def front(self) -> tuple[Point, ...]:
        """The Pareto front of the measured points."""
        return tuple(p for p in self.points if p.front)

    @property
    def precisions(self) -> dict[str, str]:
        """Layer -> its candidate."""
        point = self.chosen or max(self.points, key=lambda p: (p.drop is not None, -(p.drop or 0)))
        return {layer: point.choice[g.name] for g in self.groups for layer in (g.layers or (g.name,))}

    def to_dict(self) -> dict[str, Any]:
        """Plain data; see docs/mixed-precision.md for the keys."""
        return {
            "format": "bitwright-mixed-precision",
            "version": 1,
            "cost": self.cost,
            "candidates": list(self.candidates),
            "metric": plain(self.metric),
            "interval": plain(self.interval),
            "groups": [
                {"name": g.name, "layers": list(g.layers), "sites": list(g.sites), "refused": dict(g.refused)}
                for g in self.groups
            ],
            "sensitivities": plain(self.sensitivities),
            "points": [_finite(plain(p)) for p in self.points],
            "chosen": None if self.chosen is None else _finite(plain(self.chosen)),
            "evaluations": self.evaluations,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        metric, costs = self.metric, self.points[0].costs if self.points else ()
        head = [
            "point",
            *costs,
            "predicted dB",
            "SQNR dB",
            *(() if metric is None else (str(metric["name"]), "drop")),
            "",
        ]
        measured = [p for p in self.points if p.sqnr_db is not None or p.metric is not None]
        rows = [_cells(p, metric is not None) for p in measured[:_SHOWN]]
        lines = [text_table(head, rows)]
        if len(measured) > _SHOWN:
            lines.append(f"and {len(measured) - _SHOWN} more points")
        if self.interval is not None:
            lines.append(str(self.interval["text"]))
        count = (
            f"{len(measured)} points measured"
            if metric is None
            else f"{self.evaluations:.3g} evaluations of the metric"
        )
        return "\n".join([*lines, f"{count}, {self.seconds:.1f} s", *(f"note: {note}" for note in self.notes)])


def _cells(point: Point, metric: bool) -> list[str]:
    figures = [(point.predicted_db, 1), (point.sqnr_db, 1), *([(point.metric, 4), (point.drop, 4)] if metric else ())]
    cells = ["-" if value is None else f"{value:.{digits}f}" for value, digits in figures]
    mark = "chosen" if point.chosen else "front" if point.front else ""
    return [point.name, *map(_short, point.costs.values()), *cells, mark]


def _short(value: float) -> str:
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Replace infinities, which JSON lacks, by null."""
    return {k: None if isinstance(v, str) and v in ("inf", "-inf", "nan") else v for k, v in row.items()}


def confirmed(points: Iterable[P], order: Callable[[P], Any], passes: Callable[[P], bool]) -> list[P]:
    """The points that held-back samples confirm, tested in order of noise until the first that fails.

    In an order that does not look at these samples every test may take the whole doubt: an error needs the first bad point of
    the order to pass (fixed sequence; Maurer, Hothorn and Lehmacher 1995).
    """
    return list(itertools.takewhile(passes, sorted(points, key=order)))


def decibel(noise: float) -> float:
    """SQNR in dB of a noise-to-signal ratio."""
    return math.inf if noise <= 0 else -10 * math.log10(noise)


def alone(groups: Sequence[Group], names: Sequence[str], noise: Any) -> dict[str, dict[str, float]]:
    """SQNR in dB of each group alone at each of its candidates; ``noise`` is ``[groups, candidates]``."""
    return {
        group.name: {names[c]: decibel(float(noise[i, c])) for c in group.candidates} for i, group in enumerate(groups)
    }


_LEAST = 0.02  # excess of a point that lost nothing


@dataclass
class Seen:
    """A measured point of the search.

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
    """Goal of a search.

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
        """Whether the search is for the cheapest good point, not the best within a budget."""
        return self.min_sqnr is not None or (self.metric is not None and self.metric.allowed is not None)

    @property
    def most_noise(self) -> float:
        """Noise over signal that ``min_sqnr`` allows."""
        return math.inf if self.min_sqnr is None else 10 ** (-self.min_sqnr / 10)

    def good(self, seen: Seen) -> bool:
        """Whether a point meets the goal with the confidence asked for, on the samples that choose."""
        return self.within(seen, seen.bound)

    def within(self, seen: Seen, drop: float) -> bool:
        """Whether a point meets the goal if its metric drops by ``drop``."""
        if self.min_sqnr is not None and decibel(seen.noise) < self.min_sqnr:
            return False
        if self.metric is None or self.metric.allowed is None:
            return True
        return seen.score is not None and seen.score.share == 1 and drop <= self.metric.allowed

    def safe(self, seen: Seen) -> bool:
        """Whether a point is likely (95 %) to be confirmed by held-back samples.

        They have an error of their own, so that the difference of the two halves has sqrt(2) times the error of one.
        """
        if self.metric is None or seen.score is None or not self.good(seen):
            return self.good(seen)
        normal = NormalDist()
        high = normal.cdf(normal.inv_cdf(min(self.confidence, 0.999)) + math.sqrt(2) * normal.inv_cdf(0.95))
        return self.within(seen, self.metric.bound(seen.score, high))

    def excess(self, seen: Seen) -> float:
        """Ratio of a point's loss to the allowed loss; above 1 where it is not good."""
        found = [seen.noise / self.most_noise]
        if self.metric is not None and self.metric.allowed is not None and seen.score is not None:
            lost, allowed = max(seen.bound, 0.0), self.metric.allowed
            found.append(lost / allowed if allowed else (math.inf if lost else 0.0))
        return max(*found, _LEAST)

    def rank(self, seen: Seen) -> tuple[float, ...]:
        """Sort key among points within the budget; lower is better."""
        if self.quality:
            return (0.0, seen.cost, seen.noise) if self.good(seen) else (1.0, seen.drop, seen.noise)
        return (seen.drop, seen.noise) if self.metric is not None else (seen.noise,)


@dataclass
class Book:
    """Record of the measured points.

    Attributes:
        goal: what they are measured against.
        seen: by choice.
        best: of them.
    """

    goal: Goal
    seen: dict[Choice, Seen] = field(default_factory=dict)
    best: Seen | None = None

    def add(self, point: Seen) -> bool:
        """Add a point; returns whether it is the best so far."""
        self.seen[point.choice] = point
        if self.best is None or self.goal.rank(point) < self.goal.rank(self.best):
            self.best = point
            return True
        return False

    def good(self) -> list[Seen]:
        """The points that meet the goal."""
        return [p for p in self.seen.values() if self.goal.good(p)]
