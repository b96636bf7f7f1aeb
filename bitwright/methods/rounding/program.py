"""A model as a list of steps on torch tensors, and its units of reconstruction: layers or blocks.

Both front ends make a :class:`Program` of their model: one step per operator call, with the sites of its quantizers.
Algorithms run steps over kept values instead of the model from its input, so that their cost is linear in depth.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS
from bitwright.core.simulation.sites import Site

Quantize = Callable[[str, Tensor], Tensor]
"""(site, tensor) -> the tensor as the quantizer of the site leaves it."""

State = dict[int, Tensor]
"""Value -> tensor, of the values that are still to be read; a sequence of an ONNX model is a tuple of tensors."""


@dataclass(frozen=True)
class Step:
    """One call of an operator.

    Attributes:
        op: name of the operator in the graph; ``""`` for calls that the graph does not have.
        reads: values it reads, one per slot.
        writes: values it makes.
        function: tensors, one per slot -> tensors, one per written value; writes into none of its arguments.
        ports: input port of the operator -> slot.
        operands: ``(slot, site)`` of what is quantized before the call.
        results: ``(index, site)`` of what is quantized after it.
        differentiable: whether gradients flow through ``function``.
        inside: what takes the place of ``function`` where quantizers are inside it; what it is given stands for them, if the
            step is differentiable, and otherwise they are those of the simulation.
        traced: the same step through which gradients flow, where none do through this one; slower.
    """

    op: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    function: Callable[[Sequence[Tensor]], Sequence[Tensor]] = field(compare=False)
    ports: Mapping[int, int] = field(default_factory=dict)
    operands: tuple[tuple[int, str], ...] = ()
    results: tuple[tuple[int, str], ...] = ()
    differentiable: bool = True
    inside: Callable[[Sequence[Tensor], Quantize], Sequence[Tensor]] | None = field(default=None, compare=False)
    traced: Step | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Program:
    """The steps of one run of a model.

    Attributes:
        steps: in execution order.
        constants: value -> tensor, of everything that does not depend on the input; parameters are the model's own.
        outputs: values the model returns.
    """

    steps: tuple[Step, ...]
    constants: Mapping[int, Tensor]
    outputs: tuple[int, ...]

    @cached_property
    def last_read(self) -> dict[int, int]:
        """Value -> index of the last step that reads it."""
        found = {v: i for i, step in enumerate(self.steps) for v in step.reads}
        return {v: i for v, i in found.items() if v not in self.constants}

    def settle(self, state: State, i: int, results: Sequence[Tensor], outputs: Collection[int] = ()) -> None:
        """Store the results of step ``i`` in ``state``, and drop values without later readers, except ``outputs``."""
        end, step = self.last_read, self.steps[i]
        for value in step.reads:
            if end.get(value) == i and value not in outputs:
                state.pop(value, None)
        for value, tensor in zip(step.writes, results, strict=True):
            if end.get(value, -1) > i or value in outputs:
                state[value] = tensor

    @cached_property
    def places(self) -> dict[str, tuple[int, ...]]:
        """Operator -> indices of its steps."""
        found: dict[str, list[int]] = {}
        for i, step in enumerate(self.steps):
            found.setdefault(step.op, []).append(i)
        return {op: tuple(places) for op, places in found.items() if op}

    def span(self, ops: Iterable[str]) -> tuple[int, int] | None:
        """``(first, last + 1)`` of the steps of ``ops``; ``None`` when this run has none of them."""
        places = [i for op in ops for i in self.places.get(op, ())]
        return (min(places), max(places) + 1) if places else None


class SimulatedModel(Protocol):
    """Interface of a quantization simulation to reconstruction, in either front end."""

    def graph(self) -> Graph:
        """The data-flow graph."""

    def observed_graph(self) -> Graph:
        """The graph with the shapes of the first batch of :meth:`program` for open lengths."""

    def sites(self) -> Mapping[str, Site]:
        """Every quantizer site by name; weights have their encodings."""

    def shared(self) -> Mapping[str, str]:
        """Moved value -> the group of sites on whose grid its elements lie."""

    def weight(self, site: str) -> Tensor:
        """The value of a weight; a copy."""

    def why_fixed(self, site: str) -> str | None:
        """The reason why the weight at ``site`` cannot be replaced; ``None`` when it can."""

    def set_weight(self, site: str, value: Tensor) -> None:
        """Replace the weight by one of the same shape; its dtype is kept."""

    def program(self, batch: Any) -> tuple[Program, State]:
        """The steps of the model on ``batch``, and their initial state."""

    def quantize(self, site: str, x: Tensor) -> Tensor:
        """``x`` quantized at ``site``, with straight-through gradients; ``x`` where the site is off."""


def run_step(
    step: Step,
    state: Mapping[int, Tensor],
    constants: Mapping[int, Tensor],
    quantize: Quantize | None = None,
    given: Mapping[int, Tensor] | None = None,
    inner: Quantize | None = None,
) -> Sequence[Tensor]:
    """Run ``step`` and return its results.

    Args:
        state, constants: values it may read.
        quantize: quantizer by site; ``None`` runs in float.
        given: slot -> tensor that takes the place of what the slot reads, unquantized.
        inner: in a float run, what the tensors inside a differentiable step are given to.
    """
    given = given or {}
    tensors = [state[v] if v in state else constants[v] for v in step.reads]
    for slot, tensor in given.items():
        tensors[slot] = tensor
    if quantize is None:
        return _results(step, tensors, inner if step.differentiable else None)
    for slot, site in step.operands:
        if slot not in given:
            tensors[slot] = quantize(site, tensors[slot])
    results = _results(step, tensors, quantize)
    for index, site in step.results:
        results[index] = quantize(site, results[index])
    return results


def _results(step: Step, tensors: Sequence[Tensor], inner: Quantize | None) -> list[Tensor]:
    plain = inner is None or step.inside is None
    return list(step.function(tensors) if plain else step.inside(tensors, inner))  # type: ignore[misc, arg-type]


def run(
    program: Program,
    state: State,
    first: int,
    last: int,
    quantize: Quantize | None = None,
    keep: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    constants: Mapping[int, Tensor] | None = None,
) -> None:
    """Run the steps ``[first, last)`` on ``state``, and drop values without later readers.

    Args:
        keep: called on every tensor that enters the state, for example to put it on disk.
        constants: instead of the program's own.
    """
    end = program.last_read
    constants = program.constants if constants is None else constants
    with torch.no_grad():
        for i in range(first, last):
            step = program.steps[i]
            program.settle(state, i, run_step(step, state, constants, quantize))
            # a value that outlives the span of steps is kept, others come and go
            state.update((v, keep(state[v])) for v in step.writes if end.get(v, -1) >= last)


_LONG = 1 / 3  # a value read over more of the graph than this (a mask, rotary angles) does not join blocks
_LONG_GRAPH = 30  # operators from which on a graph is deep enough for that to mean something


@dataclass(frozen=True)
class Unit:
    """Operators that are reconstructed together.

    Attributes:
        ops: in execution order.
        layers: those of them whose weights are chosen.
    """

    ops: tuple[str, ...]
    layers: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first layer, and the last when there are several."""
        return self.layers[0] if len(self.layers) == 1 else f"{self.layers[0]} ... {self.layers[-1]}"


def layer_units(graph: Graph, layers: Sequence[str]) -> list[Unit]:
    """Every layer alone, with a directly following activation function that is its only reader."""
    position = {op.name: i for i, op in enumerate(graph.ops)}
    wanted = frozenset(layers)
    found = []
    for name in sorted(layers, key=position.__getitem__):
        after = graph.sole_consumer(graph.op(name).outputs[0])
        between = () if after is None else [o.name for o in graph.ops[position[name] + 1 : position[after.name]]]
        joined = after is not None and after.type in TRAITS["activation"] and wanted.isdisjoint(between)
        found.append(Unit((name, after.name) if joined and after is not None else (name,), (name,)))
    return found


def block_units(graph: Graph, layers: Sequence[str], merge: int = 3, most: int = 16) -> list[Unit]:
    """The network cut at values that alone are needed by all later operators.

    For each output of the graph in turn, the operators that lead to it and belong to no block yet are walked in
    execution order; where one live value is left, a block ends. Residual blocks and transformer layers come out of this
    as they are; in plain chains, neighbouring pieces of one layer are joined up to ``merge`` layers.

    Args:
        graph: of the model.
        layers: operators whose weights are chosen.
        merge: layers that pieces without a branch are joined up to.
        most: layers of a block beyond which its layers stand alone.
    """
    wanted, taken = frozenset(layers), set[str]()
    position = {op.name: i for i, op in enumerate(graph.ops)}
    units: list[Unit] = []
    for output in graph.outputs:
        ops = _leading_to(graph, output, taken)
        taken.update(op.name for op in ops)
        for piece in _merged(_cut(graph, ops, output), wanted, merge):
            units += _units_of(piece, graph, wanted, most)
    missed = [name for name in layers if name not in taken]
    units += layer_units(graph, missed)  # layers whose result no output shows
    return _disjoint(graph, sorted(units, key=lambda u: position[u.ops[0]]), position)


def _units_of(piece: Sequence[Op], graph: Graph, wanted: Collection[str], most: int) -> list[Unit]:
    """A piece as one unit, or as single layers where it has more than ``most``; nothing without layers."""
    inside = tuple(op.name for op in piece if op.name in wanted)
    if len(inside) > most:
        return layer_units(graph, inside)
    return [Unit(tuple(op.name for op in piece), inside)] if inside else []


def _leading_to(graph: Graph, output: str, taken: Collection[str]) -> list[Op]:
    """Operators on the path to ``output`` that belong to no unit yet, in execution order."""
    found, stack = set(), [output]
    while stack:
        op = graph.producer(stack.pop())
        if op is not None and op.name not in found and op.name not in taken:
            found.add(op.name)
            stack.extend(value for _, value in op.sources())
    return [op for op in graph.ops if op.name in found]


def _cut(graph: Graph, ops: Sequence[Op], output: str) -> list[list[Op]]:
    """Pieces of ``ops`` that end where one value is alive."""
    lives = _lives(graph, ops, output)
    made = {value for op in ops for value in op.outputs}
    live = {value for value in lives if value not in made}
    pieces: list[list[Op]] = [[]]
    for i, op in enumerate(ops):
        pieces[-1].append(op)
        live.update(value for value in op.outputs if value in lives)
        live -= {value for value in (*op.outputs, *(v for _, v in op.sources())) if lives.get(value, -1) <= i}
        if len(live) <= 1:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _lives(graph: Graph, ops: Sequence[Op], output: str) -> dict[str, int]:
    """Value -> its last reader; without values that are alive for most of a long graph."""
    reads = [(v, i) for i, op in enumerate(ops) for _, v in op.sources() if not graph.values[v].is_static]
    last = {**dict(reads), output: len(ops)}
    if len(ops) <= _LONG_GRAPH:
        return last
    first = dict(reversed(reads))
    return {value: end for value, end in last.items() if end - first.get(value, end) <= _LONG * len(ops)}


def _merged(pieces: Sequence[list[Op]], wanted: Collection[str], merge: int) -> list[list[Op]]:
    """Merge pieces without a layer into the previous one, and neighbours with one layer each up to ``merge`` layers."""
    done: list[tuple[list[Op], int, bool]] = []  # operators, layers, whether it is a chain of single layers
    for piece in pieces:
        count = sum(op.name in wanted for op in piece)
        if done and count == 0:
            done[-1][0].extend(piece)
        elif done and count == 1 and done[-1][2] and done[-1][1] < merge:
            ops, before, _ = done[-1]
            done[-1] = (ops + piece, before + 1, True)
        else:
            done.append((list(piece), count, count <= 1))
    return [ops for ops, _, _ in done]


def _disjoint(graph: Graph, units: Sequence[Unit], position: Mapping[str, int]) -> list[Unit]:
    """Units in sequential order; overlapping ones are split into layers."""
    result: list[Unit] = []
    group: list[Unit] = []
    end = -1
    for unit in units:
        start = position[unit.ops[0]]
        if group and start > end:
            result += apart(graph, group)
            group = []
        group.append(unit)
        end = max(end, max(position[name] for name in unit.ops))
    return result + apart(graph, group)


def apart(graph: Graph, group: Sequence[Unit]) -> list[Unit]:
    """A unit unchanged if it is one layer, else its layers as single units."""
    if len(group) <= 1:
        return list(group)
    return layer_units(graph, [name for unit in group for name in unit.layers])
