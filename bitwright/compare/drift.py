"""Find the first operator at which two executions of a model differ, the growth of the difference with depth, and its cause."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.causes import Doubt, close, diagnose, in_context, settled
from bitwright.compare.lockstep import Lockstep
from bitwright.compare.points import Pair
from bitwright.compare.report import DriftReport, DriftRow, Finding, Retry
from bitwright.compare.sides import Side, check_feeds, open_sides, sample_inputs, sides_in_memory
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ConfigError, ExportError, checks_arguments
from bitwright.export.artefacts import Samples
from bitwright.export.files.onnx_file import checked_on_failure

Array = NDArray[Any]
Feeds = Mapping[str, Array]


@checks_arguments
def drift(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    data: Feeds | None = None,
    *,
    prefix: str | None = None,
    diagnoses: int = 3,
) -> DriftReport:
    """Compare any two of: the float model, its simulation, the exported file, the file in a runtime.

    Args:
        a, b: a folder that an export wrote, or an ONNX file, followed by what is executed: ``exported@float``,
            ``exported@simulation``, ``exported@file`` (float kernels, every quantizer as it stands), ``exported@onnxruntime``,
            ``exported@openvino``, ``exported@litert`` or ``exported/net.tflite`` (converted part by part), or a target that is
            not here: ``exported@cmsis_nn``, ``exported@mine.toml``. Without ``@`` a folder is its file, and a word alone is about
            the path of the other one.
        data: one input by name; by default what the export keeps with its samples, and the simulation knows no other.
        prefix: stem of the files; needed only where a folder holds several exports.
        diagnoses: of so many tensors, the first that differ on their own, the cause is looked for; those where both round
            the same value differently are counted apart.

    Returns:
        One row per tensor that both have: how the operators in front of it differ on their own, fed the same, and how the two
        differ there when each is run from the input on; and causes, each confirmed by a run without it.

    Raises:
        ConfigError: a side is not known, both are the same, or a runtime is not installed.
        ExportError: a file is missing or cannot be read; the data is of another model; the runtime refuses the file; the two
            models have no tensor in common.
    """
    sides = open_sides(a, b, prefix)
    first, second = sorted(sides, key=lambda side: side.rank)
    feeds = _feeds(first, second, data)
    with (
        checked_on_failure(first.model, first.label, ExportError),
        checked_on_failure(second.model, second.label, ExportError),
    ):
        return compare_sides(first, second, feeds, diagnoses=diagnoses)


def drift_models(
    a: str, b: str, float_model: ir.Model, file_model: ir.Model, samples: Samples, *, diagnoses: int = 3
) -> DriftReport:
    """:func:`drift` of an export that lies in memory; ``a`` and ``b`` are words.

    Args:
        a, b: ``float``, ``simulation``, ``file``, a runtime or a profile.
        float_model, file_model: what an export writes.
        samples: what the simulation computed, and on which input.
        diagnoses: see :func:`drift`.

    Raises: as :func:`drift`.
    """
    sides = sides_in_memory((a, b), float_model, file_model, samples)
    first, second = sorted(sides, key=lambda side: side.rank)
    return compare_sides(first, second, samples.inputs, diagnoses=diagnoses)


def _feeds(first: Side, second: Side, data: Feeds | None) -> Feeds:
    if data is None:
        found = sample_inputs(second) or sample_inputs(first)
        if found is None:
            raise ExportError(
                second.label, "there is nothing to run it on: no samples lie beside it", "give data, or --data FILE"
            )
        return found
    if first.how == "simulation":
        raise ConfigError(
            "data",
            f"{first.label} keeps what the simulation computed on its own samples, and on nothing else",
            "leave the data out, compare with @file instead of @simulation, or call sim.drift(..., data)",
        )
    return data


def compare_sides(a: Side, b: Side, feeds: Feeds, *, diagnoses: int = 3) -> DriftReport:
    """:func:`drift` of two sides that are open; ``a`` is the one nearer to what was trained."""
    ours = feeds if a.how == "simulation" else check_feeds(a, feeds)
    both = Lockstep(a, b, ours, check_feeds(b, feeds))
    if not both.pairs:
        raise ExportError(
            f"{a.label} and {b.label}",
            "they have no tensor of the same name, so that nothing can be compared",
            "compare the float model and the file of one export, or files made from the same model",
        )
    rows = {pair: _row(both, pair) for pair in both.pairs}
    parted = [pair for pair, row in rows.items() if not row.own.ok]
    findings, notes = _findings(both, parted, diagnoses)
    known = {found.name for found in findings}
    findings += [found for found in in_context(both, diagnoses) if found.name not in known]
    order = {row.name: place for place, row in enumerate(rows.values())}
    findings.sort(key=lambda found: order[found.name])
    return DriftReport(a.label, b.label, tuple(rows.values()), tuple(findings or _carried(rows, a)), tuple(notes))


def _findings(both: Lockstep, parted: list[Pair], most: int) -> tuple[list[Finding], list[str]]:
    """Causes at the first ``most`` tensors that differ, and at as many that only round differently; a note on the others."""
    found: dict[bool, list[Finding]] = {True: [], False: []}
    left = {True: 0, False: 0}
    ordered: list[Finding] = []
    for pair in parted:
        doubt = Doubt(both, pair)
        harmless = settled(doubt)
        kind = isinstance(harmless, Finding)
        if len(found[kind]) == most:
            left[kind] += 1
            continue
        found[kind].append(harmless if isinstance(harmless, Finding) else diagnose(doubt, harmless))
        ordered.append(found[kind][-1])
    texts = {False: "more tensors differ on their own", True: "more tensors round differently"}
    return ordered, [f"{left[kind]} {text}" for kind, text in texts.items() if left[kind]]


def _row(both: Lockstep, pair: Pair) -> DriftRow:
    own = both.agreement(pair, both.own_a[pair], both.own_b[pair])
    carried = both.agreement(pair, both.fed[pair], both.free_b[pair])
    level = sqnr(both.free_a[pair], both.free_b[pair])
    return DriftRow(pair.name, tuple(both.places[pair].piece.ops), both.kernels[pair], own, carried, level)


def _carried(rows: Mapping[Pair, DriftRow], a: Side) -> list[Finding]:
    """Finding where every operator agrees given equal inputs and the executions still differ."""
    for row in rows.values():
        if not close(row.carried):
            retry = Retry("rounding", "fed what the other one has in front of it", row.carried, row.own, True)
            what = (
                "inputs, weights and values are rounded to their grids"
                if a.how == "float"
                else "values on a border between two codes round differently"
            )
            text = f"every operator agrees when it is fed the same with the same parameters: {what}, and that is carried on"
            return [Finding(row.name, row.ops, "rounding", text, "", (retry,))]
    return []
