"""What follows the last layer: which operators these are, and what placement does with them."""

from __future__ import annotations

import pytest

from bitwright.core.graph.float_values import tail_ops
from bitwright.core.graph.graph import Graph
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.placement.config import load_config
from bitwright.core.placement.place import place
from bitwright.core.placement.plan import Plan
from bitwright.core.placement.rules import Rule, Rules, default_rules
from bitwright.errors import ConfigError
from tests.core.graphs import Build

TAIL = "follows the last layer, where float is as fast and more exact"


def detector(*, layer: bool = False) -> Graph:
    """Boxes in pixels and scores, joined; ``layer`` puts a layer after the join."""
    b = Build()
    body = b.op("Relu", b.conv(b.input(), "body", inputs=3), name="relu")
    box = b.op("Mul", b.conv(body, "box"), b.param("stride", (1, 8, 1, 1)), name="pixels")
    score = b.op("Sigmoid", b.conv(body, "cls"), name="score")
    joined = b.op("Concat", box, score, name="join", shape=(1, 16, 8, 8))
    return b.graph(b.conv(joined, "last", inputs=16) if layer else joined)


def plan(graph: Graph, *rules: Rule, base: Rules | None = None) -> Plan:
    return place(graph, (base or default_rules()).extended(rules))


def tail(graph: Graph) -> set[str]:
    static = {value.name for value in graph.values.values() if value.is_static}
    return {op.name for op in tail_ops(graph, static)}


def test_it_begins_after_the_last_layer_of_every_branch():
    assert tail(detector()) == {"pixels", "score", "join"}
    assert tail(detector(layer=True)) == set()


def test_a_graph_without_a_layer_has_none():
    b = Build()
    assert tail(b.graph(b.op("Sigmoid", b.input(), name="sigmoid"))) == set()


def test_what_a_later_run_reads_leads_to_a_layer_too():
    b = Build()
    x = b.input(shape=(1, 8))
    first = b.op("Gemm", x, b.param("w", (8, 8)), name="fc", also=((0, "tanh.output[0]"),), transB=1, shape=(1, 8))
    state = b.op("Tanh", first, name="tanh", shape=(1, 8))
    assert tail(b.graph(b.op("Sigmoid", state, name="answer", shape=(1, 8)))) == {"answer"}


def test_the_expectation_of_a_softmax_decodes():
    b = Build()
    bins = b.op("Softmax", b.conv(b.input(), "box", inputs=3), name="softmax", shape=(1, 16, 4, 9))
    positions = b.param("positions", (1, 16, 1, 1))
    graph = b.graph(b.op("Conv", bins, positions, name="expect", shape=(1, 1, 4, 9)))
    assert tail(graph) == {"softmax", "expect"}
    made = plan(graph)
    assert made.floats["positions"] == made.floats["expect.output[0]"] == f"Conv {TAIL}"
    assert "box.weight" in made.sites
    named = plan(graph, Rule("positions", format="int8"))
    assert named.sites["positions"].role == "weight"


def test_a_small_matrix_decodes_only_what_was_joined():
    b = Build()
    y = b.linear(b.input(shape=(1, 8)), "fc", 4)
    boxes = b.op("Concat", y, b.op("Exp", y, name="exp"), name="join", shape=(2, 4))
    graph = b.graph(b.op("MatMul", boxes, b.param("corners", (4, 4)), name="convert", shape=(2, 4)))
    assert tail(graph) == {"exp", "join", "convert"}
    b = Build()
    y = b.op("Tanh", b.linear(b.input(shape=(1, 8)), "fc", 4), name="tanh")
    assert tail(b.graph(b.op("MatMul", y, b.param("w", (4, 4)), name="layer", shape=(1, 4)))) == set()


def test_by_default_it_is_in_float_and_layers_keep_their_outputs_grid():
    made = plan(detector())
    assert [name for name, site in made.sites.items() if site.role in ("input", "output")] == [
        "body.input[0]", "relu.output[0]", "box.output[0]", "cls.output[0]"
    ]  # fmt: skip
    assert made.floats["pixels.output[0]"] == f"Mul {TAIL}"
    assert made.floats["score.output[0]"] == f"Sigmoid {TAIL}"
    assert made.floats["join.output[0]"] == "Concat runs in float because its operands are in float"
    assert {"pixels.output[0]", "score.output[0]", "join.output[0]"} <= plan(detector(layer=True)).sites.keys()


def test_clamps_and_pools_stay_with_the_layer_before():
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    graph = b.graph(b.op("Relu", y, name="relu"), b.op("GlobalAveragePool", y, name="pool"))
    assert {"relu.output[0]", "pool.output[0]"} <= plan(graph).sites.keys()


def test_an_input_of_the_model_that_only_the_tail_reads_is_in_float():
    b = Build()
    x = b.input()
    size = b.input("size", (1, 8, 1, 1))
    made = plan(b.graph(b.op("Mul", b.conv(x, "conv", inputs=3), size, name="scaled")))
    assert made.floats["size"].startswith("scaled reads it in float")


@pytest.mark.parametrize(
    "rule",
    [Rule("score", port="output", format="int16"), Rule(op="Sigmoid", port="output", format="int16")],
    ids=["by-name", "by-type"],
)
def test_a_rule_that_means_an_operator_of_it_keeps_its_meaning(rule):
    made = plan(detector(), rule)
    assert made.sites["score.output[0]"].spec.format == IntFormat(16)
    assert "pixels.output[0]" in made.floats and not made.unused


def test_without_it_joins_of_several_grids_alone_are_in_float():
    made = plan(detector(), base=load_config({"tail": "quantized"}))
    assert {"pixels.output[0]", "score.output[0]"} <= made.sites.keys()
    assert made.floats["join.output[0]"] == f"Concat {TAIL}"
    asked = plan(detector(), Rule("join", port="output", quantized=True), base=load_config({"tail": "quantized"}))
    assert "join.output[0]" in asked.sites


def test_configurations_of_aimet_place_quantizers_as_aimet_does():
    made = plan(detector(), base=load_config("default"))
    assert {"pixels.output[0]", "score.output[0]", "join.output[0]"} <= made.sites.keys()


def test_the_key_of_a_configuration_takes_two_words():
    with pytest.raises(ConfigError, match="'int8' is not a way to place them. Remedy: use float, quantized"):
        load_config({"tail": "int8"})
