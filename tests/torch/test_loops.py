"""Loops that use no parameters: one place per line of code where a line feeds itself, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bitwright.torch import QuantizationSimModel, TorchView
from tests.cost import steps


class Of(nn.Module):
    """A linear layer and then ``after``."""

    def __init__(self, after: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.act, self.after = nn.Linear(3, 3), nn.Sigmoid(), after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, self.linear(x))


def pooled(self: nn.Module, x: Tensor) -> Tensor:
    """The recurrence of a quasi-RNN: the product that is no part of the state runs in the loop too."""
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
    return list(QuantizationSimModel(Of(after), torch.randn(length, 2, 3)).quantizers)


@pytest.mark.parametrize("after", [pooled, by_modules, by_function], ids=lambda f: f.__name__)
def test_a_loop_has_the_same_sites_at_every_length(after: Callable[[nn.Module, Tensor], Tensor]) -> None:
    assert sites(after, 3) == sites(after, 9)
    sim = QuantizationSimModel(Of(after), torch.randn(4, 2, 3))
    sim.compute_encodings([torch.randn(5, 2, 3)])
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
