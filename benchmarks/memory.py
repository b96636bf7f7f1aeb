"""Peak memory of simulating and calibrating ONNX models, against the float session of the same model."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

HELP = """\
Peak memory of models that are large in different ways, each phase in a process of its own, the imported program
taken off:

  weights    a stack of matrix products whose weights pass 2 GiB, in a second file
  tokens     an encoder like BERT-base (12 layers, width 768) on sequences of 512 tokens
  half       its first six layers
  pictures   a small convolutional network on 20 pictures of 1080 x 1920
  inside     16 products of 2,048 x 2,048, 256 MiB inside the .onnx file
  outside    36 products of 4,096 x 4,096, 2.25 GiB in a second file

columns of the table:
  model MiB     size of the weights
  budget MiB    memory_budget given to the simulation
  float         a float ONNX Runtime session on one batch after the other
  ours          creation, calibration and, where the row says so, one run and the export; quantize is all that
                bitwright.quantize(path, batches, recipe=["fold"], path=folder) does, import included
  beyond float  the difference; no more than weights and budget together, as promised
  CPU s         of the process
"""

EXAMPLES = """\
examples:
  python benchmarks/memory.py                       all of them, some minutes, 8 GiB of memory and 10 of disk
  python benchmarks/memory.py --models tokens pictures
  python benchmarks/memory.py --scale 0.1           smaller models, a first look
  python benchmarks/memory.py --markdown benchmarks/results/memory.md
"""

MIB = 1 << 20
COLUMNS = ["model", "phase", "model MiB", "budget MiB", "float", "ours", "beyond float", "allowed", "CPU s"]
PHASES = {"min-max": "min_max", "histogram": "percentile", "export": "min_max", "quantize": "min_max"}


# ---------------------------------------------------------------------------------------------------- models


class Writer:
    """Writes a model whose weights go to a second file one by one, so that no process ever holds them all."""

    def __init__(self, path: Path) -> None:
        self.path, self.random = path, np.random.default_rng(0)
        self.data = path.with_suffix(".data")
        self.file = self.data.open("wb")
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def weight(self, name: str, *shape: int) -> str:
        scale = 1 / np.sqrt(np.prod(shape[1:]) if len(shape) == 4 else shape[0])
        array = self.random.standard_normal(shape, np.float32) * np.float32(scale)
        tensor = onnx.TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (
            ("location", self.data.name), ("offset", self.file.tell()), ("length", array.nbytes)
        ):  # fmt: skip
            tensor.external_data.add(key=key, value=str(value))
        self.file.write(array.tobytes())
        self.file.write(b"\0" * (-array.nbytes % 4096))
        self.tensors.append(tensor)
        return name

    def constant(self, name: str, value: Any) -> str:
        self.tensors.append(onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def __call__(self, op: str, *inputs: str, out: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [out], name=out, **attributes))
        return out

    def save(self, shape: Sequence[Any], output: str) -> None:
        self.file.close()
        graph = helper.make_graph(
            self.nodes,
            "model",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
            self.tensors,
        )
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), self.path)


def write_weights(path: Path, scale: float) -> None:
    """24 products of 5,120 x 5,120, 100 MiB each."""
    _write_products(path, max(2, round(24 * scale)), 5120)


def write_inside(path: Path, scale: float) -> None:
    """16 products of 2,048 x 2,048, 16 MiB each, in the file of the graph."""
    _write_products(path, max(2, round(16 * scale)), 2048)
    model = onnx.load(path)
    path.with_suffix(".data").unlink()
    onnx.save(model, path)


def write_outside(path: Path, scale: float) -> None:
    """36 products of 4,096 x 4,096, 64 MiB each."""
    _write_products(path, max(2, round(36 * scale)), 4096)


def _write_products(path: Path, count: int, size: int) -> None:
    w, x = Writer(path), "x"
    for i in range(count):
        x = w("Relu", w("MatMul", x, w.weight(f"w{i}", size, size), out=f"h{i}"), out=f"r{i}")
    w.save(("n", size), x)


def write_tokens(path: Path, scale: float) -> None:
    """An encoder on embedded tokens: attention of 12 heads, a hidden layer of four times the width."""
    w, x, width, heads = Writer(path), "x", 768, 12
    split = w.constant("split", np.int64([0, 0, heads, width // heads]))
    join = w.constant("join", np.int64([0, 0, width]))
    root = w.constant("root", np.float32(np.sqrt(width // heads)))
    for i in range(max(1, round(12 * scale))):
        parts = {}
        for part, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            h = _linear(w, x, f"{i}.{part}", width, width)
            h = w("Reshape", h, split, out=f"{i}.{part}.heads")
            parts[part] = w("Transpose", h, out=f"{i}.{part}.turned", perm=perm)
        scores = w("Div", w("MatMul", parts["q"], parts["k"], out=f"{i}.product"), root, out=f"{i}.scores")
        mixed = w("MatMul", w("Softmax", scores, out=f"{i}.softmax", axis=-1), parts["v"], out=f"{i}.mixed")
        mixed = w("Transpose", mixed, out=f"{i}.back", perm=[0, 2, 1, 3])
        mixed = _linear(w, w("Reshape", mixed, join, out=f"{i}.joined"), f"{i}.out", width, width)
        x = _norm(w, w("Add", x, mixed, out=f"{i}.add"), f"{i}.norm", width)
        h = w("Gelu", _linear(w, x, f"{i}.up", width, 4 * width), out=f"{i}.gelu")
        x = _norm(w, w("Add", x, _linear(w, h, f"{i}.down", 4 * width, width), out=f"{i}.add2"), f"{i}.norm2", width)
    w.save(("n", "t", width), x)


def _linear(w: Writer, x: str, name: str, inner: int, outer: int) -> str:
    product = w("MatMul", x, w.weight(f"{name}.weight", inner, outer), out=f"{name}.product")
    return w("Add", product, w.constant(f"{name}.bias", np.zeros(outer, np.float32)), out=name)


def _norm(w: Writer, x: str, name: str, width: int) -> str:
    ones = w.constant(f"{name}.weight", np.ones(width, np.float32))
    return w("LayerNormalization", x, ones, w.constant(f"{name}.bias", np.zeros(width, np.float32)), out=name)


def write_pictures(path: Path, scale: float) -> None:
    """Convolutions that halve the picture now and then; the first results are 127 MiB each at full size."""
    w, x, channels = Writer(path), "x", 3
    for i, (width, stride) in enumerate(((16, 1), (16, 2), (32, 1), (32, 2), (64, 1), (64, 2))):
        x = w("Conv", x, w.weight(f"w{i}", width, channels, 3, 3), out=f"c{i}", pads=[1] * 4, strides=[stride] * 2)
        x, channels = w("Relu", x, out=f"r{i}"), width
    w.save(("n", 3, "h", "w"), w("GlobalAveragePool", x, out="y"))


@dataclass(frozen=True)
class Case:
    """A row of ``MODELS``: who writes it, one batch's shape at a scale, how many batches, the budget in MiB."""

    write: Callable[[Path, float], None]
    shape: Callable[[float], tuple[int, ...]]
    batches: int
    budget: float
    phases: tuple[str, ...]


def _picture(scale: float) -> tuple[int, ...]:
    return (1, 3, int(1080 * scale**0.5), int(1920 * scale**0.5))


MODELS = {
    "weights": Case(write_weights, lambda s: (4, 5120), 2, 64, ("min-max", "histogram", "export")),
    "tokens": Case(write_tokens, lambda s: (1, 512, 768), 4, 64, ("min-max", "histogram")),
    "half": Case(lambda path, s: write_tokens(path, s / 2), lambda s: (1, 512, 768), 4, 32, ("min-max", "histogram")),
    "inside": Case(write_inside, lambda s: (4, 2048), 4, 64, ("quantize",)),
    "outside": Case(write_outside, lambda s: (4, 4096), 4, 64, ("quantize",)),
    "pictures": Case(write_pictures, _picture, 20, 256, ("min-max", "histogram")),
}


# --------------------------------------------------------------------------------------------------- the phases


def batches(case: Case, scale: float) -> Iterator[dict[str, Any]]:
    """The same batches in every process, made one by one."""
    random = np.random.default_rng(1)
    for _ in range(case.batches):
        yield {"x": random.standard_normal(case.shape(scale), np.float32)}


def run_float(path: Path, case: Case, scale: float) -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options)
    for feeds in batches(case, scale):
        session.run(None, feeds)


def run_ours(path: Path, case: Case, scale: float, phase: str, budget: int) -> None:
    if phase == "quantize":
        import bitwright

        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            bitwright.quantize(
                path, list(batches(case, scale)), recipe=["fold"], path=folder, memory_budget=budget, progress=False
            )
        return
    from bitwright.onnx import QuantizationSimModel

    first = next(batches(case, scale))
    sim = QuantizationSimModel(path, first, PHASES[phase], memory_budget=budget, threads=1)
    sim.compute_encodings(batches(case, scale), progress=False)
    if phase == "export":
        sim.run(first)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            sim.export(folder, "model", samples=False)


def child(path: Path, name: str, phase: str, scale: float, budget: int) -> None:
    """One phase; prints its peak beyond the imported program, in MiB, as JSON."""
    import onnxruntime  # noqa: F401

    import bitwright.onnx  # noqa: F401

    before = measure.peak_mib()
    case = MODELS[name]
    if phase == "float":
        run_float(path, case, scale)
    else:
        run_ours(path, case, scale, phase, budget)
    print(json.dumps([measure.peak_mib() - before, time.process_time()]))


def measure_model(name: str, scale: float, folder: Path, phases: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """A dict per phase."""
    case, path = MODELS[name], folder / f"{name}.onnx"
    case.write(path, scale)
    size = sum(v.const_value.nbytes for v in ir.load(path).graph.initializers.values() if v.const_value) / MIB
    budget = int(max(1, case.budget * min(1, scale)) * MIB)
    arguments = ["--child", str(path), name, str(scale), str(budget)]
    plain, _ = measure.in_fresh_process(__file__, *arguments, "float")
    for phase in case.phases:
        if phases is None or phase in phases:
            print(f"{name}, {phase} ...", file=sys.stderr, flush=True)
            ours, seconds = measure.in_fresh_process(__file__, *arguments, phase)
            yield {
                "model": name,
                "phase": phase,
                "size": size,
                "budget": budget / MIB,
                "float": plain,
                "ours": ours,
                "seconds": seconds,
            }
    for file in (path, path.with_suffix(".data")):
        file.unlink(missing_ok=True)


def row_of(found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    numbers = [found[key] for key in ("size", "budget", "float", "ours")]
    numbers += [found["ours"] - found["float"], found["size"] + found["budget"], found["seconds"]]
    return [found["model"], found["phase"], *(f"{number:,.0f}" for number in numbers)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files asked for."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--child"]:
        path, name, scale, budget, phase = given[1:]
        child(Path(path), name, phase, float(scale), int(budget))
        return
    parser = argparse.ArgumentParser(
        description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help="which of them"
    )
    parser.add_argument(
        "--phases", nargs="+", choices=PHASES, metavar="PHASE", help="which of min-max, histogram, export, quantize"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the full size (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the models are written meanwhile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(given)
    if not 0 < options.scale <= 1:
        parser.error(f"--scale is {options.scale}; it lies between 0 and 1")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = [
            found
            for name in options.models
            for found in measure_model(name, options.scale, Path(folder), options.phases)
        ]
    title = "Peak memory of ONNX models, MiB (one thread)"
    rows = [row_of(found) for found in results]
    measure.show(title, COLUMNS, rows)
    measure.save(options.json, options.markdown, title, COLUMNS, rows, results)


if __name__ == "__main__":
    main()
