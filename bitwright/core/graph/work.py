"""How much an operator computes, from the shapes of the recorded run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.ops import op_row


def size(graph: Graph, value: str) -> float:
    """Elements of a value; axes of unknown length count as 1."""
    return float(np.prod([max(n, 1) for n in graph.values[value].shape]))


def multiplications(graph: Graph, op: Op) -> float:
    """Multiplications of an operator that multiplies matrices, of the recorded run; 0 for the others."""
    row = op_row(op.type)
    if row.kind != "compute" or not op.outputs or op.inputs[0] is None:
        return 0.0
    made, read = size(graph, op.outputs[0]), graph.values[op.inputs[0]].shape
    weight = op.inputs[1] if len(op.inputs) > 1 else None
    if op.type in ("Conv", "ConvTranspose") and weight is not None:
        positions = made if op.type == "Conv" else size(graph, op.inputs[0])
        return positions * float(np.prod(graph.values[weight].shape[1:]))
    if op.type in ("LSTM", "GRU", "RNN"):
        steps = float(np.prod(read[:-1])) if read else 1.0
        return steps * sum(size(graph, v) for v in op.inputs[1:3] if v is not None)
    inner = read[-1 if not op.attrs.get("transA") else 0] if read else 1
    return made * max(inner, 1)


@dataclass(frozen=True)
class KernelTimes:
    """What layers take in float and on 8-bit codes in one runtime, in nanoseconds on one core. Only ratios count.

    Attributes:
        product: per multiplication of a layer, in float and on codes.
        result: per number that a layer makes, in float and on codes.
        depthwise: per number that a depthwise convolution makes, in float and on codes.
        patch: on codes, per row of the patches that a convolution of fewer than four channels copies: some numbers at a time.
        conversion: per number that is quantized or dequantized between the two.
        operator: for one operator, whatever its size; per sample.
        transpose: per number that is transposed between kernels which want the channels of images last, and others.
        pool: per number that a MaxPool on codes makes while the channels come first, beyond what it takes while they come last.
        layers: the operators that have kernels of either kind.
    """

    product: tuple[float, float]
    result: tuple[float, float]
    depthwise: tuple[float, float]
    patch: float
    conversion: float
    operator: float
    transpose: float = 0.0
    pool: float = 0.0
    layers: frozenset[str] = frozenset(("Conv", "Gemm", "MatMul"))

    def layer(self, graph: Graph, op: Op) -> tuple[float, float]:
        """What ``op`` takes in float and on codes; the same where there is no kernel on codes."""
        made = size(graph, op.outputs[0]) if op.outputs else 0.0
        if op.type not in self.layers or not multiplications(graph, op):
            return (0.0, 0.0)
        weight = graph.values[str(op.inputs[1])].shape
        if op.type == "Conv" and weight[1] == 1 and op.attrs.get("group", 1) > 1:
            return (made * self.depthwise[0], made * self.depthwise[1])
        products = multiplications(graph, op)
        in_float, on_codes = (a * products + b * made for a, b in zip(self.product, self.result, strict=True))
        if op.type == "Conv" and weight[1] < 4:
            on_codes += self.patch * made / weight[0] * float(np.prod(weight[2:-1]))
        return (in_float, on_codes)
