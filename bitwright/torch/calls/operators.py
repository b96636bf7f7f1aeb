"""Operators that are called by their overload (``torch.ops.aten.linear.default``), as programs of ``torch.export`` do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bitwright.torch.calls.decompose import DECOMPOSITIONS
from bitwright.torch.calls.functions import FUNCTIONS

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

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
_SPACES = (torch, torch._C._nn, torch.Tensor)


def as_function(func: torch._ops.OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call of an aten operator as the torch function of the same meaning; as it is where there is none in the tables."""
    name = func._schema.name.removeprefix("aten::")
    if name in _REORDERED:
        function, wanted, names = _REORDERED[name]
        order = [names.get(a.name, a.name) for a in func._schema.arguments]
        bound = {**dict(zip(order, args, strict=False)), **{names.get(k, k): v for k, v in kwargs.items()}}
        return function, (), {key: bound[key] for key in wanted if key in bound}
    known = _function(name) if func.namespace == "aten" else None
    return (func, args, kwargs) if known is None else (known, args, kwargs)


@functools.cache
def _function(name: str) -> Callable[..., Any] | None:
    found = (getattr(space, name, None) for space in _SPACES)
    return next((f for f in found if f is not None and (f in FUNCTIONS or f in DECOMPOSITIONS)), None)
