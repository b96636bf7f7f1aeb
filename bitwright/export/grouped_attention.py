"""Write attention with a cache as ``GroupQueryAttention`` of ONNX Runtime (domain ``com.microsoft``).

In plain operators a step of generation copies the whole cache: ``present = Concat(past, new)``. The operator writes the new
keys and values into the buffer of the past instead, when a runtime hands it the same buffer for both (onnxruntime-genai with
``past_present_share_buffer``), repeats no keys for grouped heads, and makes the causal mask itself, from the number of tokens in
``attention_mask``. Where the simulation quantizes keys and values to symmetric int8 with calibrated scales, the cache holds
these codes. Where a rotation stands around the grids, keys and values are rotated before they enter the cache, queries alike,
and the result is turned back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common as common_passes

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.placement.kv_cache import with_heads
from bitwright.export.qdq.forms import Builder, Place, before
from bitwright.export.qdq.markers import move_uses

DOMAIN, OP_TYPE = "com.microsoft", "GroupQueryAttention"
_MULTIPLE = 8  # of the channels of a head, in kernels of ONNX Runtime
_MOVES = frozenset(("Unsqueeze", "Expand", "Reshape", "Transpose"))


@dataclass(frozen=True)
class CacheNames:
    """Inputs and outputs of a model that hold the keys and values of one layer, ``[batch, heads, tokens, size]``."""

    past_key: str
    past_value: str
    present_key: str
    present_value: str


@dataclass
class _Attention:
    """One attention: ``softmax(cap(q k * scale) + mask) v``, from the graph."""

    query: ir.Value
    key: ir.Node
    value: ir.Node
    scale: float
    softcap: float
    result: ir.Node
    stored: tuple[Encoding | None, Encoding | None]  # what keys and values are on
    turns: tuple[
        NDArray[Any] | None, NDArray[Any] | None
    ]  # what their channels are multiplied by in front of these grids


class _Otherwise(Exception):  # noqa: N818, says why an attention is not of the form
    pass


def can_store(encoding: Encoding | None) -> bool:
    """Whether the operator's cache can hold the codes of an encoding: int8 without zero points, calibrated."""
    if encoding is None or encoding.dynamic or encoding.format != IntFormat(8) or encoding.zero_point.any():
        return False
    return encoding.scale.ndim in (0, 4)


def write_grouped_attention(
    model: ir.Model, caches: Sequence[CacheNames], mask: str, windows: Sequence[int | None],
    stored: Mapping[str, Encoding] | None = None, *, in_float: bool = False,
) -> list[str]:  # fmt: skip
    """Replace the attention of every layer, in place, where it matches the operator.

    Args:
        model: inputs ``past``, outputs ``present``, as in ``caches``, which are joined along axis 2; markers may stand anywhere.
        caches: per layer.
        mask: input ``[batch, past + new]`` of integers, 1 for every token.
        windows: per layer, how many tokens back it sees, itself included; ``None`` for all.
        stored: site -> its encoding, of sites whose codes the cache may hold (:func:`can_store`). Inputs and outputs of the cache
            are then int8.
        in_float: pass over these sites, for a comparison.

    Returns:
        Why a layer keeps its plain operators, one sentence each; nothing where all are replaced. The mask of the model is not
        looked at: compare the outputs of both models.
    """
    ends = {str(v.name): v for v in (*model.graph.inputs, *model.graph.outputs)}
    found: list[_Attention] = []
    kept: list[str] = []
    for layer, names in enumerate(caches):
        try:
            found.append(_attention(ends, names, stored or {}))
        except _Otherwise as reason:
            kept.append(f"attention of layer {layer}: in plain operators, because {reason}")
    if kept or not found:  # a buffer is shared by all layers or by none
        return kept
    if in_float:
        found = [replace(attention, stored=(None, None)) for attention in found]
    builder = Builder(model)
    lengths = _lengths(_Pen(builder, before(found[0].key)), ends[mask])
    for attention, names, window in zip(found, caches, windows, strict=True):
        _replace(builder, attention, names, window, lengths)
    model.graph.opset_imports.setdefault(DOMAIN, 1)
    common_passes.RemoveUnusedNodesPass()(model)
    model.graph.sort()
    return []


def reads_past_length(model: ir.Model, caches: Sequence[CacheNames]) -> bool:
    """Whether another operator depends on the length of the past, which a fixed buffer hides."""
    past = {name for names in caches for name in (names.past_key, names.past_value)}
    for value in (v for v in model.graph.inputs if v.name in past):
        for use in value.uses():
            node = use.node
            if node.op_type == OP_TYPE:
                continue
            start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", 4)
            if node.op_type != "Shape" or start <= 2 < end:
                return True
    return False


def _attention(ends: dict[str, ir.Value], names: CacheNames, stored: Mapping[str, Encoding]) -> _Attention:
    key, value = (
        _joined(ends, *pair) for pair in ((names.past_key, names.present_key), (names.past_value, names.present_value))
    )
    factor, product, of_keys, turn_keys = _product_of(key.outputs[0], stored)
    query = product.inputs[0]
    while query is not None and (scaled := _scaled(query.producer())) is not None:
        query, factor = scaled[0], factor * scaled[1]
    scale, softcap, weights = _to_softmax(product, factor)
    heads = _only_reader(weights.outputs[0])
    if heads.op_type == "Cast":
        heads = _only_reader(heads.outputs[0])
    source, of_values, turn_values = _moved_from(heads.inputs[1], stored) if heads.op_type == "MatMul" else _NOWHERE
    if source is not value.outputs[0]:
        raise _Otherwise(f"the softmax is read by {heads.op_type} {heads.name}, not by a product with the values")
    result = _only_reader(heads.outputs[0])
    while result.op_type in ("Where", "Reshape"):
        result = _only_reader(result.outputs[0])
    if result.op_type != "Transpose" or list(result.attributes.get_ints("perm", [])) != [0, 2, 1, 3]:
        raise _Otherwise(f"its result is read by {result.op_type} {result.name}, not by the transposition to tokens")
    if (of_keys is None) != (of_values is None):
        raise _Otherwise("the cache holds keys and values alike, and only one of them is quantized")
    assert query is not None
    if query.shape is None or not all(isinstance(query.shape[i], int) for i in (1, 3)):
        raise _Otherwise("the numbers of heads are not in the file")
    if int(query.shape[3]) % _MULTIPLE:  # type: ignore[arg-type]
        raise _Otherwise(
            f"heads of {query.shape[3]} channels are none of its kernel, which takes multiples of {_MULTIPLE}"
        )
    turns = (turn_keys, turn_values)
    return _Attention(query, key, value, scale, softcap, result, (of_keys, of_values), turns)


def _joined(ends: dict[str, ir.Value], past: str, present: str) -> ir.Node:
    node = ends[present].producer()
    if node is None or node.op_type != "Concat" or node.inputs[0] is not ends[past] or len(node.inputs) != 2:
        kind = "nothing" if node is None else node.op_type
        what = "a quantizer stands at its cache" if kind == "Site" else f"its cache {present} is made by {kind}"
        raise _Otherwise(what)
    return node


def _only_reader(value: ir.Value, stored: Mapping[str, Encoding] | None = None) -> ir.Node:
    readers = [use.node for use in value.uses() if use.node.op_type != "Shape"]
    if len(readers) != 1:
        raise _Otherwise(f"{value.name} has {len(readers)} readers")
    if readers[0].op_type == "Site" and _site(readers[0]) not in (stored or {}):
        raise _Otherwise(f"a quantizer stands at {value.name}")
    return readers[0]


def _site(node: ir.Node) -> str:
    return node.attributes.get_string("site", "") or ""


def _product_of(
    keys: ir.Value, stored: Mapping[str, Encoding]
) -> tuple[float, ir.Node, Encoding | None, NDArray[Any] | None]:
    """The product of queries with ``keys``, the factor of the keys, their encoding, and the rotation around it."""
    factor, value, found, turn = 1.0, keys, None, None
    while True:
        node = _only_reader(value, stored)
        scaled = _scaled(node)
        if scaled is not None:
            factor *= scaled[1]
        elif node.op_type == "Site":
            found = stored[_site(node)]
        elif (matrix := _rotation(node, value)) is not None:
            turn = matrix if found is None else turn
        elif node.op_type == "MatMul" and node.inputs[1] is value:
            if found is not None and factor != 1:
                raise _Otherwise("its keys are quantized after they are scaled")
            return factor, node, found, turn
        elif node.op_type not in _MOVES:
            raise _Otherwise(f"{node.op_type} {node.name} reads its keys")
        value = node.outputs[0]


def _rotation(node: ir.Node, value: ir.Value | None) -> NDArray[Any] | None:
    """The square matrix that the channels of ``value`` are multiplied by at ``node``, from the right of rows of channels."""
    if node.op_type != "MatMul":
        return None
    for port in (0, 1):
        held, other = node.inputs[1 - port], node.inputs[port]
        constant = None if held is None else ir.convenience.get_const_tensor(held)
        if constant is not None and other is value and constant.shape.rank() == 2:
            matrix = constant.numpy()
            return matrix if port == 0 else matrix.T
    return None


_Moved = tuple[ir.Value | None, Encoding | None, NDArray[Any] | None]
_NOWHERE: _Moved = (None, None, None)


def _moved_from(value: ir.Value | None, stored: Mapping[str, Encoding]) -> _Moved:
    """The source of ``value`` across data movement, its encoding, and the rotation around it."""
    found, turn = None, None
    while value is not None and (node := value.producer()) is not None:
        moving = next((v for v in node.inputs if v is not None and _rotation(node, v) is not None), None)
        if moving is not None:
            turn, value = _rotation(node, moving), moving
            continue
        if node.op_type == "Site" and _site(node) in stored:
            found = stored[_site(node)]
        elif node.op_type not in _MOVES:
            break
        value = node.inputs[0]
    return value, found, turn


def _scaled(node: ir.Node | None) -> tuple[ir.Value, float] | None:
    """The operand and factor of a product or quotient with a scalar constant."""
    if node is None or node.op_type not in ("Mul", "Div"):
        return None
    for port in (1, 0) if node.op_type == "Mul" else (1,):
        held, other = node.inputs[port], node.inputs[1 - port]
        constant = None if held is None else ir.convenience.get_const_tensor(held)
        if constant is not None and constant.size == 1 and other is not None:
            number = float(constant.numpy().reshape(()))
            return other, number if node.op_type == "Mul" else 1 / number
    return None


def _to_softmax(product: ir.Node, factor: float) -> tuple[float, float, ir.Node]:
    """``(scale, softcap, softmax)`` from the product of queries and keys on."""
    softcap, node = 0.0, product
    while True:
        value = node.outputs[0]
        node = _only_reader(value)
        scaled = _scaled(node)
        if scaled is not None:
            factor *= scaled[1]
        elif node.op_type == "Tanh":
            node = _only_reader(node.outputs[0])
            cap = _scaled(node)
            if cap is None:
                raise _Otherwise(f"Tanh is followed by {node.op_type} {node.name}")
            factor, softcap = factor * cap[1], cap[1]
        elif node.op_type == "Softmax":
            return factor, softcap, node
        elif node.op_type not in ("Where", "Add", "Cast"):
            raise _Otherwise(f"{node.op_type} {node.name} stands between the product with the keys and the softmax")


def _lengths(pen: _Pen, mask: ir.Value) -> list[ir.Value]:
    """``(seqlens_k, total_sequence_length)``: the index of the last token of each row, and the length of the mask."""
    ints, to = ir.DataType.INT64, ir.AttrInt64("to", int(ir.DataType.INT32))
    tokens = pen.emit("ReduceSum", [mask, pen.ints([1])], "mask_tokens", ints, ir.AttrInt64("keepdims", 0))
    last = pen.emit("Sub", [tokens, pen.ints([1])], "last_token", ints)
    total = pen.emit("Shape", [mask], "mask_length", ints, ir.AttrInt64("start", 1), ir.AttrInt64("end", 2))
    scalar = pen.emit("Squeeze", [total], "total_tokens", ints)
    return [pen.emit("Cast", [value], f"{value.name}_int32", ir.DataType.INT32, to) for value in (last, scalar)]


@dataclass(frozen=True)
class _Pen:
    """Writes nodes at one place."""

    builder: Builder
    place: Place

    def emit(
        self, op: str, inputs: Sequence[ir.Value], name: str, dtype: ir.DataType, *attributes: ir.Attr
    ) -> ir.Value:
        value = self.builder.emit(self.place, op, inputs, name, dtype)
        value.shape, node = None, value.producer()
        assert node is not None
        for attribute in attributes:
            node.attributes.add(attribute)
        return value

    def turned(self, value: ir.Value, matrix: NDArray[Any] | None, dtype: ir.DataType) -> ir.Value:
        """``value`` with its last axis multiplied by ``matrix``, if there is one."""
        if matrix is None:
            return value
        held = self.builder.initializer(f"{value.name}_rotation", np.ascontiguousarray(matrix))
        return self.emit("MatMul", [value, held], f"{value.name}_rotated", dtype)

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        return self.builder.initializer("grouped_attention_shape", np.array(numbers, np.int64))


def _stored_scales(
    encodings: Sequence[Encoding], groups: int, size: int
) -> tuple[list[NDArray[np.float32]], Literal["PER_TENSOR", "PER_CHANNEL"]]:
    """Scales of keys and of values, and their common form, as the operator requires."""
    found = [with_heads(encoding, groups).scale for encoding in encodings]
    wide = any(scale.ndim for scale in found)
    found = [scale.reshape(scale.shape[1], -1) if scale.ndim else scale for scale in found]
    whole = [np.broadcast_to(scale, (groups, size) if wide else ()).reshape(-1).astype(np.float32) for scale in found]
    return whole, "PER_CHANNEL" if wide else "PER_TENSOR"


def _store_codes(ports: Sequence[ir.Value | None]) -> None:
    for port in ports:
        assert port is not None
        port.dtype = ir.DataType.INT8


def _replace(
    builder: Builder, attention: _Attention, names: CacheNames, window: int | None, lengths: Sequence[ir.Value]
) -> None:
    query, key, value = attention.query, attention.key, attention.value
    past = key.inputs[0]
    assert past is not None and past.shape is not None and query.shape is not None
    heads, size, groups, dtype = query.shape[1], query.shape[3], past.shape[1], past.dtype or ir.DataType.FLOAT
    assert isinstance(heads, int) and isinstance(size, int) and isinstance(groups, int)
    pen = _Pen(builder, before(attention.result))
    flat = []
    turn_keys, turn_values = attention.turns if attention.stored[0] is not None else (None, None)
    parts = ((query, heads, turn_keys), (key.inputs[1], groups, turn_keys), (value.inputs[1], groups, turn_values))
    for source, count, turn in parts:
        assert source is not None
        source = pen.turned(source, turn, dtype)
        perm = ir.AttrInt64s("perm", [0, 2, 1, 3])
        turned = pen.emit("Transpose", [source], f"{source.name}_tokens", dtype, perm)
        flat.append(pen.emit("Reshape", [turned, pen.ints([0, 0, count * size])], f"{source.name}_rows", dtype))
    attributes: list[ir.Attr] = [
        ir.AttrInt64("num_heads", heads),
        ir.AttrInt64("kv_num_heads", groups),
        ir.AttrFloat32("scale", attention.scale),
        ir.AttrInt64("local_window_size", -1 if window is None else window),
    ]
    if attention.softcap:
        attributes.append(ir.AttrFloat32("softcap", attention.softcap))
    inputs: list[ir.Value | None] = [*flat, past, value.inputs[0], *lengths]
    held = [encoding for encoding in attention.stored if encoding is not None]
    if held:
        scales, form = _stored_scales(held, groups, size)
        named = [builder.initializer(f"{names.present_key}_scale", scale) for scale in scales]
        inputs += [*[None] * 5, *named]
        attributes += [ir.AttrString("k_quant_type", form), ir.AttrString("v_quant_type", form)]
        attributes.append(ir.AttrInt64("kv_cache_bit_width", 8))
    node_name = builder.names.node(f"{names.present_key}_attention")
    node = ir.Node(DOMAIN, OP_TYPE, inputs, attributes, num_outputs=3, name=node_name)
    pen.place(node)
    for made, old in zip(node.outputs[1:], (key.outputs[0], value.outputs[0]), strict=True):
        name = str(old.name)
        made.type, made.shape, made.name = old.type, old.shape, name
        move_uses(old, made)
        old.name = builder.names.value(f"{name}_joined")
        builder.outputs.replace(old, made)
        made.name = name
    if held:
        _store_codes((past, value.inputs[0], *node.outputs[1:]))
    rows, old = node.outputs[0], attention.result.outputs[0]
    rows.dtype, rows.name = dtype, builder.names.value(f"{names.present_key}_rows")
    split = pen.emit("Reshape", [rows, pen.ints([0, 0, heads, size])], f"{old.name}_heads", dtype)
    split = pen.turned(split, None if turn_values is None else turn_values.T, dtype)
    split.shape = old.shape
    move_uses(old, split)
