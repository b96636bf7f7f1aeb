"""Parts of training: distillation, low-rank corrections, oscillating weights, partial training, gradients near thresholds."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.errors import ConfigError, ModelError
from bitwright.torch import (
    Distillation,
    LowRankCorrection,
    QuantizationSimModel,
    TrainingGuard,
    WeightFreezing,
    apply_gptq,
    dampening_loss,
    distillation_loss,
    parameter_groups,
    pivot_gradients,
)
from tests.support.simulations import calibrated

X = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, width, 3), nn.Conv2d(width, width, 3)
        self.fc = nn.Linear(width * 16, 10)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = torch.relu(self.conv1(x))
        y = torch.relu_(self.conv2(y))
        return {"features": y, "logits": self.fc(y.flatten(1))}


def make(bits: int = 4) -> QuantizationSimModel:
    torch.manual_seed(0)
    return calibrated(QuantizationSimModel(Net(), X, default_param_bw=bits, default_output_bw=bits), [X])


def test_the_loss_is_the_divergence_of_the_two_distributions():
    student, teacher = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    assert float(distillation_loss(teacher, teacher, 3.0)) == pytest.approx(0.0, abs=1e-6)
    p, q = F.softmax(teacher / 3, -1), F.softmax(student / 3, -1)
    wanted = 9 * (p * (p.log() - q.log())).sum(-1)
    torch.testing.assert_close(distillation_loss(student, teacher, 3.0), wanted.mean())
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    torch.testing.assert_close(distillation_loss(student, teacher, 3.0, mask=mask), wanted[mask.bool()].mean())
    moved = distillation_loss(student.transpose(1, 2), teacher.transpose(1, 2), 3.0, dim=1)
    torch.testing.assert_close(moved, wanted.mean())
    assert distillation_loss(student.half(), teacher.half()).dtype == torch.float32
    with pytest.raises(ConfigError, match=r"shape \(2, 5, 7\) and the teacher's \(2, 5\)"):
        distillation_loss(student, teacher[..., 0])
    with pytest.raises(ConfigError, match="temperature=0"):
        distillation_loss(student, teacher, 0)


def test_training_towards_the_float_model_needs_no_labels():
    sim = make()
    sim.learn_ranges()
    with torch.no_grad(), sim.in_float():
        target = sim.model(X)["logits"]
    layers = ["conv1.output[0]", "conv2.output[0]"]
    distillation = Distillation(sim, temperature=2.0, layers=layers)
    parameters = [*sim.model.parameters(), *sim.range_parameters()]
    guard = TrainingGuard(torch.optim.Adam(parameters, lr=3e-3), sim=sim)
    losses = []
    for _ in range(60):
        loss, output = distillation(X)
        assert guard.step(loss)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0] and set(output) == {"features", "logits"}
    again, _ = distillation(X)
    with torch.no_grad():
        plain = distillation_loss(sim.model(X)["logits"], target, 2.0)
    assert float(again.detach()) > float(plain), (
        "the layers count beside the output, which is that of the untrained model"
    )
    assert all(p.grad is not None for p in parameters)


def test_the_values_compared_are_those_before_later_calls_write_over_them():
    sim = make()
    distillation = Distillation(sim, layers=["conv2.output[0]"])
    loss, _ = distillation(X)
    seen = sim.capture(["conv2.output[0]"], X)["conv2.output[0]"][0]
    assert bool((seen < 0).any()), "ReLU in place comes after"
    loss.backward()
    assert sim.model.conv2.weight.grad is not None


def test_a_teacher_of_rounded_weights_is_told_of(caplog):
    sim = make()
    with caplog.at_level(logging.WARNING):
        Distillation(sim)
        apply_gptq(sim, [X], progress=False)
        before = len(caplog.records)
        assert not [r for r in caplog.records if "Distillation" in r.getMessage()]
        Distillation(sim)
        Distillation(sim, Net().eval())
    (record,) = caplog.records[before:]
    assert "3 weights, conv1.weight among them, have frozen ranges" in record.getMessage()


def test_another_model_can_be_the_teacher():
    sim = make()
    torch.manual_seed(1)
    teacher = Net(width=16)
    teacher.fc.requires_grad_(True)
    loss, _ = Distillation(sim, teacher)(X)
    loss.backward()
    assert all(p.grad is None and p.requires_grad for p in teacher.parameters()), "it is copied"
    with torch.no_grad():
        wanted = distillation_loss(sim.model(X)["logits"], teacher(X)["logits"])
    torch.testing.assert_close(loss.detach(), wanted)


def test_batches_are_given_as_the_model_takes_them():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, a: Tensor, b: Tensor | None = None) -> Any:
            return SimpleNamespace(), (self.fc(a if b is None else a + b),)

    x = torch.randn(3, 4)
    sim = calibrated(QuantizationSimModel(Two(), {"a": x, "b": x}), [{"a": x, "b": x}])
    distillation = Distillation(sim, output=lambda output: output[1][0])
    for batch in ({"a": x, "b": x}, (x, x)):
        assert bool(distillation(batch)[0].isfinite())


def test_wrong_layers_and_outputs_are_named():
    sim = make()
    with pytest.raises(ConfigError, match=r"the sim has no output 'conv3.output\[0\]' .did you mean"):
        Distillation(sim, layers=["conv3.output[0]"])
    with pytest.raises(ConfigError, match="the teacher has no output"):
        Distillation(sim, nn.Sequential(nn.Flatten(), nn.Linear(192, 10)), layers=["conv1.output[0]"])
    with pytest.raises(ModelError, match="returned no floating-point tensor but Tensor.*pass output="):
        Distillation(sim, output=None)._output(torch.ones(2, dtype=torch.int64))


ROWS = torch.randn(64, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def low_rank_sim(bits: int = 4) -> tuple[QuantizationSimModel, torch.Tensor]:
    """A simulation, and what its float model computes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)).eval()
    sim = calibrated(QuantizationSimModel(model, ROWS, default_param_bw=bits, default_output_bw=8), [ROWS])
    return sim, model(ROWS).detach()


def error(sim: QuantizationSimModel, wanted: torch.Tensor) -> float:
    with torch.no_grad():
        return float((sim.model(ROWS) - wanted).square().mean())


def train(correction: LowRankCorrection, sim: QuantizationSimModel, wanted: torch.Tensor) -> None:
    optimizer = torch.optim.Adam(correction.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        (sim.model(ROWS) - wanted).square().mean().backward()
        optimizer.step()


def test_the_correction_alone_trains_and_starts_from_nothing() -> None:
    sim, wanted = low_rank_sim()
    before = {name: p.clone() for name, p in sim.model.named_parameters()}
    plain, start = sim.model(ROWS).detach(), error(sim, wanted)
    correction = LowRankCorrection(sim, rank=4)
    assert correction.layers == ("0.weight", "3.weight")
    assert torch.equal(sim.model(ROWS), plain)
    assert sim.model.state_dict().keys() == before.keys()
    train(correction, sim, wanted)
    assert error(sim, wanted) < 0.5 * start
    assert all(torch.equal(p, before[name]) for name, p in sim.model.named_parameters() if name.endswith("weight"))


def test_the_grid_takes_the_correction() -> None:
    """At 8 bits most of it; the weights are on the grid afterwards, whose encoding stays."""
    sim, _ = low_rank_sim(bits=8)
    wanted = low_rank_sim()[1] * 1.5
    start = error(sim, wanted)
    encodings = {name: site.encoding for name, site in sim.quantizers.items() if site.role == "weight"}
    correction = LowRankCorrection(sim, rank=4)
    train(correction, sim, wanted)
    lost = correction.merge()
    assert all(part < 0.5 for part in lost.values()) and not correction.layers
    assert error(sim, wanted) < 0.5 * start
    for name, encoding in encodings.items():
        site = sim.quantizers[name]
        assert site.encoding is encoding
        weight = sim.model.get_parameter(name)
        assert torch.equal(site.quantizer(weight.detach()), weight) and weight.requires_grad
    assert sim.verify(ROWS[:4]).ok


def test_some_layers_and_a_way_back() -> None:
    sim, _ = low_rank_sim()
    plain = sim.model(ROWS).detach()
    correction = LowRankCorrection(sim, rank=100, layers="3", alpha=2.0)
    assert correction.layers == ("3.weight",)
    assert [tuple(p.shape) for p in correction.parameters()] == [(5, 128), (5, 5)]
    with torch.no_grad():
        for p in correction.parameters():
            p.add_(0.1)
    assert not torch.equal(sim.model(ROWS), plain)
    kept = correction.state_dict()
    correction.remove()
    assert torch.equal(sim.model(ROWS), plain)
    LowRankCorrection(sim, rank=100, layers="3", alpha=2.0).load_state_dict(kept)
    assert not torch.equal(sim.model(ROWS), plain)


def test_files_wait_for_the_merge(tmp_path: Path) -> None:
    sim, _ = low_rank_sim()
    correction = LowRankCorrection(sim)
    message = "0.weight: (export|save_checkpoint): it has a low-rank correction beside its integer weights.*merge"
    for write in (lambda: sim.export(tmp_path, "m"), lambda: sim.save_checkpoint(tmp_path / "c"), sim.state_dict):
        with pytest.raises(ModelError, match=message):
            write()
    correction.merge()
    sim.save_checkpoint(tmp_path / "c")


def test_what_cannot_be_corrected_is_refused() -> None:
    sim, _ = low_rank_sim()
    with pytest.raises(ConfigError, match="rank=0"):
        LowRankCorrection(sim, rank=0)
    with pytest.raises(ConfigError, match="no module is called 'conv'"):
        LowRankCorrection(sim, layers="conv")
    with pytest.raises(ConfigError, match="no weight of layers='1' is quantized"):
        LowRankCorrection(sim, layers="1")
    first = LowRankCorrection(sim, layers="0")
    with pytest.raises(ConfigError, match="no weight of layers='0' is quantized on an integer grid and trains"):
        LowRankCorrection(sim, layers="0")
    first.remove()
    LowRankCorrection(sim, layers="0")


SMALL = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def oscillating_sim(bits: int = 3) -> QuantizationSimModel:
    torch.manual_seed(0)
    sim = QuantizationSimModel(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), SMALL, default_param_bw=bits)
    sim.compute_encodings([SMALL])
    return sim


def test_dampening_is_the_squared_distance_from_the_codes_and_pulls_weights_there():
    sim = oscillating_sim(4)  # whose grid holds every weight, which those of 2 and 3 bits do not
    with torch.no_grad():
        sim.model[0].weight[0, 0] = 100.0  # far outside of its range: it is clipped, not dampened
    wanted = 0.0
    for name in ("0", "2"):
        weight = sim.model.get_parameter(f"{name}.weight").detach()
        apart = sim.quantizers[f"{name}.weight"].quantizer(weight) - weight
        wanted += float(apart[apart.abs() < 10].square().sum())
    loss = dampening_loss(sim)
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-5) and wanted > 0
    loss.backward()
    assert sim.model[0].weight.grad[0, 0] == 0
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=0.2)
    for _ in range(30):
        optimizer.zero_grad()
        dampening_loss(sim).backward()
        optimizer.step()
    assert float(dampening_loss(sim).detach()) < 1e-6 * wanted


@pytest.mark.parametrize("learned", [False, True])
def test_a_weight_that_turns_back_and_forth_is_frozen_where_it_is_mostly(learned):
    sim = oscillating_sim()
    if learned:
        sim.learn_ranges()
    weight, site = sim.model[0].weight, sim.quantizers["0.weight"]
    freezing = WeightFreezing(sim, threshold=0.6, momentum=0.3)
    step = float(site.encoding.scale.reshape(-1)[2])
    for i in range(12):  # two thirds of the time at code 1, the rest at 0; another weight moves one way
        with torch.no_grad():
            weight[2, 3] = step * (1.0 if i % 3 else 0.0)
            weight[2, 4] = step * (0.0 if i < 6 else 1.0)
        freezing.step()
    assert freezing.frozen == pytest.approx(1 / 40)
    if learned:
        with torch.no_grad():
            site.quantizer.learned.log_scale.add_(0.1)
    with torch.no_grad():
        weight[2, 3], weight[2, 4] = 0.0, 0.0
    freezing.step()
    assert (
        float(weight[2, 3]) == pytest.approx(float(site.encoding.scale.reshape(-1)[2])) and float(weight[2, 4]) == 0.0
    )


def test_nothing_to_follow_is_an_error():
    sim = oscillating_sim()
    with pytest.raises(ConfigError, match=r"threshold=2.*not between 0 and 1"):
        WeightFreezing(sim, threshold=2)
    sim.model.requires_grad_(False)
    for function in (WeightFreezing, dampening_loss):
        with pytest.raises(ConfigError, match="no weight of the simulation is quantized on an integer grid and trains"):
            function(sim)


SAMPLE = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def partial_sim() -> QuantizationSimModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)))
    return calibrated(QuantizationSimModel(model, SAMPLE), [SAMPLE])


def changed(sim: QuantizationSimModel, groups: list[dict[str, object]]) -> set[str]:
    before = {n: p.detach().clone() for n, p in (*sim.model.named_parameters(), *sim.named_range_parameters())}
    optimizer = torch.optim.SGD(groups, lr=0.1)
    (sim.model(SAMPLE) - 1).square().mean().backward()
    optimizer.step()
    after = copy.copy(dict((*sim.model.named_parameters(), *sim.named_range_parameters())))
    return {n for n, p in after.items() if not torch.equal(p, before[n])}


def test_ranges_alone():
    sim = partial_sim()
    sim.learn_ranges()
    (group,) = parameter_groups(sim, "ranges", range_lr=1e-2)
    assert group["name"] == "ranges" and group["lr"] == 1e-2 and len(group["params"]) == len(sim.range_parameters())
    assert not changed(sim, [group]) & set(dict(sim.model.named_parameters()))


def test_biases_and_norms_alone():
    sim = partial_sim()
    found = changed(sim, parameter_groups(sim, "biases_and_norms"))
    assert found == {"0.bias", "1.weight", "1.bias", "3.0.bias", "3.1.bias"}


def test_named_layers_with_their_ranges():
    sim = partial_sim()
    sim.learn_ranges()
    groups = parameter_groups(sim, layers=["3*"], lr=1e-3, range_lr=1e-2)
    assert [g["name"] for g in groups] == ["parameters", "ranges"]
    found = changed(sim, groups)
    assert {n for n in found if n in dict(sim.model.named_parameters())} == {
        "3.0.weight",
        "3.0.bias",
        "3.1.weight",
        "3.1.bias",
    }
    assert found and all(n.startswith("3.") for n in found)
    everything = changed(sim, parameter_groups(sim))
    assert {"0.weight", "3.1.weight"} <= everything, "what did not train before can train again"


def test_what_names_nothing_is_an_error():
    sim = partial_sim()
    with pytest.raises(ConfigError, match="no module is called '4'"):
        parameter_groups(sim, layers="4")
    with pytest.raises(ConfigError, match="there is no choice 'bias'"):
        parameter_groups(sim, "bias")
    with pytest.raises(ConfigError, match=r"nothing would train.*call sim.learn_ranges\(\) first"):
        parameter_groups(sim, "ranges")


def sim_of(model: nn.Module, x: torch.Tensor, bits: int = 4) -> QuantizationSimModel:
    return calibrated(QuantizationSimModel(model, x, default_param_bw=bits, default_output_bw=8), [x])


def gradients(sim: QuantizationSimModel, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sim.model.zero_grad()
    out = sim.model(x)
    out.sum().backward()
    (weight,) = (p for name, p in sim.model.named_parameters() if name.endswith("0.weight"))
    assert weight.grad is not None
    return out.detach(), weight.grad.clone()


def test_only_gradients_close_to_a_threshold_are_multiplied() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    sim = sim_of(nn.Sequential(nn.Linear(32, 32)), x)
    sim.quantizers["0.output[0]"].enabled = False  # its own gradient would be spiked as well
    out, plain = gradients(sim, x)
    pivot_gradients(sim, eps=0.2, multiplier=5.0)
    same, spiked = gradients(sim, x)
    assert torch.equal(out, same)
    weight = sim.model[0].weight.detach()
    scale = torch.tensor(sim.quantizers["0.weight"].encoding.scale).reshape(-1, 1)
    steps = weight / scale
    near = (steps - steps.round()).abs() > 0.4
    assert 0.1 < near.float().mean() < 0.3
    assert torch.equal(spiked, torch.where(near, 5 * plain, plain))
    pivot_gradients(sim, multiplier=1.0)
    assert torch.equal(gradients(sim, x)[1], plain)


def test_learned_ranges_and_recurrent_layers_train_with_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 7, batch_first=True), nn.Linear(7, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0])

    sim = sim_of(Net(), x)
    sim.learn_ranges()
    found = []
    for multiplier in (1.0, 4.0):
        pivot_gradients(sim, 0.5, multiplier)
        sim.model.zero_grad()
        out = sim.model(x)
        out.square().sum().backward()
        found.append((out.detach(), sim.model.lstm.weight_ih_l0.grad.clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][1], found[1][1]) and torch.isfinite(found[1][1]).all()


@pytest.mark.parametrize(
    ("eps", "multiplier", "named"), [(0.0, 3.0, "eps"), (1.5, 3.0, "eps"), (0.1, -1.0, "multiplier")]
)
def test_numbers_without_meaning(eps: float, multiplier: float, named: str) -> None:
    x = torch.randn(2, 4)
    sim = sim_of(nn.Sequential(nn.Linear(4, 4)), x)
    with pytest.raises(ConfigError, match=f"{named}: it is .*usual"):
        pivot_gradients(sim, eps, multiplier)
