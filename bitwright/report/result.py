"""What the results of ``quantize`` of both front ends have in common beside their fields."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bitwright.report.of_simulation import simulation_report
from bitwright.tables import Tabular


class Reported(Tabular):
    """A result with ``sim``, ``report`` and ``metrics``; its rows are the steps of the recipe."""

    _rows = "report"

    sim: Any
    report: Any
    metrics: dict[str, float]

    def report_html(self, path: str | os.PathLike[str], data: Any = None, **options: Any) -> Path:
        """Write one HTML file that shows the simulation, what each step of the recipe brought, and the metric.

        Args:
            path: of the file.
            data: batches on which errors are measured; by default the example input alone.
            options: as for :func:`bitwright.report.simulation_document`.

        Raises:
            ExportError: the file cannot be written.
        """
        return simulation_report(self.sim, path, data, recipe=self.report, measured=self.metrics, **options)

    def __str__(self) -> str:
        return str(self.report)
