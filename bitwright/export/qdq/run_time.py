"""Write products of dynamically quantized activations as integer operators of ONNX Runtime.

=================================================  ======================================================================
activation, weight                                 operators
=================================================  ======================================================================
unsigned 8 bits per tensor, 8 bits                 DynamicQuantizeLinear, MatMulInteger, Cast, Mul
8 bits per token, 8 bits                           the range of a token, codes counted from zero, MatMulInteger, Cast, Mul
8 bits per token in blocks, 4 bits in such blocks  MatMulNBits with accuracy level 4, which quantizes the activation itself
input and hidden state of an LSTM, 8 bits          DynamicQuantizeLSTM
=================================================  ======================================================================

Weights of MatMulInteger are written unsigned, around 128: signed ones saturate on CPUs without VNNI, where two products are
added in 16 bits. The sums are exact; results differ from the simulation's by the rounding of its float sums.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.numerics.affine import SMALLEST_REACH
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerToken
from bitwright.export.files.onnx_file import all_nodes
from bitwright.export.qdq.forms import Builder, before, folded_parts
from bitwright.export.qdq.markers import remove_unread
from bitwright.export.qdq.nbits import is_plain, packed_weight, replace_product
from bitwright.export.recurrent import AT_RUN_TIME

D = ir.DataType
Codes = NDArray[np.int8 | np.uint8]
_MIDDLE = 128  # of codes that are counted from zero


def write_run_time_products(
    builder: Builder, model: ir.Model, chosen: dict[ir.Value, tuple[ir.Value, Encoding]]
) -> tuple[int, list[ir.Node]]:
    """Write MatMul and Gemm of dynamically quantized activations and quantized weights as integer operators where possible.

    Args:
        builder: of the model.
        model: with each activation written in float operators.
        chosen: result of a quantizer -> what it reads, and its encoding.

    Returns:
        How many products were written, and those that no operator computes.
    """
    moved: dict[ir.Value, ir.Value] = {}  # result of a product -> that of what took its place
    left = []
    for node in tuple(all_nodes(model.graph)):
        given = node.inputs[0] if node.op_type in ("MatMul", "Gemm") and not node.domain else None
        if given is None or given not in chosen:
            continue
        source, encoding = chosen[given]
        source, old = moved.get(source, source), node.outputs[0]
        made = _write_nbits(builder, node, source, encoding) or _write_integer(builder, node, source, encoding)
        if made is None:
            left.append(node)
        else:
            moved[old] = made
    for result in chosen:
        remove_unread(result)
    return len(moved), left


def _write_nbits(builder: Builder, node: ir.Node, source: ir.Value, encoding: Encoding) -> ir.Value | None:
    token, packed = encoding.granularity, packed_weight(node)
    if packed is None or not isinstance(token, PerToken) or token.block != packed.block or token.axis != -1:
        return None
    if encoding.format != IntFormat(8) or encoding.scale_format.number is not None:
        return None
    node.replace_input_with(0, source)
    made = replace_product(builder, node, packed, level=4)
    builder.graph.opset_imports.setdefault("com.microsoft", 1)
    return made.outputs[0]


def _write_integer(builder: Builder, node: ir.Node, source: ir.Value, encoding: Encoding) -> ir.Value | None:
    fmt, token, weight = encoding.format, encoding.granularity, _weight(node)
    if weight is None or not isinstance(fmt, IntFormat) or fmt.bits != 8 or fmt.centred:
        return None
    if encoding.scale_format.number is not None or source.dtype not in (None, D.FLOAT):
        return None
    whole = not isinstance(token, PerToken)
    if fmt.signed == whole or (isinstance(token, PerToken) and token != PerToken()):
        return None
    codes, scale = weight
    place, base = before(node), str(node.inputs[1].name if node.inputs[1] is not None else node.name)
    zero = builder.initializer(f"{base}_middle", np.array(_MIDDLE, np.uint8))
    stored = builder.initializer(f"{base}_unsigned", (codes.astype(np.int16) + _MIDDLE).astype(np.uint8))
    steps = builder.initializer(f"{base}_steps", scale)
    if whole:
        found, step, offset = _tensor(builder, node, source)
    else:
        found, step = _tokens(builder, node, source)
        offset = zero
    product = builder.emit(place, "MatMulInteger", [found, stored, offset, zero], f"{base}_sums", D.INT32)
    product.shape = node.outputs[0].shape
    wide = builder.emit(place, "Cast", [product], f"{base}_wide", D.FLOAT, to=int(D.FLOAT))
    if whole:  # in this order ONNX Runtime makes one operator of all, DynamicQuantizeMatMul
        factor = builder.emit(place, "Mul", [step, steps], f"{base}_factor", D.FLOAT)
        factor.shape = None
        result = builder.emit(place, "Mul", [wide, factor], f"{base}_product", D.FLOAT)
    else:  # in the other it makes MatMulIntegerToFloat, which reads one scale and leaves out those of other tokens (1.31)
        wide = builder.emit(place, "Mul", [wide, steps], f"{base}_columns", D.FLOAT)
        result = builder.emit(place, "Mul", [wide, step], f"{base}_product", D.FLOAT)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        result = builder.emit(place, "Add", [result, bias], f"{base}_biased", D.FLOAT)
    maker = node.inputs[1]
    _take_place(builder, node, result)
    if maker is not None:
        remove_unread(maker)
    return result


def write_run_time_layers(
    builder: Builder, model: ir.Model, chosen: dict[ir.Value, tuple[ir.Value, Encoding]], *, unsigned_weights: bool
) -> None:
    """Write LSTMs that choose the ranges of their input and hidden state at run time as ``DynamicQuantizeLSTM``.

    Args:
        builder: of the model.
        model: with native layers, whose metadata has :data:`bitwright.export.recurrent.AT_RUN_TIME`.
        chosen: result of a quantizer -> what it reads, and its encoding.
        unsigned_weights: codes of weights are counted from 128: sums of the others saturate on CPUs without VNNI.
    """
    for node in tuple(all_nodes(model.graph)):
        if node.op_type != "LSTM" or node.domain or AT_RUN_TIME not in node.metadata_props:
            continue
        found = node.inputs[0]
        assert found is not None and found in chosen, node.name
        layer = [*node.inputs, *[None] * (8 - len(node.inputs))]
        old = [value for value in layer[:3] if value is not None]
        layer[0] = chosen[found][0]
        for port in (1, 2):
            value = layer[port]
            assert value is not None
            codes, scale, zero = _gates(value, unsigned=unsigned_weights)
            name = str(value.name)
            layer[port] = builder.initializer(f"{name}_codes", np.ascontiguousarray(codes.transpose(0, 2, 1)))
            layer.append(builder.initializer(f"{name}_steps", scale))
            layer.append(builder.initializer(f"{name}_zero", zero))
        node.resize_inputs(len(layer))
        for port, value in enumerate(layer):
            node.replace_input_with(port, value)
        node.domain, node.op_type = "com.microsoft", "DynamicQuantizeLSTM"
        node.attributes.pop("layout", None)  # 0, and unknown to the operator
        builder.graph.opset_imports.setdefault("com.microsoft", 1)
        for value in dict.fromkeys(old):
            remove_unread(value)


def _gates(value: ir.Value, *, unsigned: bool) -> tuple[Codes, NDArray[np.float32], Codes]:
    """Codes ``[1, gates * H, K]`` of the weight of a layer, its scales ``[1]`` or ``[1, gates * H]``, and zero points."""
    maker = value.producer()
    assert maker is not None and maker.op_type in ("Mul", "DequantizeLinear"), value
    found, step, middle = (*maker.inputs, None)[:3]
    parts = folded_parts(maker) if maker.op_type == "Mul" else (found, middle, step)
    assert parts is not None, value
    held, zero, scale = parts
    assert held is not None and held.const_value is not None and scale is not None and scale.const_value is not None
    steps = scale.const_value.numpy().reshape(-1)
    steps, codes = (steps if steps.size == 1 else steps[None]), held.const_value.numpy()
    first = _MIDDLE if codes.dtype == np.uint8 else 0
    assert not first or (
        zero is not None and zero.const_value is not None and (zero.const_value.numpy() == _MIDDLE).all()
    )
    counted = codes.astype(np.int16) - first
    if unsigned:
        return (counted + _MIDDLE).astype(np.uint8), steps, np.full(steps.shape, _MIDDLE, np.uint8)
    return counted.astype(np.int8), steps, np.zeros(steps.shape, np.int8)


def _take_place(builder: Builder, node: ir.Node, result: ir.Value) -> None:
    """Replace ``node`` by ``result``, under the name of its output."""
    old, graph = node.outputs[0], node.graph
    assert graph is not None
    result.shape, wanted = old.shape, old.name
    for use in tuple(old.uses()):
        use.node.replace_input_with(use.idx, result)
    builder.outputs.replace(old, result)
    graph.remove(node, safe=True)
    result.name = wanted


def _tensor(builder: Builder, node: ir.Node, source: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Codes of the whole tensor, their scale and their zero point."""
    name = str(source.name)
    quantize = ir.Node(
        "", "DynamicQuantizeLinear", [source], name=builder.names.node(f"{name}_quantize"), num_outputs=3
    )
    found, step, offset = quantize.outputs
    for made, suffix, dtype in ((found, "q", D.UINT8), (step, "scale", D.FLOAT), (offset, "zero", D.UINT8)):
        made.name, made.type = builder.names.value(f"{name}_{suffix}"), ir.TensorType(dtype)
    before(node)(quantize)
    return found, step, offset


def _tokens(builder: Builder, node: ir.Node, source: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Codes of the tokens, counted from zero, and the scale of each."""
    place, name = before(node), str(source.name)

    def emit(op: str, inputs: list[ir.Value], suffix: str, dtype: D = D.FLOAT, **attributes: int) -> ir.Value:
        made = builder.emit(place, op, inputs, f"{name}_{suffix}", dtype, **attributes)
        made.shape = None
        return made

    def constant(suffix: str, value: float) -> ir.Value:
        return builder.initializer(f"{name}_{suffix}", np.array(value, np.float32))

    size = emit("Abs", [source], "size")
    if builder.graph.opset_imports.get("", 0) >= 18:
        axes = builder.initializer(f"{name}_axes", np.array([-1], np.int64))
        reach = emit("ReduceMax", [size, axes], "reach", keepdims=1)
    else:
        reach = emit("ReduceMax", [size], "reach", keepdims=1)
        maker = reach.producer()
        assert maker is not None
        maker.attributes.add(ir.AttrInt64s("axes", [-1]))
    reach = emit("Max", [reach, constant("least", SMALLEST_REACH)], "reach")
    most = constant("most", 127.0)
    rounded = emit("Round", [emit("Mul", [source, emit("Div", [most, reach], "factor")], "ratio")], "rounded")
    shifted = emit("Add", [rounded, constant("shift", _MIDDLE)], "shifted")
    return emit("Cast", [shifted], "codes", D.UINT8, to=int(D.UINT8)), emit("Div", [reach, most], "scale")


def _weight(node: ir.Node) -> tuple[NDArray[np.int8], NDArray[np.float32]] | None:
    """Codes ``[K, N]`` of an 8-bit weight without a zero point, and its scales, one or ``[N]``; ``None`` for another."""
    value = node.inputs[1]
    maker = None if value is None else value.producer()
    if maker is None or maker.op_type != "DequantizeLinear" or not is_plain(node):
        return None
    tensor, scale, zero = (None if held is None else held.const_value for held in (*maker.inputs, None)[:3])
    if tensor is None or scale is None or tensor.dtype != D.INT8 or len(tensor.shape) != 2:
        return None
    if zero is not None and zero.numpy().any():
        return None
    turned = node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))
    steps = scale.numpy()
    columns = maker.attributes.get_int("axis", 1) % 2 != turned
    if steps.ndim > 1 or (steps.ndim == 1 and not columns):
        return None
    codes = tensor.numpy()
    return (codes.T if turned else codes), np.asarray(steps, np.float32)
