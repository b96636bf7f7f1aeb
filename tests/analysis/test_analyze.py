"""What an analysis says of small models, on both front ends."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
from bitwright.analysis import Analysis
from bitwright.errors import CalibrationError, ConfigError, ModelError
from bitwright.torch import QuantizationSimModel
from tests.support.cost import steps
from tests.support.zoo import chain, chain_input


@pytest.mark.slow_variants("onnx")
def test_rows_of_sites_and_layers_are_there_worst_first(case):
    found = bitwright.analyze(case.sim, case.data, mode="fast")
    assert {row.name for row in found.sites} == set(case.sim.quantizers)
    costs = [row.cost for row in found.sites]
    assert costs == sorted(costs, reverse=True) and costs[0] > 0
    noise = [row.noise or 0 for row in found.layers]
    assert noise == sorted(noise, reverse=True)
    assert found.worst(2) == found.layers[:2]


@pytest.mark.slow_variants("onnx")
def test_the_dictionary_is_json_and_comes_back(case):
    found = bitwright.analyze(case.sim, case.data, mode="fast")
    content = json.loads(found.to_json())
    assert content == found.to_dict() and content["format"] == "bitwright-analysis"
    assert Analysis.from_dict(content).to_dict() == content
    assert found._repr_html_().startswith("<table>") and case.conv1 in str(found)


@pytest.mark.slow_variants("onnx")
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


@pytest.mark.slow_variants("onnx")
def test_auto_measures_the_worst_and_estimates_all(case):
    found = bitwright.analyze(case.sim, case.data)
    assert found.mode == "auto"
    assert all(row.noise is not None and row.only_db is not None for row in found.sites if row.role != "bias")
    assert {row.name for row in found.groups} == {"all weights", "all activations"}


@pytest.mark.slow_variants("onnx")
def test_a_deadline_ends_it_with_what_there_is(case):
    found = bitwright.analyze(case.sim, case.data, deadline=1e-9)
    assert all(row.noise is not None for row in found.sites if row.role != "bias")
    assert all(row.only_db is None for row in found.sites)
    assert any("ended by the deadline of 1e-09 s" in note for note in found.notes)
    assert any("outputs were compared on 16 of 64 samples" in note for note in found.notes)


@pytest.mark.slow_variants("onnx")
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
    with pytest.raises(ConfigError, match="holds measurements of another simulation, other data or another metric"):
        bitwright.analyze(torch_case.sim, torch_case.data[1:3], resume=tmp_path)


@pytest.mark.parametrize(
    "content, problem",
    [
        pytest.param("{", "it is not JSON", id="torn"),
        pytest.param("[" * 100 + "]" * 100, "it is nested too deeply", id="deep"),
        pytest.param("[]", "it holds no measurements of an analysis", id="a-list"),
        pytest.param('{"measured": {"pairs": {"x": 3}}}', "its measurements cannot be read", id="other-pairs"),
        pytest.param('{"measured": {"metrics": {"x": [1]}}}', "its measurements cannot be read", id="other-metrics"),
    ],
)  # fmt: skip
def test_a_damaged_file_of_measurements_is_named(torch_case, tmp_path, content, problem):
    bitwright.analyze(torch_case.sim, torch_case.data[:1], mode="exact", resume=tmp_path, deadline=1e-9)
    path = tmp_path / "bitwright_analysis_measured.json"
    if content.startswith("{") and content != "{":
        content = json.dumps({**json.loads(path.read_text()), **json.loads(content)})
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"measured.json.*: {problem}.*\n*.*remove it, or name another folder"):
        bitwright.analyze(torch_case.sim, torch_case.data[:1], mode="exact", resume=tmp_path)


# ---- metrics


@pytest.mark.quick_variants("torch-accuracy-higher")
@pytest.mark.parametrize("metric, better", [("agreement", "higher"), ("kl", "lower"), ("accuracy", "higher")])
def test_named_metrics_are_read_off_the_outputs(case, metric, better):
    labels = np.arange(64) % 5
    found = bitwright.analyze(case.sim, case.data, metric, labels=labels)
    assert (found.metric.name, found.metric.better, found.metric.difference.n) == (metric, better, 64)
    rows = [row for row in found.sites if row.only_db is not None]
    assert all(row.metric_only is not None and row.metric_without is not None for row in rows)
    if metric == "kl":
        assert found.metric.float == 0 < found.metric.quantized == pytest.approx(found.output["kl"])


@pytest.mark.slow_variants("onnx")
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
    sim = QuantizationSimModel(model.eval(), data[0])
    sim.compute_encodings(data, progress=False)
    return sim, data


@pytest.mark.slow_variants("constant", "text")
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


def test_models_that_cannot_be_compared_are_refused():
    with pytest.raises(ModelError, match="not deterministic: two float runs of the same batch differ"):
        bitwright.analyze(*simulated(Dropping()))
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
        sim = QuantizationSimModel(chain(blocks, residual=True), chain_input())
        sim.compute_encodings([chain_input()], progress=False)
        return steps(lambda: bitwright.analyze(sim, [chain_input()], mode="fast").to_json())

    cost(2)  # what is imported and cached at first use
    assert cost(40) < 2.2 * cost(20)


def test_the_estimate_takes_few_passes(torch_case):
    found = bitwright.analyze(torch_case.sim, torch_case.data * 4, mode="fast")
    assert found.data["samples"] == 256 and found.data["passes"] < 5
