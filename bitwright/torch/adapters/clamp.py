"""The activation that cuts every channel at bounds of its own."""

from __future__ import annotations

import torch
from torch import nn


class ChannelClamp(nn.Module):
    """``min(max(x, low[c]), high[c])`` for each channel ``c``: what a ReLU6 becomes when its channels are rescaled.

    Args:
        low, high: bounds, shape [C], of the dtype and on the device of the activations.
        axis: of the channels.
        rank: of the activations.
    """

    low: torch.Tensor
    high: torch.Tensor

    def __init__(self, low: torch.Tensor, high: torch.Tensor, axis: int, rank: int) -> None:
        super().__init__()
        shape = [-1 if i == axis else 1 for i in range(rank)]
        self.register_buffer("low", low.reshape(shape[axis:]))
        self.register_buffer("high", high.reshape(shape[axis:]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` cut; any shape that the bounds broadcast to."""
        return torch.clamp(x, self.low, self.high)

    def extra_repr(self) -> str:
        """Number of channels."""
        return f"{self.low.numel()} channels"
