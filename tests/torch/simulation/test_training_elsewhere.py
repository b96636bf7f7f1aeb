"""Training on another device than the host: no step waits for a number of that device.

Without such a device, the host stands in for it: what counts as one is asked in one place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bitwright.errors import ModelError
from bitwright.torch import QuantizationSimModel, TrainingGuard
from bitwright.torch.quantizers import fake_quantize, learned_range, quantizer
from bitwright.torch.simulation import simulate
from tests.support.simulations import calibrated
from tests.torch.simulation.test_steering import PackedAttention

READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__"}
MAKES = {"tensor", "as_tensor", "from_numpy"}  # of numbers of the host: copied, and waited for


class Waits(TorchFunctionMode):
    """Calls that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS | MAKES:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Scalars(TorchDispatchMode):
    """The same below the autograd layer, where gradients are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it to have the host count as another device."""

    def pretend() -> None:
        for module in (fake_quantize, learned_range, quantizer, simulate):
            monkeypatch.setattr(module, "on_host", lambda device: False)

    yield pretend


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU6(), nn.Flatten(), nn.Linear(128, 4)
    )


class Recurrent(nn.Module):
    """A recurrent layer in both directions, and the last step's classes."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = kind(6, 5, batch_first=True, bidirectional=True), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


MODELS = {
    "conv": (conv, (4, 3, 8, 8)),
    "attention": (lambda: PackedAttention("cross"), (6, 5, 8)),
    "lstm": (lambda: Recurrent(nn.LSTM), (4, 7, 6)),
    "gru": (lambda: Recurrent(nn.GRU), (4, 7, 6)),
    "rnn": (lambda: Recurrent(nn.RNN), (4, 7, 6)),
}


def simulated(name: str, learned: bool) -> tuple[QuantizationSimModel, Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    x = torch.randn(shape)
    sim = calibrated(QuantizationSimModel(make().eval(), x, preset="w4a8"), [x])
    if learned:
        sim.learn_ranges()
    return sim, x


def step(sim: QuantizationSimModel, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = (sim.model(x) - 1.0).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def optimizer_of(sim: QuantizationSimModel, learned: bool) -> torch.optim.Optimizer:
    groups = [{"params": list(sim.model.parameters())}]
    groups += [{"params": sim.range_parameters(), "lr": 1e-5}] if learned else []
    return torch.optim.SGD(groups, lr=1e-2)


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_reads_no_number(name, learned, elsewhere, monkeypatch):
    sim, x = simulated(name, learned)
    sim.model.train()
    elsewhere()
    optimizer = optimizer_of(sim, learned)
    step(sim, optimizer, x)  # the first moves grids to the device, and looks at the ranges
    read = learned_range.LearnedRange.values
    with Waits() as waits, Scalars() as scalars, monkeypatch.context() as context:
        context.setattr(
            learned_range.LearnedRange, "values", lambda self: (waits.found.append("values"), read(self))[1]
        )
        for _ in range(3):
            step(sim, optimizer, x)
    assert (waits.found, scalars.found) == ([], 0)


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("name", MODELS)
def test_the_steps_are_those_of_the_host(name: str, learned: bool, elsewhere: Callable[[], None]) -> None:
    sim, x = simulated(name, learned)
    other = copy.deepcopy(sim)
    sim.model.train()
    optimizer = optimizer_of(sim, learned)
    expected = [step(sim, optimizer, x) for _ in range(5)]
    elsewhere()
    other.model.train()
    optimizer = optimizer_of(other, learned)
    found = [step(other, optimizer, x) for _ in range(5)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for own, theirs in zip(other.model.parameters(), sim.model.parameters(), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-6)
    assert other.verify(x).ok


def test_a_range_that_left_its_tensor_is_named_by_guard_and_watch(elsewhere: Callable[[], None]) -> None:
    sim, x = simulated("conv", True)
    elsewhere()
    sim.model.train()
    guard = TrainingGuard(torch.optim.SGD(sim.range_parameters(), lr=1e30), sim=sim)
    with pytest.raises(ModelError, match=r"0\.weight|0\.input.*(times|NaN)"):
        for _ in range(3):
            guard.step((sim.model(x) - 1.0).square().mean())
    assert torch.isfinite(sim.model(x)).all()  # the guard put the ranges back
    with torch.no_grad():
        sim.quantizers["5.weight"].quantizer.learned.log_scale.fill_(torch.nan)
    with pytest.raises(ModelError, match=r"5\.weight.*NaN or infinite"):
        for _ in range(51):
            sim.model(x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_is_never_waited_for_in_a_step(name: str, learned: bool) -> None:
    sim, x = simulated(name, learned)
    sim.model.cuda().train()
    if learned:
        sim.learn_ranges()
    optimizer, x = optimizer_of(sim, learned), x.cuda()
    step(sim, optimizer, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(sim, optimizer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
