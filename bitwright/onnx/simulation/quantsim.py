"""``QuantizationSimModel``: an ONNX model that computes what its quantized self will compute."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.comparison.drift import drift_models
from bitwright.comparison.report import DriftReport
from bitwright.comparison.saturation import SaturationReport, saturation
from bitwright.core.graph.graph import Graph
from bitwright.core.health.repair import Repair
from bitwright.core.health.report import HealthReport, check_parameters
from bitwright.core.health.site_health import HealthTable
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.spec import NonFinite, Preset, RangeMethod, check_policy
from bitwright.core.placement.coverage import Coverage
from bitwright.core.placement.place import place
from bitwright.core.placement.plan import Plan
from bitwright.core.placement.rules import Rules
from bitwright.core.placement.user_scheme import QuantizationDataType, QuantScheme, bit_widths, make_rules
from bitwright.core.simulation.calibration import BatchGate, CalibrationLog, nested_calibration
from bitwright.core.simulation.occupancy import Lock, Occupancy
from bitwright.core.simulation.protocols import Undo
from bitwright.core.simulation.quantizer import DerivedBias, Quantizer
from bitwright.core.simulation.sites import Site, SiteMap
from bitwright.core.simulation.state import all_or_nothing
from bitwright.errors import CalibrationError, ConfigError, ModelError, checks_arguments
from bitwright.export.artefacts import (
    Exported,
    Samples,
    bias_form,
    check_encoding_version,
    recurrent_form,
    write_artefacts,
)
from bitwright.export.deployed import benchmark_sim, measured
from bitwright.export.encodings.of_simulation import (
    load_encodings,
    save_encodings,
    set_and_freeze_param_encodings,
)
from bitwright.export.files.atomic import check_destination
from bitwright.export.files.onnx_file import let_go
from bitwright.export.qdq.forms import Builder
from bitwright.export.qdq.markers import STATES, is_site, site_of
from bitwright.export.qdq.products import ProductForm, guard_outputs
from bitwright.export.qdq.recurrent import restore_native, write_recurrent
from bitwright.export.qdq.write import ActivationForm, BiasForm, QdqResult, strip_sites, to_qdq
from bitwright.export.targets import DEFAULT_TARGET, FileFormat, RecurrentForm, target_for
from bitwright.export.verify.outputs import named_arrays
from bitwright.export.verify.report import VerifyReport, verify_layers
from bitwright.export.verify.runtime import refusals
from bitwright.export.verify.samples import plain
from bitwright.onnx.model.data import Feeds, as_feeds, input_specs, random_feeds
from bitwright.onnx.model.graph import build_graph
from bitwright.onnx.model.instrument import Instrument
from bitwright.onnx.model.load import Source, load_model
from bitwright.onnx.model.opset import modernize
from bitwright.onnx.model.session import (
    IN_MEMORY,
    Providers,
    check_providers,
    first_line,
    free_memory,
    open_session,
    return_memory,
    weight_bytes,
)
from bitwright.onnx.model.untrusted import checked_on_failure
from bitwright.onnx.simulation.calibrate import Calibrator
from bitwright.onnx.simulation.given_sites import Adopted, adopt
from bitwright.onnx.simulation.read_qdq import take_quantizers
from bitwright.onnx.simulation.repairs import put_in_force
from bitwright.onnx.simulation.simulate import Simulation, mark_sites, marked_constants, simulation_model
from bitwright.onnx.simulation.trials import TrialSession
from bitwright.onnx.simulation.weights import WeightFile
from bitwright.progress import collector_paused, progress
from bitwright.runtimes.benchmark import BenchmarkReport
from bitwright.tables import Tabular

logger = logging.getLogger("bitwright")

Array = NDArray[Any]
_ACTIVATIONS = ("input", "output")
_INSTEAD = "work on another QuantizationSimModel of the same model, which load_encodings(path) makes equal to this one"


class CalibrationSession:
    """What a calibration callback is given: runs like an ``onnxruntime.InferenceSession``, and is watched."""

    def __init__(self, calibrator: Calibrator, outputs: Sequence[str], occupancy: Occupancy) -> None:
        self._calibrator, self._outputs, self._occupancy = calibrator, list(outputs), occupancy
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
                    "session.run",
                    f"the model has no output {name!r}",
                    f"use {', '.join(self._outputs)}, or None",
                )
        found = self._calibrator.run(feeds)
        return [found[index[name]] for name in wanted]

    def get_inputs(self) -> list[Any]:
        """The inputs; each has ``name``, ``dtype`` and ``shape``."""
        return list(self._calibrator.specs)


class QuantizationSimModel(Tabular):
    """A copy of an ONNX model that computes with quantized weights and activations, in ONNX Runtime.

    The model is read, not changed; ``sim.session`` is an ordinary ``InferenceSession`` with the model's own inputs
    and outputs. Quantized tensors are found by what operators read and write, so names may be anything.

    Args:
        model: path, ``onnx.ModelProto`` or ``onnx_ir.Model``.
        dummy_input: one feed (a dict, an array, or a tuple in the model's order): gives shapes that the file leaves
            open, and is the example for export and verification. Random values serve where none is given.
        quant_scheme: how ranges are chosen: ``min_max`` (default), ``tf_enhanced``, ``percentile``, ``mse``,
            ``entropy``, a :class:`QuantScheme` or a :class:`RangeMethod`.
        default_param_bw: bits of weights, 2 to 32.
        default_activation_bw: bits of activations, 2 to 32.
        config_file: rules: path of an AIMET quantsim JSON or of our YAML, TOML or JSON, the name of a shipped
            configuration (``default``, ``htp_v73``, ...), or a dict; ``None`` means ours.
        providers: ONNX Runtime's execution providers; the CPU by default.
        default_data_type: ``int``, or ``float`` (bit widths 16 or 8: float16, float8_e4m3).
        preset: instead of the bit widths: ``"w8a8"``, ``"w4a8"``, ``"w4a16"``, ... (``PRESETS``).
        memory_budget: bytes of activations that calibration may hold beside what the model itself needs; a quarter
            of the free memory by default.
        threads: of one operator; 0 leaves the number to ONNX Runtime.

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
        quant_scheme: str | QuantScheme | RangeMethod | None = None,
        default_param_bw: int = 8,
        default_activation_bw: int = 8,
        config_file: str | Path | dict[str, Any] | Rules | None = None,
        providers: Providers | None = None,
        *,
        default_data_type: str | QuantizationDataType = QuantizationDataType.int,
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
        self._simulations: dict[str, tuple[tuple[Any, ...], Any]] = {}

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
        self._make_quantizers()
        if adopted is not None:
            self._adopt(adopted)

    def _adopt(self, adopted: Adopted) -> None:
        """Take over the encodings of a model that was quantized already; they survive calibration."""
        for name, encoding in adopted.encodings.items():
            quantizer = self.quantizers[name].quantizer
            quantizer.encoding, quantizer.frozen = encoding, True
        for name in adopted.unused:
            self.quantizers[name].enabled = False
        missing = [s for s in self.quantizers.values() if s.enabled and s.encoding is None]
        self.calibrated = all(site.quantizer.derived for site in missing)
        more = (
            f"; {len(adopted.unused)} other sites of the rules are in float, as there"
            if adopted.unused
            else ""
        )
        note = f"the model brought {len(adopted.encodings)} encodings with it, which are in effect and frozen{more}"
        self.notes = (*self.notes, note)
        logger.info("%s", note)

    def _make_quantizers(self) -> None:
        quantizers: dict[str, Quantizer] = {}
        sites: dict[str, Site] = {}
        for planned in self.plan.sites.values():
            quantizer = quantizers.get(planned.group)
            if quantizer is None:
                quantizer = quantizers[planned.group] = Quantizer(planned.name, planned.role, planned.spec)
            sites[planned.name] = Site(planned, quantizer, self.graph)
        self.quantizers = SiteMap(sites, self._values_of)
        self._biases = []
        for planned in self.plan.sites.values():
            if planned.role == "bias" and planned.follows:
                source, weight = (sites[name].quantizer for name in planned.follows)
                quantizer = sites[planned.name].quantizer
                self._biases.append(
                    DerivedBias(planned.name, quantizer, source, weight, self.constants.get(planned.name))
                )

    def _values_of(self, site: str) -> Array | None:
        return self.constants.get(site)

    def set_parameter(self, name: str, value: Array) -> None:
        """Give an initializer a new value of the same shape; its dtype stays, and so do all calibrated encodings.

        Raises:
            KeyError: the model has no such initializer.
            ModelError: the shape differs.
        """
        with self._occupancy.exclusive("set_parameter"), self._lock:
            self._set_parameter(name, value)

    def _set_parameter(self, name: str, value: Array) -> None:
        holder = self.marked.graph.initializers[name]
        tensor = holder.const_value
        assert tensor is not None, name
        if tuple(value.shape) != tuple(tensor.shape.numpy()):
            raise ModelError(
                name,
                f"the new value has shape {value.shape}, the parameter {tuple(tensor.shape.numpy())}",
                "keep the shape",
            )
        array = np.ascontiguousarray(value).astype(tensor.dtype.numpy())
        holder.const_value = ir.Tensor(array, dtype=tensor.dtype, name=name)
        for site in self._sites_of.get(name, ()):
            self.constants[site] = np.asarray(array, np.float32) if array.dtype.kind == "V" else array
            if site in self._bias_at:
                self._bias_at[site].replace(self.constants[site])
        self._simulations.clear()

    @cached_property
    def _bias_at(self) -> dict[str, DerivedBias]:
        """Site -> the bias whose grid is derived there."""
        return {bias.site: bias for bias in self._biases}

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
        with self.calibrating(
            resume=resume, allow_unreached=allow_unreached, non_finite=non_finite
        ) as session:
            calibrator = session._calibrator
            self._feed(calibrator, session, data, args, progress)
            if not calibrator.runs:
                raise CalibrationError(
                    "compute_encodings",
                    "the callback never ran its session" if callable(data) else "the data held no batch",
                    "pass a non-empty list (a generator can be used only once), or a callback that calls session.run",
                )

    @contextmanager
    def calibrating(
        self, *, resume: bool = False, allow_unreached: bool = False, non_finite: NonFinite = "error"
    ) -> Iterator[CalibrationSession]:
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
        policy = check_policy(non_finite)
        interrupt: KeyboardInterrupt | None = None
        with self._occupancy.exclusive("calibration"):
            if self._calibrating:
                raise nested_calibration()
            with all_or_nothing(self):
                calibrator, gate = self._begin(resume, policy)
                session = CalibrationSession(calibrator, self.output_names, self._occupancy)
                self._calibrating = True
                try:
                    yield session
                    gate.finish()
                except KeyboardInterrupt as stopped:
                    if not calibrator.runs:
                        raise
                    interrupt = stopped
                finally:
                    gate.abandon()
                    self.calibration_log = gate.log
                    self._calibrating, session.ended = False, True
                self._finish(calibrator, interrupt is not None, allow_unreached)
        if interrupt is not None:
            raise interrupt

    def _begin(self, resume: bool, policy: NonFinite) -> tuple[Calibrator, BatchGate]:
        self._close_large()  # the session to come is another one
        parameters = self._quantized_parameters()
        check_parameters(parameters)
        for array in parameters.values():
            let_go(array)
        self.quantizers.reconsider()
        if not resume:
            self.quantizers.forget()
        self.calibrated, self._told_of_nan = False, False
        calibrator = self._calibrator()
        gate = calibrator.gate = self._gate(calibrator, policy)
        return calibrator, gate

    def _finish(self, calibrator: Calibrator, interrupted: bool, allow_unreached: bool) -> None:
        """Put the encodings of what was seen into effect."""
        if not calibrator.runs:
            raise CalibrationError(
                "calibrating", "the session did not run in the block", "call session.run inside the block"
            )
        calibrator.finish()
        self._freeze(allow_unreached or interrupted, quiet=interrupted)
        if interrupted:
            logger.warning(
                "calibration interrupted after %d batches; the statistics so far are in effect, "
                "compute_encodings(rest, resume=True) adds to them",
                calibrator.runs,
            )

    def _gate(self, calibrator: Calibrator, policy: NonFinite) -> BatchGate:
        def blame(batch: Any) -> HealthReport:
            from bitwright.onnx.health.check import Doctor

            doctor = Doctor(self._watched().model, "model", self.providers, self.threads)
            doctor.check(batch)
            return doctor.report()

        watched = {id(q): q for q in calibrator.quantizers.values() if q.enabled}
        return BatchGate(watched.values(), policy, blame, calibrator.channels.values())

    def _quantized_parameters(self) -> dict[str, Array]:
        """Parameter name -> its elements, of every enabled weight and bias that is a constant."""
        found = {}
        for site in self.quantizers.values():
            param = self.graph.values[site.value].param
            if param is not None and site.enabled and site.role in ("weight", "bias"):
                array = self.constants.get(site.name)
                found.update({} if array is None else {param: array})
        return found

    def _calibrator(self) -> Calibrator:
        """Weights calibrated and quantized, activations watched."""
        for site in self.quantizers.values():
            quantizer = site.quantizer
            if (
                site.name in self.constants
                and site.enabled
                and not quantizer.derived
                and not quantizer.frozen
            ):
                if site.role != "input":
                    quantizer.observe_once(self.constants[site.name])
                    let_go(self.constants[site.name])
                elif (
                    quantizer.statistics is None
                ):  # a constant that starts a state, on the grid of that state
                    quantizer.observe(self.constants[site.name])
        simulation = self._watched()
        watched = {name: site.quantizer for name, site in self.quantizers.items() if name in simulation.taps}
        channels = {name: self.quantizers[name].channels for name in watched}
        return Calibrator(
            simulation, watched, self.memory_budget, self.providers, self.threads, channels=channels
        )

    def _watched(self) -> Simulation:
        """What calibration runs: weights quantized, activations in float except the frozen ones."""
        encodings = {
            site.name: site.encoding
            for site in self.quantizers.values()
            if site.enabled
            and site.encoding is not None
            and not site.quantizer.derived
            and (site.name in self.constants or site.frozen)
        }
        return simulation_model(self.marked, encodings, file=self._weight_file())

    def _feed(
        self, calibrator: Calibrator, session: CalibrationSession, data: Any, args: Any, show: bool
    ) -> None:
        if data is None:
            self._calibrate_on_example(calibrator)
            return
        if callable(data):
            data(session) if args is None else data(session, args)
            return
        if isinstance(data, (Mapping, np.ndarray)) or not isinstance(data, Iterable):
            raise CalibrationError(
                "compute_encodings",
                f"data is a {type(data).__name__}, not a list of batches",
                "write sim.compute_encodings([batch]) for a single batch",
            )
        for batch in progress(data, "calibrating", show):
            calibrator.run(batch)

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

    def example(self) -> Feeds:
        """The example input: ``dummy_input``, or random values where none was given."""
        with self._lock:
            if self._dummy is None:
                self._dummy = next(random_feeds(self.specs))
            return self._dummy

    def health(self) -> HealthTable:
        """What calibration saw at every site, and what the weights hold: NaN, Inf, zero and constant channels, saturation."""
        return self.quantizers.health(self.constants)

    def _freeze(self, allow_unreached: bool, quiet: bool = False) -> None:
        self.quantizers.freeze_activations()
        self.calibrated = True
        self._refresh_biases()
        self.quantizers.settle_unreached(allow=allow_unreached, quiet=quiet)

    def _refresh_biases(self) -> None:
        with self._lock:  # another thread must not see one that is being derived
            for bias in self._biases:
                bias.refresh()

    # -- its state

    def remember(self, *, parameters: bool = False) -> Undo:
        """Keep the state of the simulation: every quantizer, whether it is calibrated, the repairs, what calibration noted.

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
                put_in_force(self, repairs)
            for name, tensor in tensors.items():
                holder = self.marked.graph.initializers.get(name)  # gone where a chosen weight took its place
                if tensor is not None and holder is not None and holder.const_value is not tensor:
                    self.set_parameter(name, tensor.numpy())
            self._restore_computed(constants)
            quantizers()
            self.calibrated, self.calibration_log = calibrated, log

        return restore

    def _restore_computed(self, constants: Mapping[str, Array]) -> None:
        """Give weights that nodes computed, and that a method has replaced since, the values they had."""
        changed = {
            site: array
            for site, array in constants.items()
            if self.constants[site] is not array
            and self.graph.values[self.plan.sites[site].value].param is None
        }
        for marker in [node for node in self.marked.graph if is_site(node)] if changed else ():
            array = changed.get(site_of(marker))
            chosen = marker.inputs[0]
            if array is not None and chosen is not None and chosen.is_initializer():
                chosen.const_value = ir.Tensor(array, name=chosen.name)
                self.constants[site_of(marker)] = array
        self._simulations.clear()

    # -- use

    @property
    def session(self) -> Any:
        """An ``onnxruntime.InferenceSession`` of the simulation as it stands; made anew after changes.

        Threads may run one session, as ever with ONNX Runtime.

        Raises:
            CalibrationError: there are no encodings yet.
            BusyError: another thread changes the simulation.
        """
        return self._derived("session", lambda: self._open(self.simulation()))

    def trial_session(self) -> TrialSession:
        """What runs like :attr:`session` and follows every later change of the quantizers without being made anew.

        For searches, which change bits and scales between runs over little data; see
        :mod:`bitwright.onnx.simulation.trials`. Sums are rounded in another order than in :attr:`session`.
        """
        return TrialSession(self)

    def _open(self, simulation: Simulation) -> Any:
        return open_session(simulation.model, self.providers, threads=self.threads)

    def _derived(self, kind: str, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, kept as long as no encoding changes."""
        with self._lock:
            state = tuple(self._encodings().items())
            kept = self._simulations.get(kind)
            if kept is None or not _same(kept[0], state):
                self._simulations[kind] = kept = (state, make())
            return kept[1]

    def forget_simulations(self) -> None:
        """Let sessions be made anew: the marked model was changed."""
        self._simulations.clear()

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
        found = {}
        for site in self.quantizers.values():
            derived = site.quantizer.derived  # a bias may have none, and is in float then
            if site.enabled and not (derived and site.encoding is None):
                found[site.name] = site.quantizer.required
        return found

    def simulation(self) -> Simulation:
        """The simulation as a model of its own: standard ONNX, its quantizers and what enters them."""
        biases = {bias.site for bias in self._biases}
        with self._lock:  # weights of a large model are mapped, and let go of once they are read
            return simulation_model(self.marked, self._encodings(), biases, self._weight_file())

    def _weight_file(self) -> WeightFile | None:
        """Where the quantized weights of a large model lie; a new one where most of the old one is of no use any more."""
        size = weight_bytes(self.marked)
        if size <= IN_MEMORY:
            return None
        if self._weights is None or self._weights.size > 2 * size:
            self._weights = WeightFile()
        return self._weights

    def run(self, feeds: Any) -> list[Array]:
        """Outputs of the simulation in the model's order, as ``InferenceSession.run(None, feeds)`` gives them.

        Args:
            feeds: a dict, an array for a model with one input, or a tuple in the model's order.

        Raises:
            CalibrationError: there are no encodings yet.
            ModelError: the feeds do not fit the model's inputs.
        """
        checked = as_feeds(feeds, self.specs)
        found: list[Array] = self.session.run(self.output_names, checked)
        if not self._told_of_nan and any(map(_holds_nan, found)):
            self._told_of_nan = True
            self._name_nan(checked)
        return found

    def _name_nan(self, feeds: Feeds) -> None:
        """Tell which operator makes NaN in the simulation of a feed that float computes without."""
        from bitwright.onnx.health.check import Doctor

        reports = []
        for encodings in ({}, self._encodings()):
            doctor = Doctor(
                simulation_model(self.marked, encodings).model, "model", self.providers, self.threads
            )
            doctor.check(feeds)
            reports.append(doctor.report())
        if reports[0].ok and not reports[0].bad_inputs:
            logger.warning("%s", self.quantizers.describe_nan(reports[1], self.graph))

    def capture(self, names: Sequence[str], feeds: Any) -> dict[str, list[Array]]:
        """Quantized values at activation sites, one array per place the site marks.

        Those inside recurrent layers have all steps, ``[length, 1, batch, hidden]`` in the order of time, those in the body
        of another Loop or Scan all iterations along a first axis; those of a branch that was not taken are empty. Where
        bodies make tensors of another shape in every iteration, sites in bodies have none.
        """
        checked = as_feeds(feeds, self.specs)
        try:
            return self._captured(names, checked, bodies=True)
        except refusals() as error:
            if all(graph is self.marked.graph for graph in self.marked.graphs()):
                raise
            logger.warning("what bodies make cannot be brought out of them: %s", first_line(error))
            return self._captured(names, checked, bodies=False)

    def _captured(self, names: Sequence[str], feeds: Feeds, *, bodies: bool) -> dict[str, list[Array]]:
        simulation = self.simulation()
        graph = simulation.model.graph
        instrument = Instrument(simulation.model)
        there, places = set(graph.outputs), []
        for name in names:
            for value in simulation.results.get(name, ()):
                inside = value.graph
                assert inside is not None
                owner = None if inside is graph else instrument.owner(inside)
                layer = owner is not None and owner.graph is graph and STATES in owner.metadata_props
                if owner is None:
                    places.append((name, value))
                elif bodies or layer:
                    dtype = (value.dtype or ir.DataType.FLOAT).numpy()
                    places.append((name, instrument.lift(value, inside, np.zeros(0, dtype), None)[0]))
        added = [v for v in dict.fromkeys(v for _, v in places) if v not in there and not v.is_graph_input()]
        graph.outputs.extend(added)
        readers = (use.node for value in added for use in value.uses())
        guard_outputs(Builder(simulation.model), list(dict.fromkeys(readers)))
        fetch = list(dict.fromkeys(str(v.name) for _, v in places))
        values = dict(zip(fetch, self._open(simulation).run(fetch, feeds), strict=True)) if fetch else {}
        found: dict[str, list[Array]] = {}
        for name, value in places:
            found.setdefault(name, []).append(values[str(value.name)])
        return found

    def report(self, path: str | Path, data: Any = None, **options: Any) -> Path:
        """Write one HTML file that shows the simulation and what it costs; see :func:`bitwright.report.simulation_report`."""
        from bitwright.report import simulation_report

        return simulation_report(self, path, data, **options)

    def coverage(self) -> Coverage:
        """Every value and parameter: quantized how, shared with whom, or not and why. Print it."""
        return Coverage.of(self.plan, self.graph, self.quantizers.changes(self.plan), {})

    # -- files

    @checks_arguments
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
                in every session; ``"fused"`` lets ONNX Runtime make MatMulNBits of them, which is much faster and quantizes the
                activations to 8 bits by itself.
            target: the runtime that the files are for, a row of :data:`bitwright.export.targets.TARGETS`: it decides how
                weights of 4 bits are stored.
            format: ``"tflite"`` is short for ``target="litert"``, which writes ``<prefix>.tflite`` beside the ONNX files.
            every_tensor: also write encodings of tensors that only carry elements of quantized ones (max pools, reshapes, ...),
                for compilers that want an entry for every tensor.
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
        encodings = self._encodings()
        example = self.example()
        self._close_large()  # what is written takes memory too
        exported = write_artefacts(
            self,
            path,
            filename_prefix,
            self.marked,
            encodings,
            encoding_version=encoding_version,
            bias=bias_form(self, bias),
            activation=activation,
            recurrent=recurrent,
            weight_only=weight_only,
            target=target,
            every_tensor=every_tensor,
            data=[plain(array) for array in example.values()],
            samples=(
                lambda result, rows: self._samples(
                    result, {n: x[:rows] if x.ndim else x for n, x in example.items()}
                )
            )
            if samples
            else None,
        )
        return measured(exported, target) if measure_speed else exported

    def _close_large(self) -> None:
        """Let go of the sessions of a large model; they are opened again when they are needed."""
        if weight_bytes(self.marked) > IN_MEMORY:
            self._simulations.clear()
            return_memory()

    def _samples(self, result: QdqResult, feeds: Feeds) -> Samples:
        names = [
            s.name
            for s in self.quantizers.values()
            if s.role in _ACTIVATIONS and s.name in result.tensors and s.enabled
        ]
        outputs = named_arrays(dict(zip(self.output_names, self.run(feeds), strict=True)))
        self._close_large()  # the next session is another one
        return Samples(self.capture(names, feeds), feeds, outputs)

    def verify(
        self,
        feeds: Any = None,
        *,
        bias: BiasForm = "int32",
        activation: ActivationForm = "unsigned",
        weight_only: ProductForm = "exact",
        target: str = DEFAULT_TARGET,
        runtime: str = "onnxruntime",
    ) -> VerifyReport:
        """Compare the simulation with the exported file in a runtime, layer by layer.

        Each layer is fed the simulation's own input; codes are compared with float kernels and with integer kernels.

        Args:
            feeds: what to compare on; the example input by default.
            bias, activation, weight_only, target: as for :meth:`export`.
            runtime: whose integer kernels are compared: ``"onnxruntime"``, ``"openvino"`` or ``"litert"``.

        Raises:
            CalibrationError, ModelError, ExportError: as :meth:`export` and :meth:`run`.
        """
        checked = self.example() if feeds is None else as_feeds(feeds, self.specs)
        result, samples = self._in_memory(checked, bias, activation, weight_only, target)
        return verify_layers(
            result.model, samples.sites, samples.inputs, outputs=samples.outputs, runtime=runtime
        )

    def _in_memory(
        self, feeds: Feeds, bias: BiasForm, activation: ActivationForm, weight_only: ProductForm, target: str
    ) -> tuple[QdqResult, Samples]:
        """The file that an export would write, and what the simulation computes on ``feeds``."""
        result = self._as_qdq(bias, activation, weight_only, target)
        return result, self._samples(result, feeds)

    def _as_qdq(
        self, bias: BiasForm, activation: ActivationForm, weight_only: ProductForm, target: str
    ) -> QdqResult:
        marked = write_recurrent(self.marked, recurrent_form(self, None, target))
        form = bias_form(self, bias)
        return to_qdq(
            marked,
            self._encodings(),
            bias=form,
            activation=activation,
            weight_only=weight_only,
            target=target,
        )

    def drift(
        self,
        a: str = "simulation",
        b: str = "onnxruntime",
        feeds: Any = None,
        *,
        bias: BiasForm = "int32",
        activation: ActivationForm = "unsigned",
        weight_only: ProductForm = "exact",
        target: str = DEFAULT_TARGET,
    ) -> DriftReport:
        """Where two of float model, simulation, exported file and runtime part, and why.

        Args:
            a, b: ``"float"``, ``"simulation"``, ``"file"``, or a runtime.
            feeds: what to compare on; the example input by default.
            bias, activation, weight_only, target: as for :meth:`export`.

        Returns:
            See :func:`bitwright.comparison.drift.drift`.

        Raises:
            CalibrationError, ModelError, ExportError: as :meth:`export` and :meth:`run`.
            ConfigError: ``a`` or ``b`` is none of these, or both are the same.
        """
        checked = self.example() if feeds is None else as_feeds(feeds, self.specs)
        result, samples = self._in_memory(checked, bias, activation, weight_only, target)
        plain_model = strip_sites(restore_native(self.marked)).model
        return drift_models(a, b, plain_model, result.model, samples)

    def saturation(
        self,
        batches: Any = None,
        *,
        bias: BiasForm = "int32",
        activation: ActivationForm = "unsigned",
        weight_only: ProductForm = "exact",
        target: str = DEFAULT_TARGET,
    ) -> SaturationReport:
        """Which layers saturate or overflow in integer kernels, by their weights and on data.

        Args:
            batches: inputs to count on; the example by default.
            bias, activation, weight_only, target: as for :meth:`export`.

        Raises:
            CalibrationError, ModelError, ExportError: as :meth:`export`; there is no batch.
        """
        feeds = [self.example()] if batches is None else [as_feeds(batch, self.specs) for batch in batches]
        result = self._as_qdq(bias, activation, weight_only, target)
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


def _holds_nan(output: Any) -> bool:
    return isinstance(output, np.ndarray) and output.dtype.kind == "f" and bool(np.isnan(output).any())


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two states hold the same encodings; these never change, so identity is enough."""
    return len(one) == len(other) and all(
        a[0] == b[0] and a[1] is b[1] for a, b in zip(one, other, strict=True)
    )
