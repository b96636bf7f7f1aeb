"""Write constants of a marked model in stored form: weights as integers, biases as int32 on the derived grid."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.graph.operators import TRAITS, weight_axes
from bitwright.core.graph.recurrence import CELLS
from bitwright.core.numerics.affine import with_scale
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.integer_sums import (
    bias_entries,
    derive_bias_encoding,
    floor_weight_scale,
    quantize_bias,
    underivable,
)
from bitwright.export.files.onnx_file import all_nodes, let_go
from bitwright.export.qdq.forms import before
from bitwright.export.qdq.markers import bypass, is_site, remove_unread, site_of
from bitwright.export.qdq.stored import (
    Stored,
    folded,
    has_scale,
    in_whole_blocks,
    store_constant,
    transpose_encoding,
    unsigned,
)
from bitwright.export.qdq.trace import bias_place, permutation
from bitwright.export.qdq.writing import Weight, Writing, Written

# Several scales that integer kernels of ONNX Runtime handle: (operator, port) -> any, or (axis, rank).
_KERNEL_AXES: dict[tuple[str, int], tuple[int, int | None] | Literal["any"]] = {
    ("Conv", 1): (0, None),
    ("MatMul", 1): (1, 2),
    ("Gemm", 1): "any",
    ("ConvTranspose", 1): "any",
    ("Gather", 0): "any",
    # no integer kernel reads a DequantizeLinear in front of these
    **{(op_type, port): "any" for op_type in CELLS for port in (1, 2)},
}


# Ports of weights, whose signedness integer kernels take as it comes.
_WEIGHT_PORTS = {
    **dict.fromkeys(TRAITS["layer"], (1,)),
    **dict.fromkeys(CELLS, (1, 2)),
    **dict.fromkeys(("Gather", "Transpose"), (0,)),
}

_KERNEL_BITS = 8  # above which ONNX Runtime computes a layer in float, and reads no bias on the grid of an integer sum
_STORED_BITS = 16  # above which no QuantizeLinear is written, and ONNX Runtime sees operators on floats
_MANTISSA = 24  # bits of a float32


@dataclass(frozen=True)
class _Bias:
    """A bias with a derivable int32 grid; ``node`` reads it at ``port``."""

    node: ir.Node
    port: int
    source: ir.Value
    array: NDArray[np.float32]
    site: str | None
    input: Encoding
    weight: Weight

    @property
    def name(self) -> str:
        return self.site or str(self.source.name)


def write_biases(w: Writing) -> None:
    """Raise weight scales where a bias needs it, then write each bias on its derived grid."""
    found = [bias for node in all_nodes(w.model.graph) for bias in _biases_of(w, node)]
    for bias in found:
        site, seen = bias.weight.site, _weight_encoding(w, bias)
        floored = floor_weight_scale(seen, bias.input, bias.array, bias.name)
        if floored is not seen:
            given = w.encodings[site]
            scale = floored.scale.reshape(given.scale.shape)
            raised = with_scale(given, scale)
            w.encodings[site] = w.raised[site] = raised
    for site in w.raised:
        text = "its scale was raised where an int32 bias would not fit; simulate with the encoding written"
        w.note(site, "raised scale", text)
    for bias in found:
        _write_bias(w, bias)
    if w.target.runtime == "onnxruntime":
        for node in all_nodes(w.model.graph):
            _keep_float_bias(w, node)


def _weight_encoding(w: Writing, bias: _Bias) -> Encoding:
    """The weight's present encoding, in the orientation that its operator reads."""
    seen = bias.weight.encoding
    scale = w.encodings[bias.weight.site].scale.reshape(seen.scale.shape)
    if np.array_equal(scale, seen.scale):
        return seen
    return with_scale(seen, scale)


def _biases_of(w: Writing, node: ir.Node) -> Iterator[_Bias]:
    """The biases of ``node`` that can be int32; adds a note where one cannot."""
    place = bias_place(node)
    if place is None:
        return
    operator, port = place
    value, data, weight_value = node.inputs[port], operator.inputs[0], operator.inputs[1]
    assert value is not None and data is not None and weight_value is not None
    marker = value.producer()
    site = site_of(marker) if marker is not None and is_site(marker) else None
    source = marker.inputs[0] if marker is not None and site is not None else value
    assert source is not None
    given, weight, array = w.grids.get(data), w.weights.get(weight_value), w.array(source)
    if given is None or weight is None or array is None or (site is None and w.bias == "marked"):
        return
    if site is not None and w.encodings[site].format != IntFormat(32):
        return
    problem = _bias_problem(operator, given, weight, array)
    if problem is not None:
        w.note(site or str(source.name), "float bias", f"no int32 bias: {problem}")
        return
    yield _Bias(node, port, source, np.asarray(array, np.float32), site, given, weight)


def _write_bias(w: Writing, bias: _Bias) -> None:
    encoding = derive_bias_encoding(bias.input, _weight_encoding(w, bias), bias.array, bias.name)
    if bias.site is not None and w.encodings[bias.site] != encoding:
        text = "written with input scale times weight scale, which differs from the encoding given"
        w.note(bias.site, "replaced bias", text)
    key, source = (bias.source, encoding), bias.source
    if key not in w.stored:
        axis = bias.array.ndim - 1 if encoding.scale.ndim else None
        small = Stored(quantize_bias(bias.array, encoding), encoding.scale, None, axis)
        w.stored[key] = (small, _parameters(w, small, str(source.name)))
    small, values = w.stored[key]
    marker = bias.node.inputs[bias.port]
    write = _folded if w.target.folds and bias.node in w.in_float else _dequantize
    result = write(w, bias.node, small, values, source)
    bias.node.replace_input_with(bias.port, result)
    w.heirs.setdefault(source, result)
    maker = None if marker is None else marker.producer()
    places = [] if bias.site is None or maker is None else [w.places[maker]]
    w.record(result, Written(places, "bias", encoding, values[1], small.axis))
    if bias.site is not None and marker is not None:
        remove_unread(marker)


def _keep_float_bias(w: Writing, node: ir.Node) -> None:
    """Write a float bias that ONNX Runtime would put on an int32 grid which cannot hold it, as integers on grids of their own.

    Its optimizer makes ``round(bias / (input scale * weight scale))`` of every float initializer that a layer with quantized
    input and weight reads as a bias, and codes of 16 bits on both sides make that larger than int32. It leaves a
    DequantizeLinear alone. Each number gets a scale of its own that is a power of two, so that none of its 24 bits is lost.
    """
    place = bias_place(node)
    if place is None or place[0].op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
        return
    operator, port = place
    source, data, weight_value = node.inputs[port], operator.inputs[0], operator.inputs[1]
    assert source is not None and data is not None and weight_value is not None
    given, weight, array = w.grids.get(data), w.weights.get(weight_value), w.array(source)
    if given is None or weight is None or array is None or source.dtype != ir.DataType.FLOAT or array.ndim != 1:
        return
    formats = (given.format, weight.encoding.format)
    bits = [fmt.bits for fmt in formats if isinstance(fmt, IntFormat)]
    if len(bits) < len(formats) or not _KERNEL_BITS < max(bits) <= _STORED_BITS or not np.isfinite(array).all():
        return
    key = (source, "float")
    if key not in w.stored:
        codes, scale = _exact_codes(np.asarray(array, np.float32))
        small = Stored(codes, scale, None, 0)
        w.stored[key] = (small, _parameters(w, small, str(source.name)))
    small, values = w.stored[key]
    result = _dequantize(w, node, small, values, source)
    node.replace_input_with(port, result)
    w.heirs.setdefault(source, result)


def _exact_codes(array: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Integers of at most 24 bits and powers of two whose products are ``array``, except for bits below 2 ** -126."""
    exponent = np.maximum(np.frexp(array)[1] - _MANTISSA, np.finfo(np.float32).minexp)
    return np.rint(np.ldexp(array.astype(np.float64), -exponent)).astype(np.int32), np.ldexp(np.float32(1), exponent)


def _dequantize(w: Writing, at: ir.Node, small: Stored, values: list[ir.Value], source: ir.Value) -> ir.Value:
    """The float value of a stored constant in the type of its ``source``, computed before ``at``."""
    dtype, name = source.dtype or ir.DataType.FLOAT, f"{source.name}_dq"
    value, is_float32 = values[0], dtype == ir.DataType.FLOAT
    if small.op == "DequantizeLinear":
        value = w.builder.emit(
            before(at),
            small.op,
            values,
            name if is_float32 else f"{source.name}_f32",
            ir.DataType.FLOAT,
            **_axis_attributes(small),
        )
    if small.op in ("Gather", "Sub"):
        value = _written_out(w, at, small, values, str(source.name))
    if small.op == "Cast" or not is_float32:
        value = w.builder.emit(before(at), "Cast", [value], name, dtype, to=int(dtype))
    return value


def _written_out(w: Writing, at: ir.Node, small: Stored, values: list[ir.Value], name: str) -> ir.Value:
    """Codebook entries of the stored indices, or codes minus zero points, times the scales; written before ``at``."""
    codes, scale, other, *shape = values

    def emit(op: str, inputs: list[ir.Value], suffix: str, dtype: ir.DataType, **attributes: int) -> ir.Value:
        return w.builder.emit(before(at), op, inputs, f"{name}_{suffix}", dtype, **attributes)

    dtype = ir.DataType.FLOAT if small.table is None else ir.DataType.INT32
    cast = emit("Cast", [codes], "codes", dtype, to=int(dtype))
    numbers = emit(str(small.op), [cast, other] if small.table is None else [other, cast], "numbers", ir.DataType.FLOAT)
    if small.table is not None and small.table.ndim == 2:
        assert small.shape is not None
        return _scaled_vectors(emit, small, numbers, scale, shape[0])
    numbers.shape = cast.shape
    value = emit("Mul", [numbers, scale], "dq" if small.shape is None else "blocks", ir.DataType.FLOAT)
    if small.shape is not None:
        value = emit("Reshape", [value, *shape], "dq", ir.DataType.FLOAT)
        value.shape = ir.Shape(small.shape.tolist())
    return value


def _scaled_vectors(emit: Any, small: Stored, numbers: ir.Value, scale: ir.Value, shape: ir.Value) -> ir.Value:
    """Vectors of a codebook ``[R, C / d, d]`` in the shape of the constant, times its scales."""
    assert small.shape is not None
    if small.axis == -2:
        numbers = emit("Transpose", [numbers], "turned", ir.DataType.FLOAT)
        turning = numbers.producer()
        assert turning is not None
        turning.attributes["perm"] = ir.AttrInt64s("perm", [1, 2, 0])
    whole = emit("Reshape", [numbers, shape], "grid", ir.DataType.FLOAT)
    value: ir.Value = emit("Mul", [whole, scale], "dq", ir.DataType.FLOAT)
    whole.shape = value.shape = ir.Shape(small.shape.tolist())
    return value


def write_constant(w: Writing, node: ir.Node, site: str) -> None:
    """Replace a marker of a weight or another constant by a stored initializer and its dequantization."""
    source, result = node.inputs[0], node.outputs[0]
    assert source is not None
    encoding = w.encodings[site]
    in_body = _is_read_in_body(w, result)
    apart = in_body or _saturates(w, result, encoding)
    shift = apart or (w.activation == "unsigned" and not _is_weight(result))
    turned = has_scale(encoding) and source.dtype in (None, ir.DataType.FLOAT)
    for reader, port in tuple(result.uses()) if turned else ():
        if reader.op_type == "Transpose" and port == 0:
            _write_transposed(w, reader, source, encoding, w.places[node], shift=apart)
    if remove_unread(result):
        return
    shown = unsigned(encoding) if shift else encoding
    small, values = _store(w, source, (), encoding, shown, site, result)
    folds = _folds(w, result) and small.op == "DequantizeLinear"
    write = _folded if folds else _dequantize
    value = write(w, node, small, values, source)
    if small.op is None:
        kind = encoding.format.name + (" with zero points that are real numbers" if encoding.shift is not None else "")
        w.note(site, "stored in float", f"{kind}: such constants have no exact small form")
    result = _in_place_of_marker(w, node, value)
    w.heirs.setdefault(source, result)
    scale = values[1] if small.scale is not None else None
    w.record(result, Written([w.places[node]], "constant", encoding, scale, small.axis))


def _in_place_of_marker(w: Writing, node: ir.Node, value: ir.Value) -> ir.Value:
    """Replace a marker by ``value``; returns the value that now holds its result."""
    result = node.outputs[0]
    if value.producer() is not None:
        w.builder.take_over(node, value)
        return result
    node.replace_input_with(0, value)
    bypass(node, w.builder.outputs)
    return result if result.is_graph_output() else value


def _is_read_in_body(w: Writing, result: ir.Value) -> bool:
    """Whether a body reads it whose products of signed codes saturate on CPUs without VNNI, whatever a session is told."""
    return w.target.unsigned_in_bodies and any(use.node.graph is not w.model.graph for use in result.uses())


def _saturates(w: Writing, result: ir.Value, encoding: Encoding) -> bool:
    """Whether it is to be unsigned since a product reads it, perhaps transposed, whose pairs of 8-bit codes may saturate."""
    fmt = encoding.format
    if not w.unsigned_weights or not isinstance(fmt, IntFormat) or fmt.bits != 8:
        return False
    turned = (use.node.outputs[0] for use in result.uses() if use.node.op_type == "Transpose")
    readers = [use.node.op_type for value in (result, *turned) for use in value.uses()]
    return any(op_type in ("Conv", "MatMul", "Gemm") for op_type in readers)


def _write_transposed(
    w: Writing, node: ir.Node, source: ir.Value, encoding: Encoding, place: tuple[str, int], *, shift: bool
) -> None:
    """Store a transposed weight in transposed form: integer kernels need DequantizeLinear directly before them."""
    array = w.array(source)
    assert array is not None
    perm = permutation(node, array.ndim)
    moved = transpose_encoding(encoding, perm)
    small, values = _store(w, source, perm, moved, unsigned(moved) if shift else moved, place[0], node.outputs[0])
    assert small.op is not None
    result = node.outputs[0]
    if not result.is_graph_output():
        result.name = w.builder.names.value(f"{source.name}_transposed")
    w.builder.become(node, small.op, values, None, **_axis_attributes(small))
    w.record(result, Written([place], "constant", moved, values[1], small.axis, perm=perm))
    w.heirs.setdefault(source, source)


def _is_misread(w: Writing, value: ir.Value, encoding: Encoding) -> bool:
    """Whether an integer kernel that reads the constant ``value`` would take several scales for one."""
    granularity = encoding.granularity
    if isinstance(granularity, PerTensor):
        return False
    rank = len(w.weights[value].shape)
    axis = granularity.axis % rank if isinstance(granularity, PerChannel) and granularity.axis is not None else None
    for node, port in value.uses():
        handled = _KERNEL_AXES.get((node.op_type, port))
        known = handled in ("any", (axis, rank), (axis, None))
        if not known and any(v in w.grids for v in node.inputs if v is not None):
            return True
    return False


def _width(w: Writing, value: ir.Value, encoding: Encoding) -> int | None:
    """Bits of the codes of the constant ``value``; ``None`` for floats and the types in the table of forms."""
    fmt = encoding.format
    if _is_misread(w, value, encoding):
        return 4 if isinstance(fmt, IntFormat) and fmt.bits <= 4 else 16
    if not isinstance(fmt, IntFormat) or fmt.bits > 8:
        return None
    others = (v for node, _ in value.uses() for v in node.inputs if v is not None and v is not value)
    beside = not isinstance(encoding.granularity, PerBlock) and any(v in w.grids for v in others)
    bits = w.target.stored_bits(fmt.bits, beside_codes=beside)
    odd = bits < 8 and not w.target.packs_odd_rows and _has_odd_rows(w, value, encoding)
    return 8 if odd else bits


def _has_odd_rows(w: Writing, value: ir.Value, encoding: Encoding) -> bool:
    """Whether an output channel of the constant ``value`` has an odd number of codes."""
    shape, granularity = w.weights[value].shape, encoding.granularity
    if isinstance(granularity, PerTensor) or granularity.axis is None:
        return any(n % 2 for n in shape)
    axis = granularity.axis % len(shape)
    inner = shape[axis : axis + 1] if isinstance(granularity, PerBlock) else shape[:axis] + shape[axis + 1 :]
    return math.prod(inner) % 2 == 1


def _folds(w: Writing, value: ir.Value) -> bool:
    """Whether all readers of ``value`` are float layers, whose weights the target computes at load time."""
    readers = [use.node for use in value.uses()]
    return w.target.folds and bool(readers) and all(node in w.in_float for node in readers)


def _folded(w: Writing, at: ir.Node, small: Stored, values: list[ir.Value], source: ir.Value) -> ir.Value:
    """The float value of a stored constant, by operators that every runtime folds at load time."""
    dtype, float32 = source.dtype or ir.DataType.FLOAT, ir.DataType.FLOAT
    base, place = str(source.name), before(at)
    # OpenVINO keeps a Cast of 8-bit codes to float for its own integer operators, and has none that is recurrent
    wide = ir.DataType.INT32
    value = w.builder.emit(place, "Cast", values[:1], f"{base}_wide", wide, to=int(wide))
    value = w.builder.emit(place, "Cast", [value], f"{base}_codes", float32, to=int(float32))
    if len(values) > 2:
        value = w.builder.emit(place, "Sub", [value, values[2]], f"{base}_centred", float32)
    value = w.builder.emit(place, "Mul", [value, values[1]], f"{base}_dq", float32)
    if dtype == float32:
        return value
    return w.builder.emit(place, "Cast", [value], f"{base}_cast", dtype, to=int(dtype))


def _store(
    w: Writing,
    source: ir.Value,
    perm: tuple[int, ...],
    encoding: Encoding,
    shown: Encoding,
    site: str,
    result: ir.Value,
) -> tuple[Stored, list[ir.Value]]:
    """The stored form of a constant and its initializers, shared by tensor, orientation, grid and code width.

    Readers of ``result`` decide on the width.
    """
    width, folds = _width(w, result, encoding), _folds(w, result)
    key = (source, perm, encoding, shown, width, folds)
    if key not in w.stored:
        array = w.array(source)
        assert array is not None
        small = store_constant(
            array.transpose(perm) if perm else array,
            encoding,
            shown,
            site,
            width=width,
            written_out=w.target.gathers_codes,
        )
        if folds and small.op == "DequantizeLinear":
            small = folded(small, small.array.ndim)
        elif not w.target.short_blocks:
            small = in_whole_blocks(small)
        let_go(w.constants[source])
        w.builder.need(ir.DataType.from_numpy(small.array.dtype), site, small.block is not None)
        base = f"{source.name}_transposed" if perm else str(source.name)
        w.stored[key] = (small, _parameters(w, small, base))
    return w.stored[key]


def _parameters(w: Writing, small: Stored, base: str) -> list[ir.Value]:
    parts = [("q", small.array), ("scale", small.scale), ("zero_point", small.zero_point)]
    parts += [("table", small.table), ("shape", small.shape)]
    return [w.builder.initializer(f"{base}_{name}", a) for name, a in parts if a is not None]


def _axis_attributes(small: Stored) -> dict[str, int]:
    found = {"axis": small.axis, "block_size": small.block}
    return {key: number for key, number in found.items() if number is not None}


def _is_weight(value: ir.Value) -> bool:
    """Whether all readers take ``value`` as a weight, which integer kernels accept signed or unsigned."""
    return all(use.idx in _WEIGHT_PORTS.get(use.node.op_type, ()) for use in value.uses())


def _bias_problem(operator: ir.Node, given: Encoding, weight: Weight, array: NDArray[Any]) -> str | None:
    """The reason why the bias ``array`` of ``operator`` has no int32 form, or ``None``."""
    attributes = {key: attr.value for key, attr in operator.attributes.items()}
    channel, summed = weight_axes(operator.op_type, attributes, 1, len(weight.shape))
    if channel is None:
        return "its weight has no output channels"
    group = int(attributes.get("group", 1)) if operator.op_type == "ConvTranspose" else 1
    if bias_entries(array.shape) != weight.shape[channel] * group:
        return f"its shape {array.shape} is not one entry per output channel"
    if operator.op_type == "Gemm" and (attributes.get("alpha", 1.0), attributes.get("beta", 1.0)) != (1.0, 1.0):
        return "Gemm multiplies by alpha or beta"
    granularity = weight.encoding.granularity
    wanted = {channel} if group == 1 else {channel, 0} if weight.shape[channel] == 1 else set()
    if isinstance(granularity, PerChannel) and granularity.axis not in wanted:
        return f"its weight has one scale per index of axis {granularity.axis}, not per output channel"
    if isinstance(granularity, PerBlock):
        here = (granularity.axis, granularity.channel_axis, granularity.size)
        if here != (summed, channel, weight.shape[summed or 0] // group):
            return "its weight has several scales per output channel"
    return underivable(given, weight.encoding, array.size)
