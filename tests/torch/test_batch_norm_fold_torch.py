"""Folding in torch models: every case of the folding zoo, and the real networks, through the view."""

import copy

import pytest
import torch
from torch import nn

from bitwright.methods.folding.batch_norm_fold import fold_all_batch_norms
from bitwright.torch import fold_all_batch_norms as fold_model
from bitwright.torch.calls.inputs import flatten_tensors, map_tensors
from bitwright.torch.view import TorchView
from tests.support.zoo import FOLDING_ZOO, ZOO

# relative to the largest output, by dtype: rounding of the folded weights is what remains
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMED = [
    name
    for name, case in ZOO.items()
    if any(isinstance(module, NORMS) for module in case.build().modules()) and not case.example().kwargs
]


def fold(case, model):
    return fold_all_batch_norms(TorchView(model, [case.example().args]))


def outputs(case, model, seed):
    return [tensor.clone() for _, tensor in flatten_tensors(case.run(model, seed))]


def exact_outputs(case, model, seed):
    """The outputs in float64: what is left of a difference is that of the stored parameters, on any machine."""
    call, wide = case.example(seed), copy.deepcopy(model).double()
    with torch.no_grad():
        args = map_tensors(call.args, lambda t: t.double() if t.is_floating_point() else t)
        return [tensor for _, tensor in flatten_tensors(wide(*args))]


def assert_close(new, old, tolerance=None):
    assert len(new) == len(old)
    for a, b in zip(new, old, strict=True):
        assert a.dtype == b.dtype
        a, b, limit = a.double(), b.double(), tolerance or TOLERANCE[b.dtype]
        assert float((a - b).abs().max()) <= limit * float(b.abs().max())


def same_state(model, other):
    state, before = model.state_dict(), other.state_dict()
    return state.keys() == before.keys() and all(torch.equal(state[key], before[key]) for key in before)


@pytest.mark.parametrize("name", [name for name, case in FOLDING_ZOO.items() if case.expect == "folds"])
def test_every_batch_norm_that_can_be_folded_is(name):
    case = FOLDING_ZOO[name]
    model = case.build()
    before = outputs(case, model, 3)
    report = fold(case, model)
    assert len(report) == case.pairs and not report.refused, str(report)
    assert_close(outputs(case, model, 3), before)


@pytest.mark.parametrize("name", [name for name, case in FOLDING_ZOO.items() if case.expect == "refuses"])
def test_what_must_not_be_folded_stays_bit_for_bit(name):
    case = FOLDING_ZOO[name]
    model = case.build()
    original = copy.deepcopy(model)
    report = fold(case, model)
    norms = sum(isinstance(module, NORMS) for module in model.modules())
    assert not report and len(report.skipped) >= norms, f"{case.why}\n{report}"
    assert all(reason for _, reason in report.skipped)
    assert same_state(model, original)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]


@pytest.mark.parametrize(
    "name, reason",
    [
        ("linear-three-axes", "the channels of 0 are the last axis of 0.output[0]"),
        ("norm-of-every-place", "1 (Flatten) spreads a channel of the layer over several of the batch norm"),
        ("no-running-statistics", "it normalises with the statistics of the batch"),
        ("norm-before-padded-conv", "1: it pads with zeros, which the shift does not reach"),
        ("norm-before-convtranspose", "outputs of a transposed convolution see different kernel parts"),
        ("norm-before-conv-and-shortcut", "add (Add) reads bn.output[0]"),
        ("norm-after-concat", "its input comes from cat (Concat)"),
        ("conv-reused-normalised-once", "add also reads conv.output[0]"),
        ("weight-tied-to-plain-conv", "b shares a parameter with a, but not the batch norm"),
        ("weight-tied-between-two-norms", "normalises differently, and a parameter is shared with it"),
        ("weight-norm", "the weight of 0.conv2d is computed in the model, not a stored parameter"),
        ("value-is-model-output", "conv.output[0] is an output of the model"),
        ("value-has-two-readers", "relu also reads conv.output[0]"),
    ],
)  # fmt: skip
def test_refusals_name_the_sites_and_the_reason(name, reason):
    case = FOLDING_ZOO[name]
    report = fold(case, case.build())
    assert any(reason in text for _, text in report.skipped), str(report)


@pytest.mark.parametrize("name", NORMED)
def test_folding_keeps_the_function_of_every_network(name):
    case = ZOO[name]
    model = case.build()
    stored = next(model.parameters()).dtype
    before = exact_outputs(case, model, 3)
    report = fold(case, model)
    left = sum(isinstance(module, NORMS) for module in model.modules())
    assert_close(exact_outputs(case, model, 3), before, TOLERANCE[stored])
    assert left <= len(report.skipped), str(report)


@pytest.mark.parametrize("name", ["norm-conv-norm", "functional-no-bias", "norm-shared-by-two-convs", "half"])
def test_undo_gives_the_model_back(name):
    case = FOLDING_ZOO[name]
    model = case.build()
    original = copy.deepcopy(model)
    fold(case, model).undo()
    assert same_state(model, original)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]


def test_folded_parameters_keep_their_type_and_names():
    case = FOLDING_ZOO["conv2d-no-bias"]
    model = case.build().requires_grad_(True)
    weight = model[0].weight
    fold(case, model)
    assert model[0].weight is weight and weight.requires_grad and isinstance(model[0].bias, nn.Parameter)
    assert list(model.state_dict()) == ["0.weight", "0.bias"] and isinstance(model[1], nn.Identity)


def test_a_functional_batch_norm_becomes_an_exact_identity():
    case = FOLDING_ZOO["functional"]
    model = case.build()
    fold(case, model)
    x = torch.randn(2, 6, 5, 5)
    assert torch.equal(nn.functional.batch_norm(x, model.mean, model.var, model.gamma, model.beta), x)


class Counted(nn.Module):
    """Counts its forwards; ``drop`` drops in evaluation too, as a function called without its flag does."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.conv, self.bn, self.drop, self.runs = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), drop, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        x.mul_(2.0)  # into its input
        y = self.bn(self.conv(x))
        return nn.functional.dropout(y, self.drop) if self.drop else y


@pytest.mark.parametrize(("drop", "runs"), [(0.0, 2), (0.5, 3)], ids=["fixed", "random"])
def test_outputs_before_a_fold_are_those_of_the_recording_unless_another_run_may_differ(drop: float, runs: int) -> None:
    model, x = Counted(drop).eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = model(x.clone()) if not drop else None
    model.runs = 0
    report = fold_model(model, dummy_input=x.clone())
    assert report.pairs == (("conv", "bn"),)
    assert model.runs == runs
    if expected is not None:
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
