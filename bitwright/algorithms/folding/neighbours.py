"""What stands before and after a value, past operators that hand every element on: its one reader, and the layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from bitwright.algorithms.folding.channel_map import Path, moves_elements
from bitwright.algorithms.folding.folds import Chain
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.traits import TRAITS
from bitwright.core.simulation.protocols import FloatModel

#: layers with what moves elements between them and a chain; and what stands against them
Beside = tuple[list[tuple[Op, Path]], str | None]

#: what reads the lengths of a value and none of its numbers
_MEASURES = frozenset({"Shape", "Size"})
_KINDS = {
    "input": "an input of the model",
    "param": "a parameter",
    "constant": "a constant",
    "activation": "an activation",
}


@dataclass(frozen=True)
class Facts:
    """What is known of a model before batch norms are looked at.

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
    """What any run of the op reads at port 0."""
    return tuple(dict.fromkeys(value for port, value in op.sources() if port == 0))


def only_reader(facts: Facts, value: str, *, moves: bool) -> Op | None:
    """The one op that reads ``value`` at port 0, if any.

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
    """The op whose elements are those of ``value``, across operators that hand them on."""
    seen: set[str] = set()
    while value is not None and value not in seen:
        seen.add(value)
        op = facts.graph.producer(value)
        if op is None or not _hands_on(facts, op):
            return op
        value = op.inputs[0]
    return None


def layers_before(facts: Facts, chain: Chain) -> Beside:
    """The layers whose values, read by nothing else, enter the chain; and what stands against them."""
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
    """The layers that read what leaves the chain; and what stands against them."""
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
    """Who reads the numbers of a value, not its lengths alone."""
    return [reader for reader in graph.consumers(value) if reader[0].type not in _MEASURES]


def _leads_on(facts: Facts, op: Op, port: int) -> bool:
    return port == 0 and (op.type in TRAITS["layer"] or _hands_on(facts, op))


def _hands_on(facts: Facts, op: Op) -> bool:
    """Whether every element of the op's input is on its output once, and nothing else."""
    return _passes(facts, op) or moves_elements(facts.graph, op)


def _passes(facts: Facts, op: Op) -> bool:
    """Whether the op hands its input on unchanged."""
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
    """An operator that in some of its runs reads another value than the ``known``; as a sentence."""
    reads = ((op, source) for op in ops for source in sources_of(op) if source not in known)
    return next((f"{op.name} also runs on {source}" for op, source in reads), None)
