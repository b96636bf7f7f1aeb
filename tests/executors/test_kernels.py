"""Executors against ONNX Runtime's kernels on this CPU, operator by operator, with generated shapes, scales and extremes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from bitwright.compare.executed import CodeExecutor
from bitwright.compare.runtime import EXACT_SUMS
from bitwright.executors.profile import find_profile
from bitwright.executors.sums import convolution, kind_for, wrapped
from bitwright.runtimes.onnxruntime import new_session, session_options
from tests.support.without_vnni import lacks_vnni

Array = np.ndarray[Any, Any]
Operand = tuple[str, Array | tuple[int, ...], Any, int, int]  # name, codes or shape, scale, zero point, axis


def model(
    op: str, operands: list[Operand], dtype: Any, out: tuple[float, int] | None, **attributes: Any
) -> onnx.ModelProto:
    """One operator between quantizers; an operand with a shape is an input, in float."""
    nodes, held, given = [], [], []

    def constant(name: str, array: Any) -> str:
        held.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    for name, codes, scale, zero, axis in operands:
        kind = dtype if isinstance(codes, tuple) else codes.dtype
        grid = [
            constant(f"{name}_s", np.asarray(scale, np.float32)),
            constant(f"{name}_z", np.full(np.shape(scale), zero, kind)),
        ]
        if isinstance(codes, tuple):
            given.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, codes))
            nodes.append(helper.make_node("QuantizeLinear", [name, *grid], [f"{name}_q"]))
        else:
            constant(f"{name}_q", codes)
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", *grid], [f"{name}_d"], axis=axis))
    nodes.append(helper.make_node(op, [f"{name}_d" for name, *_ in operands], ["y"], **attributes))
    if out is not None:
        grid = [constant("y_s", np.float32(out[0])), constant("y_z", np.asarray(out[1], dtype))]
        nodes.append(helper.make_node("QuantizeLinear", ["y", *grid], ["q"]))
        nodes.append(helper.make_node("DequantizeLinear", ["q", *grid], ["o"]))
    made = helper.make_tensor_value_info("y" if out is None else "o", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, op, given, [made], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


class Draw:
    """Shapes, scales and codes by chance, one kind of activation each."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = self.rng.choice([np.uint8, np.uint8, np.int8])
        info = np.iinfo(self.dtype)
        self.low, self.high = int(info.min), int(info.max)

    def whole(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def scale(self, low: float = -6, high: float = 0, *shape: int) -> Any:
        return np.float32(np.exp(self.rng.uniform(low, high, shape or None)))

    def zero(self) -> int:
        return self.whole(self.low, self.high)

    def weight(self, *shape: int) -> Array:
        wide = self.rng.integers(-127, 128, shape)
        return np.where(self.rng.random(shape) < self.rng.choice([0, 0.5]), np.sign(wide) * 127, wide).astype(np.int8)

    def codes(self, shape: tuple[int, ...]) -> Array:
        ends = np.where(self.rng.random(shape) < 0.5, self.low, self.high)
        return np.where(self.rng.random() < 0.3, ends, self.rng.integers(self.low, self.high + 1, shape))


def conv(d: Draw) -> onnx.ModelProto:
    groups = int(d.rng.choice([1, 1, 2, 4]))
    channels, made = d.whole(1, 4) * groups, d.whole(1, 3) * groups
    if d.rng.random() < 0.3:
        groups, made = channels, channels * d.whole(1, 2)
    kernel, x = int(d.rng.choice([1, 3, 5])), d.scale()
    w = d.scale(-7, -4, made) if d.rng.random() < 0.6 else np.float32(0.01)
    operands: list[Operand] = [
        ("x", (2, channels, d.whole(11, 16), 12), x, d.zero(), 1),
        ("w", d.weight(made, channels // groups, kernel, kernel), w, 0, 0),
    ]  # fmt: skip
    if d.rng.random() < 0.7:
        operands.append(("b", d.rng.integers(-20000, 20000, made).astype(np.int32), x * w, 0, 0))
    out = float(x * np.mean(w) * kernel * 60)
    return model(
        "Conv", operands, d.dtype, (out, d.zero()), group=groups, strides=[d.whole(1, 2)] * 2, dilations=[d.whole(1, 2)] * 2,
        pads=[d.whole(0, 2)] * 4, kernel_shape=[kernel] * 2,
    )  # fmt: skip


def product(op: str, d: Draw) -> onnx.ModelProto:
    inner, made, x = d.whole(1, 70), d.whole(1, 40), d.scale()
    w = d.scale(-7, -4, made) if d.rng.random() < 0.6 else np.float32(0.01)
    weight = d.weight(inner, made)
    out = (float(x * np.mean(w) * 60 * inner**0.5), d.zero()) if d.rng.random() < 0.8 else None
    if op == "MatMul":
        return model(op, [("x", (3, 4, inner), x, d.zero(), 1), ("w", weight, w, 0, 1)], d.dtype, out)
    bias = d.rng.integers(-20000, 20000, made).astype(np.int32)
    operands: list[Operand] = [
        ("x", (5, inner), x, d.zero(), 1),
        ("w", weight.T.copy(), w, 0, 0),
        ("b", bias, x * w, 0, 0),
    ]
    return model(op, operands, d.dtype, out, transB=1)


def elements(op: str, d: Draw) -> onnx.ModelProto:
    shape, a, b = (2, 3, d.whole(1, 8), d.whole(1, 8)), d.scale(), d.scale()
    other = [shape, (1,), (1, 3, 1, 1)][d.whole(0, 2)] if op != "Concat" else shape
    out = float({"Add": a + b, "Mul": a * b * 100, "Concat": max(a, b)}[op])
    attributes = {"axis": 1} if op == "Concat" else {}
    return model(
        op, [("a", shape, a, d.zero(), 1), ("b", other, b, d.zero(), 1)], d.dtype, (out, d.zero()), **attributes
    )


def one(op: str, d: Draw, **attributes: Any) -> onnx.ModelProto:
    ends = op in ("Sigmoid", "Softmax")
    x, zero = d.scale(-6, -2 if op == "Softmax" else 0), d.zero()
    return model(
        op,
        [("x", (2, 3, 9, 10), x, zero, 1)],
        d.dtype,
        (1 / 256 if ends else float(x), d.low if ends else d.zero()),
        **attributes,
    )


def average(d: Draw) -> onnx.ModelProto:
    options = {"strides": [d.whole(1, 2)] * 2, "count_include_pad": d.whole(0, 1), "pads": [d.whole(0, 1)] * 4}
    return one("AveragePool", d, kernel_shape=[3, 2], **options)


OPERATORS = {
    "Conv": conv,
    "MatMul": lambda d: product("MatMul", d),
    "Gemm": lambda d: product("Gemm", d),
    "Add": lambda d: elements("Add", d),
    "Mul": lambda d: elements("Mul", d),
    "Concat": lambda d: elements("Concat", d),
    "Sigmoid": lambda d: one("Sigmoid", d),
    "LeakyRelu": lambda d: one("LeakyRelu", d, alpha=0.1),
    "Softmax": lambda d: one("Softmax", d, axis=-1),
    "AveragePool": average,
    "GlobalAveragePool": lambda d: one("GlobalAveragePool", d),
}


def feeds(proto: onnx.ModelProto, d: Draw) -> dict[str, Array]:
    held = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    shapes = {v.name: tuple(n.dim_value for n in v.type.tensor_type.shape.dim) for v in proto.graph.input}
    return {
        n: (d.codes(s).astype(np.float32) - held[f"{n}_z"].astype(np.float32)) * held[f"{n}_s"] for n, s in shapes.items()
    }  # fmt: skip


@pytest.mark.parametrize("profile", ["ort_x64", "ort_x64_avx2"])
@pytest.mark.parametrize("op", OPERATORS)
def test_kernels_of_onnx_runtime_are_met_bit_for_bit(op: str, profile: str) -> None:
    if profile == "ort_x64_avx2" and not lacks_vnni():
        pytest.skip("this CPU has integer dot products")
    assert set(find_profile(profile).kernels) == set(OPERATORS)
    entries = EXACT_SUMS if profile == "ort_x64" else {}
    for seed in range(6):
        draw = Draw(seed)
        proto = OPERATORS[op](draw)
        given = feeds(proto, draw)
        executor = CodeExecutor(ir.from_proto(proto), find_profile(profile))
        assert len(executor.kernels) == 1
        (found,) = executor.run(given).values()
        (wanted,) = new_session(proto.SerializeToString(), session_options(entries=entries)).run(None, given)
        np.testing.assert_array_equal(found, wanted, f"{op} {seed}")


class FewDigits(Draw):
    """Scales of one digit: many values lie on the border of two codes, where the order of roundings decides."""

    def scale(self, low: float = -6, high: float = 0, *shape: int) -> Any:
        found = self.rng.choice([0.1, 0.3, 0.7, 0.05, 1.1, 0.03, 0.9, 0.2, 0.5, 0.25], shape or None)
        return np.float32(found * (0.01 if low == -7 else 1))


@pytest.mark.parametrize("op", OPERATORS)
def test_values_on_the_border_of_two_codes_are_met_bit_for_bit(op: str) -> None:
    for seed in range(25):
        draw = FewDigits(seed)
        proto = OPERATORS[op](draw)
        given = feeds(proto, draw)
        (found,) = CodeExecutor(ir.from_proto(proto), find_profile("ort_x64")).run(given).values()
        (wanted,) = new_session(proto.SerializeToString(), session_options(entries=EXACT_SUMS)).run(None, given)
        np.testing.assert_array_equal(found, wanted, f"{op} {seed}")


@pytest.mark.parametrize("count_include_pad", [0, 1])
@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]], ids=str)
@pytest.mark.parametrize("stride", [2, 3])
def test_averages_of_a_pool_that_rounds_its_size_up(stride: int, pads: list[int], count_include_pad: int) -> None:
    draw = Draw(0)
    options = {"strides": [stride] * 2, "pads": pads, "count_include_pad": count_include_pad, "ceil_mode": 1}
    proto = one("AveragePool", draw, kernel_shape=[3, 2], **options)
    given = feeds(proto, draw)
    (found,) = CodeExecutor(ir.from_proto(proto), find_profile("ort_x64")).run(given).values()
    (wanted,) = new_session(proto.SerializeToString(), session_options(entries=EXACT_SUMS)).run(None, given)
    np.testing.assert_array_equal(found, wanted)


def test_pairs_saturate_and_accumulators_wrap_around() -> None:
    x = np.full((1, 2, 1, 1), 255, np.uint8)
    w = np.full((1, 2, 1, 1), 127, np.int64)
    options: dict[str, Any] = {"strides": (1, 1), "pads": [(0, 0)] * 2, "dilations": (1, 1)}
    assert convolution(x, 0, w, **options).item() == 2 * 255 * 127
    assert convolution(x, 0, w, pairs=True, **options).item() == 32767
    assert (
        convolution(x, 3, w, pairs=True, **options).item() == 32767 - 2 * 3 * 127
    )  # the zero point comes off afterwards
    assert convolution(x, 0, w, accumulator=16, **options).item() == 2 * 255 * 127 - (1 << 16)
    assert wrapped(np.array([2.0**23]), 24, 2.0**23).item() == -(2.0**23)


@pytest.mark.parametrize("depth", [1, 600, 200_000])
def test_sums_are_exact_at_any_length(depth: int) -> None:
    rng = np.random.default_rng(depth)
    x, w = rng.integers(0, 256, (1, depth, 1, 1)).astype(np.uint8), rng.integers(-127, 128, (2, depth, 1, 1))
    found = convolution(x, 7, w, strides=(1, 1), pads=[(0, 0)] * 2, dilations=(1, 1), accumulator=64)
    wanted = (w[:, :, 0, 0] * (x[0, :, 0, 0].astype(np.int64) - 7)).sum(1)
    assert found.ravel().tolist() == wanted.tolist()
    assert found.dtype == kind_for(float(np.abs(w).sum((1, 2, 3)).max() * max(int(x.max()) - 7, 7)))


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_a_product_before_a_clip_inside_the_grid_returns_floats(op: str) -> None:
    """ONNX Runtime clips the floats of its integer kernel there."""
    draw = Draw(1)
    proto = OPERATORS[op](draw)
    graph, place = proto.graph, next(i for i, node in enumerate(proto.graph.node) if node.op_type == op)
    step = next(numpy_helper.to_array(t) for t in graph.initializer if t.name == "y_s")
    held = {"low": np.float32(-20) * step, "high": np.float32(30) * step}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(a, np.float32), name) for name, a in held.items())
    graph.node[place].output[0] = "before"
    graph.node.insert(place + 1, helper.make_node("Clip", ["before", "low", "high"], ["y"]))
    given = feeds(proto, draw)
    executor = CodeExecutor(ir.from_proto(proto), find_profile("ort_x64"))
    assert [kernel.quantizer for kernel in executor.kernels] == [None]
    (found,) = executor.run(given).values()
    (wanted,) = new_session(proto.SerializeToString(), session_options(entries=EXACT_SUMS)).run(None, given)
    np.testing.assert_array_equal(found, wanted)


def test_a_clip_at_the_end_of_the_grid_joins_the_kernel() -> None:
    """255 * float32(6 / 255) is 6 in float32, and beyond it in float64; ONNX Runtime takes the Clip away."""
    draw = Draw(0)
    proto = model("Relu", [("x", (1, 2, 4, 4), 0.1, 0, 1)], np.uint8, (np.float32(6 / 255), 0))
    graph = proto.graph
    weight = draw.weight(3, 2, 1, 1)
    held = {"w_q": weight, "w_s": np.float32(0.01), "w_z": np.int8(0), "low": np.float32(0), "high": np.float32(6)}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(a), name) for name, a in held.items())
    nodes = list(graph.node)
    place = next(i for i, node in enumerate(nodes) if node.op_type == "Relu")
    nodes[place : place + 1] = [
        helper.make_node("DequantizeLinear", ["w_q", "w_s", "w_z"], ["w"]),
        helper.make_node("Conv", ["x_d", "w"], ["c"]),
        helper.make_node("Clip", ["c", "low", "high"], ["y"]),
    ]
    del graph.node[:]
    graph.node.extend(nodes)
    x = np.random.default_rng(0).uniform(0, 25, (1, 2, 4, 4)).astype(np.float32)
    executor = CodeExecutor(ir.from_proto(proto), find_profile("ort_x64"))
    assert [kernel.node.op_type for kernel in executor.kernels] == ["Conv"]
    (wanted,) = new_session(proto.SerializeToString(), session_options(entries=EXACT_SUMS)).run(None, {"x": x})
    np.testing.assert_array_equal(executor.run({"x": x})["o"], wanted)
