"""``aimet_torch.experimental.spinquant``: the older path of ``aimet_torch.spinquant``."""

from bitwright.aimet_torch.spinquant import SpinQuant, apply_spinquant

__all__ = ["SpinQuant", "apply_spinquant"]
