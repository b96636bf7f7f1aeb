"""Groups whose errors do more together than alone: looked for where a point is much louder than its parts.

The noise of parts is estimated to first order, so that what two errors do only together (a product of both) is not in it. Where
it matters, measurements find it: groups are lowered one after the other until the noise is there, by bisection; the last one
that was needed is one of the two, and the same with it lowered from the start finds the other (as QuickXplain does for
conflicts; Junker 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bitwright.mixed.choosing.choice import Choice
from bitwright.mixed.choosing.correction import Correction
from bitwright.mixed.choosing.costs import Pair
from bitwright.mixed.precisions.candidates import Candidate

LOUD = 2.0  # times the noise that was expected, from which on a point is looked into
_HALF = 0.5  # share of the noise in excess that has to be there
_MOST = 2  # times per search


@dataclass
class Interactions:
    """The search for what groups do together.

    Attributes:
        correction: the estimates; what is found is added to them.
        measure: noise of a choice, with the weights that were estimated.
        base: the candidate with the most bits for every group.
        units: groups that have to be lowered together.
        candidates: their bits say which of them are at least as coarse as the ones that were measured.
        looked: how often something was looked for.
    """

    correction: Correction
    measure: Callable[[Choice], float]
    base: Choice
    units: Sequence[Sequence[int]]
    candidates: Sequence[Candidate]
    looked: int = 0
    _known: dict[Choice, float] = field(default_factory=dict, repr=False)

    def worth(self, expected: float, noise: float) -> bool:
        """Whether a point is so much louder than expected that it should be looked into."""
        return len(self.correction.seen) > 1 and noise > LOUD * expected and self.looked < _MOST

    def find(self, choice: Choice) -> tuple[int, ...]:
        """Look for the groups that make ``choice`` loud, and correct the estimates; which ones, none where there are many."""
        self.looked += 1
        low = [unit for unit in self.units if any(choice[g] != self.base[g] for g in unit)]
        whole = self._excess(choice, low)
        if whole < (LOUD - 1) * self.correction.plain.of(choice):
            return ()  # of the rounding of this point, not of its precisions
        enough = whole * _HALF
        last = self._first(choice, low, [], enough)
        partners = low[:last]
        kept = [low[last]]
        if self._excess(choice, kept) >= enough:
            return self._alone(choice, low[last], self._excess(choice, kept))
        other = self._first(choice, partners, kept, enough)
        found = self._excess(choice, [partners[other], *kept])
        if found < enough:
            return ()  # more than two of them
        return self._together(choice, partners[other], low[last], found)

    def _first(
        self, choice: Choice, units: Sequence[Sequence[int]], kept: Sequence[Sequence[int]], enough: float
    ) -> int:
        """Place of the first unit with which, after those before it and ``kept``, the noise in excess is there."""
        low, high = -1, len(units) - 1  # with all of them it is
        while high - low > 1:
            middle = (low + high) // 2
            there = self._excess(choice, [*units[: middle + 1], *kept]) >= enough
            low, high = (low, middle) if there else (middle, high)
        return high

    def _excess(self, choice: Choice, units: Sequence[Sequence[int]]) -> float:
        """Noise beyond the estimates with these units of ``choice`` lowered."""
        mixed = list(self.base)
        for unit in units:
            for g in unit:
                mixed[g] = choice[g]
        wanted = tuple(mixed)
        if wanted not in self._known:
            self._known[wanted] = self.measure(wanted)
        return self._known[wanted] - self.correction.plain.of(wanted)

    def _alone(self, choice: Choice, unit: Sequence[int], noise: float) -> tuple[int, ...]:
        """The estimate of one group was too low."""
        group = self._of(choice, unit)
        for c in self._coarser(choice[group], self.base[group]):
            self.correction.estimate[group, c] += noise
        return (group,)

    def _together(self, choice: Choice, one: Sequence[int], other: Sequence[int], noise: float) -> tuple[int, ...]:
        """Two groups make noise together, also at candidates that are coarser still."""
        first, second = self._of(choice, one), self._of(choice, other)
        size = len(self.candidates)
        extra = np.zeros((size, size))
        for i in self._coarser(choice[first], self.base[first]):
            for j in self._coarser(choice[second], self.base[second]):
                extra[i, j] = noise
        self.correction.pairs.append(Pair(first, second, extra))
        return first, second

    def _of(self, choice: Choice, unit: Sequence[int]) -> int:
        """The group of a unit that stands for it."""
        return next(g for g in unit if choice[g] != self.base[g])

    def _coarser(self, candidate: int, base: int) -> list[int]:
        """Candidates of no more bits than ``candidate`` where it has fewer than ``base``."""
        bits, most = self.candidates[candidate].bits, self.candidates[base].bits
        cut = [k for k in (0, 1) if bits[k] < most[k]]
        return [
            c
            for c, other in enumerate(self.candidates)
            if all(other.bits[k] <= bits[k] for k in cut) and (cut or c == candidate)
        ]


def told(groups: Sequence[str], found: Sequence[int]) -> str:
    """What was found, in a sentence for notes."""
    if len(found) == 1:
        return f"what {groups[found[0]]} costs was measured: its estimate was far too low"
    return f"{groups[found[0]]} and {groups[found[1]]} cost far more together than alone; what they do was measured"
