"""Modules in place of one whose weight was written as factors: layers in a row, of the classes that they had.

A chain is an ``nn.Sequential``; a recurrent module reads what a linear layer in front of it makes. Both are built from
:func:`chain_plan`, plain data, so that a state dict and the plan rebuild a compressed model from its original class.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from bitwright.core.graph.operators import ROTATION
from bitwright.core.simulation.float_model import Array, Before, Chain
from bitwright.errors import ConfigError

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: times the parameters of a module, those of the layers in its place; factors of full rank have about twice as many
_MOST_GROWTH = 16


class Rotation(nn.Module):
    """A product by a square matrix, which is a buffer: nothing trains it.

    Args:
        size: channels, the last axis.
    """

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__()
        self.weight: torch.Tensor
        self.register_buffer("weight", torch.eye(size, **options))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., size] -> [..., size]``."""
        return nn.functional.linear(x, self.weight)


class ReducedInput(nn.Module):
    """A recurrent module behind a linear layer: its input matrices, written as factors.

    Args:
        reduce: the linear layer, ``[..., inputs] -> [..., rank]``.
        layer: ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` of ``rank`` inputs.
    """

    def __init__(self, reduce: nn.Linear, layer: nn.RNNBase) -> None:
        super().__init__()
        self.reduce, self.layer = reduce, layer
        self.input_size, self.hidden_size, self.num_layers = reduce.in_features, layer.hidden_size, layer.num_layers
        self.batch_first, self.bidirectional, self.proj_size = layer.batch_first, layer.bidirectional, layer.proj_size

    def forward(self, x: torch.Tensor | PackedSequence, *state: Any, **named: Any) -> Any:
        """As of the module that it replaces."""
        if isinstance(x, PackedSequence):
            return self.layer(PackedSequence(self.reduce(x.data), *x[1:]), *state, **named)
        return self.layer(self.reduce(x), *state, **named)

    def flatten_parameters(self) -> None:
        """As of the module that it replaces."""
        self.layer.flatten_parameters()


def no_chain(module: nn.Module, path: str, op: str) -> str | None:
    """The reason why a module cannot be replaced by a chain; ``None`` where it can.

    Args:
        module: that makes the call.
        path: of the module.
        op: name of the call.
    """
    kind = type(module).__name__
    if isinstance(module, nn.RNNBase):
        if type(module).forward not in (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward):
            return f"{kind} has a forward of its own"
        return None if ".l0." in op[len(path) :] or op == path else "it is an inner layer of a module of several layers"
    if kind == "Conv1D" and hasattr(module, "nf"):  # of transformers: a linear layer with its weight [inputs, outputs]
        return None
    base = _base(module)
    if base is None or type(module).forward is not base.forward:
        return f"{kind} is no convolution or linear layer of torch.nn, so its forward may do more than one product"
    if nn.utils.parametrize.is_parametrized(module):
        return "its weight has a parametrization"
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "weight_g"):
        return "it has hooks, which may read its weight"
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return f"it pads by {module.padding_mode}"
    return None


def chain_plan(module: nn.Module, chain: Chain) -> list[dict[str, Any]]:
    """The layers that :func:`chain_from_plan` builds, as plain data: class and arguments of each."""
    rows = [_row_before(part) for part in chain.before]
    rows.append(_last_row(module, chain))
    return [{k: int(v) if isinstance(v, np.integer) else v for k, v in row.items()} for row in rows]


def _row_before(part: Before) -> dict[str, Any]:
    if part.rotates:
        return {"class": "Rotation", "in": part.weight.shape[0], "out": part.weight.shape[1]}
    if part.type == "MatMul":
        return {"class": "Linear", "in": part.weight.shape[0], "out": part.weight.shape[1], "bias": False}
    return _conv_row(f"Conv{part.weight.ndim - 2}d", part.weight.shape, part.attrs, False)


def _last_row(module: nn.Module, chain: Chain) -> dict[str, Any]:
    bias, shape, base = getattr(module, "bias", None) is not None, chain.weight.shape, _base(module)
    if isinstance(module, nn.RNNBase):
        return {"class": type(module).__name__, "in": shape[-1], "recurrent": True}
    if base is None or base is nn.Linear:
        first, last = shape if base is None else (shape[1], shape[0])
        return {"class": "Linear", "in": first, "out": last, "bias": bias}
    if isinstance(module, _TRANSPOSED):
        return {
            "class": base.__name__, "in": shape[0], "out": shape[1], "kernel": list(module.kernel_size),
            "stride": list(module.stride), "padding": list(module.padding), "dilation": list(module.dilation),
            "output_padding": list(module.output_padding), "bias": bias,
        }  # fmt: skip
    assert isinstance(module, _CONVS)
    own = {"strides": module.stride, "dilations": module.dilation, "pads": module.padding}
    return _conv_row(base.__name__, shape, chain.attrs or own, bias)


def _base(module: nn.Module) -> type[nn.Module] | None:
    """The class of torch.nn that a convolution or linear layer is of."""
    return next((cls for cls in (*_CONVS, *_TRANSPOSED, nn.Linear) if isinstance(module, cls)), None)


def _conv_row(kind: str, shape: Sequence[int], attrs: Mapping[str, Any], bias: bool) -> dict[str, Any]:
    n = len(shape) - 2
    pads = attrs.get("pads", (0,) * n)
    padding: Any = pads if isinstance(pads, str) else list(pads[:n])
    if not isinstance(pads, str) and len(pads) == 2 * n and tuple(pads[:n]) != tuple(pads[n:]):
        padding = "same"  # torch pads an even kernel unevenly under this name only
    return {
        "class": kind, "in": int(shape[1]), "out": int(shape[0]), "kernel": list(shape[2:]),
        "stride": list(attrs.get("strides", (1,) * n)), "padding": padding,
        "dilation": list(attrs.get("dilations", (1,) * n)), "bias": bias,
    }  # fmt: skip


def chain_from_plan(
    module: nn.Module, rows: Sequence[Mapping[str, Any]], device: str | torch.device | None = None
) -> nn.Module:
    """The layers of :func:`chain_plan` in place of ``module``, of its dtype and on its device; values are not set."""
    like = next(p for p in module.parameters() if p.is_floating_point())
    options: dict[str, Any] = {"device": device or like.device, "dtype": like.dtype}
    if isinstance(module, nn.RNNBase):
        reduce, last = rows
        made: nn.Module = ReducedInput(_layer_of(reduce, options), _recurrent_like(module, last["in"], options))
    else:
        names = [ROTATION if row["class"] == "Rotation" else str(i) for i, row in enumerate(rows)]
        made = nn.Sequential(OrderedDict(zip(names, (_layer_of(row, options) for row in rows), strict=True)))
    return made.train(module.training)


def _layer_of(row: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The linear layer or convolution of a row of :func:`chain_plan`."""
    if row["class"] == "Rotation":
        return Rotation(row["in"], **options)
    if row["class"] == "Linear":
        return nn.Linear(row["in"], row["out"], bias=row["bias"], **options)
    rest = {"output_padding": row["output_padding"]} if "output_padding" in row else {}
    classes: dict[str, Any] = {cls.__name__: cls for cls in (*_CONVS, *_TRANSPOSED)}
    return classes[row["class"]](
        row["in"],
        row["out"],
        tuple(row["kernel"]),
        tuple(row["stride"]),
        row["padding"] if isinstance(row["padding"], str) else tuple(row["padding"]),
        dilation=tuple(row["dilation"]),
        bias=row["bias"],
        **rest,
        **options,
    )


def _recurrent_like(module: nn.RNNBase, inputs: int, options: Mapping[str, Any]) -> Any:
    """A recurrent module that differs from ``module`` in the number of its inputs."""
    named: dict[str, Any] = {"nonlinearity": module.nonlinearity} if isinstance(module, nn.RNN) else {}
    if isinstance(module, nn.LSTM):
        named["proj_size"] = module.proj_size
    cls: type[Any] = type(module)  # RNNBase itself has another first argument
    return cls(
        inputs,
        module.hidden_size,
        module.num_layers,
        bias=module.bias,
        batch_first=module.batch_first,
        dropout=module.dropout,
        bidirectional=module.bidirectional,
        **named,
        **options,
    )


def rebuild_chain(model: nn.Module, step: Mapping[str, Any]) -> None:
    """Give a module of the original class the layers of a step of a plan; values are not set.

    Raises:
        ConfigError: the plan is of another model: it has no such module, or one of another kind or width.
    """
    path, rows = str(step.get("module")), step.get("layers", [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) and type(row.get("in")) is int for row in rows):
        raise ConfigError(path, "the plan does not say its layers", "give the plan as it was written")
    found = dict(model.named_modules()).get(path)
    remedy = "rebuild the original class, with the arguments of the model that was compressed"
    if found is None or not path:
        raise ConfigError(path, "the plan replaces it, and the model has no such module", remedy)
    width = getattr(found, "in_features", getattr(found, "in_channels", getattr(found, "input_size", None)))
    first, last = (rows[0], rows[-1]) if rows else ({}, {})
    same_kind = rows and bool(last.get("recurrent")) == isinstance(found, nn.RNNBase)
    if not same_kind or width not in (None, first["in"]) or next(found.parameters(), None) is None:
        replaced = f"{last.get('class', 'layer')} of {first.get('in', 0)} inputs"
        raise ConfigError(path, f"the plan replaces a {replaced}, and it is {found}"[:300], remedy)
    problem = _no_layers(found, rows)
    if problem:
        raise ConfigError(path, problem, remedy)
    made = chain_from_plan(found, rows)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is found:
                parent._modules[name] = made


def _no_layers(module: nn.Module, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Why rows of a plan do not make layers for the place of a module, without memory for them; ``None`` where they do."""
    try:
        size = sum(p.numel() for p in chain_from_plan(module, rows, device="meta").parameters())
    except (KeyError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        return f"no layer can be made of the plan: {type(error).__name__}: {error}"
    if size > _MOST_GROWTH * sum(p.numel() for p in module.parameters()):
        return f"the plan gives it {size} parameters, many more than the module has that it replaces"
    return None


def chain_of_modules(module: nn.Module, chain: Chain) -> nn.Module:
    """The layers of a chain with their values, in place of ``module``; parameters train where those of it do."""
    made = chain_from_plan(module, chain_plan(module, chain))
    layers: list[Any] = [made.reduce, made.layer] if isinstance(made, ReducedInput) else list(made.children())
    *before, last = layers
    with torch.no_grad():
        for layer, part in zip(before, chain.before, strict=True):
            layer.weight.copy_(_tensor(part.weight.T if part.type == "MatMul" else part.weight))
        if isinstance(last, nn.RNNBase):
            values: dict[str, torch.Tensor] = dict(module.named_parameters())
            values |= zip(("weight_ih_l0", "weight_ih_l0_reverse"), map(_tensor, chain.weight), strict=False)
            for name, parameter in last.named_parameters():
                parameter.copy_(values[name])
        else:
            turned = isinstance(last, nn.Linear) and not isinstance(module, nn.Linear)
            last.weight.copy_(_tensor(chain.weight.T if turned else chain.weight))
            if last.bias is not None:
                last.bias.copy_(module.bias)
    return made.requires_grad_(any(p.requires_grad for p in module.parameters()))


def _tensor(values: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
