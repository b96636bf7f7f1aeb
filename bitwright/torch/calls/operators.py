"""Operators that are called by their overload (``torch.ops.aten.linear.default``), as programs of ``torch.export`` do.

After ``run_decompositions()`` these are core operators (``aten.convolution``, ``aten.native_layer_norm``): each is carried out
as the function it stands for, so that it is one place with the operands and attributes of that function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bitwright.torch.calls.decompose import DECOMPOSITIONS
from bitwright.torch.calls.functions import FUNCTIONS

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

#: functions that ``torch.compile`` writes into its graph without showing them to function modes, and what it shows
_HIDDEN: dict[Any, tuple[str, str]] = {
    function.__code__: (f"torch.nn.functional.{function.__name__}", instead)
    for function, instead in (
        (F.hardswish, "torch.nn.Hardswish()"),
        (F.hardsigmoid, "torch.nn.Hardsigmoid()"),
        (F.sigmoid, "torch.sigmoid"),
        (F.tanh, "torch.tanh"),
        (F.upsample, "torch.nn.functional.interpolate"),
    )
}
#: modules whose forward is one of them: the operator that a compiler shows, and the one that writes in place
ONE_HIDDEN_CALL: dict[type, tuple[Any, Any]] = {
    nn.Hardswish: (torch.ops.aten.hardswish.default, torch.ops.aten.hardswish_.default),
    nn.Hardsigmoid: (torch.ops.aten.hardsigmoid.default, torch.ops.aten.hardsigmoid_.default),
}
#: what they do, as functions of the table
SHOWN: dict[Any, Callable[..., Any]] = {
    operator: getattr(torch._C._nn, operator._schema.name.removeprefix("aten::"))
    for operators in ONE_HIDDEN_CALL.values()
    for operator in operators
}


#: what these functions call first, by the label of its row
_FIRST_CALLS = frozenset(("hardswish", "hardsigmoid", "sigmoid", "tanh", "interpolate", "upsample"))


def hidden_call(label: str, depth: int = 8) -> tuple[str, str] | None:
    """Name of the function that the call in hand is made by, if a compiler would hide it, and what to write instead.

    Args:
        label: of the call's row in the table of functions.
        depth: frames to look at.
    """
    if label not in _FIRST_CALLS:
        return None
    frame = sys._getframe(1)
    for _ in range(depth):
        if frame.f_code in _HIDDEN:
            return _HIDDEN[frame.f_code]
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


# operators whose arguments stand in another order than those of the function, or that have more of them
_REORDERED: dict[str, tuple[Callable[..., Any], tuple[str, ...], dict[str, str]]] = {
    "batch_norm": (F.batch_norm, ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"), {}),
    "instance_norm": (
        F.instance_norm,
        ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
        {},
    ),
    "layer_norm": (F.layer_norm, ("input", "normalized_shape", "weight", "bias", "eps"), {}),
    "group_norm": (F.group_norm, ("input", "num_groups", "weight", "bias", "eps"), {}),
    "embedding": (F.embedding, ("input", "weight", "padding_idx"), {"indices": "input"}),
}  # fmt: skip
_BATCH_NORM = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
_SOFTMAX = ("input", "dim", "half_to_float")

#: core operator -> names of its arguments, and the call they stand for
_CORE: dict[str, tuple[tuple[str, ...], Callable[..., tuple[Callable[..., Any], dict[str, Any]]]]] = {
    "convolution": (
        ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups"),
        lambda **kept: _convolution(**kept),
    ),
    "_native_batch_norm_legit_no_training": (_BATCH_NORM, lambda **kept: (F.batch_norm, {**kept, "training": False})),
    "native_layer_norm": (
        ("input", "normalized_shape", "weight", "bias", "eps"),
        lambda **kept: (F.layer_norm, kept),
    ),
    "native_group_norm": (
        ("input", "weight", "bias", "N", "C", "HxW", "num_groups", "eps"),
        lambda N, C, HxW, **kept: (F.group_norm, kept),
    ),
    "_softmax": (_SOFTMAX, lambda **kept: (F.softmax, _widened(**kept))),
    "_log_softmax": (_SOFTMAX, lambda **kept: (F.log_softmax, _widened(**kept))),
}  # fmt: skip
#: core operators of the same arguments under another name
_ALIASES = {
    "_unsafe_view": "view",
    "_adaptive_avg_pool2d": "adaptive_avg_pool2d",
    "_adaptive_avg_pool3d": "adaptive_avg_pool3d",
    "max_pool2d_with_indices": "max_pool2d",
    "max_pool3d_with_indices": "max_pool3d",
}
#: operators with results after that of the function: statistics for a backward pass, indices
_SEVERAL = {
    "_native_batch_norm_legit_no_training",
    "native_layer_norm",
    "native_group_norm",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
}
_SPACES = (torch, torch._C._nn, torch.Tensor)


def as_function(func: torch._ops.OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call of an aten operator as the torch function of the same meaning; as it is where there is none in the tables."""
    name = func._schema.name.removeprefix("aten::")
    if name in _REORDERED:
        function, wanted, names = _REORDERED[name]
        order = [names.get(a.name, a.name) for a in func._schema.arguments]
        bound = {**dict(zip(order, args, strict=False)), **{names.get(k, k): v for k, v in kwargs.items()}}
        return function, (), {key: bound[key] for key in wanted if key in bound}
    if func.namespace == "aten" and name in _CORE:
        arguments, translate = _CORE[name]
        function, found = translate(**dict(zip(arguments, args, strict=False)), **kwargs)
        return function, (), found
    known = _function(_ALIASES.get(name, name)) if func.namespace == "aten" else None
    return (func, args, kwargs) if known is None else (known, args, kwargs)


def results(func: torch._ops.OpOverload[..., Any], output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operator returns, where the function that was carried out in its place returned ``output``."""
    if func._schema.name.removeprefix("aten::") not in _SEVERAL:
        return output
    return (output, *func(*args, **kwargs)[1:])


def _convolution(
    weight: torch.Tensor, transposed: bool, output_padding: Any, **kept: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    dims = weight.dim() - 2
    if transposed:
        function = getattr(F, f"conv_transpose{dims}d")
        return function, {"weight": weight, "output_padding": tuple(output_padding), **kept}
    return getattr(F, f"conv{dims}d"), {"weight": weight, **kept}


def _widened(half_to_float: bool, **kept: Any) -> dict[str, Any]:
    return {**kept, "dtype": torch.float32} if half_to_float else kept


@functools.cache
def _function(name: str) -> Callable[..., Any] | None:
    found = (getattr(space, name, None) for space in _SPACES)
    return next((f for f in found if f is not None and (f in FUNCTIONS or f in DECOMPOSITIONS)), None)
