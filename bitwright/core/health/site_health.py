"""What the statistics of a site say about its numerical health, read off after calibration at no cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitwright.core.graph.constant_channels import ConstantChannels
from bitwright.core.health.report import HALVES, LIMITS
from bitwright.core.numerics.statistics import Histogram, MinMax, bounds_of
from bitwright.tables import Tabular, html_table, text_table

_SHOWN = 8
_HEAD = ("site", "dtype", "range", "notes")


@dataclass(frozen=True)
class SiteHealth:
    """One site, over all calibration data that counted (an activation) or over its values (a weight).

    Attributes:
        site, dtype: its name, and the type of its tensor.
        count, nan, pos_inf, neg_inf: how many elements were finite, NaN, +Inf and -Inf.
        lo, hi: bounds of the finite ones; ``nan`` where there were none.
        groups: how many groups of elements were looked at one by one: those with a scale of their own (channels or blocks),
            or the channels of a tensor with one scale, if some of them are constant; else 1.
        zero, constant: which of them held nothing but zeros, and nothing but one other value.
        saturated: in half precision, whether a value reached the largest number of the type.
        underflow: in half precision, whether all values lay below its smallest normal number.
        empty: how many tensors without elements came; they count nowhere else.
        layer: the operator that makes the channels, where it is known and not the site's own.
        kind: what the groups are called: ``channels`` or ``blocks``.
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
    zero: tuple[int, ...]
    constant: tuple[int, ...]
    saturated: bool
    underflow: bool
    empty: int = 0
    layer: str = ""
    kind: str = "channels"

    _also = ("notes",)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know, one phrase each; empty for a healthy site."""
        found = [f"{n} {what}" for n, what in ((self.nan, "NaN"), (self.pos_inf, "+Inf"), (self.neg_inf, "-Inf")) if n]
        found += [
            self._told(which, what)
            for which, what in ((self.zero, "zero throughout"), (self.constant, "constant"))
            if which
        ]
        if self.saturated:
            found.append(f"it reaches the largest number of {self.dtype}")
        if self.underflow:
            found.append(f"all its values are below the smallest normal number of {self.dtype}")
        if self.empty:
            found.append(f"{self.empty} empty tensor{'s' if self.empty > 1 else ''}")
        if not self.count:
            found.append("no finite value was seen")
        return tuple(found)

    def _told(self, which: tuple[int, ...], what: str) -> str:
        if self.lo == self.hi:
            return f"it is {what}"
        shown = ", ".join(map(str, which[:_SHOWN]))
        more = f" and {len(which) - _SHOWN} more" if len(which) > _SHOWN else ""
        made = f" of {self.layer}" if self.layer else ""
        verb = "is" if len(which) == 1 else "are"
        return f"{len(which)} of {self.groups} {self.kind}{made} {verb} {what}: {shown}{more}"

    def __str__(self) -> str:
        return f"{self.site}: {'; '.join(self.notes) or f'in [{self.lo:.4g}, {self.hi:.4g}]'}"


class HealthTable(Tabular, list[SiteHealth]):
    """The health of every site, in order; a list, and a table when printed or shown in a notebook."""

    _rows = "rows"
    _also = ("rows",)

    @property
    def rows(self) -> tuple[SiteHealth, ...]:
        """The sites."""
        return tuple(self)

    def _cells(self) -> list[tuple[str, str, str, str]]:
        return [(h.site, h.dtype, f"[{h.lo:.4g}, {h.hi:.4g}]" if h.count else "", "; ".join(h.notes)) for h in self]

    def _summary(self) -> str:
        return f"{len(self)} sites, {sum(bool(h.notes) for h in self)} with notes"

    def __str__(self) -> str:
        return f"{text_table(_HEAD, self._cells())}\n{self._summary()}"

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._cells(), notes=[self._summary()])


def site_health(
    site: str,
    statistics: MinMax | Histogram,
    dtype: str = "float32",
    empty: int = 0,
    *,
    channels: ConstantChannels | None = None,
    layer: str = "",
    kind: str = "channels",
) -> SiteHealth:
    """The health of a site.

    Args:
        site: its name.
        statistics: of everything that was seen there.
        dtype: of its tensor; halves are watched for saturation and underflow.
        empty: how many tensors without elements came.
        channels: of a site with one scale, those that are constant.
        layer, kind: for messages, see :class:`SiteHealth`.

    >>> import numpy as np
    >>> from bitwright.core.numerics.statistics import measure
    >>> from bitwright.core.numerics.granularity import PerChannel
    >>> x = np.float32([[0, 0], [2, 2], [1, np.nan], [-1, 1]])
    >>> print(site_health("conv1.weight", measure("minmax", x, PerChannel(0))))
    conv1.weight: 1 NaN; 1 of 4 channels is zero throughout: 0; 2 of 4 channels are constant: 1, 2
    """
    bounds = bounds_of(statistics)
    seen = bounds.count > 0
    same = seen & (bounds.lo == bounds.hi)
    zero = same & (bounds.lo == 0)
    groups = int(bounds.count.size)
    zeros, constants = (tuple(np.flatnonzero(which).tolist()) for which in (zero, same & ~zero))
    if groups == 1 and channels is not None and channels.count:
        groups, zeros, constants = channels.count, channels.zero, channels.constant
    some = bool(seen.any())
    lo = float(bounds.lo[seen].min()) if some else float("nan")
    hi = float(bounds.hi[seen].max()) if some else float("nan")
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
        groups,
        zeros,
        constants,
        half and magnitude >= LIMITS[dtype],
        half and 0 < magnitude < HALVES[dtype],
        empty,
        layer,
        kind,
    )
