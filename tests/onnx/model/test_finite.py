"""Proofs that a tensor is finite: the bounds hold, and there are none where they need not."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bitwright.onnx.model.finite import finite_proofs
from tests.onnx.nets import Net, run
from tests.support.cost import steps

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
