from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch())
for _, module in sim.named_qmodules():
    if module.param_quantizers.get("weight"):
        module.param_quantizers["weight"].bitwidth = 4
sim.compute_encodings(lambda model: model(batch()))
assert sim.model.fc.param_quantizers["weight"].get_encodings().bitwidth == 4
codes = sim.model.fc.param_quantizers["weight"](sim.model.fc.weight).quantize()
assert codes.min() >= -8 and codes.max() <= 7
