"""``aimet_torch.v2.batch_norm_fold``: the older path of ``aimet_torch.batch_norm_fold``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.batch_norm_fold")
