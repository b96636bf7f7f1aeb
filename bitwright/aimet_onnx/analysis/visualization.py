"""Ranges of a simulation as a page."""

from __future__ import annotations

from bitwright.aimet_common.analyzer import write_ranges
from bitwright.aimet_onnx.quantsim import QuantizationSimModel


def visualize_stats(sim: QuantizationSimModel, save_path: str = "./quant_stats_visualization.html") -> None:
    """Write the lowest and highest value of every quantizer's grid as two pages, with a chart and a table each.

    Args:
        sim: calibrated.
        save_path: what the names of the pages begin with: ``<path>_activations.html`` and ``<path>_weights.html``.

    Raises:
        ConfigError: (a ValueError) ``save_path`` has not the suffix ``.html``.
        CalibrationError: the simulation is not calibrated.
    """
    write_ranges(sim, save_path, "Ranges of the quantizers", apart=True)
