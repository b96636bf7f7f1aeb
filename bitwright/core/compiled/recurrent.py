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
    sums: Floats,
    scale: Floats,
    lo: Floats,
    hi: Floats,
    first: Floats,
    last: Floats,
) -> None:
    """:func:`lstm_gates`, and where its gradient passes: 1 where the sum lies between ``first`` and ``last``, else 0.

    ``sums`` takes the sums, each gate in a plane of its own, ``[4, B, H]``.
    """
    h = sums.shape[2]
    for row in range(x.shape[0]):
        for gate in range(4):
            start, end, total = gate * h, gate * h + h, sums[gate, row]
            given, added = x[row, start:end], recurrent[row, start:end]
            marks, low, high = passed[row, start:end], first[start:end], last[start:end]
            result, unit, least, most = out[row, start:end], scale[start:end], lo[start:end], hi[start:end]
            for j in range(h):
                total[j] = given[j] + added[j]
            for j in range(h):
                marks[j] = np.uint8(0) if (total[j] <= low[j]) | (total[j] >= high[j]) else np.uint8(1)
            for j in range(h):
                v = np.rint(total[j] / unit[j])
                v = least[j] if v < least[j] else v
                result[j] = (most[j] if v > most[j] else v) * unit[j]


def lstm_states_backward(
    grad_cell: Floats,
    gates: Floats,
    before: Floats,
    bent: Floats,
    grids: Floats,
    state_grids: Floats,
    on_grid: Floats,
    received: Floats,
    moved: Floats,
    passed_on: Floats,
) -> None:
    """The gradients of the states in a step, whose quantizers pass on what lies between the ends of their grid.

    The loops are of few arrays each, which become vector instructions: of many it is not proved that none overlap.

    Args:
        grad_cell: of the cell state, ``[B, H]``.
        gates: after their activation functions, off their grids.
        before: the last cell state.
        bent: the hyperbolic tangent of the cell state.
        grids: ``scale``, ``lo``, ``hi``, ``first``, ``last`` of the gates, ``[5, 4 H]``.
        state_grids: the same of cell state, hyperbolic tangent and hidden state, ``[3, 5]``.
        on_grid: takes gates and hyperbolic tangent on their grids, ``[5, B, H]``.
        received: the gradients of what quantizers return, ``[11, B, H]``: of gates before and after their activation functions
            (which :func:`lstm_gates_backward` finds), cell state, hyperbolic tangent and hidden state (the last is read).
        moved: takes what the quantizers of cell state and hidden state are given, ``[2, B, H]``.
        passed_on: takes the gradients of these two, ``[2, B, H]``.
    """
    h, one, none = before.shape[1], np.float32(1), np.float32(0)
    for row in range(before.shape[0]):
        a, old, tanh = gates[row], before[row], bent[row]
        i, f, o, g, t = on_grid[0, row], on_grid[1, row], on_grid[2, row], on_grid[3, row], on_grid[4, row]
        cell, hidden, dc, dh = moved[0, row], moved[1, row], passed_on[0, row], passed_on[1, row]
        to_cell, to_tanh, to_hidden, carried = (
            received[8, row],
            received[9, row],
            received[10, row],
            grad_cell[row],
        )
        for gate in range(4):
            values, result = a[gate * h :], on_grid[gate, row]
            scale, lo, hi = grids[0, gate * h :], grids[1, gate * h :], grids[2, gate * h :]
            for j in range(h):
                v = np.rint(values[j] / scale[j])
                v = lo[j] if v < lo[j] else v
                result[j] = (hi[j] if v > hi[j] else v) * scale[j]
        unit, least, most, first, last = state_grids[1]
        for j in range(h):
            v = np.rint(tanh[j] / unit)
            v = least if v < least else v
            t[j] = (most if v > most else v) * unit
        for j in range(h):
            y = o[j] * t[j]
            hidden[j] = y
            dh[j] = none if (y <= state_grids[2, 3]) | (y >= state_grids[2, 4]) else to_hidden[j]
        for j in range(h):
            to_tanh[j] = dh[j] * o[j]
        for j in range(h):
            v = none if (tanh[j] <= first) | (tanh[j] >= last) else to_tanh[j]
            to_cell[j] = carried[j] + v * (one - tanh[j] * tanh[j])
        for j in range(h):
            cell[j] = f[j] * old[j] + i[j] * g[j]
        first, last = state_grids[0, 3], state_grids[0, 4]
        for j in range(h):
            dc[j] = none if (cell[j] <= first) | (cell[j] >= last) else to_cell[j]


def lstm_gates_backward(
    gates: Floats,
    passed: Bytes,
    before: Floats,
    grids: Floats,
    on_grid: Floats,
    passed_on: Floats,
    received: Floats,
    grad_cell: Floats,
    out: Floats,
) -> None:
    """The gradients of the gates, of what :func:`lstm_states_backward` made of the states.

    Args:
        gates, before, grids, on_grid, received, passed_on: as there.
        passed: what :func:`lstm_gates_marked` says of the sums.
        grad_cell: takes the gradient of the last cell state.
        out: takes that of ``x`` and of ``recurrent``, ``[B, 4 H]``.
    """
    h, one, none = before.shape[1], np.float32(1), np.float32(0)
    for row in range(before.shape[0]):
        dc, dh, carried, f = passed_on[0, row], passed_on[1, row], grad_cell[row], on_grid[1, row]
        sources = (dc, on_grid[3, row]), (dc, before[row]), (dh, on_grid[4, row]), (dc, on_grid[0, row])
        for gate, (state, factor) in enumerate(sources):
            start, end = gate * h, gate * h + h
            values, marks, result = gates[row, start:end], passed[row, start:end], out[row, start:end]
            first, last = grids[3, start:end], grids[4, start:end]
            to_gate, to_sum = received[4 + gate, row], received[gate, row]
            for j in range(h):
                to_gate[j] = state[j] * factor[j]
            for j in range(h):
                y = values[j]
                v = none if (y <= first[j]) | (y >= last[j]) else to_gate[j]
                # of the sigmoid, and of the hyperbolic tangent
                to_sum[j] = v * (one - y) * y if gate < 3 else v * (one - y * y)
            for j in range(h):
                result[j] = to_sum[j] if marks[j] else none
        for j in range(h):
            carried[j] = dc[j] * f[j]


def range_by_column(
    grad: Floats,
    x: Floats,
    slope: Floats,
    outside: Floats,
    scale: np.float32,
    lo: np.float32,
    hi: np.float32,
    first: np.float32,
    last: np.float32,
) -> None:
    """Add to ``slope`` and ``outside``, ``[H]``, the gradients of a scale and of the lower end of its range, column by column.

    Args:
        grad, x: of what a quantizer returned, and what it was given, ``[B, H]``.
        scale, lo, hi: of its grid; what does not lie between ``first`` and ``last`` is clipped.
    """
    for row in range(x.shape[0]):
        given, values = grad[row], x[row]
        for j in range(slope.size):
            ratio = values[j] / scale
            v = np.rint(ratio)
            v = lo if v < lo else v
            v = hi if v > hi else v
            clipped = (values[j] <= first) | (values[j] >= last)
            slope[j] += given[j] * (v if clipped else v - ratio)
            outside[j] += given[j] if clipped else np.float32(0)


def lstm_next(gates: Floats, cells: Floats, before: int, after: int) -> None:
    """``cells[after]``, of ``[places, B, H]``, of ``cells[before]`` and the gates after their activation functions."""
    h = cells.shape[2]
    for row in range(cells.shape[1]):
        into, forget, new = gates[row, :h], gates[row, h : 2 * h], gates[row, 3 * h :]
        old, result = cells[before, row], cells[after, row]
        for j in range(h):
            result[j] = forget[j] * old[j] + into[j] * new[j]


def keys_by_column(bits: Bits, place: int, lo: Bits, hi: Bits) -> None:
    """Move least and largest keys of columns so far that they hold ``bits[place]``.

    The keys are those of :mod:`bitwright.core.compiled.counting`; ``bits`` are the float32 of ``[places, B, columns]``.
    """
    for row in range(bits.shape[1]):
        given = bits[place, row]
        for j in range(lo.size):
            key = np.int32(given[j] ^ ((given[j] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
            lo[j], hi[j] = min(lo[j], key), max(hi[j], key)
