"""Documents of what lies in files: an export, or the JSON of an analysis or of a report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bitwright.compare.verify import verify_folder
from bitwright.core.files import read_document
from bitwright.errors import BitwrightError, ConfigError, ExportError
from bitwright.export.encodings.of_simulation import SavedSite, read_sites
from bitwright.export.files.atomic import read_error
from bitwright.export.files.manifest import read_manifest
from bitwright.export.samples import find_export
from bitwright.report.document import Document, report_document
from bitwright.report.of_simulation import grid_of, network_of

AnyPath = str | os.PathLike[str]
_MAX_BYTES = 512 << 20  # histograms of every site of a large model are in an analysis


def read_run(path: AnyPath, prefix: str | None = None, *, verify: bool = False) -> Document:
    """The document of an export folder, or of a JSON file of an analysis or a report.

    Args:
        path: of the folder or file.
        prefix: stem of the export's files; needed when the folder holds several.
        verify: run the exported model against its samples too (a folder only).

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
        raise ConfigError(str(path), f"it holds a {type(found).__name__}, not a report", remedy)
    return found


def folder_document(folder: AnyPath, prefix: str | None = None, *, verify: bool = False) -> Document:
    """The document of an export: its encodings, its graph, what stayed in float, its files.

    ``<prefix>_analysis.json`` in the folder, if there is one, brings the errors.

    Args:
        folder: what ``sim.export`` wrote into.
        prefix: stem of the files; needed when the folder holds several exports.
        verify: run the exported model against its samples too.

    Raises:
        ExportError: no export there, or several; a file is missing or damaged.
    """
    path, stem = Path(folder), find_export(folder, prefix)
    manifest = read_manifest(path / f"{stem}_manifest.json")
    saved = read_sites(path / f"{stem}_sites.json")
    analysis_file = path / f"{stem}_analysis.json"
    analysis = _read_json(analysis_file) if analysis_file.is_file() else None
    graph, problem = _graph(path / f"{stem}_float.onnx")
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
        files=[{"name": entry.name, "size": entry.size} for entry in manifest.files],
        notes=(*manifest.notes, *([problem] if problem else [])),
    )


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
    """The operator that a tensor of a site belongs to: its maker for an output, else its first reader."""
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
