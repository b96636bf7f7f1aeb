"""Folding through ``FloatModel``: where it happens, where not and why, on a model that is only its graph."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bitwright.core.graph.graph import Graph, Op, Value
from bitwright.core.simulation.float_model import AddBias, Bypass, SetParam
from bitwright.methods.folding.batch_norm_fold import FoldReport, fold_batch_norms
from bitwright.methods.folding.batch_norm_search import Fold, filled, find_folds


class Net:
    """A model as a list of calls, each an op that runs on earlier results; it is its own ``FloatModel``.

    ``conv`` and so on declare an op; calling the net with the op's name and its inputs runs it, any number
    of times.
    """

    def __init__(self, shape=(2, 4, 6, 6)):
        self.rng = np.random.default_rng(1)
        self.params, self.types, self.attrs, self.ports = {}, {}, {}, {}
        self.calls, self.returned = [], []
        self.fixed, self.closed, self.bypassed = set(), set(), set()
        self.input = self.rng.standard_normal(shape).astype(np.float32)
        self.graphs = 0

    # -- building

    def add(self, name, op_type, attrs=None, **operands):
        """Declare an op; operands are arrays (new parameters), names of parameters, or ``None``."""
        self.types[name], self.attrs[name], self.ports[name] = op_type, attrs or {}, []
        for key, value in operands.items():
            if isinstance(value, np.ndarray):
                self.params[f"{name}.{key}"] = value.astype(np.float32)
                value = f"{name}.{key}"
            self.ports[name].append(value)
        return name

    def weights(self, *shape):
        return self.rng.standard_normal(shape) * 0.5

    def conv(self, name="conv", cin=4, cout=4, k=3, bias=True, transposed=False, weight=None, **attrs):
        group = attrs.get("group", 1)
        shape = (cin, cout // group) if transposed else (cout, cin // group)
        weight = self.weights(*shape, k, k) if weight is None else weight
        return self.add(
            name, "ConvTranspose" if transposed else "Conv", attrs, weight=weight,
            bias=self.weights(cout) if bias is True else bias or None,
        )  # fmt: skip

    def gemm(self, name="fc", cin=4, cout=4, bias=True):
        bias = self.weights(cout) if bias else None
        return self.add(name, "Gemm", {"transB": 1}, weight=self.weights(cout, cin), bias=bias)

    def bn(self, name="bn", c=4, affine=True, like=None, **attrs):
        if like is not None:
            operands = dict(zip(("weight", "bias", "mean", "var"), self.ports[like], strict=True))
            return self.add(name, "BatchNormalization", self.attrs[like], **operands)
        return self.add(
            name, "BatchNormalization", {"epsilon": 1e-5, **attrs},
            weight=self.weights(c) if affine else None, bias=self.weights(c) if affine else None,
            mean=self.weights(c), var=self.rng.uniform(0.5, 2, c),
        )  # fmt: skip

    def __call__(self, name, *inputs):
        self.types.setdefault(name, name.partition("_")[0].capitalize())
        self.attrs.setdefault(name, {})
        self.ports.setdefault(name, [])
        self.calls.append((name, inputs))
        return len(self.calls) - 1

    def row(self, *names):
        """The ops one after the other, beginning with the model's input; the last result is returned."""
        value = "x"
        for name in names:
            value = self(name, value)
        self.returned.append(value)
        return self

    def returns(self, *values):
        self.returned.extend(values)
        return self

    # -- running

    def apply(self, name, inputs):
        op_type, attrs = self.types[name], self.attrs[name]
        x, *rest = [torch.from_numpy(np.asarray(i)) for i in inputs]
        rest += [None if p is None else torch.from_numpy(self.params[p]) for p in self.ports[name]]
        if name in self.bypassed:
            return x.numpy()
        return FUNCTIONS[op_type](x, rest, attrs).numpy()

    def run(self):
        results = {"x": self.input}
        for i, (name, inputs) in enumerate(self.calls):
            results[i] = self.apply(name, [results[j] for j in inputs])
        self.results = results
        return [results[i] for i in self.returned]

    # -- FloatModel

    def graph(self):
        self.graphs += 1
        self.run()
        value_of = {"x": "x", **{i: f"{name}.out" for i, (name, _) in enumerate(self.calls)}}
        values = {name: Value(name, "param", p.shape, param=name) for name, p in self.params.items()}
        values["x"] = Value("x", "input", self.input.shape)
        ops = {}
        for i, (name, inputs) in enumerate(self.calls):
            read = tuple(value_of[j] for j in inputs)
            if name in ops:
                also = tuple((p, v) for p, v in enumerate(read) if ops[name].inputs[p] != v)
                ops[name] = replace(ops[name], also=ops[name].also + also, calls=ops[name].calls + 1)
                continue
            values[f"{name}.out"] = Value(f"{name}.out", "activation", self.results[i].shape)
            inputs = (*read, *self.ports[name])
            ops[name] = Op(name, self.types[name], inputs, (f"{name}.out",), self.attrs[name])
        values.update(getattr(self, "values", {}))
        return Graph(list(ops.values()), values, ["x"], [value_of[i] for i in self.returned])

    def param(self, name):
        return self.params[name].copy()

    def set_param(self, name, value):
        assert value.shape == self.params[name].shape
        self.params[name] = value.astype(np.float32)

    def local(self, op):
        return lambda *inputs: self.apply(op, inputs)

    def can_edit(self, edit):
        if isinstance(edit, Bypass):
            return "it is a call" if edit.op in self.fixed else None
        if isinstance(edit, AddBias):
            return "it is a call" if edit.op in self.closed or self.ports[edit.op][1:] != [None] else None
        return None if edit.name in self.params else "no such parameter"

    def edit(self, edits):
        undos = []
        for edit in edits:
            assert self.can_edit(edit) is None, edit
            if isinstance(edit, SetParam):
                old = self.params[edit.name]
                self.set_param(edit.name, edit.value)
                undos.append(lambda name=edit.name, old=old: self.params.update({name: old}))
            elif isinstance(edit, AddBias):
                name = f"{edit.op}.bias"
                self.params[name] = np.asarray(edit.value, np.float32)
                self.ports[edit.op] = [self.ports[edit.op][0], name]
                undos.append(lambda op=edit.op: self._drop_bias(op))
            else:
                self.bypassed.add(edit.op)
                undos.append(lambda op=edit.op: self.bypassed.remove(op))
        return lambda: [undo() for undo in reversed(undos)]

    def _drop_bias(self, op):
        del self.params[f"{op}.bias"]
        self.ports[op] = [self.ports[op][0], None]


def _conv(function):
    def run(x, rest, attrs):
        n = rest[0].dim() - 2
        extra = (attrs.get("output_padding", 0),) if function is F.conv_transpose2d else ()
        pad, group = (attrs.get("pads") or (0,) * n)[:n], attrs.get("group", 1)
        middle = (*extra, group, 1) if extra else (1, group)
        return function(x, *rest[:2], attrs.get("strides", 1), pad, *middle)

    return run


FUNCTIONS = {
    "Conv": _conv(F.conv2d),
    "ConvTranspose": _conv(F.conv_transpose2d),
    "Gemm": lambda x, rest, attrs: F.linear(x, *rest),
    "MatMul": lambda x, rest, attrs: x @ rest[0],
    "BatchNormalization": lambda x, rest, attrs: F.batch_norm(
        x, rest[2], rest[3], rest[0], rest[1], eps=attrs.get("real_epsilon", attrs["epsilon"])
    ),
    "Identity": lambda x, rest, attrs: x.clone(),
    "Dropout": lambda x, rest, attrs: F.dropout(x, 0.5, attrs.get("always", False)),
    "Relu": lambda x, rest, attrs: F.relu(x),
    "Add": lambda x, rest, attrs: x + rest[0],
    "Norm": lambda x, rest, attrs: x * rest[0].abs().max(),
    "Reshape": lambda x, rest, attrs: x.reshape(attrs["shape"]),
    "Flatten": lambda x, rest, attrs: x.flatten(1),
    "Transpose": lambda x, rest, attrs: x.permute(attrs["perm"]),
}


# ---------------------------------------------------------------------------------------------- what folds

FOLDS = {}


def folds(pairs, **expected):
    def note(build):
        FOLDS[build.__name__] = (build, pairs, expected)
        return build

    return note


@folds(1)
def conv_then_norm(net):
    return net.row(net.conv(), net.bn(), "relu")


@folds(1)
def conv_without_bias(net):
    return net.row(net.conv(bias=False, pads=(1, 1, 1, 1)), net.bn())


@folds(1)
def grouped_multiplier(net):
    return net.row(net.conv(cout=8, group=4), net.bn(c=8))


@folds(1)
def transposed_grouped_without_bias(net):
    return net.row(net.conv(cout=6, group=2, transposed=True, bias=False), net.bn(c=6))


@folds(1)
def norm_without_weight_and_bias(net):
    return net.row(net.conv(), net.bn(affine=False))


@folds(2)
def two_norms_in_a_row(net):
    return net.row(net.conv(), net.bn("bn1"), net.bn("bn2"), "relu")


@folds(2)
def identity_and_dropout_between(net):
    return net.row(net.conv(), "identity_1", net.bn("bn1"), "dropout_1", "identity_2", net.bn("bn2"))


@folds(1)
def norm_then_conv(net):
    return net.row(net.bn(), net.conv())


@folds(2)
def two_norms_then_conv_without_bias(net):
    return net.row(net.bn("bn1"), "identity_1", net.bn("bn2"), net.conv(bias=False))


@folds(2)
def norm_conv_norm_without_bias(net):
    return net.row(net.bn("bn1"), net.conv(bias=False), net.bn("bn2"))


@folds(1)
def unshifted_norm_then_padded_and_transposed_conv(net):
    bn = net.bn()
    net.params["bn.bias"][:] = net.params["bn.mean"][:] = 0
    return net.row("relu", bn, net.conv(pads=(1, 1, 1, 1), bias=False))


@folds(2)
def norm_then_two_convs(net):
    bn, a, b = net.bn(), net.conv("a"), net.conv("b", bias=False)
    y = net(bn, net("relu", "x"))
    return net.returns(net(a, y), net(b, y))


@folds(2)
def one_norm_behind_two_convs(net):
    a, b, bn = net.conv("a"), net.conv("b", bias=False), net.bn()
    return net.returns(net("add", net(bn, net(a, "x")), net(bn, net(b, "x"))))


@folds(1)
def conv_and_norm_used_twice(net):
    conv, bn = net.conv(pads=(1, 1, 1, 1)), net.bn()
    return net.row(conv, bn, "relu", conv, bn)


@folds(2)
def tied_weights_and_one_norm(net):
    a, b, bn = net.conv("a"), net.conv("b", weight="a.weight", bias=False), net.bn()
    return net.returns(net(bn, net(a, "x")), net(bn, net("identity", net(b, "x"))))


@folds(2)
def tied_weights_and_tied_norms(net):
    a, b = net.conv("a"), net.conv("b", weight="a.weight", bias="a.bias")
    p, q = net.bn("p"), net.bn("q", like="p")
    return net.returns(net(p, net(a, "x")), net(q, net(b, "x")))


@folds(2)
def tied_weights_behind_tied_norms(net):
    a, b = net.conv("a"), net.conv("b", weight="a.weight")
    p, q = net.bn("p"), net.bn("q", like="p")
    return net.returns(net(a, net(p, "x")), net(b, net(q, net("relu", "x"))))


@folds(2)
def norms_that_cannot_be_removed(net):
    net.fixed = {"bn1", "bn2"}
    return net.row(net.conv(), net.bn("bn1"), net.bn("bn2", affine=False))


@folds(1, keeps_shift=True)
def no_place_for_a_bias(net):
    net.closed = {"conv"}
    return net.row(net.conv(bias=False), net.bn())


@folds(2, keeps_shift=True)
def no_place_for_a_bias_two_norms_without_bias(net):
    net.closed, net.fixed = {"conv"}, {"bn1", "bn2"}
    return net.row(net.conv(bias=False), net.bn("bn1", affine=False), net.bn("bn2", affine=False))


@folds(2, keeps_shift=True)
def one_of_two_convs_has_no_place_for_a_bias(net):
    net.closed = {"b"}
    a, b, bn = net.conv("a"), net.conv("b", bias=False), net.bn()
    return net.returns(net("add", net(bn, net(a, "x")), net(bn, net(b, "x"))))


@folds(1, shape=(5, 4))
def linear(net):
    return net.row(net.gemm(bias=False), net.bn())


@folds(1, shape=(5, 4))
def norm_then_linear(net):
    return net.row(net.bn(), net.gemm())


@folds(1, shape=(5, 4), keeps_shift=True)
def matmul(net):
    net.closed = {"mm"}
    return net.row(net.add("mm", "MatMul", weight=net.weights(4, 4), bias=None), net.bn())


@folds(1)
def norm_then_flatten_and_linear(net):
    return net.row(net.bn(), "flatten", net.gemm(cin=144))


@folds(2)
def two_norms_then_linear_channels_last(net):
    net.add("perm", "Transpose", {"perm": (0, 2, 3, 1)})
    return net.row(net.bn("p"), net.bn("q"), "perm", "flatten", net.gemm(cin=144, bias=False))


@folds(1, shape=(3, 5))
def linear_then_picture_and_norm(net):
    net.add("picture", "Reshape", {"shape": (-1, 4, 3, 3)})
    return net.row(net.gemm(cin=5, cout=36), "picture", net.bn())


@folds(1, shape=(3, 5))
def linear_then_shuffled_channels(net):
    net.add("split", "Reshape", {"shape": (-1, 2, 6)})
    net.add("swap", "Transpose", {"perm": (0, 2, 1)})
    net.add("join", "Reshape", {"shape": (-1, 12)})
    return net.row(net.gemm(cin=5, cout=12), "split", "swap", "join", net.bn(c=12))


@folds(1, shape=(3, 7, 5))
def linear_on_three_axes_with_channels_moved_to_the_norm(net):
    net.add("swap", "Transpose", {"perm": (0, 2, 1)})
    return net.row(net.gemm(cin=5), "swap", net.bn())


@folds(2)
def norm_then_flatten_and_two_linears(net):
    y = net("flatten", net(net.bn(), "x"))
    return net.returns(net(net.gemm("a", cin=144), y), net(net.gemm("b", cin=144), y))


def built(build, expected=()):
    return build(Net(*[dict(expected)["shape"]] if "shape" in expected else []))


@pytest.mark.parametrize("name", FOLDS)
def test_folding_keeps_the_function(name):
    build, pairs, expected = FOLDS[name]
    net = built(build, expected)
    before, params = net.run(), {k: v.copy() for k, v in net.params.items()}
    report = fold_batch_norms(net)
    assert net.graphs == 1 and not report.refused and len(report) == len(report.pairs) == pairs, str(report)
    assert 0 < report.max_error < 1e-5
    assert any(fold.keeps_shift for fold in report.folded) == expected.get("keeps_shift", False)
    for old, new in zip(before, net.run(), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-5)
    report.undo()
    report.undo()
    assert not net.bypassed and net.params.keys() == params.keys()
    for key, value in params.items():
        assert np.array_equal(net.params[key], value), key


@pytest.mark.parametrize("name", FOLDS)
def test_what_is_folded_no_longer_normalises(name):
    build, _, expected = FOLDS[name]
    net = built(build, expected)
    folds, refusals = find_folds(net.graph(), net)
    assert not refusals
    fold_batch_norms(net)
    kept = {fold.layers[0][1][-1] for fold in folds if fold.keeps_shift}
    x = np.random.default_rng(0).standard_normal(net.input.shape[:1] + (4,) + net.input.shape[2:])
    for bn in {bn for fold in folds for bn in fold.batch_norms}:
        channels = len(net.params[net.ports[bn][2]])
        x = np.resize(x, (2, channels, 3)).astype(np.float32)
        difference = net.apply(bn, [x]) - x
        assert np.allclose(difference, difference[:1, :, :1], atol=1e-6)  # one number per channel
        assert (bn in kept) == bool(np.any(difference))


def test_folding_twice_finds_nothing_more():
    net = Net()
    net.closed, net.fixed = {"b"}, {"bn1", "bn2"}
    net.row(net.conv("a"), net.bn("bn1"), net.conv("b", bias=False), net.bn("bn2"))
    assert len(fold_batch_norms(net)) == 2
    again = fold_batch_norms(net)
    assert not again and [bn for bn, _ in again.skipped] == ["bn1", "bn2"]
    assert again.skipped[0][1] == "it is an exact identity already, and cannot be removed"
    assert "it only adds a shift, and b has no bias and cannot get one: it is a call" in again.skipped[1][1]


# ------------------------------------------------------------------------------------------- what does not

REFUSALS = {}


def refuses(*reasons, shape=(2, 4, 6, 6)):
    def note(build):
        REFUSALS[build.__name__] = (build, reasons, shape)
        return build

    return note


@refuses("relu also reads conv.out")
def second_reader(net):
    conv, bn = net.conv(), net.bn()
    y = net(conv, "x")
    return net.returns(net(bn, y), net("relu", y))


@refuses("conv.out is an output of the model")
def model_output(net):
    conv, bn = net.conv(), net.bn()
    y = net(conv, "x")
    return net.returns(net(bn, y), y)


@refuses("identity.out is an output of the model", "bn.out is an output of the model")
def output_on_the_way(net):
    conv, bn = net.conv(), net.bn()
    y = net("identity", net(conv, "x"))
    return net.returns(net(bn, y), y)


@refuses("q also reads conv.out", "p also reads conv.out")
def two_norms_side_by_side(net):
    conv, p, q = net.conv(), net.bn("p"), net.bn("q")
    y = net(conv, "x")
    return net.returns(net(p, y), net(q, y))


@refuses("relu_2 also reads conv.out")
def conv_used_twice_and_normalised_once(net):
    conv, bn = net.conv(pads=(1, 1, 1, 1)), net.bn()
    return net.row(conv, bn, "relu_1", conv, "relu_2")


@refuses("its input x is not a result of a layer but an input of the model")
def norm_also_on_the_input(net):
    conv, bn = net.conv(), net.bn()
    return net.returns(net(bn, net(conv, "x")), net(bn, "x"))


@refuses("its input comes from relu (Relu)", "bn.out is an output of the model")
def activation_between(net):
    return net.row(net.conv(), "relu", net.bn())


@refuses("its input comes from dropout (Dropout)")
def dropout_that_always_drops(net):
    net.add("dropout", "Dropout", {"always": True})
    return net.row(net.conv(), "dropout", net.bn())


@refuses("b shares a parameter with a, but not the batch norm")
def weight_tied_to_another_layer(net):
    a, b, bn = net.conv("a"), net.conv("b", weight="a.weight"), net.bn()
    return net.returns(net(bn, net(a, "x")), net(b, "x"))


@refuses("b shares a parameter with a, but not the batch norm")
def bias_tied_to_another_layer(net):
    a, b, bn = net.conv("a"), net.conv("b", bias="a.bias"), net.bn()
    return net.returns(net(bn, net(a, "x")), net(b, "x"))


@refuses("q normalises differently, and a parameter is shared with it", "and a parameter is shared with it")
def weight_tied_between_different_norms(net):
    a, b, p, q = net.conv("a"), net.conv("b", weight="a.weight"), net.bn("p"), net.bn("q")
    return net.returns(net(p, net(a, "x")), net(q, net(b, "x")))


@refuses("b (Conv) also reads a.weight")
def weight_tied_in_other_groups(net):
    a = net.conv("a", group=2)
    b, bn = net.conv("b", cin=2, cout=4, weight="a.weight"), net.bn()
    c = net.conv("c", cout=2)
    return net.returns(net(bn, net(a, "x")), net(b, net(c, "x")))


@refuses("norm (Norm) also reads conv.weight")
def weight_read_by_another_operator(net):
    conv, bn = net.conv(), net.bn()
    net.add("norm", "Norm", weight="conv.weight")
    return net.returns(net(bn, net(conv, "x")), net("norm", "x"))


@refuses("norm reads a value computed from conv.weight")
def weight_used_to_compute_another(net):
    net.row(net.conv(), net.bn(), net.add("norm", "Norm", weight=net.weights(4)))
    net.values = {"norm.weight": Value("norm.weight", "constant", (4,), sources=("conv.weight",))}
    return net


@refuses("norm reads a value computed from bn.weight")
def norm_weight_used_to_compute_another(net):
    net.row(net.conv(), net.bn(), net.add("norm", "Norm", weight=net.weights(4)))
    net.values = {"norm.weight": Value("norm.weight", "constant", (4,), sources=("bn.weight",))}
    return net


@refuses("the weight of conv is computed in the model, not a stored parameter")
def derived_weight(net):
    net.values = {"conv.weight": Value("conv.weight", "constant", (4, 4, 3, 3))}
    return net.row(net.conv(), net.bn())


@refuses("the bias of conv is computed in the model, not a stored parameter")
def derived_bias(net):
    net.values = {"conv.bias": Value("conv.bias", "constant", (4,))}
    return net.row(net.conv(), net.bn())


@refuses("its parameter bn.mean is computed in the model, not stored")
def derived_statistics(net):
    net.values = {"bn.mean": Value("bn.mean", "constant", (4,))}
    return net.row(net.conv(), net.bn())


@refuses("the runs of conv differ in their parameters or attributes")
def attributes_that_vary(net):
    return net.row(net.conv(varies=True), net.bn())


@refuses("it normalises with the statistics of the batch, so it is not a fixed function of one value")
def statistics_of_the_batch(net):
    return net.row(net.conv(), net.bn(training=True))


@refuses("its variance is nan in channel 1")
def nan_variance(net):
    bn = net.bn()
    net.params["bn.var"][1] = np.nan
    return net.row(net.conv(), bn)


@refuses("its variance with epsilon 1e-05 is -1 in channel 1")
def negative_variance(net):
    bn = net.bn()
    net.params["bn.var"][1] = -1
    return net.row(net.conv(), bn)


@refuses("conv: it pads with zeros, which the shift does not reach")
def norm_before_padding(net):
    return net.row(net.bn(), net.conv(pads=(0, 1, 0, 1)))


@refuses("conv: outputs of a transposed convolution see different kernel parts")
def norm_before_transposed(net):
    return net.row(net.bn(), net.conv(transposed=True))


@refuses("add (Add) reads bn.out")
def norm_before_conv_and_shortcut(net):
    bn, conv = net.bn(), net.conv(pads=(1, 1, 1, 1))
    y = net(bn, "x")
    return net.returns(net("add", net(conv, y), y))


@refuses("conv also runs on x")
def conv_behind_norm_and_without_it(net):
    bn, conv = net.bn(), net.conv()
    return net.returns(net(conv, net(bn, "x")), net(conv, "x"))


@refuses("conv has no bias and cannot get one: it is a call")
def norm_before_conv_without_place_for_a_bias(net):
    net.closed = {"conv"}
    return net.row(net.bn(), net.conv(bias=False))


@refuses("it cannot be removed (it is a call) nor be made an identity (q also reads p.weight)", "p also reads")
def calls_that_share_their_parameters(net):
    net.fixed = {"p", "q"}
    p, q, a, b = net.bn("p"), net.bn("q", like="p"), net.conv("a"), net.conv("b")
    return net.returns(net(p, net(a, "x")), net(q, net(b, "x")))


@refuses("and the shift cannot stay in the batch norm: q also reads p.weight", "p also reads p.weight")
def no_bias_and_shared_norm_parameters(net):
    net.closed = {"a", "b"}
    p, q = net.bn("p"), net.bn("q", like="p")
    a, b = net.conv("a", bias=False), net.conv("b", bias=False)
    return net.returns(net(p, net(a, "x")), net(q, net(b, "x")))


@refuses("the channels of fc are the last axis of fc.out, those of the batch norm are axis 1", shape=(3, 4, 4))
def linear_on_three_axes(net):
    return net.row(net.gemm(), net.bn())


@refuses("the channels of fc are the last axis of bn.out, those of the batch norm are axis 1", shape=(3, 4, 4))
def norm_before_linear_on_three_axes(net):
    return net.row(net.bn(), net.gemm())


@refuses("flatten (Flatten) spreads a channel of the layer over several of the batch norm")
def norm_of_every_place(net):
    return net.row(net.conv(), "flatten", net.bn(c=64))


@refuses("rows (Reshape) spreads a channel of the layer over several of the batch norm", shape=(4, 5))
def linear_then_two_rows_in_one(net):
    net.add("rows", "Reshape", {"shape": (-1, 8)})
    return net.row(net.gemm(cin=5), "rows", net.bn(c=8))


@refuses("rows (Reshape) puts several channels of the batch norm into one of the layer", shape=(2, 8))
def norm_then_two_rows_of_one(net):
    net.add("rows", "Reshape", {"shape": (-1, 4)})
    return net.row(net.bn(c=8), "rows", net.gemm())


@refuses("perm (Transpose) puts several channels of the batch norm into one of the layer", shape=(2, 3, 4))
def norm_of_what_becomes_rows(net):
    net.add("perm", "Transpose", {"perm": (0, 2, 1)})
    net.add("rows", "Reshape", {"shape": (-1, 4)})
    net.add("back", "Transpose", {"perm": (0, 2, 1)})
    return net.row(net.bn(c=3), "perm", "back", "rows", net.gemm())


@refuses("a and b share a.weight, and the operators between them and the batch norm differ")
def linears_that_share_a_weight_behind_other_moves(net):
    net.add("perm", "Transpose", {"perm": (0, 2, 3, 1)})
    net.gemm("a", cin=144, bias=False)
    net.add("b", "Gemm", {"transB": 1}, weight="a.weight", bias=None)
    y = net(net.bn(), "x")
    return net.returns(net("a", net("flatten_1", y)), net("b", net("flatten_2", net("perm", y))))


@refuses("the channels of conv are the first axis of conv.out", shape=(4, 6, 6))
def conv_without_batch_axis(net):
    return net.row(net.conv(), net.bn())


@refuses("fc has an operand fc.bias that is not a plain bias", shape=(3, 4))
def gemm_that_ignores_its_bias(net):
    net.row(net.gemm(), net.bn())
    net.attrs["fc"]["beta"] = 0.0
    return net


@refuses("the bias of fc has shape (3, 4), not one entry per channel", shape=(3, 4))
def gemm_with_a_matrix_added(net):
    fc = net.add("fc", "Gemm", {"transB": 1}, weight=net.weights(4, 4), bias=net.weights(3, 4))
    return net.row(fc, net.bn())


@refuses("folded into conv it differed from the original by ", "more than 0.0001")
def epsilon_that_is_not_what_runs(net):
    return net.row(net.conv(bias=False), net.bn(real_epsilon=0.5))


@refuses("a parameter of conv would have a NaN or infinite element")
def nan_weight(net):
    conv = net.conv()
    net.params["conv.weight"][0] = np.nan
    return net.row(conv, net.bn())


@refuses("a parameter of conv would reach ", "beyond float16")
def overflow_in_half(net):
    net.row(net.conv(), net.bn())
    net.params["bn.weight"][0] = 1e6
    net.values = {"conv.weight": Value("conv.weight", "param", (4, 4, 3, 3), "float16", "conv.weight")}
    return net


@refuses("identity.out is an output of the model")
def norm_then_conv_and_output_behind_an_identity(net):
    bn, conv = net.bn(), net.conv()
    y = net("identity", net(bn, "x"))
    return net.returns(net(conv, y), y)


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_reason_and_leave_the_model_alone(name):
    build, reasons, shape = REFUSALS[name]
    net = build(Net(shape))
    params = {k: v.copy() for k, v in net.params.items()}
    report = fold_batch_norms(net)
    norms = [op for op, kind in net.types.items() if kind == "BatchNormalization"]
    assert not report and sorted(bn for bn, _ in report.skipped) == sorted(norms)
    text = "\n".join(reason for _, reason in report.skipped)
    for reason in reasons:
        assert reason in text, text
    assert not net.bypassed
    for key, value in net.params.items():
        assert np.array_equal(value, params[key], equal_nan=True), key


def test_a_refusal_names_the_layer_beside_the_norm():
    net = second_reader(Net())
    (refusal,) = fold_batch_norms(net).refused
    assert (refusal.op, refusal.bn) == (None, "bn")
    net = weight_tied_to_another_layer(Net())
    assert fold_batch_norms(net).refused[0].op == "a"


def test_what_is_wrong_with_one_norm_does_not_keep_the_others():
    net = Net()
    net.row(net.conv("a"), net.bn("p"), "relu_1", net.conv("b"), net.bn("q", real_epsilon=0.5), "relu_2")
    report = fold_batch_norms(net)
    assert report.pairs == (("a", "p"),) and [bn for bn, _ in report.skipped] == ["q"]


# ---------------------------------------------------------------------------------------------- the report


def test_the_report_reads_as_a_table_and_as_a_sequence():
    net = Net()
    net.row(net.bn("in"), net.conv("a"), net.bn("p"), net.bn("q"), "relu", net.bn("last"))
    report = fold_batch_norms(net)
    assert (
        list(report) == [("a", "p"), ("a", "q"), ("a", "in")]
        and report[-1] == ("a", "in")
        and report[:1] == (("a", "p"),)
    )
    lines = str(report).splitlines()
    assert lines[0].startswith("3 batch norms folded, 1 kept; largest relative difference ")
    assert lines[1:3] == ["  folded  a <- p + q", "  folded  in -> a"]
    assert lines[3] == (
        "  kept    last: not into a layer before it: its input comes from relu (Relu); "
        "not into a layer after it: last.out is an output of the model"
    )
    assert repr(report).startswith("FoldReport(2 folds, 1 refused, max_error=")


def test_an_empty_report_is_false_and_has_no_error():
    report = fold_batch_norms(Net().row("relu"))
    assert not report and report.max_error == 0.0 and isinstance(report, FoldReport)
    assert str(report) == "0 batch norms folded, 0 kept; largest relative difference 0.0e+00"


def test_moments_are_those_of_the_channels_of_the_layer():
    net = linear_then_picture_and_norm(Net((3, 5)))
    mean, deviation = net.params["bn.bias"].copy(), np.abs(net.params["bn.weight"])
    moments = fold_batch_norms(net).moments["fc"]
    np.testing.assert_allclose(moments[0], np.repeat(mean, 9))
    np.testing.assert_allclose(moments[1], np.repeat(deviation, 9))


def test_keep_makes_the_folds_final():
    net = conv_then_norm(Net())
    report = fold_batch_norms(net)
    report.keep()
    folded = net.param("conv.weight")
    report.undo()
    assert net.bypassed == {"bn"} and np.array_equal(net.param("conv.weight"), folded)


def test_folds_and_refusals_are_logged(caplog):
    with caplog.at_level(logging.INFO, logger="bitwright"):
        fold_batch_norms(two_norms_in_a_row(Net()))
        fold_batch_norms(second_reader(Net()))
    assert caplog.messages[0] == "batch norm folded: conv <- bn1 + bn2"
    assert caplog.messages[1].startswith("batch norm kept: bn: not into a layer before it: relu also reads")


def test_finding_folds_changes_nothing():
    net = one_norm_behind_two_convs(Net())
    params = {k: v.copy() for k, v in net.params.items()}
    (fold,), _ = find_folds(net.graph(), net)
    assert fold.layers == (("a", ("bn",)), ("b", ("bn",))) or fold.layers == (("b", ("bn",)), ("a", ("bn",)))
    assert all(np.array_equal(net.params[k], v) for k, v in params.items()) and not net.bypassed


def _eight_blocks():
    net = Net((1, 4, 20, 20))
    return net.row(*[name for i in range(8) for name in (net.conv(f"c{i}"), net.bn(f"b{i}"))])


@pytest.mark.parametrize("bad", [set(), {"b3"}, {"b0", "b7"}, {f"b{i}" for i in range(8)}])
def test_a_check_of_the_whole_model_takes_back_what_it_objects_to(bad):
    net, asked = _eight_blocks(), []
    before = net.run()[0]

    def check():
        asked.append(net.bypassed & bad)
        return "somebody reads the epsilon of a batch norm" if asked[-1] else None

    report = fold_batch_norms(net, check)
    assert {bn for bn, _ in report.skipped} == bad and len(report) == 8 - len(bad)
    assert set(dict(report.skipped).values()) <= {"with it folded, somebody reads the epsilon of a batch norm"}
    assert net.bypassed == {f"b{i}" for i in range(8)} - bad and len(asked) <= 1 + 2 * len(bad) * 3
    np.testing.assert_allclose(net.run()[0], before, rtol=1e-4, atol=1e-5)


def test_a_check_that_always_objects_is_asked_a_bounded_number_of_times(monkeypatch):
    monkeypatch.setattr("bitwright.methods.folding.batch_norm_fold.MAX_CHECKS", 3)
    net, asked = _eight_blocks(), []
    report = fold_batch_norms(net, lambda: asked.append(1) or "it differs")
    assert not report and len(report.skipped) == 8 and not net.bypassed and 3 <= len(asked) <= 6


def test_an_error_in_the_middle_takes_everything_back():
    net = Net()
    net.row(net.conv("a"), net.bn("p"), "relu", net.conv("b", bias=False), net.bn("q"))
    params, local = {k: v.copy() for k, v in net.params.items()}, net.local

    def failing(op):
        if op == "b" and "q" in net.bypassed:
            raise KeyboardInterrupt
        return local(op)

    net.local = failing
    with pytest.raises(KeyboardInterrupt):
        fold_batch_norms(net)
    assert not net.bypassed and net.params.keys() == params.keys()
    assert all(np.array_equal(net.params[k], v) for k, v in params.items())


# ------------------------------------------------------------------------------------------------- scaling


def _blocks(n):
    net = Net((1, 2, 4, 4))
    value = "x"
    for i in range(n):
        conv, bn = net.conv(f"c{i}", 2, 2, 1, bias=i % 2 == 0), net.bn(f"b{i}", 2)
        value = net(bn, net(conv, value))
    return net.returns(value)


def _norms(n):
    net = Net((1, 2, 4, 4))
    return net.row(net.conv("c", 2, 2, 1), *[name for i in range(n) for name in (net.bn(f"b{i}", 2), f"identity_{i}")])


def _norms_before(n):
    net = Net((1, 2, 4, 4))
    return net.row(*[net.bn(f"b{i}", 2) for i in range(n)], net.conv("c", 2, 2, 1))


def _tied(n):
    net = Net((1, 2, 4, 4))
    net.conv("c0", 2, 2, 1), net.bn("b0", 2)
    for i in range(n):
        c = net.conv(f"c{i}", 2, 2, 1, weight="c0.weight", bias="c0.bias") if i else "c0"
        net.returns(net(net.bn(f"b{i}", 2, like="b0") if i else "b0", net(c, "x")))
    return net


def _tied_unfoldable(n):
    net = _tied(n)
    return net.returns(net(net.conv("plain", 2, 2, 1, weight="c0.weight"), "x"))


def _fan_out(n):
    net = Net((1, 2, 4, 4))
    y = net(net.bn("b", 2), "x")
    for i in range(n):
        y = net(f"identity_{i}", y)
        net.returns(net(net.conv(f"c{i}", 2, 2, 1), y))
    return net


class CountingGraph(Graph):
    """A graph that counts how many values and readers were looked at."""

    steps = 0

    def consumers(self, value):
        found = super().consumers(value)
        self.steps += 1 + len(found)
        return found

    def producer(self, value):
        self.steps += 1
        return super().producer(value)


@pytest.mark.parametrize("build", [_blocks, _norms, _norms_before, _tied, _tied_unfoldable, _fan_out])
def test_looking_for_folds_takes_a_linear_number_of_steps(build):
    steps = []
    for n in (250, 2000):
        net = build(n)
        # far too long for float32: only the graph and the statistics count here
        net.run = lambda net=net: setattr(net, "results", dict.fromkeys(range(len(net.calls)), net.input))
        plain = net.graph()
        graph = CountingGraph(plain.ops, plain.values, plain.inputs, plain.outputs)
        folds, refusals = find_folds(graph, net)
        steps.append(graph.steps)
        expected = {_tied_unfoldable: 0, _fan_out: n}.get(build, n)
        assert sum(len(fold.pairs) for fold in folds) == expected and len(refusals) in (0, n)
    assert steps[1] <= 8.5 * steps[0], steps


@pytest.mark.slow
def test_twenty_thousand_blocks():
    net = _blocks(20_000)
    report = fold_batch_norms(net)
    assert len(report) == 20_000 and not report.refused and net.graphs == 1


def test_folds_of_the_same_layers_are_equal_whatever_they_absorb():
    one, other = (Fold("backward", (("conv", ("bn",)),), np.full(2, v), np.full(2, v)) for v in (1.0, 2.0))
    assert one == other != Fold("forward", one.layers, one.scale, one.shift)


def test_only_a_first_axis_may_have_an_unknown_length():
    rows, *rest = filled((-1, 3, 0))
    assert rows > 0 and rest == [3, 0] and filled((5, 3)) == (5, 3)
    assert filled((-1, -1, 3)) is None and filled((4, -1)) is None and filled(()) is None
