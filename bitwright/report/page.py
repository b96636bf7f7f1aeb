"""Write HTML: the page of a document in a single file, and small pages with one chart each.

The page needs no network: style and script are inlined, and a content security policy forbids requests. Without scripts, it
shows the result and the worst layers as text.
"""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from bitwright.export.files.atomic import AnyPath, atomic_write
from bitwright.report.document import Document, report_document, simulation_document
from bitwright.tables import html_table, plain

MAX_BYTES = 4_500_000  # of the whole file
_DIGITS = 5  # significant digits of numbers in the file
_ROWS = 30  # of the table without scripts
#: (bounds of channels, sites with histograms): tried one by one until the file is small enough; None is all
_DETAIL: tuple[tuple[int, int | None], ...] = (
    (256, None), (128, None), (64, None), (32, None), (0, None), (0, 2000), (0, 500), (0, 100), (0, 0),
)  # fmt: skip


def write_report(document: Mapping[str, Any], path: str | os.PathLike[str], **parts: Any) -> Path:
    """Write a report as a single HTML file, atomically.

    Args:
        document: of :func:`bitwright.report.report_document`, or what ``Analysis.to_dict()`` returns.
        path: the file to write.
        parts: further parts of the report, as for :func:`bitwright.report.report_document`.

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


def page(document: Document) -> str:
    """The HTML text of a document; details of the least important sites are dropped to keep it below 4.5 MB."""
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
    """The text of an asset of the page."""
    return (files("bitwright.report") / "assets" / name).read_text(encoding="utf-8")


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Replace ``<!--name-->`` and ``/*name*/`` in ``template``; inserted text is not searched for further marks."""
    parts = [template]
    for name, value in values.items():
        for mark in (f"<!--{name}-->", f"/*{name}*/"):
            parts = [piece for part in parts for piece in _split(part, mark, value)]
    return "".join(parts)


class _Value(str):
    """Inserted text, in which no marks are replaced."""


def _split(part: str, mark: str, value: str) -> list[str]:
    if isinstance(part, _Value):
        return [part]
    pieces = part.split(mark)
    return [text for piece in pieces[:-1] for text in (piece, _Value(value))] + pieces[-1:]


def _packed(document: Mapping[str, Any]) -> str:
    """Encode as JSON, deflate, and base64."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return base64.b64encode(zlib.compress(text.encode("utf-8", "backslashreplace"), 6)).decode()


# ---- what is kept of a document


def compact(document: Mapping[str, Any], channels: int, histograms: int | None) -> dict[str, Any]:
    """Prepare ``document`` for the page: numbers of five digits, links between layers as positions.

    Args:
        document: of :func:`bitwright.report.report_document`.
        channels: most ranges of channels per site; neighbouring channels are merged to reach it.
        histograms: number of sites whose histograms are kept, the most costly ones; ``None`` keeps all.
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
        note = f"histograms of the {left_out} least costly sites are left out, to keep the file small"
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
    """Merge the bounds of neighbouring channels into at most ``most`` runs."""
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
    """Round the floats of ``tree`` to five significant digits, in place."""
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
    """The result as text and the worst layers as a table."""
    ranked = sorted((layer for layer in document["layers"] if layer.get("noise")), key=lambda row: -row["noise"])
    rows = [
        (layer["name"], layer.get("op", ""), *(_db(layer.get(key)) for key in ("made_db", "arrived_db", "after_db")))
        for layer in ranked[:_ROWS]
    ]
    head = ("layer", "operator", "error made", "arrived", "after")
    shown = html_table(head, rows, "Layers that cost most", document["notes"]) if rows else ""
    shown += "".join(map(_compressed, document["compression"] or ()))
    return "".join(f"<p>{escape(line)}</p>" for line in verdict(document)) + shown


def _compressed(done: Mapping[str, Any]) -> str:
    """What a step of compression did: a table of parts, and one of what was not touched."""
    text = html_table(done["table"]["head"], done["table"]["rows"][:_ROWS], done["summary"])
    return text + (html_table(("not touched", "why"), done["refused"][:_ROWS]) if done["refused"] else "")


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


# ---- small pages with one chart and its table, without scripts: scores, ranges, histograms

_STYLE = (
    ":root{color-scheme:light dark}body{font:14px system-ui,sans-serif;margin:1rem;overflow-wrap:anywhere}"
    "svg{width:100%;height:auto;max-height:60vh}table{border-collapse:collapse}"
    "th,td{text-align:left;padding:.15rem .6rem;border-bottom:1px solid #8884}"
    ".bar{fill:#5b8bc9}.span{stroke:#5b8bc9}.axis{stroke:#8888}text{fill:currentColor;font-size:10px}"
)
_WIDE, _HIGH = 900, 260
_MOST = 4000  # marks of one chart; the table has every row that tables show


def chart_page(title: str, charts: Iterable[str]) -> str:
    """An HTML page that needs no network, scripts or fonts."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"{''.join(charts)}</body></html>"
    )


def scores_chart(scores: Mapping[str, float], head: str = "score", title: str = "") -> str:
    """A bar chart of scores by name, and a table.

    >>> "<rect" in scores_chart({"conv1": 0.5, "fc": 0.9})
    True
    """
    finite = [float(value) for value in scores.values() if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    low = min(low, 0.0) if low < 0.5 * high or low < 0 else low - 0.2 * (high - low)
    wide = _WIDE / max(len(scores), 1)
    bars = [
        _bar(i * wide, wide * 0.8, _scaled(value, low, high), f"{name}: {value:.6g}")
        for i, (name, value) in enumerate(list(scores.items())[:_MOST])
        if math.isfinite(value)
    ]
    rows = [(name, f"{value:.6g}") for name, value in scores.items()]
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    return heading + _svg(bars, f"{low:.4g}", f"{high:.4g}") + html_table(("layer", head), rows)


def ranges_chart(ranges: Mapping[str, tuple[float, float]], title: str = "") -> str:
    """A chart of the range of each name, and a table."""
    finite = [float(v) for pair in ranges.values() for v in pair if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    wide = _WIDE / max(len(ranges), 1)
    lines = []
    for i, (name, (lo, hi)) in enumerate(list(ranges.items())[:_MOST]):
        if math.isfinite(lo) and math.isfinite(hi):
            top, bottom, middle = _scaled(hi, low, high), _scaled(lo, low, high) + 1, (i + 0.5) * wide
            title_of = f"<title>{escape(name)}: {lo:.6g} to {hi:.6g}</title>"
            place = f'x1="{middle:.1f}" x2="{middle:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"'
            lines.append(f'<line class="span" stroke-width="{max(wide * 0.6, 0.5):.1f}" {place}>{title_of}</line>')
    rows = [(name, f"{lo:.6g}", f"{hi:.6g}") for name, (lo, hi) in ranges.items()]
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    return heading + _svg(lines, f"{low:.4g}", f"{high:.4g}") + html_table(("name", "min", "max"), rows)


def points_chart(
    points: Mapping[str, tuple[float, float]], across: str, up: str, *, joined: bool = False, title: str = ""
) -> str:
    """A scatter plot of named points, and a table.

    Args:
        points: name -> (across, up).
        across, up: titles of the axes.
        joined: connect the points from left to right.

    >>> "<circle" in points_chart({"w8a8": (0.5, 0.9), "w4a8": (0.3, 0.8)}, "cost", "accuracy")
    True
    """
    finite = {name: point for name, point in points.items() if all(map(math.isfinite, point))}
    left, right = _ends([x for x, _ in finite.values()])
    low, high = _ends([y for _, y in finite.values()])
    places = [
        (name, x, y, 10 + (x - left) / (right - left) * (_WIDE - 20), _scaled(y, low, high))
        for name, (x, y) in sorted(finite.items(), key=lambda item: item[1])[:_MOST]
    ]
    marks = [
        f'<circle class="bar" r="4" cx="{at:.1f}" cy="{top:.1f}"><title>{escape(name)}: {across} {x:.6g}, {up} {y:.6g}'
        "</title></circle>"
        for name, x, y, at, top in places
    ]
    if joined:
        path = " ".join(f"{at:.1f},{top:.1f}" for *_, at, top in places)
        marks.insert(0, f'<polyline class="span" fill="none" points="{path}"/>')
    rows = [(name, f"{x:.6g}", f"{y:.6g}") for name, (x, y) in points.items()]
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    ends = (f"{left:.4g}", f"{right:.4g} {across}")
    return heading + _svg(marks, f"{low:.4g}", f"{high:.4g} {up}", *ends) + html_table(("name", across, up), rows)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Ends of an axis, never equal."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def histogram_chart(edges: Sequence[float], counts: Sequence[float]) -> str:
    """A histogram as bars."""
    low, high, most = edges[0], edges[-1], max(max(counts, default=1), 1)
    across = (high - low) or 1.0
    bars = [
        _bar(
            (start - low) / across * _WIDE,
            (end - start) / across * _WIDE,
            _scaled(n, 0, most),
            f"{start:.4g} to {end:.4g}: {n:.6g}",
        )
        for start, end, n in zip(edges[:-1], edges[1:], counts, strict=True)
        if n
    ]
    return _svg(bars, "0", f"{most:.4g}", f"{low:.5g}", f"{high:.5g}")


def _bar(x: float, width: float, top: float, told: str) -> str:
    place = f'x="{x:.1f}" y="{top:.1f}" width="{max(width, 0.5):.1f}" height="{max(_HIGH - 20 - top, 0):.1f}"'
    return f'<rect class="bar" {place}><title>{escape(told)}</title></rect>'


def _scaled(value: float, low: float, high: float) -> float:
    return 10 + (high - value) / ((high - low) or 1.0) * (_HIGH - 30)


def _svg(marks: Iterable[str], low: str, high: str, left: str = "", right: str = "") -> str:
    axis = f'<line class="axis" x1="0" x2="{_WIDE}" y1="{_HIGH - 20}" y2="{_HIGH - 20}"/>'
    texts = f'<text x="0" y="9">{high}</text><text x="0" y="{_HIGH - 23}">{low}</text>'
    ends = (
        f'<text x="0" y="{_HIGH - 6}">{left}</text><text x="{_WIDE}" y="{_HIGH - 6}" text-anchor="end">{right}</text>'
    )
    return f'<svg viewBox="0 0 {_WIDE} {_HIGH}" role="img">{axis}{"".join(marks)}{texts}{ends}</svg>'


def write_page(path: AnyPath, title: str, *charts: str) -> Path:
    """Write a page of charts atomically; folders are created.

    Raises:
        ExportError: it cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as temporary:
        temporary.write_text(chart_page(title, charts), encoding="utf-8")
    return target


def write_data(path: AnyPath, data: Any) -> Path:
    """Write plain data as JSON, atomically; folders are created.

    Raises:
        ExportError: it cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as temporary:
        temporary.write_text(json.dumps(plain(data), indent=1, allow_nan=False), encoding="utf-8")
    return target
