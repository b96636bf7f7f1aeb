"""Operators of old models that the standard no longer has, though ONNX Runtime still runs them, in operators that it has; and
products with a bias that they ignore, without it.

They are rewritten before the model is converted; the conversion is then checked against the original in ONNX Runtime, which
knows what they meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.errors import ModelError
from bitwright.export.qdq.markers import Names, move_uses, remove_unread

_STANDARD = ("", "ai.onnx")
_TRAINING_OPSET = 14  # from which on an attribute says what the number of outputs said before
_END = 1 << 31


class Pen:
    """Writes operators in front of one node, each reading the one before."""

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
        """One more operator; ``others`` are its further inputs, constants all."""
        attrs = [ir.AttrInt64s(key, tuple(numbers)) for key, numbers in attributes.items()]
        for key, number in (floats or {}).items():
            single = isinstance(number, (int, float))
            attrs.append(ir.AttrFloat32(key, number) if single else ir.AttrFloat32s(key, number))  # type: ignore[arg-type]
        attrs += [ir.AttrString(key, text) for key, text in (strings or {}).items()]
        return self._step(op, [self.value, *map(self.constant, others)], attrs)

    def with_value(self, op: str, other: ir.Value) -> Pen:
        """One more operator, which reads another value of the graph too."""
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


_REWRITES: dict[str, Callable[[Pen], None]] = {
    "ImageScaler": _image_scaler,
    "Affine": _affine,
    "ScaledTanh": _scaled_tanh,
    "ParametricSoftplus": _parametric_softplus,
    "Crop": _crop,
}
# Operators that ONNX Runtime knew before the standard took them in as they were -> the opset that did.
TAKEN_IN = {"ThresholdedRelu": 10}


def rewrite_dropped(model: ir.Model, opset: int) -> list[str]:
    """Write operators that the standard dropped as others, in place; which they were.

    Args:
        model: of an opset below 10, where Slice has attributes; at later ones none of them exists any more.
        opset: of its standard operators.
    """
    nodes = [n for n in model.graph.all_nodes() if n.op_type in _REWRITES and n.domain in _STANDARD]
    if not nodes or opset >= 10:
        return []
    names = Names(model)
    for node in nodes:
        pen = Pen(model, names, node)
        _REWRITES[node.op_type](pen)
        take_place(model, node, pen.value)
    return sorted({node.op_type for node in nodes})


def take_place(model: ir.Model, node: ir.Node, made: ir.Value) -> None:
    """Let ``made`` be what ``node`` made, under its name."""
    old = node.outputs[0]
    move_uses(old, made)
    for graph in model.graphs():
        for i, value in enumerate(graph.outputs):
            if value is old:
                graph.outputs[i] = made
    name, old.name = old.name, None
    made.name, made.shape = name, old.shape
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def part_training_norms(model: ir.Model, opset: int, site: str) -> list[str]:
    """Take from batch norms in training mode the outputs that later opsets do not have, in place; names of the nodes.

    Raises:
        ModelError: one of these outputs is read.
    """
    if opset >= _TRAINING_OPSET:
        return []
    found = []
    for node in model.graph.all_nodes():
        if node.op_type != "BatchNormalization" or node.domain not in _STANDARD or len(node.outputs) == 1:
            continue
        if any(value.uses() or value.is_graph_output() for value in node.outputs[3:]):
            raise ModelError(
                site,
                f"the batch norm {node.name!r} is in training mode and hands on the statistics of the batch, which opset "
                f"{_TRAINING_OPSET} has no outputs for",
                "export the model again in evaluation mode",
            )
        node.resize_outputs(3)
        for i, value in enumerate(node.outputs[1:], 1):
            value.name = value.name or f"{node.outputs[0].name}_running_{i}"
        found.append(str(node.name))
    return found


def train_norms(model: ir.Model, names: Sequence[str]) -> None:
    """Tell the converted batch norms of these names by attribute what the number of their outputs told before."""
    wanted = set(names)
    for node in model.graph.all_nodes() if wanted else ():
        if node.op_type == "BatchNormalization" and node.name in wanted:
            node.attributes.add(ir.AttrInt64("training_mode", 1))


def drop_ignored_biases(model: ir.Model) -> None:
    """Let every Gemm with a ``beta`` of 0, as JAX's exporter writes products, read no bias; ``model`` is changed in place."""
    for node in model.graph.all_nodes():
        standard = node.op_type == "Gemm" and node.domain in _STANDARD
        if standard and node.attributes.get_float("beta", 1.0) == 0:
            biases = [value for value in node.inputs[2:] if value is not None and value.is_initializer()]
            node.resize_inputs(2)
            del node.attributes["beta"]
            for value in biases:
                remove_unread(value)
