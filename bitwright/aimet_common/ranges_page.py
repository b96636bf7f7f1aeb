"""The page of all ranges of a simulation, of either front end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitwright.aimet_common.analyzer import called
from bitwright.analysis.subject.subject import open_subject
from bitwright.errors import ConfigError
from bitwright.report.charts import ranges_chart, write_page

_KINDS = {"Activations": ("input", "output"), "Weights": ("weight", "constant", "bias")}


def write_ranges(sim: Any, save_path: str, title: str, *, apart: bool = False) -> None:
    """Write the ranges of every quantizer that works as one page, or as two.

    Args:
        sim: calibrated.
        save_path: of the page.
        title: of the page.
        apart: write ``<path>_activations.html`` and ``<path>_weights.html`` instead, of which one without ranges is left out.

    Raises:
        ConfigError: (a ValueError) the path has not the suffix ``.html``.
        CalibrationError: the simulation is not calibrated.
    """
    if not str(save_path).endswith(".html"):
        raise ConfigError("save_path", f"{save_path!r} does not end with .html", "name an HTML file")
    sites = open_subject(sim).sites.values()
    charts = {}
    for heading, roles in _KINDS.items():
        found = {
            called(site): (float(site.encoding.min.min()), float(site.encoding.max.max()))
            for site in sites
            if site.enabled and site.encoding is not None and site.role in roles
        }
        if found or not apart:
            charts[heading] = ranges_chart(found, heading)
    if not apart:
        write_page(save_path, title, *charts.values())
        return
    path = Path(save_path)
    for heading, chart in charts.items():
        write_page(path.with_name(f"{path.stem}_{heading.lower()}.html"), title, chart)
