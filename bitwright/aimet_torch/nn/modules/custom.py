"""Functions as modules (``aimet_torch.nn.modules.custom``, ``aimet_torch.elementwise_ops``).

Simulations quantize functional calls, so that nothing needs to be rewritten with these; they serve models that were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bitwright.aimet_common.absent import absent_names
from bitwright.aimet_torch._registry import INPUTS, quantized_class
from bitwright.aimet_torch.nn.modules import layers


def _of(name: str, function: Callable[..., Any], inputs: int = 1) -> type[nn.Module]:
    """A module class that calls a function."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    made = type(name, (nn.Module,), {"forward": forward, "__module__": __name__, "__doc__": f"``{name}`` as a module."})
    INPUTS[name] = inputs
    return made


class Concat(nn.Module):
    """``torch.cat`` of its inputs along an axis."""

    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self._axis = axis

    @property
    def axis(self) -> int:
        """The axis."""
        return self._axis

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """The inputs, one after the other."""
        return torch.cat(args, dim=self._axis)


class RmsNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, input_shape: Any, axes: Any, epsilon: float) -> None:
        super().__init__()
        self.epsilon, self.axes = epsilon, axes
        sizes = [input_shape[axis] for axis in axes]
        self.normalize_over_last_dim = list(axes)[-1] in (-1, len(input_shape) - 1)
        self.weight = nn.Parameter(torch.ones(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` by its root mean square over the axes, times the weight."""
        return x * torch.rsqrt(x.square().mean(tuple(self.axes), keepdim=True) + self.epsilon) * self.weight


class DynamicConv2d(nn.Module):
    """A convolution whose weight is an input."""

    def __init__(self, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> None:
        super().__init__()
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The convolution of ``x``."""
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


_UNARY: dict[str, Callable[..., Any]] = {
    "Sin": torch.sin, "Cos": torch.cos, "Asin": torch.asin, "Atan": torch.atan, "Erf": torch.erf,
    "Exponential": torch.exp, "Log": torch.log, "Abs": torch.abs, "Neg": torch.neg, "Round": torch.round,
    "Square": torch.square, "Sqrt": torch.sqrt, "RSqrt": torch.rsqrt, "Norm": torch.norm, "Normalize": F.normalize,
    "Max": torch.max, "AMax": torch.amax, "Min": torch.min, "AMin": torch.amin, "Argmin": torch.argmin,
    "Argmax": torch.argmax, "Mean": torch.mean, "Sum": torch.sum, "Prod": torch.prod, "CumSum": torch.cumsum,
    "Split": torch.split, "Reshape": torch.reshape, "Permute": torch.permute, "Select": torch.select,
    "Chunk": torch.chunk, "IndexSelect": torch.index_select, "Gather": torch.gather,
    "ElementwiseCeil": torch.ceil, "ElementwiseFloor": torch.floor, "Pad": F.pad, "Interpolate": F.interpolate,
    "MaxPool2d": F.max_pool2d, "AvgPool2d": F.avg_pool2d, "AdaptiveAvgPool2d": F.adaptive_avg_pool2d,
    "BatchNorm": F.batch_norm, "GroupNorm": F.group_norm, "LogicalNot": torch.logical_not, "Tile": torch.tile,
    "Squeeze": torch.squeeze, "Unsqueeze": torch.unsqueeze,
    "Expand": lambda tensor, *sizes: tensor.expand(*sizes), "StridedSlice": lambda tensor, *index: tensor[index],
    "NullRequant": lambda tensor, *shape: tensor.reshape(*shape) if shape else tensor,
}  # fmt: skip
_BINARY: dict[str, Callable[..., Any]] = {
    "Add": torch.add, "Subtract": torch.sub, "Multiply": torch.mul, "Divide": torch.div, "Pow": torch.pow,
    "FloorDivide": torch.floor_divide, "Remainder": torch.remainder, "Fmod": torch.fmod, "Outer": torch.outer,
    "MatMul": torch.matmul, "Bmm": torch.bmm, "Maximum": torch.maximum, "Minimum": torch.minimum,
    "LogicalOr": torch.logical_or, "LogicalAnd": torch.logical_and, "Greater": torch.gt, "Less": torch.lt,
    "GreaterEqual": torch.ge, "LessEqual": torch.le, "Equal": torch.eq, "NotEqual": torch.ne,
    "GridSample": F.grid_sample, "MaskedFill": torch.masked_fill, "DynamicLinear": F.linear,
}  # fmt: skip
_TERNARY: dict[str, Callable[..., Any]] = {
    "Baddbmm": torch.baddbmm, "Addmm": torch.addmm, "Where": torch.where,
    "ScaledDotProductAttention": F.scaled_dot_product_attention,
    "IndexPut": torch.index_put,
}  # fmt: skip

_MADE: dict[str, type[nn.Module]] = {
    name: _of(name, function, inputs)
    for inputs, table in ((1, _UNARY), (2, _BINARY), (3, _TERNARY))
    for name, function in table.items()
}
_MADE.update(Concat=Concat, RmsNorm=RmsNorm, DynamicConv2d=DynamicConv2d)
_MADE.update({kind.__name__: kind for kind in layers.ALL})
__all__ = sorted(_MADE)  # noqa: PLE0605
_missing = absent_names(__name__)


@functools.cache
def _quantized(name: str) -> type:
    return quantized_class(_MADE[name])


def __getattr__(name: str) -> Any:
    if name in _MADE:
        return _MADE[name]
    if name.startswith("Quantized") and name.removeprefix("Quantized") in _MADE:
        return _quantized(name.removeprefix("Quantized"))
    return _missing(name)
