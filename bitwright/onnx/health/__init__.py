"""``check_model`` for ONNX models: which operator made the first NaN or Inf."""

from bitwright.onnx.health.check import check_health as check_health
