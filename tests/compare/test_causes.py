"""What kernels make of three kinds of models, and the cause that a comparison names for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from bitwright import drift
from bitwright.compare.agreement import Agreement
from bitwright.compare.causes import close, removes
from bitwright.torch import QuantizationSimModel


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.project(x)
        return torch.softmax(h @ h.transpose(1, 2), -1) @ h


class Pooling(nn.Module):
    """The mean of pixels that the network itself weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.score, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.conv(x)).flatten(2)
        return self.head((h * torch.softmax(self.score(h.transpose(1, 2)).transpose(1, 2), -1)).sum(-1))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(12, 40), nn.Linear(12, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(self.gate(x), -1) * torch.tanh(self.experts(x))).sum(-1, keepdim=True)


@pytest.mark.quick_variants("Experts-shape3-3.0")
@pytest.mark.parametrize(
    ("model", "shape", "size"),
    [
        (Attention, (2, 26, 16), 0.3),
        (Attention, (2, 33, 16), 0.3),
        (Pooling, (4, 3, 8, 8), 4.0),
        (Experts, (16, 12), 3.0),
    ],
)
def test_a_fused_kernel_is_named(model: type[nn.Module], shape: tuple[int, ...], size: float) -> None:
    torch.manual_seed(0)
    net, x = model().eval(), size * torch.randn(*shape)
    # no sum saturates, on any CPU; the softmax of the experts follows the last layer
    sim = QuantizationSimModel(net, x, default_param_bw=7, config_file={"tail": "quantized"})
    sim.compute_encodings([x])
    report = sim.drift("file", "onnxruntime", x)
    assert report.first is not None and report.first.cause == "fusion", report.to_text()
    assert "QLinearSoftmax" in report.first.text and report.first.name == "softmax.output[0]"


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 32, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.q(x) @ self.k(x).transpose(1, 2) / 6, -1) @ self.v(x)


def layers(*sizes: tuple[int, int]) -> nn.Module:
    return nn.Sequential(*(part for size in sizes for part in (nn.Linear(*size, bias=False), nn.Tanh())))


@pytest.mark.quick_variants("layer")
@pytest.mark.parametrize(
    "build", [lambda: layers((64, 128)), lambda: layers((64, 128), (128, 96), (96, 32)), Skip, Heads],
    ids=["layer", "layers", "skip", "heads"],
)  # fmt: skip
def test_products_fused_with_activations_that_nobody_quantized_are_named(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(2, 5, 64)
    sim = QuantizationSimModel(model, x, preset="w4g32")
    sim.compute_encodings([x])
    sim.export(tmp_path, "fused", x, weight_only="fused", target="packed")
    for side in ("float", "simulation", "file"):
        report = drift(f"{tmp_path}@{side}", "onnxruntime")
        assert report.first is not None and report.first.cause == "4-bit fusion", report.to_text()


@pytest.mark.quick_variants("three-axes")
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(75_000, 3), (2, 75_000)),
        (lambda: nn.Linear(140_000, 3), (2, 140_000)),
        (lambda: nn.Conv2d(3000, 3, 5), (1, 3000, 6, 6)),
        (lambda: nn.Linear(75_000, 3, bias=False), (1, 2, 75_000)),
    ],
    ids=["linear", "longer", "convolution", "three-axes"],
)
def test_an_overflow_of_the_accumulator_is_named(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    model = nn.Sequential(layer(), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight.fill_(0.01)
    x = 0.98 + 0.02 * torch.rand(*shape, generator=torch.Generator().manual_seed(0))
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings([x])
    sim.export(tmp_path, "long", x)
    for side in ("simulation", "file"):
        report = drift(f"{tmp_path}@{side}", "onnxruntime")
        assert report.first is not None and report.first.cause == "overflow", report.to_text()


def test_a_run_that_leaves_most_differences_has_not_removed_them() -> None:
    """98.9 % of equal codes without a suspected bias became 99.1 %, which alone would count as agreement."""
    before = Agreement(0.989, 1.0, 10_000)
    assert close(Agreement(0.991, 1.0, 10_000)) and not removes(before, Agreement(0.991, 1.0, 10_000))
    assert removes(before, Agreement(0.996, 1.0, 10_000)) and removes(before, Agreement(1.0, 0.0, 10_000))
    assert removes(Agreement(0.995, 40.0, 10_000), Agreement(0.994, 1.0, 10_000))
    assert not removes(before, Agreement(0.996, 2.0, 10_000))
