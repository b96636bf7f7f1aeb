"""``aimet_torch.v2.nn.modules.custom``: the older path of ``aimet_torch.nn.modules.custom``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.nn.modules.custom")
