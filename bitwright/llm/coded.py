"""Layers that hold codes instead of float weights, and whose inputs get gradients.

A layer dequantizes its weight in every call, some rows at a time, and once more for the gradient of its input: nothing of the
weight is kept in float, so that adapters beside such layers train in little more memory than the codes take (QLoRA; Dettmers et
al. 2023, arXiv:2305.14314).
"""

from __future__ import annotations

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.numerics.affine import split_zero_point
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FloatFormat, IntFormat
from bitwright.core.numerics.granularity import PerBlock
from bitwright.llm.checkpoint import assign
from bitwright.llm.packed import FloatWeight, PackedWeight, Weight, float_values, halves, stored_buffers, unhalved

_TORCH_FLOATS = {
    "float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "float16": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip
_AT_ONCE = 1 << 19  # numbers of a weight that are dequantized at once: 2 MiB


class StoredWeight(nn.Module):
    """Stores the codes of a weight, two in a byte for four bits or less; a call dequantizes them.

    Scales are held in the half type that they are numbers of, zero points in a byte where they are whole numbers.

    Args:
        weight: codes and encoding.
        dtype: of the dequantized weight.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    numbers: Tensor | None

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        fmt, encoding = weight.format, weight.encoding
        self.shape, self.dtype = weight.shape, dtype
        self.format, self.granularity = fmt, encoding.granularity
        self._scale_format, self._common, self._free = (
            encoding.scale_format,
            encoding.common,
            encoding.shift is not None,
        )
        rows = weight.codes.reshape(len(weight.codes), -1) if weight.shape else weight.codes.reshape(1, -1)
        self.halved = fmt.bits <= 4 and rows.shape[1] % 2 == 0
        self.shift = 8 if self.halved and isinstance(fmt, IntFormat) and fmt.signed else 0
        self.kind = _TORCH_FLOATS.get(fmt.name)
        self.view = self.granularity.view_shape(weight.shape)
        codes = torch.from_numpy(halves(rows) if self.halved else rows.copy())
        self.register_buffer("codes", codes if self.kind is None else codes.view(self.kind))
        scale = torch.from_numpy(np.array(self.granularity.spread(weight.scale, weight.shape), np.float32))
        number = encoding.scale_format.number if encoding.common is None else None
        kind = None if number is None else torch.bfloat16 if number.name == "bfloat16" else torch.float16
        self.register_buffer("scale", scale if kind is None else scale.to(kind))
        self.register_buffer("zero", _smallest(np.asarray(encoding.zero, np.float32) + self.shift, self._spread))
        numbers = None
        if isinstance(fmt, FloatFormat) and self.kind is None:
            numbers = float_values(np.arange(1 << fmt.bits), fmt)
        self.register_buffer("numbers", None if numbers is None else torch.from_numpy(numbers))

    def _spread(self, values: Any) -> Any:
        return self.granularity.spread(values, self.shape)

    def forward(self) -> Tensor:
        """The weight."""
        return self._values(self.codes, self.zero, self.scale, self.view).reshape(self.shape)

    def rows(self, index: Tensor | slice) -> Tensor:
        """The rows ``index`` of a table, ``[...]`` to ``[..., D]``; scales run along rows."""
        codes = self.codes[index]
        lead = codes.shape[:-1]
        scale, zero = (None if p is None else p[index] if self._is_per_row(p) else p for p in (self.scale, self.zero))
        assert scale is not None
        return self._values(codes, zero, scale, (*lead, *self.view[1:])).reshape(*lead, *self.shape[1:])

    def _is_per_row(self, parameter: Tensor) -> bool:
        return parameter.dim() > 0 and parameter.shape[0] == self.shape[0]

    def parts(self) -> list[slice]:
        """Slices of rows of which each is dequantized at once; one where blocks lie along the rows."""
        whole = len(self.view) > len(self.shape) and self.view[0] != self.shape[0]
        step = self.shape[0] if whole else max(1, _AT_ONCE // max(1, math.prod(self.shape[1:])))
        return [slice(start, start + step) for start in range(0, self.shape[0], step)]

    def _values(self, codes: Tensor, zero: Tensor | None, scale: Tensor, view: tuple[int, ...]) -> Tensor:
        if self.halved:
            codes = torch.stack((codes & 15, codes >> 4), -1)
        values = codes.float() if self.numbers is None else self.numbers[codes.int()]
        values = values.reshape(view)
        values = values if zero is None else values - zero.float()
        return (values * scale.float()).to(self.dtype)

    def packed(self, name: str = "weight") -> PackedWeight:
        """Codes, one each, and encoding."""
        raw = (
            self.codes if self.kind is None else self.codes.view(torch.uint8 if self.format.bits == 8 else torch.uint16)
        )
        codes = raw.cpu().numpy()
        codes = unhalved(codes, self.format) if self.halved else codes
        scale = self._of_param_shape(self.scale)
        zero = np.zeros(scale.shape) if self.zero is None else self._of_param_shape(self.zero) - self.shift
        zero_point, shift = zero.astype(np.int64), None
        if self._free:
            assert isinstance(self.format, IntFormat)
            zero_point, shift = split_zero_point(zero, self.format)
        encoding = Encoding(
            self.format, scale, zero_point, self.granularity, self._scale_format, self._common, shift=shift
        )
        return PackedWeight(name, codes.reshape(self.shape), encoding)

    def _of_param_shape(self, parameter: Tensor) -> np.ndarray:
        shape = self.granularity.param_shape(self.shape)
        values = parameter.float().cpu().numpy()
        if values.ndim == 0:
            return np.broadcast_to(values, shape)
        held = self.granularity
        if isinstance(held, PerBlock) and held.axis is not None and held.padding(self.shape):
            axis = held.axis % len(self.shape)
            values = values[(*(slice(None),) * axis, slice(None, None, held.size))]
        return values.reshape(shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredWeight:
        """Codes, scales and zero points move with the model and keep their types, on which the values depend."""
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def extra_repr(self) -> str:
        """Shape and format."""
        return f"{tuple(self.shape)}, {self.format.name}"


def _smallest(zero: np.ndarray, spread: Callable[[Any], Any]) -> Tensor | None:
    """Zero points in the smallest form: none where all are 0, one number where all are the same, bytes where they are whole."""
    if not zero.any():
        return None
    if (zero == zero.flat[0]).all():
        return torch.tensor(float(zero.flat[0]))
    fits = bool((zero == np.rint(zero)).all()) and 0 <= zero.min() and zero.max() <= 255
    return torch.from_numpy(np.array(spread(zero), np.uint8 if fits else np.float32))


class _Linear(torch.autograd.Function):
    """``x W^T + b`` that keeps no float weight for the gradient of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, stored: StoredWeight) -> Tensor:
        ctx.stored, ctx.dtype = stored, x.dtype
        return _product(x, bias, stored)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1])
        into = None
        if ctx.needs_input_grad[0]:
            into = rows.new_zeros(len(rows), ctx.stored.shape[1])
            for part in ctx.stored.parts():
                into.addmm_(rows[:, part], ctx.stored.rows(part).to(rows.dtype))
            into = into.reshape(*grad.shape[:-1], -1).to(ctx.dtype)
        return into, rows.sum(0) if ctx.needs_input_grad[1] else None, None


def _product(x: Tensor, bias: Tensor | None, stored: StoredWeight) -> Tensor:
    parts = [] if torch.compiler.is_compiling() else stored.parts()
    if len(parts) < 2:
        return F.linear(x, stored().to(x.dtype), bias)
    made = None
    for part in parts:
        found = F.linear(x, stored.rows(part).to(x.dtype), None if bias is None else bias[part])
        made = found.new_empty(*x.shape[:-1], stored.shape[0]) if made is None else made
        made[..., part] = found
    assert made is not None
    return made


def linear(x: Tensor, bias: Tensor | None, stored: StoredWeight) -> Tensor:
    """``[..., I]`` to ``[..., O]`` by a weight ``[O, I]``, some rows of which are in float at a time."""
    bias = None if bias is None else bias.to(x.dtype)
    if torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling():
        made: Tensor = _Linear.apply(x, bias, stored)
        return made
    return _product(x, bias, stored)


class CodedLinear(nn.Module):
    """A linear layer that holds the codes of its weight.

    Args:
        stored: the weight, ``[O, I]``.
        bias: of the layer.
    """

    def __init__(self, stored: StoredWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.stored = stored
        self.out_features, self.in_features = stored.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, ``[O, I]``, computed at each access."""
        return self.stored()

    def forward(self, x: Tensor) -> Tensor:
        """``[..., I]`` to ``[..., O]``."""
        return linear(x, self.bias, self.stored)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class CodedEmbedding(nn.Module):
    """Gathers rows of a table of codes, and dequantizes only these.

    Args:
        stored: the table, ``[N, D]``.
    """

    kernel = "rows"

    def __init__(self, stored: StoredWeight) -> None:
        super().__init__()
        self.stored = stored
        self.num_embeddings, self.embedding_dim = stored.shape

    @property
    def weight(self) -> Tensor:
        """The dequantized table, computed at each access."""
        return self.stored()

    def forward(self, rows: Tensor) -> Tensor:
        """``[...]`` indices to ``[..., D]`` numbers."""
        return self.stored.rows(rows)


def with_codes(model: nn.Module, weights: Iterable[Weight], *, in_place: bool) -> nn.Module:
    """A model with quantized weights: linear layers and tables hold codes, other parameters dequantized values.

    Args:
        model: with its float weights, or on the ``meta`` device.
        weights: every parameter, and any buffers, one at a time.
        in_place: change ``model``, so that each float weight is freed as its codes are made.
    """
    if not in_place:
        model = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # replaced below, none is changed
    homes: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        homes[id(parameter)].append(name)
    buffers = {name: buffer.dtype for name, buffer in stored_buffers(model)}
    for weight in weights:
        if weight.name in buffers and isinstance(weight, FloatWeight):
            assign(model, weight.name, weight.values.to(buffers[weight.name]))
        else:
            _take(model, weight, homes)
    return model


def _take(model: nn.Module, weight: Weight, homes: Mapping[int, list[str]]) -> None:
    """Store one weight in all its places, as codes where linear layers and tables alone hold it."""
    old = model.get_parameter(weight.name)
    device = torch.device("cpu") if old.is_meta else old.device
    names = homes[id(old)]
    if not isinstance(weight, PackedWeight):
        if old.is_meta or weight.values.data_ptr() != old.data_ptr():
            _put(model, names, weight.values.to(old.dtype))
        return
    layers = [_coded(model, name) for name in names]
    if not all(layers):
        _put(model, names, torch.from_numpy(weight.dequantize()).to(device, old.dtype))
        return
    stored = StoredWeight(weight, old.dtype).to(device)
    for name, make in zip(names, layers, strict=True):
        assert make is not None
        path = name.rpartition(".")[0]
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, make(stored))


def _coded(model: nn.Module, name: str) -> Callable[[StoredWeight], nn.Module] | None:
    """How the layer that holds a weight is made of codes; ``None`` where it cannot be."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    if not path or last != "weight":
        return None
    if type(owner) is nn.Linear:
        return functools.partial(CodedLinear, bias=owner.bias)
    if type(owner) is nn.Embedding and owner.max_norm is None:
        return CodedEmbedding
    return None


def _put(model: nn.Module, names: Iterable[str], values: Tensor) -> None:
    """Put values in every place of a parameter."""
    for name in names:
        assign(model, name, values)
