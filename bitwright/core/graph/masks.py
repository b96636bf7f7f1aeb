"""Values that carry the mask of an attention: large negative constants on their way to a function that forgets them.

Most masks are recognised where they stand before a softmax (``placement``) and stay in float. Others take detours (added
before a scale, joined with a sink, clamped, answered by a sigmoid) and would reach a quantizer, whose range they would
ruin: between -10000 and 7, eight bits have steps of 39. Such a site is recognised by where its values go and by what
calibration saw there.
"""

from __future__ import annotations

import numpy as np

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import op_row
from bitwright.core.numerics.statistics import Histogram, MinMax, Statistics, bounds_of

WIDE = 1000.0
"""A range wider than this, before a softmax or a sigmoid, holds constants that are to vanish: ``exp(-WIDE)`` is 0."""

MASKED = "it carries mask constants to a softmax"

_FORGETS = frozenset(("Softmax", "Sigmoid", "Exp"))
_NEUTRAL = frozenset(("ReduceMax", "ArgMax"))  # read the largest values only; they tell nothing
_PASSES = frozenset(("Add", "Where", "MaskedFill", "Clip", "Min", "Max", "Mul", "Concat", "Stack", "LogSoftmax", "If"))
_FIRST = frozenset(("Sub", "Div"))  # pass on what they read at their first port


def mask_values(graph: Graph) -> set[str]:
    """The values that only ever reach functions to which a large negative number is nothing, in linear time.

    A value is one when it is not returned by the model and each of its readers is a softmax, a sigmoid or an exponential, or
    hands it on to values that are.
    """
    found: set[str] = set()
    for op in reversed(graph.ops):
        for value in op.outputs:
            if _forgotten(graph, value, found):
                found.add(value)
    found.update(v for v in graph.inputs if _forgotten(graph, v, found))
    return found


def _forgotten(graph: Graph, value: str, found: set[str]) -> bool:
    if graph.is_output(value) or not graph.values[value].is_float:
        return False
    telling = [(op, port) for op, port in graph.consumers(value) if op.type not in _NEUTRAL and not asks(graph, op)]
    return bool(telling) and all(_forgets(op, port, found) for op, port in telling)


def asks(graph: Graph, op: Op) -> bool:
    """Whether an operator answers with true and false, as the question does which rows of a mask are masked in full."""
    return bool(op.outputs) and all(graph.values[v].dtype == "bool" for v in op.outputs)


def _forgets(op: Op, port: int, found: set[str]) -> bool:
    if op.type in _FORGETS:
        return True
    row = op_row(op.type)
    passes = op.type in _PASSES or (row.kind == "movement" and port == 0) or (op.type in _FIRST and port == 0)
    return passes and bool(op.outputs) and found.issuperset(op.outputs)


def holds_mask(statistics: Statistics | None) -> bool:
    """Whether what was seen at such a value contains mask constants: ``-inf``, or numbers far below the others."""
    if not isinstance(statistics, MinMax | Histogram):
        return False
    bounds = bounds_of(statistics)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = (bounds.count > 0) & (bounds.hi - bounds.lo > WIDE)
    return bool(wide.any() or bounds.neg_inf_count.any())
