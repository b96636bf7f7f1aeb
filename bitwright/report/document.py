"""The document of a report: one dictionary of plain data, whatever it was made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bitwright.errors import ConfigError

FORMAT, VERSION = "bitwright-report", 1
ANALYSIS = "bitwright-analysis"
Document = dict[str, Any]

#: what a document has beside its sites and layers, each ``None`` where it is not known
SECTIONS = ("model", "data", "mode", "metric", "output", "coverage", "recipe", "health", "verification", "pareto")
_LISTS = ("sites", "layers", "groups", "remedies", "notes", "files")
_LINKS = ("inputs", "sites")  # of a layer; an analysis does not know operators that it did not measure


def report_document(
    analysis: Any = None,
    *,
    title: str = "",
    network: Mapping[str, Any] | None = None,
    coverage: Any = None,
    recipe: Any = None,
    health: Any = None,
    verification: Any = None,
    pareto: Any = None,
    measured: Mapping[str, float] | None = None,
    files: Sequence[Mapping[str, Any]] = (),
    notes: Iterable[str] = (),
) -> Document:
    """What a report shows, from the parts that there are.

    Args:
        analysis: what ``Analysis.to_dict()`` returns, or an object that has it; or a document, to which parts are added.
        title: heading of the report; by default the model's name.
        network: ``{"layers": [...], "sites": [...], "model": {...}}`` with the columns of an analysis, in execution order
            (:func:`bitwright.report.of_simulation.network_of`); what ``analysis`` says of the same names is added.
        coverage, recipe, health, verification: reports, or their dictionaries.
        pareto: a result of ``mixed_precision``, or ``{"x": label, "y": label, "points": [{"x", "y", "label", "chosen"}]}``.
        measured: ``{"float", "quantized"}``, a metric without interval, shown where the analysis has none.
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
    document |= {"pareto": pareto_of(dictionary_of(pareto) or {})} if pareto is not None else {}
    if measured and "quantized" in measured and document["metric"] is None:
        document["metric"] = {"name": "metric", "better": None, "difference": None, **measured}
    document["files"] += [dict(file) for file in files]
    document["notes"] += list(notes)
    return document


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
    """``layers`` so that inputs come first, otherwise as they stand; a loop is entered at its first layer."""
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
    """Place what is on the stack, and then what has waited for it alone."""
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
