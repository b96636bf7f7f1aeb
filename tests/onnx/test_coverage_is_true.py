"""What the coverage of an ONNX simulation says of random small graphs, against what the simulation and its file compute."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from bitwright.core.graph.graph import Graph
from bitwright.onnx import QuantizationSimModel
from tests.onnx.nets import Array, Net, run

SHAPE = (3, 4, 8)
Binary = Callable[[Net, str, str], str]


def _linear(n: Net, x: str, y: str) -> str:
    return n("Add", n("MatMul", x, n.weights(8, 8)), n.weights(8))


def _concatenated(n: Net, x: str, y: str) -> str:
    halves = (n("Slice", v, *(n.const(np.int64([k])) for k in (0, 4, 2))) for v in (x, y))
    return n("Concat", *halves, axis=2)


def _turned_back(n: Net, x: str, y: str) -> str:
    return n("Transpose", n("Transpose", x, perm=[1, 0, 2]), perm=[1, 0, 2])


def _split(n: Net, x: str, y: str) -> str:
    one, other = n("Split", x, out=[n._fresh("part"), n._fresh("part")], axis=2, num_outputs=2)
    return n("Concat", other, one, axis=2)


def _one_of(*types: str) -> list[Binary]:
    return [lambda n, x, y, op=op: n(op, x) for op in types]  # type: ignore[misc]


def _two_of(*types: str) -> list[Binary]:
    return [lambda n, x, y, op=op: n(op, x, y) for op in types]  # type: ignore[misc]


STEPS: list[Binary] = [
    *_one_of("Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Identity", "HardSwish", "Erf", "Sin", "Floor"),
    *_two_of("Add", "Mul", "Sub", "Max", "Min"),
    lambda n, x, y: n("Softmax", x, axis=-1),
    lambda n, x, y: n("LayerNormalization", x, n.weights(8), n.weights(8), axis=-1),
    lambda n, x, y: n("Clip", x, n.const(np.float32(-1)), n.const(np.float32(1))),
    lambda n, x, y: n("Reshape", n("Reshape", x, n.const(np.int64([12, 8]))), n.const(np.int64([3, 4, 8]))),
    lambda n, x, y: n("MatMul", n("Softmax", n("MatMul", x, n("Transpose", y, perm=[0, 2, 1])), axis=-1), y),
    lambda n, x, y: n("Where", n("Greater", x, y), x, y),
    lambda n, x, y: n("Mul", x, n("ReduceMean", y, n.const(np.int64([2])), keepdims=1)),
    lambda n, x, y: n("Add", y, n("Expand", n.const(np.float32(0.5)), n("Shape", x))),
    lambda n, x, y: n("Mul", y, n("Cast", n("Greater", x, n.const(np.float32(0))), to=onnx.TensorProto.FLOAT)),
    lambda n, x, y: n("Mul", y, n("Cast", n("Size", x), to=onnx.TensorProto.FLOAT)),
    *(_linear, _linear, _concatenated, _turned_back, _split),
]


def random_model(seed: int) -> onnx.ModelProto:
    """A few operators on inputs and on what came of others."""
    draw, n = random.Random(seed), Net(seed)
    values = [n.input(name, SHAPE) for name in "abc"]
    first = len(values)
    for _ in range(draw.randint(3, 7)):
        x, y = draw.choice(values[-4:]), draw.choice(values)
        values.append(draw.choice(STEPS)(n, x, y))
    made = values[first:]
    outputs = dict.fromkeys([made[-1], draw.choice(made)])
    return n.model(*[(name, onnx.TensorProto.FLOAT, None) for name in outputs], opset=18)


def off_grid(x: Array, encoding) -> float:
    """The largest distance of an element from the grid, in steps."""
    codes = x.astype(np.float64) / float(encoding.scale) + float(encoding.zero_point)
    inside = codes.clip(encoding.format.qmin, encoding.format.qmax)
    return float((abs(codes - codes.round()) + abs(codes - inside)).max()) if x.size else 0.0


def final_readers(graph: Graph, value: str) -> set[str]:
    """Types of the operators that read a value, also after operators that only move its elements."""
    found, open_values = set(), [value]
    while open_values:
        for op, _ in graph.consumers(open_values.pop()):
            if op.type in ("Reshape", "Transpose", "Identity", "Slice", "Split", "Concat"):
                open_values.extend(op.outputs)
            else:
                found.add(op.type)
    return found


def check(seed: int, folder: Path) -> None:
    rng = np.random.default_rng(seed)
    batches = [{name: rng.standard_normal(SHAPE).astype(np.float32) for name in "abc"} for _ in range(2)]
    sim = QuantizationSimModel(random_model(seed), batches[0], threads=1)
    used = set(sim.graph.inputs)
    batches = [{name: array for name, array in batch.items() if name in used} for batch in batches]
    sim.compute_encodings(batches, progress=False)
    enabled = {name: site for name, site in sim.quantizers.items() if site.enabled}
    assert not [name for name, site in enabled.items() if site.encoding is None], "calibration reaches every site"
    rows = {row.name: row for row in sim.coverage()}
    held = {site.value for site in enabled.values()}
    for name, row in rows.items():
        assert (row.status == "quantized") == (name in held), f"{seed}: {name}: {row.status}, {row.how}"
        if row.how.endswith(("reads only its shape", "makes no floating-point result of it")):
            found = final_readers(sim.graph, name)
            assert found <= {"Shape", "Size", "Greater"}, f"{seed}: {name}: {row.how}, though it is read by {found}"

    activations = [name for name, site in enabled.items() if site.role in ("input", "output")]
    for name, arrays in sim.capture(activations, batches[0]).items():
        assert all(off_grid(x, enabled[name].encoding) < 1e-3 for x in arrays), f"{seed}: {name} is on its grid"

    exported = onnx.load(sim.export(folder, "m", samples=False).qdq)
    # an output of the model keeps its name for what is dequantized, also through a Reshape to the same shape, where an optimiser
    # of the runtime would go wrong else
    ends = {"QuantizeLinear": lambda node: node.input[0], "DequantizeLinear": lambda node: node.output[0]}
    scales = {ends[node.op_type](node): node.input[1] for node in exported.graph.node if node.op_type in ends}
    results = {value.name for value in exported.graph.output}
    same_shapes = {held.name for held in exported.graph.initializer if not onnx.numpy_helper.to_array(held).any()}
    for node in exported.graph.node:
        if node.op_type == "Reshape" and node.output[0] in results and node.input[1] in same_shapes:
            scales |= {node.output[0]: scales[node.input[0]]} if node.input[0] in scales else {}
    there = {name for node in exported.graph.node for name in (*node.input, *node.output)}
    for name, row in rows.items():
        if row.kind not in ("input", "activation") or name not in there:
            continue
        said = f"{seed}: in the file, {name}: {row.status}, {row.how}"
        if row.status == "quantized":
            assert name in scales, said
        elif row.status in (
            "float",
            "integer",
        ):  # what carries elements on a grid may have it again, which changes no bit
            makers = [
                node for node in exported.graph.node if scales.get(name) in node.input[1:2] and node.op_type in ends
            ]
            assert name not in scales or len(makers) > 2, said
    for wanted, found in zip(sim.run(batches[0]), run(exported, batches[0]), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4, err_msg=str(seed))


@pytest.mark.parametrize(
    "first", [0, pytest.param(5, marks=pytest.mark.slow), pytest.param(15, marks=pytest.mark.slow)]
)
def test_coverage_says_what_the_simulation_and_its_file_do(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + (5 if not first else 10)):
        check(seed, tmp_path)


@pytest.mark.slow
def test_coverage_says_what_the_simulation_and_its_file_do_on_many_graphs(tmp_path: Path) -> None:
    for seed in range(1000, 1100):
        check(seed, tmp_path)


def test_what_operators_outside_onnx_make_has_the_type_that_the_runtime_infers():
    """ONNX shape inference knows no type of these, so that all that follows was taken for no float and left out."""
    net = Net()
    x = net.input("x", SHAPE)
    active = net("FastGelu", net("MatMul", x, net.weights(8, 8)), domain="com.microsoft")
    y = net("MatMul", net("Relu", active), net.weights(8, 8))
    sim = QuantizationSimModel(net.model(y, domains={"com.microsoft": 1}))
    sim.compute_encodings([{"x": np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)}], progress=False)
    rows = {row.op_type: row for row in sim.coverage() if row.kind == "activation"}
    assert rows["com.microsoft::FastGelu"].how == "com.microsoft::FastGelu runs in float on integer runtimes"
    assert rows["Relu"].status == "quantized" and rows["Relu"].shape == SHAPE
