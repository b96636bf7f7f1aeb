import torch
from aimet_torch import QuantizationSimModel
from aimet_torch.adascale import apply_adascale

from tests.aimet.nets import Mlp

data = [torch.randn(8, 16) for _ in range(2)]
sim = QuantizationSimModel(Mlp(), data[0], default_param_bw=4)
apply_adascale(sim, data, num_iterations=5)
sim.compute_encodings(lambda model: [model(x) for x in data])
