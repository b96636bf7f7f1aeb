"""Shape and Size of what was dequantized read the codes, which are as many.

ONNX Runtime gives every reader of a DequantizeLinear one of its own: a Shape in front of a Reshape, as exporters write it where
the batch is free, dequantized the whole tensor.
"""

from __future__ import annotations

import onnx_ir as ir

_CODES = frozenset((ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16))


def measure_codes(model: ir.Model) -> None:
    """Let Shape and Size read codes instead of what a DequantizeLinear makes of them.

    Args:
        model: changed in place; computes the same. Codes of other types than of 8 and 16 bits stay unread.
    """
    for node in model.graph.all_nodes():
        if node.op_type not in ("Shape", "Size") or node.domain or node.inputs[0] is None:
            continue
        made_by = node.inputs[0].producer()
        if made_by is None or made_by.op_type != "DequantizeLinear":
            continue
        codes = made_by.inputs[0]
        if codes is not None and codes.dtype in _CODES:
            node.replace_input_with(0, codes)
