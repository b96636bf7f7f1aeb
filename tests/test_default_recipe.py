"""What ``quantize(model, data)`` does to trained networks when nothing is said: W8A8, every network, both front ends.

Needs the data folder (see tests/support/data.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch

import bitwright.onnx
import bitwright.onnx as onnx_front
import bitwright.torch
from bitwright.core.simulation.float_model import sqnr
from bitwright.metrics.intervals import compare
from bitwright.torch import QuantizationSimModel, apply_reconstruction, awq_model, fold_all_batch_norms
from tests.methods.transformer import with_outliers
from tests.support import data
from tests.support.data import accuracy, onnx_file, perplexity, shakespeare, stories, trained
from tests.support.simulations import calibrated
from tests.support.standins import denoiser, tone_detector
from tests.support.tasks import TASKS, Task, measured

pytestmark = pytest.mark.slow
IMAGES = ("mobilenet_v2_cifar", "mobilenet_v1_025", "resnet20_aux")
DIGITS = ("mnist_cntk", "mnist_pytorch")
#: the distance from float that is allowed, in points: 0.3, and what chance adds at most: twice the standard error of the paired
#: difference (0.1 of 400 photographs, below 0.05 of 2,000 pictures)
POINTS = {"mobilenet_v1_025": 0.3 + 2 * 0.1}


def task_of(name: str) -> Task:
    """Pictures are scored by the probability of the right class: accuracies of equal outputs (25.4 dB) differ by 1.5 points."""
    task = TASKS[name]()
    if name not in IMAGES:
        return task
    images = data.imagenet() if name == "mobilenet_v1_025" else data.cifar()
    return replace(task, score=lambda run: data.confidence(run, images))


def lost(name: str, front_end: str, preset: str, draws: tuple[int, ...]) -> list[float]:
    """Points below float after the default recipe, for each draw of the calibration data."""
    task = task_of(name)
    before = measured(name, task, front_end, preset, "float")
    # percents of 1,000 digits have one decimal: the sixth is of their difference in binary
    return [round(before - measured(name, task, front_end, preset, None, seed), 6) for seed in draws]


@pytest.mark.parametrize("name", IMAGES)
def test_images_over_two_draws_of_calibration_data(shared_data, name):
    assert np.mean(lost(name, "torch", "w8a8", (0, 1))) <= POINTS.get(name, 0.3)


def test_photographs_not_seen_come_out_with_far_less_noise(shared_data):
    task = TASKS["mobilenet_v1_025"]()
    model, unseen = data.trained("mobilenet_v1_025"), list(data.imagenet("test").x[:100].split(25))
    nearest, default = gained(model, task.batches(0), unseen)
    assert default > nearest + 6


@pytest.mark.parametrize("name", [*IMAGES, *DIGITS])
def test_images_in_onnx(shared_data, name):
    (drop,) = lost(name, "onnx", "w8a8", (0,))
    assert drop <= POINTS.get(name, 0.3)


@pytest.mark.parametrize("name", IMAGES)
def test_one_scale_per_tensor_within_a_point(shared_data, name):
    # photographs: the draw of the calibration data moves results by half a point
    draws = (0, 1) if name == "mobilenet_v1_025" else (0,)
    drops = [drop for front_end in ("torch", "onnx") for drop in lost(name, front_end, "w8a8_per_tensor", draws)]
    assert np.mean(drops) <= 1, drops


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
@pytest.mark.parametrize("name", ["stories260k", "lstm_char"])
def test_perplexity_within_one_percent(shared_data, name, front_end):
    task = TASKS[name]()
    float_metric = measured(name, task, front_end, "w8a8", "float")
    assert measured(name, task, front_end, "w8a8", None) <= 1.01 * float_metric


def detected(task, run):
    """Scores and boxes of the pictures that the detector is scored on, each [pictures, anchors, numbers]."""
    found = []

    def kept(x):
        found.append(run(x.numpy()))
        return torch.from_numpy(found[-1][0])

    task.score(kept)
    return [np.concatenate(outputs) for outputs in zip(*found, strict=True)]


@pytest.mark.parametrize("target", ["ort_cpu", "packed"])  # with the first layers in float, and all on integers
def test_faces_come_nearer_to_float_than_with_nearest_rounding(shared_data, target):
    """Both outputs, on pictures that nothing saw; which of a few faces are found is no further from it than chance."""
    task = TASKS["face_slim_320"]()
    file = data.onnx_file(task.file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    runs = {"float": lambda x: session.run(None, {"input": x})}
    feeds = [batch.numpy() for batch in task.batches(0)]
    for name, recipe in (("nearest", ["fold"]), ("default", None)):
        sim = bitwright.onnx.quantize(file, feeds, recipe=recipe, target=target, progress=False).sim
        runs[name] = sim.run
    outputs = {name: detected(task, run) for name, run in runs.items()}
    gains = [sqnr(w, d) - sqnr(w, n) for w, n, d in zip(*outputs.values(), strict=True)]
    assert np.mean(gains) > 1 and min(gains) > -1, gains
    wanted, nearest, default = (scores[..., 1] > 0.7 for scores, _ in outputs.values())
    told = compare((nearest == wanted).ravel(), (default == wanted).ravel())
    assert told.estimate >= 0 or not told.distinguishable, told


@pytest.mark.parametrize("recipe", [["fold"], None], ids=["nearest", "default"])
def test_faces_come_nearer_to_float_with_the_first_layers_in_float(shared_data, recipe):
    """Both outputs together; twenty anchors are above the threshold, too few to count."""
    task = TASKS["face_slim_320"]()
    file = data.onnx_file(task.file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    runs = [lambda x: session.run(None, {"input": x})]
    feeds = [batch.numpy() for batch in task.batches(0)]
    for target in ("packed", "ort_cpu"):
        runs.append(bitwright.onnx.quantize(file, feeds, recipe=recipe, target=target, progress=False).sim.run)
    wanted, whole, first = (detected(task, run) for run in runs)
    gains = [sqnr(w, f) - sqnr(w, a) for w, a, f in zip(wanted, whole, first, strict=True)]
    assert np.mean(gains) > 0, gains


def gained(model, batches, unseen):
    """dB of the outputs on unseen data, by nearest rounding and by the default recipe."""

    def outputs(m):
        with torch.no_grad():
            found = [m(x) for x in unseen]
        return np.concatenate([(y if isinstance(y, torch.Tensor) else y[0]).numpy().ravel() for y in found])

    wanted = outputs(model)
    nearest = bitwright.torch.quantize(model, batches, recipe=["fold"], progress=False).model
    default = bitwright.torch.quantize(model, batches, progress=False).model
    return sqnr(wanted, outputs(nearest)), sqnr(wanted, outputs(default))


def test_a_denoiser_keeps_what_its_last_layers_make():
    made = denoiser(epochs=6)
    nearest, default = gained(made.model, made.batches(0), list(made.test[:300].split(100)))
    assert default > nearest + 3


def test_a_detector_keeps_its_spectrum():
    made = tone_detector(epochs=6)
    nearest, default = gained(made.model, made.batches(0), list(made.test[:300].split(100)))
    assert default > max(nearest, 12)


@pytest.mark.parametrize("name", ["resnet20_aux", "mobilenet_v2_cifar"])
def test_outputs_come_nearer_than_by_nearest_rounding(shared_data, name):
    batches = TASKS[name]().batches(1)[:4]
    nearest, default = gained(data.trained(name), batches, list(data.cifar().x[:300].split(100)))
    assert default > nearest + 1


def folded(name: str, calibration: list[torch.Tensor], preset: str = "w4a8"):
    model = trained(name)
    fold_all_batch_norms(model, dummy_input=calibration[0])
    sim = calibrated(QuantizationSimModel(model, calibration[0], preset=preset), calibration)
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
    other = calibrated(onnx_front.QuantizationSimModel(loaded.model, feeds[0], preset="w4a8"), feeds)
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
        # the embedding and the output layer share a table, which the preset leaves in float
        assert not [name for name in sim.quantizers if name.startswith("tok_embeddings")]
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
    sim = calibrated(QuantizationSimModel(model, batches[0], preset="w4a16"), batches)
    reference, nearest = perplexity(model, test), perplexity(sim.model, test)
    apply_reconstruction(sim, batches, "gptq")
    assert perplexity(sim.model, test) - reference < 0.75 * (nearest - reference)
    assert np.isfinite(nearest)
