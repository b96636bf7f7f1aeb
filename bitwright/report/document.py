"""Build the document of a report, a dictionary of plain data, from a simulation, an export, or the parts of an analysis."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.compare.verify import verify_folder
from bitwright.core.files import read_document
from bitwright.core.graph.cost import multiplications, size
from bitwright.core.graph.graph import Graph
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.statistics import HALF_BINS, Histogram, MinMax
from bitwright.core.simulation.sites import Site
from bitwright.errors import BitwrightError, CalibrationError, ConfigError, ExportError, with_article
from bitwright.export.encodings.of_simulation import SavedSite, read_sites
from bitwright.export.files.atomic import AnyPath, read_error
from bitwright.export.files.manifest import read_manifest, read_origin
from bitwright.export.samples import find_export

FORMAT, VERSION = "bitwright-report", 1
ANALYSIS = "bitwright-analysis"
Document = dict[str, Any]
POOR = 20.0  # dB: the noise is a tenth of the output
#: least SQNR of the outputs in dB -> what it is called; noise of 1 %, 3 % and 10 % of the output
LEVELS = ((40.0, "excellent"), (30.0, "good"), (POOR, "fair"), (-math.inf, "poor"))
_BINS = 64
_MAX_BYTES = 512 << 20  # histograms of every site of a large model are in an analysis

#: what a document has beside its sites and layers, each ``None`` where it is not known
SECTIONS = (
    "model",
    "data",
    "mode",
    "metric",
    "output",
    "coverage",
    "recipe",
    "compression",
    "health",
    "verification",
    "pareto",
    "size",
)
_LISTS = ("sites", "layers", "groups", "remedies", "notes", "files")
_LINKS = ("inputs", "sites")  # of a layer; an analysis does not know operators that it did not measure


def report_document(
    analysis: Any = None,
    *,
    title: str = "",
    network: Mapping[str, Any] | None = None,
    coverage: Any = None,
    recipe: Any = None,
    compression: Any = None,
    health: Any = None,
    verification: Any = None,
    pareto: Any = None,
    measured: Mapping[str, float] | None = None,
    output: Mapping[str, Any] | None = None,
    size: Mapping[str, int] | None = None,
    files: Sequence[Mapping[str, Any]] = (),
    notes: Iterable[str] = (),
) -> Document:
    """Combine the given parts into the document of a report.

    Args:
        analysis: what ``Analysis.to_dict()`` returns, or an object that has it; or a document, to which parts are added.
        title: heading of the report; by default the model's name.
        network: ``{"layers": [...], "sites": [...], "model": {...}}`` with the columns of an analysis, in execution order
            (:func:`bitwright.report.document.network_of`); what ``analysis`` says of the same names is added.
        coverage, recipe, health, verification: reports, or their dictionaries.
        compression: results of :meth:`bitwright.methods.details.Detailed.details`; by default those of the recipe's steps.
        pareto: a result of ``mixed_precision``, or ``{"x": label, "y": label, "points": [{"x", "y", "label", "chosen"}]}``.
        measured: ``{"float", "quantized"}``, a metric without interval, shown where the analysis has none.
        output: ``{"name", "sqnr_db"}`` of the worst output, shown where the analysis has none.
        size: ``{"float", "quantized"}``, bytes of the files that are compared.
        files: ``{"name", "size"}`` of what was exported.
        notes: sentences for the reader.

    Returns:
        The document; JSON can write it.

    Raises:
        ConfigError: ``analysis`` is neither an analysis nor a document of this version.
    """
    given = _analysis_or_document(analysis)
    known: Mapping[str, Any] = network or {}
    document: Document = {"format": FORMAT, "version": VERSION, "title": title}
    document |= {name: given.get(name) for name in SECTIONS}
    document |= {name: list(given.get(name) or ()) for name in _LISTS}
    document["model"] = {**(known.get("model") or {}), **(given.get("model") or {})}
    document["title"] = title or given.get("title") or str(document["model"].get("name") or "Quantized model")
    document["sites"] = joined(known.get("sites", ()), document["sites"])
    document["layers"] = in_order(joined(known.get("layers", ()), document["layers"]))
    parts = {"coverage": coverage, "recipe": recipe, "health": health, "verification": verification}
    document |= {name: dictionary_of(part) for name, part in parts.items() if part is not None}
    document["compression"] = _compressed(document, compression)
    document |= {"pareto": pareto_of(dictionary_of(pareto) or {})} if pareto is not None else {}
    if measured and "quantized" in measured and document["metric"] is None:
        document["metric"] = {"name": "metric", "better": None, "difference": None, **measured}
    document["output"] = _rated_output(document["output"], output)
    document["size"] = document["size"] if size is None else dict(size)
    document["files"] += [dict(file) for file in files]
    document["notes"] += list(notes)
    return document


def _compressed(document: Document, given: Any) -> list[Mapping[str, Any]] | None:
    """What is known of a compression: as given, or what the steps of a recipe say that are in effect."""
    known = given or document["compression"]
    if known:
        return list(known)
    steps = [step for step in (document["recipe"] or {}).get("outcomes") or () if step.get("details")]
    return [{**step["details"], "step": step["step"]} for step in steps if step.get("kept", True)] or None


def _rated_output(analysed: Mapping[str, Any] | None, given: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The worst output with the level of its SQNR: of the analysis, or else as given."""
    output = dict(given) if given and (analysed or {}).get("sqnr_db") is None else analysed
    sqnr = (output or {}).get("sqnr_db")
    return output if output is None or sqnr is None else {**output, "level": level(float(sqnr))}


def dictionary_of(part: Any) -> dict[str, Any] | None:
    """``part`` if it is a dictionary, or what its ``to_dict()`` returns."""
    if part is None or isinstance(part, dict):
        return part
    found: dict[str, Any] = dict(part) if isinstance(part, Mapping) else part.to_dict()
    return found


def _analysis_or_document(analysis: Any) -> Mapping[str, Any]:
    given = dictionary_of(analysis) or {}
    if given and (given.get("format"), given.get("version")) not in ((ANALYSIS, 1), (FORMAT, VERSION)):
        raise ConfigError(
            "report",
            f"format {given.get('format')!r:.60}, version {given.get('version')!r:.20} is neither an analysis nor a report",
            "give what bitwright.analyze(sim, data).to_dict() returns, or the JSON file of a report",
        )
    return given


def pareto_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Points with ``x`` and ``y``: of a search for precisions its cost, and its metric or else the error of the outputs.

    >>> pareto_of({"cost": "bytes", "metric": None, "points": [{"name": "a", "costs": {"bytes": 8}, "sqnr_db": 30.0}]})
    {'x': 'bytes', 'y': 'SQNR of the outputs, dB', 'points': [{'x': 8, 'y': 30.0, 'label': 'a', 'chosen': False}]}
    """
    cost, metric = found.get("cost"), found.get("metric")
    if cost is None:
        return dict(found)
    key = "metric" if metric else "sqnr_db"
    points = [
        {"x": p["costs"][cost], "y": p[key], "label": p["name"], "chosen": bool(p.get("chosen"))}
        for p in found.get("points", ())
        if p.get(key) is not None and cost in p["costs"]
    ]
    label = str(metric["name"]) if metric else "SQNR of the outputs, dB"
    return {"x": cost, "y": label, "points": points}


def joined(first: Iterable[Mapping[str, Any]], second: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows by name: those of ``first`` with what ``second`` says of the same name and is not ``None``, then the others.

    Links of the first stay where they are: it knows every operator.

    >>> joined([{"name": "a", "inputs": ["x"]}], [{"name": "a", "inputs": [], "db": 3.0, "bits": None}, {"name": "b"}])
    [{'name': 'a', 'inputs': ['x'], 'db': 3.0}, {'name': 'b'}]
    """
    rows = {str(row["name"]): dict(row) for row in first}
    for row in second:
        known = rows.setdefault(str(row["name"]), {})
        kept = {key: known[key] for key in _LINKS if known.get(key)}
        said = {key: value for key, value in row.items() if value is not None or not known}
        known |= {**said, **kept}
    return list(rows.values())


def in_order(layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort ``layers`` so that inputs come first, keeping the given order otherwise; a loop starts at its first layer."""
    at = {layer["name"]: i for i, layer in enumerate(layers)}
    waits = [{at[name] for name in layer.get("inputs", ()) if name in at} - {i} for i, layer in enumerate(layers)]
    readers: list[list[int]] = [[] for _ in layers]
    for i, sources in enumerate(waits):
        for source in sources:
            readers[source].append(i)
    left = [len(sources) for sources in waits]
    found: list[int] = []
    placed = [False] * len(layers)
    for first in range(len(layers)):
        # those that wait for nothing, in the order given; at the end what only a loop leads to
        stack = [first] if not placed[first] and not left[first] else []
        _place(stack, readers, left, placed, found)
    for first in range(len(layers)):
        _place([] if placed[first] else [first], readers, left, placed, found)
    return [layers[i] for i in found]


def _place(
    stack: list[int], readers: Sequence[Sequence[int]], left: list[int], placed: list[bool], found: list[int]
) -> None:
    """Place the layers on the stack, then those whose last missing input they are."""
    while stack:
        here = stack.pop()
        if placed[here]:
            continue
        placed[here] = True
        found.append(here)
        for reader in reversed(readers[here]):
            left[reader] -= 1
            if left[reader] <= 0 and not placed[reader]:
                stack.append(reader)


def level(sqnr: float) -> str:
    """Rate the SQNR of outputs in a word, with its bound.

    >>> level(34.5)
    'good (30 dB or more)'
    """
    bound, word = next((bound, word) for bound, word in LEVELS if sqnr >= bound)
    return f"{word} (below {POOR:g} dB)" if bound < POOR else f"{word} ({bound:g} dB or more)"


# ---- of a simulation


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
    """Build the document of a calibrated simulation of either front end.

    Args:
        sim: a ``QuantizationSimModel``.
        data: batches on which errors are measured; by default the example input alone, with a note that says so.
        analysis: an existing analysis, instead of ``data``.
        verification: a report of ``sim.verify()``; ``True`` makes one.
        health: a report of ``check_model``; ``sim.health()`` by default.
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
            told.append("errors are measured on the example input alone; pass data to measure them on yours")
        from bitwright import analyze  # by its public name: it writes reports itself

        analysis = analyze(sim, data, **options)
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


def network_of(graph: Graph, sites: Iterable[Site]) -> dict[str, Any]:
    """Operators and sites with the columns of an analysis, in execution order.

    Layers also have ``multiplications`` and ``elements`` of the recorded run.
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
    """The columns of a site that follow from its encoding; ``digest`` differs where any channel does."""
    steps = encoding.format.steps if isinstance(encoding.format, IntFormat) else None
    low, high = float(encoding.min.min()), float(encoding.max.max())
    digest = hashlib.sha256(repr((encoding.format, encoding.granularity)).encode())
    digest.update(encoding.scale.tobytes() + encoding.zero_point.tobytes())
    grid = {"low": low, "high": high, "steps": steps}
    return {"grid": grid, "lsb": float(encoding.scale.max()), "digest": digest.hexdigest()[:16]}


def seen_values(statistics: Any) -> dict[str, Any]:
    """The columns of a site that follow from calibration statistics: bounds, histogram, bounds of channels."""
    if isinstance(statistics, Histogram) and not statistics.exponent.shape:
        return {**seen_values(statistics.bounds), "histogram": _histogram(statistics)}
    if not isinstance(statistics, MinMax) or not statistics.count.sum():
        return {}
    seen: dict[str, Any] = {"minimum": float(statistics.lo.min()), "maximum": float(statistics.hi.max())}
    if statistics.lo.size > 1 and np.isfinite(statistics.lo).all() and np.isfinite(statistics.hi).all():
        seen["channels"] = {"low": statistics.lo.ravel().tolist(), "high": statistics.hi.ravel().tolist()}
    return seen


def _histogram(statistics: Histogram) -> dict[str, Any] | None:
    """The bins from the first to the last that is not empty, merged into at most 64."""
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


# ---- of files


def read_run(path: AnyPath, prefix: str | None = None, *, verify: bool = False) -> Document:
    """Read the document of an export folder, or of the JSON file of an analysis or a report.

    Args:
        path: the folder or file.
        prefix: stem of the export's files; needed when the folder holds several.
        verify: also compare the exported model with its samples (folders only).

    Raises:
        ExportError: there is neither, or see :func:`folder_document`.
        ConfigError: the file is neither an analysis nor a report.
    """
    if Path(path).is_dir():
        return folder_document(path, prefix, verify=verify)
    if not Path(path).exists():
        remedy = "name a folder that sim.export wrote, or a file that holds Analysis.to_json()"
        raise ExportError(os.fspath(path), "there is no such file or folder", remedy)
    return report_document(_read_json(Path(path)))


def _read_json(path: Path) -> dict[str, Any]:
    remedy = "write it again with Analysis.to_json()"
    found = read_document(path, ConfigError, remedy=remedy, max_bytes=_MAX_BYTES, kind=".json", unreadable=read_error)
    if not isinstance(found, dict):
        raise ConfigError(str(path), f"it holds {with_article(type(found).__name__)}, not a report", remedy)
    return found


def folder_document(folder: AnyPath, prefix: str | None = None, *, verify: bool = False) -> Document:
    """Build the document of an export from its encodings, graph, float tensors and files.

    The errors come from ``<prefix>_analysis.json`` where the folder has one.

    Args:
        folder: what ``sim.export`` wrote into.
        prefix: stem of the files; needed when the folder holds several exports.
        verify: also compare the exported model with its samples.

    Raises:
        ExportError: no export there, or several; a file is missing or damaged.
    """
    path, stem = Path(folder), find_export(folder, prefix)
    manifest = read_manifest(path / f"{stem}_manifest.json")
    saved = read_sites(path / f"{stem}_sites.json")
    analysis_file = path / f"{stem}_analysis.json"
    analysis = _read_json(analysis_file) if analysis_file.is_file() else None
    graph, problem = _graph(path / f"{stem}_float.onnx")
    origin = read_origin(path / f"{stem}.onnx") if (path / f"{stem}.onnx").is_file() else {}
    sites = [_site(name, site, graph) for name, site in saved.sites.items()]
    network: dict[str, Any] = {"sites": sites, "model": {"name": stem}}
    if graph is not None and analysis is None:  # an analysis names layers as the simulation does
        network["layers"] = _with_sites(network_of(graph, ())["layers"], sites)
    rows = [{"name": name, "status": "float", "how": why} for name, why in saved.floats.items()]
    return report_document(
        analysis,
        title=stem,
        network=network,
        coverage={"rows": rows},
        verification=verify_folder(path, stem) if verify else None,
        measured={
            which: float(origin[key]) for which in ("float", "quantized") if (key := f"metric_{which}") in origin
        },
        output={"name": origin["output"], "sqnr_db": float(origin["sqnr_db"])} if "sqnr_db" in origin else None,
        size=_sizes({entry.name: entry.size for entry in manifest.files}, stem),
        files=[{"name": entry.name, "size": entry.size} for entry in manifest.files],
        notes=(*manifest.notes, *([problem] if problem else [])),
    )


def _sizes(files: Mapping[str, int], stem: str) -> dict[str, int] | None:
    """Bytes of the float model and of the file that is deployed, each with the file of its weights if it has one."""
    flat, both = f"{stem}.tflite", {}
    for which, name in (("float", f"{stem}_float.onnx"), ("quantized", flat if flat in files else f"{stem}.onnx")):
        both[which] = files.get(name, 0) + files.get(f"{name}.data", 0)
    return both if all(both.values()) else None


def _graph(path: Path) -> tuple[Any, str]:
    """The graph of the exported float model, or ``None`` and why it is not shown."""
    from bitwright.onnx.model.graph import build_graph
    from bitwright.onnx.model.load import load_model

    try:
        return build_graph(load_model(path).model).graph, ""
    except BitwrightError as error:
        return None, f"the graph is not shown, because {path.name} cannot be read: {error.problem}"


def _site(name: str, site: SavedSite, graph: Any) -> dict[str, Any]:
    fmt = site.spec.format
    layer = next((op for tensor in site.tensors if (op := _operator(site.role, tensor, graph))), None)
    return {
        "name": name,
        "role": site.role,
        "layer": name.rpartition(".")[0] if layer is None else layer.name,
        "op": "" if layer is None else layer.type,
        "dtype": fmt.name,
        "bits": fmt.bits,
        "spec": site.spec.describe(),
        "enabled": site.enabled and site.encoding is not None,
        "why_float": "" if site.enabled else "its quantizer is off",
        **(grid_of(site.encoding) if site.encoding is not None else {}),
    }


def _operator(role: str, tensor: str, graph: Any) -> Any:
    """The operator that a tensor of a site belongs to: its producer for an output, otherwise its first consumer."""
    if graph is None or tensor not in graph.values:
        return None
    if role == "output":
        return graph.producer(tensor)
    readers = graph.consumers(tensor)
    return readers[0][0] if readers else None


def _with_sites(layers: list[dict[str, Any]], sites: list[dict[str, Any]]) -> list[dict[str, Any]]:
    held: dict[str, list[str]] = {}
    for site in sites:
        held.setdefault(site["layer"], []).append(site["name"])
    return [{**layer, "sites": held.get(layer["name"], [])} for layer in layers]
