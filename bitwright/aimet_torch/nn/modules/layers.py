"""Functions as modules that have arguments of their own, or more than one call."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class CustomSiLU(nn.Module):
    """``x * sigmoid(x)``."""

    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x * sigmoid(x)``."""
        return x * self.sigmoid(x)


class ChannelShuffle(nn.Module):
    """Channels of groups, interleaved."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """The first input with its channels shuffled."""
        return F.channel_shuffle(args[0], self.groups)


class DepthToSpaceCRDMode(nn.Module):
    """Channels moved into square blocks of space, column-row-depth."""

    def __init__(self, block_size: Any) -> None:
        super().__init__()
        self.block_size = block_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with fewer channels and larger images."""
        size = self.block_size if isinstance(self.block_size, int) else self.block_size[0]
        return F.pixel_shuffle(x, size)


class DepthToSpaceDCRMode(nn.Module):
    """Channels moved into square blocks of space, depth-column-row."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with fewer channels and larger images."""
        batch, channels, height, width = x.shape
        size = self.block_size
        blocks = x.reshape(batch, size, size, channels // size**2, height, width)
        return blocks.permute(0, 3, 4, 1, 5, 2).reshape(batch, -1, height * size, width * size)


class ScatterElements(nn.Module):
    """Values written to indices along an axis."""

    def __init__(self, dim: int, reduce: str | None = None) -> None:
        super().__init__()
        self.dim, self.reduce = dim, reduce

    def forward(self, x: torch.Tensor, index: torch.Tensor, src: Any) -> torch.Tensor:
        """``x`` with ``src`` at ``index``."""
        if self.reduce is None:
            return torch.scatter(x, self.dim, index, src)
        return torch.scatter(x, self.dim, index, src, reduce=self.reduce)


class OneHot(nn.Module):
    """Indices as vectors with one entry that is on."""

    def __init__(self, num_classes: int, off_value: Any, on_value: Any) -> None:
        super().__init__()
        self.num_classes, self.off_value, self.on_value = num_classes, off_value, on_value

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The vectors along a last axis."""
        hot = F.one_hot(inputs.to(torch.int64), self.num_classes)
        return self.off_value + hot * (self.on_value - self.off_value)


class CustomGather(nn.Module):
    """Slices picked by indices along an axis."""

    def forward(self, data: torch.Tensor, indices: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """The slices, in the shape of the indices; negative indices count from the end."""
        axis = axis % data.dim()
        picked = torch.index_select(data, axis, indices.flatten() % data.shape[axis])
        return picked.reshape(*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])


class Cast(nn.Module):
    """A change of dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` in the dtype."""
        return x.type(self.dtype)


ALL = (
    CustomSiLU, ChannelShuffle, DepthToSpaceCRDMode, DepthToSpaceDCRMode, ScatterElements, OneHot, CustomGather, Cast,
)  # fmt: skip
