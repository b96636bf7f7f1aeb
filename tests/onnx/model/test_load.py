"""Loading: the caller's model stays as it is, the copy computes the same, and bad files are explained."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from bitwright.errors import ModelError
from bitwright.onnx.model.load import load_model
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from tests.onnx import flow
from tests.onnx.nets import BOOL, FLOAT, INT64, Array, Net, body, feeds_for, run


def function_model() -> onnx.ModelProto:
    """Two calls of a model-local function."""
    net = Net()
    x = net.input("x", (2, 4))
    h = net("Half", x, domain="local", name="a")
    y = net("Half", h, domain="local", name="b", out="y")
    model = net.model(y, domains={"local": 1})
    nodes = [helper.make_node("Add", ["v", "v"], ["t"], name="double"), helper.make_node("Relu", ["t"], ["r"])]
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("local", "Half", ["v"], ["r"], nodes, imports))
    return model


def overridable() -> onnx.ModelProto:
    net = Net()
    x = net.input()
    net.inputs.append(helper.make_tensor_value_info("c.weight", FLOAT, (4, 3, 3, 3)))
    return net.model(net.conv(x, name="c"))


def constants() -> onnx.ModelProto:
    """Weights and shapes in Constant nodes, one of them returned."""
    net = Net()
    x = net.input("x", (2, 4))
    w = net("Constant", value=onnx.numpy_helper.from_array(np.ones((4, 3), np.float32)), out="w")
    shape = net("Constant", value_ints=[3, 2])
    y = net("Reshape", net("MatMul", x, w, name="m"), shape, out="y")
    return net.model(y, net("Constant", value_float=2.5, out="c"))


def unnamed() -> onnx.ModelProto:
    """Nodes without a name, two with the same, and names that look like made ones."""
    net = Net()
    x = net.input("x", (2, 4))
    a = net("Relu", x, out="hidden_output")
    b = net("Relu", a, out="hidden_output_1", name="n")
    c = net("Abs", b, out="hidden_output_1_1", name="n")
    return net.model(a, b, net("Neg", c, name="n_1", out="y"))


def unsorted() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", (2, 4))
    net("Relu", "h", out="y", name="second")
    net("Abs", x, out="h", name="first")
    return net.model("y")


MODELS = {
    f.__name__: f
    for f in (
        function_model, overridable, constants, unnamed, unsorted,
        flow.branches, flow.scan, flow.loop, flow.handed_on,
    )
}  # fmt: skip


@pytest.mark.parametrize("kind", ["proto", "ir", "path"])
@pytest.mark.parametrize("name", MODELS)
def test_the_copy_computes_the_same_and_the_model_stays(name, kind, tmp_path):
    proto = MODELS[name]()
    before = proto.SerializeToString()
    source = proto
    if kind == "ir":
        source = ir.from_proto(proto)
        before = ir.to_proto(source).SerializeToString()
    elif kind == "path":
        source = tmp_path / "model.onnx"
        onnx.save(proto, source)
    loaded = load_model(source)
    constants = {initializer.name for initializer in proto.graph.initializer}
    names = [i.name for i in proto.graph.input if i.name not in constants]
    assert [v.name for v in loaded.model.graph.inputs] == names
    assert [v.name for v in loaded.model.graph.outputs] == [o.name for o in proto.graph.output]
    feeds = feeds_for(proto)
    nameless = onnx.ModelProto.FromString(proto.SerializeToString())
    for node in nameless.graph.node:
        node.ClearField("name")  # ONNX Runtime refuses a model in which two nodes share a name
    for expected, found in zip(run(nameless, feeds), run(loaded.model, feeds), strict=True):
        np.testing.assert_array_equal(found, expected)
    for node in loaded.model.graph.all_nodes():
        node.name += "!"
        for value in node.outputs:
            value.name = f"{value.name}!"
    for value in list(loaded.model.graph.initializers.values()):
        value.name += "!"
    if kind == "proto":
        assert proto.SerializeToString() == before
    elif kind == "ir":
        assert ir.to_proto(source).SerializeToString() == before


@pytest.mark.parametrize("name", MODELS)
def test_names_are_unique_over_all_bodies(name):
    model = load_model(MODELS[name]()).model
    nodes = [node.name for node in model.graph.all_nodes()]
    values = [v.name for node in model.graph.all_nodes() for v in node.outputs]
    values += [v.name for graph in model.graphs() for v in (*graph.inputs, *graph.initializers.values())]
    assert len(set(nodes)) == len(nodes)
    assert len(set(values)) == len(values)
    assert all(nodes) and all(values)


def test_unnamed_nodes_are_called_after_their_output():
    loaded = load_model(unnamed())
    assert [node.name for node in loaded.model.graph] == ["hidden_output", "n", "n_2", "n_1"]
    assert loaded.notes == ("nodes that shared a name were told apart by a number: n",)


def test_notes_say_what_was_changed():
    assert load_model(overridable()).notes == (
        "initializers that are listed as inputs too are constants from now on: c.weight",
    )
    assert load_model(function_model()).notes == ("functions of the model were inlined: Half",)
    assert load_model(unsorted()).notes == ("nodes were put into execution order",)
    net = Net()
    x = net.input("x", (2, 4))
    model = net.model(net("Twist", x, domain="acme", out="y"), domains={"acme": 1}, ir_version=14)
    assert load_model(model).notes == (
        "operators of the domain 'acme' (Twist) stay in float; ONNX Runtime runs them only with the library that "
        "implements them",
        "IR version 14 was lowered to 13, the newest that ONNX Runtime reads",
    )


def test_shapes_are_known_in_bodies_too():
    model = load_model(flow.branches()).model
    for node in model.graph.all_nodes():
        assert all(value.shape is not None and value.dtype == ir.DataType.FLOAT for value in node.outputs), node


def test_states_that_no_iteration_changes_are_read_from_outside():
    model = load_model(flow.handed_on()).model
    loops = [node for node in model.graph.all_nodes() if node.op_type == "Loop"]
    assert [[str(v.name) for v in node.inputs] for node in loops] == [
        ["steps", "yes", "start"],
        ["count", "going", "h_in"],
    ]
    assert [str(v.name) for v in loops[0].outputs] == ["last", "each"]
    products = {node.name: node for node in model.graph.all_nodes() if node.op_type in ("Gemm", "MatMul")}
    assert [str(v.name) for v in products["ih"].inputs] == ["taken", "W", "b"]
    assert products["hh"].inputs[1].is_initializer()
    copies = [str(n.outputs[0].name) for n in model.graph.all_nodes() if n.op_type == "Identity"]
    assert copies == ["going_out", "going_out2", "h_each"]


@pytest.mark.parametrize("second", ["a", "b"], ids=["swapped", "shifted"])
def test_states_that_iterations_exchange_stay(second):
    """``a, b = b, a`` and ``a, b = b, b``: in the second one ``b`` never changes, and ``a`` is what ``b`` began with."""
    net, inner = Net(seed=3), Net()
    x, y = net.input("x", (2, 4)), net.input("y", (2, 4))
    moved = inner("Abs", "b", out="moved")
    kept = inner("Identity", second, out="kept")
    going = inner("Identity", "going_in", out="going_out")
    step = body((going, BOOL, ()), moved, kept, net=inner,
                inputs=[("i", INT64, ()), ("going_in", BOOL, ()), ("a", FLOAT, (2, 4)), ("b", FLOAT, (2, 4))])  # fmt: skip
    count, yes = net.const(np.int64(3), "count"), net.const(np.bool_(True), "yes")
    last = net("Loop", count, yes, x, y, name="loop", out=["p", "q"], body=step)
    proto = net.model(*last)
    loaded = load_model(proto).model
    (loop,) = [node for node in loaded.graph if node.op_type == "Loop"]
    assert len(loop.outputs) == (2 if second == "a" else 1)
    feeds = feeds_for(proto)
    for expected, found in zip(run(proto, feeds), run(loaded, feeds), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_loop_that_changes_nothing_is_left_out():
    net, inner = Net(), Net()
    x = net.input("x", (2, 4))
    going = inner("Identity", "going_in", out="going_out")
    step = body((going, BOOL, ()), "v", net=inner,
                inputs=[("i", INT64, ()), ("going_in", BOOL, ()), ("v", FLOAT, (2, 4))])  # fmt: skip
    net("Loop", net.const(np.int64(3), "count"), net.const(np.bool_(True), "yes"), x, name="loop", out="y", body=step)
    loaded = load_model(net.model("y")).model
    assert [node.op_type for node in loaded.graph] == ["Identity"]
    assert [v.name for v in loaded.graph.outputs] == ["y"]
    assert run(loaded, {"x": np.ones((2, 4), np.float32)})[0].tolist() == [[1.0] * 4] * 2


def test_wrong_shapes_that_a_model_states_are_ignored():
    """As an exporter leaves them that takes out Transposes after it has noted shapes; the lengths that are right stay."""
    net = Net(seed=3)
    h = net("Relu", net.conv(net.input("x", ("n", 3, 8, 6)), name="c", pads=[1, 1, 1, 1]), name="r", out="h")
    other = net("Foreign", h, name="f", domain="elsewhere", out="other")
    proto = net.model(net("Add", h, net.conv(h, 4, 4, k=1, name="d"), name="a", out="y"), domains={"elsewhere": 1})
    for name, shape in {"h": ("n", 8, 6, 4), "d.out": ("n", 4, 8, 6), other: (5, 7)}.items():
        proto.graph.value_info.append(helper.make_tensor_value_info(name, FLOAT, shape))
    loaded = load_model(proto)
    shapes = {str(v.name): v.shape for node in loaded.model.graph for v in node.outputs}
    assert list(shapes["h"])[1:] == [4, 8, 6] == list(shapes["y"])[1:]
    assert list(shapes["other"]) == [5, 7], "nothing contradicts it"
    note = "shapes that the model states and its operators contradict are ignored: h"
    assert note in loaded.notes


def test_a_model_with_wrong_stated_shapes_is_simulated():
    net = Net(seed=3)
    h = net("Relu", net.conv(net.input("x", (2, 3, 8, 6)), name="c", pads=[1, 1, 1, 1]), name="r", out="h")
    proto = net.model(net("Add", h, net.conv(h, 4, 4, k=1, name="d"), name="a", out="y"))
    proto.graph.value_info.append(helper.make_tensor_value_info("h", FLOAT, (2, 8, 6, 4)))
    feeds = feeds_for(proto)
    sim = QuantizationSimModel(proto, feeds)
    sim.compute_encodings([feeds])
    assert sim.run(feeds)[0].shape == (2, 4, 8, 6) and sim.verify(feeds).ok


def test_a_bias_that_gemm_ignores_is_not_read():
    """As the exporter of JAX writes a product: a scalar as bias, times a ``beta`` of 0."""
    net = Net(seed=3)
    x, zero = net.input("x", (2, 4)), net.const(np.float32(7), "ignored")
    h = net("Gemm", x, net.weights(4, 4, name="w"), zero, name="first", alpha=1.0, beta=0.0)
    proto = net.model(net("Gemm", h, net.weights(4, 3, name="v"), name="second", beta=0.0, out="y"))
    loaded = load_model(proto).model
    assert [len(node.inputs) for node in loaded.graph] == [2, 2]
    assert "ignored" not in loaded.graph.initializers
    feeds = feeds_for(proto)
    np.testing.assert_array_equal(run(loaded, feeds)[0], run(proto, feeds)[0])
    sim = QuantizationSimModel(proto, feeds)
    assert not [name for name, site in sim.quantizers.items() if site.role == "bias"]


def test_constants_become_initializers_unless_they_are_returned():
    graph = load_model(constants()).model.graph
    assert [node.op_type for node in graph] == ["MatMul", "Reshape", "Constant"]
    assert "w" in graph.initializers


# ---------------------------------------------------------------------------------------------- external data


def external(folder, size: int = 40) -> Array:
    net = Net()
    model = net.model(net("MatMul", net.input("x", (2, size)), net.weights(size, 4, name="w"), out="y"))
    array = onnx.numpy_helper.to_array(model.graph.initializer[0])
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    return array


def test_external_data_is_read_when_it_is_asked_for(tmp_path):
    array = external(tmp_path)
    loaded = load_model(tmp_path / "m.onnx")
    tensor = loaded.model.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_missing_external_data(tmp_path):
    external(tmp_path)
    (tmp_path / "m.data").unlink()
    with pytest.raises(ModelError) as error:
        load_model(tmp_path / "m.onnx")
    assert str(error.value) == (
        f"w: its data lies in 'm.data', which is not in {str(tmp_path)!r}. "
        "Remedy: put the data file beside the model file; both belong together"
    )


def test_truncated_external_data(tmp_path):
    external(tmp_path)
    (tmp_path / "m.data").write_bytes(b"\0" * 100)
    with pytest.raises(ModelError, match=r"^w: its data ends at byte 640 of 'm.data', which has only 100\. Remedy: "):
        load_model(tmp_path / "m.onnx")


def test_a_model_above_2_gib_loads_without_its_data(tmp_path):
    """A sparse file stands for the weights: 2.5 GiB of zeros that take no place on the disk."""
    net = Net()
    model = net.model(net("MatMul", net.input("x", (1, 40)), net.weights(40, 4, name="w"), out="y"))
    tensor = model.graph.initializer[0]
    rows = (5 << 29) // (4 * 16384)
    tensor.ClearField("raw_data")
    del tensor.dims[:]
    tensor.dims.extend([rows, 16384])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "big.data"), ("offset", "0"), ("length", str(5 << 29))):
        tensor.external_data.add(key=key, value=value)
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", FLOAT, (1, rows)))
    onnx.save(model, tmp_path / "big.onnx")
    with open(tmp_path / "big.data", "wb") as file:
        file.truncate(5 << 29)
    loaded = load_model(tmp_path / "big.onnx")
    assert loaded.model.graph.outputs[0].shape == [1, 16384]


# -------------------------------------------------------------------------------------------------- bad input


def circle() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", (2, 4))
    net("Add", x, "b", out="a", name="one")
    net("Abs", "a", out="b", name="two")
    return net.model(net("Relu", "b", out="y", name="three"))


def same_name_twice() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", (2, 4))
    net("Abs", x, out="y")
    return net.model(net("Relu", x, out="y"))


def made_by_nothing() -> onnx.ModelProto:
    net = Net()
    return net.model(net("Add", net.input("x", (2, 4)), "lost", name="sum", out="y"))


def output_made_by_nothing() -> onnx.ModelProto:
    net = Net()
    net("Abs", net.input("x", (2, 4)), out="z")
    return net.model("y")


def old() -> onnx.ModelProto:
    net = Net()
    return net.model(net("Relu", net.input("x", (2, 4)), out="y"), opset=6)


def unheard_of() -> onnx.ModelProto:
    net = Net()
    return net.model(net("Relu", net.input("x", (2, 4)), out="y"), opset=99)


def input_twice() -> onnx.ModelProto:
    net = Net()
    net.input("x", (2, 4))
    return net.model(net("Relu", net.input("x", (2, 4)), out="y"))


BAD = {
    circle: "net: its nodes form a circle, at node 'one' (Add). Remedy: no value can depend on itself; use Loop or "
    "Scan for what is repeated",
    same_name_twice: "net: two values of one graph bear the name 'y'. Remedy: give every node output its own name; a "
    "graph like this has no defined meaning",
    made_by_nothing: "net: node 'sum' (Add) reads 'lost', which nothing makes. Remedy: export the model again; a node "
    "or an initializer is missing",
    output_made_by_nothing: "net: no node makes the output 'y'. Remedy: remove the output, or export the model again",
    input_twice: "net: two values of one graph bear the name 'x'. Remedy: give every node output its own name; a graph "
    "like this has no defined meaning",
    unheard_of: f"net: it has opset 99, and the installed onnx {onnx.__version__} knows operators up to opset "
    f"{onnx.defs.onnx_opset_version()}. Remedy: export the model again with opset 21, or install newer versions of onnx "
    "and onnxruntime",
    old: "net: it has opset 6, and ONNX Runtime has no kernels below opset 7. Remedy: export the model again with opset "
    "13 or newer, or convert it with onnx.version_converter",
}


@pytest.mark.parametrize("build", BAD, ids=lambda build: build.__name__)
def test_bad_models_are_explained(build):
    with pytest.raises(ModelError) as error:
        load_model(build())
    assert str(error.value) == BAD[build]


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"", r"it holds no ONNX graph \(0 bytes\)"),
        (b"this is a text, no model", "it is not an ONNX model, or it was cut off: "),
        (flow.scan().SerializeToString()[:300], "it is not an ONNX model, or it was cut off: "),
    ],
    ids=["empty", "text", "truncated"],
)
def test_files_that_are_no_model(tmp_path, content, problem):
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=problem) as error:
        load_model(path)
    assert error.value.site == str(path)


def test_missing_file_folder_and_wrong_type(tmp_path):
    with pytest.raises(ModelError, match="the model file does not exist. Remedy: pass the path of an .onnx file"):
        load_model(tmp_path / "nowhere.onnx")
    with pytest.raises(ModelError, match="the model file is a folder"):
        load_model(tmp_path)
    with pytest.raises(
        ModelError, match="^model: a dict is not a model. Remedy: pass a path, an onnx.ModelProto or an "
    ):
        load_model({})
