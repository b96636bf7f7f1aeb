"""A NaN in the data or the gradients costs one step and nothing else."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.errors import ConfigError, ModelError
from bitwright.torch import QuantizationSimModel, TrainingGuard


def test_a_bad_loss_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    guard = TrainingGuard(optimizer)
    assert guard.step(model(torch.ones(3, 4)).pow(2).sum())
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert not guard.step(model(torch.full((3, 4), math.nan)).pow(2).sum())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for a, b in zip(optimizer.state_dict()["state"][0].values(), state["state"][0].values(), strict=True)
    )
    assert all(p.grad is None for p in model.parameters())
    assert repr(guard) == "TrainingGuard(1 steps, 1 skipped: 1 loss)"


def test_a_bad_gradient_changes_nothing() -> None:
    weight = nn.Parameter(torch.zeros(3))
    guard = TrainingGuard(torch.optim.SGD([weight], lr=0.1))
    assert not guard.step(weight.sqrt().sum())  # finite, with an infinite slope
    assert torch.equal(weight, torch.zeros(3)) and guard.reasons == {"gradient": 1}


def test_gradients_are_clipped() -> None:
    weight = nn.Parameter(torch.zeros(4))
    guard = TrainingGuard(torch.optim.SGD([weight], lr=1.0), max_norm=0.5)
    assert guard.step((100 * weight).sum())
    assert float(weight.detach().norm()) == pytest.approx(0.5, rel=1e-5) and guard.norm == pytest.approx(200)
    free = nn.Parameter(torch.zeros(4))
    assert TrainingGuard(torch.optim.SGD([free], lr=1.0), max_norm=None).step((100 * free).sum())
    assert float(free.detach().norm()) == pytest.approx(200)


def test_too_many_in_a_row_stop_the_training() -> None:
    weight = nn.Parameter(torch.ones(2))
    guard = TrainingGuard(torch.optim.SGD([weight], lr=1.0), patience=2)
    for value in (math.nan, 1.0, math.inf, math.nan):
        guard.step((weight * value).sum())
    with pytest.raises(ModelError, match="3 steps in a row had a loss that is not finite"):
        guard.step((weight * math.nan).sum())
    with pytest.raises(ConfigError, match="max_norm=0 is not a norm"):
        TrainingGuard(torch.optim.SGD([weight], lr=1.0), max_norm=0)


def test_a_simulation_survives_a_bad_batch() -> None:
    torch.manual_seed(0)
    data = [torch.randn(8, 6) for _ in range(6)]
    sim = QuantizationSimModel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), data[0])
    sim.compute_encodings(data)
    encodings = {name: site.encoding for name, site in sim.quantizers.items()}
    guard = TrainingGuard(torch.optim.SGD(sim.model.parameters(), lr=0.05))
    data[3][2, 1] = math.nan
    for x in data:
        guard.step(sim.model(x).pow(2).mean())
    assert (guard.steps, guard.skipped) == (5, 1)
    assert all(torch.isfinite(p).all() for p in sim.model.parameters())
    for name, site in sim.quantizers.items():
        if not site.quantizer.derived:
            assert site.encoding == encodings[name]
        assert np.isfinite(site.encoding.scale).all()


class InPlace(nn.Module):
    """A sum in place on what is only quantized where it is read: the scores of an attention divided by a constant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, in_place: bool = True) -> torch.Tensor:
        scores = torch.matmul(self.q(x), self.k(x).transpose(-1, -2)) / 2.0
        bias = self.q(x) @ x.T
        if in_place:
            scores += bias
        else:
            scores = scores + bias
        return scores @ x


def test_a_value_that_is_quantized_where_it_is_read_may_be_overwritten_there() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    sims = []
    for in_place in (True, False):
        sim = QuantizationSimModel(InPlace(), (x, in_place))
        sim.compute_encodings([(x, in_place)], progress=False)
        sim.model.train()
        out = sim.model(x, in_place)
        out.square().sum().backward()
        sims.append((out, sim.model.q.weight.grad, sim.model.k.weight.grad))
    assert "add.input[0]" in sim.quantizers
    for one, other in zip(*sims, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("preset", ["w8a8", "w4a8", "fp8"])
def test_sparse_gradients_of_embeddings_stay_sparse_and_right(preset: str) -> None:
    grads = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 3))
        x = torch.tensor([[1, 3], [3, 9]])
        sim = QuantizationSimModel(model, x, preset=preset)
        sim.compute_encodings([x], progress=False)
        optimizer = (torch.optim.SparseAdam if sparse else torch.optim.Adam)(model[0].parameters(), lr=0.1)
        sim.model.train()
        sim.model(x).square().sum().backward()
        grads.append(sim.model[0].weight.grad)
        optimizer.step()
    assert grads[0].is_sparse and torch.equal(grads[0].to_dense(), grads[1])
    assert grads[1].abs().sum() > 0


def test_gradients_of_ranges_do_not_take_the_room_of_those_of_the_model() -> None:
    """Those of small scales are thousands of times larger: in one norm the model would stand still."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[2].weight.mul_(1e-3)
    x = torch.randn(16, 6)
    sim = QuantizationSimModel(model.eval(), x, preset="w4a8")
    sim.compute_encodings([x], progress=False)
    sim.learn_ranges()
    parameters = list(sim.model.parameters())
    before = [p.detach().clone() for p in parameters]
    groups = [{"params": parameters}, {"params": sim.range_parameters(), "lr": 0.0}]
    guard = TrainingGuard(torch.optim.SGD(groups, lr=1.0), max_norm=0.5, sim=sim)
    assert guard.step(100 * sim.model(x).square().sum())
    moved = torch.cat([(p.detach() - q).flatten() for p, q in zip(parameters, before, strict=True)])
    assert guard.range_norm > 100 * guard.norm > 50
    assert float(moved.norm()) == pytest.approx(0.5, rel=1e-4)
