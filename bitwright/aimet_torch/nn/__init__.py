"""``aimet_torch.nn``: quantized modules, and ways to calibrate."""

from __future__ import annotations

from typing import Any

from torch import nn as _torch_nn

from bitwright.aimet_torch import _modules
from bitwright.aimet_torch import _registry as base
from bitwright.aimet_torch._calibration import compute_encodings
from bitwright.aimet_torch._registry import BaseQuantizationMixin, QuantizationMixin, UnknownModuleError
from bitwright.aimet_torch.nn import modules, true_quant
from bitwright.aimet_torch.nn.modules import custom
from bitwright.aimet_torch.quantization.base import QuantizerBase
from bitwright.errors import ModelError

__all__ = [
    "BaseQuantizationMixin",
    "QuantizationMixin",
    "QuantizerBase",
    "UnknownModuleError",
    "base",
    "compute_encodings",
    "compute_param_encodings",
    "custom",
    "modules",
    "true_quant",
]


def compute_param_encodings(model: _torch_nn.Module) -> None:
    """Find the encodings of the parameters of a simulated model.

    Raises:
        ModelError: no model of a simulation of this layer.
    """
    record = _modules.record_of(model)
    if record is not None:
        record.sim.compute_param_encodings()
        return
    own = [module for module in model.modules() if BaseQuantizationMixin in type(module).__mro__]
    if not own:
        raise ModelError(
            "compute_param_encodings",
            f"a {type(model).__name__} has no quantized modules",
            "pass sim.model of a bitwright.aimet_torch.QuantizationSimModel",
        )
    for module in own:
        quantized: Any = module
        quantized.compute_param_encodings()


def __getattr__(name: str) -> Any:
    return getattr(true_quant, name)
