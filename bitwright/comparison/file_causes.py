"""Causes that the file itself holds: other weights, biases, grids or operators than the first execution has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.comparison.doubt import Doubt, Run, Suspect
from bitwright.comparison.parameters import Key, give
from bitwright.comparison.points import values_by_name
from bitwright.core.graph.traits import TRAITS
from bitwright.export.verify.cut import QDQ

Array = NDArray[Any]


def file_causes(doubt: Doubt) -> Iterator[Suspect]:
    """What the file may say otherwise."""
    yield from _parameters(doubt)
    yield from _grid(doubt)
    if not doubt.a.values:  # a simulation has no operators
        makers = _makers_in_a(doubt)
        yield from _limits_of_a(doubt, makers)
        yield from _limits_of_b(doubt, makers)


def unexplained(doubt: Doubt) -> tuple[str, str]:
    """What to say where no run removes the difference."""
    if doubt.a.how == "float" and (inside := _rounded_inside(doubt)):
        remedy = "compare with the simulation, which rounds there too: @simulation in the place of @float"
        return f"quantizers in the body of {inside} round what {doubt.a.label} has in float", remedy
    made = [node.op_type for maker in _makers_in_a(doubt).values() for node in _with_bodies(maker)]
    made = [kind for kind in made if kind not in QDQ]
    more = [kind for kind in made if kind not in doubt.ops]
    less = [kind for kind in doubt.ops if kind not in made] if made else []
    told = "; ".join(
        f"only {side.label} has {', '.join(dict.fromkeys(kinds))}"
        for side, kinds in ((doubt.a, more), (doubt.b, less))
        if kinds
    )
    return told or "no run without a suspected cause removes it", "compare these operators in both files"


def _parameters(doubt: Doubt) -> Iterator[Suspect]:
    """Weights, biases and other constants that are further from those of the first execution than rounding takes them."""
    if doubt.a.values:
        return
    ours, theirs = doubt.lockstep.parameters
    made = set(doubt.place.piece.made)
    by_role: dict[str, dict[Key, Array]] = {}
    worst: dict[str, float] = {}
    for key, other in doubt.lockstep.keys_in_a.items():
        a, b = ours[other], theirs[key]
        if key[0] in made and b.op not in TRAITS["clamp"]:
            apart = b.apart(a.value) if a.value.shape == b.value.shape else float("inf")
            if apart > 1.001:
                by_role.setdefault(b.role, {})[key] = a.value
                worst[b.role] = max(worst.get(b.role, 0.0), apart)
    for role, values in by_role.items():
        names = ", ".join(dict.fromkeys(theirs[key].name for key in values))
        yield Suspect(
            role,  # type: ignore[arg-type]
            f"the {role} {names} is {worst[role]:.3g} steps from that of {doubt.a.label}",
            "export again, or look for what changed it after the export",
            f"with the {role} of {doubt.a.label}",
            doubt.beside(partial(doubt.again, partial(give, values=values))),
        )


def _grid(doubt: Doubt) -> Iterator[Suspect]:
    """Another scale or zero point than the first execution has there."""
    a, b = doubt.pair.a, doubt.pair.b
    if not (a.quantized and b.quantized) or a.scale is None or b.scale is None:
        return
    one, other = _grid_of(doubt.a.model, a.result), _grid_of(doubt.b.model, b.result)
    if one is None or other is None or _same(one, other):
        return
    yield Suspect(
        "grid",
        f"its scale is {_shown(other[0])} and zero point {_shown(other[1])}; {doubt.a.label} has {_shown(one[0])} "
        f"and {_shown(one[1])}",
        "export again with the encodings of the other, or load them: sim.load_encodings",
        f"on the grid of {doubt.a.label}",
        _on_other_grid(doubt, one),
    )


def _on_other_grid(doubt: Doubt, grid: tuple[Array, Array]) -> Run:
    def run() -> tuple[Array, Array] | None:
        found, _ = doubt.lockstep.locally(doubt.a, doubt.lockstep.feeds_a, [doubt.pair])
        other = doubt.again(lambda model: _set_grid(model, doubt.pair.b.result, grid))
        return None if other is None or doubt.pair not in found else (found[doubt.pair], other)

    return run


def _limits_of_a(doubt: Doubt, makers: dict[str, ir.Node]) -> Iterator[Suspect]:
    """A Relu or Clip that only the first execution has, last in front of the tensor."""
    theirs = dict(zip(doubt.place.piece.made, doubt.ops, strict=False))
    ends = {doubt.pair.a.entry, doubt.pair.a.result, *doubt.pair.b.names}
    for name, node in makers.items():
        kind = node.op_type
        if kind in TRAITS["clamp"] and theirs.get(name) != kind and kind not in doubt.ops and name in ends:
            low, high = _limits(node)
            yield Suspect(
                "clip",
                f"{doubt.a.label} limits it to [{low:.4g}, {high:.4g}] by {kind} {name}, {doubt.b.label} does not",
                "export again: the operator was taken out, or its limits were lost",
                f"limited to [{low:.4g}, {high:.4g}]",
                doubt.beside(partial(_limited, doubt, low, high)),
            )


def _limits_of_b(doubt: Doubt, makers: dict[str, ir.Node]) -> Iterator[Suspect]:
    """A Relu or Clip that only the second execution has."""
    ours = {name for name, node in makers.items() if node.op_type not in QDQ}
    if not ours or doubt.pair.a.entry in doubt.pair.b.names:
        return
    theirs = dict(zip(doubt.place.piece.made, doubt.ops, strict=False))
    unknown = theirs.keys() - ours - set(doubt.pair.a.names)
    for node in doubt.b.model.graph:
        name = str(node.outputs[0].name)
        if node.op_type in TRAITS["clamp"] and name in unknown:
            yield Suspect(
                "clip",
                f"{doubt.b.label} limits {name} by {node.op_type}, {doubt.a.label} does not",
                "export again: the operator was put in after the export",
                f"without {node.op_type}",
                doubt.beside(partial(doubt.again, partial(_skip, name=name))),
            )


def _limited(doubt: Doubt, low: float, high: float) -> Array | None:
    return doubt.lockstep.on_grid({doubt.pair: np.clip(doubt.found, low, high)})[doubt.pair]


def _rounded_inside(doubt: Doubt) -> str:
    """An operator in ``b`` on the way to this tensor whose bodies hold quantizers of activations, by type and name."""
    made = set(doubt.place.piece.made)
    for node in doubt.b.model.graph:
        if made.intersection(str(value.name) for value in node.outputs):
            bodies = list(_with_bodies(node))[1:]
            if any(one.op_type == "QuantizeLinear" for one in bodies):
                return f"{node.op_type} {node.outputs[0].name}"
    return ""


def _makers_in_a(doubt: Doubt) -> dict[str, ir.Node]:
    """Tensors that ``a`` makes on the way to this one -> operator, quantizers too; empty for a simulation."""
    if doubt.a.values:
        return {}
    named = values_by_name(doubt.a.model)
    borders = {p.a.result for p in doubt.lockstep.pairs} - {doubt.pair.a.result}
    found: dict[str, ir.Node] = {}
    stack = [named[doubt.pair.a.entry]]
    while stack:
        value = stack.pop()
        node = value.producer()
        if node is None or str(value.name) in found or (str(value.name) in borders and found):
            continue
        found[str(value.name)] = node
        stack.extend(v for v in node.inputs if v is not None)
    return found


def _with_bodies(node: ir.Node) -> Iterator[ir.Node]:
    """``node``, and what its bodies consist of."""
    yield node
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.as_graph().all_nodes()


def _grid_of(model: ir.Model, result: str) -> tuple[Array, Array] | None:
    """Scale and zero point of the DequantizeLinear that makes ``result``."""
    node = values_by_name(model)[result].producer()
    if node is None or node.op_type != "DequantizeLinear" or len(node.inputs) < 3:
        return None
    scale, zero = (None if v is None or v.const_value is None else v.const_value.numpy() for v in node.inputs[1:3])
    return None if scale is None or zero is None else (scale, zero)


def _same(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    """Whether two grids hold the same values: the zero points of a signed and an unsigned type are 128 apart."""
    shifted = [
        zero.astype(np.int64) - (np.iinfo(zero.dtype).min if zero.dtype.kind == "i" else 0) for _, zero in (one, other)
    ]
    return np.array_equal(one[0], other[0]) and np.array_equal(shifted[0], shifted[1])


def _set_grid(model: ir.Model, result: str, grid: tuple[Array, Array]) -> None:
    from bitwright.export.qdq.forms import Builder

    last = values_by_name(model)[result].producer()
    assert last is not None and last.inputs[0] is not None
    builder = Builder(model)
    scale, zero = builder.initializer("given_scale", grid[0]), builder.initializer("given_zero", grid[1])
    for node in (last, last.inputs[0].producer()):
        if node is not None and node.op_type in QDQ:
            node.replace_input_with(1, scale)
            node.replace_input_with(2, zero)


def _limits(node: ir.Node) -> tuple[float, float]:
    if node.op_type == "Relu":
        return 0.0, float("inf")
    ends = []
    for port, default, attribute in ((1, -np.inf, "min"), (2, np.inf, "max")):
        value = node.inputs[port] if len(node.inputs) > port else None
        known = None if value is None or value.const_value is None else value.const_value.numpy()
        ends.append(float(known) if known is not None else node.attributes.get_float(attribute, float(default)))
    return ends[0], ends[1]


def _skip(model: ir.Model, name: str) -> None:
    """Let readers of ``name`` read what its operator reads."""
    value = values_by_name(model)[name]
    node = value.producer()
    assert node is not None and node.inputs[0] is not None
    for use in tuple(value.uses()):
        use.node.replace_input_with(use.idx, node.inputs[0])


def _shown(array: Array) -> str:
    return f"{float(array.min()):.4g}" if array.min() == array.max() else f"{array.min():.4g} to {array.max():.4g}"
