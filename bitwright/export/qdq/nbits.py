"""Write products of float activations and 4-bit weights as ONNX Runtime's ``MatMulNBits``.

ONNX Runtime makes this operator of a DequantizeLinear and a MatMul by itself, and then quantizes the activations to 8 bits
(``accuracy_level`` 4). Written into the file with ``accuracy_level`` 1 it unpacks the same weights block by block and multiplies
in float: the simulation's numbers, without a float copy of the weight.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.export.files.onnx_file import all_nodes, array_of
from bitwright.export.qdq.forms import METADATA, Builder, before
from bitwright.export.qdq.markers import Outputs

Array = NDArray[Any]

DOMAIN, OP_TYPE = "com.microsoft", "MatMulNBits"
_FLOAT_LEVEL = 1  # products in float32
_BLOCKS = (128, 64, 32, 16)  # that the kernel knows, of those that scales of channels are repeated over
_KEPT = "bitwright.weight"  # in the metadata of the operator: the DequantizeLinear that it stands for


@dataclass(frozen=True)
class _Packed:
    """A 4-bit weight ``[N, K]``.

    Attributes:
        codes: uint8, counted from zero.
        scales: ``[N, K / block]``.
        zeros: ``[N, K / block]``, uint8.
        block: inner length that shares a scale.
    """

    codes: Array
    scales: Array
    zeros: Array
    block: int


def can_say(node: ir.Node) -> bool:
    """Whether MatMulNBits can replace ``node``, a MatMul or Gemm with a DequantizeLinear of a constant.

    It cannot for other widths than 4 bits, a Gemm with factors or a transposed input, and a weight that several products
    share.
    """
    return packed_weight(node) is not None


def write_nbits(builder: Builder, products: list[ir.Node]) -> list[ir.Node]:
    """Replace ``products``, for which :func:`can_say` holds; returns what stands in their place."""
    written = []
    for node in products:
        packed = packed_weight(node)
        assert packed is not None
        written.append(replace_product(builder, node, packed))
    if written:
        builder.graph.opset_imports.setdefault(DOMAIN, 1)
    return written


def packed_weight(node: ir.Node) -> _Packed | None:
    """The weight of ``node`` in the form of the operator, or ``None``."""
    value = node.inputs[1]
    maker = None if value is None else value.producer()
    if maker is None or len(maker.outputs[0].uses()) != 1 or not is_plain(node):
        return None
    tensor = maker.inputs[0].const_value if maker.inputs[0] is not None else None
    scale = _array(maker, 1)
    if tensor is None or scale is None or tensor.dtype not in (ir.DataType.INT4, ir.DataType.UINT4):
        return None
    turned = node.op_type == "Gemm" and node.attributes.get_int("transB", False)
    codes = tensor.numpy().astype(np.int64)
    zero = _array(maker, 2)
    zeros = np.zeros_like(scale, np.int64) if zero is None else zero.astype(np.int64)
    shift = 8 if tensor.dtype == ir.DataType.INT4 else 0
    axis, inner = maker.attributes.get_int("axis", 1) % 2, 1 if turned else 0
    found = _blocks(scale, zeros, codes.shape, axis, inner, maker.attributes.get_int("block_size", 0))
    if found is None:
        return None
    scales, zeros, block = found
    if not turned:
        codes, scales, zeros = codes.T, scales.T, zeros.T
    return _Packed((codes + shift).astype(np.uint8), scales.astype(np.float32), (zeros + shift).astype(np.uint8), block)


def is_plain(node: ir.Node) -> bool:
    """Whether ``node`` is a MatMul, or a Gemm that is one with a bias at most."""
    if node.op_type == "MatMul":
        return True
    factors = (node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    vector = bias is None or (bias.shape is not None and len(bias.shape) == 1)
    return vector and all(f == 1.0 for f in factors) and not node.attributes.get_int("transA", False)


def _blocks(
    scale: Array, zeros: Array, shape: tuple[int, ...], axis: int, inner: int, size: int
) -> tuple[Array, Array, int] | None:
    """Scales and zero points in blocks along ``inner``, and their length."""
    length = shape[inner]
    if scale.ndim == 2:
        block = size or length // scale.shape[inner]
        fits = axis == inner and scale.shape[inner] == -(-length // block) and block >= 16 and block & (block - 1) == 0
        return (scale, zeros, block) if fits else None
    block = next((size for size in _BLOCKS if length % size == 0), _BLOCKS[-1])
    if scale.ndim == 1 and axis == inner:
        return None
    count = -(-length // block)
    counts = (count, shape[1]) if inner == 0 else (shape[0], count)
    spread = [np.broadcast_to(a if a.ndim == 0 else np.expand_dims(a, inner), counts) for a in (scale, zeros)]
    return spread[0], spread[1], block


def replace_product(builder: Builder, node: ir.Node, packed: _Packed, level: int = _FLOAT_LEVEL) -> ir.Node:
    """Write ``node`` as MatMulNBits with this accuracy level."""
    value = node.inputs[1]
    maker = None if value is None else value.producer()
    assert value is not None and maker is not None and node.inputs[0] is not None
    rows, inner = packed.codes.shape
    blocks = -(-inner // packed.block)
    codes = np.pad(packed.codes, ((0, 0), (0, blocks * packed.block - inner)))  # the kernel reads no further than K
    pairs = codes.reshape(rows, blocks, packed.block // 2, 2)
    stored = (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)
    constants = [
        builder.initializer(f"{value.name}_packed", stored),
        builder.initializer(f"{value.name}_scales", packed.scales.reshape(-1)),
    ]
    inputs: list[ir.Value | None] = [node.inputs[0], *constants]
    bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
    if (packed.zeros != 8).any():
        padded = np.pad(packed.zeros, ((0, 0), (0, blocks % 2)))
        inputs.append(
            builder.initializer(f"{value.name}_zeros", (padded[:, ::2] | padded[:, 1::2] << 4).astype(np.uint8))
        )
    elif bias is not None:
        inputs.append(None)
    if bias is not None:
        inputs += [None, bias]
    attributes = {"K": inner, "N": rows, "bits": 4, "block_size": packed.block, "accuracy_level": level}
    made = ir.Node(
        DOMAIN,
        OP_TYPE,
        inputs,
        [ir.AttrInt64(k, v) for k, v in attributes.items()],
        name=builder.names.node(f"{node.name}_nbits"),
    )
    result, old = made.outputs[0], node.outputs[0]
    result.type, result.shape = old.type, old.shape
    made.metadata_props[_KEPT] = json.dumps({"name": value.name, "facts": maker.metadata_props.get(METADATA, "")})
    before(node)(made)
    name = old.name
    for use in tuple(old.uses()):
        use.node.replace_input_with(use.idx, result)
    builder.outputs.replace(old, result)
    graph = node.graph
    assert graph is not None
    constants_before = list(maker.inputs)
    graph.remove(node, safe=True)
    graph.remove(maker, safe=True)
    result.name = name
    for left in constants_before:
        if left is not None and left.is_initializer() and not left.uses():
            builder.graph.initializers.pop(str(left.name), None)
    return made


def _array(node: ir.Node, port: int) -> Array | None:
    value = node.inputs[port] if len(node.inputs) > port else None
    return array_of(value)


def from_pairs(array: Array, count: int) -> Array:
    """The first ``count`` numbers of 4 bits of every row of bytes; the lower half of a byte comes first."""
    return np.stack([array & 15, array >> 4], -1).reshape(len(array), -1)[:, :count]


def restore_nbits(model: ir.Model) -> None:
    """Undo :func:`write_nbits` when a model is read: write DequantizeLinear and MatMul."""
    found = [n for n in all_nodes(model.graph) if n.op_type == OP_TYPE and _KEPT in n.metadata_props]
    builder = Builder(model) if found else None
    outputs = Outputs(model) if found else None
    for node in found:
        assert builder is not None and outputs is not None
        _restore(builder, outputs, node)


def _restore(builder: Builder, outputs: Outputs, node: ir.Node) -> None:
    kept = json.loads(node.metadata_props[_KEPT])
    stored, scales = _array(node, 1), _array(node, 2)
    assert stored is not None and scales is not None and node.inputs[0] is not None
    rows, blocks, half = stored.shape
    codes = from_pairs(stored.reshape(rows, -1), node.attributes.get_int("K", blocks * half * 2)).astype(np.int8) - 8
    packed = _array(node, 3)
    zeros = np.full((rows, blocks), 8, np.uint8)
    if packed is not None:
        zeros = from_pairs(packed.reshape(rows, -1), blocks)
    name = str(kept["name"])
    four = ir.DataType.INT4
    values = [
        builder.initializer_of(f"{name}_q", ir.Tensor(np.ascontiguousarray(codes.T).astype(four.numpy()), dtype=four)),
        builder.initializer(f"{name}_scale", np.ascontiguousarray(scales.reshape(rows, blocks).T)),
        builder.initializer_of(
            f"{name}_zero_point",
            ir.Tensor(np.ascontiguousarray((zeros.astype(np.int8) - 8).T).astype(four.numpy()), dtype=four),
        ),
    ]
    place, dtype = before(node), node.outputs[0].dtype or ir.DataType.FLOAT
    weight = builder.emit(place, "DequantizeLinear", values, name, dtype, axis=0, block_size=half * 2)
    maker = weight.producer()
    assert maker is not None
    if kept["facts"]:
        facts = json.loads(kept["facts"])
        facts.update(
            {"scale": str(values[1].name), "axis": 0, "perm": [1, 0] if facts.get("perm") else [], "format": "int4"}
        )
        maker.metadata_props[METADATA] = json.dumps(facts)
    bias = node.inputs[5] if len(node.inputs) > 5 else None
    result = builder.emit(place, "MatMul", [node.inputs[0], weight], f"{node.outputs[0].name}_product", dtype)
    if bias is not None:
        result = builder.emit(place, "Add", [result, bias], f"{node.outputs[0].name}_sum", dtype)
    old = node.outputs[0]
    for use in tuple(old.uses()):
        use.node.replace_input_with(use.idx, result)
    outputs.replace(old, result)
    name_of, graph = old.name, node.graph
    assert graph is not None
    graph.remove(node, safe=True)
    result.name = name_of
