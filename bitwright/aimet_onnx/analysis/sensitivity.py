"""Sensitivity of single quantizers, or of groups of them, by a metric of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from bitwright.aimet_common.analyzer import scores_of
from bitwright.aimet_onnx.quantsim import QuantizationSimModel
from bitwright.aimet_onnx.utils import peak_signal_to_noise
from bitwright.analysis.subject import open_subject
from bitwright.core.files import read_document
from bitwright.errors import CalibrationError, ConfigError
from bitwright.report.charts import scores_chart, write_data, write_page

Scores = dict[str, float]
GroupFunction = Callable[[str], str | None]


class SensitivityMetric:
    """A function of a session with a name, and whether more of it is worse.

    Raises:
        ConfigError: (a ValueError) ``eval_fn`` is not a function.
    """

    def __init__(self, name: str, eval_fn: Callable[[Any], float], higher_is_worse: bool = True) -> None:
        if not callable(eval_fn):
            raise ConfigError(
                "eval_fn", f"it is a {type(eval_fn).__name__}, not a function", "pass a function of a session"
            )
        self.name, self.eval_fn, self.higher_is_worse = name, eval_fn, higher_is_worse

    def __call__(self, session: Any) -> float:
        """Rate a session."""
        return self.eval_fn(session)

    def sensitivity_score(self, score: float) -> float:
        """``score`` so that more is more sensitive."""
        return score if self.higher_is_worse else -score


def make_topk_logit_psnr_metric(
    fp_session: Any, inputs: Iterable[dict[str, Any]], k: int = 10, logit_output_index: int = 0
) -> SensitivityMetric:
    """Peak signal to noise of the ``k`` largest scores of the float session at every position; more is better."""
    feeds = list(inputs)
    places, wanted = [], []
    for feed in feeds:
        scores = np.asarray(fp_session.run(None, feed)[logit_output_index], np.float32)
        few = min(k, scores.shape[-1])
        places.append(np.argpartition(scores, -few, axis=-1)[..., -few:])
        wanted.append(np.take_along_axis(scores, places[-1], -1).ravel())

    def rate(session: Any) -> float:
        found = []
        for feed, place in zip(feeds, places, strict=True):
            scores = np.asarray(session.run(None, feed)[logit_output_index], np.float32)
            found.append(np.take_along_axis(scores, place, -1).ravel())
        return peak_signal_to_noise(np.concatenate(wanted), np.concatenate(found))

    return SensitivityMetric(f"Top{k}LogitPSNR", rate, higher_is_worse=False)


def _tensors(sim: QuantizationSimModel) -> dict[str, tuple[str, ...]]:
    """Tensor -> the sites of its quantizer, of those that work."""
    found: dict[str, list[str]] = {}
    for name, site in sim.quantizers.items():
        if site.enabled:
            value = sim.graph.values[site.value]
            found.setdefault(value.param or value.name, []).append(name)
    return {tensor: tuple(names) for tensor, names in found.items()}


def get_quantizer_op_names(sim: QuantizationSimModel) -> dict[str, str]:
    """Tensor with a quantizer -> the node it belongs to: a parameter's reader, an activation's maker, an input's reader."""
    return {tensor: sim.quantizers[names[0]].op for tensor, names in _tensors(sim).items()}


def group_by_op_name(sim: QuantizationSimModel) -> GroupFunction:
    """A ``group_fn`` that puts the quantizers of one node together."""
    return get_quantizer_op_names(sim).get


def analyze_per_quantizer_sensitivity(
    sim: QuantizationSimModel, metric: SensitivityMetric, group_fn: GroupFunction | None = None
) -> Scores:
    """Group of quantizers -> the metric with only these, the most sensitive first.

    Args:
        sim: calibrated; as it was afterwards.
        metric: rates a session.
        group_fn: tensor -> name of its group, or ``None`` to leave it out; by default every tensor is one.

    Raises:
        CalibrationError: (a RuntimeError) no quantizer works, or none is in a group.
    """
    groups: dict[str, list[str]] = {}
    for tensor, names in _tensors(sim).items():
        key = tensor if group_fn is None else group_fn(tensor)
        if key is not None:
            groups.setdefault(key, []).extend(names)
    if not groups:
        raise CalibrationError(
            "analyze_per_quantizer_sensitivity",
            "no quantizer that works is in a group",
            "calibrate the simulation, enable quantizers, or let group_fn return a name for some of them",
        )
    scores = scores_of(open_subject(sim), metric, groups, alone=True)
    return dict(sorted(scores.items(), key=lambda item: item[1], reverse=metric.higher_is_worse))


def save_sensitivity_results(
    scores: Mapping[str, float], save_path: str = "./sensitivity_results.json", details: Mapping[str, str] | None = None
) -> None:
    """Write scores as JSON in their order."""
    told = details or {}
    write_data(save_path, {"ranking": [
        {"rank": i, "name": name, "score": score, **({"detail": told[name]} if name in told else {})}
        for i, (name, score) in enumerate(scores.items(), 1)
    ]})  # fmt: skip


def load_sensitivity_results(input_path: str) -> Scores:
    """What :func:`save_sensitivity_results` wrote.

    Raises:
        ConfigError: the file cannot be read, or is another one.
    """
    remedy = "give a file that save_sensitivity_results wrote"
    document = read_document(input_path, ConfigError, remedy=remedy, kind=".json")
    try:
        return {str(row["name"]): float(row["score"]) for row in document["ranking"]}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(str(input_path), f"it holds no ranking: {error!r}", remedy) from error


def save_sensitivity_plot(
    scores: Mapping[str, float],
    metric: SensitivityMetric,
    save_path: str = "./sensitivity_plot.html",
    highlight_patterns: list[str] | None = None,
    details: Mapping[str, str] | None = None,
    details_label: str = "Details",
) -> None:
    """Write scores as a page with a chart and a table; patterns are for AIMET's interactive page and have no effect."""
    told = details or {}
    named = {f"{name} ({details_label}: {told[name]})" if name in told else name: s for name, s in scores.items()}
    write_page(save_path, f"Sensitivity by {metric.name}", scores_chart(named, metric.name))
