"""The HTML file of a document: everything in one file, the data compressed and drawn on demand.

The page asks nothing of a network: its style and its program are inlined, and a content security policy forbids
requests. Where scripts are off, what matters most stands there as text.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from bitwright.export.files.atomic import atomic_write
from bitwright.report.document import Document, report_document
from bitwright.tables import html_table, plain

MAX_BYTES = 4_500_000  # of the whole file
_DIGITS = 5  # significant digits of numbers in the file
_ROWS = 30  # of the table without scripts
#: (bounds of channels, sites with histograms): tried one by one until the file is small enough; None is all
_DETAIL: tuple[tuple[int, int | None], ...] = (
    (256, None), (128, None), (64, None), (32, None), (0, None), (0, 2000), (0, 500), (0, 100), (0, 0),
)  # fmt: skip


def write_report(document: Mapping[str, Any], path: str | os.PathLike[str], **parts: Any) -> Path:
    """Write a report as one HTML file, whole or not at all.

    Args:
        document: of :func:`bitwright.report.report_document`, or what ``Analysis.to_dict()`` returns.
        path: of the file.
        parts: more of a report, as for :func:`bitwright.report.report_document`.

    Returns:
        The path.

    Raises:
        ConfigError: ``document`` is neither.
        ExportError: the file cannot be written.
    """
    text = page(report_document(document, **parts))
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def page(document: Document) -> str:
    """The HTML text of a document, below 4.5 MB for any number of sites that fits there without histograms."""
    assets = {name: asset(f"report.{name}") for name in ("html", "css", "js")}
    fixed = {"title": escape(document["title"]), "style": assets["css"], "script": assets["js"]}
    fixed["summary"] = _static(document)
    room = MAX_BYTES - sum(len(text.encode()) for text in (assets["html"], *fixed.values()))
    data = ""
    for channels, histograms in _DETAIL:
        data = _packed(compact(document, channels, histograms))
        if len(data) <= room:
            break
    return _filled(assets["html"], {**fixed, "data": data})


def asset(name: str) -> str:
    """The text of a file that is put into pages."""
    return (files("bitwright.report") / "assets" / name).read_text(encoding="utf-8")


def _filled(template: str, values: Mapping[str, str]) -> str:
    """``template`` with ``<!--name-->`` and ``/*name*/`` replaced; what is put in is not looked at again."""
    parts = [template]
    for name, value in values.items():
        for mark in (f"<!--{name}-->", f"/*{name}*/"):
            parts = [piece for part in parts for piece in _split(part, mark, value)]
    return "".join(parts)


class _Value(str):
    """What was put in."""


def _split(part: str, mark: str, value: str) -> list[str]:
    if isinstance(part, _Value):
        return [part]
    pieces = part.split(mark)
    return [text for piece in pieces[:-1] for text in (piece, _Value(value))] + pieces[-1:]


def _packed(document: Mapping[str, Any]) -> str:
    """JSON, deflated, as base64."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return base64.b64encode(zlib.compress(text.encode("utf-8", "backslashreplace"), 6)).decode()


# ---- what is kept of a document


def compact(document: Mapping[str, Any], channels: int, histograms: int | None) -> dict[str, Any]:
    """``document`` as the page reads it: numbers of five digits, links between layers as positions.

    Args:
        document: of :func:`bitwright.report.report_document`.
        channels: bounds of so many channels per site are kept; of more, neighbours are joined.
        histograms: of so many sites, those that cost most; ``None`` keeps all.
    """
    at = {layer["name"]: i for i, layer in enumerate(document["layers"])}
    ranked = sorted(range(len(document["sites"])), key=lambda i: -_cost(document["sites"][i]))
    drawn = set(ranked if histograms is None else ranked[:histograms])
    kept = dict(document)
    kept["layers"] = [
        {**layer, "inputs": [at[name] for name in layer.get("inputs", ()) if name in at]}
        for layer in document["layers"]
    ]
    kept["sites"] = [_site(site, channels if i in drawn else 0, i in drawn) for i, site in enumerate(document["sites"])]
    left_out = len(document["sites"]) - len(drawn)
    if left_out:
        note = f"histograms of the {left_out} sites that cost least are left out, to keep the file small"
        kept["notes"] = [*document["notes"], note]
    return _short(plain(kept))


def _cost(site: Mapping[str, Any]) -> float:
    value = site.get("noise")
    return value if isinstance(value, int | float) else -1.0


def _site(site: Mapping[str, Any], channels: int, histogram: bool) -> dict[str, Any]:
    kept = {key: value for key, value in site.items() if value is not None and value != ""}
    bounds = kept.pop("channels", None)
    if bounds and channels:
        kept["channels"] = _joined(bounds, channels)
    if not histogram:
        kept.pop("histogram", None)
    return kept


def _joined(bounds: Mapping[str, list[float]], most: int) -> dict[str, Any]:
    """Bounds of at most ``most`` runs of neighbouring channels."""
    low, high = bounds["low"], bounds["high"]
    step = -(-len(low) // most)
    cuts = range(0, len(low), step)
    return {
        "low": [min(low[i : i + step]) for i in cuts],
        "high": [max(high[i : i + step]) for i in cuts],
        "step": step,
        "count": len(low),
    }


def _short(tree: Any) -> Any:
    """``tree``, changed in place: floats of five significant digits."""
    stack = [tree]
    while stack:
        here = stack.pop()
        for key, value in list(here.items() if isinstance(here, dict) else enumerate(here)):
            if isinstance(value, dict | list):
                stack.append(value)
            elif isinstance(value, float):
                here[key] = _rounded(value)
    return tree


def _rounded(value: float) -> float | int:
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e9 else short


# ---- what is there without scripts


def _static(document: Document) -> str:
    """The verdict and the worst layers as text and a table."""
    ranked = sorted((layer for layer in document["layers"] if layer.get("noise")), key=lambda row: -row["noise"])
    rows = [
        (layer["name"], layer.get("op", ""), *(_db(layer.get(key)) for key in ("made_db", "arrived_db", "after_db")))
        for layer in ranked[:_ROWS]
    ]
    head = ("layer", "operator", "error made", "arrived", "after")
    shown = html_table(head, rows, "Layers that cost most", document["notes"]) if rows else ""
    return "".join(f"<p>{escape(line)}</p>" for line in verdict(document)) + shown


def verdict(document: Mapping[str, Any]) -> list[str]:
    """The result in sentences: metric, outputs, size."""
    found = []
    metric, output, model = document.get("metric"), document.get("output") or {}, document.get("model") or {}
    if metric:
        text = (metric.get("difference") or {}).get("text") or ""
        found.append(f"{metric['name']}: {metric['float']:.5g} in float, {metric['quantized']:.5g} quantized. {text}")
    if output.get("sqnr_db") is not None:
        found.append(f"Outputs: {output['sqnr_db']:.1f} dB signal to quantization noise.")
    before, after = model.get("bytes_float"), model.get("bytes_quantized")
    if before and after:
        found.append(f"Parameters: {before / 1e6:.2f} MB in float, {after / 1e6:.2f} MB quantized.")
    return found


def _db(value: Any) -> str:
    return "" if value is None else f"{value:.1f} dB"
