"""Operators that ONNX Runtime's optimizer writes, in operators of the standard: a file that it saved is a model like any other.

==========================================  ==========================================================================
found                                       becomes
==========================================  ==========================================================================
``com.microsoft.nchwc`` (levels all and     the operator of the standard, weights in their own order again; channels
layout: channels in blocks of 8 or 16)      that only fill a block go where that can be told
ReorderInput, ReorderOutput                 nothing, or a Transpose where channels are the last axis
FusedConv, FusedGemm                        Conv or Gemm, the sum and the activation function after it
FusedMatMul                                 Transpose, MatMul, Mul
==========================================  ==========================================================================

How long a block is depends on the CPU for which the file was written, which it does not say: it is taken to be this one.
The result is compared with the file in ONNX Runtime.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.simulation.protocols import sqnr
from bitwright.errors import ModelError, first_few
from bitwright.export.qdq.markers import Names, Outputs, bypass, remove_unread
from bitwright.export.verify.runtime import refusals
from bitwright.onnx.model.data import input_specs, random_feeds
from bitwright.onnx.model.legacy import Pen, take_place
from bitwright.onnx.model.session import open_session, save_optimized

Array = NDArray[Any]
_BLOCKED, _FUSED = "com.microsoft.nchwc", "com.microsoft"
_NHWC_TO_NCHW, _NCHW_TO_NHWC = (0, 3, 1, 2), (0, 2, 3, 1)
_LEAST_SQNR = 80.0  # dB; two orders of summation of a deep network agree to about 100
_AGAIN = (
    "start from the float model that ONNX Runtime optimised, or let it optimise no further than ORT_ENABLE_EXTENDED"
)


def undo_optimizations(model: ir.Model, opset: int, clone: Callable[[ir.Model], ir.Model]) -> list[str]:
    """Write what ONNX Runtime's optimizer wrote in operators of the standard, in place; a note where there was something.

    Args:
        model: its weights are initializers.
        opset: of its standard operators.
        clone: copies a model, for the comparison.

    Raises:
        ModelError: an operator has a form that is not known, or the result computes something else.
    """
    found = [node for node in model.graph.all_nodes() if _is_undone(node)]
    if not found:
        return []
    kinds = sorted({f"{node.domain}::{node.op_type}" for node in found})
    blocked = any(node.domain == _BLOCKED for node in found)
    before = clone(model) if blocked else None
    site = _Site(model, Names(model), Outputs(model), opset, _Channels.of(model).counts if blocked else {})
    # what enters and leaves the blocks last: convolutions know their channels by it
    for node in sorted(found, key=lambda node: node.op_type in ("ReorderInput", "ReorderOutput")):
        _REWRITES.get((node.domain, node.op_type), _rename)(site, node)
    if blocked:
        for graph in model.graphs():
            graph.opset_imports.pop(_BLOCKED, None)
        assert before is not None
        _compare(before, model)
    return [f"what ONNX Runtime's optimizer wrote is in operators of the standard again: {first_few(kinds)}"]


def _is_undone(node: ir.Node) -> bool:
    if node.domain == _FUSED:
        batch = any(node.attributes.get_int(name, 0) for name in ("transBatchA", "transBatchB"))
        return node.op_type in ("FusedConv", "FusedGemm") or (node.op_type == "FusedMatMul" and not batch)
    return node.domain == _BLOCKED


# ------------------------------------------------------------------------------------------------ single operators


@dataclass(frozen=True)
class _Site:
    """What a rewrite works on: the model, its names, outputs and opset, and the channels of tensors in blocks."""

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
    """A layer, what is added to its result, and its activation function."""
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
            f"it is a {pen.node.op_type} of ONNX Runtime's optimizer with the activation function {kind!r}, which is not "
            "known here",
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
    """How many channels the tensors in blocks have: the sets of those that have equally many, and the numbers.

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
        for node in model.graph.all_nodes():
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
        """Note what ``node`` tells; what it tells for certain."""
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
        """Note how many channels a convolution makes; which of the tensors that it reads have as many."""
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
    """Channels of what a ReorderInput puts into blocks."""
    source, axis = node.inputs[0], -1 if node.attributes.get_int("channels_last", 0) else 1
    count = source.shape[axis] if source is not None and source.shape is not None else None
    if not isinstance(count, int):
        raise ModelError(str(node.name), "it puts channels into blocks, and how many there are is not known", _AGAIN)
    return count


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


_REWRITES: dict[tuple[str, str], Callable[[_Site, ir.Node], None]] = {
    (_FUSED, "FusedConv"): _layer,
    (_FUSED, "FusedGemm"): _layer,
    (_FUSED, "FusedMatMul"): _product,
    (_BLOCKED, "Conv"): _convolution,
    (_BLOCKED, "Upsample"): _upsample,
    (_BLOCKED, "ReorderInput"): _reorder,
    (_BLOCKED, "ReorderOutput"): _reorder,
}


@cache
def block_length() -> int:
    """Channels in a block on this machine: what ONNX Runtime makes of a convolution with one output channel."""
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
    """Refuse a result that computes something else than the file on random input.

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
