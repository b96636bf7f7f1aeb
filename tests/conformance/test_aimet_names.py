"""AIMET's names of post-training methods, called with AIMET's arguments, do what they do there."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import bitwright.onnx as bo
import bitwright.torch as bt
from bitwright.errors import ConfigError, ModelError
from tests.algorithms.transformer import Decoder, tokens
from tests.conformance.test_ptq import exported, run

X = torch.rand(96, 3, 10, 10, generator=torch.Generator().manual_seed(0)) * 4 - 1


def small(spread: float = 1.5) -> nn.Module:
    """Depthwise layers behind batch norms of very different channels and high biases."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 5, bias=False),
    )  # fmt: skip
    for norm in (m for m in model if isinstance(m, nn.BatchNorm2d)):
        norm.weight.data = 0.3 * torch.exp(spread * torch.randn(norm.num_features))
        norm.bias.data = 5 * norm.weight.data
    model.train()
    with torch.no_grad():
        for _ in range(40):
            model(X)
    return model.eval()


def channel_spread(weight: torch.Tensor) -> float:
    ranges = weight.detach().abs().amax((1, 2, 3))
    return float(ranges.max() / ranges.min())


def test_equalization_of_a_folded_model_is_equalize_model_in_two_steps():
    whole, parts = small(), small()
    bt.equalize_model(whole, (1, 3, 10, 10))
    folded_pairs = bt.fold_all_batch_norms(parts, (1, 3, 10, 10))
    report = bt.equalize_bn_folded_model(parts, (1, 3, 10, 10), folded_pairs)
    assert len(report.groups) == 3 and report.statistics.keys() == {"0", "3", "6"}
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], value)
    model = exported(small(), X[:2])
    folded = bo.fold_all_batch_norms_to_weight(model)
    assert len(bo.equalize_bn_folded_model(model, folded).groups) == 3
    torch.testing.assert_close(run(model, X), whole(X), rtol=1e-3, atol=1e-3)


def test_given_batch_norms_are_folded_and_the_others_stay():
    model, before = small(), small()(X)
    report = bt.fold_given_batch_norms(model, [(model[0], model[1]), ("7", "6")], dummy_input=X[:2])
    assert list(report) == [("0", "1"), ("6", "7")] and not report.refused
    assert isinstance(model[1], nn.Identity) and isinstance(model[4], nn.BatchNorm2d)
    torch.testing.assert_close(model(X), before, rtol=1e-3, atol=1e-3)
    with pytest.raises(ModelError, match="layer_pairs: .* is not a layer of the model with a batch norm of it"):
        bt.fold_given_batch_norms(model, [(model[3], nn.BatchNorm2d(8))], (1, 3, 10, 10))


def test_scaling_gives_equal_ranges_then_high_biases_move_on():
    model, before = small(), small()(X)
    folded_pairs = bt.fold_all_batch_norms(model, dummy_input=X[:2])
    assert channel_spread(model[0].weight) > 10
    cls_set_info_list = bt.CrossLayerScaling.scale_model(model, None, X[:2])
    first, second = (model[i].weight.detach().abs().amax((1, 2, 3)) for i in (0, 3))
    torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-6)  # as in the paper
    torch.testing.assert_close(model(X), before, rtol=1e-3, atol=1e-3)
    bias = model[0].bias.detach().clone()
    report = bt.HighBiasFold.bias_fold(cls_set_info_list, folded_pairs)
    assert "0" in report.absorbed and (model[0].bias < bias).any() and not (model[0].bias > bias).any()
    assert (model(X) - before).abs().mean() < 0.02 * before.abs().mean()
    report.undo()
    torch.testing.assert_close(model(X), before, rtol=1e-3, atol=1e-3)


def test_the_same_in_onnx():
    model, other = exported(small(), X[:2]), small()
    folded, pairs = (bo.fold_all_batch_norms(model, X[:2].numpy()), bt.fold_all_batch_norms(other, dummy_input=X[:2]))
    sets = bo.CrossLayerScaling(model).scale_model()
    torch.testing.assert_close(run(model, X), small()(X), rtol=1e-3, atol=1e-3)
    report = bo.HighBiasFold(model).bias_fold(sets, folded)
    ours = bt.HighBiasFold.bias_fold(bt.CrossLayerScaling.scale_model(other, dummy_input=X[:2]), pairs)
    assert len(report.absorbed) == len(ours.absorbed) > 0
    torch.testing.assert_close(run(model, X), other(X), rtol=1e-3, atol=1e-3)


def test_batch_norms_may_be_given_as_modules_and_not_as_names():
    model = small()
    norms = {"0": copy.deepcopy(model[1]), model[3]: copy.deepcopy(model[4]), "6": (np.ones(6), np.ones(6))}
    pairs = bt.fold_all_batch_norms(model, dummy_input=X[:2])
    sets = bt.CrossLayerScaling.scale_model(model, dummy_input=X[:2])
    with pytest.raises(ModelError, match="bn_layers: 0 has '1', .* give the report of fold_all_batch_norms itself"):
        bt.HighBiasFold.bias_fold(sets, dict(pairs))
    with pytest.raises(ModelError, match="bn_layers: a Conv2d in it is not a module of the model"):
        bt.HighBiasFold.bias_fold(sets, {nn.Conv2d(1, 1, 1): norms["0"]})
    found = bt.HighBiasFold.bias_fold(sets, norms)
    np.testing.assert_allclose(found.statistics["3"][1] * sets.factors[1], pairs.moments["3"][1], rtol=1e-6)


def test_sets_of_layers_are_scaled_without_their_model():
    model = small()
    bt.fold_all_batch_norms(model, dummy_input=X[:2])
    whole, before = copy.deepcopy(model), model(X)
    expected = bt.CrossLayerScaling.scale_model(whole, dummy_input=X[:2]).factors
    s12, s23 = bt.CrossLayerScaling.scale_cls_sets([(model[0], model[3], model[6])])[0]
    np.testing.assert_allclose(model[3].weight.detach().abs().amax((1, 2, 3)),
                               model[6].weight.detach().abs().amax((0, 2, 3)), rtol=1e-2)  # fmt: skip
    assert s12.shape == s23.shape == (8,) and s12.shape == expected[0].shape
    torch.testing.assert_close(model(X), before, rtol=1e-3, atol=1e-3)
    linear = [nn.Linear(3, 4), nn.Linear(4, 5)]
    (s,) = bt.CrossLayerScaling.scale_cls_sets([linear])
    np.testing.assert_allclose(
        linear[0].weight.detach().abs().amax(1), linear[1].weight.detach().abs().amax(0), rtol=1e-5
    )
    assert isinstance(s, np.ndarray) and all(layer.training for layer in linear)
    with pytest.raises(ModelError, match="scale_cls_sets: the layers do not fit together"):
        bt.CrossLayerScaling.scale_cls_sets([(nn.Conv2d(3, 4, 1), nn.Conv2d(5, 4, 1))])
    with pytest.raises(ModelError, match="scale_cls_sets: a set of one layer"):
        bt.CrossLayerScaling.scale_cls_sets([(nn.Conv2d(3, 4, 1),)])


def test_correct_bias_on_an_onnx_model():
    module = small(0.5)
    bt.fold_all_batch_norms(module, dummy_input=X[:2])
    model, reference = exported(module, X[:2]), module(X).detach()
    batches = [batch.numpy() for batch in X.split(32)]
    plain = quantized(copy.deepcopy(model), batches)
    report = bo.correct_bias(model, bo.QuantParams(weight_bw=4, act_bw=8), 64, batches, None)
    assert len(report.corrected) == 4 and report.samples == 96  # the linear layer got a bias
    corrected = quantized(model, batches)
    error = [float((y - reference).mean(0).abs().max()) for y in (plain, corrected)]
    assert error[1] < 0.3 * error[0]


def test_correct_bias_by_formula_takes_what_folding_knows():
    module = small(0.5)
    model = exported(module, X[:2])
    moments = bo.fold_all_batch_norms(model, X[:2].numpy()).moments
    params = bo.QuantParams(4, 8, quant_scheme="tf_enhanced")
    report = bo.correct_bias(model, params, 64, [X.numpy()], 64, moments, False)
    folds = bt.fold_all_batch_norms(module, dummy_input=X[:2])
    ours = bt.correct_bias(module, bt.QuantParams(4, 8, quant_scheme="tf_enhanced"), 64, [X], 64, folds.moments, False)
    assert len(report.analytic) == len(ours.analytic) == 3
    with pytest.raises(ConfigError, match="round_mode: it is 'stochastic'. Remedy: use 'nearest'"):
        bt.QuantParams(round_mode="stochastic")


def test_a_bias_correction_that_fails_leaves_the_model():
    module = small(0.5)
    bt.fold_all_batch_norms(module, dummy_input=X[:2])
    model = exported(module, X[:2])
    before, state = model.SerializeToString(), copy.deepcopy(module.state_dict())
    with pytest.raises(ConfigError, match="there is no layer 'conv9'"):
        bo.correct_bias(model, bo.QuantParams(4), 8, [X.numpy()], 8, layers_to_ignore=["conv9"])
    with pytest.raises(ConfigError, match="there is no layer 'conv9'"):
        bt.correct_bias(module, bt.QuantParams(4), 8, [X], 8, layers_to_ignore=["conv9"])
    assert model.SerializeToString() == before
    assert module.state_dict().keys() == state.keys()


def quantized(model: object, batches: list[np.ndarray]) -> torch.Tensor:
    sim = bo.QuantizationSimModel(model, batches[0], default_param_bw=4, threads=1)  # type: ignore[arg-type]
    sim.compute_encodings(batches, progress=False)
    return torch.from_numpy(sim.run(X.numpy())[0])


@pytest.fixture(scope="module")
def decoder() -> onnx.ModelProto:
    return exported(Decoder(), tokens(8))


@pytest.mark.quick_variants("False-True")
@pytest.mark.parametrize("r1, r2", [(True, False), (False, True), (True, True)])
def test_spinquant_rotates_what_is_asked_for(r1, r2, decoder):
    model, other, x = Decoder(), copy.deepcopy(decoder), tokens(8)
    before = model(x)
    names = "qkvo" if r1 else "vo"
    kept = {name: getattr(model, name).weight.detach().clone() for name in "qkvo"}
    ours = bt.apply_spinquant(model, x, enable_r1=r1, enable_r2=r2)
    theirs = bo.apply_spinquant(other, x.numpy(), enable_r1=r1, enable_r2=r2)
    for report in (ours, theirs):
        assert (len(report.streams), len(report.heads)) == (int(r1), int(r2)), str(report)
    assert {name for name in kept if not torch.equal(kept[name], getattr(model, name).weight)} == set(names)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run(other, x), before, rtol=1e-4, atol=1e-4)


def prepared(module: nn.Module) -> tuple[bt.QuantizationSimModel, list[torch.Tensor]]:
    bt.fold_all_batch_norms(module, dummy_input=X[:2])
    sim = bt.QuantizationSimModel(module, X[:2], preset="w4a8")
    sim.compute_encodings(X.split(32), progress=False)
    return sim, list(X.split(32))


def test_the_older_call_of_seq_mse():
    model = small(0.5)
    sim, batches = prepared(model)
    other, _ = prepared(small(0.5))
    params = bt.SeqMseParams(num_batches=2, num_candidates=8)
    report = bt.apply_seq_mse(model, sim, batches, params)
    assert str(report) == str(bt.apply_seq_mse(other, batches[:2], num_candidates=8)) and report.gain < 1
    other, _ = prepared(small(0.5))
    params = bt.SeqMseParams(num_batches=2, num_candidates=8, inp_symmetry="asym", loss_fn="l1")
    assert str(bt.apply_seq_mse(model, other, batches, params)) != str(report)
    with pytest.raises(ConfigError, match="inp_symmetry: it is 'both'. Remedy: use one of symqt, symfp, asym"):
        bt.SeqMseParams(num_batches=2, inp_symmetry="both")


def test_adascale_is_flexround_in_both_front_ends(tmp_path):
    module = small(0.5)
    sim, batches = prepared(module)
    report = bt.apply_adascale(sim, batches, lambda m, batch: m(batch), 60, tmp_path / "done")
    assert report.method == "flexround" and report.gain < 1 and list((tmp_path / "done").iterdir())
    other = bo.QuantizationSimModel(exported(module, X[:2]), X[:2].numpy(), preset="w4a8", threads=1)
    other.compute_encodings([x.numpy() for x in batches], progress=False)
    theirs = bo.apply_adascale(other, [x.numpy() for x in batches], None, 60, topology=None)
    assert theirs.method == "flexround" and theirs.gain < 1 and len(theirs) == len(report) == 4


def test_seq_mse_of_a_model_is_refused():
    """The older call without its parameters, and the newer one without a simulation."""
    model = small(0.5)
    sim, batches = prepared(model)
    for arguments in [(model, batches), (model, sim, batches), (sim, sim)]:
        with pytest.raises(ConfigError, match="sim: a .* was given, and no SeqMseParams. Remedy: give a sim"):
            bt.apply_seq_mse(*arguments)
