"""What LiteRT's reference kernels compute, in integers: the codes that an operator of a file makes of the codes that it reads.

The simulation rounds float sums once; these kernels rescale integer sums in fixed point, with two roundings. Whether codes
that differ from the simulation's are due to that alone is told by computing them so.

Source: ``tensorflow/lite/kernels/internal/reference`` and ``.../reference/integer_ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.export.tflite.fixed_point import (
    quantize_multiplier,
    rescaled,
    rescaled_once,
    rescaled_wide,
    rescaling_error,
    wide_rescaling_error,
)

Array = NDArray[Any]
_ADD_SHIFT = {np.dtype(np.int8): 20, np.dtype(np.int16): 15}  # bits that sums are computed finer by


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file in one run.

    Attributes:
        values: codes, or floats.
        scale: float32; empty of floats, one per channel of some weights.
        zero_point: of the first scale; others have the same.
    """

    values: Array
    scale: Array
    zero_point: int = 0

    @property
    def step(self) -> np.float32:
        """The only scale."""
        return np.float32(self.scale[0])

    @property
    def centred(self) -> Array:
        """Codes from zero on, int64."""
        return self.values.astype(np.int64) - self.zero_point


@dataclass(frozen=True)
class Call:
    """One operator in one run.

    Attributes:
        inputs: ``None`` where one is left out.
        output: its grid; the values are those that the runtime made.
        options: fields of the operator's table.
        once: rescale with one rounding, a half to even, as the simulation does, instead of as the kernel does.
    """

    inputs: tuple[Tensor | None, ...]
    output: Tensor
    options: Any
    once: bool = False

    def read(self, port: int) -> Tensor:
        """An input that must be there."""
        found = self.inputs[port]
        assert found is not None
        return found


def specified(kind: str, call: Call) -> Array | None:
    """The codes that the reference kernel of ``kind`` makes; ``None`` where its arithmetic is not told here.

    Args:
        kind: of the operator, as the schema names it.
        call: what it reads, and the grid that it writes to.
    """
    kernel = KERNELS.get(kind)
    if kernel is None or call.output.values.dtype not in _ADD_SHIFT:
        return None
    if kind != "QUANTIZE" and any(operand is None or not operand.scale.size for operand in call.inputs[:2]):
        return None  # data or a weight in float
    sums = kernel(call)
    info = np.iinfo(call.output.values.dtype)
    low, high = float(info.min), float(info.max)
    activation = getattr(call.options, "fusedActivationFunction", 0)
    if activation:
        bounds = {1: (0.0, np.inf), 2: (-1.0, 1.0), 3: (0.0, 6.0)}[activation]
        ends = [b if np.isinf(b) else _away(np.float32(b) / call.output.step) for b in bounds]
        low, high = (max(low, ends[0] + call.output.zero_point), min(high, ends[1] + call.output.zero_point))
    return np.asarray(np.clip(sums + call.output.zero_point, low, high)).astype(call.output.values.dtype)


def _away(values: Any) -> Any:
    """To nearest, a half away from zero, as C's ``round``."""
    return np.sign(values) * np.floor(np.abs(values) + np.asarray(0.5, np.asarray(values).dtype))


def _scaled(call: Call, sums: Array, factor: Any) -> Array:
    """Sums on the grid of the output; ``factor`` broadcasts against them from the last axis."""
    wide = call.output.values.dtype == np.int16
    return _times(call, sums, factor, rescaled_wide if wide else rescaled)


def _times(call: Call, sums: Array, factor: Any, rescale: Callable[..., Array] = rescaled) -> Array:
    """``sums * factor``, rounded by ``rescale``, or once where the call asks for that."""
    if call.once:
        return np.rint(sums * np.asarray(factor, np.float64)).astype(np.int64)
    return rescale(sums, *quantize_multiplier(factor))


def _quantize(call: Call) -> Array:
    source = call.read(0)
    if not source.scale.size:
        steps = source.values.astype(np.float32) / call.output.step
        return np.asarray((np.rint if call.once else _away)(steps)).astype(np.int64)
    return _times(call, source.centred, np.float64(source.step) / np.float64(call.output.step))


def _product_factor(call: Call) -> Any:
    """Per output channel, in double precision."""
    data, weight = call.read(0), call.read(1)
    return np.float64(data.step) * weight.scale.astype(np.float64) / np.float64(call.output.step)


def _with_bias(call: Call, sums: Array) -> Array:
    bias = call.inputs[2] if len(call.inputs) > 2 else None
    return sums if bias is None else sums + bias.values.astype(np.int64)


def _fully_connected(call: Call) -> Array:
    data, weight = call.read(0), call.read(1)
    rows = data.centred.reshape(-1, weight.values.shape[1])
    sums = _with_bias(call, _exact_product(rows, weight.centred.T))
    if weight.scale.size == 1:  # the kernel multiplies the scales in single precision
        factor = np.float64(data.step * np.float32(weight.scale[0])) / np.float64(call.output.step)
        return _scaled(call, sums, factor).reshape(call.output.values.shape)
    return _times(call, sums, _product_factor(call), rescaled_once).reshape(call.output.values.shape)


def _exact_product(a: Array, b: Array) -> Array:
    """A product of integer matrices whose sums stay below 2 ** 53, by the fast float one."""
    return np.rint(a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64)


def _batch_matmul(call: Call) -> Array:
    a, b = call.read(0), call.read(1)
    one = a.centred.swapaxes(-1, -2) if call.options.adjX else a.centred
    other = b.centred.swapaxes(-1, -2) if call.options.adjY else b.centred
    factor = np.float64(a.step * b.step) / np.float64(call.output.step)
    return _scaled(call, _exact_product(one, other), factor)


def _windows(call: Call) -> Array:
    """What every position of the filter reads: ``[batch, rows, columns, filter rows, filter columns, channels]``."""
    data, weight, options = call.read(0), call.read(1), call.options
    size = weight.values.shape[1:3]
    stride, dilation = (options.strideH, options.strideW), (options.dilationHFactor, options.dilationWFactor)
    out = call.output.values.shape[1:3]
    pads = []
    for n, k, s, d, o in zip(data.values.shape[1:3], size, stride, dilation, out, strict=True):
        missing = max((o - 1) * s + (k - 1) * d + 1 - n, 0)
        pads.append((missing // 2, missing - missing // 2))
    image = np.pad(data.centred, [(0, 0), *pads, (0, 0)])
    reach = [(k - 1) * d + 1 for k, d in zip(size, dilation, strict=True)]
    views = np.lib.stride_tricks.sliding_window_view(image, reach, (1, 2))
    views = views[:, :: stride[0], :: stride[1], :, :: dilation[0], :: dilation[1]]
    return views[:, : out[0], : out[1]].transpose(0, 1, 2, 4, 5, 3)


def _conv(call: Call) -> Array:
    windows, weight = _windows(call), call.read(1)
    groups = windows.shape[-1] // weight.values.shape[-1]
    parts = zip(np.split(windows, groups, -1), np.split(weight.centred, groups), strict=True)
    sums = [
        _exact_product(rows.reshape(*rows.shape[:3], -1), filters.reshape(len(filters), -1).T)
        for rows, filters in parts
    ]
    return _scaled(call, _with_bias(call, np.concatenate(sums, -1)), _product_factor(call))


def _depthwise(call: Call) -> Array:
    windows, weight = _windows(call), call.read(1)
    windows = np.repeat(windows, call.options.depthMultiplier, -1)
    sums = np.einsum("nhwijc,ijc->nhwc", windows, weight.centred[0])
    return _scaled(call, _with_bias(call, sums), _product_factor(call))


def _mul(call: Call) -> Array:
    a, b = call.read(0), call.read(1)
    factor = np.float64(a.step * b.step / call.output.step)  # in single precision, as the kernel
    return _times(call, a.centred * b.centred, factor)


def _sum(sign: int, call: Call) -> Array:
    a, b = call.read(0), call.read(1)
    bits = _ADD_SHIFT[call.output.values.dtype]
    twice = 2 * np.float64(max(a.step, b.step))
    one, other = (_times(call, t.centred << bits, np.float64(t.step) / twice) for t in (a, b))
    factor = twice / np.float64(np.float32(1 << bits) * call.output.step)
    return _times(call, one + sign * other, factor)


def _leaky_relu(call: Call) -> Array:
    source = call.read(0)
    step = np.float64(source.step) / np.float64(call.output.step)
    slope = np.float64(np.float32(source.step * np.float32(call.options.alpha))) / np.float64(call.output.step)
    kept, bent = (_times(call, source.centred, factor) for factor in (step, slope))
    return np.where(source.centred >= 0, kept, bent)


KERNELS: Mapping[str, Callable[[Call], Array]] = {
    "QUANTIZE": _quantize,
    "CONV_2D": _conv,
    "DEPTHWISE_CONV_2D": _depthwise,
    "FULLY_CONNECTED": _fully_connected,
    "BATCH_MATMUL": _batch_matmul,
    "MUL": _mul,
    "ADD": lambda call: _sum(1, call),
    "SUB": lambda call: _sum(-1, call),
    "LEAKY_RELU": _leaky_relu,
}


# ------------------------------------------------------------------------------------------------------------- bounds

#: operators that hand on codes as they are
MOVES_CODES = frozenset(
    (
        "RESHAPE", "TRANSPOSE", "PAD", "PADV2", "STRIDED_SLICE", "SLICE", "SPLIT", "CONCATENATION", "GATHER", "MAX_POOL_2D",
        "PACK", "BROADCAST_TO", "DEPTH_TO_SPACE", "SPACE_TO_DEPTH", "RESIZE_NEAREST_NEIGHBOR", "TILE", "MAXIMUM", "MINIMUM",
        "RELU", "EXPAND_DIMS", "SQUEEZE", "DEQUANTIZE",
    )
)  # fmt: skip
_SUMS = frozenset(("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV", "BATCH_MATMUL"))
# What functions are off by, in steps of their output, over every code of 8 bits: their tables and polynomials have few bits.
# Measured over all codes and many scales; tests/export/verify/test_litert_kernels.py holds each.
FUNCTION_ERRORS = {"LOGISTIC": 0.6, "TANH": 0.6, "SOFTMAX": 0.6, "HARD_SWISH": 0.6, "GELU": 0.05}
# The same of 16 bits, of which a step is 1/32768: they interpolate between 256 or 512 points.
_WIDE_FUNCTION_ERRORS = {"LOGISTIC": 2.0, "TANH": 2.0, "SOFTMAX": 16.0}
#: of the simulation's own value before rounding, computed in single precision
FLOAT_SUMS = 0.02
_CODES, _WIDE_CODES = 255.0, 32768.0
_SLOPE_BITS = 8  # fractional bits of slopes in XNNPACK's kernels


def arithmetic_error(kind: str, inputs: Sequence[Array], output: Array, options: Any, wide: bool) -> float:
    """How far the arithmetic of a kernel may bring a value before it is rounded, in steps of its output.

    Args:
        kind: of the operator.
        inputs, output: scales, float64, none of floats.
        options: fields of the operator's table.
        wide: whether activations have 16 bits.

    Returns:
        The larger one of reference and default kernels: derived from the roundings of products and sums
        (:mod:`bitwright.export.tflite.fixed_point`), and for functions what was measured over all codes.
    """
    known = (_WIDE_FUNCTION_ERRORS if wide else FUNCTION_ERRORS).get(kind, 0.0)
    factors = _factors(kind, inputs, output, options)
    if not factors:
        return max(FLOAT_SUMS, known)
    found = max(rescaling_error(factor) for factor in factors)
    if wide and kind in _SUMS:
        found = max(found, *(wide_rescaling_error(factor, _WIDE_CODES) for factor in factors))
    if kind in ("LEAKY_RELU", "PRELU"):
        found = max(found, _CODES * 2.0 ** -(_SLOPE_BITS + 1))
    return max(FLOAT_SUMS + found, known)


def _factors(kind: str, inputs: Sequence[Array], output: Array, options: Any) -> list[Array]:
    """The factors that the kernel rescales by; none where it does not, or computes in float."""
    if kind == "TRANSPOSE_CONV":  # the shape of the output comes first
        inputs = [*inputs[2:0:-1]]
    if not output.size or not inputs or not inputs[0].size:
        return []
    first = inputs[0] / output[0]
    second = inputs[1] if len(inputs) > 1 else np.empty(0)
    if kind in ("QUANTIZE", "LEAKY_RELU"):
        slope = abs(getattr(options, "alpha", 1.0) or 1.0)
        return [first, first * slope]
    if kind == "PRELU":
        return [first, first * second] if second.size else []
    if kind in ("ADD", "SUB"):
        return [2 * np.maximum(inputs[0], second) / (output[0] * (1 << 15))] if second.size else []
    return [first * second] if (kind in _SUMS or kind == "MUL") and second.size else []
