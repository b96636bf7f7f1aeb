"""Layers as channel methods see them."""

from __future__ import annotations

import pytest

from bitwright.methods.layers import Layers
from tests.core.graphs import Build


@pytest.mark.parametrize(
    ("kind", "shape", "bias"),
    [
        ("param", (8,), "b"),
        ("param", (3, 8), None),
        ("param", (1,), None),
        ("input", (8,), None),
        ("input", (2, 8), None),
    ],
)
def test_the_bias_of_a_product_is_a_stored_vector_that_is_added(
    kind: str, shape: tuple[int, ...], bias: str | None
) -> None:
    b = Build()
    product = b.op("MatMul", b.input(shape=(2, 4)), b.param("w", (4, 8)), name="product", shape=(2, 8))
    other = b.param("b", shape) if kind == "param" else b.input("b", shape)
    graph = b.graph(b.op("Add", product, other, name="add", shape=(2, 8)))
    layer = Layers(graph).of["product"]
    assert layer.bias == bias and layer.adder == (None if bias is None else "add")
