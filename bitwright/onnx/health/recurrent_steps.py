"""Where inside a recurrent node a value first is not finite: the step, the direction and the gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitwright.core.graph.recurrence import CELLS, Context, step, variant_of

Array = NDArray[Any]

_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "Sigmoid": lambda x: 1 / (1 + np.exp(-np.clip(x, -88, 88))),
    "Tanh": np.tanh,
    "Relu": lambda x: np.maximum(x, 0),
    "Softsign": lambda x: x / (1 + abs(x)),
    "Softplus": lambda x: np.logaddexp(x, 0),
}


class Inside(NamedTuple):
    """The first tensor inside the steps of a recurrent node that is not finite.

    Attributes:
        step: number of the time step, in the order of the data.
        direction: ``forward`` or ``reverse``.
        name: ``candidate.pre``, ``cell``, ``hidden``: see :data:`bitwright.core.graph.recurrence.CELLS`.
        sample: row of the batch.
    """

    step: int
    direction: str
    name: str
    sample: int

    def __str__(self) -> str:
        backwards = " of the reverse direction" if self.direction == "reverse" else ""
        return f"first in {self.name!r} at step {self.step}{backwards}"


@dataclass
class _Context(Context):
    """Computes a step in float32 and notes the first inner tensor that is not finite."""

    weights: Array
    bias: Array
    functions: Sequence[Callable[[Array], Array]]
    limit: float
    rows: dict[str, slice]
    bad: list[tuple[str, int]] = field(default_factory=list)

    def quantize(self, name: str, x: Array) -> Array:
        if not np.isfinite(x).all():
            self.bad.append((name, int((~np.isfinite(x)).any(-1).argmax())))
        return x

    def activate(self, index: int, x: Array) -> Array:
        return self.functions[index](x)

    def clip(self, x: Array) -> Array:
        return np.clip(x, -self.limit, self.limit)

    def recur(self, h: Array, gates: Sequence[str]) -> list[Array]:
        return [h @ self.weights[self.rows[g]].T + self.bias[self.rows[g]] for g in gates]


def first_bad_step(op_type: str, attrs: Mapping[str, Any], operands: Sequence[Array | None]) -> Inside | None:
    """Compute an RNN, GRU or LSTM step by step until something is not finite.

    Args:
        op_type, attrs: of the ONNX node.
        operands: in port order: X ``[steps, batch, inputs]`` (``[batch, steps, inputs]`` with ``layout=1``), W, R, B,
            sequence_lens, initial_h, initial_c, P; ``None`` for what is not connected.

    Returns:
        The place; ``None`` where every step is finite in float32, or an activation function is not known here.
    """
    names = [str(name) for name in attrs.get("activations") or CELLS[op_type].activations * 2]
    if not _FUNCTIONS.keys() >= set(names):
        return None
    given = [None if x is None else np.asarray(x, np.float32) for x in (*operands, *[None] * 8)]
    x = given[0]
    assert x is not None and given[1] is not None
    x = x.swapaxes(0, 1) if attrs.get("layout") else x
    with np.errstate(all="ignore"):
        for d in range(given[1].shape[0]):
            inside = _direction(op_type, attrs, x, given, d, names)
            if inside is not None:
                return inside
    return None


def _direction(
    op_type: str, attrs: Mapping[str, Any], x: Array, given: Sequence[Array | None], d: int, names: list[str]
) -> Inside | None:
    order, direction = range(len(x)), "forward"
    if d == 1 or attrs.get("direction") == "reverse":
        order, direction = order[::-1], "reverse"
    gates, per = CELLS[op_type].gates, len(CELLS[op_type].activations)
    w, r, b, h, c, p = (given[port] for port in (1, 2, 3, 5, 6, 7))
    assert w is not None and r is not None
    hidden, batch = r.shape[-1], x.shape[1]
    rows = {gate: slice(i * hidden, (i + 1) * hidden) for i, gate in enumerate(gates)}
    both = np.zeros(2 * len(gates) * hidden, np.float32) if b is None else b[d]
    limit = float(attrs.get("clip") or np.inf)
    functions = [_FUNCTIONS[name] for name in names[d * per : (d + 1) * per]]
    context = _Context(r[d], both[len(both) // 2 :], functions, limit, rows)
    start = np.zeros((batch, hidden), np.float32)
    axis = 1 if attrs.get("layout") else 0
    state = [start if s is None else np.take(s, d, axis) for s in (h, c)][: 2 if op_type == "LSTM" else 1]
    peepholes = {} if p is None else dict(zip(("input", "output", "forget"), np.split(p[d], 3), strict=True))
    for t in order:
        pre = {g: x[t] @ w[d][rows[g]].T + both[rows[g]] for g in gates}
        state = list(step(op_type, context, pre, state, variant_of(attrs), peepholes))
        if context.bad:
            return Inside(t, direction, *context.bad[0])
    return None
