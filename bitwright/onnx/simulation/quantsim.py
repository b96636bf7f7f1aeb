"""``QuantizationSimModel``: the simulation of a quantized ONNX model.

Repairs of values that are not finite are nodes after the operator that makes them:

==========  ==========================================================================
replace     IsNaN, Where; then Greater, Where and Less, Where for the two infinities
clamp       IsNaN, Where; then Clip, which by itself keeps NaN or loses it, by runtime
==========  ==========================================================================

:class:`TrialSession` is a session for searches, whose grids and weights are inputs, so that other bits or scales need no new
session. Every activation quantizer in it is a Clip at the ends of its grid and a pair of QuantizeLinear and DequantizeLinear
with 16-bit codes, which holds every integer grid of up to 16 bits; ends, scale and zero point are inputs of the model. Weights
are inputs too, so that the runtime cannot pack them for its fastest kernels: a run takes longer than a run of ``sim.session``,
and the difference is less than opening one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.benchmark import benchmark_sim, measured
from bitwright.compare.drift import drift_models
from bitwright.compare.report import DriftReport, VerifyReport
from bitwright.compare.saturation import SaturationReport, saturation
from bitwright.compare.target import TargetSession, session_in_memory, target_of
from bitwright.compare.verify import verify_layers, wrong_kernels
from bitwright.core.health.diagnosis import Repair
from bitwright.core.health.report import LIMITS, HealthReport, HealthTable, check_parameters
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerTensor
from bitwright.core.numerics.spec import NonFinite, Preset, RangeMethod
from bitwright.core.placement.config import bit_widths, make_rules
from bitwright.core.placement.kv_cache import KvCache
from bitwright.core.placement.rules import Rules
from bitwright.core.simulation.calibration import BatchGate, Observer
from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.output_quality import one_of_runs
from bitwright.core.simulation.quantizer import Quantizer
from bitwright.core.simulation.simulation import Lock, Occupancy, all_or_nothing, fed, nothing_ran
from bitwright.core.simulation.sites import derived_biases, place_quantizers, required_encodings
from bitwright.errors import CalibrationError, ConfigError, ModelError, checks_arguments, checks_methods
from bitwright.export.artefacts import (
    Exported,
    FileForms,
    Samples,
    bias_form,
    check_encoding_version,
    recurrent_form,
    write_artefacts,
)
from bitwright.export.checkpoint import (
    check_names,
    check_tensor,
    put_statistics,
    read_checkpoint,
    settings_in,
    state_of,
    tensors_of,
    write_checkpoint,
)
from bitwright.export.edges import edges_of, representable
from bitwright.export.encodings.of_simulation import SimulationFiles
from bitwright.export.files.atomic import check_destination
from bitwright.export.files.onnx_file import all_graphs, all_nodes, checked_on_failure, is_tensor, let_go
from bitwright.export.qdq.forms import Builder, after, before, write_activation
from bitwright.export.qdq.half import check_half, half_for
from bitwright.export.qdq.markers import (
    STATES,
    Outputs,
    bypass,
    close,
    copy_model,
    is_site,
    move_uses,
    remove_unread,
    site_nodes,
    site_of,
    strip_sites,
)
from bitwright.export.qdq.products import ProductForm, guard_outputs, show
from bitwright.export.qdq.stored import unsigned
from bitwright.export.qdq.trace import find_constants
from bitwright.export.qdq.write import QdqResult, to_qdq
from bitwright.export.qdq.writing import ActivationForm, BiasForm
from bitwright.export.recurrent import expand_recurrent, restore_native, write_recurrent
from bitwright.export.samples import plain
from bitwright.export.targets import (
    DEFAULT_TARGET,
    FileFormat,
    RecurrentForm,
    Target,
    find_target,
    target_for,
    target_in,
)
from bitwright.onnx.existing_quantizers import adopt, take_quantizers
from bitwright.onnx.model.data import Feeds, as_feeds, input_specs, random_feeds
from bitwright.onnx.model.graph import build_graph
from bitwright.onnx.model.instrument import Instrument, settle_lengths
from bitwright.onnx.model.load import Source, load_model
from bitwright.onnx.model.opset import modernize
from bitwright.onnx.model.session import (
    Providers,
    check_providers,
    first_line,
    free_memory,
    is_large,
    open_session,
    return_memory,
    run_session,
)
from bitwright.onnx.simulation.calibrator import Calibrator
from bitwright.onnx.simulation.marked_model import (
    MarkedSimulation,
    WeightFile,
    add_sites,
    file_for,
    folded_constant,
    mark_sites,
    marked_constants,
    simulation_model,
)
from bitwright.progress import collector_paused
from bitwright.progress import progress as bar
from bitwright.runtimes.adapters import named_arrays, one_array
from bitwright.runtimes.benchmark import BenchmarkReport
from bitwright.runtimes.onnxruntime import refusals, register_operators

logger = logging.getLogger("bitwright")

_D = ir.DataType
REPAIRED = {_D.FLOAT16: "float16", _D.BFLOAT16: "bfloat16", _D.FLOAT: "float32", _D.DOUBLE: "float64"}


@dataclass(frozen=True, eq=False)
class RepairedValue:
    """A value with a repair after it.

    Attributes:
        raw: what the operator wrote; its name ends in ``_unrepaired``.
        result: what its readers see, under the name that ``raw`` had.
    """

    raw: ir.Value
    result: ir.Value


def _float_results(node: ir.Node | None) -> list[ir.Value]:
    """The floating-point outputs of a node that have readers."""
    read = [v for v in (() if node is None else node.outputs) if v.uses() or v.is_graph_output()]
    return [v for v in read if is_tensor(v) and _dtype(v) in REPAIRED]


def _dtype(value: ir.Value) -> ir.DataType:
    """The dtype of a tensor; float32 where type inference does not know it, as for quantizers."""
    return value.dtype or _D.FLOAT


def _put_in(builder: Builder, raw: ir.Value, repair: Repair) -> RepairedValue:
    """Write the nodes of one repair after ``raw``; its readers move to their result."""
    name, dtype, last = str(raw.name), _dtype(raw), raw.producer()
    assert last is not None
    limit = LIMITS[REPAIRED[dtype]]
    own: set[ir.Node] = set()

    def constant(what: str, number: float) -> ir.Value:
        array = np.asarray(min(max(number, -limit), limit)).astype(dtype.numpy())
        return builder.initializer_of(f"{name}/{what}", ir.Tensor(array, dtype=dtype))

    def emit(op: str, inputs: Sequence[ir.Value], out: ir.DataType) -> ir.Value:
        nonlocal last
        assert last is not None
        value = builder.emit(after(last), op, inputs, f"{name}/{op.lower()}", out)
        value.shape = None if raw.shape is None else raw.shape.copy()
        last = value.producer()
        assert last is not None
        own.add(last)
        return value

    value = emit("Where", [emit("IsNaN", [raw], _D.BOOL), constant("nan", repair.nan), raw], dtype)
    lo, hi = constant("lo", repair.lo), constant("hi", repair.hi)
    if repair.kind == "clamp":
        value = emit("Clip", [value, lo, hi], dtype)
    else:  # beyond the largest number is only infinity
        value = emit("Where", [emit("Greater", [value, constant("max", limit)], _D.BOOL), hi, value], dtype)
        value = emit("Where", [emit("Less", [value, constant("min", -limit)], _D.BOOL), lo, value], dtype)
    move_uses(raw, value, keep=own)
    builder.outputs.replace(raw, value)
    value.name, raw.name = name, builder.names.value(f"{name}_unrepaired")
    return RepairedValue(raw, value)


Array = NDArray[Any]


class CalibrationSession:
    """Session for a calibration callback: runs like an ``onnxruntime.InferenceSession`` and is observed."""

    def __init__(self, calibrator: Calibrator, outputs: Sequence[str], occupancy: Occupancy) -> None:
        self.calibrator, self._outputs, self._occupancy = calibrator, list(outputs), occupancy
        self.ended = False

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Array], *_: Any) -> list[Array]:
        """Outputs of the model, with weights quantized and activations in float.

        Raises:
            ConfigError: the model has no output of a name asked for.
            ModelError, CalibrationError: the feeds do not fit, or the model fails on them; or the calibration is over.
            BusyError: called from another thread than the one that calibrates.
        """
        self._occupancy.check()
        if self.ended:
            raise CalibrationError(
                "session.run", "the calibration that this session belongs to has ended", "run sim.session"
            )
        index = {name: i for i, name in enumerate(self._outputs)}
        wanted = self._outputs if output_names is None else list(output_names)
        for name in wanted:
            if name not in index:
                raise ConfigError(
                    "session.run", f"the model has no output {name!r}", f"use {', '.join(self._outputs)}, or None"
                )
        found = self.calibrator.run(feeds)
        return [found[index[name]] for name in wanted]

    def get_inputs(self) -> list[Any]:
        """The inputs; each has ``name``, ``dtype`` and ``shape``."""
        return list(self.calibrator.specs)


_KEPT = 4  # sessions, of different sets of quantizers that work
_WIDEST = 16


class TrialSession:
    """Runs the present state of a simulation, like an ``InferenceSession``.

    Args:
        sim: a calibrated simulation; its quantizers may change between runs in every way.
    """

    def __init__(self, sim: QuantizationSimModel) -> None:
        self._sim = sim
        self._sessions: dict[tuple[Any, ...], _Inputs] = {}

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Array], *_: Any) -> list[Array]:
        """Outputs of the simulation, as ``sim.session.run`` gives them."""
        encodings = self._sim._encodings()
        key = _structure(self._sim, encodings)
        found = self._sessions.pop(key, None)
        if found is None or found.outdated(self._sim):
            found = _Inputs(self._sim, encodings)
            for old in list(self._sessions)[: len(self._sessions) + 1 - _KEPT]:
                del self._sessions[old]
        self._sessions[key] = found
        wanted = self._sim.output_names if output_names is None else list(output_names)
        result: list[Array] = found.session.run(wanted, {**feeds, **found.feeds(self._sim, encodings)})
        return result

    def get_inputs(self) -> list[Any]:
        """The inputs of the model itself."""
        return list(self._sim.session.get_inputs())

    def get_outputs(self) -> list[Any]:
        """The outputs of the model."""
        return list(self._sim.session.get_outputs())


def _structure(sim: QuantizationSimModel, encodings: Mapping[str, Encoding]) -> tuple[Any, ...]:
    """Cache key of a session: its enabled sites and their encodings."""
    activations = (site for site in sim.quantizers if site not in sim.constants)
    return tuple(None if (e := encodings.get(site)) is None else True if _is_input(e) else e for site in activations)


def _is_input(encoding: Encoding) -> bool:
    """Whether the grid can be an input of the session: one scale per tensor, at most 16 bits."""
    fmt = encoding.format
    wide = isinstance(fmt, IntFormat) and fmt.bits <= _WIDEST
    return wide and isinstance(encoding.granularity, PerTensor) and not encoding.dynamic


class _Inputs:
    """A session, and its feeds besides the model's inputs."""

    def __init__(self, sim: QuantizationSimModel, encodings: Mapping[str, Encoding]) -> None:
        self._biases = set(sim._biases)
        self._constants: dict[str, tuple[str, ir.TensorProtocol]] = {}  # input -> site, tensor
        self._grids: dict[str, list[ir.Value]] = {}  # site -> inputs: ends, scale, zero point
        # site of a constant that the model holds in another form -> what it was made of
        self._written: dict[str, Array] = {}
        self._fed: dict[str, tuple[Encoding | None, Array | None, list[Array]]] = {}
        model = self._model(sim, encodings)
        self.session = open_session(model, sim.providers, threads=sim.threads)

    def _model(self, sim: QuantizationSimModel, encodings: Mapping[str, Encoding]) -> ir.Model:
        copy = copy_model(expand_recurrent(sim.marked))
        builder, constants = Builder(copy), find_constants(copy)
        replaced: dict[ir.Value, None] = {}
        for node in site_nodes(copy):
            site, source = site_of(node), node.inputs[0]
            assert source is not None
            if source in constants:
                tensor = constants[source]
                fed = self._input(builder, f"{source.name}_trial", tensor.dtype, tensor.shape.numpy())
                self._constants[str(fed.name)] = site, tensor
                if not _same_form(sim.constants.get(site), tensor):
                    self._written[site] = sim.constants[site]
                node.replace_input_with(0, fed)
                replaced[source] = None
                bypass(node, builder.outputs)
            elif (encoding := encodings.get(site)) is None:
                bypass(node, builder.outputs)
            elif _is_input(encoding) and source.dtype in (None, _D.FLOAT):
                self._write(builder, node, source, site)
            else:
                write_activation(builder, node, encoding, unsigned(encoding), site)
        for source in replaced:
            remove_unread(source)
        guard_outputs(builder, all_nodes(copy.graph))
        close(copy)
        return copy

    def _input(self, builder: Builder, base: str, dtype: ir.DataType, shape: Sequence[int] = ()) -> ir.Value:
        name = builder.names.value(base)
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        builder.graph.inputs.append(value)
        return value

    def _write(self, builder: Builder, node: ir.Node, source: ir.Value, site: str) -> None:
        if site not in self._grids:
            kinds = {"low": _D.FLOAT, "high": _D.FLOAT, "scale": _D.FLOAT, "zero_point": _D.UINT16}
            self._grids[site] = [
                self._input(builder, f"{source.name}_trial_{kind}", dtype) for kind, dtype in kinds.items()
            ]
        low, high, *pair = self._grids[site]
        place, base = before(node), str(source.name)
        inside = builder.emit(place, "Clip", [source, low, high], f"{base}_trial_clip", _D.FLOAT)
        codes = builder.emit(place, "QuantizeLinear", [inside, *pair], f"{base}_trial_q", _D.UINT16)
        value = builder.emit(place, "DequantizeLinear", [codes, *pair], f"{base}_trial_dq", _D.FLOAT)
        builder.take_over(node, value)

    def outdated(self, sim: QuantizationSimModel) -> bool:
        """Whether a constant was replaced that cannot be fed: one that the model holds in another form than the simulation."""
        return any(sim.constants.get(site) is not array for site, array in self._written.items())

    def feeds(self, sim: QuantizationSimModel, encodings: Mapping[str, Encoding]) -> dict[str, Array]:
        """Grids and weights for ``encodings``; those unchanged since the last call are reused."""
        found: dict[str, Array] = {}
        for name, (site, tensor) in self._constants.items():
            encoding, bias = encodings.get(site), site in self._biases
            live = None if site in self._written else sim.constants[site]
            if self._changed(name, encoding, live):
                array = tensor.numpy() if live is None else live
                self._fed[name] = encoding, live, [_on_grid(array, encoding, bias)]
            found[name] = self._fed[name][2][0]
        for site, values in self._grids.items():
            if self._changed(site, encodings[site]):
                self._fed[site] = encodings[site], None, _grid(encodings[site])
            found.update(zip((str(v.name) for v in values), self._fed[site][2], strict=True))
        return found

    def _changed(self, key: str, encoding: Encoding | None, array: Array | None = None) -> bool:
        known = self._fed.get(key)
        return known is None or known[0] is not encoding or known[1] is not array


def _on_grid(array: Array, encoding: Encoding | None, bias: bool) -> Array:
    return array if encoding is None else folded_constant(array, encoding, bias=bias)


def _same_form(array: Array | None, tensor: ir.TensorProtocol) -> bool:
    """Whether a constant of the simulation can be fed in place of the one that a model was made with."""
    return array is not None and array.shape == tuple(tensor.shape.numpy()) and array.dtype == tensor.dtype.numpy()


def _grid(encoding: Encoding) -> list[Array]:
    """Ends, scale and zero point of a grid whose codes are counted from 0, as float32 and uint16."""
    shown = unsigned(encoding)
    fmt, zero_point = encoding.format, encoding.zero_point.astype(np.float32)
    assert isinstance(fmt, IntFormat)
    ends = [(np.float32(end) - zero_point) * encoding.scale for end in (fmt.qmin, fmt.qmax)]
    floats = [np.asarray(number, np.float32) for number in (*ends, shown.scale)]
    return [*floats, np.asarray(shown.zero_point, np.uint16)]


def _places(simulation: MarkedSimulation, names: Sequence[str], bodies: bool) -> Iterator[tuple[str, ir.Value]]:
    """Site -> main graph values that show it, one for every place."""
    instrument, graph = Instrument(simulation.model), simulation.model.graph
    for name, value in ((site, value) for site in names for value in simulation.results.get(site, ())):
        inside = value.graph
        assert inside is not None
        owner = instrument.owner(inside)
        if owner is None:
            yield name, value
        elif bodies or (owner.graph is graph and STATES in owner.metadata_props):
            dtype = (value.dtype or ir.DataType.FLOAT).numpy()
            yield name, instrument.lift(value, inside, np.zeros(0, dtype), None)[0]


def _all_places(simulation: MarkedSimulation, names: Sequence[str], bodies: bool) -> list[tuple[str, ir.Value]]:
    """See :func:`_places`; also of values of the main graph that are called by their names."""
    wanted = frozenset(names)
    values = {str(v.name): v for node in simulation.model.graph for v in node.outputs if v.name in wanted}
    values = {name: value for name, value in values.items() if name not in simulation.results}
    return [*_places(simulation, names, bodies), *values.items()]


_INSTEAD = "work on another QuantizationSimModel of the same model, which load_encodings(path) makes equal to this one"


@checks_methods
class QuantizationSimModel(SimulationFiles):
    """A copy of an ONNX model that computes with quantized weights and activations, in ONNX Runtime.

    The model is read, not changed; ``sim.session`` is an ordinary ``InferenceSession`` with the model's own inputs
    and outputs. Quantized tensors are found by what operators read and write, so names may be anything.

    Args:
        model: path, ``onnx.ModelProto`` or ``onnx_ir.Model``.
        dummy_input: one feed (a dict, an array, or a tuple in the model's order): gives shapes that the file leaves
            open, and is the example for export and verification. Random values serve where none is given.
        quant_scheme: how ranges are chosen: ``min_max`` (default), ``tf_enhanced``, ``percentile``, ``mse``,
            ``entropy``, or a :class:`RangeMethod`.
        default_param_bw: bits of weights, 2 to 32.
        default_activation_bw: bits of activations, 2 to 32.
        config_file: rules: path of an AIMET quantsim JSON or of our YAML, TOML or JSON, the name of a shipped
            configuration (``default``, ``htp_v73``, ...), or a dict; ``None`` means ours.
        providers: ONNX Runtime's execution providers; the CPU by default.
        default_data_type: ``int``, or ``float`` (bit widths 16 or 8: float16, float8_e4m3).
        preset: instead of the bit widths: ``"w8a8"``, ``"w4a8"``, ``"w4a16"``, ... (``PRESETS``).
        memory_budget: bytes of activations that calibration may hold beside what the model itself needs; a quarter
            of the free memory by default.
        threads: of one operator; 0 takes ``OMP_NUM_THREADS``, where it is set, or leaves the number to ONNX Runtime.
        kv_cache: what keys and values of attention are stored as: ``{"key": "int8", "value": "int4"}``, see
            :func:`~bitwright.core.placement.kv_cache.parse_kv_cache`.
        libraries: paths of libraries of custom operators, which every later session of the process has too
            (:func:`~bitwright.runtimes.onnxruntime.register_operators`).

    Raises:
        ModelError: the model cannot be read, converted or run.
        FormatError: impossible bit width.
        ConfigError: unknown scheme or provider, or a configuration that cannot be read.
    """

    _observed_object = ("session", "session.run")
    calibrated = False
    repairs: tuple[Repair, ...] = ()

    @bit_widths("default_param_bw", "default_activation_bw")
    @checks_arguments
    def __init__(
        self,
        model: Source,
        dummy_input: Any = None,
        quant_scheme: str | RangeMethod | None = None,
        default_param_bw: int = 8,
        default_activation_bw: int = 8,
        config_file: str | Path | dict[str, Any] | Rules | None = None,
        providers: Providers | None = None,
        *,
        default_data_type: str = "int",
        preset: str | Preset | None = None,
        memory_budget: int | None = None,
        threads: int = 0,
        kv_cache: KvCache | Mapping[str, Any] | None = None,
        libraries: Sequence[str | Path] = (),
    ) -> None:
        check_providers(providers)
        for library in libraries:
            register_operators(library)
        self._threads, self._lock = Occupancy(_INSTEAD), Lock()
        names = ("default_param_bw", "default_activation_bw")
        bits: dict[str, Any] = {"param_bw": default_param_bw, "output_bw": default_activation_bw}
        options: dict[str, Any] = {"data_type": default_data_type, "names": names, "kv_cache": kv_cache}
        self._set_up(make_rules(quant_scheme, preset, config_file, **bits, **options))
        if self.rules.kv_cache is not None and self.rules.kv_cache.recent:
            raise ConfigError(
                "kv_cache.recent",
                "tokens that stay in float as long as they are the last are simulated for PyTorch models only",
                "leave out recent, or simulate the PyTorch model",
            )
        self.providers, self.threads = providers, threads
        self.memory_budget = free_memory() // 4 if memory_budget is None else int(memory_budget)
        self._told_of_nan = False
        self._repaired: list[RepairedValue] = []  # where in the marked model the repairs stand
        self._weights: WeightFile | None = None
        self._replaced: WeightFile | None = None  # of parameters that were given new values
        self.output_values = {}  # an exported model's outputs are called as the graph's are
        site = str(model) if isinstance(model, (str, os.PathLike)) else "model"
        with collector_paused(), checked_on_failure(model, site):
            self._place(model, dummy_input)
        self._session: tuple[tuple[Any, ...], Any] | None = None  # the encodings it was made for, and the session

    # -- placement

    def _place(self, model: Source, dummy_input: Any) -> None:
        loaded = load_model(model)
        given = take_quantizers(loaded.model)
        loaded = modernize(loaded, dummy_input)
        self.notes = loaded.notes
        self.specs = input_specs(loaded.model)
        self.output_names = [str(value.name) for value in loaded.model.graph.outputs]
        self._dummy = None if dummy_input is None else as_feeds(dummy_input, self.specs, "dummy_input")
        view = build_graph(loaded.model)
        self.graph = view.graph
        self.plan = self._plan()
        adopted = adopt(self.plan, self.graph, given) if given else None
        if adopted is not None:
            self.plan = adopted.plan
        self.marked = mark_sites(loaded.model, self.plan.sites.values(), view.node)
        self.constants = marked_constants(self.marked)
        self.quantizers = place_quantizers(self.plan, self.graph, self.constants.get)
        self._biases = derived_biases(self.quantizers, self.constants.get)
        if adopted is not None:
            note, self.calibrated = adopted.put_in_force(self.quantizers)
            self.notes = (*self.notes, note)
            logger.info("%s", note)

    def _place_left_out(self) -> None:
        """Add switched-off quantizers to the values that the rules leave in float."""
        with self._occupancy.exclusive("a quantizer for what the rules leave out"), self._lock:
            added = self._add_left_out(self.constants.get, Quantizer, inputs=False)
            add_sites(self.marked, added.values(), {op.name: op.name for op in self.graph.ops})
            for name, array in marked_constants(self.marked).items():
                self.constants.setdefault(name, array)
            self.forget_simulations()

    def set_parameter(self, name: str, value: Array) -> None:
        """Give an initializer a new value of the same shape; its dtype stays, and so do all calibrated encodings.

        Raises:
            KeyError: the model has no such initializer.
            ModelError: the shape differs.
        """
        with self._occupancy.exclusive("set_parameter"), self._lock:
            holder = self.marked.graph.initializers[name]
            tensor = holder.const_value
            assert tensor is not None, name
            if tuple(value.shape) != tuple(tensor.shape.numpy()):
                raise ModelError(
                    name,
                    f"the new value has shape {value.shape}, the parameter {tuple(tensor.shape.numpy())}",
                    "keep the shape",
                )
            array = np.asarray(value, order="C").astype(tensor.dtype.numpy())
            made = ir.Tensor(array, dtype=tensor.dtype, name=name)
            self._replaced = file_for(self.marked, self._replaced)
            holder.const_value = made if self._replaced is None else self._replaced.kept(name, made)
            array = holder.const_value.numpy()
            for site in self._sites_of.get(name, ()):
                self.constants[site] = np.asarray(array, np.float32) if array.dtype.kind == "V" else array
                if site in self._biases:
                    self._biases[site].replace(self.constants[site])
            self.forget_simulations()

    @cached_property
    def _sites_of(self) -> dict[str, list[str]]:
        """Initializer -> the sites at which it is quantized."""
        found: dict[str, list[str]] = {}
        for site in self.plan.sites.values():
            param = self.graph.values[site.value].param
            if param is not None and site.name in self.constants:
                found.setdefault(param, []).append(site.name)
        return found

    # -- calibration

    def compute_encodings(
        self,
        data: Callable[..., Any] | Iterable[Any] | None = None,
        args: Any = None,
        *,
        progress: bool = True,
        resume: bool = False,
        allow_unreached: bool = False,
        non_finite: NonFinite = "error",
    ) -> None:
        """Compute the encodings: of weights from their values, of activations from data.

        Weights are quantized meanwhile, activations are in float. Statistics merge exactly, so the encodings do not
        depend on order or batch size. Where no range follows from data, as under a preset that quantizes weights alone,
        nothing is run, whether data are given or not.

        Args:
            data: feeds (each a dict, an array for a model with one input, or a tuple in the model's order), or a
                callback that runs the session it is given on them: ``callback(session)``, or
                ``callback(session, args)`` when ``args`` is given. ``None`` calibrates on the example input.
            args: second argument of the callback.
            progress: show a progress bar on a terminal when it takes more than two seconds.
            resume: keep the statistics of the last call and add to them, for example after Ctrl-C.
            allow_unreached: leave sites that no batch reached in float instead of failing when they are used.
            non_finite: what to do with a batch in which a quantizer meets NaN or Inf: ``"error"`` stops and names the
                node that made them, ``"skip"`` leaves the whole batch out of all statistics, ``"clamp"`` uses the finite
                values only. A spec or rule with ``non_finite`` has its own way.

        Raises (and leaves the earlier encodings in effect):
            CalibrationError: no batch came, the model fails on one, a weight or (under ``"error"``) a batch holds values
                that are not finite.
            ModelError: a batch does not fit the model's inputs.
            ConfigError: there is no such policy.
            BusyError: another thread changes the simulation.
        """
        if self._without_runs(data):
            with self._calibration(resume, allow_unreached, non_finite, runs=False):
                return
        with self.calibrating(resume=resume, allow_unreached=allow_unreached, non_finite=non_finite) as session:
            calibrator = session.calibrator
            for batch in bar(fed([] if data is None else data, args, session), "calibrating", progress):
                calibrator.run(batch)
            if data is None:
                self._calibrate_on_example(calibrator)
            if not calibrator.runs:
                raise nothing_ran(data, "the callback never ran its session", "session.run")

    def _calibrate_on_example(self, calibrator: Calibrator) -> None:
        made_up = self._dummy is None and any(spec.is_open for spec in self.specs)
        try:
            calibrator.run(self.example())
        except CalibrationError as error:
            if not made_up:
                raise
            shapes = ", ".join(f"{name} {'x'.join(map(str, a.shape))}" for name, a in self.example().items())
            raise CalibrationError(
                "the example input",
                f"the model leaves lengths of axes open, and fails on random values of shape {shapes}: {error.problem}",
                "pass dummy_input=..., one feed of the shapes that the model is made for, or data",
            ) from error

    def calibrating(
        self, *, resume: bool = False, allow_unreached: bool = False, non_finite: NonFinite = "error"
    ) -> AbstractContextManager[CalibrationSession]:
        """Observe every run of a session in a block; at its end the encodings are computed and put into effect.

        What :meth:`compute_encodings` does around data of its own, for a loop of yours. An exception in the block leaves the
        earlier encodings in effect.

        Args:
            resume, allow_unreached, non_finite: see :meth:`compute_encodings`.

        Yields:
            The session: ``session.run(None, feeds)`` gives the outputs, with weights quantized and activations in float.

        Raises:
            CalibrationError: the session did not run in the block, or see :meth:`compute_encodings`; or the block is inside
                of another calibration.

        Example:
            >>> with sim.calibrating() as session:  # doctest: +SKIP
            ...     for feeds in loader:
            ...         session.run(None, feeds)
        """
        return self._calibration(resume, allow_unreached, non_finite)

    def _begin(self, resume: bool, ranks: Any, runs: bool) -> Observer:
        self._close_large()  # the session to come is another one
        parameters = self._quantized_parameters()
        check_parameters(parameters)
        for array in parameters.values():
            let_go(array)
        self.quantizers.reconsider()
        if not resume:
            self.quantizers.forget()
        self.calibrated, self._told_of_nan = False, False
        self._observe_constants()
        return self._calibrator() if runs else Observer()

    def _observe_constants(self) -> None:
        """Find the encodings of weights and other constants."""
        for site in self.quantizers.values():
            quantizer, array = site.quantizer, self.constants.get(site.name)
            if array is None or not site.enabled or quantizer.derived or quantizer.frozen:
                continue
            if site.role != "input":
                quantizer.observe_once(array)
                let_go(array)
            elif quantizer.statistics is None:  # a constant that starts a state, on the grid of that state
                quantizer.observe(array)

    def _calibrator(self) -> Calibrator:
        """Weights quantized, activations watched."""
        simulation = self._watched_model()
        watched = {name: site.quantizer for name, site in self.quantizers.items() if name in simulation.taps}
        channels = {name: self.quantizers[name].channels for name in watched}
        return Calibrator(simulation, watched, self.memory_budget, self.providers, self.threads, channels=channels)

    def _watched_model(self) -> MarkedSimulation:
        """The model that calibration runs: weights quantized, activations in float except the frozen ones."""
        encodings = {
            site.name: site.encoding
            for site in self.quantizers.values()
            if site.enabled
            and site.encoding is not None
            and not site.quantizer.derived
            and (site.name in self.constants or site.frozen)
        }
        return simulation_model(self.marked, encodings, file=self._weight_file())

    def _gate(self, observer: Observer, policy: NonFinite) -> BatchGate:
        def blame(batch: Any) -> HealthReport:
            return self._diagnosed(self._watched_model().model, batch)

        if not isinstance(observer, Calibrator):
            return BatchGate((), policy)
        watched = {id(q): q for q in observer.quantizers.values() if q.enabled}
        return BatchGate(watched.values(), policy, blame, observer.channels.values())

    @contextmanager
    def _observed(self, observer: Observer) -> Iterator[CalibrationSession | None]:
        if not isinstance(observer, Calibrator):
            yield None
            return
        session = CalibrationSession(observer, self.output_names, self._occupancy)
        try:
            yield session
        finally:
            session.ended = True

    def _find_encodings(self, observer: Observer) -> None:
        if isinstance(observer, Calibrator):
            observer.finish()
        self.quantizers.freeze_activations()

    def _set_calibrated(self) -> None:
        self.calibrated = True

    def _diagnosed(self, model: ir.Model, feeds: Any) -> HealthReport:
        """Find the operator of ``model``, built from the marked one, that computes non-finite values."""
        from bitwright.onnx.nan_doctor import Doctor

        doctor = Doctor(model, "model", self.providers, self.threads)
        doctor.check(feeds)
        return doctor.report()

    def _name_nan(self, feeds: Feeds) -> None:
        """Name the operator that produces NaN in the simulation but not in float."""
        plain, quantized = (
            self._diagnosed(simulation_model(self.marked, encodings).model, feeds)
            for encodings in ({}, self._encodings())
        )
        if plain.ok and not plain.bad_inputs:
            logger.warning("%s", self.quantizers.describe_nan(quantized, self.graph))

    # -- what methods ask of it

    @property
    def _occupancy(self) -> Occupancy:
        return self._threads

    def _values_of(self, site: str) -> Array | None:
        return self.constants.get(site)

    @property
    def _metric_target(self) -> Any:
        return self.session

    def _outputs(self, batch: Any) -> list[Array]:
        """Outputs as arrays; the floats of a sequence or map are concatenated."""
        return [one_array(y) for y in self.run(batch)]

    def _outputs_and(self, names: Sequence[str]) -> Callable[[Any], list[Array]]:
        simulation = self.simulation()
        places = _all_places(simulation, names, bodies=False)
        shown = show(Builder(simulation.model), [value for _, value in places])
        fetch = list(dict.fromkeys([*self.output_names, *(str(value.name) for value in shown.values())]))
        session = open_session(simulation.model, self.providers, threads=self.threads)

        def answer(batch: Any) -> list[Array]:
            arrays = run_session(session, as_feeds(batch, self.specs), "the simulation", fetch)
            found = dict(zip(fetch, arrays, strict=True))
            runs = [[found[str(shown[value].name)] for place, value in places if place == name] for name in names]
            return [*(one_array(found[name]) for name in self.output_names), *map(one_of_runs, runs)]

        return answer

    def _float_copy(self) -> ir.Model:
        """A copy of the float model that shares weights until they change."""
        return strip_sites(self.marked).model

    def _again(self, model: Source) -> QuantizationSimModel:
        options: dict[str, Any] = {
            "providers": self.providers,
            "memory_budget": self.memory_budget,
            "threads": self.threads,
        }
        found = QuantizationSimModel(model, self.example(), config_file=self.rules, **options)
        found.quantizers.ask_as(self.quantizers)
        return found

    def _in_integer_kernels(
        self, batches: Sequence[Any], **options: Any
    ) -> tuple[Callable[[], SaturationReport], Callable[[str], AbstractContextManager[TargetSession]]]:
        return (
            lambda: self.saturation(batches, **options),
            lambda profile: nullcontext(self.runs_as(profile, **options)),
        )

    def _nodes(self) -> dict[str, ir.Node]:
        """Operator -> its node in the marked model."""
        return {str(node.name): node for node in all_nodes(self.marked.graph) if not is_site(node)}

    def _repairable(self) -> dict[str, str | None]:
        """Operators, with a reason where they cannot be repaired: without readers, or of another dtype."""
        reason = f"the operator has no result in {', '.join(REPAIRED.values())} that anything reads"
        nodes = self._nodes()
        return {op.name: None if _float_results(nodes.get(op.name)) else reason for op in self.graph.ops}

    def _put_in_force(self, repairs: Sequence[Repair]) -> None:
        """Apply repairs as nodes after the operators."""
        outputs = Outputs(self.marked)
        for repaired in reversed(self._repaired):
            raw, result, name = repaired.raw, repaired.result, repaired.result.name
            move_uses(result, raw)
            outputs.replace(result, raw)
            remove_unread(result)
            raw.name = name
        self._repaired, self.repairs = [], ()
        builder, nodes = Builder(self.marked), self._nodes()
        for repair in repairs:
            self._repaired += [_put_in(builder, value, repair) for value in _float_results(nodes[repair.op])]
        self.repairs = tuple(repairs)
        self.forget_simulations()

    def example(self) -> Feeds:
        """The example input: ``dummy_input``, or random values where none was given."""
        with self._lock:
            if self._dummy is None:
                self._dummy = next(random_feeds(self.specs))
            return self._dummy

    def health(self) -> HealthTable:
        """Health of calibration values and weights at every site: NaN, Inf, zero and constant channels, saturation."""
        return self.quantizers.health(self.constants)

    def _refresh_biases(self) -> None:
        with self._lock:  # another thread must not see one that is being derived
            for bias in self._biases.values():
                bias.refresh()

    # -- its state

    def remember(self, *, parameters: bool = False) -> Undo:
        """Save the state of the simulation: quantizers, calibration, repairs, notes.

        Args:
            parameters: keep the values of all initializers too.

        Returns:
            A function that brings the state back, as often as it is called.
        """
        quantizers, calibrated, log = self.quantizers.remember(), self.calibrated, self.calibration_log
        repairs = self.repairs
        initializers = self.marked.graph.initializers if parameters else {}
        tensors = {name: value.const_value for name, value in initializers.items()}
        constants = dict(self.constants) if parameters else {}

        def restore() -> None:
            if self.repairs is not repairs:
                self._put_in_force(repairs)
            for name, tensor in tensors.items():
                holder = self.marked.graph.initializers.get(name)  # gone where a chosen weight took its place
                if tensor is not None and holder is not None and holder.const_value is not tensor:
                    self.set_parameter(name, tensor.numpy())
            self._restore_computed(constants)
            quantizers()
            self.calibrated, self.calibration_log = calibrated, log

        return restore

    def _restore_computed(self, constants: Mapping[str, Array]) -> None:
        """Restore computed weights that a method has replaced."""
        changed = {
            site: array
            for site, array in constants.items()
            if self.constants[site] is not array and self.graph.values[self.plan.sites[site].value].param is None
        }
        for marker in [node for node in self.marked.graph if is_site(node)] if changed else ():
            array = changed.get(site_of(marker))
            chosen = marker.inputs[0]
            if array is not None and chosen is not None and chosen.is_initializer():
                chosen.const_value = ir.Tensor(array, name=chosen.name)
                self.constants[site_of(marker)] = array
        self.forget_simulations()

    # -- use

    @property
    def session(self) -> Any:
        """An ``onnxruntime.InferenceSession`` of the simulation; opened again after changes.

        Threads may run one session, as ever with ONNX Runtime.

        Raises:
            CalibrationError: there are no encodings yet.
            BusyError: another thread changes the simulation.
        """
        with self._lock:
            state = tuple(self._encodings().items())
            if self._session is None or not _same(self._session[0], state):
                self._session = (state, open_session(self.simulation().model, self.providers, threads=self.threads))
            return self._session[1]

    def trial_session(self) -> TrialSession:
        """A session like :attr:`session` that follows later changes of the quantizers without being rebuilt.

        For searches, which change bits and scales between runs over little data; see
        :mod:`bitwright.onnx.simulation.quantsim`. Sums are rounded in another order than in :attr:`session`.
        """
        return TrialSession(self)

    def forget_simulations(self) -> None:
        """Forget the sessions, since the marked model was changed."""
        self._session = None

    def _encodings(self) -> dict[str, Encoding]:
        """Site -> encoding of every enabled site.

        Raises:
            CalibrationError: there are none yet, or one is missing.
            BusyError: another thread changes them.
        """
        self._occupancy.check()
        if not self.calibrated:
            raise CalibrationError(
                "QuantizationSimModel",
                "the model was run before calibration, so no quantizer has an encoding yet",
                "call sim.compute_encodings(batches) or sim.load_encodings(path) first",
            )
        self._refresh_biases()
        return required_encodings(self.quantizers)

    def simulation(self) -> MarkedSimulation:
        """The simulation as a standard ONNX model, with its quantizers and the values that enter them."""
        with self._lock:  # weights of a large model are mapped, and let go of once they are read
            return simulation_model(self.marked, self._encodings(), self._biases, self._weight_file())

    def _weight_file(self) -> WeightFile | None:
        self._weights = file_for(self.marked, self._weights)
        return self._weights

    def run(self, feeds: Any) -> list[Array]:
        """Outputs of the simulation in the model's order, as ``InferenceSession.run(None, feeds)`` gives them.

        Args:
            feeds: a dict, an array for a model with one input, or a tuple in the model's order.

        Raises:
            CalibrationError: there are no encodings yet.
            ModelError: the feeds do not fit the model's inputs, or the model fails on them.
        """
        checked = as_feeds(feeds, self.specs)
        found: list[Array] = run_session(self.session, checked, "the simulation", self.output_names)
        self._tell_of_nan(found, checked)
        return found

    def _tell_of_nan(self, outputs: Iterable[Any], feeds: Feeds) -> None:
        """Warn once about the origin of the first NaN among the outputs."""
        if not self._told_of_nan and any(
            isinstance(y, np.ndarray) and y.dtype.kind == "f" and bool(np.isnan(y).any()) for y in outputs
        ):
            self._told_of_nan = True
            self._name_nan(feeds)

    def capture(self, names: Sequence[str], feeds: Any) -> dict[str, list[Array]]:
        """Quantized values at activation sites, one array per place the site marks.

        Those inside recurrent layers have all steps, ``[length, 1, batch, hidden]`` in the order of time, those in the body
        of another Loop or Scan all iterations along a first axis; those of a branch that was not taken are empty. Where
        bodies make tensors of another shape in every iteration, sites in bodies have none.
        """
        return self._capture(names, as_feeds(feeds, self.specs))[0]

    def _capture(
        self, names: Sequence[str], feeds: Feeds, outputs: Sequence[str] = ()
    ) -> tuple[dict[str, list[Array]], dict[str, Any]]:
        """Values at sites, and ``outputs`` of the model in the same run."""
        try:
            return self._captured(names, feeds, outputs, bodies=True)
        except refusals() as error:
            if all(graph is self.marked.graph for graph in all_graphs(self.marked.graph)):
                raise
            logger.warning("what bodies make cannot be brought out of them: %s", first_line(error))
            return self._captured(names, feeds, outputs, bodies=False)

    def _captured(
        self, names: Sequence[str], feeds: Feeds, outputs: Sequence[str], *, bodies: bool
    ) -> tuple[dict[str, list[Array]], dict[str, Any]]:
        """See :meth:`_capture`; values in bodies, other than the steps of recurrent layers, only where ``bodies`` says so."""
        simulation = self.simulation()
        settle_lengths(simulation.model, feeds)
        places = _all_places(simulation, names, bodies)
        shown = show(Builder(simulation.model), [value for _, value in places])
        fetch = list(dict.fromkeys([*(str(value.name) for value in shown.values()), *outputs]))
        values = {}
        if fetch:
            session = open_session(simulation.model, self.providers, threads=self.threads)
            values = dict(zip(fetch, run_session(session, feeds, "the simulation", fetch), strict=True))
        found: dict[str, list[Array]] = {}
        for name, value in places:
            found.setdefault(name, []).append(values[str(shown[value].name)])
        return found, {name: values[name] for name in outputs}

    def _sample(self, result: QdqResult, feeds: Feeds) -> Samples:
        """Values of the simulation on ``feeds``, at the sites that a file has."""
        names = [
            site.name
            for site in self.quantizers.values()
            if site.role in ("input", "output") and site.name in result.tensors and site.enabled
        ]
        indices, rows = self._ordered_rows()
        if rows:
            names.append(indices)
        sites, outputs = self._capture(names, as_feeds(feeds, self.specs), self.output_names)
        self._tell_of_nan(outputs.values(), feeds)
        chosen = sites.pop(indices, ())
        return Samples(sites, feeds, named_arrays(outputs), self._row_orders(chosen, self.output_names))

    def _as_qdq(
        self,
        target: str | Target,
        recurrent: RecurrentForm | None,
        bias: Any,
        feeds: Feeds | None = None,
        **options: Any,
    ) -> QdqResult:
        """The file that an export for ``target`` would write."""
        marked = write_recurrent(self.marked, recurrent_form(self, recurrent, target))
        encodings, rest = self._encodings(), options.pop("rest", None)
        is_onnx = find_target(target).format == "onnx"
        half = half_for(encodings, feeds, rest) if is_onnx and feeds is not None else None
        return to_qdq(marked, encodings, bias=bias_form(self, bias), target=target, half=half, **options)

    def report(self, path: str | Path, data: Any = None, **options: Any) -> Path:
        """Write one HTML file that shows the simulation and what it costs; see :func:`bitwright.report.simulation_report`."""
        from bitwright.report import simulation_report

        return simulation_report(self, path, data, **options)

    # -- files

    def export(
        self,
        path: str | Path,
        filename_prefix: str,
        *,
        encoding_version: str = "1.0.0",
        bias: BiasForm = "int32",
        activation: ActivationForm = "unsigned",
        recurrent: RecurrentForm | None = None,
        weight_only: ProductForm = "exact",
        target: str = DEFAULT_TARGET,
        format: FileFormat | None = None,
        every_tensor: bool = False,
        unsigned_weights: bool | None = None,
        rest: str | None = None,
        io: str | Mapping[str, str] | None = None,
        normalize: Mapping[str, Any] | None = None,
        opset: int | None = None,
        ir_version: int | None = None,
        external: bool | None = None,
        samples: bool = True,
        measure_speed: bool = False,
    ) -> Exported:
        """Write the model for deployment into the folder ``path``, created if missing.

        The files appear together or not at all:

        - ``<prefix>.onnx``: QuantizeLinear/DequantizeLinear, integer weights under the initializers' names;
        - ``<prefix>_float.onnx`` and ``<prefix>.encodings``: the float model and its encodings, for compilers;
        - ``<prefix>_sites.json``: every site's spec and encoding;
        - ``<prefix>_manifest.json``: versions, rules and hashes;
        - ``<prefix>_samples.npz``: the example's values at every site, which ``bitwright verify`` compares with.

        Args:
            path: folder.
            filename_prefix: stem of the files.
            encoding_version: ``"0.6.1"``, ``"1.0.0"`` or ``"2.0.0"``.
            bias: ``"int32"`` writes biases on the grid integer kernels use, ``"float"`` leaves them alone.
            activation: ``"unsigned"`` writes signed activation grids as equal unsigned ones.
            recurrent: ``"scan"`` writes recurrent layers as Scan with quantizers inside the steps, ``"native"`` as the
                operators, whose insides are float; their encodings are in the encodings file either way. By default what
                the target runs fastest, if no step is quantized inside, and otherwise ``"scan"``.
            weight_only: products of float activations with quantized weights: ``"exact"`` computes them as simulated, in float,
                in every session, with MatMulNBits for 4 bits where the target runs that; ``"fused"`` lets ONNX Runtime make
                MatMulNBits of them that quantizes the activations to 8 bits by itself.
            target: the runtime that the files are for, a row of :data:`bitwright.export.targets.TARGETS`: it decides how
                weights of 4 bits are stored.
            format: ``"tflite"`` is short for ``target="litert"``, which writes ``<prefix>.tflite`` beside the ONNX files.
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
            opset, ir_version: of the ONNX files, for compilers that read older ones: down to what the operators and formats of
                the model allow, and an error that names the operator where not. By default opset 21, or the model's newer one.
            external: keep large tensors of the ONNX files in ``<name>.data`` beside them, which other programs map; ``None`` does
                so from 1.5 GiB on.
            samples: write the samples; fewer of them, with a note, when all would pass 64 MiB and the batch axis is free.
            measure_speed: run the files beside the float model for about a second, and warn where they are slower on this
                machine; ``exported.speed`` has the ratio. Off by default: it takes as long as some small exports.

        Raises:
            CalibrationError: the simulation has no encodings yet.
            ConfigError: unknown ``encoding_version``, ``bias``, ``activation``, ``weight_only``, ``target`` or ``recurrent``,
                or ``filename_prefix`` cannot begin the names of files.
            ExportError: a format cannot be written, or the folder cannot.
        """
        check_destination(path, filename_prefix)
        check_encoding_version(encoding_version)
        target = target_for(target, format).name
        edges = edges_of(io, normalize)
        check_half("rest", rest)
        encodings = self._encodings()
        example = representable(edges, self.example())
        self._close_large()  # what is written takes memory too

        def of_rows(result: QdqResult, rows: int | None) -> Samples:
            return self._sample(result, {n: x[:rows] if x.ndim else x for n, x in example.items()})

        forms = FileForms(
            encoding_version=encoding_version, bias=bias_form(self, bias), activation=activation, recurrent=recurrent,
            weight_only=weight_only, target=target, every_tensor=every_tensor, unsigned_weights=unsigned_weights, rest=rest,
            edges=edges, opset=opset, ir_version=ir_version, external=external,
        )  # fmt: skip
        exported = write_artefacts(
            self, path, filename_prefix, self.marked, encodings, forms,
            data=[plain(array) for array in example.values()], samples=of_rows if samples else None, check=wrong_kernels,
        )  # fmt: skip
        return measured(exported, target) if measure_speed else exported

    def _close_large(self) -> None:
        """Close the sessions of a large model until they are needed again."""
        if is_large(self.marked):
            self.forget_simulations()
            return_memory()

    def verify(
        self,
        feeds: Any = None,
        *,
        bias: BiasForm = "int32",
        activation: ActivationForm = "unsigned",
        recurrent: RecurrentForm | None = None,
        weight_only: ProductForm = "exact",
        target: str = DEFAULT_TARGET,
        rest: str | None = None,
        runtime: str = "onnxruntime",
    ) -> VerifyReport:
        """Compare the simulation with the exported file in a runtime, layer by layer.

        Each layer is fed the simulation's own input; codes are compared with float kernels and with integer kernels.

        Args:
            feeds: what to compare on; the example input by default.
            bias, activation, recurrent, weight_only, target, rest: as for :meth:`export`.
            runtime: whose integer kernels are compared: ``"onnxruntime"``, ``"openvino"`` or ``"litert"``.

        Raises:
            CalibrationError, ModelError, ExportError: as :meth:`export` and :meth:`run`.
        """
        row = target_in(target, runtime)
        checked = self.example() if feeds is None else as_feeds(feeds, self.specs)
        result = self._as_qdq(row, recurrent, bias, checked, activation=activation, weight_only=weight_only, rest=rest)
        samples = self._sample(result, checked)
        values = (result.model, samples.sites, samples.inputs)
        return verify_layers(*values, outputs=samples.outputs, orders=samples.orders, runtime=runtime)

    def drift(
        self,
        a: str = "simulation",
        b: str = "onnxruntime",
        feeds: Any = None,
        *,
        bias: BiasForm = "int32",
        activation: ActivationForm = "unsigned",
        recurrent: RecurrentForm | None = None,
        weight_only: ProductForm = "exact",
        target: str = DEFAULT_TARGET,
        rest: str | None = None,
    ) -> DriftReport:
        """Find the first operator where two of float model, simulation, exported file and runtime differ, and the cause.

        Args:
            a, b: ``"float"``, ``"simulation"``, ``"file"``, or a runtime.
            feeds: what to compare on; the example input by default.
            bias, activation, recurrent, weight_only, target, rest: as for :meth:`export`.

        Returns:
            See :func:`bitwright.compare.drift.drift`.

        Raises:
            CalibrationError, ModelError, ExportError: as :meth:`export` and :meth:`run`.
            ConfigError: ``a`` or ``b`` is none of these, or both are the same.
        """
        row = target_in(target, a, b)
        checked = self.example() if feeds is None else as_feeds(feeds, self.specs)
        result = self._as_qdq(row, recurrent, bias, checked, activation=activation, weight_only=weight_only, rest=rest)
        samples = self._sample(result, checked)
        plain_model = strip_sites(restore_native(self.marked)).model
        return drift_models(a, b, plain_model, result.model, samples)

    def runs_as(
        self,
        profile: str | Path,
        *,
        bias: BiasForm = "int32",
        activation: ActivationForm = "unsigned",
        recurrent: RecurrentForm | None = None,
        weight_only: ProductForm = "exact",
        target: str = DEFAULT_TARGET,
    ) -> TargetSession:
        """Run the model that :meth:`export` would write as a target computes it, without the target.

        Args:
            profile: of the target: a name of `bitwright list profiles`, or the path of a TOML file.
            bias, activation, recurrent, weight_only, target: as for :meth:`export`; ``target`` is the profile's by default.

        Returns:
            See :class:`bitwright.compare.target.TargetSession`: ``session.run(None, feeds)``, as a session of ONNX Runtime.

        Raises:
            CalibrationError, ModelError, ExportError: as :meth:`export`.
            ConfigError: there is no such profile.
        """
        found, row = target_of(profile, target)
        result = self._as_qdq(row, recurrent, bias=bias, activation=activation, weight_only=weight_only)
        return session_in_memory(result.model, self.example(), found)

    def saturation(
        self,
        batches: Any = None,
        *,
        bias: BiasForm = "int32",
        activation: ActivationForm = "unsigned",
        recurrent: RecurrentForm | None = None,
        weight_only: ProductForm = "exact",
        target: str = DEFAULT_TARGET,
    ) -> SaturationReport:
        """Find layers that saturate or overflow in integer kernels, by their weights and on data.

        Args:
            batches: inputs to count on; the example by default.
            bias, activation, recurrent, weight_only, target: as for :meth:`export`.

        Raises:
            CalibrationError, ModelError, ExportError: as :meth:`export`; there is no batch.
        """
        feeds = [self.example()] if batches is None else [as_feeds(batch, self.specs) for batch in batches]
        result = self._as_qdq(target, recurrent, bias=bias, activation=activation, weight_only=weight_only)
        return saturation(result.model, feeds)

    def benchmark(
        self,
        *,
        runtime: str = "onnxruntime",
        threads: Sequence[int] | None = None,
        seconds: float = 2.0,
        rounds: int | None = None,
        **options: Any,
    ) -> BenchmarkReport:
        """Measure what :meth:`export` would write beside its float model, on the example input.

        Args:
            runtime, threads, seconds, rounds: see :func:`bitwright.runtimes.benchmark.benchmark`.
            options: of :meth:`export` that change the file: ``target``, ``recurrent``, ``weight_only``, ...

        Raises:
            CalibrationError, ConfigError, ExportError: as :meth:`export`; the runtime is missing, or refuses the file.
        """
        measured = {"runtime": runtime, "threads": threads, "seconds": seconds, "rounds": rounds}
        return benchmark_sim(lambda folder: self.export(folder, "model", **options), measured)

    @checks_arguments
    def save_checkpoint(self, folder: str | Path) -> Path:
        """Write parameters, quantizers and what calibration saw; see :mod:`bitwright.onnx.simulation.quantsim`."""
        return save_checkpoint(self, folder)

    @checks_arguments
    def load_checkpoint(self, folder: str | Path) -> None:
        """Read what :meth:`save_checkpoint` wrote into this simulation of the same model."""
        with self._changing("load_checkpoint"):
            load_checkpoint(self, folder)

    def __repr__(self) -> str:
        state = "calibrated" if self.calibrated else "not calibrated"
        return f"QuantizationSimModel({len(self.graph)} operators, {self.quantizers!r}, {state})"


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two states hold the same encoding objects, which are immutable."""
    return len(one) == len(other) and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(one, other, strict=True))


_OTHER_MODEL = "build the simulation from the same model and rules, with the same methods applied to the model before"


def save_checkpoint(sim: Any, folder: str | Path) -> Path:
    """Write parameters, quantizers and calibration statistics into ``folder``, created if missing.

    ``sim`` is a :class:`bitwright.onnx.QuantizationSimModel`. An earlier checkpoint there is replaced at once: whatever stops
    this call, :func:`load_checkpoint` finds the earlier one or the new one, whole.

    Raises:
        ExportError: the folder cannot be written; an earlier checkpoint in it is as it was.
    """
    from safetensors.numpy import save

    return write_checkpoint(folder, sim, save(_parameters(sim)), state_of(sim, lambda site: {}))


def load_checkpoint(sim: Any, folder: str | Path) -> None:
    """Read a checkpoint into ``sim``, which must simulate the same model under the same rules.

    Everything is read and checked before anything changes. What calibration saw is read too: bits, range methods and symmetry
    can be changed, and files for other targets be written, without data.

    Raises:
        EncodingsError: no checkpoint there, a part of it is damaged, missing or of another checkpoint, or it is one of
            another model (which names are missing or extra).
    """
    from safetensors.numpy import load

    folder = Path(folder)
    loaded = read_checkpoint(folder, load)
    own = _parameters(sim)
    check_names(tensors_of(folder), own, loaded.tensors, _OTHER_MODEL)
    for name, tensor in loaded.tensors.items():
        check_tensor(folder, name, tensor, own[name])
    settings = settings_in(sim, folder, loaded, _OTHER_MODEL)
    with all_or_nothing(sim, parameters=True):
        for name, tensor in loaded.tensors.items():
            if tensor.tobytes() != own[name].tobytes():
                kind = sim.marked.graph.initializers[name].const_value
                assert kind is not None
                raw = kind.dtype.numpy().kind == "V"
                sim.set_parameter(name, tensor.view(kind.dtype.numpy()) if raw else tensor)
        if loaded.repairs != sim.repairs:
            sim._put_in_force(loaded.repairs)
        for name, setting in settings.items():
            setting.put(sim.quantizers[name])
        put_statistics(sim, loaded)
        sim.calibrated, sim.calibration_log = loaded.calibrated, None
        sim.forget_simulations()


def _parameters(sim: Any) -> dict[str, NDArray[Any]]:
    """Numeric initializers by name; dtypes that numpy lacks as integers of the same bytes."""
    found = {}
    for name, value in sim.marked.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.dtype.is_string():
            continue
        array = tensor.numpy()
        if array.dtype.kind == "V":
            array = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
        found[name] = np.array(array, array.dtype.newbyteorder("="), order="C")
    return found
