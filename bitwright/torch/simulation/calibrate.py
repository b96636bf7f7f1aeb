"""Calibration of a torch simulation: runs of the model are observed, and the encodings of what was seen take effect."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from bitwright.core.health.report import HealthReport, check_parameters
from bitwright.core.numerics.spec import NonFinite, check_policy
from bitwright.core.simulation.calibration import BatchGate, nested_calibration
from bitwright.core.simulation.joins import warn_of_unlike_joins
from bitwright.core.simulation.state import all_or_nothing
from bitwright.errors import BitwrightError, CalibrationError
from bitwright.progress import progress
from bitwright.torch.calls.batches import ARRAYS, as_call, evaluation, holds_arrays, model_device, to_device
from bitwright.torch.ranks import Ranks, calibrating_ranks, merged

if TYPE_CHECKING:
    from bitwright.torch.simulation.quantsim import QuantizationSimModel

logger = logging.getLogger("bitwright")


@contextmanager
def calibrating(
    sim: QuantizationSimModel, resume: bool, allow_unreached: bool, non_finite: NonFinite, distributed: bool
) -> Iterator[nn.Module]:
    """Observe every run of ``sim.model`` in a block; see :meth:`QuantizationSimModel.calibrating`."""
    policy = check_policy(non_finite)
    interrupt: KeyboardInterrupt | None = None
    ranks = calibrating_ranks(distributed)
    with nullcontext() if ranks is None else ranks.together(), sim._interceptor.occupancy.exclusive("calibration"):
        if sim._simulator.gate is not None:
            raise nested_calibration()
        with all_or_nothing(sim):
            gate = _begin(sim, resume, policy, ranks)
            try:
                with sim._interceptor.handled_by(sim._simulator), torch.no_grad(), evaluation(sim.model):
                    yield sim.model
                gate.finish()
            except KeyboardInterrupt as stopped:
                if not sim._simulator.runs:
                    raise
                interrupt = stopped
            finally:
                gate.abandon()
                sim.calibration_log, sim._simulator.gate = gate.log, None
            with merged(sim, ranks):
                _finish(sim, interrupt is not None, allow_unreached)
    if interrupt is not None:
        raise interrupt


def _begin(sim: QuantizationSimModel, resume: bool, policy: NonFinite, ranks: Ranks | None) -> BatchGate:
    check_parameters(sim._quantized_parameters())
    sim.quantizers.reconsider()
    if not resume:
        sim.quantizers.forget()
    elif ranks is not None and ranks.number and sim._merged:
        sim.quantizers.forget_statistics()  # every rank has those of all, and the first adds them
    sim._merged = ranks is not None
    sim._simulator.stage = "observe"
    sim._simulator.runs = 0
    gate = sim._simulator.gate = _gate(sim, policy)
    return gate


def _finish(sim: QuantizationSimModel, interrupted: bool, allow_unreached: bool) -> None:
    """Put the encodings of what was seen into effect."""
    if not sim._simulator.runs:
        raise CalibrationError("calibrating", "the model did not run in the block", "call sim.model inside the block")
    _freeze(sim, allow_unreached or interrupted, quiet=interrupted)
    if interrupted:
        logger.warning(
            "calibration interrupted after %d runs; the statistics so far are in effect, "
            "compute_encodings(rest, resume=True) adds to them",
            sim._simulator.runs,
        )


def _gate(sim: QuantizationSimModel, policy: NonFinite) -> BatchGate:
    def blame(batch: Any) -> HealthReport | None:
        from bitwright.torch.health import diagnose_batch

        if batch is None:
            return None
        args, kwargs = batch
        return diagnose_batch(sim._interceptor, args, kwargs, sim._simulator.mended_at)

    watched = [q for q in sim.quantizers.unique() if q.enabled and q.role in ("input", "output")]
    watches = [s.channels for s in sim.quantizers.values() if s.channels.place is not None]
    return BatchGate(watched, policy, blame, watches)


def feed(sim: QuantizationSimModel, data: Any, args: Any, show: bool) -> None:
    """Run the batches of ``data``, or hand ``sim.model`` to the callback; see :meth:`QuantizationSimModel.compute_encodings`."""
    if data is None:
        data = sim.examples
    if callable(data) and not isinstance(data, (torch.Tensor, np.ndarray)):
        data(sim.model) if args is None else data(sim.model, args)
        return
    if isinstance(data, (torch.Tensor, dict)) or not isinstance(data, Iterable):
        raise CalibrationError(
            "compute_encodings",
            f"data is a {type(data).__name__}, not a list of batches",
            "write sim.compute_encodings([batch]) for a single batch",
        )
    device = model_device(sim.model)
    for i, batch in enumerate(progress(data, "calibrating", show)):
        _run_batch(sim, i, to_device(batch, device))


def _run_batch(sim: QuantizationSimModel, index: int, batch: Any) -> None:
    args, kwargs = as_call(batch)
    try:
        sim.model(*args, **kwargs)
    except BitwrightError:
        raise
    except Exception as error:
        if holds_arrays(args, kwargs):
            raise CalibrationError(f"batch {index}", *ARRAYS) from error
        where = sim._interceptor.failed_in
        hint = ""
        if isinstance(batch, (tuple, list)) and len(batch) > 1:
            hint = "; a tuple or list is taken as positional arguments, so leave labels out: (x for x, _ in loader)"
        raise CalibrationError(
            f"batch {index}{f', in {where}' if where else ''}",
            f"the model fails on it: {type(error).__name__}: {error}",
            f"give batches as the model's forward takes them{hint}",
        ) from error


def _freeze(sim: QuantizationSimModel, allow_unreached: bool, quiet: bool = False) -> None:
    sim.quantizers.freeze_activations()
    _calibrate_unreached_weights(sim)
    sim._simulator.stage = "simulate"
    sim._simulator.refresh_biases()
    sim.quantizers.settle_unreached(allow=allow_unreached, quiet=quiet)
    sim._simulator.warn_of_ranges()
    if not quiet:
        warn_of_unlike_joins(sim.graph, sim.quantizers, sim.plan.shared)


def _calibrate_unreached_weights(sim: QuantizationSimModel) -> None:
    """Weights that no batch reached need none: their ranges follow from their values."""
    computed: dict[str, torch.Tensor] | None = None  # what the model makes of its parameters
    for site in sim.quantizers.unreached():
        if site.role != "weight":
            continue
        param = sim.graph.values[site.value].param
        if param is None and computed is None:
            computed = sim._recorded_constants()
        found = (computed or {}).get(site.value) if param is None else sim._interceptor.named_tensor(param)
        if found is not None:
            site.quantizer.observe_once(found.detach())
