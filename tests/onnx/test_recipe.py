"""Recipes on ONNX models, end to end on a small network."""

import numpy as np
import pytest

from bitwright.errors import CalibrationError, ConfigError
from bitwright.onnx import apply_reconstruction, quantize
from tests.onnx.nets import Net


@pytest.fixture
def model():
    net = Net()
    x = net.input("x", (16, 3, 8, 8))
    y = net("Relu", net.bn(net.conv(x, 3, 8, name="c1", bias=False), 8), name="r1")
    y = net("Relu", net.conv(y, 8, 8, name="c2"), name="r2")
    return net.model(net.conv(y, 8, 4, name="c3"))


@pytest.fixture
def batches():
    generator = np.random.default_rng(1)
    return [generator.standard_normal((16, 3, 8, 8)).astype(np.float32) for _ in range(4)]


def error_against(model, batches):
    """Mean squared error of the outputs: lower is better."""
    wanted = []

    def metric(session):
        found = [session.run(None, {"x": batch})[0] for batch in batches]
        if not wanted:
            wanted.extend(found)
        return float(np.mean([np.square(f - w).mean() for f, w in zip(found, wanted, strict=True)]))

    return metric


def test_each_step_has_its_line_and_the_whole_gains(model, batches):
    recipe = ["fold", "equalize", {"adaround": {"iterations": 200}}, "bias_correction"]
    metric = error_against(model, batches)
    result = quantize(model, iter(batches), "w4a8", recipe=recipe, metric=metric, lower_is_better=True)
    assert [o.step for o in result.report][:2] == ["float", "no step"] and len(result.report) == 6
    assert result.metrics["float"] == 0 and "1 batch norm folded" in result.report[2].note
    assert result.metrics["quantized"] == result.report.metric < 0.5 * result.report[1].metric
    assert result.report[4].change > 0


@pytest.mark.quick_variants("gptq")
@pytest.mark.parametrize("step", ["gptq", "bias_correction"])
def test_a_step_that_hurts_is_taken_back(model, batches, step):
    wanted, calls = error_against(model, batches), []

    def metric(session):
        calls.append(session)
        return wanted(session) + (1e6 if len(calls) == 4 else 0)

    result = quantize(
        model, batches, "w4a8", recipe=["fold", step], metric=metric, lower_is_better=True, on_harm="undo"
    )
    assert [o.kept for o in result.report] == [True, True, True, False]
    plain = quantize(model, batches, "w4a8", recipe=["fold"])
    for name, site in plain.sim.quantizers.items():
        assert result.sim.quantizers[name].encoding == site.encoding, name
    assert np.array_equal(result.sim.run(batches[0])[0], plain.sim.run(batches[0])[0])


def test_a_metric_that_is_nan_is_an_error(model, batches):
    for recipe, answers, where in (
        (None, [], "float"), (None, [1.0], "quantized"), (["fold"], [1.0, 1.0], "fold"),
    ):  # fmt: skip
        left = iter(answers)
        with pytest.raises(CalibrationError, match=f"{where}.*: the metric is NaN"):
            quantize(model, batches, recipe=recipe, metric=lambda session, left=left: next(left, float("nan")))


def test_finished_layers_are_not_computed_again(model, batches, tmp_path, monkeypatch):
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
        quantize(model, batches, "w4a8", recipe=recipe)
    calls[:] = [1] * 3
    quantize(model, batches, "w4a8", recipe=recipe)
    assert len(calls) == 3 + 1


def test_options_are_checked_before_work(model, batches):
    with pytest.raises(ConfigError, match="gptq: there is no option 'dampling'.*damping"):
        quantize(model, batches, recipe=[{"gptq": {"dampling": 1}}])


def test_a_weight_that_nodes_compute_is_given_back_too(batches):
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
