"""``aimet_torch.v2.quantization.tensor``: the older path of ``aimet_torch.quantization.tensor``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.quantization.tensor")
