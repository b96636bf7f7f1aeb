"""Kernels of TensorFlow Lite on codes: LiteRT's reference kernels, CMSIS-NN, XNNPACK.

Channels are the last axis. Each operator has variants, one per way in which a target computes it. Sources:
``tensorflow/lite/kernels/internal/reference`` and ``.../reference/integer_ops``, gemmlowp ``fixedpoint.h``, CMSIS-NN
``Source/*Functions``, XNNPACK ``src/qs8-*`` and ``src/microparams-init.c``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.executors.rounding import (
    REQUANTIZERS,
    high_product,
    quantize_multiplier,
    rescaled,
    rounded_away,
    rounded_shift,
)
from bitwright.executors.sums import convolution, matmul
from bitwright.executors.tensors import Call, Tensor

Array = NDArray[Any]
Kernel = Callable[[Call], Array]

_ADD_SHIFT = {np.dtype(np.int8): 20, np.dtype(np.int16): 15}  # bits that sums are computed finer by
_SAME = 0
_DOUBLES = (
    "q31_double_of_doubles"  # TensorFlow Lite for Microcontrollers, where LiteRT works on scales in single precision
)


def stored(call: Call, whole: Array) -> Array:
    """Integers relative to the zero point, as codes, clamped by a fused activation."""
    grid = call.grid
    low, high = map(float, grid.ends)
    activation = call.attributes.get("fusedActivationFunction", 0)
    if activation:
        bounds = {1: (0.0, np.inf), 2: (-1.0, 1.0), 3: (0.0, 6.0)}[activation]
        ends = [b if np.isinf(b) else rounded_away(np.float32(b) / grid.scale) for b in bounds]
        low, high = max(low, ends[0] + grid.zero_point), min(high, ends[1] + grid.zero_point)
    return np.asarray(np.clip(whole + grid.zero_point, low, high)).astype(grid.dtype)


def _wide(call: Call) -> bool:
    return call.grid.dtype == np.int16


def _requantized(call: Call, sums: Array, factor: Any) -> Array:
    """Sums on the grid of the output, by the variant of the call; those of 16 bits have a form of their own."""
    kind = "q15_single" if _wide(call) and call.variant != "once" else _rounding(call)
    return REQUANTIZERS[kind](sums, factor)


def _times(call: Call, sums: Array, factor: Any) -> Array:
    """``sums * factor`` of an operator of elements, which has the same form for 8 and 16 bits."""
    return REQUANTIZERS[_rounding(call)](sums, factor)


def _rounding(call: Call) -> str:
    return "q31_double" if call.variant == _DOUBLES else call.variant


def _kind_of_scales(call: Call) -> type[np.float64] | type[np.float32]:
    """Floating-point type in which the kernel multiplies and divides scales."""
    return np.float64 if call.variant == _DOUBLES else np.float32


def _quantize(call: Call) -> Array:
    source, grid = call.read(0), call.grid
    if not source.scale.size:
        steps = source.values.astype(np.float32) / grid.scale
        return stored(call, (rounded_away if call.variant.startswith("q31") else np.rint)(steps))
    return stored(call, _times(call, source.centred, np.float64(source.step) / np.float64(grid.scale)))


# ------------------------------------------------------------------------------------------------------- products


def _factor(call: Call) -> Array:
    """One factor, or one per output channel: of float64, and of float32 where the sum, of 32 bits, is multiplied in float32."""
    data, weight = call.read(0), call.read(1)
    if call.variant == "float32" and not _wide(call):
        return np.divide(np.multiply(data.step, weight.scale, dtype=np.float32), call.grid.scale, dtype=np.float32)
    return np.float64(data.step) * weight.scale.astype(np.float64) / np.float64(call.grid.scale)


def _factor_of_matrix(call: Call) -> Array:
    """The factors of a matrix product by ruy; with one factor, the scales of weight and input are multiplied in float32."""
    data, weight = call.read(0), call.read(1)
    if weight.scale.size > 1:
        return _factor(call)
    product = np.multiply(data.step, weight.scale, dtype=np.float32)
    return product.astype(np.float64) / np.float64(call.grid.scale)


def _accumulator(call: Call) -> int:
    return _accumulator_beside(call.read(0), call)


def _accumulator_beside(data: Tensor, call: Call) -> int:
    """Beside activations of 16 bits, sums have 64."""
    return call.accumulator if data.values.dtype == np.int8 else 64


def _bias(call: Call) -> Array | None:
    bias = call.optional(2)
    return None if bias is None else bias.values.reshape(-1)


def _fully_connected(call: Call) -> Array:
    """Run a fully connected layer, with one scale of the weight or one per row.

    TensorFlow Lite's reference kernel rounds once for 16 bits too, where its convolutions have a form of their own. XNNPACK
    leaves 16 bits to LiteRT, which takes that kernel where there is a bias, of 64 bits, and else multiplies matrices with ruy.
    """
    data, weight = call.read(0), call.read(1)
    centred = data.centred.reshape(-1, weight.values.shape[1])
    sums = matmul(centred, weight.centred.T, _bias(call), accumulator=_accumulator(call))
    shape = data.values.shape[:-1] if call.attributes.get("keepNumDims") else sums.shape[:-1]
    variant = call.variant
    if variant == "float32" and _wide(call):
        variant = "q31_upwards" if call.optional(2) is None else "q31_single"
    rescale = (
        REQUANTIZERS[variant] if variant.startswith("q31_") and variant != _DOUBLES else partial(_requantized, call)
    )
    factor = _factor_of_matrix(call) if variant == "q31_upwards" else _factor(call)
    return stored(call, rescale(sums, factor)).reshape(*shape, -1)


def _batch_matmul(call: Call) -> Array:
    a, b = call.read(0), call.read(1)
    one = a.centred.swapaxes(-1, -2) if call.attributes.get("adjX") else a.centred
    other = b.centred.swapaxes(-1, -2) if call.attributes.get("adjY") else b.centred
    kind = _kind_of_scales(call)
    factor = np.float64(kind(a.step) * kind(b.step)) / np.float64(call.grid.scale)
    return stored(call, _requantized(call, matmul(one, other, accumulator=_accumulator(call)), factor))


def _pads(
    call: Call, size: tuple[int, ...], stride: tuple[int, int], dilation: tuple[int, int]
) -> list[tuple[int, int]]:
    ends = []
    for n, k, s, d in zip(call.read(0).values.shape[1:3], size, stride, dilation, strict=True):
        reach = (k - 1) * d + 1
        out = -(-n // s) if call.attributes["padding"] == _SAME else (n - reach) // s + 1
        missing = max((out - 1) * s + reach - n, 0)
        ends.append((missing // 2, missing - missing // 2))
    return ends


def _conv(depthwise: bool, call: Call) -> Array:
    data, weight, attributes = call.read(0), call.read(1), call.attributes
    size = weight.values.shape[1:3]
    stride = (attributes["strideH"], attributes["strideW"])
    dilation = (attributes.get("dilationHFactor") or 1, attributes.get("dilationWFactor") or 1)
    filters = weight.centred.transpose(3, 0, 1, 2) if depthwise else weight.centred.transpose(0, 3, 1, 2)
    channels = data.values.shape[-1]
    sums = convolution(
        np.moveaxis(data.values, -1, 1), data.zero_point, filters, _bias(call), strides=stride,
        pads=_pads(call, size, stride, dilation), dilations=dilation,
        groups=channels if depthwise else channels // filters.shape[1], accumulator=_accumulator(call),
    )  # fmt: skip
    factor = _factor(call)
    factor = factor.reshape(-1, 1, 1) if factor.size > 1 else factor
    return np.moveaxis(stored(call, _requantized(call, sums, factor)), 1, -1)


def _transpose_conv(call: Call) -> Array:
    """The shape of the output comes first, then the filter ``[out, height, width, in]``, the data and the bias."""
    weight, data, attributes = call.read(1), call.read(2), call.attributes
    size, stride = weight.values.shape[1:3], (attributes["strideH"], attributes["strideW"])
    made = tuple(int(n) for n in np.ravel(call.read(0).values))
    image = data.values.shape[1:3]
    reach = [(n - 1) * s + k for n, s, k in zip(image, stride, size, strict=True)]
    least = [(n - 1) // s * s + k for n, s, k in zip(made[1:3], stride, size, strict=True)]
    before = [
        max(r - n, 0) // 2 if attributes["padding"] == _SAME else 0 for r, n in zip(least, made[1:3], strict=True)
    ]
    room = [max(r, b + n) for r, b, n in zip(reach, before, made[1:3], strict=True)]
    whole = np.zeros((made[0], *room, made[3]), np.int64)
    for i, j in np.ndindex(*size):
        part = matmul(data.centred, weight.centred[:, i, j].T, accumulator=_accumulator_beside(data, call))
        whole[:, i : i + image[0] * stride[0] : stride[0], j : j + image[1] * stride[1] : stride[1]] += part.astype(
            np.int64
        )
    sums = whole[:, before[0] : before[0] + made[1], before[1] : before[1] + made[2]]
    bias = call.optional(3)
    sums = sums if bias is None else sums + bias.values.reshape(-1).astype(np.int64)
    product = replace(call, inputs=(data, weight))
    return stored(call, _requantized(call, sums, _factor(product)))


# ------------------------------------------------------------------------------------------------------- elements


def _mul(call: Call) -> Array:
    a, b, grid = call.read(0), call.read(1), call.grid
    kind = _kind_of_scales(call)
    factor = np.asarray(kind(a.step) * kind(b.step) / kind(grid.scale), np.float64)
    return stored(call, _times(call, a.centred * b.centred, factor))


def _sum(sign: int, call: Call, first: str | None = None) -> Array:
    """Both operands on one grid, by the variant ``first``, and their sum on that of the output, by the variant of the call."""
    a, b, grid = call.read(0), call.read(1), call.grid
    bits = _ADD_SHIFT[grid.dtype]
    twice = 2 * np.float64(max(a.step, b.step))
    before = replace(call, variant=first or call.variant)
    one, other = (_times(before, t.centred << bits, np.float64(t.step) / twice) for t in (a, b))
    factor = twice / np.float64(np.float32(1 << bits) * grid.scale)
    return stored(call, _times(call, one + sign * other, factor))


def _sum_shifted(sign: int, call: Call) -> Array:
    """XNNPACK: multipliers of 21 bits and one shift, a half upwards.

    It leaves 16 bits to LiteRT's own kernels. That of sums rounds once what it adds, where the reference kernel rounds twice.
    """
    if _wide(call):
        return _sum(sign, replace(call, variant="q31_double"), None if sign < 0 else "q31_single")
    a, b, grid = call.read(0), call.read(1), call.grid
    ratios = [np.float32(t.step / grid.scale) for t in (a, b)]
    shift = 20 - (int(np.frexp(max(ratios))[1]) - 1)
    factors = [int(np.rint(np.float64(ratio) * 2.0**shift)) for ratio in ratios]
    total = a.centred * factors[0] + sign * b.centred * factors[1]
    return stored(call, (total + (np.int64(1) << (shift - 1))) >> shift)


def _leaky_relu(call: Call) -> Array:
    source, grid = call.read(0), call.grid
    kind = _kind_of_scales(call)
    scale, alpha, out = kind(source.step), kind(np.float32(call.attributes["alpha"])), kind(grid.scale)
    step, slope = np.float64(scale / out), np.float64(scale * alpha / out)
    kept, bent = (_times(call, source.centred, factor) for factor in (step, slope))
    return stored(call, np.where(source.centred >= 0, kept, bent))


_LEAST, _MOST = 2.0**-8, 128.0  # factors that XNNPACK takes; it leaves others, and 16 bits, to LiteRT's own kernel


def _leaky_relu_short(call: Call) -> Array:
    """XNNPACK: multipliers of 8 fractional bits, a half upwards."""
    source = call.read(0)
    ratio = np.float32(source.step / call.grid.scale)
    slope = np.float32(ratio * np.float32(call.attributes["alpha"]))
    if _wide(call) or not _LEAST <= ratio <= _MOST or not -_MOST < slope <= _MOST or abs(slope) < _LEAST:
        return _leaky_relu(replace(call, variant="q31_double"))
    return _bent(call, ratio, slope)


def _bent(call: Call, above: np.float32, below: np.float32) -> Array:
    """Codes above the zero point times one factor, those below times another, with 8 fractional bits."""
    kept, bent = (int(np.rint(np.float32(-256) * factor)) for factor in (above, below))
    beneath = -call.read(0).centred << 7
    return stored(call, (beneath * np.where(beneath >= 0, bent, kept) + (1 << 14)) >> 15)


def _quantize_short(call: Call) -> Array:
    """XNNPACK: codes of 8 bits from codes of 8 bits by a multiplier of 8 fractional bits; others as LiteRT or in float."""
    source = call.read(0)
    if not source.scale.size:
        return _quantize(replace(call, variant="float32"))
    ratio = np.float32(source.step / call.grid.scale)
    narrow = source.values.dtype == np.int8 and call.grid.dtype == np.int8
    if not narrow or not _LEAST <= ratio <= _MOST:
        return _quantize(replace(call, variant="q31_double"))
    return _bent(call, ratio, ratio)


# ------------------------------------------------------------------------------------- functions in fixed point

_THIRD, _EIGHTH = 715827883, 1895147668  # 1/3 and exp(-1/8) with 31 fractional bits
_POWERS = (1672461947, 1302514674, 790015084, 290630308, 39332535, 720401, 242)  # exp(-2 ** k), k from -2
_ONE = (1 << 31) - 1


def _exp_below_zero(raw: Array, integer_bits: int) -> Array:
    """``exp(x)`` of ``x <= 0`` with ``31 - integer_bits`` fractional bits, with 31 of them (gemmlowp)."""
    fraction = 31 - integer_bits
    quarter = np.int64(1) << (fraction - 2)
    rest = (raw & (quarter - 1)) - quarter
    x = (rest << integer_bits) + (1 << 28)
    square = high_product(x, x)
    cube, fourth = high_product(square, x), high_product(square, square)
    tail = rounded_shift(high_product(rounded_shift(fourth, 2) + cube, _THIRD) + square, 1)
    result = _EIGHTH + high_product(_EIGHTH, x + tail)
    remainder = rest - raw
    for k, power in enumerate(_POWERS):
        exponent = k - 2
        if integer_bits > exponent:
            bit = np.int64(1) << (fraction + exponent)
            result = np.where(remainder & bit, high_product(result, power), result)
    if integer_bits > 5:
        result = np.where(raw < -(np.int64(1) << (fraction + 5)), 0, result)
    return np.where(raw == 0, _ONE, result)


def _reciprocal_of_one_plus(raw: Array) -> Array:
    """``1 / (1 + x)`` of ``x`` in [0, 1], both with 31 fractional bits: three steps of Newton and Raphson (gemmlowp)."""
    return np.clip(_newton_raphson(raw) << 1, -(1 << 31), _ONE)


def _newton_raphson(raw: Array) -> Array:
    """``2 / (1 + x)`` of ``x`` in [0, 1], with 29 fractional bits."""
    total = raw + _ONE
    half = (total + np.where(total >= 0, 1, -1)) // 2
    x = 1515870810 + high_product(half, -1010580540)  # 48/17 and -32/17, with 29 fractional bits
    for _ in range(3):
        rest = (1 << 29) - high_product(half, x)
        x = x + (high_product(x, rest) << 2)
    return x


def _softmax(call: Call) -> Array:
    """Exponentials of Q5.26, their sum of Q12.19, its reciprocal by Newton and Raphson."""
    source, grid = call.read(0), call.grid
    beta = np.float64(np.float32(call.attributes.get("beta", 1.0)))
    real = min(beta * np.float64(source.step) * (1 << 26), 2.0**31 - 1.0)
    mantissa, shift = (int(part) for part in quantize_multiplier(real))
    least = -int(np.floor(((1 << 5) - 1) * 2.0 ** (31 - 5) / 2.0**shift))
    x = source.values.astype(np.int64)
    below = x - x.max(-1, keepdims=True)
    kept = below >= least
    scaled = high_product(np.where(kept, below, 0) << shift, mantissa)
    powers = np.where(kept, _exp_below_zero(scaled, 5), 0)
    total = np.where(kept, rounded_shift(powers, 12), 0).sum(-1, keepdims=True)
    zeros = 31 - np.floor(np.log2(total.astype(np.float64))).astype(np.int64)
    shifted = (total << zeros) - (np.int64(1) << 31)
    scale = _reciprocal_of_one_plus(shifted)
    bits = 8 * grid.dtype.itemsize
    exponent = 12 - zeros + 31 - bits
    codes = rounded_shift(high_product(scale, powers), exponent) + grid.ends[0]
    return np.where(kept, np.clip(codes, *grid.ends), grid.ends[0]).astype(grid.dtype)


def _softmax_table(call: Call) -> Array:
    """LiteRT's default kernel: a float32 table of exponentials, their sum in order, a product with its reciprocal.

    Source: ``tensorflow/lite/kernels/internal/optimized/optimized_ops.h``, ``Softmax`` of ``In`` and ``Out`` and
    ``PopulateSoftmaxLookupTable``.
    """
    source, grid = call.read(0), call.grid
    slope = np.float32(-source.step * np.float32(call.attributes.get("beta", 1.0)))
    table = np.exp((slope * np.arange(256, dtype=np.float32)).astype(np.float64)).astype(np.float32)
    x = source.values.astype(np.int64)
    powers = table[x.max(-1, keepdims=True) - x]
    total = np.add.accumulate(powers, axis=-1, dtype=np.float32)[..., -1:]
    share = powers * (np.float32(1) / (total * grid.scale))
    return grid.store(rounded_away(share))


def _function_input(call: Call) -> tuple[Array, Array, int]:
    """Codes from zero on, the same with 27 fractional bits, and the code beyond which the function is flat."""
    source = call.read(0)
    mantissa, shift = (int(part) for part in quantize_multiplier(np.float64(source.step) * (1 << 27)))
    flat = int(np.floor(((1 << 4) - 1) * 2.0 ** (31 - 4) / 2.0**shift))
    centred = source.centred
    return centred, rescaled(np.clip(centred, -flat, flat), mantissa, shift), flat


def _logistic(call: Call) -> Array:
    x, raw, flat = _function_input(call)
    above = _reciprocal_of_one_plus(_exp_below_zero(-np.abs(raw), 4))
    result = np.where(raw > 0, above, _ONE - above)
    result = np.where(raw == 0, 1 << 30, result)
    codes = np.clip(rounded_shift(result, 23) - 128, -128, 127)
    codes = np.where(x <= -flat, -128, np.where(x >= flat, 127, codes))
    return codes.astype(call.grid.dtype)


def _tanh(call: Call) -> Array:
    x, raw, flat = _function_input(call)
    half = _one_minus_over_one_plus(_exp_below_zero(-np.abs(raw), 5))  # one bit less of fraction doubles it
    result = np.where(raw < 0, -half, half)
    codes = rounded_shift(np.where(raw == 0, 0, result), 24)
    codes = np.clip(codes, -128, 127)
    codes = np.where(x <= -flat, -128, np.where(x >= flat, 127, codes))
    return codes.astype(call.grid.dtype)


def _one_minus_over_one_plus(raw: Array) -> Array:
    """``(1 - x) / (1 + x)`` of ``x`` in [0, 1], both with 31 fractional bits (gemmlowp)."""
    return np.clip((_newton_raphson(raw) - (1 << 29)) << 2, -(1 << 31), _ONE)


def _table(function: Callable[[Array], Array], call: Call) -> Array:
    """A table of 256 codes that was built in float32, a half to even."""
    source, grid = call.read(0), call.grid
    codes = Tensor(np.arange(256, dtype=np.uint8).view(np.int8), source.scale, source.zero_point)
    low, high = grid.ends
    values = np.rint(function(codes.dequantized) / grid.scale) + grid.zero_point
    return np.clip(values, low, high).astype(grid.dtype)[source.values.view(np.uint8)]


# ---------------------------------------------------------------------------------------------------------- pools


def _windows(call: Call, values: Array, fill: int) -> tuple[Array, Array]:
    """Elements of each pooling window, ``[N, h, w, C, places]``, and whether they lie inside the input."""
    options = call.attributes
    size, stride = (options["filterHeight"], options["filterWidth"]), (options["strideH"], options["strideW"])
    pads = _pads(call, size, stride, (1, 1))
    padded = np.pad(values, [(0, 0), *pads, (0, 0)], constant_values=fill)
    inside = np.pad(np.ones((1, *values.shape[1:3], 1), bool), [(0, 0), *pads, (0, 0)])
    views = (np.lib.stride_tricks.sliding_window_view(x, size, (1, 2)) for x in (padded, inside))
    found, known = (
        x[:, :: stride[0], :: stride[1]].reshape(*x[:, :: stride[0], :: stride[1]].shape[:4], -1) for x in views
    )
    return found, known


def _average_pool(call: Call) -> Array:
    """The mean of codes, a half away from zero; input and output have one grid."""
    found, inside = _windows(call, call.read(0).values.astype(np.int64), 0)
    count, total = inside.sum(-1), found.sum(-1)
    half = count // 2
    codes = np.where(total > 0, (total + half) // count, -((half - total) // count))
    return stored(call, codes - call.grid.zero_point)


def _max_pool(call: Call) -> Array:
    values = call.read(0).values
    codes = _windows(call, values, int(np.iinfo(values.dtype).min))[0].max(-1)
    return stored(call, codes.astype(np.int64) - call.grid.zero_point)


def _mean(call: Call) -> Array:
    """The sum times a factor that holds one over the count, shortened until it fits the bits of the sum."""
    source, grid = call.read(0), call.grid
    axes = tuple(int(a) for a in np.ravel(call.read(1).values))
    count = int(np.prod([source.values.shape[a] for a in axes]))
    sums = source.centred.sum(axes, keepdims=bool(call.attributes.get("keepDims")))
    mantissa, shift = quantize_multiplier(np.float64(source.step) / np.float64(grid.scale))
    spare = min(count.bit_length() - 1, 32, 31 + int(shift))
    return stored(call, rescaled(sums, (mantissa << spare) // count, shift - spare))


def _mean_float(call: Call) -> Array:
    """XNNPACK: stored codes times one float32 factor, then one float32 that holds both zero points, a half to even.

    It leaves 16 bits to LiteRT's own kernel.
    """
    if _wide(call):
        return _mean(call)
    source, grid, single = call.read(0), call.grid, np.float32
    axes = tuple(int(a) for a in np.ravel(call.read(1).values))
    count = single(np.prod([source.values.shape[a] for a in axes]))
    sums = source.values.astype(np.int64).sum(axes, keepdims=bool(call.attributes.get("keepDims")))
    factor = single(source.step / grid.scale) * (single(1) / count)
    bias = single(grid.zero_point) - single(source.zero_point) * count * factor
    return stored(call, np.rint(sums.astype(single) * factor + bias) - grid.zero_point)


Places = Callable[[int, int, bool, bool], tuple[Array, Array, Array]]


def _resized(call: Call, places: Places) -> tuple[Array, list[tuple[Array, Array, Array]]]:
    """Codes of an image, ``[N, height, width, C]`` int64, and ``places`` of its rows and of its columns."""
    values = call.read(0).values
    sizes = [int(n) for n in np.ravel(call.read(1).values)]
    aligned, halves = bool(call.attributes.get("alignCorners")), bool(call.attributes.get("halfPixelCenters"))
    parts = [places(n, m, aligned, halves) for n, m in zip(values.shape[1:3], sizes, strict=True)]
    return values.astype(np.int64), parts


def _resize_bilinear(call: Call) -> Array:
    """Positions with 10 fractional bits, a half away from zero."""
    values, ((y, y0, y1), (x, x0, x1)) = _resized(call, _places)
    wy, wx = (y - 1024 * y0)[:, None, None], (x - 1024 * x0)[None, :, None]
    rows0, rows1 = values[:, y0], values[:, y1]
    total = (
        rows0[:, :, x0] * (1024 - wy) * (1024 - wx) + rows1[:, :, x0] * wy * (1024 - wx)
        + rows0[:, :, x1] * (1024 - wy) * wx + rows1[:, :, x1] * wy * wx
    )  # fmt: skip
    half = np.int64(1) << 19
    codes = np.where(total > 0, (total + half) >> 20, -((half - total) >> 20))
    return codes.astype(call.grid.dtype)


def _resize_bilinear_q11(call: Call) -> Array:
    """XNNPACK: weights with 11 fractional bits, of positions in float32; one rounding, a half upwards."""
    values, ((y0, y1, wy), (x0, x1, wx)) = _resized(call, _float_places)
    one, other = (
        (row[:, :, x0] << 11) + (row[:, :, x1] - row[:, :, x0]) * wx for row in (values[:, y0], values[:, y1])
    )
    total = (one << 11) + (other - one) * wy[:, None]
    return np.asarray((total + (1 << 21)) >> 22).astype(call.grid.dtype)


def _float_places(size: int, out: int, aligned: bool, halves: bool) -> tuple[Array, Array, Array]:
    """Codes on both sides of each result along an axis, and the weight of the second, ``[out, 1]``."""
    single = np.float32
    step = single(size - 1) / single(out - 1) if aligned and out > 1 else single(size) / single(out)
    start = single(0.5) * step - single(0.5) if halves else single(0)
    at = np.clip(np.arange(out, dtype=single) * step + start, single(0), single(size - 1))
    low = np.floor(at).astype(np.int64)
    weight = np.rint((at - low.astype(single)) * single(1 << 11)).astype(np.int64)
    return low, np.minimum(low + 1, size - 1), weight[:, None]


def _places(size: int, out: int, aligned: bool, halves: bool) -> tuple[Array, Array, Array]:
    step = ((size << 10) + out // 2) // out
    if aligned and out > 1:
        step = (((size - 1) << 10) + (out - 1) // 2) // (out - 1)
    at = np.arange(out, dtype=np.int64) * step + ((step // 2 - 512) if halves else 0)
    low = np.maximum(np.where(at >= 0, at // 1024, -(-at // 1024)), 0)
    above = at + 1023
    high = np.minimum(np.where(above >= 0, above // 1024, -(-above // 1024)), size - 1)
    return at, low, high


def _variants(kernel: Kernel, *names: str) -> dict[str, Kernel]:
    return dict.fromkeys(names, kernel)


_FIXED = ("q31_double", "q31_single", "once", "truncated")
_ANY = (*_FIXED, "q23_single", "float32")

#: operator of TensorFlow Lite -> variant -> its kernel
FLAT_KERNELS: dict[str, dict[str, Kernel]] = {
    "QUANTIZE": {**_variants(_quantize, *_ANY), "q8_single": _quantize_short},
    "CONV_2D": _variants(partial(_conv, False), *_ANY),
    "DEPTHWISE_CONV_2D": _variants(partial(_conv, True), *_ANY),
    "TRANSPOSE_CONV": _variants(_transpose_conv, *_ANY),
    "FULLY_CONNECTED": _variants(_fully_connected, *_ANY),
    "BATCH_MATMUL": _variants(_batch_matmul, *_ANY, _DOUBLES),
    "MUL": _variants(_mul, *_ANY, _DOUBLES),
    "ADD": {**_variants(partial(_sum, 1), *_FIXED), "shifted": partial(_sum_shifted, 1)},
    "SUB": {**_variants(partial(_sum, -1), *_FIXED), "shifted": partial(_sum_shifted, -1)},
    "LEAKY_RELU": {**_variants(_leaky_relu, *_FIXED, _DOUBLES), "q8_single": _leaky_relu_short},
    "SOFTMAX": {"fixed": _softmax, "table": _softmax_table},
    "LOGISTIC": {"fixed": _logistic, "table": partial(_table, lambda x: 1 / (1 + np.exp(-x)))},
    "TANH": {"fixed": _tanh, "table": partial(_table, np.tanh)},
    "AVERAGE_POOL_2D": {"integer": _average_pool},
    "MAX_POOL_2D": {"codes": _max_pool},
    "MEAN": {"q31_double": _mean, "float32": _mean_float},
    "RESIZE_BILINEAR": {"fixed": _resize_bilinear, "q11": _resize_bilinear_q11},
}  # fmt: skip
