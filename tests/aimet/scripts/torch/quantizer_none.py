import torch
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

model, x = Net().eval(), batch()
sim = QuantizationSimModel(model, x)
for module in sim.qmodules():
    for i in range(len(module.input_quantizers)):
        module.input_quantizers[i] = None
    for i, _ in enumerate(module.output_quantizers):
        module.output_quantizers[i] = None
    for name in module.param_quantizers:
        module.param_quantizers[name] = None
assert not list(sim.quantizers())
assert torch.allclose(sim.model(x), model(x), atol=1e-6)
