"""Seconds of what is done once per model: creation, folding, equalization, export; one thread, one command."""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import torch
from torch_speed import SUBJECTS, Bench, Settings

from bitwright.torch import QuantizationSimModel, equalize_model, fold_all_batch_norms
from bitwright.torch.simulation.export import marked_onnx
from tests.support.zoo import chain, chain_input

HELP = """\
CPU seconds of creating a simulation, folding batch norms, cross-layer equalization and export: least and median over the
rounds, in each of which every row runs once. What bounds the others is measured with them:

  float forward     of the model with its batch norms: folding needs two of it, to record the model and to compare its
                    outputs; equalization three, for it records what the folds have made of the model
  copy.deepcopy     of the model that a simulation is made of, which it copies
  float export      of the folded model by torch.onnx.export, which an export calls too
  marked export     what the exporters of torch take of an export, for the model with a node at every quantizer
"""
EXAMPLES = """\
examples:
  python benchmarks/preparation.py
  python benchmarks/preparation.py --models chain --rounds 3
  python benchmarks/preparation.py --rows creation folding --markdown benchmarks/results/preparation.md
"""
ROWS = (
    *("float forward", "copy.deepcopy", "creation", "folding", "equalization"),
    *("float export", "marked export", "export"),
)
MODELS = ("resnet18", "mobilenet_v2", "chain")
Steps = dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]  # row -> what is not timed, and what is done with it


def steps_of(name: str, rows: Sequence[str]) -> Steps:
    """What is timed of a model; work that a row needs and does not time is done here."""
    model, x, folded = _chain() if name == "chain" else _subject(name)

    def forward(_: Any) -> None:
        with torch.no_grad():
            model(x)

    def own() -> Any:
        return copy.deepcopy(model)

    found: Steps = {
        "float forward": (_nothing, forward),
        "copy.deepcopy": (_nothing, lambda _: copy.deepcopy(folded)),
        "creation": (_nothing, lambda _: QuantizationSimModel(folded, x)),
        "folding": (own, lambda model: fold_all_batch_norms(model, dummy_input=x)),
        "equalization": (own, lambda model: equalize_model(model, dummy_input=x)),
    }
    if "export" in rows and name != "chain":
        sim = QuantizationSimModel(folded, x)
        sim.compute_encodings([x], progress=False)
        found["float export"] = (_nothing, lambda _: _float_export(folded, x))
        found["marked export"] = (_nothing, lambda _: marked_onnx(sim, x))
        found["export"] = (_nothing, lambda _: _export(sim))
    skipped = ("equalization",) if name == "chain" else ()
    return {row: found[row] for row in rows if row in found and row not in skipped}


def _nothing() -> None:
    return None


def _chain() -> tuple[Any, Any, Any]:
    model = chain(1000, False)
    return model, chain_input(), model


def _subject(name: str) -> tuple[Any, Any, Any]:
    assert name in SUBJECTS
    bench = Bench(name, Settings(False, True, 1, 1))
    return bench.original, bench.x, bench.model


def _float_export(model: Any, x: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), str(Path(folder, "model.onnx")), dynamo=True, verbose=False)


def _export(sim: QuantizationSimModel) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sim.export(folder, "model")


def times(steps: Steps, rounds: int) -> dict[str, list[float]]:
    """Seconds of every step, all of them once per round; one unmeasured round first."""
    found: dict[str, list[float]] = {row: [] for row in steps}
    for i in range(rounds + 1):
        for row, (prepare, step) in steps.items():
            taken = measure.seconds(partial(step, prepare()))
            if i:
                found[row].append(taken)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the files asked for."""
    parser = argparse.ArgumentParser(
        description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--rounds", type=int, default=7, help="of which least and median are shown (7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1:
        parser.error(f"--rounds is {chosen.rounds}; it must be at least 1")
    found = {}
    for name in chosen.models:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = times(steps_of(name, chosen.rows), chosen.rounds)
    title = f"Seconds before a simulation runs (CPU time, least and median of {chosen.rounds}, one thread)"
    columns = ["", *chosen.models]
    rows = [[row, *(_cell(found[name].get(row)) for name in chosen.models)] for row in chosen.rows]
    measure.show(title, columns, rows)
    measure.save(chosen.json, chosen.markdown, title, columns, rows, found)
    return 0


def _cell(taken: Sequence[float] | None) -> str:
    return "" if not taken else f"{min(taken):.2f}, {statistics.median(taken):.2f} s"


if __name__ == "__main__":
    sys.exit(main())
