"""Traits: facts about operators that passes ask for beyond the ports and the kind that the op table says; a row each.

A pass asks ``op.type in TRAITS["identity"]``. Facts of one runtime, of AIMET's configuration or of one file format stay with
these. An operator of the op table that has none of the traits stands in :data:`WITHOUT`, so that a new row of the op table is
answered for here as well; the tests list those that are not.
"""

from __future__ import annotations

from typing import Literal

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
    ai.onnx.ml::TreeEnsemble ai.onnx.ml::TreeEnsembleClassifier ai.onnx.ml::TreeEnsembleRegressor
    """.split()
)
