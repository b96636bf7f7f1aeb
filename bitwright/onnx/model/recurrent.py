"""What repeats, in the form the toolkit works on: one RNN, GRU or LSTM node is one layer in one direction, and a state of a
Loop or Scan is something that its iterations change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from bitwright.core.graph.recurrence import CELLS
from bitwright.export.qdq.markers import Names, Outputs, move_uses, remove_unread
from bitwright.export.recurrent.activations import Activation, layer_activations, unknown_activation
from bitwright.export.recurrent.layers import INITIAL_C, INITIAL_H, LENGTHS, OUTPUTS, X

_STANDARD = ("", "ai.onnx")
_DIRECTIONS = ("forward", "reverse")
_SHARED = (X, LENGTHS)  # inputs that both directions read; the others have an axis of directions
_STATES = (INITIAL_H, INITIAL_C)


def is_layer(node: ir.Node) -> bool:
    """Whether ``node`` is an RNN, GRU or LSTM of the standard."""
    return node.domain in _STANDARD and node.op_type in CELLS


def plain_attributes(node: ir.Node) -> dict[str, Any]:
    """Attributes of a recurrent node as plain values."""
    return {a.name: a.value for a in node.attributes.values() if not a.is_ref()}


def split_directions(model: ir.Model) -> list[str]:
    """Write every bidirectional layer as a forward layer, a reverse one, and what puts their outputs together.

    Nodes are called ``<node>.forward`` and ``<node>.reverse``, and so are the halves of constant weights. A layer with
    an activation function that ONNX Runtime does not know stays as it is.

    Args:
        model: names of values are unique over all graphs; changed in place.

    Returns:
        Names of the nodes that were split.
    """
    found = [
        node
        for node in model.graph.all_nodes()
        if is_layer(node)
        and node.attributes.get_string("direction", "forward") == "bidirectional"
        and unknown_activation(node.op_type, plain_attributes(node)) is None
    ]
    if found:
        splitter = _Splitter(model)
        for node in found:
            splitter.split(node)
    return [str(node.name) for node in found]


class _Splitter:
    def __init__(self, model: ir.Model) -> None:
        self.names, self.outputs = Names(model), Outputs(model)
        self._halves: dict[tuple[ir.Value, int, int], ir.Value] = {}

    def split(self, node: ir.Node) -> None:
        batch_first = bool(node.attributes.get_int("layout", 0))
        parts = [self._layer(node, i, batch_first) for i in range(2)]
        axes = (2, 1, 1) if batch_first else (1, 0, 0)  # of the directions
        for i, old in enumerate(node.outputs):
            if not old.name or not (old.uses() or old.is_graph_output()):
                continue
            halves = [part.outputs[i] for part in parts]
            joined = self._before(node, "Concat", halves, f"{node.name}.{OUTPUTS[i]}", axis=axes[i])
            move_uses(old, joined)
            self.outputs.replace(old, joined)
            joined.type, joined.shape, joined.name, old.name = old.type, old.shape, old.name, None
        assert node.graph is not None
        inputs = [value for value in node.inputs if value is not None]
        node.graph.remove(node, safe=True)
        for value in filter(ir.Value.is_initializer, inputs):
            remove_unread(value)

    def _layer(self, node: ir.Node, direction: int, batch_first: bool) -> ir.Node:
        """One direction of ``node``, in front of it."""
        inputs = [
            value if value is None or port in _SHARED else self._half(node, port, value, direction, batch_first)
            for port, value in enumerate(node.inputs)
        ]
        attributes = _one_direction(node, direction)
        word = _DIRECTIONS[direction]
        name = self.names.node(f"{node.name}.{word}")
        made = ir.node(node.op_type, inputs, attributes, num_outputs=len(node.outputs), name=name)
        for old, new in zip(node.outputs, made.outputs, strict=True):
            new.name = self.names.value(f"{old.name}.{word}") if old.name else ""
            new.type = old.type
        made.metadata_props.update(node.metadata_props)
        assert node.graph is not None
        node.graph.insert_before(node, made)
        return made

    def _half(self, node: ir.Node, port: int, value: ir.Value, direction: int, batch_first: bool) -> ir.Value:
        """What one direction reads of ``value``, which has both along one axis."""
        axis = 1 if batch_first and port in _STATES else 0
        tensor = value.const_value if value.is_initializer() and not value.is_graph_input() else None
        name = f"{value.name}.{_DIRECTIONS[direction]}"
        if tensor is None:
            half = self._before(node, "Gather", [value, self._index(node, direction)], name, axis=axis)
            half.type = value.type
            return half
        key = (value, axis, direction)
        if key not in self._halves:
            array = np.ascontiguousarray(np.take(tensor.numpy(), [direction], axis))
            self._halves[key] = self._initializer(value.graph, name, array, tensor.dtype)
        return self._halves[key]

    def _index(self, node: ir.Node, direction: int) -> ir.Value:
        assert node.graph is not None
        name = f"{node.name}.{_DIRECTIONS[direction]}.index"
        return self._initializer(node.graph, name, np.asarray([direction], np.int64), ir.DataType.INT64)

    def _initializer(self, graph: ir.Graph | None, base: str, array: Any, dtype: ir.DataType) -> ir.Value:
        assert graph is not None
        name = self.names.value(base)
        tensor = ir.Tensor(array, dtype=dtype, name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(dtype), const_value=tensor)
        graph.register_initializer(value)
        return value

    def _before(self, node: ir.Node, op: str, inputs: Sequence[ir.Value], name: str, **attributes: Any) -> ir.Value:
        made = ir.node(op, inputs, attributes, name=self.names.node(name))
        made.outputs[0].name = self.names.value(name)
        assert node.graph is not None
        node.graph.insert_before(node, made)
        return made.outputs[0]


def _one_direction(node: ir.Node, direction: int) -> dict[str, Any]:
    """The attributes of one direction of a bidirectional node."""
    attributes = plain_attributes(node)
    attributes["direction"] = _DIRECTIONS[direction]
    if "activations" not in attributes:
        return attributes
    both = layer_activations(node.op_type, plain_attributes(node))
    half = both[: len(both) // 2] if direction == 0 else both[len(both) // 2 :]
    for key, values in activation_attributes(half).items():
        attributes.pop(key, None)
        if values:
            attributes[key] = values
    return attributes


def activation_attributes(activations: Sequence[Activation]) -> dict[str, list[Any]]:
    """The attributes that name these functions."""
    return {
        "activations": [a.name for a in activations],
        "activation_alpha": [a.alpha for a in activations if a.alpha is not None],
        "activation_beta": [a.beta for a in activations if a.beta is not None],
    }


def drop_unchanged_states(model: ir.Model) -> list[str]:
    """Let the bodies of Loop and Scan read what no iteration changes from outside, instead of handing it on as a state.

    Exporters of TensorFlow put the weights of a recurrent layer among the states of a Loop, whose body returns them as they
    are. Read from outside they are constants. Scan before opset 9 had other inputs, and stays as it is.

    Args:
        model: names of values are unique over all graphs; changed in place.

    Returns:
        Names of the nodes that lost states.
    """
    opset = max(model.opset_imports.get(domain, 0) for domain in _STANDARD)
    found = [
        node
        for node in model.graph.all_nodes()
        if node.domain in _STANDARD and (node.op_type == "Loop" or (node.op_type == "Scan" and opset >= 9))
    ]
    if not found:
        return []
    names, outputs = Names(model), Outputs(model)
    changed = []
    for node in reversed(found):  # loops within a loop first: they may be all that its states pass through
        states = _unchanged_states(node)
        if states:
            changed.append(str(node.name))
            _without_states(node, states, names, outputs)
    return changed[::-1]


def _unchanged_states(node: ir.Node) -> list[int]:
    """Places among the states of a loop whose value every iteration returns as it came."""
    body = node.attributes["body"].as_graph()
    skipped, count = _states_of(node)
    found = []
    for i in range(count):
        outer = node.inputs[skipped + i]
        if outer is not None and _through_copies(body, body.outputs[_conditions(node) + i]) in (
            outer,
            body.inputs[skipped + i],
        ):
            found.append(i)
    return found


def _states_of(node: ir.Node) -> tuple[int, int]:
    """Where the states of a loop begin among its inputs, and how many there are."""
    if node.op_type == "Loop":
        return 2, len(node.inputs) - 2
    return 0, len(node.inputs) - node.attributes["num_scan_inputs"].as_int()


def _conditions(node: ir.Node) -> int:
    """How many outputs of the body of a loop come before its states: a Loop returns whether it goes on."""
    return int(node.op_type == "Loop")


def _through_copies(body: ir.Graph, value: ir.Value) -> ir.Value:
    """What ``value`` is a copy of, as far as the copies are made in ``body``."""
    while True:
        node = value.producer()
        copies = node is not None and node.op_type == "Identity" and node.domain in _STANDARD
        if not copies or node is None or node.graph is not body or node.inputs[0] is None:
            return value
        value = node.inputs[0]


def _without_states(node: ir.Node, states: Sequence[int], names: Names, outputs: Outputs) -> None:
    """Take ``states`` out of a loop and its body; who reads them reads what they began with."""
    body = node.attributes["body"].as_graph()
    skipped, _ = _states_of(node)
    first = _conditions(node)
    for i in reversed(states):
        outer, inner, old = node.inputs[skipped + i], body.inputs[skipped + i], node.outputs[i]
        assert outer is not None
        returned = body.outputs.pop(first + i)
        if returned is not inner:
            remove_unread(returned)
        body.inputs.pop(skipped + i)
        move_uses(inner, outer)
        for slot, value in enumerate(body.outputs):
            if value is inner:  # what a body returns is made in it
                body.outputs[slot] = _copy_of(outer, inner, body.append, names)
        move_uses(old, outer)
        if old.is_graph_output():
            assert node.graph is not None
            copy = _copy_of(outer, old, partial(node.graph.insert_after, node), names)
            outputs.replace(old, copy)
            old.name = None
    _rebuild(node, {skipped + i for i in states}, set(states), outputs)


def _copy_of(source: ir.Value, like: ir.Value, place: Callable[[ir.Node], None], names: Names) -> ir.Value:
    made = ir.node("Identity", [source], name=names.node(f"{like.name}.copy"))
    made.outputs[0].name = names.value(f"{like.name}.copy")
    made.outputs[0].type, made.outputs[0].shape = source.type or like.type, source.shape or like.shape
    place(made)
    return made.outputs[0]


def _rebuild(node: ir.Node, inputs: set[int], results: set[int], outputs: Outputs) -> None:
    """Put a node without some of its inputs and outputs in the place of ``node``; one without outputs is left out."""
    kept = [value for i, value in enumerate(node.outputs) if i not in results]
    assert node.graph is not None
    if kept:
        made = ir.Node(
            node.domain,
            node.op_type,
            [value for i, value in enumerate(node.inputs) if i not in inputs],
            [node.attributes[key] for key in node.attributes],
            num_outputs=len(kept),
            name=node.name,
            metadata_props=dict(node.metadata_props),
        )
        node.graph.insert_before(node, made)
        for old, new in zip(kept, made.outputs, strict=True):
            move_uses(old, new)
            outputs.replace(old, new)
            new.name, new.type, new.shape = old.name, old.type, old.shape
    node.graph.remove(node, safe=True)
