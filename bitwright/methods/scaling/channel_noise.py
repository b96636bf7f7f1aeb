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
never reached its bound does not reach it afterwards either (:func:`within_bounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.core.graph.attention import sole_reader
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS
from bitwright.core.simulation.float_model import FloatModel
from bitwright.errors import ConfigError
from bitwright.methods.bias_correction import Moments, moments_behind
from bitwright.methods.layers import Array, Bar, Group, Layer, bounds_of, no_bar
from bitwright.methods.scaling.smooth import observe

#: largest values are smoothed to ``log(sum(x**SHARPNESS)) / SHARPNESS``, so that descent has a gradient
SHARPNESS = 48
#: how much of an error of the mean counts: bias correction takes most of it out again, where it is done
MEAN_COUNTS = 0.25
#: squared steps over squared largest values, 8 bits: weights symmetric, activations from zero; and the variance of an error
_WEIGHT, _ACTIVATION = 1 / (12 * 127**2), 1 / (12 * 255**2)
MAX_ROUNDS = 400
#: a sharpness at which the largest value is exact
_EXACT = 1e6
#: variances, and sums of products of them, below which a channel counts as constant
_SMALL, _TINY = 1e-12, 1e-30
#: a sum of powers below which those that fell below the smallest float64 could matter
_FAINT = 1e-100
_LINEAR_IN_PARTS = (*TRAITS["piecewise_linear"], *TRAITS["identity"])


# ---------------------------------------------------------------------------------------------- arithmetic


@dataclass(frozen=True)
class Grid:
    """A tensor with one scale under factors of its rows and columns, and what its rounding costs.

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
    """What the roundings of all tensors cost together, and its gradient; :class:`RoundingNoise` at one point."""
    return RoundingNoise(grids, len(log_factors), sharpness)(log_factors)


class RoundingNoise:
    """What the roundings of all tensors cost together, as a function of the factors.

    Args:
        grids: at least one entry of each is not zero.
        size: K, how many factors there are.
        sharpness: of the smoothed largest magnitude, which is at most ``size ** (1 / sharpness)`` times the true one.
    """

    def __init__(self, grids: Sequence[Grid], size: int, sharpness: float = SHARPNESS) -> None:
        self._grids, self._size = grids, size
        self._largest = [_SmoothLargest(grid.magnitude, sharpness) for grid in grids]
        self._places = np.concatenate([places.reshape(-1) for grid in grids for places in (grid.rows, grid.columns)])

    def __call__(self, log_factors: Array) -> tuple[float, Array]:
        """The noise at ``log_factors``, shape [K], and its gradient there.

        Returns:
            ``step * max(|W| s_i / s_o)**2 * sum(behind_o s_o**2 * before_i / s_i**2)`` summed over the grids; and the
            gradient by ``log_factors``, shape [K]. The logarithm of the sum is convex.
        """
        total, slopes = 0.0, []
        for grid, smooth in zip(self._grids, self._largest, strict=True):
            out, into = log_factors[grid.rows], log_factors[grid.columns]
            largest, by_row, by_column = smooth.at(out, into)
            later, before = grid.later * np.exp(2 * out), grid.before * np.exp(-2 * into)
            later_sum, before_sum = later.sum(axis=1, keepdims=True), before.sum(axis=1, keepdims=True)
            square = grid.step * np.exp(2 * largest)
            noise = square * float((later_sum * before_sum).sum())
            total += noise
            slopes.append(2 * (square * later * before_sum - noise * by_row).reshape(-1))
            slopes.append(2 * (noise * by_column - square * before * later_sum).reshape(-1))
        return float(total), np.bincount(self._places, np.concatenate(slopes), self._size)


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
        """``None`` where the powers in memory are too small to tell."""
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
    tolerance: float = 1e-4,
    memory: int = 10,
    bar: Bar = no_bar,
) -> tuple[Array, int]:
    """Minimise a smooth convex function by L-BFGS.

    Args:
        function: value and gradient at a point.
        start: shape [K].
        tolerance: ends when ten rounds lowered the value by less.
        memory: pairs of steps and changes of the gradient that are kept.
        bar: shows the rounds.

    Returns:
        The best point, shape [K], and the number of rounds.

    Reference: Nocedal 1980, Updating quasi-Newton matrices with limited storage.
    """
    x, (value, gradient) = start, function(start)
    pairs: list[tuple[Array, Array]] = []
    values = [value]
    for _ in bar(iter(range(MAX_ROUNDS)), "equalize: rounds"):
        if len(values) > 10 and values[-11] - values[-1] < tolerance:
            break
        found = _line_search(function, x, value, gradient, _direction(gradient, pairs))
        if found is None:
            break
        point, value, slope = found
        step, change = point - x, slope - gradient
        if _dot(step, change) > 1e-12:
            pairs = [*pairs, (step, change)][-memory:]
        x, gradient = point, slope
        values.append(value)
    return x, len(values) - 1


def _direction(gradient: Array, pairs: Sequence[tuple[Array, Array]]) -> Array:
    """Where to go: the gradient times the approximate inverse Hessian, negative; no entry beyond 2."""
    q, weights = gradient.copy(), []
    for step, change in reversed(pairs):
        weights.append(_dot(step, q) / _dot(step, change))
        q -= weights[-1] * change
    if pairs:
        step, change = pairs[-1]
        q *= _dot(step, change) / _dot(change, change)
    else:
        q /= max(float(np.abs(q).max(initial=0.0)), 1e-12)
    for (step, change), weight in zip(pairs, reversed(weights), strict=True):
        q += step * (weight - _dot(change, q) / _dot(step, change))
    result: Array = -q * min(1.0, 2 / max(float(np.abs(q).max(initial=0.0)), 1e-12))
    return result


def _dot(a: Array, b: Array) -> float:
    """Scalar product without BLAS, whose threads wait longer than they sum and whose number changes the sum."""
    return float(np.einsum("k,k->", a, b))


def _line_search(
    function: Callable[[Array], tuple[float, Array]], x: Array, value: float, gradient: Array, direction: Array
) -> tuple[Array, float, Array] | None:
    """The first of halved steps that lowers the value enough (Armijo); ``None`` when none does."""
    slope = _dot(gradient, direction)
    for halvings in range(20):
        length = 0.5**halvings
        point = x + length * direction
        there, its_gradient = function(point)
        if there <= value + 1e-4 * length * slope and slope < 0:
            return point, there, its_gradient
    return None


# ------------------------------------------------------------------------------------------- what is known


@dataclass(frozen=True)
class Channels:
    """The values of a group after its activation, per channel, shape [C].

    Attributes:
        mean, variance: of the values.
        largest: magnitude that hardly any value exceeds: three deviations from the mean, cut by the activation.
        passed: share of the values whose error the activation hands on.
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
    """Mean and standard deviation of what the producers of groups put out, before the activation.

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
    bar: Bar = no_bar,
) -> tuple[list[Array], int, tuple[float, float]]:
    """Factors that make the rounding noise of weights and activations smallest.

    Args:
        groups: in execution order.
        weights: of their layers, by name.
        channels: per group what its values are; a group without stays at ``fixed``.
        moments: layer -> mean and standard deviation of its output.
        fixed: per group the factors to begin with, positive, shape [channels].
        bar: shows the rounds.

    Returns:
        Per group the factors that its channels are divided by, scaled such that the largest value of the activation
        stays what it is; the number of rounds; and the noise before any factor and with them: per tensor the power of
        its rounding over that of the signal, at 8 bits, summed over the tensors.
    """
    grids = grids_of(groups, weights, channels, moments)
    if not grids:
        return list(fixed), 0, (0.0, 0.0)
    free = [np.full(g.channels, known is not None) for g, known in zip(groups, channels, strict=True)]
    movable = np.append(np.concatenate(free), False)  # the last factor stands for "none"

    noise = RoundingNoise(grids, len(movable))

    def logarithm(x: Array) -> tuple[float, Array]:
        value, gradient = noise(x)
        return float(np.log(value)), np.where(movable, gradient / value, 0.0)

    start = np.append(np.log(np.concatenate(list(fixed))), 0.0)
    found, rounds = descend(logarithm, start, bar=bar)
    before, after = (rounding_noise(grids, x, _EXACT)[0] for x in (np.zeros_like(found), found))
    logs = np.split(found[:-1], np.cumsum([group.channels for group in groups])[:-1])
    return ([np.exp(s + _back(s, known)) for s, known in zip(logs, channels, strict=True)], rounds, (before, after))


def _back(log_factors: Array, known: Channels | None) -> float:
    """What brings the largest value of an activation back to where it was before the factors."""
    if known is None or not known.largest.any():
        return 0.0
    alive = known.largest > 0
    values = np.log(known.largest[alive])
    return float((values - log_factors[alive]).max() - values.max())


def grids_of(
    groups: Sequence[Group], weights: Mapping[str, Array], channels: Sequence[Channels | None], moments: Moments
) -> list[Grid]:
    """The weights and activations that the factors of known groups change; arguments as in :func:`quietest_factors`.

    Their factors are those of all groups one after the other, and a last one that stands for "none".
    """
    model = _Model(groups, weights, channels, moments)
    return [*model.weight_grids(), *model.activation_grids()]


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
            squares = np.einsum("goik,goik->goi", flat, flat, dtype=np.float64)
            largest = np.maximum(flat.max(axis=3, initial=0.0), -flat.min(axis=3, initial=0.0))
            self._known[layer.weight] = _Sizes(squares, largest, split.shape[3])
        return self._known[layer.weight]

    def _behind(self, layer: Layer) -> int | None:
        """The group that a layer writes, where its values are known."""
        at = self.writes.get(layer.op)
        return None if at is None or self.channels[at] is None else at

    def _share(self, i: int) -> None:
        """What each channel contributes: that of a layer's output divides by the variance that each input brings in.

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
        """What an error of variance 1 before the activation costs, relative to the signal, per channel."""
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


def _log(sizes: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(sizes).astype(np.float32)


#: activation that cuts -> least and greatest value of each channel before it, float64, shape [channels]
Extremes = Mapping[str, tuple[Array, Array]]
#: values that other data may have, over the largest seen; costs a channel a bit at most
MARGIN = 2.0
#: no channel grows more: five bits of eight
LEAST = 1 / 32


def measured_extremes(
    view: FloatModel, groups: Sequence[Group], data: Iterable[Any] | None, bar: Bar = no_bar
) -> dict[str, tuple[Array, Array]]:
    """What the activations of ``groups`` that cut at fixed bounds read, per channel; the data is not run where there are none.

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

    def note(value: str, rows: Array) -> None:
        seen = np.stack([-rows.min(axis=0), rows.max(axis=0)])
        np.maximum(ends[value], seen, out=ends[value])

    if found:
        axes = {value: axis for value, (_, axis, _) in found.items()}
        observe(view, axes, bar(data, "equalize: measuring activations"), note, "equalize")
    return {name: (-ends[value][0], ends[value][1]) for value, (name, _, _) in found.items()}


def within_bounds(group: Group, factors: Array, extremes: Extremes) -> Array:
    """The factors nearest to ``factors`` under which no bound cuts what it did not cut.

    Args:
        group: of layers that share channels.
        factors: what the channels of its value would best be divided by, positive, shape [channels].
        extremes: of the activations that cut.

    Returns:
        ``factors`` where nothing cuts; else none above 1, none below :data:`LEAST`, and none below :data:`MARGIN` times the
        share of the bound that the channel reached.
    """
    least = np.full(group.channels, LEAST)
    for op, _ in group.clips:
        np.maximum(least, _reached(op, *extremes[op.name]) * MARGIN, out=least)
    return np.clip(factors, np.minimum(least, 1.0), 1.0) if group.clips else factors


def _reached(op: Op, low: Array, high: Array) -> Array:
    """How far each channel came towards the nearer of the bounds, as a share; a bound at zero stays one under any factor."""
    share = np.zeros_like(high)
    for bound, end in zip(bounds_of(op), (low, high), strict=True):
        if np.isfinite(bound) and bound:
            np.maximum(share, end / bound, out=share)
    return share
