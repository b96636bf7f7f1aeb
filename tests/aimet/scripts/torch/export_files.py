import json
import os

import numpy as np
import onnxruntime as ort
from aimet_torch import QuantizationSimModel
from aimet_torch.onnx_utils import OnnxExportApiArgs

from tests.aimet.nets import Net, batch

model, x = Net().eval(), batch()
sim = QuantizationSimModel(model, x)
sim.compute_encodings(lambda m: m(x))
sim.export("out", "net", dummy_input=x)
assert {"net.onnx", "net.encodings", "net_torch.encodings"} <= set(os.listdir("out"))
session = ort.InferenceSession("out/net.onnx")
(output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
assert np.allclose(output, model(x).detach().numpy(), atol=1e-4), "<prefix>.onnx is the float model"
encodings = json.load(open("out/net.encodings"))
assert any(entry["name"] == "conv1.weight" for entry in encodings["param_encodings"])
sim.export("other", "net", x, export_model=False)
assert {"net.encodings", "net_torch.encodings"} <= set(os.listdir("other"))
assert not any(name.endswith(".onnx") for name in os.listdir("other"))
assert OnnxExportApiArgs(opset_version=11).kwargs["opset_version"] == 11
