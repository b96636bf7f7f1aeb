"""AIMET's names of post-training methods, called with AIMET's arguments, do what they do there."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import bitwright.onnx as bo
import bitwright.torch as bt
from bitwright.aimet_onnx import apply_seq_mse as onnx_seq_mse
from bitwright.aimet_onnx import batch_norm_fold as onnx_fold
from bitwright.aimet_onnx import cross_layer_equalization as onnx_cle
from bitwright.aimet_onnx.adascale import apply_adascale as onnx_adascale
from bitwright.aimet_torch import batch_norm_fold, cross_layer_equalization
from bitwright.aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters
from bitwright.aimet_torch.adascale import apply_adascale
from bitwright.aimet_torch.bias_correction import QuantParams, correct_bias
from bitwright.aimet_torch.seq_mse import SeqMseParams, apply_seq_mse
from bitwright.core.numerics.formats import IntFormat
from bitwright.errors import ConfigError, ModelError
from tests.aimet.onnx_nets import feeds, folded
from tests.conformance.test_ptq import exported, run
from tests.methods.transformer import Decoder, tokens
from tests.support.simulations import calibrated

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
    whole, parts, ours = small(), small(), small()
    cross_layer_equalization.equalize_model(whole, (1, 3, 10, 10))
    folded_pairs = batch_norm_fold.fold_all_batch_norms(parts, (1, 3, 10, 10))
    report = cross_layer_equalization.equalize_bn_folded_model(parts, (1, 3, 10, 10), folded_pairs)
    assert len(report.groups) == 3 and report.statistics.keys() == {"0", "3", "6"}
    folds = bt.fold_all_batch_norms(ours, (1, 3, 10, 10))
    bt.equalize_model(ours, (1, 3, 10, 10), folds=folds, absorb_bias=True)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], value)
        torch.testing.assert_close(ours.state_dict()[name], value)


def test_given_batch_norms_are_folded_and_the_others_stay():
    model, before = small(), small()(X)
    batch_norm_fold.fold_given_batch_norms(model, [(model[0], model[1]), (model[7], model[6])], dummy_input=X[:2])
    assert isinstance(model[1], nn.Identity) and isinstance(model[4], nn.BatchNorm2d)
    torch.testing.assert_close(model(X), before, rtol=1e-3, atol=1e-3)
    for pair, message in (
        ((model[3], nn.BatchNorm2d(8)), "a BatchNorm2d is not a module of the model"),
        ((model[0], model[3]), "0, 3 is not a layer and its batch norm. Remedy: give pairs of a Conv"),
    ):
        with pytest.raises(ModelError, match=message):
            batch_norm_fold.fold_given_batch_norms(model, [pair], (1, 3, 10, 10))


def test_scaling_gives_equal_ranges_then_high_biases_move_on():
    model, before = small(), small()(X)
    folded_pairs = batch_norm_fold.fold_all_batch_norms(model, dummy_input=X[:2])
    assert channel_spread(model[0].weight) > 10
    cls_set_info_list = cross_layer_equalization.CrossLayerScaling.scale_model(model, None, X[:2])
    first, second = (model[i].weight.detach().abs().amax((1, 2, 3)) for i in (0, 3))
    torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-6)  # as in the paper
    torch.testing.assert_close(model(X), before, rtol=1e-3, atol=1e-3)
    bias = model[0].bias.detach().clone()
    report = cross_layer_equalization.HighBiasFold.bias_fold(cls_set_info_list, folded_pairs)
    assert "0" in report.absorbed and (model[0].bias < bias).any() and not (model[0].bias > bias).any()
    assert (model(X) - before).abs().mean() < 0.02 * before.abs().mean()
    report.undo()
    torch.testing.assert_close(model(X), before, rtol=1e-3, atol=1e-3)


def test_the_same_in_onnx():
    model, other = exported(small(), X[:2]), small()
    folded, pairs = (
        onnx_fold.fold_all_batch_norms_to_weight(model),
        batch_norm_fold.fold_all_batch_norms(other, dummy_input=X[:2]),
    )
    sets = onnx_cle.CrossLayerScaling(model).scale_model()
    torch.testing.assert_close(run(model, X), small()(X), rtol=1e-3, atol=1e-3)
    report = onnx_cle.HighBiasFold(model).bias_fold(sets, folded)
    scaled = cross_layer_equalization.CrossLayerScaling.scale_model(other, dummy_input=X[:2])
    ours = cross_layer_equalization.HighBiasFold.bias_fold(scaled, pairs)
    assert len(report.absorbed) == len(ours.absorbed) > 0
    torch.testing.assert_close(run(model, X), other(X), rtol=1e-3, atol=1e-3)


def test_batch_norms_are_given_as_modules_that_were_folded():
    model = small()
    norms = {model[0]: copy.deepcopy(model[1]), model[3]: copy.deepcopy(model[4])}
    pairs = batch_norm_fold.fold_all_batch_norms(model, dummy_input=X[:2])
    sets = cross_layer_equalization.CrossLayerScaling.scale_model(model, dummy_input=X[:2])
    fold = cross_layer_equalization.HighBiasFold.bias_fold
    with pytest.raises(ModelError, match="bn_layers: 0 has an Identity, .* as it was before it was folded"):
        fold(sets, {model[0]: model[1]})
    with pytest.raises(ModelError, match="bn_layers: a Conv2d in it is not a module of the model"):
        fold(sets, {nn.Conv2d(1, 1, 1): norms[model[0]]})
    found = fold(sets, norms)
    np.testing.assert_allclose(
        found.statistics["3"][1] * sets.report.factors[1], pairs.report.moments["3"][1], rtol=1e-6
    )


def test_sets_of_layers_are_scaled_without_their_model():
    model, scaling = small(), cross_layer_equalization.CrossLayerScaling
    batch_norm_fold.fold_all_batch_norms(model, dummy_input=X[:2])
    whole, before = copy.deepcopy(model), model(X)
    expected = scaling.scale_model(whole, dummy_input=X[:2]).report.factors
    s12, s23 = scaling.scale_cls_sets([(model[0], model[3], model[6])])[0]
    np.testing.assert_allclose(model[3].weight.detach().abs().amax((1, 2, 3)),
                               model[6].weight.detach().abs().amax((0, 2, 3)), rtol=1e-2)  # fmt: skip
    assert s12.shape == s23.shape == (8,) and s12.shape == expected[0].shape
    torch.testing.assert_close(model(X), before, rtol=1e-3, atol=1e-3)
    linear = [nn.Linear(3, 4), nn.Linear(4, 5)]
    (s,) = scaling.scale_cls_sets([linear])
    np.testing.assert_allclose(
        linear[0].weight.detach().abs().amax(1), linear[1].weight.detach().abs().amax(0), rtol=1e-5
    )
    assert isinstance(s, np.ndarray) and all(layer.training for layer in linear)
    with pytest.raises(ModelError, match="scale_cls_sets: the layers do not fit together"):
        scaling.scale_cls_sets([(nn.Conv2d(3, 4, 1), nn.Conv2d(5, 4, 1))])
    with pytest.raises(ModelError, match="scale_cls_sets: a set of one layer"):
        scaling.scale_cls_sets([(nn.Conv2d(3, 4, 1),)])


def test_chains_of_layers_are_found_and_cut_into_sets():
    model = small()
    batch_norm_fold.fold_all_batch_norms(model, dummy_input=X[:2])
    layers = [model[0], model[3], model[6]]
    chain = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.PReLU(), nn.Conv2d(4, 2, 1), nn.Sigmoid())
    for net, wanted, relus in (
        (model, [tuple(layers)], [(True, True)]),
        (chain, [(chain[0], chain[1]), (chain[1], chain[3])], [False, True]),
    ):
        utilities = cross_layer_equalization.GraphSearchUtils(net, (1, 3, 10, 10))
        (group,) = utilities.find_layer_groups_to_scale()
        assert utilities.convert_layer_group_to_cls_sets(group[:3]) == wanted
        assert utilities.is_relu_activation_present_in_cls_sets(wanted) == relus
        before = net(X)
        cross_layer_equalization.CrossLayerScaling.scale_cls_sets(wanted)
        torch.testing.assert_close(net(X), before, rtol=1e-3, atol=1e-3)


def test_named_sets_of_an_onnx_model_are_equalized_and_no_others():
    model = folded()
    scaling = onnx_cle.CrossLayerScaling(model)
    untouched = model.SerializeToString()
    with pytest.raises(ModelError, match=r"conv1 -> fc cannot be equalized.*follow one another"):
        scaling.scale_cls_sets([("conv1", "conv2"), ("conv1", "fc")], progress=False)
    with pytest.raises(ModelError, match="a set of one layer cannot be equalized"):
        scaling.scale_cls_sets([("conv1",)], progress=False)
    assert model.SerializeToString() == untouched

    before = onnxruntime.InferenceSession(untouched).run(None, feeds()[0])[0]
    (factor,) = scaling.scale_cls_sets([("conv1", "conv2")], progress=False)
    held = {init.name: numpy_helper.to_array(init) for init in model.graph.initializer}
    first = np.abs(held["conv1.weight"]).reshape(8, -1).max(1)
    second = np.abs(held["conv2.weight"]).transpose(1, 0, 2, 3).reshape(8, -1).max(1)
    np.testing.assert_allclose(first, second, rtol=1e-4)
    assert isinstance(factor, np.ndarray) and factor.shape == (8,)
    after = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
    np.testing.assert_allclose(after, before, atol=1e-5)


def quantized(model: nn.Module) -> torch.Tensor:
    sim = calibrated(bt.QuantizationSimModel(model, X[:2], default_param_bw=4), X.split(32))
    return sim.model(X).detach()


def test_correct_bias_on_a_float_model():
    model = small(0.5)
    batch_norm_fold.fold_all_batch_norms(model, dummy_input=X[:2])
    plain, reference = quantized(model), model(X).detach()
    labelled = [(batch, torch.zeros(len(batch))) for batch in X.split(32)]
    params = QuantParams(weight_bw=4, act_bw=8, quant_scheme="min_max")
    report = correct_bias(model, params, 64, labelled, None)
    assert len(report.corrected) == 4 and report.samples == 96  # the linear layer got a bias
    error = [float((y - reference).mean(0).abs().max()) for y in (plain, quantized(model))]
    assert error[1] < 0.3 * error[0]


def test_correct_bias_by_formula_takes_what_folding_knows():
    model = small(0.5)
    norms = {model[i]: copy.deepcopy(model[i + 1]) for i in (0, 3, 6)}
    batch_norm_fold.fold_all_batch_norms(model, dummy_input=X[:2])
    assert len(correct_bias(model, QuantParams(4, 8), 64, [X], 64, norms, False).analytic) == 3
    with pytest.raises(ConfigError, match="round_mode: it is 'stochastic'. Remedy: use 'nearest'"):
        QuantParams(round_mode="stochastic")


def test_a_bias_correction_that_fails_leaves_the_model():
    model = small(0.5)
    batch_norm_fold.fold_all_batch_norms(model, dummy_input=X[:2])
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match="there is no layer 'conv9'"):
        correct_bias(model, QuantParams(4), 8, [X], 8, layers_to_ignore=["conv9"])
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.fixture(scope="module")
def decoder() -> onnx.ModelProto:
    return exported(Decoder(), tokens(8))


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
    sim = calibrated(bt.QuantizationSimModel(module, X[:2], preset="w4a8"), X.split(32))
    return sim, list(X.split(32))


def test_the_older_call_of_seq_mse(tmp_path):
    model = small(0.5)
    sim, batches = prepared(model)
    other, _ = prepared(small(0.5))
    params = SeqMseParams(num_batches=2, num_candidates=8)
    report = apply_seq_mse(model, sim, batches, params)
    assert str(report) == str(apply_seq_mse(other, batches[:2], num_candidates=8)) and report.gain < 1
    other, _ = prepared(small(0.5))
    params = SeqMseParams(num_batches=2, num_candidates=8, inp_symmetry="asym", loss_fn="l1")
    assert str(apply_seq_mse(model, other, batches, params)) != str(report)
    with pytest.raises(ConfigError, match="inp_symmetry: it is 'both'. Remedy: use one of symqt, symfp, asym"):
        SeqMseParams(num_batches=2, inp_symmetry="both")


def test_seq_mse_leaves_modules_out_and_keeps_finished_layers(tmp_path):
    sim, batches = prepared(small(0.5))
    report = apply_seq_mse(
        sim, [(x, torch.zeros(len(x))) for x in batches], num_candidates=4, forward_fn=lambda m, batch: m(batch[0]),
        modules_to_exclude=[sim.model[3], sim.model[2]], cache_dir=tmp_path,
    )  # fmt: skip
    assert [row.layer for row in report] == ["0", "6", "11"]
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(ConfigError, match="modules_to_exclude: this ReLU is not a module of the model"):
        apply_seq_mse(sim, batches, modules_to_exclude=[nn.ReLU()])


def test_seq_mse_of_an_onnx_simulation_leaves_nodes_out():
    sim = bo.QuantizationSimModel(exported(small(0.5), X[:2]), X[:2].numpy(), preset="w4a8", threads=1)
    sim.compute_encodings([X.numpy()], progress=False)
    names = [op.name for op in sim.graph.ops if op.type in ("Conv", "Gemm", "MatMul")]
    report = onnx_seq_mse(sim, [X.numpy()], num_candidates=4, nodes_to_exclude=names[:2])
    assert [row.layer for row in report] == names[2:]


def test_adascale_is_flexround_in_both_front_ends(tmp_path):
    module = small(0.5)
    sim, batches = prepared(module)
    report = apply_adascale(sim, batches, lambda m, batch: m(batch), 60, tmp_path / "done")
    assert report.method == "flexround" and report.gain < 1 and list((tmp_path / "done").iterdir())
    other = bo.QuantizationSimModel(exported(module, X[:2]), X[:2].numpy(), preset="w4a8", threads=1)
    other.compute_encodings([x.numpy() for x in batches], progress=False)
    theirs = onnx_adascale(other, [x.numpy() for x in batches], None, 60, topology=None)
    assert theirs.method == "flexround" and theirs.gain < 1 and len(theirs) == len(report) == 4


def test_adaround_writes_encodings_that_the_rounded_model_is_simulated_with(tmp_path):
    model = small(0.5)
    batch_norm_fold.fold_all_batch_norms(model, dummy_input=X[:2])
    params = AdaroundParameters(X.split(32), 2, default_num_iterations=20)
    rounded = Adaround.apply_adaround(
        model, X[:2], params, tmp_path, "net", 4,
        param_bw_override_list=[(model[0], 8)], ignore_quant_ops_list=[model[11], model[2]],
    )  # fmt: skip
    assert type(rounded) is nn.Sequential and not torch.equal(rounded[6].weight, model[6].weight)
    assert torch.equal(rounded[11].weight, model[11].weight)
    sim = bt.QuantizationSimModel(rounded, X[:2], default_param_bw=4)
    sim.quantizers["0.weight"].spec = replace(sim.quantizers["0.weight"].spec, format=IntFormat(8))
    sim.set_and_freeze_param_encodings(tmp_path / "net.encodings")
    sim.compute_encodings(X.split(32))
    for name in ("0", "3", "6"):
        site = sim.quantizers[f"{name}.weight"]
        w = rounded.get_submodule(name).weight.detach()
        assert site.frozen and torch.equal(site.quantizer(w), w)
    assert sim.quantizers["0.weight"].encoding.format.bits == 8
    with pytest.raises(ConfigError, match="ignore_quant_ops_list: this Linear is not a module of the model"):
        Adaround.apply_adaround(model, X[:2], params, tmp_path, "net", ignore_quant_ops_list=[nn.Linear(2, 2)])


@pytest.mark.parametrize("prefix", ["../../up", "/up", "", "a/b"])
def test_adaround_refuses_a_prefix_that_leads_out_of_the_folder(tmp_path, prefix):
    with pytest.raises(ConfigError, match="filename_prefix"):
        Adaround.apply_adaround(small(), X[:2], AdaroundParameters(iter(()), 1), tmp_path / "a" / "b", prefix)
    assert not list(tmp_path.iterdir())
