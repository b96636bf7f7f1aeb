"""Where tensors lie, as far as reading a number of them makes the program wait."""

from __future__ import annotations

import torch


def on_host(device: torch.device) -> bool:
    """Whether numbers of tensors on ``device`` are at hand; elsewhere reading one waits for all work that was queued there."""
    return device.type == "cpu"
