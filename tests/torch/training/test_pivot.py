"""Gradients are larger close to thresholds, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.errors import ConfigError
from bitwright.torch import QuantizationSimModel, pivot_gradients


def sim_of(model: nn.Module, x: torch.Tensor, bits: int = 4) -> QuantizationSimModel:
    sim = QuantizationSimModel(model, x, default_param_bw=bits, default_output_bw=8)
    sim.compute_encodings([x])
    return sim


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
