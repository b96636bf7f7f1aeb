"""Recurrent layers in the core: where quantizers go, and the equations of one step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bitwright.core.graph.graph import Graph
from bitwright.core.graph.operators import resolve_granularity
from bitwright.core.graph.recurrence import CELLS, Variant, activation_range, inner_names, inner_values, variant_of
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerGate, PerTensor
from bitwright.core.numerics.spec import PRESETS
from bitwright.core.placement.config import load_config
from bitwright.core.placement.place import place
from bitwright.core.placement.plan import Plan
from bitwright.core.placement.rules import BOUNDARY_ONLY, Rule, Rules, default_rules
from bitwright.errors import ConfigError
from tests.core.graphs import Build

HIDDEN, INPUTS, BATCH = 16, 8, 2


def layer(
    b: Build, op_type: str, x: str, name: str = "rnn", *states: str | None, rank: int = 2, **attrs: Any
) -> tuple[str, ...]:
    """One direction of a recurrent layer reading ``x``; its outputs."""
    rows = len(CELLS[op_type].gates) * HIDDEN
    lead = (1,) * (rank - 2)
    w, r = (b.param(f"{name}.weight_ih", (*lead, rows, INPUTS)), b.param(f"{name}.weight_hh", (*lead, rows, HIDDEN)))
    bias = b.param(f"{name}.bias_ih", (*lead, rows))
    b.op(op_type, x, w, r, bias, None, *states, name=name, shape=(BATCH, HIDDEN), outputs=len(states) + 1,
         hidden_size=HIDDEN, **attrs)  # fmt: skip
    op = b.ops.pop()
    inner, values = inner_values(name, op_type, op.attrs, op.outputs[0], (BATCH, HIDDEN), "float32")
    b.values.update({v.name: v for v in values})
    b.ops.append(replace(op, inner=inner))
    return op.outputs


def lstm(**attrs: Any) -> Graph:
    b = Build()
    x = b.input(shape=(5, BATCH, INPUTS))
    h0, c0 = b.input("h0", (BATCH, HIDDEN)), b.input("c0", (BATCH, HIDDEN))
    return b.graph(*layer(b, "LSTM", x, "rnn", h0, c0, **attrs))


def plan(graph: Graph, *rules: Rule, base: Rules | None = None) -> Plan:
    return place(graph, (base or default_rules()).extended(rules))


def test_every_tensor_of_an_lstm_has_a_site_or_a_reason():
    found = plan(lstm())
    assert list(found.sites) == [
        "rnn.input[0]", "rnn.weight_ih", "rnn.weight_hh", "rnn.input[5]", "rnn.input[6]",
        "rnn.input.pre", "rnn.input.gate", "rnn.forget.pre", "rnn.forget.gate", "rnn.candidate.pre",
        "rnn.candidate.gate", "rnn.cell", "rnn.output.pre", "rnn.output.gate", "rnn.cell.gate", "rnn.output[0]",
    ]  # fmt: skip
    assert found.floats == {"rnn.bias_ih": "bias of rnn, added within a step before anything is rounded"}
    assert found.shared == {"rnn.output[1]": "rnn.output[0]", "rnn.output[2]": "rnn.cell"}
    assert {row.name for row in found.coverage(lstm())} == set(lstm().values)


def test_the_states_that_a_layer_starts_from_share_its_grids():
    found = plan(lstm())
    assert found.groups["rnn.output[0]"] == ("rnn.input[5]", "rnn.output[0]")
    assert found.groups["rnn.cell"] == ("rnn.input[6]", "rnn.cell")


def test_widths_and_ranges_of_the_inner_tensors():
    sites = plan(lstm()).sites
    for name in ("rnn.cell", "rnn.input[6]", "rnn.candidate.pre"):
        assert sites[name].spec.format == IntFormat(16) and sites[name].spec.symmetry == "symmetric"
    assert sites["rnn.forget.gate"].spec.fixed_range == (0.0, 1.0)
    assert sites["rnn.candidate.gate"].spec.fixed_range == (-1.0, 1.0)
    assert sites["rnn.cell.gate"].spec.format == IntFormat(8, signed=False)
    assert sites["rnn.output[0]"].spec.fixed_range is None
    assert sites["rnn.output[0]"].inner == "hidden" and sites["rnn.cell"].inner == "cell"


def test_activations_of_the_layer_decide_the_fixed_ranges():
    sites = plan(lstm(activations=("HardSigmoid", "Relu", "Softsign"))).sites
    assert sites["rnn.input.gate"].spec.fixed_range == (0.0, 1.0)
    assert sites["rnn.candidate.gate"].spec.fixed_range is None
    assert sites["rnn.cell.gate"].spec.fixed_range == (-1.0, 1.0)


@pytest.mark.parametrize("rank, axis", [(2, 0), (3, 1)])
def test_weights_have_one_scale_per_row_of_gates_and_per_gate_on_request(rank, axis):
    assert plan(lstm(rank=rank)).sites["rnn.weight_hh"].spec.granularity == PerChannel(axis)
    per_gate = plan(lstm(rank=rank), Rule(port="weight", granularity=PerGate())).sites
    assert per_gate["rnn.weight_ih"].spec.granularity == PerBlock(HIDDEN, axis=axis)
    shape = (1,) * (rank - 2) + (4 * HIDDEN, INPUTS)
    assert per_gate["rnn.weight_ih"].spec.granularity.param_shape(shape) == (1,) * (rank - 2) + (4, 1)


def test_per_gate_is_per_tensor_where_there_are_no_gates():
    assert resolve_granularity("Gemm", {"transB": 1}, 1, PerGate(), (4, 8)) == PerTensor()
    assert resolve_granularity("LSTM", {}, 8, PerGate(), (4, 8)) == PerTensor()


@pytest.mark.parametrize("op_type, inner", [
    ("RNN", ["candidate.pre"]),
    ("GRU", ["update.pre", "update.gate", "reset.pre", "reset.gate", "reset.hidden", "candidate.pre", "candidate.gate"]),
])  # fmt: skip
def test_inner_sites_of_the_other_cells(op_type, inner):
    b = Build()
    found = plan(b.graph(*layer(b, op_type, b.input(shape=(5, BATCH, INPUTS)))))
    assert [s.inner for s in found.sites.values() if s.inner] == [*inner, "hidden"]


def test_the_hidden_state_of_a_tanh_rnn_lies_between_its_bounds():
    b = Build()
    found = plan(b.graph(*layer(b, "RNN", b.input(shape=(5, BATCH, INPUTS)))))
    assert found.sites["rnn.output[0]"].spec.fixed_range == (-1.0, 1.0)


@pytest.mark.parametrize("rule, gone", [
    (Rule("*.pre", quantized=False), {"rnn.input.pre", "rnn.forget.pre", "rnn.candidate.pre", "rnn.output.pre"}),
    (Rule("rnn.cell", port="inner", quantized=False), {"rnn.cell", "rnn.cell.gate", "rnn.input[6]"}),
    (Rule("rnn.forget.gate", quantized=False), {"rnn.forget.gate"}),
])  # fmt: skip
def test_rules_name_inner_tensors(rule, gone):
    before, after = plan(lstm()).sites, plan(lstm(), rule).sites
    assert before.keys() - after.keys() == gone


def test_a_rule_changes_the_format_of_one_inner_tensor():
    sites = plan(lstm(), Rule("*.cell", port="inner", format="int24")).sites
    assert sites["rnn.cell"].spec.format == IntFormat(24) == sites["rnn.input[6]"].spec.format
    assert sites["rnn.input.pre"].spec.format == IntFormat(16)


def test_boundary_only_leaves_the_inside_in_float_and_quantizes_what_leaves():
    found = plan(lstm(), BOUNDARY_ONLY)
    assert list(found.sites) == [
        "rnn.input[0]", "rnn.weight_ih", "rnn.weight_hh", "rnn.input[5]", "rnn.output[0]", "rnn.output[1]",
    ]  # fmt: skip
    assert all(site.inner is None for site in found.sites.values())
    assert found.groups["rnn.output[0]"] == ("rnn.input[5]", "rnn.output[0]", "rnn.output[1]")
    for value in ("c0", "rnn.output[2]"):  # the cell state, which the model takes and returns
        assert found.floats[value].startswith("float: rnn passes on a state from run to run")
    assert "boundary_only" in found.floats["rnn.cell"]


def test_boundary_only_is_one_word_in_a_configuration():
    rules = load_config({"recurrent": "boundary_only"})
    assert rules.rules == (BOUNDARY_ONLY,)
    with pytest.raises(ConfigError, match="'boundary' is not a way to place them.*boundary_only"):
        load_config({"recurrent": "boundary"})


def test_a_configuration_addresses_inner_tensors():
    rules = load_config(
        {"rules": [{"match": "*.cell", "inner": "int24"}, {"op": "LSTM", "weight": {"granularity": "per_gate"}}]}
    )
    sites = place(lstm(), rules).sites
    assert sites["rnn.cell"].spec.format == IntFormat(24)
    assert isinstance(sites["rnn.weight_ih"].spec.granularity, PerBlock)


def test_the_placement_of_an_aimet_configuration_is_at_the_boundary():
    assert not any(site.inner for site in place(lstm(), load_config("default")).sites.values())


def test_a_layer_that_returns_only_its_last_states_keeps_its_grids():
    graph = lstm()
    op = graph.ops[0]
    inner, values = inner_values(op.name, "LSTM", op.attrs, None, (BATCH, HIDDEN), "float32")
    op = replace(op, outputs=op.outputs[1:], inner=inner, attrs={**op.attrs, "returns": ("hidden", "cell")})
    cut = Graph([op], {**graph.values, **{v.name: v for v in values}}, graph.inputs, op.outputs)
    found = plan(cut)
    assert found.sites["rnn.hidden"].inner == "hidden"
    assert found.shared == {"rnn.output[1]": "rnn.hidden", "rnn.output[2]": "rnn.cell"}


def test_weights_alone_leave_the_inside_in_float():
    preset = PRESETS["w4"]
    found = plan(lstm(), base=default_rules(preset.weight, preset.activation))
    assert list(found.sites) == ["rnn.weight_ih", "rnn.weight_hh"]


def test_a_state_that_its_producer_has_quantized_is_taken_as_it_is():
    b = Build()
    x = b.input(shape=(5, BATCH, INPUTS))
    h0, c0 = b.input("h0", (BATCH, HIDDEN)), b.input("c0", (BATCH, HIDDEN))
    _, h, c = layer(b, "LSTM", x, "encoder", h0, c0)
    found = plan(b.graph(*layer(b, "LSTM", x, "decoder", h, c)))
    assert not {"decoder.input[5]", "decoder.input[6]"} & found.sites.keys()


@pytest.mark.parametrize("op_type, attrs, without", [
    ("GRU", {"linear_before_reset": 1}, {"reset.hidden"}),
    ("LSTM", {"input_forget": 1}, {"forget.pre", "forget.gate"}),
    ("LSTM", {"projected": True}, set()),
])  # fmt: skip
def test_variants_have_the_inner_tensors_of_their_equations(op_type, attrs, without):
    everything = {inner.name for inner in CELLS[op_type].inner}
    names = set(inner_names(op_type, variant_of(attrs)))
    assert everything - names == without | (
        {"unprojected"} if op_type == "LSTM" and "projected" not in attrs else set()
    )


def test_the_states_are_hidden_first():
    assert CELLS["LSTM"].states == ("hidden", "cell") and CELLS["GRU"].states == ("hidden",)
    assert variant_of({}) == Variant()


def test_last_states_put_together_keep_their_grids():
    b = Build()
    x = b.input(shape=(5, BATCH, INPUTS))
    first = layer(b, "LSTM", x, "one", b.input("h0", (BATCH, HIDDEN)), b.input("c0", (BATCH, HIDDEN)))
    other = layer(b, "LSTM", x, "two", b.input("h1", (BATCH, HIDDEN)), b.input("c1", (BATCH, HIDDEN)))
    moved = b.op("Unsqueeze", first[2], name="moved", shape=(1, BATCH, HIDDEN))
    cells = b.op("Concat", moved, other[2], name="cells", shape=(2, BATCH, HIDDEN))
    both = b.op("Concat", first[0], other[0], name="both", shape=(5, BATCH, 2 * HIDDEN))
    found = plan(b.graph(cells, both), base=replace(default_rules(), float_tail=False, split_joins=False))
    assert found.floats[cells] == "last states of several layers, each on its own grid, put together by Concat"
    assert "both.output[0]" in found.sites


SIGMOID, TANH = (0.0, 1.0), (-1.0, 1.0)


def test_gates_lie_where_their_activation_functions_do():
    ranges = {
        op: {i.name: found for i in cell.inner if (found := activation_range(op, {}, i.name)) is not None}
        for op, cell in CELLS.items()
    }
    assert ranges == {
        "RNN": {"hidden": TANH},
        "GRU": {"update.gate": SIGMOID, "reset.gate": SIGMOID, "candidate.gate": TANH},
        "LSTM": {
            **{f"{gate}.gate": SIGMOID for gate in ("input", "forget", "output")},
            **{f"{gate}.gate": TANH for gate in ("candidate", "cell")},
        },
    }
    others = {"activations": ("HardSigmoid", "Relu", "Tanh")}
    assert activation_range("LSTM", others, "forget.gate") == SIGMOID
    assert activation_range("LSTM", others, "candidate.gate") is None
