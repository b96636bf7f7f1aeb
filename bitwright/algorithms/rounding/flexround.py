"""FlexRound: learn what each weight is divided by before it is rounded.

Lee et al. 2023, arXiv:2306.00317, eq. 2: ``W_q = s1 round(W / (s1 S2 s3))``, with ``s1`` the scale of the grid, ``S2`` one
factor per weight and ``s3`` one per output channel. The factors are learned as logarithms, so that they stay positive
(as in AdaScale); all of them start at 1, where the result is rounding to nearest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitwright.algorithms.rounding.matrices import Grid


class LearnedDivision:
    """One weight matrix whose division is learned.

    Args:
        w: the float weights, ``[G, O, K]``.
        grid: where they may go; its scale is learned per row where every row has scales of its own.
    """

    def __init__(self, w: Tensor, grid: Grid) -> None:
        self.w, self.grid = w, grid
        self.element = torch.zeros_like(w).requires_grad_()
        self.row = w.new_zeros((*w.shape[:2], 1)).requires_grad_()
        self.step = w.new_zeros((*w.shape[:2], 1) if grid.own_rows else (1, 1, 1)).requires_grad_()

    def parameters(self) -> list[dict[str, Any]]:
        """What the optimiser moves, with a factor of the learning rate."""
        return [{"params": [self.element, self.row], "factor": 1.0}, {"params": [self.step], "factor": 0.5}]

    def _scale(self) -> Tensor:
        return self.grid.scale * self.step.exp()

    def _ratio(self, scale: Tensor) -> Tensor:
        return self.w / (scale * (self.element + self.row).exp())

    def soft(self, weight: float = 0.0, beta: float = 2.0) -> Tensor:
        """The weights on the grid; gradients pass the rounding straight."""
        scale = self._scale()
        ratio = self._ratio(scale)
        codes = ratio + (ratio.round() - ratio).detach()
        return torch.clamp(codes, self.grid.lo, self.grid.hi) * scale

    @torch.no_grad()
    def hard(self) -> tuple[Tensor, Grid]:
        """The codes that were learned, and the grid they lie on."""
        scale = self._scale()
        codes = torch.clamp(self._ratio(scale).round(), self.grid.lo, self.grid.hi)
        return codes, Grid(scale, self.grid.lo, self.grid.hi, self.grid.own_rows)
