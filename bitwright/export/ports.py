"""Names of a model's inputs and outputs, as the caller wants them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from bitwright.errors import ExportError
from bitwright.export.qdq.markers import Names


def rename_ports(model: ir.Model, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> dict[str, str]:
    """Name the first inputs and outputs of ``model``, in place; the others keep theirs.

    A tensor inside the model that has one of these names gets another.

    Returns:
        Old name -> new name of the inputs and outputs.

    Raises (and leaves the model as it was):
        ExportError: more names than there are inputs or outputs, the same name twice, or a name of an initializer.
    """
    graph = model.graph
    ports = [value for value in graph.inputs if not value.is_initializer()]
    renamed = {**_paired("input_names", ports, inputs), **_paired("output_names", graph.outputs, outputs)}
    final = [str(renamed.get(value, value.name)) for value in dict.fromkeys((*ports, *graph.outputs))]
    problem = _why_not(final, [name for name in renamed.values() if name in graph.initializers])
    if problem is not None:
        raise ExportError("input_names, output_names", problem, "give every input and output a name of its own")
    unique, wanted = Names(model), set(renamed.values())
    for value in (value for node in graph.all_nodes() for value in node.outputs):
        if value.name in wanted and value not in renamed:
            value.name = unique.value(value.name)
    before = {value: str(value.name) for value in renamed}
    for value, name in renamed.items():
        value.name = name
    return {old: renamed[value] for value, old in before.items()}


def _paired(kind: str, values: Sequence[ir.Value], names: Sequence[str]) -> dict[ir.Value, str]:
    if len(names) > len(values):
        raise ExportError(
            kind, f"{len(names)} names for {len(values)} tensors", f"name {', '.join(str(v.name) for v in values)}"
        )
    return dict(zip(values, names, strict=False))


def _why_not(names: Sequence[str], taken: Sequence[str]) -> str | None:
    """Why inputs and outputs cannot have these ``names``, of which ``taken`` are those of parameters."""
    if taken:
        return f"{taken[0]!r} is the name of a parameter"
    twice = next((name for name in names if names.count(name) > 1), "")
    return f"{twice!r} names several tensors, or none" if twice or "" in names else None
