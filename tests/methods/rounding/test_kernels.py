"""Rounding against slow definitions and the papers' equations: GPTQ, SeqMSE, AdaRound, FlexRound, layers as matrix products."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.core.numerics.affine import encode, fake_quantize, is_sayable
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat, largest_code
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.ranges import choose_range_of
from bitwright.core.numerics.spec import RangeMethod, find_preset, weight_spec
from bitwright.errors import ConfigError
from bitwright.methods.rounding import gptq
from bitwright.methods.rounding.driver import _pairs_alone, are_pairs
from bitwright.methods.rounding.gptq import Settings, inverse_factor, quadratic_error, round_columns
from bitwright.methods.rounding.matrices import FewRows, Grid, Layer, gram, grid_encoding, moments, sample_rows
from bitwright.methods.rounding.reconstruct import (
    AdaptiveRounding,
    LearnedDivision,
    SignedRounding,
    annealed_beta,
    inverse_rectified_sigmoid,
    rectified_sigmoid,
    regulariser,
)
from bitwright.methods.rounding.refit import _system, refitted
from bitwright.methods.rounding.seq_mse import Settings as SeqMseSettings
from bitwright.methods.rounding.seq_mse import _within_blocks
from bitwright.torch import QuantizationSimModel, apply_reconstruction
from tests.support.simulations import calibrated


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
    found = moments(layer, [(*seen, rows)], generator, w)
    moved = gptq.least_squares(w, found, Settings())
    error = [float((w[0] @ unseen[0].t() - v[0] @ unseen[1].t()).square().sum()) for v in (w, moved)]
    assert error[1] < 1.2 * error[0]  # by the damping of the settings alone 1.3 and 5.9 times


@pytest.mark.parametrize("damping", [gptq.LEAST_DAMPING, 0.1])
@pytest.mark.parametrize("groups", [1, 2])
def test_few_rows_give_what_their_matrix_gives(groups, damping):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(groups, 40, 300, generator=generator) * torch.rand(300, generator=generator)
    x[:, :, 7] = 0  # a dead column
    rows, matrix = FewRows(x.double()), (x.double().transpose(1, 2) @ x.double())
    w = torch.randn(groups, 12, 300, generator=generator)
    grid = Grid(w.abs().amax(2, keepdim=True) / 7, torch.tensor(-8.0), torch.tensor(7.0))
    settings = Settings(damping=damping)

    wide = w.double()
    torch.testing.assert_close(wide @ rows, wide @ matrix)
    torch.testing.assert_close(wide[:1] @ rows[0:1], wide[:1] @ matrix[0:1])
    torch.testing.assert_close(rows.diagonal(dim1=1, dim2=2), matrix.diagonal(dim1=1, dim2=2))

    few, whole = (gptq.factored(hessian, settings) for hessian in (rows, matrix))
    live = few.order[0] != 7  # of a dead column only the zeros beside its diagonal matter
    for (here, found), (there, wanted) in zip(few.blocks(64), whole.blocks(64), strict=True):
        assert here == there
        torch.testing.assert_close(found[live[here]], wanted[live[here]], rtol=1e-4, atol=1e-5 * float(wanted.max()))
    codes = [round_columns(w.clone(), factor, grid, settings) for factor in (few, whole)]
    assert float((codes[0] == codes[1]).float().mean()) > 0.995
    errors = [float(quadratic_error(grid.values(c) - w, matrix).sum()) for c in (*codes, grid.nearest(w))]
    assert errors[0] == pytest.approx(errors[1], rel=0.02) and errors[0] < 0.3 * errors[2]


@pytest.mark.parametrize("granularity", [PerBlock(16, 1, 0), PerChannel(0)])
def test_scales_are_compared_by_few_rows_as_by_their_matrix(granularity):
    x, w = torch.randn(1, 6, 40, dtype=torch.float64), torch.randn(8, 40)
    layer = Layer("fc", "fc", "Gemm", {"transB": 1}, (8, 40), "fc.weight")
    spec = weight_spec("int4", granularity)
    encoding = encode(*choose_range_of(w, spec, granularity), spec, granularity)
    few, whole = (_within_blocks(hessian, encoding, layer) for hessian in (FewRows(x), x.transpose(1, 2) @ x))
    torch.testing.assert_close(few(w[None].double()), whole(w[None].double()))


@pytest.mark.parametrize(("samples", "kept"), [(256, True), (257, False)])
def test_rows_are_kept_up_to_a_quarter_of_many_columns(samples, kept):
    generator = torch.Generator().manual_seed(1)
    layer = Layer("fc", "fc", "Gemm", {"transB": 1}, (8, 1024), "fc.weight")
    parts = [(*(torch.randn(n, 1024, generator=generator) for _ in range(2)), n) for n in (100, samples - 100)]
    w = torch.randn(1, 8, 1024, generator=generator)
    few, whole = (moments(layer, parts, generator, w, few=few) for few in (True, False))
    assert isinstance(few.own, FewRows) == kept and few.rows == whole.rows == samples
    torch.testing.assert_close(w.double() @ few.own, w.double() @ whole.own, rtol=1e-4, atol=1e-2)
    one, other = (gptq.least_squares(w, found, Settings()) for found in (few, whole))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert isinstance(moments(layer, parts, generator, w).own, torch.Tensor)


CANDIDATES = 10


class Two(nn.Module):
    """Two layers, so that the second one's inputs are not what the float model made."""

    def __init__(self, spatial: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3) if spatial else nn.Linear(16, 8)
        self.second: Any = nn.Conv2d(8, 6, 1) if spatial else nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def batches(spatial: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (3, 4, 7, 7) if spatial else (40, 16)
    return [scale * torch.randn(shape, generator=generator) for scale in (1.0, 3.0)]


def by_hand(sim: Any, spatial: bool, loss: str, symmetry: str, scale: np.ndarray, block: int | None) -> np.ndarray:
    """The best scales of the second layer, found one candidate after the other on its outputs; ``[O, blocks]``."""
    model = sim.model
    w = model.second.weight.detach().flatten(1)
    size = block or w.shape[1]
    losses, candidates = [], []
    for i in range(CANDIDATES, 0, -1):
        candidate = torch.tensor(scale * np.float32(i / CANDIDATES)).reshape(w.shape[0], -1)
        spread = candidate.repeat_interleave(size, 1)
        w_q = torch.clamp((w / spread).round(), -4, 3) * spread
        logs, total, rows = [], 0.0, 0
        for x in batches(spatial):
            with sim.in_float():
                real = model.first(x).relu().detach()
            quantized = sim.quantizers["first.weight"].quantizer(model.first.weight.detach())
            made = nn.functional.conv2d(x, quantized, model.first.bias) if spatial else nn.functional.linear(
                x, quantized, model.first.bias)  # fmt: skip
            made = made.relu().detach()
            a, b = (real if symmetry != "symqt" else made), (real if symmetry == "symfp" else made)
            if spatial:
                a, b = (t.permute(0, 2, 3, 1).reshape(-1, 8) for t in (a, b))
            cut = [slice(k, k + size) for k in range(0, w.shape[1], size)]
            want = torch.stack([a[:, s] @ w[:, s].T for s in cut], 2).double()
            found = torch.stack([b[:, s] @ w_q[:, s].T for s in cut], 2).double()
            error = found - want
            total = total + (error.abs() if loss == "l1" else error.square()).sum(0)
            rows += len(want)
            logs.append((error.square().mean(0) / want.square().mean(0)).log())
        losses.append(torch.stack(logs).mean(0) if loss == "sqnr" else total / rows)
        candidates.append(candidate)
    best = torch.stack(losses).argmin(0)
    return torch.stack(candidates).gather(0, best[None])[0].numpy()


@pytest.mark.parametrize("block", [None, 4], ids=["per-channel", "blocks"])
@pytest.mark.parametrize("spatial", [False, True], ids=["linear", "conv"])
@pytest.mark.parametrize("symmetry", ["symqt", "symfp", "asym"])
@pytest.mark.parametrize("loss", ["mse", "l1", "sqnr"])
def test_the_best_candidate_is_chosen(loss: str, symmetry: str, spatial: bool, block: int | None) -> None:
    torch.manual_seed(1)
    sim = QuantizationSimModel(Two(spatial).eval(), batches(spatial)[0], default_param_bw=3)
    for site in sim.quantizers.values():
        site.enabled = site.role == "weight"
    site = sim.quantizers["second.weight"]
    if block is not None:
        from dataclasses import replace

        site.spec = replace(site.quantizer.spec, granularity=PerBlock(block, 1, 0))
    sim.compute_encodings(batches(spatial))
    start = np.array(site.encoding.scale)
    options = {"num_candidates": CANDIDATES, "loss_fn": loss, "inp_symmetry": symmetry}
    apply_reconstruction(sim, batches(spatial), "seq_mse", progress=False, **options)
    wanted = by_hand(sim, spatial, loss, symmetry, start, block)
    np.testing.assert_allclose(site.encoding.scale.reshape(wanted.shape), wanted, rtol=1e-6)
    assert (site.encoding.scale < start).any() and site.frozen


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="loss_fn: it is 'kl'.*mse, l1, sqnr"):
        SeqMseSettings(loss_fn="kl")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="inp_symmetry: it is 'both'.*symqt, symfp, asym"):
        SeqMseSettings(inp_symmetry="both")  # type: ignore[arg-type]


def conv(shape: tuple[int, ...], group: int = 1, pads=None, strides=None, dilations=None) -> Layer:
    n = len(shape) - 2
    attrs = {
        "group": group, "pads": pads or (0,) * 2 * n, "strides": strides or (1,) * n, "dilations": dilations or (1,) * n
    }  # fmt: skip
    return Layer("conv", "conv", "Conv", attrs, shape, "conv.weight")


CONVS = [
    pytest.param(conv((6, 4, 3)), (2, 4, 9), id="1d"),
    pytest.param(conv((6, 4, 3, 3), pads=(1, 1, 1, 1)), (2, 4, 7, 5), id="2d-padded"),
    pytest.param(conv((6, 2, 3, 2), 2, (0, 1, 2, 1), (2, 1), (1, 2)), (2, 4, 8, 8), id="grouped-strided-dilated"),
    pytest.param(conv((4, 1, 3, 3), 4, (1, 1, 1, 1)), (3, 4, 6, 6), id="depthwise"),
    pytest.param(conv((3, 2, 2, 3, 2), strides=(1, 2, 1)), (2, 2, 4, 5, 4), id="3d"),
]


@pytest.mark.parametrize("layer, shape", CONVS)
def test_convolution(layer: Layer, shape):
    x, w = torch.randn(shape), torch.randn(layer.shape)
    n = len(shape) - 2
    pads = [p for i in reversed(range(n)) for p in (layer.attrs["pads"][i], layer.attrs["pads"][n + i])]
    function = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    expected = function(
        F.pad(x, pads), w, None, layer.attrs["strides"], 0, layer.attrs["dilations"], layer.attrs["group"]
    )
    (rows,) = layer.rows(x)
    assert rows.shape[1] == layer.positions(x)
    found = rows @ layer.matrix(w).transpose(1, 2)  # [G, N * L, O]
    found = found.reshape(layer.groups, shape[0], -1, layer.shape[0] // layer.groups).permute(1, 0, 3, 2)
    torch.testing.assert_close(found.reshape(expected.shape), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(layer.tensor(layer.matrix(w)), w)
    places = torch.arange(0, layer.positions(x), 3)
    assert torch.equal(torch.cat(list(layer.rows_at(x, places)), 1), rows[:, places])
    assert layer.fan_in == rows.shape[2]


@pytest.mark.parametrize(
    "layer",
    [
        Layer("l", "l", "Gemm", {"transB": 1}, (5, 7), "l.weight"),
        Layer("l", "l", "Gemm", {"transB": 0}, (7, 5), "l.weight"),
        Layer("l", "l", "MatMul", {}, (7, 5), "l.weight"),
    ],
    ids=["gemm-transposed", "gemm", "matmul"],
)
def test_linear(layer: Layer):
    x, w = torch.randn(2, 3, 7), torch.randn(layer.shape)
    (rows,) = layer.rows(x)
    places = torch.tensor([1, 4, 5])
    assert torch.equal(next(layer.rows_at(x, places)), rows[:, places]) and layer.fan_in == 7
    expected = x @ (w.t() if layer.attrs.get("transB") else w)
    torch.testing.assert_close((rows @ layer.matrix(w).transpose(1, 2)).reshape(expected.shape), expected)
    assert torch.equal(layer.tensor(layer.matrix(w)), w)


@pytest.mark.parametrize("group", [1, 2])
def test_transposed_convolution_is_a_product_before_its_outputs_are_added_up(group):
    layer = Layer("t", "t", "ConvTranspose", {"group": group}, (4, 3, 2, 2), "t.weight")
    x, w = torch.randn(2, 4, 5, 5), torch.randn(layer.shape)
    (rows,) = layer.rows(x)
    places = torch.tensor([0, 7, 24, 25, 49])
    assert torch.equal(next(layer.rows_at(x, places)), rows[:, places]) and layer.fan_in == 4 // group
    found = rows @ layer.matrix(w).transpose(1, 2)  # [G, N * L, O * kernel]
    columns = found.reshape(group, 2, 25, -1).permute(1, 0, 3, 2).reshape(2, -1, 25)
    folded = F.fold(columns, (10, 10), 2, stride=2)  # kernel = stride: nothing overlaps
    torch.testing.assert_close(folded, F.conv_transpose2d(x, w, stride=2, groups=group), atol=1e-5, rtol=1e-4)
    assert torch.equal(layer.tensor(layer.matrix(w)), w)


GRANULARITIES = [
    pytest.param(PerTensor(), (), id="per-tensor"),
    pytest.param(PerChannel(0), (6,), id="per-channel"),
    pytest.param(PerBlock(2, 1, 0), (6, 2, 1, 1), id="per-block"),
]


@pytest.mark.parametrize("granularity, shape", GRANULARITIES)
def test_a_grid_is_its_encoding(granularity, shape):
    layer = conv((6, 4, 3, 3))
    scale = np.float32(np.random.rand(*shape) + 0.1)
    encoding = Encoding(IntFormat(4, signed=False), scale, np.full(shape, 5), granularity)
    w = torch.randn(layer.shape)
    grid = Grid.of(encoding, layer, w.device)
    found = layer.tensor(grid.values(grid.nearest(layer.matrix(w))))
    assert torch.equal(found, fake_quantize(w, encoding))
    assert torch.equal(fake_quantize(found, encoding), found)  # on the grid: nothing moves again
    assert grid_encoding(grid, encoding, layer) == encoding


@pytest.mark.parametrize("outputs", [4, 20], ids=["few outputs", "many outputs"])
def test_moments_and_samples_see_every_row(outputs):
    layer = conv((4, 3, 3, 3), pads=(1, 1, 1, 1))
    batches = [(torch.randn(2, 3, 5, 5), torch.randn(2, 3, 5, 5)) for _ in range(3)]
    real = torch.cat([next(layer.rows(a)) for a, _ in batches], 1)
    quantized = torch.cat([next(layer.rows(b)) for _, b in batches], 1)
    weight = torch.randn(1, outputs, 27)
    found = moments(layer, [(*pair, 50) for pair in batches], torch.Generator(), weight)
    assert found.rows == 150
    torch.testing.assert_close(
        found.own, (quantized.double().transpose(1, 2) @ quantized.double()), rtol=1e-5, atol=1e-3
    )
    moved = weight.double() @ (real - quantized).double().transpose(1, 2) @ quantized.double()
    torch.testing.assert_close(found.moved, moved, rtol=1e-5, atol=1e-3)
    assert moments(layer, [(b, b, 50) for _, b in batches], torch.Generator(), weight).moved.count_nonzero() == 0
    places = (torch.zeros(1, 150, 27), torch.zeros(1, 150, 27))
    sample_rows(layer, batches, 150, 150, torch.Generator(), places)
    assert torch.equal(places[0], real) and torch.equal(places[1], quantized)
    few = (torch.zeros(1, 10, 27), torch.zeros(1, 10, 27))
    sample_rows(layer, batches, 150, 10, torch.Generator().manual_seed(1), few)
    hits = (few[0][0][:, None] == real[0][None]).all(2)
    assert hits.any(1).all() and torch.equal(hits, (few[1][0][:, None] == quantized[0][None]).all(2))


def test_moments_of_drawn_rows_come_near_those_of_all_and_each_batch_has_its_share():
    layer, generator = conv((4, 3, 3, 3), pads=(1, 1, 1, 1)), torch.Generator().manual_seed(0)
    smooth = F.avg_pool2d(torch.randn(12, 3, 34, 34, generator=generator), 5, 1)
    real, quantized = smooth, smooth + 0.05 * torch.randn(smooth.shape, generator=generator)
    parts = [(real[:8], quantized[:8], 2400 * 8 / 12), (real[8:], quantized[8:], 2400 * 4 / 12)]
    weight = torch.eye(27)[None]
    few = moments(layer, parts, torch.Generator().manual_seed(1), weight)
    every = moments(layer, [(a, b, math.inf) for a, b, _ in parts], torch.Generator(), weight)
    assert (few.rows, every.rows) == (2400, 12 * 30 * 30)
    crossed = [found.own + found.moved for found in (few, every)]
    for found, wanted in ((few.own, every.own), (crossed[0], crossed[1])):
        off = found / few.rows - wanted / every.rows
        assert float(off.norm()) < 0.05 * float((wanted / every.rows).norm())
    again = moments(layer, parts, torch.Generator().manual_seed(1), weight)
    assert torch.equal(few.own, again.own) and torch.equal(few.moved, again.moved)


@pytest.mark.parametrize("columns", [3, 255, 256, 258, 513])
def test_a_gram_matrix_is_symmetric_and_that_of_one_product(columns):
    x = torch.randn(2, 40, columns, generator=torch.Generator().manual_seed(columns))
    found = gram(x)
    torch.testing.assert_close(found.double(), x.double().transpose(1, 2) @ x.double(), rtol=1e-5, atol=1e-4)
    assert columns < 256 or torch.equal(found, found.transpose(1, 2))


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


def encoded(w: torch.Tensor, format: str, scale_format: str = "float32", block: int = 8, **changes: Any) -> Encoding:
    if format == "uint4":
        changes = {"symmetry": "float_zero_point", "method": RangeMethod("mse")} | changes
    spec = weight_spec(format, PerBlock(block, 1, 0), scale_format=scale_format, **changes)
    return encode(*choose_range_of(w, spec, spec.granularity), spec, spec.granularity)


FORMATS = {
    "MXFP4": ("float4_e2m1", "e8m0"),
    "NVFP4": ("float4_e2m1", "e4m3"),
    "float8": ("float8_e4m3", "float32"),
    "nf4": ("nf4", "float32"),
    "float16-scales": ("int4", "float16"),
    "LPBQ": ("int4", "uint4"),
    "bfloat16": ("bfloat16", "float32"),
    "real-zero-points": ("uint4", "float32"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_grid_is_that_of_the_quantizer_in_every_format(name):
    w = torch.randn(6, 16, generator=torch.Generator().manual_seed(2))
    encoding = encoded(w, FORMATS[name][0], "float32" if name == "bfloat16" else FORMATS[name][1])
    layer = Layer("fc", "fc", "Gemm", {"transB": 1}, (6, 16), "fc.weight")
    grid = Grid.of(encoding, layer, w.device)
    assert torch.equal(layer.tensor(grid.values(grid.nearest(layer.matrix(w)))), fake_quantize(w, encoding))
    assert torch.equal(grid.stored(grid.scale), grid.scale) and grid_encoding(grid, encoding, layer) == encoding
    down, gap = grid.below(w[None] / grid.scale)
    inside = (w[None] / grid.scale < down + gap) & (down <= w[None] / grid.scale)
    nearest = grid.nearest(w[None])
    ends = (
        (nearest <= grid.lo) | (nearest >= grid.hi) if grid.free else nearest.abs() >= largest_code(encoding.format) - 1
    )
    assert (inside | ends).all() and (gap > 0).all()
    inside &= (w[None] / grid.scale).clamp(grid.lo, grid.hi) == w[None] / grid.scale
    soft = AdaptiveRounding(w[None], grid).soft()
    torch.testing.assert_close(soft[inside], w[None][inside], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_learned_is_stored_as_the_format_says(name):
    w = torch.randn(6, 16, generator=torch.Generator().manual_seed(2))
    format, scale_format = FORMATS[name]
    encoding = encoded(w, format, scale_format)
    layer = Layer("fc", "fc", "Gemm", {"transB": 1}, (6, 16), "fc.weight")
    for make in (LearnedDivision, SignedRounding):
        rounding = make(layer.matrix(w), Grid.of(encoding, layer, w.device))
        with torch.no_grad():
            for group in rounding.parameters():
                for parameter in group["params"]:
                    parameter.mul_(0.9).add_(0.07 * torch.rand(parameter.shape))
        codes, grid = rounding.hard()
        found = grid_encoding(grid, encoding, layer)
        values = layer.tensor(grid.values(codes))
        assert is_sayable(found) and torch.equal(fake_quantize(values, found), values)


def test_signed_rounding_starts_at_nearest_and_moves_zero_points():
    w = torch.rand(4, 16, generator=torch.Generator().manual_seed(1))[None] - 0.2
    encoding = encoded(w[0], "uint4", symmetry="asymmetric")
    layer = Layer("fc", "fc", "Gemm", {"transB": 1}, (4, 16), "fc.weight")
    grid = Grid.of(encoding, layer, w.device)
    rounding = SignedRounding(w, grid)
    torch.testing.assert_close(rounding.soft(), grid.values(grid.nearest(w)))
    with torch.no_grad():
        rounding.low.fill_(0.5)
    codes, moved = rounding.hard()
    found = grid_encoding(moved, encoding, layer)
    assert (found.zero_point < encoding.zero_point).any() and (found.scale <= encoding.scale).all()
    values = layer.tensor(moved.values(codes))
    assert torch.equal(fake_quantize(values, found), values)


def test_gptaq_moves_columns_as_in_the_paper():
    """Algorithm 1 of arXiv:2504.02692 in loops, with P of eq. 15."""
    w, hessian, grid = problem()
    drift = torch.randn(1, 24, 24, generator=torch.Generator().manual_seed(9)).double() * hessian.std() * 0.02
    found = round_columns(w.clone(), hessian, grid, Settings(act_order=False, block=7), drift)
    upper = inverse_factor(hessian, 0.01)[0].numpy()
    P = np.triu(drift[0].numpy() @ upper.T, 1) @ upper
    left, scale = w[0].double().numpy().copy(), grid.scale[0, :, 0].numpy()
    codes = np.zeros_like(left)
    for k in range(24):
        column = left[:, k].copy()
        codes[:, k] = np.clip(np.rint(column / scale), -8, 7)
        error = (column - codes[:, k] * scale) / upper[k, k]
        left[:, k + 1 :] += np.outer(column, P[k, k + 1 :]) - np.outer(error, upper[k, k + 1 :])
    assert (found[0].numpy() == codes).mean() > 0.99
    assert not torch.equal(found, round_columns(w.clone(), hessian, grid, Settings(act_order=False, block=7)))


@pytest.mark.parametrize("method", ["gptq", "seq_mse", "adaround"])
def test_methods_gain_on_real_zero_points_and_keep_them_in_a_cache(tmp_path, method):
    torch.manual_seed(0)
    x = torch.randn(512, 40) @ torch.randn(40, 40) + 1
    model = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 6)).eval()
    found, wanted = [], model(x).detach()
    for folder in (None, tmp_path, tmp_path):
        sim = calibrated(QuantizationSimModel(model, x[:2], preset="w3g32_float_zero"))
        nearest = sim.model(x).detach()
        options = {"iterations": 200} if method == "adaround" else {}
        apply_reconstruction(sim, [x], method, progress=False, cache_dir=folder, **options)
        found.append(sim.model(x).detach())
        assert (found[-1] - wanted).square().mean() < (nearest - wanted).square().mean()
        for name in ("0.weight", "2.weight"):
            enc, w = sim.quantizers[name].encoding, sim.model.get_parameter(name).detach()
            assert enc.shift is not None and (enc.shift != 0).any()
            if method != "seq_mse":
                torch.testing.assert_close(fake_quantize(w, enc), w, atol=1e-6, rtol=1e-6)
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


def test_zeros_are_refused_where_zero_may_have_no_code():
    sim = calibrated(QuantizationSimModel(nn.Linear(32, 4), torch.randn(2, 32), preset="w4_float_zero"))
    with pytest.raises(ConfigError, match="may have no code for zero.*asymmetric"):
        apply_reconstruction(sim, [torch.randn(64, 32)], "gptq", progress=False, sparsity=0.5)


def refit_problem(name: str) -> tuple[Grid, Encoding, Layer, torch.Tensor, torch.Tensor]:
    """A layer of correlated inputs in a format, with groups of 8 and 10 inputs in the last of three."""
    generator = torch.Generator().manual_seed(4)
    w = torch.randn(6, 24, generator=generator) + 0.3
    format, scale_format = REFITTED[name]
    changes = {"symmetry": "asymmetric"} if name == "zero-points" else {}
    encoding = encoded(w, format, scale_format, **changes)
    layer = Layer("fc", "fc", "Gemm", {"transB": 1}, (6, 24), "fc.weight")
    x = torch.randn(96, 24, generator=generator) @ torch.randn(24, 24, generator=generator)
    return Grid.of(encoding, layer, w.device), encoding, layer, w[None], (x.t() @ x).double()[None]


REFITTED = {**FORMATS, "int4": ("int4", "float32"), "zero-points": ("uint4", "float16")}


@pytest.mark.parametrize("name", [name for name in REFITTED if name != "bfloat16"])
def test_a_refit_never_raises_the_error_of_any_row_and_is_stored_as_the_format_says(name):
    grid, encoding, layer, w, hessian = refit_problem(name)
    for codes in (grid.nearest(w), round_columns(w.clone(), hessian, grid, Settings())):
        moved, new = refitted(grid, codes, w, hessian)
        before, after = (quadratic_error(g.values(c) - w, hessian) for g, c in ((grid, codes), (moved, new)))
        assert (after <= before * (1 + 1e-5)).all()
        if name not in ("MXFP4", "LPBQ"):  # whose scales lie far apart
            assert after.sum() < 0.97 * before.sum()
        assert torch.equal(moved.stored(moved.scale), moved.scale)
        found, values = grid_encoding(moved, encoding, layer), layer.tensor(moved.values(new))
        torch.testing.assert_close(fake_quantize(values, found), values, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["int4", "zero-points"])
def test_a_refit_by_few_rows_is_that_by_their_matrix(name):
    grid, _, _, w, _ = refit_problem(name)
    x = torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    codes = grid.nearest(w)
    few, whole = (refitted(grid, codes, w, hessian) for hessian in (FewRows(x), x.transpose(1, 2) @ x))
    assert torch.equal(few[1], whole[1]) and not torch.equal(few[0].scale, grid.scale)
    torch.testing.assert_close(few[0].scale, whole[0].scale)


def test_a_refit_finds_the_grid_that_weights_lie_on():
    grid, _, _, w, hessian = refit_problem("int4")
    codes = grid.nearest(w)
    wanted = grid.scale * (1 + 0.2 * torch.rand(1, 6, 3).repeat_interleave(8, 2))
    found = refitted(grid, codes, codes * wanted, hessian)[0]
    errors = [quadratic_error(codes * (scale - wanted), hessian).sum() for scale in (grid.scale, found.scale)]
    assert errors[1] < 1e-2 * errors[0]
    alone = refitted(grid, codes, codes * wanted, torch.eye(24).double()[None])[0]  # no group depends on another
    torch.testing.assert_close(alone.scale, wanted)


@pytest.mark.parametrize("offsets", [False, True], ids=["scales", "offsets"])
@pytest.mark.parametrize("order", ["as they come", "mixed"])
def test_the_system_of_a_refit_is_the_product_of_its_columns(order, offsets):
    """Of groups that follow each other, the last one shorter, only the half above the diagonal is computed."""
    codes, target = torch.randn(2, 2, 3, 22).double()
    hessian = torch.randn(2, 22, 40).double()
    hessian = hessian @ hessian.transpose(1, 2)
    groups = torch.arange(22) // 8 if order == "as they come" else torch.arange(22) % 3
    members = [(groups == g).nonzero().flatten() for g in range(3)]
    one_hot = F.one_hot(groups, 3).double()
    columns = torch.cat([codes[..., None] * one_hot, one_hot.expand(2, 3, 22, 3)][: 1 + offsets], -1).flatten(0, 1)
    wide = hessian.repeat_interleave(3, 0)
    expected = columns.transpose(1, 2) @ wide @ columns, (target.flatten(0, 1)[:, None] @ wide @ columns)[:, 0]
    found = _system(codes.clone(), target, hessian, members, offsets=offsets)
    torch.testing.assert_close(found, expected)


def test_a_refit_of_whole_zero_points_moves_codes_with_them():
    grid, _, _, w, hessian = refit_problem("zero-points")
    nearest = grid.nearest(w)
    shifted = nearest + 1  # all of a step too high
    moved, codes = refitted(grid, shifted, grid.values(nearest), torch.eye(24).double()[None])
    assert (
        codes == nearest
    ).float().mean() > 0.8  # but where zero would leave the grid, or a wider scale was found first
    assert torch.equal(codes - moved.lo, shifted - grid.lo)
    assert (moved.lo <= 0).all() and (moved.hi >= 0).all()


def test_scales_that_rows_share_are_left():
    w, hessian = torch.randn(1, 6, 24), torch.eye(24).double()[None]
    layer = Layer("fc", "fc", "Gemm", {"transB": 1}, (6, 24), "fc.weight")
    for granularity in (PerTensor(), PerBlock(3, 0, 1)):
        spec = weight_spec("int4", granularity)
        encoding = encode(*choose_range_of(w[0], spec, granularity), spec, granularity)
        grid = Grid.of(encoding, layer, w.device)
        codes = grid.nearest(w)
        assert refitted(grid, codes, w, hessian) == (grid, codes)


@pytest.mark.parametrize("method", ["gptq", "gptaq"])
@pytest.mark.parametrize("preset", ["w4g32", "w3g32_float_zero", "nvfp4"])
def test_a_refitted_grid_is_in_effect_and_never_worse(method, preset):
    torch.manual_seed(0)
    x = torch.randn(256, 64) @ torch.randn(64, 64)
    model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 32)).eval()
    errors = []
    for refit in (0, 3):
        sim = calibrated(QuantizationSimModel(model, x[:2], preset=replace(find_preset(preset), activation=None)))
        before = sim.quantizers["0.weight"].encoding
        report = apply_reconstruction(sim, [x], method, progress=False, include=["0"], refit=refit)
        after, w = sim.quantizers["0.weight"].encoding, sim.model.get_parameter("0.weight").detach()
        assert np.array_equal(before.scale, after.scale) == (refit == 0) and is_sayable(after)
        torch.testing.assert_close(fake_quantize(w, after), w, atol=1e-6, rtol=1e-6)
        errors.append(report[0].after)
    assert errors[1] < 0.99 * errors[0]


@pytest.mark.parametrize("method", ["gptq", "gptaq"])
@pytest.mark.parametrize(("preset", "moves"), [("w8", False), ("w4", True), ("nvfp4", True)])
def test_grids_of_up_to_four_bits_are_refitted_by_default(method, preset, moves):
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 32)).eval()
    sim = calibrated(QuantizationSimModel(model, x[:2], preset=replace(find_preset(preset), activation=None)))
    before = sim.quantizers["0.weight"].encoding
    apply_reconstruction(sim, [x], method, progress=False, include=["0"])
    assert np.array_equal(before.scale, sim.quantizers["0.weight"].encoding.scale) != moves


def test_refits_of_many_matrices_are_those_of_each_alone():
    """As of a depthwise convolution, a matrix per channel; and of one matrix whose rows are solved in parts."""
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(40, 1, 9, generator=generator), torch.randn(40, 64, 9, generator=generator).double()
    layer = Layer("dw", "dw", "Conv", {"group": 40}, (40, 1, 3, 3), "dw.weight")
    spec = weight_spec("int4", PerChannel(0))
    tensor = layer.tensor(w)
    encoding = encode(*choose_range_of(tensor, spec, spec.granularity), spec, spec.granularity)
    grid, hessian = Grid.of(encoding, layer, w.device), x.transpose(1, 2) @ x
    codes = grid.nearest(w)
    whole, _ = refitted(grid, codes, w, hessian)
    for i in range(len(w)):
        best = (codes[i, 0].double() @ hessian[i] @ w[i, 0].double()) / (
            codes[i, 0].double() @ hessian[i] @ codes[i, 0].double()
        )
        assert float(whole.scale[i, 0, 0]) == pytest.approx(float(best), rel=1e-5)


def test_matrices_of_a_stack_are_chosen_each_with_its_own_grid():
    w = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1))
    layer = Layer("experts", "experts", "MatMul", {}, (2, 16, 4), "experts.weight")
    spec = weight_spec("int4", PerBlock(8, 1))
    tensor = layer.tensor(w)
    encoding = encode(*choose_range_of(tensor, spec, spec.granularity), spec, spec.granularity)
    first = Grid.of(encoding, layer, w.device)
    other = replace(first, scale=first.scale * 2)
    found, grid = gptq.better_of((w * 2, other), (w, first), torch.tensor([True, False]))
    assert torch.equal(found, torch.stack([w[0] * 2, w[1]]))
    assert torch.equal(grid.scale[0], other.scale[0]) and torch.equal(grid.scale[1], first.scale[1])


@pytest.mark.parametrize("settings", [Settings, gptq.AsymmetricSettings])
def test_a_number_of_refits_below_zero_is_refused(settings):
    with pytest.raises(ConfigError, match="refit.*it is -1.*give 0"):
        settings(refit=-1)


@pytest.mark.parametrize("shape", [(1, 40, 300), (1, 1, 9), (7, 3, 9), (3, 16, 130), (1, 5, 1)])
@pytest.mark.parametrize("bits", [8, 4])
def test_compiled_columns_are_those_of_array_functions(shape, bits, monkeypatch):
    if gptq.loops() is None:
        pytest.skip("numba is not installed")
    generator = torch.Generator().manual_seed(sum(shape))
    w = torch.randn(shape, generator=generator)
    rows = torch.randn(shape[0], 4 * shape[2] + 8, shape[2], generator=generator).double()
    rows[:, :, -1] = 0 if shape[2] > 1 else 1  # a column without inputs
    hessian = rows.transpose(1, 2) @ rows
    top = torch.tensor(float(2 ** (bits - 1) - 1))
    grid = Grid(w.abs().amax(2, keepdim=True) / top, -top.reshape(1, 1, 1), top.reshape(1, 1, 1))
    settings = gptq.Settings(block=64)
    compiled = gptq.round_columns(w.clone(), hessian, grid, settings)
    monkeypatch.setattr(gptq, "loops", lambda: None)
    plain = gptq.round_columns(w.clone(), hessian, grid, settings)
    # the last digit of a product may decide between two codes, and what comes after makes up for either
    assert (compiled == plain).float().mean() > 0.99
    errors = [float(gptq.quadratic_error(grid.values(c) - w, hessian).sum()) for c in (compiled, plain)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-2)
    if shape == (1, 40, 300):
        assert errors[0] < 0.9 * float(gptq.quadratic_error(grid.values(grid.nearest(w)) - w, hessian).sum())


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("Gemm", (50, 8)), ("MatMul", (2, 25, 8)), ("Conv", (50, 2, 3, 3))],
    ids=["rows", "samples", "pictures"],
)
def test_only_rows_that_are_others_are_replaced(kind: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    real = 5 + torch.randn(shape, generator=generator)  # what all rows have in common makes none of them alike
    quantized = real + 0.1 * torch.randn(shape, generator=generator)
    layer = Layer("l", "l", kind, {}, (8, 8), "l.weight")
    assert torch.equal(_pairs_alone(real, quantized, layer), real) and are_pairs(real, quantized)
    exchanged = quantized.flip(-2 if kind == "MatMul" else 0)
    found = _pairs_alone(real, exchanged, layer)
    replaced = (found == exchanged).flatten(1).all(1) if kind == "Conv" else (found == exchanged).all(-1)
    middle = (0, 12) if kind == "MatMul" else None  # the row that stays in its place
    assert float(replaced.float().mean()) > 0.9 and (middle is None or not replaced[middle])
    assert not are_pairs(real, exchanged) and not are_pairs(real, quantized[:1])
    assert _pairs_alone(real, quantized[:1], layer).shape[0] == 1


def test_errors_of_few_rows_and_of_wide_layers_are_those_of_the_matrix_in_float64() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, 40, gptq._WIDE, generator=random, dtype=torch.float64)
    x[..., 3] *= 50
    delta, hessian = torch.randn(1, 3, gptq._WIDE, generator=random), x.transpose(1, 2) @ x
    expected = ((delta.double() @ hessian) * delta.double()).sum(2)
    for found in (quadratic_error(delta, hessian), quadratic_error(delta, FewRows(x))):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_the_factor_of_few_rows_is_made_once() -> None:
    found = gptq.FactoredRows(FewRows(torch.randn(2, 8, 32, dtype=torch.float64)), Settings())
    first, again = list(found.blocks(16)), list(found.blocks(16))
    assert len(first) == 2 and all(a is b for (_, a), (_, b) in zip(first, again, strict=True))
