import aimet_onnx

from tests.aimet.onnx_nets import feeds, folded

sim = aimet_onnx.QuantizationSimModel(folded(), param_type="int4", activation_type="int8")
aimet_onnx.apply_adaround(sim, feeds(), num_iterations=10, nodes_to_include=["conv1", "fc"])
assert sim.qc_quantize_op_dict["conv1.weight"].is_encoding_frozen()
assert not sim.qc_quantize_op_dict["conv2.weight"].is_encoding_frozen()
sim.compute_encodings(feeds())
