import aimet_torch.quantization as Q
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch())
mine = Q.affine.QuantizeDequantize(shape=(), bitwidth=16, symmetric=False)
sim.model.relu1.output_quantizers[0] = mine
sim.model.fc.param_quantizers["weight"] = Q.affine.QuantizeDequantize(shape=(10, 1), bitwidth=4, symmetric=True)
sim.compute_encodings(lambda model: model(batch()))
assert sim.model.relu1.output_quantizers[0].bitwidth == 16
assert mine.is_initialized() and mine.get_scale() == sim.model.relu1.output_quantizers[0].get_scale()
assert sim.model.fc.param_quantizers["weight"].bitwidth == 4
