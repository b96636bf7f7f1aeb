"""What a result says first: how near the worst output is to float on data that nothing was fitted to, and what was done."""

import io
import logging
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import bitwright
from bitwright.core.numerics import affine
from bitwright.core.numerics.spec import Preset, activation_spec, weight_spec
from bitwright.core.simulation.output_quality import Gain, PartQuality, parts_of, quality, varying_share
from bitwright.errors import CalibrationError, ConfigError, ModelError
from bitwright.recipes import attempt
from bitwright.recipes.judge import Rating
from bitwright.recipes.recipe import KINDS, Step
from bitwright.runtimes.timing import Ratio
from tests.onnx.nets import two_branches

GENERATOR = torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def _same_data_in_any_order():
    GENERATOR.manual_seed(1)


def made(module):
    torch.manual_seed(0)
    return module().eval()


class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def data(count, scale=1.0, rows=16):
    return [scale * torch.randn(rows, 16, generator=GENERATOR) for _ in range(count)]


def as_onnx(model, batch):
    file = io.BytesIO()
    torch.onnx.export(model, (batch,), file, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "rows"}})
    return onnx.load_from_string(file.getvalue())


def quantized(front_end, model, batches, *args, **options):
    if front_end == "torch":
        return bitwright.quantize(model, batches, *args, progress=False, **options)
    if "held_out" in options:
        options["held_out"] = [b.numpy() for b in options["held_out"]]
    feeds = [batch.numpy() for batch in batches]
    return bitwright.quantize(as_onnx(model, batches[0]), feeds, *args, progress=False, **options)


FINE = Preset(weight_spec("int16"), activation_spec("uint8"))  # weights that make no noise
both = pytest.mark.parametrize("front_end", ["torch", "onnx"])


@both
def test_the_first_line_has_the_worst_output_with_an_interval_and_the_counts_follow(front_end):
    result = quantized(front_end, made(Plain), data(10), metric=lambda model: 0.875)
    first, second, gained, third, *_ = str(result).splitlines()
    assert first == result.headline and not result.poor
    assert (
        f"{result.quality.worst.sqnr:.1f} dB (95 % interval" in first
        and "neither calibration nor methods had seen" in first
    )
    assert second == "metric: float 0.875 -> quantized 0.875 (+0)"
    gain = result.quality.worst.sqnr - result.plain.worst.sqnr
    assert gained.startswith(
        f"plain simulation: {result.plain.worst.sqnr:.1f} dB there; this result: {gain:+.1f} dB (95 %"
    )
    assert third.startswith("quantized: weights 3 of 3, activations ")


def test_it_is_said_where_few_samples_do_not_show_the_gain():
    result = quantized("torch", made(Plain), data(6, rows=2), fallback=False)
    noise = result.plain.worst.noise
    for shares, sure in (([0.5, 0.5], True), ([0.1, 1.4], False)):
        parts = (replace(result.quality.worst, noise=tuple(a * b for a, b in zip(noise, shares, strict=True))),)
        line = next(replace(result, quality=replace(result.quality, parts=parts)).summary())
        assert line.startswith("plain simulation: ") and line.endswith("do not tell from none") != sure


@both
def test_a_last_part_of_another_kind_is_what_rates(front_end):
    """Ten batches of one recording, then others four times as loud: what was calibrated on the first clips the others."""
    model = made(Plain)
    alike = quantized(front_end, model, data(20), fallback=False)
    other = quantized(front_end, model, data(16) + data(4, 4.0), fallback=False)
    assert other.quality.worst.sqnr < alike.quality.worst.sqnr - 10
    assert other.poor and str(other).startswith("POOR, below 20 dB; output")
    assert "try " in str(other).splitlines()[1] and not alike.causes
    assert "values are clipped" in other.causes[0] and f"cause: {other.causes[0]}" in str(other).splitlines()[2]


@both
def test_data_that_are_one_batch_are_refused(front_end):
    model, batches = made(Plain), data(2)
    with pytest.raises(
        CalibrationError, match=r"quantize: data is an? (Tensor|ndarray), not a list of batches.*write \[batch\]"
    ):
        if front_end == "torch":
            bitwright.quantize(model, batches[0])
        else:
            bitwright.quantize(as_onnx(model, batches[0]), batches[0].numpy())


def test_batches_of_inputs_with_labels_get_the_remedy():
    loader = [(x, torch.zeros(len(x))) for x in data(3)]
    with pytest.raises(
        ModelError, match=r"Remedy: of batches \(input, label\) pass the inputs alone, as \[x for x, \*_ in loader\]"
    ):
        bitwright.quantize(made(Plain), loader)
    assert bitwright.quantize(made(Plain), [x for x, *_ in loader], "w8a8", effort="quick").quality.worst is not None


@both
def test_an_interval_that_reaches_below_the_limit_is_said_first(front_end):
    model = made(Plain)
    sure = quantized(front_end, model, data(20), fallback=False)
    low, sqnr = sure.quality.worst.low, sure.quality.worst.sqnr
    unsure = replace(sure, poor_below=(low + sqnr) / 2)
    assert not sure.headline.startswith("UNCERTAIN") and not unsure.poor
    assert unsure.headline.startswith(f"UNCERTAIN, the interval reaches below {unsure.poor_below:g} dB")


@both
@pytest.mark.parametrize("offset", [0.0, 10.0, 300.0])
def test_noise_that_hides_what_differs_between_samples_is_said(front_end, offset):
    """A grid of 8 bits that holds zero and a temperature of 300 K has steps of 1.2: what differs is lost at 60 dB."""
    model = made(Plain)
    with torch.no_grad():
        model[-1].bias += offset
    result = quantized(front_end, model, data(10), recipe=["fold"])
    said = result.headline
    worst = result.quality.worst
    assert worst.sqnr > 30
    assert ("what differs between samples" in said) is (offset > 0)
    assert ("UNCERTAIN, the noise of output" in said) is (offset == 300.0)
    assert ('{"rules": [{"match": "*", "model_output": "uint16"}]}' in result.advice) is (offset == 300.0)
    if offset == 300.0:  # as it advises
        rules = {"rules": [{"match": "*", "model_output": "uint16"}]}
        better = quantized(front_end, model, data(10), recipe=["fold"], config_file=rules)
        assert not better.advice and better.quality.worst.noise_of_varying < 0.1
    if offset:
        expected = torch.cat([model(x) for x in data(10)]).detach().double()
        assert worst.varying == pytest.approx(float(expected.var(0).sum() / expected.square().mean(0).sum()), rel=0.5)


def test_the_share_of_an_output_that_differs_between_samples():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(4000, 3, 5))
    assert varying_share([noise[:1000], noise[1000:]], [1000, 3000]) == pytest.approx(1.0, abs=2e-3)
    assert varying_share([noise + 3], [4000]) == pytest.approx(0.1, abs=2e-3)
    assert varying_share([np.ones((4, 2))], [4]) == 0.0
    assert varying_share([noise[:1]], [1]) is varying_share([noise[:2], noise[:2, :2]], [2, 2]) is None
    assert varying_share([np.float32(3.0)[None]], [4]) is None  # one number for all samples


@both
def test_a_figure_of_a_single_sample_is_no_verdict(front_end):
    """Of three batches of two rows the last row alone is unseen."""
    result = quantized(front_end, made(Plain), data(3, rows=2), effort="quick")
    assert result.quality.worst.low is None and not result.poor
    assert result.headline.startswith(
        "UNCERTAIN, a single sample judges, and others may be worse: more held-out samples"
    )


@pytest.mark.parametrize(
    ("count", "spread", "said"),
    [
        (5, 0.1, ""),
        (5, 1.2, "UNCERTAIN, 5 samples judge, and another one may be below 20 dB: more held-out samples would tell; "),
        (40, 1.2, ""),
    ],
)
def test_few_samples_that_differ_much_are_no_verdict(count, spread, said):
    """Noise of 5 samples at 10 to the power of normal numbers: the mean is sure to be above 20 dB, another sample is not."""
    noise = 10 ** (spread * np.linspace(-1, 1, count))
    found = quality("output", [noise / noise.mean()], [np.full(count, 3e3)])
    assert found.low > 20 and (found.few and found.another < 20) is bool(said)
    result = quantized("torch", made(Plain), data(6))
    judged = replace(result, quality=Rating((found,), "on these"))
    assert judged.headline == f"{said}{judged.headline.removeprefix(said)}" and (
        "UNCERTAIN" in judged.headline
    ) is bool(said)


@both
def test_a_figure_of_data_that_calibration_saw_is_no_verdict(front_end):
    """A single batch of dependent rows leaves nothing to hold out."""
    result = quantized(front_end, made(Plain), data(1, rows=4), effort="quick")
    assert result.quality.too_few and result.quality.worst.low is not None
    assert result.headline.startswith("UNCERTAIN, calibration saw the samples that judge, and others may be worse")
    own = quantized(front_end, made(Plain), data(6, rows=4), recipe=["fold"])
    assert own.quality.seen and not own.quality.too_few and not own.headline.startswith("UNCERTAIN")


@both
def test_batches_of_ones_own_rate_and_calibration_has_all_of_the_data(front_end):
    far = data(3, 4.0)
    result = quantized(front_end, made(Plain), data(10), held_out=far)
    assert result.poor and "on 3 batches that neither calibration nor methods had seen (of held_out)" in result.headline
    assert "the samples that judge leave the ranges of calibration" in result.headline  # 16 bits do not help there
    with pytest.raises(CalibrationError, match="held_out: it holds no batch"):
        quantized(front_end, made(Plain), data(10), held_out=[])


def test_a_limit_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="poor_below: nan is not a number of dB"):
        quantized("torch", made(Plain), data(2), poor_below=float("nan"))


@both
def test_16_bits_are_taken_where_8_are_poor_and_the_judge_sees_that_16_are_not(front_end, caplog):
    batches = data(1, rows=64) * 10  # so that none is clipped
    eight = quantized(front_end, made(Plain), batches, FINE, fallback=False)
    limit = eight.quality.worst.sqnr + 1
    with caplog.at_level(logging.WARNING, "bitwright"):
        result = quantized(front_end, made(Plain), batches, FINE, poor_below=limit)
    assert not result.poor and result.quality.worst.sqnr > limit + 2
    assert str(result).startswith("activations have 16 bits, because with 8 the result was poor (")
    assert result.tried in caplog.text
    kinds = {
        q.spec.format.bits for q in result.sim.quantizers.unique() if q.role != "weight" and q.enabled and not q.derived
    }
    assert kinds == {16}


def test_16_bits_are_not_tried_where_weights_are_why():
    result = quantized("torch", made(Plain), data(10), "w4a8", poor_below=60.0)
    assert result.poor and not result.tried


@both
def test_a_recipe_that_is_worse_than_the_plain_simulation_is_undone(front_end, monkeypatch):
    """A judge whose verdicts on single steps are always yes lets ranges through that clip; the rating of the whole does not."""
    monkeypatch.setattr(Rating, "gain_over", lambda self, other: Gain(1.0))
    steps = (Step("fold"), Step("activation_ranges"))
    monkeypatch.setattr(attempt, "as_recipe", lambda recipe, *_, **__: steps)
    clip = replace(KINDS["activation_ranges"], run=clipping)
    monkeypatch.setitem(KINDS, "activation_ranges", clip)
    batches = data(10)
    result = quantized(front_end, made(Plain), batches)
    assert "the recipe is undone, as it was worse than the plain simulation (" in str(result).splitlines()[0]
    assert result.quality == result.plain
    assert [o.step for o in result.report if o.kept] == ["fold()"]
    monkeypatch.undo()
    plain = quantized(front_end, made(Plain), batches, recipe=["fold"])
    assert encodings(result) == encodings(plain), "calibrated on all data, as the plain simulation is"


def encodings(result):
    return {
        name: (site.encoding.min.tolist(), site.encoding.max.tolist())
        for name, site in result.sim.quantizers.items()
        if site.encoding is not None and not site.quantizer.derived
    }


@both
@pytest.mark.parametrize("count", [10, 2], ids=["batches", "samples"])
def test_ranges_take_in_the_data_that_judged(front_end, count, monkeypatch):
    """The last samples, which are held out, are four times as loud."""
    monkeypatch.setattr(attempt, "as_recipe", lambda recipe, *_, **__: (Step("fold"), Step("gptq")))
    batches = data(count)
    batches[-1][-2:] *= 4
    result = quantized(front_end, made(Plain), batches, fallback=False)
    monkeypatch.undo()
    plain = encodings(quantized(front_end, made(Plain), batches, recipe=["fold"]))
    wide = {name: ends for name, ends in encodings(result).items() if result.sim.quantizers[name].role == "input"}
    assert wide and all(ends == plain[name] for name, ends in wide.items())


def clipping(sim):
    for quantizer in sim.quantizers.unique():
        if quantizer.role != "weight" and quantizer.encoding is not None and not quantizer.derived:
            quantizer.encoding = affine.with_scale(quantizer.encoding, quantizer.encoding.scale / 8)


def rating(**parts):
    return Rating(tuple(PartQuality(name, db, None, None, db, 1) for name, db in parts.items()))


@pytest.mark.parametrize(
    ("mine", "plain", "part"),
    [
        ({"a": 28.8}, {"a": 35.8}, "a"),
        ({"a": 60.0}, {"a": 75.0}, None),  # beyond what matters
        ({"a": 30.0, "b": 20.0}, {"a": 30.5, "b": 10.0}, None),  # the worst gains far more than another loses
        ({"a": 28.8, "b": 30.0}, {"a": 35.8, "b": 27.5}, "a"),  # traded
        ({"a": 40.0, "b": 15.0}, {"a": 30.0, "b": 18.0}, "b"),  # the worst becomes worse
        ({"a": 35.05}, {"a": 35.1}, None),  # the same
        ({"a": 30.0}, {"b": 60.0}, None),  # nothing in common
        ({"a": -np.inf}, {"a": 3.0}, "a"),
    ],
)
def test_when_the_plain_simulation_is_to_be_preferred(mine, plain, part):
    found = rating(**mine).loses_to(rating(**plain))
    assert (found and found.name) == part


@both
def test_steps_that_were_asked_for_and_changed_nothing_come_first(front_end):
    result = quantized(front_end, made(Plain), data(2), recipe=["fold", "rotate"])
    first = str(result).splitlines()[0]
    assert first.startswith("rotate() (") and "which the recipe names, changed nothing; output" in first
    assert not quantized(front_end, made(Plain), data(2), recipe=["fold", "equalize"]).asked


class Tiny(nn.Module):
    """All activations of which cost as much."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


@both
def test_widen_keeps_to_a_share_of_the_activations(front_end):
    whole = {"allowance": 1.0, "memory": 1.0, "least": 0.0}
    few = quantized(front_end, made(Tiny), data(6), recipe=[{"widen": whole}])
    asked = int(few.quantized.split("activations ")[1].split(" of ")[1])
    done = int(few.quantized.split("activations ")[1].split(" of ")[0])
    assert asked - done == asked // 2 and "NO ACTIVATION" not in few.quantized
    all_of_them = quantized(front_end, made(Tiny), data(6), recipe=[{"widen": {**whole, "most": 1.0}}])
    assert "weights 2 of 2, activations 0 of" in all_of_them.quantized
    assert "NO ACTIVATION IS QUANTIZED" in str(all_of_them).splitlines()[1]


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return (self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1) @ self.v(x)


@both
def test_the_counts_say_why_a_step_left_activations_in_float(front_end):
    batches = [batch.unsqueeze(0) for batch in data(6)]
    result = quantized(front_end, made(Attending), batches, recipe=["layer_inputs"])
    done, asked, off = map(int, re.search(r"activations (\d+) of (\d+) \(in float: (\d+) ", result.quantized).groups())
    assert done + off == asked and off > 1
    assert result.quantized.endswith(f"(in float: {off} because no layer with a stored weight reads it)")
    whole = quantized(front_end, made(Attending), batches, recipe=["fold"]).quantized
    assert whole.endswith(f"activations {asked} of {asked}")


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_an_output_without_a_finite_number_other_than_zero_is_one_part(value):
    outputs = [np.full((2, 4, 50), value, np.float32), np.ones((2, 4), np.float32)]
    assert [part.name for part in parts_of([outputs], ["mask", "logits"])] == ["mask", "logits"]


def test_a_branch_that_only_the_last_batches_take_is_calibrated():
    model = two_branches()
    feeds = [{"x": np.ones((3, 4), np.float32), "cond": np.array(i < 9)} for i in range(10)]
    result = bitwright.quantize(model, feeds, progress=False)
    assert "which calibration reads as well" in result.headline
    assert all(s.enabled for s in result.sim.quantizers.values() if s.op.endswith("mo") and s.role == "input")


class Drawing(nn.Module):
    """A variational autoencoder: what is between its halves is drawn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(16, 32), nn.Linear(16, 16)
        self.draw = nn.Sequential(nn.Linear(32, 32), nn.ReLU())

    def forward(self, x):
        mean, spread = self.draw(self.encoder(x).relu()).chunk(2, dim=-1)
        return self.decoder(mean + torch.randn_like(mean) * spread.exp())


def test_float_and_quantized_runs_of_a_model_draw_the_same_numbers():
    data = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    result = bitwright.quantize(Drawing().eval(), data, progress=False)
    assert result.quality.sqnr > 30  # with other numbers it is 0
    assert "left out" not in str(result.report)


@both
@pytest.mark.parametrize(("width", "larger"), [(4, True), (64, False)], ids=["few weights", "many weights"])
def test_the_first_line_says_where_the_file_is_larger_than_float(front_end, width, larger, tmp_path):
    model = made(lambda: nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4)))
    result = quantized(front_end, model, data(5), path=tmp_path, poor_below=-math.inf)
    written = result.exported.qdq.stat().st_size - result.exported.float_model.stat().st_size
    assert (written > 0) is larger
    assert (f"the file is LARGER than the float file by {written:,} bytes; " in result.headline) is larger
    for file in result.exported.files:
        file.unlink()
    assert "LARGER" not in result.headline and f"the files written to {tmp_path} are there no more" in str(result)


@pytest.mark.parametrize(("low", "high", "slower"), [(0.68, 0.72, True), (0.95, 1.01, False), (1.5, 1.6, False)])
def test_the_first_line_says_where_the_file_is_slower_than_float(low, high, slower):
    result = quantized("torch", made(lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU())), data(5))
    exported = SimpleNamespace(
        speed=Ratio((low + high) / 2, low, high), qdq=Path("gone"), float_model=Path("gone"), tflite=None
    )
    told = replace(result, exported=exported).headline
    assert ("; the file is SLOWER than the float file on this machine, 0.70x (0.68 to 0.72); " in f"; {told}") is slower
    assert ("SLOWER" in told) is slower


class Writer:
    """The part of TensorBoard's SummaryWriter that results use."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: dict[str, str] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_text(self, name: str, text: str) -> None:
        self.texts[name] = text


class Tracker:
    """The part of the module mlflow that results use."""

    def __init__(self) -> None:
        self.metrics: list[tuple[str, float, int]] = []
        self.params: dict[str, str] = {}
        self.texts: dict[str, str] = {}

    def log_metric(self, key: str, value: float, step: int) -> None:
        self.metrics.append((key, value, step))

    def log_param(self, key: str, value: str) -> None:
        self.params[key] = value

    def log_text(self, text: str, artifact_file: str) -> None:
        self.texts[artifact_file] = text


def test_a_result_is_logged_to_trackers() -> None:
    """Both get the same numbers: of the outputs, of the metric, and of each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    data = [torch.randn(16, 8) for _ in range(3)]
    result = bitwright.quantize(
        net,
        data,
        recipe=["fold", "bias_correction"],
        metric=lambda m: float(m(data[0]).detach().mean()),
        progress=False,
    )
    writer, tracker = Writer(), Tracker()
    result.log(writer)
    result.log(tracker, prefix="q")
    assert writer.scalars == [(f"quantize{name[1:]}", value, step) for name, value, step in tracker.metrics]
    found = {(name, step): value for name, value, step in tracker.metrics}
    assert found["q/metric/quantized", 0] == result.metrics["quantized"]
    assert found["q/sqnr_db/output", 0] == pytest.approx(result.quality.worst.sqnr)
    steps = {step: value for (name, step), value in found.items() if name == "q/recipe/metric"}
    assert steps == {i: outcome.metric for i, outcome in enumerate(result.report)} and len(steps) == 4
    assert tracker.params["q.preset"] == "w8a8" and tracker.texts["q/result.txt"] == str(result)
    assert result.headline in writer.texts["quantize/result"]
    with pytest.raises(ConfigError, match="object has neither add_scalar nor log_metric. Remedy: give a SummaryWriter"):
        result.log(object())
