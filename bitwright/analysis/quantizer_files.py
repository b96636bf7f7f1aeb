"""Files about the quantizers of a simulation: their ranges, histograms of what they saw, outputs of layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.analysis.subject import open_subject
from bitwright.core.simulation.sites import Site
from bitwright.errors import ConfigError, with_article
from bitwright.report.document import seen_values
from bitwright.report.page import histogram_chart, ranges_chart, write_data, write_page

_BINS = 64


def write_range_files(sim: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ranges of weights and activations, as ``weights.json``, ``activations.json`` and pages."""
    weights: dict[str, Any] = {}
    activations: dict[str, Any] = {}
    for site in _calibrated(sim):
        if site.role != "bias":  # int32 from the scales of others
            (weights if site.is_stored else activations)[called(site)] = _ranges_of(site)
    for title, found in (("weights", weights), ("activations", activations)):
        pages = {file_name(name): (name, pairs) for name, pairs in found.items() if isinstance(pairs, dict)}
        whole = {name: pair for name, pair in found.items() if isinstance(pair, tuple)}
        write_data(folder / f"{title}.json", found)
        for page, (name, pairs) in {**({title: (title, whole)} if whole else {}), **pages}.items():
            write_page(folder / f"{page}.html", name, ranges_chart(pairs))
    return weights, activations


def write_histograms(sim: Any, folder: Path) -> None:
    """Histograms of what calibration saw, and of the weights, as ``activations_pdf`` and ``weights_pdf``."""
    subject = open_subject(sim)
    model: Any = None
    for site in _calibrated(sim):
        if site.is_stored:
            model = model or subject.steps()
            _write_weight(folder / "weights_pdf" / file_name(site.op), site, model.weight(site.name))
        elif site.role in ("input", "output"):
            histogram = seen_values(site.quantizer.statistics).get("histogram")
            if histogram is not None:
                name = f"{file_name(site.op)}_{site.role}_q{site.port}_0"
                chart = histogram_chart(histogram["edges"], histogram["counts"])
                write_page(folder / "activations_pdf" / f"{name}.html", name, chart)


def _calibrated(sim: Any) -> list[Site]:
    """The sites that work and have a grid."""
    return [site for site in open_subject(sim).sites.values() if site.enabled and site.encoding is not None]


def called(site: Site) -> str:
    """The name of a quantizer in files: ``conv1_weight``, ``conv1_output_0``."""
    if site.role in ("input", "output"):
        return f"{site.op}_{site.role}_{site.port}"
    return f"{site.op}_{site.name.removeprefix(site.op + '.')}"


def _ranges_of(site: Site) -> tuple[float, float] | dict[str, tuple[float, float]]:
    """The range of a tensor, or those of its channels by name."""
    encoding = site.encoding
    assert encoding is not None
    pairs = list(zip(encoding.min.ravel().tolist(), encoding.max.ravel().tolist(), strict=True))
    return pairs[0] if len(pairs) == 1 else {f"{called(site)}_{i}": pair for i, pair in enumerate(pairs)}


def _write_weight(folder: Path, site: Site, weight: Any) -> None:
    """A page per channel of a weight with a grid per channel, else one."""
    values = np.asarray(weight.detach().cpu().float().numpy())
    name = file_name(called(site))
    assert site.encoding is not None
    axis = getattr(site.encoding.granularity, "axis", None)
    rows = values.reshape(1, -1) if axis is None else np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
    for i, row in enumerate(rows):
        counts, edges = np.histogram(row, _BINS)
        write_page(folder / f"{name}_{i}.html", f"{site.name} {i}", histogram_chart(edges.tolist(), counts.tolist()))


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
        TypeError: ``sim`` is no simulation.
    """
    if not hasattr(sim, "quantizers"):
        raise TypeError(f"a simulation is shown, not {with_article(type(sim).__name__)}")
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


class RawFiles:
    """Writes ``inputs/input_<n>.raw`` and ``outputs/layer_outputs_<n>/<name>.raw`` below a folder, n counting the inputs."""

    def __init__(self, dir_path: str) -> None:
        self.folder, self.count = Path(dir_path), 0

    def save(self, inputs: Any, outputs: Mapping[str, Any]) -> None:
        """Write one input with the outputs of every layer, and ``layer_output_name_order.json``."""
        many = isinstance(inputs, tuple | list)
        for i, value in enumerate(inputs if many else [inputs]):
            name = f"input_{self.count}/{i}" if many else f"input_{self.count}"
            _write(self.folder / "inputs" / f"{name}.raw", value)
        for name, value in outputs.items():
            _write(self.folder / "outputs" / f"layer_outputs_{self.count}" / f"{file_name(name)}.raw", value)
        names = {"layer_output_names": [file_name(name) for name in outputs]}
        write_data(self.folder / "layer_output_name_order.json", names)
        self.count += 1


def file_name(name: str) -> str:
    """A name for a file: other characters than letters, digits and ``_`` become ``_``."""
    return re.sub(r"\W+", "_", name)


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    array = value.detach().cpu().float().numpy() if hasattr(value, "detach") else value
    np.ascontiguousarray(array, np.float32).tofile(path)
