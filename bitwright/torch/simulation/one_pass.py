"""A call and the quantizer of its result in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from bitwright.torch.calls.functions import Function
from bitwright.torch.quantizers.fake_quantize import Grid, clamp_on_grid, sum_on_grid


def writes(row: Function, kwargs: dict[str, Any]) -> bool:
    """Whether the call overwrites its first argument."""
    return row.in_place or bool(kwargs.get("inplace"))


def joined(row: Function, bound: Mapping[str, Any], grid: Grid, in_place: bool) -> torch.Tensor | None:
    """An activation or a sum with the grid of its result; ``None`` where they are two calls."""
    x = bound["input"]
    if row.type == "Add":
        plain = bound.keys() == {"input", "other"} and isinstance(bound["other"], torch.Tensor)
        return sum_on_grid(x, bound["other"], grid, in_place=in_place) if plain else None
    ends = clamped_ends(row, bound)
    if ends is None:
        return None
    return clamp_on_grid(x, grid, ends, in_place=in_place or bool(bound.get("inplace")))


#: activations whose gradient is that of ``hardtanh``; that of ``clamp`` passes at the ends
_CLAMPS = ("relu", "relu_", "relu6", "hardtanh", "hardtanh_")


def clamped_ends(row: Function, bound: Mapping[str, Any]) -> tuple[float, float] | None:
    """The ends of an activation that clamps its input."""
    if row.label not in _CLAMPS or not bound.keys() <= {"input", "inplace", "min_val", "max_val"}:
        return None
    attrs = {"min": 0.0, "max": math.inf} if row.attrs is None else row.attrs(bound)
    low, high = attrs["min"], attrs["max"]
    return (low, high) if low is not None and high is not None and low <= high else None
