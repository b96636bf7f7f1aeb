"""The default recipe on planted faults: a site that spoils the output, and a method that spoils what it did not see."""

import io

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import bitwright.onnx
import bitwright.torch
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ConfigError
from bitwright.recipes.judge import Judge


class Spoiled(nn.Module):
    """What its last layer reads has one channel a hundred times as large as the others, and of no weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        self.last = nn.Linear(17, 4)
        with torch.no_grad():
            self.last.weight[:, 16] = 0

    def forward(self, x):
        large = 30 * x[:, :1]
        return self.last(torch.cat([self.body(x), large], 1))


class Plain(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return self.layers(x)


def data(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(32, 16, generator=generator) for _ in range(count)]


def quantized(front_end, model, batches, *args, **options):
    """The result of ``quantize``, and its simulation as a function of a batch."""
    if front_end == "torch":
        result = bitwright.torch.quantize(model, batches, *args, progress=False, **options)
        return result, lambda x: result.model(x).detach().numpy()
    file = io.BytesIO()
    torch.onnx.export(model, (batches[0],), file, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "rows"}})
    feeds = [batch.numpy() for batch in batches]
    result = bitwright.onnx.quantize(onnx.load_from_string(file.getvalue()), feeds, *args, progress=False, **options)
    return result, lambda x: result.sim.run(x.numpy())[0]


def decibels(model, run):
    """On 3,200 samples: one that is larger than all in calibration decides about a batch of 32 alone."""
    unseen = torch.cat(data(100, seed=9))
    return sqnr(model(unseen).detach().numpy(), run(unseen))


both = pytest.mark.parametrize("front_end", ["torch", "onnx"])
raised = pytest.mark.parametrize(("target", "text"), [("ort_cpu", "float at"), ("packed", "16 bits at")])


@raised
@both
def test_a_site_that_spoils_the_output_is_found_and_raised(front_end, target, text):
    model = Spoiled().eval()
    result, run = quantized(front_end, model, data(6), target=target)
    _, nearest = quantized(front_end, model, data(6), recipe=["fold"])
    assert decibels(model, run) > decibels(model, nearest) + 20
    step = next(o for o in result.report if o.step.startswith("widen("))
    assert step.kept and text in step.note and step.sqnr[1] > step.sqnr[0] + 20
    wide = [q for q in result.sim.quantizers.unique() if q.spec.format.bits == 16 or not q.enabled]
    assert any("cat.output[0]" in q.name for q in wide)
    assert len([q for q in wide if q.spec.format.bits == 16]) == (target == "packed")
    reasons = [row.how for row in result.sim.coverage() if "because 8 bits made" in row.how]
    grid = "uint16" if target == "packed" else "disabled"
    assert any(grid in how and "of the outputs' noise" in how for how in reasons)


@both
def test_what_is_raised_is_exported_and_runs_as_simulated(front_end, tmp_path):
    model = Spoiled().eval()
    result, _ = quantized(front_end, model, data(6), path=tmp_path)
    report = result.sim.verify()
    assert report.ok, str(report)


class Hidden(Spoiled):
    """The same with a channel whose noise is a tenth of what nearest rounding to four bits makes."""

    def forward(self, x):
        return self.last(torch.cat([self.body(x), 0.35 * x[:, :1]], 1))


@both
def test_noise_that_a_later_rounding_repairs_hides_no_site(front_end):
    """For a target without a table of times: in a network of microseconds every conversion is beyond the allowance."""
    model = Hidden().eval()
    result, _ = quantized(front_end, model, data(6), "w4a8", target="packed")
    step = next(o for o in result.report if o.step.startswith("widen"))
    assert step.kept and "16 bits at" in step.note and "dB less noise by its estimate" in step.note
    wider = {"widen": {"weights": 0.2}}
    runs = [
        quantized(front_end, model, data(6), "w4a8", recipe=["fold", *more, "gptq"], target="packed")[1]
        for more in ([], [wider])
    ]
    assert decibels(model, runs[1]) > decibels(model, runs[0]) + 0.3
    alone, _ = quantized(front_end, model, data(6), "w4a8", recipe=["fold", "widen"], target="packed")
    assert "16 bits at" not in alone.report[1].note
    rounded = next(o for o in result.report if o.step.startswith("gptq"))
    assert rounded.kept and rounded.sqnr[1] > rounded.sqnr[0]
    assert all(s.enabled for s in result.sim.quantizers.values() if s.role == "weight")


class Saturating(nn.Module):
    """A fifth of its work ends in numbers over three decades, of which only the smallest are told apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.basis = nn.Linear(16, 16, bias=False)
        self.body = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))

    def forward(self, x):
        y = self.basis(x)
        return self.body(torch.tanh(300 * y * y * y))


@both
def test_what_only_elementwise_operators_read_is_left_in_float(front_end):
    model = Saturating().eval()
    result, run = quantized(front_end, model, data(6))
    _, nearest = quantized(front_end, model, data(6), recipe=["fold"])
    assert decibels(model, nearest) < 10 < decibels(model, run) - 5
    floats = [row.how for row in result.sim.coverage() if "disabled, because 8 bits made" in row.how]
    assert floats  # cubes are not layer's input: they stay in float
    kept, _ = quantized(front_end, model, data(6), recipe=["fold", {"widen": {"allowance": 0, "memory": 0}}])
    assert all(q.spec.format.bits != 16 for q in kept.sim.quantizers.unique())


@raised
@both
def test_outputs_that_would_be_noise_may_cost_half(front_end, target, text):
    recipe = ["fold", {"widen": {"allowance": 0.001}}]  # the last layer does 1 % of the work
    result, _ = quantized(front_end, Spoiled().eval(), data(6), recipe=recipe, target=target)
    assert text in result.report[1].note


@both
def test_an_allowance_of_nothing_raises_nothing(front_end):
    recipe = ["fold", {"widen": {"allowance": 0.0}}]
    result, _ = quantized(front_end, Spoiled().eval(), data(6), recipe=recipe)
    note = result.report[1].note
    assert "beyond the allowance" in note
    reading = [o for o in result.sim.graph.ops if o.type == "Gemm"]  # other values cost no multiplication
    read = {o.inputs[0] for o in reading}
    assert all(s.quantizer.spec.format.bits == 8 for s in result.sim.quantizers.values() if s.value in read)


@both
def test_options_are_checked(front_end):
    with pytest.raises(ConfigError, match="widen: allowance is 2.* use a share from 0 to 1"):
        quantized(front_end, Plain().eval(), data(2), recipe=["fold", {"widen": {"allowance": 2}}])
    with pytest.raises(ConfigError, match="widen: there is no option 'allowence'.*allowance"):
        quantized(front_end, Plain().eval(), data(2), recipe=["fold", {"widen": {"allowence": 2}}])


@both
def test_a_method_that_spoils_unseen_data_is_taken_back(front_end):
    """All batches but the one held out lie on a line, along which alone the rounding is then made right."""
    model, batches = Plain().eval(), data(6)
    line = torch.randn(16, generator=torch.Generator().manual_seed(3))
    narrow = [batch[:, :1] * line + 0.01 * batch for batch in batches]
    mixed = [batches[i] if i == 5 else narrow[i] for i in range(6)]
    spec = ["fold", "gptq"]
    result, run = quantized(front_end, model, mixed, "w4a8")
    step = next(o for o in result.report if o.step.startswith("gptq"))
    assert not step.kept and step.sqnr[1] < step.sqnr[0] and "undone: " in str(result.report)
    judge, rest = Judge.of(mixed, lambda batch: [])
    _, harmed = quantized(front_end, model, list(rest), "w4a8", recipe=spec)
    assert decibels(model, run) > decibels(model, harmed) + 1


@both
@pytest.mark.parametrize("count", [1, 3])
def test_samples_of_few_batches_judge_what_the_methods_did_not_see(front_end, count):
    """All samples but the last, which no method sees, lie on a line, along which alone the rounding is then made right."""
    model, batches = Plain().eval(), data(count)
    line = torch.randn(16, generator=torch.Generator().manual_seed(3))
    held = 32 * count // 5
    narrow = [batch[:, :1] * line + 0.01 * batch for batch in batches]
    narrow[-1][-held:] = batches[-1][-held:]
    result, run = quantized(front_end, model, narrow, "w4a8", fallback=False)
    step = next(o for o in result.report if o.step.startswith("gptq"))
    assert not step.kept and step.sqnr[1] < step.sqnr[0]
    assert not result.quality.seen and result.quality.worst.units == held
    plain, plainly = quantized(front_end, model, [*narrow[:-1], narrow[-1][:-held]], "w4a8", recipe=["fold"])
    assert decibels(model, run) > decibels(model, plainly) - 0.1
    assert result.quality.worst.sqnr > result.plain.worst.sqnr - 0.1


@both
def test_samples_that_are_not_computed_apart_are_said_to_be_seen(front_end):
    class Mixed(Plain):
        def forward(self, x):
            return self.layers(x - x.mean(0))

    result, _ = quantized(front_end, Mixed().eval(), data(1))
    assert result.plain is not None and result.quality.seen
    assert result.report.judged == "on 1 batch that the methods see too: give five or more"


@both
def test_ranges_follow_the_least_error_where_the_outputs_gain(front_end):
    """A few values a hundred times as large as the others."""
    batches = data(6)
    for batch in batches:
        batch[0, :] *= 30
    model = Plain().eval()
    result, _ = quantized(front_end, model, batches, "w4a8")
    methods = {q.spec.method.name for q in result.sim.quantizers.unique() if q.role in ("input", "output")}
    step = next(o for o in result.report if o.step == "activation_ranges()")
    assert methods == ({"mse"} if step.kept else {"minmax"})
    assert step.kept == (step.sqnr[1] >= step.sqnr[0] + 0.1)
    chosen, _ = quantized(front_end, model, batches, "w4a8", quant_scheme="percentile")
    assert all(o.step != "activation_ranges()" for o in chosen.report)
    assert np.isfinite(step.sqnr[1])


@both
@pytest.mark.parametrize("effort", ["quick", "thorough"])
def test_every_effort_stays_above_nearest_rounding_and_says_what_it_did(front_end, effort):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    result, run = quantized(front_end, model, data(8), effort=effort)
    _, nearest = quantized(front_end, model, data(8), recipe=["fold"])
    assert decibels(model, run) > decibels(model, nearest)
    steps = [outcome.step.partition("(")[0] for outcome in result.report]
    assert ("activation_ranges" in steps, "seq_mse" in steps) == ((effort == "thorough"),) * 2
    held = {"quick": "on 1 batch that", "thorough": "on 1 batch that"}[effort]
    assert result.report.judged.startswith(held)


@both
def test_an_unknown_effort_is_refused_before_any_work(front_end):
    with pytest.raises(ConfigError, match="there is no effort 'fast'.*use one of quick, default, thorough"):
        quantized(front_end, nn.Linear(4, 4), [torch.ones(1, 4)], effort="fast")


class Joined(nn.Module):
    """A detector's head: boxes in pixels and probabilities in one tensor, which a layer reads no more."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.boxes = nn.Sequential(
            *[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU())], nn.Linear(16, 4)
        )
        self.scores = nn.Linear(16, 3)

    def forward(self, x):
        return torch.cat([300 * self.boxes(x), torch.sigmoid(self.scores(x) - 2)], 1)


@both
def test_small_values_beside_large_ones_in_one_tensor_are_kept(front_end):
    model = Joined().eval()
    result, run = quantized(front_end, model, data(6))
    (unseen,) = data(1, seed=9)
    wanted, found = model(unseen).detach().numpy(), run(unseen)
    assert sqnr(wanted[:, :4], found[:, :4]) > 25 and sqnr(wanted[:, 4:], found[:, 4:]) > 25
    joins = [row for row in result.sim.coverage() if row.op_type == "Concat"]
    assert [(row.status, row.how) for row in joins] == [
        ("float", "Concat runs in float because its operands are in float")
    ]


class Read:
    """Batches that count how often they are read."""

    def __init__(self, batches):
        self.batches, self.count = batches, 0

    def __iter__(self):
        for batch in self.batches:
            self.count += 1
            yield batch

    def __len__(self):
        return len(self.batches)


class Network(nn.Module):
    """Convolutions with batch norms of unequal channels; counts the samples that it computes, its copies included."""

    samples = 0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        wide, deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8, padding=1)
        layers = (wide, nn.BatchNorm2d(8), nn.ReLU(), deep, nn.BatchNorm2d(8), nn.ReLU())
        layers[1].weight.data = 10.0 ** torch.linspace(-1, 1, 8)  # so that equalization is worth a trial
        self.body, self.head = nn.Sequential(*layers), nn.Linear(8, 4)

    def forward(self, x):
        Network.samples += len(x)
        return self.head(self.body(x).mean((2, 3)))


def pictures(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 8, 8, generator=generator) for _ in range(count)]


def of_network(front_end, batches, *args, **options):
    """The result of ``quantize``, and how often batches were read."""
    if front_end == "torch":
        read = Read(batches)
        return bitwright.torch.quantize(Network().eval(), read, *args, progress=False, **options), read.count
    file = io.BytesIO()
    torch.onnx.export(
        Network().eval(), (batches[0],), file, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "rows"}}
    )
    read = Read([batch.numpy() for batch in batches])
    model = onnx.load_from_string(file.getvalue())
    return bitwright.onnx.quantize(model, read, *args, progress=False, **options), read.count


def test_the_default_recipe_runs_the_model_five_times_on_its_data():
    """Of 20 batches: calibration before and after equalization, all steps, all judgements."""
    Network.samples = 0
    result, _ = of_network("torch", pictures(20))
    assert Network.samples <= 5 * 20 * 8
    assert any(o.step.startswith("equalize(") and o.sqnr is not None for o in result.report)


@both
def test_the_simulation_that_judged_equalization_is_the_one_that_goes_on(front_end, monkeypatch):
    """One simulation before the step and one after it, on half of the data; the one that goes on takes in the other half, and the
    held-out data at the end."""
    kind = bitwright.torch.QuantizationSimModel if front_end == "torch" else bitwright.onnx.QuantizationSimModel
    calibrated, compute = [], kind.compute_encodings

    def noted(self, *args, **options):
        calibrated.append(self)
        return compute(self, *args, **options)

    monkeypatch.setattr(kind, "compute_encodings", noted)
    result, _ = of_network(front_end, pictures(10))
    step = next(o for o in result.report if o.step.startswith("equalize("))
    assert len({id(sim) for sim in calibrated}) == 2 and len(calibrated) == 4
    assert result.sim is calibrated[1 if step.kept else 0] is calibrated[2] is calibrated[3]
    assert result.plain is not None


@both
@pytest.mark.parametrize("preset", ["w8", "w4"])
def test_weights_alone_are_quantized_without_data(front_end, preset):
    """Only the example input is read; a method that needs activations reads what it asks for."""
    Network.samples = 0
    _, read = of_network(front_end, pictures(6), preset, recipe=["fold"])
    assert read == 1
    if front_end == "torch":
        assert Network.samples <= 6 * 8  # of the example: what is recorded, and the checks of folding
    assert of_network(front_end, pictures(6), preset, recipe=["fold", "gptq"])[1] >= 7
