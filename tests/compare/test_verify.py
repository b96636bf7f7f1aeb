"""Verification sees every layer, agrees where the file is right, and names what is wrong where it is not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from bitwright.compare.agreement import Agreement, compare
from bitwright.compare.reasons import FLOAT_REASONS, INTEGER_REASONS, UNEXPLAINED, Evidence, explain, measure
from bitwright.compare.report import OutputRow, Row, VerifyReport
from bitwright.compare.runtime import MODES
from bitwright.compare.verify import verify_layers
from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.integer_sums import derive_bias_encoding, fake_quantize_bias
from bitwright.errors import ConfigError, ExportError
from bitwright.export.files.onnx_file import save_model
from bitwright.export.qdq.write import to_qdq
from tests.export.marked import Array, Graph, simulate
from tests.support.cost import calls_left, steps

RNG = np.random.default_rng(11)


def normal(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


def network(act: str = "uint8", weight: str = "int8") -> tuple[ir.Model, Graph]:
    """Conv, Relu, residual Add, MaxPool, Flatten, Gemm, Softmax."""
    g = Graph()
    symmetry = "symmetric" if act.startswith("int") else "asymmetric"

    def mark(value: ir.Value, site: str, lo: float, hi: float, name: str | None = None) -> ir.Value:
        return g.mark(value, site, act, (lo, hi), None, symmetry, name)  # type: ignore[arg-type]

    x = mark(g.input("x", 2, 4, 8, 8), "conv.input[0]", -3, 3)
    w = g.weight(g.param("conv.weight", (4, 4, 3, 3)), weight, PerChannel(0))
    conv = g.op("Conv", x, w, g.param("conv.bias", (4,)), name="conv", pads=[1, 1, 1, 1])
    r = mark(g.op("Relu", conv, name="relu"), "relu.output[0]", 0, 12)
    a = mark(g.op("Add", r, x, name="add"), "add.output[0]", -3, 15)
    flat = g.op("Flatten", g.op("MaxPool", a, kernel_shape=[2, 2], strides=[2, 2]))
    fw = g.weight(g.param("fc.weight", (5, 64)), weight, PerChannel(0))
    fc = mark(g.op("Gemm", flat, fw, g.param("fc.bias", (5,)), transB=1, name="fc"), "fc.output[0]", -90, 90)
    y = mark(g.op("Softmax", fc, name="softmax"), "softmax.output[0]", 0, 1, "probabilities")
    return g.model(y), g


BIASES = {"conv.bias": ("conv.input[0]", "conv.weight"), "fc.bias": ("add.output[0]", "fc.weight")}
FEEDS = {"x": normal(2, 4, 8, 8)}


def verified(model: ir.Model, g: Graph, biases: dict[str, Any] | None = None, **options: Any) -> VerifyReport:
    sites, outputs = simulate(model, g.encodings, FEEDS, BIASES if biases is None else biases)
    return verify_layers(to_qdq(model, g.encodings, **options).model, sites, FEEDS, outputs=outputs)


# ----------------------------------------------------------------------------------------------- agreement


@pytest.mark.parametrize("act", ["uint8", "int8", "uint16", "uint4", "uint5", "float16"])
def test_every_layer_agrees(act: str) -> None:
    model, g = network(act)
    report = verified(model, g, {} if act == "float16" else None)
    layers = [row for row in report.rows if row.site != "softmax.output[0]"]
    assert all(row.as_float.ok for row in layers), str(report)
    assert not report.unchecked and not report.failures
    assert {row.site for row in report.rows} == set(g.encodings)


def test_rows_name_operators_kernels_and_tensors() -> None:
    rows = {row.site: row for row in verified(*network()).rows}
    assert rows["relu.output[0]"].ops == ("Conv", "Relu") and rows["relu.output[0]"].kernel == "QLinearConv"
    assert rows["add.output[0]"].ops == ("Add",) and rows["add.output[0]"].kernel == "QLinearAdd"
    assert rows["fc.output[0]"].ops == ("MaxPool", "Flatten", "Gemm") and rows["fc.output[0]"].kernel == "QGemm"
    assert rows["conv.input[0]"].ops == () and rows["conv.weight"].kernel == "constant"
    assert rows["softmax.output[0]"].tensor == "probabilities" and rows["fc.output[0]"].format == "uint8"
    assert rows["relu.output[0]"].as_float.elements == 2 * 4 * 64


def test_a_report_is_text_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rich displays what it is to print."""
    report = verified(*network())
    text = str(report)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(report) == text and "places agree" in text


def test_path_and_model_give_the_same_report(tmp_path: Path) -> None:
    model, g = network()
    sites, outputs = simulate(model, g.encodings, FEEDS, BIASES)
    made = to_qdq(model, g.encodings).model
    save_model(made, tmp_path / "net.onnx", external=True)
    assert verify_layers(tmp_path / "net.onnx", sites, FEEDS, outputs=outputs) == verify_layers(
        made, sites, FEEDS, outputs=outputs
    )


def test_values_may_be_keyed_by_tensor_name() -> None:
    model, g = network()
    sites, _ = simulate(model, g.encodings, FEEDS, BIASES)
    result = to_qdq(model, g.encodings)
    values = {result.tensors[site][0]: arrays[0] for site, arrays in sites.items() if "weight" not in site}
    report = verify_layers(result.model, values, FEEDS)
    assert not report.unchecked and len(report.rows) == 5


def test_an_error_in_one_layer_shows_in_that_layer_only() -> None:
    model, g = network()
    sites, outputs = simulate(model, g.encodings, FEEDS, BIASES)
    made = to_qdq(model, g.encodings).model
    bias = made.graph.initializers["conv.bias_q"]
    broken = ir.Tensor(bias.const_value.numpy() + np.int32(20_000), name="conv.bias_q")  # type: ignore[union-attr]
    bias.const_value = broken
    report = verify_layers(made, sites, FEEDS, outputs=outputs)
    assert [row.site for row in report.rows if not row.as_float.ok] == ["relu.output[0]"]
    (row,) = (row for row in report.rows if row.site == "relu.output[0]")
    assert not report.ok and row.as_float.lsb > 1 and row.reason is not None
    assert "float: unexplained" in row.reason and "integer: as with float kernels" in row.reason
    assert "FAILS" in str(report) and "NOT ok" in str(report)


def test_a_weight_that_differs_is_reported_and_one_that_is_transposed_is_compared_right() -> None:
    g = Graph()
    w = g.weight(g.param("l.weight", (4, 6)), "int8", PerChannel(0))
    y = g.op("MatMul", g.mark(g.input("x", 3, 6), "in"), g.op("Transpose", w))
    model = g.model(g.mark(y, "out", "uint8", (-20, 20), name="y"))
    feeds = {"x": normal(3, 6)}
    sites, _ = simulate(model, g.encodings, feeds)
    made = to_qdq(model, g.encodings).model
    assert verify_layers(made, sites, feeds).ok
    sites["l.weight"][0] = sites["l.weight"][0].copy()
    sites["l.weight"][0][2, 5] += 3 * g.encodings["l.weight"].scale[2]
    row = next(row for row in verify_layers(made, sites, feeds).rows if row.site == "l.weight")
    assert row.as_float.equal == 23 / 24 and abs(row.as_float.lsb - 3) < 1e-3
    assert row.reason == "the file holds another value: simulate with the encodings that were written"


@pytest.mark.parametrize(
    ("fmt", "granularity"),
    [
        ("int4", PerBlock(3, 1, 0)), ("uint5", PerChannel(1)), ("float8_e4m3", PerChannel(0)), ("float4_e2m1", PerTensor()),
        ("float16", PerTensor()), ("int20", PerTensor()),
    ],
    ids=str,
)  # fmt: skip
def test_constants_of_every_form_are_compared(fmt: str, granularity: Any) -> None:
    g = Graph()
    w = g.param("w", (4, 6))
    assert w.const_value is not None
    marked = g.mark(w, "w", fmt, w.const_value.numpy(), granularity, "symmetric")
    model = g.model(g.mark(g.op("Add", g.input("x", 4, 6), marked), "y", "uint8", (-9, 9)))
    sites, _ = simulate(model, g.encodings, {"x": normal(4, 6)})
    result = to_qdq(model, g.encodings)
    rows = {row.site: row for row in verify_layers(result.model, sites, {"x": normal(4, 6)}).rows}
    # a constant stored in float has no quantizer left to read
    assert ("w" in rows) == (fmt != "int20") and (fmt == "int20" or rows["w"].as_float == Agreement(1.0, 0.0, 24))


def test_biases_are_compared_where_given() -> None:
    g = Graph()
    x = g.mark(g.input("x", 2, 4), "in")
    w, b = g.weight(g.param("w", (3, 4)), "int8", PerChannel(0)), g.param("b", (3,))
    assert b.const_value is not None
    values = b.const_value.numpy()
    g.encodings["b"] = derive_bias_encoding(g.encodings["in"], g.encodings["w"], values)
    y = g.op("Gemm", x, w, g.site(b, "b"), transB=1)
    model, feeds = g.model(g.mark(y, "out", "uint8", (-9, 9), name="y")), {"x": normal(2, 4)}
    result = to_qdq(model, g.encodings)
    assert not result.notes
    sites = simulate(model, g.encodings, feeds)[0]
    sites["b"] = [fake_quantize_bias(values, g.encodings["b"])]
    report = verify_layers(result.model, sites, feeds)
    assert report.ok and next(r for r in report.rows if r.site == "b").as_float.lsb == 0


def test_sites_that_run_several_times_are_told_apart() -> None:
    g = Graph()
    h = g.input("x", 4)
    for _ in range(3):
        h = g.mark(g.op("Tanh", h), "tanh.output[0]", "uint8", (-1, 1))
        h = g.mark(h, "again", "uint8", (-1, 1))  # the same grid: shares the quantizer
    model, feeds = g.model(g.op("Neg", h, name="y")), {"x": normal(4)}
    sites, _ = simulate(model, g.encodings, feeds)
    made = to_qdq(model, g.encodings).model
    report = verify_layers(made, sites, feeds)
    assert report.ok and [(r.site, r.run) for r in report.rows if r.site == "again"] == [
        ("again", 0), ("again", 1), ("again", 2)
    ]  # fmt: skip
    assert "tanh.output[0] (run 2)" in str(report)
    few = verify_layers(made, {"tanh.output[0]": sites["tanh.output[0]"][:2]}, feeds)
    assert few.unchecked["again"] == "it runs 3 times in the file, and 2 arrays were given" and not few.ok


def test_values_without_axes_are_compared() -> None:
    """A mean of all values, what is computed of it, and a layer that it scales."""
    g = Graph()
    x = g.mark(g.input("x", 2, 3), "in", "uint8", (-3, 3))
    mean = g.mark(g.op("ReduceMean", x, keepdims=0), "mean", "uint8", (-1, 1))
    squared = g.mark(g.op("Mul", mean, mean), "squared", "uint8", (0, 1))
    model = g.model(g.mark(g.op("Mul", x, squared, name="y"), "out", "uint8", (-3, 3)))
    feeds = {"x": normal(2, 3)}
    report = verify_layers(to_qdq(model, g.encodings).model, simulate(model, g.encodings, feeds)[0], feeds)
    assert report.ok and [row.site for row in report.rows] == ["in", "mean", "squared", "out"]


def test_merged_runs_keep_their_numbers() -> None:
    """Run 0 and run 2 mark one tensor, run 1 another."""
    g = Graph()
    x = g.input("x", 4)
    first = g.mark(x, "s")
    second = g.site(g.op("Neg", x), "s")
    third = g.site(x, "s")
    model, feeds = g.model(g.op("Sum", first, second, third, name="y")), {"x": normal(4)}
    sites, _ = simulate(model, g.encodings, feeds)
    report = verify_layers(to_qdq(model, g.encodings).model, sites, feeds)
    assert report.ok and sorted(row.run for row in report.rows) == [0, 1, 2]


# --------------------------------------------------------------------------------------------- known reasons


def test_softmax_by_table_is_named() -> None:
    g = Graph()
    x = g.mark(g.input("x", 400, 30), "in", "uint8", (-4, 4))
    model = g.model(g.mark(g.op("Softmax", x), "out", "uint8", (0, 0.4), name="y"))
    feeds = {"x": normal(400, 30)}
    report = verify_layers(to_qdq(model, g.encodings).model, simulate(model, g.encodings, feeds)[0], feeds)
    row = next(row for row in report.rows if row.site == "out")
    assert row.kernel == "QLinearSoftmax" and row.as_float.ok and row.as_integer.lsb >= 1
    assert row.reason is not None and "QLinearSoftmax works with a table" in row.reason


def test_a_float_bias_that_the_runtime_quantizes_is_named() -> None:
    g = Graph()
    x = g.mark(g.input("x", 4, 8, 9, 9), "in")
    w = g.param("w", (16, 8, 3, 3))
    y = g.op("Conv", x, g.weight(w, "int4", PerChannel(0)), g.param("b", (16,)))
    model = g.model(g.mark(y, "out", "uint8", (-15, 15), name="y"))
    feeds = {"x": normal(4, 8, 9, 9)}
    made = to_qdq(model, g.encodings, bias="float").model
    row = verify_layers(made, simulate(model, g.encodings, feeds)[0], feeds).rows[1]
    assert row.as_float.ok and row.as_integer.equal < 1
    assert row.reason is not None and "the runtime quantizes this float bias by itself" in row.reason


def weight_only(fmt: str = "int4", granularity: Any = None, op: str = "MatMul") -> tuple[ir.Model, Graph]:
    g = Graph()
    w = g.weight(g.param("w", (256, 128)), fmt, granularity or PerBlock(32, 0, 1))
    return g.model(g.op(op, g.input("x", 8, 256), w, name="y")), g


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
@pytest.mark.parametrize(
    ("fmt", "granularity"),
    [("int4", PerBlock(32, 0, 1)), ("int8", PerChannel(1)), ("int8", PerTensor()), ("int4", PerChannel(1))],
    ids=str,
)
def test_weight_only_products_run_as_simulated(fmt: str, granularity: Any, op: str) -> None:
    model, g = weight_only(fmt, granularity, op)
    feeds = {"x": normal(8, 256)}
    sites, outputs = simulate(model, g.encodings, feeds)
    result = to_qdq(model, g.encodings)
    report = verify_layers(result.model, sites, feeds, outputs=outputs)
    assert report.ok and report.outputs[0].as_integer > 100, str(report)
    assert report.rows[0].ops == (op,)
    (note,) = (note for note in result.notes if note.kind == "float product")
    assert "1 product of float activations with quantized weights computed as simulated" in note.text
    fused = verify_layers(to_qdq(model, g.encodings, weight_only="fused").model, sites, feeds, outputs=outputs)
    assert not fused.ok and fused.outputs[0].as_integer < 50


def test_a_product_of_quantized_activations_is_left_to_the_integer_kernels() -> None:
    model, g = network()
    assert "Reshape" not in [node.op_type for node in to_qdq(model, g.encodings).model.graph]


def test_unknown_form_of_weight_only_products_is_refused() -> None:
    model, g = weight_only()
    with pytest.raises(ConfigError, match=r"weight_only: 'fuse' is not.*did you mean 'fused'.*'exact', 'fused'"):
        to_qdq(model, g.encodings, weight_only="fuse")  # type: ignore[arg-type]


def test_weight_only_matmul_is_named() -> None:
    """ONNX Runtime turns it into MatMulNBits with int8 activations; the float kernels agree."""
    model, g = weight_only()
    feeds = {"x": normal(8, 256)}
    sites, outputs = simulate(model, g.encodings, feeds)
    made = to_qdq(model, g.encodings, weight_only="fused").model
    report = verify_layers(made, sites, feeds, outputs=outputs)
    row = report.rows[0]
    assert (row.site, row.format, row.ops) == ("y", "float32", ("MatMul",)) and not report.ok
    assert row.as_float.ok and not row.as_integer.ok
    assert row.reason is not None and "MatMulNBits with int8 activations" in row.reason


def test_a_file_the_runtime_refuses_is_reported_not_raised() -> None:
    model, g = network("int8")
    sites, outputs = simulate(model, g.encodings, FEEDS, BIASES)
    made = to_qdq(model, g.encodings, activation="as_is").model
    for node in made.graph:  # quantized beside MaxPool, which ONNX Runtime then moves int8 across and fails
        if node.op_type == "Flatten":
            node.op_type = "NoSuchOperator"
    report = verify_layers(made, sites, FEEDS, outputs=outputs)
    assert set(report.failures) == set(MODES) and not report.ok
    assert "NoSuchOperator" in report.failures["float"] and "does not run with float kernels" in str(report)
    assert all(row.reason == "float: the runtime refused the model; integer: the runtime refused the model"
               for row in report.rows if row.kernel != "constant")  # fmt: skip
    assert [(o.as_float, o.as_integer) for o in report.outputs] == [(-np.inf, -np.inf)]


def evidence(**changes: Any) -> Evidence:
    facts: dict[str, Any] = {
        "ops": frozenset(), "kernel": "float", "runtime": frozenset(), "format": "uint8", "float_params": frozenset(),
        "found": {mode: Agreement(0.9, 1.0, 100) for mode in MODES}, "failures": {},
    }  # fmt: skip
    return Evidence(**{**facts, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            {"ops": frozenset({"Conv"}), "format": "uint16"}, "float: the order of float summation differs, and", id="16-bit"
        ),
        pytest.param(
            {"ops": frozenset({"MatMul"})}, "float: the order of float summation differs; integer: as with", id="sum"
        ),
        pytest.param({"ops": frozenset({"Tanh"})}, "float: the runtime approximates this function", id="function"),
        pytest.param({"ops": frozenset({"Relu"})}, f"float: {UNEXPLAINED}", id="unexplained"),
        pytest.param(
            {"ops": frozenset({"Conv"}), "kernel": "QLinearConv",
             "found": {"float": Agreement(1, 0, 9), "integer": Agreement(0.5, 3, 9)}},
            "integer: integer sums of uint8 times int8 saturate", id="saturation",
        ),
        pytest.param(
            {"ops": frozenset({"MatMul", "LogSoftmax"}), "runtime": frozenset({"MatMulIntegerToFloat"}),
             "found": {"float": Agreement(1, 0, 9), "integer": Agreement(0.5, 3, 9)}},
            "integer: integer sums of uint8 times int8 saturate", id="saturation-in-front-of-float",
        ),
        pytest.param(
            {"ops": frozenset({"Conv"}), "kernel": "QLinearConv",
             "found": {"float": Agreement(1, 0, 900), "integer": Agreement(0.9, 1, 900, off=0.3, allowed=0.01)}},
            "integer: integer sums of uint8 times int8 saturate", id="saturation-by-one-step",
        ),
        pytest.param(
            {"ops": frozenset({"Sigmoid"}), "found": {"float": Agreement(1, 0, 9), "integer": Agreement(0.9, 1, 9)}},
            "integer: other float operators than", id="float-function-elsewhere",
        ),
        pytest.param(
            {"ops": frozenset({"Sigmoid"}),
             "found": {"float": Agreement(1, 0, 900), "integer": Agreement(0.9, 1, 900, off=0.3, allowed=0.01)}},
            f"integer: {UNEXPLAINED}", id="float-function-beyond",
        ),
        pytest.param(
            {"ops": frozenset({"ReduceMean"}), "kernel": "Reduce u8",
             "found": {"float": Agreement(1, 0, 9), "integer": Agreement(0.5, 3, 9)}},
            f"integer: {UNEXPLAINED}", id="no-product-saturates",
        ),
        pytest.param(
            {"kernel": "QLinearAdd", "found": {"float": Agreement(1, 0, 9), "integer": Agreement(0.5, 1, 9)}},
            "integer: the integer kernel rounds exact sums", id="rounding",
        ),
        pytest.param(
            {"failures": {"integer": "[ONNXRuntimeError] : 9"}, "format": "int8",
             "found": {"float": Agreement(1, 0, 9), "integer": Agreement(0, np.inf, 9)}},
            "integer: the runtime refused the model; try session.qdqisint8allowed=1", id="refused",
        ),
    ],
)  # fmt: skip
def test_explanations(changes: dict[str, Any], expected: str) -> None:
    assert str(explain(evidence(**changes))).startswith(expected)


def test_an_option_of_one_runtime_is_not_told_of_another() -> None:
    found = {"float": Agreement(1, 0, 9), "integer": Agreement(0, np.inf, 9)}
    refused = evidence(failures={"integer": "openvino refuses the file"}, format="int8", found=found)
    assert explain(refused) == "integer: the runtime refused the model"


def test_equal_places_need_no_explanation_and_every_reason_is_a_phrase() -> None:
    assert explain(evidence(found={mode: Agreement(1.0, 0.0, 5) for mode in MODES})) is None
    for _, text, *_ in (*FLOAT_REASONS, *INTEGER_REASONS):
        assert text and not text.endswith(".")


# ---------------------------------------------------------------------------------- within what a kernel may do


def table_softmax() -> tuple[ir.Model, Graph, dict[str, Array]]:
    """QLinearSoftmax at its worst: the step is a little above 1/255, and its inverse is rounded down to 254."""
    g = Graph()
    x = g.mark(g.input("x", 400, 7), "in", "uint8", (-4, 4))
    model = g.model(g.mark(g.op("Softmax", x), "out", "uint8", (0, 1), name="y"))
    return model, g, {"x": normal(400, 7)}


def test_what_the_table_of_softmax_may_do_is_a_verdict_of_its_own() -> None:
    model, g, feeds = table_softmax()
    report = verify_layers(to_qdq(model, g.encodings).model, simulate(model, g.encodings, feeds)[0], feeds)
    row = next(row for row in report.rows if row.site == "out")
    assert row.as_float.ok and row.as_integer.equal < 0.95 and not row.as_integer.ok
    assert row.verdict == "within" and report.ok and row.as_integer.within
    assert row.as_integer.off is not None and row.as_integer.off <= row.as_integer.allowed < 1.1
    assert "within 1" in str(report)
    assert "1 of 2 places agree, 1 within what their kernel may do: ok" in str(report)
    assert json.loads(report.to_json())["rows"][1]["verdict"] == "within"


@pytest.mark.parametrize("fault", ["scale", "zero point", "input"])
def test_a_fault_behind_a_kernel_with_a_table_is_not_excused(fault: str) -> None:
    """One code off everywhere, the values of another input, a scale that is 1 % off."""
    model, g, feeds = table_softmax()
    sites = simulate(model, g.encodings, feeds)[0]
    made = to_qdq(model, g.encodings).model
    if fault == "input":
        sites["in"] = [sites["in"][0] + np.float32(g.encodings["in"].scale) * (sites["in"][0] < 1)]
    elif fault == "zero point":
        sites["out"] = [sites["out"][0] + np.float32(g.encodings["out"].scale)]
    else:
        scale = [node for node in made.graph if node.op_type == "QuantizeLinear"][-1].inputs[1]
        assert scale is not None and scale.const_value is not None
        scale.const_value = ir.Tensor(scale.const_value.numpy() * np.float32(0.99), name=scale.name)
    report = verify_layers(made, sites, feeds)
    row = next(row for row in report.rows if row.site == "out")
    assert row.verdict == "fails" and not report.ok and "FAILS" in str(report)


def test_softmax_that_overflows_its_table_is_named_and_fails() -> None:
    """Probabilities that are all about 1/30: the integer kernel of ONNX Runtime before 1.32 overflows to zero."""
    g = Graph()
    x = g.mark(g.input("x", 400, 30), "in", "uint8", (-0.05, 0.05))
    model = g.model(g.mark(g.op("Softmax", x), "out", "uint8", (0, 0.0356), name="y"))
    feeds = {"x": normal(400, 30) / 60}
    report = verify_layers(to_qdq(model, g.encodings).model, simulate(model, g.encodings, feeds)[0], feeds)
    row = next(row for row in report.rows if row.site == "out")
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 32):
        assert row.kernel == "QLinearSoftmax" and row.as_integer.lsb <= 3 and report.ok
        return
    assert row.as_float.ok and row.verdict == "fails"
    assert row.reason is not None and "QLinearSoftmax overflows" in row.reason


def tied_add() -> tuple[ir.Model, Graph, dict[str, Array]]:
    """Sums that lie exactly between two codes, with a scale that no float holds exactly."""
    g = Graph()
    a, b = (g.mark(g.input(n, 200, 20), n, "uint8", (0, 25.5 * 0.7)) for n in ("a", "b"))
    model = g.model(g.mark(g.op("Add", a, b), "sum", "uint8", (0, 51 * 0.7), name="y"))
    feeds = {n: RNG.integers(0, 256, (200, 20)).astype(np.float32) * np.float32(0.07) for n in ("a", "b")}
    return model, g, feeds


def test_exact_ties_of_a_sum_are_within_what_its_kernel_may_do() -> None:
    model, g, feeds = tied_add()
    sites = simulate(model, g.encodings, feeds)[0]
    made = to_qdq(model, g.encodings).model
    report = verify_layers(made, sites, feeds)
    row = next(row for row in report.rows if row.site == "sum")
    assert row.kernel == "QLinearAdd" and report.ok
    # the other side of every tie is as right, and 3 % of a step more is not
    step, exact = np.float64(g.encodings["sum"].scale), sites["a"][0].astype(np.float64) + sites["b"][0]
    tied = np.abs(exact / step - np.floor(exact / step) - 0.5) < 1e-3
    assert 0.2 < tied.mean() < 0.8
    turned = np.where(tied, (2 * np.floor(exact / step) + 1) * step - sites["sum"][0], sites["sum"][0])
    row = next(
        row
        for row in verify_layers(made, {**sites, "sum": [turned.astype(np.float32)]}, feeds).rows
        if row.site == "sum"
    )
    assert row.as_integer.equal < 0.9 and row.as_integer.within
    assert row.verdict == "fails", "float kernels add these numbers exactly, so nothing excuses them there"


def test_ties_at_the_top_of_a_16_bit_grid_are_within_what_float_sums_may_do() -> None:
    """Float32 holds a code of 60,000 to 0.004 steps, so a value on the border may lie further than half a step from its own."""
    g = Graph()
    x = g.mark(g.input("x", 400, 20, 2), "x", "uint16", (0, 0.7))
    axes = g.param("axes", np.array([-1], np.int64))
    model = g.model(g.mark(g.op("ReduceSum", x, axes, keepdims=0), "sum", "uint16", (0, 1.4), name="y"))
    codes = RNG.integers(55_000, 65_536, (400, 20, 2))
    feeds = {"x": codes.astype(np.float32) * np.float32(0.7 / 65_535)}
    sites = simulate(model, g.encodings, feeds)[0]
    made = to_qdq(model, g.encodings).model
    step, code = np.float64(g.encodings["sum"].scale), sites["sum"][0].astype(np.float64)
    exact = sites["x"][0].astype(np.float64).sum(-1)
    tied = np.abs(np.abs(exact - code) / step - 0.5) < 0.01
    assert 0.2 < tied.mean() < 0.8

    def row(values: Array) -> Row:
        given = {**sites, "sum": [values.astype(np.float32)]}
        return next(row for row in verify_layers(made, given, feeds).rows if row.site == "sum")

    turned = row(np.where(tied, code + np.sign(exact - code) * step, code))
    assert turned.verdict == "within" and turned.as_float.equal < 0.9
    assert turned.as_float.off is not None and turned.as_float.off < 0.01
    assert row(code + step).verdict == "fails", "all codes a step off"


@pytest.mark.parametrize(("distance", "within"), [(0.0, True), (0.009, True), (0.02, False), (0.3, False)], ids=str)
def test_only_values_on_the_border_of_two_codes_may_have_either(distance: float, within: bool) -> None:
    expected, found = np.float32([3, 3, 7]), np.float32([4, 3, 7])
    exact = np.float32([3.5 - distance, 3.2, 7.4])
    agreement = Agreement(2 / 3, 1.0, 3)
    seen = evidence(kernel="QLinearConv", found={"float": Agreement(1, 0, 3), "integer": agreement})
    off, allowed = measure(seen, "integer", expected, found, exact, np.array(1.0), 1.0)
    assert off == pytest.approx(distance, abs=1e-6) and allowed == pytest.approx(0.01)
    assert replace(agreement, off=off, allowed=allowed).within is within


def test_two_steps_apart_is_never_within() -> None:
    seen = evidence(ops=frozenset({"Conv"}), format="uint16")
    exact = np.float32([60_001.0])
    off, allowed = measure(seen, "float", np.float32([60_000]), np.float32([60_002]), exact, np.array(1.0), 1.0)
    assert off == 0.5 and allowed <= 0.25


def test_a_shift_of_a_few_hundredths_of_a_step_is_not_excused() -> None:
    """A bias that is 4 % of a step off turns 4 % of the codes, each by one step."""
    model, g = network()
    sites, outputs = simulate(model, g.encodings, FEEDS, BIASES)
    made = to_qdq(model, g.encodings).model
    bias = made.graph.initializers["conv.bias_q"]
    assert bias.const_value is not None
    step = float(g.encodings["relu.output[0]"].scale)
    unit = float(np.max(g.encodings["conv.input[0]"].scale)) * np.asarray(g.encodings["conv.weight"].scale, np.float64)
    shifted = bias.const_value.numpy() + np.rint(0.06 * step / unit).astype(np.int32)
    bias.const_value = ir.Tensor(shifted.astype(np.int32), name="conv.bias_q")
    row = next(r for r in verify_layers(made, sites, FEEDS, outputs=outputs).rows if r.site == "relu.output[0]")
    assert row.as_float.lsb <= 1.01 and 0.9 < row.as_float.equal < 0.99
    assert row.verdict == "fails" and row.as_float.off is not None and row.as_float.off > 0.04


def test_a_model_without_quantizers_is_compared_by_its_outputs() -> None:
    g = Graph()
    y = g.op("ArgMax", g.op("Relu", g.input("x", 3, 4)), name="y")
    y.type = ir.TensorType(ir.DataType.INT64)
    model = g.model(y)
    made = to_qdq(model, {}).model
    feeds = {"x": normal(3, 4)}
    right = np.maximum(feeds["x"], 0).argmax(0)[None]
    assert verify_layers(made, {}, feeds, outputs={"y": right}).ok
    assert not verify_layers(made, {}, feeds, outputs={"y": right + 1}).ok
    assert not verify_layers(made, {}, feeds).ok, "nothing was compared"


# ---------------------------------------------------------------------------------------------- comparisons


@pytest.mark.parametrize(
    ("agreement", "ok"),
    [
        (Agreement(1.0, 0.0, 10), True), (Agreement(0.9, 1.0, 10), True), (Agreement(0.8, 1.0, 10), False),
        (Agreement(0.999, 1.0, 100_000), True), (Agreement(0.998, 1.0, 100_000), False), (Agreement(0.9999, 2.0, 100_000), False),
        (Agreement(1.0, 0.0, 0), True), (Agreement(0.0, np.inf, 5), False),
    ],
    ids=str,
)  # fmt: skip
def test_what_counts_as_agreement(agreement: Agreement, ok: bool) -> None:
    assert agreement.ok is ok


FACTS = {"format": "uint8", "axis": None, "places": [["s", 0]]}


def test_differences_are_counted_in_steps_per_channel_and_block() -> None:
    zeros = np.zeros((2, 4), np.float32)
    other = zeros.copy()
    other[1, 2] = 0.6
    assert compare(zeros, other, FACTS, np.array(0.2)).lsb == pytest.approx(3)
    assert compare(zeros, other, {**FACTS, "axis": 0}, np.array([1.0, 0.3])).lsb == pytest.approx(2)
    assert compare(zeros, other, {**FACTS, "axis": 1}, np.array([[1.0, 1], [1, 0.1]])).lsb == pytest.approx(6)
    assert compare(zeros, other, {**FACTS, "axis": 0}, np.array([1.0, 0.3])).equal == 7 / 8


def test_a_nan_that_the_simulation_replaces_later_has_no_code() -> None:
    expected, found = np.float32([0.2, np.nan]), np.float32([0.2, 0.0])
    assert compare(expected, found, FACTS, np.array(0.2), nan_is_free=True) == Agreement(1.0, 0.0, 2)
    assert compare(expected, found, FACTS, np.array(0.2)).lsb == np.inf
    turned = compare(found, expected, FACTS, np.array(0.2), nan_is_free=True)
    assert turned.lsb == np.inf, "the file makes no NaN of a number"
    assert compare(expected, found, {**FACTS, "format": "float32"}, None, nan_is_free=True).lsb == np.inf


def test_float_formats_are_counted_in_their_local_spacing() -> None:
    facts = {**FACTS, "format": "float16"}
    assert compare(np.float32([1024.0]), np.float32([1026.0]), facts, None).lsb == 2
    assert compare(np.float32([1.0]), np.float32([1 + 2**-10]), facts, None).lsb == 1
    assert compare(np.float32([0.0]), np.float32([2.0**-24]), facts, None).lsb == 1


@pytest.mark.parametrize(("scale", "equal"), [(0.1003, True), (0.25, False)], ids=["rounded", "exact"])
def test_codes_that_one_number_of_bfloat16_stands_for_are_equal_only_where_values_were_rounded(
    scale: float, equal: bool
) -> None:
    codes = np.arange(300, dtype=np.float32)
    exact = codes * np.float32(scale)
    rounded = torch.from_numpy(exact).bfloat16().float().numpy()
    found = compare(rounded[:257], exact[:257], {**FACTS, "format": "uint16"}, np.array(scale, np.float32))
    assert found.equal == 1
    moved = compare(exact[[255, 256]], exact[[255, 257]], {**FACTS, "format": "uint16"}, np.array(scale, np.float32))
    assert moved.equal == 0.5
    off = compare(rounded[[9, 256]], exact[[9, 257]], {**FACTS, "format": "uint16"}, np.array(scale, np.float32))
    assert (off.equal == 1) == (equal and rounded[256] == rounded[257])


def test_nan_and_infinity_never_agree_with_a_number_but_with_themselves_infinity_does() -> None:
    assert compare(np.float32([np.inf]), np.float32([np.inf]), FACTS, np.array(1.0)).ok
    for bad in (np.nan, np.inf):
        assert compare(np.float32([bad]), np.float32([1]), FACTS, np.array(1.0)).lsb == np.inf


# ------------------------------------------------------------------------------------- reports and errors


def test_report_as_json_and_text_are_complete() -> None:
    report = verified(*network())
    document = json.loads(report.to_json())
    assert document["ok"] == report.ok and len(document["rows"]) == len(report.rows)
    assert document["rows"][1]["as_float"] == {
        "equal": 1.0, "lsb": 0.0, "elements": 512, "off": None, "allowed": 0.0,
    }  # fmt: skip
    assert document["outputs"][0]["as_float"] in ("inf",) or document["outputs"][0]["as_float"] > 20
    text = report.to_text()
    assert all(row.site in text for row in report.rows) and "output probabilities:" in text
    assert str(report) == report.to_text()


def test_a_printed_report_keeps_names_whole_and_tells_each_reason_once() -> None:
    good, bad = Agreement(1.0, 0.0, 8), Agreement(0.5, 3.0, 8)
    name = "encoder.layers.11.self_attention.out_projection.some_rather_long_name.output[0]"
    rows = [
        Row(f"{i}.{name}", 0, "t", "uint8", ("Conv", "Relu"), "QLinearConv", good, found, why)
        for i, (found, why) in enumerate([(good, None), (bad, "because"), (bad, "because"), (good, "another")])
    ]
    lines = VerifyReport(tuple(rows)).to_text().splitlines()
    places = [line for line in lines if name in line]
    assert [f"{i}.{name}" in line for i, line in enumerate(places)] == [True] * 4
    assert ["FAILS 1" in line for line in places] == [False, True, True, False]
    assert [line.split() for line in lines[-2:]] == [["1", "because"], ["2", "another"]]
    assert lines[0] == "2 of 4 places agree: NOT ok"


def test_places_without_a_value_are_listed_and_spoil_the_verdict() -> None:
    model, g = network()
    sites, _ = simulate(model, g.encodings, FEEDS, BIASES)
    del sites["add.output[0]"]
    report = verify_layers(to_qdq(model, g.encodings).model, sites, FEEDS)
    assert report.unchecked == {"add.output[0]": "the simulation gave no value for it"} and not report.ok
    joined = next(row for row in report.rows if row.site == "fc.output[0]")
    assert joined.ops == ("Add", "MaxPool", "Flatten", "Gemm") and joined.as_float.ok


def test_markers_in_branches_are_listed_as_unchecked() -> None:
    g = Graph()
    x, gate = g.input("x", 3), g.input("gate", dtype=ir.DataType.BOOL)
    outer = g.mark(x, "outer")
    bodies = []
    for name in ("then", "else"):
        body = Graph()
        out = body.mark(body.op("Neg" if name == "then" else "Relu", outer), name)
        bodies.append(ir.Graph([], [out], nodes=body.nodes, name=name))
        g.encodings.update(body.encodings)
    node = ir.node("If", [gate], {"then_branch": bodies[0], "else_branch": bodies[1]}, name="if")
    g.nodes.append(node)
    node.outputs[0].name, node.outputs[0].type = "if_out", ir.TensorType(ir.DataType.FLOAT)
    model = g.model(g.mark(node.outputs[0], "last", name="y"))
    data = normal(3)
    q = {site: fake_quantize(data, g.encodings["outer"]) for site in ("outer",)}
    q["last"] = -q["outer"]
    report = verify_layers(to_qdq(model, g.encodings).model, q, {"x": data, "gate": np.array(True)})
    assert report.unchecked == dict.fromkeys(("then", "else"), "it lies inside the body of If, Loop or Scan")
    assert next(row for row in report.rows if row.site == "last").as_float.lsb <= 1


def test_loops_between_quantizers_are_run_whole() -> None:
    """The body has inputs and constants of its own, and reads a quantized value from outside."""
    g, body = Graph(), Graph()
    outer = g.mark(g.input("x", 3), "outer")
    step, going = (
        ir.Value(name=n, shape=ir.Shape([]), type=ir.TensorType(t))
        for n, t in (("i", ir.DataType.INT64), ("c", ir.DataType.BOOL))
    )
    state = ir.Value(name="s", shape=ir.Shape([3]), type=ir.TensorType(ir.DataType.FLOAT))
    total = body.op("Add", body.op("Mul", state, body.param("half", np.array(0.5, np.float32))), outer, name="total")
    still = body.op("Identity", going, name="still")
    still.type = ir.TensorType(ir.DataType.BOOL)
    nested = ir.Graph(
        [step, going, state], [still, total], nodes=body.nodes, initializers=body.initializers, name="body"
    )
    trips, true = g.param("trips", np.array(3)), g.param("true", np.array(True))
    node = ir.node("Loop", [trips, true, outer], {"body": nested}, name="loop")
    g.nodes.append(node)
    node.outputs[0].name, node.outputs[0].type = "looped", ir.TensorType(ir.DataType.FLOAT)
    model, data = g.model(g.mark(node.outputs[0], "last", "uint8", (-8, 8), name="y")), normal(3)
    q = fake_quantize(data, g.encodings["outer"])
    values = {"outer": q, "last": fake_quantize(q * np.float32(1.875), g.encodings["last"])}
    report = verify_layers(to_qdq(model, g.encodings).model, values, {"x": data})
    assert report.rows[1].ops == ("Loop", "Mul", "Add", "Identity") and report.rows[1].as_float.lsb <= 1.01


def test_wrong_shape_names_the_site() -> None:
    model, g = network()
    sites, _ = simulate(model, g.encodings, FEEDS, BIASES)
    sites["fc.output[0]"] = [np.zeros((1, 5), np.float32)]
    with pytest.raises(ExportError, match=r"fc\.output\[0\]: the simulation's value has shape \(1, 5\).*\(2, 5\)"):
        verify_layers(to_qdq(model, g.encodings).model, sites, FEEDS)


def test_missing_graph_input_and_unknown_output_get_close_matches() -> None:
    model, g = network()
    sites, _ = simulate(model, g.encodings, FEEDS, BIASES)
    made = to_qdq(model, g.encodings).model
    with pytest.raises(ExportError, match=r"x: no value was given for this graph input \(did you mean 'x_'\?\)"):
        verify_layers(made, sites, {"x_": FEEDS["x"]})
    with pytest.raises(ExportError, match=r"probability: the model has no output.*did you mean 'probabilities'"):
        verify_layers(made, sites, FEEDS, outputs={"probability": np.zeros(5)})


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"net\.onnx: there is no such file"):
        verify_layers(tmp_path / "net.onnx", {}, {})
    (tmp_path / "bad.onnx").write_bytes(b"not a model at all")
    with pytest.raises(ExportError, match=r"bad\.onnx: it cannot be read as an ONNX model"):
        verify_layers(tmp_path / "bad.onnx", {}, {})
    g = Graph()
    ir.save(g.model(g.op("Neg", g.input("x", 3))), tmp_path / "float.onnx")
    with pytest.raises(ExportError, match=r"float\.onnx: no node carries the notes of to_qdq"):
        verify_layers(tmp_path / "float.onnx", {}, {"x": normal(3)})


def chain(length: int) -> tuple[ir.Model, dict[str, Array], dict[str, Array]]:
    """LeakyRelu and a quantizer in turn, with the simulation's values."""
    g = Graph()
    v, now = g.input("x", 2, 2), normal(2, 2)
    feeds, values = {"x": now}, {}
    for i in range(length):
        v = g.mark(g.op("LeakyRelu", v, name=f"relu_{i}"), f"relu_{i}", "uint8", (-1, 3))
        values[f"relu_{i}"] = now = fake_quantize(
            np.where(now < 0, now * np.float32(0.01), now), g.encodings[f"relu_{i}"]
        )
    return to_qdq(g.model(v), g.encodings).model, values, feeds


def test_a_failure_stays_in_its_part() -> None:
    made, values, feeds = chain(250)
    next(n for n in made.graph if n.op_type == "LeakyRelu" and "node_2" == n.name).op_type = "NoSuchOperator"
    report = verify_layers(made, values, feeds)
    bad = [row.site for row in report.rows if not row.ok]
    assert 0 < len(bad) <= 100 and "relu_1" in bad and "relu_249" not in bad and len(report.rows) == 250


def test_hundreds_of_layers_at_linear_cost_without_recursion() -> None:
    def cost(length: int) -> int:
        model, values, feeds = chain(length)
        reports = []
        taken = steps(lambda: reports.append(verify_layers(model, values, feeds)))
        assert reports[0].ok
        return taken

    with calls_left(150):
        cost(10)
        assert cost(200) <= 4 * cost(50)


def test_a_file_that_is_not_valid_is_said_to_be_so(tmp_path: Path) -> None:
    model, g = network()
    sites, outputs = simulate(model, g.encodings, FEEDS, BIASES)
    save_model(to_qdq(model, g.encodings).model, tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx")
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend(reversed(nodes))
    proto.graph.output[0].type.tensor_type.shape.SetInParent()  # the checker asks for one first
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="it is not a valid ONNX model: .*topologically sorted"):
        verify_layers(tmp_path / "m.onnx", sites, FEEDS, outputs=outputs)


@pytest.mark.parametrize(
    ("equal", "level", "reason"),
    [
        (
            (1.0, 0.999, 0.9995),
            24.0,
            "it begins at b, the first of 2 places with values on the other side of the edge of a step (0.100%",
        ),
        (
            (1.0, 1.0, 0.9995),
            24.0,
            "it begins at c, the only place with values on the other side of the edge of a step (0.050%",
        ),
        ((1.0, 1.0, 1.0), 24.0, "no compared place differs, so this comes from what is listed below"),
        ((1.0, 0.999, 1.0), 61.0, ""),
    ],
)
def test_an_output_that_is_far_from_the_simulation_has_a_reason(
    equal: tuple[float, ...], level: float, reason: str
) -> None:
    rows = tuple(
        Row(name, 0, name, "uint8", ("Conv",), "QLinearConv", found := Agreement(share, 1 - share, 1000), found)
        for name, share in zip("abc", equal, strict=True)
    )
    text = str(VerifyReport(rows, (OutputRow("y", level, level),)))
    line = next(line for line in text.splitlines() if line.startswith("output y"))
    assert reason in line
    assert ("; " in line) == bool(reason)
    alone = [replace(row, as_float=Agreement(1.0, 0.0, 1000)) for row in rows]
    text = str(VerifyReport(tuple(alone), (OutputRow("y", math.inf, level),)))
    assert (
        reason.replace(" of a step (", " of a step with integer kernels (") in text
    )  # of float kernels nothing is far
