"""The table of operators: rows, traits, multiplications, needed small values, layouts, what follows the last layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import bitwright.torch
from bitwright.core.graph.cost import KernelTimes, Layouts, Moved, multiplications, size
from bitwright.core.graph.float_values import exact_values, tail_ops
from bitwright.core.graph.graph import Graph
from bitwright.core.graph.operators import OPS, TRAITS, WITHOUT, Trait
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.placement.config import load_config
from bitwright.core.placement.place import place
from bitwright.core.placement.plan import Plan
from bitwright.core.placement.rules import Rule, Rules, default_rules
from bitwright.errors import ConfigError
from tests.core.graphs import Build

FIXED = {name: row.fixed_range for name, row in OPS.items() if row.fixed_range is not None}


@pytest.mark.parametrize("name", FIXED)
def test_fixed_ranges_are_what_the_operator_reaches_and_does_not_leave(name: str) -> None:
    x = torch.linspace(-100, 100, 20_001, dtype=torch.float64)
    rows = torch.stack([x, -x], 1)  # softmax reaches both ends over two unlike values
    y = rows.softmax(1) if name == "Softmax" else getattr(torch, name.lower())(rows)
    lo, hi = FIXED[name]
    assert lo <= y.min() < lo + 1e-4 and hi - 1e-4 < y.max() <= hi


ROOT = Path(__file__).parents[3] / "bitwright"
#: facts of a runtime, of a file format or of AIMET, which may be those of the model by chance
ELSEWHERE = (
    *("runtimes", "aimet_torch", "aimet_onnx", "export/litert"),
    *("core/placement/aimet_config.py", "onnx/simulation/calibrator.py"),
)
FILES = [
    p
    for p in sorted(ROOT.rglob("*.py"))
    if p.name not in ("operators.py",) and not str(p.relative_to(ROOT)).startswith(ELSEWHERE)
]


def unanswered() -> set[str]:
    """Operators of the op table with no trait, that nobody said is without."""
    return OPS.keys() - {op for ops in TRAITS.values() for op in ops} - WITHOUT


def test_every_operator_is_answered_for() -> None:
    missing = unanswered()
    assert not missing, f"give {sorted(missing)} their traits in core/graph/operators.py, or name them in WITHOUT"


def test_an_operator_that_is_not_answered_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "Asinh", OPS["Relu"])
    assert unanswered() == {"Asinh"}


def test_traits_name_operators_of_the_op_table_once() -> None:
    assert TRAITS.keys() == set(get_args(Trait))
    for trait, ops in TRAITS.items():
        assert len(set(ops)) == len(ops) > 1, trait
        assert OPS.keys() >= set(ops), trait
        assert not WITHOUT.intersection(ops), trait
    assert OPS.keys() >= WITHOUT


def count(b: Build, made: str) -> float:
    graph: Graph = b.graph(made)
    return multiplications(graph, graph.ops[-1])


def test_a_convolution_multiplies_a_kernel_for_each_element_it_makes():
    b = Build()
    assert count(b, b.conv(b.input(), "conv", 8, inputs=3)) == (8 * 8 * 8) * (3 * 3 * 3)
    b = Build()
    assert count(b, b.conv(b.input(shape=(1, 8, 8, 8)), "conv", 8, group=8)) == (8 * 8 * 8) * (3 * 3)


def test_a_transposed_convolution_multiplies_a_kernel_for_each_element_it_reads():
    b = Build()
    weight = b.param("up.weight", (3, 5, 2, 2))
    made = b.op("ConvTranspose", b.input(shape=(1, 3, 4, 4)), weight, name="up", shape=(1, 5, 8, 8))
    assert count(b, made) == (3 * 4 * 4) * (5 * 2 * 2)


@pytest.mark.parametrize(("shape", "attrs"), [((6, 7), {}), ((7, 6), {"transA": 1})], ids=["plain", "transposed"])
def test_a_product_multiplies_what_it_sums_over_for_each_element_it_makes(shape, attrs):
    b = Build()
    made = b.op("Gemm", b.input(shape=shape), b.param("w", (7, 5)), name="fc", shape=(6, 5), **attrs)
    assert count(b, made) == 6 * 5 * 7


def test_a_recurrent_layer_multiplies_both_weights_in_every_step():
    b = Build()
    weights = b.param("w", (1, 16, 3)), b.param("r", (1, 16, 4))
    assert count(b, b.op("LSTM", b.input(shape=(5, 2, 3)), *weights, name="lstm", shape=(5, 1, 2, 4))) == (
        5 * 2 * (16 * 3 + 16 * 4)
    )


def test_other_operators_multiply_no_matrices():
    b = Build()
    assert count(b, b.op("Relu", b.input(), name="relu")) == 0


def test_axes_of_unknown_length_count_as_one():
    b = Build()
    x = b.input(shape=(-1, 3, 0))
    assert size(b.graph(x), x) == 3


def needed_for_a_division(*makers: str) -> set[str]:
    """Which of the operands of a sum that divides are needed; ``Mul`` multiplies by itself, ``Input`` is the model's."""
    b = Build()
    shape, operands = (2, 4), []
    for i, maker in enumerate(makers):
        x = b.input(f"x{i}", shape)
        inputs = (x, x) if maker == "Mul" else (x,)
        operands.append(x if maker == "Input" else b.op(maker, *inputs, name=f"{maker}{i}", shape=shape))
    total = b.op("Add", *operands, name="sum", shape=shape)
    graph = b.graph(b.op("Div", b.input("y", shape), total, name="div", shape=shape))
    found = exact_values(graph, set())
    assert found[total] == ("divisor", "div")
    return {graph.producer(value).type if graph.producer(value) else "Input" for value in operands if value in found}


@pytest.mark.parametrize("positive", ["Mul", "Abs", "Square", "Exp", "Sqrt"])
def test_summands_without_a_sign_are_needed_and_others_are_not(positive: str) -> None:
    assert needed_for_a_division(positive, "Input") == {positive}
    assert needed_for_a_division(positive, "Tanh") == {positive}
    assert needed_for_a_division(positive, "Neg") == {positive}


def test_a_product_of_two_values_has_a_sign() -> None:
    b = Build()
    x, y = b.input("x", (2, 4)), b.input("y", (2, 4))
    product, size = b.op("Mul", x, y, name="mul", shape=(2, 4)), b.op("Abs", y, name="abs", shape=(2, 4))
    total = b.op("Add", product, size, name="sum", shape=(2, 4))
    graph = b.graph(b.op("Div", x, total, name="div", shape=(2, 4)))
    found = exact_values(graph, set())
    assert size in found and product not in found


def chain() -> Build:
    """Two convolutions with a pool between them, and a sum of the second one's output with the pool's."""
    b = Build()
    first = b.conv(b.input(shape=(1, 8, 8, 8)), "first")
    pooled = b.op("MaxPool", first, name="pool")
    b.op("Add", pooled, b.conv(pooled, "second"), name="add")
    return b


def moved(in_float: set[str]) -> Moved:
    b = chain()
    return Layouts(b.graph(b.ops[-1].outputs[0])).moved(lambda op: op.name not in in_float)


def test_all_on_codes_is_transposed_where_the_model_begins_and_ends():
    found = moved(set())
    assert len(found.transposed) == 2 and not found.slow_pools


def test_a_float_value_keeps_the_channels_first_in_pools_and_sums():
    """The pooled values, for the convolution; what that makes, for the sum. The pool is one of floats, and fast."""
    found = moved({"first"})
    assert len(found.transposed) == 2 and not found.slow_pools


@pytest.mark.parametrize("reads", ["both", "input"])
def test_a_pool_of_codes_is_slow_while_the_channels_come_first(reads: str) -> None:
    """As where another operator reads what the convolution in float makes, which is rounded in front of both then."""
    b = Build()
    x = b.input(shape=(1, 8, 8, 8))
    made = b.op("Relu", b.conv(x, "first") if reads == "both" else x, name="relu")
    pooled = b.op("MaxPool", made, name="pool")
    b.op("Add", b.conv(pooled, "second"), made if reads == "both" else pooled, name="add")
    found = Layouts(b.graph(b.ops[-1].outputs[0])).moved(lambda op: op.name != "first")
    assert [op.name for op in found.slow_pools] == ["pool"]


def test_nothing_on_codes_is_not_transposed():
    found = moved({"first", "second"})
    assert found.transposed == () and not found.slow_pools


def test_time_is_that_of_numbers_and_of_operators():
    b = chain()
    layouts = Layouts(b.graph(b.ops[-1].outputs[0]))
    times = KernelTimes(*[(0.0, 0.0)] * 3, patch=0.0, conversion=0.0, operator=1000.0, transpose=1.0, pool=10.0)
    found = layouts.moved(lambda op: op.name == "second")
    pool = next(op for op in b.ops if op.name == "pool")
    slow = replace(found, slow_pools=(pool,))
    assert layouts.time(slow, times, rows=3) == 3 * 2 * 1000 + 2 * 512 + 512 * 10


class Residual(nn.Module):
    """Two residual blocks behind a first convolution."""

    def __init__(self, pool: bool) -> None:
        super().__init__()
        self.first, self.pool = nn.Conv2d(4, 8, 3, padding=1), nn.MaxPool2d(2) if pool else nn.Identity()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.first(x)))
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return x


@pytest.mark.parametrize("in_float", [False, True], ids=["codes", "float"])
@pytest.mark.parametrize("pool", [False, True], ids=["plain", "pool"])
def test_onnx_runtime_transposes_so(tmp_path: Path, pool: bool, in_float: bool) -> None:
    torch.manual_seed(0)
    model, data = Residual(pool).eval(), [torch.randn(1, 4, 16, 16)]
    sim = bitwright.torch.QuantizationSimModel(model, data[0])
    off = {"first"} if in_float else set()
    for site in sim.quantizers.values():
        if site.op in off and not site.name.endswith("output[0]"):
            site.quantizer.release("tried in float")
    sim.compute_encodings(data, progress=False)
    sim.export(tmp_path, "net", data[0])
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 4, str(tmp_path / "run.onnx")
    onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "run.onnx").graph.node
    ran, codes = (
        Counter(node.op_type for node in nodes),
        {n.output[0] for n in nodes if n.op_type == "QuantizeLinear"},
    )
    expected = Layouts(sim.graph).moved(lambda op: op.name not in off)
    assert ran["Transpose"] == len(expected.transposed), ran
    pools = [node for node in nodes if node.op_type == "MaxPool" and node.input[0] in codes]
    assert len(pools) == len(expected.slow_pools), ran


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
