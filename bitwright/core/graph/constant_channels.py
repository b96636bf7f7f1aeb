"""Channels that never change: which axis of a tensor counts them, and what calibration saw of each.

A channel that is zero throughout (after a ReLU that never fires) or constant carries no information. Where a site has one
scale for the whole tensor its statistics cannot tell, so each site has a :class:`ChannelWatch` beside them. Nearly every
channel shows two different values within a few elements and is never looked at again; only those that have not yet are
looked at whole, in every batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.compiled.loops import flat, loops
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS, op_row
from bitwright.core.graph.recurrence import CELLS
from bitwright.core.numerics.arrays import (
    Array,
    as_array,
    bounds,
    cast,
    dtype_name,
    is_floating,
    is_torch,
    share,
    to_numpy,
    transpose,
)

# ---- which axis


@dataclass(frozen=True)
class ChannelAxis:
    """Position of a value's channels.

    Attributes:
        axis: counted from the end (-3 of images, -1 of features), whatever stands in front.
        layer: the operator whose parameters made the channels what they are; empty where it is not one alone.
    """

    axis: int
    layer: str = ""


# what leaves channels where they are, besides every operator of the kinds "pointwise" and "norm"
_KEEPS = frozenset((
    *TRAITS["identity"], "MaxPool", "GlobalMaxPool", "AveragePool", "GlobalAveragePool", "Pad", "ResizeNearest", "Concat",
    "Where", "MaskedFill", "Split",
))  # fmt: skip
_RENUMBERS = frozenset(("Concat", "Split"))  # a channel after them has another number
_SPATIAL = ("Conv", "ConvTranspose")
_FEATURES = ("Gemm", "MatMul", "Bilinear", "Embedding", *CELLS)
_AXIS_ONE = ("BatchNormalization", "InstanceNormalization")


def channel_axes(graph: Graph) -> dict[str, ChannelAxis]:
    """Value -> position of its channels, where the graph determines it; one pass, linear time.

    =============================================  ====================================
    made by                                        channels
    =============================================  ====================================
    Conv, ConvTranspose                            before the axes of the kernel
    Gemm, MatMul by a constant, Embedding          last axis
    RNN, GRU, LSTM, and inside of them             last axis
    batch and instance normalisation               axis 1
    pointwise operators, pools, joins, other norms where all inputs that are known have them
    anything else                                  where a layer that reads it has them
    =============================================  ====================================

    A product of two activations (attention) has no channels, nor has what is reshaped, before the next layer.
    """
    found: dict[str, ChannelAxis] = {}
    for op in graph.ops:
        made = _made(graph, op, found)
        if made is not None:
            # what a norm returns beside its result are statistics
            outputs = op.outputs[:1] if op_row(op.type).kind == "norm" else op.outputs
            found.update(dict.fromkeys((*outputs, *op.inner.values()), made))
    for op in graph.ops:
        read, axis = _data(graph, op), _layer_axis(graph, op)
        if axis is not None and read is not None and not graph.values[read].is_static:
            found.setdefault(read, ChannelAxis(axis))
    return found


def _made(graph: Graph, op: Op, found: Mapping[str, ChannelAxis]) -> ChannelAxis | None:
    axis = _layer_axis(graph, op)
    if axis is not None:
        return ChannelAxis(axis, op.name)
    kind = op_row(op.type).kind
    if kind not in ("pointwise", "norm") and op.type not in _KEEPS:
        return None
    known = [found[value] for value in _activations(graph, op) if value in found]
    if len({place.axis for place in known}) != 1:
        return None
    if kind == "norm":
        return ChannelAxis(known[0].axis, op.name)
    same = len({place.layer for place in known}) == 1 and len(known) == len(list(_activations(graph, op)))
    return ChannelAxis(known[0].axis, known[0].layer if same and op.type not in _RENUMBERS else "")


def _layer_axis(graph: Graph, op: Op) -> int | None:
    """The axis of the channels of what a layer makes, and of what it reads; ``None`` of any other operator."""
    if op.type in _AXIS_ONE:
        read = _data(graph, op)
        rank = 0 if read is None else len(graph.values[read].shape)
        return 1 - rank if rank > 1 else None
    port = op_row(op.type).weight
    weight = op.inputs[port] if port is not None and port < len(op.inputs) else None
    if weight is None or not graph.values[weight].is_static:
        return None
    if op.type in _SPATIAL:
        rank = len(graph.values[weight].shape)
        return 1 - rank if rank > 1 else None
    return -1 if op.type in _FEATURES and not op.attrs.get("transA") else None


def _data(graph: Graph, op: Op) -> str | None:
    """The first activation operand of a layer."""
    ports = op_row(op.type).activations
    return op.inputs[ports[0]] if ports and ports[0] < len(op.inputs) else None


def _activations(graph: Graph, op: Op) -> Iterator[str]:
    for value in op.inputs:
        if value is not None and graph.values[value].is_float and not graph.values[value].is_static:
            yield value


# ---- what was seen


@dataclass(frozen=True, eq=False)
class ConstantChannels:
    """The channels whose elements have all had the same finite value so far.

    Merging those of two parts of the data gives those of both, whatever the order. Channels of tensors with different
    numbers of them are none.

    Attributes:
        count: how many channels there are; 0 when none is constant.
        index: which of them are constant, int64, ascending.
        value: what they hold, float64, as long as ``index``.
    """

    count: int
    index: NDArray[np.int64]
    value: NDArray[np.float64]

    @cached_property
    def groups(self) -> tuple[NDArray[np.int64], ...]:
        """Places in ``index`` of the channels that share a value, for a few values; then of all others, sorted by value."""
        order = np.argsort(self.value, kind="stable")
        firsts = np.flatnonzero(np.diff(self.value[order], prepend=np.nan))
        return tuple(part for part in np.split(order, firsts[1 : _VALUES + 1]) if part.size)

    @property
    def zero(self) -> tuple[int, ...]:
        """Channels that are always zero."""
        return tuple(self.index[self.value == 0].tolist())

    @property
    def constant(self) -> tuple[int, ...]:
        """Channels that always hold one other value."""
        return tuple(self.index[self.value != 0].tolist())


_VALUES = 3  # a ReLU leaves channels at one value, a ReLU6 at two
_ROW = 16  # elements of a channel that lie side by side, from which a compiled loop over them pays
_NONE = ConstantChannels(0, np.zeros(0, np.int64), np.zeros(0))


def _listed(count: int, index: NDArray[np.int64], value: NDArray[Any]) -> ConstantChannels:
    # of the two zeros the positive one
    return ConstantChannels(count, index, value.astype(np.float64) + 0.0) if index.size else _NONE


def constant_channels(x: Array, axis: int, known: ConstantChannels | None = None) -> ConstantChannels:
    """The constant channels of ``x``, or of ``x`` and of the data of ``known``.

    Args:
        x: numpy array or torch tensor with at least one element, any real dtype.
        axis: of the channels, counted from the end.
        known: of earlier data; only its channels are looked at.

    >>> found = constant_channels(np.float32([[0, 1, 5], [0, 2, 5]]), -1)
    >>> found.zero, found.constant
    ((0,), (2,))
    """
    x = as_array(x)
    if x.ndim < -axis or (known is not None and known.count != x.shape[axis]):
        return _NONE
    if known is None:
        known = _uniform_sample(x, axis)
    changed = [(group, ~same) for group in known.groups if not (same := _still(x, axis, known, group)).all()]
    if not changed:
        return known
    gone = np.concatenate([group[which] for group, which in changed])
    return _listed(known.count, np.delete(known.index, gone), np.delete(known.value, gone))


def _still(x: Array, axis: int, known: ConstantChannels, group: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The channels of a group that hold only their known value in ``x``."""
    found = _still_compiled(x, axis, known.index[group], known.value[group])
    if found is not None:
        return found
    part, value = _taken(x, axis, known.index[group]), known.value[group]
    if value[0] == value[-1]:  # to look at all of them as one is much less work than to tell them apart
        lo, hi = bounds(part)
        if lo == hi == value[0]:
            return np.ones(group.size, np.bool_)
    lows, highs = _channel_bounds(part, axis)
    return np.asarray((lows == value) & (highs == value))


def _still_compiled(
    x: Array, axis: int, index: NDArray[np.int64], value: NDArray[np.float64]
) -> NDArray[np.bool_] | None:
    """The same without a copy of the channels; ``None`` where no compiled loop serves."""
    inner, narrow = math.prod(x.shape[axis + 1 :]) if axis != -1 else 1, value.astype(np.float32)
    ordered = x.is_contiguous() if is_torch(x) else x.flags.c_contiguous
    if inner < _ROW or not ordered or (compiled := loops()) is None or (values := flat(x)) is None:
        return None
    same = np.empty(index.size, np.uint8)
    compiled.channels_hold(values, x.shape[axis], inner, index, narrow, same)
    return same.astype(np.bool_)


def _uniform_sample(x: Array, axis: int) -> ConstantChannels:
    """The channels that may be constant, judged by a few elements."""
    first = x.ndim + axis
    rows = transpose(x, (first, *(i for i in range(x.ndim) if i != first)))
    sample = to_numpy(_sampled(rows)).reshape(rows.shape[0], -1)
    value = sample[:, :1]
    index = np.flatnonzero((np.isfinite(value) & (sample == value)).all(1))
    return _listed(sample.shape[0], index, value[index, 0])


def channels_within(lo: NDArray[np.floating[Any]], hi: NDArray[np.floating[Any]]) -> ConstantChannels:
    """The constant channels of data of which the bounds are known, one per channel; both finite."""
    index = np.flatnonzero(lo == hi)
    return _listed(lo.size, index, lo[index])


def merge_channels(a: ConstantChannels, b: ConstantChannels) -> ConstantChannels:
    """The constant channels of the data of ``a`` and the data of ``b``; also the rule for an all-reduce."""
    if a.count != b.count:
        return _NONE
    _, ours, theirs = np.intersect1d(a.index, b.index, assume_unique=True, return_indices=True)
    kept = ours[a.value[ours] == b.value[theirs]]
    return _listed(a.count, a.index[kept], a.value[kept])


class ChannelWatch:
    """Channel statistics of one site during calibration.

    Attributes:
        place: where its channels are; ``None`` where the graph does not tell, and nothing is looked at.
        seen: of all data so far; ``None`` before any.
    """

    def __init__(self) -> None:
        self.place: ChannelAxis | None = None
        self.seen: ConstantChannels | None = None

    @property
    def wanted(self) -> bool:
        """Whether more data can change the answer: a channel is constant so far, or no data was seen."""
        return self.place is not None and (self.seen is None or self.seen.index.size > 0)

    def observe(self, x: Array) -> None:
        """Update with a tensor, numpy or torch; empty tensors are ignored."""
        if self.place is not None and self.wanted and 0 not in x.shape:
            self.seen = constant_channels(x, self.place.axis, self.seen)

    def would_keep(self, seen: ConstantChannels, but: float) -> bool:
        """Whether :meth:`add` would leave a channel constant at another value than ``but``."""
        kept = seen if self.seen is None else merge_channels(self.seen, seen)
        return self.wanted and bool((kept.value != but).any())

    def add(self, seen: ConstantChannels) -> None:
        """Merge statistics taken elsewhere."""
        if self.wanted:
            self.seen = seen if self.seen is None else merge_channels(self.seen, seen)


_FEW = (1, 32, 6, 3)  # elements along each axis but that of the channels, by how many such axes there are


def _sampled(rows: Array) -> Array:
    """A few elements of every row, spread over the other axes, without the borders of images."""
    few = _FEW[min(rows.ndim - 1, 3)]
    steps = [max(1, n // few) for n in rows.shape[1:]]
    return rows[(slice(None), *(slice(step // 2, step * few, step) for step in steps))]


def _taken(x: Array, axis: int, index: NDArray[np.int64]) -> Array:
    """The channels at ``index``, in a dtype with fast reductions."""
    if index.size < x.shape[axis]:
        x = x.index_select(axis, share(index, x)) if is_torch(x) else np.take(x, index, axis)
    if not is_torch(x) and is_floating(x):  # numpy has no fast reduction for halves
        x = cast(x, "float64" if dtype_name(x) == "float64" else "float32")
    return x


def _channel_bounds(part: Array, axis: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bounds of every channel, NaN where one holds a NaN."""
    lo = hi = part.reshape(-1, part.shape[axis], *([math.prod(part.shape[axis + 1 :])] if axis != -1 else []))
    for over in (2, 0) if axis != -1 else (0,):
        lo, hi = (lo.amin(over), hi.amax(over)) if is_torch(part) else (lo.min(over), hi.max(over))
    return to_numpy(lo).astype(np.float64), to_numpy(hi).astype(np.float64)
