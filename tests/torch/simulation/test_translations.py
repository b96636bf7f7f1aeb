"""Operators of torch whose translation to ONNX is our own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from bitwright.compare.verify import verify_folder
from bitwright.torch import QuantizationSimModel


def squeezed(x: Tensor) -> Tensor:
    return x.squeeze(1).unsqueeze(-1).squeeze(-1)


def all_squeezed(x: Tensor) -> Tensor:
    return x[:, None].squeeze((1, 2))


def halves(x: Tensor) -> Tensor:
    return x.half().sort(dim=1, stable=True).values.float()


def ordered(x: Tensor) -> Tensor:
    order = x.detach()[0, :, 0].argsort(stable=True, descending=True)
    return x[:, order]


def ties(x: Tensor) -> Tensor:
    keys = torch.tensor([2, 1, 2, 1, 3]) + 0 * x.detach()[0, :, 0].long()
    return x[:, keys.sort(stable=True).indices] * (keys > 1).sort(stable=True).values[:, None]


class Net(nn.Module):
    """A layer, and what each function makes of its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [f(self.fc(x)) for f in (squeezed, all_squeezed, halves, ordered, ties)]


@pytest.mark.slow_variants("True")
@pytest.mark.parametrize("free", [False, True])
def test_the_file_computes_what_torch_does(free: bool, tmp_path: Path) -> None:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    sim = QuantizationSimModel(Net().eval(), x)
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path, "m", dynamic_batch=free)
    found = ort.InferenceSession(tmp_path / "m_float.onnx").run(None, {"x": x.numpy()})
    with sim.in_float():
        for one, other in zip(found, sim.model(x), strict=True):
            torch.testing.assert_close(torch.from_numpy(one), other, rtol=1e-5, atol=1e-5)
    assert verify_folder(tmp_path).ok


class Guarded(nn.Module):
    """Constants next to zero and one: the guard of a division, factors, parameters of no axes."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.fc, self.eps = nn.Linear(8, 8), eps
        self.factor, self.shift = nn.Parameter(torch.tensor(1.000004)), nn.Parameter(torch.tensor(3e-9))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.fc(x).relu()
        guarded = y / (y * y + self.eps).sqrt()
        return guarded, (y * 0 + self.shift) * 1e8, (x * self.factor - x) * 1e4, (x / 1.000003 - x) * 1e4


@pytest.mark.parametrize("eps", [1e-15, 1e-8, 1e-3])
def test_no_constant_is_lost(eps: float, tmp_path: Path) -> None:
    """The exporter's rules take ``+ 1e-15`` for an addition of zero: the file divided zero by zero."""
    torch.manual_seed(0)
    model, x = Guarded(eps).eval(), torch.randn(16, 8)
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path, "m", x)
    session = ort.InferenceSession(tmp_path / "m_float.onnx")
    assert [i.name for i in session.get_inputs()] == ["x"]
    for got, wanted in zip(session.run(None, {"x": x.numpy()}), model(x), strict=True):
        np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=0.05, atol=1e-6)
    assert sim.verify(x).ok
