"""Ranges of activations that cost the least squared error, where the rules say that everything seen is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.ranges import find_range_method
from bitwright.core.simulation.quantizer import Quantizer
from bitwright.core.simulation.simulation import Simulation
from bitwright.tables import Tabular


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


def activation_ranges(sim: Simulation, calibrate: Callable[[Any], None], *, method: str = "mse") -> RangesReport:
    """Choose ranges by another method for the activations that have the bounds of everything seen.

    It is done from the statistics of the last calibration where these tell (:func:`keep_histograms`), otherwise by another.

    Sites with another method, a fixed range, a format of more than 8 bits, or a frozen encoding stay as they are.

    Args:
        sim: calibrated; changed in place.
        calibrate: finds its encodings; called if need be.
        method: a row of ``RANGE_METHODS``.

    Raises:
        ConfigError: there is no such method.
    """
    chosen = find_range_method(method)
    quantizers = [q for q in _with_plain_bounds(sim) if chosen.name != "minmax"]
    for quantizer in quantizers:
        quantizer.spec = replace(quantizer.spec, method=chosen)
    if any(quantizer.encoding is None for quantizer in quantizers):  # its statistics did not tell
        calibrate(sim)
    return RangesReport(chosen.name, tuple(q.name for q in quantizers))


def keep_histograms(sim: Simulation, but: Collection[str] = ()) -> None:
    """Let the next calibration gather what :func:`activation_ranges` reads, so that it needs no other.

    Args:
        sim: the simulation; changed in place.
        but: sites that will be in float.
    """
    for quantizer in _with_plain_bounds(sim):
        quantizer.keeps_histogram = quantizer.name not in but


def _with_plain_bounds(sim: Simulation) -> list[Quantizer]:
    """The quantizers of narrow activations whose range is everything seen."""
    found = {
        id(site.quantizer): site.quantizer
        for site in sim.quantizers.values()
        if site.role in ("input", "output") and site.enabled and not site.frozen
    }
    return [q for q in found.values() if _has_plain_bounds(q)]


def _has_plain_bounds(quantizer: Quantizer) -> bool:
    spec = quantizer.spec
    narrow = isinstance(spec.format, IntFormat) and spec.format.bits <= 8
    return narrow and spec.method.name == "minmax" and not quantizer.is_fixed and not quantizer.derived
