"""Matrix products: FULLY_CONNECTED with a constant weight, BATCH_MATMUL of two computed matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from bitwright.export.tflite.arithmetic import binary_options
from bitwright.export.tflite.images import bias_problem, bias_tensor, sums_of, weight_problem, weight_tensor
from bitwright.export.tflite.lowering import Held, Lowering


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
    low.flat.op(
        "BATCH_MATMUL", inputs, [low.write(domain, tuple(range(len(shape))))], {"table": "BatchMatMulOptions"}
    )


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
    """Where the bias of a product stands: input ``port`` of ``node``, the product itself or an Add after it."""

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
    """Both matrices are computed: BATCH_MATMUL, and the sum with what is added."""
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


LOWERINGS: dict[str, Callable[[Lowering, ir.Node], None]] = {"Gemm": _gemm, "MatMul": _matmul}
