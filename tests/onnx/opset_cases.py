"""One small model per operator whose definition changed between opsets 7 and 25, as each opset writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from tests.onnx.nets import BOOL, FLOAT, INT64, Net, body

Build = Callable[[Net, str, int], Any]
#: name -> (first opset, shape of the input, what is done to it)
CASES: dict[str, tuple[int, tuple[int, ...], Build]] = {}


def case(shape: tuple[int, ...] = (1, 4, 6, 6), since: int = 7, name: str = "") -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        CASES[name or build.__name__] = (since, shape, build)
        return build

    return add


#: the runtime has no kernel from these opsets on
UNTIL = {"roi_align": 21}


def opsets_of(name: str) -> range:
    """The opsets that ONNX Runtime runs the case ``name`` of."""
    return range(CASES[name][0], UNTIL.get(name, 25) + 1)


def turning_points(name: str) -> list[int]:
    """The opsets in front of each change of one of its operators, and the first and the last one."""
    opsets = opsets_of(name)
    kinds = {node.op_type for opset in (opsets[0], opsets[-1]) for node in model_of(name, opset).graph.node}
    schemas = onnx.defs.get_all_schemas_with_history()
    changes = {s.since_version - 1 for s in schemas if s.name in kinds and not s.domain}
    return [opset for opset in opsets if opset in changes | {opsets[0], opsets[-1]}]


def model_of(name: str, opset: int) -> onnx.ModelProto:
    """The case ``name`` behind a convolution or product, so that there is something to quantize."""
    _, shape, build = CASES[name]
    n = Net(3)
    x = n.input("x", shape)
    h = (
        n.conv(x, shape[1], shape[1], k=1, name="c")
        if len(shape) == 4
        else n("MatMul", x, n.weights(shape[-1], shape[-1]), name="m")
    )
    outputs = build(n, h, opset)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    return n.model(*outputs, opset=opset)


def ints(n: Net, *numbers: int) -> str:
    return n.const(np.int64(numbers))


@case()
def clip(n: Net, x: str, opset: int) -> Any:
    if opset < 11:
        return n("Clip", x, min=-0.5, max=0.75, name="clip")
    return n("Clip", x, n.const(np.float32(-0.5)), n.const(np.float32(0.75)), name="clip")


@case()
def pad(n: Net, x: str, opset: int) -> Any:
    pads = [0, 0, 1, 2, 0, 0, 2, 1]
    if opset < 11:
        return n("Pad", x, pads=pads, mode="constant", value=0.5, name="pad")
    return n("Pad", x, ints(n, *pads), n.const(np.float32(0.5)), mode="constant", name="pad")


@case()
def pad_reflect(n: Net, x: str, opset: int) -> Any:
    pads = [0, 0, 1, 2, 0, 0, 2, 1]
    more = {"pads": pads} if opset < 11 else {}
    return n("Pad", x, *([] if more else [ints(n, *pads)]), mode="reflect", name="pad", **more)


@case()
def upsample_nearest(n: Net, x: str, opset: int) -> Any:
    return _upsample(n, x, opset, "nearest")


@case()
def upsample_linear(n: Net, x: str, opset: int) -> Any:
    return _upsample(n, x, opset, "linear")


def _upsample(n: Net, x: str, opset: int, mode: str) -> Any:
    scales = [1.0, 1.0, 2.0, 1.5]
    if opset < 9:
        return n("Upsample", x, scales=scales, mode=mode, name="up")
    if opset < 11:
        return n("Upsample" if opset == 9 else "Resize", x, n.const(np.float32(scales)), mode=mode, name="up")
    region = n.const(np.zeros(0, np.float32)) if opset < 13 else ""
    return n("Resize", x, region, n.const(np.float32(scales)), mode=mode, name="up")


@case(since=11)
def resize_align_corners(n: Net, x: str, opset: int) -> Any:
    sizes = ints(n, 1, 4, 9, 8)
    empty = [n.const(np.zeros(0, np.float32)), n.const(np.zeros(0, np.float32))] if opset < 13 else ["", ""]
    return n("Resize", x, *empty, sizes, mode="linear", coordinate_transformation_mode="align_corners", name="up")


@case()
def batch_norm(n: Net, x: str, opset: int) -> Any:
    return n.bn(x, 4, **({"spatial": 1} if opset < 9 else {}))


@case()
def dropout(n: Net, x: str, opset: int) -> Any:
    if opset < 12:
        return n("Dropout", x, ratio=0.3, name="drop")
    return n("Dropout", x, n.const(np.float32(0.3)), name="drop")


@case((1, 4, 1, 6))
def squeeze_unsqueeze(n: Net, x: str, opset: int) -> Any:
    if opset < 13:
        return n("Unsqueeze", n("Squeeze", x, axes=[2], name="s"), axes=[0, 3], name="u")
    return n("Unsqueeze", n("Squeeze", x, ints(n, 2), name="s"), ints(n, 0, 3), name="u")


def _reduction(op: str, changed: int) -> Build:
    def build(n: Net, x: str, opset: int) -> Any:
        x = n("Abs", x, name="abs")
        if opset < changed:
            return n(op, x, axes=[1, 3], keepdims=0, name="reduce")
        return n(op, x, ints(n, 1, 3), keepdims=0, name="reduce")

    return build


for _op, _changed in (("ReduceSum", 13), ("ReduceMean", 18), ("ReduceMax", 18), ("ReduceMin", 18), ("ReduceProd", 18),
                      ("ReduceL1", 18), ("ReduceL2", 18), ("ReduceLogSum", 18), ("ReduceLogSumExp", 18),
                      ("ReduceSumSquare", 18)):  # fmt: skip
    CASES[_op] = (7, (1, 4, 6, 6), _reduction(_op, _changed))


@case()
def slice_(n: Net, x: str, opset: int) -> Any:
    if opset < 10:
        return n("Slice", x, starts=[1, 0], ends=[3, -1], axes=[1, 3], name="slice")
    return n("Slice", x, ints(n, 1, 0), ints(n, 3, -1), ints(n, 1, 3), name="slice")


@case()
def top_k(n: Net, x: str, opset: int) -> Any:
    if opset < 10:
        values, indices = n("TopK", x, k=3, axis=-1 if opset > 10 else 3, name="top", out=["values", "indices"])
    else:
        values, indices = n("TopK", x, ints(n, 3), axis=3, name="top", out=["values", "indices"])
    return [values, (indices, INT64, None)]


@case((2, 3, 4))
def softmax_of_the_last_axis(n: Net, x: str, opset: int) -> Any:
    return n("Softmax", x, axis=2, name="softmax")


@case((2, 3, 4))
def softmax_of_the_default_axis(n: Net, x: str, opset: int) -> Any:
    return [n("Softmax", x, name="softmax"), n("LogSoftmax", x, name="log")]


@case((2, 3, 4))
def hardmax(n: Net, x: str, opset: int) -> Any:
    return n("Hardmax", x, axis=2, name="hardmax")


@case()
def split(n: Net, x: str, opset: int) -> Any:
    parts = {"split": [1, 3]} if opset < 13 else {}
    return list(n("Split", x, *([] if parts else [ints(n, 1, 3)]), axis=1, name="split", out=["a", "b"], **parts))


@case()
def split_evenly(n: Net, x: str, opset: int) -> Any:
    more = {"num_outputs": 2} if opset >= 18 else {}
    return list(n("Split", x, axis=1, name="split", out=["a", "b"], **more))


@case()
def pools(n: Net, x: str, opset: int) -> Any:
    more = {"ceil_mode": 1} if opset >= 10 else {}
    kernel = {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 0]}
    return [n("MaxPool", x, name="max", **kernel, **more), n("AveragePool", x, name="mean", **kernel, **more)]


@case((3, 8))
def gemm(n: Net, x: str, opset: int) -> Any:
    return n("Gemm", x, n.weights(5, 8, name="w"), n.weights(5, name="b"), transB=1, name="gemm")


@case()
def cast_and_compare(n: Net, x: str, opset: int) -> Any:
    greater = n("Greater", x, n.const(np.float32(0)), name="greater")
    return n("Mul", x, n("Cast", greater, to=FLOAT, name="cast"), name="mul")


@case()
def activations(n: Net, x: str, opset: int) -> Any:
    y = n("PRelu", n("LeakyRelu", x, alpha=0.1, name="leaky"), n.weights(4, 1, 1, name="slope"), name="prelu")
    return [
        n("Elu", y, name="elu"),
        n("Selu", y, name="selu"),
        n("HardSigmoid", y, name="hard"),
        n("Softplus", y, name="soft"),
    ]


@case()
def pow_and_mod(n: Net, x: str, opset: int) -> Any:
    return n("Pow", n("Abs", x, name="abs"), n.const(np.float32(1.5)), name="pow")


@case()
def arg_max(n: Net, x: str, opset: int) -> Any:
    return [(n("ArgMax", x, axis=1, name="arg"), INT64, None), n("Relu", x, name="relu")]


@case()
def depth_to_space(n: Net, x: str, opset: int) -> Any:
    return n("DepthToSpace", x, blocksize=2, name="shuffle")


@case()
def shapes(n: Net, x: str, opset: int) -> Any:
    y = n("Reshape", x, ints(n, 0, -1, 12), name="reshape")
    y = n("Tile", n("Flatten", y, axis=2, name="flat"), ints(n, 1, 2), name="tile")
    return n("Transpose", y, perm=[1, 0], name="transpose")


@case(since=8)
def expand(n: Net, x: str, opset: int) -> Any:
    return n("Expand", n("Concat", x, x, axis=1, name="cat"), ints(n, 2, 8, 6, 6), name="expand")


@case(since=9)
def where(n: Net, x: str, opset: int) -> Any:
    filled = n("ConstantOfShape", n("Shape", x, name="shape"), name="zeros")
    return n("Where", n("Less", x, filled, name="less"), filled, x, name="where")


@case(since=11)
def gather_and_scatter(n: Net, x: str, opset: int) -> Any:
    index = n.const(np.zeros((1, 4, 2, 6), np.int64))
    picked = n("GatherElements", x, index, axis=2, name="pick")
    updates = n("Slice", picked, ints(n, 0), ints(n, 1), ints(n, 2))
    return n("ScatterElements", x, n.const(np.ones((1, 4, 1, 6), np.int64)), updates, axis=2, name="put")


@case((4, 2, 3))
def lstm(n: Net, x: str, opset: int) -> Any:
    parts = [n.weights(1, 20, 3, name="W"), n.weights(1, 20, 5, name="R"), n.weights(1, 40, name="B")]
    return n("LSTM", x, *parts, hidden_size=5, name="lstm", out=["y", "", ""])[0]


@case((4, 2, 3))
def gru(n: Net, x: str, opset: int) -> Any:
    parts = [n.weights(1, 15, 3, name="W"), n.weights(1, 15, 5, name="R"), n.weights(1, 30, name="B")]
    return n("GRU", x, *parts, hidden_size=5, linear_before_reset=1, name="gru", out=["y", ""])[0]


@case((2, 3))
def if_(n: Net, x: str, opset: int) -> Any:
    inner, other = Net(1), Net(2)
    inner._count, other._count = 100, 200
    graphs = {
        "then_branch": body(inner("MatMul", x, inner.weights(3, 3), name="then", out="p"), net=inner),
        "else_branch": body(other("Neg", x, name="else", out="q"), net=other),
    }
    n.inputs.append(onnx.helper.make_tensor_value_info("choose", BOOL, []))
    return n("If", "choose", name="if", **graphs)


@case((5, 2, 3), since=9)
def scan(n: Net, x: str, opset: int) -> Any:
    inner = Net(1)
    inner._count = 100
    step = body(inner("Add", "state", "item", name="add", out="sum"), inner("Identity", "sum", out="each"), net=inner,
                inputs=[("state", FLOAT, (2, 3)), ("item", FLOAT, (2, 3))])  # fmt: skip
    start = n.const(np.zeros((2, 3), np.float32))
    return list(n("Scan", start, x, name="scan", out=["last", "all"], body=step, num_scan_inputs=1))


@case((2, 3))
def loop(n: Net, x: str, opset: int) -> Any:
    inner = Net(1)
    inner._count = 100
    inputs = [("i", INT64, ()), ("going", BOOL, ()), ("v", FLOAT, (2, 3))]
    y = inner("MatMul", "v", inner.weights(3, 3), name="step", out="next")
    step = body((inner("Identity", "going", out="still"), BOOL, ()), y, net=inner, inputs=inputs)
    return n("Loop", n.const(np.int64(3)), n.const(np.bool_(True)), x, name="loop", out="looped", body=step)


@case((2, 3))
def one_hot_of_an_embedding(n: Net, x: str, opset: int) -> Any:
    rows = n("Gather", n.weights(7, 3, name="table"), n.const(np.int64([1, 5])), name="rows")
    return n("Add", x, rows, name="add")


@case(since=10)
def mod_and_round(n: Net, x: str, opset: int) -> Any:
    return n("Mod", x, n.const(np.float32(0.3)), fmod=1, name="mod")


@case(since=12)
def einsum(n: Net, x: str, opset: int) -> Any:
    return n("Einsum", x, x, equation="bchw,bcwk->bchk", name="einsum")


@case(since=16)
def grid_sample(n: Net, x: str, opset: int) -> Any:
    grid = n.const(np.random.default_rng(0).uniform(-1, 1, (1, 5, 5, 2)).astype(np.float32))
    return n("GridSample", x, grid, mode="bilinear" if opset < 20 else "linear", name="sample")


@case(since=10)
def roi_align(n: Net, x: str, opset: int) -> Any:
    boxes, batch = n.const(np.float32([[0, 0, 4, 4], [1, 1, 5, 3]])), ints(n, 0, 0)
    return n("RoiAlign", x, boxes, batch, output_height=2, output_width=2, sampling_ratio=2, name="roi")


@case(since=17)
def layer_norm(n: Net, x: str, opset: int) -> Any:
    return n("LayerNormalization", x, n.weights(6, name="g"), n.weights(6, name="b"), name="norm")


@case(since=18)
def group_norm(n: Net, x: str, opset: int) -> Any:
    size = 2 if opset < 21 else 4  # one scale per group at first, one per channel later
    return n("GroupNormalization", x, n.weights(size, name="g"), n.weights(size, name="b"), num_groups=2, name="norm")


@case(since=20)
def gelu(n: Net, x: str, opset: int) -> Any:
    return n("Gelu", x, name="gelu")


@case((2, 4, 8), since=23)
def rms_norm(n: Net, x: str, opset: int) -> Any:
    return n("RMSNormalization", x, n.weights(8, name="g"), name="norm")


@case(since=14)
def hard_swish(n: Net, x: str, opset: int) -> Any:
    return n("HardSwish", x, name="swish")


@case(since=11)
def cum_sum_and_range(n: Net, x: str, opset: int) -> Any:
    return n("CumSum", x, n.const(np.int64(2)), name="cumsum")


@case((3, 4))
def max_min_sum_mean(n: Net, x: str, opset: int) -> Any:
    y = n("Neg", x, name="neg")
    return [n(op, x, y, name=op.lower()) for op in ("Max", "Min", "Sum", "Mean")]


@case()
def norms(n: Net, x: str, opset: int) -> Any:
    y = n("InstanceNormalization", x, n.weights(4, name="s"), n.weights(4, name="o"), name="instance")
    return [y, n("LpNormalization", x, axis=1, name="lp"), n("LRN", x, size=3, name="lrn")]
