"""Repairs from a diagnosis, and quantizing group by group, on a simulation of either front end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.algorithms.search.progressive import Progression, quantize_progressively
from bitwright.core.health.repair import Repair, Stabilized, choose
from bitwright.core.health.report import HealthReport
from bitwright.core.simulation.calibration import with_samples
from bitwright.core.simulation.state import all_or_nothing
from bitwright.errors import CalibrationError, ConfigError, checks_arguments
from bitwright.methods.front_end import front_end_of
from bitwright.progress import progress as shown


@checks_arguments
def stabilize(sim: Any, report: HealthReport | None = None, repairs: Iterable[Repair] | None = None) -> Stabilized:
    """Apply repairs to the simulation of a model that makes NaN or Inf, without touching the model.

    An overflow is clamped, any other non-finite value is replaced (see :func:`bitwright.core.health.repair.propose`); in an ONNX
    model by standard nodes after the operator, in bodies of If, Loop and Scan too. Repairs hold in every stage, calibration
    and export included, and are listed in ``sim.repairs`` and in the manifest of an export.

    Args:
        sim: of either front end, calibrated or not; calibrate afterwards. Left as it was where an error is raised.
        report: of :func:`check_model` on the same model and an input of the same kind.
        repairs: what to apply instead of what the report proposes: a choice of these, or :class:`Repair` objects of your own.

    Raises:
        ConfigError: a repair names no operator of the simulation, or one without results in a type that is repaired (float8
            is not), or neither a report nor repairs were given.
    """
    repairable = front_end_of(sim).repairable(sim)
    chosen, refused = choose(report, repairs, repairable.ops, lambda op: repairable.obstacle(op) is None)
    for repair in chosen:
        obstacle = None if repair.kind == "float" else repairable.obstacle(repair.op)
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
            repairable.put_in_force(tuple(repairs))

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
    """Switch the sites of a calibrated simulation on, one operator after the other, until the outputs turn bad.

    See :func:`bitwright.algorithms.search.progressive.quantize_progressively`. The model runs once per group and batch, and
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
    batches, front_end = list(with_samples(data)), front_end_of(sim)
    if not batches:
        raise CalibrationError("progressive", "the data held no batch", "pass a list with at least one batch")

    def outputs() -> list[NDArray[Any]]:
        found = [front_end.simulated_outputs(sim, batch) for batch in batches]
        return [np.concatenate([y.ravel() for y in ys]) for ys in zip(*found, strict=True)]

    return quantize_progressively(
        sim.quantizers,
        outputs,
        threshold=threshold,
        groups=groups,
        keep_going=keep_going,
        track=lambda items: shown(items, "quantizing group by group", progress),
    )
