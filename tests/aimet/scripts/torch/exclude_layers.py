from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch())
sim.exclude_layers_from_quantization([sim.model.conv1, sim.model.fc])
assert sim.model.conv1.param_quantizers["weight"] is None and sim.model.fc.output_quantizers[0] is None
assert sim.model.conv2.param_quantizers["weight"] is not None
sim.exclude_param_from_quantization("weight")
assert sim.model.conv2.param_quantizers["weight"] is None
sim.compute_encodings(lambda model: model(batch()))
