"""Matrix products and LSTM layers: FULLY_CONNECTED, BATCH_MATMUL of two computed matrices, LSTM.

LSTM layers are UNIDIRECTIONAL_SEQUENCE_LSTM, in float with integer weights that the runtime dequantizes once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.export.litert.arithmetic import binary_options
from bitwright.export.litert.flat import Grid
from bitwright.export.litert.images import bias_problem, bias_tensor, sums_of, weight_problem, weight_tensor
from bitwright.export.litert.lowering import Held, Lowering

Array = NDArray[Any]
_TANH = 4
_ORDER = (0, 2, 3, 1)  # input, forget, cell, output among ONNX's input, output, forget, cell
_INPUTS = 24
_STATES = (18, 19)  # places of the output's and the cell's state


def _gemm(low: Lowering, node: ir.Node) -> None:
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    if alpha != 1 or (beta != 1 and len(node.inputs) > 2):
        low.refuse(node, "it multiplies by alpha or beta", "fold them into weight and bias")
    data, weight = low.get(node.inputs[0]), low.get(node.inputs[1])
    if not weight.constant or node.attributes.get_int("transA", 0) == 1:
        _computed_gemm(low, node)
        return
    _fully_connected(low, node, data, weight, bool(node.attributes.get_int("transB", 0)))


def _matmul(low: Lowering, node: ir.Node) -> None:
    data, weight = low.get(node.inputs[0]), low.get(node.inputs[1])
    if weight.constant and weight.rank == 2 and data.rank >= 2 and not data.constant:
        _fully_connected(low, node, data, weight, False)
        return
    domain = low.domain(node, node.inputs, fuses=False)
    shape = low.trace.shapes[domain.result]
    if min(data.rank, weight.rank) < 2:
        low.refuse(node, "one of its operands is a vector", "reshape it to a matrix")
    inputs = [low.read(domain, data.name), low.read(domain, weight.name)]
    low.flat.op("BATCH_MATMUL", inputs, [low.write(domain, tuple(range(len(shape))))], {"table": "BatchMatMulOptions"})


def _fully_connected(low: Lowering, node: ir.Node, data: Held, weight: Held, transposed: bool) -> None:
    """``data @ weight (+ bias)``; the bias may be an Add after a MatMul."""
    channel = 0 if transposed else 1
    count = weight.shape[channel]
    bias = _bias_of(low, node, count)
    why = weight_problem(weight.grid, channel) or (
        None if bias is None else bias_problem(low.get(bias.node.inputs[bias.port]), data.grid, weight.grid)
    )
    owner = node if bias is None else bias.node
    domain = low.domain(owner, node.inputs[:1], unless=why)
    if bias is not None and bias.node is not node:
        low.done.add(bias.node)
    order = (0, 1) if transposed else (1, 0)
    filters = weight_tensor(low, domain, weight, order, [weight.shape[i] for i in order], 0)
    added = None if bias is None else low.get(bias.node.inputs[bias.port])
    given = [] if added is None else bias_tensor(low, domain, added, sums_of(domain, data, weight), count)
    options = {
        "table": "FullyConnectedOptions", "keepNumDims": data.rank > 2, "fusedActivationFunction": domain.activation,
    }  # fmt: skip
    out = low.write(domain, tuple(range(data.rank)))
    low.flat.op("FULLY_CONNECTED", [low.read(domain, data.name), filters, *(given or [-1])], [out], options)


@dataclass(frozen=True)
class _Bias:
    """Position of a product's bias: input ``port`` of ``node``, which is the product or an Add after it."""

    node: ir.Node
    port: int


def _bias_of(low: Lowering, node: ir.Node, count: int) -> _Bias | None:
    if node.op_type == "Gemm":
        value = node.inputs[2] if len(node.inputs) > 2 else None
        if value is None:
            return None
        held = low.get(value)
        if not held.constant or int(np.prod(held.shape)) not in (1, count):
            low.refuse(node, "its bias is computed, or is a matrix", "write it as MatMul and Add")
        return _Bias(node, 2)
    made = node.outputs[0]
    readers = [use for use in made.uses()]
    if len(readers) != 1 or str(made.name) in low.outputs or readers[0].node.op_type != "Add":
        return None
    port = 1 - readers[0].idx
    if not _is_constant(low, readers[0].node, port):
        return None
    held = low.get(readers[0].node.inputs[port])
    if int(np.prod(held.shape)) != count or held.shape[-1:] != (count,):
        return None
    return _Bias(readers[0].node, port)


def _is_constant(low: Lowering, node: ir.Node, port: int) -> bool:
    name = str(node.inputs[port].name)  # type: ignore[union-attr]
    return name in low.trace.constants


def _computed_gemm(low: Lowering, node: ir.Node) -> None:
    """Write a Gemm of two computed matrices: BATCH_MATMUL, and the sum with its addend."""
    values = [v for v in node.inputs[:2]]
    options = {
        "table": "BatchMatMulOptions",
        "adjX": bool(node.attributes.get_int("transA", 0)),
        "adjY": bool(node.attributes.get_int("transB", 0)),
    }
    adds = len(node.inputs) > 2 and node.inputs[2] is not None
    unless = "a product of two computed matrices with a sum has no integer kernel" if adds else None
    domain = low.domain(node, values, fuses=adds, unless=unless)
    inputs = [low.read(domain, v) for v in values]
    shape, free = low.trace.shapes[domain.result], low.trace.free[domain.result]
    if not adds:
        low.flat.op("BATCH_MATMUL", inputs, [low.write(domain, (0, 1))], options)
        return
    product = low.scratch(f"{domain.result}_product", shape, free)
    low.flat.op("BATCH_MATMUL", inputs, [product], options)
    sums = [product, low.plain(node.inputs[2])]
    low.flat.op("ADD", sums, [low.write(domain, (0, 1))], binary_options("ADD", domain.activation))


# ---- LSTM


def _lstm(low: Lowering, node: ir.Node) -> None:
    _check(low, node)
    held, weight = low.get(node.inputs[0]), low.get(node.inputs[1])
    if any(held.free):
        low.refuse_batch(node, "the states of an LSTM have a fixed batch in LiteRT")
    directions, hidden = weight.shape[0], weight.shape[1] // 4
    kind = node.attributes.get_string("direction", "forward")
    batch_first = (1, 0, 2) in held.orders()
    order = (1, 0, 2) if batch_first else (0, 1, 2)
    time = order.index(0)
    source, shape = low.plain(held.name, order), [held.shape[i] for i in order]
    made: list[int] = []
    for index in range(directions):
        backwards = kind == "reverse" or index == 1
        given = _reversed(low, source, shape, time) if backwards else source
        out_shape = [*shape[:2], hidden]
        out = low.scratch(f"{node.outputs[0].name}_{index}", out_shape, (False,) * 3)
        _layer(low, node, index, given, out, shape[1 - time], hidden, time_major=not batch_first)
        made.append(_reversed(low, out, out_shape, time) if backwards else out)
    _write_sequence(low, node, made, [*shape[:2], hidden], batch_first)
    _write_last(low, node, made, shape, hidden, time, kind)


def _check(low: Lowering, node: ir.Node) -> None:
    """Refuse features that LiteRT's operator lacks."""
    inputs, attributes = node.inputs, node.attributes
    lengths = low.known(inputs[4]) if len(inputs) > 4 and inputs[4] is not None else None
    steps = low.get(inputs[0]).shape[0]
    problems = {
        "its sequences have lengths of their own": len(inputs) > 4 and inputs[4] is not None
        and (lengths is None or bool((lengths != steps).any())),
        "its initial state is not zero": any(not _zero(low, v) for v in inputs[5:7] if v is not None),
        "it has peephole weights": len(inputs) > 7 and inputs[7] is not None,
        "it clips": "clip" in attributes,
        "its activation functions are others": list(attributes.get_strings("activations", ("Sigmoid", "Tanh", "Tanh")))[:3]
        != ["Sigmoid", "Tanh", "Tanh"],
        "it couples input and forget gate": bool(attributes.get_int("input_forget", 0) == 1),
        "its last cell state is read": len(node.outputs) > 2 and _read(low, node.outputs[2]),
        "its weights are computed": not (low.get(inputs[1]).constant and low.get(inputs[2]).constant),
        "its batch lies first (layout 1)": attributes.get_int("layout", 0) == 1,
    }  # fmt: skip
    for problem, there in problems.items():
        if there:
            low.refuse(node, f"{problem}, which LiteRT's LSTM cannot say", "export format='onnx', or change the layer")


def _read(low: Lowering, value: ir.Value) -> bool:
    return bool(value.uses()) or str(value.name) in low.outputs


def _zero(low: Lowering, value: ir.Value) -> bool:
    array = low.known(value) if str(value.name) in low.trace.constants or str(value.name) in low.held else None
    return str(value.name) in low.trace.zeros or (array is not None and not array.any())


def _reversed(low: Lowering, source: int, shape: Sequence[int], axis: int) -> int:
    out = low.scratch("reversed", shape, (False,) * 3)
    argument = low.flat.constant("axis", np.asarray([axis], np.int32))
    low.flat.op("REVERSE_V2", [source, argument], [out], {"table": "ReverseV2Options"})
    return out


def _layer(
    low: Lowering, node: ir.Node, index: int, source: int, out: int, batch: int, hidden: int, *, time_major: bool
) -> None:
    """Write one direction of a layer."""
    inputs = [-1] * _INPUTS
    inputs[0] = source
    for place, port in ((1, 1), (5, 2)):
        held = low.get(node.inputs[port])
        for i, gate in enumerate(_ORDER):
            inputs[place + i] = _gate(low, held, index, slice(gate * hidden, (gate + 1) * hidden))
    for i, array in enumerate(_biases(low, node, index, hidden)):
        inputs[12 + i] = low.flat.tensor(f"{node.outputs[0].name}_bias", (hidden,), "float32", data=array)
    for place in _STATES:
        inputs[place] = low.scratch(f"{node.outputs[0].name}_state", (batch, hidden), (False, False))
        low.flat.tensors[inputs[place]].isVariable = True
    options = {
        "table": "UnidirectionalSequenceLSTMOptions", "fusedActivationFunction": _TANH, "timeMajor": time_major,
    }  # fmt: skip
    low.flat.op("UNIDIRECTIONAL_SEQUENCE_LSTM", inputs, [out], options)


def _gate(low: Lowering, held: Held, index: int, rows: slice) -> int:
    """The float weight of one gate, from codes by a DEQUANTIZE that the runtime computes once."""
    assert held.array is not None
    grid = held.grid
    if grid is None or grid.axis not in (None, 1):
        array = held.floats()[index, rows].astype(np.float32)
        return low.flat.tensor(held.name, array.shape, "float32", data=array)
    codes = held.array[index, rows]
    if grid.axis == 1:
        grid = Grid(grid.dtype, grid.scale[rows], grid.zero_point[rows], 0)
    stored = low.flat.tensor(held.name, codes.shape, grid.dtype, grid, axis=0, data=codes)
    floats = low.flat.tensor(f"{held.name}_float", codes.shape, "float32")
    low.flat.op("DEQUANTIZE", [stored], [floats], {"table": "DequantizeOptions"})
    return floats


def _biases(low: Lowering, node: ir.Node, index: int, hidden: int) -> list[Array]:
    """One bias per gate: the sum of both that ONNX has."""
    given = low.known(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else None
    if given is None:
        return [np.zeros(hidden, np.float32)] * 4
    both = given[index].reshape(2, 4, hidden).sum(0, dtype=np.float32)
    return [both[gate] for gate in _ORDER]


def _write_sequence(low: Lowering, node: ir.Node, made: Sequence[int], shape: Sequence[int], batch_first: bool) -> None:
    """``Y`` of ``[time, directions, batch, hidden]``, in the order in which the kernel made it."""
    value = node.outputs[0]
    if not value.name or not _read(low, value):
        return
    perm = (1, 2, 0, 3) if batch_first else (1, 0, 2, 3)
    held = low.fresh(str(value.name))
    _join(low, made, (1, *shape), low.made(held.name, perm))


def _join(low: Lowering, made: Sequence[int], shape: Sequence[int], out: int) -> None:
    """One direction or several, along a new first axis; each is of ``shape`` then."""
    if len(made) == 1:
        low.reshape(made[0], out, shape)
        return
    parts = [low.scratch("direction", shape, (False,) * len(shape)) for _ in made]
    for tensor, part in zip(made, parts, strict=True):
        low.reshape(tensor, part, shape)
    low.flat.op("CONCATENATION", parts, [out], {"table": "ConcatenationOptions", "axis": 0})


def _write_last(
    low: Lowering, node: ir.Node, made: Sequence[int], shape: Sequence[int], hidden: int, time: int, kind: str
) -> None:
    """``Y_h`` of ``[directions, batch, hidden]``: the last step of each direction."""
    value = node.outputs[1] if len(node.outputs) > 1 else None
    if value is None or not value.name or not _read(low, value):
        return
    steps, batch = [], shape[1 - time]
    for index, tensor in enumerate(made):
        backwards = kind == "reverse" or index == 1
        begin = [0, 0, 0]
        begin[time] = 0 if backwards else shape[time] - 1
        size = [*shape[:2], hidden]
        size[time] = 1
        step = low.scratch(f"{value.name}_step", size, (False,) * 3)
        bounds = [low.flat.constant("slice", np.asarray(n, np.int32)) for n in (begin, size)]
        low.flat.op("SLICE", [tensor, *bounds], [step], {"table": "SliceOptions"})
        steps.append(step)
    _join(low, steps, (1, batch, hidden), low.made(str(value.name), (0, 1, 2)))


LOWERINGS: dict[str, Callable[[Lowering, ir.Node], None]] = {"Gemm": _gemm, "MatMul": _matmul, "LSTM": _lstm}
