"""What the statistics of a site say about its numerical health, read off after calibration at no cost."""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.core.health import HALVES, LIMITS
from bitwright.core.statistics import Histogram, MinMax, bounds_of


@dataclass(frozen=True)
class SiteHealth:
    """One site, over all calibration data that counted (an activation) or over its values (a weight).

    Attributes:
        site, dtype: its name, and the type of its tensor.
        count, nan, pos_inf, neg_inf: how many elements were finite, NaN, +Inf and -Inf.
        lo, hi: bounds of the finite ones; ``nan`` where there were none.
        groups: how many groups of elements have a scale of their own: one per tensor, or channels, or blocks.
        zero, constant: how many of them held nothing but zeros, and nothing but one other value.
        saturated: in half precision, whether a value reached the largest number of the type.
        underflow: in half precision, whether all values lay below its smallest normal number.
        empty: how many tensors without elements came; they count nowhere else.
    """

    site: str
    dtype: str
    count: int
    nan: int
    pos_inf: int
    neg_inf: int
    lo: float
    hi: float
    groups: int
    zero: int
    constant: int
    saturated: bool
    underflow: bool
    empty: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know, one phrase each; empty for a healthy site."""
        found = [
            f"{n} {what}"
            for n, what in ((self.nan, "NaN"), (self.pos_inf, "+Inf"), (self.neg_inf, "-Inf"))
            if n
        ]
        whole = "it is" if self.groups == 1 else f"of {self.groups} channels or blocks"
        for n, what in ((self.zero, "zero throughout"), (self.constant, "constant")):
            if n:
                found.append(f"{whole} {what}" if self.groups == 1 else f"{n} {whole} are {what}")
        if self.saturated:
            found.append(f"it reaches the largest number of {self.dtype}")
        if self.underflow:
            found.append(f"all its values are below the smallest normal number of {self.dtype}")
        if self.empty:
            found.append(f"{self.empty} empty tensor{'s' if self.empty > 1 else ''}")
        if not self.count:
            found.append("no finite value was seen")
        return tuple(found)

    def __str__(self) -> str:
        return f"{self.site}: {'; '.join(self.notes) or f'in [{self.lo:.4g}, {self.hi:.4g}]'}"


def site_health(
    site: str, statistics: MinMax | Histogram, dtype: str = "float32", empty: int = 0
) -> SiteHealth:
    """The health of a site.

    Args:
        site: its name.
        statistics: of everything that was seen there.
        dtype: of its tensor; halves are watched for saturation and underflow.
        empty: how many tensors without elements came.

    >>> import numpy as np
    >>> from bitwright.core.statistics import measure
    >>> from bitwright.core.granularity import PerChannel
    >>> x = np.float32([[0, 0], [2, 2], [1, np.nan], [-1, 1]])
    >>> print(site_health("conv1.weight", measure("minmax", x, PerChannel(0))))
    conv1.weight: 1 NaN; 1 of 4 channels or blocks are zero throughout; 2 of 4 channels or blocks are constant
    """
    bounds = bounds_of(statistics)
    seen = bounds.count > 0
    same = seen & (bounds.lo == bounds.hi)
    zero = same & (bounds.lo == 0)
    some = bool(seen.any())
    lo = float(bounds.lo[seen].min()) if some else float("nan")
    hi = float(bounds.hi[seen].max()) if some else float("nan")
    largest, normal = LIMITS.get(dtype, LIMITS["float32"])
    half, magnitude = dtype in HALVES and some, max(-lo, hi)
    return SiteHealth(
        site,
        dtype,
        int(bounds.count.sum()),
        int(bounds.nan_count.sum()),
        int(bounds.pos_inf_count.sum()),
        int(bounds.neg_inf_count.sum()),
        lo,
        hi,
        int(bounds.count.size),
        int(zero.sum()),
        int((same & ~zero).sum()),
        half and magnitude >= largest,
        half and 0 < magnitude < normal,
        empty,
    )
