"""Damage to one layer of a simulation, for tests and benchmarks that an analysis finds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bitwright.analysis.layer_errors import channel_axis
from bitwright.core.numerics import affine
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerTensor
from bitwright.core.simulation.sites import Site
from bitwright.methods.layers import holds_layer_weight


@dataclass(frozen=True)
class Plant:
    """A kind of damage.

    Attributes:
        apply: does it at a site of a simulation that was calibrated on the data.
        weight: whether the site is a weight, else an activation.
        causes: keys of what is right to say about it.
    """

    apply: Callable[[Any, Site, Sequence[Any]], None]
    weight: bool
    causes: frozenset[str]


def layer_sites(sim: Any, *, weight: bool) -> dict[str, Site]:
    """Operator -> a site to damage, of those that make or hold something of their own."""
    found: dict[str, Site] = {}
    for site in sim.quantizers.values():
        if not site.enabled or site.encoding is None or site.inner is not None:
            continue
        layer = holds_layer_weight(sim.graph, site.op, "weight", site.port if site.role == "weight" else 1)
        if weight and site.role == "weight" and layer and sim.graph.values[site.value].param is not None:
            found.setdefault(site.op, site)
        if not weight and site.role in ("input", "output"):
            found.setdefault(site.op, site)
    return found


def _scaled(factor: float) -> Callable[[Any, Site, Sequence[Any]], None]:
    def apply(sim: Any, site: Site, data: Sequence[Any]) -> None:
        encoding = site.encoding
        assert encoding is not None
        site.encoding = affine.with_scale(encoding, encoding.scale * np.float32(factor))

    return apply


def _two_bits(sim: Any, site: Site, data: Sequence[Any]) -> None:
    site.spec = replace(site.quantizer.spec, format=IntFormat(2))


def _outlier(sim: Any, site: Site, data: Sequence[Any]) -> None:
    """One element of the weakest channel is 40 times the largest of all others, on one scale for the tensor."""
    param = sim.graph.values[site.value].param
    values = parameter(sim, param)
    axis = channel_axis(site, values.ndim) or 0
    rows = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
    channel = int(np.abs(rows).max(1).argmin())
    place = int(np.abs(rows[channel]).argmax())
    rows = rows.copy()
    rows[channel, place] = 40 * np.abs(values).max()
    moved = np.moveaxis(values, axis, 0).shape
    set_parameter(sim, param, np.ascontiguousarray(np.moveaxis(rows.reshape(moved), 0, axis)))
    site.spec = replace(site.quantizer.spec, granularity=PerTensor())
    sim.compute_encodings(data, progress=False)


PLANTS: Mapping[str, Plant] = {
    "range too wide": Plant(_scaled(24.0), False, frozenset({"range_too_wide"})),
    "range clipped": Plant(_scaled(1 / 8), False, frozenset({"clipping"})),
    "outlier channel": Plant(_outlier, True, frozenset({"outlier_weight_channel", "outlier_channels"})),
    "two-bit weight": Plant(_two_bits, True, frozenset({"few_bits"})),
}


def parameter(sim: Any, name: str) -> np.ndarray[Any, Any]:
    """A copy of a parameter, of either front end."""
    if hasattr(sim, "model"):
        return sim._interceptor.named_tensor(name).detach().cpu().numpy().copy()
    return sim.marked.graph.initializers[name].const_value.numpy().copy()


def set_parameter(sim: Any, name: str, values: np.ndarray[Any, Any]) -> None:
    """Write it."""
    if hasattr(sim, "model"):
        import torch

        with torch.no_grad():
            sim._interceptor.named_tensor(name).copy_(torch.from_numpy(values))
    else:
        sim.set_parameter(name, values)
