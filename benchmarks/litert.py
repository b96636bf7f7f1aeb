"""Trained networks as LiteRT files: layers against the simulation, and the metric in the interpreter."""

from __future__ import annotations

import tempfile
from pathlib import Path

import measure  # first of ours: it puts the repository on the path
import torch

from bitwright.compare.verify import verify_folder
from tests.support.deployed import in_litert, quantized
from tests.support.tasks import TASKS, Task, measured

HELP = """\
Quantize trained networks with quantize(model, data, recipe=["fold"], target="litert"), and run the .tflite file.

Columns: layers that verify compares, and how many of them integer kernels compute; the lowest share of codes over layers,
each fed the simulation's own codes, that are equal to the simulation's with the interpreter's reference kernels and with its
default ones (XNNPACK), and how many layers stay below 99 % with the reference kernels; of these kernels, the lowest share
of codes equal to what they are specified to compute in integers (in how many layers that is told: not for functions computed
by tables), and the lowest share that would be equal to the simulation's if they rescaled with one rounding, a half to even
(of the layers that differ at all); verify's verdict; the metric of the float model, of the simulation and of the file with
default kernels; the size of the file.
"""
COLUMNS = (
    "model", "front end", "layers", "on integers", "equal (reference)", "below 99 %", "equal (default)", "as specified",
    "rounded once", "verify", "float", "simulated", "LiteRT", "MiB",
)  # fmt: skip
ROWS = (
    ("resnet20_aux", "torch"), ("mobilenet_v1_025", "torch"), ("mobilenet_v2_cifar", "torch"), ("stories260k", "torch"),
    ("mnist_cntk", "onnx"), ("mnist_pytorch", "onnx"), ("face_slim_320", "onnx"), ("resnet20_aux", "onnx"),
    ("lstm_char", "onnx"),
)  # fmt: skip


def row(name: str, front_end: str) -> list[str]:
    """One row of the table."""
    task: Task = TASKS[name]()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        simulation, _ = quantized(name, front_end, task, Path(folder), target="litert")
        path = Path(folder, "model.tflite")
        report = verify_folder(folder, runtime="litert")
        metrics = [task.score(simulation), task.score(in_litert(path))]
        size = path.stat().st_size / 2**20
    plain = measured(name, task, front_end, "w8a8", "float")
    layers = [r for r in report.rows if r.ops != ("QUANTIZE",)]
    told = [r.specified for r in report.rows if r.specified is not None]
    once = [r.rounded_once for r in report.rows if r.rounded_once is not None]
    return [
        name, front_end, str(len(layers)), str(sum(r.kernel != "float" for r in layers)),
        f"{min(r.as_float.equal for r in report.rows):.2%}", str(sum(r.as_float.equal < 0.99 for r in report.rows)),
        f"{min(r.as_integer.equal for r in report.rows):.2%}",
        f"{min(told):.2%} ({len(told)} of {len(report.rows)})", f"{min(once, default=1.0):.3%}",
        "ok" if report.ok else "NOT ok", *(f"{metric:.3f}" for metric in (plain, *metrics)), f"{size:.2f}",
    ]  # fmt: skip


if __name__ == "__main__":
    measure.run_rows("LiteRT files", COLUMNS, ROWS, row, HELP)
