"""Ranges of activations that cost the least squared error, where the rules say that everything seen is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.ranges import find_range_method
from bitwright.core.simulation.sites import Site
from bitwright.tables import Tabular


class Simulation(Protocol):
    """What both front ends have of a simulation."""

    @property
    def quantizers(self) -> Mapping[str, Site]:
        """Its sites."""


@dataclass(frozen=True)
class RangesReport(Tabular):
    """Which sites have ranges of another method now.

    Attributes:
        method: its name.
        sites: those whose ranges were chosen anew.
    """

    _rows = "sites"

    method: str
    sites: tuple[str, ...]

    @property
    def changed(self) -> bool:
        """Whether there was one."""
        return bool(self.sites)

    @property
    def summary(self) -> str:
        """One line."""
        return f"{len(self.sites)} activations with ranges by {self.method}"

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"  {name}" for name in self.sites)])


def activation_ranges(
    sim: Simulation, calibrate: Callable[[Any], None], *, method: str = "mse"
) -> RangesReport:
    """Calibrate anew with another range method for the activations that have the bounds of everything seen.

    Sites with another method, a fixed range, a format of more than 8 bits, or a frozen encoding stay as they are.

    Args:
        sim: calibrated; changed in place.
        calibrate: finds its encodings.
        method: a row of ``RANGE_METHODS``.

    Raises:
        ConfigError: there is no such method.
    """
    chosen = find_range_method(method)
    quantizers = {
        id(site.quantizer): site.quantizer
        for site in sim.quantizers.values()
        if site.role in ("input", "output") and site.enabled and not site.frozen
    }
    named = []
    for quantizer in quantizers.values():
        spec = quantizer.spec
        plain = isinstance(spec.format, IntFormat) and spec.format.bits <= 8 and not quantizer.is_fixed
        if plain and not quantizer.derived and spec.method.name == "minmax" and chosen.name != "minmax":
            quantizer.spec = replace(spec, method=chosen)
            named.append(quantizer.name)
    if named:
        calibrate(sim)
    return RangesReport(chosen.name, tuple(named))
