"""Statistics -> range ``(lo, hi)``: one row of ``RANGE_METHODS`` per method.

Each function takes statistics, the grid and the symmetry asked for, and its own options, and returns two
float64 arrays of parameter shape P. Searches work in units of the histogram's bin width, where nothing over-
or underflows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.numerics.affine import checked_bounds, encode, fake_quantize, grid
from bitwright.core.numerics.arrays import Array, as_array, dtype_name, to_numpy
from bitwright.core.numerics.formats import FloatFormat, Format
from bitwright.core.numerics.granularity import PER_TENSOR, Granularity
from bitwright.core.numerics.range_search import (
    BUDGET,
    Float64s,
    Floats,
    NoiseSearch,
    Range,
    candidate_grids,
    grids_of,
    row_chunks,
)
from bitwright.core.numerics.spec import QuantSpec, RangeMethod, Symmetry
from bitwright.core.numerics.statistics import (
    HALF_BINS,
    Energy,
    Histogram,
    Kind,
    MinMax,
    Samples,
    bounds_of,
    row_histogram,
    row_minmax,
    rows_of,
)
from bitwright.core.registry import Registry
from bitwright.errors import CalibrationError, ConfigError, close_matches

_SAMPLES = 1024  # constants in groups up to this size are searched value by value
# the same where candidates lie inside each other and few of them are tried; where a histogram is as fast
_NESTED_SAMPLES, _NESTED_SAMPLES_BELOW_8_BITS = 8192, 4096

ENOUGH_VALUES = HALF_BINS
"""Values other than zero from which a histogram tells a distribution: one per bin on average."""

_TOLERATED = 4.0  # times the squared error of the full range, 6 dB: ranges beyond it are remarked on
_ENTROPY_TOLERATED = 2.5  # the same for the thresholds of ``entropy``: a histogram tells an error to half of it
_DROWNED = 1000.0  # times the noise of a fixed range, 30 dB: with less energy, data contradict the range
_NOTHING = 1e-9  # of the energy: squared errors below it count as none


@dataclass(frozen=True)
class RangeRow:
    """One range method.

    Attributes:
        function: ``(stats, fmt, symmetry, **options) -> (lo, hi)``.
        needs: the statistics it reads.
        options: name -> (default, lowest, highest).
    """

    function: Callable[..., Range]
    needs: Kind
    options: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)


# ---- choosing


def find_range_method(method: str | RangeMethod, options: Mapping[str, float] | None = None) -> RangeMethod:
    """The range method called ``method``, under its own name and with its options checked.

    Args:
        method: a row of ``RANGE_METHODS``, one of AIMET's names for it (``tf``, ``tf_enhanced``,
            ``post_training_percentile``, ...), or a :class:`RangeMethod`.
        options: options of the method; those of a given :class:`RangeMethod` stay unless named here.

    Raises:
        ConfigError: no such method or option, or an option out of its interval; the message lists close
        names.

    >>> find_range_method("tf_enhanced")
    RangeMethod(name='sqnr', options=())
    """
    given = method if isinstance(method, RangeMethod) else RangeMethod(str(method))
    name = _ALIASES.get(given.name.lower(), given.name.lower())
    if name not in RANGE_METHODS:
        raise ConfigError(
            f"range method {given.name!r}",
            f"there is no range method of this name{close_matches(name, [*RANGE_METHODS, *_ALIASES])}",
            f"use one of {', '.join(RANGE_METHODS)}",
        )
    chosen = {**dict(given.options), **(options or {})}
    for option, value in chosen.items():
        _check_option(name, option, value)
    return RangeMethod.of(name, chosen)


def method_aliases(name: str) -> tuple[str, ...]:
    """The other names that :func:`find_range_method` takes for the method called ``name``.

    >>> method_aliases("entropy")
    ('kl',)
    """
    return tuple(alias for alias, method in _ALIASES.items() if method == name)


def _check_option(name: str, option: str, value: float) -> None:
    known = RANGE_METHODS[name].options
    if option not in known:
        raise ConfigError(
            f"range method {name!r}",
            f"it has no option {option!r}{close_matches(option, known)}",
            f"use {', '.join(known)}" if known else "leave the options empty",
        )
    _, lowest, highest = known[option]
    if not lowest <= value <= highest:  # also refuses NaN
        raise ConfigError(
            f"range method {name!r}",
            f"{option}={value!r} is not between {lowest:g} and {highest:g}",
            f"use the default, {option}={known[option][0]:g}, or a value in this interval",
        )


def needs(method: str | RangeMethod) -> Kind:
    """The statistics ``method`` reads: ``"minmax"`` or ``"histogram"``, to be given to ``statistics.start``.

    >>> needs("minmax"), needs("percentile")
    ('minmax', 'histogram')
    """
    return RANGE_METHODS[find_range_method(method).name].needs


@dataclass(frozen=True)
class ChosenRange:
    """A range, and the remarks on it.

    Attributes:
        lo, hi: float64, parameter shape P, finite, ``lo <= hi``.
        remark: that another method took its place, or that it has far more noise than the full range; empty
            where neither is so.
        poor: whether the noise is why there is a remark.
    """

    lo: Float64s
    hi: Float64s
    remark: str = ""
    poor: bool = False


def choose_range(stats: MinMax | Histogram | Samples, spec: QuantSpec, site: str = "tensor") -> Range:
    """``lo`` and ``hi`` of :func:`explained_range`."""
    chosen = explained_range(stats, spec, site)
    return chosen.lo, chosen.hi


def explained_range(stats: MinMax | Histogram | Samples, spec: QuantSpec, site: str = "tensor") -> ChosenRange:
    """The range of ``stats`` by the method of ``spec``; what :func:`affine.encode` takes.

    No search gives a range with more noise than the full one: where the statistics show no difference between
    the values and the grid of the full range (two values, levels of a picture), this range stays. A percentile
    is taken as asked for; where it has more than 6 dB more noise than the full range, the remark says so.

    Args:
        stats: statistics of the kind that ``needs(spec.method)`` names; a histogram serves every method.
        spec: format, symmetry and method.
        site: name for error messages.

    Raises:
        CalibrationError: there was no finite value, or the statistics lack the histogram that the method
        reads.
        ConfigError: see :func:`find_range_method`.
    """
    method = find_range_method(spec.method)
    found = _found(stats, spec, method, site)
    return ChosenRange(found.lo, found.hi, *_remark(method, found.replaced, found.excess))


@dataclass(frozen=True)
class _Found:
    """Ranges, where another method was taken, and how many times the squared error of the full range each has."""

    lo: Float64s
    hi: Float64s
    replaced: NDArray[np.bool_]
    excess: Float64s


def _found(stats: MinMax | Histogram | Samples, spec: QuantSpec, method: RangeMethod, site: str) -> _Found:
    row = RANGE_METHODS[method.name]
    if row.needs == "histogram" and isinstance(stats, MinMax):
        raise CalibrationError(
            site,
            f"range method {method.name!r} reads a histogram, and only bounds were kept",
            "choose the range method before calibration, or use 'minmax'",
        )
    _check_counts(bounds_of(stats), site)
    options = {option: default for option, (default, _, _) in row.options.items()} | dict(method.options)
    lo, hi = row.function(stats, spec.format, spec.symmetry, **options)
    replaced, excess = np.zeros(lo.shape, np.bool_), np.ones(lo.shape)
    if method.name == "entropy":
        replaced = ~_carry_entropy(stats)
    searched = options.get("percentile") is None and method.name != "hqq" and options.get("gamma", 1.0) >= 1
    if isinstance(stats, MinMax) or method.name == "hqq" or (searched and isinstance(stats, Samples)):
        return _Found(lo, hi, replaced, excess)  # the full range, or a search that knew every value
    full, excess = _compared(stats, lo, hi, spec)
    if searched:
        full |= excess > np.where((method.name == "entropy") & ~replaced, _ENTROPY_TOLERATED, 1)
        bounds = bounds_of(stats)
        lo, hi = np.where(full, bounds.lo, lo), np.where(full, bounds.hi, hi)
        excess = np.where(full, 1.0, excess)
    return _Found(lo, hi, replaced, excess)


def _compared(
    stats: Histogram | Samples, lo: Float64s, hi: Float64s, spec: QuantSpec
) -> tuple[NDArray[np.bool_], Float64s]:
    """Whether the statistics show no noise of the full range, and how many times its noise ``[lo, hi]`` has, both of shape P."""
    bounds = bounds_of(stats)
    same = (lo == bounds.lo) & (hi == bounds.hi)
    chosen = grid(spec.format, spec.symmetry, bounds.lo)
    if same.all() or (isinstance(chosen, FloatFormat) and not chosen.scaled):
        return same, np.ones(lo.shape)
    ends = [np.stack(pair, -1).reshape(-1, 2) for pair in ((bounds.lo, lo), (bounds.hi, hi))]
    search = NoiseSearch(*grids_of(chosen, spec.symmetry, *ends), chosen, spec.symmetry, 1.0)
    if isinstance(stats, Samples):
        noise, energy = search.noise_of_values(stats), np.nansum(np.square(stats.values, dtype=np.float64), -1)
        least = _NOTHING * energy.reshape(-1)
    else:
        # a value has its place within a bin of width 1 only, which makes a third where it lies at one end
        noise, least = search.noise(stats, fine=True), (bounds.count - stats.zeros).reshape(-1) / 3
    exact = noise[:, 0] <= least * (1 + 1e-9)
    ratio = np.maximum(noise[:, 1], least) / np.maximum(np.maximum(noise[:, 0], least), np.finfo(np.float64).tiny)
    return exact.reshape(lo.shape), ratio.reshape(lo.shape)


def _remark(method: RangeMethod, replaced: NDArray[np.bool_], excess: Float64s) -> tuple[str, bool]:
    """A note on the ranges, and whether it says that they are poor."""
    poor = excess > _TOLERATED
    if poor.any():
        share = "" if poor.size == 1 else f" of {int(poor.sum())} of {poor.size} ranges"
        decibel = 10 * np.log10(excess.max())
        return f"the squared error{share} is up to {decibel:.0f} dB above that of the full range", True
    if replaced.any():
        share = "" if replaced.size == 1 else f"{int(replaced.sum())} of {replaced.size} ranges have "
        lack = f"{share or 'it has '}fewer than {ENOUGH_VALUES} values other than zero, too few for {method.name!r}"
        return f"{lack}: the least mean squared error is taken", False
    return "", False


def _check_counts(bounds: MinMax, site: str) -> None:
    if bounds.count.all():
        return
    index = tuple(int(i) for i in np.argwhere(bounds.count == 0)[0])
    where = f" for index {index if len(index) > 1 else index[0]}" if index else ""
    nans, infs = int(bounds.nan_count[index]), int(bounds.inf_count[index])
    raise CalibrationError(
        site,
        f"calibration saw no finite value{where} ({nans} NaN, {infs} infinite)",
        "feed calibration data that reaches this site, or leave the site in float",
    )


def choose_range_of(x: Array, spec: QuantSpec, granularity: Granularity = PER_TENSOR, site: str = "tensor") -> Range:
    """``lo`` and ``hi`` of :func:`explained_range_of`."""
    chosen = explained_range_of(x, spec, granularity, site)
    return chosen.lo, chosen.hi


def on_grid(x: Array, spec: QuantSpec, site: str = "tensor") -> Array:
    """A weight rounded to nearest under ``spec``, as a simulation computes with it, float32.

    Args:
        x: the weight.
        spec: format, symmetry, method and concrete granularity.
        site: name for error messages.
    """
    wide = np.ascontiguousarray(x, np.float32)
    encoding = encode(*choose_range_of(wide, spec, spec.granularity, site), spec, spec.granularity, site)
    return np.asarray(fake_quantize(wide, encoding))


def explained_range_of(
    x: Array, spec: QuantSpec, granularity: Granularity = PER_TENSOR, site: str = "tensor"
) -> ChosenRange:
    """The range of a stored tensor, such as a weight, by the method of ``spec``.

    Takes statistics and range of a few groups at a time, so memory stays bounded with thousands of channels
    or blocks. Groups of up to 1024 elements are searched value by value instead of through a histogram, and
    groups of up to 8192 (4096 below 8 bits) where ``mse`` or ``sqnr`` meets a symmetric integer grid, whose
    search ends early. One thread takes 70 ms for ResNet-18 with 8 bits, 6 ns per weight; groups of 64, tails
    and outliers make that up to 40 ns, 4 bits up to 90.

    Args:
        x: numpy array or torch tensor, any real dtype.
        spec: format, symmetry and method.
        granularity: concrete (axes filled in).
        site: name for error messages.

    Returns:
        Ranges of parameter shape P of ``granularity`` for ``x``.

    Raises:
        CalibrationError, ConfigError, GranularityError: as :func:`explained_range` and the granularity.
    """
    x = as_array(x)
    shape = granularity.param_shape(tuple(x.shape), site)
    rows = rows_of(x, granularity)
    bounds = row_minmax(rows, shape)
    _check_counts(bounds, site)
    method = find_range_method(spec.method)
    if needs(method) == "minmax" or 0 in rows.shape:
        return ChosenRange(*minmax_range(bounds, spec.format, spec.symmetry))
    if method.name == "entropy" and rows.shape[1] < ENOUGH_VALUES:
        chosen = explained_range_of(x, replace(spec, method=RangeMethod("mse")), granularity, site)
        return replace(chosen, remark=_remark(method, np.ones(shape, np.bool_), np.ones(shape))[0])
    small = rows.shape[1] <= _most_samples(spec)
    step = max(1, (BUDGET << 3) // rows.shape[1]) if small else 64
    settled = _settled(spec, bounds)
    parts = []
    for first in range(0, rows.shape[0], step):
        part = rows[first : first + step]
        stats = _row_samples(part) if small else row_histogram(part, (part.shape[0],))
        found = _found(stats, settled, method, site)
        parts.append((found.lo, found.hi, found.replaced, found.excess))
    lo, hi, replaced, excess = (np.concatenate(of_parts).reshape(shape) for of_parts in zip(*parts, strict=True))
    return ChosenRange(lo, hi, *_remark(method, replaced, excess))


def _most_samples(spec: QuantSpec) -> int:
    """Size of the largest groups that are searched value by value."""
    searched = find_range_method(spec.method).name in ("mse", "sqnr")
    nested = spec.symmetry != "asymmetric" and not isinstance(spec.format, FloatFormat)
    if not (searched and nested):
        return _SAMPLES
    return _NESTED_SAMPLES if spec.format.bits >= 8 else _NESTED_SAMPLES_BELOW_8_BITS


def _settled(spec: QuantSpec, bounds: MinMax) -> QuantSpec:
    """``spec`` with the choice between signed and unsigned, which depends on all groups, already made."""
    if spec.symmetry != "unsigned_symmetric" or not (bounds.lo < 0).any():
        return spec
    return replace(spec, symmetry="symmetric")


def _row_samples(rows: Array) -> Samples:
    bounds = row_minmax(rows, (rows.shape[0],))
    narrow = dtype_name(rows) in ("float16", "bfloat16", "float32")
    values: Floats = to_numpy(rows).astype(np.float32 if narrow else np.float64, copy=False)
    if bounds.inf_count.any():
        values = np.where(np.isfinite(values), values, np.nan)
    return Samples(values, bounds)


def is_contradicted(seen: Energy, fixed: Array, observed: Array) -> NDArray[np.bool_]:
    """Whether data use too few steps of a fixed range, and would have enough on a range of their own.

    Rounding to steps ``s`` makes noise of the mean square ``s ** 2 / 12``. Data contradict a fixed range where this noise is
    above a thousandth of their mean square (30 dB; on a range of their own, 8 bits leave normal values 39 dB), and is more
    than four times (6 dB) what their own range has.

    Args:
        seen: statistics of the data, parameter shape P.
        fixed, observed: scales of the two grids, shape P.
    """
    noise = np.square(np.asarray(fixed, np.float64)) / 12
    mean_square = seen.energy / np.maximum(seen.count, 1)
    gained = noise > 4 * np.square(np.asarray(observed, np.float64)) / 12
    return np.asarray((mean_square < _DROWNED * noise) & (mean_square > 0) & gained)


# ---- the methods


def minmax_range(stats: MinMax | Histogram | Samples, fmt: Format, symmetry: Symmetry) -> Range:
    """The exact bounds of the data."""
    bounds = bounds_of(stats)
    return bounds.lo.copy(), bounds.hi.copy()


def percentile_range(
    stats: Histogram | Samples, fmt: Format, symmetry: Symmetry, *, percentile: float = 100.0
) -> Range:
    """The values that ``100 - percentile`` and ``percentile`` percent of the data lie below.

    Interpolates linearly within a bin and never leaves the exact bounds, so 100 gives these bounds.

    Args:
        stats: the data.
        fmt, symmetry: not used.
        percentile: 50 to 100; 99.99 cuts 0.01 % at either end.
    """
    quantile = percentile / 100
    if isinstance(stats, Samples):
        return _sample_quantile(stats, 1 - quantile), _sample_quantile(stats, quantile)
    return _histogram_quantile(stats, 1 - quantile), _histogram_quantile(stats, quantile)


def sqnr_range(stats: Histogram | Samples, fmt: Format, symmetry: Symmetry, *, gamma: float = 3.0) -> Range:
    """The range with the least quantization noise, clipped values weighing ``gamma`` times.

    Symmetric grids try 101 scales up to the one of the full range, asymmetric grids 17 scales times 21 positions of
    the shorter range within the full one (or 357 scales where all data lies on one side of zero), grids whose zero
    point is a real number 20 scales times 14 positions. The full range is the first candidate and wins ties, so the
    result is never worse than ``minmax`` by this measure.

    The noise of a histogram is exact for data spread evenly within each bin: between two edges the squared
    error has the antiderivative ``k s^3 / 12 + r^3 / 3`` with ``k = clip(rint(v / s))`` and ``r = v - k s``,
    which no bin, however wide, can alias with the grid. Zeros, which every grid represents, are left out.

    Values at hand are tried on the largest grid first. Where every grid lies inside the one before it, a
    search ends as soon as the clipped values alone cost more than the best grid so far: with 8 bits after a
    few of the 101 scales, without a change to the result. Up to 8 bits the comparison is made in float32, so
    that a grid may win whose noise is larger than the least by up to 0.01 %.

    Args:
        stats: the data.
        fmt, symmetry: the grid to be searched.
        gamma: weight of the squared error of clipped values; 1 makes it the mean squared error.
    """
    bounds = bounds_of(stats)
    grid_fmt = grid(fmt, symmetry, bounds.lo)
    if isinstance(grid_fmt, FloatFormat) and not grid_fmt.scaled:
        return minmax_range(stats, fmt, symmetry)
    shape = bounds.lo.shape
    full = (bounds.lo, bounds.hi) if symmetry == "float_zero_point" else checked_bounds(bounds.lo, bounds.hi)
    flat = (full[0].reshape(-1), full[1].reshape(-1))
    search = NoiseSearch(*candidate_grids(grid_fmt, symmetry, *flat), grid_fmt, symmetry, gamma)
    best = search.by_value(stats) if isinstance(stats, Samples) else search.by_histogram(stats)
    lo, hi = search.ends(best)
    kept = best == 0  # the full range is returned as it is, not snapped to its grid
    return np.where(kept, flat[0], lo).reshape(shape), np.where(kept, flat[1], hi).reshape(shape)


def mse_range(stats: Histogram | Samples, fmt: Format, symmetry: Symmetry, *, gamma: float = 1.0) -> Range:
    """The range with the least mean squared error: :func:`sqnr_range` with clipped values weighing once."""
    return sqnr_range(stats, fmt, symmetry, gamma=gamma)


def hqq_range(
    stats: Histogram | Samples, fmt: Format, symmetry: Symmetry, *, lp_norm: float = 0.7, beta: float = 10.0,
    iterations: float = 20.0,
) -> Range:  # fmt: skip
    """The zero points of half-quadratic quantization, for weights whose zero points are real numbers.

    Scales stay those of the full range. What values differ by from their grid is taken apart into a sparse part, the
    proximal operator of the ``lp`` norm, and a dense part, whose mean in steps is what the zero point moves by; the
    strength ``beta`` grows by 1 % from one iteration to the next. Every row keeps its best zero point by the mean
    absolute error. :func:`mse_range`, which also moves scales and searches all places, mostly leaves less: the
    perplexity of a small Llama with 4 bits in groups of 32 goes from 3.56 to 3.75 and not to 3.84.

    Args:
        stats: the data; values at hand, not a histogram.
        fmt, symmetry: the grid; other symmetries than ``float_zero_point`` have nothing that could move: the full range.
        lp_norm: of the sparse part, below 1.
        beta: strength of the first iteration.
        iterations: at most.

    Reference: Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models"; constants of their code.
    """
    bounds = bounds_of(stats)
    if symmetry != "float_zero_point" or not isinstance(stats, Samples) or isinstance(fmt, FloatFormat):
        return minmax_range(stats, fmt, symmetry)
    scales, lowest, _ = grids_of(fmt, symmetry, bounds.lo.reshape(-1, 1), bounds.hi.reshape(-1, 1))
    values = stats.values.reshape(len(scales), -1) / scales
    zero = -lowest if fmt.bits != 4 else np.rint(-lowest)  # as their code, for 4 bits
    best, least = -lowest, np.full(lowest.shape, np.inf)
    for _ in range(int(iterations)):
        codes = np.clip(np.rint(values + zero), 0, fmt.steps)
        error = (values - codes + zero) * scales
        cost = np.nanmean(np.abs(error), axis=1, keepdims=True)
        best, least = np.where(cost < least, zero, best), np.minimum(cost, least)
        size = np.abs(error)
        with np.errstate(divide="ignore", invalid="ignore"):
            sparse = np.sign(error) * np.maximum(size - np.where(size > 0, size, 1.0) ** (lp_norm - 1) / beta, 0)
        zero = np.nanmean(codes - values + sparse / scales, axis=1, keepdims=True)
        beta *= 1.01
    shape = bounds.lo.shape
    return (-best * scales).reshape(shape), ((fmt.steps - best) * scales).reshape(shape)


def entropy_range(stats: Histogram | Samples, fmt: Format, symmetry: Symmetry) -> Range:
    """The threshold whose quantized distribution diverges least from the data's (Kullback-Leibler).

    The magnitudes below a threshold ``T`` are merged into as many levels as the grid has on that side; data
    beyond ``T`` counts into the last bin of the reference. About 100 thresholds are tried; the result is
    ``[-T, T]`` within the exact bounds. Grids with as many levels as the histogram has bins keep the full
    range.

    Zeros, which every grid holds, are left out. The paper's method knows nothing of how far a value is moved:
    values crowded near zero, or far beyond the others, make it clip what matters. So thresholds with more than
    2.5 times the squared error of the full range (4 dB) are left out, too, and ranges with fewer than 2048 values other
    than zero, which leave a histogram with holes, are those of :func:`mse_range`.

    Reference: Migacz 2017, "8-bit inference with TensorRT".
    """
    if isinstance(stats, Samples):
        if not _carry_entropy(stats).any():
            return mse_range(stats, fmt, symmetry)
        flat = row_histogram(stats.values.reshape(-1, stats.values.shape[-1]), (stats.bounds.lo.size,))
        shape = stats.bounds.lo.shape
        stats = Histogram(
            flat.counts.reshape(*shape, -1), flat.exponent.reshape(shape), flat.zeros.reshape(shape), stats.bounds
        )
    lo, hi = stats.bounds.lo, stats.bounds.hi
    chosen = grid(fmt, symmetry, lo)
    if isinstance(chosen, FloatFormat) and not chosen.scaled:
        return minmax_range(stats, fmt, symmetry)
    carried = _carry_entropy(stats)
    levels = _levels(fmt, symmetry, lo, hi).reshape(-1)
    flat_lo, flat_hi, flat_exponent = lo.reshape(-1), hi.reshape(-1), stats.exponent.reshape(-1)
    counts, zeros = stats.counts.reshape(lo.size, -1), stats.zeros.reshape(-1)
    low_end, high_end = flat_lo.copy(), flat_hi.copy()
    for count in np.unique(levels[levels < HALF_BINS]):
        of_count = np.flatnonzero((levels == count) & carried.reshape(-1))
        for part in row_chunks(of_count.size, max(16 * HALF_BINS, 128 * int(count))):
            rows = of_count[part]
            magnitudes = counts[rows, HALF_BINS - 1 :]
            magnitudes[:, 1:] += counts[rows, HALF_BINS - 2 :: -1]
            magnitudes[:, 0] -= zeros[rows]
            sizes = _thresholds(int(count))
            threshold = np.ldexp(np.float64(sizes), flat_exponent[rows, None].astype(np.int32))
            lows = np.maximum(flat_lo[rows, None], np.minimum(-threshold, flat_hi[rows, None]))
            highs = np.minimum(flat_hi[rows, None], np.maximum(threshold, flat_lo[rows, None]))
            search = NoiseSearch(*grids_of(chosen, symmetry, lows, highs), chosen, symmetry, 1.0)
            noise = search.noise(Histogram(counts[rows], flat_exponent[rows], zeros[rows], stats.bounds))
            divergence = _divergences(magnitudes, sizes, int(count))
            divergence = np.where(noise <= _ENTROPY_TOLERATED * noise[:, :1], divergence, np.inf)
            # what only rounding tells apart is a tie, which goes to the widest
            best = (divergence <= divergence.min(axis=1, keepdims=True) + 1e-12).argmax(axis=1)
            low_end[rows], high_end[rows] = lows[np.arange(rows.size), best], highs[np.arange(rows.size), best]
    if not carried.all():
        least = mse_range(stats, fmt, symmetry)
        low_end, high_end = (
            np.where(carried.reshape(-1), end, other.reshape(-1))
            for end, other in ((low_end, least[0]), (high_end, least[1]))
        )
    return low_end.reshape(lo.shape), high_end.reshape(lo.shape)


def _checked_row(name: str, row: Any) -> RangeRow:
    """Check a range method of a plug-in: a :class:`RangeRow`, or a function that reads histograms."""
    found = RangeRow(row, "histogram") if inspect.isfunction(row) else row
    if not isinstance(found, RangeRow) or found.needs not in ("minmax", "histogram"):
        raise ConfigError(
            f"range method {name!r}",
            f"{row!r:.100} is no range method",
            "register a function (stats, fmt, symmetry) -> (lo, hi), or a RangeRow(function, needs, options)",
        )
    signature = inspect.signature(found.function)
    try:
        signature.bind(None, None, "symmetric", **dict.fromkeys(found.options, 0.0))
    except TypeError as error:
        wanted = ", ".join(["stats, fmt, symmetry", *found.options])
        problem = f"its function takes {signature}"
        raise ConfigError(f"range method {name!r}", problem, f"let it take {wanted}") from error
    return found


RANGE_METHODS: Registry[RangeRow] = Registry(
    "range_methods",
    {
        "minmax": RangeRow(minmax_range, "minmax"),
        "percentile": RangeRow(percentile_range, "histogram", {"percentile": (100.0, 50.0, 100.0)}),
        "mse": RangeRow(mse_range, "histogram", {"gamma": (1.0, 0.0, 1e6)}),
        "sqnr": RangeRow(sqnr_range, "histogram", {"gamma": (3.0, 0.0, 1e6)}),
        "entropy": RangeRow(entropy_range, "histogram"),
        "hqq": RangeRow(
            hqq_range,
            "histogram",
            {"lp_norm": (0.7, 0.05, 1.0), "beta": (10.0, 1e-3, 1e6), "iterations": (20.0, 1.0, 1e4)},
        ),
    },
    _checked_row,
)

_ALIASES = {
    "tf": "minmax",
    "min_max": "minmax",
    "post_training_tf": "minmax",
    "training_range_learning_with_tf_init": "minmax",
    "tf_enhanced": "sqnr",
    "post_training_tf_enhanced": "sqnr",
    "training_range_learning_with_tf_enhanced_init": "sqnr",
    "post_training_percentile": "percentile",
    "kl": "entropy",
}


# ---- percentile


def _histogram_quantile(stats: Histogram, quantile: float) -> Float64s:
    lo, hi, width = stats.bounds.lo, stats.bounds.hi, np.ldexp(1.0, stats.exponent.astype(np.int32))
    below = np.cumsum(stats.counts, axis=-1)
    target = quantile * below[..., -1]
    index = np.minimum((below < target[..., None]).sum(-1), stats.counts.shape[-1] - 1)
    inside = np.take_along_axis(stats.counts, index[..., None], -1)[..., 0]
    before = np.take_along_axis(below, index[..., None], -1)[..., 0] - inside
    share = np.clip((target - before) / np.maximum(inside, 1), 0, 1)
    number = index - (HALF_BINS - 1)
    left = np.clip((number - (number <= 0)) * width, lo, hi)
    right = np.clip((number + (number >= 0)) * width, lo, hi)
    return np.asarray(left * (1 - share) + right * share)


def _sample_quantile(stats: Samples, quantile: float) -> Float64s:
    ordered = np.sort(stats.values, axis=-1)  # NaN sorts to the end, past every finite rank
    rank = quantile * (stats.bounds.count - 1)
    ends = (
        np.take_along_axis(ordered, end(rank).astype(np.int64)[..., None], -1)[..., 0] for end in (np.floor, np.ceil)
    )
    left, right = ends
    share = rank - np.floor(rank)
    return np.asarray(left * (1 - share) + right * share)


# ---- entropy


def _levels(fmt: Format, symmetry: Symmetry, lo: Float64s, hi: Float64s) -> NDArray[np.int64]:
    """Levels that magnitudes can have, shape P: all codes if all lie on the side of the data, else half."""
    half = np.full(lo.shape, 1 << (fmt.bits - 1))
    chosen = grid(fmt, symmetry, lo)
    if isinstance(chosen, FloatFormat) or (symmetry != "asymmetric" and chosen.signed):
        return half
    return np.asarray(np.where((lo >= 0) | (hi <= 0), 2 * half, half))


def _carry_entropy(stats: MinMax | Histogram | Samples) -> NDArray[np.bool_]:
    """Whether there are enough values for a histogram without gaps, shape P."""
    if isinstance(stats, Samples):
        return np.asarray((np.nan_to_num(stats.values) != 0).sum(-1) >= ENOUGH_VALUES)
    zeros = stats.zeros if isinstance(stats, Histogram) else 0
    return np.asarray(bounds_of(stats).count - zeros >= ENOUGH_VALUES)


def _thresholds(levels: int) -> NDArray[np.int64]:
    """The numbers of bins that are tried, the largest first."""
    first = max(levels, HALF_BINS // 16)
    return np.arange(HALF_BINS, first - 1, -max(1, (HALF_BINS - first) // 100))


def _divergences(magnitudes: NDArray[np.int64], sizes: NDArray[np.int64], levels: int) -> Float64s:
    """KL(reference || merged into ``levels``), in nats, of every row and number of bins kept.

    The logarithm of a quotient is taken apart: what the reference adds comes from sums over bins that are made once, and all bins
    of a level have one merged mass, so that a threshold costs its levels and not its bins.
    """
    mass, filled, own = (_sums_before(values) for values in (magnitudes, magnitudes > 0, _times_log(magnitudes)))
    total, kept, last = mass[:, -1:], mass[:, sizes], magnitudes[:, sizes - 1]
    edges = np.arange(levels + 1) * sizes[:, None] // levels
    held = np.diff(mass[:, edges], axis=2)
    level = _log(held / np.maximum(np.diff(filled[:, edges], axis=2), 1))
    clipped = total - kept  # counts into the last bin
    # a last bin that holds only clipped data has no mass on the grid: a small one keeps the divergence finite
    bare = (last == 0) & (clipped > 0)
    reference = own[:, sizes - 1] + _times_log(last + clipped)
    merged = (held * level).sum(2) + clipped * np.where(bare, np.log(1e-4), level[:, :, -1])
    return np.asarray((reference - merged) / total + np.log((kept + 1e-4 * bare) / total))


def _sums_before(values: NDArray[Any]) -> Float64s:
    """Sums over the first 0, 1, ... of every row."""
    return np.asarray(np.pad(np.cumsum(values, axis=1), ((0, 0), (1, 0))), np.float64)


def _log(values: NDArray[Any]) -> Float64s:
    """Natural logarithms; zero for zeros."""
    found: Float64s = np.log(values, out=np.zeros(values.shape), where=values > 0)
    return found


def _times_log(values: NDArray[Any]) -> Float64s:
    found: Float64s = values * _log(values)
    return found
