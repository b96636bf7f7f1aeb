"""``aimet_torch.v2.utils``: the older path of ``aimet_torch.utils``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.utils")
