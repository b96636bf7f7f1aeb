"""``aimet_torch.common.defs``: what both packages share, from ``aimet_common.defs``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_common.defs")
