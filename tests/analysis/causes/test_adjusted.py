"""Remedies that change the float model are measured on a simulation of their own."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
import bitwright.onnx
from bitwright.analysis.result import Cause
from bitwright.core.numerics.formats import IntFormat
from bitwright.torch import QuantizationSimModel
from tests.analysis.conftest import exported

PER_TENSOR = {"preset": "w8a8", "rules": [{"match": "*", "weight": {"format": "int8", "granularity": "per_tensor"}}]}


def uneven() -> nn.Module:
    """Two convolutions whose channels differ by four decades and cancel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))
    scales = torch.logspace(-2, 2, 8)
    with torch.no_grad():
        model[0].weight *= scales[:, None, None, None]
        model[0].bias *= scales
        model[2].weight /= scales[None, :, None, None]
    return model.eval()


class Normed(nn.Module):
    """A norm that makes one channel 60 times the others, and layers that read it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.norm.weight[3] = 60.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(self.norm(x))))


MODELS = {"equalize": (uneven, (3, 6, 6), PER_TENSOR), "smooth": (lambda: Normed().eval(), (16,), {"preset": "w8a8"})}


def simulation(name, front_end):
    make, shape, rules = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(16, *shape, generator=generator) for _ in range(3)]
    model = make()
    if front_end == "torch":
        sim = QuantizationSimModel(model, data[0], config_file=rules)
    else:
        proto = exported(model, data[0])
        data = [x.numpy() for x in data]
        sim = bitwright.onnx.QuantizationSimModel(proto, data[0], config_file=rules)
    sim.compute_encodings(data, progress=False)
    return sim, data


def state(sim, data):
    sites = {n: (s.enabled, s.encoding, s.quantizer.spec) for n, s in sim.quantizers.items()}
    outputs = sim.run(data[0])[0] if hasattr(sim, "run") else sim.model(data[0]).detach().numpy()
    return sites, np.array(outputs)


@pytest.mark.quick_variants("smooth-torch")
@pytest.mark.parametrize("front_end", ["torch", "onnx"])
@pytest.mark.parametrize("remedy", MODELS)
def test_a_remedy_of_the_float_model_is_measured_and_the_simulation_stays(remedy, front_end):
    sim, data = simulation(remedy, front_end)
    found = bitwright.analyze(sim, data, "kl")
    sites, outputs = state(sim, data)
    rows = {row.remedy: row for row in found.try_remedies(3)}
    row = rows[f"{remedy} before the simulation"]
    assert row.after_db > row.before_db + 6 and not row.kept
    assert row.metric_after < row.metric_before
    assert set(row.layers) <= {layer.name for layer in found.worst(3)} and row.layers
    after = state(sim, data)
    assert sites == after[0] and np.array_equal(outputs, after[1])
    assert f"{remedy} before the simulation at" in str(found)


def test_what_is_measured_is_what_the_method_brings():
    """The row says what equalizing the model oneself and simulating it anew says."""
    sim, data = simulation("equalize", "torch")
    row = bitwright.analyze(sim, data).try_remedies(3)[-1]
    model, (_, _, rules) = uneven(), MODELS["equalize"]
    plain, even = copy.deepcopy(model), copy.deepcopy(model)
    bitwright.torch.equalize_model(even, dummy_input=data[0], data=data, progress=False)
    found = []
    for one in (plain, even):
        own = QuantizationSimModel(one, data[0], config_file=rules)
        own.compute_encodings(data, progress=False)
        with torch.no_grad():
            pairs = [(model(x).double(), own.model(x).double()) for x in data]
        noise = sum(float((a - b).square().sum()) for a, b in pairs)
        found.append(-10 * np.log10(noise / sum(float(a.square().sum()) for a, _ in pairs)))
    assert [row.before_db, row.after_db] == pytest.approx(found, abs=0.1)


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_what_sites_are_asked_for_is_asked_for_again(front_end):
    """A simulation beside the user's has its widths, and what was switched off stays off."""
    from bitwright.methods.front_end import front_end_of

    sim, data = simulation("smooth", front_end)
    weight = next(n for n, s in sim.quantizers.items() if s.role == "weight")
    output = [n for n, s in sim.quantizers.items() if s.role == "output"][-1]
    sim.quantizers[weight].spec = dataclasses.replace(sim.quantizers[weight].spec, format=IntFormat(4))
    sim.quantizers[output].enabled = False
    front = front_end_of(sim)
    other = front.simulated_as(sim, front.float_model(sim))
    other.compute_encodings(data, progress=False)
    assert other.quantizers[weight].encoding.format.bits == 4 and not other.quantizers[output].enabled
    sim.compute_encodings(data, progress=False)
    own, its = ({n: site for n, site in state(one, data)[0].items() if site[0]} for one in (sim, other))
    assert own == its
    assert np.array_equal(state(sim, data)[1], state(other, data)[1])


def test_what_cannot_be_tried_is_told():
    """A single layer has no neighbour to share its ranges with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model[0].weight *= torch.logspace(-2, 1, 8)[:, None]
    data = [torch.randn(32, 8, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    sim = QuantizationSimModel(model, data[0], config_file=PER_TENSOR)
    sim.compute_encodings(data, progress=False)
    found = bitwright.analyze(sim, data)
    found.layers[0].causes = (Cause("disparate_channels", "", {"tries": ["equalize"]}, ""),)
    assert not found.try_remedies(1)
    assert any(note.startswith("equalize was not tried: it changes nothing in this model") for note in found.notes)
    count = len(found.notes)
    found.try_remedies(1)
    assert len(found.notes) == count, "a reason stands once"
