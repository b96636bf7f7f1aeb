"""What a batch norm does to each channel, and layers that absorb it: arrays in, arrays out, float64 inside.

A batch norm in inference is ``y = scale * x + shift`` per channel. A layer before it absorbs both into its
weight and bias; a layer after it does where the shift of its input is a constant shift of its output.

Reference: Jacob et al. 2018, arXiv:1712.05877, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.graph.traits import TRAITS
from bitwright.errors import ModelError

Array = NDArray[Any]
Attrs = Mapping[str, Any]

#: operator types that can absorb a batch norm


def bn_affine(weight: Array | None, bias: Array | None, mean: Array, var: Array, eps: float) -> tuple[Array, Array]:
    """What a batch norm in inference does to each channel, as ``scale * x + shift``.

    Args:
        weight, bias: gamma and beta, shape [C]; ``None`` stands for 1 and 0.
        mean, var: running statistics, shape [C].
        eps: added to the variance.

    Returns:
        ``scale``, ``shift``: float64, shape [C].

    Raises:
        ModelError: a parameter is NaN or infinite, or ``var + eps`` is not positive; names the first such
            channel.

    Example:
        >>> bn_affine(np.float32([2]), None, np.float32([3]), np.float32([4]), 0.0)
        (array([1.]), array([-3.]))
    """
    mean, var = np.asarray(mean, np.float64), np.asarray(var, np.float64)
    gamma = np.ones_like(mean) if weight is None else np.asarray(weight, np.float64)
    beta = np.zeros_like(mean) if bias is None else np.asarray(bias, np.float64)
    for name, value in (("weight", gamma), ("bias", beta), ("mean", mean), ("variance", var)):
        _refuse_channel(~np.isfinite(value), value, name)
    _refuse_channel(var + eps <= 0, var, f"variance with epsilon {eps:g}")
    scale = gamma / np.sqrt(var + eps)
    return scale, beta - mean * scale


def _refuse_channel(bad: Array, value: Array, name: str) -> None:
    if bad.any():
        channel = int(np.argmax(bad))
        raise ModelError(
            "batch norm",
            f"its {name} is {value[channel]:g} in channel {channel}",
            "find where the statistics or parameters went wrong in training, or estimate the statistics anew",
        )


def fold_backward(
    op_type: str, attrs: Attrs, W: Array, b: Array | None, scale: Array, shift: Array
) -> tuple[Array, Array | None]:
    """Weight and bias of a layer that absorb ``scale * y + shift`` applied to its output ``y``.

    ============== =========================== ===============================
    type           weight                      output channel of a weight
    ============== =========================== ===============================
    Conv           [out, in/group, *kernel]    axis 0
    ConvTranspose  [in, out/group, *kernel]    group of axis 0, then axis 1
    Gemm           [out, in] if transB         axis 0, else axis 1 of [in, out]
    MatMul         [in, out], at the right     axis 1
    ============== =========================== ===============================

    Args:
        op_type, attrs: the layer; ``group``, ``transB``, ``beta`` are read.
        W, b: its parameters; ``b`` of shape [out] or ``None``.
        scale, shift: shape [out].

    Returns:
        ``W'``, float64, shape of ``W``, and ``b'``, float64, shape [out]; ``None`` when there was no bias and
        ``shift`` is zero, so that none is needed.

    Raises:
        ModelError: ``op_type`` is none of the four, or the channel counts differ.
    """
    axes = channel_axes(op_type, attrs, W.shape)
    _same_channels(op_type, "output", scale, axes.outputs)
    wide = axes.split(W).astype(
        np.float64
    )  # a product of both dtypes, which numpy casts piece by piece, takes twice as long
    wide *= axes.over_outputs(scale)
    folded = wide.reshape(W.shape)
    if b is None and not np.any(shift):
        return folded, None
    bias = np.zeros(axes.outputs) if b is None else np.asarray(b, np.float64)
    return folded, bias * scale + shift / float(attrs.get("beta", 1.0))


def fold_forward(
    op_type: str, attrs: Attrs, W: Array, b: Array | None, scale: Array, shift: Array
) -> tuple[Array, Array | None]:
    """Weight and bias of a layer that absorb ``scale * x + shift`` applied to its input ``x``.

    The shift becomes a constant per output channel, which it only is where every output sees the whole
    kernel: see :func:`forward_obstacle`. Arguments and results are those of :func:`fold_backward`, with
    ``scale``, ``shift`` of shape [in]; ``alpha`` is read too.

    Raises:
        ModelError: ``op_type`` is none of the four, the channel counts differ, or the shift would be no
            constant.
    """
    axes = channel_axes(op_type, attrs, W.shape)
    _same_channels(op_type, "input", scale, axes.inputs)
    obstacle = forward_obstacle(op_type, attrs, W.shape[2:], shift)
    if obstacle:
        raise ModelError(op_type, obstacle, "keep this batch norm; only one without a shift can be folded here")
    split = axes.split(W)
    folded = (split * axes.over_inputs(scale)).reshape(W.shape)
    if not np.any(shift):
        return folded, None if b is None else np.asarray(b, np.float64)
    constant = axes.sum_over_inputs(split * axes.over_inputs(shift))
    bias = np.zeros(axes.outputs) if b is None else np.asarray(b, np.float64)
    return folded, bias + constant * float(attrs.get("alpha", 1.0)) / float(attrs.get("beta", 1.0))


def forward_obstacle(op_type: str, attrs: Attrs, kernel: Sequence[int], shift: Array) -> str | None:
    """Why a shift of the layer's input is not a constant shift of its output; ``None`` when it is one.

    Zeros of the padding are not shifted, and the border outputs of a transposed convolution see fewer inputs.
    """
    if op_type not in ("Conv", "ConvTranspose") or not np.any(shift):
        return None
    single = all(k == 1 for k in kernel)
    padded = any(attrs.get("pads") or ()) or (str(attrs.get("auto_pad", "NOTSET")).startswith("SAME") and not single)
    if op_type == "Conv":
        return "it pads with zeros, which the shift does not reach" if padded else None
    strided = any(s != 1 for s in attrs.get("strides") or ()) or any(attrs.get("output_padding") or ())
    if single and not strided and not padded:
        return None
    return "outputs of a transposed convolution see different kernel parts, so the shift is not a constant"


@dataclass(frozen=True)
class ChannelAxes:
    """A weight as [group, a, b, kernel]: one of a and b counts input, the other output channels of a group.

    Attributes:
        group, inputs, outputs: of the layer; both counts over all groups.
        outputs_first: a counts the output channels.
    """

    group: int
    inputs: int
    outputs: int
    outputs_first: bool

    def split(self, W: Array) -> Array:
        """``W`` in that shape."""
        first, second = self.inputs // self.group, self.outputs // self.group
        if self.outputs_first:
            first, second = second, first
        return W.reshape(self.group, first, second, -1)

    def over_outputs(self, values: Array) -> Array:
        """One number per output channel, shape [outputs], to multiply the split weight with."""
        shape = (self.group, -1, 1, 1) if self.outputs_first else (self.group, 1, -1, 1)
        return np.asarray(values, np.float64).reshape(shape)

    def over_inputs(self, values: Array) -> Array:
        """One number per input channel, shape [inputs], to multiply the split weight with."""
        shape = (self.group, 1, -1, 1) if self.outputs_first else (self.group, -1, 1, 1)
        return np.asarray(values, np.float64).reshape(shape)

    def sum_over_inputs(self, split: Array) -> Array:
        """A split weight summed over kernel and inputs, shape [outputs]."""
        total: Array = split.sum(axis=(2, 3) if self.outputs_first else (1, 3)).reshape(-1)
        return total


def channel_axes(op_type: str, attrs: Attrs, shape: Sequence[int]) -> ChannelAxes:
    """The channels of a layer whose weight has ``shape``; see the table of :func:`fold_backward`."""
    group = int(attrs.get("group", 1))
    if op_type == "Conv":
        return ChannelAxes(group, shape[1] * group, shape[0], True)
    if op_type == "ConvTranspose":
        return ChannelAxes(group, shape[0], shape[1] * group, False)
    if op_type == "Gemm" and attrs.get("transB"):
        return ChannelAxes(1, shape[1], shape[0], True)
    if op_type in ("Gemm", "MatMul"):
        return ChannelAxes(1, shape[0], shape[1], False)
    raise ModelError(
        op_type,
        "a batch norm cannot be folded into this operator",
        f"fold into one of {', '.join(sorted(TRAITS['layer']))}",
    )


def _same_channels(op_type: str, side: str, scale: Array, channels: int) -> None:
    if scale.shape != (channels,):
        raise ModelError(
            op_type,
            f"it has {channels} {side} channels, the batch norm {scale.size}",
            "fold only a batch norm of the same channels",
        )


def unit_variance(eps: float, dtype: str = "float32") -> float:
    """A running variance whose sum with ``eps`` is exactly 1, so that a batch norm divides by exactly 1.

    Exact for ``float32`` and ``float64``. Narrower dtypes have no such number as a rule: they get the nearest
    one to ``1 - eps``, which is closer to exact than their own rounding.

    Example:
        >>> v = np.float32(unit_variance(1e-5))
        >>> v + np.float32(1e-5) == 1
        np.True_
    """
    kind = np.dtype(dtype).type if dtype in ("float64", "float16") else np.float32
    step, one = kind(eps), kind(1)
    low = high = kind(1 - eps)
    for _ in range(4):
        for candidate in (low, high):
            if kind(candidate + step) == one:
                return float(candidate)
        low, high = np.nextafter(low, kind(-1)), np.nextafter(high, kind(2))
    return float(kind(1 - eps))
