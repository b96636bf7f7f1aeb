import torch
from aimet_torch import QuantizationSimModel
from aimet_torch import nn as aimet_nn

from tests.aimet.nets import Net, images

loader = images()
sim = QuantizationSimModel(Net().eval(), next(iter(loader))[0])
with torch.no_grad(), aimet_nn.compute_encodings(sim.model):
    for image, _ in loader:
        sim.model(image)
inside = sim.model.relu2.output_quantizers[0].get_scale().clone()
sim.compute_encodings(lambda model: [model(image) for image, _ in loader])
assert torch.equal(inside, sim.model.relu2.output_quantizers[0].get_scale())
