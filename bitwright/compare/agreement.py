"""Compare the codes of two tensors on one grid: share of equal codes, and distance of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bitwright.core.numerics.formats import FloatFormat, parse_format
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ExportError

Array = NDArray[Any]

OUTPUT_FORMAT = "float32"  # of graph outputs that end in no quantizer
OUTPUT_STEP = 1e-3  # what counts as one step there, relative to the largest value
LEAST_EQUAL, MOST_LSB = 0.999, 1.0
# A value of a 16-bit grid lies up to 65,535 steps from zero and is rounded to float32, by up to 2 ** -24 of itself or 0.004
# steps; two such values are compared, or one and what it was rounded from, which a division by the scale rounded as well.
SLACK = 2 * 2.0**-24 * 2**16
_HALF_ROUNDS = 2.0**-11 * (1 + 2.0**-8)  # of itself, a value that becomes float16
_BFLOAT_ROUNDS = 2.0**-8 * (1 + 2.0**-7)  # a value that becomes bfloat16, which numpy has as float32 of 16 bits


@dataclass(frozen=True)
class Agreement:
    """Agreement of one tensor in one mode.

    Attributes:
        equal: share of elements with the same code, 0 to 1.
        lsb: largest difference in steps of the grid.
        elements: number of elements compared.
        off: how far the value before rounding lies beyond the border between two codes that differ, in steps; ``None``
            where it was not needed, or cannot be measured.
        allowed: how far the arithmetic of the kernel may bring it there.
    """

    equal: float
    lsb: float
    elements: int
    off: float | None = None
    allowed: float = 0.0

    @property
    def ok(self) -> bool:
        """At least 99.9 % equal codes (of few, all but one) and none more than one step off."""
        allowed = max(1.0, (1 - LEAST_EQUAL) * self.elements)
        return round((1 - self.equal) * self.elements) <= allowed and self.lsb <= MOST_LSB + SLACK

    @property
    def within(self) -> bool:
        """Whether codes that differ do so only where their value lies on the border between them."""
        return self.off is not None and self.off <= self.allowed


def compare(
    expected: Array, found: Array, facts: Mapping[str, Any], scale: Array | None, *, nan_is_free: bool = False
) -> Agreement:
    """Codes of two tensors on one grid.

    Args:
        expected, found: float, of one shape.
        facts: of the quantizer; ``format``, ``axis``, ``places`` are read.
        scale: one step of an integer grid: scalar, one per index of ``axis``, or one per block along it.
        nan_is_free: where ``expected`` is NaN on a grid of codes, ``found`` may be any number: no code stands for NaN, and
            runtimes differ in what they make of it. Only of a model that replaces the NaN before anything is returned.

    Raises:
        ExportError: the shapes differ.
    """
    if expected.shape != found.shape:
        raise ExportError(
            facts["places"][0][0],
            f"the simulation's value has shape {expected.shape}, the file's tensor {found.shape}",
            "give the values of the same input that graph_inputs holds",
        )
    if not expected.size:
        return Agreement(1.0, 0.0, 0)
    step = step_of(np.asarray(expected, np.float64), np.asarray(found, np.float64), facts, scale)
    one, other = in_float64(step, expected, found, codes=scale is not None)
    with np.errstate(invalid="ignore"):
        difference = np.where(one == other, 0.0, np.abs(one - other) / step)
    difference = np.where(np.isnan(difference), np.inf, difference)
    if nan_is_free and scale is not None:
        difference = np.where(np.isnan(one), 0.0, difference)
    return Agreement(float((difference < 0.5).mean()), float(difference.max()), expected.size)


def in_float64(step: Array, *tensors: Array, codes: bool = True) -> list[Array]:
    """Dequantized codes of one place as float64.

    Where one of them is of half precision, all were rounded to it, and each value becomes the multiple of ``step`` that it was. A
    value that this rounding makes of no multiple stays what it is, as on a grid with another scale. Several multiples beyond 128
    steps may be one number of bfloat16: such a value is the one of the first of the other tensors, if that is among them.
    Nothing tells bfloat16 from float32 on grids of floats, which have no ``codes``.
    """
    wide = [np.asarray(x, np.float64) for x in tensors]
    with np.errstate(invalid="ignore"):
        nearest = [np.rint(x / step) * step for x in wide]
        coarse = [codes and _is_bfloat16(x, n) for x, n in zip(tensors, nearest, strict=True)]
        rounds = _BFLOAT_ROUNDS if any(coarse) else _HALF_ROUNDS if any(x.dtype.itemsize == 2 for x in tensors) else 0.0
        if not rounds:
            return wide
        made = [np.where(np.abs(n - x) <= rounds * np.abs(x), n, x) for n, x in zip(nearest, wide, strict=True)]
    return made if all(coarse) or not any(coarse) else _by_exact(tensors, made, coarse)


def _by_exact(tensors: Sequence[Array], made: Sequence[Array], coarse: Sequence[bool]) -> list[Array]:
    """Values of bfloat16 become those of the first tensor that is none, where it is rounded to them."""
    first = coarse.index(False)
    rounded = np.asarray(tensors[first]).astype(ml_dtypes.bfloat16).astype(np.float32)
    return [
        np.where(x == rounded, made[first], m) if half else m for x, m, half in zip(tensors, made, coarse, strict=True)
    ]


def _is_bfloat16(array: Array, nearest: Array) -> bool:
    """Whether float32 values were rounded to bfloat16: their last 16 bits are zero, and some are not the ``nearest`` multiples.

    On a grid whose multiples bfloat16 holds, such as one with a scale of 0.25, nothing was rounded.
    """
    if array.dtype != np.float32 or not array.any() or (np.ascontiguousarray(array).view(np.uint32) & 0xFFFF).any():
        return False
    wide = np.asarray(array, np.float64)
    return bool((np.abs(nearest - wide) > 2.0**-22 * np.abs(wide)).any())


def step_of(one: Array, other: Array, facts: Mapping[str, Any], scale: Array | None) -> Array:
    """One step of the grid at each element, broadcast against ``one``; ``facts`` and ``scale`` as for :func:`compare`."""
    fmt = None if facts["format"] == OUTPUT_FORMAT else parse_format(facts["format"])
    step = np.array(1.0) if scale is None else spread(scale, facts["axis"], one)
    if (
        isinstance(fmt, FloatFormat) and fmt.codebook
    ):  # without scales the numbers themselves are stored, and are equal or not
        gap = float(np.diff(fmt.codebook).min())
        return gap * step if scale is not None else np.array(1e-6 * np.abs(one).max(initial=1e-30))
    return _spacing(one, other, fmt, step) if isinstance(fmt, FloatFormat) else step


def spread(scale: Array, axis: int | None, like: Array, block: int = 0) -> Array:
    """``scale`` so that it broadcasts against ``like``; of blocks with ``block`` elements, or as many as divide its axis."""
    scale = scale.astype(np.float64)
    if scale.ndim == 0 or axis is None:
        return scale
    if scale.ndim == 1:
        return scale.reshape([-1 if i == axis % like.ndim else 1 for i in range(like.ndim)])
    axis %= like.ndim
    size = block or -(-like.shape[axis] // scale.shape[axis])
    return np.repeat(scale, size, axis)[(*(slice(None),) * axis, slice(0, like.shape[axis]))]


def output_step(array: Array) -> Array:
    """Step used for a tensor without a grid: a thousandth of its largest finite value."""
    peak = float(np.abs(array).max(initial=0.0, where=np.isfinite(array))) if array.dtype.kind == "f" else 0.0
    return np.array(OUTPUT_STEP * peak if peak else OUTPUT_STEP)


def _spacing(one: Array, other: Array, fmt: FloatFormat, unit: Array) -> Array:
    """Distance of neighbouring numbers of a float format, scaled by ``unit``, at the larger of two values."""
    size = np.maximum(np.maximum(np.abs(one), np.abs(other)) / unit, 2.0**fmt.min_exponent)
    exponent = np.frexp(np.where(np.isfinite(size), size, 1.0))[1] - 1
    return unit * np.exp2(exponent - fmt.mantissa_bits)


def level(expected: Array, found: Array | None) -> float:
    """Signal-to-noise ratio in dB; strings are only compared for equality."""
    if found is None or expected.shape != found.shape:  # a sequence or a map of another length
        return -math.inf
    if expected.dtype.kind in "OSU":
        same = np.array_equal(expected.astype(np.str_), found.astype(np.str_))
        return math.inf if same else -math.inf
    return sqnr(expected, found)
