"""What a step of an LSTM does between its activation functions, in one pass over memory each.

Sigmoid and hyperbolic tangent stay with the caller. The gates stand side by side in the order input, forget, output,
candidate, ``[B, 4 H]``, each column with the grid of its gate: ``scale``, ``lo`` and ``hi`` have ``4 H`` numbers. Single
numbers are the grid of the cell state, of its hyperbolic tangent and of the hidden state. Every operation is that of the
array functions, in their order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


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
