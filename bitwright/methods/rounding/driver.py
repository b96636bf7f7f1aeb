"""Driver of all rounding methods: layers in execution order, with the inputs that quantized predecessors produce.

A method is a function that chooses the weights of one unit; finding the layers, bringing float and quantized values to
them, keeping finished work and reporting is done here.

A :class:`Walk` keeps, for every batch, the values that later steps still read, and advances unit by unit, so nothing is
computed twice from the model's input. Values beyond the memory budget lie in files of a temporary folder and are mapped into
memory: tensors stay tensors wherever they are.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import math
import shutil
import tempfile
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.core.graph.float_values import chosen_rows
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS
from bitwright.core.numerics.affine import with_stored_scale
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.simulation.calibration import with_samples
from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.sites import Site
from bitwright.errors import CalibrationError, ConfigError, close_matches
from bitwright.export.files.manifest import Fingerprint
from bitwright.methods.layers import holds_layer_weight, joined
from bitwright.methods.rounding.matrices import RECURRENT, Grid, Layer, Moments, moments, rows_of_each
from bitwright.methods.rounding.program import Program, SimulatedModel, State, Step, Unit, apart, run, run_step
from bitwright.tables import Tabular, text_table

_SMALL = 1 << 16  # bytes below which a tensor is not worth a file


class Store:
    """Stores tensors: in memory up to ``budget`` bytes, beyond that in temporary mapped files.

    Args:
        budget: bytes in memory; ``None`` sets no limit.
        folder: where the temporary folder is made; the system's choice by default.

    Raises:
        CalibrationError: (from :meth:`keep`) the disk has no room either.
    """

    def __init__(self, budget: int | None = None, folder: str | Path | None = None) -> None:
        self.budget, self.used, self.spilled, self.peak = budget, 0, 0, 0
        self._parent = None if folder is None else Path(folder)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0
        self._sizes: dict[int, int] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        """``tensor``, or an equal one mapped from a file; for a sequence, each of its tensors."""
        if not isinstance(tensor, Tensor):
            return tuple(map(self.keep, tensor)) if isinstance(tensor, tuple) else tensor
        storage = tensor.untyped_storage()
        if self.budget is None or tensor.device.type != "cpu" or storage.data_ptr() in self._sizes:
            return tensor
        size = storage.nbytes()
        if self.used + size > self.budget and size > _SMALL:
            return self._spill(tensor)
        self._note(storage.data_ptr(), size, tensor)
        return tensor

    def _note(self, pointer: int, size: int, tensor: Tensor) -> None:
        self._sizes[pointer] = size
        self.used += size
        self.peak = max(self.peak, self.used)
        weakref.finalize(tensor, self._forget, pointer)

    def _forget(self, pointer: int) -> None:
        self.used -= self._sizes.pop(pointer, 0)

    def empty(self, shape: Sequence[int]) -> Tensor:
        """An uninitialised float32 tensor in memory or in a file."""
        size = 4 * int(np.prod(shape))
        if self.budget is None or self.used + size <= self.budget:
            tensor = torch.empty(tuple(shape))
            if self.budget is not None:
                self._note(tensor.untyped_storage().data_ptr(), size, tensor)
            return tensor
        return torch.from_numpy(self._map(tuple(shape), np.dtype(np.float32)))

    def _spill(self, tensor: Tensor) -> Tensor:
        source = tensor.detach().contiguous()
        if source.dtype == torch.bfloat16:  # numpy has no such numbers
            bits = self._map(tuple(source.shape), np.dtype(np.int16))
            bits[...] = source.view(torch.int16).numpy()
            return torch.from_numpy(bits).view(torch.bfloat16)
        array = source.numpy()
        mapped = self._map(array.shape, array.dtype)
        mapped[...] = array
        return torch.from_numpy(mapped)

    def _map(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.memmap[Any, Any]:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="bitwright-", dir=self._parent)
        size = int(np.prod(shape)) * dtype.itemsize
        free = shutil.disk_usage(self._folder.name).free
        if size > free:
            raise CalibrationError(
                str(self._parent or tempfile.gettempdir()),
                f"activations need {size >> 20} MiB more than the memory budget of {(self.budget or 0) >> 20} MiB, and "
                f"the disk has {free >> 20} MiB left",
                "give fewer samples, a larger memory_budget, or a spill_dir on a larger disk; layers that are done are "
                "kept in cache_dir when one is given",
            )
        self._count += 1
        path = Path(self._folder.name, f"{self._count}.bin")
        mapped = np.memmap(path, dtype, "w+", shape=shape)
        self.spilled += size
        path.unlink()  # the map keeps the file as long as a tensor reads it
        return mapped

    def close(self) -> None:
        """Remove the temporary folder."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


@dataclass
class Run:
    """The progress of one batch: its program, both states, its share of the data, and the next step of each stream."""

    program: Program
    real: State
    quantized: State
    share: float = 1.0
    real_at: int = 0
    quantized_at: int = 0


class Walk:
    """The progress of calibration batches through a model.

    Args:
        model: the simulation.
        batches: as the front end takes them.
        store: where values are kept.

    Attributes:
        short: layers that see fewer samples than they have inputs -> both numbers.

    Raises:
        CalibrationError: no batch came.
    """

    def __init__(self, model: SimulatedModel, batches: Iterable[Any], store: Store) -> None:
        self.model, self.store = model, store
        self.short: dict[str, str] = {}
        self.runs: list[Run] = []
        self._float: dict[int, dict[int, Tensor]] = {}
        self._after_selection: set[str] | None = None  # layers that read rows which an operator selected
        for batch in with_samples(batches):
            program, state = model.program(batch)
            kept = {value: store.keep(tensor) for value, tensor in state.items()}
            self.runs.append(Run(program, kept, dict(kept), float(_numbers(state))))
        if not self.runs:
            raise CalibrationError(
                "reconstruction",
                "the data held no batch",
                "give a non-empty list or loader (a generator can be used only once); 256 to 1024 samples are enough",
            )

        total = sum(r.share for r in self.runs)
        for r in self.runs:
            r.share = r.share / total if total else 1 / len(self.runs)

    @property
    def programs(self) -> list[Program]:
        """The programs of all batches, each once."""
        return list({id(r.program): r.program for r in self.runs}.values())

    @property
    def program(self) -> Program:
        """The program of the first batch."""
        return self.runs[0].program

    @property
    def one_program(self) -> bool:
        """Whether every batch takes the same steps, with tensors of the same shapes."""
        return all(r.program is self.program for r in self.runs)

    def advance(self, ops: Sequence[str]) -> None:
        """Bring both streams to the first step of ``ops``."""
        for r in self.runs:
            span = r.program.span(ops)
            if span is not None:
                run(r.program, r.real, r.real_at, span[0], None, self.store.keep)
                run(r.program, r.quantized, r.quantized_at, span[0], self.model.quantize, self.store.keep)
                r.real_at = r.quantized_at = span[0]

    def replace(self, layer: Layer, weight: Tensor) -> None:
        """Set a layer's new weight in the simulation; the float stream keeps the old one until :meth:`leave`."""
        for program in self.programs:
            if layer.op in program.places:
                step = program.steps[program.places[layer.op][0]]
                value = step.reads[step.ports[layer.port]] if layer.port in step.ports else None
                if value is not None and value in program.constants:
                    self._float.setdefault(id(program), {})[value] = program.constants[value].detach().clone()
        self.model.set_weight(layer.site, weight)

    def leave(self, ops: Sequence[str]) -> None:
        """Run the steps of ``ops``, whose weights are final, in both streams."""
        for r in self.runs:
            span = r.program.span(ops)
            if span is not None:
                keep, constants = self.store.keep, self._constants(r.program)
                run(r.program, r.real, r.real_at, span[1], None, keep, constants)
                run(r.program, r.quantized, r.quantized_at, span[1], self.model.quantize, keep)
                r.real_at = r.quantized_at = span[1]
        self._float.clear()

    def _constants(self, program: Program) -> Mapping[int, Tensor]:
        """The constants of the float stream, with the weights from before this unit."""
        held = self._float.get(id(program))
        return ChainMap(held, program.constants) if held else program.constants  # type: ignore[arg-type]

    def inputs(self, layer: Layer) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs of a layer, float and quantized, for every batch and every run of it in a batch."""
        return ((real, quantized) for real, quantized, _ in self.shares(layer))

    def shares(self, layer: Layer) -> Iterator[tuple[Tensor, Tensor, float]]:
        """:meth:`inputs`, each with its batch's share of the data.

        For the recurrent weights of a layer these are the hidden states of the step before, of one model in both places:
        the quantized ones change with the weights, so that weights which made up for their errors would make up for
        errors that are no longer there. With weights of 8 bits they are those of the float model, which are hardly others and
        take a fraction of the time; with fewer, which lost 0.1 dB then, the quantized ones. For experts the quantized ones are
        in both places: the two models may route a sample to different ones, so that their rows are not pairs. After an
        operator that selects rows, as in the second stage of a detector, where proposals may be others or stand in another
        order, a quantized row takes the place of a float row that does not belong to it.
        """
        spec = self.model.sites()[layer.site].spec
        fine = spec is not None and isinstance(spec.format, IntFormat) and spec.format.bits >= _FINE
        for r in self.runs:
            span = r.program.span([layer.op])
            if span is not None:
                of_float = (r.program, r.real, (r.real_at, span[1]), layer, None, self._constants(r.program))
                of_codes = (r.program, r.quantized, (r.quantized_at, span[1]), layer, self.model.quantize)
                quantized = _reads(*(of_float if layer.reads_hidden and fine else of_codes))
                real = quantized if layer.reads_hidden or layer.is_routed else _reads(*of_float)
                if self.follows_selection(layer):
                    real = [_pairs_alone(x, x_q, layer) for x, x_q in zip(real, quantized, strict=True)]
                yield from ((x, x_q, r.share) for x, x_q in zip(real, quantized, strict=True))

    def follows_selection(self, layer: Layer) -> bool:
        """Whether a layer reads rows that an operator selected or sorted, which may differ between the two streams."""
        if self._after_selection is None:
            graph = self.model.graph()
            static = graph.static()
            moved = chosen_rows(graph.ops, static)
            self._after_selection = {op.name for op in graph.ops if any(value in moved for value in op.inputs)}
        return layer.op in self._after_selection

    def step(self, op: str) -> Step:
        """The first step of ``op`` in the first batch that has one."""
        return next(r.program.steps[r.program.places[op][0]] for r in self.runs if op in r.program.places)

    def constants(self, op: str) -> Program:
        """The program whose constants :meth:`step` reads."""
        return next(r.program for r in self.runs if op in r.program.places)


def _numbers(state: State) -> int:
    return sum(tensor.numel() for tensor in state.values() if isinstance(tensor, Tensor))


def _reads(
    program: Program,
    state: State,
    span: tuple[int, int],
    layer: Layer,
    quantize: Callable[[str, Tensor], Tensor] | None,
    constants: Mapping[int, Tensor] | None = None,
) -> list[Tensor]:
    """Yield the input of ``layer`` in each of its steps; runs the steps between on a copy of the state."""
    constants = program.constants if constants is None else constants
    found, scratch, wanted = [], dict(state), program.places[layer.op]
    with torch.no_grad():
        for i in range(*span):
            step = program.steps[i]
            if i in wanted and not layer.reads_hidden:
                found.append(_multiplied(step, layer, scratch, constants, quantize))
                if i == wanted[-1]:
                    break
            results = run_step(step, scratch, constants, quantize)
            if i in wanted and layer.reads_hidden:
                start = _read(step, 5, scratch, constants, quantize) if 5 in step.ports else None
                found.append(_before(results[0].detach(), start, layer.attrs.get("direction") == "reverse"))
            scratch.update(zip(step.writes, results, strict=True))
    return found


def _multiplied(
    step: Step,
    layer: Layer,
    state: State,
    constants: Mapping[int, Tensor],
    quantize: Callable[[str, Tensor], Tensor] | None,
) -> Tensor:
    x = _read(step, 0, state, constants, quantize)
    return rows_of_each(x, _read(step, 2, state, constants, None)) if layer.is_routed else x


def _read(
    step: Step,
    port: int,
    state: Mapping[int, Tensor],
    constants: Mapping[int, Tensor],
    quantize: Callable[[str, Tensor], Tensor] | None,
) -> Tensor:
    """The tensor that ``step`` reads at ``port``, quantized if ``quantize`` is given."""
    slot = step.ports[port]
    value = step.reads[slot]
    x = state[value] if value in state else constants[value]
    for place, site in step.operands if quantize is not None else ():
        if place == slot:
            x = quantize(site, x)  # type: ignore[misc]
    return x.detach()


def _before(hidden: Tensor, start: Tensor | None, reverse: bool) -> Tensor:
    """The hidden state before each step: those after each step shifted by one, with the initial state where known."""
    kept = hidden[1:] if reverse else hidden[:-1]
    if start is None:
        return kept
    first = start.reshape(1, *hidden.shape[1:])
    return torch.cat([kept, first] if reverse else [first, kept])


logger = logging.getLogger("bitwright")

#: bytes of activations held in memory, unless told otherwise
MEMORY_BUDGET = 4 << 30
_OTHERS = 0.25  # of the variance of rows
_FINE = 8  # bits of recurrent weights from which on hidden states are those of the float model
_ROWS = 1024  # of layers with few inputs, such as depthwise ones: a hundred for each of nine inputs
TREATED = (*TRAITS["layer"], "GroupedMatMul", *RECURRENT)


@dataclass(frozen=True)
class Choice:
    """Result of a method for one layer.

    Attributes:
        layer: its name: of the operator, or of the site where an operator has several weights.
        weight: its new weights, on the grid of ``encoding``; ``None`` leaves them as they are.
        encoding: its grid.
        before, after: the error of its output with weights rounded to nearest, and with these; in units of the method.
    """

    layer: str
    weight: Tensor | None = field(repr=False)
    encoding: Encoding = field(repr=False)
    before: float
    after: float
    note: str = ""


@dataclass(frozen=True)
class Task:
    """A unit to be treated, and the data for the method.

    Attributes:
        unit: operators and layers.
        layers: the layers as matrix products, by name.
        walk: both streams, standing before the unit.
        generator: the unit's own source of random numbers.
    """

    unit: Unit
    layers: Mapping[str, Layer]
    walk: Walk
    generator: torch.Generator

    def encoding(self, layer: Layer) -> Encoding:
        """The encoding in effect of a layer's weight."""
        encoding = self.walk.model.sites()[layer.site].encoding
        assert encoding is not None, layer.site
        return encoding

    def grid(self, layer: Layer, weight: Tensor) -> Grid:
        """The grid in effect, as matrices on the device of ``weight``."""
        return Grid.of(self.encoding(layer), layer, weight.device)

    def weight(self, layer: Layer) -> Tensor:
        """The float weights of a layer as a matrix, float32."""
        return layer.matrix(self.walk.model.weight(layer.site).float()).contiguous()

    def moments(
        self, layer: Layer, rows_per_input: int | None = None, *, weight: Tensor | None = None, few: bool = False
    ) -> Moments:
        """Second moments of a layer's input, over all rows, or over a number of rows per input of one output.

        Args:
            layer: of the unit.
            rows_per_input: how many are drawn, evenly from the data; never fewer than 1024 in all.
            weight: of the layer, where the float inputs are looked at too; otherwise the quantized ones are in their place.
            few: whether the moments may be :class:`FewRows`.
        """
        most = math.inf if rows_per_input is None else _rows_wanted(layer, rows_per_input)
        drawn = (
            (quantized if weight is None else real, quantized, most * share)
            for real, quantized, share in self.walk.shares(layer)
        )
        return moments(layer, drawn, self.generator, weight, few=few)


def _pairs_alone(x: Tensor, x_q: Tensor, layer: Layer) -> Tensor:
    """``x`` where its rows match those of ``x_q``; else ``x_q``, for all rows if their numbers differ.

    Two rows are others where they differ by more than a quarter of the variance of rows; of rows drawn alike that is twice.
    """
    if x is x_q or x.shape != x_q.shape:
        return x_q
    within = tuple(range(1, x.dim())) if layer.type in ("Conv", "ConvTranspose") else (x.dim() - 1,)
    rows = tuple(axis for axis in range(x.dim()) if axis not in within)
    variance = (x_q - x_q.mean(rows, keepdim=True)).square().sum(within, keepdim=True).mean(rows, keepdim=True)
    return torch.where((x - x_q).square().sum(within, keepdim=True) > _OTHERS * variance, x_q, x)


def are_pairs(x: Tensor, x_q: Tensor) -> bool:
    """Whether two tensors hold the same rows in the same order, up to noise; see :func:`_pairs_alone`."""
    if x is x_q or not x.is_floating_point():
        return x is x_q or torch.equal(x, x_q)
    if x.shape != x_q.shape:
        return False
    return float((x - x_q).square().mean()) <= _OTHERS * float(x_q.var(correction=0))


def _rows_wanted(layer: Layer, rows_per_input: int) -> int:
    return max(rows_per_input * layer.fan_in, _ROWS)


def _enough(
    model: SimulatedModel, layers: Sequence[Layer], batches: Iterable[Any], rows_per_input: int | None
) -> Iterator[Any]:
    """Batches until every layer has twice the rows that are drawn, so that these come from several.

    The model has run a batch when the next is asked for, and its graph then has the shapes.
    """
    needed = math.inf
    for count, batch in enumerate(with_samples(batches), 1):
        yield batch
        if count == 1 and rows_per_input is not None:
            graph = model.observed_graph()
            needed = max(2 * _rows_wanted(layer, rows_per_input) / _rows_of(graph, layer) for layer in layers)
        if count >= needed:
            return


def _rows_of(graph: Graph, layer: Layer) -> float:
    """Rows that a layer multiplies in one batch; a small number where it is not known."""
    source = graph.op(layer.op).inputs[0]
    shape = () if source is None else tuple(graph.values[source].shape or ())
    if layer.is_routed or not shape or min(shape) < 1:
        return 1e-9
    return float(layer.positions(torch.empty(shape, device="meta")))


Method = Callable[[Task], Sequence[Choice]]
Units = Callable[[Walk, Sequence[str]], Sequence[Unit]]
"""Layers -> which of them are treated together, given the programs of all batches."""


@dataclass(frozen=True)
class Cache:
    """Storage of finished layers between runs; none by default.

    Attributes:
        get: key -> what was kept under it; ``None`` where nothing was.
        put: keeps arrays under a key, whole or not at all.
    """

    get: Callable[[str], dict[str, NDArray[Any]] | None] = lambda key: None
    put: Callable[[str, Mapping[str, NDArray[Any]]], None] = lambda key, arrays: None


NO_CACHE = Cache()


@dataclass(frozen=True)
class RoundingReport(Tabular, Sequence[Choice]):
    """Outcome of every layer; prints as a table.

    Attributes:
        method: its name.
        rows: the layers that were treated, in order.
        skipped: layer -> why it keeps its nearest rounding.
    """

    _rows = "rows"
    _also = ("gain",)

    method: str
    rows: tuple[Choice, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, index: int) -> Choice:  # type: ignore[override]
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def changed(self) -> bool:
        """Whether a layer was treated."""
        return bool(self.rows)

    @property
    def gain(self) -> float:
        """Geometric mean of the error after over the error before; below 1 is better."""
        ratios = [max(r.after / r.before, 1e-12) for r in self.rows if r.before > 0]
        return float(np.exp(np.mean(np.log(ratios)))) if ratios else 1.0

    @property
    def summary(self) -> str:
        """One line."""
        left = f", {len(self.skipped)} left at nearest rounding" if self.skipped else ""
        return f"{len(self.rows)} layers, output error x {self.gain:.2f}{left}"

    def __str__(self) -> str:
        rows = []
        for r in self.rows:
            ratio = f"x {r.after / r.before:.3f}" if r.before > 0 else ""
            rows.append((r.layer, f"{r.before:.5g}", f"{r.after:.5g}", ratio, r.note))
        table = text_table(("layer", "nearest", self.method, "ratio", "note"), rows, right=(1, 2, 3))
        return "\n".join([table, *(f"{op}: nearest rounding, {why}" for op, why in self.skipped.items())])


def find_layers(
    model: SimulatedModel, include: Iterable[str] | None = None, exclude: Iterable[str] = ()
) -> tuple[dict[str, Layer], dict[str, str]]:
    """The layers whose weights a method can choose, in execution order, and the reasons of the others.

    Args:
        model: the simulation.
        include, exclude: operator names or globs.

    Raises:
        ConfigError: a name or glob that matches no layer.
    """
    graph = model.graph()
    weights: dict[str, list[Site]] = {}
    for site in model.sites().values():
        if holds_layer_weight(graph, site.op, site.role, site.port):
            weights.setdefault(site.op, []).append(site)
    wanted = set(weights) if include is None else _matching(include, weights, "include")
    wanted -= _matching(exclude, weights, "exclude")
    readers = parameter_readers(graph)
    found: dict[str, Layer] = {}
    skipped: dict[str, str] = {}
    for op, site in ((held, site) for held in graph.ops for site in weights.get(held.name, ())):
        name = site.name if op.type in RECURRENT else op.name
        layer = _layer(name, model, op, site, readers) if op.name in wanted else "excluded"
        if isinstance(layer, str):
            skipped[name] = layer
        else:
            found[name] = layer
    return found, skipped


def _layer(name: str, model: SimulatedModel, op: Op, site: Site, readers: Mapping[str, set[str]]) -> Layer | str:
    """The layer, or the reason why a method cannot choose its weight."""
    reason = _why_not(model, op, site, readers)
    if reason is not None:
        return reason
    shape = tuple(int(n) for n in model.weight(site.name).shape)
    if len(shape) < 2 or (op.type == "Gemm" and len(shape) > 2):
        return f"its weight has {len(shape)} axes"
    return Layer(name, op.name, op.type, dict(op.attrs), shape, site.name, site.port)


def _matching(patterns: Iterable[str], names: Iterable[str], argument: str) -> set[str]:
    known, found = list(names), set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = [n for n in known if n == pattern or fnmatch.fnmatchcase(n, pattern.replace("[", "[[]"))]
        if not hits:
            raise ConfigError(
                argument,
                f"{pattern!r} matches no layer with a quantized weight{close_matches(pattern, known)}",
                "use names as sim.coverage() lists them, or globs like 'layers.*'",
            )
        found.update(hits)
    return found


def parameter_readers(graph: Graph) -> dict[str, set[str]]:
    """Parameter -> operators that read it, also through constants computed from it."""
    found: dict[str, set[str]] = {}
    for op in graph.ops:
        for _, name in op.sources():
            value = graph.values[name]
            for param in (value.param,) if value.param else value.sources:
                found.setdefault(param, set()).add(op.name)
    return found


def _why_not(model: SimulatedModel, op: Op, site: Site, readers: Mapping[str, set[str]]) -> str | None:
    value = model.graph().values[site.value]
    if not site.enabled or site.encoding is None:
        return "its weight is in float"
    if isinstance(site.encoding.format, IntFormat) and site.encoding.format.bits > 16:
        return f"{site.encoding.format.name} has more than 16 bits"
    if op.type not in TREATED:
        return f"{op.type} is not a matrix product of its input"
    fixed = model.why_fixed(site.name)
    if fixed is not None:
        return fixed
    if not value.shape or min(value.shape) < 0:
        return "the model does not tell the shape of its weight"
    return _why_not_read(model.graph(), op, site, readers)


def _why_not_read(graph: Graph, op: Op, site: Site, readers: Mapping[str, set[str]]) -> str | None:
    """The reason why the weight of a layer cannot be replaced: other readers, or runs of its operator."""
    value = graph.values[site.value]
    sharing = {reader.name for reader, _ in graph.consumers(value.name)}
    if value.param is not None:
        sharing |= readers.get(value.param, set())
    if op.type in RECURRENT:
        return _why_not_recurrent(op, site, sharing)
    others = sharing - {op.name}
    if others:
        return f"its weight is also read by {sorted(others)[0]}, which would change with it"
    if op.attrs.get("varies"):
        return "it runs with different attributes"
    plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    changed = next((k for k, v in plain.items() if op.type == "Gemm" and op.attrs.get(k, v) != v), None)
    if changed is not None:
        return f"{changed} is {op.attrs[changed]}"
    if op.type != "GroupedMatMul" and len(op.inputs) > 2 and op.inputs[2] is not None:
        bias = graph.values[op.inputs[2]]
        if not bias.is_static or np.prod(bias.shape) != max(bias.shape, default=0):
            return "what it adds is not a vector of biases"
    return None


def _why_not_recurrent(op: Op, site: Site, readers: set[str]) -> str | None:
    if site.port not in (1, 2):
        return "it is not a product of the input or the hidden state"
    if len(op.inputs) > 4 and op.inputs[4] is not None and site.port == 2:
        return "its sequences are of different lengths, so that the hidden states before each step do not lie in a row"
    others = readers - {op.name}
    return f"its weight is also read by {sorted(others)[0]}, which would change with it" if others else None


def apply(
    model: SimulatedModel,
    batches: Iterable[Any],
    method: Method,
    *,
    name: str,
    units: Units,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    seed: int = 0,
    memory_budget: int | None = None,
    spill_dir: str | None = None,
    cache: Cache = NO_CACHE,
    settings: str = "",
    rows_per_input: int | None = None,
    progress: Callable[[Sequence[Unit]], Iterable[Unit]] = lambda items: items,
) -> RoundingReport:
    """Choose the weights of every layer by ``method``, one unit at a time.

    The chosen weights replace the float ones and their encodings are frozen. What was finished when Ctrl-C comes stays
    active; after any other error the model is as it was. With a ``cache``, a later call with the same model, data and
    settings takes finished layers from there.

    Args:
        model: the simulation; changed in place.
        batches: calibration data.
        method: chooses the weights of a unit.
        name: of the method, for the report.
        units: which layers are treated together.
        include, exclude: names or globs of layers.
        seed: same seed, same result.
        memory_budget: bytes of activations held in memory, 4 GiB by default; the rest lies on disk.
        spill_dir: where on disk.
        cache: finished layers.
        settings: everything that changes what ``method`` finds; part of the cache's keys.
        rows_per_input: as for :meth:`Task.moments`, where the method takes no other rows: batches are read until every layer
            has twice as many.
        progress: shows a bar.

    Raises:
        CalibrationError: no batch, activations that are not finite, or no room for them.
        ConfigError: ``include`` or ``exclude`` match nothing.
    """
    layers, skipped = find_layers(model, include, exclude)
    if not layers:
        logger.warning("%s has no layer to work on: %s", name, _some(skipped))
        return RoundingReport(name, (), skipped)
    store = Store(MEMORY_BUDGET if memory_budget is None else memory_budget, spill_dir)
    rows: list[Choice] = []
    undos: list[Undo] = []
    try:
        walk = Walk(model, _enough(model, list(layers.values()), batches, rows_per_input), store)
        key_of = _keys(walk, f"{name} {settings} {seed}") if cache is not NO_CACHE else None
        by_op: dict[str, list[Layer]] = {}
        for layer in layers.values():
            by_op.setdefault(layer.op, []).append(layer)
        reached = _reached(walk, units(walk, list(by_op)), by_op, skipped)
        for unit in _walked(walk, stretch(walk, reached), progress):
            mine = [layer for op in unit.layers for layer in by_op[op]]
            key = "" if key_of is None else key_of(mine)
            rows += _treat(walk, unit, mine, method, cache, key, seed, undos)
    except KeyboardInterrupt:
        logger.warning("%s interrupted after %d of %d layers; these stay in effect", name, len(rows), len(layers))
        raise
    except Exception as error:
        joined(undos)()
        if not _is_out_of_memory(error):
            raise
        raise CalibrationError(
            name,
            f"the memory is used up after {len(rows)} of {len(layers)} layers: {str(error).splitlines()[0]}",
            "give fewer samples or smaller batches, a memory_budget (what goes beyond it lies on disk), or fewer rows; the "
            "model is as it was, and with cache_dir the next call takes the layers that were done from there",
        ) from error
    finally:
        store.close()
    _warn(name, walk, skipped)
    return RoundingReport(name, tuple(rows), skipped)


def _walked(
    walk: Walk, stretches: Sequence[Sequence[Unit]], progress: Callable[[Sequence[Unit]], Iterable[Unit]]
) -> Iterator[Unit]:
    """Yield units in order; the walk enters a stretch before its first unit and leaves it after its last, if others follow."""
    ops = {id(group[0]): [op for unit in group for op in unit.ops] for group in stretches}
    last = {id(group[-1]): ops[id(group[0])] for group in stretches[:-1]}
    for unit in progress([unit for group in stretches for unit in group]):
        if id(unit) in ops:
            walk.advance(ops[id(unit)])
        yield unit
        if id(unit) in last:
            walk.leave(last[id(unit)])


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out; torch raises a plain RuntimeError on the CPU."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def _treat(
    walk: Walk,
    unit: Unit,
    layers: Sequence[Layer],
    method: Method,
    cache: Cache,
    key: str,
    seed: int,
    undos: list[Undo],
) -> list[Choice]:
    """Choose the weights of one unit and put them into effect; ``undos`` gains how to undo them."""
    choices = _known(cache, key, layers, walk.model)
    if choices is None:
        choices = _chosen(walk, unit, layers, method, seed)
        cache.put(key, {k: v for i, c in enumerate(choices) for k, v in _packed(c, i).items()})
    choices = [c if c.weight is None else replace(c, weight=walk.store.keep(c.weight)) for c in choices]
    for choice, layer in zip(choices, layers, strict=True):
        undos.append(_undo_of(walk, layer, weight=choice.weight is not None))
        site = walk.model.sites()[layer.site]
        site.encoding, site.frozen = choice.encoding, True
        if choice.weight is not None:
            walk.replace(layer, choice.weight)
    return choices


def _undo_of(walk: Walk, layer: Layer, *, weight: bool) -> Undo:
    """A function that restores a layer's weight and quantizer; the weight is stored with the activations."""
    model = walk.model
    quantizer = model.sites()[layer.site].quantizer.remember()
    kept = walk.store.keep(model.weight(layer.site)) if weight else None

    def undo() -> None:
        if kept is not None:
            model.set_weight(layer.site, kept)
        quantizer()

    return undo


def _chosen(walk: Walk, unit: Unit, layers: Sequence[Layer], method: Method, seed: int) -> list[Choice]:
    if len(layers) > 1 and layers[0].type in RECURRENT:  # one weight after the other, each from the same states
        return [choice for layer in layers for choice in _chosen(walk, unit, [layer], method, seed)]
    named = {layer.name: layer for layer in layers}
    digest = int.from_bytes(hashlib.sha256(f"{seed} {' '.join(named)}".encode()).digest()[:7], "big")
    return list(method(Task(unit, named, walk, torch.Generator().manual_seed(digest))))


def _packed(choice: Choice, index: int) -> dict[str, NDArray[Any]]:
    weight = {} if choice.weight is None else {f"{index}.weight": choice.weight.float().cpu().numpy()}
    common = choice.encoding.common
    return {
        **weight,
        **({} if common is None else {f"{index}.common": np.asarray(common)}),
        **({} if choice.encoding.vectors is None else {f"{index}.vectors": np.asarray(choice.encoding.vectors)}),
        **({} if choice.encoding.shift is None else {f"{index}.shift": np.asarray(choice.encoding.shift)}),
        f"{index}.scale": np.asarray(choice.encoding.scale),
        f"{index}.zero_point": np.asarray(choice.encoding.zero_point, np.int64),
        f"{index}.errors": np.array([choice.before, choice.after]),
        f"{index}.note": np.frombuffer(choice.note.encode(), np.uint8),
    }


def _known(cache: Cache, key: str, layers: Sequence[Layer], model: SimulatedModel) -> list[Choice] | None:
    """Read ``key`` from ``cache``, if the content fits ``layers``."""
    kept = cache.get(key)
    if kept is None:
        return None
    for index, layer in enumerate(layers):
        wrong = _misfit(kept, index, layer, model)
        if wrong is not None:
            logger.warning("%s: what the cache has of it is computed anew: %s", layer.name, wrong)
            return None
    return [_unpacked(kept, i, layer, model) for i, layer in enumerate(layers)]


def _misfit(kept: Mapping[str, NDArray[Any]], index: int, layer: Layer, model: SimulatedModel) -> str | None:
    """The reason why cached content does not fit this layer; ``None`` if it does."""
    known = model.sites()[layer.site].encoding
    assert known is not None
    params = ("scale", "zero_point", "shift")[: 2 + (known.shift is not None)]
    shapes = {**dict.fromkeys(params, known.scale.shape), "errors": (2,)}
    if f"{index}.weight" in kept:
        shapes["weight"] = tuple(model.weight(layer.site).shape)
    for part, shape in shapes.items():
        array = kept.get(f"{index}.{part}")
        if array is None or array.shape != shape:
            return f"its {part} {'is missing' if array is None else f'has shape {array.shape}, not {shape}'}"
        if array.dtype.kind not in ("i" if part == "zero_point" else "f"):
            return f"its {part} is {array.dtype}"
        if part != "errors" and not np.isfinite(array).all():
            return f"its {part} holds NaN or Inf"
    fmt, zero = known.format, kept[f"{index}.zero_point"]
    lowest, highest = (fmt.qmin, fmt.qmax) if isinstance(fmt, IntFormat) else (0, 0)
    if not (kept[f"{index}.scale"] > 0).all() or ((zero < lowest) | (zero > highest)).any():
        return "its scale is not positive, or its zero point outside of the grid"
    return None


def _unpacked(kept: Mapping[str, NDArray[Any]], index: int, layer: Layer, model: SimulatedModel) -> Choice:
    known = model.sites()[layer.site].encoding
    assert known is not None
    common = kept.get(f"{index}.common", known.common)
    shift = None if known.shift is None else kept[f"{index}.shift"]
    vectors = kept.get(f"{index}.vectors")
    pair = None if vectors is None or vectors.shape != (2,) else (int(vectors[0]), int(vectors[1]))
    encoding = replace(known, zero_point=kept[f"{index}.zero_point"], common=common, shift=shift, vectors=pair)
    encoding = with_stored_scale(encoding, kept[f"{index}.scale"])
    before, after = kept[f"{index}.errors"].tolist()
    weight, note = kept.get(f"{index}.weight"), kept.get(f"{index}.note", np.empty(0, np.uint8))
    chosen = None if weight is None else torch.from_numpy(weight)
    return Choice(layer.name, chosen, encoding, before, after, note.tobytes().decode(errors="replace"))


def _reached(
    walk: Walk, units: Sequence[Unit], by_op: Mapping[str, Sequence[Layer]], skipped: dict[str, str]
) -> list[Unit]:
    """The units that some batch runs; layers of other units are noted."""
    found = []
    for unit in units:
        if any(r.program.span(unit.ops) is not None for r in walk.runs):
            found.append(unit)
        else:
            names = [layer.name for op in unit.layers for layer in by_op[op]]
            skipped.update(dict.fromkeys(names, "no batch reached it"))
    return found


def stretch(walk: Walk, units: Sequence[Unit]) -> list[list[Unit]]:
    """Groups of consecutive units in every batch.

    Where a layer runs several times, its steps lie around those of others: such units form a group of layers that stand
    alone, and the walk stays before all of them until their weights are chosen.
    """
    groups: list[list[Unit]] = []
    ends = dict.fromkeys(map(id, walk.programs), 0)
    for unit in units:
        spans = {id(p): span for p in walk.programs if (span := p.span(unit.ops)) is not None}
        if not groups or all(first >= ends[program] for program, (first, _) in spans.items()):
            groups.append([])
        groups[-1].append(unit)
        ends |= {program: max(ends[program], last) for program, (_, last) in spans.items()}
    graph = walk.model.graph()
    return [apart(graph, group) for group in groups]


def _keys(walk: Walk, settings: str) -> Callable[[Sequence[Layer]], str]:
    """A function that gives each unit, in their order, a key of everything that its result depends on.

    That is the method with its settings, the data, the model (its operators and all tensors in them), every quantizer, and
    which layers were treated before.
    """
    seen = Fingerprint()
    seen.update((settings, walk.model.graph().plain()))
    tensors = {id(tensor): tensor for program in walk.programs for _, tensor in sorted(program.constants.items())}
    for tensor in (*tensors.values(), *(tensor for r in walk.runs for tensor in r.real.values())):
        seen.update(tensor)
    for name, site in walk.model.sites().items():
        seen.update((name, site.enabled, site.spec, site.encoding))
    digest = hashlib.sha256(str(seen).encode())

    def key_of(layers: Sequence[Layer]) -> str:
        digest.update("".join(f"{layer.name}\0" for layer in layers).encode())
        return digest.hexdigest()

    return key_of


def _warn(name: str, walk: Walk, skipped: Mapping[str, str]) -> None:
    unusual = {op: why for op, why in skipped.items() if why != "excluded"}
    if walk.short:
        logger.warning(
            "%s: %d layer(s) see too few samples to tell good roundings from bad ones: %s; 256 to 1024 samples are enough "
            "for most networks",
            name, len(walk.short), _some(walk.short),
        )  # fmt: skip
    if unusual:
        logger.warning("%s left %d layer(s) at nearest rounding: %s", name, len(unusual), _some(unusual))


def _some(reasons: Mapping[str, str]) -> str:
    shown = "; ".join(f"{op} ({why})" for op, why in list(reasons.items())[:4])
    return shown + (f"; and {len(reasons) - 4} more" if len(reasons) > 4 else "") or "none has a quantized weight"


def check_rows(walk: Walk, layer: Layer, rows: int, inputs: int) -> None:
    """Note layers with fewer samples than inputs, where rounding can overfit."""
    if rows < inputs:
        walk.short[layer.name] = f"{rows} samples for {inputs} inputs per output"


def check_finite(layer: Layer, tensor: Tensor) -> None:
    """Refuse non-finite inputs.

    Raises:
        CalibrationError: naming the layer.
    """
    if not bool(torch.isfinite(tensor).all()):
        raise CalibrationError(
            layer.name,
            "its input or output on the calibration data holds NaN or infinite numbers",
            "find the batch or the operator before it that makes them; the model is as it was",
        )
