from aimet_onnx import QuantizationSimModel

from tests.aimet.onnx_nets import folded

sim = QuantizationSimModel(folded())
inputs, outputs, params = sim.get_op_quantizers("conv1")
assert len(inputs) == 1 and not outputs and params["weight"].enabled
inputs, outputs, params = sim.get_op_quantizers(next(n for n in folded().graph.node if n.op_type == "Gemm"))
assert len(outputs) == 1
weights, activations = sim.get_all_quantizers()
assert sum(q.enabled for q in weights) == 3
