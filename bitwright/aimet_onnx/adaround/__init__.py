"""``aimet_onnx.adaround``."""
