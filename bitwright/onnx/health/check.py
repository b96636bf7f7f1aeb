"""Which operator of an ONNX model turned finite numbers into NaN or Inf, and why.

Every batch runs through a :class:`~bitwright.onnx.health.probe.Probe`. Where nothing is suspected, that is all. Otherwise the
nodes around what is not finite are told to a :class:`~bitwright.core.health.report.Tracker` in execution order, steps of
loops included, and it decides what is a fault and what is none. Only then tensors are fetched: those around the
operators named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.graph.ops import op_row
from bitwright.core.graph.recurrence import CELLS
from bitwright.core.graph.traits import TRAITS
from bitwright.core.health.diagnosis import diagnose, remedy
from bitwright.core.health.report import (
    CLEAN,
    HALVES,
    Culprit,
    Event,
    Flags,
    HealthReport,
    TensorHealth,
    TensorKind,
    Tracker,
    first_non_finite,
    measure_tensor,
)
from bitwright.core.simulation.calibration import refuse_empty
from bitwright.errors import CalibrationError
from bitwright.export.files.value_types import is_tensor
from bitwright.onnx.health.probe import Frame, Probe, array_of, flags_of, run_wide, scan_inputs
from bitwright.onnx.health.recurrent_steps import first_bad_step
from bitwright.onnx.model.data import InputSpec, as_feeds, input_specs, random_array
from bitwright.onnx.model.graph import canonical_op
from bitwright.onnx.model.load import Source, load_model
from bitwright.onnx.model.session import Providers, check_providers
from bitwright.progress import progress as shown

Array = NDArray[Any]

_NOTES = 16
# Operators that hand a constant on as it is, to what reads it.
_CARRIES = frozenset((*TRAITS["one_element"], "Flatten", "Transpose", "Expand", "Slice", "Concat"))


def check_health(model: Source, data: Any, providers: Providers | None, threads: int, progress: bool) -> HealthReport:
    """See :func:`bitwright.methods.health.check_model`."""
    check_providers(providers)
    loaded = load_model(model)
    name = loaded.path.name if loaded.path is not None else loaded.model.graph.name or "model"
    doctor = Doctor(loaded.model, name, providers, threads)
    if not doctor.bad_params:
        doctor.run(_batches(data, doctor.specs), progress)
    return doctor.report()


def _batches(data: Iterable[Any] | None, specs: Sequence[InputSpec]) -> Iterable[Any]:
    if data is None:
        rng = np.random.default_rng(0)
        return [{spec.name: random_array(spec, rng) for spec in specs}]
    if isinstance(data, (Mapping, np.ndarray)) or callable(data):
        raise CalibrationError(
            "check_model",
            f"data is a {type(data).__name__}, not a list of batches",
            "write check_model(model, [batch]) for a single batch",
        )
    return data


@dataclass(eq=False)
class _Origin:
    """Where an event of the tracker happened."""

    frame: Frame
    node: ir.Node | None
    name: str  # of the input or constant, where there is no node


@dataclass(eq=False)
class Doctor:
    """One model, and what was found in it so far.

    Args:
        model: normalised by :func:`~bitwright.onnx.model.load.load_model`; not changed.
        name: for the report.
        providers, threads: of the sessions.
    """

    model: ir.Model
    name: str
    providers: Providers | None = None
    threads: int = 0
    batches: int = 0
    specs: tuple[InputSpec, ...] = field(init=False)
    bad_params: tuple[TensorHealth, ...] = field(init=False)
    _culprits: dict[tuple[str, str], Culprit] = field(default_factory=dict)
    _last: dict[tuple[str, str], int] = field(default_factory=dict)  # culprit -> the last batch that showed it
    _bad_inputs: list[TensorHealth] = field(default_factory=list)
    _harmless: dict[str, str] = field(default_factory=dict)  # operator -> the note about it
    _notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.specs = input_specs(self.model)
        self.probe = Probe(self.model, self.providers, self.threads)
        self.bad_params, self._constants = _bad_constants(self.model)
        for tensor in self.bad_params:
            self._accuse_param(tensor)

    def run(self, data: Iterable[Any], show: bool = False) -> None:
        """Check batches; Ctrl-C ends the run and keeps what was found."""
        try:
            for batch in shown(data, "checking", show):
                self.check(batch)
        except KeyboardInterrupt:
            self._notes.append(f"interrupted after {self.batches} batches")
            return
        if not self.batches:
            raise CalibrationError(
                "check_model", "the data held no batch", "pass a non-empty list (a generator can be used only once)"
            )

    def check(self, batch: Any) -> None:
        """Check one batch."""
        where = f"batch {self.batches}"
        feeds = as_feeds(batch, self.specs, where)
        refuse_empty(self.batches, {name: array.shape for name, array in feeds.items()})
        root = Frame(self.probe, feeds)
        bad = {name: array for name, array in root.feeds.items() if root.flags(name).bad}
        self._bad_inputs += [
            replace(measure_tensor(name, array, "input"), name=f"{name}, {where}") for name, array in bad.items()
        ]
        outputs = {name: flags_of(array) for name, array in root.outputs.items()}
        if bad or root.suspects or any(flags.bad for flags in outputs.values()):
            self._follow(root, outputs)
        self.batches += 1

    def report(self) -> HealthReport:
        """What was found."""
        reported = {culprit.op for culprit in self._culprits.values()}
        notes = [note for op, note in self._harmless.items() if op not in reported]
        calls = sum(1 for _ in self.model.graph.all_nodes()) * self.batches
        return HealthReport(
            self.name,
            tuple(self._culprits.values()),
            tuple(self._bad_inputs),
            self.bad_params,
            (*self._notes, *notes),
            self.batches,
            calls,
        )

    # -- one batch

    def _follow(self, root: Frame, outputs: Mapping[str, Flags]) -> None:
        tracker, origins = Tracker(), {}
        kinds: list[tuple[str, TensorKind]] = [(name, "input") for name in root.feeds]
        for name, kind in (*kinds, *self._constants.items()):
            event = tracker.source(name, name, kind, root.flags(name))
            if event is not None:
                origins[event.index] = _Origin(root, None, name)
        _Replay(tracker, origins).run(root)
        for name, flags in outputs.items():
            tracker.output(name, name, flags)
        for event in tracker.events:
            if event.reported:
                self._accuse(event, origins[event.index], root)
            elif len(self._harmless) < _NOTES:
                self._harmless.setdefault(event.op, _harmless(event, origins[event.index]))

    def _accuse(self, event: Event, origin: _Origin, root: Frame) -> None:
        key = (event.op, event.op_type)
        known = self._culprits.get(key)
        if known is not None:  # at a later batch, or at a later step of a loop
            more = self._last[key] != self.batches
            self._culprits[key], self._last[key] = replace(known, batches=known.batches + more), self.batches
            return
        record = self._of_input(event, origin) if origin.node is None else self._of_node(event, origin)
        sample = record.sample
        if record.op_type not in CELLS:  # their rows are time steps
            sample = _sample(record.outputs or record.inputs, origin.frame, root)
        self._culprits[key] = replace(
            record,
            batch=self.batches,
            sample=sample,
            spread=event.spread,
            spread_names=tuple(event.names),
            reached=tuple(event.reached),
        )
        self._last[key] = self.batches

    def _of_input(self, event: Event, origin: _Origin) -> Culprit:
        kind: TensorKind = "input" if event.op_type == "input" else "constant"
        array = origin.frame.fetch([origin.name])[origin.name]
        tensor = measure_tensor(origin.name, array, kind)
        cause = "bad input data" if kind == "input" else "NaN constant" if tensor.nan else "mask constant"
        problem = f"it holds {tensor.nan} NaN and {tensor.inf} Inf, the first at {list(tensor.first_bad or ())}"
        return Culprit(event.op, event.op_type, "", cause, problem, remedy(cause), inputs=(tensor,))

    def _of_node(self, event: Event, origin: _Origin) -> Culprit:
        frame, node = origin.frame, origin.node
        assert node is not None
        reads = [_readable_name(v) for v in node.inputs]
        writes = [v.name for v in node.outputs if v.name and is_tensor(v)]
        arrays = frame.fetch([*filter(None, reads), *writes])
        ports = [measure_tensor(n, arrays[n], self._kind(n)) if n else None for n in reads]
        written = [measure_tensor(name, arrays[name]) for name in writes]
        op_type, attrs = canonical_op(node, self.probe.opset)
        given = [arrays.get(name) for name in reads]
        halves = {t.dtype for t in written}.intersection(HALVES)
        needed = run_wide(node, given, self.probe) if halves else None
        finding = diagnose(op_type, attrs, ports, written, needed, "onnx")
        operands = list(filter(None, ports))
        has_steps = op_type in CELLS and all(t.finite for t in operands)
        inside = first_bad_step(op_type, attrs, given) if has_steps else None
        return Culprit(
            event.op,
            op_type,
            frame.where or event.op,
            finding.cause,
            finding.problem if inside is None else f"{finding.problem}; {inside}",
            finding.remedy,
            sample=None if inside is None else inside.sample,
            inputs=tuple(t for t in operands if t.kind != "param"),
            params=tuple(t for t in operands if t.kind == "param"),
            outputs=tuple(written),
        )

    def _kind(self, name: str) -> TensorKind:
        if name in self.probe.inputs:
            return "input"
        if name in self.probe.constants:
            return self._constants.get(name, "param")
        return "activation"

    def _accuse_param(self, tensor: TensorHealth) -> None:
        value = self.probe.constants[tensor.name]
        reader = next((node for node, _ in value.uses()), None)
        index = list(tensor.first_bad or ())
        problem = f"it holds {tensor.nan} NaN and {tensor.inf} Inf, the first at {index}"
        where = "" if reader is None else f"{reader.name} ({reader.op_type})"
        self._culprits[tensor.name, "param"] = Culprit(
            tensor.name, "param", where, "bad parameter", problem, remedy("bad parameter"), params=(tensor,)
        )


def _harmless(event: Event, origin: _Origin) -> str:
    where = f" in {origin.frame.where}" if origin.frame.where else ""
    left = "nothing of them is left at the end" if not event.reached else "they reach an output"
    if event.op_type in ("input", "param", "constant"):
        what = "a mask or a bound: its values are not finite" if event.meant else "not finite"
        return f"the {event.op_type} {event.op} is {what}; {left}"
    return f"{event.op} ({event.op_type}){where} makes values that are not finite; {left}"


def _sample(tensors: Sequence[TensorHealth], frame: Frame, root: Frame) -> int | None:
    """Row of the batch that is bad first: where the operator wrote, if its rows are those of the batch."""
    rows = {array.shape[0] for array in root.feeds.values() if array.ndim}
    if len(rows) != 1:
        return None
    (count,) = rows
    for tensor in tensors if frame is root else ():
        if tensor.first_bad and tensor.shape[0] == count:
            return tensor.first_bad[0]
    for array in root.outputs.values():
        if array.ndim and array.shape[0] == count and (found := first_non_finite(array)) is not None:
            return found[0][0]
    return None


# --------------------------------------------------------------------------------------------------- the replay


class _Replay:
    """Tells a tracker what every node near a non-finite value read and wrote, in execution order."""

    def __init__(self, tracker: Tracker, origins: dict[int, _Origin]) -> None:
        self.tracker, self.origins = tracker, origins

    def run(self, root: Frame) -> None:
        """Go through a run of the model; runs of bodies are put on a stack."""
        stack = [self._frame(root)]
        while stack:
            inner = next(stack[-1], None)
            if inner is None:
                stack.pop()
            else:
                stack.append(inner)

    def _frame(self, frame: Frame) -> Iterator[Any]:
        """The nodes of one run; yields what is to be gone through before it goes on."""
        probe = frame.probe
        entered = {probe.owner[name] for name in frame.suspects if name in probe.owner}
        for node in probe.model.graph:
            touched = any(_flags(frame, v).bad for v in (*node.inputs, *node.outputs))
            if node in probe.bodies:
                if touched or node in entered:
                    yield self._body(frame, node)
            elif touched:
                self._call(frame, node)

    def _call(self, frame: Frame, node: ir.Node) -> None:
        op_type, _ = canonical_op(node, frame.probe.opset)
        event = self.tracker.call(
            str(node.name),
            op_type,
            [(str(v.name), _flags(frame, v)) for v in node.inputs if v is not None],
            [(str(v.name), _flags(frame, v)) for v in node.outputs if v.name],
        )
        if event is not None:
            self.origins[event.index] = _Origin(frame, node, "")

    def _body(self, frame: Frame, node: ir.Node) -> Iterator[Any]:
        """All runs of the body of ``node``; what enters and leaves it bears two names for one tensor."""
        before, results = list(map(_name, node.inputs)), list(map(_name, node.outputs))
        states, leaving = _states(node)
        sources = [before[port] for port in states]
        for child in frame.runs(node):
            assert child.body is not None
            own, made = child.body.formal, child.body.probe.outputs
            for inner, source in zip(own[_FIRST_STATE[node.op_type] :], sources, strict=False):
                self.tracker.move(source, inner)
            for inner, port in _slices(node, own):
                self.tracker.move(before[port], inner)
            if child.touched:
                yield self._frame(child)
            sources = made[leaving : leaving + len(states)]
            self._gather(child, results[len(states) :], made[leaving + len(states) :])
        for name, source in zip(results, sources, strict=False):
            if name:
                self.tracker.move(source, name)

    def _gather(self, child: Frame, results: Sequence[str], made: Sequence[str]) -> None:
        """What one run adds to the ``results`` that have something of every run."""
        for name, inner in zip(results, made, strict=True):
            if name and not self.tracker.knows(name) and flags_of(child.outputs[inner]).bad:
                self.tracker.move(inner, name)


_FIRST_STATE = {"If": 0, "Loop": 2, "Scan": 0}


def _states(node: ir.Node) -> tuple[range, int]:
    """Ports of the initial states, and how many outputs of the body come before the states."""
    if node.op_type == "If":
        return range(0), 0
    if node.op_type == "Loop":
        return range(2, len(node.inputs)), 1
    return range(len(node.inputs) - scan_inputs(node)), 0


def _slices(node: ir.Node, own: Sequence[str]) -> list[tuple[str, int]]:
    """``(input of the body, port of the Scan that it is a slice of)``."""
    if node.op_type != "Scan":
        return []
    first = len(node.inputs) - scan_inputs(node)
    return [(own[port], port) for port in range(first, len(node.inputs))]


def _name(value: ir.Value | None) -> str:
    return "" if value is None else str(value.name or "")


def _readable_name(value: ir.Value | None) -> str:
    """Of a tensor; empty for a port without one, or with a sequence."""
    tensor = value is not None and value.name and is_tensor(value)
    return str(value.name) if value is not None and tensor else ""


def _flags(frame: Frame, value: ir.Value | None) -> Flags:
    return CLEAN if value is None or not value.name else frame.flags(value.name)


# ---------------------------------------------------------------------------------------------------- constants


def _bad_constants(model: ir.Model) -> tuple[tuple[TensorHealth, ...], dict[str, TensorKind]]:
    """Parameters that are not finite; and constants that are not, by name: masks, bounds, fill values."""
    bad: list[TensorHealth] = []
    meant: dict[str, TensorKind] = {}
    for value in model.graph.initializers.values():
        if value.dtype is None or not value.dtype.is_floating_point() or value.const_value is None:
            continue
        array = array_of(value)
        if first_non_finite(array) is None:
            continue
        name = str(value.name)
        if _is_weight(value) or (np.isnan(array).any() and array.size > 1):
            bad.append(measure_tensor(name, array, "param"))
        else:
            meant[name] = "constant"
    return tuple(bad), meant


def _is_weight(value: ir.Value) -> bool:
    """Whether an operator reads ``value`` as a parameter, perhaps after changes of shape and type."""
    waiting, seen = [value], {value}
    while waiting:
        for node, port in waiting.pop().uses():
            if node.op_type in _CARRIES:
                fresh = [v for v in node.outputs if v not in seen]
                seen.update(fresh)
                waiting.extend(fresh)
            elif _reads_weight(node, port):
                return True
    return False


def _reads_weight(node: ir.Node, port: int) -> bool:
    row = op_row(node.op_type)
    return row is not None and (port in row.params or port == row.weight)
