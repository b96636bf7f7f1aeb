"""Give more bits, or float, to the few activations whose 8-bit grids cause most of the output error, within stated limits.

A value that a layer multiplies gets 16 bits, or stays in float where the target has no kernel for 16. Others, which only
elementwise operators and the caller read, stay in float, where such operators run anyway.

The cost of raising a quantizer above eight bits is the share of the model's work that leaves the kernels on 8-bit codes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bitwright.core.graph.cost import KernelTimes, Layouts, multiplications, size
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import op_row
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.simulation.calibration import unlike_joins
from bitwright.core.simulation.sites import Site, values_on_grids
from bitwright.errors import ConfigError
from bitwright.methods.rounding.program import SimulatedModel
from bitwright.recipes.site_cost import OutputErrors, output_errors
from bitwright.tables import Tabular

_FUSED = 4  # operators that a runtime takes into a layer's kernel: a bias, a norm that stayed, an activation
_FLOAT_OUT = frozenset(("Gemm", "MatMul"))  # whose kernels on codes return float as well


class Neighbours:
    """Operators that produce and consume the values of each quantizer.

    Args:
        graph: of the simulated model.
        values: quantizer -> the values on its grid.
    """

    def __init__(self, graph: Graph, values: Mapping[int, Iterable[str]]) -> None:
        self.graph = graph
        self.key_of = {value: key for key, on_grid in values.items() for value in on_grid}
        self.work = {op.name: multiplications(graph, op) for op in graph.ops}
        self.readers: dict[int, tuple[Op, ...]] = {}
        self.makers: dict[int, tuple[Op, ...]] = {}
        for key, on_grid in values.items():
            self.readers[key] = _computing(op for v in on_grid for op, _ in graph.consumers(v))
            made = (self._maker(v) for v in on_grid)
            self.makers[key] = _computing(op for op in made if op is not None)

    def layers(self, key: int) -> set[str]:
        """Names of the layers that read or produce its values and would leave the 8-bit kernels."""
        makers = (op for op in self.makers[key] if op.type not in _FLOAT_OUT)
        return {op.name for op in (*self.readers[key], *makers) if self.work[op.name]}

    def is_read(self, key: int) -> bool:
        """Whether a layer reads a quantizer's values."""
        return any(self.work[op.name] for op in self.readers[key])

    def _maker(self, value: str) -> Op | None:
        """The operator whose kernel rounds ``value``: its producer, or the operator that this is fused into."""
        op = self.graph.producer(value)
        for _ in range(_FUSED):
            if op is None or self.work[op.name]:
                return op
            given = [v for _, v in op.sources() if not self.graph.values[v].is_static]
            if len(given) != 1 or given[0] in self.key_of:
                return op
            op = self.graph.producer(given[0])
        return op


def _computing(ops: Iterable[Op]) -> tuple[Op, ...]:
    """``ops`` without duplicates and without those that only move data."""
    return tuple({op.name: op for op in ops if op_row(op.type).kind != "movement"}.values())


class ByProducts:
    """Cost by the share of multiplications in layers that read or produce widened values."""

    def __init__(self, around: Neighbours) -> None:
        self._around = around
        self._all = sum(around.work.values()) or 1.0

    def share(self, keys: Sequence[int]) -> float:
        """Share of the model's multiplications that leave the 8-bit kernels if ``keys`` are widened."""
        layers = {name for key in keys for name in self._around.layers(key)}
        return sum(self._around.work[name] for name in layers) / self._all


class ByTime:
    """Cost by the share of a runtime's time for the 8-bit model, from its :class:`KernelTimes`.

    An operator that reads or makes a raised value works in float: what it reads on a grid is dequantized for it, and what it
    makes on one is quantized. A raised value between two such operators is converted no more, so that a share may be below
    that of fewer keys, and below zero. What the runtime transposes between convolutions in float and on codes, and around the
    additions after them, is in it.
    """

    def __init__(self, around: Neighbours, times: KernelTimes) -> None:
        graph = around.graph
        self._around, self._times = around, times
        self._rows = max(1, *(graph.values[v].shape[0] for v in graph.inputs if graph.values[v].shape))
        self._layouts = Layouts(graph)
        self._known: dict[frozenset[str], float] = {}  # convolutions on codes -> what their layouts take
        layers = sum(times.layer(graph, op)[1] + self._start(1) for op in graph.ops)
        self._moved = self._moving(set())
        self._all = layers + self._moved or 1.0

    def _start(self, operators: int) -> float:
        return operators * self._rows * self._times.operator

    def share(self, keys: Sequence[int]) -> float:
        """Relative increase of the model's time if ``keys`` are widened."""
        raised = set(keys)
        around, graph = self._around, self._around.graph
        ops: dict[str, Op] = {}
        for key in keys:
            makers = (op for op in around.makers[key] if op.type not in _FLOAT_OUT)
            ops.update({op.name: op for op in (*around.readers[key], *makers)})
        longer = sum(self._longer(op, raised) for op in ops.values()) + self._moving(raised) - self._moved
        # the conversion of what the model is given, or returns
        ends = (value for value in (*graph.inputs, *graph.outputs) if around.key_of.get(value) in raised)
        return (longer - sum(self._converted(value) for value in ends)) / self._all

    def _moving(self, raised: set[int]) -> float:
        """Time of transposes, and of pooling on channels-first codes."""
        codes = frozenset(op.name for op in self._layouts.convolutions if self._on_codes(op, raised))
        if codes not in self._known:
            moved = self._layouts.moved(lambda op: op.name in codes)
            on_codes = tuple(op for op in moved.slow_pools if op.inputs[0] in self._around.key_of)
            moved = replace(moved, slow_pools=on_codes)
            self._known[codes] = self._layouts.time(moved, self._times, self._rows)
        return self._known[codes]

    def _on_codes(self, op: Op, raised: set[int]) -> bool:
        """Whether all values it reads and produces are on 8-bit grids."""
        keys = [self._around.key_of.get(value) for value in (str(op.inputs[0]), *self._made(op))]
        return all(key is not None and key not in raised for key in keys)

    def _longer(self, op: Op, raised: set[int]) -> float:
        """Extra time of ``op`` in float, with the conversions between it and integer operators."""
        graph, key_of = self._around.graph, self._around.key_of
        in_float, on_codes = self._times.layer(graph, op)
        read = (v for v in dict.fromkeys(v for _, v in op.sources()) if not graph.values[v].is_static)
        borders = (v for v in (*read, *self._made(op)) if v in key_of and key_of[v] not in raised)
        return in_float - on_codes + sum(map(self._converted, borders))

    def _made(self, op: Op) -> Iterable[str]:
        """Outputs of ``op``, or of the operators that a runtime fuses into its kernel."""
        for value in op.outputs:
            for _ in range(_FUSED):
                reader = self._around.graph.sole_consumer(value)
                if value in self._around.key_of or reader is None or self._around.work[reader.name]:
                    break
                value = reader.outputs[0]
            yield value

    def _converted(self, value: str) -> float:
        # a conversion, and one of the layout of float kernels
        return size(self._around.graph, value) * self._times.conversion + self._start(2)


_DROWNED, _HALF = 0.1, 0.5  # noise over signal beyond which the allowances are at least a half
_WHOLE = (
    1.0  # and that of time: twice as long; conversions weigh more than that share of multiplications in a small network
)
_TRIED, _FREE = 20, 1e-4  # candidates compared at once; a share of the time that is none
_NARROW = 8  # bits from which upwards nothing is raised


@dataclass(frozen=True)
class Widened:
    """A quantizer that was widened, or could be.

    Attributes:
        site: its first site.
        bits: before and after; ``None`` is float.
        share: of the noise in the outputs, what it made; of what those before it in the report left.
        work: share of the model's work that its layers no longer do on 8-bit kernels: of the multiplications, or of the time
            that the target takes, below zero where it takes less.
        elements: share of the quantized activations' elements; 0 if no layer reads or makes them.
    """

    site: str
    bits: tuple[int, int | None]
    share: float
    work: float
    elements: float

    @property
    def now(self) -> str:
        """The bits it has now."""
        return "float" if self.bits[1] is None else f"{self.bits[1]} bits"

    @property
    def why(self) -> str:
        """The reason, for the coverage."""
        return f"{self.bits[0]} bits made {self.share:.0%} of the outputs' noise"

    def __str__(self) -> str:
        return (
            f"{self.site}: {self.share:.0%} of the outputs' noise, {self.work:.1%} of the work, "
            f"{self.elements:.1%} of the activations"
        )


@dataclass(frozen=True)
class WidenReport(Tabular):
    """Quantizers that were widened, and those that did not fit the limits.

    Attributes:
        raised: the quantizers with more bits.
        too_dear: those that make as much noise and did not fit the allowance.
        errors: the estimate that it follows from.
        gain: dB of noise that it takes away by this estimate; 0 where the outputs are noise, which no estimate of first order
            describes.
    """

    _rows = "raised"

    raised: tuple[Widened, ...] = ()
    too_dear: tuple[Widened, ...] = ()
    errors: OutputErrors = field(default_factory=OutputErrors, repr=False)
    gain: float = 0.0

    @property
    def changed(self) -> bool:
        """Whether a quantizer was widened."""
        return bool(self.raised)

    @property
    def summary(self) -> str:
        """One line."""
        shown = [f"{w.now} at {w.site} ({w.share:.0%} of the noise)" for w in self.raised[:4]]
        if len(self.raised) > len(shown):
            shown.append(f"{len(self.raised) - len(shown)} more")
        if self.too_dear:
            shown.append(f"{len(self.too_dear)} beyond the allowance")
        return ", ".join(shown) or "no activation makes much of the outputs' noise"

    def __str__(self) -> str:
        lines = [f"  {w.now.ljust(16)} {w}" for w in self.raised]
        return "\n".join([self.summary, *lines, *(f"  beyond allowance {w}" for w in self.too_dear)])


def widen(
    model: SimulatedModel,
    batches: Iterable[Any],
    *,
    allowance: float = 0.1,
    memory: float = 0.2,
    most: float = 0.5,
    least: float = 0.05,
    weights: float = 1.0,
    bits: int | None = 16,
    times: KernelTimes | None = None,
    enough: float = 1e-2,
    samples: int = 32,
    seed: int = 0,
) -> WidenReport:
    """Give more bits, or float, to the activations whose quantizers make most of the noise in the outputs.

    Values of fewer than 8 bits that a layer multiplies get 8.

    What each makes is estimated by :func:`output_errors`. From the largest down, or from what costs least time for it, a
    quantizer is raised while it makes ``least`` of the noise that is left, and while the raised ones keep within the
    allowances. As long as the noise left is more than a tenth of the signal, these are at least a half, and that of time is
    the whole: no saving is worth outputs that are noise. A join of unlike ranges
    (:mod:`bitwright.core.simulation.calibration`) is
    raised beside the allowances of work and memory: on eight bits its smaller operand is lost, whatever is saved.

    Args:
        model: a calibrated simulation; changed in place.
        batches: data.
        allowance: share of the model's multiplications in layers that may read or make raised values, 0 to 1; with ``times``
            the share of the time that the model may take longer. 0 is kept whatever the noise.
        memory: share of the elements of quantized activations that may be raised, 0 to 1; the same.
        most: share of the quantized activations that may be raised, 0 to 1, by their number; kept whatever the noise, so that a
            small model does not lose all of them.
        least: share of the noise from which on a quantizer is worth it, 0 to 1.
        weights: share of the weights' noise that counts, 0 to 1: less than 1 where they are rounded better later.
        bits: of a raised value that a layer multiplies, 9 to 16; ``None`` for float, where the target computes such layers in
            float in any case.
        times: of the target's kernels. Those that take most noise away for the time they cost come first then.
        enough: noise over signal of the outputs, 0 to 1, below which the allowance of time falls in proportion to the noise, so
            that what is hardly noisy is not made slower; with ``times``.
        samples, seed: of the estimate.

    Raises:
        ConfigError: an option out of its range.
    """
    _check(bits, allowance=allowance, memory=memory, most=most, least=least, weights=weights, enough=enough)
    errors = output_errors(model, batches, samples=samples, seed=seed)
    candidates = _Candidates(model, bits, times)
    allowed = _Allowed(allowance, memory, *((0.0, _HALF) if times is None else (enough, _WHOLE)))
    left = before = sum(errors.activations.values()) + weights * sum(errors.weights.values())
    raised: dict[int, Widened] = {}
    too_dear: dict[int, Widened] = {}
    waiting = candidates.noises(errors)
    while left > 0:  # the rest is lost in the rounding of the sum
        loud = {k: n for k, n in waiting.items() if n and n >= least * left and k not in too_dear}
        if not loud:
            break
        key = candidates.next(list(raised), loud)
        mine = candidates.widened(key, loud[key] / left)
        costs = candidates.cost([*raised, key])
        full = len(raised) + 1 > most * len(candidates.quantizers)
        dear = mine.elements and allowed.less_than(costs, errors.measured * left / errors.total)
        if full or (dear and key not in candidates.joins):
            too_dear[key] = mine
            continue
        left -= waiting.pop(key)
        raised[key] = mine
        too_dear = {}  # beside a raised value another may cost less
        candidates.put_in_force(key, mine)
    known = raised and left > 0 and errors.measured <= _DROWNED
    gain = 10 * math.log10(before / left) if known else 0.0
    return WidenReport(tuple(raised.values()), tuple(too_dear.values()), errors, gain)


def _check(bits: int | None, **shares: float) -> None:
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise ConfigError("widen", f"{name} is {value!r}", "use a share from 0 to 1")
    if bits is not None and not _NARROW < bits <= 16:
        raise ConfigError("widen", f"bits is {bits!r}", f"use {_NARROW + 1} to 16, or None for float")


@dataclass(frozen=True)
class _Allowed:
    """Limits on the shares of work and of elements; the former falls where the noise is below ``enough``."""

    allowance: float
    memory: float
    enough: float
    drowned: float  # least share of the work while the outputs are noise

    def less_than(self, costs: tuple[float, float], noise: float) -> bool:
        """Whether ``costs`` exceed the limits, where the outputs' noise is ``noise`` times their signal."""
        allowance, memory = self.allowance, self.memory
        if noise < self.enough:
            allowance *= noise / self.enough
        if noise > _DROWNED:
            allowance, memory = allowance and max(allowance, self.drowned), memory and max(memory, _HALF)
        return costs[0] > allowance or costs[1] > memory


class _Candidates:
    """Quantizers that can be widened, and the cost of each."""

    def __init__(self, model: SimulatedModel, bits: int | None, times: KernelTimes | None) -> None:
        graph, sites = model.observed_graph(), model.sites()
        self._bits, self._sites = bits, sites
        fixed = {id(site.quantizer) for site in sites.values() if not _can_be_raised(site)}
        movable = [site.quantizer for site in sites.values() if id(site.quantizer) not in fixed]
        self.quantizers = dict(zip(map(id, movable), movable, strict=True))
        working = {name: site for name, site in sites.items() if site.enabled}
        values = values_on_grids(working, model.shared())
        self.joins = {id(sites[join.site].quantizer) for join in unlike_joins(graph, sites, model.shared())}
        self._around = Neighbours(graph, values)
        self._work = ByProducts(self._around) if times is None else ByTime(self._around, times)
        sizes = {key: float(sum(size(graph, v) for v in on_grid)) for key, on_grid in values.items()}
        all_sizes = sum(sizes.values()) or 1.0
        self._elements = {key: sizes[key] / all_sizes if self._around.layers(key) else 0.0 for key in self.quantizers}

    def cost(self, keys: Sequence[int]) -> tuple[float, float]:
        """Shares of the model's work, in layers that read or compute their values, and of the elements."""
        return self._work.share(keys), sum(self._elements[k] for k in keys)

    def noises(self, errors: OutputErrors) -> dict[int, float]:
        """Quantizers with the noise they cause, largest first."""
        made: dict[int, float] = {}
        for name, noise in errors.activations.items():
            key = id(self._sites[name].quantizer)
            if key in self.quantizers:
                made[key] = made.get(key, 0.0) + noise
        return dict(sorted(made.items(), key=lambda item: -item[1]))

    def next(self, raised: Sequence[int], loud: Mapping[int, float]) -> int:
        """The quantizer to try next: the noisiest, or the one with the largest noise reduction per time."""
        if isinstance(self._work, ByProducts):
            return next(iter(loud))
        now = self._work.share(raised)
        noisiest = itertools.islice(loud, _TRIED)
        return max(noisiest, key=lambda k: loud[k] / max(self._work.share([*raised, k]) - now, _FREE))

    def widened(self, key: int, share: float) -> Widened:
        """The record of widening it."""
        quantizer = self.quantizers[key]
        bits = quantizer.spec.format.bits
        now = None if not self._around.is_read(key) else _NARROW if bits < _NARROW else self._bits
        return Widened(quantizer.name, (bits, now), share, *self.cost([key]))

    def put_in_force(self, key: int, what: Widened) -> None:
        """Widen it."""
        if what.bits[1] is None:
            self.quantizers[key].release(what.why)
        else:
            self.quantizers[key].refine(what.bits[1], what.why)


def _can_be_raised(site: Site) -> bool:
    quantizer = site.quantizer
    return (
        site.role in ("input", "output") and site.inner is None
        and site.enabled and not site.frozen and not quantizer.derived and quantizer.encoding is not None
        and isinstance(quantizer.spec.format, IntFormat) and quantizer.spec.format.bits <= _NARROW
    )  # fmt: skip
