"""Trained networks on a CPU without dot products: what saturated pairs cost, and what the repair brings back."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import numpy as np
import torch

from bitwright.core.simulation.float_model import sqnr
from tests.support.deployed import quantized
from tests.support.tasks import TASKS, Task, measured
from tests.support.without_vnni import run_without_vnni

HELP = """\
Quantize trained networks with quantize(model, data, recipe=["fold"], target="ort_cpu"), as it is and with
repair="saturation", and run the files in ONNX Runtime as a CPU without dot products does: in a process that hides VNNI and
AVX-512, or as it is where the CPU has none.

Columns: layers whose pairs saturate on calibration data, of those with 8-bit products; the metric of the float model, of the
simulation, of the file in a session with default settings and with exact sums (session.x64quantprecision=1), each with the
signal-to-noise ratio of its outputs to the simulation's on one batch of calibration data; the same of the repaired model in
a session with default settings; how many times as fast as the float file each of the three is (CPU time, batch 1, one thread,
medians of interleaved runs, quartiles). Needs Linux on an Intel CPU that can hide instructions (cpuid_fault) and a C
compiler, or a CPU without VNNI; and the developer data set.
"""
TITLE = "Pairs of products that saturate, in ONNX Runtime without VNNI"
COLUMNS = (
    "model", "front end", "guilty", "float", "simulated", "default", "dB", "exact sums", "dB", "repaired: simulated",
    "repaired", "dB", "times float: default", "exact sums", "repaired",
)  # fmt: skip
ROWS = (
    ("resnet20_aux", "torch"), ("mobilenet_v1_025", "torch"), ("mobilenet_v2_cifar", "torch"), ("mnist_cntk", "onnx"),
    ("mnist_pytorch", "onnx"), ("face_slim_320", "onnx"),
)  # fmt: skip
_WITHOUT = """
import json, time
import numpy as np
import torch
from pathlib import Path
from bitwright.runtimes.adapters import open_file
from bitwright.runtimes.timing import interleaved, ratio
from tests.support.deployed import first_output, in_onnxruntime
from tests.support.sessions import integer_session
from tests.support.tasks import TASKS
torch.set_num_threads(1)
task, folder = TASKS[sys.argv[1]](), Path(sys.argv[2])
runs = {"default": in_onnxruntime(folder / "model.onnx"), "exact": first_output(integer_session(folder / "model.onnx"))}
batch = task.batches(0)[0]
for name, run in runs.items():
    np.save(folder / f"{name}.npy", run(batch).numpy())
metrics = {name: task.score(run) for name, run in runs.items()}
runs["float"] = in_onnxruntime(folder / "model_float.onnx")
steps = {name: (lambda run=run: run(batch[:1])) for name, run in runs.items()}
times = interleaved(steps, seconds=4, clock=time.process_time)
speed = {name: str(ratio(times["float"], times[name])) for name in metrics}
print(json.dumps([metrics, speed]))
"""


def row(name: str, front_end: str) -> list[str]:
    """One row of the table."""
    task: Task = TASKS[name]()
    with tempfile.TemporaryDirectory() as kept:
        simulated, plain, _ = _metrics(name, front_end, task, Path(kept, "plain"))
        narrowed, repaired, result = _metrics(name, front_end, task, Path(kept, "repaired"), repair="saturation")
    metrics = [measured(name, task, front_end, "w8a8", "float"), simulated, *plain.default, *plain.exact]
    sums = result.repair.found
    guilty = f"{len(sums.guilty)} of {len(sums.layers)}"
    numbers = [f"{metric:.3f}" for metric in (*metrics, narrowed, *repaired.default)]
    return [name, front_end, guilty, *numbers, *plain.speed.values(), repaired.speed["default"]]


@dataclass(frozen=True)
class _Deployed:
    """``default``, ``exact``: metric and signal-to-noise ratio, in dB; ``speed``: times as fast as float, by session."""

    default: tuple[float, float]
    exact: tuple[float, float]
    speed: dict[str, str]


def _metrics(name: str, front_end: str, task: Task, folder: Path, **options: Any) -> tuple[float, _Deployed, Any]:
    """The metric of the simulation, what the file does without VNNI, and what ``quantize`` returned."""
    torch.manual_seed(0)
    simulation, result = quantized(name, front_end, task, folder, measure_speed=False, **options)
    metrics, speed = json.loads(run_without_vnni(_WITHOUT, folder, name, str(folder)).splitlines()[-1])
    wanted = simulation(task.batches(0)[0]).numpy()
    pairs = {kind: (metrics[kind], sqnr(wanted, np.load(folder / f"{kind}.npy"))) for kind in metrics}
    return task.score(simulation), _Deployed(**pairs, speed=speed), result


if __name__ == "__main__":
    measure.run_rows(TITLE, COLUMNS, ROWS, row, HELP)
