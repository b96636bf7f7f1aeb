"""AdaRound: learn for every weight whether it is rounded up or down.

Nagel et al. 2020, arXiv:2004.10568. Letters of the paper: ``V`` is learned, ``h(V)`` in [0, 1] is how far a weight is
rounded up, ``beta`` anneals the regulariser that drives every ``h`` to 0 or 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bitwright.algorithms.rounding.matrices import Grid

ZETA, GAMMA = 1.1, -0.1  # the stretch of the sigmoid, section 3.2


def rectified_sigmoid(v: Tensor) -> Tensor:
    """``h(V) = clip(sigmoid(V) (zeta - gamma) + gamma, 0, 1)``, eq. 23."""
    return torch.clamp(torch.sigmoid(v) * (ZETA - GAMMA) + GAMMA, 0, 1)


def inverse_rectified_sigmoid(h: Tensor) -> Tensor:
    """``V`` with ``h(V) = h``, for ``h`` in [0, 1].

    >>> h = torch.tensor([0.0, 0.25, 1.0])
    >>> torch.allclose(rectified_sigmoid(inverse_rectified_sigmoid(h)), h)
    True
    """
    return -torch.log((ZETA - GAMMA) / (h - GAMMA) - 1)


def regulariser(h: Tensor, beta: float) -> Tensor:
    """``sum of 1 - |2 h - 1|^beta``, eq. 24: zero when every ``h`` is 0 or 1."""
    return (1 - (2 * h - 1).abs().pow(beta)).sum()


def annealed_beta(done: float, beta_range: tuple[float, float], warm_start: float) -> float | None:
    """The exponent when the fraction ``done`` of all iterations is over; ``None`` during the warm start.

    Cosine from the first value of ``beta_range`` to the second.
    """
    if done < warm_start:
        return None
    start, end = beta_range
    along = (done - warm_start) / (1 - warm_start)
    return end + 0.5 * (start - end) * (1 + math.cos(along * math.pi))


class _SoftRound(torch.autograd.Function):
    """``scale * clip(floor + h(V), lo, hi)``; its gradient has the regulariser's added.

    By hand, because the power function costs as much as the rest of the layer: it is needed once, not twice, and the
    regulariser's own value never.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, floor: Tensor, gate: Tensor, grid: Grid, weight: float, beta: float) -> Tensor:
        sigmoid = torch.sigmoid(v)
        h = (sigmoid * (ZETA - GAMMA)).add_(GAMMA).clamp_(0, 1)
        codes = floor + h
        ctx.save_for_backward(sigmoid, h)
        ctx.gate, ctx.weight, ctx.beta = gate, weight, beta
        return torch.clamp(codes, grid.lo, grid.hi).mul_(grid.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        sigmoid, h = ctx.saved_tensors
        result = ctx.gate * grads[0]  # in this order: the result lies as the weights do, not transposed
        if ctx.weight:
            centred = (h * 2).sub_(1)
            slope = centred.abs().pow_(ctx.beta - 1).copysign_(centred)
            result.add_(slope, alpha=-2 * ctx.beta * ctx.weight)
        # of the sigmoid, stretched, and of the clamp after it: one pass each
        result = torch.ops.aten.sigmoid_backward(result, sigmoid).mul_(ZETA - GAMMA)
        return torch.ops.aten.hardtanh_backward(result, h, 0, 1), None, None, None, None, None


class AdaptiveRounding:
    """One weight matrix whose rounding is learned.

    Args:
        w: the float weights, ``[G, O, K]`` or any shape that ``grid`` broadcasts against.
        grid: where they may go.
    """

    def __init__(self, w: Tensor, grid: Grid) -> None:
        self.grid = grid
        ratio = w / grid.scale
        self.floor = ratio.floor()
        # a step of the scale where both codes are on the grid: elsewhere the output does not depend on the choice
        self.gate = grid.scale * ((self.floor >= grid.lo) & (self.floor < grid.hi))
        self.v = inverse_rectified_sigmoid(ratio - self.floor).requires_grad_()

    def parameters(self) -> list[dict[str, Any]]:
        """What the optimiser moves, with a factor of the learning rate."""
        return [{"params": [self.v], "factor": 1.0}]

    def soft(self, weight: float = 0.0, beta: float = 2.0) -> Tensor:
        """The weights between two codes; ``weight`` of the regulariser with exponent ``beta`` in their gradient."""
        result: Tensor = _SoftRound.apply(self.v, self.floor, self.gate, self.grid, weight, beta)
        return result

    @torch.no_grad()
    def undecided(self) -> float:
        """Fraction of the weights whose ``h`` is neither 0 nor 1."""
        h = rectified_sigmoid(self.v)
        return float(((h > 1e-3) & (h < 1 - 1e-3)).float().mean())

    @torch.no_grad()
    def hard(self) -> tuple[Tensor, Grid]:
        """The codes that were chosen, and the grid they lie on."""
        up = (self.v >= 0).to(self.floor.dtype)
        return torch.clamp(self.floor + up, self.grid.lo, self.grid.hi), self.grid
