"""``aimet_torch.amp``: mixed precision under its older path."""
