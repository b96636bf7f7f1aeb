import torch
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

model, x = Net().eval(), batch()
sim = QuantizationSimModel(model, x, default_param_bw=4)
sim.compute_encodings(lambda m: m(x))
original = sim.get_original_model(sim.model)
assert torch.equal(original(x), model(x)) and not hasattr(original.conv1, "param_quantizers")
rounded = QuantizationSimModel.get_original_model(sim.model, qdq_weights=True)
assert torch.equal(rounded.conv1.weight, sim.model.conv1.param_quantizers["weight"](sim.model.conv1.weight))
assert sim.model.conv1.param_quantizers["weight"] is not None
