"""Kernels of QDQ models on codes: ONNX Runtime on x86 and ARM, TensorRT, HTP.

Each operator has variants, one per way in which a target computes it; a profile names the variant. Channels are the second
axis, as in ONNX. Sources of those of ONNX Runtime are ``core/mlas/lib`` (``qgemm``, ``quantize``, ``qladd``, ``qlmul``,
``qlgavgpool``) and ``contrib_ops/cpu/quantization`` (``qlinear_pool``, ``qlinear_lookup_table``, ``qlinear_softmax``,
``qlinear_concat``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.numerics.arrays import conv_pads
from bitwright.executors.rounding import REQUANTIZERS, rescaled_folded
from bitwright.executors.sums import convolution, matmul, paired_matmul, shifted, window_steps
from bitwright.executors.tensors import Call, Grid, Tensor

Array = NDArray[Any]
Kernel = Callable[[Call], Array]

# ------------------------------------------------------------------------------------------------------- products


def _paired(call: Call) -> bool:
    """Whether the kernel adds pairs of products: those of uint8 and int8 do; of two unsigned factors they are exact."""
    return call.pairs and (call.read(0).values.dtype, call.read(1).values.dtype) == (np.uint8, np.int8)


def factor(x: Tensor, w: Tensor, grid: Grid) -> Array:
    """``(x * w) / y`` of the scales, in float32 from left to right."""
    return np.divide(np.multiply(x.step, w.scale.reshape(-1), dtype=np.float32), grid.scale, dtype=np.float32)


def _finished(call: Call, sums: Array, axis: int) -> Array:
    """Sums with their bias on the grid of the output; one factor per index of ``axis``, or one."""
    x, w = call.read(0), call.read(1)
    shape = [1] * sums.ndim
    scales = factor(x, w, call.grid)
    shape[axis] = scales.size
    if call.float_bias:  # the bias is a float of its own grid, the result is divided by the scale of the output
        steps = np.multiply(x.step, w.scale.reshape(-1), dtype=np.float32).reshape(shape)
        values = sums.astype(np.float32) * steps
        bias = call.optional(2)
        if bias is not None:
            wide = [1] * sums.ndim
            wide[axis] = bias.values.size
            step = bias.scale.reshape(-1) if bias.scale.size else np.float32(1)  # a float bias stands for itself
            values += (bias.values.reshape(-1).astype(np.float32) * step).reshape(wide)
        rounded = np.floor if call.variant == "truncated" else np.rint
        return call.grid.store(rounded(values * np.float32(1 / call.grid.scale)))
    if call.variant == "folded":
        low, high = call.grid.ends
        codes = rescaled_folded(sums, scales.astype(np.float64).reshape(shape), call.grid.zero_point)
        return np.clip(codes, low, high).astype(call.grid.dtype)
    return call.grid.store(REQUANTIZERS[call.variant](sums, scales.reshape(shape)))


def _bias(call: Call) -> Array | None:
    bias = call.optional(2)
    return None if bias is None or call.float_bias else bias.values.reshape(-1)


def window(attributes: Mapping[str, Any], kernel: Sequence[int], sizes: Sequence[int]) -> dict[str, Any]:
    """Strides, dilations and pads of an operator with a window, by the names of :func:`convolution`."""
    rank = len(kernel)
    strides = tuple(attributes.get("strides") or (1,) * rank)
    dilations = tuple(attributes.get("dilations") or (1,) * rank)
    pads = conv_pads(attributes, sizes, kernel)
    return {"strides": strides, "dilations": dilations, "pads": list(zip(pads[:rank], pads[rank:], strict=True))}


def _conv(call: Call) -> Array:
    return _finished(call, conv_sums(call), 1)


def conv_sums(call: Call) -> Array:
    """Sums of a Conv and its bias, ``[N, M, *O]``."""
    x, w = call.read(0), call.read(1)
    paired = _paired(call)
    return convolution(
        x.values, x.zero_point, w.centred, _bias(call),
        **window(call.attributes, w.values.shape[2:], x.values.shape[2:]),
        groups=int(call.attributes.get("group", 1)), pairs=paired, accumulator=call.accumulator,
    )  # fmt: skip


def _matmul(call: Call) -> Array:
    return _finished(call, matmul_sums(call), -1)


def matmul_sums(call: Call) -> Array:
    """Sums of a MatMul, or of a Gemm and its bias."""
    x, w = call.read(0), call.read(1)
    values, weight = (x.values.T if call.attributes.get("transA") else x.values), w.centred
    weight = weight.T if call.attributes.get("transB") else weight
    if _paired(call) and weight.ndim == 2:
        return paired_matmul(values, x.zero_point, weight, _bias(call), accumulator=call.accumulator)
    centred = values.astype(np.int32) - x.zero_point
    return matmul(centred, weight, _bias(call), accumulator=call.accumulator)


def product_in_float(call: Call) -> Array:
    """A product whose output has no grid: the sum times both scales, float32."""
    x, w = call.read(0), call.read(1)
    steps = np.multiply(x.step, w.scale.reshape(-1), dtype=np.float32)
    return matmul_sums(call).astype(np.float32) * steps


# ------------------------------------------------------------------------------------------------------- elements


def _add_fused(call: Call) -> Array:
    """AVX2 kernel: ``fma(a, ra, fma(b, rb, fixed))`` in float32, where ``fixed`` holds all zero points; a scalar comes second."""
    grid, (one, other) = call.grid, (call.read(0), call.read(1))
    if one.values.size == 1 != other.values.size:
        one, other = other, one
    ra, rb = (np.float32(t.step / grid.scale) for t in (one, other))
    zeros = _fma(np.asarray(one.zero_point), ra, np.float32(rb * np.float32(other.zero_point)))
    fixed = np.float32(grid.zero_point) - zeros
    total = _fma(one.values, ra, _fma(other.values, rb, fixed))
    low, high = grid.ends
    return np.clip(np.rint(total), low, high).astype(grid.dtype)


def _fma(values: Array, ratio: np.float32, added: Any) -> Array:
    """``values * ratio + added`` rounded once to float32; float64 holds the product of a code exactly."""
    return (values.astype(np.float64) * np.float64(ratio) + np.asarray(added, np.float64)).astype(np.float32)


def _add_float(call: Call) -> Array:
    a, b = call.read(0), call.read(1)
    return call.grid.quantize(a.dequantized + b.dequantized)


def _add_fixed(call: Call) -> Array:
    """NEON kernel: multipliers of 22 bits, one shift, a half away from zero; in float where the ratios are out of its range."""
    a, b, grid = call.read(0), call.read(1), call.grid
    ratios = [np.float32(t.step / grid.scale) for t in (a, b)]
    shift = 21 - (int(np.frexp(max(ratios))[1]) - 1)
    factors = [int(np.rint(np.float64(r) * 2.0**shift)) for r in ratios]
    inside = all(2.0**-14 <= r < 256 for r in ratios) and 13 <= shift <= 31 and max(factors) < 1 << 22
    if not inside:
        return _add_float(call)
    total = a.centred * factors[0] + b.centred * factors[1]
    return grid.store((total - (total < 0) + (np.int64(1) << (shift - 1))) >> shift)


def _mul_float(call: Call) -> Array:
    """One float32 factor ``a * b / y``; the zero point is added before the rounding."""
    a, b, grid = call.read(0), call.read(1), call.grid
    ratio = np.float32(np.float32(a.step * b.step) / grid.scale)
    low, high = grid.ends
    values = (a.centred * b.centred).astype(np.float32) * ratio + np.float32(grid.zero_point)
    return np.clip(np.rint(values), low, high).astype(grid.dtype)


def _in_float(function: Callable[..., Array], call: Call) -> Array:
    """Both operands dequantized, the result rounded once to the grid."""
    return call.grid.quantize(function(*(t.dequantized for t in call.inputs if t is not None)))


# --------------------------------------------------------------------------------------------------------- tables


def _sigmoid(x: Array) -> Array:
    return np.divide(1, 1 + np.exp(-x.astype(np.float64))).astype(np.float32)


def table_of(function: Callable[[Array], Array], source: Tensor, grid: Grid) -> Array:
    """The output code of each of 256 input codes, indexed by the code's bits as uint8."""
    codes = np.arange(256, dtype=np.uint8).view(source.values.dtype)
    return grid.quantize(function(Tensor(codes, source.scale, source.zero_point).dequantized))


def _looked_up(function: Callable[[Call, Array], Array], call: Call) -> Array:
    source = call.read(0)
    if source.values.dtype.itemsize > 1:
        return call.grid.quantize(function(call, source.dequantized))
    return table_of(partial(function, call), source, call.grid)[source.values.view(np.uint8)]


def _leaky(call: Call, x: Array) -> Array:
    alpha = np.float32(call.attributes.get("alpha", 0.01))
    return np.where(x >= 0, x, x * alpha)


def _concat(call: Call) -> Array:
    parts = []
    for given in call.inputs:
        assert given is not None
        same = given.step == call.grid.scale and given.zero_point == call.grid.zero_point
        part = Call((given,), call.grid)
        parts.append(given.values if same else _looked_up(lambda call, x: x, part))
    return np.concatenate(parts, int(call.attributes["axis"]))


def _softmax_table(call: Call) -> Array:
    """A table of 256 float32 exponentials that are scaled up as far as their sum allows; one float32 division."""
    source, grid = call.read(0), call.grid
    axis = int(call.attributes.get("axis", -1)) % source.values.ndim
    x = np.moveaxis(source.values, axis, -1)
    length = x.shape[-1]
    step = np.float64(source.step)
    room = np.log(np.float64(np.float32(np.finfo(np.float32).max) / np.float32(length)))
    shift = max(0.0, room - 5) / step
    table = np.exp((np.arange(256, dtype=np.float64) - 255 + shift) * step).astype(np.float32)
    codes = x.astype(np.int32)
    powers = table[255 - codes.max(-1, keepdims=True) + codes]
    total = np.zeros(x.shape[:-1], np.float32)
    for i in range(length):  # the order of the sum
        total += powers[..., i]
    scale = np.floor(np.float32(1) / grid.scale)
    whole = np.rint(powers * scale / total[..., None])
    low, high = grid.ends
    found = np.clip(whole + grid.zero_point, low, high).astype(grid.dtype)
    return np.moveaxis(found, -1, axis)


def _softmax_float(call: Call) -> Array:
    x = call.read(0).dequantized
    axis = int(call.attributes.get("axis", -1))
    powers = np.exp(x - x.max(axis, keepdims=True))
    return call.grid.quantize(powers / powers.sum(axis, keepdims=True))


# ---------------------------------------------------------------------------------------------------------- pools


def _average_pool(call: Call) -> Array:
    """Sums of dequantized float32 in the order of the window; divided by the count, then by the scale; zero point, rounding."""
    source, grid, attributes = call.read(0), call.grid, call.attributes
    kernel, image = tuple(attributes["kernel_shape"]), source.values.shape[2:]
    steps = window(attributes, kernel, image)
    strides, dilations, ends = steps["strides"], steps["dilations"], steps["pads"]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    room = [n + b + e - r for n, (b, e), r in zip(image, ends, reach, strict=True)]
    sizes = [n // s + 1 for n, s in zip(room, strides, strict=True)]
    if attributes.get("ceil_mode"):
        # one more window where elements are left, if it begins before the padding at the end
        sizes = [
            min(-(-r // s) + 1, -(-(n + b) // s)) for r, s, n, (b, _) in zip(room, strides, image, ends, strict=True)
        ]
        ends = [(b, e + max((o - 1) * s - r, 0)) for (b, e), o, s, r in zip(ends, sizes, strides, room, strict=True)]
    values = np.pad(source.dequantized, [(0, 0), (0, 0), *ends])
    inside = np.pad(np.ones((1, 1, *image), np.float32), [(0, 0), (0, 0), *ends])
    total = np.zeros((*values.shape[:2], *sizes), np.float32)
    count = np.zeros((1, 1, *sizes), np.float32)
    for at in window_steps(kernel):
        total += shifted(values, at, strides, dilations, sizes)
        count += shifted(inside, at, strides, dilations, sizes)
    if attributes.get("count_include_pad"):
        count[:] = np.prod(kernel)
    low, high = grid.ends
    found = total / count / grid.scale + np.float32(grid.zero_point)
    return np.clip(np.rint(found), low, high).astype(grid.dtype)


def _global_average_pool(call: Call) -> Array:
    source, grid = call.read(0), call.grid
    axes = tuple(range(2, source.values.ndim))
    size = int(np.prod(source.values.shape[2:]))
    sums = source.centred.sum(axes, keepdims=True)
    ratio = np.float32(source.step / np.float32(grid.scale * np.float32(size)))
    return grid.store(REQUANTIZERS[call.variant](sums, ratio))


_PRODUCTS: dict[str, Kernel] = {name: _conv for name in (*REQUANTIZERS, "epilogue", "folded")}
_MATRICES: dict[str, Kernel] = {name: _matmul for name in (*REQUANTIZERS, "epilogue", "folded")}

#: operator of ONNX -> variant -> its kernel
CODE_KERNELS: dict[str, dict[str, Kernel]] = {
    "Conv": _PRODUCTS,
    "MatMul": _MATRICES,
    "Gemm": _MATRICES,
    "Add": {"fused": _add_fused, "fixed22": _add_fixed, "float32": _add_float},
    "Mul": {"float32": _mul_float, "divided": partial(_in_float, np.multiply)},
    "Concat": {"table": _concat},
    "Sigmoid": {"table": partial(_looked_up, lambda call, x: _sigmoid(x))},
    "Tanh": {"table": partial(_looked_up, lambda call, x: np.tanh(x))},
    "LeakyRelu": {"table": partial(_looked_up, _leaky)},
    "Softmax": {"table": _softmax_table, "float32": _softmax_float},
    "AveragePool": {"float32": _average_pool},
    "GlobalAveragePool": {name: _global_average_pool for name in REQUANTIZERS},
}
