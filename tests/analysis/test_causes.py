"""A fault planted in one layer is named first, with its cause; what helps is measured, on a simulation of its own."""

from __future__ import annotations

import copy
import dataclasses
import re

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
import bitwright.onnx
from bitwright import PRESETS, PerTensor
from bitwright.analysis import causes as remedies
from bitwright.analysis.causes import CAUSES, REMEDIES, _enlarged_by
from bitwright.analysis.layer_errors import LayerErrors, Ratio, _count_choices
from bitwright.analysis.result import Cause
from bitwright.core.numerics.formats import IntFormat
from bitwright.torch import QuantizationSimModel
from tests.analysis.conftest import Net, batches, exported, make
from tests.support.plant import PLANTS, layer_sites
from tests.support.simulations import calibrated


@pytest.mark.parametrize("kind", PLANTS)
def test_a_planted_fault_is_named_first_with_its_cause(case, kind):
    plant = PLANTS[kind]
    sites = layer_sites(case.sim, weight=plant.weight)
    op = case.conv2 if plant.weight else next(op for op, site in sites.items() if site.role == "output")
    plant.apply(case.sim, sites[op], case.data)
    worst = bitwright.analyze(case.sim, case.data).worst(1)[0]
    assert worst.name == op
    assert worst.causes[0].cause in plant.causes and worst.causes[0].cause in CAUSES
    assert sites[op].name in worst.causes[0].text, "the sentence names the place"
    assert all(key in REMEDIES for key in worst.causes[0].evidence["tries"])


@pytest.mark.parametrize("kind", PLANTS)
def test_the_remedy_of_a_planted_fault_is_measured_and_the_simulation_is_as_before(case, kind):
    plant = PLANTS[kind]
    sites = layer_sites(case.sim, weight=plant.weight)
    op = case.conv2 if plant.weight else next(op for op, site in sites.items() if site.role == "output")
    plant.apply(case.sim, sites[op], case.data)
    found = bitwright.analyze(case.sim, case.data)
    before = {name: (site.enabled, site.encoding, site.spec) for name, site in case.sim.quantizers.items()}
    rows = found.try_remedies(1)
    assert before == {name: (s.enabled, s.encoding, s.spec) for name, s in case.sim.quantizers.items()}
    best = next(row for row in rows if row.kept)
    assert best.layers == (op,) and best.after_db > best.before_db + 1 == pytest.approx(found.output["sqnr_db"] + 1)
    assert found.to_dict()["remedies"][0]["layers"] == [op]
    assert f"{best.after_db:.1f} dB, kept" in str(found)


def test_remedies_that_are_kept_stay_in_the_simulation():
    case = make("torch")
    sites = layer_sites(case.sim, weight=False)
    site = next(site for site in sites.values() if site.role == "output")
    PLANTS["range too wide"].apply(case.sim, site, case.data)
    found = bitwright.analyze(case.sim, case.data, "kl")
    rows = found.try_remedies(1, keep=True)
    best = next(row for row in rows if row.kept)
    again = bitwright.analyze(case.sim, case.data, "kl", mode="fast")
    assert again.output["sqnr_db"] == pytest.approx(best.after_db, abs=1e-6)
    assert again.metric.quantized == pytest.approx(best.metric_after)
    assert best.metric_after < best.metric_before


@pytest.mark.parametrize("keep", [False, True])
def test_after_the_deadline_no_remedy_is_begun_and_each_is_named(keep, monkeypatch):
    """The first layer's first remedy is measured and judged; what was not begun in time stands in the notes."""
    case = make("torch")
    sites = layer_sites(case.sim, weight=False)
    site = next(site for site in sites.values() if site.role == "output")
    PLANTS["range too wide"].apply(case.sim, site, case.data)
    found = bitwright.analyze(case.sim, case.data)
    before = {name: (site.enabled, site.encoding, site.spec) for name, site in case.sim.quantizers.items()}
    assert found.try_remedies(2, keep=keep, deadline=1e-9) == ()
    assert before == {name: (s.enabled, s.encoding, s.spec) for name, s in case.sim.quantizers.items()}
    late = {note for note in found.notes if note.endswith("was not tried: the deadline of 1e-09 s was over")}

    now = [0.0]
    monkeypatch.setattr("bitwright.methods.switching.time.monotonic", lambda: now[0])
    apply = remedies._apply

    def slow(*given):
        now[0] += 10.0
        return apply(*given)

    monkeypatch.setattr(remedies, "_apply", slow)
    rows = found.try_remedies(2, keep=keep, deadline=5.0)
    assert len([row for row in rows if " at " in row.remedy]) == 1, "the one that ran is finished, and judged"
    assert [note for note in found.notes if note.endswith("was not tried: the deadline of 5 s was over")]
    assert len(late) >= len(rows), "what was tried now was named then"
    after = {name: (s.enabled, s.encoding, s.spec) for name, s in case.sim.quantizers.items()}
    assert (before == after) == (not (keep and rows[0].kept))
    with pytest.raises(bitwright.ConfigError, match="deadline: -1 is not a time"):
        found.try_remedies(1, deadline=-1)


def test_an_analysis_from_a_file_has_nothing_to_try(torch_case):
    found = bitwright.analyze(torch_case.sim, torch_case.data, mode="fast")
    copy = type(found).from_dict(found.to_dict())
    with pytest.raises(bitwright.ConfigError, match="was read from a file and has no simulation"):
        copy.try_remedies()
    with pytest.raises(bitwright.ConfigError, match="0 layers are none"):
        found.try_remedies(0)


def causes(model, data, **options):
    sim = calibrated(QuantizationSimModel(model.eval(), data[0], **options), data)
    return sim, bitwright.analyze(sim, data)


def analysed(front_end, model, data):
    """A quick analysis of a model, quantized by either front end."""
    if front_end == "torch":
        sim = QuantizationSimModel(model, data[0])
    else:
        proto, data = exported(model, data[0]), [x.numpy() for x in data]
        sim = bitwright.onnx.QuantizationSimModel(proto, data[0])
    sim.compute_encodings(data, progress=False)
    return bitwright.analyze(sim, data, mode="fast")


def named(found, key):
    return [layer.name for layer in found.layers if any(cause.cause == key for cause in layer.causes)]


def test_disparate_channels_on_one_scale_are_named_and_one_scale_per_channel_helps():
    model = Net()
    with torch.no_grad():
        model.conv2.weight *= torch.logspace(-2, 1, 8)[:, None, None, None]
    preset = PRESETS["w8a8"]
    preset = dataclasses.replace(preset, weight=dataclasses.replace(preset.weight, granularity=PerTensor()))
    sim, found = causes(model, batches(), preset=preset)
    assert "conv2" in named(found, "disparate_channels")
    cause = next(c for row in found.layers if row.name == "conv2" for c in row.causes)
    assert cause.evidence["tries"] == ["per_channel", "equalize"] and cause.evidence["ratio"] > 8


class Outliers(nn.Module):
    """An attention whose input has a channel far larger than the others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        with torch.no_grad():
            self.norm.weight[3] = 60.0

    def forward(self, x):
        y = self.norm(x)
        scores = self.q(y) @ self.k(y).transpose(1, 2) / 4
        return x + torch.softmax(scores, -1) @ self.v(y)


def test_outlier_channels_before_an_attention_are_named():
    generator = torch.Generator().manual_seed(0)
    sim, found = causes(Outliers(), [torch.randn(8, 12, 16, generator=generator) for _ in range(4)])
    worst = found.worst(1)[0]
    assert worst.name in ("q", "k", "v")  # they read it, on one grid
    assert worst.causes[0].cause == "outlier_channels"
    assert worst.causes[0].evidence["channel"] == 3 and worst.causes[0].evidence["ratio"] > 20
    assert any(row.kept and row.after_db > row.before_db + 2 for row in found.try_remedies(1))


class Denoiser(nn.Module):
    """A small U-Net with a final 1x1 convolution, whose output is the picture itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.down, self.deep = nn.Conv2d(1, 8, 3, 2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(9, 1, 1)
        with torch.no_grad():
            self.last.weight[:, :8] *= 0.1
            self.last.weight[:, 8] = 1.0

    def forward(self, x):
        y = self.up(torch.relu(self.deep(torch.relu(self.down(x)))))
        return self.last(torch.cat([y, x], 1))


def test_the_last_convolution_of_a_denoiser_is_named():
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(8, 1, 16, 16, generator=generator) ** 3 for _ in range(4)]
    sim, found = causes(Denoiser(), data)
    assert "last" in [layer.name for layer in found.worst(3)]
    row = next(layer for layer in found.layers if layer.name == "last")
    assert "output_grid" in [cause.cause for cause in row.causes]


class Spectrum(nn.Module):
    """A short-time Fourier transform as convolutions, power, bands, logarithm, and a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        n = torch.arange(32.0)
        angles = 2 * torch.pi * torch.arange(17.0)[:, None] * n / 32
        self.register_buffer("real", torch.cos(angles)[:, None])
        self.register_buffer("imaginary", torch.sin(angles)[:, None])
        self.bands, self.layer = nn.Conv1d(17, 8, 1, bias=False), nn.Conv1d(8, 4, 1)
        with torch.no_grad():
            self.bands.weight.abs_()

    def forward(self, x):
        real, imaginary = (nn.functional.conv1d(x, w, stride=16) for w in (self.real, self.imaginary))
        power = real * real + imaginary * imaginary
        return self.layer(torch.log(self.bands(power) + 1e-2))


def test_the_power_of_a_spectrum_front_end_is_named_where_a_rule_gives_it_a_grid():
    generator = torch.Generator().manual_seed(0)
    loudness = torch.logspace(-2, 1, 8)[:, None, None]
    tone = torch.sin(torch.arange(256.0) * 0.7)
    data = [loudness * (tone + 0.2 * torch.randn(8, 1, 256, generator=generator)) for _ in range(4)]
    asked = {"rules": [{"match": name, "output": {"quantized": True}} for name in ("add", "conv1d", "conv1d_1")]}
    sim, found = causes(Spectrum(), data, config_file=asked)
    worst = found.worst(1)[0]
    assert worst.name == "add"  # it makes the power
    assert worst.causes[0].cause in ("few_codes", "outlier_channels")


def test_a_wide_softmax_input_is_named():
    class Sharp(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return torch.softmax(40 * self.a(x), -1) * self.b(x)

    generator = torch.Generator().manual_seed(0)
    sim, found = causes(Sharp(), [torch.randn(32, 8, generator=generator) for _ in range(2)])
    assert found.worst(3), found
    assert np.isfinite(found.output["sqnr_db"])


def test_a_layer_without_a_fault_is_told_that_its_width_makes_the_error(torch_case):
    found = bitwright.analyze(torch_case.sim, torch_case.data)
    plain = [layer.causes[0] for layer in found.layers if layer.causes and layer.causes[0].cause == "rounding"]
    assert plain and plain[0].text.endswith(": No anomaly: this is plain 8-bit rounding error.")
    assert plain[0].evidence["tries"] and plain[0].remedy


def test_few_values_do_not_count_as_few_codes():
    """16 numbers cannot use 256 codes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    _, found = causes(model, [torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) for _ in range(2)])
    assert not named(found, "few_codes")
    assert all(row.codes_used is None for row in found.sites if row.role == "weight")


class Wide(nn.Module):
    """A function between two linear layers, at quantizers that hold its operands and its result on grids."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x):
        return self.b(self.function(self.a(x)))


def _rows(*sizes, count=3):
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor(sizes)[None, :, None]
    return [scale * torch.randn(16, len(sizes), 8, generator=generator) for _ in range(count)]


def test_positions_of_unlike_size_on_one_grid_are_named():
    _, found = causes(Wide(torch.relu), _rows(0.02, 0.02, 0.02, 5.0))
    assert "a" in named(found, "uneven_positions") or "relu" in named(found, "uneven_positions")
    text = next(c.text for layer in found.layers for c in layer.causes if c.cause == "uneven_positions")
    assert "times the median position, and one grid holds all" in text


def test_a_reciprocal_that_a_rule_puts_on_a_grid_is_named():
    asked = {"rules": [{"match": "mul", "input": {"quantized": True}}]}
    model = Wide(lambda x: x * (x.abs() + 1e-3).reciprocal())
    _, found = causes(model, _rows(1.0, 1.0), config_file=asked)
    cause = next(c for layer in found.layers for c in layer.causes if c.cause == "reciprocal")
    assert "a reciprocal made by reciprocal" in cause.text
    assert cause.evidence["tries"] == ["16_bits"]


def test_a_join_of_unlike_values_is_named():
    _, found = causes(Wide(lambda x: torch.cat([x[..., :4].sigmoid(), 300 * x[..., 4:]], -1)), _rows(1.0, 1.0))
    assert "cat" in named(found, "unlike_join")
    text = next(c.text for layer in found.layers for c in layer.causes if c.cause == "unlike_join")
    assert "cat joins values that reach" in text


def test_a_difference_of_nearly_equal_values_is_named():
    class Near(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.load_state_dict(self.a.state_dict())
            with torch.no_grad():
                self.b.bias += 0.01

        def forward(self, x):
            return torch.tanh(self.a(x) - self.b(x))

    _, found = causes(Near(), _rows(1.0, 1.0))
    assert {"a", "b"} & set(named(found, "difference"))
    assert found.output["sqnr_db"] < 20
    assert found.remedies and found.remedies[0].after_db > found.remedies[0].before_db  # tried without being asked


def test_heavy_tails_are_named():
    data = _rows(1.0, 1.0)
    for batch in data:
        batch[0, 0] *= 40
    _, found = causes(Wide(torch.relu), data)
    assert named(found, "heavy_tails")
    text = next(c.text for layer in found.layers for c in layer.causes if c.cause == "heavy_tails")
    assert "times the root mean square" in text


def test_an_error_that_what_follows_enlarges_is_told_with_both_figures():
    """A power of eight makes a relative error eight times as large, 18 dB."""

    def eighth(x):
        x = x * x
        x = x * x
        return x * x

    float_products = {"rules": [{"match": "*", "op": "Mul", "output": None}]}
    _, found = causes(Wide(eighth), _rows(1.0, 1.0), config_file=float_products)
    assert "a" in named(found, "enlarged")
    cause = next(c for layer in found.layers for c in layer.causes if c.cause == "enlarged" and layer.name == "a")
    assert cause.evidence["here_db"] > cause.evidence["outputs_db"] + 6
    assert "and the layers that follow make" in cause.text
    assert cause.evidence["most_at"] in ("mul", "mul_1", "mul_2"), (
        "a square makes a relative error twice as large, 6 dB"
    )
    assert f"most at {cause.evidence['most_at']}, which" in cause.text


class Masked(nn.Module):
    """An attention whose scores are large, so that each row looks at one or two keys, behind a mask by the smallest number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mask", torch.full((4, 4), torch.finfo(torch.float32).min).triu(1))

    def forward(self, x):
        scores = 200 * self.q(x) @ self.k(x).transpose(1, 2) + self.mask
        return torch.softmax(scores, -1) @ self.v(x)


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_a_softmax_behind_a_mask_is_told_with_the_error_of_the_scores_that_count(front_end):
    data = _rows(1.0, 1.0, 1.0, 1.0)
    model = Masked().eval()
    found = analysed(front_end, model, data)
    softmax = next(layer for layer in found.layers if layer.op == "Softmax")
    assert 10 < softmax.arrived_db < 60, "the mask is no signal"
    enlarged = [c for layer in found.layers for c in layer.causes if c.evidence.get("most_at") == softmax.name]
    assert enlarged and f"which {softmax.arrived_db:.1f} dB reach" in enlarged[0].text
    assert "exp makes a factor of" in enlarged[0].text


class Splines(nn.Module):
    """A layer of a Kolmogorov-Arnold network: linear in the values of B-splines, by the recursion of Cox and de Boor."""

    def __init__(self, inputs: int = 8, outputs: int = 8, order: int = 3, cells: int = 5):
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.register_buffer("knots", torch.arange(-order, cells + order + 1) * 2.0 / cells - 1)
        self.weight = nn.Parameter(torch.randn(outputs, inputs * (cells + order)))

    def forward(self, x):
        x, t = x.unsqueeze(-1), self.knots
        bases = ((x >= t[:-1]) & (x < t[1:])).float()
        for k in range(1, self.order + 1):
            up = (x - t[: -k - 1]) / (t[k:-1] - t[: -k - 1]) * bases[..., :-1]
            bases = up + (t[k + 1 :] - x) / (t[k + 1 :] - t[1:-k]) * bases[..., 1:]
        return nn.functional.linear(bases.flatten(-2), self.weight)


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_a_product_that_keeps_small_values_with_the_errors_of_large_ones_is_named(front_end):
    """Distances to all knots are on one grid, and a base is zero but for the nearest ones."""
    data, model = [torch.rand(16, 8) * 2 - 1 for _ in range(2)], Splines().eval()
    found = analysed(front_end, model, data)
    told = [c for layer in found.layers for c in layer.causes if "its other factor is small" in c.text]
    assert told and all(c.cause == "enlarged" for c in told)
    named_at = {layer.name: layer for layer in found.layers}
    assert all(named_at[c.evidence["most_at"]].op == "Mul" for c in told)


class Chosen(nn.Module):
    """Rows choose an expert by a score, by the best of it or the best two, and get what it holds."""

    def __init__(self, count: int = 1):
        super().__init__()
        torch.manual_seed(0)
        self.count, self.a, self.scores = count, nn.Linear(8, 16), nn.Linear(16, 12)
        self.experts = nn.Parameter(torch.randn(12, 6))

    def forward(self, x):
        scores = self.scores(torch.tanh(self.a(x)))
        if self.count == 1:
            return self.experts[scores.argmax(-1)]
        held, chosen = scores.topk(self.count)
        return (torch.softmax(held, -1)[..., None] * self.experts[chosen]).sum(-2)


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
@pytest.mark.parametrize("count", [1, 2], ids=["best", "best two"])
def test_choices_that_differ_from_those_of_the_float_model_are_named_with_what_they_cost(front_end, count):
    """No estimate by derivatives shows them: a choice has none."""
    data, model = [x.flatten(0, 1) for x in _rows(*[1.0] * 16)], Chosen(count).eval()
    found = analysed(front_end, model, data)
    layers = {layer.name: layer for layer in found.layers if any(c.cause == "choice" for c in layer.causes)}
    assert {layer.op for layer in layers.values()} & {"ArgMax", "argmax", "TopK"}
    (note,) = [note for note in found.notes if note.startswith("choices that differ")]
    kept, lost = (float(n) for n in re.search(r"batches are at (-?[0-9.]+) dB, not (-?[0-9.]+) dB", note).groups())
    assert kept > lost + 3 and kept > 30, "with the same choices only the rounding of scores and experts is left"
    assert any(f"They differ at {name}" in note for name in layers) and "(step widen)" in note


def test_the_order_of_choices_made_together_and_equal_choices_are_no_difference():
    errors, scores = LayerErrors("TopK"), torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    held, picked = scores.topk(2)
    _count_choices(errors, scores, (held, picked), (held.flip(-1), picked.flip(-1)))
    assert (errors.decided, errors.changed) == (4, 0)
    _count_choices(errors, scores, (held, picked), (held, torch.tensor([[0, 2], [2, 1]])))
    assert (errors.decided, errors.changed) == (8, 1)
    alone = LayerErrors("argsort")
    _count_choices(alone, scores, (picked,), (picked.flip(-1),))
    assert (alone.decided, alone.changed) == (4, 4), "without the values nothing tells that they were chosen together"
    _count_choices(alone, scores, (picked,), (picked[:1],))
    assert alone.changed == 8, "another number of choices"


def test_small_values_that_are_picked_from_a_grid_with_large_ones_are_named():
    """A class token that is small beside the patches: the join and what picks the token again are told."""

    class Token(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.token, self.a, self.head = nn.Parameter(torch.randn(1, 1, 8) * 0.05), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            rows = torch.cat([self.token.expand(len(x), -1, -1), self.a(x) * 4], 1)
            rows = rows + 0.1 * rows.mean(1, keepdim=True).tanh() * self.token
            return self.head(nn.functional.layer_norm(rows[:, 0], (8,)))

    _, found = causes(Token(), _rows(1.0, 1.0))
    texts = [c.text for layer in found.layers for c in layer.causes]
    assert named(found, "unlike_join") and any("among large ones" in text for text in texts)


@pytest.mark.parametrize(("noise", "told"), [(0.5, True), (0.01, False)], ids=["arrives", "cancels"])
def test_a_factor_is_named_only_where_its_errors_arrive(noise, told):
    """Sums of a linear attention are zero together with their divisor: one over it alone would make any error huge."""
    errors = LayerErrors("Div", operands={0: Ratio(1.0, 1000.0, 10)}, weighted={0: Ratio(0.6, 1.0, 10)})
    errors.after = Ratio(noise, 1.0, 10)
    assert ("its other factor is small" in str(_enlarged_by("div", errors))) == told


def test_operands_of_a_product_count_by_their_relative_errors():
    """Probabilities with an error of 10 % times values that are 1,000 times as large and exact."""
    errors = LayerErrors("MatMul", operands={0: Ratio(0.01, 1.0), 1: Ratio(0.0, 1e6)})
    assert errors.arrived == pytest.approx(0.01)
    errors.type = "Add"
    assert errors.arrived == pytest.approx(1e-8)


def test_small_columns_of_a_weight_that_meet_large_inputs_are_named():
    model = Wide(lambda x: torch.cat([x[..., :4] / 500, x[..., 4:]], -1))
    with torch.no_grad():
        model.b.weight[:, :4] *= 500
    _, found = causes(model, _rows(1.0, 1.0))
    assert "b" in named(found, "disparate_inputs")
    cause = next(c for layer in found.layers for c in layer.causes if c.cause == "disparate_inputs")
    assert "times the smallest" in cause.text and "large inputs meet the small ones" in cause.text


def test_a_grid_that_is_too_wide_for_another_value_on_it_names_that_value():

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.shared, self.a, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8)
            nn.init.constant_(self.norm.weight, 100.0)

        def forward(self, x):
            large = self.norm(x) + self.shared(x)
            small = self.a(x) + self.shared(x)
            return self.c(torch.cat([large / 500, small], 1))

    _, found = causes(Twice(), _rows(1.0, 1.0))
    cause = next(c for layer in found.layers for c in layer.causes if c.cause == "range_too_wide")
    assert f", which {cause.evidence['larger']} has as well, where values reach" in cause.text
    assert cause.evidence["tries"] == ["16_bits"], "the range of all values on this grid is the one that it has"


PER_TENSOR = {"preset": "w8a8", "rules": [{"match": "*", "weight": {"format": "int8", "granularity": "per_tensor"}}]}


def uneven() -> nn.Module:
    """Two convolutions whose channels differ by four decades and cancel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))
    scales = torch.logspace(-2, 2, 8)
    with torch.no_grad():
        model[0].weight *= scales[:, None, None, None]
        model[0].bias *= scales
        model[2].weight /= scales[None, :, None, None]
    return model.eval()


class Normed(nn.Module):
    """A norm that makes one channel 60 times the others, and layers that read it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.norm.weight[3] = 60.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(self.norm(x))))


MODELS = {"equalize": (uneven, (3, 6, 6), PER_TENSOR), "smooth": (lambda: Normed().eval(), (16,), {"preset": "w8a8"})}


def simulation(name, front_end):
    make, shape, rules = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(16, *shape, generator=generator) for _ in range(3)]
    model = make()
    if front_end == "torch":
        sim = QuantizationSimModel(model, data[0], config_file=rules)
    else:
        proto = exported(model, data[0])
        data = [x.numpy() for x in data]
        sim = bitwright.onnx.QuantizationSimModel(proto, data[0], config_file=rules)
    sim.compute_encodings(data, progress=False)
    return sim, data


def state(sim, data):
    sites = {n: (s.enabled, s.encoding, s.quantizer.spec) for n, s in sim.quantizers.items()}
    outputs = sim.run(data[0])[0] if hasattr(sim, "run") else sim.model(data[0]).detach().numpy()
    return sites, np.array(outputs)


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
@pytest.mark.parametrize("remedy", MODELS)
def test_a_remedy_of_the_float_model_is_measured_and_the_simulation_stays(remedy, front_end):
    sim, data = simulation(remedy, front_end)
    found = bitwright.analyze(sim, data, "kl")
    sites, outputs = state(sim, data)
    rows = {row.remedy: row for row in found.try_remedies(3)}
    row = rows[f"{remedy} before the simulation"]
    assert row.after_db > row.before_db + 6 and not row.kept
    assert row.metric_after < row.metric_before
    assert set(row.layers) <= {layer.name for layer in found.worst(3)} and row.layers
    after = state(sim, data)
    assert sites == after[0] and np.array_equal(outputs, after[1])
    assert f"{remedy} before the simulation at" in str(found)


def test_what_is_measured_is_what_the_method_brings():
    """The row says what equalizing the model oneself and simulating it anew says."""
    sim, data = simulation("equalize", "torch")
    row = bitwright.analyze(sim, data).try_remedies(3)[-1]
    model, (_, _, rules) = uneven(), MODELS["equalize"]
    plain, even = copy.deepcopy(model), copy.deepcopy(model)
    bitwright.torch.equalize_model(even, dummy_input=data[0], data=data, progress=False)
    found = []
    for one in (plain, even):
        own = calibrated(QuantizationSimModel(one, data[0], config_file=rules), data)
        with torch.no_grad():
            pairs = [(model(x).double(), own.model(x).double()) for x in data]
        noise = sum(float((a - b).square().sum()) for a, b in pairs)
        found.append(-10 * np.log10(noise / sum(float(a.square().sum()) for a, _ in pairs)))
    assert [row.before_db, row.after_db] == pytest.approx(found, abs=0.1)


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_what_sites_are_asked_for_is_asked_for_again(front_end):
    """A simulation beside the user's has its widths, and what was switched off stays off."""
    sim, data = simulation("smooth", front_end)
    weight = next(n for n, s in sim.quantizers.items() if s.role == "weight")
    output = [n for n, s in sim.quantizers.items() if s.role == "output"][-1]
    sim.quantizers[weight].spec = dataclasses.replace(sim.quantizers[weight].spec, format=IntFormat(4))
    sim.quantizers[output].enabled = False
    other = calibrated(sim._again(sim._float_copy()), data)
    assert other.quantizers[weight].encoding.format.bits == 4 and not other.quantizers[output].enabled
    sim.compute_encodings(data, progress=False)
    own, its = ({n: site for n, site in state(one, data)[0].items() if site[0]} for one in (sim, other))
    assert own == its
    assert np.array_equal(state(sim, data)[1], state(other, data)[1])


def test_what_cannot_be_tried_is_told():
    """A single layer has no neighbour to share its ranges with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model[0].weight *= torch.logspace(-2, 1, 8)[:, None]
    data = [torch.randn(32, 8, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    sim = calibrated(QuantizationSimModel(model, data[0], config_file=PER_TENSOR), data)
    found = bitwright.analyze(sim, data)
    found.layers[0].causes = (Cause("disparate_channels", "", {"tries": ["equalize"]}, ""),)
    assert not found.try_remedies(1)
    assert any(note.startswith("equalize was not tried: it changes nothing in this model") for note in found.notes)
    count = len(found.notes)
    found.try_remedies(1)
    assert len(found.notes) == count, "a reason stands once"
