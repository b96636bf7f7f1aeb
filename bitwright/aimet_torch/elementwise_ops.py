"""``aimet_torch.elementwise_ops``: functions as modules, under the older path of :mod:`.nn.modules.custom`."""

from __future__ import annotations

from typing import Any

from bitwright.aimet_torch.nn.modules import custom


def __getattr__(name: str) -> Any:
    return getattr(custom, name)
