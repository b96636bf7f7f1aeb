import onnxruntime as ort
import pytest
from aimet_torch import QuantizationSimModel
from aimet_torch.onnx_utils import OnnxExportApiArgs

from tests.aimet.nets import Net, batch

x = batch()
sim = QuantizationSimModel(Net().eval(), x)
sim.compute_encodings(lambda m: m(x))
sim.export(".", "net", x, onnx_export_args=OnnxExportApiArgs(opset_version=13))
with pytest.raises(ValueError):
    sim.export(".", "net", x, export_to_torchscript=True)

axes = {"image": {0: "batch"}, "logits": {0: "batch"}}
sim.onnx.export((x[:1],), "free.onnx", input_names=["image"], output_names=["logits"], dynamic_axes=axes)
(logits,) = ort.InferenceSession("free.onnx").run(["logits"], {"image": x.numpy()})
assert logits.shape == (4, 10)
