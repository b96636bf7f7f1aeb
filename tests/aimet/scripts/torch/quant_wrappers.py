from aimet_torch.quantsim import QuantizationSimModel

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch())
found = {}
for name, wrapper in sim.quant_wrappers():
    for quantizer in (*wrapper.input_quantizers, *wrapper.output_quantizers, *wrapper.param_quantizers.values()):
        if quantizer and quantizer.enabled:
            found.setdefault(name, []).append(quantizer.bitwidth)
assert found["conv1"] == [8, 8] and found["fc"] == [8, 8]
