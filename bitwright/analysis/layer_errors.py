"""Separate the error that each step adds from the error it passes on: float and quantized runs side by side, in one pass.

Each step runs four times: in float and quantized, on what the float steps before it made and on what the quantized ones
made. Steps without quantizers run twice. Values live as long as a later step reads them, so memory is that of two runs.

On the way it collects statistics of the values at every quantizer site, and of how they lie on its grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.analysis.subject import QuantizedSteps
from bitwright.core.graph.graph import Op
from bitwright.core.graph.operators import resolve_granularity, weight_axes
from bitwright.core.numerics import affine
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerChannel, PerTensor
from bitwright.core.numerics.statistics import Moments, bounds_of
from bitwright.core.simulation.sites import Site
from bitwright.methods.rounding.program import Program, SimulatedModel, State, Step, run_step

_BINS = 64  # of the histogram of values
_CODE_BINS = 256  # of the histogram of codes: grids of more steps are divided into so many parts
_ELEMENTS = 1 << 18  # of a tensor whose histograms are taken; of larger ones evenly spread elements
_SAMPLES = 4096  # whose largest magnitudes are kept
_CHANNELS = 4096  # of a tensor whose channels are listed one by one
_PER_CODE = 4  # values per code from which on unused codes mean something
_MOST = 0.99  # share of the values that counts as nearly all
_VANISHES = 104.0  # below the largest value of a row of a softmax: exp of it is 0 in float32
_PRODUCTS = frozenset(("Mul", "Div", "MatMul", "GroupedMatMul", "Einsum", "Bilinear"))
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
        power: sum of the squares of the values that have a finite one.
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
        power = float(torch.dot(values, values))
        self.power += power if math.isfinite(power) else float(values[torch.isfinite(values.square())].square().sum())
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
        """Mask of the elements outside of the grid; ``None`` if there are none."""
        beyond = _BEYOND * encoding.scale if isinstance(encoding.format, IntFormat) else encoding.max * 0.01
        low, high = encoding.min - beyond, encoding.max + beyond
        if bounds[0] >= low.max() and bounds[1] <= high.min():
            return None
        granularity = encoding.granularity
        shape = tuple(x.shape)
        view = x.reshape(granularity.view_shape(shape))
        lowest, highest = (
            torch.from_numpy(np.array(granularity.spread(v, shape), np.float32)).to(x.device) for v in (low, high)
        )
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
        """Root mean square of the finite values."""
        return math.sqrt(self.power / self.count) if self.count else 0.0

    @property
    def noise(self) -> float:
        """Noise of the site's quantizer over the power of the values; 0 for zeros."""
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


@dataclass
class Ratio:
    """Noise and signal, summed over ``count`` elements."""

    noise: float = 0.0
    signal: float = 0.0
    count: int = 0

    def add(self, wanted: Any, found: Any) -> None:
        """Add the error of ``found``; tensors of another shape are left out.

        Values whose square is not finite in ``wanted`` are left out as well: infinities, and the smallest number of a format,
        which masks of attention hold.
        """
        if not isinstance(wanted, Tensor) or not wanted.is_floating_point() or wanted.shape != found.shape:
            return
        reference = wanted.detach().float().flatten()
        count, signal = reference.numel(), _power(reference)
        noise = 0.0 if wanted is found else _power(reference - found.detach().float().flatten())
        if not math.isfinite(signal + noise):
            finite = torch.isfinite(reference.square())
            error = reference[finite] - found.detach().float().flatten()[finite]
            signal, noise = (float(reference[finite].double().square().sum()), float(error.double().square().sum()))
            count = int(finite.sum())
        self.noise += noise
        self.signal += signal
        self.count += count

    @property
    def value(self) -> float | None:
        """Noise over signal; ``None`` where there was no signal."""
        return self.noise / self.signal if self.signal > 0 else None


def _power(x: Tensor) -> float:
    """Sum of squares; a dot product is several times faster than squares and a sum, and as exact as is needed here."""
    return float(torch.dot(x, x))


@dataclass
class LayerErrors:
    """Errors of one operator, summed over its calls: see :class:`bitwright.analysis.result.LayerRow`.

    Attributes:
        type: of the operator.
        operands: the error of each value that it reads.
        elements: of its outputs.
        operand_reach: the largest magnitude of each value that it reads.
        weighted: of an elementwise product or quotient of two values, the error of each that it reads, where the other
            factor weighs errors and values alike.
        decided, changed: of results that are no numbers but choices (indices, truth values, classes) made from such numbers:
            how many there are, and how many differ from those of the float model.
    """

    type: str = ""
    made: Ratio = field(default_factory=Ratio)
    made_quantized: Ratio = field(default_factory=Ratio)
    operands: dict[int, Ratio] = field(default_factory=dict)
    after: Ratio = field(default_factory=Ratio)
    elements: int = 0
    operand_reach: dict[int, float] = field(default_factory=dict)
    weighted: dict[int, Ratio] = field(default_factory=dict)
    decided: int = 0
    changed: int = 0

    @property
    def arrived(self) -> float | None:
        """Noise over signal of what it reads; ``None`` where there was no signal.

        Operands of a product count by their relative errors, which add up in it; those of any other operator by their power.
        """
        known = [one for one in self.operands.values() if one.signal > 0]
        if not known:
            return None
        if self.type in _PRODUCTS:
            return sum(one.noise / one.signal for one in known)
        return sum(one.noise for one in known) / sum(one.signal for one in known)

    @property
    def root_mean_square(self) -> float:
        """Root mean square of its float output."""
        return math.sqrt(self.after.signal / self.elements) if self.elements else 0.0


_Pair = Callable[[Step, State, State, Mapping[int, Tensor]], tuple[Sequence[Tensor], Sequence[Tensor]]]
"""(step, values of the float run, values of the quantized one, constants) -> what it makes in each."""


class Lockstep:
    """Runs batches and accumulates statistics of every layer and site.

    Args:
        model: a calibrated simulation.

    Attributes:
        layers: operator -> its errors, in execution order.
        sites: site -> its values.
        runs: operator runs so far.
        steps: steps of the programs so far: what one forward pass of the same batches would have run.
        turned: numbers of the batches in which a choice changed.
        kept: of these batches, the error of each output with every choice as in the float model.
    """

    def __init__(self, model: SimulatedModel) -> None:
        self._steps, self._graph = QuantizedSteps(model), model.graph()
        self._sites = self._steps.sites
        self.layers: dict[str, LayerErrors] = {}
        self.sites: dict[str, SiteValues] = {}
        self.runs = self.steps = 0
        self.batches = 0
        self.turned: list[int] = []
        self.kept: dict[int, Ratio] = {}

    def batch(self, program: Program, inputs: State) -> None:
        """Add one batch."""
        self.steps += len(program.steps)
        before = sum(layer.changed for layer in self.layers.values())
        with torch.no_grad():
            for _ in self._side_by_side(program, inputs, self._step):
                pass
            if sum(layer.changed for layer in self.layers.values()) > before:
                self.turned.append(self.batches)
                for value, wanted, found in self._side_by_side(program, inputs, self._with_choices):
                    if value in program.outputs:
                        self.kept.setdefault(program.outputs.index(value), Ratio()).add(wanted, found)
        self.batches += 1

    def _side_by_side(self, program: Program, inputs: State, do: _Pair) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Run each step in both runs, and give every value and what it is in each."""
        real, found = dict(inputs), dict(inputs)
        for i, step in enumerate(program.steps):
            wanted, results = do(step, real, found, program.constants)
            yield from zip(step.writes, wanted, results, strict=True)
            program.settle(real, i, wanted)
            program.settle(found, i, results)

    @property
    def kept_ratio(self) -> float | None:
        """Noise over signal with every choice kept, the mean over outputs; ``None`` where no choice changed."""
        ratios = [r for one in self.kept.values() if (r := one.value) is not None]
        return sum(ratios) / len(ratios) if ratios else None

    def _with_choices(
        self, step: Step, real: State, found: State, constants: Mapping[int, Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Run a step in float, and quantized with the choices that it makes in float."""
        wanted = run_step(step, real, constants)
        results = list(run_step(step, found, constants, self._steps.quantize))
        self.runs += 2
        if _chooses(step, real):
            picked = next((w for w in wanted if _is_choice(w)), None)
            for i, w in enumerate(wanted):
                if _is_choice(w):
                    results[i] = w
                elif picked is not None and (axis := _axis_of(real.get(step.reads[0]), picked, w)) is not None:
                    results[i] = _taken(found[step.reads[0]], picked, axis)
        return wanted, results

    def _step(
        self, step: Step, real: State, found: State, constants: Mapping[int, Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        quantizes = bool(step.operands or step.results or step.inside is not None)
        apart = any(v in found and found[v] is not real[v] for v in step.reads)
        wanted = list(run_step(step, real, constants))
        alone = list(run_step(step, real, constants, self._steps.quantize)) if quantizes else wanted
        passed = list(run_step(step, found, constants)) if apart else wanted
        after = alone
        if apart:
            after = list(run_step(step, found, constants, self._steps.quantize)) if quantizes else passed
        self.runs += 1 + quantizes + apart + (apart and quantizes)
        if step.inside is not None and step.differentiable:
            self._see_inside(step, real, constants)
        if step.op:
            self._note(step, real, found, (wanted, alone, passed, after))
            _note_reach(self.layers[step.op], [real.get(v, constants.get(v)) for v in dict.fromkeys(step.reads)])
        self._see(step, real, constants, wanted)
        return wanted, after

    def _note(self, step: Step, real: State, found: State, made: tuple[Sequence[Tensor], ...]) -> None:
        op = self._graph.op(step.op)
        errors = self.layers.setdefault(step.op, LayerErrors(op.type))
        for slot, value in enumerate(dict.fromkeys(step.reads)):
            if value in real:
                operand = errors.operands.setdefault(slot, Ratio())
                operand.add(*_counting(op, real[value], found[value]))
        _weigh(errors, [(real.get(v), found.get(v)) for v in step.reads])
        if _chooses(step, real):
            _count_choices(errors, real.get(step.reads[0]), made[0], made[3])
        for wanted, alone, passed, after in zip(*made, strict=True):
            errors.made.add(wanted, alone)
            errors.made_quantized.add(passed, after)
            errors.after.add(wanted, after)
            errors.elements += wanted.numel() if isinstance(wanted, Tensor) else 0

    def _see(self, step: Step, real: State, constants: Mapping[int, Tensor], made: Sequence[Any]) -> None:
        for slot, name in step.operands:
            value = step.reads[slot]
            if value in real:
                self._add(name, real[value])
            elif name not in self.sites:
                self._add(name, constants[value])
        for index, name in step.results:
            self._add(name, made[index])

    def _see_inside(self, step: Step, real: State, constants: Mapping[int, Tensor]) -> None:
        """Observe the quantizers inside a recurrent layer, over all time steps."""
        kept: dict[str, list[Tensor]] = {}

        def keep(name: str, x: Tensor) -> Tensor:
            kept.setdefault(name, []).append(x)
            return x

        run_step(step, real, constants, inner=keep)
        self.runs += 1
        for name, steps in kept.items():
            if self._sites[name].enabled:
                self._add(name, torch.cat(steps))

    def _add(self, name: str, x: Any) -> None:
        if isinstance(x, Tensor) and x.is_floating_point():
            values = self.sites.setdefault(name, SiteValues(self._sites[name]))
            values.add(x, self._steps.quantize(name, x))


def _note_reach(errors: LayerErrors, read: Sequence[Any]) -> None:
    """Keep the largest magnitude of each value that an operator reads, constants (a class token) too."""
    for slot, value in enumerate(read):
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            largest = float(torch.linalg.vector_norm(value, float("inf")))
            errors.operand_reach[slot] = max(errors.operand_reach.get(slot, 0.0), largest)


def _weigh(errors: LayerErrors, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Add the errors of two factors, each times the other factor of the float run; of a divisor, the errors alone."""
    if (
        errors.type not in ("Mul", "Div")
        or len(pairs) != 2
        or not all(isinstance(one, Tensor) and one.is_floating_point() for one, _ in pairs)
    ):
        return
    for slot, (wanted, found) in enumerate(pairs):
        other = pairs[1 - slot][0].detach()
        if errors.type == "Div":
            if slot:
                return
            other = other.reciprocal()
        errors.weighted.setdefault(slot, Ratio()).add(wanted * other, found * other)


def _is_choice(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()


def _chooses(step: Step, state: State) -> bool:
    """Whether a step may make choices: it reads numbers."""
    return any(isinstance(x := state.get(v), Tensor) and x.is_floating_point() for v in step.reads)


def _count_choices(errors: LayerErrors, read: Any, made: Sequence[Any], found: Sequence[Any]) -> None:
    """Compare the choices of two runs; of indices that are chosen together along an axis, the order does not count."""
    picked = next((w for w in made if _is_choice(w)), None)
    if picked is None:
        return
    axes = (_axis_of(read, picked, w) for w in made if not _is_choice(w))
    axis = next((a for a in axes if a is not None and a < picked.ndim), None)
    for wanted, after in zip(made, found, strict=True):
        if _is_choice(wanted):
            errors.decided += wanted.numel()
            errors.changed += _turned(wanted, after, axis)


def _turned(wanted: Tensor, after: Tensor, axis: int | None) -> int:
    """How many choices differ."""
    if wanted is after:
        return 0
    if wanted.shape != after.shape:
        return wanted.numel()
    pair = (wanted, after) if axis is None else (wanted.sort(axis).values, after.sort(axis).values)
    return int((pair[0] != pair[1]).sum())


def _taken(values: Tensor, indices: Tensor, axis: int) -> Tensor:
    """The values at ``indices`` along ``axis``, which the indices may lack."""
    if indices.ndim == values.ndim:
        return values.gather(axis, indices)
    return values.gather(axis, indices.unsqueeze(axis)).squeeze(axis)


def _axis_of(values: Any, indices: Any, made: Any) -> int | None:
    """The axis along which ``made`` are the values at ``indices``; ``None`` of any other operator."""
    if (
        not isinstance(values, Tensor)
        or indices.dtype != torch.int64
        or indices.shape != made.shape
        or not made.numel()
    ):
        return None
    for axis in range(values.ndim):
        rest = [n for i, n in enumerate(values.shape) if i != axis]
        own = [n for i, n in enumerate(indices.shape) if i != axis] if indices.ndim == values.ndim else [*indices.shape]
        if rest == own and int(indices.max()) < values.shape[axis] and torch.equal(_taken(values, indices, axis), made):
            return axis
    return None


def _counting(op: Op, wanted: Any, found: Any) -> tuple[Any, Any]:
    """The values that matter to an operator; to a softmax, not what lies far below the largest of its row, as masks do."""
    if op.type not in ("Softmax", "LogSoftmax") or not isinstance(wanted, Tensor) or not wanted.ndim:
        return wanted, found
    axis = int(op.attrs.get("axis", -1))
    counts = wanted >= wanted.amax(axis if -wanted.ndim <= axis < wanted.ndim else -1, keepdim=True) - _VANISHES
    return wanted[counts], found[counts]


def observe(model: SimulatedModel, batches: Iterable[Any]) -> Lockstep:
    """Run ``batches`` in float and quantized, step by step."""
    found = Lockstep(model)
    for batch in batches:
        found.batch(*model.program(batch))
    return found
