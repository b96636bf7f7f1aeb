"""Rewrite integer operators as float operators between QuantizeLinear and DequantizeLinear.

Files of the QOperator format, files that were quantized dynamically, and weights in packed integers become QDQ files, whose
quantizers :mod:`bitwright.onnx.existing_quantizers` takes over:

=============================================  ====================================================================
found                                          becomes
=============================================  ====================================================================
QLinearConv, QLinearMatMul, and QLinearAdd,    the float operator on dequantized inputs, and a QuantizeLinear after it
QGemm, ... of ``com.microsoft``
MaxPool, Reshape, Concat, ... on codes         the same on the values of the codes
DynamicQuantizeLinear, and MatMulInteger or    the float operator on the input itself, and the dequantized weight: which
ConvInteger with its scales after it           grid the activation has is chosen by the rules again
DynamicQuantizeMatMul, DynamicQuantizeLSTM,    the same
MatMulIntegerToFloat
MatMulNBits with 4 or 8 bits                   MatMul with a weight that is dequantized block by block
=============================================  ====================================================================

The operators are defined in ONNX Runtime's `ContribOperators.md` and in the ONNX standard. What has another form is left, and
refused later by its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.errors import ModelError, some_of
from bitwright.export.files.onnx_file import all_graphs, all_nodes, array_of
from bitwright.export.qdq.forms import METADATA, Builder, before
from bitwright.export.qdq.markers import remove_unread
from bitwright.export.qdq.nbits import from_pairs, restore_nbits
from bitwright.export.qdq.trace import moves_data

Array = NDArray[Any]
_OWN = "com.microsoft"
_STANDARD = ("", "ai.onnx")
_FLOAT = ir.DataType.FLOAT
_SUFFIX, _CODES = "_quant", "_quantized"  # that ONNX Runtime's tool gives the names of operators and of codes


@dataclass(frozen=True)
class _Codes:
    """A tensor of codes.

    Attributes:
        grid: scale and zero point.
        value: the float tensor that the codes stand for, if it exists already.
        dynamic: the grid is chosen at run time, and ``value`` is what is rounded to it.
    """

    grid: tuple[ir.Value, ir.Value | None]
    value: ir.Value | None = None
    dynamic: bool = False


def write_as_qdq(model: ir.Model) -> list[str]:
    """Write operators on codes as QDQ, in place; notes of what was found.

    Args:
        model: nodes in order, names unique, constants as initializers.
    """
    if not any(_computes_on_codes(node) for node in all_nodes(model.graph)):
        return []
    restore_nbits(model)  # of an export, which knows more about them
    writer = _Writer(model)
    for graph in list(all_graphs(model.graph)):
        for node in list(graph):
            writer.visit(node)
    writer.drop_unread()
    return list(writer.notes())


def _computes_on_codes(node: ir.Node) -> bool:
    if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear"):
        # files that this package wrote keep theirs
        plain = METADATA not in node.metadata_props and node.op_type == "QuantizeLinear"
        return not plain or any(use.node.op_type in _ON_CODES for use in node.outputs[0].uses())
    return node.op_type in _ROWS and node.domain in (*_STANDARD, _OWN)


class _Writer:
    def __init__(self, model: ir.Model) -> None:
        self.builder = Builder(model)
        self.codes: dict[ir.Value, _Codes] = {}
        self.written: Counter[str] = Counter()
        self.dynamic: list[str] = []
        self.left: list[ir.Value] = []  # results that nothing reads any more

    def notes(self) -> Iterator[str]:
        """Notes on rewritten operators and on decisions that the rules make again."""
        if self.written:
            kinds = some_of([f"{n} {kind}" for kind, n in sorted(self.written.items())], 5)
            yield f"operators on codes are float operators between QuantizeLinear and DequantizeLinear now: {kinds}"
        if self.dynamic:
            yield (
                f"the ranges of {some_of(self.dynamic)} were chosen at run time: the rules decide how they are quantized, and "
                "calibration chooses the range"
            )

    # -- one operator

    def visit(self, node: ir.Node) -> None:
        """Rewrite one node; what it reads was visited before."""
        row = _ROWS.get(node.op_type) if node.domain in (*_STANDARD, _OWN) else None
        if node.op_type == "QuantizeLinear" and METADATA not in node.metadata_props:
            self._note(node.outputs[0], node, 1, 2)
        elif node.op_type == "DynamicQuantizeLinear" and node.inputs[0] is not None:
            grid = (node.outputs[1], node.outputs[2])
            self.codes[node.outputs[0]] = _Codes(grid, node.inputs[0], dynamic=True)
        elif node.op_type == "DequantizeLinear":
            self._bypass(node)
        elif row is not None:
            row(self, node)
        elif node.op_type in _ON_CODES and node.inputs and node.inputs[0] in self.codes:
            self._move(node)

    def drop_unread(self) -> None:
        """Remove nodes that only rewritten operators read."""
        for value in (*self.left, *self.codes):
            remove_unread(value)

    def _note(self, codes: ir.Value, node: ir.Node, scale: int, zero: int) -> None:
        grid = node.inputs[scale], node.inputs[zero] if len(node.inputs) > zero else None
        if grid[0] is not None:
            self.codes[codes] = _Codes((grid[0], grid[1]))

    def _bypass(self, node: ir.Node) -> None:
        """Read the float tensor of codes that were moved, where both have one grid."""
        codes = self.codes.get(node.inputs[0]) if node.inputs[0] is not None else None
        if codes is None or codes.value is None or codes.dynamic or METADATA in node.metadata_props:
            return
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        if not (_equal(codes.grid[0], node.inputs[1]) and _equal(codes.grid[1], zero)):
            return
        if not (codes.value.is_graph_output() and node.outputs[0].is_graph_output()):
            self.replace(node.outputs[0], codes.value)

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Let ``new`` take the place of ``old``, and its name if ``new`` is not returned under another."""
        self.left.append(old)
        for use in tuple(old.uses()):
            use.node.replace_input_with(use.idx, new)
        returned = new.is_graph_output()
        name, old.name = old.name, self.builder.names.value(f"{old.name}_before")
        if old.is_graph_output():
            self.builder.outputs.replace(old, new)
        if not returned:
            new.name = name

    # -- what rows use

    def float_of(self, node: ir.Node, port: int, scale: int, zero: int, axis: int | None = None) -> ir.Value:
        """The float tensor of the codes at ``port``, on the grid that the node states."""
        value, (step, origin) = node.inputs[port], (_at(node, scale), _at(node, zero))
        assert value is not None and step is not None
        codes = self.codes.get(value)
        known = codes is not None and codes.value is not None and not codes.dynamic
        if known and _equal(codes.grid[0], step) and _equal(codes.grid[1], origin):  # type: ignore[union-attr]
            return codes.value  # type: ignore[union-attr,return-value]
        along = {} if axis is None or _size(step) < 2 else {"axis": axis}
        inputs = [value, step] if origin is None else [value, step, origin]
        return self.builder.emit(before(node), "DequantizeLinear", inputs, _float_name(value), _FLOAT, **along)

    def operator(
        self, node: ir.Node, op: str, inputs: Sequence[ir.Value], attributes: Iterable[ir.Attr] = (), name: str = ""
    ) -> ir.Value:
        """Insert a float operator before ``node``, named after its result."""
        base = str(node.name or node.outputs[0].name).removesuffix(_SUFFIX)
        made = ir.Node("", op, inputs, list(attributes), name=self.builder.names.node(f"{base}_bias" if name else base))
        made.outputs[0].name = self.builder.names.value(name or _float_name(node.outputs[0]))
        made.outputs[0].type = ir.TensorType(_FLOAT)
        before(node)(made)
        return made.outputs[0]

    def quantized(self, node: ir.Node, result: ir.Value, scale: int, zero: int) -> None:
        """Let ``result``, rounded to the grid that ``node`` states, take the place of its codes."""
        step, origin = _at(node, scale), _at(node, zero)
        if step is None:
            self.finish(node, result)
            return
        inputs = [result, step] if origin is None else [result, step, origin]
        kind = ir.DataType.UINT8 if origin is None or origin.dtype is None else origin.dtype
        codes = self.builder.emit(before(node), "QuantizeLinear", inputs, f"{node.outputs[0].name}_q", kind)
        value = self.builder.emit(
            before(node), "DequantizeLinear", [codes, *inputs[1:]], f"{node.outputs[0].name}_dq", _FLOAT
        )
        self.codes[codes] = _Codes((step, origin), value)
        self.finish(node, codes)

    def finish(self, node: ir.Node, result: ir.Value) -> None:
        """Let ``result`` take the place of the node's own."""
        self.written[node.op_type] += 1
        self.replace(node.outputs[0], result)

    def _one_grid(self, moved: Sequence[ir.Value]) -> list[ir.Value] | None:
        """Scale and zero point of tensors of codes, if they have the same and it is not chosen at run time."""
        found = [self.codes.get(value) for value in moved]
        first = found[0]
        for one in found:
            if one is None or first is None or one.dynamic:
                return None
            if not (_equal(one.grid[0], first.grid[0]) and _equal(one.grid[1], first.grid[1])):
                return None
        return None if first is None else [value for value in first.grid if value is not None]

    def _move(self, node: ir.Node) -> None:
        """Rewrite an operator that moves codes as the same operator on floats."""
        moved = [value for value in (node.inputs if node.op_type == "Concat" else node.inputs[:1]) if value is not None]
        grid = self._one_grid(moved)
        if grid is None or not _moves_codes(node):
            return
        for port, value in enumerate(moved):
            codes = self.codes[value]
            source = codes.value or self.builder.emit(
                before(node), "DequantizeLinear", [value, *grid], f"{value.name}_dq", _FLOAT
            )
            self.codes[value] = _Codes(codes.grid, source)
            node.replace_input_with(port, source)
        for old in node.outputs:
            kind = old.dtype or ir.DataType.UINT8
            old.type = ir.TensorType(_FLOAT)
            uses = tuple(old.uses())
            after = self.builder.emit(_behind(node), "QuantizeLinear", [old, *grid], f"{old.name}_q", kind)
            for use in uses:
                use.node.replace_input_with(use.idx, after)
            self.codes[after] = _Codes(self.codes[moved[0]].grid, old)
            if old.is_graph_output():
                name, old.name = old.name, self.builder.names.value(f"{old.name}_before")
                self.builder.outputs.replace(old, after)
                after.name = name


def _moves_codes(node: ir.Node) -> bool:
    moves = node.op_type in ("Concat", "MaxPool") or moves_data(node, array_of)
    return moves and (len(node.outputs) == 1 or node.op_type == "Split")


def _float_name(codes: ir.Value) -> str:
    """The name of a tensor of codes in the float model, or one made of its own."""
    name = str(codes.name)
    return name.removesuffix(_CODES) if name.endswith(_CODES) else f"{name}_float"


def _behind(node: ir.Node) -> Callable[[ir.Node], None]:
    graph = node.graph
    assert graph is not None
    return lambda made: graph.insert_after(node, made)


def _at(node: ir.Node, port: int) -> ir.Value | None:
    return node.inputs[port] if 0 <= port < len(node.inputs) else None


def _equal(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Whether two scales or zero points are equal; a missing zero point is 0."""
    if one is other:
        return True
    first, second = (np.zeros((), np.uint8) if value is None else array_of(value) for value in (one, other))
    if first is None or second is None:
        return False
    return first.size == second.size and bool((first.reshape(-1) == second.reshape(-1)).all())


def _size(value: ir.Value) -> int:
    array = array_of(value)
    return 1 if array is None else array.size


def _attributes(node: ir.Node, *names: str) -> list[ir.Attr]:
    return [node.attributes[name] for name in names if name in node.attributes]


# ------------------------------------------------------------------------------------------------ static grids


def _convolution(w: _Writer, node: ir.Node) -> None:
    """QLinearConv: x, w, y with scale and zero point each, and an int32 bias on the product of the scales of x and w."""
    x, weight = w.float_of(node, 0, 1, 2), w.float_of(node, 3, 4, 5, axis=0)
    inputs = [x, weight]
    if _at(node, 8) is not None:
        inputs.append(_bias(w, node, 8, 1, 4))
    w.quantized(node, w.operator(node, "Conv", inputs, node.attributes.values()), 6, 7)


def _bias(w: _Writer, node: ir.Node, port: int, one: int, other: int, factor: float = 1.0) -> ir.Value:
    """Int32 sums of the integer operator, on the grid of its products."""
    bias, scales = node.inputs[port], [array_of(_at(node, one)), array_of(_at(node, other))]
    assert bias is not None
    if scales[0] is None or scales[1] is None:  # it is read on a scale that is not known
        problem = "the scales of its factors are computed while the model runs"
        raise ModelError(str(node.name), problem, "start from the float model")
    step = np.asarray(scales[0] * scales[1] * np.float32(factor), np.float32)
    step = step.reshape(()) if step.size == 1 else step.reshape(-1)
    grid = w.builder.initializer(f"{bias.name}_scale", step)
    along = {"axis": 0} if step.ndim else {}
    return w.builder.emit(before(node), "DequantizeLinear", [bias, grid], _float_name(bias), _FLOAT, **along)


def _product(w: _Writer, node: ir.Node) -> None:
    """QLinearMatMul: a, b, y with scale and zero point each."""
    a, b = w.float_of(node, 0, 1, 2, axis=-2), w.float_of(node, 3, 4, 5, axis=-1)
    w.quantized(node, w.operator(node, "MatMul", [a, b]), 6, 7)


def _gemm(w: _Writer, node: ir.Node) -> None:
    """QGemm of ``com.microsoft``: as QLinearMatMul, with a bias and factors; without the last scale its result is float."""
    turned = node.attributes.get_int("transB", 0)
    inputs = [w.float_of(node, 0, 1, 2), w.float_of(node, 3, 4, 5, axis=0 if turned else 1)]
    if _at(node, 6) is not None:
        inputs.append(_bias(w, node, 6, 1, 4, node.attributes.get_float("alpha", 1.0)))
    kept = _attributes(node, "alpha", "transA", "transB")
    w.quantized(node, w.operator(node, "Gemm", inputs, kept), 7, 8)


def _binary(op: str) -> Callable[[_Writer, ir.Node], None]:
    """QLinearAdd and QLinearMul of ``com.microsoft``."""

    def write(w: _Writer, node: ir.Node) -> None:
        w.quantized(node, w.operator(node, op, [w.float_of(node, 0, 1, 2), w.float_of(node, 3, 4, 5)]), 6, 7)

    return write


def _unary(op: str, *attributes: str) -> Callable[[_Writer, ir.Node], None]:
    """Operators of one tensor of ``com.microsoft``: x and y with scale and zero point each."""

    def write(w: _Writer, node: ir.Node) -> None:
        if not node.attributes.get_int("channels_last", 0):
            kept = _attributes(node, *attributes)
            w.quantized(node, w.operator(node, op, [w.float_of(node, 0, 1, 2)], kept), 3, 4)

    return write


def _join(w: _Writer, node: ir.Node) -> None:
    """QLinearConcat of ``com.microsoft``: the grid of the result, then tensor, scale and zero point of each part."""
    parts = [w.float_of(node, port, port + 1, port + 2) for port in range(2, len(node.inputs), 3)]
    w.quantized(node, w.operator(node, "Concat", parts, _attributes(node, "axis")), 0, 1)


def _choice(w: _Writer, node: ir.Node) -> None:
    """QLinearWhere of ``com.microsoft``."""
    condition = node.inputs[0]
    assert condition is not None
    w.quantized(
        node, w.operator(node, "Where", [condition, w.float_of(node, 1, 2, 3), w.float_of(node, 4, 5, 6)]), 7, 8
    )


# ------------------------------------------------------------------------------------------------ grids chosen at run time


def _integer_layer(op: str) -> Callable[[_Writer, ir.Node], None]:
    """MatMulInteger and ConvInteger of codes of DynamicQuantizeLinear: Cast, and a Mul with the product of both scales."""

    def write(w: _Writer, node: ir.Node) -> None:
        codes = w.codes.get(node.inputs[0]) if node.inputs[0] is not None else None
        found = _scaled(node, codes) if codes is not None and codes.dynamic else None
        if codes is None or codes.value is None or found is None or not _agrees(codes, _at(node, 2)):
            return
        last, step = found
        axis = 0 if op == "Conv" else -1
        scale = w.builder.initializer(f"{_stored(node, 1)}_scale", _flat(step))
        weight = _dequantized(w, node, node.inputs[1], scale, _at(node, 3), axis)
        w.dynamic.append(str(codes.value.name))
        made = w.operator(node, op, [codes.value, weight], node.attributes.values())
        w.written[node.op_type] += 1
        w.replace(last.outputs[0], made)

    return write


def _stored(node: ir.Node, port: int) -> str:
    value = node.inputs[port]
    return str(node.name if value is None else value.name)


def _agrees(codes: _Codes, zero: ir.Value | None) -> bool:
    return zero is codes.grid[1]


def _flat(step: Array) -> Array:
    step = np.asarray(step, np.float32)
    return step.reshape(()) if step.size == 1 else step.reshape(-1)


def _dequantized(
    w: _Writer, node: ir.Node, codes: ir.Value | None, scale: ir.Value, zero: ir.Value | None, axis: int
) -> ir.Value:
    assert codes is not None
    step = array_of(scale)
    along = {"axis": axis} if step is not None and step.size > 1 else {}
    origin = [] if zero is None else [zero]
    if step is not None and step.ndim == 0 and zero is not None:
        number = array_of(zero)
        if number is not None and number.ndim:
            origin = [w.builder.initializer(f"{zero.name}_scalar", number.reshape(()))]
    return w.builder.emit(
        before(node), "DequantizeLinear", [codes, scale, *origin], _float_name(codes), _FLOAT, **along
    )


def _scaled(node: ir.Node, codes: _Codes) -> tuple[ir.Node, Array] | None:
    """The Mul after the sums that scales them, and the weight's scale in it."""
    cast = _only_reader(node.outputs[0])
    last = None if cast is None or cast.op_type != "Cast" else _only_reader(cast.outputs[0])
    if cast is None or last is None or last.op_type != "Mul":
        return None
    factor = next((value for value in last.inputs if value is not cast.outputs[0]), None)
    maker = None if factor is None else factor.producer()
    if maker is None or maker.op_type != "Mul" or codes.grid[0] not in maker.inputs:
        return None
    other = next((value for value in maker.inputs if value is not codes.grid[0]), None)
    step = array_of(other)
    return None if step is None else (last, step)


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _dynamic_product(w: _Writer, node: ir.Node) -> None:
    """DynamicQuantizeMatMul of ``com.microsoft``: float A; B, its scale and zero point; a float bias."""
    a, scale = node.inputs[0], _at(node, 2)
    if a is None or scale is None or array_of(scale) is None:
        return
    weight = _dequantized(w, node, node.inputs[1], _step(w, scale), _at(node, 3), -1)
    w.dynamic.append(str(a.name))
    w.finish(node, _with_bias(w, node, w.operator(node, "MatMul", [a, weight]), 4))


def _product_of_codes(w: _Writer, node: ir.Node) -> None:
    """MatMulIntegerToFloat of ``com.microsoft``: A, B, both scales, both zero points, a float bias."""
    codes, scale = w.codes.get(node.inputs[0]) if node.inputs[0] is not None else None, _at(node, 3)
    if scale is None or array_of(scale) is None:
        return
    if codes is not None and codes.dynamic and codes.value is not None:
        if codes.grid != (_at(node, 2), _at(node, 4)):
            return
        a = codes.value
        w.dynamic.append(str(a.name))
    else:
        a = w.float_of(node, 0, 2, 4)
    weight = _dequantized(w, node, node.inputs[1], _step(w, scale), _at(node, 5), -1)
    w.finish(node, _with_bias(w, node, w.operator(node, "MatMul", [a, weight]), 6))


def _step(w: _Writer, scale: ir.Value) -> ir.Value:
    array = array_of(scale)
    assert array is not None
    return (
        scale if array.ndim == 0 or array.size > 1 else w.builder.initializer(f"{scale.name}_scalar", array.reshape(()))
    )


def _with_bias(w: _Writer, node: ir.Node, result: ir.Value, port: int) -> ir.Value:
    bias = _at(node, port)
    return result if bias is None else w.operator(node, "Add", [result, bias], name=f"{node.outputs[0].name}_biased")


def _recurrent(w: _Writer, node: ir.Node) -> None:
    """DynamicQuantizeLSTM of ``com.microsoft``: an LSTM whose two matrices are codes ``[directions, inner, 4 * hidden]``."""
    parts = [_matrix(w, node, *ports) for ports in ((1, 8, 9), (2, 10, 11))]
    if any(part is None for part in parts):
        return
    w.written[node.op_type] += 1
    w.dynamic.append(_stored(node, 0))
    w.left.extend(value for value in node.inputs[1:] if value is not None)
    inputs = [node.inputs[0], *parts, *node.inputs[3:8]]
    node.domain, node.op_type = "", "LSTM"
    node.name = w.builder.names.node(str(node.name).removesuffix(_SUFFIX))
    node.resize_inputs(len(inputs))
    for port, value in enumerate(inputs):
        node.replace_input_with(port, value)


def _matrix(w: _Writer, node: ir.Node, port: int, scale: int, zero: int) -> ir.Value | None:
    """A matrix of DynamicQuantizeLSTM ``[directions, 4 * hidden, inner]``, dequantized; ``None`` where it is not constant."""
    codes, step, origin = (array_of(_at(node, k)) for k in (port, scale, zero))
    if codes is None or step is None:
        return None
    turned, name = np.ascontiguousarray(codes.transpose(0, 2, 1)), _stored(node, port).removesuffix(_CODES)
    directions, rows, _ = turned.shape
    per_row = step.size == directions * rows and step.size > directions
    if per_row and directions > 1:  # a scale for every row of every direction is no grid of one axis
        shape = (directions, rows, 1)
        shift = 0 if origin is None else origin.astype(np.float32).reshape(shape)
        return w.builder.initializer(name, (turned.astype(np.float32) - shift) * step.astype(np.float32).reshape(shape))
    grid = [w.builder.initializer(f"{name}_scale_of_rows", _flat(step))]
    if origin is not None:
        number = origin.reshape(()) if origin.size == 1 else origin.reshape(-1)
        grid.append(w.builder.initializer(f"{name}_zero_of_rows", number))
    stored = w.builder.initializer(f"{name}_codes", turned)
    along = {"axis": 1 if per_row else 0} if step.size > 1 else {}
    return w.builder.emit(before(node), "DequantizeLinear", [stored, *grid], name, _FLOAT, **along)


# ------------------------------------------------------------------------------------------------ packed weights


def _packed(w: _Writer, node: ir.Node) -> None:
    """MatMulNBits of ``com.microsoft``: A; codes ``[N, blocks, bytes]``; scales; zero points, packed or float; order; bias."""
    bits, size = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 0)
    columns, inner = node.attributes.get_int("N", 0), node.attributes.get_int("K", 0)
    stored, scales, zeros = (array_of(_at(node, port)) for port in (1, 2, 3))
    if bits not in (4, 8) or not size or stored is None or scales is None or _at(node, 4) is not None:
        return
    if zeros is not None and zeros.dtype != np.uint8 or not columns or not inner:
        return
    blocks = -(-inner // size)
    codes = _numbers(stored.reshape(columns, -1), bits, inner)
    origin = np.full((columns, blocks), 1 << (bits - 1), np.uint8)
    if zeros is not None:
        origin = _numbers(zeros.reshape(columns, -1), bits, blocks)
    kind = ir.DataType.UINT4 if bits == 4 else ir.DataType.UINT8
    name = _stored(node, 1)

    def constant(suffix: str, array: Array) -> ir.Value:
        held = ir.Tensor(np.ascontiguousarray(array.T).astype(kind.numpy()), dtype=kind)
        return w.builder.initializer_of(f"{name}_{suffix}", held)

    step = np.ascontiguousarray(scales.reshape(columns, blocks).T.astype(np.float32))
    grid = [w.builder.initializer(f"{name}_scale", step), constant("zero_point", origin)]
    inputs = [constant("codes", codes), *grid]
    weight = w.builder.emit(before(node), "DequantizeLinear", inputs, f"{name}_dq", _FLOAT, axis=0, block_size=size)
    a = node.inputs[0]
    assert a is not None
    w.finish(node, _with_bias(w, node, w.operator(node, "MatMul", [a, weight]), 5))


def _numbers(stored: Array, bits: int, count: int) -> Array:
    """The first ``count`` codes of rows of bytes."""
    return stored[:, :count] if bits == 8 else from_pairs(stored, count)


_POOL = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
#: operator -> what writes it
_ROWS: dict[str, Callable[[_Writer, ir.Node], None]] = {
    "QLinearConv": _convolution,
    "QLinearMatMul": _product,
    "QGemm": _gemm,
    "QLinearAdd": _binary("Add"),
    "QLinearMul": _binary("Mul"),
    "QLinearSigmoid": _unary("Sigmoid"),
    "QLinearLeakyRelu": _unary("LeakyRelu", "alpha"),
    "QLinearSoftmax": _unary("Softmax", "axis"),
    "QLinearGlobalAveragePool": _unary("GlobalAveragePool"),
    "QLinearAveragePool": _unary("AveragePool", *_POOL),
    "QLinearConcat": _join,
    "QLinearWhere": _choice,
    "MatMulInteger": _integer_layer("MatMul"),
    "ConvInteger": _integer_layer("Conv"),
    "DynamicQuantizeMatMul": _dynamic_product,
    "MatMulIntegerToFloat": _product_of_codes,
    "DynamicQuantizeLSTM": _recurrent,
    "MatMulNBits": _packed,
}
#: operators that may stand between codes and only move them
_ON_CODES = frozenset(
    ("MaxPool", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Slice", "Gather", "Split", "Expand",
     "Tile", "DepthToSpace", "SpaceToDepth", "Concat")
)  # fmt: skip
