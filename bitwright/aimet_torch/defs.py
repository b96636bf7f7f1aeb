"""``aimet_torch.defs``."""

from bitwright.aimet_common.absent import absent_names

__all__: list[str] = []

__getattr__ = absent_names(__name__)
