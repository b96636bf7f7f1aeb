"""Find the projections of queries, keys, values and output from the two products of an attention.

What lies between a projection and a product (heads, rotary positions, repeated keys) is only followed, not
understood: a method that scales or rotates channels across it tries that on the model and keeps what leaves the
function as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bitwright.core.graph.attention import MOVES, attention_products, data_readers, has_attention, sole_reader
from bitwright.core.graph.graph import Graph, Op
from bitwright.methods.layers import Layer, Layers

__all__ = ["Attention", "attention_products", "find_attention", "has_attention"]

_JOINS = frozenset(("Concat", "Stack", "Mul", "Add", "Sub"))
_LINEAR = MOVES | {"Mul", "Div", "Add", "Sub", "Neg"}


@dataclass(frozen=True)
class Attention:
    """One attention.

    Attributes:
        scores: the product of queries and keys.
        query, key, value: the projections; ``None`` where one does not come from a single linear layer of its own.
        output: the linear layer that reads the result.
        dim, value_dim: channels per head of queries and keys, and of values.
    """

    _as_text = True

    scores: str
    query: Layer | None
    key: Layer | None
    value: Layer | None
    output: Layer | None
    dim: int
    value_dim: int

    @property
    def scored(self) -> tuple[Layer, ...]:
        """The existing projections of queries and keys."""
        return tuple(layer for layer in (self.query, self.key) if layer is not None)

    def __str__(self) -> str:
        return f"{' x '.join(layer.op for layer in self.scored)} (attention {self.scores})"


def find_attention(layers: Layers) -> list[Attention]:
    """Every attention written as product, softmax, product; in execution order, linear in the graph."""
    return [_read(layers, scores, product) for scores, product in attention_products(layers.graph)]


def _read(layers: Layers, scores: Op, product: Op) -> Attention:
    graph = layers.graph
    query, key = (_origin(layers, scores, port, _LINEAR) for port in (0, 1))
    value = _origin(layers, product, 1, MOVES)
    dim = graph.values[str(scores.inputs[0])].shape[-1:] or (0,)
    value_dim = graph.values[str(product.inputs[1])].shape[-1:] or (0,)
    return Attention(
        scores.name, _heads(query, dim[0]), _heads(key, dim[0]), _heads(value, value_dim[0]),
        _behind(layers, product, value_dim[0]), dim[0], value_dim[0],
    )  # fmt: skip


def _heads(layer: Layer | None, dim: int) -> Layer | None:
    """``layer`` if its channels are complete heads."""
    return layer if layer is not None and dim > 0 and layer.axes.outputs % dim == 0 else None


def _origin(layers: Layers, reader: Op, port: int, through: frozenset[str]) -> Layer | None:
    """The one linear layer that an operand comes from, if nothing else reads what lies between."""
    graph = layers.graph
    inside: set[str] = {reader.name}
    values: dict[str, None] = {}
    origins: dict[str, Layer] = {}
    open_values = [reader.inputs[port]]
    while open_values:
        value = open_values.pop()
        if value is None or value in values or graph.values[value].is_static:
            continue
        layer, op = layers.by_output.get(value), graph.producer(value)
        if layer is not None and layer.kind == "layer":
            values[value] = None
            origins[layer.op] = layer
        elif op is not None and op.type in through and not op.also:  # others: rotary angles, not of this layer
            values[value] = None
            inside.add(op.name)
            open_values.extend(op.inputs if op.type in _JOINS else op.inputs[:1])
    if len(origins) != 1 or not _read_only_by(inside, graph, values):
        return None
    (layer,) = origins.values()
    return layer if layer.type in ("Gemm", "MatMul") else None


def _read_only_by(ops: set[str], graph: Graph, values: Iterable[str]) -> bool:
    """Whether only these operators read the values."""
    readers = {op.name for value in values for op, _ in data_readers(graph, value)}
    return readers <= ops and not any(graph.is_output(value) for value in values)


def _behind(layers: Layers, product: Op, dim: int) -> Layer | None:
    """The linear layer that reads the concatenated heads."""
    for op in _chain(layers.graph, product):
        layer = layers.of.get(op.name)
        if layer is not None:
            whole = layer.kind == "layer" and layer.type in ("Gemm", "MatMul") and dim > 0
            return layer if whole and layer.axes.inputs % dim == 0 else None
    return None


def _chain(graph: Graph, op: Op) -> Iterator[Op]:
    """The chain of sole readers after ``op`` that only move data."""
    while len(op.outputs) == 1:
        reader = sole_reader(graph, op.outputs[0])
        if reader is None:
            return
        yield reader
        if reader.type not in MOVES:
            return
        op = reader
