"""Faults that nobody planted, in networks that are trained here: what the default call names, beside what is measured."""

import pytest

import bitwright
from bitwright.torch import QuantizationSimModel
from tests.support.natural import NATURAL

# Case -> layers that may be named first (those that read one tensor on one grid are equal), the cause, the first site's
# name, and what 16 bits there bring at least, in dB. The networks are trained here, by kernels that sum in another order on
# another CPU: 3 dB, half of all noise, is what "most" means.
EXPECTED = {
    "denoiser": ({"last"}, "output_grid", "last.output[0]", 3),
    # the squares in front of the logarithm are float: what is left is the sound itself, loud in places
    "spectrum": ({"conv1d", "conv1d_1"}, "uneven_positions", "input[0]", 10),
    "soft sounds": ({"conv1d", "conv1d_1"}, "uneven_samples", "input[0]", 20),
    "attention": ({"q", "k", "v"}, "outlier_channels", "input[0]", 10),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NATURAL)
def test_what_costs_a_trained_network_most_is_named_with_its_cause(name):
    layers, cause, site, gain = EXPECTED[name]
    model, before, after = NATURAL[name].trained()
    assert after < 0.6 * before, "it has learned something"
    data, _ = NATURAL[name].batches()
    sim = QuantizationSimModel(model, data[0])
    sim.compute_encodings(data, progress=False)
    found = bitwright.analyze(sim, data, progress=False)
    worst = found.worst(1)[0]
    assert worst.name in layers and worst.causes[0].cause == cause
    assert worst.causes[0].evidence["site"].endswith(site)
    # the same by switching every quantizer alone, on all data, without any estimate or rule
    exact = bitwright.analyze(sim, data, mode="exact", progress=False)
    by_cost = sorted((row for row in exact.sites if row.only_db is not None), key=lambda row: row.only_db)
    assert by_cost[0].layer in layers and by_cost[0].name.endswith(site)
    # dominates: 6 dB less than any quantizer elsewhere
    others = [row.only_db for row in by_cost if row.layer not in layers]
    assert by_cost[0].only_db < min(others) - 6
    rows = {row.remedy.split()[0]: row for row in found.try_remedies(1)}
    assert rows["16_bits"].kept and rows["16_bits"].after_db > rows["16_bits"].before_db + gain
    if name == "attention":
        assert rows["smooth"].after_db > rows["smooth"].before_db + gain
