"""The graph of a model and the view that algorithms work through: operators, constants, bodies, edits, proofs of finiteness."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import bitwright.onnx
from bitwright.core.placement.config import load_config
from bitwright.core.placement.place import place
from bitwright.core.simulation.float_model import AddBias, Bypass, SetParam, sqnr
from bitwright.errors import ModelError
from bitwright.onnx import equalize_model, opened
from bitwright.onnx.model.graph import UNKNOWN, build_graph
from bitwright.onnx.model.instrument import finite_proofs
from bitwright.onnx.model.load import load_model
from bitwright.onnx.model.session import open_session
from bitwright.onnx.model.view import OnnxView, measure_shapes
from tests.onnx import flow
from tests.onnx.nets import FLOAT, INT64, Net, conv_chain, feeds_for, run
from tests.support.cost import steps


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
    y = net("FastGelu", net.input("x", (2, 4)), domain="com.microsoft", out="y")
    (op,) = graph_of(net.model(y, domains={"com.microsoft": 1})).ops
    assert op.type == "com.microsoft::FastGelu"


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
            w = net("Constant", value=numpy_helper.from_array(array))
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


def model() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", ("n", 3, 8, 8))
    h = net("Relu", net.bn(net.conv(x, name="c", bias=False)), name="r", out="h")
    pooled = net("Flatten", net("GlobalAveragePool", h, name="p"), name="f", out="flat")
    wt = net("Transpose", net.weights(5, 4, name="w"), perm=[1, 0], out="wt")
    return net.model(net("MatMul", pooled, wt, name="m", out="y"))


def test_parameters_are_copies_and_keep_their_type():
    net = Net()
    w = net.const(np.ones((4, 4), np.float16), "w")
    proto = net.model(net("MatMul", net.input("x", (1, 4), onnx.TensorProto.FLOAT16), w, out="y"))
    view = OnnxView(proto)
    found = view.param("w")
    assert found.dtype == np.float32
    found[:] = 7
    assert (view.param("w") == 1).all()
    view.set_param("w", np.full((4, 4), 2.0))
    assert view.model.graph.initializers["w"].dtype == ir.DataType.FLOAT16
    assert (view.param("w") == 2).all()
    assert (onnx.numpy_helper.to_array(proto.graph.initializer[0]) == 1).all()


def test_wrong_shapes_and_names():
    view = OnnxView(model())
    with pytest.raises(ModelError, match=r"^c.weight: the new value has shape \(3,\), the parameter \(4, 3, 3, 3\)\. "):
        view.set_param("c.weight", np.zeros(3))
    with pytest.raises(KeyError, match=r"no initializer 'c.wait' \(did you mean 'c.weight'"):
        view.param("c.wait")


def test_capture_gives_what_the_model_computes():
    proto = model()
    view = OnnxView(proto)
    feeds = feeds_for(proto)
    (found,) = view.capture(["h", "y", "x", "w", "wt", "h"], [feeds])
    np.testing.assert_allclose(found["y"][0], run(proto, feeds)[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["x"][0], feeds["x"])
    np.testing.assert_array_equal(found["wt"][0], found["w"][0].T)
    assert found["h"][0].shape == (2, 4, 6, 6)
    assert [v.name for v in view.model.graph.outputs] == ["y"]


def test_capture_says_what_it_cannot_do():
    with pytest.raises(ModelError, match=r"^hh: the model has no such value"):
        next(OnnxView(model()).capture(["hh"], []), None)


def test_capture_gives_every_iteration_of_a_loop():
    proto = flow.scan()
    view, feeds = OnnxView(proto), feeds_for(proto)
    (found,) = view.capture(["x_t", "h_out", "h_in", "each", "W"], [feeds])
    assert [len(found[name]) for name in ("x_t", "h_out", "h_in", "each", "W")] == [5, 5, 5, 1, 1]
    np.testing.assert_array_equal(np.stack(found["x_t"]), feeds["x"])
    np.testing.assert_array_equal(np.stack(found["h_out"]), found["each"][0])
    np.testing.assert_array_equal(found["h_in"][1], found["h_out"][0])
    assert [len(node.outputs) for node in view.model.graph][0] == 2, "the model is as before"


def test_capture_gives_nothing_of_a_branch_that_is_not_taken():
    proto = flow.branches()
    x = feeds_for(proto)["x"]
    one, other = (next(iter(OnnxView(proto).graph().op(n).outputs)) for n in ("product_1", "product"))
    batches = [{"x": x, "choose": np.bool_(choice)} for choice in (True, False)]
    found = list(OnnxView(proto).capture([one, other, "chosen"], batches))
    assert [(len(f[one]), len(f[other])) for f in found] == [(1, 0), (0, 1)]
    np.testing.assert_array_equal(found[0][one][0], found[0]["chosen"][0])
    np.testing.assert_array_equal(found[1][other][0], found[1]["chosen"][0])


def test_capture_reaches_a_loop_in_a_branch():
    proto = flow.loop()
    feeds = {**feeds_for(proto), "choose": np.bool_(True)}
    (found,) = OnnxView(proto).capture(["v_out", "v_in", "y"], [feeds])
    assert [v.shape for v in found["v_out"]] == [(2, 4)] * 3
    np.testing.assert_array_equal(found["v_in"][2], found["v_out"][1])
    np.testing.assert_array_equal(found["v_out"][2], found["y"][0])


def test_shapes_are_measured_in_bodies_too():
    proto = flow.loop()
    model = OnnxView(proto).model
    taken, other = ({**feeds_for(proto), "choose": np.bool_(choice)} for choice in (True, False))
    assert {n: s for n, s in measure_shapes(model, taken).items() if n in ("v_in", "v_out", "looped", "minus", "i")} == {
        "v_in": (2, 4), "v_out": (2, 4), "looped": (2, 4), "i": ()
    }  # fmt: skip
    assert measure_shapes(model, other)["minus"] == (2, 4)


def test_operators_alone_compute_what_they_compute_in_the_model():
    proto = model()
    view = OnnxView(proto)
    graph = view.graph()
    (values,) = view.capture([v for op in graph.ops for v in op.outputs] + ["x"], [feeds_for(proto)])
    for op in graph.ops:
        inputs = [values[v][0] for v in op.inputs if not graph.values[v].is_static]
        expected = values[op.outputs[0]][0]
        np.testing.assert_allclose(view.local(op.name)(*inputs), expected, rtol=1e-5, atol=1e-6, err_msg=op.name)


def test_operators_see_edits_of_their_parameters():
    view = OnnxView(model())
    x = np.ones((1, 4), np.float32)
    before = view.local("m")(x)
    view.set_param("w", 2 * view.param("w"))
    np.testing.assert_allclose(view.local("m")(x), 2 * before, rtol=1e-6)


def test_control_flow_is_no_single_operator():
    with pytest.raises(ModelError, match="^rnn: a Scan is not a single operator. Remedy: ask for the operators of its"):
        OnnxView(flow.scan()).local("rnn")


def test_edits_are_made_and_taken_back():
    proto = model()
    view, feeds = OnnxView(proto), feeds_for(proto)
    original = ir.to_proto(view.model).SerializeToString(deterministic=True)
    bias = np.arange(4, dtype=np.float32)
    undo = view.edit([SetParam("c.weight", np.zeros((4, 3, 3, 3))), AddBias("c", bias), Bypass("bn")])
    view.refresh()
    assert view.graph().op("bn").type == "Identity"
    (found,) = view.capture(["h"], [feeds])
    np.testing.assert_array_equal(found["h"][0], np.broadcast_to(bias[:, None, None], (2, 4, 6, 6)))
    undo()
    assert ir.to_proto(view.model).SerializeToString(deterministic=True) == original


def test_tidy_leaves_the_function_and_the_names_of_outputs():
    net = Net()
    x = net.input("x", (1, 4, 2, 2))
    proto = net.model(net("Identity", net.bn(net("Relu", x, out="h"), out="b"), out="y"), net.bn(x, name="n", out="z"))
    view = OnnxView(proto)
    view.edit([Bypass("bn"), Bypass("n")])
    view.tidy()
    assert [v.name for v in view.model.graph.outputs] == ["y", "z"]
    assert not view.model.graph.initializers
    feeds = feeds_for(proto)
    y, z = run(view.model, feeds)
    np.testing.assert_array_equal(y, np.maximum(feeds["x"], 0))
    np.testing.assert_array_equal(z, feeds["x"])


def test_impossible_edits_say_why():
    view = OnnxView(model())
    assert view.can_edit(AddBias("c", np.zeros(4))) is None
    assert view.can_edit(AddBias("m", np.zeros(5))) == "it multiplies by no stored matrix"
    assert view.can_edit(Bypass("zzz")) == "there is no operator zzz"
    assert view.can_edit(SetParam("zzz", np.zeros(1))) == "there is no initializer zzz"
    with pytest.raises(ModelError, match="^m: AddBias is impossible: it multiplies by no stored matrix. Remedy: ask"):
        view.edit([SetParam("w", np.zeros((5, 4))), AddBias("m", np.zeros(5))])
    assert view.param("w").any()


def test_shapes_are_measured_in_a_run():
    proto = model()
    view = OnnxView(proto)
    shapes = measure_shapes(view.model, feeds_for(proto))
    assert shapes["h"] == (2, 4, 6, 6)
    assert shapes["x"] == (2, 3, 8, 8)
    assert OnnxView(proto, shapes=shapes).graph().values["y"].shape == (2, 5)


def test_shapes_are_measured_behind_an_if_of_a_constant_that_reads_an_outer_value():
    """ONNX Runtime's optimiser inlines such a branch, and forgets what made the value where more outputs are asked for."""
    branches = [
        helper.make_graph(
            [helper.make_node(op, ["y"], ["z"])], op, [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
        )
        for op in ("Neg", "Abs")
    ]
    nodes = [
        helper.make_node("Relu", ["x"], ["y"]),
        helper.make_node("If", ["yes"], ["out"], then_branch=branches[0], else_branch=branches[1]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("x", "out")]
    graph = helper.make_graph(
        nodes, "g", values[:1], values[1:], [helper.make_tensor("yes", TensorProto.BOOL, [], [True])]
    )
    model = load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)).model
    shapes = measure_shapes(model, {"x": np.zeros((2, 3), np.float32)})
    assert {name: shapes.get(name) for name in ("x", "y", "out")} == dict.fromkeys(("x", "y", "out"), (2, 3))


def test_shapes_are_measured_in_branches_inside_a_loop_that_fills_a_sequence():
    """As PyTorch writes sums of embeddings: an iteration takes one branch, and nothing says how many axes they make."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[2,3] x) => (float[M,N] y) {
        empty = SequenceEmpty()
        last = Loop(four, yes, empty) <body = b (int64 i, bool go, held) => (bool on, more) {
            on = Identity(go)
            odd = Mod(i, two)
            take = Cast<to=9>(odd)
            row = If(take) <then_branch = t () => (float[] one) {
                number = ReduceMean<keepdims=0>(x)
                one = Unsqueeze(number, axis)
            }, else_branch = e () => (float[] other) { other = ReduceSum<keepdims=0>(x, axis) }>
            more = SequenceInsert(held, row)
        }>
        y = ConcatFromSequence<axis=0>(last)
    }"""
    held = {"four": np.int64(4), "yes": np.bool_(True), "two": np.int64(2), "axis": np.asarray([0])}
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), name) for name, a in held.items())
    shapes = measure_shapes(load_model(proto).model, {"x": np.ones((2, 3), np.float32)})
    assert {n: shapes.get(n) for n in ("number", "one", "other", "row", "y", "more")} == {
        "number": (), "one": (1,), "other": (3,), "row": (1,), "y": (8,), "more": None,
    }  # fmt: skip


def _read_by_a_branch_and_for_its_shape() -> onnx.ModelProto:
    """``y``, an output, is read by the branch of an If of a constant, and a Shape that stands before the If."""
    values = {
        n: helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 8]) for n in ("x", "y", "zRelu", "zAbs", "out")
    }
    weights = {n: numpy_helper.from_array(np.random.default_rng(i).standard_normal((8, 8)).astype(np.float32), n)
               for i, n in enumerate(("w", "wRelu", "wAbs"))}  # fmt: skip
    branches = [
        helper.make_graph(
            [helper.make_node("MatMul", ["y", f"w{op}"], [f"m{op}"]), helper.make_node(op, [f"m{op}"], [f"z{op}"])],
            op, [], [values[f"z{op}"]], [weights[f"w{op}"]],
        )
        for op in ("Relu", "Abs")
    ]  # fmt: skip
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["y"]),
        helper.make_node("Shape", ["y"], ["s"]),
        helper.make_node("Cast", ["s"], ["sizes"], to=TensorProto.FLOAT),
        helper.make_node("ReduceProd", ["sizes"], ["size"], keepdims=0),
        helper.make_node("If", ["yes"], ["o"], then_branch=branches[0], else_branch=branches[1]),
        helper.make_node("Div", ["o", "size"], ["out"]),
    ]
    yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    graph = helper.make_graph(nodes, "g", [values["x"]], [values["out"], values["y"]], [yes, weights["w"]])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("name", ["out", "mRelu", "o"])
def test_a_branch_that_the_runtime_inlines_keeps_what_it_reads(name):
    proto, x = _read_by_a_branch_and_for_its_shape(), np.random.default_rng(9).standard_normal((4, 8))
    feeds = {"x": x.astype(np.float32)}
    (found,) = OnnxView(proto).capture([name], [feeds])
    out, _ = run(proto, feeds)
    (captured,) = found[name]
    made = {"out": captured, "o": captured / 32, "mRelu": np.maximum(captured, 0) / 32}[name]
    np.testing.assert_allclose(made, out, rtol=1e-6)


def test_a_model_with_an_if_of_a_constant_is_quantized():
    proto, rng = _read_by_a_branch_and_for_its_shape(), np.random.default_rng(9)
    data = [{"x": rng.standard_normal((4, 8)).astype(np.float32)} for _ in range(3)]
    result = bitwright.onnx.quantize(proto, data, progress=False)
    wanted = run(proto, data[0])[0]
    assert sqnr(wanted, result.sim.run(data[0])[0]) > 20


@pytest.mark.parametrize("given", [True, False])
def test_shapes_are_measured_once_where_folding_leaves_them(monkeypatch, given):
    net = Net()
    x = net.input("x", (1, 3, 8, 8))
    y = net("Relu", net.bn(net.conv(x, 3, 4, name="c1", bias=False)), name="r")
    model = net.model(net.conv(y, 4, 4, name="c2", out="y"))
    feeds = feeds_for(model)
    before = run(model, feeds)[0]
    monkeypatch.setattr(opened, "measure_shapes", None)
    report = equalize_model(model, feeds if given else None, progress=False)
    assert report.groups and np.allclose(run(model, feeds)[0], before, atol=1e-4)


SHAPE = (2, 4, 6, 6)


def proved(net: Net, out: str, watched: tuple[str, ...] = ("x",)) -> tuple[ir.Model, Any]:
    model = ir.from_proto(onnx.shape_inference.infer_shapes(net.model(out)))
    values = {str(v.name): v for v in (*model.graph.inputs, *(o for n in model.graph for o in n.outputs))}
    return model, finite_proofs(model.graph, {values[name] for name in (*watched, out)}).get(values[out])


def layers(net: Net, x: str, kind: str) -> str:
    matrix = net.weights(6, 5)
    made = {
        "conv": lambda: net.conv(x, 4, 8, name="c"),
        "transposed conv": lambda: net("ConvTranspose", x, net.weights(4, 3, 2, 2), net.weights(3)),
        "matmul": lambda: net("MatMul", x, matrix),
        "relu, pool, mean": lambda: net("ReduceMean", net("MaxPool", net("Relu", x), kernel_shape=[2, 2]), keepdims=0),
        "residual": lambda: net("Add", net.conv(x, 4, 4, name="d", pads=[1] * 4), net("Neg", x)),
        "clip, concat": lambda: net("Concat", net("Clip", x, net.const(-1.0), net.const(0.5)), x, axis=1),
        "gated": lambda: net("Mul", x, net("Sigmoid", net("GlobalAveragePool", x))),
        "scaled": lambda: net("Mul", x, net.const(7.5)),
        "softmax of a transpose": lambda: net("Softmax", net("Transpose", x, perm=[0, 2, 3, 1]), axis=-1),
        "shrunk, then grown": lambda: net("Mul", net("Mul", x, net.const(1e-3)), net.const(1e3)),
    }
    return made[kind]()


KINDS = (
    "conv", "transposed conv", "matmul", "relu, pool, mean", "residual", "clip, concat", "gated", "scaled",
    "softmax of a transpose", "shrunk, then grown",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_no_element_is_above_the_bound(kind, size):
    net = Net(2)
    out = layers(net, net.input("x", SHAPE), kind)
    model, proof = proved(net, out)
    assert proof is not None and {v.name for v in proof.sources} == {"x"}
    x = (np.random.default_rng(1).standard_normal(SHAPE) * size).astype(np.float32)
    largest = float(np.abs(x).max())
    found = run(ir.to_proto(model), {"x": x})[0]
    bound = proof.gain * largest + proof.offset
    assert np.abs(found).max() <= bound * (1 + 1e-6)
    assert np.abs(found).max() <= proof.cap * max(1.0, largest) * (1 + 1e-6)
    assert proof.holds({model.graph.inputs[0]: largest}) == (bound < 1e28)


@pytest.mark.parametrize("op", ["Sqrt", "Log", "Exp", "Reciprocal", "Softplus", "Floor"])
def test_other_operators_prove_nothing(op):
    net = Net()
    assert proved(net, net(op, net.input("x", SHAPE)))[1] is None


def test_what_may_overflow_is_not_proved():
    net = Net()
    weight = net.const(np.full((4, 4, 1, 1), 1e20, np.float32))
    model, proof = proved(net, net("Conv", net.input("x", SHAPE), weight))
    x = model.graph.inputs[0]
    assert proof.holds({x: 1.0}) and not proof.holds({x: 1e10})
    assert not proof.holds({x: float("nan")}) and not proof.holds({})  # a source that was not found finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_constants_that_are_not_finite_prove_nothing(bad):
    net = Net()
    weight = np.ones((4, 4, 1, 1), np.float32)
    weight[2, 1] = bad
    assert proved(net, net("Conv", net.input("x", SHAPE), net.const(weight)))[1] is None


def test_a_product_of_two_tensors_of_any_size_is_not_proved():
    net = Net()
    x = net.input("x", SHAPE)
    assert proved(net, net("Mul", x, net("Neg", x)))[1] is None


def test_a_proof_rests_on_the_watched_tensors_before_it():
    net = Net()
    x = net.input("x", SHAPE)
    y = net("Sqrt", x, out="root")
    out = net("Add", y, net.conv(y, 4, 4, name="c", pads=[1] * 4))
    assert {v.name for v in proved(net, out, ("x", "root"))[1].sources} == {"root"}
    assert proved(net, out)[1] is None


def test_cost_is_linear():
    def cost(blocks: int) -> int:
        net = Net()
        x = net.input("x", SHAPE)
        for i in range(blocks):
            x = net("Add", x, net.conv(x, 4, 4, name=f"c{i}", pads=[1] * 4))
        model = ir.from_proto(onnx.shape_inference.infer_shapes(net.model(x)))
        return steps(lambda: finite_proofs(model.graph, [v for n in model.graph for v in n.outputs]))

    cost(5)
    assert cost(400) < 4.4 * cost(100)


@pytest.mark.parametrize(
    ("asked", "environment", "given"),
    [(0, "3", 3), (0, "2,4", 2), (5, "3", 5), (0, "", 0), (0, "all", 0), (0, "-1", 0), (0, "0", 0)],
)
def test_threads_are_those_asked_for_or_of_the_environment(monkeypatch, asked, environment, given):
    monkeypatch.setenv("OMP_NUM_THREADS", environment)
    session = open_session(ir.from_proto(conv_chain(1)), threads=asked)
    assert session.get_session_options().intra_op_num_threads == given
