"""Why what an operator reads stays in float when no rule speaks; each reason is empty where there is none."""

from __future__ import annotations

import math

from bitwright.core.graph.graph import Op, Value
from bitwright.core.graph.ops import OpRow, is_addend, resolve_granularity, weight_axes
from bitwright.core.graph.recurrence import CELLS
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import Granularity, PerChannel, PerTensor
from bitwright.core.placement.facts import Facts
from bitwright.core.placement.ledger import FLOAT_OP, MOVED, Ledger
from bitwright.core.sums.int32_bias import bias_entries

_ADDED = "added to the product of {} before anything is rounded"
_MOST_INPUT_BITS, _MOST_WEIGHT_BITS = 16, 8  # what int32 accumulators are made for
# they read the shape of a tensor and none of its values
_SHAPE_ONLY = frozenset(
    "Shape Size RandomNormalLike RandomUniformLike EyeLike zeros_like ones_like full_like empty_like "
    "rand_like randn_like new_zeros new_ones new_full new_empty".split()
)


def is_table(facts: Facts, op: Op, row: OpRow, port: int) -> bool:
    """Whether ``op`` looks rows up in what it reads at ``port``."""
    return port == 0 and facts.looks_up(op, row)


def no_input_reason(ledger: Ledger, op: Op, row: OpRow, port: int, value: str) -> str:
    """Why a float operand is left in float whatever the operator; empty if it need not be."""
    if op.type in _SHAPE_ONLY:
        return f"{op.name} reads only its shape"
    if (origin := ledger.origin.get(value, value)) in ledger.picked:
        return ledger.picked[origin]
    if not any(ledger.facts.is_float(v) for v in op.outputs):
        return f"{op.name} makes no floating-point result of it"
    match = ledger.facts.match_of.get(op.name)
    masked = match is not None and match.pattern.kind == "masked_softmax"
    if (op.name in ledger.facts.mask_ops or masked) and value in ledger.facts.mask_values:
        return f"mask of the softmax {ledger.facts.mask_values[value]}"
    if match is not None and masked:
        return f"inside the supergroup {match.pattern}"
    if is_addend(op.type, port):
        return _ADDED.format(op.name)
    if row.activations is not None and port not in row.activations:
        return f"a setting of {op.name}, not data"
    return ""


def constant_reason(ledger: Ledger, op: Op, row: OpRow, port: int, value: Value, param: str | None) -> str:
    """Why a constant stays in float when no rule speaks; empty if it does not."""
    if not param:
        return _operand_reason(ledger, op, row, port, value)
    weighs = row.weight == port or row.kind == "compute" or is_table(ledger.facts, op, row, port)
    return _parameter_reason(ledger, op, row, value, param, param == "weight" and weighs)


def _parameter_reason(ledger: Ledger, op: Op, row: OpRow, value: Value, param: str, weight: bool) -> str:
    if row.kind == "norm":
        return "normalisation parameters stay in float"
    if row.kind == "float":
        return FLOAT_OP.format(op.type)
    if weight and (row.kind == "compute" or math.prod(value.shape) > 1 or ledger.facts.looks_up(op, row)):
        return ""
    if op.type in CELLS:
        return f"{param} of {op.name}, added within a step before anything is rounded"
    return f"scalar parameter of {op.name}"


def _operand_reason(ledger: Ledger, op: Op, row: OpRow, port: int, value: Value) -> str:
    match = ledger.facts.match_of.get(op.name)
    if match is not None and match.pattern.kind == "masked_softmax":
        return f"inside the supergroup {match.pattern}, as its mask or factor"
    if match is not None and match.pattern.kind == "bias_add" and op is match.ops[1]:
        return f"bias of {match.ops[0].name}, added to the accumulator inside the supergroup {match.pattern}"
    if op.name in ledger.facts.mask_ops:
        return "part of a softmax mask"
    if is_addend(op.type, port):
        return _ADDED.format(op.name)
    if row.activations is not None and port not in row.activations:
        return f"a setting of {op.name}, not data"
    if row.kind == "movement":
        return MOVED
    if math.prod(value.shape) == 1:
        return "scalar"
    integer = row.integer and op.name not in ledger.float_ops
    return "" if integer else f"operand of {op.name}, which runs in float"


def no_int32_reason(ledger: Ledger, op: Op, bias: Value, grids: dict[int, str]) -> str:
    """Why no int32 bias follows from input and weight; empty if one does."""
    if op.type not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
        return FLOAT_OP.format(f"the bias of {op.type}")
    if 0 not in grids or 1 not in grids:
        return "float: its input or weight is not quantized"
    weight = ledger.sites.get(grids[1])
    if weight is None or weight.role != "weight":
        return "float: its weight is not the same in every run"
    data = ledger.spec_of[grids[0]]
    if not isinstance(data.granularity, PerTensor):
        return "float: its input has several scales"
    if not isinstance(data.format, IntFormat) or not isinstance(weight.spec.format, IntFormat):
        return "float: its input or weight is not on an integer grid"
    if data.format.bits > _MOST_INPUT_BITS or weight.spec.format.bits > _MOST_WEIGHT_BITS:
        return "float: its input has more than 16 bits or its weight more than 8"
    shape = ledger.facts.graph.values[weight.value].shape
    if len(shape) < 2:
        return "float: its weight has no output channels"
    if bias_entries(bias.shape) != _output_channels(op, shape):
        return f"float: integer kernels add one number per output channel, and it has shape {bias.shape}"
    if not _scales_follow_channels(op, weight.spec.granularity, shape):
        return "float: its weight has scales that do not belong to one output channel each"
    return ""


def _output_channels(op: Op, shape: tuple[int, ...]) -> int:
    """How many output channels an operator with a weight of ``shape`` has."""
    axis, _ = weight_axes(op.type, op.attrs, 1, len(shape))
    assert axis is not None, op.type
    return shape[axis] * (int(op.attrs.get("group", 1)) if op.type == "ConvTranspose" else 1)


def _scales_follow_channels(op: Op, granularity: Granularity, shape: tuple[int, ...]) -> bool:
    """Whether the weight has one scale, or one per output channel."""
    if isinstance(granularity, PerChannel) and granularity.axis is not None:
        granularity = PerChannel(granularity.axis % len(shape))
    natural = resolve_granularity(op.type, op.attrs, 1, PerChannel(), shape)
    return isinstance(granularity, PerTensor) or granularity == natural
