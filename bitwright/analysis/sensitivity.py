"""Measuring targets by running steps again, or by switching quantizers in the simulation, with a deadline and a file.

What a long analysis has measured, on disk: it goes on from there after Ctrl-C, a deadline or a crash.

The metric of the float and of the quantized model, and with some quantizers switched: by outputs or by a function.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.analysis.exact import Exact, Measured, Pair, Sites
from bitwright.analysis.intervals import Better
from bitwright.analysis.metric import (
    Array,
    OutputMetric,
    are_probabilities,
    checked_values,
    divergence,
    metric_row,
    named_metric,
)
from bitwright.analysis.result import MetricRow, decibel
from bitwright.analysis.subject import Clock, Subject
from bitwright.core.files import read_document
from bitwright.core.numerics import affine
from bitwright.core.simulation.sites import Site
from bitwright.errors import BitwrightError, ConfigError
from bitwright.export.files.atomic import atomic_write
from bitwright.progress import progress as bar

if TYPE_CHECKING:
    from bitwright.methods.rounding.program import SimulatedModel

_FILE, _VERSION = "bitwright_analysis_measured.json", 1
_EVERY = 5.0  # seconds between two writes
_MOST = 1 << 28  # bytes: a metric's value of every sample, with and without every quantizer
_REMEDY = "remove it, or name another folder"


class Kept:
    """A file of measurements.

    Args:
        folder: where; made if need be. ``None`` keeps nothing.
        name: fingerprint of simulation, data and metric.

    Raises:
        ConfigError: the folder has measurements of something else, or a file that cannot be read.
    """

    def __init__(self, folder: str | Path | None, name: str) -> None:
        self._path = None if folder is None else Path(folder) / _FILE
        self._name = name
        self._written = time.monotonic()

    def load(self) -> dict[str, Any]:
        """What was measured before; empty where there is nothing."""
        if self._path is None or not self._path.exists():
            return {}
        content = read_document(self._path, ConfigError, remedy=_REMEDY, max_bytes=_MOST)
        if not (isinstance(content, dict) and isinstance(content.get("measured"), dict)):
            raise self.damaged("it holds no measurements of an analysis")
        if content.get("version") != _VERSION or content.get("fingerprint") != self._name:
            raise ConfigError(
                str(self._path),
                "it holds measurements of another simulation, other data or another metric",
                "name another folder with resume=..., or remove this file to measure anew",
            )
        return dict(content["measured"])

    def damaged(self, problem: str) -> ConfigError:
        """The error about a file that holds something else."""
        return ConfigError(str(self._path), problem, _REMEDY)

    def due(self, now: bool = False) -> bool:
        """Whether it is time to write again: every few seconds, or ``now``."""
        return self._path is not None and (now or time.monotonic() - self._written >= _EVERY)

    def save(self, measured: Mapping[str, Any]) -> None:
        """Write ``measured``; the file is the old one or the new one whole."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {"version": _VERSION, "fingerprint": self._name, "measured": dict(measured)}
        with atomic_write(self._path) as temporary:
            temporary.write_text(json.dumps(content), encoding="utf-8")
        self._written = time.monotonic()


Function = Callable[[Any], Any]
_COARSER = (8.0, 64.0)  # by what steps are widened to see whether a metric depends on the model at all


@dataclass
class Judged:
    """What the whole model is worth.

    Attributes:
        subject: the simulation.
        named: the metric, where it is read off the outputs.
        function: the metric, where it is a function of the model.
        better: which direction of it is an improvement.
        labels: right answers of each batch.
        whole: outputs of the quantized model against the float one's.
        wanted: metric's values of the float model, one array per batch.
        kl: values of the divergence, where outputs are probabilities.
    """

    subject: Subject
    named: OutputMetric | None
    function: Function | None
    better: Better
    labels: Sequence[Array | None]
    whole: Measured = field(default_factory=Measured)
    wanted: list[Array] = field(default_factory=list)
    kl: list[Array] = field(default_factory=list)
    row: MetricRow | None = None

    def batch(self, batch: Any, labels: Array | None) -> None:
        """Run the float and the quantized model on a batch."""
        wanted = [np.array(y) for y in self.subject.outputs(batch, True)]  # a runtime may reuse its own
        found = list(self.subject.outputs(batch, False))
        self.whole.add(wanted, found)
        if self.named is not None:
            self.wanted.append(self.named.values(wanted, wanted, labels))
            self.whole.values.append(self.named.values(found, wanted, labels))
        elif any(map(are_probabilities, wanted)):
            self.kl.append(divergence(found, wanted))

    def judge(self) -> None:
        """The metric, once the batches are done.

        Raises:
            ConfigError: it is not finite, or does not depend on the model.
        """
        if self.named is not None and self.wanted:
            before, after = np.concatenate(self.wanted), np.concatenate(self.whole.values)
            self.row = metric_row(self.named.name, self.named.better, before, after)
        elif self.function is not None:
            with self.subject.in_float():
                before = self.called("float")
            after = self.called("quantized")
            if np.array_equal(before, after):
                self._require_dependence(before)
            self.row = metric_row(metric_name(self.function), self.better, before, after)

    def called(self, which: str) -> Array:
        """The user's function of the model as it stands."""
        assert self.function is not None
        try:
            found = self.function(self.subject.runnable())
        except (BitwrightError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise ConfigError(
                metric_name(self.function),
                f"it fails on the {which} model: {type(error).__name__}: {error}",
                "call it yourself: metric(sim.model) of PyTorch models, metric(sim.session) of ONNX models",
            ) from error
        return checked_values(which, found)

    def switched(self, active: Callable[[Site], bool]) -> float:
        """The user's function with only some quantizers."""
        with self.subject.only(active):
            return float(self.called("partly quantized").mean())

    def _coarse(self, factor: float) -> Array:
        """The user's function of the model with wider steps on every grid."""
        undo = self.subject.sites.remember()
        try:
            for quantizer in self.subject.sites.unique():
                encoding = quantizer.encoding
                if quantizer.enabled and encoding is not None and not quantizer.derived:
                    quantizer.encoding = affine.with_scale(encoding, encoding.scale * factor)
            return self.called("coarsely quantized")
        finally:
            undo()

    def _require_dependence(self, before: Array) -> None:
        if all(np.array_equal(before, self._coarse(factor)) for factor in _COARSER):
            raise ConfigError(
                metric_name(self.function),
                f"it is {float(before.mean()):.6g} whatever the model computes: for the float model, the quantized one and "
                f"ones with {' and '.join(f'{factor:g}' for factor in _COARSER)} times wider steps",
                "let it run the model that it is given, as metric=lambda model: score(model), on data of its own",
            )

    @property
    def output(self) -> dict[str, float | None]:
        """``sqnr_db`` and ``kl`` of the outputs."""
        kl = self.kl
        if self.named is not None and self.named.name == "kl":
            kl = self.whole.values
        mean = float(np.concatenate(kl).mean()) if kl else None
        return {"sqnr_db": decibel(self.whole.ratio), "kl": mean}


def judged(
    subject: Subject, metric: str | Function | None, better: Better, labels: Sequence[Array] | None, batches: int
) -> Judged:
    """What the user asks for.

    Raises:
        ConfigError: there is no such metric, it needs labels, or ``better`` is neither ``higher`` nor ``lower``.
    """
    if better not in ("higher", "lower"):
        raise ConfigError("better", f"{better!r} is neither 'higher' nor 'lower'", "use one of them")
    by_batch = [None] * batches if labels is None else list(labels)
    if metric is None or metric == "sqnr":
        return Judged(subject, None, None, better, by_batch)
    if isinstance(metric, str):
        return Judged(subject, named_metric(metric, labels), None, better, by_batch)
    if not callable(metric):
        raise ConfigError(
            "metric",
            f"it is a {type(metric).__name__}",
            "give a name (accuracy, agreement, kl) or a function of the model",
        )
    return Judged(subject, None, metric, better, by_batch)


def metric_name(metric: Function | None) -> str:
    """What a function is called in tables."""
    return str(getattr(metric, "__name__", None) or type(metric).__name__)


@dataclass
class Sensitivity:
    """What switching quantizers does to the outputs and to the metric.

    Attributes:
        subject, judged: the simulation, and what it is judged by.
        model: the simulation as steps; ``None`` where it has none, and quantizers are switched in the simulation.
        batches: data of the measurements.
        labels: of these batches.
        clock, kept, show: when to stop, where to keep what is known, and whether to show progress.
        budget: bytes of values in memory.
        pairs: target -> what was measured.
        metrics: target -> the user's function with only it, and with all but it.
        passes: forward passes over ``batches``.
        stopped: whether the time ended before all was measured, or Ctrl-C came.
    """

    subject: Subject
    judged: Judged
    model: SimulatedModel | None
    batches: Sequence[Any]
    labels: Sequence[Array | None]
    clock: Clock
    kept: Kept
    show: bool
    budget: int
    pairs: dict[str, Pair] = field(default_factory=dict)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    passes: float = 0.0
    stopped: str = ""
    runs: int = 0
    peak: int = 0

    def load(self) -> int:
        """Take what an earlier analysis measured; returns how much."""
        found = self.kept.load()
        try:
            pairs = {name: Pair.from_dict(row) for name, row in found.get("pairs", {}).items()}
            metrics = {n: (float(a), float(b)) for n, (a, b) in found.get("metrics", {}).items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.kept.damaged(f"its measurements cannot be read ({error!r})") from error
        self.pairs.update(pairs)
        self.metrics.update(metrics)
        return len(self.pairs) + len(self.metrics)

    def measure(self, targets: Mapping[str, Sites]) -> None:
        """Measure targets, the first first, until all are done or the time is up."""
        try:
            if self.model is None:
                self._switch(targets)
            else:
                self._run_again(targets)
        except KeyboardInterrupt:
            self.stopped = "Ctrl-C"
        finally:
            self._save(now=True)

    def measure_metric(self, targets: Mapping[str, Sites]) -> None:
        """Call the user's function with only the sites of each target, and with all but them."""
        if self.judged.function is None or self.stopped:
            return
        todo = {name: sites for name, sites in targets.items() if name not in self.metrics}
        try:
            for name in self._order(todo, "metric"):
                inside = _among(todo[name])
                only = self.judged.switched(inside)
                self.metrics[name] = only, self.judged.switched(_not(inside))
        except KeyboardInterrupt:
            self.stopped = "Ctrl-C"
        finally:
            self._save(now=True)

    def _order(self, names: Iterable[str], title: str) -> Iterator[str]:
        for name in bar(list(names), title, self.show):
            if self.clock.over:
                self.stopped = self.stopped or f"the deadline of {self.clock.limit:g} s"
                return
            yield name
            self._save()

    def _run_again(self, targets: Mapping[str, Sites]) -> None:
        assert self.model is not None
        exact = Exact(self.model, self.batches, self.judged.named, self.labels, budget=self.budget)
        exact.found = self.pairs
        try:
            exact.measure(targets, lambda names: self._order(names, "quantizers"))
        finally:
            self.runs, self.peak = self.runs + exact.runs, max(self.peak, exact.peak)
            self.passes += exact.runs / max(exact.steps, 1)
        hidden = {name: sites for name, sites in targets.items() if not sites & exact.seen}
        if hidden and not self.stopped:  # in bodies of loops and branches: steps do not show them
            for name in hidden:
                self.pairs.pop(name, None)
            self._switch(hidden)

    def _switch(self, targets: Mapping[str, Sites]) -> None:
        wanted = [[np.array(y) for y in self.subject.outputs(batch, True)] for batch in self.batches]
        todo = [name for name in targets if name not in self.pairs]
        for name in self._order(todo, "quantizers"):
            inside = _among(targets[name])
            only = self._outputs(inside, wanted)
            without = self._outputs(_not(inside), wanted)
            self.pairs[name] = Pair(only, without, len(self.batches))
            self.passes += 2

    def _outputs(self, active: Callable[[Site], bool], wanted: Sequence[Sequence[Array]]) -> Measured:
        found = Measured()
        with self.subject.only(active):
            for batch, labels, reference in zip(self.batches, self.labels, wanted, strict=True):
                outputs = list(self.subject.outputs(batch, False))
                found.add(reference, outputs)
                if self.judged.named is not None:
                    found.values.append(self.judged.named.values(outputs, reference, labels))
        return found

    def _save(self, *, now: bool = False) -> None:
        if self.kept.due(now):
            self.kept.save({"pairs": {n: p.to_dict() for n, p in self.pairs.items()}, "metrics": self.metrics})


def _among(names: Sites) -> Callable[[Site], bool]:
    return lambda site: site.name in names


def _not(condition: Callable[[Site], bool]) -> Callable[[Site], bool]:
    return lambda site: not condition(site)
