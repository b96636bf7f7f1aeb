"""Sums of floating-point numbers without rounding: the same whatever the order, and however the numbers are divided."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

# a float64 is an integer of 53 bits times a power of two, of which 2^-1126 divides the least
_LOWEST = 1126
_BITS, _MASK = 32, (1 << 32) - 1
_LIMBS = (_LOWEST + 1024) // _BITS + 3


class ExactSum:
    """The sum of float64 numbers, column by column, as integers of 32 bits each beside the other.

    Args:
        size: how many sums.

    Attributes:
        limbs: ``[L, size]`` int64; those of several sums may be added, and are the limbs of all their numbers together. Up to
            2^30 numbers fit.

    Example:
        >>> total = ExactSum(1)
        >>> for x in (1e300, 1.0, -1e300):
        ...     total.add(np.array([x]))
        >>> float(total.values()[0])
        1.0
    """

    def __init__(self, size: int) -> None:
        self.limbs: NDArray[np.int64] = np.zeros((_LIMBS, size), np.int64)

    def add(self, values: NDArray[np.float64]) -> None:
        """Add one number to each sum; ``values`` is ``[size]``, finite."""
        fraction, exponent = np.frexp(np.abs(values))
        integer = np.ldexp(fraction, 53).astype(np.int64)
        first, shift = np.divmod(exponent.astype(np.int64) - 53 + _LOWEST, _BITS)
        low = (integer & _MASK) << shift  # below 2^63
        high = ((integer >> _BITS) << shift) + (low >> _BITS)
        sign = np.where(values < 0, -1, 1)
        columns = np.arange(len(values))
        for i, part in enumerate((low & _MASK, high & _MASK, high >> _BITS)):
            self.limbs[first + i, columns] += sign * part

    def values(self) -> list[Fraction]:
        """The sums."""
        unit = Fraction(1, 1 << _LOWEST)
        used = np.flatnonzero(self.limbs.any(1)).tolist()
        return [unit * sum(int(column[i]) << (_BITS * i) for i in used) for column in self.limbs.T]
