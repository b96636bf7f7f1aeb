"""Zeros around the image of a convolution: a Pad in front of it becomes the convolution's own padding.

A Pad between quantizers is computed in float by ONNX Runtime, with a DequantizeLinear before and a QuantizeLinear after it, which
together cost more than the convolution; a convolution pads with zeros as it reads. Both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.export.qdq.markers import remove_unread

Known = Callable[[ir.Value], NDArray[Any] | None]


def pads_of_convolutions(model: ir.Model) -> list[ir.Node]:
    """Every Pad whose readers are all convolutions that state how much they pad."""
    return [node for node in model.graph.all_nodes() if _is_pad(node) and _read_by_convolutions(node.outputs[0])]


def absorb_padding(pads: list[ir.Node], known: Known) -> None:
    """Let convolutions do what the Pad nodes in front of them do, and remove those.

    Args:
        pads: as :func:`pads_of_convolutions` found them. Those that pad with another number than zero, in other axes than the
            spatial ones, by a width that is not constant, or that cut off (a width below zero), stay.
        known: the value of a constant, ``None`` of what is computed.
    """
    for node in pads:
        widths, source = _widths(node, known), node.inputs[0]
        if widths is None or source is None:
            continue
        for reader, port in tuple(node.outputs[0].uses()):
            own = reader.attributes.get_ints("pads", (0,) * len(widths))
            total = [int(a) + int(b) for a, b in zip(own, widths, strict=True)]
            reader.attributes.add(ir.AttrInt64s("pads", total))
            reader.attributes.pop("auto_pad", None)
            reader.replace_input_with(port, source)
        remove_unread(node.outputs[0])


def _is_pad(node: ir.Node) -> bool:
    return node.op_type == "Pad" and not node.domain and node.attributes.get_string("mode", "constant") == "constant"


def _read_by_convolutions(value: ir.Value) -> bool:
    readers = list(value.uses())
    return bool(readers) and not value.is_graph_output() and all(_takes(node, port) for node, port in readers)


def _takes(node: ir.Node, port: int) -> bool:
    plain = node.op_type == "Conv" and not node.domain and port == 0
    return plain and node.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")


def _widths(node: ir.Node, known: Known) -> list[int] | None:
    """Zeros before and after every spatial axis, in the order of a convolution's ``pads``; ``None`` of other padding."""
    inputs = [*node.inputs[1:], None, None, None][:3]
    arrays = [None if value is None else known(value) for value in inputs]
    if any(value is not None and array is None for value, array in zip(inputs, arrays, strict=True)):
        return None
    given, filler, axes = arrays
    weight = next(iter(node.outputs[0].uses())).node.inputs[1]
    if given is None or (filler is not None and filler.any()) or weight is None or weight.shape is None:
        return None
    whole = np.zeros((2, len(weight.shape)), np.int64)
    whole[:, slice(None) if axes is None else axes] = given.reshape(2, -1)
    if whole[:, :2].any() or (whole < 0).any():
        return None
    return [int(n) for n in whole[:, 2:].reshape(-1)]
