"""Outputs that are transposed and then quantized stay as they are: ONNX Runtime's optimiser would quantize them too."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from bitwright.compare.verify import verify_folder
from bitwright.onnx import QuantizationSimModel
from tests.onnx.nets import Net, run


def similarities(moved=()):
    """As CLIP has it: vectors of length one, returned, and their products."""
    net = Net()
    found = []
    for name in ("x", "y"):
        product = net("Gemm", net.input(name, (4, 8)), net.weights(16, 8), transB=1, name=f"fc_{name}")
        norm = net("ReduceL2", product, axes=[1], keepdims=1)
        found.append(net("Div", product, norm, out=f"{name}_embedding"))
    turned = net("Transpose", found[1], perm=[1, 0])
    for op in moved:
        turned = net(op, turned, net.const(np.array([0])))
    return net.model(net("MatMul", found[0], turned, out="scores"), *found)


def feeds():
    random = np.random.default_rng(0)
    return {name: random.standard_normal((4, 8)).astype(np.float32) for name in ("x", "y")}


def calibrated(moved=()):
    sim = QuantizationSimModel(similarities(moved), feeds())
    sim.compute_encodings([feeds()])
    return sim


MOVED = pytest.mark.parametrize("moved", ((), ("Unsqueeze", "Squeeze")), ids=("directly", "moved-on"))


@MOVED
def test_the_simulation_returns_what_nothing_quantizes(moved):
    sim = calibrated(moved)
    written = run(sim.simulation().model, feeds())  # as written: nothing is optimised
    for one, other in zip(written, sim.run(feeds()), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    assert np.unique(sim.run(feeds())[2]).size > 50  # of 64 numbers in float


@MOVED
def test_the_exported_file_returns_it_too(moved, tmp_path):
    sim = calibrated(moved)
    sim.export(tmp_path, "model")
    report = verify_folder(tmp_path)
    assert report.ok, str(report)
    written = ir.load(tmp_path / "model.onnx")
    for one, other in zip(run(written, feeds()), run(written, feeds(), optimize=True), strict=True):
        assert np.abs(one - other).max() <= 0.02 * np.abs(one).max()
    np.testing.assert_allclose(run(written, feeds(), optimize=True)[2], run(written, feeds())[2], rtol=1e-5, atol=1e-6)


def test_reading_the_file_takes_the_guard_out_again(tmp_path):
    calibrated().export(tmp_path, "model")
    assert any(node.op_type == "Reshape" for node in ir.load(tmp_path / "model.onnx").graph)
    again = QuantizationSimModel(tmp_path / "model.onnx", feeds())
    assert not any(op.type == "Reshape" for op in again.graph.ops)
    np.testing.assert_allclose(again.run(feeds())[2], calibrated().run(feeds())[2], atol=1e-6)


def test_a_file_without_such_an_output_has_no_guard(tmp_path):
    net = Net()
    x = net("Transpose", net.input("x", (4, 8)), perm=[1, 0])
    model = net.model(net("MatMul", x, net.weights(4, 3), out="y"))
    sim = QuantizationSimModel(model, {"x": feeds()["x"]})
    sim.compute_encodings([{"x": feeds()["x"]}])
    sim.export(tmp_path, "model")
    assert not any(node.op_type == "Reshape" for node in ir.load(tmp_path / "model.onnx").graph)


def channels_last(size):
    """As TensorFlow has it: convolutions between Transposes, and a sum that is returned, read on and added again."""
    net = Net()
    h = net.conv(net("Transpose", net.input("x", ("N", *size, 3)), perm=[0, 3, 1, 2]), 3, 4, k=1, name="first")
    other = net("Transpose", net.conv(h, 4, 4, k=1, name="second"), perm=[0, 2, 3, 1])
    seen = net("Add", net("Transpose", h, perm=[0, 2, 3, 1]), other, name="sum", out="seen")
    third = net.conv(net("Transpose", seen, perm=[0, 3, 1, 2]), 4, 4, k=1, name="third")
    last = net("Add", net("Transpose", third, perm=[0, 2, 3, 1]), seen, name="again")
    y = net("ReduceMean", last, axes=[1, 2], keepdims=0, out="y")
    return net, y


@pytest.mark.quick_variants("oblong-inside")
@pytest.mark.parametrize("returned", (True, False), ids=("returned", "inside"))
@pytest.mark.parametrize("size", ((5, 6), (4, 4)), ids=("oblong", "as-many-pixels-as-channels"))
def test_values_of_a_channels_last_model_keep_their_layout(size, returned, tmp_path):
    """ONNX Runtime fails on one of these as an output, or computes wrong numbers where the layouts have one shape."""
    net, y = channels_last(size)
    random = np.random.default_rng(0)
    data = [{"x": random.standard_normal((2, *size, 3)).astype(np.float32)} for _ in range(3)]
    sim = QuantizationSimModel(net.model(y, *(["seen"] if returned else [])), data[0])
    sim.compute_encodings(data)
    written = run(sim.simulation().model, data[0])  # as written: nothing is optimised
    for one, other in zip(written, sim.run(data[0]), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
    ((seen,),) = sim.capture(["sum.output[0]"], data[0]).values()
    assert seen.shape == (2, *size, 4)
    if returned:
        np.testing.assert_allclose(seen, written[1], rtol=1e-5, atol=1e-5)
    sim.export(tmp_path, "model")
    report = verify_folder(tmp_path)
    assert report.ok, str(report)
    assert all(min(end.as_float, end.as_integer) > 40 for end in report.outputs)
    again = QuantizationSimModel(tmp_path / "model.onnx", data[0]) if returned else sim
    np.testing.assert_allclose(again.run(data[0])[0], sim.run(data[0])[0], rtol=1e-4, atol=1e-4)
