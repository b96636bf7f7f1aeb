"""Metrics of a model: a named comparison of outputs, or the user's function of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.analysis.intervals import Better, compare, without_samples
from bitwright.analysis.result import MetricRow
from bitwright.errors import ConfigError, close_matches

Array = NDArray[Any]
OfOutputs = Callable[[Sequence[Array], Sequence[Array], Array | None], Array]
"""(outputs, outputs of the float model, labels) -> one value per sample."""


@dataclass(frozen=True)
class OutputMetric:
    """A metric that is read off the outputs, so that every measurement gives it at no cost.

    Attributes:
        name: as the user gave it.
        better: which direction is an improvement.
        values: see :data:`OfOutputs`.
        needs_labels: whether the right answers have to be known.
    """

    name: str
    better: Better
    values: OfOutputs
    needs_labels: bool = False


def answers(outputs: Sequence[Array]) -> Array:
    """The first output that has scores of classes, ``[N, ..., classes]``.

    Raises:
        ConfigError: there is none.
    """
    for y in outputs:
        if y.dtype.kind == "f" and y.ndim >= 2 and y.shape[-1] > 1:
            return np.moveaxis(y, 1, -1) if y.ndim >= 4 else y
    raise ConfigError(
        "metric",
        f"no output has scores of classes: their shapes are {[tuple(y.shape) for y in outputs]}",
        "pass a function of the model instead: metric=lambda model: ...",
    )


def _right(outputs: Sequence[Array], _: Sequence[Array], labels: Array | None) -> Array:
    found = answers(outputs).argmax(-1)
    assert labels is not None
    if labels.shape != found.shape:
        raise ConfigError(
            "labels",
            f"they have shape {labels.shape} for a batch whose answers have shape {found.shape}",
            "give one label per sample, in the order of the data",
        )
    return (found == labels).reshape(len(found), -1).mean(1)


def _same(outputs: Sequence[Array], wanted: Sequence[Array], _: Array | None) -> Array:
    found = answers(outputs).argmax(-1)
    return (found == answers(wanted).argmax(-1)).reshape(len(found), -1).mean(1)


def divergence(outputs: Sequence[Array], wanted: Sequence[Array], _: Array | None = None) -> Array:
    """Kullback-Leibler divergence of the answers' probabilities from the float model's, in nats, one per sample."""
    log_p, log_q = _log_probabilities(answers(wanted)), _log_probabilities(answers(outputs))
    each = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    return np.maximum(each, 0.0).reshape(len(each), -1).mean(1)


def are_probabilities(y: Array) -> bool:
    """Whether the last axis of an output adds up to one."""
    shaped = y.dtype.kind == "f" and y.ndim >= 2 and y.shape[-1] > 1
    return bool(shaped and y.size and (y >= 0).all() and np.allclose(y.sum(-1), 1, atol=1e-3))


def _log_probabilities(y: Array) -> Array:
    scores = y.astype(np.float64)
    if are_probabilities(y):
        return np.log(np.maximum(scores, 1e-12))
    scores = scores - scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


NAMED = {
    "accuracy": OutputMetric("accuracy", "higher", _right, needs_labels=True),
    "agreement": OutputMetric("agreement", "higher", _same),
    "kl": OutputMetric("kl", "lower", divergence),
}
"""``accuracy``: share of right answers; ``agreement``: share of answers as the float model gives them; ``kl``."""


def named_metric(name: str, labels: Sequence[Any] | Array | None) -> OutputMetric:
    """A row of :data:`NAMED`.

    Raises:
        ConfigError: there is none of that name, or it needs labels and there are none.
    """
    if name not in NAMED:
        raise ConfigError(
            "metric",
            f"there is no metric {name!r}{close_matches(name, NAMED)}",
            f"use {', '.join(NAMED)}, or a function of the model that returns one value per sample",
        )
    if NAMED[name].needs_labels and labels is None:
        raise ConfigError(
            "metric",
            f"{name} compares with the right answers, and no labels are given",
            "pass labels=..., one per sample in the order of the data, or metric='agreement', which needs none",
        )
    return NAMED[name]


def checked_values(which: str, found: Any) -> Array:
    """Check the result of a user's metric: a number, or one value per sample.

    Raises:
        ConfigError: it is neither, or not finite.
    """
    try:
        values = np.asarray(found.detach().cpu() if hasattr(found, "detach") else found, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "metric",
            f"it returns a {type(found).__name__}",
            "return a number, or one value per sample as a list or array",
        ) from error
    if values.ndim > 1 or not values.size:
        raise ConfigError(
            "metric", f"it returns an array of shape {values.shape}", "return a number, or one value per sample"
        )
    if not np.isfinite(values).all():
        bad = int((~np.isfinite(values)).sum())
        of = f" for {bad} of {values.size} samples" if values.ndim else ""
        raise ConfigError(
            "metric",
            f"of the {which} model it is {'NaN' if np.isnan(values).any() else 'infinite'}{of}",
            "check the metric on the float model; `bitwright doctor` finds the operator that makes NaN",
        )
    return values


def metric_row(name: str, better: Better, wanted: Array, found: Array) -> MetricRow:
    """Both values and how sure their difference is."""
    if wanted.shape != found.shape:
        raise ConfigError(
            "metric",
            f"it gives {wanted.size} values of the float model and {found.size} of the quantized one",
            "return one value per sample, in the same order for both",
        )
    before, after = float(wanted.mean()), float(found.mean())
    paired = wanted.ndim and wanted.size > 1
    difference = compare(wanted, found, better=better) if paired else without_samples(before, after, better)
    return MetricRow(name, before, after, better, difference)
