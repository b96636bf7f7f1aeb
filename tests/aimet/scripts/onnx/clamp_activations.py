from aimet_onnx import QuantizationSimModel
from aimet_onnx.quantsim import clamp_activation_encodings

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded())
sim.compute_encodings(feeds())
clamp_activation_encodings(sim, 1.5)
for name in sim.activation_names:
    quantizer = sim.qc_quantize_op_dict[name]
    if quantizer.enabled:
        assert quantizer.get_encodings()[0].max <= 1.52
sim.session.run(None, feeds()[0])
