"""``aimet_torch.v2``: the older paths of the modules of ``aimet_torch``."""

from bitwright.aimet_torch import QuantizationSimModel, nn, quantization

__all__ = ["QuantizationSimModel", "nn", "quantization"]
