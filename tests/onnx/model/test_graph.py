"""The graph of a model: what operators are called, what they read, what is constant, and what bodies become."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bitwright.core.placement.config import load_config
from bitwright.core.placement.place import place
from bitwright.onnx.model.graph import UNKNOWN, build_graph
from bitwright.onnx.model.load import load_model
from tests.onnx import flow
from tests.onnx.nets import FLOAT, INT64, Net, conv_chain


def graph_of(model, **more):
    return build_graph(load_model(model).model, **more).graph


def plan_of(model):
    graph = graph_of(model)
    return place(graph, load_config())


# ------------------------------------------------------------------------------------------ types, attributes


def one(op, *shapes, consts=(), opset=17, outs=1, dtype=FLOAT, **attrs) -> onnx.ModelProto:
    """A model of one node: inputs of ``shapes``, then constants."""
    net = Net()
    names = [net.input(f"x{i}", shape, dtype) for i, shape in enumerate(shapes)]
    names += ["" if c is None else net.const(c) for c in consts]
    out = net(op, *names, name="node", out=[f"y{i}" for i in range(outs)], **attrs)
    first = out if outs == 1 else out[0]
    return net.model((first, INT64 if op == "Cast" and attrs["to"] == INT64 else FLOAT, None), opset=opset)


TYPES = {
    "conv": (one("Conv", (1, 2, 4, 4), consts=[np.ones((3, 2, 3, 3))]), "Conv"),
    "nearest": (one("Resize", (1, 2, 4, 4), consts=[None, np.float32([1, 1, 2, 2])], mode="nearest"), "ResizeNearest"),
    "linear": (one("Resize", (1, 2, 4, 4), consts=[None, np.float32([1, 1, 2, 2])], mode="linear"), "Resize"),
    "upsample": (one("Upsample", (1, 2, 4, 4), consts=[np.float32([1, 1, 2, 2])], opset=9), "ResizeNearest"),
    "pad-zero": (one("Pad", (1, 4), consts=[np.int64([0, 1, 0, 1])]), "Pad"),
    "pad-one": (one("Pad", (1, 4), consts=[np.int64([0, 1, 0, 1]), np.float32(1)]), "PadConstant"),
    "pad-reflect": (one("Pad", (1, 4), consts=[np.int64([0, 1, 0, 1])], mode="reflect"), "Pad"),
    "pad-old": (one("Pad", (1, 4), pads=[0, 1, 0, 1], value=2.0, opset=9), "PadConstant"),
    "cast-float": (one("Cast", (1, 4), to=onnx.TensorProto.DOUBLE), "Identity"),
    "cast-int": (one("Cast", (1, 4), to=INT64), "Cast"),
    "gemm": (one("Gemm", (1, 4), consts=[np.ones((4, 3))]), "Gemm"),
    "gemm-of-two": (one("Gemm", (1, 4), (4, 3)), "MatMul"),
    "sum": (one("Sum", (1, 4), (1, 4), (1, 4)), "Add"),
    "sum-of-one": (one("Sum", (1, 4)), "Identity"),
    "largest-of-one": (one("Max", (1, 4)), "Identity"),
    "times-one": (one("Mul", (1, 4), consts=[np.float32(1)]), "Identity"),
    "over-one": (one("Div", (1, 4), consts=[np.float32([1])]), "Identity"),
    "plus-zero": (one("Add", (1, 4), consts=[np.float32(0)]), "Identity"),
    "minus-zero": (one("Sub", (1, 4), consts=[np.float32(0)]), "Identity"),
    "power-of-one": (one("Pow", (1, 4), consts=[np.float32(1)]), "Identity"),
    "times-two": (one("Mul", (1, 4), consts=[np.float32(2)]), "Mul"),
    "times-ones": (one("Mul", (1, 4), consts=[np.ones(4, np.float32)]), "Mul"),
    "another-rank": (one("Mul", (4,), consts=[np.ones((1, 1), np.float32)]), "Mul"),
}


@pytest.mark.parametrize("name", TYPES)
def test_canonical_type(name):
    model, expected = TYPES[name]
    (op,) = graph_of(model).ops
    assert op.type == expected


@pytest.mark.parametrize(("op", "number"), [("Mul", 1), ("Add", 0)])
def test_a_first_operand_that_changes_nothing_is_put_second(op, number):
    net = Net()
    x, constant = net.input("x", (1, 4)), net.const(np.float32(number))
    (found,) = graph_of(net.model(net(op, constant, x, name="node"))).ops
    assert (found.type, found.inputs) == ("Identity", (x, constant))


def test_gather_from_a_table_is_an_embedding():
    net = Net()
    ids = net.input("ids", (2, 3), INT64)
    table = net.weights(10, 4, name="table")
    rows = net("Gather", table, ids, name="embed")
    columns = net("Gather", table, ids, axis=1, name="columns")
    graph = graph_of(net.model(rows, columns))
    assert [(op.type, op.inputs) for op in graph.ops] == [("Embedding", ("table", "ids")), ("Gather", ("table", "ids"))]


def test_operators_of_other_domains_are_named_with_them():
    net = Net()
    y = net("Gelu", net.input("x", (2, 4)), domain="com.microsoft", out="y")
    (op,) = graph_of(net.model(y, domains={"com.microsoft": 1})).ops
    assert op.type == "com.microsoft::Gelu"


ATTRS = {
    "conv": (
        one("Conv", (1, 4, 8, 8), consts=[np.ones((4, 2, 3, 3))], group=2, pads=[1, 1, 1, 1]),
        {"group": 2, "pads": (1, 1, 1, 1), "strides": (1, 1), "dilations": (1, 1)},
    ),
    "gemm": (one("Gemm", (1, 4), consts=[np.ones((3, 4))], transB=1), {"transA": 0, "transB": 1, "alpha": 1, "beta": 1}),
    "clip": (one("Clip", (1, 4), consts=[np.float32(0), np.float32(6)]), {"min": 0, "max": 6}),
    "clip-open": (one("Clip", (1, 4), consts=[None, np.float32(6)]), {"min": None, "max": 6}),
    "clip-old": (one("Clip", (1, 4), min=0.0, max=6.0, opset=9), {"min": 0, "max": 6}),
    "leaky": (one("LeakyRelu", (1, 4)), {"alpha": 0.01}),
    "norm": (one("BatchNormalization", (1, 2, 3), consts=[np.ones(2)] * 4, epsilon=0.5), {"epsilon": 0.5, "training": False}),
    "norm-trains": (
        one("BatchNormalization", (1, 2, 3), consts=[np.ones(2)] * 4, training_mode=1, outs=3),
        {"epsilon": 1e-5, "training": True, "training_mode": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTRS)
def test_attributes_with_their_defaults(name):
    model, expected = ATTRS[name]
    assert dict(graph_of(model).ops[0].attrs) == expected


# ------------------------------------------------------------------------------------------------- constants


def behind(chain: str) -> onnx.ModelProto:
    """A product whose weight comes through a chain of operators."""
    net = Net()
    x, w = net.input("x", (2, 3)), net.weights(4, 3, name="w")
    for step in chain.split():
        if step == "Constant":
            array = np.ones((4, 3), np.float32)
            w = net("Constant", value=onnx.numpy_helper.from_array(array))
        elif step == "Cast":
            w = net("Cast", net("Cast", w, to=onnx.TensorProto.FLOAT16), to=FLOAT)
        elif step == "Reshape":
            w = net("Reshape", w, net.const(np.int64([4, 3])))
        elif step == "DequantizeLinear":
            w = net("DequantizeLinear", net.const(np.ones((4, 3), np.int8)), net.const(np.float32(0.1)))
        else:
            w = net(step, w)
    w = net("Transpose", w, perm=[1, 0], out="wt")
    return net.model(net("MatMul", x, w, name="product", out="y"))


@pytest.mark.parametrize("chain", ["", "Constant", "Identity", "Cast", "Reshape", "DequantizeLinear", "Identity Cast"])
def test_weights_behind_other_operators_are_constants_per_channel(chain):
    graph = graph_of(behind(chain))
    assert [op.name for op in graph.ops] == ["product"]
    value = graph.values["wt"]
    assert (value.kind, value.shape, value.dtype) == ("constant", (3, 4), "float32")
    plan = place(graph, load_config())
    (weight,) = [s for s in plan.sites.values() if s.role == "weight"]
    assert str(weight.spec.describe()) == "int8 symmetric per channel (axis 1), minmax"


def test_constants_know_their_parameters():
    assert graph_of(behind("Identity")).values["wt"].sources == ("w",)


def test_random_numbers_are_no_constants():
    net = Net()
    noise = net("RandomNormal", shape=[2, 4], name="noise")
    graph = graph_of(net.model(net("Add", net.input("x", (2, 4)), noise, name="sum", out="y")))
    assert [op.name for op in graph.ops] == ["noise", "sum"]


def test_unknown_axes_and_measured_shapes():
    net = Net()
    x = net.input("x", ("batch", 3, None, None))
    model = net.model(net.conv(x, name="c", out="y"))
    assert graph_of(model).values["y"].shape == (UNKNOWN, 4, UNKNOWN, UNKNOWN)
    assert graph_of(model, shapes={"y": (2, 4, 6, 6)}).values["y"].shape == (2, 4, 6, 6)


def test_shapes_and_types_behind_an_unknown_operator():
    net = Net()
    h = net("Twist", net.input("x", (1, 3, 8, 8)), domain="acme", out="h")
    c = net.conv(h, name="c", out="c.out")
    graph = graph_of(net.model(net("Relu", net.bn(c), out="y"), domains={"acme": 1}))
    assert graph.values["h"].dtype == "unknown"
    assert graph.values["y"].dtype == "float32"
    assert len(graph.values["y"].shape) == 4
    assert graph.op("h").type == "acme::Twist"


# ---------------------------------------------------------------------------------------------------- bodies


def ops_of(model):
    return {op.name: (op.type, op.inputs, op.also) for op in graph_of(model).ops}


def test_branches_are_operators_of_the_graph():
    ops = ops_of(flow.branches())
    assert list(ops) == ["first", "act", "product_1", "product", "choice", "last"]
    assert ops["product"][1] == ("h", "w")
    assert ops["choice"] == ("If", ("choose", "y_1", "y"), ())


def test_states_are_read_first_as_given_then_as_left():
    ops = ops_of(flow.scan())
    assert ops["hh"] == ("MatMul", ("start", "R"), ((0, "h_out"),))
    assert ops["rnn.x_t"] == ("Slice", ("x",), ())
    assert ops["rnn"] == ("Scan", ("h_out",), ())
    assert ops["rnn.1"] == ("Scan", ("h_each",), ())


def test_loops_nested_in_branches():
    ops = ops_of(flow.loop())
    assert ops["product"] == ("MatMul", ("x", "W"), ((0, "v_out"),))
    assert ops["loop"] == ("Loop", ("v_out",), ())
    assert ops["choice"][1] == ("choose", "looped", "minus")


def test_weights_and_activations_of_bodies_are_placed():
    sites = plan_of(flow.scan()).sites
    assert {"W", "R", "tanh.output[0]", "hh.input[0]", "ih.input[0]"} <= set(sites)
    assert sites["hh.input[0]"].group == "tanh.output[0]"
    assert {"w", "w_1", "product.output[0]"} <= set(plan_of(flow.branches()).sites)


# --------------------------------------------------------------------------------------------- whole graphs


def test_look_alike_names_and_outputs_that_are_read():
    net = Net()
    x = net.input("x", (1, 3, 8, 8))
    a = net.conv(x, name="a", out="hidden_output")
    b = net.conv(a, 4, name="b", out="hidden_output_1")
    c = net.conv(b, 4, name="c", out="hidden_output_1_1")
    model = net.model(a, b, net("Add", net("Relu", c, name="r"), net.conv(b, 4, k=3, name="d"), out="y", name="sum"))
    graph = graph_of(model)
    assert graph.outputs == ("hidden_output", "hidden_output_1", "y")
    assert [r.name for r, _ in graph.consumers("hidden_output_1")] == ["c", "d"]
    weights = [s for s in place(graph, load_config()).sites.values() if s.role == "weight"]
    assert len(weights) == 4
    assert all("per channel" in s.spec.describe() for s in weights)


def test_a_shared_weight_with_two_axes():
    net = Net()
    x, w = net.input("x", (4, 4)), net.weights(4, 4, name="w")
    y = net("MatMul", net("Gemm", x, w, transB=1, name="a"), w, name="b", out="y")
    sites = plan_of(net.model(y)).sites
    assert sites["w"].spec.granularity.axis == 0
    assert sites["w@b"].spec.granularity.axis == 1


def test_a_long_chain_is_read_at_the_default_recursion_limit():
    graph = graph_of(conv_chain(600))
    assert len(graph) == 2400
