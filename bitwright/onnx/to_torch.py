"""ONNX operators as torch functions, for gradients and where one ONNX Runtime call per step would be slow.

A row takes the attributes of a node and gives a function of its inputs (``None`` where one is left out) to its outputs.
Operators without a row are run by ONNX Runtime, which has no gradients.

RNN, GRU and LSTM nodes are functions of torch tensors too, through which gradients flow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright.core.graph.recurrence import CELLS, Context, Variant, step, variant_of
from bitwright.core.numerics.arrays import conv_pads
from bitwright.export.qdq.markers import DOMAIN
from bitwright.export.recurrent import (
    INITIAL_C,
    INITIAL_H,
    LENGTHS,
    PROJECTION,
    Activation,
    B,
    P,
    R,
    W,
    X,
    inner_sites,
    layer_activations,
    unknown_activation,
)
from bitwright.methods.rounding.program import Quantize

_FUNCTIONS: Mapping[str, Callable[[Tensor, Any, Any], Tensor]] = {
    "Relu": lambda x, *_: x.relu(),
    "Tanh": lambda x, *_: x.tanh(),
    "Sigmoid": lambda x, *_: x.sigmoid(),
    "Softsign": lambda x, *_: F.softsign(x),
    "Softplus": lambda x, *_: F.softplus(x),
    "LeakyRelu": lambda x, alpha, _: F.leaky_relu(x, alpha),
    "ThresholdedRelu": lambda x, alpha, _: torch.where(x > alpha, x, 0.0),
    "HardSigmoid": lambda x, alpha, beta: (alpha * x + beta).clamp(0, 1),
    "Elu": lambda x, alpha, _: F.elu(x, alpha),
    "Affine": lambda x, alpha, beta: alpha * x + beta,
    "ScaledTanh": lambda x, alpha, beta: alpha * (beta * x).tanh(),
}


@dataclass(frozen=True)
class RecurrentLayer:
    """One direction of a recurrent node.

    Attributes:
        cell: ``RNN``, ``GRU`` or ``LSTM``.
        activations: of the node, alpha and beta filled in.
        variant: of the equations.
        sites: inner tensor -> site.
        there: ports of the inputs that the node has, in order.
        outputs: places of the outputs that it has.
        reverse, batch_first, clip: attributes of the node.
    """

    cell: str
    activations: tuple[Activation, ...]
    variant: Variant
    sites: Mapping[str, str]
    there: tuple[int, ...]
    outputs: tuple[int, ...]
    reverse: bool
    batch_first: bool
    clip: float | None

    @classmethod
    def of(cls, node: ir.Node) -> RecurrentLayer | None:
        """The layer of ``node``; ``None`` for bidirectional layers and unknown activation functions."""
        if node.op_type not in CELLS or node.domain not in ("", DOMAIN):
            return None
        attrs = {a.name: a.value for a in node.attributes.values() if not a.is_ref()}
        direction = str(attrs.get("direction", "forward"))
        if direction == "bidirectional" or unknown_activation(node.op_type, attrs) is not None:
            return None
        there = tuple(port for port, value in enumerate(node.inputs) if value is not None)
        return cls(
            node.op_type,
            layer_activations(node.op_type, attrs),
            replace(variant_of(attrs), projected=PROJECTION in there),
            inner_sites(node),
            there,
            tuple(i for i, value in enumerate(node.outputs) if value.name),
            direction == "reverse",
            bool(attrs.get("layout")),
            attrs.get("clip") or None,
        )

    def real(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Outputs of the node in float."""
        return self._run(tensors, {})

    def inside(self, tensors: Sequence[Tensor], quantize: Quantize) -> list[Tensor]:
        """Outputs of the node, with every inner tensor that has a site passed through ``quantize``."""
        return self._run(tensors, {name: partial(quantize, site) for name, site in self.sites.items()})

    def _run(self, tensors: Sequence[Tensor], inside: Mapping[str, Callable[[Tensor], Tensor]]) -> list[Tensor]:
        given: list[Any] = [None] * 9
        for port, tensor in zip(self.there, tensors, strict=True):
            given[port] = tensor
        if self.batch_first:
            given = [
                t.transpose(0, 1) if i in (X, INITIAL_H, INITIAL_C) and t is not None else t
                for i, t in enumerate(given)
            ]
        context = _Context(self, given, inside)
        states = self._scan(context, context.enter(given[X]), context.begin(given), given[LENGTHS])
        return [states[i].movedim(-2, 0) if self.batch_first else states[i] for i in self.outputs]

    def _scan(
        self, context: _Context, entered: Mapping[str, Tensor], state: tuple[Tensor, ...], lengths: Tensor | None
    ) -> list[Tensor]:
        """All hidden states ``[steps, 1, batch, hidden]`` and the last of every state ``[1, batch, hidden]``."""
        count = len(next(iter(entered.values())))
        hidden: list[Tensor] = [state[0]] * count
        for t in reversed(range(count)) if self.reverse else range(count):
            x = {gate: rows[t] for gate, rows in entered.items()}
            found = step(self.cell, context, x, state, self.variant, context.peepholes)
            hidden[t] = found[0]
            if lengths is not None:  # after its end a sequence keeps its state and returns zeros
                on = (lengths > t)[:, None]
                hidden[t] = torch.where(on, found[0], 0.0)
                found = tuple(torch.where(on, new, old) for new, old in zip(found, state, strict=True))
            state = found
        return [torch.stack(hidden)[:, None], *(last[None] for last in state)]


class _Context(Context):
    """Computes the steps of one run of a layer."""

    def __init__(
        self, layer: RecurrentLayer, given: Sequence[Any], inside: Mapping[str, Callable[[Tensor], Tensor]]
    ) -> None:
        self._layer, self._inside = layer, inside
        self._gates = CELLS[layer.cell].gates
        self._weight, self._projection = given[W][0], given[PROJECTION]
        self._entering, recurrent = _halves(given[B])
        self._rows = dict(zip(self._gates, given[R][0].chunk(len(self._gates)), strict=True))
        count = len(self._gates)
        parts: Sequence[Tensor | None] = [None] * count if recurrent is None else recurrent.chunk(count)
        self._biases = dict(zip(self._gates, parts, strict=True))
        thirds = () if given[P] is None else given[P][0].chunk(3)
        self.peepholes = dict(zip(("input", "output", "forget"), thirds, strict=False))

    def enter(self, x: Tensor) -> dict[str, Tensor]:
        """Gate -> what the inputs of all steps add to it, ``[steps, batch, hidden]``."""
        rows = F.linear(x, self._weight, self._entering).chunk(len(self._gates), -1)
        return dict(zip(self._gates, rows, strict=True))

    def begin(self, given: Sequence[Any]) -> tuple[Tensor, ...]:
        """The state before the first step; zeros where none is given."""
        x, rows = given[X], next(iter(self._rows.values()))
        sizes = (rows.shape[1], rows.shape[0])[: 2 if self._layer.cell == "LSTM" else 1]
        ports = (INITIAL_H, INITIAL_C)
        return tuple(
            x.new_zeros(x.shape[1], size) if given[port] is None else given[port][0]
            for port, size in zip(ports, sizes, strict=False)
        )

    def quantize(self, name: str, x: Tensor) -> Tensor:
        return self._inside[name](x) if name in self._inside else x

    def activate(self, index: int, x: Tensor) -> Tensor:
        function = self._layer.activations[index]
        return _FUNCTIONS[function.name](x, function.alpha, function.beta)

    def clip(self, x: Tensor) -> Tensor:
        return x if self._layer.clip is None else x.clamp(-self._layer.clip, self._layer.clip)

    def recur(self, h: Tensor, gates: Sequence[str]) -> list[Tensor]:
        return [F.linear(h, self._rows[gate], self._biases[gate]) for gate in gates]

    def project(self, h: Tensor) -> Tensor:
        return h if self._projection is None else F.linear(h, self._projection[0])


def _halves(biases: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The input bias and the recurrent bias of a step."""
    if biases is None:
        return None, None
    entering, recurrent = biases[0].chunk(2)
    return entering, recurrent


Attributes = Mapping[str, Any]
Inputs = Sequence[Any]  # of Tensor | None
Function = Callable[[Inputs], Sequence[Tensor]]
Row = Callable[[Attributes], Function]


def _one(function: Callable[..., Tensor]) -> Row:
    """A function of all inputs, whatever the attributes."""
    return lambda attrs: lambda inputs: [function(*inputs)]


def _with(function: Callable[..., Tensor], **defaults: Any) -> Row:
    """A function of the first input that takes attributes, with their defaults, by position."""
    return lambda attrs: lambda inputs: [function(inputs[0], *(attrs.get(k, v) for k, v in defaults.items()))]


def _padded(x: Tensor, pads: Sequence[int], value: float = 0.0) -> Tensor:
    n = len(pads) // 2
    return F.pad(x, [p for i in reversed(range(n)) for p in (pads[i], pads[n + i])], value=value) if any(pads) else x


def _conv(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        x, w = inputs[0], inputs[1]
        n = w.dim() - 2
        pads = tuple(conv_pads(attrs, x.shape[2:], w.shape[2:]))
        x, inside = (x, pads[:n]) if pads[:n] == pads[n:] else (_padded(x, pads), (0,) * n)
        function = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
        bias = inputs[2] if len(inputs) > 2 else None
        strides, dilations = (tuple(attrs.get(k, (1,) * n)) for k in ("strides", "dilations"))
        return [function(x, w, bias, strides, inside, dilations, int(attrs.get("group", 1)))]

    return run


def _conv_transpose(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        x, w = inputs[0], inputs[1]
        n = w.dim() - 2
        pads = tuple(attrs.get("pads", (0,) * 2 * n))
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1]
        bias = inputs[2] if len(inputs) > 2 else None
        strides, dilations, extra = (
            tuple(attrs.get(k, (d,) * n)) for k, d in (("strides", 1), ("dilations", 1), ("output_padding", 0))
        )
        return [function(x, w, bias, strides, pads[:n], extra, int(attrs.get("group", 1)), dilations)]

    return run


def _gemm(attrs: Attributes) -> Function:
    alpha, beta = float(attrs.get("alpha", 1.0)), float(attrs.get("beta", 1.0))

    def run(inputs: Inputs) -> Sequence[Tensor]:
        a = inputs[0].t() if attrs.get("transA") else inputs[0]
        b = inputs[1].t() if attrs.get("transB") else inputs[1]
        y = a @ b if alpha == 1 else alpha * (a @ b)
        if len(inputs) > 2 and inputs[2] is not None:
            y = y + (inputs[2] if beta == 1 else beta * inputs[2])
        return [y]

    return run


def _clip(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        lo = inputs[1] if len(inputs) > 1 else attrs.get("min")
        hi = inputs[2] if len(inputs) > 2 else attrs.get("max")
        lo, hi = (float(v) if isinstance(v, Tensor) else v for v in (lo, hi))
        return [inputs[0] if lo is None and hi is None else torch.clamp(inputs[0], lo, hi)]

    return run


def _axes(attrs: Attributes, inputs: Inputs, port: int = 1) -> tuple[int, ...] | None:
    if "axes" in attrs:
        return tuple(int(a) for a in attrs["axes"])
    given = inputs[port] if len(inputs) > port else None
    return None if given is None else tuple(int(a) for a in given.tolist())


def _squeeze(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        axes = _axes(attrs, inputs)
        return [
            inputs[0].squeeze(axes) if axes else inputs[0].squeeze()
        ]  # of an empty list, all, as ONNX Runtime does it

    return run


def _unsqueeze(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        x, axes = inputs[0], _axes(attrs, inputs) or ()
        rank = x.dim() + len(axes)
        for axis in sorted(a % rank for a in axes):
            x = x.unsqueeze(axis)
        return [x]

    return run


def _reduce(function: Callable[..., Tensor]) -> Row:
    def row(attrs: Attributes) -> Function:
        def run(inputs: Inputs) -> Sequence[Tensor]:
            axes = _axes(attrs, inputs)
            if not axes:
                if attrs.get("noop_with_empty_axes"):
                    return [inputs[0]]
                axes = tuple(range(inputs[0].dim()))
            return [function(inputs[0], axes, bool(attrs.get("keepdims", 1)))]

        return run

    return row


def _reshape(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        x, wanted = inputs[0], inputs[1].tolist()
        copies = not attrs.get("allowzero")
        return [x.reshape([x.shape[i] if n == 0 and copies else int(n) for i, n in enumerate(wanted)])]

    return run


def _flatten(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        x = inputs[0]
        axis = int(attrs.get("axis", 1))
        axis = axis + x.dim() if axis < 0 else axis
        rows = 1
        for n in x.shape[:axis]:
            rows *= int(n)
        return [x.reshape(rows, -1)]

    return run


def _transpose(attrs: Attributes) -> Function:
    return lambda inputs: [inputs[0].permute(*attrs.get("perm", range(inputs[0].dim() - 1, -1, -1)))]


def _slice(attrs: Attributes) -> Function | None:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        x = inputs[0]
        starts, ends = (inputs[i].tolist() for i in (1, 2)) if len(inputs) > 2 else (attrs["starts"], attrs["ends"])
        axes = _axes(attrs, inputs, 3) or tuple(range(len(starts)))
        steps = inputs[4].tolist() if len(inputs) > 4 and inputs[4] is not None else [1] * len(starts)
        for start, end, axis, stride in zip(starts, ends, axes, steps, strict=True):
            size = int(x.shape[axis])
            stop = None if stride < 0 and end < -size else int(end)
            chosen = range(size)[slice(int(start), stop, int(stride))]
            x = x.index_select(axis, torch.arange(chosen.start, chosen.stop, chosen.step, device=x.device))
        return [x]

    return run


def _split(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        x, axis = inputs[0], int(attrs.get("axis", 0))
        sizes = inputs[1].tolist() if len(inputs) > 1 and inputs[1] is not None else attrs.get("split")
        if sizes is None:
            n = int(attrs["outputs"])
            part = -(-int(x.shape[axis]) // n)
            sizes = [part] * (n - 1) + [int(x.shape[axis]) - part * (n - 1)]
        return list(x.split([int(s) for s in sizes], axis))

    return run


def _gather(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        x, index, axis = inputs[0], inputs[1].long(), int(attrs.get("axis", 0))
        axis = axis + x.dim() if axis < 0 else axis
        index = torch.where(index < 0, index + x.shape[axis], index)
        shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
        return [x.index_select(axis, index.reshape(-1)).reshape(shape)]

    return run


def _expand(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        shape = torch.broadcast_shapes(tuple(inputs[0].shape), tuple(int(n) for n in inputs[1].tolist()))
        return [inputs[0].expand(shape)]

    return run


def _pad(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        pads = inputs[1].tolist() if len(inputs) > 1 else attrs["pads"]
        value = inputs[2] if len(inputs) > 2 and inputs[2] is not None else attrs.get("value", 0.0)
        return [_padded(inputs[0], [int(p) for p in pads], float(value))]

    return run


def _windows(x: Tensor, attrs: Attributes) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    kernel = tuple(attrs["kernel_shape"])
    ones = (1,) * len(kernel)
    return (
        kernel,
        tuple(attrs.get("strides", ones)),
        tuple(attrs.get("dilations", ones)),
        conv_pads(attrs, x.shape[2:], kernel),
    )


def _max_pool(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        kernel, strides, dilations, pads = _windows(inputs[0], attrs)
        n = len(kernel)
        function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
        fits = pads[:n] == pads[n:] and all(
            2 * p <= k for p, k in zip(pads, kernel, strict=False)
        )  # else torch refuses
        x, inside = (inputs[0], pads[:n]) if fits else (_padded(inputs[0], pads, float("-inf")), (0,) * n)
        return [function(x, kernel, strides, inside, dilations, bool(attrs.get("ceil_mode", 0)))]

    return run


def _average_pool(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        kernel, strides, _, pads = _windows(inputs[0], attrs)
        function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
        y = function(_padded(inputs[0], pads), kernel, strides)
        if any(pads) and not attrs.get("count_include_pad", 0):
            y = y / function(_padded(torch.ones_like(inputs[0]), pads), kernel, strides)
        return [y]

    return run


def _global_average(inputs: Inputs) -> Sequence[Tensor]:
    return [inputs[0].mean(tuple(range(2, inputs[0].dim())), keepdim=True)]


def _softmax(function: Callable[..., Tensor]) -> Row:
    def row(attrs: Attributes) -> Function:
        def run(inputs: Inputs) -> Sequence[Tensor]:
            x = inputs[0]
            if attrs["opset"] >= 13:
                return [function(x, int(attrs.get("axis", -1)))]
            (flat,) = _flatten({"axis": attrs.get("axis", 1)})(inputs)  # all axes from there on
            return [function(flat, 1).reshape(x.shape)]

        return run

    return row


def _batch_norm(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        x, scale, shift, mean, variance = inputs[:5]
        return [F.batch_norm(x, mean, variance, scale, shift, False, 0.0, float(attrs.get("epsilon", 1e-5)))]

    return run


def _layer_norm(attrs: Attributes) -> Function:
    def run(inputs: Inputs) -> Sequence[Tensor]:
        axis = int(attrs.get("axis", -1))
        bias = inputs[2] if len(inputs) > 2 else None
        return [F.layer_norm(inputs[0], inputs[0].shape[axis:], inputs[1], bias, float(attrs.get("epsilon", 1e-5)))]

    return run


_TYPES = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64}


def _cast(attrs: Attributes) -> Function:
    dtype = _TYPES[int(attrs["to"])]
    return lambda inputs: [inputs[0].to(dtype)]


def _gelu(attrs: Attributes) -> Function:
    return lambda inputs: [F.gelu(inputs[0], approximate=str(attrs.get("approximate", "none")))]


def _pow(x: Tensor, y: Tensor) -> Tensor:
    return x.pow(float(y)) if y.numel() == 1 else x.pow(y)


ROWS: dict[str, Row] = {
    "Conv": _conv, "ConvTranspose": _conv_transpose, "Gemm": _gemm, "MatMul": _one(torch.matmul),
    "Relu": _one(torch.relu), "Clip": _clip, "LeakyRelu": _with(F.leaky_relu, alpha=0.01),
    "Sigmoid": _one(torch.sigmoid), "Tanh": _one(torch.tanh), "Softplus": _one(F.softplus), "Gelu": _gelu,
    "Elu": _with(F.elu, alpha=1.0), "Selu": _one(F.selu), "HardSwish": _one(F.hardswish), "Mish": _one(F.mish),
    "HardSigmoid": lambda attrs: lambda inputs: [
        torch.clamp(inputs[0] * float(attrs.get("alpha", 0.2)) + float(attrs.get("beta", 0.5)), 0, 1)
    ],
    "PRelu": _one(lambda x, slope: torch.where(x < 0, x * slope, x)),
    "Add": _one(torch.add), "Sub": _one(torch.sub), "Mul": _one(torch.mul), "Pow": _one(_pow),
    "Div": _one(lambda x, y: x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")),
    "Sqrt": _one(torch.sqrt), "Exp": _one(torch.exp), "Log": _one(torch.log), "Abs": _one(torch.abs),
    "Neg": _one(torch.neg), "Reciprocal": _one(torch.reciprocal), "Erf": _one(torch.erf), "Sin": _one(torch.sin),
    "Cos": _one(torch.cos), "Identity": _one(lambda x: x), "Where": _one(torch.where),
    "Softmax": _softmax(torch.softmax), "LogSoftmax": _softmax(torch.log_softmax),
    "Concat": lambda attrs: lambda inputs: [torch.cat(list(inputs), int(attrs["axis"]))],
    "Reshape": _reshape, "Flatten": _flatten, "Transpose": _transpose, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze,
    "Slice": _slice, "Split": _split, "Gather": _gather, "Expand": _expand, "Pad": _pad,  # type: ignore[dict-item]
    "MaxPool": _max_pool, "AveragePool": _average_pool, "GlobalAveragePool": lambda attrs: _global_average,
    "ReduceMean": _reduce(torch.mean), "ReduceSum": _reduce(torch.sum), "ReduceMax": _reduce(torch.amax),
    "ReduceMin": _reduce(torch.amin),
    "BatchNormalization": _batch_norm, "LayerNormalization": _layer_norm, "Cast": _cast,
    "Shape": lambda attrs: lambda inputs: [torch.tensor(inputs[0].shape[attrs.get("start", 0) : attrs.get("end")])],
}  # fmt: skip


def as_torch(op_type: str, attrs: Attributes, outputs: int) -> Function | None:
    """``op_type`` as a torch function; ``None`` without a row for it and these attributes.

    Args:
        attrs: of the node, and its ``opset``.
        outputs: how many outputs are read.
    """
    row = ROWS.get(op_type)
    refused = (
        row is None
        or (outputs > 1 and op_type != "Split")
        or (op_type == "Pad" and attrs.get("mode", "constant") != "constant")
        or (op_type == "Cast" and int(attrs["to"]) not in _TYPES)
        or (op_type == "BatchNormalization" and attrs.get("training_mode"))
        or (op_type == "ConvTranspose" and _odd_transpose(attrs))
        or (op_type in ("AveragePool", "MaxPool") and _odd_pool(op_type, attrs))
    )
    return None if refused or row is None else row(attrs)


def _odd_transpose(attrs: Attributes) -> bool:
    pads = tuple(attrs.get("pads", ()))
    uneven = pads[: len(pads) // 2] != pads[len(pads) // 2 :]
    return uneven or "output_shape" in attrs or str(attrs.get("auto_pad", "NOTSET")).startswith("SAME")


def _odd_pool(op_type: str, attrs: Attributes) -> bool:
    dilated = op_type == "AveragePool" and any(d != 1 for d in attrs.get("dilations", ()))
    return bool(attrs.get("ceil_mode")) or bool(attrs.get("storage_order")) or dilated
