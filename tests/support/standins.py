"""Small networks trained within seconds on data that everybody has: for what post-training methods must not lose.

A squeeze-and-excite network and a denoiser with skips on scikit-learn's digits, and a tone detector that starts from a
spectrum, on synthetic sound. Each is trained from a seed on one thread, so that two runs on one machine give one network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Standin:
    """A trained network with its data.

    Attributes:
        model: in eval mode.
        samples: what calibration samples are drawn from.
        test: inputs that neither training nor calibration sees.
        score: (the model as a function of a batch) -> metric on ``test``, higher is better.
    """

    model: nn.Module
    samples: Tensor
    test: Tensor
    score: Callable[[Run], float]

    def batches(self, seed: int, count: int = 256, size: int = 32) -> list[Tensor]:
        """Calibration data."""
        order = np.random.default_rng(seed).permutation(len(self.samples))[:count]
        return list(self.samples[order].split(size))


class SqueezeExcite(nn.Module):
    """Inverted residual block whose channels are weighted by what their means say."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, ratio: int = 4) -> None:
        super().__init__()
        wide = inputs * ratio
        self.expand = nn.Sequential(nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        self.depth = nn.Sequential(
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()
        )
        self.squeeze, self.excite = nn.Conv2d(wide, wide // 4, 1), nn.Conv2d(wide // 4, wide, 1)
        self.project = nn.Sequential(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        y = self.project(y * gate)
        return x + y if self.skip else y


class SqueezeExciteNet(nn.Module):
    """Classifier of pictures."""

    def __init__(self, channels: int = 1, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.Hardswish()
        )
        self.blocks = nn.Sequential(
            SqueezeExcite(width, width), SqueezeExcite(width, 2 * width, 2), SqueezeExcite(2 * width, 2 * width),
            SqueezeExcite(2 * width, 3 * width, 2), SqueezeExcite(3 * width, 3 * width),
        )  # fmt: skip
        self.head = nn.Linear(3 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Denoiser(nn.Module):
    """Two scales with skips between them; the last 1 x 1 convolution gives the clean picture."""

    def __init__(self, channels: int = 1, width: int = 16) -> None:
        super().__init__()

        def pair(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, 1, 1), nn.LeakyReLU(0.1),
                nn.Conv2d(outputs, outputs, 3, 1, 1), nn.LeakyReLU(0.1),
            )  # fmt: skip

        self.down1, self.down2 = pair(channels, width), pair(width, 2 * width)
        self.middle, self.up2 = pair(2 * width, 2 * width), pair(4 * width, width)
        self.up1 = pair(2 * width, width)
        self.last = nn.Conv2d(width + channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        y = self.up2(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        y = self.up1(torch.cat([F.interpolate(y, scale_factor=2.0), a], 1))
        return self.last(torch.cat([y, x], 1))


class ToneDetector(nn.Module):
    """Sound -> short-time spectrum by a convolution -> magnitude -> logarithm -> classifier."""

    def __init__(self, size: int = 128, classes: int = 4) -> None:
        super().__init__()
        bins, time = size // 2 + 1, torch.arange(size)
        angle = 2 * math.pi * torch.arange(bins)[:, None] * time[None] / size
        window = torch.hann_window(size)
        self.register_buffer("basis", torch.cat([angle.cos() * window, angle.sin() * window])[:, None])
        self.bins, self.hop = bins, size // 2
        self.body = nn.Sequential(
            nn.Conv1d(bins, 96, 3, 1, 1), nn.ReLU(), nn.Conv1d(96, 64, 3, 2, 1), nn.ReLU(),
            nn.Conv1d(64, 64, 3, 2, 1), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv1d(x[:, None], self.basis, stride=self.hop)
        real, imaginary = y[:, : self.bins], y[:, self.bins :]
        magnitude = torch.sqrt(real * real + imaginary * imaginary + 1e-12)
        return self.head(self.body(torch.log(magnitude + 1e-5)).mean(2))


def _train(
    model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], epochs: int, lr: float = 4e-3
) -> nn.Module:
    """``model``, trained by Adam under one cosine."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    steps = epochs * math.ceil(len(x) / 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def _accuracy(x: Tensor, y: Tensor) -> Callable[[Run], float]:
    def score(run: Run) -> float:
        with torch.no_grad():
            right = [(run(a).argmax(1) == b).sum() for a, b in zip(x.split(100), y.split(100), strict=True)]
        return 100 * float(sum(right)) / len(y)

    return score


def _psnr(x: Tensor, clean: Tensor) -> Callable[[Run], float]:
    def score(run: Run) -> float:
        with torch.no_grad():
            found = torch.cat([run(part) for part in x.split(100)])
        return float(-10 * torch.log10((found - clean).square().mean()))

    return score


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy((pixels[order] / 16).astype(np.float32)).reshape(-1, 1, 8, 8)
    return F.interpolate(x, scale_factor=2.0, mode="bilinear"), torch.from_numpy(labels[order].astype(np.int64))


def squeeze_excite(epochs: int = 12) -> Standin:
    """Digits, 16 x 16 with noise."""
    torch.manual_seed(0)
    x, y = _digits()
    x = x + 0.35 * torch.randn(x.shape)
    model = _train(SqueezeExciteNet(), x[:1000], y[:1000], F.cross_entropy, epochs)
    return Standin(model, x[:1000], x[1000:], _accuracy(x[1000:], y[1000:]))


def denoiser(epochs: int = 16) -> Standin:
    """Digits, 16 x 16, out of noise."""
    torch.manual_seed(0)
    clean, _ = _digits()
    x = clean + 0.1 * torch.randn(clean.shape)
    model = _train(Denoiser(), x[:1000], clean[:1000], F.mse_loss, epochs)
    return Standin(model, x[:1000], x[1000:], _psnr(x[1000:], clean[1000:]))


def tone_detector(epochs: int = 12) -> Standin:
    """Noise, and tones of three kinds at levels over five decades."""
    torch.manual_seed(0)
    count, length = 2400, 2048
    time = torch.arange(length) / 16000
    kind = torch.randint(0, 4, (count,))
    pitch = 150 + 250 * torch.rand(count)
    bend = torch.where(kind == 3, 0.3, 0.0)[:, None] * torch.sin(2 * math.pi * 8 * time)
    phase = 2 * math.pi * pitch[:, None] * time * (1 + bend / 4)
    harmonics = sum(torch.sin(n * phase) / n for n in range(1, 9))
    voices = [torch.zeros(count, length), torch.sin(phase), harmonics, harmonics]
    x = torch.stack(voices)[kind, torch.arange(count)] + 0.3 * torch.randn(count, length)
    x = x * 10 ** (-3.5 * torch.rand(count, 1)) * 0.2
    model = _train(ToneDetector(), x[:1400], kind[:1400], F.cross_entropy, epochs)
    return Standin(model, x[:1400], x[1400:], _accuracy(x[1400:], kind[1400:]))


STANDINS: dict[str, Callable[[], Standin]] = {
    "squeeze_excite": squeeze_excite,
    "denoiser": denoiser,
    "tone_detector": tone_detector,
}
