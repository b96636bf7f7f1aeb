"""Models with bodies: If, Loop, Scan, nested."""

from __future__ import annotations

import numpy as np
import onnx

from tests.onnx.nets import BOOL, FLOAT, INT64, Net, body, loop_step


def branches() -> onnx.ModelProto:
    """Two products, one of which is taken; names in the two branches are the same."""
    net = Net(seed=7)
    x, choose = net.input("x", (2, 4)), net.input("choose", (), BOOL)
    h = net("Relu", net("MatMul", x, net.weights(4, 4, name="w0"), name="first"), name="act", out="h")
    graphs = {}
    for branch in ("then_branch", "else_branch"):
        inner = Net(seed=len(branch))
        y = inner("MatMul", h, inner.weights(4, 4, name="w"), name="product", out="y")
        graphs[branch] = body(y, net=inner)
    out = net("If", choose, name="choice", out="chosen", **graphs)
    return net.model(net("MatMul", out, net.weights(4, 2, name="w1"), name="last", out="z"))


def scan() -> onnx.ModelProto:
    """``h = tanh(x_t W + h R)``, the states and the last one returned."""
    net = Net(seed=7)
    x = net.input("x", (5, 1, 3))
    start = net.const(np.zeros((1, 4)), "start")
    w, r = net.weights(3, 4, name="W"), net.weights(4, 4, name="R")
    inner = Net(seed=8)
    summed = inner("Add", inner("MatMul", "x_t", w, name="ih"), inner("MatMul", "h_in", r, name="hh"), name="sum")
    h = inner("Tanh", summed, name="tanh", out="h_out")
    step = body(h, inner("Identity", h, name="copy", out="h_each"), net=inner,
                inputs=[("h_in", FLOAT, (1, 4)), ("x_t", FLOAT, (1, 3))])  # fmt: skip
    last, each = net("Scan", start, x, name="rnn", out=["last", "each"], body=step, num_scan_inputs=1)
    y = net("MatMul", each, net.weights(4, 2, name="V"), name="head", out="y")
    return net.model(y, last)


def loop() -> onnx.ModelProto:
    """Three times ``v = relu(v W)``, in a Loop inside the branch of an If."""
    net = Net(seed=7)
    x, choose = net.input("x", (2, 4)), net.input("choose", (), BOOL)
    w = net.weights(4, 4, name="W")
    inner = Net(seed=8)
    v = inner("Relu", inner("MatMul", "v_in", w, name="product"), name="act", out="v_out")
    step = loop_step(v, net=inner, v_in=(2, 4))
    then, other = Net(), Net()
    count, yes = then.const(np.int64(3), "count"), then.const(np.bool_(True), "yes")
    graphs = {
        "then_branch": body(then("Loop", count, yes, x, name="loop", out="looped", body=step), net=then),
        "else_branch": body(other("Neg", x, name="minus", out="minus"), net=other),
    }
    return net.model(net("If", choose, name="choice", out="y", **graphs))


def two_results() -> onnx.ModelProto:
    """An If with two outputs, whose branches compute on grids of their own."""
    net = Net(seed=7)
    x, choose = net.input("x", (2, 4)), net.input("choose", (), BOOL)
    graphs = {}
    for i, branch in enumerate(("then_branch", "else_branch")):
        inner = Net(seed=20 + i)
        a = inner("MatMul", x, inner.weights(4, 4, name=f"w{i}"), name=f"product{i}", out=f"a{i}")
        graphs[branch] = body(a, inner("Tanh", a, name=f"tanh{i}", out=f"b{i}"), net=inner)
    one, two = net("If", choose, name="choice", out=["one", "two"], **graphs)
    return net.model(net("MatMul", two, net.weights(4, 2, name="v"), name="last", out="y"), one)


def handed_on() -> onnx.ModelProto:
    """``h = tanh(x_t W + b + h R)``, twice at every step, as TensorFlow's exporter writes it: the weights are states of the
    Loops, which return them as they are, one of them through a copy.
    """
    net = Net(seed=7)
    x = net.input("x", (5, 1, 8))
    names = [net.weights(8, 12, name="W"), net.weights(12, 12, name="R"), net.weights(12, name="b")]
    start, yes = net.const(np.zeros((1, 12)), "start"), net.const(np.bool_(True), "yes")
    shapes = [(8, 12), (12, 12), (12,), (1, 8), (1, 12)]
    inner = Net(seed=8)
    summed = inner("Gemm", "x_t2", "W_in2", "b_in2", name="ih")
    h = inner("Tanh", inner("Add", summed, inner("MatMul", "h_in2", "R_in2", name="hh"), name="sum"), name="tanh")
    again = inner("Identity", "going2", out="going_out2")
    kept = [inner("Identity", "W_in2", out="W_kept"), "R_in2", "b_in2", "x_t2"]
    inputs = [(f"{name}_in2" if name != "x_t" else "x_t2", FLOAT, shape)
              for name, shape in zip(("W", "R", "b", "x_t", "h"), shapes, strict=True)]  # fmt: skip
    step = body((again, BOOL, ()), *kept, (h, FLOAT, (1, 12)), net=inner,
                inputs=[("i2", INT64, ()), ("going2", BOOL, ()), *inputs])  # fmt: skip
    outer = Net(seed=9)
    taken = outer("Gather", x, "i", name="take", out="taken", axis=0)
    count, same = outer.const(np.int64(2), "count"), outer("Identity", "going", out="going_out")
    passed = outer("Loop", count, "going", "W_in", "R_in", "b_in", taken, "h_in", name="twice", body=step,
                   out=["W_out", "R_out", "b_out", "x_out", "h_out"])  # fmt: skip
    each = outer("Identity", passed[4], out="h_each")
    turn = body((same, BOOL, ()), *passed[:3], (passed[4], FLOAT, (1, 12)), (each, FLOAT, (1, 12)), net=outer,
                inputs=[("i", INT64, ()), ("going", BOOL, ()), ("W_in", FLOAT, shapes[0]), ("R_in", FLOAT, shapes[1]),
                        ("b_in", FLOAT, shapes[2]), ("h_in", FLOAT, shapes[4])])  # fmt: skip
    made = net("Loop", net.const(np.int64(5), "steps"), yes, *names, start, name="rnn", body=turn,
               out=["W_last", "R_last", "b_last", "last", "each"])  # fmt: skip
    y = net("MatMul", made[4], net.weights(12, 3, name="V"), name="head", out="y")
    return net.model(y, "last")


def masked(batch: int = 4, steps: int = 6, inputs: int = 8, width: int = 16) -> onnx.ModelProto:
    """An LSTM both ways over sequences with padding, and a layer on what it returns, as TensorFlow's exporter writes them.

    A step is taken where the input is not zero; else the states stay, by sums of products with the mask and its opposite. The
    weights are states of the Loops. The second direction reads and returns the sequence reversed.
    """
    net = Net(seed=11)
    x, zero = net.input("x", (batch, steps, inputs)), net.const(np.float32(0), "zero")
    seen = net("Cast", net("Not", net("Equal", x, zero)), to=FLOAT)
    seen = net("Greater", net("ReduceSum", seen, net.const(np.array([-1])), keepdims=1), zero)  # [batch, steps, 1]
    turned = [net("Transpose", x, perm=[1, 0, 2]), net("Transpose", seen, perm=[1, 0, 2])]
    lengths = net.const(np.full(batch, steps, np.int64), "lengths")
    made = []
    for way in ("forward", "backward"):
        sequence, mask = turned
        if way == "backward":
            back = {"time_axis": 0, "batch_axis": 1}
            sequence, mask = (
                net("ReverseSequence", v, lengths, **back) for v in (sequence, net("Cast", mask, to=FLOAT))
            )
            mask = net("Cast", mask, to=BOOL)
        names = [net.weights(*shape, name=f"{way}.{name}") for name, shape in
                 {"W": (inputs, 4 * width), "R": (width, 4 * width), "b": (4 * width,)}.items()]  # fmt: skip
        inner = Net(seed=12)
        x_t, m_t = inner("Gather", sequence, "i", axis=0), inner("Gather", mask, "i", axis=0)
        product = inner("MatMul", x_t, "W", name="ih")
        gates = inner("Add", inner("Add", product, inner("MatMul", "h", "R", name="hh")), "b", name="gates")
        i, f, g, o = inner(
            "Split", gates, inner.const(np.full(4, width), "sizes"), out=[f"gate{n}" for n in range(4)], axis=-1
        )
        i, f, o = (inner("Sigmoid", gate) for gate in (i, f, o))
        c = inner("Add", inner("Mul", f, "c"), inner("Mul", i, inner("Tanh", g)))
        h = inner("Mul", o, inner("Tanh", c))
        yes, no = inner("Cast", m_t, to=FLOAT), inner("Cast", inner("Not", m_t), to=FLOAT)
        kept = [inner("Add", inner("Mul", yes, new), inner("Mul", no, old)) for new, old in ((h, "h"), (c, "c"))]
        going = inner("Identity", "going", out="going_out")
        state = (FLOAT, (batch, width))
        shapes = [("W", FLOAT, (inputs, 4 * width)), ("R", FLOAT, (width, 4 * width)), ("b", FLOAT, (4 * width,))]
        step = body((going, BOOL, ()), *((inner("Identity", n, out=f"{n}_out"), t, s) for n, t, s in shapes),
                    *((k, *state) for k in kept), (inner("Identity", kept[0]), *state), net=inner,
                    inputs=[("i", INT64, ()), ("going", BOOL, ()), *shapes, ("h", *state), ("c", *state)])  # fmt: skip
        begin = net.const(np.zeros((batch, width)), f"{way}.begin")
        outs = [f"{way}.{name}" for name in ("W_last", "R_last", "b_last", "h_last", "c_last", "each")]
        each = net(
            "Loop", net.const(np.int64(steps)), net.const(np.bool_(True)), *names, begin, begin, out=outs, body=step
        )[-1]
        made.append(each if way == "forward" else net("ReverseSequence", each, lengths, time_axis=0, batch_axis=1))
    joined = net("Transpose", net("Concat", *made, axis=2), perm=[1, 0, 2])
    product = net("MatMul", joined, net.weights(2 * width, 3, name="V"), name="head")
    return net.model(net("Add", product, net.weights(3, name="v"), out="y"))


def gated(batch: int = 4, steps: int = 6, inputs: int = 8, width: int = 16) -> onnx.ModelProto:
    """A GRU both ways whose states are gated after the product, as TensorFlow's exporter writes Keras's.

    The weights are states of the Loops, and the products in their bodies are Gemm.
    """
    net = Net(seed=11)
    x, lengths = net.input("x", (batch, steps, inputs)), net.const(np.full(batch, steps, np.int64), "lengths")
    turned, back = net("Transpose", x, perm=[1, 0, 2]), {"time_axis": 0, "batch_axis": 1}
    parts = {"W": (inputs, 3 * width), "R": (width, 3 * width), "b": (3 * width,), "c": (3 * width,)}
    state = (FLOAT, (batch, width))
    made = []
    for way in ("forward", "backward"):
        sequence = turned if way == "forward" else net("ReverseSequence", turned, lengths, **back)
        names = [net.weights(*shape, name=f"{way}.{name}") for name, shape in parts.items()]
        inner = Net(seed=12)
        products = {
            "i": inner("Gemm", inner("Gather", sequence, "i", axis=0), "W", "b", name="ih"),
            "h": inner("Gemm", "h", "R", "c", name="hh"),
        }
        sizes = inner.const(np.full(3, width), "sizes")
        (iz, ir, ig), (hz, hr, hg) = (
            inner("Split", product, sizes, out=[f"{of}{gate}" for gate in "zrg"], axis=-1)
            for of, product in products.items()
        )
        z, r = (inner("Sigmoid", inner("Add", one, other)) for one, other in ((iz, hz), (ir, hr)))
        candidate = inner("Tanh", inner("Add", ig, inner("Mul", r, hg)))
        rest = inner("Sub", inner.const(np.float32(1), "one"), z)
        h = inner("Add", inner("Mul", z, "h"), inner("Mul", rest, candidate))
        going = inner("Identity", "going", out="going_out")
        shapes = [(name, FLOAT, shape) for name, shape in parts.items()]
        kept = ((inner("Identity", name, out=f"{name}_out"), kind, shape) for name, kind, shape in shapes)
        step = body((going, BOOL, ()), *kept, (h, *state), (inner("Identity", h), *state), net=inner,
                    inputs=[("i", INT64, ()), ("going", BOOL, ()), *shapes, ("h", *state)])  # fmt: skip
        begin = net.const(np.zeros((batch, width)), f"{way}.begin")
        outs = [f"{way}.{name}" for name in (*(f"{name}_last" for name in parts), "h_last", "each")]
        count, yes = net.const(np.int64(steps)), net.const(np.bool_(True))
        each = net("Loop", count, yes, *names, begin, out=outs, body=step)[-1]
        made.append(each if way == "forward" else net("ReverseSequence", each, lengths, **back))
    joined = net("Transpose", net("Concat", *made, axis=2), perm=[1, 0, 2])
    product = net("MatMul", joined, net.weights(2 * width, 3, name="V"), name="head")
    return net.model(net("Add", product, net.weights(3, name="v"), out="y"))
