from aimet_onnx import QuantizationSimModel

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded(), param_type="int4")
sim.compute_encodings(feeds())
sim.export(".", "net")
other = QuantizationSimModel(folded(), param_type="int4")
other.set_and_freeze_param_encodings(encoding_path="net.encodings")
assert other.qc_quantize_op_dict["fc.weight"].is_encoding_frozen()
other.compute_encodings(feeds())
