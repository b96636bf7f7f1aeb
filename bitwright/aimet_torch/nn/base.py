"""``aimet_torch.nn.base``."""

from bitwright.aimet_torch._registry import BaseQuantizationMixin, UnknownModuleError

__all__ = ["BaseQuantizationMixin", "UnknownModuleError"]
