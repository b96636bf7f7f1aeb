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
    renamed: dict[ir.Value, str] = {}
    for kind, values, names in (
        ("input_names", ports, inputs),
        ("output_names", list(graph.outputs), outputs),
    ):
        if len(names) > len(values):
            raise ExportError(
                kind,
                f"{len(names)} names for {len(values)} tensors",
                f"name {', '.join(str(v.name) for v in values)}",
            )
        renamed.update(zip(values, names, strict=False))
    final = [str(renamed.get(value, value.name)) for value in dict.fromkeys((*ports, *graph.outputs))]
    twice = next((name for name in final if final.count(name) > 1), None)
    taken = next((name for name in renamed.values() if name in graph.initializers), None)
    if twice is not None or taken is not None or "" in final:
        raise ExportError(
            "input_names, output_names",
            f"{taken!r} is the name of a parameter"
            if taken
            else f"{twice or ''!r} names several tensors, or none",
            "give every input and output a name of its own",
        )
    unique, wanted = Names(model), set(renamed.values())
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in wanted and value not in renamed:
                value.name = unique.value(value.name)
    before = {value: str(value.name) for value in renamed}
    for value, name in renamed.items():
        value.name = name
    return {old: renamed[value] for value, old in before.items()}
