"""Analytic post-training methods: the same code does the same to a module and to its ONNX export."""

from __future__ import annotations

import copy
import io
import logging
import warnings

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import bitwright.onnx
import bitwright.onnx as onnx_ptq
import bitwright.torch as torch_ptq
from bitwright.errors import CalibrationError, ConfigError, ModelError
from bitwright.methods.layers import Layers
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.onnx.opened import OnnxCorrectable
from bitwright.torch import QuantizationSimModel as TorchSim
from tests.methods.transformer import Decoder, tokens
from tests.support.data import Images, accuracy, perplexity, stories, trained
from tests.support.simulations import calibrated

logging.getLogger("torch.onnx").setLevel(logging.ERROR)


def exported(model: nn.Module, x: Tensor, dynamo: bool = False) -> onnx.ModelProto:
    """What torch writes: batch size open, one input ``x``; the older exporter keeps batch norms if asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            rows = torch.export.Dim("rows", min=1, max=256)
            program = torch.onnx.export(
                copy.deepcopy(model), (x,), dynamo=True, verbose=False, input_names=["x"], dynamic_shapes=({0: rows},)
            )
            assert program is not None
            return program.model_proto
        file = io.BytesIO()
        torch.onnx.export(
            copy.deepcopy(model), (x,), file, dynamo=False, opset_version=17, input_names=["x"],
            dynamic_axes={"x": {0: "rows"}}, training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False,
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


def run(model: onnx.ModelProto, x: Tensor) -> Tensor:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def simulated(model: onnx.ModelProto, batches: list[Tensor], **options: object) -> OnnxSim:
    sim = OnnxSim(model, batches[0][:2].numpy(), threads=1, **options)  # type: ignore[arg-type]
    sim.compute_encodings([batch.numpy() for batch in batches], progress=False)
    return sim


def small() -> nn.Module:
    """Depthwise, grouped and linear layers with batch norms and ReLU6, channels of very different ranges."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 8, 3, padding=1, groups=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    for norm in (m for m in model if isinstance(m, nn.BatchNorm2d)):
        norm.weight.data = torch.exp(1.5 * torch.randn(norm.num_features))
        norm.bias.data.normal_(1)
    return model.eval()


X = torch.rand(96, 3, 12, 12, generator=torch.Generator().manual_seed(0)) * 4 - 1


def test_equalization_finds_the_same_groups_and_factors():
    model = small()
    other = exported(model, X[:2])
    before = run(other, X)
    ours = torch_ptq.equalize_model(model, dummy_input=X[:2])
    theirs = onnx_ptq.equalize_model(other, X[:2].numpy())
    assert len(ours.groups) == len(theirs.groups) == 4
    assert len(ours.clamped) == len(theirs.clamped) == 2
    for a, b in zip(ours.factors, theirs.factors, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)
    torch.testing.assert_close(run(other, X), before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(X), before, rtol=1e-4, atol=1e-4)
    assert not {node.op_type for node in other.graph.node} & {"Clip", "BatchNormalization"}
    sim = calibrated(TorchSim(model, X[:2]), X.split(32))
    for verified in (sim.verify(X[:4]), simulated(other, list(X.split(32))).verify(X[:4].numpy())):
        assert verified.ok, verified.to_text()
    read = {name for node in other.graph.node for name in node.input}
    assert {held.name for held in other.graph.initializer} <= read


def test_high_biases_are_absorbed_alike():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 1)).eval()
    model[1].bias.data.fill_(4.0)
    other = exported(model, X[:2])
    ours = torch_ptq.equalize_model(model, dummy_input=X[:2], absorb_bias=True)
    theirs = onnx_ptq.equalize_model(other, X[:2].numpy(), absorb_bias=True)
    assert len(ours.absorbed) == len(theirs.absorbed) == 1
    for report in (ours, theirs):  # they are those of the model as it is now: nothing is left to absorb
        mean, std = next(iter(report.statistics.values()))
        assert (mean > 0).any() and (mean <= 3 * std + 1e-5).all()
    torch.testing.assert_close(run(other, X), model(X), rtol=1e-4, atol=1e-4)


def test_bias_correction_measures_the_same():
    model = small()
    torch_ptq.equalize_model(model, dummy_input=X[:2])
    other = exported(model, X[:2])
    sim = calibrated(TorchSim(model, X[:2], default_param_bw=4), X.split(32))
    theirs = simulated(other, list(X.split(32)), default_param_bw=4)
    ours_report = torch_ptq.apply_bias_correction(sim, X.split(32))
    theirs_report = onnx_ptq.apply_bias_correction(theirs, [batch.numpy() for batch in X.split(32)])
    assert len(ours_report.corrected) == len(theirs_report.corrected) == 5
    for a, b in zip(ours_report.corrected.values(), theirs_report.corrected.values(), strict=True):
        np.testing.assert_allclose(a, b, atol=0.03 * np.abs(a).max() + 2e-3)
    quantized = torch.from_numpy(theirs.run(X.numpy())[0])
    reference = model(X).mean(0)
    assert (quantized.mean(0) - reference).abs().max() < 0.02 * reference.abs().max() + 0.01
    report = theirs.verify(X[:4].numpy())
    assert report.ok, report.to_text()  # the corrected biases are in the exported file as well


def test_a_reference_is_the_goal_where_weights_have_changed_since(caplog):
    model = small()
    torch_ptq.fold_all_batch_norms(model, dummy_input=X[:2])
    other = exported(model, X[:2])
    sim, theirs = TorchSim(model, X[:2]), simulated(other, [X])
    sim.compute_encodings([X])
    with torch.no_grad():
        sim.model[3].weight *= 1.2  # as a method does that writes weights
    layer = list(Layers(theirs.graph).of.values())[1]
    theirs.set_parameter(layer.weight, OnnxCorrectable(theirs).weight(layer)[0] * 1.2)
    goal = model(X).mean(0)
    for _ in range(2):  # again does no harm
        torch_ptq.apply_bias_correction(sim, [X], reference=model)
        onnx_ptq.apply_bias_correction(theirs, [X.numpy()], reference=other)
    for found in (sim.model(X), torch.from_numpy(theirs.run(X.numpy())[0])):
        assert (found.mean(0) - goal).abs().max() < 0.02 * goal.abs().max() + 0.01
    assert "did not happen" not in caplog.text and not sim._simulator.unseen  # measuring is not part of the model


def test_the_analytic_form_computes_the_same():
    model = small()
    other = exported(model, X[:2])
    ours = torch_ptq.fold_all_batch_norms(model, dummy_input=X[:2]).moments
    folds = onnx_ptq.fold_all_batch_norms(other, X[:2].numpy())
    sim = calibrated(TorchSim(model, X[:2], default_param_bw=4), [X])
    theirs = simulated(other, [X], default_param_bw=4)
    names = dict(zip(_layers(sim), _layers(theirs), strict=True))
    ignore = ["0"]
    a = torch_ptq.apply_bias_correction(sim, [X], moments=ours, layers_to_ignore=ignore)
    b = onnx_ptq.apply_bias_correction(
        theirs, [X.numpy()], moments=folds.moments,
        layers_to_ignore=[names[op] for op in ignore],
    )  # fmt: skip
    assert {names[op] for op in a.analytic} == b.analytic and len(b.analytic) == 3
    for op in a.analytic:
        np.testing.assert_allclose(a.corrected[op], b.corrected[names[op]], rtol=1e-3, atol=1e-5)


def _layers(sim: TorchSim | OnnxSim) -> list[str]:
    return [layer.op for layer in Layers(sim.graph).of.values() if layer.kind == "layer"]


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_smoothing_and_rotation_find_the_same(bias):
    model, x = Decoder(bias=bias), tokens(16)
    other = exported(model, x, dynamo=not bias)  # both exporters
    before = model(x)
    ours, theirs = torch_ptq.rotate_model(model, dummy_input=x), onnx_ptq.rotate_model(other, x.numpy())
    assert len(ours.streams) == len(theirs.streams) == 1 and len(ours.heads) == len(theirs.heads) == 1
    assert len(ours.norms.groups) == len(theirs.norms.groups) == 3
    torch.testing.assert_close(run(other, x), before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    ours, theirs = torch_ptq.smooth_model(model, [x]), onnx_ptq.smooth_model(other, [x.numpy()])
    assert len(ours.groups) == len(theirs.groups) == 4 and len(ours.attentions) == len(theirs.attentions) == 1
    for a, b in zip(ours.factors, theirs.factors, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)
    torch.testing.assert_close(run(other, x), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_the_search_of_channel_scales_finds_the_same(bias):
    model, x = Decoder(tied=False, bias=bias), tokens(32)
    other = exported(model, x, dynamo=not bias)  # both exporters
    before = model(x)
    ours = torch_ptq.awq_model(model, [x], weight="w4")
    theirs = onnx_ptq.awq_model(other, [x.numpy()], weight="w4")
    assert len(ours.scaled) == len(theirs.scaled) >= 4
    for a, b in zip(ours.scaled, theirs.scaled, strict=True):
        assert a.found.alpha == b.found.alpha, str(a)
        assert a.found.before == pytest.approx(b.found.before, rel=1e-3)
        assert a.found.after == pytest.approx(b.found.after, rel=1e-3)
    for a, b in zip(ours.factors, theirs.factors, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run(other, x), before, rtol=1e-4, atol=1e-4)


def test_the_search_of_channel_scales_in_a_recipe():
    model, x = Decoder(tied=False), tokens(32)
    other = exported(model, x, dynamo=True)
    wanted = model(x).detach()

    def error(outputs: Tensor) -> float:
        return float((outputs.detach() - wanted).square().mean())

    recipe = ["fold_norms", {"awq": {"alphas": 4}}, "gptq"]
    ours = bitwright.quantize(model, [x], "w4", recipe=recipe, metric=lambda m: error(m(x)), lower_is_better=True)
    theirs = bitwright.onnx.quantize(
        other, [x.numpy()], "w4", recipe=recipe, lower_is_better=True,
        metric=lambda session: error(torch.from_numpy(session.run(None, {"x": x.numpy()})[0])),
    )  # fmt: skip
    for report in (ours.report, theirs.report):
        assert [outcome.step for outcome in report][2:] == ["fold_norms()", "awq(alphas=4)", "gptq()"]
        assert "groups scaled on 32 samples, output error x 0." in report[3].note
        assert report[3].change > 0  # scaled by the grid of the run's preset
    assert ours.report[3].note == theirs.report[3].note
    with pytest.raises(ConfigError, match=r"awq: there is no option 'alpha'.*use alphas, memory_budget"):
        bitwright.quantize(model, [x], "w4", recipe=[{"awq": {"alpha": 0.5}}])
    with pytest.raises(ConfigError, match=r"step 2 \(smooth\) comes too late: awq relies on it"):
        bitwright.quantize(model, [x], "w4", recipe=["awq", "smooth"])


def test_biases_of_zeros_can_be_added_to_an_onnx_model():
    model = Decoder(tied=False)
    x = tokens(8)
    other = exported(model, x)
    added = onnx_ptq.add_biases(other, x.numpy())
    assert len(added) == 8
    torch.testing.assert_close(run(other, x), model(x), rtol=1e-4, atol=1e-4)
    sim = simulated(other, [x], default_param_bw=4)
    report = onnx_ptq.apply_bias_correction(sim, [x.numpy()] * 8)
    assert len(report.corrected) == 8
    assert not onnx_ptq.add_biases(other, x.numpy())


def test_bad_input_is_named_in_onnx(tmp_path):
    other = exported(small(), X[:2])
    for call in (onnx_ptq.equalize_model, onnx_ptq.fold_norms, onnx_ptq.rotate_model):
        with pytest.raises(ModelError, match=f"{call.__name__}: a str cannot be changed in place. Remedy: load the"):
            call("model.onnx")
    with pytest.raises(CalibrationError, match="smooth: the data held no batch"):
        onnx_ptq.smooth_model(other, [])
    with pytest.raises(CalibrationError, match="awq: the data held no batch"):
        onnx_ptq.awq_model(other, [])
    with pytest.raises(ModelError, match="awq_model: a str cannot be changed in place"):
        onnx_ptq.awq_model("model.onnx", [X.numpy()])
    with pytest.raises(CalibrationError, match="bias correction: the data held no batch"):
        onnx_ptq.apply_bias_correction(simulated(other, [X]), [])
    with pytest.raises(ConfigError, match="layers_to_ignore: there is no layer 'conv9'"):
        onnx_ptq.apply_bias_correction(simulated(other, [X]), [X.numpy()], layers_to_ignore=["conv9"])
    with pytest.raises(CalibrationError, match="the model was run before calibration"):
        onnx_ptq.apply_bias_correction(OnnxSim(other, X[:2].numpy()), [X.numpy()])


# ------------------------------------------------------------------------------------------ trained networks


def equalized_and_corrected(name: str, calibration: Tensor, images: Images) -> tuple[float, float, float, float]:
    """W8A8 with one scale per tensor: float, plain, equalized, and corrected as well, in torch."""
    batches = list(calibration.split(64))
    model = trained(name)
    reference = accuracy(model, images)
    rows = []
    folds = torch_ptq.fold_all_batch_norms(model, dummy_input=calibration[:2])
    for equalize in (False, True):
        if equalize:
            torch_ptq.equalize_model(model, dummy_input=calibration[:2], folds=folds)
        sim = calibrated(TorchSim(model, calibration[:2], preset="w8a8_per_tensor"), batches)
        rows.append(accuracy(sim.model, images))
    torch_ptq.apply_bias_correction(sim, batches)
    return reference, *rows, accuracy(sim.model, images)  # type: ignore[return-value]


@pytest.mark.slow
def test_the_mobilenet_with_disparate_channels_comes_back(cifar, cifar_train):  # type: ignore[no-untyped-def]
    reference, plain, equalized, corrected = equalized_and_corrected(
        "mobilenet_v2_cifar", cifar_train.x[:256], cifar[:1000]
    )
    assert plain < 35  # 23 % with plain fake quantization elsewhere
    assert equalized > reference - 1.0 and corrected > reference - 1.0


@pytest.mark.slow
def test_the_same_mobilenet_as_onnx(cifar, cifar_train):  # type: ignore[no-untyped-def]
    x, images = cifar_train.x[:256], cifar[:1000]
    model = exported(trained("mobilenet_v2_cifar"), x[:2])
    before = run(model, x)
    onnx_ptq.equalize_model(model, x[:2].numpy())
    torch.testing.assert_close(run(model, x), before, rtol=1e-4, atol=1e-4)
    sim = simulated(model, list(x.split(64)), preset="w8a8_per_tensor")
    onnx_ptq.apply_bias_correction(sim, [batch.numpy() for batch in x.split(64)])
    reference = accuracy(trained("mobilenet_v2_cifar"), images)
    assert accuracy(lambda b: torch.from_numpy(sim.run(b.numpy())[0]), images) > reference - 1.0


@pytest.mark.slow
def test_mobilenet_v1_on_photographs_comes_back(imagenet, imagenet_calibration):  # type: ignore[no-untyped-def]
    reference, plain, equalized, corrected = equalized_and_corrected(
        "mobilenet_v1_025", imagenet_calibration.x, imagenet
    )
    assert reference == 56.5 and plain < 2
    assert corrected > max(reference - 1.0, equalized)


@pytest.mark.slow
def test_smoothing_and_rotation_help_the_language_model(shared_data):  # type: ignore[no-untyped-def]
    calib, test = stories("calib")[:, :-1], stories("test")[:64]
    batches = list(calib.split(8))

    def quantized(model: nn.Module) -> float:
        sim = calibrated(TorchSim(model, batches[0][:1]), batches)
        return perplexity(sim.model, test) / perplexity(trained("stories260k"), test)

    model = trained("stories260k")
    plain = quantized(model)
    torch_ptq.rotate_model(model, dummy_input=batches[0][:1])
    assert perplexity(model, test) == pytest.approx(perplexity(trained("stories260k"), test), rel=1e-4)
    torch_ptq.smooth_model(model, batches)
    assert quantized(model) < 1 + 0.9 * (plain - 1)
