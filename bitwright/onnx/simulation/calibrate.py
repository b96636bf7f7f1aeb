"""Watching activations while a model runs: bounds by reductions inside the graph, histograms from the tensors.

What a quantizer needs decides what is fetched. Bounds (range method ``minmax``, per tensor) are reductions and a size
beside each tensor; only scalars leave the runtime. ReduceMin and ReduceMax pass over NaN, so a ReduceSum goes
with them: where one of the three is not finite, the tensor itself is fetched in a second run of the batch and counted
exactly. Everything else (histograms, several scales, half types) fetches the tensors and hands them to
:mod:`bitwright.core.numerics.statistics`, so that encodings are those of any other front end, bit for bit.

Memory: tensors are fetched in groups whose bytes stay within a budget, bounds per channel aside, one run of the batch per
group; the runtime frees every other tensor as soon as its readers are through (:mod:`bitwright.onnx.simulation.schedule`).

Passes over a tensor are saved where they tell nothing new. What operators make of bounded numbers holds no NaN
(:mod:`bitwright.onnx.model.finite`), and needs no sum. The minimum of a ReLU is zero where a few pixels hold a zero. Whether
a channel is constant (:mod:`bitwright.core.graph.constant_channels`) is seen from its maximum and from the minima of a few
pixels, unless both are the same and above the least value of the tensor; then the tensor is fetched once, and all of its
pixels are looked at from the next batch on. Of tensors that are not images all elements are, by two reductions per channel,
until one batch has counted; the session of the next batches, opened from the model that was optimised for the first, has them
only where a channel was constant in that one, and only the maximum where the constant is the least value of the tensor.

Tensors inside the bodies of If, Loop and Scan leave them as additional outputs; a loop hands out one entry per
iteration, and a branch that was not taken contributes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.graph.constant_channels import ChannelWatch
from bitwright.core.numerics import statistics
from bitwright.core.simulation.calibration import BatchGate, refuse_empty
from bitwright.core.simulation.quantizer import Quantizer
from bitwright.errors import BitwrightError, CalibrationError
from bitwright.export.verify.runtime import refusals
from bitwright.onnx.model.data import Feeds, InputSpec, as_feeds, input_specs
from bitwright.onnx.model.finite import finite_proofs
from bitwright.onnx.model.instrument import Instrument, Tap, is_reducible, itemsize, static_bytes
from bitwright.onnx.model.session import Providers, first_line, open_session, return_memory, weight_bytes
from bitwright.onnx.simulation.schedule import Watching, narrow, open_watching
from bitwright.onnx.simulation.simulate import Simulation

Array = NDArray[Any]
_KEPT = 32  # sessions at most


@dataclass
class _Bounds:
    """Bounds of all reduced taps so far, as vectors: one update per batch, whatever the number of sites."""

    lo: Array
    hi: Array
    count: Array
    energy: Array

    @classmethod
    def of(cls, size: int) -> _Bounds:
        return cls(np.full(size, np.inf), np.full(size, -np.inf), np.zeros(size, np.int64), np.zeros(size))

    def add(self, lo: Array, hi: Array, count: Array, energy: Array, use: Array) -> None:
        self.lo = np.where(use, np.minimum(self.lo, lo), self.lo)
        self.hi = np.where(use, np.maximum(self.hi, hi), self.hi)
        self.count = self.count + np.where(use, count, 0)
        self.energy = self.energy + np.where(use, energy, 0.0)


@dataclass(eq=False)
class _Session:
    """A session with some taps among its outputs."""

    watching: Watching
    state: tuple[int, dict[Tap, bool]]  # how often a tap was changed, and those that show their channels, and how
    names: list[str]  # to fetch: outputs of the model, scalars, bounds of channels, arrays
    used: int = 0  # number of the batch that it ran last

    def run(self, feeds: Feeds) -> list[Array]:
        found: list[Array] = self.watching.session.run(self.names, feeds)
        return found


@dataclass(eq=False)
class _Sessions:
    """Sessions that are kept for the batches to come, their weights in a quarter of the budget.

    Attributes:
        budget: bytes of activations and of these weights.
        weights: bytes in one session.
        kept: what a run fetches -> its session.
    """

    budget: int
    weights: int
    kept: dict[tuple[Any, ...], _Session] = field(default_factory=dict)

    @property
    def _room(self) -> int:
        """The part of the budget for the weights of sessions that are kept beside the one that runs."""
        part = self.budget // 4
        return part if self.weights <= part else 0

    def make_room(self, runs: int) -> None:
        """Let sessions go until one more may come: those of other shapes first, then the one that ran last.

        Groups come round in the same order with every batch, so what ran last is needed last.
        """
        beside = min(self._room // max(1, self.weights), _KEPT - 1)
        if len(self.kept) <= beside:
            return
        for key in [key for key, session in self.kept.items() if session.used < runs - 1]:
            del self.kept[key]
        while len(self.kept) > beside:
            self.kept.popitem()
        return_memory()

    def groups(self, sizes: Mapping[Tap, int]) -> list[tuple[Tap, ...]]:
        """The taps in runs that stay within the budget together with the sessions that are kept; at least one run."""
        groups: list[list[Tap]] = [[]]
        held, room = 0, self.budget
        if sum(sizes.values()) > room:
            room -= self._room
        for tap, size in sizes.items():
            if held and held + size > room:
                groups.append([])
                held = 0
            groups[-1].append(tap)
            held += size
        return [tuple(group) for group in groups]


@dataclass(eq=False)
class _Sizes:
    """Bytes that fetching a tensor takes, by the shapes of the feeds."""

    instrument: Instrument
    open: Callable[[ir.Model], Any]
    known: dict[tuple[Any, ...], dict[Tap, int]] = field(default_factory=dict)

    def of(self, taps: Sequence[Tap], feeds: Feeds) -> dict[Tap, int]:
        """From the shapes in the model, else measured in a run of its own. An input takes none, it is there already."""
        known = self.known.setdefault(tuple((name, array.shape) for name, array in feeds.items()), {})
        new = [tap for tap in taps if tap not in known]
        symbols = self.instrument.symbols(feeds)
        static = {tap: 0 if tap.value.is_graph_input() else static_bytes(tap.value, symbols) for tap in new}
        unknown = [tap for tap, size in static.items() if size is None]
        known.update((tap, size) for tap, size in static.items() if size is not None)
        if unknown:
            counts = self.instrument.sizing([tap.value for tap in unknown], self.open).run(None, feeds)
            sizes = (int(n) * itemsize(tap.value) for n, tap in zip(counts, unknown, strict=True))
            known.update(zip(unknown, sizes, strict=True))
        return {tap: known[tap] for tap in taps}


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

    def __post_init__(self) -> None:
        model = self.simulation.model
        self.specs = input_specs(model)
        self._outputs = [str(v.name) for v in model.graph.outputs]
        self._instrument = Instrument(model)
        self.taps = _find_taps(self.simulation, self.quantizers, self.channels, self._instrument)
        self._reduced = [tap for tap in self.taps if tap.scalars]
        self._fetched = [tap for tap in self.taps if not tap.scalars]
        self._summed = [i for i, tap in enumerate(self._reduced) if tap.total is not None]
        totals = [tap.total for tap in self._reduced if tap.total is not None]
        self._joined = self._instrument.join([*zip(*(tap.scalars for tap in self._reduced), strict=True), totals])
        place = {value: i for i, node in enumerate(model.graph.all_nodes()) for value in node.outputs}
        # as the model runs: what a proof rests on comes before it
        self._in_order = sorted(range(len(self._reduced)), key=lambda i: place.get(self._reduced[i].value, -1))
        self._bounds = _Bounds.of(len(self._reduced))
        self._followed = dict.fromkeys((tap for tap in self.taps if tap.followed), True)
        self._changes = 0  # how often a tap was told to look at more
        self._settled = False  # whether a batch has shown which channels may be constant
        self._sessions = _Sessions(self.budget, weight_bytes(model))
        self._sizes = _Sizes(
            self._instrument, partial(open_session, providers=self.providers, threads=self.threads, order="frugal")
        )

    def _settle(self) -> None:
        """From now on look at those channels only of which another batch can still tell something, if looking costs much."""
        if self._settled:
            return
        least = dict(zip(self._reduced, self._bounds.lo.tolist(), strict=True))
        followed = dict[Tap, bool]()
        for tap in self._followed:
            lowest = least.get(tap, tap.lowest)
            if tap.sampled and tap.followed and not tap.is_least(lowest):
                self._look_whole(tap)
            if tap.cheap:
                followed[tap] = True
            elif tap.followed:
                followed[tap] = not tap.channels or not tap.is_least(lowest)
        self._followed, self._settled = followed, True
        for tap in self.taps:
            both = self._followed.get(tap)
            self._instrument.drop(tap.channels if both is None else tap.channels[: 0 if both else 1])

    def _look_whole(self, tap: Tap) -> None:
        """A few pixels did not tell enough."""
        self._instrument.look_whole(tap)
        self._changes += 1

    # -- running

    def run(self, given: Any) -> list[Array]:
        """Run one batch and watch it; the outputs of the model, activations in float.

        Raises:
            ModelError: the batch does not fit the inputs.
            CalibrationError: it holds no sample, or the model fails on it, or makes NaN or Inf of it that the gate does not
                let through.
        """
        where = f"batch {self.runs}"
        feeds = as_feeds(given, self.specs, where)
        refuse_empty(self.runs, {name: array.shape for name, array in feeds.items()})
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
            groups = self._sessions.groups(self._sizes.of(self._fetched, feeds))
            for i, group in enumerate(groups):
                found = self._session(group, first=i == 0, arena=len(groups) == 1).run(feeds)
                if i == 0:
                    outputs, found = found[: len(self._outputs)], found[len(self._outputs) :]
                    scalars, found = found[: len(self._joined)], found[len(self._joined) :]
                    ends, found = self._split(found)
                _count(group, found, feeds, Tap.observe)
            odd = self._read_scalars(scalars, feeds)  # may take runs of its own
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
                bounds = statistics.MinMax(np.asarray(lo[i]), np.asarray(hi[i]), seen, none, none, none)
                if tap.quantizer.needs == "energy":
                    energy = np.asarray(self._bounds.energy[i] * tap.times)
                    tap.quantizer.observe_statistics(statistics.energy_of(bounds, energy))
                else:
                    tap.quantizer.observe_statistics(bounds)
        self._bounds = _Bounds.of(len(self._reduced))

    def _channel_values(self) -> dict[Tap, tuple[ir.Value, ...]]:
        """The bounds per channel that a run gives, for every tap whose channels are looked at by them."""
        followed = ((tap, both) for tap, both in self._followed.items() if tap.channels)
        return {tap: tap.channels if both else tap.channels[1:] for tap, both in followed}

    def _split(self, found: list[Array]) -> tuple[dict[Tap, list[Array]], list[Array]]:
        """The bounds per channel that a run gave, and what comes after them."""
        rest = iter(found)
        return {tap: list(islice(rest, len(values))) for tap, values in self._channel_values().items()}, list(rest)

    def _read_scalars(self, found: Sequence[Array], feeds: Feeds) -> list[Tap]:
        """Take the bounds of the reduced taps; those that were fetched because they are not finite."""
        if not self._reduced:
            return []
        lo, hi, count, *total = (vector.astype(np.float64) for vector in found)
        there = count > 0
        finite = self._finite(lo, hi, np.isfinite(total[0]) if total else np.zeros(0, bool), there)
        missed = there & finite & np.array([self._missed(i, lo[i]) for i in range(lo.size)], bool)
        energy = np.zeros(lo.size)
        if total:  # of the tensors whose range is given, the sum of squares
            energy[self._summed] = np.where([self._reduced[i].squares for i in self._summed], total[0], 0.0)
        self._bounds.add(lo, hi, count.astype(np.int64), energy, there & finite & ~missed)
        for i in np.flatnonzero(~there):
            self._reduced[i].note_empty()
        odd = [self._reduced[i] for i in np.flatnonzero(there & ~finite | missed)]
        self._look_again(odd, feeds, Tap.observe)
        for i in np.flatnonzero(missed):
            self._look_whole(self._reduced[i])
        return odd

    def _finite(self, lo: Array, hi: Array, summed: Array, there: Array) -> Array:
        """Which reduced tensors hold neither NaN nor Inf, by their sums or by what they are made of."""
        finite = np.isfinite(lo) & np.isfinite(hi)
        finite[self._summed] &= summed
        known: dict[ir.Value, float] = {}
        for i in self._in_order:
            tap = self._reduced[i]
            finite[i] &= tap.finite is None or tap.finite.holds(known)
            if finite[i] and there[i]:
                known[tap.value] = max(-lo[i], hi[i], 0.0 if tap.floor is None else abs(tap.floor))
        return finite

    def _missed(self, i: int, lo: float) -> bool:
        """Whether the least of a few pixels need not be that of the tensor, and that matters."""
        floor = self._reduced[i].floor
        return floor is not None and lo > floor and self._bounds.lo[i] > floor

    def _read_channels(self, ends: Mapping[Tap, list[Array]], scalars: Sequence[Array], feeds: Feeds) -> None:
        """Take the bounds per channel; where they are not enough, look at the tensor."""
        lows = np.minimum(scalars[0], self._bounds.lo) if self._reduced else ()
        least = dict(zip(self._reduced, map(float, lows), strict=True))
        unclear = [t for t, found in ends.items() if not t.observe_channels(found, least.get(t, t.least))]
        self._look_again(unclear, feeds, Tap.observe_channels_of)

    def _look_again(self, taps: Sequence[Tap], feeds: Feeds, see: Callable[[Tap, Array], None]) -> None:
        """Fetch reduced tensors of the same batch."""
        for tap in taps:
            tap.settle()
        for group in self._sessions.groups(self._sizes.of(taps, feeds)) if taps else ():
            given = all(tap.value.is_graph_input() for tap in group)  # no run needed: they came with the batch
            found = [] if given else self._session(group, first=False, arena=False, whole=True).run(feeds)
            _count(group, found, feeds, see)

    # -- sessions

    def _session(self, arrays: Sequence[Tap], *, first: bool, arena: bool, whole: bool = False) -> _Session:
        """The session for a run; a few are kept for the batches to come. ``whole``: channels are looked at in the tensors."""
        key = (tuple(map(id, arrays)), first, arena, whole)
        found = self._sessions.kept.pop(key, None)
        if found is None or found.state != (self._changes, self._followed):
            narrowed = found is not None and found.state[0] == self._changes
            before = replace(found.watching, session=None) if found is not None and narrowed else None
            found = None  # its memory goes before another one takes its own
            self._sessions.make_room(self.runs)
            found = self._open(arrays, first=first, arena=arena, whole=whole, before=before)
        found.used = self.runs
        self._sessions.kept[key] = found
        return found

    def _open(
        self, arrays: Sequence[Tap], *, first: bool, arena: bool, whole: bool = False, before: Watching | None = None
    ) -> _Session:
        """A session; ``before`` is what is left of one that showed the channels of more taps."""
        fetched = [tap for tap in arrays if not tap.value.is_graph_input()]
        small = [*self._joined, *chain.from_iterable(self._channel_values().values())] if first else []
        names = [*(self._outputs if first else ()), *(str(v.name) for v in small)]
        names += [str(tap.value.name) for tap in fetched]
        reduced = {str(v.name) for tap in self._reduced for v in (*tap.scalars, tap.total) if v is not None}
        unordered = self._unordered(fetched, whole)
        if before is not None and before.optimized is not None:
            kept = {*names, *self._outputs}
            watching = narrow(before, kept, scalars=reduced, unordered=unordered, threads=self.threads, arena=arena)
        else:
            opener = partial(
                open_watching,
                providers=self.providers,
                threads=self.threads,
                scalars=reduced,
                small={str(v.name) for v in small},
                unordered=unordered,
                arena=arena,
                keep=not self._settled and not all(tap.cheap for tap in self._followed),
            )
            watching = self._instrument.open([*small, *(tap.value for tap in fetched)], opener)
        return _Session(watching, (self._changes, self._followed), [watching.name(name) for name in names])

    def _unordered(self, fetched: Sequence[Tap], whole: bool) -> set[str]:
        """Names of the fetched tensors whose elements may come in any order."""
        by_array = {tap for tap in self._followed if whole or not tap.channels}
        ordered = {tap.value for tap in fetched if not tap.unordered or tap in by_array}
        free = {str(tap.value.name) for tap in fetched if tap.value not in ordered}
        return free.difference(self._outputs)


def _find_taps(
    simulation: Simulation,
    quantizers: Mapping[str, Quantizer],
    channels: Mapping[str, ChannelWatch],
    instrument: Instrument,
) -> list[Tap]:
    """A tap for every tensor that enters a watched site, one for all sites of a quantizer."""
    main, entered = simulation.model.graph, _entered(simulation, quantizers)
    bounded = finite_proofs(main, {v for _, q, v, graph in entered if graph is main and is_reducible(q, v)})
    found: dict[tuple[int, ir.Value, ir.Graph], Tap] = {}
    for site, quantizer, value, graph in entered:
        key = (id(quantizer), value, graph)
        watch = channels.get(site, ChannelWatch())
        if key in found:
            found[key].times += 1
        else:
            axis = None if watch.place is None else watch.place.axis
            proof = bounded.get(value) if graph is main else None
            found[key] = instrument.tap(quantizer, value, graph, axis, proof)
        found[key].watches.append(watch)
    return list(found.values())


def _entered(
    simulation: Simulation, quantizers: Mapping[str, Quantizer]
) -> list[tuple[str, Quantizer, ir.Value, ir.Graph]]:
    """Every watched site, its quantizer, and a tensor that enters it with the graph in which it stands."""
    watched = {site: quantizer for site, quantizer in quantizers.items() if _is_watched(quantizer)}
    places = ((site, place) for site, found in simulation.taps.items() if site in watched for place in found)
    return [(site, watched[site], *place) for site, place in places]


def _is_watched(quantizer: Quantizer) -> bool:
    return quantizer.enabled and not quantizer.frozen and (quantizer.checks_range or not quantizer.is_fixed)


def _count(group: Sequence[Tap], found: list[Array], feeds: Feeds, see: Callable[[Tap, Array], None]) -> None:
    """Count the tensors of one run; ``found`` gives up each once it is counted, so that nothing waits for the next."""
    found.reverse()
    for tap in group:
        name = str(tap.value.name)
        see(tap, feeds[name] if name in feeds else found.pop())
    assert not found, "more was fetched than is watched"
