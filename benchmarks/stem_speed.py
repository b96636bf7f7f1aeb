"""First convolutions and depthwise ones in ONNX Runtime, float against integers, by size: one thread, one command."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

HELP = """\
Random convolutions with a Relu, per channel int8 weights, uint8 activations with zero point 0; microseconds, medians of the runs.

Columns: the convolution in float (blocks of channels, AVX-512) and on integers (QLinearConv, channels last); the same with
all conversions around it (QuantizeLinear, DequantizeLinear, Transpose, Reorder).
"""
COLUMNS = ("convolution", "float", "integer", "ratio", "float, all", "integer, all", "ratio, all")
# channels in and out, kernel, stride, size of the image, groups
DENSE = (
    (3, 8, 3, 2, 224), (3, 16, 3, 2, 224), (3, 32, 3, 2, 224), (3, 64, 3, 1, 112), (3, 64, 7, 2, 224), (3, 16, 3, 1, 32),
    (4, 32, 3, 2, 224), (8, 32, 3, 1, 112), (16, 32, 3, 1, 56),
)  # fmt: skip
DEPTHWISE = (
    (8, 112, 1), (16, 112, 1), (16, 28, 1), (24, 112, 1), (32, 112, 1), (32, 112, 2), (32, 28, 1), (48, 112, 1), (64, 112, 1),
    (64, 56, 1), (96, 56, 1), (128, 28, 1), (128, 14, 1),
)  # fmt: skip


class _Net:
    """Convolutions in a row as an ONNX model."""

    def __init__(self, channels: int, size: int, integer: bool) -> None:
        self.nodes: list[Any] = []
        self.stored: list[Any] = []
        self.channels, self.size, self.integer = channels, size, integer
        self.value = self._quantized("x") if integer else "x"

    def _stored(self, name: str, array: Any) -> str:
        self.stored.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def _quantized(self, name: str) -> str:
        grid = [self._stored(f"{name}_s", np.float32(0.02)), self._stored(f"{name}_z", np.uint8(0))]
        self.nodes.append(helper.make_node("QuantizeLinear", [name, *grid], [f"{name}_q"]))
        self.nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", *grid], [f"{name}_d"]))
        return f"{name}_d"

    def _parameter(self, name: str, array: Any, scale: Any, dtype: Any) -> str:
        if not self.integer:
            return self._stored(name, array)
        shape = (-1,) + (1,) * (array.ndim - 1)
        parts = [
            self._stored(f"{name}_q", np.rint(array / scale.reshape(shape)).astype(dtype)),
            self._stored(f"{name}_s", scale),
            self._stored(f"{name}_z", np.zeros(len(scale), dtype)),
        ]
        self.nodes.append(helper.make_node("DequantizeLinear", parts, [name], axis=0))
        return name

    def conv(self, channels: int, kernel: int, stride: int, group: int = 1) -> None:
        """Append a convolution with a Relu."""
        i = len(self.nodes)
        weight = np.random.default_rng(i).normal(size=(channels, self.channels // group, kernel, kernel))
        scale = (np.abs(weight).reshape(channels, -1).max(1) / 127).astype(np.float32)
        parts = [
            self._parameter(f"w{i}", weight.astype(np.float32), scale, np.int8),
            self._parameter(
                f"b{i}", np.zeros(channels, np.float32), (np.float32(0.02) * scale).astype(np.float32), np.int32
            ),
        ]
        options = {"strides": [stride] * 2, "pads": [kernel // 2] * 4, "group": group, "kernel_shape": [kernel] * 2}
        self.nodes.append(helper.make_node("Conv", [self.value, *parts], [f"c{i}"], **options))
        self.nodes.append(helper.make_node("Relu", [f"c{i}"], [f"r{i}"]))
        self.value = self._quantized(f"r{i}") if self.integer else f"r{i}"
        self.channels = channels

    def profile(self, image: Any, runs: int) -> list[tuple[str, float]]:
        """``(operator, microseconds)`` in execution order."""
        given = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(image.shape))
        made = helper.make_tensor_value_info(self.value, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "net", [given], [made], self.stored)
        proto = helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        with tempfile.TemporaryDirectory() as folder:
            options.enable_profiling, options.profile_file_prefix = True, str(Path(folder, "profile"))
            session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
            for _ in range(runs + 5):
                session.run(None, {"x": image})
            events = json.loads(Path(session.end_profiling()).read_text())
        times: dict[tuple[str, str], list[float]] = {}
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                times.setdefault((event["name"], event["args"]["op_name"]), []).append(float(event["dur"]))
        return [(op, statistics.median(taken[5:])) for (_, op), taken in times.items()]


def _cells(label: str, channels: int, size: int, layers: Sequence[tuple[int, ...]], runs: int) -> list[str]:
    image = np.random.default_rng(0).normal(size=(1, channels, size, size)).astype(np.float32)
    conv, everything = [], []
    for integer in (False, True):
        net = _Net(channels, size, integer)
        for layer in layers:
            net.conv(*layer)
        found = net.profile(image, runs)
        conv.append([taken for op, taken in found if "Conv" in op][-1])
        everything.append(sum(taken for _, taken in found))
    both = [cell for a, b in (conv, everything) for cell in (f"{a:.0f}", f"{b:.0f}", f"{a / b:.2f}")]
    return [label, *both]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files asked for."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40, help="of every convolution")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(arguments)
    rows = []
    for channels, out, kernel, stride, size in DENSE:
        label = f"{channels} to {out} channels, {kernel}x{kernel}, stride {stride}, {size}x{size}"
        rows.append(_cells(label, channels, size, [(out, kernel, stride)], options.runs))
    for channels, size, stride in DEPTHWISE:
        label = f"depthwise, {channels} channels, 3x3, stride {stride}, {size}x{size}, after a pointwise one"
        layers = [(channels, 1, 1), (channels, 3, stride, channels)]
        rows.append(_cells(label, channels, size, layers, options.runs))
    title = "Convolutions in ONNX Runtime (batch 1, one thread): microseconds, float against integers"
    measure.show(title, COLUMNS, rows)
    measure.save(options.json, options.markdown, title, COLUMNS, rows, rows)


if __name__ == "__main__":
    main()
