"""What follows the last layer: sigmoids, decoded coordinates, joins, selections.

Detectors, key-point heads and classifiers end in post-processing: what the last layers return is turned into
probabilities and coordinates, joined, sorted and thinned out. These operators are few, read small tensors, and runtimes compute
them in float as fast as on integers; a grid there costs accuracy only. A join of coordinates in pixels and probabilities has
one grid, whose step is larger than every probability.
"""

from __future__ import annotations

from collections.abc import Iterable

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.ops import op_row

_CONVERSION_SIDE = 4  # of a matrix that converts boxes, positions or colours


def tail_ops(graph: Graph, static: set[str]) -> list[Op]:
    """The operators from which no layer is reached, and which are none; empty where the graph has no layer.

    A layer is a product: of data with weights, or of two tensors. Two kinds of products are part of the post-processing, where
    nothing but post-processing follows: the expectation of a softmax (one output channel over stored positions), and the
    conversion of joined coordinates by a stored square matrix of at most four rows.

    Args:
        graph: the model.
        static: values that are the same in every run.
    """
    layers = [op for op in graph.ops if op_row(op.type).kind == "compute" and static.isdisjoint(op.outputs)]
    decoding = {op.name for op in layers if is_expectation(graph, op, static) or _converts(graph, op, static)}
    if len(decoding) == len(layers):
        return []
    proper = [op for op in layers if op.name not in decoding]
    before = _upstream(graph, proper) | {op.name for op in proper}
    return [op for op in graph.ops if op.name not in before]


def _upstream(graph: Graph, ops: Iterable[Op]) -> set[str]:
    """The operators from which ``ops`` are reached, also over what later runs of a place read."""
    reached: set[str] = set()
    stack = list(ops)
    while stack:
        makers = (graph.producer(value) for _, value in stack.pop().sources())
        new = {maker.name: maker for maker in makers if maker is not None and maker.name not in reached}
        reached |= new.keys()
        stack += new.values()
    return reached


def is_expectation(graph: Graph, op: Op, static: set[str]) -> bool:
    """Whether ``op`` weighs stored positions with the probabilities of a softmax: a product with one output channel."""
    if op.type not in ("Conv", "Gemm", "MatMul") or len(op.inputs) < 2 or op.inputs[1] not in static:
        return False
    maker = _maker(graph, op.inputs[0])
    return maker is not None and maker.type == "Softmax" and _has_one_output(graph, op)


def _converts(graph: Graph, op: Op, static: set[str]) -> bool:
    """Whether ``op`` converts coordinates that were joined: a product with a stored square matrix of few rows, and no bias."""
    if op.type not in ("Gemm", "MatMul") or len(op.inputs) < 2 or op.inputs[1] not in static:
        return False
    shape = graph.values[str(op.inputs[1])].shape
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] > _CONVERSION_SIDE or len(op.inputs) > 2:
        return False
    maker = _maker(graph, op.inputs[0])
    return maker is not None and op_row(maker.type).kind == "merge"


def _maker(graph: Graph, value: str | None) -> Op | None:
    """The operator that made the elements of ``value``; those that only move them are passed over."""
    maker = None if value is None else graph.producer(value)
    while maker is not None and op_row(maker.type).kind == "movement" and maker.inputs and maker.inputs[0] is not None:
        maker = graph.producer(maker.inputs[0])
    return maker


def _has_one_output(graph: Graph, op: Op) -> bool:
    shape = graph.values[str(op.inputs[1])].shape
    if op.type == "Conv":
        return len(shape) > 2 and shape[0] == 1
    if len(shape) == 1:
        return op.type == "MatMul"
    return len(shape) == 2 and shape[0 if op.type == "Gemm" and op.attrs.get("transB") else 1] == 1
