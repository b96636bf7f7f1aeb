"""``aimet_torch.quantization.float``: float quantizers."""

from bitwright.aimet_torch.quantization.float.encoding import FloatEncoding
from bitwright.aimet_torch.quantization.float.quantizer import FloatQuantizeDequantize, QuantizeDequantize

__all__ = ["FloatEncoding", "FloatQuantizeDequantize", "QuantizeDequantize"]
