"""Only what is asked for trains."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bitwright.errors import ConfigError
from bitwright.torch import QuantizationSimModel, parameter_groups

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def make() -> QuantizationSimModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)))
    sim = QuantizationSimModel(model, X)
    sim.compute_encodings([X])
    return sim


def changed(sim: QuantizationSimModel, groups: list[dict[str, object]]) -> set[str]:
    before = {n: p.detach().clone() for n, p in (*sim.model.named_parameters(), *sim.named_range_parameters())}
    optimizer = torch.optim.SGD(groups, lr=0.1)
    (sim.model(X) - 1).square().mean().backward()
    optimizer.step()
    after = copy.copy(dict((*sim.model.named_parameters(), *sim.named_range_parameters())))
    return {n for n, p in after.items() if not torch.equal(p, before[n])}


def test_ranges_alone():
    sim = make()
    sim.learn_ranges()
    (group,) = parameter_groups(sim, "ranges", range_lr=1e-2)
    assert group["name"] == "ranges" and group["lr"] == 1e-2 and len(group["params"]) == len(sim.range_parameters())
    assert not changed(sim, [group]) & set(dict(sim.model.named_parameters()))


def test_biases_and_norms_alone():
    sim = make()
    found = changed(sim, parameter_groups(sim, "biases_and_norms"))
    assert found == {"0.bias", "1.weight", "1.bias", "3.0.bias", "3.1.bias"}


def test_named_layers_with_their_ranges():
    sim = make()
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
    sim = make()
    with pytest.raises(ConfigError, match="no module is called '4'"):
        parameter_groups(sim, layers="4")
    with pytest.raises(ConfigError, match="there is no choice 'bias'"):
        parameter_groups(sim, "bias")
    with pytest.raises(ConfigError, match=r"nothing would train.*call sim.learn_ranges\(\) first"):
        parameter_groups(sim, "ranges")
