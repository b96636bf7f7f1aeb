"""Scan nodes whose bodies hold their constants themselves, as OpenVINO demands.

ONNX lets a body read values of the graphs around it. OpenVINO 2026.4 counts these among the inputs of the Scan and refuses it
("num_scan_outputs can't be negative"); of a body that reads nothing from outside it computes what ONNX Runtime does.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from bitwright.export.qdq.forms import Builder, note_metadata, read_metadata
from bitwright.export.qdq.markers import remove_unread

_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def close_scans(builder: Builder, model: ir.Model) -> None:
    """Copy what bodies of Scan nodes read from outside into them, where constants decide it; the originals go when nothing else
    reads them.

    Values that depend on the model's inputs stay where they are.

    Args:
        builder: of ``model``, for names.
        model: changed in place; computes the same. Time and memory are linear in what is copied.
    """
    for node in [node for node in model.graph.all_nodes() if node.op_type == "Scan" and not node.domain]:
        _close(node.attributes["body"].as_graph(), builder)


def _close(body: ir.Graph, builder: Builder) -> None:
    inside = set(body.all_nodes())
    leading = {value: nodes for value in _captured(body, inside) if (nodes := _leading_to(value)) is not None}
    made = dict.fromkeys(node for nodes in leading.values() for node in nodes)
    copies: dict[ir.Value, ir.Value] = {}
    first = next(iter(body), None)
    for node in made:
        assert first is not None  # something reads what they make
        body.insert_before(first, _copied(node, body, builder, copies))
    for value in leading:
        copy = copies.get(value) or _stored(value, body, builder, copies)
        for node, i in [use for use in value.uses() if use.node in inside]:
            node.replace_input_with(i, copy)
        remove_unread(value)
    new_names = {str(old.name): str(_named_as(old, new).name) for old, new in copies.items()}
    for reader in (*(copies[node.outputs[0]].producer() for node in made), *inside):
        _rename_scale(reader, new_names)


def _captured(body: ir.Graph, inside: set[ir.Node]) -> list[ir.Value]:
    """What nodes of ``body`` read from the graphs around it, in their order."""
    own = {value for graph in (body, *body.subgraphs()) for value in (*graph.inputs, *graph.initializers.values())}
    read = dict.fromkeys(value for node in body.all_nodes() for value in node.inputs if value is not None)
    return [value for value in read if value not in own and value.producer() not in inside]


def _named_as(old: ir.Value, new: ir.Value) -> ir.Value:
    """``new``, under the name of ``old`` where that is gone."""
    producer = old.producer()
    if old.graph is None if producer is None else producer.graph is None:
        new.name = old.name
    return new


def _rename_scale(node: ir.Node | None, new_names: Mapping[str, str]) -> None:
    """Let what is noted on a quantizer name the scale that it reads now."""
    facts = None if node is None else read_metadata(node)
    if node is not None and facts is not None and facts["scale"] in new_names:
        note_metadata(node, **{**facts, "scale": new_names[facts["scale"]]})


def _leading_to(value: ir.Value) -> list[ir.Node] | None:
    """The operators that compute ``value`` from initializers alone, in order; ``None`` where it depends on more."""
    waiting, found = [(value, False)], dict[ir.Node, None]()
    while waiting:
        one, entered = waiting.pop()
        node = one.producer()
        if node is not None and entered:
            found[node] = None
        elif _depends_on_more(one):
            return None
        elif node is not None and node not in found:
            waiting.append((one, True))
            waiting.extend((source, False) for source in node.inputs if source is not None)
    return list(found)


def _depends_on_more(value: ir.Value) -> bool:
    """Whether ``value`` is neither an initializer nor made by an operator without bodies."""
    node = value.producer()
    if node is None:
        return not value.is_initializer() or value.is_graph_input()
    return any(attr.type in _GRAPHS for attr in node.attributes.values())


def _copied(node: ir.Node, body: ir.Graph, builder: Builder, copies: dict[ir.Value, ir.Value]) -> ir.Node:
    """``node`` for a body, on copies of what it reads."""
    inputs = [
        None if value is None else copies.get(value) or _stored(value, body, builder, copies) for value in node.inputs
    ]
    copy = ir.Node(
        node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs),
        name=builder.names.node(str(node.name)), metadata_props=dict(node.metadata_props),
    )  # fmt: skip
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        new.name, new.type = builder.names.value(str(old.name)), old.type
        new.shape = None if old.shape is None else old.shape.copy()
        copies[old] = new
    return copy


def _stored(value: ir.Value, body: ir.Graph, builder: Builder, copies: dict[ir.Value, ir.Value]) -> ir.Value:
    """An initializer of a body with the number of ``value``."""
    tensor = value.const_value
    assert tensor is not None, value.name
    name = builder.names.value(str(value.name))
    kept = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
    copy = ir.Value(name=name, shape=kept.shape, type=ir.TensorType(tensor.dtype), const_value=kept)
    body.register_initializer(copy)
    copies[value] = copy
    return copy
