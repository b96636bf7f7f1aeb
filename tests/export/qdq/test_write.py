"""The QDQ file holds what the simulation computed, in the form integer kernels recognise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bitwright.compare.runtime import optimized_types, run_model
from bitwright.core.graph.operators import resolve_granularity
from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat, parse_format
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.errors import BitwrightError, ConfigError, EncodingsError, ExportError
from bitwright.export.files.onnx_file import save_model
from bitwright.export.qdq.markers import rename_values, site_names, strip_sites
from bitwright.export.qdq.trace import find_constants
from bitwright.export.qdq.write import QdqResult, to_qdq
from tests.export.marked import Array, Graph, run_both, run_plain, simulate, types
from tests.support.cost import calls_left, steps
from tests.support.processes import python

RNG = np.random.default_rng(7)


def normal(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


def alone(
    fmt: str, data: Array, granularity: Any = None, symmetry: Any = "asymmetric", opset: int = 21
) -> tuple[ir.Model, Graph]:
    """A model that quantizes ``x`` and nothing else: Neg keeps the quantizer inside."""
    g = Graph()
    marked = g.mark(g.input("x", *data.shape), "x.site", fmt, data, granularity, symmetry)
    return g.model(g.op("Neg", marked, name="y"), opset=opset), g


def assert_same(model: ir.Model, g: Graph, feeds: dict[str, Array], result: QdqResult, **expected: Array) -> None:
    """The QDQ model gives the simulation's outputs bit for bit, in all three ways of running it."""
    wanted = expected or simulate(model, g.encodings, feeds)[1]
    for found in (
        *run_both(result.model, feeds).values(),
        dict(zip(wanted, run_plain(result.model, feeds), strict=True)),
    ):
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array)


# ------------------------------------------------------------------------------------ every form is exact

ACTIVATION_FORMATS = [
    *(f"{sign}int{bits}" for bits in (2, 3, 4, 5, 7, 8, 11, 16, 20, 32) for sign in ("", "u")),
    "int8n", "int4n", "int16n", "float8_e4m3", "float8_e5m2", "float4_e2m1", "float6_e2m3", "float6_e3m2", "float16", "bfloat16",
]  # fmt: skip


SEVERAL_SCALES = [
    "int8", "uint8", "uint5", "uint16", "int20", "int4", "float8_e4m3", "float4_e2m1"
]  # fmt: skip


@pytest.mark.parametrize("activation", ["unsigned", "as_is"])
@pytest.mark.parametrize("fmt", ACTIVATION_FORMATS)
def test_activation_is_bit_identical(fmt: str, activation: str) -> None:
    data = normal(3, 501) * 10
    model, g = alone(
        fmt, data * 0.7, symmetry="symmetric" if fmt.endswith("n") or fmt.startswith("f") else "asymmetric"
    )
    scale = float(g.encodings["x.site"].scale)
    data[0, :80] = (np.arange(80) - 40.5) * scale  # ties
    data[1, :4] = [np.inf, -np.inf, 3e38, -3e38]
    expected = -fake_quantize(data, g.encodings["x.site"])
    assert_same(model, g, {"x": data}, to_qdq(model, g.encodings, activation=activation), y=expected)  # type: ignore


@pytest.mark.parametrize("fmt", SEVERAL_SCALES)
@pytest.mark.parametrize("axis", [0, 1, -2])
def test_activation_per_channel_is_bit_identical(fmt: str, axis: int) -> None:
    data = normal(4, 6, 5) * np.float32([1, 10, 0.1, 3, 5, 7]).reshape(1, 6, 1)
    model, g = alone(fmt, data, PerChannel(axis), "symmetric" if fmt.startswith("f") else "asymmetric")
    assert_same(model, g, {"x": data}, to_qdq(model, g.encodings))


@pytest.mark.parametrize("fmt", SEVERAL_SCALES)
def test_activation_in_blocks_is_bit_identical(fmt: str) -> None:
    data = normal(2, 8, 3)
    model, g = alone(fmt, data, PerBlock(4, 1, 0), "symmetric" if fmt.startswith("f") else "asymmetric")
    assert_same(model, g, {"x": data}, to_qdq(model, g.encodings))


CONSTANT_CASES = [
    *((fmt, gran)
      for fmt in ("int2", "int4", "uint4", "int5", "int8", "int8n", "uint8", "int16", "int20", "int32")
      for gran in (PerTensor(), PerChannel(1), PerBlock(3, 1, 0))),
    *((fmt, gran) for fmt in ("float8_e4m3", "float8_e5m2", "float4_e2m1")
      for gran in (PerTensor(), PerChannel(0), PerBlock(3, 1, 0))),
    ("float16", PerTensor()), ("bfloat16", PerTensor()),
]  # fmt: skip


@pytest.mark.parametrize("activation", ["unsigned", "as_is"])
@pytest.mark.parametrize("shape", [(4, 6, 2, 3), (5, 9)], ids=["conv", "linear"])
@pytest.mark.parametrize(("fmt", "granularity"), CONSTANT_CASES, ids=str)
def test_constant_is_bit_identical(fmt, granularity, shape, activation):
    g = Graph()
    x, w = g.input("x", *shape), g.param("w", normal(*shape))
    symmetry = "symmetric" if fmt.endswith("n") or not fmt.startswith("u") else "asymmetric"
    assert w.const_value is not None
    marked = g.mark(w, "w", fmt, w.const_value.numpy() + 0.5, granularity, symmetry)
    model = g.model(g.op("Sub", x, marked, name="y"))
    assert_same(model, g, {"x": normal(*shape)}, to_qdq(model, g.encodings, activation=activation))  # type: ignore


def test_the_scale_and_zero_point_shapes_are_those_onnx_demands() -> None:
    g = Graph()
    x, w = g.input("x", 1, 8, 4, 4), g.param("w", (6, 8, 3, 3))
    model = g.model(g.op("Conv", x, g.weight(w, "int4", PerBlock(4, 1, 0)), name="y"))
    made = to_qdq(model, g.encodings).model.graph.initializers
    assert tuple(made["w_scale"].shape or ()) == (6, 2, 3, 3)
    assert made["w_q"].dtype == ir.DataType.INT4 and "w_zero_point" not in made


# ------------------------------------------------------------------------------------------ whole networks


def cnn(act: str = "uint8", weight: str = "int8", symmetry: str = "asymmetric") -> tuple[ir.Model, Graph]:
    """Conv, Relu, MaxPool, Flatten, Gemm."""
    g = Graph()
    x = g.mark(g.input("x", "batch", 3, 8, 8), "conv.input[0]", act, (-3, 3), None, symmetry)  # type: ignore
    w = g.weight(g.param("conv.weight", (4, 3, 3, 3)), weight, PerChannel(0))
    conv = g.op("Conv", x, w, g.param("conv.bias", (4,)), name="conv")
    r = g.mark(g.op("Relu", conv, name="relu"), "relu.output[0]", act, (0, 12), None, symmetry)  # type: ignore
    pooled = g.op("MaxPool", r, name="pool", kernel_shape=[2, 2], strides=[2, 2])
    flat = g.op("Flatten", pooled, name="flat")
    fw = g.weight(g.param("fc.weight", (5, 36)), weight, PerChannel(0))
    y = g.op("Gemm", flat, fw, g.param("fc.bias", (5,)), name="fc", transB=1)
    y = g.mark(y, "fc.output[0]", act, (-60, 60), None, symmetry, name="logits")  # type: ignore[arg-type]
    y.shape = ir.Shape(["batch", 5])
    return g.model(y), g


BIASES = {"conv.bias": ("conv.input[0]", "conv.weight"), "fc.bias": ("relu.output[0]", "fc.weight")}


@pytest.mark.parametrize(
    ("act", "weight", "symmetry", "activation"),
    [
        pytest.param("uint8", "int8", "asymmetric", "unsigned", id="u8s8"),
        pytest.param("int8", "int8", "symmetric", "unsigned", id="s8s8-unsigned"),
        pytest.param("int8", "int8", "symmetric", "as_is", id="s8s8-as-is"),
        pytest.param("uint8", "int4", "asymmetric", "unsigned", id="u8s4"),
        pytest.param("uint16", "int8", "asymmetric", "unsigned", id="u16s8"),
        pytest.param("uint4", "int4", "asymmetric", "unsigned", id="u4s4"),
        pytest.param("uint5", "int5", "asymmetric", "unsigned", id="5-bit"),
        pytest.param("int8n", "int8n", "strict_symmetric", "unsigned", id="narrow"),
    ],
)
def test_cnn_agrees_with_the_simulation_in_every_mode(act: str, weight: str, symmetry: str, activation: str) -> None:
    model, g = cnn(act, weight, symmetry)
    feeds = {"x": normal(4, 3, 8, 8)}
    expected = simulate(model, g.encodings, feeds, BIASES)[1]["logits"]
    result = to_qdq(model, g.encodings, activation=activation)  # type: ignore[arg-type]
    assert not result.notes
    step = float(g.encodings["fc.output[0]"].scale)
    for mode, found in run_both(result.model, feeds).items():
        # Both networks round float sums of their own order, so a code may differ by one here and there.
        assert np.abs(found["logits"] - expected).max() <= 1.01 * step * (1 + 6 * (act == "uint16")), mode
        assert (np.abs(found["logits"] - expected) > 0.5 * step).mean() <= 0.2, mode


def test_integer_kernels_engage_throughout() -> None:
    model, g = cnn()
    found = optimized_types(to_qdq(model, g.encodings).model)
    assert {"QLinearConv", "QGemm"} <= set(found.values())
    assert not {"Conv", "Relu", "Gemm", "FusedConv"} & set(found.values())


def test_weights_are_small_and_the_float_originals_are_gone(tmp_path: Path) -> None:
    model, g = cnn()
    made = to_qdq(model, g.encodings).model
    held = {name: v.dtype for name, v in made.graph.initializers.items()}
    assert held["conv.weight_q"] == ir.DataType.INT8 and held["conv.bias_q"] == ir.DataType.INT32
    assert "conv.weight" not in held and "conv.bias" not in held
    names = {v.name for node in made.graph for v in node.outputs}
    assert {"conv.weight", "conv.bias", "fc.weight", "fc.bias"} <= names
    (path,) = save_model(made, tmp_path / "cnn.onnx")
    onnx.checker.check_model(onnx.load(path), full_check=True)


def test_opset_ir_version_and_domains() -> None:
    model, g = cnn()
    made = to_qdq(model, g.encodings).model
    assert (made.opset_imports, made.ir_version) == ({"": 21}, 10)
    assert {node.domain for node in made.graph} == {""}


def test_the_caller_s_model_is_left_as_it_was() -> None:
    model, g = cnn()
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    for _ in range(2):
        to_qdq(model, g.encodings)
        strip_sites(model)
        rename_values(model, {"relu.output[0]": "renamed", "conv.weight": "w"})
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_graph_input_and_output_names_stay_and_sites_are_told() -> None:
    model, g = cnn()
    result = to_qdq(model, g.encodings)
    assert [v.name for v in result.model.graph.inputs] == ["x"]
    assert [v.name for v in result.model.graph.outputs] == ["logits"]
    assert result.tensors == {
        "conv.input[0]": ("x_dq",),
        "conv.weight": ("conv.weight",),
        "relu.output[0]": ("relu_dq",),
        "fc.weight": ("fc.weight",),
        "fc.output[0]": ("logits",),
    }


@pytest.mark.parametrize("group", [1, 2, 6], ids=["plain", "grouped", "depthwise"])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_convolutions_of_any_group(op: str, group: int) -> None:
    g = Graph()
    x = g.mark(g.input("x", 1, 6, 7, 7), "in", "uint8")
    shape = (12, 6 // group, 3, 3) if op == "Conv" else (6, 12 // group, 3, 3)
    granularity = resolve_granularity(op, {"group": group}, 1, PerChannel(), shape)
    w = g.weight(g.param("w", shape), "int8", granularity)
    y = g.mark(g.op(op, x, w, g.param("b", (12,)), group=group), "out", "uint8", (-40, 40), name="y")
    model, feeds = g.model(y), {"x": normal(1, 6, 7, 7)}
    result = to_qdq(model, g.encodings)
    assert not result.notes and result.model.graph.initializers["b_q"].dtype == ir.DataType.INT32
    expected = simulate(model, g.encodings, feeds, {"b": ("in", "w")})[1]["y"]
    for found in run_both(result.model, feeds).values():
        assert (found["y"] != expected).sum() <= 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_matmul_with_a_constant_on_either_side(side: str, granularity: str) -> None:
    g = Graph()
    x = g.mark(g.input("x", 6, 6), "in", "uint8")
    axis = 1 if side == "right" else 0
    w = g.weight(g.param("w", (6, 6)), "int8", PerChannel(axis) if granularity == "channel" else PerTensor())
    y = g.mark(g.op("MatMul", *((x, w) if side == "right" else (w, x))), "out", "uint8", (-20, 20), name="y")
    model, feeds = g.model(y), {"x": normal(6, 6)}
    expected = simulate(model, g.encodings, feeds)[1]["y"]
    result = to_qdq(model, g.encodings)
    for found in run_both(result.model, feeds).values():
        assert (found["y"] != expected).sum() <= 1
    if side == "right":
        assert {"QLinearMatMul", "MatMulIntegerToFloat"} & set(optimized_types(result.model).values())


def test_linear_layer_of_rank_three_becomes_integer() -> None:
    """torch writes it as MatMul with a transposed weight, and Add for the bias."""
    g = Graph()
    x = g.mark(g.input("x", 2, 5, 8), "in", "uint8")
    w = g.op("Transpose", g.weight(g.param("l.weight", (4, 8)), "int8", PerChannel(0)), perm=[1, 0])
    y = g.op("Add", g.op("MatMul", x, w), g.param("l.bias", (4,)))
    model, feeds = g.model(g.mark(y, "out", "uint8", (-20, 20), name="y")), {"x": normal(2, 5, 8)}
    result = to_qdq(model, g.encodings)
    assert "Transpose" not in types(result.model)
    made = result.model.graph.initializers
    assert tuple(made["l.weight_transposed_q"].shape or ()) == (8, 4)
    assert made["l.bias_q"].dtype == ir.DataType.INT32 and "l.weight" not in made
    assert result.tensors["l.weight"] == ("l.weight_transposed",)
    expected = simulate(model, g.encodings, feeds, {"l.bias": ("in", "l.weight")})[1]["y"]
    for found in run_both(result.model, feeds).values():
        assert (found["y"] != expected).sum() <= 1
    assert not {"MatMul", "Gemm"} & set(optimized_types(result.model).values())


@pytest.mark.parametrize("granularity", [PerChannel(0), PerBlock(4, 1, 0)], ids=["channel", "block"])
def test_a_transposed_weight_keeps_its_values(granularity: PerChannel | PerBlock) -> None:
    g = Graph()
    x, w = g.input("x", 3, 8), g.weight(g.param("w", (5, 8)), "int4", granularity)
    model, feeds = (g.model(g.op("MatMul", x, g.op("Transpose", w), name="y"), g.op("Identity", w, name="w_out")), {})
    feeds = {"x": np.eye(3, 8, dtype=np.float32)}
    result = to_qdq(model, g.encodings)
    expected = simulate(model, g.encodings, feeds)[1]
    np.testing.assert_array_equal(run_model(result.model, feeds, "float")["y"], expected["y"])
    np.testing.assert_array_equal(run_model(result.model, feeds, "float")["w_out"], expected["w_out"])


def test_one_weight_on_two_axes_and_one_grid_shared() -> None:
    g = Graph()
    x = g.input("x", 6, 6)
    w = g.param("w", (6, 6))
    rows, columns = (g.weight(w, "int8", PerChannel(axis), f"w@{axis}") for axis in (0, 1))
    again = g.weight(w, "int8", PerChannel(0), "w@again")
    y = [g.op("MatMul", x, v, name=f"y{i}") for i, v in enumerate((rows, columns, again))]
    model, feeds = g.model(*y), {"x": normal(6, 6)}
    result = to_qdq(model, g.encodings)
    stored = [n for n, v in result.model.graph.initializers.items() if v.dtype == ir.DataType.INT8]
    assert len([n for n in stored if n.startswith("w_q")]) == 2, "rows and again share their integers"
    for name, array in simulate(model, g.encodings, feeds)[1].items():
        np.testing.assert_allclose(run_model(result.model, feeds, "float")[name], array, rtol=1e-5, atol=1e-5)


def test_embedding_rows_are_exact() -> None:
    g = Graph()
    tokens = g.input("tokens", 2, 3, dtype=ir.DataType.INT64)
    table = g.weight(g.param("embedding.weight", (10, 4)), "int8", PerChannel(0))
    y = g.op("Gather", table, tokens, name="y")
    model = g.model(y)
    result = to_qdq(model, g.encodings)
    assert_same(model, g, {"tokens": np.array([[1, 2, 3], [0, 9, 9]])}, result)
    assert "QuantizeLinear" not in types(result.model)


def test_a_value_that_is_consumed_and_returned() -> None:
    g = Graph()
    hidden = g.mark(g.op("Relu", g.input("x", 2, 3), name="relu"), "relu.output[0]", name="hidden_output")
    y = g.mark(g.op("Neg", hidden, name="neg"), "neg.output[0]", "uint8", (-3, 0), name="hidden_output_1")
    model = g.model(hidden, y)
    result = to_qdq(model, g.encodings)
    assert [v.name for v in result.model.graph.outputs] == ["hidden_output", "hidden_output_1"]
    assert_same(model, g, {"x": normal(2, 3)}, result)


def test_look_alike_names_do_not_collide() -> None:
    g = Graph()
    x = g.input("hidden_output", 2, 3)
    a = g.op("Relu", x, name="hidden_output_q")
    b = g.mark(a, "a", name="hidden_output_dq")
    c = g.mark(g.op("Neg", b, name="hidden_output_scale"), "b", name="hidden_output_q_q")
    d = g.mark(x, "c", "int8", name="hidden_output_1")
    model = g.model(c, d)
    result = to_qdq(model, g.encodings)
    everything = [str(v.name) for n in result.model.graph for v in n.outputs]
    everything += [*result.model.graph.initializers, "hidden_output"]
    assert len(everything) == len(set(everything))
    assert [v.name for v in result.model.graph.outputs] == ["hidden_output_q_q", "hidden_output_1"]
    assert_same(model, g, {"hidden_output": normal(2, 3)}, result)


def test_graph_input_that_is_returned_and_quantized_twice() -> None:
    g = Graph()
    x = g.input("x", 4)
    outs = [g.mark(x, "a", name="y0"), g.mark(x, "b", name="y1"), g.mark(x, "c", "int4", name="y2")]
    model = g.model(*outs, x)
    result = to_qdq(model, g.encodings)
    assert [v.name for v in result.model.graph.outputs] == ["y0", "y1", "y2", "x"]
    assert_same(model, g, {"x": normal(4)}, result)


def test_same_grid_twice_is_one_pair() -> None:
    g = Graph()
    x = g.input("x", 4)
    first, second = g.mark(x, "a"), g.mark(x, "b")
    nested = g.mark(first, "c")
    model = g.model(g.op("Add", second, nested, name="y"))
    result = to_qdq(model, g.encodings)
    assert types(result.model) == ["QuantizeLinear", "DequantizeLinear", "Add"]
    assert set(result.tensors.values()) == {("x_dq",)}
    assert_same(model, g, {"x": normal(4)}, result)


def test_a_site_that_runs_several_times_is_told_with_every_tensor() -> None:
    g = Graph()
    h = g.input("x", 4)
    for step in range(3):
        h = g.mark(g.op("Tanh", h, name=f"tanh_{step}"), "cell.tanh.output[0]", "uint8", (-1, 1))
    model = g.model(g.op("Neg", h, name="y"))
    result = to_qdq(model, g.encodings)
    assert result.tensors == {"cell.tanh.output[0]": ("tanh_0_dq", "tanh_1_dq", "tanh_2_dq")}
    assert strip_sites(model).tensors == {"cell.tanh.output[0]": ("tanh_0", "tanh_1", "tanh_2")}


# ------------------------------------------------------------------------------- operators that move data


def sub(g: Graph, name: str, *numbers: int) -> ir.Value:
    return g.param(name, np.array(numbers))


MOVERS: dict[str, Callable[[Graph, ir.Value], ir.Value]] = {
    "Identity": lambda g, v: g.op("Identity", v),
    "MaxPool": lambda g, v: g.op("MaxPool", v, kernel_shape=[2, 2]),
    "MaxPool-padded": lambda g, v: g.op("MaxPool", v, kernel_shape=[2, 2], pads=[1, 1, 1, 1]),
    "GlobalMaxPool": lambda g, v: g.op("GlobalMaxPool", v),
    "Transpose": lambda g, v: g.op("Transpose", v, perm=[0, 2, 3, 1]),
    "Reshape": lambda g, v: g.op("Reshape", v, sub(g, "shape", 2, -1)),
    "Flatten": lambda g, v: g.op("Flatten", v),
    "Squeeze": lambda g, v: g.op("Squeeze", g.op("Unsqueeze", v, sub(g, "axes", 0)), sub(g, "axes2", 0)),
    "Unsqueeze": lambda g, v: g.op("Unsqueeze", v, sub(g, "axes", 0)),
    "Slice": lambda g, v: g.op("Slice", v, sub(g, "st", 0), sub(g, "en", 3), sub(g, "ax", 1)),
    "Gather": lambda g, v: g.op("Gather", v, sub(g, "index", 0, 1), axis=1),
    "DepthToSpace": lambda g, v: g.op("DepthToSpace", v, blocksize=2),
    "SpaceToDepth": lambda g, v: g.op("SpaceToDepth", v, blocksize=2),
    "Pad": lambda g, v: g.op("Pad", v, sub(g, "pads", 0, 0, 1, 1, 0, 0, 1, 1)),
    "Pad-reflect": lambda g, v: g.op("Pad", v, sub(g, "pads", 0, 0, 1, 1, 0, 0, 1, 1), mode="reflect"),
    "Expand": lambda g, v: g.op("Expand", v, sub(g, "shape", 2, 4, 6, 6)),
    "Tile": lambda g, v: g.op("Tile", v, sub(g, "repeats", 1, 1, 2, 2)),
    "ReduceMax": lambda g, v: g.op("ReduceMax", v),
    "Resize-nearest": lambda g, v: g.op("Resize", v, None, g.param("scales", np.float32([1, 1, 2, 2])), mode="nearest"),
    "Concat": lambda g, v: g.op("Concat", v, v, axis=1),
    "Where": lambda g, v: g.op("Where", g.param("mask", np.array([True, False, True, False, True, True])), v, v),
    "Split": lambda g, v: g.op("Split", v, axis=1, num_outputs=2, outputs=2),
}


@pytest.mark.parametrize(
    ("fmt", "symmetry", "activation"),
    [
        pytest.param("uint8", "asymmetric", "unsigned", id="uint8"),
        pytest.param("int8", "symmetric", "as_is", id="int8-as-is"),
        pytest.param("uint16", "asymmetric", "unsigned", id="uint16"),
        pytest.param("uint4", "asymmetric", "unsigned", id="uint4"),
        pytest.param("uint5", "asymmetric", "unsigned", id="uint5"),
        pytest.param("float8_e4m3", "symmetric", "unsigned", id="float8"),
    ],
)
@pytest.mark.parametrize("name", MOVERS)
def test_data_movement_changes_no_bit_and_loads(name: str, fmt: str, symmetry: str, activation: str) -> None:
    g = Graph()
    data = normal(2, 4, 6, 6)
    inside = g.mark(g.op("Neg", g.input("x", 2, 4, 6, 6)), "neg.output[0]", fmt, data, None, symmetry)  # type: ignore
    moved = MOVERS[name](g, inside)
    model = g.model(g.op("Add", moved, moved, name="y"), g.op("Relu", inside, name="z"))
    result = to_qdq(model, g.encodings, activation=activation)  # type: ignore[arg-type]
    assert_same(model, g, {"x": data}, result)
    if fmt not in ("uint4", "float8_e4m3"):
        assert types(result.model).count("QuantizeLinear") == 2 + (name == "Squeeze")


def test_a_chain_of_moves_has_a_pair_behind_each_and_keeps_the_output_name() -> None:
    g = Graph()
    v = g.mark(g.input("x", 2, 4, 6, 6), "in")
    v = g.op("Transpose", g.op("MaxPool", v, kernel_shape=[2, 2]), perm=[0, 2, 3, 1])
    y = g.op("Flatten", v, name="features")
    model = g.model(y)
    result = to_qdq(model, g.encodings)
    assert types(result.model).count("DequantizeLinear") == 4
    assert [v.name for v in result.model.graph.outputs] == ["features"]
    last = result.model.graph.outputs[0].producer()
    assert last is not None and last.op_type == "DequantizeLinear"
    assert_same(model, g, {"x": normal(2, 4, 6, 6)}, result)


@pytest.mark.parametrize("name", ["Pad-ones", "Pad-unknown", "Resize-linear", "Concat-unequal", "Col2Im-like"])
def test_what_computes_gets_no_pair(name: str) -> None:
    g = Graph()
    x = g.input("x", 1, 1, 4, 4)
    v = g.mark(g.op("Neg", x), "neg")
    pads = sub(g, "pads", 0, 0, 1, 1, 0, 0, 1, 1)
    moved = {
        "Pad-ones": lambda: g.op("Pad", v, pads, g.param("one", np.array(1, np.float32))),
        "Pad-unknown": lambda: g.op("Pad", v, pads, g.op("ReduceMin", x, keepdims=0)),
        "Resize-linear": lambda: g.op("Resize", v, None, g.param("s", np.float32([1, 1, 2, 2])), mode="linear"),
        "Concat-unequal": lambda: g.op("Concat", v, g.mark(x, "other", "uint8", (-1, 1)), axis=1),
        "Col2Im-like": lambda: g.op("AveragePool", v, kernel_shape=[2, 2]),
    }[name]()
    model = g.model(g.op("Neg", moved, name="y"))
    result, feeds = to_qdq(model, g.encodings), {"x": normal(1, 1, 4, 4)}
    assert types(result.model).count("QuantizeLinear") == len(g.encodings)
    expected = simulate(model, g.encodings, feeds)[1]["y"]
    np.testing.assert_allclose(run_both(result.model, feeds)["integer"]["y"], expected, atol=1e-6)


@pytest.mark.parametrize("maker", ["Relu", "Clip"])
@pytest.mark.parametrize("fmt", ["uint4", "int4", "uint8", "uint16", "uint5", "float8_e4m3", "float16"])
def test_an_activation_before_the_quantizer_is_not_lost(maker: str, fmt: str) -> None:
    """ONNX Runtime drops Relu before 4-bit and float8 QuantizeLinear whatever the zero point."""
    g = Graph()
    x = g.input("x", 64)
    ends = [g.param("lo", np.array(0, np.float32)), g.param("hi", np.array(2, np.float32))]
    v = g.op(maker, x, *(ends if maker == "Clip" else ()))
    v = g.mark(v, "out", fmt, (-3, 3), None, "symmetric" if fmt.startswith("f") else "asymmetric")
    model = g.model(g.op("Neg", v, name="y"))
    assert_same(model, g, {"x": normal(64)}, to_qdq(model, g.encodings))


@pytest.mark.parametrize("target", ["packed", "ort_cpu"])
@pytest.mark.parametrize("weight", ["int8", "int4"])
@pytest.mark.parametrize("fmt", ["uint4", "int4", "uint5", "float8_e4m3"])
def test_a_convolution_between_two_narrow_grids_loads(fmt: str, weight: str, target: str) -> None:
    """ONNX Runtime makes QLinearConv of one between grids of any type that 8-bit weights stand beside, and has none of 4 bits."""
    g = Graph()
    symmetry: Any = "symmetric" if fmt.startswith("f") else "asymmetric"
    x = g.mark(g.op("Neg", g.input("x", 1, 3, 6, 6)), "x", fmt, (-3, 3), None, symmetry)
    w = g.weight(g.param("w", normal(4, 3, 3, 3)), weight, PerChannel(0))
    y = g.mark(g.op("Conv", x, w), "y", fmt, (-9, 9), None, symmetry)
    model, feeds = g.model(g.op("Neg", y, name="z")), {"x": normal(1, 3, 6, 6)}
    expected = simulate(model, g.encodings, feeds)[1]["z"]
    for mode, found in run_both(to_qdq(model, g.encodings, target=target).model, feeds).items():
        assert (found["z"] != expected).mean() < 0.02, mode


@pytest.mark.parametrize("fmt", ["float8_e4m3", "float8_e5m2"])
def test_float8_is_limited_before_it_is_cast(fmt: str) -> None:
    """ONNX Runtime's Cast saturates by itself; a runtime whose Cast does not makes NaN or infinity."""
    g = Graph()
    v = g.mark(g.op("Relu", g.input("x", 64)), "out", fmt, (-3, 3), None, "symmetric")
    result = to_qdq(g.model(g.op("Neg", v, name="y")), g.encodings).model
    (cast,) = (node for node in result.graph if node.op_type == "Cast" and "FLOAT8" in str(node.outputs[0].dtype))
    clip = cast.inputs[0].producer()
    assert clip is not None and clip.op_type == "Clip"
    low, high = (end.const_value.numpy() for end in clip.inputs[1:])
    assert -low == high == parse_format(fmt).max


# ---------------------------------------------------------------- several scales beside integer kernels

MISREADERS: dict[str, Callable[[Graph, ir.Value, ir.Value], ir.Value]] = {
    "Conv": lambda g, x, w: g.op("Conv", x, w),
    "Gemm": lambda g, x, w: g.op("Gemm", g.op("Flatten", x), g.op("Flatten", w), transB=1),
    "MatMul-right": lambda g, x, w: g.op("MatMul", x, w),
    "MatMul-left": lambda g, x, w: g.op("MatMul", w, x),
    "Add": lambda g, x, w: g.op("Add", x, w),
    "Mul": lambda g, x, w: g.op("Mul", w, x),
    "Concat": lambda g, x, w: g.op("Concat", x, w, axis=0),
    "ConvTranspose": lambda g, x, w: g.op("ConvTranspose", x, w),
}


@pytest.mark.parametrize("activation", ["unsigned", "as_is"])
@pytest.mark.parametrize(
    "granularity",
    [PerChannel(0), PerChannel(1), PerChannel(-1), PerBlock(2, 1, 0), PerBlock(2, 0, 1), PerBlock(2, 2, 3)],
    ids=str,
)
@pytest.mark.parametrize("where", ["weight", "input", "output"])
@pytest.mark.parametrize("name", MISREADERS)
def test_no_integer_kernel_takes_several_scales_for_one(name, where, granularity, activation):
    fmt, symmetry = ("uint8", "asymmetric") if activation == "unsigned" else ("int8", "symmetric")
    g = Graph()
    spread = np.linspace(0.1, 3, 4, dtype=np.float32)
    data = normal(4, 4, 4, 4) * spread * spread.reshape(4, 1, 1, 1)
    several = {key: granularity if key == where else PerTensor() for key in ("weight", "input", "output")}
    x = g.mark(g.input("x", 4, 4, 4, 4), "x", fmt, data, several["input"], symmetry)  # type: ignore[arg-type]
    y = MISREADERS[name](g, x, g.weight(g.param("w", data[::-1].copy()), "int8", several["weight"]))
    if where == "output":
        y = g.op("Relu", g.op("Add", x, x))
        y.shape = ir.Shape(data.shape)
    y = g.mark(y, "y", fmt, 2 * data if where == "output" else (-90, 90), several["output"], symmetry, "y")  # type: ignore
    model = g.model(y)
    expected = simulate(model, g.encodings, {"x": data})[1]["y"]
    step = float(g.encodings["y"].scale.max())
    result = to_qdq(model, g.encodings, activation=activation)  # type: ignore[arg-type]
    for found in run_both(result.model, {"x": data}).values():
        assert np.abs(found["y"] - expected).max() <= 1.01 * step
        assert (np.abs(found["y"] - expected) > 0.5 * step).mean() < 0.01


# -------------------------------------------------------------------------------------------------- biases


def test_a_bias_that_would_overflow_raises_the_weight_scale() -> None:
    g = Graph()
    x = g.mark(g.input("x", 1, 2, 4, 4), "in", "uint8", (-3, 3))
    weight = normal(3, 2, 1, 1)
    weight[1] *= 1e-14
    w = g.weight(g.param("w", weight), "int8", PerChannel(0))
    b = g.param("b", np.float32([1, -2, 0.5]))
    model = g.model(g.mark(g.op("Conv", x, w, b), "out", "uint8", (-9, 9), name="y"))
    result = to_qdq(model, g.encodings)
    assert [note.kind for note in result.notes] == ["raised scale"] and set(result.raised) == {"w"}
    raised = result.raised["w"].scale
    given = g.encodings["w"].scale
    assert raised[1] > given[1] and (raised[[0, 2]] == given[[0, 2]]).all()
    g.encodings.update(result.raised)
    feeds = {"x": normal(1, 2, 4, 4)}
    expected = simulate(model, g.encodings, feeds, {"b": ("in", "w")})[1]["y"]
    for found in run_both(result.model, feeds).values():
        assert np.abs(found["y"] - expected).max() <= 1.01 * float(g.encodings["out"].scale)
    assert not to_qdq(model, g.encodings).notes, "the raised encoding is stable"


def test_a_marked_bias_is_written_on_the_derived_grid_and_keeps_its_site() -> None:
    g = Graph()
    x = g.mark(g.input("x", 2, 4), "in")
    w, b = g.weight(g.param("w", (3, 4)), "int8", PerChannel(0)), g.param("b", (3,))
    g.encodings["b"] = Encoding(IntFormat(32), np.full(3, 1e-3), np.zeros(3), PerChannel(0))
    model = g.model(g.op("Gemm", x, w, g.site(b, "b"), transB=1, name="y"))
    result = to_qdq(model, g.encodings)
    assert result.tensors["b"] == ("b",) and "Site" not in types(result.model)
    assert [(n.site, n.kind) for n in result.notes] == [("b", "replaced bias")]
    assert [n.kind for n in to_qdq(model, g.encodings, bias="float").notes] == ["float bias"]
    assert "b" in to_qdq(model, g.encodings, bias="float").model.graph.initializers


def test_only_marked_biases_on_request() -> None:
    g = Graph()
    x = g.mark(g.input("x", 2, 4), "in")
    w = g.weight(g.param("w", (3, 4)), "int8", PerChannel(0))
    g.encodings["a"] = Encoding(IntFormat(32), np.full(3, 1e-3), np.zeros(3), PerChannel(0))
    a, b = g.site(g.param("a", (3,)), "a"), g.param("b", (3,))
    model = g.model(*(g.op("Gemm", x, w, v, transB=1, name=f"y_{i}") for i, v in enumerate((a, b))))
    made = to_qdq(model, g.encodings, bias="marked").model.graph.initializers
    assert "a_q" in made and "a" not in made and "b" in made and "b_q" not in made


def test_bias_shared_by_two_layers_gets_two_grids() -> None:
    g = Graph()
    x = g.input("x", 2, 4)
    b = g.param("b", (4,))
    w = [g.weight(g.param(f"w{i}", (4, 4)), "int8", PerChannel(0)) for i in range(2)]
    h = g.mark(g.op("Gemm", g.mark(x, "in"), w[0], b, transB=1), "mid", "uint8", (-9, 9))
    model = g.model(g.op("Gemm", h, w[1], b, transB=1, name="y"))
    made = to_qdq(model, g.encodings).model.graph.initializers
    assert [n for n, v in made.items() if v.dtype == ir.DataType.INT32] == ["b_q", "b_q_1"] and "b" not in made


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param({"axis": 1}, "one scale per index of axis 1", id="wrong-axis"),
        pytest.param({"alpha": 0.5}, "alpha or beta", id="alpha"),
        pytest.param({"bias": (2, 3)}, r"its shape \(2, 3\)", id="bias-shape"),
        pytest.param({"act": "float16"}, "not on an integer grid", id="float-input"),
        pytest.param({"weight": "int16"}, "more than 8", id="wide-weight"),
    ],
)
def test_a_bias_without_int32_form_stays_float_and_says_why(change: dict[str, object], problem: str) -> None:
    g = Graph()
    x = g.mark(g.input("x", 2, 3), "in", str(change.get("act", "uint8")), (-3, 3), None, "symmetric")
    w = g.weight(g.param("w", (3, 3)), str(change.get("weight", "int8")), PerChannel(change.get("axis", 0)))  # type: ignore
    b = g.param("b", change.get("bias", (3,)))  # type: ignore[arg-type]
    model = g.model(g.op("Gemm", x, w, b, transB=1, alpha=float(change.get("alpha", 1)), name="y"))  # type: ignore
    result = to_qdq(model, g.encodings)
    note, *others = result.notes
    assert (note.site, note.kind) == ("b", "float bias")
    assert re.search(problem, note.text)
    # a product of float activations is kept apart from its weight, which is said
    assert [other.kind for other in others] == ["float product"] * ("act" in change)
    made = result.model.graph.initializers
    # of a weight with more than 8 bits ONNX Runtime would put it on a grid of its own choice
    assert "b_q" in made if "weight" in change else "b" in made


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "Gemm", "MatMul"])
@pytest.mark.parametrize(("act", "weight"), [("uint16", "int16"), ("int16", "int12"), ("uint8", "int16")])
def test_a_float_bias_is_exact_where_a_grid_of_int32_cannot_hold_it(op: str, act: str, weight: str) -> None:
    """ONNX Runtime divides it by the scales of input and weight: 16 bits each leave 2 ** 31 for a bias of half their ranges."""
    g, data = Graph(), normal(2, 4, 6, 6) if op.startswith("Conv") else normal(5, 4)
    x = g.mark(g.input("x", *data.shape), "in", act, (-4, 4))
    small = g.param("w", {"Conv": (4, 4, 3, 3), "ConvTranspose": (4, 4, 2, 2)}.get(op, (4, 4)))
    bias = np.float32([1e6, -3.7e-3, 2.0**-120, 1 / 3])
    w = g.weight(small, weight, PerChannel({"ConvTranspose": 1, "MatMul": 1}.get(op, 0)))
    if op == "MatMul":
        y = g.op("Add", g.op("MatMul", x, w), g.param("b", bias))
    else:
        y = g.op(op, x, w, g.param("b", bias), **({"transB": 1} if op == "Gemm" else {}))
    model = g.model(g.mark(y, "out", "uint16", (-5e5, 1.5e6), name="y"))
    result = to_qdq(model, g.encodings, target="ort_cpu")
    made = {str(node.inputs[0].name): node for node in result.model.graph if node.op_type == "DequantizeLinear"}["b_q"]
    codes, scale = (np.asarray(value.const_value.numpy()) for value in made.inputs[:2])
    assert np.array_equal(codes * scale, bias) and codes.dtype == np.int32
    assert_same(model, g, {"x": data}, result)


def test_a_float_weight_behind_a_quantized_input_is_pointed_out() -> None:
    g = Graph()
    x = g.mark(g.input("x", 2, 3), "in")
    model = g.model(g.op("Gemm", x, g.param("w", (3, 3)), name="y"))
    (note,) = to_qdq(model, g.encodings).notes
    assert (note.site, note.kind) == ("w", "float weight") and "by default quantizes float weights" in note.text


@pytest.mark.parametrize("between", [None, "Identity", "Transpose"])
def test_a_grid_after_another_keeps_its_codes_in_a_default_session(between: str | None) -> None:
    """ONNX Runtime makes one pair of two in a row, on the part of the range that both hold: 51 dB from either."""
    g, data = Graph(), normal(2, 3, 4)
    first = g.mark(g.op("Abs", g.input("x", 2, 3, 4)), "first", "uint8", (-0.28, 3.63))
    moved = g.op(between, first) if between else first
    again = g.mark(moved, "again", "uint8", (-0.28, 3.63))  # the same grid: nothing to keep
    model = g.model(g.op("Neg", g.mark(again, "second", "uint8", (-0.277, 3.44)), name="y"))
    result = to_qdq(model, g.encodings, target="ort_cpu")
    assert types(result.model).count("Sum") == 1
    assert_same(model, g, {"x": data}, result)


# ------------------------------------------------------------------------------------- odd but legal graphs


def test_computed_weights_are_evaluated_once_and_stored() -> None:
    """Weight normalisation: g * v / |v| is computed in the graph."""
    g = Graph()
    v, gain = g.param("v", (4, 6)), g.param("g", (4, 1))
    norm = g.op("ReduceL2", v, g.param("axes", np.array([1])))
    w = g.op("Div", g.op("Mul", v, gain), norm, name="l.weight")
    twin = Graph()  # the same parameters, evaluated alone
    v2, gain2 = twin.param("v", (4, 6)), twin.param("g", (4, 1))
    norm2 = twin.op("ReduceL2", v2, twin.param("axes", np.array([1])))
    array = run_plain(twin.model(twin.op("Div", twin.op("Mul", v2, gain2), norm2)), {})[0]
    x = g.input("x", 2, 6)
    model = g.model(
        g.op("Gemm", x, g.mark(w, "l.weight", "int8", array, PerChannel(0), "symmetric"), transB=1, name="y")
    )
    result = to_qdq(model, g.encodings)
    # the Reshape keeps a product of float activations in float
    assert types(result.model) == ["DequantizeLinear", "Reshape", "Gemm"]
    assert not {"v", "g", "axes"} & set(result.model.graph.initializers)
    assert result.tensors["l.weight"] == ("l.weight",)


def test_constant_nodes_count_as_constants() -> None:
    g = Graph()
    c = g.op("Constant", value=ir.tensor(normal(3), name="c"))
    model = g.model(g.op("Add", g.input("x", 3), g.mark(c, "c", "int8", (-3, 3)), name="y"))
    result = to_qdq(model, g.encodings)
    assert types(result.model) == ["DequantizeLinear", "Add"]
    assert_same(model, g, {"x": normal(3)}, result)


@pytest.mark.parametrize("kind", [ir.DataType.BFLOAT16, ir.DataType.FLOAT16], ids=["bfloat16", "float16"])
def test_half_constants_are_widened_one_by_one(kind: ir.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are only cast to float32 no session computes them all at once."""
    monkeypatch.setattr("bitwright.export.qdq.trace.new_session", lambda *_: pytest.fail("a session was opened"))
    g = Graph()
    values = normal(4, 4).astype(kind.numpy())
    half = g.param("w", values)
    wide = g.op("Cast", half, to=int(ir.DataType.FLOAT))
    model = g.model(g.op("MatMul", g.input("x", 3, 4), g.mark(wide, "w", "int8", (-3, 3)), name="y"))
    found = find_constants(model)[wide]
    assert found.dtype == ir.DataType.FLOAT and np.array_equal(found.numpy(), values.astype(np.float32))
    assert "Cast" not in types(to_qdq(model, g.encodings).model)


def test_weight_read_in_float_too_keeps_its_float_original() -> None:
    g = Graph()
    w = g.param("w", (3, 3))
    x = g.input("x", 3, 3)
    model = g.model(g.op("MatMul", x, g.weight(w), name="y"), g.op("Add", x, w, name="z"))
    result = to_qdq(model, g.encodings)
    assert "w" in result.model.graph.initializers and result.tensors == {"w": ("w_dq",)}


def test_overridable_initializer_stays_a_graph_input() -> None:
    g = Graph()
    w = g.param("w", (3,))
    g.inputs.append(w)
    model = g.model(g.op("Add", g.input("x", 3), g.mark(w, "w"), name="y"))
    result = to_qdq(model, g.encodings)
    feeds = {"x": normal(3), "w": np.float32([9, -9, 1])}
    np.testing.assert_array_equal(
        run_plain(result.model, feeds)[0], feeds["x"] + fake_quantize(feeds["w"], g.encodings["w"])
    )


def test_half_models_are_quantized_in_float32() -> None:
    g = Graph()
    x = g.input("x", 4, 6, dtype=ir.DataType.FLOAT16)
    w = g.param("w", normal(5, 6).astype(np.float16))
    assert w.const_value is not None
    marked = g.mark(w, "w", "int8", w.const_value.numpy(), PerChannel(0), "symmetric")
    total = g.op("Concat", g.mark(x, "x"), marked, axis=0, name="y")
    total.type = ir.TensorType(ir.DataType.FLOAT16)
    model, data = g.model(total), normal(4, 6).astype(np.float16)
    for found in run_both(to_qdq(model, g.encodings).model, {"x": data}).values():
        np.testing.assert_array_equal(found["y"][:4], fake_quantize(data, g.encodings["x"]))
        np.testing.assert_array_equal(found["y"][4:], fake_quantize(w.const_value.numpy(), g.encodings["w"]))


def branches() -> tuple[ir.Model, Graph]:
    """If: both bodies read an outer value through a marker of their own and hold a weight."""
    g = Graph()
    x, gate = g.input("x", 3, 3), g.input("gate", dtype=ir.DataType.BOOL)
    bodies = []
    for name in ("then", "else"):
        body = Graph(seed=len(name))
        w = body.param(f"w_{name}", (3, 3))
        marked = body.mark(x, "x")
        out = body.op("MatMul", marked, body.weight(w, site=f"w_{name}"), name=f"out_{name}")
        g.encodings.update(body.encodings)
        bodies.append(ir.Graph([], [out], nodes=body.nodes, initializers=body.initializers, name=name))
    node = ir.node("If", [gate], {"then_branch": bodies[0], "else_branch": bodies[1]}, name="if")
    g.nodes.append(node)
    node.outputs[0].name = "y"
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    return g.model(node.outputs[0]), g


def test_markers_inside_branches() -> None:
    model, g = branches()
    result = to_qdq(model, g.encodings)
    assert result.tensors["x"] == ("x_dq", "x_dq_1") and site_names(model) == ["x", "w_then", "w_else"]
    x = normal(3, 3)
    for gate in (True, False):
        name = "w_then" if gate else "w_else"
        w = next(v for graph in model.graphs() for v in graph.initializers.values() if v.name == name)
        assert w.const_value is not None
        expected = fake_quantize(x, g.encodings["x"]) @ fake_quantize(w.const_value.numpy(), g.encodings[name])
        for found in run_both(result.model, {"x": x, "gate": np.array(gate)}).values():
            np.testing.assert_allclose(found["y"], expected, atol=1e-5)
    assert strip_sites(model).tensors == {"x": ("x", "x"), "w_then": ("w_then",), "w_else": ("w_else",)}


def test_markers_inside_functions_are_inlined() -> None:
    inner = Graph()
    value = ir.Value(name="a")
    out = inner.mark(value, "f.site")
    body = ir.Graph([value], [out], nodes=inner.nodes, opset_imports={"": 21, "bitwright": 1}, name="body")
    function = ir.Function("local", "F", graph=body, attributes=[])
    g = Graph()
    x = g.input("x", 3)
    node = ir.Node("local", "F", [x], name="call")
    g.nodes.append(node)
    node.outputs[0].name = "f"
    model = g.model(g.op("Neg", node.outputs[0], name="y"))
    model.functions[function.identifier()] = function
    model.graph.opset_imports["local"] = 1
    result = to_qdq(model, inner.encodings)
    assert types(result.model) == ["QuantizeLinear", "DequantizeLinear", "Neg"]


def test_strip_keeps_names_and_outputs() -> None:
    g = Graph()
    x = g.input("x", 3)
    a = g.site(g.op("Relu", x, name="relu"), "a", "y")
    b = g.site(a, "b", "z")
    model = g.model(a, b, g.site(x, "c", "x_out"))
    stripped = strip_sites(model)
    assert types(stripped.model) == ["Relu", "Identity", "Identity"]
    assert [v.name for v in stripped.model.graph.outputs] == ["y", "z", "x_out"]
    assert stripped.tensors == {"a": ("y",), "b": ("y",), "c": ("x",)}
    data = normal(3)
    relu = np.maximum(data, 0)
    for found, expected in zip(run_plain(stripped.model, {"x": data}), (relu, relu, data), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_renaming_gives_unique_names_and_leaves_inputs_outputs_and_parameters() -> None:
    g = Graph()
    x = g.input("x", 3)
    a = g.op("Relu", x, name="node_1")
    b = g.op("Neg", g.site(a, "relu.output[0]"), name="relu_output")
    w = g.param("w", (3,))
    y = g.op("Add", g.site(b, "neg.output[0]"), g.site(w, "w"), name="sum")
    model = g.model(g.site(y, "add.output[0]", "y"), g.site(x, "x.site", "x_out"))
    names = {"relu.output[0]": "relu_output", "neg.output[0]": "relu_output", "w": "v", "x.site": "v"}
    renamed = rename_values(model, {**names, "add.output[0]": "total"})
    assert strip_sites(renamed).tensors == {
        "relu.output[0]": ("relu_output_1",),
        "neg.output[0]": ("relu_output",),
        "w": ("w",),
        "add.output[0]": ("y",),
        "x.site": ("x",),
    }


# --------------------------------------------------------------------------------------- saving, size, time


@pytest.mark.parametrize("external", [False, True])
def test_saved_model_runs_and_leaves_nothing_else(tmp_path: Path, external: bool) -> None:
    model, g = cnn()
    made = to_qdq(model, g.encodings).model
    written = save_model(made, tmp_path / "net.onnx", external=external)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in written)
    assert (tmp_path / "net.onnx.data").exists() == external
    feeds = {"x": normal(1, 3, 8, 8)}
    again = run_model(ir.load(tmp_path / "net.onnx"), feeds, "integer")
    np.testing.assert_array_equal(again["logits"], run_model(made, feeds, "integer")["logits"])


def test_saving_to_a_missing_folder_names_it(tmp_path: Path) -> None:
    model, _ = cnn()
    with pytest.raises(ExportError, match=r"no such file or folder.*create the folder first"):
        save_model(model, tmp_path / "missing" / "net.onnx")


def long_chain(length: int) -> tuple[ir.Model, Graph]:
    """Reshape, Transpose and Relu in turn, every third value marked."""
    g = Graph()
    v = g.input("x", 2, 2)
    shape = sub(g, "shape", 2, 2)
    for i in range(length // 4):
        v = g.mark(g.op("Relu", v, name=f"relu_{i}"), f"relu_{i}", "uint8", (0, 3))
        v = g.op("Transpose", g.op("Reshape", v, shape, name=f"reshape_{i}"), perm=[1, 0], name=f"transpose_{i}")
    return g.model(v), g


def test_more_nodes_than_calls_are_allowed_at_linear_cost_without_recursion() -> None:
    def cost(length: int) -> int:
        model, g = long_chain(length)
        return steps(lambda: (strip_sites(model), to_qdq(model, g.encodings)))

    with calls_left(170):
        cost(40)
        assert cost(640) <= 4 * cost(160)
        model, g = long_chain(1_000)
        assert len(strip_sites(model).model.graph) == 750
        assert len(to_qdq(model, g.encodings).model.graph) == 2_250


# -------------------------------------------------------------------------------------------------- errors


def error_of(call: Callable[[], object]) -> BitwrightError:
    with pytest.raises(BitwrightError) as caught:
        call()
    return caught.value


def test_unknown_options_are_refused() -> None:
    model, g = cnn()
    error = error_of(lambda: to_qdq(model, g.encodings, bias="int8"))  # type: ignore[arg-type]
    assert isinstance(error, ConfigError) and "'int32', 'marked', 'float'" in error.remedy
    error = error_of(lambda: to_qdq(model, g.encodings, activation="unsignd"))  # type: ignore[arg-type]
    assert "did you mean 'unsigned'" in error.problem


def test_sites_without_encoding_and_encodings_without_site_are_noted() -> None:
    model, g = cnn()
    g.encodings["relu.outputs[0]"] = g.encodings.pop("relu.output[0]")
    notes = {note.kind: note for note in to_qdq(model, g.encodings).notes}
    assert notes["float site"].site == "relu.output[0]"
    assert notes["no place"].site == "relu.outputs[0]" and "did you mean" in notes["no place"].text


def test_wrong_scale_shape_names_the_site_and_both_shapes() -> None:
    model, g = cnn()
    g.encodings["conv.weight"] = Encoding(IntFormat(8), np.ones(3), np.zeros(3), PerChannel(0))
    error = error_of(lambda: to_qdq(model, g.encodings, bias="float"))
    assert isinstance(error, EncodingsError) and error.site == "conv.weight"
    assert "scale of shape (3,)" in error.problem and "(4, 3, 3, 3)" in error.problem and "needs (4,)" in error.problem


def test_integer_tensor_cannot_be_quantized() -> None:
    g = Graph()
    x = g.mark(g.input("ids", 3, dtype=ir.DataType.INT64), "ids")
    error = error_of(lambda: to_qdq(g.model(g.op("Abs", x)), g.encodings))
    assert isinstance(error, ExportError) and "holds int64" in error.problem


@pytest.mark.parametrize(
    ("fmt", "opset", "match"),
    [
        pytest.param("uint8", 11, r"needs opset 13, and the model has opset 11", id="old"),
        pytest.param("uint16", 17, r"x\.site \(uint16\): needs opset 21, and the model has opset 17", id="uint16"),
        pytest.param("float8_e4m3", 18, r"needs opset 19.*convert the model to opset 21", id="float8"),
    ],
)
def test_old_opsets_are_refused_where_they_lack_the_type(fmt: str, opset: int, match: str) -> None:
    model, g = alone(fmt, normal(3), symmetry="symmetric", opset=opset)
    with pytest.raises(ExportError, match=match):
        to_qdq(model, g.encodings)


def test_eight_bits_are_written_at_opset_13() -> None:
    model, g = alone("uint8", normal(3), opset=13)
    result = to_qdq(model, g.encodings)
    assert result.model.opset_imports == {"": 13}
    run_both(result.model, {"x": normal(3)})


def test_blocks_of_an_activation_need_a_known_shape() -> None:
    g = Graph()
    x = g.input("x", "n", 4)
    g.mark(x, "x.site", "int8", normal(2, 4), PerBlock(2, 1, 0))
    model = g.model(g.op("Neg", g.nodes[-1].outputs[0]))
    with pytest.raises(ExportError, match=r"blocks of an activation need a known shape.*fixed input shape"):
        to_qdq(model, g.encodings)


def test_channels_of_an_activation_need_a_known_rank() -> None:
    g = Graph()
    hidden = g.op("Relu", g.input("x", 2, 4))
    model = g.model(g.op("Neg", g.mark(hidden, "s", "uint5", normal(2, 4), PerChannel(1))))
    with pytest.raises(ExportError, match=r"s: its channels lie on axis 1, and the rank .* shape inference"):
        to_qdq(model, g.encodings)


def test_malformed_marker_names_the_node() -> None:
    model, g = cnn()
    next(n for n in model.graph if n.op_type == "Site").attributes.clear()
    with pytest.raises(ExportError, match=r"node 'node_0': a bitwright::Site marker needs .*string attribute"):
        to_qdq(model, g.encodings)


def test_renaming_an_unknown_site_proposes_the_near_one() -> None:
    model, _ = cnn()
    with pytest.raises(ExportError, match=r"no marker for this site \(did you mean 'relu\.output\[0\]'"):
        rename_values(model, {"relu.output[1]": "r"})


def test_importing_the_package_does_not_load_onnx() -> None:
    code = "import sys, bitwright.export; print('onnx_ir' in sys.modules)"
    assert python("-c", code).stdout.strip() == "False"
