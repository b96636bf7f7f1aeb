"""Models opened for a change: layers computed in numpy, shapes that need no run."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import bitwright.onnx.opened
from bitwright.onnx.model.load import load_model
from bitwright.onnx.model.view import OnnxView
from bitwright.onnx.opened import _FoldingView, _stated_shapes
from tests.onnx import flow

LAYERS = {
    "plain": ((2, 6, 9, 8), (4, 6, 3, 3), {}),
    "padded, with strides": ((2, 6, 9, 8), (4, 6, 3, 3), {"strides": [2, 3], "pads": [1, 2, 0, 1]}),
    "dilated": ((1, 6, 9, 11), (4, 6, 3, 2), {"dilations": [2, 3]}),
    "grouped": ((2, 6, 5, 5), (9, 2, 3, 1), {"group": 3, "pads": [1, 0, 1, 0]}),
    "depthwise, two outputs for a channel": ((2, 6, 5, 5), (12, 1, 3, 3), {"group": 6, "pads": [1, 1, 1, 1]}),
    "one axis": ((3, 6, 12), (4, 6, 5), {"strides": [2]}),
    "three axes": ((1, 4, 4, 5, 6), (3, 4, 2, 3, 1), {"strides": [1, 2, 1]}),
}


def layer(op_type, shape, arrays, **attributes):
    node = helper.make_node(op_type, ["x", *arrays], ["y"], name="layer", **attributes)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph([node], "g", [given], [made], weights)
    return load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def compared(monkeypatch, loaded, x):
    """What a view of folding computes without the runtime, and what the runtime does."""
    expected = OnnxView(loaded).local("layer")(x)
    monkeypatch.setattr(OnnxView, "_single", lambda self, node: pytest.fail("the runtime was asked"))
    np.testing.assert_allclose(_FoldingView(loaded, None, None).local("layer")(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("biased", (False, True))
def test_convolutions_in_numpy_are_those_of_the_runtime(monkeypatch, name, biased):
    shape, weight, attributes = LAYERS[name]
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal(weight).astype(np.float32)}
    arrays |= {"b": rng.standard_normal(weight[0]).astype(np.float32)} if biased else {}
    x = rng.standard_normal(shape).astype(np.float32)
    compared(monkeypatch, layer("Conv", shape, arrays, **attributes), x)


@pytest.mark.parametrize("shape", [(2, 5), (2, 5, 7), (2, 5, 3, 4)], ids=str)
def test_batch_norms_in_numpy_are_those_of_the_runtime(monkeypatch, shape):
    rng = np.random.default_rng(0)
    arrays = {name: rng.uniform(0.1, 2, 5).astype(np.float32) for name in ("scale", "bias", "mean", "var")}
    compared(
        monkeypatch,
        layer("BatchNormalization", shape, arrays, epsilon=1e-2),
        rng.standard_normal(shape).astype(np.float32),
    )


@pytest.mark.parametrize("kind", ["large", "padded by rule", "float64"])
def test_other_layers_are_asked_of_the_runtime(monkeypatch, kind):
    dtype = np.float64 if kind == "float64" else np.float32
    if kind == "large":
        monkeypatch.setattr(bitwright.onnx.opened, "_SMALL", 10)
    node = helper.make_node(
        "Conv", ["x", "w"], ["y"], **({"auto_pad": "SAME_UPPER"} if kind == "padded by rule" else {})
    )
    arrays = [np.ones((1, 2, 4, 4), dtype), np.ones((3, 2, 2, 2), dtype)]
    read = helper.make_model(helper.make_graph([node], "g", [], []))
    assert bitwright.onnx.opened._in_numpy(onnx_node(read), arrays) is None


def onnx_node(model: onnx.ModelProto):
    import onnx_ir as ir

    return next(iter(ir.from_proto(model).graph))


def test_shapes_are_stated_where_the_inputs_fix_them_and_measured_elsewhere():
    arrays = {"w": np.ones((4, 6, 3, 3), np.float32)}
    assert _stated_shapes(layer("Conv", (2, 6, 9, 8), arrays).model) == {"x": (2, 6, 9, 8), "y": (2, 4, 7, 6)}
    assert _stated_shapes(layer("Conv", ("n", 6, 9, 8), arrays).model) is None
    assert _stated_shapes(load_model(flow.branches()).model) is None
