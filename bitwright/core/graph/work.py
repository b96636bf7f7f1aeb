"""How much an operator computes, from the shapes of the recorded run."""

from __future__ import annotations

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
