"""Gradients of learned ranges by separate operations, with sums in float64: what sums in float32 are compared with."""

from __future__ import annotations

import pytest
from torch import Tensor

from bitwright.torch.quantizers import fake_quantize, learned_range
from bitwright.torch.quantizers.fake_quantize import Grid
from bitwright.torch.quantizers.learned_range import Scaling


def separate_operations(monkeypatch: pytest.MonkeyPatch, *, absolute: bool = False) -> None:
    """No compiled loops from here on, and the sums for scales, whose terms cancel, are taken in float64.

    Args:
        absolute: sum the absolute values of the terms: the error of a sum in float32 is a small part of that.
    """

    def for_scale(
        grad: Tensor, inner: Tensor, ratio: Tensor, grid: Grid, scaling: Scaling, axes: list[int] | None
    ) -> Tensor:
        coded = grad.double() * ratio.round().clamp_(grid.lo, grid.hi)
        passed = inner.double() * ratio
        terms = coded.abs() + passed.abs() if absolute else coded - passed
        if axes is None:
            return terms.sum().float()
        return (terms.sum(axes, keepdim=True) if axes else terms).float()

    monkeypatch.setattr(fake_quantize, "loops", lambda: None)
    monkeypatch.setattr(learned_range, "_for_scale", for_scale)
