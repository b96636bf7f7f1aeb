"""Loops in one pass over memory: quantize-dequantize and the functions in front of it, steps of an LSTM, searches for a range.

Where array functions read and write a tensor once for each of divide, round, clamp and multiply, and once more for the
activation in front, these read and write it once. Every operation is the float32 operation of
:mod:`bitwright.core.numerics.affine`, in its order, so the results are equal bit for bit. A NaN stays NaN: a comparison with
it is false.

What is done to a single number are functions of their own here, which become part of each loop; they stand in this file because
machine code is kept per file, and made anew when the file changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Float64s = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Bits = NDArray[np.int32]

BLOCK = 2048
"""Elements of a block, which stays in the first-level cache."""
LANES = 256
"""Sums that are taken side by side, in vector instructions."""

# ---- single numbers


def within(v: Any, lo: Any, hi: Any) -> Any:
    """``v`` clamped to ``lo`` to ``hi``; NaN stays NaN."""
    v = lo if v < lo else v
    return hi if v > hi else v


def code(x: Any, scale: Any, lo: Any, hi: Any) -> Any:
    """The code of ``x`` on a grid, counted from zero: ``clamp(round(x / scale), lo, hi)``."""
    return within(np.rint(x / scale), lo, hi)


def beyond(x: Any, first: Any, last: Any) -> Any:
    """Whether ``x <= first`` or ``x >= last``: the ends count as clipped, as in torch's gradients."""
    return (x <= first) | (x >= last)


def unless(clipped: Any, x: Any) -> Any:
    """``x``, or zero where it is clipped."""
    return np.float32(0) if clipped else x


def put_on_grid(x: Floats, scale: Floats, lo: Floats, hi: Floats, out: Floats) -> None:
    """Quantize-dequantize ``x`` into ``out``, each number with a scale of its own; minus zero stays."""
    for j in range(out.size):
        out[j] = code(x[j], scale[j], lo[j], hi[j]) * scale[j]


def by_scale(ratio: Any, clipped: Any, lo: Any, hi: Any) -> Any:
    """The derivative of ``code(x, scale, lo, hi) * scale`` by the scale, for ``ratio`` = ``x / scale``."""
    v = within(np.rint(ratio), lo, hi)
    return v if clipped else v - ratio


def add_lanes(grad: Floats, part: Floats, inner: Floats, slope: Floats, left: Floats) -> None:
    """Add ``grad * part`` to ``slope`` and ``grad - inner`` to ``left``, side by side."""
    for i in range(grad.size):
        slope[i] += grad[i] * part[i]
    for i in range(grad.size):
        left[i] += grad[i] - inner[i]


def through_activation(grad: Any, y: Any, gate: Any) -> Any:
    """The gradient of what a gate of an LSTM went through, of its result ``y``: hyperbolic tangent for gate 3, else sigmoid."""
    one = np.float32(1)
    return grad * (one - y) * y if gate < 3 else grad * (one - y * y)


# ---- elementwise: all arrays are 1-D and as long as ``x``; ``out`` may be ``x``. ``low`` and ``high`` are the ends of the
# activation (ReLU: zero and infinity), ``lo`` and ``hi`` those of the grid: ``qmin - zero_point``, ``qmax - zero_point``. Results
# are made in a block of their own and copied: a loop that writes over its input is not turned into vector instructions


def quantize_dequantize(x: Floats, out: Floats, scale: np.float32, lo: np.float32, hi: np.float32) -> None:
    """``out = clamp(round(x / scale), lo, hi) * scale``; minus zero becomes zero."""
    block = np.empty(BLOCK, np.float32)
    for first in range(0, x.size, BLOCK):
        values = x[first : first + BLOCK]
        result = out[first : first + BLOCK]
        for i in range(values.size):
            block[i] = code(values[i], scale, lo, hi) * scale + np.float32(0)
        for i in range(values.size):
            result[i] = block[i]


def clamp_quantize(
    x: Floats, out: Floats, low: np.float32, high: np.float32, scale: np.float32, lo: np.float32, hi: np.float32
) -> None:
    """:func:`quantize_dequantize` of ``clamp(x, low, high)``."""
    block = np.empty(BLOCK, np.float32)
    for first in range(0, x.size, BLOCK):
        values = x[first : first + BLOCK]
        result = out[first : first + BLOCK]
        for i in range(values.size):
            y = within(values[i], low, high)
            block[i] = code(y, scale, lo, hi) * scale + np.float32(0)
        for i in range(values.size):
            result[i] = block[i]


def add_quantize(x: Floats, other: Floats, out: Floats, scale: np.float32, lo: np.float32, hi: np.float32) -> None:
    """:func:`quantize_dequantize` of ``x + other``."""
    block = np.empty(BLOCK, np.float32)
    for first in range(0, x.size, BLOCK):
        values = x[first : first + BLOCK]
        added = other[first : first + BLOCK]
        result = out[first : first + BLOCK]
        for i in range(values.size):
            block[i] = code(values[i] + added[i], scale, lo, hi) * scale + np.float32(0)
        for i in range(values.size):
            result[i] = block[i]


def clamp_quantize_marked(
    x: Floats,
    out: Floats,
    passed: Bytes,
    low: np.float32,
    high: np.float32,
    scale: np.float32,
    lo: np.float32,
    hi: np.float32,
    first_value: np.float32,
    last_value: np.float32,
) -> None:
    """:func:`clamp_quantize`, and a mask of where its gradient passes.

    Args:
        passed: 1 where neither the activation nor the grid clips: ``x`` is beyond neither ``low`` nor ``high`` and the
            activation's result beyond neither ``first_value`` nor ``last_value``; else 0. Equality clips, as in torch.
        first_value, last_value: where the values begin and end that round to a code of the grid.
    """
    block = np.empty(BLOCK, np.float32)
    for first in range(0, x.size, BLOCK):
        values = x[first : first + BLOCK]
        marks = passed[first : first + BLOCK]
        result = out[first : first + BLOCK]
        for i in range(values.size):
            y = within(values[i], low, high)
            marks[i] = np.uint8(not (beyond(values[i], low, high) | beyond(y, first_value, last_value)))
            block[i] = code(y, scale, lo, hi) * scale + np.float32(0)
        for i in range(values.size):
            result[i] = block[i]


def add_quantize_marked(
    x: Floats,
    other: Floats,
    out: Floats,
    passed: Bytes,
    scale: np.float32,
    lo: np.float32,
    hi: np.float32,
    first_value: np.float32,
    last_value: np.float32,
) -> None:
    """:func:`add_quantize`, and a mask of where its gradient passes."""
    block = np.empty(BLOCK, np.float32)
    for first in range(0, x.size, BLOCK):
        values = x[first : first + BLOCK]
        added = other[first : first + BLOCK]
        marks = passed[first : first + BLOCK]
        result = out[first : first + BLOCK]
        for i in range(values.size):
            y = values[i] + added[i]
            marks[i] = np.uint8(not beyond(y, first_value, last_value))
            block[i] = code(y, scale, lo, hi) * scale + np.float32(0)
        for i in range(values.size):
            result[i] = block[i]


def quantize_rows(x: Floats, out: Floats, scale: Floats, lo: np.float32, hi: np.float32) -> None:
    """:func:`quantize_dequantize` of ``scale.size`` rows of equal length, one scale for each."""
    length = x.size // scale.size
    for row in range(scale.size):
        s = scale[row]
        for i in range(row * length, (row + 1) * length):
            out[i] = code(x[i], s, lo, hi) * s + np.float32(0)


def quantize_by_own_range(x: Floats, out: Floats, most: np.float32, least_scale: np.float32) -> None:
    """Quantize-dequantize on the grid of DynamicQuantizeLinear: codes 0 to ``most``, scale and zero point by ``x`` itself.

    Not a number in all places where one of ``x`` is.
    """
    zero, low, high, known = np.float32(0), np.float32(0), np.float32(0), True
    for i in range(x.size):
        v = x[i]
        low = v if v < low else low
        high = v if v > high else high
        known &= v == v
    if not known:
        high = np.float32(np.nan)
    scale = (high - low) / most
    scale = least_scale if scale < least_scale else scale
    point = np.rint(zero - low / scale)
    point = zero if point < zero else point
    point = most if point > most else point
    for i in range(x.size):
        number = np.rint(x[i] / scale) + point
        number = zero if number < zero else number
        number = most if number > most else number
        out[i] = (number - point) * scale


def pass_gradient(grad: Floats, passed: Bytes, out: Floats) -> None:
    """``out = grad`` where ``passed``, else zero."""
    for i in range(grad.size):
        out[i] = unless(not passed[i], grad[i])


def learned_gradient(
    grad: Floats,
    x: Floats,
    inner: Floats,
    sums: NDArray[np.float64],
    low: np.float32,
    high: np.float32,
    scale: np.float32,
    lo: np.float32,
    hi: np.float32,
    first_value: np.float32,
    last_value: np.float32,
) -> None:
    """Gradients of :func:`clamp_quantize` by ``x``, by the scale and by the lower end of the range.

    Args:
        inner: takes ``grad`` where neither the activation nor the grid clips, else zero; see :func:`clamp_quantize_marked`.
        sums: the sum of ``grad`` times the derivative by the scale is added to the first, what ``inner`` leaves out of ``grad``
            to the second. The derivative is ``round(y / scale) - y / scale`` of the activation's result ``y``, and the code at
            the end where the grid clips it. Sums are taken in as many lanes as :data:`LANES`.
    """
    part, slope, left = np.empty(LANES, np.float32), np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    for first in range(0, x.size, LANES):
        values, given, result = (x[first : first + LANES], grad[first : first + LANES], inner[first : first + LANES])
        for i in range(values.size):
            y = within(values[i], low, high)
            ratio, outside = y / scale, beyond(y, first_value, last_value)
            part[i] = by_scale(ratio, outside, lo, hi)
            result[i] = np.float32(0) if outside | beyond(values[i], low, high) else given[i]
        add_lanes(given, part, result, slope, left)
    for i in range(LANES):
        sums[0] += slope[i]
        sums[1] += left[i]


def learned_rows_gradient(
    grad: Floats, x: Floats, inner: Floats, sums: NDArray[np.float64], scale: Floats, lo: np.float32, hi: np.float32
) -> None:
    """:func:`learned_gradient` for ``scale.size`` rows of equal length, one scale and two sums for each, without an activation.

    Whether the grid clips is decided by ``x / scale``, as for scales per channel in torch.
    """
    length, part = x.size // scale.size, np.empty(LANES, np.float32)
    slope, left = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    first_code, last_code = lo - np.float32(0.5), hi + np.float32(0.5)
    for row in range(scale.size):
        s, end = scale[row], (row + 1) * length
        slope[:], left[:] = np.float32(0), np.float32(0)
        for first in range(row * length, end, LANES):
            last = min(first + LANES, end)
            values, given, result = x[first:last], grad[first:last], inner[first:last]
            for i in range(values.size):
                ratio = values[i] / s
                outside = beyond(ratio, first_code, last_code)
                part[i] = by_scale(ratio, outside, lo, hi)
                result[i] = np.float32(0) if outside else given[i]
            add_lanes(given, part, result, slope, left)
        for i in range(min(LANES, length)):
            sums[2 * row] += slope[i]
            sums[2 * row + 1] += left[i]


# ---- what a step of an LSTM, and its gradient, do between the activation functions. Sigmoid and hyperbolic tangent stay with
# the caller. The gates stand side by side in the order input, forget, output, candidate, ``[B, 4 H]``, each column with the grid
# of its gate: ``scale``, ``lo`` and ``hi`` have ``4 H`` numbers. Single numbers are the grid of the cell state, of its hyperbolic
# tangent and of the hidden state


def lstm_gates(x: Floats, recurrent: Floats, out: Floats, scale: Floats, lo: Floats, hi: Floats) -> None:
    """Quantized ``x + recurrent``: the gates before their activation functions."""
    for row in range(x.shape[0]):
        given, added, result = x[row], recurrent[row], out[row]
        for i in range(scale.size):
            result[i] = code(given[i] + added[i], scale[i], lo[i], hi[i]) * scale[i]


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
    """The next cell state ``[B, H]``, quantized, from the activated gates and the previous state."""
    h = before.shape[1]
    for row in range(before.shape[0]):
        into, forget, new = gates[row, :h], gates[row, h : 2 * h], gates[row, 3 * h :]
        old, result = before[row], out[row]
        for j in range(h):
            i = code(into[j], scale[j], lo[j], hi[j]) * scale[j]
            f = code(forget[j], scale[h + j], lo[h + j], hi[h + j]) * scale[h + j]
            g = code(new[j], scale[3 * h + j], lo[3 * h + j], hi[3 * h + j]) * scale[3 * h + j]
            c = code(f * old[j] + i * g, cell_scale, cell_lo, cell_hi)
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
    """The next hidden state ``[B, H]``, quantized, from the gates and ``bent``, the hyperbolic tangent of the cell state."""
    h = bent.shape[1]
    for row in range(bent.shape[0]):
        last, tanh, result = gates[row, 2 * h : 3 * h], bent[row], out[row]
        for j in range(h):
            o = code(last[j], scale[2 * h + j], lo[2 * h + j], hi[2 * h + j]) * scale[2 * h + j]
            t = code(tanh[j], bent_scale, bent_lo, bent_hi) * bent_scale
            result[j] = code(o * t, hidden_scale, hidden_lo, hidden_hi) * hidden_scale + np.float32(0)


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
                marks[j] = np.uint8(not beyond(total[j], low[j], high[j]))
            put_on_grid(total, unit, least, most, result)


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
    """Gradients of the states of one step; quantizers pass the gradient within the ends of their grid.

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
    h, one = before.shape[1], np.float32(1)
    for row in range(before.shape[0]):
        a, old, tanh = gates[row], before[row], bent[row]
        i, f, o, g, t = on_grid[0, row], on_grid[1, row], on_grid[2, row], on_grid[3, row], on_grid[4, row]
        cell, hidden, dc, dh = moved[0, row], moved[1, row], passed_on[0, row], passed_on[1, row]
        to_cell, to_tanh, to_hidden, carried = (received[8, row], received[9, row], received[10, row], grad_cell[row])
        for gate in range(4):
            values, result = a[gate * h :], on_grid[gate, row]
            scale, lo, hi = grids[0, gate * h :], grids[1, gate * h :], grids[2, gate * h :]
            put_on_grid(values, scale, lo, hi, result)
        unit, least, most, first, last = state_grids[1]
        for j in range(h):
            t[j] = code(tanh[j], unit, least, most) * unit
        for j in range(h):
            y = o[j] * t[j]
            hidden[j] = y
            dh[j] = unless(beyond(y, state_grids[2, 3], state_grids[2, 4]), to_hidden[j])
        for j in range(h):
            to_tanh[j] = dh[j] * o[j]
        for j in range(h):
            v = unless(beyond(tanh[j], first, last), to_tanh[j])
            to_cell[j] = carried[j] + v * (one - tanh[j] * tanh[j])
        for j in range(h):
            cell[j] = f[j] * old[j] + i[j] * g[j]
        first, last = state_grids[0, 3], state_grids[0, 4]
        for j in range(h):
            dc[j] = unless(beyond(cell[j], first, last), to_cell[j])


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
    """Gradients of the gates from those of :func:`lstm_states_backward`.

    Args:
        gates, before, grids, on_grid, received, passed_on: as there.
        passed: what :func:`lstm_gates_marked` says of the sums.
        grad_cell: takes the gradient of the last cell state.
        out: takes that of ``x`` and of ``recurrent``, ``[B, 4 H]``.
    """
    h = before.shape[1]
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
                v = unless(beyond(values[j], first[j], last[j]), to_gate[j])
                to_sum[j] = through_activation(v, values[j], gate)
            for j in range(h):
                result[j] = unless(not marks[j], to_sum[j])
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
            clipped = beyond(values[j], first, last)
            slope[j] += given[j] * by_scale(values[j] / scale, clipped, lo, hi)
            outside[j] += unless(not clipped, given[j])


def lstm_next(gates: Floats, cells: Floats, before: int, after: int) -> None:
    """Compute ``cells[after]``, of ``[places, B, H]``, from ``cells[before]`` and the activated gates."""
    h = cells.shape[2]
    for row in range(cells.shape[1]):
        into, forget, new = gates[row, :h], gates[row, h : 2 * h], gates[row, 3 * h :]
        old, result = cells[before, row], cells[after, row]
        for j in range(h):
            result[j] = forget[j] * old[j] + into[j] * new[j]


def keys_by_column(bits: Bits, place: int, lo: Bits, hi: Bits) -> None:
    """Extend the least and largest keys of columns to contain ``bits[place]``.

    The keys are those of :mod:`bitwright.core.compiled.counting`; ``bits`` are the float32 of ``[places, B, columns]``.
    """
    for row in range(bits.shape[1]):
        given = bits[place, row]
        for j in range(lo.size):
            key = np.int32(given[j] ^ ((given[j] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
            lo[j], hi[j] = min(lo[j], key), max(hi[j], key)


# ---- what every candidate grid of a range search does to the edges of a histogram's bins


def edge_errors(
    edges: Float64s, scale: Float64s, lowest: Float64s, highest: Float64s, cubes: Float64s, weight: float, out: Float64s
) -> None:
    """The antiderivative of the squared error at every edge, for every grid; every operation is the array function's.

    Args:
        edges: where bins end.
        scale, lowest, highest: of the grids, and their codes counted from zero.
        cubes: ``scale ** 3 / 12``.
        weight: of the third power of what lies beyond a grid.
        out: takes the errors, ``[grids, edges]``.
    """
    for i in range(scale.size):
        s, lo, hi, cube, result = scale[i], lowest[i], highest[i], cubes[i], out[i]
        for j in range(edges.size):
            nearest = code(edges[j], s, lo, hi)
            rest = edges[j] - nearest * s
            result[j] = nearest * cube + rest * rest * rest / 3.0
        if weight != 0.0:
            first, last = lo * s, hi * s
            for j in range(edges.size):
                rest = edges[j] - within(edges[j], first, last)
                result[j] += rest * rest * rest * weight


# ---- columns of a matrix after one another, each handing its error on


def round_block(
    block: Floats, codes: Floats, errors: Floats, scale: Floats, lo: Floats, hi: Floats, upper: Floats, diagonal: Floats
) -> None:
    """Round the columns of a block to their grids, each error taken out of the columns after it.

    Args:
        block: ``[columns, G, O]``; becomes the numbers on the grid.
        codes, errors: filled, the same shape; an error is what a column differs by over its ``diagonal``.
        scale, lo, hi: of every weight, the same shape.
        upper: what a unit of error in a column takes out of another, ``[columns, columns, G]``.
        diagonal: ``[columns, G]``.
    """
    count, matrices, outputs = block.shape
    for j in range(count):
        for g in range(matrices):
            column, found, error, whole = block[j, g], codes[j, g], errors[j, g], diagonal[j, g]
            for o in range(outputs):
                found[o] = code(column[o], scale[j, g, o], lo[j, g, o], hi[j, g, o])
                value = found[o] * scale[j, g, o]
                error[o] = (column[o] - value) / whole
                column[o] = value
        for k in range(j + 1, count):
            for g in range(matrices):
                later, error, share = block[k, g], errors[j, g], upper[j, k, g]
                for o in range(outputs):
                    later[o] -= share * error[o]
