"""Bias correction: clipped normals, expected inputs, and means that agree afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods.bias_correction import clipped_normal, expected_error, expected_inputs
from bitwright.methods.layers import Layers, batch_norm_moments, moments_of_layers
from bitwright.torch import QuantizationSimModel, TorchView, add_biases, apply_bias_correction, fold_all_batch_norms
from tests.support.simulations import calibrated

# ------------------------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize("low, high", [(0.0, np.inf), (0.0, 6.0), (-1.0, 1.0), (-np.inf, 2.0), (-np.inf, np.inf)])
def test_clipped_normal_is_what_samples_say(low, high):
    mean, std = np.array([-3.0, -0.5, 0.0, 1.0, 5.5, 40.0]), np.array([1.0, 0.5, 2.0, 3.0, 1.0, 2.0])
    samples = np.random.default_rng(0).standard_normal((400_000, 6)) * std + mean
    cut = np.clip(samples, low, high)
    found = clipped_normal(mean, std, low, high)
    np.testing.assert_allclose(found[0], cut.mean(0), atol=0.015)
    np.testing.assert_allclose(found[1], cut.std(0), atol=0.015)


def test_a_constant_is_only_cut():
    mean, std = clipped_normal(np.array([-1.0, 3.0, 9.0]), np.zeros(3), 0.0, 6.0)
    np.testing.assert_array_equal(mean, [0.0, 3.0, 6.0])
    np.testing.assert_array_equal(std, 0.0)


@pytest.mark.parametrize(
    "layer, shape",
    [
        pytest.param(nn.Conv2d(4, 6, 3), (4, 9, 9), id="conv"),
        pytest.param(nn.Conv2d(4, 6, 3, groups=2), (4, 9, 9), id="grouped"),
        pytest.param(nn.Conv2d(4, 4, 3, groups=4), (4, 9, 9), id="depthwise"),
        pytest.param(nn.Linear(4, 6), (4,), id="linear"),
    ],
)
def test_the_expected_error_is_the_measured_one(layer, shape):
    torch.manual_seed(0)
    means = torch.tensor([1.0, -2.0, 0.5, 3.0])
    x = means.reshape(-1, *(1,) * (len(shape) - 1)).expand(8, *shape)
    read = Layers(TorchView(nn.Sequential(layer), [x]).graph()).of["0"]
    W = layer.weight.detach().clone()
    error = torch.randn_like(W) * 0.1
    with torch.no_grad():
        before = layer(x)
        layer.weight += error
        shift = (layer(x) - before).transpose(0, 1).flatten(1).mean(1)
    np.testing.assert_allclose(expected_error(read, error.numpy(), means.numpy()), shift, atol=1e-5)


def test_expected_inputs_follow_batch_norms_activations_additions_and_pools():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.bn_a = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5)
            self.b, self.bn_b = nn.Conv2d(5, 5, 3, padding=1), nn.BatchNorm2d(5)
            self.c, self.head, self.act = nn.Conv2d(5, 4, 1), nn.Linear(5, 2), nn.ReLU6()

        def forward(self, x):
            h = self.act(self.bn_a(self.a(x)))
            y = torch.relu(h + self.bn_b(self.b(h)))
            return self.c(y), self.head(y.mean((2, 3)))

    model, x = Net().eval(), torch.randn(1, 3, 8, 8)
    for norm in (model.bn_a, model.bn_b):
        norm.weight.data.uniform_(0.5, 1.5)
        norm.bias.data.uniform_(-1, 2)
    view = TorchView(model, [x])
    moments = batch_norm_moments(view)
    a, b = moments["bn_a"], moments["bn_b"]
    np.testing.assert_allclose(a[0], model.bn_a.bias.detach())
    pairs = fold_all_batch_norms(model, dummy_input=x).pairs
    view.refresh()
    found = expected_inputs(Layers(view.graph()), moments_of_layers(moments, pairs))
    h = clipped_normal(*a, 0.0, 6.0)
    y = clipped_normal(h[0] + b[0], np.hypot(h[1], b[1]), 0.0, np.inf)
    assert found.keys() == {"b", "c", "head"}
    np.testing.assert_allclose(found["b"], h[0])
    np.testing.assert_allclose(found["c"], y[0])
    np.testing.assert_allclose(found["head"], y[0])


# ---------------------------------------------------------------------------------------------- on a model


def net(bias=True):
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=bias), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, bias=bias), nn.ReLU(),
        nn.Conv2d(8, 8, 1, bias=bias), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5, bias=bias),
    ).eval()  # fmt: skip


def images(count=96):
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0)) + 0.5


def simulated(model, data, bits=4):
    return calibrated(QuantizationSimModel(model, data[:2], default_param_bw=bits), [data])


def mean_error(model, sim, x):
    with torch.no_grad():
        return (model(x) - sim.model(x)).mean(0).abs().max().item()


def test_the_mean_of_the_output_agrees_afterwards():
    model, x = net(), images()
    sim = simulated(model, x)
    before = mean_error(model, sim, x)
    report = apply_bias_correction(sim, [x])
    assert list(report.corrected) == ["0", "2", "4", "7"] and report.samples == 96
    assert mean_error(model, sim, x) < 0.1 * before
    assert "4 biases corrected from 96 samples, 0 layers left" in str(report)


def test_batches_of_any_size_give_nearly_the_same():
    model, x = net(), images()
    shifts = []
    for size in (96, 32):
        sim = simulated(model, x)
        shifts.append(apply_bias_correction(sim, x.split(size)).corrected)
    for op, shift in shifts[0].items():
        np.testing.assert_allclose(shifts[1][op], shift, atol=0.05 * np.abs(shift).max() + 1e-3)


def test_the_model_runs_twice_per_batch_however_deep_it_is():
    x, runs = images(), []
    sim = simulated(net(), x)
    sim.model.register_forward_hook(lambda *_: runs.append(1))
    assert len(apply_bias_correction(sim, x.split(32)).corrected) == 4
    assert len(runs) == 2 * 3


def test_the_same_data_give_the_same_biases():
    model, x = net(), images()
    found = []
    for _ in range(2):
        sim = simulated(model, x)
        apply_bias_correction(sim, x.split(32))
        found.append(sim.model.state_dict())
    assert all(torch.equal(found[0][key], value) for key, value in found[1].items())


def test_layers_without_a_bias_are_listed_and_ignored_ones_too():
    model, x = net(bias=False), images()
    report = apply_bias_correction(simulated(model, x), [x])
    assert not report.corrected
    assert [str(line) for line in report.refused] == [f"{i}: it has no bias" for i in (0, 2, 4, 7)]
    report = apply_bias_correction(simulated(net(), x), [x], layers_to_ignore=["2"])
    assert list(report.corrected) == ["0", "4", "7"]
    assert "left       2: it is in layers_to_ignore" in str(report)


def test_biases_that_were_added_are_corrected():
    model, reference, x = net(bias=False), net(bias=False), images()
    assert add_biases(model, x[:1]) == ("0", "2", "4", "7")
    corrected = simulated(model, x)
    report = apply_bias_correction(corrected, x.split(32))
    assert len(report.corrected) == 4 and report.samples == 96
    assert mean_error(reference, corrected, x) < 0.2 * mean_error(reference, simulated(reference, x), x)


def test_the_analytic_form_needs_no_data_where_batch_norms_tell():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 1),
    )  # fmt: skip
    x = torch.randn(512, 3, 4, 4)
    model.train()
    model[1].momentum = model[4].momentum = None
    model(x)
    model.eval()
    moments = batch_norm_moments(TorchView(model, [x[:1]]))
    pairs = fold_all_batch_norms(model, dummy_input=x[:1]).pairs
    moments = moments_of_layers(moments, pairs)
    plain = simulated(model, x, bits=3)
    sim = simulated(model, x, bits=3)
    report = apply_bias_correction(sim, [x], moments=moments, layers_to_ignore=["0"])
    assert report.analytic == {"3", "6"}
    with torch.no_grad():
        before = (model(x) - plain.model(x)).mean((0, 2, 3)).abs().max()
        after = (model(x) - sim.model(x)).mean((0, 2, 3)).abs().max()
    assert after < 0.5 * before
    assert "computed" in str(report)


def test_what_was_computed_is_taken_back_where_measuring_fails():
    model, x = net(), images()
    sim = simulated(model, x)
    kept = [layer.bias.detach().clone() for layer in sim.model if hasattr(layer, "bias")]
    moments = {"0": (np.full(8, 0.5), np.ones(8))}
    computed = apply_bias_correction(simulated(model, x), [x], moments=moments).analytic
    assert computed == {"2"}
    with pytest.raises(CalibrationError, match="0: the mean of its output channel 0 is NaN or infinite"):
        apply_bias_correction(sim, [torch.full_like(x, float("nan"))], moments=moments)
    assert all(map(torch.equal, (layer.bias for layer in sim.model if hasattr(layer, "bias")), kept))


def test_few_samples_are_warned_about(caplog):
    model, x = net(), images(8)
    apply_bias_correction(simulated(model, x), [x])
    assert "bias correction: 8 samples leave the means of channels uncertain; 256 are enough" in caplog.text


def test_bad_input_is_named():
    model, x = net(), images()
    sim = simulated(model, x)
    with pytest.raises(CalibrationError, match="bias correction: the data held no batch. Remedy: give about 256"):
        apply_bias_correction(sim, [])
    with pytest.raises(ConfigError, match="layers_to_ignore: there is no layer 'conv9'. Remedy: use some of 0, 2"):
        apply_bias_correction(sim, [x], layers_to_ignore=["conv9"])
    kept = sim.model[0].bias.detach().clone()
    with pytest.raises(CalibrationError, match="0: the mean of its output channel 0 is NaN or infinite on this data"):
        apply_bias_correction(sim, [torch.full_like(x, float("nan"))])
    assert torch.equal(sim.model[0].bias, kept)
    with pytest.raises(CalibrationError, match="the model was run before calibration"):
        apply_bias_correction(QuantizationSimModel(model, x[:2]), [x])
