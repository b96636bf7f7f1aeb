from aimet_common.defs import QuantScheme
from aimet_onnx.quantsim import QuantizationSimModel
from onnxruntime.quantization.onnx_model import ONNXModel

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(
    model=ONNXModel(folded()),
    dummy_input=feeds()[0],
    quant_scheme=QuantScheme.post_training_tf_enhanced,
    rounding_mode="nearest",
    default_param_bw=4,
    default_activation_bw=16,
    use_symmetric_encodings=False,
    use_cuda=False,
)
sim.compute_encodings(lambda session, args: [session.run(None, feed) for feed in args], feeds())
assert sim.qc_quantize_op_dict["conv1.weight"].bitwidth == 4
assert sim.qc_quantize_op_dict["input"].bitwidth == 16
assert isinstance(sim.model, ONNXModel)
positional = QuantizationSimModel(folded(), feeds()[0], QuantScheme.min_max, "nearest", 8, 8, True, False)
assert positional.qc_quantize_op_dict["input"].use_symmetric_encodings
