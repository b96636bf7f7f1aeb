"""Models that hold quantizers already: these come out of the graph and become encodings.

What integer tools write is read, of the standard and of the domain ``com.microsoft``:

=============================================  ====================================================================
found                                          becomes
=============================================  ====================================================================
QuantizeLinear, DequantizeLinear of one grid   an encoding of the tensor, at its readers where others read it in float
a second pair of the same grid after it       nothing: it changes no bit
DequantizeLinear of a constant                 a float constant under the same name, and the encoding of its readers
quantizers that this package wrote             what they were, in every form of :mod:`bitwright.export.qdq.forms`
=============================================  ====================================================================

Zero points may be left out. A tensor that two different quantizers follow in a row keeps both, with an ``Identity``
between them where one place can hold only one. Models that compute on integers (``QLinearConv`` and its kind) are
refused by the name of the operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.graph.traits import TRAITS
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import Format, IntFormat, parse_format
from bitwright.core.numerics.granularity import PerTensor
from bitwright.errors import ModelError
from bitwright.export.qdq.forms import folded_parts, read_metadata
from bitwright.export.qdq.lookups import restore_lookups
from bitwright.export.qdq.markers import STATES, Names, Outputs, bypass, move_uses, remove_unread
from bitwright.export.qdq.nbits import restore_nbits
from bitwright.export.qdq.products import join_again
from bitwright.export.qdq.stored import transpose_encoding
from bitwright.export.qdq.trace import moves_data
from bitwright.onnx.given.grids import (
    check_fits,
    encoding_of,
    fixed_number,
    lengths_of,
    rank_of,
    stored_constant,
    unshifted,
    written_grid,
)  # fmt: skip

Array = NDArray[Any]

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
    """An encoding that the model brings with it.

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
    """Take the quantizers out of ``model``, in place, and return what they were, in execution order.

    Args:
        model: as :func:`bitwright.onnx.model.load.load_model` gives it.

    Raises:
        ModelError: the model computes on integers, a scale is not known before it runs, or a grid has no counterpart here.
    """
    restore_nbits(model)
    restore_lookups(model)
    refuse_integer_operators(model)
    join_again(model)
    if not any(_is(node, "QuantizeLinear", "DequantizeLinear") or _own(node) for node in model.graph.all_nodes()):
        return []
    for node in model.graph.all_nodes():
        # of sites of the simulation that wrote it; here it is a loop like any other
        node.metadata_props.pop(STATES, None)
    for node in model.graph.all_nodes():  # what asks for the shape of codes asks for that of the values
        maker = node.inputs[0].producer() if _asks_shape(node) and node.inputs[0] is not None else None
        if maker is not None and _is(maker, "QuantizeLinear"):
            node.replace_input_with(0, maker.inputs[0])
    found = _take_constants(model)
    static = _static_values(model)
    found.extend(_take_activations(model, static))
    _check_rest(model, static)
    return [one.given() for one in found]


def has_quantizers(model: ir.Model) -> bool:
    """Whether :func:`take_quantizers` has something to take out of ``model``, or refuses it."""
    return any(
        _is(node, "QuantizeLinear", "DequantizeLinear") or _own(node) or _integer_form(node) is not None
        for node in model.graph.all_nodes()
    )


def _integer_form(node: ir.Node) -> str | None:
    """Which of ``_FORMS`` an operator that computes on integers is of."""
    form = _INTEGER_OPERATORS.get(node.op_type, "operator" if node.op_type.startswith("QLinear") else None)
    return form if node.domain in _DOMAINS else None


def refuse_integer_operators(model: ir.Model) -> None:
    """Refuse a model that was quantized into operators on integers.

    Raises:
        ModelError: with the name of the operator, and the form that can be read.
    """
    for node in model.graph.all_nodes():
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


def _known(value: ir.Value) -> Array | None:
    array: Array | None = None if value.const_value is None else value.const_value.numpy()
    return array


def _is(node: ir.Node, *types: str) -> bool:
    return node.op_type in types and node.domain in _DOMAINS


def _asks_shape(node: ir.Node) -> bool:
    """Whether ``node`` reads no elements."""
    return node.op_type in ("Shape", "Size") and not node.domain


def _widens(node: ir.Node) -> bool:
    """Whether ``node`` makes a float of a constant that this package stored in half precision."""
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
    """What becomes a :class:`Given` once names no longer change."""

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
    """A quantizer as it stands in the graph: from ``entry`` to the output of ``last``, through ``nodes``."""

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
    """Put floats in the place of codes; where these are read, and on which grid."""
    names = Names(model)
    twins: dict[tuple[object, ...], _Constant] = {}
    for node in list(model.graph.all_nodes()):
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
    """The float constant that ``node`` and ``last`` compute, in its place."""
    result, facts = last.outputs[0], read_metadata(last) or {}
    dtype, name = result.dtype or ir.DataType.FLOAT, str(result.name)
    wide, encoding = stored_constant(node, facts, codes)
    perm = tuple(facts.get("perm", ()))
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
    tensor = ir.Tensor(np.ascontiguousarray(array), dtype=dtype, name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def _constant_readers(value: ir.Value, encoding: Encoding, uses: Iterable[tuple[ir.Node, int]]) -> Iterator[_Taken]:
    """Who reads a constant, also after operators that only move it."""
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
    for node in model.graph.all_nodes():
        if node.inputs and all(value is None or value in static for value in node.inputs):
            static.update(node.outputs)
    return static


# -- quantizers of activations, as they are found


def _find_pairs(model: ir.Model, static: set[ir.Value]) -> tuple[list[_Pair], list[tuple[_Pair, ir.Value]]]:
    """Every quantizer of an activation; and those that change no bit, with the value that is there already."""
    own = _own_pairs(model)
    inside = {node for pair in own.values() for node in pair.nodes}
    first: dict[tuple[ir.Value, Encoding, ir.Graph | None], _Pair] = {}
    grids: dict[ir.Value, Encoding] = {}  # what is quantized -> the grid as written
    pairs: list[_Pair] = []
    same: list[tuple[_Pair, ir.Value]] = []
    for node in model.graph.all_nodes():
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
    """A quantizer of a constant stays in the graph, as part of a constant, where no site could hold it."""
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
    """The quantizers that this package wrote, by the nodes that end them."""
    values = {str(v.name): v for node in model.graph.all_nodes() for v in node.outputs}
    values.update((str(v.name), v) for graph in model.graphs() for v in graph.inputs)
    values.update((name, v) for graph in model.graphs() for name, v in graph.initializers.items())
    found = ((node, _own_pair(node, values)) for node in model.graph.all_nodes())
    return {node: pair for node, pair in found if pair is not None}


def _own_pair(node: ir.Node, values: Mapping[str, ir.Value]) -> _Pair | None:
    """A quantizer that this package wrote and noted on its last node."""
    facts = read_metadata(node) if _own(node) else None
    entry = None if facts is None else values.get(facts["entry"] or "")
    if facts is None or entry is None:
        return None
    nodes = _between(node, entry)
    scale = values.get(facts["scale"] or "")
    if nodes is None or (facts["scale"] and scale is None):
        return None  # the file was changed since
    fmt = parse_format(facts["format"])
    array = np.ones((), np.float32) if scale is None else fixed_number(node, scale)
    zero = _own_zero_point(nodes, fmt)
    ends = [n for n in nodes if _is(n, "QuantizeLinear")]
    block = ends[0].attributes.get_int("block_size", 0) if ends else 0
    check_fits(node, array, zero, facts["axis"] or 0, block, lengths_of(entry))
    return _Pair(entry, node, nodes, encoding_of(fmt, array, zero, facts["axis"], block, rank_of(entry)))


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
    """The grids of what ``node`` makes, if it only moves data."""
    if node.domain not in ("", "ai.onnx") or not node.inputs or node.inputs[0] is None:
        return {}
    sources = [node.inputs[0]]
    if node.op_type == "Concat":
        sources = list(_inputs(node))
    elif not moves_data(node, _known):
        return {}
    grid, *others = (grids.get(v) for v in sources)
    if grid is None or not isinstance(grid.granularity, PerTensor) or any(g != grid for g in others):
        return {}
    return dict.fromkeys(node.outputs if node.op_type == "Split" else node.outputs[:1], grid)


# -- quantizers of activations, as they are taken out


def _take_activations(model: ir.Model, static: set[ir.Value]) -> Iterator[_Taken]:
    pairs, same = _find_pairs(model, static)
    inner = {node for pair in pairs for node in pair.nodes}
    outputs = Outputs(model)
    merged: dict[ir.Value, ir.Value] = {}  # value that is gone -> the one that stayed
    settled: set[ir.Value] = set()
    for pair, value in same:
        value = _kept(value, merged)
        _bypass(pair.last, value, outputs)
        if pair.last.graph is None:
            merged[pair.result] = value
    for pair in pairs:
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


def _kept(value: ir.Value, merged: Mapping[ir.Value, ir.Value]) -> ir.Value:
    while value in merged:
        value = merged[value]
    return value


def _serves_all(pair: _Pair, value: ir.Value) -> bool:
    """Whether an operator makes ``value`` and the quantizer alone reads it."""
    alone = {node for node, _ in value.uses()} <= pair.nodes and not value.is_graph_output()
    return alone and value.producer() is not None


def _take_pair(
    pair: _Pair, value: ir.Value, whole: bool, inner: set[ir.Node], outputs: Outputs
) -> list[tuple[ir.Node, int]]:
    """Take a quantizer of ``value`` out, or keep an Identity where a reader cannot hold it; the readers that can."""
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
    """Take ``node`` out, with ``value`` in the place of its result."""
    before = _read_alone(node, value)
    bypass(node, outputs)
    for source in before:
        remove_unread(source)


def _read_alone(node: ir.Node, value: ir.Value) -> list[ir.Value]:
    """Let ``node`` read ``value`` and nothing else; what it read before."""
    before = list(_inputs(node))
    node.resize_inputs(1)
    node.replace_input_with(0, value)
    return before


def _check_rest(model: ir.Model, static: set[ir.Value]) -> None:
    for node in list(model.graph.all_nodes()):
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
    """The grid of a constant after ``node``, if that only moves it and the grid can be said there."""
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
    """The nodes that lead from ``entry`` to ``last``; ``None`` if something else leads there."""
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
