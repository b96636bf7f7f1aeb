"""Recipes on torch modules, end to end on a small network."""

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
from bitwright.errors import CalibrationError, ConfigError


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
