import json

import aimet_torch
import onnx
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

x = batch()
sim = QuantizationSimModel(Net().eval(), x)
sim.compute_encodings(lambda model: model(x))
sim.onnx.export(x, "net.onnx", encoding_version="1.0.0")
assert json.load(open("net.encodings"))["version"] == "1.0.0"
aimet_torch.onnx.export(sim, x, "qdq.onnx", export_int32_bias=True)
assert any(node.op_type == "QuantizeLinear" for node in onnx.load("qdq.onnx").graph.node)
assert not any(node.op_type == "QuantizeLinear" for node in onnx.load("net.onnx").graph.node)
