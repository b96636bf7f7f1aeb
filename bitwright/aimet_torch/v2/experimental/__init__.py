"""``aimet_torch.v2.experimental``: the older path of ``aimet_torch.experimental``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.experimental")
