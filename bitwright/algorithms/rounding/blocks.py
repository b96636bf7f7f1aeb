"""What is reconstructed together: single layers, or the blocks of a network, found from its graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.traits import TRAITS

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
    """Every layer alone, with the activation function after it when nothing stands between and nothing else reads."""
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
    """The network cut where a single value carries everything that is still needed.

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
    """A piece as one unit, or its layers alone where there are more than ``most``; nothing where there is none."""
    inside = tuple(op.name for op in piece if op.name in wanted)
    if len(inside) > most:
        return layer_units(graph, inside)
    return [Unit(tuple(op.name for op in piece), inside)] if inside else []


def _leading_to(graph: Graph, output: str, taken: Collection[str]) -> list[Op]:
    """Operators on the way to ``output`` that are not taken, in execution order."""
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
    """Value -> where it is read last; without values that are alive for most of a long graph."""
    reads = [(v, i) for i, op in enumerate(ops) for _, v in op.sources() if not graph.values[v].is_static]
    last = {**dict(reads), output: len(ops)}
    if len(ops) <= _LONG_GRAPH:
        return last
    first = dict(reversed(reads))
    return {value: end for value, end in last.items() if end - first.get(value, end) <= _LONG * len(ops)}


def _merged(pieces: Sequence[list[Op]], wanted: Collection[str], merge: int) -> list[list[Op]]:
    """Pieces without a layer join the one before; neighbours of one layer each join up to ``merge`` layers."""
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
    """Units in an order in which each ends before the next begins; those that overlap are taken apart into layers."""
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
    """A unit as it is; the layers of several, each alone."""
    if len(group) <= 1:
        return list(group)
    return layer_units(graph, [name for unit in group for name in unit.layers])
