"""``aimet_torch.quantization``: quantizers as modules and functions, and tensors that carry their encoding."""

from bitwright.aimet_torch.quantization import affine, base, encoding_analyzer, float
from bitwright.aimet_torch.quantization.affine import get_backend, set_backend
from bitwright.aimet_torch.quantization.tensor import (
    DequantizedTensor,
    EncodingError,
    QuantizedTensor,
    QuantizedTensorBase,
)

__all__ = [
    "DequantizedTensor",
    "EncodingError",
    "QuantizedTensor",
    "QuantizedTensorBase",
    "affine",
    "base",
    "encoding_analyzer",
    "float",
    "get_backend",
    "set_backend",
]
