"""Statistics of batch norms follow the quantized weights, are frozen on request, and end up in the scales of weights."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitwright.errors import CalibrationError, ConfigError, EncodingsError, ModelError
from bitwright.torch import (
    QuantizationSimModel,
    fold_all_batch_norms,
    fold_all_batch_norms_to_scale,
    freeze_batch_norms,
    reestimate_bn_stats,
)

X = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Batch norms after convolutions with and without ReLU and bias, after a linear layer, and one before a layer."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(3) if first else nn.Identity()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8)
        self.fc, self.bn3 = nn.Linear(8 * 16, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(self.first(x))))
        return self.bn3(self.fc(self.bn2(self.conv2(x)).flatten(1)))


def make(bits: int = 8, seed: int = 0, first: bool = False, **options: Any) -> QuantizationSimModel:
    torch.manual_seed(seed)
    model = Net(first).eval()
    for norm in (model.bn1, model.bn2, model.bn3):
        nn.init.normal_(norm.weight)  # of both signs
        nn.init.normal_(norm.bias)
        nn.init.normal_(norm.running_mean, std=0.2)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
    sim = QuantizationSimModel(model, X, default_param_bw=bits, default_output_bw=bits, **options)
    sim.compute_encodings([X])
    return sim


def output(sim: QuantizationSimModel) -> Tensor:
    with torch.no_grad():
        return sim.model.eval()(X)


# ------------------------------------------------------------------------------------------------ re-estimation


def test_statistics_are_those_of_all_the_batches_whatever_their_sizes():
    sim = make()
    inputs: dict[str, list[Tensor]] = {"conv1.output[0]": []}
    sim.model.train()
    with torch.no_grad():
        x = sim.capture(list(inputs), X)["conv1.output[0]"][0]
    sizes = (5, 7, 12)
    handle = reestimate_bn_stats(sim.model, list(X.split(sizes)))
    assert sim.model.training, "flags are as they were"
    # the first batch norm's input does not depend on the others, so all parts are those of the whole
    torch.testing.assert_close(sim.model.bn1.running_mean, x.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sim.model.bn1.running_var, x.var((0, 2, 3)), rtol=1e-5, atol=1e-6)
    assert sim._simulator.unseen == {}, "what the estimation computes is not a call of the model"
    handle.remove()


def test_the_handle_brings_the_statistics_back():
    sim = make()
    before, out = copy.deepcopy(sim.model.state_dict()), output(sim)
    with reestimate_bn_stats(sim.model, [X]):
        assert not torch.equal(output(sim), out)
    assert all(torch.equal(v, before[n]) for n, v in sim.model.state_dict().items())
    handle = reestimate_bn_stats(sim.model, [(X, 0)], forward_fn=lambda model, batch: model(batch[0]))
    assert not torch.equal(output(sim), out)
    handle.remove()
    handle.remove()
    assert torch.equal(output(sim), out)
    assert [m.training for m in sim.model.modules()] == [False] * len(list(sim.model.modules()))


def test_a_failed_estimation_changes_nothing():
    sim = make()
    before = copy.deepcopy(sim.model.state_dict())

    def batches() -> Any:
        yield X
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        reestimate_bn_stats(sim.model, batches())
    with pytest.raises(CalibrationError, match="no batch came"):
        reestimate_bn_stats(sim.model, [])
    with pytest.raises(ConfigError, match="use at least 1"):
        reestimate_bn_stats(sim.model, [X], num_batches=0)
    with pytest.raises(ModelError, match="no batch norm with running statistics.*fold_all_batch_norms_to_scale"):
        reestimate_bn_stats(nn.Linear(2, 2), [torch.ones(1, 2)])
    with pytest.raises(CalibrationError, match="bn1: its inputs have NaN"):
        reestimate_bn_stats(sim.model, [torch.full_like(X, torch.nan)])
    with torch.no_grad():
        sim.model.conv2.bias[1] = torch.nan
    with pytest.raises(CalibrationError, match="bn2: its inputs have NaN"):
        reestimate_bn_stats(sim.model, [X])
    before["conv2.bias"][1] = 0.0
    kept = {n: v.nan_to_num() for n, v in sim.model.state_dict().items()}
    assert all(torch.equal(v, before[n]) for n, v in kept.items())
    assert not sim.model.bn1.training


def test_no_more_batches_are_used_than_asked_for():
    sim = make()
    seen = []

    def batches() -> Any:
        for part in X.split(6):
            seen.append(len(part))
            yield part

    reestimate_bn_stats(sim.model, batches(), num_batches=2)
    assert len(seen) <= 3


# ------------------------------------------------------------------------------------------------ freezing


def test_batch_norms_freeze_after_some_steps_and_stay_so():
    sim = make()
    sim.model.train()
    handle = freeze_batch_norms(sim.model, after=2)
    means = []
    for _ in range(4):
        sim.model.train()  # as every epoch of a plain loop does
        sim.model(X).sum().backward()
        means.append(sim.model.bn1.running_mean.clone())
    assert not torch.equal(means[0], means[1]) and torch.equal(means[1], means[2]) and torch.equal(means[2], means[3])
    assert not sim.model.bn1.training and sim.model.conv1.training
    handle.remove()
    assert sim.model.bn1.training
    with pytest.raises(ConfigError, match="use 0 to freeze them at once"):
        freeze_batch_norms(sim.model, after=-1)
    with pytest.raises(ModelError, match="no batch norm with running statistics"):
        freeze_batch_norms(nn.Linear(2, 2))


# ------------------------------------------------------------------------------------------------ folding to scale


def codes(sim: QuantizationSimModel, layer: str) -> np.ndarray[Any, Any]:
    site = sim.quantizers[f"{layer}.weight"]
    weight = sim.model.get_parameter(f"{layer}.weight").detach()
    scale = site.encoding.scale.reshape(-1, *[1] * (weight.ndim - 1))
    return np.rint(site.quantizer(weight).detach().numpy() / scale)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_folding_keeps_the_integer_weights_and_the_function(bits, learned):
    sim = make(bits)
    sim.quantizers["*.bias"].enabled = False  # an int32 bias rounds what a batch norm adds in float
    if learned:
        sim.learn_ranges()
        own = sim.range_parameters()
        with torch.no_grad():
            for p in own:
                p.add_(0.05)
    before = output(sim)
    weights = {layer: codes(sim, layer) for layer in ("conv1", "conv2", "fc")}
    pairs = (("conv1", "bn1"), ("conv2", "bn2"), ("fc", "bn3"))
    signs = {layer: torch.sign(getattr(sim.model, bn).weight.detach()).numpy() for layer, bn in pairs}
    report = fold_all_batch_norms_to_scale(sim)
    assert sorted(report) == [("conv1", "bn1"), ("conv2", "bn2"), ("fc", "bn3")]
    assert all(isinstance(getattr(sim.model, bn), nn.Identity) for bn in ("bn1", "bn2", "bn3"))
    qmax = 2 ** (bits - 1) - 1
    for layer, was in weights.items():
        sign = signs[layer].reshape(-1, *[1] * (was.ndim - 1))
        np.testing.assert_array_equal(codes(sim, layer), np.minimum(was * sign, qmax))
    sim.quantizers["*.bias"].enabled = False
    after = output(sim)
    lsb = float(sim.quantizers["fc.output[0]"].encoding.scale)
    clipped = any((w * signs[n].reshape(-1, *[1] * (w.ndim - 1)) > qmax).any() for n, w in weights.items())
    if not clipped:
        assert float((after - before).abs().max()) <= 1.01 * lsb and float((after == before).float().mean()) > 0.95
    if learned:
        assert all(p is q for p, q in zip(own, sim.range_parameters(), strict=True))
    assert "bn3.output[0]" not in sim.quantizers and sim.quantizers["fc.output[0]"].encoding is not None


def test_the_folded_simulation_exports_and_verifies():
    sim = make()
    fold_all_batch_norms_to_scale(sim)
    assert sim.quantizers["conv1.bias"].quantizer.derived and sim.quantizers["conv1.bias"].encoding is not None
    assert sim.verify(X).ok


@pytest.mark.parametrize("through", ["checkpoint", "state"])
@pytest.mark.parametrize("learned", [False, True])
def test_a_folded_simulation_goes_on_in_a_fresh_one_that_is_folded_in_either_way(learned, through, tmp_path):
    sim = make()
    if learned:
        sim.learn_ranges()
        with torch.no_grad():
            for p in sim.range_parameters():
                p.add_(0.05)
    fold_all_batch_norms_to_scale(sim)

    def load(fresh):
        if through == "state":
            return fresh.load_state_dict(sim.state_dict())
        return fresh.load_checkpoint(sim.save_checkpoint(tmp_path / "saved"))

    with pytest.raises(EncodingsError, match="Remedy: fold the batch norms as before it was saved"):
        load(make(seed=1))
    calibrated = make(seed=1)
    fold_all_batch_norms_to_scale(calibrated)
    model = Net().eval()
    fold_all_batch_norms(model, dummy_input=X)
    for fresh in (calibrated, QuantizationSimModel(model, X)):
        load(fresh)
        assert torch.equal(output(fresh), output(sim))
    if not learned:
        with pytest.raises(EncodingsError, match="Remedy: fold the batch norms as before it was saved"):
            sim.load_checkpoint(make().save_checkpoint(tmp_path / "live"))


def test_what_scales_cannot_take_stays_with_a_reason():
    sim = make(first=True)
    report = fold_all_batch_norms_to_scale(sim)
    assert "before the layer" in dict((r.bn, r.reason) for r in report.refused)["first"]
    assert isinstance(sim.model.first, nn.BatchNorm2d) and isinstance(sim.model.bn1, nn.Identity)

    sim = make(preset="w8a8_per_tensor")
    before = output(sim)
    report = fold_all_batch_norms_to_scale(sim)
    assert not len(report) and all("no scale per output channel; use PerChannel()" in r.reason for r in report.refused)
    assert torch.equal(output(sim), before)

    sim = make()
    sim.quantizers["conv1.weight"].enabled = False
    reasons = {r.bn: r.reason for r in fold_all_batch_norms_to_scale(sim).refused}
    assert reasons == {"bn1": "the weight of conv1 is in float; fold before simulating"}

    torch.manual_seed(0)
    with pytest.raises(CalibrationError, match="the simulation is not calibrated"):
        fold_all_batch_norms_to_scale(QuantizationSimModel(Net().eval(), X))


def test_a_fold_that_fails_leaves_the_simulation_as_it_was(monkeypatch: pytest.MonkeyPatch):
    sim = make()
    before, state = output(sim), copy.deepcopy(sim.model.state_dict())
    sites = list(sim.quantizers)

    def broken(self: QuantizationSimModel) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(QuantizationSimModel, "_place", broken)
    with pytest.raises(KeyboardInterrupt):
        fold_all_batch_norms_to_scale(sim)
    assert list(sim.quantizers) == sites and torch.equal(output(sim), before)
    assert all(torch.equal(v, state[n]) for n, v in sim.model.state_dict().items())
