"""Recipes on torch modules and ONNX models, end to end on a small network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
from bitwright.errors import CalibrationError, ConfigError
from bitwright.onnx import apply_reconstruction, quantize
from tests.onnx.nets import Net


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 16, 10),
    )  # fmt: skip
    with torch.no_grad():
        model[1].running_var.uniform_(0.01, 4.0)
        model[1].weight.uniform_(0.1, 3.0)
    return model.eval()


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 3, 8, 8, generator=generator) for _ in range(4)]


def error_against(reference, batches):
    """Mean squared error of the outputs: lower is better."""
    wanted = [reference(batch).detach() for batch in batches]

    def metric(model):
        with torch.no_grad():
            return float(np.mean([(model(b) - w).square().mean().item() for b, w in zip(batches, wanted, strict=True)]))

    return metric


def test_each_step_has_its_line_and_the_whole_gains(batches):
    model = network()
    recipe = ["fold", "equalize", {"adaround": {"iterations": 200}}, "bias_correction"]
    result = bitwright.quantize(
        model, iter(batches), "w4a8", recipe=recipe, metric=error_against(model, batches), lower_is_better=True
    )
    assert [o.step for o in result.report][:2] == ["float", "no step"] and len(result.report) == 6
    assert result.metrics["quantized"] == result.report.metric < 0.5 * result.report[1].metric
    assert len(result.folds) == 1 and "1 batch norm folded" in result.report[2].note
    assert result.report[4].change > 0


@pytest.mark.slow_variants("seq_mse")
@pytest.mark.parametrize("step", ["seq_mse", "bias_correction"])
def test_a_step_that_hurts_is_taken_back(batches, step):
    model = network()
    wanted = error_against(model, batches)
    calls = []

    def metric(m):
        calls.append(m)
        return wanted(m) + (1e6 if len(calls) == 4 else 0)

    result = bitwright.quantize(
        model, batches, "w4a8", recipe=["fold", step], metric=metric, lower_is_better=True, on_harm="undo"
    )
    assert not result.report[3].kept and result.report[2].kept
    plain = bitwright.quantize(model, batches, "w4a8", recipe=["fold"])
    for name, site in plain.sim.quantizers.items():
        assert result.sim.quantizers[name].encoding == site.encoding, name
    assert torch.equal(result.model(batches[0]), plain.model(batches[0]))


def test_a_recipe_file(batches, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("recipe:\n- fold\n- gptq: {damping: 0.05}\n")
    result = bitwright.quantize(network(), batches, "w4a8", recipe=path)
    assert [o.step for o in result.report] == ["fold()", "gptq(damping=0.05)"]
    assert all(o.metric is None for o in result.report)


@pytest.mark.slow_variants("default")
@pytest.mark.parametrize("recipe", [None, ["fold"]], ids=["default", "given"])
def test_a_metric_that_is_nan_is_an_error(batches, recipe):
    with pytest.raises(CalibrationError, match="float: the metric is NaN. Remedy: run the metric on the float model"):
        bitwright.quantize(network(), batches, recipe=recipe, metric=lambda m: float("nan"))
    answers = iter([1.0, *[1.0] * (recipe is not None)])
    with pytest.raises(CalibrationError, match="(quantized|fold.*): the metric is NaN"):
        bitwright.quantize(network(), batches, recipe=recipe, metric=lambda m: next(answers, float("nan")))


def test_options_are_checked_before_work(batches):
    with pytest.raises(ConfigError, match="adaround: there is no option 'iters'.*iterations"):
        bitwright.quantize(network(), batches, recipe=[{"adaround": {"iters": 1}}])
    with pytest.raises(ConfigError, match="fold: there is no option 'x'.*it takes none"):
        bitwright.quantize(network(), batches, recipe=[{"fold": {"x": 1}}])


@pytest.fixture
def model():
    net = Net()
    x = net.input("x", (16, 3, 8, 8))
    y = net("Relu", net.bn(net.conv(x, 3, 8, name="c1", bias=False), 8), name="r1")
    y = net("Relu", net.conv(y, 8, 8, name="c2"), name="r2")
    return net.model(net.conv(y, 8, 4, name="c3"))


@pytest.fixture
def arrays():
    generator = np.random.default_rng(1)
    return [generator.standard_normal((16, 3, 8, 8)).astype(np.float32) for _ in range(4)]


def onnx_error_against(model, batches):
    """Mean squared error of the outputs: lower is better."""
    wanted = []

    def metric(session):
        found = [session.run(None, {"x": batch})[0] for batch in batches]
        if not wanted:
            wanted.extend(found)
        return float(np.mean([np.square(f - w).mean() for f, w in zip(found, wanted, strict=True)]))

    return metric


def test_each_step_has_its_line_and_the_whole_gains_onnx(model, arrays):
    recipe = ["fold", "equalize", {"adaround": {"iterations": 200}}, "bias_correction"]
    metric = onnx_error_against(model, arrays)
    result = quantize(model, iter(arrays), "w4a8", recipe=recipe, metric=metric, lower_is_better=True)
    assert [o.step for o in result.report][:2] == ["float", "no step"] and len(result.report) == 6
    assert result.metrics["float"] == 0 and "1 batch norm folded" in result.report[2].note
    assert result.metrics["quantized"] == result.report.metric < 0.5 * result.report[1].metric
    assert result.report[4].change > 0


@pytest.mark.quick_variants("gptq")
@pytest.mark.parametrize("step", ["gptq", "bias_correction"])
def test_a_step_that_hurts_is_taken_back_onnx(model, arrays, step):
    wanted, calls = onnx_error_against(model, arrays), []

    def metric(session):
        calls.append(session)
        return wanted(session) + (1e6 if len(calls) == 4 else 0)

    result = quantize(model, arrays, "w4a8", recipe=["fold", step], metric=metric, lower_is_better=True, on_harm="undo")
    assert [o.kept for o in result.report] == [True, True, True, False]
    plain = quantize(model, arrays, "w4a8", recipe=["fold"])
    for name, site in plain.sim.quantizers.items():
        assert result.sim.quantizers[name].encoding == site.encoding, name
    assert np.array_equal(result.sim.run(arrays[0])[0], plain.sim.run(arrays[0])[0])


def test_a_metric_that_is_nan_is_an_error_onnx(model, arrays):
    for recipe, answers, where in (
        (None, [], "float"), (None, [1.0], "quantized"), (["fold"], [1.0, 1.0], "fold"),
    ):  # fmt: skip
        left = iter(answers)
        with pytest.raises(CalibrationError, match=f"{where}.*: the metric is NaN"):
            quantize(model, arrays, recipe=recipe, metric=lambda session, left=left: next(left, float("nan")))


def test_finished_layers_are_not_computed_again(model, arrays, tmp_path, monkeypatch):
    from bitwright.methods.rounding import gptq

    original, calls = gptq.round_columns, []

    def kernel(*args):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("a crash")
        return original(*args)

    monkeypatch.setattr(gptq, "round_columns", kernel)
    recipe = ["fold", {"gptq": {"cache_dir": str(tmp_path)}}]
    with pytest.raises(ValueError, match="a crash"):
        quantize(model, arrays, "w4a8", recipe=recipe)
    calls[:] = [1] * 3
    quantize(model, arrays, "w4a8", recipe=recipe)
    assert len(calls) == 3 + 1


def test_options_are_checked_before_work_onnx(model, arrays):
    with pytest.raises(ConfigError, match="gptq: there is no option 'dampling'.*damping"):
        quantize(model, arrays, recipe=[{"gptq": {"dampling": 1}}])


def test_a_weight_that_nodes_compute_is_given_back_too(arrays):
    """It is replaced by an initializer of its own; what was computed is then gone from the graph."""
    generator = np.random.default_rng(0)
    net = Net()
    x = net.input("x", (32, 16))
    weight = net("Mul", net("Transpose", net.weights(8, 16, name="w"), perm=[1, 0]), net.const(np.float32(2)))
    model = net.model(net("MatMul", x, weight, name="product"))
    feeds = [generator.standard_normal((32, 16)).astype(np.float32) for _ in range(4)]
    sim = quantize(model, feeds, "w4a8", recipe=["fold"]).sim
    before = sim.run(feeds[0])[0]
    undo = sim.remember(parameters=True)
    apply_reconstruction(sim, feeds, "gptq", progress=False)
    assert not np.array_equal(sim.run(feeds[0])[0], before)
    for _ in range(2):
        undo()
        assert np.array_equal(sim.run(feeds[0])[0], before)
