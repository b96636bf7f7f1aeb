"""Layers in factors: the arithmetic against its definition, then models of both front ends."""

from __future__ import annotations

import copy
import functools
import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from bitwright import model_costs
from bitwright.cli import app
from bitwright.compression.svd import (
    Factorization,
    compose,
    find_low_rank_layers,
    low_rank,
    patches,
    spatial_svd,
    svd_model,
    tucker2,
)
from bitwright.errors import CalibrationError, ConfigError
from bitwright.onnx import OnnxView, load_model
from bitwright.torch import TorchView, rebuild
from bitwright.torch.factors import ReducedInput, chain_from_plan, chain_plan

RNG = np.random.default_rng(0)


def conv(x, W, **attrs):
    """A convolution, from patches."""
    rows = patches(x, W.shape[2:], attrs)
    return rows @ W.reshape(len(W), -1).T


# ---- arithmetic


@pytest.mark.parametrize("across", [False, True], ids=["vertical-first", "horizontal-first"])
def test_spatial_factors_of_full_rank_are_the_convolution(across):
    W = RNG.normal(size=(5, 4, 3, 2))
    first, second = spatial_svd(W, 8 if across else 10, vertical_first=not across)
    equation = "riw,orh->oihw" if across else "rih,orw->oihw"
    first, second = (first[:, :, 0], second[..., 0]) if across else (first[..., 0], second[:, :, 0])
    assert np.abs(np.einsum(equation, first, second) - W).max() < 1e-12


def test_factors_without_data_are_those_of_singular_values():
    W = RNG.normal(size=(6, 9))
    first, second = low_rank(W, 3)
    assert np.isclose(np.square(W - second @ first).sum(), np.square(np.linalg.svd(W)[1][3:]).sum())


def test_factors_with_data_are_the_optimum_for_linear_outputs():
    W, X = RNG.normal(size=(6, 9)), RNG.normal(size=(500, 9)) * np.geomspace(1, 0.01, 9)
    first, second = low_rank(W, 2, X.T @ X)
    best = np.square(np.linalg.svd(X @ W.T)[1][2:]).sum()  # no matrix of rank 2 has outputs nearer to X W^T
    assert np.isclose(np.square(X @ (W - second @ first).T).sum(), best, rtol=1e-3)
    plain_first, plain_second = low_rank(W, 2)
    assert np.square(X @ (W - plain_second @ plain_first).T).sum() > 2 * best


def test_spatial_factors_with_data_have_smaller_errors_of_outputs():
    x = RNG.normal(size=(4, 3, 8, 8)).cumsum(2)
    W = RNG.normal(size=(5, 3, 3, 3))
    rows = patches(x, (3, 3), {"pads": (1, 1, 1, 1)})
    wanted = rows @ W.reshape(5, -1).T
    errors = []
    for G in (None, rows.T @ rows):
        first, second = spatial_svd(W, 4, G)
        composed = np.einsum("rih,orw->oihw", first[..., 0], second[:, :, 0])
        errors.append(np.square(rows @ composed.reshape(5, -1).T - wanted).sum())
    assert errors[1] < 0.8 * errors[0]


def test_error_is_that_of_the_outputs():
    W, X = RNG.normal(size=(4, 3, 2)), RNG.normal(size=(50, 6))
    found = Factorization(W, (X.T @ X).reshape(3, 2, 3, 2))
    composed = compose(*found.at(2))
    wanted, got = X @ W.reshape(4, -1).T, X @ composed.reshape(4, -1).T
    assert np.isclose(found.error(composed), np.square(got - wanted).sum() / np.square(wanted).sum())


@pytest.mark.parametrize("data", [False, True])
def test_tucker_factors_of_full_rank_are_the_convolution(data):
    W = RNG.normal(size=(5, 4, 3, 3))
    rows = RNG.normal(size=(200, 36))
    first, core, last = tucker2(W, (4, 5), rows.T @ rows if data else None)
    composed = np.einsum("oa,abhw,bi->oihw", last[..., 0, 0], core, first[..., 0, 0])
    assert np.abs(composed - W).max() < 1e-5


def test_patches_are_what_a_convolution_reads():
    x, W = RNG.normal(size=(2, 3, 7, 6)).astype(np.float32), RNG.normal(size=(4, 3, 3, 2)).astype(np.float32)
    got = conv(x, W, strides=(2, 1), dilations=(1, 2), pads=(1, 0, 1, 0))
    wanted = nn.functional.conv2d(torch.tensor(x), torch.tensor(W), None, (2, 1), (1, 0), (1, 2))
    assert np.abs(got.reshape(2, *wanted.shape[2:], 4).transpose(0, 3, 1, 2) - wanted.numpy()).max() < 1e-5


def test_a_rank_that_a_weight_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="7 is not a rank of a weight .* use 1 to 6"):
        low_rank(np.ones((6, 9)), 7)


# ---- models


class Mixed(nn.Module):
    """Strides, dilations, paddings of every kind, a transposed and a depthwise convolution, both directions of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.dilated = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 2, dilation=2, bias=False)
        self.even, self.depthwise = nn.Conv2d(8, 8, (4, 3), padding="same"), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up, self.line = nn.ConvTranspose2d(8, 6, 3, 2, 1, output_padding=1), nn.Conv1d(8, 4, 3, padding=1)
        self.linear, self.recurrent = nn.Linear(8, 6), nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        x = self.dilated(self.stem(x).relu()).relu()
        up, x = self.up(x), self.depthwise(self.even(x)).flatten(2)
        return self.recurrent(self.linear(x.transpose(1, 2)))[0], self.line(x), up


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    torch.manual_seed(0)
    net, x = Mixed().eval(), torch.randn(4, 3, 10, 10)
    path = tmp_path_factory.mktemp("svd") / "mixed.onnx"
    torch.onnx.export(net, (x,), path, dynamo=False, input_names=["x"])
    return net, x, path


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_every_form_at_full_rank_computes_what_the_layer_did(mixed, front_end):
    net, x, path = mixed
    view = TorchView(copy.deepcopy(net), [x]) if front_end == "torch" else OnnxView(load_model(path))
    batches = [x] if front_end == "torch" else [{"x": x.numpy()}]
    found = find_low_rank_layers(view)
    reasons = set(found.refused.values())
    assert "it is depthwise: each channel has one filter" in reasons
    assert len(found.of) == (7 if front_end == "torch" else 10)  # directions are operators of their own in ONNX

    def outputs():
        names = list(view.graph().outputs)
        captured = next(view.capture(names, batches))
        return [captured[name][0] for name in names]

    before = outputs()
    for layer in found.of.values():
        for form in layer.forms:
            full = layer.at(form, layer._pair(form, layer._most(form)))
            undo = view.edit(layer.edits(full, view, found.bias[layer.name]))
            assert max(np.abs(a - b).max() for a, b in zip(outputs(), before, strict=True)) < 2e-5, (layer.name, form)
            undo()
    assert all(np.array_equal(a, b) for a, b in zip(outputs(), before, strict=True))


class Small(nn.Module):
    """A network whose convolutions have room for factors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Conv2d(3, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.Conv2d(12, 12, 3, padding=1),
        )
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        x = self.second(self.norm(self.first(x)).relu()).relu()
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    torch.manual_seed(0)
    net, x = Small().eval(), torch.randn(16, 3, 8, 8)
    path = tmp_path_factory.mktemp("svd") / "small.onnx"
    torch.onnx.export(net, (x,), path, dynamo=False, input_names=["x"])
    return net, x, path


def test_a_target_is_met_with_less_noise_than_without_data(small):
    net, x, _ = small
    noise = {}
    for aware in (False, True):
        work = copy.deepcopy(net)
        report = svd_model(work, [x], macs=0.6, data_aware=aware, progress=False)
        assert report.after["macs"] <= 0.6 * report.before["macs"] * (1 + 1e-9)
        with torch.no_grad():
            noise[aware] = float((work(x) - net(x)).square().mean())
        report.undo()
        assert torch.equal(work(x), net(x))
    assert noise[True] < noise[False]


def test_an_onnx_file_becomes_smaller_without_torch_in_it(small, tmp_path):
    _, x, path = small
    loaded = load_model(path)
    report = svd_model(loaded, [{"x": x.numpy()}], params=0.5, progress=False)
    onnx.save(onnx.load_from_string(_bytes(loaded)), tmp_path / "out.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx")
    assert session.run(None, {"x": x.numpy()})[0].shape == (16, 10)
    stored = sum(np.prod(t.dims) for t in onnx.load(tmp_path / "out.onnx").graph.initializer if len(t.dims) > 1)
    assert stored <= 0.5 * report.before["params"] + 60
    assert f"{sum(bool(r.form) for r in report.rows)} of 3 layers in factors" in report.summary
    assert 0 < report.after["ms"] < 10 * report.before["ms"]  # of a file they are measured


def _bytes(loaded):
    import onnx_ir as ir

    return ir.to_proto(loaded.model).SerializeToString()


def test_a_plan_and_a_state_dict_rebuild_the_module(mixed):
    net, x, _ = mixed
    view = TorchView(copy.deepcopy(net), [x])
    found = find_low_rank_layers(view)
    layer = found.of["recurrent.l0.forward"]
    plan = chain_plan(net.recurrent, layer.at("weight", (3,)).edit)
    made = chain_from_plan(net.recurrent, plan)
    assert isinstance(made, ReducedInput) and made.reduce.out_features == 3 and made.layer.num_layers == 2
    view.edit([layer.at("weight", (3,)).edit])
    made.load_state_dict(view.model.recurrent.state_dict())
    again = copy.deepcopy(net)
    again.recurrent = made
    assert torch.equal(again(x)[0], view.model(x)[0])


def test_the_plan_of_a_report_rebuilds_the_class_and_refuses_another(small):
    net, x, _ = small
    work = copy.deepcopy(net)
    report = svd_model(work, [x], macs=0.5, progress=False)
    again = rebuild(Small().eval(), json.loads(json.dumps(report.plan)))
    again.load_state_dict(work.state_dict())
    assert torch.equal(again(x), work(x))
    with pytest.raises(ConfigError, match="the plan replaces it, and the model has no such module"):
        rebuild(nn.Sequential(nn.Linear(2, 2)), report.plan)
    inputs = report.plan["steps"][0]["layers"][0]["in"]
    other = Small().eval()
    other.set_submodule(report.plan["steps"][0]["module"], nn.GRU(inputs, 4))
    with pytest.raises(ConfigError, match=f"the plan replaces a Conv2d of {inputs} inputs, and it is GRU"):
        rebuild(other, report.plan)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"macs": 0.001}, r"0.001 of the macs cannot be met: the nearest that can is 0\.\d+"),
        ({"macs": 1.5}, "1.5 of the macs is not a part between 0 and 1"),
        ({}, "it needs a target"),
        ({"ratios": {"frist": 0.5}}, "no such layer \\(did you mean 'first'"),
        ({"ratios": {"first": -1}}, "-1 is not a ratio"),
        ({"macs": 0.5, "forms": ("spacial",)}, "no form 'spacial' \\(did you mean 'spatial'"),
        ({"macs": 0.5, "metric": lambda m: None}, "of the original model it is None, which is not a number"),
        ({"macs": 0.5, "metric": lambda m: float("nan")}, "of the original model it is NaN"),
    ],
)
def test_bad_input_names_place_value_and_remedy(small, options, message):
    net, x, _ = small
    work = copy.deepcopy(net)
    with pytest.raises((ConfigError, CalibrationError), match=message):
        svd_model(work, [x], progress=False, **options)
    assert torch.equal(work(x), net(x))


def test_a_model_without_a_layer_for_the_form_says_why():
    with pytest.raises(ConfigError, match="no layer can be written as factors: 0: it has no form of spatial"):
        svd_model(nn.Sequential(nn.Linear(8, 8)), [torch.randn(4, 8)], macs=0.5, forms=("spatial",), progress=False)


def test_no_data_is_refused(small):
    with pytest.raises(CalibrationError, match="no batch"):
        svd_model(small[0], [], macs=0.5)


def test_commands_write_a_smaller_file_and_print_costs(small, tmp_path):
    _, x, path = small
    np.savez(tmp_path / "data.npz", x=x.numpy())
    run = functools.partial(CliRunner().invoke, app)
    out = run(["compress", str(path), "--data", str(tmp_path / "data.npz"), "--method", "svd", "--macs", "0.6",
               "--batch-size", "16", "--out", str(tmp_path / "small"), "--metric", "agreement"])  # fmt: skip
    assert out.exit_code == 0, out.output
    assert "layers in factors: macs 0." in out.output
    before, after = (model_costs(p)["macs"] for p in (path, tmp_path / "small" / "small.onnx"))
    assert after <= 0.6 * before
    shown = run(["inspect", str(path), "--costs"])
    assert shown.exit_code == 0 and "multiplications" in shown.output and "activations" in shown.output
    wrong = run(
        ["compress", str(path), "--data", str(tmp_path / "data.npz"), "--out", str(tmp_path), "--method", "svg"]
    )
    assert wrong.exit_code == 2 and "did you mean 'svd'" in wrong.output
    start = [
        "compress",
        str(path),
        "--data",
        str(tmp_path / "data.npz"),
        "--out",
        str(tmp_path / "bits"),
        "--bytes",
        "0.2",
    ]
    both = run([*start, "--bits", "4,8", "--batch-size", "16"])
    assert both.exit_code == 0 and "weights: " in both.output, both.output
    rules = json.loads((tmp_path / "bits" / "small.rules.json").read_text())["rules"]
    assert {rule["weight"] for rule in rules} <= {"int4", "int8"}
    assert "'four' is not numbers" in run([*start, "--bits", "four"]).output
    assert "svd chooses no bits" in run([*start[:-2], "--macs", "0.5", "--method", "svd", "--bits", "4"]).output
