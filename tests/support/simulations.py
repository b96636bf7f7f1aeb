"""Simulations that are calibrated."""

from __future__ import annotations

from typing import Any, TypeVar

Sim = TypeVar("Sim")


def calibrated(sim: Sim, *data: Any, **options: Any) -> Sim:
    """``sim`` itself, with encodings from ``data``; arguments are those of ``compute_encodings``, without progress bars."""
    made: Any = sim
    made.compute_encodings(*data, progress=False, **options)
    return sim
