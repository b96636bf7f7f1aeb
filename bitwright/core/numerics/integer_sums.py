"""Integer accumulators: the largest sums that a kernel can form, and the int32 bias that is added to them.

An integer kernel adds ``(q_x - z_x) * (q_w - z_w)`` over the inner length of a product. The sum is exact as long as it fits
into 32 bits; beyond that it wraps around and the output is wrong without a warning. The bounds here are static: they follow
from the codes of the weight and the grid of the input, whatever the data.

The bias is added to the same accumulator, so it has the scale ``s_x * s_w`` and zero point 0. Nothing is left to
calibrate, only to check: where a weight channel is close to zero its scale is tiny, the bias in units of ``s_x * s_w``
needs more than 32 bits, and the accumulator wraps around. A larger weight scale for that channel prevents it and has no
visible effect on the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bitwright.core.numerics.affine import with_scale
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT32_SCALE, IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.errors import EncodingsError, RangeError

INT32_MAX = (1 << 31) - 1
INT16_MIN, INT16_MAX = -(1 << 15), (1 << 15) - 1


def largest_sum(weight: NDArray[np.int64], axis: int, groups: int = 1, *, furthest: int) -> int:
    """The largest absolute sum of products that an output can have.

    Args:
        weight: codes minus zero point.
        axis: of the output channels; all others are summed over.
        groups: along axis 0, sums that are kept apart where this is not the axis of the output channels.
        furthest: largest absolute value of an input code minus its zero point.

    >>> largest_sum(np.full((3, 200_000), -127), 0, furthest=255) > INT32_MAX
    True
    """
    sizes = np.abs(weight.astype(np.int64))
    if axis != 0 and groups > 1:
        return max(largest_sum(part, axis, furthest=furthest) for part in np.split(sizes, groups))
    sums = sizes.sum(axis=tuple(i for i in range(sizes.ndim) if i != axis % sizes.ndim))
    return int(sums.max(initial=0)) * furthest


def largest_pair(weight: NDArray[np.int64], highest: int = 255) -> NDArray[np.int64]:
    """The largest absolute sum of two neighbouring products, over all inputs.

    CPUs without dot-product instructions (VNNI) add ``code[2i] * weight[2i] + code[2i + 1] * weight[2i + 1]`` in 16 bits that
    saturate (``vpmaddubsw``) before they widen: the codes are those that are stored, without the zero point taken off.

    Args:
        weight: stored codes, ``[K, M]``; K in the order in which the kernel adds.
        highest: largest input code, 255 for uint8.

    Returns:
        ``[ceil(K / 2), M]``: the sum of largest absolute value, negative where that is below zero.

    >>> largest_pair(np.array([[127], [127], [64], [64]])).ravel().tolist()
    [64770, 32640]
    """
    pairs = _paired(weight)
    above, below = (highest * np.clip(pairs * sign, 0, None).sum(1) for sign in (1, -1))
    return np.asarray(np.where(above >= below, above, -below), np.int64)


def paired_product(codes: NDArray[np.int64], weight: NDArray[np.int64]) -> NDArray[np.int64]:
    """``codes @ weight`` as a CPU without dot-product instructions adds it, see :func:`largest_pair`.

    Args:
        codes: of the input, as stored, ``[N, K]``.
        weight: as stored, ``[K, M]``.

    >>> paired_product(np.array([[255, 255]]), np.array([[127], [127]])).item(), 2 * 255 * 127
    (32767, 64770)
    """
    return codes @ weight - saturated(codes, weight)[0]


def saturated(codes: NDArray[np.int64], weight: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Loss of ``codes @ weight`` to saturation, and the number of saturated pairs; both ``[N, M]``."""
    return pair_losses(lambda k: codes[:, k], codes.shape[0], weight)


def pair_losses(
    column: Callable[[int], NDArray[Any]], rows: int, weight: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """:func:`saturated` of codes that are given column by column; only those of pairs that can saturate are asked for.

    Args:
        column: inner index -> the stored codes of every row, ``[N]``.
        rows: N.
        weight: stored codes, ``[K, M]``.
    """
    lost = np.zeros((rows, weight.shape[1]), np.int64)
    count = np.zeros_like(lost)
    pairs, bound = _paired(weight), largest_pair(weight)
    risky = (bound > INT16_MAX) | (bound < INT16_MIN)
    last = weight.shape[0] - 1
    for index in np.flatnonzero(risky.any(1)):
        columns = np.flatnonzero(risky[index])
        given = [column(min(2 * int(index) + i, last)).astype(np.float32) for i in range(2)]
        factors = pairs[index][:, columns].astype(np.float32)
        reach = np.abs(factors).max(1)
        at = np.flatnonzero(given[0] * reach[0] + given[1] * reach[1] > INT16_MAX)
        if at.size:
            sums = given[0][at, None] * factors[0] + given[1][at, None] * factors[1]
            over = sums - np.clip(sums, INT16_MIN, INT16_MAX)
            where = np.ix_(at, columns)
            lost[where] += over.astype(np.int64)
            count[where] += over != 0
    return lost, count


def _paired(matrix: NDArray[np.int64]) -> NDArray[np.int64]:
    """``[K, M]`` as ``[ceil(K / 2), 2, M]``, padded with zeros."""
    whole = matrix.astype(np.int64)
    whole = np.pad(whole, ((0, whole.shape[0] % 2), (0, 0)))
    return whole.reshape(-1, 2, whole.shape[1])


# Half of the int32 range for the bias leaves the other half to the sum of products.
BIAS_LIMIT = float(1 << 30)
_INT32 = IntFormat(32)
_TINY = float(np.finfo(np.float32).tiny)


def bias_entries(shape: tuple[int, ...]) -> int | None:
    """Number of output channels of a bias of ``shape``, if all its axes but the last have one element; else ``None``.

    >>> bias_entries((10,)), bias_entries((1, 10)), bias_entries((2, 10)), bias_entries(())
    (10, 10, None, None)
    """
    return shape[-1] if shape and all(n == 1 for n in shape[:-1]) else None


def underivable(input_encoding: Encoding, weight_encoding: Encoding, channels: int) -> str | None:
    """The reason why the two encodings give no int32 bias of ``channels`` entries, or ``None`` where they do.

    It takes an integer input (2 to 16 bits, one scale) and an integer weight (2 to 8 bits) with one scale per
    tensor or per output channel. A grouped transposed convolution has one scale per group and channel within
    the group (``PerBlock(in / group, axis=0, channel_axis=1)``), which is one per output channel too.

    Whether the weight's channel axis is the operator's output axis is for the caller to know.
    """
    if not isinstance(input_encoding.format, IntFormat) or not isinstance(weight_encoding.format, IntFormat):
        return "its input or weight is not on an integer grid"
    if input_encoding.dynamic:
        return "the scale of its input is chosen at run time"
    if input_encoding.format.bits > 16 or weight_encoding.format.bits > 8:
        return "its input has more than 16 bits or its weight more than 8"
    if not isinstance(input_encoding.granularity, PerTensor):
        return "its input has more than one scale"
    granularity, scales = weight_encoding.granularity, weight_encoding.scale.size
    if isinstance(granularity, PerBlock) and (granularity.channel_axis is None or scales != channels):
        return "its weight has several scales per output channel"
    if isinstance(granularity, PerChannel) and scales != channels:
        return f"its weight has {scales} scales for {channels} output channels"
    return None


def floor_weight_scale(
    weight_encoding: Encoding, input_encoding: Encoding, bias: ArrayLike, site: str = "bias"
) -> Encoding:
    """The weight's encoding with scales raised to where the bias fits: ``|bias| <= 2**30 * s_x * s_w``.

    Channels that fit keep their scale bit for bit, so that flooring twice is flooring once; when all fit, the
    encoding given is returned. The product of the scales is also kept a normal float32.

    Args:
        weight_encoding: of the weight; its scale has one entry, or one per output channel.
        input_encoding: of the operator's activation input, per tensor.
        bias: shape ``(channels,)``, or with axes of length 1 in front of it; finite.
        site: name for error messages.

    Raises:
        EncodingsError: the encodings allow no int32 bias, see :func:`underivable`.
        RangeError: the bias holds a NaN or an infinity, or no finite weight scale is large enough.

    Example:
        >>> x, w = (Encoding(IntFormat(8), np.float32(s), np.int32(0)) for s in (0.5, 1e-12))
        >>> round(float(floor_weight_scale(w, x, [1.0]).scale) * 0.5 * 2**30, 6)
        1.0
    """
    magnitude = np.abs(_checked(input_encoding, weight_encoding, bias, site)).astype(np.float64)
    if weight_encoding.scale.size == 1:
        magnitude = magnitude.max(initial=0.0, keepdims=True)
    magnitude = magnitude.reshape(weight_encoding.scale.shape)
    scale = weight_encoding.scale.copy()
    least = np.maximum(magnitude / BIAS_LIMIT, _TINY) / np.float64(input_encoding.scale)
    if least.max(initial=0.0) > np.finfo(np.float32).max:
        raise RangeError(
            site,
            f"its largest entry, {float(magnitude.max()):.3g}, cannot be counted in steps of an input scale "
            f"of {float(input_encoding.scale):.3g}: the weight scale would overflow float32",
            "leave this bias in float, or look for the operator that makes such values",
        )
    # Rounding of the quotient and of the float32 product can each leave the scale one step short.
    for _ in range(4):
        short = ~_fits(magnitude, scale, input_encoding)
        if not short.any():
            break
        raised = np.maximum(scale, least.astype(np.float32))
        raised = np.where(raised == scale, np.nextafter(scale, np.float32(np.inf)), raised)
        if weight_encoding.scale_format != FLOAT32_SCALE:  # the next scale that can be said may be far
            raised = np.maximum(with_scale(weight_encoding, raised).scale, 2 * scale)
        scale = np.where(short, raised, scale).astype(np.float32)
    if np.array_equal(scale, weight_encoding.scale):
        return weight_encoding
    return with_scale(weight_encoding, scale)


def derive_bias_encoding(
    input_encoding: Encoding, weight_encoding: Encoding, bias: ArrayLike, site: str = "bias"
) -> Encoding:
    """The int32 grid of a bias: ``scale = s_x * s_w`` (one float32 product), zero point 0.

    Args:
        input_encoding: of the operator's activation input, per tensor.
        weight_encoding: of the weight, as :func:`floor_weight_scale` returns it.
        bias: shape ``(channels,)``, or with axes of length 1 in front of it; finite.
        site: name for error messages.

    Returns:
        Per tensor when the weight is, else per channel along the last axis with ``channels`` scales.

    Raises:
        EncodingsError: the encodings allow no int32 bias, or the weight scale was not floored.
        RangeError: the bias holds a NaN or an infinity.

    Example:
        >>> x, w = (Encoding(IntFormat(8), np.float32(s), np.int32(0)) for s in (0.5, 0.25))
        >>> derive_bias_encoding(x, w, [1.0, 2.0])
        Encoding(int32, scale=0.125, zero_point=0)
    """
    values = _checked(input_encoding, weight_encoding, bias, site)
    if floor_weight_scale(weight_encoding, input_encoding, values, site) is not weight_encoding:
        raise EncodingsError(
            site,
            "in units of input scale times weight scale it passes 2**30: an integer accumulator would wrap",
            "quantize the weight with the encoding that floor_weight_scale(weight, input, bias) returns",
        )
    scale = np.multiply(input_encoding.scale, weight_encoding.scale, dtype=np.float32)
    if isinstance(weight_encoding.granularity, PerTensor):
        return Encoding(_INT32, scale.reshape(()), np.zeros((), np.int32), PerTensor())
    return Encoding(_INT32, scale.reshape(-1), np.zeros(scale.size, np.int32), PerChannel(values.ndim - 1))


def quantize_bias(bias: ArrayLike, encoding: Encoding) -> NDArray[np.int32]:
    """Codes of ``bias``: ``rint(bias / scale)`` in float64, saturating at the ends of int32.

    Example:
        >>> quantize_bias([1.0, -0.3], Encoding(IntFormat(32), np.float32(0.125), np.int32(0)))
        array([ 8, -2], dtype=int32)
    """
    codes = np.rint(np.asarray(bias, np.float64) / encoding.scale.astype(np.float64))
    return np.clip(codes, _INT32.qmin, _INT32.qmax).astype(np.int32)


def fake_quantize_bias(bias: ArrayLike, encoding: Encoding) -> NDArray[np.float32]:
    """The quantized bias: ``float32(code) * scale``, shape of ``bias``.

    The code is rounded to float32 before the product, as ONNX DequantizeLinear does with int32; above
    ``2**24`` this differs in the last bit from the product of the exact code.
    """
    return np.asarray(quantize_bias(bias, encoding).astype(np.float32) * encoding.scale, np.float32)


def _fits(magnitude: NDArray[np.float64], scale: NDArray[np.float32], input_encoding: Encoding) -> NDArray[np.bool_]:
    with np.errstate(under="ignore"):
        product = np.multiply(input_encoding.scale, scale, dtype=np.float32).astype(np.float64)
    return np.asarray((magnitude <= BIAS_LIMIT * product) & (product >= _TINY))


def _checked(input_encoding: Encoding, weight_encoding: Encoding, bias: ArrayLike, site: str) -> NDArray[np.float32]:
    values = np.asarray(bias, np.float32)
    channels = bias_entries(values.shape)
    reason = (
        f"its bias has shape {values.shape}, not one entry per output channel"
        if channels is None
        else underivable(input_encoding, weight_encoding, channels)
    )
    if reason is not None:
        raise EncodingsError(site, f"no int32 bias can be derived: {reason}", "leave this bias in float")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise RangeError(
            site,
            f"the bias of channel {bad[0]} is {float(values.flat[bad[0]])!r}",
            "repair the parameter before quantizing",
        )
    return values
