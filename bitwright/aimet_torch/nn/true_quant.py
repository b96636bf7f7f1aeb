"""``aimet_torch.nn.true_quant``: the quantized classes."""

from __future__ import annotations

from typing import Any

from torch import nn as torch_nn

from bitwright.aimet_torch._registry import QuantizationMixin, quantized_class
from bitwright.aimet_torch.nn.modules import custom

__all__ = ["QuantizationMixin"]


def __getattr__(name: str) -> Any:
    plain = getattr(torch_nn, name.removeprefix("Quantized"), None) if name.startswith("Quantized") else None
    if isinstance(plain, type) and issubclass(plain, torch_nn.Module):
        return quantized_class(plain)
    if name.startswith("Quantized"):
        return getattr(custom, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
