"""What the default call says of trained networks, and of faults that nobody planted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import bitwright
from bitwright import PRESETS, PerTensor
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from tests.support import data
from tests.support.natural import NATURAL
from tests.support.plant import PLANTS, layer_sites
from tests.support.simulations import calibrated


def simulated(name, batches, preset="w8a8"):
    model = data.trained(name)
    fold_all_batch_norms(model, dummy_input=batches[0], progress=False)
    return calibrated(QuantizationSimModel(model, batches[0], preset=preset), batches)


@pytest.mark.slow
def test_depthwise_layers_of_a_mobilenet_on_one_scale_are_named_and_one_scale_per_channel_helps(cifar, cifar_train):
    preset = PRESETS["w8a8"]
    preset = dataclasses.replace(preset, weight=dataclasses.replace(preset.weight, granularity=PerTensor()))
    sim = simulated("mobilenet_v2_cifar", cifar_train[:64].batches(32), preset)
    test = cifar[:96]
    found = bitwright.analyze(
        sim, test.batches(48), "accuracy", labels=test.y, groups={"depthwise": "*depthwise*.weight"}
    )
    difference = found.metric.difference
    assert difference.test == "mcnemar" and difference.distinguishable and difference.high < -0.3
    # measured, beside any rule: alone these weights lose as much as all quantizers together; without them 6 dB come back at
    # once (more would, were the ranges of activations not taken with these weights)
    (group,) = [row for row in found.groups if row.name == "depthwise"]
    assert group.only_db == pytest.approx(found.output["sqnr_db"], abs=0.5)
    assert group.without_db > found.output["sqnr_db"] + 6
    weights = dict(sim.model.named_parameters())
    for layer in found.worst(4):
        assert "depthwise" in layer.name
        reach = np.sort(weights[f"{layer.name}.weight"].detach().abs().amax((1, 2, 3)).numpy())
        # of 96 channels and more, fewer than one in twenty are far larger than the rest: outliers, not a spread
        cause = layer.causes[0]
        assert cause.cause == "outlier_weight_channel" and cause.evidence["site"] == f"{layer.name}.weight"
        assert cause.evidence["ratio"] == pytest.approx(reach[-1] / np.median(reach[reach > 0]), rel=1e-5)
        assert 1 <= cause.evidence["outliers"] <= len(reach) // 20 and cause.evidence["ratio"] > 100
        assert cause.evidence["tries"] == ["per_channel", "equalize"]
    *kept, equalized = [row for row in found.try_remedies(3) if row.kept or row.remedy.startswith("equalize")]
    assert [row.remedy.split()[0] for row in kept] == ["per_channel"] * 3
    assert kept[-1].after_db > found.output["sqnr_db"] + 4
    assert kept[-1].metric_after > kept[0].metric_before + 0.25
    assert equalized.layers == tuple(layer.name for layer in found.worst(3))
    assert equalized.after_db > equalized.before_db + 25
    assert equalized.metric_after > found.metric.float - 0.05


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["range clipped", "outlier channel"])
def test_a_fault_planted_in_a_trained_network_is_named_first(cifar_train, kind):
    batches = cifar_train[:32].batches(32)
    sim = simulated("resnet20_aux", batches)
    sites = layer_sites(sim, weight=PLANTS[kind].weight)
    op = list(sites)[len(sites) // 2]
    PLANTS[kind].apply(sim, sites[op], batches)
    worst = bitwright.analyze(sim, batches).worst(1)[0]
    assert worst.name == op and worst.causes[0].cause in PLANTS[kind].causes


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
    sim = calibrated(QuantizationSimModel(model, data[0]), data)
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
