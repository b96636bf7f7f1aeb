"""Rewrites before conversion: of the optimizer's operators, of old ones, of recurrent layers and loop states.

Files that ONNX Runtime's optimizer saved become models like any other:

==========================================  ==========================================================================
found                                       becomes
==========================================  ==========================================================================
``com.microsoft.nchwc`` (levels all and     the operator of the standard, weights in their own order again; channels
layout: channels in blocks of 8 or 16)      that only fill a block go where that can be told
ReorderInput, ReorderOutput                 nothing, or a Transpose where channels are the last axis
FusedConv, FusedGemm                        Conv or Gemm, the sum and the activation function after it
FusedMatMul                                 Transpose, MatMul, Mul
QuickGelu, Gelu (``com.microsoft``)         Sigmoid and Mul; Gelu of the standard, before opset 20 Mul, Erf, Add, Mul
==========================================  ==========================================================================

How long a block is depends on the CPU for which the file was written, which it does not say: it is taken to be this one.
The result is compared with the file in ONNX Runtime.

One RNN, GRU or LSTM node becomes one layer in one direction, and a state of a Loop or Scan something that its iterations
change. Operators of old models that the standard no longer has, though ONNX Runtime still runs them, become operators that it
has; products lose a bias that they ignore. The conversion is then checked against the original in ONNX Runtime, which knows
what they meant.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.graph.recurrence import CELLS
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ModelError, first_few, with_article
from bitwright.export.files.onnx_file import all_graphs, all_nodes
from bitwright.export.qdq.markers import Names, Outputs, bypass, move_uses, remove_unread
from bitwright.export.recurrent import (
    INITIAL_C,
    INITIAL_H,
    LENGTHS,
    OUTPUTS,
    Activation,
    X,
    layer_activations,
    unknown_activation,
)
from bitwright.onnx.model.data import input_specs, random_feeds
from bitwright.onnx.model.session import open_session, save_optimized
from bitwright.runtimes.onnxruntime import refusals

Array = NDArray[Any]
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
    """Write every bidirectional layer as a forward layer, a reverse one, and a join of their outputs.

    Nodes are called ``<node>.forward`` and ``<node>.reverse``, and so are the halves of constant weights. A layer with
    an activation function that ONNX Runtime does not know stays as it is.

    Args:
        model: names of values are unique over all graphs; changed in place.

    Returns:
        Names of the nodes that were split.
    """
    found = [
        node
        for node in all_nodes(model.graph)
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
        """The slice of ``value`` for one direction; both lie along one axis."""
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
    """Turn states of Loop and Scan that no iteration changes into values from outside.

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
        for node in all_nodes(model.graph)
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
    """Indices of the states of a loop that every iteration returns unchanged."""
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
    """Index of a loop's first state among its inputs, and the number of states."""
    if node.op_type == "Loop":
        return 2, len(node.inputs) - 2
    return 0, len(node.inputs) - node.attributes["num_scan_inputs"].as_int()


def _conditions(node: ir.Node) -> int:
    """Number of body outputs before the states: a Loop returns its condition first."""
    return int(node.op_type == "Loop")


def _through_copies(body: ir.Graph, value: ir.Value) -> ir.Value:
    """The original of ``value`` across Identity nodes in ``body``."""
    while True:
        node = value.producer()
        copies = node is not None and node.op_type == "Identity" and node.domain in _STANDARD
        if not copies or node is None or node.graph is not body or node.inputs[0] is None:
            return value
        value = node.inputs[0]


def _without_states(node: ir.Node, states: Sequence[int], names: Names, outputs: Outputs) -> None:
    """Remove ``states`` from a loop and its body; their readers get the initial values."""
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
    """Replace ``node`` by one without some of its inputs and outputs; without outputs, remove it."""
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


_TRAINING_OPSET = 14  # from which on an attribute says what the number of outputs said before
_END = 1 << 31


class Pen:
    """Writes a chain of operators before a node."""

    def __init__(self, model: ir.Model, names: Names, node: ir.Node) -> None:
        self.model, self.names, self.node = model, names, node
        source = node.inputs[0]
        assert source is not None
        self.value = source

    def number(self, name: str, default: float) -> float:
        """A float attribute of the node."""
        return self.node.attributes.get_float(name, default)

    def constant(self, array: NDArray[Any], name: str = "") -> ir.Value:
        """A new initializer."""
        name = self.names.value(name or f"{self.node.outputs[0].name}_constant")
        tensor = ir.Tensor(array, name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.model.graph.register_initializer(value)
        return value

    def then(
        self,
        op: str,
        *others: NDArray[Any],
        floats: Mapping[str, float | Sequence[float]] | None = None,
        strings: Mapping[str, str] | None = None,
        **attributes: Sequence[int],
    ) -> Pen:
        """Append an operator with the constants ``others`` as further inputs."""
        attrs = [ir.AttrInt64s(key, tuple(numbers)) for key, numbers in attributes.items()]
        for key, number in (floats or {}).items():
            single = isinstance(number, (int, float))
            attrs.append(ir.AttrFloat32(key, number) if single else ir.AttrFloat32s(key, number))  # type: ignore[arg-type]
        attrs += [ir.AttrString(key, text) for key, text in (strings or {}).items()]
        return self._step(op, [self.value, *map(self.constant, others)], attrs)

    def with_value(self, op: str, other: ir.Value) -> Pen:
        """Append an operator that also reads another value of the graph."""
        return self._step(op, [self.value, other], [])

    def _step(self, op: str, inputs: Sequence[ir.Value], attributes: Sequence[ir.Attr]) -> Pen:
        step = ir.Node("", op, inputs, attributes, name=self.names.node(f"{self.node.name}/{op}"))
        step.outputs[0].name = self.names.value(f"{self.node.outputs[0].name}_{op.lower()}")
        assert self.node.graph is not None
        self.node.graph.insert_before(self.node, step)
        self.value = step.outputs[0]
        self.value.type = self.node.outputs[0].type
        return self

    def scaled(self, factor: float) -> Pen:
        """A product with a number."""
        return self.then("Mul", np.asarray(factor, np.float32))


def _image_scaler(pen: Pen) -> None:
    bias = np.asarray(pen.node.attributes.get_floats("bias", (0.0,)), np.float32)
    pen.scaled(pen.number("scale", 1.0)).then("Add", bias.reshape(1, -1, 1, 1))


def _affine(pen: Pen) -> None:
    pen.scaled(pen.number("alpha", 1.0)).then("Add", np.asarray(pen.number("beta", 0.0), np.float32))


def _scaled_tanh(pen: Pen) -> None:
    pen.scaled(pen.number("beta", 1.0)).then("Tanh").scaled(pen.number("alpha", 1.0))


def _parametric_softplus(pen: Pen) -> None:
    pen.scaled(pen.number("beta", 1.0)).then("Softplus").scaled(pen.number("alpha", 1.0))


def _crop(pen: Pen) -> None:
    left, top, right, bottom = pen.node.attributes.get_ints("border", (0, 0, 0, 0))
    size = pen.node.attributes.get_ints("scale", ())
    ends = [top + size[0], left + size[1]] if len(size) == 2 else [-bottom or _END, -right or _END]
    pen.then("Slice", axes=[2, 3], starts=[top, left], ends=ends)


_LEGACY_REWRITES: dict[str, Callable[[Pen], None]] = {
    "ImageScaler": _image_scaler,
    "Affine": _affine,
    "ScaledTanh": _scaled_tanh,
    "ParametricSoftplus": _parametric_softplus,
    "Crop": _crop,
}
# Operators that ONNX Runtime knew before the standard took them in as they were -> the opset that did.
TAKEN_IN = {"ThresholdedRelu": 10}


def rewrite_dropped(model: ir.Model, opset: int) -> list[str]:
    """Rewrite operators that the standard dropped, in place; returns their types.

    Args:
        model: of an opset below 10, where Slice has attributes; at later ones none of them exists any more.
        opset: of its standard operators.
    """
    nodes = [n for n in all_nodes(model.graph) if n.op_type in _LEGACY_REWRITES and n.domain in _STANDARD]
    if not nodes or opset >= 10:
        return []
    names = Names(model)
    for node in nodes:
        pen = Pen(model, names, node)
        _LEGACY_REWRITES[node.op_type](pen)
        take_place(model, node, pen.value)
    return sorted({node.op_type for node in nodes})


def take_place(model: ir.Model, node: ir.Node, made: ir.Value) -> None:
    """Replace the output of ``node`` by ``made``, under its name."""
    old = node.outputs[0]
    move_uses(old, made)
    for graph in all_graphs(model.graph):
        for i, value in enumerate(graph.outputs):
            if value is old:
                graph.outputs[i] = made
    name, old.name = old.name, None
    made.name, made.shape = name, old.shape
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def part_training_norms(model: ir.Model, opset: int, site: str) -> list[str]:
    """Remove outputs of training-mode batch norms that later opsets lack, in place; returns the nodes' names.

    Raises:
        ModelError: one of these outputs is read.
    """
    if opset >= _TRAINING_OPSET:
        return []
    found = []
    for node in all_nodes(model.graph):
        if node.op_type != "BatchNormalization" or node.domain not in _STANDARD or len(node.outputs) == 1:
            continue
        if any(value.uses() or value.is_graph_output() for value in node.outputs[3:]):
            raise ModelError(
                site,
                f"the batch norm {node.name!r} is in training mode and passes on the statistics of the batch, which opset "
                f"{_TRAINING_OPSET} has no outputs for",
                "export the model again in evaluation mode",
            )
        node.resize_outputs(3)
        for i, value in enumerate(node.outputs[1:], 1):
            value.name = value.name or f"{node.outputs[0].name}_running_{i}"
        found.append(str(node.name))
    return found


def train_norms(model: ir.Model, names: Sequence[str]) -> None:
    """Set the training attribute of converted batch norms, which older opsets implied by their number of outputs."""
    wanted = set(names)
    for node in all_nodes(model.graph) if wanted else ():
        if node.op_type == "BatchNormalization" and node.name in wanted:
            node.attributes.add(ir.AttrInt64("training_mode", 1))


def drop_unread_masks(model: ir.Model) -> None:
    """Take out the masks of Dropout that nothing reads: converters wrote them with a type that later opsets do not allow."""
    for node in all_nodes(model.graph):
        if node.op_type == "Dropout" and not node.domain and len(node.outputs) > 1:
            mask = node.outputs[1]
            if not mask.uses() and not mask.is_graph_output():
                node.resize_outputs(1)


def write_plain_biases(model: ir.Model) -> None:
    """Let every Gemm add its stored bias once, as a vector with a number per output; ``model`` is changed in place.

    With a ``beta`` of 0, as JAX's exporter writes products, it reads none; another one is multiplied into the bias. A bias of
    one row, as CNTK writes it, becomes a vector, and one number is written out.
    """
    names: Names | None = None
    for node in all_nodes(model.graph):
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if node.op_type != "Gemm" or node.domain not in _STANDARD or bias is None:
            continue
        beta = node.attributes.get_float("beta", 1.0)
        vector = _bias_vector(node, bias, beta)
        if beta == 0:
            node.resize_inputs(2)
        elif vector is None:
            continue
        elif len(bias.uses()) > 1:
            names = names or Names(model)
            node.replace_input_with(2, Pen(model, names, node).constant(vector, str(bias.name)))
        else:
            bias.const_value, bias.shape = ir.Tensor(vector, name=bias.name), ir.Shape(vector.shape)
        node.attributes.pop("beta", None)
        if beta == 0 and bias.is_initializer():
            remove_unread(bias)


def _bias_vector(node: ir.Node, bias: ir.Value, beta: float) -> Array | None:
    """``beta`` times the stored bias of a Gemm, ``[outputs]``; ``None`` where it is that already, or cannot be."""
    made, held = node.outputs[0].shape, bias.const_value
    outputs = made[-1] if made is not None and len(made) == 2 else None
    if (
        held is None
        or not bias.is_initializer()
        or bias.is_graph_input()
        or not held.dtype.is_floating_point()
        or not isinstance(outputs, int)
    ):
        return None
    shape = tuple(held.shape.numpy())
    plain = shape == (outputs,) and beta == 1
    if plain or shape[:-1] not in ((), (1,)) or shape[-1:] not in ((), (1,), (outputs,)):
        return None
    array = held.numpy().reshape(-1)
    scaled = array if beta == 1 else (array.astype(np.float64) * beta).astype(array.dtype)
    return np.ascontiguousarray(np.broadcast_to(scaled, (outputs,)))


_BLOCKED, _FUSED = "com.microsoft.nchwc", "com.microsoft"
_GELU_SINCE = 20
_FUSED_TYPES = ("FusedConv", "FusedGemm", "QuickGelu", "Gelu")
_NHWC_TO_NCHW, _NCHW_TO_NHWC = (0, 3, 1, 2), (0, 2, 3, 1)
_LEAST_SQNR = 80.0  # dB; two orders of summation of a deep network agree to about 100
_AGAIN = (
    "start from the float model that ONNX Runtime optimised, or let it optimise no further than ORT_ENABLE_EXTENDED"
)


def undo_optimizations(model: ir.Model, opset: int, clone: Callable[[ir.Model], ir.Model]) -> list[str]:
    """Rewrite operators of ONNX Runtime's optimizer as standard ones, in place; returns a note if there were any.

    Args:
        model: its weights are initializers.
        opset: of its standard operators.
        clone: copies a model, for the comparison.

    Raises:
        ModelError: an operator has a form that is not known, or the result computes something else.
    """
    found = [node for node in all_nodes(model.graph) if _is_undone(node)]
    if not found:
        return []
    kinds = sorted({f"{node.domain}::{node.op_type}" for node in found})
    blocked = any(node.domain == _BLOCKED for node in found)
    before = clone(model) if blocked else None
    site = _Site(model, Names(model), Outputs(model), opset, _Channels.of(model).counts if blocked else {})
    # what enters and leaves the blocks last: convolutions know their channels by it
    for node in sorted(found, key=lambda node: node.op_type in ("ReorderInput", "ReorderOutput")):
        _OPTIMIZED_REWRITES.get((node.domain, node.op_type), _rename)(site, node)
    if blocked:
        for graph in all_graphs(model.graph):
            graph.opset_imports.pop(_BLOCKED, None)
        assert before is not None
        _compare(before, model)
    return [f"what ONNX Runtime's optimizer wrote is in operators of the standard again: {first_few(kinds)}"]


def _is_undone(node: ir.Node) -> bool:
    if node.domain == _FUSED:
        batch = any(node.attributes.get_int(name, 0) for name in ("transBatchA", "transBatchB"))
        return node.op_type in _FUSED_TYPES or (node.op_type == "FusedMatMul" and not batch)
    return node.domain == _BLOCKED


# ------------------------------------------------------------------------------------------------ single operators


@dataclass(frozen=True)
class _Site:
    """Context of a rewrite: the model, its names, outputs and opset, and the channels of blocked tensors."""

    model: ir.Model
    names: Names
    outputs: Outputs
    opset: int
    counts: dict[ir.Value, int]

    def pen(self, node: ir.Node) -> Pen:
        return Pen(self.model, self.names, node)


def _rename(_: _Site, node: ir.Node) -> None:
    """The operator of the standard has the same form."""
    node.domain = ""


def _layer(site: _Site, node: ir.Node) -> None:
    """A layer with the addition and the activation function after it."""
    kind = node.op_type.removeprefix("Fused")
    inputs, attributes = list(node.inputs), dict(node.attributes)
    added = inputs[3] if kind == "Conv" and len(inputs) > 3 else None
    activation = node.attributes.get_string("activation", "")
    numbers = _activation_numbers(node)
    for name in list(attributes):
        if name.startswith("activation"):
            del attributes[name]
    pen = site.pen(node)
    made = ir.Node("", kind, inputs[:3], list(attributes.values()), name=site.names.node(f"{node.name}/{kind}"))
    made.outputs[0].name = site.names.value(f"{node.outputs[0].name}_{kind.lower()}")
    assert node.graph is not None
    node.graph.insert_before(node, made)
    pen.value = made.outputs[0]
    pen.value.type = node.outputs[0].type
    if added is not None:
        pen.with_value("Add", added)
    if activation:
        _activate(pen, activation, numbers, site.opset)
    take_place(site.model, node, pen.value)


def _activation_numbers(node: ir.Node) -> list[float]:
    given = node.attributes.get("activation_params")
    if given is not None:
        return [float(number) for number in given.as_floats()]
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    return [node.attributes.get_float(name) for name in names if name in node.attributes]


#: activation function -> the attributes of its operator, in the order of the numbers that a fused operator has
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
    "LeakyRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Clip": ("min", "max"),
    "Elu": ("alpha",),
    "Softplus": (),
    "Softsign": (),
    "ThresholdedRelu": ("alpha",),
    "ScaledTanh": ("alpha", "beta"),
    "ParametricSoftplus": ("alpha", "beta"),
    "HardSwish": (),
}


def _activate(pen: Pen, kind: str, numbers: list[float], opset: int) -> None:
    names = _ACTIVATIONS.get(kind)
    if names is None or len(numbers) not in (0, len(names)):
        raise ModelError(
            str(pen.node.name),
            f"it is {with_article(pen.node.op_type)} of ONNX Runtime's optimizer with the activation function {kind!r}, which is "
            "not known here",
            _AGAIN,
        )
    if kind == "Clip" and opset >= 11:
        pen.then("Clip", *(np.asarray(number, np.float32) for number in numbers))
    else:
        pen.then(kind, floats=dict(zip(names, numbers, strict=False)))


def _product(site: _Site, node: ir.Node) -> None:
    """A product of two tensors, either of them with its last axes exchanged, times a number."""
    pen = site.pen(node)
    operands = []
    for port, name in enumerate(("transA", "transB")):
        value = node.inputs[port]
        assert value is not None
        if node.attributes.get_int(name, 0) and (value.shape is None or len(value.shape) > 1):
            if value.shape is None:
                problem = f"it exchanges axes of {value.name!r}, and how many that has is not known"
                raise ModelError(str(node.name), problem, _AGAIN)
            rank = len(value.shape)
            pen.value = value
            pen.then("Transpose", perm=(*range(rank - 2), rank - 1, rank - 2))
            value = pen.value
        operands.append(value)
    pen.value = operands[0]
    pen.with_value("MatMul", operands[1])
    alpha = node.attributes.get_float("alpha", 1.0)
    if alpha != 1:
        pen.scaled(alpha)
    take_place(site.model, node, pen.value)


def _quick_gelu(site: _Site, node: ir.Node) -> None:
    """``x * sigmoid(alpha * x)``."""
    pen = site.pen(node)
    given, alpha = pen.value, pen.number("alpha", 1.702)
    if alpha != 1:
        pen.scaled(alpha)
    take_place(site.model, node, pen.then("Sigmoid").with_value("Mul", given).value)


def _gelu(site: _Site, node: ir.Node) -> None:
    """``x / 2 * (1 + erf(x / sqrt(2)))``."""
    if site.opset >= _GELU_SINCE:
        _rename(site, node)
        return
    pen = site.pen(node)
    given = pen.value
    plus = pen.scaled(math.sqrt(0.5)).then("Erf").then("Add", np.asarray(1, np.float32))
    take_place(site.model, node, plus.with_value("Mul", given).scaled(0.5).value)


def _reorder(site: _Site, node: ir.Node) -> None:
    if not node.attributes.get_int("channels_last", 0):
        bypass(node, site.outputs)
        return
    perm = _NHWC_TO_NCHW if node.op_type == "ReorderInput" else _NCHW_TO_NHWC
    node.domain, node.op_type = "", "Transpose"
    node.attributes.clear()
    node.attributes.add(ir.AttrInt64s("perm", perm))


def _upsample(site: _Site, node: ir.Node) -> None:
    scales = np.asarray(node.attributes["scales"].as_ints(), np.float32)
    mode = node.attributes.get_string("mode", "nearest")
    how = node.attributes.get_string("coordinate_transformation_mode", "asymmetric")
    pen, opset = site.pen(node), site.opset
    if opset < 9:
        pen.then("Upsample", floats={"scales": scales.tolist()}, strings={"mode": mode})
    elif opset < 11:
        pen.then("Upsample" if opset == 9 else "Resize", scales, strings={"mode": mode})
    else:
        strings = {"mode": mode, "coordinate_transformation_mode": how}
        strings.update({"nearest_mode": "floor"} if mode == "nearest" else {})
        pen.then("Resize", np.zeros(0, np.float32), scales, strings=strings)
    take_place(site.model, node, pen.value)


# ---------------------------------------------------------------------------------------------- channels in blocks


@dataclass
class _Channels:
    """Numbers of channels of blocked tensors, by sets of tensors with equally many.

    A tensor in blocks has as many as fill whole blocks, zeros in those that it lacks. How many it has is said where it
    enters or leaves the blocks; otherwise all that are stored count.
    """

    parent: dict[ir.Value, ir.Value] = field(default_factory=dict)
    told: dict[ir.Value, int] = field(default_factory=dict)  # root -> channels
    stored: dict[ir.Value, int] = field(default_factory=dict)  # root -> with those that fill a block

    @classmethod
    def of(cls, model: ir.Model) -> _Channels:
        found = cls()
        sure: list[tuple[ir.Value, int]] = []
        for node in all_nodes(model.graph):
            sure.extend(found._visit(node))
        for value, count in sure:
            found.told[found._root(value)] = count
        return found

    @property
    def counts(self) -> dict[ir.Value, int]:
        """Channels of every tensor in blocks."""
        found = {}
        for value in self.parent:
            root = self._root(value)
            if root in self.told or root in self.stored:
                found[value] = self.told.get(root, self.stored.get(root, 0))
        return found

    def _root(self, value: ir.Value) -> ir.Value:
        while self.parent[value] is not value:
            self.parent[value] = self.parent[self.parent[value]]
            value = self.parent[value]
        return value

    def _visit(self, node: ir.Node) -> Iterator[tuple[ir.Value, int]]:
        """Record what ``node`` implies, and return what is certain."""
        result, kind = node.outputs[0], node.op_type if node.domain == _BLOCKED else ""
        inner = [value for value in node.inputs if value is not None and value in self.parent]
        if kind == "ReorderOutput":
            yield from ((value, int(node.attributes.get_int("channels", 0) or 0)) for value in inner)
            return
        if not inner and kind not in ("ReorderInput", "Conv"):
            return
        self.parent[result] = result
        if kind == "ReorderInput":
            yield result, _entering(node)
        elif kind != "Conv" and node.op_type == "Concat":
            counts = [self.stored.get(self._root(v), self.told.get(self._root(v), 0)) for v in inner]
            self.stored[result] = sum(counts)
            yield from zip(inner, counts, strict=True)  # whole blocks, or they could not be joined
        else:
            self._join(result, self._of_convolution(node, inner) if kind == "Conv" else inner)

    def _of_convolution(self, node: ir.Node, inner: list[ir.Value]) -> list[ir.Value]:
        """Record the output channels of a convolution, and which operands have as many."""
        self.stored[node.outputs[0]] = int(_weight(node).shape[0])
        return inner if _is_depthwise(node) else [value for value in inner if value in node.inputs[3:]]

    def _join(self, one: ir.Value, others: list[ir.Value]) -> None:
        for other in others:
            first, second = self._root(other), self._root(one)
            if first is not second:
                self.parent[second] = first
                for known in (self.stored, self.told):
                    if second in known:
                        known[first] = known.pop(second)


def _entering(node: ir.Node) -> int:
    """Channels of the input of a ReorderInput."""
    source, axis = node.inputs[0], -1 if node.attributes.get_int("channels_last", 0) else 1
    count = _channels_of(source, axis)
    if not isinstance(count, int):
        raise ModelError(str(node.name), "it puts channels into blocks, and how many there are is not known", _AGAIN)
    return count


def _channels_of(value: ir.Value | None, axis: int) -> Any:
    """Length of the channel axis of a value: its own, or that of a value in front of operators that keep it."""
    while value is not None and value.shape is None:
        maker = value.producer()
        if maker is not None and maker.domain == _BLOCKED and maker.op_type == "ReorderOutput":
            last = bool(maker.attributes.get_int("channels_last", 0))
            return maker.attributes.get_int("channels", 0) if last == (axis == -1) else None
        if maker is None or maker.domain or maker.op_type not in _KEEPS_CHANNELS:
            return None
        value = maker.inputs[0]
    return None if value is None or value.shape is None else value.shape[axis]


#: operators that leave channels where they are
_KEEPS_CHANNELS = frozenset((
    "GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool", "MaxPool", "AveragePool", "LpPool", "BatchNormalization",
    "InstanceNormalization", "Identity", "Cast", "Clip", "Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Gelu", "Mish",
    "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Softplus", "Softsign", "ThresholdedRelu", "Sqrt", "Exp", "Log", "Abs",
    "Neg", "Erf", "Sin", "Cos", "Floor", "Ceil", "Round", "Reciprocal",
))  # fmt: skip


def _weight(node: ir.Node) -> Array:
    weight = node.inputs[1]
    if weight is None or weight.const_value is None:
        raise ModelError(str(node.name), "its weights, in blocks of channels, are not stored in the file", _AGAIN)
    array: Array = weight.const_value.numpy()
    return array


def _group(node: ir.Node) -> int:
    return int(node.attributes.get_int("group", 1) or 1)


def _is_depthwise(node: ir.Node) -> bool:
    shape, group = _weight(node).shape, _group(node)
    return group > 1 and shape[1] == 1 and shape[0] == group


def _unblocked(node: ir.Node, stored: Array, block: int, plain: bool) -> Array:
    """A weight in the order of the standard; ``plain`` ones have blocks of output channels only.

    Raises:
        ModelError: it does not hold whole blocks.
    """
    out, in_, *kernel = stored.shape
    if out % block or (in_ % block and not plain):
        problem = (
            f"its weight of shape {list(stored.shape)} is in blocks of another length than {block}, that of this machine: "
            "the file was optimised for another CPU"
        )
        raise ModelError(str(node.name), problem, _AGAIN)
    if plain:
        weight = stored.reshape(out // block, in_, *kernel, block).transpose(0, 4, 1, 2, 3)
    else:
        weight = stored.reshape(out // block, in_ // block, *kernel, block, block).transpose(0, 5, 1, 4, 2, 3)
    return weight.reshape(stored.shape)


def _convolution(site: _Site, node: ir.Node) -> None:
    """A convolution on blocks, with weights and biases as the standard stores them, for as many channels as it has."""
    block, stored = block_length(), _weight(node)
    out, in_ = stored.shape[:2]
    group, depthwise = _group(node), _is_depthwise(node)
    plain = depthwise or (group == 1 and in_ < block)  # its input, or a channel of it, is not in blocks
    weight = _unblocked(node, stored, block, plain)
    source, counts = node.inputs[0], site.counts
    many = counts.get(node.outputs[0], int(out))
    few = counts[source] if group == 1 and source is not None and source in counts else in_
    pen, before = site.pen(node), node.inputs[1:3]
    node.replace_input_with(1, pen.constant(np.ascontiguousarray(weight[:many, :few]), f"{node.name}.weight"))
    for bias in before[1:]:
        if bias is not None and bias.const_value is not None and bias.const_value.shape[0] != many:
            node.replace_input_with(2, pen.constant(bias.const_value.numpy()[:many].copy(), f"{node.name}.bias"))
    for value in filter(None, before):
        if value.is_initializer():
            remove_unread(value)
    if depthwise:
        node.attributes.add(ir.AttrInt64("group", many))
    _layer(site, node)


_OPTIMIZED_REWRITES: dict[tuple[str, str], Callable[[_Site, ir.Node], None]] = {
    (_FUSED, "FusedConv"): _layer,
    (_FUSED, "FusedGemm"): _layer,
    (_FUSED, "FusedMatMul"): _product,
    (_FUSED, "QuickGelu"): _quick_gelu,
    (_FUSED, "Gelu"): _gelu,
    (_BLOCKED, "Conv"): _convolution,
    (_BLOCKED, "Upsample"): _upsample,
    (_BLOCKED, "ReorderInput"): _reorder,
    (_BLOCKED, "ReorderOutput"): _reorder,
}


@cache
def block_length() -> int:
    """Channels per block on this machine, found from ONNX Runtime's rewrite of a convolution with one output channel."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (1, 1, 4, 4))
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (1, 1, 4, 4))
    weight = onnx.numpy_helper.from_array(np.ones((1, 1, 1, 1), np.float32), "w")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Conv", ["x", "w"], ["y"])], "block", [x], [y], [weight])
    imports = [onnx.helper.make_opsetid("", 17)]
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=imports, ir_version=8))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "block.onnx"
        save_optimized(model, path)
        written = onnx.load(path).graph
    return max((int(tensor.dims[0]) for tensor in written.initializer if len(tensor.dims) == 4), default=1)


def _compare(before: ir.Model, after: ir.Model) -> None:
    """Refuse a rewrite whose outputs differ from the file's on random input.

    Raises:
        ModelError: it does.
    """
    site = before.graph.name or "model"
    failures: tuple[type[Exception], ...] = (ModelError, *refusals())
    try:
        feeds = next(random_feeds(input_specs(before)))
        expected = open_session(before, threads=1).run(None, feeds)
        found = open_session(after, threads=1).run(None, feeds)
    except failures:
        return  # random data do not suit it: the shapes of its own data will
    for value, one, other in zip(before.graph.outputs, expected, found, strict=True):
        if not isinstance(one, np.ndarray) or one.dtype.kind != "f":
            continue
        same = one.shape == other.shape and (np.array_equal(one, other) or sqnr(one, other) > _LEAST_SQNR)
        if not same:
            problem = (
                f"its output {value.name!r} differs from that of the same model in operators of the standard: it was "
                "optimised for another CPU, or in a way that is not known here"
            )
            raise ModelError(site, problem, _AGAIN)
