"""Which values carry masks: by where they go, and by what was seen there."""

import numpy as np
import pytest

from bitwright.core.graph.masks import holds_mask, mask_values
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
