"""Data movement on codes, in the present axis order where possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.export.litert.lowering import Domain, Lowering, Perm

Array = NDArray[Any]
_CASTS = {
    ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float32", ir.DataType.DOUBLE: "float32", ir.DataType.INT32: "int32",
    ir.DataType.INT64: "int64", ir.DataType.BOOL: "bool", ir.DataType.INT8: "int8", ir.DataType.UINT8: "uint8",
}  # fmt: skip


def place_of(low: Lowering, node: ir.Node) -> Perm:
    """The axis order of the first input."""
    held = low.get(node.inputs[0])
    return next(iter(held.orders()), held.identity)


def _identity(low: Lowering, node: ir.Node) -> None:
    """Give a value another name."""
    source, name = low.get(node.inputs[0]), str(node.outputs[0].name)
    held = low.held[name] = low.fresh(name)
    if source.constant:
        held.array, held.grid = source.array, source.grid
        return
    low.plain(source.name, source.identity) if not source.orders() else None
    held.grid, held.codes, held.plain = source.grid, source.codes, source.plain


def _reshape(low: Lowering, node: ir.Node) -> None:
    name = str(node.outputs[0].name)
    shape, free = low.trace.shapes[name], low.trace.free[name]
    if sum(free) > 1:
        low.refuse(node, f"several axes of its output {shape} depend on the batch", "export with a fixed batch")
    domain = low.carried(node, node.inputs[0])
    perm = _through(low, node, shape)
    source = low.read(domain, node.inputs[0], place_of(low, node) if perm is not None else None)
    out = low.write(domain, tuple(range(len(shape))) if perm is None else perm)
    order = perm or tuple(range(len(shape)))
    low.reshape(source, out, [-1 if free[i] else shape[i] for i in order])


def _through(low: Lowering, node: ir.Node, shape: Sequence[int]) -> Perm | None:
    """The axis order of the output if the input is reshaped in its present order; ``None`` where axes are merged or split.

    That goes where both have the same longer axes: what is added or dropped has length 1.
    """
    held, perm = low.get(node.inputs[0]), place_of(low, node)
    old = [i for i in range(held.rank) if held.shape[i] != 1 or held.free[i]]
    free = low.trace.free[str(node.outputs[0].name)]
    new = [i for i in range(len(shape)) if shape[i] != 1 or free[i]]
    if [held.shape[i] for i in old] != [shape[i] for i in new]:
        return None
    ranked = {axis: new[k] for k, axis in enumerate(old)}
    order = [ranked[axis] for axis in perm if axis in ranked]
    if order == sorted(order):
        return tuple(range(len(shape)))
    rest = [i for i in range(len(shape)) if i not in order]
    return (*rest, *order)


def _transpose(low: Lowering, node: ir.Node) -> None:
    """Write a transposition without an operator, by changing the recorded axis order."""
    source, name = low.get(node.inputs[0]), str(node.outputs[0].name)
    perm = tuple(node.attributes.get_ints("perm", tuple(reversed(range(source.rank)))))
    held = low.held[name] = low.fresh(name)
    if source.constant:
        held.array = source.floats().transpose(perm)
        return
    if not source.orders():
        low.plain(source.name)
    if source.grid is not None and source.grid.per_tensor:
        held.grid = source.grid
    forms = (source.codes, held.codes) if held.grid is not None and source.codes else (source.plain, held.plain)
    for order, tensor in forms[0].items():
        forms[1][tuple(perm.index(axis) for axis in order)] = tensor


def _concat(low: Lowering, node: ir.Node) -> None:
    """Write a Concat on codes where all inputs share a grid, or can be brought to the output's."""
    values = [v for v in node.inputs if v is not None]
    rank = low.get(values[0]).rank
    axis, perm = node.attributes.get_int("axis", 0) % rank, low.order(values, rank)
    grids = {low.get(v).grid for v in values}
    domain = low.carried(node, values[0]) if len(grids) == 1 else low.domain(node, values, fuses=False)
    inputs = [_on(low, domain, v, perm) for v in values]
    options = {"table": "ConcatenationOptions", "axis": perm.index(axis)}
    low.flat.op("CONCATENATION", inputs, [low.write(domain, perm)], options)


def _on(low: Lowering, domain: Domain, value: ir.Value, perm: Perm) -> int:
    """The tensor of ``value`` on the grid of ``domain``."""
    held = low.get(value)
    tensor = low.read(domain, value, perm)
    if not domain.integer or held.grid == domain.grid:
        return tensor
    shape, free = [held.shape[i] for i in perm], [held.free[i] for i in perm]
    found = low.scratch(f"{held.name}_joined", shape, free, grid=domain.grid)
    assert held.grid is not None and domain.grid is not None
    low.requantized(tensor, held.grid, domain.grid, found)
    return found


def _split(low: Lowering, node: ir.Node) -> None:
    held = low.get(node.inputs[0])
    axis, perm = node.attributes.get_int("axis", 0) % held.rank, place_of(low, node)
    sizes = [low.trace.shapes[str(v.name)][axis] for v in node.outputs]
    domain = low.carried(node, node.inputs[0])
    if held.free[axis]:
        low.refuse_batch(node, "it splits the batch")
    outputs = [low.made(str(v.name), perm, domain.grid) for v in node.outputs]
    inputs = [
        low.read(domain, held.name, perm),
        low.flat.constant("sizes", np.asarray(sizes, np.int32)),
        low.flat.constant("axis", np.asarray(perm.index(axis), np.int32)),
    ]
    low.flat.op("SPLIT_V", inputs, outputs, {"table": "SplitVOptions", "numSplits": len(outputs)})


def _slice(low: Lowering, node: ir.Node) -> None:
    held = low.get(node.inputs[0])
    given = [None if v is None else low.known(v) for v in node.inputs[1:]]
    if (
        len(given) < 2
        or given[0] is None
        or given[1] is None
        or any(v is None and w is not None for v, w in zip(given, node.inputs[1:], strict=True))
    ):
        low.refuse(node, "where it cuts is computed from data", "slice with constants")
    axes = range(len(given[0])) if len(given) < 3 or given[2] is None else [int(a) % held.rank for a in given[2]]
    steps = [1] * len(given[0]) if len(given) < 4 or given[3] is None else [int(s) for s in given[3]]
    bounds = {a: (int(b), int(e), s) for a, b, e, s in zip(axes, given[0], given[1], steps, strict=True)}
    cut_slice(low, node, bounds)


def cut_slice(low: Lowering, node: ir.Node, bounds: dict[int, tuple[int, int, int]]) -> None:
    """Write STRIDED_SLICE with ``axis -> (begin, end, step)`` as in numpy."""
    held, perm = low.get(node.inputs[0]), place_of(low, node)
    begin, end, step = [0] * held.rank, [0] * held.rank, [1] * held.rank
    whole = 0
    for at, axis in enumerate(perm):
        first, last, by = bounds.get(axis, (0, 2**31, 1))
        if held.free[axis]:
            if (first, by) != (0, 1) or last < 2**31 - 1:
                low.refuse_batch(node, "it slices the batch")
            whole |= 1 << at
            end[at] = 0
            continue
        begin[at], end[at], step[at] = slice(first, last, by).indices(held.shape[axis])
        if by < 0 and end[at] < 0:  # -1 would count from the end
            end[at] = -held.shape[axis] - 1
    domain = low.carried(node, node.inputs[0])
    numbers = [low.flat.constant("slice", np.asarray(n, np.int32)) for n in (begin, end, step)]
    options = {"table": "StridedSliceOptions", "beginMask": whole, "endMask": whole}
    low.flat.op("STRIDED_SLICE", [low.read(domain, held.name, perm), *numbers], [low.write(domain, perm)], options)


def _pad(low: Lowering, node: ir.Node) -> None:
    held, mode = low.get(node.inputs[0]), node.attributes.get_string("mode", "constant")
    pads, filler = low.known(node.inputs[1]), low.known(node.inputs[2]) if len(node.inputs) > 2 else None
    if (
        pads is None
        or mode not in ("constant", "reflect")
        or (len(node.inputs) > 2 and node.inputs[2] is not None and filler is None)
    ):
        low.refuse(
            node,
            f"LiteRT pads with constants or by reflection, and this is {mode} of computed widths",
            "pad with constants",
        )
    axes = low.known(node.inputs[3]) if len(node.inputs) > 3 else None
    chosen = list(range(held.rank)) if axes is None else [int(a) % held.rank for a in axes]
    widths = np.zeros((held.rank, 2), np.int32)
    widths[chosen] = np.asarray(pads).reshape(2, -1).T
    perm = place_of(low, node)
    domain, number = low.carried(node, node.inputs[0]), 0.0 if filler is None else float(filler.ravel()[0])
    if (widths < 0).any():
        low.refuse(node, "its widths are negative: it cuts", "use Slice")
    argument = low.flat.constant("pads", widths[list(perm)])
    if mode == "reflect":
        inputs = [low.read(domain, held.name, perm), argument]
        low.flat.op("MIRROR_PAD", inputs, [low.write(domain, perm)], {"table": "MirrorPadOptions", "mode": 0})
        return
    if number and domain.integer:  # zero is on every grid; another number on that of the output only
        domain = low.domain(node, node.inputs[:1], fuses=False, unless="it pads with a number other than zero")
    inputs = [low.read(domain, held.name, perm), argument]
    if not number:
        low.flat.op("PAD", inputs, [low.write(domain, perm)], {"table": "PadOptions"})
        return
    inputs.append(low.flat.tensor(f"{held.name}_filler", (), held.dtype, data=np.asarray(number, held.dtype)))
    low.flat.op("PADV2", inputs, [low.write(domain, perm)], {"table": "PadV2Options"})


def _gather(low: Lowering, node: ir.Node) -> None:
    held, indices = low.get(node.inputs[0]), low.get(node.inputs[1])
    axis = node.attributes.get_int("axis", 0) % held.rank
    array = low.known(node.inputs[1])
    name = str(node.outputs[0].name)
    if array is not None:
        array = np.where(array < 0, array + held.shape[axis], array).astype(np.int32)
    if array is not None and array.ndim == 0 and not held.constant:
        _pick(low, node, axis, int(array))
        return
    scaled = held.grid is not None and not held.grid.per_tensor
    domain = low.carried(node, node.inputs[0])
    if scaled and held.constant:
        domain = Domain(False, name, 0)
    argument = low.plain(indices.name) if array is None else low.flat.constant("indices", array)
    source = low.read(domain, held.name)
    rank = len(low.trace.shapes[name])
    low.flat.op(
        "GATHER", [source, argument], [low.write(domain, tuple(range(rank)))], {"table": "GatherOptions", "axis": axis}
    )


def _pick(low: Lowering, node: ir.Node, axis: int, index: int) -> None:
    """Select one index of an axis, which is dropped, by a slice in the present axis order."""
    held, perm, name = low.get(node.inputs[0]), place_of(low, node), str(node.outputs[0].name)
    if held.free[axis]:
        low.refuse_batch(node, "it takes one sample of the batch")
    at, domain = perm.index(axis), low.carried(node, node.inputs[0])
    begin, end, ones = (np.zeros(held.rank, np.int32), np.zeros(held.rank, np.int32), np.ones(held.rank, np.int32))
    begin[at], end[at] = index, index + 1
    mask = (1 << held.rank) - 1 - (1 << at)
    left = [a for a in perm if a != axis]
    out = low.write(domain, tuple(sorted(left).index(a) for a in left))
    numbers = [low.flat.constant("slice", n) for n in (begin, end, ones)]
    options = {"table": "StridedSliceOptions", "beginMask": mask, "endMask": mask, "shrinkAxisMask": 1 << at}
    low.flat.op("STRIDED_SLICE", [low.read(domain, held.name, perm), *numbers], [out], options)
    assert name == domain.result


def _expand(low: Lowering, node: ir.Node) -> None:
    """Write BROADCAST_TO; nothing where the shape stays."""
    held, name = low.get(node.inputs[0]), str(node.outputs[0].name)
    shape, free = low.trace.shapes[name], low.trace.free[name]
    if (shape, free) == (held.shape, held.free):
        _identity(low, node)
        return
    domain = low.carried(node, node.inputs[0])
    argument = _whole_shape(low, node, shape, free)
    out = low.write(domain, tuple(range(len(shape))))
    low.flat.op("BROADCAST_TO", [low.read(domain, held.name), argument], [out], {"table": "BroadcastToOptions"})


def _whole_shape(low: Lowering, node: ir.Node, shape: Sequence[int], free: Sequence[bool]) -> int:
    """The shape of the output of an Expand: where ``node`` asks for 1 it keeps the input's length, which BROADCAST_TO refuses."""
    argument, asked = _shape_of(low, node, shape, free), node.inputs[1]
    if not any(free):
        return argument
    assert asked is not None
    _, per_row = low.trace.linear[str(asked.name)]
    if not all(np.asarray(per_row).ravel()[np.asarray(free)]):
        low.refuse_batch(node, "it keeps the batch of what it expands")
    kept = low.flat.constant("kept", np.where(free, 1, shape).astype(np.int32))
    made = low.scratch(f"{node.outputs[0].name}_shape", (len(shape),), (False,), "int32")
    low.flat.op("MAXIMUM", [argument, kept], [made], {"table": "MaximumMinimumOptions"})
    return made


def _shape_of(low: Lowering, node: ir.Node, shape: Sequence[int], free: Sequence[bool]) -> int:
    """The shape of the output, which ``node`` reads as its last input; a shape there may leave axes as they are."""
    if not any(free):
        return low.flat.constant("shape", np.asarray(shape, np.int32))
    asked = low.trace.linear.get(str(node.inputs[-1].name)) if node.inputs[-1] is not None else None
    if asked is None or asked[0].size != len(shape):
        low.refuse_batch(node, "its shape follows the batch in a way that is not written here")
    return low.dims(node.inputs[-1])


def _constant_of_shape(low: Lowering, node: ir.Node) -> None:
    """FILL, where the shape follows the batch."""
    value = node.attributes.get_tensor("value", None)
    number = np.zeros(1, np.float32) if value is None else value.numpy()
    name = str(node.outputs[0].name)
    shape, free = low.trace.shapes[name], low.trace.free[name]
    filler = low.flat.tensor(f"{name}_value", (), number.dtype.name, data=number.reshape(()))
    inputs = [_shape_of(low, node, shape, free), filler]
    low.flat.op("FILL", inputs, [low.made(name, tuple(range(len(shape))))], {"table": "FillOptions"})


def _tile(low: Lowering, node: ir.Node) -> None:
    held, repeats = low.get(node.inputs[0]), low.known(node.inputs[1])
    if repeats is None or any(free and n != 1 for free, n in zip(held.free, repeats, strict=True)):
        low.refuse(node, "it repeats the batch, or as often as data say", "repeat other axes, by constants")
    perm, domain = place_of(low, node), low.carried(node, node.inputs[0])
    argument = low.flat.constant("repeats", np.asarray(repeats, np.int32)[list(perm)])
    low.flat.op(
        "TILE", [low.read(domain, held.name, perm), argument], [low.write(domain, perm)], {"table": "TileOptions"}
    )


def _cast(low: Lowering, node: ir.Node) -> None:
    """CAST; numbers between float types stay float32."""
    held, name = low.get(node.inputs[0]), str(node.outputs[0].name)
    target = _CASTS.get(ir.DataType(node.attributes.get_int("to", 1)))
    if target is None:
        low.refuse(node, "LiteRT has no such type", "export format='onnx'")
    if held.dtype == target:
        _identity(low, node)
        return
    perm = place_of(low, node)
    out = low.made(name, perm)
    low.flat.op("CAST", [low.plain(held.name, perm)], [out], {"table": "CastOptions"})


def _where(low: Lowering, node: ir.Node) -> None:
    """SELECT_V2, in the order of ONNX."""
    domain = low.domain(node, node.inputs[1:], fuses=False, unless="it is computed in float here")
    rank = len(low.trace.shapes[domain.result])
    inputs = [low.plain(node.inputs[0]), *(low.read(domain, v) for v in node.inputs[1:])]
    low.flat.op("SELECT_V2", inputs, [low.write(domain, tuple(range(rank)))], {"table": "SelectV2Options"})


def _arg(kernel: str, low: Lowering, node: ir.Node) -> None:
    held = low.get(node.inputs[0])
    axis, name = node.attributes.get_int("axis", 0) % held.rank, str(node.outputs[0].name)
    shape, free = low.trace.shapes[name], low.trace.free[name]
    reduced = [n for i, n in enumerate(held.shape) if i != axis]
    found = low.scratch(f"{name}_index", reduced, [f for i, f in enumerate(held.free) if i != axis], "int64")
    argument = low.flat.constant("axis", np.asarray(axis, np.int32))
    table = {"ARG_MAX": "ArgMaxOptions", "ARG_MIN": "ArgMinOptions"}[kernel]
    low.flat.op(kernel, [low.plain(held.name), argument], [found], {"table": table, "outputType": 4})
    low.reshape(
        found, low.made(name, tuple(range(len(shape)))), [-1 if f else n for n, f in zip(shape, free, strict=True)]
    )


LOWERINGS: dict[str, Callable[[Lowering, ir.Node], None]] = {
    "Identity": _identity,
    "Dropout": _identity,
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Squeeze": _reshape,
    "Unsqueeze": _reshape,
    "Transpose": _transpose,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "Gather": _gather,
    "Expand": _expand,
    "ConstantOfShape": _constant_of_shape,
    "Tile": _tile,
    "Cast": _cast,
    "Where": _where,
    "ArgMax": partial(_arg, "ARG_MAX"),
    "ArgMin": partial(_arg, "ARG_MIN"),
}
