"""Groups of precisions, requests of the user, and what prepared precisions change and restore."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import bitwright.torch as bt
from bitwright.analysis.subject import Subject, open_subject
from bitwright.errors import BitwrightError
from bitwright.onnx import QuantizationSimModel
from bitwright.precision.candidates import as_candidates, coarser, find_groups, ties, without
from bitwright.precision.manual import MODEL_INPUT, MODEL_OUTPUT, PrecisionRequest, set_precisions
from bitwright.precision.prepared import PreparedPrecisions, noise_table
from bitwright.precision.search import Explorer, mixed_precision
from bitwright.recipes.site_cost import OutputErrors
from tests.precision.nets import FRONTS
from tests.precision.nets import simulation as quantized
from tests.support.simulations import calibrated

CANDIDATES = as_candidates(["w8a8", "w8a16", "w4a8", "w4a16"])


class Branches(nn.Module):
    """Two layers that read one tensor, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.left(x)) * torch.sigmoid(self.right(x)))


class Sum(nn.Module):
    """Two layers and a sum, which has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) + torch.sigmoid(x))


class Chosen(nn.Module):
    """A layer whose outputs choose rows of a table: no derivative leads through that."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.table, self.last = nn.Linear(16, 8), nn.Embedding(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(self.scores(x).argmax(-1)) + x)


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(16, 16, generator=generator) for _ in range(6)]


def simulation(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return calibrated(bt.QuantizationSimModel(kind().eval(), data()[0], "mse"), data())


def test_candidates_that_make_the_same_of_a_group_are_one() -> None:
    """Widths of weights mean nothing to a sum: a search would measure one model twice, and find one of them quieter."""
    found = explorer(Sum)
    bare = [g for g in found.groups if not g.weights]
    assert bare and all(len(g.candidates) == 2 for g in bare if not g.tie)
    assert all(len(g.candidates) == 4 for g in found.groups if g.weights and g.activations)
    result = mixed_precision(simulation(Sum), data(), CANDIDATES, min_sqnr=1.0, rounding=False)
    assert [p.name for p in result.points if p.sqnr_db is not None] == ["w4a16"]
    assert {*result.precisions.values()} == {"w4a16"}  # and the sum is told as its neighbours are


def test_tied_groups_keep_a_candidate_per_precision_of_activations() -> None:
    found = explorer(Branches)
    tied = [found.groups[i] for members in ties(found.groups) for i in members]
    assert any(g.weights and not g.activations for g in tied)
    for group in tied:
        assert {CANDIDATES[c].activation for c in group.candidates} == {c.activation for c in CANDIDATES}
        assert len(group.candidates) == (4 if group.weights else 2)


@pytest.mark.parametrize(
    ("one", "other", "is_coarser"),
    [("w4a8", "w8a8", True), ("w4a8", "w4a16", True), ("w8a8", "w4a16", False), ("w8a8", "w8a8", False)],
)
def test_fewer_bits_are_coarser(one: str, other: str, is_coarser: bool) -> None:
    assert coarser(*as_candidates([one]), *as_candidates([other])) is is_coarser


def test_formats_of_other_kinds_have_no_order() -> None:
    pairs = [((bits, kind), (bits, kind)) for bits, kind in ((8, "int"), (16, "float"), (32, "float"))]
    eight, floating, plain = as_candidates(pairs)
    assert not coarser(eight, floating) and not coarser(floating, eight)
    assert coarser(eight, plain) and coarser(floating, plain) and not coarser(plain, eight)


def explorer(kind: type[nn.Module]) -> Explorer:
    subject = open_subject(simulation(kind))
    return Explorer(subject, CANDIDATES, data(), time.monotonic(), None, True, 32, 0, None)


def test_layers_that_read_one_grid_have_weights_of_their_own() -> None:
    sim = simulation(Branches)
    (joined,) = [g for g in find_groups(sim, CANDIDATES) if "left.weight" in g.weights]
    assert set(joined.weights) == {"left.weight", "right.weight"} and not joined.tie
    groups = find_groups(sim, CANDIDATES, tied=True)
    of = {weight: g for g in groups for weight in g.weights}
    left, right = of["left.weight"], of["right.weight"]
    assert left.weights == ("left.weight",) and not left.activations and left.layers == ("left",)
    assert left.tie == right.tie != "" and not of["last.weight"].tie
    shared = next(g for g in groups if g.tie == left.tie and not g.weights)
    assert set(shared.activations) == set(joined.activations)
    assert [sorted(groups[i].name for i in tie) for tie in ties(groups)] == [
        sorted((left.name, right.name, shared.name))
    ]
    assert len({g.name for g in groups}) == len(groups)


def test_a_search_gives_them_widths_of_their_own_and_activations_of_one() -> None:
    both = sum(v.numel() for n, v in Branches().named_parameters() if "last" not in n and "weight" in n)
    total = sum(v.numel() for v in Branches().parameters())
    share = 1 - (both / 2 + 40) / 2 / total  # room for one of the two at four bits, not for both in eight
    result = mixed_precision(simulation(Branches), data(), CANDIDATES, budget={"weight_bytes": share, "bit_ops": 0.7})
    assert result.chosen is not None
    found = result.precisions
    assert found["left"][-2:] == found["right"][-2:]  # activations
    sites = result.sim.quantizers
    widths = [sites[f"{name}.weight"].quantizer.spec.format.bits for name in ("left", "right")]
    assert [int(found[name][1]) for name in ("left", "right")] == widths


def test_a_candidate_that_a_tied_group_cannot_have_takes_its_activations_from_the_others() -> None:
    groups = find_groups(simulation(Branches), CANDIDATES, tied=True)
    left = next(i for i, g in enumerate(groups) if g.weights == ("left.weight",))
    right = next(i for i, g in enumerate(groups) if g.weights == ("right.weight",))
    found = without(groups, {left: {1: "no kernel", 3: "no kernel"}}, CANDIDATES)
    assert found[right].candidates == (0, 2) and "activations are not possible" in found[right].refused["w8a16"]
    with pytest.raises(BitwrightError, match="none of the candidates is possible"):
        without(groups, {left: {1: "no", 3: "no"}, right: {0: "no", 2: "no"}}, CANDIDATES)


def test_what_no_derivative_tells_is_measured() -> None:
    found = explorer(Chosen)
    assert any("measured one group at a time" in note for note in found.notes)
    place = next(i for i, g in enumerate(found.groups) if "scores.weight" in g.weights)
    noise = found.correction().noise().table[0, place]
    four, eight = (noise[[c.name for c in CANDIDATES].index(name)] for name in ("w4a16", "w8a16"))
    assert four > 3 * eight > 0
    assert not any(site.frozen for site in found._subject.sites.values())


def test_weights_are_rounded_for_the_choice_they_are_part_of() -> None:
    """What was set before does not matter; and weights that make up for earlier layers stay where they are better."""
    found = explorer(Branches)
    n = len(found.groups)
    low, high = (3,) * n, (1,) * n
    found.prepared.fit(low)
    fitted = found.measure()
    found.prepared.fit(high)
    found.prepared.fit(low)
    assert found.measure() == fitted
    alone = found.noise(low, fitted=False)
    assert fitted != alone
    assert found.noise(low) == min(fitted, alone)
    found.noise(high)
    assert found.noise(low) == min(fitted, alone)


def test_weights_without_an_estimate_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of an ONNX LSTM with states that are given: at no estimate they would cost nothing at any width."""
    prepared = explorer(Branches).prepared
    real = prepared.errors

    def errors(candidate: int, *args: Any, **options: Any) -> OutputErrors:
        found = real(candidate, *args, **options)
        return replace(found, weights={n: v for n, v in found.weights.items() if n != "left.weight"})

    assert noise_table(prepared, data(), samples=16, seed=0)[1] == ()
    monkeypatch.setattr(prepared, "errors", errors)
    assert noise_table(prepared, data(), samples=16, seed=0)[1] == ("left.weight",)


WIDTHS = as_candidates(["w8a8", "w4a8"])


def transposed(tied: bool) -> onnx.ModelProto:
    """A table of words and two layers whose weights a Transpose makes; ``tied`` where the second one's is the table."""
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(0, 1, shape).astype(np.float32)
        for name, shape in (("table", (12, 8)), ("w", (8, 8)), ("out", (12, 8)))
    }
    last = "table" if tied else "out"
    nodes = [
        helper.make_node("Gather", ["table", "words"], ["rows"], "embedding"),
        helper.make_node("Transpose", ["w"], ["w_t"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "w_t"], ["h"], "hidden"),
        helper.make_node("Tanh", ["h"], ["a"], "tanh"),
        helper.make_node("Transpose", [last], ["out_t"], perm=[1, 0]),
        helper.make_node("MatMul", ["a", "out_t"], ["y"], "head"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("words", TensorProto.INT64, [4, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 6, 12])],
        [numpy_helper.from_array(t, name) for name, t in tensors.items() if name != "out" or not tied],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def opened(tied: bool) -> tuple[Subject, list[dict[str, Any]]]:
    rng = np.random.default_rng(1)
    data = [{"words": rng.integers(0, 12, (4, 6))} for _ in range(5)]
    sim = calibrated(QuantizationSimModel(transposed(tied), data[0]), data)
    return open_subject(sim), data


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_a_node_computes_are_rounded_at_each_width_and_brought_back(tied: bool) -> None:
    subject, data = opened(tied)
    before = [np.array(subject.outputs(batch, False)[0]) for batch in data]
    in_float = np.array(subject.outputs(data[0], True)[0])
    groups = find_groups(subject.sim, WIDTHS)
    prepared = PreparedPrecisions(subject, groups, WIDTHS, {}, data)
    points = {}
    for choice in [(0,) * len(groups), (1,) * len(groups)]:
        prepared.fit(choice)
        points[choice] = np.array(subject.outputs(data[0], False)[0])
    prepared.restore()
    for batch, wanted in zip(data, before, strict=True):
        np.testing.assert_array_equal(subject.outputs(batch, False)[0], wanted)
    for choice, wanted in points.items():
        prepared.fit(choice)
        np.testing.assert_array_equal(subject.outputs(data[0], False)[0], wanted)
    high, low = (np.abs(found - in_float).max() for found in points.values())
    assert high < low / 3


INT = {"activation": {"bitwidth": 8, "dtype": "int"}, "param": {"bitwidth": 8, "dtype": "int"}}
WIDE = {"activation": {"bitwidth": 16, "dtype": "int"}, "param": {"bitwidth": 8, "dtype": "int"}}


def config(**op_types: Any) -> dict[str, Any]:
    return {
        "defaults": {
            "ops": {"is_output_quantized": "True"}, "params": {"is_quantized": "True", "is_symmetric": "True"},
            "per_channel_quantization": "True",
        },
        "params": {}, "op_type": {n: {"supported_kernels": k} for n, k in op_types.items()},
        "supergroups": [], "model_input": {"is_input_quantized": "True"}, "model_output": {},
    }  # fmt: skip


def bits(sim: Any, op: str) -> tuple[set[int], set[int]]:
    """Of what the operator reads, and of its weights."""
    layer = next(o for o in sim.graph.ops if op in o.name and o.type in ("Conv", "Gemm", "MatMul"))
    values = {v for _, v in layer.sources()}
    a = {
        s.spec.format.bits
        for s in sim.quantizers.values()
        if s.value in values and s.role in ("input", "output") and s.enabled
    }
    w = {s.spec.format.bits for s in sim.quantizers.values() if s.value in values and s.role == "weight"}
    return a, w


def name_of(sim: Any, part: str) -> str:
    return next(o.name for o in sim.graph.ops if part in o.name and o.type in ("Conv", "Gemm", "MatMul"))


@pytest.mark.parametrize("front", FRONTS)
def test_a_request_reaches_what_a_layer_reads_and_its_weight(front: str) -> None:
    sim = quantized(front)
    report = set_precisions(sim, [PrecisionRequest(name_of(sim, "stem"), "int16", "int4")])
    assert bits(sim, "stem") == ({16}, {4}) and bits(sim, "body")[1] == {8}
    assert all(s.encoding is not None for s in sim.quantizers.values() if s.enabled and not s.quantizer.derived)
    assert {c.now for c in report.changes} == {"uint16", "int4"} and "stem" in str(report)
    assert "because the request for" in str(sim.coverage())


@pytest.mark.parametrize("front", FRONTS)
def test_types_patterns_and_the_ends_of_the_model(front: str) -> None:
    sim = quantized(front)
    set_precisions(
        sim,
        [
            PrecisionRequest("Conv", weight="int4"),
            PrecisionRequest(MODEL_INPUT, "int16"),
            PrecisionRequest(MODEL_OUTPUT, "fp16"),
        ],
    )
    assert bits(sim, "stem") == ({16}, {4}) and bits(sim, "body")[1] == {4} and bits(sim, "head")[1] == {8}
    ends = {s.spec.format.name for s in sim.quantizers.values() if s.value in sim.graph.outputs and s.role == "output"}
    assert ends <= {"float16"}


def test_later_requests_win_for_the_same_layer() -> None:
    sim = quantized("torch")
    set_precisions(sim, [PrecisionRequest("Conv", weight="int4"), PrecisionRequest("body", weight="int8")])
    assert bits(sim, "stem")[1] == {4} and bits(sim, "body")[1] == {8}


@pytest.mark.parametrize("front", FRONTS)
def test_a_quantizer_that_two_requests_share(front: str) -> None:
    sim = quantized(front)
    add = next(o.name for o in sim.graph.ops if o.type == "Add")
    requests = [PrecisionRequest(name_of(sim, "body"), "int16"), PrecisionRequest(add, "int8")]
    before = {n: s.encoding for n, s in sim.quantizers.items()}
    with pytest.raises(BitwrightError, match="asks for uint?16|asks for int16"):
        set_precisions(sim, requests)
    assert all(s.encoding is before[n] for n, s in sim.quantizers.items())
    report = set_precisions(sim, requests, strict=False)
    assert report.compromises and "it has the larger" in report.compromises[0] and bits(sim, "body")[0] == {16}


def test_what_the_target_has_no_kernel_for() -> None:
    sim = quantized("torch", config_file=config(Conv=[INT, WIDE]))
    with pytest.raises(BitwrightError, match="no kernel of Conv for 8-bit activations and 4-bit .*weights int8"):
        set_precisions(sim, [PrecisionRequest("stem", "int8", "int4")])
    report = set_precisions(sim, [PrecisionRequest("stem", "int8", "int4")], strict=False)
    assert bits(sim, "stem") == ({8}, {8}) and "it has activations int8, weights int8" in report.compromises[0]


def test_a_search_keeps_to_the_kernels_of_the_target() -> None:
    from bitwright.precision.search import mixed_precision
    from tests.precision.nets import batches

    sim = quantized("torch", config_file=config(Conv=[INT]))
    result = mixed_precision(sim, batches("torch"), ["w8a8", "w4a8"], budget=1.0, rounding=False)
    conv = next(g for g in result.groups if "stem.weight" in g.weights)
    assert "w4a8" in conv.refused


def test_before_calibration() -> None:
    import bitwright.torch as bt
    from tests.precision.nets import batches, trained

    sim = bt.QuantizationSimModel(trained(), batches("torch")[0])
    set_precisions(sim, [PrecisionRequest("stem", "int16", "int4")])
    sim.compute_encodings(batches("torch"), progress=False)
    assert bits(sim, "stem") == ({16}, {4})


@pytest.mark.parametrize(
    "request_, message",
    [
        (PrecisionRequest("stemm", "int8"), "no operator has this name"),
        (PrecisionRequest("stem", "int99"), "99 is not a bit width"),
    ],
)
def test_bad_requests(request_: PrecisionRequest, message: str) -> None:
    with pytest.raises(BitwrightError, match=message):
        set_precisions(quantized("torch"), [request_])
