"""Layers that hold codes instead of float weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.numerics.formats import IntFormat
from bitwright.llm.checkpoint import assign
from bitwright.llm.packed import PackedWeight, Weight, halves, unhalved


class CodedLinear(nn.Module):
    """A linear layer that holds the codes of its weight, two in a byte where they have four bits or less.

    Args:
        weight: codes, rows are outputs.
        bias: of the layer.
        dtype: of the weights that it multiplies with, and of the layer before.
    """

    codes: Tensor

    def __init__(self, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        fmt = weight.format
        self.name, self.encoding, self.dtype = weight.name, weight.encoding, dtype
        self.out_features, self.in_features = weight.shape
        self.halved = isinstance(fmt, IntFormat) and fmt.bits <= 4 and self.in_features % 2 == 0
        self.register_buffer("codes", torch.from_numpy(halves(weight.codes) if self.halved else weight.codes))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def packed(self) -> PackedWeight:
        """Codes, one each, and encoding."""
        codes = self.codes.numpy()
        return PackedWeight(self.name, unhalved(codes, self.encoding.format) if self.halved else codes, self.encoding)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, ``[O, I]``, computed at each access."""
        return torch.from_numpy(self.packed().dequantize()).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., I]`` to ``[..., O]``."""
        return F.linear(x, self.weight.to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        """Sizes and format."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.encoding.format.name}"


def with_codes(model: nn.Module, weights: Iterable[Weight], *, in_place: bool) -> nn.Module:
    """A model with quantized weights: linear layers hold codes, other parameters dequantized values.

    Args:
        model: with its float weights, or on the ``meta`` device.
        weights: every parameter, one at a time.
        in_place: change ``model``, so that each float weight is freed as its codes are made.
    """
    if not in_place:
        model = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # replaced below, none is changed
    for weight in weights:
        _take(model, weight)
    return model


def _take(model: nn.Module, weight: Weight) -> None:
    """Store one weight in all its places, as codes where a linear layer owns it alone."""
    path, _, last = weight.name.rpartition(".")
    owner = model.get_submodule(path)
    old = owner.get_parameter(last)
    device = torch.device("cpu") if old.is_meta else old.device
    if not isinstance(weight, PackedWeight):
        if old.is_meta or weight.values.data_ptr() != old.data_ptr():
            _put(model, old, weight.values.to(old.dtype))
    elif type(owner) is nn.Linear and last == "weight" and len(_homes(model, old)) == 1:
        parent, _, name = path.rpartition(".")
        coded = CodedLinear(weight, owner.bias, old.dtype)
        setattr(model.get_submodule(parent), name, coded if old.is_meta else coded.to(device))
    else:
        _put(model, old, torch.from_numpy(weight.dequantize()).to(device, old.dtype))


def _homes(model: nn.Module, parameter: Tensor) -> list[str]:
    return [name for name, held in model.named_parameters(remove_duplicate=False) if held is parameter]


def _put(model: nn.Module, old: Tensor, values: Tensor) -> None:
    """Put values in every place of a parameter."""
    for name in _homes(model, old):
        assign(model, name, values)
