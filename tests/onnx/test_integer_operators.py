"""Files whose operators compute on codes are read: what their simulation computes is what ONNX Runtime's integer kernels do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from typer.testing import CliRunner

from bitwright.cli.app import app
from bitwright.onnx import QuantizationSimModel
from tests.onnx.nets import Array, Net, run

CALIBRATION = [np.random.default_rng(i).normal(size=(2, 3, 12, 12)).astype(np.float32) for i in range(6)]


def vision() -> onnx.ModelProto:
    """Every operator that ONNX Runtime's tool has an integer one for, and those that move codes."""
    n = Net()
    x = n.input("x", ("n", 3, 12, 12))
    a = n("Relu", n.conv(x, 3, 8, name="first", pads=[1] * 4))
    b = n("LeakyRelu", n.conv(a, 8, 8, name="second", pads=[1] * 4), alpha=0.1)
    c = n("Add", a, b)
    d = n("MaxPool", c, kernel_shape=[2, 2], strides=[2, 2])
    e = n("Sigmoid", n.conv(d, 8, 8, name="gate", k=1))
    f = n("Mul", d, e)
    g = n("Concat", f, n("Transpose", n("Transpose", d, perm=[0, 1, 3, 2]), perm=[0, 1, 3, 2]), axis=1)
    h = n("AveragePool", g, kernel_shape=[2, 2], strides=[2, 2])
    i = n("GlobalAveragePool", n.conv(h, 16, 12, name="third", group=4))
    j = n("Gemm", n("Flatten", i), n.weights(6, 12), n.weights(6), transB=1)
    k = n("MatMul", n("Softmax", j, axis=-1), n.weights(6, 5))
    return n.model(n("Relu", k, out="y"))


@contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def static(model: onnx.ModelProto, folder: Path, form: str = "QOperator", **options: Any) -> onnx.ModelProto:
    """``model`` as ONNX Runtime's own tool writes it, in the QOperator format or in QDQ."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rest = iter(CALIBRATION)

        def get_next(self) -> Any:
            batch = next(self.rest, None)
            return None if batch is None else {"x": batch}

    onnx.save(model, folder / "float.onnx")
    with quiet():
        quantize_static(
            folder / "float.onnx", folder / "integer.onnx", Reader(), quant_format=QuantFormat[form], **options
        )
    return onnx.load(folder / "integer.onnx")


def dynamic(model: onnx.ModelProto, folder: Path, **options: Any) -> onnx.ModelProto:
    from onnxruntime.quantization import quantize_dynamic

    onnx.save(model, folder / "float.onnx")
    with quiet():
        quantize_dynamic(folder / "float.onnx", folder / "integer.onnx", **options)
    return onnx.load(folder / "integer.onnx")


def kinds(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


def sqnr(want: Array, got: Array) -> float:
    return float(10 * np.log10((want**2).sum() / max(((want - got) ** 2).sum(), 1e-30)))


def _types() -> dict[str, dict[str, Any]]:
    from onnxruntime.quantization import QuantType as T

    return {
        "default": {},
        "per channel": {"per_channel": True},
        "signed": {"activation_type": T.QInt8, "weight_type": T.QInt8},
    }


@pytest.mark.parametrize("options", _types())
def test_a_file_of_integer_operators_is_simulated_as_its_kernels_compute(tmp_path, options):
    model = static(vision(), tmp_path, **_types()[options])
    wanted = {"QLinearConv", "QLinearMatMul", "QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearSigmoid", "QGemm",
              "QLinearLeakyRelu", "QLinearGlobalAveragePool", "QLinearAveragePool", "QLinearSoftmax"}  # fmt: skip
    assert wanted <= kinds(model), wanted - kinds(model)
    sim = QuantizationSimModel(model, {"x": CALIBRATION[0]}, threads=1)
    assert sim.calibrated, "its grids are those of the file"
    assert any("operators on codes are float operators" in note and "4 QLinearConv" in note for note in sim.notes)
    assert {"first", "first_relu", "second", "gate", "third"} <= {name.partition(".")[0] for name in sim.quantizers}
    step = float(np.asarray(sim.quantizers["y"].encoding.scale)) if "y" in sim.quantizers else None
    for batch in CALIBRATION[:3]:
        want, got = run(model, {"x": batch})[0], sim.run({"x": batch})[0]
        assert sqnr(want, got) > 30 and (step is None or np.abs(want - got).max() <= 2.5 * step)
    exported = sim.export(tmp_path, "again")
    assert kinds(onnx.load(exported.qdq)) & wanted == set()
    assert sim.verify().ok


def test_every_operator_on_codes_alone_gives_the_codes_of_its_kernel(tmp_path):
    """One operator a model: what comes out is the kernel's, to a step where its own arithmetic is not exact."""
    for name, (build, exact) in SINGLE.items():
        n = Net(seed=3)
        x = n.input("x", (2, 4, 6, 6))
        grid = n.const(np.float32(0.0517)), n.const(np.uint8(120))
        codes = n("QuantizeLinear", x, *grid)
        out, back = build(n, codes, grid)
        model = n.model(n("DequantizeLinear", out, *back, out="y"), domains={"com.microsoft": 1})
        feeds = {"x": np.random.default_rng(5).normal(size=(2, 4, 6, 6)).astype(np.float32) * 2}
        sim = QuantizationSimModel(model, feeds, threads=1)
        want, got = run(model, feeds, optimize=True)[0], sim.run(feeds)[0]
        step = float(numpy_helper.to_array(next(i for i in model.graph.initializer if i.name == back[0])))
        apart = np.abs(np.rint((want - got) / step))
        assert apart.max() <= (0 if exact else 1) and (apart > 0).mean() < 0.02, (name, apart.max(), (apart > 0).mean())


def _single(op: str, **attributes: Any) -> Callable[[Net, str, tuple[str, str]], tuple[str, tuple[str, str]]]:
    def build(n: Net, codes: str, grid: tuple[str, str]) -> tuple[str, tuple[str, str]]:
        back = n.const(np.float32(0.03)), n.const(np.uint8(128))
        return n(op, codes, *grid, *back, domain="com.microsoft", **attributes), back

    return build


def _pair(op: str) -> Callable[[Net, str, tuple[str, str]], tuple[str, tuple[str, str]]]:
    def build(n: Net, codes: str, grid: tuple[str, str]) -> tuple[str, tuple[str, str]]:
        back = n.const(np.float32(0.0971)), n.const(np.uint8(100))
        other = n.const(n.random.integers(0, 255, (4, 1, 1)).astype(np.uint8)), n.const(np.float32(0.0213)), grid[1]
        return n(op, codes, *grid, *other, *back, domain="com.microsoft"), back

    return build


def _moved(
    op: str, *more: Any, **attributes: Any
) -> Callable[[Net, str, tuple[str, str]], tuple[str, tuple[str, str]]]:
    def build(n: Net, codes: str, grid: tuple[str, str]) -> tuple[str, tuple[str, str]]:
        return n(op, codes, *map(n.const, more), **attributes), grid

    return build


def _convolution(n: Net, codes: str, grid: tuple[str, str]) -> tuple[str, tuple[str, str]]:
    back = n.const(np.float32(0.2)), n.const(np.uint8(128))
    weight = n.const(n.random.integers(-127, 127, (5, 4, 3, 3)).astype(np.int8)), n.const(np.full(5, 0.01, np.float32))
    zeros, bias = n.const(np.zeros(5, np.int8)), n.const(n.random.integers(-900, 900, 5).astype(np.int32))
    return n("QLinearConv", codes, *grid, *weight, zeros, *back, bias), back


def _chosen(n: Net, codes: str, grid: tuple[str, str]) -> tuple[str, tuple[str, str]]:
    back = n.const(np.float32(0.06)), n.const(np.uint8(128))
    condition = n.const(n.random.integers(0, 2, (2, 4, 6, 6)).astype(bool))
    other = n.const(n.random.integers(0, 255, (2, 4, 6, 6)).astype(np.uint8)), n.const(np.float32(0.0213)), grid[1]
    return n("QLinearWhere", condition, codes, *grid, *other, *back, domain="com.microsoft"), back


SINGLE: dict[str, tuple[Callable[..., Any], bool]] = {
    "QLinearConv": (_convolution, True),
    "QLinearAdd": (_pair("QLinearAdd"), False),
    "QLinearMul": (_pair("QLinearMul"), False),
    "QLinearSigmoid": (_single("QLinearSigmoid"), False),
    "QLinearLeakyRelu": (_single("QLinearLeakyRelu", alpha=0.2), False),
    "QLinearGlobalAveragePool": (_single("QLinearGlobalAveragePool"), False),
    "QLinearWhere": (_chosen, False),
    "Reshape": (_moved("Reshape", np.int64([2, -1])), True),
    "Transpose": (_moved("Transpose", perm=[0, 2, 3, 1]), True),
    "MaxPool": (_moved("MaxPool", kernel_shape=[2, 2], strides=[2, 2]), True),
    "Slice": (_moved("Slice", np.int64([1]), np.int64([3]), np.int64([1])), True),
    "Gather": (_moved("Gather", np.int64([3, 0]), axis=1), True),
}


def sequence() -> onnx.ModelProto:
    n = Net()
    x = n.input("x", (5, 2, 16))
    h = n("MatMul", x, n.weights(16, 24), name="inner")
    h = n("Relu", n("Add", h, n.weights(24)))
    parts = [n.weights(1, 4 * 8, 24), n.weights(1, 4 * 8, 8), n.weights(1, 8 * 8)]
    y, _, _ = n("LSTM", h, *parts, name="lstm", out=["seq", "last", "cell"], hidden_size=8)
    return n.model(n("MatMul", n("Squeeze", y, n.const(np.int64([1]))), n.weights(8, 4), name="head", out="y"))


def test_a_dynamically_quantized_file_keeps_its_weights_and_the_rules_decide_about_activations(tmp_path):
    model = dynamic(sequence(), tmp_path, per_channel=True)
    assert {"MatMulInteger", "DynamicQuantizeLinear", "DynamicQuantizeLSTM"} <= kinds(model)
    data = [{"x": np.random.default_rng(i).normal(size=(5, 2, 16)).astype(np.float32)} for i in range(4)]
    sim = QuantizationSimModel(model, data[0], threads=1)
    assert any("were chosen at run time: the rules decide" in note for note in sim.notes)
    codes = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    assert not sim.calibrated
    sim.compute_encodings(data, progress=False)
    for feeds in data:
        assert sqnr(run(model, feeds, optimize=True)[0], sim.run(feeds)[0]) > 25
    inner = next(name for name in codes if name.endswith("_quantized") and codes[name].shape == (16, 24))
    scale = np.asarray(sim.quantizers[inner.removesuffix("_quantized")].encoding.scale)
    np.testing.assert_array_equal(scale.reshape(-1), codes[inner.replace("_quantized", "_scale")])
    assert {"inner.input[0]", "lstm.output[0]", "head.output[0]"} <= set(sim.quantizers), (
        "under the names of the float model"
    )
    assert sim.verify().ok


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_weights_in_packed_integers_are_read_block_by_block(bits, zeros):
    rng, columns, inner, size = np.random.default_rng(0), 6, 40, 16
    blocks = -(-inner // size)
    codes = rng.integers(0, 1 << bits, (columns, blocks * size)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.1, (columns, blocks)).astype(np.float32)
    origin = rng.integers(0, 1 << bits, (columns, blocks)).astype(np.uint8)
    pack = (lambda a: a) if bits == 8 else (lambda a: a[..., ::2] | a[..., 1::2] << 4)
    n = Net()
    x = n.input("x", (3, inner))
    parts = [n.const(pack(codes.reshape(columns, blocks, size))), n.const(scales.reshape(-1))]
    if zeros:
        even = np.pad(origin, ((0, 0), (0, blocks % 2 if bits == 4 else 0)))
        parts.append(n.const(pack(even).reshape(-1)))
    y = n("MatMulNBits", x, *parts, name="nbits", out="y", domain="com.microsoft", K=inner, N=columns, bits=bits,
          block_size=size, accuracy_level=1)  # fmt: skip
    model = n.model(y, domains={"com.microsoft": 1}, opset=21, ir_version=10)
    feeds = {"x": rng.normal(size=(3, inner)).astype(np.float32)}
    sim = QuantizationSimModel(model, feeds, preset="w8", threads=1)
    np.testing.assert_allclose(sim.run(feeds)[0], run(model, feeds)[0], rtol=1e-4, atol=1e-4)
    middle = origin if zeros else np.full_like(origin, 1 << (bits - 1))
    values = (codes.reshape(columns, blocks, size).astype(np.float32) - middle[..., None]) * scales[..., None]
    want = feeds["x"] @ values.reshape(columns, -1)[:, :inner].T
    np.testing.assert_allclose(sim.run(feeds)[0], want, rtol=1e-4, atol=1e-4)


def bounded() -> onnx.ModelProto:
    """ReLU and ReLU6 that tools fold into the grid after a layer, and a sum that is negative in places."""
    n = Net()
    x = n.input("x", ("n", 3, 12, 12))
    a = n("Relu", n.conv(x, 3, 8, name="first", pads=[1] * 4))
    b = n("Clip", n.conv(a, 8, 8, name="second", pads=[1] * 4), n.const(np.float32(0)), n.const(np.float32(6)))
    c = n("Relu", n("Add", n.conv(b, 8, 8, name="third", pads=[1] * 4), a))
    return n.model(n("Gemm", n("Flatten", n("GlobalAveragePool", c)), n.weights(8, 5), out="y"))


@pytest.mark.parametrize("form", ["QOperator", "QDQ"])
@pytest.mark.parametrize("net", [vision, bounded])
def test_strip_makes_the_float_model_again_with_the_activations_that_its_grids_stand_for(tmp_path, net, form):
    model = static(net(), tmp_path, form, per_channel=True)
    assert kinds(net()) & {"Relu", "Clip"} and not kinds(model) & {"Relu", "Clip"}
    out = tmp_path / "stripped.onnx"
    result = CliRunner().invoke(app, ["strip", str(tmp_path / "integer.onnx"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = onnx.load(out)
    assert not {k for k in kinds(found) if k.startswith("Q") or "Quantize" in k} and "Relu" in kinds(found)
    assert ("Clip" in kinds(found)) == (net is bounded), "the second layer's largest value is 6"
    loud = np.random.default_rng(7).normal(size=(2, 3, 12, 12)).astype(np.float32) * 4  # beyond what was calibrated
    for batch in (*CALIBRATION[:2], loud):
        assert sqnr(run(net(), {"x": batch})[0], run(found, {"x": batch})[0]) > 35, "only weights were rounded"


def test_an_operator_on_codes_of_an_unknown_form_is_refused_by_its_name():
    n = Net()
    x, w = n.input("x", (2, 4), onnx.TensorProto.UINT8), n.const(np.ones((4, 4), np.uint8))
    model = n.model((n("MatMulInteger", x, w, name="product", out="y"), onnx.TensorProto.INT32, (2, 4)))
    with pytest.raises(Exception, match=r"^product: .* MatMulInteger .* Remedy: start from the float model"):
        QuantizationSimModel(model)
