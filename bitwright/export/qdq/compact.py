"""Store a QDQ model in fewer bytes, for models so small that quantizers take more bytes than integer weights save.

A pair of QuantizeLinear and DequantizeLinear, its two constants and what is noted on it take some 400 bytes under readable names,
and about 150 here, which is what 50 weights save. Nothing that is computed changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, count

import numpy as np
import onnx_ir as ir

from bitwright.export.files.onnx_file import all_graphs, all_nodes
from bitwright.export.qdq.forms import note_metadata, read_metadata
from bitwright.export.qdq.markers import STATES, move_uses
from bitwright.export.qdq.write import QdqResult

_EXPORTERS_NOTES = "pkg.torch."  # keys of what torch.onnx notes on each operator: its line in the source, its modules
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
_PREFIX = "q"  # of the names that are given here


def compact(result: QdqResult, float_model: ir.Model) -> QdqResult:
    """``result`` with short names, shared equal constants, and short metadata for what the export added.

    Args:
        result: its model is changed in place. Time and memory are linear in nodes.
        float_model: the same model without quantizers: what it has under the same name keeps that name.
    """
    model = result.model
    noted = {node: facts for node in all_nodes(model.graph) if (facts := read_metadata(node)) is not None}
    values = {str(value.name): value for value in _values(model)}
    scales = {node: values.get(str(facts["scale"])) for node, facts in noted.items()}
    known = {str(value.name) for value in _values(float_model)}
    shared = _share_constants(model, known)
    new_names = _rename(model, known | _noted_names(model), {str(node.name) for node in all_nodes(float_model.graph)})
    for node, facts in noted.items():
        scale = scales[node]
        scale = scale if scale is None else shared.get(scale, scale)
        entry = new_names.get(str(facts["entry"]), facts["entry"])
        facts = {**facts, "scale": facts["scale"] if scale is None else scale.name, "entry": entry}
        note_metadata(node, **facts, derive=True)
    for value in _inner_values(model):
        value.type = value.shape = None  # tensors say both, or are inferred
    tensors = {site: tuple(new_names.get(name, name) for name in names) for site, names in result.tensors.items()}
    return replace(result, tensors=tensors)


def described(model: ir.Model) -> int:
    """The bytes that types and shapes of inner values take in the file of ``model``."""
    with_either = (value for value in _inner_values(model) if value.type is not None or value.shape is not None)
    return sum(ir.serde.serialize_value(value).ByteSize() for value in with_either)


def forget_exporters_notes(model: ir.Model) -> int:
    """Remove torch.onnx's debugging metadata from graphs, operators and values.

    Returns:
        The number of characters removed.
    """
    values = {*model.graph.inputs, *model.graph.outputs, *_values(model)}
    nodes = all_nodes(model.graph)
    found = (*(n.metadata_props for n in nodes), *(v.metadata_props for v in values), model.graph.metadata_props)
    removed = 0
    for props in found:
        for key in [key for key in props if key.startswith(_EXPORTERS_NOTES)]:
            removed += len(key) + len(props.pop(key))
    return removed


def _values(model: ir.Model) -> Iterator[ir.Value]:
    """Every input, initializer and result of the graph and of bodies."""
    for graph in all_graphs(model.graph):
        yield from graph.inputs
        yield from graph.initializers.values()
    for node in all_nodes(model.graph):
        yield from node.outputs


def _inner_values(model: ir.Model) -> Iterator[ir.Value]:
    """Values whose type and shape a file need not hold: not in bodies, nor of sequences, which not every reader infers."""
    ends = {*model.graph.inputs, *model.graph.outputs}
    constants = (value for graph in all_graphs(model.graph) for value in graph.initializers.values())
    results = (value for node in model.graph for value in node.outputs)
    inferred = (ir.TensorType, type(None))
    return (v for v in chain(constants, results) if v not in ends and isinstance(v.type, inferred))


def _noted_names(model: ir.Model) -> set[str]:
    """Values that the metadata of a recurrent layer's loop name."""
    states = (
        json.loads(node.metadata_props[STATES]) for node in all_nodes(model.graph) if STATES in node.metadata_props
    )
    return {str(one["lengths"]) for one in states}


def _share_constants(model: ir.Model, known: set[str]) -> dict[ir.Value, ir.Value]:
    """Let readers of equal constants that are not ``known``, codes excepted, read the first of them; replaced -> first."""
    first: dict[tuple[object, ...], ir.Value] = {}
    shared: dict[ir.Value, ir.Value] = {}
    for graph in all_graphs(model.graph):
        for value in tuple(graph.initializers.values()):
            tensor = value.const_value
            if tensor is None or value.name in known or _stands_alone(value):
                continue
            key = (graph, tensor.dtype, tuple(tensor.shape.numpy()), np.ascontiguousarray(tensor.numpy()).tobytes())
            same = first.setdefault(key, value)
            if same is not value:
                move_uses(value, same)
                shared[value] = same
                graph.initializers.pop(str(value.name))
    return shared


def _stands_alone(value: ir.Value) -> bool:
    """Whether ``value`` must stay apart from equal constants: integer weights are parameters, and ONNX Runtime writes signed ones
    and their zero points anew, under one name each.
    """
    ports = {port for node, port in value.uses() if node.op_type == "DequantizeLinear"}
    signed = value.dtype == ir.DataType.INT8 and 2 in ports
    return 0 in ports or signed or value.is_graph_output() or value.is_graph_input()


def _rename(model: ir.Model, known: set[str], known_nodes: set[str]) -> dict[str, str]:
    """Shorten names of nodes and values that are not known; returns old name -> new name of values."""
    outputs = {value for graph in all_graphs(model.graph) for value in (*graph.inputs, *graph.outputs)}
    values, nodes = list(_values(model)), list(all_nodes(model.graph))
    taken = known | known_nodes | {str(value.name) for value in values} | {str(node.name) for node in nodes}
    free = _free_names(taken)
    made: dict[str, str] = {}
    for node in nodes:
        if node.name not in known_nodes:
            node.name = next(free)
    for value in values:
        ports = [port for node, port in value.uses() if node.op_type in _QUANTIZERS] if value.is_initializer() else []
        if (
            value.name and value.name not in known and value not in outputs and 0 not in ports
        ):  # 0: the integers of a weight
            old, value.name = value.name, _first_free(free, _ending(value, ports), taken)
            made[old] = value.name
    return made


def _ending(value: ir.Value, ports: list[int]) -> str:
    """Arrays of zero points look like weights of 8 bits, except for their name."""
    return "_zero_point" if 2 in ports and value.const_value is not None and value.const_value.size > 1 else ""


def _first_free(free: Iterator[str], ending: str, taken: set[str]) -> str:
    """The first free name that does not collide with an existing one once ``ending`` is appended."""
    return next(name for name in (stem + ending for stem in free) if name not in taken)


def _free_names(taken: set[str]) -> Iterator[str]:
    names = (f"{_PREFIX}{np.base_repr(number, 36).lower()}" for number in count())
    return (name for name in names if name not in taken)
