"""What a recipe did, step by step: the report, and the book it is written from."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bitwright.errors import BitwrightError, CalibrationError
from bitwright.tables import Tabular, html_table, text_table

logger = logging.getLogger("bitwright")

_LEFT_OUT = "left out: "
_NOISE = 1e-3  # changes of the metric below this share of it are not harm


@dataclass(frozen=True)
class Outcome:
    """What one step did.

    Attributes:
        step: as written, or ``float`` and ``no step`` for the first two lines.
        metric: after it, on the simulated model; ``None`` when no metric was given.
        change: of the metric, positive for the better.
        note: what the step says of itself, or why it was undone.
        kept: whether it is in effect.
        sqnr: signal-to-noise ratio of the outputs before and after it, in dB, where a judge was asked.
        changed: whether it did anything.
    """

    step: str
    metric: float | None
    change: float | None
    note: str = ""
    kept: bool = True
    sqnr: tuple[float, float] | None = None
    changed: bool = True

    @property
    def hurts(self) -> bool:
        """Whether the metric became worse by this step, by more than a thousandth of itself."""
        if self.change is None or self.metric is None:
            return False
        return self.change < -_NOISE * abs(self.metric)


@dataclass(frozen=True)
class RecipeReport(Tabular, Sequence[Outcome]):
    """One line per step; a table when printed.

    Attributes:
        outcomes: in order.
        judged: on what the outputs were compared with those of the float model, if they were.
    """

    _rows = "outcomes"

    outcomes: tuple[Outcome, ...]
    judged: str = ""

    def __getitem__(self, index: int) -> Outcome:  # type: ignore[override]
        return self.outcomes[index]

    def __len__(self) -> int:
        return len(self.outcomes)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.outcomes)

    @property
    def metric(self) -> float | None:
        """The metric in effect at the end; ``None`` where none was measured."""
        kept = [o.metric for o in self.outcomes if o.kept]
        return kept[-1] if kept else None

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Heads and rows; the columns of the metric are left out where no step was measured by one."""
        measured = any(o.metric is not None for o in self.outcomes)
        rows = []
        for o in self.outcomes:
            metric = "" if o.metric is None else f"{o.metric:.5g}"
            change = "" if o.change is None else f"{o.change:+.3g}"
            back = not o.kept and not o.note.startswith(_LEFT_OUT)
            noise = "" if o.sqnr is None else f"; output {o.sqnr[0]:.2f} -> {o.sqnr[1]:.2f} dB"
            told = f"{'undone: ' if back else ''}{o.note}{noise}"
            rows.append([o.step, metric, change, told] if measured else [o.step, told])
        return ["step", "metric", "change", "note"] if measured else ["step", "note"], rows

    def _lines(self) -> list[str]:
        return [f"outputs compared with float {self.judged}"] if self.judged else []

    def __str__(self) -> str:
        head, rows = self._cells()
        return "\n".join([text_table(head, rows, right=(1, 2) if len(head) > 2 else ()), *self._lines()])

    def _repr_html_(self) -> str:
        return html_table(*self._cells(), notes=self._lines())


def metric_of(metric: Callable[[Any], Any], model: Any) -> float:
    """What ``metric`` returns for ``model``, as a number.

    Raises:
        CalibrationError: it returns no number.
    """
    found = metric(model)
    try:
        return float(found)
    except (TypeError, ValueError) as error:
        shown = "None" if found is None else f"{repr(found)[:80]} ({type(found).__name__})"
        raise CalibrationError(
            f"metric {getattr(metric, '__name__', type(metric).__name__)}",
            f"it returned {shown}, which is not a number",
            "end it with a return statement whose value is one number, for example an accuracy",
        ) from error


def checked_metric(step: str, metric: float) -> float:
    """``metric`` itself.

    Raises:
        CalibrationError: it is NaN.
    """
    if math.isnan(metric):
        raise CalibrationError(
            step,
            "the metric is NaN",
            "run the metric on the float model first; check it for empty batches and divisions by zero",
        )
    return metric


class Book:
    """The outcomes so far, and the metric in effect."""

    def __init__(self, lower_is_better: bool) -> None:
        self.sign = -1.0 if lower_is_better else 1.0
        self.outcomes: list[Outcome] = []

    def _last(self) -> float | None:
        # the float model is not a predecessor: its metric is the goal
        kept = [o.metric for o in self.outcomes[1:] if o.kept and o.metric is not None]
        return kept[-1] if kept else None

    def add(
        self,
        step: str,
        metric: float | None,
        note: str = "",
        sqnr: tuple[float, float] | None = None,
        changed: bool = True,
    ) -> Outcome:
        """Write down a step."""
        metric = metric if metric is None else checked_metric(step, metric)
        last = self._last()
        change = None if metric is None or last is None else self.sign * (metric - last)
        self.outcomes.append(Outcome(step, metric, change, note, sqnr=sqnr, changed=changed))
        logger.info("%s: %s", step, note or "done")
        return self.outcomes[-1]

    def leave_out(self, step: str, why: BitwrightError) -> None:
        """Write down an optional step that cannot be done."""
        logger.warning("%s is left out: %s", step, why)
        self.outcomes.append(Outcome(step, None, None, f"{_LEFT_OUT}{why}", kept=False))

    def take_back(self, count: int = 1) -> None:
        """The steps written last are no longer in effect."""
        self.outcomes[-count:] = [replace(outcome, kept=False) for outcome in self.outcomes[-count:]]
