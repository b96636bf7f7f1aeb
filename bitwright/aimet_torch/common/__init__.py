"""``aimet_torch.common``."""
