"""Write quantizers into a graph: unique names, initializers, and the forms of a quantizer.

=====================  ==========================================  ==================================
format                 activation                                  constant
=====================  ==========================================  ==================================
int4/8/16, uint4/8/16  QuantizeLinear, DequantizeLinear            integers, DequantizeLinear
other widths to 16     float Clip, then the pair of 8 or 16 bits   as the next wider row
17 bits and more       Div, Round, Add, Clip, Sub, Mul in float64  float, already quantized
float8                 QuantizeLinear, DequantizeLinear            float8, DequantizeLinear
float4, float6         Div, Round at the local spacing, Clip, Mul  int8 or int16 in the smallest steps, DequantizeLinear
float16, bfloat16      Clip, Cast, Cast back                       half, Cast
=====================  ==========================================  ==================================

Next to Relu, Clip and operators that move data, and in front of Conv, activations of 4 bits take the form of odd
widths, and float8 becomes Div, Clip, Cast, Cast back, Mul: ONNX Runtime (1.31) drops a Relu in front of such a
QuantizeLinear whatever its zero point, fails to load when it moves these types across MaxPool, Slice or Unsqueeze,
and makes QLinearConv of a convolution between two of them, which it cannot load either. Up to 8 bits with several
scales (per channel, in blocks) become 16 bits wherever an integer kernel would take them for one scale: activations
always, constants beside a quantized input unless the kernel knows their axis.

Each form gives what ``core.affine.fake_quantize`` gives, bit for bit (the sign of zero aside, for float4
and float6 constants). A float Clip before a wider pair is exact because rounding is monotone: what lies beyond the
last code lands on it. Integer Clip between the pair would do the same, but runtimes lack a 16-bit kernel
for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.graph.operators import op_row
from bitwright.core.numerics.affine import SMALLEST_REACH
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FloatFormat, IntFormat, largest_code
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerTensor, PerToken
from bitwright.errors import ExportError
from bitwright.export.qdq.markers import Names, Outputs, is_site
from bitwright.export.qdq.stored import FLOAT8, HALVES, INTEGERS, check_shape, expanded, is_small_float

METADATA = "bitwright"  # key of the node metadata that tells what a quantizer is, and of the model's: who wrote it
D = ir.DataType
_USUAL: dict[str, Any] = {"role": None, "scale": None, "entry": None, "axis": None, "perm": [], "pooled": 0, "reach": 0}
_LONGEST = 32  # characters of the name of a tensor that an export adds, where it is a path
# The opset whose QuantizeLinear and DequantizeLinear know a type; 13 knows 8 bits per channel.
_SINCE = {**dict.fromkeys((D.INT4, D.UINT4, D.INT16, D.UINT16), 21), **dict.fromkeys(FLOAT8.values(), 19)}


Place = Callable[[ir.Node], None]  # puts a new node into the graph


def before(anchor: ir.Node) -> Place:
    """The place before ``anchor``."""
    assert anchor.graph is not None
    return partial(anchor.graph.insert_before, anchor)


def after(anchor: ir.Node) -> Place:
    """The place after ``anchor``."""
    assert anchor.graph is not None
    return partial(anchor.graph.insert_after, anchor)


@dataclass(frozen=True)
class Pair:
    """Data for a second QuantizeLinear and DequantizeLinear on the same grid."""

    encoding: Encoding
    dtype: ir.DataType
    scale: ir.Value
    zero_point: ir.Value


class Builder:
    """Adds nodes and initializers to one model.

    Attributes:
        names: names still free.
        outputs: where graph outputs come from.
        own: every node added or converted so far.
        opset: lowest opset that what was added needs, and the tensor that needs it.
    """

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self.names, self.outputs = Names(model), Outputs(model)
        self.own: set[ir.Node] = set()
        self.opset: tuple[int, str] = (13, "per-channel QuantizeLinear")

    def initializer(self, base: str, array: NDArray[Any]) -> ir.Value:
        """A new constant of the main graph, visible in the graphs nested in it; two codes of 4 bits share a byte of memory."""
        tensor = ir.Tensor(array)
        if tensor.dtype.bitwidth == 4:
            pairs = np.frombuffer(tensor.tobytes(), np.uint8)
            return self.initializer_of(base, ir.PackedTensor(pairs, tensor.dtype, shape=tensor.shape))
        return self.initializer_of(base, tensor)

    def initializer_of(self, base: str, tensor: ir.Tensor | ir.ExternalTensor | ir.PackedTensor[Any]) -> ir.Value:
        """A new constant from a tensor, which is renamed."""
        tensor.name = name = self.names.value(_short(base))
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def emit(
        self, place: Place, op: str, inputs: Sequence[ir.Value], name: str, dtype: ir.DataType, **attributes: int
    ) -> ir.Value:
        """A new node at ``place``; it and its output are named ``name`` (or nearly), the output shaped like its first input."""
        name = _short(name)
        node = ir.Node("", op, inputs, name=self.names.node(name))
        set_attributes(node, attributes)
        value = node.outputs[0]
        value.name, value.type = self.names.value(name), ir.TensorType(dtype)
        value.shape = None if inputs[0].shape is None else inputs[0].shape.copy()
        place(node)
        self.own.add(node)
        return value

    def become(
        self, node: ir.Node, op: str, inputs: Sequence[ir.Value], name: str | None = None, **attributes: int
    ) -> None:
        """Turn ``node`` into another operator; its output, with its name and readers, stays."""
        node.domain, node.op_type = "", op
        node.attributes.clear()
        set_attributes(node, attributes)
        node.resize_inputs(len(inputs))
        for i, value in enumerate(inputs):
            node.replace_input_with(i, value)
        node.name = name or self.names.node(str(node.outputs[0].name))
        self.own.add(node)

    def take_over(self, node: ir.Node, last: ir.Value) -> None:
        """Let ``node`` replace the producer of ``last``, under its names."""
        producer, result = last.producer(), node.outputs[0]
        assert producer is not None and producer.graph is not None
        attributes = {key: attr.as_int() for key, attr in producer.attributes.items()}
        inputs = [value for value in producer.inputs if value is not None]
        producer.graph.remove(producer, safe=True)
        self.own.discard(producer)
        self.become(node, producer.op_type, inputs, producer.name, **attributes)
        result.type, result.shape = result.type or last.type, result.shape or last.shape
        if not result.is_graph_output():
            result.name = last.name

    def need(self, dtype: ir.DataType, what: str, blocks: bool = False) -> None:
        """Record that ``what`` is written with ``dtype``, perhaps in blocks, which may need a newer opset."""
        version = 21 if blocks else _SINCE.get(dtype, 13)
        if version > self.opset[0]:
            self.opset = (version, f"{what} ({dtype.name.lower()}{' in blocks' if blocks else ''})")


def set_attributes(node: ir.Node, attributes: dict[str, int]) -> None:
    """Give ``node`` integer attributes."""
    for key, number in attributes.items():
        node.attributes.add(ir.AttrInt64(key, number))


def _short(name: str) -> str:
    """A name of a new tensor, only the end of a long path, since long names would outweigh small weights."""
    return name if len(name) <= _LONGEST or "/" not in name else name[-_LONGEST:].partition("/")[2] or name[-_LONGEST:]


def note_metadata(node: ir.Node, *, derive: bool = False, **facts: object) -> None:
    """Store the facts of a quantizer as JSON on its last node, for verification; default values are left out.

    ``derive`` leaves out what can be read off the node and the QuantizeLinear in front of it too: only where neither changes
    any more.
    """
    usual = {**_USUAL, "scale": _own_scale(node), **(_derived(node) if derive else {})}
    told = {key: fact for key, fact in facts.items() if fact != usual.get(key, facts)}
    if derive:
        places = told["places"]
        assert isinstance(places, list)
        told["places"] = [site if run == 0 else [site, run] for site, run in places]
    node.metadata_props[METADATA] = json.dumps(told, separators=(",", ":"))


def read_metadata(node: ir.Node) -> dict[str, Any] | None:
    """The facts that :func:`note_metadata` stored, or ``None``.

    Raises:
        ExportError: it was changed since.
    """
    text = node.metadata_props.get(METADATA)
    if text is None:
        return None
    try:
        facts: dict[str, Any] = json.loads(text)
        pairs = ((place, 0) if isinstance(place, str) else place for place in facts["places"])
        places = [[str(site), int(run)] for site, run in pairs]
        pooled = int(facts.get("pooled", 0))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise damaged_metadata(node) from error
    found = {**_USUAL, "scale": _own_scale(node), **_derived(node), **facts, "places": places, "pooled": pooled}
    if not _well_formed(found):
        raise damaged_metadata(node)
    return found


def _well_formed(facts: Mapping[str, Any]) -> bool:
    """Whether the facts of a quantizer have their types, and ``perm`` is a permutation."""
    perm, axis = facts["perm"], facts["axis"]
    return (
        isinstance(facts.get("format", ""), str)
        and all(isinstance(facts[key], str | None) for key in ("role", "scale", "entry"))
        and (axis is None or type(axis) is int)
        and isinstance(perm, list)
        and all(type(n) is int for n in perm)
        and sorted(perm) == list(range(len(perm)))
    )


def _own_scale(node: ir.Node) -> str | None:
    """Name of the scale that ``node`` reads, if it is a DequantizeLinear."""
    scale = node.inputs[1] if node.op_type == "DequantizeLinear" and len(node.inputs) > 1 else None
    return None if scale is None else str(scale.name)


def _derived(node: ir.Node) -> dict[str, Any]:
    """Infer the format of a DequantizeLinear from the element type of its codes, if its metadata say no more."""
    codes = node.inputs[0] if node.op_type == "DequantizeLinear" and node.inputs else None
    if codes is None:
        return {}
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    maker = codes.producer()
    dtype = codes.dtype or (None if zero is None else zero.dtype)
    source = maker.inputs[0] if maker is not None and maker.op_type == "QuantizeLinear" else None
    found = {} if dtype is None else {"format": dtype.name.lower()}
    if codes.is_initializer():
        return {**found, "role": "bias" if dtype == D.INT32 else "constant"}
    return found if source is None else {**found, "role": "activation", "entry": str(source.name)}


def damaged_metadata(node: ir.Node | onnx.NodeProto) -> ExportError:
    """The error for damaged metadata on ``node``."""
    return ExportError(
        str(node.name or node.op_type),
        "what the export wrote on this operator is damaged",
        "export again, or copy the folder anew",
    )


def folded_parts(node: ir.Node) -> tuple[ir.Value, ir.Value | None, ir.Value] | None:
    """Codes, zero point and scale of a constant that we wrote as Cast, Sub and Mul, the last being ``node``; or ``None``."""
    facts = read_metadata(node) if node.op_type == "Mul" else None
    if facts is None or facts["role"] == "activation":
        return None
    value, zero = node.inputs[0], None
    while value is not None and (maker := value.producer()) is not None:
        zero = maker.inputs[1] if maker.op_type == "Sub" else zero
        value = maker.inputs[0] if maker.op_type in ("Sub", "Cast") else None
    scale = node.inputs[1]
    return None if value is None or scale is None else (value, zero, scale)


# ---------------------------------------------------------------------------------------------- activations


@dataclass(frozen=True)
class Quantizer:
    """The nodes written for an activation: facts for verification, and the pair if it can be repeated."""

    value: ir.Value
    scale: ir.Value | None = None
    axis: int | None = None
    pair: Pair | None = None


@dataclass(frozen=True)
class _Pen:
    """Writes the operators of one quantizer, in order, under names that begin with its tensor's."""

    builder: Builder
    place: Place
    base: str
    site: str

    def emit(
        self, op: str, inputs: Sequence[ir.Value], suffix: str, dtype: ir.DataType = D.FLOAT, **attributes: int
    ) -> ir.Value:
        return self.builder.emit(self.place, op, inputs, f"{self.base}_{suffix}", dtype, **attributes)

    def constant(self, suffix: str, array: Any) -> ir.Value:
        return self.builder.initializer(f"{self.base}_{suffix}", np.asarray(array))

    def cast(self, value: ir.Value, suffix: str, dtype: ir.DataType) -> ir.Value:
        return self.emit("Cast", [value], suffix, dtype, to=int(dtype))


def write_activation(builder: Builder, node: ir.Node, encoding: Encoding, shown: Encoding, site: str) -> Quantizer:
    """Turn the marker ``node`` into a quantizer of its input; see the table of this module.

    A tensor that is not float32 is cast to it and back, as the reference arithmetic does with half types.

    Args:
        builder: of the model the node is in.
        node: the marker; becomes the last operator of the quantizer, so that its output keeps name and
            readers.
        encoding: as simulated.
        shown: the grid to be written: ``encoding`` itself or its :func:`unsigned` form.
        site: name for error messages.

    Raises:
        EncodingsError: the scale does not fit the tensor.
        ExportError: the tensor is not float, or its shape is unknown where blocks or channels need it.
    """
    source = node.inputs[0]
    assert source is not None
    dtype = source.dtype or D.FLOAT
    if not dtype.is_floating_point():
        problem = f"its tensor {source.name!r} holds {dtype.name.lower()}, and only float can be quantized"
        raise ExportError(site, problem, "remove the encoding of this site")
    if source.shape is not None and source.shape.is_static():
        check_shape(encoding, source.shape.numpy(), site)
    pen = _Pen(builder, before(node), str(source.name), site)
    value = source if dtype == D.FLOAT else pen.cast(source, "f32", D.FLOAT)
    narrow = dtype != D.FLOAT or _narrow_is_safe(node)
    found = _form(encoding, narrow)(pen, value, encoding, shown)
    if dtype != D.FLOAT:
        found = Quantizer(pen.cast(found.value, "dq", dtype), found.scale, found.axis)
    builder.take_over(node, found.value)
    return replace(found, value=node.outputs[0])


_Form = Callable[[_Pen, ir.Value, Encoding, Encoding], Quantizer]


def _form(encoding: Encoding, narrow: bool) -> _Form:
    """The function that writes ``encoding``; ``narrow`` allows QuantizeLinear to 4 bits and to float8."""
    fmt = encoding.format
    if encoding.dynamic:
        return _write_at_run_time
    if encoding.shift is not None:
        return _refuse_float_zero_point
    if isinstance(fmt, IntFormat) and fmt.bits <= 16 and _spans_axis(encoding.granularity):
        return _write_spanning
    if isinstance(fmt, IntFormat):
        return _write_wide if fmt.bits > 16 else partial(_write_pair, narrow=narrow)
    if fmt.name in HALVES:
        return _write_half
    if is_small_float(fmt):
        return _write_small_float
    return partial(_write_pair, narrow=True) if narrow else _write_float8


def _refuse_float_zero_point(pen: _Pen, value: ir.Value, encoding: Encoding, shown: Encoding) -> Quantizer:
    raise ExportError(
        pen.site,
        "zero points of ONNX are whole numbers, and those of this activation are not",
        "quantize activations with the symmetry 'asymmetric': float_zero_point is for weights",
    )


def _narrow_is_safe(marker: ir.Node) -> bool:
    """Whether no operator beside the marker breaks ONNX Runtime with 4-bit and float8 types."""
    source = marker.inputs[0]
    assert source is not None
    maker = source.producer()
    if maker is not None and (maker.op_type in ("Relu", "Clip") or op_row(maker.op_type).kind == "movement"):
        return False
    # Other markers of the same tensor may end in the same quantizer, so their readers count too.
    marked = [use.node.outputs[0] for use in source.uses() if is_site(use.node)]
    readers = (use.node for value in marked for use in value.uses())
    return all(op_row(node.op_type).kind != "movement" and node.op_type != "Conv" for node in readers)


def _write_pair(pen: _Pen, value: ir.Value, encoding: Encoding, shown: Encoding, *, narrow: bool) -> Quantizer:
    fmt, granularity = encoding.format, encoding.granularity
    dtype = _pair_dtype(shown, narrow)
    exact = isinstance(fmt, FloatFormat) or (fmt.bits == dtype.bitwidth and not fmt.narrow)
    if not exact:
        value = _write_clip(pen, value, encoding)
    scale, zero_point = shown.scale, shown.zero_point.astype(dtype.numpy())
    attributes: dict[str, int] = {}
    if not isinstance(granularity, PerTensor):
        assert granularity.axis is not None
        attributes["axis"] = granularity.axis
    if isinstance(granularity, PerBlock):
        attributes["block_size"] = granularity.size
        shape = _static_shape(value, pen.site)
        axis = attributes["axis"] % len(shape)
        scale, zero_point = expanded(scale, axis, shape), expanded(zero_point, axis, shape)
    pen.builder.need(dtype, pen.site, isinstance(granularity, PerBlock))
    params = [pen.constant("scale", scale), pen.constant("zero_point", zero_point)]
    codes = pen.emit("QuantizeLinear", [value, *params], "q", dtype, **attributes)
    result = pen.emit("DequantizeLinear", [codes, *params], "dq", D.FLOAT, **attributes)
    repeatable = isinstance(granularity, PerTensor) and isinstance(fmt, IntFormat) and dtype.bitwidth >= 8
    pair = Pair(encoding, dtype, params[0], params[1]) if repeatable else None
    return Quantizer(result, params[0], attributes.get("axis"), pair)


def _pair_dtype(shown: Encoding, narrow: bool) -> ir.DataType:
    """Type of the codes; 8 bits only for one scale per tensor: integer kernels would misread several."""
    fmt = shown.format
    if isinstance(fmt, FloatFormat):
        return FLOAT8[fmt.name]
    if not isinstance(shown.granularity, PerTensor):
        return INTEGERS[16, fmt.signed]
    return INTEGERS[4 if fmt.bits == 4 and narrow else 8 if fmt.bits <= 8 else 16, fmt.signed]


def _static_shape(value: ir.Value, site: str) -> tuple[int, ...]:
    if value.shape is None or not value.shape.is_static():
        problem = f"blocks of an activation need a known shape, and its tensor has {value.shape or 'none'}"
        raise ExportError(site, problem, "export with a fixed input shape, or quantize this site per tensor")
    return value.shape.numpy()


def _spread(param: NDArray[Any], granularity: Granularity, value: ir.Value, site: str) -> NDArray[Any]:
    """A parameter that broadcasts against ``value``: scalar, (channels, 1, ...), or one per element."""
    if isinstance(granularity, PerTensor):
        return param
    assert granularity.axis is not None
    if isinstance(granularity, PerBlock):
        shape = _static_shape(value, site)
        axis = granularity.axis % len(shape)
        each = np.repeat(expanded(param, axis, shape), granularity.size, axis)
        return each[(*(slice(None),) * axis, slice(0, shape[axis]))]
    if value.shape is None and granularity.axis >= 0:
        problem = f"its channels lie on axis {granularity.axis}, and the rank of its tensor is unknown"
        raise ExportError(site, problem, "run shape inference on the model, or quantize this site per tensor")
    rank = 0 if value.shape is None else len(value.shape)
    trailing = rank - 1 - granularity.axis % rank if rank else -1 - granularity.axis
    return param.reshape(-1, *[1] * trailing)


def _write_clip(pen: _Pen, value: ir.Value, encoding: Encoding) -> ir.Value:
    """Saturate in float at the ends of the grid, where the pair after it has codes beyond them."""
    fmt = encoding.format
    assert isinstance(fmt, IntFormat)
    zero_point = encoding.zero_point.astype(np.float32)
    ends = [(np.float32(end) - zero_point) * encoding.scale for end in (fmt.qmin, fmt.qmax)]
    low, high = (
        pen.constant(name, _spread(end, encoding.granularity, value, pen.site))
        for name, end in zip(("min", "max"), ends, strict=True)
    )
    if isinstance(encoding.granularity, PerTensor):
        return pen.emit("Clip", [value, low, high], "clip")
    return pen.emit("Min", [pen.emit("Max", [value, low], "low"), high], "clip")


def _spans_axis(granularity: Granularity) -> bool:
    """Whether the blocks are as long as their axis, however long that is."""
    return isinstance(granularity, PerBlock) and granularity.size >= 1 << 24


def _write_spanning(pen: _Pen, value: ir.Value, encoding: Encoding, shown: Encoding) -> Quantizer:
    """Scales that broadcast against the tensor, for which QuantizeLinear has no form: the same steps in float32."""
    fmt = encoding.format
    assert isinstance(fmt, IntFormat)
    zero_point = encoding.zero_point.astype(np.float32)
    scale = pen.constant("scale", encoding.scale)
    ends = [pen.constant(name, np.float32(end) - zero_point) for name, end in (("qmin", fmt.qmin), ("qmax", fmt.qmax))]
    steps = pen.emit("Round", [pen.emit("Div", [value, scale], "ratio")], "rounded")
    codes = pen.emit("Min", [pen.emit("Max", [steps, ends[0]], "low"), ends[1]], "codes")
    return Quantizer(pen.emit("Mul", [codes, scale], "dq"))


def _write_wide(pen: _Pen, value: ir.Value, encoding: Encoding, shown: Encoding) -> Quantizer:
    """More than 16 bits: float64, because float32 cannot tell the codes apart."""
    fmt = encoding.format
    assert isinstance(fmt, IntFormat)
    scale, zero_point = (
        pen.constant(name, _spread(param.astype(np.float64), encoding.granularity, value, pen.site))
        for name, param in (("scale", encoding.scale), ("zero_point", encoding.zero_point))
    )
    ends = [pen.constant("qmin", np.float64(fmt.qmin)), pen.constant("qmax", np.float64(fmt.qmax))]
    chain: tuple[tuple[str, list[ir.Value]], ...] = (
        ("Div", [scale]), ("Round", []), ("Add", [zero_point]), ("Clip", ends), ("Sub", [zero_point]),
        ("Mul", [scale]),
    )  # fmt: skip
    value = pen.cast(value, "f64", D.DOUBLE)
    for op, extra in chain:
        value = pen.emit(op, [value, *extra], op.lower(), D.DOUBLE)
    return Quantizer(pen.cast(value, "dq", D.FLOAT), scale)


def _write_half(pen: _Pen, value: ir.Value, encoding: Encoding, shown: Encoding) -> Quantizer:
    """A cast to the half type and back, after a Clip: Cast turns too large values into infinity."""
    fmt = encoding.format
    assert isinstance(fmt, FloatFormat)
    value = _clip_to(pen, value, fmt.max)
    return Quantizer(pen.cast(pen.cast(value, "q", HALVES[fmt.name]), "dq", D.FLOAT))


def _write_float8(pen: _Pen, value: ir.Value, encoding: Encoding, shown: Encoding) -> Quantizer:
    """float8 without QuantizeLinear; Clip first, so that Cast saturates in every runtime."""
    scale = pen.constant("scale", _spread(encoding.scale, encoding.granularity, value, pen.site))
    return Quantizer(_float8(pen, value, encoding, scale), scale)


def _float8(pen: _Pen, value: ir.Value, encoding: Encoding, scale: ir.Value) -> ir.Value:
    fmt = encoding.format
    assert isinstance(fmt, FloatFormat)
    dtype = FLOAT8[fmt.name]
    pen.builder.need(dtype, pen.site)
    ratio = _clip_to(pen, pen.emit("Div", [value, scale], "ratio"), fmt.max)
    grid = pen.cast(pen.cast(ratio, "q", dtype), "grid", D.FLOAT)
    return pen.emit("Mul", [grid, scale], "dq")


def _write_small_float(pen: _Pen, value: ir.Value, encoding: Encoding, shown: Encoding) -> Quantizer:
    """The spacing doubles at every power of two from the smallest normal number on; so nothing but Div rounds."""
    scale = pen.constant("scale", _spread(encoding.scale, encoding.granularity, value, pen.site))
    return Quantizer(_small_float(pen, value, encoding, scale), scale)


def _small_float(pen: _Pen, value: ir.Value, encoding: Encoding, scale: ir.Value) -> ir.Value:
    fmt = encoding.format
    assert isinstance(fmt, FloatFormat)
    if fmt.codebook:
        problem = f"ONNX has no operators that round to {fmt.name} while a model runs"
        raise ExportError(pen.site, problem, "quantize activations to another format: nf4 is for weights")
    ratio = pen.emit("Div", [value, scale], "ratio")
    size = pen.emit("Abs", [ratio], "size")
    ends = range(fmt.min_exponent + 1, int(np.log2(fmt.max)) + 1)
    step = pen.constant("step", np.float32(2.0 ** (ends[-1] - fmt.mantissa_bits)))
    for end in reversed(ends):
        bound = pen.constant("bound", np.float32(2.0**end))
        finer = pen.constant("step", np.float32(2.0 ** (end - 1 - fmt.mantissa_bits)))
        below = pen.emit("Less", [size, bound], "below", D.BOOL)
        step = pen.emit("Where", [below, finer, step], "step")
    steps = pen.emit("Round", [pen.emit("Div", [ratio, step], "steps")], "rounded")
    codes = _clip_to(pen, pen.emit("Mul", [steps, step], "grid"), fmt.max)
    return pen.emit("Mul", [codes, scale], "dq")


def _write_at_run_time(pen: _Pen, value: ir.Value, encoding: Encoding, shown: Encoding) -> Quantizer:
    """Write scales computed at run time, as :func:`bitwright.core.numerics.affine.quantize_at_run_time` does.

    Float operators, none of which rounds where the reference does not; a kernel in integers takes their place where it is asked
    for (:mod:`bitwright.export.qdq.run_time`).
    """
    fmt, granularity = encoding.format, encoding.granularity
    token = granularity if isinstance(granularity, PerToken) else None
    rank = None if value.shape is None else len(value.shape)
    view, whole, axis, length = value, value, None, 0
    if token is not None and rank:
        axis = token.axis % rank
        if token.block:
            view, axis, length = _in_blocks(pen, value, token.block, axis)
    low, high = (_reduced(pen, view, name, axis) for name in ("Min", "Max"))
    least = pen.constant("least", np.float32(SMALLEST_REACH))
    if isinstance(fmt, IntFormat) and not fmt.signed:
        result = _around_zero_point(pen, view, encoding, fmt, (low, high), least)
    else:
        reach = pen.emit("Max", [pen.emit("Max", [pen.emit("Neg", [low], "low"), high], "reach"), least], "reach")
        result = _around_zero(pen, view, encoding, reach)
    if view is not whole:
        result = _out_of_blocks(pen, result, length, axis)
    return Quantizer(result)


def _around_zero_point(
    pen: _Pen, view: ir.Value, encoding: Encoding, fmt: IntFormat, ends: tuple[ir.Value, ir.Value], least: ir.Value
) -> ir.Value:
    """Quantize ``view`` on an unsigned grid from its minimum to its maximum, extended to zero."""
    low, high = ends
    nothing, top = pen.constant("zero", np.float32(0)), pen.constant("qmax", np.float32(fmt.qmax))
    low, high = pen.emit("Min", [low, nothing], "low"), pen.emit("Max", [high, nothing], "high")
    width = pen.emit("Div", [pen.emit("Sub", [high, low], "width"), top], "step")
    scale = _stored(pen, pen.emit("Max", [width, least], "scale"), encoding)
    zero = pen.emit("Neg", [pen.emit("Div", [low, scale], "lowest")], "zero_point")
    zero = pen.emit("Round", [pen.emit("Clip", [zero, nothing, top], "zero_point")], "zero_point")
    steps = pen.emit("Round", [pen.emit("Div", [view, scale], "ratio")], "rounded")
    codes = pen.emit("Clip", [pen.emit("Add", [steps, zero], "codes"), nothing, top], "codes")
    return pen.emit("Mul", [pen.emit("Sub", [codes, zero], "centred"), scale], "dq")


def _around_zero(pen: _Pen, view: ir.Value, encoding: Encoding, reach: ir.Value) -> ir.Value:
    """Quantize ``view`` on a symmetric grid whose largest code is ``reach``."""
    fmt = encoding.format
    most = pen.constant("most", np.float32(largest_code(fmt)))
    if isinstance(fmt, IntFormat):
        step = pen.emit("Div", [reach, most], "scale")
        scale = _stored(pen, step, encoding)
        if fmt.centred:
            codes = pen.emit("Round", [pen.emit("Div", [view, step], "ratio")], "rounded")
            ends = [pen.constant(name, np.float32(end)) for name, end in (("qmin", fmt.qmin), ("qmax", fmt.qmax))]
            return pen.emit("Mul", [pen.emit("Clip", [codes, *ends], "codes"), scale], "dq")
        factor = pen.emit("Div", [most, reach], "factor")
        factor.shape = None
        codes = pen.emit("Round", [pen.emit("Mul", [view, factor], "ratio")], "rounded")
        return pen.emit("Mul", [codes, scale], "dq")
    if encoding.scale_format.name == "e8m0":
        scale = _power_of_two(pen, reach, fmt)
    else:
        scale = _stored(pen, pen.emit("Div", [reach, most], "scale"), encoding)
    return (_small_float if is_small_float(fmt) else _float8)(pen, view, encoding, scale)


def _reduced(pen: _Pen, value: ir.Value, name: str, axis: int | None) -> ir.Value:
    """The least or largest number of ``value``, along ``axis`` or of all of it, with axes of length 1 left."""
    inputs = [value]
    opset = pen.builder.graph.opset_imports.get("", 0)
    if axis is not None and opset >= 18:
        inputs.append(pen.constant("axes", np.array([axis], np.int64)))
    made = pen.emit(f"Reduce{name}", inputs, name.lower(), keepdims=1)
    node = made.producer()
    assert node is not None
    if axis is not None and opset < 18:
        node.attributes.add(ir.AttrInt64s("axes", [axis]))
    made.shape = None
    return made


def _stored(pen: _Pen, scale: ir.Value, encoding: Encoding) -> ir.Value:
    """``scale`` rounded to what it is stored as."""
    number = encoding.scale_format.number
    if number is None:
        return scale
    scale = _clip_to(pen, scale, number.max)
    scale = pen.cast(pen.cast(scale, "stored", HALVES[number.name]), "scale", D.FLOAT)
    return pen.emit("Max", [scale, pen.constant("least", np.float32(number.step))], "scale")


def _power_of_two(pen: _Pen, reach: ir.Value, fmt: FloatFormat) -> ir.Value:
    """The largest power of two not above ``reach``, over that of the format, exactly (Rump's unit in the first place).

    Reference: Rump, Ogita, Oishi 2008, "Accurate floating-point summation part I", algorithm 3.5 (float32: u = 2 ** -24).
    """
    large = pen.emit("Mul", [reach, pen.constant("phi", np.float32(2.0**23 + 1))], "large")
    near = pen.emit("Mul", [large, pen.constant("near", np.float32(1 - 2.0**-24))], "near")
    power = pen.emit("Abs", [pen.emit("Sub", [large, near], "power")], "power")
    emax = int(np.frexp(fmt.max)[1]) - 1
    scale = pen.emit("Mul", [power, pen.constant("emax", np.float32(2.0**-emax))], "scale")
    return pen.emit("Max", [scale, pen.constant("least", np.float32(2.0**-126))], "scale")


def _in_blocks(pen: _Pen, value: ir.Value, size: int, axis: int) -> tuple[ir.Value, int, int]:
    """``value`` with its last axis as blocks of ``size``; the axis of a block's elements, and how long the last axis was."""
    rank = len(value.shape or ())
    last = value.shape[rank - 1] if value.shape is not None else None
    if axis != rank - 1 or not isinstance(last, int):
        problem = (
            f"blocks of a token need the length of its axis {axis}, and its tensor has {value.shape or 'no shape'}"
        )
        raise ExportError(pen.site, problem, "export with this length fixed, or quantize this site per token")
    missing = -last % size
    if missing:
        ends = pen.constant("pads", np.array([0] * (2 * rank - 1) + [missing], np.int64))
        value = pen.emit("Pad", [value, ends], "padded")
        value.shape = None
    shape = pen.constant("blocks", np.array([0] * (rank - 1) + [(last + missing) // size, size], np.int64))
    view = pen.emit("Reshape", [value, shape], "blocks")
    view.shape = None
    return view, rank, last


def _out_of_blocks(pen: _Pen, value: ir.Value, length: int, axis: int | None) -> ir.Value:
    """The opposite of :func:`_in_blocks`."""
    assert axis is not None
    whole = pen.emit("Reshape", [value, pen.constant("whole", np.array([0] * (axis - 1) + [-1], np.int64))], "whole")
    whole.shape = None
    ends = [np.array([n], np.int64) for n in (0, length, axis - 1)]
    return pen.emit("Slice", [whole, *(pen.constant("slice", end) for end in ends)], "dq")


def _clip_to(pen: _Pen, value: ir.Value, end: float) -> ir.Value:
    ends = [pen.constant("min", np.float32(-end)), pen.constant("max", np.float32(end))]
    return pen.emit("Clip", [value, *ends], "clip")


def write_follower(builder: Builder, value: ir.Value, pair: Pair) -> ir.Value:
    """A second pair of the same grid after ``value``, which already lies on it: changes no bit, but tells
    integer runtimes so.

    Readers move to the result, quantizers excepted; where ``value`` was a graph output, the result is,
    under its name.
    """
    producer, base = value.producer(), str(value.name)
    assert producer is not None
    readers = [(node, i) for node, i in value.uses() if node not in builder.own]
    params = [pair.scale, pair.zero_point]
    codes = builder.emit(after(producer), "QuantizeLinear", [value, *params], f"{base}_q", pair.dtype)
    maker = codes.producer()
    assert maker is not None
    result = builder.emit(after(maker), "DequantizeLinear", [codes, *params], f"{base}_dq", D.FLOAT)
    for node, i in readers:
        node.replace_input_with(i, result)
    if value.is_graph_output():
        builder.outputs.replace(value, result)
        value.name = builder.names.value(f"{base}_raw")
    return result
