"""AWQ: the arithmetic against a brute-force evaluation, what is found in transformers, and that the function stays."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.core.numerics.affine import encode, fake_quantize
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.ranges import choose_range_of
from bitwright.core.numerics.spec import Preset, QuantSpec, weight_spec
from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods.layers import Group
from bitwright.methods.scaling.awq import (
    AwqReport,
    Found,
    Inputs,
    Reader,
    Scaled,
    awq,
    channel_scales,
    search_scales,
    weight_rules,
)
from bitwright.torch import TorchView, awq_model
from bitwright.torch.simulation.quantsim import QuantizationSimModel
from tests.methods.transformer import Decoder, tokens
from tests.support.cost import steps
from tests.support.simulations import calibrated

# ------------------------------------------------------------------------------------------------ arithmetic


def rows_with_outliers(n: int = 200, channels: int = 12) -> np.ndarray:
    """Rows, float32, a few channels of which are large."""
    random = np.random.default_rng(0)
    size = np.exp(1.5 * random.standard_normal(channels))
    return (random.standard_normal((n, channels)) * size).astype(np.float32)


def inputs_of(x: np.ndarray, room: int = 1 << 20, parts: int = 4) -> Inputs:
    inputs = Inputs(x.shape[1], room, parts)
    for part in np.array_split(x, parts):
        inputs.add(part)
    return inputs


def int4(matrix: np.ndarray) -> np.ndarray:
    spec = weight_spec("int4", PerChannel(0))
    w = matrix.astype(np.float32)
    return fake_quantize(w, encode(*choose_range_of(w, spec, PerChannel(0)), spec, PerChannel(0)))


def test_scales_follow_the_magnitude_and_are_centred():
    x = np.array([100.0, 1.0, 4.0])
    s = channel_scales(x, 0.5)
    np.testing.assert_allclose(s / s[1], np.sqrt(x))
    assert s.max() * s.min() == pytest.approx(1)
    np.testing.assert_allclose(x / channel_scales(x, 1.0), 10.0)  # all channels alike


@pytest.mark.parametrize(
    "magnitude, expected",
    [([0.0, 4.0, 16.0], [0.5**0.5, 0.5**0.5, 2**0.5]), ([0.0, 0.0, 0.0], [1, 1, 1]), ([3.0], [1])],
    ids=["dead-channel", "all-dead", "one"],
)
def test_channels_without_values_are_harmless(magnitude, expected):
    np.testing.assert_allclose(channel_scales(np.array(magnitude), 0.5), expected)


@pytest.mark.parametrize(
    ("rows", "room"), [(50, 1 << 20), (8, 1 << 20), (20, 20)], ids=["second-moment", "few-rows", "little-room"]
)
def test_energy_is_the_sum_of_squares_over_the_rows(rows, room):
    x = rows_with_outliers(rows)
    inputs = inputs_of(x, room)
    assert (inputs._moment is None) == (rows != 50) and (not inputs._kept) == (rows == 50)
    delta = np.random.default_rng(1).standard_normal((5, 12))
    assert inputs.energy(delta) == pytest.approx(np.square(x.astype(np.float64) @ delta.T).sum(), rel=1e-6)
    np.testing.assert_allclose(inputs.magnitude, np.abs(x).mean(0), rtol=1e-6)


@pytest.mark.parametrize("parts", [3, 400])
def test_no_more_rows_are_kept_than_there_is_room_for(parts):
    x = rows_with_outliers(400)
    inputs = inputs_of(x, 8, parts)
    assert sum(len(rows) for rows in inputs._kept) == 8
    assert {tuple(row) for rows in inputs._kept for row in rows} <= {tuple(row) for row in x}
    np.testing.assert_allclose(inputs.magnitude, np.abs(x).mean(0), rtol=1e-6)  # of all rows all the same


def test_the_search_finds_what_trying_everything_on_the_data_finds():
    x, random = rows_with_outliers(), np.random.default_rng(1)
    weights = [random.standard_normal((7, 12)), random.standard_normal((3, 12))]
    inputs = inputs_of(x)
    found = search_scales(inputs.magnitude, [Reader(W, inputs, int4) for W in weights], alphas=10)

    def brute_force(alpha: float) -> float:
        s = np.abs(x).mean(0) ** alpha if alpha else np.ones(12)
        s = s / np.sqrt(s.max() * s.min())
        wide = x.astype(np.float64)
        wrong = sum(np.square((wide / s) @ int4(W * s).T - wide @ W.T).sum() for W in weights)
        return wrong / sum(np.square(wide @ W.T).sum() for W in weights)

    errors = {i / 10: brute_force(i / 10) for i in range(11)}
    best = min(errors, key=errors.__getitem__)
    assert 0 < best < 1 and found.alpha == best
    assert found.before == pytest.approx(errors[0.0], rel=1e-5)
    assert found.after == pytest.approx(errors[best], rel=1e-5)
    assert found.after < 0.8 * found.before


def test_weights_that_lie_on_their_grid_are_left_alone():
    x, W = rows_with_outliers(), int4(np.random.default_rng(1).standard_normal((7, 12)))
    inputs = inputs_of(x)
    found = search_scales(inputs.magnitude, [Reader(np.float64(W), inputs, int4)])
    assert found.alpha == 0 and found.before == found.after == pytest.approx(0, abs=1e-10)
    np.testing.assert_array_equal(found.scales, 1)


def test_layers_that_read_nothing_but_zeros_are_left_alone():
    inputs = inputs_of(np.zeros((9, 12), np.float32))
    found = search_scales(inputs.magnitude, [Reader(np.ones((2, 12)), inputs, int4)])
    assert (found.alpha, found.before, found.after) == (0, 0, 0)


def test_channels_of_repeated_heads():
    group = Group((), (), (), channels=6, block=3)  # two heads of three channels, each read by two query heads
    s = np.arange(6.0)
    np.testing.assert_array_equal(group.spread(s, 2), [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5])
    np.testing.assert_array_equal(group.gathered(group.spread(s, 2), 2), np.stack((s, s), 1))
    flat = Group((), (), (), channels=3)  # images flattened into rows
    np.testing.assert_array_equal(flat.spread(s[:3], 2), [0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(flat.gathered(np.arange(6), 2), [[0, 1], [2, 3], [4, 5]])


# ---------------------------------------------------------------------------------------------- on a model


def outlier_decoder(norm: str = "rms", rotary: str = "pairs", **options: bool) -> Decoder:
    return Decoder(norm, rotary, tied=False, **options)


@pytest.mark.parametrize("norm", ["rms", "RMSNorm", "LayerNorm"])
def test_groups_are_those_of_a_transformer_block_and_the_function_stays(norm):
    model, x = outlier_decoder(norm, bias=norm == "LayerNorm"), tokens(8)
    before, kept = model(x), copy.deepcopy(model.state_dict())
    report = awq_model(model, [x], weight="w4")
    groups = {str(item.group) for item in (*report.scaled, *report.untouched)}
    assert groups == {
        "norm1 -> q + k + v",
        "norm2 -> gate + up",
        "up -> down",
        "v -> o",
    }  # the output layer is in float
    assert len(report.scaled) >= 3 and report.gain < 1
    assert all(item.found.after < item.found.before and item.found.alpha > 0 for item in report.scaled)
    assert {line.op for line in report.refused}.isdisjoint({"v", "up", "norm1"})
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    report.undo()
    report.undo()
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())


def test_the_report_reads(caplog):
    text = str(awq_model(Decoder(), [tokens(8)], weight="w4"))
    first, *lines = text.splitlines()
    assert "groups scaled on 8 samples, output error x 0." in first and "without a partner" in first
    assert any(line.startswith("  scaled     norm1 -> q + k + v: alpha 0.") for line in lines)
    assert any("of the output's power" in line for line in lines)
    assert "  left       norm: embed also reads" in text or "  left       norm: head also reads" in text
    assert "  left       gate: silu (Silu) reads gate.output[0]" in lines


@pytest.mark.parametrize("weight", ["w4", "w4a16", weight_spec("int4", PerBlock(8)), "mxfp4"], ids=str)
def test_the_error_found_is_the_error_of_the_simulation(weight):
    """What the search promises for the output of one layer is what its simulation shows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64, bias=False)).eval()
    model[0].weight.data = torch.exp(1.5 * torch.randn(32))
    x = torch.randn(256, 32)
    wanted = model(x).detach()
    preset = Preset(weight, None) if isinstance(weight, QuantSpec) else weight
    report = awq_model(model, [x], weight=weight)
    (found,) = (item.found for item in report.scaled)
    sim = QuantizationSimModel(model, x, preset=preset)
    for site in sim.quantizers.values():
        site.enabled = site.role == "weight"
    sim.compute_encodings([x])
    with torch.no_grad():
        error = (sim.model(x) - wanted).square().sum() / wanted.square().sum()
    assert float(error) == pytest.approx(found.after, rel=1e-3)
    assert found.after < 0.9 * found.before


def test_scaling_helps_the_simulation_of_the_whole_model():
    model, x = outlier_decoder(), tokens(32)
    wanted = model(x).detach()

    def error(m):
        sim = calibrated(QuantizationSimModel(m, x, preset="w4"), [x])
        with torch.no_grad():
            return float((sim.model(x) - wanted).square().mean())

    before = error(model)
    awq_model(model, list(x.split(8)), weight="w4")
    assert error(model) < 0.9 * before


def test_a_small_budget_searches_on_some_of_the_rows():
    x = tokens(64)
    full = awq_model(outlier_decoder(), [x], weight="w4")
    some = awq_model(outlier_decoder(), [x], weight="w4", memory_budget=40 * 4 * (3 * 16 + 16 + 24))
    a, b = ({str(item.group): item.found.alpha for item in (*r.scaled, *r.untouched)} for r in (full, some))
    assert a.keys() == b.keys() and all(abs(a[key] - b[key]) <= 0.35 for key in a)


def test_layers_whose_weights_stay_in_float_are_left():
    model, x = outlier_decoder(), tokens(8)
    rules = {"rules": [{"match": "down", "weight": None}, {"match": "q", "weight": None}]}
    report = awq_model(model, [x], weight="w4", config_file=rules)
    reasons = {line.op: line.reason for line in report.refused}
    assert reasons["up"] == "the weights of what reads it stay in float"
    assert "norm1 -> q + k + v" in {str(group) for group in report.groups}  # k and v decide


def test_one_scale_per_tensor_leaves_linear_producers_alone():
    report = awq_model(outlier_decoder(), [tokens(8)], weight=weight_spec("int4", PerTensor()))
    reasons = {line.op: line.reason for line in report.refused}
    assert "so that scales of its output channels would change its own rounding" in reasons["up"]
    assert "per tensor" in reasons["v"]
    assert all(group.producers[0].kind == "norm" for group in report.groups)


def test_fixed_bounds_between_layers_are_a_reason_to_leave_them():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU6(), nn.Linear(8, 3)).eval()
    report = awq_model(model, [torch.randn(16, 6)], weight="w4")
    assert "0: 1 cuts at fixed bounds; equalize it" in map(str, report.refused) and not report.groups


def test_a_model_without_groups_is_not_run():
    def data():
        yield torch.randn(4, 6)
        yield torch.full((4, 6), float("nan"))

    report = awq_model(nn.Sequential(nn.Linear(6, 8), nn.Tanh()).eval(), data())
    assert str(report).startswith("0 groups scaled on 0 samples") and len(report.refused) == 1


def test_without_a_check_the_values_of_attention_are_left():
    model, x = outlier_decoder(), tokens(8)
    report = awq(TorchView(model, [x]), [x], weight_rules("w4"))
    assert "v" in {line.op for line in report.refused}
    assert "v -> o" not in {str(group) for group in report.groups}


def test_what_changes_the_function_is_left():
    model, x = outlier_decoder(), tokens(8)
    before = copy.deepcopy(model.state_dict())
    report = awq(TorchView(model, [x]), [x], weight_rules("w4"), lambda: "its output differs")
    assert not report.scaled and "v: with it, its output differs" in str(report)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_an_interruption_leaves_the_model_as_it_was():
    model, x = outlier_decoder(), tokens(8)
    before = copy.deepcopy(model.state_dict())

    def interrupted(items, title):
        if title == "searching scales":
            raise KeyboardInterrupt
        return items

    with pytest.raises(KeyboardInterrupt):
        awq(TorchView(model, [x]), [x], weight_rules("w4"), lambda: None, bar=interrupted)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_cost_is_linear_in_depth():
    def deep(blocks: int) -> nn.Module:
        torch.manual_seed(0)
        layers = (m for _ in range(blocks) for m in (nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh()))
        return nn.Sequential(*layers).eval()

    def work(blocks: int) -> int:
        model, x = deep(blocks), torch.randn(16, 4)
        return steps(lambda: awq_model(model, [x], weight="w4", alphas=2))

    small, large = work(20), work(80)
    assert large < 4.6 * small


def test_bad_input_is_named(caplog):
    model = outlier_decoder()
    with pytest.raises(ConfigError, match="alphas: it is 0. Remedy: give the number of steps of the grid"):
        awq_model(model, [tokens()], alphas=0)
    with pytest.raises(CalibrationError, match="awq: the data held no batch. Remedy: give about 128 samples"):
        awq_model(model, [])
    with pytest.raises(ConfigError, match="preset 'w4a17': there is no preset of this name.*w4a16"):
        awq_model(model, [tokens()], weight="w4a17")
    with pytest.raises(ConfigError, match="memory_budget: 1000 bytes hold 2 rows.*Remedy: give .* bytes"):
        awq_model(model, [tokens()], memory_budget=1000)
    awq_model(model, [tokens(2)])
    assert "awq: 2 samples may miss the outliers; 128 are enough" in caplog.text
    model.norm1.weight.data[3] = float("nan")
    with pytest.raises(CalibrationError, match=r"norm1.output\[0\]: channel 3 is NaN or infinite on this data"):
        awq_model(model, [tokens()])


def test_an_error_that_is_gone_counts_as_a_small_one():
    """A geometric mean has no zeros."""
    found = [Found(0.5, np.ones(2), 1.0, after) for after in (0.0, 1.0)]
    rows = tuple(Scaled(SimpleNamespace(), each) for each in found)
    assert AwqReport(scaled=rows).gain == pytest.approx(1e-6)
    assert AwqReport(scaled=(Scaled(SimpleNamespace(), Found(0.5, np.ones(2), 0.0, 0.0)),)).gain == 1.0


def test_an_ended_search_goes_on(tmp_path, monkeypatch):
    """Scales of a killed search are taken as they were found, and what only other groups read is not collected again."""
    module, calls = sys.modules[awq.__module__], []
    original, observed = module._search, module._observed

    def search(*args):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("a crash")
        return original(*args)

    def observe(view, layers, groups, wanted, *args):
        collected.append((len(groups), len(wanted)))
        return observed(view, layers, groups, wanted, *args)

    def run(**options):
        model = Decoder()
        return awq_model(model, [tokens(8), tokens(8)], weight="w4", alphas=3, progress=False, **options), model

    collected: list[tuple[int, int]] = []
    whole, by_itself = run()
    monkeypatch.setattr(module, "_search", search)
    monkeypatch.setattr(module, "_observed", observe)
    calls.clear()
    with pytest.raises(ValueError, match="a crash"):
        run(cache_dir=tmp_path)
    report, model = run(cache_dir=tmp_path)
    total = collected[0][0]
    assert collected == [(total, total), (total, total - 1)] and len(calls) == 2 + total - 1
    assert str(report) == str(whole)
    assert all(map(torch.equal, model.parameters(), by_itself.parameters()))
    run(cache_dir=tmp_path)
    assert len(collected) == 2 and len(calls) == 2 + total - 1
