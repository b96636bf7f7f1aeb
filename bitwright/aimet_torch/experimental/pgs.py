"""``aimet_torch.experimental.pgs``: larger gradients close to thresholds, for every simulation that this thread trains.

New code says which simulation is meant: :func:`bitwright.torch.pivot_gradients`. That one works under ``torch.compile`` too,
which has no effect on and takes none of what is set here.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch

from bitwright.aimet_torch._core import PivotGradient, TensorGrid
from bitwright.errors import ConfigError

__all__ = ["disable_pgs", "enable_pgs", "get_pgs_eps", "get_pgs_multiplier", "is_pgs_enabled"]

_CURRENT: ContextVar[PivotGradient | None] = ContextVar("pivot gradient", default=None)


def enable_pgs(eps: float = 0.05, multiplier: float = 3.0) -> None:
    """Multiply the gradients of what lies within ``eps / 2`` steps of a threshold, in forwards of this thread from now on.

    Raises:
        ConfigError: (a ValueError) ``eps`` is not above 0 and at most 1, or ``multiplier`` is 1 or has no meaning.
    """
    if multiplier == 1:
        raise ConfigError(
            "multiplier", "it is 1, which changes nothing", "use another number, or call disable_pgs()"
        )
    _CURRENT.set(PivotGradient(eps, multiplier))


def disable_pgs() -> None:
    """Leave gradients as they are from now on."""
    _CURRENT.set(None)


def is_pgs_enabled() -> bool:
    """Whether this thread called :func:`enable_pgs` last."""
    return _CURRENT.get() is not None


def get_pgs_eps() -> float:
    """Width of the zone in steps; 0 where none is enabled."""
    found = _CURRENT.get()
    return 0.0 if found is None else found.eps


def get_pgs_multiplier() -> float:
    """Of the gradients; 1 where none is enabled."""
    found = _CURRENT.get()
    return 1.0 if found is None else found.multiplier


def pivoted(x: torch.Tensor, grid: TensorGrid) -> torch.Tensor:
    """``x`` with the gradient that this thread enabled: what the quantizers of this layer's simulations call."""
    if torch.compiler.is_dynamo_compiling():  # a compiler cannot read what belongs to a thread
        return x
    found = _CURRENT.get()
    return x if found is None else found(x, grid)
