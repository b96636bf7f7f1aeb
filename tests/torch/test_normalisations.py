"""A normalisation written out keeps the precision of the same one as a single call, on batches with padding too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bitwright.core.simulation.float_model import sqnr
from bitwright.torch import QuantizationSimModel

CHANNELS = 16


class Written(nn.Module):
    """A norm as a function of the input, with a weight and a bias that are not trivial."""

    def __init__(self, form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(CHANNELS)), nn.Parameter(torch.zeros(CHANNELS))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.weight, self.bias)


class Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.norm, self.b = nn.Linear(CHANNELS, CHANNELS, bias=False), norm, nn.Linear(CHANNELS, CHANNELS)
        nn.init.uniform_(norm.weight, 0.3, 3)  # type: ignore[arg-type]
        if getattr(norm, "bias", None) is not None:
            nn.init.normal_(norm.bias, 0, 0.2)  # type: ignore[arg-type]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x * mask)))


def _rms(x: Tensor, root: Callable[[Tensor], Tensor]) -> Tensor:
    x32 = x.to(torch.float32)
    return (x32 * root(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _moments(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x * x).mean(-1, keepdim=True) - mean * mean).clamp(min=0)
    return (x - mean) * (torch.reciprocal(torch.sqrt(variance + 1e-5)) * w) + b


def _layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return w * ((x - mean) / torch.sqrt(variance + 1e-5)) + b


RMS = {
    "rsqrt": lambda x, w, b: w * _rms(x, torch.rsqrt),
    "power": lambda x, w, b: _rms(x, lambda v: v**-0.5) * w,
    "reciprocal": lambda x, w, b: _rms(x, lambda v: torch.reciprocal(torch.sqrt(v))) * w,
    "one over": lambda x, w, b: _rms(x, lambda v: 1 / torch.sqrt(v)) * w,
    "divided": lambda x, w, b: x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w,
    "one plus weight": lambda x, w, b: _rms(x, torch.rsqrt) * (1.0 + (w - 1).float()),
    "by norm": lambda x, w, b: x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) * CHANNELS**-0.5).clamp(1e-3) * w,
}
LAYER = {"moments": _moments, "var_mean": _layer}


@pytest.fixture(scope="module")
def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    mask = torch.ones(4, 16, 1)
    mask[1, 12:] = 0
    return [(torch.randn(4, 16, CHANNELS), mask) for _ in range(3)]


def decibels(norm: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> tuple[float, QuantizationSimModel]:
    """Signal to noise at the tokens that are no padding."""
    model = Net(norm).eval()
    sim = QuantizationSimModel(model, batches[0])
    sim.compute_encodings(batches, progress=False)
    keep = batches[0][1][..., 0].bool()
    with torch.no_grad():
        want, got = model(*batches[0])[keep], sim.model(*batches[0])[keep]
    return sqnr(want.numpy(), got.numpy()), sim


@pytest.mark.parametrize("name", RMS)
def test_rms_norms_with_padding_lose_what_the_single_call_loses(
    name: str, batches: list[tuple[Tensor, Tensor]]
) -> None:
    one, _ = decibels(nn.RMSNorm(CHANNELS, eps=1e-6), batches)
    written, sim = decibels(Written(RMS[name]), batches)
    assert one > 30
    assert written > one - 1
    assert {row.status for row in sim.coverage() if row.name.startswith("norm.") and "output" in row.name} <= {
        "float", "shared", "quantized"
    }  # fmt: skip
    assert not [site for site in sim.quantizers if site.startswith("norm.")]


@pytest.mark.parametrize("name", LAYER)
def test_layer_norms_with_padding_lose_what_the_single_call_loses(
    name: str, batches: list[tuple[Tensor, Tensor]]
) -> None:
    one, _ = decibels(nn.LayerNorm(CHANNELS), batches)
    written, sim = decibels(Written(LAYER[name]), batches)
    assert one > 30
    assert written > one - 1
    assert not [site for site in sim.quantizers if site.startswith("norm.")]


def test_the_file_of_a_written_norm_agrees_with_its_simulation(
    tmp_path: Path, batches: list[tuple[Tensor, Tensor]]
) -> None:
    _, sim = decibels(Written(RMS["rsqrt"]), batches)
    sim.export(tmp_path, "net", batches[0])
    assert sim.verify(batches[0]).ok
