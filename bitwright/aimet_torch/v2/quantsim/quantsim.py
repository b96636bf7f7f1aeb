"""``aimet_torch.v2.quantsim.quantsim``: the older path of ``aimet_torch.quantsim.quantsim``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.quantsim.quantsim")
