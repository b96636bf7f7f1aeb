"""The largest sum that the integer kernel of an exported operator may have to hold, read off its QuantizeLinear pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.numerics.formats import IntFormat
from bitwright.core.sums.accumulator import largest_sum

# operator -> axis of the output channels in its weight, where no attribute moves it
_AXES = {"Conv": 0, "ConvTranspose": 1, "MatMul": -1, "Gemm": 1}
_WIDE = 16  # bits; wider inputs have no integer kernel


def accumulated(node: ir.Node) -> int:
    """The bound of :func:`~bitwright.core.sums.accumulator.largest_sum` for ``node``; 0 where no int32 sum is made."""
    if node.op_type not in _AXES or len(node.inputs) < 2:
        return 0
    weight, furthest = _centred_codes(node.inputs[1]), _furthest(node.inputs[0])
    if weight is None or not furthest or weight.ndim < 2:
        return 0
    axis = 0 if node.op_type == "Gemm" and node.attributes.get_int("transB", False) else _AXES[node.op_type]
    groups = node.attributes.get_int("group", 1) if node.op_type == "ConvTranspose" else 1
    return largest_sum(weight, axis, groups, furthest=furthest)


def _centred_codes(value: ir.Value | None) -> NDArray[Any] | None:
    """The codes that a DequantizeLinear reads from an initializer, minus their zero point; ``None`` for other values."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear":
        return None
    codes = _constant(node.inputs[0])
    if codes is None:
        return None
    zero = _constant(node.inputs[2]) if len(node.inputs) > 2 else None
    whole = codes.astype(np.int64)
    if zero is None or not zero.astype(np.int64).any():
        return whole
    if zero.size > 1:  # by channel: the furthest of all keeps the bound a bound
        return np.abs(whole) + np.abs(zero.astype(np.int64)).max()
    return whole - zero.astype(np.int64).reshape(())


def _furthest(value: ir.Value | None) -> int:
    """Largest absolute code minus zero point of an activation on an integer grid; 0 for other values."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear" or len(node.inputs) < 3:
        return 0
    zero, kind = _constant(node.inputs[2]), None if node.inputs[2] is None else node.inputs[2].dtype
    name = "" if kind is None else kind.name
    if zero is None or "INT" not in name or kind is None or kind.bitwidth > _WIDE:
        return 0
    fmt = IntFormat(int(kind.bitwidth), signed=not name.startswith("U"))
    whole = zero.astype(np.int64)
    return int(max((fmt.qmax - whole).max(), (whole - fmt.qmin).max()))


def _constant(value: ir.Value | None) -> NDArray[Any] | None:
    return None if value is None or value.const_value is None else value.const_value.numpy()
