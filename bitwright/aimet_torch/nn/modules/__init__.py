"""``aimet_torch.nn.modules``."""

from bitwright.aimet_torch.nn.modules import custom

__all__ = ["custom"]
