"""Why a batch norm has to stay, and why a layer cannot absorb one: each a reason with the names involved, or ``None``."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.algorithms.channels.batch_norm_affine import Array, channel_axes, forward_obstacle
from bitwright.algorithms.folding.channel_map import FLAT, Between
from bitwright.algorithms.folding.folds import Direction
from bitwright.algorithms.folding.neighbours import Facts, operand
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.simulation.protocols import AddBias, Bypass

# -- batch norms


def why_unfit(facts: Facts, norm: Op) -> str | None:
    """Why a batch norm is not a fixed function of one value that could be taken out."""
    if norm.attrs.get("training") or any(operand(norm, port) is None for port in (3, 4)):
        return "it normalises with the statistics of the batch, so it is not a fixed function of one value"
    if _varies(norm):
        return "its runs differ in their parameters or attributes"
    for value in _params(norm):
        if facts.graph.values[value].kind != "param":
            return f"its parameter {value} is computed in the model, not stored"
        if other := other_use(facts, value):
            return other
    bypass = facts.view.can_edit(Bypass(norm.name))
    if bypass is None:
        return None
    shared = why_not_private(facts.graph, norm)
    return shared and f"it cannot be removed ({bypass}) nor be made an identity ({shared})"


def why_not_private(graph: Graph, norm: Op) -> str | None:
    """Why the parameters of a batch norm cannot be rewritten for it alone."""
    uses = ((value, reader) for value in _params(norm) for reader, _ in graph.consumers(value))
    return next((f"{reader.name} also reads {value}" for value, reader in uses if reader is not norm), None)


def _params(norm: Op) -> list[str]:
    return [value for port in (1, 2, 3, 4) if (value := operand(norm, port)) is not None]


def is_one(scale: Array) -> bool:
    """Whether the scale is 1 in float32: there the neutral variance of an earlier fold is exact."""
    return bool(np.all(np.abs(scale - 1) <= np.finfo(np.float32).epsneg))


def other_use(facts: Facts, param: str) -> str | None:
    """A use of a parameter that its readers do not show: something computed from it, or an output."""
    graph = facts.graph
    if graph.is_output(param):
        return f"{param} is an output of the model"
    for value in facts.derived.get(graph.values[param].param or param, ()):
        readers = graph.consumers(value)
        if readers:
            return f"{readers[0][0].name} reads a value computed from {param}"
        if graph.is_output(value):
            return f"an output of the model is computed from {param}"
    return None


# -- layers


def why_no_layer(
    graph: Graph, op: Op, direction: Direction, scale: Array, shift: Array, between: Between | None
) -> str | None:
    """What in a layer itself stands against folding into it."""
    weight, bias = operand(op, 1), operand(op, 2)
    if _varies(op):
        return f"the runs of {op.name} differ in their parameters or attributes"
    if weight is None or graph.values[weight].kind != "param":
        return f"the weight of {op.name} is computed in the model, not a stored parameter"
    shape = graph.values[weight].shape
    if len(shape) != 2 if op.type in FLAT else len(shape) < 3:
        return f"the weight of {op.name} has shape {shape}"
    if reason := _why_other_axis(graph, op, direction, len(shape), between):
        return reason
    axes = channel_axes(op.type, op.attrs, shape)
    channels = axes.outputs if direction == "backward" else axes.inputs
    mapped = scale.size if between is None else between.channels.size
    if channels != mapped:
        return f"{op.name} has {channels} channels there, the batch norm {mapped}"
    reason = None if bias is None else _why_no_bias(graph, op, bias, axes.outputs)
    if reason or direction == "backward":
        return reason
    obstacle = forward_obstacle(op.type, op.attrs, shape[2:], shift)
    return obstacle and f"{op.name}: {obstacle}"


def _why_other_axis(graph: Graph, op: Op, direction: Direction, rank: int, between: Between | None) -> str | None:
    """Whether the channels of a layer lie elsewhere than those of its batch norm."""
    beside = op.outputs[0] if direction == "backward" else op.inputs[0]
    assert beside is not None
    transposed = op.attrs.get("transA")
    other_rank = len(graph.values[beside].shape) != rank and between is None
    if not other_rank and (direction == "backward" or not transposed):
        return None
    axis = "last axis" if op.type in FLAT and not transposed else "first axis"
    return f"the channels of {op.name} are the {axis} of {beside}, those of the batch norm are axis 1"


def _why_no_bias(graph: Graph, op: Op, bias: str, channels: int) -> str | None:
    value = graph.values[bias]
    if value.kind != "param":
        return f"the bias of {op.name} is computed in the model, not a stored parameter"
    if value.shape not in ((channels,), (1, channels)):
        return f"the bias of {op.name} has shape {value.shape}, not one entry per channel"
    if op.type == "MatMul" or not float(op.attrs.get("beta", 1.0)):
        return f"{op.name} has an operand {bias} that is not a plain bias"
    return None


def why_no_new_bias(facts: Facts, op: Op) -> str | None:
    """Why a layer that needs a bias cannot have one; ``None`` also where it has one already."""
    if operand(op, 2) is not None:
        return None
    W = facts.graph.values[operand(op, 1) or ""].shape
    reason = facts.view.can_edit(AddBias(op.name, np.zeros(channel_axes(op.type, op.attrs, W).outputs)))
    return reason and f"{op.name} has no bias and cannot get one: {reason}"


def why_not_tied(layer: Op, value: str, reader: Op, same_port: bool) -> str | None:
    """Why an operator that also reads a parameter of ``layer`` cannot absorb what ``layer`` absorbs."""
    if reader is layer:
        return f"{layer.name} reads {value} twice"
    if same_port and _folding_attrs(reader) == _folding_attrs(layer):
        return None
    return f"{reader.name} ({reader.type}) also reads {value}"


def _varies(op: Op) -> bool:
    """Whether runs of the op read different parameters or had different attributes."""
    return bool(op.attrs.get("varies")) or any(port != 0 for port, _ in op.also)


def _folding_attrs(op: Op) -> tuple[Any, ...]:
    """What decides how a layer's parameters absorb a scale and a shift."""
    attrs = op.attrs
    numbers = (attrs.get("group", 1), attrs.get("alpha", 1.0), attrs.get("beta", 1.0))
    return op.type, bool(attrs.get("transB")), *map(float, numbers)
