"""Distillation of compressed models: sites pair through the plan, and losses are zero where nothing changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bitwright
from bitwright.compression.distill import CompressedDistillation
from bitwright.errors import ConfigError
from bitwright.torch import drop_blocks, svd_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = (
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.Conv2d(16, 8, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(self.norm(self.one(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ModuleList(Block() for _ in range(3)),
            nn.Linear(8, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


DATA = [torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def test_nothing_is_lost_where_nothing_changed(net: Net) -> None:
    distillation = CompressedDistillation(copy.deepcopy(net), net, DATA[0])
    assert len(distillation.sites) == 8
    loss, output = distillation(DATA[1])
    assert float(loss.detach()) == pytest.approx(0, abs=1e-6) and torch.equal(output, net(DATA[1]))


def test_channels_that_are_left_are_compared(net: Net) -> None:
    with torch.no_grad():  # units that say nothing: what is left computes the same
        for unit in (1, 6, 11, 12):
            net.blocks[1].one.weight[unit] = net.blocks[1].one.bias[unit] = net.blocks[1].norm.bias[unit] = 0
    result = bitwright.compress(
        net, DATA, {"params": 0.95}, include=["blocks.1.one"], widths=4, reconstruction=False, batch_norms=False
    )
    assert result.rows[0].removed == (1, 6, 11, 12)
    distillation = CompressedDistillation(result.model, net, DATA[0], plan=result.plan)
    site = next(site for site in distillation.sites if site.name == "blocks.1.one")
    assert site.kept == (0, 2, 3, 4, 5, 7, 8, 9, 10, 13, 14, 15) and site.axis == 1
    assert float(distillation(DATA[1])[0].detach()) == pytest.approx(0, abs=1e-6)
    without = CompressedDistillation(result.model, net, DATA[0])
    assert {s.name for s in distillation.sites} - {s.name for s in without.sites} == {"blocks.1.one"}
    with pytest.raises(ConfigError, match="no layer of the compressed model pairs with 'blocks.1.one'.*give the plan"):
        CompressedDistillation(result.model, net, DATA[0], sites=["blocks.1.one"])


def test_blocks_and_factors_pair_with_what_they_were(net: Net) -> None:
    student = copy.deepcopy(net)
    dropped = drop_blocks(student, DATA, count=1, exclude=["blocks.1", "blocks.2"], progress=False)
    factored = svd_model(student, DATA, ratios={"blocks.1.two": 0.5}, forms=("spatial",), progress=False)
    plan = {"format": 1, "steps": [*dropped.plan["steps"], *factored.plan["steps"]]}
    distillation = CompressedDistillation(student, net, DATA[0], plan=plan)
    pairs = {site.name: site.value for site in distillation.sites}
    assert {name for name in pairs if "blocks" in name} == {f"blocks.{i}.{n}" for i in (1, 2) for n in ("one", "two")}
    assert pairs["blocks.1.one"].startswith("blocks.0.one") and pairs["blocks.2.two"].startswith("blocks.1.two.1")


def test_training_by_sites_brings_a_model_back(net: Net) -> None:
    student = copy.deepcopy(net)
    svd_model(student, DATA, macs=0.5, data_aware=False, progress=False)
    distillation = CompressedDistillation(student, net, DATA[0])
    optimizer = torch.optim.Adam(student.parameters(), 3e-3)
    losses = []
    for _ in range(20):
        loss, _ = distillation(DATA[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0] and net.stem.weight.grad is None
