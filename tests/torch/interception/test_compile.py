"""``torch.compile`` of a simulated model: one graph, the same numbers, in inference and in training."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated


class Conv(nn.Module):
    """Batch norm that trains, an addition in place, a shared ReLU, a function between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm, self.relu, self.fc = nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.a(x))
        z = self.norm(self.b(y))
        z += y
        return self.fc(torch.tanh(self.relu(z)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Steps(nn.Module):
    """A cell over time."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            h = torch.tanh(self.x(x[:, t]) + self.h(h))
        return h


class Cells(nn.Module):
    """A recurrent cell of torch over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h).clamp(-0.9, 0.9)
        return h


MODELS = {
    "conv": (Conv, (3, 2, 6, 6)),
    "attention": (Attention, (2, 3, 8)),
    "steps": (Steps, (2, 3, 4)),
    "cells": (Cells, (2, 2, 4)),
}


def simulated(kind: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[QuantizationSimModel, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(shape)
    sim = calibrated(QuantizationSimModel(kind().eval(), x, preset="w4a8"), [x])
    return sim, x


def step(sim: QuantizationSimModel, call: nn.Module, x: Tensor) -> list[Tensor]:
    out = call(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in sim.model.parameters()), *sim.model.buffers()]


@pytest.fixture(autouse=True)
def no_fused_attention() -> Iterator[None]:
    torch._dynamo.reset()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", MODELS)
def test_training_and_inference_are_one_graph_each_and_bit_equal(name: str) -> None:
    sim, x = simulated(*MODELS[name])
    compiled = copy.deepcopy(sim)
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager" if name in ("steps", "cells") else "aot_eager")
    run = torch.compile(compiled.model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(run(x), sim.model(x))
    assert counter.frame_count == 1
    for one in (sim, compiled):
        one.model.train()
    for _ in range(2):
        found = [step(sim, sim.model, x), step(compiled, run, x)]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert counter.frame_count == 2  # training was compiled once too
    assert not compiled._simulator.unseen and not compiled._interceptor.running


def test_the_fused_kernel_of_an_attention_layer_is_refused() -> None:
    """A compiler does not see that the calls of the layer are intercepted, and takes a kernel without quantizers."""
    sim, x = simulated(*MODELS["attention"])
    torch.backends.mha.set_fastpath_enabled(True)
    refused = r"(?s)layer: torch.compile takes the fused kernel.*set_fastpath_enabled\(False\)"
    for whole in (True, False):  # and not run in parts where a graph may break
        run = torch.compile(sim.model, backend="eager", fullgraph=whole)
        with torch.no_grad(), pytest.raises(RuntimeError, match=refused):  # the compiler's own, around ours
            run(x)
    torch.backends.mha.set_fastpath_enabled(False)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(sim.model, backend="eager")(x), sim.model(x))


def test_other_encodings_are_seen_by_what_was_compiled() -> None:
    sim, x = simulated(*MODELS["conv"])
    run = torch.compile(sim.model, backend="eager", fullgraph=True)
    with torch.no_grad():
        before = run(x)
        assert torch.equal(before, sim.model(x))
        site = sim.quantizers["a.weight"]
        site.encoding = dataclasses.replace(site.encoding, scale=np.float32(2) * site.encoding.scale)
        after = run(x)
        assert torch.equal(after, sim.model(x)) and not torch.equal(before, after)
        with sim.in_float():
            assert torch.equal(run(x), sim.model(x)) and not torch.equal(run(x), after)
        sim.quantizers["a.weight"].enabled = False
        assert torch.equal(run(x), sim.model(x)) and not torch.equal(run(x), after)


@pytest.mark.slow
def test_code_that_a_compiler_generates_rounds_as_we_do() -> None:
    """Ties, tiny and negative numbers, values beyond the ends; per tensor and per channel."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("no C++ compiler at hand")

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 7, generator=torch.Generator().manual_seed(0)))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    x = torch.linspace(-3, 3, 64 * 7).reshape(64, 7)
    sim = calibrated(QuantizationSimModel(Product(), x, preset="w4a8"), [x])
    step_size = float(sim.quantizers["mul.input[0]"].encoding.scale)
    x = (torch.arange(64 * 7).reshape(64, 7) - 224.0) * step_size / 2  # every second one is a tie
    with torch.no_grad():
        assert torch.equal(torch.compile(sim.model, fullgraph=True)(x), sim.model(x))


class Recurrent(nn.Module):
    """Layers one after the other, and a linear layer."""

    def __init__(self, *kinds: str, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(getattr(nn, kind)(2, 2, **options) for kind in kinds)
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0][..., :2]
        return self.fc(x)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("net", "backend"),
    [
        (lambda: Recurrent("GRU", "LSTM"), "eager"),
        (lambda: Recurrent("GRU"), "aot_eager"),
        (lambda: Recurrent("LSTM", num_layers=2), "eager"),
        (lambda: Recurrent("RNN", bidirectional=True), "eager"),
    ],
    ids=["gru-lstm", "gru-aot", "two-layers", "two-ways"],
)
def test_recurrent_layers_are_compiled_with_the_numbers_of_eager(net, backend, grad):
    sim, x = simulated(net, (2, 2, 2))
    run = torch.compile(sim.model, backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(allow_rnn=True):
        if grad:
            other = copy.deepcopy(sim)
            for found, expected in zip(step(sim, run, x), step(other, other.model, x), strict=True):
                assert torch.equal(found, expected)
        else:
            with torch.no_grad():
                assert torch.equal(run(x), sim.model(x))


def test_a_model_that_breaks_the_graph_runs_whole_without_the_compiler(caplog: pytest.LogCaptureFixture) -> None:
    """In parts, what quantizers compute would be taken for calls of the model."""
    sim, x = simulated(lambda: Recurrent("GRU"), (2, 2, 2))
    other, run = copy.deepcopy(sim), torch.compile(sim.model, backend="eager")
    for _ in range(2):
        found = step(sim, run, x), step(other, other.model, x)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not sim._simulator.unseen
    (told,) = [record.message for record in caplog.records if record.name == "bitwright"]
    assert "Recurrent: torch.compile breaks its graph" in told and "allow_rnn = True" in told


class Hidden(nn.Module):
    """Calls a function that the compiler does not show to function modes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.fc, self.call = nn.Linear(4, 4), getattr(nn.functional, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.fc(x))


@pytest.mark.parametrize("act", [nn.Hardswish, nn.Hardsigmoid])
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in-place"])
def test_modules_of_one_hidden_function_are_compiled_with_their_quantizers(act: type, inplace: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    sim = calibrated(QuantizationSimModel(nn.Sequential(nn.Linear(4, 4), act(inplace), nn.Linear(4, 2)).eval(), x), [x])
    with torch.no_grad():
        run = torch.compile(sim.model, backend="eager", fullgraph=True)
        assert torch.equal(run(x), sim.model(x))


@pytest.mark.parametrize(
    ("name", "instead"),
    [("hardswish", "torch.nn.Hardswish"), ("hardsigmoid", "torch.nn.Hardsigmoid"), ("tanh", "torch.tanh"),
     ("sigmoid", "torch.sigmoid")],
)  # fmt: skip
def test_functions_that_a_compiler_hides_are_refused_by_name(name: str, instead: str) -> None:
    x = torch.randn(8, 4)
    sim = calibrated(QuantizationSimModel(nn.Sequential(Hidden(name)).eval(), x), [x])
    message = f"0: torch.compile does not show torch.nn.functional.{name} to a simulation.*use {instead}"
    with pytest.raises(Exception, match=message), torch.no_grad():
        torch.compile(sim.model, backend="eager", fullgraph=True)(x)
    assert torch.isfinite(sim.model(x)).all()
