"""Folding batch norms of ONNX models: the function stays, or the batch norm does, with the reason."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from bitwright.errors import ModelError
from bitwright.onnx import fold_all_batch_norms, fold_all_batch_norms_to_weight, load_model
from tests.onnx.nets import FLOAT, Net, body, conv_chain, feeds_for, run
from tests.support.cost import calls_left

X = (2, 4, 6, 6)


def conv_then_norm():
    net = Net()
    return net.model(net("Relu", net.bn(net.conv(net.input("x", X), 4, name="c")), out="y")), ["c"]


def conv_without_bias():
    net = Net()
    return net.model(net.bn(net.conv(net.input("x", X), 4, name="c", bias=False, pads=[1] * 4), out="y")), ["c"]


def unknown_size():
    net = Net()
    return net.model(net.bn(net.conv(net.input("x", ("n", 4, "h", "w")), 4, name="c"), out="y")), ["c"]


def grouped():
    net = Net()
    x = net.input("x", X)
    return net.model(net.bn(net.conv(x, 4, 8, name="c", group=4), 8, out="y")), ["c"]


def transposed_grouped_without_bias():
    net = Net()
    x, w = net.input("x", X), net.weights(4, 3, 3, 3, name="w")
    y = net("ConvTranspose", x, w, name="t", group=2, strides=[2, 2])
    return net.model(net.bn(y, 6, out="y")), ["t"]


def gemm():
    net = Net()
    x = net.input("x", (3, 4))
    y = net("Gemm", x, net.weights(5, 4, name="w"), net.weights(5, name="b"), transB=1, beta=0.5, name="g")
    return net.model(net.bn(y, 5, out="y")), ["g"]


def product_and_add():
    net = Net()
    x = net.input("x", (3, 4))
    y = net("Add", net.weights(5, name="b"), net("MatMul", x, net.weights(4, 5, name="w"), name="m"), name="a")
    return net.model(net.bn(y, 5, out="y")), ["m"]


def product_without_add():
    net = Net()
    x = net.input("x", (3, 4))
    return net.model(net.bn(net("MatMul", x, net.weights(4, 5, name="w"), name="m"), 5, out="y")), ["m"]


def norm_before_conv():
    net = Net()
    return net.model(net.conv(net.bn(net.input("x", X)), 4, name="c", out="y")), ["c"]


def two_norms_in_a_row():
    net = Net()
    x = net.input("x", X)
    return net.model(net.bn(net.bn(net.conv(x, 4, name="c"), name="b1"), name="b2", out="y")), ["c", "c"]


def shared_weight_and_norm():
    net = Net()
    x, z = net.input("x", X), net.input("z", X)
    w = net.weights(4, 4, 3, 3, name="w")
    a = net.bn(net("Conv", x, w, name="c1"), name="b")
    parts = [f"b.{p}" for p in ("weight", "bias", "mean", "var")]
    b = net("BatchNormalization", net("Conv", z, w, name="c2"), *parts, name="b2")
    return net.model(net("Add", a, b, out="y")), ["c1", "c2"]


def weights_in_constants_that_are_inputs_too():
    net = Net()
    net.inputs.append(helper.make_tensor_value_info("c.weight", FLOAT, (4, 4, 3, 3)))
    x = net.input("x", X)
    y = net.bn(net.conv(x, 4, name="c"), out="y")
    return net.model(y), ["c"]


def in_a_branch():
    net = Net()
    x, choose = net.input("x", X), net.input("choose", (), onnx.TensorProto.BOOL)
    graphs = {}
    for i, branch in enumerate(("then_branch", "else_branch")):
        inner = Net(i)
        graphs[branch] = body(inner.bn(inner.conv(x, 4, name=f"c{i}"), name=f"b{i}", out="o"), net=inner)
    return net.model(net("If", choose, name="i", out="y", **graphs)), ["c0", "c1"]


def computed_weight():
    net = Net()
    w = net("Mul", net.weights(4, 4, 3, 3, name="w"), net.const(np.float32(2)), out="w2")
    y = net.bn(net("Conv", net.input("x", X), w, name="c"), out="y")
    return net.model(y), ["c"]


def expanded_bias():
    """As an exporter writes a convolution without bias."""
    net = Net()
    zeros = net("Expand", net.const(np.float32(0)), net.const(np.int64([4])))
    y = net("Conv", net.input("x", X), net.weights(4, 4, 3, 3, name="w"), zeros, name="c")
    return net.model(net.bn(y, out="y")), ["c"]


def norm_flattened():
    net = Net()
    flat = net("Flatten", net.bn(net.input("x", ("n", 4, 6, 6))))
    w, b = net.weights(5, 144, name="w"), net.weights(5, name="b")
    return net.model(net("Gemm", flat, w, b, transB=1, name="g", out="y")), ["g"]


def norm_reshaped_to_a_computed_shape():
    net = Net()
    x = net.bn(net.input("x", ("n", 4, 6, 6)))
    rows = net("Slice", net("Shape", x), net.const(np.array([0])), net.const(np.array([1])))
    shape = net("Concat", rows, net.const(np.array([-1])), axis=0)
    flat = net("Reshape", x, shape)
    return net.model(net("MatMul", flat, net.weights(144, 5, name="w"), name="m", out="y")), ["m"]


def product_as_a_picture():
    net = Net()
    y = net("MatMul", net.input("x", ("n", 5)), net.weights(5, 36, name="w"), name="m")
    picture = net("Reshape", net("Add", y, net.weights(36, name="b")), net.const(np.array([-1, 4, 3, 3])))
    return net.model(net.bn(picture, out="y")), ["m"]


def weight_that_another_operator_reads():
    net = Net()
    x, w = net.input("x", X), net.weights(4, 4, 1, 1, name="w")
    y = net.bn(net("Conv", x, w, name="c"))
    shifted = net("Add", x, net("ReduceMean", w, out="mean"), name="s")
    return net.model(net("Add", y, shifted, out="y")), ["c"]


FOLDS = (
    conv_then_norm, conv_without_bias, unknown_size, grouped, transposed_grouped_without_bias, gemm, product_and_add,
    product_without_add, norm_before_conv, two_norms_in_a_row, shared_weight_and_norm,
    weights_in_constants_that_are_inputs_too, in_a_branch, computed_weight, expanded_bias,
    weight_that_another_operator_reads, norm_flattened, norm_reshaped_to_a_computed_shape,
    product_as_a_picture,
)  # fmt: skip


@pytest.mark.parametrize("measured", [False, True], ids=["as-declared", "with-feeds"])
@pytest.mark.parametrize("build", FOLDS, ids=lambda build: build.__name__)
def test_folds_keep_the_function(build, measured):
    proto, layers = build()
    original = onnx.ModelProto.FromString(proto.SerializeToString())
    feeds = feeds_for(proto, h=7, w=5)
    report = fold_all_batch_norms(proto, feeds if measured else None)
    assert sorted(layer for layer, _ in report) == sorted(layers), report
    assert not report.refused
    types = [node.op_type for node in load_model(proto).model.graph.all_nodes()]
    assert "BatchNormalization" not in types and "Identity" not in types
    assert [i.name for i in proto.graph.input] == [i.name for i in original.graph.input]
    assert [o.name for o in proto.graph.output] == [o.name for o in original.graph.output]
    onnx.checker.check_model(proto)
    for expected, found in zip(run(original, feeds), run(proto, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def output_between():
    net = Net()
    c = net.conv(net.input("x", X), 4, name="c", out="hidden")
    return net.model(net.bn(c, out="y"), c), "hidden is an output of the model"


def two_readers():
    net = Net()
    c = net.conv(net.input("x", X), 4, name="c", out="hidden")
    return net.model(net("Add", net.bn(c), c, name="sum", out="y")), "sum also reads hidden"


def trains():
    net = Net()
    x = net.conv(net.input("x", X), 4, name="c")
    parts = [net.weights(4, name=n) for n in ("g", "b", "m")] + [net.const(np.ones(4), "v")]
    y, *_ = net("BatchNormalization", x, *parts, name="bn", out=["y", "mean", "var"], training_mode=1)
    return net.model(y), "it normalises with the statistics of the batch"


def padded_norm_before_conv():
    net = Net()
    y = net.conv(net.bn(net.input("x", X)), 4, name="c", pads=[1] * 4, out="y")
    return net.model(y), "it pads with zeros, which the shift does not reach"


KEPT = (output_between, two_readers, trains, padded_norm_before_conv)


@pytest.mark.parametrize("build", KEPT, ids=lambda build: build.__name__)
def test_what_cannot_be_folded_stays_with_the_reason(build):
    proto, why = build()
    original, feeds = onnx.ModelProto.FromString(proto.SerializeToString()), feeds_for(proto)
    report = fold_all_batch_norms(proto)
    assert not report
    ((_, reason),) = report.skipped
    assert why in reason
    for expected, found in zip(run(original, feeds), run(proto, feeds), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_ir_models_and_loaded_models_are_changed_in_place():
    proto, _ = conv_then_norm()
    model = ir.from_proto(proto)
    assert len(fold_all_batch_norms_to_weight(model)) == 1
    assert [node.op_type for node in model.graph] == ["Conv", "Relu"]
    loaded = load_model(proto)
    assert len(fold_all_batch_norms(loaded)) == 1
    assert [node.op_type for node in loaded.model.graph] == ["Conv", "Relu"]


def test_a_path_cannot_be_changed_in_place():
    with pytest.raises(ModelError) as error:
        fold_all_batch_norms("model.onnx")
    assert str(error.value) == (
        "fold_all_batch_norms: a str cannot be changed in place. Remedy: load the file first: "
        "model = onnx.load(path), or bitwright.onnx.load_model(path)"
    )


def test_chains_of_more_nodes_than_calls_are_allowed_fold():
    proto = conv_chain(200)
    with calls_left(300):
        report = fold_all_batch_norms(proto)
    assert len(report) == 200
    assert len(proto.graph.node) == 600


def test_a_trained_face_detector(shared_data):
    proto = onnx.load(shared_data / "onnx" / "face_slim_320.onnx")
    original = onnx.ModelProto.FromString(proto.SerializeToString())
    feeds = feeds_for(proto)
    report = fold_all_batch_norms(proto, feeds)
    assert (len(report), len(report.refused)) == (25, 0)
    for expected, found in zip(run(original, feeds), run(proto, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
