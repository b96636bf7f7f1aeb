"""Multiplications of operators, counted by hand."""

from __future__ import annotations

import pytest

from bitwright.core.graph.cost import multiplications, size
from bitwright.core.graph.graph import Graph
from tests.core.graphs import Build


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
