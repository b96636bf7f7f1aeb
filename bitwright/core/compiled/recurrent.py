"""What a step of an LSTM, and its gradient, do between the activation functions, in one pass over memory each.

Sigmoid and hyperbolic tangent stay with the caller. The gates stand side by side in the order input, forget, output,
candidate, ``[B, 4 H]``, each column with the grid of its gate: ``scale``, ``lo`` and ``hi`` have ``4 H`` numbers. Single
numbers are the grid of the cell state, of its hyperbolic tangent and of the hidden state. Every operation is that of the
array functions, in their order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Bits = NDArray[np.int32]


def lstm_gates(x: Floats, recurrent: Floats, out: Floats, scale: Floats, lo: Floats, hi: Floats) -> None:
    """``x + recurrent`` on its grids: the gates before their activation functions."""
    for row in range(x.shape[0]):
        given, added, result = x[row], recurrent[row], out[row]
        for i in range(scale.size):
            v = np.rint((given[i] + added[i]) / scale[i])
            v = lo[i] if v < lo[i] else v
            v = hi[i] if v > hi[i] else v
            result[i] = v * scale[i]


def lstm_cell(
    gates: Floats,
    before: Floats,
    out: Floats,
    scale: Floats,
    lo: Floats,
    hi: Floats,
    cell_scale: np.float32,
    cell_lo: np.float32,
    cell_hi: np.float32,
) -> None:
    """The next cell state, ``[B, H]``, on its grid, of the gates after their activation functions and the last state."""
    h = before.shape[1]
    for row in range(before.shape[0]):
        into, forget, new = gates[row, :h], gates[row, h : 2 * h], gates[row, 3 * h :]
        old, result = before[row], out[row]
        for j in range(h):
            i = np.rint(into[j] / scale[j])
            i = lo[j] if i < lo[j] else i
            i = (hi[j] if i > hi[j] else i) * scale[j]
            f = np.rint(forget[j] / scale[h + j])
            f = lo[h + j] if f < lo[h + j] else f
            f = (hi[h + j] if f > hi[h + j] else f) * scale[h + j]
            g = np.rint(new[j] / scale[3 * h + j])
            g = lo[3 * h + j] if g < lo[3 * h + j] else g
            g = (hi[3 * h + j] if g > hi[3 * h + j] else g) * scale[3 * h + j]
            c = np.rint((f * old[j] + i * g) / cell_scale)
            c = cell_lo if c < cell_lo else c
            c = cell_hi if c > cell_hi else c
            result[j] = c * cell_scale + np.float32(0)


def lstm_hidden(
    gates: Floats,
    bent: Floats,
    out: Floats,
    scale: Floats,
    lo: Floats,
    hi: Floats,
    bent_scale: np.float32,
    bent_lo: np.float32,
    bent_hi: np.float32,
    hidden_scale: np.float32,
    hidden_lo: np.float32,
    hidden_hi: np.float32,
) -> None:
    """The next hidden state, ``[B, H]``, on its grid, of the gates and ``bent``, the hyperbolic tangent of the cell state."""
    h = bent.shape[1]
    for row in range(bent.shape[0]):
        last, tanh, result = gates[row, 2 * h : 3 * h], bent[row], out[row]
        for j in range(h):
            o = np.rint(last[j] / scale[2 * h + j])
            o = lo[2 * h + j] if o < lo[2 * h + j] else o
            o = (hi[2 * h + j] if o > hi[2 * h + j] else o) * scale[2 * h + j]
            t = np.rint(tanh[j] / bent_scale)
            t = bent_lo if t < bent_lo else t
            t = (bent_hi if t > bent_hi else t) * bent_scale
            v = np.rint(o * t / hidden_scale)
            v = hidden_lo if v < hidden_lo else v
            v = hidden_hi if v > hidden_hi else v
            result[j] = v * hidden_scale + np.float32(0)


def lstm_gates_marked(
    x: Floats,
    recurrent: Floats,
    out: Floats,
    passed: Bytes,
    scale: Floats,
    lo: Floats,
    hi: Floats,
    first: Floats,
    last: Floats,
) -> None:
    """:func:`lstm_gates`, and where its gradient passes: 1 where the sum lies between ``first`` and ``last``, else 0."""
    for row in range(x.shape[0]):
        given, added, result, marks = x[row], recurrent[row], out[row], passed[row]
        for i in range(scale.size):
            total = given[i] + added[i]
            marks[i] = np.uint8(0) if (total <= first[i]) | (total >= last[i]) else np.uint8(1)
            v = np.rint(total / scale[i])
            v = lo[i] if v < lo[i] else v
            v = hi[i] if v > hi[i] else v
            result[i] = v * scale[i]


def lstm_backward(
    grad: Floats,
    grad_hidden: Floats,
    grad_cell: Floats,
    gates: Floats,
    passed: Bytes,
    before: Floats,
    bent: Floats,
    out: Floats,
    grids: Floats,
    state_grids: Floats,
) -> None:
    """The gradients of a step, whose quantizers pass on what lies between the ends of their grid.

    Args:
        grad: of the hidden state as the layer returns it, ``[B, H]``.
        grad_hidden: of the hidden state as the next step reads it.
        grad_cell: of the cell state; that of the last cell state takes its place.
        gates, passed: after their activation functions, off their grids; and what :func:`lstm_gates_marked` says of them.
        before: the last cell state.
        bent: the hyperbolic tangent of the cell state.
        out: takes the gradient of ``x`` and of ``recurrent``, ``[B, 4 H]``.
        grids: ``scale``, ``lo``, ``hi``, ``first``, ``last`` of the gates, ``[5, 4 H]``.
        state_grids: the same of cell state, hyperbolic tangent and hidden state, ``[3, 5]``.
    """
    h, one, none = before.shape[1], np.float32(1), np.float32(0)
    scale, lo, hi, first, last = grids[0], grids[1], grids[2], grids[3], grids[4]
    bent_scale, bent_lo, bent_hi = state_grids[1, 0], state_grids[1, 1], state_grids[1, 2]
    for row in range(before.shape[0]):
        a, marks, old, tanh, result = gates[row], passed[row], before[row], bent[row], out[row]
        outer, inner, carried = grad[row], grad_hidden[row], grad_cell[row]
        for j in range(h):
            k, m, n = h + j, 2 * h + j, 3 * h + j
            i = np.rint(a[j] / scale[j])
            i = lo[j] if i < lo[j] else i
            i = (hi[j] if i > hi[j] else i) * scale[j]
            f = np.rint(a[k] / scale[k])
            f = lo[k] if f < lo[k] else f
            f = (hi[k] if f > hi[k] else f) * scale[k]
            o = np.rint(a[m] / scale[m])
            o = lo[m] if o < lo[m] else o
            o = (hi[m] if o > hi[m] else o) * scale[m]
            g = np.rint(a[n] / scale[n])
            g = lo[n] if g < lo[n] else g
            g = (hi[n] if g > hi[n] else g) * scale[n]
            t = np.rint(tanh[j] / bent_scale)
            t = bent_lo if t < bent_lo else t
            t = (bent_hi if t > bent_hi else t) * bent_scale
            y = o * t
            dh = none if (y <= state_grids[2, 3]) | (y >= state_grids[2, 4]) else outer[j] + inner[j]
            y = tanh[j]
            dt = none if (y <= state_grids[1, 3]) | (y >= state_grids[1, 4]) else dh * o
            y = f * old[j] + i * g
            dc = carried[j] + dt * (one - tanh[j] * tanh[j])
            dc = none if (y <= state_grids[0, 3]) | (y >= state_grids[0, 4]) else dc
            y = a[j]
            d = none if (y <= first[j]) | (y >= last[j]) else dc * g * (one - y) * y
            result[j] = d if marks[j] else none
            y = a[k]
            d = none if (y <= first[k]) | (y >= last[k]) else dc * old[j] * (one - y) * y
            result[k] = d if marks[k] else none
            y = a[m]
            d = none if (y <= first[m]) | (y >= last[m]) else dh * t * (one - y) * y
            result[m] = d if marks[m] else none
            y = a[n]
            d = none if (y <= first[n]) | (y >= last[n]) else dc * i * (one - y * y)
            result[n] = d if marks[n] else none
            carried[j] = dc * f


def lstm_sums(x: Floats, recurrent: Floats, out: Floats, place: int) -> None:
    """``x + recurrent``, each gate in a plane of its own: ``out[gate, place]``, of ``[4, places, B, H]``."""
    h = out.shape[3]
    for row in range(x.shape[0]):
        for gate in range(4):
            given, added = x[row, gate * h : (gate + 1) * h], recurrent[row, gate * h : (gate + 1) * h]
            result = out[gate, place, row]
            for j in range(h):
                result[j] = given[j] + added[j]


def lstm_next(gates: Floats, place: int, cells: Floats, before: int, after: int) -> None:
    """``cells[after]``, of ``[places, B, H]``, of ``cells[before]`` and ``gates[:, place]``, of ``[4, places, B, H]``."""
    for row in range(cells.shape[1]):
        into, forget, new = gates[0, place, row], gates[1, place, row], gates[3, place, row]
        old, result = cells[before, row], cells[after, row]
        for j in range(old.size):
            result[j] = forget[j] * old[j] + into[j] * new[j]


def keys_by_column(bits: Bits, place: int, lo: Bits, hi: Bits) -> None:
    """Move least and largest keys of columns, ``[planes, H]`` each, so far that they hold ``bits[:, place]``.

    The keys are those of :mod:`bitwright.core.compiled.counting`; ``bits`` are the float32 of ``[planes, places, B, H]``.
    """
    for plane in range(bits.shape[0]):
        low, high = lo[plane], hi[plane]
        for row in range(bits.shape[2]):
            given = bits[plane, place, row]
            for j in range(given.size):
                key = np.int32(given[j] ^ ((given[j] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
                low[j], high[j] = min(low[j], key), max(high[j], key)
