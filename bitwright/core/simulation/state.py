"""Changes of a simulation that happen as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from bitwright.core.simulation.protocols import Undo


class Remembering(Protocol):
    """What can keep its state: a simulation of either front end."""

    def remember(self, *, parameters: bool = False) -> Undo:
        """Keep the state; the function returned brings it back."""


@contextmanager
def all_or_nothing(sim: Remembering, *, parameters: bool = False) -> Iterator[None]:
    """Bring the state of ``sim`` back when the block ends in an exception of any kind, Ctrl-C among them.

    Args:
        sim: a simulation.
        parameters: keep the values of parameters and buffers too, for a block that changes them.
    """
    restore = sim.remember(parameters=parameters)
    try:
        yield
    except BaseException:
        restore()
        raise
