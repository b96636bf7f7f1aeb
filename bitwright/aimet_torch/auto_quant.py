"""``aimet_torch.auto_quant``: automatic quantization under AIMET's names."""

from bitwright.aimet_common.auto_quant import AutoQuant

__all__ = ["AutoQuant"]
