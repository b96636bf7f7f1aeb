import json
import os

import onnx
from aimet_onnx import QuantizationSimModel

from tests.aimet.onnx_nets import feeds, folded

sim = QuantizationSimModel(folded())
sim.compute_encodings(feeds())
sim.export("out", "net", encoding_version="0.6.1")
assert {"net.onnx", "net.encodings"} <= set(os.listdir("out"))
assert {node.op_type for node in onnx.load("out/net.onnx").graph.node} == {"Conv", "Relu", "Flatten", "Gemm"}
encodings = json.load(open("out/net.encodings"))
assert encodings["version"] == "0.6.1" and "conv1.weight" in encodings["param_encodings"]
sim.export("only", "net", export_model=False)
assert os.listdir("only") == ["net.encodings"]
