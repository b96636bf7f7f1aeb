"""Complex arithmetic in exported files: rotary embeddings, spectra, inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwright.errors import ExportError
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated


class Rotated(nn.Module):
    """Rotary positions as complex numbers of length one, made in the forward or kept in a buffer."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("frequencies", 0.1 ** torch.arange(0, 1, 0.25))
        angles = torch.arange(16)[:, None] * 0.1 ** torch.arange(0, 1, 0.25)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles) if kept else None)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies
        turns = torch.polar(torch.ones_like(angles), angles) if self.turns is None else self.turns[: x.shape[1]]
        q, k = (torch.view_as_complex(f(x).unflatten(-1, (-1, 2))) * turns[None] for f in (self.q, self.k))
        return torch.view_as_real(q).flatten(-2) @ torch.view_as_real(k).flatten(-2).transpose(1, 2)


class Arithmetic(nn.Module):
    """Everything that has a rule, and joins of complex and real values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.matrix = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.inner = nn.Linear(8, 8, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(self.layer(x), x)
        z = (z @ self.matrix) / (z.conj() + 2 + 1j) + 1.5 * z - z * 0.5j
        z = torch.cat([z[..., :4], z[..., 4:].exp() * 0.1], -1)
        u = z**2 + z.reciprocal() * torch.sgn(z) - z.log().masked_fill(x > 1, 0.5)
        u = torch.where(x > 0, u, x) + torch.stack([x, z], 1).sum(1) + 1 / (3 + z.abs())
        u = self.inner(u) + 0.1 * torch.einsum("bi,bj,b,ij->bj", u, z, x[:, 0], self.matrix.conj())
        u = torch.addmm(u, z, self.matrix.t()) + torch.baddbmm(u[None], z[None], self.matrix[None])[0]
        first, second = u.chunk(2, -1)
        return self.layer(torch.cat([first.real, second.imag], -1).clamp(-3, 3) + torch.angle(u))


class Spectrum(nn.Module):
    """A mask on a short-time spectrum, and the signal of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.window = nn.Conv2d(2, 2, 3, padding=1), nn.Buffer(torch.hann_window(32))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.stft(x, 32, 8, window=self.window, return_complex=True)
        mask = self.mask(torch.view_as_real(z).permute(0, 3, 1, 2))
        return torch.istft(z * torch.complex(mask[:, 0], mask[:, 1]), 32, 8, window=self.window, length=x.shape[-1])


class Ends(nn.Module):
    """Complex input and output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, z: Tensor) -> dict[str, Tensor]:
        y = self.layer(z.abs() * z.real)
        return {"spectrum": torch.fft.fft(y), "product": z * y}


class Kept(Rotated):
    """Turns looked up by the length, which torch.export refuses, and written into a tensor of complex zeros."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        turns = torch.zeros(n + 1, 4, dtype=torch.complex64, device=x.device)
        turns[:n] = {n: self.turns}[n][:n].to(x.device, torch.complex64)
        turns = (turns + torch.full((4,), 1 - 2j))[:-1] * torch.ones(n, 1, dtype=torch.complex64)
        q, k = (torch.view_as_complex(f(x).unflatten(-1, (-1, 2))) * turns[None] for f in (self.q, self.k))
        return torch.view_as_real(q).flatten(-2) @ torch.view_as_real(k).flatten(-2).transpose(1, 2)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "turns made in the forward": (lambda: Rotated(False), lambda: torch.randn(2, 5, 8)),
    "turns in a buffer": (lambda: Rotated(True), lambda: torch.randn(2, 5, 8)),
    "turns written into zeros": (lambda: Kept(True), lambda: torch.randn(2, 5, 8)),
    "arithmetic": (Arithmetic, lambda: torch.randn(4, 8)),
    "spectrum": (Spectrum, lambda: torch.randn(2, 128)),
    "input and output": (Ends, lambda: torch.randn(2, 8, dtype=torch.complex64)),
}


@pytest.mark.parametrize("case", CASES)
def test_complex_numbers_are_pairs_of_real_ones_in_the_file(case: str) -> None:
    torch.manual_seed(0)
    make, draw = CASES[case]
    batches = [draw() for _ in range(2)]
    sim = calibrated(QuantizationSimModel(make().eval(), batches[0]), batches)
    options: dict[str, Any] = (
        {"dynamic_batch": True} if case in ("turns made in the forward", "turns in a buffer") else {}
    )
    report = sim.verify(batches[0], **options)
    assert report.ok, report
    assert all(row.as_float > 100 for row in report.outputs)


def test_an_operator_without_a_rule_is_refused_with_its_line_and_a_remedy() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(torch.complex(self.layer(x), x)).real

    x = torch.randn(2, 8)
    sim = calibrated(QuantizationSimModel(Root().eval(), x), [x])
    with pytest.raises(
        ExportError, match=r"test_complex_pairs.py:\d+, in forward: sqrt of complex numbers has no operator.*sums"
    ):
        sim.verify(x)
