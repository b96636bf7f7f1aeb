"""Which quantizers stand at a call of the model, and a call with the quantizer of its result in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bitwright.core.graph.constant_channels import ChannelWatch, channels_within
from bitwright.core.graph.graph import Graph
from bitwright.core.numerics.granularity import PerTensor
from bitwright.core.numerics.statistics import MinMax
from bitwright.core.simulation.sites import Site
from bitwright.torch.calls.functions import Function
from bitwright.torch.quantizers.fake_quantize import Grid, clamp_on_grid, sum_on_grid
from bitwright.torch.quantizers.quantizer import Quantizer
from bitwright.torch.quantizers.sequences import Columns


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


@dataclass(frozen=True)
class Place:
    """A quantizer at a port (or output index) of a call; ``site`` is its name there, ``channels`` what it shows of them."""

    site: str
    at: int
    quantizer: Quantizer
    channels: ChannelWatch
    repeated: bool = False  # the place was called several times in a recorded forward

    def observe(self, x: torch.Tensor) -> None:
        """Add a tensor that passes to what calibration knows."""
        if not self.quantizer.frozen:
            self.quantizer.observe(x)
            self.channels.observe(x)

    @property
    def reads_bounds(self) -> bool:
        """Whether the bounds of its columns say of a matrix all that is observed."""
        quantizer, channels = self.quantizer, self.channels.place
        alone = quantizer.needs == "minmax" and isinstance(quantizer.spec.granularity, PerTensor)
        return alone and (channels is None or channels.axis == -1)

    def observe_columns(self, seen: Columns) -> None:
        """Add a matrix that passes, where :attr:`reads_bounds`."""
        none, count = np.zeros((), np.int64), np.array(seen.lo.size * seen.rows)
        lo, hi = (np.array(end, np.float64) for end in (seen.lo.min(), seen.hi.max()))
        self.quantizer.observe_statistics(MinMax(lo, hi, count, none, none, none))
        self.channels.add(channels_within(seen.lo, seen.hi))


@dataclass(frozen=True)
class CallPlan:
    """What to do at one place of the model; ``inside`` has the inner tensors of a recurrent layer, by their names."""

    op: str
    operands: tuple[Place, ...] = ()
    outputs: tuple[Place, ...] = ()
    inside: Mapping[str, Place] = field(default_factory=dict)

    def observe_steps(
        self, kept: Mapping[str, Sequence[torch.Tensor]], bounds: Mapping[str, Sequence[Columns]]
    ) -> None:
        """Add what was seen inside a recurrent layer, by name: tensors of its steps, or bounds of their columns."""
        for name, steps in kept.items():
            if steps:
                self.inside[name].observe(steps[0] if len(steps) == 1 else torch.cat(list(steps)))
        for name, columns in bounds.items():
            for seen in columns:
                self.inside[name].observe_columns(seen)


def call_plans(graph: Graph, sites: Mapping[str, Site]) -> dict[str, CallPlan]:
    """By operator: the quantizers of what it reads, of what it makes, and inside it."""
    by_op: dict[str, list[Site]] = {}
    for site in sites.values():
        by_op.setdefault(site.op, []).append(site)
    return {op: _call_plan(op, held, graph.op(op).calls > 1) for op, held in by_op.items()}


def _call_plan(op: str, sites: Sequence[Site], repeated: bool) -> CallPlan:
    outer = [site for site in sites if site.inner is None]
    return CallPlan(
        op,
        tuple(_place_of(site, repeated) for site in outer if site.role != "output"),
        tuple(_place_of(site, repeated) for site in outer if site.role == "output"),
        {site.inner: _place_of(site, False) for site in sites if site.inner is not None},
    )


def _place_of(site: Site, repeated: bool) -> Place:
    assert isinstance(site.quantizer, Quantizer)
    return Place(site.name, site.port, site.quantizer, site.channels, repeated)
