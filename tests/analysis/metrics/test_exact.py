"""Sensitivity by running steps again is that of switching quantizers in the simulation, at less work."""

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
import bitwright.onnx
from bitwright.analysis.exact import Exact
from bitwright.analysis.result import decibel
from bitwright.analysis.subject import open_subject
from bitwright.torch import QuantizationSimModel
from bitwright.torch.program import TorchSimulation
from tests.analysis.conftest import batches, exported, noise_over_signal


def switched(sim, data, active):
    """Noise of the outputs with the quantizers of ``active`` sites, by switching them in the simulation."""
    subject = open_subject(sim)
    noise, signal = 0.0, 0.0
    for batch in data:
        (wanted,) = [np.array(y) for y in subject.outputs(batch, True)][:1]
        with subject.only(active):
            found = subject.outputs(batch, False)[0]
        power = float(np.square(wanted).sum())
        noise, signal = noise + noise_over_signal(wanted, found) * power, signal + power
    return noise / signal


class Recurrent(nn.Module):
    """A recurrent layer, whose quantizers work inside of its steps, and a layer before and after it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.lstm, self.last = nn.Linear(4, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.lstm(torch.tanh(self.first(x)))[0])


def recurrent(front_end):
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(5, 6, 4, generator=generator) for _ in range(2)]
    model = Recurrent().eval()
    if front_end == "torch":
        sim = QuantizationSimModel(model, data[0])
    else:
        data = [x.numpy() for x in data]
        sim = bitwright.onnx.QuantizationSimModel(exported(model, torch.from_numpy(data[0])), data[0])
    sim.compute_encodings(data, progress=False)
    return sim, data


def agree(sim, data, tolerance, op=None):
    found = bitwright.analyze(sim, data, mode="exact")
    quantizers = {name: site.quantizer for name, site in sim.quantizers.items()}
    rows = [row for row in found.sites if row.enabled and not quantizers[row.name].derived]
    rows = [row for row in rows if op is None or row.op == op]
    assert rows
    for row in rows:
        mine = quantizers[row.name]
        only = decibel(switched(sim, data, lambda site, mine=mine: site.quantizer is mine))
        without = decibel(switched(sim, data, lambda site, mine=mine: site.quantizer is not mine))
        assert row.only_db == pytest.approx(only, abs=tolerance), row.name
        assert row.without_db == pytest.approx(without, abs=tolerance), row.name


def test_one_site_and_all_but_one_are_those_of_the_simulation(case):
    agree(case.sim, case.data[:2], 0.1)


@pytest.mark.parametrize("front_end", ["torch", pytest.param("onnx", marks=pytest.mark.slow)])
def test_quantizers_inside_recurrent_layers_are_switched_too(front_end):
    sim, data = recurrent(front_end)
    agree(sim, data[:1], 0.3, "LSTM")


@pytest.mark.slow_variants("onnx")
def test_groups_are_measured_together(case):
    found = bitwright.analyze(case.sim, case.data[:1], groups={"first two": ["*conv1*", "*conv2*"]})
    rows = {row.name: row for row in found.groups}
    assert rows.keys() == {"first two", "all weights", "all activations"}
    group = set(rows["first two"].sites)
    assert group == {n for n, s in case.sim.quantizers.items() if "conv1" in n or "conv2" in n}
    assert rows["first two"].only_db == pytest.approx(
        decibel(switched(case.sim, case.data[:1], lambda site: site.name in group)), abs=0.1
    )
    weights = rows["all weights"]
    activations = rows["all activations"]
    assert weights.only_db == pytest.approx(activations.without_db, abs=1e-3)


def chain(layers):
    torch.manual_seed(0)
    modules = [m for _ in range(layers) for m in (nn.Linear(8, 8), nn.ReLU())]
    data = [torch.randn(4, 8)]
    sim = QuantizationSimModel(nn.Sequential(*modules).eval(), data[0])
    sim.compute_encodings(data, progress=False)
    return sim, data


def measured(sim, data, budget=1 << 30):
    exact = Exact(TorchSimulation(sim), data, budget=budget)
    exact.measure({n: frozenset([n]) for n, s in sim.quantizers.items() if s.enabled}, iter)
    return exact


def test_half_of_the_operators_run_again_in_a_chain():
    sim, data = chain(20)
    exact = measured(sim, data)
    evaluations = 2 * len(exact.found)  # with it alone, and with all but it
    assert exact.runs < 0.55 * evaluations * exact.steps + 2 * exact.steps


def test_a_small_budget_changes_nothing_but_where_values_lie(torch_case):
    data = batches(2, rows=64)  # 128 KiB and more per value
    wide, narrow = (measured(torch_case.sim, data, budget) for budget in (1 << 30, 1 << 19))
    assert narrow.peak < (1 << 19) + (1 << 17) < wide.peak  # what is too small for a file stays
    assert {n: p.only.ratio for n, p in wide.found.items()} == {n: p.only.ratio for n, p in narrow.found.items()}
    assert wide.steps == narrow.steps


def test_a_user_function_sees_the_same_switches(torch_case):
    """Its values with only one quantizer, and with all but it, of the four that cost most."""
    seen = []

    def spread(model):
        seen.append(sum(site.enabled for site in torch_case.sim.quantizers.values()))
        with torch.no_grad():
            return float(torch.cat([model(x) for x in torch_case.data]).std())

    found = bitwright.analyze(torch_case.sim, torch_case.data, spread)
    assert found.metric.name == "spread" and found.metric.difference.test == "none"
    told = [row for row in found.sites if row.metric_only is not None]
    assert len(told) == 4 and all(row.metric_without is not None for row in told)
    assert min(seen) == 1, "one quantizer alone"
