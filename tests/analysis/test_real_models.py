"""Trained networks: what the default call says of them."""

import dataclasses

import numpy as np
import pytest

import bitwright
from bitwright import PRESETS, PerTensor
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from tests.support import data
from tests.support.plant import PLANTS, layer_sites


def simulated(name, batches, preset="w8a8"):
    model = data.trained(name)
    fold_all_batch_norms(model, dummy_input=batches[0], progress=False)
    sim = QuantizationSimModel(model, batches[0], preset=preset)
    sim.compute_encodings(batches, progress=False)
    return sim


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
