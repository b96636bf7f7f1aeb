"""Elementwise functions and quantize-dequantize in one pass over memory.

Where array functions read and write a tensor once for each of divide, round, clamp and multiply, and once more for the
activation in front, these read and write it once. Every operation is the float32 operation of
:mod:`bitwright.core.numerics.affine`, in its order, so the results are equal bit for bit. A NaN stays NaN: a comparison with
it is false.

All arrays are 1-D and as long as ``x``; ``out`` may be ``x``. ``low`` and ``high`` are the ends of the activation (ReLU: zero and
infinity), ``lo`` and ``hi`` those of the grid: ``qmin - zero_point``, ``qmax - zero_point``.

Results are made in a block of their own and copied: a loop that writes over its input is not turned into vector instructions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK = 2048
"""Elements of a block, which stays in the first-level cache."""
LANES = 256
"""Sums that are taken side by side, in vector instructions."""


def quantize_dequantize(x: Floats, out: Floats, scale: np.float32, lo: np.float32, hi: np.float32) -> None:
    """``out = clamp(round(x / scale), lo, hi) * scale``; minus zero becomes zero."""
    block = np.empty(BLOCK, np.float32)
    for first in range(0, x.size, BLOCK):
        values = x[first : first + BLOCK]
        result = out[first : first + BLOCK]
        for i in range(values.size):
            v = np.rint(values[i] / scale)
            v = lo if v < lo else v
            v = hi if v > hi else v
            block[i] = v * scale + np.float32(0)
        for i in range(values.size):
            result[i] = block[i]


def clamp_quantize(
    x: Floats,
    out: Floats,
    low: np.float32,
    high: np.float32,
    scale: np.float32,
    lo: np.float32,
    hi: np.float32,
) -> None:
    """The same of ``clamp(x, low, high)``."""
    block = np.empty(BLOCK, np.float32)
    for first in range(0, x.size, BLOCK):
        values = x[first : first + BLOCK]
        result = out[first : first + BLOCK]
        for i in range(values.size):
            y = values[i]
            y = low if y < low else y
            y = high if y > high else y
            v = np.rint(y / scale)
            v = lo if v < lo else v
            v = hi if v > hi else v
            block[i] = v * scale + np.float32(0)
        for i in range(values.size):
            result[i] = block[i]


def add_quantize(
    x: Floats, other: Floats, out: Floats, scale: np.float32, lo: np.float32, hi: np.float32
) -> None:
    """The same of ``x + other``."""
    block = np.empty(BLOCK, np.float32)
    for first in range(0, x.size, BLOCK):
        values = x[first : first + BLOCK]
        added = other[first : first + BLOCK]
        result = out[first : first + BLOCK]
        for i in range(values.size):
            v = np.rint((values[i] + added[i]) / scale)
            v = lo if v < lo else v
            v = hi if v > hi else v
            block[i] = v * scale + np.float32(0)
        for i in range(values.size):
            result[i] = block[i]


def clamp_quantize_marked(
    x: Floats,
    out: Floats,
    passed: Bytes,
    low: np.float32,
    high: np.float32,
    scale: np.float32,
    lo: np.float32,
    hi: np.float32,
    first_value: np.float32,
    last_value: np.float32,
) -> None:
    """:func:`clamp_quantize`, and where its gradient passes.

    Args:
        passed: 1 where neither the activation nor the grid clips: ``x`` is beyond neither ``low`` nor ``high`` and the
            activation's result beyond neither ``first_value`` nor ``last_value``; else 0. Equality clips, as in torch.
        first_value, last_value: where the values begin and end that round to a code of the grid.
    """
    block = np.empty(BLOCK, np.float32)
    for first in range(0, x.size, BLOCK):
        values = x[first : first + BLOCK]
        marks = passed[first : first + BLOCK]
        result = out[first : first + BLOCK]
        for i in range(values.size):
            given = values[i]
            y = low if given < low else given
            y = high if y > high else y
            clipped = (given <= low) | (given >= high) | (y <= first_value) | (y >= last_value)
            marks[i] = np.uint8(0) if clipped else np.uint8(1)
            v = np.rint(y / scale)
            v = lo if v < lo else v
            v = hi if v > hi else v
            block[i] = v * scale + np.float32(0)
        for i in range(values.size):
            result[i] = block[i]


def add_quantize_marked(
    x: Floats,
    other: Floats,
    out: Floats,
    passed: Bytes,
    scale: np.float32,
    lo: np.float32,
    hi: np.float32,
    first_value: np.float32,
    last_value: np.float32,
) -> None:
    """:func:`add_quantize`, and where its gradient passes: see :func:`clamp_quantize_marked`."""
    block = np.empty(BLOCK, np.float32)
    for first in range(0, x.size, BLOCK):
        values = x[first : first + BLOCK]
        added = other[first : first + BLOCK]
        marks = passed[first : first + BLOCK]
        result = out[first : first + BLOCK]
        for i in range(values.size):
            y = values[i] + added[i]
            marks[i] = np.uint8(0) if (y <= first_value) | (y >= last_value) else np.uint8(1)
            v = np.rint(y / scale)
            v = lo if v < lo else v
            v = hi if v > hi else v
            block[i] = v * scale + np.float32(0)
        for i in range(values.size):
            result[i] = block[i]


def quantize_rows(x: Floats, out: Floats, scale: Floats, lo: np.float32, hi: np.float32) -> None:
    """:func:`quantize_dequantize` of ``scale.size`` rows of equal length, one scale for each."""
    length = x.size // scale.size
    for row in range(scale.size):
        s = scale[row]
        for i in range(row * length, (row + 1) * length):
            v = np.rint(x[i] / s)
            v = lo if v < lo else v
            v = hi if v > hi else v
            out[i] = v * s + np.float32(0)


def pass_gradient(grad: Floats, passed: Bytes, out: Floats) -> None:
    """``out = grad`` where ``passed``, else zero."""
    for i in range(grad.size):
        out[i] = grad[i] if passed[i] else np.float32(0)


def learned_gradient(
    grad: Floats,
    x: Floats,
    inner: Floats,
    sums: NDArray[np.float64],
    low: np.float32,
    high: np.float32,
    scale: np.float32,
    lo: np.float32,
    hi: np.float32,
    first_value: np.float32,
    last_value: np.float32,
) -> None:
    """Gradients of :func:`clamp_quantize` by ``x``, by the scale and by the lower end of the range.

    Args:
        inner: takes ``grad`` where neither the activation nor the grid clips, else zero; see :func:`clamp_quantize_marked`.
        sums: the sum of ``grad`` times the derivative by the scale is added to the first, what ``inner`` leaves out of ``grad``
            to the second. The derivative is ``round(y / scale) - y / scale`` of the activation's result ``y``, and the code at
            the end where the grid clips it. Sums are taken in as many lanes as :data:`LANES`.
    """
    part, slope, left = np.empty(LANES, np.float32), np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    for first in range(0, x.size, LANES):
        values, given, result = (
            x[first : first + LANES],
            grad[first : first + LANES],
            inner[first : first + LANES],
        )
        for i in range(values.size):
            y = low if values[i] < low else values[i]
            y = high if y > high else y
            ratio = y / scale
            v = np.rint(ratio)
            v = lo if v < lo else v
            v = hi if v > hi else v
            outside = (y <= first_value) | (y >= last_value)
            part[i] = v if outside else v - ratio
            result[i] = np.float32(0) if outside | (values[i] <= low) | (values[i] >= high) else given[i]
        for i in range(values.size):
            slope[i] += given[i] * part[i]
        for i in range(values.size):
            left[i] += given[i] - result[i]
    for i in range(LANES):
        sums[0] += slope[i]
        sums[1] += left[i]


def learned_rows_gradient(
    grad: Floats,
    x: Floats,
    inner: Floats,
    sums: NDArray[np.float64],
    scale: Floats,
    lo: np.float32,
    hi: np.float32,
) -> None:
    """The same for ``scale.size`` rows of equal length, one scale and two sums for each, and no activation in front.

    Whether the grid clips is decided by ``x / scale``, as for scales per channel in torch.
    """
    length, part = x.size // scale.size, np.empty(LANES, np.float32)
    slope, left = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    first_code, last_code = lo - np.float32(0.5), hi + np.float32(0.5)
    for row in range(scale.size):
        s, end = scale[row], (row + 1) * length
        slope[:], left[:] = np.float32(0), np.float32(0)
        for first in range(row * length, end, LANES):
            last = min(first + LANES, end)
            values, given, result = x[first:last], grad[first:last], inner[first:last]
            for i in range(values.size):
                ratio = values[i] / s
                v = np.rint(ratio)
                v = lo if v < lo else v
                v = hi if v > hi else v
                outside = (ratio <= first_code) | (ratio >= last_code)
                part[i] = v if outside else v - ratio
                result[i] = np.float32(0) if outside else given[i]
            for i in range(values.size):
                slope[i] += given[i] * part[i]
            for i in range(values.size):
                left[i] += given[i] - result[i]
        for i in range(min(LANES, length)):
            sums[2 * row] += slope[i]
            sums[2 * row + 1] += left[i]
