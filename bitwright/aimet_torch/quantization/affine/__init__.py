"""``aimet_torch.quantization.affine``: affine quantizers as modules and functions."""

from bitwright.aimet_torch.quantization.affine.backends import (
    dequantize,
    get_backend,
    quantize,
    quantize_dequantize,
    set_backend,
)
from bitwright.aimet_torch.quantization.affine.encoding import AffineEncoding, GroupedBlockEncoding, VectorEncoding
from bitwright.aimet_torch.quantization.affine.quantizer import (
    AffineQuantizerBase,
    Dequantize,
    GroupedBlockQuantizeDequantize,
    Quantize,
    QuantizeDequantize,
)

__all__ = [
    "AffineEncoding",
    "AffineQuantizerBase",
    "Dequantize",
    "GroupedBlockEncoding",
    "GroupedBlockQuantizeDequantize",
    "Quantize",
    "QuantizeDequantize",
    "VectorEncoding",
    "dequantize",
    "get_backend",
    "quantize",
    "quantize_dequantize",
    "set_backend",
]
