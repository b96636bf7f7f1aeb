"""Small models and data that the scripts take for the user's own."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Convolutions with batch norms, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.relu2 = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(8 * 25, 10)
        for norm in (self.bn1, self.bn2):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
            norm.running_mean.normal_(std=0.2)
            norm.running_var.uniform_(0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.relu2(self.bn2(self.conv2(x)))
        return self.fc(self.pool(x).flatten(1))


class Residual(nn.Module):
    """An addition that is not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 3, 3, padding=1)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv2(self.relu(self.conv1(x)) + x)


class Separable(nn.Module):
    """A depthwise convolution between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.act1 = nn.ReLU()
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6)
        self.act2 = nn.ReLU()
        self.conv3 = nn.Conv2d(6, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv3(self.act2(self.depthwise(self.act1(self.conv1(x)))))


class Mlp(nn.Module):
    """Two linear layers and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.softmax(self.fc2(self.act(self.fc1(x))))


def images(count: int = 8, batch_size: int = 4) -> DataLoader:
    """Images with labels."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(count, 3, 12, 12, generator=generator)
    return DataLoader(TensorDataset(data, torch.arange(count) % 10), batch_size=batch_size)


def batch() -> torch.Tensor:
    """One batch of images."""
    return next(iter(images()))[0]
