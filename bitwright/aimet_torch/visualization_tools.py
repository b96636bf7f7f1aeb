"""``aimet_torch.visualization_tools``: ranges of a simulation as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitwright.aimet_common.absent import differs
from bitwright.aimet_common.analyzer import write_ranges
from bitwright.aimet_torch.quantsim import QuantizationSimModel

__all__ = ["visualize_advanced_stats", "visualize_stats"]


def visualize_stats(
    sim: QuantizationSimModel, dummy_input: Any, save_path: str = "./quant_stats_visualization.html"
) -> None:
    """Write the lowest and highest value of every quantizer's grid as a page with charts and tables.

    Args:
        sim: calibrated.
        dummy_input: AIMET's argument; nothing needs to be run.
        save_path: of the page; its suffix is ``.html``.

    Raises:
        ConfigError: (a ValueError) another suffix.
        CalibrationError: the simulation is not calibrated.
    """
    write_ranges(sim, save_path, "Ranges of the quantizers")


def visualize_advanced_stats(
    sim: QuantizationSimModel,
    dummy_input: Any,
    save_path: str = "./quant_advanced_stats_visualization.html",
    additional_percentiles: Sequence[float] = (1, 99),
) -> None:
    """As :func:`visualize_stats`, without the percentiles, which a warning says: ``sim.report(path)`` draws whole histograms."""
    differs("visualize_advanced_stats", "percentiles are not drawn; sim.report(path) draws histograms with their grids")
    write_ranges(sim, save_path, "Ranges of the quantizers")
