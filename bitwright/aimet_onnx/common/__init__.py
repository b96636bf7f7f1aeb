"""``aimet_onnx.common``."""
