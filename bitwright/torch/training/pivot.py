"""Larger gradients for values that lie close to where their code changes (pivot gradient spiking).

Straight-through gives a value the same gradient wherever it lies between two thresholds, although only one close to a
threshold changes its code in the next step. Multiplying the gradients of those lets codes settle earlier.

Counterpart: ``aimet_torch.experimental.pgs`` of AIMET 2.42, which has it on CUDA; no paper is named there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bitwright.errors import ConfigError, checks_arguments
from bitwright.torch.quantizers.fake_quantize import Grid
from bitwright.torch.quantizers.quantizer import Quantizer

if TYPE_CHECKING:
    from bitwright.torch.simulation.quantsim import QuantizationSimModel


class _Spiked(torch.autograd.Function):
    """The identity, whose gradient is multiplied where the mask is set.

    The multiplier is a tensor without axes: ``torch.compile`` takes a number that changed between calls for a symbol, which
    it cannot hand to the backward of a function.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, near: Tensor, multiplier: Tensor) -> Tensor:
        ctx.save_for_backward(near, multiplier)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        near, multiplier = ctx.saved_tensors
        return torch.where(near, grad * multiplier, grad), None, None


@dataclass(frozen=True)
class PivotGradient:
    """What a quantizer does to the gradients of its input.

    Attributes:
        eps: width of the zone about every threshold, in steps; above 0, at most 1.
        multiplier: of the gradients in it.

    Raises:
        ConfigError: (a ValueError) a number that has no meaning.
    """

    eps: float = 0.05
    multiplier: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.eps <= 1:
            raise ConfigError("eps", f"it is {self.eps}", "use a part of a step: above 0, at most 1; 0.05 is usual")
        if not (self.multiplier >= 0 and self.multiplier < float("inf")):
            raise ConfigError("multiplier", f"it is {self.multiplier}", "use a finite number of at least 0; 3 is usual")

    def __call__(self, x: Tensor, grid: Grid) -> Tensor:
        """``x`` with its gradient multiplied where it lies within ``eps / 2`` steps of a threshold of ``grid``."""
        steps = x.detach().reshape(grid.view or x.shape) / grid.scale
        near = (steps - steps.round()).abs() > (1 - self.eps) / 2
        multiplier = torch.full((), self.multiplier, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        spiked: Tensor = _Spiked.apply(x, near.reshape(x.shape), multiplier)
        return spiked


@checks_arguments
def pivot_gradients(sim: QuantizationSimModel, eps: float = 0.05, multiplier: float = 3.0) -> None:
    """Multiply the gradients of values close to where their code changes, at every integer quantizer of up to 16 bits.

    The forward pass stays as it is, bit for bit; gradients outside of a grid stay zero.

    Args:
        sim: changed in place; it need not be calibrated yet.
        eps: width of the zone about every threshold, in steps.
        multiplier: of the gradients in it; 1 leaves all gradients as they are.

    Raises:
        ConfigError: ``eps`` is not above 0 and at most 1, or ``multiplier`` is negative or not finite.
    """
    pivot = PivotGradient(eps, multiplier)
    for site in sim.quantizers.values():
        if isinstance(site.quantizer, Quantizer):
            site.quantizer.pivot = None if multiplier == 1 else pivot
