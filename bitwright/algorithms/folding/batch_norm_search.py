"""Where batch norms can be folded without changing the function, and why not elsewhere.

Batch norms in a row, each the only reader of the one before, form a *chain* and are folded as one. Chains and
the layers beside them form a *component* when they share a batch norm or a parameter: it is folded whole or
not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from bitwright.algorithms.channels.batch_norm_affine import Array, bn_affine
from bitwright.algorithms.folding.channel_map import Between, Path, between_after, between_before
from bitwright.algorithms.folding.folds import Chain, Direction, Fold, Refusal, in_execution_order
from bitwright.algorithms.folding.neighbours import (
    Facts,
    facts_of,
    layers_after,
    layers_before,
    maker_of,
    only_reader,
    operand,
    sources_of,
)
from bitwright.algorithms.folding.obstacles import (
    is_one,
    other_use,
    why_no_layer,
    why_no_new_bias,
    why_not_private,
    why_not_tied,
    why_unfit,
)
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.simulation.protocols import Bypass, FloatModel
from bitwright.errors import ModelError

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
    """Chains of batch norms and the layers to absorb them, tied by a shared norm or a shared parameter.

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
    """What a batch norm does, or why it has to stay."""
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
    """Runs of batch norms each of which is the only reader of the one before."""
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
    """The folds in one direction, and for each chain that is in none the component that failed."""
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
    """All that is tied to a chain, and what the layers in it have against the fold."""
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
    """How the channels of a layer stand to those of its batch norms, or why in no way; ``None``: they are the same."""
    if path is None:
        return None
    if direction == "backward":
        return between_before(facts.graph, facts.view, layer, path)
    return between_after(facts.graph, facts.view, facts.graph.op(chain[-1]), layer, path)


def _tied(facts: Facts, layer: Op, params: set[str]) -> Iterator[Op | str]:
    """Layers that read the weight or the bias of ``layer`` as it does; a sentence for every other use.

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
    """Layers that share a parameter absorb the same numbers only where their channels are mapped alike."""
    first: dict[str, str] = {}
    for name in component.layers:
        op = graph.op(name)
        for value in (operand(op, 1), operand(op, 2)):
            other = name if value is None else first.setdefault(value, name)
            if not component.maps_alike(name, other):
                return f"{name} and {other} share {value}, and the operators between them and the batch norm differ"
    return None


def _why_no_new_bias(facts: Facts, component: _Component) -> str | None:
    """Why a layer that has to add the shift cannot."""
    layers = component.layers if np.any(component.absorbed[1]) else ()
    reasons = (why_no_new_bias(facts, facts.graph.op(name)) for name in layers)
    return next(filter(None, reasons), None)


def _why_no_place(graph: Graph, norms: _Norms, component: _Component, blocked: str) -> str | None:
    """Why the shift cannot stay in the batch norm either, where a layer is ``blocked`` for a bias."""
    if norms.direction == "forward":
        return blocked
    for chain in component.chains:
        if private := why_not_private(graph, graph.op(chain[-1])):
            return f"{blocked}, and the shift cannot stay in the batch norm: {private}"
    if all(len(chain) == 1 and is_one(norms.affine[chain[0]][0]) for chain in component.chains):
        return f"it only adds a shift, and {blocked}"
    return None
