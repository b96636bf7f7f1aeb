"""Comparing run times on a machine in use by others: interleaved rounds, medians and their spread."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: quartiles further apart than this share of the median say more about the machine than about the model
MOST_SPREAD = 0.25
_FEWEST, _MOST = 7, 400  # rounds
_SHORT = 0.01  # seconds


@dataclass(frozen=True)
class Timing:
    """Seconds of one step in every round.

    Attributes:
        rounds: seconds, wall clock.
    """

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a share of the median."""
        low, _, high = statistics.quantiles(self.rounds, n=4)
        return (high - low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Ratio:
    """Speed ratio of two steps, from rounds that ran in turns.

    Attributes:
        median: above 1 where it is faster.
        low, high: quartiles over the rounds.
    """

    median: float
    low: float
    high: float

    @property
    def steady(self) -> bool:
        """Whether the quartiles are close enough for the median to mean something."""
        return self.high - self.low <= MOST_SPREAD * self.median

    @property
    def slower(self) -> bool:
        """Whether it is slower, beyond what the rounds differ by."""
        return self.steady and self.high < 1

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f})"


def interleaved(
    steps: Mapping[str, Callable[[], object]],
    *,
    seconds: float = 2.0,
    rounds: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times of ``steps``: every round runs each of them, in an order drawn anew.

    What slows the machine for a while slows all of them. One unmeasured round comes first, for lazy loading; a short step runs
    once unmeasured before it is measured, too: after a larger model it found the caches cold, 5 % of the time of a small one.

    Args:
        steps: name -> what is timed.
        seconds: wall clock to be spent on what is measured; at least seven rounds are run.
        rounds: exactly so many instead.
        clock: ``time.process_time`` leaves out what other processes take, where one thread does the work.
    """
    names, order = list(steps), random.Random(0)
    start, last = time.perf_counter(), {}
    for name, step in steps.items():
        last[name] = _timed(step, clock)
    once = max(time.perf_counter() - start, 1e-6)
    count = max(_FEWEST, min(_MOST, int(seconds / once))) if rounds is None else max(2, rounds)
    found: dict[str, list[float]] = {name: [] for name in names}
    enabled = gc.isenabled()
    gc.disable()  # a collection would be counted as the work of whatever ran then
    try:
        for _ in range(count):
            for name in order.sample(names, len(names)):
                if last[name] < _SHORT:
                    steps[name]()
                last[name] = _timed(steps[name], clock)
                found[name].append(last[name])
    finally:
        if enabled:
            gc.enable()
    return {name: Timing(tuple(times)) for name, times in found.items()}


def _timed(step: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    step()
    return clock() - start


def ratio(base: Timing, other: Timing) -> Ratio:
    """How many times as fast ``other`` is as ``base``; both come from one call of :func:`interleaved`.

    Example:
        >>> str(ratio(Timing((2.0, 2.0, 4.0)), Timing((1.0, 1.0, 2.0))))
        '2.00x (2.00 to 2.00)'
    """
    each = [one / two for one, two in zip(base.rounds, other.rounds, strict=True)]
    low, middle, high = _quartiles(each)
    return Ratio(middle, low, high)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, statistics.median(values), high
