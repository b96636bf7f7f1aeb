"""Table of torch functions and their operators, keyed by the function objects that torch intercepts.

A row maps the arguments of a call to the ports of the canonical operator (``bitwright.core.graph.operators``). ``torch.add``,
``Tensor.add_``, ``Tensor.__radd__`` and ``+`` are the same operator; the tables below list names once and
:data:`FUNCTIONS` finds every object after them.

Programs of ``torch.export`` call operators by their overload (``torch.ops.aten.linear.default``). After
``run_decompositions()`` these are core operators (``aten.convolution``, ``aten.native_layer_norm``): each is carried out as
the function it stands for, so that it is one place with the operands and attributes of that function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bitwright.core.graph.float_values import WIDE
from bitwright.core.graph.operators import OPS, OpRow, is_neutral, op_row
from bitwright.torch.calls import recurrent
from bitwright.torch.calls.decompose import DECOMPOSITIONS

Arguments = Mapping[str, Any]
#: of an intercepted call: the torch function, its positional arguments, its arguments by name
Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class Function:
    """How to read a call of one torch function.

    Attributes:
        label: name used in op names: ``add``, ``conv2d``.
        type: canonical operator type, or a function of the arguments that chooses it.
        signature: argument names in positional order.
        ports: argument names in port order; a name with a star is a sequence of tensors that fills the ports from there.
        attrs: arguments -> attributes for the graph.
        in_place: the call writes into its first argument.
        fresh: the output never shares memory with an argument, so it may be overwritten.
        named_by: keyword argument that names the call in place of ``label``.
    """

    label: str
    type: str | Callable[[Arguments], str]
    signature: tuple[str, ...]
    ports: tuple[str, ...]
    attrs: Callable[[Arguments], dict[str, Any]] | None = None
    in_place: bool = False
    fresh: bool = True
    named_by: str | None = None

    def called(self, kwargs: Mapping[str, Any]) -> str:
        """Base of the call's name: ``label``, unless the row sets another."""
        return self.label if self.named_by is None else str(kwargs.get(self.named_by, self.label))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name; a starred name takes the sequence at its place, or all arguments from there."""
        bound: dict[str, Any] = {}
        for i, name in enumerate(self.signature):
            if name.startswith("*"):
                rest = args[i:]
                bound[name] = rest[0] if rest and isinstance(rest[0], (list, tuple)) else tuple(rest)
                break
            if i < len(args):
                bound[name] = args[i]
        for name, value in kwargs.items():
            bound[f"*{name}" if f"*{name}" in self.ports else name] = value
        return bound

    def op_type(self, bound: Arguments) -> str:
        """The canonical type of this call; ``Identity`` where a neutral number makes it one, as in ``x + 0``."""
        kind = self.type if isinstance(self.type, str) else self.type(bound)
        return "Identity" if is_neutral(kind, _second_number(self.ports, bound)) else kind

    def operands(self, bound: Arguments) -> Iterator[tuple[int, Any]]:
        """``(port, argument)`` for every port, whether or not the argument is a tensor."""
        port = 0
        for name in self.ports:
            if name.startswith("*"):
                for item in bound.get(name, ()):
                    yield port, item
                    port += 1
            else:
                yield port, bound.get(name)
                port += 1

    def replace(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], new: Mapping[int, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with the operands at the ports in ``new`` replaced."""
        out, named = list(args), dict(kwargs)
        for port, name in enumerate(self.ports):
            if name.startswith("*"):  # the last one
                self._replace_rest(out, named, new, port)
            elif port in new:
                at = self.signature.index(name)
                if at < len(out):
                    out[at] = new[port]
                else:
                    named[name] = new[port]
        return tuple(out), named

    def _replace_rest(self, args: list[Any], kwargs: Kwargs, new: Mapping[int, Any], port: int) -> None:
        """Replace the operands of the variadic port, given as a sequence or one by one."""
        name = self.ports[port]
        at, plain = self.signature.index(name), name.removeprefix("*")
        if plain in kwargs:
            kwargs[plain] = [new.get(port + i, item) for i, item in enumerate(kwargs[plain])]
        elif isinstance(args[at], (list, tuple)):
            args[at] = type(args[at])(new.get(port + i, item) for i, item in enumerate(args[at]))
        else:
            args[at:] = [new.get(port + i, item) for i, item in enumerate(args[at:])]

    def row(self, bound: Arguments) -> OpRow:
        """The op-table row of this call."""
        return op_row(self.op_type(bound))


def _second_number(ports: Sequence[str], bound: Arguments) -> float | None:
    """The scalar operand of a call beside a floating-point tensor; ``None`` for other operands.

    A tensor is none, whatever it holds: parameters and buffers change.
    """
    if len(ports) != 2 or bound.get("rounding_mode") is not None or bound.get("out") is not None:
        return None
    first, second = bound.get(ports[0]), bound.get(ports[1])
    plain = isinstance(second, (int, float)) and isinstance(first, torch.Tensor) and first.is_floating_point()
    return second if plain else None


# ---------------------------------------------------------------------------------------------- attributes


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    if isinstance(value, (tuple, list)):
        return tuple(int(v) for v in value) if len(value) == n else tuple(int(value[0]) for _ in range(n))
    return (int(value),) * n


def _conv_attrs(bound: Arguments) -> dict[str, Any]:
    weight = bound["weight"]
    n = weight.dim() - 2
    strides, dilations = _tuple(bound.get("stride", 1), n), _tuple(bound.get("dilation", 1), n)
    padding = bound.get("padding", 0)
    if padding == "valid":
        begins = ends = (0,) * n
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        begins = tuple(t // 2 for t in total)
        ends = tuple(t - t // 2 for t in total)
    else:
        begins = ends = _tuple(padding, n)
    return {"group": int(bound.get("groups", 1)), "pads": (*begins, *ends), "strides": strides, "dilations": dilations}


def _conv_transpose_attrs(bound: Arguments) -> dict[str, Any]:
    n = bound["weight"].dim() - 2
    return {**_conv_attrs(bound), "output_padding": _tuple(bound.get("output_padding", 0), n)}


def _linear_attrs(bound: Arguments) -> dict[str, Any]:
    return {"transB": 1}


def _batch_norm_attrs(bound: Arguments) -> dict[str, Any]:
    training = bool(bound.get("training", False)) or bound.get("running_mean") is None
    return {"epsilon": float(bound.get("eps", 1e-5)), "training": training}


def _instance_norm_attrs(bound: Arguments) -> dict[str, Any]:
    return {"epsilon": float(bound.get("eps", 1e-5)), "training": bool(bound.get("use_input_stats", True))}


def _eps_attrs(bound: Arguments) -> dict[str, Any]:
    eps = bound.get("eps")
    return {"epsilon": 1e-5 if eps is None else float(eps)}


def _axis_attrs(bound: Arguments) -> dict[str, Any]:
    axis = bound.get("dim")
    return {} if not isinstance(axis, int) else {"axis": axis}


def _clip_attrs(bound: Arguments) -> dict[str, Any]:
    return {"min": _number(bound.get("min")), "max": _number(bound.get("max"))}


def _hardtanh_attrs(bound: Arguments) -> dict[str, Any]:
    return {"min": _number(bound.get("min_val", -1.0)), "max": _number(bound.get("max_val", 1.0))}


def _relu6_attrs(bound: Arguments) -> dict[str, Any]:
    return {"min": 0.0, "max": 6.0}


def _power_attrs(bound: Arguments) -> dict[str, Any]:
    exponent = bound.get("other", bound.get("exponent"))
    return {"exponent": float(exponent)} if isinstance(exponent, (int, float)) else {}


def _root_attrs(bound: Arguments) -> dict[str, Any]:
    return {"root": True}


def _leaky_attrs(bound: Arguments) -> dict[str, Any]:
    return {"alpha": float(bound.get("negative_slope", 0.01))}


def _number(value: Any) -> float | None:
    return None if value is None or isinstance(value, torch.Tensor) else float(value)


# ---------------------------------------------------------------------------------------- type by arguments


def _resize_type(bound: Arguments) -> str:
    return "ResizeNearest" if str(bound.get("mode", "nearest")).startswith("nearest") else "Resize"


def _grouped_type(bound: Arguments) -> str:
    # rows of one matrix, each group of them by a matrix of its own; the other forms are for gradients
    return "GroupedMatMul" if bound["input"].dim() == 2 and bound["other"].dim() == 3 else "MatMul"


def _index_type(bound: Arguments) -> str:
    kinds = {i.dtype == torch.bool for i in bound["*index"] if isinstance(i, torch.Tensor)}
    return "Slice" if not kinds else "Compress" if kinds == {True} else "Gather"


def _pool_type(bound: Arguments) -> str:
    size = bound.get("output_size")
    return "GlobalAveragePool" if size in (1, (1,), (1, 1), (1, 1, 1), [1, 1]) else "AveragePool"


def _extreme(reduce: str, pair: str) -> Callable[[Arguments], str]:
    return lambda bound: pair if isinstance(bound.get("dim", bound.get("other")), torch.Tensor) else reduce


def _pad_type(bound: Arguments) -> str:
    # a constant other than zero need not lie on the input's grid
    return "Pad" if bound.get("mode", "constant") != "constant" or not bound.get("value") else "PadConstant"


# ------------------------------------------------------------------------------------------------- the table

_X = ("input",)
_XY = ("input", "other")
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONVT = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_WB = ("input", "weight", "bias")
_BN_PORTS = ("input", "weight", "bias", "running_mean", "running_var")
_REDUCE = ("input", "dim", "keepdim")

# names | type | signature | ports | attributes | may return its argument (so never overwritten)
_ROWS: list[tuple[str, Any, tuple[str, ...], tuple[str, ...], Any, bool]] = [
    ("conv1d conv2d conv3d", "Conv", _CONV, _WB, _conv_attrs, False),
    ("conv_transpose1d conv_transpose2d conv_transpose3d", "ConvTranspose", _CONVT, _WB, _conv_transpose_attrs, False),
    ("linear", "Gemm", _WB, _WB, _linear_attrs, False),
    ("addmm", "Gemm", ("input", "mat1", "mat2"), ("mat1", "mat2", "input"), None, False),
    ("matmul __matmul__ mm bmm mv dot", "MatMul", _XY, _XY, None, False),
    ("__rmatmul__", "MatMul", _XY, ("other", "input"), None, False),
    ("_grouped_mm", _grouped_type, ("input", "other", "offs", "bias", "out_dtype"), ("input", "other", "offs", "bias"), None,
     False),
    ("baddbmm", "MatMul", ("input", "batch1", "batch2"), ("batch1", "batch2", "input"), None, False),
    ("einsum", "Einsum", ("equation", "*operands"), ("*operands",), None, True),
    ("bilinear", "Bilinear", ("input1", "input2", "weight", "bias"), ("input1", "input2", "weight", "bias"), None, False),
    ("embedding", "Embedding", ("input", "weight"), ("weight", "input"), None, False),
    ("embedding_bag", "Embedding", ("input", "weight"), ("weight", "input"), None, True),
    ("prelu", "PRelu", ("input", "weight"), ("input", "weight"), None, False),
    ("batch_norm", "BatchNormalization",
     ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"), _BN_PORTS,
     _batch_norm_attrs, False),
    ("instance_norm", "InstanceNormalization",
     ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"), _BN_PORTS,
     _instance_norm_attrs, False),
    ("layer_norm", "LayerNormalization", ("input", "normalized_shape", "weight", "bias", "eps"), _WB, _eps_attrs, False),
    ("group_norm", "GroupNormalization", ("input", "num_groups", "weight", "bias", "eps"), _WB, _eps_attrs, False),
    ("rms_norm", "RMSNormalization", ("input", "normalized_shape", "weight", "eps"), ("input", "weight"), _eps_attrs, False),
    ("local_response_norm", "LRN", _X, _X, None, False),
    ("normalize", "LpNormalization", _X, _X, None, False),
    ("cat concat concatenate", "Concat", ("*tensors", "dim"), ("*tensors",), _axis_attrs, True),
    ("stack", "Stack", ("*tensors", "dim"), ("*tensors",), _axis_attrs, False),
    ("where", "Where", ("condition", "input", "other"), ("condition", "input", "other"), None, False),
    ("masked_fill masked_fill_", "MaskedFill", ("input", "mask", "value"), ("input", "mask"), None, False),
    ("scatter scatter_ scatter_add scatter_add_ index_copy index_copy_", "ScatterElements",
     ("input", "dim", "index", "src"), ("input", "index", "src"), None, False),
    ("avg_pool1d avg_pool2d avg_pool3d lp_pool1d lp_pool2d", "AveragePool", _X, _X, None, False),
    ("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", _pool_type, ("input", "output_size"), _X, None, True),
    ("mean", "ReduceMean", _REDUCE, _X, None, True),
    ("sum", "ReduceSum", _REDUCE, _X, None, True),
    ("prod", "ReduceProd", _REDUCE, _X, None, True),
    ("norm vector_norm", "ReduceL2", _X, _X, None, True),
    ("var var_mean", "Variance", _REDUCE, _X, None, False),
    ("std std_mean", "Variance", _REDUCE, _X, _root_attrs, False),
    ("cumsum", "CumSum", ("input", "dim"), _X, None, False),
    ("logsumexp", "ReduceLogSumExp", _REDUCE, _X, None, False),
    ("amax", "ReduceMax", _REDUCE, _X, None, True),
    ("amin", "ReduceMin", _REDUCE, _X, None, True),
    ("max", _extreme("ReduceMax", "Max"), ("input", "dim"), ("input", "dim"), None, True),
    ("min", _extreme("ReduceMin", "Min"), ("input", "dim"), ("input", "dim"), None, True),
    ("maximum fmax", "Max", _XY, _XY, None, False),
    ("minimum fmin", "Min", _XY, _XY, None, False),
    ("relu relu_", "Relu", _X, _X, None, False),
    ("relu6", "Clip", _X, _X, _relu6_attrs, False),
    ("hardtanh hardtanh_", "Clip", ("input", "min_val", "max_val", "inplace"), _X, _hardtanh_attrs, False),
    ("clamp clamp_ clip clip_", "Clip", ("input", "min", "max"), _X, _clip_attrs, False),
    ("leaky_relu leaky_relu_", "LeakyRelu", ("input", "negative_slope", "inplace"), _X, _leaky_attrs, False),
    ("hardswish hardswish_", "HardSwish", _X, _X, None, False),
    ("hardsigmoid hardsigmoid_", "HardSigmoid", _X, _X, None, False),
    ("silu silu_", "Silu", _X, _X, None, False),
    ("gelu", "Gelu", _X, _X, None, False),
    ("elu elu_", "Elu", _X, _X, None, False),
    ("mish mish_", "Mish", _X, _X, None, False),
    ("selu selu_", "Selu", _X, _X, None, False),
    ("celu celu_", "Celu", _X, _X, None, False),
    ("softplus", "Softplus", _X, _X, None, False),
    ("softsign", "Softsign", _X, _X, None, False),
    ("hardshrink", "HardShrink", _X, _X, None, False),
    ("softshrink", "SoftShrink", _X, _X, None, False),
    ("tanhshrink", "TanhShrink", _X, _X, None, False),
    ("logsigmoid", "LogSigmoid", _X, _X, None, False),
    ("threshold threshold_", "Threshold", _X, _X, None, False),
    ("rrelu rrelu_", "RRelu", _X, _X, None, False),
    ("glu", "Glu", _X, _X, None, False),
    ("sigmoid sigmoid_", "Sigmoid", _X, _X, None, False),
    ("tanh tanh_", "Tanh", _X, _X, None, False),
    ("softmax", "Softmax", ("input", "dim"), _X, _axis_attrs, False),
    ("softmin", "Softmax", ("input", "dim"), _X, _axis_attrs, False),
    ("log_softmax", "LogSoftmax", ("input", "dim"), _X, _axis_attrs, False),
    ("sin", "Sin", _X, _X, None, False),
    ("cos", "Cos", _X, _X, None, False),
    ("add add_ __add__ __radd__ __iadd__", "Add", _XY, _XY, None, False),
    ("sub sub_ subtract __sub__ __isub__", "Sub", _XY, _XY, None, False),
    ("rsub __rsub__", "Sub", _XY, ("other", "input"), None, False),
    ("mul mul_ multiply __mul__ __rmul__ __imul__", "Mul", _XY, _XY, None, False),
    ("div div_ divide true_divide __div__ __truediv__ __itruediv__", "Div", _XY, _XY, None, False),
    ("__rdiv__ __rtruediv__", "Div", _XY, ("other", "input"), None, False),
    ("floor_divide __floordiv__", "FloorDiv", _XY, _XY, None, False),
    ("remainder fmod __mod__", "Mod", _XY, _XY, None, False),
    ("pow pow_ __pow__ __ipow__", "Pow", _XY, _XY, _power_attrs, False),
    ("__rpow__", "Pow", _XY, ("other", "input"), None, False),
    ("atan2", "Atan2", _XY, _XY, None, False),
    ("lerp", "Lerp", ("input", "end", "weight"), ("input", "end", "weight"), None, False),
    ("addcmul", "Addcmul", ("input", "tensor1", "tensor2"), ("input", "tensor1", "tensor2"), None, False),
    ("sqrt", "Sqrt", _X, _X, None, False), ("rsqrt", "Rsqrt", _X, _X, None, False),
    ("exp exp_", "Exp", _X, _X, None, False), ("log", "Log", _X, _X, None, False), ("abs", "Abs", _X, _X, None, False),
    ("neg __neg__", "Neg", _X, _X, None, False), ("square", "Square", _X, _X, None, False),
    ("reciprocal", "Reciprocal", _X, _X, None, False), ("erf", "Erf", _X, _X, None, False),
    ("round", "Round", _X, _X, None, False), ("floor", "Floor", _X, _X, None, False), ("ceil", "Ceil", _X, _X, None, False),
    ("asin", "Asin", _X, _X, None, False), ("acos", "Acos", _X, _X, None, False), ("atan", "Atan", _X, _X, None, False),
    ("sinh", "Sinh", _X, _X, None, False), ("cosh", "Cosh", _X, _X, None, False), ("tan", "Tan", _X, _X, None, False),
    ("log1p", "Log1p", _X, _X, None, False), ("expm1", "Expm1", _X, _X, None, False), ("sign", "Sign", _X, _X, None, False),
    ("reshape view reshape_as view_as unflatten", "Reshape", _X, _X, None, True),
    ("flatten ravel", "Flatten", _X, _X, None, True),
    ("transpose permute t swapaxes swapdims movedim moveaxis adjoint", "Transpose", _X, _X, None, True),
    ("squeeze squeeze_", "Squeeze", _X, _X, None, True),
    ("unsqueeze unsqueeze_", "Unsqueeze", _X, _X, None, True),
    ("__getitem__", _index_type, ("input", "*index"), ("input", "*index"), None, True),
    ("narrow select diagonal unfold", "Slice", _X, _X, None, True),
    ("chunk split tensor_split unbind split_with_sizes __iter__", "Split", _X, _X, None, True),
    ("expand expand_as broadcast_to", "Expand", _X, _X, None, True),
    ("repeat repeat_interleave tile", "Tile", _X, _X, None, True),
    ("pad", _pad_type, ("input", "pad", "mode", "value"), _X, None, True),
    ("max_pool1d max_pool2d max_pool3d", "MaxPool", _X, _X, None, True),
    ("max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices", "MaxPool", _X, _X, None, True),
    ("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", "MaxPool", _X, _X, None, True),
    ("max_unpool1d max_unpool2d max_unpool3d", "MaxUnpool", _X, _X, None, True),
    ("pixel_shuffle", "DepthToSpace", _X, _X, None, True), ("pixel_unshuffle", "SpaceToDepth", _X, _X, None, True),
    ("channel_shuffle native_channel_shuffle", "ChannelShuffle", _X, _X, None, True),
    ("gather", "GatherElements", ("input", "dim", "index"), ("input", "index"), None, True),
    ("index_select", "Gather", ("input", "dim", "index"), ("input", "index"), None, True),
    ("take_along_dim", "GatherElements", ("input", "indices"), ("input", "indices"), None, True),
    ("topk", "TopK", _X, _X, None, True), ("sort", "Sort", _X, _X, None, True),
    ("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout dropout_", "Dropout",
     _X, _X, None, True),
    ("flip", "Flip", _X, _X, None, True), ("roll", "Roll", _X, _X, None, True),
    ("fold", "Col2Im", _X, _X, None, False), ("im2col", "Unfold", _X, _X, None, True),
    ("tril triu", "Trilu", _X, _X, None, True),
    ("contiguous clone detach to float half bfloat16 double type type_as cpu cuda data requires_grad_ alias", "Identity",
     _X, _X, None, True),
    ("interpolate upsample", _resize_type, ("input", "size", "scale_factor", "mode"), _X, None, True),
    ("grid_sample", "GridSample", ("input", "grid"), ("input", "grid"), None, False),
]  # fmt: skip

_PROPERTIES = {"T": "Transpose", "mT": "Transpose", "H": "Transpose", "mH": "Transpose", "data": "Identity"}
_SPACES = (torch, torch.Tensor, F, torch._C._nn, torch.linalg, torch.special)


def _build() -> dict[Any, Function]:
    table: dict[Any, Function] = {}
    for names, op_type, signature, ports, attrs, aliases in _ROWS:
        for name in names.split():
            label, in_place = _described(name)
            row = Function(label, op_type, signature, ports, attrs, in_place, not aliases)
            for function in filter(callable, (getattr(space, name, None) for space in _SPACES)):
                table.setdefault(function, row)
    for name, op_type in _PROPERTIES.items():
        table[getattr(torch.Tensor, name).__get__] = Function(name, op_type, _X, _X, None, False, False)
    return table


def _described(name: str) -> tuple[str, bool]:
    """``("add", True)`` of ``__iadd__`` and ``add_``: what a function does, and whether it does so in place."""
    if name.startswith("__i") and name != "__iter__":
        return name.strip("_").removeprefix("i"), True
    if name.startswith("__r") and name != "__round__":
        return name.strip("_").removeprefix("r"), False
    return name.strip("_"), name.endswith("_") and not name.endswith("__")


def writes_first(func: Func, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a torch function writes into its first argument."""
    row = FUNCTIONS.get(func)
    in_place = _described(getattr(func, "__name__", ""))[1] if row is None else row.in_place
    return in_place or bool(kwargs.get("inplace"))


_RECURRENT = ("input", "weight_ih", "weight_hh", "bias_ih", "batch_sizes", "initial_h", "initial_c", "peephole",
              "weight_hr", "bias_hh")  # fmt: skip

FUNCTIONS: dict[Any, Function] = {
    **_build(),
    recurrent.layer: Function(
        "layer", lambda bound: str(bound["cell"]), _RECURRENT, _RECURRENT, recurrent.attributes, named_by="place"
    ),
}
#: registered operators that do what a torch function does, where libraries call them in its place
_OPERATORS = {"transformers::grouped_mm_fallback": "grouped_mm"}
_BY_LABEL = {row.label: row for row in FUNCTIONS.values() if row.label in _OPERATORS.values()}
SET_ITEM = torch.Tensor.__setitem__


def function_of(func: Any) -> Function | None:
    """The row of a function; ``None`` for functions without one."""
    row = FUNCTIONS.get(func)
    if row is None and isinstance(func, torch._ops.OpOverloadPacket):
        row = _BY_LABEL.get(_OPERATORS.get(func._qualified_op_name, ""))
    if row is None and isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        row = _OF_USERS.get(func)
        if row is None and not torch.compiler.is_compiling():  # a call that is compiled was recorded before
            row = _registered(func)
    return row


#: operators of ``torch.library`` that had a row when they were called
_OF_USERS: dict[Any, Function] = {}


def _registered(func: Any) -> Function | None:
    """The row of an operator of ``torch.library`` whose name (``mylib::gate``) another package added to the op table.

    Its ports are its tensors, in the order of its schema. Operators that write into their arguments have none.
    """
    overload = getattr(func, func.overloads()[0]) if isinstance(func, torch._ops.OpOverloadPacket) else func
    name = overload._schema.name
    if overload.namespace in ("aten", "prims") or name not in OPS or overload._schema.is_mutable:
        return None
    return _OF_USERS.setdefault(func, _of_schema(overload))


def _of_schema(func: torch._ops.OpOverload[..., Any]) -> Function:
    signature, ports, plain = [], [], []
    for argument in func._schema.arguments:
        several = str(argument.type) in ("List[Tensor]", "List[Optional[Tensor]]")
        signature.append(f"*{argument.name}" if several else argument.name)
        if several or str(argument.type) in ("Tensor", "Optional[Tensor]"):
            ports.append(signature[-1])
            if several:  # it takes the ports from here
                break
        else:
            plain.append(argument.name)
    label = func._schema.name.rpartition("::")[2]

    def attributes(bound: Arguments) -> dict[str, Any]:
        return {name: bound[name] for name in plain if isinstance(bound.get(name), (bool, int, float, str))}

    return Function(label, func._schema.name, tuple(signature), tuple(ports), attributes)


def applies_mask(row: Function, bound: Arguments, result: torch.Tensor) -> bool:
    """Whether a call makes or applies a mask: it adds or writes zeros, or numbers that a softmax turns into zero.

    Args:
        row, bound: of the call.
        result: what it returned, floating point.
    """
    kind = row.op_type(bound)
    if kind not in ("Add", "Where", "MaskedFill") or torch.compiler.is_compiling():
        return False
    values = [bound.get("value")] if kind == "MaskedFill" else [x for _, x in row.operands(bound)]
    return any(map(_is_mask, (*values, result)))


def _is_mask(x: Any) -> bool:
    if not isinstance(x, torch.Tensor):
        return isinstance(x, float | int) and (x == 0 or x < -WIDE)
    return x.is_floating_point() and bool(((x == 0) | (x < -WIDE)).all())


_SORTS = frozenset((torch.sort, torch.Tensor.sort, torch.argsort, torch.Tensor.argsort))


def settled(func: Any, args: Args, kwargs: Kwargs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call made deterministic: a sort keeps the order of equal values.

    Torch sorts them in any order where it is not asked; exported files have one that is stable. Rows that are sorted by
    a few numbers of experts would stand in another order in each.
    """
    if func not in _SORTS or kwargs.get("stable") is not None:
        return args, kwargs
    named = dict(zip(("dim", "descending"), args[1:], strict=False))
    return args[:1], {**named, **kwargs, "stable": True}


Call = tuple[Func, Args, Kwargs]

#: functions that ``torch.compile`` writes into its graph without showing them to function modes, and what it shows
_HIDDEN: dict[Any, tuple[str, str]] = {
    function.__code__: (f"torch.nn.functional.{function.__name__}", instead)
    for function, instead in (
        (F.hardswish, "torch.nn.Hardswish()"),
        (F.hardsigmoid, "torch.nn.Hardsigmoid()"),
        (F.sigmoid, "torch.sigmoid"),
        (F.tanh, "torch.tanh"),
        (F.upsample, "torch.nn.functional.interpolate"),
    )
}
#: modules whose forward is one of them: the operator that a compiler shows, and the one that writes in place
ONE_HIDDEN_CALL: dict[type, tuple[Any, Any]] = {
    nn.Hardswish: (torch.ops.aten.hardswish.default, torch.ops.aten.hardswish_.default),
    nn.Hardsigmoid: (torch.ops.aten.hardsigmoid.default, torch.ops.aten.hardsigmoid_.default),
}
#: what they do, as functions of the table
SHOWN: dict[Any, Callable[..., Any]] = {
    operator: getattr(torch._C._nn, operator._schema.name.removeprefix("aten::"))
    for operators in ONE_HIDDEN_CALL.values()
    for operator in operators
}


#: what these functions call first, by the label of its row
_FIRST_CALLS = frozenset(("hardswish", "hardsigmoid", "sigmoid", "tanh", "interpolate", "upsample"))


def hidden_call(label: str, depth: int = 8) -> tuple[str, str] | None:
    """Name of the calling function, if a compiler would hide it, and its replacement.

    Args:
        label: of the call's row in the table of functions.
        depth: frames to look at.
    """
    if label not in _FIRST_CALLS:
        return None
    frame = sys._getframe(1)
    for _ in range(depth):
        if frame.f_code in _HIDDEN:
            return _HIDDEN[frame.f_code]
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


# operators whose arguments stand in another order than those of the function, or that have more of them
_REORDERED: dict[str, tuple[Callable[..., Any], tuple[str, ...], dict[str, str]]] = {
    "batch_norm": (F.batch_norm, ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"), {}),
    "instance_norm": (
        F.instance_norm,
        ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
        {},
    ),
    "layer_norm": (F.layer_norm, ("input", "normalized_shape", "weight", "bias", "eps"), {}),
    "group_norm": (F.group_norm, ("input", "num_groups", "weight", "bias", "eps"), {}),
    "embedding": (F.embedding, ("input", "weight", "padding_idx"), {"indices": "input"}),
}  # fmt: skip
_BATCH_NORM = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
_SOFTMAX = ("input", "dim", "half_to_float")

#: core operator -> names of its arguments, and the call they stand for
_CORE: dict[str, tuple[tuple[str, ...], Callable[..., tuple[Callable[..., Any], dict[str, Any]]]]] = {
    "convolution": (
        ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups"),
        lambda **kept: _convolution(**kept),
    ),
    "_native_batch_norm_legit_no_training": (_BATCH_NORM, lambda **kept: (F.batch_norm, {**kept, "training": False})),
    "native_layer_norm": (
        ("input", "normalized_shape", "weight", "bias", "eps"),
        lambda **kept: (F.layer_norm, kept),
    ),
    "native_group_norm": (
        ("input", "weight", "bias", "N", "C", "HxW", "num_groups", "eps"),
        lambda N, C, HxW, **kept: (F.group_norm, kept),
    ),
    "_softmax": (_SOFTMAX, lambda **kept: (F.softmax, _widened(**kept))),
    "_log_softmax": (_SOFTMAX, lambda **kept: (F.log_softmax, _widened(**kept))),
}  # fmt: skip
#: core operators of the same arguments under another name
_ALIASES = {
    "_unsafe_view": "view",
    "_adaptive_avg_pool2d": "adaptive_avg_pool2d",
    "_adaptive_avg_pool3d": "adaptive_avg_pool3d",
    "max_pool2d_with_indices": "max_pool2d",
    "max_pool3d_with_indices": "max_pool3d",
}
#: operators with results after that of the function: statistics for a backward pass, indices
_SEVERAL = {
    "_native_batch_norm_legit_no_training",
    "native_layer_norm",
    "native_group_norm",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
}
_OPERATOR_SPACES = (torch, torch._C._nn, torch.Tensor)


#: operators without an equivalent function that were called; a compiler that traces a call cannot read their names
_UNCHANGED: dict[Any, bool] = {}


def as_function(func: torch._ops.OpOverload[..., Any], args: Args, kwargs: Kwargs) -> Call:
    """The call of an aten operator as a call of the equivalent torch function; unchanged where the tables have none."""
    if func in _UNCHANGED:
        return func, args, kwargs
    name = func._schema.name.removeprefix("aten::")
    if name in _REORDERED:
        function, wanted, names = _REORDERED[name]
        order = [names.get(a.name, a.name) for a in func._schema.arguments]
        bound = {**dict(zip(order, args, strict=False)), **{names.get(k, k): v for k, v in kwargs.items()}}
        return function, (), {key: bound[key] for key in wanted if key in bound}
    if func.namespace == "aten" and name in _CORE:
        arguments, translate = _CORE[name]
        function, found = translate(**dict(zip(arguments, args, strict=False)), **kwargs)
        return function, (), found
    known = _function(_ALIASES.get(name, name)) if func.namespace == "aten" else None
    if known is None:
        _UNCHANGED[func] = True
        return func, args, kwargs
    return known, args, _without_layout(name, kwargs)


def _without_layout(name: str, kwargs: Kwargs) -> dict[str, Any]:
    """Arguments of ``Tensor.to``, which lacks the arguments ``layout`` and ``pin_memory`` of its operator."""
    if name != "to" or kwargs.get("layout") is not torch.strided:
        return kwargs
    return {key: value for key, value in kwargs.items() if key not in ("layout", "pin_memory")}


def results(func: torch._ops.OpOverload[..., Any], output: Any, args: Args, kwargs: Kwargs) -> Any:
    """Results of the operator, from the ``output`` of the function called in its place."""
    if func._schema.name.removeprefix("aten::") not in _SEVERAL:
        return output
    return (output, *func(*args, **kwargs)[1:])


def _convolution(
    weight: torch.Tensor, transposed: bool, output_padding: Any, **kept: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    dims = weight.dim() - 2
    if transposed:
        function = getattr(F, f"conv_transpose{dims}d")
        return function, {"weight": weight, "output_padding": tuple(output_padding), **kept}
    return getattr(F, f"conv{dims}d"), {"weight": weight, **kept}


def _widened(half_to_float: bool, **kept: Any) -> dict[str, Any]:
    return {**kept, "dtype": torch.float32} if half_to_float else kept


@functools.cache
def _function(name: str) -> Callable[..., Any] | None:
    found = (getattr(space, name, None) for space in _OPERATOR_SPACES)
    return next((f for f in found if f is not None and (f in FUNCTIONS or f in DECOMPOSITIONS)), None)
