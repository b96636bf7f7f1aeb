"""``aimet_torch.adaround``."""
