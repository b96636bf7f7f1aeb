"""Names in a graph that torch's exporter wrote: parameters, inputs and outputs as the model has them, nothing of where it ran."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    pass


def forget_origins(model: ir.Model) -> None:
    """Drop what the exporter notes about where a node came from: source lines, and paths on this machine."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def rename_params(model: ir.Model) -> None:
    """Parameters of the wrapped model get back the names they have in it."""
    for value in list(model.graph.initializers.values()):
        if value.name and value.name.startswith("model."):
            value.name = value.name.removeprefix("model.")


def rename_io(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name graph inputs after forward's parameters and outputs after their place in the result.

    What is called so inside the model, as the exporter calls a tensor after its operator, gets another name.
    """
    ends = [*model.graph.outputs, *model.graph.inputs]
    wanted = [*outputs, *inputs]
    assert len(ends) == len(wanted), (len(ends), len(wanted))
    for i, value in enumerate(ends):
        value.name = f"__end_{i}"  # out of each other's way first
    inner = [v for node in model.graph.all_nodes() for v in node.outputs if v.name]
    inner += model.graph.initializers.values()
    reserved = set(wanted)
    taken = {str(v.name) for v in inner} | reserved
    for value in inner:
        if value.name in reserved:
            value.name = _free_name(str(value.name), taken)
    first: dict[int, tuple[ir.Value, str]] = {}  # one tensor returned twice keeps its first name
    for value, name in zip(ends, wanted, strict=True):
        first.setdefault(id(value), (value, name))
    used: set[str] = set()
    for value, name in first.values():
        value.name = _free_name(name, taken) if name in used else name
        used.add(value.name)


def _free_name(name: str, taken: set[str]) -> str:
    """``name`` with the first number that makes it new; then it is taken."""
    free = next(n for i in count(1) if (n := f"{name}_{i}") not in taken)
    taken.add(free)
    return free
