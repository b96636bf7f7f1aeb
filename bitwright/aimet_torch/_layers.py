"""What single layers say about the inputs they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bitwright.errors import ModelError

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONV_TRANSPOSES = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def smallest_input(layers: Sequence[nn.Module]) -> torch.Tensor:
    """An input that all of ``layers``, one after the other, can run on: zeros of a batch of two.

    Raises:
        ModelError: there is no layer with a weight among them whose inputs are known.
    """
    weighted: list[Any] = [m for m in layers if isinstance(m, (nn.Linear, *CONVS, *CONV_TRANSPOSES))]
    if not weighted:
        raise ModelError(
            "layers",
            f"{', '.join(type(layer).__name__ for layer in layers)}: no Conv, ConvTranspose or Linear among them",
            "name the layer whose batch norm it is",
        )
    first = weighted[0]
    channels = first.in_features if isinstance(first, nn.Linear) else first.in_channels
    size = [1] * (first.weight.dim() - 2)
    for layer in reversed(weighted):
        for axis in range(len(size) if isinstance(layer, CONVS) else 0):
            reach = layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1
            size[axis] = (size[axis] - 1) * layer.stride[axis] + reach
    return torch.zeros((2, channels, *size), dtype=first.weight.dtype, device=first.weight.device)
