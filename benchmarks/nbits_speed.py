"""4-bit weights beside float activations in ONNX Runtime: which form is fast at which size; one thread, one command."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import measure  # first of ours: it puts the repository on the path
import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from bitwright.export.qdq.forms import Builder
from bitwright.export.qdq.nbits import write_nbits
from bitwright.export.qdq.products import float_products
from bitwright.runtimes.timing import interleaved, ratio

HELP = """\
One MatMul of random weights, int4 in blocks of 32 along the inner axis, beside the same product in float.

Times are CPU time of one thread; every column is how many times as fast as float a form is, with the quartiles:
  nbits       weight_only="nbits": MatMulNBits in the file, computed in float, equal to the simulation
  fused       weight_only="fused": ONNX Runtime's own choice, activations in int8
  apart       weight_only="exact": DequantizeLinear in every run
off: largest difference to float kernels relative to the largest output, of nbits and of fused.
"""
COLUMNS = ("inner x outputs", "rows", "float (us)", "nbits", "fused", "apart", "off, nbits", "off, fused")
_BLOCK = 32


def model(inner: int, outputs: int, form: str) -> bytes:
    """One product."""
    rng = np.random.default_rng(0)
    x = ir.Value(name="x", shape=ir.Shape(["rows", inner]), type=ir.TensorType(ir.DataType.FLOAT))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21}, name="product")
    made = ir.Model(graph, ir_version=10)
    builder = Builder(made)
    codes = rng.integers(-8, 8, (inner, outputs)).astype(np.int8)
    scale = (0.01 + 0.01 * rng.random((inner // _BLOCK, outputs))).astype(np.float32)
    if form == "float":
        value = builder.initializer("w", codes.astype(np.float32) * np.repeat(scale, _BLOCK, 0))
        node = ir.node("MatMul", [x, value], name="product")
        graph.append(node)
    else:
        stored = builder.initializer_of("w_q", ir.Tensor(codes.astype(ml_dtypes.int4), dtype=ir.DataType.INT4))
        weight = ir.node(
            "DequantizeLinear", [stored, builder.initializer("s", scale)], {"axis": 0, "block_size": _BLOCK}
        )
        weight.outputs[0].name = "w"
        node = ir.node("MatMul", [x, weight.outputs[0]], name="product")
        graph.extend([weight, node])
        if form == "apart":
            from bitwright.export.qdq.products import keep_apart

            keep_apart(builder, float_products(made) or [node])
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph.outputs.append(node.outputs[0])
    if form == "nbits":
        write_nbits(Builder(made), [node])
    return bytes(ir.to_proto(made).SerializeToString())


def row(size: int, rows: int, seconds: float) -> tuple[list[str], dict[str, float]]:
    """Cells and raw numbers."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    sessions = {
        form: ort.InferenceSession(model(size, size, form), options, providers=["CPUExecutionProvider"])
        for form in ("float", "nbits", "fused", "apart")
    }
    x = np.random.default_rng(1).normal(size=(rows, size)).astype(np.float32)
    found = {form: session.run(None, {"x": x})[0] for form, session in sessions.items()}
    steps = {form: (lambda s=session: s.run(None, {"x": x})) for form, session in sessions.items()}
    times = interleaved(steps, seconds=seconds, clock=time.process_time)
    speeds = {form: ratio(times["float"], times[form]) for form in ("nbits", "fused", "apart")}
    off = {form: float(np.abs(found[form] - found["float"]).max() / np.abs(found["float"]).max()) for form in speeds}
    cells = [f"{size} x {size}", str(rows), f"{1e6 * times['float'].median:.0f}", *map(str, speeds.values())]
    return [*cells, f"{off['nbits']:.1e}", f"{off['fused']:.1e}"], {form: s.median for form, s in speeds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files asked for."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=2.0, help="for the rounds of each line")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(arguments)
    found = [row(size, rows, options.seconds) for size in options.sizes for rows in options.rows]
    cells, raw = [line for line, _ in found], [numbers for _, numbers in found]
    title = "int4 weights beside float activations in ONNX Runtime (one thread): times as fast as float"
    measure.show(title, COLUMNS, cells)
    measure.save(options.json, options.markdown, title, COLUMNS, cells, raw)


if __name__ == "__main__":
    main()
