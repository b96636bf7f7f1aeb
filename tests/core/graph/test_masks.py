"""What is seen of values where they go: masks, and channels that never change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitwright.core.graph.constant_channels import (
    ChannelAxis,
    ChannelWatch,
    ConstantChannels,
    channel_axes,
    channels_within,
    constant_channels,
    merge_channels,
)
from bitwright.core.graph.float_values import holds_mask, mask_values
from bitwright.core.graph.graph import Graph, Op, Value
from bitwright.core.numerics import statistics
from tests.core.graphs import Build
from tests.support.cost import steps


def test_values_on_their_way_to_a_softmax():
    b = Build()
    scores = b.op("MatMul", b.input("q", (4, 8)), b.input("k", (8, 4)), name="scores")
    masked = b.op("Add", scores, b.input("mask", (4, 4)), name="masked")
    top = b.op("ReduceMax", masked, name="top")
    shifted = b.op("Sub", masked, top, name="shifted")
    weights = b.op("Softmax", b.op("Reshape", shifted, name="flat"), name="weights")
    graph = b.graph(b.op("MatMul", weights, b.input("v", (4, 8)), name="out"))
    found = mask_values(graph)
    assert {"scores.output[0]", "mask", "masked.output[0]", "shifted.output[0]", "flat.output[0]"} <= found
    assert not {"q", "k", "v", "weights.output[0]", "top.output[0]", "out.output[0]"} & found


def test_a_running_maximum_that_is_subtracted_goes_to_exponentials_too():
    """RWKV and a softmax by parts: ``exp(a - max(m, a))`` and ``exp(m - max(m, a))``, where ``m`` begins at -1e38."""
    b = Build()
    first, a = b.input("m", (4, 4)), b.input("a", (4, 4))
    top = b.op("Max", first, a, name="top")
    parts = [b.op("Exp", b.op("Sub", x, top, name=f"shifted_{n}"), name=n) for n, x in (("old", first), ("new", a))]
    found = mask_values(b.graph(b.op("Add", *parts, name="out")))
    assert {"m", "a", "top.output[0]", "shifted_old.output[0]"} <= found and "old.output[0]" not in found
    c = Build()
    top = c.op("Max", c.input("m", (4, 4)), c.input("a", (4, 4)), name="top")
    assert "top.output[0]" not in mask_values(c.graph(c.op("Relu", c.op("Sub", "a", top, name="s"), name="out")))


@pytest.mark.parametrize("other", ["Relu", "MatMul", "output"])
def test_a_value_that_somebody_else_reads_is_none(other):
    b = Build()
    scores = b.op("MatMul", b.input("q", (4, 8)), b.input("k", (8, 4)), name="scores")
    weights = b.op("Softmax", scores, name="weights")
    ends = [weights]
    if other == "Relu":
        ends.append(b.op("Relu", scores, name="r"))
    elif other == "MatMul":
        ends.append(b.op("MatMul", scores, scores, name="m"))
    else:
        ends.append(scores)
    assert "scores.output[0]" not in mask_values(b.graph(*ends))


@pytest.mark.parametrize(
    "values, mask",
    [
        ([-10.0, 20.0], False),
        ([-300.0, 500.0], False),
        ([-1e4, 3.0], True),
        ([-1e38, -1e38], True),
        ([-3.4e38, 3.4e38], True),
        ([-np.inf, 3.0], True),
        ([-np.inf, -np.inf], True),
        ([np.inf, 3.0], False),
        ([], False),
    ],
)
@pytest.mark.parametrize("kind", ["minmax", "histogram"])
def test_what_was_seen_tells_a_mask(kind, values, mask):
    assert holds_mask(statistics.measure(kind, np.float32(values))) is mask
    assert not holds_mask(None)


def test_the_search_is_linear_in_the_graph():
    def chain(length):
        b = Build()
        x = b.input("x", (4, 4))
        for i in range(length):
            x = b.op("Add", x, b.const(f"c{i}", (4, 4)), name=f"a{i}")
        return b.graph(b.op("Softmax", x, name="s"))

    small, large = chain(100), chain(400)
    assert len(mask_values(large)) == 401  # every sum and the input
    assert steps(lambda: mask_values(large)) < 4.4 * steps(lambda: mask_values(small))


def told(found: ConstantChannels) -> tuple[int, dict[int, float]]:
    return found.count, dict(zip(found.index.tolist(), found.value.tolist(), strict=True))


def expected(x: np.ndarray, axis: int) -> dict[int, float]:
    """By definition, channel by channel."""
    rows = np.moveaxis(x.astype(np.float64), axis, 0).reshape(x.shape[axis], -1)
    return {i: row[0] for i, row in enumerate(rows) if np.isfinite(row[0]) and (row == row[0]).all()}


PARTS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32 - 1)), min_size=1, max_size=4)


def part(batch: int, length: int, seed: int) -> np.ndarray:
    """Six channels: zero, one constant, sparse, dense, constant in each part, and one with a NaN."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((batch, 6, length)).astype(np.float32)
    x[:, 0], x[:, 1], x[:, 4], x[0, 5, -1] = random.choice([0.0, -0.0]), 1.5, seed % 2, np.nan
    x[:, 2] *= random.random((batch, length)) > 0.97
    return x


@given(PARTS, st.booleans(), st.permutations(range(4)))
def test_what_is_found_is_exact_whatever_the_parts_and_their_order(sizes, as_torch, order) -> None:
    parts = [part(*size) for size in sizes]
    whole = expected(np.concatenate([np.moveaxis(x, 1, 0).reshape(6, -1) for x in parts], 1), 0)
    give = torch.from_numpy if as_torch else np.asarray
    ordered = [parts[i] for i in order if i < len(parts)]
    watch = ChannelWatch()
    watch.place = ChannelAxis(-2)
    for x in ordered:
        watch.observe(give(x))
    merged = constant_channels(give(ordered[0]), -2)
    for x in ordered[1:]:
        merged = merge_channels(merged, constant_channels(give(x), -2))
    for found in (watch.seen, merged):
        assert found is not None and told(found) == (6, whole)
        assert not np.signbit(found.value[found.value == 0]).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64"])
@pytest.mark.parametrize("axis", [-1, -2, -4])
def test_any_type_and_axis(dtype, axis) -> None:
    x = torch.randint(-9, 9, (5, 4, 30, 6)).to(getattr(torch, dtype))
    x.movedim(axis, 0)[2] = 3
    assert told(constant_channels(x, axis)) == (x.shape[axis], {2: 3.0})
    if dtype != "bfloat16":
        assert told(constant_channels(x.numpy(), axis)) == (x.shape[axis], {2: 3.0})


def test_numbers_of_64_bits_differ_by_less_than_those_of_32() -> None:
    for i in range(0, 1500, 97):
        x = np.ones((50, 5, 30))
        x[i // 30, 3, i % 30] += 1e-12
        expected = (5, {0: 1.0, 1: 1.0, 2: 1.0, 4: 1.0})
        assert told(constant_channels(x, -2)) == told(constant_channels(torch.from_numpy(x), -2)) == expected


def test_one_element_that_differs_anywhere_is_found() -> None:
    for i in range(0, 4 * 50 * 50, 997):
        x = torch.zeros(4, 3, 50, 50)
        x.select(1, 1).view(4, 50, 50)[i // 2500, i % 2500 // 50, i % 50] = 1e-38
        assert told(constant_channels(x, -3)) == (3, {0: 0.0, 2: 0.0})


def test_an_infinity_is_no_constant() -> None:
    assert told(constant_channels(np.full((3, 2), np.inf), -1)) == (0, {})


def test_tensors_with_other_numbers_of_channels_have_none_in_common() -> None:
    few, many = constant_channels(np.zeros((2, 3)), -1), constant_channels(np.zeros((2, 4)), -1)
    assert told(few) == (3, {0: 0, 1: 0, 2: 0})
    assert told(merge_channels(few, many)) == told(merge_channels(many, few)) == (0, {})
    assert told(constant_channels(np.zeros((2, 4)), -1, few)) == (0, {})
    assert told(constant_channels(np.zeros(4), -2)) == (0, {})


def test_bounds_tell_as_much_as_the_values() -> None:
    x = part(3, 7, 1)[:, :5]
    found = channels_within(x.min((0, 2)), x.max((0, 2)))
    assert told(found) == told(constant_channels(x, -2))


def test_a_watch_stops_looking_when_nothing_can_change() -> None:
    watch = ChannelWatch()
    assert not watch.wanted, "the graph does not tell where the channels are"
    watch.observe(np.zeros((2, 3)))
    assert watch.seen is None
    watch.place = ChannelAxis(-1)
    watch.observe(np.zeros((0, 3)))
    assert watch.seen is None and watch.wanted
    watch.observe(np.arange(6.0).reshape(2, 3))
    assert watch.seen is not None and not watch.wanted


# ---- where the channels are

SHAPES = {"w": (8, 3, 3, 3), "fc.w": (5, 8), "scale": (8,), "table": (10, 8), "x": (2, 3, 9, 9), "h": (2, 8, 7, 7)}


def graph(*ops: Op, **kinds: str) -> Graph:
    names = {v for op in ops for v in (*op.outputs, *(i for i in op.inputs if i), *op.inner.values())}
    values = {
        n: Value(n, kinds.get(n, "param" if n in ("w", "fc.w", "scale", "table") else "activation"), SHAPES.get(n, ()))
        for n in names
    }
    return Graph(ops, values, ["x"], [])


CONV = Op("conv", "Conv", ("x", "w", None), ("h",))
FC = Op("fc", "Gemm", ("g", "fc.w"), ("y",), {"transB": 1})


@pytest.mark.parametrize(
    "ops, value, place",
    [
        ([CONV], "h", ChannelAxis(-3, "conv")),
        ([CONV], "x", ChannelAxis(-3)),
        ([CONV, Op("relu", "Relu", ("h",), ("r",))], "r", ChannelAxis(-3, "conv")),
        ([CONV, Op("bn", "BatchNormalization", ("h", "scale"), ("n",))], "n", ChannelAxis(-3, "bn")),
        ([CONV, Op("ln", "LayerNormalization", ("h", "scale"), ("n",))], "n", ChannelAxis(-3, "ln")),
        ([CONV, Op("pool", "MaxPool", ("h",), ("p",))], "p", ChannelAxis(-3, "conv")),
        ([CONV, Op("add", "Add", ("h", "other"), ("a",))], "a", ChannelAxis(-3)),
        ([CONV, Op("add", "Add", ("h", "h"), ("a",))], "a", ChannelAxis(-3, "conv")),
        ([CONV, Op("cat", "Concat", ("h", "h"), ("c",))], "c", ChannelAxis(-3)),
        ([CONV, Op("view", "Reshape", ("h",), ("g",)), FC], "g", ChannelAxis(-1)),
        ([CONV, Op("view", "Reshape", ("h",), ("g",))], "g", None),
        ([FC, CONV, Op("add", "Add", ("h", "y"), ("a",))], "a", None),
        ([FC], "y", ChannelAxis(-1, "fc")),
        ([Op("mm", "MatMul", ("a", "b"), ("s",))], "s", None),
        ([Op("mm", "MatMul", ("a", "fc.w"), ("s",))], "s", ChannelAxis(-1, "mm")),
        ([Op("emb", "Embedding", ("table", "ids"), ("e",))], "e", ChannelAxis(-1, "emb")),
        (
            [Op("rnn", "LSTM", ("a", "w", "w"), ("o",), inner={"cell": "c"})],
            "c",
            ChannelAxis(-1, "rnn"),
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)  # fmt: skip
def test_the_graph_tells_where_the_channels_are(ops, value, place) -> None:
    assert channel_axes(graph(*ops)).get(value) == place


def test_a_batch_norm_knows_its_rank() -> None:
    bn = Op("bn", "BatchNormalization", ("h", "scale"), ("n",))
    assert channel_axes(graph(bn)) == {"n": ChannelAxis(-3, "bn"), "h": ChannelAxis(-3)}


def test_the_cost_is_linear_in_the_graph() -> None:
    def chain(n: int) -> Graph:
        return graph(
            Op("conv", "Conv", ("x", "w"), ("v0",)),
            *(Op(f"add{i}", "Add", (f"v{i}", "v0"), (f"v{i + 1}",)) for i in range(n)),
        )

    small, large = chain(200), chain(800)
    assert steps(lambda: channel_axes(large)) < 4.5 * steps(lambda: channel_axes(small))
