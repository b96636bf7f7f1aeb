"""Requantization: the conversion of integer sums to the grid of the output, by target.

==========================  =========================================================================================
name                        arithmetic
==========================  =========================================================================================
``float32``                 float32(sum) * float32(factor), a half to even
``q31_double``              Q31 mantissa and a shift; the doubled high half rounds a half upwards, the shift rounds a
                            half away from zero
``q31_single``              Q31 mantissa and a shift; the whole product is rounded once, a half upwards
``q15_single``              the mantissa shortened to 15 bits, one rounding, a half upwards; sums of 64 bits
``q23_single``              the 24 bits of a float32 factor, one rounding, a half upwards
``q23_away``                the same, a half away from zero
``folded``                  the zero point added to the sum, which is cut to 3 bits below the code; a factor of 11 bits, a half
                            upwards
``once``                    the exact product, a half to even: the rounding of a simulation
``truncated``               the exact product, cut down to the next whole number: a shift without rounding
==========================  =========================================================================================

Sources: gemmlowp ``fixedpoint.h``, TensorFlow Lite ``kernels/internal/common.h`` and ``quantization_util.cc``, MLAS
``quantize.cpp`` and ``qlgavgpool.cpp``, XNNPACK ``src/qs8-requantization``, CMSIS-NN ``arm_nnsupportfunctions.h``.
"""

from __future__ import annotations

from collections.abc import Callable
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
    product += np.int64(1) << (_MANTISSA - 1)  # gemmlowp's nudge and division towards zero come to the same
    return np.asarray(product >> _MANTISSA, np.int64)


def rounded_shift(values: Any, bits: Any) -> Integers:
    """``values / 2 ** bits``, rounded to nearest, a half away from zero."""
    values, bits = np.asarray(values, np.int64), np.asarray(bits, np.int64)
    half = (np.int64(1) << bits) >> 1
    return np.asarray((values + (half - ((values < 0) & (bits > 0)))) >> bits, np.int64)


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


def rescaled_upwards(sums: Any, mantissa: Any, shift: Any) -> Integers:
    """:func:`rescaled` where the second rounding too is a half upwards, as the matrix products of ruy do it.

    Example:
        >>> int(rescaled_upwards(-6, *quantize_multiplier(0.25))), int(rescaled(-6, *quantize_multiplier(0.25)))
        (-1, -2)
    """
    shift = np.asarray(shift, np.int64)
    right = np.maximum(-shift, 0)
    whole = high_product(np.asarray(sums, np.int64) << np.maximum(shift, 0), mantissa)
    return np.asarray((whole + ((np.int64(1) << right) >> 1)) >> right, np.int64)


def rescaled_once(sums: Any, mantissa: Any, shift: Any) -> Integers:
    """:func:`rescaled` with one rounding of the whole product, a half upwards."""
    bits = _MANTISSA - np.asarray(shift, np.int64)
    product = np.asarray(sums, np.int64) * np.asarray(mantissa, np.int64)
    return np.asarray((product + (np.int64(1) << (bits - 1))) >> bits, np.int64)


def rescaled_wide(sums: Any, mantissa: Any, shift: Any) -> Integers:
    """:func:`rescaled` for 64-bit sums of 16-bit activations: a 15-bit mantissa, and one rounding, a half upwards."""
    kept = _narrowed(np.asarray(mantissa, np.int64))
    bits = _MANTISSA - _NARROW - np.asarray(shift, np.int64)
    return np.asarray((np.asarray(sums, np.int64) * kept + (np.int64(1) << (bits - 1))) >> bits, np.int64)


def _narrowed(mantissa: Integers) -> Integers:
    """A mantissa of 31 bits as one of 15."""
    return np.asarray(np.minimum((mantissa + (1 << (_NARROW - 1))) >> _NARROW, 0x7FFF), np.int64)


def rescaling_error(factor: ArrayLike) -> float:
    """A bound on the error of :func:`rescaled` before its last rounding.

    The first rounding is to multiples of ``2 ** shift``: half of that, where it shifts to the right.

    Example:
        >>> rescaling_error(0.3), rescaling_error(1.7)
        (0.25, 0.0)
    """
    shift = quantize_multiplier(factor)[1]
    return float(np.max(np.where(shift < 0, np.exp2(shift - 1.0), 0.0), initial=0.0))


def wide_rescaling_error(factor: ArrayLike, largest: float) -> float:
    """A bound on the error of :func:`rescaled_wide`'s shorter mantissa for results up to ``largest``."""
    mantissa, shift = quantize_multiplier(factor)
    kept = _narrowed(mantissa)
    exact = np.asarray(factor, np.float64)
    stands = kept * np.exp2(shift - float(_MANTISSA - _NARROW))
    return float(np.max(np.abs(stands - exact) / exact, initial=0.0)) * largest


def rescaled_by_float_bits(sums: Any, factor: ArrayLike) -> Integers:
    """``sums * factor`` with the 24 bits of a float32 factor as multiplier, rounded once, a half upwards.

    Example:
        >>> rescaled_by_float_bits([3, -3, 5], np.float32(0.5)).tolist()
        [2, -1, 3]
    """
    fraction, exponent = np.frexp(np.asarray(factor, np.float32))
    mantissa = (fraction.astype(np.float64) * (1 << 24)).astype(np.int64)
    bits = 24 - exponent.astype(np.int64)
    product = np.asarray(sums, np.int64) * mantissa
    shift = np.clip(bits, 1, 62)
    return np.asarray((product + (np.int64(1) << (shift - 1))) >> shift, np.int64)


def _rescaled_away(sums: Any, factor: ArrayLike) -> Integers:
    """:func:`rescaled_by_float_bits` with a half away from zero: NEON takes one off what is negative before it shifts."""
    whole = np.asarray(sums, np.int64)
    return np.sign(whole) * rescaled_by_float_bits(np.abs(whole), factor)


_SIGNIFICAND, _KEPT = 11, 3  # bits of the factor, and bits below the code that sums keep


def rescaled_folded(sums: Any, factor: ArrayLike, zero_point: int) -> Integers:
    """Codes of Qualcomm's HTP: the zero point is added to the sum, which is cut to three bits below the code.

    The factor has 11 bits, as in float16; the product is rounded once, a half upwards.

    Args:
        sums: of 32 bits, broadcast against ``factor``.
        factor: input scale times weight scale over output scale.
        zero_point: of the output.

    Returns:
        Codes that are not limited to the grid yet, int64.

    Example:
        >>> rescaled_folded([100, 104, 107], 0.01, 5).tolist()
        [6, 6, 6]

    Measured with the simulator of onnxruntime-qnn 2.7, which publishes no arithmetic.
    """
    values = np.asarray(factor, np.float64)
    fraction, exponent = np.frexp(values)
    significand = np.rint(fraction * (1 << _SIGNIFICAND)).astype(np.int64)
    cut = np.maximum(-exponent.astype(np.int64) - _KEPT, 0)
    total = (np.asarray(sums, np.int64) + np.rint(zero_point / values).astype(np.int64)) >> cut
    bits = np.clip(_SIGNIFICAND - exponent - cut, 1, 62).astype(np.int64)
    return np.asarray((total * significand + (np.int64(1) << (bits - 1))) >> bits, np.int64)


#: steps of an 8-bit grid by which :func:`rescaled_folded` lies off the product, before its last rounding: the bits that are cut
#: off, and half a unit of the last bit of the factor at the 256 codes of a grid
FOLDED_ERROR = 2.0**-_KEPT + 256 * 2.0 ** -(_SIGNIFICAND + 1)


def rescaled_in_float32(sums: Any, factor: ArrayLike) -> NDArray[np.float32]:
    """``float32(sums) * float32(factor)``, a half to even, as whole numbers in float32.

    Sums beyond ``2 ** 24`` are rounded when they become float32, as ``cvtdq2ps`` does.

    Example:
        >>> rescaled_in_float32([1, 3, 5], 0.5).tolist()
        [0.0, 2.0, 2.0]
    """
    product = np.multiply(np.asarray(sums).astype(np.float32), np.asarray(factor, np.float32), dtype=np.float32)
    return np.rint(product, out=product if product.ndim else None)


def rounded_away(values: Any) -> Any:
    """To nearest, a half away from zero, as C's ``round``."""
    return np.sign(values) * np.floor(np.abs(values) + np.asarray(0.5, np.asarray(values).dtype))


#: name in a profile -> ``(sums, factor) -> whole numbers``; ``factor`` is float64 or float32 and broadcasts against the sums
REQUANTIZERS: dict[str, Callable[[Any, Any], Any]] = {
    "float32": rescaled_in_float32,
    "q31_double": lambda sums, factor: rescaled(sums, *quantize_multiplier(factor)),
    "q31_upwards": lambda sums, factor: rescaled_upwards(sums, *quantize_multiplier(factor)),
    "q31_single": lambda sums, factor: rescaled_once(sums, *quantize_multiplier(factor)),
    "q15_single": lambda sums, factor: rescaled_wide(sums, *quantize_multiplier(factor)),
    "q23_single": rescaled_by_float_bits,
    "q23_away": _rescaled_away,
    "truncated": lambda sums, factor: np.floor(np.asarray(sums) * np.asarray(factor, np.float64)).astype(np.int64),
    "once": lambda sums, factor: np.rint(np.asarray(sums) * np.asarray(factor, np.float64)).astype(np.int64),
}
