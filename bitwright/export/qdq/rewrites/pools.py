"""What is made in float goes on its grid after the MaxPool that reads it.

    before: Conv -> Relu -> QuantizeLinear -> DequantizeLinear -> MaxPool
    after:  Conv -> Relu -> MaxPool -> Concat -> QuantizeLinear -> DequantizeLinear

Rounding to a grid of one scale keeps the order of numbers, so that the code of the largest is the largest of the codes: both
forms give the same numbers. The second one rounds what the pool leaves. ONNX Runtime (1.31) pools floats in the layout of the
float convolution before it, and codes, whose channels still come first there, many times as slowly. It moves a QuantizeLinear
back across a MaxPool; a Concat of one tensor stops that: a copy, in that layout too, which no optimiser takes out.
"""

from __future__ import annotations

import onnx_ir as ir

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerTensor
from bitwright.export.qdq.forms import after, before
from bitwright.export.qdq.markers import is_site, move_uses, site_nodes, site_of
from bitwright.export.qdq.trace import is_fused, is_narrow
from bitwright.export.qdq.writing import Writing

_POOLS = frozenset(("MaxPool", "GlobalMaxPool"))
_CODES = 16  # most bits of codes that pairs stand for


def round_after_pools(w: Writing) -> None:
    """Move markers past the pools that alone read what they mark, where that is made in float; fills ``pooled``.

    Left as they are: values that something else reads too or the model returns, pools that return indices or whose result has
    a grid of its own or is returned, grids of several scales, of floats or of more than 16 bits, and bodies.

    Args:
        w: after :func:`bitwright.export.qdq.trace.trace`.
    """
    for marker in site_nodes(w.model):
        while (pool := _pool_after(w, marker)) is not None:
            _swap(w, marker, pool)


def keep_after_pool(w: Writing, marker: ir.Node) -> None:
    """Put a copy between ``marker`` and the pool before it, for a quantizer that stays where the marker is."""
    source = marker.inputs[0]
    assert source is not None
    dtype = source.dtype or ir.DataType.FLOAT
    copy = w.builder.emit(before(marker), "Concat", [source], f"{source.name}_pooled", dtype, axis=1)
    marker.replace_input_with(0, copy)


def _pool_after(w: Writing, marker: ir.Node) -> ir.Node | None:
    """The pool that ``marker`` can be moved past."""
    source, marked = marker.inputs[0], marker.outputs[0]
    encoding = w.encodings[site_of(marker)]
    pool = _sole_reader(marked)
    if pool is None or source is None or pool.op_type not in _POOLS or pool.domain:
        return None
    fits = marker.graph is w.model.graph and _sole_reader(source) is marker and _is_alone(pool)
    return pool if fits and _keeps_order(encoding) and _is_made_in_float(w, source, encoding) else None


def _sole_reader(value: ir.Value) -> ir.Node | None:
    """The only operator that reads ``value``; ``None`` where the model returns it too."""
    uses = value.uses()
    return None if len(uses) != 1 or value.is_graph_output() else next(iter(uses)).node


def _is_alone(pool: ir.Node) -> bool:
    """Whether ``pool`` makes nothing but numbers on the grid of what it reads."""
    made, *indices = pool.outputs
    readers = [use.node for use in made.uses()]
    plain = readers and not made.is_graph_output() and not any(map(is_site, readers))
    return bool(plain) and not any(value.uses() or value.is_graph_output() for value in indices)


def _keeps_order(encoding: Encoding) -> bool:
    fmt = encoding.format
    return isinstance(fmt, IntFormat) and fmt.bits <= _CODES and isinstance(encoding.granularity, PerTensor)


def _is_made_in_float(w: Writing, made: ir.Value, encoding: Encoding) -> bool:
    """Whether no integer kernel makes ``made``, with the operators that runtimes fuse with it."""
    value = made
    while (node := value.producer()) is not None and value not in w.constants:
        if value in w.grids or node in w.in_float or not is_narrow(encoding):
            return not is_narrow(w.grids.get(value))
        read, wide = _read(w, node)
        if read != 1 or not wide or not is_fused(w, node):
            return bool(wide)
        value = wide[0]
    return value is not made and value not in w.constants


def _read(w: Writing, node: ir.Node) -> tuple[int, list[ir.Value]]:
    """How many tensors ``node`` reads that are not constant, and those of them that no integer kernel reads."""
    read = [v for v in node.inputs if v is not None and v not in w.constants and v not in w.weights]
    return len(read), [v for v in read if not is_narrow(w.grids.get(v))]


def _swap(w: Writing, marker: ir.Node, pool: ir.Node) -> None:
    """``source -> marker -> pool -> readers`` becomes ``source -> pool -> marker -> readers``."""
    source, marked, made = marker.inputs[0], marker.outputs[0], pool.outputs[0]
    assert marker.graph is not None
    pool.replace_input_with(0, source)
    move_uses(made, marked)
    marker.replace_input_with(0, made)
    marked.shape = None if made.shape is None else made.shape.copy()
    marker.graph.remove(marker)
    after(pool)(marker)
    w.grids.pop(made, None)
    text = f"made in float, and rounded after the {pool.op_type} that alone reads it: the same codes, fewer of them"
    w.note(site_of(marker), "after pool", text)
    w.pooled[marker] = w.pooled.get(marker, 0) + 1
