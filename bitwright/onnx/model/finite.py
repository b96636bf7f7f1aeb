"""Prove which tensors stay finite for finite operands: bounds on magnitudes, operator by operator.

Minima and maxima pass over NaN, so something has to look for it. A sum does, at the price of a pass over the tensor. Yet a
convolution of finite numbers is finite unless it overflows, and that the bounds of its input rule out: no partial sum
is larger than the number of products times the largest weight times the largest input. So a tensor needs no pass of its own
where operators of this kind make it of tensors whose bounds are known and that were found finite themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from bitwright.core.graph.operators import TRAITS, op_row
from bitwright.export.files.onnx_file import let_go

_LIMIT = 1e28  # leaves sums over 10 billion elements, as means take them, and rounding, within float32
_SOURCES = 8  # tensors that a proof may rest on
_LARGE = 1 << 26  # bytes of a constant that is not looked through: a sum costs nothing beside the product with it
_SAME = frozenset(
    ("Relu", "Clip", "HardSwish", "AveragePool", "GlobalAveragePool", "ReduceMean", "Neg", "Abs", "Concat")
)
_BETWEEN = frozenset(("Sigmoid", "Tanh", "Softmax"))  # -1 and 1


@dataclass(frozen=True)
class Magnitude:
    """A bound on a tensor, and on all values computed between ``sources`` and it.

    Attributes:
        sources: tensors whose bounds are known when the model has run.
        gain, offset: no magnitude is above ``gain`` times the largest of ``sources`` plus ``offset``.
        cap: a bound whatever the sources are, as long as they are finite.
    """

    sources: frozenset[ir.Value]
    gain: float = 0.0
    offset: float = 0.0
    cap: float = math.inf

    def holds(self, known: Mapping[ir.Value, float]) -> bool:
        """Whether the tensor is finite, where ``known`` are the magnitudes of the tensors that were found finite."""
        largest = max((known.get(value, math.inf) for value in self.sources), default=0.0)
        return self.gain * largest + self.offset < _LIMIT  # False for NaN

    def scaled(self, factor: float) -> Magnitude:
        """Magnitude of the tensor times numbers of at most ``factor``; never below its own, as both must be finite."""
        factor = max(1.0, factor) if not math.isnan(factor) else math.inf
        return replace(self, gain=self.gain * factor, offset=self.offset * factor, cap=self.cap * factor)


def finite_proofs(graph: ir.Graph, watched: Collection[ir.Value]) -> dict[ir.Value, Magnitude]:
    """Bounds on ``watched`` tensors that follow from bounds of earlier tensors.

    Args:
        graph: in an order in which it can run.
        watched: tensors whose minima and maxima are taken in every run.
    """
    watched = frozenset(watched)
    found: dict[ir.Value, Magnitude | None] = {
        value: Magnitude(frozenset((value,)), 1.0) for value in graph.inputs if value in watched
    }
    proofs: dict[ir.Value, Magnitude] = {}
    for node in graph:
        made = _of_node(node, found)
        for value in node.outputs:
            proof = made if value.dtype == ir.DataType.FLOAT else None
            found[value] = proof
            if value in watched:
                found[value] = Magnitude(frozenset((value,)), 1.0, cap=math.inf if proof is None else proof.cap)
                if proof is not None:
                    proofs[value] = proof
    return proofs


def _of_node(node: ir.Node, found: dict[ir.Value, Magnitude | None]) -> Magnitude | None:
    rule = None if node.domain else _rule(node.op_type)
    if rule is None or any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values()):
        return None
    inputs = [value for value in node.inputs if value is not None and value.dtype in (None, ir.DataType.FLOAT)]
    given = [_of_value(value, found) for value in inputs]
    known = [magnitude for magnitude in given if magnitude is not None]
    made = rule(node, known) if known and len(known) == len(given) else None
    return made if made is not None and len(made.sources) <= _SOURCES else None


def _of_value(value: ir.Value, found: dict[ir.Value, Magnitude | None]) -> Magnitude | None:
    """Magnitude of a value or of a constant."""
    if value not in found:
        tensor = value.const_value
        found[value] = None if tensor is None else _of_constant(tensor)
    return found[value]


def _of_constant(tensor: ir.TensorProtocol) -> Magnitude | None:
    if tensor.dtype != ir.DataType.FLOAT or tensor.nbytes > _LARGE:
        return None
    array = tensor.numpy()
    ends = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)  # NaN where there is one
    let_go(tensor)
    largest = max(map(abs, ends))
    return Magnitude(frozenset(), 0.0, largest, largest) if all(map(math.isfinite, ends)) else None


def _join(magnitudes: Iterable[Magnitude]) -> Magnitude:
    several = list(magnitudes)
    return Magnitude(
        frozenset().union(*(m.sources for m in several)),
        max(m.gain for m in several),
        max(m.offset for m in several),
        max(m.cap for m in several),
    )


def _same(node: ir.Node, given: list[Magnitude]) -> Magnitude | None:
    if any(name in node.attributes for name in ("min", "max", "ceil_mode")):
        return None  # Clip of an old opset; an average over padding alone is none
    joined = _join(given)
    bounded = node.op_type == "Clip" and len(given) == 3 and not (given[1].sources or given[2].sources)
    return replace(joined, cap=max(given[1].cap, given[2].cap)) if bounded else joined


def _between(node: ir.Node, given: list[Magnitude]) -> Magnitude | None:
    joined = _join(given)
    return replace(joined, offset=max(joined.offset, 1.0), cap=1.0)


def _sum(node: ir.Node, given: list[Magnitude]) -> Magnitude | None:
    joined = _join(given)
    return Magnitude(
        joined.sources, sum(m.gain for m in given), sum(m.offset for m in given), sum(m.cap for m in given)
    )


def _product(node: ir.Node, given: list[Magnitude]) -> Magnitude | None:
    """Magnitude of the product of two tensors, one of known magnitude."""
    if len(given) != 2:
        return None
    factor, other = sorted(given, key=lambda m: m.cap)
    if not math.isfinite(factor.cap):
        return None
    return _join((other.scaled(factor.cap), replace(factor, cap=0.0)))


def _layer(node: ir.Node, given: list[Magnitude]) -> Magnitude | None:
    """Magnitude of the result of a convolution or matrix product with a constant."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if weight is None or weight.const_value is None or len(given) < 2 or given[1].sources:
        return None
    factors = (node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0))
    if max(map(abs, factors)) > 1:
        return None
    products = weight.const_value.size  # no output is a sum of more
    made = given[0].scaled(products * given[1].cap)
    return made if len(given) == 2 else _sum(node, [made, *given[2:]])


_RULES: dict[str, Callable[[ir.Node, list[Magnitude]], Magnitude | None]] = {
    **dict.fromkeys(_SAME, _same), **dict.fromkeys(_BETWEEN, _between), **dict.fromkeys(("Add", "Sub", "Sum"), _sum),
    **dict.fromkeys(TRAITS["layer"], _layer), "Mul": _product,
}  # fmt: skip


def _rule(op_type: str) -> Any:
    rule = _RULES.get(op_type)
    return _same if rule is None and op_row(op_type).kind == "movement" else rule
