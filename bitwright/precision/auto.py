"""``bitwright.auto_quantize``: tries presets, recipes, range methods and mixed precision, and keeps the best model on disk.

Every finished trial is a folder (:mod:`bitwright.precision.trials`); the search reads these folders, so the same call goes on
where an earlier one ended. Trials are shown as a table, which grows on a terminal, and as a page.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bitwright.analysis.subject import listed
from bitwright.errors import ConfigError, checks_arguments, close_matches
from bitwright.export.files.atomic import check_stem, write_json
from bitwright.export.files.run_state import read_run_state, write_run_state
from bitwright.export.targets import DEFAULT_TARGET, find_target
from bitwright.precision.choice import undominated
from bitwright.precision.costs import COSTS, check_cost, check_rows, table_of_times, timed
from bitwright.precision.executors import find_executor
from bitwright.precision.result import confirmed
from bitwright.precision.search import INTERRUPTED, check_options, judged_data
from bitwright.precision.trials import FIRST, Job, Trial, claim, identity, read_trial, remove_partial, simulate, waves
from bitwright.tables import Table, Tabular, text_table

row_logger = logging.getLogger("bitwright.trials")

_ALWAYS = {"weight_bytes": "weights", "bit_ops": "bit operations"}
_COSTS = {**_ALWAYS, "activation_bytes": "activations", "memory": "memory", "ms": "ms"}


def _shown(cost: str) -> list[str]:
    """The costs shown as columns: the minimized one, and those that every model has."""
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
        weight_bytes, bit_ops, activation_bytes, memory, ms: what it costs; milliseconds where there is a table of times.
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
    memory: float | None
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
    """Cells of the row, in the order of :func:`head`."""
    costs = [getattr(row, name) for name in _shown(cost)]
    values = [*costs, row.sqnr_db, row.metric, row.drop]
    if row.failed:
        return [row.name, *("-" for _ in values), "failed", row.failed]
    numbers = [f"{v + 0.0:.4g}" if v is not None else "-" for v in values]  # no negative zero
    return [row.name, *numbers, "best" if row.best else "good" if row.good else "", row.why]


def quality(row: TrialRow) -> float:
    """Loss of the metric, or else noise of the outputs; lower is better."""
    return row.drop if row.drop is not None else -(row.sqnr_db if row.sqnr_db is not None else math.inf)


def front(rows: Sequence[TrialRow], cost: str) -> list[TrialRow]:
    """The Pareto front of cost and quality, cheapest first."""
    tried = sorted((row for row in rows if not row.failed), key=lambda row: row.name)
    return undominated(tried, lambda row: getattr(row, cost) or math.inf, quality)


Show = Callable[[Sequence[TrialRow]], None]


@contextmanager
def growing_table(wanted: bool, cost: str) -> Iterator[Show]:
    """Show trials as they finish: a table that grows on a terminal, elsewhere a line per trial in the log."""
    if not wanted:
        yield lambda rows: None
        return
    if not sys.stderr.isatty():
        told: set[str] = set()

        def log(rows: Sequence[TrialRow]) -> None:
            for row in rows:
                if row.name not in told:
                    told.add(row.name)
                    line = zip(head(cost), cells(row, cost), strict=True)
                    row_logger.info("%s", ", ".join(f"{name} {cell}".strip() for name, cell in line))

        yield log
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False) as live:

        def show(rows: Sequence[TrialRow]) -> None:
            live.update(Table(head(cost), [cells(row, cost) for row in rows], "trials").__rich__(), refresh=True)

        yield show


def write_trials(path: Path, rows: Sequence[TrialRow], cost: str, metric: bool) -> None:
    """A page with the front of the trials, all of them as points, and their table; without scripts or network.

    Raises:
        ExportError: it cannot be written.
    """
    from bitwright.report.page import points_chart, write_page
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


logger = logging.getLogger("bitwright")

_MIN_SQNR = 20.0  # dB, where there is no metric


@dataclass(frozen=True)
class AutoResult(Tabular):
    """Result of :func:`auto_quantize`.

    Attributes:
        trials: all that finished, in the order of the search.
        best: the result; ``None`` where no trial keeps within what is allowed, and then ``reason`` says why.
        nearest: the trial that comes closest, where there is no best one.
        reason: why the search ended, and why there is no best trial.
        folder: of the best trial's export, or of the nearest; ``None`` where nothing was written.
        float_metric: of the float model.
        better: direction of the metric.
        cost: that was to be small.
    """

    trials: tuple[TrialRow, ...]
    best: TrialRow | None
    nearest: TrialRow | None
    reason: str
    folder: Path | None
    float_metric: float | None = None
    better: str = ""
    cost: str = "bit_ops"
    _job: Job | None = field(default=None, repr=False, compare=False)

    _rows = "trials"

    @property
    def sim(self) -> Any:
        """The simulation of the best trial, rebuilt; ``None`` where there is no best trial."""
        return None if self.best is None else self.simulation(self.best.name)

    def simulation(self, name: str) -> Any:
        """The simulation of a trial, made again: also of :attr:`nearest`, where there is no best one.

        Raises:
            ConfigError: there is no finished trial of that name, or it failed.
        """
        known = [row.name for row in self.trials if not row.failed]
        report = read_trial(self._job.folder, name) if self._job is not None and name in known else None
        if report is None or self._job is None:
            raise ConfigError(
                "simulation",
                f"there is no finished trial {name!r}{close_matches(str(name), known)}",
                f"name one of {', '.join(known)}" if known else "let a trial finish first",
            )
        return simulate(self._job, Trial.of(report["trial"]))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the Pareto points of the trials."""
        found = super().to_dict()
        points = [row.name for row in front(self.trials, self.cost)]
        found.pop("_job", None)
        return {"format": "bitwright-auto-result", "version": 1, **found, "front": points}

    def __str__(self) -> str:
        rows = [cells(row, self.cost) for row in self.trials]
        return "\n".join([text_table(head(self.cost), rows), self.reason])


@checks_arguments
def auto_quantize(
    model: Any,
    data: Iterable[Any],
    metric: str | Mapping[str, Any] | Callable[[Any], Any] | None = None,
    *,
    allowed_drop: float | str | None = None,
    lower_is_better: bool = False,
    min_sqnr: float | None = None,
    target: str = DEFAULT_TARGET,
    deadline: float | None = None,
    folder: str | Path | None = None,
    cost: str = "bit_ops",
    times: Any = None,
    labels: Any = None,
    transform: Callable[[Any], Any] | None = None,
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
        data: batches.
        metric: as for :func:`bitwright.mixed_precision`; without one the outputs are compared with the float model's.
        allowed_drop: of the metric: in its units, or ``"1%"`` of its float value; 1 % by default.
        lower_is_better: for a function such as a perplexity.
        min_sqnr: the least SQNR of the outputs in dB; without a metric 20 by default, with one both have to hold.
        target: the runtime that the files are for, as in ``sim.export``.
        deadline: seconds; trials that run then are finished, and no other begins. The first one always runs. A search for mixed
            precision ends then with its best point; a later call with time left runs it again, as a trial of its own.
        folder: of the trials; a temporary one by default, which stays.
        cost, times: as for :func:`bitwright.mixed_precision`; of good trials the one that costs least is the best. Presets that
            a row of ``times`` lacks are not tried.
        labels, transform, evaluation_data, confidence: as for :func:`bitwright.mixed_precision`.
        config_file: rules, as for the simulation.
        workers: trials at a time, each in a process of its own; 1 runs them here.
        executor: ``local``, or ``ray``.
        trials: instead of the ones that the search chooses.
        filename_prefix: stem of the files.
        seed: of what is random.
        progress: show the table of trials while it grows, on a terminal; elsewhere the log has a line per trial (level INFO).

    Returns:
        The trials and the best of them, which lies in ``result.folder``. Where none is good enough, ``result.best`` is None,
        ``result.reason`` says why the float model is what remains, and ``result.nearest`` is what comes closest. Ctrl-C returns
        what there is.

    Raises:
        ConfigError: an argument that cannot be understood, a metric that cannot be used, or a folder of another model or data.
        CalibrationError: ``data`` is empty.
    """
    begin = time.monotonic()
    check_cost(cost, times)
    find_target(target)
    run = find_executor(executor, workers)
    check_options(
        metric, allowed_drop, min_sqnr, deadline, confidence, lower_is_better=lower_is_better, labels=labels,
        evaluation_data=evaluation_data,
    )  # fmt: skip
    if trials is not None:
        names = [check_stem(trial.name) for trial in trials]
        if not names:
            raise ConfigError("trials", "the list is empty", "leave it out, and the search chooses them")
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ConfigError("trials", f"{min(repeated)} stands there twice", "give each trial a name of its own")
    data, evaluation_data, labels = judged_data(metric, data, evaluation_data, labels, transform)
    batches = listed(data, "auto_quantize")
    options: dict[str, Any] = {
        "metric": metric, "lower_is_better": lower_is_better, "cost": cost, "times": times, "seed": seed,
        "confidence": confidence,
        "allowed_drop": "1%" if allowed_drop is None and metric is not None else allowed_drop,
        "min_sqnr": _MIN_SQNR if min_sqnr is None and metric is None else min_sqnr, "labels": labels,
        "evaluation_data": None if evaluation_data is None else list(evaluation_data),
        "config_file": config_file, "target": target, "filename_prefix": check_stem(filename_prefix),
    }  # fmt: skip
    place = Path(tempfile.mkdtemp(prefix="bitwright-auto-")) if folder is None else Path(folder)
    claim(place, identity(model, batches, options))
    remove_partial(place)
    until = None if deadline is None else time.time() + deadline - (time.monotonic() - begin)
    job = Job(model, batches, options, place, until)
    search = _Auto(job, begin, deadline, trials)
    with growing_table(progress, cost) as show:
        search.run(run, workers, show)
    return search.result()


class _Auto:
    """State of one search."""

    def __init__(self, job: Job, begin: float, deadline: float | None, trials: Sequence[Trial] | None) -> None:
        self._job, self._begin, self._deadline, self._given = job, begin, deadline, trials
        self.order: list[str] = []
        self.reports: dict[str, dict[str, Any]] = {}
        self.reason = "every trial of the search has finished"
        self._float: dict[str, Any] = {}
        self._ended = False

    def run(self, executor: Any, workers: int, show: Show) -> None:
        """Run unfinished trials wave by wave; record and show each one that finishes."""
        try:
            self._note_float()
            for first in self._waves():
                self._wave([attempt for trial in first for attempt in self._attempts(trial)], executor, workers, show)
                if self._ended:
                    self.reason = "the deadline ended the search"
                    seconds = next(iter(self.reports.values()))["seconds"]
                    if len(self.reports) == 1 and self._deadline is not None and seconds > self._deadline:
                        self.reason += f": {self._deadline:.3g} s are less than one trial takes ({seconds:.3g} s)"
                    return
        except KeyboardInterrupt:
            self.reason = "Ctrl-C ended the search; the same call goes on"

    def _wave(self, wave: Sequence[Trial], executor: Any, workers: int, show: Show) -> None:
        """Run the unfinished trials of a wave.

        Raises:
            KeyboardInterrupt: Ctrl-C ended a trial, which has the best point that it found.
        """
        self.order += [trial.name for trial in wave]
        for trial in wave:
            self._read(trial)
        show(self.rows())
        left = [trial for trial in wave if trial.name not in self.reports]
        for trial in executor(self._job, itertools.takewhile(self._in_time, left), workers):
            self._read(trial)
            self._write_state()
            show(self.rows())
            if self.reports[trial.name].get("cut") == INTERRUPTED:
                raise KeyboardInterrupt

    def _in_time(self, _: Trial) -> bool:
        """Whether a trial may begin before the deadline; asked when a worker is free. The first trial always may."""
        late = self._deadline is not None and time.monotonic() - self._begin > self._deadline
        self._ended = bool(self.reports) and late
        return not self._ended

    def _waves(self) -> Iterator[Sequence[Trial]]:
        if self._given is not None:
            yield list(self._given)
            return
        yield [FIRST]
        causes = self.reports.get(FIRST.name, {}).get("causes", [])
        yield from waves(causes, *([self._float["presets"]] if "presets" in self._float else []))

    def _attempts(self, trial: Trial) -> Iterator[Trial]:
        """The trial; where an earlier call cut it short, as one by one its repetitions up to one that nothing did."""
        attempt, count = trial, 1
        yield attempt
        while (found := read_trial(self._job.folder, attempt.name, attempt)) and "cut" in found:
            count += 1
            why = "again: an earlier call ended before it did"
            attempt = replace(trial, name=f"{trial.name}-{count}", why=why)
            yield attempt

    def _note_float(self) -> None:
        """The float model's numbers, read from disk where an earlier call measured them."""
        path = self._job.folder / "float.json"
        if path.is_file():
            self._float = read_run_state(path)
            return
        begin = time.monotonic()
        metric = self._job.float_side.metric
        if metric is not None:
            self._float = {
                "metric": metric.reference.mean, "better": metric.better, "allowed": metric.allowed,
                "held_back": metric.held_back, "trusted": False,
            }  # fmt: skip
        if (times := self._job.options["times"]) is not None:
            sim, times = self._job.float_side.subject.sim, table_of_times(times)
            self._float["presets"] = timed(sim, times)
            check_rows(times, sim.graph)
        write_run_state(path, self._float)
        logger.info("the float model was measured in %.1f s", time.monotonic() - begin)

    def _read(self, trial: Trial) -> None:
        found = read_trial(self._job.folder, trial.name, trial)
        if found is None:
            return
        if found.get("suspicious") and not self._float["trusted"]:
            self._job.float_side.check_metric()
            self._float["trusted"] = True
            write_run_state(self._job.folder / "float.json", self._float)
        self.reports[trial.name] = found

    # -- judging

    def rows(self) -> list[TrialRow]:
        """Finished trials in the order of the search, the best one marked."""
        names = [name for name in self.order if name in self.reports]
        best = self._best(names)
        rows = []
        for name in names:
            report = self.reports[name]
            trial, costs = Trial.of(report["trial"]), report.get("costs", {})
            rows.append(TrialRow(
                name, trial.why, "mixed" if trial.mixed else trial.preset,
                costs.get("weight_bytes"), costs.get("bit_ops"), costs.get("activation_bytes"),
                costs.get("memory"), costs.get("ms"),
                report.get("sqnr_db"), report.get("metric"), report.get("drop"), report.get("worst_drop"), self._good(name),
                report.get("failed", ""), report["seconds"], name == best,
            ))  # fmt: skip
        return rows

    def _good(self, name: str) -> bool:
        """Whether a result is good, by the samples that choose, or by the outputs."""
        report, options = self.reports[name], self._job.options
        if "failed" in report:
            return False
        quiet, least = report["sqnr_db"], options["min_sqnr"]
        if least is not None and quiet is not None and quiet < least:
            return False
        if options["metric"] is None:
            return True
        return bool(report["share"] == 1 and report["drop"] <= self._float["allowed"])

    def _best(self, names: Sequence[str]) -> str | None:
        """The cheapest good trial whose drop on the held-back samples is allowed with the requested confidence."""
        cost = self._job.options["cost"]
        other = next(c for c in COSTS[:2] if c != cost)
        reports = self.reports

        def loudness(name: str) -> tuple[float, str]:
            quiet = reports[name]["sqnr_db"]
            return -math.inf if quiet is None else -quiet, name

        def passes(name: str) -> bool:
            return not self._float.get("held_back") or bool(reports[name]["sure_drop"] <= self._float["allowed"])

        passed = confirmed(filter(self._good, names), loudness, passes)
        return min(passed, key=lambda n: (reports[n]["costs"][cost], reports[n]["costs"][other], n), default=None)

    def _write_state(self) -> None:
        """``best.json`` and ``report.html`` of the trials so far."""
        rows, best, nearest, reason = self._state()
        found = {
            "best": best and best.name, "folder": best and f"trials/{best.name}", "nearest": nearest and nearest.name,
            "reason": "" if best else reason,
        }  # fmt: skip
        write_json(self._job.folder / "best.json", found)
        options = self._job.options
        write_trials(self._job.folder / "report.html", rows, options["cost"], options["metric"] is not None)

    def _state(self) -> tuple[list[TrialRow], TrialRow | None, TrialRow | None, str]:
        """The trials, the best or else the nearest of them, and why there is no best one."""
        rows = self.rows()
        best = next((row for row in rows if row.best), None)
        tried = [row for row in rows if not row.failed]
        nearest = None if best is not None else min(tried, key=quality, default=None)
        return rows, best, nearest, "" if best is not None else self._why_float(rows, tried, nearest)

    def result(self) -> AutoResult:
        """The result of the trials so far."""
        if self.reports:
            self._write_state()
        rows, best, nearest, why = self._state()
        reason = f"{self.reason}; {why}" if why else self.reason
        told = best or nearest
        folder = None if told is None else self._job.folder / "trials" / told.name
        return AutoResult(
            tuple(rows), best, nearest, reason, folder, self._float.get("metric"), self._float.get("better", ""),
            self._job.options["cost"], self._job,
        )  # fmt: skip

    def _why_float(self, rows: Sequence[TrialRow], tried: Sequence[TrialRow], nearest: TrialRow | None) -> str:
        if not rows:
            return "no trial has finished, so the float model is what remains"
        if not tried:
            return f"every trial failed, so the float model is what remains; the first one: {rows[0].failed}"
        assert nearest is not None
        if any(row.good for row in tried):
            held = self._float.get("held_back")
            return (
                f"trials keep within the allowed drop on the samples that choose, but on the {held} samples held back none does "
                "with the confidence asked for, so the float model is what remains: give the metric more samples, or allow more"
            )
        how = f"a drop of {nearest.drop:.4g}" if nearest.drop is not None else f"{nearest.sqnr_db:.1f} dB"
        return f"no trial is good enough, so the float model is what remains; {nearest.name} comes closest, with {how}"
