"""Watching activations while a model runs: bounds by reductions inside the graph, histograms from the tensors.

What a quantizer needs decides what is fetched. Bounds (range method ``minmax``, per tensor) are three reductions and
a size beside each tensor; only scalars leave the runtime. ReduceMin and ReduceMax pass over NaN, so a ReduceSum goes
with them: where one of the three is not finite, the tensor itself is fetched in a second run of the batch and counted
exactly. Everything else (histograms, several scales, half types) fetches the tensors and hands them to
:mod:`bitwright.core.statistics`, so that encodings are those of any other front end, bit for bit.

Memory: tensors are fetched in groups whose bytes stay within a budget, one run of the batch per group; the runtime
frees every other tensor as soon as its readers are through (:mod:`bitwright.onnx.schedule`).

Channels that are constant (:mod:`bitwright.core.channels`) are found by two reductions per channel beside each tensor
that is reduced. They run until one batch has counted. The session of the next batches, opened from the model that was
optimised for the first, has them only where a channel was constant in that one, and only the maximum where the constant
is the least value of the tensor, as behind a ReLU: a channel whose maximum is the minimum of the tensor is constant.

Tensors inside the bodies of If, Loop and Scan leave them as additional outputs; a loop hands out one entry per
iteration, and a branch that was not taken contributes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core import statistics
from bitwright.core.calibration import BatchGate
from bitwright.core.channels import ChannelWatch, channels_within
from bitwright.core.granularity import PerTensor
from bitwright.core.quantizer import Quantizer
from bitwright.errors import BitwrightError, CalibrationError
from bitwright.export.builder import Builder, Place, after, before
from bitwright.export.runtime import refusals
from bitwright.onnx.data import Feeds, InputSpec, as_feeds, input_specs
from bitwright.onnx.schedule import Watching, narrow, open_watching
from bitwright.onnx.session import Providers, first_line, open_session, return_memory, weight_bytes
from bitwright.onnx.simulate import Simulation

Array = NDArray[Any]
_SCALARS = (
    ("ReduceMin", ir.DataType.FLOAT, np.float32(np.inf), "ReduceMin"),
    ("ReduceMax", ir.DataType.FLOAT, np.float32(-np.inf), "ReduceMax"),
    ("ReduceSum", ir.DataType.FLOAT, np.float32(0), "ReduceSum"),
    ("Size", ir.DataType.INT64, np.int64(0), "ReduceSum"),
)  # operator, its type, its value where nothing ran, how the iterations of a loop are joined

_KEPT = 32  # sessions at most


@dataclass(eq=False)
class Tap:
    """One tensor and the quantizer that watches it.

    Attributes:
        quantizer: gets the statistics.
        value: of the main graph: the tensor, or what carries it out of a body (after :meth:`settle`).
        times: how many sites of the quantizer see this tensor; each counts.
        leading: axes that loops put in front of the tensor's own.
        scalars: minimum, maximum, sum and size, of the main graph; empty where the tensor itself is fetched.
        bring_out: makes the value that carries a reduced tensor out of its body, and counts the axes in front.
        inside: whether the tensor stands in a body, where no elements may also mean that the body did not run.
        watches: what the sites show of their channels.
        axis, channels: axis of the channels, counted from the end, and their minima and maxima; samples may be left in front,
            axes of length one behind. Empty where the tensor itself is fetched, or stands in a body.
        pooled: the maxima, where a pool takes them, which the runtime has in its own layout of images, too.
    """

    quantizer: Quantizer
    value: ir.Value
    times: int = 1
    leading: int = 0
    scalars: tuple[ir.Value, ...] = ()
    bring_out: Callable[[], tuple[ir.Value, int]] | None = None
    inside: bool = False
    watches: list[ChannelWatch] = field(default_factory=list)
    axis: int = -1
    channels: tuple[ir.Value, ...] = ()
    pooled: ir.Value | None = None

    def settle(self) -> None:
        """Bring a reduced tensor out of its body, where a loop would keep it for all iterations."""
        if self.bring_out is not None:
            self.value, self.leading = self.bring_out()
            self.bring_out = None

    @property
    def followed(self) -> bool:
        """Whether more data can change what is known of its channels."""
        return (bool(self.channels) or not self.scalars) and any(watch.wanted for watch in self.watches)

    @property
    def unordered(self) -> bool:
        """Whether the order of the tensor's elements is of no interest."""
        return isinstance(self.quantizer.spec.granularity, PerTensor)

    def observe_channels_of(self, x: Array) -> None:
        """Look at the channels of the tensor itself."""
        for watch in self.watches:
            watch.observe(x)

    def observe_channels(self, ends: Sequence[Array], least: float) -> bool:
        """Take minima and maxima per channel, or maxima alone and the least value of the tensor; one of no elements has none.

        Returns:
            Whether that was enough to tell which channels are still constant.
        """
        if not ends[-1].size or self.quantizer.frozen:
            return True
        *lo, hi = (end.reshape(-1, end.shape[self.axis]) for end in ends)
        top = hi.max(0)
        if not lo and any(least < value and top[i] == value for i, value in self._constants()):
            return False
        seen = channels_within(lo[0].min(0) if lo else np.full_like(top, least), top)
        for watch in self.watches:
            watch.add(seen)
        return True

    def _constants(self) -> Iterator[tuple[int, float]]:
        """Channels that are constant so far at any of the sites, and their value."""
        for watch in self.watches:
            if watch.seen is not None:
                yield from zip(watch.seen.index.tolist(), watch.seen.value.tolist(), strict=True)

    def is_least(self, value: float) -> bool:
        """Whether every channel that is constant so far holds ``value``."""
        return all(constant == value for _, constant in self._constants())

    def note_empty(self) -> None:
        """The tensor has no elements."""
        if not self.inside:
            self.quantizer.empty += self.times

    def observe(self, x: Array) -> None:
        """Give the tensor to the quantizer."""
        if self.quantizer.frozen:
            return
        if x.size == 0:
            self.note_empty()
            return
        self.observe_channels_of(x)
        parts: Iterable[Array] = (x,)
        if self.leading and not self.unordered:
            parts = x.reshape(-1, *x.shape[self.leading :])
        for part in parts:
            if self.times == 1:
                self.quantizer.observe(part)
                continue
            granularity = self.quantizer.spec.granularity
            granularity.param_shape(part.shape, self.quantizer.name)
            seen = statistics.measure(self.quantizer.needs, part, granularity)
            for _ in range(self.times):
                self.quantizer.observe_statistics(seen)


@dataclass
class _Bounds:
    """Bounds of all reduced taps so far, as vectors: one update per batch, whatever the number of sites."""

    lo: Array
    hi: Array
    count: Array

    @classmethod
    def of(cls, size: int) -> _Bounds:
        return cls(np.full(size, np.inf), np.full(size, -np.inf), np.zeros(size, np.int64))

    def add(self, lo: Array, hi: Array, count: Array, use: Array) -> None:
        self.lo = np.where(use, np.minimum(self.lo, lo), self.lo)
        self.hi = np.where(use, np.maximum(self.hi, hi), self.hi)
        self.count = self.count + np.where(use, count, 0)


@dataclass(eq=False)
class _Session:
    """A session with some taps among its outputs."""

    watching: Watching
    followed: dict[Tap, bool]  # the taps that show their channels, and whether their minima too
    names: list[str]  # to fetch: outputs of the model, scalars, bounds of channels, arrays
    used: int = 0  # number of the batch that it ran last

    def run(self, feeds: Feeds) -> list[Array]:
        found: list[Array] = self.watching.session.run(self.names, feeds)
        return found


@dataclass(eq=False)
class Calibrator:
    """Runs batches and fills the statistics of quantizers.

    Args:
        simulation: constants quantized, activations in float except the frozen ones.
        quantizers: site -> quantizer, for the activation sites to watch.
        budget: bytes of activations that may be held at once beside what the model itself needs.
        providers, threads: of the sessions.
        gate: decides about batches that are not finite; without one their finite elements are used.
        channels: site -> what it shows of its channels.
    """

    simulation: Simulation
    quantizers: Mapping[str, Quantizer]
    budget: int
    providers: Providers | None = None
    threads: int = 0
    gate: BatchGate | None = None
    channels: Mapping[str, ChannelWatch] = field(default_factory=dict)
    runs: int = 0
    specs: tuple[InputSpec, ...] = field(init=False)
    _sessions: dict[tuple[Any, ...], _Session] = field(default_factory=dict)
    _sizes: dict[tuple[Any, ...], dict[Tap, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = self.simulation.model
        self.specs = input_specs(model)
        self._outputs = [str(v.name) for v in model.graph.outputs]
        self._instrument = Instrument(model)
        self.taps = self._find_taps()
        self._reduced = [tap for tap in self.taps if tap.scalars]
        self._fetched = [tap for tap in self.taps if not tap.scalars]
        self._joined = self._instrument.join([tap.scalars for tap in self._reduced])
        self._bounds = _Bounds.of(len(self._reduced))
        self._followed = dict.fromkeys((tap for tap in self.taps if tap.followed), True)
        self._settled = False  # whether a batch has shown which channels may be constant
        self._weights = weight_bytes(model)

    def _find_taps(self) -> list[Tap]:
        found: dict[tuple[int, ir.Value, ir.Graph], Tap] = {}
        for site, places in self.simulation.taps.items():
            quantizer = self.quantizers.get(site)
            if quantizer is None or not quantizer.enabled or quantizer.frozen or quantizer.is_fixed:
                continue
            for value, graph in places:
                key = (id(quantizer), value, graph)
                watch = self.channels.get(site, ChannelWatch())
                if key in found:
                    found[key].times += 1
                else:
                    axis = None if watch.place is None else watch.place.axis
                    found[key] = self._instrument.tap(quantizer, value, graph, axis)
                found[key].watches.append(watch)
        return list(found.values())

    def _settle(self) -> None:
        """From now on look at those channels only of which another batch can still tell something."""
        if not self._settled:
            least = dict(zip(self._reduced, self._bounds.lo.tolist(), strict=True))
            still = (tap for tap in self._followed if tap.followed)
            self._followed = {tap: tap not in least or not tap.is_least(least[tap]) for tap in still}
            self._settled = True
            for tap in self._reduced:
                both = self._followed.get(tap)
                self._instrument.drop(tap.channels if both is None else tap.channels[: 0 if both else 1])

    # -- running

    def run(self, given: Any) -> list[Array]:
        """Run one batch and watch it; the outputs of the model, activations in float.

        Raises:
            ModelError: the batch does not fit the inputs.
            CalibrationError: the model fails on it, or makes NaN or Inf of it that the gate does not let through.
        """
        where = f"batch {self.runs}"
        feeds = as_feeds(given, self.specs, where)
        before = replace(self._bounds)
        if self.gate is not None:
            self.gate.open(feeds)
        counts = False
        try:
            outputs = self._watch(feeds, where)
            counts = self.gate is None or self.gate.close()
            if counts:
                self._settle()
        finally:
            if not counts:
                self._bounds = before
        self.runs += 1
        return outputs

    def _watch(self, feeds: Feeds, where: str) -> list[Array]:
        outputs: list[Array] = []
        try:
            groups = self._groups(self._tap_sizes(feeds))
            for i, group in enumerate(groups):
                found = self._session(group, first=i == 0, arena=len(groups) == 1).run(feeds)
                if i == 0:
                    outputs, found = found[: len(self._outputs)], found[len(self._outputs) :]
                    scalars, found = found[: len(self._joined)], found[len(self._joined) :]
                    ends, found = self._split(found)
                self._read_arrays(group, found, feeds)
                if i == 0:  # may take runs of its own
                    odd = self._read_scalars(scalars, feeds)
                    self._read_channels({t: ends[t] for t in ends.keys() - set(odd)}, scalars, feeds)
        except BitwrightError:
            raise
        except refusals() as error:
            raise CalibrationError(
                where,
                f"the model fails on it: {first_line(error)}",
                "run the float model in ONNX Runtime on the same batch; what it refuses cannot be calibrated on",
            ) from error
        return outputs

    def finish(self) -> None:
        """Hand the bounds gathered so far to the quantizers."""
        lo, hi, count = self._bounds.lo, self._bounds.hi, self._bounds.count
        for i, tap in enumerate(self._reduced):
            if count[i]:
                none = np.zeros((), np.int64)
                seen = np.asarray(count[i] * tap.times)
                tap.quantizer.observe_statistics(
                    statistics.MinMax(np.asarray(lo[i]), np.asarray(hi[i]), seen, none, none, none)
                )
        self._bounds = _Bounds.of(len(self._reduced))

    def _channel_values(self) -> dict[Tap, tuple[ir.Value, ...]]:
        """The bounds per channel that a run gives, for every reduced tap whose channels are looked at."""
        followed = ((tap, self._followed[tap]) for tap in self._reduced if tap in self._followed)
        return {tap: tap.channels if both else tap.channels[1:] for tap, both in followed}

    def _split(self, found: list[Array]) -> tuple[dict[Tap, list[Array]], list[Array]]:
        """The bounds per channel that a run gave, and what comes behind them."""
        rest = iter(found)
        return {tap: list(islice(rest, len(values))) for tap, values in self._channel_values().items()}, list(
            rest
        )

    def _read_scalars(self, found: Sequence[Array], feeds: Feeds) -> list[Tap]:
        """Take the bounds of the reduced taps; those that were fetched because they are not finite."""
        if not self._reduced:
            return []
        lo, hi, total, count = (vector.astype(np.float64) for vector in found)
        there = count > 0
        finite = np.isfinite(lo) & np.isfinite(hi) & np.isfinite(total)
        self._bounds.add(lo, hi, count.astype(np.int64), there & finite)
        for i in np.flatnonzero(~there):
            self._reduced[i].note_empty()
        odd = [self._reduced[i] for i in np.flatnonzero(there & ~finite)]
        self._look_again(odd, feeds, Tap.observe)
        return odd

    def _read_channels(self, ends: Mapping[Tap, list[Array]], scalars: Sequence[Array], feeds: Feeds) -> None:
        """Take the bounds per channel; where they are not enough, look at the tensor."""
        least = dict(zip(self._reduced, scalars[0].tolist(), strict=True)) if ends else {}
        unclear = [tap for tap, found in ends.items() if not tap.observe_channels(found, least[tap])]
        self._look_again(unclear, feeds, Tap.observe_channels_of)

    def _look_again(self, taps: Sequence[Tap], feeds: Feeds, see: Callable[[Tap, Array], None]) -> None:
        """Fetch reduced tensors of the same batch."""
        for tap in taps:
            tap.settle()
        for group in self._groups(self._tap_sizes(feeds, taps)) if taps else ():
            given = all(
                tap.value.is_graph_input() for tap in group
            )  # no run needed: they came with the batch
            found = [] if given else self._session(group, first=False, arena=False).run(feeds)
            self._read_arrays(group, found, feeds, see)

    def _read_arrays(
        self,
        group: Sequence[Tap],
        found: list[Array],
        feeds: Feeds,
        see: Callable[[Tap, Array], None] | None = None,
    ) -> None:
        """Count the tensors of one run; ``found`` gives up each once it is counted, so that nothing waits for the next."""
        found.reverse()
        for tap in group:
            name = str(tap.value.name)
            (see or Tap.observe)(tap, feeds[name] if name in feeds else found.pop())
        assert not found, "more was fetched than is watched"

    # -- sessions and memory

    def _session(self, arrays: Sequence[Tap], *, first: bool, arena: bool) -> _Session:
        """The session for a run; a few are kept for the batches to come."""
        key = (tuple(map(id, arrays)), first, arena)
        found = self._sessions.pop(key, None)
        if found is None or found.followed != self._followed:
            before = None if found is None else replace(found.watching, session=None)
            found = None  # its memory goes before another one takes its own
            self._make_room()
            found = self._open(arrays, first=first, arena=arena, before=before)
        found.used = self.runs
        self._sessions[key] = found
        return found

    def _make_room(self) -> None:
        """Let sessions go until one more may come: those of other shapes first, then the one that ran last.

        Groups come round in the same order with every batch, so what ran last is needed last.
        """
        beside = min(self._kept_bytes // max(1, self._weights), _KEPT - 1)
        if len(self._sessions) <= beside:
            return
        for key in [key for key, session in self._sessions.items() if session.used < self.runs - 1]:
            del self._sessions[key]
        while len(self._sessions) > beside:
            self._sessions.popitem()
        return_memory()

    @property
    def _kept_bytes(self) -> int:
        """The part of the budget for the weights of sessions that are kept beside the one that runs."""
        part = self.budget // 4
        return part if self._weights <= part else 0

    def _open(
        self, arrays: Sequence[Tap], *, first: bool, arena: bool, before: Watching | None = None
    ) -> _Session:
        """A session; ``before`` is what is left of one that showed the channels of more taps."""
        fetched = [tap for tap in arrays if not tap.value.is_graph_input()]
        ordered = {tap.value for tap in fetched if not tap.unordered or tap in self._followed}
        channels = chain.from_iterable(self._channel_values().values())
        small = [*self._joined, *channels] if first else []
        names = [*(self._outputs if first else ()), *(str(v.name) for v in small)]
        names += [str(tap.value.name) for tap in fetched]
        reduced = {str(v.name) for tap in self._reduced for v in tap.scalars}
        unordered = {str(tap.value.name) for tap in fetched if tap.value not in ordered}
        unordered = unordered.difference(self._outputs)
        if before is not None and before.optimized is not None:
            kept = {*names, *self._outputs}
            watching = narrow(
                before, kept, scalars=reduced, unordered=unordered, threads=self.threads, arena=arena
            )
        else:
            watching = self._instrument.open(
                [*small, *(tap.value for tap in fetched)],
                lambda model: open_watching(
                    model,
                    self.providers,
                    threads=self.threads,
                    scalars=reduced,
                    channels={str(v.name) for tap in self._followed for v in tap.channels},
                    unordered=unordered,
                    arena=arena,
                    keep=bool(self._followed) and not self._settled,
                ),
            )
        return _Session(watching, self._followed, [watching.name(name) for name in names])

    def _groups(self, sizes: Mapping[Tap, int]) -> list[tuple[Tap, ...]]:
        """The taps in runs that stay within the budget together with the sessions that are kept; at least one run."""
        groups: list[list[Tap]] = [[]]
        held, room = 0, self.budget
        if sum(sizes.values()) > room:
            room -= self._kept_bytes
        for tap, size in sizes.items():
            if held and held + size > room:
                groups.append([])
                held = 0
            groups[-1].append(tap)
            held += size
        return [tuple(group) for group in groups]

    def _tap_sizes(self, feeds: Feeds, taps: Sequence[Tap] | None = None) -> dict[Tap, int]:
        """Bytes that fetching every tensor takes: from the shapes in the model, else measured in a run of its own.

        An input takes none, it is there already.
        """
        taps = self._fetched if taps is None else taps
        shapes = tuple((name, array.shape) for name, array in feeds.items())
        known = self._sizes.setdefault(shapes, {})
        new = [tap for tap in taps if tap not in known]
        symbols = self._instrument.symbols(feeds)
        static = {tap: 0 if tap.value.is_graph_input() else _static_bytes(tap.value, symbols) for tap in new}
        unknown = [tap for tap, size in static.items() if size is None]
        known.update((tap, size) for tap, size in static.items() if size is not None)
        known.update(zip(unknown, self._measure(unknown, feeds), strict=True))
        return {tap: known[tap] for tap in taps}

    def _measure(self, taps: Sequence[Tap], feeds: Feeds) -> list[int]:
        if not taps:
            return []
        session = self._instrument.sizing(
            [tap.value for tap in taps],
            lambda model: open_session(model, self.providers, threads=self.threads, order="frugal"),
        )
        counts = session.run(None, feeds)
        return [int(n) * _itemsize(tap.value) for n, tap in zip(counts, taps, strict=True)]


class Instrument:
    """Adds to a model what makes its tensors visible from outside, and opens sessions on parts of that."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.builder = Builder(model)
        self._owners = {
            graph: node
            for node in model.graph.all_nodes()
            for attribute in node.attributes.values()
            if attribute.type == ir.AttributeType.GRAPH
            for graph in (attribute.as_graph(),)
        }
        self._first = next(iter(model.graph), None)
        self._axes: dict[tuple[int, ...], ir.Value] = {}

    def owner(self, graph: ir.Graph) -> ir.Node | None:
        """The node that ``graph`` is a body of; ``None`` for the main graph."""
        return self._owners.get(graph)

    def tap(self, quantizer: Quantizer, value: ir.Value, graph: ir.Graph, axis: int | None = None) -> Tap:
        """The tap of ``value`` as it stands in ``graph``, with everything that brings it into the main graph.

        Args:
            axis: of its channels, counted from the end, where they are to be looked at.
        """
        reducible = (
            quantizer.needs == "minmax"
            and isinstance(quantizer.spec.granularity, PerTensor)
            and value.dtype in (None, ir.DataType.FLOAT)
        )
        if not reducible:
            outer, leading = self.lift(value, graph, np.zeros(0, _numpy_type(value)), None)
            return Tap(quantizer, outer, leading=leading, inside=graph is not self.model.graph)
        tap = Tap(quantizer, value)
        if axis is not None and graph is self.model.graph:  # in a body it would cost much at every step
            self._add_channels(tap, axis)
        place = self._behind(value, graph)
        for op, dtype, neutral, merge in _SCALARS:
            source, behind = value, place
            if op == "ReduceMax" and tap.pooled is not None:
                source, behind = tap.pooled, after(_producer(tap.pooled))
            attributes = {} if op == "Size" else {"keepdims": 0}
            scalar = self.builder.emit(behind, op, [source], f"{value.name}_{op}", dtype, **attributes)
            scalar.shape = ir.Shape([])
            tap.scalars += (self.lift(scalar, graph, np.asarray(neutral), merge)[0],)
        if graph is not self.model.graph:  # its scalars came out; the tensor itself only if it is asked for
            tap.inside = True
            tap.bring_out = partial(self.lift, value, graph, np.zeros(0, np.float32), None)
        return tap

    def _add_channels(self, tap: Tap, axis: int) -> None:
        """Bounds of channels over the axes behind them, one after the other in front; of features, over all axes."""
        value, rank = tap.value, 1 - axis  # of what a convolution makes
        if value.shape is not None:
            rank = len(value.shape)
        axes = tuple(range(axis + 1, 0)) or tuple(range(rank - 1))
        if not axes or (value.shape is None and axis == -1):
            return
        place, floats = self._behind(value, self.model.graph), ir.DataType.FLOAT
        tap.axis = axis
        for op in ("ReduceMin", "ReduceMax"):
            name = f"{value.name}_{op}_channels"
            if op == "ReduceMax" and axis == -3 and _is_image(value):
                end = tap.pooled = self.builder.emit(place, "GlobalMaxPool", [value], name, floats)
            else:
                operands = [value, self._constant_axes(axes)]
                end = self.builder.emit(place, op, operands, name, floats, keepdims=int(axis != -1))
            end.shape = None
            tap.channels += (end,)

    def drop(self, values: Sequence[ir.Value]) -> None:
        """Take out the nodes of the main graph that make ``values``, as far as nobody reads them: the runtime would run them."""
        for value in values:
            node = value.producer()
            if node is not None and not value.uses():
                self.model.graph.remove(node, safe=True)

    def _constant_axes(self, axes: tuple[int, ...]) -> ir.Value:
        if axes not in self._axes:
            self._axes[axes] = self.builder.initializer("axes", np.asarray(axes, np.int64))
        return self._axes[axes]

    def join(self, rows: Sequence[Sequence[ir.Value]]) -> list[ir.Value]:
        """The columns of a table of scalars as vectors: four outputs to hand over, whatever the number of tensors."""
        joined = []
        for column in zip(*rows, strict=True):
            place, name = self.model.graph.append, str(column[0].name)
            dtype = _type_of(column[0])
            several = self.builder.emit(place, "SequenceConstruct", column, f"{name}_several", dtype)
            several.type, several.shape = ir.SequenceType(ir.TensorType(dtype)), None
            vector = self.builder.emit(
                place, "ConcatFromSequence", [several], f"{name}_joined", dtype, axis=0, new_axis=1
            )
            vector.shape = ir.Shape([len(column)])
            joined.append(vector)
        return joined

    def _behind(self, value: ir.Value, graph: ir.Graph) -> Place:
        """The place right behind ``value``: there it is still warm, and gone before its last readers run."""
        node = value.producer()
        if node is not None and node.graph is graph:
            return after(node)
        first = next(iter(graph))
        return before(first)

    def lift(
        self, value: ir.Value, graph: ir.Graph, neutral: Array, merge: str | None
    ) -> tuple[ir.Value, int]:
        """``value`` as a value of the main graph, and how many axes loops put in front of it.

        A branch that is not taken yields ``neutral``; iterations are joined by the operator ``merge``, or stacked.
        """
        leading = 0
        while graph is not self.model.graph:
            owner = self._owners[graph]
            # ONNX Runtime leaves one of two outputs of a body unwritten when they are the same value
            if value.producer() is None or value.graph is not graph or value.is_graph_output():
                value = self.builder.emit(
                    self._behind(value, graph), "Identity", [value], f"{value.name}_seen", _type_of(value)
                )
            graph.outputs.append(value)
            dtype = _type_of(value)
            if owner.op_type == "If":
                self._neutral_branches(owner, graph, neutral, dtype)
            elif owner.op_type == "Scan":
                _extend_scan(owner)
            owner.resize_outputs(len(owner.outputs) + 1)
            outer = owner.outputs[-1]
            outer.name = self.builder.names.value(f"{value.name}_out")
            outer.type = ir.TensorType(dtype)
            assert owner.graph is not None
            value, graph = outer, owner.graph
            if owner.op_type in ("Loop", "Scan"):
                if merge is None:
                    leading += 1
                else:
                    value = self.builder.emit(
                        after(owner), merge, [outer], f"{outer.name}_all", dtype, keepdims=0
                    )
                    value.shape = ir.Shape([])
        return value, leading

    def _neutral_branches(self, owner: ir.Node, taken: ir.Graph, neutral: Array, dtype: ir.DataType) -> None:
        for attribute in owner.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH and attribute.as_graph() is not taken:
                branch = attribute.as_graph()
                node = ir.Node(
                    "",
                    "Constant",
                    [],
                    [ir.AttrTensor("value", ir.Tensor(neutral))],
                    name=self.builder.names.node("none"),
                )
                node.outputs[0].name = self.builder.names.value("none")
                node.outputs[0].type = ir.TensorType(dtype)
                branch.append(node)
                branch.outputs.append(node.outputs[0])

    def open(self, wanted: Sequence[ir.Value], opener: Any) -> Any:
        """A session of the model that also returns ``wanted``; the model is as before afterwards."""
        graph = self.model.graph
        count = len(graph.outputs)
        there = set(graph.outputs)
        graph.outputs.extend([value for value in dict.fromkeys(wanted) if value not in there])
        try:
            return opener(self.model)
        finally:
            del graph.outputs[count:]

    def sizing(self, values: Sequence[ir.Value], opener: Any) -> Any:
        """A session that returns the number of elements of each value, and nothing else."""
        graph = self.model.graph
        sizes = [
            self.builder.emit(self._behind(v, graph), "Size", [v], f"{v.name}_elements", ir.DataType.INT64)
            for v in values
        ]
        for size in sizes:
            size.shape = ir.Shape([])
        outputs = list(graph.outputs)
        graph.outputs.clear()
        graph.outputs.extend(sizes)
        try:
            return opener(self.model)
        finally:
            graph.outputs.clear()
            graph.outputs.extend(outputs)
            for size in sizes:
                node = size.producer()
                assert node is not None
                graph.remove(node, safe=True)

    def symbols(self, feeds: Feeds) -> dict[str, int]:
        """Lengths of the axes that the inputs name."""
        found: dict[str, int] = {}
        for value in self.model.graph.inputs:
            array = feeds.get(str(value.name))
            if array is not None and value.shape is not None and len(value.shape) == array.ndim:
                for axis, n in zip(value.shape, array.shape, strict=True):
                    if isinstance(axis, ir.SymbolicDim) and axis.value is not None:
                        found.setdefault(str(axis.value), n)
        return found


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None, value.name
    return node


def _is_image(value: ir.Value) -> bool:
    """Whether a tensor is known to have pixels: a pool of none is an error."""
    shape = value.shape
    return shape is not None and len(shape) == 4 and all(isinstance(n, int) and n > 0 for n in shape[1:])


def _extend_scan(node: ir.Node) -> None:
    """Tell a Scan about one more scan output; one that runs backwards puts it into the order of what it reads."""
    directions = node.attributes.get_ints("scan_input_directions", ())
    backwards = int(bool(directions) and all(directions))
    states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    for name, last in (("scan_output_axes", 0), ("scan_output_directions", backwards)):
        attribute = node.attributes.get(name)
        if attribute is not None or last:
            known = [0] * (len(node.outputs) - states) if attribute is None else list(attribute.as_ints())
            node.attributes.add(ir.AttrInt64s(name, [*known, last]))


def _type_of(value: ir.Value) -> ir.DataType:
    return value.dtype or ir.DataType.FLOAT


def _numpy_type(value: ir.Value) -> np.dtype[Any]:
    return np.dtype(_type_of(value).numpy())


def _itemsize(value: ir.Value) -> int:
    return _numpy_type(value).itemsize


def _static_bytes(value: ir.Value, symbols: Mapping[str, int]) -> int | None:
    if value.shape is None:
        return None
    size = _itemsize(value)
    for axis in value.shape:
        n = axis if isinstance(axis, int) else symbols.get(str(axis.value))
        if n is None:
            return None
        size *= n
    return size
