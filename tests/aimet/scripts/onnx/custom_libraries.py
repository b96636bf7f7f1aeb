import pytest
from aimet_onnx import QuantizationSimModel

from tests.aimet.onnx_nets import folded

QuantizationSimModel(folded(), user_onnx_libs=None, providers=["CPUExecutionProvider"], path="/nowhere")
with pytest.raises(ValueError, match="custom"):
    QuantizationSimModel(folded(), user_onnx_libs=["custom.so"])
with pytest.raises(TypeError, match="no arguments"):
    QuantizationSimModel(folded(), bits=3)
