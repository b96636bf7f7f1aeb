"""Small networks that are trained here in seconds, each with a fault that nobody planted: what such models are like.

A denoiser whose output is a picture, so that the rounding of its last convolution is seen as it is; a classifier of sounds
behind a spectrum, whose power spans many decades; and an attention model in which one channel is far larger than the others,
as in language models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Denoiser(nn.Module):
    """A U-Net of two levels; the last convolution of size one makes the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 24, 3, 2, padding=1)
        self.deep, self.up = nn.Conv2d(24, 24, 3, padding=1), nn.ConvTranspose2d(24, 16, 2, 2)
        self.join, self.last = nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        z = F.relu(self.deep(F.relu(self.down(y))))
        return self.last(F.relu(self.join(torch.cat([F.relu(self.up(z)), y], 1))))


def pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy and clean pictures of rectangles, ``[count, 1, 16, 16]``."""
    place = torch.arange(16.0)
    clean = torch.zeros(count, 16, 16)
    for _ in range(3):
        low, high = torch.rand(2, count, 2, generator=generator).mul(16).sort(0).values
        rows = (place >= low[:, :1]) & (place <= high[:, :1])
        columns = (place >= low[:, 1:]) & (place <= high[:, 1:])
        level = torch.randn(count, 1, 1, generator=generator)
        clean = torch.where(rows[:, :, None] & columns[:, None, :], level, clean)
    noisy = clean + 0.3 * torch.randn(count, 16, 16, generator=generator)
    return noisy[:, None], clean[:, None]


class Listener(nn.Module):
    """A short-time Fourier transform as convolutions, magnitude, logarithm, and two convolutions over time.

    Args:
        bands: put 16 bands of the power in the place of the magnitude, as front ends of speech recognition do.
    """

    def __init__(self, bands: bool = False) -> None:
        super().__init__()
        self.bands = nn.Conv1d(33, 16, 1, bias=False) if bands else None
        if self.bands is not None:
            steps = torch.arange(33.0) / 2
            overlap = torch.relu(1 - (steps - torch.arange(16.0)[:, None]).abs())
            self.bands.weight = nn.Parameter(overlap[:, :, None], requires_grad=False)
        angles = 2 * torch.pi * torch.arange(33.0)[:, None] * torch.arange(64.0) / 64
        window = torch.hann_window(64)
        self.register_buffer("real", (torch.cos(angles) * window)[:, None])
        self.register_buffer("imaginary", (torch.sin(angles) * window)[:, None])
        self.a, self.b, self.head = (nn.Conv1d(16 if bands else 33, 16, 3), nn.Conv1d(16, 16, 3), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        real, imaginary = (F.conv1d(x, w, stride=32) for w in (self.real, self.imaginary))
        power = real.square() + imaginary.square()
        y = torch.log(torch.sqrt(power + 1e-6) if self.bands is None else self.bands(power) + 1e-4)
        return self.head(F.relu(self.b(F.relu(self.a(y)))).mean(-1))


def sounds(count: int, generator: torch.Generator, decades: float = 1.0) -> tuple[Tensor, Tensor]:
    """Rising, falling, steady and double tones, from soft to loud, ``[count, 1, 512]``; and which it is."""
    kind = torch.randint(0, 4, (count,), generator=generator)
    start = 0.3 + 1.2 * torch.rand(count, 1, generator=generator)
    time = torch.arange(512.0)
    slope = torch.tensor([0.002, -0.0005, 0.0, 0.0])[kind][:, None]
    tone = torch.sin(start * time + slope * time.square() / 2)
    tone = tone + torch.where(kind[:, None] == 3, torch.sin(1.5 * start * time), torch.zeros(1))
    loud = 10 ** (-decades * torch.rand(count, 1, generator=generator))
    return (loud * (tone + 0.02 * torch.randn(count, 512, generator=generator)))[:, None], kind


class Reader(nn.Module):
    """A transformer layer whose first norm makes one channel large; it says which symbol was the first to come twice."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(8, 32), nn.Embedding(12, 32)
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 8)
        with torch.no_grad():
            self.norm1.weight[5] = 30.0  # of language models, a few channels are so; training keeps it
            for layer in (self.q, self.k, self.v):
                layer.weight[:, 5] /= 30.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.symbols(tokens) + self.places.weight
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        x = x + self.down(F.relu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


def symbols(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of symbols, ``[count, 12]``; and the one that is there most often, the smallest of several."""
    tokens = torch.randint(0, 8, (count, 12), generator=generator)
    return tokens, F.one_hot(tokens, 8).sum(1).argmax(-1)


@dataclass(frozen=True)
class Natural:
    """A network, its data, and how it is trained.

    Attributes:
        make: the untrained network.
        data: (count, generator) -> inputs and what they should give.
        loss: (outputs, wanted) -> to be made small.
        steps: of training.
    """

    make: Callable[[], nn.Module]
    data: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[..., Any]
    steps: int = 200

    def trained(self) -> tuple[nn.Module, float, float]:
        """The network, trained by Adam from a fixed seed; its loss on new data before and after."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make()
        generator = torch.Generator().manual_seed(1)
        test = self.data(256, torch.Generator().manual_seed(2))
        before = self._loss(model, test)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(self.steps):
            inputs, wanted = self.data(64, generator)
            optimizer.zero_grad()
            self.loss(model(inputs), wanted).backward()
            optimizer.step()
        return model.eval(), before, self._loss(model, test)

    def _loss(self, model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
        with torch.no_grad():
            return float(self.loss(model(test[0]), test[1]))

    def batches(self, count: int = 4, rows: int = 32) -> tuple[list[Tensor], list[Tensor]]:
        """New data in batches."""
        generator = torch.Generator().manual_seed(3)
        pairs = [self.data(rows, generator) for _ in range(count)]
        return [x for x, _ in pairs], [y for _, y in pairs]


NATURAL = {
    "denoiser": Natural(Denoiser, pictures, F.mse_loss),
    "spectrum": Natural(partial(Listener, bands=True), sounds, F.cross_entropy),
    "soft sounds": Natural(Listener, partial(sounds, decades=3.0), F.cross_entropy),
    "attention": Natural(Reader, symbols, F.cross_entropy, 400),
}
