"""Weights that oscillate are dampened or frozen, and others are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.errors import ConfigError
from bitwright.torch import QuantizationSimModel, WeightFreezing, dampening_loss

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def make() -> QuantizationSimModel:
    torch.manual_seed(0)
    sim = QuantizationSimModel(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), X, default_param_bw=3)
    sim.compute_encodings([X])
    return sim


def test_dampening_is_the_squared_distance_from_the_codes_and_pulls_weights_there():
    sim = make()
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
    sim = make()
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
    sim = make()
    with pytest.raises(ConfigError, match=r"threshold=2.*not between 0 and 1"):
        WeightFreezing(sim, threshold=2)
    sim.model.requires_grad_(False)
    for function in (WeightFreezing, dampening_loss):
        with pytest.raises(ConfigError, match="no weight of the simulation is quantized on an integer grid and trains"):
            function(sim)
