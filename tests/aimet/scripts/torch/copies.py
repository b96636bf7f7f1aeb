import copy

import torch
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

model, x = Net().eval(), batch()
sim = QuantizationSimModel(model, x)
sim.compute_encodings(lambda m: m(x))
assert sim.model.state_dict().keys() == model.state_dict().keys()
twin = copy.deepcopy(sim.model)
twin.conv1.param_quantizers["weight"].bitwidth = 2
assert sim.model.conv1.param_quantizers["weight"].bitwidth == 8
assert torch.equal(twin.conv1.weight, sim.model.conv1.weight) and not torch.equal(twin(x), sim.model(x))
