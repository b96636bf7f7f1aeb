"""One layer that a loop calls on one line: places of their own in a chain, one place over time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bitwright.core.simulation.float_model import sqnr
from bitwright.torch import QuantizationSimModel, TorchView
from tests.support.cost import steps


class Loop(nn.Module):
    """``turn(self, x, t)`` so many times, or once for every step of the input."""

    def __init__(self, turn: Any, turns: int | None, **modules: nn.Module) -> None:
        super().__init__()
        self.turn, self.turns = turn, turns
        self.w = nn.Parameter(torch.randn(8, 8) * 0.3)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        self.x, h = x, x if self.turns else torch.zeros_like(x[:, 0])
        for t in range(self.turns or x.size(1)):
            h = self.turn(self, h, t)
        return h


class Collected(Loop):
    """The state after every turn is returned."""

    def forward(self, x: Tensor) -> Tensor:
        states = []
        for t in range(self.turns or 0):
            x = self.turn(self, x, t)
            states.append(x)
        return torch.stack(states)


class Read(nn.Module):
    """The turns read one part of the input after the other, taken apart before."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.h = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for part in x.unbind(1):
            h = torch.tanh(self.i(part) + self.h(h))
        return h


def simulated(model: nn.Module, *shape: int) -> tuple[QuantizationSimModel, Tensor]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    sim = QuantizationSimModel(model.eval(), x)
    sim.compute_encodings([x], progress=False)
    return sim, x


def weights(sim: QuantizationSimModel) -> list[Any]:
    return [site for site in sim.quantizers.values() if site.role == "weight"]


CHAINS = {
    "module": lambda: Loop(lambda m, x, t: m.f(x), 3, f=nn.Linear(8, 8)),
    "two-turns": lambda: Loop(lambda m, x, t: m.f(x).relu() + x, 2, f=nn.Linear(8, 8)),
    "residual": lambda: Loop(lambda m, x, t: m.f(x).relu() + x, 4, f=nn.Linear(8, 8)),
    "parameter": lambda: Loop(lambda m, x, t: torch.relu(x @ m.w) + x, 4),
    "input-again": lambda: Loop(lambda m, x, t: m.f(x) * torch.sigmoid(m.x), 3, f=nn.Linear(8, 8)),
    "norms": lambda: Loop(
        lambda m, x, t: m.n[t](m.f(x)), 3, f=nn.Linear(8, 8), n=nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
    ),
    "block": lambda: Loop(lambda m, x, t: m.f(x), 3, f=nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))),
}


@pytest.mark.slow_variants("residual", "parameter", "block")
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_has_grids_of_its_own_for_every_turn_and_one_weight(name: str) -> None:
    torch.manual_seed(0)
    model = CHAINS[name]()
    sim, x = simulated(model, 5, 8)
    found, layers = weights(sim), 2 if name == "block" else 1
    products = [s for s in found if s.name.split("@")[0].rstrip("0123456789_").endswith(("weight", "w"))]
    assert len({id(site.quantizer) for site in found if site.op.count("n.") == 0}) >= layers
    assert len(products) >= layers * model.turns
    assert len({id(s.quantizer) for s in products if ".n." not in s.name and not s.name.startswith("n.")}) == layers
    with torch.no_grad():
        assert sqnr(model(x).numpy(), sim.model(x).numpy()) > 28
    assert not sim._simulator.unseen
    if name in ("residual", "parameter", "block"):
        assert sim.verify(x).ok


def test_one_convolution_three_times_in_a_sequential() -> None:
    """Each call makes less of its input; one grid for all of them lost 15 dB."""
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 16, 1, bias=False)
    with torch.no_grad():
        conv.weight[:] = torch.linalg.qr(torch.randn(16, 16))[0][..., None, None] * 0.45
    own = [conv, copy.deepcopy(conv), copy.deepcopy(conv)]
    for layer in own:
        layer.weight = conv.weight
    found = []
    for layers in ([conv] * 3, own):
        model = nn.Sequential(*layers).eval()
        sim, x = simulated(model, 8, 16, 4, 4)
        with torch.no_grad():
            found.append(sqnr(model(x).numpy(), sim.model(x).numpy()))
        assert len({id(site.quantizer) for site in weights(sim)}) == 1
    assert found[0] == pytest.approx(found[1], abs=1e-6) and found[0] > 30


OVER_TIME = {
    "cell": (lambda: Loop(lambda m, h, t: m.c(m.x[:, t], h), None, c=nn.GRUCell(8, 8)), (5, 6, 8)),
    "two-steps": (lambda: Loop(lambda m, h, t: m.c(m.x[:, t], h), None, c=nn.GRUCell(8, 8)), (5, 2, 8)),
    "elman": (
        lambda: Loop(lambda m, h, t: torch.tanh(m.i(m.x[:, t]) + m.h(h)), None, i=nn.Linear(8, 8), h=nn.Linear(8, 8)),
        (5, 6, 8),
    ),
    "elman-in-two-steps": (
        lambda: Loop(lambda m, h, t: torch.tanh(m.i(m.x[:, t]) + m.h(h)), None, i=nn.Linear(8, 8), h=nn.Linear(8, 8)),
        (5, 2, 8),
    ),
    "taken-apart": (Read, (5, 6, 8)),
    "taken-apart-in-two": (Read, (5, 2, 8)),
    "cell-without-input": (lambda: Loop(lambda m, h, t: m.c(h, h), 4, c=nn.GRUCell(8, 8)), (5, 8)),
    "decoder": (lambda: Collected(lambda m, h, t: torch.tanh(m.f(h)), 5, f=nn.Linear(8, 8)), (5, 8)),
}


@pytest.mark.parametrize("name", OVER_TIME)
def test_a_loop_over_time_stays_one_place_for_any_number_of_steps(name: str) -> None:
    torch.manual_seed(0)
    build, shape = OVER_TIME[name]
    sim, x = simulated(build(), *shape)
    assert not sim._interceptor.repeats
    if len(shape) == 3:
        sim.model(torch.randn(5, 9, 8))
    assert not sim._simulator.unseen


def test_turns_beyond_those_recorded_use_the_place_of_the_last() -> None:
    model = Loop(lambda m, x, t: m.f(x), 3, f=nn.Linear(8, 8))
    sim, x = simulated(model, 5, 8)
    sim.model.turns = 5
    sim.model(x)
    assert not sim._simulator.unseen
    sim.model.turns = 2
    sim.model(x)


def test_examples_with_different_numbers_of_turns_share_one_place() -> None:
    class Until(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(len(x)):
                x = self.f(x)
            return x

    sim = QuantizationSimModel(Until(), torch.randn(3, 8), examples=[torch.randn(5, 8)])
    assert not sim._interceptor.repeats and len(weights(sim)) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_turns_are_computed_again_at_their_own_places(reentrant: bool) -> None:
    torch.manual_seed(0)
    plain = Loop(lambda m, x, t: m.f(x).relu() + x, 3, f=nn.Linear(8, 8))
    saved = Loop(lambda m, x, t: checkpoint(lambda v: m.f(v).relu() + v, x, use_reentrant=reentrant), 3, f=plain.f)
    gradients = []
    for model in (plain, saved):
        sim, x = simulated(model, 5, 8)
        assert list(sim._interceptor.repeats.values()) == [3]
        sim.model.train()
        sim.model.zero_grad()
        sim.model(x.requires_grad_()).square().sum().backward()
        gradients.append(sim.model.f.weight.grad.clone())
    assert torch.equal(*gradients)


def test_the_view_captures_every_turn() -> None:
    model = Loop(lambda m, x, t: m.f(x), 3, f=nn.Linear(8, 8)).eval()
    x = torch.randn(2, 8)
    view = TorchView(model, [x])
    names = [op.name for op in view.graph().ops if op.type == "Gemm"]
    (found,) = view.capture([view.graph().op(name).outputs[0] for name in names], [x])
    assert len(names) == 3 and all(len(arrays) == 1 for arrays in found.values())


def test_looking_for_chains_takes_a_linear_number_of_steps() -> None:
    def cost(blocks: int) -> int:
        block = nn.Sequential(*(nn.Linear(4, 4) for _ in range(blocks)))
        model, x = nn.Sequential(block, block), torch.randn(2, 4)
        return steps(lambda: TorchView(model, [x]).graph())

    assert cost(320) < 9 * cost(40)
