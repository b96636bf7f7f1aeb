"""Measure a configuration by output noise and the user's metric, on as much data as the answer needs.

:func:`analyze_groups` and :func:`lower_in_order` measure one group at a time, for searches of a user's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.analysis.subject import Subject, open_subject
from bitwright.core.simulation.simulation import all_or_nothing
from bitwright.errors import ConfigError, close_matches
from bitwright.methods.switching import Costs, changed, in_turn
from bitwright.metrics.intervals import Better, Difference, compare, without_samples
from bitwright.metrics.labels import split_labels
from bitwright.metrics.metric import OutputMetric, checked_values, is_function, named_metric
from bitwright.precision.candidates import Group, as_candidates, find_groups, highest, spec_at
from bitwright.recipes.judge import Judge

logger = logging.getLogger("bitwright")

Array = NDArray[Any]
_COARSER = 1000.0  # by what steps are widened so that outputs are noise
_DOUBT = 1e-3  # chance with which racing may drop a point that is as good as allowed
_LEAST_NOISE = 1e-5  # noise-to-signal ratio above which a metric that does not change is tested
_PARTS = (0.125, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Score:
    """A measurement of the metric.

    Attributes:
        values: one number, or one per sample.
        share: of the data that was looked at; below 1 where the point was dropped early.
    """

    values: Array
    share: float = 1.0

    @property
    def mean(self) -> float:
        """The metric."""
        return float(self.values.mean())


class Metric:
    """The user's metric, measured on the simulation as it stands.

    Args:
        subject: the simulation.
        metric: what :func:`bitwright.metrics.metric.find_metric` takes, or a function of the model (the session in ONNX) that
            returns a number or one value per sample.
        lower_is_better: for a function.
        data, labels: what the named metrics are measured on.
        allowed: the largest drop, or a text with a percentage of the float metric (``"1%"``); ``None`` where there is none.
        seed: of the half of the samples that is held back.

    Raises:
        ConfigError: a metric that cannot be understood, or is not finite of the float model.
    """

    def __init__(
        self,
        subject: Subject,
        metric: Any,
        *,
        lower_is_better: bool = False,
        data: Sequence[Any] = (),
        labels: Any = None,
        allowed: float | str | None = None,
        seed: int = 0,
    ) -> None:
        self._subject, self._data = subject, data
        self._named: OutputMetric | None = None
        self.better: Better
        if not is_function(metric):
            self._named = named_metric(metric, labels)
            self.name, self.better = self._named.name, self._named.better
        else:
            self._function = metric
            self.name = getattr(metric, "__name__", type(metric).__name__)
            self.better = "lower" if lower_is_better else "higher"
        self._labels: Sequence[Array | None] = split_labels(labels, data) or [None] * len(data)
        self._wanted: list[Sequence[Array]] = []
        self.trusted = False
        self.evaluations, self.seconds = 0.0, 0.0
        begin = time.perf_counter()
        self.reference = self._float()
        self.seconds = time.perf_counter() - begin
        self.allowed = _allowed(allowed, self.reference.mean)
        self._chosen = self._split(seed)

    def _float(self) -> Score:
        if self._named is not None:
            self._wanted = [[np.array(y) for y in self._subject.outputs(batch, True)] for batch in self._data]
            values = [self._of(i, wanted) for i, wanted in enumerate(self._wanted)]
            return Score(checked_values("float", self._named.per_sample(values)))
        with self._subject.in_float():
            return Score(checked_values("float", self._function(self._subject.runnable())))

    def _of(self, batch: int, outputs: Sequence[Array]) -> Array:
        assert self._named is not None
        return self._named.values(outputs, self._wanted[batch], self._labels[batch])

    def _split(self, seed: int) -> NDArray[np.bool_] | None:
        """Mask of the samples that choose; the others are held back for the final measurement."""
        n = self.reference.values.size
        if self.reference.values.ndim == 0 or n < 8:
            return None
        chosen = np.zeros(n, bool)
        chosen[np.random.default_rng(seed).permutation(n)[: n // 2]] = True
        return chosen

    # -- measuring

    def measure(self, subject: Subject | None = None) -> Score:
        """The metric of the simulation as it stands; a named one stops as soon as the drop is beyond doubt too large.

        Args:
            subject: another simulation of the same model.
        """
        subject = subject or self._subject
        begin = time.perf_counter()
        score = self._raced(subject) if self._named is not None else self._whole(subject)
        self.seconds = max(self.seconds, time.perf_counter() - begin)
        self.evaluations += score.share
        return score

    def _whole(self, subject: Subject) -> Score:
        values = checked_values("quantized", self._function(subject.runnable()))
        if values.shape != self.reference.values.shape:
            raise ConfigError(
                "metric",
                f"it gives {self.reference.values.size} values of the float model and {values.size} of the quantized one",
                "return one value per sample, in the same order for both",
            )
        return Score(values)

    def _raced(self, subject: Subject) -> Score:
        assert self._named is not None
        found: list[Array] = []
        done, total = 0, len(self._data)
        for part in _PARTS if self._named.whole is None else (1.0,):
            last = max(1, round(part * total))
            for i in range(done, last):
                found.append(self._of(i, subject.outputs(self._data[i], False)))
            done = max(done, last)
            values = self._named.per_sample(found)
            if part < 1 and self._beyond_doubt(values):
                return Score(checked_values("quantized", values), done / total)
        return Score(checked_values("quantized", self._named.per_sample(found)))

    def _beyond_doubt(self, values: Array) -> bool:
        """Whether the measurements so far exclude that the drop is allowed."""
        if self.allowed is None or values.size < 8:
            return False
        found = compare(self.reference.values[: values.size], values, confidence=1 - 2 * _DOUBT, better=self.better)
        low, high = self._drop(found.high), self._drop(found.low)
        return min(low, high) > self.allowed

    def _drop(self, change: float | None) -> float:
        change = 0.0 if change is None else change
        return change if self.better == "lower" else -change

    # -- judging

    def drop(self, score: Score, *, held_back: bool = False) -> float:
        """How much worse than float, on the samples that choose or on those held back; all where none are."""
        n = score.values.size
        part = self._part(n, held_back)
        return (
            self._drop(float(score.values[part].mean() - self.reference.values[:n][part].mean()))
            if (score.values.ndim)
            else self._drop(score.mean - self.reference.mean)
        )

    def _part(self, n: int, held_back: bool) -> Any:
        if self._chosen is None:
            return slice(None)
        part = ~self._chosen[:n] if held_back else self._chosen[:n]
        return part if part.any() else slice(None)

    @property
    def held_back(self) -> int:
        """Samples held back."""
        return 0 if self._chosen is None else int((~self._chosen).sum())

    def bound(self, score: Score, confidence: float) -> float:
        """The largest drop that the samples that choose leave possible with ``confidence``."""
        return self.worst(self.interval(score, one_sided(confidence), held_back=False))

    def interval(self, score: Score, confidence: float, *, held_back: bool = True) -> Difference:
        """The change on the samples held back, with its interval; without samples there is none."""
        n = score.values.size
        if score.values.ndim == 0 or n < 2:
            return without_samples(self.reference.mean, score.mean, self.better)
        part = self._part(n, held_back)
        before, after = self.reference.values[:n][part], score.values[part]
        if before.size < 2:
            return without_samples(float(before.mean()), float(after.mean()), self.better)
        return compare(before, after, confidence=confidence, better=self.better)

    def worst(self, difference: Difference) -> float:
        """The largest drop within an interval."""
        ends = [difference.low, difference.high] if difference.low is not None else [difference.estimate]
        return max(self._drop(end) for end in ends)

    def suspicious(self, score: Score, noise: float) -> bool:
        """Whether a score suggests that the metric ignores the model or has the other direction."""
        same = np.array_equal(score.values, self.reference.values) and noise > _LEAST_NOISE
        return score.share == 1 and (bool(same) or -self.drop(score) > 0.02 * max(abs(self.reference.mean), 1e-12))

    def put_to_test(self, noise: Noise) -> None:
        """Check the metric once on very coarse grids, whose noise it must detect.

        Raises:
            ConfigError: see :meth:`check_direction`.
        """
        if self.trusted:
            return
        before = self._subject.remember()
        try:
            for quantizer in self._subject.sites.unique():
                known = quantizer.encoding is not None and quantizer.enabled
                if known and quantizer.role in ("input", "output", "weight"):
                    encoding = quantizer.required
                    quantizer.encoding = replace(encoding, scale=encoding.scale * np.float32(_COARSER))
            try:
                score = self.measure()
            except MemoryError:
                raise
            except Exception as error:  # the user's own: what refuses outputs that are noise has read them
                logger.info("the metric refuses outputs that are noise: %s: %s", type(error).__name__, error)
            else:
                self.check_direction(score, noise.measure())
        finally:
            before()
        self.trusted = True

    def check_direction(self, score: Score, noise: float) -> None:
        """Refuse a metric that does not tell a model whose outputs are noise from the float model, or calls it better.

        Raises:
            ConfigError: the metric is constant, or its direction is the other one.
        """
        if noise < 0.5 or score.share < 1:
            return
        seen = f"it is {score.mean:.6g} for outputs that are mostly noise ({noise:.0%} of the signal)"
        if np.array_equal(score.values, self.reference.values):
            raise ConfigError(
                "metric",
                f"{seen}, the same as in float",
                "return what depends on the outputs of the model that is passed, not of another one",
            )
        if -self.drop(score) > 0.02 * max(abs(self.reference.mean), 1e-12):
            other = "lower_is_better=True" if self.better == "higher" else "lower_is_better=False"
            raise ConfigError(
                "metric",
                f"{seen} and {self.reference.mean:.6g} in float, and {self.better} is better",
                f"pass {other}, if the metric is an error or a perplexity",
            )


def one_sided(confidence: float) -> float:
    """Confidence of an interval one end of which holds with ``confidence``."""
    return min(max(0.5, 1 - 2 * (1 - confidence)), 0.9999)


def _allowed(given: float | str | None, reference: float) -> float | None:
    if given is None:
        return None
    try:
        if isinstance(given, str) and given.strip().endswith("%"):
            found = float(given.strip()[:-1]) / 100 * abs(reference)
        else:
            found = float(given)
    except ValueError:
        found = -1.0
    if not np.isfinite(found) or found < 0:
        raise ConfigError(
            "allowed_drop", f"{given!r} is not a drop", 'write 0.01 in units of the metric, or "1%" of the float metric'
        )
    return found


class Noise:
    """Noise over signal of the outputs, on batches that nothing is chosen on; of several outputs, the mean.

    It adds up over what makes it, as the estimates do; a mean of dB would not.

    Args:
        subject: the simulation.
        data: batches.
    """

    def __init__(self, subject: Subject, data: Iterable[Any]) -> None:
        self._judge, self.rest = Judge.of(data, lambda batch: subject.outputs(batch, True))
        self._judge.look_at_layers(subject.sim)
        self._judge.wanted  # noqa: B018  (the float outputs, before any weight is rounded)
        self._subject, self._outputs = subject, _outputs(subject)
        self.runs = 0

    @property
    def where(self) -> str:
        """On what it is measured, in one phrase."""
        return self._judge.where

    def measure(self, subject: Subject | None = None) -> float:
        """Measure the current simulation, or another one of the same model."""
        self.runs += 1
        if self._judge.looks_at_more:
            outputs = self._judge.answers((subject or self._subject).sim)
        else:
            outputs = self._outputs if subject is None else lambda batch: subject.outputs(batch, False)
        ratios = self._judge.ratios(outputs)
        return float(np.mean(ratios)) if ratios else 0.0


def _outputs(subject: Subject) -> Callable[[Any], Sequence[Array]]:
    if subject.front_end == "torch":
        return lambda batch: subject.outputs(batch, False)
    from bitwright.onnx.model.data import as_feeds
    from bitwright.onnx.model.session import run_session

    session = subject.sim.trial_session()
    return lambda batch: [
        y if isinstance(y, np.ndarray) else np.empty(0, np.int64)
        for y in run_session(session, as_feeds(batch, subject.sim.specs), "the simulation")
    ]


def analyze_groups(
    sim: Any, candidates: Sequence[Any], evaluate: Callable[[Any], float]
) -> dict[tuple[str, str], float]:
    """Metric with one group alone at a candidate, the others at the one with the most bits; the simulation is as before.

    Args:
        sim: calibrated.
        candidates: as for :func:`bitwright.mixed_precision`.
        evaluate: of the model, or of the session.
    """
    subject, wanted = open_subject(sim), as_candidates(candidates)
    groups, best = find_groups(sim, wanted), wanted[highest(wanted)]

    def all_at_best() -> None:
        for group in groups:
            _set(sim, group, best)

    alone = {
        (group.name, candidate.name): [partial(changed, partial(_set, sim, group, candidate), subject.remember)]
        for group in groups
        for candidate in wanted
        if candidate is not best
    }
    with changed(all_at_best, subject.remember):
        found = Costs().scores(alone, lambda _: float(evaluate(subject.runnable())))
        return {key: score for key, (score,) in found}


def lower_in_order(sim: Any, sensitivities: Mapping[tuple[str, str], float], accepts: Callable[[Any], bool]) -> Any:
    """Lower groups, the least sensitive first, while the result is accepted.

    Raises:
        ConfigError: a group that the simulation does not have.
    """
    subject = open_subject(sim)
    candidates = {c.name: c for c in as_candidates(sorted({name for _, name in sensitivities}))}
    groups = {g.name: g for g in find_groups(sim, list(candidates.values()))}
    order = sorted(sensitivities, key=lambda key: -sensitivities[key])
    for name, _ in order:
        if name not in groups:
            raise ConfigError(
                name, f"the simulation has no such group{close_matches(name, groups)}", "analyze this simulation"
            )  # fmt: skip
    changes = {key: partial(_set, sim, groups[key[0]], candidates[key[1]]) for key in order}
    with all_or_nothing(sim):
        in_turn(changes, lambda _: accepts(subject.runnable()), lambda _: subject.remember())
    return sim


def _set(sim: Any, group: Group, candidate: Any) -> None:
    for name in group.sites:
        site = sim.quantizers[name]
        spec = candidate.weight if site.is_stored else candidate.activation
        if spec is None:
            site.enabled = False
        else:
            site.spec = spec_at(site.quantizer.spec, spec)
