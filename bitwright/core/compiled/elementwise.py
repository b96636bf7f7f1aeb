"""Elementwise functions and quantize-dequantize in one pass over memory.

Where array functions read and write a tensor once for each of divide, round, clamp and multiply, and once more for the
activation in front, these read and write it once. Every operation is the float32 operation of
:mod:`bitwright.core.numerics.affine`, in its order, so the results are equal bit for bit. A NaN stays NaN: a comparison with
it is false.

All arrays are 1-D and as long as ``x``; ``out`` may be ``x``. ``low`` and ``high`` are the ends of the activation (ReLU: zero and
infinity), ``lo`` and ``hi`` those of the grid: ``qmin - zero_point``, ``qmax - zero_point``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def quantize_dequantize(x: Floats, out: Floats, scale: np.float32, lo: np.float32, hi: np.float32) -> None:
    """``out = clamp(round(x / scale), lo, hi) * scale``; minus zero becomes zero."""
    for i in range(x.size):
        v = np.rint(x[i] / scale)
        v = lo if v < lo else v
        v = hi if v > hi else v
        out[i] = v * scale + np.float32(0)


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
    for i in range(x.size):
        y = x[i]
        y = low if y < low else y
        y = high if y > high else y
        v = np.rint(y / scale)
        v = lo if v < lo else v
        v = hi if v > hi else v
        out[i] = v * scale + np.float32(0)


def add_quantize(
    x: Floats, other: Floats, out: Floats, scale: np.float32, lo: np.float32, hi: np.float32
) -> None:
    """The same of ``x + other``."""
    for i in range(x.size):
        v = np.rint((x[i] + other[i]) / scale)
        v = lo if v < lo else v
        v = hi if v > hi else v
        out[i] = v * scale + np.float32(0)


def clamp_quantize_marked(
    x: Floats,
    out: Floats,
    passed: Bytes,
    low: np.float32,
    high: np.float32,
    scale: np.float32,
    lo: np.float32,
    hi: np.float32,
    first: np.float32,
    last: np.float32,
) -> None:
    """:func:`clamp_quantize`, and where its gradient passes.

    Args:
        passed: 1 where neither the activation nor the grid clips: ``x`` is beyond neither ``low`` nor ``high`` and the
            activation's result beyond neither ``first`` nor ``last``; else 0. Equality clips, as in torch.
        first, last: where the values begin and end that round to a code of the grid.
    """
    for i in range(x.size):
        given = x[i]
        y = low if given < low else given
        y = high if y > high else y
        clipped = (given <= low) | (given >= high) | (y <= first) | (y >= last)
        passed[i] = np.uint8(0) if clipped else np.uint8(1)
        v = np.rint(y / scale)
        v = lo if v < lo else v
        v = hi if v > hi else v
        out[i] = v * scale + np.float32(0)


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
