from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch())
sim.model.relu1.output_quantizers[0].symmetric = True
sim.model.conv2.param_quantizers["weight"].symmetric = False
sim.compute_encodings(lambda model: model(batch()))
activation = sim.model.relu1.output_quantizers[0].get_encodings()
assert activation.symmetry and activation.min == -activation.max - activation.scale
assert not sim.model.conv2.param_quantizers["weight"].get_encodings().symmetry
