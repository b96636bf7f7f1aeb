"""``aimet_torch.v2.adaround``: the older path of ``aimet_torch.adaround``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.adaround")
