"""Pages about a search of precisions: the Pareto front, and the sensitivities of groups."""

from __future__ import annotations

from pathlib import Path

from bitwright.precision.result import MixedPrecision
from bitwright.report.page import points_chart, scores_chart, write_page


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
