"""Find inputs and outputs of a model that are states of recurrent layers, passed from call to call."""

from __future__ import annotations

from collections.abc import Iterator

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS
from bitwright.core.graph.recurrence import CELLS

#: inputs of a recurrent layer that are its initial states: hidden, cell
STATE_PORTS = (5, 6)
_KEEPS = frozenset((*TRAITS["identity"], *TRAITS["reshape"], "Cast", "Transpose", "Concat", "Stack"))
_PASSES_ON = _KEEPS | {"Slice", "Split", "Gather"}


def final_states(graph: Graph) -> set[str]:
    """Values that are whole final states of recurrent layers, alone or joined.

    Only the next call of the model reads them, so that they may become narrower. A state of which positions are picked is a
    feature that the model returns, and so is one where the model returns nothing else.
    """
    states: set[str] = set()
    for op in graph.ops:
        if op.type in CELLS:
            states.update(op.outputs[1:])
        elif op.type in _KEEPS and op.outputs and all(v is None or v in states for v in _data_of(op)):
            states.update(op.outputs[:1])
    return states if any(value not in states for value in graph.outputs) else set()


def given_states(graph: Graph) -> tuple[str, ...]:
    """Inputs of a model that are initial states of recurrent layers whose final states it returns.

    Nothing else reads them, so that the caller, who passes on what the last call returned, may pass on fewer units. A state
    that is given and not returned is a feature that the caller computes.
    """
    states = final_states(graph)
    handed_on = _leading_to(graph, {value for value in graph.outputs if value in states})
    read_otherwise = {value for value in graph.outputs if value not in states}
    read: set[str] = set()
    for op in reversed(graph.ops):
        returned = not handed_on.isdisjoint(op.outputs)
        for port, value in _reads(op):
            read.add(value)
            if not _is_state(op, port, value, returned, read_otherwise):
                read_otherwise.add(value)
    return tuple(value for value in graph.inputs if value in read and value not in read_otherwise)


def _is_state(op: Op, port: int, value: str, returned: bool, read_otherwise: set[str]) -> bool:
    """Whether an operator reads a value as a state, or passes it on to operators that do."""
    if op.type in CELLS:
        return port in STATE_PORTS and returned
    return op.type in _PASSES_ON and read_otherwise.isdisjoint(op.outputs) and value in _data_of(op)


def _leading_to(graph: Graph, values: set[str]) -> set[str]:
    """``values``, and the values that they are joined from."""
    found = set(values)
    for op in reversed(graph.ops):
        if op.type in _KEEPS and not found.isdisjoint(op.outputs):
            found.update(value for value in _data_of(op) if value is not None)
    return found


def from_input(graph: Graph, value: str) -> str | None:
    """The input of the model that a value was moved from; ``None`` where it was computed."""
    makers = {v: op for op in graph.ops for v in op.outputs}
    while (op := makers.get(value)) is not None and op.type in _PASSES_ON and op.inputs and op.inputs[0] is not None:
        value = op.inputs[0]
    return value if value in graph.inputs else None


def _reads(op: Op) -> Iterator[tuple[int, str]]:
    yield from ((port, value) for port, value in enumerate(op.inputs) if value is not None)
    yield from op.also


def _data_of(op: Op) -> tuple[str | None, ...]:
    """The inputs that an operator moves, without shapes and axes."""
    return op.inputs if op.type in ("Concat", "Stack") else op.inputs[:1]
