"""``aimet_torch.meta``."""
