"""``aimet_torch.quantization.base``."""

from bitwright.aimet_torch.quantization.base.encoding import EncodingBase
from bitwright.aimet_torch.quantization.base.quantizer import QuantizerBase

__all__ = ["EncodingBase", "QuantizerBase"]
