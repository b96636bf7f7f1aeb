"""ONNX for operators of torch that the exporter translates wrongly, or not at all.

Each function is a row for ``custom_translation_table`` of ``torch.onnx.export``; its arguments are those of the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import onnxscript
import torch
from onnx.defs import OpSchema

import bitwright.torch.simulation.simulate  # noqa: F401, which defines the operator of marks
from bitwright.export.qdq.markers import ATTRIBUTE, DOMAIN, OP_TYPE

op: Any = onnxscript.opset21  # its annotations are those of a script, in which numbers are tensors
#: types that TopK of ONNX Runtime has a kernel for
_SORTED = frozenset((ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64, ir.DataType.INT32))


def squeeze_dim(self: Any, dim: int) -> Any:
    """``aten.squeeze.dim``: torch leaves an axis alone that is longer than 1, ``Squeeze`` refuses it.

    An axis of free length is longer: ``torch.export`` writes those of length 1 as constants.
    """
    return op.Squeeze(self, [dim]) if self.shape and self.shape[dim] == 1 else op.Identity(self)


def sort_stable(self: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """``aten.sort.stable``: ``TopK`` over the whole axis, which puts the lower index first where values are equal."""
    if not self.shape:
        return op.Identity(self), op.Constant(value_int=0)
    kept = self.dtype in _SORTED
    wide = ir.DataType.FLOAT if self.dtype.is_floating_point() else ir.DataType.INT64
    keys = self if kept else op.Cast(self, to=wide)
    length = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]), axis=0)
    values, indices = op.TopK(keys, length, axis=dim, largest=int(descending), sorted=1)
    return values if kept else op.Cast(values, to=self.dtype), indices


_FLOATS = ["tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)"]
_SITE: Any = onnxscript.values.Op(
    onnxscript.values.Opset(DOMAIN, 1),
    OP_TYPE,
    OpSchema(
        OP_TYPE, DOMAIN, 1,
        inputs=[OpSchema.FormalParameter("x", "T")], outputs=[OpSchema.FormalParameter("y", "T")],
        type_constraints=[("T", _FLOATS, "of what is quantized")],
        attributes=[OpSchema.Attribute(ATTRIBUTE, OpSchema.AttrType.STRING)],
    ),
)  # fmt: skip


def site(x: Any, site: str) -> Any:
    """``bitwright::site``: a marker, see :mod:`bitwright.export.qdq.markers`."""
    return _SITE(x, **{ATTRIBUTE: site})


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.squeeze.dim: squeeze_dim,
    torch.ops.aten.sort.stable: sort_stable,
    torch.ops.bitwright.site.default: site,
}
