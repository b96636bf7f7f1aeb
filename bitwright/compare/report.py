"""Reports of ``verify`` and ``drift``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from bitwright.compare.agreement import Agreement
from bitwright.compare.generation import GeneratedRow
from bitwright.compare.reasons import DRAWN, Saturated
from bitwright.compare.runtime import Mode, Otherwise
from bitwright.tables import Table, Tabular, html_table, text_table

CauseName = Literal[
    "rounding", "weight", "bias", "constant", "grid", "clip", "saturation", "overflow", "4-bit fusion", "fusion", "kernel",
    "operators",
]  # fmt: skip
#: both executions compute the same there, to within the rounding of their arithmetic
HARMLESS = frozenset(("rounding", "kernel"))
_HEAD = ("tensor", "operators", "kernel", "own: equal", "LSB", "from the input on: equal", "LSB", "SQNR")
Verdict = Literal["agrees", "within", "fails"]
_SAME_OUTPUT = 60.0  # dB, of a model without anything quantized
_VERDICTS: dict[Verdict, str] = {"agrees": "", "within": "within ", "fails": "FAILS "}


@dataclass(frozen=True)
class Row:
    """One quantized place.

    Attributes:
        site: name in the simulation.
        run: which run of the place it is, from 0; above 0 only in loops.
        tensor: name in the file.
        format: ``uint8``, ``int16``, ...
        ops: operator types between the upstream quantizers and this one, in execution order.
        kernel: what the runtime's default mode ran last for it (``QLinearConv``), or ``float``; ``constant``.
        as_float, as_integer: agreement with float kernels and with integer kernels.
        reason: why codes differ, where they do.
        specified: share of codes of the reference kernels that are those of the format's specification, computed in integers;
            ``None`` where that is not told, as in other runtimes than LiteRT.
        rounded_once: share of codes that would be the simulation's if the reference kernel rounded once, a half to even:
            what is left of a difference without its roundings. ``None`` where there is none, or it is not told.
    """

    site: str
    run: int
    tensor: str
    format: str
    ops: tuple[str, ...]
    kernel: str
    as_float: Agreement
    as_integer: Agreement
    reason: str | None = None
    specified: float | None = None
    rounded_once: float | None = None

    _also = ("ok", "verdict")

    @property
    def ok(self) -> bool:
        """Whether both modes agree with the simulation, or within what their kernels may do."""
        return self.verdict != "fails"

    @property
    def verdict(self) -> Verdict:
        """``"agrees"``; ``"within"`` what the arithmetic of the kernel named in ``reason`` may do; or ``"fails"``.

        Within means that every code that differs was rounded from a value on the border between the two codes, as
        measured, up to the error that such a kernel is known to make. It takes nothing else: a place whose values are
        anywhere off fails.
        """
        both = (self.as_float, self.as_integer)
        if all(a.ok for a in both):
            return "agrees"
        return "within" if all(a.ok or a.within for a in both) else "fails"


@dataclass(frozen=True)
class OutputRow:
    """One graph output, end to end.

    Attributes:
        name: of the output.
        as_float, as_integer: signal-to-noise ratio against the simulation in dB, ``inf`` if equal; of an output whose rows
            ``TopK`` chose, of the rows that simulation and file both have.
        both: share of the rows that both chose, in the mode with fewer; ``None`` where rows are compared in their order.
    """

    name: str
    as_float: float
    as_integer: float
    both: float | None = None


@dataclass(frozen=True)
class VerifyReport(Tabular):
    """Result of :func:`bitwright.compare.verify.verify_layers`.

    Attributes:
        rows: one per quantized place, in execution order.
        outputs: graph outputs that the simulation's values were given for.
        unchecked: site -> why it could not be compared.
        failures: mode -> why the runtime refused the model in it.
        idle: site with nothing to compare on this input -> why: a branch was not taken, a loop had no iteration, or its values
            are made of random numbers, other ones in every run.
        runtime: whose kernels the mode ``integer`` is of.
        saturated: where a session of ONNX Runtime with default settings does not have the sums of ``as_integer`` on this
            CPU, which are exact; ``None`` if nowhere.
        otherwise: an output that another runtime makes otherwise of the whole file than of its operators; ``None`` if none.
        generated: of a decoder, one row per prompt: how many tokens are those of the simulation.
    """

    _rows = "rows"
    _also = ("ok",)

    rows: tuple[Row, ...]
    outputs: tuple[OutputRow, ...] = ()
    unchecked: dict[str, str] = field(default_factory=dict)
    failures: dict[Mode, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)
    runtime: str = "onnxruntime"
    saturated: Saturated | None = None
    otherwise: Otherwise | None = None
    generated: tuple[GeneratedRow, ...] = ()

    @property
    def ok(self) -> bool:
        """Every place that ran was compared and agrees in both modes, or within what the kernel may do.

        Places that could not be compared are no fault where all outputs, to which they lead, are equal to 60 dB. Where nothing is
        quantized, not even an output is of floats, all outputs are equal to 60 dB. Integer sums of ONNX Runtime are exact: what a
        CPU without VNNI makes of them by default is in ``saturated`` and does not count.
        """
        tokens_alone = bool(self.generated) and not self.outputs
        compared = all(r.ok for r in self.rows) if self.rows else tokens_alone or self._outputs_agree
        compared = compared and all(row.ok for row in self.generated)
        known = not self.unchecked or self._outputs_agree
        return compared and known and not self.failures and self.otherwise is None

    @property
    def _outputs_agree(self) -> bool:
        levels = [level for end in self.outputs for level in (end.as_float, end.as_integer)]
        return bool(levels) and min(levels) >= _SAME_OUTPUT

    def to_text(self) -> str:
        """The report as a table, with the reasons as numbered notes below it."""
        reasons = dict.fromkeys(row.reason for row in self.rows if row.reason is not None)
        notes = {reason: number for number, reason in enumerate(reasons, 1)}
        where = "" if self.runtime == "onnxruntime" else f" in {self.runtime}"
        rows = []
        for row in self.rows:
            name = f"{row.site} (run {row.run})" if row.run else row.site
            note = _VERDICTS[row.verdict] + ("" if row.reason is None else str(notes[row.reason]))
            rows.append((name, *self._cells(row), note))
        title = f"Simulation against the exported file{where}, layer by layer"
        numbered = [f"{number:>2}  {reason}" for reason, number in notes.items()]
        table = Table(("site", *self._columns(), "note"), rows, title, right=(3, 4, 5, 6))
        return "\n".join([self.answer, str(table), *numbered, *self._lines(), ""])

    @property
    def answer(self) -> str:
        """First line of the report: whether the file computes the same as the simulation."""
        good = sum(row.verdict == "agrees" for row in self.rows)
        within = sum(row.verdict == "within" for row in self.rows)
        more = f", {within} within what their kernel may do" if within else ""
        count = len(self.unchecked)
        inside = (
            f", {count} could not be compared{', and the outputs are equal' if self._outputs_agree else ''}"
            if count
            else ""
        )
        return f"{good} of {len(self.rows)} places agree{more}{inside}: {'ok' if self.ok else 'NOT ok'}"

    @property
    def _modes(self) -> tuple[str, str]:
        """Names of the two comparisons in this runtime."""
        return ("reference", "default") if self.runtime == "litert" else ("float", "integer")

    __str__ = to_text

    def _repr_html_(self) -> str:
        head = ("site", "run", *self._columns(), "verdict", "reason")
        rows = [(row.site, row.run, *self._cells(row), row.verdict, row.reason or "") for row in self.rows]
        return html_table(
            head, rows, "Simulation against the exported file, layer by layer", [self.answer, *self._lines()]
        )

    def _columns(self) -> tuple[str, ...]:
        first, second = self._modes
        return "operators", "kernel", f"equal ({first})", "LSB", f"equal ({second})", "LSB"

    @staticmethod
    def _cells(row: Row) -> tuple[str, ...]:
        numbers = [text for a in (row.as_float, row.as_integer) for text in (f"{a.equal:.3%}", f"{a.lsb:.3g}")]
        return " ".join(row.ops), row.kernel, *numbers

    def _why(self, end: OutputRow) -> str:
        """Where an output that is far from the simulation's comes from: each place alone is fed the simulation's values."""
        of_float = end.as_float < _SAME_OUTPUT
        if not of_float and end.as_integer >= _SAME_OUTPUT:
            return ""
        shares = [(row.site, (row.as_float if of_float else row.as_integer).equal) for row in self.rows]
        apart = [(site, 1 - equal) for site, equal in shares if equal < 1]
        if not apart:
            return (
                "; no compared place differs, so this comes from what is listed below as not compared or not comparable"
            )
        first, share = apart[0]
        number = f"the first of {len(apart)} places" if len(apart) > 1 else "the only place"
        kernels = "" if of_float else f" with {self._modes[1]} kernels"
        return (
            f"; it begins at {first}, {number} with values on the other side of the edge of a step{kernels} "
            f"({share:.3%} of them), and what follows carries that on"
        )

    def _lines(self) -> Iterator[str]:
        first, second = self._modes
        for end in self.outputs:
            levels = f"{end.as_float:.1f} dB ({first} kernels), {end.as_integer:.1f} dB ({second} kernels)"
            rows = (
                ""
                if end.both is None
                else f"; rows are compared by the index that chose them, {end.both:.1%} chosen by both"
            )
            yield f"output {end.name}: {levels}{rows}{self._why(end)}"
        for site, why in self.unchecked.items():
            yield f"not compared: {site}: {why}"
        for site, why in self.idle.items():
            yield f"{'not comparable' if why == DRAWN else 'did not run'}: {site}: {why}"
        for mode, why in self.failures.items():
            yield f"does not run with {mode} kernels: {why}"
        if self.saturated is not None:
            yield str(self.saturated)
        if self.otherwise is not None:
            yield str(self.otherwise)
        yield from map(str, self.generated)


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
    """Cause of the difference at one tensor.

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
    """Result of :func:`bitwright.compare.drift.drift`.

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
        return "\n".join([self.answer, text_table(_HEAD, map(_cells, self.rows)), "", *self._lines()])

    __str__ = to_text

    def _repr_html_(self) -> str:
        return html_table(_HEAD, map(_cells, self.rows), self.answer, self._lines())

    @property
    def answer(self) -> str:
        """First line of the report: where the two executions begin to differ."""
        first = self.first
        found = f"{len(self.rows)} tensors agree" if first is None else f"{first.cause} at {first.name}"
        verdict = "" if first is None else ": ok" if self.ok else ": NOT ok"
        return f"{self.a} against {self.b}: {found}{verdict}"

    def _lines(self) -> Iterator[str]:
        for found in self.findings:
            yield f"{found.name} ({' '.join(found.ops)}): {found.cause}: {found.text}"
            yield from (f"    {retry}" for retry in found.retries)
            if found.remedy:
                yield f"    remedy: {found.remedy}"
        yield from self._growth()
        yield from (f"note: {note}" for note in self.notes)

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
