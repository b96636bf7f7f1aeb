"""Inputs that no run can say anything about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.errors import ExportError


def check_not_empty(site: str, feeds: Mapping[str, Any]) -> None:
    """Refuse a batch without a sample, of which everything would be equal and fast.

    Args:
        site: for the message.
        feeds: by name. One empty input beside others is right: a cache of length 0.

    Raises:
        ExportError: every input that has axes is empty.
    """
    sizes = [array.size for array in map(np.asarray, feeds.values()) if array.ndim]
    if sizes and not any(sizes):
        problem = f"the batch holds no sample: {', '.join(f'{n} is {_shape(a)}' for n, a in feeds.items())}"
        raise ExportError(site, problem, "give a batch with at least one sample")


def _shape(array: Any) -> str:
    return "x".join(map(str, np.shape(array)))
