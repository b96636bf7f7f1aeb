"""Trained networks: what the default call says of them."""

import dataclasses

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
def test_depthwise_layers_of_a_mobilenet_on_one_scale_are_named_and_one_scale_per_channel_helps(
    cifar, cifar_train
):
    preset = PRESETS["w8a8"]
    preset = dataclasses.replace(preset, weight=dataclasses.replace(preset.weight, granularity=PerTensor()))
    sim = simulated("mobilenet_v2_cifar", cifar_train[:64].batches(32), preset)
    test = cifar[:96]
    found = bitwright.analyze(sim, test.batches(48), "accuracy", labels=test.y)
    assert all("depthwise" in layer.name for layer in found.worst(3))
    for layer in found.worst(3):
        assert layer.causes[0].cause in ("disparate_channels", "outlier_weight_channel")
        assert layer.causes[0].evidence["tries"] == ["per_channel", "equalize"]
    assert found.metric.difference.distinguishable and found.metric.difference.estimate < -0.2
    rows = found.try_remedies(3)
    kept = [row for row in rows if row.kept]
    assert len(kept) == 3 and all(row.remedy.startswith("per_channel") for row in kept)
    assert kept[-1].after_db > kept[0].before_db + 3 and kept[-1].metric_after > kept[0].metric_before + 0.1


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
