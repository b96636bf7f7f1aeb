"""Models with quantizers: they are removed from the graph and become encodings of sites.

The sites are those of the rules where they fit, and new ones elsewhere. What integer tools write is read, of the standard and
of the domain ``com.microsoft``:

=============================================  ====================================================================
found                                          becomes
=============================================  ====================================================================
QuantizeLinear, DequantizeLinear of one grid   an encoding of the tensor, at its readers where others read it in float
a second pair of the same grid after it       nothing: it changes no bit
DequantizeLinear of a constant                 a float constant under the same name, and the encoding of its readers
quantizers that this package wrote             what they were, in every form of :mod:`bitwright.export.qdq.forms`
=============================================  ====================================================================

Zero points may be left out. A tensor that two different quantizers follow in a row keeps both, with an ``Identity``
between them where one place can hold only one. Operators on integers (``QLinearConv`` and its kind) were written as QDQ when
the model was loaded (:mod:`bitwright.onnx.model.integer_operators`); those of another form are refused by their name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.graph.graph import Graph
from bitwright.core.graph.operators import TRAITS
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import (
    FLOAT4_E2M1,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FloatFormat,
    Format,
    IntFormat,
    parse_format,
)
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.placement.plan import Plan, Role, SitePlan
from bitwright.core.simulation.quantizer import fulfilled_by
from bitwright.core.simulation.sites import SiteMap
from bitwright.errors import FormatError, ModelError
from bitwright.export.files.onnx_file import all_nodes, array_of
from bitwright.export.qdq.forms import METADATA, damaged_metadata, folded_parts, read_metadata
from bitwright.export.qdq.lookups import restore_lookups
from bitwright.export.qdq.markers import STATES, Names, Outputs, bypass, move_uses, remove_unread
from bitwright.export.qdq.nbits import restore_nbits
from bitwright.export.qdq.products import join_again
from bitwright.export.qdq.stored import is_small_float, transpose_encoding
from bitwright.export.qdq.trace import moves_data

Array = NDArray[Any]

_FLOATS: dict[ir.DataType, FloatFormat] = {
    ir.DataType.FLOAT8E4M3FN: FLOAT8_E4M3,
    ir.DataType.FLOAT8E5M2: FLOAT8_E5M2,
    ir.DataType.FLOAT4E2M1: FLOAT4_E2M1,
}


def fixed_number(node: ir.Node, value: ir.Value) -> Array:
    """A scale or zero point, which must be known before the model runs."""
    seen: ir.Value | None = value
    while seen is not None and seen.const_value is None:
        maker = seen.producer()
        seen = maker.inputs[0] if maker is not None and maker.op_type == "Identity" else None
    if seen is None or seen.const_value is None:
        raise ModelError(
            str(node.name),
            f"its parameter {value.name!r} is computed while the model runs",
            "start from the float model: such a quantizer has no fixed encoding",
        )
    array: Array = seen.const_value.numpy()
    return array


def stored_constant(node: ir.Node, facts: dict[str, Any], codes: Array) -> tuple[Array, Encoding | None]:
    """The float32 values of a dequantized constant, and their grid; ``None`` for a grid that is not expressible."""
    scale, zero, axis, block = np.ones((), np.float32), None, 0, 0
    if node.op_type == "Mul":
        scale, zero, axis = _folded_parameters(node, facts)
    elif node.op_type != "Cast":
        scale, zero, axis, block = _linear_parameters(node, codes.dtype)
    check_fits(node, scale, zero, axis, block, codes.shape)
    where = codes.ndim and axis % codes.ndim
    wide = codes.astype(np.float32)
    if zero is not None:
        wide -= _spread(zero.astype(np.float32), codes.shape, where, block)
    wide *= _spread(scale, codes.shape, where, block)
    dtype = ir.DataType.from_numpy(codes.dtype)
    fmt: Format = parse_format(facts["format"]) if "format" in facts else _written_format(node, dtype)
    if is_small_float(fmt) and codes.dtype.kind == "i":  # whole multiples of the smallest number
        scale = scale / np.float32(fmt.step)
    if isinstance(fmt, IntFormat) and zero is not None:
        zero = unshifted(zero, fmt)
    try:
        return wide, encoding_of(fmt, scale, zero, axis, block, codes.ndim)
    except ModelError:
        return wide, None


def _folded_parameters(node: ir.Node, facts: dict[str, Any]) -> tuple[Array, Array | None, int]:
    """Scale, zero point and axis of a constant dequantized by Cast, Sub and Mul."""
    parts = folded_parts(node)
    assert parts is not None
    _, zeros, factor = parts
    scale = fixed_number(node, factor).astype(np.float32)
    zero = None if zeros is None else fixed_number(node, zeros).reshape(-1)
    return scale.reshape(-1) if scale.size > 1 else scale.reshape(()), zero, facts.get("axis") or 0


def _linear_parameters(node: ir.Node, kind: np.dtype[Any]) -> tuple[Array, Array | None, int, int]:
    """Scale, zero point, axis and length of blocks of a QuantizeLinear or DequantizeLinear with codes of this type."""
    assert node.inputs[1] is not None
    scale = fixed_number(node, node.inputs[1]).astype(np.float32)
    third = node.inputs[2] if len(node.inputs) > 2 else None
    zero = None if third is None else fixed_number(node, third)
    if zero is not None and zero.dtype.kind not in "iu" and kind.kind not in "iu":
        zero = None if not zero.astype(np.float32).any() else zero
    if not np.isfinite(scale).all() or not (scale > 0).all():
        raise ModelError(
            str(node.name),
            f"its scale is not a positive number everywhere: {float(scale.min()):.3g} to {float(scale.max()):.3g}",
            "quantize the model again; a scale of zero or less has no meaning",
        )
    return scale, zero, node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)


def check_fits(
    node: ir.Node, scale: Array, zero: Array | None, axis: int, block: int, shape: Sequence[int | None] | None
) -> None:
    """Refuse scales that do not fit a tensor of ``shape``, whose axes may be unknown.

    Raises:
        ModelError: with what does not fit; ONNX Runtime does not load such a quantizer either.
    """

    problem = _misfit(scale, zero, axis, block, shape)
    if problem:
        raise ModelError(str(node.name), problem, "quantize the model again, or correct the file: no runtime reads it")


def _misfit(scale: Array, zero: Array | None, axis: int, block: int, shape: Sequence[int | None] | None) -> str:
    if not scale.size:
        return "it has no scale"
    if zero is not None and zero.size not in (1, scale.size):
        return f"it has {zero.size} zero points and {scale.size} scales"
    if block < 0:
        return f"its blocks have {block} elements"
    return "" if shape is None or not (block or scale.size > 1) else _wrong_length(scale, axis, block, shape)


def _wrong_length(scale: Array, axis: int, block: int, shape: Sequence[int | None]) -> str:
    rank = len(shape)
    if not -rank <= axis < rank:
        return f"its axis is {axis}, and its tensor has {rank} axes"
    axis %= rank
    needed: list[int | None] = [shape[axis]]
    if block:
        needed = [-(-n // block) if i == axis and n is not None else n for i, n in enumerate(shape)]
    if scale.ndim == len(needed) and all(n in (None, have) for have, n in zip(scale.shape, needed, strict=True)):
        return ""
    text = "x".join("?" if n is None else str(n) for n in shape)
    kind = f"blocks of {block} along axis {axis}" if block else f"axis {axis}"
    return f"its scales have the shape {list(scale.shape)}, which does not fit {kind} of a tensor of shape {text}"


def written_grid(node: ir.Node) -> Encoding:
    """The grid of a QuantizeLinear or DequantizeLinear."""
    entry = node.inputs[0]
    third = node.inputs[2] if len(node.inputs) > 2 else None
    codes = node.outputs[0] if node.op_type == "QuantizeLinear" else entry
    dtype = codes.dtype if third is None and codes is not None else None if third is None else third.dtype
    dtype = dtype or ir.DataType(node.attributes.get_int("output_dtype", 0) or int(ir.DataType.UINT8))
    scale, zero, axis, block = _linear_parameters(node, np.dtype(dtype.numpy()))
    check_fits(node, scale, zero, axis, block, lengths_of(entry))
    return encoding_of(_written_format(node, dtype), scale, zero, axis, block, rank_of(entry))


def encoding_of(
    fmt: Format, scale: Array, zero: Array | None, axis: int | None, block: int, rank: int | None
) -> Encoding:
    """The encoding of a tensor of this rank, which may be unknown, from the numbers in a file."""
    granularity: Granularity = PerTensor()
    scale = np.asarray(scale, np.float32)
    zero = np.zeros(scale.shape, np.int64) if zero is None else np.asarray(zero).astype(np.int64)
    zero = zero.reshape(()) if zero.size == 1 else zero  # whatever its rank
    if block:
        granularity, scale, zero = _in_blocks(scale, zero, axis or 0, block)
    elif axis is None or scale.size == 1:
        scale = scale.reshape(())
    else:
        granularity, scale = PerChannel(axis if rank is None else axis % rank), scale.reshape(-1)
    zero = zero.reshape(scale.shape) if zero.size == scale.size else np.broadcast_to(zero, scale.shape)
    if isinstance(fmt, FloatFormat):
        zero = np.zeros(scale.shape, np.int64)
    return Encoding(fmt, scale, zero, granularity)


def lengths_of(value: ir.Value | None) -> list[int | None] | None:
    """The lengths of the axes of a tensor, as far as they are known."""
    return None if value is None or value.shape is None else [n if isinstance(n, int) else None for n in value.shape]


def rank_of(value: ir.Value | None) -> int | None:
    """Rank of a tensor, where it is known."""
    return None if value is None or value.shape is None else len(value.shape)


def _written_format(node: ir.Node, dtype: ir.DataType) -> Format:
    """The number format of codes of this type.

    Raises:
        ModelError: there is none.
    """
    if dtype in _FLOATS:
        return _FLOATS[dtype]
    if dtype.is_integer():
        try:
            return IntFormat(dtype.bitwidth, signed=dtype.is_signed())
        except FormatError:  # one bit
            pass
    raise ModelError(
        str(node.name),
        f"it quantizes to {dtype.name.lower()}, which has no counterpart here",
        "use integers of 2 to 16 bits, float8e4m3fn or float8e5m2",
    )


def unshifted(zero: Array, fmt: IntFormat) -> Array:
    """The signed zero point of a grid that may have been written unsigned."""
    counted = zero.dtype.kind == "u" or zero.dtype.name in ("uint2", "uint4")
    shift = 1 << (fmt.bits - 1) if fmt.signed and counted else 0
    return np.asarray(zero.astype(np.int64) - shift)


def _in_blocks(scale: Array, zero: Array, axis: int, block: int) -> tuple[PerBlock, Array, Array]:
    """Blocks as ONNX writes them, one scale per index of every other axis, as one scale per channel where they agree."""
    axis %= scale.ndim
    others = [i for i in range(scale.ndim) if i != axis]
    zero = np.broadcast_to(zero, scale.shape)
    differing = [i for i in others if not (_constant_along(scale, i) and _constant_along(zero, i))]
    # of a matrix the other axis is the channel's, whatever the numbers say
    channels = differing or (others if len(others) == 1 else [])
    keep = tuple(slice(None) if i in (axis, *channels) else slice(0, 1) for i in range(scale.ndim))
    return PerBlock(block, axis, tuple(channels)), scale[keep], zero[keep]


def _constant_along(array: Array, axis: int) -> bool:
    return bool((array == array.take([0], axis)).all())


def _spread(param: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    """A scale or zero point as long as a tensor of ``shape``, or with axes of length one."""
    if block:
        return np.repeat(param, block, axis)[tuple(slice(0, n) for n in shape)]
    if param.size == 1:
        return param.reshape(())
    return param.reshape([-1 if i == axis else 1 for i in range(len(shape))])


# fmt: skip


_DOMAINS = ("", "ai.onnx", "com.microsoft")

#: operators that compute on integers or choose their scales at run time -> the form a user has instead
_INTEGER_OPERATORS = {
    **dict.fromkeys(("ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeLinear",
                     "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"), "dynamic"),
    **dict.fromkeys(("QGemm", "QAttention", "QEmbedLayerNormalization", "QOrderedMatMul", "QMoE"), "operator"),
    **dict.fromkeys(("MatMulNBits", "MatMulBnb4", "MatMulFpQ4", "GatherBlockQuantized"), "packed"),
}  # fmt: skip
_FORMS = {
    "dynamic": ("chooses its scale anew for every input", "dynamic quantization has no fixed encodings"),
    "operator": ("computes on integers", "quantize to the QDQ format instead (quant_format=QuantFormat.QDQ)"),
    "packed": ("holds its weight in packed integers", "export with DequantizeLinear in front of MatMul"),
}


@dataclass(frozen=True)
class Given:
    """An encoding found in the model.

    Attributes:
        value: name of the tensor.
        encoding: its grid.
        readers: ``(node, port)`` that read it quantized.
        everywhere: all its readers do, and it is made by an operator: the place is that operator's output.
        constant: the tensor is the same in every run.
    """

    value: str
    encoding: Encoding
    readers: tuple[tuple[str, int], ...]
    everywhere: bool = False
    constant: bool = False


def take_quantizers(model: ir.Model) -> list[Given]:
    """Remove the quantizers from ``model``, in place, and return them in execution order.

    Args:
        model: as :func:`bitwright.onnx.model.load.load_model` gives it.

    Raises:
        ModelError: the model computes on integers, a scale is not known before it runs, or a grid has no counterpart here.
    """
    restore_nbits(model)
    restore_lookups(model)
    refuse_integer_operators(model)
    join_again(model)
    if not any(_is(node, "QuantizeLinear", "DequantizeLinear") or _own(node) for node in all_nodes(model.graph)):
        return []
    for node in all_nodes(model.graph):
        # of sites of the simulation that wrote it; here it is a loop like any other
        node.metadata_props.pop(STATES, None)
    for node in all_nodes(model.graph):  # what asks for the shape of codes asks for that of the values
        maker = node.inputs[0].producer() if _asks_shape(node) and node.inputs[0] is not None else None
        if maker is not None and _is(maker, "QuantizeLinear"):
            node.replace_input_with(0, maker.inputs[0])
    _restore_clamps(model)
    found = _take_constants(model)
    static = _static_values(model)
    found.extend(_take_activations(model, static))
    _check_rest(model, static)
    return [one.given() for one in found]


def has_quantizers(model: ir.Model) -> bool:
    """Whether ``model`` has quantizers that :func:`take_quantizers` removes or refuses."""
    return any(
        _is(node, "QuantizeLinear", "DequantizeLinear") or _own(node) or _integer_form(node) is not None
        for node in all_nodes(model.graph)
    )


def _integer_form(node: ir.Node) -> str | None:
    """The row of ``_FORMS`` of an integer operator."""
    form = _INTEGER_OPERATORS.get(node.op_type, "operator" if node.op_type.startswith("QLinear") else None)
    return form if node.domain in _DOMAINS else None


def refuse_integer_operators(model: ir.Model) -> None:
    """Refuse a model that was quantized into operators on integers.

    Raises:
        ModelError: with the name of the operator, and the form that can be read.
    """
    for node in all_nodes(model.graph):
        form = _integer_form(node)
        if form is not None:
            problem, remedy = _FORMS[form]
            raise ModelError(
                str(node.name),
                f"the model is quantized already, into operators that cannot be simulated: {node.op_type} {problem}",
                f"start from the float model; or {remedy}"
                if form != "dynamic"
                else f"start from the float model: {remedy}",
            )


def _is(node: ir.Node, *types: str) -> bool:
    return node.op_type in types and node.domain in _DOMAINS


def _asks_shape(node: ir.Node) -> bool:
    """Whether ``node`` reads only the shape."""
    return node.op_type in ("Shape", "Size") and not node.domain


def _widens(node: ir.Node) -> bool:
    """Whether ``node`` casts a constant that this package stored in half precision to float."""
    facts = read_metadata(node) if node.op_type == "Cast" else None
    return facts is not None and facts["role"] == "constant" and facts["scale"] is None


def _folded_codes(node: ir.Node) -> ir.Value | None:
    parts = folded_parts(node)
    return None if parts is None else parts[0]


def _closing(node: ir.Node) -> ir.Node:
    """The node that ends a constant of ours: ``node``, or the cast to half precision after it."""
    uses = node.outputs[0].uses()
    reader = next((reader for reader, _ in uses), None)
    if len(uses) != 1 or reader is None or reader.op_type != "Cast" or _is(node, "Cast"):
        return node
    facts = read_metadata(reader)
    return reader if facts is not None and facts["role"] in ("constant", "bias") else node


def _own(node: ir.Node) -> bool:
    facts = read_metadata(node)
    return facts is not None and facts["role"] == "activation"


@dataclass(frozen=True, eq=False)
class _Taken:
    """The data of a :class:`Given` before names are final."""

    value: ir.Value
    encoding: Encoding
    readers: list[tuple[ir.Node, int]]
    everywhere: bool = False
    constant: bool = False

    def given(self) -> Given:
        readers = tuple((str(node.name), port) for node, port in self.readers)
        return Given(str(self.value.name), self.encoding, readers, self.everywhere, self.constant)


@dataclass(frozen=True, eq=False)
class _Pair:
    """A quantizer in the graph: from ``entry`` to the output of ``last``, through ``nodes``."""

    entry: ir.Value
    last: ir.Node
    nodes: set[ir.Node]
    encoding: Encoding

    @property
    def result(self) -> ir.Value:
        return self.last.outputs[0]


# -- constants


@dataclass(frozen=True, eq=False)
class _Constant:
    """A constant in float: ``stored`` on the grid ``encoding``, read as ``value``, which may be its transpose."""

    value: ir.Value
    stored: ir.Value
    encoding: Encoding | None


def _take_constants(model: ir.Model) -> list[_Taken]:
    """Replace stored codes by floats; returns where they are read, and their grids."""
    names = Names(model)
    twins: dict[tuple[object, ...], _Constant] = {}
    for node in list(all_nodes(model.graph)):
        codes = node.inputs[0] if _is(node, "DequantizeLinear") or _widens(node) else _folded_codes(node)
        last = _closing(node)
        result = last.outputs[0]
        if codes is None or codes.const_value is None or not codes.is_initializer() or result.is_graph_output():
            continue
        key = (*node.inputs, *sorted((a.name, str(a.value)) for a in node.attributes.values()))
        if key not in twins:
            twins[key] = _constant(model, names, node, last, codes.const_value.numpy())
        move_uses(result, twins[key].value)
        remove_unread(result)
    found: list[_Taken] = []
    for one in sorted(twins.values(), key=lambda one: one.value is not one.stored):
        if one.encoding is not None:
            found.extend(_constant_readers(one.stored, one.encoding, list(one.stored.uses())))
    return found


def _constant(model: ir.Model, names: Names, node: ir.Node, last: ir.Node, codes: Array) -> _Constant:
    """Replace ``node`` and ``last`` by the float constant that they compute."""
    result, facts = last.outputs[0], read_metadata(last) or {}
    dtype, name = result.dtype or ir.DataType.FLOAT, str(result.name)
    wide, encoding = stored_constant(node, facts, codes)
    perm = tuple(facts.get("perm", ()))
    if perm and len(perm) != codes.ndim:
        raise damaged_metadata(last)
    result.name = names.value(f"{name}_dq")
    array = wide.astype(dtype.numpy(), copy=False)
    if not perm:
        stored = _initializer(model, name, array, dtype)
        return _Constant(stored, stored, encoding)
    # written transposed: in the orientation it had, and the transposition after it
    back = tuple(int(i) for i in np.argsort(perm))
    base = names.value(name.removesuffix("_transposed"))
    stored = _initializer(model, base, array.transpose(back), dtype)
    label = names.node(f"{name}/Transpose")
    turn = ir.Node("", "Transpose", [stored], [ir.AttrInt64s("perm", perm)], name=label)
    value = turn.outputs[0]
    value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(array.shape)
    model.graph.insert_before(model.graph[0], turn)
    return _Constant(value, stored, None if encoding is None else transpose_encoding(encoding, back))


def _initializer(model: ir.Model, name: str, array: Array, dtype: ir.DataType) -> ir.Value:
    tensor = ir.Tensor(np.asarray(array, order="C"), dtype=dtype, name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def _constant_readers(value: ir.Value, encoding: Encoding, uses: Iterable[tuple[ir.Node, int]]) -> Iterator[_Taken]:
    """Readers of a constant, also across data movement."""
    waiting = [(value, encoding, uses)]
    while waiting:
        value, encoding, uses = waiting.pop()
        readers = []
        for node, port in uses:
            moved = _moved(node, encoding)
            if moved is None:
                readers.append((node, port))
            else:
                waiting.append((node.outputs[0], moved, list(node.outputs[0].uses())))
        if readers:
            yield _Taken(value, encoding, readers, constant=True)


def _static_values(model: ir.Model) -> set[ir.Value]:
    """Values that are the same in every run."""
    static = {v for graph in model.graphs() for v in graph.initializers.values()}
    for node in all_nodes(model.graph):
        if node.inputs and all(value is None or value in static for value in node.inputs):
            static.update(node.outputs)
    return static


# -- quantizers of activations, as they are found


def _find_pairs(model: ir.Model, static: set[ir.Value]) -> tuple[list[_Pair], list[tuple[_Pair, ir.Value]]]:
    """All quantizers of activations; and redundant ones, with the equal value in the graph."""
    own = _own_pairs(model)
    inside = {node for pair in own.values() for node in pair.nodes}
    first: dict[tuple[ir.Value, Encoding, ir.Graph | None], _Pair] = {}
    grids: dict[ir.Value, Encoding] = {}  # what is quantized -> the grid as written
    pairs: list[_Pair] = []
    same: list[tuple[_Pair, ir.Value]] = []
    for node in all_nodes(model.graph):
        pair = own.get(node) or (None if node in inside else _pair(node))
        if pair is None or not _can_be_taken(pair, static):
            grids.update(_carried(node, grids))
            continue
        twin = first.setdefault((pair.entry, pair.encoding, node.graph), pair)
        there = twin.result
        if _is(pair.last, "DequantizeLinear"):
            grids[pair.result] = written_grid(pair.last)
            if grids.get(pair.entry) == grids[pair.result]:
                there = pair.entry
        if there is pair.result:
            pairs.append(pair)
        else:
            same.append((pair, there))
    return pairs, same


def _can_be_taken(pair: _Pair, static: set[ir.Value]) -> bool:
    """Whether a quantizer can be removed; one of a constant without a possible site stays in the graph."""
    if pair.entry not in static:
        return True
    waiting = [pair.result] if pair.entry.is_initializer() else []
    while waiting:
        value = waiting.pop()
        for node, _ in value.uses():
            moved = _moved(node, pair.encoding)
            if moved is not None:
                waiting.append(node.outputs[0])
            elif node.outputs[0] in static:
                return False
    return pair.entry.is_initializer()


def _own_pairs(model: ir.Model) -> dict[ir.Node, _Pair]:
    """The quantizers that this package wrote, by their last nodes."""
    values = {str(v.name): v for node in all_nodes(model.graph) for v in node.outputs}
    values.update((str(v.name), v) for graph in model.graphs() for v in graph.inputs)
    values.update((name, v) for graph in model.graphs() for name, v in graph.initializers.items())
    found = ((node, _own_pair(node, values)) for node in all_nodes(model.graph))
    return {node: pair for node, pair in found if pair is not None}


def _own_pair(node: ir.Node, values: Mapping[str, ir.Value]) -> _Pair | None:
    """A quantizer that this package wrote, found by the metadata of its last node."""
    facts = read_metadata(node) if _own(node) else None
    entry = None if facts is None else values.get(facts["entry"] or "")
    if facts is None or entry is None:
        return None
    nodes = _between(node, entry)
    scale = values.get(facts["scale"] or "")
    if nodes is None or "format" not in facts or (facts["scale"] and scale is None):
        return None  # the file was changed since
    encoding = _own_encoding(node, facts, nodes, entry, scale)
    return None if encoding is None else _Pair(entry, node, nodes, encoding)


def _own_encoding(
    node: ir.Node, facts: Mapping[str, Any], nodes: set[ir.Node], entry: ir.Value, scale: ir.Value | None
) -> Encoding | None:
    """The grid of a quantizer that this package wrote; ``None`` where the file was changed since."""
    fmt = parse_format(facts["format"])
    array = np.ones((), np.float32) if scale is None else fixed_number(node, scale)
    zero = _own_zero_point(nodes, fmt)
    ends = [n for n in nodes if _is(n, "QuantizeLinear")]
    block = ends[0].attributes.get_int("block_size", 0) if ends else 0
    if facts["axis"] is None and array.size != 1 and not block:
        return None
    check_fits(node, array, zero, facts["axis"] or 0, block, lengths_of(entry))
    return encoding_of(fmt, array, zero, facts["axis"], block, rank_of(entry))


def _own_zero_point(nodes: set[ir.Node], fmt: Format) -> Array | None:
    if not isinstance(fmt, IntFormat):
        return None
    for node in nodes:
        wide = node.op_type == "Add"
        if not wide and not _is(node, "QuantizeLinear"):
            continue
        value = next(iter(node.inputs[1 if wide else 2 :]), None)
        if value is None:
            raise ModelError(
                str(node.name), f"this {node.op_type} of a quantizer has no zero point", "export the simulation again"
            )
        zero = fixed_number(node, value)
        return zero.astype(np.int64) if wide else unshifted(zero, fmt)
    return None


def _pair(node: ir.Node) -> _Pair | None:
    """The pair that ends in ``node``, or ``None``."""
    if not _is(node, "DequantizeLinear"):
        return None
    codes = node.inputs[0]
    first = None if codes is None else codes.producer()
    if first is None or not _is(first, "QuantizeLinear"):
        return None
    entry, one, other = first.inputs[0], written_grid(first), written_grid(node)
    assert entry is not None
    if one != other:
        raise ModelError(
            str(node.name),
            f"it reads the codes of {first.name} on another grid, {other} instead of {one}: the model computes on "
            "integers here",
            "start from the float model",
        )
    return _Pair(entry, node, {first, node}, one)


def _carried(node: ir.Node, grids: Mapping[ir.Value, Encoding]) -> dict[ir.Value, Encoding]:
    """The grids of the outputs of ``node``, if it only moves data."""
    if node.domain not in ("", "ai.onnx") or not node.inputs or node.inputs[0] is None:
        return {}
    sources = [node.inputs[0]]
    if node.op_type == "Concat":
        sources = list(_inputs(node))
    elif not moves_data(node, array_of):
        return {}
    grid, *others = (grids.get(v) for v in sources)
    if grid is None or not isinstance(grid.granularity, PerTensor) or any(g != grid for g in others):
        return {}
    return dict.fromkeys(node.outputs if node.op_type == "Split" else node.outputs[:1], grid)


# -- quantizers of activations, as they are taken out


#: operators whose result may be negative, into whose quantizer other tools fold the Relu or Clip that followed
_CLAMPED = frozenset((*TRAITS["layer"], "Add", "Sub", "BatchNormalization", "InstanceNormalization"))
_SIX = np.float32(6) / np.float32(255)  # scale of the codes of a ReLU6


def _restore_clamps(model: ir.Model) -> None:
    """Restore a Relu or Clip that another tool folded into a quantizer, so that the model without quantizers has it too.

    Other tools leave it out in front of a grid that begins at 0: a QuantizeLinear bounds values as it does. Where the values
    were never negative it changes nothing.
    """
    names = None
    for node in [node for node in all_nodes(model.graph) if _ends_a_layer_at_zero(node)]:
        entry, graph = node.inputs[0], node.graph
        assert entry is not None and graph is not None
        names = names or Names(model)
        clamp = _clamp(model, names, entry, 6.0 if _ends_at_six(node) else None)
        value, name = clamp.outputs[0], str(entry.name)
        value.type, value.shape = entry.type, entry.shape
        entry.name, value.name = names.value(f"{name}_unclamped"), name
        graph.insert_before(node, clamp)
        node.replace_input_with(0, value)


def _ends_a_layer_at_zero(node: ir.Node) -> bool:
    """Whether ``node`` is another tool's QuantizeLinear whose grid begins at 0, and alone reads what a layer or a sum makes."""
    entry = node.inputs[0] if _is(node, "QuantizeLinear") and len(node.inputs) > 2 else None
    maker = None if entry is None else entry.producer()
    if entry is None or maker is None or maker.op_type not in _CLAMPED or entry.dtype != ir.DataType.FLOAT:
        return False
    return len(entry.uses()) == 1 and not entry.is_graph_output() and _bounds_at_zero(node)


def _clamp(model: ir.Model, names: Names, entry: ir.Value, most: float | None) -> ir.Node:
    maker = entry.producer()
    name = names.node(f"{entry.name if maker is None else maker.name}_{'relu' if most is None else 'relu6'}")
    if most is None:
        return ir.Node("", "Relu", [entry], name=name)
    if model.graph.opset_imports.get("", 21) < 11:
        return ir.Node("", "Clip", [entry], [ir.AttrFloat32("min", 0.0), ir.AttrFloat32("max", most)], name=name)
    bounds = [
        _initializer(model, names.value(f"{entry.name}_{end}"), np.asarray(x, np.float32), ir.DataType.FLOAT)
        for end, x in (("least", 0.0), ("most", most))
    ]
    return ir.Node("", "Clip", [entry, *bounds], name=name)


def _bounds_at_zero(node: ir.Node) -> bool:
    """Whether the codes of a quantizer of another tool begin at 0."""
    zero = array_of(node.inputs[2])
    if (
        zero is None
        or zero.dtype.kind not in "iu"
        or any(METADATA in n.metadata_props for n, _ in node.outputs[0].uses())
    ):
        return False
    return METADATA not in node.metadata_props and bool((zero == np.iinfo(zero.dtype).min).all())


def _ends_at_six(node: ir.Node) -> bool:
    """Whether 8-bit codes that begin at 0 end at 6, as those of a ReLU6."""
    scale, zero = (array_of(value) for value in node.inputs[1:3])
    eight = zero is not None and zero.dtype.itemsize == 1
    return eight and scale is not None and bool(np.isclose(scale, _SIX, rtol=1e-6, atol=0).all())


def _take_activations(model: ir.Model, static: set[ir.Value]) -> Iterator[_Taken]:
    pairs, same = _find_pairs(model, static)
    inner = {node for pair in pairs for node in pair.nodes}
    outputs = Outputs(model)
    merged: dict[ir.Value, ir.Value] = {}  # value that is gone -> the one that stayed
    settled: set[ir.Value] = set()
    _bypass_repeated(same, merged, outputs)
    for pair in filter(_is_in_a_graph, pairs):
        value = _kept(pair.entry, merged)
        whole = value not in settled and _serves_all(pair, value)
        readers = _take_pair(pair, value, whole, inner, outputs)
        if pair.last.graph is not None:
            readers.append((pair.last, 0))
            whole = False
        else:
            merged[pair.result] = value
        if whole:
            settled.add(value)
        if value.is_initializer():
            yield from _constant_readers(value, pair.encoding, readers)
        else:
            yield _Taken(value, pair.encoding, readers, whole)


def _is_in_a_graph(pair: _Pair) -> bool:
    """Whether the quantizer still stands in the model; it is taken out together with operators whose results nothing reads."""
    return pair.last.graph is not None


def _bypass_repeated(
    same: Sequence[tuple[_Pair, ir.Value]], merged: dict[ir.Value, ir.Value], outputs: Outputs
) -> None:
    """Remove quantizers whose input already lies on their grid; ``merged`` gets the replacements of their results."""
    for pair, value in same:
        if not _is_in_a_graph(pair):
            continue
        stays = _kept(value, merged)
        _bypass(pair.last, stays, outputs)
        if pair.last.graph is None:
            merged[pair.result] = stays


def _kept(value: ir.Value, merged: Mapping[ir.Value, ir.Value]) -> ir.Value:
    while value in merged:
        value = merged[value]
    return value


def _serves_all(pair: _Pair, value: ir.Value) -> bool:
    """Whether an operator computes ``value`` and the quantizer is its only reader."""
    alone = {node for node, _ in value.uses()} <= pair.nodes and not value.is_graph_output()
    return alone and value.producer() is not None


def _take_pair(
    pair: _Pair, value: ir.Value, whole: bool, inner: set[ir.Node], outputs: Outputs
) -> list[tuple[ir.Node, int]]:
    """Remove a quantizer of ``value``, or keep an Identity where a reader has no site for it; returns the readers that have."""
    readers = [(node, port) for node, port in pair.result.uses() if not _asks_shape(node)]
    # no site at an operator with bodies or inside another quantizer can hold one of what it reads
    near = [use for use in readers if use[0].op_type not in TRAITS["bodies"] and use[0] not in inner]
    if whole or not (len(near) < len(readers) or pair.result.is_graph_output()):
        _bypass(pair.last, value, outputs)
        return readers
    node = pair.last
    before = _read_alone(node, value)
    node.domain, node.op_type = "", "Identity"
    node.attributes.clear()
    node.metadata_props.clear()
    for source in before:
        remove_unread(source)
    for reader, port in near:
        reader.replace_input_with(port, value)
    return near


def _bypass(node: ir.Node, value: ir.Value, outputs: Outputs) -> None:
    """Remove ``node``, and replace its result by ``value``."""
    before = _read_alone(node, value)
    bypass(node, outputs)
    for source in before:
        remove_unread(source)


def _read_alone(node: ir.Node, value: ir.Value) -> list[ir.Value]:
    """Make ``value`` the only input of ``node``; returns the previous ones."""
    before = list(_inputs(node))
    node.resize_inputs(1)
    node.replace_input_with(0, value)
    return before


def _check_rest(model: ir.Model, static: set[ir.Value]) -> None:
    for node in list(all_nodes(model.graph)):
        if not _is(node, "QuantizeLinear") or node.outputs[0] in static:
            continue
        reader = next((n for n, _ in node.outputs[0].uses()), None)
        if reader is None and not node.outputs[0].is_graph_output():
            remove_unread(node.outputs[0])
            continue
        what = "returned" if reader is None else f"read by {reader.name} ({reader.op_type})"
        raise ModelError(
            str(node.name),
            f"its codes are {what}: the model computes on integers here",
            "start from the float model; every QuantizeLinear needs a DequantizeLinear right after it",
        )


def _moved(node: ir.Node, encoding: Encoding) -> Encoding | None:
    """The grid of a constant after ``node``, if that only moves it and the grid can be expressed there."""
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type in ("Identity", "Cast"):
        return encoding
    if node.op_type == "Transpose":
        value = node.inputs[0]
        rank = 0 if value is None or value.shape is None else len(value.shape)
        perm = node.attributes.get_ints("perm", tuple(reversed(range(rank))))
        return transpose_encoding(encoding, perm) if rank or isinstance(encoding.granularity, PerTensor) else None
    simple = isinstance(encoding.granularity, PerTensor)
    return encoding if simple and node.op_type in ("Reshape", "Flatten", "Squeeze", "Unsqueeze") else None


def _between(last: ir.Node, entry: ir.Value) -> set[ir.Node] | None:
    """The nodes from ``entry`` to ``last``; ``None`` if other values enter."""
    found: set[ir.Node] = set()
    waiting = [last]
    reached = False
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        for value in _inputs(node):
            maker = value.producer()
            if value is entry:
                reached = True
            elif maker is not None:
                waiting.append(maker)
            elif not value.is_initializer():
                return None
        if len(found) > 32:  # no form of a quantizer is as long
            return None
    return found if reached else None


def _inputs(node: ir.Node) -> Iterator[ir.Value]:
    return (value for value in node.inputs if value is not None)


@dataclass(frozen=True)
class Adopted:
    """A plan with the sites of an already quantized model.

    Attributes:
        plan: as the rules made it, with these sites among the others.
        encodings: site -> the encoding that came with the model.
        unused: sites of the rules that the model has in float.
    """

    plan: Plan
    encodings: dict[str, Encoding]
    unused: tuple[str, ...]

    def put_in_force(self, sites: SiteMap) -> tuple[str, bool]:
        """Apply the encodings, which survive calibration; returns notes, and whether all sites are calibrated."""
        for name, encoding in self.encodings.items():
            quantizer = sites[name].quantizer
            quantizer.encoding, quantizer.frozen = encoding, True
        for name in self.unused:
            sites[name].enabled = False
        missing = [s for s in sites.values() if s.enabled and s.encoding is None]
        others = f"; {len(self.unused)} other sites of the rules are in float, as there" if self.unused else ""
        return (
            f"the model brought {len(self.encodings)} encodings with it, which are in effect and frozen{others}",
            all(site.quantizer.derived for site in missing),
        )


def adopt(plan: Plan, graph: Graph, given: Iterable[Given]) -> Adopted:
    """Find or make the site of every encoding in ``given``.

    Where the model quantizes activations, it computes what it computed: every other site that the rules ask for is unused.
    Where it only holds quantized constants, the rules decide about all the rest.

    Raises:
        ModelError: an operator that read a quantized tensor is gone.
    """
    return _Adopter(plan, graph).run(list(given))


class _Adopter:
    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph
        self.sites = dict(plan.sites)
        self.at = {(s.op, s.port): s for s in plan.sites.values() if s.role != "output"}
        self.made = {s.value: s for s in plan.sites.values() if s.role == "output"}
        self.encodings: dict[str, Encoding] = {}

    def run(self, given: list[Given]) -> Adopted:
        biases: dict[str, Encoding] = {}
        for one in given:
            if one.everywhere and not self._is_asked_for_at_readers(one):
                self._take(self.made.get(one.value) or self._output(one), one)
            else:
                self._take_at_readers(one, biases)
        self._regroup()
        unused: list[str] = []
        if any(not one.constant for one in given):
            free = (s for s in self.sites.values() if s.name not in self.encodings)
            unused = sorted(site.name for site in free if not self._fits(site, biases))
        return Adopted(replace(self.plan, sites=self._ordered()), self.encodings, tuple(unused))

    def _take_at_readers(self, one: Given, biases: dict[str, Encoding]) -> None:
        """Apply an encoding at the readers of its tensor; those of ``biases`` follow from others."""
        for op, port in one.readers:
            site = self.at.get((op, port))
            if site is not None and site.follows is not None:
                biases[site.name] = one.encoding
            elif not _is_bias(one.encoding):
                site = site or self._input(one, op, port)
                if site is not None:
                    self._take(site, one)

    def _is_asked_for_at_readers(self, one: Given) -> bool:
        """Whether the rules put the quantizers of a tensor at its readers, and not at its producer."""
        if one.value in self.made or self.graph.is_output(one.value):
            return False
        sites = [self.at.get(place) for place in one.readers]
        return bool(sites) and all(s is not None and s.value == one.value and s.role == "input" for s in sites)

    def _fits(self, bias: SitePlan, biases: Mapping[str, Encoding]) -> bool:
        """Whether the derived grid of a bias equals the model's."""
        given = biases.get(bias.name)
        if given is None or bias.follows is None:
            return False
        source, weight = (self.encodings.get(name) for name in bias.follows)
        if source is None or weight is None or source.scale.size != 1:
            return False
        follows = np.multiply(source.scale, weight.scale.reshape(-1), dtype=np.float32)
        return bool((follows == given.scale.reshape(-1)).all())

    def _take(self, site: SitePlan, one: Given) -> None:
        self.encodings[site.name] = one.encoding
        self.sites[site.name] = replace(site, spec=replace(fulfilled_by(site.spec, one.encoding), fixed_range=None))

    def _output(self, one: Given) -> SitePlan:
        op = self.graph.producer(one.value)
        if op is None:
            raise _lost(one)
        index = op.outputs.index(one.value)
        return self._new(f"{op.name}.output[{index}]", "output", op.name, index, one)

    def _input(self, one: Given, op: str, port: int) -> SitePlan | None:
        try:
            self.graph.op(op)
        except KeyError:
            if one.constant:  # computed from constants alone: its value is on the grid already
                return None
            raise _lost(one) from None
        role: Role = "constant" if one.constant or self.graph.values[one.value].is_static else "input"
        return self._new(f"{op}.input[{port}]", role, op, port, one)

    def _new(self, name: str, role: Role, op: str, index: int, one: Given) -> SitePlan:
        count, free = 0, name
        while free in self.sites:
            count += 1
            free = f"{name}_{count}"
        site = SitePlan(free, fulfilled_by(QuantSpec(), one.encoding), role, op, index, one.value, free)
        self.sites[free] = site
        if role != "output":
            self.at[op, index] = site
        return site

    def _regroup(self) -> None:
        """Let sites share a quantizer where the rules say so and the model has equal encodings."""
        first: dict[tuple[str, Encoding | None], str] = {}
        for site in self.sites.values():
            group = first.setdefault((site.group, self.encodings.get(site.name)), site.name)
            self.sites[site.name] = replace(site, group=group, follows=self._follows(site))

    def _follows(self, site: SitePlan) -> tuple[str, str] | None:
        """The sites that a bias follows; its operator's input may be quantized at the reader."""
        if site.follows is None:
            return None
        reads = self.at.get((site.op, 0))
        here = reads is not None and reads.role == "input" and reads.name in self.encodings
        return (reads.name if here and reads is not None else site.follows[0], site.follows[1])

    def _ordered(self) -> dict[str, SitePlan]:
        order = {op.name: i for i, op in enumerate(self.graph.ops)}
        ranked = sorted(self.sites.values(), key=lambda s: (order[s.op], s.role == "output", s.port))
        return {site.name: site for site in ranked}


def _is_bias(encoding: Encoding) -> bool:
    return isinstance(encoding.format, IntFormat) and encoding.format.bits == 32


def _lost(one: Given) -> ModelError:
    return ModelError(
        one.value,
        "the model quantizes this tensor, and no operator of the converted model has the place",
        "export the model again with opset 21",
    )
