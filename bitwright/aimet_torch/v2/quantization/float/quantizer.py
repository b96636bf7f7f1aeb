"""``aimet_torch.v2.quantization.float.quantizer``: the older path of ``aimet_torch.quantization.float.quantizer``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.quantization.float.quantizer")
