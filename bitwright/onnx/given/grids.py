"""Grids of quantizers as a file holds them: scale, zero point, axis and blocks of a node, as an encoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import (
    FLOAT4_E2M1,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FloatFormat,
    Format,
    IntFormat,
    parse_format,
)
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor
from bitwright.errors import FormatError, ModelError
from bitwright.export.qdq.forms import folded_parts
from bitwright.export.qdq.stored import is_small_float

Array = NDArray[Any]

_FLOATS: dict[ir.DataType, FloatFormat] = {
    ir.DataType.FLOAT8E4M3FN: FLOAT8_E4M3,
    ir.DataType.FLOAT8E5M2: FLOAT8_E5M2,
    ir.DataType.FLOAT4E2M1: FLOAT4_E2M1,
}


def fixed_number(node: ir.Node, value: ir.Value) -> Array:
    """A scale or zero point, which must be known before the model runs."""
    seen: ir.Value | None = value
    while seen is not None and seen.const_value is None:
        maker = seen.producer()
        seen = maker.inputs[0] if maker is not None and maker.op_type == "Identity" else None
    if seen is None or seen.const_value is None:
        raise ModelError(
            str(node.name),
            f"its parameter {value.name!r} is computed while the model runs",
            "start from the float model: such a quantizer has no fixed encoding",
        )
    array: Array = seen.const_value.numpy()
    return array


def stored_constant(node: ir.Node, facts: dict[str, Any], codes: Array) -> tuple[Array, Encoding | None]:
    """The float32 that ``node`` makes of codes, and their grid; ``None`` for that where blocks cannot say it."""
    scale, zero, axis, block = np.ones((), np.float32), None, 0, 0
    if node.op_type == "Mul":
        scale, zero, axis = _folded_parameters(node, facts)
    elif node.op_type != "Cast":
        scale, zero, axis, block = _linear_parameters(node, codes.dtype)
    check_fits(node, scale, zero, axis, block, codes.shape)
    where = codes.ndim and axis % codes.ndim
    wide = codes.astype(np.float32)
    if zero is not None:
        wide -= _spread(zero.astype(np.float32), codes.shape, where, block)
    wide *= _spread(scale, codes.shape, where, block)
    dtype = ir.DataType.from_numpy(codes.dtype)
    fmt: Format = parse_format(facts["format"]) if facts else _written_format(node, dtype)
    if is_small_float(fmt) and codes.dtype.kind == "i":  # whole multiples of the smallest number
        scale = scale / np.float32(fmt.step)
    if isinstance(fmt, IntFormat) and zero is not None:
        zero = unshifted(zero, fmt)
    try:
        return wide, encoding_of(fmt, scale, zero, axis, block, codes.ndim)
    except ModelError:
        return wide, None


def _folded_parameters(node: ir.Node, facts: dict[str, Any]) -> tuple[Array, Array | None, int]:
    """Scale, zero point and axis of a constant that Cast, Sub and Mul make."""
    parts = folded_parts(node)
    assert parts is not None
    _, zeros, factor = parts
    scale = fixed_number(node, factor).astype(np.float32)
    zero = None if zeros is None else fixed_number(node, zeros).reshape(-1)
    return scale.reshape(-1) if scale.size > 1 else scale.reshape(()), zero, facts.get("axis") or 0


def _linear_parameters(node: ir.Node, kind: np.dtype[Any]) -> tuple[Array, Array | None, int, int]:
    """Scale, zero point, axis and length of blocks of a QuantizeLinear or DequantizeLinear with codes of this type."""
    assert node.inputs[1] is not None
    scale = fixed_number(node, node.inputs[1]).astype(np.float32)
    third = node.inputs[2] if len(node.inputs) > 2 else None
    zero = None if third is None else fixed_number(node, third)
    if zero is not None and zero.dtype.kind not in "iu" and kind.kind not in "iu":
        zero = None if not zero.astype(np.float32).any() else zero
    if not np.isfinite(scale).all() or not (scale > 0).all():
        raise ModelError(
            str(node.name),
            f"its scale is not a positive number everywhere: {float(scale.min()):.3g} to {float(scale.max()):.3g}",
            "quantize the model again; a scale of zero or less has no meaning",
        )
    return scale, zero, node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)


def check_fits(
    node: ir.Node, scale: Array, zero: Array | None, axis: int, block: int, shape: Sequence[int | None] | None
) -> None:
    """Refuse scales that do not belong to a tensor of ``shape``, of which nothing or single axes may not be known.

    Raises:
        ModelError: with what does not fit; ONNX Runtime does not load such a quantizer either.
    """

    problem = _misfit(scale, zero, axis, block, shape)
    if problem:
        raise ModelError(str(node.name), problem, "quantize the model again, or correct the file: no runtime reads it")


def _misfit(scale: Array, zero: Array | None, axis: int, block: int, shape: Sequence[int | None] | None) -> str:
    if not scale.size:
        return "it has no scale"
    if zero is not None and zero.size not in (1, scale.size):
        return f"it has {zero.size} zero points and {scale.size} scales"
    if block < 0:
        return f"its blocks have {block} elements"
    return "" if shape is None or not (block or scale.size > 1) else _wrong_length(scale, axis, block, shape)


def _wrong_length(scale: Array, axis: int, block: int, shape: Sequence[int | None]) -> str:
    rank = len(shape)
    if not -rank <= axis < rank:
        return f"its axis is {axis}, and its tensor has {rank} axes"
    axis %= rank
    needed: list[int | None] = [shape[axis]]
    if block:
        needed = [-(-n // block) if i == axis and n is not None else n for i, n in enumerate(shape)]
    if scale.ndim == len(needed) and all(n in (None, have) for have, n in zip(scale.shape, needed, strict=True)):
        return ""
    text = "x".join("?" if n is None else str(n) for n in shape)
    kind = f"blocks of {block} along axis {axis}" if block else f"axis {axis}"
    return f"its scales have the shape {list(scale.shape)}, which does not fit {kind} of a tensor of shape {text}"


def written_grid(node: ir.Node) -> Encoding:
    """The grid of a QuantizeLinear or DequantizeLinear."""
    entry = node.inputs[0]
    third = node.inputs[2] if len(node.inputs) > 2 else None
    codes = node.outputs[0] if node.op_type == "QuantizeLinear" else entry
    dtype = codes.dtype if third is None and codes is not None else None if third is None else third.dtype
    dtype = dtype or ir.DataType(node.attributes.get_int("output_dtype", 0) or int(ir.DataType.UINT8))
    scale, zero, axis, block = _linear_parameters(node, np.dtype(dtype.numpy()))
    check_fits(node, scale, zero, axis, block, lengths_of(entry))
    return encoding_of(_written_format(node, dtype), scale, zero, axis, block, rank_of(entry))


def encoding_of(
    fmt: Format, scale: Array, zero: Array | None, axis: int | None, block: int, rank: int | None
) -> Encoding:
    """Numbers as a file holds them as an encoding of a tensor of this rank, which may be unknown."""
    granularity: Granularity = PerTensor()
    scale = np.asarray(scale, np.float32)
    zero = np.zeros(scale.shape, np.int64) if zero is None else np.asarray(zero).astype(np.int64)
    if block:
        granularity, scale, zero = _in_blocks(scale, zero, axis or 0, block)
    elif axis is None or scale.size == 1:
        scale = scale.reshape(())
    else:
        granularity, scale = PerChannel(axis if rank is None else axis % rank), scale.reshape(-1)
    zero = zero.reshape(scale.shape) if zero.size == scale.size else np.broadcast_to(zero, scale.shape)
    if isinstance(fmt, FloatFormat):
        zero = np.zeros(scale.shape, np.int64)
    return Encoding(fmt, scale, zero, granularity)


def lengths_of(value: ir.Value | None) -> list[int | None] | None:
    """The lengths of the axes of a tensor, as far as they are known."""
    return None if value is None or value.shape is None else [n if isinstance(n, int) else None for n in value.shape]


def rank_of(value: ir.Value | None) -> int | None:
    """How many axes a tensor has, where that is known."""
    return None if value is None or value.shape is None else len(value.shape)


def _written_format(node: ir.Node, dtype: ir.DataType) -> Format:
    """The number format of codes of this type.

    Raises:
        ModelError: there is none.
    """
    if dtype in _FLOATS:
        return _FLOATS[dtype]
    if dtype.is_integer():
        try:
            return IntFormat(dtype.bitwidth, signed=dtype.is_signed())
        except FormatError:  # one bit
            pass
    raise ModelError(
        str(node.name),
        f"it quantizes to {dtype.name.lower()}, which has no counterpart here",
        "use integers of 2 to 16 bits, float8e4m3fn or float8e5m2",
    )


def unshifted(zero: Array, fmt: IntFormat) -> Array:
    """The zero point of a signed grid that may have been written counted from zero."""
    counted = zero.dtype.kind == "u" or zero.dtype.name in ("uint2", "uint4")
    shift = 1 << (fmt.bits - 1) if fmt.signed and counted else 0
    return np.asarray(zero.astype(np.int64) - shift)


def _in_blocks(scale: Array, zero: Array, axis: int, block: int) -> tuple[PerBlock, Array, Array]:
    """Blocks as ONNX writes them, one scale per index of every other axis, as one scale per channel where they agree."""
    axis %= scale.ndim
    others = [i for i in range(scale.ndim) if i != axis]
    zero = np.broadcast_to(zero, scale.shape)
    differing = [i for i in others if not (_constant_along(scale, i) and _constant_along(zero, i))]
    # of a matrix the other axis is the channel's, whatever the numbers say
    channels = differing or (others if len(others) == 1 else [])
    keep = tuple(slice(None) if i in (axis, *channels) else slice(0, 1) for i in range(scale.ndim))
    return PerBlock(block, axis, tuple(channels)), scale[keep], zero[keep]


def _constant_along(array: Array, axis: int) -> bool:
    return bool((array == array.take([0], axis)).all())


def _spread(param: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    """A scale or zero point as long as a tensor of ``shape``, or with axes of length one."""
    if block:
        return np.repeat(param, block, axis)[tuple(slice(0, n) for n in shape)]
    if param.size == 1:
        return param.reshape(())
    return param.reshape([-1 if i == axis else 1 for i in range(len(shape))])
