"""``aimet_torch.common.quantsim_config``."""
