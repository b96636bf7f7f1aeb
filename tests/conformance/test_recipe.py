"""Recipes on torch modules and ONNX models, end to end on a small network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
from bitwright.errors import CalibrationError, ConfigError
from bitwright.onnx import apply_reconstruction
from tests.onnx.nets import Net


@dataclass
class Case:
    """A model, four batches for it, and its outputs for a batch: those of a module or of a session."""

    model: Any
    batches: list[Any]
    run: Callable[[Any, Any], np.ndarray]

    def error(self) -> Callable[[Any], float]:
        """Mean squared error of the outputs against those of the first model that it is asked for: lower is better."""
        wanted: list[np.ndarray] = []

        def metric(model: Any) -> float:
            found = [self.run(model, batch) for batch in self.batches]
            if not wanted:
                wanted.extend(found)
            return float(np.mean([np.square(f - w).mean() for f, w in zip(found, wanted, strict=True)]))

        return metric

    def outputs(self, result: Any) -> np.ndarray:
        sim, x = result.sim, self.batches[0]
        return sim.run(x)[0] if isinstance(x, np.ndarray) else sim.model(x).detach().numpy()


@pytest.fixture(params=["torch", "onnx"])
def case(request):
    if request.param == "onnx":
        net, generator = Net(), np.random.default_rng(1)
        y = net("Relu", net.bn(net.conv(net.input("x", (16, 3, 8, 8)), 3, 8, name="c1", bias=False), 8), name="r1")
        y = net("Relu", net.conv(y, 8, 8, name="c2"), name="r2")
        batches = [generator.standard_normal((16, 3, 8, 8)).astype(np.float32) for _ in range(4)]
        return Case(net.model(net.conv(y, 8, 4, name="c3")), batches, lambda session, x: session.run(None, {"x": x})[0])
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 16, 10),
    ).eval()  # fmt: skip
    with torch.no_grad():
        model[1].running_var.uniform_(0.01, 4.0)
        model[1].weight.uniform_(0.1, 3.0)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(16, 3, 8, 8, generator=generator) for _ in range(4)]
    return Case(model, batches, lambda model, x: model(x).detach().numpy())


def test_each_step_has_its_line_and_the_whole_gains(case):
    recipe = ["fold", "equalize", {"adaround": {"iterations": 200}}, "bias_correction"]
    result = bitwright.quantize(
        case.model, iter(case.batches), "w4a8", recipe=recipe, metric=case.error(), lower_is_better=True
    )
    assert [o.step for o in result.report][:2] == ["float", "no step"] and len(result.report) == 6
    assert result.metrics["float"] == 0 and "1 batch norm folded" in result.report[2].note and len(result.folds) == 1
    assert result.metrics["quantized"] == result.report.metric < 0.5 * result.report[1].metric
    assert result.report[4].change > 0


@pytest.mark.parametrize("step", ["seq_mse", "gptq", "bias_correction"])
def test_a_step_that_hurts_is_taken_back(case, step):
    wanted, calls = case.error(), []

    def metric(model):
        calls.append(model)
        return wanted(model) + (1e6 if len(calls) == 4 else 0)

    result = bitwright.quantize(
        case.model, case.batches, "w4a8", recipe=["fold", step], metric=metric, lower_is_better=True, on_harm="undo"
    )
    assert [o.kept for o in result.report] == [True, True, True, False]
    plain = bitwright.quantize(case.model, case.batches, "w4a8", recipe=["fold"])
    for name, site in plain.sim.quantizers.items():
        assert result.sim.quantizers[name].encoding == site.encoding, name
    assert np.array_equal(case.outputs(result), case.outputs(plain))


def test_a_recipe_file(case, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("recipe:\n- fold\n- gptq: {damping: 0.05}\n")
    result = bitwright.quantize(case.model, case.batches, "w4a8", recipe=path)
    assert [o.step for o in result.report] == ["fold()", "gptq(damping=0.05)"]
    assert all(o.metric is None for o in result.report)


@pytest.mark.parametrize(
    "recipe, answers, where",
    [
        (None, [], "float: the metric is NaN. Remedy: run the metric on the float model"),
        (None, [1.0], "quantized.*: the metric is NaN"),
        (["fold"], [1.0, 1.0], "fold.*: the metric is NaN"),
    ],
    ids=["float", "quantized", "step"],
)
def test_a_metric_that_is_nan_is_an_error(case, recipe, answers, where):
    left = iter(answers)
    with pytest.raises(CalibrationError, match=where):
        bitwright.quantize(case.model, case.batches, recipe=recipe, metric=lambda model: next(left, float("nan")))


def test_options_are_checked_before_work(case):
    for step, options, message in (
        ("adaround", {"iters": 1}, "adaround: there is no option 'iters'.*iterations"),
        ("gptq", {"dampling": 1}, "gptq: there is no option 'dampling'.*damping"),
        ("fold", {"x": 1}, "fold: there is no option 'x'.*it takes none"),
    ):
        with pytest.raises(ConfigError, match=message):
            bitwright.quantize(case.model, case.batches, recipe=[{step: options}])


def test_finished_layers_are_not_computed_again(case, tmp_path, monkeypatch, caplog):
    from bitwright.methods.rounding import gptq

    original, calls = gptq.round_columns, []

    def kernel(*args):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("a crash")
        return original(*args)

    def quantized(batches, crash=False):
        calls[:] = [] if crash else [1] * 3
        found = bitwright.quantize(case.model, batches, "w4a8", recipe=recipe, work_dir=work)
        return case.outputs(found), str(found.report), len(calls) - 3

    monkeypatch.setattr(gptq, "round_columns", kernel)
    recipe, work = ["fold", {"gptq": {"refit": 0}}], tmp_path / "work"  # one rounding of each layer
    whole = quantized(case.batches)
    assert whole[2] == 3 and not work.exists()
    with pytest.raises(ValueError, match="a crash"):
        quantized(case.batches, crash=True)
    again = quantized(case.batches)
    assert np.array_equal(whole[0], again[0]) and whole[1] == again[1] and again[2] == 1
    assert not work.exists()
    with pytest.raises(ValueError, match="a crash"):
        quantized(case.batches, crash=True)
    assert "starting anew" not in caplog.text
    assert quantized([2 * batch for batch in case.batches])[2] == 3
    assert f"{work / '01-gptq'}: none of its 2 finished layers or blocks is of this model, these data" in caplog.text


def test_a_weight_that_nodes_compute_is_given_back_too():
    """It is replaced by an initializer of its own; what was computed is then gone from the graph."""
    generator = np.random.default_rng(0)
    net = Net()
    x = net.input("x", (32, 16))
    weight = net("Mul", net("Transpose", net.weights(8, 16, name="w"), perm=[1, 0]), net.const(np.float32(2)))
    model = net.model(net("MatMul", x, weight, name="product"))
    feeds = [generator.standard_normal((32, 16)).astype(np.float32) for _ in range(4)]
    sim = bitwright.quantize(model, feeds, "w4a8", recipe=["fold"]).sim
    before = sim.run(feeds[0])[0]
    undo = sim.remember(parameters=True)
    apply_reconstruction(sim, feeds, "gptq", progress=False)
    assert not np.array_equal(sim.run(feeds[0])[0], before)
    for _ in range(2):
        undo()
        assert np.array_equal(sim.run(feeds[0])[0], before)
