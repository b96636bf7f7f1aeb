"""GPTQ and SeqMSE: kernels against slow definitions, and what they promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitwright.methods.rounding import gptq
from bitwright.methods.rounding.gptq import Settings, inverse_factor, quadratic_error, round_columns
from bitwright.methods.rounding.matrices import Grid, Layer, moments


def problem(groups: int = 1, rows: int = 8, inputs: int = 24, samples: int = 200):
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(groups, rows, inputs, generator=generator)
    mix = torch.randn(inputs, inputs, generator=generator)
    x = torch.randn(groups, samples, inputs, generator=generator) @ mix  # correlated inputs: what GPTQ lives on
    hessian = (x.transpose(1, 2) @ x).double()
    scale = w.abs().amax(2, keepdim=True) / 7
    return w, hessian, Grid(scale, torch.tensor(-8.0), torch.tensor(7.0))


def paper(w: np.ndarray, h: np.ndarray, scale: np.ndarray, damping: float) -> np.ndarray:
    """Optimal brain quantization column by column, with the inverse updated by elimination: eqs. 2 and 3."""
    w, n = w.astype(np.float64).copy(), w.shape[1]
    inverse = np.linalg.inv(h + damping * np.mean(np.diag(h)) * np.eye(n))
    codes = np.zeros_like(w)
    for q in range(n):
        codes[:, q] = np.clip(np.rint(w[:, q] / scale[:, 0]), -8, 7)
        error = (w[:, q] - codes[:, q] * scale[:, 0]) / inverse[q, q]
        w[:, q:] -= error[:, None] * inverse[q, q:]
        inverse = inverse - np.outer(inverse[:, q], inverse[q]) / inverse[q, q]
    return codes


@pytest.mark.parametrize("block", [1, 7, 128])
def test_columns_are_rounded_as_in_the_paper(block):
    w, hessian, grid = problem()
    found = round_columns(w, hessian, grid, Settings(damping=0.01, act_order=False, block=block))
    expected = paper(w[0].numpy(), hessian[0].numpy(), grid.scale[0].numpy(), 0.01)
    assert (found[0].numpy() == expected).mean() > 0.99


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_gptq_loses_on_weights_and_wins_on_outputs(groups, act_order):
    w, hessian, grid = problem(groups)
    codes = round_columns(w, hessian, grid, Settings(act_order=act_order))
    learned, nearest = grid.values(codes), grid.values(grid.nearest(w))
    assert (learned - w).square().sum() > (nearest - w).square().sum()
    assert quadratic_error(learned - w, hessian).sum() < 0.8 * quadratic_error(nearest - w, hessian).sum()


def test_groups_are_independent():
    w, hessian, grid = problem(3)
    together = round_columns(w, hessian, grid, Settings())
    for g in range(3):
        alone = Grid(grid.scale[g : g + 1], grid.lo, grid.hi)
        assert torch.equal(together[g : g + 1], round_columns(w[g : g + 1], hessian[g : g + 1], alone, Settings()))


def test_a_diagonal_hessian_gives_nearest_rounding():
    w, hessian, grid = problem()
    assert torch.equal(round_columns(w, torch.eye(24)[None].double(), grid, Settings()), grid.nearest(w))


def test_dead_columns_are_rounded_to_nearest_and_pass_nothing_on():
    w, hessian, grid = problem()
    hessian[:, 5], hessian[:, :, 5] = 0, 0
    codes = round_columns(w, hessian, grid, Settings())
    assert torch.equal(codes[:, :, 5], grid.nearest(w)[:, :, 5])


def test_a_hessian_without_rank_is_damped_until_it_has_a_factor():
    x = torch.ones(1, 3, 40, dtype=torch.float64)  # three equal samples of forty inputs
    factor = inverse_factor(x.transpose(1, 2) @ x, 0.0)
    assert torch.isfinite(factor).all() and torch.equal(factor, factor.triu())


def test_settings_say_what_they_change():
    assert str(gptq.Settings()) != str(gptq.Settings(damping=0.1))


@pytest.mark.parametrize("rows", [16, 64, 4096])
def test_the_least_squares_step_makes_up_for_little_noise_that_other_rows_do_not_have(rows):
    generator = torch.Generator().manual_seed(1)
    layer = Layer("fc", "fc", "Gemm", {"transB": 1}, (8, 64), "fc.weight")

    def drawn(count):  # inputs, and the same with the noise of a coarse grid
        x = torch.randn(count, 64, generator=generator)
        return x, x + 0.2 * torch.randn(count, 64, generator=generator)

    seen, unseen, w = drawn(rows), drawn(2000), torch.randn(1, 8, 64, generator=generator)
    found = moments(layer, [(*seen, rows)], generator)
    moved = gptq._least_squares(w, found, Settings())
    error = [float((w[0] @ unseen[0].t() - v[0] @ unseen[1].t()).square().sum()) for v in (w, moved)]
    assert error[1] < 1.2 * error[0]  # by the damping of the settings alone 1.3 and 5.9 times
