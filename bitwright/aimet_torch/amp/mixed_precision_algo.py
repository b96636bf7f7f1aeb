"""``aimet_torch.amp.mixed_precision_algo``: see :mod:`bitwright.aimet_torch.mixed_precision`."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_torch.mixed_precision")
