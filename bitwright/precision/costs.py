"""Costs of a choice of precisions: bytes of weights, bit operations, peak of activations, milliseconds.

A cost is one or more rows of a table ``[rows, groups, candidates]`` and a constant per row: the cost of a choice is the
largest of its rows, each the sum of what its groups add. Sums have one row; the peak of activations has one per operator.
Pairs of groups may add something together, as a conversion between two kernels does.

:func:`measure_times` measures the cost ``ms``: every layer at every candidate, in ONNX Runtime on this machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bitwright.analysis.subject import Subject, open_subject
from bitwright.core.files import read_document
from bitwright.core.graph.cost import lifetimes, multiplications, size
from bitwright.core.graph.graph import Graph
from bitwright.core.graph.operators import OPS
from bitwright.core.graph.patterns import Match
from bitwright.core.numerics.spec import PRESETS, Preset
from bitwright.core.simulation.sites import Site, values_on_grids
from bitwright.errors import ConfigError, checks_arguments, close_matches, some_of, with_article
from bitwright.export.files.atomic import write_json
from bitwright.export.files.manifest import fingerprint
from bitwright.precision.candidates import (
    Candidate,
    Group,
    as_candidates,
    bits_of,
    find_groups,
    highest,
    operands,
    planned_bits,
    simulation_of,
    without,
)
from bitwright.precision.choice import Cost, Pair
from bitwright.precision.prepared import PreparedPrecisions
from bitwright.runtimes.onnxruntime import LayerTimes, layer_times
from bitwright.tables import Table, Tabular

logger = logging.getLogger("bitwright")

Floats = NDArray[np.float64]
_FLOAT = 32
#: in files of times that were measured layer by layer
TIMES_FORMAT = "bitwright-times"


class Bits:
    """Bits of every site under a candidate, and of sites outside of the search."""

    def __init__(
        self, sim: Any, groups: Sequence[Group], candidates: Sequence[Candidate], least: Mapping[str, int]
    ) -> None:
        self.sim, self.groups, self.candidates, self._least = sim, groups, candidates, least
        self.group_of = {
            id(sim.quantizers[name].quantizer): i for i, group in enumerate(groups) for name in group.sites
        }

    def at(self, site: str, candidate: Candidate) -> int:
        """Cost of a site with a candidate."""
        role = self.sim.quantizers[site].role
        if role in ("weight", "constant"):
            return candidate.bits[0]
        return max(candidate.bits[1], self._least.get(site, 0))

    def fixed(self, site: Any) -> int:
        """Cost of a site that stays as it is."""
        return bits_of(site.spec)


def weight_bytes(bits: Bits) -> Cost:
    """Bytes of all parameters: weights at their bits, everything else as float32. Scales are not counted."""
    graph: Graph = bits.sim.graph
    table = np.zeros((1, len(bits.groups), len(bits.candidates)))
    params = {v.name: size(graph, v.name) for v in graph.values.values() if v.param is not None and v.is_float}
    left = dict(params)
    for site in bits.sim.quantizers.values():
        if not site.is_stored or site.value not in left:
            continue
        count = left.pop(site.value)
        group = bits.group_of.get(id(site.quantizer))
        if group is None:
            left[site.value] = count * bits.fixed(site) / _FLOAT
        else:
            table[0, group] += [count * bits.at(site.name, c) / 8 for c in bits.candidates]
    return Cost("weight_bytes", "bytes", table, np.array([4 * sum(left.values())]))


def _first_group(bits: Bits, sites: Iterable[Site]) -> int | None:
    keys = (id(site.quantizer) for site in sites)
    return next((bits.group_of[key] for key in keys if key in bits.group_of), None)


def _product(bits: Bits, candidate: Candidate, weight: Site | None, value: Site | None) -> float:
    """Bits of both factors of a kernel at a candidate."""
    a = _FLOAT if value is None else bits.at(value.name, candidate)
    return a * (a if weight is None and value is not None else candidate.bits[0])


def _fixed_product(bits: Bits, weight: Site | None, value: Site | None) -> float:
    """Bits of both factors of a kernel that no search changes."""
    factor = weight or value
    a = _FLOAT if value is None else bits.fixed(value)
    return a * (_FLOAT if factor is None else bits.fixed(factor))


def bit_ops(bits: Bits, kernels: Mapping[str, Mapping[int, Any]]) -> Cost:
    """Multiplications times the bits of both factors, over the layers of the recorded run."""
    graph: Graph = bits.sim.graph
    table, fixed = np.zeros((1, len(bits.groups), len(bits.candidates))), 0.0
    for op in graph.ops:
        work = 0.0 if op.type == "Embedding" else multiplications(graph, op)
        sites = sorted(kernels.get(op.name, {}).values(), key=lambda s: not s.is_stored)
        group = _first_group(bits, sites)
        weight = next((s for s in sites if s.is_stored), None)
        value = next((s for s in sites if not s.is_stored), None)
        if group is None:
            fixed += work * _fixed_product(bits, weight, value)
        else:
            table[0, group] += [work * _product(bits, c, weight, value) for c in bits.candidates]
    return Cost("bit_ops", "bit operations", table, np.array([fixed]))


def present_costs(sim: Any, times: Any = None) -> dict[str, float]:
    """All costs of the current simulation; milliseconds where a table of them is given.

    Raises:
        ConfigError: the table has no time for the precision of a layer.
    """
    bits, kernels = Bits(sim, (), (), {}), operands(sim, _computes)
    costs = (weight_bytes(bits), bit_ops(bits, kernels), activation_bytes(bits), memory(bits))
    found = {cost.name: float(cost.fixed.max()) for cost in costs}
    if times is None:
        return found
    times = table_of_times(times)
    candidates = as_candidates(timed(sim, times))
    groups = find_groups(sim, candidates, tied=True, which=_computes)
    asked = operands(sim, lambda site: site.role != "bias")
    layers = [group.layers[0] if group.layers else None for group in groups]
    choice = [0 if name is None else _present(name, kernels[name], asked[name], candidates) for name in layers]
    return {**found, "ms": milliseconds(Bits(sim, groups, candidates, {}), times).of(choice)}


def _computes(site: Site) -> bool:
    return site.enabled and site.role != "bias"


def _present(layer: str, sites: Mapping[int, Site], asked: Mapping[int, Site], candidates: Sequence[Candidate]) -> int:
    """Index of a layer's present candidate; ``asked``: its enabled ``sites`` and those left in float."""
    weight = next((bits_of(s.spec) for s in sites.values() if s.is_stored), None)
    read = sorted((s for s in sites.values() if not s.is_stored), key=lambda s: s.inner is not None)
    value = bits_of(read[0].spec) if read else None
    if weight is not None and not read and any(not s.is_stored for s in asked.values()):
        value = _FLOAT
    for i, candidate in enumerate(candidates):
        if weight in (None, candidate.bits[0]) and value in (None, candidate.bits[1]):
            return i
    raise ConfigError(
        "times",
        f"{layer} has weights of {weight or _FLOAT} bits and activations of {value or _FLOAT}, and the table has times for "
        f"{', '.join(c.name for c in candidates)} only",
        "add this precision to the table, or leave out what asks for it",
    )


def activation_bytes(bits: Bits) -> Cost:
    """The largest sum of activations kept at one time in the recorded run."""
    return Cost("activation_bytes", "bytes", *_needed(*_live_bytes(bits, lifetimes(bits.sim.graph))))


def memory(bits: Bits) -> Cost:
    """Bytes of all parameters and, at the peak, of the activations: what :func:`memory_plan` adds up, for every choice."""
    graph: Graph = bits.sim.graph
    spans = {v: slice(r.start, r.stop) for v, r in _stored_activations(graph, bits.sim.plan.matches).items()}
    table, fixed = _live_bytes(bits, spans)
    weights = weight_bytes(bits)
    return Cost("memory", "bytes", *_needed(table + weights.table, fixed + weights.fixed))


def _live_bytes(bits: Bits, spans: Mapping[str, slice]) -> tuple[Floats, Floats]:
    """Bytes of activations while each operator runs: what groups add at each candidate, and what no choice changes."""
    graph: Graph = bits.sim.graph
    site_of = _sites_of_values(bits.sim)
    table = np.zeros((len(graph.ops), len(bits.groups), len(bits.candidates)))
    fixed = np.zeros(len(graph.ops))
    for value, span in spans.items():
        count, site = size(graph, value), site_of.get(value)
        group = None if site is None else bits.group_of.get(id(site.quantizer))
        if group is None or site is None:
            fixed[span] += count * (4 if site is None else bits.fixed(site) / 8)
        else:
            table[span, group] += [count * bits.at(site.name, c) / 8 for c in bits.candidates]
    return table, fixed


def _sites_of_values(sim: Any) -> dict[str, Any]:
    """Value -> the site on whose grid it lies, ``None`` for a stored one; values in float are left out."""
    grids = values_on_grids(sim.quantizers, sim.plan.shared)
    sites = {id(s.quantizer): s for s in sim.quantizers.values() if not s.is_stored}
    return {value: sites.get(key) for key, values in grids.items() for value in values}


@dataclass(frozen=True)
class MemoryRow:
    """One operator of a :class:`MemoryPlan`.

    Attributes:
        op, type: the operator.
        bytes: of all activations that are kept while it runs, its own result included.
        largest: name and bytes of the largest of them.
    """

    op: str
    type: str
    bytes: float
    largest: tuple[str, float]


@dataclass(frozen=True)
class MemoryPlan(Tabular):
    """Memory of weights, and of activations at each operator in execution order, at the bits of a simulation.

    Attributes:
        rows: the schedule.
        weights: bytes of all parameters; scales are not counted.
        unknown: activations with axes of unknown length, which count as 1.
    """

    _rows: ClassVar[str] = "rows"

    rows: tuple[MemoryRow, ...]
    weights: float
    unknown: tuple[str, ...] = ()

    @property
    def peak(self) -> MemoryRow | None:
        """The operator with the most memory; ``None`` for a graph without operators."""
        return max(self.rows, key=lambda row: row.bytes, default=None)

    @property
    def total(self) -> float:
        """Bytes of weights and of the peak."""
        return self.weights + (0.0 if self.peak is None else self.peak.bytes)

    def answer(self, bound: int) -> str:
        """One line: whether it fits, what sets the peak, and how much is missing."""
        row, left = self.peak, bound - self.total
        verdict = f"fits, {left:,.0f} bytes are left" if left >= 0 else f"does NOT fit, {-left:,.0f} bytes are missing"
        at = "no operator" if row is None else f"{row.op} ({row.type}), {row.bytes:,.0f} bytes of activations"
        return f"{verdict}: {self.weights:,.0f} bytes of weights, peak at {at}; bound {bound:,} bytes"

    def table(self) -> Table:
        """Operator, bytes of activations with weights, and the largest activation."""
        rows = [
            (r.op, r.type, f"{r.bytes:,.0f}", f"{self.weights + r.bytes:,.0f}", f"{r.largest[0]} ({r.largest[1]:,.0f})")
            for r in self.rows
        ]
        return Table(("operator", "type", "activations", "with weights", "largest activation"), rows, right=(2, 3))


def memory_plan(sim: Any) -> MemoryPlan:
    """Plan the memory that holds the weights and the activations of one sample.

    Activations live from the operator that makes them to the last one that reads them, in the order of the graph; those on a
    grid take its bits, others 4 bytes. A supergroup (Conv and Relu) is one kernel: what its operators hand to one another takes
    nothing, and its inputs live until its last operator. Buffers that kernels need besides are the target's and not counted.
    """
    bits, graph = Bits(sim, (), (), {}), sim.graph
    site_of = _sites_of_values(sim)
    kept, largest = np.zeros(len(graph.ops)), [("", 0.0)] * len(graph.ops)
    spans = _stored_activations(graph, sim.plan.matches)
    for value, alive in spans.items():
        site = site_of.get(value)
        amount = size(graph, value) * (4 if site is None else bits.fixed(site) / 8)
        for i in alive:
            kept[i] += amount
            largest[i] = max(largest[i], (value, amount), key=lambda found: found[1])
    rows = zip(graph.ops, kept, largest, strict=True)
    return MemoryPlan(
        tuple(MemoryRow(op.name, op.type, float(held), most) for op, held, most in rows),
        float(weight_bytes(bits).fixed[0]),
        tuple(value for value in spans if any(n < 0 for n in graph.values[value].shape[1:])),
    )


def _stored_activations(graph: Graph, chains: Sequence[Match]) -> dict[str, range]:
    """Value -> the operators during which it is kept, where every chain is one kernel."""
    at = {op.name: i for i, op in enumerate(graph.ops)}
    ends = {op.name: at[chain.ops[-1].name] for chain in chains for op in chain.ops}
    last: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        for _, value in op.sources():
            last[value] = max(last.get(value, 0), ends.get(op.name, i))
    inner = {value for chain in chains for value in chain.inner}
    return {
        value: range(len(graph.ops))[span.start : max(span.stop, last.get(value, 0) + 1)]
        for value, span in lifetimes(graph).items()
        if value not in inner
    }


def _needed(table: Floats, fixed: Floats) -> tuple[Floats, Floats]:
    """Drop rows that another row dominates at every choice."""
    order = np.argsort(-(table.max(2, initial=0.0).sum(1) + fixed), kind="stable")
    kept: list[int] = []
    for i in order:
        if not any((table[k] >= table[i]).all() and fixed[k] >= fixed[i] for k in kept):
            kept.append(int(i))
    return table[kept], fixed[kept]


def milliseconds(bits: Bits, times: Mapping[str, Any] | str | Path) -> Cost:
    """Time per operator and candidate, of a table that was measured.

    Args:
        bits: of the choice.
        times: layer or operator type -> candidate -> milliseconds; or the path of a JSON file of it. The row of a layer wins
            over that of its type. What :func:`bitwright.measure_times` gives has pairs besides: a kernel whose result is read at
            more bits takes as long as one of these bits, and a layer that reads what more bits were computed with converts it.

    Raises:
        ConfigError: the table misses an operator or a candidate, has a row for what is neither a layer nor an operator type, or
            holds what is not a time.
    """
    times = table_of_times(times)
    rows, measured = _rows_of(times), times.get("format") == TIMES_FORMAT
    graph: Graph = bits.sim.graph
    check_rows(times, graph, {layer for group in bits.groups for layer in group.layers})
    table = np.zeros((1, len(bits.groups), len(bits.candidates)))
    missing: dict[str, list[str]] = {}
    for i, group in enumerate(bits.groups):
        for layer in group.layers:
            row = rows.get(layer, rows.get(graph.op(layer).type))
            if row is None:
                missing.setdefault(graph.op(layer).type, []).append(layer)
                continue
            table[0, i] += [_time(layer, row, bits.candidates[c]) for c in range(len(bits.candidates))]
    if missing:
        raise _no_times(missing, [c.name for c in bits.candidates])
    if not measured:
        return Cost("ms", "ms", table, np.zeros(1))
    return Cost("ms", "ms", table, np.array([float(times["fixed"])]), tuple(_conversions(bits, times)))


def _rows_of(times: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = times["layers"] if times.get("format") == TIMES_FORMAT else times
    return found


def timed(sim: Any, times: Mapping[str, Any]) -> tuple[str, ...]:
    """The presets for which every row of the table that applies to the simulation has a time.

    Raises:
        ConfigError: there is none.
    """
    graph: Graph = sim.graph
    rows = _rows_of(times)
    layers = operands(sim, _computes)
    used = [row for n in layers if isinstance(row := rows.get(n, rows.get(graph.op(n).type)), Mapping)]
    found = tuple(name for name in PRESETS if used and all(name in row for row in used))
    if not found:
        raise ConfigError(
            "times",
            f"the table has no preset that all of its rows have: {some_of([str(key) for key in rows]) or 'it is empty'}",
            'write a row per layer or operator type, such as {"Conv": {"w8a8": 0.4, "w4a8": 0.3}}',
        )
    return found


def check_rows(times: Mapping[str, Any], graph: Graph, chosen: set[str] | None = None) -> None:
    """Refuse rows for operators that do not exist, whose times would be ignored.

    A table may know operator types that the model does not have.

    Args:
        times: the table.
        graph: of the model.
        chosen: layers that a choice changes; rows of others are told in the log.
    """
    rows = _rows_of(times)
    layers, types = {op.name for op in graph.ops}, {op.type for op in graph.ops}
    unknown = [str(key) for key in rows if key not in layers and key not in types and key not in OPS]
    if unknown:
        known = [*types, *layers, *OPS]
        told = [f"{key!r}{close_matches(key, known)}" for key in unknown]
        raise ConfigError(
            "times",
            f"the table has rows for what is neither a layer of this model nor an operator type: {some_of(told)}",
            f"correct or remove them; the operator types of this model are {', '.join(sorted(types))}",
        )
    unused = [key for key in rows if chosen is not None and key in layers - chosen]
    if unused:
        logger.info("times of %s count nothing: no choice changes these layers", some_of([str(k) for k in unused]))


def _no_times(missing: Mapping[str, Sequence[str]], candidates: Sequence[str]) -> ConfigError:
    """Error that lists all operator types missing in a table of times, and the rows wanted."""
    told = "; ".join(f"{kind}: {some_of(layers)}" for kind, layers in missing.items())
    row = "{" + ", ".join(f'"{name}": ...' for name in candidates) + "}"
    rows = ", ".join(f'"{kind}": {row}' for kind in missing)
    return ConfigError(
        "times", f"the table has no row for {told}", f"add a row for each layer, or for its operator type: {rows}"
    )


def _conversions(bits: Bits, times: Mapping[str, Any]) -> Iterator[Pair]:
    """Yield the conversion cost between a layer and its reader if their activation formats differ."""
    grids = values_on_grids(bits.sim.quantizers, bits.sim.plan.shared)
    owner = {value: bits.group_of[key] for key in grids if key in bits.group_of for value in grids[key]}
    graph: Graph = bits.sim.graph
    layers = [(first, layer) for first, group in enumerate(bits.groups) for layer in group.layers]
    readers = {value: layer for _, layer in layers for _, value in graph.op(layer).sources()}
    for first, layer in layers:
        value = _on_grid(graph, layer, owner)
        if value is None or owner[value] == first:
            continue
        reads = times["conversions"].get(readers.get(value, ""), {})
        extra = _extra(bits.candidates, times["layers"][layer], reads)
        if extra.any():
            yield Pair(first, owner[value], extra)


def _on_grid(graph: Graph, layer: str, owner: Mapping[str, int]) -> str | None:
    """The quantized value after ``layer`` and the operators fused into its kernel."""
    value = graph.op(layer).outputs[0]
    while value not in owner:
        reader = graph.sole_consumer(value)
        if reader is None or not reader.outputs:
            return None
        value = reader.outputs[0]
    return value


def _extra(candidates: Sequence[Candidate], kernel: Mapping[str, float], reads: Mapping[str, float]) -> Floats:
    """``[candidates of the layer, candidates of its reader]``, milliseconds."""
    by_bits = {c.bits: c.name for c in candidates}
    extra = np.zeros((len(candidates), len(candidates)))
    for i, mine in enumerate(candidates):
        for j, theirs in enumerate(candidates):
            if theirs.bits[1] > mine.bits[1]:
                wide = by_bits.get((mine.bits[0], theirs.bits[1]), theirs.name)
                extra[i, j] = max(kernel[wide] - kernel[mine.name], 0.0)
            elif theirs.bits[1] < mine.bits[1]:
                wide = by_bits.get((theirs.bits[0], mine.bits[1]), mine.name)
                extra[i, j] = reads.get(wide, 0.0)
    return extra


def table_of_times(times: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """A table of times, given or read from a file.

    Raises:
        ConfigError: the file is damaged.
    """
    if isinstance(times, Mapping):
        return times
    example = 'write {"Conv": {"w8a8": 0.4, ...}, ...}'
    found = read_document(Path(times), ConfigError, remedy=example)
    if not isinstance(found, dict):
        raise ConfigError(str(times), f"it holds {with_article(type(found).__name__)}, not a table of times", example)
    return found


def _time(layer: str, row: Mapping[str, float], candidate: Candidate) -> float:
    found = row.get(candidate.name) if isinstance(row, Mapping) else None
    if not isinstance(found, (int, float)) or not np.isfinite(found) or found < 0:
        raise ConfigError(
            "times",
            f"{layer} has {found!r} for {candidate.name}, which is not a time",
            "give milliseconds for every candidate",
        )
    return float(found)


COSTS = ("weight_bytes", "bit_ops", "activation_bytes", "memory", "ms")


def check_cost(name: str, times: Any) -> None:
    """Refuse an unknown cost.

    Raises:
        ConfigError: there is no such cost, or it is milliseconds and there is no table of them.
    """
    if name not in COSTS:
        raise ConfigError(
            "cost", f"there is no cost {name!r}{close_matches(str(name), COSTS)}", f"use {', '.join(COSTS)}"
        )
    if name == "ms" and times is None:
        raise ConfigError(
            "cost", "milliseconds are wanted and times is None", "pass times=..., a table or the path of one as JSON"
        )


def all_costs(
    bits: Bits, kernels: Mapping[str, Mapping[int, Any]], times: Any, wanted: Sequence[str]
) -> dict[str, Cost]:
    """Every cost by name; milliseconds where there is a table.

    Raises:
        ConfigError: an unknown cost is wanted, or milliseconds without a table.
    """
    for name in wanted:
        check_cost(name, times)
    found = {c.name: c for c in (weight_bytes(bits), bit_ops(bits, kernels), activation_bytes(bits), memory(bits))}
    return found | ({} if times is None else {"ms": milliseconds(bits, times)})


@checks_arguments
def measure_times(
    model: Any,
    data: Iterable[Any],
    candidates: str | Preset | Iterable[Any] = ("w8a8", "w8a16", "w4a8", "w4a16"),
    *,
    path: str | Path | None = None,
    config_file: Any = None,
    rounds: int = 15,
) -> dict[str, Any]:
    """Measure the time of every layer at every candidate, for ``mixed_precision(..., cost="ms", times=...)``.

    Each candidate is exported for all layers and run in ONNX Runtime with one thread, in turns, on the first batch; the least of
    the rounds counts.

    Args:
        model: an ONNX model (a path, a proto) or a calibrated simulation of one; left as it is.
        data: batches; the first one is what is timed.
        candidates: as for :func:`bitwright.mixed_precision`.
        path: a JSON file: read if it holds times of this model, these candidates and this machine, else written.
        config_file: rules for a model that is given.
        rounds: runs of every file.

    Returns:
        Plain data: ``layers`` and ``conversions`` (layer -> candidate -> milliseconds), ``fixed`` milliseconds, and what they
        belong to.

    Raises:
        ConfigError: a module of PyTorch, whose layers have other names in its file; or a file of something else at ``path``.
    """
    batches, wanted = list(data), as_candidates(candidates)
    sim = simulation_of(model, batches, wanted[highest(wanted)], config_file)
    subject = open_subject(sim)
    if subject.front_end != "onnx":
        raise ConfigError(
            "measure_times",
            "layers of a module have other names in its exported file",
            "export the module to ONNX and pass that file here and to the search, or write a table of times yourself",
        )
    graph: Graph = sim.graph
    shapes = [[op.name, op.type, *(str(graph.values[v].shape) for v in op.outputs)] for op in graph.ops]
    mine = {
        "graph": fingerprint([json.dumps(shapes)]),
        "candidates": [c.name for c in wanted],
        "runtime": f"onnxruntime {version('onnxruntime')}",
        "machine": f"{platform.machine()} {platform.node()}",
    }
    if path is not None and Path(path).exists():
        return _kept(Path(path), mine)
    restore = subject.remember(parameters=True)
    try:
        with subject.exclusive():
            found = _measured(subject, wanted, batches, rounds)
    finally:
        restore()
    names = next(iter(found.values())).layers
    times = {
        "format": TIMES_FORMAT, "version": 1, "of": mine,
        "layers": {layer: {c: times.layers[layer] for c, times in found.items()} for layer in names},
        "conversions": {layer: {c: times.conversions[layer] for c, times in found.items()} for layer in names},
        "fixed": min(times.rest for times in found.values()),
        "whole": {c: times.whole for c, times in found.items()},
    }  # fmt: skip
    if path is not None:
        write_json(path, times)
    return times


def _measured(
    subject: Subject, candidates: tuple[Candidate, ...], batches: list[Any], rounds: int
) -> dict[str, LayerTimes]:
    from bitwright.onnx.model.data import as_feeds

    sim = subject.sim
    groups = find_groups(sim, candidates, sim.rules.allowed_kernels, tied=True)
    prepared = PreparedPrecisions(subject, groups, candidates, planned_bits(sim), batches, rounding=False)
    groups = without(groups, prepared.refused, candidates)
    best = highest(candidates)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(prepared.restore)
        files = {}
        for c, candidate in enumerate(candidates):
            able = [c if c in g.candidates else best if best in g.candidates else g.candidates[-1] for g in groups]
            prepared.apply(able)
            files[candidate.name] = sim.export(Path(folder, str(c)), "timed", samples=False).qdq
        layers = {layer for group in groups for layer in group.layers}
        return layer_times(files, dict(as_feeds(batches[0], sim.specs)), layers, rounds=rounds)


def _kept(path: Path, mine: Mapping[str, Any]) -> dict[str, Any]:
    """Times of an earlier measurement."""
    remedy = "remove it to measure again, or name another file"
    found = read_document(path, ConfigError, remedy=remedy)
    if not isinstance(found, dict) or found.get("format") != TIMES_FORMAT or not isinstance(found.get("of", {}), dict):
        raise ConfigError(str(path), "it holds no times that were measured", remedy)
    theirs = found.get("of", {})
    for key, value in mine.items():
        if theirs.get(key) != value:
            raise ConfigError(
                str(path), f"its times are of another {key}: {theirs.get(key)}, and here it is {value}", remedy
            )
    return found
