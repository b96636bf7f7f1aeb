"""Activation, sum and grid in one compiled pass: the values and gradients of the separate calls, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.compiled.loops import loops
from bitwright.torch import QuantizationSimModel
from bitwright.torch.quantizers import fake_quantize
from bitwright.torch.quantizers.learned_range import LearnedRange
from tests.support.learned_sums import separate_operations


class Body(nn.Module):
    """Convolution, then ``tail``, then a convolution that reads what it left."""

    def __init__(self, tail: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.tail = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1), tail

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(self.tail(y, 0.5 * y.detach() + 0.1))


def iadd(y: Tensor, z: Tensor) -> Tensor:
    y += z
    return y


def written_view(y: Tensor, z: Tensor) -> Tensor:
    """A ReLU in place on a part of a tensor, whose rest is read too."""
    half = y[:, :4]
    F.relu(half, inplace=True)
    return y


TAILS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda y, z: F.relu(y),
    "relu in place": lambda y, z: F.relu(y, inplace=True),
    "relu_": lambda y, z: y.relu_(),
    "relu6": lambda y, z: F.relu6(y),
    "relu6 in place": lambda y, z: F.relu6(y, inplace=True),
    "hardtanh": lambda y, z: F.hardtanh(y, -0.3, 0.4),
    "hardtanh in place": lambda y, z: F.hardtanh(y, -0.3, 0.4, True),
    "clamp": lambda y, z: y.clamp(-0.3, 0.4),
    "clamp above": lambda y, z: y.clamp(max=0.4),
    "add": lambda y, z: y + z,
    "add in place": iadd,
    "add, other shape": lambda y, z: y + z[:, :, :1],
    "add, scaled": lambda y, z: torch.add(y, z, alpha=2),
    "add number": lambda y, z: y + 1.5,
    "relu twice": lambda y, z: F.relu(F.relu(y) + y),
    "view written": written_view,
    "both": lambda y, z: F.relu(y + z) + y,
}


def run(sim: QuantizationSimModel, x: Tensor) -> list[Tensor]:
    """Output without a gradient, output with one, gradients of the input and of all parameters."""
    with torch.no_grad():
        found = [sim.model(x)]
    given = x.clone().requires_grad_()
    sim.model.zero_grad()
    out = sim.model(given)
    (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
    assert given.grad is not None
    return [*found, out.detach(), given.grad, *(p.grad.clone() for p in sim.model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels-last"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", TAILS)
def test_values_and_gradients_are_those_of_separate_calls(name, threads, layout, monkeypatch):
    torch.manual_seed(0)
    model = Body(TAILS[name]).to(memory_format=layout)
    x = torch.randn(2, 3, 60, 60).to(memory_format=layout)
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings([0.7 * x], progress=False)
    monkeypatch.setattr("bitwright.core.compiled.loops.PART", 1 << 12)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    fast = run(sim, x)
    monkeypatch.setattr(fake_quantize, "loops", lambda: None)
    slow = run(sim, x)
    assert len(fast) == len(slow) == 7
    for a, b in zip(fast, slow, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels-last"])
@pytest.mark.parametrize("offsets", [False, True], ids=["scales", "offsets"])
@pytest.mark.parametrize("name", TAILS)
def test_ranges_that_train_have_the_values_and_gradients_of_separate_calls(name, offsets, layout, monkeypatch):
    torch.manual_seed(0)
    model = Body(TAILS[name]).to(memory_format=layout)
    x = torch.randn(2, 3, 40, 40).to(memory_format=layout)
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings([0.7 * x], progress=False)
    monkeypatch.setattr(LearnedRange, "bounded", False)  # the sums themselves are compared
    sim.learn_ranges(offsets=offsets)

    def gradients() -> tuple[list[Tensor], dict[str, Tensor]]:
        for parameter in sim.range_parameters():
            parameter.grad = None
        found = run(sim, x)
        named = sim.named_range_parameters()
        return found, {name: p.grad.clone() for name, p in named if p.grad is not None}

    fast, fast_ranges = gradients()
    separate_operations(monkeypatch)
    slow, slow_ranges = gradients()
    separate_operations(monkeypatch, absolute=True)
    _, sizes = gradients()
    for a, b in zip(fast, slow, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    assert fast_ranges.keys() == slow_ranges.keys()
    for name, exact in slow_ranges.items():
        size = sizes[f"{name.rpartition('.')[0]}.log_scale"]  # of an offset's terms too: they are smaller
        assert ((fast_ranges[name] - exact).abs() <= 1e-6 * size).all(), name


def calibrated(tail: Callable[[Tensor, Tensor], Tensor]) -> tuple[QuantizationSimModel, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 40, 40)
    sim = QuantizationSimModel(Body(tail), x)
    sim.compute_encodings([x], progress=False)
    return sim, x


def test_an_activation_in_place_changes_what_others_read() -> None:
    kept: list[Tensor] = []

    def tail(y: Tensor, z: Tensor) -> Tensor:
        kept.append(y)
        return F.relu(y, inplace=True)

    sim, x = calibrated(tail)
    for gradients in (False, True):
        kept.clear()
        with torch.set_grad_enabled(gradients):
            sim.model(x)
        assert float(kept[0].detach().min()) == 0.0
        assert kept[0]._version > 0


def test_writing_over_a_tensor_that_autograd_needs_is_told() -> None:
    def tail(y: Tensor, z: Tensor) -> Tensor:
        root = y.exp()  # its backward reads its result
        return F.relu(root, inplace=True)

    torch.manual_seed(0)
    x = torch.randn(2, 3, 40, 40)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Body(tail)(x).sum().backward()
    sim, x = calibrated(tail)
    for quantizer in sim.quantizers.unique():
        if "exp" in quantizer.name:
            quantizer.enabled = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sim.model(x).sum().backward()


def test_gradients_of_gradients_are_those_of_separate_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, x = calibrated(lambda y, z: F.relu(y))

    def penalty() -> list[Tensor]:
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(sim.model(given).square().sum(), given, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), list(sim.model.parameters()), allow_unused=True))

    fast = penalty()
    monkeypatch.setattr(fake_quantize, "loops", lambda: None)
    for a, b in zip(fast, penalty(), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_training_keeps_a_byte_per_element() -> None:
    sim, x = calibrated(lambda y, z: F.relu(y))
    kept: list[torch.dtype] = []

    def pack(t: Tensor) -> Tensor:
        if t.numel() == 2 * 8 * 40 * 40:
            kept.append(t.dtype)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        sim.model(x)
    # marks of both sites and what the second convolution reads; without compiled loops the inputs of both and the ReLU's result
    names = ["torch.float32"] * 4 if loops() is None else ["torch.float32", "torch.uint8", "torch.uint8"]
    assert sorted(map(str, kept)) == names


def test_inference_mode() -> None:
    sim, x = calibrated(lambda y, z: F.relu(y, inplace=True) + z)
    with torch.no_grad():
        expected = sim.model(x)
    with torch.inference_mode():
        assert torch.equal(sim.model(x), expected)
