"""``aimet_onnx.meta``."""
