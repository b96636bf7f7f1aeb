"""What ONNX Runtime runs for a file, operator by operator: time, integer or float, and why not integer."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]
Kind = Literal["integer", "convert", "float", "move"]

#: operators that ONNX Runtime has integer kernels for where their inputs and their output are quantized to 8 bits
HAS_INTEGER_KERNEL = frozenset((
    "Conv", "MatMul", "Gemm", "Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "Sigmoid", "LeakyRelu", "Softmax",
    "Where", "ReduceMean", "Attention",
)) - {"ReduceMean", "Attention"}  # fmt: skip
_MOVES = frozenset((
    "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "MaxPool", "Gather", "Slice", "Split", "Concat", "Identity",
    "Pad", "Resize", "Expand", "Tile", "ReorderInput", "ReorderOutput", "Shape", "Cast", "DepthToSpace", "SpaceToDepth",
))  # fmt: skip
_CONVERTS = frozenset(("QuantizeLinear", "DequantizeLinear"))


@dataclass(frozen=True)
class Ran:
    """One operator of the optimized file.

    Attributes:
        name, op: of the node as the runtime runs it.
        micros: median time of one run.
        kind: ``integer``, ``convert`` for QuantizeLinear and DequantizeLinear that stand alone, ``float``, or ``move``.
        why: why it is float although it reads what was quantized; empty elsewhere.
    """

    name: str
    op: str
    micros: float
    kind: Kind
    why: str = ""


def profile(path: Path, feeds: Mapping[str, Array], *, threads: int = 1, runs: int = 10) -> list[Ran]:
    """Every operator that a default session runs for the file at ``path``, in order, with its time."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder, "optimized.onnx")
        options.enable_profiling, options.profile_file_prefix = True, str(Path(folder, "profile"))
        options.optimized_model_filepath = str(optimized)
        for key, text in (("file_name", "weights.bin"), ("min_size_in_bytes", "1024")):
            options.add_session_config_entry(f"session.optimized_model_external_initializers_{key}", text)
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        given = {one.name for one in session.get_inputs()}
        wanted = {name: array for name, array in feeds.items() if name in given}
        for _ in range(runs + 1):
            session.run(None, wanted)
        events = json.loads(Path(session.end_profiling()).read_text())
        nodes = {str(node.name): node for node in ir.load(optimized).graph}
        return _rows(events, nodes)


def _rows(events: list[dict[str, Any]], nodes: Mapping[str, ir.Node]) -> list[Ran]:
    times: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            key = (event["name"].removesuffix("_kernel_time"), event["args"]["op_name"])
            times.setdefault(key, []).append(float(event["dur"]))
    rows = []
    for (name, op), found in times.items():
        node = nodes.get(name)
        kind = _kind(node, op)
        why = _why_float(node) if kind == "float" and node is not None else ""
        rows.append(Ran(name, op, statistics.median(found[1:] or found), kind, why))
    return rows


def _kind(node: ir.Node | None, op: str) -> Kind:
    if op in _CONVERTS:
        return "convert"
    if op.startswith("QLinear") or op in ("QGemm", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeLSTM"):
        return "integer"
    if op in _MOVES:
        return "move"
    return "float"


def _why_float(node: ir.Node) -> str:
    """Why no integer kernel took ``node``, if it reads something that was quantized."""
    codes = [_codes_of(value) for value in node.inputs]
    if not any(code is not None for code in codes):
        return ""
    if node.op_type not in HAS_INTEGER_KERNEL:
        return f"the runtime has no integer kernel for {node.op_type}"
    for port, (code, value) in enumerate(zip(codes, node.inputs, strict=True)):
        reason = _why_no_codes(value, port) if code is None else _why_other_codes(code, port)
        if reason:
            return reason
    readers = [use.node.op_type for use in node.outputs[0].uses()]
    if "QuantizeLinear" in readers:
        return "its neighbours lie on grids that the kernel does not take together"
    after = f"{readers[0]} reads it in float" if readers else "it is an output in float"
    return f"its output is not quantized: {after}"


def _codes_of(value: ir.Value | None) -> ir.Value | None:
    """What an operator dequantizes to ``value``."""
    maker = None if value is None else value.producer()
    return maker.inputs[0] if maker is not None and maker.op_type == "DequantizeLinear" else None


def _why_no_codes(value: ir.Value | None, port: int) -> str:
    if value is None or port > 1:
        return ""
    what = "weight" if value.const_value is not None else f"input {value.name}"
    return f"its {what} is in float"


def _why_other_codes(codes: ir.Value, port: int) -> str:
    reads = next((use.node.inputs for use in codes.uses() if len(use.node.inputs) > 2), ())
    zero_point = reads[2] if reads else None
    kind = codes.dtype if zero_point is None else zero_point.dtype  # files state the type of one of the two
    if kind is None or kind.bitwidth == 8 or (port == 2 and kind.bitwidth == 32):
        return ""
    what = "weight" if codes.const_value is not None else "input"
    return f"its {what} has {kind.name.lower()} codes, and the kernels take 8 bits"
