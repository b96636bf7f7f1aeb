"""``aimet_torch.v2.seq_mse``: the older path of ``aimet_torch.seq_mse``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.seq_mse")
