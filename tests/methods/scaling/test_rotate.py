"""Rotation: Hadamard matrices, residual streams and heads, and why a graph does not allow it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.errors import ConfigError
from bitwright.methods.scaling.rotate import hadamard, random_rotation
from bitwright.torch import TorchView, rotate_model
from tests.methods.transformer import Decoder, RMSNorm, tokens

# ------------------------------------------------------------------------------------------------ matrices


@pytest.mark.parametrize(
    "n", [1, 2, 4, 8, 12, 16, 20, 24, 28, 36, 40, 44, 48, 56, 60, 64, 76, 80, 96, 144, 160, 768, 896]
)
def test_hadamard_matrices_are_orthogonal_signs(n):
    H = hadamard(n)
    assert H.shape == (n, n) and set(np.unique(H)) <= {-1.0, 1.0}
    np.testing.assert_array_equal(H @ H.T, n * np.eye(n))


@pytest.mark.parametrize("n", [0, 3, 6, 10, 92, 172])
def test_other_sizes_are_refused(n):
    with pytest.raises(
        ConfigError, match=f"hadamard: no construction here gives a Hadamard matrix of size {n}. Remedy"
    ):
        hadamard(n)


@pytest.mark.parametrize("n", [5, 12, 64, 172])
def test_random_rotations_are_orthogonal_and_repeatable(n):
    R = random_rotation(n, seed=3)
    np.testing.assert_allclose(R @ R.T, np.eye(n), atol=1e-12)
    np.testing.assert_array_equal(R, random_rotation(n, seed=3))
    assert not np.array_equal(R, random_rotation(n, seed=4))


def test_an_outlier_is_spread_evenly():
    x = np.zeros(64)
    x[5] = 64.0
    np.testing.assert_allclose(np.abs(x @ random_rotation(64)), 8.0)


# ---------------------------------------------------------------------------------------------- on a model


@pytest.mark.parametrize("norm", ["rms", "RMSNorm"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_the_stream_and_the_values_are_rotated_and_the_function_stays(norm, tied, bias):
    model, x = Decoder(norm, tied=tied, bias=bias), tokens(4)
    before, kept = model(x), copy.deepcopy(model.state_dict())
    report = rotate_model(model, dummy_input=x)
    (stream,) = report.streams
    assert {layer.op for layer in stream.producers} == {"embed", "o", "down"}
    assert {layer.op for layer in stream.consumers} == {"q", "k", "v", "gate", "up", "head"}
    assert [heads.value.op for heads in report.heads] == ["v"]
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model.embed.weight, kept["embed.weight"], atol=0.1)
    report.undo()
    assert (model.head.weight is model.embed.weight) == tied
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())


def test_outliers_of_the_stream_are_gone():
    model, x = Decoder(tied=False), tokens(16)
    model.embed.weight.data[:, 3] += 30
    model.o.weight.data[3] *= 10

    def peak(value):
        (captured,) = TorchView(model, [x]).capture([value], [x])
        array = captured[value][0]
        return float(np.abs(array).max() / array.std())

    before = peak("embed.output[0]")
    rotate_model(model, dummy_input=x)
    assert peak("embed.output[0]") < before / 1.4


def test_learned_positions_are_rotated_with_the_stream():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.randn(7, 8))
            self.norm, self.fc, self.last = RMSNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.embed(x) + self.positions
            return self.last(x + self.fc(self.norm(x)))

    torch.manual_seed(0)
    model, x = Positions().eval(), tokens()
    before = model(x)
    report = rotate_model(model, dummy_input=x)
    assert report.streams[0].tables == ("positions",)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


class Bare(nn.Module):
    """An embedding, what is done to it, and a linear layer."""

    def __init__(self, wiring, **modules):
        super().__init__()
        self.embed, self.wiring, self.last = nn.Embedding(11, 8), wiring, nn.Linear(8, 3)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.wiring(self, self.embed(x))


def scaled_norm():
    norm = nn.RMSNorm(8)
    norm.weight.data.uniform_(0.5, 2)
    return norm


def test_a_norm_without_a_weight_is_passed():
    torch.manual_seed(0)
    model = Bare(lambda m, x: m.last(m.norm(x)), norm=nn.RMSNorm(8, elementwise_affine=False)).eval()
    x = tokens()
    before, table = model(x), model.embed.weight.detach().clone()
    report = rotate_model(model, dummy_input=x)
    assert len(report.streams) == 1 and not torch.allclose(model.embed.weight, table, atol=0.1)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)


# name -> model, what the refusal of the embedding says
REFUSED = {
    "layer-norm": (
        lambda: Bare(lambda m, x: m.last(m.norm(x)), norm=nn.LayerNorm(8)),
        "norm (LayerNormalization) reads it, which subtracts the mean: a rotation does not keep it",
    ),
    "norm-that-is-returned": (
        lambda: Bare(lambda m, x: (m.last(m.norm(x)), torch.relu(m.norm(x))), norm=scaled_norm()),
        "the weight of the norm norm is not folded into the layers after it",
    ),
    "activation": (lambda: Bare(lambda m, x: m.last(torch.relu(x))), "relu (Relu) reads it"),
    "returned": (lambda: Bare(lambda m, x: (m.last(x), x)), "embed.output[0] in it is an output of the model"),
    "reused": (
        lambda: Bare(lambda m, x: m.last(m.fc(m.fc(x))), fc=nn.Linear(8, 8)),
        "fc is used at 2 places of the model, which share fc.weight",
    ),
    "convolution": (
        lambda: Bare(lambda m, x: m.last(m.conv(x)), conv=nn.Conv1d(7, 7, 1)),
        "conv (Conv) reads it with channels on another axis",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rotated_says_why_and_stays(name):
    build, reason = REFUSED[name]
    torch.manual_seed(0)
    model, x = build().eval(), tokens()
    kept = copy.deepcopy(model.state_dict())
    report = rotate_model(model, dummy_input=x)
    assert not report.streams
    assert [line.reason for line in report.refused if line.op == "embed"] == [reason], str(report)
    assert f"left     embed: {reason}" in str(report)
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())


def test_a_decoder_with_layer_norms_is_left_as_it_was():
    model, x = Decoder("LayerNorm"), tokens()
    kept = copy.deepcopy(model.state_dict())
    report = rotate_model(model, dummy_input=x)
    assert not report.streams and not report.heads and not report.norms.groups
    assert model.head.weight is model.embed.weight
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
