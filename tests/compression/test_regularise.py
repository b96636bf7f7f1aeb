"""The group lasso, against its definition, and what training with it leaves to prune."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.compression.regularise import prunable_groups, regularisation
from bitwright.errors import ConfigError


def net(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))


def test_the_sum_of_norms_of_units():
    model = net()
    loss = regularisation(model, prunable_groups(model, X))
    rows = torch.cat([model[0].weight, model[2].weight.T], 1)
    torch.testing.assert_close(loss, (7 * rows.square().sum(1)).sqrt().mean())
    loss.backward()
    assert float(model[0].weight.grad.abs().sum()) > 0 and model[0].bias.grad is None


def test_training_with_it_leaves_units_that_are_nearly_zero():
    """The targets need two hidden units; without the loss all six are used."""
    target = torch.stack([X[:, 0].relu(), X[:, 1].relu(), X[:, 0].relu() + X[:, 1].relu()], 1)
    smallest = []
    for factor in (0.0, 0.05):
        model = net()
        groups = prunable_groups(model, X)
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(300):
            optimizer.zero_grad()
            (nn.functional.mse_loss(model(X), target) + factor * regularisation(model, groups)).backward()
            optimizer.step()
        smallest.append(float(torch.cat([model[0].weight, model[2].weight.T], 1).norm(dim=1).sort().values[1]))
    assert smallest[1] < 0.1 * smallest[0]


def test_groups_of_another_model():
    groups = prunable_groups(net(), X)
    with pytest.raises(
        ConfigError, match=r"0.weight: the groups are of another model: this one has the shape \(4, 4\)"
    ):
        regularisation(net(4), groups)
    with pytest.raises(ConfigError, match="this one has no such parameter"):
        regularisation(nn.ReLU(), groups)
    with pytest.raises(ConfigError, match="there are none"):
        regularisation(net(), ())
