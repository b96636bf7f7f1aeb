"""What an analysis says of small models on both front ends: sensitivities, intervals, outputs of every layer in files."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scipy import stats
from torch import nn

import bitwright
import bitwright.onnx
from bitwright import LayerOutputUtil
from bitwright.analysis import Analysis
from bitwright.analysis.exact import Exact
from bitwright.analysis.layer_outputs import layer_values
from bitwright.analysis.result import decibel
from bitwright.analysis.subject import open_subject
from bitwright.errors import CalibrationError, ConfigError, ExportError, ModelError
from bitwright.methods.switching import only
from bitwright.metrics.intervals import compare, without_samples
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel
from bitwright.torch import QuantizationSimModel as TorchSim
from bitwright.torch.program import TorchSimulation
from tests.analysis.conftest import batches, exported, noise_over_signal
from tests.onnx.nets import Net as OnnxNet
from tests.support.cost import steps
from tests.support.simulations import calibrated
from tests.support.zoo import chain, chain_input


def test_rows_of_sites_and_layers_are_there_worst_first(case):
    found = bitwright.analyze(case.sim, case.data, mode="fast")
    assert {row.name for row in found.sites} == set(case.sim.quantizers)
    costs = [row.cost for row in found.sites]
    assert costs == sorted(costs, reverse=True) and costs[0] > 0
    noise = [row.noise or 0 for row in found.layers]
    assert noise == sorted(noise, reverse=True)
    assert found.worst(2) == found.layers[:2]


def test_the_dictionary_is_json_and_comes_back(case):
    found = bitwright.analyze(case.sim, case.data, mode="fast")
    content = json.loads(found.to_json())
    assert content == found.to_dict() and content["format"] == "bitwright-analysis"
    assert Analysis.from_dict(content).to_dict() == content
    assert found._repr_html_().startswith("<table>") and case.conv1 in str(found)


def test_the_simulation_is_as_it_was(case):
    before = {name: (site.enabled, site.encoding) for name, site in case.sim.quantizers.items()}
    bitwright.analyze(case.sim, case.data, mode="fast")
    assert before == {name: (site.enabled, site.encoding) for name, site in case.sim.quantizers.items()}


def test_errors_of_layers_are_those_of_the_simulation(torch_case):
    """What leaves the last layer is the error of the outputs; the first layer reads exact values but for its input's grid."""
    found = bitwright.analyze(torch_case.sim, torch_case.data, mode="fast")
    layers = {row.name: row for row in found.layers}
    assert layers["head"].after_db == pytest.approx(found.output["sqnr_db"], abs=1e-3)
    assert layers["conv1"].arrived_db == 200 and layers["conv1"].made_db == layers["conv1"].after_db
    for row in layers.values():
        if row.sites and row.arrived_db < 200:
            assert row.after_db <= row.made_quantized_db + 0.5, "what leaves holds what was made"
    assert layers["conv1"].made_lsb is None or layers["conv1"].made_lsb > 0


def test_values_at_a_site_are_those_that_pass_it(torch_case):
    found = bitwright.analyze(torch_case.sim, torch_case.data, mode="fast", samples=10_000)
    weight = next(row for row in found.sites if row.name == "conv1.weight")
    values = dict(torch_case.sim.model.named_parameters())["conv1.weight"].detach().numpy()
    assert (weight.minimum, weight.maximum) == (values.min(), values.max())
    assert weight.channels["high"] == pytest.approx(values.max((1, 2, 3)).tolist())
    assert sum(weight.histogram["counts"]) == values.size
    source = next(row for row in found.sites if row.name.startswith("conv1.input"))
    data = torch.cat(torch_case.data).numpy()
    assert (source.minimum, source.maximum) == (data.min(), data.max())
    assert source.clipped == pytest.approx(0.0, abs=1e-3) and 0.2 < source.codes_used <= 1
    assert source.grid["steps"] == 255 and source.lsb == pytest.approx(float(np.ptp(data)) / 255, rel=0.05)


# ---- the end of it


def test_auto_measures_the_worst_and_estimates_all(case):
    found = bitwright.analyze(case.sim, case.data)
    assert found.mode == "auto"
    assert all(row.noise is not None and row.only_db is not None for row in found.sites if row.role != "bias")
    assert {row.name for row in found.groups} == {"all weights", "all activations"}


def test_a_deadline_ends_it_with_what_there_is(case):
    found = bitwright.analyze(case.sim, case.data, deadline=1e-9)
    assert all(row.noise is not None for row in found.sites if row.role != "bias")
    assert all(row.only_db is None for row in found.sites)
    assert any("ended by the deadline of 1e-09 s" in note for note in found.notes)
    assert any("outputs were compared on 16 of 64 samples" in note for note in found.notes)


def test_ctrl_c_keeps_what_was_measured_and_resume_goes_on_from_there(case, tmp_path, monkeypatch):
    from bitwright.analysis import exact

    whole = bitwright.analyze(case.sim, case.data, mode="exact")
    again, runs = exact.Replay.only, []

    def stopped(self, sites):
        runs.append(sites)
        if len(runs) == 10:
            raise KeyboardInterrupt
        return again(self, sites)

    monkeypatch.setattr(exact.Replay, "only", stopped)
    part = bitwright.analyze(case.sim, case.data, mode="exact", resume=tmp_path)
    measured = [row.name for row in part.sites if row.only_db is not None]
    assert any("ended by Ctrl-C" in note for note in part.notes) and 0 < len(measured) < len(whole.sites)
    before = len(runs)
    rest = bitwright.analyze(case.sim, case.data, mode="exact", resume=tmp_path)
    assert any("measurements of an earlier analysis were taken over" in note for note in rest.notes)
    assert len(runs) - before < 4 * (len(whole.sites) + len(whole.groups)), "what was measured is not measured again"
    assert {r.name: r.only_db for r in rest.sites} == {r.name: r.only_db for r in whole.sites}


def test_a_folder_of_another_analysis_is_refused(torch_case, tmp_path):
    bitwright.analyze(torch_case.sim, torch_case.data[:2], resume=tmp_path)
    with pytest.raises(ConfigError, match="holds measurements of another model, other data or another metric"):
        bitwright.analyze(torch_case.sim, torch_case.data[1:3], resume=tmp_path)


@pytest.mark.parametrize(
    "content, problem",
    [
        pytest.param("{", "it is not JSON", id="torn"),
        pytest.param("[" * 100 + "]" * 100, "it is nested too deeply", id="deep"),
        pytest.param("[]", "it holds a list, not what a search wrote", id="a-list"),
        pytest.param('{"measured": {"pairs": {"x": 3}}}', "it was changed since it was written", id="other-pairs"),
        pytest.param('{"measured": {"metrics": {"x": [1]}}}', "it was changed since it was written", id="other-metrics"),
    ],
)  # fmt: skip
def test_a_damaged_file_of_measurements_is_named(torch_case, tmp_path, content, problem):
    bitwright.analyze(torch_case.sim, torch_case.data[:1], mode="exact", resume=tmp_path, deadline=1e-9)
    path = tmp_path / "bitwright_analysis_measured.json"
    if content.startswith("{") and content != "{":
        content = json.dumps({**json.loads(path.read_text()), **json.loads(content)})
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"measured.json.*: {problem}.*\n*.*remove it, .*or name an empty folder"):
        bitwright.analyze(torch_case.sim, torch_case.data[:1], mode="exact", resume=tmp_path)


# ---- metrics


@pytest.mark.parametrize("metric, better", [("agreement", "higher"), ("kl", "lower"), ("accuracy", "higher")])
def test_named_metrics_are_read_off_the_outputs(case, metric, better):
    labels = np.arange(64) % 5
    found = bitwright.analyze(case.sim, case.data, metric, labels=labels)
    assert (found.metric.name, found.metric.better, found.metric.difference.n) == (metric, better, 64)
    rows = [row for row in found.sites if row.only_db is not None]
    assert all(row.metric_only is not None and row.metric_without is not None for row in rows)
    if metric == "kl":
        assert found.metric.float == 0 < found.metric.quantized == pytest.approx(found.output["kl"])


def test_a_function_that_returns_a_value_per_sample_has_an_interval(case):
    labels = np.arange(64) % 5

    def right(model):
        if hasattr(model, "run"):
            outputs = [model.run(None, {"x": x})[0] for x in case.data]
        else:
            with torch.no_grad():
                outputs = [model(x).numpy() for x in case.data]
        return np.concatenate(outputs).argmax(-1) == labels

    found = bitwright.analyze(case.sim, case.data, right, mode="fast")
    named = bitwright.analyze(case.sim, case.data, "accuracy", mode="fast", labels=labels)
    assert found.metric.difference == named.metric.difference and found.metric.difference.test == "mcnemar"
    assert (found.metric.float, found.metric.quantized) == (named.metric.float, named.metric.quantized)


# ---- bad input


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.dropout(self.layer(x), 0.5, training=True)


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).argmax(-1)


def simulated(model, data=None):
    data = [torch.randn(8, 4)] if data is None else data
    sim = calibrated(QuantizationSimModel(model.eval(), data[0]), data)
    return sim, data


@pytest.mark.parametrize(
    "options, error, message",
    [
        pytest.param({"metric": lambda m: float("nan")}, ConfigError, "of the float model it is NaN", id="nan"),
        pytest.param({"metric": lambda m: [1.0, np.inf]}, ConfigError, "infinite for 1 of 2 samples", id="inf"),
        pytest.param({"metric": lambda m: 0.5}, ConfigError, "it is 0.5 whatever the model computes", id="constant"),
        pytest.param({"metric": lambda m: "good"}, ConfigError, "it returns a str", id="text"),
        pytest.param({"metric": lambda m: m.none}, ConfigError, "it fails on the float model: AttributeError", id="fails"),
        pytest.param({"metric": "acuracy"}, ConfigError, "did you mean 'accuracy'", id="unknown-metric"),
        pytest.param({"metric": 3}, ConfigError, "metric: 3 is an int", id="no-metric"),
        pytest.param({"metric": "accuracy"}, ConfigError, "no labels are given", id="no-labels"),
        pytest.param({"metric": "accuracy", "labels": [1, 2]}, ConfigError, "there are 2 for 64 samples", id="few-labels"),
        pytest.param(
            {"metric": "accuracy", "labels": np.zeros((64, 2))}, ConfigError, r"shape \(16, 2\) for a batch", id="labels"
        ),
        pytest.param({"groups": ["conv9*"]}, ConfigError, "'conv9\\*' matches no site", id="no-site"),
        pytest.param({"mode": "slow"}, ConfigError, "there is no mode 'slow'", id="mode"),
        pytest.param({"deadline": 0}, ConfigError, "0 is not a time", id="deadline"),
        pytest.param({"deadline": "60"}, ConfigError, "deadline: '60' is a str", id="deadline-text"),
        pytest.param({"samples": 0}, ConfigError, "0 rows show nothing", id="samples"),
        pytest.param({"memory_budget": 0}, ConfigError, "0 bytes hold nothing", id="budget"),
        pytest.param({"better": "more"}, ConfigError, "neither 'higher' nor 'lower'", id="better"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_an_error(torch_case, options, error, message):
    with pytest.raises(error, match=message):
        bitwright.analyze(torch_case.sim, torch_case.data, **options)


def test_one_sample_has_no_interval(torch_case):
    found = bitwright.analyze(torch_case.sim, [torch_case.data[0][:1]], "agreement")
    assert "no interval" in found.metric.difference.text


@pytest.mark.parametrize(
    "data, error, message",
    [
        pytest.param([], CalibrationError, "the data held no batch", id="empty"),
        pytest.param(torch.zeros(2, 3, 8, 8), CalibrationError, "data is a Tensor, not a list of batches", id="one"),
        pytest.param([torch.zeros(2, 4, 8, 8)], ModelError, "the model fails on a batch", id="shape"),
        pytest.param([(torch.zeros(2, 3, 8, 8), torch.zeros(2))], ModelError, "pass labels=", id="with-labels"),
    ],
)
def test_data_that_do_not_fit_are_refused(torch_case, data, error, message):
    with pytest.raises(error, match=message):
        bitwright.analyze(torch_case.sim, data)


def test_random_numbers_of_a_module_are_the_same_in_float_and_quantized_runs():
    found = bitwright.analyze(*simulated(Dropping()))
    assert found.output["sqnr_db"] > 30
    assert any("repeated one by one, give another output" in note for note in found.notes)


def test_models_that_cannot_be_compared_are_refused():
    net = OnnxNet()
    x = net.input(shape=(2, 4))
    sim = OnnxSim(net.model(net("Add", net("Relu", x), net("RandomNormalLike", x), out="y")))
    data = [{"x": np.ones((2, 4), np.float32)}]
    sim.compute_encodings(data, progress=False)
    with pytest.raises(ModelError, match="not deterministic: two float runs of the same batch differ"):
        bitwright.analyze(sim, data)
    with pytest.raises(ModelError, match=r"returns no tensor of floating-point numbers \(outputs: int64\)"):
        bitwright.analyze(*simulated(Deciding()))


def test_outputs_of_nothing_but_zeros_are_refused():
    """As of a transformer with its initial weights, whose classifier is zero."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.zero_()
    with pytest.raises(ModelError, match="its outputs hold no number but 0 on these data.*load trained weights"):
        bitwright.analyze(*simulated(model))


def test_of_the_sites_of_one_quantizer_that_with_values_is_named():
    """The initial state of a recurrent layer has the grid of its outputs and holds nothing but zeros."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.gru, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.gru(x)[0])

    generator = torch.Generator().manual_seed(0)
    found = bitwright.analyze(*simulated(Gated(), [torch.randn(8, 6, 4, generator=generator) for _ in range(2)]))
    sites = [c.evidence["site"] for row in found.layers for c in row.causes if "site" in c.evidence]
    assert "gru.l0.forward.output[0]" in sites and "gru.l0.forward.input[5]" not in sites


def test_simulations_without_encodings_or_quantizers_are_refused():
    data = [torch.randn(8, 4)]
    sim = QuantizationSimModel(nn.Linear(4, 4), data[0])
    with pytest.raises(CalibrationError, match="the simulation is not calibrated"):
        bitwright.analyze(sim, data)
    sim.compute_encodings(data, progress=False)
    sim.quantizers["*"].enabled = False
    with pytest.raises(CalibrationError, match="no quantizer of the simulation is enabled"):
        bitwright.analyze(sim, data)
    with pytest.raises(ConfigError, match="is a Linear. Remedy: give a simulation"):
        bitwright.analyze(nn.Linear(4, 4), data)


class Viewing(nn.Module):
    """Writes through a view, which steps cannot repeat."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.zeros(x.shape[0], 2, 4)
        y[:, 0].add_(self.layer(x))
        return y


def test_a_model_that_steps_cannot_repeat_is_measured_by_switching():
    sim, data = simulated(Viewing())
    found = bitwright.analyze(sim, data)
    assert "no estimate by derivatives, quantizers are switched one by one" in found.notes[0]
    assert all(row.only_db is not None for row in found.sites if row.enabled and row.role != "bias")
    assert found.sites[0].cost > 0


# ---- its cost


def test_the_estimate_is_linear_in_the_number_of_layers():
    def cost(blocks):
        sim = calibrated(QuantizationSimModel(chain(blocks, residual=True), chain_input()), [chain_input()])
        return steps(lambda: bitwright.analyze(sim, [chain_input()], mode="fast").to_json())

    cost(2)  # what is imported and cached at first use
    assert cost(20) < 2.2 * cost(10)


def test_the_estimate_takes_few_passes(torch_case):
    found = bitwright.analyze(torch_case.sim, torch_case.data * 4, mode="fast")
    assert found.data["samples"] == 256 and found.data["passes"] < 5


def answers(n, lost, won, seed=0):
    """Right or wrong: `lost` became wrong, `won` became right."""
    before = np.ones(n, bool)
    before[:won] = False
    after = before.copy()
    after[:won] = True
    after[won : won + lost] = False
    order = np.random.default_rng(seed).permutation(n)
    return before[order], after[order]


@pytest.mark.parametrize("lost, won", [(6, 0), (5, 0), (10, 1), (10, 4), (0, 9), (40, 25), (1, 1)])
def test_right_and_wrong_are_told_apart_exactly_where_mcnemars_exact_test_does(lost, won):
    found = compare(*answers(200, lost, won))
    p = stats.binomtest(won, won + lost).pvalue
    assert found.test == "mcnemar" and found.n == 200
    assert found.estimate == pytest.approx((won - lost) / 200)
    assert found.distinguishable == (p < 0.05) == (not found.low <= 0 <= found.high)
    assert found.low <= found.estimate <= found.high


def test_no_changed_answer_leaves_the_bound_that_so_many_samples_allow():
    found = compare(*answers(300, 0, 0))
    assert (found.estimate, found.distinguishable, found.needed) == (0, False, None)
    assert 0.5 * 3 / 300 < found.high < 2 * 3 / 300  # the rule of three
    assert found.text == f"no difference with 300 samples (95 % interval {found.low:.3g} to {found.high:.3g})"


def test_what_is_not_distinguishable_says_how_many_samples_would_tell():
    found = compare(*answers(200, 5, 2))
    assert not found.distinguishable and found.needed > 200
    assert "not distinguishable from zero with 200 samples" in found.text and "would be needed" in found.text
    more = [compare(*answers(found.needed, round(found.needed * 5 / 200), round(found.needed * 2 / 200)))]
    assert more[0].distinguishable, "with as many samples as were named, the same difference is told"


@pytest.mark.parametrize("kind", ["binary", "numbers"])
def test_intervals_cover_the_truth_about_as_often_as_they_say(kind):
    generator = np.random.default_rng(3)
    hits, runs = 0, 150
    for seed in range(runs):
        if kind == "binary":
            before, flip = generator.random(150) < 0.7, generator.random(150)
            after = np.where(flip < 0.1, ~before, before)
            truth = 0.1 * 0.3 - 0.1 * 0.7
        else:
            before, truth = generator.normal(size=60), 0.2
            after = before + 0.2 + (generator.exponential(size=60) - 1)
        found = compare(before, after, seed=seed)
        hits += found.low <= truth <= found.high
    assert 0.90 <= hits / runs <= 0.99


def test_numbers_by_bootstrap_the_same_for_the_same_seed():
    generator = np.random.default_rng(0)
    before = generator.normal(size=200)
    after = before - 0.3 + 0.2 * generator.normal(size=200)
    one, two = compare(before, after), compare(before, after)
    assert one == two and one.test == "bootstrap" and one.distinguishable
    assert one.text.startswith("worse by 0.3") and compare(before, after, better="lower").text.startswith("better by")
    sloppy = compare(before, before + 0.001 * (1 + 30 * generator.normal(size=200)))
    assert not sloppy.distinguishable and sloppy.needed > 200


def test_a_difference_that_is_the_same_for_every_sample_is_certain():
    found = compare([0.5, 0.25, 3.0], [1.5, 1.25, 4.0])
    assert (found.low, found.high, found.distinguishable) == (1.0, 1.0, True)


def test_one_number_for_all_has_no_interval():
    found = without_samples(0.9, 0.8)
    assert found.low is found.high is found.distinguishable is None
    assert found.text.startswith("worse by 0.1; no interval, because the metric returns one number")


@pytest.mark.parametrize(
    "before, after, problem",
    [
        pytest.param([1.0], [1.0], r"1 sample\(s\) have no interval", id="one-sample"),
        pytest.param([1.0, 2.0], [1.0, math.nan], "of the quantized model it is nan for sample 1", id="nan"),
        pytest.param([1.0, 2.0], [1.0, 2.0, 3.0], "2 values of the float model and 3 of the quantized", id="lengths"),
        pytest.param(["a", "b"], ["a", "b"], "values are of type", id="text"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(before, after, problem):
    with pytest.raises(ConfigError, match=problem):
        compare(before, after)


def test_a_confidence_outside_of_reason_is_refused():
    with pytest.raises(ConfigError, match="confidence: 1.5 is not between"):
        compare([1, 0], [1, 1], confidence=1.5)


def switched(sim, data, active):
    """Noise of the outputs with the quantizers of ``active`` sites, by switching them in the simulation."""
    subject = open_subject(sim)
    noise, signal = 0.0, 0.0
    for batch in data:
        (wanted,) = [np.array(y) for y in subject.outputs(batch, True)][:1]
        with only(subject.sites, active):
            found = subject.outputs(batch, False)[0]
        power = float(np.square(wanted).sum())
        noise, signal = noise + noise_over_signal(wanted, found) * power, signal + power
    return noise / signal


class Recurrent(nn.Module):
    """A recurrent layer, whose quantizers work inside of its steps, and a layer before and after it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.lstm, self.last = nn.Linear(4, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.lstm(torch.tanh(self.first(x)))[0])


def recurrent(front_end):
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(5, 6, 4, generator=generator) for _ in range(2)]
    model = Recurrent().eval()
    if front_end == "torch":
        sim = QuantizationSimModel(model, data[0])
    else:
        data = [x.numpy() for x in data]
        sim = bitwright.onnx.QuantizationSimModel(exported(model, torch.from_numpy(data[0])), data[0])
    sim.compute_encodings(data, progress=False)
    return sim, data


def agree(sim, data, tolerance, op=None):
    found = bitwright.analyze(sim, data, mode="exact")
    quantizers = {name: site.quantizer for name, site in sim.quantizers.items()}
    rows = [row for row in found.sites if row.enabled and not quantizers[row.name].derived]
    rows = [row for row in rows if op is None or row.op == op]
    assert rows
    for row in rows:
        mine = quantizers[row.name]
        only = decibel(switched(sim, data, lambda site, mine=mine: site.quantizer is mine))
        without = decibel(switched(sim, data, lambda site, mine=mine: site.quantizer is not mine))
        assert row.only_db == pytest.approx(only, abs=tolerance), row.name
        assert row.without_db == pytest.approx(without, abs=tolerance), row.name


def test_one_site_and_all_but_one_are_those_of_the_simulation(case):
    agree(case.sim, case.data[:2], 0.1)


@pytest.mark.parametrize("front_end", ["torch", pytest.param("onnx", marks=pytest.mark.slow)])
def test_quantizers_inside_recurrent_layers_are_switched_too(front_end):
    sim, data = recurrent(front_end)
    agree(sim, data[:1], 0.3, "LSTM")


def test_groups_are_measured_together(case):
    found = bitwright.analyze(case.sim, case.data[:1], groups={"first two": ["*conv1*", "*conv2*"]})
    rows = {row.name: row for row in found.groups}
    assert rows.keys() == {"first two", "all weights", "all activations"}
    group = set(rows["first two"].sites)
    assert group == {n for n, s in case.sim.quantizers.items() if "conv1" in n or "conv2" in n}
    assert rows["first two"].only_db == pytest.approx(
        decibel(switched(case.sim, case.data[:1], lambda site: site.name in group)), abs=0.1
    )
    weights = rows["all weights"]
    activations = rows["all activations"]
    assert weights.only_db == pytest.approx(activations.without_db, abs=1e-3)


def chain_of_layers(layers):
    torch.manual_seed(0)
    modules = [m for _ in range(layers) for m in (nn.Linear(8, 8), nn.ReLU())]
    data = [torch.randn(4, 8)]
    sim = calibrated(QuantizationSimModel(nn.Sequential(*modules).eval(), data[0]), data)
    return sim, data


def measured(sim, data, budget=1 << 30):
    exact = Exact(TorchSimulation(sim), data, budget=budget)
    exact.measure({n: frozenset([n]) for n, s in sim.quantizers.items() if s.enabled}, iter)
    return exact


def test_half_of_the_operators_run_again_in_a_chain():
    sim, data = chain_of_layers(20)
    exact = measured(sim, data)
    evaluations = 2 * len(exact.found)  # with it alone, and with all but it
    assert exact.runs < 0.55 * evaluations * exact.steps + 2 * exact.steps


def test_a_small_budget_changes_nothing_but_where_values_lie(torch_case):
    data = batches(2, rows=64)  # 128 KiB and more per value
    wide, narrow = (measured(torch_case.sim, data, budget) for budget in (1 << 30, 1 << 19))
    assert narrow.peak < (1 << 19) + (1 << 17) < wide.peak  # what is too small for a file stays
    assert {n: p.only.ratio for n, p in wide.found.items()} == {n: p.only.ratio for n, p in narrow.found.items()}
    assert wide.steps == narrow.steps


def test_a_user_function_sees_the_same_switches(torch_case):
    """Its values with only one quantizer, and with all but it, of the four that cost most."""
    seen = []

    def spread(model):
        seen.append(sum(site.enabled for site in torch_case.sim.quantizers.values()))
        with torch.no_grad():
            return float(torch.cat([model(x) for x in torch_case.data]).std())

    found = bitwright.analyze(torch_case.sim, torch_case.data, spread)
    assert found.metric.name == "spread" and found.metric.difference.test == "none"
    told = [row for row in found.sites if row.metric_only is not None]
    assert len(told) == 4 and all(row.metric_without is not None for row in told)
    assert min(seen) == 1, "one quantizer alone"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x):
        low, high = torch.relu(self.conv(x)).split(2, 1)
        return self.fc(torch.cat([low, high], 1).mean((2, 3)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    torch.manual_seed(0)
    folder, x = tmp_path_factory.mktemp("layers"), torch.randn(3, 3, 8, 8)
    sim = calibrated(TorchSim(Net().eval(), x), [x])
    files = sim.export(folder, "net")
    onnx = OnnxSim(files.float_model)
    feed = {onnx.graph.inputs[0]: x.numpy()}
    onnx.compute_encodings([feed])
    return {"torch": (sim, x), "onnx": (onnx, feed), "folder": folder}


@pytest.mark.parametrize("which", ["torch", "onnx"])
def test_float_and_simulated_values_are_those_of_the_model(made, which, tmp_path):
    sim, batch = made[which]
    folder = LayerOutputUtil(sim, tmp_path).generate_layer_outputs(batch)
    told = json.loads((folder / "names.json").read_text())["order"]
    assert [row["layer"].partition("[")[0] for row in told if row["layer"]][0] == sim.graph.ops[0].name
    last = told[-1]["file"]
    quantized = np.load(folder / "quantized" / f"{last}.npy")
    real = np.load(folder / "float" / f"{last}.npy")
    if which == "torch":
        expected = sim.model(batch).detach().numpy()
        with sim.in_float():
            exact = sim.model(batch).detach().numpy()
    else:
        expected = sim.run(batch)[0]
        exact = None
    np.testing.assert_allclose(quantized, expected, atol=1e-5)
    if exact is not None:
        np.testing.assert_allclose(real, exact, atol=1e-5)
    assert not np.array_equal(real, quantized) and told[-1]["sqnr_db"] > 20
    assert (folder / "inputs").is_dir() and len(list((folder / "float").iterdir())) == len(told)
    again = LayerOutputUtil(sim, tmp_path).generate_layer_outputs(batch)
    assert (folder.name, again.name) == ("batch_0", "batch_1")


def test_names_are_those_of_the_exported_file(made, tmp_path):
    sim, batch = made["torch"]
    util = LayerOutputUtil(sim, tmp_path, exported=made["folder"], form="safetensors")
    folder = util.generate_layer_outputs(batch)
    rows = {row["layer"]: row for row in json.loads((folder / "names.json").read_text())["order"]}
    graph = made["onnx"][0].graph
    assert rows["conv"]["tensor"] in graph.values or rows["fc"]["tensor"] in graph.values
    named = [row for row in rows.values() if row["tensor"]]
    assert named and all(row["tensor"] in graph.values for row in named)
    held = load_file(folder / "float.safetensors")
    assert held.keys() == {row["file"] for row in rows.values()}
    assert sorted(path.name for path in folder.iterdir()) == [
        "float.safetensors", "inputs.safetensors", "names.json", "quantized.safetensors",
    ]  # fmt: skip


def test_raw_layout_has_a_folder_per_sample(made, tmp_path):
    sim, batch = made["torch"]
    folder = LayerOutputUtil(sim, tmp_path, form="raw").generate_layer_outputs(batch)
    for i in range(3):
        numbers = np.fromfile(folder / "quantized" / f"layer_outputs_{i}" / "fc.raw", np.float32)
        np.testing.assert_allclose(numbers, sim.model(batch)[i].detach().numpy(), atol=1e-5)


def test_names_that_differ_in_case_or_marks_alone_are_files_of_their_own(tmp_path):
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A, self.a = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.a(self.A(x))

    sim = calibrated(TorchSim(Twins(), torch.ones(1, 2)), [torch.ones(1, 2)])
    folder = LayerOutputUtil(sim, tmp_path).generate_layer_outputs(torch.ones(1, 2))
    assert len({path.name.lower() for path in (folder / "float").iterdir()}) == 2


def test_a_layer_that_runs_twice_has_two_values():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            h = torch.zeros(1, 2)
            for step in range(2):  # over time: one place
                h = self.fc(x[:, step] + h)
            return h

    x = torch.ones(1, 2, 2)
    sim = calibrated(TorchSim(Twice(), x), [x])
    names = [name for name, _, _ in layer_values(sim, x)]
    assert [name for name in names if name.startswith("fc")] == ["fc", "fc#1"]


def test_bad_input(made, tmp_path):
    sim, _ = made["torch"]
    with pytest.raises(ConfigError, match="no form 'npz'.*use one of npy"):
        LayerOutputUtil(sim, tmp_path, form="npz")
    with pytest.raises(ExportError, match="no export"):
        LayerOutputUtil(sim, tmp_path, exported=tmp_path)
    fresh = TorchSim(Net(), torch.zeros(1, 3, 8, 8))
    with pytest.raises(CalibrationError, match="not calibrated"):
        LayerOutputUtil(fresh, tmp_path / "none").generate_layer_outputs(torch.zeros(1, 3, 8, 8))
    assert not list((tmp_path / "none").iterdir())
