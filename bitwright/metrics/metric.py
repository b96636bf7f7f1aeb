"""Metrics of a model: by name, an object of torchmetrics, or the user's function of the model.

A metric that is no mean over samples (F1, mIoU, perplexity, word error rate, mean average precision) gets a value per sample
too: the jackknife's pseudo-values, that is what leaving the sample out changes, shifted so that their mean is the metric itself.
Intervals, held-out halves and paired comparisons then work as for right and wrong answers. Reference: Efron and Stein 1981.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.registry import Registry
from bitwright.errors import ConfigError, close_matches, with_article
from bitwright.metrics import detection
from bitwright.metrics.intervals import Better, Difference, compare, scipy_stats, without_samples
from bitwright.metrics.labels import split_labels

Array = NDArray[Any]
Number = float
OfOutputs = Callable[[Sequence[Array], Sequence[Array], Array | None], Array]
"""(outputs, outputs of the float model, labels) -> one value per sample, or what :attr:`OutputMetric.whole` takes."""


@dataclass(frozen=True)
class OutputMetric:
    """A metric that is read off the outputs, so that every measurement gives it at no cost.

    Attributes:
        name: as the user gave it.
        better: which direction is an improvement.
        values: see :data:`OfOutputs`.
        needs_labels: whether the right answers have to be known.
        whole: what ``values`` returned of all samples -> a value per sample whose mean is the metric; ``None`` where these are
            the values. Such a metric of a part of the samples says little, so none is measured on parts.
    """

    name: str
    better: Better
    values: OfOutputs
    needs_labels: bool = False
    whole: Callable[[Array], Array] | None = None

    def per_sample(self, parts: Sequence[Array]) -> Array:
        """Values per sample over all batches; their mean is the metric."""
        if self.whole is None or not parts:
            return np.concatenate(parts) if parts else np.empty(0)
        return self.whole(np.concatenate(parts))


@dataclass(frozen=True)
class MetricRow:
    """The metric of the float and of the quantized model."""

    name: str
    float: Number
    quantized: Number
    better: str
    difference: Difference


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


def _labels_like(labels: Array | None, shape: tuple[int, ...], what: str) -> Array:
    """Labels as an array of numbers of ``shape``.

    Raises:
        ConfigError: they have another shape.
    """
    assert labels is not None
    try:
        found = np.stack([np.asarray(x) for x in labels]) if labels.dtype == object else labels
    except ValueError:
        found = labels
    if found.ndim == len(shape) + 1 and 1 in (found.shape[-1], found.shape[1:2][0]):
        found = found.reshape(shape) if found.size == math.prod(shape) else found
    if found.shape != shape or found.dtype == object:
        raise ConfigError(
            "labels",
            f"they have shape {found.shape} for a batch whose {what} have shape {shape}",
            "give one label per sample, in the order of the data",
        )
    return found


def predicted(outputs: Sequence[Array]) -> tuple[Array, int]:
    """Classes that the outputs choose, and how many there are; of a single score whether it is above one half, or above 0."""
    for y in outputs:
        if y.dtype.kind == "f" and (y.ndim == 1 or (y.ndim == 2 and y.shape[1] == 1)):
            flat = y.reshape(-1)
            return (flat > (0.5 if ((flat >= 0) & (flat <= 1)).all() else 0)).astype(np.int64), 2
        if y.dtype.kind == "f" and y.ndim >= 2:
            break
    scores = answers(outputs)
    return scores.argmax(-1), scores.shape[-1]


def _mean(values: Array) -> Array:
    return values.reshape(len(values), -1).mean(1)


def _same(outputs: Sequence[Array], wanted: Sequence[Array], _: Array | None) -> Array:
    found = answers(outputs).argmax(-1)
    return (found == answers(wanted).argmax(-1)).reshape(len(found), -1).mean(1)


def divergence(outputs: Sequence[Array], wanted: Sequence[Array], _: Array | None = None) -> Array:
    """Kullback-Leibler divergence of the answers' probabilities from the float model's, in nats, one per sample."""
    log_p, log_q = _log_probabilities(answers(wanted)), _log_probabilities(answers(outputs))
    each = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    return np.maximum(each, 0.0).reshape(len(each), -1).mean(1)


def are_probabilities(y: Array) -> bool:
    """Whether the last axis of an output sums to one."""
    shaped = y.dtype.kind == "f" and y.ndim >= 2 and y.shape[-1] > 1
    return bool(shaped and y.size and (y >= 0).all() and np.allclose(y.sum(-1), 1, atol=1e-3))


def _log_probabilities(y: Array) -> Array:
    scores = y.astype(np.float64)
    if are_probabilities(y):
        return np.log(np.maximum(scores, 1e-12))
    scores = scores - scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def influences(parts: Array, score: Callable[[Array], Array]) -> Array:
    """Influence of each sample; the mean over samples is the metric.

    Args:
        parts: counts of each sample, [N, K], which add up over samples.
        score: the metric of counts, [..., K] -> [...].
    """
    total = parts.sum(0)
    value = score(total)
    if len(parts) < 2:
        return np.full(len(parts), value, np.float64)
    pseudo = len(parts) * value - (len(parts) - 1) * score(total - parts)
    return np.asarray(pseudo + value - pseudo.mean())


def _ratio(above: Array, below: Array) -> Array:
    return np.divide(above, below, out=np.zeros(np.shape(below), np.float64), where=np.asarray(below) != 0)


def _agreement() -> OutputMetric:
    """Share of answers equal to the float model's."""
    return OutputMetric("agreement", "higher", _same)


def _kl() -> OutputMetric:
    """Divergence of the answers' probabilities from the float model's."""
    return OutputMetric("kl", "lower", divergence)


def _top(k: int) -> OutputMetric:
    """Share of samples whose label is among the ``k`` highest scores."""

    def values(outputs: Sequence[Array], _: Sequence[Array], labels: Array | None) -> Array:
        if k == 1:
            chosen, _count = predicted(outputs)
            return _mean(chosen == _labels_like(labels, chosen.shape, "answers"))
        scores = answers(outputs)
        right = _labels_like(labels, scores.shape[:-1], "answers")
        best = np.argsort(-scores, -1, kind="stable")[..., :k]
        return _mean((best == right[..., None]).any(-1))

    return OutputMetric(f"top{k}", "higher", values, True)


def _accuracy() -> OutputMetric:
    """Share of right answers."""
    return replace(_top(1), name="accuracy")


def _per_class(outputs: Sequence[Array], labels: Array | None, ignore: int | None) -> Array:
    """True positives, predictions and labels of each sample by class, [N, 3 * classes]."""
    chosen, classes = predicted(outputs)
    right = _labels_like(labels, chosen.shape, "answers").reshape(len(chosen), -1).astype(np.int64)
    chosen = chosen.reshape(len(chosen), -1)
    valid = (right >= 0) & (right < classes) & (True if ignore is None else right != ignore)
    counts = np.zeros((len(chosen), 3, classes))
    for row, c, r, ok in zip(counts, chosen, right, valid, strict=True):
        c, r = c[ok], r[ok]
        for k, found in enumerate((r[c == r], c, r)):
            row[k] = np.bincount(found, minlength=classes)
    return counts.reshape(len(counts), -1)


def _f1(average: str = "macro", ignore: int | None = None) -> OutputMetric:
    """F1 of classes: their mean (``macro``, of classes that occur), of all answers (``micro``), or of class 1 (``binary``)."""
    if average not in ("macro", "micro", "binary"):
        raise ConfigError("metric f1", f"there is no average {average!r}", "use macro, micro or binary")

    def score(hits: Array, found: Array, wanted: Array) -> Array:
        if average == "binary":
            return _ratio(2 * hits[..., 1], found[..., 1] + wanted[..., 1])
        if average == "micro":
            return _ratio(2 * hits.sum(-1), (found + wanted).sum(-1))
        return _ratio(_ratio(2 * hits, found + wanted).sum(-1), ((found + wanted) > 0).sum(-1))

    return _of_counts("f1", score, ignore)


def _miou(ignore: int | None = None) -> OutputMetric:
    """Intersection over union of the classes that occur, of all pixels; labels beyond the classes (255) do not count."""

    def score(hits: Array, found: Array, wanted: Array) -> Array:
        union = found + wanted - hits
        return _ratio(_ratio(hits, union).sum(-1), (union > 0).sum(-1))

    return _of_counts("miou", score, ignore)


def _of_counts(name: str, score: Callable[[Array, Array, Array], Array], ignore: int | None) -> OutputMetric:
    """A metric of the counts of each class: right answers, answers, and labels."""

    def values(outputs: Sequence[Array], _: Sequence[Array], labels: Array | None) -> Array:
        return _per_class(outputs, labels, ignore)

    def of_rows(counts: Array) -> Array:
        return score(*np.moveaxis(counts.reshape(*counts.shape[:-1], 3, -1), -2, 0))

    return OutputMetric(name, "higher", values, True, lambda counts: influences(counts, of_rows))


def _pictures(outputs: Sequence[Array], labels: Array | None, reach: float | None) -> tuple[Array, Array, float]:
    """The picture that the model returns, the right one, and the largest value that a pixel can have."""
    found = next((y for y in outputs if y.dtype.kind in "fiu" and y.ndim >= 3), None)
    if found is None:
        raise ConfigError("metric", f"no output is a picture: {[y.shape for y in outputs]}", "use another metric")
    right = _labels_like(labels, found.shape, "pictures")
    return found.astype(np.float64), right.astype(np.float64), reach or (255.0 if right.dtype == np.uint8 else 1.0)


def _psnr(range: float | None = None) -> OutputMetric:  # noqa: A002  (the user's name)
    """Peak signal-to-noise ratio in dB, the mean over pictures; at most 100."""

    def values(outputs: Sequence[Array], _: Sequence[Array], labels: Array | None) -> Array:
        found, right, reach = _pictures(outputs, labels, range)
        return 10 * np.log10(reach**2 / np.maximum(_mean((found - right) ** 2), 1e-10 * reach**2))

    return OutputMetric("psnr", "higher", values, True)


def _ssim(range: float | None = None) -> OutputMetric:  # noqa: A002
    """Structural similarity, the mean over pictures [N, C, H, W], by torchmetrics."""
    similarity = _of_torchmetrics("functional.image", "structural_similarity_index_measure")

    def values(outputs: Sequence[Array], _: Sequence[Array], labels: Array | None) -> Array:
        torch = importlib.import_module("torch")
        found, right, reach = _pictures(outputs, labels, range)
        pair = torch.from_numpy(found), torch.from_numpy(right)
        return np.atleast_1d(np.asarray(similarity(*pair, data_range=reach, reduction="none")))

    return OutputMetric("ssim", "higher", values, True)


def _of_torchmetrics(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"torchmetrics.{module}"), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "metric", "it is computed by torchmetrics, which is not installed", "pip install 'bitwright[metrics]'"
        ) from error


def _perplexity(ignore: int = -100, shift: bool = False) -> OutputMetric:
    """Exponential of the mean negative log-likelihood of the labels, one per position; with ``shift`` labels are the inputs."""

    def values(outputs: Sequence[Array], _: Sequence[Array], labels: Array | None) -> Array:
        scores = answers(outputs)
        right = _labels_like(labels, scores.shape[:-1], "positions").astype(np.int64)
        if shift:
            scores, right = scores[:, :-1], right[:, 1:]
        valid = right != ignore
        known = np.where(valid, right, 0)
        size = scores.shape[-1]
        if known.size and (known.min() < 0 or known.max() >= size):
            wrong = int(known.max() if known.max() >= size else known.min())
            raise ConfigError(
                "labels",
                f"token {wrong} is outside of 0 to {size - 1}",
                f"give numbers of tokens, and {ignore} where there is none",
            )
        each = -np.take_along_axis(_log_probabilities(scores), known[..., None], -1)[..., 0]
        return np.stack([(each * valid).reshape(len(each), -1).sum(1), valid.reshape(len(each), -1).sum(1)], 1)

    def score(counts: Array) -> Array:
        return np.exp(np.minimum(_ratio(counts[..., 0], counts[..., 1]), 700.0))

    return OutputMetric("perplexity", "lower", values, True, lambda counts: influences(counts, score))


def _wer(vocabulary: Any = None, blank: int = 0, merge: bool = True) -> OutputMetric:
    """Errors of words over words.

    Args:
        vocabulary: texts of the tokens: a list, a dictionary from text to number, or the path of one (JSON, or a token a line).
        blank: token that means nothing, as in CTC.
        merge: equal tokens in a row are one, as in CTC; for outputs with scores of tokens.
    """
    if vocabulary is None:
        raise ConfigError(
            "metric wer",
            "no vocabulary is given, so outputs cannot be made into words",
            "write metric={'wer': {'vocabulary': [...]}}, a list of the texts of all tokens ('|' or ' ' between words)",
        )
    tokens = {i: token for i, token in enumerate(_tokens(vocabulary)) if i != blank}
    return OutputMetric("wer", "lower", partial(_word_errors, tokens, merge), True, _error_rate)


def _word_errors(
    tokens: Mapping[int, str], merge: bool, outputs: Sequence[Array], _: Sequence[Array], labels: Array | None
) -> Array:
    """Errors and words of each sample."""
    assert labels is not None
    found = [y for y in outputs if y.dtype.kind in "iu" and y.ndim == 2]
    rows = found[0] if found else [_once(row, merge) for row in answers(outputs).argmax(-1)]
    words = zip((_words(row, tokens) for row in rows), (_words(label, tokens) for label in labels), strict=True)
    return np.array([(_edits(mine, right), len(right)) for mine, right in words], np.float64)


def _error_rate(counts: Array) -> Array:
    return influences(counts, lambda n: _ratio(n[..., 0], n[..., 1]))


def _once(row: Array, merge: bool) -> Array:
    """Equal tokens in a row as one."""
    return row[np.concatenate([[True], row[1:] != row[:-1]])] if merge and len(row) else row


def _words(row: Any, tokens: Mapping[int, str]) -> list[str]:
    """The words of a text, or of tokens."""
    text = row if isinstance(row, str) else "".join(tokens.get(int(i), "") for i in np.asarray(row)).replace("|", " ")
    return text.split()


def _tokens(vocabulary: Any) -> list[str]:
    if isinstance(vocabulary, (str, Path)):
        try:
            text = Path(vocabulary).read_text(encoding="utf-8")
            found = json.loads(text) if Path(vocabulary).suffix == ".json" else text.splitlines()
            return _tokens(found if isinstance(found, dict) else list(found))
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                "metric wer", f"its vocabulary cannot be read: {error}", "give a list of tokens"
            ) from error
    if isinstance(vocabulary, Mapping):
        by_number = {int(i): str(token) for token, i in vocabulary.items()}
        return [by_number.get(i, "") for i in range(max(by_number, default=-1) + 1)]
    return [str(token) for token in vocabulary]


def _edits(found: Sequence[str], right: Sequence[str]) -> int:
    """Words to insert, delete or replace (Levenshtein)."""
    row = list(range(len(right) + 1))
    for i, word in enumerate(found, 1):
        above = row
        row = [i]
        for j, other in enumerate(right, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (word != other)))
    return row[-1]


def _map(
    decode: Callable[[Sequence[Array]], Any] | None = None,
    score: float = 0.001,
    overlap: float = 0.7,
    at: float | None = None,
) -> OutputMetric:
    """Mean average precision of COCO, or at one overlap ``at``; see :mod:`bitwright.metrics.detection`."""
    chosen = slice(None)
    if at is not None:
        nearest = int(np.abs(detection.OVERLAPS - at).argmin())
        if abs(detection.OVERLAPS[nearest] - at) > 1e-6:
            raise ConfigError("metric map", f"there is no overlap {at}", "use 0.5, 0.55, ... 0.95")
        chosen = slice(nearest, nearest + 1)

    def values(outputs: Sequence[Array], _: Sequence[Array], labels: Array | None) -> Array:
        assert labels is not None
        if decode is None:
            found = detection.decoded(outputs, len(labels), score=score, overlap=overlap)
        else:
            found = [tuple(np.asarray(part) for part in image) for image in decode(outputs)]  # type: ignore[misc]
        made = np.empty(len(labels), object)
        for i, (image, label) in enumerate(zip(found, labels, strict=True)):
            made[i] = detection.evidence(image, label).tolist()
        return made

    return OutputMetric("map", "higher", values, True, lambda parts: detection.average_precisions(parts, chosen))


def _map50(**options: Any) -> OutputMetric:
    """Mean average precision at an overlap of 0.5."""
    return replace(_map(**{"at": 0.5, **options}), name="map50")


def _checked_metric(name: str, row: Any) -> Callable[..., OutputMetric]:
    """A metric of a plug-in: an :class:`OutputMetric`, what makes one of its options, or a class of torchmetrics."""
    if isinstance(row, OutputMetric):
        return lambda: row
    if isinstance(row, type) and any(
        f"{c.__module__}.{c.__name__}" == "torchmetrics.metric.Metric" for c in row.__mro__
    ):
        made: Any = row
        return lambda **options: _by_states(made(**options))
    if not callable(row):
        raise ConfigError(
            f"metric {name!r}",
            f"{row!r:.100} is not a metric",
            "register an OutputMetric, or a function that returns one",
        )
    make: Callable[..., OutputMetric] = row
    return make


_OWN: dict[str, Callable[..., OutputMetric]] = {
    "accuracy": _accuracy, "agreement": _agreement, "kl": _kl, "f1": _f1, "miou": _miou, "psnr": _psnr, "ssim": _ssim,
    "perplexity": _perplexity, "wer": _wer, "map": _map, "map50": _map50,
}  # fmt: skip
NAMED: Registry[Callable[..., OutputMetric]] = Registry("metrics", _OWN, _checked_metric)
"""Name -> what makes the metric, with its options; ``top1``, ``top5`` and so on are names too."""
_TOP = re.compile(r"top([1-9]\d*)")


def is_function(metric: Any) -> bool:
    """Whether a metric is a function of the model, not one of its outputs."""
    return callable(metric) and not is_torchmetrics(metric) and not isinstance(metric, OutputMetric)


def is_torchmetrics(metric: Any) -> bool:
    """Whether a metric is a torchmetrics object."""
    return any(f"{c.__module__}.{c.__name__}".startswith("torchmetrics.metric.Metric") for c in type(metric).__mro__)


def named_of(metric: Any) -> OutputMetric | None:
    """As :func:`find_metric`; ``None`` of a function of the model, and where there is no metric."""
    return None if metric is None or is_function(metric) else find_metric(metric)


def needs_labels(metric: Any) -> bool:
    """Whether a metric, as the user gives it, needs labels."""
    named = named_of(metric)
    return named is not None and named.needs_labels


def find_metric(metric: Any) -> OutputMetric:
    """The metric that a name, a name with options or an object of torchmetrics stands for.

    Args:
        metric: ``"f1"``, ``{"f1": {"average": "micro"}}``, ``"f1,average=micro"``, an object of torchmetrics, or what was found.

    Raises:
        ConfigError: there is none of that name, or it has no such option.
    """
    if isinstance(metric, OutputMetric):
        return metric
    if is_torchmetrics(metric):
        return _by_states(metric)
    name, options = _named_options(metric)
    top = _TOP.fullmatch(name)
    if top is not None and not options:
        return _top(int(top.group(1)))
    if name not in NAMED:
        raise ConfigError(
            "metric",
            f"there is no metric {name!r}{close_matches(name, [*NAMED, 'top1', 'top5'])}",
            f"use {', '.join(NAMED)}, top5, or a function of the model that returns one value per sample",
        )
    make = NAMED[name]
    known = inspect.signature(_map if make is _map50 else make).parameters
    wrong = [
        option for option in options if option not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values())
    ]
    if wrong:
        raise ConfigError(
            f"metric {name}",
            f"it has no option {wrong[0]!r}{close_matches(wrong[0], known)}",
            f"use {', '.join(known)}" if known else "leave options out",
        )
    return make(**options)


def _named_options(metric: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(metric, Mapping) and len(metric) == 1:
        name, options = next(iter(metric.items()))
        if isinstance(options, Mapping):
            return str(name), dict(options)
    if not isinstance(metric, str):
        raise ConfigError(
            "metric",
            f"it is {with_article(type(metric).__name__)}",
            "give a name such as 'accuracy', {'f1': {'average': 'micro'}}, an object of torchmetrics, or a function of the model",
        )
    name, *given = metric.split(",")
    options = {}
    for part in given:
        key, sign, value = part.partition("=")
        if not sign:
            raise ConfigError("metric", f"{part!r} is not an option", f"write {name},option=value")
        try:
            options[key.strip()] = json.loads(value)
        except ValueError:
            options[key.strip()] = value
    return name.strip(), options


def _by_states(metric: Any) -> OutputMetric:
    """An object of torchmetrics; of each sample its states are kept, and joined as its own processes join them."""
    if metric.higher_is_better is None:
        raise ConfigError(
            f"metric {type(metric).__name__}", "it does not say which direction is better", "set its higher_is_better"
        )
    better: Better = "higher" if metric.higher_is_better else "lower"
    return OutputMetric(type(metric).__name__, better, _States(metric).of_samples, True, _States(metric).influences)


def _plain(state: Any) -> Any:
    return [x.tolist() for x in state] if isinstance(state, list) else state.tolist()


@dataclass(frozen=True)
class _States:
    """An object of torchmetrics, updated with one sample at a time."""

    metric: Any

    def of_samples(self, outputs: Sequence[Array], _: Sequence[Array], labels: Array | None) -> Array:
        """The states that each sample leaves, as lists."""
        torch, metric = importlib.import_module("torch"), self.metric
        found = next((y for y in outputs if y.dtype.kind == "f"), None)
        if found is None or labels is None:
            raise ConfigError("metric", "the outputs hold no float numbers", "use a function of the model")
        made = np.empty(len(found), object)
        for i in range(len(found)):
            metric.reset()
            metric.update(torch.from_numpy(found[i : i + 1].copy()), torch.from_numpy(labels[i : i + 1].copy()))
            made[i] = {name: _plain(getattr(metric, name)) for name in metric._defaults}
        return made

    def score(self, parts: Any) -> float:
        """The metric of samples."""
        torch, metric = importlib.import_module("torch"), self.metric
        metric.reset()
        for name, default in metric._defaults.items():
            if isinstance(default, list):
                setattr(metric, name, [torch.as_tensor(x) for part in parts for x in part[name]])
                continue
            join = metric._reductions[name]
            stacked = torch.stack([torch.as_tensor(part[name], dtype=default.dtype) for part in parts])
            setattr(metric, name, stacked if join is None else join(stacked))
        metric._update_count = len(parts)
        result = float(metric.compute())
        metric.reset()
        return result

    def influences(self, parts: Array) -> Array:
        """As :func:`influences`, of states."""
        n, value = len(parts), self.score(parts)
        if n < 2:
            return np.full(n, value)
        pseudo = np.array([n * value - (n - 1) * self.score(np.delete(parts, i)) for i in range(n)])
        return np.asarray(pseudo + value - pseudo.mean())


def named_metric(metric: Any, labels: Any) -> OutputMetric:
    """As :func:`find_metric`.

    Raises:
        ConfigError: there is none of that name, or it needs labels and there are none.
    """
    found = find_metric(metric)
    if found.needs_labels and labels is None:
        raise ConfigError(
            "metric",
            f"{found.name} compares with the right answers, and no labels are given",
            "pass labels=..., one per sample in the order of the data, or metric='agreement', which needs none",
        )
    return found


def scorer(
    metric: Any, lower_is_better: bool, given: Any, data: Iterable[Any], labels: Any
) -> tuple[Callable[[Any], Any] | None, bool]:
    """A function of the model for what the user gave, and whether lower is better.

    Args:
        metric: see :func:`find_metric`; a function, or ``None``, is returned as it is.
        given: the model, with ``answers`` and ``metric_target`` (:class:`bitwright.methods.front_end.GivenModel`).
        data, labels: what a named metric is measured on.

    Raises:
        ConfigError: there is no such metric, or labels are missing, do not fit, or are not read by it.
    """
    named = named_of(metric)
    if named is None:
        if labels is not None:
            nobody = "there is no metric that reads them"
            raise ConfigError(
                "labels",
                nobody if metric is None else "the metric is a function, which has labels of its own",
                "pass a metric by name, as metric='accuracy', or leave labels out",
            )
        return metric, lower_is_better
    batches = list(data)
    found = Scorer(
        named_metric(named, labels), given.answers, given.metric_target(), batches, split_labels(labels, batches)
    )
    return found, found.better == "lower"


def row_of(score: Callable[[Any], Any] | None, model: Any) -> MetricRow | None:
    """Float and ``model`` compared sample by sample, by a metric that has a value per sample."""
    return score.row(model) if isinstance(score, Scorer) else None


class Scorer:
    """A named metric as a function of the model, on stored batches.

    Args:
        metric: see :func:`find_metric`.
        run: (model, batch) -> its outputs.
        model: the float model.
        batches, labels: samples, and their labels by batch.

    Attributes:
        better: which direction is an improvement.
    """

    def __init__(
        self,
        metric: OutputMetric,
        run: Callable[[Any, Any], Sequence[Array]],
        model: Any,
        batches: Sequence[Any],
        labels: Sequence[Array] | None,
    ) -> None:
        scipy_stats()  # before any work
        self._metric, self._run, self._batches = metric, run, batches
        self._labels: Sequence[Array | None] = [None] * len(batches) if labels is None else labels
        self._wanted = [[np.array(y) for y in run(model, batch)] for batch in batches]
        self.__name__ = metric.name
        self.better = metric.better
        triples = zip(self._wanted, self._wanted, self._labels, strict=True)
        self.reference = checked_values("float", metric.per_sample([metric.values(*triple) for triple in triples]))

    def reading(self, prepared: Callable[[Any], Any]) -> Scorer:
        """This metric, of models that take batches as ``prepared`` makes them."""
        other, run = copy.copy(self), self._run
        other._run = lambda model, batch: run(model, prepared(batch))
        return other

    def values(self, model: Any) -> Array:
        """Metric values per sample of ``model``."""
        outputs = (self._run(model, batch) for batch in self._batches)
        triples = zip(outputs, self._wanted, self._labels, strict=True)
        return checked_values(
            "quantized", self._metric.per_sample([self._metric.values(*triple) for triple in triples])
        )

    def __call__(self, model: Any) -> float:
        """The metric of ``model``."""
        return float(self.values(model).mean())

    def row(self, model: Any) -> MetricRow:
        """Float and ``model`` compared sample by sample."""
        return metric_row(self._metric.name, self.better, self.reference, self.values(model))


def checked_values(which: str, found: Any) -> Array:
    """Check the result of a user's metric: a number, or one value per sample.

    Raises:
        ConfigError: it is neither, or not finite.
    """
    try:
        if found is None:  # numpy takes it for NaN
            raise TypeError("None is not a number")
        values = np.asarray(found.detach().cpu() if hasattr(found, "detach") else found, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "metric",
            f"it returns {'None' if found is None else with_article(type(found).__name__)}",
            "end it with a return statement whose value is a number, or one value per sample as a list or array",
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
