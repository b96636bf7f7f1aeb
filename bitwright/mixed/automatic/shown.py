"""How the trials of an automatic search are shown: as lines of a table, which grows on a terminal, and as a page."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("bitwright.trials")

_ALWAYS = {"weight_bytes": "weights", "bit_ops": "bit operations"}
_COSTS = {**_ALWAYS, "activation_bytes": "activations", "ms": "ms"}


def _shown(cost: str) -> list[str]:
    """The costs that have a column: the one that is to be small, and those of every model."""
    return list(dict.fromkeys([*_ALWAYS, cost]))


def head(cost: str) -> list[str]:
    """Names of the columns of the table."""
    return ["trial", *(_COSTS[name] for name in _shown(cost)), "SQNR dB", "metric", "drop", "", "why"]


@dataclass(frozen=True)
class TrialRow:
    """One trial.

    Attributes:
        name: of its folder.
        why: what it was for.
        preset: of the simulation, or ``mixed``.
        weight_bytes, bit_ops, activation_bytes, ms: what it costs; milliseconds where there is a table of times.
        sqnr_db: of the outputs, on data that nothing was chosen on.
        metric: as measured; ``None`` without one.
        drop: against float, on the samples that choose.
        worst_drop: the upper end of the interval of the drop, on the samples held back.
        good: whether it keeps within what is allowed; the interval counts where there is one.
        failed: why there is no model; empty where there is.
        seconds: that it took.
        best: whether it is the result.
    """

    name: str
    why: str
    preset: str
    weight_bytes: float | None
    bit_ops: float | None
    activation_bytes: float | None
    ms: float | None
    sqnr_db: float | None
    metric: float | None
    drop: float | None
    worst_drop: float | None
    good: bool
    failed: str
    seconds: float
    best: bool = False


def cells(row: TrialRow, cost: str) -> list[str]:
    """A line of the table, see :func:`head`."""
    costs = [getattr(row, name) for name in _shown(cost)]
    values = [*costs, row.sqnr_db, row.metric, row.drop]
    if row.failed:
        return [row.name, *("-" for _ in values), "failed", row.failed]
    numbers = [f"{v + 0.0:.4g}" if v is not None else "-" for v in values]  # no negative zero
    return [row.name, *numbers, "best" if row.best else "good" if row.good else "", row.why]


def quality(row: TrialRow) -> float:
    """What a trial loses: of the metric, or else the noise of its outputs; the less the better."""
    return row.drop if row.drop is not None else -(row.sqnr_db if row.sqnr_db is not None else math.inf)


def front(rows: Sequence[TrialRow], cost: str) -> list[TrialRow]:
    """The trials that no other one beats in both the cost and the quality, the cheapest first."""
    found: list[TrialRow] = []
    tried = [row for row in rows if not row.failed]
    for row in sorted(tried, key=lambda r: (getattr(r, cost) or math.inf, quality(r), r.name)):
        if not found or quality(row) < quality(found[-1]):
            found.append(row)
    return found


Show = Callable[[Sequence[TrialRow]], None]


@contextmanager
def growing_table(wanted: bool, cost: str) -> Iterator[Show]:
    """Show trials as they finish: a table that grows on a terminal, elsewhere a line per trial in the log."""
    if not wanted:
        yield lambda rows: None
    elif not sys.stderr.isatty():
        yield _Log(cost).show
    else:
        with _on_terminal(cost) as show:
            yield show


class _Log:
    """Lines of trials that were not told yet."""

    def __init__(self, cost: str) -> None:
        self._told: set[str] = set()
        self._cost = cost

    def show(self, rows: Sequence[TrialRow]) -> None:
        for row in rows:
            if row.name not in self._told:
                self._told.add(row.name)
                told = dict(zip(head(self._cost), cells(row, self._cost), strict=True))
                logger.info("%s", ", ".join(f"{name} {cell}".strip() for name, cell in told.items()))


@contextmanager
def _on_terminal(cost: str) -> Iterator[Show]:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    with Live(console=Console(stderr=True), auto_refresh=False) as live:

        def show(rows: Sequence[TrialRow]) -> None:
            table = Table(title="trials", title_justify="left")
            for name in head(cost):
                table.add_column(name)
            for row in rows:
                table.add_row(*map(Text, cells(row, cost)))
            live.update(table, refresh=True)

        yield show


def write_trials(path: Path, rows: Sequence[TrialRow], cost: str, metric: bool) -> None:
    """A page with the front of the trials, all of them as points, and their table; without scripts or network.

    Raises:
        ExportError: it cannot be written.
    """
    from bitwright.report.charts import points_chart, write_page
    from bitwright.tables import html_table

    up = "drop of the metric" if metric else "SQNR of the outputs, dB"

    def point(row: TrialRow) -> tuple[float, float]:
        lost = quality(row)
        return float(getattr(row, cost) or math.nan), lost if metric else -lost

    fronts = {row.name: point(row) for row in front(rows, cost)}
    tried = {row.name: point(row) for row in rows if not row.failed}
    write_page(
        path,
        "Automatic quantization",
        points_chart(fronts, cost, up, joined=True, title="Pareto front"),
        points_chart(tried, cost, up, title="All trials"),
        html_table(head(cost), [cells(row, cost) for row in rows], title="Trials"),
    )
