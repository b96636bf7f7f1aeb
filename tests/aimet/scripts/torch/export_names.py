import json

import numpy as np
import onnxruntime as ort
from aimet_torch import QuantizationSimModel
from aimet_torch.onnx_utils import OnnxExportApiArgs

from tests.aimet.nets import Net, batch

model, x = Net().eval(), batch()
sim = QuantizationSimModel(model, x)
sim.compute_encodings(lambda m: m(x))
sim.onnx.export(x, "net.onnx", input_names=["image"], output_names=["logits"], dynamo=False)
(logits,) = ort.InferenceSession("net.onnx").run(["logits"], {"image": x.numpy()})
assert np.allclose(logits, model(x).detach().numpy(), atol=1e-4)
names = {entry["name"] for entry in json.load(open("net.encodings"))["activation_encodings"]}
assert {"image", "logits"} <= names
other = QuantizationSimModel(model, x)
other.load_encodings("net.encodings")
sim.export(".", "older", x, onnx_export_args=OnnxExportApiArgs(input_names=["image"], output_names=["logits"]))
ort.InferenceSession("older.onnx").run(["logits"], {"image": x.numpy()})
