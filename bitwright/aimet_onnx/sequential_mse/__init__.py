"""``aimet_onnx.sequential_mse``."""
