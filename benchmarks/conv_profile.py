"""Where the time of convolutional networks goes in ONNX Runtime: float, our export, its own tool; one thread, one command."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import numpy as np
import onnx
import onnxruntime as ort
import torch
from runtime_speed import MODELS, _by_their_tool, _exported, _level, _pictures

from bitwright.onnx import quantize
from bitwright.runtimes.adapters import open_file
from bitwright.runtimes.timing import interleaved
from tests.support.data import cifar, imagenet, onnx_file

HELP = """\
Profile real networks in ONNX Runtime, quantized with the same calibration data (32 samples), batch 1.

float is the model with its batch norms folded, w8a8 the default export of quantize(model, data, recipe=["fold"]), quantize_static
ONNX Runtime's tool on the same model with the same data.

  convolutions, depthwise, conversions, others
              microseconds of one run by kind of operator, median of the profiled runs (a profile adds 2 to 3 to every operator);
              conversions: QuantizeLinear and DequantizeLinear that stand alone, Transpose and Reorder between layouts
  nodes       operators that are run
  run         microseconds of a run without a profile, CPU time: all files in turns, in bursts of ten, least of the bursts
  times       how many times as fast as float, by run
  bound       the same if nothing but convolutions took time, by the profile
  dB          outputs against float, lowest over outputs, 16 samples that did not calibrate
  top-1       on labelled samples, %; empty where there are none
"""
_CONVOLUTIONAL = ("mobilenet_v1_025", "mobilenet_v2_cifar", "resnet20_aux", "face_slim_320")
KINDS = ("convolutions", "depthwise", "conversions", "others")
COLUMNS = ("model", "file", *KINDS, "nodes", "run", "times", "bound", "dB", "top-1")
_BURST = 10  # runs, so that what ran before matters little
_LAYOUT = frozenset(("QuantizeLinear", "DequantizeLinear", "Transpose", "ReorderInput", "ReorderOutput"))


def profiled(path: Path, feeds: Mapping[str, Any], runs: int) -> dict[str, float]:
    """Microseconds by kind."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory() as text:
        optimized = Path(text, "optimized.onnx")
        options.enable_profiling, options.profile_file_prefix = True, str(Path(text, "profile"))
        options.optimized_model_filepath = str(optimized)
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        for _ in range(runs + 5):
            session.run(None, dict(feeds))
        events = json.loads(Path(session.end_profiling()).read_text())
        groups = {
            node.name: next((a.i for a in node.attribute if a.name == "group"), 1)
            for node in onnx.load(optimized).graph.node
        }
    times: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            key = (event["name"].removesuffix("_kernel_time"), event["args"]["op_name"])
            times.setdefault(key, []).append(float(event["dur"]))
    found = dict.fromkeys(KINDS, 0.0)
    for (name, op), taken in times.items():
        conv = "Conv" in op
        kind = ("depthwise" if groups.get(name, 1) > 1 else "convolutions") if conv else "others"
        found["conversions" if op in _LAYOUT else kind] += statistics.median(taken[5:])
    return {**found, "nodes": float(len(times))}


def least(files: Mapping[str, Path], feeds: Mapping[str, Any], rounds: int) -> dict[str, float]:
    """Microseconds of one run of every file, least over bursts that were run in turns."""
    sessions = {label: open_file("onnxruntime", path) for label, path in files.items()}

    def burst(session: Any) -> None:
        for _ in range(_BURST):
            session.run(feeds)

    steps = {label: (lambda s=session: burst(s)) for label, session in sessions.items()}
    found = interleaved(steps, rounds=rounds, clock=time.process_time)
    return {label: 1e6 * min(timing.rounds) / _BURST for label, timing in found.items()}


def top1(path: Path, name: str, labelled: tuple[np.ndarray, np.ndarray] | None) -> str:
    """Share of labelled samples whose first output is right."""
    if labelled is None:
        return ""
    session = open_file("onnxruntime", path)
    made = [next(iter(session.run({name: x[None]}).values()))[0] for x in labelled[0]]
    return f"{100 * float((np.argmax(made, -1) == labelled[1]).mean()):.2f}"


def _labelled(kind: str) -> tuple[np.ndarray, np.ndarray] | None:
    if kind not in ("cifar", "imagenet"):
        return None
    data = cifar("test") if kind == "cifar" else imagenet()
    return data.x.numpy(), data.y.numpy()


def rows(name: str, runs: int, rounds: int) -> list[list[str]]:
    """Cells of one model."""
    kind, from_torch = MODELS[name]
    data = _pictures(kind)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = _exported(name, torch.from_numpy(data), folder) if from_torch else onnx_file(name)
        graph = onnx.load(model).graph
        (given,) = {i.name for i in graph.input} - {t.name for t in graph.initializer}
        feeds = [{given: np.ascontiguousarray(data[i : i + 1])} for i in range(len(data))]
        made = quantize(model, feeds[:32], recipe=["fold"], path=folder / "ours", progress=False)
        files = {
            "float": made.exported.float_model,
            "w8a8": made.exported.qdq,
            "quantize_static": _by_their_tool(model, feeds[:32], folder),
        }
        times, sessions = (least(files, feeds[0], rounds), {k: open_file("onnxruntime", p) for k, p in files.items()})
        cells, base, labelled = [], 0.0, _labelled(kind)
        for label, path in files.items():
            found = profiled(path, feeds[0], runs)
            base = base or sum(found[c] for c in KINDS)
            bound = base / (found["convolutions"] + found["depthwise"])
            level = _level(sessions["float"], sessions[label], feeds[32:])
            more = ["", "", ""] if label == "float" else [
                f"{times['float'] / times[label]:.2f}", f"{bound:.2f}", f"{level:.1f}"
            ]  # fmt: skip
            numbers = [f"{found[c]:.0f}" for c in (*KINDS, "nodes")]
            cells.append([name, label, *numbers, f"{times[label]:.0f}", *more, top1(path, given, labelled)])
            print(*cells[-1], sep=" | ", flush=True)
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files asked for."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(_CONVOLUTIONAL), metavar="NAME")
    parser.add_argument("--runs", type=int, default=200, help="of every file, for the profile")
    parser.add_argument("--rounds", type=int, default=200, help="of bursts in turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(arguments)
    cells = [line for name in options.models for line in rows(name, options.runs, options.rounds)]
    title = "Convolutional networks in ONNX Runtime (batch 1, one thread): where the time goes, and what is lost"
    measure.show(title, COLUMNS, cells)
    measure.save(options.json, options.markdown, title, COLUMNS, cells, cells)


if __name__ == "__main__":
    main()
