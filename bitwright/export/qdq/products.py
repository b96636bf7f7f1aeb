"""Products of float activations with quantized weights, and what a runtime makes of them.

ONNX Runtime's default session turns MatMul and Gemm behind the DequantizeLinear of a matrix into MatMulNBits, which by
default quantizes the *activations* to eight bits as well, a grid that nobody chose and no simulation contains. A Reshape to
the shape that the weight has keeps the two apart: no optimiser takes it out, and it copies nothing.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from bitwright.errors import ConfigError, close_matches
from bitwright.export.qdq.forms import Builder, before, read_metadata
from bitwright.export.qdq.markers import Outputs, bypass

ProductForm = Literal["exact", "fused"]

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
        shape = shapes[dims]
        dtype = weight.dtype or ir.DataType.FLOAT
        apart = builder.emit(before(node), "Reshape", [weight, shape], f"{weight.name}_apart", dtype)
        maker = apart.producer()
        assert maker is not None
        maker.metadata_props[_APART] = ""
        node.replace_input_with(1, apart)


def join_again(model: ir.Model) -> None:
    """Take out what :func:`keep_apart` put in, when a model that it wrote is read."""
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
