"""What the values at a quantizer site are like, and how they lie on its grid."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.core.graph.ops import resolve_granularity, weight_axes
from bitwright.core.numerics import affine
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerChannel, PerTensor
from bitwright.core.numerics.statistics import Moments, bounds_of
from bitwright.core.simulation.sites import Site

_BINS = 64  # of the histogram of values
_CODE_BINS = 256  # of the histogram of codes: grids of more steps are divided into so many parts
_ELEMENTS = 1 << 18  # of a tensor whose histograms are taken; of larger ones evenly spread elements
_SAMPLES = 4096  # whose largest magnitudes are kept
_CHANNELS = 4096  # of a tensor whose channels are listed one by one
_PER_CODE = 4  # values per code from which on unused codes mean something
_MOST = 0.99  # share of the values that counts as nearly all
_BEYOND = 0.501  # steps outside of the grid from which a value counts as clipped; less is rounding


@dataclass
class SiteValues:
    """Sums over all tensors seen at one site.

    Attributes:
        site: where.
        count, clipped: elements, and those outside of the grid.
        low, high: of the finite values; ``inf`` and ``-inf`` before any.
        round_noise, clip_noise: squared errors of the elements within and outside of the grid.
        edges, counts: histogram of the values; edges are those of the first tensor, and later values outside of them are
            counted at the ends.
        codes: histogram of the codes over the grid.
        channel_low, channel_high: of each channel, where the graph tells which axis counts them.
        input_reach: of a weight, the largest magnitude that meets each of its input channels.
        sample_reach: of an activation, the largest magnitude of each sample, batch after batch.
        position_reach: the same of each position (token, pixel), over its channels.
        power: sum of the squares of the finite values.
    """

    site: Site
    count: int = 0
    clipped: int = 0
    low: float = float("inf")
    high: float = float("-inf")
    round_noise: float = 0.0
    clip_noise: float = 0.0
    edges: NDArray[np.float64] | None = None
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, np.int64))
    codes: NDArray[np.int64] | None = None
    channel_low: NDArray[np.float64] | None = None
    channel_high: NDArray[np.float64] | None = None
    input_reach: NDArray[np.float64] | None = None
    sample_reach: list[float] = field(default_factory=list)
    position_reach: list[float] = field(default_factory=list)
    power: float = 0.0

    def add(self, x: Tensor, quantized: Tensor) -> None:
        """Count a tensor and what the site's quantizer makes of it."""
        x = x.detach().float()
        if not x.numel():
            return
        low, high = (float(bound) for bound in torch.aminmax(x))
        whole = math.isfinite(low) and math.isfinite(high)
        finite = None if whole else torch.isfinite(x)
        values = x.flatten() if finite is None else x[finite]
        if not values.numel():
            return
        if not whole:
            low, high = (float(bound) for bound in torch.aminmax(values))
        self.count += values.numel()
        self.power += float(torch.dot(values, values))
        self.low, self.high = min(self.low, low), max(self.high, high)
        encoding = self.site.encoding
        if encoding is not None:
            self._add_errors(x, quantized.detach().float() - x, finite, encoding, (low, high))
        thin = values[:: max(1, values.numel() // _ELEMENTS)]
        self._add_histogram(thin.cpu().double().numpy())
        if whole:
            self._add_channels(x)
            self._add_inputs(x)
            self._add_samples(x)

    def _add_errors(
        self, x: Tensor, error: Tensor, finite: Tensor | None, encoding: Encoding, bounds: tuple[float, float]
    ) -> None:
        if finite is not None:
            error = torch.where(finite, error, torch.zeros_like(error))
        flat = error.flatten()
        total = float(torch.dot(flat, flat))
        outside = self._outside(x, encoding, bounds)
        clip = 0.0
        if outside is not None:
            outside = outside if finite is None else outside & finite
            self.clipped += int(outside.sum())
            clip = float(error[outside].double().square().sum())
        self.clip_noise += clip
        self.round_noise += max(total - clip, 0.0)
        if isinstance(encoding.format, IntFormat) and encoding.format.bits <= 16:
            self._add_codes(x, finite, encoding, encoding.format)

    @staticmethod
    def _outside(x: Tensor, encoding: Encoding, bounds: tuple[float, float]) -> Tensor | None:
        """Which elements lie outside of the grid; ``None`` where none does."""
        beyond = _BEYOND * encoding.scale if isinstance(encoding.format, IntFormat) else encoding.max * 0.01
        low, high = encoding.min - beyond, encoding.max + beyond
        if bounds[0] >= low.max() and bounds[1] <= high.min():
            return None
        granularity = encoding.granularity
        view, shape = (x.reshape(granularity.view_shape(tuple(x.shape))), granularity.broadcast_shape(tuple(x.shape)))
        lowest, highest = (torch.from_numpy(np.array(v, np.float32).reshape(shape)).to(x.device) for v in (low, high))
        return ((view < lowest) | (view > highest)).reshape(x.shape)

    def _add_codes(self, x: Tensor, finite: Tensor | None, encoding: Encoding, fmt: IntFormat) -> None:
        x = x if finite is None else torch.where(finite, x, torch.zeros_like(x))
        if isinstance(encoding.granularity, PerTensor):
            x = x.flatten()[:: max(1, x.numel() // _ELEMENTS)]
        codes = torch.as_tensor(affine.quantize(x, encoding))
        codes = codes.flatten()[:: max(1, codes.numel() // _ELEMENTS)].long() - fmt.qmin
        bins, steps = min(_CODE_BINS, fmt.steps + 1), fmt.steps + 1
        found = torch.bincount((codes * bins // steps).clamp(0, bins - 1), minlength=bins).cpu().numpy()
        self.codes = found if self.codes is None else self.codes + found

    def _add_histogram(self, values: NDArray[np.float64]) -> None:
        if self.edges is None:
            low, high = float(values.min()), float(values.max())
            margin = 0.05 * (high - low) or max(abs(low), 1e-30) * 0.5
            self.edges = np.linspace(low - margin, high + margin, _BINS + 1)
        self.counts += np.histogram(np.clip(values, self.edges[0], self.edges[-1]), self.edges)[0]

    def _add_channels(self, x: Tensor) -> None:
        axis = channel_axis(self.site, x.ndim)
        if axis is None or not 1 < x.shape[axis] <= _CHANNELS:
            return
        rest = [i for i in range(x.ndim) if i != axis % x.ndim]
        low = (x.amin(rest) if rest else x).cpu().double().numpy()
        high = (x.amax(rest) if rest else x).cpu().double().numpy()
        if self.channel_low is not None and self.channel_high is not None:
            if self.channel_low.shape != low.shape:
                return
            low, high = np.minimum(low, self.channel_low), np.maximum(high, self.channel_high)
        self.channel_low, self.channel_high = low, high

    def _add_inputs(self, x: Tensor) -> None:
        axis = summed_axis(self.site, x.ndim)
        if axis is not None and x.ndim > 1 and 1 < x.shape[axis] <= _CHANNELS:
            rest = [i for i in range(x.ndim) if i != axis]
            self.input_reach = x.abs().amax(rest).cpu().double().numpy()

    def _add_samples(self, x: Tensor) -> None:
        if self.site.role in ("input", "output") and x.ndim > 1 and len(self.sample_reach) < _SAMPLES:
            self.sample_reach += x.abs().flatten(1).amax(1).tolist()
        if self.site.role in ("input", "output") and x.ndim > 2 and len(self.position_reach) < _SAMPLES:
            axis = channel_axis(self.site, x.ndim)
            reach = x.abs().amax(-1 if axis is None else axis).flatten()
            self.position_reach += reach[:: max(1, reach.numel() // _SAMPLES)].tolist()

    # -- what follows

    @property
    def codes_used(self) -> float | None:
        """Share of the grid that holds 99 % of the values; ``None`` without a grid of integers, or of too few values."""
        if self.codes is None or self.codes.sum() < _PER_CODE * self.codes.size:
            return None
        held = np.cumsum(np.sort(self.codes)[::-1])
        return float(np.searchsorted(held, _MOST * held[-1]) + 1) / self.codes.size

    @property
    def extent(self) -> float | None:
        """Length of the range of the values over the length of the grid; ``None`` without a grid for the whole tensor."""
        encoding = self.site.encoding
        if encoding is None or not self.count or not isinstance(encoding.granularity, PerTensor):
            return None
        low, high = float(encoding.min), float(encoding.max)
        if encoding.symmetric and isinstance(encoding.format, IntFormat) and encoding.format.signed:
            return max(abs(self.low), abs(self.high)) / max(abs(low), abs(high), 1e-300)
        return (max(self.high, 0.0) - min(self.low, 0.0)) / max(high - low, 1e-300)

    @property
    def reach(self) -> float:
        """Largest magnitude of the finite values."""
        return max(abs(self.low), abs(self.high)) if self.count else 0.0

    @property
    def root_mean_square(self) -> float:
        """Of the finite values."""
        return math.sqrt(self.power / self.count) if self.count else 0.0

    @property
    def noise(self) -> float:
        """What the site's quantizer adds, over the power of the values; 0 of zeros."""
        return (self.round_noise + self.clip_noise) / self.power if self.power else 0.0

    @property
    def channel_reach(self) -> NDArray[np.float64] | None:
        """Largest magnitude of each channel."""
        if self.channel_low is None or self.channel_high is None:
            return None
        return np.maximum(np.abs(self.channel_low), np.abs(self.channel_high))

    def row(self) -> dict[str, Any]:
        """The columns of :class:`bitwright.analysis.result.SiteRow` that this knows."""
        if not self.count:
            return {}
        encoding = self.site.encoding
        channels = None
        if self.channel_low is not None and self.channel_high is not None:
            channels = {"low": self.channel_low.tolist(), "high": self.channel_high.tolist()}
        return {
            "codes_used": self.codes_used,
            "clipped": None if encoding is None else self.clipped / self.count,
            "minimum": self.low,
            "maximum": self.high,
            "histogram": None if self.edges is None else {"edges": self.edges.tolist(), "counts": self.counts.tolist()},
            "channels": channels,
        }


def grid_row(site: Site) -> dict[str, Any]:
    """The columns that follow from the encoding alone."""
    encoding = site.encoding
    if encoding is None:
        return {}
    steps = encoding.format.steps if isinstance(encoding.format, IntFormat) else None
    grid = {"low": float(encoding.min.min()), "high": float(encoding.max.max()), "steps": steps}
    return {"grid": grid, "lsb": float(encoding.scale.max())}


def calibrated_bounds(site: Site) -> tuple[float, float] | None:
    """The smallest and the largest value that calibration saw; ``None`` where it kept none."""
    seen = site.quantizer.statistics
    if seen is None or isinstance(seen, Moments):
        return None
    bounds = bounds_of(seen)
    low, high = float(bounds.lo.min()), float(bounds.hi.max())
    return (low, high) if low <= high else None


def channel_axis(site: Site, rank: int) -> int | None:
    """The axis that counts the channels of what passes a site; ``None`` where the graph does not tell."""
    if site.role in ("input", "output"):
        place = site.channels.place
        return place.axis if place is not None and rank >= -place.axis else None
    if site.role != "weight":
        return None
    op, value = site._graph.op(site.op), site._graph.values[site.value]
    granularity = resolve_granularity(op.type, op.attrs, site.port, PerChannel(), value.shape)
    axis = granularity.axis if isinstance(granularity, PerChannel) else None
    return axis if axis is not None and axis < rank else None


def summed_axis(site: Site, rank: int) -> int | None:
    """The axis of a weight that a product sums over; ``None`` of anything else."""
    if site.role != "weight":
        return None
    op = site._graph.op(site.op)
    axis = weight_axes(op.type, op.attrs, site.port, rank)[1]
    return axis if axis is not None and axis < rank else None
