"""Small pages with one chart and its table, without scripts: scores, ranges, histograms."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bitwright.export.files.atomic import AnyPath, atomic_write
from bitwright.tables import html_table, plain

_STYLE = (
    ":root{color-scheme:light dark}body{font:14px system-ui,sans-serif;margin:1rem;overflow-wrap:anywhere}"
    "svg{width:100%;height:auto;max-height:60vh}table{border-collapse:collapse}"
    "th,td{text-align:left;padding:.15rem .6rem;border-bottom:1px solid #8884}"
    ".bar{fill:#5b8bc9}.span{stroke:#5b8bc9}.axis{stroke:#8888}text{fill:currentColor;font-size:10px}"
)
_WIDE, _HIGH = 900, 260
_MOST = 4000  # marks of one chart; the table has every row that tables show


def chart_page(title: str, charts: Iterable[str]) -> str:
    """One HTML page without network, scripts or fonts."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"{''.join(charts)}</body></html>"
    )


def scores_chart(scores: Mapping[str, float], head: str = "score", title: str = "") -> str:
    """A bar per name from the lowest score, and a table.

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
    """A line from the lowest to the highest value of each name, and a table."""
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
    """A dot per name over two axes, and a table.

    Args:
        points: name -> (across, up).
        across, up: what the axes are.
        joined: draw a line from dot to dot, from left to right.

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
    """Lowest and highest, never equal."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def histogram_chart(edges: Sequence[float], counts: Sequence[float]) -> str:
    """Bars of a histogram over the axis of the values."""
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
    """Write a page of charts, whole or not at all; folders are made.

    Raises:
        ExportError: it cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as temporary:
        temporary.write_text(chart_page(title, charts), encoding="utf-8")
    return target


def write_data(path: AnyPath, data: Any) -> Path:
    """Write plain data as JSON, whole or not at all; folders are made.

    Raises:
        ExportError: it cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as temporary:
        temporary.write_text(json.dumps(plain(data), indent=1, allow_nan=False), encoding="utf-8")
    return target
