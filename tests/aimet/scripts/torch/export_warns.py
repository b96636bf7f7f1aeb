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
