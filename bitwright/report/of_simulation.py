"""The parts of a report that a simulation knows by itself: its operators, sites and encodings."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.core.graph.cost import multiplications, size
from bitwright.core.graph.graph import Graph
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.statistics import HALF_BINS, Histogram, MinMax
from bitwright.core.simulation.sites import Site
from bitwright.errors import CalibrationError, ConfigError
from bitwright.report.document import Document, report_document
from bitwright.report.page import write_report

_BINS = 64


def simulation_document(
    sim: Any,
    data: Any = None,
    *,
    analysis: Any = None,
    verification: Any = None,
    health: Any = None,
    recipe: Any = None,
    pareto: Any = None,
    measured: Mapping[str, float] | None = None,
    title: str = "",
    notes: Iterable[str] = (),
    **options: Any,
) -> Document:
    """The document of a calibrated simulation of either front end.

    Args:
        sim: a ``QuantizationSimModel``.
        data: batches on which errors are measured; by default the example input alone, which the report says.
        analysis: made before, instead of ``data``.
        verification: a report of ``sim.verify()``; ``True`` makes one.
        health: a report of ``check_model``; by default what calibration saw.
        recipe, pareto, measured, title, notes: see :func:`bitwright.report.report_document`.
        options: of :func:`bitwright.analyze`, such as ``metric``.

    Raises:
        CalibrationError: the simulation is not calibrated.
        ConfigError: both ``analysis`` and ``data`` or options for another one are given.
    """
    if not sim.calibrated:
        raise CalibrationError(
            "report",
            "the simulation is not calibrated, so there are no encodings to show",
            "call sim.compute_encodings(batches) or sim.load_encodings(path) first",
        )
    if analysis is not None and (data is not None or options):
        given = ", ".join(["data"] * (data is not None) + list(options))
        problem = f"it is given an analysis, and {given} for another one"
        raise ConfigError("report", problem, "give either an analysis or data with its options")
    told = list(notes)
    if analysis is None:
        if data is None:
            data = [sim.example()]
            told.append("errors are those on the example input alone; give data to have them of your own")
        analysis = _analyze(sim, data, options)
    return report_document(
        analysis,
        title=title,
        network=network_of(sim.graph, sim.quantizers.values()),
        coverage=sim.coverage(),
        verification=sim.verify() if verification is True else verification,
        health=sim.health() if health is None else health,
        recipe=recipe,
        pareto=pareto,
        measured=measured,
        notes=told,
    )


def simulation_report(sim: Any, path: str | os.PathLike[str], data: Any = None, **options: Any) -> Path:
    """Write the report of a calibrated simulation as one HTML file that needs no network.

    Args:
        sim: a ``QuantizationSimModel`` of either front end.
        path: of the file.
        data: batches on which errors are measured; by default the example input alone.
        options: as for :func:`simulation_document`.

    Returns:
        The path.

    Raises:
        CalibrationError: the simulation is not calibrated.
        ExportError: the file cannot be written.
    """
    return write_report(simulation_document(sim, data, **options), path)


def _analyze(sim: Any, data: Any, options: Mapping[str, Any]) -> Any:
    from bitwright.analysis.analyze import analyze

    return analyze(sim, data, **options)


def network_of(graph: Graph, sites: Iterable[Site]) -> dict[str, Any]:
    """Operators and sites as the columns of an analysis, in execution order.

    Layers have ``multiplications`` and ``elements`` (of the recorded run) beside.
    """
    rows = [_site_row(site, graph) for site in sites]
    held: dict[str, list[str]] = {}
    for row in rows:
        held.setdefault(row["layer"], []).append(row["name"])
    layers = []
    for op in graph.ops:
        makers = (graph.producer(value) for _, value in op.sources())
        layers.append(
            {
                "name": op.name,
                "op": op.type,
                "sites": held.get(op.name, []),
                "inputs": list(dict.fromkeys(m.name for m in makers if m is not None and m.name != op.name)),
                "multiplications": multiplications(graph, op),
                "elements": sum(size(graph, value) for value in op.outputs),
            }
        )
    return {"layers": layers, "sites": rows}


def _site_row(site: Site, graph: Graph) -> dict[str, Any]:
    told, encoding = site.row, site.encoding
    return {
        "name": site.name,
        "role": site.role,
        "layer": site.op,
        "op": graph.op(site.op).type,
        "dtype": told["format"],
        "bits": told["bits"],
        "enabled": site.enabled,
        "why_float": told["why_float"],
        "spec": told["spec"],
        "shared_with": "" if site.group == site.name else site.group,
        **(grid_of(encoding) if encoding is not None else {}),
        **seen_values(site.quantizer.statistics),
    }


def grid_of(encoding: Encoding) -> dict[str, Any]:
    """The columns of a site that its encoding gives; ``digest`` tells encodings apart, channel by channel."""
    steps = encoding.format.steps if isinstance(encoding.format, IntFormat) else None
    low, high = float(encoding.min.min()), float(encoding.max.max())
    digest = hashlib.sha256(repr((encoding.format, encoding.granularity)).encode())
    digest.update(encoding.scale.tobytes() + encoding.zero_point.tobytes())
    grid = {"low": low, "high": high, "steps": steps}
    return {"grid": grid, "lsb": float(encoding.scale.max()), "digest": digest.hexdigest()[:16]}


def seen_values(statistics: Any) -> dict[str, Any]:
    """Bounds, histogram and bounds of channels out of the statistics that calibration kept, as columns of a site."""
    if isinstance(statistics, Histogram) and not statistics.exponent.shape:
        return {**seen_values(statistics.bounds), "histogram": _histogram(statistics)}
    if not isinstance(statistics, MinMax) or not statistics.count.sum():
        return {}
    seen: dict[str, Any] = {"minimum": float(statistics.lo.min()), "maximum": float(statistics.hi.max())}
    if statistics.lo.size > 1 and np.isfinite(statistics.lo).all() and np.isfinite(statistics.hi).all():
        seen["channels"] = {"low": statistics.lo.ravel().tolist(), "high": statistics.hi.ravel().tolist()}
    return seen


def _histogram(statistics: Histogram) -> dict[str, Any] | None:
    """The bins that hold something, joined to at most 64."""
    filled = np.flatnonzero(statistics.counts)
    if not filled.size:
        return None
    first, last = int(filled[0]), int(filled[-1]) + 1
    cuts = np.unique(np.linspace(first, last, min(_BINS, last - first) + 1).astype(np.int64))
    counts = np.add.reduceat(statistics.counts, cuts[:-1]) if len(cuts) > 2 else [statistics.counts.sum()]
    width = 2.0 ** int(statistics.exponent)
    bins = cuts - (HALF_BINS - 1)
    edges = np.where(bins > 0, bins, bins - 1) * width  # bins below zero mirror those above it
    return {"edges": edges.tolist(), "counts": [int(n) for n in counts]}
