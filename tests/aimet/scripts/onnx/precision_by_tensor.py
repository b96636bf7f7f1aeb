"""Mixed precision by hand: tensors and types of nodes."""

import aimet_onnx
from aimet_onnx import QuantizationSimModel, int4, int8, int16
from aimet_onnx.quantsim import set_param_type

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded(), param_type=int8, activation_type=int8)
sim.set_tensor_precision(["input", "output"], int16)
sim.set_tensor_precision("fc.weight", "int16")
set_param_type(sim, int4, op_types=("Conv",))
set_param_type(sim, aimet_onnx.float16, nodes_to_include=["conv1"])
sim.compute_encodings(feeds())
table = sim.qc_quantize_op_dict
assert [table[name].bitwidth for name in ("input", "output", "fc.weight", "conv2.weight")] == [16, 16, 16, 4]
assert sim.session.run(None, feeds()[0])[0].shape == (2, 10)
