"""``aimet_torch.v2.mixed_precision``: the older path of ``aimet_torch.mixed_precision``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.mixed_precision")
