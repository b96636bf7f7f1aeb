"""Training of a simulated model: safe steps, batch norms, oscillation, distillation, and choice of parameters."""

from bitwright.torch.training.batch_norm import fold_all_batch_norms_to_scale, freeze_batch_norms, reestimate_bn_stats
from bitwright.torch.training.distill import Distillation, distillation_loss
from bitwright.torch.training.guard import TrainingGuard
from bitwright.torch.training.low_rank import LowRankCorrection
from bitwright.torch.training.oscillation import WeightFreezing, dampening_loss, pivot_gradients
from bitwright.torch.training.partial import parameter_groups

__all__ = [
    "Distillation",
    "LowRankCorrection",
    "TrainingGuard",
    "WeightFreezing",
    "dampening_loss",
    "distillation_loss",
    "fold_all_batch_norms_to_scale",
    "freeze_batch_norms",
    "parameter_groups",
    "pivot_gradients",
    "reestimate_bn_stats",
]
