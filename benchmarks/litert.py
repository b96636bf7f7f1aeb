"""Trained networks as LiteRT files: layers against the simulation, and the metric in the interpreter."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import onnx
import torch

import bitwright.onnx
import bitwright.torch
from bitwright.export.verify.samples import verify_folder
from bitwright.runtimes.adapters import open_file
from tests.support import data
from tests.support.tasks import TASKS, Task, measured

HELP = """\
Quantize trained networks with quantize(model, data, recipe=["fold"], target="litert"), and run the .tflite file.

Columns: layers that verify compares, and how many of them integer kernels compute; the lowest share of equal codes over
layers, each fed the simulation's own codes, with the interpreter's reference kernels and with its default ones (XNNPACK);
verify's verdict; the metric of the float model, of the simulation and of the file with default kernels; the size of the file.
"""
COLUMNS = (
    "model", "front end", "layers", "on integers", "equal (reference)", "equal (default)", "verify", "float", "simulated",
    "LiteRT", "MiB",
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
        sim, path = _exported(name, front_end, task, Path(folder))
        report = verify_folder(folder, runtime="litert")
        session = open_file("litert", path)
        source = next(iter(session.session.interpreter.get_input_details()))["name"]
        output = next(iter(session.session.interpreter.get_output_details()))["name"]
        details = session.session.interpreter.get_input_details()[0]
        rows = 0 if details["shape_signature"][0] == -1 else int(details["shape"][0])
        deployed = task.score(lambda x: _run(session, source, output, x, rows))
        simulated = task.score(_simulated(sim, front_end))
        size = path.stat().st_size / 2**20
    plain = measured(name, task, front_end, "w8a8", "float")
    layers = [r for r in report.rows if r.ops != ("QUANTIZE",)]
    return [
        name, front_end, str(len(layers)), str(sum(r.kernel != "float" for r in layers)),
        f"{min(r.as_float.equal for r in report.rows):.2%}", f"{min(r.as_integer.equal for r in report.rows):.2%}",
        "ok" if report.ok else "NOT ok", f"{plain:.3f}", f"{simulated:.3f}", f"{deployed:.3f}", f"{size:.2f}",
    ]  # fmt: skip


def _exported(name: str, front_end: str, task: Task, folder: Path) -> tuple[Any, Path]:
    options: dict[str, Any] = {"recipe": ["fold"], "path": folder, "target": "litert", "progress": False}
    batches = task.batches(0)
    if front_end == "torch":
        result = bitwright.torch.quantize(data.trained(name), batches, **options)
    else:
        proto = onnx.load(data.onnx_file(task.file or name))
        result = bitwright.onnx.quantize(proto, [batch.numpy() for batch in batches], **options)
    return result.sim, folder / "model.tflite"


def _run(session: Any, source: str, output: str, x: torch.Tensor, rows: int) -> torch.Tensor:
    """The output for ``x``, in batches of ``rows`` where the file has a fixed one; the last is filled with its first sample."""
    found = []
    for part in x.split(rows or len(x)):
        missing = max(0, rows - len(part))
        full = torch.cat([part, part[:1].expand(missing, *part.shape[1:])])
        found.append(torch.from_numpy(session.run({source: full.numpy()})[output])[: len(part)])
    return torch.cat(found)


def _simulated(sim: Any, front_end: str) -> Any:
    if front_end == "onnx":
        return lambda x: torch.from_numpy(sim.run(x.numpy())[0])

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = sim.model(x)
        return found if isinstance(found, torch.Tensor) else found[0]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="models")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, front_end in ROWS:
        if options.only and name not in options.only:
            continue
        rows.append(row(name, front_end))
        print(*rows[-1], sep="  ", flush=True)
    measure.show("LiteRT files", COLUMNS, rows)
    raw = [dict(zip(COLUMNS, one, strict=True)) for one in rows]
    measure.save(options.json, options.markdown, "LiteRT files", COLUMNS, rows, raw)


if __name__ == "__main__":
    main()
