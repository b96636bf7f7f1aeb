"""Observe activations while a model runs: bounds by reductions inside the graph, histograms from the tensors.

What a quantizer needs decides what is fetched. Bounds (range method ``minmax``, per tensor) are reductions and a size
beside each tensor; only scalars leave the runtime. ReduceMin and ReduceMax pass over NaN, so a ReduceSum goes
with them: where one of the three is not finite, the tensor itself is fetched in a second run of the batch and counted
exactly. Everything else (histograms, several scales, half types) fetches the tensors and hands them to
:mod:`bitwright.core.numerics.statistics`, so that encodings are those of any other front end, bit for bit.

Memory: tensors are fetched in groups whose bytes stay within a budget, bounds per channel aside, one run of the batch per
group; the runtime frees every other tensor as soon as its readers are through.

Passes over a tensor are saved where they tell nothing new. What operators make of bounded numbers holds no NaN
(:mod:`bitwright.onnx.model.instrument`), and needs no sum. The minimum of a ReLU is zero where a few pixels hold a zero. Whether
a channel is constant (:mod:`bitwright.core.graph.constant_channels`) is seen from its maximum and from the minima of a few
pixels, unless both are the same and above the least value of the tensor; then the tensor is fetched once, and all of its
pixels are looked at from the next batch on. Of tensors that are not images all elements are, by two reductions per channel,
until one batch has counted; the session of the next batches, opened from the model that was optimised for the first, has them
only where a channel was constant in that one, and only the maximum where the constant is the least value of the tensor.

Tensors inside the bodies of If, Loop and Scan leave them as additional outputs; a loop hands out one entry per
iteration, and a branch that was not taken contributes nothing.

Order and layout: ONNX Runtime runs reductions last, when their tensors have left the caches and all of them are still held.
On a CPU with vector units it also computes convolutions in a layout of its own (channels in blocks of 8 or 16) and copies
whatever leaves that layout. Minima, maxima and histograms need neither. So the optimised model is read back from the runtime,
each reduction is moved right behind the tensor that it reduces, copies that only reductions read are removed, and the result is
opened with the order of its nodes kept.

On MobileNetV2, where half of the cost of watching every tensor was such copies, a batch with bounds of all 65 tensors
takes 1.27 of a batch without, before 1.70; and only what the model itself keeps alive is held.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.graph.constant_channels import ChannelWatch
from bitwright.core.numerics import statistics
from bitwright.core.simulation.calibration import BatchGate, Observer, refuse_empty
from bitwright.core.simulation.quantizer import Quantizer
from bitwright.errors import BitwrightError, CalibrationError
from bitwright.export.files.onnx_file import all_nodes, body_protos
from bitwright.onnx.model.data import Feeds, InputSpec, as_feeds, input_specs
from bitwright.onnx.model.instrument import Instrument, Tap, finite_proofs, is_reducible, itemsize, static_bytes
from bitwright.onnx.model.session import (
    Providers,
    check_providers,
    first_line,
    open_file,
    open_session,
    return_memory,
    save_optimized,
    weight_bytes,
)
from bitwright.onnx.simulation.marked_model import MarkedSimulation
from bitwright.progress import collector_paused
from bitwright.runtimes.onnxruntime import refusals

_BLOCKED = "com.microsoft.nchwc"  # operators on channels in blocks
# what leaves the number of channels of all its inputs as it is
_CHANNELWISE = frozenset(
    ("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "Upsample", "Add", "Sum", "Mul")
    + ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid", "Clip")
)


@dataclass(frozen=True, eq=False)
class Watching:
    """A session, and its names of outputs that are renamed there.

    ``optimized``, and the folder of its weights, are what :func:`narrow` opens another one from; ``None`` where nothing was
    kept.
    """

    session: Any
    names: Mapping[str, str]
    optimized: onnx.ModelProto | None = None
    folder: tempfile.TemporaryDirectory[str] | None = None

    def name(self, output: str) -> str:
        """Name to fetch for ``output``."""
        return self.names.get(output, output)


def open_watching(
    model: ir.Model,
    providers: Providers | None = None,
    *,
    threads: int = 0,
    scalars: Collection[str] = (),
    small: Collection[str] = (),
    unordered: Collection[str] = (),
    arena: bool = True,
    keep: bool = False,
) -> Watching:
    """Open a session that frees each tensor after its readers, including reductions.

    What the runtime has optimised is edited as the message that it wrote, which takes a tenth of the time of reading and
    writing it as an ``onnx_ir`` model.

    Args:
        model: all that is watched is among its graph outputs.
        providers, threads: of the session.
        scalars: values that reduce one tensor to one number, whatever the order of its elements.
        small: graph outputs made of tensors of the model, and of no other use: what makes them runs right after
            what it reads.
        unordered: outputs of which the elements are wanted in any order. A convolution's result may come with channels
            in blocks then; nothing is added to it and nothing is missing.
        arena: keep the memory of one run for the next.
        keep: the optimised model, where there is one, for :func:`narrow`.

    Raises:
        ConfigError: a provider is not available.
        ModelError: the runtime refuses the model.
    """
    plain = check_providers(providers) == check_providers(None)
    if not (plain and any(node.op_type == "Conv" for node in model.graph)):
        return Watching(open_session(model, providers, threads=threads, order="frugal", arena=arena), {})
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder)
        path = Path(folder.name, "optimized.onnx")
        save_optimized(model, path)
        optimized = onnx.load(str(path), load_external_data=False)
        names = watch_blocked(optimized.graph, frozenset(scalars), frozenset(unordered))
        reduce_early(optimized.graph, frozenset(small))
        path.write_bytes(optimized.SerializeToString())
        watching = Watching(open_file(path, threads=threads, arena=arena), names)
        if not keep:
            return watching
        stack.pop_all()  # the folder goes with what is kept
        return replace(watching, optimized=optimized, folder=folder)


def narrow(
    watching: Watching,
    outputs: Collection[str],
    *,
    scalars: Collection[str] = (),
    unordered: Collection[str] = (),
    threads: int = 0,
    arena: bool = True,
) -> Watching:
    """A session for some of the outputs of an earlier one, opened in a third of the time.

    Args:
        watching: from :func:`open_watching` with ``keep``; it gives up what it kept.
        outputs: those to keep, under the names they had in the model.
        scalars, unordered, threads, arena: as for :func:`open_watching`; ``unordered`` may name more than before.
    """
    assert watching.optimized is not None and watching.folder is not None
    graph, kept = watching.optimized.graph, {watching.name(name) for name in outputs}
    _replace(graph.output, [value for value in graph.output if value.name in kept])
    needed = _needed(graph, kept)
    _replace(graph.node, [node for i, node in enumerate(graph.node) if i in needed])
    names = {**watching.names, **watch_blocked(graph, frozenset(scalars), frozenset(unordered))}
    with watching.folder as folder:
        path = Path(folder, "narrowed.onnx")
        path.write_bytes(watching.optimized.SerializeToString())
        return Watching(open_file(path, threads=threads, arena=arena), names)


def watch_blocked(graph: onnx.GraphProto, scalars: Collection[str], unordered: Collection[str]) -> dict[str, str]:
    """Read tensors in the runtime's own layout wherever the order of elements does not matter.

    Args:
        graph: as the runtime optimised it; changed.
        scalars, unordered: as for :func:`open_watching`.

    Returns:
        ``unordered`` output -> output that holds its elements in another order.
    """
    channels, readers = _blocked_channels(graph), _readers(graph)
    outputs = {value.name: value for value in graph.output}
    found: dict[str, str] = {}
    kept = []
    for node in graph.node:
        if not _is_copy(node) or channels.get(node.input[0]) != _attribute(node, "channels"):
            kept.append(node)  # no copy; or one of a tensor filled up with zeros, or of unknown channels
            continue
        blocked, plain = node.input[0], node.output[0]
        still = [read for read in readers[plain] if not _redirect(*read, blocked, scalars)]
        if plain in unordered and plain in outputs and blocked not in outputs:
            outputs[blocked] = outputs.pop(plain)
            outputs[blocked].name = found[plain] = blocked
        if still or plain in outputs:
            kept.append(node)
    _replace(graph.node, kept)
    return found


def _is_copy(node: onnx.NodeProto) -> bool:
    return bool(node.domain == _BLOCKED and node.op_type == "ReorderOutput")


def _redirect(reader: onnx.NodeProto, port: int, blocked: str, scalars: Collection[str]) -> bool:
    """Let a reduction read the blocked tensor; returns whether the reader is a reduction."""
    reduces = port >= 0 and all(name in scalars for name in reader.output)
    if reduces:
        reader.input[port] = blocked
    return reduces


def _attribute(node: onnx.NodeProto, name: str) -> int | None:
    return next((int(found.i) for found in node.attribute if found.name == name), None)


def _blocked_channels(graph: onnx.GraphProto) -> dict[str, int]:
    """Channels of values in the runtime's own layout, those that only fill the last block included."""
    found: dict[str, int] = {}
    weights = {tensor.name: tensor.dims[0] for tensor in graph.initializer if tensor.dims}
    for node in graph.node:
        if node.domain == _BLOCKED and node.op_type == "Conv":
            count = weights.get(node.input[1])
        else:
            count = _channels_made(node, [found.get(name) for name in node.input if name])
        if count is not None:
            found[node.output[0]] = count
    return found


def _channels_made(node: onnx.NodeProto, given: Collection[int | None]) -> int | None:
    """Number of output channels of ``node`` from those of its operands; ``None`` where it is not known."""
    known = [n for n in given if n is not None]
    if not known or len(known) < len(given):
        return None
    if node.op_type == "Concat":
        return sum(known)
    return known[0] if node.op_type in _CHANNELWISE and len(set(known)) == 1 else None


def reduce_early(graph: onnx.GraphProto, small: Collection[str]) -> None:
    """Move nodes that only ``small`` outputs need right after their operands; the runtime puts them last.

    Args:
        graph: in an order in which it can run; stays so.
        small: see :func:`open_watching`.
    """
    nodes = list(graph.node)
    needed = _needed(graph, [value.name for value in graph.output if value.name not in small])
    made = {name for node in nodes for name in node.output if name}
    free = set(range(len(nodes))) - needed
    sources = {i: [name for name in _read(nodes[i]) if name in made] for i in sorted(free)}
    first = [i for i, names in sources.items() if not names]  # they reduce inputs of the model
    order = _with_readers([*first, *sorted(needed)], sources, nodes)
    _replace(graph.node, [nodes[i] for i in order])


def _with_readers(
    places: Sequence[int], sources: Mapping[int, Sequence[str]], nodes: Sequence[onnx.NodeProto]
) -> Iterator[int]:
    """Order ``places``, with those in ``sources`` right after the last producer of their sources."""
    waiting: dict[str, list[int]] = defaultdict(list)  # by what they wait for
    missing = {i: len(names) for i, names in sources.items()}
    for i, names in sources.items():
        for name in names:
            waiting[name].append(i)
    stack = list(reversed(places))
    while stack:
        at = stack.pop()
        yield at
        freed = []
        for reader in chain.from_iterable(waiting.pop(name, ()) for name in nodes[at].output):
            missing[reader] -= 1
            if not missing[reader]:
                freed.append(reader)
        stack.extend(reversed(freed))


def _needed(graph: onnx.GraphProto, outputs: Collection[str]) -> set[int]:
    """Places of the nodes that take part in what ``outputs`` hold."""
    wanted, found = set(outputs), set()
    for i in range(len(graph.node) - 1, -1, -1):
        node = graph.node[i]
        if not wanted.isdisjoint(node.output):
            found.add(i)
            wanted.update(_read(node))
    return found


def _readers(graph: onnx.GraphProto) -> dict[str, list[tuple[onnx.NodeProto, int]]]:
    """Name -> the nodes that read it, each with its port, -1 where a body of the node reads it."""
    found: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
    for node in graph.node:
        for port, name in enumerate(_read(node)):
            found[name].append((node, port if port < len(node.input) else -1))
    return found


def _read(node: onnx.NodeProto) -> list[str]:
    """Names of what a node reads: its inputs, and then all names in its bodies."""
    return [*node.input, *_read_in_bodies(node)]


def _read_in_bodies(node: onnx.NodeProto) -> Iterator[str]:
    nodes = [node]
    while nodes:
        for body in body_protos(nodes.pop()):
            nodes.extend(body.node)
            yield from (name for inner in body.node for name in inner.input)
            yield from (value.name for value in body.output)


def _replace(field: Any, items: list[Any]) -> None:
    """Set a repeated field of a message to ``items``, which may come from it."""
    del field[:]
    field.extend(items)


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
        """Close sessions until one more fits: those of other shapes first, then the most recent.

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
        """Bytes of each tap, from the shapes in the model, else measured in a run; inputs take none."""
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
class Calibrator(Observer):
    """Runs batches and fills the statistics of quantizers.

    Args:
        simulation: constants quantized, activations in float except the frozen ones.
        quantizers: site -> quantizer, for the activation sites to watch.
        budget: bytes of activations that may be held at once beside what the model itself needs.
        providers, threads: of the sessions.
        gate: decides about batches that are not finite; without one their finite elements are used.
        channels: site -> what it shows of its channels.
    """

    simulation: MarkedSimulation
    quantizers: Mapping[str, Quantizer]
    budget: int
    providers: Providers | None = None
    threads: int = 0
    gate: BatchGate | None = None
    channels: Mapping[str, ChannelWatch] = field(default_factory=dict)
    runs: int = 0
    specs: tuple[InputSpec, ...] = field(init=False)

    @collector_paused()
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
        place = {value: i for i, node in enumerate(all_nodes(model.graph)) for value in node.outputs}
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
        """Restrict observation to channels that another batch can still change, if observing is expensive."""
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
        """Observe all pixels from now on, since a few did not suffice."""
        self._instrument.look_whole(tap)
        self._changes += 1

    # -- running

    def run(self, given: Any) -> list[Array]:
        """Run one batch and observe it; returns the outputs of the model with float activations.

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
        """Pass the collected bounds to the quantizers."""
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
        """Mask of reduced tensors without NaN and Inf, by their sums or by their sources."""
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
        """Whether the minimum over a few pixels may differ from the tensor's, and matters."""
        floor = self._reduced[i].floor
        return floor is not None and lo > floor and self._bounds.lo[i] > floor

    def _read_channels(self, ends: Mapping[Tap, list[Array]], scalars: Sequence[Array], feeds: Feeds) -> None:
        """Read the bounds per channel; where they do not suffice, fetch the tensor."""
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
        """Open a session; ``before``: one with the channels of more taps, to be narrowed."""
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
    simulation: MarkedSimulation,
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
    simulation: MarkedSimulation, quantizers: Mapping[str, Quantizer]
) -> list[tuple[str, Quantizer, ir.Value, ir.Graph]]:
    """Every watched site, its quantizer, and a tensor that enters it with the graph in which it stands."""
    watched = {site: quantizer for site, quantizer in quantizers.items() if _is_watched(quantizer)}
    places = ((site, place) for site, found in simulation.taps.items() if site in watched for place in found)
    return [(site, watched[site], *place) for site, place in places]


def _is_watched(quantizer: Quantizer) -> bool:
    return quantizer.enabled and not quantizer.frozen and (quantizer.checks_range or not quantizer.is_fixed)


def _count(group: Sequence[Tap], found: list[Array], feeds: Feeds, see: Callable[[Tap, Array], None]) -> None:
    """Count the tensors of one run; each is removed from ``found`` once counted, to free its memory."""
    found.reverse()
    for tap in group:
        name = str(tap.value.name)
        see(tap, feeds[name] if name in feeds else found.pop())
    assert not found, "more was fetched than is watched"
