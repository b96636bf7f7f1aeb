"""Gather rows of a quantized table as codes, then dequantize them.

A DequantizeLinear in front of a Gather is computed whole in every run of ONNX Runtime (1.31): for a vocabulary of 50,000 words
some milliseconds, whatever the length of the sentence. After the Gather it computes the rows that were asked for, and the same
numbers:

==============================  ==================================================================================
scales                          becomes
==============================  ==================================================================================
one, or along another axis      Gather of the codes, DequantizeLinear
one per row                     Gather of the codes and of the scales, Cast, Sub where zero points are not zero, Mul
blocks along another axis       Gather of the codes, scales and zero points, DequantizeLinear in blocks
4 bits                          ``GatherBlockQuantized``, ONNX Runtime's own operator, where its blocks fit; else codes
                                in 8 bits, because Gather knows no 4-bit type
==============================  ==================================================================================

A table that a matrix product reads too, as the output layer of a language model does, is stored once: rows are gathered from what
the product reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.export.files.onnx_file import all_nodes, array_of
from bitwright.export.qdq.forms import METADATA, Builder, before, damaged_metadata, read_metadata
from bitwright.export.qdq.markers import Outputs, copy_model, remove_unread
from bitwright.export.qdq.nbits import from_pairs

Array = NDArray[Any]
D = ir.DataType

OP_TYPE, DOMAIN = "GatherBlockQuantized", "com.microsoft"
_BLOCKS = (256, 128, 64, 32, 16)  # that scales of rows are repeated over
_KEPT = "bitwright.table"  # in the metadata of the last operator: the DequantizeLinear that it stands for
_WIDE = {D.INT4: D.INT8, D.UINT4: D.UINT8}
_GATHERED = frozenset((D.INT8, D.UINT8, D.INT16, D.UINT16, *_WIDE))


@dataclass(frozen=True)
class _Table:
    """A stored table as a Gather finds it.

    Attributes:
        codes, scale, zero: initializers; no zero point where all are zero.
        axis, block: of the DequantizeLinear; ``axis`` is ``None`` for one scale.
        along: axis of the table that is indexed.
        perm: how the table was turned when it was stored; empty for not at all.
    """

    codes: ir.Value
    scale: ir.Value
    zero: ir.Value | None
    axis: int | None
    block: int
    along: int
    perm: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """Number of axes of the table."""
        assert self.codes.shape is not None
        return len(self.codes.shape)

    @property
    def by_row(self) -> bool:
        """Whether scales are exactly per index."""
        return not self.block and self.axis == self.along

    @property
    def axis_after(self) -> int:
        """The axis of the scales after the Gather, however many axes the indices have."""
        assert self.axis is not None
        return self.axis - self.rank if self.axis > self.along else self.axis


def write_lookups(builder: Builder) -> None:
    """Let every Gather of a stored table read codes where the result is equal.

    Tables with blocks along the axis that is indexed stay as they are, as do those that are computed in half precision.
    """
    tables = [node for node in all_nodes(builder.graph) if _is_table(node)]
    others = _stored_for_others(tables)
    made: dict[tuple[ir.Value, str], ir.Value] = {}
    for node in tables:
        for gather in [n for n, port in node.outputs[0].uses() if port == 0 and _can_move(n)]:
            table = _table(node, gather.attributes.get_int("axis", 0))
            if table is not None:
                table = _shared(table, node, others.get(_key(node), ()), gather)
                _write(builder, node, gather, table, made)
        remove_unread(node.outputs[0])


def _is_gather(node: ir.Node) -> bool:
    return node.op_type == "Gather" and not node.domain


def _can_move(node: ir.Node) -> bool:
    """Whether a DequantizeLinear may follow ``node``; not where operators read a graph output that it would compute.

    See :func:`bitwright.export.qdq.products.guard_outputs`.
    """
    made = node.outputs[0]
    return _is_gather(node) and not (made.is_graph_output() and made.uses())


def _is_table(node: ir.Node) -> bool:
    """Whether ``node`` makes a float constant of ours, with integer codes that can be gathered."""
    codes = node.inputs[0] if node.op_type == "DequantizeLinear" and not node.domain else None
    if codes is None or not codes.is_initializer() or codes.const_value is None:
        return False
    facts = read_metadata(node)
    known = facts is not None and facts["role"] == "constant" and codes.dtype in _GATHERED
    return known and codes.shape is not None and len(codes.shape) > 0 and node.outputs[0].dtype == D.FLOAT


def _table(node: ir.Node, along: int) -> _Table | None:
    """The table that ``node`` dequantizes, indexed along an axis; ``None`` where its blocks lie along that."""
    codes, scale = node.inputs[:2]
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    assert codes is not None and scale is not None and codes.shape is not None
    rank = len(codes.shape)
    numbers = array_of(zero)
    zero = zero if numbers is not None and numbers.astype(np.int64).any() else None
    axis = node.attributes.get_int("axis", 1) % rank if scale.shape is not None and len(scale.shape) else None
    block = node.attributes.get_int("block_size", 0)
    along %= rank
    return None if block and axis == along else _Table(codes, scale, zero, axis, block, along)


# ------------------------------------------------------------------------------------------- tables that products read


def _key(node: ir.Node) -> object:
    """A key that equal tables share: sorted shape and number of scales."""
    codes, scale = node.inputs[:2]
    assert codes is not None and scale is not None and codes.shape is not None and scale.shape is not None
    return tuple(sorted(map(int, codes.shape.numpy()))), tuple(sorted(map(int, scale.shape.numpy())))


def _stored_for_others(tables: Iterable[ir.Node]) -> dict[object, list[ir.Node]]:
    """Tables that something else than a Gather reads, by :func:`_key`."""
    found: dict[object, list[ir.Node]] = {}
    for node in tables:
        if not all(_is_gather(reader) for reader, _ in node.outputs[0].uses()):
            found.setdefault(_key(node), []).append(node)
    return found


def _shared(table: _Table, node: ir.Node, others: Iterable[ir.Node], gather: ir.Node) -> _Table:
    """``table`` in the form stored for another reader, if there is one."""
    found = (other for one in others if one is not node for other in _readings(table, one, gather))
    return next((other for other in found if _same_numbers(table, other)), table)


def _readings(table: _Table, node: ir.Node, gather: ir.Node) -> Iterator[_Table]:
    """Yield readings of the table that ``node`` dequantizes, as stored and transposed."""
    indices = gather.inputs[1]
    orders: list[tuple[int, ...]] = [()]
    if table.rank == 2 and indices is not None and indices.shape is not None:
        orders.append((1, 0))
    for perm in orders:
        other = _table(node, perm.index(table.along) if perm else table.along)
        if other is not None:
            yield replace(other, perm=perm)


def _same_numbers(table: _Table, other: _Table) -> bool:
    """Whether both hold the same codes on the same grid."""
    perm = other.perm or tuple(range(table.rank))
    axis = None if other.axis is None else perm[other.axis]
    if (axis, other.block) != (table.axis, table.block) or (table.zero is None) != (other.zero is None):
        return False
    if _wide_type(table.codes) != _wide_type(other.codes):
        return False
    pairs = ((table.scale, other.scale), (table.zero, other.zero), (table.codes, other.codes))
    return all(_equal(array_of(one), array_of(two), perm) for one, two in pairs)


def _equal(one: Array | None, two: Array | None, perm: tuple[int, ...]) -> bool:
    """Whether ``two`` equals ``one``, permuted by ``perm`` where it has the axes of the table."""
    if one is None or two is None:
        return one is two
    turned = one.transpose(perm) if one.ndim == len(perm) else one
    kind = np.float32 if one.dtype.kind == "f" else np.int32
    return np.array_equal(turned.astype(kind), two.astype(kind))


def _wide_type(value: ir.Value) -> ir.DataType | None:
    return None if value.dtype is None else _WIDE.get(value.dtype, value.dtype)


# ---------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class _Pen:
    """Writes the operators that replace a Gather, named after its output."""

    builder: Builder
    gather: ir.Node
    along: int
    made: dict[tuple[ir.Value, str], ir.Value]

    def emit(self, op: str, inputs: list[ir.Value], suffix: str, dtype: ir.DataType, **attributes: int) -> ir.Value:
        name = f"{self.gather.outputs[0].name}_{suffix}"
        made = self.builder.emit(before(self.gather), op, inputs, name, dtype, **attributes)
        made.shape = None
        return made

    def rows(self, table: ir.Value, suffix: str) -> ir.Value:
        """The requested rows of ``table``."""
        indices, dtype = self.gather.inputs[1], table.dtype or D.FLOAT
        assert indices is not None
        return self.emit("Gather", [table, indices], suffix, dtype, axis=self.along)

    def constant(self, like: ir.Value, suffix: str, array: Array, dtype: ir.DataType) -> ir.Value:
        """An initializer beside ``like``, shared by all that request it."""
        key = (like, suffix)
        if key not in self.made:
            tensor = ir.Tensor(array, dtype=dtype)
            self.made[key] = self.builder.initializer_of(f"{like.name}_{suffix}", tensor)
        return self.made[key]


def _write(
    builder: Builder, node: ir.Node, gather: ir.Node, table: _Table, made: dict[tuple[ir.Value, str], ir.Value]
) -> None:
    """Replace ``gather`` by the operators for ``table``, and record it in their metadata."""
    pen = _Pen(builder, gather, table.along, made)
    packed = _packed(table) if table.codes.dtype in _WIDE else None
    if packed is not None:
        last = _write_packed(pen, packed)
    elif table.by_row:
        last = _write_rows(pen, table)
    else:
        last = _write_linear(pen, table)
    last = _turn_back(pen, last, table)
    facts = {
        "name": node.outputs[0].name,
        "facts": node.metadata_props.get(METADATA, ""),
        "axis": gather.attributes.get_int("axis", 0),
        "perm": table.perm,
        "type": None if table.codes.dtype is None else table.codes.dtype.name,
    }
    _replace(builder, gather, last, facts)


def _codes(pen: _Pen, value: ir.Value) -> ir.Value:
    """``value`` in a type that Gather supports."""
    wide, array = _WIDE.get(value.dtype or D.FLOAT), array_of(value)
    if wide is None:
        return value
    assert array is not None
    return pen.constant(value, "wide", array.astype(wide.numpy()), wide)


def _write_linear(pen: _Pen, table: _Table) -> ir.Value:
    params = [table.scale] if table.zero is None else [table.scale, _codes(pen, table.zero)]
    if table.block:
        params = [pen.rows(value, name) for value, name in zip(params, ("scale", "zero_point"), strict=False)]
    attributes = {} if table.axis is None else {"axis": table.axis_after}
    if table.block:
        attributes["block_size"] = table.block
    codes = pen.rows(_codes(pen, table.codes), "codes")
    return pen.emit("DequantizeLinear", [codes, *params], "dq", D.FLOAT, **attributes)


def _write_rows(pen: _Pen, table: _Table) -> ir.Value:
    shape = [1] * table.rank
    shape[table.along] = -1
    scale, zero = array_of(table.scale), array_of(table.zero)
    assert scale is not None
    value = pen.rows(_codes(pen, table.codes), "codes")
    value = pen.emit("Cast", [value], "wide", D.FLOAT, to=int(D.FLOAT))
    if zero is not None and table.zero is not None:
        zeros = pen.constant(table.zero, f"axis{table.along}", zero.astype(np.float32).reshape(shape), D.FLOAT)
        value = pen.emit("Sub", [value, pen.rows(zeros, "zero_point")], "centred", D.FLOAT)
    steps = pen.constant(table.scale, f"axis{table.along}", scale.reshape(shape), D.FLOAT)
    return pen.emit("Mul", [value, pen.rows(steps, "scale")], "dq", D.FLOAT)


def _turn_back(pen: _Pen, value: ir.Value, table: _Table) -> ir.Value:
    """``value`` with the axes of rows of an untransposed table."""
    if not table.perm:
        return value
    indices = pen.gather.inputs[1]
    assert indices is not None and indices.shape is not None
    more = len(indices.shape)
    spread: dict[int, list[int]] = {}  # axis of the table before it was turned -> axes of ``value``
    at = 0
    for place, axis in enumerate(table.perm):
        width = more if place == table.along else 1
        spread[axis] = list(range(at, at + width))
        at += width
    perm = [axis for before_turn in range(table.rank) for axis in spread[before_turn]]
    made = pen.emit("Transpose", [value], "turned", D.FLOAT)
    node = made.producer()
    assert node is not None
    node.attributes.add(ir.AttrInt64s("perm", perm))
    return made


def _replace(builder: Builder, gather: ir.Node, last: ir.Value, kept: dict[str, Any]) -> None:
    """Replace ``gather`` by ``last``."""
    node, old = last.producer(), gather.outputs[0]
    assert node is not None and gather.graph is not None
    name = old.name
    last.type, last.shape = old.type, old.shape
    for use in tuple(old.uses()):
        use.node.replace_input_with(use.idx, last)
    builder.outputs.replace(old, last)
    gather.graph.remove(gather, safe=True)
    last.name = name
    node.metadata_props[_KEPT] = json.dumps({**kept, "node": gather.name})


# ---------------------------------------------------------------------------------------------------------- packed


@dataclass(frozen=True)
class _Packed:
    """A 4-bit matrix in the form of ``GatherBlockQuantized``: arrays of uint8 or float32, two codes in a byte."""

    like: ir.Value
    codes: Array
    scales: Array
    zeros: Array | None
    block: int


def _packed(table: _Table) -> _Packed | None:
    """The table in the operator's form; ``None`` where its blocks do not divide a row."""
    codes, scale = array_of(table.codes), array_of(table.scale)
    if codes is None or scale is None or table.rank != 2 or table.along != 0 or codes.shape[1] % 2:
        return None
    rows, width = codes.shape
    block = table.block or next((size for size in _BLOCKS if width % size == 0), 0)
    if block < 16 or block & (block - 1) or width % block or (table.axis == 1 and not table.block):
        return None
    counts = (rows, width // block)
    shift = 8 if table.codes.dtype == D.INT4 else 0
    zero = array_of(table.zero)
    zeros = np.zeros_like(scale, np.int64) if zero is None else zero.astype(np.int64)
    scales, zeros = (np.broadcast_to(a[:, None] if a.ndim == 1 else a, counts) for a in (scale, zeros + shift))
    return _Packed(
        table.codes,
        _in_pairs(codes.astype(np.int64) + shift),
        np.ascontiguousarray(scales, np.float32),
        _in_pairs(zeros) if (zeros != 8).any() else None,
        block,
    )


def _in_pairs(array: Array) -> Array:
    """Pack 4-bit numbers, two in a byte, along the last axis."""
    even = np.pad(array, ((0, 0), (0, array.shape[1] % 2))).astype(np.uint8)
    return np.asarray(even[:, ::2] | even[:, 1::2] << 4)


def _write_packed(pen: _Pen, packed: _Packed) -> ir.Value:
    indices = pen.gather.inputs[1]
    assert indices is not None
    inputs = [pen.constant(packed.like, "packed", packed.codes, D.UINT8), indices]
    inputs.append(pen.constant(packed.like, "scales", packed.scales, D.FLOAT))
    if packed.zeros is not None:
        inputs.append(pen.constant(packed.like, "zeros", packed.zeros, D.UINT8))
    made = pen.emit(OP_TYPE, inputs, "dq", D.FLOAT, bits=4, block_size=packed.block, gather_axis=0, quantize_axis=1)
    node = made.producer()
    assert node is not None
    node.domain = DOMAIN
    pen.builder.graph.opset_imports.setdefault(DOMAIN, 1)
    return made


# ---------------------------------------------------------------------------------------------------------- reading


def restore_lookups(model: ir.Model) -> None:
    """Undo :func:`write_lookups` when a model is read: write DequantizeLinear and Gather."""
    found = [node for node in all_nodes(model.graph) if _KEPT in node.metadata_props]
    if not found:
        return
    builder, outputs = Builder(model), Outputs(model)
    tables = {str(node.outputs[0].name): node.outputs[0] for node in all_nodes(model.graph) if _is_table(node)}
    for node in found:
        _restore(builder, outputs, node, tables)


def with_tables(model: ir.Model) -> ir.Model:
    """A copy of ``model`` in which tables are dequantized before rows are looked up in them."""
    copy = copy_model(model)
    restore_lookups(copy)
    return copy


def _restore(builder: Builder, outputs: Outputs, node: ir.Node, tables: dict[str, ir.Value]) -> None:
    kept, indices = _kept(node), _indices(node)
    old, name = node.outputs[0], str(kept["name"])
    if name not in tables:
        tables[name] = _dequantized(builder, node, kept)
    made = builder.emit(before(node), "Gather", [tables[name], indices], f"{old.name}_rows", D.FLOAT, axis=kept["axis"])
    made.shape, label = old.shape, old.name
    for use in tuple(old.uses()):
        use.node.replace_input_with(use.idx, made)
    outputs.replace(old, made)
    remove_unread(old)
    made.name = label
    maker = made.producer()
    assert maker is not None
    maker.name = str(kept["node"])


def _kept(node: ir.Node) -> dict[str, Any]:
    try:
        kept: dict[str, Any] = json.loads(node.metadata_props[_KEPT])
        json.loads(kept["facts"])
        ir.DataType[kept["type"]]
        return {**kept, "perm": tuple(map(int, kept["perm"])), "axis": int(kept["axis"])}
    except (ValueError, TypeError, KeyError) as error:
        raise damaged_metadata(node) from error


def _chain(node: ir.Node) -> Iterator[ir.Node]:
    """``node`` and the producers of its first input, up to the operator that gathers codes."""
    at: ir.Node | None = node
    while at is not None:
        yield at
        if at.op_type in ("Gather", OP_TYPE):
            return
        at = None if at.inputs[0] is None else at.inputs[0].producer()
    raise damaged_metadata(node)


def _indices(node: ir.Node) -> ir.Value:
    *_, gather = _chain(node)
    indices = gather.inputs[1]
    if indices is None:
        raise damaged_metadata(node)
    return indices


def _dequantized(builder: Builder, node: ir.Node, kept: dict[str, Any]) -> ir.Value:
    """The whole table in float at the start of the graph, as before :func:`write_lookups`."""
    stored, name = _stored(node, ir.DataType[kept["type"]], kept["perm"]), str(kept["name"])
    kind = ir.DataType.from_numpy(stored.codes.dtype)
    values = [
        builder.initializer_of(f"{name}_q", ir.Tensor(stored.codes, dtype=kind)),
        builder.initializer(f"{name}_scale", stored.scale),
        builder.initializer_of(f"{name}_zero_point", ir.Tensor(stored.zero, dtype=kind)),
    ]
    attributes = {"axis": stored.axis, "block_size": stored.block}
    given = {key: number for key, number in attributes.items() if number is not None}
    first = builder.graph[0]
    made = builder.emit(before(first), "DequantizeLinear", values, name, D.FLOAT, **given)
    maker = made.producer()
    assert maker is not None
    facts = {**json.loads(kept["facts"]), "scale": str(values[1].name), "axis": stored.axis}
    maker.metadata_props[METADATA] = json.dumps(facts)
    return made


@dataclass(frozen=True)
class _Stored:
    """The original constants of a DequantizeLinear, before they were transposed or packed."""

    codes: Array
    scale: Array
    zero: Array
    axis: int | None = None
    block: int | None = None


def _stored(node: ir.Node, dtype: ir.DataType, perm: tuple[int, ...]) -> _Stored:
    """The table that the operators ending in ``node`` look up."""
    by_type = {one.op_type: one for one in _chain(node)}
    if OP_TYPE in by_type:
        return _unpacked(by_type[OP_TYPE], dtype)
    codes = _constant(node, by_type["Gather"], 0)
    end = by_type.get("Mul") or by_type.get("DequantizeLinear")
    if end is None:
        raise damaged_metadata(node)
    centred = by_type.get("Sub", end if end.op_type == "DequantizeLinear" else None)
    port = 2 if centred is end else 1
    scale = _constant(node, end, 1)
    given = _constant(node, centred, port) if centred is not None and len(centred.inputs) > port else None
    axis, block = end.attributes.get_int("axis", 1), end.attributes.get_int("block_size", 0)
    if end.op_type == "Mul":
        scale, axis = scale.reshape(-1), by_type["Gather"].attributes.get_int("axis", 0)
    zero = np.zeros(scale.shape) if given is None else given.reshape(scale.shape)
    found = _Stored(codes, scale, zero.astype(codes.dtype), axis % codes.ndim if scale.ndim else None, block or None)
    return found if not perm else _before_turn(found, perm)


def _before_turn(stored: _Stored, perm: tuple[int, ...]) -> _Stored:
    back = np.argsort(perm)
    codes, scale, zero = (
        np.ascontiguousarray(a.transpose(back)) if a.ndim == len(perm) else a
        for a in (stored.codes, stored.scale, stored.zero)
    )
    axis = None if stored.axis is None else perm[stored.axis]
    return _Stored(codes, scale, zero, axis, stored.block)


def _constant(end: ir.Node, node: ir.Node, port: int) -> Array:
    """A constant that ``node`` reads, or looks rows up in."""
    value = node.inputs[port]
    maker = None if value is None else value.producer()
    found = array_of(value if maker is None else maker.inputs[0])
    if found is None:
        raise damaged_metadata(end)
    return found


def _unpacked(node: ir.Node, dtype: ir.DataType) -> _Stored:
    packed, scale = _constant(node, node, 0), _constant(node, node, 2)
    zeros = _constant(node, node, 3) if len(node.inputs) > 3 else None
    codes = from_pairs(packed, packed.shape[1] * 2)
    count = scale.shape[1]
    zero = np.full(scale.shape, 8, np.uint8) if zeros is None else from_pairs(zeros, count)
    shift, kind = (8, np.int8) if dtype == D.INT4 else (0, np.uint8)
    block = node.attributes.get_int("block_size", 128)
    return _Stored(codes.astype(kind) - kind(shift), scale, zero.astype(kind) - kind(shift), 1, block)
