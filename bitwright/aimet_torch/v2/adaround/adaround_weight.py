"""``aimet_torch.v2.adaround.adaround_weight``: the older path of ``aimet_torch.adaround.adaround_weight``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.adaround.adaround_weight")
