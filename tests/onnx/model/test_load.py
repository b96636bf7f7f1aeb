"""Loading: the caller's model stays, the copy computes the same; old models and forms, saved optimizations, bad files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from bitwright.compare.verify import verify_folder
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ModelError
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.onnx import quantize
from bitwright.onnx.model.load import load_model
from bitwright.onnx.model.opset import _UNCHANGED_SINCE, OPSET, modernize
from bitwright.onnx.model.rewrites import block_length
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from tests.onnx import flow
from tests.onnx.nets import FLOAT, Array, Net, body, feeds_for, loop_step, run
from tests.onnx.opset_cases import CASES, model_of, opsets_of, turning_points
from tests.support.simulations import calibrated


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
        "implements them (register_operators)",
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
    step = loop_step(moved, kept, net=inner, a=(2, 4), b=(2, 4))
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
    step = loop_step("v", net=inner, v=(2, 4))
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
    sim = calibrated(QuantizationSimModel(proto, feeds), [feeds])
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


@pytest.mark.parametrize("shape", [(3,), (1, 3), (1, 1), (1,), (), (2, 3)], ids=str)
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_biases_of_gemm_become_vectors_that_are_added_once(shape: tuple[int, ...], beta: float):
    """Two layers share one bias, of a single row, of a number or of a row for every sample, which stays."""
    net = Net(seed=3)
    x, bias = net.input("x", (2, 3)), net.const(np.random.default_rng(0).normal(size=shape).astype(np.float32), "bias")
    h = net("Gemm", x, net.weights(3, 3, name="w"), bias, name="first", alpha=0.5, beta=beta)
    proto = net.model(net("Gemm", h, net.weights(3, 3, name="v"), bias, name="second", out="y"))
    loaded, feeds = load_model(proto).model, feeds_for(proto)
    held = [node.inputs[2] for node in loaded.graph]
    assert [tuple(b.shape) for b in held] == [shape if shape == (2, 3) else (3,)] * 2
    assert loaded.graph[0].attributes.get_float("beta", 1.0) == (beta if shape == (2, 3) else 1.0)
    np.testing.assert_allclose(run(loaded, feeds)[0], run(proto, feeds)[0], rtol=1e-6)


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
    with pytest.raises(ModelError, match="^model: a dict is not a model. Remedy: pass a path, an onnx.ModelProto or"):
        load_model({})


RNG = np.random.default_rng(3)
X = {"x": RNG.normal(size=(2, 3, 8, 8)).astype(np.float32)}


def legacy_net(op: str, **attrs: object) -> onnx.ModelProto:
    n = Net()
    x = n.input("x", (2, 3, 8, 8))
    y = n.conv(n(op, x, name="old", **attrs), name="conv", pads=[1, 1, 1, 1])
    return n.model(y, opset=8, ir_version=3)


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("ImageScaler", {"scale": 0.5, "bias": [0.0, 0.1, 0.2]}),
        ("Affine", {"alpha": 0.5, "beta": 0.1}),
        ("ScaledTanh", {"alpha": 0.7, "beta": 0.4}),
        ("ParametricSoftplus", {"alpha": 0.7, "beta": 0.4}),
        ("Crop", {"border": [1, 2, 1, 0]}),
        ("Crop", {"border": [1, 2, 0, 0], "scale": [4, 5]}),
        ("ThresholdedRelu", {"alpha": 0.3}),
    ],
    ids=str,
)
def test_operators_that_the_standard_dropped_compute_what_they_did(op: str, attrs: dict[str, object]) -> None:
    model = legacy_net(op, **attrs)
    new = modernize(load_model(model))
    assert new.opset == OPSET
    sim = OnnxSim(model, X)
    assert op == "ThresholdedRelu" or any(f"were rewritten: {op}" in note for note in new.notes)
    for site in sim.quantizers.values():
        site.enabled = False
    sim.compute_encodings([X])
    np.testing.assert_allclose(sim.run(X)[0], run(model, X)[0], rtol=1e-5, atol=1e-5)


def training_net(opset: int, *more: str) -> onnx.ModelProto:
    n = Net()
    x = n.conv(n.input("x", (2, 3, 8, 8)), name="conv", pads=[1, 1, 1, 1])
    parts = [n.weights(4, name=f"bn.{p}") for p in ("weight", "bias", "mean")]
    var = n.const(RNG.uniform(0.5, 2, 4), "bn.var")
    outs = ["y", "mean2", "var2", "saved_mean", "saved_var"]
    n("BatchNormalization", x, *parts, var, name="bn", out=outs)
    return n.model("y", *more, opset=opset)


@pytest.mark.parametrize("opset", [7, 9, 13])
def test_batch_norms_in_training_mode_below_opset_14(opset: int, tmp_path: Path) -> None:
    model = training_net(opset)
    result = quantize(model, [X], recipe=["fold"], path=tmp_path, progress=False)
    assert not list(result.folds), "it normalises with the statistics of the batch"
    assert not [name for name in result.sim.quantizers if "mean" in name or "output[1]" in name]
    for site in result.sim.quantizers.values():
        site.enabled = False
    np.testing.assert_allclose(result.sim.run(X)[0], run(model, X)[0], rtol=1e-4, atol=1e-5)
    assert verify_folder(tmp_path).ok
    notes = modernize(load_model(model)).notes
    assert any("batch norms in training mode" in note and "evaluation mode" in note for note in notes)


def test_a_batch_norm_that_hands_on_the_statistics_of_the_batch_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'bn' is in training mode and passes on.*Remedy: export.*evaluation mode"):
        OnnxSim(training_net(9, "saved_mean"))


def test_initializers_that_are_inputs_and_that_nothing_reads() -> None:
    n = Net()
    y = n.conv(n.input("x", (2, 3, 8, 8)), name="conv", pads=[1, 1, 1, 1])
    n.weights(4, name="spare")
    for tensor in list(n.initializers):
        n.input(tensor.name, tuple(tensor.dims))
    sim = calibrated(OnnxSim(n.model(y, opset=8, ir_version=3)), [X])
    assert sim.verify(X).ok


def label_net(text_input: bool) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Class names out, or words in: labels of scikit-learn and of speech models."""
    n = Net()
    ml = {"domain": "ai.onnx.ml"}
    if text_input:
        x = n.input("words", (3,), TensorProto.STRING)
        numbers = n("LabelEncoder", x, name="encode", keys_strings=["a", "b"], values_floats=[0.5, 2.0], **ml)
        x = n("Unsqueeze", numbers, n.const(np.array([1]), "axis"))
    else:
        x = n.input("x", (3, 1))
    scores = n("MatMul", x, n.weights(1, 4, name="w"), name="fc", out="scores")
    best = n("ArgMax", scores, axis=1, keepdims=0)
    n("LabelEncoder", best, name="label", out="label", keys_int64s=[0, 1, 2, 3], values_strings=list("abcd"), **ml)
    outputs = (("scores", FLOAT, (3, 4)), ("label", TensorProto.STRING, (3,)))
    feeds = {"words": np.array(["a", "b", "a"], object)} if text_input else {"x": np.float32([[1], [-2], [3]])}
    return n.model(*outputs, domains={"ai.onnx.ml": 2}), feeds


@pytest.mark.parametrize("text_input", [False, True], ids=["strings out", "strings in and out"])
def test_strings_are_exported_and_compared(text_input: bool, tmp_path: Path) -> None:
    model, feeds = label_net(text_input)
    quantize(model, [feeds], recipe=["fold"], path=tmp_path, progress=False)
    report = verify_folder(tmp_path)
    assert report.ok and [(o.name, o.as_integer) for o in report.outputs][1] == ("label", np.inf)


Optional = onnx.defs.OpSchema.FormalParameterOption.Optional


@pytest.mark.parametrize("op", _UNCHANGED_SINCE)
def test_unchanged_operators_only_gained_options(op):
    old, new = onnx.defs.get_schema(op, _UNCHANGED_SINCE[op]), onnx.defs.get_schema(op, OPSET)
    gone = old.attributes.keys() - new.attributes.keys()
    assert not gone, f"attributes were removed: {gone}"
    for name, attribute in old.attributes.items():
        assert attribute.default_value == new.attributes[name].default_value or name in _CLARIFIED, name
    assert all(not new.attributes[name].required for name in new.attributes.keys() - old.attributes.keys())
    assert [i.name for i in new.inputs][: len(old.inputs)] == [i.name for i in old.inputs] or len(old.inputs) == 1
    assert all(i.option == Optional for i in new.inputs[len(old.inputs) :])
    assert len(new.outputs) >= len(old.outputs)


# Defaults that were left unsaid at first and written down later with the meaning that every runtime gave them.
_CLARIFIED = {"dilations", "strides", "pads", "output_padding", "output_shape", "axis", "storage_order", "epsilon"}


@pytest.mark.parametrize("opset", [9, 11, 13, 17])
def test_models_of_unchanged_operators_get_the_new_number(opset):
    n = Net()
    model = n.model(n("Relu", n.conv(n.input(), name="c"), out="y"), opset=opset)
    loaded = modernize(load_model(model))
    assert loaded.opset == OPSET and loaded.model.opset_imports[""] == OPSET and not loaded.notes
    assert np.array_equal(run(loaded.model, feeds_for(model))[0], run(model, feeds_for(model))[0])


def parts_and_means(opset: int) -> onnx.ModelProto:
    """Operators of which an attribute became an input at opset 13 or 18, in a body too."""
    n, inner = Net(), Net()
    first, second = n("Split", n.input("x", (2, 4, 6)), axis=1, out=["a", "b"], split=[1, 3])
    one, other = n("Split", second, axis=2, out=["c", "d"])
    mean = n("ReduceMean", n("Add", one, other), axes=[0, 1], keepdims=0)
    whole = n("ReduceMax", n("Unsqueeze", first, axes=[0, 2]), keepdims=0)
    inside = body(inner("ReduceL2", "c", axes=[0, 1], keepdims=0, out="then"), net=inner)
    other_way = Net()
    condition = n("Greater", whole, n.const(np.float32(0)))
    outside = body(other_way("Squeeze", "short", axes=[0], out="else"), net=other_way)
    n("ReduceSum", "c", axes=[0, 1], keepdims=1, out="long")
    n("Squeeze", "long", axes=[1], out="short")
    return n.model(n("Add", n("If", condition, then_branch=inside, else_branch=outside), mean, out="y"), opset=opset)


@pytest.mark.parametrize("opset", [9, 11, 12])
def test_attributes_that_became_inputs_are_written_without_a_conversion(opset):
    model = parts_and_means(opset)
    loaded = modernize(load_model(model))
    assert loaded.opset == OPSET and not loaded.notes, "no second model and no run of both"
    vectors = [v.const_value.numpy().tolist() for v in loaded.model.graph.initializers.values()]
    assert vectors.count([0, 1]) == 1, "one constant for equal axes, in bodies too"
    for seed in range(2):
        feeds = feeds_for(model, seed)
        assert np.array_equal(run(loaded.model, feeds)[0], run(model, feeds)[0])


def test_others_are_converted_and_compared():
    n = Net()
    y = n("Softmax", n("Squeeze", n.input("x", (1, 4, 6)), axes=[0]), axis=0, out="y")
    model = n.model(y, opset=11)
    loaded = modernize(load_model(model))
    assert loaded.notes == (f"converted from opset 11 to {OPSET}",)
    assert np.allclose(run(loaded.model, feeds_for(model))[0], run(model, feeds_for(model))[0], atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_operators_of_every_opset_are_converted_to_the_same_function(name):
    for opset in turning_points(name):
        model = model_of(name, opset)
        feeds = feeds_for(model)
        loaded = modernize(load_model(model), feeds)
        assert loaded.opset >= OPSET
        for expected, found in zip(run(model, feeds), run(loaded.model, feeds), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=f"opset {opset}")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_operators_of_every_opset_are_simulated(name):
    """In float the simulation is the model; quantized, it stays near it."""
    for opset in opsets_of(name):
        if opset not in (opsets_of(name)[0], 9, 11, 13, 17, 21, 23, 25):
            continue
        model = model_of(name, opset)
        feeds = feeds_for(model)
        sim = calibrated(QuantizationSimModel(model, feeds, threads=1), [feeds])
        assert all(np.isfinite(found).all() for found in sim.run(feeds))
        sim.quantizers["*"].enabled = False
        for expected, found in zip(run(model, feeds), sim.run(feeds), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=f"opset {opset}")


def test_a_conversion_that_changes_the_function_names_the_operator():
    n = Net()
    x = n("Relu", n.input("x", (1, 3, 4, 4)), name="first")
    model = n.model(n("Neg", n("Hardmax", x, name="the_one", axis=1), name="last", out="y"), opset=11)
    with pytest.raises(ModelError) as error:
        modernize(load_model(model), feeds_for(model))
    assert str(error.value) == (
        "net: conversion from opset 11 to 21 changes its output 'y': Hardmax (the_one) is converted wrongly. "
        "Remedy: export the model again with opset 21"
    )


def test_a_group_norm_of_unknown_width_is_refused():
    n = Net()
    x = n.input("x", (1, "c", 4, 4))
    y = n("GroupNormalization", x, n.weights(2), n.weights(2), num_groups=2, name="norm", out="y")
    with pytest.raises(ModelError, match="the GroupNormalization 'norm' cannot be converted to opset 21: how many"):
        modernize(load_model(n.model(y, opset=18)))


def residual(n: Net) -> str:
    h = n("Relu", n.conv(n.input("x", ("n", 3, 8, 8)), 3, 4, name="c1", pads=[1] * 4), name="r1")
    return n("Relu", n("Add", n.conv(h, 4, 4, name="c2", pads=[1] * 4), h, name="add"), name="r2")


def bottleneck(n: Net) -> str:
    """Channels that fill blocks of 8 and of 16, whichever this CPU has."""
    h = n("Relu", n.conv(n.input("x", ("n", 3, 16, 16)), 3, 32, name="c1", pads=[1] * 4), name="r1")
    p = n("MaxPool", h, kernel_shape=[2, 2], strides=[2, 2], name="pool")
    h = n("Relu", n.conv(p, 32, 48, name="c2", pads=[1] * 4), name="r2")
    h = n("Relu", n("Add", n.conv(h, 48, 32, name="c3", pads=[1] * 4), p, name="add"), name="r3")
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
    """Twenty channels fill no blocks, so that the pool has none and channels enter blocks again behind it."""
    h = n("Transpose", n.input("x", ("n", 8, 8, 16)), perm=[0, 3, 1, 2], name="t")
    h = n("Relu", n.conv(h, 16, 20, name="c1", pads=[1] * 4), name="r")
    return n.conv(n("GlobalMaxPool", h, name="max"), 20, 20, k=1, name="pw")


def sound(n: Net) -> str:
    w = n.weights(8, 4, 3, name="w")
    return n("Relu", n("Conv", n.input("x", ("n", 4, 16)), w, n.weights(8), name="c", pads=[1, 1]), name="r")


def product(n: Net) -> str:
    h = n("Transpose", n.input("x", (16, 8)), perm=[1, 0], name="t")
    return n("Mul", n("MatMul", h, n.weights(16, 16, name="w"), name="mm"), n.const(np.float32(0.3)), name="scaled")


def classifier(n: Net) -> str:
    h = n("Gemm", n.input("x", ("n", 16)), n.weights(16, 16, name="w"), n.weights(16), transB=1, name="fc")
    return n("LeakyRelu", h, alpha=0.2, name="leaky")


def silu(n: Net) -> str:
    h = n("Gemm", n.input("x", ("n", 16)), n.weights(16, 16, name="w"), n.weights(16), transB=1, name="fc")
    return n("Mul", h, n("Sigmoid", h, name="gate"), name="silu")


def gelu(n: Net) -> str:
    h = n("Gemm", n.input("x", ("n", 16)), n.weights(16, 16, name="w"), n.weights(16), transB=1, name="fc")
    one = n("Add", n("Erf", n("Div", h, n.const(np.float32(np.sqrt(2)))), name="erf"), n.const(np.float32(1)))
    return n("Mul", n("Mul", h, one), n.const(np.float32(0.5)), name="gelu")


LAYERS: dict[Callable[[Net], str], int] = {
    residual: 2, bottleneck: 4, depthwise: 3, joined: 3, grouped: 2, normed: 2, channels_last: 2, sound: 1, product: 1,
    classifier: 1, silu: 1, gelu: 1,
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
    if build not in (normed, channels_last, joined, gelu):  # a norm became a convolution, transposes moved, Div is Mul
        assert sorted(kinds[0]) == sorted(kinds[1])
    if build not in (normed, depthwise):  # how many a convolution hands to the next one is not said
        sizes = [
            sorted(list(t.dims) for t in m.graph.initializer if len(t.dims) > 1)
            for m in (model, ir.to_proto(loaded.model))
        ]
        assert sizes[0] == sizes[1], "channels that only fill a block are gone"
    for expected, found in zip(run(model, feeds), run(loaded.model, feeds), strict=True):
        assert sqnr(expected, found) > 100


@pytest.mark.parametrize("opset, kinds", [(17, ["Mul", "Erf", "Add", "Mul", "Mul"]), (21, ["Gelu"])])
def test_gelu_of_the_optimizer_is_that_of_the_standard_where_it_has_one(opset, kinds):
    n = Net(3)
    model = n.model(n("Gelu", n.input("x", (2, 16)), domain="com.microsoft"), opset=opset, domains={"com.microsoft": 1})
    loaded, feeds = load_model(model), feeds_for(model)
    assert [(node.domain, node.op_type) for node in loaded.model.graph] == [("", kind) for kind in kinds]
    assert sqnr(run(model, feeds)[0], run(loaded.model, feeds)[0]) > 100


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
    with pytest.raises(ModelError, match=r"weight of shape \[\d+, 3, 3, 3\] is in blocks of another.*another CPU"):
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


@pytest.mark.parametrize("size", [0, -2, 1 << 62])
def test_a_block_that_would_end_the_process_is_refused(size):
    node = helper.make_node("DepthToSpace", ["x"], ["y"], name="d", blocksize=size)
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 4, 2, 2]) for name in "xy")
    with pytest.raises(ModelError, match=f"node 'd': its blocksize is {size}"):
        load_model(helper.make_model(helper.make_graph([node], "g", [x], [y])))


def test_a_sum_with_an_absent_input_is_refused():
    """ONNX Runtime ends the process."""
    n = Net()
    n.input("x", (3, 4))
    n.nodes.append(helper.make_node("Sum", ["x", ""], ["y"], name="s"))
    with pytest.raises(ModelError, match="node 's': it is a Sum without its input data_0"):
        load_model(n.model("y"))


@pytest.mark.parametrize("count", [0, -1, 3, 1 << 31])
def test_a_scan_of_inputs_that_it_does_not_have_is_refused(count):
    """ONNX Runtime allocates as many, whatever the node has."""
    model = flow.scan()
    node = next(node for node in model.graph.node if node.op_type == "Scan")
    next(a for a in node.attribute if a.name == "num_scan_inputs").i = count
    with pytest.raises(ModelError, match=rf"it scans {count} inputs and has {len(node.input)}"):
        load_model(model)


def test_a_body_that_returns_what_nothing_makes_is_refused():
    body = Net()
    body("Add", body.input("state", (2,)), body.input("item", (2,)), out="sum")
    n = Net()
    last = n(
        "Scan",
        n.const(np.zeros(2)),
        n.input("x", (3, 2)),
        body=body.graph("sum", "gone"),
        num_scan_inputs=1,
        out=["a", "b"],
    )
    with pytest.raises(
        ModelError, match=r"graph '.*' returns 'gone', which nothing makes\. Remedy: export the model again"
    ):
        load_model(n.model(last[0]))


def _cut(n, x, end):
    """The first ``end`` rows of ``x``."""
    return n("Slice", x, *(n.const(np.int64([number])) for number in (0, end, 2)))


@pytest.mark.parametrize("kind", ["window", "window behind a cut window", "pads", "window in a body"])
def test_a_length_below_zero_in_front_of_a_slice_does_not_end_the_process(kind):
    n = Net()
    x = n.input("x", (1, 3, 12, 12))
    if kind == "window":
        x, shape = n("Conv", x, n.weights(4, 3, 15, 15), name="wrong"), [1, 4, -2, -2]
    elif kind == "pads":
        pads = n.const(np.int64([0, 0, -9, 0, 0, 0, -9, 0]))
        x, shape = n("Pad", x, pads, name="wrong"), [1, 3, -6, 12]
    elif kind == "window behind a cut window":
        x = _cut(n, n("MaxPool", x, kernel_shape=[2, 2]), 6)
        x, shape = n("Conv", x, n.weights(4, 3, 9, 9), name="wrong"), [1, 4, -2, 3]
    else:
        bodies = []
        for kernel in (15, 3):
            body = Net()
            cut = _cut(body, body("MaxPool", "x", kernel_shape=[kernel, kernel], name="wrong"), 3)
            bodies.append(body.graph(cut))
        x = n("If", n.const(np.bool_(True)), then_branch=bodies[0], else_branch=bodies[1])
        shape = [1, 3, -2, -2]
    problem = (
        rf"wrong\w* \(.*\): its result would have the shape {re.escape(str(shape))}: its window, pads or sizes do not"
    )
    with pytest.raises(ModelError, match=problem) as caught:
        load_model(n.model(_cut(n, n("Relu", x), 3)))
    assert "check its attributes and constants" in caught.value.remedy


def test_a_slice_along_an_axis_of_negative_length_does_not_end_the_process():
    """Some exporters write -1 for a length that is not known."""
    n = Net()
    n.input("x", (1, -1))
    ends = [n.const(np.array([value])) for value in (0, 2, 1, 1)]
    model = n.model(n("Slice", "x", *ends))
    feeds = {"x": np.arange(5, dtype=np.float32)[None]}
    np.testing.assert_array_equal(run(load_model(model).model, feeds)[0], [[0, 1]])
