"""Where the time of convolutional networks goes in ONNX Runtime: float, our export, its own tool; one thread, one command."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import numpy as np
import onnx
import onnxruntime as ort
import torch
from runtime_speed import MODELS, _by_their_tool, _exported, _pictures

from bitwright.onnx import quantize
from tests.support.data import onnx_file

HELP = """\
Profile real networks in ONNX Runtime, quantized with the same calibration data (32 samples), batch 1.

Microseconds of one run by kind of operator, median of the runs: convolutions by their groups (depthwise: one channel each),
conversions (QuantizeLinear and DequantizeLinear that stand alone, Transpose and Reorder between layouts), and all others.
ratio: float against the file, of all operators; bound: what it would be if conversions and all but convolutions took no time.
"""
_CONVOLUTIONAL = ("mobilenet_v1_025", "mobilenet_v2_cifar", "resnet20_aux", "face_slim_320")
COLUMNS = ("model", "file", "convolutions", "depthwise", "conversions", "others", "all", "ratio", "bound")
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
    found = dict.fromkeys(COLUMNS[2:6], 0.0)
    for (name, op), taken in times.items():
        conv = "Conv" in op
        kind = ("depthwise" if groups.get(name, 1) > 1 else "convolutions") if conv else "others"
        found["conversions" if op in _LAYOUT else kind] += statistics.median(taken[5:])
    return {**found, "all": sum(found.values())}


def rows(name: str, runs: int) -> list[list[str]]:
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
        cells, base = [], 0.0
        for label, path in files.items():
            found = profiled(path, feeds[0], runs)
            base = base or found["all"]
            bound = base / (found["convolutions"] + found["depthwise"])
            ratios = ["", ""] if label == "float" else [f"{base / found['all']:.2f}", f"{bound:.2f}"]
            cells.append([name, label, *(f"{found[c]:.0f}" for c in COLUMNS[2:7]), *ratios])
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files asked for."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(_CONVOLUTIONAL), metavar="NAME")
    parser.add_argument("--runs", type=int, default=200, help="of every file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(arguments)
    cells = [line for name in options.models for line in rows(name, options.runs)]
    title = "Convolutional networks in ONNX Runtime (batch 1, one thread): microseconds by kind of operator"
    measure.show(title, COLUMNS, cells)
    measure.save(options.json, options.markdown, title, COLUMNS, cells, cells)


if __name__ == "__main__":
    main()
