"""Milliseconds of every layer at every candidate, measured in ONNX Runtime on this machine: the cost ``ms``."""

from __future__ import annotations

import contextlib
import json
import platform
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bitwright.analysis.subject.subject import Subject, open_subject
from bitwright.core.files.documents import read_document
from bitwright.core.graph.graph import Graph
from bitwright.core.numerics.spec import Preset
from bitwright.errors import ConfigError, checks_arguments
from bitwright.export.files.atomic import atomic_write
from bitwright.export.files.manifest import fingerprint
from bitwright.mixed.choosing.costs import TIMES_FORMAT
from bitwright.mixed.precisions.candidates import Candidate, as_candidates, highest
from bitwright.mixed.precisions.groups import find_groups, planned_bits, without
from bitwright.mixed.precisions.library import Library
from bitwright.mixed.precisions.start import simulation_of
from bitwright.runtimes.layers import LayerTimes, layer_times


@checks_arguments
def measure_times(
    model: Any,
    data: Iterable[Any],
    candidates: str | Preset | Iterable[Any] = ("w8a8", "w8a16", "w4a8", "w4a16"),
    *,
    path: str | Path | None = None,
    config_file: Any = None,
    rounds: int = 15,
) -> dict[str, Any]:
    """Measure what every layer takes at every candidate, for ``mixed_precision(..., cost="ms", times=...)``.

    Each candidate is exported for all layers and run in ONNX Runtime with one thread, in turns, on the first batch; the least of
    the rounds counts.

    Args:
        model: an ONNX model (a path, a proto) or a calibrated simulation of one; left as it is.
        data: batches; the first one is what is timed.
        candidates: as for :func:`bitwright.mixed_precision`.
        path: a JSON file: read if it holds times of this model, these candidates and this machine, else written.
        config_file: rules for a model that is given.
        rounds: runs of every file.

    Returns:
        Plain data: ``layers`` and ``conversions`` (layer -> candidate -> milliseconds), ``fixed`` milliseconds, and what they
        belong to.

    Raises:
        ConfigError: a module of PyTorch, whose layers have other names in its file; or a file of something else at ``path``.
    """
    batches, wanted = list(data), as_candidates(candidates)
    sim = simulation_of(model, batches, wanted[highest(wanted)], config_file)
    subject = open_subject(sim)
    if subject.front_end != "onnx":
        raise ConfigError(
            "measure_times",
            "layers of a module have other names in its exported file",
            "export the module to ONNX and pass that file here and to the search, or write a table of times yourself",
        )
    mine = _identity(sim, wanted)
    if path is not None and Path(path).exists():
        return _kept(Path(path), mine)
    restore = subject.remember(parameters=True)
    try:
        with subject.exclusive():
            found = _measured(subject, wanted, batches, rounds)
    finally:
        restore()
    times = {"format": TIMES_FORMAT, "version": 1, "of": mine, **_plain(found)}
    if path is not None:
        with atomic_write(Path(path)) as temporary:
            temporary.write_text(json.dumps(times, indent=1), encoding="utf-8")
    return times


def _measured(
    subject: Subject, candidates: tuple[Candidate, ...], batches: list[Any], rounds: int
) -> dict[str, LayerTimes]:
    from bitwright.onnx.model.data import as_feeds

    sim = subject.sim
    groups = find_groups(sim, candidates, sim.rules.allowed_kernels, tied=True)
    library = Library(subject, groups, candidates, planned_bits(sim), batches, rounding=False)
    groups = without(groups, library.refused, candidates)
    best = highest(candidates)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(library.restore)
        files = {}
        for c, candidate in enumerate(candidates):
            able = [c if c in g.candidates else best if best in g.candidates else g.candidates[-1] for g in groups]
            library.apply(able)
            files[candidate.name] = sim.export(Path(folder, str(c)), "timed", samples=False).qdq
        layers = {layer for group in groups for layer in group.layers}
        return layer_times(files, dict(as_feeds(batches[0], sim.specs)), layers, rounds=rounds)


def _plain(found: Mapping[str, LayerTimes]) -> dict[str, Any]:
    names = next(iter(found.values())).layers
    return {
        "layers": {layer: {c: times.layers[layer] for c, times in found.items()} for layer in names},
        "conversions": {layer: {c: times.conversions[layer] for c, times in found.items()} for layer in names},
        "fixed": min(times.rest for times in found.values()),
        "whole": {c: times.whole for c, times in found.items()},
    }


def _identity(sim: Any, candidates: Iterable[Candidate]) -> dict[str, Any]:
    """What times belong to."""
    graph: Graph = sim.graph
    shapes = [[op.name, op.type, *(str(graph.values[v].shape) for v in op.outputs)] for op in graph.ops]
    return {
        "graph": fingerprint([json.dumps(shapes)]),
        "candidates": [c.name for c in candidates],
        "runtime": f"onnxruntime {version('onnxruntime')}",
        "machine": f"{platform.machine()} {platform.node()}",
    }


def _kept(path: Path, mine: Mapping[str, Any]) -> dict[str, Any]:
    """Times that were measured before."""
    remedy = "remove it to measure again, or name another file"
    found = read_document(path, ConfigError, remedy=remedy)
    if not isinstance(found, dict) or found.get("format") != TIMES_FORMAT:
        raise ConfigError(str(path), "it holds no times that were measured", remedy)
    theirs = found.get("of", {})
    for key, value in mine.items():
        if theirs.get(key) != value:
            raise ConfigError(
                str(path), f"its times are of another {key}: {theirs.get(key)}, and here it is {value}", remedy
            )
    return found
