"""``aimet_torch.model_validator``."""
