"""Write a simulation to files: ONNX with QDQ, the float model with encodings, the sites, and a manifest.

Parameters, inputs and outputs have the model's names in the file, whatever torch's exporter called them.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import nn

from bitwright.compare.benchmark import measured
from bitwright.compare.report import VerifyReport
from bitwright.compare.verify import verify_layers, wrong_kernels
from bitwright.core.graph.recurrence import CELLS
from bitwright.core.numerics.encoding import Encoding
from bitwright.errors import (
    BusyError,
    CalibrationError,
    ConfigError,
    ExportError,
    ModelError,
    check_keywords,
    close_matches,
)  # fmt: skip
from bitwright.export.artefacts import (
    Exported,
    FileForms,
    Samples,
    bias_form,
    check_encoding_version,
    recurrent_form,
    rename_ports,
    write_artefacts,
)
from bitwright.export.edges import Edges, edges_of, representable
from bitwright.export.encodings.records import GATED, to_onnx_order
from bitwright.export.files.atomic import Spool, Spooled, check_destination
from bitwright.export.files.onnx_file import all_nodes, save_in_one_file
from bitwright.export.qdq.forms import read_metadata
from bitwright.export.qdq.half import check_half, compute_in_float, half_for
from bitwright.export.qdq.markers import rename_values, site_names, strip_sites
from bitwright.export.qdq.products import ProductForm
from bitwright.export.qdq.write import QdqResult, to_qdq
from bitwright.export.recurrent import restore_native, write_recurrent
from bitwright.export.targets import DEFAULT_TARGET, FileFormat, RecurrentForm, find_target, target_for, target_in
from bitwright.progress import collector_paused
from bitwright.runtimes.adapters import check_not_empty
from bitwright.torch.calls.inputs import (
    ARRAYS,
    as_call,
    caches_in,
    evaluation,
    flatten_tensors,
    holds_arrays,
    map_tensors,
    model_alone,
    model_device,
    to_device,
)
from bitwright.torch.calls.recurrent import WEIGHT_PORTS, onnx_rows
from bitwright.torch.interception.intercept import forward_signature
from bitwright.torch.interception.record import Slot, named_inputs, output_names
from bitwright.torch.simulation.exported_program import captured, raised_at, simplify, take_runs, to_onnx, untranslated
from bitwright.torch.simulation.ranges import refuse_corrections
from bitwright.torch.simulation.simulated_module import SimulatedModule

if TYPE_CHECKING:
    from bitwright.compare.report import DriftReport
    from bitwright.compare.saturation import SaturationReport
    from bitwright.compare.target import TargetSession


def forget_origins(model: ir.Model) -> None:
    """Drop source lines and local paths that the exporter stores on nodes."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in all_nodes(model.graph):
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def rename_params(model: ir.Model) -> None:
    """Restore the names that parameters have in the wrapped model."""
    for value in list(model.graph.initializers.values()):
        if value.name and value.name.startswith("model."):
            value.name = value.name.removeprefix("model.")


def rename_io(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name graph inputs after forward's parameters and outputs after their place in the result.

    What is called so inside the model, as the exporter calls a tensor after its operator, gets another name.
    """
    ends = [*model.graph.outputs, *model.graph.inputs]
    wanted = [*outputs, *inputs]
    assert len(ends) == len(wanted), (len(ends), len(wanted))
    for i, value in enumerate(ends):
        value.name = f"__end_{i}"  # out of each other's way first
    inner = [v for node in all_nodes(model.graph) for v in node.outputs if v.name]
    inner += model.graph.initializers.values()
    reserved = set(wanted)
    taken = {str(v.name) for v in inner} | reserved
    for value in inner:
        if value.name in reserved:
            value.name = _free_name(str(value.name), taken)
    first: dict[int, tuple[ir.Value, str]] = {}  # one tensor returned twice keeps its first name
    for value, name in zip(ends, wanted, strict=True):
        first.setdefault(id(value), (value, name))
    used: set[str] = set()
    for value, name in first.values():
        value.name = _free_name(name, taken) if name in used else name
        used.add(value.name)


def _free_name(name: str, taken: set[str]) -> str:
    """``name`` with the first number that makes it unique; adds it to the taken names."""
    free = next(n for i in count(1) if (n := f"{name}_{i}") not in taken)
    taken.add(free)
    return free


#: what a marked model knows of itself: see :func:`take_runs`
_LEFT = "bitwright.runs_left"
#: options of an export that change how the file is written, not how the graph is recorded
_FORMS = ("bias", "activation", "recurrent", "weight_only", "target", "rest")
_SHAPES = ("dynamic_batch", "dynamic_shapes")
Made = TypeVar("Made")


def export_sim(
    sim: SimulatedModule,
    path: str | Path,
    filename_prefix: str,
    dummy_input: Any,
    *,
    encoding_version: str = "1.0.0",
    bias: Literal["int32", "float"] = "int32",
    activation: Literal["unsigned", "as_is"] = "unsigned",
    recurrent: RecurrentForm | None = None,
    weight_only: ProductForm = "exact",
    target: str = DEFAULT_TARGET,
    format: FileFormat | None = None,
    dynamic_batch: bool | Literal["auto"] = False,
    dynamic_shapes: Any = None,
    every_tensor: bool = False,
    unsigned_weights: bool | None = None,
    rest: str | None = None,
    io: str | Mapping[str, str] | None = None,
    normalize: Mapping[str, Any] | None = None,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    opset: int | None = None,
    ir_version: int | None = None,
    external: bool | None = None,
    samples: bool = True,
    measure_speed: bool = False,
    rewrite: Callable[[ir.Model], Sequence[str]] | None = None,
) -> Exported:
    """Write the model for deployment into the folder ``path``, created if missing.

    The files appear together or not at all:

    - ``<prefix>.onnx``: opset 21, QuantizeLinear/DequantizeLinear, integer weights under the parameters' names;
    - ``<prefix>_float.onnx`` and ``<prefix>.encodings``: the float model and its encodings, for target compilers;
    - ``<prefix>_sites.json``: every site's spec and encoding;
    - ``<prefix>_manifest.json``: versions, rules and hashes;
    - ``<prefix>_samples.npz``: the example's values at every site, which ``bitwright verify`` compares with.

    Args:
        sim: calibrated.
        path: folder.
        filename_prefix: stem of the files.
        dummy_input: example input that fixes the exported shapes.
        encoding_version: ``"0.6.1"``, ``"1.0.0"`` or ``"2.0.0"``.
        bias: ``"int32"`` writes biases on the grid integer kernels use, ``"float"`` leaves them alone.
        activation: ``"unsigned"`` writes signed activation grids as equal unsigned ones.
        recurrent: ``"scan"`` writes recurrent layers as Scan with quantizers inside the steps, ``"native"`` as the ONNX
            operators, whose insides are in float; the float model has the operators. By default what the target runs
            fastest, if no step is quantized inside, and otherwise ``"scan"``.
        weight_only: products of float activations with quantized weights: ``"exact"`` computes them as simulated, in float,
            in every session; ``"fused"`` lets ONNX Runtime make MatMulNBits of them, which is much faster and quantizes the
            activations to 8 bits by itself.
        target: the runtime that the files are for, a row of :data:`bitwright.export.targets.TARGETS`: it decides how
            weights of 4 bits are stored.
        format: ``"tflite"`` is short for ``target="litert"``, which writes ``<prefix>.tflite`` beside the ONNX files.
        dynamic_batch: let the first axis of every input vary; ``"auto"`` does so where the model allows it, and says in the
            notes of the result where it does not, and why. Where the input holds a cache of transformers, the axes of batch,
            sequence and past vary in any case, whatever lengths the example has; a note tells where the model fixes one.
        dynamic_shapes: instead, a dict from input names to axes as ``torch.export`` takes them: ``{"x": {0: Dim.AUTO}}``.
        every_tensor: also write encodings of tensors that only carry elements of quantized ones (max pools, reshapes, ...),
            for compilers that want an entry for every tensor.
        unsigned_weights: whether codes of 8-bit weights of products are unsigned. Products of uint8 and int8 saturate in a
            default session of ONNX Runtime on CPUs without VNNI, those of two uint8 do not, and are slower where there is
            VNNI. By default where the file, run on its samples, turns out to saturate on this CPU, with a warning.
        rest: type of what is not quantized: ``"float16"`` or ``"bfloat16"`` where it has weights of its own; by default
            ``"float32"``, and under the presets ``fp16`` and ``bf16`` all operators that can. Those whose values do not fit
            stay in float32, and the notes of the result say why.
        io: type of inputs and outputs, ``"float16"``, ``"bfloat16"``, ``"uint8"``, ``"int8"``, ...; or a dict from
            ``"inputs"``, ``"outputs"`` or names of them to types. Integers are the codes of the quantizers there, whose scale
            and zero point are in the metadata of the file under ``bitwright.io``.
        normalize: let the file take pixels, uint8, and do ``(pixel * scale - mean) / std`` itself:
            ``{"mean": [...], "std": [...], "layout": "NHWC"}``, with a ``scale`` of 1 / 255.
        input_names, output_names: of the first inputs and outputs of the files; by default those of ``forward``'s parameters, and
            ``output``, ``output.<key>``.
        opset, ir_version: of the ONNX files, for compilers that read older ones: down to what the operators and formats of the
            model allow, and an error that names the operator where not. By default opset 21, and the version that it came with.
        external: keep large tensors of the ONNX files in ``<name>.data`` beside them, which other programs map; ``None`` does so
            from 1.5 GiB on.
        samples: write the samples; fewer of them, with a note, when all would pass 64 MiB and the batch axis is free.
        measure_speed: run the files beside the float model for about a second, and warn where they are slower on this machine;
            ``exported.speed`` has the ratio. Off by default: it takes as long as some small exports.
        rewrite: changes the marked model, whose inputs and outputs have their final names, in place, and returns notes.

    Raises:
        CalibrationError: the simulation has no encodings yet.
        ConfigError: unknown ``encoding_version``, or ``filename_prefix`` cannot begin the names of files.
        ExportError: the model cannot be exported by ``torch.export``, or the folder cannot be written.
    """
    check_destination(path, filename_prefix)
    _check(sim, encoding_version)
    target = target_for(target, format).name
    edges = edges_of(io, normalize)
    check_half("rest", rest)
    check_not_empty("example", dict(named_inputs(forward_signature(sim.model), *as_call(dummy_input))))
    if edges.changes:
        dummy_input = _representable(sim, dummy_input, edges)
    notes: list[str] = []
    if dynamic_shapes is None and (dynamic_batch == "auto" or caches_in(as_call(dummy_input))):
        marked, notes = _free_batch(sim, dummy_input)
    else:
        free = dynamic_batch is True
        marked = marked_onnx(sim, dummy_input, dynamic_batch=free, dynamic_shapes=dynamic_shapes, notes=notes)
    names = rename_ports(marked, input_names, output_names)
    notes += [] if rewrite is None else rewrite(marked)
    forms = FileForms(
        encoding_version=encoding_version, bias=bias_form(sim, bias), activation=activation, recurrent=recurrent,
        weight_only=weight_only, target=target, every_tensor=every_tensor, unsigned_weights=unsigned_weights, rest=rest,
        edges=edges, opset=opset, ir_version=ir_version, external=external,
    )  # fmt: skip

    def of_rows(result: QdqResult, rows: int | None) -> Samples:
        return _samples(sim, _first(dummy_input, rows), result, names, marked.meta[_LEFT])

    exported = write_artefacts(
        sim, path, filename_prefix, marked, site_encodings(sim), forms,
        notes=notes, data=[_array(t) for _, t in flatten_tensors(dummy_input, caches=True)],
        samples=of_rows if samples else None, check=wrong_kernels,
    )  # fmt: skip
    return measured(exported, target) if measure_speed else exported


def _check(sim: SimulatedModule, version: str) -> None:
    check_encoding_version(version)
    if not sim.calibrated:
        raise CalibrationError(
            "export",
            "the simulation has no encodings yet",
            "call sim.compute_encodings(batches) or sim.load_encodings(path) first",
        )
    _check_exportable(sim)


def _check_exportable(sim: SimulatedModule) -> None:
    refuse_corrections(sim, "export")
    window = next((site for site in sim.quantizers.values() if site.enabled and site.spec.recent), None)
    if window is not None:
        raise ExportError(
            window.name,
            f"the last {window.spec.recent[1]} tokens of the cache stay in float there, which no operator of a file does",
            "make the simulation without recent in kv_cache; sim.save_encodings(path) writes the encodings of this one",
        )
    if not sim.output_values:
        raise ExportError(
            type(sim.model).__name__,
            "it returns no tensor that can be found, so the exported model would have no output",
            "return a tensor, or tensors in tuples, lists, dicts or dataclasses; wrap the model in a module whose forward "
            "takes them out of the object it returns now",
        )


def site_encodings(sim: SimulatedModule) -> dict[str, Encoding]:
    """Site -> encoding of every enabled, calibrated site, those of recurrent weights for ONNX's order of gates."""
    sim._simulator.refresh_biases()
    found = {}
    for site in sim.quantizers.values():
        if site.enabled and site.encoding is not None:
            op = sim.graph.op(site.op)
            encoding = site.encoding
            if op.type in CELLS and site.role == "weight":
                order = onnx_rows(op.type) if site.port in GATED else ()
                encoding = to_onnx_order(encoding, order, sim.graph.values[site.value].shape)
            found[site.name] = encoding
    return found


# ------------------------------------------------------------------------------------- through the exporter


class _Flat(nn.Module):
    """The simulated model with flat tuples of tensors as inputs and outputs, which every exporter takes.

    ``told`` is called with the paths of what a forward returns; attributes that are set while it is traced are lost.
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], told: Callable[[list[str]], None]
    ) -> None:
        super().__init__()
        self.model = model
        places = {id(t): Slot(i) for i, (_, t) in enumerate(flatten_tensors((args, kwargs), caches=True))}
        self._template = map_tensors((args, kwargs), lambda t: places[id(t)])
        self._continues = bool(caches_in((args, kwargs)))
        self._told = told

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = map_tensors(self._template, lambda slot: tensors[slot.value], leaf=Slot)
        made = flatten_tensors(self.model(*args, **kwargs), caches=self._continues)
        self._told([path for path, _ in made])
        return tuple(t for _, t in made)


@collector_paused()
def marked_onnx(
    sim: SimulatedModule,
    dummy_input: Any,
    *,
    dynamic_batch: bool = False,
    dynamic_shapes: Any = None,
    notes: list[str] | None = None,
) -> ir.Model:
    """The model as ONNX (opset 21) with a ``bitwright::Site`` node at every enabled site.

    Parameters keep their names; inputs are named after the parameters of forward, outputs ``output``, ``output.<key>``.
    ``notes`` gets what is to be said of it.

    Raises:
        ExportError: ``torch.export`` or the ONNX exporter fails; its own error is the cause.
    """
    args, kwargs = as_call(own_copy(sim, dummy_input))
    inputs = dict(named_inputs(forward_signature(sim.model), args, kwargs))
    tensors = tuple(t for _, t in flatten_tensors((args, kwargs), caches=True))
    shapes = _shapes(inputs, tensors, dynamic_batch, dynamic_shapes)
    sim._simulator.refresh_biases()  # they follow encodings that changed since; while tracing, tensors have no values
    returned: list[list[str]] = []
    program = None
    try:
        # torch.export puts stand-ins in place of the parameters meanwhile
        alone = sim._interceptor.occupancy.exclusive("export")
        with alone, evaluation(sim.model), torch.no_grad(), _quiet(), model_alone(sim.model):
            flat = _Flat(sim.model, args, kwargs, returned.append).eval()
            program, told = captured(sim, flat, (args, kwargs), tensors, shapes)
            simplify(program)
            model = to_onnx(program)
            left = take_runs(model)
            if notes is not None:
                notes += told
    except BusyError:
        raise
    except Exception as error:
        raise _refused(sim, args, kwargs, program, error) from error
    finally:
        sim._interceptor.forget_names()
    model.ir_version = 10
    forget_origins(model)
    # an axis that was to vary, and that the model fixes, is a symbol of the name "2"
    _replace_dims(model, lambda text: int(text) if text is not None and text.isdigit() else text)
    rename_params(model)
    names = {id(t): name for name, t in inputs.items()}
    rename_io(
        model,
        [names.get(id(t), f"input.{i}") for i, t in enumerate(tensors)],
        list(output_names(returned[-1], inputs).values()),
    )
    compute_in_float(model)
    named = rename_values(model, _readable(sim, model) | _gate_names(sim, model))
    named.meta[_LEFT] = left
    return named


def decomposed_program(
    sim: SimulatedModule, batch: Any, *, dynamic_batch: bool = False
) -> torch.export.ExportedProgram:
    """The simulation as an ``ExportedProgram`` with ``quantized_decomposed`` operators, which ExecuTorch and inductor lower.

    Args:
        sim: calibrated.
        batch: an input; its tensors, in order, are what the program takes.
        dynamic_batch: leave the first axis free.

    Raises: as :func:`export_sim`; ExportError: a site has a grid for which these operators have no form.
    """
    from bitwright.torch.simulation.decomposed import with_decomposed

    return marked_program(
        sim,
        batch,
        lambda program, tensors, shapes: with_decomposed(program, sim.quantizers, tensors, shapes),
        dynamic_batch=dynamic_batch,
    )


def marked_program(
    sim: SimulatedModule,
    batch: Any,
    make: Callable[[torch.export.ExportedProgram, tuple[torch.Tensor, ...], Any], Made],
    *,
    dynamic_batch: bool = False,
) -> Made:
    """What ``make`` makes of the program of a simulation, which has a mark at every site, its inputs and ``dynamic_shapes``.

    Args:
        sim: calibrated.
        batch: an input; its tensors, in order, are what the program takes.
        make: called while nobody else runs the simulation.
        dynamic_batch: leave the first axis free.

    Raises: as :func:`decomposed_program`.
    """
    _check(sim, "1.0.0")
    args, kwargs = as_call(own_copy(sim, batch))
    inputs = dict(named_inputs(forward_signature(sim.model), args, kwargs))
    tensors = tuple(t for _, t in flatten_tensors((args, kwargs), caches=True))
    shapes = _shapes(inputs, tensors, dynamic_batch, None)
    sim._simulator.refresh_biases()
    program = None
    try:
        alone = sim._interceptor.occupancy.exclusive("export")
        with alone, evaluation(sim.model), torch.no_grad(), _quiet(), model_alone(sim.model):
            flat = _Flat(sim.model, args, kwargs, lambda paths: None).eval()
            program, _ = captured(sim, flat, (args, kwargs), tensors, shapes)
            simplify(program)
            return make(program, tensors, shapes)
    except (BusyError, ExportError):
        raise
    except Exception as error:
        raise _refused(sim, args, kwargs, program, error) from error
    finally:
        sim._interceptor.forget_names()


def exported_module(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any = None, *, dynamic_batch: bool = False
) -> ir.Model:
    """A module outside of any simulation as ONNX of opset 21, with the marks of its forward.

    Args:
        module: in evaluation.
        args, kwargs: example call.
        shapes: ``dynamic_shapes`` of ``torch.export``.
        dynamic_batch: let the first axis of every input vary, where ``shapes`` does not say otherwise.

    Raises:
        ExportError: ``torch.export`` or the ONNX exporter fails; its own error is the cause.
    """
    if shapes is None and dynamic_batch:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        shapes = map_tensors(dict(bound), lambda t: {0: torch.export.Dim.AUTO} if t.dim() else None)
    try:
        with torch.no_grad(), _quiet():
            model = to_onnx(torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False))
    except Exception as error:
        raise ExportError(
            type(module).__name__,
            f"the module cannot be exported to ONNX: {_root_cause(error)}",
            "let its forward take and return tensors, and decide nothing by their values",
        ) from error
    model.ir_version = 10
    forget_origins(model)
    compute_in_float(model)
    return model


def export_float(model: nn.Module, example: Any, path: Path) -> dict[str, NDArray[Any]]:
    """Write a module as an ONNX file; returns the tensors of ``example`` by the names of its inputs, bfloat16 as float32.

    Raises:
        ExportError: ``torch.export`` or the ONNX exporter fails.
    """
    args, kwargs = as_call(example)
    with evaluation(model):
        made = exported_module(model, args, kwargs)
    save_in_one_file(made, path)
    names = [str(value.name) for value in made.graph.inputs]
    return dict(zip(names, (_array(tensor) for _, tensor in flatten_tensors((args, kwargs))), strict=True))


def _refused(
    sim: SimulatedModule, args: tuple[Any, ...], kwargs: dict[str, Any], program: Any, error: Exception
) -> ExportError:
    """The error of a failed export: the place in the model, torch's reason, and the remedy.

    Args:
        sim, args, kwargs: what was exported, on which example.
        program: what ``torch.export`` made of it; ``None`` where that failed.
        error: what was raised.

    Raises:
        ExportError: the model does not run on the example.
    """
    where = sim._interceptor.failed_in
    _check_runs(sim, args, kwargs)
    why, name = _root_cause(error), type(sim.model).__name__
    change = "make the part it names independent of tensor values (torch.export's own message is above)"
    if isinstance(error, ModelError):
        change = error.remedy
        why = f"{why}. {error.site}: {error.problem}" if error.__cause__ else f"{error.site}: {error.problem}"
    elif program is not None and (found := untranslated(program, why)):
        return ExportError(
            name,
            f"the model cannot be exported to ONNX: ONNX has no operator for {found}",
            "compute this part by other operators, or outside of the model, and export that; the encodings alone are written by "
            "sim.save_encodings(path)",
        )
    elif (line := raised_at(error)) is not None:
        why = f"{line}: {why}"
    return ExportError(
        f"{name}{f', in {where}' if where else ''}",
        f"the model cannot be exported to ONNX: {why}",
        f"{change}; or export the ONNX model yourself and quantize that; the encodings alone are written by "
        "sim.save_encodings(path)",
    )


def _check_runs(sim: SimulatedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an example on which the model itself fails.

    Raises:
        ExportError: with what the model raises.
    """
    try:
        with evaluation(sim.model), torch.no_grad():
            sim.model(*args, **kwargs)
    except Exception as error:
        if holds_arrays(args, kwargs):
            raise ExportError("example", *ARRAYS) from error
        raise ExportError(
            type(sim.model).__name__,
            f"the model does not run on this example: {_root_cause(error)}",
            "give a batch of this model's own data, as compute_encodings takes it",
        ) from error


def _free_batch(sim: SimulatedModule, dummy_input: Any) -> tuple[ir.Model, list[str]]:
    """Export with a free batch axis where the model allows it; else with the example's, and the reason.

    An example of one sample is doubled for it, because ``torch.export`` takes an axis of length 1 for a fixed one.
    """
    if caches_in(as_call(dummy_input)):
        return _free_lengths(sim, dummy_input)
    sizes = {len(t) for _, t in flatten_tensors(dummy_input) if t.dim()}
    if len(sizes) != 1:
        notes = ["batch: the size is fixed to the example's, because its inputs do not have one first axis in common"]
        return marked_onnx(sim, dummy_input, notes=notes), notes
    (size,) = sizes
    example = dummy_input
    if size == 1:
        example = map_tensors(dummy_input, lambda t: torch.cat([t, t]) if t.dim() else t)
    try:
        marked = marked_onnx(sim, example, dynamic_batch=True)
        fixed = [str(v.name) for v in marked.graph.inputs if v.shape and isinstance(v.shape[0], int)]
        why = f"the model computes with the size of {', '.join(fixed)}"
    except ExportError as error:
        fixed, why = ["all"], f"with a free one, {error.problem}"
    if not fixed:
        _name_batch(marked)
        return marked, []
    notes = [f"batch: the size is fixed to {size}, that of the example: {why}"]
    return marked_onnx(sim, dummy_input, notes=notes), notes


#: axis -> its length in the example that a model with a cache is traced on: none is 1, and no two are equal
_LENGTHS = {"batch": 2, "sequence": 3, "past": 4, "total": 7}
_TOKENS = {0: "batch", 1: "sequence"}
#: input of a language model, by its rank where that decides -> the axes that vary
_FREE_AXES: dict[str | tuple[str, int], dict[int, str]] = {
    **dict.fromkeys(
        ("input_ids", "decoder_input_ids", "inputs_embeds", "token_type_ids", "mm_token_type_ids"), _TOKENS
    ),
    ("position_ids", 2): _TOKENS,
    ("position_ids", 3): {1: "batch", 2: "sequence"},
    "cache_position": {0: "sequence"},
    ("attention_mask", 2): {0: "batch", 1: "total"},
    ("attention_mask", 4): {0: "batch", 2: "sequence", 3: "total"},
    ("key", 4): {0: "batch", 2: "past"},
    ("value", 4): {0: "batch", 2: "past"},
}


def free_axes(name: str, tensor: torch.Tensor) -> dict[int, str]:
    """The axes of a language model's input that vary from call to call; none for unknown inputs."""
    last = name.rpartition(".")[2]
    return _FREE_AXES.get(last) or _FREE_AXES.get((last, tensor.dim())) or {}


def _free_lengths(sim: SimulatedModule, dummy_input: Any) -> tuple[ir.Model, list[str]]:
    """Export a model with a cache with free axes for batch, new tokens and past; else with the example's, and the reason.

    It is traced on an example of other lengths, because ``torch.export`` takes an axis of length 1 for a fixed one.
    """
    _refuse_windows(dummy_input)
    named = dict(named_inputs(forward_signature(sim.model), *as_call(dummy_input)))
    axes = {name: free for name, tensor in named.items() if (free := free_axes(name, tensor))}
    longer = {id(named[name]): _of_lengths(named[name], free) for name, free in axes.items()}
    example = map_tensors(dummy_input, lambda t: longer.get(id(t), t))
    asked = {name: dict.fromkeys(free, torch.export.Dim.AUTO) for name, free in axes.items()}
    notes: list[str] = []
    try:
        marked = marked_onnx(sim, example, dynamic_shapes=asked, notes=notes)
    except ExportError as error:
        notes = [f"lengths: batch, sequence and past are fixed to the example's: with free ones, {error.problem}"]
        return marked_onnx(sim, dummy_input, notes=notes), notes
    found = [
        (f"axis {axis} of {value.name}", value.shape[axis], kind)
        for value in marked.graph.inputs
        for axis, kind in axes.get(str(value.name), {}).items()
        if value.shape is not None
    ]
    fixed = [f"{where} to {dim}" for where, dim, _ in found if not isinstance(dim, ir.SymbolicDim)]
    if fixed:
        notes = [f"lengths: all are fixed to the example's: the model itself fixes {', '.join(fixed[:3])}"]
        return marked_onnx(sim, dummy_input, notes=notes), notes
    symbols = {str(dim.value): kind for _, dim, kind in reversed(found) if isinstance(dim, ir.SymbolicDim)}
    _replace_dims(marked, lambda text: text and re.sub(r"\w+", lambda found: symbols.get(found[0], found[0]), text))
    return marked, notes


def _of_lengths(tensor: torch.Tensor, axes: Mapping[int, str]) -> torch.Tensor:
    """``tensor`` repeated or cut to :data:`_LENGTHS` along ``axes``; zeros for an empty one."""
    for axis, kind in axes.items():
        length, old = _LENGTHS[kind], tensor.shape[axis]
        if old:
            tensor = tensor.index_select(axis, torch.arange(length, device=tensor.device) % old)
        else:
            tensor = tensor.new_zeros([length if i == axis else n for i, n in enumerate(tensor.shape)])
    return tensor


def _refuse_windows(batch: Any) -> None:
    """Refuse a sliding-window cache, whose present length is a Python number and so would be fixed in the file.

    Raises:
        ExportError: with the cache to give instead.
    """
    for cache in caches_in(as_call(batch)):
        kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
        found = sorted(kind for kind in kinds if kind.startswith("Static") or "SlidingWindow" in kind)
        if found:
            raise ExportError(
                type(cache).__name__,
                f"it has layers of the kind {found[0]}, which count tokens in Python: a file would hold the example's count",
                "give DynamicCache(pairs) without a config, whose layers keep all tokens (masks leave out what a window does); "
                "bitwright.llm.export_decoder makes it by itself",
            )


def _name_batch(model: ir.Model) -> None:
    """Call the free batch axis ``batch``, where the exporter made a symbol like ``s95``."""
    firsts = [v.shape[0] for v in model.graph.inputs if v.shape]
    symbols = {dim.value for dim in firsts if isinstance(dim, ir.SymbolicDim)}
    if len(symbols) == 1:
        _replace_dims(model, lambda text: "batch" if text in symbols else text)


def _replace_dims(model: ir.Model, new: Callable[[str | None], int | str | None]) -> None:
    """Replace symbolic lengths of axes by the lengths or names in ``new``."""
    values = [*model.graph.inputs, *(v for node in all_nodes(model.graph) for v in node.outputs)]
    for value in values:
        if value.shape is None or not any(isinstance(dim, ir.SymbolicDim) for dim in value.shape):
            continue
        # the exporter's own optimisations freeze some shapes, such as that of a value after a folded Transpose
        value.shape = ir.Shape([new(d.value) if isinstance(d, ir.SymbolicDim) else d for d in value.shape])


def own_copy(sim: SimulatedModule, batch: Any) -> Any:
    """A copy of ``batch`` on the model's device, since a model may write into its input."""
    return map_tensors(to_device(batch, model_device(sim.model)), lambda t: t.detach().clone())


def _root_cause(error: BaseException) -> str:
    """The innermost error of the chain, since exporters wrap errors several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {first}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress output and warnings of exporters."""
    chatty = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "torch.fx", "onnxscript", "onnx_ir")]
    levels = [log.level for log in chatty]
    try:
        for log in chatty:
            log.setLevel(logging.CRITICAL)
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(chatty, levels, strict=True):
            log.setLevel(level)


def _shapes(inputs: dict[str, torch.Tensor], tensors: tuple[torch.Tensor, ...], dynamic_batch: bool, asked: Any) -> Any:
    """``dynamic_shapes`` of the flat module: per tensor, from a mapping of input names or from ``dynamic_batch``."""
    if asked is None and not dynamic_batch:
        return None
    if asked is None:
        return {"tensors": tuple({0: torch.export.Dim.AUTO} if t.dim() else None for t in tensors)}
    unknown = next((name for name in asked if name not in inputs), None)
    if unknown is not None:
        raise ConfigError(
            "dynamic_shapes",
            f"there is no input {unknown!r}{close_matches(unknown, inputs)}",
            f"the inputs are {', '.join(inputs)}",
        )
    by_id = {id(inputs[name]): axes for name, axes in asked.items()}
    return {"tensors": tuple(by_id.get(id(t)) for t in tensors)}


def _readable(sim: SimulatedModule, model: ir.Model) -> dict[str, str]:
    """Name tensors after the output sites that mark them: ``layer1.0.conv1.output[0]``."""
    marked = set(site_names(model))
    return {site.name: site.name for site in sim.quantizers.values() if site.role == "output" and site.name in marked}


def _gate_names(sim: SimulatedModule, model: ir.Model) -> dict[str, str]:
    """Name the weights of recurrent layers, in ONNX's order of gates, as in ONNX: ``lstm.l0.forward.W``."""
    marked = set(site_names(model))
    return {
        site.name: f"{site.op}.{WEIGHT_PORTS[site.port]}"
        for site in sim.quantizers.values()
        if site.role == "weight" and site.name in marked and sim.graph.op(site.op).type in CELLS
    }


# ---------------------------------------------------------------------------------------------------- values


Arrays = dict[str, np.ndarray[Any, Any]]


def _computed_sites(model: ir.Model) -> set[str]:
    """The sites whose values the file computes."""
    noted = (read_metadata(node) for node in all_nodes(model.graph))
    activations = (facts for facts in noted if facts and facts["role"] == "activation")
    return {site for facts in activations for site, _ in facts["places"]}


def values_of(
    sim: SimulatedModule,
    batch: Any,
    result: QdqResult,
    left: Mapping[str, list[int]] | None = None,
    more: Sequence[str] = (),
) -> tuple[dict[str, Sequence[np.ndarray[Any, Any]]], Arrays]:
    """The simulation's values at every site with a quantizer in the file, one per run of its place, and its outputs.

    ``left`` tells which runs the converted program has, see :func:`take_runs`. A constant is among them where the file computes
    it, as one that is repeated for every sample of a free batch. Those of sites wait in a temporary file, beyond a few MiB.
    ``more`` names values that are returned with the sites.
    """
    live = _computed_sites(result.model)
    enabled = (site for site in sim.quantizers.values() if site.enabled and site.name in result.tensors)
    wanted = [site.name for site in enabled if site.role in ("input", "output") or site.name in live]
    wanted += more
    taps, output = sim._captured(wanted, own_copy(sim, batch), partial(Spooled, Spool()))
    sites = {name: _in_file(kept, (left or {}).get(name)) for name, kept in taps.items() if len(kept)}
    returned = flatten_tensors(output, caches=bool(caches_in(as_call(batch))))
    names = output_names([path for path, _ in returned], sim.graph.inputs)
    return sites, {names[path]: _array(t.float() if t.is_floating_point() else t) for path, t in returned}


def _in_file(kept: Sequence[Any], left: list[int] | None) -> Sequence[np.ndarray[Any, Any]]:
    """The runs of a place that the file has: those in ``left``, where all were kept."""
    if left is None or left == list(range(len(kept))) or any(run >= len(kept) for run in left):
        return kept
    return [kept[run] for run in left]


def _graph_inputs(sim: SimulatedModule, batch: Any) -> Arrays:
    args, kwargs = as_call(batch)
    named = named_inputs(forward_signature(sim.model), args, kwargs)
    return {name: _array(t) for name, t in named}


def _representable(sim: SimulatedModule, batch: Any, edges: Edges) -> Any:
    """``batch`` rounded to the inputs that a file with ``edges`` takes."""
    named = dict(named_inputs(forward_signature(sim.model), *as_call(batch)))
    floats = {name: _array(tensor) for name, tensor in named.items() if tensor.dtype == torch.float32}
    new = {
        id(named[name]): torch.from_numpy(np.ascontiguousarray(array)).to(named[name].device)
        for name, array in representable(edges, floats).items()
    }
    return map_tensors(batch, lambda tensor: new.get(id(tensor), tensor))


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as an array; complex numbers as two parts on a last axis, as in files.

    Numpy has no bfloat16, whose values float32 has as well.
    """
    found = tensor.detach().cpu()
    found = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
    return (found.float() if found.dtype == torch.bfloat16 else found).numpy()


def _first(batch: Any, rows: int | None) -> Any:
    """The first samples of a batch."""
    return batch if rows is None else map_tensors(batch, lambda tensor: tensor[:rows])


def _samples(
    sim: SimulatedModule, batch: Any, result: QdqResult, names: Mapping[str, str], left: Mapping[str, list[int]]
) -> Samples:
    """Build :class:`Samples`; ``names``: new names of renamed inputs and outputs."""
    indices, rows = sim._ordered_rows()
    taps, made = values_of(sim, batch, result, left, [indices] if rows else [])
    sites = {name: kept for name, kept in taps.items() if name != indices}
    inputs, outputs = (
        {names.get(name, name): array for name, array in arrays.items()} for arrays in (_graph_inputs(sim, batch), made)
    )
    return Samples(sites, inputs, outputs, sim._row_orders(taps.get(indices, ()), list(outputs)))


def verify_sim(sim: SimulatedModule, batch: Any, **options: Any) -> VerifyReport:
    """Export in memory and compare with ONNX Runtime layer by layer, each layer fed the simulation's own input.

    Args:
        sim: calibrated.
        batch: input to compare on.
        options: of :func:`export_sim` that change the graph: ``bias``, ``activation``, ``recurrent``, ``weight_only``,
            ``target``, ``rest``, ``dynamic_batch``, ``dynamic_shapes``; and ``runtime``, whose integer kernels are compared.
            Recurrent layers whose steps hold quantizers are compared step by step.

    Raises: as :func:`export_sim`; UnknownArgumentError: there is no such option.
    """
    runtime = options.pop("runtime", "onnxruntime")
    check_keywords("sim.verify", options, ("runtime", *_FORMS, *_SHAPES))
    options["target"] = target_in(options.get("target", DEFAULT_TARGET), runtime)
    result, _, kept = _in_memory(sim, batch, options)
    return verify_layers(
        result.model, kept.sites, kept.inputs, outputs=kept.outputs, orders=kept.orders, runtime=runtime
    )


def drift_sim(sim: SimulatedModule, a: str, b: str, batch: Any, **options: Any) -> DriftReport:
    """Export in memory and compare two executions of it; see :func:`bitwright.compare.drift.drift`.

    Args:
        sim: calibrated.
        a, b: ``"float"``, ``"simulation"``, ``"file"``, or a runtime.
        batch: input to compare on.
        options: as for :func:`verify_sim`, without ``runtime``.

    Raises: as :func:`verify_sim`; ConfigError: ``a`` or ``b`` is none of these, or both are the same.
    """
    from bitwright.compare.drift import drift_models

    check_keywords("sim.drift", options, (*_FORMS, *_SHAPES))
    options["target"] = target_in(options.get("target", DEFAULT_TARGET), a, b)
    result, plain, kept = _in_memory(sim, batch, options)
    return drift_models(a, b, plain, result.model, kept)


def run_as(sim: SimulatedModule, profile: Any, batch: Any, **options: Any) -> TargetSession:
    """Export in memory, and open the file as a target computes it; see :func:`bitwright.compare.target.session_in_memory`.

    Args:
        sim: calibrated.
        profile: of the target.
        batch: an input.
        options: as for :func:`verify_sim`, without ``runtime`` and shapes.

    Raises: as :func:`verify_sim`; ConfigError: there is no such profile.
    """
    from bitwright.compare.target import session_in_memory, target_of

    check_keywords("sim.runs_as", options, _FORMS)
    found, options["target"] = target_of(profile, options.get("target", DEFAULT_TARGET))
    marked, _ = _free_batch(sim, batch)
    sim._simulator.refresh_biases()  # they follow encodings that changed since
    model = _as_qdq(sim, marked, options)[0].model
    return session_in_memory(model, _graph_inputs(sim, batch), found)


def in_integer_kernels(
    sim: SimulatedModule, batches: Sequence[Any], **options: Any
) -> tuple[Callable[[], SaturationReport], Callable[[str], contextlib.AbstractContextManager[nn.Module]]]:
    """The operators that integer kernels would run in the exported file under the current encodings; traces the model once.

    Args:
        sim: calibrated.
        batches: inputs to count on.
        options: as for :func:`verify_sim`, without ``runtime`` and shapes.

    Returns:
        A function that counts saturated sums; and one from the name of a profile to a block in which the simulated module returns
        what that target computes of its inputs.

    Raises: as :func:`verify_sim`; ExportError: there is no batch.
    """
    from bitwright.compare.saturation import saturation
    from bitwright.compare.target import session_in_memory, target_of

    check_keywords("sim.saturation", options, _FORMS)
    if not batches:
        raise ExportError("saturation", "there is no batch to run", "give at least one input")
    marked, _ = _free_batch(sim, batches[0])
    feeds = [_graph_inputs(sim, batch) for batch in batches]
    signature = forward_signature(sim.model)

    def file() -> ir.Model:
        sim._simulator.refresh_biases()  # they follow encodings that changed since
        return _as_qdq(sim, marked, options)[0].model

    @contextlib.contextmanager
    def computed_as(profile: str) -> Iterator[nn.Module]:
        session = session_in_memory(file(), feeds[0], target_of(profile, DEFAULT_TARGET)[0])

        def answer(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            arrays = session.run(None, {name: _array(t) for name, t in named_inputs(signature, args, kwargs)})
            tensors = [tensor for _, tensor in flatten_tensors(output)]
            made = {id(t): torch.from_numpy(a).to(t.device, t.dtype) for t, a in zip(tensors, arrays, strict=True)}
            return map_tensors(output, lambda tensor: made[id(tensor)])

        handle = sim.model.register_forward_hook(answer, with_kwargs=True)
        try:
            yield sim.model
        finally:
            handle.remove()

    return lambda: saturation(file(), feeds), computed_as


def _in_memory(sim: SimulatedModule, batch: Any, options: dict[str, Any]) -> tuple[QdqResult, ir.Model, Samples]:
    """The file that an export would write, the float model, and what the simulation computes on ``batch``."""
    forms = {key: options.pop(key) for key in _FORMS if key in options}
    result, marked = _as_qdq(sim, marked_onnx(sim, batch, **options), forms, _graph_inputs(sim, batch))
    return result, strip_sites(restore_native(marked)).model, _samples(sim, batch, result, {}, marked.meta[_LEFT])


def _as_qdq(
    sim: SimulatedModule, marked: ir.Model, options: Mapping[str, Any], feeds: Arrays | None = None
) -> tuple[QdqResult, ir.Model]:
    """The file that an export would write from ``marked`` under the given options; and ``marked``."""
    _check(sim, "1.0.0")
    forms = {"target": DEFAULT_TARGET, **options}
    bias = bias_form(sim, forms.pop("bias", "int32"))
    written = write_recurrent(marked, recurrent_form(sim, forms.pop("recurrent", None), forms["target"]))
    encodings = site_encodings(sim)
    rest, is_onnx = forms.pop("rest", None), find_target(forms["target"]).format == "onnx"
    half = half_for(encodings, feeds, rest) if is_onnx and feeds is not None else None
    return to_qdq(written, encodings, bias=bias, half=half, **forms), marked
