"""Statistics of the tensors that pass a quantizer: bounds, energy, histograms, moments; and exact sums of floats.

Statistics are immutable: ``update`` returns new ones, ``merge`` joins those of two workers. For :class:`MinMax`
and :class:`Histogram` both are exact and independent of order, so an encoding depends on the data alone and
not on how it was cut into batches or spread over ranks. Means are sums without rounding (:class:`ExactSum`), for the
same reason. Non-finite values are counted and never enter a bound, a bin or a mean.

Every function sees a tensor as rows, one per group of elements that share a scale (parameter shape P,
flattened).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from bitwright.core.compiled.counting import NO_KEY, value_of_key
from bitwright.core.compiled.loops import Loops, flat, loops
from bitwright.core.numerics.arrays import (
    Array,
    as_array,
    bincount,
    cast,
    dtype_name,
    is_floating,
    is_torch,
    like,
    namespace,
    nonzeros,
    padded,
    row_bounds,
    share,
    to_numpy,
    transpose,
)
from bitwright.core.numerics.granularity import PER_TENSOR, Granularity, PerBlock, PerTensor, Shape

# a float64 is an integer of 53 bits times a power of two, of which 2^-1126 divides the least
_LOWEST = 1126
_BITS, _MASK = 32, (1 << 32) - 1
_LIMBS = (_LOWEST + 1024) // _BITS + 3


class ExactSum:
    """The sum of float64 numbers, column by column, as integers of 32 bits each beside the other.

    Args:
        size: how many sums.

    Attributes:
        limbs: ``[L, size]`` int64; those of several sums may be added, and are the limbs of all their numbers together. Up to
            2^30 numbers fit.

    Example:
        >>> total = ExactSum(1)
        >>> for x in (1e300, 1.0, -1e300):
        ...     total.add(np.array([x]))
        >>> float(total.values()[0])
        1.0
    """

    def __init__(self, size: int) -> None:
        self.limbs: NDArray[np.int64] = np.zeros((_LIMBS, size), np.int64)

    def add(self, values: NDArray[np.float64]) -> None:
        """Add one number to each sum; ``values`` is ``[size]``, finite."""
        fraction, exponent = np.frexp(np.abs(values))
        integer = np.ldexp(fraction, 53).astype(np.int64)
        first, shift = np.divmod(exponent.astype(np.int64) - 53 + _LOWEST, _BITS)
        low = (integer & _MASK) << shift  # below 2^63
        high = ((integer >> _BITS) << shift) + (low >> _BITS)
        sign = np.where(values < 0, -1, 1)
        columns = np.arange(len(values))
        for i, part in enumerate((low & _MASK, high & _MASK, high >> _BITS)):
            self.limbs[first + i, columns] += sign * part

    def values(self) -> list[Fraction]:
        """The sums."""
        unit = Fraction(1, 1 << _LOWEST)
        used = np.flatnonzero(self.limbs.any(1)).tolist()
        return [unit * sum(int(column[i]) << (_BITS * i) for i in used) for column in self.limbs.T]


Kind = Literal["minmax", "energy", "histogram", "moments"]

HALF_BINS = 2048
"""Bins on either side of zero, the one around zero included: N in :class:`Histogram`."""

_BINS = 2 * HALF_BINS - 1
_HALF_BITS = 11  # HALF_BINS is 2 to this power
_MIN_EXPONENT = -126  # the width of a bin is a normal float32, and so is its reciprocal
_CHUNK = 1 << 17  # elements: one chunk and its codes stay in the second-level cache
_LONG = 1 << 14  # elements: from here on a second table of counts is worth its clearing
_TABLE = _BINS + 1
_PIECE = 1 << 15  # elements that compiled loops count before they add up their tables
_PLACES = np.tile(np.array([0, _TABLE], np.int16) + np.int16(HALF_BINS - 1), _CHUNK // 2)


class _Values:
    """Comparison of frozen statistics, field by field."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine, theirs = to_arrays(self), to_arrays(other)  # type: ignore[arg-type]
        return all(np.array_equal(mine[key], theirs[key]) for key in mine)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class MinMax(_Values):
    """Exact bounds.

    Attributes:
        lo, hi: smallest and largest finite value, float64, shape P; ``inf`` and ``-inf`` before any was seen.
        count, nan_count, pos_inf_count, neg_inf_count: finite, NaN, +Inf and -Inf values seen, int64, shape P.
    """

    lo: NDArray[np.float64]
    hi: NDArray[np.float64]
    count: NDArray[np.int64]
    nan_count: NDArray[np.int64]
    pos_inf_count: NDArray[np.int64]
    neg_inf_count: NDArray[np.int64]

    @property
    def inf_count(self) -> NDArray[np.int64]:
        """Infinite values of either sign, shape P."""
        return np.asarray(self.pos_inf_count + self.neg_inf_count)


@dataclass(frozen=True, eq=False)
class Energy(MinMax):
    """Exact bounds and the sum of squares, to check a given range against the data.

    Attributes:
        energy: sum of the squares of the finite values, float64, shape P. It is rounded, so the order of updates
            may change the last bits.
    """

    energy: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Histogram(_Values):
    """Counts in bins of width ``w = 2 ** exponent``, with the exact bounds beside them.

    A value ``x`` falls into bin ``j = trunc(x / w)``, -N < j < N with N = 2048: the bin around zero is open
    and two wide, ``(-w, w)``; ``[j w, (j + 1) w)`` lie above it and their mirror images below.

    The width follows from the largest magnitude alone: the smallest power of two with ``max|x| < N w``. When
    it doubles, bins join in pairs without loss, because ``trunc(x / 2w) == trunc(trunc(x / w) / 2)``;
    truncation has this property where ``floor`` of a rounded quotient has not (a tiny negative number
    underflows to bin 0).

    Attributes:
        counts: int64, shape ``P + (2 N - 1,)``; bin ``j`` is at index ``j + N - 1``.
        exponent: int64, shape P, at least -126.
        zeros: how many values of bin 0 are zero itself, int64, shape P; zeros cost no precision on any grid,
            and a tensor with one huge outlier may hold nearly everything else in bin 0.
        bounds: the bounds of the same data.
    """

    counts: NDArray[np.int64]
    exponent: NDArray[np.int64]
    zeros: NDArray[np.int64]
    bounds: MinMax


@dataclass(frozen=True, eq=False)
class Moments(_Values):
    """Mean and spread; ``m2 / count`` is the variance.

    Attributes:
        count: finite values seen, int64, shape P.
        mean: their mean, float64, shape P.
        m2: sum of squared differences from the mean, float64, shape P.

    Sums are rounded, so the order of updates may change the last bits.
    """

    count: NDArray[np.int64]
    mean: NDArray[np.float64]
    m2: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Samples(_Values):
    """The values, for constants in small groups, where a histogram would be larger than the data.

    Attributes:
        values: float32 or float64, shape ``P + (n,)``; non-finite values are stored as NaN and ignored.
        bounds: the bounds of the same data.
    """

    values: NDArray[np.floating[Any]]
    bounds: MinMax


Statistics = MinMax | Histogram | Moments
S = TypeVar("S", MinMax, Energy, Histogram, Moments)


def start(kind: Kind, shape: Shape = ()) -> Statistics:
    """Statistics of no data.

    Args:
        kind: ``"minmax"``, ``"energy"``, ``"histogram"`` or ``"moments"``; ``ranges.needs`` tells which a range method
            wants.
        shape: parameter shape P, from ``Granularity.param_shape``.

    >>> start("minmax").count
    array(0)
    """
    none = np.zeros(shape, np.int64)
    if kind == "moments":
        return Moments(none, np.zeros(shape), np.zeros(shape))
    bounds = MinMax(np.full(shape, np.inf), np.full(shape, -np.inf), none, none, none, none)
    if kind == "minmax":
        return bounds
    if kind == "energy":
        return energy_of(bounds, np.zeros(shape))
    return Histogram(np.zeros((*shape, _BINS), np.int64), np.full(shape, _MIN_EXPONENT, np.int64), none, bounds)


def update(stats: S, x: Array, granularity: Granularity = PER_TENSOR) -> S:
    """``stats`` of the data seen so far and of ``x``.

    Args:
        stats: from :func:`start` with the parameter shape of ``granularity`` for ``x``.
        x: numpy array or torch tensor, any real dtype, any device; may be empty.
        granularity: concrete (axes filled in).

    >>> update(start("minmax"), np.float32([1, -2, np.nan])).lo
    array(-2.)
    """
    x = as_array(x)
    if isinstance(stats, Histogram) and isinstance(granularity, PerTensor):
        return _count_in(stats, x)  # type: ignore[return-value]
    measured: S = _MEASURES[type(stats)](x, granularity)
    return merge(stats, measured)


def merge(a: S, b: S) -> S:
    """Statistics of the data of ``a`` and the data of ``b``; also the rule for an all-reduce."""
    assert type(a) is type(b), (type(a), type(b))
    merged: S = _MERGES[type(a)](a, b)
    return merged


def measure(kind: Kind, x: Array, granularity: Granularity = PER_TENSOR) -> Statistics:
    """Statistics of ``x`` alone."""
    measured: Statistics = _MEASURES[_KINDS[kind]](as_array(x), granularity)
    return measured


def bounds_of(stats: MinMax | Histogram | Samples) -> MinMax:
    """The exact bounds in any of the statistics."""
    return stats if isinstance(stats, MinMax) else stats.bounds


def energy_of(bounds: MinMax, energy: NDArray[np.float64]) -> Energy:
    """``bounds`` with a sum of squares."""
    return Energy(**{field.name: getattr(bounds, field.name) for field in fields(MinMax)}, energy=energy)


def kind_of(stats: Statistics) -> Kind:
    """The kind of ``stats``, as :func:`start` takes it."""
    return next(kind for kind, known in _KINDS.items() if type(stats) is known)


def rows_of(x: Array, granularity: Granularity) -> Array:
    """``x`` as a matrix, one row per scale in the order of the flattened parameter shape.

    A last block that lacks elements is padded with zeros.

    >>> rows_of(np.zeros((8, 3, 5, 5)), PER_TENSOR).shape
    (1, 600)
    """
    shape = tuple(x.shape)
    if isinstance(granularity, PerBlock) and (missing := granularity.padding(shape)) and granularity.axis is not None:
        x = padded(x, granularity.axis % len(shape), missing)
        shape = tuple(x.shape)
    params = granularity.broadcast_shape(shape)
    if not params:
        return x.reshape(1, -1)
    view = x.reshape(granularity.view_shape(shape))
    kept = tuple(i for i, n in enumerate(params) if n != 1)
    shared = tuple(i for i, n in enumerate(params) if n == 1)
    groups = int(np.prod(params))
    return transpose(view, kept + shared).reshape(groups, int(np.prod(shape)) // groups if groups else 0)


def histogram_exponent(lo: NDArray[np.float64], hi: NDArray[np.float64]) -> NDArray[np.int64]:
    """Exponent of the bin width of data between ``lo`` and ``hi``: the least e with ``max|x| < N 2**e``.

    >>> histogram_exponent(np.array(-1.0), np.array(3.9))
    array(-9)
    """
    largest = np.maximum(np.where(np.isfinite(lo), np.abs(lo), 0), np.where(np.isfinite(hi), np.abs(hi), 0))
    exponent = np.frexp(largest)[1].astype(np.int64) - _HALF_BITS
    return np.asarray(np.where(largest > 0, np.maximum(exponent, _MIN_EXPONENT), _MIN_EXPONENT))


def to_arrays(stats: MinMax | Histogram | Moments | Samples) -> dict[str, NDArray[Any]]:
    """The fields of ``stats`` by name, those of nested bounds with them: for files and all-reduce."""
    arrays: dict[str, NDArray[Any]] = {}
    for field in fields(stats):
        value = getattr(stats, field.name)
        arrays.update(to_arrays(value) if isinstance(value, MinMax) else {field.name: value})
    return arrays


def from_arrays(kind: Kind, arrays: Mapping[str, NDArray[Any]]) -> Statistics:
    """The inverse of :func:`to_arrays`."""
    if kind == "moments":
        return Moments(**{field.name: np.asarray(arrays[field.name]) for field in fields(Moments)})
    bounds = MinMax(**{field.name: np.asarray(arrays[field.name]) for field in fields(MinMax)})
    if kind == "minmax":
        return bounds
    if kind == "energy":
        return energy_of(bounds, np.asarray(arrays["energy"]))
    counts, exponent, zeros = (np.asarray(arrays[key]) for key in ("counts", "exponent", "zeros"))
    return Histogram(counts, exponent, zeros, bounds)


# ---- bounds


def _measure_minmax(x: Array, granularity: Granularity) -> MinMax:
    return row_minmax(rows_of(x, granularity), granularity.param_shape(tuple(x.shape)))


def row_minmax(rows: Array, shape: Shape) -> MinMax:
    """Bounds of every row of a matrix, given the parameter shape that its rows have."""
    if 0 in rows.shape:
        empty = start("minmax", shape)
        assert isinstance(empty, MinMax)
        return empty
    lo_hi = _one_row_bounds(rows)
    if lo_hi is not None:
        none = np.zeros(shape, np.int64)
        lo, hi = (np.full(shape, end) for end in lo_hi)
        return MinMax(lo, hi, np.full(shape, rows.shape[1], np.int64), none, none, none)
    # numpy has no fast reduction for halves, torch none for bool
    if not (is_torch(rows) and is_floating(rows)):
        rows = _at_least_float32(rows)
    lo, hi = (to_numpy(end).astype(np.float64) for end in row_bounds(rows))
    count = np.full(lo.shape, rows.shape[1], np.int64)
    nans = above = below = np.zeros(lo.shape, np.int64)
    # the reductions propagate NaN, so nothing non-finite passes unseen
    if not (_all_finite(lo) and _all_finite(hi)):
        lo, hi, nans, above, below = _masked_bounds(rows)
        count = count - nans - above - below
    return MinMax(lo.reshape(shape), hi.reshape(shape), *(part.reshape(shape) for part in (count, nans, above, below)))


def _one_row_bounds(rows: Array) -> tuple[float, float] | None:
    """The bounds of a single row by compiled loops; ``None`` where there are none, or it holds a value that is not finite."""
    if rows.shape[0] != 1 or (compiled := loops()) is None or (values := flat(rows)) is None:
        return None
    lo, hi = (value_of_key(int(key)) for key in compiled.key_bounds(values.view(np.int32)))
    return (lo, hi) if math.isfinite(lo) and math.isfinite(hi) else None


def _all_finite(ends: NDArray[np.float64]) -> bool:
    if ends.size == 1:  # a tenth of what the call of two numpy functions takes
        return math.isfinite(ends[0])
    return bool(np.isfinite(ends).all())


def _masked_bounds(rows: Array) -> tuple[NDArray[Any], ...]:
    """Finite bounds, and counts of NaN, +Inf and -Inf, of every row."""
    xp = namespace(rows)
    finite = xp.isfinite(rows)
    lo = row_bounds(xp.where(finite, rows, np.inf))[0]
    hi = row_bounds(xp.where(finite, rows, -np.inf))[1]
    counts = (to_numpy(mask.sum(1)).astype(np.int64) for mask in (xp.isnan(rows), rows == np.inf, rows == -np.inf))
    return to_numpy(lo).astype(np.float64), to_numpy(hi).astype(np.float64), *counts


def _measure_energy(x: Array, granularity: Granularity) -> Energy:
    shape = granularity.param_shape(tuple(x.shape))
    rows = rows_of(x, granularity)
    bounds = row_minmax(rows, shape)
    xp, rows = namespace(rows), _at_least_float32(rows)
    if bounds.count.sum() < math.prod(rows.shape):
        rows = xp.where(xp.isfinite(rows), rows, 0)
    squares = [float(row @ row) for row in rows] if len(rows) == 1 else to_numpy((rows * rows).sum(1)).tolist()
    return energy_of(bounds, np.array(squares, np.float64).reshape(shape))


_COUNTS = ("count", "nan_count", "pos_inf_count", "neg_inf_count")


def _merge_minmax(a: MinMax, b: MinMax) -> MinMax:
    assert a.lo.shape == b.lo.shape, (a.lo.shape, b.lo.shape)
    sums = (np.asarray(getattr(a, key) + getattr(b, key)) for key in _COUNTS)
    return MinMax(np.asarray(np.minimum(a.lo, b.lo)), np.asarray(np.maximum(a.hi, b.hi)), *sums)


def _merge_energy(a: Energy, b: Energy) -> Energy:
    return energy_of(_merge_minmax(a, b), np.asarray(a.energy + b.energy))


def _at_least_float32(x: Array) -> Array:
    return cast(x, _float_of(x))


def _float_of(x: Array) -> str:
    """The float dtype that holds the values of ``x``; at least float32."""
    wide = dtype_name(x) in ("float64", "int32", "int64", "uint32", "uint64")
    return "float64" if wide else "float32"


# ---- histograms


def _measure_histogram(x: Array, granularity: Granularity) -> Histogram:
    if isinstance(granularity, PerTensor):
        empty = start("histogram")
        assert isinstance(empty, Histogram)
        return _count_in(empty, x)
    return row_histogram(rows_of(x, granularity), granularity.param_shape(tuple(x.shape)))


def _count_in(stats: Histogram, x: Array) -> Histogram:
    """``stats``, of one scale, and all elements of ``x``, each read from memory once.

    Pieces of ``x`` are counted in bins as wide as the data so far has made them. Where a piece holds a larger value the
    bins join first, which loses nothing.
    """
    counter = _Counter(stats)
    values, compiled = flat(x), loops()
    if values is None or compiled is None:
        for piece in _pieces(x.reshape(-1)):
            counter.add(piece)
    else:
        counter.add_compiled(values, compiled)
    return counter.result()


class _Counter:
    """A histogram of one scale that is being counted."""

    def __init__(self, stats: Histogram) -> None:
        self.counts, self.exponent, self.zeros = stats.counts.copy(), int(stats.exponent), int(stats.zeros)
        self.lo, self.hi, self.regular, self.bounds = math.inf, -math.inf, 0, stats.bounds

    def add(self, piece: Array) -> None:
        """Count a piece of the data, 1-D, any real dtype."""
        values = cast(piece, _float_of(piece))
        low, high = (float(end[0]) for end in row_bounds(values[None]))
        excluded = 0
        if not (math.isfinite(low) and math.isfinite(high)):
            found = row_minmax(values[None], ())
            self.bounds, low, high = _merge_minmax(self.bounds, found), float(found.lo), float(found.hi)
            xp, excluded = namespace(values), values.shape[0] - int(found.count)
            values = xp.where(xp.isfinite(values), values, 0)
        else:
            self._note(low, high, values.shape[0])
        self._reach(low, high)
        self.counts += _bin_counts(values, self.exponent)
        self.counts[HALF_BINS - 1] -= excluded
        self.zeros += values.shape[0] - nonzeros(values) - excluded

    def add_compiled(self, x: NDArray[np.float32], compiled: Loops) -> None:
        """Count all of ``x``, contiguous, by the compiled loop."""
        codes, tables = np.empty(_PIECE, np.uint16), np.zeros((4, _TABLE), np.uint16)
        bits, start = x.view(np.int32), 0
        while start < x.size:
            counts, found = np.zeros(_TABLE, np.int64), np.array([NO_KEY, ~NO_KEY, 0])
            largest = ((self.exponent + _HALF_BITS + 127) << 23) - 1  # bits of the float32 below N w
            inverse, before = np.float32(2.0**-self.exponent), start
            start = compiled.count_bins(x, bits, before, largest, inverse, codes, tables, counts, found)
            if start > before:
                self.counts += counts[:_BINS]
                self.zeros += int(found[2])
                self._note(value_of_key(int(found[0])), value_of_key(int(found[1])), start - before)
            if start == x.size:
                break
            ends = [value_of_key(int(key)) for key in compiled.key_bounds(bits[start:])]
            if all(map(math.isfinite, ends)):
                self._reach(*ends)
            else:
                self.add(x[start : start + _PIECE])
                start = min(start + _PIECE, x.size)

    def _note(self, low: float, high: float, elements: int) -> None:
        self.lo, self.hi = min(self.lo, low), max(self.hi, high)
        self.regular += elements

    def _reach(self, low: float, high: float) -> None:
        """Join bins until the values from ``low`` to ``high`` fall into one."""
        power = _exponent_of(max(-low, high))
        if power > self.exponent:
            self.counts, self.exponent = _widened(self.counts, np.asarray(power - self.exponent)), power

    def result(self) -> Histogram:
        """The counts."""
        none = np.zeros((), np.int64)
        clean = MinMax(np.asarray(self.lo), np.asarray(self.hi), np.asarray(self.regular), none, none, none)
        return Histogram(
            self.counts, np.asarray(self.exponent), np.asarray(self.zeros), _merge_minmax(self.bounds, clean)
        )


def _exponent_of(largest: float) -> int:
    """:func:`histogram_exponent` of one magnitude; of no data (``-inf``) and of zeros the least there is."""
    return max(math.frexp(largest)[1] - _HALF_BITS, _MIN_EXPONENT) if largest > 0 else _MIN_EXPONENT


def _pieces(flat: Array) -> Iterator[Array]:
    """Parts of an array with one axis that stay in the cache while they are counted."""
    step = _CHUNK if not is_torch(flat) or flat.device.type == "cpu" else _CHUNK << 7
    return (flat[first : first + step] for first in range(0, flat.shape[0], step))


def row_histogram(rows: Array, shape: Shape) -> Histogram:
    """Histogram of every row of a matrix, given the parameter shape that its rows have."""
    bounds = row_minmax(rows, shape)
    exponent = histogram_exponent(bounds.lo, bounds.hi)
    excluded = (bounds.nan_count + bounds.inf_count).reshape(-1)
    counts, zeros = _count(rows, exponent.reshape(-1), finite=not excluded.any())
    counts[:, HALF_BINS - 1] -= excluded
    return Histogram(counts.reshape(*shape, _BINS), exponent, (zeros - excluded).reshape(shape), bounds)


def _count(rows: Array, exponent: NDArray[np.int64], finite: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bin counts, int64 ``(rows, bins)``, and zeros per row; non-finite values are taken for zeros."""
    counts = np.zeros((rows.shape[0], _BINS), np.int64)
    zeros = np.zeros(rows.shape[0], np.int64)
    xp = namespace(rows)
    for row, power in enumerate(exponent.tolist()):
        for x in _pieces(rows[row]):
            if not finite:
                x = xp.where(xp.isfinite(x), x, 0)
            x = _at_least_float32(x)
            counts[row] += _bin_counts(x, power)
            zeros[row] += x.shape[0] - nonzeros(x)
    return counts, zeros


def _bin_counts(x: Array, exponent: int) -> NDArray[np.int64]:
    """How many elements of ``x`` (finite, float32 or 64) fall into each bin; conversion to int16 truncates.

    Even and odd places of a long piece are counted apart: an increment has to wait for the one before it when both are
    of the same bin, which among the zeros after a ReLU is every second one.
    """
    # beyond this exponent its reciprocal would be subnormal in float32
    scaled = (cast(x, "float64") if exponent > -_MIN_EXPONENT else x) * 2.0**-exponent
    codes = cast(scaled, "int16")
    if not _LONG <= codes.shape[0] <= _CHUNK:
        codes += HALF_BINS - 1
        return bincount(codes, _BINS)
    codes += share(_PLACES[: codes.shape[0]], codes)
    apart = bincount(codes, 2 * _TABLE).reshape(2, _TABLE)
    return np.asarray(apart[0, :_BINS] + apart[1, :_BINS])


def _merge_histogram(a: Histogram, b: Histogram) -> Histogram:
    exponent = np.asarray(np.maximum(a.exponent, b.exponent))
    counts = _widened(a.counts, exponent - a.exponent) + _widened(b.counts, exponent - b.exponent)
    return Histogram(counts, exponent, np.asarray(a.zeros + b.zeros), _merge_minmax(a.bounds, b.bounds))


def _widened(counts: NDArray[np.int64], doublings: NDArray[np.int64]) -> NDArray[np.int64]:
    """``counts`` with the bins of every histogram joined in pairs, ``doublings`` times (shape P)."""
    if not doublings.any():
        return counts
    flat, result = counts.reshape(-1, _BINS), np.zeros((doublings.size, _BINS), np.int64)
    bins = np.arange(-HALF_BINS + 1, HALF_BINS)
    for times in np.unique(doublings):
        chosen = doublings.reshape(-1) == times
        target = np.sign(bins) * (np.abs(bins) >> min(int(times), 62)) + HALF_BINS - 1
        where, first = np.unique(target, return_index=True)
        joined = np.zeros((int(chosen.sum()), _BINS), np.int64)
        joined[:, where] = np.add.reduceat(flat[chosen], first, axis=1)
        result[chosen] = joined
    return result.reshape(counts.shape)


# ---- moments


def _measure_moments(x: Array, granularity: Granularity) -> Moments:
    shape = granularity.param_shape(tuple(x.shape))
    rows = cast(rows_of(x, granularity), "float64")
    xp = namespace(rows)
    finite = xp.isfinite(rows)
    rows = xp.where(finite, rows, 0.0)
    count = to_numpy(finite.sum(1)).astype(np.int64)
    mean = to_numpy(rows.sum(1)) / np.maximum(count, 1)
    apart = xp.where(finite, rows - like(mean[:, None], rows, "float64"), 0.0)
    m2 = to_numpy((apart * apart).sum(1))
    return Moments(count.reshape(shape), mean.reshape(shape), m2.reshape(shape))


def _merge_moments(a: Moments, b: Moments) -> Moments:
    """Chan, Golub and LeVeque 1979, "Updating formulae ... for computing sample variances", eq. 1.5."""
    count = np.asarray(a.count + b.count)
    share = b.count / np.maximum(count, 1)
    difference = b.mean - a.mean
    mean = a.mean + difference * share
    return Moments(count, np.asarray(mean), np.asarray(a.m2 + b.m2 + difference * difference * share * a.count))


_KINDS: dict[Kind, type[Any]] = {"minmax": MinMax, "energy": Energy, "histogram": Histogram, "moments": Moments}
_MEASURES: dict[type[Any], Any] = {
    MinMax: _measure_minmax,
    Energy: _measure_energy,
    Histogram: _measure_histogram,
    Moments: _measure_moments,
}
_MERGES: dict[type[Any], Any] = {
    MinMax: _merge_minmax,
    Energy: _merge_energy,
    Histogram: _merge_histogram,
    Moments: _merge_moments,
}
