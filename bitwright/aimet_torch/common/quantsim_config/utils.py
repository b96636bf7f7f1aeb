"""``aimet_torch.common.quantsim_config.utils``: what both packages share, from ``aimet_common.quantsim_config.utils``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_common.quantsim_config.utils")
