"""One row of every kind that Bitwright takes from other packages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bitwright import FloatFormat
from bitwright.core.graph.operators import OpRow
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerChannel
from bitwright.core.numerics.ranges import RangeRow
from bitwright.core.numerics.statistics import bounds_of
from bitwright.export.targets import TARGETS, Target
from bitwright.llm.files.common import Extras, FileFormat, copy_tokenizer
from bitwright.llm.packed import FloatWeight, PackedWeight, Weight, WeightPlan
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


#: ``y = project(x, w)``: rows of ``w`` are output channels, and its columns are summed over
PROJECT = OpRow("compute", {1: "weight"}, weight=1, activations=(0,), integer=True, axes=(0, 1))


def _refuses(plan: WeightPlan) -> str:
    layout = plan.layout
    if layout is None:
        return ""
    fits = (layout.format, layout.group, layout.symmetric) == (IntFormat(8), "channel", True)
    return "" if fits and layout.scale_format == "float32" else "it holds symmetric int8 with a float32 scale per row"


def _write(folder: Path, weights: Iterable[Weight], extras: Extras) -> None:
    """One file per weight, and the configuration."""
    config = {**extras.config, "quantization_config": {"quant_method": "example_npz"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    copy_tokenizer(extras.tokenizer, folder)
    for number, weight in enumerate(weights):
        path = folder / f"{number:05}.npz"
        if isinstance(weight, PackedWeight):
            np.savez(path, name=weight.name, codes=weight.codes, scale=weight.encoding.scale)
        else:
            np.savez(path, name=weight.name, values=weight.dequantize())


def _read(folder: Path) -> Iterator[Weight]:
    import torch

    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as stored:
            name = str(stored["name"])
            if "values" in stored:
                yield FloatWeight(name, torch.from_numpy(stored["values"]))
                continue
            scale = stored["scale"]
            encoding = Encoding(IntFormat(8), scale, np.zeros(scale.shape, np.int32), PerChannel(0))
            yield PackedWeight(name, stored["codes"], encoding)


def _recognises(folder: Path) -> bool:
    config = folder / "config.json"
    if not config.is_file():
        return False
    found = json.loads(config.read_text(encoding="utf-8")).get("quantization_config") or {}
    return found.get("quant_method") == "example_npz"


def npz() -> FileFormat:
    """Files of numpy that an engine of one's own reads."""
    return FileFormat(
        name="example_npz",
        engine="the engine of the example",
        holds="symmetric int8, a float32 scale per row",
        refuses=_refuses,
        size=lambda plan: plan.elements * (4.0 if plan.layout is None else 1.1) + 1024,
        write=_write,
        read=_read,
        recognises=_recognises,
        check=lambda plans, extras: None,
    )


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
