"""Repairs from a diagnosis, and quantizing group by group, on a simulation of an ONNX model.

A repair is a few standard nodes behind an operator of the marked model, so calibration, simulation and export have it alike:

==========  ==========================================================================
replace     IsNaN, Where; then Greater, Where and Less, Where for the two infinities
clamp       IsNaN, Where; then Clip, which by itself keeps NaN or loses it, by runtime
==========  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.algorithms.search.progressive import Progression, quantize_progressively
from bitwright.core.health.repair import Repair, Stabilized, choose
from bitwright.core.health.report import HealthReport
from bitwright.core.simulation.state import all_or_nothing
from bitwright.errors import CalibrationError, ConfigError
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.onnx.simulation.repairs import float_results, nodes_of, put_in_force
from bitwright.progress import progress as shown

_D = ir.DataType
_LIMITS = {_D.FLOAT16: "float16", _D.BFLOAT16: "bfloat16", _D.FLOAT: "float32", _D.DOUBLE: "float64"}


def stabilize(
    sim: QuantizationSimModel, report: HealthReport | None = None, repairs: Iterable[Repair] | None = None
) -> Stabilized:
    """Apply repairs to the simulation of a model that makes NaN or Inf, without touching the model.

    An overflow is clamped, any other non-finite value is replaced (see :func:`bitwright.core.health.repair.propose`), by standard
    nodes behind the operator, in bodies of If, Loop and Scan too. Repairs hold in every stage, calibration and export
    included, and are listed in ``sim.repairs`` and in the manifest of an export.

    Args:
        sim: calibrated or not; calibrate afterwards.
        report: of :func:`~bitwright.onnx.check_model` on the same model and an input of the same kind.
        repairs: what to apply instead of what the report proposes: a choice of these, or :class:`Repair` objects of your own.

    Raises:
        ConfigError: a repair names no operator of the simulation, or one without results in a type that is repaired (float8
            is not), or neither a report nor repairs were given.
    """
    nodes = nodes_of(sim)
    known = {op.name for op in sim.graph.ops}
    chosen, refused = choose(report, repairs, known, lambda op: bool(float_results(nodes.get(op))))
    for repair in chosen:
        if repair.kind != "float" and not float_results(nodes.get(repair.op)):
            raise ConfigError(
                f"Repair({repair.op!r})",
                f"the operator has no result in {', '.join(_LIMITS.values())} that anything reads",
                "repair the operator that makes the tensor",
            )
    before = sim.repairs
    floats = {repair.op for repair in chosen if repair.kind == "float"}
    disabled = tuple(name for name, site in sim.quantizers.items() if site.op in floats and site.enabled)
    latest = {repair.op: repair for repair in (*before, *chosen) if repair.kind != "float"}
    with all_or_nothing(sim):
        for name in disabled:
            sim.quantizers[name].enabled = False
        put_in_force(sim, tuple(latest.values()))

    def undo() -> None:
        put_in_force(sim, before)
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

    See :func:`bitwright.algorithms.search.progressive.quantize_progressively`. Each group opens a session and runs every batch in
    it: use few batches.

    Raises:
        CalibrationError: the simulation is not calibrated, or there is no batch.
    """
    if not sim.calibrated:
        raise CalibrationError(
            "progressive", "the simulation has no encodings yet", "call sim.compute_encodings(batches) first"
        )
    batches = list(data)
    if not batches:
        raise CalibrationError("progressive", "the data held no batch", "pass a list with at least one batch")

    def outputs() -> list[NDArray[Any]]:
        found = [[y for y in sim.run(batch) if _is_float(y)] for batch in batches]
        return [
            np.concatenate([np.asarray(y, np.float64).ravel() for y in ys]) for ys in zip(*found, strict=True)
        ]

    return quantize_progressively(
        sim.quantizers,
        outputs,
        threshold=threshold,
        groups=groups,
        keep_going=keep_going,
        track=lambda items: shown(items, "quantizing group by group", progress),
    )


def _is_float(output: Any) -> bool:
    """Whether an output of a session is a floating-point tensor; sequences are lists, bfloat16 is of no kind of numpy."""
    return isinstance(output, np.ndarray) and (output.dtype.kind == "f" or output.dtype.name == "bfloat16")
