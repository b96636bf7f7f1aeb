"""``aimet_torch.v2.quantization.affine``: the older path of ``aimet_torch.quantization.affine``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.quantization.affine")
