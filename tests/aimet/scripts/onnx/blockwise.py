import pytest
from aimet_onnx import QSpec, QuantizationSimModel
from aimet_onnx.quantsim import set_blockwise_quantization_for_weights, set_param_type

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded())
set_blockwise_quantization_for_weights(sim, ("Gemm", "Conv"), 4, True, 64, nodes_to_exclude=["conv2"])
sim.compute_encodings(feeds())
assert len(sim.qc_quantize_op_dict["fc.weight"].get_encodings()) == 10 * 8
assert len(sim.qc_quantize_op_dict["conv1.weight"].get_encodings()) == 8, "64 does not divide its 3 channels"
with pytest.raises(ValueError):
    set_blockwise_quantization_for_weights(sim, "Conv", 4, True, 64, strict=True)
set_param_type(sim, QSpec.per_tensor("int16"), op_types="Conv")
sim.compute_encodings(feeds())
assert len(sim.qc_quantize_op_dict["conv1.weight"].get_encodings()) == 1
