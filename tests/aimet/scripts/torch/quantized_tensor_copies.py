"""Tensors that carry their encoding are copied with it."""

import copy

import torch
from aimet_torch.quantization import DequantizedTensor, QuantizedTensor, QuantizedTensorBase
from aimet_torch.quantization.affine import Quantize
from aimet_torch.quantization.float import FloatQuantizeDequantize

quantizer = Quantize((), bitwidth=8, symmetric=True)
quantizer.set_range(-1.0, 1.0)
codes = quantizer(torch.linspace(-1, 1, 9))
assert isinstance(codes, QuantizedTensorBase) and isinstance(codes, QuantizedTensor)
for same in (codes.clone(), codes.detach(), copy.deepcopy(codes.detach())):
    assert isinstance(same, QuantizedTensor) and torch.equal(same.dequantize(), codes.dequantize())
    assert same.quantized_repr().dtype == torch.int8
values = codes.dequantize()
assert isinstance(values, DequantizedTensor) and torch.equal(values.quantize(), codes)
assert isinstance(codes.new_empty((2, 3)), QuantizedTensor) and codes.new_empty((2, 3)).shape == (2, 3)

# a float quantizer takes the encoding of another one
half, eight = FloatQuantizeDequantize(dtype=torch.float16), FloatQuantizeDequantize(4, 3)
half.set_encodings(eight.get_encodings())
assert (half.exponent_bits, half.mantissa_bits) == (4, 3)
