"""``aimet_torch.v2.quantization.encoding_analyzer``: the older path of ``aimet_torch.quantization.encoding_analyzer``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.quantization.encoding_analyzer")
