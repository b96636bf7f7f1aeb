"""Which channel of a batch norm each channel of a layer is, where operators that only move elements stand between.

``Flatten`` gives a channel of a picture one feature per place, ``Reshape`` makes channels of the features of a linear
layer, ``Transpose`` puts channels on another axis. The map is not derived from attributes: the number of each
channel is sent through the operators, in the recorded shapes, and the map is what arrives, or there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.traits import TRAITS
from bitwright.core.simulation.protocols import FloatModel

Array = NDArray[Any]

#: operators between a layer and its batch norms that move elements, the one nearest to the layer first: linked, so that
#: many layers that read one batch norm cost no more than one
Path = tuple[Op, Any] | None
#: layers whose channels are on the last axis
FLAT = ("Gemm", "MatMul")

_ROWS = 2  # of an axis of unknown length in front
#: how many numbers from 0 on a dtype holds exactly, by which the channels are told apart
_EXACT = {"float16": 1 << 11, "bfloat16": 1 << 8}


@dataclass(frozen=True)
class Move:
    """An operator that moves elements: to ``shape``, at most one length of it open; ``None`` where it permutes axes."""

    op: str
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Between:
    """What stands between a layer and its batch norms, where it moves elements.

    Attributes:
        path: the operators that do, in execution order.
        channels: for each channel of the layer that of the batch norm, int, shape [channels of the layer].
    """

    path: tuple[Move, ...]
    channels: Array


def moves_elements(graph: Graph, op: Op) -> bool:
    """Whether the op, which runs once, hands on every element of its input once, in another order or shape."""
    if op.type not in (*TRAITS["reshape"], "Transpose") or len(op.outputs) != 1 or op.calls != 1 or op.also:
        return False
    source, result = graph.values[op.inputs[0] or ""], graph.values[op.outputs[0]]
    return source.dtype == result.dtype and source.kind == "activation"


def filled(shape: Sequence[int]) -> tuple[int, ...] | None:
    """``shape`` with a length for a first axis of unknown length; ``None`` where the length of another is not known."""
    if any(size < 0 for size in shape[1:]) or not shape:
        return None
    return (shape[0] if shape[0] >= 0 else _ROWS, *shape[1:])


def moved(view: FloatModel, path: Sequence[Move], x: Array) -> Array:
    """``x``, of the shape that the first of ``path`` reads, as it leaves the last."""
    for move in path:
        x = np.asarray(view.local(move.op)(x)) if move.shape is None else x.reshape(move.shape)
    return x


def between_before(graph: Graph, view: FloatModel, layer: Op, path: Path) -> Between | str:
    """The map for a layer in front of ``path`` and a batch norm after it; or why there is none."""
    ops, axis = _unlinked(path), _channel_axis(layer)
    shape = graph.values[layer.outputs[0]].shape
    sent = _sent(graph, view, ops, shape, axis)
    if isinstance(sent, str):
        return sent
    moves, numbers = sent
    norm = np.broadcast_to(_along(numbers.shape[1], 1, numbers.ndim), numbers.shape)
    index = np.zeros(shape[axis], np.int64)
    index[numbers] = norm
    if np.array_equal(index[numbers], norm):
        return Between(moves, index)
    return f"{ops[0].name} ({ops[0].type}) spreads a channel of the layer over several of the batch norm"


def between_after(graph: Graph, view: FloatModel, norm: Op, layer: Op, path: Path) -> Between | str:
    """The map for a batch norm in front of ``path`` and a layer after it; or why there is none."""
    ops, axis = _unlinked(path)[::-1], _channel_axis(layer)
    weight = graph.values[layer.inputs[1] or ""].shape
    width = weight[-1 if layer.attrs.get("transB") else 0] if weight and axis == -1 else None
    sent = _sent(graph, view, ops, graph.values[norm.outputs[0]].shape, 1, width)
    if isinstance(sent, str):
        return sent
    moves, numbers = sent
    rows = np.moveaxis(numbers, axis, -1).reshape(-1, numbers.shape[axis])
    if rows.size and (rows == rows[0]).all():
        return Between(moves, np.array(rows[0]))
    return f"{ops[0].name} ({ops[0].type}) puts several channels of the batch norm into one of the layer"


def _unlinked(path: Path) -> list[Op]:
    found = []
    while path is not None:
        op, path = path
        found.append(op)
    return found


def _channel_axis(layer: Op) -> int:
    return -1 if layer.type in FLAT else 1


def _sent(
    graph: Graph, view: FloatModel, ops: Sequence[Op], shape: Sequence[int], axis: int, width: int | None = None
) -> tuple[tuple[Move, ...], Array] | str:
    """The number of its channel in place of every element of a value of ``shape``, as it leaves the last of ``ops``."""
    first, full = f"{ops[0].name} ({ops[0].type})", filled(shape)
    if full is None:
        return f"the shape of what {first} reads is not known"
    count, exact = full[axis], _EXACT.get(graph.values[ops[0].outputs[0]].dtype, 1 << 24)
    if count > exact:
        return f"{count} channels in front of {first} are more than could be told apart"
    x = np.array(np.broadcast_to(_along(count, axis, len(full)), full), np.float32)
    path = [_move(graph, op, width if op is ops[-1] else None) for op in ops]
    for op, move in zip(ops, path, strict=True):
        if move.shape is not None and not _fits(move.shape, x.size):
            return f"the shape that {op.name} ({op.type}) makes is not known"
        x = moved(view, [move], x)
    return tuple(path), x.astype(np.int64)


def _move(graph: Graph, op: Op, width: int | None) -> Move:
    """What an operator does; ``width`` stands for the length of a last axis that the graph leaves open."""
    if op.type == "Transpose":
        return Move(op.name)
    shape = graph.values[op.outputs[0]].shape
    return Move(op.name, (*shape[:-1], width) if width is not None and shape[-1:] == (-1,) else tuple(shape))


def _fits(target: Sequence[int], size: int) -> bool:
    """Whether ``size`` elements have the shape ``target`` in one way."""
    free, known = sum(n < 0 for n in target), math.prod(n for n in target if n >= 0)
    return size == known if not free else free == 1 and known > 0 and size % known == 0


def _along(size: int, axis: int, rank: int) -> Array:
    return np.arange(size).reshape([size if i == axis % rank else 1 for i in range(rank)])
