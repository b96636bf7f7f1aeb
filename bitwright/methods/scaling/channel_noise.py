"""Per-channel factors that minimise the rounding noise of a model whose tensors have one scale each.

One scale per tensor follows the largest channel; the others are rounded more coarsely than they need. Dividing channel
``c`` of a group by ``s[c]`` moves ranges between two weights and the activation between them, and each of the three
prefers another ``s``. The total noise is a sum of products of powers of the factors, times squares of largest values:
convex in ``log s``, so descent finds the best factors for all groups of a model at once. Rounding to a step ``d`` adds an
error of variance ``d**2 / 12``, independent from value to value.

Equalization of weights alone (Nagel et al. 2019, arXiv:1906.04721, section 4.1) looks at the weights' ranges only and
may leave activations with ranges that differ more than before. The range of an activation channel is known from the mean
and deviation of a batch norm, without data, or else measured on data.

A ReLU6 between two equalized layers would have to clip each channel at its own bound, ``6 / s[c]``. No integer kernel does
that, while one bound for all channels is the end of the output's grid. Factors of at most 1 keep the function: a channel
grows until it fills the common range, what was clipped at 6 is clipped as before where ``s[c]`` is 1, and a channel that
never reached its bound does not reach it afterwards either (:func:`bounds_of_factors`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bitwright.core.graph.attention import sole_reader
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS
from bitwright.core.simulation.float_model import FloatModel
from bitwright.errors import ConfigError
from bitwright.methods.bias_correction import Moments, moments_behind
from bitwright.methods.layers import Array, Bar, Group, Layer, bounds_of, no_bar
from bitwright.methods.scaling.smooth import check_finite, observe, observe_arrays

#: largest values are smoothed to ``log(sum(x**SHARPNESS)) / SHARPNESS``, so that descent has a gradient
SHARPNESS = 48
#: product of a step and the change of the gradient over it below which they tell nothing of the curvature
_LEAST_PRODUCT = 1e-12
#: how much of an error of the mean counts: bias correction takes most of it out again, where it is done
MEAN_COUNTS = 0.25
#: squared steps over squared largest values, 8 bits: weights symmetric, activations from zero; and the variance of an error
_WEIGHT, _ACTIVATION = 1 / (12 * 127**2), 1 / (12 * 255**2)
MAX_ROUNDS = 400
#: rounds after which the curvature is asked again
_REFRESH = 5
#: difference of the noise's logarithm over ten rounds that ends a search within bounds: 0.04 dB
_CLOSE = 1e-2
#: a sharpness at which the largest value is exact
_EXACT = 1e6
#: variances, and sums of products of them, below which a channel counts as constant
_SMALL, _TINY = 1e-12, 1e-30
#: a sum of powers below which those that fell below the smallest float64 could matter
_FAINT = 1e-100
#: a power of e below which an entry adds nothing to a sum that is at least 1
_NEGLIGIBLE = 40.0
#: elements of a weight that are read at once, which the first-level cache holds
_CHUNK = 16384
#: entries of a grid up to which a list of them is faster than products of its matrix
_FEW = 2048
_LINEAR_IN_PARTS = (*TRAITS["piecewise_linear"], *TRAITS["identity"])


# ---------------------------------------------------------------------------------------------- arithmetic


@dataclass(frozen=True)
class Grid:
    """A tensor with one scale under factors of its rows and columns, and the cost of its rounding.

    Entry ``(g, o, i)`` becomes ``W[g, o, i] * s[columns[g, i]] / s[rows[g, o]]``. Its rounding error counts, in units of
    the tensor before any factor, ``later[g, o] * before[g, i]`` times its square.

    Attributes:
        magnitude: log of ``|W|``, the largest over the kernel; -inf for zeros; [G, O, I] float32.
        rows, columns: which factor, [G, O] and [G, I] int64.
        later, before: float64, [G, O] and [G, I].
        step: variance of the rounding error over the squared largest magnitude.
    """

    magnitude: Array
    rows: Array
    columns: Array
    later: Array
    before: Array
    step: float


def rounding_noise(grids: Sequence[Grid], log_factors: Array, sharpness: float = SHARPNESS) -> tuple[float, Array]:
    """Total rounding noise of all tensors and its gradient; :class:`RoundingNoise` at one point."""
    return RoundingNoise(grids, len(log_factors), sharpness)(log_factors)


class RoundingNoise:
    """Total rounding noise of all tensors as a function of the factors.

    Rows of a grid that have one factor are summed once, and columns likewise: of a layer that ends its groups one number per
    channel is left. Grids that are small then are evaluated together, as one list of entries.

    Args:
        grids: at least one entry of each is not zero.
        size: K, how many factors there are.
        sharpness: of the smoothed largest magnitude, which is at most ``size ** (1 / sharpness)`` times the true one.
    """

    def __init__(self, grids: Sequence[Grid], size: int, sharpness: float = SHARPNESS) -> None:
        self._size, self._sharpness = size, sharpness
        grids = [_narrowed(grid, sharpness) for grid in grids]
        self._steps = np.array([grid.step for grid in grids])
        self._rows = _Slots([grid.rows for grid in grids], [grid.later for grid in grids])
        self._columns = _Slots([grid.columns for grid in grids], [grid.before for grid in grids])
        self._of_group = np.repeat(np.arange(len(grids)), [len(grid.rows) for grid in grids])
        self._large: list[tuple[int, Grid, _SmoothLargest]] = []
        listed: list[int] = []
        found = [(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))]
        for i, grid in enumerate(grids):
            if grid.magnitude.size > max(_FEW, *grid.magnitude.shape):
                self._large.append((i, grid, _SmoothLargest(grid.magnitude, sharpness)))
                continue
            group, row, column = np.nonzero(np.isfinite(grid.magnitude))
            numbers = grid.magnitude[group, row, column].astype(np.float64)
            found.append((numbers, grid.rows[group, row], grid.columns[group, column]))
            listed.append(i)
        counts = [len(numbers) for numbers, _, _ in found[1:]]
        self._listed, self._of_entry = np.array(listed, np.int64), np.repeat(np.arange(len(listed)), counts)
        self._starts = np.cumsum([0, *counts])[:-1]
        self._entries, self._entry_rows, self._entry_columns = (
            np.concatenate(part) for part in zip(*found, strict=True)
        )

    def __call__(self, log_factors: Array) -> tuple[float, Array]:
        """The noise at ``log_factors``, shape [K], and its gradient there.

        Returns:
            ``step * max(|W| s_i / s_o)**2 * sum(behind_o s_o**2 * before_i / s_i**2)`` summed over the grids; and the
            gradient by ``log_factors``, shape [K]. The logarithm of the sum is convex.
        """
        (by_row, by_column), noise, shares = self._parts(log_factors)
        slopes = by_row - by_column
        for grids, at, of_factor, sign in shares:
            slopes += np.bincount(at, sign * of_factor * noise[grids], self._size)
        return float(noise.sum()), 2 * slopes

    def curvature(self, log_factors: Array) -> Array:
        """About the second derivative of the noise's logarithm by each log factor alone, shape [K], positive.

        Products of first derivatives are left out, so that what is left is a sum of positive parts.
        """
        (by_row, by_column), noise, shares = self._parts(log_factors)
        found: Array = 4 * (by_row + by_column)
        for grids, at, share, _ in shares:
            bent = share * (2 * self._sharpness * (1 - share) + 4 * share)
            found += np.bincount(at, bent * noise[grids], self._size)
        found += 1e-3 * found.mean() + _TINY
        return found / float(noise.sum())

    def _parts(self, log_factors: Array) -> tuple[tuple[Array, Array], Array, list[tuple[Any, Array, Array, int]]]:
        """Cost weights of rows and columns by factor, noise of every grid, shares of factors in the largest entries."""
        rows, columns, of_group = self._rows, self._columns, self._of_group
        squared = np.exp(2 * log_factors)
        later, before = rows.costs * squared.take(rows.factors), columns.costs / squared.take(columns.factors)
        later_sums, before_sums = np.add.reduceat(later, rows.begins), np.add.reduceat(before, columns.begins)
        largest, shares = self._largest(log_factors)
        squares = self._steps * np.exp(2 * largest)
        noise = squares * np.bincount(of_group, later_sums * before_sums, len(squares))
        squares = squares.take(of_group)
        by_row = np.bincount(rows.factors, later * (squares * before_sums).take(rows.groups), self._size)
        by_column = np.bincount(columns.factors, before * (squares * later_sums).take(columns.groups), self._size)
        return (by_row, by_column), noise, shares

    def _largest(self, log_factors: Array) -> tuple[Array, list[tuple[Any, Array, Array, int]]]:
        """Log of the smoothed largest entry of every grid; and the shares of factors in them: grid, factor, share, sign."""
        largest = np.empty(len(self._steps))
        shares: list[tuple[Any, Array, Array, int]] = []
        if len(self._listed):
            entries = self._entries + log_factors.take(self._entry_columns)
            entries -= log_factors.take(self._entry_rows)
            tops = np.maximum.reduceat(entries, self._starts)
            entries -= tops.take(self._of_entry)
            near = np.flatnonzero(entries > -_NEGLIGIBLE / self._sharpness)
            powers, grids = np.exp(self._sharpness * entries.take(near)), self._of_entry.take(near)
            totals = np.bincount(grids, powers, len(tops))
            powers /= totals.take(grids)
            largest[self._listed] = tops + np.log(totals) / self._sharpness
            grids = self._listed.take(grids)
            shares.append((grids, self._entry_rows.take(near), powers, -1))
            shares.append((grids, self._entry_columns.take(near), powers, 1))
        for i, grid, smooth in self._large:
            largest[i], by_row, by_column = smooth.at(log_factors[grid.rows], log_factors[grid.columns])
            shares.append((i, grid.rows.reshape(-1), by_row.reshape(-1), -1))
            shares.append((i, grid.columns.reshape(-1), by_column.reshape(-1), 1))
        return largest, shares


class _Slots:
    """The rows, or the columns, of all grids concatenated.

    Attributes:
        factors: which factor.
        costs: how much an error counts there.
        groups: of which group of which grid, counted through all grids.
        begins: place of the first of each group.
    """

    def __init__(self, factors: Sequence[Array], costs: Sequence[Array]) -> None:
        self.factors = np.concatenate([found.reshape(-1) for found in factors])
        self.costs = np.concatenate([found.reshape(-1) for found in costs])
        lengths = [found.shape[1] for found in factors for _ in range(len(found))]
        self.groups = np.repeat(np.arange(len(lengths)), lengths)
        self.begins = np.cumsum([0, *lengths])[:-1]


def _narrowed(grid: Grid, sharpness: float) -> Grid:
    """The same costs with rows, and columns, merged where they share a factor."""
    magnitude, rows, columns, later, before = grid.magnitude, grid.rows, grid.columns, grid.later, grid.before
    if rows.shape[1] > 1 and (rows == rows[:, :1]).all():
        magnitude, rows, later = _joined(magnitude, 1, sharpness), rows[:, :1], later.sum(axis=1, keepdims=True)
    if columns.shape[1] > 1 and (columns == columns[:, :1]).all():
        magnitude, columns, before = _joined(magnitude, 2, sharpness), columns[:, :1], before.sum(axis=1, keepdims=True)
    return Grid(magnitude, rows, columns, later, before, grid.step)


def _joined(magnitude: Array, axis: int, sharpness: float) -> Array:
    """Smoothed largest of logs over an axis, which stays with length 1; -inf where all are."""
    top = magnitude.max(axis=axis, keepdims=True)
    if sharpness >= _EXACT:
        return top
    top[np.isneginf(top)] = 0.0
    powers = magnitude - top  # in float32 as they are: close ones, which count, differ exactly
    powers *= magnitude.dtype.type(sharpness)
    with np.errstate(divide="ignore"):
        found: Array = np.log(np.exp(powers, out=powers).sum(axis=axis, keepdims=True, dtype=np.float64))
    return top + found / sharpness


class _SmoothLargest:
    """The smoothed largest entry of a matrix under factors of its rows and columns.

    ``sum_oi (|W_oi| s_i / s_o) ** k`` is a product of a matrix of powers and two vectors. The powers are kept relative to
    the factors of one point, so that they fit float64, and taken anew when another point makes all of them small.
    """

    def __init__(self, magnitude: Array, sharpness: float) -> None:
        self._magnitude, self._sharpness = magnitude, sharpness
        self._powers: Array | None = None

    def at(self, out: Array, into: Array) -> tuple[float, Array, Array]:
        """Log of the smoothed largest entry, and the share of every row and column in it."""
        if self._powers is None:
            self._refer_to(out, into)
        found = self._product(out, into)
        if found is None:
            self._refer_to(out, into)
            found = self._product(out, into)
        assert found is not None  # at the point of reference the largest power is 1
        return found

    def _refer_to(self, out: Array, into: Array) -> None:
        powers = self._magnitude + into[:, None, :]
        powers -= out[:, :, None]
        self._top = float(powers.max())
        powers -= self._top
        powers *= self._sharpness
        self._powers = np.exp(powers, out=powers)
        self._out, self._into = out, into

    def _product(self, out: Array, into: Array) -> tuple[float, Array, Array] | None:
        """The product; ``None`` where the stored powers underflow."""
        assert self._powers is not None
        up, right = self._out - out, into - self._into
        most = float(up.max()), float(right.max())
        a, b = np.exp(self._sharpness * (up - most[0])), np.exp(self._sharpness * (right - most[1]))
        by_row = a * np.einsum("goi,gi->go", self._powers, b)
        total = float(by_row.sum())
        if total < _FAINT:
            return None
        by_column = b * np.einsum("goi,go->gi", self._powers, a)
        return self._top + sum(most) + np.log(total) / self._sharpness, by_row / total, by_column / total


def descend(
    function: Callable[[Array], tuple[float, Array]],
    start: Array,
    *,
    curvature: Callable[[Array], Array] | None = None,
    bounds: tuple[Array, Array] | None = None,
    tolerance: float = 1e-4,
    memory: int = 10,
    bar: Bar = no_bar,
) -> tuple[Array, int]:
    """Minimise a smooth convex function by L-BFGS, within bounds.

    Args:
        function: value and gradient at a point.
        start: shape [K]; taken to the nearest point within the bounds.
        curvature: about the second derivative by each coordinate alone at a point, positive; asked every few rounds. Fewer
            rounds are needed with it where coordinates differ and none is at a bound.
        bounds: least and greatest value of each coordinate, both of shape [K]; none by default. A coordinate at its bound stays
            there while the gradient points outwards, and steps end at the bounds.
        tolerance: ends when ten rounds lowered the value by less.
        memory: pairs of steps and changes of the gradient that are kept.
        bar: shows the rounds.

    Returns:
        The best point, shape [K], and the number of rounds.

    References: Nocedal 1980, Updating quasi-Newton matrices with limited storage; Bertsekas 1982, Projected Newton methods for
    optimization problems with simple constraints.
    """
    least, most = (-np.inf, np.inf) if bounds is None else bounds
    x = np.clip(start, least, most)
    value, gradient = function(x)
    pairs: list[tuple[Array, Array]] = []
    values = [value]
    scale: Array | float = 1.0
    for i in bar(iter(range(MAX_ROUNDS)), "equalize: rounds"):
        if len(values) > 10 and values[-11] - values[-1] < tolerance:
            break
        if curvature is not None and i % _REFRESH == 0:
            scale = 1 / curvature(x)
        moving = np.where(gradient > 0, x > least, x < most)
        direction = _direction(gradient * moving, [(s * moving, c * moving) for s, c in pairs], scale)
        found = _line_search(function, x, value, gradient, direction, (least, most))
        if found is None:
            break
        point, value, slope = found
        step, change = point - x, slope - gradient
        pairs = [*pairs, (step, change)][-memory:]
        x, gradient = point, slope
        values.append(value)
    return x, len(values) - 1


def _direction(gradient: Array, pairs: Sequence[tuple[Array, Array]], scale: Array | float) -> Array:
    """The search direction: the negative gradient times the approximate inverse Hessian, clipped to 2.

    Args:
        gradient: at the point.
        pairs: steps, and the changes of the gradient over them.
        scale: to begin with, an inverse Hessian that is diagonal, up to a factor that the last pair says.
    """
    q, weights = gradient.copy(), []
    pairs = [(step, change) for step, change in pairs if _dot(step, change) > _LEAST_PRODUCT]
    for step, change in reversed(pairs):
        weights.append(_dot(step, q) / _dot(step, change))
        q -= weights[-1] * change
    if pairs:
        step, change = pairs[-1]
        q *= scale * (_dot(step, change) / _dot(change * scale, change))
    elif isinstance(scale, np.ndarray):
        q *= scale
    else:
        q /= max(float(np.abs(q).max(initial=0.0)), 1e-12)
    for (step, change), weight in zip(pairs, reversed(weights), strict=True):
        q += step * (weight - _dot(change, q) / _dot(step, change))
    result: Array = -q * min(1.0, 2 / max(float(np.abs(q).max(initial=0.0)), 1e-12))
    return result


def _dot(a: Array, b: Array) -> float:
    """Scalar product without BLAS, whose threads are slower here and change the sum."""
    return float(np.einsum("k,k->", a, b))


def _line_search(
    function: Callable[[Array], tuple[float, Array]],
    x: Array,
    value: float,
    gradient: Array,
    direction: Array,
    bounds: tuple[Array | float, Array | float],
) -> tuple[Array, float, Array] | None:
    """The first of halved steps, cut at the bounds, that lowers the value enough (Armijo); ``None`` when none does."""
    for halvings in range(20):
        point = np.clip(x + 0.5**halvings * direction, *bounds)
        there, its_gradient = function(point)
        slope = _dot(gradient, point - x)
        if there <= value + 1e-4 * slope and slope < 0:
            return point, there, its_gradient
    return None


# ------------------------------------------------------------------------------------------- what is known


@dataclass(frozen=True)
class Channels:
    """The values of a group after its activation, per channel, shape [C].

    Attributes:
        mean, variance: of the values.
        largest: magnitude that hardly any value exceeds: three deviations from the mean, cut by the activation.
        passed: share of the values whose error the activation passes on.
    """

    mean: Array
    variance: Array
    largest: Array
    passed: Array


def channels_of(graph: Graph, group: Group, moments: Moments) -> Channels | None:
    """The values of a group, from the moments of its producer's output; ``None`` where they are not known.

    Args:
        graph: of the model.
        group: of layers that share channels.
        moments: layer -> mean and standard deviation of its output, before the activation.
    """
    if len(group.producers) > 1 or group.producers[0].op not in moments:
        return None
    layer = group.producers[0]
    mean, std = (np.asarray(values, np.float64) for values in moments[layer.op])
    if mean.shape != (group.channels,) or not (np.isfinite(mean).all() and np.isfinite(std).all()):
        return None
    std = np.abs(std)
    small, none = 1e-3 * np.maximum(std, 1e-6), np.zeros_like(std)
    points = [(mean, std), (mean + small, std), (mean - small, std), (mean + 3 * std, none), (mean - 3 * std, none)]
    (m, s), above, below, high, low = (_behind_activation(graph, layer, *point) for point in points)
    largest = np.maximum(np.abs(high[0]), np.abs(low[0]))
    # an error is handed on where the slope is 1: the derivative of the mean after by the mean before
    return Channels(m, s**2, largest, np.clip((above[0] - below[0]) / (2 * small), 0.0, 1.0))


def measured_moments(
    view: FloatModel, groups: Sequence[Group], batches: Iterable[Any]
) -> dict[str, tuple[Array, Array]]:
    """Mean and standard deviation of the outputs of groups' producers, before the activation.

    Args:
        view: the model.
        groups: of one producer each.
        batches: run one by one, each once.

    Returns:
        Layer -> mean and standard deviation, float64, shape [channels].

    Raises:
        CalibrationError: no batch, or a value that is NaN or infinite.
    """
    layers = {group.producers[0].output: group.producers[0] for group in groups}
    sums: dict[str, Array] = {value: np.zeros((3, layer.axes.outputs)) for value, layer in layers.items()}

    def note(value: str, rows: Array) -> None:
        x = rows.astype(np.float64)
        sums[value] += np.stack([np.full(x.shape[1], len(x)), x.sum(axis=0), np.square(x).sum(axis=0)])

    observe(view, {value: layer.channel_axis for value, layer in layers.items()}, batches, note, "equalize")
    found = {}
    for value, (count, total, squares) in sums.items():
        mean = total / np.maximum(count, 1)
        variance = squares / np.maximum(count, 1) - mean**2
        found[layers[value].op] = (mean, np.sqrt(np.maximum(variance, 0.0)))
    return found


def _behind_activation(graph: Graph, layer: Layer, mean: Array, std: Array) -> tuple[Array, Array]:
    value, known = layer.output, {layer.output: (mean, std)}
    while (op := sole_reader(graph, value)) is not None and op.type in _LINEAR_IN_PARTS:
        passed = moments_behind(op, known)
        if passed is None:
            break
        value = op.outputs[0]
        known[value] = passed
    return known[value]


# ------------------------------------------------------------------------------------------ the best factors


def quietest_factors(
    groups: Sequence[Group],
    weights: Mapping[str, Array],
    channels: Sequence[Channels | None],
    moments: Moments,
    fixed: Sequence[Array],
    bounds: Sequence[Bounds],
    weight_noise: float = 1.0,
    bar: Bar = no_bar,
) -> tuple[list[Array], int, tuple[float, float]]:
    """Factors that minimise the rounding noise of weights and activations, within bounds.

    Args:
        groups: in execution order.
        weights: of their layers, by name.
        channels: per group what its values are; a group without stays at ``fixed``.
        moments: layer -> mean and standard deviation of its output.
        fixed: per group the factors to begin with, positive and within ``bounds``, shape [channels].
        bounds: per group those of its factors.
        weight_noise: as for :func:`grids_of`.
        bar: shows the rounds.

    Returns:
        Per group the factors that its channels are divided by, without bounds scaled such that the largest value of the
        activation stays what it is; the number of rounds; and the noise before any factor and with them: per tensor the power of
        its rounding over that of the signal, at 8 bits, summed over the tensors.
    """
    grids = grids_of(groups, weights, channels, moments, weight_noise)
    if not grids:
        return list(fixed), 0, (0.0, 0.0)
    free = [np.full(g.channels, known is not None) for g, known in zip(groups, channels, strict=True)]
    movable = np.append(np.concatenate(free), False)  # the last factor stands for "none"

    noise = RoundingNoise(grids, len(movable))

    def logarithm(x: Array) -> tuple[float, Array]:
        value, gradient = noise(x)
        return float(np.log(value)), np.where(movable, gradient / value, 0.0)

    start = np.append(np.log(np.concatenate(list(fixed))), 0.0)
    with np.errstate(divide="ignore"):
        least, most = (np.append(np.log(np.concatenate(ends)), 0.0) for ends in zip(*bounds, strict=True))
    if np.isfinite(most[:-1]).any():
        found, rounds = descend(logarithm, start, bounds=(least, most), tolerance=_CLOSE, bar=bar)
    else:
        found, rounds = descend(logarithm, start, curvature=noise.curvature, bar=bar)
    exact = RoundingNoise(grids, len(movable), _EXACT)
    before, after = (exact(x)[0] for x in (np.zeros_like(found), found))
    logs = np.split(found[:-1], np.cumsum([group.channels for group in groups])[:-1])
    back = [
        0.0 if np.isfinite(end).all() else _back(s, known)
        for s, known, (_, end) in zip(logs, channels, bounds, strict=True)
    ]
    return [np.exp(s + by) for s, by in zip(logs, back, strict=True)], rounds, (before, after)


def _back(log_factors: Array, known: Channels | None) -> float:
    """The factor that restores the largest value of an activation."""
    if known is None or not known.largest.any():
        return 0.0
    alive = known.largest > 0
    values = np.log(known.largest[alive])
    return float((values - log_factors[alive]).max() - values.max())


def grids_of(
    groups: Sequence[Group],
    weights: Mapping[str, Array],
    channels: Sequence[Channels | None],
    moments: Moments,
    weight_noise: float = 1.0,
) -> list[Grid]:
    """The weights and activations that the factors of known groups change; arguments as in :func:`quietest_factors`.

    The rounding errors of weights count by the share ``weight_noise`` of nearest rounding's, which is less than 1 where a later
    method rounds them better. The factors are those of all groups one after the other, and a last one that stands for "none".
    """
    model = _Model(groups, weights, channels, moments)
    rounded = [replace(grid, step=grid.step * weight_noise) for grid in model.weight_grids()]
    return [*rounded, *model.activation_grids()]


@dataclass(frozen=True)
class _Sizes:
    """A weight with its kernel summed up: sums of squares and largest magnitudes, both [group, outputs, inputs]."""

    squares: Array
    largest: Array
    kernel: int


class _Model:
    """Groups with their layers and values, read once.

    Attributes:
        begins: place of each group's first factor in the vector of all of them, and the place of "no factor".
        shares: how much each channel contributes to what the model computes: per group, adding up to 1.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        weights: Mapping[str, Array],
        channels: Sequence[Channels | None],
        moments: Moments,
    ) -> None:
        self.groups, self.weights, self.channels, self.moments = groups, weights, channels, moments
        self._known: dict[str, _Sizes] = {}
        self.begins = np.cumsum([0] + [group.channels for group in groups])
        self.reads = {layer.op: (i, repeat) for i, g in enumerate(groups) for layer, repeat in g.consumers}
        self.writes = {layer.op: i for i, g in enumerate(groups) for layer in g.producers}
        self.shares = [np.full(group.channels, 1 / group.channels) for group in groups]
        for i in reversed(range(len(groups))):
            self._share(i)

    def _sizes(self, layer: Layer) -> _Sizes:
        if layer.weight not in self._known:
            split = layer.axes.split(np.asarray(self.weights[layer.weight]))
            split = split if layer.axes.outputs_first else split.swapaxes(1, 2)
            flat = np.asarray(split, np.float64) if split.dtype != np.float32 else split
            squares, largest = _over_kernel(flat)
            self._known[layer.weight] = _Sizes(squares, largest, split.shape[3])
        return self._known[layer.weight]

    def _behind(self, layer: Layer) -> int | None:
        """The group that a layer writes, where its values are known."""
        at = self.writes.get(layer.op)
        return None if at is None or self.channels[at] is None else at

    def _share(self, i: int) -> None:
        """Contribution of each channel: a layer's output channel is divided by the variance that each input brings in.

        Where nothing is known after a layer, its outputs contribute by their variance.
        """
        group, known = self.groups[i], self.channels[i]
        total = np.zeros(group.channels)
        for layer, repeat in group.consumers if known is not None else ():
            assert known is not None
            squares = self._sizes(layer).squares
            brought = squares * group.spread(known.variance, repeat).reshape(len(squares), 1, -1)
            sums = brought.sum(axis=2)
            at = self._behind(layer)
            share = sums / max(float(sums.sum()), _TINY) if at is None else self.shares[at].reshape(sums.shape)
            parts = brought * (share / np.where(sums > 0, sums, 1.0))[:, :, None]
            total += group.gathered(parts.sum(axis=1).reshape(-1), repeat).sum(axis=1)
        if total.any():
            self.shares[i] = total / total.sum()

    def _cost(self, i: int) -> Array:
        """Cost of an error of variance 1 before the activation, relative to the signal, per channel."""
        known = self.channels[i]
        assert known is not None
        cost: Array = self.shares[i] * known.passed / np.maximum(known.variance, _SMALL)
        return cost

    def activation_grids(self) -> list[Grid]:
        """One per group whose values are known."""
        grids = []
        for i, known in enumerate(self.channels):
            if known is not None and known.largest.any():
                rows = self.begins[i] + np.arange(self.groups[i].channels)
                cost, none = np.maximum(self._cost(i), _TINY)[None], self.begins[-1:][None]
                sizes = known.largest[None, :, None]
                grids.append(Grid(_log(sizes), rows[None], none, cost, np.ones((1, 1)), _ACTIVATION))
        return grids

    def weight_grids(self) -> list[Grid]:
        """One per layer that reads or writes a group whose values are known."""
        layers = {layer.op: layer for g in self.groups for layer in (*g.producers, *(c for c, _ in g.consumers))}
        found = (self._weight_grid(layer) for layer in layers.values())
        return [grid for grid in found if grid is not None]

    def _weight_grid(self, layer: Layer) -> Grid | None:
        sizes, none = self._sizes(layer), int(self.begins[-1])
        squares, (count, outputs, inputs) = sizes.squares, sizes.squares.shape
        read, repeat = self.reads.get(layer.op, (None, 1))
        written, out = self.writes.get(layer.op), self._behind(layer)
        known = None if read is None else self.channels[read]
        if not squares.any() or (known is None and out is None):
            return None
        columns, rows = np.full(count * inputs, none), np.full(count * outputs, none)
        if read is not None:
            columns = self.groups[read].spread(self.begins[read] + np.arange(self.groups[read].channels), repeat)
        if written is not None:
            rows = self.begins[written] + np.arange(self.groups[written].channels)
        if known is not None and read is not None:
            before = self.groups[read].spread(known.variance + MEAN_COUNTS * known.mean**2, repeat)
        else:  # as large as makes the output what it is known to be
            before = np.full(count * inputs, np.square(self.moments[layer.op][1]).sum() / squares.sum())
        before = before.reshape(count, inputs)
        if out is not None:
            later = self._cost(out).reshape(count, outputs)
        else:
            later = np.full((count, outputs), 1 / max(float((squares * before[:, None]).sum()), _TINY))
        return Grid(
            _log(sizes.largest), rows.reshape(count, outputs), columns.reshape(count, inputs), later,
            before * sizes.kernel, _WEIGHT,
        )  # fmt: skip


def _over_kernel(split: Array) -> tuple[Array, Array]:
    """Sum of squares, float64, and largest magnitude over the last axis, which is short and put first for it."""
    rows = split.reshape(-1, split.shape[3])
    squares, largest = np.zeros(len(rows)), np.zeros(len(rows), split.dtype)
    step = max(1, _CHUNK // max(rows.shape[1], 1))
    for i in range(0, len(rows) if rows.shape[1] else 0, step):
        places = np.abs(np.ascontiguousarray(rows[i : i + step].T))
        places.max(axis=0, out=largest[i : i + step])
        wide = places.astype(np.float64)
        np.square(wide, out=wide).sum(axis=0, out=squares[i : i + step])
    return squares.reshape(split.shape[:3]), largest.reshape(split.shape[:3])


def _log(sizes: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(sizes).astype(np.float32)


#: activation that cuts -> least and greatest value of each channel before it, float64, shape [channels]
Extremes = Mapping[str, tuple[Array, Array]]
Bounds = tuple[Array, Array]
"""Least and greatest factor of each channel of a group, float64, shape [channels]; 0 and infinity for none."""
#: values that other data may have, over the largest seen; costs a channel a bit at most
MARGIN = 2.0
#: no channel grows more: five bits of eight
LEAST = 1 / 32


def measured_extremes(
    view: FloatModel, groups: Sequence[Group], data: Iterable[Any] | None, bar: Bar = no_bar
) -> dict[str, tuple[Array, Array]]:
    """Extremes per channel of the inputs of clipping activations in ``groups``; runs no data if there are none.

    Args:
        view: the model.
        groups: of layers that share channels.
        data: batches, run one by one.
        bar: shows them.

    Raises:
        ConfigError: there is no data.
        CalibrationError: no batch in it, or a value that is NaN or infinite.
    """
    if data is None:
        raise ConfigError("equalize", "which values a kept bound would cut is not known", "give data")
    found = {str(op.inputs[0]): (op.name, axis, group.channels) for group in groups for op, axis in group.clips}
    ends = {value: np.full((2, channels), -np.inf) for value, (_, _, channels) in found.items()}

    def note(value: str, array: Array) -> None:
        axis = found[value][1] % array.ndim
        by_channel = array.reshape(math.prod(array.shape[:axis]), array.shape[axis], -1)
        if by_channel.size:  # the last axis first: its elements lie side by side
            seen = np.stack([-by_channel.min(axis=2).min(axis=0), by_channel.max(axis=2).max(axis=0)])
            check_finite(value, np.asarray(np.isfinite(seen).all(axis=0)))
            np.maximum(ends[value], seen, out=ends[value])

    if found:
        observe_arrays(view, found, bar(data, "equalize: measuring activations"), note, "equalize")
    return {name: (-ends[value][0], ends[value][1]) for value, (name, _, _) in found.items()}


def bounds_of_factors(group: Group, extremes: Extremes | None) -> Bounds:
    """Least and greatest factor of each channel under which no activation cuts additional values.

    Args:
        group: of layers that share channels.
        extremes: of the activations that cut and are to cut where they do; ``None`` where they are changed with the factors.

    Returns:
        At most 1; at least :data:`LEAST`, and :data:`MARGIN` times the share of the bound that the channel reached. Of a group
        in which nothing cuts, 0 and infinity.
    """
    if extremes is None or not group.clips:
        return np.zeros(group.channels), np.full(group.channels, np.inf)
    least = np.full(group.channels, LEAST)
    for op, _ in group.clips:
        np.maximum(least, _reached(op, *extremes[op.name]) * MARGIN, out=least)
    return np.minimum(least, 1.0), np.ones(group.channels)


def _reached(op: Op, low: Array, high: Array) -> Array:
    """The largest value of each channel as a fraction of the nearer bound; a bound at zero is unaffected by factors."""
    share = np.zeros_like(high)
    for bound, end in zip(bounds_of(op), (low, high), strict=True):
        if np.isfinite(bound) and bound:
            np.maximum(share, end / bound, out=share)
    return share
