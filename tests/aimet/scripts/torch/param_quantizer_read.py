import torch
from aimet_torch import QuantizationSimModel
from aimet_torch.quantization.affine import QuantizeDequantize

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch())
sim.compute_encodings(lambda model: model(batch()))
quantizer = sim.model.conv1.param_quantizers["weight"]
assert isinstance(quantizer, QuantizeDequantize)
assert quantizer.bitwidth == 8 and quantizer.symmetric and quantizer.signed
weight = sim.model.conv1.weight
expected = weight.detach().abs().amax(dim=(1, 2, 3), keepdim=True)
assert quantizer.get_scale().shape == (8, 1, 1, 1)
assert torch.all(quantizer.get_max() <= expected * (1 + 1e-6))
assert torch.equal(quantizer.get_offset(), torch.zeros(8, 1, 1, 1))
assert (quantizer(weight) - weight).abs().max() <= quantizer.get_scale().max() / 2 + 1e-6
