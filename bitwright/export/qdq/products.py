"""What a runtime's optimiser must not see through: products of float activations with quantized weights, and outputs.

ONNX Runtime's default session turns MatMul and Gemm after the DequantizeLinear of a matrix into MatMulNBits, which by
default quantizes the *activations* to eight bits as well, a grid that nobody chose and no simulation contains. A Reshape to
the shape that the weight has keeps the two apart: no optimiser takes it out, and it copies nothing.

Its layout optimiser also moves a quantizer across a Transpose, and where what is transposed is an output of the model, the
model then returns the quantized values (1.31). A Reshape in front of the Transpose, to the shape that is there, stops it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from bitwright.errors import ConfigError, close_matches
from bitwright.export.qdq.forms import Builder, before, read_metadata
from bitwright.export.qdq.markers import Outputs, bypass

ProductForm = Literal["exact", "fused", "nbits"]

_MOVES = frozenset(("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"))
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
    """Every MatMul and Gemm that reads a quantized matrix as its second input, and a first input that is not quantized."""
    return [
        node
        for node in model.graph.all_nodes()
        if node.op_type in ("MatMul", "Gemm")
        and not node.domain
        and _stored_matrix(node.inputs[1])
        and not _dequantized(node.inputs[0])
    ]


def keep_apart(builder: Builder, products: list[ir.Node]) -> None:
    """Put a Reshape between every one of ``products`` and its weight."""
    shapes: dict[tuple[int, ...], ir.Value] = {}
    for node in products:
        weight = node.inputs[1]
        maker = None if weight is None else weight.producer()
        assert weight is not None and maker is not None and maker.inputs[0] is not None
        assert maker.inputs[0].shape is not None
        dims = tuple(int(n) for n in maker.inputs[0].shape.numpy())
        if dims not in shapes:
            shapes[dims] = builder.initializer(f"{weight.name}_shape", np.array(dims, np.int64))
        _put_apart(builder, node, 1, shapes[dims])


def guard_outputs(builder: Builder, nodes: Iterable[ir.Node]) -> None:
    """Put a Reshape between outputs of the model and every Transpose of them that a quantizer reads.

    Args:
        builder: of the model.
        nodes: of the model, those in bodies too.
    """
    found = [node for node in list(nodes) if node.op_type == "Transpose" and not node.domain]
    shapes: dict[int, ir.Value] = {}
    for node in found:
        given = node.inputs[0]
        if given is None or not given.is_graph_output() or not _reaches_quantizer(node):
            continue
        perm = node.attributes.get_ints("perm", ()) or given.shape or ()
        rank = len(perm)
        if rank and rank not in shapes:
            # a length of 0 is that of the input
            shapes[rank] = builder.initializer(f"{given.name}_shape", np.zeros(rank, np.int64))
        if rank:
            _put_apart(builder, node, 0, shapes[rank])


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
    """Take out what :func:`keep_apart` and :func:`guard_outputs` put in, when a model that it wrote is read."""
    apart = [node for node in model.graph.all_nodes() if _APART in node.metadata_props]
    outputs = Outputs(model) if apart else None
    for node in apart:
        shape = node.inputs[1]
        assert outputs is not None
        bypass(node, outputs)
        if shape is not None and not shape.uses() and shape.is_initializer():
            model.graph.initializers.pop(str(shape.name), None)


def _dequantized(value: ir.Value | None) -> bool:
    maker = None if value is None else value.producer()
    return maker is not None and maker.op_type == "DequantizeLinear"


def _stored_matrix(value: ir.Value | None) -> bool:
    """Whether ``value`` is a matrix that DequantizeLinear makes of a constant."""
    maker = None if value is None or not _dequantized(value) else value.producer()
    codes = None if maker is None else maker.inputs[0]
    if value is None or codes is None or not codes.is_initializer():
        return False
    facts = read_metadata(maker) if maker is not None else None
    rank = len(codes.shape) if codes.shape is not None else 0
    return rank == 2 and (facts is None or facts["role"] != "bias")
