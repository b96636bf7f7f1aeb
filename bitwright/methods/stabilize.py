"""``check_model`` and ``stabilize``: find the operator that produced NaN or Inf, and repair a simulation of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.health.diagnosis import Repair, Stabilized, choose
from bitwright.core.health.report import HealthReport
from bitwright.core.simulation.calibration import with_samples
from bitwright.core.simulation.simulation import all_or_nothing
from bitwright.errors import CalibrationError, ConfigError, checks_arguments
from bitwright.methods.front_end import health_check_of
from bitwright.methods.switching import Progression, quantize_progressively
from bitwright.progress import progress as shown


@checks_arguments
def check_model(
    model: Any,
    data: Iterable[Any] | Callable[..., Any] | None = None,
    providers: Any = None,
    *,
    threads: int = 0,
    progress: bool = True,
) -> HealthReport:
    """Find the operator that produced the first NaN or Inf.

    Parameters come first: where one holds NaN or Inf nothing is run. An operator is named when what it made of finite
    numbers reaches an output of the model, or falsifies one; a mask of -Inf before a softmax, or a NaN that ``where`` (in
    torch also ``masked_fill`` or ``nan_to_num``) removes, is not.

    A module runs in eval mode without gradients, once per batch, in about twice the time of its own forward; the first
    batch again where layers share parameters or a loop is found, whose places are told apart as in a simulation. An ONNX
    model runs as it is written, without graph optimisation, and half-precision values keep their rounding; so an overflow
    is found that a CPU, which computes in float32 in between, would not show. Bodies of If, Loop and Scan are looked into,
    iteration by iteration.

    Args:
        model: any eager module; or the path of an ONNX file, a proto or an ``onnx_ir`` model. Left as it is.
        data: batches: for a module each a tensor, a tuple of positional arguments, or a dict of keyword arguments; for an
            ONNX model each a dict, an array where there is one input, or a tuple in the model's order. ``None`` runs an ONNX
            model on random values. For a module also a callback that runs it: ``callback(model)``; what that calls outside
            of the model's forward, such as other methods, belongs to one batch.
        providers: of ONNX Runtime, for an ONNX model; the CPU by default.
        threads: of one operator of an ONNX model; 0 takes ``OMP_NUM_THREADS``, where it is set, or leaves the number to ONNX
            Runtime.
        progress: show a bar on a terminal when it takes more than two seconds.

    Returns:
        The report; ``report.ok``, ``print(report)``, ``report.to_json()``. After Ctrl-C of the batches until then, which a
        note says.

    Raises:
        ModelError: the model cannot be read, a batch does not fit it, or it fails on a batch and nothing that is not finite
            was seen before.
        CalibrationError: there is no batch.
        ConfigError: a provider is not available, or an option that the front end does not have.

    Example:
        >>> import torch
        >>> class Mean(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x / x.sum(-1, keepdim=True)
        >>> check_model(Mean(), [torch.zeros(2, 3)]).culprit.cause
        'division by zero'
    """
    return health_check_of(model)(model, data, providers, threads, progress)


@checks_arguments
def stabilize(sim: Any, report: HealthReport | None = None, repairs: Iterable[Repair] | None = None) -> Stabilized:
    """Repair the simulation of a model that produces NaN or Inf, without changing the model.

    An overflow is clamped, any other non-finite value is replaced (see :func:`bitwright.core.health.diagnosis.propose`); in
    an ONNX model by standard nodes after the operator, in bodies of If, Loop and Scan too. Repairs hold in every stage,
    calibration and export included, and are listed in ``sim.repairs`` and in the manifest of an export.

    Args:
        sim: of either front end, calibrated or not; calibrate afterwards. Left as it was where an error is raised.
        report: of :func:`check_model` on the same model and an input of the same kind.
        repairs: what to apply instead of what the report proposes: a choice of these, or :class:`Repair` objects of your own.

    Raises:
        ConfigError: a repair names no operator of the simulation, or one without results in a type that is repaired (float8
            is not), or neither a report nor repairs were given.
    """
    obstacles = sim._repairable()
    chosen, refused = choose(report, repairs, obstacles.keys(), lambda op: obstacles[op] is None)
    for repair in chosen:
        obstacle = None if repair.kind == "float" else obstacles[repair.op]
        if obstacle is not None:
            raise ConfigError(f"Repair({repair.op!r})", obstacle, "repair the operator that makes the tensor")
    before: tuple[Repair, ...] = sim.repairs
    floats = {repair.op for repair in chosen if repair.kind == "float"}
    disabled = tuple(name for name, site in sim.quantizers.items() if site.op in floats and site.enabled)
    latest = {repair.op: repair for repair in (*before, *chosen) if repair.kind != "float"}

    def put(enabled: bool, repairs: Sequence[Repair]) -> None:
        with all_or_nothing(sim):
            for name in disabled:
                sim.quantizers[name].enabled = enabled
            sim._put_in_force(repairs)

    put(False, tuple(latest.values()))
    return Stabilized(sim, chosen, refused, lambda: put(True, before))


@checks_arguments
def progressive(
    sim: Any,
    data: Iterable[Any],
    *,
    threshold: float = 10.0,
    groups: Sequence[Sequence[str]] | None = None,
    keep_going: bool = False,
    progress: bool = True,
) -> Progression:
    """Switch on the sites of a calibrated simulation one operator at a time, until the outputs turn bad.

    See :func:`bitwright.methods.switching.quantize_progressively`. The model runs once per group and batch, and
    an ONNX model opens a session for every group: use few batches.

    Args:
        sim: of either front end, calibrated.
        data: batches, as ``sim.compute_encodings`` takes them.
        threshold: dB of the outputs against float below which a group turned them bad.
        groups: names of operators that are switched on together; one after the other by default.
        keep_going: leave a group that turned the outputs bad in float and go on.
        progress: show a progress bar on a terminal.

    Raises:
        CalibrationError: the simulation is not calibrated, or there is no batch.
    """
    if not sim.calibrated:
        raise CalibrationError(
            "progressive", "the simulation has no encodings yet", "call sim.compute_encodings(batches) first"
        )
    batches = list(with_samples(data))
    if not batches:
        raise CalibrationError("progressive", "the data held no batch", "pass a list with at least one batch")

    def outputs() -> list[NDArray[Any]]:
        found = [[y for y in sim._outputs(batch) if _is_float(y)] for batch in batches]
        return [np.concatenate([np.asarray(y, np.float64).ravel() for y in ys]) for ys in zip(*found, strict=True)]

    return quantize_progressively(
        sim.quantizers,
        outputs,
        threshold=threshold,
        groups=groups,
        keep_going=keep_going,
        track=lambda items: shown(items, "quantizing group by group", progress),
    )


def _is_float(output: NDArray[Any]) -> bool:
    return output.dtype.kind == "f" or output.dtype.name == "bfloat16"  # of which numpy has no kind
