"""``aimet_torch.quantsim``."""

from bitwright.aimet_common.absent import absent_names
from bitwright.aimet_torch.quantsim.quantsim import (
    QuantizationDataType,
    QuantizationSimModel,
    QuantParams,
    QuantScheme,
    compute_encodings_for_sims,
    load_checkpoint,
    load_encodings_to_sim,
    save_checkpoint,
)

__all__ = [
    "QuantParams",
    "QuantScheme",
    "QuantizationDataType",
    "QuantizationSimModel",
    "compute_encodings_for_sims",
    "load_checkpoint",
    "load_encodings_to_sim",
    "save_checkpoint",
]

__getattr__ = absent_names(__name__)
