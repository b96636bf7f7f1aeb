"""Find the batch norms that can be folded without changing the function, and the reasons for the others.

Batch norms in a row, each the only reader of the one before, form a *chain* and are folded as one. Chains and
the layers beside them form a *component* when they share a batch norm or a parameter: it is folded whole or
not at all.

Between a layer and a batch norm there may be operators that only move elements: ``Flatten`` gives a channel of an image
one feature per position, ``Reshape`` turns features of a linear layer into channels, ``Transpose`` puts channels on another
axis. The channel map is not derived from attributes: channel numbers are sent through the operators in the recorded
shapes, and the result is the map, or there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import LENGTHS, TRAITS
from bitwright.core.simulation.float_model import AddBias, Bypass, FloatModel, Undo
from bitwright.errors import ModelError
from bitwright.methods.layers import Reversible, bn_affine, channel_axes, forward_obstacle, moments_of_layers
from bitwright.tables import Tabular

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
    """Data movement between a layer and its batch norms.

    Attributes:
        path: the operators that do, in execution order.
        channels: for each channel of the layer that of the batch norm, int, shape [channels of the layer].
    """

    path: tuple[Move, ...]
    channels: Array


def moves_elements(graph: Graph, op: Op) -> bool:
    """Whether the op, which runs once, only reorders or reshapes the elements of its input."""
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
    """``x``, an input of the first operator of ``path``, after the last one."""
    for move in path:
        x = np.asarray(view.local(move.op)(x)) if move.shape is None else x.reshape(move.shape)
    return x


def between_before(graph: Graph, view: FloatModel, layer: Op, path: Path) -> Between | str:
    """The channel map of a layer before ``path`` and a batch norm after it; or the reason why there is none."""
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
    """The channel map of a batch norm before ``path`` and a layer after it; or the reason why there is none."""
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
    """The channel number of every element of a value of ``shape`` after ``ops``."""
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
    """The data movement of an operator; ``width`` replaces an unknown length of the last axis."""
    if op.type == "Transpose":
        return Move(op.name)
    shape = graph.values[op.outputs[0]].shape
    return Move(op.name, (*shape[:-1], width) if width is not None and shape[-1:] == (-1,) else tuple(shape))


def _fits(target: Sequence[int], size: int) -> bool:
    """Whether ``size`` elements can have the shape ``target`` in exactly one way."""
    free, known = sum(n < 0 for n in target), math.prod(n for n in target if n >= 0)
    return size == known if not free else free == 1 and known > 0 and size % known == 0


def _along(size: int, axis: int, rank: int) -> Array:
    return np.arange(size).reshape([size if i == axis % rank else 1 for i in range(rank)])


Direction = Literal["backward", "forward"]


#: names of batch norms in execution order
Chain = tuple[str, ...]


@dataclass(frozen=True)
class Fold:
    """Layers that change together, each with the batch norms it absorbs.

    Attributes:
        direction: ``backward`` into the layer before, ``forward`` into the layer after.
        layers: ``(layer, batch norms in execution order)``; several when they share a batch norm or a
            parameter.
        scale, shift: what is absorbed, float64, shape [C]; not part of the comparison.
        keeps_shift: the layer has no place for a bias, so the last batch norm stays and only adds the shift.
        between: layer -> what moves its elements on the way; not for layers with the batch norm's own channels.
    """

    direction: Direction
    layers: tuple[tuple[str, tuple[str, ...]], ...]
    scale: Array = field(compare=False, repr=False)
    shift: Array = field(compare=False, repr=False)
    keeps_shift: bool = False
    between: Mapping[str, Between] = field(default_factory=dict, compare=False, repr=False)

    def of_layer(self, layer: str, values: Array) -> Array:
        """``values``, one per channel of the batch norm, for each channel of ``layer``."""
        return values[self.between[layer].channels] if layer in self.between else values

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Every ``(layer, batch norm)``."""
        return tuple((layer, bn) for layer, chain in self.layers for bn in chain)

    @property
    def batch_norms(self) -> tuple[str, ...]:
        """Every batch norm once."""
        return tuple(dict.fromkeys(bn for _, bn in self.pairs))

    def __str__(self) -> str:
        form = "{layer} <- {norms}" if self.direction == "backward" else "{norms} -> {layer}"
        rows = [form.format(layer=layer, norms=" + ".join(chain)) for layer, chain in self.layers]
        kept = " (the shift stays in the batch norm, the layer has no bias)" if self.keeps_shift else ""
        return ", ".join(rows) + kept


@dataclass(frozen=True)
class Refusal:
    """A batch norm that stays, and why.

    Attributes:
        op: the layer that could have absorbed it, if there is one beside it.
        bn: the batch norm.
        reason: what stands against it, with the names involved.
    """

    op: str | None
    bn: str
    reason: str

    def __str__(self) -> str:
        return f"{self.bn}: {self.reason}"


def in_execution_order(refusals: Iterable[Refusal], graph: Graph) -> list[Refusal]:
    """The refusals in the order in which the graph runs their batch norms."""
    order = {op.name: i for i, op in enumerate(graph.ops)}
    return sorted(refusals, key=lambda refusal: order[refusal.bn])


#: layers with what moves elements between them and a chain; and what stands against them
Beside = tuple[list[tuple[Op, Path]], str | None]

_KINDS = {
    "input": "an input of the model",
    "param": "a parameter",
    "constant": "a constant",
    "activation": "an activation",
}


@dataclass(frozen=True)
class Facts:
    """Facts about a model that the search needs.

    Attributes:
        graph, view: the model.
        derived: parameter -> values computed from it.
        drops_nothing: whether a dropout, by name, hands its input on unchanged; found by a run where it is asked for.
    """

    graph: Graph
    view: FloatModel
    derived: Mapping[str, Sequence[str]]
    drops_nothing: Callable[[str], bool]


def facts_of(graph: Graph, view: FloatModel) -> Facts:
    """The facts of a model, in time linear in its graph."""
    derived: dict[str, list[str]] = {}
    for value in graph.values.values():
        for source in value.sources:
            derived.setdefault(source, []).append(value.name)
    return Facts(graph, view, derived, cache(partial(_drops_nothing, graph, view)))


def _drops_nothing(graph: Graph, view: FloatModel, name: str) -> bool:
    # nothing in the graph says whether dropout drops also in inference, as F.dropout does unless told otherwise
    rank = len(graph.values[graph.op(name).inputs[0] or ""].shape)
    ones = np.ones((32, 32, *(1,) * (rank - 2)), np.float32)
    return bool(np.all(view.local(name)(ones) == 1))


def operand(op: Op, port: int) -> str | None:
    """The value the op reads at ``port``; ``None`` when the port is empty or missing."""
    return op.inputs[port] if port < len(op.inputs) else None


def sources_of(op: Op) -> tuple[str, ...]:
    """Values that the op reads at port 0, over all its runs."""
    return tuple(dict.fromkeys(value for port, value in op.sources() if port == 0))


def only_reader(facts: Facts, value: str, *, moves: bool) -> Op | None:
    """The only op that reads ``value``, at port 0; else ``None``.

    Across operators that change nothing; with ``moves`` also across those that move elements.
    """
    seen = {value}
    while True:
        readers = _number_readers(facts.graph, value)
        if len(readers) != 1 or readers[0][1] != 0 or facts.graph.is_output(value):
            return None
        op = readers[0][0]
        if not (_hands_on(facts, op) if moves else _passes(facts, op)):
            return op
        value = op.outputs[0]
        if value in seen or len(sources_of(op)) != 1:
            return None
        seen.add(value)


def maker_of(facts: Facts, value: str | None) -> Op | None:
    """The op that computed the elements of ``value``, across operators that pass them on."""
    seen: set[str] = set()
    while value is not None and value not in seen:
        seen.add(value)
        op = facts.graph.producer(value)
        if op is None or not _hands_on(facts, op):
            return op
        value = op.inputs[0]
    return None


def layers_before(facts: Facts, chain: Chain) -> Beside:
    """The layers whose outputs only the chain reads, and the objections to each."""
    graph = facts.graph
    head = graph.op(chain[0])
    layers: list[tuple[Op, Path]] = []
    open_values: list[tuple[str, Op, Path]] = [(value, head, None) for value in sources_of(head)]
    seen = {value for value, *_ in open_values}
    while open_values:
        value, reader, path = open_values.pop()
        op = graph.producer(value)
        if op is None:
            kind = _KINDS[graph.values[value].kind]
            return layers, f"its input {value} is not a result of a layer but {kind}"
        if not _leads_on(facts, op, 0):
            return layers, f"its input comes from {op.name} ({op.type})"
        if reason := _why_shared(graph, value, reader):
            return layers, reason
        if op.type in TRAITS["layer"]:
            layers.append((op, path))
            continue
        path = _extended(graph, path, op)
        open_values.extend((source, op, path) for source in sources_of(op) if source not in seen)
        seen.update(sources_of(op))
    return layers, None


def layers_after(facts: Facts, chain: Chain) -> Beside:
    """The layers that read the chain's output, and the objections to each."""
    graph = facts.graph
    layers: list[tuple[Op, Path]] = []
    passed: list[Op] = []
    end = graph.op(chain[-1]).outputs[0]
    paths: dict[str, Path] = {end: None}
    open_values = [end]
    while open_values:
        value = open_values.pop()
        if graph.is_output(value):
            return layers, f"{value} is an output of the model"
        for op, port in _number_readers(graph, value):
            if not _leads_on(facts, op, port):
                return layers, f"{op.name} ({op.type}) reads {value}"
            if op.type in TRAITS["layer"]:
                layers.append((op, paths[value]))
                continue
            passed.append(op)
            if op.outputs[0] not in paths:
                paths[op.outputs[0]] = _extended(graph, paths[value], op)
                open_values.append(op.outputs[0])
    foreign = _first_foreign([*(layer for layer, _ in layers), *passed], paths)
    return layers, foreign or (None if layers else "nothing reads its output")


def _number_readers(graph: Graph, value: str) -> list[tuple[Op, int]]:
    """Readers of a value's elements, without those that read only its shape."""
    return [reader for reader in graph.consumers(value) if reader[0].type not in LENGTHS]


def _leads_on(facts: Facts, op: Op, port: int) -> bool:
    return port == 0 and (op.type in TRAITS["layer"] or _hands_on(facts, op))


def _hands_on(facts: Facts, op: Op) -> bool:
    """Whether the op's output has exactly the elements of its input."""
    return _passes(facts, op) or moves_elements(facts.graph, op)


def _passes(facts: Facts, op: Op) -> bool:
    """Whether the op passes its input on unchanged."""
    if op.type not in TRAITS["identity"] or len(op.outputs) != 1 or op.inputs[0] is None:
        return False
    source, result = facts.graph.values[op.inputs[0]], facts.graph.values[op.outputs[0]]
    alike = (source.shape, source.dtype) == (result.shape, result.dtype)
    return alike and (op.type != "Dropout" or facts.drops_nothing(op.name))


def _extended(graph: Graph, path: Path, op: Op) -> Path:
    return (op, path) if moves_elements(graph, op) else path


def _why_shared(graph: Graph, value: str, reader: Op) -> str | None:
    if graph.is_output(value):
        return f"{value} is an output of the model"
    others = (op for op, port in _number_readers(graph, value) if op is not reader or port != 0)
    return next((f"{op.name} also reads {value}" for op in others), None)


def _first_foreign(ops: Sequence[Op], known: Collection[str]) -> str | None:
    """A sentence on an operator that in some of its runs reads values other than ``known``."""
    reads = ((op, source) for op in ops for source in sources_of(op) if source not in known)
    return next((f"{op.name} also runs on {source}" for op, source in reads), None)


# -- batch norms


def why_unfit(facts: Facts, norm: Op) -> str | None:
    """The reason why a batch norm is not a fixed function of one value and cannot be folded."""
    if norm.attrs.get("training") or any(operand(norm, port) is None for port in (3, 4)):
        return "it normalises with the statistics of the batch, so it is not a fixed function of one value"
    if _varies(norm):
        return "its runs differ in their parameters or attributes"
    for value in _params(norm):
        if facts.graph.values[value].kind != "param":
            return f"its parameter {value} is computed in the model, not stored"
        if other := other_use(facts, value):
            return other
    bypass = facts.view.can_edit(Bypass(norm.name))
    if bypass is None:
        return None
    shared = why_not_private(facts.graph, norm)
    return shared and f"it cannot be removed ({bypass}) nor be made an identity ({shared})"


def why_not_private(graph: Graph, norm: Op) -> str | None:
    """The reason why the parameters of a batch norm cannot be rewritten for it alone."""
    uses = ((value, reader) for value in _params(norm) for reader, _ in graph.consumers(value))
    return next((f"{reader.name} also reads {value}" for value, reader in uses if reader is not norm), None)


def _params(norm: Op) -> list[str]:
    return [value for port in (1, 2, 3, 4) if (value := operand(norm, port)) is not None]


def is_one(scale: Array) -> bool:
    """Whether the scale is exactly 1 in float32, as after an earlier fold."""
    return bool(np.all(np.abs(scale - 1) <= np.finfo(np.float32).epsneg))


def other_use(facts: Facts, param: str) -> str | None:
    """A use of a parameter that its readers do not show: something computed from it, or an output."""
    graph = facts.graph
    if graph.is_output(param):
        return f"{param} is an output of the model"
    for value in facts.derived.get(graph.values[param].param or param, ()):
        readers = graph.consumers(value)
        if readers:
            return f"{readers[0][0].name} reads a value computed from {param}"
        if graph.is_output(value):
            return f"an output of the model is computed from {param}"
    return None


# -- layers


def why_no_layer(
    graph: Graph, op: Op, direction: Direction, scale: Array, shift: Array, between: Between | None
) -> str | None:
    """The property of a layer that prevents folding into it."""
    weight, bias = operand(op, 1), operand(op, 2)
    if _varies(op):
        return f"the runs of {op.name} differ in their parameters or attributes"
    if weight is None or graph.values[weight].kind != "param":
        return f"the weight of {op.name} is computed in the model, not a stored parameter"
    shape = graph.values[weight].shape
    if len(shape) != 2 if op.type in FLAT else len(shape) < 3:
        return f"the weight of {op.name} has shape {shape}"
    if reason := _why_other_axis(graph, op, direction, len(shape), between):
        return reason
    axes = channel_axes(op.type, op.attrs, shape)
    channels = axes.outputs if direction == "backward" else axes.inputs
    mapped = scale.size if between is None else between.channels.size
    if channels != mapped:
        return f"{op.name} has {channels} channels there, the batch norm {mapped}"
    reason = None if bias is None else _why_no_bias(graph, op, bias, axes.outputs)
    if reason or direction == "backward":
        return reason
    obstacle = forward_obstacle(op.type, op.attrs, shape[2:], shift)
    return obstacle and f"{op.name}: {obstacle}"


def _why_other_axis(graph: Graph, op: Op, direction: Direction, rank: int, between: Between | None) -> str | None:
    """Whether the channels of a layer lie elsewhere than those of its batch norm."""
    beside = op.outputs[0] if direction == "backward" else op.inputs[0]
    assert beside is not None
    transposed = op.attrs.get("transA")
    other_rank = len(graph.values[beside].shape) != rank and between is None
    if not other_rank and (direction == "backward" or not transposed):
        return None
    axis = "last axis" if op.type in FLAT and not transposed else "first axis"
    return f"the channels of {op.name} are the {axis} of {beside}, those of the batch norm are axis 1"


def _why_no_bias(graph: Graph, op: Op, bias: str, channels: int) -> str | None:
    value = graph.values[bias]
    if value.kind != "param":
        return f"the bias of {op.name} is computed in the model, not a stored parameter"
    if value.shape not in ((channels,), (1, channels)):
        return f"the bias of {op.name} has shape {value.shape}, not one entry per channel"
    if op.type == "MatMul" or not float(op.attrs.get("beta", 1.0)):
        return f"{op.name} has an operand {bias} that is not a plain bias"
    return None


def why_no_new_bias(facts: Facts, op: Op) -> str | None:
    """The reason why a layer cannot get a bias; ``None`` where it can or has one."""
    if operand(op, 2) is not None:
        return None
    W = facts.graph.values[operand(op, 1) or ""].shape
    reason = facts.view.can_edit(AddBias(op.name, np.zeros(channel_axes(op.type, op.attrs, W).outputs)))
    return reason and f"{op.name} has no bias and cannot get one: {reason}"


def why_not_tied(layer: Op, value: str, reader: Op, same_port: bool) -> str | None:
    """The reason why an operator that shares a parameter with ``layer`` cannot absorb the same batch norm."""
    if reader is layer:
        return f"{layer.name} reads {value} twice"
    if same_port and _folding_attrs(reader) == _folding_attrs(layer):
        return None
    return f"{reader.name} ({reader.type}) also reads {value}"


def _varies(op: Op) -> bool:
    """Whether runs of the op read different parameters or had different attributes."""
    return bool(op.attrs.get("varies")) or any(port != 0 for port, _ in op.also)


def _folding_attrs(op: Op) -> tuple[Any, ...]:
    """Attributes that decide how a layer absorbs a scale and a shift."""
    attrs = op.attrs
    numbers = (attrs.get("group", 1), attrs.get("alpha", 1.0), attrs.get("beta", 1.0))
    return op.type, bool(attrs.get("transB")), *map(float, numbers)


#: scale and shift, float64
_Affine = tuple[Array, Array]


@dataclass(frozen=True)
class _Norms:
    """The batch norms that could be folded, seen from one direction.

    Attributes:
        direction: into which layers.
        affine: batch norm -> what it does.
        chains: nearest batch norm -> its chain, in the order of the search.
        gone: chains that are folded already.
    """

    direction: Direction
    affine: Mapping[str, _Affine]
    chains: Mapping[str, Chain]
    gone: Collection[Chain] = frozenset()

    def composed(self, chain: Chain) -> _Affine:
        """Scale and shift of all batch norms of a chain, in float64."""
        scale, shift = self.affine[chain[0]]
        for name in chain[1:]:
            s, t = self.affine[name]
            scale, shift = scale * s, shift * s + t
        return scale, shift


@dataclass
class _Component:
    """Chains of batch norms and their layers, tied by a shared norm or a shared parameter.

    Attributes:
        chains: each with the scale and shift that are ``absorbed``, or there is a reason against the fold.
        layers: layer -> the chain beside it.
        between: layer -> what moves its elements on the way.
        params: parameters whose readers are known.
        reason: the first against the fold.
    """

    chains: list[Chain]
    absorbed: _Affine
    layers: dict[str, Chain] = field(default_factory=dict)
    between: dict[str, Between] = field(default_factory=dict)
    params: set[str] = field(default_factory=set)
    reason: str | None = None

    def object(self, reason: str | None) -> None:
        """Note the first reason against the fold."""
        self.reason = self.reason or reason

    def maps_alike(self, layer: str, other: str) -> bool:
        """Whether two layers have the same map to their batch norms."""
        one, two = self.between.get(layer), self.between.get(other)
        if one is None or two is None:
            return one is two
        return np.array_equal(one.channels, two.channels)


def find_folds(graph: Graph, view: FloatModel) -> tuple[list[Fold], list[Refusal]]:
    """Find the folds that keep the function, and the reasons for the other batch norms.

    Backward folds come first: they need no assumption on padding. What they leave is tried forward. Each
    batch norm is in exactly one fold or one refusal. Time and memory grow linearly with the graph.

    Args:
        graph: of the model as it stands.
        view: the same model, asked for parameters of batch norms and for possible edits; not changed.

    Returns:
        The folds, independent of each other, and the refusals in execution order.
    """
    facts = facts_of(graph, view)
    found = {op.name: _affine(facts, op) for op in graph.ops if op.type == "BatchNormalization"}
    affine = {name: numbers for name, numbers in found.items() if not isinstance(numbers, str)}
    refusals = [Refusal(None, name, reason) for name, reason in found.items() if isinstance(reason, str)]
    chains = _chains(facts, affine)
    starts, ends = ({chain[i]: chain for chain in chains} for i in (0, -1))
    folds, before = _folds(facts, _Norms("backward", affine, starts), chains)
    gone = {chain for fold in folds for _, chain in fold.layers}
    more, later = _folds(facts, _Norms("forward", affine, ends, gone), reversed(before))
    for chain in before.keys() & later.keys():
        one, other = before[chain], later[chain]
        layer = next(iter((*one.layers, *other.layers)), None)
        reason = f"not into a layer before it: {one.reason}; not into a layer after it: {other.reason}"
        refusals.extend(Refusal(layer, bn, reason) for bn in chain)
    return folds + more, in_execution_order(refusals, graph)


# -- batch norms


def _affine(facts: Facts, norm: Op) -> _Affine | str:
    """Scale and shift of a batch norm, or the reason why it has to stay."""
    if reason := why_unfit(facts, norm):
        return reason
    values = (facts.graph.values.get(operand(norm, port) or "") for port in (1, 2, 3, 4))
    weight, bias, mean, var = (
        None if value is None else facts.view.param(value.param or value.name) for value in values
    )
    assert mean is not None and var is not None
    try:
        scale, shift = bn_affine(weight, bias, mean, var, float(norm.attrs.get("epsilon", 1e-5)))
    except ModelError as error:
        return error.problem
    if np.any(shift) or not is_one(scale) or facts.view.can_edit(Bypass(norm.name)) is None:
        return scale, shift
    return "it is an exact identity already, and cannot be removed"


def _chains(facts: Facts, norms: Collection[str]) -> list[Chain]:
    """Chains of batch norms, each the only reader of the previous one."""
    following: dict[str, str] = {}
    for name in norms:
        reader = only_reader(facts, facts.graph.op(name).outputs[0], moves=False)
        if reader is not None and reader.name in norms and len(sources_of(reader)) == 1:
            following[name] = reader.name
    chains = []
    later = set(following.values())
    for name in norms:
        if name not in later:
            chain = [name]
            while chain[-1] in following:
                chain.append(following[chain[-1]])
            chains.append(tuple(chain))
    return chains


# -- what belongs together


def _folds(facts: Facts, norms: _Norms, chains: Iterable[Chain]) -> tuple[list[Fold], dict[Chain, _Component]]:
    """The folds in one direction, and for each other chain the component that failed."""
    found: list[Fold] = []
    failed: dict[Chain, _Component] = {}
    done: set[Chain] = set()
    for start in chains:
        if start in done:
            continue
        one = _component(facts, norms, start)
        done.update(one.chains)
        one.object(one.reason or _why_unlike(facts.graph, one))
        blocked = None if one.reason else _why_no_new_bias(facts, one)
        one.object(blocked and _why_no_place(facts.graph, norms, one, blocked))
        if one.reason is None:
            layers = tuple(one.layers.items())
            found.append(Fold(norms.direction, layers, *one.absorbed, blocked is not None, one.between))
        else:
            failed.update(dict.fromkeys(one.chains, one))
    return found, failed


def _component(facts: Facts, norms: _Norms, start: Chain) -> _Component:
    """All layers and chains tied to a chain, and the objections to the fold."""
    component = _Component([start], norms.composed(start))
    known = {start}
    layers_beside = layers_before if norms.direction == "backward" else layers_after
    for chain in component.chains:  # grows inside the loop
        if chain in norms.gone:
            component.object(f"{chain[-1]} goes into the layer before it")
        if not all(map(np.array_equal, norms.composed(chain), component.absorbed)):
            component.object(f"{chain[-1]} normalises differently, and a parameter is shared with it")
        layers, reason = layers_beside(facts, chain)
        component.object(reason)
        for layer, path in layers:
            tied = _join(facts, norms, component, chain, layer, path)
            component.chains.extend(other for other in dict.fromkeys(tied) if other not in known)
            known.update(tied)
    return component


def _join(facts: Facts, norms: _Norms, component: _Component, chain: Chain, layer: Op, path: Path) -> list[Chain]:
    """Add a layer beside a chain; the chains of layers that share a parameter with it."""
    if component.layers.setdefault(layer.name, chain) != chain:
        component.object(f"{layer.name} is beside two batch norms")
    between = _between(facts, norms.direction, layer, chain, path)
    if isinstance(between, Between):
        component.between[layer.name] = between
    if isinstance(between, str):
        component.object(between)
    else:
        component.object(why_no_layer(facts.graph, layer, norms.direction, *component.absorbed, between))
    found: list[Chain] = []
    for reader in _tied(facts, layer, component.params):
        if isinstance(reader, str):
            component.object(reader)
        elif (neighbour := _chain_at(facts, norms, reader)) is not None:
            found.append(neighbour)
        else:
            component.object(f"{reader.name} shares a parameter with {layer.name}, but not the batch norm")
    return found


def _between(facts: Facts, direction: Direction, layer: Op, chain: Chain, path: Path) -> Between | str | None:
    """The map from a layer's channels to its batch norms', or the reason why there is none; ``None`` where they are equal."""
    if path is None:
        return None
    if direction == "backward":
        return between_before(facts.graph, facts.view, layer, path)
    return between_after(facts.graph, facts.view, facts.graph.op(chain[-1]), layer, path)


def _tied(facts: Facts, layer: Op, params: set[str]) -> Iterator[Op | str]:
    """Layers that share the weight or the bias of ``layer``; a sentence for every other use.

    Parameters among ``params`` are left out, and those that were looked at are added.
    """
    for port in (1, 2):
        value = operand(layer, port)
        if value is None or value in params:
            continue
        params.add(value)
        if facts.graph.values[value].kind == "param" and (reason := other_use(facts, value)):
            yield reason
        for reader, at in facts.graph.consumers(value):
            if reader is not layer or at != port:
                yield why_not_tied(layer, value, reader, at == port) or reader


def _chain_at(facts: Facts, norms: _Norms, layer: Op) -> Chain | None:
    """The chain that is beside a layer."""
    if norms.direction == "backward":
        beside = only_reader(facts, layer.outputs[0], moves=True)
    else:
        beside = maker_of(facts, layer.inputs[0])
    return None if beside is None else norms.chains.get(beside.name)


def _why_unlike(graph: Graph, component: _Component) -> str | None:
    """The reason why layers that share a parameter cannot absorb the same numbers: their channel maps differ."""
    first: dict[str, str] = {}
    for name in component.layers:
        op = graph.op(name)
        for value in (operand(op, 1), operand(op, 2)):
            other = name if value is None else first.setdefault(value, name)
            if not component.maps_alike(name, other):
                return f"{name} and {other} share {value}, and the operators between them and the batch norm differ"
    return None


def _why_no_new_bias(facts: Facts, component: _Component) -> str | None:
    """The reason why a layer cannot add the shift."""
    layers = component.layers if np.any(component.absorbed[1]) else ()
    reasons = (why_no_new_bias(facts, facts.graph.op(name)) for name in layers)
    return next(filter(None, reasons), None)


def _why_no_place(graph: Graph, norms: _Norms, component: _Component, blocked: str) -> str | None:
    """The reason why the shift cannot stay in the batch norm either, where a layer is ``blocked`` for a bias."""
    if norms.direction == "forward":
        return blocked
    for chain in component.chains:
        if private := why_not_private(graph, graph.op(chain[-1])):
            return f"{blocked}, and the shift cannot stay in the batch norm: {private}"
    if all(len(chain) == 1 and is_one(norms.affine[chain[0]][0]) for chain in component.chains):
        return f"it only adds a shift, and {blocked}"
    return None


class FoldReport(Tabular, Reversible, Sequence[tuple[str, str]]):
    """Folded and refused batch norms; as a sequence, the folded ``(layer, batch norm)`` pairs.

    Attributes:
        folded: the folds that were carried out.
        refused: the batch norms that stay, with the reasons.
        max_error: largest relative difference measured on a folded layer, 0 when nothing was folded.
        moments: layer -> mean and standard deviation of its output per channel, as the batch norm folded into it
            said (beta and \\|gamma\\|); what high-bias absorption and analytic bias correction start from.
    """

    _rows = "folded"
    _also = ("folded", "refused", "max_error")

    def __init__(
        self,
        folded: Iterable[Fold] = (),
        refused: Iterable[Refusal] = (),
        max_error: float = 0.0,
        undos: Iterable[Undo] = (),
        norms: Mapping[str, tuple[Array, Array]] | None = None,
    ) -> None:
        self.folded, self.refused, self.max_error = tuple(folded), tuple(refused), max_error
        self._undos = list(undos)
        self._pairs = tuple(pair for fold in self.folded for pair in fold.pairs)
        backward = [fold for fold in self.folded if fold.direction == "backward"]
        moments = moments_of_layers(norms or {}, (pair for fold in backward for pair in fold.pairs))
        for fold in backward:
            for layer in fold.between.keys() & moments.keys():
                mean, deviation = moments[layer]
                moments[layer] = fold.of_layer(layer, mean), fold.of_layer(layer, deviation)
        self.moments = moments

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Every folded ``(layer, batch norm)``."""
        return self._pairs

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """``(batch norm, reason)`` of each one that stays."""
        return tuple((refusal.bn, refusal.reason) for refusal in self.refused)

    @property
    def changed(self) -> bool:
        """Whether a batch norm was folded."""
        return bool(self.folded)

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, index: int) -> tuple[str, str]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[str, str], ...]: ...
    def __getitem__(self, index: int | slice) -> tuple[str, str] | tuple[tuple[str, str], ...]:
        return self._pairs[index]

    def __str__(self) -> str:
        count = len({bn for _, bn in self._pairs})
        lines = [
            f"{count} batch norm{'s' * (count != 1)} folded, {len(self.refused)} kept; "
            f"largest relative difference {self.max_error:.1e}"
        ]
        lines += [f"  folded  {fold}" for fold in self.folded]
        lines += [f"  kept    {refusal}" for refusal in self.refused]
        return "\n".join(lines)

    def __repr__(self) -> str:
        counts = f"{len(self.folded)} folds, {len(self.refused)} refused"
        return f"FoldReport({counts}, max_error={self.max_error:.1e})"
