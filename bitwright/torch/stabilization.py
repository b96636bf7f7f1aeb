"""Repairs from a diagnosis, and quantizing group by group, on a simulation of a PyTorch model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bitwright.algorithms.search.progressive import Progression, quantize_progressively
from bitwright.core.health.repair import Repair, Stabilized, choose
from bitwright.core.health.report import HealthReport
from bitwright.errors import CalibrationError
from bitwright.progress import progress as shown
from bitwright.torch.calls.batches import as_call, evaluation, model_device, to_device
from bitwright.torch.calls.trees import flatten_tensors
from bitwright.torch.simulation.quantsim import QuantizationSimModel


def stabilize(
    sim: QuantizationSimModel, report: HealthReport | None = None, repairs: Iterable[Repair] | None = None
) -> Stabilized:
    """Apply repairs to the simulation of a model that makes NaN or Inf, without touching the model.

    An overflow is clamped, any other non-finite value is replaced (see :func:`bitwright.core.health.repair.propose`).
    Repairs hold in every stage, calibration and export included, and are listed in ``sim.repairs`` and in the
    manifest of an export.

    Args:
        sim: calibrated or not; calibrate afterwards.
        report: of :func:`~bitwright.torch.check_model` on the same model and an input of the same kind.
        repairs: what to apply instead of what the report proposes: a choice of these, or :class:`Repair` objects of your own.

    Raises:
        ConfigError: a repair names no operator of the simulation, or neither a report nor repairs were given.
    """
    chosen, refused = choose(report, repairs, {plan.op for plan in sim._simulator.plans.values()})
    before = dict(sim._simulator.repairs)
    floats = {repair.op for repair in chosen if repair.kind == "float"}
    disabled = tuple(name for name, site in sim.quantizers.items() if site.op in floats and site.enabled)
    for name in disabled:
        sim.quantizers[name].enabled = False
    sim._simulator.repairs = {
        **before,
        **{repair.op: repair for repair in chosen if repair.kind != "float"},
    }

    def undo() -> None:
        sim._simulator.repairs = dict(before)
        for name in disabled:
            sim.quantizers[name].enabled = True

    return Stabilized(sim, chosen, refused, undo)


def progressive(
    sim: QuantizationSimModel,
    data: Iterable[Any],
    *,
    threshold: float = 10.0,
    groups: Sequence[Sequence[str]] | None = None,
    keep_going: bool = False,
    progress: bool = True,
) -> Progression:
    """Switch the sites of a calibrated simulation on, one operator after the other, until the outputs turn bad.

    See :func:`bitwright.algorithms.search.progressive.quantize_progressively`. One forward per group and batch: use few batches.

    Raises:
        CalibrationError: the simulation is not calibrated, or there is no batch.
    """
    if not sim.calibrated:
        raise CalibrationError(
            "progressive", "the simulation has no encodings yet", "call sim.compute_encodings(batches) first"
        )
    device = model_device(sim.model)
    calls = [as_call(to_device(batch, device)) for batch in data]
    if not calls:
        raise CalibrationError("progressive", "the data held no batch", "pass a list with at least one batch")

    def outputs() -> list[NDArray[Any]]:
        with torch.no_grad(), evaluation(sim.model):
            found = [flatten_tensors(sim.model(*args, **kwargs)) for args, kwargs in calls]
        return [
            np.concatenate([t.double().cpu().numpy().ravel() for t in tensors])
            for tensors in zip(*([t for _, t in out if t.is_floating_point()] for out in found), strict=True)
        ]

    return quantize_progressively(
        sim.quantizers,
        outputs,
        threshold=threshold,
        groups=groups,
        keep_going=keep_going,
        track=lambda items: shown(items, "quantizing group by group", progress),
    )
