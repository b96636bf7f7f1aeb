"""Search the range with the least quantization noise: candidate grids, and their noise on values or on a histogram.

Searches work in units of the histogram's bin width, where nothing over- or underflows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.compiled.loops import Loops, loops
from bitwright.core.numerics.affine import checked_bounds, choose_float_zero_point, choose_qparams, round_to_float
from bitwright.core.numerics.formats import FloatFormat, Format, IntFormat
from bitwright.core.numerics.spec import Symmetry
from bitwright.core.numerics.statistics import HALF_BINS, Histogram, Samples, histogram_exponent

Float64s = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]
Range = tuple[Float64s, Float64s]

_POOL = 8  # fine bins per bin of a search: 256 on either side of zero
BUDGET = 1 << 17  # numbers per temporary array of a search, about a second-level cache
_SCANNED = 1 << 16  # values of all rows that are scanned together
_BLOCK = 1 << 11  # values of one row times candidates in one block of a scan
_SYMMETRIC_STEPS = 101
_ASYMMETRIC_STEPS, _POSITIONS = 17, 21
_FREE_STEPS, _FREE_POSITIONS = 19, 14  # of grids whose zero may lie between two codes


class _Bins:
    """Bins of a search, ``pool`` fine bins each.

    ``edges`` are in fine bin widths, with fine bin 0 kept apart: ..., -16, -8, -1, 0, 1, 8, 16, ... for a pool of 8.
    """

    def __init__(self, pool: int) -> None:
        self.pool = pool
        half = np.unique(np.concatenate([[1.0], pool * np.arange(1.0, HALF_BINS // pool + 1)]))
        self.edges: Float64s = np.concatenate([-half[::-1], [0.0], half])


_POOLED, _FINE = _Bins(_POOL), _Bins(1)


def candidate_grids(fmt: Format, symmetry: Symmetry, lo: Float64s, hi: Float64s) -> tuple[Float64s, Float64s, Float64s]:
    """Scales, lowest and highest codes (counted from zero) of all candidates, each ``(rows, candidates)``.

    The first candidate is the grid of the full range ``[lo, hi]``.
    """
    if symmetry == "float_zero_point":
        return _free_grids(fmt, lo, hi)
    scale, _ = choose_qparams(lo, hi, fmt, symmetric=symmetry != "asymmetric")
    full = scale.astype(np.float64)[:, None]
    if isinstance(fmt, FloatFormat) or symmetry != "asymmetric":
        scales = full * _descending(_SYMMETRIC_STEPS)
        ends = (-fmt.max, fmt.max) if isinstance(fmt, FloatFormat) else (fmt.qmin, fmt.qmax)
        return scales, np.full_like(scales, ends[0]), np.full_like(scales, ends[1])
    two_sided = ((lo < 0) & (hi > 0))[:, None]
    ratio = np.repeat(_descending(_ASYMMETRIC_STEPS), _POSITIONS)
    position = np.tile(np.linspace(0, 1, _POSITIONS), _ASYMMETRIC_STEPS)
    scales = full * np.where(two_sided, ratio, _descending(ratio.size))
    slack = np.maximum((hi - lo)[:, None] - fmt.steps * scales, 0)
    start = np.where(two_sided, lo[:, None] + position * slack, np.where(lo[:, None] < 0, -np.inf, 0))
    below = np.clip(np.rint(-start / scales), 0, fmt.steps)
    return scales, 0 - below, fmt.steps - below


def _free_grids(fmt: Format, lo: Float64s, hi: Float64s) -> tuple[Float64s, Float64s, Float64s]:
    """:func:`candidate_grids` whose zero may lie between two codes: every scale with its grid at several places.

    Ends may also lie a step within the range or beyond it, so that the values at both ends share their error with others.
    """
    assert isinstance(fmt, IntFormat)
    scale, _, _ = choose_float_zero_point(lo, hi, fmt)
    shrink = np.r_[1.0, np.linspace(1 + 1 / 16, 0.5, _FREE_STEPS)]
    scales = scale.astype(np.float64)[:, None] * np.repeat(shrink, _FREE_POSITIONS)
    centre = ((lo + hi) / 2)[:, None] / scales
    position = np.tile(np.r_[0.0, np.linspace(-1, 1, _FREE_POSITIONS - 1)], len(shrink))
    lowest = centre + position - fmt.steps / 2
    lowest[:, 0] = lo / scales[:, 0]  # the full range first, to the last bit
    return scales, lowest, lowest + fmt.steps


def grids_of(fmt: Format, symmetry: Symmetry, lo: Float64s, hi: Float64s) -> tuple[Float64s, Float64s, Float64s]:
    """Scales, lowest and highest codes (counted from zero) of the grids that the ranges ``[lo, hi]`` get."""
    if symmetry == "float_zero_point" and isinstance(fmt, IntFormat):
        scale, zero_point, shift = choose_float_zero_point(lo, hi, fmt)
        lowest: Float64s = fmt.qmin - (zero_point.astype(np.float64) + shift)
        return scale.astype(np.float64), lowest, lowest + fmt.steps
    scale, zero_point = choose_qparams(*checked_bounds(lo, hi), fmt, symmetric=symmetry != "asymmetric")
    if isinstance(fmt, FloatFormat):
        return scale.astype(np.float64), np.full(scale.shape, -fmt.max), np.full(scale.shape, fmt.max)
    code = zero_point.astype(np.float64)
    return scale.astype(np.float64), fmt.qmin - code, fmt.qmax - code


def _descending(steps: int) -> Float64s:
    """``1, 1 - 1/steps, ..., 1/steps``."""
    return np.arange(steps, 0, -1) / steps


@dataclass(frozen=True)
class NoiseSearch:
    """Candidate grids of every row and the noise each of them makes.

    ``scales``, ``lowest`` and ``highest`` have shape (rows, candidates); codes count from zero.
    """

    scales: Float64s
    lowest: Float64s
    highest: Float64s
    fmt: Format
    symmetry: Symmetry
    gamma: float

    def ends(self, best: NDArray[np.int64]) -> Range:
        """Ends of the grid chosen in every row."""
        rows = np.arange(best.size)
        scale = self.scales[rows, best]
        return self.lowest[rows, best] * scale, self.highest[rows, best] * scale

    def by_histogram(self, stats: Histogram) -> NDArray[np.int64]:
        """The candidate with the least noise of every row; ties go to the first."""
        exponent = stats.exponent.reshape(-1)
        counts, zeros = stats.counts.reshape(exponent.size, -1), stats.zeros.reshape(-1)
        best = np.zeros(exponent.size, np.int64)
        for rows in row_chunks(exponent.size, self.scales.shape[1] * _POOLED.edges.size):
            best[rows] = np.argmin(self._binned(counts[rows], exponent[rows], zeros[rows], rows, _POOLED), axis=1)
        return best

    def noise(self, stats: Histogram, *, fine: bool = False) -> Float64s:
        """The squared error of every candidate, summed over the data, in squared bin widths, ``(rows, candidates)``.

        ``fine``: as exactly as the histogram tells; otherwise in bins eight times as wide, as the search sees them.
        """
        exponent, bins = stats.exponent.reshape(-1), _FINE if fine else _POOLED
        counts, zeros = stats.counts.reshape(exponent.size, -1), stats.zeros.reshape(-1)
        found = np.zeros(self.scales.shape)
        for rows in row_chunks(exponent.size, self.scales.shape[1] * bins.edges.size):
            found[rows] = self._binned(counts[rows], exponent[rows], zeros[rows], rows, bins)
        return found

    def noise_of_values(self, stats: Samples) -> Float64s:
        """The squared error of every candidate, summed over the values, ``(rows, candidates)``."""
        values = stats.values.reshape(len(self.scales), -1).astype(np.float64, copy=False)
        values = values if self._free else np.nan_to_num(values)
        found = np.zeros(self.scales.shape)
        for rows in row_chunks(len(values), values.shape[1] * self.scales.shape[1]):
            found[rows] = sum(self._noise(values[rows], self.scales[rows], self.lowest[rows]))
        return found

    def _binned(
        self, counts: NDArray[np.int64], exponent: NDArray[np.int64], zeros: NDArray[np.int64], rows: slice, bins: _Bins
    ) -> Float64s:
        scales = np.ldexp(self.scales[rows], -exponent[:, None].astype(np.int32))
        grids = _Grids(scales, self.lowest[rows], self.highest[rows], self.gamma)
        mass = _pooled(counts, zeros, bins.pool)
        if isinstance(self.fmt, FloatFormat):
            return _centred_noise(mass, grids, self.fmt, bins.edges)
        return _binned_noise(mass, grids, bins.edges)

    def by_value(self, stats: Samples) -> NDArray[np.int64]:
        """The candidate with the least noise of every row; ties go to the first.

        Integer grids of up to 8 bits are compared in float32, where a value is off by at most 4e-5 steps.
        """
        exact = isinstance(self.fmt, FloatFormat) or self.fmt.bits > 8
        unit = -histogram_exponent(stats.bounds.lo, stats.bounds.hi).reshape(-1, 1).astype(np.int32)
        values = stats.values.reshape(unit.size, -1)
        best = np.zeros(unit.size, np.int64)
        for rows in row_chunks(unit.size, values.shape[1], _SCANNED):
            part = values[rows] * np.ldexp(1.0, unit[rows]).astype(values.dtype)
            if stats.bounds.count.sum() < values.size and not self._free:
                part = np.nan_to_num(part)  # zero costs nothing on these grids
            part = part.astype(np.float64 if exact else np.float32, copy=False)
            best[rows] = self._scan(part, np.ldexp(self.scales[rows], unit[rows]), self.lowest[rows])
        return best

    def _scan(self, values: Floats, scales: Float64s, lowest: Float64s) -> NDArray[np.int64]:
        """:meth:`by_value` for some rows: blocks of candidates until every row has ended.

        A block has as many candidates as the size of a row allows and a quarter of those already tried: no
        row depends on its neighbours, and few candidates are tried in vain.
        """
        size, count = values.shape[1], scales.shape[1]
        best, least = np.zeros(len(values), np.int64), np.full(len(values), np.inf)
        nested, left = _nested(scales, lowest, self._steps), np.arange(len(values))
        first, step = 0, max(1, _BLOCK // (8 * size))
        while first < count and left.size:
            block = slice(first, first + step)
            rounded, clipped = self._noise(values, scales[left, block], lowest[left, block])
            cost = rounded + clipped
            chosen = np.argmin(cost, axis=1)
            cost = cost[np.arange(left.size), chosen]
            better = cost < least[left]
            winners = left[better]
            best[winners], least[winners] = first + chosen[better], cost[better]
            going = ~nested[left] | (clipped[:, -1] <= least[left])
            if not going.all():
                left, values = left[going], values[going]
            first += step
            step = max(step, min(first // 4, _BLOCK // size))
        return best

    @property
    def _free(self) -> bool:
        """Whether zero may lie between two codes, where it has a rounding error."""
        return self.symmetry == "float_zero_point"

    @property
    def _steps(self) -> float:
        return 2 * self.fmt.max if isinstance(self.fmt, FloatFormat) else self.fmt.steps

    def _noise(self, values: Floats, scales: Float64s, lowest: Float64s) -> tuple[Float64s, Float64s]:
        """Noise of ``values`` ``(rows, n)`` inside and, weighted, beyond each grid, ``(rows, candidates)``.

        Computed in steps of the grid. Codes count from the lowest where that varies, so that all grids end at
        the same two numbers: ``clip`` is three times as fast with scalars as with arrays.
        """
        number = values.dtype.type
        codes = values[:, None, :] * (1 / scales).astype(values.dtype)[:, :, None]
        low_end = float(lowest.flat[0])
        if self.symmetry in ("asymmetric", "float_zero_point") and not isinstance(self.fmt, FloatFormat):
            codes -= lowest.astype(values.dtype)[:, :, None]
            low_end = 0.0
        inside = np.clip(codes, number(low_end), number(low_end + self._steps))
        codes -= inside
        if self._free and np.isnan(values).any():  # places without a value cost nothing
            np.nan_to_num(codes, copy=False)
            np.nan_to_num(inside, copy=False)
        clipped = np.einsum("rcn,rcn->rc", codes, codes)
        if isinstance(self.fmt, FloatFormat):
            codes = round_to_float(inside, self.fmt)
        else:
            np.rint(inside, out=codes)
        inside -= codes
        rounded = np.einsum("rcn,rcn->rc", inside, inside)
        area = np.square(scales)
        return rounded * area, clipped * (self.gamma * area)


def _nested(scales: Float64s, lowest: Float64s, steps: float) -> NDArray[np.bool_]:
    """The rows in which every candidate lies inside the one before it."""
    low_end, high_end = lowest * scales, (lowest + steps) * scales
    return np.asarray(((low_end[:, 1:] >= low_end[:, :-1]) & (high_end[:, 1:] <= high_end[:, :-1])).all(1))


class _Grids:
    """Candidate grids shaped to meet data: scale, codes and ends, each ``(rows, candidates, 1)``."""

    def __init__(self, scale: Float64s, lowest: Float64s, highest: Float64s, gamma: float) -> None:
        self.scale, self.lowest, self.highest = scale[:, :, None], lowest[:, :, None], highest[:, :, None]
        self.gamma = gamma

    def beyond(self, values: Float64s) -> Float64s:
        """How far ``values`` lie outside the grid, with their sign."""
        return np.asarray(values - np.clip(values, self.lowest * self.scale, self.highest * self.scale))

    def nearest(self, values: Float64s) -> Float64s:
        """Codes of ``values`` on an integer grid, whose codes may be counted from a number that is not whole."""
        apart = self.lowest - np.rint(self.lowest)
        return np.asarray(np.clip(np.rint(values / self.scale - apart) + apart, self.lowest, self.highest))


def _pooled(counts: NDArray[np.int64], zeros: NDArray[np.int64], pool: int) -> Float64s:
    """Counts ``(rows, bins)`` between neighbours of the edges of ``pool``, without the zeros; bin 0 is split at zero."""
    above = counts[:, HALF_BINS - 1 :].astype(np.float64)
    below = counts[:, HALF_BINS - 1 :: -1].astype(np.float64)
    around = (above[:, :1] - zeros[:, None]) / 2
    above[:, 0] = below[:, 0] = 0
    if pool == 1:
        return np.concatenate([below[:, :0:-1], around, around, above[:, 1:]], axis=1)
    positive, negative = (half.reshape(half.shape[0], -1, pool).sum(-1) for half in (above, below))
    return np.concatenate([negative[:, ::-1], around, around, positive], axis=1)


def _binned_noise(mass: Float64s, grids: _Grids, edges: Float64s) -> Float64s:
    """Noise of ``mass`` spread evenly between ``edges`` on integer grids; scales in fine bin widths.

    With the antiderivative A of the error, the sum over bins of ``density (A(right) - A(left))`` is rewritten
    as a sum over edges of ``A`` times the step of the density there: one product of matrices.
    """
    step = -np.diff(mass / np.diff(edges), axis=1, prepend=0, append=0)
    compiled = loops() if (grids.lowest == np.rint(grids.lowest)).all() else None
    area = _edge_errors(grids, edges) if compiled is None else _edge_errors_compiled(grids, edges, compiled)
    return np.asarray((area @ step[:, :, None])[:, :, 0])


def _edge_errors(grids: _Grids, edges: Float64s) -> Float64s:
    """The antiderivative of the error at every edge, ``(rows, candidates, edges)``."""
    code = grids.nearest(edges)
    rest = edges - code * grids.scale
    area = code * (grids.scale**3 / 12)
    area += rest * rest * rest / 3
    if grids.gamma != 1:
        beyond = grids.beyond(edges)
        area += beyond * beyond * beyond * ((grids.gamma - 1) / 3)
    return np.asarray(area)


def _edge_errors_compiled(grids: _Grids, edges: Float64s, compiled: Loops) -> Float64s:
    """:func:`_edge_errors`, bit for bit, in one compiled pass."""
    area = np.empty((*grids.scale.shape[:2], edges.size))
    flat = (part.reshape(-1) for part in (grids.scale, grids.lowest, grids.highest, grids.scale**3 / 12))
    compiled.edge_errors(edges, *flat, (grids.gamma - 1) / 3, area.reshape(-1, edges.size))
    return area


def _centred_noise(mass: Float64s, grids: _Grids, fmt: FloatFormat, edges: Float64s) -> Float64s:
    """Noise of ``mass`` in the middle of each bin on float grids; scales in fine bin widths."""
    centres = ((edges[1:] + edges[:-1]) / 2)[None, :]
    noise = np.square(centres - round_to_float(centres / grids.scale, fmt) * grids.scale)
    if grids.gamma != 1:
        noise += (grids.gamma - 1) * np.square(grids.beyond(centres))
    return np.asarray((noise @ mass[:, :, None])[:, :, 0])


def row_chunks(rows: int, numbers_per_row: int, numbers: int = BUDGET) -> Iterator[slice]:
    """Slices of ``rows`` rows of which each keeps a temporary array below ``numbers`` numbers."""
    step = max(1, numbers // numbers_per_row)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))
