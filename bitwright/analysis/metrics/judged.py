"""The metric of the float and of the quantized model, and with some quantizers switched: by outputs or by a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitwright.analysis.intervals import Better
from bitwright.analysis.metrics.exact import Measured
from bitwright.analysis.metrics.metric import (
    Array,
    OutputMetric,
    are_probabilities,
    checked_values,
    divergence,
    metric_row,
    named_metric,
)
from bitwright.analysis.result import MetricRow, decibel
from bitwright.analysis.subject.subject import Subject
from bitwright.core.numerics import affine
from bitwright.core.simulation.sites import Site
from bitwright.errors import BitwrightError, ConfigError

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
