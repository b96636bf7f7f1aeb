"""``aimet_onnx.common.quantsim_config``."""
