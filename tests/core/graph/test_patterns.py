"""Chains: what matches, and the reason for what does not."""

from __future__ import annotations

import pytest

from bitwright.core.graph.graph import Graph
from bitwright.core.graph.patterns import (
    DEFAULT_SUPERGROUPS,
    MATMUL_ADD,
    Match,
    NoMatch,
    Pattern,
    find_matches,
    folds_into,
    match_at,
)
from tests.core.graphs import Build

CONV_RELU = Pattern(("Conv", "Relu"))


def names(matches: list[Match]) -> list[tuple[str, ...]]:
    return [tuple(op.name for op in match.ops) for match in matches]


def reason(graph: Graph, op: str, pattern: Pattern = CONV_RELU) -> str:
    result = match_at(graph, graph.op(op), pattern)
    assert isinstance(result, NoMatch)
    return result.reason


def test_a_chain_is_found_with_its_inner_value_and_its_output():
    b = Build()
    graph = b.graph(b.op("Relu", b.conv(b.input(), "conv", inputs=3), name="relu"))
    match = match_at(graph, graph.op("conv"), CONV_RELU)
    assert isinstance(match, Match)
    assert match.inner == ("conv.output[0]",)
    assert match.output == "relu.output[0]"
    assert str(match.pattern) == "Conv>Relu"


def test_longer_chains_win_and_no_operator_is_in_two():
    b = Build()
    x = b.op("Relu", b.bn(b.conv(b.input(), "conv", inputs=3), "bn", training=True), name="relu")
    graph = b.graph(b.op("Clip", x, name="clip"))
    patterns = [Pattern(("BatchNormalization", "Relu")), Pattern(("Conv", "BatchNormalization", "Relu"))]
    matches, _ = find_matches(graph, patterns)
    assert names(matches) == [("conv", "bn", "relu")]


def test_a_foldable_batch_norm_is_passed_over():
    b = Build()
    graph = b.graph(b.op("Relu", b.bn(b.conv(b.input(), "conv", inputs=3), "bn"), name="relu"))
    matches, _ = find_matches(graph, [CONV_RELU])
    assert names(matches) == [("conv", "bn", "relu")]
    assert matches[0].inner == ("conv.output[0]", "bn.output[0]")


def test_a_foldable_batch_norm_without_a_chain_joins_its_convolution():
    b = Build()
    graph = b.graph(b.bn(b.conv(b.input(), "conv", inputs=3), "bn"))
    matches, _ = find_matches(graph, [])
    assert names(matches) == [("conv", "bn")]
    assert str(matches[0].pattern) == "Conv>BatchNormalization"


def test_a_batch_norm_on_batch_statistics_cannot_be_folded():
    b = Build()
    graph = b.graph(b.op("Relu", b.bn(b.conv(b.input(), "conv", inputs=3), "bn", training=True), name="relu"))
    assert folds_into(graph, graph.op("bn")) is None
    assert reason(graph, "conv") == "a BatchNormalization, bn, follows conv"


def test_a_batch_norm_behind_a_linear_operator_of_rank_three_normalises_another_axis():
    b = Build()
    x = b.input(shape=(2, 5, 8))
    graph = b.graph(b.bn(b.linear(x, "fc", rank=3), "bn"))
    assert folds_into(graph, graph.op("bn")) is None


@pytest.mark.parametrize("op_type", ["Identity", "Dropout", "Contiguous", "Clone"])
def test_what_changes_nothing_may_stand_in_a_chain(op_type):
    b = Build()
    graph = b.graph(b.op("Relu", b.op(op_type, b.conv(b.input(), "conv"), name="between"), name="relu"))
    assert names(find_matches(graph, [CONV_RELU])[0]) == [("conv", "between", "relu")]


def test_a_second_reader_prevents_the_match_and_is_named():
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    graph = b.graph(b.op("Relu", y, name="relu"), b.op("Sigmoid", y, name="gate"))
    assert reason(graph, "conv") == "conv.output[0] is read 2 times, by relu, gate"
    matches, misses = find_matches(graph, [CONV_RELU])
    assert not matches
    assert [str(m) for m in misses] == [
        "conv: not fused as Conv>Relu, because conv.output[0] is read 2 times, by relu, gate"
    ]


def test_a_returned_value_prevents_the_match():
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    graph = b.graph(y, b.op("Relu", y, name="relu"))
    assert reason(graph, "conv") == "conv.output[0] is also an output of the model"


def test_a_reader_in_a_later_run_counts():
    b = Build()
    x = b.input()
    y = b.conv(x, "conv", inputs=3)
    r = b.op("Relu", y, name="relu")
    graph = b.graph(b.op("Sigmoid", r, name="gate", also=((0, y),)))
    assert reason(graph, "conv") == "conv.output[0] is read 2 times, by relu, gate"


def test_a_value_read_as_a_setting_is_not_data():
    b = Build()
    x = b.input()
    graph = b.graph(b.op("Clip", x, b.conv(x, "conv", inputs=3), name="clip"))
    assert reason(graph, "conv", Pattern(("Conv", "Clip"))) == "clip reads conv.output[0] as a setting, not as data"


def test_other_reasons():
    b = Build()
    s = b.op("Split", b.conv(b.input(), "conv", inputs=3), name="split", outputs=2)
    b.op("Relu", s, name="relu")
    graph = b.graph("relu.output[0]")
    assert reason(graph, "conv") == "a Split, split, follows conv"
    assert reason(graph, "relu") == "it is a Relu"
    assert reason(graph, "split", Pattern(("Split", "Relu"))) == "split has 2 outputs"
    assert reason(graph, "conv", Pattern(("Conv", "Split"))) == "split has 2 outputs"
    b.conv("x", "alone", inputs=3)
    assert reason(b.graph("relu.output[0]"), "alone") == "nothing reads alone.output[0]"


def test_look_alike_names_are_different_operators():
    b = Build()
    x = b.input()
    one = b.conv(x, "conv", inputs=3)
    ten = b.conv(x, "conv_1", inputs=3)
    graph = b.graph(b.op("Relu", one, name="relu"), b.op("Sigmoid", ten, name="relu_1"))
    assert names(find_matches(graph, [CONV_RELU])[0]) == [("conv", "relu")]


@pytest.mark.parametrize("shape, found", [((4,), 1), ((1, 4), 1), ((3, 4), 0), ((1, 1, 4), 0)])
def test_axes_of_length_one_in_front_of_a_bias_change_nothing(shape, found):
    b = Build()
    y = b.op("MatMul", b.input(shape=(3, 8)), b.param("w", (8, 4)), name="matmul", shape=(3, 4))
    graph = b.graph(b.op("Add", y, b.param("b", shape), name="bias", shape=(3, 4)))
    assert len(find_matches(graph, MATMUL_ADD)[0]) == found


def test_only_a_constant_with_one_axis_is_a_bias():
    b = Build()
    x = b.input(shape=(1, 8))
    y = b.op("MatMul", x, b.param("w", (8, 4)), name="matmul", shape=(1, 4))
    biased = b.op("Add", y, b.param("b", (4,)), name="bias", shape=(1, 4))
    z = b.op("MatMul", biased, b.param("v", (4, 4)), name="matmul_1", shape=(1, 4))
    graph = b.graph(b.op("Add", z, biased, name="residual", shape=(1, 4)))
    assert names(find_matches(graph, MATMUL_ADD)[0]) == [("matmul", "bias")]
    pattern = Pattern(("MatMul", "Add"), "bias_add")
    assert reason(graph, "matmul_1", pattern) == "residual does not add a constant with one axis"


@pytest.mark.parametrize(
    "kernel, group, expected",
    [
        pytest.param((3, 3), 8, "the target does not fuse depthwise convolutions", id="depthwise"),
        pytest.param((3, 3, 3), 1, "the target does not fuse convolutions over three spatial axes", id="3d"),
    ],
)
def test_targets_that_fuse_plain_convolutions_only(kernel, group, expected):
    b = Build()
    graph = b.graph(b.op("Relu", b.conv(b.input(), "conv", group=group, kernel=kernel), name="relu"))
    assert reason(graph, "conv", Pattern(("Conv", "Relu"), plain_only=True)) == expected
    assert isinstance(match_at(graph, graph.op("conv"), CONV_RELU), Match)


def test_masked_attention_is_one_chain():
    b = Build()
    q, k, mask = (b.input(n, (1, 4, 8)) for n in "qkm")
    scores = b.op("MatMul", q, k, name="scores")
    scaled = b.op("Mul", scores, b.const("scale"), name="scale_scores")
    graph = b.graph(b.op("Softmax", b.op("Add", scaled, mask, name="masked"), name="softmax"))
    matches, _ = find_matches(graph, DEFAULT_SUPERGROUPS)
    assert names(matches) == [("scale_scores", "masked", "softmax")]
    assert matches[0].pattern.kind == "masked_softmax"
