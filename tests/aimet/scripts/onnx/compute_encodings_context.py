import aimet_onnx

from tests.aimet.onnx_nets import feeds, folded

sim = aimet_onnx.QuantizationSimModel(folded())
with aimet_onnx.compute_encodings(sim):
    for feed in feeds():
        sim.session.run(None, feed)
inside = sim.qc_quantize_op_dict["input"].get_encodings()[0].delta
sim.compute_encodings(inputs=feeds())
assert sim.qc_quantize_op_dict["input"].get_encodings()[0].delta == inside
