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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
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
from bitwright.export.qdq.stored import is_small_float, transpose_encoding
from bitwright.export.qdq.trace import moves_data
from bitwright.onnx.simulation.written_grids import (
    encoding_of,
    fixed_number,
    folded_parameters,
    linear_parameters,
    rank_of,
    spread,
    unshifted,
    written_format,
    written_grid,
)

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
    if not any(
        _is(node, "QuantizeLinear", "DequantizeLinear") or _own(node) for node in model.graph.all_nodes()
    ):
        return []
    for node in model.graph.all_nodes():
        # of sites of the simulation that wrote it; here it is a loop like any other
        node.metadata_props.pop(STATES, None)
    return _Taker(model).take()


def refuse_integer_operators(model: ir.Model) -> None:
    """Refuse a model that was quantized into operators on integers.

    Raises:
        ModelError: with the name of the operator, and the form that can be read.
    """
    for node in model.graph.all_nodes():
        form = _INTEGER_OPERATORS.get(
            node.op_type, "operator" if node.op_type.startswith("QLinear") else None
        )
        if form is not None and node.domain in _DOMAINS:
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


@dataclass(eq=False)
class _Pair:
    """A quantizer as it stands in the graph: from ``entry`` to the output of ``last``, through ``nodes``."""

    entry: ir.Value
    last: ir.Node
    nodes: set[ir.Node]
    encoding: Encoding

    @property
    def result(self) -> ir.Value:
        return self.last.outputs[0]


@dataclass(eq=False)
class _Taker:
    model: ir.Model
    found: list[tuple[ir.Value, Encoding, list[tuple[ir.Node, int]], bool, bool]] = field(
        default_factory=list
    )
    pairs: list[_Pair] = field(default_factory=list)
    same: list[tuple[_Pair, ir.Value]] = field(default_factory=list)  # changes no bit of the value beside it
    static: set[ir.Value] = field(default_factory=set)
    stored: dict[ir.Value, Encoding] = field(default_factory=dict)  # constants -> their grid
    grids: dict[ir.Value, Encoding] = field(default_factory=dict)  # what is quantized -> the grid as written
    turned: dict[ir.Value, ir.Value] = field(default_factory=dict)  # transposed constants -> as they were
    merged: dict[ir.Value, ir.Value] = field(
        default_factory=dict
    )  # value that is gone -> the one that stayed

    def take(self) -> list[Given]:
        self.names, self.outputs = Names(self.model), Outputs(self.model)
        self.values = {str(v.name): v for node in self.model.graph.all_nodes() for v in node.outputs}
        self.values.update((str(v.name), v) for graph in self.model.graphs() for v in graph.inputs)
        self.values.update((name, v) for g in self.model.graphs() for name, v in g.initializers.items())
        self._measure_values()
        self._take_constants()
        self._find_static()
        self._find()
        for pair, value in self.same:
            self._drop(pair, value)
        self.inner = {node for pair in self.pairs for node in pair.nodes}
        settled: set[ir.Value] = set()
        for pair in self.pairs:
            self._take_pair(pair, settled)
        self._check_rest()
        return [
            Given(
                str(value.name), encoding, tuple((str(n.name), port) for n, port in readers), whole, constant
            )
            for value, encoding, readers, whole, constant in self.found
        ]

    # -- activations

    def _measure_values(self) -> None:
        """Let what asks for the shape of codes ask for that of the values."""
        for node in self.model.graph.all_nodes():
            maker = node.inputs[0].producer() if _asks_shape(node) and node.inputs[0] is not None else None
            if maker is not None and _is(maker, "QuantizeLinear"):
                node.replace_input_with(0, maker.inputs[0])

    def _find(self) -> None:
        """Every quantizer of an activation, and which of them repeat one that is there already."""
        own = {
            node: pair for node in self.model.graph.all_nodes() if (pair := self._own_pair(node)) is not None
        }
        inside = {node for pair in own.values() for node in pair.nodes}
        first: dict[tuple[ir.Value, Encoding, ir.Graph | None], _Pair] = {}
        for node in self.model.graph.all_nodes():
            pair = own.get(node) or (None if node in inside else self._pair(node))
            if pair is None or not self._can_be_taken(pair):
                self._carry(node)
            else:
                self._note_pair(pair, first.setdefault((pair.entry, pair.encoding, node.graph), pair))

    def _note_pair(self, pair: _Pair, twin: _Pair) -> None:
        """Note a pair, and whether it changes no bit of what enters it or of what its ``twin`` has made of that."""
        written = written_grid(pair.last) if _is(pair.last, "DequantizeLinear") else None
        if written is not None and self.grids.get(pair.entry) == written:
            self.same.append((pair, pair.entry))
        elif twin is not pair:
            self.same.append((pair, twin.result))
        else:
            self.pairs.append(pair)
        if written is not None:
            self.grids[pair.result] = written

    def _find_static(self) -> None:
        """Values that are the same in every run."""
        self.static = {v for graph in self.model.graphs() for v in graph.initializers.values()}
        for node in self.model.graph.all_nodes():
            if node.inputs and all(value is None or value in self.static for value in node.inputs):
                self.static.update(node.outputs)

    def _can_be_taken(self, pair: _Pair) -> bool:
        """A quantizer of a constant stays in the graph, as part of a constant, where no site could hold it."""
        if pair.entry not in self.static:
            return True
        waiting = [pair.result] if pair.entry.is_initializer() else []
        while waiting:
            value = waiting.pop()
            for node, _ in value.uses():
                moved = _moved(node, pair.encoding)
                if moved is not None:
                    waiting.append(node.outputs[0])
                elif node.outputs[0] in self.static:
                    return False
        return pair.entry.is_initializer()

    def _own_pair(self, node: ir.Node) -> _Pair | None:
        """A quantizer that this package wrote and noted on its last node."""
        facts = read_metadata(node) if _own(node) else None
        entry = None if facts is None else self.values.get(facts["entry"] or "")
        if facts is None or entry is None:
            return None
        nodes = _between(node, entry)
        scale = self.values.get(facts["scale"] or "")
        if nodes is None or (facts["scale"] and scale is None):
            return None  # the file was changed since
        fmt = parse_format(facts["format"])
        array = np.ones((), np.float32) if scale is None else fixed_number(node, scale)
        zero = self._own_zero_point(nodes, fmt)
        ends = [n for n in nodes if _is(n, "QuantizeLinear")]
        block = ends[0].attributes.get_int("block_size", 0) if ends else 0
        return _Pair(entry, node, nodes, encoding_of(fmt, array, zero, facts["axis"], block, rank_of(entry)))

    def _own_zero_point(self, nodes: set[ir.Node], fmt: Format) -> Array | None:
        for node in nodes:
            if _is(node, "QuantizeLinear") and isinstance(fmt, IntFormat):
                assert node.inputs[2] is not None
                stored = fixed_number(node, node.inputs[2])
                return unshifted(stored, fmt)
            if node.op_type == "Add" and isinstance(fmt, IntFormat):  # the wide form
                assert node.inputs[1] is not None
                return fixed_number(node, node.inputs[1]).astype(np.int64)
        return None

    def _pair(self, node: ir.Node) -> _Pair | None:
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

    def _carry(self, node: ir.Node) -> None:
        """Follow grids through operators that only move data."""
        if node.domain not in ("", "ai.onnx") or not node.inputs or node.inputs[0] is None:
            return
        sources = [node.inputs[0]]
        if node.op_type == "Concat":
            sources = [v for v in node.inputs if v is not None]
        elif not moves_data(node, _known):
            return
        grids = [self.grids.get(v) for v in sources]
        grid = grids[0]
        if grid is None or not isinstance(grid.granularity, PerTensor) or any(g != grid for g in grids[1:]):
            return
        outputs = node.outputs if node.op_type == "Split" else node.outputs[:1]
        self.grids.update((value, grid) for value in outputs)

    def _drop(self, pair: _Pair, value: ir.Value) -> None:
        """Take out a quantizer that leaves every bit of ``value`` as it is."""
        value = self._kept(value)
        self._bypass(pair, value)
        if pair.last.graph is None:
            self.merged[pair.result] = value

    def _kept(self, value: ir.Value) -> ir.Value:
        while value in self.merged:
            value = self.merged[value]
        return value

    def _bypass(self, pair: _Pair, value: ir.Value) -> None:
        inputs = [v for v in pair.last.inputs if v is not None]
        pair.last.resize_inputs(1)
        pair.last.replace_input_with(0, value)
        bypass(pair.last, self.outputs)
        for source in inputs:
            remove_unread(source)

    def _take_pair(self, pair: _Pair, settled: set[ir.Value]) -> None:
        value, result = self._kept(pair.entry), pair.result
        alone = {node for node, _ in value.uses()} <= pair.nodes and not value.is_graph_output()
        whole = alone and value.producer() is not None and value not in settled
        readers = [(node, port) for node, port in result.uses() if not _asks_shape(node)]
        near = [(node, port) for node, port in readers if not self._is_apart(node)]
        if not whole and (len(near) < len(readers) or result.is_graph_output()):
            self._keep_identity(pair, value, readers)
            readers = near
        else:
            self._bypass(pair, value)
        if pair.last.graph is not None:
            readers.append((pair.last, 0))
            whole = False
        else:
            self.merged[result] = value
        if whole:
            settled.add(value)
        if value.is_initializer():
            self._note_readers(value, pair.encoding, readers)
        else:
            self.found.append((value, pair.encoding, readers, whole, False))

    def _is_apart(self, node: ir.Node) -> bool:
        """Whether no site at ``node`` can hold a quantizer of what it reads."""
        return node.op_type in TRAITS["bodies"] or node in self.inner

    def _keep_identity(self, pair: _Pair, value: ir.Value, readers: Iterable[tuple[ir.Node, int]]) -> None:
        """A place of its own for a quantizer that no reader can hold."""
        node = pair.last
        inputs = [v for v in node.inputs if v is not None]
        node.resize_inputs(1)
        node.replace_input_with(0, value)
        node.domain, node.op_type = "", "Identity"
        node.attributes.clear()
        node.metadata_props.clear()
        for source in inputs:
            remove_unread(source)
        for reader, port in readers:
            if not self._is_apart(reader):
                reader.replace_input_with(port, value)

    def _check_rest(self) -> None:
        for node in list(self.model.graph.all_nodes()):
            if not _is(node, "QuantizeLinear") or node.outputs[0] in self.static:
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

    # -- constants

    def _take_constants(self) -> None:
        twins: dict[tuple[object, ...], ir.Value] = {}
        for node in list(self.model.graph.all_nodes()):
            codes = node.inputs[0] if _is(node, "DequantizeLinear") or _widens(node) else _folded_codes(node)
            last = _closing(node)
            result = last.outputs[0]
            if (
                codes is None
                or codes.const_value is None
                or not codes.is_initializer()
                or result.is_graph_output()
            ):
                continue
            key = (*node.inputs, *sorted((a.name, str(a.value)) for a in node.attributes.values()))
            value = twins.get(key)
            if value is None:
                value = twins[key] = self._constant(node, last, codes.const_value.numpy())
            move_uses(result, value)
            remove_unread(result)
        for value in (*twins.values(), *self.turned.values()):
            if value in self.stored:
                self._note_readers(value, self.stored[value], list(value.uses()))

    def _constant(self, node: ir.Node, last: ir.Node, codes: Array) -> ir.Value:
        """The float constant that ``node`` and ``last`` compute, in its place; its grid where it has one of ours."""
        result, facts = last.outputs[0], read_metadata(last) or {}
        scale, zero, axis, block = np.ones((), np.float32), None, 0, 0
        if node.op_type == "Mul":
            scale, zero, axis = folded_parameters(node, facts)
        elif node.op_type != "Cast":
            scale, zero, axis, block = linear_parameters(node, codes.dtype)
        dtype = result.dtype or ir.DataType.FLOAT
        where = codes.ndim and axis % codes.ndim
        wide = codes.astype(np.float32)
        if zero is not None:
            wide -= spread(zero.astype(np.float32), codes.shape, where, block)
        wide *= spread(scale, codes.shape, where, block)
        encoding = self._constant_encoding(node, facts, codes, scale, zero, axis, block)
        perm = tuple(facts.get("perm", ()))
        name = str(result.name)
        result.name = self.names.value(f"{name}_dq")
        array = wide.astype(dtype.numpy(), copy=False)
        if encoding is not None and not perm:
            self.stored[made := self._initializer(name, array, dtype)] = encoding
            return made
        return (
            self._initializer(name, array, dtype)
            if not perm
            else self._turned_back(name, array, dtype, perm, encoding)
        )

    def _initializer(self, name: str, array: Array, dtype: ir.DataType) -> ir.Value:
        tensor = ir.Tensor(np.ascontiguousarray(array), dtype=dtype, name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(dtype), const_value=tensor)
        self.model.graph.register_initializer(value)
        self.values[name] = value
        return value

    def _turned_back(
        self, name: str, array: Array, dtype: ir.DataType, perm: tuple[int, ...], encoding: Encoding | None
    ) -> ir.Value:
        """A constant that was written transposed: in the orientation it had, and the transposition after it."""
        back = tuple(int(i) for i in np.argsort(perm))
        base = name.removesuffix("_transposed")
        base = self.names.value(base) if base in self.values else base
        original = self._initializer(base, array.transpose(back), dtype)
        if encoding is not None:
            self.stored[original] = transpose_encoding(encoding, back)
        label = self.names.node(f"{name}/Transpose")
        node = ir.Node("", "Transpose", [original], [ir.AttrInt64s("perm", perm)], name=label)
        value = node.outputs[0]
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(array.shape)
        self.model.graph.insert_before(self.model.graph[0], node)
        if encoding is not None:
            self.turned[value] = original
        return value

    def _constant_encoding(
        self, node: ir.Node, facts: dict[str, Any], codes: Array, scale: Array, zero: Array | None, axis: int, block: int
    ) -> Encoding | None:  # fmt: skip
        """The grid of stored codes; ``None`` where blocks cannot say it."""
        dtype = ir.DataType.from_numpy(codes.dtype)
        fmt: Format = parse_format(facts["format"]) if facts else written_format(node, dtype)
        if (
            is_small_float(fmt) and codes.dtype.kind == "i"
        ):  # stored as whole multiples of the smallest number
            scale = scale / np.float32(fmt.step)
        if isinstance(fmt, IntFormat) and zero is not None:
            zero = unshifted(zero, fmt)
        try:
            return encoding_of(fmt, scale, zero, axis, block, codes.ndim)
        except ModelError:
            return None

    def _note_readers(self, value: ir.Value, encoding: Encoding, uses: Iterable[tuple[ir.Node, int]]) -> None:
        """Note who reads a constant, also after operators that only move it."""
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
                self.found.append((value, encoding, readers, False, True))


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
        return (
            transpose_encoding(encoding, perm)
            if rank or isinstance(encoding.granularity, PerTensor)
            else None
        )
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
