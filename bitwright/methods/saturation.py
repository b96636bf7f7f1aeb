"""7 bits for the weights of layers whose products saturate on CPUs without dot-product instructions, and for no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from bitwright.errors import ConfigError, close_matches
from bitwright.methods.front_end import front_end_of
from bitwright.tables import Tabular

if TYPE_CHECKING:
    from bitwright.comparison.saturation import SaturationReport

REPAIRS = ("saturation",)
_BITS = 7
_BATCHES = 4  # that sums are taken apart on
_ROUNDS = 3  # a narrower weight changes what later layers read


@dataclass(frozen=True)
class SaturationRepair(Tabular):
    """What ``repair="saturation"`` did.

    Attributes:
        narrowed: weights that have 7 bits now.
        found: sums before.
        left: sums afterwards.
        before, after: accuracy of the simulation, whose sums never saturate: the metric, or without one the signal-to-noise
            ratio of the outputs to the float model in dB.
    """

    _rows = "narrowed"

    narrowed: tuple[str, ...]
    found: SaturationReport
    left: SaturationReport
    before: float
    after: float

    def to_text(self) -> str:
        """A few lines."""
        if not self.narrowed:
            return "saturation: no layer saturates on CPUs without VNNI"
        return (
            f"saturation: 7-bit weights in {len(self.narrowed)} of {len(self.found.layers)} layers "
            f"({', '.join(self.narrowed)}); accuracy {self.before:.4g} before, {self.after:.4g} after"
        )

    __str__ = to_text


def check_repair(repair: str | None) -> None:
    """Refuse an unknown value of the option ``repair``.

    Raises:
        ConfigError: with close matches.
    """
    if repair is not None and repair not in REPAIRS:
        problem = f"{repair!r} is not a repair{close_matches(str(repair), REPAIRS)}"
        raise ConfigError("repair", problem, f"use one of {', '.join(map(repr, REPAIRS))}, or leave it out")


def repair_saturation(sim: Any, batches: Iterable[Any], rate: Callable[[], float], **options: Any) -> SaturationRepair:
    """Give 7 bits to the weights of layers in which pairs of products saturate on ``batches``.

    The range of a weight stays, its step doubles. With 7 bits no pair can saturate: ``2 * 255 * 64 < 2 ** 15``.

    Args:
        sim: calibrated, of either front end.
        batches: at most four are run.
        rate: accuracy of the simulation as it is.
        options: of the export that change the file.
    """
    few = list(islice(batches, _BATCHES))
    count = front_end_of(sim).saturation_count(sim, few, options)
    before, found = rate(), count()
    left, narrowed = found, dict[str, None]()
    for _ in range(_ROUNDS):
        guilty = [site for site in left.guilty if site in sim.quantizers and site not in narrowed]
        if not guilty:
            break
        for site in guilty:
            sim.quantizers[site].quantizer.refine(
                _BITS, "pairs of its products saturate on CPUs without dot-product instructions"
            )
            narrowed[site] = None
        left = count()
    return SaturationRepair(tuple(narrowed), found, left, before, rate() if narrowed else before)
