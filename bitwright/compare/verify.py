"""Verify that an exported file computes the same as its simulation, layer by layer, in a runtime.

Deep networks cannot be compared end to end: one value that lands on the other side of a rounding boundary
(float sums depend on their order) spreads through all layers after it. So every activation quantizer is
fed the simulation's own values from upstream, and what it produces is compared with the simulation's value
there, in steps of its grid (LSB). That happens twice: with float kernels (``session.disable_quant_qdq=1``,
all other optimisations on) and in the runtime's default mode, where QDQ groups become integer kernels. Time
and memory are linear in the model; how it is taken apart is told in :mod:`bitwright.compare.cut`.

Of outputs whose rows an operator selected before the last layers, only rows of the same index are compared (:class:`RowMatch`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.agreement import Agreement, compare, level, spread
from bitwright.compare.bodies import after_pools, open_bodies, runs_of, side_by_side
from bitwright.compare.cut import Cut, Place, constant_at, cut_by_sites, zero_points
from bitwright.compare.generation import verify_generation
from bitwright.compare.litert import verify_litert
from bitwright.compare.reasons import (
    DRAWN,
    OTHER_CONSTANT,
    Evidence,
    explain,
    measured,
    reason_of,
    saturated_places,
    sums_saturate,
)
from bitwright.compare.report import OutputRow, Row, VerifyReport
from bitwright.compare.runtime import EXACT_SUMS, MODES, Edit, Mode, Otherwise, computed_otherwise, run_in, run_model
from bitwright.compare.saturation import integer_products
from bitwright.compare.sides import read_file
from bitwright.core.simulation.output_quality import RowOrder, matched_rows, places_of
from bitwright.errors import ConfigError, ExportError, close_matches, first_few
from bitwright.export.artefacts import Samples, WrongKernels
from bitwright.export.edges import with_float_edges
from bitwright.export.files.manifest import read_manifest
from bitwright.export.files.onnx_file import all_nodes, array_of, checked_on_failure, load
from bitwright.export.litert.convert import to_tflite
from bitwright.export.qdq.forms import METADATA, folded_parts, read_metadata
from bitwright.export.qdq.half import settle_types
from bitwright.export.qdq.lookups import with_tables
from bitwright.export.qdq.markers import copy_model
from bitwright.export.qdq.trace import RANDOM
from bitwright.export.samples import find_export, plain, read_orders, read_samples
from bitwright.export.targets import find_target
from bitwright.runtimes.adapters import check_not_empty, find_runtime, flat_edges, named_arrays, open_file
from bitwright.runtimes.onnxruntime import as_values, refusals

Array = NDArray[Any]
T = TypeVar("T")

_MOST_OPS = 8
_TITLES = {
    "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "qnn": "Qualcomm's HTP", "litert": "LiteRT",
    "executorch": "ExecuTorch",
    "ncnn": "ncnn",
}  # fmt: skip
_EXACT, _LOST = 60.0, 3.0  # dB from the simulation that are as good as equal; what saturation may take unnoticed
_FAR, _NEARER = 20.0, 10.0  # dB from the simulation: a wrong output, and how much nearer float kernels bring it then


def verify_layers(
    model: ir.Model | str | os.PathLike[str],
    values: Mapping[str, Array | Sequence[Array]],
    graph_inputs: Mapping[str, Array],
    *,
    outputs: Mapping[str, Array] | None = None,
    orders: Mapping[str, RowOrder] | None = None,
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
        orders: output whose rows ``TopK`` chose for later layers -> what it chose in the simulation. The rows of such an output
            are compared that the same index chose, other than in LiteRT.
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
            content = to_tflite(loaded, graph_inputs).content if flat is None else flat
            return verify_litert(content, loaded, values, graph_inputs, expected)
        return _verify_onnx(loaded, values, graph_inputs, RowMatch.of(loaded, expected, orders), runtime)


def _verify_onnx(
    model: ir.Model,
    values: Mapping[str, Array | Sequence[Array]],
    graph_inputs: Mapping[str, Array],
    match: RowMatch,
    runtime: str,
) -> VerifyReport:
    """The report of a runtime that runs the ONNX file; see :func:`verify_layers`."""
    opened = side_by_side(open_bodies(model, values), graph_inputs)
    cut = cut_by_sites(opened.model, opened.values, _without(match.expected, opened.settled))
    failures: dict[Mode, str] = {}
    found: dict[Place, list[Row]] = {}
    given = {**graph_inputs, **opened.feeds}
    for places in cut.groups():
        found |= _compare_group(cut, places, given, failures, runtime)
    drawn = [place for place in cut.places if not all(row.ok for row in found[place]) and _is_drawn(cut, place)]
    rows = [row for place in cut.places if place not in drawn for row in found[place]]
    rows += [row for node in all_nodes(with_tables(model).graph) for row in _constant_rows(node, values)]
    ends = _compare_outputs(match, graph_inputs, failures, runtime)
    ran = {row.site for row in rows}
    idle = _without({**opened.idle, **{row.site: DRAWN for place in drawn for row in found[place]}}, ran)
    unchecked = _without(cut.unchecked, idle)
    compares = runtime == "onnxruntime" and not failures
    saturated = saturated_places(model, cut, given) if compares else None
    otherwise = _as_a_whole(match, graph_inputs, ends, failures, runtime)
    return VerifyReport(tuple(rows), ends, unchecked, failures, idle, runtime, saturated, otherwise)


def _is_drawn(cut: Cut, place: Place) -> bool:
    """Whether a place depends on operators that draw random numbers, so that its values differ from run to run."""
    return bool(RANDOM & {node.op_type for node in cut.part([place])[0].graph})


def _as_a_whole(
    match: RowMatch, feeds: Mapping[str, Array], ends: Sequence[OutputRow], failures: Mapping[Mode, str], runtime: str
) -> Otherwise | None:
    """An output that a runtime other than ONNX Runtime computes differently in the whole file."""
    if runtime == "onnxruntime" or failures:
        return None

    def changed(edit: Edit) -> Callable[[str], float]:
        copied = copy_model(match.model)
        edit(copied)
        try:
            found = named_arrays(run_in(runtime, copied, feeds, "integer"))
        except _refused():  # a model that states lengths of its own
            found = {}
        return lambda name: match.level(name, found)[0]

    return computed_otherwise(match.model, [(end.name, end.as_integer) for end in ends], feeds, changed, runtime)


def _load(model: ir.Model | str | os.PathLike[str]) -> ir.Model:
    site = "model" if isinstance(model, ir.Model) else os.fspath(model)
    model = with_float_edges(model if isinstance(model, ir.Model) else read_file(Path(model)))
    if METADATA not in model.metadata_props and not any(map(read_metadata, all_nodes(model.graph))):
        problem = "no node carries the notes of to_qdq, so its quantizers cannot be told from others"
        raise ExportError(site, problem, "verify a model as to_qdq wrote it")
    settle_types(model)  # which a file does not state where they follow
    return model


def _check_inputs(model: ir.Model, graph_inputs: Mapping[str, Array]) -> None:
    check_not_empty("verify", graph_inputs)
    for value in model.graph.inputs:
        name = str(value.name)
        if name not in graph_inputs and not value.is_initializer():
            near = close_matches(name, graph_inputs)
            raise ExportError(name, f"no value was given for this graph input{near}", "add it to graph_inputs")


def _refused() -> tuple[type[Exception], ...]:
    return (ExportError, *refusals())


# ------------------------------------------------------------------------------------------------ comparisons


def _compare_group(
    cut: Cut, places: list[Place], given: Mapping[str, Array], failures: dict[Mode, str], runtime: str
) -> dict[Place, list[Row]]:
    """The rows of places that one part of the model computes; adds to ``failures`` what the runtime refuses."""
    results: dict[Mode, dict[str, Array]] = {}
    refused: dict[Mode, str] = {}
    kernels: dict[str, str] = {}
    part, feeds = cut.part(places)
    for mode in MODES:
        try:
            types = kernels if mode == "integer" else None
            results[mode] = run_in(runtime, part, {**given, **feeds}, mode, types, entries=EXACT_SUMS)
        except _refused() as error:
            refused[mode] = str(error).strip().splitlines()[0]
            failures.setdefault(mode, refused[mode])
    found = {place: _agreements(place, results, nan_is_free=cut.nan_is_free) for place in places}
    known = {place: Evidence.of(place, found[place], kernels, refused, runtime) for place in places}
    doubtful = {place: modes for place, evidence in known.items() if (modes := _unsettled(place, evidence, results))}
    before: dict[str, Array] = {}
    if doubtful:
        part, feeds = cut.before([*doubtful])
        with suppress(*refusals()):  # refused, the places count as they are, by equal codes
            before = run_model(part, {**given, **feeds}, "float")
    for place, modes in doubtful.items():
        evidence, name = known[place], str(place.result.name)
        rounded, value = results["float"][name], before.get(str(place.entry.name))
        errors = {"float": 0.0, "integer": evidence.error}
        better = {
            mode: measured(evidence, mode, place, results[mode][name], rounded, value, errors[mode]) for mode in modes
        }
        known[place] = replace(evidence, found={**evidence.found, **better})
    return {place: _rows(place, evidence) for place, evidence in known.items()}


def _agreements(
    place: Place, results: Mapping[Mode, Mapping[str, Array]], *, nan_is_free: bool
) -> dict[Mode, Agreement]:
    """Agreement by mode; none where the runtime refused to run."""
    found: dict[Mode, Agreement] = dict.fromkeys(MODES, Agreement(0.0, math.inf, place.expected.size))
    for mode, made in results.items():
        value = made[str(place.result.name)]
        found[mode] = compare(place.expected, value, place.facts, place.scale, nan_is_free=nan_is_free)
    return found


def _unsettled(place: Place, evidence: Evidence, results: Container[Mode]) -> list[Mode]:
    """Modes in which too many codes differ, for a reason that is bounded: the value before rounding decides."""
    if not place.chain or place.entry.producer() is None or "float" not in results:
        return []
    return [m for m in MODES if not evidence.found[m].ok and reason_of(evidence, m).bounded]


def _rows(place: Place, evidence: Evidence) -> list[Row]:
    """One row per site."""
    ops = tuple(place.piece.ops[-_MOST_OPS:])
    ops = ops if len(place.piece.ops) <= _MOST_OPS else ("...", *ops)
    facts = (str(place.result.name), evidence.format, ops, evidence.kernel)
    ends = (evidence.found["float"], evidence.found["integer"], explain(evidence))
    return [Row(site, run, *facts, *ends) for site, run in place.facts["places"]]


def _without(held: Mapping[str, T], names: Container[str]) -> dict[str, T]:
    return {name: value for name, value in held.items() if name not in names}


def _constant_rows(node: ir.Node, values: Mapping[str, Array | Sequence[Array]]) -> Iterator[Row]:
    """Rows of stored weights and biases against the simulation's values, where these were given."""
    facts = read_metadata(node)
    if facts is None or facts["role"] == "activation":
        return
    for site, run in facts["places"]:
        several = runs_of(values.get(site))
        if run >= len(several):
            continue
        found, scale, axis = _as_in_model(*_stored_value(node), facts["axis"], facts["perm"])
        agreement = compare(np.asarray(several[run]), found, {**facts, "axis": axis}, scale)
        why = None if agreement.equal == 1 else OTHER_CONSTANT
        yield Row(site, run, str(node.outputs[0].name), facts["format"], (), "constant", agreement, agreement, why)


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
    parts = folded_parts(node)
    if parts is not None:
        codes, zero, factor = map(array_of, parts)
        assert codes is not None and factor is not None
        return (codes.astype(np.float32) - (0.0 if zero is None else zero)).astype(np.float32) * factor, factor
    if node.op_type in ("Reshape", "Mul"):
        return _written_out(node)
    held = constant_at(node, 0)
    if node.op_type != "DequantizeLinear":
        maker = node.inputs[0].producer() if node.inputs[0] is not None else None
        if maker is not None:
            value, scale = _stored_value(maker)
            dtype = node.outputs[0].dtype
            return (value.astype(dtype.numpy()) if dtype else value), scale
        assert held is not None
        return np.asarray(held, np.float32), None
    scale = constant_at(node, 1)
    assert held is not None and scale is not None
    block = node.attributes.get_int("block_size", 0)
    steps = spread(scale, node.attributes.get_int("axis", 1), held, block).astype(np.float32)
    return (held.astype(np.float32) - zero_points(node).astype(np.float32)) * steps, scale


def _maker(node: ir.Node, port: int) -> ir.Node:
    """The operator that makes an input which is no constant."""
    value = node.inputs[port]
    maker = None if value is None else value.producer()
    assert maker is not None
    return maker


def _written_out(node: ir.Node) -> tuple[Array, Array]:
    """Numbers that ``node`` ends to make of stored codes: Cast, then Gather or Sub, Mul by scales and, of blocks, Reshape.

    Returns: they, and the scale of each.
    """
    if node.op_type == "Mul" and _maker(node, 0).op_type == "Reshape":
        return _vectors_written_out(node)
    shape = constant_at(node, 1) if node.op_type == "Reshape" else None
    product = node if shape is None else _maker(node, 0)
    step, scale = _maker(product, 0), constant_at(product, 1)
    looked_up = step.op_type == "Gather"
    codes, other = constant_at(_maker(step, int(looked_up)), 0), constant_at(step, 1 - int(looked_up))
    assert codes is not None and other is not None and scale is not None
    value = (other[codes.astype(np.int64)] if looked_up else codes.astype(np.float32) - other) * scale
    scales = np.broadcast_to(scale, value.shape)
    return (value, scales) if shape is None else (value.reshape(shape), scales.reshape(shape))


def _vectors_written_out(node: ir.Node) -> tuple[Array, Array]:
    """:func:`_written_out` of vectors of a codebook: Cast, Gather, perhaps Transpose, Reshape, and Mul by scales."""
    whole, scale = _maker(node, 0), constant_at(node, 1)
    before = _maker(whole, 0)
    turned = before.op_type == "Transpose"
    step = _maker(before, 0) if turned else before
    table, index, shape = constant_at(step, 0), constant_at(_maker(step, 1), 0), constant_at(whole, 1)
    assert table is not None and index is not None and shape is not None and scale is not None
    numbers = table[index.astype(np.int64)]
    value = (numbers.transpose(1, 2, 0) if turned else numbers).reshape(shape)
    return value * scale, np.broadcast_to(scale, value.shape)


def _compare_outputs(
    match: RowMatch, graph_inputs: Mapping[str, Array], failures: dict[Mode, str], runtime: str
) -> tuple[OutputRow, ...]:
    """The whole model end to end; adds to ``failures`` when the runtime refuses it."""
    results: dict[Mode, dict[str, Array]] = {}
    for mode in MODES:
        try:
            results[mode] = named_arrays(run_in(runtime, match.model, graph_inputs, mode, entries=EXACT_SUMS))
        except _refused() as error:
            failures.setdefault(mode, str(error).strip().splitlines()[0])
    known = [str(v.name) for v in match.model.graph.outputs if v.name not in match.choices]
    for name in match.expected:
        if name not in known and not any(name in found for found in results.values()):
            near = close_matches(name, known)
            raise ExportError(name, f"the model has no output of this name{near}", f"name one of {known}")
    return tuple(_output_row(match, name, results) for name in match.expected)


def _output_row(match: RowMatch, name: str, results: Mapping[Mode, Mapping[str, Array]]) -> OutputRow:
    ends = [match.level(name, results[mode]) if mode in results else (-math.inf, None) for mode in MODES]
    shares = [share for _, share in ends if share is not None]
    return OutputRow(name, ends[0][0], ends[1][0], min(shares, default=None))


def wrong_kernels(
    model: Path, samples: Path, kept: Samples, target: str, *, signed: bool = False
) -> WrongKernels | None:
    """Kernels of the target's runtime that bring the outputs of a file far away from its simulation, where float kernels do not.

    A file that is right is run once, with ``signed`` on a CPU without VNNI a second time, by a default session, whose sums
    saturate there. Those are no fault of the file: they count as exact in ONNX Runtime, and a file for OpenVINO, or with bodies
    of If, Loop or Scan, is not judged by them. What has ``saturates`` has other numbers by default than with exact sums.

    Args:
        model: as ``to_qdq`` wrote it; of a LiteRT target the ``.tflite`` file lies beside it.
        samples: file with what the simulation computed.
        kept: what lies in it.
        target: of the model.
        signed: whether to look for sums that saturate too.

    Returns:
        ``None`` where nothing is wrong, or where the runtime is not installed or does not run the file at all, which ``verify``
        says.
    """
    runtime = find_target(target).runtime
    source = load(model)
    loaded = with_float_edges(source)
    inputs, outputs = ({name: plain(array) for name, array in given.items()} for given in (kept.inputs, kept.outputs))
    expected = {name: array for name, array in outputs.items() if array.dtype.kind == "f" and array.size}
    match = RowMatch.of(loaded, expected, kept.orders, as_written=loaded is source)
    unable: tuple[type[Exception], ...] = (ConfigError, *_refused())  # not installed, or refused
    try:
        by_integer = _levels(runtime, "integer", model, match, inputs)
        lost = _lost_to_saturation(target, model, match, inputs, by_integer, signed=signed)
        if lost is not None:
            return WrongKernels(lost, {}, saturates=True)
        if min(by_integer.values(), default=math.inf) >= _FAR:
            return None
        by_float = _levels(runtime, "float", model, match, inputs)
    except unable:
        return None
    away = [name for name, one in by_integer.items() if one < min(_FAR, by_float[name] - _NEARER)]
    if not away:
        return None
    name, title = away[0], _TITLES[runtime]
    one, other = (f"{found[name]:.1f} dB" for found in (by_integer, by_float))
    bring = f"integer kernels of {title} bring the output {name} to {one} from the simulation"
    if not _sums_exactly(runtime, loaded):
        text = (
            f"{bring} on this CPU, which has no VNNI, so that sums of uint8 times int8 saturate; float kernels bring it to "
            f"{other}: verify the file on a CPU that has VNNI, or quantize with repair='saturation'"
        )
        return WrongKernels(text, {}, of_file=False)
    made = _wrong_places(model, samples, runtime)
    where = f" at {first_few(list(made))}" if made else ""
    text = (
        f"{bring}{where}, float kernels to {other}: leave the place in float with a rule, and show the file to the "
        f"maintainers of {title}"
    )
    return WrongKernels(text, made)


def _lost_to_saturation(
    target: str, file: Path, match: RowMatch, inputs: Mapping[str, Array], exact: Mapping[str, float], *, signed: bool
) -> str | None:
    """Loss of a default session on this CPU to sums that saturate, where unsigned weights of the target prevent it."""
    possible = signed and find_target(target).unsigned_in_bodies and any(p.pairs for p in integer_products(match.model))
    if not possible or not sums_saturate():
        return None
    default = _levels("onnxruntime", "integer", file, match, inputs, exact=False)
    worse = {name: one for name, one in default.items() if one < min(_EXACT, exact[name] - _LOST)}
    if not worse:
        return None
    name, lost = min(worse.items(), key=lambda item: item[1])
    return (
        f"weights are stored unsigned: in a default session of ONNX Runtime on this CPU, which has no VNNI, products of uint8 "
        f"and int8 saturate and bring the output {name} to {lost:.1f} dB from the simulation, where exact sums bring it to "
        f"{exact[name]:.1f} dB. Unsigned weights are exact on every CPU; on those with VNNI signed ones are faster: export for "
        "these with unsigned_weights=False"
    )


def _sums_exactly(runtime: str, model: ir.Model) -> bool:
    """Whether sums of codes do not saturate on this CPU: settings of ONNX Runtime that see to it do not reach bodies."""
    reached = runtime != "openvino" and next(model.graph.subgraphs(), None) is None
    return reached or not sums_saturate()


def _levels(
    runtime: str, mode: Mode, file: Path, match: RowMatch, inputs: Mapping[str, Array], *, exact: bool = True
) -> dict[str, float]:
    """Output -> how far ``runtime`` is from the simulation, in dB; with exact sums, or as a default session adds."""
    if runtime == "litert" and mode == "integer":
        flat = file.with_suffix(".tflite")
        found = as_values(flat_edges(flat.read_bytes()).get("outputs", {}), open_file(runtime, flat).run(inputs))
    else:
        entries = EXACT_SUMS if exact else None
        written = file if match.as_written else None
        found = named_arrays(run_in(runtime, match.model, inputs, mode, entries=entries, path=written))
    return {name: match.level(name, found)[0] for name in match.expected}


def _wrong_places(model: Path, samples: Path, runtime: str) -> dict[str, str]:
    """Site -> what its kernel does, where float kernels agree with the simulation and integer kernels do not."""
    flat = model.with_suffix(".tflite").read_bytes() if runtime == "litert" else None
    return {
        row.site: f"{row.kernel} of {_TITLES[runtime]} gives {row.as_integer.equal:.1%} of its codes as simulated"
        for row in verify_layers(model, *read_samples(samples)[:2], runtime=runtime, flat=flat).rows
        if row.as_float.ok and not (row.as_integer.ok or row.as_integer.within)
    }


def verify_folder(
    folder: str | os.PathLike[str], prefix: str | None = None, *, runtime: str = "onnxruntime"
) -> VerifyReport:
    """Verify what an export wrote: hashes of the files, every layer against the samples, and the tokens that a decoder makes.

    Of a decoder without samples (its cache is in int8) the tokens alone are compared.

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
    generation = path / f"{stem}_generation.json"
    if f"{stem}_samples.npz" not in listed:
        if generation.is_file():
            return VerifyReport((), runtime=runtime, generated=verify_generation(generation))
        raise ExportError(
            str(path),
            f"the export has no samples, {stem}_samples.npz, to compare the model with",
            "export the model again with samples=True",
        )
    samples = path / f"{stem}_samples.npz"
    sites, inputs, outputs = read_samples(samples)
    flat = _flat_file(path, stem, listed) if find_runtime(runtime).suffix == ".tflite" else None
    report = verify_layers(
        path / f"{stem}.onnx", sites, inputs, outputs=outputs, orders=read_orders(samples), runtime=runtime, flat=flat
    )
    return replace(report, generated=verify_generation(generation)) if generation.is_file() else report


def _flat_file(folder: Path, stem: str, listed: set[str]) -> bytes:
    name = f"{stem}.tflite"
    if name not in listed:
        problem = f"the export has no LiteRT file {name}"
        raise ExportError(str(folder), problem, "export the model again with target='litert'")
    return (folder / name).read_bytes()


@dataclass(frozen=True)
class RowMatch:
    """What the simulation returned, and which rows of it stand beside which rows of a file.

    ``TopK`` chooses rows by scores, and rows of nearly equal scores change places from one execution to another.

    Attributes:
        expected: output -> what the simulation returned.
        orders: output -> the choice that orders its rows in the simulation; empty where nothing is chosen.
        model: the file, with its own choices among the outputs where an order is given.
        choices: names of these.
        as_written: whether ``model`` is the file as it stands.
    """

    expected: Mapping[str, Array]
    orders: Mapping[str, RowOrder]
    model: ir.Model
    choices: frozenset[str] = frozenset()
    as_written: bool = True

    @classmethod
    def of(
        cls,
        model: ir.Model,
        expected: Mapping[str, Array],
        orders: Mapping[str, RowOrder] | None,
        *,
        as_written: bool = True,
    ) -> RowMatch:
        """For a file as ``to_qdq`` wrote it, which is not changed; without ``as_written`` one whose inputs were converted."""
        known = {name: order for name, order in (orders or {}).items() if name in expected}
        if not known:
            return cls(expected, {}, model, as_written=as_written)
        shown = copy_model(model)
        held = set(shown.graph.outputs)
        made = [node.outputs[1] for node in shown.graph if node.op_type == "TopK" and node.outputs[1].name]
        shown.graph.outputs.extend(value for value in made if value not in held)
        return cls(expected, known, shown, frozenset(str(value.name) for value in made), as_written=False)

    def level(self, name: str, found: Mapping[str, Array]) -> tuple[float, float | None]:
        """How near an output is to the simulation.

        Args:
            name: of the output.
            found: output of :attr:`model` -> its value.

        Returns:
            Signal-to-noise ratio in dB; and the share of the rows that both chose, ``None`` where rows are compared in their
            order. Of several operators that choose as many rows, the one is taken that chose most of the same.
        """
        wanted, own, order = self.expected[name], found.get(name), self.orders.get(name)
        if order is None or own is None or own.shape != wanted.shape:
            return level(wanted, own), None
        alike = [found[choice] for choice in self.choices if found[choice].shape == order.indices.shape]
        both, at = max((places_of(order.indices, one) for one in alike), key=_share, default=(None, None))
        if both is None or at is None:
            return level(wanted, own), None
        if not both.any():
            return -math.inf, 0.0
        return level(*matched_rows(wanted, own, both, at, order.axis)), _share((both, at))


def _share(places: tuple[Array, Array]) -> float:
    return float(places[0].mean())
