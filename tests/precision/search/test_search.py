"""Precisions chosen on both front ends."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.analysis.subject import open_subject
from bitwright.core.numerics.formats import IntFormat
from bitwright.errors import BitwrightError
from bitwright.precision.candidates import as_candidates, find_groups
from bitwright.precision.costs import present_costs
from bitwright.precision.search import mixed_precision
from tests.precision.nets import FRONTS, accuracy, batches, model, simulation

SMALL = ("w8a8", "w4a8", "w2a8")


def two_bits() -> Any:
    from bitwright import PRESETS, Preset

    w8 = PRESETS["w8a8"]
    return Preset(replace(w8.weight, format=IntFormat(2)), w8.activation)


def two_bits_each() -> Any:
    """What leaves noise of the outputs."""
    return replace(two_bits(), activation=replace(two_bits().activation, format=IntFormat(2, signed=False)))


CANDIDATES = ("w8a8", "w4a8", two_bits())


@pytest.mark.parametrize("front", FRONTS)
def test_groups_are_the_operands_of_kernels_and_what_sums_join(front: str) -> None:
    sim = simulation(front)
    groups = find_groups(sim, as_candidates(["w8a8", "w4a8"]))
    sites = [name for g in groups for name in g.sites]
    assert len(sites) == len(set(sites))
    weights = [g.weights for g in groups if g.weights]
    # the sum reads what the second convolution reads, so these two are one group
    assert sorted(map(len, weights)) == [1, 1, 1]
    joined = next(g for g in groups if any("add" in layer.lower() for layer in g.layers))
    assert any("body" in layer for layer in joined.layers) and len(joined.activations) == 2


@pytest.mark.slow_variants("onnx")
@pytest.mark.parametrize("front", FRONTS)
def test_the_cheapest_precisions_within_a_drop(front: str) -> None:
    metric = accuracy(front)
    result = mixed_precision(model(front), batches(front), CANDIDATES, metric=metric, allowed_drop=0.06, evaluations=8)
    chosen = result.chosen
    assert result.met and chosen is not None and chosen.drop <= 0.06
    uniform = {p.name: p for p in result.points}
    assert chosen.costs["weight_bytes"] < 3000 and result.evaluations <= 8
    # what is in force is what the table says
    subject = open_subject(result.sim)
    assert float(np.mean(metric(subject.runnable()))) == pytest.approx(chosen.metric, abs=0.01)
    widths = {s.quantizer.spec.format.bits for s in result.sim.quantizers.values() if s.role == "weight"}
    assert widths <= {2, 4, 8} and min(widths) < 8
    assert result.interval["held_back"] == 200 and "chosen" in str(result)
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert content["format"] == "bitwright-mixed-precision" and content["chosen"]["name"] == chosen.name
    assert uniform


@pytest.mark.slow_variants("torch")
@pytest.mark.parametrize("front", FRONTS)
def test_the_best_precisions_within_a_budget_beat_the_uniform_ones_of_the_same_cost(front: str) -> None:
    sim, data = simulation(front), batches(front)
    result = mixed_precision(sim, data, CANDIDATES, budget={"weight_bytes": 0.62}, evaluations=4)
    assert result.sim is sim and result.chosen is not None
    dear = max(
        p.costs["weight_bytes"]
        for p in mixed_precision(simulation(front), data, ["w8a8"], budget=1.0, rounding=False).points
    )
    assert result.chosen.costs["weight_bytes"] <= 0.62 * dear * (1 + 1e-9)
    w4 = mixed_precision(simulation(front), data, ["w4a8"], budget=1e9).points[0]
    if w4.costs["weight_bytes"] <= 0.62 * dear:
        assert result.chosen.sqnr_db >= w4.sqnr_db - 0.5


@pytest.mark.quick_variants("activation_bytes")
@pytest.mark.parametrize("cost", ["weight_bytes", "bit_ops", "activation_bytes", "ms"])
def test_every_cost_goes_down_as_less_quality_is_asked_for(cost: str) -> None:
    times = {kind: {"w8a16": 3.0, "w8a8": 2.0, "w4a8": 1.0} for kind in ("Conv", "Gemm", "Add", "MatMul")}
    found = [
        mixed_precision(
            simulation("torch"), batches("torch"), ["w8a16", "w8a8", "w4a8"], cost=cost, min_sqnr=db, times=times,
            rounding=False,
        ).chosen.costs[cost]
        for db in (38, 10)
    ]  # fmt: skip
    assert found[1] <= found[0] and found[1] > 0


def test_the_same_seed_gives_the_same_choice() -> None:
    runs = [
        mixed_precision(simulation("torch"), batches("torch"), CANDIDATES, min_sqnr=15, evaluations=4).to_dict()
        for _ in range(2)
    ]
    for run in runs:
        del run["seconds"]
    assert runs[0] == runs[1]


def test_a_frozen_site_stays_as_it_is() -> None:
    sim = simulation("torch")
    site = sim.quantizers["head.weight"]
    site.frozen, before = True, site.encoding
    mixed_precision(sim, batches("torch"), ["w8a8", "w4a8"], budget=0.75, rounding=False)
    assert site.encoding is before


def test_blocks_that_do_not_divide_are_refused_with_the_reason() -> None:
    result = mixed_precision(simulation("torch"), batches("torch"), ["w8a8", "w4g32"], budget=1.0, rounding=False)
    stem = next(g for g in result.groups if "stem.weight" in g.weights)
    assert "blocks of 32" in stem.refused["w4g32"] and stem.candidates == (0,)


def test_the_best_point_is_on_disk(tmp_path: Any) -> None:
    from bitwright.compare.verify import verify_folder

    result = mixed_precision(
        model("onnx"), batches("onnx"), ["w8a8", "w4a8"], budget=0.75, folder=tmp_path, filename_prefix="best"
    )
    assert verify_folder(tmp_path, "best").ok and result.chosen is not None


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing asked": ({}, "neither a budget nor a quality is asked for"),
    "drop without metric": ({"allowed_drop": 0.1}, "there is no metric that could drop"),
    "budget too small": ({"budget": 0.1}, r"no choice of candidates fits weight_bytes.*the least possible is \d+"),
    "unknown cost": ({"cost": "bytes", "budget": 0.5}, "there is no cost 'bytes'.*weight_bytes"),
    "no times": ({"cost": "ms", "budget": 0.5}, "milliseconds are wanted and times is None"),
    "times with holes": ({"cost": "ms", "budget": 1e9, "times": {"Conv": {"w8a8": 1, "w4a8": 1}}}, "no row for"),
    "a candidate without time": (
        {"cost": "ms", "budget": 1e9, "times": {k: {"w8a8": 1} for k in ("Conv", "Gemm", "Add")}}, "has None for w4a8"),
    "a row of a slip": (
        {"cost": "ms", "budget": 1e9, "times": {k: {"w8a8": 1, "w4a8": 1} for k in ("Conv", "Gemm", "Add", "Gem", "stemm")}},
        r"neither a layer .*'Gem' \(did you mean 'Gemm'.*'stemm' \(did you mean 'stem'.*correct or remove them.*Conv, .*Gemm"),
    "no candidates": ({"candidates": [], "budget": 1}, "the list is empty"),
    "twice": ({"candidates": ["w8a8", "w8a8"], "budget": 1}, "w8a8 stands there twice"),
    "strange candidate": ({"candidates": [8], "budget": 1}, "8 is neither a preset nor a pair of precisions"),
    "strange drop": ({"metric": lambda m: 1.0, "allowed_drop": "some"}, "'some' is not a drop"),
    "NaN": ({"metric": lambda m: float("nan"), "allowed_drop": 0.1}, "of the float model it is NaN"),
    "constant": (
        {"metric": lambda m: 0.5, "allowed_drop": 0.1, "candidates": [two_bits_each()], "rounding": False},
        "it is 0.5 for outputs that are mostly noise.*the same as in float"),
    "short deadline": (
        {"metric": accuracy("torch"), "allowed_drop": 0.1, "deadline": 1e-6}, 
        r"one evaluation of the metric takes .*what comes before the first point took .*allow more than"),
    "no direction": (
        {"metric": "agreement", "lower_is_better": True, "allowed_drop": 0.1}, "the direction of 'agreement' is known"),
    "data of a function": (
        {"metric": lambda m: 0.5, "evaluation_data": [1], "allowed_drop": 0.1}, "a function, which looks at data of its own"),
    "no number": ({"min_sqnr": float("nan")}, "nan is not a number of dB"),
    "no time": ({"min_sqnr": 20, "deadline": float("nan")}, "nan is not a time"),
    "no share": ({"min_sqnr": 20, "confidence": 95}, "95 is not a share"),
    "no labels": ({"metric": "accuracy", "allowed_drop": 0.1}, "no labels are given"),
}  # fmt: skip


@pytest.mark.slow_variants(
    "budget too small",
    "unknown cost",
    "no times",
    "times with holes",
    "a candidate without time",
    "a row of a slip",
    "strange drop",
    "NaN",
    "short deadline",
    "no labels",
)
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    options, message = BAD[case]
    sim = simulation("torch")
    before = sim.quantizers["stem.weight"].encoding
    with pytest.raises(BitwrightError, match=message):
        mixed_precision(sim, batches("torch"), **{"candidates": ["w8a8", "w4a8"], **options})
    assert sim.quantizers["stem.weight"].encoding is before


def test_the_other_direction_is_noticed() -> None:
    def error(net: Any) -> float:
        return 1.0 - float(accuracy("torch")(net).mean())

    with pytest.raises(BitwrightError, match="and higher is better.*lower_is_better=True"):
        mixed_precision(
            simulation("torch"), batches("torch"), [two_bits()], metric=error, allowed_drop=0.1, rounding=False
        )


def test_bad_data() -> None:
    for data, message in (([], "the data held no batch"), (np.zeros(3), "data is a ndarray, not a list")):
        with pytest.raises(BitwrightError, match=message):
            mixed_precision(simulation("torch"), data, budget=0.5)
    with pytest.raises(BitwrightError, match="a dict is not a model of PyTorch or ONNX"):
        mixed_precision({}, batches("torch"), budget=0.5)


def test_named_metrics_stop_early_where_the_drop_is_beyond_doubt() -> None:
    x = batches("torch", 64, 32)
    result = mixed_precision(
        simulation("torch"), batches("torch"), ["w8a8", two_bits_each()], metric="agreement", evaluation_data=x,
        allowed_drop=0.02, rounding=False, confidence=0.6,
    )  # fmt: skip
    dropped = [p for p in result.points if 0 < p.share < 1]
    assert dropped and result.evaluations < len([p for p in result.points if p.metric is not None])


@pytest.mark.slow_variants("onnx")
@pytest.mark.parametrize("front", FRONTS)
def test_weights_that_are_frozen_are_told(front: str) -> None:
    """As after a default `quantize`, whose weights were rounded at eight bits."""
    sim = simulation(front)
    frozen = [site for site in sim.quantizers.values() if site.role == "weight"]
    for site in frozen:
        site.frozen = True
    with pytest.raises(BitwrightError, match=f"{len(frozen)} weights, such as .*frozen.*give the float model instead"):
        mixed_precision(sim, batches(front), ("w8a8", "w4a8"), budget=0.5)
    result = mixed_precision(sim, batches(front), ("w8a8", "w8a16"), cost="bit_ops", min_sqnr=10.0)
    assert any("keep the width at which they were rounded" in note for note in result.notes)


@pytest.mark.quick_variants("torn")
@pytest.mark.parametrize(
    "content, problem",
    [
        pytest.param("{", "it is not JSON", id="torn"),
        pytest.param('{"Conv": {}, "Conv": {}}', "the key 'Conv' occurs twice", id="twice"),
        pytest.param("[1]", "it holds a list, not a table of times", id="a-list"),
        pytest.param(None, "the file cannot be read", id="missing"),
    ],
)
def test_a_damaged_table_of_times_is_named(tmp_path: Any, content: str | None, problem: str) -> None:
    path = tmp_path / "times.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BitwrightError, match=rf"times\.json.*: {problem}"):
        mixed_precision(simulation("torch"), batches("torch"), ["w8a8", "w4a8"], cost="ms", budget=1e9, times=path)


@pytest.mark.slow_variants("LSTM")
@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_recurrent_layers_of_onnx_are_estimated_not_measured_one_by_one(op: str) -> None:
    """Without estimates every group was measured alone at every candidate before the search began."""
    from bitwright.onnx import QuantizationSimModel
    from bitwright.precision.search import Explorer
    from tests.support.recurrent_nets import Variant, feeds, layer_model

    v = Variant(op, batch=8)
    sim = QuantizationSimModel(layer_model(v), feeds(v), "mse", threads=1)
    data = [feeds(v, seed) for seed in range(5)]
    sim.compute_encodings(data)
    subject = open_subject(sim)
    search = Explorer(subject, as_candidates(["w8a8", "w4a8"]), data, 0.0, None, False, 32, 0, None)
    assert search.measurements == 0 and not any("one group at a time" in note for note in search.notes)
    result = mixed_precision(sim, data, ["w8a8", "w4a8"], min_sqnr=20, rounding=False, evaluations=3)
    assert len([p for p in result.points if p.sqnr_db is not None]) <= 3


class Scaled(nn.Module):
    """A scale of each channel that no norm has is a constant with a quantizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(16) + 0.5)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.scale)


def test_constants_are_estimated_not_measured_one_by_one() -> None:
    """Scales of norms and tables of angles: the groups of a decoder's were measured at every candidate before the search."""
    torch.manual_seed(0)
    data = [torch.randn(8, 16) for _ in range(5)]
    result = mixed_precision(Scaled().eval(), data, ["w8a8", "w4a8"], min_sqnr=20, rounding=False, evaluations=3)
    sites = [name for group in result.groups for name in group.sites]
    assert any(result.sim.quantizers[name].role == "constant" for name in sites)
    assert not any("one group at a time" in note for note in result.notes)


@pytest.mark.slow_variants("onnx")
@pytest.mark.parametrize("front", FRONTS)
def test_the_least_possible_budget_that_an_error_names_works(front: str) -> None:
    options: dict[str, Any] = {"rounding": False, "evaluations": 2}
    with pytest.raises(BitwrightError, match="no choice of candidates fits weight_bytes") as told:
        mixed_precision(simulation(front), batches(front), ["w8a8", "w4a8"], budget=0.01, **options)
    numbers = re.findall(r"least possible is ([\d.e+]+) .([\d.]+) of", str(told.value))[0]
    for number in map(float, numbers):
        found = mixed_precision(simulation(front), batches(front), ["w8a8", "w4a8"], budget=number, **options)
        widths = {s.quantizer.spec.format.bits for s in found.sim.quantizers.values() if s.role == "weight"}
        assert found.met and widths == {4}


def test_budgets_that_no_choice_fits_together() -> None:
    """Each alone has a choice: fewer bits of weights, or of activations."""
    options: dict[str, Any] = {"rounding": False, "evaluations": 2}

    def search(budget: dict[str, float]) -> Any:
        return mixed_precision(simulation("torch"), batches("torch"), ["w4a16", "w8a8"], budget=budget, **options)

    least = {}
    for cost in ("weight_bytes", "activation_bytes"):
        with pytest.raises(BitwrightError) as told:
            search({cost: 2.0})
        least[cost] = float(re.findall(r"least possible is ([\d.e+]+)", str(told.value))[0])
        assert search({cost: least[cost]}).met
    with pytest.raises(
        BitwrightError, match="fits activation_bytes of .* within weight_bytes of .*least possible is"
    ) as both:
        search(least)
    least["activation_bytes"] = float(re.findall(r"least possible is ([\d.e+]+)", str(both.value))[0])
    assert search(least).met


def test_a_metric_that_looks_strange_later_is_put_to_noise_too() -> None:
    """The first point may be too good to tell an error from a share of right answers."""
    seen: list[float] = []

    def error(net: Any) -> float:
        lost = 1.0 - float(accuracy("torch")(net).mean())
        seen.append(lost)
        return seen[0] if len(seen) == 2 else lost  # the first point is as good as float, by this metric

    with pytest.raises(BitwrightError, match="and higher is better.*lower_is_better=True"):
        mixed_precision(
            simulation("torch"), batches("torch"), [two_bits(), two_bits_each()], metric=error, budget=1.0, cost="bit_ops",
            rounding=False, evaluations=12,
        )  # fmt: skip


def test_a_table_of_times_may_know_more_operators(caplog: pytest.LogCaptureFixture) -> None:
    """The table of a chip is for many models; a row of a layer that no choice changes is told."""
    times = {kind: {"w8a8": 2.0, "w4a8": 1.0} for kind in ("Conv", "Gemm", "Add", "LSTM", "relu")}
    with caplog.at_level("INFO", "bitwright"):
        found = mixed_precision(
            simulation("torch"), batches("torch"), ["w8a8", "w4a8"], cost="ms", budget=0.9, times=times, rounding=False,
            evaluations=2,
        )  # fmt: skip
    assert found.met and "times of relu count nothing" in caplog.text


@pytest.mark.slow_variants("onnx")
@pytest.mark.parametrize("front", FRONTS)
def test_costs_of_a_simulation_as_it_stands_are_those_of_the_choice(front: str) -> None:
    times = {
        "Conv": {"w8a8": 3.0, "w8a16": 5.0, "w4a8": 2.0, "w4a16": 4.5},
        "Gemm": {"w8a8": 1.0, "w8a16": 2.0, "w4a8": 0.5, "w4a16": 1.5},
        "Add": {"w8a8": 0.2, "w8a16": 0.4, "w4a8": 0.2, "w4a16": 0.4},
    }
    found = mixed_precision(
        simulation(front), batches(front), cost="ms", times=times, min_sqnr=25, rounding=False, evaluations=4
    )
    assert found.chosen is not None and len(set(found.chosen.choice.values())) > 1
    assert present_costs(found.sim, times) == pytest.approx(dict(found.chosen.costs))


def test_the_rows_that_a_table_of_times_misses_are_all_named_and_suffice() -> None:
    options: dict[str, Any] = {"cost": "ms", "min_sqnr": 5, "rounding": False, "evaluations": 2}
    with pytest.raises(BitwrightError, match="the table has no row for") as told:
        mixed_precision(simulation("onnx"), batches("onnx"), ["w8a8", "w4a8"], times={}, **options)
    wanted = json.loads("{" + told.value.remedy.partition("operator type: ")[2].replace("...", "1.5") + "}")
    found = mixed_precision(simulation("onnx"), batches("onnx"), ["w8a8", "w4a8"], times=wanted, **options)
    assert len(wanted) >= 3 and found.met and "evaluations of the metric" not in str(found)


class Branches(nn.Module):
    """Three layers that read one grid."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        return self.last(sum(branch(h).relu() for branch in self.branches))


def test_the_choice_that_is_told_has_tied_groups_at_one_width_of_activations() -> None:
    torch.manual_seed(0)
    data = [torch.randn(16, 6) for _ in range(6)]
    found = mixed_precision(Branches().eval(), data, cost="bit_ops", min_sqnr=30, evaluations=6)
    ties = [[g.name for g in found.groups if g.tie == tie] for tie in {g.tie for g in found.groups} - {""}]
    assert max(map(len, ties)) >= 4
    for point in found.points:
        for tie in ties:
            assert len({point.choice[name].partition("a")[2] for name in tie}) == 1, point.choice
