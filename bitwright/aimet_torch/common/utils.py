"""``aimet_torch.common.utils``: what both packages share, from ``aimet_common.utils``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_common.utils")
