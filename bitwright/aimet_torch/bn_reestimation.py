"""``aimet_torch.bn_reestimation``: statistics of batch norms taken anew after quantization-aware training."""

from bitwright.torch.training.batch_norm import Handle, reestimate_bn_stats

__all__ = ["Handle", "reestimate_bn_stats"]
