"""Verification of an export from the files in its folder.

Does the exported file compute what the simulation computed? Layer by layer, in ONNX Runtime.

Deep networks cannot be compared end to end: one value that lands on the other side of a rounding boundary
(float sums depend on their order) spreads through all layers after it. So every activation quantizer is
fed the simulation's own values from upstream, and what it produces is compared with the simulation's value
there, in steps of its grid (LSB). That happens twice: with float kernels (``session.disable_quant_qdq=1``,
all other optimisations on) and in the runtime's default mode, where QDQ groups become integer kernels. Time
and memory are linear in the model; how it is taken apart is told in :mod:`bitwright.compare.cut`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.agreement import SLACK, Agreement, compare, in_float64, spread, step_of
from bitwright.compare.bodies import open_bodies, runs_of
from bitwright.compare.cut import Cut, Place
from bitwright.compare.reasons import OTHER_CONSTANT, Evidence, Saturated, explain, measure, reason_of, saturated_places
from bitwright.compare.recurrent_steps import after_pools, side_by_side
from bitwright.compare.runtime import EXACT_SUMS, MODES, Mode, refusals, run_in, run_model
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ExportError, close_matches, first_few
from bitwright.export.artefacts import Samples, WrongKernels
from bitwright.export.files.manifest import read_manifest
from bitwright.export.files.onnx_file import checked_on_failure, load
from bitwright.export.qdq.forms import METADATA, folded_parts, read_metadata
from bitwright.export.qdq.lookups import with_tables
from bitwright.export.qdq.markers import copy_model
from bitwright.export.runtime_faults import Edit, Otherwise, computed_otherwise
from bitwright.export.samples import find_export, plain, read_samples
from bitwright.export.targets import find_target
from bitwright.runtimes.adapters import check_not_empty, find_runtime, named_arrays
from bitwright.tables import Table, Tabular, html_table

Array = NDArray[Any]
T = TypeVar("T")
Verdict = Literal["agrees", "within", "fails"]

_MOST_OPS = 8
_FAR, _NEARER = 20.0, 10.0  # dB from the simulation: a wrong output, and how much nearer float kernels bring it then
_SAME_OUTPUT = 60.0  # dB, of a model without anything quantized
_VERDICTS: dict[Verdict, str] = {"agrees": "", "within": "within ", "fails": "FAILS "}


@dataclass(frozen=True)
class Row:
    """One quantized place.

    Attributes:
        site: name in the simulation.
        run: which run of the place it is, from 0; above 0 only in loops.
        tensor: name in the file.
        format: ``uint8``, ``int16``, ...
        ops: operator types between the upstream quantizers and this one, in execution order.
        kernel: what the runtime's default mode ran last for it (``QLinearConv``), or ``float``; ``constant``.
        as_float, as_integer: agreement with float kernels and with integer kernels.
        reason: why codes differ, where they do.
        specified: share of codes of the reference kernels that are those of the format's specification, computed in integers;
            ``None`` where that is not told, as in other runtimes than LiteRT.
        rounded_once: share of codes that would be the simulation's if the reference kernel rounded once, a half to even:
            what is left of a difference without its roundings. ``None`` where there is none, or it is not told.
    """

    site: str
    run: int
    tensor: str
    format: str
    ops: tuple[str, ...]
    kernel: str
    as_float: Agreement
    as_integer: Agreement
    reason: str | None = None
    specified: float | None = None
    rounded_once: float | None = None

    _also = ("ok", "verdict")

    @property
    def ok(self) -> bool:
        """Whether both modes agree with the simulation, or within what their kernels may do."""
        return self.verdict != "fails"

    @property
    def verdict(self) -> Verdict:
        """``"agrees"``; ``"within"`` what the arithmetic of the kernel named in ``reason`` may do; or ``"fails"``.

        Within means that every code that differs was rounded from a value on the border between the two codes, as
        measured, up to the error that such a kernel is known to make. It takes nothing else: a place whose values are
        anywhere off fails.
        """
        both = (self.as_float, self.as_integer)
        if all(a.ok for a in both):
            return "agrees"
        return "within" if all(a.ok or a.within for a in both) else "fails"


@dataclass(frozen=True)
class OutputRow:
    """One graph output, end to end: signal-to-noise ratio against the simulation in dB, ``inf`` if equal."""

    name: str
    as_float: float
    as_integer: float


@dataclass(frozen=True)
class VerifyReport(Tabular):
    """What :func:`verify_layers` found.

    Attributes:
        rows: one per quantized place, in execution order.
        outputs: graph outputs that the simulation's values were given for.
        unchecked: site -> why it could not be compared.
        failures: mode -> why the runtime refused the model in it.
        idle: site that did not run on this input -> why: a branch was not taken, a loop had no iteration.
        runtime: whose kernels the mode ``integer`` is of.
        saturated: where a session of ONNX Runtime with default settings does not have the sums of ``as_integer`` on this
            CPU, which are exact; ``None`` if nowhere.
        otherwise: an output that another runtime makes otherwise of the whole file than of its operators; ``None`` if none.
    """

    _rows = "rows"
    _also = ("ok",)

    rows: tuple[Row, ...]
    outputs: tuple[OutputRow, ...] = ()
    unchecked: dict[str, str] = field(default_factory=dict)
    failures: dict[Mode, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)
    runtime: str = "onnxruntime"
    saturated: Saturated | None = None
    otherwise: Otherwise | None = None

    @property
    def ok(self) -> bool:
        """Every place that ran was compared and agrees in both modes, or within what the kernel may do.

        Where nothing is quantized, not even an output is of floats, all outputs are equal to 60 dB. Integer sums of ONNX Runtime
        are exact: what a CPU without VNNI makes of them by default is in ``saturated`` and does not count.
        """
        compared = all(r.ok for r in self.rows) if self.rows else self._outputs_agree
        return compared and not self.unchecked and not self.failures and self.otherwise is None

    @property
    def _outputs_agree(self) -> bool:
        levels = [level for end in self.outputs for level in (end.as_float, end.as_integer)]
        return bool(levels) and min(levels) >= _SAME_OUTPUT

    def to_text(self) -> str:
        """The report as a table, with the reasons as numbered notes below it."""
        notes = self._notes()
        where = "" if self.runtime == "onnxruntime" else f" in {self.runtime}"
        first, second = self._modes
        head = ("site", "operators", "kernel", f"equal ({first})", "LSB", f"equal ({second})", "LSB", "note")
        rows = []
        for row in self.rows:
            name = f"{row.site} (run {row.run})" if row.run else row.site
            numbers = [text for a in (row.as_float, row.as_integer) for text in (f"{a.equal:.3%}", f"{a.lsb:.3g}")]
            note = _VERDICTS[row.verdict] + ("" if row.reason is None else str(notes[row.reason]))
            rows.append((name, " ".join(row.ops), row.kernel, *numbers, note))
        title = f"Simulation against the exported file{where}, layer by layer"
        reasons = [f"{number:>2}  {reason}" for reason, number in notes.items()]
        return "\n".join([str(Table(head, rows, title, right=(3, 4, 5, 6))), *reasons, *self._lines(), ""])

    @property
    def _modes(self) -> tuple[str, str]:
        """What the two comparisons are called in this runtime."""
        return ("reference", "default") if self.runtime == "litert" else ("float", "integer")

    def _notes(self) -> dict[str, int]:
        """Every reason once, numbered from 1 in the order of the rows."""
        reasons = dict.fromkeys(row.reason for row in self.rows if row.reason is not None)
        return {reason: number for number, reason in enumerate(reasons, 1)}

    __str__ = to_text

    def _repr_html_(self) -> str:
        first, second = self._modes
        head = (
            "site",
            "run",
            "operators",
            "kernel",
            f"equal ({first})",
            "LSB",
            f"equal ({second})",
            "LSB",
            "verdict",
            "reason",
        )
        rows = [
            (row.site, row.run, " ".join(row.ops), row.kernel)
            + tuple(text for a in (row.as_float, row.as_integer) for text in (f"{a.equal:.3%}", f"{a.lsb:.3g}"))
            + (row.verdict, row.reason or "")
            for row in self.rows
        ]
        return html_table(head, rows, "Simulation against the exported file, layer by layer", self._lines())

    def _lines(self) -> Iterator[str]:
        first, second = self._modes
        for end in self.outputs:
            levels = f"{end.as_float:.1f} dB ({first} kernels), {end.as_integer:.1f} dB ({second} kernels)"
            yield f"output {end.name}: {levels}"
        for site, why in self.unchecked.items():
            yield f"not compared: {site}: {why}"
        for site, why in self.idle.items():
            yield f"did not run: {site}: {why}"
        for mode, why in self.failures.items():
            yield f"does not run with {mode} kernels: {why}"
        if self.saturated is not None:
            yield str(self.saturated)
        if self.otherwise is not None:
            yield str(self.otherwise)
        good = sum(row.verdict == "agrees" for row in self.rows)
        within = sum(row.verdict == "within" for row in self.rows)
        more = f", {within} within what their kernel may do" if within else ""
        yield f"{good} of {len(self.rows)} places agree{more}: {'ok' if self.ok else 'NOT ok'}"


def verify_layers(
    model: ir.Model | str | os.PathLike[str],
    values: Mapping[str, Array | Sequence[Array]],
    graph_inputs: Mapping[str, Array],
    *,
    outputs: Mapping[str, Array] | None = None,
    runtime: str = "onnxruntime",
    flat: bytes | None = None,
) -> VerifyReport:
    """Compare an exported model with the simulation at every quantized place.

    Args:
        model: QDQ model as ``to_qdq`` wrote it, or its path.
        values: site (or name of the dequantized tensor) -> what the simulation had there, quantized, in
            float; a list of arrays, in execution order, for a site that ran several times. Weights and
            biases may be given too and are then compared with what the file stores. Of a site inside a recurrent
            layer all steps, ``[length, batch, hidden]``, in the order of time; inside another Loop or Scan all
            iterations along a first axis; inside a branch that was not taken an empty array. Of a site that the file
            rounds after a pool what the pool reads.
        graph_inputs: name -> value of every graph input.
        outputs: name -> what the simulation returned, for the comparison end to end.
        runtime: whose kernels are compared, a row of :data:`bitwright.runtimes.adapters.RUNTIMES`.
        flat: for ``"litert"``, the LiteRT file that was made of ``model``; it is made here by default.

    Returns:
        A report with one row per place: quantized tensors, and float outputs that end in no quantizer (one
        step there is a thousandth of the largest value). Activations without a value are listed as
        unchecked.

    Raises:
        ExportError: the file cannot be read or was not written by ``to_qdq``, a graph input is missing, the batch holds no
            sample, or a value has another shape than its tensor.
    """
    site = "model" if isinstance(model, ir.Model) else os.fspath(model)
    with checked_on_failure(model, site, ExportError):
        loaded, expected = _load(model), outputs or {}
        _check_inputs(loaded, graph_inputs)
        values = after_pools(loaded, values)
        if find_runtime(runtime).suffix == ".tflite":
            from bitwright.compare.litert import verify_litert
            from bitwright.export.litert.convert import to_tflite

            content = to_tflite(loaded, graph_inputs).content if flat is None else flat
            return verify_litert(content, loaded, values, graph_inputs, expected)
        opened = open_bodies(loaded, values)
        laid_out = side_by_side(opened.model, opened.values, graph_inputs)
        open_outputs = _without(expected, laid_out.settled)
        cut = Cut(laid_out.model, laid_out.values, open_outputs)
        failures: dict[Mode, str] = {}
        found: dict[Place, list[Row]] = {}
        given = {**graph_inputs, **opened.feeds, **laid_out.feeds}
        for part, places, feeds in cut.parts():
            found |= _compare_part(cut, part, places, {**given, **feeds}, failures, runtime)
        rows = [row for place in cut.places for row in found[place]]
        rows += [row for node in with_tables(loaded).graph.all_nodes() for row in _constant_rows(node, values)]
        ends = _compare_outputs(loaded, expected, graph_inputs, failures, runtime)
        ran = {row.site for row in rows}
        idle = _without(opened.idle, ran)
        unchecked = _without(cut.unchecked, idle)
        compares = runtime == "onnxruntime" and not failures
        saturated = saturated_places(loaded, cut, given) if compares else None
        otherwise = _as_a_whole(loaded, graph_inputs, expected, ends, failures, runtime)
        return VerifyReport(tuple(rows), ends, unchecked, failures, idle, runtime, saturated, otherwise)


def _as_a_whole(
    model: ir.Model,
    feeds: Mapping[str, Array],
    outputs: Mapping[str, Array],
    ends: Sequence[OutputRow],
    failures: Mapping[Mode, str],
    runtime: str,
) -> Otherwise | None:
    """An output that a runtime other than ONNX Runtime makes otherwise than the operators do."""
    if runtime == "onnxruntime" or failures:
        return None

    def changed(edit: Edit) -> Callable[[str], float]:
        copied = copy_model(model)
        edit(copied)
        try:
            found = named_arrays(run_in(runtime, copied, feeds, "integer"))
        except _refusals():  # a model that states lengths of its own
            found = {}
        return lambda name: level(outputs[name], found.get(name))

    return computed_otherwise(model, [(end.name, end.as_integer) for end in ends], feeds, changed, runtime)


def _load(model: ir.Model | str | os.PathLike[str]) -> ir.Model:
    site = "model" if isinstance(model, ir.Model) else os.fspath(model)
    if not isinstance(model, ir.Model):
        if not Path(model).is_file():
            raise ExportError(site, "there is no such file", "export the simulation first, or check the path")
        model = _read(model, site)
    if METADATA not in model.metadata_props and not any(map(read_metadata, model.graph.all_nodes())):
        problem = "no node carries the notes of to_qdq, so its quantizers cannot be told from others"
        raise ExportError(site, problem, "verify a model as to_qdq wrote it")
    return model


def _read(path: str | os.PathLike[str], site: str) -> ir.Model:
    try:
        return load(Path(path))
    except Exception as error:  # protobuf's own errors are not importable through onnx
        problem = f"it cannot be read as an ONNX model: {error}"
        raise ExportError(site, problem, "export the simulation again, or check the path") from error


def _check_inputs(model: ir.Model, graph_inputs: Mapping[str, Array]) -> None:
    check_not_empty("verify", graph_inputs)
    for value in model.graph.inputs:
        name = str(value.name)
        if name not in graph_inputs and not value.is_initializer():
            near = close_matches(name, graph_inputs)
            raise ExportError(name, f"no value was given for this graph input{near}", "add it to graph_inputs")


# ------------------------------------------------------------------------------------------------ comparisons


def _compare_part(
    cut: Cut, part: ir.Model, places: list[Place], feeds: Mapping[str, Array], failures: dict[Mode, str], runtime: str
) -> dict[Place, list[Row]]:
    """The rows of the places that one part computes; adds to ``failures`` what the runtime refuses."""
    results: dict[Mode, dict[str, Array]] = {}
    refused: dict[Mode, str] = {}
    kernels: dict[str, str] = {}
    for mode in MODES:
        try:
            types = kernels if mode == "integer" else None
            results[mode] = run_in(runtime, part, feeds, mode, types, entries=EXACT_SUMS)
        except _refusals() as error:
            refused[mode] = str(error).strip().splitlines()[0]
    for mode, text in refused.items():
        failures.setdefault(mode, text)
    runtimes = {place.piece: frozenset(map(kernels.get, place.piece.made)) for place in places}
    compared = [_Compared.of(place, results, refused, kernels, runtimes[place.piece]) for place in places]
    doubtful = [one for one in compared if one.is_doubtful]
    exact = _before_rounding(cut, [one.place for one in doubtful], feeds)
    measured = {one.place: one.measured(exact, results) for one in doubtful}
    return {one.place: measured.get(one.place, one).rows() for one in compared}


def _refusals() -> tuple[type[Exception], ...]:
    return (ExportError, *refusals())


def _before_rounding(cut: Cut, places: list[Place], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """What float kernels make in front of the quantizers of ``places``, by name; empty where the runtime refuses that."""
    if not places:
        return {}
    model, more = cut.before(places)
    try:
        return run_model(model, {**feeds, **more}, "float")
    except refusals():
        return {}  # the places then count as they are, by equal codes


@dataclass(frozen=True)
class _Compared:
    """A place after the comparison of its codes."""

    place: Place
    evidence: Evidence

    @staticmethod
    def of(
        place: Place,
        results: Mapping[Mode, Mapping[str, Array]],
        failures: Mapping[Mode, str],
        kernels: Mapping[str, str],
        runtime: frozenset[str | None],
    ) -> _Compared:
        """Compare a place in both modes; a mode that the runtime refused agrees in nothing."""
        name, facts, expected = str(place.result.name), place.facts, place.expected
        found = {
            mode: compare(expected, results[mode][name], facts, place.scale)
            if mode in results
            else Agreement(0.0, math.inf, expected.size)
            for mode in MODES
        }
        params, fmt = frozenset(place.piece.float_params), str(facts["format"])
        return _Compared(
            place,
            Evidence(
                frozenset(place.piece.ops),
                place.kernel(kernels),
                runtime,
                fmt,
                params,
                found,
                failures,
                place.piece.accumulated,
                place.piece.rounding,
                place.piece.bias,
            ),
        )

    @property
    def _unsettled(self) -> list[Mode]:
        """Modes whose codes differ in too many places, for a reason that is bounded."""
        found = self.evidence.found
        return [m for m in MODES if not found[m].ok and reason_of(self.evidence, m).bounded]

    @property
    def is_doubtful(self) -> bool:
        """Whether the value before rounding decides."""
        return bool(self.place.chain and self._unsettled) and self.place.entry.producer() is not None

    def measured(self, exact: Mapping[str, Array], results: Mapping[Mode, Mapping[str, Array]]) -> _Compared:
        """With the distance of its codes from what they were rounded from."""
        place, name = self.place, str(self.place.result.name)
        before, rounded = exact.get(str(place.entry.name)), results["float"][name]
        if before is None or before.shape != rounded.shape:
            return self
        found = dict(self.evidence.found)
        for mode in self._unsettled:
            code = results[mode][name]
            step = step_of(place.expected, code, place.facts, place.scale)
            expected, code, rounded = in_float64(step, place.expected, code, results["float"][name])
            # beyond half a step from its own code a value lies outside the grid; on the border float32 may add SLACK, and half
            # precision more: a fused kernel does not round in between
            beyond = self.evidence.halves * float(np.abs(before).max(initial=0.0))
            outside = np.abs(before - rounded) > (0.5 + SLACK) * step + beyond
            value = np.where(outside, rounded, before).astype(np.promote_types(before.dtype, np.float32))
            scale = 1.0 if place.scale is None else float(np.max(place.scale))
            off, allowed = measure(self.evidence, mode, expected, code, value, step, scale)
            found[mode] = replace(found[mode], off=off, allowed=allowed)
        return replace(self, evidence=replace(self.evidence, found=found))

    def rows(self) -> list[Row]:
        """One row per site."""
        place, evidence = self.place, self.evidence
        ops = tuple(place.piece.ops[-_MOST_OPS:])
        ops = ops if len(place.piece.ops) <= _MOST_OPS else ("...", *ops)
        ends, why = (evidence.found["float"], evidence.found["integer"]), explain(evidence)
        name = str(place.result.name)
        return [
            Row(site, run, name, evidence.format, ops, evidence.kernel, *ends, why)
            for site, run in place.facts["places"]
        ]


def _without(held: Mapping[str, T], names: Container[str]) -> dict[str, T]:
    return {name: value for name, value in held.items() if name not in names}


def _constant_rows(node: ir.Node, values: Mapping[str, Array | Sequence[Array]]) -> Iterator[Row]:
    """What a stored weight or bias stands for against the simulation's value, where one was given."""
    facts = read_metadata(node)
    if facts is None or facts["role"] == "activation":
        return
    name = str(node.outputs[0].name)
    for site, run in facts["places"]:
        several = runs_of(values.get(site))
        if run >= len(several):
            continue
        found, scale, axis = _as_in_model(*_stored_value(node), facts["axis"], facts["perm"])
        agreement = compare(np.asarray(several[run]), found, {**facts, "axis": axis}, scale)
        why = None if agreement.equal == 1 else OTHER_CONSTANT
        yield Row(site, run, name, facts["format"], (), "constant", agreement, agreement, why)


def _as_in_model(
    found: Array, scale: Array | None, axis: int | None, perm: Sequence[int]
) -> tuple[Array, Array | None, int | None]:
    """A constant, its scale and the axis of that as they were before the constant was transposed."""
    if not perm:
        return found, scale, axis
    back = np.argsort(perm)
    turned = scale.transpose(back) if scale is not None and scale.ndim > 1 else scale
    return found.transpose(back), turned, None if axis is None else perm[axis]


def _stored_value(node: ir.Node) -> tuple[Array, Array | None]:
    """The float value that ``node`` makes of initializers, and the scale it uses."""
    tensors = [_initializer(v) for v in node.inputs]
    parts = folded_parts(node)
    if parts is not None:
        codes, zero, factor = map(_initializer, parts)
        assert codes is not None and factor is not None
        return (codes.astype(np.float32) - (0.0 if zero is None else zero)).astype(np.float32) * factor, factor
    if node.op_type != "DequantizeLinear":
        maker = node.inputs[0].producer() if node.inputs[0] is not None else None
        if maker is not None:
            value, scale = _stored_value(maker)
            dtype = node.outputs[0].dtype
            return (value.astype(dtype.numpy()) if dtype else value), scale
        assert tensors[0] is not None
        return np.asarray(tensors[0], np.float32), None
    codes, scale = tensors[0], tensors[1]
    assert codes is not None and scale is not None
    axis = node.attributes.get_int("axis", 1)
    steps = spread(scale, axis, codes).astype(np.float32)
    centered = codes.astype(np.float32)
    if len(tensors) > 2 and tensors[2] is not None:
        centered = centered - spread(tensors[2].astype(np.int64), axis, codes).astype(np.float32)
    return centered * steps, scale


def _initializer(value: ir.Value | None) -> Array | None:
    return None if value is None or value.const_value is None else value.const_value.numpy()


def _compare_outputs(
    model: ir.Model,
    expected: Mapping[str, Array],
    graph_inputs: Mapping[str, Array],
    failures: dict[Mode, str],
    runtime: str,
) -> tuple[OutputRow, ...]:
    """The whole model end to end; adds to ``failures`` when the runtime refuses it."""
    results: dict[Mode, dict[str, Array]] = {}
    for mode in MODES:
        try:
            results[mode] = named_arrays(run_in(runtime, model, graph_inputs, mode, entries=EXACT_SUMS))
        except _refusals() as error:
            failures.setdefault(mode, str(error).strip().splitlines()[0])
    rows = []
    for name, array in expected.items():
        known = [str(v.name) for v in model.graph.outputs]
        if name not in known and not any(name in found for found in results.values()):
            near = close_matches(name, known)
            raise ExportError(name, f"the model has no output of this name{near}", f"name one of {known}")
        decibel = {m: level(array, results[m].get(name)) if m in results else -math.inf for m in MODES}
        rows.append(OutputRow(name, decibel["float"], decibel["integer"]))
    return tuple(rows)


def level(expected: Array, found: Array | None) -> float:
    """Signal-to-noise ratio in dB; of strings only whether they are equal."""
    if found is None or expected.shape != found.shape:  # a sequence or a map of another length
        return -math.inf
    if expected.dtype.kind in "OSU":
        same = np.array_equal(expected.astype(np.str_), found.astype(np.str_))
        return math.inf if same else -math.inf
    return sqnr(expected, found)


def wrong_kernels(model: Path, samples: Path, kept: Samples, target: str) -> WrongKernels | None:
    """Kernels of ONNX Runtime that bring the outputs of a file far away from its simulation, where float kernels do not.

    A file that is right is run once. Sums that saturate on a CPU without VNNI are no fault of the file and count as exact.

    Args:
        model: as ``to_qdq`` wrote it.
        samples: file with what the simulation computed.
        kept: what lies in it.
        target: of the model; those of other runtimes are not run.

    Returns:
        ``None`` where nothing is wrong, or where the runtime does not run the file at all, which ``verify`` says.
    """
    if find_target(target).runtime != "onnxruntime":
        return None
    loaded, levels = load(model), dict[Mode, dict[str, float]]()
    inputs = {name: plain(array) for name, array in kept.inputs.items()}
    outputs = {name: plain(array) for name, array in kept.outputs.items()}
    expected = {name: array for name, array in outputs.items() if array.dtype.kind == "f" and array.size}
    mode: Mode
    for mode in ("integer", "float"):
        try:
            found = named_arrays(run_in("onnxruntime", loaded, inputs, mode, entries=EXACT_SUMS))
        except _refusals():
            return None
        levels[mode] = {name: level(array, found.get(name)) for name, array in expected.items()}
        if min(levels["integer"].values(), default=math.inf) >= _FAR:
            return None
    away = [name for name, one in levels["integer"].items() if one < min(_FAR, levels["float"][name] - _NEARER)]
    if not away:
        return None
    made = {
        row.site: f"{row.kernel} of ONNX Runtime gives {row.as_integer.equal:.1%} of its codes as simulated"
        for row in verify_layers(model, *read_samples(samples)[:2]).rows
        if row.as_float.ok and not (row.as_integer.ok or row.as_integer.within)
    }
    name, where = away[0], f" at {first_few(list(made))}" if made else ""
    one, other = (f"{levels[mode][name]:.1f} dB" for mode in ("integer", "float"))
    text = (
        f"integer kernels of ONNX Runtime bring the output {name} to {one} from the simulation{where}, float kernels to "
        f"{other}: leave the place in float with a rule, and show the file to the maintainers of ONNX Runtime"
    )
    return WrongKernels(text, made)


def verify_folder(
    folder: str | os.PathLike[str], prefix: str | None = None, *, runtime: str = "onnxruntime"
) -> VerifyReport:
    """Verify what an export wrote: hashes of the files, then every layer against the samples.

    Args:
        folder: where the files lie.
        prefix: stem of the files; needed only when the folder holds several exports.
        runtime: whose kernels are compared.

    Raises:
        ConfigError: the runtime is not installed.
        ExportError: see :func:`find_export`; a file that changed since, or no samples of this export.
    """
    path, stem = Path(folder), find_export(folder, prefix)
    manifest = read_manifest(path / f"{stem}_manifest.json", check=True)
    listed = {entry.name for entry in manifest.files}
    if f"{stem}.onnx" not in listed:
        raise ExportError(
            str(path / f"{stem}_manifest.json"),
            f"it does not list {stem}.onnx, so that nothing says which model was exported",
            "export again; only files that the manifest lists can be verified",
        )
    if f"{stem}_samples.npz" not in listed:
        raise ExportError(
            str(path),
            f"the export has no samples, {stem}_samples.npz, to compare the model with",
            "export the model again with samples=True",
        )
    sites, inputs, outputs = read_samples(path / f"{stem}_samples.npz")
    flat = _flat_file(path, stem, listed) if find_runtime(runtime).suffix == ".tflite" else None
    return verify_layers(path / f"{stem}.onnx", sites, inputs, outputs=outputs, runtime=runtime, flat=flat)


def _flat_file(folder: Path, stem: str, listed: set[str]) -> bytes:
    name = f"{stem}.tflite"
    if name not in listed:
        problem = f"the export has no LiteRT file {name}"
        raise ExportError(str(folder), problem, "export the model again with target='litert'")
    return (folder / name).read_bytes()
