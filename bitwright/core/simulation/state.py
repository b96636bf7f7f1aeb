"""``Simulation``: what both front ends' simulations have; and changes of one that happen whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from bitwright.core.graph.graph import Graph
from bitwright.core.health.repair import Repair
from bitwright.core.placement.plan import Plan
from bitwright.core.placement.rules import Rules
from bitwright.core.simulation.calibration import CalibrationLog
from bitwright.core.simulation.protocols import Undo
from bitwright.core.simulation.sites import SiteMap


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
