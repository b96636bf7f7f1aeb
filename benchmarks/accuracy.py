"""What recipes of post-training methods do to the accuracy of trained networks, in PyTorch and as ONNX.

    python benchmarks/accuracy.py --results accuracy.jsonl                 # everything, some hours on one core
    python benchmarks/accuracy.py --results accuracy.jsonl --models resnet20_aux --front-ends torch --seeds 0
    python benchmarks/accuracy.py --results accuracy.jsonl --only-table --markdown table.md

Every number is appended to the results file when it is there, and not measured again: an interrupted run goes on where
it stopped, and several runs may share the file. A seed draws the calibration samples and seeds the methods that learn.
Needs the developer data set (see tests/support/data.py).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path

from bitwright.core.numerics.spec import Preset, activation_spec, find_preset, weight_spec
from tests.support.tasks import TASKS, Task, measured

CONVOLUTIONAL = ("mobilenet_v2_cifar", "mobilenet_v1_025", "resnet20_aux")
LANGUAGE = ("stories260k", "lstm_char")
FILES = ("mnist_cntk", "mnist_pytorch", "face_slim_320")
DECODER = ("stories260k",)
PRESETS: dict[str, Preset] = {"w3a16": Preset(weight_spec("int3"), activation_spec("uint16"))}
#: of the methods that learn; blocks take whole samples and gain little from more
ITERATIONS = {"adaround": 500, "brecq": 200, "qdrop": 200, "flexround": 200}
# networks, preset, recipes; "default" is the one of quantize(model, data)
ROWS: list[tuple[Sequence[str], str, Sequence[str]]] = [
    ((*CONVOLUTIONAL, *FILES), "w8a8_per_tensor", ["fold", "equalize", "equalize bias_correction", "equalize gptq"]),
    ((*CONVOLUTIONAL, *FILES), "w8a8", ["fold", "default"]),
    (LANGUAGE, "w8a8", ["fold", "default"]),
    (DECODER, "w8a8", ["smooth", "rotate", "layer_inputs", "rotate smooth layer_inputs"]),
    (CONVOLUTIONAL, "w4a8", ["fold", "fold bias_correction", "fold seq_mse", "fold gptq", "fold adaround"]),
    (CONVOLUTIONAL, "w4a8", ["fold brecq", "fold seq_mse adaround", "fold seq_mse brecq"]),
    (LANGUAGE, "w4a16", ["fold", "seq_mse", "gptq", "seq_mse gptq", "adaround", "seq_mse brecq"]),
    (DECODER, "w4a16", ["awq", "awq seq_mse", "awq seq_mse gptq"]),
    (LANGUAGE, "w3a16", ["fold", "seq_mse", "gptq", "seq_mse gptq", "seq_mse adaround", "seq_mse brecq"]),
    (DECODER, "w3a16", ["awq", "awq seq_mse", "awq seq_mse gptq"]),
    (("resnet20_aux",), "w4a8", ["fold qdrop", "fold flexround"]),
]
FRONT_ENDS = ("torch", "onnx")


@dataclass(frozen=True, order=True)
class Cell:
    """One number of the table."""

    seed: int
    front_end: str
    network: str
    preset: str
    recipe: str


def cells(models: Sequence[str], front_ends: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """What is to be measured, quick ones first; the float model is the recipe ``float``."""
    rows = [(name, "", "float") for name in TASKS]
    rows += [(name, preset, recipe) for names, preset, recipes in ROWS for name in names for recipe in recipes]
    found = [
        Cell(seed, end, *row)
        for seed in seeds
        for end in front_ends
        for row in rows
        if row[0] in models and not (end == "torch" and row[0] in FILES) and not (seed and row[2] == "float")
    ]
    return sorted(found, key=lambda cell: not ITERATIONS.keys().isdisjoint(cell.recipe.split()))


def steps(recipe: str, seed: int) -> list[str | dict[str, Any]] | None:
    """The recipe as ``quantize`` takes it."""
    if recipe == "default":
        return None
    return [
        {name: {"iterations": ITERATIONS[name], "seed": seed}} if name in ITERATIONS else name
        for name in recipe.split()
    ]


def value(cell: Cell, task: Task) -> float:
    """Measure one cell."""
    preset = PRESETS.get(cell.preset) or find_preset(cell.preset or "w8a8")
    recipe = "float" if cell.recipe == "float" else steps(cell.recipe, cell.seed)
    return measured(cell.network, task, cell.front_end, preset, recipe, cell.seed)


def read(path: Path) -> dict[Cell, float]:
    """The numbers of a results file."""
    return {Cell(**row["cell"]): row["value"] for row in measure.read_rows(path)}


def append(path: Path, cell: Cell, number: float, seconds: float) -> None:
    """Add a number to a results file; several processes may."""
    line = json.dumps({"cell": cell.__dict__, "value": number, "seconds": round(seconds, 1)}) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def table(found: dict[Cell, float]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: mean over the seeds, and the extremes where they differ."""
    numbers: dict[tuple[str, ...], list[float]] = {}
    for cell, number in found.items():
        numbers.setdefault((cell.network, cell.preset, cell.recipe, cell.front_end), []).append(number)
    rows = []
    for cell in cells(list(TASKS), ("onnx",), (0,)):
        network, preset, recipe = cell.network, cell.preset, cell.recipe
        places = 3 if network in LANGUAGE else 2
        texts = [_spread(numbers.get((network, preset, recipe, end), []), places) for end in FRONT_ENDS]
        if any(texts):
            rows.append([network, preset, recipe, *texts])
    return ["network", "preset", "recipe", *FRONT_ENDS], sorted(rows, key=lambda row: list(TASKS).index(row[0]))


def _spread(numbers: Sequence[float], places: int) -> str:
    if not numbers:
        return ""
    mean, low, high = (f"{f(numbers):.{places}f}" for f in (statistics.fmean, min, max))
    return mean if low == high else f"{mean} ({low} to {high})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file of the numbers, one line each")
    parser.add_argument("--models", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--front-ends", nargs="+", choices=FRONT_ENDS, default=FRONT_ENDS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only-table", action="store_true", help="measure nothing")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    known: dict[str, Task] = {}
    for cell in [] if options.only_table else cells(options.models, options.front_ends, options.seeds):
        if cell in read(options.results):
            continue
        task = known.setdefault(cell.network, TASKS[cell.network]())
        start = time.perf_counter()
        number = value(cell, task)
        append(options.results, cell, number, time.perf_counter() - start)
        print(*cell.__dict__.values(), f"{number:.4f}", sep="\t", file=sys.stderr, flush=True)
    columns, rows = table(read(options.results))
    title = "Accuracy after post-training methods: mean over the seeds measured, and the extremes where they differ"
    measure.show(title, columns, rows)
    measure.save(None, options.markdown, title, columns, rows, None)


if __name__ == "__main__":
    main()
