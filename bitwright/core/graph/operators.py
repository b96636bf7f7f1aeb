"""The operator table: the facts that quantization needs about each operator, by canonical (ONNX) type.

A row of :data:`OPS` says which ports are parameters, where a weight has its output channels, whether the operator only
moves data, and whether integer runtimes have a kernel for it. Adding an operator is adding a row; other packages add those of
their own operators, by domain and type (``mylib::Gate``) in ONNX and by namespace and name in PyTorch.

:data:`TRAITS` lists the operators that share a property which a pass asks for: ``op.type in TRAITS["identity"]``. Facts
about one runtime, AIMET's configuration or a file format stay with that code. An operator without any trait stands in
:data:`WITHOUT`, so that the tests can list new operators that still need a decision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from bitwright.core.graph.recurrence import CELLS
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerGate, PerTensor
from bitwright.core.registry import Registry
from bitwright.errors import ConfigError, close_matches

Trait = Literal[
    "identity",
    "reshape",
    "one_element",
    "layer",
    "bias_port",
    "clamp",
    "piecewise_linear",
    "activation",
    "homogeneous",
    "keeps_mean",
    "bodies",
]

#: operators that read the lengths of a value and none of its numbers; they need no row in :data:`OPS`
LENGTHS = frozenset(("Shape", "Size"))

_IDENTITY = ("Identity", "Dropout", "Contiguous", "Clone")
_RESHAPE = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
_BIAS_PORT = ("Conv", "ConvTranspose", "Gemm")
_CLAMP = ("Relu", "Clip")
_PIECEWISE_LINEAR = (*_CLAMP, "LeakyRelu")
_AVERAGES = ("AveragePool", "GlobalAveragePool", "ReduceMean")

#: trait -> the operators that have it, in the order in which patterns are made of them
TRAITS: dict[Trait, tuple[str, ...]] = {
    # the output is the input, at inference
    "identity": _IDENTITY,
    # the elements stay in their order, under another shape
    "reshape": _RESHAPE,
    # the single element of a constant is still the element, perhaps in another type
    "one_element": ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"),
    # a product of the input with a stored weight that folding and equalization can change channel by channel
    "layer": (*_BIAS_PORT, "MatMul"),
    # the third port is a bias, which may be left out
    "bias_port": _BIAS_PORT,
    # bounds the values; integer kernels do it by the ends of their output's grid
    "clamp": _CLAMP,
    # linear between the elements where its slope changes, and the slope is 1 or constant
    "piecewise_linear": _PIECEWISE_LINEAR,
    # a function of one number that stands after a layer
    "activation": (
        *_PIECEWISE_LINEAR, "HardSwish", "HardSigmoid", "Silu", "Gelu", "Elu", "Mish", "Selu", "Celu", "Softplus", "Sigmoid",
        "Tanh",
    ),
    # each channel by itself, times the same positive factor if the input has one
    "homogeneous": (
        *_PIECEWISE_LINEAR, "PRelu", *_IDENTITY, "MaxPool", *_AVERAGES, "GlobalMaxPool", "ReduceMax", "Pad", "Resize",
        "ResizeNearest", "Reshape", "Flatten", "Squeeze", "Mul", "Div",
    ),
    # the mean of a channel over what is left is the mean that it had
    "keeps_mean": (*_IDENTITY, *_AVERAGES, "Flatten", "Reshape", "Squeeze", "Pad"),
    # has graphs as attributes
    "bodies": ("If", "Loop", "Scan"),
}  # fmt: skip

#: operators of the op table of which none of the traits is true
WITHOUT = frozenset(
    """
    GroupedMatMul Einsum Bilinear Embedding Attention RNN GRU LSTM
    BatchNormalization LayerNormalization GroupNormalization InstanceNormalization RMSNormalization LRN LpNormalization
    Concat Where MaskedFill ScatterElements Stack GridSample Col2Im
    ReduceSum ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceMin ReduceLogSumExp CumSum Variance
    Softsign HardShrink SoftShrink TanhShrink LogSigmoid Threshold Glu RRelu Softmax LogSoftmax
    Sin Cos Tan Asin Acos Atan Sinh Cosh Exp Expm1 Log Log1p log2 log10 Sqrt Rsqrt Reciprocal Erf
    Add Sub Mod FloorDiv Pow Min Max Lerp Addcmul Atan2 Abs Neg Square Round Floor Ceil Sign
    eq ne Equal long int ArgMax ArgMin argmax argmin argsort TopK Sort
    Transpose Slice Split Expand Tile DepthToSpace SpaceToDepth Gather GatherElements GatherND Flip Roll Unfold ChannelShuffle
    Compress Trilu Diagonal MaxUnpool
    RoiAlign MaxRoiPool roi_align roi_pool ps_roi_align ps_roi_pool NonMaxSuppression nms DeformConv deform_conv2d
    ai.onnx.ml::TreeEnsemble ai.onnx.ml::TreeEnsembleClassifier ai.onnx.ml::TreeEnsembleRegressor
    """.split()
)


Kind = Literal["compute", "movement", "pointwise", "merge", "norm", "reduce", "float"]
Need = Literal[
    "divisor", "magnitude", "sum", "quotient", "domain", "phase", "position", "identity", "order", "steering", "state"
]


@dataclass(frozen=True)
class OpRow:
    """One operator type.

    Attributes:
        kind: ``compute`` multiplies activations with weights or activations; ``movement`` only moves or selects
            elements, so its output has its input's encoding; ``merge`` joins inputs (concat, where); ``float`` has no
            integer kernel anywhere.
        params: port -> parameter name in rules (``weight``, ``bias``, ...), for ports that usually hold parameters.
        weight: port whose constant operand is the weight.
        bias: port of the bias.
        activations: ports that carry activations; ``None`` means every port not in ``params``.
        integer: whether common integer runtimes run the operator on integers, so that its output is worth a grid.
        fixed_range: the output's range whatever the input (``(0, 1)`` for sigmoid).
        exact: port -> what no integer grid gives the operator there: small values of a ``divisor``, the ``magnitude`` of
            what is small, values within its ``domain``, a ``phase``, a ``position`` in an image, the very numbers that are
            compared or counted with (``identity``), the ``order`` of values that are nearly equal, where its indices decide
            what is computed; see :mod:`bitwright.core.graph.float_values`.
        axes: ``(channel_axis, block_axis)`` of the weight, where :func:`weight_axes` has no rule of its own for the operator:
            the axis of output channels, and the one that is summed over; ``None`` for no such axis.
    """

    kind: Kind
    params: Mapping[int, str] = field(default_factory=dict)
    weight: int | None = None
    bias: int | None = None
    activations: tuple[int, ...] | None = None
    integer: bool = False
    fixed_range: tuple[float, float] | None = None
    exact: Mapping[int, Need] = field(default_factory=dict)
    axes: tuple[int | None, int | None] | None = None


_WB = {1: "weight", 2: "bias"}
_MATMUL = OpRow("compute", {}, weight=1, activations=(0, 1), integer=True)
_MOVE = OpRow("movement", activations=(0,))
_POINT = OpRow("pointwise")
_INT_POINT = OpRow("pointwise", integer=True)
_ACT = OpRow("pointwise", activations=(0,), integer=True)
_NORM = OpRow("norm", _WB, activations=(0,))
_REDUCE = OpRow("reduce", activations=(0,))
#: parameters that normalisations measure: a grid of few steps on a variance is a factor on every value after it
STATISTICS = frozenset(("running_mean", "running_var"))
_CHANNEL_NORMS = ("BatchNormalization", "InstanceNormalization", "GroupNormalization")
_GATED = (1, 2)  # W and R have rows of gates, a projection has none
_RECURRENT = OpRow(
    "compute",
    {1: "weight", 2: "weight", 3: "bias", 7: "peephole", 8: "weight", 9: "bias"},
    weight=1,
    activations=(0, 5, 6),
    integer=True,
)

_REGIONS = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool")

_NAME = re.compile(r"(\w[\w.]*::)?\w+")


def _checked(name: str, row: Any) -> OpRow:
    """A row of another package."""
    if not isinstance(row, OpRow):
        raise ConfigError(
            f"operator {name!r}", f"{row!r:.100} is not an OpRow",
            'register an OpRow, as OpRow("pointwise", activations=(0,), integer=True)',
        )  # fmt: skip
    problem = "" if _NAME.fullmatch(name) else "its name is not a domain and a type, as 'mylib::Gate'"
    problem = problem or _problem(row)
    if problem:
        raise ConfigError(f"operator {name!r}", problem, "see bitwright.core.graph.operators.OpRow")
    return row


def _problem(row: OpRow) -> str:
    """What is wrong in a row; empty where nothing is."""
    kinds, needs = get_args(Kind), get_args(Need)
    if row.kind not in kinds:
        return f"there is no kind {row.kind!r}{close_matches(str(row.kind), kinds)}; kinds are {', '.join(kinds)}"
    unknown = next((need for need in row.exact.values() if need not in needs), None)
    if unknown is not None:
        return f"there is no need {unknown!r}; needs are {', '.join(needs)}"
    named = (row.weight, row.bias, *row.params, *row.exact, *(row.activations or ()))
    wrong = [port for port in named if port is not None and (type(port) is not int or port < 0)]
    if wrong:
        return f"{wrong[0]!r} is no port; ports are counted from 0"
    if row.fixed_range is not None and not row.fixed_range[0] < row.fixed_range[1]:
        return f"its fixed range is {row.fixed_range}; the lower end comes first"
    return "it has axes of a weight and no weight" if row.axes is not None and row.weight is None else ""


_ROWS: dict[str, OpRow] = {
    "Conv": OpRow("compute", _WB, weight=1, bias=2, activations=(0,), integer=True),
    "ConvTranspose": OpRow("compute", _WB, weight=1, bias=2, activations=(0,), integer=True),
    "Gemm": OpRow("compute", _WB, weight=1, bias=2, activations=(0,), integer=True),
    "MatMul": _MATMUL,
    # rows of the first operand, each group of them by its own matrix of the second: experts
    "GroupedMatMul": OpRow("compute", {3: "bias"}, weight=1, activations=(0, 1), integer=True),
    "Einsum": OpRow("compute", activations=(0, 1), integer=True),
    "Bilinear": OpRow("compute", {2: "weight", 3: "bias"}, weight=2, bias=3, activations=(0, 1)),
    "Embedding": OpRow("compute", {0: "weight"}, weight=0, activations=(), integer=True),
    "PRelu": OpRow("pointwise", {1: "weight"}, weight=1, activations=(0,), integer=True),
    # batch normalisation: scale, shift, mean, variance in ONNX port order
    "BatchNormalization": OpRow(
        "norm", {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"}, activations=(0,), integer=True
    ),
    "LayerNormalization": _NORM,
    "GroupNormalization": _NORM,
    "InstanceNormalization": OpRow(
        "norm", {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"}, activations=(0,)
    ),
    "RMSNormalization": OpRow("norm", {1: "weight"}, activations=(0,)),
    "LRN": OpRow("norm", activations=(0,)),
    "LpNormalization": OpRow("norm", activations=(0,)),
    # joins
    "Concat": OpRow("merge", integer=True),
    "Where": OpRow("merge", activations=(1, 2)),
    "MaskedFill": OpRow("merge", activations=(0,)),
    "ScatterElements": OpRow("merge", activations=(0, 2)),
    # reductions and pools
    "AveragePool": OpRow("reduce", activations=(0,), integer=True),
    "GlobalAveragePool": OpRow("reduce", activations=(0,), integer=True),
    "ReduceMean": OpRow("reduce", activations=(0,), integer=True),
    **dict.fromkeys(("ReduceSum", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare"), _REDUCE),
    **dict.fromkeys(("CumSum", "ReduceLogSumExp", "Variance"), _REDUCE),
    # activations
    **dict.fromkeys(("Relu", "Clip", "LeakyRelu", "HardSwish", "HardSigmoid", "Silu", "Gelu", "Elu", "Mish"), _ACT),
    **dict.fromkeys(("Selu", "Celu", "Softplus", "Softsign", "HardShrink", "SoftShrink", "TanhShrink"), _ACT),
    **dict.fromkeys(("LogSigmoid", "Threshold", "Glu", "RRelu"), _ACT),
    "Sigmoid": OpRow("pointwise", activations=(0,), integer=True, fixed_range=(0.0, 1.0)),
    "Softmax": OpRow("pointwise", activations=(0,), integer=True, fixed_range=(0.0, 1.0)),
    "Tanh": OpRow("pointwise", activations=(0,), integer=True, fixed_range=(-1.0, 1.0)),
    **dict.fromkeys(("Sin", "Cos"), OpRow("pointwise", activations=(0,), fixed_range=(-1.0, 1.0), exact={0: "phase"})),
    "Tan": OpRow("pointwise", exact={0: "phase"}),
    "LogSoftmax": OpRow("pointwise", activations=(0,)),
    # arithmetic: four with integer kernels, the rest float between grids
    **dict.fromkeys(("Add", "Sub", "Mul"), _INT_POINT),
    **dict.fromkeys(("Div", "FloorDiv"), OpRow("pointwise", exact={1: "divisor"})),
    "Mod": OpRow("pointwise", exact={0: "phase", 1: "divisor"}),
    **dict.fromkeys(("Reciprocal", "Rsqrt"), OpRow("pointwise", exact={0: "divisor"})),
    **dict.fromkeys(("Log", "Sqrt"), OpRow("pointwise", exact={0: "magnitude"})),
    **dict.fromkeys(("log2", "log10"), OpRow("float", activations=(0,), exact={0: "magnitude"})),
    **dict.fromkeys(("Asin", "Acos"), OpRow("pointwise", exact={0: "domain"})),
    **dict.fromkeys(("eq", "ne", "Equal"), OpRow("float", exact={0: "identity", 1: "identity"})),
    **dict.fromkeys(("Cast", "long", "int"), OpRow("float", exact={0: "identity"})),
    **dict.fromkeys(("Pow", "Min", "Max", "Lerp", "Addcmul", "Atan2"), _POINT),  # Pow: by its exponent
    **dict.fromkeys(("Exp", "Abs", "Neg", "Square", "Erf", "Round", "Floor", "Ceil"), _POINT),
    **dict.fromkeys(("Atan", "Sinh", "Cosh", "Log1p", "Expm1", "Sign"), _POINT),
    # movement of data: the values on the output are values of the input (or zero)
    **dict.fromkeys(("Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split"), _MOVE),
    **dict.fromkeys(("Expand", "Tile", "Pad", "MaxPool", "GlobalMaxPool", "DepthToSpace", "SpaceToDepth"), _MOVE),
    **dict.fromkeys(("Gather", "GatherElements", "GatherND"), _MOVE),
    # selections of the largest and smallest, which also say where these were
    **dict.fromkeys(
        ("ReduceMax", "ReduceMin", "TopK", "Sort"), OpRow("movement", activations=(0,), exact={0: "order"})
    ),
    **dict.fromkeys(("ArgMax", "ArgMin", "argmax", "argmin", "argsort"), OpRow("float", exact={0: "order"})),
    **dict.fromkeys(("Dropout", "Flip", "Roll", "Unfold", "ChannelShuffle", "ResizeNearest", "Compress"), _MOVE),
    **dict.fromkeys(("Trilu", "Diagonal", "Contiguous", "MaxUnpool", "Clone"), _MOVE),
    "Stack": OpRow("merge", integer=True),
    "Col2Im": OpRow("reduce", activations=(0,)),  # adds where columns overlap
    # control flow: which branch's value it is; what the body made last, or in each run
    "If": OpRow("merge", activations=(1, 2)),
    **dict.fromkeys(("Loop", "Scan"), _MOVE),
    "Resize": OpRow("pointwise", activations=(0,), integer=True),
    "GridSample": OpRow("pointwise", activations=(0,), exact={1: "position"}),
    # parts of an image at boxes, boxes that others do not cover, and products with elements at offsets; torchvision's names too
    **dict.fromkeys(("RoiAlign", "MaxRoiPool", *_REGIONS), OpRow("float", exact={1: "position"})),
    **dict.fromkeys(("NonMaxSuppression", "nms"), OpRow("float", exact={0: "position", 1: "order"})),
    **dict.fromkeys(("DeformConv", "deform_conv2d"), OpRow("float", exact={2: "position"})),
    # one layer in one direction: X, W, R, B, sequence_lens, initial_h, initial_c, P, and what only torch has:
    # a projection and a second bias
    **dict.fromkeys(CELLS, _RECURRENT),
    # trees compare what they read with stored numbers
    **dict.fromkeys(
        ("ai.onnx.ml::TreeEnsemble", "ai.onnx.ml::TreeEnsembleClassifier", "ai.onnx.ml::TreeEnsembleRegressor"),
        OpRow("float", activations=(0,), exact={0: "identity"}),
    ),
    # one call in torch that the front end takes apart; listed in float where it could not
    "Attention": OpRow("float"),
}

OPS: Registry[OpRow] = Registry("operators", _ROWS, _checked)

_UNKNOWN = OpRow("float")


def op_row(op_type: str) -> OpRow:
    """The row of ``op_type``; an operator without a row is treated as ``float``."""
    row = OPS.get(op_type)  # of those that are loaded: this is asked a hundred times for each operator
    if row is None and op_type in OPS:
        row = OPS[op_type]
    return row or _UNKNOWN


#: operator -> the second operand that leaves the first one as it is
_NEUTRAL = {"Mul": 1.0, "Div": 1.0, "Pow": 1.0, "Add": 0.0, "Sub": 0.0}


def is_neutral(op_type: str, number: float | None) -> bool:
    """Whether ``op_type`` with the stored second operand ``number`` returns its first operand unchanged.

    Such an operator is an ``Identity``: exporters and ONNX Runtime remove it, and with it a grid of its own would be a
    second one for the same numbers.

    >>> is_neutral("Mul", 1.0), is_neutral("Mul", 0.0), is_neutral("Sub", 0.0)
    (True, False, True)
    """
    return number is not None and _NEUTRAL.get(op_type) == number


_WEIGHT_AXES = {
    "Conv": (0, 1), "ConvTranspose": (1, 0), "Embedding": (0, 1), "Gather": (0, 1), "Bilinear": (0, 1)
}  # fmt: skip


#: last part of the names of products by an invertible matrix that a rotation or transform put into a model
ROTATION = "rotation"


def is_rotation(op_type: str, name: str) -> bool:
    """Whether an operator is an online rotation: a product by an invertible matrix, marked by its name.

    >>> is_rotation("Gemm", "layers.0.down.rotation"), is_rotation("Gemm", "rotation_head")
    (True, False)
    """
    parts = name.replace("/", ".").split(".")[-2:]  # a number follows where the name was taken
    return op_type in ("Gemm", "MatMul") and any(part.rstrip("_0123456789") == ROTATION for part in parts)


def weight_axes(op_type: str, attrs: Mapping[str, Any], port: int, rank: int) -> tuple[int | None, int | None]:
    """``(channel_axis, block_axis)`` of a constant operand: output channels, and the axis that is summed over.

    ============== ============================= =============
    type           channel axis                  block axis
    ============== ============================= =============
    Conv           0                             1
    ConvTranspose  1                             0
    Gemm           0 if ``transB`` else 1        the other
    MatMul         last (right), rank-2 (left)   the other
    GroupedMatMul  last, for each matrix         the one before
    Embedding      0 (rows)                      1
    Gather         as Embedding: its table
    LSTM, GRU, RNN the one before the last       last
    channel norms  0                             none
    others         ``axes`` of their row, at the port of their weight
    ============== ============================= =============

    Channel norms are batch, instance and group normalisation, with their scale and shift.
    A 1-D operand of MatMul has no output channel: ``(None, 0)``.
    """
    if op_type in _WEIGHT_AXES:
        return _WEIGHT_AXES[op_type]
    if op_type in ("Gemm", "MatMul", "GroupedMatMul"):
        return _product_axes(op_type, attrs, port, rank)
    if op_type == "PRelu" or (op_type in _CHANNEL_NORMS and rank == 1):
        return 0, None
    if op_type in CELLS:  # rows of gates: [gates * hidden, in], and [1, gates * hidden, in] in ONNX
        return (rank - 2, rank - 1) if rank > 1 else (None, None)
    row = op_row(op_type)
    return row.axes if row.axes is not None and port == row.weight else (None, None)


def _product_axes(op_type: str, attrs: Mapping[str, Any], port: int, rank: int) -> tuple[int | None, int | None]:
    """:func:`weight_axes` of matrix products."""
    if op_type == "GroupedMatMul":
        return rank - 1, rank - 2
    if op_type == "MatMul":
        if rank < 2:
            return None, 0
        return (rank - 1, rank - 2) if port == 1 else (rank - 2, rank - 1)
    if port == 1:
        return (0, 1) if attrs.get("transB") else (1, 0)
    return (1, 0) if attrs.get("transA") else (0, 1)


#: operators whose constant operand may be a stack of matrices: what is multiplied, and what is picked (a row of one each)
_STACKED = frozenset(("MatMul", "GroupedMatMul", "Embedding", "Gather"))

_ADDEND = 2  # port of what is added to a product


def is_addend(op_type: str, port: int) -> bool:
    """Whether ``port`` reads the addend of a product of two operands (``baddbmm``), which is never a weight."""
    return op_type == "MatMul" and port == _ADDEND


def block_axes(
    op_type: str, attrs: Mapping[str, Any], port: int, shape: tuple[int, ...]
) -> tuple[int | tuple[int, ...] | None, int | None]:
    """``(channel_axis, block_axis)`` of the blocks of a constant operand: those of :func:`weight_axes`, and of a stack of
    matrices (experts) every axis that counts the matrices as well, since they do not share scales. What is added to a product
    (port 2) is not a stack of matrices: nothing is summed over any of its axes, and their lengths may change with the input.

    >>> block_axes("MatMul", {}, 1, (4, 64, 8))
    ((0, 2), 1)
    """
    channel, block = weight_axes(op_type, attrs, port, len(shape))
    if len(shape) < 3 or op_type not in _STACKED or port == _ADDEND:
        return channel, block
    if op_type in ("Embedding", "Gather"):
        channel, block = len(shape) - 2, len(shape) - 1
    stack = tuple(axis for axis, count in enumerate(shape) if axis not in (channel, block) and count > 1)
    return (channel if not stack or channel is None else (*stack, channel)), block


def resolve_granularity(
    op_type: str, attrs: Mapping[str, Any], port: int, granularity: Granularity, shape: tuple[int, ...]
) -> Granularity:
    """``granularity`` with its open axes filled in for a constant operand of ``shape`` at ``port``.

    A grouped transposed convolution has its output channels spread over two axes (group, channel within the group):
    per channel then means one scale per group and per index of axis 1, which is a block of ``in / group`` along axis 0.
    Stacked matrices do not share scales: per channel means one per matrix and column (row, where matrices are picked),
    which is a block of all that is summed over.
    A per-channel scale of a tensor of one element (PRelu with one slope) falls back to per tensor.
    """
    channel, block = weight_axes(op_type, attrs, port, len(shape))
    if isinstance(granularity, PerGate) and op_type in CELLS and port in _GATED and channel is not None:
        return PerBlock(shape[channel] // len(CELLS[op_type].gates), axis=channel)
    if op_type == "PRelu" and shape:  # slopes may bear axes of length 1, to broadcast against the input
        channel = max(range(len(shape)), key=shape.__getitem__)
    if granularity == PerChannel():
        several = _channels_on_several_axes(op_type, attrs, port, shape)
        if several is not None:
            return several
    if isinstance(granularity, PerBlock):
        return granularity.resolve(*block_axes(op_type, attrs, port, shape))
    resolved = granularity.resolve(channel, block)
    if isinstance(resolved, PerChannel) and resolved.axis is not None and -len(shape) <= resolved.axis < len(shape):
        return PerTensor() if all(count == 1 for count in shape) else resolved  # -1 is a length that is not known
    return resolved  # an axis that the tensor lacks is refused by name where its scales are counted


def _channels_on_several_axes(
    op_type: str, attrs: Mapping[str, Any], port: int, shape: tuple[int, ...]
) -> Granularity | None:
    """One scale per output channel where no single axis counts these; ``None`` where one does."""
    if op_type in _STACKED and len(shape) > 2:
        channels, summed = block_axes(op_type, attrs, port, shape)
        if summed is not None and isinstance(channels, tuple):
            return PerBlock(shape[summed], summed, channels)
    group = int(attrs.get("group", 1))
    if op_type == "ConvTranspose" and group > 1:
        # the input channels of a group are summed: only where each has one, they count the output channels
        return PerChannel(0) if shape[:2] == (group, 1) else PerBlock(shape[0] // group, axis=0, channel_axis=1)
    return None
