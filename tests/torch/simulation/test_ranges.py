"""Learned ranges of a whole simulation: which train, where they start, and that nothing of them is lost."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwright.errors import CalibrationError, ConfigError, EncodingsError
from bitwright.torch import QuantizationSimModel, TrainingGuard

X = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 10


class Net(nn.Module):
    """Convolutions, an in-place addition on a quantized value, a softmax of fixed range, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.act, self.fc = nn.Hardswish(), nn.Linear(8 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv1(x))
        z = self.act(self.conv2(y))
        z += y
        z = z * torch.sigmoid(z)
        return self.fc(z.flatten(1))


def make(bits: int = 4, **options: Any) -> QuantizationSimModel:
    torch.manual_seed(0)
    sim = QuantizationSimModel(Net(), X, default_param_bw=bits, default_output_bw=bits, **options)
    sim.compute_encodings([X])
    return sim


def train(sim: QuantizationSimModel, steps: int, optimizer: Any = None) -> Any:
    if optimizer is None:
        groups = [{"params": list(sim.model.parameters())}, {"params": sim.range_parameters(), "lr": 1e-2}]
        optimizer = torch.optim.Adam(groups, lr=1e-3)
    guard = TrainingGuard(optimizer)
    for _ in range(steps):
        guard.step(nn.functional.cross_entropy(sim.model(X), Y))
    return optimizer


def output(sim: QuantizationSimModel) -> Tensor:
    with torch.no_grad():
        return sim.model(X)


def test_learning_starts_from_the_calibrated_simulation():
    sim = make()
    before, encodings = output(sim), {n: s.encoding for n, s in sim.quantizers.items()}
    names = list(sim.model.state_dict())
    report = sim.learn_ranges()
    assert torch.equal(output(sim), before) and torch.equal(sim.model(X), before)
    assert {n: s.encoding for n, s in sim.quantizers.items()} == encodings
    assert list(sim.model.state_dict()) == names and len(list(sim.model.parameters())) == 6
    assert {"conv1.weight", "conv1.input[0]", "conv2.weight", "fc.weight", "fc.output[0]"} <= set(report.learned)
    assert report.fixed["conv1.bias"] == "its grid follows from those of the input and the weight"
    assert any("both ends of its range are given" in reason for reason in report.fixed.values())
    kinds = dict(sim.named_range_parameters())
    assert "conv1.input[0].offset" in kinds and "conv1.weight.offset" not in kinds
    relu = next(name for name in report.learned if "relu" in name)
    assert f"{relu}.log_scale" in kinds and f"{relu}.offset" not in kinds, "zero is an end of the range and stays so"


def test_every_range_gets_a_gradient_and_training_lowers_the_loss():
    sim = make()
    first = float(nn.functional.cross_entropy(sim.model(X), Y).detach())
    sim.learn_ranges()
    optimizer = train(sim, 40)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in sim.range_parameters())
    assert float(nn.functional.cross_entropy(output(sim), Y)) < 0.8 * first
    train(sim, 1, optimizer)
    with torch.no_grad():
        assert torch.equal(sim.model(X), sim.model(X.clone()))


def test_the_forward_equals_that_of_fixed_ranges_with_the_same_encodings():
    sim = make()
    sim.learn_ranges()
    train(sim, 5)
    fixed = make()
    fixed.model.load_state_dict(sim.model.state_dict())
    for name, site in sim.quantizers.items():
        if not site.quantizer.derived:
            fixed.quantizers[name].encoding = site.encoding
    assert torch.equal(output(fixed), output(sim)) and torch.equal(fixed.model(X), sim.model(X))


def test_ranges_alone_can_be_trained():
    sim = make()
    sim.learn_ranges()
    sim.model.requires_grad_(False)
    weights = copy.deepcopy(sim.model.state_dict())
    first = float(nn.functional.cross_entropy(output(sim), Y))
    train(sim, 40, torch.optim.Adam(sim.range_parameters(), lr=1e-2))
    assert all(torch.equal(v, weights[n]) for n, v in sim.model.state_dict().items())
    assert float(nn.functional.cross_entropy(output(sim), Y)) < first


def test_some_sites_only():
    sim = make()
    assert all(name.endswith(".weight") for name in sim.learn_ranges("*.weight").learned)
    assert len(sim.range_parameters()) == 3
    sim.learn_ranges(["fc.output[0]"], offsets=False)
    assert len(sim.range_parameters()) == 4
    kept = {id(p) for p in sim.range_parameters()}
    sim.learn_ranges("*.weight")
    assert {id(p) for p in sim.range_parameters()} == kept, "an optimizer has them"


def test_what_cannot_be_learned_is_refused():
    sim = make()
    with pytest.raises(ConfigError, match=r"no range of this simulation trains.*call sim.learn_ranges\(\)"):
        sim.range_parameters()
    with pytest.raises(ConfigError, match="there is no site 'conv1.wieght' .did you mean 'conv1.weight'"):
        sim.learn_ranges("conv1.wieght")
    with pytest.raises(ConfigError, match="there is no init 'kaiming'"):
        sim.learn_ranges(init="kaiming")
    with pytest.raises(ConfigError, match="no range can be learned: conv1.bias: its grid follows"):
        sim.learn_ranges("conv1.bias")
    torch.manual_seed(0)
    with pytest.raises(
        CalibrationError, match=r"learn_ranges: the simulation is not calibrated.*call sim.compute_encodings"
    ):
        QuantizationSimModel(Net(), X).learn_ranges()
    wide = make(preset="fp8")
    with pytest.raises(ConfigError, match="is not an integer grid of up to 16 bits"):
        wide.learn_ranges("conv1.weight")


@pytest.mark.parametrize("init", ["lsq", "lsq+"])
def test_weights_start_where_the_papers_start_them(init):
    sim = make()
    sim.learn_ranges(init=init)
    w = sim.model.conv1.weight.detach().double().flatten(1)
    scale = torch.from_numpy(sim.quantizers["conv1.weight"].encoding.scale.copy())
    qmax = sim.quantizers["conv1.weight"].encoding.format.qmax
    if init == "lsq":
        wanted = 2 * w.abs().mean(1) / math.sqrt(qmax)
    else:
        mean, std = w.mean(1), w.std(1, correction=0)
        wanted = torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs()) / qmax
    torch.testing.assert_close(scale, wanted.float())


def test_state_dict_and_checkpoint_carry_everything(tmp_path: Path):
    sim = make()
    sim.learn_ranges()
    optimizer = train(sim, 10)
    buffer = io.BytesIO()
    torch.save({"sim": sim.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    sim.save_checkpoint(tmp_path / "c")
    saved = output(sim)
    train(sim, 10, optimizer)

    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    resumed = make()
    resumed.load_state_dict(state["sim"])
    assert torch.equal(output(resumed), saved)
    groups = [{"params": list(resumed.model.parameters())}, {"params": resumed.range_parameters(), "lr": 1e-2}]
    again = torch.optim.Adam(groups, lr=1e-3)
    again.load_state_dict(state["optimizer"])
    train(resumed, 10, again)
    assert torch.equal(output(resumed), output(sim)), "ten steps, saved, ten steps: twenty steps"
    pairs = zip(resumed.named_range_parameters(), sim.named_range_parameters(), strict=True)
    assert all(n == m and torch.equal(p, q) for (n, p), (m, q) in pairs)

    from_folder = make()
    from_folder.learn_ranges()
    own = from_folder.range_parameters()
    from_folder.load_checkpoint(tmp_path / "c")
    assert torch.equal(output(from_folder), saved)
    assert all(p is q for p, q in zip(own, from_folder.range_parameters(), strict=True)), "an optimizer has them"


def test_a_state_that_does_not_fit_changes_nothing():
    sim = make()
    sim.learn_ranges()
    train(sim, 3)
    state = sim.state_dict()
    other = make()
    before = output(other)
    with pytest.raises(EncodingsError, match="not 'model' and 'simulation'.*sim.model.load_state_dict"):
        other.load_state_dict(sim.model.state_dict())
    damaged = copy.deepcopy(state)
    damaged["simulation"]["quantizers"]["fc.weight"]["learned"]["parameters"]["log_scale"][0] = math.nan
    with pytest.raises(EncodingsError, match="fc.weight: .*not one finite number per scale"):
        other.load_state_dict(damaged)
    damaged = copy.deepcopy(state)
    del damaged["model"]["fc.weight"]
    with pytest.raises(EncodingsError, match="the tensors do not fit the model"):
        other.load_state_dict(damaged)
    assert torch.equal(output(other), before) and not list(other.named_range_parameters())


def test_recalibration_keeps_the_parameters_of_the_optimizer():
    sim = make()
    calibrated = {n: s.encoding for n, s in sim.quantizers.items() if not s.quantizer.derived}
    sim.learn_ranges()
    own = sim.range_parameters()
    with torch.no_grad():
        for p in own:
            p.add_(0.1)
    sim.compute_encodings([X])
    assert all(p is q and not p.any() for p, q in zip(own, sim.range_parameters(), strict=True))
    assert {n: s.encoding for n, s in sim.quantizers.items() if not s.quantizer.derived} == calibrated


def test_a_copy_learns_on_its_own():
    sim = make()
    sim.learn_ranges()
    twin = copy.deepcopy(sim)
    before = output(sim)
    train(twin, 5)
    assert torch.equal(output(sim), before) and not torch.equal(output(twin), before)


def test_the_exported_file_has_the_learned_ranges(tmp_path: Path):
    sim = make(bits=8)
    sim.learn_ranges()
    train(sim, 10)
    sim.model.eval()
    sim.save_encodings(tmp_path / "e.json")
    sim.export(tmp_path, "net")
    assert sim.verify(X).ok
    other = make(bits=8)
    other.model.load_state_dict(sim.model.state_dict())
    other.load_encodings(tmp_path / "e.json")
    assert torch.equal(output(other), output(sim))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0])


def tagger() -> tuple[QuantizationSimModel, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 7, 5)
    sim = QuantizationSimModel(Tagger(), x)
    sim.compute_encodings([x])
    return sim, x


def test_grids_of_more_than_8_bits_are_learned_where_they_are_named():
    """A value at the end of 16 bits adds 32767 times its gradient: one step of SGD moved such a range off its tensor."""
    sim, _ = tagger()
    report = sim.learn_ranges()
    wide = {site.name for site in sim.quantizers.values() if site.encoding.format.bits == 16}
    assert wide and not wide.intersection(report.learned)
    assert all("more than 8 bits" in report.fixed[name] and "name it" in report.fixed[name] for name in wide)
    one = sorted(wide)[0]
    assert sim.learn_ranges(one).learned == (one,)
    assert one in sim.learn_ranges().learned  # it trains already


def test_ranges_inside_a_recurrent_layer_train():
    sim, x = tagger()
    before = output_of(sim, x)
    sim.learn_ranges(["*"])
    out = sim.model(x)
    assert torch.equal(out, before)
    out.square().sum().backward()
    grads = {n: p.grad for n, p in sim.named_range_parameters()}
    assert [n for n, g in grads.items() if g is None or not bool(g.isfinite().all())] == []


def output_of(sim: QuantizationSimModel, x: Tensor) -> Tensor:
    with torch.no_grad():
        return sim.model(x)
