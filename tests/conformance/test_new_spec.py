"""A new spec after calibration: what statistics can serve needs no data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bitwright.onnx as bo
import bitwright.torch as bt
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock
from bitwright.core.numerics.spec import RangeMethod
from tests.conformance.test_state import Net, data, net_onnx

CHANGES = {
    "4 bits": {"format": IntFormat(4, signed=False)},
    "16 bits": {"format": IntFormat(16, signed=False)},
    "symmetric": {"format": IntFormat(8), "symmetry": "symmetric"},
    "another method": {"method": RangeMethod("minmax")},
}


def simulation(front: str, scheme: str) -> Any:
    if front == "torch":
        return bt.QuantizationSimModel(Net(), data(0), scheme)
    return bo.QuantizationSimModel(net_onnx(), data(0).numpy(), scheme)


def calibrate(sim: Any, front: str) -> Any:
    batches = [data(i) if front == "torch" else data(i).numpy() for i in (1, 2)]
    sim.compute_encodings(batches, progress=False)
    return sim


def change(sim: Any, facets: dict[str, Any], roles: tuple[str, ...]) -> None:
    for site in sim.quantizers.values():
        if site.role in roles:
            site.spec = replace(site.quantizer.spec, **facets)


@pytest.mark.parametrize("front", ["torch", "onnx"])
@pytest.mark.parametrize("scheme", ["min_max", "mse"])
@pytest.mark.parametrize("what", CHANGES)
def test_activations_are_what_calibration_under_the_new_spec_gives(front: str, scheme: str, what: str) -> None:
    roles = ("input", "output")
    changed = calibrate(simulation(front, scheme), front)
    change(changed, CHANGES[what], roles)
    fresh = simulation(front, scheme)
    change(fresh, CHANGES[what], roles)
    calibrate(fresh, front)
    for name, site in changed.quantizers.items():
        if site.role in roles:
            assert site.encoding == fresh.quantizers[name].encoding, name


@pytest.mark.parametrize("front", ["torch", "onnx"])
@pytest.mark.parametrize("facets", [{"format": IntFormat(4)}, {"granularity": PerBlock(2)}], ids=str)
def test_weights_are_calibrated_on_their_values(front: str, facets: dict[str, Any]) -> None:
    changed, fresh = calibrate(simulation(front, "min_max"), front), simulation(front, "min_max")
    for sim in (changed, fresh):
        site = sim.quantizers["a.weight"]
        site.spec = replace(site.quantizer.spec, **facets)
    calibrate(fresh, front)
    found = changed.quantizers["a.weight"].encoding
    assert found is not None and np.array_equal(found.scale, fresh.quantizers["a.weight"].encoding.scale)


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_data_adds_to_the_statistics_kept(front: str) -> None:
    """A histogram goes on as one, though the new method reads its ends only."""
    sim = calibrate(simulation(front, "mse"), front)
    change(sim, {"method": RangeMethod("minmax")}, ("input", "output"))
    sim.compute_encodings([data(3) * 2 if front == "torch" else data(3).numpy() * 2], resume=True, progress=False)
    whole = simulation(front, "min_max")
    batches = [data(1), data(2), data(3) * 2]
    whole.compute_encodings([b if front == "torch" else b.numpy() for b in batches], progress=False)
    name = next(n for n, s in sim.quantizers.items() if s.role in ("input", "output") and s.enabled)
    assert sim.quantizers[name].encoding == whole.quantizers[name].encoding


def test_what_no_statistics_serve_needs_data() -> None:
    sim = calibrate(simulation("torch", "min_max"), "torch")
    change(sim, {"method": RangeMethod("mse")}, ("input", "output"))  # reads a histogram
    sites = [s for s in sim.quantizers.values() if s.role == "output" and not s.quantizer.is_fixed]
    assert sites and all(s.encoding is None for s in sites)


def test_a_copy_calibrates_on_its_own_weights() -> None:
    import copy

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x)

    sim = bt.QuantizationSimModel(Linear(), torch.randn(2, 4))
    sim.compute_encodings([torch.randn(2, 4)], progress=False)
    other = copy.deepcopy(sim)
    with torch.no_grad():
        other.model.a.weight.mul_(2)
    for one in (sim, other):
        one.quantizers["a.weight"].spec = replace(one.quantizers["a.weight"].spec, format=IntFormat(4))
    found, twice = (one.quantizers["a.weight"].encoding.scale for one in (sim, other))
    assert np.array_equal(found * 2, twice)
