"""Places of calls: loops that use no parameters, and one layer that a loop calls on one line."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bitwright import IntFormat, QuantSpec
from bitwright.core.simulation.float_model import sqnr
from bitwright.torch import QuantizationSimModel, TorchView
from tests.support.cost import steps
from tests.support.simulations import calibrated


class Of(nn.Module):
    """A linear layer and then ``after``."""

    def __init__(self, after: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.act, self.after = nn.Linear(3, 3), nn.Sigmoid(), after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, self.linear(x))


def pooled(self: nn.Module, x: Tensor) -> Tensor:
    """The recurrence of a quasi-RNN: the product that is not part of the state runs in the loop too."""
    state = torch.zeros_like(x[0])
    out = []
    for step in x:
        gate = torch.sigmoid(step)
        state = gate * state + (1 - gate) * step
        out.append(gate * state)
    return torch.stack(out)


def by_modules(self: nn.Module, x: Tensor) -> Tensor:
    """The loop runs a module without parameters."""
    state = x[0]
    for step in x[1:]:
        state = self.act(state + step)
    return state


def helper(state: Tensor, step: Tensor) -> Tensor:
    return torch.tanh(state * step)


def by_function(self: nn.Module, x: Tensor) -> Tensor:
    """The loop calls a function, which is also called elsewhere."""
    state = helper(x[0], x[0])
    for step in x[1:]:
        state = helper(state, step)
    return state


def branches(self: nn.Module, x: Tensor) -> Tensor:
    """Branches side by side, none of which reads another."""
    return torch.cat([torch.sigmoid(part) for part in x])


def sites(after: Callable[[nn.Module, Tensor], Tensor], length: int) -> list[str]:
    return list(
        QuantizationSimModel(Of(after), torch.randn(length, 2, 3), config_file={"tail": "quantized"}).quantizers
    )


@pytest.mark.parametrize("after", [pooled, by_modules, by_function], ids=lambda f: f.__name__)
def test_a_loop_has_the_same_sites_at_every_length(after: Callable[[nn.Module, Tensor], Tensor]) -> None:
    assert sites(after, 3) == sites(after, 9)
    sim = calibrated(QuantizationSimModel(Of(after), torch.randn(4, 2, 3)), [torch.randn(5, 2, 3)])
    sim.model(torch.randn(12, 2, 3))
    assert not sim._simulator.unseen


def test_a_function_called_before_the_loop_is_another_place() -> None:
    names = sites(by_function, 5)
    assert [name for name in names if name.startswith("tanh")] == ["tanh.output[0]", "tanh_1.output[0]"]


def test_branches_keep_a_site_each() -> None:
    names = sites(branches, 4)
    assert sum(name.startswith("sigmoid") for name in names) == 4


def test_a_model_without_such_loops_is_not_looked_at_any_more() -> None:
    sim = QuantizationSimModel(Of(branches), torch.randn(4, 2, 3))
    assert not sim._interceptor.loops and sim._interceptor.seen is None


def test_a_view_finds_the_places_of_a_loop() -> None:
    view = TorchView(Of(pooled), [torch.randn(4, 2, 3)])
    (op,) = [op for op in view.graph().ops if op.type == "Sigmoid"]
    (kept,) = view.capture([op.outputs[0]], [torch.randn(6, 2, 3)])
    assert len(kept[op.outputs[0]]) == 6


def test_finding_loops_costs_a_line_per_call() -> None:
    def cost(length: int) -> int:
        model, x = Of(pooled), torch.randn(length, 2, 3)
        return steps(lambda: QuantizationSimModel(model, x))

    cost(10)
    assert cost(160) < 4.4 * cost(40)


# -- a weight that several layers share


def _shared(kind: str) -> nn.Module:
    """The same weight four times in a row; what comes out is larger each time."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            a = F.linear(x, self.w).relu()
            b = F.linear(a, self.w).relu()
            return x + F.linear(F.linear(b, self.w).relu(), self.w) / 1000

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            a = self.c(x).relu() * 6
            b = self.c(self.c(a).relu() * 6).relu() * 6
            return x + self.c(b) / 1000

    class Block(Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    torch.manual_seed(0)
    return {"functional": Functional, "module": Module, "block": Block}[kind]().eval()


@pytest.mark.parametrize("kind", ["functional", "module", "block"])
def test_layers_in_a_row_that_share_a_weight_have_grids_of_their_own(kind: str) -> None:
    model, x = _shared(kind), torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    sim = calibrated(QuantizationSimModel(model, x, config_file={"tail": "quantized"}), [x])
    assert sum(site.role == "output" for site in sim.quantizers.values()) >= 5
    with torch.no_grad():
        assert sqnr(model(x).numpy(), sim.model(x).numpy()) > 28
    weights = [site for site in sim.quantizers.values() if site.role == "weight"]
    assert len(weights) == (8 if kind == "block" else 4)
    assert len({id(site.quantizer) for site in weights}) == len(weights) // 4  # one encoding for all that share it
    assert not sim._simulator.unseen and sim.verify(x).ok


def test_a_layer_over_time_and_branches_that_share_one_stay_one_place() -> None:
    class Time(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.i, self.h = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.i(x[:, 0]))  # the first step stands before the loop
            h = torch.tanh(self.i(x[:, 0]) + self.h(h))
            for t in range(1, x.size(1)):
                h = torch.tanh(self.i(x[:, t]) + self.h(h))
            return h

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x[:, 0]) - self.l(x[:, 1] * 3)

    x = torch.randn(5, 6, 4)
    for model, places in ((Time(), 2), (Siamese(), 1)):
        sim = QuantizationSimModel(model, x)
        assert sum(site.role == "weight" for site in sim.quantizers.values()) == places
        sim.compute_encodings([x], progress=False)
        sim.model(torch.randn(5, 9, 4))
        assert not sim._simulator.unseen


class Scaled(nn.Module):
    """Layers one after the other whose calls differ in a number, so that nothing says that they are a chain."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) * (1 + i / 1000)
        return x


class Levels(nn.Module):
    """One layer on inputs of several sizes."""

    def __init__(self, sizes: list[float]) -> None:
        super().__init__()
        self.layer, self.sizes = nn.Linear(4, 4, bias=False), sizes

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(x * size) for size in self.sizes])


@pytest.mark.parametrize(
    ("sizes", "told"), [([1, 1e-9], None), ([1e-9, 1], None), ([1e-5, 1], "1e+05"), ([1e-9, 0.01, 1], "100")]
)
def test_a_call_that_holds_only_rounding_is_not_told_to_share_a_grid_badly(sizes, told, caplog):
    """Distances of a detector whose last layer was never trained are sums that cancel: 1e-8 in the place of 0."""
    calibrated(QuantizationSimModel(Levels(sizes).eval(), torch.ones(2, 4)), [torch.ones(2, 4)])
    factor = re.search(r"several calls share this grid, .* differ by a factor of (\S+)\. ", caplog.text)
    assert (factor and factor[1]) == told


def test_a_convolution_repeated_on_one_line_is_named_before_it_costs_three_bits(caplog):
    """Each call makes less of its input, ten times less after four; calls over time are not accused."""
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 16, 1, bias=False)
    with torch.no_grad():
        conv.weight[:] = torch.linalg.qr(torch.randn(16, 16))[0][..., None, None] * 0.45
    own = [conv, *(nn.Conv2d(16, 16, 1, bias=False) for _ in range(3))]
    for layer in own[1:]:
        layer.weight = conv.weight
    x, lost = torch.randn(8, 16, 4, 4), []
    for layers in ([conv] * 4, own):
        caplog.clear()
        model = Scaled(list(layers)).eval()
        sim = calibrated(QuantizationSimModel(model, x), [x])
        with torch.no_grad():
            lost.append(sqnr(model(x).numpy(), sim.model(x).numpy()))
        assert ("several calls share this grid" in caplog.text) == (layers is not own)
    assert lost[1] > lost[0] + 10

    class Elman(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.i, self.h = nn.Linear(8, 16), nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(x.size(0), 16)
            for t in range(x.size(1)):
                h = torch.tanh(self.i(x[:, t]) + self.h(h))
            return h

    caplog.clear()
    x = torch.randn(16, 20, 8)
    QuantizationSimModel(Elman(), x).compute_encodings([x], progress=False)
    assert "share this grid" not in caplog.text


def test_calls_of_a_loop_with_unlike_ranges_are_named_and_the_remedy_works(caplog: pytest.LogCaptureFixture) -> None:
    class Loop(nn.Module):
        def __init__(self, layers: list[nn.Linear]) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: Tensor) -> Tensor:
            total = x
            for i, layer in enumerate(self.layers):
                x = layer(x)
                total = total + x / (x.detach().abs().max() + 1 + i / 1000)
            return total

    torch.manual_seed(0)
    first = nn.Linear(16, 16)
    with torch.no_grad():
        first.weight *= 12
    layers = [first, *(nn.Linear(16, 16) for _ in range(3))]
    for layer in layers[1:]:
        layer.weight, layer.bias = first.weight, first.bias
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    lost = []
    for model in (Loop([first] * 4).eval(), Loop(layers).eval()):
        caplog.clear()
        sim = calibrated(QuantizationSimModel(model, x), [x])
        with torch.no_grad():
            lost.append(sqnr(model(x).numpy(), sim.model(x).numpy()))
        named = "several calls share this grid" in caplog.text
        assert named == (model.layers[1] is first)
        weights = [site.quantizer for site in sim.quantizers.values() if site.role == "weight"]
        assert len({id(quantizer) for quantizer in weights}) == 1
    assert lost[1] > lost[0] + 10


def test_unlike_steps_over_time_are_named_once_and_sixteen_bits_help(caplog: pytest.LogCaptureFixture) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.u = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8) / 9)

        def forward(self, x: Tensor) -> Tensor:
            h, states = torch.zeros(x.size(0), 8), []
            for t in range(x.size(1)):
                h = x[:, t] @ self.w + h @ self.u
                states.append(h)
            return torch.stack(states, 1)[:, -1]

    torch.manual_seed(0)
    model = Steps().eval()
    x = torch.randn(32, 6, 8, generator=torch.Generator().manual_seed(1))
    x[:, 1] *= 300
    sim = QuantizationSimModel(model, x)
    for _ in range(2):
        sim.compute_encodings([x], progress=False)
    (text,) = [r.getMessage() for r in caplog.records if "share this grid" in r.getMessage()]
    assert "If they are steps over time, give the grid 16 bits" in text

    def decibels() -> float:
        with torch.no_grad():
            return sqnr(model(x).numpy(), sim.model(x).numpy())

    before = decibels()
    for site in list(sim._simulator.named_unlike):  # all that the message counts
        sim.quantizers[site].spec = QuantSpec(IntFormat(16))
    assert decibels() > before + 10


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
    sim = calibrated(QuantizationSimModel(model.eval(), x), [x])
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
