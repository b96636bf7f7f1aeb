import torch
from aimet_torch import QuantizationSimModel
from aimet_torch.nn import QuantizedLinear
from torch import nn

torch.manual_seed(0)
grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])

layer = QuantizedLinear(64, 8)
before = layer.weight.detach().clone()
layer.set_weight_quantizer_to_mxfp4_int8(block_size=32)
blocks = layer.weight.detach().reshape(8, 2, 32)
scale = 2.0 ** torch.floor(torch.log2(before.reshape(8, 2, 32).abs().amax(2, keepdim=True) / 4))
assert torch.isin((blocks / scale).abs(), grid).all()
assert layer.param_quantizers["weight"].bitwidth == 8 and layer.param_quantizers["weight"].shape == (8, 1)

model, x = nn.Sequential(nn.Conv2d(32, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)), torch.randn(2, 32, 6, 6)
sim = QuantizationSimModel(model, x, default_param_bw=4)
scales = torch.full((8, 2, 1, 1), 0.5).to(torch.float8_e4m3fn)
sim.model[0].set_weight_quantizer_to_nvfp4_int8(scales, 0.02)
assert torch.isin((sim.model[0].weight.detach() / 0.01).abs().round(decimals=3), grid).all()
assert sim.model[0].param_quantizers["weight"].bitwidth == 8
sim.compute_encodings(lambda m: m(x))
try:
    sim.model[2].set_weight_quantizer_to_mxfp4_int8()
except (RuntimeError, ValueError):
    pass
else:
    raise AssertionError("blocks of 32 in 8 channels")
