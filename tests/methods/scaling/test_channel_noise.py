"""Factors of least rounding noise: the noise, its gradient, its minimum, and what it predicts of a network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import bitwright.onnx as bo
import bitwright.torch as bt
from bitwright.errors import CalibrationError
from bitwright.methods.folding.batch_norm_fold import FoldReport
from bitwright.methods.layers import Layers
from bitwright.methods.scaling.channel_noise import (
    MAX_ROUNDS,
    Grid,
    RoundingNoise,
    bounds_of_factors,
    channels_of,
    descend,
    grids_of,
    quietest_factors,
    rounding_noise,
)
from bitwright.methods.scaling.equalize import converged_factors, equalizable
from bitwright.torch import QuantizationSimModel, TorchView
from tests.support.cost import steps
from tests.support.simulations import calibrated

# ------------------------------------------------------------------------------------------------ arithmetic


def grids(seed=0, channels=5):
    """Two weights and the activation between them; factor ``channels`` is none."""
    rng = np.random.default_rng(seed)

    def grid(count, outputs, inputs, rows, columns):
        W = np.exp(rng.normal(size=(count, outputs, inputs)))
        W[0, 0, 0] = 0.0
        with np.errstate(divide="ignore"):
            magnitude = np.log(W).astype(np.float32)
        behind, before = rng.uniform(0.1, 1, (count, outputs)), rng.uniform(0.1, 1, (count, inputs))
        return Grid(magnitude, rows, columns, behind, before, 1e-3)

    own, none = np.arange(channels), np.full
    return [
        grid(1, channels, 3, own[None], none((1, 3), channels)),
        grid(1, channels, 1, own[None], none((1, 1), channels)),
        grid(channels, 2, 1, none((channels, 2), channels), own[:, None]),
    ]


def test_noise_of_one_grid_is_the_step_squared_over_twelve():
    W = np.array([[[2.0, 0.5], [1.0, 4.0]]])
    behind, before = np.array([[1.0, 3.0]]), np.array([[2.0, 5.0]])
    rows, columns = np.array([[0, 1]]), np.array([[2, 3]])
    s = np.array([0.5, 2.0, 3.0, 1.5])
    scaled = W[0] * s[2:] / s[:2, None]
    step = np.abs(scaled).max() / 127
    # the error of an entry, taken back to what it is in units of W
    error = step**2 / 12 * (s[:2, None] / s[2:]) ** 2
    expected = (behind.T * before * error).sum()
    grid = Grid(np.log(W).astype(np.float32), rows, columns, behind, before, 1 / (12 * 127**2))
    assert rounding_noise([grid], np.log(s), 1e6)[0] == pytest.approx(expected, rel=1e-5)
    assert 1 <= rounding_noise([grid], np.log(s))[0] / expected < 4 ** (2 / 48) + 1e-5


def test_gradient_is_the_difference_quotient():
    rng, small = np.random.default_rng(1), 1e-3
    x = rng.normal(size=6)
    _, gradient = rounding_noise(grids(), x)
    for k in range(6):
        there, back = (rounding_noise(grids(), x + sign * small * np.eye(6)[k])[0] for sign in (1, -1))
        assert gradient[k] == pytest.approx((there - back) / (2 * small), rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_the_logarithm_is_convex(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, 6)) * 3
    value = [np.log(rounding_noise(grids(seed), x)[0]) for x in (a, (a + b) / 2, b)]
    assert value[1] <= (value[0] + value[2]) / 2 + 1e-6


def free(groups):
    """No bounds of the factors."""
    return [bounds_of_factors(group, None) for group in groups]


def test_descent_finds_the_minimum_of_a_bad_quadratic():
    curvature, best = 10.0 ** np.arange(-2, 4), np.arange(6.0)
    found, rounds = descend(
        lambda x: (float(curvature @ (x - best) ** 2), 2 * curvature * (x - best)), np.zeros(6), tolerance=1e-12
    )
    np.testing.assert_allclose(found, best, atol=1e-3)
    assert rounds < 100


def test_descent_ends_at_bounds_where_the_minimum_lies_beyond_them():
    """Without mixed terms each coordinate has its minimum at the nearest end."""
    curvature, best = 10.0 ** np.arange(-2, 4), np.arange(6.0)
    least, most = np.full(6, 1.5), np.array([np.inf, np.inf, np.inf, np.inf, 2.0, 5.5])
    found, _ = descend(
        lambda x: (float(curvature @ (x - best) ** 2), 2 * curvature * (x - best)), np.zeros(6), bounds=(least, most),
        tolerance=1e-12,
    )  # fmt: skip
    np.testing.assert_allclose(found, [1.5, 1.5, 2.0, 3.0, 2.0, 5.0], atol=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_found_within_bounds_is_no_worse_than_anything_drawn_there(seed):
    rng, noise = np.random.default_rng(seed), RoundingNoise(grids(seed), 6)
    ends = np.sort(rng.normal(size=(2, 6)), axis=0)

    def logarithm(x):
        value, gradient = noise(x)
        return np.log(value), gradient / value

    found, _ = descend(logarithm, np.zeros(6), bounds=(ends[0], ends[1]), tolerance=1e-9)
    assert (found >= ends[0]).all() and (found <= ends[1]).all()
    assert logarithm(found)[0] <= min(logarithm(x)[0] for x in rng.uniform(*ends, (200, 6))) + 1e-6


def test_descent_stops_where_nothing_lowers_the_value():
    found, rounds = descend(lambda x: (0.0, np.zeros_like(x)), np.ones(3))
    assert rounds <= 10 < MAX_ROUNDS and (found == 1).all()


# ------------------------------------------------------------------------------------------------ on a network


def network(spread=1.5):
    """Pointwise and depthwise layers whose batch norms say what their inputs really are."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(2):
        layers += [nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 16, 3, padding=1, groups=16)]
        layers += [nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 16, 1)]
    model = nn.Sequential(*layers, nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 10, 1)).eval()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data = torch.exp(spread * torch.randn(16))
            module.bias.data.normal_(0.5)
            module.momentum = None
            module.train()
    with torch.no_grad():
        model(X)
    return model.eval()


X = torch.randn(32, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def parts(model):
    """What the search of factors takes, and the view."""
    moments = bt.fold_all_batch_norms(model, dummy_input=X).moments
    view = TorchView(model, [X])
    layers = Layers(view.graph())
    groups, _ = equalizable(view, layers)
    weights = {layer.weight: view.param(layer.weight) for layer in layers.of.values()}
    return groups, weights, [channels_of(layers.graph, g, moments) for g in groups], moments


def error(model, wanted):
    sim = calibrated(QuantizationSimModel(model, X, preset="w8a8_per_tensor"), [X])
    with torch.no_grad():
        got = sim.model(X)
    return float((got - wanted).square().mean() / wanted.var())


def test_values_behind_the_activation_are_as_measured():
    model = network()
    groups, _, channels, _ = parts(model)
    assert len(groups) == 5
    with torch.no_grad():
        behind = model[:3](X).transpose(0, 1).flatten(1).double()
        before = model[:2](X).transpose(0, 1).flatten(1)
    known = channels[0]
    np.testing.assert_allclose(known.mean, behind.mean(1), rtol=0.1, atol=0.05)
    np.testing.assert_allclose(known.variance, behind.var(1), rtol=0.25, atol=0.05)
    np.testing.assert_allclose(known.passed, ((before > 0) & (before < 6)).float().mean(1), atol=0.1)
    assert (known.largest <= 6).all() and (known.largest <= behind.amax(1).numpy() * 1.3 + 0.05).all()


def test_noise_foretells_the_error_of_the_network():
    before, after = bt.equalize_model(model := network(spread=0.5), dummy_input=X).noise
    plain = network(spread=0.5)
    bt.fold_all_batch_norms(plain, dummy_input=X)
    wanted = plain(X).detach()
    assert after < before / 2
    print(before, after, error(plain, wanted), error(model, wanted))
    assert 0.3 < error(plain, wanted) / before < 3
    assert 0.3 < error(model, wanted) / after < 3


def test_least_noise_beats_equal_ranges():
    model, ranges = network(), network()
    report = bt.equalize_model(model, dummy_input=X)
    bt.fold_all_batch_norms(ranges, dummy_input=X)
    wanted = ranges(X).detach()
    assert bt.equalize_model(ranges, dummy_input=X).noise is None
    torch.testing.assert_close(model(X), wanted, rtol=1e-3, atol=1e-3)
    assert error(model, wanted) < 0.8 * error(ranges, wanted)
    assert "; expected noise " in str(report).splitlines()[0]


def test_no_start_and_no_neighbour_is_better():
    groups, weights, channels, moments = parts(network())
    ones = [np.ones(group.channels) for group in groups]
    factors, _, (_, noise) = quietest_factors(groups, weights, channels, moments, ones, free(groups))
    elsewhere, _ = converged_factors(groups, weights)
    others, _, (_, other) = quietest_factors(groups, weights, channels, moments, elsewhere, free(groups))
    assert other == pytest.approx(noise, rel=0.02)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        moved = [s * np.exp(rng.normal(size=s.shape) * 0.1) for s in factors]
        weighed = {name: np.array(W) for name, W in weights.items()}
        assert quiet(groups, weighed, channels, moments, moved) > noise


def quiet(groups, weights, channels, moments, factors):
    """The noise at given factors."""
    x = np.append(np.log(np.concatenate(factors)), 0.0)
    return rounding_noise(grids_of(groups, weights, channels, moments), x, 1e6)[0]


def test_the_largest_activation_stays_what_it_is():
    groups, weights, channels, moments = parts(network())
    ones = [np.ones(group.channels) for group in groups]
    factors, _, _ = quietest_factors(groups, weights, channels, moments, ones, free(groups))
    for s, known in zip(factors, channels, strict=True):
        assert (known.largest / s).max() == pytest.approx(known.largest.max())


def test_alike_channels_are_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU6(), nn.Conv2d(4, 5, 1)).eval()
    model[0].weight.data.fill_(0.5)
    model[3].weight.data.fill_(-0.25)
    report = bt.equalize_model(model, dummy_input=X)
    np.testing.assert_allclose(report.factors[0], 1.0, rtol=1e-5)


@pytest.mark.parametrize("dead", ["weight", "gamma", "reader"])
def test_channels_without_values_or_weights_stay_finite(dead):
    model = network()
    with torch.no_grad():
        if dead == "weight":
            model[0].weight[3] = 0
            model[1].running_var[3] = 0
        elif dead == "gamma":
            model[1].weight[3], model[1].bias[3] = 0, -1
        else:
            model[3].weight[3] = 0
    before = model(X).detach()
    report = bt.equalize_model(model, dummy_input=X)
    assert len(report.groups) == 5
    assert all(np.isfinite(s).all() and (s > 0).all() for s in report.factors)
    torch.testing.assert_close(model(X), before, rtol=1e-3, atol=1e-3)


def test_groups_of_which_nothing_is_known_get_equal_ranges():
    model = network()
    folds = bt.fold_all_batch_norms(model, dummy_input=X)
    known = {op: values for op, values in folds.moments.items() if op != "3"}
    before = model(X).detach()
    report = bt.equalize_model(model, dummy_input=X, folds=known)
    torch.testing.assert_close(model(X), before, rtol=1e-3, atol=1e-3)
    groups, weights, *_ = parts(network())
    expected, _ = converged_factors(groups, weights)
    at = [str(group) for group in report.groups].index("3 -> 6")
    np.testing.assert_allclose(report.factors[at], expected[at])
    assert report.noise is not None and report.noise[1] < report.noise[0]


def test_errors_are_handed_on_where_an_activation_has_a_slope_however_narrow_the_channel():
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.ReLU6(), nn.Conv2d(5, 2, 1)).eval()
    view = TorchView(model, [X[:, :3]])
    layers = Layers(view.graph())
    (group, *_), _ = equalizable(view, layers)
    mean, narrow = np.array([3.0, -3.0, 9.0, 0.0, 6.0]), np.full(5, 1e-4)
    found = channels_of(layers.graph, group, {"0": (mean, narrow)})
    np.testing.assert_allclose(found.passed, [1, 0, 0, 0.5, 0.5], atol=1e-3)
    np.testing.assert_allclose(found.mean, [3, 0, 6, 0, 6], atol=1e-3)


def test_weights_that_are_rounded_better_later_leave_the_factors_to_activations():
    groups, weights, channels, moments = parts(network())
    ones = [np.ones(group.channels) for group in groups]
    activations = grids_of(groups, weights, channels, moments, 0.0)[-len(groups) :]
    noise = []
    for share in (1.0, 0.05):
        found, _, _ = quietest_factors(groups, weights, channels, moments, ones, free(groups), share)
        noise.append(rounding_noise(activations, np.append(np.log(np.concatenate(found)), 0.0))[0])
    assert noise[1] < 0.9 * noise[0]


def test_rounds_are_those_of_the_search_where_all_groups_are_known():
    groups, weights, channels, moments = parts(network())
    ones = [np.ones(group.channels) for group in groups]
    assert all(known is not None for known in channels)
    _, descents, _ = quietest_factors(groups, weights, channels, moments, ones, free(groups))
    assert bt.equalize_model(network(), dummy_input=X).rounds == descents


def test_statistics_of_another_size_say_nothing():
    model = network()
    bt.fold_all_batch_norms(model, dummy_input=X)
    view = TorchView(model, [X])
    layers = Layers(view.graph())
    (group, *_), _ = equalizable(view, layers)
    assert channels_of(layers.graph, group, {}) is None
    assert channels_of(layers.graph, group, {"0": (np.ones(3), np.ones(3))}) is None
    assert channels_of(layers.graph, group, {"0": (np.full(16, np.nan), np.ones(16))}) is None


def test_flattened_images_count_every_place():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(600, 5)
    ).eval()
    model[1].weight.data = torch.exp(2 * torch.randn(6))
    before = model(X).detach()
    report = bt.equalize_model(model, dummy_input=X)
    assert len(report.groups) == 1 and report.noise[1] < report.noise[0]
    torch.testing.assert_close(model(X), before, rtol=1e-3, atol=1e-3)


def test_recipes_keep_what_folded_batch_norms_said():
    result = bt.quantize(network(), [X], "w8a8_per_tensor", recipe=["fold", "equalize"])
    alone = bt.quantize(network(), [X], "w8a8_per_tensor", recipe=["equalize"])
    assert "expected noise" in result.report[-1].note
    assert result.report[-1].note == alone.report[-1].note
    assert isinstance(result.folds, FoldReport)


def test_cost_grows_with_the_number_of_layers():
    def cost(blocks):
        layers = [m for _ in range(blocks) for m in (nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Conv2d(4, 4, 1)).eval()
        x = torch.randn(1, 4, 2, 2)
        moments = bt.fold_all_batch_norms(model, dummy_input=x).moments
        view = TorchView(model, [x])
        found = Layers(view.graph())
        groups, _ = equalizable(view, found)
        weights = {layer.weight: view.param(layer.weight) for layer in found.of.values()}
        channels = [channels_of(found.graph, group, moments) for group in groups]

        def once():
            grids = grids_of(groups, weights, channels, moments)
            rounding_noise(grids, np.zeros(4 * blocks + 1))

        return steps(once)

    assert cost(40) < 2.2 * cost(20)


# ---------------------------------------------------------------------------------- where no batch norm says it


def folded():
    model = network()
    return model, bt.fold_all_batch_norms(model, dummy_input=X).moments


def test_data_tells_what_batch_norms_would():
    (model, moments), (other, _) = folded(), folded()
    measured = bt.equalize_model(model, dummy_input=X, data=[X[:16], X[16:]])
    said = bt.equalize_model(other, dummy_input=X, folds=moments, data=iter(()))  # not asked
    for report in (measured, said):
        assert report.noise is not None and len(report.groups) == 5
    for op, (mean, std) in moments.items():
        if op in measured.statistics:
            s = measured.factors[[g.producers[0].op for g in measured.groups].index(op)]
            for found, expected in zip(measured.statistics[op], (mean, std), strict=True):
                close = np.isclose(found * s, expected, rtol=0.05, atol=0.05)
                assert close.mean() > 0.9  # where a variance is not far above epsilon gamma says too much
    assert measured.noise[1] < measured.noise[0] / 3


def test_bad_data_is_named():
    model, _ = folded()
    with pytest.raises(CalibrationError, match="equalize: the data held no batch"):
        bt.equalize_model(model, dummy_input=X, data=[])
    with pytest.raises(CalibrationError, match="channel 0 is NaN or infinite on this data"):
        bt.equalize_model(model, dummy_input=X, data=[torch.full_like(X, torch.nan)])


def test_an_onnx_file_without_batch_norms_is_measured_too(tmp_path):
    model, _ = folded()
    torch.onnx.export(model, (X[:2],), tmp_path / "m.onnx", dynamo=False, opset_version=17, input_names=["x"],
                      dynamic_axes={"x": {0: "n"}})  # fmt: skip
    proto = onnx.load(tmp_path / "m.onnx")
    theirs = bo.equalize_model(proto, X[:2].numpy(), data=[X.numpy()], progress=False)
    ours = bt.equalize_model(model, dummy_input=X[:2], data=[X], progress=False)
    assert theirs.noise == pytest.approx(ours.noise, rel=1e-2)
    again = bo.quantize(onnx.load(tmp_path / "m.onnx"), [X.numpy()], "w8a8_per_tensor", recipe=["fold", "equalize"])
    assert "expected noise" in again.report[-1].note


# ------------------------------------------------------------------------------------------------ what it costs


def test_noise_is_the_same_however_far_the_point_is_from_the_last_one():
    """The powers of a grid are kept from point to point; far away they underflow and are taken anew."""
    rng = np.random.default_rng(2)
    noise = RoundingNoise([*grids(), wide_grid(0, 6, 64, 64)], 6)
    for size in (0.0, 0.1, 3.0, 30.0, 0.1):
        x = rng.normal(size=6) * size
        value, gradient = noise(x)
        expected = rounding_noise([*grids(), wide_grid(0, 6, 64, 64)], x)
        assert value == pytest.approx(expected[0], rel=1e-9)
        np.testing.assert_allclose(gradient, expected[1], rtol=1e-9, atol=1e-12 * value)


def wide_grid(seed, factors, outputs, inputs, one_row=False, one_column=False):
    """A grid whose factors are any, or one for all rows, or for all columns; a fifth of it is zero."""
    rng = np.random.default_rng(seed)
    magnitude = np.log(rng.uniform(0.1, 2, (2, outputs, inputs))).astype(np.float32)
    magnitude[rng.random(magnitude.shape) < 0.2] = -np.inf
    rows, columns = rng.integers(0, factors, (2, outputs)), rng.integers(0, factors, (2, inputs))
    rows, columns = (
        (rows[:, :1] + 0 * rows if one_row else rows),
        (columns[:, :1] + 0 * columns if one_column else columns),
    )
    later, before = rng.uniform(0.1, 1, (2, outputs)), rng.uniform(0.1, 1, (2, inputs))
    return Grid(magnitude, rows, columns, later, before, 1e-3)


def written_out(grid, x, sharpness):
    """The noise of a grid as its description says it, entry by entry."""
    out, into = x[grid.rows], x[grid.columns]
    entries = grid.magnitude + into[:, None, :] - out[:, :, None]
    top = entries.max()
    largest = top + np.log(np.exp(sharpness * (entries - top)).sum()) / sharpness
    costs = (grid.later * np.exp(2 * out)).sum(axis=1) * (grid.before * np.exp(-2 * into)).sum(axis=1)
    return grid.step * np.exp(2 * largest) * costs.sum()


@pytest.mark.parametrize("shape", [(1, 40), (7, 5), (64, 64)], ids=str)
@pytest.mark.parametrize("one_row", (False, True))
@pytest.mark.parametrize("one_column", (False, True))
def test_noise_is_that_of_every_entry_however_the_rows_are_joined(shape, one_row, one_column):
    """One factor for many rows, long lists of entries and large matrices are computed in other ways."""
    some = [wide_grid(seed, 9, *shape, one_row, one_column) for seed in range(3)]
    for seed, size in enumerate((0.1, 1.0, 5.0)):
        x = np.random.default_rng(seed).normal(size=9) * size
        expected = sum(written_out(grid, x, 48) for grid in some)
        assert rounding_noise(some, x)[0] == pytest.approx(expected, rel=1e-6)


def test_descent_with_the_curvature_needs_fewer_rounds_and_ends_no_higher():
    """Costs of factors that differ by powers of ten, as those of channels that hardly matter do."""
    rng, factors = np.random.default_rng(3), 300
    some = []
    for seed in range(4):
        grid = wide_grid(seed, factors, 100, 60, one_column=seed % 2 == 0)
        some.append(replace(grid, later=grid.later * 10.0 ** rng.uniform(-3, 0, grid.later.shape)))
    noise = RoundingNoise(some, factors)

    def logarithm(x):
        value, gradient = noise(x)
        return np.log(value), gradient / value

    start = np.zeros(factors)
    (plain, plain_rounds), (scaled, rounds) = (
        descend(logarithm, start),
        descend(logarithm, start, curvature=noise.curvature),
    )
    assert rounds <= 0.7 * plain_rounds
    assert logarithm(scaled)[0] <= logarithm(plain)[0] + 1e-4


def test_accepted_groups_are_searched_once(monkeypatch):
    model, searches = network(), []
    monkeypatch.setattr(
        "bitwright.methods.scaling.equalize.quietest_factors",
        lambda *args: searches.append(1) or quietest_factors(*args),
    )
    assert len(bt.equalize_model(model, dummy_input=X).groups) == 5
    assert len(searches) == 1
