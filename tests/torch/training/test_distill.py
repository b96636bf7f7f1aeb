"""A simulation learns from its float model alone, at the output and at chosen layers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.errors import ConfigError, ModelError
from bitwright.torch import Distillation, QuantizationSimModel, TrainingGuard, apply_gptq, distillation_loss

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
    sim = QuantizationSimModel(Net(), X, default_param_bw=bits, default_output_bw=bits)
    sim.compute_encodings([X])
    return sim


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
    sim = QuantizationSimModel(Two(), {"a": x, "b": x})
    sim.compute_encodings([{"a": x, "b": x}])
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
