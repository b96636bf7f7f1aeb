from aimet_onnx import QuantizationSimModel

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded())
other = QuantizationSimModel(folded(), activation_type="int16")
other.compute_encodings(feeds())
sim.set_quantizers({"input": other.qc_quantize_op_dict["input"]})
assert sim.qc_quantize_op_dict["input"].bitwidth == 16
assert (
    sim.qc_quantize_op_dict["input"].get_encodings()[0].max == other.qc_quantize_op_dict["input"].get_encodings()[0].max
)
