"""Write all files of an export together: QDQ model, float model, encodings, sites, samples and manifest."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
from numpy.typing import NDArray

from bitwright import __version__
from bitwright.core.graph.recurrence import CELLS, HIDDEN, RECURRENT
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.serialize import encoding_to_json, granularity_to_json, spec_to_json
from bitwright.core.placement.rules import RUN_TIME_OPERAND, is_run_time_weight
from bitwright.core.simulation.output_quality import RowOrder
from bitwright.core.simulation.simulation import Simulation
from bitwright.core.simulation.sites import Site
from bitwright.errors import ConfigError, ExportError, close_matches
from bitwright.export.edges import Edges, write_edges
from bitwright.export.encodings.of_simulation import quantizer_args
from bitwright.export.encodings.records import VERSIONS, NamedEncoding
from bitwright.export.encodings.write import carried_records, json_lines, write_encodings
from bitwright.export.files.atomic import Spooled, atomic_files, check_destination
from bitwright.export.files.manifest import earlier_files, fingerprint, write_manifest, write_origin
from bitwright.export.files.onnx_file import all_graphs, all_nodes, load, save_model
from bitwright.export.litert.convert import to_tflite
from bitwright.export.opsets import bring_to, check_versions, may_be_newer
from bitwright.export.qdq.compact import compact, described, forget_exporters_notes
from bitwright.export.qdq.half import Half, half_for
from bitwright.export.qdq.markers import Names, strip_sites
from bitwright.export.qdq.products import ProductForm
from bitwright.export.qdq.stored import HALVES
from bitwright.export.qdq.write import QdqResult, to_qdq
from bitwright.export.qdq.writing import ActivationForm, BiasForm
from bitwright.export.recurrent import PROJECTION, restore_native, write_recurrent
from bitwright.export.samples import write_samples
from bitwright.export.targets import DEFAULT_TARGET, RecurrentForm, Target, find_target
from bitwright.progress import collector_paused
from bitwright.runtimes.onnxruntime import DOMAINS, operator_libraries
from bitwright.runtimes.timing import Ratio


def rename_ports(model: ir.Model, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> dict[str, str]:
    """Rename the first inputs and outputs of ``model``, in place.

    A tensor inside the model that has one of these names gets another.

    Returns:
        Old name -> new name of the inputs and outputs.

    Raises (and leaves the model as it was):
        ExportError: more names than there are inputs or outputs, the same name twice, or a name of an initializer.
    """
    graph = model.graph
    ports = [value for value in graph.inputs if not value.is_initializer()]
    renamed = {**_paired("input_names", ports, inputs), **_paired("output_names", graph.outputs, outputs)}
    final = [str(renamed.get(value, value.name)) for value in dict.fromkeys((*ports, *graph.outputs))]
    problem = _why_not(final, [name for name in renamed.values() if name in graph.initializers])
    if problem is not None:
        raise ExportError("input_names, output_names", problem, "give every input and output a name of its own")
    unique, wanted = Names(model), set(renamed.values())
    for value in (value for node in all_nodes(graph) for value in node.outputs):
        if value.name in wanted and value not in renamed:
            value.name = unique.value(value.name)
    before = {value: str(value.name) for value in renamed}
    for value, name in renamed.items():
        value.name = name
    return {old: renamed[value] for value, old in before.items()}


def _paired(kind: str, values: Sequence[ir.Value], names: Sequence[str]) -> dict[ir.Value, str]:
    if len(names) > len(values):
        raise ExportError(
            kind, f"{len(names)} names for {len(values)} tensors", f"name {', '.join(str(v.name) for v in values)}"
        )
    return dict(zip(values, names, strict=False))


def _why_not(names: Sequence[str], taken: Sequence[str]) -> str | None:
    """The reason why ``names`` cannot name inputs and outputs; ``taken`` are names of parameters."""
    if taken:
        return f"{taken[0]!r} is the name of a parameter"
    twice = next((name for name in names if names.count(name) > 1), "")
    return f"{twice!r} names several tensors, or none" if twice or "" in names else None


logger = logging.getLogger("bitwright")

Array = NDArray[Any]
_WORTH_A_WARNING = 1 << 16  # bytes by which a file is larger than the float model
SAMPLE_LIMIT = 64 << 20  # bytes of activations kept for `bitwright verify`


@dataclass(frozen=True)
class Exported:
    """The files of one export.

    Attributes:
        qdq: ONNX with QuantizeLinear/DequantizeLinear and integer weights, for integer runtimes.
        float_model: the float ONNX model that the encodings file speaks of, for target compilers.
        encodings: the encodings file, keyed by tensor names of ``float_model``.
        sites: JSON: every site with its spec, encoding and tensor names; nothing is lost in it.
        manifest: JSON: versions, rules, hashes of all files.
        notes: what stayed in float or was written otherwise than asked for.
        tflite: the LiteRT file, for targets that run it.
        samples: the simulation's values at every site on a batch of the data, which `bitwright verify` compares with; ``None``
            when none were asked for. It holds the batch itself.
        target: the runtime that the files are for.
        speed: how many times as fast as float the file is on this machine with one thread, when that was measured.
    """

    qdq: Path
    float_model: Path
    encodings: Path
    sites: Path
    manifest: Path
    notes: tuple[str, ...]
    tflite: Path | None = None
    samples: Path | None = None
    target: str = DEFAULT_TARGET
    speed: Ratio | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """All files, including external data of large models."""
        models = [file for path in (self.qdq, self.float_model) for file in (path, Path(f"{path}.data"))]
        found = [self.tflite, *models, self.encodings, self.sites, self.samples, self.manifest]
        return tuple(path for path in found if path is not None and (path.suffix != ".data" or path.is_file()))


@dataclass(frozen=True)
class Samples:
    """Values of a simulation on one input, by site and by name of the graph's inputs and outputs.

    Attributes:
        sites, inputs, outputs: the values.
        orders: output whose rows ``TopK`` chose for later layers -> the indices that it chose.
    """

    sites: Mapping[str, Sequence[Array]]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    orders: Mapping[str, RowOrder] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of sites and inputs."""
        sites = sum(
            kept.nbytes if isinstance(kept, Spooled) else sum(a.nbytes for a in kept) for kept in self.sites.values()
        )
        return sites + sum(a.nbytes for a in self.inputs.values())


@dataclass(frozen=True)
class WrongKernels:
    """Kernels of a runtime that make a file differ from its simulation.

    Attributes:
        text: what was found, and what a user can do.
        sites: what they make -> why it is wrong.
        of_file: whether other machines find it too, so that the file must not be left as it is.
        saturates: whether sums of this CPU are at fault that unsigned weights make exact.
    """

    text: str
    sites: Mapping[str, str]
    of_file: bool = True
    saturates: bool = False


#: of a model file, the samples file beside it, the same samples, and a target; ``signed`` to have ``saturates`` too
Check = Callable[..., WrongKernels | None]


#: version of the encodings file where the caller names none
DEFAULT_ENCODINGS = "1.0.0"


def check_encoding_version(version: str) -> None:
    """Refuse an unknown version of encodings files.

    Raises:
        ConfigError: with close matches.
    """
    if version not in VERSIONS:
        raise ConfigError(
            "encoding_version",
            f"{version!r} is not a version{close_matches(version, VERSIONS)}",
            f"use one of {', '.join(VERSIONS)}",
        )


def bias_form(sim: Simulation, bias: BiasForm) -> BiasForm:
    """Only the biases that the simulation quantizes, where it keeps some in float, so that file and simulation agree."""
    biases = [s for s in sim.quantizers.values() if s.role == "bias"]
    return bias if all(s.enabled for s in biases) or bias == "float" else "marked"


def recurrent_form(sim: Simulation, form: RecurrentForm | None, target: str | Target) -> RecurrentForm:
    """The form of recurrent layers: as requested, or the target's own where no step is quantized inside.

    Raises:
        ConfigError: there is no such target.
    """
    row = find_target(target)
    if form is not None:
        return form
    if any(_at_run_time(sim)) and (
        (row.runtime, row.recurrent) != ("onnxruntime", "native")
        or not all(_has_kernel(sim, op) for op in _at_run_time(sim))
    ):
        return "scan"  # no operator of this runtime chooses the range of the hidden state at every step
    halves = all(
        sim.quantizers[site].spec.format.name in HALVES for site in sim.quantizers if _is_inside(sim.quantizers[site])
    )
    return "scan" if any(_inside(sim)) and not halves else row.recurrent


def _inside(sim: Simulation) -> Iterator[str]:
    """Recurrent layers whose steps are quantized inside, once per site."""
    return (site.op for site in sim.quantizers.values() if _is_inside(site))


def _at_run_time(sim: Simulation) -> Iterator[str]:
    """Recurrent layers that choose the range of their hidden state at run time."""
    return (site.op for site in sim.quantizers.values() if site.inner == RECURRENT and site.enabled)


def _has_kernel(sim: Simulation, op: str) -> bool:
    """Whether input and weights of such a layer are quantized as ``DynamicQuantizeLSTM`` reads them."""
    at = {site.port: site for site in sim.quantizers.values() if site.op == op and site.inner is None and site.port < 3}
    weights = [at[port] for port in (1, 2) if port in at and at[port].enabled]
    found = at.get(0)
    dynamic = found is not None and found.enabled and found.spec == RUN_TIME_OPERAND
    return dynamic and len(weights) == 2 and all(is_run_time_weight(site.spec) for site in weights)


def _is_inside(site: Site) -> bool:
    return site.inner not in (None, RECURRENT) and site.enabled


def _steps(sim: Simulation, form: RecurrentForm, asked: RecurrentForm | None, target: str) -> Iterator[str]:
    """One note per recurrent layer: its form, and the difference from quantizers inside the steps."""
    counts, at_run_time = Counter(_inside(sim)), set(_at_run_time(sim))
    returned = Counter(site.op for site in sim.quantizers.values() if site.inner == HIDDEN and site.enabled)
    for op in sim.graph.ops:
        if op.type not in CELLS:
            continue
        inside, projects = counts[op.name], len(op.inputs) > PROJECTION and op.inputs[PROJECTION] is not None
        if op.name in at_run_time:
            yield f"{op.name}: {_RUN_TIME[form]}"
        elif form == "native" and not projects:
            yield f"{op.name}: written as {op.type}, {_float_steps(inside - returned[op.name])}"
        elif not inside:
            yield f"{op.name}: written as Scan, {_float_steps(0)}"
        elif asked is None and find_target(target).recurrent == "native":
            yield (
                f"{op.name}: written as Scan, because its steps are quantized inside; {target} has no integer kernel for that "
                "and runs the operator faster: simulate with the rule recurrent: boundary_only, or export with "
                "recurrent='native'"
            )
        else:
            yield f"{op.name}: written as Scan, which rounds {inside} tensors in every step, as simulated: nothing is lost"


#: form of a layer with ranges chosen at run time -> the note on it
_RUN_TIME: Mapping[RecurrentForm, str] = {
    "native": "written as DynamicQuantizeLSTM, which quantizes its input and its hidden state at run time, as simulated; "
    "several threads do so for parts of a batch each",
    "scan": "written as Scan, which quantizes its input and its hidden state at run time, as simulated",
}


def _float_steps(inside: int) -> str:
    """The note on float steps where the simulation has ``inside`` quantizers in them."""
    if inside:
        return (
            f"whose steps are in float: {inside} tensors inside the native operator are in float that the simulation rounds "
            "in every step; their encodings are in the encodings file"
        )
    return (
        "whose steps are in float, as simulated; what an integer kernel would round inside them is not in these numbers: the "
        "rule recurrent: inside and target='packed' have it"
    )


def _told(sim: Simulation, result: QdqResult, encodings: Iterable[str], tensors: Container[str]) -> Iterator[str]:
    """Notes on the sites of a written model."""
    for note in result.notes:
        if note.kind == "float site":
            yield f"{note.site}: {_why_in_float(sim, note.site) or note.text}"
        elif note.kind != "no place":
            yield f"{note.site}: {note.text}"
    for name in encodings:
        if name not in tensors:
            yield f"{name}: not in the exported graph, which holds what the outputs are computed from on this example"


def _why_in_float(sim: Simulation, site: str) -> str:
    """The reason why a site is in float: calibration, a recipe step or its source; empty where the user asked for it."""
    if site not in sim.quantizers:
        return ""
    quantizer = sim.quantizers[site].quantizer
    why = quantizer.why_float or quantizer.why_spec
    if not why and quantizer.enabled and quantizer.derivation is not None:
        why = quantizer.derivation.reason or ""
    return why and f"in float, because {why}"


def _outside_steps(sim: Simulation, sites: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the sites inside recurrent layers, whose operators compute in float."""
    return {name: values for name, values in sites.items() if sim.quantizers[name].inner is None}


@dataclass(frozen=True)
class FileForms:
    """How the files of an export are written.

    Attributes:
        encoding_version: of the encodings file; a target may have another default than 1.0.0.
        bias, activation, weight_only, target: see :func:`bitwright.export.qdq.write.to_qdq`.
        recurrent: how the QDQ model writes recurrent layers, :func:`recurrent_form` by default; see
            :func:`bitwright.export.recurrent.write_recurrent`; the float model has the operators.
        every_tensor: whether tensors that only carry elements of others have entries in the encodings file too.
        unsigned_weights: see :func:`bitwright.export.qdq.write.to_qdq`; by default where a check finds that sums saturate.
        rest: type of what is not quantized; see :func:`bitwright.export.qdq.half.half_for`.
        edges: types of inputs and outputs; see :mod:`bitwright.export.edges`.
        opset, ir_version: of the written files; see :func:`bitwright.export.opsets.bring_to`.
        external: whether large tensors lie in a second file; see :func:`bitwright.export.files.onnx_file.save_model`.
    """

    encoding_version: str
    bias: BiasForm
    activation: ActivationForm
    recurrent: RecurrentForm | None = None
    weight_only: ProductForm = "exact"
    target: str = DEFAULT_TARGET
    every_tensor: bool = False
    unsigned_weights: bool | None = None
    rest: str | None = None
    edges: Edges = Edges()  # noqa: RUF009
    opset: int | None = None
    ir_version: int | None = None
    external: bool | None = None


def _refuse_centred(encodings: Mapping[str, Encoding]) -> None:
    for site, encoding in encodings.items():
        if isinstance(encoding.format, IntFormat) and encoding.format.centred:
            plain = IntFormat(encoding.format.bits).name
            raise ExportError(
                site,
                f"the lowest value of a token lies on the border between two codes of {encoding.format.name}, so that a file "
                "whose sums differ in the last bit would take the other one",
                f"quantize it to {plain}; {encoding.format.name} is for files that transformers runs with compressed-tensors",
            )


def write_artefacts(
    sim: Simulation,
    path: str | Path,
    prefix: str,
    marked: ir.Model,
    encodings: Mapping[str, Encoding],
    forms: FileForms,
    *,
    notes: Sequence[str] = (),
    data: Sequence[Array],
    samples: Callable[[QdqResult, int | None], Samples] | None,
    check: Check | None = None,
) -> Exported:
    """Write all files of an export into the folder ``path``; they replace those of an earlier export of this stem at once.

    Args:
        sim: whose sites, rules and plan are written down.
        path: folder, created if missing.
        prefix: stem of the files.
        marked: the model with a marker at every site.
        encodings: site -> encoding, of the enabled sites.
        forms: how the files are written.
        notes: what there is to say about ``marked`` beside what is found here.
        data: the example input, for the manifest's fingerprint.
        samples: gives what the simulation computes on the first so many samples of the example, or on all of them; fewer
            are kept, with a note, where all would pass 64 MiB and the model's batch axis is free.
        check: looks for kernels of the target that bring the file away from the samples, before it appears. What they make is
            written in float where that helps, with a note; else nothing is written.

    Raises:
        ConfigError: see :func:`check_destination`.
        ExportError, EncodingsError: see :func:`bitwright.export.qdq.write.to_qdq`; the folder cannot be written; ``check`` found
            kernels that bring the outputs away from the simulation, and nothing that helps in float; a grid is centred.
    """
    _refuse_centred(encodings)
    own = find_target(forms.target).encoding_version
    if own is not None and forms.encoding_version == DEFAULT_ENCODINGS:
        forms = replace(forms, encoding_version=own)
    write = partial(_write, sim, path, prefix, marked, data=data, samples=samples)
    try:
        return write(encodings, forms, notes=notes, check=check)
    except _WrongKernelsError as error:
        found = error.found
    if found.saturates:
        logger.warning("%s", found.text)
        forms, notes = replace(forms, unsigned_weights=True), [*notes, found.text]
        try:
            return write(encodings, forms, notes=notes, check=check)
        except _WrongKernelsError as error:
            found = error.found
    told = [f"{site}: in float in this file, because {why}" for site, why in found.sites.items()]
    fewer = {site: encoding for site, encoding in encodings.items() if site not in found.sites}
    if len(fewer) < len(encodings):
        try:
            exported = write(fewer, forms, notes=[*notes, *told], check=check)
        except (_WrongKernelsError, ExportError):  # not what brings the outputs away
            pass
        else:
            logger.warning("%s", found.text)
            return exported
    if found.of_file:
        name = find_target(forms.target).runtime
        remedy = "export for another target, or without samples (samples=False), which leaves this check out"
        raise ExportError(f"the file for {name}", found.text, remedy)
    logger.warning("%s", found.text)
    return write(encodings, forms, notes=[*notes, found.text], check=None)


class _WrongKernelsError(Exception):
    """Raised by a check to abort writing; files appear together or not at all."""

    def __init__(self, found: WrongKernels) -> None:
        self.found = found
        super().__init__(found.text)


@collector_paused()
def _write(
    sim: Simulation,
    path: str | Path,
    prefix: str,
    marked: ir.Model,
    encodings: Mapping[str, Encoding],
    forms: FileForms,
    *,
    notes: Sequence[str],
    data: Sequence[Array],
    samples: Callable[[QdqResult, int | None], Samples] | None,
    check: Check | None,
) -> Exported:
    """See :func:`write_artefacts`.

    Raises:
        _WrongKernelsError: the check found something; no file has changed.
    """
    check_destination(path, prefix)
    check_versions(forms.opset, forms.ir_version)
    target, edges = find_target(forms.target), forms.edges
    form = recurrent_form(sim, forms.recurrent, forms.target)
    written = write_recurrent(marked, form)
    stripped = strip_sites(restore_native(marked))
    half = _half(target, encodings, written, data, forms)
    result = to_qdq(
        written, encodings, bias=forms.bias, activation=forms.activation, weight_only=forms.weight_only, target=forms.target,
        half=half, unsigned_weights=bool(forms.unsigned_weights),
    )  # fmt: skip
    is_flat = target.format == "tflite"
    notes = [*notes, *write_edges(result.model, edges, either_sign=is_flat)]
    for written_model in (result.model, stripped.model):
        bring_to(written_model, forms.opset, forms.ir_version)
    tensors = _tensors_of(sim, stripped.tensors)
    notes = [*notes, *_steps(sim, form, forms.recurrent, forms.target), *_told(sim, result, encodings, tensors)]
    folder = Path(path)
    names = {
        "qdq": f"{prefix}.onnx",
        "float_model": f"{prefix}_float.onnx",
        "encodings": f"{prefix}.encodings",
        "sites": f"{prefix}_sites.json",
        "manifest": f"{prefix}_manifest.json",
    }
    if is_flat:
        names["tflite"] = f"{prefix}.tflite"
    if samples is not None:
        names["samples"] = f"{prefix}_samples.npz"
    earlier = earlier_files(folder / names["manifest"])
    with atomic_files(folder, create=True, name=names["manifest"], stale=earlier) as staging:
        origin = _origin(sim, encodings, forms.target, data)
        write_origin(result.model, origin)
        save_model(stripped.model, staging / names["float_model"], external=forms.external)
        result, grown = _save_small(result, stripped.model, staging, names["qdq"], names["float_model"], forms.external)
        notes += grown
        _forget_weights(result.model)
        records = _records(sim, encodings, tensors, with_bias=forms.encoding_version == "2.0.0")
        marked_tensors = {tensor for several in tensors.values() for tensor in several}
        carried = carried_records(stripped.model, records, marked_tensors) if forms.every_tensor else {}
        records += carried.values()
        notes += _write_encodings(sim, records, staging / names["encodings"], forms.encoding_version)
        lines = json_lines(_sites(sim, result, tensors, carried), ("sites", "float"), allow_nan=True)
        (staging / names["sites"]).write_text("".join(lines))
        inputs = kept = None
        if samples is not None:
            kept, sizes = _few_enough(samples, result, data)
            notes += sizes
            inputs = kept.inputs
            sites = _outside_steps(sim, kept.sites) if form == "native" else kept.sites
            write_samples(staging / names["samples"], sites, inputs, kept.outputs, encodings, kept.orders)
        if "tflite" in names:
            # a file whose batch has to be fixed takes that of the samples
            feeds = _named_inputs(result.model, data) if inputs is None else inputs
            flat = to_tflite(load(staging / names["qdq"]), feeds, origin=origin, edges=edges)
            (staging / names["tflite"]).write_bytes(flat.content)
            notes += flat.notes
        files = staging / names["qdq"], staging / f"{prefix}_samples.npz"
        _self_check(check, *files, kept, forms.target, signed=forms.unsigned_weights is None)
        settings = {
            "rules": sim.rules.source,
            "encoding_version": forms.encoding_version,
            "bias": forms.bias,
            "activation": forms.activation,
            "recurrent": form,
            "weight_only": forms.weight_only,
            "target": forms.target,
            "prefix": prefix,
            **_given(
                opset=forms.opset,
                rest=forms.rest,
                libraries=_libraries(result.model),
                unsigned_weights=forms.unsigned_weights,
            ),
            **quantizer_args(sim),
            **_health(sim),
        }
        write_manifest(
            staging / names["manifest"], folder=staging, settings=settings, data=fingerprint(data), notes=notes
        )
    for note in notes:
        logger.info(note)
    paths: dict[str, Any] = {key: folder / name for key, name in names.items()}
    return Exported(**paths, notes=tuple(notes), target=forms.target)


def _half(
    target: Target, encodings: Mapping[str, Encoding], model: ir.Model, data: Sequence[Array], forms: FileForms
) -> Half | None:
    """The half-precision settings of the file; see :func:`bitwright.export.qdq.half.half_for`.

    Raises:
        ConfigError: it is asked for, and is not to be had in LiteRT files.
    """
    rest, edges, newer = forms.rest, forms.edges, may_be_newer(forms.opset, forms.ir_version)
    if target.format == "onnx":
        return half_for(encodings, _named_inputs(model, data), rest, edges.inputs, edges.outputs, newer)
    asked = next((kind for kind in (rest, edges.inputs, edges.outputs) if kind in HALVES), None)
    if asked is not None:
        problem = f"LiteRT files have no operators of {asked} here"
        raise ConfigError("half precision", problem, "leave rest and io in float32, or export for target='ort_cpu'")
    return None


def _libraries(model: ir.Model) -> list[str] | None:
    """File names of the registered libraries, where the model has operators of domains that ONNX Runtime lacks."""
    libraries = operator_libraries()
    if not libraries or all(node.domain in DOMAINS for node in all_nodes(model.graph)):
        return None
    return [Path(library).name for library in libraries]


def _given(**settings: Any) -> dict[str, Any]:
    """The arguments that are not ``None``."""
    return {key: value for key, value in settings.items() if value is not None}


def _self_check(
    check: Check | None, written: Path, samples: Path, kept: Samples | None, target: str, *, signed: bool
) -> None:
    """Run the written file on its samples, where there are any and a check is given.

    Raises:
        _WrongKernelsError: the check found something.
    """
    found = None if check is None or kept is None else check(written, samples, kept, target, signed=signed)
    if found is not None:
        raise _WrongKernelsError(found)


def _save_small(
    result: QdqResult, float_model: ir.Model, folder: Path, name: str, float_name: str, external: bool | None
) -> tuple[QdqResult, list[str]]:
    """Write the QDQ model, compacted where it would be larger than the float model; returns it, and notes."""

    def size(file: str) -> int:
        return sum(path.stat().st_size for path in folder.iterdir() if path.name in (file, f"{file}.data"))

    save_model(result.model, folder / name, external=external)
    small, notes = size(float_name), []
    goal = small - described(float_model)  # a reader infers types and shapes, which files from elsewhere seldom hold
    if size(name) > goal:
        result = compact(result, float_model)
        save_model(result.model, folder / name, external=external)
    if size(name) > small and forget_exporters_notes(result.model):
        save_model(result.model, folder / name, external=external)
        notes.append(
            f"model: what torch.onnx noted on operators for debugging stands in {float_name} alone, to keep this file small"
        )
    large = size(name)
    if large > small:
        text = (
            f"model: the file has {large} bytes and the float model {small}: its quantizers take more than the integers of "
            "its weights save"
        )
        if large - small > _WORTH_A_WARNING:
            logger.warning("%s", text)
        notes.append(text)
    return result, notes


def _named_inputs(model: ir.Model, data: Sequence[Array]) -> dict[str, Array]:
    """The example by name of graph input.

    Raises:
        ExportError: the graph has other inputs than the example.
    """
    names = [str(value.name) for value in model.graph.inputs if not value.is_initializer()]
    if len(names) != len(data):
        problem = f"the graph has {len(names)} inputs, and the example {len(data)} arrays"
        raise ExportError("model", problem, "leave inputs out of the example that the model does not read")
    return dict(zip(names, data, strict=True))


def _origin(sim: Simulation, encodings: Mapping[str, Encoding], target: str, data: Sequence[Array]) -> dict[str, str]:
    """Provenance stored in the file; equal exports store equal text."""
    text = hashlib.sha256()
    for name, e in sorted(encodings.items()):  # numbers as bytes, for text would take longer to write than the model
        said = (name, e.format.name, granularity_to_json(e.granularity), e.scale.shape, e.scale_format.name, e.dynamic)
        text.update(repr(said).encode())
        for numbers in (e.scale, e.zero_point, e.common, e.shift):
            text.update(b";" if numbers is None else numbers.tobytes())
    return {
        "tool": f"bitwright {__version__}",
        "rules": sim.rules.source,
        **sim.origin,
        "target": target,
        "example": fingerprint(data),
        "encodings": f"sha256:{text.hexdigest()}",
    }


def _health(sim: Simulation) -> dict[str, Any]:
    """Repairs, and the calibration batches that were skipped or changed."""
    found: dict[str, Any] = {"repairs": [asdict(repair) for repair in sim.repairs]} if sim.repairs else {}
    lines = [] if sim.calibration_log is None else sim.calibration_log.lines()
    return {**found, "non_finite": lines} if lines else found


def _tensors_of(sim: Simulation, tensors: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Site -> its names in the encodings file: tensors of the float model, or the site inside a recurrent layer."""
    found = dict(tensors)
    for site in sim.quantizers.values():
        if site.inner is not None and (site.inner != HIDDEN or site.name not in tensors):
            found[site.name] = (*tensors.get(site.name, ()), site.name)
    return found


def _write_encodings(sim: Simulation, records: Sequence[NamedEncoding], path: Path, version: str) -> list[str]:
    """Write the encodings file; returns notes on encodings that its version cannot express."""
    written = write_encodings(
        path,
        records,
        version,
        quantizer_args=quantizer_args(sim),
        excluded_layers=() if version == "2.0.0" else [s.name for s in sim.quantizers.values() if not s.enabled],
    )
    return [f"{lost.name}: {lost.reason}" for lost in written.not_expressed]


def _records(
    sim: Simulation, encodings: Mapping[str, Encoding], tensors: Mapping[str, tuple[str, ...]], *, with_bias: bool
) -> list[NamedEncoding]:
    """Encodings by the names of the float model's tensors; a tensor with two sites is listed once."""
    found: dict[str, NamedEncoding] = {}
    for name, encoding in encodings.items():
        site = sim.quantizers[name]
        if site.quantizer.derived and not with_bias:
            continue
        param = site.role in ("weight", "bias")  # AIMET lists constant operands of sums and products with activations
        kind: Literal["activation", "param"] = "param" if param else "activation"
        for tensor in tensors.get(name, ()):
            found.setdefault(tensor, NamedEncoding(tensor, kind, encoding))
    return list(found.values())


def _sites(
    sim: Simulation, result: QdqResult, tensors: Mapping[str, tuple[str, ...]], carried: Iterable[str]
) -> dict[str, Any]:
    return {
        "version": 1,
        "sites": {
            site.name: {
                "role": site.role,
                "op": site.op,
                "enabled": site.enabled,
                "spec": spec_to_json(site.quantizer.spec),
                "encoding": None if site.encoding is None else encoding_to_json(site.encoding),
                "tensors": list(tensors.get(site.name, ())),
                "qdq_tensors": list(result.tensors.get(site.name, ())),
            }
            for site in sim.quantizers.values()
        },
        "float": dict(sim.plan.floats),
        "carried": list(carried),
    }


def _few_enough(
    take: Callable[[QdqResult, int | None], Samples], result: QdqResult, data: Sequence[Array]
) -> tuple[Samples, list[str]]:
    """Fewer samples, to stay below the limit where the model can run on fewer, and a note."""
    kept = take(result, None)
    if kept.nbytes <= SAMPLE_LIMIT:
        return kept, []
    rows = _free_rows(result.model, data)
    if rows < 2:
        return kept, [
            f"samples: {_mib(kept.nbytes)} are kept, as the file takes nothing smaller than the example; export with a smaller "
            "one, or with samples=False"
        ]
    few, whole = max(1, rows * SAMPLE_LIMIT // kept.nbytes), kept.nbytes
    del kept  # before as much is made again
    less = take(result, few)
    return less, [f"samples: {few} of {rows} are kept, {_mib(less.nbytes)}; all would be {_mib(whole)}"]


def _forget_weights(model: ir.Model) -> None:
    """Release weights that are in the file, before sessions of the simulation take memory."""
    for graph in all_graphs(model.graph):
        for value in graph.initializers.values():
            value.const_value = None


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _free_rows(model: ir.Model, data: Sequence[Array]) -> int:
    """Length of the first axis of every example input, if the model leaves it open; 1 if not."""
    shapes = [value.shape for value in model.graph.inputs if not value.is_initializer()]
    fixed = any(shape is None or not len(shape) or isinstance(shape[0], int) for shape in shapes)
    lengths = {array.shape[0] if array.ndim else 1 for array in data}
    return lengths.pop() if not fixed and len(lengths) == 1 else 1
