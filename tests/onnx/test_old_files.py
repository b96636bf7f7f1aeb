"""Files of every opset, older ones with their weights among the inputs as IR 3 asks for: every method works on them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import bitwright.onnx as bitwright
from bitwright.core.simulation.float_model import sqnr
from bitwright.onnx import load_model
from bitwright.recipes.recipe import KINDS
from tests.onnx.nets import BOOL, FLOAT, INT64, Net, body, run

OPSETS = range(7, 27)
_NETWORK = (2, 3, 8, 8)


def classifier(opset: int) -> onnx.ModelProto:
    """Convolutions with batch norms, a classifier, and operators whose form changed between opsets."""
    n = Net(3)
    h = n.conv(n.input("x", _NETWORK), 3, 8, name="c1", bias=False, pads=[1] * 4)
    h = n("Relu", n.bn(h, 8, "bn1", **({"spatial": 1} if opset < 9 else {})), name="relu")
    h = n.bn(n.conv(h, 8, 8, name="dw", group=8, pads=[1] * 4), 8, "bn2")
    branch = n.conv(h, 8, 8, name="branch", pads=[1] * 4)
    h = n("Add", h, n("Mul", branch, n.const(np.float32(1e-3)), name="little"), name="sum")
    bounds = [] if opset < 11 else [n.const(np.float32(0)), n.const(np.float32(6))]
    h = n("Clip", h, *bounds, name="clip", **({"min": 0.0, "max": 6.0} if opset < 11 else {}))
    h = n("Dropout", n.conv(h, 8, 6, k=1, name="pw"), name="drop")
    axes = [] if opset < 18 else [n.const(np.int64([2, 3]))]
    h = n("ReduceMean", h, *axes, keepdims=0, name="mean", **({} if axes else {"axes": [2, 3]}))
    h = n("Gemm", h, n.weights(10, 6, name="fc.w"), n.weights(10, name="fc.b"), transB=1, name="fc")
    h = n("MatMul", n("Relu", h, name="relu2"), n.weights(10, 7, name="mm.w"), name="mm")
    return _listed(n.model(n("Softmax", h, axis=1, name="softmax", out="y"), opset=opset), opset)


def _listed(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The model as files of the time were: a mask of Dropout that nothing reads, up to opset 14 all weights among the inputs."""
    kind = onnx.TensorProto.FLOAT if opset < 10 else onnx.TensorProto.BOOL
    for drop in [node for node in model.graph.node if node.op_type == "Dropout"]:
        drop.output.append(f"{drop.name}_mask")
        model.graph.value_info.append(helper.make_tensor_value_info(drop.output[1], kind, None))
    model.ir_version = 3 if opset < 9 else 4 if opset < 15 else 8
    if opset < 15:
        model.graph.input.extend(
            helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer
        )
    return model


def batches(count: int = 3) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal(_NETWORK).astype(np.float32)} for _ in range(count)]


#: steps that take long, and those that take away what random weights cannot do without
_LEARNED = ("adaround", "brecq", "qdrop", "flexround", "learned_clipping", "distill", "autoround")
_LITTLE = {name: {"iterations": 4} for name in _LEARNED} | {
    "prune": {"macs": 0.9, "widths": 1}, "svd": {"macs": 0.99}, "sparsify": {"sparsity": 0.02},
    "drop_blocks": {"count": 1}, "replace_blocks": {"params": 0.999},
}  # fmt: skip


def checked(model: onnx.ModelProto, recipe, folder) -> float:
    """Decibels of a recipe; the written file agrees with the simulation."""
    data = batches()
    result = bitwright.quantize(model, data, recipe=recipe, progress=False, measure_speed=False, path=folder)
    written = onnx.load(result.exported.qdq)
    assert not {i.name for i in written.graph.input} & {i.name for i in written.graph.initializer}
    assert result.sim.verify(data[0]).ok
    return sqnr(run(model, data[0])[0], result.sim.run(data[0])[0])


@pytest.mark.parametrize(
    "opset", [opset if opset in (7, 11, 17) else pytest.param(opset, marks=pytest.mark.slow) for opset in OPSETS]
)
def test_a_recipe_works_at_every_opset(opset, tmp_path):
    steps = ["fold", "equalize", "activation_ranges", "gptq", "bias_correction"]
    assert checked(classifier(opset), steps, tmp_path) > 35


@pytest.mark.slow
@pytest.mark.parametrize("opset", [7, 10, 12, 17, 26])
@pytest.mark.parametrize("step", [None, *(name for name in KINDS if name != "drop_experts")])  # the classifier has none
def test_every_method_works_on_old_files(step, opset, tmp_path):
    steps = None if step is None else list(dict.fromkeys(("fold", step)))
    recipe = steps and [{name: _LITTLE[name]} if name in _LITTLE else name for name in steps]
    assert checked(classifier(opset), recipe, tmp_path) > 30


IN_PLACE = {
    "fold": lambda m, data: bitwright.fold_all_batch_norms(m, dummy_input=data[0]),
    "equalize": lambda m, data: bitwright.equalize_model(m, dummy_input=data[0]),
    "smooth": bitwright.smooth_model,
    "rotate": lambda m, data: bitwright.rotate_model(m, data[0]),
    "awq": bitwright.awq_model,
    "fold_norms": lambda m, data: bitwright.fold_norms(m, dummy_input=data[0]),
}


@pytest.mark.parametrize("opset", OPSETS)
def test_what_changes_a_model_in_place_keeps_an_old_file_valid(opset):
    data = batches()
    model = classifier(opset)
    (expected,) = run(model, data[0])
    for name, change in IN_PLACE.items():
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        change(changed, data)
        assert changed.ir_version == max(4, model.ir_version), name
        assert changed.opset_import[0].version == max(8, opset), name
        np.testing.assert_allclose(run(changed, data[0])[0], expected, atol=1e-5, err_msg=name)


def test_an_onnx_ir_model_of_opset_7_is_given_back_at_8():
    model = ir.from_proto(classifier(7))
    bitwright.equalize_model(model, dummy_input=batches()[0])
    assert (model.ir_version, model.opset_imports[""]) == (4, 8)
    np.testing.assert_allclose(run(model, batches()[0])[0], run(classifier(7), batches()[0])[0], atol=1e-5)


def _loop() -> onnx.ModelProto:
    n, inner = Net(1), Net(2)
    h = inner("Relu", inner("MatMul", "state", inner.weights(8, 8, name="w"), name="mm"), name="relu", out="next")
    inputs = [("i", INT64, ()), ("going", BOOL, ()), ("state", FLOAT, (2, 8)), ("w", FLOAT, (8, 8))]
    step = body((inner("Identity", "going", out="still"), BOOL, ()), h, net=inner, inputs=inputs)
    count, going = n.const(np.int64(3), "count"), n.const(np.bool_(True), "start")
    return n.model(n("Loop", count, going, n.input("x", (2, 8)), name="loop", out="y", body=step), opset=11)


def _if() -> onnx.ModelProto:
    n = Net(1)
    n.input("x", (2, 8))
    branches = {}
    for seed, (branch, op) in enumerate({"then_branch": "Relu", "else_branch": "Tanh"}.items()):
        inner = Net(seed)
        h = inner("MatMul", "x", inner.weights(8, 8, name=f"w{seed}"), name=f"mm{seed}", out=f"h{seed}")
        y = inner(op, h, name=f"act{seed}", out=f"y{seed}")
        branches[branch] = body(y, net=inner, inputs=[(f"w{seed}", FLOAT, (8, 8))])
    choose = n.const(np.bool_(True), "choose")
    return n.model(n("If", choose, name="if", out="y", **branches), opset=11)


def _in_a_function() -> onnx.ModelProto:
    """A Loop inside a function; ONNX Runtime reads weights among its body's inputs only outside of functions."""
    model = _loop()
    imports = [helper.make_opsetid("", 11), helper.make_opsetid("own", 1)]
    function = helper.make_function("own", "F", ["count", "start", "x"], ["y"], [model.graph.node[0]], imports[:1])
    node = helper.make_node("F", ["count", "start", "x"], ["y"], domain="own")
    graph = helper.make_graph([node], "g", model.graph.input, model.graph.output, model.graph.initializer)
    return helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=8)


@pytest.mark.parametrize("build", [_loop, _if, _in_a_function])
@pytest.mark.parametrize("ir_version", [3, 8])
def test_weights_among_the_inputs_of_a_body_are_constants(build, ir_version):
    model = build()
    model.ir_version = ir_version
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)}
    expected = run(_loop() if build is _in_a_function else model, feeds)[0]
    loaded = load_model(model)
    assert all(not value.is_initializer() for graph in loaded.model.graphs() for value in graph.inputs)
    np.testing.assert_allclose(run(loaded.model, feeds)[0], expected, atol=1e-6)
    result = bitwright.quantize(model, [feeds], recipe=["fold"], progress=False, measure_speed=False)
    assert sqnr(expected, result.sim.run(feeds)[0]) > 20


def test_an_unread_weight_of_an_old_file_goes():
    n = Net(0)
    model = n.model(n("Relu", n.input("x", (2, 4)), out="y"), opset=7)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "unread"))
    model = _listed(model, 7)
    assert not load_model(model).model.graph.initializers
