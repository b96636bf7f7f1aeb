"""Recurrent layers in marked models: expanded to a Scan with markers inside, or restored to the native operator.

A marked model holds a recurrent layer as a node of domain ``bitwright``, operator ``LSTM``, ``GRU`` or ``RNN``: one
direction, with inputs, outputs and attributes of the ONNX operator, and beside them

- the attribute ``inner_sites``, strings ``"<inner tensor>=<site>"`` with the names of
  :mod:`bitwright.core.graph.recurrence`, of the inner tensors that have a site; ``hidden`` is the first output;
- perhaps a ninth input (port 8), the projection matrix ``[1, projection, hidden]`` of an LSTM, which ONNX does not have.

The Scan is written by running :func:`bitwright.core.graph.recurrence.step` on symbols whose arithmetic adds nodes to its
body. What does not depend on the state is computed for all steps before it: ``X W^T`` and the biases. States keep the
axis of directions, ``[1, batch, hidden]``, so that they are the operator's own inputs and outputs. Length and batch
are free; ONNX Runtime accepts no empty sequence, neither here nor in its own operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from bitwright.core.graph.recurrence import CELLS, RECURRENT, RETURNS, Context, Variant, step
from bitwright.errors import ConfigError, ExportError, close_matches
from bitwright.export.files.onnx_file import all_nodes
from bitwright.export.qdq.forms import Builder, Place, after, before
from bitwright.export.qdq.markers import ATTRIBUTE, DOMAIN, OP_TYPE, copy_model, move_uses, note_states
from bitwright.export.targets import RecurrentForm


@dataclass(frozen=True)
class Activation:
    """An activation function of a layer: ONNX name, and alpha and beta where the function has them."""

    name: str
    alpha: float | None = None
    beta: float | None = None


# (operator, its operands or attributes) in order; "alpha" and "beta" are filled in, x is what came before
_Recipe = tuple[tuple[str, str | None, tuple[str, ...]], ...]


@dataclass(frozen=True)
class _Function:
    """The operators of an activation function: ``recipe`` rows are (operator, constant operand, attributes)."""

    name: str
    recipe: _Recipe
    alpha: float | None = None
    beta: float | None = None


def _plain(name: str, *attributes: str, alpha: float | None = None, beta: float | None = None) -> _Function:
    return _Function(name, ((name, None, attributes),), alpha, beta)


#: lower-case name -> function, with the values of alpha and beta that a layer without them has: those of the operator
#: of the same name, and 0 where there is none, as ONNX Runtime has it
FUNCTIONS: dict[str, _Function] = {
    f.name.lower(): f
    for f in (
        *map(_plain, ("Relu", "Tanh", "Sigmoid", "Softsign", "Softplus")),
        _plain("LeakyRelu", "alpha", alpha=0.01),
        _plain("ThresholdedRelu", "alpha", alpha=0.0),
        _plain("HardSigmoid", "alpha", "beta", alpha=0.2, beta=0.5),
        _plain("Elu", "alpha", alpha=1.0),
        _Function("Affine", (("Mul", "alpha", ()), ("Add", "beta", ())), 0.0, 0.0),
        _Function("ScaledTanh", (("Mul", "beta", ()), ("Tanh", None, ()), ("Mul", "alpha", ())), 0.0, 0.0),
    )
}


def unknown_activation(op_type: str, attrs: Mapping[str, Any]) -> str | None:
    """The first activation function of a layer that ONNX Runtime does not support, or ``None``."""
    names = attrs.get("activations") or CELLS[op_type].activations
    return next((str(name) for name in names if str(name).lower() not in FUNCTIONS), None)


def layer_activations(op_type: str, attrs: Mapping[str, Any]) -> tuple[Activation, ...]:
    """The activation functions of a node, of its directions one after the other, alpha and beta filled in.

    ``activation_alpha`` and ``activation_beta`` hold values for those functions only that have such a parameter, in
    order, as ONNX Runtime reads them.

    Args:
        op_type: ``RNN``, ``GRU`` or ``LSTM``.
        attrs: of the node, names -> plain values.

    Raises:
        ExportError: a function is unknown.
    """
    directions = 2 if attrs.get("direction") == "bidirectional" else 1
    names = attrs.get("activations") or CELLS[op_type].activations * directions
    alphas, betas = (iter(attrs.get(f"activation_{key}") or ()) for key in ("alpha", "beta"))
    found = []
    for name in names:
        function = FUNCTIONS.get(str(name).lower())
        if function is None:
            raise ExportError(
                f"{op_type} layer",
                f"{name!r} is not an activation function of recurrent layers",
                f"use one of {', '.join(f.name for f in FUNCTIONS.values())}",
            )
        alpha = None if function.alpha is None else float(next(alphas, function.alpha))
        beta = None if function.beta is None else float(next(betas, function.beta))
        found.append(Activation(function.name, alpha, beta))
    return tuple(found)


INNER_SITES = "inner_sites"
#: metadata of a native layer that chooses the range of its hidden state at run time: the site of that
AT_RUN_TIME = "bitwright.at_run_time"
X, W, R, B, LENGTHS, INITIAL_H, INITIAL_C, P, PROJECTION = range(9)  # ports
#: outputs of the node, in order; GRU and RNN have the first two
OUTPUTS = ("Y", "Y_h", "Y_c")


def is_recurrent(node: ir.Node) -> bool:
    """Whether ``node`` is a recurrent layer of a marked model."""
    return node.domain == DOMAIN and node.op_type in CELLS


def inner_sites(node: ir.Node) -> dict[str, str]:
    """Inner tensor -> site, of a recurrent layer of a marked model."""
    attribute = node.attributes.get(INNER_SITES)
    pairs = () if attribute is None else attribute.as_strings()
    return {name: site for name, _, site in (pair.partition("=") for pair in pairs)}


def recurrent_nodes(model: ir.Model) -> list[ir.Node]:
    """Every recurrent layer of a marked model, bodies of If, Loop and Scan included."""
    return [node for node in all_nodes(model.graph) if is_recurrent(node)]


def site_node(value: ir.Value, site: str, builder: Builder) -> ir.Node:
    """A marker of ``site`` that reads ``value``, not yet in a graph."""
    name = builder.names.node(f"{site}/site")
    marker = ir.Node(DOMAIN, OP_TYPE, [value], [ir.AttrString(ATTRIBUTE, site)], name=name)
    marker.outputs[0].name = builder.names.value(f"{value.name}_site")
    marker.outputs[0].type, marker.outputs[0].shape = value.type, value.shape
    return marker


def layer_input(node: ir.Node, port: int) -> ir.Value | None:
    """Input ``port`` of ``node``; ``None`` where it is missing."""
    return node.inputs[port] if port < len(node.inputs) else None


# ----------------------------------------------------------------------------------------------- the layer's facts


@dataclass(frozen=True)
class Layer:
    """Attributes and inputs of a recurrent node."""

    node: ir.Node
    hidden: int
    activations: tuple[Activation, ...]
    variant: Variant
    sites: Mapping[str, str]
    reverse: bool
    batch_first: bool
    clip: float | None
    dtype: ir.DataType

    @classmethod
    def of(cls, node: ir.Node) -> Layer:
        """Read the attributes of ``node``.

        Raises:
            ExportError: the node is malformed.
        """
        attrs = {a.name: a.value for a in node.attributes.values()}
        direction = node.attributes.get_string("direction", "forward")
        if direction not in ("forward", "reverse") or "hidden_size" not in attrs:
            raise ExportError(
                f"node {node.name!r}",
                f"a {DOMAIN}::{node.op_type} layer needs hidden_size and one direction, and has {direction!r}",
                "mark the model again with the front end of this version",
            )
        x = node.inputs[X]
        assert x is not None
        variant = Variant(
            linear_before_reset=bool(attrs.get("linear_before_reset", 0)),
            input_forget=bool(attrs.get("input_forget", 0)),
            projected=layer_input(node, PROJECTION) is not None,
        )
        return cls(
            node,
            int(attrs["hidden_size"]),
            layer_activations(node.op_type, attrs),
            variant,
            inner_sites(node),
            direction == "reverse",
            bool(attrs.get("layout", 0)),
            attrs.get("clip") or None,
            x.dtype or ir.DataType.FLOAT,
        )

    @property
    def gates(self) -> tuple[str, ...]:
        """Gates in the order of the operator's weights."""
        return CELLS[self.node.op_type].gates

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Gates whose pre-activations are added in one operator: those that read the same hidden state."""
        return (self.gates[:2], self.gates[2:]) if self.node.op_type == "GRU" else (self.gates,)

    @property
    def late_bias(self) -> bool:
        """Whether the candidate's recurrent bias is reset too, and cannot join the other biases."""
        return self.node.op_type == "GRU" and self.variant.linear_before_reset


def is_read(node: ir.Node, output: int) -> bool:
    """Whether an output of ``node`` is read or returned by the graph."""
    value = node.outputs[output] if output < len(node.outputs) else None
    return value is not None and (bool(value.uses()) or value.is_graph_output())


@dataclass
class NodeWriter:
    """Writes nodes at one place under names that begin with the layer's."""

    builder: Builder
    place: Place
    layer: Layer
    constants: dict[tuple[Any, ...], ir.Value] = field(default_factory=dict)

    def emit(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        suffix: str,
        shape: Sequence[int | None] | None = None,
        dtype: ir.DataType | None = None,
        count: int = 1,
        **attributes: Any,
    ) -> tuple[ir.Value, ...]:
        """The outputs of a new node."""
        names, base = self.builder.names, f"{self.layer.node.name}_{suffix}"
        node = ir.node(op, inputs, attributes, num_outputs=count, name=names.node(f"{base}/{op}"))
        for value in node.outputs:
            value.name, value.type = names.value(base), ir.TensorType(dtype or self.layer.dtype)
            value.shape = None if shape is None else ir.Shape(shape)
        self.place(node)
        return tuple(node.outputs)

    def one(self, op: str, inputs: Sequence[ir.Value | None], suffix: str, *rest: Any, **kwargs: Any) -> ir.Value:
        """The output of a new node that has one."""
        return self.emit(op, inputs, suffix, *rest, **kwargs)[0]

    def constant(self, array: Any, suffix: str) -> ir.Value:
        """An initializer with this value, the same one for equal values."""
        array = np.asarray(array)
        key = (array.dtype, array.shape, array.tobytes())
        if key not in self.constants:
            self.constants[key] = self.builder.initializer(f"{self.layer.node.name}_{suffix}", array)
        return self.constants[key]

    def number(self, x: float, suffix: str) -> ir.Value:
        """A scalar of the layer's type."""
        return self.constant(np.asarray(x, self.layer.dtype.numpy()), suffix)

    def split(self, value: ir.Value, sizes: Sequence[int], suffix: str, axis: int = -1) -> tuple[ir.Value, ...]:
        """Parts of ``value`` along ``axis``; itself where there is only one."""
        if len(sizes) == 1:
            return (value,)
        parts = self.emit(
            "Split", [value, self.constant(np.asarray(sizes, np.int64), "sizes")], suffix, count=len(sizes), axis=axis
        )
        for part, size in zip(parts, sizes, strict=True):
            if value.shape is not None and axis == -1:
                part.shape = ir.Shape([*value.shape[:-1], size])
        return parts

    def matrix(self, port: int, columns: int) -> ir.Value:
        """The weight ``[1, rows, columns]`` at ``port`` as ``[columns, rows]``, for products from the left."""
        value = self.layer.node.inputs[port]
        assert value is not None
        turned = self.one("Transpose", [value], f"{port}_transposed", (1, None, None), value.dtype, perm=[0, 2, 1])
        axes = self.constant(np.asarray([0], np.int64), "axes")
        return self.one("Squeeze", [turned, axes], f"{port}_matrix", (None, columns), value.dtype)


class Symbol:
    """A tensor inside the body; arithmetic on it writes nodes."""

    def __init__(self, pen: NodeWriter, value: ir.Value) -> None:
        self.pen, self._value = pen, value

    @property
    def value(self) -> ir.Value:
        """The tensor itself."""
        return self._value

    def _with(self, op: str, left: Any, right: Any) -> Symbol:
        operands = [x.value if isinstance(x, Symbol) else self.pen.number(x, "number") for x in (left, right)]
        shape = (1, None, self.pen.layer.hidden)
        return Symbol(self.pen, self.pen.one(op, operands, op.lower(), shape))

    def __add__(self, other: Any) -> Symbol:
        return self._with("Add", self, other)

    def __mul__(self, other: Any) -> Symbol:
        return self._with("Mul", self, other)

    def __rsub__(self, other: Any) -> Symbol:
        return self._with("Sub", other, self)


class Block:
    """Several gates side by side in one tensor, ``[..., gates * hidden]``; split when one of them is needed alone."""

    def __init__(self, pen: NodeWriter, value: ir.Value, gates: tuple[str, ...]) -> None:
        self.pen, self.value, self.gates = pen, value, gates
        self._sums: dict[ir.Value, Block] = {}
        self._parts: tuple[ir.Value, ...] = ()

    def __add__(self, other: Block) -> Block:
        if other.value not in self._sums:
            shape = (1, None, self.pen.layer.hidden * len(self.gates))
            total = self.pen.one("Add", [self.value, other.value], "pre", shape)
            self._sums[other.value] = Block(self.pen, total, self.gates)
        return self._sums[other.value]

    def part(self, gate: str) -> ir.Value:
        """The tensor of one gate."""
        if not self._parts:
            self._parts = self.pen.split(self.value, [self.pen.layer.hidden] * len(self.gates), "gate")
        return self._parts[self.gates.index(gate)]

    def symbols(self) -> dict[str, Symbol]:
        """Gate -> symbol."""
        return {gate: Gate(self, gate) for gate in self.gates}


class Gate(Symbol):
    """One gate of a block: sums of two blocks are written once for all their gates."""

    def __init__(self, block: Block, gate: str) -> None:
        self.pen, self.block, self.gate = block.pen, block, gate

    @property
    def value(self) -> ir.Value:
        """The gate alone, split from its block."""
        return self.block.part(self.gate)

    def __add__(self, other: Any) -> Symbol:
        if isinstance(other, Gate) and other.block.gates == self.block.gates:
            return Gate(self.block + other.block, self.gate)
        return super().__add__(other)


@dataclass
class _Context(Context):
    """Writes the body of a Scan."""

    pen: NodeWriter
    recurrent: Mapping[tuple[str, ...], ir.Value]  # gates -> R^T of these gates, [hidden, gates * hidden]
    late_bias: ir.Value | None
    projection: ir.Value | None

    def quantize(self, name: str, x: Symbol) -> Symbol:
        site = self.pen.layer.sites.get(name)
        if site is None:
            return x
        marker = site_node(x.value, site, self.pen.builder)
        self.pen.place(marker)
        return Symbol(self.pen, marker.outputs[0])

    def activate(self, index: int, x: Symbol) -> Symbol:
        activation = self.pen.layer.activations[index]
        given = {"alpha": activation.alpha, "beta": activation.beta}
        value, shape = x.value, x.value.shape
        for op, operand, attributes in FUNCTIONS[activation.name.lower()].recipe:
            others = [] if operand is None else [self.pen.number(float(given[operand] or 0.0), operand)]
            value = self.pen.one(op, [value, *others], op.lower(), shape, **{key: given[key] for key in attributes})
        return Symbol(self.pen, value)

    def clip(self, x: Symbol) -> Symbol:
        clip = self.pen.layer.clip
        if clip is None:
            return x
        ends = [self.pen.number(-clip, "clip_min"), self.pen.number(clip, "clip_max")]
        return Symbol(self.pen, self.pen.one("Clip", [x.value, *ends], "clip", x.value.shape))

    def recur(self, h: Symbol, gates: Sequence[str]) -> list[Symbol]:
        layer, wanted = self.pen.layer, tuple(gates)
        shape = (1, None, layer.hidden * len(wanted))
        product = self.pen.one("MatMul", [h.value, self.recurrent[wanted]], "recurrent", shape)
        blocks = [block for block in layer.blocks if set(block) <= set(wanted)]
        parts = self.pen.split(product, [layer.hidden * len(block) for block in blocks], "block")
        found: dict[str, Symbol] = {}
        for block, part in zip(blocks, parts, strict=True):
            if self.late_bias is not None and block == layer.blocks[-1]:
                part = self.pen.one("Add", [part, self.late_bias], "recurrent_bias", part.shape)
            found |= Block(self.pen, part, block).symbols()
        return [found[gate] for gate in wanted]

    def project(self, h: Symbol) -> Symbol:
        assert self.projection is not None
        return Symbol(self.pen, self.pen.one("MatMul", [h.value, self.projection], "projected", (1, None, None)))


def expand(node: ir.Node, builder: Builder) -> None:
    """Replace ``node`` by a Scan with the operators before and after it."""
    layer = Layer.of(node)
    outer = NodeWriter(builder, before(node), layer)
    x = node.inputs[X]
    assert x is not None
    if layer.batch_first:
        x = outer.one("Transpose", [x], "time_first", None, x.dtype, perm=[1, 0, 2])
    scanned, late_bias = _input_projection(outer, x)
    if (valid := _valid_steps(outer, x)) is not None:
        scanned.append(valid)
    states = [_initial_state(outer, x, i) for i in range(len(CELLS[node.op_type].states))]
    wants_sequence = is_read(node, 0)
    body = _body(outer, scanned, valid is not None, wants_sequence, late_bias)
    attributes: dict[str, Any] = {"body": body, "num_scan_inputs": len(scanned)}
    if layer.reverse:
        attributes["scan_input_directions"] = [1] * len(scanned)
        if wants_sequence:
            attributes["scan_output_directions"] = [1]
    results = outer.emit("Scan", [*states, *scanned], "scan", None, count=len(states) + wants_sequence, **attributes)
    scan = results[0].producer()
    assert scan is not None
    lengths = layer_input(node, LENGTHS)
    sites = [layer.sites.get(name) for name in CELLS[node.op_type].states]
    note_states(scan, sites, None if lengths is None else str(lengths.name))
    finals = [_final_state(outer, value) for value in results[: len(states)]]
    _take_over(outer, [results[-1] if wants_sequence else None, *finals])


def _input_projection(pen: NodeWriter, x: ir.Value) -> tuple[list[ir.Value], ir.Value | None]:
    """``X W^T`` with the biases, one tensor ``[length, batch, gates * hidden]`` per block; and the late bias."""
    layer = pen.layer
    count, hidden = len(layer.gates), layer.hidden
    product = pen.one("MatMul", [x, pen.matrix(W, count * hidden)], "input", (None, None, count * hidden))
    bias, late = _biases(pen)
    if bias is not None:
        product = pen.one("Add", [product, bias], "input_bias", product.shape)
    parts = pen.split(product, [hidden * len(block) for block in layer.blocks], "input_block")
    return list(parts), late


def _biases(pen: NodeWriter) -> tuple[ir.Value | None, ir.Value | None]:
    """``Wb + Rb`` ``[1, gates * hidden]``; and the part of ``Rb`` that is added within the step."""
    given, layer = layer_input(pen.layer.node, B), pen.layer
    if given is None:
        return None, None
    rows = len(layer.gates) * layer.hidden
    of_input, recurrent = pen.split(given, [rows, rows], "bias", axis=1)
    if not layer.late_bias:
        return pen.one("Add", [of_input, recurrent], "biases", (1, rows)), None
    early, late = pen.split(recurrent, [rows - layer.hidden, layer.hidden], "recurrent_bias", axis=1)
    gates, candidate = pen.split(of_input, [rows - layer.hidden, layer.hidden], "input_bias", axis=1)
    both = pen.one("Add", [gates, early], "gate_biases", (1, rows - layer.hidden))
    return pen.one("Concat", [both, candidate], "biases", (1, rows), axis=1), late


def _recurrent_matrices(pen: NodeWriter) -> dict[tuple[str, ...], ir.Value]:
    """``R^T`` for every list of gates that a step asks for."""
    layer = pen.layer
    whole = pen.matrix(R, len(layer.gates) * layer.hidden)
    if layer.node.op_type != "GRU" or layer.variant.linear_before_reset:
        return {layer.gates: whole}
    parts = pen.split(whole, [layer.hidden * len(block) for block in layer.blocks], "recurrent_block")
    return dict(zip(layer.blocks, parts, strict=True))


def _peepholes(outer: NodeWriter, pen: NodeWriter) -> dict[str, Symbol]:
    """Gate -> its peephole weights ``[1, hidden]``, split before the Scan and read in its body."""
    given = layer_input(outer.layer.node, P)
    if given is None:
        return {}
    parts = outer.split(given, [outer.layer.hidden] * 3, "peephole", axis=1)
    return {gate: Symbol(pen, part) for gate, part in zip(("input", "output", "forget"), parts, strict=True)}


def _valid_steps(pen: NodeWriter, x: ir.Value) -> ir.Value | None:
    """``[length, batch, 1]``, bool: steps within the sequence's own length; ``None`` where all are."""
    lengths = layer_input(pen.layer.node, LENGTHS)
    if lengths is None:
        return None
    integer, scalar = ir.DataType.INT64, np.asarray(0, np.int64)
    shape = pen.one("Shape", [x], "shape", (3,), integer)
    total = pen.one("Gather", [shape, pen.constant(scalar, "first")], "length", (), integer, axis=0)
    limits = [pen.constant(np.asarray(n, np.int64), f"from_{n}") for n in (0, 1)]
    time = pen.one("Range", [limits[0], total, limits[1]], "time", (None,), integer)
    axes = pen.constant(np.asarray([1, 2], np.int64), "time_axes")
    time = pen.one("Unsqueeze", [time, axes], "steps", (None, 1, 1), integer)
    last = pen.constant(np.asarray([1], np.int64), "batch_axes")
    ends = pen.one("Cast", [lengths], "lengths", lengths.shape, integer, to=int(integer))
    ends = pen.one("Unsqueeze", [ends, last], "ends", (None, 1), integer)
    return pen.one("Less", [time, ends], "valid", (None, None, 1), ir.DataType.BOOL)


def _final_state(pen: NodeWriter, state: ir.Value) -> ir.Value:
    """``state``, zero where a sequence has no step, as ONNX Runtime has it."""
    lengths = layer_input(pen.layer.node, LENGTHS)
    if lengths is None:
        return state
    axis = pen.constant(np.asarray([1], np.int64), "one")
    ends = pen.one("Unsqueeze", [lengths, axis], "rows", (None, 1), lengths.dtype)
    none = pen.constant(np.asarray(0, (lengths.dtype or ir.DataType.INT32).numpy()), "no_step")
    some = pen.one("Greater", [ends, none], "not_empty", (None, 1), ir.DataType.BOOL)
    return pen.one("Where", [some, state, pen.number(0.0, "zero")], "final", (1, None, None))


def _initial_state(pen: NodeWriter, x: ir.Value, index: int) -> ir.Value:
    """The state before the first step, ``[1, batch, hidden]``: given, or zero."""
    layer, name = pen.layer, ("initial_h", "initial_c")[index]
    given = layer_input(layer.node, (INITIAL_H, INITIAL_C)[index])
    if given is not None:
        if not layer.batch_first:
            return given
        return pen.one("Transpose", [given], name, (1, None, None), perm=[1, 0, 2])
    shape = pen.one("Shape", [x], "shape", (3,), ir.DataType.INT64)
    one = pen.constant(np.asarray([1], np.int64), "one")
    batch = pen.one("Gather", [shape, one], "batch", (1,), ir.DataType.INT64, axis=0)
    sizes = [one, batch, _width(pen, index)]
    full = pen.one("Concat", sizes, "state_shape", (3,), ir.DataType.INT64, axis=0)
    zero = ir.Tensor(np.zeros(1, layer.dtype.numpy()), dtype=layer.dtype)
    return pen.one("ConstantOfShape", [full], name, (1, None, None), value=zero)


def _width(pen: NodeWriter, index: int) -> ir.Value:
    """Length of the last axis of a state, as ``[1]``: the hidden size, or that of the projection."""
    if index == 0 and (projection := layer_input(pen.layer.node, PROJECTION)) is not None:
        shape = pen.one("Shape", [projection], "projection_shape", (3,), ir.DataType.INT64)
        one = pen.constant(np.asarray([1], np.int64), "one")
        return pen.one("Gather", [shape, one], "projection", (1,), ir.DataType.INT64, axis=0)
    return pen.constant(np.asarray([pen.layer.hidden], np.int64), "hidden_size")


def _body(
    outer: NodeWriter, scanned: Sequence[ir.Value], masked: bool, wants_sequence: bool, late_bias: ir.Value | None
) -> ir.Graph:
    """One step, as the body of the Scan."""
    layer = outer.layer
    nodes: list[ir.Node] = []
    pen = NodeWriter(outer.builder, nodes.append, layer, outer.constants)
    states = CELLS[layer.node.op_type].states
    projection = None
    if layer.variant.projected:
        projection = outer.matrix(PROJECTION, 0)
        projection.shape = None
    context = _Context(pen, _recurrent_matrices(outer), late_bias, projection)
    before_step = [_body_input(outer, name, (1, None, None), layer.dtype) for name in states]
    slices = [
        _body_input(outer, "step", value.shape[1:] if value.shape is not None else None, value.dtype)
        for value in scanned
    ]
    valid = slices.pop() if masked else None
    x: dict[str, Symbol] = {}
    for block, value in zip(layer.blocks, slices, strict=True):
        x |= Block(pen, value, block).symbols()
    peepholes = _peepholes(outer, pen)
    old = [Symbol(pen, value) for value in before_step]
    new = [symbol.value for symbol in step(layer.node.op_type, context, x, old, layer.variant, peepholes)]
    sequence = new[0]
    if valid is not None:
        zero = pen.number(0.0, "zero")
        sequence = pen.one("Where", [valid, sequence, zero], "valid_hidden", (1, None, None))
        new = [
            pen.one("Where", [valid, value, was], "kept", (1, None, None))
            for value, was in zip(new, before_step, strict=True)
        ]
    # ONNX Runtime leaves one of two outputs of a body unwritten when they are the same value
    outputs = [
        *new,
        *(
            [sequence if valid is not None else pen.one("Identity", [sequence], "sequence", (1, None, None))]
            * wants_sequence
        ),
    ]
    name = outer.builder.names.node(f"{layer.node.name}/step")
    inputs = [*before_step, *slices, *([valid] if valid is not None else [])]
    return ir.Graph(inputs, outputs, nodes=nodes, name=name)


def _body_input(pen: NodeWriter, name: str, shape: Sequence[Any] | None, dtype: ir.DataType | None) -> ir.Value:
    return ir.Value(
        name=pen.builder.names.value(f"{pen.layer.node.name}_{name}"),
        type=ir.TensorType(dtype or pen.layer.dtype),
        shape=None if shape is None else ir.Shape(shape),
    )


def _take_over(pen: NodeWriter, results: Sequence[ir.Value | None]) -> None:
    """Replace the layer by ``results``, under its outputs' names."""
    layer, node, outputs = pen.layer, pen.layer.node, pen.builder.outputs
    for i, (old, new) in enumerate(zip(node.outputs, results, strict=False)):
        if new is None or not is_read(node, i):
            continue
        if layer.batch_first:
            perm = [2, 0, 1, 3] if i == 0 else [1, 0, 2]
            new = pen.one("Transpose", [new], OUTPUTS[i], None, perm=perm)
        name = old.name
        new.type, new.shape = old.type or new.type, old.shape
        move_uses(old, new)
        outputs.replace(old, new)
        old.name, new.name = None, name
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def write_recurrent(model: ir.Model, form: RecurrentForm) -> ir.Model:
    """Write recurrent layers in the requested form: ``"scan"``: :func:`expand_recurrent`, ``"native"``: :func:`restore_native`.

    Raises:
        ConfigError: unknown ``form``.
    """
    if form not in ("scan", "native"):
        raise ConfigError(
            "recurrent",
            f"{form!r} is not a value of this option{close_matches(str(form), ('scan', 'native'))}",
            "use 'scan', with quantizers inside the steps, or 'native', the operators with float insides",
        )
    return expand_recurrent(model) if form == "scan" else restore_native(model)


def expand_recurrent(model: ir.Model) -> ir.Model:
    """Write every recurrent layer as a Scan, with a marker in its body for every inner site.

    Args:
        model: marked; left as it is.

    Returns:
        A copy that computes the same; ``model`` itself where it holds no recurrent layer.

    Raises:
        ExportError: a layer is malformed.
    """
    if not recurrent_nodes(model):
        return model
    copy = copy_model(model)
    builder = Builder(copy)
    for node in recurrent_nodes(copy):
        expand(node, builder)
    return copy


def restore_native(model: ir.Model) -> ir.Model:
    """Write every recurrent layer as the ONNX operator, whose insides have no markers.

    The sites of the hidden state and of the cell mark the operator's outputs. A layer with a projection, which the
    operator has not, becomes a Scan.

    Args:
        model: marked; left as it is.

    Returns:
        A copy; ``model`` itself where it holds no recurrent layer.
    """
    if not recurrent_nodes(model):
        return model
    copy = copy_model(model)
    builder = Builder(copy)
    for node in recurrent_nodes(copy):
        if layer_input(node, PROJECTION) is not None:
            expand(node, builder)
            continue
        sites = inner_sites(node)
        node.attributes.pop(INNER_SITES, None)
        node.domain = ""
        if RECURRENT in sites:
            node.metadata_props[AT_RUN_TIME] = sites[RECURRENT]
        for i in reversed(range(len(node.outputs))):  # what is inserted last stands first
            if RETURNS[i] in sites and is_read(node, i):
                _mark_behind(node, node.outputs[i], sites[RETURNS[i]], builder)
    return copy


def _mark_behind(node: ir.Node, value: ir.Value, site: str, builder: Builder) -> None:
    marker = site_node(value, site, builder)
    after(node)(marker)
    move_uses(value, marker.outputs[0], keep={marker})
    if value.is_graph_output():
        name = str(value.name)
        builder.outputs.replace(value, marker.outputs[0])
        value.name = builder.names.value(f"{name}_raw")
