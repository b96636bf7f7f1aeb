"""``aimet_torch.v2.nn.true_quant``: the older path of ``aimet_torch.nn.true_quant``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.nn.true_quant")
