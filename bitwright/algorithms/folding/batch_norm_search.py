"""Where batch norms can be folded without changing the function, and why not elsewhere.

Batch norms in a row, each the only reader of the one before, form a *chain* and are folded as one. Chains and
the layers beside them form a *component* when they share a batch norm or a parameter: it is folded whole or
not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitwright.algorithms.channels.batch_norm_affine import (
    Array,
    bn_affine,
    channel_axes,
    forward_obstacle,
)
from bitwright.algorithms.folding.channel_map import (
    FLAT,
    Between,
    Path,
    between_after,
    between_before,
    moves_elements,
)
from bitwright.algorithms.folding.folds import Chain, Direction, Fold, Refusal, in_execution_order
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.traits import TRAITS
from bitwright.core.simulation.protocols import AddBias, Bypass, FloatModel
from bitwright.errors import ModelError


@dataclass
class _Component:
    """Chains of batch norms and the layers to absorb them, tied by a shared norm or a shared parameter."""

    chains: list[Chain]
    layers: dict[str, Chain] = field(default_factory=dict)
    between: dict[str, Between] = field(default_factory=dict)
    reason: str | None = None

    def object(self, reason: str | None) -> None:
        """Note the first reason against the fold."""
        self.reason = self.reason or reason

    def maps_alike(self, layer: str, other: str) -> bool:
        """Whether two layers stand to their batch norms in the same way."""
        one, two = self.between.get(layer), self.between.get(other)
        if one is None or two is None:
            return one is two
        return np.array_equal(one.channels, two.channels)


def find_folds(graph: Graph, view: FloatModel) -> tuple[list[Fold], list[Refusal]]:
    """Where batch norms can be folded without changing the function, and why not elsewhere.

    Backward folds come first: they need no assumption on padding. What they leave is tried forward. Each
    batch norm is in exactly one fold or one refusal. Time and memory grow linearly with the graph.

    Args:
        graph: of the model as it stands.
        view: the same model, asked for parameters of batch norms and for possible edits; not changed.

    Returns:
        The folds, independent of each other, and the refusals in execution order.
    """
    search = _Search(graph, view)
    folds, before = search.folds(search.chains, "backward", taken=())
    more, later = search.folds(list(reversed(before)), "forward", taken=folds)
    refusals = list(search.unfit)
    for chain in before.keys() & later.keys():
        layer = next(iter((*before[chain].layers, *later[chain].layers)), None)
        reason = (
            f"not into a layer before it: {before[chain].reason}; "
            f"not into a layer after it: {later[chain].reason}"
        )
        refusals.extend(Refusal(layer, bn, reason) for bn in chain)
    return folds + more, in_execution_order(refusals, graph)


class _Search:
    """What :func:`find_folds` knows of a graph while it looks."""

    def __init__(self, graph: Graph, view: FloatModel) -> None:
        self.graph, self.view = graph, view
        self.affine: dict[str, tuple[Array, Array]] = {}
        self.unfit: list[Refusal] = []
        self._derived: dict[str, list[str]] = {}
        for value in graph.values.values():
            for source in value.sources:
                self._derived.setdefault(source, []).append(value.name)
        self._fixed: dict[str, bool] = {}
        for op in graph.ops:
            if op.type == "BatchNormalization":
                self._admit(op)
        self.chains = self._build_chains()
        self._starts = {chain[0]: chain for chain in self.chains}
        self._ends = {chain[-1]: chain for chain in self.chains}

    # -- batch norms

    def _admit(self, op: Op) -> None:
        """Note what a batch norm does, or why it has to stay."""
        reason = self._why_unfit(op)
        if reason is None:
            weight, bias, mean, var = (self._param(op, port) for port in (1, 2, 3, 4))
            assert mean is not None and var is not None
            try:
                self.affine[op.name] = bn_affine(
                    weight, bias, mean, var, float(op.attrs.get("epsilon", 1e-5))
                )
                reason = self._why_pointless(op)
            except ModelError as error:
                reason = error.problem
        if reason is None:
            return
        self.affine.pop(op.name, None)
        self.unfit.append(Refusal(None, op.name, reason))

    def _why_unfit(self, op: Op) -> str | None:
        if op.attrs.get("training") or any(operand(op, port) is None for port in (3, 4)):
            return (
                "it normalises with the statistics of the batch, so it is not a fixed function of one value"
            )
        if _varies(op):
            return "its runs differ in their parameters or attributes"
        for port in (1, 2, 3, 4):
            value = operand(op, port)
            if value is None:
                continue
            if self.graph.values[value].kind != "param":
                return f"its parameter {value} is computed in the model, not stored"
            other = self._other_use(value)
            if other:
                return other
        bypass = self.view.can_edit(Bypass(op.name))
        if bypass is None:
            return None
        shared = self._why_not_private(op)
        return shared and f"it cannot be removed ({bypass}) nor be made an identity ({shared})"

    def _why_not_private(self, op: Op) -> str | None:
        """Why the parameters of a batch norm cannot be rewritten for it alone."""
        for port in (1, 2, 3, 4):
            value = operand(op, port)
            others = [] if value is None else [r.name for r, _ in self.graph.consumers(value) if r is not op]
            if others:
                return f"{others[0]} also reads {value}"
        return None

    def _why_pointless(self, op: Op) -> str | None:
        scale, shift = self.affine[op.name]
        if np.any(shift) or not _is_one(scale) or self.view.can_edit(Bypass(op.name)) is None:
            return None
        return "it is an exact identity already, and cannot be removed"

    def _other_use(self, param: str) -> str | None:
        """A use of a parameter that its readers do not show: something computed from it, or an output."""
        if self.graph.is_output(param):
            return f"{param} is an output of the model"
        for value in self._derived.get(self.graph.values[param].param or param, ()):
            readers = self.graph.consumers(value)
            if readers:
                return f"{readers[0][0].name} reads a value computed from {param}"
            if self.graph.is_output(value):
                return f"an output of the model is computed from {param}"
        return None

    def _param(self, op: Op, port: int) -> Array | None:
        value = operand(op, port)
        return None if value is None else self.view.param(self.graph.values[value].param or value)

    def _build_chains(self) -> list[Chain]:
        """Runs of batch norms each of which is the only reader of the one before."""
        following: dict[str, str] = {}
        for name in self.affine:
            reader = self._only_reader(self.graph.op(name).outputs[0], moves=False)
            if reader is not None and reader.name in self.affine and len(_sources(reader)) == 1:
                following[name] = reader.name
        chains = []
        later = set(following.values())
        for name in self.affine:
            if name not in later:
                chain = [name]
                while chain[-1] in following:
                    chain.append(following[chain[-1]])
                chains.append(tuple(chain))
        return chains

    # -- the neighbourhood of a value

    def _only_reader(self, value: str, *, moves: bool) -> Op | None:
        """The one op that reads ``value`` at port 0, if any.

        Across operators that change nothing; with ``moves`` also across those that move elements.
        """
        seen = {value}
        while True:
            readers = [reader for reader in self.graph.consumers(value) if reader[0].type not in _MEASURES]
            if len(readers) != 1 or readers[0][1] != 0 or self.graph.is_output(value):
                return None
            op = readers[0][0]
            if not (self._hands_on(op) if moves else self._passes(op)):
                return op
            value = op.outputs[0]
            if value in seen or len(_sources(op)) != 1:
                return None
            seen.add(value)

    def _hands_on(self, op: Op) -> bool:
        """Whether every element of the op's input is on its output once, and nothing else."""
        return self._passes(op) or moves_elements(self.graph, op)

    def _passes(self, op: Op) -> bool:
        """Whether the op hands its input on unchanged."""
        if op.type not in TRAITS["identity"] or len(op.outputs) != 1 or op.inputs[0] is None:
            return False
        source, result = self.graph.values[op.inputs[0]], self.graph.values[op.outputs[0]]
        if (source.shape, source.dtype) != (result.shape, result.dtype):
            return False
        if op.type != "Dropout":
            return True
        if op.name not in self._fixed:
            # nothing in the graph says whether dropout drops also in inference, as F.dropout does unless told
            # otherwise
            ones = np.ones((32, 32, *(1,) * (len(source.shape) - 2)), np.float32)
            self._fixed[op.name] = bool(np.all(self.view.local(op.name)(ones) == 1))
        return self._fixed[op.name]

    def _before(self, chain: Chain) -> tuple[list[tuple[Op, Path]], str | None]:
        """The layers whose values, read by nothing else, enter the chain; and what stands against them."""
        head = self.graph.op(chain[0])
        layers: list[tuple[Op, Path]] = []
        open_values: list[tuple[str, Op, Path]] = [(value, head, None) for value in _sources(head)]
        seen = {value for value, *_ in open_values}
        while open_values:
            value, reader, path = open_values.pop()
            reason = self._why_no_source(value) or self._why_shared(value, reader)
            if reason:
                return layers, reason
            op = self.graph.producer(value)
            assert op is not None
            if op.type in TRAITS["layer"]:
                layers.append((op, path))
                continue
            path = self._extended(path, op)
            open_values.extend((source, op, path) for source in _sources(op) if source not in seen)
            seen.update(_sources(op))
        return layers, None

    def _extended(self, path: Path, op: Op) -> Path:
        return (op, path) if moves_elements(self.graph, op) else path

    def _why_no_source(self, value: str) -> str | None:
        op = self.graph.producer(value)
        if op is None:
            return f"its input {value} is not a result of a layer but {_KINDS[self.graph.values[value].kind]}"
        if op.type in TRAITS["layer"] or self._hands_on(op):
            return None
        return f"its input comes from {op.name} ({op.type})"

    def _why_shared(self, value: str, reader: Op) -> str | None:
        if self.graph.is_output(value):
            return f"{value} is an output of the model"
        for op, port in self.graph.consumers(value):
            if op.type not in _MEASURES and (op is not reader or port != 0):
                return f"{op.name} also reads {value}"
        return None

    def _behind(self, chain: Chain) -> tuple[list[tuple[Op, Path]], str | None]:
        """The layers that read what leaves the chain; and what stands against them."""
        layers: list[tuple[Op, Path]] = []
        passed: list[Op] = []
        end = self.graph.op(chain[-1]).outputs[0]
        paths: dict[str, Path] = {end: None}
        open_values = [end]
        while open_values:
            value = open_values.pop()
            if self.graph.is_output(value):
                return layers, f"{value} is an output of the model"
            for op, port in self._number_readers(value):
                if not self._may_follow(op, port):
                    return layers, f"{op.name} ({op.type}) reads {value}"
                if op.type in TRAITS["layer"]:
                    layers.append((op, paths[value]))
                    continue
                passed.append(op)
                if op.outputs[0] not in paths:
                    paths[op.outputs[0]] = self._extended(paths[value], op)
                    open_values.append(op.outputs[0])
        foreign = _first_foreign([*(layer for layer, _ in layers), *passed], paths)
        return layers, foreign or (None if layers else "nothing reads its output")

    def _may_follow(self, op: Op, port: int) -> bool:
        return port == 0 and (op.type in TRAITS["layer"] or self._hands_on(op))

    def _number_readers(self, value: str) -> list[tuple[Op, int]]:
        """Who reads the numbers of a value, not its lengths alone."""
        return [reader for reader in self.graph.consumers(value) if reader[0].type not in _MEASURES]

    def _chain_at(self, layer: Op, direction: Direction) -> Chain | None:
        """The chain that is beside a layer."""
        if direction == "backward":
            reader = self._only_reader(layer.outputs[0], moves=True)
            return None if reader is None else self._starts.get(reader.name)
        value = layer.inputs[0]
        seen: set[str] = set()
        while value is not None and value not in seen:
            seen.add(value)
            op = self.graph.producer(value)
            if op is None or not self._hands_on(op):
                return None if op is None else self._ends.get(op.name)
            value = op.inputs[0]
        return None

    def _between(self, layer: Op, chain: Chain, path: Path, direction: Direction) -> Between | str | None:
        """How the channels of a layer stand to those of its batch norms, or why in no way; ``None``: they are the same."""
        if path is None:
            return None
        if direction == "backward":
            return between_before(self.graph, self.view, layer, path)
        return between_after(self.graph, self.view, self.graph.op(chain[-1]), layer, path)

    # -- what belongs together

    def folds(
        self, chains: Sequence[Chain], direction: Direction, taken: Iterable[Fold]
    ) -> tuple[list[Fold], dict[Chain, _Component]]:
        """The folds in one direction, and for each chain that is in none the component that failed."""
        gone = {chain for fold in taken for _, chain in fold.layers}
        found: list[Fold] = []
        failed: dict[Chain, _Component] = {}
        done: set[Chain] = set()
        for start in chains:
            if start in done:
                continue
            component = self._component(start, direction, gone)
            done.update(component.chains)
            if component.reason is None:
                found.append(self._fold(component, direction))
            else:
                failed.update(dict.fromkeys(component.chains, component))
        return found, failed

    def _component(self, start: Chain, direction: Direction, gone: set[Chain]) -> _Component:
        component = _Component([start])
        known, params = {start}, set[str]()
        scale, shift = self.composed(start)
        for chain in component.chains:  # grows inside the loop
            if chain in gone:
                component.object(f"{chain[-1]} goes into the layer before it")
            if not all(map(np.array_equal, self.composed(chain), (scale, shift))):
                component.object(f"{chain[-1]} normalises differently, and a parameter is shared with it")
            layers, reason = (self._before if direction == "backward" else self._behind)(chain)
            component.object(reason)
            for layer, path in layers:
                self._join(component, chain, layer, path, direction, params, known)
        if component.reason is None:
            component.object(self._why_unlike(component))
        if component.reason is None:
            component.object(self._why_no_bias_place(component, direction, shift))
        return component

    def _join(
        self, component: _Component, chain: Chain, layer: Op, path: Any, direction: Direction, params: set[str],
        known: set[Chain],
    ) -> None:  # fmt: skip
        """Add a layer beside a chain, and the chains of layers that share a parameter with it."""
        scale, shift = self.composed(component.chains[0])
        if component.layers.setdefault(layer.name, chain) != chain:
            component.object(f"{layer.name} is beside two batch norms")
        between = self._between(layer, chain, path, direction)
        if isinstance(between, Between):
            component.between[layer.name] = between
        component.object(between if isinstance(between, str) else None)
        component.object(self._why_no_layer(layer, direction, scale, shift, between))
        for reader in self._tied(layer, params, component):
            neighbour = self._chain_at(reader, direction)
            if neighbour is None:
                component.object(
                    f"{reader.name} shares a parameter with {layer.name}, but not the batch norm"
                )
            elif neighbour not in known:
                known.add(neighbour)
                component.chains.append(neighbour)

    def _why_unlike(self, component: _Component) -> str | None:
        """Layers that share a parameter absorb the same numbers only where their channels are mapped alike."""
        first: dict[str, str] = {}
        for name in component.layers:
            op = self.graph.op(name)
            for value in (operand(op, 1), operand(op, 2)):
                other = name if value is None else first.setdefault(value, name)
                if not component.maps_alike(name, other):
                    return f"{name} and {other} share {value}, and the operators between them and the batch norm differ"
        return None

    def composed(self, chain: Chain) -> tuple[Array, Array]:
        """Scale and shift of all batch norms of a chain, in float64."""
        scale, shift = self.affine[chain[0]]
        for name in chain[1:]:
            s, t = self.affine[name]
            scale, shift = scale * s, shift * s + t
        return scale, shift

    def _tied(self, layer: Op, params: set[str], component: _Component) -> Iterator[Op]:
        """Layers that read the weight or the bias of ``layer`` as it does; other readers are an objection."""
        for port in (1, 2):
            value = operand(layer, port)
            if value is None or value in params:
                continue
            params.add(value)
            component.object(self._other_use(value) if self.graph.values[value].kind == "param" else None)
            others = [
                reader
                for reader in self.graph.consumers(value)
                if reader[0] is not layer or reader[1] != port
            ]
            for reader, at in others:
                reason = _why_not_tied(layer, value, reader, at == port)
                component.object(reason)
                if reason is None:
                    yield reader

    def _why_no_layer(
        self, op: Op, direction: Direction, scale: Array, shift: Array, between: Between | str | None
    ) -> str | None:
        """What in a layer itself stands against folding into it."""
        weight, bias = operand(op, 1), operand(op, 2)
        if _varies(op):
            return f"the runs of {op.name} differ in their parameters or attributes"
        if weight is None or self.graph.values[weight].kind != "param":
            return f"the weight of {op.name} is computed in the model, not a stored parameter"
        shape = self.graph.values[weight].shape
        if len(shape) != 2 if op.type in FLAT else len(shape) < 3:
            return f"the weight of {op.name} has shape {shape}"
        reason = self._why_other_axis(op, direction, len(shape), between)
        if reason:
            return reason
        axes = channel_axes(op.type, op.attrs, shape)
        channels = axes.outputs if direction == "backward" else axes.inputs
        mapped = between.channels.size if isinstance(between, Between) else scale.size
        if channels != mapped:
            return f"{op.name} has {channels} channels there, the batch norm {mapped}"
        reason = None if bias is None else self._why_no_bias(op, bias, axes.outputs)
        if reason or direction == "backward":
            return reason
        obstacle = forward_obstacle(op.type, op.attrs, shape[2:], shift)
        return obstacle and f"{op.name}: {obstacle}"

    def _why_other_axis(
        self, op: Op, direction: Direction, rank: int, between: Between | str | None
    ) -> str | None:
        """Whether the channels of a layer lie elsewhere than those of its batch norm."""
        beside = op.outputs[0] if direction == "backward" else op.inputs[0]
        assert beside is not None
        transposed = op.attrs.get("transA")
        other_rank = len(self.graph.values[beside].shape) != rank and between is None
        if not other_rank and (direction == "backward" or not transposed):
            return None
        axis = "last axis" if op.type in FLAT and not transposed else "first axis"
        return f"the channels of {op.name} are the {axis} of {beside}, those of the batch norm are axis 1"

    def _why_no_bias(self, op: Op, bias: str, channels: int) -> str | None:
        value = self.graph.values[bias]
        if value.kind != "param":
            return f"the bias of {op.name} is computed in the model, not a stored parameter"
        if value.shape not in ((channels,), (1, channels)):
            return f"the bias of {op.name} has shape {value.shape}, not one entry per channel"
        if op.type == "MatMul" or not float(op.attrs.get("beta", 1.0)):
            return f"{op.name} has an operand {bias} that is not a plain bias"
        return None

    def _why_no_bias_place(self, component: _Component, direction: Direction, shift: Array) -> str | None:
        blocked = self._no_bias_place(component, shift)
        if blocked is None:
            return None
        if direction == "forward":
            return blocked
        for chain in component.chains:
            private = self._why_not_private(self.graph.op(chain[-1]))
            if private:
                return f"{blocked}, and the shift cannot stay in the batch norm: {private}"
        if all(len(chain) == 1 and _is_one(self.affine[chain[0]][0]) for chain in component.chains):
            return f"it only adds a shift, and {blocked}"
        return None

    def _no_bias_place(self, component: _Component, shift: Array) -> str | None:
        """A layer of the component that needs a bias and cannot have one."""
        if not np.any(shift):
            return None
        for name in component.layers:
            op = self.graph.op(name)
            if operand(op, 2) is None:
                W = self.graph.values[operand(op, 1) or ""].shape
                zeros = np.zeros(channel_axes(op.type, op.attrs, W).outputs)
                reason = self.view.can_edit(AddBias(name, zeros))
                if reason:
                    return f"{name} has no bias and cannot get one: {reason}"
        return None

    def _fold(self, component: _Component, direction: Direction) -> Fold:
        """The fold of a component against which nothing stands."""
        scale, shift = self.composed(component.chains[0])
        keeps = direction == "backward" and self._no_bias_place(component, shift) is not None
        return Fold(direction, tuple(component.layers.items()), scale, shift, keeps, component.between)


#: what reads the lengths of a value and none of its numbers
_MEASURES = frozenset({"Shape", "Size"})
_KINDS = {
    "input": "an input of the model",
    "param": "a parameter",
    "constant": "a constant",
    "activation": "an activation",
}


def operand(op: Op, port: int) -> str | None:
    """The value the op reads at ``port``; ``None`` when the port is empty or missing."""
    return op.inputs[port] if port < len(op.inputs) else None


def _is_one(scale: Array) -> bool:
    """Whether the scale is 1 in float32: there the neutral variance of an earlier fold is exact."""
    return bool(np.all(np.abs(scale - 1) <= np.finfo(np.float32).epsneg))


def _sources(op: Op) -> tuple[str, ...]:
    """What any run of the op reads at port 0."""
    return tuple(dict.fromkeys(value for port, value in op.sources() if port == 0))


def _first_foreign(ops: Sequence[Op], known: Collection[str]) -> str | None:
    """An operator that in some of its runs reads another value than the ``known``; as a sentence."""
    reads = ((op, source) for op in ops for source in _sources(op) if source not in known)
    return next((f"{op.name} also runs on {source}" for op, source in reads), None)


def _why_not_tied(layer: Op, value: str, reader: Op, same_port: bool) -> str | None:
    """Why an operator that also reads a parameter of ``layer`` cannot absorb what ``layer`` absorbs."""
    if reader is layer:
        return f"{layer.name} reads {value} twice"
    if same_port and _folding_attrs(reader) == _folding_attrs(layer):
        return None
    return f"{reader.name} ({reader.type}) also reads {value}"


def _varies(op: Op) -> bool:
    """Whether runs of the op read different parameters or had different attributes."""
    return bool(op.attrs.get("varies")) or any(port != 0 for port, _ in op.also)


def _folding_attrs(op: Op) -> tuple[Any, ...]:
    """What decides how a layer's parameters absorb a scale and a shift."""
    attrs = op.attrs
    numbers = (attrs.get("group", 1), attrs.get("alpha", 1.0), attrs.get("beta", 1.0))
    return op.type, bool(attrs.get("transB")), *map(float, numbers)
