"""Find attention in a graph by its operators: a product of queries and keys, a softmax, a product with values."""

from __future__ import annotations

from collections.abc import Iterator

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS

MOVES = frozenset((
    *TRAITS["identity"], *TRAITS["reshape"], "Transpose", "Slice", "Split", "Expand", "Tile", "Concat", "Stack", "Gather",
))  # fmt: skip
_BEFORE_SOFTMAX = frozenset((  # scales, masks, soft caps, sinks, heads and batch as one axis, the largest subtracted
    "Mul", "Div", "Add", "Sub", "Where", "MaskedFill", "Clip", "Max", "Tanh", "Concat",
    *TRAITS["identity"], *TRAITS["reshape"],
))  # fmt: skip


def attention_products(graph: Graph) -> Iterator[tuple[Op, Op]]:
    """The two products of every attention: queries by keys, and softmax by values."""
    for op in graph.ops:
        if op.type == "Softmax" and op.inputs[0] is not None and len(op.outputs) == 1:
            scores = _product_before(graph, op.inputs[0])
            product = _reader(graph, op.outputs[0])
            if scores is not None and product is not None:
                yield scores, product


def has_attention(graph: Graph) -> bool:
    """Whether the graph has attention."""
    return next(attention_products(graph), None) is not None


def _product_before(graph: Graph, value: str) -> Op | None:
    """The product of two activations from which ``value`` follows by scaling and masking."""
    op = graph.producer(value)
    while op is not None and op.type in _BEFORE_SOFTMAX:
        operands = op.inputs[1:] if op.type == "Where" else op.inputs  # its first chooses
        active = [s for s in operands if s is not None and graph.producer(s) is not None]
        op = graph.producer(active[0]) if active else None
    return op if op is not None and op.type == "MatMul" and len(op.inputs) > 1 else None


def _reader(graph: Graph, value: str) -> Op | None:
    """The product whose first operand is ``value``, across operators that only move it."""
    while (op := sole_reader(graph, value)) is not None and op.type in MOVES and len(op.outputs) == 1:
        value = op.outputs[0]
    return op if op is not None and op.type == "MatMul" and op.inputs[0] == value else None


def data_readers(graph: Graph, value: str) -> list[tuple[Op, int]]:
    """Each ``(op, port)`` that reads the elements of ``value``, not only its shape."""
    return [(op, port) for op, port in graph.consumers(value) if op.type not in ("Shape", "Size")]


def sole_reader(graph: Graph, value: str) -> Op | None:
    """The only op that reads the elements of ``value``; ``None`` when there are several or the model returns it."""
    readers = data_readers(graph, value)
    return readers[0][0] if len(readers) == 1 and not graph.is_output(value) else None
