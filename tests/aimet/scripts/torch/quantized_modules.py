import aimet_torch.quantization as Q
import torch
from aimet_torch.nn import QuantizationMixin, QuantizedConv2d, QuantizedLinear

linear = torch.nn.Linear(10, 4)
qlinear = QuantizedLinear.from_module(linear)
assert qlinear.weight is linear.weight and qlinear.input_quantizers[0] is None
qlinear.input_quantizers[0] = Q.affine.QuantizeDequantize((), 8, False)
qlinear.output_quantizers[0] = Q.affine.QuantizeDequantize((), 8, False)
qlinear.param_quantizers["weight"] = Q.affine.QuantizeDequantize((4, 1), 4, True)
x = torch.randn(6, 10)
with qlinear.compute_encodings():
    qlinear(x)
y = qlinear(x)
assert isinstance(y, Q.DequantizedTensor) and 0 < (y - linear(x)).abs().max() < 1
y.sum().backward()
assert linear.weight.grad is not None and qlinear.param_quantizers["weight"].min.grad is not None
assert type(qlinear.get_original_module()) is torch.nn.Linear
assert isinstance(QuantizedConv2d(3, 4, 1), QuantizationMixin) and isinstance(qlinear, torch.nn.Linear)
