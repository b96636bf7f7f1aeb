"""``bitwright.auto_quantize``: tries what there is, from cheap to dear, and has a best model on disk from the first minute."""

from __future__ import annotations

import itertools
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwright.analysis.intervals import compare
from bitwright.errors import ConfigError, checks_arguments
from bitwright.export.files.atomic import atomic_write, check_stem
from bitwright.export.targets import DEFAULT_TARGET, find_target
from bitwright.mixed.costs import COSTS
from bitwright.mixed.executors import find_executor
from bitwright.mixed.ladder import FIRST, Trial, waves
from bitwright.mixed.measure import one_sided
from bitwright.mixed.search import _batches
from bitwright.mixed.trials import Job, claim, identity, read_kept, read_trial, remove_partial, simulate
from bitwright.tables import Tabular, text_table

logger = logging.getLogger("bitwright")

_MIN_SQNR = 20.0  # dB, where there is no metric


@dataclass(frozen=True)
class TrialRow:
    """One trial.

    Attributes:
        name: of its folder.
        why: what it was for.
        preset: of the simulation, or ``mixed``.
        weight_bytes, bit_ops: what it costs.
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
    sqnr_db: float | None
    metric: float | None
    drop: float | None
    worst_drop: float | None
    good: bool
    failed: str
    seconds: float
    best: bool = False


@dataclass(frozen=True)
class AutoResult(Tabular):
    """What :func:`auto_quantize` returns.

    Attributes:
        trials: all that finished, in the order of the search.
        best: the result; ``None`` where no trial keeps within what is allowed, and then ``reason`` says why.
        nearest: the trial that comes closest, where there is no best one.
        reason: why the search ended, and why there is no best trial.
        folder: of the best trial's export, or of the nearest; ``None`` where nothing was written.
        float_metric: of the float model.
        better: direction of the metric.
    """

    trials: tuple[TrialRow, ...]
    best: TrialRow | None
    nearest: TrialRow | None
    reason: str
    folder: Path | None
    float_metric: float | None = None
    better: str = ""
    _job: Job | None = field(default=None, repr=False, compare=False)

    _rows = "trials"

    @property
    def sim(self) -> Any:
        """The simulation of the best trial, made again; ``None`` where there is no best trial."""
        if self.best is None or self._job is None:
            return None
        report = read_trial(self._job.folder, self.best.name)
        return None if report is None else simulate(self._job, _trial(report["trial"]))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the Pareto points of the trials."""
        found = super().to_dict()
        front = [row.name for row in self.trials if _on_front(row, self.trials)]
        found.pop("_job", None)
        return {"format": "bitwright-auto-result", "version": 1, **found, "front": front}

    def __str__(self) -> str:
        return "\n".join([text_table(_HEAD, [_cells(row) for row in self.trials]), self.reason])


_HEAD = ("trial", "weights", "bit operations", "SQNR dB", "metric", "drop", "", "why")


def _cells(row: TrialRow) -> list[str]:
    if row.failed:
        return [row.name, "-", "-", "-", "-", "-", "failed", row.failed]
    numbers = [
        f"{v:.4g}" if v is not None else "-"
        for v in (row.weight_bytes, row.bit_ops, row.sqnr_db, row.metric, row.drop)
    ]
    return [row.name, *numbers, "best" if row.best else "good" if row.good else "", row.why]


def _on_front(row: TrialRow, rows: Sequence[TrialRow]) -> bool:
    def key(r: TrialRow) -> tuple[float, float]:
        quality = r.drop if r.drop is not None else -(r.sqnr_db if r.sqnr_db is not None else math.inf)
        return (r.bit_ops or math.inf, quality)

    if row.failed:
        return False
    mine = key(row)
    others = [key(r) for r in rows if not r.failed and r is not row]
    return not any(o != mine and o[0] <= mine[0] and o[1] <= mine[1] for o in others)


@checks_arguments
def auto_quantize(
    model: Any,
    data: Iterable[Any],
    metric: str | Callable[[Any], Any] | None = None,
    *,
    allowed_drop: float | str | None = None,
    lower_is_better: bool = False,
    min_sqnr: float | None = None,
    target: str = DEFAULT_TARGET,
    deadline: float | None = None,
    folder: str | Path | None = None,
    cost: str = "bit_ops",
    labels: Any = None,
    evaluation_data: Iterable[Any] | None = None,
    confidence: float = 0.9,
    config_file: Any = None,
    workers: int = 1,
    executor: str = "local",
    trials: Sequence[Trial] | None = None,
    filename_prefix: str = "model",
    seed: int = 0,
    progress: bool = True,
) -> AutoResult:
    """Find the cheapest quantized model that is good enough, trying presets, recipes, range methods and mixed precision.

    The first trial is the fastest there is; what its analysis finds directs some of the later ones. Every finished trial is
    at once a folder with its model, its encodings and a report, and the same call goes on where an earlier one ended,
    however it ended.

    Args:
        model: a module, a path or a proto; left as it is.
        data: batches without labels.
        metric: as for :func:`bitwright.mixed_precision`; without one the outputs are compared with the float model's.
        allowed_drop: of the metric: in its units, or ``"1%"`` of its float value; 1 % by default.
        lower_is_better: for a function such as a perplexity.
        min_sqnr: without a metric, the least SQNR of the outputs in dB; 20 by default.
        target: the runtime that the files are for, as in ``sim.export``.
        deadline: seconds; the trial that runs then is finished, and no other begins.
        folder: of the trials; a temporary one by default, which stays.
        cost: of good trials the one that costs least is the best: ``bit_ops`` or ``weight_bytes``.
        labels, evaluation_data, confidence: as for :func:`bitwright.mixed_precision`.
        config_file: rules, as for the simulation.
        workers: trials at a time, each in a process of its own; 1 runs them here.
        executor: ``local``, or ``ray``.
        trials: instead of the ones that the search chooses.
        filename_prefix: stem of the files.
        seed: of what is random.
        progress: show the table of trials while it grows, on a terminal.

    Returns:
        The trials and the best of them, which lies in ``result.folder``. Where none is good enough, ``result.best`` is None,
        ``result.reason`` says why the float model is what remains, and ``result.nearest`` is what comes closest. Ctrl-C returns
        what there is.

    Raises:
        ConfigError: an argument that cannot be understood, a metric that cannot be used, or a folder of another model or data.
        CalibrationError: ``data`` is empty.
    """
    begin = time.monotonic()
    batches = _batches(data)
    if cost not in COSTS[:2]:
        raise ConfigError("cost", f"{cost!r} is not a cost of whole models", "use bit_ops or weight_bytes")
    find_target(target)
    run = find_executor(executor, workers)
    options: dict[str, Any] = {
        "metric": metric, "lower_is_better": lower_is_better, "cost": cost, "confidence": confidence, "seed": seed,
        "allowed_drop": "1%" if allowed_drop is None and metric is not None else allowed_drop,
        "min_sqnr": _MIN_SQNR if min_sqnr is None and metric is None else min_sqnr, "labels": labels,
        "evaluation_data": None if evaluation_data is None else list(evaluation_data),
        "config_file": config_file, "target": target, "filename_prefix": check_stem(filename_prefix),
    }  # fmt: skip
    place = Path(tempfile.mkdtemp(prefix="bitwright-auto-")) if folder is None else Path(folder)
    claim(place, identity(model, batches, options))
    remove_partial(place)
    job = Job(model, batches, options, place)
    search = _Auto(job, begin, deadline, trials)
    with _table(progress) as show:
        search.run(run, workers, show)
    return search.result()


class _Auto:
    """One search."""

    def __init__(
        self, job: Job, begin: float, deadline: float | None, trials: Sequence[Trial] | None
    ) -> None:
        self._job, self._begin, self._deadline, self._given = job, begin, deadline, trials
        self.order: list[str] = []
        self.reports: dict[str, dict[str, Any]] = {}
        self.reason = "every trial of the search has finished"
        self._float: dict[str, Any] = {}

    def _carried_out(
        self, trials: Sequence[Trial], executor: Any, workers: int, show: Callable[[Sequence[TrialRow]], None]
    ) -> bool:
        """Carry out trials, all at once by several workers; ``False`` if the deadline came before the last one."""
        for batch in [trials] if workers > 1 else [[trial] for trial in trials]:
            if self._late():
                return False
            for trial in executor(self._job, batch, workers):
                self._read(trial.name)
                self._write_best()
                show(self.rows())
        return True

    def run(self, executor: Any, workers: int, show: Callable[[Sequence[TrialRow]], None]) -> None:
        """Carry out trials that are not finished yet, wave by wave."""
        try:
            self._note_float()
            for wave in self._waves():
                self.order += [trial.name for trial in wave]
                for trial in wave:
                    self._read(trial.name)
                show(self.rows())
                left = [trial for trial in wave if trial.name not in self.reports]
                if not self._carried_out(left, executor, workers, show):
                    self.reason = "the deadline ended the search"
                    return
        except KeyboardInterrupt:
            self.reason = "Ctrl-C ended the search; the same call goes on"

    def _waves(self) -> Iterator[Sequence[Trial]]:
        if self._given is not None:
            yield list(self._given)
            return
        yield [FIRST]
        causes = self.reports.get(FIRST.name, {}).get("causes", [])
        yield from waves(causes)

    def _late(self) -> bool:
        return (
            self._deadline is not None
            and bool(self.reports)
            and time.monotonic() - self._begin > self._deadline
        )

    def _note_float(self) -> None:
        """The float model's numbers, read from disk where an earlier call measured them."""
        path = self._job.folder / "float.json"
        if path.is_file():
            self._float = read_kept(path)
            return
        metric = self._job.float_side.metric
        if metric is not None:
            reference = metric.reference
            self._float = {
                "metric": reference.mean, "better": metric.better, "allowed": metric.allowed,
                "held_back": None if metric._chosen is None else [int(i) for i in (~metric._chosen).nonzero()[0]],
                "values": reference.values.reshape(-1).tolist(),
            }  # fmt: skip
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(self._float))

    def _read(self, name: str) -> None:
        found = read_trial(self._job.folder, name)
        if found is not None:
            self.reports[name] = found

    # -- judging

    def rows(self) -> list[TrialRow]:
        """Finished trials in the order of the search, the best one marked."""
        names = [name for name in self.order if name in self.reports]
        best = self._best(names)
        return [self._row(name, name == best) for name in names]

    def _row(self, name: str, best: bool) -> TrialRow:
        report = self.reports[name]
        trial, costs = _trial(report["trial"]), report.get("costs", {})
        return TrialRow(
            name, trial.why, "mixed" if trial.mixed else trial.preset, costs.get("weight_bytes"), costs.get("bit_ops"),
            report.get("sqnr_db"), report.get("metric"), report.get("drop"), report.get("worst_drop"), self._good(name),
            report.get("failed", ""), report["seconds"], best,
        )  # fmt: skip

    def _good(self, name: str) -> bool:
        """By the samples that choose, or by the outputs."""
        report, options = self.reports[name], self._job.options
        if "failed" in report:
            return False
        if options["metric"] is None:
            return report["sqnr_db"] is None or report["sqnr_db"] >= options["min_sqnr"]
        return bool(report["share"] == 1 and report["drop"] <= self._float["allowed"])

    def _best(self, names: Sequence[str]) -> str | None:
        """The cheapest good trial that the samples held back bear out.

        Trials are tested from the quietest outputs on, and the first that fails ends it. In an order that does not look at
        these samples every test may take the whole doubt: an error needs the first bad trial of the order to pass (fixed
        sequence; Maurer, Hothorn and Lehmacher 1995).
        """
        cost = self._job.options["cost"]
        other = next(c for c in COSTS[:2] if c != cost)
        good = sorted((n for n in names if self._good(n)), key=lambda n: (-self._quietness(n), n))
        passed = list(itertools.takewhile(self._borne_out, good))
        return min(
            passed,
            key=lambda n: (self.reports[n]["costs"][cost], self.reports[n]["costs"][other], n),
            default=None,
        )

    def _quietness(self, name: str) -> float:
        found = self.reports[name]["sqnr_db"]
        return math.inf if found is None else float(found)

    def _borne_out(self, name: str) -> bool:
        """Whether the drop is allowed with the confidence asked for."""
        part, report = self._float.get("held_back"), self.reports[name]
        if part is None or report.get("values") is None:
            return True
        before = [self._float["values"][i] for i in part]
        after = [report["values"][i] for i in part]
        sure = one_sided(self._job.options["confidence"])
        found = compare(before, after, confidence=sure, better=self._float["better"])
        ends = [e for e in (found.low, found.high) if e is not None] or [found.estimate]
        drops = [e if self._float["better"] == "lower" else -e for e in ends]
        return max(drops) <= self._float["allowed"]

    def _write_best(self) -> None:
        best = self._best([n for n in self.order if n in self.reports])
        text = json.dumps({"best": best, "folder": None if best is None else f"trials/{best}"}, indent=1)
        with atomic_write(self._job.folder / "best.json") as temporary:
            temporary.write_text(text, encoding="utf-8")

    def result(self) -> AutoResult:
        """What there is."""
        if self.reports:
            self._write_best()
        rows = self.rows()
        best = next((row for row in rows if row.best), None)
        tried = [row for row in rows if not row.failed]
        nearest = None if best is not None else min(tried, key=_distance, default=None)
        reason = (
            self.reason if best is not None else f"{self.reason}; {self._why_float(rows, tried, nearest)}"
        )
        told = best or nearest
        folder = None if told is None else self._job.folder / "trials" / told.name
        return AutoResult(
            tuple(rows), best, nearest, reason, folder, self._float.get("metric"), self._float.get("better", ""), self._job
        )  # fmt: skip

    def _why_float(
        self, rows: Sequence[TrialRow], tried: Sequence[TrialRow], nearest: TrialRow | None
    ) -> str:
        if not rows:
            return "no trial has finished, so the float model is what remains"
        if not tried:
            return f"every trial failed, so the float model is what remains; the first one: {rows[0].failed}"
        assert nearest is not None
        if any(row.good for row in tried):
            held = len(self._float.get("held_back") or ())
            return (
                f"trials keep within the allowed drop on the samples that choose, but on the {held} samples held back none does "
                "with the confidence asked for, so the float model is what remains: give the metric more samples, or allow more"
            )
        how = f"a drop of {nearest.drop:.4g}" if nearest.drop is not None else f"{nearest.sqnr_db:.1f} dB"
        return f"no trial is good enough, so the float model is what remains; {nearest.name} comes closest, with {how}"


def _distance(row: TrialRow) -> float:
    return row.drop if row.drop is not None else -(row.sqnr_db if row.sqnr_db is not None else math.inf)


def _trial(given: Mapping[str, Any]) -> Trial:
    recipe = given["recipe"]
    return Trial(
        **{**given, "recipe": None if recipe is None else tuple(recipe), "mixed": tuple(given["mixed"])}
    )


@contextmanager
def _table(wanted: bool) -> Iterator[Callable[[Sequence[TrialRow]], None]]:
    """Show trials as they finish: a table that grows on a terminal."""
    if not wanted or not sys.stderr.isatty():
        yield lambda rows: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    with Live(console=Console(stderr=True), auto_refresh=False) as live:

        def show(rows: Sequence[TrialRow]) -> None:
            table = Table(title="trials", title_justify="left")
            for name in _HEAD:
                table.add_column(name)
            for row in rows:
                table.add_row(*map(Text, _cells(row)))
            live.update(table, refresh=True)

        yield show
