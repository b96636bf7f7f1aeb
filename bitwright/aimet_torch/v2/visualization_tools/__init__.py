"""``aimet_torch.v2.visualization_tools``: the older path of ``aimet_torch.visualization_tools``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.visualization_tools")
