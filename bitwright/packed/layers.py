"""Layers that hold the codes of their weights and compute with torch's kernels for codes.

They need torch and the arithmetic of ``core/numerics``, and nothing of a simulation. A layer without a kernel dequantizes its
weight in every call.

Kernels, of torch 2.8 and later on CPUs: ``torch._int_mm`` (integer sums of int8), ``onednn::qconv*_pointwise``,
``aten::_weight_int8pack_mm``, ``aten::_weight_int4pack_mm_for_cpu``, ``torch._scaled_mm``.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.numerics import affine
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT32_SCALE, FLOAT_FORMATS, FloatFormat, IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor, PerToken
from bitwright.core.numerics.serialize import encoding_from_json, encoding_to_json
from bitwright.llm.coded import StoredWeight, linear
from bitwright.llm.packed import PackedWeight, signed

_ONE, _ZERO = np.ones((), np.float32), np.zeros((), np.int32)
_FP8 = FLOAT_FORMATS["float8_e4m3"]
_HALF = (torch.bfloat16, torch.float16)
_INT4_GROUPS = (256, 128, 64, 32)  # that the kernel has
_CONVOLUTIONS = {"conv1d": F.conv1d, "conv2d": F.conv2d, "conv3d": F.conv3d}
Pair = tuple[Tensor, Tensor, Tensor]


class Grid(nn.Module):
    """The quantizer of an activation.

    Args:
        encoding: of the values that pass, calibrated or dynamic.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, encoding: Encoding) -> None:
        super().__init__()
        self.encoding, self.written = encoding, json.dumps(encoding_to_json(encoding))
        self.register_buffer("scale", torch.from_numpy(encoding.scale.copy()), persistent=False)
        self.register_buffer("zero_point", torch.from_numpy(encoding.zero_point.astype(np.float32)), persistent=False)

    @property
    def whole(self) -> bool:
        """Whether all values, or all of a token, share one scale, as products of codes require."""
        found = self.encoding.granularity
        return found == PerTensor() or (isinstance(found, PerToken) and not found.block and found.axis == -1)

    @property
    def integers(self) -> bool:
        """Whether :meth:`codes` returns int8."""
        fmt = self.encoding.format
        return (
            isinstance(fmt, IntFormat) and fmt.bits <= 8 and self.whole and self.encoding.scale_format == FLOAT32_SCALE
        )

    @property
    def fp8(self) -> bool:
        """Whether :meth:`codes` returns float8_e4m3."""
        return self.encoding.format == _FP8 and self.whole and self.encoding.scale_format == FLOAT32_SCALE

    def codes(self, x: Tensor) -> Pair:
        """Codes of ``x``, int8 or float8_e4m3, with scales and zero points that broadcast against them.

        Unsigned grids move by half of their codes, and their zero points with them.
        """
        x = x.float()
        fmt = self.encoding.format
        if isinstance(fmt, FloatFormat):
            scale = self._reach(x) / fmt.max if self.encoding.dynamic else self.scale
            return (x / scale).clamp(-fmt.max, fmt.max).to(torch.float8_e4m3fn), scale, self.zero_point
        scale, zero = self.scale, self.zero_point
        if self.encoding.dynamic and fmt.signed:
            reach = self._reach(x)
            scale = reach / fmt.reach
            if fmt.centred:
                return torch.round(x / scale).clamp(fmt.qmin, fmt.qmax).to(torch.int8), scale, zero
            return torch.round(x * (fmt.reach / reach)).to(torch.int8), scale, zero
        if self.encoding.dynamic:
            low, high = (self._end(x, name) for name in ("amin", "amax"))
            low, high = low.clamp(max=0), high.clamp(min=0)
            scale = ((high - low) / fmt.qmax).clamp(min=affine.SMALLEST_REACH)
            zero = torch.round((0 - low / scale).clamp(0, fmt.qmax))
        codes = (torch.round(x / scale) + zero).clamp(fmt.qmin, fmt.qmax)
        shift = 0 if fmt.signed else 1 << (fmt.bits - 1)
        return (codes - shift).to(torch.int8), scale, zero - shift

    def _end(self, x: Tensor, name: str) -> Tensor:
        if isinstance(self.encoding.granularity, PerToken):
            found: Tensor = getattr(x, name)(-1, keepdim=True)
            return found
        whole: Tensor = getattr(x, name)()
        return whole

    def _reach(self, x: Tensor) -> Tensor:
        return torch.maximum(-self._end(x, "amin"), self._end(x, "amax")).clamp(min=affine.SMALLEST_REACH)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` rounded to the grid."""
        if self.integers or self.fp8:
            codes, scale, zero = self.codes(x)
            return ((codes.float() - zero) * scale).to(x.dtype)
        made: Tensor = _on_grid(x, self.written)
        return made

    def extra_repr(self) -> str:
        """Format and scale."""
        return repr(self.encoding)


@functools.lru_cache(maxsize=4096)
def _encoding(written: str) -> Encoding:
    return encoding_from_json(json.loads(written))


@torch.library.custom_op("bitwright::on_grid", mutates_args=())
def _on_grid(x: Tensor, written: str) -> Tensor:
    """``x`` rounded to any grid; an operator, since ``torch.compile`` cannot look into the arithmetic."""
    made: Tensor = affine.fake_quantize(x, _encoding(written))
    return made


@_on_grid.register_fake
def _(x: Tensor, written: str) -> Tensor:
    return torch.empty_like(x)


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a layer.

    Attributes:
        call: ``linear``, ``conv1d``, ``conv2d`` or ``conv3d``.
        weight: its codes.
        bias: floats, or ``None``.
        grid: the quantizer of its input, or ``None``.
        options: of convolutions: ``stride``, ``padding``, ``dilation`` (a list of numbers each) and ``groups``.
        dtype: that it computes in.
    """

    call: str
    weight: PackedWeight
    bias: Tensor | None
    grid: Encoding | None
    options: Mapping[str, Any]
    dtype: torch.dtype


class PackedLayer(nn.Module):
    """A linear layer or a convolution that holds codes; ``kernel``: the name of its kernel."""

    kernel = ""
    bias: Tensor | None

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.call, self.options, self.described = parts.call, dict(parts.options), parts.weight.layout
        self.shape = parts.weight.shape
        self.grid = None if parts.grid is None else Grid(parts.grid)
        bias = None if parts.bias is None else parts.bias.detach().clone()
        self.register_buffer("bias", bias)

    def extra_repr(self) -> str:
        """Sizes, formats, kernel."""
        return f"{self.call}, {tuple(self.shape)}, {self.described}, kernel={self.kernel}"


def _output_scales(weight: PackedWeight) -> Tensor:
    """The scale of each output, ``[O]``."""
    return torch.from_numpy(np.array(np.broadcast_to(weight.scale.reshape(-1), (weight.shape[0],)), np.float32))


class DequantizedLayer(PackedLayer):
    """Dequantizes its weight in every call."""

    kernel = "dequantized"

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.weight = StoredWeight(parts.weight, parts.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Answer of the layer."""
        x = x if self.grid is None else self.grid(x)
        if self.call == "linear":
            return linear(x, self.bias, self.weight)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _CONVOLUTIONS[self.call](x, self.weight().to(x.dtype), bias, **self.options)


class Int8Linear(PackedLayer):
    """Sums of products of int8 codes, by ``torch._int_mm``; one scale per output or one for all."""

    kernel = "int8"
    codes: Tensor
    scale: Tensor
    sums: Tensor

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        codes = signed(parts.weight)[0]
        self.register_buffer("codes", torch.from_numpy(np.array(codes, np.int8)))
        self.register_buffer("scale", torch.from_numpy(parts.weight.scale.reshape(-1).copy()))
        self.register_buffer("sums", torch.from_numpy(codes.sum(-1, dtype=np.int32)))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., I]`` to ``[..., O]``."""
        assert self.grid is not None
        codes, scale, zero = self.grid.codes(x)
        sums = torch._int_mm(codes.reshape(-1, codes.shape[-1]), self.codes.t())
        sums = sums.reshape(*codes.shape[:-1], -1) - zero.int() * self.sums
        made = sums.float() * (scale * self.scale)
        return (made if self.bias is None else made + self.bias).to(x.dtype)


class Int8Convolution(PackedLayer):
    """Sums of products of uint8 and int8 codes, by oneDNN; one scale per output channel or one for all."""

    kernel = "int8"
    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        assert self.grid is not None
        encoding = self.grid.encoding
        assert isinstance(encoding.format, IntFormat)
        codes = np.array(signed(parts.weight)[0], np.int8)
        self.lift = 0 if not encoding.format.signed else 1 << (encoding.format.bits - 1)
        self.ends = (encoding.format.qmin + self.lift, encoding.format.qmax + self.lift)
        self.step, self.middle = float(encoding.scale), int(encoding.zero_point) + self.lift
        self.register_buffer("scales", _output_scales(parts.weight))
        self.register_buffer("zeros", torch.zeros(len(codes), dtype=torch.int32))
        o = self.options
        packed = torch.ops.onednn.qconv_prepack(
            torch.from_numpy(codes), self.scales, self.step, self.middle, o["stride"], o["padding"], o["dilation"],
            o["groups"], None,
        )  # fmt: skip
        self.register_buffer("codes", packed, persistent=False)
        self.bias = None if self.bias is None else self.bias.float()

    def __deepcopy__(self, memo: dict[int, Any]) -> Int8Convolution:
        """Copy the layer, sharing the read-only codes, whose layout torch cannot copy."""
        memo[id(self.codes)] = self.codes
        memo[id(self)] = made = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Answer of the convolution."""
        batch = x if x.dim() == len(self.shape) else x[None]
        codes = (torch.round(batch.float() / self.step) + self.middle).clamp(*self.ends).to(torch.uint8)
        o = self.options
        made: Tensor = getattr(torch.ops.onednn, f"q{self.call}_pointwise")(
            codes, self.step, self.middle, self.codes, self.scales, self.zeros, self.bias, o["stride"], o["padding"],
            o["dilation"], o["groups"], 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return (made if x.dim() == len(self.shape) else made[0]).to(x.dtype)


class _WeightOnlyLinear(PackedLayer):
    """A linear layer of which only the weight is quantized."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., I]`` to ``[..., O]``."""
        made = self._product(x.reshape(-1, x.shape[-1]))
        made = made if self.bias is None else made + self.bias.to(x.dtype)
        return made.reshape(*x.shape[:-1], -1)

    def _product(self, rows: Tensor) -> Tensor:
        """``[N, I]`` times the weight, ``[N, O]``."""
        raise NotImplementedError


class Int8WeightLinear(_WeightOnlyLinear):
    """Half-precision inputs with int8 weights, by ``aten::_weight_int8pack_mm``."""

    kernel = "int8 weights"
    codes: Tensor
    scale: Tensor

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        codes = np.array(signed(parts.weight)[0], np.int8)
        self.register_buffer("codes", torch.from_numpy(codes))
        self.register_buffer("scale", _output_scales(parts.weight).to(parts.dtype))

    def _product(self, rows: Tensor) -> Tensor:
        made: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self.codes, self.scale.to(rows.dtype))
        return made


class Int4WeightLinear(_WeightOnlyLinear):
    """Half-precision inputs with 4-bit weights in groups, by ``aten::_weight_int4pack_mm_for_cpu``."""

    kernel = "int4 weights"
    codes: Tensor
    scales: Tensor

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        weight, (outputs, inputs) = parts.weight, parts.weight.shape
        self.group = int4_group(weight)
        codes = weight.codes.astype(np.int32)
        shift = 8 if isinstance(weight.format, IntFormat) and weight.format.signed else 0
        self.register_buffer(
            "codes", torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(codes + shift), 1)
        )
        groups = (outputs, inputs // self.group)
        found = weight.scale.reshape(outputs, -1) if weight.scale.size > 1 else weight.scale.reshape(1, 1)
        zero = weight.encoding.zero.reshape(found.shape).astype(np.float32) + shift
        scale = np.broadcast_to(np.repeat(found, groups[1] // found.shape[1], 1), groups)
        zero = np.broadcast_to(np.repeat(zero, groups[1] // zero.shape[1], 1), groups)
        both = np.stack((scale.T, ((8 - zero) * scale).T), -1)  # the kernel computes (code - 8) * scale + zero
        self.register_buffer("scales", torch.from_numpy(np.ascontiguousarray(both, np.float32)).to(parts.dtype))

    def _product(self, rows: Tensor) -> Tensor:
        scales = self.scales.to(rows.dtype)
        made: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.codes, self.group, scales)
        return made


class Fp8Linear(PackedLayer):
    """Products of numbers of float8_e4m3, by ``torch._scaled_mm``; one scale per output or one for all."""

    kernel = "fp8"
    codes: Tensor
    scale: Tensor

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.register_buffer("codes", torch.from_numpy(parts.weight.codes.copy()))
        self.register_buffer("scale", _output_scales(parts.weight)[None])

    def forward(self, x: Tensor) -> Tensor:
        """``[..., I]`` to ``[..., O]``."""
        assert self.grid is not None
        codes, scale, _ = self.grid.codes(x.reshape(-1, x.shape[-1]))
        scale = scale.expand(codes.shape[0], 1).contiguous()
        weight = self.codes.view(torch.float8_e4m3fn).t()
        made = torch._scaled_mm(codes, weight, scale, self.scale, out_dtype=torch.float32)
        made = made if self.bias is None else made + self.bias
        return made.reshape(*x.shape[:-1], -1).to(x.dtype)


def int4_group(weight: PackedWeight) -> int:
    """Group size of the int4 kernel for a weight ``[O, I]``; 0 where it supports none."""
    found, inputs = weight.granularity, weight.shape[-1]
    if isinstance(found, PerBlock):
        return found.size if found.size in _INT4_GROUPS and found.axis in (1, -1) and inputs % found.size == 0 else 0
    return next((group for group in _INT4_GROUPS if inputs % group == 0), 0)


@functools.cache
def exact_products(call: str) -> bool:
    """Whether torch's int8 kernel is exact for extreme products on this CPU; some saturate without VNNI."""
    weight = np.full((16, 64), 127, np.int8)
    weight[1::2] = -128
    if call == "linear":
        codes = torch.full((4, 64), -128, dtype=torch.int8)
        found = torch._int_mm(codes, torch.from_numpy(weight).t())
        return bool((found == torch.from_numpy(-128 * 64 * weight[:, 0].astype(np.int32))).all())
    rank = int(call[4])
    held = PackedWeight("probe", weight.reshape(16, 64, *[1] * rank), Encoding(IntFormat(8), _ONE, _ZERO))
    grid = Encoding(IntFormat(8, signed=False), _ONE, _ZERO)
    same = {"stride": [1] * rank, "padding": [0] * rank, "dilation": [1] * rank, "groups": 1}
    try:
        found = Int8Convolution(Parts(call, held, None, grid, same, torch.float32))(
            torch.full((1, 64, *[4] * rank), 255.0)
        )
    except (RuntimeError, AttributeError):  # this torch has no such kernel, or not for this CPU
        return False
    first = found.reshape(16, -1)[:, 0]
    return bool((first == torch.from_numpy(255 * 64 * weight[:, 0].astype(np.float32))).all())


def choose(parts: Parts) -> tuple[type[PackedLayer], str]:
    """The layer for ``parts``, and the reason where it has no kernel, else ""."""
    weight, grid = parts.weight, None if parts.grid is None else Grid(parts.grid)
    reason = _reason(weight, parts, grid)
    if reason:
        return DequantizedLayer, reason
    if parts.call != "linear":
        return Int8Convolution, ""
    if grid is None:
        return (Int4WeightLinear if weight.format.bits <= 4 else Int8WeightLinear), ""
    return (Fp8Linear if grid.fp8 else Int8Linear), ""


def _reason(weight: PackedWeight, parts: Parts, grid: Grid | None) -> str:
    """The reason why no kernel computes a layer; "" where one does."""
    fmt = weight.format
    if not isinstance(fmt, IntFormat):
        return _fp8_reason(weight, parts, grid)
    if grid is None:
        return _weight_only_reason(weight, parts)
    if fmt.bits > 8 or not grid.integers:
        return (
            f"torch has no kernel for {parts.call} of {fmt.name} with inputs {grid.encoding.format.name}, {_how(grid)}"
        )
    if signed(weight)[1].any():
        return "the weight has zero points, and torch's kernels of int8 take none"
    if parts.call != "linear" and (grid.encoding.dynamic or grid.encoding.granularity != PerTensor()):
        return "torch's int8 convolutions take one calibrated scale for the input"
    if not exact_products(parts.call):
        return "torch's int8 kernel saturates on this CPU"
    return _group_reason(weight)


def _fp8_reason(weight: PackedWeight, parts: Parts, grid: Grid | None) -> str:
    """The reason why no kernel computes a layer of a float format."""
    if weight.format != _FP8 or grid is None or not grid.fp8 or parts.call != "linear":
        inputs = "float inputs" if grid is None else f"inputs of {grid.encoding.format.name}"
        return f"torch has no kernel for {parts.call} of {weight.format.name} with {inputs}"
    return _group_reason(weight) or _slow_fp8()


def _slow_fp8() -> str:
    """``torch._scaled_mm`` took five times as long as converting the weight where the CPU has no instructions for it."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return "" if capabilities.get("amx_fp16") else "torch's fp8 kernel is slower than float on CPUs without AMX"


def _how(grid: Grid) -> str:
    return "ranges at run time" if grid.encoding.dynamic else type(grid.encoding.granularity).__name__


def _group_reason(weight: PackedWeight) -> str:
    found = weight.granularity
    whole = isinstance(found, PerTensor) or (isinstance(found, PerChannel) and found.axis in (0, -len(weight.shape)))
    return "" if whole else f"torch has no kernel for such inputs with weights {weight.layout}"


def _weight_only_reason(weight: PackedWeight, parts: Parts) -> str:
    """The reason why a weight-only layer is dequantized."""
    bits = weight.format.bits
    if parts.call != "linear":
        return "torch has no convolution of codes with float inputs"
    if bits > 8:
        return f"torch has no kernel for {weight.format.name}"
    outputs, inputs = weight.shape
    if outputs % 16 or inputs % 16:
        return f"torch's kernels take multiples of 16 inputs and outputs, not {inputs} and {outputs}"
    if bits > 4 and (_group_reason(weight) or weight.encoding.shift is not None or signed(weight)[1].any()):
        return f"torch has no kernel for {weight.layout}"
    if bits <= 4 and not int4_group(weight):
        return f"torch's int4 kernel takes groups of 32, 64, 128 or 256, not {weight.layout} of {inputs}"
    if parts.dtype not in _HALF:
        return "torch's kernel is slower than float for float32 inputs: pack with dtype=torch.bfloat16 for it"
    return ""


def layer_of(parts: Parts) -> tuple[PackedLayer, str]:
    """The layer, and the reason where it has no kernel."""
    kind, reason = choose(parts)
    return kind(parts), reason
