"""Pages about the ranges of the weights of a PyTorch model, channel by channel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from bitwright.errors import ConfigError, close_matches
from bitwright.report.page import ranges_chart, scores_chart, write_page
from bitwright.torch.calls.inputs import walk_modules

Rows = list[dict[str, Any]]


def visualize_weight_ranges(model: nn.Module, results_dir: str, selected_layers: Sequence[str] | None = None) -> Rows:
    """Write the range of every output channel of the weights as ``visualize_weight_ranges.html``.

    Args:
        model: any module.
        results_dir: folder of the page.
        selected_layers: names of modules; all convolutions and linear layers by default.

    Returns:
        A mapping per layer: ``layer``, and ``min``, ``max``, ``mean``, ``std`` per channel.

    Raises:
        ConfigError: (a ValueError) a name is not a module with a weight.
    """
    rows = list(_layers(model, selected_layers))
    charts = [ranges_chart(_pairs(row), row["layer"]) for row in rows]
    write_page(Path(results_dir) / "visualize_weight_ranges.html", "Ranges of weights", *charts)
    return rows


def visualize_relative_weight_ranges_to_identify_problematic_layers(
    model: nn.Module, results_dir: str, selected_layers: Sequence[str] | None = None
) -> Rows:
    """Write how much wider each channel's range is than the narrowest of its layer, the most disparate layer first.

    The page is ``visualize_relative_weight_ranges_to_identify_problematic_layers.html``. Arguments, result and errors are those
    of :func:`visualize_weight_ranges`, with ``relative`` per channel.
    """
    rows = []
    for row in _layers(model, selected_layers):
        spans = np.asarray(row["max"]) - np.asarray(row["min"])
        narrowest = spans[spans > 0].min(initial=np.inf)
        relative = spans / narrowest if np.isfinite(narrowest) else np.ones_like(spans)
        rows.append({**row, "relative": relative.tolist()})
    rows.sort(key=lambda row: -max(row["relative"], default=0.0))
    widest = {row["layer"]: float(max(row["relative"], default=0.0)) for row in rows}
    charts = [scores_chart(widest, "widest over narrowest channel")]
    charts += [
        scores_chart({str(i): v for i, v in enumerate(row["relative"])}, "relative range", row["layer"])
        for row in rows[:20]
    ]
    name = "visualize_relative_weight_ranges_to_identify_problematic_layers"
    write_page(Path(results_dir) / f"{name}.html", "Relative ranges of weights", *charts)
    return rows


def visualize_changes_after_optimization(
    old_model: nn.Module, new_model: nn.Module, results_dir: str, selected_layers: Sequence[str] | None = None
) -> Rows:
    """Write the ranges of both models' weights, layer by layer, as ``visualize_changes_after_optimization.html``.

    Arguments, result and errors are those of :func:`visualize_weight_ranges`; the mappings have ``before`` and ``after``. Layers
    that one of the models lacks are left out.
    """
    before = {row["layer"]: row for row in _layers(old_model, selected_layers)}
    after = {row["layer"]: row for row in _layers(new_model, selected_layers)}
    rows, charts = [], []
    for name in (name for name in before if name in after):
        rows.append({"layer": name, "before": before[name], "after": after[name]})
        charts += [
            ranges_chart(_pairs(before[name]), f"{name}, before"),
            ranges_chart(_pairs(after[name]), f"{name}, after"),
        ]
    write_page(Path(results_dir) / "visualize_changes_after_optimization.html", "Changes of weights", *charts)
    return rows


def _layers(model: nn.Module, selected: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """Statistics of the weight of every selected layer."""
    modules = dict(walk_modules(model))
    for name in selected or ():
        if name not in modules or getattr(modules[name], "weight", None) is None:
            problem = f"{name!r} is not a module with a weight{close_matches(name, modules)}"
            raise ConfigError("selected_layers", problem, "use names of model.named_modules()")
    wanted = selected or [n for n, m in modules.items() if isinstance(m, (nn.modules.conv._ConvNd, nn.Linear))]
    for name in wanted:
        module: Any = modules[name]
        values = module.weight.detach().cpu().float().numpy()
        axis = 1 if isinstance(module, nn.modules.conv._ConvTransposeNd) else 0
        rows = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1) if values.ndim > 1 else values[:, None]
        told = {"min": rows.min(1), "max": rows.max(1), "mean": rows.mean(1), "std": rows.std(1)}
        yield {"layer": name, **{key: numbers.tolist() for key, numbers in told.items()}}


def _pairs(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    return {str(i): pair for i, pair in enumerate(zip(row["min"], row["max"], strict=True))}
