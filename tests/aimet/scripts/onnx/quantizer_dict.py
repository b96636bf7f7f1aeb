from aimet_onnx import QuantizationSimModel

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded())
for name in sim.param_names:
    quantizer = sim.qc_quantize_op_dict[name]
    if quantizer.enabled:
        quantizer.set_bitwidth(4)
        quantizer.use_symmetric_encodings = True
sim.qc_quantize_op_dict["output"].enabled = False
sim.compute_encodings(feeds())
weights = sim.get_qc_quantize_op()["conv1.weight"].get_encodings()
assert len(weights) == 8 and all(e.bw == 4 and e.offset == -8 for e in weights)
assert sim.qc_quantize_op_dict["output"].get_encodings() is None
assert not sim.qc_quantize_op_dict["conv1.out"].enabled, "the activation behind it has the quantizer"
assert {"input", "relu1.out", "output"} <= set(sim.activation_names)
