"""``aimet_torch.common.quantsim_config.config_utils``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_common.quantsim_config.config_utils")
