"""Rounding methods on trained networks: what nearest rounding loses at 4 bits, and how much comes back.

Needs the data folder (see tests/support/data.py). Every network is one test per front end; iterations are few, so that the
tests are short: more of them bring more.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import bitwright.onnx as onnx_front
from bitwright.torch import QuantizationSimModel, apply_reconstruction, awq_model, fold_all_batch_norms
from tests.methods.transformer import with_outliers
from tests.support.data import accuracy, onnx_file, perplexity, shakespeare, stories, trained
from tests.support.tasks import TASKS, measured

pytestmark = pytest.mark.slow


def folded(name: str, calibration: list[torch.Tensor], preset: str = "w4a8"):
    model = trained(name)
    fold_all_batch_norms(model, dummy_input=calibration[0])
    sim = QuantizationSimModel(model, calibration[0], preset=preset)
    sim.compute_encodings(calibration)
    return model, sim


def test_resnet20_at_four_bits(cifar, cifar_train):
    test, calibration = cifar, list(cifar_train.x[:512].split(32))
    model, sim = folded("resnet20_aux", calibration)
    reference, nearest = accuracy(model, test), accuracy(sim.model, test)
    assert nearest < reference - 1.5
    apply_reconstruction(sim, calibration, "adaround", iterations=500)
    sim.compute_encodings(calibration)
    assert accuracy(sim.model, test) >= reference - 0.15 * (reference - nearest)


def test_mobilenet_v2_at_four_bits(cifar, cifar_train):
    test, calibration = cifar[:1000], list(cifar_train.x[:256].split(32))
    model, sim = folded("mobilenet_v2_cifar", calibration)
    reference, nearest = accuracy(model, test), accuracy(sim.model, test)
    assert nearest < 40
    apply_reconstruction(sim, calibration, "seq_mse")
    ranges = accuracy(sim.model, test)
    assert nearest + 10 < ranges
    apply_reconstruction(sim, calibration, "adaround", iterations=300)
    sim.compute_encodings(calibration)
    learned = accuracy(sim.model, test)
    assert learned > ranges + 5
    assert learned >= reference - 0.15 * (reference - nearest)


def test_mobilenet_v1_at_four_bits(shared_data):
    task = TASKS["mobilenet_v1_025"]()
    recipes = {
        "nearest": ["fold"],
        "ranges": ["fold", "seq_mse"],
        "learned": ["fold", {"adaround": {"iterations": 500}}],
    }
    found = {  # on a target that has all layers at four bits, the first one too
        name: measured("mobilenet_v1_025", task, "torch", "w4a8", steps, target="packed")
        for name, steps in recipes.items()
    }
    reference = measured("mobilenet_v1_025", task, "torch", "w4a8", "float")
    assert found["nearest"] < 10 and found["learned"] > found["ranges"]
    assert found["learned"] >= reference - 0.15 * (reference - found["nearest"])


@pytest.mark.parametrize("name", ["stories260k", "lstm_char"])
def test_learned_rounding_of_language_models_at_three_bits(name, shared_data):
    from bitwright.core.numerics.spec import Preset, activation_spec, weight_spec

    task, preset = TASKS[name](), Preset(weight_spec("int3"), activation_spec("uint16"))
    nearest, ranges, learned, feedback = (
        measured(name, task, "torch", preset, steps)
        for steps in ([], ["seq_mse"], ["seq_mse", {"adaround": {"iterations": 200}}], ["seq_mse", "gptq"])
    )
    assert learned < ranges < nearest and feedback < ranges


def test_blocks_beat_layers_on_mobilenet_v2(cifar, cifar_train):
    test, calibration = cifar[:1000], list(cifar_train.x[:256].split(32))
    found = {}
    for method in ("adaround", "brecq"):
        model, sim = folded("mobilenet_v2_cifar", calibration)
        apply_reconstruction(sim, calibration, method, iterations=100)
        sim.compute_encodings(calibration)
        found[method] = accuracy(sim.model, test)
    assert found["brecq"] > found["adaround"] - 1.0


def test_resnet20_as_an_onnx_file_reaches_what_the_module_reaches(cifar, cifar_train):
    test, calibration = cifar[:1000], list(cifar_train.x[:256].split(32))
    _, sim = folded("resnet20_aux", calibration)
    apply_reconstruction(sim, calibration, "gptq")
    sim.compute_encodings(calibration)
    feeds = [x.numpy() for x in calibration]
    loaded = onnx_front.load_model(onnx_file("resnet20_aux"))
    onnx_front.fold_all_batch_norms(loaded, feeds[0])
    other = onnx_front.QuantizationSimModel(loaded.model, feeds[0], preset="w4a8")
    other.compute_encodings(feeds)
    nearest = accuracy(lambda x: torch.from_numpy(other.run(x.numpy())[0]), test)
    onnx_front.apply_reconstruction(other, feeds, "gptq")
    other.compute_encodings(feeds)
    found = accuracy(lambda x: torch.from_numpy(other.run(x.numpy())[0]), test)
    assert abs(found - accuracy(sim.model, test)) <= 1.0
    assert found >= nearest + 1.5


@pytest.mark.parametrize("width", [4, 3])
def test_a_language_model_with_few_bits_of_weight(width, shared_data):
    from bitwright.core.numerics.spec import Preset, activation_spec, weight_spec

    calib, test = stories("calib"), stories("test")[:32]
    batches = [rows[:, :-1] for rows in calib.split(8)]
    model = trained("stories260k")
    found = {}
    for method in ("nearest", "seq_mse", "gptq"):
        sim = QuantizationSimModel(
            model, batches[0], preset=Preset(weight_spec(f"int{width}"), activation_spec("uint16"))
        )
        sim.compute_encodings(batches)
        if method != "nearest":
            apply_reconstruction(sim, batches, method)
        found[method] = perplexity(sim.model, test)
    reference = perplexity(model, test)
    assert reference < found["gptq"] < found["nearest"] and found["seq_mse"] < found["nearest"]
    # the tied embedding and output layer keep nearest rounding, which is much of what is left
    assert found["gptq"] - reference < 0.75 * (found["nearest"] - reference)


def test_scales_of_channels_help_a_language_model_with_few_bits_of_weight(shared_data):
    from bitwright.core.numerics.spec import Preset, weight_spec

    calib, test = stories("calib"), stories("test")[:32]
    batches = [rows[:, :-1] for rows in calib.split(8)]
    reference = perplexity(trained("stories260k"), test)

    def quantized(model, format, scaled):
        if scaled:
            awq_model(model, batches, weight=weight_spec(format))
            assert perplexity(model, test) == pytest.approx(reference, rel=1e-4)
        sim = QuantizationSimModel(model, batches[0], preset=Preset(weight_spec(format), None))
        # the embedding and the output layer share a table that no method here changes
        sim.quantizers["tok_embeddings.weight"].spec = weight_spec("int8")
        sim.quantizers["tok_embeddings.weight@output"].spec = weight_spec("int8")
        sim.compute_encodings(batches)
        return perplexity(sim.model, test)

    nearest, scaled = (quantized(trained("stories260k"), "int3", scaled) for scaled in (False, True))
    assert reference < scaled < 0.97 * nearest
    nearest, scaled = (
        quantized(with_outliers(trained("stories260k"), batches[0][:1]), "int4", scaled) for scaled in (False, True)
    )
    assert nearest > 2 * reference and scaled - reference < 0.25 * (nearest - reference)


def test_a_recurrent_language_model_at_four_bits(shared_data):
    rows = shakespeare("train")[: 64 * 128].reshape(64, 128)
    test = shakespeare("test")[: 160 * 129].reshape(160, 129)
    batches = list(rows.split(16))
    model = trained("lstm_char")
    sim = QuantizationSimModel(model, batches[0], preset="w4a16")
    sim.compute_encodings(batches)
    reference, nearest = perplexity(model, test), perplexity(sim.model, test)
    apply_reconstruction(sim, batches, "gptq")
    assert perplexity(sim.model, test) - reference < 0.75 * (nearest - reference)
    assert np.isfinite(nearest)
