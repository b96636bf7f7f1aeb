import torch
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

x = batch()
sim = QuantizationSimModel(Net().eval(), x, default_param_bw=4)
sim.compute_encodings(lambda m: m(x))
weight = sim.model.fc.param_quantizers["weight"](sim.model.fc.weight).clone()
sim.fold_param_quantizers()
assert sim.model.fc.param_quantizers["weight"] is None and torch.equal(sim.model.fc.weight, weight)
sim.model(x)
