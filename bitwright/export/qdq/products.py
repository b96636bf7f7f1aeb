"""Barriers against a runtime's optimiser: products of float activations with quantized weights, and outputs.

ONNX Runtime's default session turns MatMul and Gemm after the DequantizeLinear of a matrix into MatMulNBits, which by
default quantizes the *activations* to eight bits as well, a grid that no simulation contains. A Reshape to
the shape that the weight has keeps the two apart: no optimiser takes it out, and it copies nothing.

Its layout optimiser also moves a quantizer across a Transpose, and where what is transposed is an output of the model, the
model then returns the quantized values (1.31). A Reshape in front of the Transpose, to the shape that is there, stops it.
Where an output is what a DequantizeLinear makes, others read it too, and Transposes move across it, float kernels are handed
the tensor in the wrong layout (1.31, ``session.disable_quant_qdq=1``): an error, or wrong numbers where the lengths happen to
fit. The output is a Reshape of it then, too.

A layer in float between quantizers gets them as well: the session quantizes its constant weight to 8 bits per tensor, and its
bias to 32 (1.31). A Sum of its input alone keeps the layer apart from the quantizer in front, which a Reshape does not.

Two pairs of quantizers in a row, of different grids, become one pair on the part of the range that both hold (1.31), whose codes
are others than those of the second pair. A Sum between them keeps both.

A Softmax over one entry is 1. Between quantizers the runtime makes QLinearSoftmax of it, whose integers overflow there: it
answers 0 (1.31).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from bitwright.core.graph.operators import TRAITS
from bitwright.errors import ConfigError, close_matches
from bitwright.export.files.onnx_file import all_nodes
from bitwright.export.qdq.forms import Builder, after, before, read_metadata
from bitwright.export.qdq.markers import Outputs, bypass

ProductForm = Literal["exact", "fused", "nbits"]

_MOVES = frozenset((*TRAITS["reshape"], "Transpose", "Identity"))
_INTEGERS = (ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.UINT16, ir.DataType.INT16)
_APART = "bitwright.apart"  # in the metadata of the Reshape


def check_weight_only(form: str) -> None:
    """Refuse an unknown value of the option ``weight_only``.

    Raises:
        ConfigError: with close matches.
    """
    known = get_args(ProductForm)
    if form not in known:
        problem = f"{form!r} is not a value of this option{close_matches(str(form), known)}"
        raise ConfigError("weight_only", problem, f"use one of {', '.join(map(repr, known))}")


def float_products(model: ir.Model) -> list[ir.Node]:
    """Every MatMul and Gemm that reads a quantized matrix as its second input, and a first input that is not quantized.

    In half precision a Cast stands in between, which the runtime takes out, so that it makes the same of them as in float32.
    Not so in front of the first input of a MatMul whose bias follows: it puts a Reshape there, which no integer kernel has.
    """
    return [
        node
        for node in all_nodes(model.graph)
        if node.op_type in ("MatMul", "Gemm")
        and not node.domain
        and _stored_matrix(node.inputs[1])
        and (_dequantizer(node.inputs[0]) is None or _is_cast_before_bias(node))
    ]


def _is_cast_before_bias(node: ir.Node) -> bool:
    """Whether a Cast makes the first input of a MatMul, and its result is read by an Add alone."""
    maker, readers = None if node.inputs[0] is None else node.inputs[0].producer(), node.outputs[0].uses()
    if node.op_type != "MatMul" or maker is None or maker.op_type != "Cast":
        return False
    return len(readers) == 1 and all(use.node.op_type == "Add" for use in readers)


def products_without_kernel(model: ir.Model) -> list[ir.Node]:
    """Products of integer activations with a dequantized constant that is not stored as integers, such as float8.

    ONNX Runtime takes the quantizers around them for those of an integer kernel, and then refuses the file (1.31).
    """
    layers = ("MatMul", "Gemm", "Conv", "ConvTranspose")
    return [
        node
        for node in all_nodes(model.graph)
        if node.op_type in layers and not node.domain and _holds_floats(node.inputs[1])
        if (given := _codes(node.inputs[0])) is not None and given.dtype in _INTEGERS
    ]


def keep_both_pairs(builder: Builder, nodes: Iterable[ir.Node]) -> None:
    """Insert a Sum of one value between two consecutive pairs of quantizers with different grids.

    Args:
        builder: of the model.
        nodes: of the model, those in bodies too.
    """
    for node in [node for node in nodes if node.op_type == "QuantizeLinear" and _follows_other_grid(node)]:
        _put_sum(builder, node)


def _follows_other_grid(node: ir.Node) -> bool:
    """Whether a QuantizeLinear is the only reader of another pair's DequantizeLinear, with another grid."""
    value = node.inputs[0]
    while value is not None and (maker := value.producer()) is not None and maker.op_type == "Identity":
        value = maker.inputs[0]
    pair = None if value is None else value.producer()
    if value is None or pair is None or pair.op_type != "DequantizeLinear":
        return False
    codes = pair.inputs[0]
    return codes is not None and codes.producer() is not None and len(value.uses()) == 1 and _grid(pair) != _grid(node)


def _grid(node: ir.Node) -> list[object]:
    """Scale and zero point of a quantizer: the bytes of constants, other values themselves."""
    return [
        value if value is None or value.const_value is None else (value.dtype, value.const_value.tobytes())
        for value in node.inputs[1:]
    ]


def keep_in_float(builder: Builder, model: ir.Model, floats: Container[ir.Value] = ()) -> list[ir.Node]:
    """Insert a Sum of one value between quantizers and every layer with a constant weight without DequantizeLinear.

    Args:
        builder, model: a model and what changes it.
        floats: weights on a grid of floats whose codes are integers: an integer kernel would take their float bias for int32.

    Returns:
        The layers.
    """
    found = [
        node
        for node in all_nodes(model.graph)
        if node.op_type in ("Gemm", "MatMul", "Conv", "ConvTranspose") and not node.domain
        if _dequantizer(node.inputs[0]) is not None
        if _is_float_constant(node, node.inputs[1]) or (node.inputs[1] in floats and _has_float_bias(node))
    ]
    for node in found:
        _put_sum(builder, node)
    return found


def _put_sum(builder: Builder, node: ir.Node) -> None:
    """A Sum of one value in front of the first input of ``node``."""
    value = node.inputs[0]
    assert value is not None
    apart = builder.emit(before(node), "Sum", [value], f"{value.name}_apart", value.dtype or ir.DataType.FLOAT)
    maker = apart.producer()
    assert maker is not None
    maker.metadata_props[_APART] = ""
    node.replace_input_with(0, apart)


def _has_float_bias(node: ir.Node) -> bool:
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    return bias is not None and _dequantizer(bias) is None


def _is_float_constant(node: ir.Node, value: ir.Value | None) -> bool:
    """Whether ``value`` is computed from constants in the graph of ``node`` without DequantizeLinear."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        maker = None if one is None else one.producer()
        if maker is not None and maker.op_type not in ("DequantizeLinear", "Constant") and maker.inputs:
            waiting.extend(maker.inputs)
        elif (
            one is None
            or one.graph is not node.graph
            or not (one.is_initializer() or (maker is not None and maker.op_type == "Constant"))
        ):
            return False
    return True


def keep_apart(builder: Builder, products: list[ir.Node]) -> None:
    """Insert a Reshape between each of ``products`` and its weight."""
    shapes: dict[tuple[int, ...], ir.Value] = {}
    for node in products:
        weight = node.inputs[1]
        maker = _dequantizer(weight)
        assert weight is not None and maker is not None and maker.inputs[0] is not None
        assert maker.inputs[0].shape is not None
        dims = tuple(int(n) for n in maker.inputs[0].shape.numpy())
        if dims not in shapes:
            shapes[dims] = builder.initializer(f"{weight.name}_shape", np.array(dims, np.int64))
        _put_apart(builder, node, 1, shapes[dims])


def guard_outputs(builder: Builder, nodes: Iterable[ir.Node]) -> None:
    """Insert a Reshape between graph outputs and every Transpose of them that a quantizer reads.

    Outputs that a DequantizeLinear makes, for other readers too, become copies where the model has a Transpose.

    Args:
        builder: of the model.
        nodes: of the model, those in bodies too.
    """
    found = [node for node in nodes if _is_transpose(node)]
    shapes: dict[int, ir.Value] = {}
    for value in dict.fromkeys(builder.graph.outputs) if found else ():
        copy = _copy_of(builder, value, shapes)
        if copy is not value:
            name = str(value.name)
            builder.outputs.replace(value, copy)
            value.name = builder.names.value(f"{name}_raw")
    _guard_transposes(builder, found, shapes)


def fill_softmax(builder: Builder, nodes: Iterable[ir.Node]) -> None:
    """Replace every float32 Softmax over a single element by ones."""
    for node in nodes:
        value = node.outputs[0] if node.op_type == "Softmax" and not node.domain else None
        if value is None or not value.shape or value.dtype != ir.DataType.FLOAT:
            continue
        if value.shape[node.attributes.get_int("axis", -1) % len(value.shape)] != 1:
            continue
        given = node.inputs[0]
        assert given is not None
        lengths = builder.emit(before(node), "Shape", [given], f"{value.name}_lengths", ir.DataType.INT64)
        lengths.shape = ir.Shape([len(value.shape)])
        builder.become(node, "Expand", [builder.initializer(f"{value.name}_one", np.array(1, np.float32)), lengths])


def show(builder: Builder, values: Iterable[ir.Value]) -> dict[ir.Value, ir.Value]:
    """Let a model return more of its values, guarded as :func:`guard_outputs` does.

    Args:
        builder: of the model.
        values: of its main graph.

    Returns:
        Value -> the output that shows it: the value itself, or a copy.
    """
    graph = builder.graph
    there, turned = set(graph.outputs), any(map(_is_transpose, all_nodes(graph)))
    shown = {value: value for value in values}
    added = [value for value in shown if value not in there and not value.is_graph_input()]
    shapes: dict[int, ir.Value] = {}
    if turned:
        shown.update((value, _copy_of(builder, value, shapes)) for value in added)
    graph.outputs.extend(shown[value] for value in added)
    readers = dict.fromkeys(use.node for value in added if shown[value] is value for use in value.uses())
    _guard_transposes(builder, filter(_is_transpose, readers), shapes)
    return shown


def _is_transpose(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and not node.domain


def _guard_transposes(builder: Builder, found: Iterable[ir.Node], shapes: dict[int, ir.Value]) -> None:
    for node in found:
        given = node.inputs[0]
        if given is None or not given.is_graph_output() or not _reaches_quantizer(node):
            continue
        perm = node.attributes.get_ints("perm", ()) or given.shape or ()
        rank = len(perm)
        if rank:
            _put_apart(builder, node, 0, _same_shape(builder, rank, shapes))


def _copy_of(builder: Builder, value: ir.Value, shapes: dict[int, ir.Value]) -> ir.Value:
    """A Reshape of ``value`` to its shape where it must not be an output of a model with Transposes itself; else the value.

    An Identity would be taken out, here and there with what it copies (1.31).
    """
    maker, rank = value.producer(), len(value.shape or ())
    if maker is None or maker.op_type != "DequantizeLinear" or maker.domain or not value.uses() or rank < 2:
        return value
    dtype = value.dtype or ir.DataType.FLOAT
    operands = [value, _same_shape(builder, rank, shapes)]
    copy = builder.emit(after(maker), "Reshape", operands, f"{value.name}_copy", dtype)
    node = copy.producer()
    assert node is not None
    node.metadata_props[_APART] = ""
    return copy


def _same_shape(builder: Builder, rank: int, shapes: dict[int, ir.Value]) -> ir.Value:
    """The shape that a Reshape keeps: a length of 0 is that of the input."""
    if rank not in shapes:
        shapes[rank] = builder.initializer("same_shape", np.zeros(rank, np.int64))
    return shapes[rank]


def _put_apart(builder: Builder, node: ir.Node, port: int, shape: ir.Value) -> None:
    """A Reshape to ``shape`` in front of one input of ``node``."""
    value = node.inputs[port]
    assert value is not None
    dtype = value.dtype or ir.DataType.FLOAT
    apart = builder.emit(before(node), "Reshape", [value, shape], f"{value.name}_apart", dtype)
    maker = apart.producer()
    assert maker is not None
    maker.metadata_props[_APART] = ""
    node.replace_input_with(port, apart)


def _reaches_quantizer(node: ir.Node) -> bool:
    """Whether a QuantizeLinear reads what ``node`` makes, directly or across operators that move elements."""
    seen, waiting = {node}, [node]
    while waiting:
        for value in waiting.pop().outputs:
            for reader, port in value.uses():
                if reader.op_type == "QuantizeLinear":
                    return True
                if port == 0 and reader.op_type in _MOVES and reader not in seen:
                    seen.add(reader)
                    waiting.append(reader)
    return False


def join_again(model: ir.Model) -> None:
    """Remove the barriers, nodes with ``_APART`` in their metadata, when a model is read."""
    apart = [node for node in all_nodes(model.graph) if _APART in node.metadata_props]
    outputs = Outputs(model) if apart else None
    for node in apart:
        shape = node.inputs[1] if len(node.inputs) > 1 else None
        assert outputs is not None
        bypass(node, outputs)
        if shape is not None and not shape.uses() and shape.is_initializer():
            model.graph.initializers.pop(str(shape.name), None)


def _dequantizer(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear that computes ``value``, across Casts."""
    maker = None if value is None else value.producer()
    while maker is not None and maker.op_type == "Cast" and not maker.domain:
        maker = None if maker.inputs[0] is None else maker.inputs[0].producer()
    return maker if maker is not None and maker.op_type == "DequantizeLinear" else None


def _codes(value: ir.Value | None) -> ir.Value | None:
    """The codes of ``value``, the output of a DequantizeLinear."""
    maker = _dequantizer(value)
    return None if maker is None else maker.inputs[0]


def _holds_floats(value: ir.Value | None) -> bool:
    """Whether DequantizeLinear makes ``value`` of a constant that holds small floats."""
    codes = _codes(value)
    if codes is None or not codes.is_initializer() or codes.dtype is None:
        return False
    return codes.dtype.is_floating_point()


def _stored_matrix(value: ir.Value | None) -> bool:
    """Whether ``value`` is a dequantized constant matrix."""
    maker = _dequantizer(value)
    codes = None if maker is None else maker.inputs[0]
    if value is None or codes is None or not codes.is_initializer():
        return False
    facts = read_metadata(maker) if maker is not None else None
    rank = len(codes.shape) if codes.shape is not None else 0
    return rank == 2 and (facts is None or facts["role"] != "bias")
