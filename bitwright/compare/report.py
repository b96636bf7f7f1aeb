"""What a comparison of two executions found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bitwright.compare.agreement import Agreement
from bitwright.tables import Tabular, html_table, text_table

CauseName = Literal[
    "rounding", "weight", "bias", "constant", "grid", "clip", "saturation", "overflow", "4-bit fusion", "fusion", "kernel",
    "operators",
]  # fmt: skip
#: both executions compute the same there, to within the rounding of their arithmetic
HARMLESS = frozenset(("rounding", "kernel"))
_HEAD = ("tensor", "operators", "kernel", "own: equal", "LSB", "from the input on: equal", "LSB", "SQNR")


@dataclass(frozen=True)
class DriftRow:
    """One tensor that both executions have.

    Attributes:
        name: of the site, or of the tensor.
        ops: operator types between the compared tensors before and this one.
        kernel: what the runtime ran last for it, ``float`` elsewhere.
        own: how the two compare where both are fed the same in front of these operators.
        carried: how they compare when each is run from the input on.
        level: signal-to-noise ratio then, in dB; ``inf`` where equal.
    """

    name: str
    ops: tuple[str, ...]
    kernel: str
    own: Agreement
    carried: Agreement
    level: float


@dataclass(frozen=True)
class Retry:
    """A run without a suspected cause.

    Attributes:
        cause: which.
        without: what was changed.
        before, after: how the two executions compare at the tensor, fed the same.
        removed: whether the difference is gone.
    """

    cause: CauseName
    without: str
    before: Agreement
    after: Agreement
    removed: bool

    def __str__(self) -> str:
        verdict = "gone" if self.removed else "stays"
        return f"{self.without}: {self.before.lsb:.3g} LSB -> {self.after.lsb:.3g} LSB, the difference {verdict}"


@dataclass(frozen=True)
class Finding:
    """Why two executions differ at one tensor.

    Attributes:
        name, ops: of the row.
        cause: the suspected cause that a run without it confirmed; ``operators`` where none did.
        text: what happens.
        remedy: what to do.
        retries: the runs, in the order they were made.
    """

    name: str
    ops: tuple[str, ...]
    cause: CauseName
    text: str
    remedy: str
    retries: tuple[Retry, ...] = ()


@dataclass(frozen=True)
class DriftReport(Tabular):
    """What :func:`bitwright.compare.drift.drift` found.

    Attributes:
        a, b: labels of the two executions; ``a`` is the one nearer to what was trained.
        rows: in execution order.
        findings: of the first tensors at which they part on their own, with the cause.
        notes: what was left out.
    """

    _rows = "rows"
    _also = ("ok",)

    a: str
    b: str
    rows: tuple[DriftRow, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no operator differs beyond its grid when it is fed the same: what is left is rounding, or within what the
        arithmetic of a kernel is known to be off by.
        """
        return all(found.cause in HARMLESS for found in self.findings)

    @property
    def first(self) -> Finding | None:
        """The first operator that differs beyond its grid, and why; without one the first kernel, or rounding."""
        for harmless in (HARMLESS, {"rounding"}, ()):
            for found in self.findings:
                if found.cause not in harmless:
                    return found
        return None

    @property
    def growth(self) -> tuple[float, ...]:
        """Signal-to-noise ratio from tensor to tensor, run from the input on, in dB."""
        return tuple(row.level for row in self.rows)

    def to_text(self) -> str:
        """A table, and the findings below it."""
        title = f"{self.a} against {self.b}"
        return "\n".join([title, text_table(_HEAD, map(_cells, self.rows)), "", *self._lines()])

    __str__ = to_text

    def _repr_html_(self) -> str:
        return html_table(_HEAD, map(_cells, self.rows), f"{self.a} against {self.b}", self._lines())

    def _lines(self) -> Iterator[str]:
        for found in self.findings:
            yield f"{found.name} ({' '.join(found.ops)}): {found.cause}: {found.text}"
            yield from (f"    {retry}" for retry in found.retries)
            if found.remedy:
                yield f"    remedy: {found.remedy}"
        yield from self._growth()
        yield from (f"note: {note}" for note in self.notes)
        if not self.findings:
            yield f"{len(self.rows)} tensors agree"

    def _growth(self) -> Iterator[str]:
        finite = [(row.name, row.level) for row in self.rows if math.isfinite(row.level)]
        if not finite:
            return
        (first, start), (last, end) = finite[0], finite[-1]
        drops = [(one[1] - two[1], two[0]) for one, two in zip(finite, finite[1:], strict=False)]
        most, where = max(drops, default=(0.0, first))
        largest = f"; the largest drop, {most:.1f} dB, is at {where}" if most > 0 else ""
        yield f"growth: {start:.1f} dB at {first}, {end:.1f} dB at {last}{largest}"


def _cells(row: DriftRow) -> tuple[str, ...]:
    ops = " ".join(row.ops[-4:]) if len(row.ops) <= 4 else f"... {' '.join(row.ops[-4:])}"
    return (
        row.name, ops, row.kernel, f"{row.own.equal:.2%}", f"{row.own.lsb:.3g}", f"{row.carried.equal:.2%}",
        f"{row.carried.lsb:.3g}", f"{row.level:.1f} dB",
    )  # fmt: skip
