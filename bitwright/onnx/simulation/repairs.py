"""Where a simulation computes what is not finite, and repairs in its graph: the nodes of each, after the value that it repairs.

==========  ==========================================================================
replace     IsNaN, Where; then Greater, Where and Less, Where for the two infinities
clamp       IsNaN, Where; then Clip, which by itself keeps NaN or loses it, by runtime
==========  ==========================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from bitwright.core.health.repair import Repair
from bitwright.core.health.report import LIMITS, HealthReport
from bitwright.export.files.value_types import is_tensor
from bitwright.export.qdq.forms import Builder, after
from bitwright.export.qdq.markers import Outputs, is_site, move_uses, remove_unread
from bitwright.onnx.model.data import Feeds
from bitwright.onnx.simulation.simulate import simulation_model

if TYPE_CHECKING:
    from bitwright.onnx.simulation.quantsim import QuantizationSimModel

logger = logging.getLogger("bitwright")

_D = ir.DataType
REPAIRED = {_D.FLOAT16: "float16", _D.BFLOAT16: "bfloat16", _D.FLOAT: "float32", _D.DOUBLE: "float64"}


@dataclass(frozen=True, eq=False)
class RepairedValue:
    """A value after which a repair stands.

    Attributes:
        raw: what the operator wrote; its name ends in ``_unrepaired``.
        result: what its readers see, under the name that ``raw`` had.
    """

    raw: ir.Value
    result: ir.Value


def nodes_of(sim: QuantizationSimModel) -> dict[str, ir.Node]:
    """Operator -> its node in the marked model."""
    return {str(node.name): node for node in sim.marked.graph.all_nodes() if not is_site(node)}


def float_results(node: ir.Node | None) -> list[ir.Value]:
    """The floating-point tensors that a node writes and something reads."""
    read = [v for v in (() if node is None else node.outputs) if v.uses() or v.is_graph_output()]
    return [v for v in read if is_tensor(v) and _dtype(v) in REPAIRED]


def _dtype(value: ir.Value) -> ir.DataType:
    """The type of a tensor; float32 after an operator that type inference does not know, as for quantizers."""
    return value.dtype or _D.FLOAT


def put_in_force(sim: QuantizationSimModel, repairs: tuple[Repair, ...]) -> None:
    """Let exactly these repairs be in effect."""
    _take_out(sim)
    builder, nodes = Builder(sim.marked), nodes_of(sim)
    for repair in repairs:
        sim.repaired += [_put_in(builder, value, repair) for value in float_results(nodes[repair.op])]
    sim.repairs = repairs
    sim.forget_simulations()


def diagnosed(sim: QuantizationSimModel, model: ir.Model, feeds: Any) -> HealthReport:
    """Where ``model``, which was made from the marked one, computes what is not finite."""
    from bitwright.onnx.health.check import Doctor

    doctor = Doctor(model, "model", sim.providers, sim.threads)
    doctor.check(feeds)
    return doctor.report()


def holds_nan(output: Any) -> bool:
    """Whether what a model returned is a floating-point tensor with NaN."""
    return isinstance(output, np.ndarray) and output.dtype.kind == "f" and bool(np.isnan(output).any())


def name_nan(sim: QuantizationSimModel, feeds: Feeds) -> None:
    """Tell which operator makes NaN in the simulation of a feed that float computes without."""
    plain, quantized = (
        diagnosed(sim, simulation_model(sim.marked, encodings).model, feeds) for encodings in ({}, sim._encodings())
    )
    if plain.ok and not plain.bad_inputs:
        logger.warning("%s", sim.quantizers.describe_nan(quantized, sim.graph))


def _take_out(sim: QuantizationSimModel) -> None:
    outputs = Outputs(sim.marked)
    for repaired in reversed(sim.repaired):
        raw, result, name = repaired.raw, repaired.result, repaired.result.name
        move_uses(result, raw)
        outputs.replace(result, raw)
        remove_unread(result)
        raw.name = name
    sim.repaired, sim.repairs = [], ()


def _put_in(builder: Builder, raw: ir.Value, repair: Repair) -> RepairedValue:
    """Write the nodes of one repair after ``raw``; its readers move to their result."""
    name, dtype, last = str(raw.name), _dtype(raw), raw.producer()
    assert last is not None
    limit = LIMITS[REPAIRED[dtype]]
    own: set[ir.Node] = set()

    def constant(what: str, number: float) -> ir.Value:
        array = np.asarray(min(max(number, -limit), limit)).astype(dtype.numpy())
        return builder.initializer_of(f"{name}/{what}", ir.Tensor(array, dtype=dtype))

    def emit(op: str, inputs: Sequence[ir.Value], out: ir.DataType) -> ir.Value:
        nonlocal last
        assert last is not None
        value = builder.emit(after(last), op, inputs, f"{name}/{op.lower()}", out)
        value.shape = None if raw.shape is None else raw.shape.copy()
        last = value.producer()
        assert last is not None
        own.add(last)
        return value

    value = emit("Where", [emit("IsNaN", [raw], _D.BOOL), constant("nan", repair.nan), raw], dtype)
    lo, hi = constant("lo", repair.lo), constant("hi", repair.hi)
    if repair.kind == "clamp":
        value = emit("Clip", [value, lo, hi], dtype)
    else:  # beyond the largest number is only infinity
        value = emit("Where", [emit("Greater", [value, constant("max", limit)], _D.BOOL), hi, value], dtype)
        value = emit("Where", [emit("Less", [value, constant("min", -limit)], _D.BOOL), lo, value], dtype)
    move_uses(raw, value, keep=own)
    builder.outputs.replace(raw, value)
    value.name, raw.name = name, builder.names.value(f"{name}_unrepaired")
    return RepairedValue(raw, value)
