"""What an analysis says of small models, on both front ends."""

import json

import numpy as np
import pytest
import torch

import bitwright
from bitwright.analysis import Analysis


def test_rows_of_sites_and_layers_are_there_worst_first(case):
    found = bitwright.analyze(case.sim, case.data, mode="fast")
    assert {row.name for row in found.sites} == set(case.sim.quantizers)
    costs = [row.cost for row in found.sites]
    assert costs == sorted(costs, reverse=True) and costs[0] > 0
    noise = [row.noise or 0 for row in found.layers]
    assert noise == sorted(noise, reverse=True)
    assert found.worst(2) == found.layers[:2]


def test_the_dictionary_is_json_and_comes_back(case):
    found = bitwright.analyze(case.sim, case.data, mode="fast")
    content = json.loads(found.to_json())
    assert content == found.to_dict() and content["format"] == "bitwright-analysis"
    assert Analysis.from_dict(content).to_dict() == content
    assert found._repr_html_().startswith("<table>") and case.conv1 in str(found)


def test_the_simulation_is_as_it_was(case):
    before = {name: (site.enabled, site.encoding) for name, site in case.sim.quantizers.items()}
    bitwright.analyze(case.sim, case.data, mode="fast")
    assert before == {name: (site.enabled, site.encoding) for name, site in case.sim.quantizers.items()}


def test_errors_of_layers_are_those_of_the_simulation(torch_case):
    """What leaves the last layer is the error of the outputs; the first layer reads exact values but for its input's grid."""
    found = bitwright.analyze(torch_case.sim, torch_case.data, mode="fast")
    layers = {row.name: row for row in found.layers}
    assert layers["head"].after_db == pytest.approx(found.output["sqnr_db"], abs=1e-3)
    assert layers["conv1"].arrived_db == 200 and layers["conv1"].made_db == layers["conv1"].after_db
    for row in layers.values():
        if row.sites and row.arrived_db < 200:
            assert row.after_db <= row.made_quantized_db + 0.5, "what leaves holds what was made"
    assert layers["conv1"].made_lsb is None or layers["conv1"].made_lsb > 0


def test_values_at_a_site_are_those_that_pass_it(torch_case):
    found = bitwright.analyze(torch_case.sim, torch_case.data, mode="fast", samples=10_000)
    weight = next(row for row in found.sites if row.name == "conv1.weight")
    values = dict(torch_case.sim.model.named_parameters())["conv1.weight"].detach().numpy()
    assert (weight.minimum, weight.maximum) == (values.min(), values.max())
    assert weight.channels["high"] == pytest.approx(values.max((1, 2, 3)).tolist())
    assert sum(weight.histogram["counts"]) == values.size
    source = next(row for row in found.sites if row.name.startswith("conv1.input"))
    data = torch.cat(torch_case.data).numpy()
    assert (source.minimum, source.maximum) == (data.min(), data.max())
    assert source.clipped == pytest.approx(0.0, abs=1e-3) and 0.2 < source.codes_used <= 1
    assert source.grid["steps"] == 255 and source.lsb == pytest.approx(float(np.ptp(data)) / 255, rel=0.05)
