"""Parameters with their quantized values."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from bitwright.aimet_torch import _modules
from bitwright.aimet_torch._core import walk_modules
from bitwright.errors import ModelError


def fold_parameters(records: Iterable[_modules.Record]) -> None:
    """Write the quantized values of parameters into them and switch their quantizers off."""
    by_name = {}
    for record in records:
        by_name[record.name] = record
    if not by_name:
        return
    sim = next(iter(by_name.values())).sim
    modules = dict(walk_modules(sim.model))
    for path, record in by_name.items():
        for name, slot in record.params._slots.items():
            quantizer = slot.get()
            if quantizer is not None and quantizer.is_initialized():
                parameter = modules[path]._parameters[name]
                assert parameter is not None
                with torch.no_grad():
                    parameter.copy_(quantizer(parameter.detach()))
                slot.set(None)


def original_model(model: nn.Module, qdq_weights: bool) -> nn.Module:
    """A float copy of a simulated model.

    Raises:
        ModelError: the model is none of a simulation.
    """
    record = _modules.record_of(model)
    if record is None:
        raise ModelError(
            "get_original_model",
            f"a {type(model).__name__} is not a simulated model",
            "pass sim.model of a bitwright.aimet_torch.QuantizationSimModel",
        )
    twin = copy.deepcopy(record.sim)
    made: nn.Module = twin.model
    if qdq_weights:
        fold_parameters(_modules.below(made))
    twin.remove()
    detach(made)
    return made


def detach(model: nn.Module) -> None:
    """Take this layer's attributes off the modules of a model."""
    for _, module in walk_modules(model):
        for name in (_modules.RECORD, *_modules.PUBLIC, *_modules.METHODS):
            vars(module).pop(name, None)  # what the module's class has is not in vars
