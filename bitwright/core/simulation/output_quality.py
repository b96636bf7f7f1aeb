"""The parts of a model's outputs that are rated separately: every output, and slices of unlike scales within one.

A detector joins boxes in pixels and probabilities in one tensor; a hidden state has a few channels a hundred times as large as
the others. One sum of squares over such a tensor is that of its large part, so noise that erases the small part is not seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_APART = 10.0  # ratio of root mean squares between neighbours in size from which on slices are of unlike scales
_VALUES = 16  # numbers that a slice needs at least: the scale of fewer is chance
_LEAST = 1e-6  # of the largest scale: what is smaller is rounding of float32
_SHOWN = 3  # ranges of indices that a name lists
_MOST_PARTS = 8  # of one output


@dataclass(frozen=True)
class OutputPart:
    """A part of the outputs with one scale.

    Attributes:
        output: index of the output.
        name: of the output, with the slices where it is divided: ``output0[:, 4:84]``.
        axis: along which the output is divided; ``None`` for a whole output.
        indices: of its slices.
    """

    output: int
    name: str
    axis: int | None = None
    indices: tuple[int, ...] = ()

    def of(self, array: Array) -> Array:
        """The values of the part in an output."""
        return array if self.axis is None else np.take(array, self.indices, self.axis)


def is_judged(wanted: Array, found: Array) -> bool:
    """Whether an output can be compared: numbers of floating point, of a shape that does not depend on rounded values."""
    return wanted.dtype.kind == "f" and wanted.shape == found.shape


def one_of_runs(arrays: Sequence[Array]) -> Array:
    """Join the results of all runs of one operator: along the axes after the channels, or flattened.

    >>> one_of_runs([np.zeros((2, 3, 8, 8)), np.zeros((2, 3, 4, 4))]).shape
    (2, 3, 80)
    """
    if len(arrays) == 1:
        return arrays[0]
    alike = len({a.shape[:2] for a in arrays}) == 1 and all(a.ndim > 2 for a in arrays)
    flat = [a.reshape(*a.shape[:2], -1) if alike else a.reshape(1, -1) for a in arrays]
    return np.concatenate(flat, -1) if flat else np.zeros(0)


@dataclass(frozen=True)
class RowOrder:
    """The choice that orders the rows of an output.

    Attributes:
        axis: of the rows.
        indices: of what was chosen, ``[samples, rows]``, each once in a sample.
    """

    axis: int
    indices: Array


def places_of(order: Array, other_order: Array) -> tuple[Array, Array]:
    """Which rows of one run another run chose too, and at which place.

    Args:
        order, other_order: index of every row ``[samples, rows]``, each once in a sample.

    >>> places_of(np.array([[4, 5, 6]]), np.array([[6, 8, 4]]))
    (array([[ True, False,  True]]), array([[2, 0, 0]]))
    """
    hit = order[:, :, None] == other_order[:, None, :]
    return hit.any(2), hit.argmax(2)


def matched_rows(one: Array, other: Array, both: Array, at: Array, axis: int) -> tuple[Array, Array]:
    """Rows of two runs that were chosen by the same index, in the order of the first; zero where only one run chose it.

    Args:
        one, other: tensors of one shape, with samples on the first axis.
        both, at: as :func:`places_of` gives them.
        axis: of the rows.

    >>> rows, places = np.array([[[1.0], [2.0], [3.0]]]), places_of(np.array([[4, 5, 6]]), np.array([[6, 8, 4]]))
    >>> matched_rows(rows, np.array([[[3.1], [9.0], [1.1]]]), *places, 1)[1][0, :, 0]
    array([1.1, 0. , 3.1])
    """
    first, second = (np.moveaxis(array, axis, 1) for array in (one, other))
    wide = (slice(None), slice(None), *(None,) * (one.ndim - 2))
    second = np.take_along_axis(second, at[wide], 1)
    kept = both[wide]
    own, found = (np.moveaxis(np.where(kept, array, array.dtype.type(0)), 1, axis) for array in (first, second))
    return own, found


def noise_and_signal(wanted: Array, found: Array, samples: int = 1) -> tuple[Array, Array]:
    """Sums of squares of the error and of the values, for each row of the first axis, which samples are.

    What is not finite in float is left out. Of an array of one axis all numbers are one row, unless they are one for each of
    the ``samples`` of the batch.
    """
    finite = np.isfinite(wanted)
    reference = np.where(finite, wanted, 0.0).astype(np.float64)
    error = np.where(finite, reference - found, 0.0)
    rows = wanted.shape[0] if wanted.ndim > 1 or wanted.shape == (samples,) else 1
    return (
        np.square(error).reshape(rows, -1).sum(1) if error.size else np.zeros(rows),
        np.square(reference).reshape(rows, -1).sum(1) if error.size else np.zeros(rows),
    )


def varying_share(arrays: Sequence[Array], samples: Sequence[int]) -> float | None:
    """Share of the sum of squares of an output that differs between samples: its variance per element, over its mean square.

    What is the same for all samples, such as the offset of a regression or the anchors of a detector, tells nothing of them.

    Args:
        arrays: the output for each batch, with samples on the first axis.
        samples: in each batch.

    Returns:
        The unbiased estimate; ``None`` for fewer than two samples, or where shapes differ or the first axis is not theirs.

    >>> round(varying_share([np.array([[99.0], [101.0]])], [2]), 5)
    0.0002
    """
    rows = [a for a, n in zip(arrays, samples, strict=True) if a.ndim and len(a) == n]
    count = sum(map(len, rows))
    if count < 2 or len(rows) < len(arrays) or len({a.shape[1:] for a in rows}) > 1:
        return None
    y = np.concatenate(rows).reshape(count, -1).astype(np.float64)
    y = np.where(np.isfinite(y), y, 0.0)
    signal = np.square(y).sum()
    return float(np.square(y - y.mean(0)).sum() / signal * count / (count - 1)) if signal else None


def parts_of(batches: Sequence[Sequence[Array]], names: Sequence[str] = ()) -> list[OutputPart]:
    """Divide the outputs of a model into parts that are rated separately.

    An output is divided along the axis, other than the first, whose slices differ most in scale: at a gap of a factor of 10
    between neighbours in the order of their root mean squares. Slices whose values all lie in [0, 1] are one part whatever
    their scales: the probabilities of rare and of frequent classes belong together.

    Args:
        batches: the float model's outputs, in the same order for every batch.
        names: of the outputs; ``output[i]`` by default.

    >>> boxes, scores = np.full((2, 4, 50), 300.0), np.full((2, 3, 50), 0.5)
    >>> [part.name for part in parts_of([[np.concatenate([boxes, scores], 1)]], ["y"])]
    ['y[:, 0:4]', 'y[:, 4:7]']
    """
    parts = []
    for i, arrays in enumerate(zip(*batches, strict=True)):
        if any(a.dtype.kind != "f" for a in arrays):
            continue
        name = names[i] if i < len(names) else f"output[{i}]" if len(batches[0]) > 1 else "output"
        divided = _divided(arrays)
        if divided is None:
            parts.append(OutputPart(i, name))
            continue
        axis, groups = divided
        parts += [OutputPart(i, f"{name}[{':, ' * axis}{_ranges(g)}]", axis, g) for g in groups]
    return parts


def _divided(arrays: Sequence[Array]) -> tuple[int, list[tuple[int, ...]]] | None:
    """The axis along which an output has slices of unlike scales, and these; ``None`` where it has none."""
    found, spread = None, 1.0
    for axis in range(1, min(a.ndim for a in arrays)):
        length = arrays[0].shape[axis]
        same = all(a.ndim == arrays[0].ndim and a.shape[axis] == length for a in arrays)
        if not same or length < 2 or sum(a.size for a in arrays) < _VALUES * length:
            continue
        groups, ratio = _groups(*_scales(arrays, axis))
        if ratio > spread:
            found, spread = (axis, groups), ratio
    return found


def _scales(arrays: Sequence[Array], axis: int) -> tuple[Array, Array]:
    """Root mean square of each slice, and whether all its values lie in [0, 1]; what is not finite counts as 0."""
    length = arrays[0].shape[axis]
    squares, count, unit = np.zeros(length), 0, np.ones(length, bool)
    for array in arrays:
        rows = np.moveaxis(array, axis, 0).reshape(length, -1).astype(np.float64)
        rows = np.where(np.isfinite(rows), rows, 0.0)
        squares = squares + np.square(rows).sum(1)
        count += rows.shape[1]
        unit = unit & ((rows >= 0) & (rows <= 1)).all(1)
    return np.sqrt(squares / max(count, 1)), unit


def _groups(scales: Array, unit: Array) -> tuple[list[tuple[int, ...]], float]:
    """Slices of like scale, the first index of each group in order, and the ratio of the largest scale to the smallest."""
    order = np.argsort(scales, kind="stable")
    small = scales[order] <= _LEAST * scales.max(initial=0.0)
    silent, order = order[small].tolist(), order[~small]  # no signal to lose: their noise counts with the largest
    if not len(order):  # nothing but zeros, or nothing finite
        return [], 1.0
    groups: list[list[int]] = []
    for i, before in zip(order, [None, *order[:-1]], strict=True):
        alike = before is not None and (scales[i] < _APART * scales[before] or bool(unit[i] and unit[before]))
        groups[-1].append(int(i)) if alike else groups.append([int(i)])
    if not 1 < len(groups) <= _MOST_PARTS:
        return [], 1.0
    groups[-1] += silent
    return sorted(tuple(sorted(g)) for g in groups), float(scales[order[-1]] / scales[order[0]])


def _ranges(indices: Sequence[int]) -> str:
    """``0:4``, or ``0:4+5+7:9+...`` for indices that do not follow each other."""
    runs = [[i for _, i in run] for _, run in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}:{run[-1] + 1}" for run in runs[:_SHOWN]]
    return "+".join(shown + ["..."] * (len(runs) > _SHOWN))


_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Quantile 0.975 of Student's t with 1 to 30 degrees of freedom."""


_FEW = 8  # batches: the samples of fewer are taken one by one


@dataclass(frozen=True)
class PartQuality:
    """Signal-to-noise ratio of a part of the outputs, over several batches.

    Attributes:
        name: of the part.
        sqnr: of all batches together, in dB.
        low, high: ends of the 95 % interval of it over data like these, in dB; ``None`` for fewer than two samples.
        worst: of the batch, or of few batches the sample, with the lowest, in dB.
        units: how many batches, or of few batches samples, the interval is taken over.
        noise: sum of squares of the error of each of them.
        varying: share of the signal that differs between samples; ``None`` where it is not known (:func:`varying_share`).
    """

    name: str
    sqnr: float
    low: float | None
    high: float | None
    worst: float
    units: int
    noise: tuple[float, ...] = field(default=(), repr=False)
    varying: float | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.figure}"

    @property
    def noise_of_varying(self) -> float | None:
        """Amplitude of the noise over that of what differs between samples; ``None`` where the latter is not known."""
        if self.varying is None or math.isinf(self.sqnr):
            return None
        return math.inf if self.varying == 0 else 10 ** (-self.sqnr / 20) / math.sqrt(self.varying)

    @property
    def noise_exceeds_variation(self) -> bool:
        """Whether the noise is known to be larger than what differs between samples."""
        return (self.noise_of_varying or 0.0) > 1

    @property
    def few(self) -> bool:
        """Whether so few samples were seen that another one may lie far from all of them."""
        return self.units < _FEW

    @property
    def another(self) -> float | None:
        """Lower end of the 95 % prediction interval of one more sample, in dB; ``None`` for fewer than two samples.

        Its half width is that of the interval times ``sqrt(units + 1)`` (Hahn and Meeker 1991, Statistical Intervals, 4.7).
        """
        return None if self.low is None else self.sqnr - (self.sqnr - self.low) * math.sqrt(self.units + 1)

    @property
    def figure(self) -> str:
        """The number with its interval: ``31.2 dB (95 % interval 29.8 to 32.6)``."""
        if math.isinf(self.sqnr):
            return "equal to float" if self.sqnr > 0 else "NaN or infinite"
        if self.low is None or self.high is None:
            return f"{self.sqnr:.1f} dB (one sample: no interval)"
        return f"{self.sqnr:.1f} dB (95 % interval {self.low:.1f} to {self.high:.1f})"


def quality(
    name: str, noise: Sequence[Array], signal: Sequence[Array], varying: float | None = None
) -> PartQuality | None:
    """Quality of a part from its sums of squares per sample and batch, and its varying share; ``None`` without signal.

    The interval is that of a ratio of two sums, on the scale of its logarithm (Cochran 1977, Sampling Techniques, 6.19) with
    Student's t, so that it is wide for few batches. Batches are what varies: samples of one batch may be of one recording.
    Of fewer than eight batches the samples are taken one by one. It says how far other data *of the same kind* may lie;
    recordings of another kind may lie further.

    >>> print(quality("y", [np.array([1.0, 1.2, 0.9, 1.1])], [np.full(4, 1e3)]))
    y 29.8 dB (95 % interval 28.9 to 30.6)
    """
    if len(noise) >= _FEW:
        noise, signal = [n.sum(keepdims=True) for n in noise], [s.sum(keepdims=True) for s in signal]
    n, s = np.concatenate(noise), np.concatenate(signal)
    n, s = n[s > 0], s[s > 0]
    if not s.size:
        return None
    worst, count = float(_decibel(n / s).min()), int(s.size)
    ratio = float(n.sum() / s.sum())
    total, each = float(_decibel(np.asarray(ratio))), tuple(n.tolist())
    if count < 2 or not 0 < ratio < math.inf:
        return PartQuality(name, total, None, None, worst, count, each, varying)
    half = _half_width((n - ratio * s) / n.mean())
    return PartQuality(name, total, total - half, total + half, worst, count, each, varying)


_SURE = 0.5  # share of half an interval that a gain has at least: one standard error of the paired difference


@dataclass(frozen=True)
class Gain:
    """How much less noise one simulation makes than another on the same samples, in dB.

    Attributes:
        decibel: of all samples together.
        low, high: ends of the 95 % interval of it over data like these; ``None`` for fewer than two samples.
        deviations: share of each sample in the deviation of the gain.
    """

    decibel: float
    low: float | None = None
    high: float | None = None
    deviations: tuple[float, ...] = field(default=(), repr=False, compare=False)

    @property
    def half_width(self) -> float:
        """Half of the interval, in dB; 0 where there is none."""
        return 0.0 if self.high is None else self.high - self.decibel

    @property
    def is_doubtful(self) -> bool:
        """Whether it is a gain, of which half of the 95 % interval reaches below none."""
        return 0 < self.decibel < _SURE * self.half_width

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.decibel:+.1f} dB (one sample: no interval)"
        return f"{self.decibel:+.1f} dB (95 % interval {self.low:+.1f} to {self.high:+.1f})"


def gain(after: PartQuality, before: PartQuality) -> Gain | None:
    """Gain of a part over another rating of it; ``None`` where they are not of the same samples, or one has no noise.

    The samples are pairs, so that the interval is that of the ratio of two correlated sums (Cochran 1977, 6.19): samples that
    are hard for both simulations do not widen it.

    >>> noise, signal = np.array([1.0, 2.0, 40.0]), np.full(3, 1e3)
    >>> print(gain(quality("y", [noise / 2], [signal]), quality("y", [noise], [signal])))
    +3.0 dB (95 % interval +3.0 to +3.0)
    """
    n, reference = np.array(after.noise), np.array(before.noise)
    if n.size != reference.size or not (0 < n.sum() < math.inf and 0 < reference.sum() < math.inf):
        return None
    decibel = float(10 * np.log10(reference.sum() / n.sum()))
    if n.size < 2:
        return Gain(decibel)
    deviations = n / n.mean() - reference / reference.mean()
    half = _half_width(deviations)
    return Gain(decibel, decibel - half, decibel + half, tuple(deviations.tolist()))


def gain_of_mean(decibel: float, gains: Sequence[Gain | None], count: int) -> Gain:
    """The gain of the mean over parts, with the interval that those of the parts give.

    The same samples rate all parts, so that their deviations are averaged sample by sample. Where parts have different samples
    the mean of their half widths bounds that of the mean.

    Args:
        decibel: of the mean.
        gains: of the parts that vary; ``None`` and no interval where one cannot be computed.
        count: of the parts, with those that do not vary.

    >>> parts = [Gain(1.0, 0.0, 2.0, (0.4, -0.4, 0.4, -0.4)), Gain(1.0, 0.0, 2.0, (-0.4, 0.4, -0.4, 0.4))]
    >>> print(gain_of_mean(1.0, parts, 2))
    +1.0 dB (95 % interval +1.0 to +1.0)
    """
    known = [part for part in gains if part is not None and part.deviations]
    if not math.isfinite(decibel) or not known or len(known) < len(gains):
        return Gain(decibel)
    if len({len(part.deviations) for part in known}) == 1:
        half = _half_width(np.sum([part.deviations for part in known], 0) / count)
    else:
        half = sum(part.half_width for part in known) / count
    return Gain(decibel, decibel - half, decibel + half)


def _half_width(deviations: Array) -> float:
    """Half of the 95 % interval of a ratio in dB, from each unit's share of the deviation of its logarithm."""
    count = deviations.size
    t = _T[count - 2] if count - 2 < len(_T) else 1.96
    return 10 / math.log(10) * t * math.sqrt(float(np.square(deviations).sum()) / (count * (count - 1)))


def _decibel(ratio: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.where(np.isnan(ratio), -np.inf, -10 * np.log10(np.where(np.isnan(ratio), 1.0, ratio)))
