"""``aimet_torch.nn``: quantized modules, and ways to calibrate."""

from __future__ import annotations

from typing import Any

from torch import nn

from bitwright.aimet_common.names import names_below
from bitwright.aimet_torch import quantized_modules, quantizers
from bitwright.aimet_torch.module_quantizers import record_of
from bitwright.aimet_torch.quantized_modules import (
    BaseQuantizationMixin,
    QuantizationMixin,
    UnknownModuleError,
    compute_encodings,
    is_own,
    quantized_class,
)
from bitwright.aimet_torch.quantizers import QuantizerBase
from bitwright.errors import ModelError, with_article

__all__ = [
    "BaseQuantizationMixin", "QuantizationMixin", "QuantizerBase", "UnknownModuleError", "compute_encodings",
    "compute_param_encodings",
]  # fmt: skip

__path__: list[str] = []  # its older submodules are rows of the table of aliases


def compute_param_encodings(model: nn.Module) -> None:
    """Find the encodings of the parameters of a simulated model.

    Raises:
        ModelError: no model of a simulation of this layer.
    """
    record = record_of(model)
    if record is not None:
        record.sim.compute_param_encodings()
        return
    own = [module for module in model.modules() if is_own(module)]
    if not own:
        raise ModelError(
            "compute_param_encodings",
            f"{with_article(type(model).__name__)} has no quantized modules",
            "pass sim.model of a bitwright.aimet_torch.QuantizationSimModel",
        )
    for module in own:
        quantized: Any = module
        quantized.compute_param_encodings()


_found = names_below(__name__, quantizers.__name__)


def __getattr__(name: str) -> Any:
    name = name.removeprefix("Fake")  # AIMET's older family: the same classes here
    if name in globals():
        return globals()[name]
    plain: Any = None
    if name.startswith("Quantized") and not hasattr(quantizers, name):
        plain = getattr(nn, name.removeprefix("Quantized"), None)
        plain = plain or getattr(nn.modules.linear, name.removeprefix("Quantized"), None)
    if isinstance(plain, type) and issubclass(plain, nn.Module):
        return quantized_class(plain)
    return getattr(quantized_modules, name, None) or _found(name)
