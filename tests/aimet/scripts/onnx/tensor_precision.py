import pytest
from aimet_onnx import QuantizationSimModel, int16

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded())
sim.set_tensor_precision(["relu1.out", "conv2.weight"], int16)
sim.set_tensor_precision("input", "float32")
assert not sim.qc_quantize_op_dict["input"].enabled
with pytest.raises(ValueError):
    sim.set_tensor_precision("nothing", "int8")
sim.set_tensor_precision("nothing", "int8", strict=False)
sim.compute_encodings(feeds())
assert sim.qc_quantize_op_dict["conv2.weight"].get_encodings()[0].bw == 16
