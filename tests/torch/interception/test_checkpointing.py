"""Activation checkpointing: the backward pass computes with the quantizers of the forward, at the same places."""

from __future__ import annotations

import copy
import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from bitwright.errors import ModelError
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


class Base(nn.Module):
    """``how`` is called with a function and its arguments: it calls it, or checkpoints it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.how: Callable[..., Any] = operator.call

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.how(function, *args)


class Modules(Base):
    def forward(self, x: Tensor) -> Tensor:
        block = nn.Sequential(self.a, nn.ReLU(), self.b)
        return self.run(self.c, F.gelu(self.run(block, x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x).relu() + x


class Stack(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


class Closure(Base):
    """Functions of the model's own inside the region, before, between and after its modules (as DenseNet has them)."""

    def inner(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.cat([x, y], 0) * 2
        z = self.norm(self.a(z + 1).tanh())
        return z[:4] @ self.b.weight, (z * z).sum(0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        one, two = self.run(self.inner, x, self.c(x))
        return one * two + 1


class OnlyFunctions(Base):
    """A region that no module is called in: nothing but functions, twice at the same kind of place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.run(lambda v: (v * v).tanh() + v, x)
        x = self.run(lambda v: (v * v).tanh() + v, x)
        return self.b(x)


class Nested(Base):
    def outer(self, x: Tensor) -> Tensor:
        return self.c(self.run(lambda v: (self.a(v) * 2).tanh() + v, x)) * 3

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.outer, self.b(x)) - x


class Shared(Base):
    """One layer on two lines, each a place of its own, and one over time."""

    def both(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        x = self.a(x) * 4
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.both, x)
        for _ in range(3):
            x = self.run(lambda v: torch.tanh(self.b(v) + v), x)
        return x


class Loop(Base):
    """A loop over time without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        f, z = self.a(x).sigmoid(), self.b(x)

        def scan(f: Tensor, z: Tensor) -> Tensor:
            c = z[0]
            for t in range(1, 4):
                c = f[t] * c + (1 - f[t]) * z[t]
            return c

        return self.run(scan, f, z)


class Dropped(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(lambda v: F.dropout(self.a(v), 0.5, self.training) * 2, self.b(x))


MODELS = [Modules, Stack, Closure, OnlyFunctions, Nested, Shared, Loop, Dropped]


def train_step(sim: QuantizationSimModel, how: Callable[..., Any] = operator.call) -> tuple[Tensor, dict[str, Tensor]]:
    sim = copy.deepcopy(sim)
    sim.model.how = how
    sim.model.train()
    torch.manual_seed(7)
    x = X.clone().requires_grad_()
    out = sim.model(x)
    out.square().sum().backward()
    assert not sim._simulator.unseen
    assert x.grad is not None
    found = {name: p.grad for name, p in sim.model.named_parameters() if p.grad is not None}
    return out.detach(), {**found, "input": x.grad}


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_gradients_are_those_without_checkpointing(kind: type[Base], reentrant: bool) -> None:
    sim = calibrated(QuantizationSimModel(kind().eval(), X, preset="w4a8"), [X])
    out, grads = train_step(sim)
    again, checkpointed = train_step(sim, functools.partial(checkpoint, use_reentrant=reentrant))
    assert torch.equal(out, again)
    assert grads.keys() == checkpointed.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(checkpointed[name], grad, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_a_sequence_of_checkpointed_segments(reentrant: bool) -> None:
    class Segments(Base):
        def __init__(self) -> None:
            super().__init__()
            self.segments = 2
            self.layers = nn.Sequential(self.a, nn.ReLU(), self.b, nn.GELU(), self.c)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.layers, self.segments, x, use_reentrant=reentrant)

    model = Segments().eval()
    sim = calibrated(QuantizationSimModel(model, X), [X])
    found = []
    for segments in (1, 3):
        sim.model.segments = segments
        found.append(train_step(sim))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], grad) for name, grad in found[1][1].items())


def test_the_backward_pass_may_run_in_another_thread_and_after_other_forwards() -> None:
    sim = calibrated(QuantizationSimModel(Closure().eval(), X), [X])
    _, grads = train_step(sim)
    sim.model.how = functools.partial(checkpoint, use_reentrant=False)
    sim.model.train()
    x = X.clone().requires_grad_()
    loss = sim.model(x).square().sum()
    with torch.no_grad(), sim.in_float():
        sim.model.eval()
        sim.model(X)
        sim.model.train()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert x.grad is not None and torch.equal(x.grad, grads["input"])
    assert not sim._interceptor.running


def test_an_error_in_the_backward_pass_leaves_nothing_behind() -> None:
    sim = calibrated(QuantizationSimModel(Stack().eval(), X), [X])
    sim.model.train()
    armed = False

    def run(function: Callable[..., Any], *args: Any) -> Any:
        def sometimes(v: Tensor) -> Tensor:
            if armed:
                raise ZeroDivisionError("in the region")
            return function(v)

        return checkpoint(sometimes, *args, use_reentrant=False)

    sim.model.how = run
    loss = sim.model(X).sum()
    armed = True
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    armed = False
    assert not sim._interceptor.running and not torch.overrides._get_current_function_mode_stack()
    sim.model(X).sum().backward()


def test_another_way_to_compute_again_is_refused_by_name() -> None:
    """Without ``torch.utils.checkpoint`` the place of the call in the forward is not known."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
            ctx.layer = layer
            ctx.save_for_backward(x)
            return layer(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                ctx.layer(x).backward(grad)
            return x.grad, None

    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return Own.apply(self.a(x), self.b)

    sim = calibrated(QuantizationSimModel(Model().eval(), X), [X])
    with pytest.raises(ModelError, match="b: the backward pass computes this Linear again") as caught:
        sim.model(X).sum().backward()
    assert "torch.utils.checkpoint" in caught.value.remedy
