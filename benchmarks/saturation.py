"""Trained networks on a CPU without dot products: what saturated pairs cost, and what the repair brings back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import numpy as np
import torch

from bitwright.core.simulation.protocols import sqnr
from tests.support.deployed import in_onnxruntime, quantized
from tests.support.tasks import TASKS, Task, measured
from tests.support.without_vnni import run_without_vnni

HELP = """\
Quantize trained networks with quantize(model, data, recipe=["fold"], target="ort_cpu"), as it is and with
repair="saturation", and run both files in ONNX Runtime: on this CPU, and in a process that hides VNNI and AVX-512 from it,
so that it takes the kernels of CPUs without dot products.

Columns: layers whose pairs saturate on calibration data, of those with 8-bit products; the metric of the float model; of the
simulation, of the file with VNNI and of the file without it, with the signal-to-noise ratio of that file's outputs to the
simulation's on one batch of calibration data; the same of the repaired model. Needs Linux on an Intel CPU that can hide
instructions (cpuid_fault), a C compiler and the developer data set.
"""
TITLE = "Pairs of products that saturate, in ONNX Runtime without VNNI"
COLUMNS = (
    "model", "front end", "guilty", "float", "simulated", "with VNNI", "without", "dB", "repaired: simulated",
    "repaired: with VNNI", "repaired: without", "repaired: dB",
)  # fmt: skip
ROWS = (
    ("resnet20_aux", "torch"), ("mobilenet_v1_025", "torch"), ("mobilenet_v2_cifar", "torch"), ("mnist_cntk", "onnx"),
    ("mnist_pytorch", "onnx"), ("face_slim_320", "onnx"),
)  # fmt: skip
_WITHOUT = """
import numpy as np
import torch
from pathlib import Path
from tests.support.deployed import in_onnxruntime
from tests.support.tasks import TASKS
torch.set_num_threads(1)
task, run = TASKS[sys.argv[2]](), in_onnxruntime(Path(sys.argv[3]))
np.save(sys.argv[4], run(task.batches(0)[0]).numpy())
print(task.score(run))
"""


def row(name: str, front_end: str) -> list[str]:
    """One row of the table."""
    task: Task = TASKS[name]()
    with tempfile.TemporaryDirectory() as kept:
        plain, _ = _metrics(name, front_end, task, Path(kept, "plain"))
        repaired, result = _metrics(name, front_end, task, Path(kept, "repaired"), repair="saturation")
    found = [measured(name, task, front_end, "w8a8", "float"), *plain, *repaired]
    sums = result.repair.found
    guilty = f"{len(sums.guilty)} of {len(sums.layers)}"
    return [name, front_end, guilty, *(f"{metric:.3f}" for metric in found)]


def _metrics(name: str, front_end: str, task: Task, folder: Path, **options: Any) -> tuple[list[float], Any]:
    """The metric of the simulation, of the file here and of the file without VNNI; what ``quantize`` returned."""
    torch.manual_seed(0)
    simulation, result = quantized(name, front_end, task, folder, **options)
    file, outputs = folder / "model.onnx", folder / "outputs.npy"
    printed = run_without_vnni(_WITHOUT, folder, name, str(file), str(outputs))
    noise = sqnr(simulation(task.batches(0)[0]).numpy(), np.load(outputs))
    metrics = [task.score(simulation), task.score(in_onnxruntime(file)), float(printed.split()[-1])]
    return [*metrics, noise], result


if __name__ == "__main__":
    measure.run_rows(TITLE, COLUMNS, ROWS, row, HELP)
