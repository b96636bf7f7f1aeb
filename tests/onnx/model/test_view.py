"""The view of a model that algorithms work through: parameters, values, single operators, edits."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import bitwright.onnx
from bitwright.core.simulation.float_model import AddBias, Bypass, SetParam, sqnr
from bitwright.errors import ModelError
from bitwright.onnx import equalize_model, opened
from bitwright.onnx.model.load import load_model
from bitwright.onnx.model.view import OnnxView, measure_shapes
from tests.onnx import flow
from tests.onnx.nets import Net, feeds_for, run


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
    with pytest.raises(
        ModelError, match="^rnn: a Scan is not a single operator. Remedy: ask for the operators of its bod"
    ):
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
    with pytest.raises(
        ModelError, match="^m: AddBias is impossible: it multiplies by no stored matrix. Remedy: ask can_"
    ):
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
