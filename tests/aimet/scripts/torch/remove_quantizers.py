import torch
from aimet_torch import QuantizationSimModel
from aimet_torch.utils import remove_all_quantizers, remove_param_quantizers
from aimet_torch.v2.utils import remove_activation_quantizers, remove_output_quantizers

from tests.aimet.nets import Net, batch

model, x = Net().eval(), batch()
sim = QuantizationSimModel(model, x)
sim.compute_encodings(lambda m: m(x))
quantized = sim.model(x)
with remove_all_quantizers(sim.model):
    assert torch.allclose(sim.model(x), model(x), atol=1e-6)
assert torch.equal(sim.model(x), quantized)
with remove_activation_quantizers([sim.model.conv1, sim.model.relu1]):
    assert sim.model.conv1.input_quantizers[0] is None and sim.model.fc.output_quantizers[0] is not None
with remove_param_quantizers(sim.model), remove_output_quantizers(sim.model):
    assert sim.model.conv1.param_quantizers["weight"] is None
    assert sim.model.conv1.input_quantizers[0] is not None
