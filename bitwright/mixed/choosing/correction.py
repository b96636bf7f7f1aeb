"""The additive model of the noise, corrected by what was measured.

Errors of groups that were added up miss what they do to each other. After each measurement, factors per group and per
candidate are fitted, in logarithms and with a penalty that keeps them near 1, so that the sum gives what was seen. One more
factor, of all, is nearly free: rounding that makes up for the errors of earlier layers lowers the noise of every choice.
What two groups do together is a term of its own, where it was found (:mod:`bitwright.mixed.choosing.interactions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from bitwright.mixed.choosing.choice import Choice
from bitwright.mixed.choosing.costs import Cost, Pair

Floats = NDArray[np.float64]
_STIFF = 0.3  # how much a factor of e costs, in units of an error of e in one measurement
_FREE = 0.03  # the same for the factor of all
_ROUNDS = 30
_TINY = 1e-30


@dataclass
class Correction:
    """Estimates and measurements.

    Attributes:
        estimate: ``[groups, candidates]``, noise that each makes alone.
        seen: (choice, noise measured).
        pairs: noise that two groups make together.
        coarser: for each candidate those that cannot have less noise than it; empty where nothing is known of them.
    """

    estimate: Floats
    seen: list[tuple[Choice, float]] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    coarser: Sequence[Sequence[int]] = ()

    def see(self, choice: Choice, noise: float) -> None:
        """Take a measurement into account."""
        if np.isfinite(noise):
            self.seen.append((choice, max(noise, _TINY)))

    @property
    def plain(self) -> Cost:
        """The estimates without factors."""
        return Cost.noise(self._ordered(self.estimate), tuple(self.pairs))

    def _ordered(self, table: Floats) -> Floats:
        """``table`` with at least the noise of a candidate at those that are coarser.

        Factors follow what was seen: without this, a candidate that no point had yet would look better than a finer one that was
        found to be loud.
        """
        found = table.copy()
        for finer, those in enumerate(self.coarser):
            for c in those:
                found[:, c] = np.maximum(found[:, c], table[:, finer])
        return found

    def noise(self) -> Cost:
        """The estimates times the factors that explain the measurements best."""
        base = np.log(np.maximum(self.estimate, _TINY))
        groups, candidates = base.shape
        theta = np.zeros(groups + candidates + 1)
        stiff = np.append(np.full(groups + candidates, _STIFF**2), _FREE**2)
        if not self.seen:
            return Cost.noise(self._ordered(np.exp(base)), tuple(self.pairs))
        at = np.array([choice for choice, _ in self.seen])
        wanted = np.log([noise for _, noise in self.seen])
        together = np.array([self.plain.together(choice) for choice, _ in self.seen])
        for _ in range(_ROUNDS):
            jacobian, found = self._slopes(base, theta, at, together)
            left = wanted - found
            normal = jacobian.T @ jacobian + np.diag(stiff)
            step = np.linalg.solve(normal, jacobian.T @ left - stiff * theta)
            theta += step / max(1.0, float(np.abs(step).max()))
            if np.abs(step).max() < 1e-6:
                break
        table = np.exp(base + theta[:groups, None] + theta[None, groups:-1] + theta[-1])
        return Cost.noise(
            self._ordered(table), tuple(replace(p, extra=p.extra * np.exp(theta[-1])) for p in self.pairs)
        )

    @staticmethod
    def _slopes(base: Floats, theta: Floats, at: NDArray[np.int64], together: Floats) -> tuple[Floats, Floats]:
        """Derivatives of the logarithm of each sum by the logarithms of the factors, and the logarithms themselves."""
        groups, candidates = base.shape
        which = np.arange(groups)
        logs = base[which, at] + theta[:groups] + theta[groups:-1][at] + theta[-1]
        pairs = np.log(np.maximum(together, _TINY)) + theta[-1]
        largest = np.maximum(logs.max(1), pairs)[:, None]
        parts = np.exp(logs - largest)
        whole = parts.sum(1) + np.exp(pairs - largest[:, 0])
        share: Floats = parts / whole[:, None]
        by_candidate = np.stack([(share * (at == c)).sum(1) for c in range(candidates)], 1)
        found = largest[:, 0] + np.log(whole)
        return np.hstack([share, by_candidate, np.ones((len(at), 1))]), found
