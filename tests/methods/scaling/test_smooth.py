"""Smoothing and norm folding: the arithmetic, what they find in transformers, and that the function stays."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods.scaling.smooth import TIES, head_factors, smooth, smoothing_factors
from bitwright.onnx import OnnxView, load_model
from bitwright.torch import TorchView, fold_norms, smooth_model
from tests.methods.transformer import Decoder, tokens
from tests.onnx.nets import Net

# ------------------------------------------------------------------------------------------------ arithmetic


def test_alpha_half_gives_activation_and_weight_the_same_range():
    x, w = np.array([100.0, 1.0, 4.0]), np.array([1.0, 1.0, 0.25])
    s = smoothing_factors(x, w, 0.5)
    np.testing.assert_allclose(x / s, w * s)


def test_alpha_one_makes_activations_alike_and_zero_weights():
    x, w = np.array([100.0, 1.0, 4.0]), np.array([1.0, 2.0, 0.25])
    np.testing.assert_allclose(x / smoothing_factors(x, w, 1.0), 1.0)
    np.testing.assert_allclose(w * smoothing_factors(x, w, 0.0), 1.0)


def test_an_empty_channel_is_left_alone():
    np.testing.assert_array_equal(smoothing_factors(np.array([0.0, 1.0]), np.array([1.0, 0.0])), 1.0)


def test_channels_that_rotary_positions_mix_share_a_factor():
    assert TIES["pairs"](6).tolist() == [0, 0, 1, 1, 2, 2]
    assert TIES["halves"](6).tolist() == [0, 1, 2, 0, 1, 2]
    assert TIES["halves"](1).tolist() == [0]


@pytest.mark.parametrize("tie", TIES)
def test_products_of_heads_stay(tie):
    random = np.random.default_rng(0)
    q, k = (random.standard_normal((5, 4, 6)), random.standard_normal((5, 2, 6)))  # 4 query heads share 2 key heads
    groups = TIES[tie](6)
    by, times = head_factors(np.abs(q).max(0).reshape(-1), np.abs(k).max(0).reshape(-1), 6, groups)
    K, Q = k / by.reshape(2, 6), q * times.reshape(4, 6)
    np.testing.assert_allclose((Q * K.repeat(2, 1)).sum(-1), (q * k.repeat(2, 1)).sum(-1))
    for head in by.reshape(2, 6):
        assert all(len({head[i] for i in np.flatnonzero(groups == g)}) == 1 for g in groups)


# ---------------------------------------------------------------------------------------------- on a model


@pytest.mark.parametrize("norm", ["rms", "RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("rotary", ["pairs", "halves", "none"])
def test_outliers_move_and_the_function_stays(norm, rotary):
    model, x = Decoder(norm, rotary, tied=False), tokens(8)
    before = model(x)
    kept = copy.deepcopy(model.state_dict())
    report = smooth_model(model, [x])
    groups = [str(group) for group in report.groups]
    assert groups == ["norm1 -> q + k + v", "norm2 -> gate + up", "up -> down", "norm -> head"]
    assert [str(heads) for heads in report.attentions] == ["q x k (attention matmul)"]
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    report.undo()
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())


def spread_of(model, x, value):
    (captured,) = TorchView(model, [x]).capture([value], [x])
    ranges = np.abs(captured[value][0]).reshape(-1, captured[value][0].shape[-1]).max(0)
    return ranges.max() / ranges.min()


def test_channels_become_more_alike():
    model, x = Decoder(tied=False), tokens(8)
    graph = TorchView(model, [x]).graph()
    values = [graph.op(name).inputs[0] for name in ("q", "down")]
    before = [spread_of(model, x, value) for value in values]
    smooth_model(model, [x], alpha=0.75)
    after = [spread_of(model, x, value) for value in values]
    assert all(b < a / 1.5 for a, b in zip(before, after, strict=True)), (before, after)


def test_linear_layers_in_front_of_linear_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    model[1].weight.data *= torch.exp(torch.randn(8, 1))
    x = torch.randn(16, 6)
    before = model(x)
    assert [str(group) for group in smooth_model(model, [x]).groups] == ["0 -> 1", "1 -> 3"]
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


def test_every_channel_of_a_model_gets_the_range_of_its_weight():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8)).eval(), torch.randn(16, 6)
    model[0].weight.data *= torch.exp(torch.randn(6))
    model[1].weight.data *= torch.exp(torch.randn(6))
    smooth_model(model, [x], alpha=0.5)
    torch.testing.assert_close(model[0](x).abs().amax(0), model[1].weight.abs().amax(0))


class Tokens(nn.Module):
    """The rows of all samples in one axis, between a norm and its layer."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, 8)

    def forward(self, x):
        return self.fc(self.norm(x).reshape(-1, 6))


def test_channels_are_followed_where_other_axes_are_joined():
    assert [str(group) for group in smooth_model(Tokens().eval(), [torch.randn(3, 5, 6)]).groups] == ["norm -> fc"]


class Turned(nn.Module):
    """Batch and sequence are exchanged in front of the layers, as attention with ``batch_first=True`` does it."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        with torch.no_grad():
            self.norm.weight[2] *= 50

    def forward(self, x):
        return self.out(self.fc(self.norm(x).transpose(0, 1)).permute(1, 0, 2))


def test_channels_are_followed_where_other_axes_are_exchanged():
    torch.manual_seed(0)
    model, x = Turned().eval(), torch.randn(3, 5, 6)
    with torch.no_grad():
        before = model(x)
        report = smooth_model(model, [x])
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    assert [str(group) for group in report.groups] == ["norm -> fc", "fc -> out"]


def test_channels_of_an_onnx_model_are_followed_where_other_axes_are_exchanged():
    n = Net()
    x = n.input("x", (3, 5, 6))
    h = n("LayerNormalization", x, n.weights(6, name="g"), n.weights(6, name="b"), name="norm")
    h = n("MatMul", n("Transpose", h, perm=[1, 0, 2], name="turn"), n.weights(6, 8, name="w"), name="fc")
    h = n("MatMul", n("Transpose", h, perm=[0, 2, 1], name="away"), n.weights(3, 4), name="other")
    view = OnnxView(load_model(n.model(h)))
    report = smooth(view, [{"x": np.random.default_rng(0).standard_normal((3, 5, 6)).astype(np.float32)}])
    assert [str(group) for group in report.groups] == ["norm -> fc"]
    reasons = {line.op: line.reason for line in report.refused}
    assert reasons["fc"] == "other sums over another axis than that of the channels"


def test_what_is_left_says_why():
    report = smooth_model(Decoder(), [tokens(8)])
    reasons = {line.op: line.reason for line in report.refused}
    assert reasons["norm"].endswith("so that the parameter is not its own")  # the head is tied to the embedding
    assert "embed also reads" in reasons["norm"] or "head also reads" in reasons["norm"]
    assert reasons["gate"] == "silu (Silu) reads gate.output[0]"
    assert "smoothed  norm1 -> q + k + v" in str(report) and "balanced  q x k" in str(report)


def test_bad_input_is_named(caplog):
    model = Decoder(tied=False)
    with pytest.raises(ConfigError, match="alpha: it is 1.5. Remedy: give a number from 0 to 1"):
        smooth_model(model, [tokens()], alpha=1.5)
    with pytest.raises(CalibrationError, match="smooth: the data held no batch. Remedy: give about 128 samples"):
        smooth_model(model, [])
    smooth_model(model, [tokens(2)])
    assert "smooth: 2 samples may miss the outliers; 128 are enough" in caplog.text
    model.norm1.weight.data[3] = float("inf")
    with pytest.raises(CalibrationError, match=r"norm1.output\[0\]: channel 3 is NaN or infinite on this data"):
        smooth_model(model, [tokens()])


# -------------------------------------------------------------------------------------------- norm folding


@pytest.mark.parametrize("norm", ["rms", "RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("tied", [True, False])
def test_norms_lose_their_weights_and_the_function_stays(norm, tied):
    model, x = Decoder(norm, tied=tied), tokens(4)
    if norm == "LayerNorm":
        model.norm1.weight.data[2] = 0.0  # a dead channel folds too
    before = model(x)
    report = fold_norms(model, dummy_input=x)
    assert [str(group) for group in report.groups] == ["norm1 -> q + k + v", "norm2 -> gate + up", "norm -> head"]
    assert report.untied == (("head",) if tied else ())
    for module in (model.norm1, model.norm2, model.norm):
        assert torch.equal(module.weight, torch.ones(16))
        assert not (getattr(module, "bias", None) is not None and module.bias.any())
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    report.undo()
    assert (model.head.weight is model.embed.weight) == tied
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)


def test_a_tied_head_may_stay_tied():
    model, x = Decoder(), tokens(4)
    report = fold_norms(model, dummy_input=x, untie=False)
    assert len(report.groups) == 2 and model.head.weight is model.embed.weight
    assert [line.op for line in report.refused] == ["norm"]
    assert "kept    norm: " in str(report)


def test_a_norm_that_others_read_keeps_its_weight():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, 6)

        def forward(self, x):
            h = self.norm(x)
            return h + self.fc(h)

    report = fold_norms(Residual().eval(), dummy_input=torch.randn(3, 6))
    assert not report.groups
    assert str(report.refused[0]) == "norm: add (Add) reads norm.output[0]"


def test_what_the_check_objects_to_is_refused_by_the_name_of_its_first_layer():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(6, 8)
    before = model(x)
    report = smooth(TorchView(model, x), [x], lambda: "its outputs differ")
    assert ("0", "with it, its outputs differ") in [(each.op, each.reason) for each in report.refused]
    assert torch.equal(model(x), before)
