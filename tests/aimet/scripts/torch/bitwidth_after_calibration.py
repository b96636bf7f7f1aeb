import torch
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch())
sim.compute_encodings(lambda model: model(batch()))
quantizer = sim.model.relu1.output_quantizers[0]
low, high = quantizer.get_min(), quantizer.get_max()
quantizer.bitwidth = 4
assert torch.allclose(quantizer.get_max(), high) and torch.allclose(quantizer.get_min(), low)
assert torch.allclose(quantizer.get_scale(), (high - low) / 15)
