"""Outputs that are transposed and then quantized stay as they are: ONNX Runtime's optimiser would quantize them too."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from bitwright.export.verify.samples import verify_folder
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
    np.testing.assert_allclose(
        run(written, feeds(), optimize=True)[2], run(written, feeds())[2], rtol=1e-5, atol=1e-6
    )


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
