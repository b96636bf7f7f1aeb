"""``aimet_torch.onnx``: one ONNX file with QuantizeLinear and DequantizeLinear."""

from bitwright.aimet_torch._export import export_qdq as export

__all__ = ["export"]
