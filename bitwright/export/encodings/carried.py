"""Encodings of tensors that only carry elements of others: entries for compilers that want one per tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from bitwright.core.graph.ops import op_row
from bitwright.export.encodings.versions import NamedEncoding


def carried_records(
    model: ir.Model, records: Iterable[NamedEncoding], known: Collection[str] = ()
) -> dict[str, NamedEncoding]:
    """Tensor of ``model`` without a record -> the record of the activation whose elements it carries.

    Max pools, reshapes, transposes, slices and their kin carry elements of their input; Concat and Where those of several,
    which must lie on one grid. Only encodings with a single scale hold wherever an element is moved to.

    Args:
        model: the float model.
        records: its encodings by name of tensor.
        known: tensors that have a quantizer of their own, on or off; they get no record here.
    """
    grids = {r.name: r for r in records if r.kind == "activation" and r.encoding.scale.ndim == 0}
    found: dict[str, NamedEncoding] = {}
    for node in model.graph:
        source = _source(node, grids)
        for value in node.outputs if source is not None else ():
            name = str(value.name)
            if source is not None and name not in grids and name not in known and _is_float(value):
                grids[name] = found[name] = replace(source, name=name)
    return found


def _source(node: ir.Node, grids: dict[str, NamedEncoding]) -> NamedEncoding | None:
    """The record of what ``node`` carries to its outputs; ``None`` where it computes, or carries what has none."""
    row = op_row(node.op_type)
    if node.domain or row.kind not in ("movement", "merge") or (node.op_type == "Pad" and not _pads_zeros(node)):
        return None
    ports = range(len(node.inputs)) if row.activations is None else row.activations
    values = [node.inputs[port] for port in ports if port < len(node.inputs)]
    carried = [value for value in values if value is not None and _is_float(value)]
    sources = [grids.get(str(value.name)) for value in carried]
    first = sources[0] if sources else None
    if first is None or any(s is None or s.encoding != first.encoding for s in sources):
        return None
    return first


def _pads_zeros(node: ir.Node) -> bool:
    """Whether a Pad adds nothing but zeros, which lie on every grid, or elements of its input."""
    mode = node.attributes.get("mode")
    if mode is not None and mode.as_string() != "constant":
        return True
    added = node.inputs[2] if len(node.inputs) > 2 else None
    if added is None:
        return True
    constant = ir.convenience.get_const_tensor(added)
    return constant is not None and not np.any(constant.numpy())


def _is_float(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype.is_floating_point()
