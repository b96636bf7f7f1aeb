"""Layers for post-training methods: stored weight and bias, input and output channels, and groups that share channels.

A *group* is a value between layers together with everything that hands its channels on unchanged except for a
positive factor. Multiply channel ``c`` of all that produces it by ``a[c]``, divide the matching input channel of
all that consumes it by ``a[c]``, and the model computes what it did before. Equalization and smoothing choose
``a``; they find their groups here.

A batch norm in inference is ``y = scale * x + shift`` per channel. A layer before it absorbs both into its
weight and bias; a layer after it does where the shift of its input is a constant shift of its output (Jacob et al. 2018,
arXiv:1712.05877, section 3.2). Arithmetic on parameters is float64 inside.

Changes are applied in parts that must each leave the function unchanged; a part that fails the check is found by
bisection (:func:`sift`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from bitwright.core.graph.attention import data_readers, sole_reader
from bitwright.core.graph.graph import Graph, Op, Value
from bitwright.core.graph.operators import TRAITS, op_row
from bitwright.core.graph.recurrence import CELLS
from bitwright.core.simulation.float_model import Clamp, Edit, FloatModel, SetParam, Undo
from bitwright.errors import ModelError

Array = NDArray[Any]
Attrs = Mapping[str, Any]

#: operator types that can absorb a batch norm

logger = logging.getLogger("bitwright")


def bn_affine(weight: Array | None, bias: Array | None, mean: Array, var: Array, eps: float) -> tuple[Array, Array]:
    """Scale and shift per channel of a batch norm in inference: ``scale * x + shift``.

    Args:
        weight, bias: gamma and beta, shape [C]; ``None`` stands for 1 and 0.
        mean, var: running statistics, shape [C].
        eps: added to the variance.

    Returns:
        ``scale``, ``shift``: float64, shape [C].

    Raises:
        ModelError: a parameter is NaN or infinite, or ``var + eps`` is not positive; names the first such
            channel.

    Example:
        >>> bn_affine(np.float32([2]), None, np.float32([3]), np.float32([4]), 0.0)
        (array([1.]), array([-3.]))
    """
    mean, var = np.asarray(mean, np.float64), np.asarray(var, np.float64)
    gamma = np.ones_like(mean) if weight is None else np.asarray(weight, np.float64)
    beta = np.zeros_like(mean) if bias is None else np.asarray(bias, np.float64)
    for name, value in (("weight", gamma), ("bias", beta), ("mean", mean), ("variance", var)):
        _refuse_channel(~np.isfinite(value), value, name)
    _refuse_channel(var + eps <= 0, var, f"variance with epsilon {eps:g}")
    scale = gamma / np.sqrt(var + eps)
    return scale, beta - mean * scale


def _refuse_channel(bad: Array, value: Array, name: str) -> None:
    if bad.any():
        channel = int(np.argmax(bad))
        raise ModelError(
            "batch norm",
            f"its {name} is {value[channel]:g} in channel {channel}",
            "find where the statistics or parameters went wrong in training, or estimate the statistics anew",
        )


def fold_backward(
    op_type: str, attrs: Attrs, W: Array, b: Array | None, scale: Array, shift: Array
) -> tuple[Array, Array | None]:
    """Weight and bias of a layer that absorb ``scale * y + shift`` applied to its output ``y``.

    ============== =========================== ===============================
    type           weight                      output channel of a weight
    ============== =========================== ===============================
    Conv           [out, in/group, *kernel]    axis 0
    ConvTranspose  [in, out/group, *kernel]    group of axis 0, then axis 1
    Gemm           [out, in] if transB         axis 0, else axis 1 of [in, out]
    MatMul         [in, out], at the right     axis 1
    ============== =========================== ===============================

    Args:
        op_type, attrs: the layer; ``group``, ``transB``, ``beta`` are read.
        W, b: its parameters; ``b`` of shape [out] or ``None``.
        scale, shift: shape [out].

    Returns:
        ``W'``, float64, shape of ``W``, and ``b'``, float64, shape [out]; ``None`` when there was no bias and
        ``shift`` is zero, so that none is needed.

    Raises:
        ModelError: ``op_type`` is none of the four, or the channel counts differ.
    """
    axes = channel_axes(op_type, attrs, W.shape)
    _same_channels(op_type, "output", scale, axes.outputs)
    folded = _times(axes.split(W), axes.over_outputs(scale)).reshape(W.shape)
    if b is None and not np.any(shift):
        return folded, None
    bias = np.zeros(axes.outputs) if b is None else np.asarray(b, np.float64)
    return folded, bias * scale + shift / float(attrs.get("beta", 1.0))


def fold_forward(
    op_type: str, attrs: Attrs, W: Array, b: Array | None, scale: Array, shift: Array
) -> tuple[Array, Array | None]:
    """Weight and bias of a layer that absorb ``scale * x + shift`` applied to its input ``x``.

    The shift becomes a constant per output channel, which it only is where every output sees the whole
    kernel: see :func:`forward_obstacle`. Arguments and results are those of :func:`fold_backward`, with
    ``scale``, ``shift`` of shape [in]; ``alpha`` is read too.

    Raises:
        ModelError: ``op_type`` is none of the four, the channel counts differ, or the shift would be no
            constant.
    """
    axes = channel_axes(op_type, attrs, W.shape)
    _same_channels(op_type, "input", scale, axes.inputs)
    obstacle = forward_obstacle(op_type, attrs, W.shape[2:], shift)
    if obstacle:
        raise ModelError(op_type, obstacle, "keep this batch norm; only one without a shift can be folded here")
    split = axes.split(W)
    folded = _times(split, axes.over_inputs(scale)).reshape(W.shape)
    if not np.any(shift):
        return folded, None if b is None else np.asarray(b, np.float64)
    constant = axes.sum_over_inputs(split * axes.over_inputs(shift))
    bias = np.zeros(axes.outputs) if b is None else np.asarray(b, np.float64)
    return folded, bias + constant * float(attrs.get("alpha", 1.0)) / float(attrs.get("beta", 1.0))


def forward_obstacle(op_type: str, attrs: Attrs, kernel: Sequence[int], shift: Array) -> str | None:
    """The reason why a shift of the layer's input does not shift its output by a constant; ``None`` where it does.

    Zeros of the padding are not shifted, and the border outputs of a transposed convolution see fewer inputs.
    """
    if op_type not in ("Conv", "ConvTranspose") or not np.any(shift):
        return None
    single = all(k == 1 for k in kernel)
    padded = any(attrs.get("pads") or ()) or (str(attrs.get("auto_pad", "NOTSET")).startswith("SAME") and not single)
    if op_type == "Conv":
        return "it pads with zeros, which the shift does not reach" if padded else None
    strided = any(s != 1 for s in attrs.get("strides") or ()) or any(attrs.get("output_padding") or ())
    if single and not strided and not padded:
        return None
    return "outputs of a transposed convolution see different kernel parts, so the shift is not a constant"


@dataclass(frozen=True)
class ChannelAxes:
    """A weight as [group, a, b, kernel]: one of a and b counts input, the other output channels of a group.

    Attributes:
        group, inputs, outputs: of the layer; both counts over all groups.
        outputs_first: a counts the output channels.
    """

    group: int
    inputs: int
    outputs: int
    outputs_first: bool

    def split(self, W: Array) -> Array:
        """``W`` in that shape."""
        first, second = self.inputs // self.group, self.outputs // self.group
        if self.outputs_first:
            first, second = second, first
        return W.reshape(self.group, first, second, -1)

    def over_outputs(self, values: Array) -> Array:
        """One number per output channel, shape [outputs], to multiply the split weight with."""
        shape = (self.group, -1, 1, 1) if self.outputs_first else (self.group, 1, -1, 1)
        return np.asarray(values, np.float64).reshape(shape)

    def over_inputs(self, values: Array) -> Array:
        """One number per input channel, shape [inputs], to multiply the split weight with."""
        shape = (self.group, 1, -1, 1) if self.outputs_first else (self.group, -1, 1, 1)
        return np.asarray(values, np.float64).reshape(shape)

    def sum_over_inputs(self, split: Array) -> Array:
        """A split weight summed over kernel and inputs, shape [outputs]."""
        total: Array = split.sum(axis=(2, 3) if self.outputs_first else (1, 3)).reshape(-1)
        return total


def channel_axes(op_type: str, attrs: Attrs, shape: Sequence[int]) -> ChannelAxes:
    """The channels of a layer whose weight has ``shape``; see the table of :func:`fold_backward`."""
    group = int(attrs.get("group", 1))
    if op_type == "Conv":
        return ChannelAxes(group, shape[1] * group, shape[0], True)
    if op_type == "ConvTranspose":
        return ChannelAxes(group, shape[0], shape[1] * group, False)
    if op_type == "Gemm" and attrs.get("transB"):
        return ChannelAxes(1, shape[1], shape[0], True)
    if op_type in ("Gemm", "MatMul"):
        return ChannelAxes(1, shape[0], shape[1], False)
    raise ModelError(
        op_type,
        "a batch norm cannot be folded into this operator",
        f"fold into one of {', '.join(sorted(TRAITS['layer']))}",
    )


def _times(split: Array, factors: Array) -> Array:
    """The float64 product; casting first is twice as fast as numpy's mixed product."""
    wide = split.astype(np.float64)
    wide *= factors
    return wide


def _same_channels(op_type: str, side: str, scale: Array, channels: int) -> None:
    if scale.shape != (channels,):
        raise ModelError(
            op_type,
            f"it has {channels} {side} channels, the batch norm {scale.size}",
            "fold only a batch norm of the same channels",
        )


def unit_variance(eps: float, dtype: str = "float32") -> float:
    """A running variance whose sum with ``eps`` is exactly 1, so that a batch norm divides by exactly 1.

    Exact for ``float32`` and ``float64``. Narrower dtypes have no such number as a rule: they get the nearest
    one to ``1 - eps``, which is closer to exact than their own rounding.

    Example:
        >>> v = np.float32(unit_variance(1e-5))
        >>> v + np.float32(1e-5) == 1
        np.True_
    """
    kind = np.dtype(dtype).type if dtype in ("float64", "float16") else np.float32
    step, one = kind(eps), kind(1)
    low = high = kind(1 - eps)
    for _ in range(4):
        for candidate in (low, high):
            if kind(candidate + step) == one:
                return float(candidate)
        low, high = np.nextafter(low, kind(-1)), np.nextafter(high, kind(2))
    return float(kind(1 - eps))


Kind = Literal["layer", "norm", "embedding"]

_BOTH_PORTS = frozenset({"Mul"})
_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
_SELECTS = frozenset({"Slice", "Gather"})
#: operators that pass on elements as they are, of all or of some rows
MOVES = frozenset((*TRAITS["identity"], *TRAITS["reshape"], "Cast", *_SELECTS))


@dataclass(frozen=True)
class Layer:
    """An operator with a stored weight.

    Attributes:
        op: its name in the graph.
        type, attrs: canonical type and attributes.
        kind: ``layer`` (sums over its input channels), ``norm`` (a stored factor per channel of the last axis) or
            ``embedding`` (rows of a table).
        weight, bias: names of the parameters.
        axes: how the axes of the weight count channels; for norms and embeddings only ``outputs`` means something.
        rank: of the output.
        output: the value after the bias, which in ONNX an ``Add`` of its own may add.
        adder: that Add.
        offset: what a norm adds to its parameter before it multiplies by it: 1 for norms that multiply by ``1 + weight``.
    """

    op: str
    type: str
    attrs: Mapping[str, Any] = field(repr=False, compare=False)
    kind: Kind
    weight: str
    bias: str | None
    axes: ChannelAxes
    rank: int
    output: str
    adder: str | None = None
    offset: float = 0.0

    @property
    def channel_axis(self) -> int:
        """The axis of the output that holds its channels."""
        return 1 if self.type in ("Conv", "ConvTranspose") else self.rank - 1

    def times_outputs(self, W: Array, a: Array) -> Array:
        """The weight with output channel c multiplied by ``a[c]``, float64."""
        if self.kind != "layer":
            return (np.asarray(W, np.float64) + self.offset) * a - self.offset
        return _times(self.axes.split(W), self.axes.over_outputs(a)).reshape(W.shape)

    def times_inputs(self, W: Array, a: Array) -> Array:
        """The weight with input channel c multiplied by ``a[c]``, float64."""
        return _times(self.axes.split(W), self.axes.over_inputs(a)).reshape(W.shape)

    def output_range(self, W: Array) -> Array:
        """Largest magnitude of the weight per output channel, shape [outputs]."""
        if self.kind != "layer":
            return np.abs(W + self.offset).reshape(-1, self.axes.outputs).max(axis=0, initial=0.0)
        return self._largest(W, (2, 3) if self.axes.outputs_first else (1, 3))

    def input_range(self, W: Array) -> Array:
        """Largest magnitude of the weight per input channel, shape [inputs]."""
        return self._largest(W, (1, 3) if self.axes.outputs_first else (2, 3))

    def _largest(self, W: Array, axes: tuple[int, int]) -> Array:
        found: Array = np.abs(self.axes.split(W)).max(axis=axes, initial=0.0).reshape(-1)
        return found


class Layers:
    """The layers of a graph whose parameters a method may change, and the reasons of the others.

    Args:
        graph: where they are.
        view: the model, which says what constants hold and how axes are exchanged: by this, norms that multiply by
            ``1 + weight`` are found, and layers after a transposition.

    Attributes:
        graph, view: it was read from.
        of: op name -> layer.
        refused: op name -> reason, for operators that would be layers.
        shared: parameter -> why it is not one layer's own.
    """

    def __init__(self, graph: Graph, view: FloatModel | None = None) -> None:
        self.graph, self.view = graph, view
        self._computed = Counter(
            source for v in graph.values.values() if graph.consumers(v.name) for source in v.sources
        )  # parameter -> constants computed from it that something reads
        self.of: dict[str, Layer] = {}
        self.refused: dict[str, str] = {}
        self.shared = _shared_parameters(graph)
        for op in graph.ops:
            found = self._read(op)
            if isinstance(found, Layer):
                self.of[op.name] = found
            elif found is not None:
                self.refused[op.name] = found
        self.by_output = {layer.output: layer for layer in self.of.values()}

    def why_not_private(self, layer: Layer) -> str | None:
        """The reason why a parameter of ``layer`` is shared."""
        for name in (
            None if layer.offset else layer.weight,
            layer.bias,
        ):  # of one plus a weight, reading it has found out
            if name is not None and name in self.shared:
                return self.shared[name]
        return None

    # -- reading an operator

    def _read(self, op: Op) -> Layer | str | None:
        if op.type in TRAITS["layer"]:
            return self._read_layer(op)
        if op.type in _NORMS or op.type == "Mul":
            return self._read_norm(op)
        return self._read_embedding(op) if op.type == "Embedding" else None

    def _read_layer(self, op: Op) -> Layer | str | None:
        values = self.graph.values
        weight = values.get(_at(op, 1) or "")
        if weight is None or not weight.is_static:
            return None  # a product of two activations
        if weight.kind != "param":
            return f"its weight {weight.name} is computed in the model, not a stored parameter"
        if op.also or op.attrs.get("varies"):
            return "it runs several times in one forward, on different values or parameters"
        if op.attrs.get("transA") or len(weight.shape) < 2 or (op.type == "MatMul" and len(weight.shape) != 2):
            return f"its weight of shape {weight.shape} is not applied to the last axis of its input"
        axes = channel_axes(op.type, op.attrs, weight.shape)
        rank = len(values[op.outputs[0]].shape)
        bias, output, adder = self._bias(op, axes.outputs)
        if isinstance(bias, _Odd):
            return bias.reason
        return Layer(op.name, op.type, op.attrs, "layer", weight.param or weight.name, bias, axes, rank, output, adder)

    def _bias(self, op: Op, channels: int) -> tuple[str | _Odd | None, str, str | None]:
        """Name of the bias, the value after it, and the Add that adds it."""
        values, output = self.graph.values, op.outputs[0]
        name = _at(op, 2)
        if name is None:
            return self._added(output, channels) if op.type in ("MatMul", "Gemm") else (None, output, None)
        value = values[name]
        if value.kind != "param" or value.shape not in ((channels,), (1, channels)) or op.type == "MatMul":
            return _Odd(f"its bias {name} is not a stored parameter with one entry per channel"), output, None
        return value.param or name, output, None

    def _read_norm(self, op: Op) -> Layer | str | None:
        """A norm, or the product by a stored vector that ends one."""
        values = self.graph.values
        ports = [p for p, name in enumerate(op.inputs) if name is not None and values[name].kind == "param"]
        weight, offset = self._norm_weight(op, ports)
        if weight is None or op.also or len(weight.shape) != 1 or not op.outputs:
            return None
        shape, channels = values[op.outputs[0]].shape, weight.shape[0]
        if len(shape) < 2 or channels < 2 or shape[-1] not in (channels, -1):
            return None
        bias, output, adder = self._norm_bias(op, ports, channels)
        axes = ChannelAxes(1, channels, channels, False)
        name = (self._plus_one(weight) if offset else weight.param) or weight.name
        return Layer(op.name, op.type, op.attrs, "norm", name, bias, axes, len(shape), output, adder, offset)

    def _norm_weight(self, op: Op, ports: list[int]) -> tuple[Value | None, float]:
        """The factor of a norm, and the constant added to its parameter."""
        read = [self.graph.values[name] for name in op.inputs if name is not None]
        if op.type != "Mul":
            return (self.graph.values[str(op.inputs[1])] if 1 in ports else None), 0.0
        if ports:
            return self.graph.values[str(op.inputs[ports[0]])], 0.0
        return next((value for value in read if self._plus_one(value)), None), 1.0

    def _plus_one(self, value: Value) -> str | None:
        """The parameter ``p`` of a constant ``1 + p``, where nothing else uses it."""
        if self.view is None or value.kind != "constant" or len(value.shape) != 1:
            return None
        held = (self.graph.values.get(source) for source in value.sources)
        alike = [v for v in held if v is not None and v.shape == value.shape]
        found = self.view.constant(value.name) if len(alike) == 1 else None
        if found is None or self._computed[alike[0].name] != 1 or self.graph.consumers(alike[0].name):
            return None
        weight = self.view.param(name := alike[0].param or alike[0].name)
        return name if np.all(np.abs(found - weight - 1) <= 1e-5 * (1 + np.abs(weight))) else None

    def _norm_bias(self, op: Op, ports: list[int], channels: int) -> tuple[str | None, str, str | None]:
        """The bias of a norm, its output with the bias added, and the operator that adds it."""
        output = op.outputs[0]
        if op.type != "Mul":
            return self.graph.values[str(op.inputs[2])].param if 2 in ports else None, output, None
        return self._added(output, channels)

    def _added(self, value: str, channels: int) -> tuple[str | None, str, str | None]:
        """The stored bias that the only reader of a value adds to it, the value after that, and the Add."""
        add = sole_reader(self.graph, value)
        bias = None if add is None else _added_bias(self.graph, add, value, channels)
        return (None, value, None) if bias is None or add is None else (bias, add.outputs[0], add.name)

    def _read_embedding(self, op: Op) -> Layer | str | None:
        weight = self.graph.values.get(_at(op, 0) or "")
        if weight is None or len(weight.shape) != 2:
            return None
        if weight.kind != "param" or op.also:
            return "its table is computed in the model, or read in several places of the forward"
        axes = ChannelAxes(1, weight.shape[0], weight.shape[1], False)
        rank = len(self.graph.values[op.outputs[0]].shape)
        name = weight.param or weight.name
        return Layer(op.name, op.type, op.attrs, "embedding", name, None, axes, rank, op.outputs[0])


@dataclass(frozen=True)
class _Odd:
    reason: str


def holds_layer_weight(graph: Graph, op: str, role: str, port: int) -> bool:
    """Whether an operand is the stored weight of a layer: of a matrix product, a convolution, a recurrent layer.

    Args:
        graph: of the model.
        op: name of the operator that reads it.
        role: of its site.
        port: where it is read.
    """
    kind = graph.op(op).type
    if kind in CELLS:
        return role == "weight"
    row = op_row(kind)
    return role in ("weight", "constant") and row.kind == "compute" and port == row.weight


def _at(op: Op, port: int) -> str | None:
    return op.inputs[port] if port < len(op.inputs) else None


def _added_bias(graph: Graph, add: Op, value: str, channels: int) -> str | None:
    """The stored bias that ``add`` adds to ``value``."""
    if add.type != "Add" or len(add.inputs) != 2 or add.also or value not in add.inputs:
        return None
    other = graph.values.get(add.inputs[1 - add.inputs.index(value)] or "")
    if other is None or other.kind != "param" or other.shape != (channels,):
        return None
    return other.param or other.name


def _shared_parameters(graph: Graph) -> dict[str, str]:
    """Parameters read in several places, returned by the model, or used to compute something that is read; and the reason."""
    found: dict[str, str] = {}
    for value in graph.values.values():
        readers, name = graph.consumers(value.name), value.param or value.name
        if value.kind != "param":
            found.update(_shared_sources(graph, value))
        elif len(readers) > 1:
            found[name] = _read_elsewhere([op for op, _ in readers], name)
        elif graph.is_output(value.name):
            found[name] = f"the model's output also reads {name}"
    return found


def _shared_sources(graph: Graph, value: Value) -> Iterator[tuple[str, str]]:
    """Yield the sources of ``value`` that other operators read too, with the reason."""
    readers = graph.consumers(value.name)
    if not readers and not graph.is_output(value.name):
        return
    reader = readers[0][0].name if readers else "the model's output"
    for source in value.sources:
        held = graph.values.get(source)
        if held is not None and (graph.consumers(held.name) or len(value.sources) > 1):
            yield source, f"{reader} also reads {source}"


def _read_elsewhere(readers: list[Op], parameter: str) -> str:
    """The other owners of a parameter: other layers, or the same module at other places."""
    module, places = readers[0].module, dict.fromkeys(op.name for op in readers)
    if module in places and all(op.module == module for op in readers):
        return f"{module} is used at {len(places)} places of the model, which share {parameter}"
    return f"{readers[1].name} also reads {parameter}"


# ------------------------------------------------------------------------------------------------ groups


@dataclass(frozen=True)
class Group:
    """Layers that share the channels of one value.

    Attributes:
        producers: layers whose output channels these are.
        consumers: ``(layer, repeat)``: layers whose input channels these are, each channel ``repeat`` times in a row
            (a flattened image).
        clips: operators between them that cut at fixed bounds, each with the axis of the channels.
        channels: how many.
        block: channels that are repeated together: the size of a head where several query heads read one value head.
    """

    _as_text = True

    producers: tuple[Layer, ...]
    consumers: tuple[tuple[Layer, int], ...]
    clips: tuple[tuple[Op, int], ...]
    channels: int
    block: int = 1

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Producers, then consumers."""
        return (*self.producers, *(layer for layer, _ in self.consumers))

    def spread(self, values: Array, repeat: int) -> Array:
        """One number per channel, shape [channels], as one per input of a consumer, shape [channels * repeat]."""
        return np.repeat(np.asarray(values).reshape(-1, self.block), repeat, axis=0).reshape(-1)

    def gathered(self, values: Array, repeat: int) -> Array:
        """One number per input of a consumer, shape [channels * repeat], in a row per channel: [channels, repeat]."""
        blocks = np.asarray(values).reshape(-1, repeat, self.block)
        return blocks.transpose(0, 2, 1).reshape(self.channels, repeat)

    def __str__(self) -> str:
        names = [" + ".join(layer.op for layer in part) for part in (self.producers, [c for c, _ in self.consumers])]
        return " -> ".join(names)


@dataclass(frozen=True)
class Refused:
    """A layer that a method leaves alone, and why."""

    op: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.reason}"


def log_refused(refused: Sequence[Refused], done: str, *, changed: bool = True, without: str = "") -> None:
    """Log the layers that a method leaves alone, and warn if it changed nothing.

    Args:
        refused: with the reasons.
        done: what the method does to others: ``"rotated"``.
        changed: whether it changed anything.
        without: why nothing is changed where nothing is refused either.
    """
    for line in refused:
        logger.info("not %s: %s", done, line)
    if not changed:
        logger.warning("nothing is %s%s", done, f": {refused[0]}" if refused else without)


def find_groups(
    layers: Layers, starts: Iterable[Layer], ties: frozenset[str] = frozenset()
) -> tuple[list[Group], list[Refused]]:
    """The groups that begin at the outputs of ``starts``, and the reasons of those that begin none.

    Args:
        layers: of the graph.
        starts: layers, each looked at once.
        ties: operators whose inputs and output share channels, as the two sides of an ``Add`` do. Without any, such
            an operator is a reason to refuse: scaling one side of a residual addition changes the sum.

    Returns:
        Groups in execution order of their first producer; every one of ``starts`` is in one group or one refusal.
        Linear in the graph.
    """
    groups: list[Group] = []
    refused: list[Refused] = []
    seen: set[str] = set()
    for start in starts:
        if start.op in seen:
            continue
        walk = _Walk(layers, ties)
        found = walk.run(start)
        seen.update(layer.op for layer in walk.producers)
        if isinstance(found, Group):
            groups.append(found)
        else:
            refused.append(Refused(start.op, found))
    return groups, refused


class _Walk:
    """The closure of one value over operators that pass channels on."""

    def __init__(self, layers: Layers, ties: frozenset[str]) -> None:
        self.layers, self.graph, self.ties = layers, layers.graph, ties
        self.producers: list[Layer] = []
        self.consumers: list[tuple[Layer, int]] = []
        self.clips: list[tuple[Op, int]] = []
        self.axis: dict[str, int] = {}
        self.open: list[str] = []

    def run(self, start: Layer) -> Group | str:
        """The group, or the first reason against it."""
        self.channels = start.axes.outputs
        self.producers.append(start)
        self._enter(start.output, start.channel_axis)
        reason: str | None = None
        while self.open and reason is None:
            reason = self._behind(self.open.pop())
        if reason is None and not self.consumers:
            reason = "no layer reads its output"
        for layer in (*self.producers, *(c for c, _ in self.consumers)):
            reason = reason or self._why_fixed(layer)
        if reason is not None:
            return reason
        return Group(tuple(self.producers), tuple(self.consumers), tuple(self.clips), self.channels)

    def _why_fixed(self, layer: Layer) -> str | None:
        reason = self.layers.why_not_private(layer)
        return reason and f"{reason}, so that the parameter is not its own"

    def _enter(self, value: str, axis: int) -> None:
        if value not in self.axis:
            self.axis[value] = axis
            self.open.append(value)

    def _tie(self, value: str, axis: int) -> str | None:
        """Follow a value that shares channels with the group back to the layers that compute it."""
        back = [value]
        while back:
            value = back.pop()
            if value in self.axis:
                continue
            self._enter(value, axis)
            layer, op = self.layers.by_output.get(value), self.graph.producer(value)
            if layer is None:
                sources = self._handed_on(value, op)
                if not sources:
                    made = (
                        f"made by {op.name} ({op.type})" if op is not None else "an input or a parameter of the model"
                    )
                    return f"{value} is {made}"
                back.extend(sources)
                continue
            self.producers.append(layer)
            if layer.axes.outputs != self.channels or layer.channel_axis != axis:
                return f"{layer.op} has its {layer.axes.outputs} channels on another axis"
        return None

    def _handed_on(self, value: str, op: Op | None) -> list[str]:
        """The inputs that have the channels of ``value``; none where ``op`` does not pass channels on."""
        if op is None or op.also or op.type not in self.ties.union(TRAITS["homogeneous"]) - _BOTH_PORTS:
            return []
        values = self.graph.values
        sources = [s for s in op.inputs if s and values[s].shape == values[value].shape]
        return sources if op.type in self.ties else sources[:1]

    def _behind(self, value: str) -> str | None:
        """Visit the readers of ``value``."""
        if self.graph.is_output(value):
            return f"{value} is an output of the model"
        for op, port in data_readers(self.graph, value):
            reason = self._reader(op, port, value)
            if reason:
                return reason
        return None

    def _reader(self, op: Op, port: int, value: str) -> str | None:
        """Visit an operator that reads ``value``; returns the objection, if any."""
        layer = self.layers.of.get(op.name)
        if layer is not None and layer.kind == "layer" and port == 0:
            return self._consume(layer, value)
        if op.name in self.layers.refused:
            return f"{op.name}: {self.layers.refused[op.name]}"
        if op.also or len(op.outputs) != 1:
            return f"{op.name} ({op.type}) reads it, and runs several times or has several outputs"
        if op.type in self.ties:
            return self._tie_others(op, value)
        if op.type in _SELECTS and not port and not _keeps(op, self.axis[value], len(self.graph.values[value].shape)):
            return f"{op.name} ({op.type}) takes some of the channels of {value}, or takes them in another order"
        if op.type == "Transpose" and self.layers.view is not None:
            self._enter(op.outputs[0], self._turned(op, value))
            return None
        if op.type not in {*TRAITS["homogeneous"], *_SELECTS} or (port != 0 and op.type not in _BOTH_PORTS):
            return f"{op.name} ({op.type}) reads {value}"
        return self._pass(op, value)

    def _turned(self, op: Op, value: str) -> int:
        """The channel axis after a transposition, found by the lengths of axes."""
        assert self.layers.view is not None
        lengths = range(2, 2 + len(self.graph.values[value].shape))
        made = self.layers.view.local(op.name)(np.zeros(tuple(lengths), np.float32))
        return made.shape.index(lengths[self.axis[value]])

    def _tie_others(self, op: Op, value: str) -> str | None:
        """Follow values that share channels with ``value`` at ``op``; returns the objection, if any."""
        axis = self.axis[value]
        self._enter(op.outputs[0], axis)
        others = [source for source in op.inputs if source is not None and source != value]
        return next((reason for other in others if (reason := self._tie(other, axis))), None)

    def _consume(self, layer: Layer, value: str) -> str | None:
        spatial = layer.type in ("Conv", "ConvTranspose")
        axis, rank = self.axis[value], len(self.graph.values[value].shape)
        if axis != (1 if spatial else rank - 1) or layer.axes.inputs % self.channels:
            return f"{layer.op} sums over another axis than that of the channels"
        repeat = layer.axes.inputs // self.channels
        if spatial and repeat != 1:
            return f"{layer.op} reads {layer.axes.inputs} channels"
        self.consumers.append((layer, repeat))
        return None

    def _pass(self, op: Op, value: str) -> str | None:
        """Continue after an operator that passes channels on."""
        values, axis = self.graph.values, self.axis[value]
        if op.type == "Mul" and len({source for source in op.inputs if source in self.axis}) > 1:
            return f"{op.name} multiplies it by itself"
        if op.type == "Clip":
            if op.attrs.get("min") is None and op.attrs.get("max") is None:
                return f"{op.name} (Clip) cuts at bounds that are computed in the model"
            self.clips.append((op, axis))
        shape, out = values[value].shape, values[op.outputs[0]].shape
        last = axis == len(shape) - 1
        if len(out) == len(shape) and _same(shape[axis], out[axis]) and (op.type != "Reshape" or last):
            self._enter(op.outputs[0], axis)
        elif last and out and _same(shape[-1], out[-1]) and op.type in ("Reshape", "Squeeze", "Flatten", *_SELECTS):
            self._enter(op.outputs[0], len(out) - 1)
        elif axis == 1 and len(out) == 2:  # [N, C, ...] -> [N, C * ...], or the other axes reduced or taken out
            self._enter(op.outputs[0], 1)
        else:
            return f"{op.name} ({op.type}) changes the axes of {value}"
        return None


def _keeps(op: Op, axis: int, rank: int) -> bool:
    """Whether a selection keeps the channel axis whole, by its attributes."""
    if op.type == "Gather" and "axis" not in op.attrs:
        return False
    axes = op.attrs.get("axes", op.attrs.get("axis", ()))
    named = {int(a) % rank for a in (axes if isinstance(axes, (tuple, list)) else (axes,))}
    return axis not in named


def _same(one: int, other: int) -> bool:
    return one == other or -1 in (one, other)


def rescaling(
    view: FloatModel, groups: Sequence[Group], factors: Sequence[Array], *, bounds: bool = True
) -> tuple[list[Edit], dict[str, Array]]:
    """The edits that divide the channels of each group's value by its factors, and undo that in its consumers.

    Args:
        view: asked for the parameters; not changed.
        groups: a layer may be producer in one and consumer in another.
        factors: per group, positive, shape [channels].
        bounds: whether those of activations that cut are divided too.

    Returns:
        The edits, each parameter set once; and by what the output channels of each producer were multiplied.
    """
    names = dict.fromkeys(layer.weight for group in groups for layer in group.layers)
    weights = {name: view.param(name) for name in names}
    edits: list[Edit] = []
    multiplied: dict[str, Array] = {}
    for group, s in zip(groups, factors, strict=True):
        for layer in group.producers:
            weights[layer.weight] = layer.times_outputs(weights[layer.weight], 1 / s)
            multiplied[layer.op] = 1 / s
            if layer.bias is not None:
                b = np.asarray(view.param(layer.bias), np.float64)
                edits.append(SetParam(layer.bias, (b.reshape(-1) / s).reshape(b.shape)))
        for layer, repeat in group.consumers:
            weights[layer.weight] = layer.times_inputs(weights[layer.weight], group.spread(s, repeat))
        edits.extend(_divided_bounds(group, s) if bounds else ())
    edits.extend(SetParam(name, W) for name, W in weights.items())
    return edits, multiplied


def _divided_bounds(group: Group, s: Array) -> list[Edit]:
    bounds = [(op, axis, *bounds_of(op)) for op, axis in group.clips]
    return [Clamp(op.name, low / s, high / s, axis) for op, axis, low, high in bounds]


def bounds_of(op: Op) -> tuple[float, float]:
    """Bounds of a clipping activation; infinite where it does not clip."""
    low, high = (op.attrs.get(end) for end in ("min", "max"))
    return (-np.inf if low is None else float(low)), (np.inf if high is None else float(high))


def batch_norm_moments(view: FloatModel, graph: Graph | None = None) -> dict[str, tuple[Array, Array]]:
    """Mean and standard deviation per channel after every batch norm, as its parameters say: beta and \\|gamma\\|.

    To be asked before the batch norms are folded; :func:`moments_of_layers` then says them of the layers.
    """
    graph = graph or view.graph()
    norms = (op for op in graph.ops if op.type == "BatchNormalization" and not op.attrs.get("training"))
    found = ((op.name, _norm_moments(view, graph, op)) for op in norms if len(op.inputs) >= 5)
    return {name: moments for name, moments in found if moments is not None}


def _norm_moments(view: FloatModel, graph: Graph, norm: Op) -> tuple[Array, Array] | None:
    held = [None if name is None else graph.values[name] for name in norm.inputs[1:4]]
    if any(value is not None and value.kind != "param" for value in held) or held[2] is None:
        return None
    gamma, beta = (None if v is None else view.param(v.param or v.name) for v in held[:2])
    channels = held[2].shape
    return (
        np.zeros(channels) if beta is None else np.asarray(beta, np.float64),
        np.ones(channels) if gamma is None else np.abs(np.asarray(gamma, np.float64)),
    )


def moments_of_layers(
    moments: Mapping[str, tuple[Array, Array]], pairs: Iterable[tuple[str, str]]
) -> dict[str, tuple[Array, Array]]:
    """Layer -> moments of its output, from the ``(layer, batch norm)`` pairs that were folded backward, in order."""
    return {layer: moments[norm] for layer, norm in pairs if norm in moments}


T = TypeVar("T")

#: says what is wrong with the model as it stands, or ``None``
Check = Callable[[], str | None]
#: how often the check of the whole model is asked at most
MAX_CHECKS = 100
#: shows how far the work is: items and a title -> the same items
Bar = Callable[[Iterable[Any], str], Iterable[Any]]


def no_bar(items: Iterable[Any], title: str) -> Iterable[Any]:
    """A :data:`Bar` that shows nothing."""
    return items


def sift(
    items: Sequence[T], carry_out: Callable[[Sequence[T]], Undo], check: Check | None, bar: Bar = no_bar
) -> tuple[list[T], list[tuple[T, str]]]:
    """Find the ``items`` that can be applied without an objection of ``check``; the model is restored.

    Args:
        items: changes that are independent as far as anybody knows.
        carry_out: makes some of them together and returns how to undo them.
        check: of the model as a whole; without one everything is accepted untried.
        bar: shows the checks.

    Returns:
        The accepted ones, and the others, each with the objection.
    """
    if check is None or not items:
        return list(items), []
    accepted: list[T] = []
    rejected: list[tuple[T, str]] = []
    groups, checks = [list(items)], 0
    for group in bar(_popped(groups), "checking the model's function"):
        undo = carry_out(group)
        try:
            problem = check()
        finally:
            undo()
        checks += 1
        if problem is None:
            accepted += group
        elif len(group) == 1 or checks >= MAX_CHECKS:
            rejected += [(item, f"with it, {problem}") for item in group]
        else:
            half = len(group) // 2
            groups += [group[half:], group[:half]]
    return accepted, rejected


def _popped(items: list[list[T]]) -> Iterator[list[T]]:
    """Pop items from the end until none is left; items may be added meanwhile."""
    while items:
        yield items.pop()


class Reversible:
    """A report of changes to a model that can be undone, or made final."""

    _undos: list[Undo]

    def undo(self) -> None:
        """Restore the original model; a second call does nothing."""
        joined(self._undos)()

    def keep(self) -> None:
        """Make the change final, and release the data for undo."""
        self._undos.clear()


def joined(undos: list[Undo]) -> Undo:
    """One function for all of ``undos``, last first; a second call does nothing."""

    def undo() -> None:
        while undos:
            undos.pop()()

    return undo
