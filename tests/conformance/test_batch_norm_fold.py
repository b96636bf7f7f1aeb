"""Folding batch norms of torch and ONNX models: the function stays, or the batch norm does, with the reason."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from onnx import helper
from torch import nn

from bitwright.errors import ModelError
from bitwright.methods.folding.batch_norm_fold import fold_batch_norms as fold_view
from bitwright.onnx import fold_all_batch_norms, load_model
from bitwright.torch import fold_all_batch_norms as fold_model
from bitwright.torch.calls.inputs import flatten_tensors, map_tensors
from bitwright.torch.view import TorchView
from tests.onnx.nets import FLOAT, Net, body, conv_chain, feeds_for
from tests.onnx.nets import run as onnx_run
from tests.support.cases import settle
from tests.support.cost import calls_left
from tests.support.folding_zoo import IMAGE, Wired, bn, conv, point, row
from tests.support.zoo import FOLDING_ZOO, ZOO


class TwoPaddings(nn.Module):
    """One weight, called with two paddings behind one batch norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        y, w, b = self.bn(x), self.conv.weight, self.conv.bias
        return F.conv2d(y, w, b).mean((2, 3)) + F.conv2d(y, w, b, padding=1).mean((2, 3))


def conv_and_bn(wiring):
    return lambda: Wired(wiring, conv=point(), bn=bn(4))


def shares_memory():
    model = row(point(), bn(4), nn.ReLU(), point())
    model[3].weight = nn.Parameter(model[0].weight.data)
    return model


def reads_statistics(m, x):
    return F.batch_norm(m.bn(m.conv(x)).relu(), m.bn.running_mean, m.bn.running_var)


REFUSED = {
    "weight-transposed-elsewhere": (
        lambda: Wired(
            lambda m, x: F.linear(F.relu(m.bn(m.fc(x.mean((2, 3))))), m.fc.weight.t()),
            fc=nn.Linear(4, 6),
            bn=nn.BatchNorm1d(6),
        ),
        "linear reads a value computed from fc.weight",
    ),
    "two-paddings": (TwoPaddings, "the runs of conv differ in their parameters or attributes"),
    "norm-weight-in-a-sum": (
        conv_and_bn(lambda m, x: m.bn(m.conv(x)) * m.bn.weight.abs().sum()),
        "reads a value computed from bn.weight",
    ),
    "statistics-read-elsewhere": (conv_and_bn(reads_statistics), "batch_norm also reads bn.running_mean"),
    "attribute-of-the-norm": (
        conv_and_bn(lambda m, x: m.bn(m.conv(x))[:, : m.bn.num_features]),
        "with it folded, the model fails: AttributeError: 'Identity' object has no attribute 'num_features'",
    ),
    "value-leaves-torch": (
        conv_and_bn(lambda m, x: m.bn(y := m.conv(x)) * y.tolist()[0][0][0][0]),
        "with it folded, output agrees with the original to ",
    ),
    "weights-share-memory": (shares_memory, "with it folded, output agrees with the original to "),
    "hook-changes-the-value": (
        lambda: (m := row(point(), bn(4)))[0].register_forward_hook(lambda _, args, out: out * 2) and m,
        "its input comes from ",
    ),
    "dropout-that-always-drops": (
        conv_and_bn(lambda m, x: m.bn(F.dropout(m.conv(x), 0.3))),
        "its input comes from dropout (Dropout)",
    ),
}


def settled(build):
    model = settle(build(), IMAGE)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
    return model


def image(seed):
    return IMAGE(torch.Generator().manual_seed(seed)).args[0]


def run(model, seed):
    torch.manual_seed(0)
    with torch.no_grad():
        return model(image(seed))


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_fold_may_break_is_refused_with_the_reason(name):
    build, reason = REFUSED[name]
    model = settled(build)
    before = run(model, 5)
    report = fold_all_batch_norms(model, dummy_input=image(1))
    assert not report and any(reason in text for _, text in report.skipped), str(report)
    assert torch.equal(run(model, 5), before)


def test_one_norm_that_is_needed_does_not_keep_the_others():
    parts = {f"c{i}": point() for i in range(6)} | {f"b{i}": bn(4) for i in range(6)}

    def wiring(m, x):
        for i in range(6):
            x = F.relu(getattr(m, f"b{i}")(getattr(m, f"c{i}")(x)))
        return x[:, : m.b3.num_features]

    model = settled(lambda: Wired(wiring, **parts))
    before = run(model, 5)
    report = fold_all_batch_norms(model, dummy_input=image(1))
    assert len(report) == 5 and [name for name, _ in report.skipped] == ["b3"]
    assert torch.allclose(run(model, 5), before, rtol=1e-3, atol=1e-4)


def test_infinite_outputs_do_not_stand_against_a_fold():
    model = settled(conv_and_bn(lambda m, x: m.bn(m.conv(x)).masked_fill(x > 1, -torch.inf)))
    assert len(fold_all_batch_norms(model, dummy_input=image(1))) == 1


def test_input_shapes_may_be_given_instead_of_an_input():
    for shapes in ((2, 4, 8, 8), [(2, 4, 8, 8)]):
        assert list(fold_all_batch_norms(row(conv(), bn()).eval(), shapes)) == [("0", "1")]


def test_neither_shapes_nor_input_is_an_error():
    with pytest.raises(ModelError, match=r"neither dummy_input nor input_shapes.*pass dummy_input=x"):
        fold_all_batch_norms(row(conv(), bn()))


@pytest.mark.parametrize("shapes", [torch.ones(2, 4, 8, 8), {"x": (2, 4, 8, 8)}, [torch.ones(2, 4, 8, 8)], 4])
def test_an_input_in_place_of_shapes_is_refused(shapes):
    with pytest.raises(ModelError, match="input_shapes is no shape and no list of shapes, but .*pass dummy_input=x"):
        fold_all_batch_norms(row(conv(), bn()), shapes)


def test_modes_and_dtypes_stay():
    model = row(conv(), bn()).double().train()
    assert len(fold_all_batch_norms(model, (2, 4, 8, 8))) == 1
    assert model.training and model[1].training and model[0].weight.dtype == torch.float64


def test_layers_of_several_dtypes():
    model = Wired(
        lambda m, x: m.q(m.b(m.p(m.a(x)).double())), a=conv(), p=bn(), b=conv(6, 4).double(), q=bn(4).double()
    ).eval()
    before = run(model, 2)
    assert len(fold_all_batch_norms(model, dummy_input=image(1))) == 2
    assert torch.allclose(run(model, 2), before, atol=1e-5)


# relative to the largest output, by dtype: rounding of the folded weights is what remains
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMED = [
    name
    for name, case in ZOO.items()
    if any(isinstance(module, NORMS) for module in case.build().modules()) and not case.example().kwargs
]


def fold(case, model):
    return fold_view(TorchView(model, [case.example().args]))


def outputs(case, model, seed):
    return [tensor.clone() for _, tensor in flatten_tensors(case.run(model, seed))]


def exact_outputs(case, model, seed):
    """The outputs in float64: what is left of a difference is that of the stored parameters, on any machine."""
    call, wide = case.example(seed), copy.deepcopy(model).double()
    with torch.no_grad():
        args = map_tensors(call.args, lambda t: t.double() if t.is_floating_point() else t)
        return [tensor for _, tensor in flatten_tensors(wide(*args))]


def assert_close(new, old, tolerance=None):
    assert len(new) == len(old)
    for a, b in zip(new, old, strict=True):
        assert a.dtype == b.dtype
        a, b, limit = a.double(), b.double(), tolerance or TOLERANCE[b.dtype]
        assert float((a - b).abs().max()) <= limit * float(b.abs().max())


def same_state(model, other):
    state, before = model.state_dict(), other.state_dict()
    return state.keys() == before.keys() and all(torch.equal(state[key], before[key]) for key in before)


@pytest.mark.parametrize("name", [name for name, case in FOLDING_ZOO.items() if case.expect == "folds"])
def test_every_batch_norm_that_can_be_folded_is(name):
    case = FOLDING_ZOO[name]
    model = case.build()
    before = outputs(case, model, 3)
    report = fold(case, model)
    assert len(report) == case.pairs and not report.refused, str(report)
    assert_close(outputs(case, model, 3), before)


@pytest.mark.parametrize("name", [name for name, case in FOLDING_ZOO.items() if case.expect == "refuses"])
def test_what_must_not_be_folded_stays_bit_for_bit(name):
    case = FOLDING_ZOO[name]
    model = case.build()
    original = copy.deepcopy(model)
    report = fold(case, model)
    norms = sum(isinstance(module, NORMS) for module in model.modules())
    assert not report and len(report.skipped) >= norms, f"{case.why}\n{report}"
    assert all(reason for _, reason in report.skipped)
    assert same_state(model, original)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]


@pytest.mark.parametrize(
    "name, reason",
    [
        ("linear-three-axes", "the channels of 0 are the last axis of 0.output[0]"),
        ("norm-of-every-place", "1 (Flatten) spreads a channel of the layer over several of the batch norm"),
        ("no-running-statistics", "it normalises with the statistics of the batch"),
        ("norm-before-padded-conv", "1: it pads with zeros, which the shift does not reach"),
        ("norm-before-convtranspose", "outputs of a transposed convolution see different kernel parts"),
        ("norm-before-conv-and-shortcut", "add (Add) reads bn.output[0]"),
        ("norm-after-concat", "its input comes from cat (Concat)"),
        ("conv-reused-normalised-once", "add also reads conv.output[0]"),
        ("weight-tied-to-plain-conv", "b shares a parameter with a, but not the batch norm"),
        ("weight-tied-between-two-norms", "normalises differently, and a parameter is shared with it"),
        ("weight-norm", "the weight of 0.conv2d is computed in the model, not a stored parameter"),
        ("value-is-model-output", "conv.output[0] is an output of the model"),
        ("value-has-two-readers", "relu also reads conv.output[0]"),
    ],
)  # fmt: skip
def test_refusals_name_the_sites_and_the_reason(name, reason):
    case = FOLDING_ZOO[name]
    report = fold(case, case.build())
    assert any(reason in text for _, text in report.skipped), str(report)


@pytest.mark.parametrize("name", NORMED)
def test_folding_keeps_the_function_of_every_network(name):
    case = ZOO[name]
    model = case.build()
    stored = next(model.parameters()).dtype
    before = exact_outputs(case, model, 3)
    report = fold(case, model)
    left = sum(isinstance(module, NORMS) for module in model.modules())
    assert_close(exact_outputs(case, model, 3), before, TOLERANCE[stored])
    assert left <= len(report.skipped), str(report)


@pytest.mark.parametrize("name", ["norm-conv-norm", "functional-no-bias", "norm-shared-by-two-convs", "half"])
def test_undo_gives_the_model_back(name):
    case = FOLDING_ZOO[name]
    model = case.build()
    original = copy.deepcopy(model)
    fold(case, model).undo()
    assert same_state(model, original)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]


def test_folded_parameters_keep_their_type_and_names():
    case = FOLDING_ZOO["conv2d-no-bias"]
    model = case.build().requires_grad_(True)
    weight = model[0].weight
    fold(case, model)
    assert model[0].weight is weight and weight.requires_grad and isinstance(model[0].bias, nn.Parameter)
    assert list(model.state_dict()) == ["0.weight", "0.bias"] and isinstance(model[1], nn.Identity)


def test_a_functional_batch_norm_becomes_an_exact_identity():
    case = FOLDING_ZOO["functional"]
    model = case.build()
    fold(case, model)
    x = torch.randn(2, 6, 5, 5)
    assert torch.equal(nn.functional.batch_norm(x, model.mean, model.var, model.gamma, model.beta), x)


class Counted(nn.Module):
    """Counts its forwards; ``drop`` drops in evaluation too, as a function called without its flag does."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.conv, self.bn, self.drop, self.runs = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), drop, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        x.mul_(2.0)  # into its input
        y = self.bn(self.conv(x))
        return nn.functional.dropout(y, self.drop) if self.drop else y


@pytest.mark.parametrize(("drop", "runs"), [(0.0, 2), (0.5, 3)], ids=["fixed", "random"])
def test_outputs_before_a_fold_are_those_of_the_recording_unless_another_run_may_differ(drop: float, runs: int) -> None:
    model, x = Counted(drop).eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = model(x.clone()) if not drop else None
    model.runs = 0
    report = fold_model(model, dummy_input=x.clone())
    assert report.pairs == (("conv", "bn"),)
    assert model.runs == runs
    if expected is not None:
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


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
    for expected, found in zip(onnx_run(original, feeds), onnx_run(proto, feeds), strict=True):
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
    for expected, found in zip(onnx_run(original, feeds), onnx_run(proto, feeds), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_ir_models_and_loaded_models_are_changed_in_place():
    proto, _ = conv_then_norm()
    model = ir.from_proto(proto)
    assert len(fold_all_batch_norms(model)) == 1
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
    for expected, found in zip(onnx_run(original, feeds), onnx_run(proto, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
