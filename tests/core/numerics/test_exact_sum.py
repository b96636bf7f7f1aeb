"""Exact sums are those of fractions, in every order and in parts."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from bitwright.core.numerics.statistics import ExactSum


def numbers() -> np.ndarray:
    rng = np.random.default_rng(0)
    found = rng.normal(size=(200, 3)) * 2.0 ** rng.integers(-1000, 1000, (200, 3))
    extremes = [5e-324, -5e-324, np.finfo(np.float64).max, -np.finfo(np.float64).max, 0.0, -0.0, 2.0**-1022, 1.0]
    found[: len(extremes), 0] = extremes
    return found


def summed(rows: np.ndarray) -> ExactSum:
    total = ExactSum(rows.shape[1])
    for row in rows:
        total.add(row)
    return total


def test_sums_are_those_of_fractions() -> None:
    rows = numbers()
    assert summed(rows).values() == [sum(map(Fraction, column.tolist())) for column in rows.T]


def test_order_and_division_do_not_matter() -> None:
    rows = numbers()
    whole, parts = summed(rows[::-1]), [summed(rows[i::3]) for i in range(3)]
    parts[0].limbs += parts[1].limbs + parts[2].limbs
    assert parts[0].values() == whole.values()
