"""``QuantizationSimModel``: an ONNX model that computes what its quantized self will compute."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bitwright.comparison.drift import drift_models
from bitwright.comparison.report import DriftReport
from bitwright.comparison.saturation import SaturationReport, saturation
from bitwright.core.graph.graph import Graph
from bitwright.core.health.repair import Repair
from bitwright.core.health.site_health import HealthTable
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.spec import NonFinite, Preset, RangeMethod
from bitwright.core.placement.coverage import Coverage
from bitwright.core.placement.place import place
from bitwright.core.placement.plan import Plan
from bitwright.core.placement.rules import Rules
from bitwright.core.placement.user_scheme import bit_widths, make_rules
from bitwright.core.simulation.calibration import CalibrationLog
from bitwright.core.simulation.occupancy import Lock, Occupancy
from bitwright.core.simulation.protocols import Undo
from bitwright.core.simulation.sites import derived_biases, place_quantizers, required_encodings
from bitwright.errors import CalibrationError, checks_arguments, checks_methods
from bitwright.export.artefacts import Exported
from bitwright.export.deployed import benchmark_sim
from bitwright.export.encodings.of_simulation import load_encodings, save_encodings, set_and_freeze_param_encodings
from bitwright.export.files.onnx_file import checked_on_failure
from bitwright.export.qdq.markers import strip_sites
from bitwright.export.qdq.products import ProductForm
from bitwright.export.qdq.writing import ActivationForm, BiasForm
from bitwright.export.recurrent.write import restore_native
from bitwright.export.targets import DEFAULT_TARGET, FileFormat, RecurrentForm, target_in
from bitwright.export.verify.report import VerifyReport, verify_layers
from bitwright.onnx.given.read_qdq import take_quantizers
from bitwright.onnx.given.sites import adopt
from bitwright.onnx.model.data import Feeds, as_feeds, input_specs, random_feeds
from bitwright.onnx.model.graph import build_graph
from bitwright.onnx.model.load import Source, load_model
from bitwright.onnx.model.opset import modernize
from bitwright.onnx.model.session import (
    Providers,
    check_providers,
    free_memory,
    is_large,
    open_session,
    return_memory,
    run_session,
)
from bitwright.onnx.simulation.calibrating import CalibrationSession, calibrating, feed
from bitwright.onnx.simulation.deployment import as_qdq, capture, export, sampled
from bitwright.onnx.simulation.repairs import holds_nan, name_nan
from bitwright.onnx.simulation.simulate import Simulation, mark_sites, marked_constants, simulation_model
from bitwright.onnx.simulation.state import remember, set_parameter
from bitwright.onnx.simulation.trials import TrialSession
from bitwright.onnx.simulation.weights import WeightFile, file_for
from bitwright.progress import collector_paused
from bitwright.runtimes.benchmark import BenchmarkReport
from bitwright.tables import Tabular

logger = logging.getLogger("bitwright")

Array = NDArray[Any]
_INSTEAD = "work on another QuantizationSimModel of the same model, which load_encodings(path) makes equal to this one"


@checks_methods
class QuantizationSimModel(Tabular):
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

    Raises:
        ModelError: the model cannot be read, converted or run.
        FormatError: impossible bit width.
        ConfigError: unknown scheme or provider, or a configuration that cannot be read.
    """

    _also = ("calibrated", "quantizers")

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
    ) -> None:
        check_providers(providers)
        self._occupancy, self._lock = Occupancy(_INSTEAD), Lock()
        self.rules: Rules = make_rules(
            quant_scheme,
            preset,
            config_file,
            param_bw=default_param_bw,
            output_bw=default_activation_bw,
            data_type=default_data_type,
            names=("default_param_bw", "default_activation_bw"),
        )
        self.providers, self.threads = providers, threads
        self.memory_budget = free_memory() // 4 if memory_budget is None else int(memory_budget)
        self.calibrated = False
        self.calibration_log: CalibrationLog | None = None
        self.origin: dict[str, str] = {}  # what the file is to tell of how this simulation was made
        self._told_of_nan = False
        self._calibrating = False
        self.repairs: tuple[Repair, ...] = ()  # what stabilize put into effect
        self.repaired: list[Any] = []  # where in the marked model they stand
        self._weights: WeightFile | None = None
        self.output_values: dict[str, str] = {}  # an exported model's outputs are called as the graph's are
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
        self.graph: Graph = view.graph
        self.plan: Plan = place(self.graph, self.rules)
        adopted = adopt(self.plan, self.graph, given) if given else None
        if adopted is not None:
            self.plan = adopted.plan
        for line in self.plan.unused:
            logger.warning(line)
        self.marked = mark_sites(loaded.model, self.plan.sites.values(), view.node)
        self.constants = marked_constants(self.marked)
        self.quantizers = place_quantizers(self.plan, self.graph, self.constants.get)
        self._biases = derived_biases(self.quantizers, self.constants.get)
        if adopted is not None:
            note, self.calibrated = adopted.put_in_force(self.quantizers)
            self.notes = (*self.notes, note)
            logger.info("%s", note)

    def set_parameter(self, name: str, value: Array) -> None:
        """Give an initializer a new value of the same shape; its dtype stays, and so do all calibrated encodings.

        Raises:
            KeyError: the model has no such initializer.
            ModelError: the shape differs.
        """
        with self._occupancy.exclusive("set_parameter"), self._lock:
            set_parameter(self, name, value)

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
        """Find the encodings: weights from their values, activations from the data that passes them.

        Weights are quantized meanwhile, activations are in float. Statistics merge exactly, so the encodings do not
        depend on order or batch size.

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
        with self.calibrating(resume=resume, allow_unreached=allow_unreached, non_finite=non_finite) as session:
            feed(self, session, data, args, progress)

    def calibrating(
        self, *, resume: bool = False, allow_unreached: bool = False, non_finite: NonFinite = "error"
    ) -> AbstractContextManager[CalibrationSession]:
        """Observe every run of a session in a block; at its end the encodings are found and put into effect.

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
        return calibrating(self, resume, allow_unreached, non_finite)

    def example(self) -> Feeds:
        """The example input: ``dummy_input``, or random values where none was given."""
        with self._lock:
            if self._dummy is None:
                self._dummy = next(random_feeds(self.specs))
            return self._dummy

    def health(self) -> HealthTable:
        """What calibration saw at every site, and what the weights hold: NaN, Inf, zero and constant channels, saturation."""
        return self.quantizers.health(self.constants)

    def _refresh_biases(self) -> None:
        with self._lock:  # another thread must not see one that is being derived
            for bias in self._biases.values():
                bias.refresh()

    # -- its state

    def remember(self, *, parameters: bool = False) -> Undo:
        """Keep the state of the simulation: every quantizer, whether it is calibrated, the repairs, what calibration noted.

        Args:
            parameters: keep the values of all initializers too.

        Returns:
            A function that brings the state back, as often as it is called.
        """
        return remember(self, parameters)

    # -- use

    @property
    def session(self) -> Any:
        """An ``onnxruntime.InferenceSession`` of the simulation as it stands; made anew after changes.

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
        """What runs like :attr:`session` and follows every later change of the quantizers without being made anew.

        For searches, which change bits and scales between runs over little data; see
        :mod:`bitwright.onnx.simulation.trials`. Sums are rounded in another order than in :attr:`session`.
        """
        return TrialSession(self)

    def forget_simulations(self) -> None:
        """Let the session be made anew: the marked model was changed."""
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

    def simulation(self) -> Simulation:
        """The simulation as a model of its own: standard ONNX, its quantizers and what enters them."""
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
        if not self._told_of_nan and any(map(holds_nan, found)):
            self._told_of_nan = True
            name_nan(self, checked)
        return found

    def capture(self, names: Sequence[str], feeds: Any) -> dict[str, list[Array]]:
        """Quantized values at activation sites, one array per place the site marks.

        Those inside recurrent layers have all steps, ``[length, 1, batch, hidden]`` in the order of time, those in the body
        of another Loop or Scan all iterations along a first axis; those of a branch that was not taken are empty. Where
        bodies make tensors of another shape in every iteration, sites in bodies have none.
        """
        return capture(self, names, as_feeds(feeds, self.specs))

    def report(self, path: str | Path, data: Any = None, **options: Any) -> Path:
        """Write one HTML file that shows the simulation and what it costs; see :func:`bitwright.report.simulation_report`."""
        from bitwright.report import simulation_report

        return simulation_report(self, path, data, **options)

    def coverage(self) -> Coverage:
        """Every value and parameter: quantized how, shared with whom, or not and why. Print it."""
        return Coverage.of(self.plan, self.graph, self.quantizers.changes(self.plan), {})

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
        opset: int | None = None,
        ir_version: int | None = None,
        samples: bool = True,
        measure_speed: bool = False,
    ) -> Exported:
        """Write the model for deployment into the folder ``path``, which is made if need be.

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
            opset, ir_version: of the ONNX files, for compilers that read older ones: down to what the operators and formats of
                the model allow, and an error that names the operator where not. By default opset 21, or the model's newer one.
            samples: write the samples; fewer of them, with a note, when all would pass 64 MiB and the batch axis is free.
            measure_speed: run the files beside the float model for about a second, and warn where they are slower on this
                machine; ``exported.speed`` has the ratio. Off by default: it takes as long as some small exports.

        Raises:
            CalibrationError: the simulation has no encodings yet.
            ConfigError: unknown ``encoding_version``, ``bias``, ``activation``, ``weight_only``, ``target`` or ``recurrent``,
                or ``filename_prefix`` cannot begin the names of files.
            ExportError: a format cannot be written, or the folder cannot.
        """
        return export(
            self, path, filename_prefix, target, format, encoding_version=encoding_version, bias=bias,
            activation=activation, recurrent=recurrent, weight_only=weight_only, every_tensor=every_tensor,
            opset=opset, ir_version=ir_version, samples=samples, measure_speed=measure_speed,
        )  # fmt: skip

    def _close_large(self) -> None:
        """Let go of the sessions of a large model; they are opened again when they are needed."""
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
        runtime: str = "onnxruntime",
    ) -> VerifyReport:
        """Compare the simulation with the exported file in a runtime, layer by layer.

        Each layer is fed the simulation's own input; codes are compared with float kernels and with integer kernels.

        Args:
            feeds: what to compare on; the example input by default.
            bias, activation, recurrent, weight_only, target: as for :meth:`export`.
            runtime: whose integer kernels are compared: ``"onnxruntime"``, ``"openvino"`` or ``"litert"``.

        Raises:
            CalibrationError, ModelError, ExportError: as :meth:`export` and :meth:`run`.
        """
        row = target_in(target, runtime)
        result, samples = sampled(self, feeds, row, bias, recurrent, activation=activation, weight_only=weight_only)  # fmt: skip
        return verify_layers(result.model, samples.sites, samples.inputs, outputs=samples.outputs, runtime=runtime)  # fmt: skip

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
    ) -> DriftReport:
        """Where two of float model, simulation, exported file and runtime part, and why.

        Args:
            a, b: ``"float"``, ``"simulation"``, ``"file"``, or a runtime.
            feeds: what to compare on; the example input by default.
            bias, activation, recurrent, weight_only, target: as for :meth:`export`.

        Returns:
            See :func:`bitwright.comparison.drift.drift`.

        Raises:
            CalibrationError, ModelError, ExportError: as :meth:`export` and :meth:`run`.
            ConfigError: ``a`` or ``b`` is none of these, or both are the same.
        """
        row = target_in(target, a, b)
        result, samples = sampled(self, feeds, row, bias, recurrent, activation=activation, weight_only=weight_only)  # fmt: skip
        plain_model = strip_sites(restore_native(self.marked)).model
        return drift_models(a, b, plain_model, result.model, samples)

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
        """Which layers saturate or overflow in integer kernels, by their weights and on data.

        Args:
            batches: inputs to count on; the example by default.
            bias, activation, recurrent, weight_only, target: as for :meth:`export`.

        Raises:
            CalibrationError, ModelError, ExportError: as :meth:`export`; there is no batch.
        """
        feeds = [self.example()] if batches is None else [as_feeds(batch, self.specs) for batch in batches]
        result = as_qdq(self, target, bias, recurrent, activation=activation, weight_only=weight_only)
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

    def save_encodings(self, path: str | Path, version: str = "2.0.0") -> Path:
        """Write every encoding under its site's name; see :mod:`bitwright.export.encodings.versions`."""
        return save_encodings(self, path, version)

    def load_encodings(
        self, path: str | Path | dict[str, Any], strict: bool = True, *, partial: bool = False
    ) -> tuple[str, ...]:
        """Take the encodings of a file; sites without one are disabled, names that match nothing are errors if ``strict``.

        With ``partial``, sites without one stay as they are. Returns the sites that got one.
        """
        with self._occupancy.exclusive("load_encodings"):
            found = load_encodings(self, path, strict, partial)
            self.calibrated = True
            return found

    def set_and_freeze_param_encodings(self, path: str | Path | dict[str, Any]) -> None:
        """Take the parameter encodings of a file and keep them through calibration."""
        with self._occupancy.exclusive("set_and_freeze_param_encodings"):
            set_and_freeze_param_encodings(self, path)

    def __repr__(self) -> str:
        state = "calibrated" if self.calibrated else "not calibrated"
        return f"QuantizationSimModel({len(self.graph)} operators, {self.quantizers!r}, {state})"

    def records(self) -> list[dict[str, Any]]:
        """One mapping per quantizer site."""
        return self.quantizers.rows

    def _repr_html_(self) -> str:
        return self.quantizers._repr_html_(repr(self))


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two states hold the same encodings; these never change, so identity is enough."""
    return len(one) == len(other) and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(one, other, strict=True))
