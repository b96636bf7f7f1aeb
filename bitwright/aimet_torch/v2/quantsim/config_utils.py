"""``aimet_torch.v2.quantsim.config_utils``: the older path of ``aimet_torch.quantsim.config_utils``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.quantsim.config_utils")
