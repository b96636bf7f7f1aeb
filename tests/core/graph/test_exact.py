"""How far back operators need the small values of what they read."""

from __future__ import annotations

import pytest

from bitwright.core.graph.float_values import exact_values
from tests.core.graphs import Build


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
