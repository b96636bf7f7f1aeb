"""Rescaling of integer sums in fixed point, as the kernels of TensorFlow Lite and of microcontrollers do it.

A real factor becomes a 32-bit mantissa and a power of two. The product with a sum of 32 bits is rounded twice: to the upper 32
bits of the product, and by the shift to the right that follows. All functions are exact on integers.

Source: gemmlowp, ``fixedpoint/fixedpoint.h``; Jacob et al. 2018, arXiv:1712.05877, section 2.2; ``tensorflow/lite/kernels/
internal/common.h`` for the form with 64-bit sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Integers = NDArray[np.int64]
_MANTISSA = 31  # fractional bits
_NARROW = 16  # that the form for sums of 64 bits leaves away


def quantize_multiplier(factor: ArrayLike) -> tuple[Integers, Integers]:
    """Positive factors as ``mantissa * 2 ** (shift - 31)``.

    Args:
        factor: float64, of any shape.

    Returns:
        The mantissa, from ``2 ** 30`` to ``2 ** 31 - 1`` (0 of factors below ``2 ** -32``), and the shift.

    Example:
        >>> [int(part) for part in quantize_multiplier(0.25)]
        [1073741824, -1]
    """
    fraction, exponent = np.frexp(np.asarray(factor, np.float64))
    mantissa = np.floor(fraction * (1 << _MANTISSA) + 0.5).astype(np.int64)
    full = mantissa == 1 << _MANTISSA
    mantissa, shift = np.where(full, mantissa >> 1, mantissa), exponent.astype(np.int64) + full
    gone = shift < -_MANTISSA
    return np.where(gone, 0, mantissa), np.where(gone, 0, shift)


def high_product(a: Any, b: Any) -> Integers:
    """The upper half of ``2 * a * b`` of 32-bit integers, rounded to nearest, a half upwards."""
    product = np.asarray(a, np.int64) * np.asarray(b, np.int64)
    half = np.int64(1) << (_MANTISSA - 1)
    return _truncated(product + np.where(product >= 0, half, 1 - half), _MANTISSA)


def _truncated(values: Integers, bits: int) -> Integers:
    """``values / 2 ** bits`` rounded towards zero."""
    return np.where(values >= 0, values >> bits, -(-values >> bits))


def rounded_shift(values: Any, bits: Any) -> Integers:
    """``values / 2 ** bits``, rounded to nearest, a half away from zero."""
    values, bits = np.asarray(values, np.int64), np.asarray(bits, np.int64)
    mask = (np.int64(1) << bits) - 1
    return np.asarray((values >> bits) + ((values & mask) > (mask >> 1) + (values < 0)), np.int64)


def rescaled(sums: Any, mantissa: Any, shift: Any) -> Integers:
    """``sums * mantissa * 2 ** (shift - 31)`` with two roundings.

    Args:
        sums: of 32 bits.
        mantissa, shift: of :func:`quantize_multiplier`; broadcast against ``sums``.

    Example:
        >>> int(rescaled(1, *quantize_multiplier(0.3))), int(rescaled(1, *quantize_multiplier(0.2)))
        (1, 0)
    """
    shift = np.asarray(shift, np.int64)
    left = np.asarray(sums, np.int64) << np.maximum(shift, 0)
    return rounded_shift(high_product(left, mantissa), np.maximum(-shift, 0))


def rescaled_once(sums: Any, mantissa: Any, shift: Any) -> Integers:
    """The same with one rounding of the whole product, a half upwards."""
    bits = _MANTISSA - np.asarray(shift, np.int64)
    product = np.asarray(sums, np.int64) * np.asarray(mantissa, np.int64)
    return np.asarray((product + (np.int64(1) << (bits - 1))) >> bits, np.int64)


def rescaled_wide(sums: Any, mantissa: Any, shift: Any) -> Integers:
    """The same for sums of 64 bits, beside activations of 16: a mantissa of 15 bits, and one rounding, a half upwards."""
    kept = _narrowed(np.asarray(mantissa, np.int64))
    bits = _MANTISSA - _NARROW - np.asarray(shift, np.int64)
    return np.asarray((np.asarray(sums, np.int64) * kept + (np.int64(1) << (bits - 1))) >> bits, np.int64)


def _narrowed(mantissa: Integers) -> Integers:
    """A mantissa of 31 bits as one of 15."""
    return np.asarray(np.minimum((mantissa + (1 << (_NARROW - 1))) >> _NARROW, 0x7FFF), np.int64)


def rescaling_error(factor: ArrayLike) -> float:
    """The most by which :func:`rescaled` lies off the rounded product with one of ``factor``, before its last rounding.

    The first rounding is to multiples of ``2 ** shift``: half of that, where it shifts to the right.

    Example:
        >>> rescaling_error(0.3), rescaling_error(1.7)
        (0.25, 0.0)
    """
    shift = quantize_multiplier(factor)[1]
    return float(np.max(np.where(shift < 0, np.exp2(shift - 1.0), 0.0), initial=0.0))


def wide_rescaling_error(factor: ArrayLike, largest: float) -> float:
    """The most by which the shorter mantissa of :func:`rescaled_wide` moves results of size ``largest``."""
    mantissa, shift = quantize_multiplier(factor)
    kept = _narrowed(mantissa)
    exact = np.asarray(factor, np.float64)
    stands = kept * np.exp2(shift - float(_MANTISSA - _NARROW))
    return float(np.max(np.abs(stands - exact) / exact, initial=0.0)) * largest
