import aimet_torch.quantization as Q
import torch

x = torch.tensor([[1.8998, -0.0947, -1.0891, -0.1727]])
half = Q.float.FloatQuantizeDequantize(exponent_bits=5, mantissa_bits=10)
assert half.is_float16() and torch.equal(half(x), x.half().float())
small = Q.float.FloatQuantizeDequantize(dtype=torch.float8_e4m3fn)
with small.compute_encodings():
    small(x)
assert (small(x) - x).abs().max() < 0.07 and small.bitwidth == 8
