"""Trained networks as exported files, and both as functions of a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import torch
from torch import Tensor

import bitwright.onnx
import bitwright.torch
from bitwright.runtimes.adapters import session_of
from tests.support import data
from tests.support.tasks import Run, Task


def quantized(name: str, front_end: str, task: Task, folder: Path, **options: Any) -> tuple[Run, Any]:
    """The simulation of a trained network as a function, and what ``quantize`` returned; files are in ``folder``."""
    options = {"recipe": ["fold"], "path": folder, "progress": False, **options}
    batches = task.batches(0)
    if front_end == "onnx":
        proto = onnx.load(data.onnx_file(task.file or name))
        found = bitwright.onnx.quantize(proto, [batch.numpy() for batch in batches], **options)
        return lambda x: torch.from_numpy(found.sim.run(x.numpy())[0]), found
    result = bitwright.torch.quantize(data.trained(name), batches, **options)
    return _first(result.model), result


def _first(model: Callable[[Tensor], Any]) -> Run:
    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            found = model(x)
        return found if isinstance(found, Tensor) else found[0]

    return run


def in_onnxruntime(path: Path) -> Run:
    """The first output of an ONNX file in ONNX Runtime, on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return first_output(ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]))


def first_output(session: Any) -> Run:
    """The first output of a session of ONNX Runtime for its first input."""
    given, made = session.get_inputs()[0].name, session.get_outputs()[0].name
    return lambda x: torch.from_numpy(session.run([made], {given: x.numpy()})[0])


def in_litert(path: Path) -> Run:
    """The first output of a LiteRT file, with the kernels that it takes by default.

    Where the file has a fixed batch, ``x`` runs in batches of that size; the last is filled with its first sample.
    """
    session = session_of(path.read_bytes())
    given, made = session.interpreter.get_input_details()[0], session.interpreter.get_output_details()[0]
    rows = 0 if given["shape_signature"][0] == -1 else int(given["shape"][0])

    def run(x: Tensor) -> Tensor:
        found = []
        for part in x.split(rows or len(x)):
            missing = max(0, rows - len(part))
            full = torch.cat([part, part[:1].expand(missing, *part.shape[1:])])
            outputs = session.run({given["name"]: full.numpy()})
            found.append(torch.from_numpy(outputs[made["name"]])[: len(part)])
        return torch.cat(found)

    return run
