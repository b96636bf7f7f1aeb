"""One row of every kind that Bitwright takes from other packages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bitwright import FloatFormat
from bitwright.core.numerics.ranges import RangeRow
from bitwright.core.numerics.statistics import bounds_of
from bitwright.export.targets import TARGETS, Target
from bitwright.metrics.metric import OutputMetric
from bitwright.runtimes.adapters import Runtime, Session


def three_sigma(stats: Any, fmt: Any, symmetry: str, *, sigmas: float = 3.0) -> tuple[Any, Any]:
    """The range within some standard deviations of the mean, as far as values reach."""
    bounds = bounds_of(stats)
    values = stats.values if hasattr(stats, "values") else None
    if values is None:  # a histogram, of which percentiles are read in the same way for every batch size
        from bitwright.core.numerics.ranges import percentile_range

        low, high = percentile_range(stats, fmt, symmetry, percentile=100 - 50 * np.exp(-(sigmas**2) / 2))
    else:
        mean, spread = values.mean(-1), values.std(-1)
        low, high = mean - sigmas * spread, mean + sigmas * spread
    return np.maximum(low, bounds.lo), np.minimum(high, bounds.hi)


THREE_SIGMA = RangeRow(three_sigma, "histogram", {"sigmas": (3.0, 1.0, 8.0)})

FLOAT5 = FloatFormat("float5_e2m2", exponent_bits=2, mantissa_bits=2, max=7.0, scaled=True)


def shrink_weights(sim: Any, *, factor: float = 0.999) -> str:
    """Make the scales of weights a little smaller."""
    weights = [site for site in sim.quantizers.values() if site.role == "weight" and site.encoding is not None]
    for site in weights:
        site.encoding = replace(site.encoding, scale=site.encoding.scale * np.float32(factor))
    return f"{len(weights)} scales of weights"


def chip() -> Target:
    """A compiler that takes packed files, with biases in float."""
    return replace(TARGETS["packed"], name="example_chip", about="the chip of the example", float_biases=True)


def _open(path: Path, threads: int, reference: bool) -> Session:
    import onnx
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(onnx.load(path))

    def run(feeds: Any) -> dict[str, np.ndarray]:
        given = {name: feeds[name] for name in evaluator.input_names}
        return dict(zip(evaluator.output_names, evaluator.run(None, given), strict=True))

    return Session(run)


REFERENCE = Runtime("onnx_reference", "onnx", "onnx", ".onnx", "leave the layer in float", _open)


def margin() -> OutputMetric:
    """How far the score of the label is above the best of the others."""

    def values(outputs: Sequence[Any], _: Sequence[Any], labels: Any) -> Any:
        scores = outputs[0].astype(np.float64)
        rows = np.arange(len(scores))
        own = scores[rows, labels]
        others = scores.copy()
        others[rows, labels] = -np.inf
        return own - others.max(1)

    return OutputMetric("margin", "higher", values, needs_labels=True)
