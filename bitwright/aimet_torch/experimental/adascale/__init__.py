"""``aimet_torch.experimental.adascale``: the older path of ``aimet_torch.adascale``."""

from bitwright.aimet_torch.adascale import AdaScale, apply_adascale

__all__ = ["AdaScale", "apply_adascale"]
