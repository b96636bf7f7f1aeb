"""``aimet_torch.experimental.pgs``: larger gradients close to thresholds, for every simulation that this thread trains.

New code says which simulation is meant: :func:`bitwright.torch.pivot_gradients`.
"""

from __future__ import annotations

import threading

import torch

from bitwright.aimet_torch._core import PivotGradient, TensorGrid
from bitwright.errors import ConfigError

__all__ = ["disable_pgs", "enable_pgs", "get_pgs_eps", "get_pgs_multiplier", "is_pgs_enabled"]


class _Current(threading.local):
    """What a thread enabled; ``torch.compile`` compiles anew when it changes (a context variable it could not read)."""

    gradient: PivotGradient | None = None


_CURRENT = _Current()


def enable_pgs(eps: float = 0.05, multiplier: float = 3.0) -> None:
    """Multiply the gradients of what lies within ``eps / 2`` steps of a threshold, in forwards of this thread from now on.

    Raises:
        ConfigError: (a ValueError) ``eps`` is not above 0 and at most 1, or ``multiplier`` is 1 or has no meaning.
    """
    if multiplier == 1:
        raise ConfigError("multiplier", "it is 1, which changes nothing", "use another number, or call disable_pgs()")
    _CURRENT.gradient = PivotGradient(eps, multiplier)


def disable_pgs() -> None:
    """Leave gradients as they are from now on."""
    _CURRENT.gradient = None


def is_pgs_enabled() -> bool:
    """Whether this thread called :func:`enable_pgs` last."""
    return _CURRENT.gradient is not None


def get_pgs_eps() -> float:
    """Width of the zone in steps; 0 where none is enabled."""
    found = _CURRENT.gradient
    return 0.0 if found is None else found.eps


def get_pgs_multiplier() -> float:
    """Of the gradients; 1 where none is enabled."""
    found = _CURRENT.gradient
    return 1.0 if found is None else found.multiplier


def pivoted(x: torch.Tensor, grid: TensorGrid) -> torch.Tensor:
    """``x`` with the gradient that this thread enabled: what the quantizers of this layer's simulations call."""
    found = _CURRENT.gradient
    return x if found is None else found(x, grid)
