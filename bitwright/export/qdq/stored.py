"""Stored form of a constant: its codes in the type of a file, with scale and zero point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.numerics.affine import fake_quantize, quantize
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FloatFormat, Format, IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.errors import EncodingsError, GranularityError

D = ir.DataType
INTEGERS: dict[tuple[int, bool], ir.DataType] = {
    (4, True): D.INT4, (8, True): D.INT8, (16, True): D.INT16,
    (4, False): D.UINT4, (8, False): D.UINT8, (16, False): D.UINT16,
}  # fmt: skip
FLOAT8 = {"float8_e4m3": D.FLOAT8E4M3FN, "float8_e5m2": D.FLOAT8E5M2}
HALVES = {"float16": D.FLOAT16, "bfloat16": D.BFLOAT16}


@dataclass(frozen=True)
class Stored:
    """A constant in stored form; ``array`` has the stored dtype.

    What DequantizeLinear cannot say is written out: ``scale`` then broadcasts against the codes, which are indices into a
    ``table`` (the numbers of a codebook, or its vectors, ``[k, d]``), or have a float ``zero_point``; ``shape`` is that of the
    constant where codes are divided into blocks or stand for vectors.
    """

    array: NDArray[Any]
    scale: NDArray[np.float32] | None
    zero_point: NDArray[Any] | None
    axis: int | None = None
    block: int | None = None
    table: NDArray[np.float32] | None = None
    shape: NDArray[np.int64] | None = None

    @property
    def op(self) -> str | None:
        """The operator that computes its float value; none where it is stored in float."""
        if self.table is not None:
            return "Gather"
        if self.zero_point is not None and self.zero_point.dtype == np.float32:
            return "Sub"
        if self.scale is not None:
            return "DequantizeLinear"
        return None if self.array.dtype == np.float32 else "Cast"


def unsigned(encoding: Encoding) -> Encoding:
    """The same grid counted from zero: codes and zero point shifted by ``2 ** (bits - 1)``; values unchanged.

    The unsigned format cannot say that a grid is narrow; the writer's float Clip keeps its lowest code at 1.
    """
    fmt = encoding.format
    if not isinstance(fmt, IntFormat) or not fmt.signed or encoding.dynamic:
        return encoding
    shift = 1 << (fmt.bits - 1)
    wide = encoding.zero_point.astype(np.int64) + shift
    return replace(encoding, format=IntFormat(fmt.bits, signed=False), zero_point=wide)


def check_shape(encoding: Encoding, shape: tuple[int, ...], site: str) -> None:
    """Refuse an encoding whose scale does not fit a tensor of ``shape``.

    Raises:
        EncodingsError: with both shapes.
    """
    expected: tuple[int, ...] | str
    try:
        expected = encoding.granularity.param_shape(shape, site)
    except GranularityError as error:
        expected = error.problem
    if encoding.scale.shape != expected:
        raise EncodingsError(
            site,
            f"its encoding has a scale of shape {encoding.scale.shape}, but a tensor of shape {shape} with "
            f"{encoding.granularity} needs {expected}",
            "compute the encodings again for this model",
        )


def has_scale(encoding: Encoding) -> bool:
    """Whether constants of ``encoding`` are stored as codes that DequantizeLinear scales.

    Its zero points are whole numbers. Halves are numbers of their own. Numbers of a codebook are looked up, which
    DequantizeLinear does not do. Above 16 bits DequantizeLinear takes int32, which integer kernels would misread.
    """
    fmt = encoding.format
    if isinstance(fmt, IntFormat):
        return fmt.bits <= 16 and encoding.shift is None and encoding.vectors is None
    return not fmt.codebook and fmt.name not in HALVES


def store_constant(
    array: NDArray[Any],
    encoding: Encoding,
    shown: Encoding,
    site: str,
    *,
    width: int | None = None,
    written_out: bool = False,
) -> Stored:
    """The stored form of a constant, see the table of this module.

    Args:
        array: any float type; computed in float32 (float64 above 16 bits).
        encoding: as simulated; fits the shape of ``array``.
        shown: the grid to be written: ``encoding`` itself or its :func:`unsigned` form.
        site: name for error messages.
        width: least number of bits that the codes take; 16 for what no integer kernel is to take up.
        written_out: whether grids that DequantizeLinear has no form for are stored as codes: indices into a codebook, which
            Gather looks up, and codes with zero points that are real numbers; else the numbers are stored in float.

    Raises:
        EncodingsError: the encoding does not fit the shape.
    """
    array = np.asarray(array, np.float32)
    check_shape(encoding, array.shape, site)
    fmt = encoding.format
    found = _by_vectors(array, encoding) if written_out else None
    if found is not None:
        return found
    if encoding.vectors is not None:
        encoding, shown = replace(encoding, vectors=None), replace(shown, vectors=None)
    if fmt.name in HALVES:
        return Stored(np.asarray(quantize(array, encoding)).astype(HALVES[fmt.name].numpy()), None, None)
    if not has_scale(encoding):
        if written_out and fmt.bits <= 8:
            return _written_out(array, encoding)
        return Stored(np.asarray(fake_quantize(array, encoding)), None, None)
    codes = np.asarray(quantize(array, encoding))
    if is_small_float(fmt):  # its numbers are whole multiples of the smallest one
        steps = replace(encoding, scale=encoding.scale * np.float32(fmt.step))
        small = fmt.max / fmt.step <= 127 and width != 16
        return _scaled((codes / fmt.step).astype(np.int8 if small else np.int16), steps, array.shape)
    if isinstance(fmt, FloatFormat):
        return _scaled(codes.astype(FLOAT8[fmt.name].numpy()), encoding, array.shape)
    bits = max(fmt.bits, width or 0)
    dtype = INTEGERS[
        4 if bits <= 4 else 8 if bits <= 8 else 16, isinstance(shown.format, IntFormat) and shown.format.signed
    ]
    shift = (1 << (fmt.bits - 1)) if shown.format != fmt else 0
    return _scaled((codes.astype(np.int64) + shift).astype(dtype.numpy()), shown, array.shape)


def _by_vectors(array: NDArray[Any], encoding: Encoding) -> Stored | None:
    """Indices of the vectors of a codebook for Gather, whose entries the scales multiply; ``None`` where there are none."""
    if encoding.vectors is None:
        return None
    size, axis = encoding.vectors
    codes, shape = np.asarray(quantize(array, encoding)), array.shape
    if axis == -2:
        codes = codes.swapaxes(-1, -2)
    table, index = np.unique(codes.reshape(-1, size), axis=0, return_inverse=True)
    if len(table) > 256:
        return None
    lead = codes.shape if len(shape) == 2 else (shape[0], math.prod(shape[1:]))
    scale = encoding.scale
    if isinstance(encoding.granularity, PerChannel):
        scale = np.asarray(encoding.granularity.spread(scale, shape))
    stored = index.reshape(lead[0], lead[1] // size).astype(D.UINT4.numpy() if len(table) <= 16 else np.uint8)
    return Stored(stored, scale, None, axis, None, table.astype(np.float32), np.array(shape, np.int64))


def _written_out(array: NDArray[Any], encoding: Encoding) -> Stored:
    """Codes for Gather or Sub; in blocks, an axis of ``array`` is two: the blocks, and what is in them."""
    fmt, shape, codes = encoding.format, array.shape, np.asarray(quantize(array, encoding))
    table = np.array(fmt.codebook, np.float32) if isinstance(fmt, FloatFormat) else None
    codes = (codes if table is None else np.searchsorted(table, codes)).astype(
        D.UINT4.numpy() if fmt.bits <= 4 else np.uint8
    )
    params = [encoding.scale, *([] if encoding.shift is None else [np.asarray(encoding.zero, np.float32)])]
    granularity, blocked = encoding.granularity, None
    if isinstance(granularity, PerChannel):
        assert granularity.axis is not None
        lengths = [-1 if i == granularity.axis % len(shape) else 1 for i in range(len(shape))]
        params = [param.reshape(lengths) for param in params]
    elif isinstance(granularity, PerBlock):
        assert granularity.axis is not None
        axis, length, blocked = granularity.axis % len(shape), shape[granularity.axis], np.array(shape, np.int64)
        size = math.gcd(granularity.size, length)  # of whole blocks, also where the last one is shorter
        index = (*(slice(None),) * axis, slice(0, length // size))
        params = [np.expand_dims(np.repeat(p, granularity.size // size, axis)[index], axis + 1) for p in params]
        codes = codes.reshape(*shape[:axis], length // size, size, *shape[axis + 1 :])
    return Stored(codes, params[0], params[1] if len(params) > 1 else None, table=table, shape=blocked)


def folded(small: Stored, rank: int) -> Stored:
    """``small`` with scale and zero point that broadcast against the codes, for operators that know no axis."""
    assert small.scale is not None
    scale = _spread_along(small.scale, small, rank)
    if small.zero_point is None or not small.zero_point.any():
        return Stored(small.array, scale, None, small.axis)
    zeros = _spread_along(small.zero_point, small, rank).astype(np.float32)
    return Stored(small.array, scale, zeros, small.axis)


def in_whole_blocks(small: Stored) -> Stored:
    """``small`` with blocks of a size that divides the axis, the largest one; values unchanged, scales repeated.

    A last block that is shorter is allowed by ONNX (DequantizeLinear, ``block_size``), not by every runtime.
    """
    axis, block = small.axis, small.block
    if axis is None or block is None or small.array.shape[axis] % block == 0:
        return small
    length = small.array.shape[axis]
    size = math.gcd(block, length)
    index = (*(slice(None),) * axis, slice(0, length // size))
    scale, zeros = (
        None if p is None else np.repeat(p, block // size, axis)[index] for p in (small.scale, small.zero_point)
    )
    return replace(small, scale=scale, zero_point=zeros, block=size)


def _spread_along(param: NDArray[Any], small: Stored, rank: int) -> NDArray[Any]:
    if small.axis is None:
        return param
    if small.block is None:
        return param.reshape([-1 if i == small.axis else 1 for i in range(rank)])
    for axis in range(rank):
        if axis != small.axis and (param == param.take([0], axis)).all():
            param = param.take([0], axis)
    index = (*(slice(None),) * small.axis, slice(0, small.array.shape[small.axis]))
    return np.repeat(param, small.block, small.axis)[index]


def _scaled(codes: NDArray[Any], encoding: Encoding, shape: tuple[int, ...]) -> Stored:
    """Codes with scale and zero point in the shapes DequantizeLinear wants."""
    zero_point, granularity = encoding.zero_point.astype(codes.dtype), encoding.granularity
    if isinstance(granularity, PerTensor):
        return Stored(codes, encoding.scale, zero_point)
    assert granularity.axis is not None
    axis = granularity.axis % len(shape)
    if isinstance(granularity, PerChannel):
        return Stored(codes, encoding.scale, zero_point, axis)
    found = _blocked_axis(encoding.scale.shape, shape)
    axis, size = (axis, granularity.size) if found is None or found[0] == axis else found
    # A zero point as large as the expanded scale is only worth its bytes when it says something.
    zeros = expanded(zero_point, axis, shape) if encoding.zero_point.any() else None
    return Stored(codes, expanded(encoding.scale, axis, shape), zeros, axis, size)


def _blocked_axis(param: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The single blocked axis, and its block size; nothing has to be expanded then."""
    shared = [axis for axis, (n, length) in enumerate(zip(param, shape, strict=True)) if n != length]
    return (shared[0], shape[shared[0]] // param[shared[0]]) if len(shared) == 1 else None


def expanded(param: NDArray[Any], axis: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """A block-wise parameter with every axis but ``axis`` as long as the tensor's, which ONNX demands."""
    full = (*shape[:axis], param.shape[axis], *shape[axis + 1 :])
    return np.ascontiguousarray(np.broadcast_to(param, full))


def transpose_encoding(encoding: Encoding, perm: Sequence[int]) -> Encoding:
    """The encoding of a constant after a transposition by ``perm``."""
    granularity = encoding.granularity
    if isinstance(granularity, PerTensor):
        return encoding
    where = {source % len(perm): target for target, source in enumerate(perm)}
    assert granularity.axis is not None
    axis = where[granularity.axis % len(perm)]
    if isinstance(granularity, PerChannel):
        return replace(encoding, granularity=PerChannel(axis), vectors=None)
    channels = tuple(where[channel % len(perm)] for channel in granularity.channel_axes)
    moved = PerBlock(granularity.size, axis, channels)
    common = encoding.common
    return replace(
        encoding,
        scale=encoding.scale.transpose(perm),
        zero_point=encoding.zero_point.transpose(perm),
        shift=None if encoding.shift is None else encoding.shift.transpose(perm),
        granularity=moved,
        common=common if common is None else common.transpose(perm),
    )


def is_small_float(fmt: Format) -> TypeGuard[FloatFormat]:
    """Whether ``fmt`` is a float format of fewer than 8 bits, which no operator of ONNX Runtime rounds to."""
    return isinstance(fmt, FloatFormat) and fmt.bits < 8
