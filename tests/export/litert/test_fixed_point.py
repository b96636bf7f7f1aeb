"""Rescaling in fixed point: exact against rational arithmetic, rounding by rounding."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest

from bitwright.export.litert.flat import (
    high_product,
    quantize_multiplier,
    rescaled,
    rescaled_once,
    rescaled_wide,
    rescaling_error,
    rounded_shift,
    wide_rescaling_error,
)

FACTORS = [1e-6, 0.0113, 0.2, 0.25, 0.3, 0.4999, 0.5, 0.75, 0.999999999999, 1.0, 1.7, 5.0]


def away(value: Fraction) -> int:
    """To nearest, a half away from zero."""
    return floor(abs(value) + Fraction(1, 2)) * (1 if value >= 0 else -1)


def sums(bits: int = 24) -> np.ndarray:
    return np.random.default_rng(0).integers(-(1 << bits), 1 << bits, 500)


@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_is_its_mantissa_to_31_bits(factor: float) -> None:
    mantissa, shift = (int(part) for part in quantize_multiplier(factor))
    assert 1 << 30 <= mantissa < 1 << 31
    assert abs(Fraction(mantissa) * Fraction(2) ** (shift - 31) / Fraction(factor) - 1) <= Fraction(1, 1 << 31)


def test_a_factor_that_no_shift_reaches_is_zero() -> None:
    assert [int(part) for part in quantize_multiplier(2.0**-40)] == [0, 0]
    assert int(rescaled(1 << 30, *quantize_multiplier(2.0**-40))) == 0


@pytest.mark.parametrize("factor", FACTORS)
def test_halves_go_upwards_first_and_away_from_zero_then(factor: float) -> None:
    mantissa, shift = (int(part) for part in quantize_multiplier(factor))
    for x in sums().tolist():
        first = floor(Fraction(x * 2 ** max(shift, 0) * mantissa, 1 << 31) + Fraction(1, 2))
        assert int(rescaled(x, mantissa, shift)) == away(Fraction(first, 2 ** max(-shift, 0)))


def test_half_of_a_product_is_rounded_upwards() -> None:
    assert high_product([3, -3, 1, -1], 1 << 29).tolist() == [1, -1, 0, 0]
    assert high_product([2, -2], 1 << 29).tolist() == [1, 0]  # gemmlowp's nudge: a negative half goes to zero
    assert rounded_shift([1, -1, 3, -3, 5], 1).tolist() == [1, -1, 2, -2, 3]


@pytest.mark.parametrize("factor", [0.1301234567, 0.2612345678, 0.3012345678, 0.4912345678, 0.6012345678])
def test_the_error_bound_holds_and_is_reached(factor: float) -> None:
    x = np.arange(-40000, 40000)
    off = np.abs(rescaled(x, *quantize_multiplier(factor)) - x * factor) - 0.5
    assert off.max() <= rescaling_error(factor) + 1e-4
    assert off.max() >= 0.9 * rescaling_error(factor) - 1e-3
    once = np.abs(rescaled_once(x, *quantize_multiplier(factor)) - x * factor) - 0.5
    assert once.max() <= 1e-4


@pytest.mark.parametrize("factor", [1e-4, 0.0113, 0.3])
def test_wide_sums_are_rounded_once_with_a_short_mantissa(factor: float) -> None:
    x = np.random.default_rng(0).integers(-int(32000 / factor), int(32000 / factor), 20000)
    off = np.abs(rescaled_wide(x, *quantize_multiplier(factor)) - x * factor) - 0.5
    bound = wide_rescaling_error(factor, 32000)
    assert bound <= 1.0 and off.max() <= bound + 1e-3 and off.max() >= bound / 2 - 1e-3
