"""``Simulation``: what the simulations of both front ends share; changes that happen whole or not at all; locking.

:class:`Occupancy` lets any number of threads run a simulation, or one thread change it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from bitwright.core.graph.graph import Graph
from bitwright.core.health.diagnosis import Repair
from bitwright.core.placement.plan import Plan
from bitwright.core.placement.rules import Rules
from bitwright.core.simulation.calibration import CalibrationLog
from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.sites import SiteMap
from bitwright.errors import BusyError


class Occupancy:
    """Counts the threads that run a simulation and knows the one that changes it.

    A copy is unoccupied: it belongs to another simulation.

    Args:
        instead: what a thread can do that does not want to wait, for messages.
    """

    def __init__(self, instead: str) -> None:
        self._instead = instead
        self._lock = threading.Lock()
        self._running: dict[threading.Thread, int] = {}
        self._owners: list[tuple[threading.Thread, str]] = []  # all of one thread; the innermost last

    def __getstate__(self) -> dict[str, str]:
        return {"instead": self._instead}

    def __setstate__(self, state: dict[str, str]) -> None:
        Occupancy.__init__(self, **state)

    def enter(self) -> None:
        """This thread starts to run the simulation.

        Raises:
            BusyError: another thread is changing it.
        """
        me = threading.current_thread()
        with self._lock:
            self._refuse_owner(me)
            self._running[me] = self._running.get(me, 0) + 1

    def leave(self) -> None:
        """This thread is through with what it entered."""
        me = threading.current_thread()
        with self._lock:
            left = self._running.get(me, 0) - 1
            if left > 0:
                self._running[me] = left
            else:
                self._running.pop(me, None)

    def check(self) -> None:
        """Refuse this thread while another one is changing the simulation.

        Raises:
            BusyError: with the name of the thread and what it does.
        """
        with self._lock:
            self._refuse_owner(threading.current_thread())

    @property
    def crowded(self) -> bool:
        """Whether another thread runs the simulation right now."""
        return bool(self._others())

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """No other thread runs or changes the simulation inside the block; ``what`` is done there, for messages.

        Raises:
            BusyError: another thread runs it or changes it.
        """
        me = threading.current_thread()
        with self._lock:
            self._refuse_owner(me)
            others = self._others()
            if others:
                names = ", ".join(repr(thread.name) for thread in others)
                raise BusyError(
                    what,
                    f"it changes what every run of the simulation reads, and thread {names} is running it",
                    f"let that run end first, or {self._instead}",
                )
            self._owners.append((me, what))
        try:
            yield
        finally:
            with self._lock:
                self._owners.pop()

    def _others(self) -> list[threading.Thread]:
        me = threading.current_thread()
        # a thread that ended inside a block of `sim.active()` runs nothing any more
        return [thread for thread in list(self._running) if thread is not me and thread.is_alive()]

    def _refuse_owner(self, me: threading.Thread) -> None:
        if not self._owners:
            return
        thread, what = self._owners[-1]
        if thread is not me and thread.is_alive():
            raise BusyError(
                "QuantizationSimModel",
                f"thread {thread.name!r} is changing it ({what}), so no other thread can use it",
                f"wait until that has ended, or {self._instead}",
            )


class Lock:
    """A reentrant lock that copies do not share."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        Lock.__init__(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Simulation(Protocol):
    """A simulation of either front end, as its sites, its files and whoever changes it see it."""

    @property
    def graph(self) -> Graph:
        """The data flow it was placed on."""

    @property
    def quantizers(self) -> SiteMap:
        """Every site by name."""

    @property
    def rules(self) -> Rules:
        """What was asked for."""

    @property
    def plan(self) -> Plan:
        """Where the rules put quantizers, and why not elsewhere; which values lie on their grids."""

    @property
    def repairs(self) -> Sequence[Repair]:
        """What keeps the model's operators from handing on NaN and Inf."""

    @property
    def origin(self) -> Mapping[str, str]:
        """How the simulation was made, as far as whoever made it says: preset, recipe, data."""

    @property
    def calibration_log(self) -> CalibrationLog | None:
        """What became of the batches of the last calibration."""

    @property
    def output_values(self) -> Mapping[str, str]:
        """Output of an exported model -> the graph's value after it, where the two have different names."""

    def remember(self, *, parameters: bool = False) -> Undo:
        """Keep its state; the function returned brings it back."""


@contextmanager
def all_or_nothing(sim: Simulation, *, parameters: bool = False) -> Iterator[None]:
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
