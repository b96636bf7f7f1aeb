import torch
from aimet_torch import QuantizationSimModel
from aimet_torch.experimental.pgs import disable_pgs, enable_pgs, get_pgs_eps, get_pgs_multiplier, is_pgs_enabled

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch(), default_param_bw=4)
sim.compute_encodings(lambda model: model(batch()))


def gradient():
    sim.model.zero_grad()
    sim.model(batch()).square().sum().backward()
    return sim.model.conv1.weight.grad.clone()


plain = gradient()
enable_pgs(eps=0.3, multiplier=3.0)
assert is_pgs_enabled() and get_pgs_eps() == 0.3 and get_pgs_multiplier() == 3.0
assert not torch.equal(gradient(), plain)
disable_pgs()
assert not is_pgs_enabled() and torch.equal(gradient(), plain)
try:
    enable_pgs(eps=0.0)
except ValueError:
    pass
else:
    raise AssertionError("eps of 0 was accepted")
