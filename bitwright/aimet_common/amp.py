"""AIMET's automatic mixed precision by our search: candidates, callbacks and ``pareto_list.json`` of both front ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from bitwright.aimet_common.defs import CallbackFunc
from bitwright.errors import ConfigError
from bitwright.precision.result import MixedPrecision
from bitwright.precision.search import mixed_precision
from bitwright.report.charts import points_chart, scores_chart, write_page

#: of those that a callback runs, for the estimate of sensitivities
MOST_BATCHES = 16


class AMPSearchAlgo(Enum):
    """Names of AIMET's searches; ours is one and the same for all of them."""

    Binary = 1
    Interpolation = 2
    BruteForce = 3


def choose(
    sim: Any,
    data: Iterable[Any],
    candidates: Sequence[Any],
    evaluate: Callable[[Any], float],
    allowed_accuracy_drop: float | None,
    results_dir: str,
) -> list[tuple[float, float, Any, float]]:
    """The Pareto list: (bit operations relative to the best candidate, metric, choice, predicted dB), the dearest first.

    The simulation has the chosen precisions afterwards; ``results_dir`` gets ``pareto_list.json``,
    ``accuracy_list.json`` and pages of both.
    """
    if not isinstance(evaluate, CallbackFunc) and not callable(evaluate):
        raise ConfigError("eval_callback", f"{evaluate!r} cannot be called", "pass CallbackFunc(function, arguments)")
    drop = 1e9 if allowed_accuracy_drop is None else allowed_accuracy_drop
    if drop < 0:
        raise ConfigError(
            "allowed_accuracy_drop", f"{drop} is below zero", "pass 0 or more, or None for the whole front"
        )
    result = mixed_precision(
        sim, data, candidates, cost="bit_ops", metric=lambda target: float(evaluate(target)), allowed_drop=drop
    )
    measured = [p for p in result.points if p.metric is not None]
    dear = max((p.costs["bit_ops"] for p in result.points), default=1.0)
    pareto = [
        (p.costs["bit_ops"] / dear, float(p.metric or 0.0), dict(p.choice), p.predicted_db) for p in measured if p.front
    ]
    folder = Path(results_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pareto_list.json").write_text(json.dumps(pareto[::-1], indent=1))
    rows = [[p.name, p.metric, p.costs["bit_ops"] / dear] for p in measured]
    (folder / "accuracy_list.json").write_text(json.dumps(rows, indent=1))
    write_pages(result, folder, dear)
    return pareto[::-1]


def write_pages(result: MixedPrecision, folder: Path, dearest: float) -> None:
    """``pareto_curve.html`` and ``quantizer_group_sensitivity.html``, pages without scripts.

    Args:
        dearest: bit operations that costs are relative to.
    """
    name = str(result.metric["name"]) if result.metric is not None else "metric"
    shown = {
        f"{'front' if front else 'other'}: {p.name}": (p.costs["bit_ops"] / dearest, float(p.metric))
        for front in (True, False)
        for p in result.points
        if p.front == front and p.metric is not None
    }
    fronts = {label: point for label, point in shown.items() if label.startswith("front")}
    axes = ("relative bit operations", name)
    write_page(
        folder / "pareto_curve.html",
        "Mixed precision: Pareto front",
        points_chart(fronts, *axes, joined=True),
        points_chart(shown, *axes, title="All points that were measured"),
    )
    by_candidate = {
        candidate: {group: values[candidate] for group, values in result.sensitivities.items() if candidate in values}
        for candidate in result.candidates
    }
    write_page(
        folder / "quantizer_group_sensitivity.html",
        "Mixed precision: SQNR of the outputs with one group alone at a precision, as estimated",
        *(scores_chart(scores, "dB", candidate) for candidate, scores in by_candidate.items() if scores),
    )
