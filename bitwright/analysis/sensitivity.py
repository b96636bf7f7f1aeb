"""Measurements of an analysis: the metric of the whole model, and targets enabled alone or left out.

:class:`Sensitivity` measures a target by running again what it changes (:mod:`bitwright.analysis.exact`), or by switching
quantizers in the simulation where there are no steps; :class:`Judged` compares the quantized model with the float model, by
outputs or by the user's function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.analysis.exact import Exact, Measured, Pair, Sites
from bitwright.analysis.result import decibel
from bitwright.analysis.subject import Subject
from bitwright.core.numerics import affine
from bitwright.errors import BitwrightError, ConfigError
from bitwright.methods.switching import Costs, Setting, by_itself, changed, left_out
from bitwright.metrics.intervals import Better
from bitwright.metrics.metric import (
    Array,
    MetricRow,
    OutputMetric,
    are_probabilities,
    checked_values,
    divergence,
    is_function,
    metric_row,
    named_metric,
)

if TYPE_CHECKING:
    from bitwright.methods.rounding.program import SimulatedModel

Function = Callable[[Any], Any]
_COARSER = (8.0, 64.0)  # by what steps are widened to see whether a metric depends on the model at all


@dataclass
class Judged:
    """Metric and output error of the whole model.

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
            before = checked_values("float", self.named.per_sample(self.wanted))
            after = checked_values("quantized", self.named.per_sample(self.whole.values))
            self.row = metric_row(self.named.name, self.named.better, before, after)
        elif self.function is not None:
            with self.subject.in_float():
                before = self.called("float")
            after = self.called("quantized")
            if np.array_equal(before, after) and all(np.array_equal(before, self._coarse(f)) for f in _COARSER):
                raise ConfigError(
                    metric_name(self.function),
                    f"it is {float(before.mean()):.6g} whatever the model computes: for the float model, the quantized one and "
                    f"ones with {' and '.join(f'{factor:g}' for factor in _COARSER)} times wider steps",
                    "let it run the model that it is given, as metric=lambda model: score(model), on data of its own",
                )
            self.row = metric_row(metric_name(self.function), self.better, before, after)

    def called(self, which: str) -> Array:
        """Call the user's function with the current model."""
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

    def _coarse(self, factor: float) -> Array:
        """Call the user's function with coarser steps on every grid."""

        def widen() -> None:
            for quantizer in self.subject.sites.unique():
                encoding = quantizer.encoding
                if quantizer.enabled and encoding is not None and not quantizer.derived:
                    quantizer.encoding = affine.with_scale(encoding, encoding.scale * factor)

        with changed(widen, self.subject.sites.remember):
            return self.called("coarsely quantized")

    @property
    def output(self) -> dict[str, float | None]:
        """``sqnr_db`` and ``kl`` of the outputs."""
        kl = self.kl
        if self.named is not None and self.named.name == "kl":
            kl = self.whole.values
        mean = float(np.concatenate(kl).mean()) if kl else None
        return {"sqnr_db": decibel(self.whole.ratio), "kl": mean}


def judged(subject: Subject, metric: Any, better: Better, labels: Sequence[Array] | None, batches: int) -> Judged:
    """Build it from the user's ``metric`` and ``better``.

    Raises:
        ConfigError: there is no such metric, it needs labels, or ``better`` is neither ``higher`` nor ``lower``.
    """
    if better not in ("higher", "lower"):
        raise ConfigError("better", f"{better!r} is neither 'higher' nor 'lower'", "use one of them")
    by_batch = [None] * batches if labels is None else list(labels)
    if metric is None:
        return Judged(subject, None, None, better, by_batch)
    if not is_function(metric):
        return Judged(subject, named_metric(metric, labels), None, better, by_batch)
    return Judged(subject, None, metric, better, by_batch)


def metric_name(metric: Function | None) -> str:
    """Name of a metric function in tables."""
    return str(getattr(metric, "__name__", None) or type(metric).__name__)


@dataclass(kw_only=True)
class Sensitivity(Costs):
    """Effect of single targets on the outputs and the metric.

    Attributes:
        subject, judged: the simulation, and what it is judged by.
        model: the simulation as steps; ``None`` where it has none, and quantizers are switched in the simulation.
        batches: data of the measurements.
        labels: of these batches.
        budget: bytes of values in memory.
        pairs: target -> what was measured.
        metrics: target -> the user's function with only it, and with all but it.
        passes: forward passes over ``batches``.
    """

    subject: Subject
    judged: Judged
    model: SimulatedModel | None
    batches: Sequence[Any]
    labels: Sequence[Array | None]
    budget: int
    pairs: dict[str, Pair] = field(default_factory=dict)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    passes: float = 0.0
    runs: int = 0
    peak: int = 0

    def load(self) -> int:
        """Load the measurements of an earlier analysis; returns how many there are."""
        found = self.kept.load()
        try:
            pairs = {name: Pair.from_dict(row) for name, row in found.get("pairs", {}).items()}
            metrics = {n: (float(a), float(b)) for n, (a, b) in found.get("metrics", {}).items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.kept.damaged(f"its measurements cannot be read ({error!r})") from error
        self.pairs.update(pairs)
        self.metrics.update(metrics)
        return len(self.pairs) + len(self.metrics)

    def known(self) -> Mapping[str, Any]:
        """All measurements, as JSON types."""
        return {"pairs": {name: pair.to_dict() for name, pair in self.pairs.items()}, "metrics": self.metrics}

    def measure(self, targets: Mapping[str, Sites]) -> None:
        """Measure targets, the first first, until all are done or the time is up."""
        with self.going_on():
            if self.model is None:
                self._switch(targets)
                return
            exact = Exact(self.model, self.batches, self.judged.named, self.labels, budget=self.budget)
            exact.found = self.pairs
            try:
                exact.measure(targets, lambda names: self.over(names, "quantizers"))
            finally:
                self.runs, self.peak = self.runs + exact.runs, max(self.peak, exact.peak)
                self.passes += exact.runs / max(exact.steps, 1)
            hidden = {name: sites for name, sites in targets.items() if not sites & exact.seen}
            if hidden and not self.stopped:  # in bodies of loops and branches: steps do not show them
                for name in hidden:
                    self.pairs.pop(name, None)
                self._switch(hidden)

    def measure_metric(self, targets: Mapping[str, Sites]) -> None:
        """Call the user's function with only the sites of each target, and with all but them."""
        if self.judged.function is None or self.stopped:
            return
        todo = self._settings(targets, self.metrics)
        with self.going_on():
            called = self.scores(todo, lambda name: float(self.judged.called("partly quantized").mean()), "metric")
            for name, (alone, without) in called:
                self.metrics[name] = alone, without

    def _settings(self, targets: Mapping[str, Sites], known: Mapping[str, Any]) -> dict[str, tuple[Setting, Setting]]:
        """Quantizer settings of the targets not measured yet: only their sites, and all but these."""
        sites = self.subject.sites
        todo = {name: held for name, held in targets.items() if name not in known}
        return {name: (partial(by_itself, sites, held), partial(left_out, sites, held)) for name, held in todo.items()}

    def _switch(self, targets: Mapping[str, Sites]) -> None:
        wanted = [[np.array(y) for y in self.subject.outputs(batch, True)] for batch in self.batches]

        def outputs(name: str) -> Measured:
            found = Measured()
            for batch, labels, reference in zip(self.batches, self.labels, wanted, strict=True):
                quantized = list(self.subject.outputs(batch, False))
                found.add(reference, quantized)
                if self.judged.named is not None:
                    found.values.append(self.judged.named.values(quantized, reference, labels))
            return found

        for name, (alone, without) in self.scores(self._settings(targets, self.pairs), outputs, "quantizers"):
            self.pairs[name] = Pair(alone, without, len(self.batches))
            self.passes += 2
