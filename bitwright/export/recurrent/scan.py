"""A recurrent layer as a Scan, with what is computed before and after it.

The Scan is written by running :func:`bitwright.core.graph.recurrence.step` on symbols whose arithmetic adds nodes to its
body. What does not depend on the state is computed for all steps before it: ``X W^T`` and the biases. States keep the
axis of directions, ``[1, batch, hidden]``, so that they are the operator's own inputs and outputs. Length and batch
are free; ONNX Runtime takes no empty sequence, neither here nor in its own operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from bitwright.core.graph.recurrence import CELLS, Context, step
from bitwright.export.qdq.forms import Builder, before
from bitwright.export.qdq.markers import move_uses, note_states
from bitwright.export.recurrent.activations import FUNCTIONS
from bitwright.export.recurrent.layers import (
    INITIAL_C,
    INITIAL_H,
    LENGTHS,
    OUTPUTS,
    PROJECTION,
    B,
    Layer,
    P,
    R,
    W,
    X,
    is_read,
    layer_input,
    site_node,
)
from bitwright.export.recurrent.symbols import Block, NodeWriter, Symbol


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
    """Put a Scan, and what is computed before and after it, in the place of ``node``."""
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
    """Let the readers of the layer's outputs read ``results``, which take their names; remove the layer."""
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
