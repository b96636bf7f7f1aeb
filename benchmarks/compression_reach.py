"""Dependency graphs of architectures that nobody here wrote: 30 % of the units of every group removed, checked.

    python benchmarks/compression_reach.py                  every architecture, one process each; results are kept
    python benchmarks/compression_reach.py --only 'Llama*' --fresh
    python benchmarks/compression_reach.py --onnx           the same of ONNX files
    python benchmarks/compression_reach.py --markdown       writes benchmarks/results/compression_reach.md

Each model has random weights. ``checked_dependencies`` finds its groups; then 30 % of the units of each (at least one) are
removed, after the outputs of the whole model with these units at zero were noted. A row says how many groups there are, the
parameters that are left, the largest difference of an output in parts of its largest number, and how many layers were refused.
Needs the extras ``reach``; architectures whose package cannot be imported have no row. With ``--onnx`` each model is exported
by ``torch.onnx`` first, and the file is pruned; rows of the developer data set's files are added.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import ROOT, machine  # puts the repository on the path and fixes one thread
from reach_models import ARCHITECTURES, Architecture

from bitwright.compression.checks import checked_dependencies, masked_outputs
from bitwright.compression.costs import size_costs
from bitwright.compression.prune import apply
from bitwright.methods.front_end import front_end_of
from bitwright.torch.simulation.export import export_float
from tests.support import data
from tests.support.cases import vary_norms_and_biases

RESULTS, STATE = ROOT / "benchmarks" / "results" / "compression_reach.md", ROOT / "build" / "compression_reach"
RESULTS_ONNX = RESULTS.with_name("compression_reach_onnx.md")
PART = 0.3
LIMIT = 240.0  # seconds an architecture may take


def _feeds(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs of an ONNX file of the developer data set."""
    rng = np.random.default_rng(0)
    shapes = {"face_slim_320": ("input", (1, 3, 240, 320)), "mnist_cntk": ("Input3", (1, 1, 28, 28)),
              "mnist_pytorch": ("0", (1, 1, 28, 28)), "resnet20_aux": ("input", (2, 3, 32, 32))}  # fmt: skip
    if name == "lstm_char":
        return {"tokens": rng.integers(0, 65, (2, 16))}
    key, shape = shapes[name]
    return {key: rng.normal(size=shape).astype(np.float32)}


FILES = ("face_slim_320", "mnist_cntk", "mnist_pytorch", "resnet20_aux", "lstm_char")


def exported(row: Architecture, folder: str) -> tuple[str, dict[str, np.ndarray[Any, Any]]]:
    """An architecture as a file, and inputs by name."""
    torch.manual_seed(0)
    model = row.build().float()
    if hasattr(model, "config"):
        model.config.use_cache = False
    vary_norms_and_biases(model)
    path = Path(folder, "model.onnx")
    return str(path), export_float(model, row.batch(0), path)


def measured(row: Architecture) -> dict[str, Any]:
    """What became of one architecture as a module."""
    torch.manual_seed(0)
    model = row.build().float()
    vary_norms_and_biases(model)
    return pruned(model, row.batch(0))


def measured_file(row: Architecture | str) -> dict[str, Any]:
    """What became of one architecture as a file."""
    if isinstance(row, str):
        return pruned(str(data.onnx_file(row)), _feeds(row))
    with tempfile.TemporaryDirectory() as folder:
        try:
            path, feeds = exported(row, folder)
        except Exception as error:  # of the exporter: no row
            return {"no_export": f"{type(error).__name__}: {error}"[:300]}
        return pruned(path, feeds)


def pruned(model: Any, batch: Any) -> dict[str, Any]:
    """The groups of a model, and what it computes after 30 % of each are gone."""
    start = time.perf_counter()
    structure = front_end_of(model).structured(model, batch, None)
    before = size_costs(structure.graph())
    found = checked_dependencies(structure, batch)
    kinds = Counter(group.kind for group in found.groups)
    reasons = [str(r) for r in found.refused]
    result: dict[str, Any] = {
        "groups": len(found.groups),
        "kinds": dict(kinds),
        "refused": len(reasons),
        "reasons": reasons,
    }
    if found.groups:
        removed = {g.name: np.arange(max(1, int(PART * g.units))) for g in found.groups}
        masked = masked_outputs(structure, found.groups, removed, batch)
        apply(structure, found, removed, batch)
        after = structure.outputs(batch)
        result["shapes"] = [a.shape == b.shape for a, b in zip(masked, after, strict=True)].count(False) == 0
        result["noise"] = max(
            (float(np.abs(a - b).max(initial=0)) / max(float(np.abs(a).max(initial=0)), 1e-9)
             for a, b in zip(masked, after, strict=True) if np.issubdtype(a.dtype, np.floating) and a.shape == b.shape),
            default=0.0,
        )  # fmt: skip
        result["params"] = size_costs(structure.graph())["params"] / before["params"]
    result["seconds"] = round(time.perf_counter() - start, 1)
    return result


def _name(row: Architecture | str) -> str:
    return row if isinstance(row, str) else row.name


def _file(row: Architecture | str, onnx: bool) -> Path:
    return (STATE / "onnx" if onnx else STATE) / f"{_name(row)}.json"


def _work(row: Architecture | str, onnx: bool) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        found = measured_file(row) if onnx or isinstance(row, str) else measured(row)
    except Exception as error:  # the row says so
        found = {"error": f"{type(error).__name__}: {error}"[:600], "trace": traceback.format_exc()[-1500:]}
    _file(row, onnx).write_text(json.dumps(found))


def run(only: str, fresh: bool, onnx: bool) -> None:
    """Every architecture in a process of its own; what all of them need is imported once."""
    for package in (
        "bitwright.torch.opened",
        "transformers.modeling_utils",
        "transformers.generation",
        "torch._dynamo",
    ):
        importlib.import_module(package)
    (STATE / "onnx").mkdir(parents=True, exist_ok=True)
    for row in (*FILES, *ARCHITECTURES) if onnx else ARCHITECTURES:
        file = _file(row, onnx)
        if not fnmatch.fnmatch(_name(row), only) or (file.exists() and not fresh):
            continue
        process = multiprocessing.get_context("fork").Process(target=_work, args=(row, onnx))
        process.start()
        process.join(LIMIT * (3 if onnx else 1))  # the export takes most of it
        if process.is_alive():
            process.kill()
            file.write_text(json.dumps({"error": f"more than {LIMIT * (3 if onnx else 1):g} s"}))
        found = (
            json.loads(file.read_text()) if file.exists() else {"error": f"the process ended with {process.exitcode}"}
        )
        shown = {k: v for k, v in found.items() if k not in ("reasons", "trace")}
        print(_name(row), shown, flush=True)


def markdown(onnx: bool) -> None:
    """Write the table."""
    every = (*FILES, *ARCHITECTURES) if onnx else ARCHITECTURES
    rows = {_name(r): json.loads(f.read_text()) for r in every if (f := _file(r, onnx)).exists()}
    rows = {n: r for n, r in rows.items() if "ModuleNotFoundError" not in r.get("error", r.get("no_export", ""))}
    unexported = [name for name, r in rows.items() if "no_export" in r]
    rows = {name: r for name, r in rows.items() if "no_export" not in r}
    done = [r for r in rows.values() if r.get("groups")]
    where = ", ".join(f"{k}: {v}" for k, v in machine().items())
    command = f"`python benchmarks/compression_reach.py{' --onnx' * onnx}`"
    lines = [
        f"# Dependency graphs of {'ONNX files' if onnx else 'architectures'}", "",
        f"{command}, {where}. {PART:.0%} of the units of every group removed from models",
        "with random weights; *noise* is the largest difference of an output from the whole model with these units at zero, in",
        "parts of the largest number of the output. A refused layer keeps its channels, and the report says why.", "",
        f"{len(rows)} {'files' if onnx else 'architectures'}: {len(done)} pruned with the right shapes and outputs, "
        f"{sum('groups' in r and not r['groups'] for r in rows.values())} refused as a whole, "
        f"{sum('error' in r for r in rows.values())} failed.", "",
        *([f"Not exported by `torch.onnx`: {', '.join(unexported)}.", ""] if unexported else []),
        f"| {'file' if onnx else 'architecture'} | groups | refused layers | parameters left | noise |", "|---|---|--:|--:|--:|",
    ]  # fmt: skip
    for name, r in rows.items():
        if "error" in r:
            lines.append(f"| {name} | failed: {r['error'].splitlines()[0][:90]} | | | |")
            continue
        kinds = (
            ", ".join(f"{n} {kind}" for kind, n in r["kinds"].items())
            or f"none: {r['reasons'][0][:80] if r['reasons'] else ''}"
        )
        left = f"{r['params']:.0%}" if "params" in r else ""
        noise = f"{r['noise']:.0e}" if "noise" in r else ""
        lines.append(f"| {name} | {kinds} | {r['refused']} | {left} | {noise} |")
    (RESULTS_ONNX if onnx else RESULTS).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--onnx", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(ROOT))
    run(given.only, given.fresh, given.onnx)
    if given.markdown:
        markdown(given.onnx)
