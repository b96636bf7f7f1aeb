"""``check_model`` for ONNX models: which operator made the first NaN or Inf."""
