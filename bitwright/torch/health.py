"""Which call of a PyTorch model turned finite numbers into NaN or Inf, and why.

The model runs on the data as it is, every call seen by a :class:`~bitwright.torch.doctor.Doctor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright.core.health.report import HealthReport
from bitwright.core.simulation.calibration import refuse_empty
from bitwright.errors import CalibrationError, ConfigError
from bitwright.progress import progress as shown
from bitwright.torch.calls.batches import as_call, evaluation, model_device, refuse_providers, to_device
from bitwright.torch.calls.trees import tensors_in
from bitwright.torch.doctor import Doctor
from bitwright.torch.interception.forwards import forward_signature
from bitwright.torch.interception.frames import Key
from bitwright.torch.interception.intercept import Interceptor
from bitwright.torch.interception.record import explained, find_places


def check_health(model: nn.Module, data: Any, providers: Any, threads: int, progress: bool) -> HealthReport:
    """See :func:`bitwright.methods.health.check_model`.

    Raises:
        ConfigError: ``providers`` or ``threads`` are given.
        CalibrationError: no data.
    """
    refuse_providers(providers)
    if threads:
        raise ConfigError("threads", f"{threads} is given for a PyTorch module", "call torch.set_num_threads instead")
    if data is None:
        raise CalibrationError(
            "check_model",
            "no data was given, and a module does not say what it takes",
            "write check_model(model, [batch])",
        )
    interceptor = Interceptor(model)
    doctor = _doctor(interceptor)
    doctor.look_at_parameters(model)
    if doctor.bad_params:
        return doctor.report()
    interceptor.attach()
    try:
        with torch.no_grad(), evaluation(model):
            return _feed(interceptor, data, progress).report()
    finally:
        interceptor.detach()


def _doctor(interceptor: Interceptor) -> Doctor:
    model = interceptor.model
    return Doctor(lambda: interceptor, forward_signature(model), type(model).__name__)


def _feed(interceptor: Interceptor, data: Iterable[Any] | Callable[..., Any], show: bool) -> Doctor:
    if isinstance(data, (torch.Tensor, np.ndarray, Mapping)):
        raise CalibrationError(
            "check_model",
            f"data is a {type(data).__name__}, not a list of batches",
            "write check_model(model, [batch]) for a single batch",
        )
    doctor = _doctor(interceptor)
    try:
        if callable(data):
            with interceptor.handled_by(doctor):
                _run_callback(interceptor.model, data, doctor)
            return doctor
        device = model_device(interceptor.model)
        for batch in shown(data, "checking", show):
            call = as_call(to_device(batch, device))
            refuse_empty(doctor.batches, _shapes(call))
            if doctor.batches:
                _examine(doctor, *call)
            else:  # again, where layers share parameters or loop: the places are those of a simulation
                doctor = find_places(interceptor, lambda call=call: _examine(_doctor(interceptor), *call), 1)  # type: ignore[misc]
    except KeyboardInterrupt:
        doctor.notes.append(f"interrupted after {doctor.batches} batches")
        return doctor
    if not doctor.batches:
        raise CalibrationError(
            "check_model", "the data held no batch", "pass a non-empty list (a generator can be used only once)"
        )
    return doctor


def _shapes(call: tuple[Any, ...]) -> dict[str, tuple[int, ...]]:
    return {f"input {i}": tuple(tensor.shape) for i, tensor in enumerate(tensors_in(call))}


def _examine(doctor: Doctor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Doctor:
    """Run the model on one batch."""
    model = doctor.interceptor.model
    try:
        with doctor.interceptor.handled_by(doctor):
            model(*args, **kwargs)
    except Exception as error:
        if not doctor.fail(error):
            raise explained(model, doctor.interceptor.failed_in, args, kwargs, error) from error
    return doctor


def _run_callback(model: nn.Module, callback: Callable[..., Any], doctor: Doctor) -> None:
    """Everything the callback calls is one batch; what it returns, and what the model did, are the outputs.

    Its first call of the model tells the places, where layers share parameters or loop.
    """
    interceptor = doctor.interceptor
    told: list[bool] = []
    apart: list[bool] = []

    def tell_places(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not apart:
            refuse_empty(0, _shapes((args, kwargs)))
        if not told:
            told.append(True)
            apart.append(True)
            find_places(interceptor, lambda: _examined_apart(interceptor, args, kwargs), 1)
            apart.clear()

    hooks = [
        model.register_forward_pre_hook(tell_places, with_kwargs=True),
        model.register_forward_hook(lambda module, args, output: None if apart else doctor.returns(output)),
    ]
    try:
        with interceptor.active():
            doctor.begin((), {})
            doctor.end(callback(model))
    finally:
        for hook in hooks:
            hook.remove()


def _examined_apart(interceptor: Interceptor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Doctor:
    """One forward of its own, in the middle of what else runs."""
    doctor = _doctor(interceptor)
    with interceptor.suspended(doctor), torch.no_grad():
        interceptor.model(*args, **kwargs)
    return doctor


def diagnose_batch(
    interceptor: Interceptor,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    repaired: Callable[[Key, Callable[..., Any]], Callable[..., Any]] | None = None,
) -> HealthReport:
    """The report of one batch on the float model of a simulation, also in the middle of its own forward.

    ``repaired`` gives the function that takes the place of another at a call, where repairs are in effect.
    """
    doctor = _doctor(interceptor)
    doctor.repaired = repaired
    with interceptor.suspended(doctor), torch.no_grad():
        interceptor.model(*args, **kwargs)
    return doctor.report()
