"""``aimet_torch.v2.quantization.affine.backends``: the older path of ``aimet_torch.quantization.affine.backends``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.quantization.affine.backends")
