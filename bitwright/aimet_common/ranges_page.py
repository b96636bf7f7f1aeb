"""The page of all ranges of a simulation, of either front end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitwright.aimet_common.analyzer import called
from bitwright.analysis.subject import open_subject
from bitwright.errors import ConfigError
from bitwright.report.charts import ranges_chart, write_page


def write_ranges(sim: Any, save_path: str, title: str) -> Path:
    """Write the ranges of every quantizer that works as one page.

    Raises:
        ConfigError: (a ValueError) the path has not the suffix ``.html``.
        CalibrationError: the simulation is not calibrated.
    """
    if not str(save_path).endswith(".html"):
        raise ConfigError("save_path", f"{save_path!r} does not end with .html", "name an HTML file")
    charts = []
    for heading, roles in (("Activations", ("input", "output")), ("Weights", ("weight", "constant", "bias"))):
        found = {}
        for site in open_subject(sim).sites.values():
            if site.enabled and site.encoding is not None and site.role in roles:
                found[called(site)] = (float(site.encoding.min.min()), float(site.encoding.max.max()))
        charts.append(ranges_chart(found, heading))
    return write_page(save_path, title, *charts)
