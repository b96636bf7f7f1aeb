"""Zeros in weights: their patterns, what they cost the outputs, and that they stay through training and export."""

from __future__ import annotations

import copy

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from bitwright.compression.sparsify import Pattern, mask_of, sparse_gpt, sparsify_model, wanda_scores
from bitwright.compression.training import MovementScores
from bitwright.errors import CalibrationError, ConfigError
from bitwright.onnx import load_model
from bitwright.torch import QuantizationSimModel, apply_gptq, keep_masks
from tests.support.simulations import calibrated

RNG = np.random.default_rng(0)


class Net(nn.Module):
    """A convolution, a transposed and a depthwise one, a linear layer, an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.deep = nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(8, 8, 2), nn.Conv2d(8, 8, 3, groups=8)
        self.fc, self.rnn = nn.Linear(8, 12), nn.LSTM(12, 6)

    def forward(self, x):
        x = self.deep(self.up(self.conv(x).relu()).relu()).mean(3).permute(2, 0, 1)
        return self.rnn(self.fc(x))[0]


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval(), torch.randn(6, 4, 8, 8)


# ---- arithmetic


@pytest.mark.parametrize("text", ["2:4", "1:4", "4:8"])
def test_every_group_keeps_its_largest(text):
    pattern, scores = Pattern.of(text), RNG.random((5, 18))
    mask = mask_of(scores, 0.5, pattern)
    full = mask[:, : 18 // pattern.every * pattern.every].reshape(5, -1, pattern.every)
    assert (full.sum(2) == pattern.keep).all()
    values = scores[:, : full.shape[1] * pattern.every].reshape(full.shape)
    assert (np.where(full, values, np.inf).min(2) >= np.where(full, -np.inf, values).max(2)).all()


def test_unstructured_zeros_are_the_least_of_the_layer_or_of_each_row_and_blocks_are_whole():
    scores = RNG.random((6, 8)) * np.arange(1, 7)[:, None]
    whole, rows = mask_of(scores, 0.25, Pattern()), mask_of(scores, 0.25, Pattern(), by_row=True)
    assert (~whole).sum() == 12 and scores[~whole].max() <= scores[whole].min()
    assert ((~rows).sum(1) == 2).all()
    blocks = mask_of(scores, 0.5, Pattern.of("2x4")).reshape(3, 2, 2, 4)
    assert (blocks.all((1, 3)) | ~blocks.any((1, 3))).all() and blocks.mean() == 0.5


@pytest.mark.parametrize("text", ["unstructured", "2:4"])
def test_errors_of_outputs_fall_from_magnitude_over_wanda_to_sparse_gpt(text):
    errors = np.zeros(3)
    for rng in map(np.random.default_rng, range(8)):  # of single draws magnitude is ahead of Wanda at times
        X = rng.normal(size=(400, 64)) @ rng.normal(size=(64, 64)) * np.geomspace(3, 0.1, 64)
        W, G, pattern = rng.normal(size=(12, 64)), X.T @ X, Pattern.of(text)
        found = [
            W * mask_of(np.abs(W), 0.5, pattern),
            W * mask_of(wanda_scores(W, G), 0.5, pattern, by_row=True),
            sparse_gpt(W, G, 0.5, pattern),
        ]
        assert all(abs((w == 0).mean() - 0.5) < 0.01 for w in found)
        errors += [np.square(X @ (w - W).T).sum() for w in found]
    assert errors[0] > errors[1] > errors[2]


# ---- models


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_both_front_ends_get_the_same_zeros(net, method, tmp_path):
    model, x = net
    torch.onnx.export(model, (x,), tmp_path / "net.onnx", dynamo=False, input_names=["x"])
    loaded, work = load_model(tmp_path / "net.onnx"), copy.deepcopy(model)
    report = sparsify_model(work, [x], method=method, pattern="2:4", progress=False)
    theirs = sparsify_model(loaded, [{"x": x.numpy()}], method=method, pattern="2:4", progress=False)
    assert report.refused["deep"] == "it is grouped: its filters have few weights"
    wanted = {"conv.weight", "up.weight", "fc.weight", "rnn.weight_ih_l0"} | (
        {"rnn.weight_hh_l0"} if method == "magnitude" else set()
    )
    assert set(report.masks) == wanted and len(theirs.masks) == len(wanted)
    ours, stored = work.conv.weight.detach().numpy(), ir.to_proto(loaded.model).graph.initializer
    other = next(np.frombuffer(t.raw_data, np.float32) for t in stored if tuple(t.dims) == (8, 4, 3, 3))
    assert np.allclose(ours.ravel(), other, atol=1e-4) and ((ours == 0).ravel() == (other == 0)).mean() > 0.99
    assert (ours.reshape(8, -1, 4) != 0).sum(2).max() == 2
    report.undo()
    assert torch.equal(work(x), model(x))


def test_zeros_stay_in_training_in_copies_and_in_a_state_dict(net):
    model, x = copy.deepcopy(net[0]), net[1]
    report = sparsify_model(model, [x], sparsity=0.5, progress=False)
    handle = keep_masks(model, report.masks)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            one(x).square().sum().backward()
            optimizer.step()
        one(x)
        assert all((one.get_parameter(n).detach().numpy()[~m] == 0).all() for n, m in report.masks.items())
        assert not torch.equal(one.conv.weight, net[0].conv.weight)
    fresh = Net().eval()
    keep_masks(fresh, model.state_dict())
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), model(x)) and fresh.conv.weight_mask.dtype == torch.bool
    handle.remove()
    assert "conv.weight_mask" not in model.state_dict() and (model.conv.weight == 0).float().mean() > 0.4


def test_zeros_are_in_the_export_of_a_model_that_was_just_trained(net, tmp_path):
    model, x = copy.deepcopy(net[0]), net[1]
    report = sparsify_model(model, [x], pattern="2:4", progress=False)
    keep_masks(model, report.masks)
    with torch.no_grad():
        model.fc.weight.add_(0.1)  # the step of an optimizer
    sim = calibrated(QuantizationSimModel(model, x), [x])
    assert ((sim.model.fc.weight == 0).float().mean() - 0.5).abs() < 0.01


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_rounding_and_zeros_are_chosen_in_one_pass(net, pattern):
    model, x = net
    sim = calibrated(QuantizationSimModel(copy.deepcopy(model), x, preset="w8a8"), [x])
    report = apply_gptq(sim, [x], sparsity=0.5, pattern=pattern, progress=False)
    weight = sim.model.conv.weight.detach().numpy()
    assert abs((weight == 0).mean() - 0.5) < 0.03
    if pattern == "2:4":
        assert (weight.reshape(8, -1, 4) != 0).sum(2).max() <= 2
    assert next(row for row in report if row.layer.startswith("conv")).note.endswith("of its weights are zero")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pattern": "4:2"}, "'4:2' is not a pattern of zeros"),
        ({"pattern": "2x2", "method": "sparsegpt"}, "sparsegpt has no blocks 2x2"),
        ({"sparsity": 1.0}, "1.0 is not a share of zeros"),
        ({"method": "wnada"}, r"no method 'wnada' \(did you mean 'wanda'"),
        ({"include": ["deep"]}, "it cannot be pruned: it is grouped"),
        ({"exclude": ["cnov"]}, "no such layer"),
    ],
)
def test_bad_input_names_place_value_and_remedy(net, options, message):
    with pytest.raises(ConfigError, match=message):
        sparsify_model(copy.deepcopy(net[0]), [net[1]], progress=False, **options)


def test_masks_of_another_shape_or_model_and_missing_data_are_refused(net):
    model = copy.deepcopy(net[0])
    with pytest.raises(ConfigError, match=r"its mask has the shape \(2, 2\), the parameter \(12, 8\)"):
        keep_masks(model, {"fc.weight": np.ones((2, 2), bool)})
    with pytest.raises(ConfigError, match="no such parameter"):
        keep_masks(model, {"cf.weight": np.ones((2, 2), bool)})
    with pytest.raises(CalibrationError, match="no batch"):
        sparsify_model(model, [])


def test_layers_may_be_named_by_an_iterator(net):
    model, x = net
    work = copy.deepcopy(model)
    first = sparsify_model(work, [x], method="magnitude", progress=False).rows[0].layer
    report = sparsify_model(copy.deepcopy(model), [x], method="magnitude", include=iter([first]), progress=False)
    assert [row.layer for row in report.rows] == [first]


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_movement_keeps_what_training_needs_and_magnitude_does_not(pattern: str) -> None:
    """Large weights that a fine-tune draws to zero go, small ones that it makes larger stay: the loss reaches zero again."""
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    needed = torch.tensor([0.0, 0, 1, 1, 0, 0, 1, 1])
    found = {}
    for method in ("movement", "magnitude"):
        net = nn.Sequential(nn.Linear(8, 4, bias=False))
        with torch.no_grad():
            net[0].weight.copy_(3 * (1 - needed) + 0.1 * needed + 0.01 * torch.randn(4, 8))
        optimizer, moved = torch.optim.SGD(net.parameters(), 0.05), MovementScores(net)

        def train(steps: int, net=net, optimizer=optimizer, moved=moved) -> float:
            for _ in range(steps):
                optimizer.zero_grad()
                loss = (net(x) - (x @ needed)[:, None]).square().mean()
                loss.backward()
                moved.step()
                optimizer.step()
            return float(loss.detach())

        train(5)
        old, new = (net[0].weight[:, needed == k].abs() for k in (0, 1))
        assert float(old.detach().min()) > float(new.detach().max())  # magnitude still tells the task of before
        scores = {"scores": moved.scores} if method == "movement" else {}
        report = sparsify_model(net, [x], method=method, pattern=pattern, progress=False, **scores)
        keep_masks(net, report.masks)
        found[method] = train(600)
        assert report.masks["0.weight"].mean() == 0.5
    assert found["movement"] < 1e-6 < 1 < found["magnitude"]


def test_scores_that_do_not_fit_are_refused() -> None:
    net, x = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)), torch.randn(4, 8)
    with pytest.raises(CalibrationError, match=r"no weight has a gradient.*after loss.backward"):
        MovementScores(net).step()
    with pytest.raises(ConfigError, match="no weight of the model is trained"):
        MovementScores(nn.ReLU())
    net(x * float("nan")).sum().backward()
    with pytest.raises(CalibrationError, match="0.weight: its gradient is NaN or infinite"):
        MovementScores(net).step()
    for scores, message in (
        (None, "movement needs what training has found"),
        ({"0.weight": np.ones((3, 8))}, r"shape \[3, 8\], the weight \[4, 8\]"),
        ({"0.weight": np.full((4, 8), np.nan)}, "they hold NaN"),
        ({"9.weight": np.ones((4, 8))}, "of none of the weights"),
    ):
        with pytest.raises(ConfigError, match=message):
            sparsify_model(net, [x], method="movement", scores=scores, progress=False)
    with pytest.raises(ConfigError, match="wanda computes its own"):
        sparsify_model(net, [x], scores={}, progress=False)
    with pytest.raises(ConfigError, match="scores are of the order that the channels have"):
        sparsify_model(net, [x], method="movement", scores={}, pattern="2:4", permute=True, progress=False)
    report = sparsify_model(net, [x], method="movement", scores={"0.weight": torch.randn(4, 8)}, progress=False)
    assert report.refused == {"1": "its weight has no scores: no gradient reached it"}
