"""Compare two runs of a model: encodings, layers, metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log10
from pathlib import Path
from typing import Any, ClassVar, Literal

from bitwright.errors import ConfigError
from bitwright.export.files.atomic import AnyPath, atomic_write
from bitwright.report.page import asset
from bitwright.tables import Tabular, html_table, text_table

Kind = Literal["format", "range", "now in float", "now quantized", "only in the first", "only in the second"]
_SAME = 1e-6  # of a range, relative: what storing numbers in JSON changes
_LEAST_DB = 0.5  # a layer's change below it is noise of the estimate
_SHOWN = 20
#: what layers are compared by: the first of which both runs know something
_MEASURES = {
    "after_db": "error of its output",
    "cost_db": "what it costs at the outputs",
    "made_db": "error made in it",
}


@dataclass(frozen=True)
class SiteChange:
    """A site that the two runs quantize differently; ``before`` and ``after`` describe format and range."""

    name: str
    kind: Kind
    before: str
    after: str


@dataclass(frozen=True)
class LayerChange:
    """A layer whose error (SQNR in dB) differs; ``change`` is positive where the second run is better."""

    name: str
    op: str
    before: float
    after: float

    _also: ClassVar[tuple[str, ...]] = ("change",)

    @property
    def change(self) -> float:
        """Improvement in dB."""
        return self.after - self.before


@dataclass(frozen=True)
class NumberChange:
    """A figure of the whole model in both runs; ``None`` where a run does not have it."""

    name: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class RunDiff(Tabular):
    """The differences between two runs.

    Attributes:
        first, second: names of the runs.
        numbers: metrics, output error and sizes.
        sites: the sites whose encodings differ, in the order of the first run.
        same: how many sites have equal encodings.
        layers: the layers that differ by at least half a dB, the largest difference first.
        measure: the error by which layers are compared; empty where a run was not analysed.
    """

    _rows = "sites"
    _also = ("equal",)

    first: str
    second: str
    numbers: tuple[NumberChange, ...]
    sites: tuple[SiteChange, ...]
    same: int
    layers: tuple[LayerChange, ...]
    measure: str

    @property
    def equal(self) -> bool:
        """Whether every site is quantized in the same way."""
        return not self.sites

    def _tables(self) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        """Title, head and rows of each table."""
        numbers = [(n.name, _short(n.before), _short(n.after)) for n in self.numbers]
        yield "Numbers", ("what", self.first, self.second), numbers
        sites = [(s.name, s.kind, s.before, s.after) for s in self.sites]
        yield (f"{len(sites)} sites differ, {self.same} are equal", ("site", "what", self.first, self.second), sites)
        for title, rows in (
            ("Layers that are better", [c for c in self.layers if c.change > 0]),
            ("Layers that are worse", [c for c in self.layers if c.change < 0]),
        ):
            cells = [(c.name, c.op, f"{c.before:.1f} dB", f"{c.after:.1f} dB", f"{c.change:+.1f} dB") for c in rows]
            yield f"{title}: {self.measure}", ("layer", "operator", self.first, self.second, "change"), cells

    def to_text(self, most: int = _SHOWN) -> str:
        """The differences as tables, the first ``most`` rows of each."""
        lines: list[str] = []
        for title, head, rows in self._tables():
            if not rows and head[0] != "site":
                continue
            lines += [title, *([text_table(head, rows[:most])] if rows else [])]
            lines += [f"and {len(rows) - most} more"] if len(rows) > most else []
            lines.append("")
        if not self.measure:
            lines.append("layers are not compared: write Analysis.to_json() beside each export, or give two analyses")
        return "\n".join(lines).rstrip()

    __str__ = to_text

    def to_html(self) -> str:
        """The differences as one HTML page that needs no network."""
        title = escape(f"{self.first} and {self.second}")
        parts = [html_table(head, rows, name) for name, head, rows in self._tables() if rows]
        note = "" if self.measure else "<p>Layers are not compared: one run was not analysed.</p>"
        body = "".join(f'<section><div class="wide">{part}</div></section>' for part in parts)
        same = "<p>Every site is quantized in the same way.</p>" if self.equal else ""
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            f"<title>{title}</title><style>{asset('report.css')}</style></head><body><header><h1>{title}</h1></header>"
            f"<main>{same}{body}{note}</main></body></html>"
        )

    def report(self, path: AnyPath) -> Path:
        """Write :meth:`to_html` to a file.

        Raises:
            ExportError: it cannot be written.
        """
        with atomic_write(path) as temporary:
            temporary.write_text(self.to_html(), encoding="utf-8")
        return Path(path)


def diff_runs(first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, str] = ("", "")) -> RunDiff:
    """Compare two documents of :func:`bitwright.report.read_run`.

    Args:
        first, second: documents.
        names: of the runs; their titles by default.

    Raises:
        ConfigError: they have no site in common, as runs of different models.
    """
    mine, other = ({site["name"]: site for site in run["sites"]} for run in (first, second))
    if mine and other and not mine.keys() & other.keys():
        raise ConfigError(
            "diff",
            f"the two runs have no quantizer site in common ({next(iter(mine))!r} and {next(iter(other))!r} are the first "
            "of each)",
            "compare two runs of one model, exported by the same front end",
        )
    called = tuple(given or run["title"] for given, run in zip(names, (first, second), strict=True))
    if called[0] == called[1]:
        called = (f"{called[0]} (first)", f"{called[1]} (second)")
    changes = [_site_change(name, mine.get(name), other.get(name)) for name in {**mine, **other}]
    found = tuple(change for change in changes if change is not None)
    measure, layers = _layers(first, second)
    return RunDiff(
        called[0], called[1], tuple(_numbers(first, second)), found, len(changes) - len(found), layers, measure
    )


def _site_change(name: str, one: Any, other: Any) -> SiteChange | None:
    if one is None or other is None:
        kind: Kind = "only in the second" if one is None else "only in the first"
        return SiteChange(name, kind, _described(one), _described(other))
    if bool(one.get("enabled")) != bool(other.get("enabled")):
        kind = "now quantized" if other.get("enabled") else "now in float"
        return SiteChange(name, kind, _described(one), _described(other))
    if not one.get("enabled"):
        return None
    if any(one.get(key) != other.get(key) for key in ("dtype", "bits")):
        return SiteChange(name, "format", _described(one), _described(other))
    if _same_range(one, other):
        return None
    return SiteChange(name, "range", _described(one), _described(other))


def _same_range(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one.get("digest") and other.get("digest"):
        return bool(one["digest"] == other["digest"])
    pairs = [(one.get("lsb"), other.get("lsb"))]
    pairs += [((one.get("grid") or {}).get(k), (other.get("grid") or {}).get(k)) for k in ("low", "high")]
    return all(a == b or (a is not None and b is not None and abs(a - b) <= _SAME * abs(a)) for a, b in pairs)


def _described(site: Any) -> str:
    if site is None:
        return ""
    if not site.get("enabled"):
        return "float"
    grid = site.get("grid") or {}
    shown = f" in {_short(grid['low'])} to {_short(grid['high'])}" if grid else ""
    return f"{site.get('dtype') or site.get('bits')}{shown}"


def _layers(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[str, tuple[LayerChange, ...]]:
    """The name of the first measure that both runs have for some layer, and the layers that differ by it."""
    others = {layer["name"]: layer for layer in second["layers"]}
    both = [(layer, others[layer["name"]]) for layer in first["layers"] if layer["name"] in others]
    for key, words in _MEASURES.items():
        known = list(_changes(both, key))
        if known:
            moved = [change for change in known if abs(change.change) >= _LEAST_DB]
            return words, tuple(sorted(moved, key=lambda change: -abs(change.change)))
    return "", ()


def _changes(both: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], measure: str) -> Iterator[LayerChange]:
    for layer, other in both:
        before, after = _level(layer, measure), _level(other, measure)
        if before is not None and after is not None:
            yield LayerChange(layer["name"], str(layer.get("op") or ""), before, after)


def _level(layer: Mapping[str, Any], key: str) -> float | None:
    if key != "cost_db":
        value = layer.get(key)
        return None if value is None else float(value)
    noise = layer.get("noise")
    return None if not noise else -10 * log10(float(noise))


def _numbers(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[NumberChange]:
    for name, read in (
        ("metric, float", lambda run: (run.get("metric") or {}).get("float")),
        ("metric, quantized", lambda run: (run.get("metric") or {}).get("quantized")),
        ("outputs, dB", lambda run: (run.get("output") or {}).get("sqnr_db")),
        ("parameters quantized, bytes", lambda run: (run.get("model") or {}).get("bytes_quantized")),
        ("files, bytes", lambda run: sum(file["size"] for file in run.get("files") or ()) or None),
        ("sites quantized", lambda run: sum(bool(site.get("enabled")) for site in run["sites"])),
        ("sites in float", lambda run: sum(not site.get("enabled") for site in run["sites"])),
    ):
        before, after = read(first), read(second)
        if before is not None or after is not None:
            yield NumberChange(name, before, after)


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
