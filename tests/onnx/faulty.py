"""ONNX models with one planted fault each, and some that only look as if they had one; see ``tests.support.faults``.

The planted operator is called ``culprit`` unless the case says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.onnx.nets import BOOL, FLOAT, INT64, Net, body, loop_step
from tests.support import faults
from tests.support.faults import Fault, LookAlike

Array = NDArray[Any]
HALF, DOUBLE = TensorProto.FLOAT16, TensorProto.DOUBLE

FAULTS: list[Fault] = []
LOOK_ALIKES: list[LookAlike] = []
fault, look_alike = partial(faults.fault, FAULTS), partial(faults.look_alike, LOOK_ALIKES)


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    """Standard normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# ================================================================================================== ONNX: faults
# A body of the usual kind stands around the fault: a product in front of it and one behind it.


def head(net: Net, rows: Any = "n", width: int = 4, dtype: int = FLOAT) -> str:
    """An input and a product, so that the fault is not the first node."""
    x = net.input("x", (rows, width), dtype)
    w = np.eye(width) + 0.1 * np.ones((width, width))
    kind = {FLOAT: np.float32, HALF: np.float16, DOUBLE: np.float64}[dtype]
    net.initializers.append(onnx.numpy_helper.from_array(w.astype(kind), "w_in"))
    return str(net("MatMul", x, "w_in", name="head"))


def tail(net: Net, h: str, width: int = 4, dtype: int = FLOAT, **more: Any) -> onnx.ModelProto:
    """A product behind the fault, and the model."""
    kind = {FLOAT: np.float32, HALF: np.float16, DOUBLE: np.float64}[dtype]
    net.initializers.append(onnx.numpy_helper.from_array(np.ones((width, 2), kind), "w_out"))
    net("MatMul", h, "w_out", name="tail", out="y")
    return net.model(("y", dtype, None), **more)


def two_batches(bad: Array, row: int = 2) -> list[Array]:
    """A harmless batch of ones, and one with ``bad`` in one of its rows."""
    calm = np.ones((4, 4), bad.dtype)
    other = calm.copy()
    other[row] = bad
    return [calm, other]


def after_head(rows: Array) -> Array:
    """What must be fed for ``head`` to put out ``rows``."""
    w = np.eye(4) + 0.1 * np.ones((4, 4))
    return np.linalg.solve(w.T, np.asarray(rows, np.float64).T).T.astype(np.float32)


SECOND = {"batch": 1, "sample": 2}


def unary(op: str, bad: Array, before: Callable[[Net, str], str] | None = None, **attrs: Any) -> Any:
    """``tail(op(before(head(x))))``, with one bad row in the second batch."""

    def build() -> tuple[onnx.ModelProto, list[Array]]:
        net = Net()
        h = head(net)
        h = before(net, h) if before else h
        return tail(net, net(op, h, name="culprit", **attrs)), two_batches(np.asarray(bad, np.float32))

    return build


MINUS = np.full(4, -1.0)
fault("sqrt of a negative number", "root of a negative number", **SECOND)(unary("Sqrt", MINUS))
fault("log of a negative number", "logarithm of a non-positive number", **SECOND)(unary("Log", MINUS))
fault("log of zero", "logarithm of a non-positive number", **SECOND)(
    unary("Log", MINUS, lambda net, h: net("Relu", h, name="relu"))
)
fault("reciprocal of zero", "division by zero", **SECOND)(
    unary("Reciprocal", MINUS, lambda net, h: net("Sqrt", net("Relu", h, name="relu"), name="root"))
)
fault("exp overflow", "exponential overflow", problem="reaches 140", **SECOND)(unary("Exp", np.full(4, 100.0)))
fault("acos outside its domain", "argument out of domain", batch=0)(unary("Acos", np.full(4, 2.0)))
fault("atanh of one", "argument out of domain", batch=1, sample=2)(
    unary("Atanh", np.full(4, 10.0), lambda net, h: net("Clip", net("Mul", h, net.const(0.1)), net.const(-1.0),
                                                       net.const(1.0)))
)  # fmt: skip


@fault("division by zero", "division by zero", problem="holds 4 zeros", **SECOND)
def _divide() -> Any:
    net = Net()
    h = head(net)
    divisor = net("Relu", h, name="relu")
    return tail(net, net("Div", h, divisor, name="culprit")), two_batches(np.float32(MINUS))


@fault("power of a negative number", "power out of domain", **SECOND)
def _power() -> Any:
    net = Net()
    return tail(net, net("Pow", head(net), net.const(0.5), name="culprit")), two_batches(np.float32(MINUS))


@fault("negative power of zero", "division by zero", **SECOND)
def _inverse_power() -> Any:
    net = Net()
    base = net("Relu", head(net), name="relu")
    return tail(net, net("Pow", base, net.const(-0.5), name="culprit")), two_batches(np.float32(MINUS))


@fault("softmax without its maximum taken off", "exponential overflow", **SECOND)
def _naive_softmax() -> Any:
    net = Net()
    e = net("Exp", head(net), name="culprit")
    total = net("ReduceSum", e, net.const(np.int64([-1])), name="total", keepdims=1)
    return tail(net, net("Div", e, total, name="share")), two_batches(np.float32([100, 0, 0, 0]))


@fault("a row that is masked throughout", "every element of a row is masked", **SECOND)
def _dead_row() -> Any:
    net = Net()
    h = head(net)
    mask = net.input("mask", ("n", 4))
    y = tail(net, net("Softmax", net("Add", h, mask, name="masked"), name="culprit", axis=-1))
    masks = [np.zeros((4, 4), np.float32) for _ in range(2)]
    masks[0][:, 3] = -np.inf
    masks[1][2] = -np.inf
    return y, [{"x": normal(4, 4, seed=i), "mask": m} for i, m in enumerate(masks)]


@fault("a mask made by multiplication with infinity", "zero times infinity", batch=0)
def _multiplied_mask() -> Any:
    net = Net()
    h = head(net)
    keep = net.input("keep", ("n", 4))
    hidden = net("Sub", net.const(1.0), keep, name="hidden")
    mask = net("Mul", hidden, net.const(np.float32(-np.inf)), name="culprit")
    y = tail(net, net("Softmax", net("Add", h, mask, name="masked"), name="softmax", axis=-1))
    return y, [{"x": normal(4, 4), "keep": np.float32([[1, 1, 1, 0]] * 4)}]


@fault("two infinite masks that meet", "infinity minus infinity", batch=0)
def _meeting_masks() -> Any:
    net = Net()
    h = net("Relu", head(net), name="before")  # behind a product it would be a bias
    one = net.const(np.float32([0, 0, 0, -np.inf]), "padding")
    masked = net("Add", h, one, name="masked")
    h = net("Sub", masked, net("ReduceMax", masked, name="peak", axes=[0], keepdims=1), name="culprit")
    return tail(net, h), [normal(4, 4)]


@fault("products that grow until they overflow", "overflow", op="grow2", **SECOND)
def _growth() -> Any:
    net = Net()
    h = head(net)
    for i in range(3):
        h = net("MatMul", h, net.const(np.eye(4, dtype=np.float32) * 1e10, f"big{i}"), name=f"grow{i}")
    return tail(net, net("Mul", h, net.const(1e-30))), two_batches(np.full(4, 1e9, np.float32))


@fault("convolution that overflows", "overflow", batch=1, sample=0)
def _conv() -> Any:
    net = Net()
    x = net.input("x", (1, 3, 8, 8))
    h = net("Relu", net.conv(x, name="first"), name="relu")
    net.const(np.full((2, 4, 3, 3), 1e20, np.float32), "huge")
    y = net("Conv", h, "huge", name="culprit")
    return net.model(net("GlobalAveragePool", y, name="pool", out="y")), [
        np.zeros((1, 3, 8, 8), np.float32),
        np.full((1, 3, 8, 8), 1e20, np.float32),
    ]


def norm(op: str, *, epsilon: float, variance: float | None = None) -> Any:
    def build() -> tuple[onnx.ModelProto, list[Array]]:
        net = Net()
        x = net.input("x", ("n", 3, 4, 4))
        ones = net.const(np.ones(3, np.float32), "scale")
        zeros = net.const(np.zeros(3, np.float32), "shift")
        more = []
        if op == "BatchNormalization":
            spread = np.ones(3, np.float32)
            spread[1] = variance
            more = [net.const(np.zeros(3, np.float32), "mean"), net.const(spread, "var")]
        y = net(op, x, ones, zeros, *more, name="culprit", epsilon=epsilon)
        batches = [normal(2, 3, 4, 4)]
        if op == "InstanceNormalization":
            batches.append(normal(2, 3, 4, 4))
            batches[1][1, 2] = 0.0
        return net.model(net("GlobalAveragePool", y, name="pool", out="y")), batches

    return build


fault("batch norm with zero variance", "zero variance", batch=0)(norm("BatchNormalization", epsilon=0.0, variance=0.0))
fault("batch norm with negative variance", "negative variance", batch=0, problem="-0.5")(
    norm("BatchNormalization", epsilon=1e-5, variance=-0.5)
)
fault("instance norm of a constant picture", "zero variance", batch=1, sample=1)(
    norm("InstanceNormalization", epsilon=0.0)
)


# -- data and parameters


@fault("NaN in one sample", "bad input data", op="x", batch=2, sample=3, problem="1 NaN")
def _nan_sample() -> Any:
    net = Net()
    y = tail(net, net("Relu", head(net), name="relu"))
    batches = [normal(4, 4, seed=i) for i in range(4)]
    batches[2][3, 1] = np.nan
    return y, batches


@fault("Inf in one sample", "bad input data", op="x", batch=1, sample=0, problem="1 Inf")
def _inf_sample() -> Any:
    net = Net()
    y = tail(net, net("Sigmoid", net("Neg", head(net), name="neg"), name="gate"))
    batches = [normal(4, 4, seed=i) for i in range(2)]
    batches[1][0, 0] = np.inf
    return y, batches


@fault("NaN in a sample, lost by the first operator", "bad input data", op="x", batch=1, sample=2)
def _lost_sample() -> Any:
    net = Net()
    y = net("Relu", net.input("x", ("n", 4)), name="relu", out="y")
    return net.model(y), two_batches(np.full(4, np.nan, np.float32))


@fault("-Inf in the pixels of one picture", "bad input data", op="x", batch=0, sample=1)
def _inf_pixel() -> Any:
    net = Net()
    x = net.input("x", ("n", 3, 8, 8))
    y = net("Relu", net.conv(x, name="first"), name="relu")
    picture = normal(2, 3, 8, 8)
    picture[1, 0, 4, 4] = -np.inf
    return net.model(net("GlobalMaxPool", y, name="pool", out="y")), [picture]


@fault("NaN in a convolution's weight", "bad parameter", op="first.weight", batch=None, problem="[3, 1, 0, 2]")
def _nan_weight() -> Any:
    net = Net()
    net.conv(net.input("x", (1, 3, 8, 8)), name="first", out="y")
    weight = onnx.numpy_helper.to_array(net.initializers[0]).copy()
    weight[3, 1, 0, 2] = np.nan
    net.initializers[0].CopyFrom(onnx.numpy_helper.from_array(weight, "first.weight"))
    return net.model("y"), [normal(1, 3, 8, 8)]


@fault("Inf in a recurrent weight", "bad parameter", op="R", batch=None, problem="[0, 5, 1]")
def _inf_recurrent() -> Any:
    return lstm(lambda r: r.__setitem__((0, 5, 1), np.inf)), [normal(5, 2, 3)]


def lstm(spoil: Callable[[Array], Any] = lambda r: None, hidden: int = 4) -> onnx.ModelProto:
    """An LSTM of five steps between nothing and a product."""
    net = Net()
    x = net.input("x", (5, 2, 3))
    w, r = normal(1, 4 * hidden, 3, seed=1), normal(1, 4 * hidden, hidden, seed=2)
    spoil(r)
    net.const(w, "W"), net.const(r, "R")
    y = net("LSTM", x, "W", "R", name="culprit", out=["h_all", "h_last"], hidden_size=hidden)[1]
    return net.model(net("MatMul", y, net.weights(hidden, 2, name="V"), name="last", out="y"))


@fault("NaN in a weight that reaches its product through a transpose", "bad parameter", op="tied", batch=None)
def _tied_weight() -> Any:
    net = Net()
    ids = net.input("ids", ("n", 3), INT64)
    table = normal(6, 4)
    table[5, 3] = np.nan
    net.const(table, "tied")
    h = net("Gather", "tied", ids, name="embed", axis=0)
    y = net("MatMul", h, net("Transpose", "tied", name="turn", perm=[1, 0]), name="logits", out="y")
    return net.model(y), [np.int64([[0, 1, 2]])]


# -- half precision


@fault("half-precision square", "half-precision overflow", problem="reaches 8.9", **SECOND)
def _half_square() -> Any:
    net = Net()
    h = head(net, dtype=HALF)
    square = net("Mul", h, h, name="culprit")
    root = net("Sqrt", square, name="root")  # finite in float32, as a CPU computes it
    bad = after_head(np.full((1, 4), 300.0))[0].astype(np.float16)
    return tail(net, root, dtype=HALF), two_batches(bad)


@fault("half-precision product", "half-precision overflow", **SECOND)
def _half_product() -> Any:
    net = Net()
    h = head(net, dtype=HALF)
    net.initializers.append(onnx.numpy_helper.from_array(np.full((4, 4), 100, np.float16), "hundred"))
    net.initializers.append(onnx.numpy_helper.from_array(np.float16(0.001), "thousandth"))
    y = net("Mul", net("MatMul", h, "hundred", name="culprit"), "thousandth", name="scaled")
    return tail(net, y, dtype=HALF), two_batches(np.full(4, 500, np.float16))


@fault("half-precision scores that overflow where a mask is added", "half-precision overflow",
       problem="reaches", **SECOND)  # fmt: skip
def _half_bias() -> Any:
    net = Net()
    h = head(net, dtype=HALF)
    net.initializers.append(onnx.numpy_helper.from_array(np.float16([4e4, 4e4, 4e4, -np.inf]), "bias"))
    masked = net("Add", net("Mul", h, h, name="scores"), "bias", name="culprit")
    bad = after_head(np.full((1, 4), 200.0))[0].astype(np.float16)
    return tail(net, net("Softmax", masked, name="softmax", axis=-1), dtype=HALF), two_batches(bad)


@fault("cast to half precision", "half-precision overflow", problem="1e+06", **SECOND)
def _half_cast() -> Any:
    net = Net()
    h = net("Cast", head(net), name="culprit", to=HALF)
    net.initializers.append(onnx.numpy_helper.from_array(np.float16(0.5), "half"))
    return tail(net, net("Cast", net("Mul", h, "half"), to=FLOAT)), two_batches(after_head(np.full((1, 4), 1e6))[0])


@fault("half-precision norm that becomes zero", "half-precision overflow", **SECOND)
def _half_norm() -> Any:
    net = Net()
    h = head(net, dtype=HALF)
    square = net("Mul", h, h, name="culprit")
    length = net("Sqrt", square, name="length")
    return tail(net, net("Div", h, length, name="unit"), dtype=HALF), two_batches(np.full(4, 300, np.float16))


# -- bodies


def loop_body(*, culprit: str = "culprit") -> onnx.GraphProto:
    """``v -> 1 / (v - 1)``-like step: the state counts down and is divided by."""
    inner = Net()
    less = inner("Sub", "v_in", inner.const(1.0, "one"), name="count", out="v_out")
    share = inner("Div", "h_in", less, name=culprit, out="h_out")
    return loop_step(less, share, net=inner, v_in=(4, 4), h_in=(4, 4))


@fault("division by zero in a loop", "division by zero", batch=1, sample=2,
       where="iteration 2 of counting (Loop)")  # fmt: skip
def _loop() -> Any:
    net = Net()
    h = head(net, rows=4)
    count, yes = net.const(np.int64(6), "times"), net.const(np.bool_(True), "yes")
    net("Loop", count, yes, h, net.weights(4, 4, name="start"), name="counting", out=["v", "shares"],
        body=loop_body())  # fmt: skip
    first = after_head(np.full((4, 4), 0.5))
    second = first.copy()
    second[2] = after_head(np.full((1, 4), 3.0))[0]
    return tail(net, "shares"), [first, second]


@fault("logarithm in a scan", "logarithm of a non-positive number", batch=0,
       where="iteration 3 of stepping (Scan)")  # fmt: skip
def _scan() -> Any:
    net = Net()
    x = net.input("x", (5, 1, 4))
    start = net.const(np.zeros((1, 4), np.float32), "start")
    inner = Net()
    h = inner("Add", inner("Log", "x_t", name="culprit"), "h_in", name="sum", out="h_out")
    step = body(h, inner("Identity", h, name="copy", out="h_each"), net=inner,
                inputs=[("h_in", FLOAT, (1, 4)), ("x_t", FLOAT, (1, 4))])  # fmt: skip
    net("Scan", start, x, name="stepping", out=["last", "each"], body=step, num_scan_inputs=1)
    data = np.abs(normal(5, 1, 4)) + 0.1
    data[3, 0, 1] = -1
    y = net("MatMul", "each", net.weights(4, 2, name="V"), name="tail", out="y")
    return net.model(y), [data.astype(np.float32)]


@fault("overflow of a state that a loop carries", "overflow", where="iteration 3 of growing (Loop)")
def _loop_state() -> Any:
    net = Net()
    h = head(net, rows=4)
    inner = Net()
    grown = inner("Mul", "v_in", inner.const(1e10, "big"), name="culprit", out="v_out")
    squeezed = inner("Tanh", grown, name="tanh", out="t_out")
    zero = inner("Sub", grown, grown, name="nothing", out="z_out")  # NaN as soon as the state is infinite
    step = loop_step(grown, squeezed, zero, net=inner, v_in=(4, 4))
    count, yes = net.const(np.int64(8), "times"), net.const(np.bool_(True), "yes")
    net("Loop", count, yes, h, name="growing", out=["v", "each", "zeros"], body=step)
    total = net("ReduceSum", "zeros", net.const(np.int64([0])), name="total", keepdims=0)
    return tail(net, total), [np.full((4, 4), 1e8, np.float32)]


@fault("square root in the branch of an If", "root of a negative number", batch=1, sample=2,
       where="else_branch of choice (If)")  # fmt: skip
def _branch() -> Any:
    net = Net()
    h = head(net)
    choose = net.input("choose", (), BOOL)
    then, other = Net(), Net()
    graphs = {
        "then_branch": body(then("Relu", h, name="relu", out="a"), net=then),
        "else_branch": body(other("Sqrt", h, name="culprit", out="b"), net=other),
    }
    chosen = net("If", choose, name="choice", **graphs)
    batches = two_batches(np.float32(MINUS))
    return tail(net, chosen), [{"x": x, "choose": np.array(i == 0)} for i, x in enumerate(batches)]


@fault("division in a loop within a branch", "division by zero", batch=0,
       where="iteration 1 of counting (Loop), in then_branch of choice (If)")  # fmt: skip
def _nested() -> Any:
    net = Net()
    h = head(net, rows=4)
    choose = net.input("choose", (), BOOL)
    start = net.weights(4, 4, name="start")
    then, other = Net(), Net()
    count, yes = then.const(np.int64(4), "times"), then.const(np.bool_(True), "yes")
    then("Loop", count, yes, h, start, name="counting", out=["v", "shares"], body=loop_body())
    graphs = {
        "then_branch": body("shares", net=then),
        "else_branch": body(other("Neg", h, name="minus", out="minus"), net=other),
    }
    chosen = net("If", choose, name="choice", **graphs)
    x = after_head(np.full((4, 4), 2.0))
    x = np.tile(x[:1], (4, 1))
    return tail(net, chosen), [{"x": x, "choose": np.array(True)}]


@fault("value of the main graph that spoils a loop", "logarithm of a non-positive number", batch=0)
def _captured() -> Any:
    net = Net()
    h = head(net, rows=4)
    spoilt = net("Log", h, name="culprit", out="spoilt")
    inner = Net()
    out = inner("Add", "v_in", spoilt, name="add", out="v_out")
    step = loop_step(out, net=inner, v_in=(4, 4))
    count, yes = net.const(np.int64(3), "times"), net.const(np.bool_(True), "yes")
    net("Loop", count, yes, net.weights(4, 4, name="start"), name="adding", out=["v"], body=step)
    return tail(net, "v"), [np.full((4, 4), -1, np.float32)]


@fault("NaN that an operator inside a loop turns into an index", "root of a negative number",
       where="iteration 1 of picking (Loop)")  # fmt: skip
def _index_in_loop() -> Any:
    net = Net()
    h = head(net, rows=4)
    inner = Net()
    shifted = inner("Sub", "v_in", inner.const(1.0, "one"), name="less", out="v_out")
    best = inner("ArgMax", inner("Sqrt", shifted, name="culprit"), name="best", axis=1, out="best_out")
    step = loop_step(shifted, (best, INT64, None), net=inner, v_in=(4, 4))
    count, yes = net.const(np.int64(2), "times"), net.const(np.bool_(True), "yes")
    net("Loop", count, yes, h, name="picking", out=["v", "which"], body=step)
    net("Identity", "which", name="last", out="y")
    return net.model(("y", INT64, None)), [np.tile(after_head(np.full((1, 4), 1.5)), (4, 1))]


# -- recurrent nodes, attention, functions, indices


@fault("RNN whose state grows without bound", "overflow", batch=0)
def _rnn() -> Any:
    net = Net()
    x = net.input("x", (8, 1, 2))
    net.const(np.ones((1, 2, 2), np.float32), "W"), net.const(np.full((1, 2, 2), 1e8, np.float32), "R")
    h = net("RNN", x, "W", "R", name="culprit", out=["each", "last"], hidden_size=2, activations=["Relu"])[1]
    y = net("MatMul", h, net.weights(2, 2, name="V"), name="tail", out="y")
    return net.model(y), [np.ones((8, 1, 2), np.float32)]


@fault("LSTM whose cell grows without bound", "overflow", batch=0, problem="candidate")
def _lstm_overflow() -> Any:
    net = Net()
    x = net.input("x", (8, 2, 3))
    net.const(np.ones((1, 8, 3), np.float32), "W")
    r = np.zeros((1, 8, 2), np.float32)
    r[0, 6:] = 1e8  # of the candidate
    net.const(r, "R")
    h = net("LSTM", x, "W", "R", name="culprit", out=["each", "last"], hidden_size=2,
            activations=["Sigmoid", "Relu", "Relu"])[1]  # fmt: skip
    y = net("MatMul", h, net.weights(2, 2, name="V"), name="tail", out="y")
    return net.model(y), [np.ones((8, 2, 3), np.float32)]


@fault("NaN in the data of a GRU", "bad input data", op="x", batch=1)
def _gru_data() -> Any:
    net = Net()
    x = net.input("x", (5, 2, 3))
    net.const(normal(1, 12, 3), "W"), net.const(normal(1, 12, 4), "R")
    h = net("GRU", x, "W", "R", name="gru", out=["each", "last"], hidden_size=4)[1]
    y = net("MatMul", h, net.weights(4, 2, name="V"), name="tail", out="y")
    batches = [normal(5, 2, 3, seed=i) for i in range(2)]
    batches[1][4, 1, 2] = np.nan
    return net.model(y), batches


def attention(net: Net, scores: Callable[[str], str]) -> onnx.ModelProto:
    """Self-attention over four tokens of width 4 with ``scores`` in its middle."""
    h = head(net, rows=4)
    q, k, v = (net("MatMul", h, net.weights(4, 4, name=f"w_{n}"), name=n) for n in "qkv")
    s = net("MatMul", q, net("Transpose", k, name="turn", perm=[1, 0]), name="scores")
    p = net("Softmax", scores(s), name="softmax", axis=-1)
    return tail(net, net("MatMul", p, v, name="mix"))


@fault("attention divided by a scale of zero", "division by zero", batch=0)
def _attention_scale() -> Any:
    net = Net()
    model = attention(net, lambda s: net("Div", s, net.const(0.0, "scale"), name="culprit"))
    return model, [normal(4, 4)]


@fault("attention in which a query may look at nothing", "every element of a row is masked",
       op="softmax", batch=0, sample=0)  # fmt: skip
def _attention_mask() -> Any:
    net = Net()
    causal = np.where(np.tri(4, k=-1) > 0, 0, -np.inf).astype(np.float32)  # off by one: the first row is empty
    return attention(net, lambda s: net("Add", s, net.const(causal, "causal"), name="masked")), [normal(4, 4)]


@fault("function of the model that divides by a sum", "division by zero", **SECOND)
def _function() -> Any:
    net = Net()
    h = net("Normalize", net("Relu", head(net), name="relu"), name="normalize", domain="own")
    model = tail(net, h, domains={"own": 1})
    nodes = [
        helper.make_node("Constant", [], ["axis"], value_ints=[1]),
        helper.make_node("ReduceSum", ["v"], ["total"], name="total", keepdims=1),
        helper.make_node("Div", ["v", "total"], ["share"], name="culprit"),
    ]
    nodes[1].input.append("axis")
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("own", "Normalize", ["v"], ["share"], nodes, imports))
    return model, two_batches(np.float32(MINUS))


@fault("NaN that an ArgMax hides", "logarithm of a non-positive number", batch=1)
def _argmax() -> Any:
    net = Net()
    logs = net("Log", head(net), name="culprit")
    net("ArgMax", logs, name="best", axis=1, out="y")
    return net.model(("y", INT64, None)), two_batches(np.float32([-1, 2, 2, 2]))


@fault("NaN that a cast to an index hides", "root of a negative number", batch=1)
def _cast() -> Any:
    net = Net()
    root = net("Sqrt", head(net), name="culprit")
    net("Cast", root, name="index", to=INT64, out="y")
    return net.model(("y", INT64, None)), two_batches(np.float32(MINUS))


@fault("NaN that a Relu hides", "logarithm of a non-positive number", **SECOND)
def _relu() -> Any:
    net = Net()
    return tail(net, net("Relu", net("Log", head(net), name="culprit"), name="relu")), two_batches(np.float32(MINUS))


@fault("Where that takes the wrong side", "logarithm of a non-positive number", **SECOND)
def _wrong_side() -> Any:
    net = Net()
    h = head(net)
    logs = net("Log", h, name="culprit")
    good = net("Greater", h, net.const(-5.0), name="check")
    return tail(net, net("Where", good, logs, net.const(0.0), name="where")), two_batches(np.float32(MINUS))


@fault("overflow in double precision", "overflow", **SECOND)
def _double() -> Any:
    net = Net()
    h = head(net, dtype=DOUBLE)
    return tail(net, net("Mul", h, h, name="culprit"), dtype=DOUBLE), two_batches(np.full(4, 1e200))


@fault("two faults, of which the first is to be named first", "logarithm of a non-positive number", **SECOND)
def _two() -> Any:
    net = Net()
    h = head(net)
    logs = net("Log", h, name="culprit")
    roots = net("Sqrt", h, name="second")
    return tail(net, net("Add", logs, roots, name="sum")), two_batches(np.float32(MINUS))


@fault("NaN that passes through a sequence", "logarithm of a non-positive number", **SECOND)
def _sequence() -> Any:
    net = Net()
    parts = net("SplitToSequence", net("Log", head(net), name="culprit"), name="parts", axis=0, keepdims=1)
    return tail(net, net("ConcatFromSequence", parts, name="joined", axis=0)), two_batches(np.float32(MINUS))


@fault("square root between operators that only ONNX Runtime has", "root of a negative number", **SECOND)
def _own_domain() -> Any:
    net = Net()
    h = net("QuickGelu", head(net), name="gelu", domain="com.microsoft", alpha=0.0)  # half of its input
    root = net("Sqrt", h, name="culprit")
    y = net("BiasGelu", root, net.const(np.ones(4, np.float32)), name="bias", domain="com.microsoft")
    return tail(net, y, domains={"com.microsoft": 1}), two_batches(np.float32(MINUS))


@fault("overflow in a loop that runs while a condition holds", "overflow", where="iteration 1 of growing (Loop)")
def _while() -> Any:
    net = Net()
    h = head(net, rows=4)
    inner = Net()
    grown = inner("Mul", "v_in", inner.const(1e20, "big"), name="culprit", out="v_out")
    going = inner("Less", "i", inner.const(np.int64(4), "four"), name="less", out="going_out")
    step = body((going, BOOL, ()), grown, net=inner,
                inputs=[("i", INT64, ()), ("going_in", BOOL, ()), ("v_in", FLOAT, (4, 4))])  # fmt: skip
    net("Loop", "", net.const(np.bool_(True), "yes"), h, name="growing", out=["v"], body=step)
    return tail(net, "v"), [np.ones((4, 4), np.float32)]


@fault("logarithm in a loop that fills a sequence", "logarithm of a non-positive number",
       where="iteration 0 of filling (Loop)")  # fmt: skip
def _sequence_loop() -> Any:
    net = Net()
    h = head(net)
    inner = Net()
    logs = inner("Log", h, name="culprit")
    inner("SequenceInsert", "s_in", logs, name="insert", out="s_out")
    inner("Identity", "going_in", out="going_out")
    step = helper.make_graph(
        inner.nodes,
        "body",
        [
            helper.make_tensor_value_info("i", INT64, ()),
            helper.make_tensor_value_info("going_in", BOOL, ()),
            helper.make_tensor_sequence_value_info("s_in", FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("going_out", BOOL, ()),
            helper.make_tensor_sequence_value_info("s_out", FLOAT, None),
        ],
    )
    count, yes = net.const(np.int64(3), "times"), net.const(np.bool_(True), "yes")
    net("Loop", count, yes, net("SequenceEmpty", name="empty"), name="filling", out=["parts"], body=step)
    return tail(net, net("ConcatFromSequence", "parts", name="joined", axis=0)), [np.full((4, 4), -1, np.float32)]


@fault("cast to eight bits that does not saturate", "overflow", **SECOND)
def _eight_bits() -> Any:
    net = Net()
    small = net("Cast", head(net), name="culprit", to=TensorProto.FLOAT8E5M2, saturate=0)
    return tail(net, net("Cast", small, name="back", to=FLOAT), opset=19), two_batches(np.full(4, 1e6, np.float32))


# ================================================================================================== ONNX: look-alikes


@look_alike("-inf mask before a softmax")
def _mask() -> Any:
    net = Net()
    causal = np.where(np.tri(4) > 0, 0, -np.inf).astype(np.float32)
    return attention(net, lambda s: net("Add", s, net.const(causal, "causal"), name="masked")), [normal(4, 4)]


@look_alike("-inf chosen by Where before a softmax")
def _where_mask() -> Any:
    net = Net()
    low, bare = net.const(np.float32(-np.inf), "low"), net.const(np.tri(4) > 0, "keep")
    return attention(net, lambda s: net("Where", bare, s, low, name="masked")), [normal(4, 4)]


@look_alike("-inf mask among the inputs")
def _mask_input() -> Any:
    net = Net()
    h = head(net)
    mask = net.input("mask", ("n", 4))
    y = tail(net, net("Softmax", net("Add", h, mask, name="masked"), name="softmax", axis=-1))
    return y, [{"x": normal(4, 4), "mask": np.float32([[0, 0, -np.inf, -np.inf]] * 4)}]


@look_alike("half-precision mask that overflows to -inf")
def _half_mask() -> Any:
    net = Net()
    h = head(net, dtype=HALF)
    net.initializers.append(onnx.numpy_helper.from_array(np.float16([0, 0, -65504, -65504]), "mask"))
    masked = net("Add", net("Mul", h, h, name="square"), "mask", name="masked")
    lower = net("Add", masked, "mask", name="masked_again")
    return tail(net, net("Softmax", lower, name="softmax", axis=-1), dtype=HALF), [normal(4, 4).astype(np.float16)]


@look_alike("float32 mask cast to half precision")
def _cast_mask() -> Any:
    net = Net()
    h = head(net, dtype=HALF)
    lowest = net.const(np.float32([0, 0, 0, np.finfo(np.float32).min]), "mask")
    masked = net("Add", h, net("Cast", lowest, name="to_half", to=HALF), name="masked")
    return tail(net, net("Softmax", masked, name="softmax", axis=-1), dtype=HALF), [normal(4, 4).astype(np.float16)]


@look_alike("logarithm kept where it is defined")
def _where_log() -> Any:
    net = Net()
    h = head(net)
    good = net("Greater", h, net.const(0.0), name="check")
    safe = net("Where", good, net("Log", h, name="log"), net.const(0.0), name="where")
    return tail(net, safe), two_batches(np.float32(MINUS))


@look_alike("NaN replaced by zero")
def _nan_to_num() -> Any:
    net = Net()
    root = net("Sqrt", head(net), name="root")
    safe = net("Where", net("IsNaN", root, name="check"), net.const(0.0), root, name="where")
    return tail(net, safe), two_batches(np.float32(MINUS))


@look_alike("missing values in the data, filled in by the model")
def _missing() -> Any:
    net = Net()
    x = net.input("x", ("n", 4))
    filled = net("Where", net("IsNaN", x, name="missing"), net.const(0.0), x, name="fill")
    return tail(net, net("Relu", filled, name="relu")), [np.float32([[1, np.nan, 2, 3]] * 4)]


@look_alike("sigmoid from an exponential that overflows")
def _sigmoid() -> Any:
    net = Net()
    e = net("Exp", net("Neg", head(net), name="neg"), name="exp")
    y = net("Div", net.const(1.0), net("Add", e, net.const(1.0, "one"), name="plus"), name="gate")
    return tail(net, y), two_batches(np.full(4, -200, np.float32))


@look_alike("running maximum that starts at -inf in a loop")
def _running_max() -> Any:
    net = Net()
    h = head(net, rows=4)
    inner = Net()
    peak = inner("Max", "m_in", inner("Add", h, inner("Cast", "i", to=FLOAT), name="shift"), name="max", out="m_out")
    scaled = inner("Exp", inner("Sub", "m_in", peak, name="less"), name="exp", out="s_out")
    step = loop_step(peak, scaled, net=inner, m_in=(4, 4))
    count, yes = net.const(np.int64(3), "times"), net.const(np.bool_(True), "yes")
    start = net.const(np.full((4, 4), -np.inf, np.float32), "start")
    net("Loop", count, yes, start, name="running", out=["m", "scales"], body=step)
    return tail(net, net("Add", "m", net("ReduceSum", "scales", net.const(np.int64([0])), keepdims=0))), [normal(4, 4)]


@look_alike("rows of padding that are cut off")
def _padding() -> Any:
    net = Net()
    logs = net("Log", head(net), name="log")
    kept = net("Slice", logs, net.const(np.int64([0])), net.const(np.int64([2])), name="cut")
    return tail(net, kept), two_batches(np.float32(MINUS), row=3)


@look_alike("words that a model must not say")
def _suppressed() -> Any:
    net = Net()
    h = head(net)
    y = net("Where", net.const(np.bool_([1, 1, 0, 1]), "allowed"), h, net.const(np.float32(-np.inf), "never"),
            name="suppress", out="y")  # fmt: skip
    best = net("ArgMax", y, name="best", axis=1, out="word")
    return net.model(y, (best, INT64, None)), [normal(4, 4)]


@look_alike("bounds that are infinite")
def _bounds() -> Any:
    net = Net()
    clipped = net("Clip", head(net), net.const(np.float32(0)), net.const(np.float32(np.inf)), name="clip")
    return tail(net, clipped), [normal(4, 4)]


@look_alike("a branch that divides by zero and is not taken")
def _other_branch() -> Any:
    net = Net()
    h = head(net)
    choose = net.input("choose", (), BOOL)
    then, other = Net(), Net()
    graphs = {
        "then_branch": body(then("Relu", h, name="relu", out="a"), net=then),
        "else_branch": body(other("Div", h, other.const(0.0, "zero"), name="divide", out="b"), net=other),
    }
    chosen = net("If", choose, name="choice", **graphs)
    return tail(net, chosen), [{"x": normal(4, 4), "choose": np.array(True)}]


@look_alike("numbers whose sum overflows")
def _large() -> Any:
    net = Net()
    big = net("Mul", net("Sigmoid", head(net), name="gate"), net.const(3e38), name="big")
    return tail(net, net("Div", big, net.const(3e38), name="small")), [normal(4, 4)]


@look_alike("distances that are infinite where there is nobody")
def _nobody() -> Any:
    net = Net()
    h = net("Abs", head(net), name="distance")
    there = net.const(np.bool_([1, 1, 0, 1]), "there")
    apart = net("Where", there, h, net.const(np.float32(np.inf), "nobody"), name="where")
    return tail(net, net("Reciprocal", net("Add", apart, net.const(1.0), name="plus"), name="weight")), [normal(4, 4)]
