"""Files that ONNX Runtime's optimizer has saved are read in operators of the standard, and computed as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ModelError
from bitwright.onnx import quantize
from bitwright.onnx.model.load import load_model
from bitwright.onnx.model.rewrites import block_length
from tests.onnx.nets import Net, feeds_for, run


def residual(n: Net) -> str:
    h = n("Relu", n.conv(n.input("x", ("n", 3, 8, 8)), 3, 4, name="c1", pads=[1] * 4), name="r1")
    return n("Relu", n("Add", n.conv(h, 4, 4, name="c2", pads=[1] * 4), h, name="add"), name="r2")


def bottleneck(n: Net) -> str:
    h = n("Relu", n.conv(n.input("x", ("n", 3, 16, 16)), 3, 32, name="c1", pads=[1] * 4), name="r1")
    p = n("MaxPool", h, kernel_shape=[2, 2], strides=[2, 2], name="pool")
    h = n("Relu", n.conv(p, 32, 24, name="c2", pads=[1] * 4), name="r2")
    h = n("Relu", n("Add", n.conv(h, 24, 32, name="c3", pads=[1] * 4), p, name="add"), name="r3")
    h = n("Flatten", n("GlobalAveragePool", h, name="mean"), name="flat")
    return n("Gemm", h, n.weights(10, 32, name="fc.w"), n.weights(10, name="fc.b"), transB=1, name="fc")


def depthwise(n: Net) -> str:
    """Twelve and twenty channels, which fill no blocks."""
    h = n.conv(n.input("x", ("n", 3, 16, 16)), 3, 12, name="c1", pads=[1] * 4, strides=[2, 2])
    h = n("Clip", h, n.const(np.float32(0)), n.const(np.float32(6)), name="clip")
    h = n.conv(h, 12, 12, name="dw", group=12, pads=[1] * 4)
    h = n("Mul", h, n("HardSigmoid", h, name="hard"), name="mul")
    return n("Sigmoid", n.conv(h, 12, 20, k=1, name="pw"), name="sigmoid")


def joined(n: Net) -> str:
    h = n.conv(n.input("x", ("n", 3, 16, 16)), 3, 32, name="c1", pads=[1] * 4)
    h = n("LeakyRelu", h, alpha=0.1, name="leaky")
    p = n("AveragePool", h, kernel_shape=[2, 2], strides=[2, 2], name="pool")
    t = n("Tanh", n.conv(p, 32, 16, name="c2", pads=[1] * 4), name="tanh")
    scales = n.const(np.float32([1, 1, 2, 2]))
    how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    up = n("Resize", t, "", scales, name="up", **how)
    h = n.conv(n("Concat", up, h, axis=1, name="cat"), 48, 8, name="c3", pads=[1] * 4)
    return n("Transpose", h, perm=[0, 2, 3, 1], name="last")


def grouped(n: Net) -> str:
    h = n.conv(n.input("x", ("n", 20, 8, 8)), 20, 32, k=1, name="c1")
    return n("Relu", n.conv(h, 32, 64, name="g", group=2, pads=[1] * 4), name="r")


def normed(n: Net) -> str:
    h = n("Relu", n.conv(n.input("x", ("n", 3, 8, 8)), 3, 12, name="c1", pads=[1] * 4), name="r")
    return n.bn(h, 12)


def channels_last(n: Net) -> str:
    h = n("Transpose", n.input("x", ("n", 8, 8, 16)), perm=[0, 3, 1, 2], name="t")
    h = n("Relu", n.conv(h, 16, 24, name="c1", pads=[1] * 4), name="r")
    return n.conv(n("GlobalMaxPool", h, name="max"), 24, 20, k=1, name="pw")


def sound(n: Net) -> str:
    w = n.weights(8, 4, 3, name="w")
    return n("Relu", n("Conv", n.input("x", ("n", 4, 16)), w, n.weights(8), name="c", pads=[1, 1]), name="r")


def product(n: Net) -> str:
    h = n("Transpose", n.input("x", (16, 8)), perm=[1, 0], name="t")
    return n("Mul", n("MatMul", h, n.weights(16, 16, name="w"), name="mm"), n.const(np.float32(0.3)), name="scaled")


def classifier(n: Net) -> str:
    h = n("Gemm", n.input("x", ("n", 16)), n.weights(16, 16, name="w"), n.weights(16), transB=1, name="fc")
    return n("LeakyRelu", h, alpha=0.2, name="leaky")


LAYERS: dict[Callable[[Net], str], int] = {
    residual: 2, bottleneck: 4, depthwise: 3, joined: 3, grouped: 2, normed: 2, channels_last: 2, sound: 1, product: 1,
    classifier: 1,
}  # fmt: skip


def optimized(model: onnx.ModelProto, folder: Any) -> onnx.ModelProto:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimized.onnx")


@pytest.mark.parametrize("build", LAYERS, ids=lambda build: build.__name__)
def test_an_optimized_file_is_the_model_it_was(build, tmp_path):
    n = Net(3)
    model = n.model(build(n))
    written, feeds = optimized(model, tmp_path), feeds_for(model)
    assert any(node.domain.startswith("com.microsoft") for node in written.graph.node)
    loaded = load_model(written)
    assert not any(node.domain for node in loaded.model.graph.all_nodes())
    assert loaded.notes[-1].startswith(
        "what ONNX Runtime's optimizer wrote is in operators of the standard again: com.m"
    )
    kinds = [[node.op_type for node in m.graph.node] for m in (model, ir.to_proto(loaded.model))]
    if build not in (normed, channels_last, joined):  # a norm became a convolution, transposes moved
        assert sorted(kinds[0]) == sorted(kinds[1])
    if build not in (normed, depthwise):  # how many a convolution hands to the next one is not said
        sizes = [
            sorted(list(t.dims) for t in m.graph.initializer if len(t.dims) > 1)
            for m in (model, ir.to_proto(loaded.model))
        ]
        assert sizes[0] == sizes[1], "channels that only fill a block are gone"
    for expected, found in zip(run(model, feeds), run(loaded.model, feeds), strict=True):
        assert sqnr(expected, found) > 100


@pytest.mark.parametrize("build", LAYERS, ids=lambda build: build.__name__)
def test_an_optimized_file_is_quantized_as_the_model_is(build, tmp_path):
    n = Net(3)
    model = n.model(build(n))
    feeds = [feeds_for(model, seed) for seed in range(3)]
    found = []
    for source in (model, optimized(model, tmp_path)):
        result = quantize(source, feeds, recipe=["fold"], progress=False, measure_speed=False)
        weights = sum(site.role == "weight" and site.enabled for site in result.sim.quantizers.values())
        assert weights == LAYERS[build] - (build is normed and source is model)
        found.append(sqnr(run(model, feeds[0])[0], result.sim.run(feeds[0])[0]))
    assert found[1] > found[0] - 1


def test_a_file_for_another_cpu_is_refused(tmp_path, monkeypatch):
    n = Net(3)
    written = optimized(n.model(residual(n)), tmp_path)
    monkeypatch.setattr("bitwright.onnx.model.rewrites.block_length", lambda: block_length.__wrapped__() * 3)
    with pytest.raises(
        ModelError, match=r"weight of shape \[\d+, 3, 3, 3\] is in blocks of another length.*another CPU"
    ):
        load_model(written)
    other = block_length() * 2 if block_length() == 8 else 8
    n = Net(3)
    written = optimized(n.model(bottleneck(n)), tmp_path)
    monkeypatch.setattr("bitwright.onnx.model.rewrites.block_length", lambda: other)
    with pytest.raises(ModelError, match="blocks of another length|differs from that of the same model"):
        load_model(written)


def test_an_activation_function_that_is_not_known_is_named():
    n = Net(3)
    n.input("x", (1, 4, 16))
    n.nodes.append(
        onnx.helper.make_node(
            "FusedConv", ["x", n.weights(8, 4, 3)], ["y"], "fused", domain="com.microsoft", activation="Swirl"
        )
    )
    with pytest.raises(ModelError, match="fused: it is a FusedConv .*with the activation function 'Swirl'"):
        load_model(n.model("y", domains={"com.microsoft": 1}))
