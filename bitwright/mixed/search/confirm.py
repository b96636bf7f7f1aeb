"""The last word on the points of a search: on samples that chose nothing."""

from __future__ import annotations

from typing import Any

from bitwright.mixed.search.goal import Book, Seen
from bitwright.mixed.search.measure import one_sided


def last_word(book: Book) -> tuple[Seen | None, dict[str, Any] | None]:
    """The cheapest good point that the samples held back bear out, and the interval of its drop there.

    Points are tested from the quietest outputs on, and the first that fails ends it. In an order that does not look at these
    samples every test may take the whole doubt: an error needs the first bad point of the order to pass (fixed sequence;
    Maurer, Hothorn and Lehmacher 1995). So no point is added to a search after a test.
    """
    goal = book.goal
    good, metric = book.good(), goal.metric
    if not good:
        return None, None
    best = min(good, key=goal.rank)
    if metric is None or best.score is None:
        return best, None
    if metric.allowed is None or metric.held_back == 0:
        found = metric.interval(best.score, goal.confidence)
        return best, {**_interval(found), "held_back": metric.held_back}
    passed: dict[int, dict[str, Any]] = {}
    first: dict[str, Any] | None = None
    for point in sorted(good, key=lambda p: (p.noise, p.cost)):
        assert point.score is not None
        found = metric.interval(point.score, one_sided(goal.confidence))
        told = {**_interval(found), "held_back": metric.held_back, "allowed": metric.allowed}
        first = first or told
        if metric.worst(found) > metric.allowed:
            break
        passed[id(point)] = told
    chosen = min((p for p in good if id(p) in passed), key=goal.rank, default=None)
    return (None, first) if chosen is None else (chosen, passed[id(chosen)])


def why_none(book: Book) -> str:
    """Why no point is the result."""
    goal = book.goal
    if not any(goal.within(p, p.drop) for p in book.seen.values()):
        return "no point keeps within what is allowed; the simulation has the best one"
    held_back = goal.metric.held_back if goal.metric is not None else 0
    return (
        f"points keep within the allowed drop on the samples that choose; on the {held_back} held back none does "
        f"with a confidence of {goal.confidence:.0%}: give more samples, or allow more"
    )


def _interval(difference: Any) -> dict[str, Any]:
    names = ("estimate", "low", "high", "confidence", "n", "test", "text")
    return {name: getattr(difference, name) for name in names}
