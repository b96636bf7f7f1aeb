"""AdaRound's functions against the paper's equations, and FlexRound's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitwright.methods.rounding.matrices import Grid
from bitwright.methods.rounding.reconstruct import (
    AdaptiveRounding,
    LearnedDivision,
    annealed_beta,
    inverse_rectified_sigmoid,
    rectified_sigmoid,
    regulariser,
)


def grid(scale: float = 0.5, lo: float = -8, hi: float = 7) -> Grid:
    return Grid(torch.tensor([[[scale]]]), torch.tensor(lo), torch.tensor(hi))


def test_rectified_sigmoid_is_the_papers():
    v = torch.linspace(-6, 6, 101)
    expected = np.clip(1.2 / (1 + np.exp(-v.double().numpy())) - 0.1, 0, 1)
    np.testing.assert_allclose(rectified_sigmoid(v).numpy(), expected, atol=1e-6)
    h = torch.linspace(0, 1, 101)
    torch.testing.assert_close(rectified_sigmoid(inverse_rectified_sigmoid(h)), h)


@pytest.mark.parametrize("beta", [2.0, 20.0])
def test_regulariser_is_zero_only_where_every_weight_is_decided(beta):
    assert regulariser(torch.tensor([0.0, 1.0]), beta) == 0
    assert regulariser(torch.tensor([0.5]), beta) == 1


def test_beta_falls_by_a_cosine_after_the_warm_start():
    assert annealed_beta(0.19, (20, 2), 0.2) is None
    assert annealed_beta(0.2, (20, 2), 0.2) == pytest.approx(20)
    assert annealed_beta(0.6, (20, 2), 0.2) == pytest.approx(11)
    assert annealed_beta(1.0, (20, 2), 0.2) == pytest.approx(2)


def test_soft_weights_start_at_the_float_weights_and_end_on_the_grid():
    w = torch.randn(1, 4, 6)
    rounding = AdaptiveRounding(w, grid())
    torch.testing.assert_close(rounding.soft(), w, atol=1e-5, rtol=0)
    codes, where = rounding.hard()
    assert torch.equal(codes, codes.round()) and codes.min() >= -8 and codes.max() <= 7
    assert (where.values(codes) - w).abs().max() <= 0.25 + 1e-6  # undecided weights go to the nearest code


def test_weights_beyond_the_grid_are_clipped_and_get_no_gradient():
    rounding = AdaptiveRounding(torch.tensor([[[100.0, 0.2]]]), grid())
    out = rounding.soft()
    assert out[0, 0, 0] == 3.5
    out.sum().backward()
    assert rounding.v.grad[0, 0, 0] == 0 and rounding.v.grad[0, 0, 1] > 0


def test_gradient_of_the_soft_weights_is_that_of_the_formula():
    torch.manual_seed(0)
    w, weight, beta = torch.randn(2, 3, 5), 0.03, 4.0
    rounding = AdaptiveRounding(w, grid())
    target = torch.randn(2, 3, 5)
    (rounding.soft(weight, beta) - target).square().sum().backward()
    v = rounding.v.detach().double().requires_grad_()
    h = rectified_sigmoid(v)
    soft = (rounding.floor.double() + h).clamp(-8, 7) * 0.5
    ((soft - target.double()).square().sum() + weight * regulariser(h, beta)).backward()
    torch.testing.assert_close(rounding.v.grad.double(), v.grad, atol=1e-5, rtol=1e-4)


def test_flexround_starts_at_nearest_rounding():
    w = torch.randn(1, 4, 6)
    torch.testing.assert_close(LearnedDivision(w, grid()).soft(), grid().values(grid().nearest(w)))


def test_flexround_divides_by_its_factors_and_scales_by_its_step():
    w = torch.tensor([[[0.9, -0.4, 1.6]]])
    rounding = LearnedDivision(w, grid())
    with torch.no_grad():
        rounding.row.fill_(np.log(0.5))  # every weight is rounded as if it were twice as large
        rounding.element[0, 0, 2] = np.log(2.0)  # but for the last
        rounding.step.fill_(np.log(1.5))
    codes, where = rounding.hard()
    assert codes.tolist() == [[[2.0, -1.0, 2.0]]]
    assert where.scale.flatten().tolist() == pytest.approx([0.75])
    torch.testing.assert_close(rounding.soft(), where.values(codes))


def test_flexround_has_gradients_through_division_and_scale():
    w = torch.tensor([[[0.9, -0.3]]])
    rounding = LearnedDivision(w, grid())
    rounding.soft().sum().backward()
    torch.testing.assert_close(rounding.element.grad, -w)  # d (s w / (s S)) / d log S
    assert rounding.step.grad.flatten().tolist() == pytest.approx(
        [1.0 - 0.5 - 0.9 + 0.3], abs=1e-6
    )  # s (code - ratio), as in LSQ


def test_flexround_keeps_one_scale_where_rows_share_it():
    w = torch.randn(1, 4, 6)
    shared = Grid(torch.tensor([[[0.5]]]), torch.tensor(-8.0), torch.tensor(7.0), own_rows=False)
    assert LearnedDivision(w, shared).step.numel() == 1
