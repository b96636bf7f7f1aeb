"""AIMET's ways to calibrate, each by our one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from bitwright.aimet_torch import _modules
from bitwright.aimet_torch._registry import BaseQuantizationMixin
from bitwright.errors import ModelError


class _NothingRan(Exception):
    """The callback returned without running the model."""


def calibrate(
    sim: Any, callback: Callable[[nn.Module], Any], compute: Callable[..., None], options: dict[str, Any]
) -> None:
    """Calibrate by a callback; one that runs nothing finds the parameters' encodings alone, as in AIMET."""
    ran: list[bool] = []
    handle = sim.model.register_forward_hook(lambda *_: ran.append(True))

    def counted(model: nn.Module) -> None:
        callback(model)
        if not ran:
            raise _NothingRan

    try:
        compute(counted, **options)
    except _NothingRan:
        calibrate_parameters(sim, compute)
    finally:
        handle.remove()


def calibrate_parameters(sim: Any, compute: Callable[..., None]) -> None:
    """Find the encodings of the parameters on the example input, with everything else switched off and kept."""
    with _left_alone(site for site in sim.quantizers.values() if site.role in ("input", "output")):
        compute(None, progress=False)


@contextmanager
def _left_alone(sites: Iterator[Any]) -> Iterator[None]:
    kept = [(site.quantizer, site.quantizer.enabled, site.quantizer.frozen) for site in sites]
    for quantizer, _, _ in kept:
        quantizer.enabled, quantizer.frozen = False, True
    try:
        yield
    finally:
        for quantizer, enabled, frozen in kept:
            quantizer.enabled, quantizer.frozen = enabled, frozen


@contextmanager
def compute_encodings(model: nn.Module) -> Iterator[None]:
    """Calibrate on every call of a simulated model inside the block; the encodings are in effect at its end.

    With a part of the model (``sim.model.layer1``), the encodings of all other places are kept.

    Raises:
        ModelError: no model of a simulation of this layer.
    """
    record = _modules.record_of(model)
    own_modules: list[Any] = [m for m in model.modules() if BaseQuantizationMixin in type(m).__mro__]
    if record is not None:
        with _others_kept(record.sim, model), _observed(record.sim):
            yield
        return
    if not own_modules:
        raise ModelError(
            "compute_encodings",
            f"a {type(model).__name__} is not a module of a simulation",
            "pass sim.model of a bitwright.aimet_torch.QuantizationSimModel, or one of its modules",
        )
    with ExitStack() as stack:
        for module in own_modules:
            stack.enter_context(module.compute_encodings())
        yield


@contextmanager
def _others_kept(sim: Any, model: nn.Module) -> Iterator[None]:
    """Quantizers of other places than those of ``model`` stay as they are inside the block."""
    records = list(_modules.below(model))
    own = {id(site.quantizer) for r in records for _, slot in r.slots() for site in slot.sites}
    own |= {id(site.quantizer) for r in records for site in r.inside}
    kept = [(q, q.frozen, q.enabled) for q in sim.quantizers.unique() if id(q) not in own]
    for quantizer, _, enabled in kept:  # what has no range yet cannot take part, and stays without one
        quantizer.frozen, quantizer.enabled = True, enabled and quantizer.encoding is not None
    try:
        yield
    finally:
        for quantizer, was, enabled in kept:
            quantizer.frozen, quantizer.enabled = was, enabled


@contextmanager
def _observed(sim: Any) -> Iterator[None]:
    """A calibration of what runs in the block; where nothing runs, of the parameters alone, as in AIMET."""
    ran: list[bool] = []
    handle = sim.model.register_forward_hook(lambda *_: ran.append(True))
    try:
        with sim.calibrating():
            yield
            if not ran:
                raise _NothingRan
    except _NothingRan:
        sim.compute_param_encodings()
    finally:
        handle.remove()
