"""``aimet_torch.v2.quant_analyzer``: the older path of ``aimet_torch.quant_analyzer``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.quant_analyzer")
