"""Calibration of an ONNX simulation: weights from their values, activations from the runs of a session."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.health.report import HealthReport, check_parameters
from bitwright.core.numerics.spec import NonFinite, check_policy
from bitwright.core.simulation.calibration import BatchGate, nested_calibration
from bitwright.core.simulation.joins import warn_of_unlike_joins
from bitwright.core.simulation.occupancy import Occupancy
from bitwright.core.simulation.sites import Site
from bitwright.core.simulation.state import all_or_nothing
from bitwright.errors import CalibrationError, ConfigError
from bitwright.export.files.onnx_file import let_go
from bitwright.onnx.simulation.calibrate import Calibrator
from bitwright.onnx.simulation.repairs import diagnosed
from bitwright.onnx.simulation.simulate import Simulation, simulation_model
from bitwright.progress import progress

if TYPE_CHECKING:
    from bitwright.onnx.simulation.quantsim import QuantizationSimModel

logger = logging.getLogger("bitwright")

Array = NDArray[Any]


class CalibrationSession:
    """What a calibration callback is given: runs like an ``onnxruntime.InferenceSession``, and is watched."""

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


@contextmanager
def calibrating(
    sim: QuantizationSimModel, resume: bool, allow_unreached: bool, non_finite: NonFinite
) -> Iterator[CalibrationSession]:
    """See :meth:`QuantizationSimModel.calibrating`."""
    policy = check_policy(non_finite)
    interrupt: KeyboardInterrupt | None = None
    with sim._occupancy.exclusive("calibration"):
        if sim._calibrating:
            raise nested_calibration()
        with all_or_nothing(sim):
            calibrator, gate = _begin(sim, resume, policy)
            session = CalibrationSession(calibrator, sim.output_names, sim._occupancy)
            sim._calibrating = True
            try:
                yield session
                gate.finish()
            except KeyboardInterrupt as stopped:
                if not calibrator.runs:
                    raise
                interrupt = stopped
            finally:
                gate.abandon()
                sim.calibration_log = gate.log
                sim._calibrating, session.ended = False, True
            _finish(sim, calibrator, interrupt is not None, allow_unreached)
    if interrupt is not None:
        raise interrupt


def _begin(sim: QuantizationSimModel, resume: bool, policy: NonFinite) -> tuple[Calibrator, BatchGate]:
    sim._close_large()  # the session to come is another one
    parameters = _quantized_parameters(sim)
    check_parameters(parameters)
    for array in parameters.values():
        let_go(array)
    sim.quantizers.reconsider()
    if not resume:
        sim.quantizers.forget()
    sim.calibrated, sim._told_of_nan = False, False
    calibrator = make_calibrator(sim)
    gate = calibrator.gate = _gate(sim, calibrator, policy)
    return calibrator, gate


def _finish(sim: QuantizationSimModel, calibrator: Calibrator, interrupted: bool, allow_unreached: bool) -> None:
    """Put the encodings of what was seen into effect."""
    if not calibrator.runs:
        raise CalibrationError(
            "calibrating", "the session did not run in the block", "call session.run inside the block"
        )
    calibrator.finish()
    sim.quantizers.freeze_activations()
    sim.calibrated = True
    sim._refresh_biases()
    sim.quantizers.settle_unreached(allow=allow_unreached or interrupted, quiet=interrupted)
    if not interrupted:
        warn_of_unlike_joins(sim.graph, sim.quantizers, sim.plan.shared)
    if interrupted:
        logger.warning(
            "calibration interrupted after %d batches; the statistics so far are in effect, "
            "compute_encodings(rest, resume=True) adds to them",
            calibrator.runs,
        )


def _gate(sim: QuantizationSimModel, calibrator: Calibrator, policy: NonFinite) -> BatchGate:
    def blame(batch: Any) -> HealthReport:
        return diagnosed(sim, watched_model(sim).model, batch)

    watched = {id(q): q for q in calibrator.quantizers.values() if q.enabled}
    return BatchGate(watched.values(), policy, blame, calibrator.channels.values())


def _quantized_parameters(sim: QuantizationSimModel) -> dict[str, Array]:
    """Parameter name -> its elements, of every enabled weight and bias that is a constant."""
    found = {}
    for site in sim.quantizers.values():
        param, array = sim.graph.values[site.value].param, sim.constants.get(site.name)
        if param is not None and array is not None and site.enabled and site.role in ("weight", "bias"):
            found[param] = array
    return found


def make_calibrator(sim: QuantizationSimModel) -> Calibrator:
    """Weights calibrated and quantized, activations watched."""
    for site in sim.quantizers.values():
        if site.name in sim.constants and site.enabled:
            _observe_constant(site, sim.constants[site.name])
    simulation = watched_model(sim)
    watched = {name: site.quantizer for name, site in sim.quantizers.items() if name in simulation.taps}
    channels = {name: sim.quantizers[name].channels for name in watched}
    return Calibrator(simulation, watched, sim.memory_budget, sim.providers, sim.threads, channels=channels)


def _observe_constant(site: Site, array: Array) -> None:
    quantizer = site.quantizer
    if quantizer.derived or quantizer.frozen:
        return
    if site.role != "input":
        quantizer.observe_once(array)
        let_go(array)
    elif quantizer.statistics is None:  # a constant that starts a state, on the grid of that state
        quantizer.observe(array)


def watched_model(sim: QuantizationSimModel) -> Simulation:
    """What calibration runs: weights quantized, activations in float except the frozen ones."""
    encodings = {
        site.name: site.encoding
        for site in sim.quantizers.values()
        if site.enabled
        and site.encoding is not None
        and not site.quantizer.derived
        and (site.name in sim.constants or site.frozen)
    }
    return simulation_model(sim.marked, encodings, file=sim._weight_file())


def feed(sim: QuantizationSimModel, session: CalibrationSession, data: Any, args: Any, show: bool) -> None:
    """Run a calibration on what :meth:`QuantizationSimModel.compute_encodings` was given.

    Raises:
        CalibrationError: it is not data, or none came.
    """
    calibrator = session.calibrator
    if data is None:
        _calibrate_on_example(sim, calibrator)
    elif callable(data):
        data(session) if args is None else data(session, args)
    elif isinstance(data, (Mapping, np.ndarray)) or not isinstance(data, Iterable):
        raise CalibrationError(
            "compute_encodings",
            f"data is a {type(data).__name__}, not a list of batches",
            "write sim.compute_encodings([batch]) for a single batch",
        )
    else:
        for batch in progress(data, "calibrating", show):
            calibrator.run(batch)
    if not calibrator.runs:
        raise CalibrationError(
            "compute_encodings",
            "the callback never ran its session" if callable(data) else "the data held no batch",
            "pass a non-empty list (a generator can be used only once), or a callback that calls session.run",
        )


def _calibrate_on_example(sim: QuantizationSimModel, calibrator: Calibrator) -> None:
    made_up = sim._dummy is None and any(spec.is_open for spec in sim.specs)
    try:
        calibrator.run(sim.example())
    except CalibrationError as error:
        if not made_up:
            raise
        shapes = ", ".join(f"{name} {'x'.join(map(str, a.shape))}" for name, a in sim.example().items())
        raise CalibrationError(
            "the example input",
            f"the model leaves lengths of axes open, and fails on random values of shape {shapes}: {error.problem}",
            "pass dummy_input=..., one feed of the shapes that the model is made for, or data",
        ) from error
