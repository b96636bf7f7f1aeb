"""GGUF's block types, and the container of tensors and key-value pairs.

A block holds neighbours of one row, its scale in front. Every type stands in :data:`BLOCKS` with the layout of weights that it
holds, so that a weight of a simulation is moved, never rounded again: the numbers that llama.cpp unpacks are the simulation's.

========  ==========================================  =========================================================
type      numbers                                     weights that it holds
========  ==========================================  =========================================================
F32       float32                                     float
F16       float16                                     float16
BF16      bfloat16                                    bfloat16
Q8_0      int8 x float16 in blocks of 32              symmetric int8, groups of 32, float16 scales
Q4_0      (uint4 - 8) x float16                       symmetric int4, groups of 32, float16 scales
Q4_1      uint4 x float16 + float16                   asymmetric 4 bits, groups of 32, scales whose multiples by a zero
                                                      point are float16 numbers
Q5_0      (uint5 - 16) x float16                      symmetric int5, groups of 32, float16 scales
MXFP4     4-bit floats x a power of two               float4_e2m1, groups of 32, e8m0 scales
Q3_K      (uint3 - 4) x integer x float16, in 256     symmetric int3, groups of 16, q3_k scales
Q4_K      uint4 x integer x float16 - integer x       4 bits, groups of 32, q4_k scales: symmetric, where the offset is 8 times
          float16, in 256                             the scale, or with real zero points
Q5_K      the same with uint5                         the same with 5 bits, q5_k scales, 16 times the scale
Q6_K      (uint6 - 32) x int8 x float16, in 256       symmetric int6, groups of 16, q6_k scales
========  ==========================================  =========================================================

llama.cpp subtracts an offset from a product, where a simulation multiplies the difference of a code and a zero point that is a
real number: with the offsets of Q4_K and Q5_K numbers differ by the rounding of float32.

Source: ``ggml-common.h`` and ``docs/gguf.md`` of ggml; ``gguf.quants`` for the order of bits.
"""

from __future__ import annotations

import mmap
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.files import open_regular
from bitwright.core.numerics.affine import split_zero_point, with_scale
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import BFLOAT16, FLOAT4_E2M1, FLOAT16, IntFormat, ScaleFormat, parse_scale_format
from bitwright.core.numerics.granularity import PerBlock
from bitwright.errors import ExportError
from bitwright.llm.packed import Layout, PackedWeight, signed

Bytes = NDArray[np.uint8]
MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
_BLOCK = 32  # elements
_HALVES = (0, 4)  # shifts of the two nibbles of a byte: the first half of a block in the lower ones


@dataclass(frozen=True)
class BlockType:
    """One type of GGUF for quantized weights.

    Attributes:
        number: in the file.
        name: as llama.cpp says it.
        bytes: of a block.
        format: of the codes, on the signed grid.
        symmetric: whether it has no zero points that are whole numbers.
        scales: names of the scale formats whose numbers it can store.
        pack: codes, scales and zero points of blocks -> bytes; shapes ``(blocks, size)``, ``(blocks, groups)``. In place of zero
            points, which are 0, types of 256 elements take the float16 number that the scales of a block are multiples of.
        unpack: bytes ``(blocks, bytes)`` -> codes, scales, and the same.
        free: the same two for weights whose zero points are real numbers, with offsets in place of zero points; ``None`` where
            the type stores none.
        size: elements of a block.
        group: neighbours that share a scale.
    """

    number: int
    name: str
    bytes: int
    format: Any
    symmetric: bool
    scales: tuple[str, ...]
    pack: Callable[[NDArray[Any], NDArray[np.float32], NDArray[Any], str], Bytes]
    unpack: Callable[[Bytes], tuple[NDArray[Any], NDArray[np.float32], NDArray[Any]] | None]
    size: int = _BLOCK
    group: int = _BLOCK
    free: tuple[Callable[..., Bytes], Callable[[Bytes], tuple[NDArray[Any], ...]]] | None = None

    @property
    def inputs(self) -> tuple[int, str]:
        """Quantization of layer inputs by llama.cpp at run time: size of the int8 blocks, format of their scales."""
        return (256, "float32") if self.size == 256 else (32, "float16")

    def holds(self, layout: Layout) -> bool:
        """Whether weights of this layout are stored exactly."""
        fmt = layout.format
        same = isinstance(fmt, IntFormat) and isinstance(self.format, IntFormat) and fmt.bits == self.format.bits
        return (
            (same or fmt == self.format)
            and layout.group == self.group
            and (self.free is not None if layout.float_zero_point else layout.symmetric or not self.symmetric)
            and layout.scale_format in self.scales
        )


def _half(numbers: NDArray[Any], what: str, name: str) -> Bytes:
    """The bytes of float16 numbers.

    Raises:
        ExportError: one of them is no float16 number.
    """
    with np.errstate(over="ignore"):
        stored = numbers.astype(np.float16)
    wrong = stored.astype(np.float32) != numbers
    if wrong.any():
        raise ExportError(
            name,
            f"{what} {float(numbers[wrong][0])!r} is not a float16 number, as which GGUF stores it",
            "quantize with QuantSpec(..., scale_format='float16'); with zero points, scale_format='float12'",
        )
    return np.ascontiguousarray(stored).view(np.uint8).reshape(len(numbers), -1)


def _from_half(data: Bytes) -> NDArray[np.float32]:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _nibbles(codes: NDArray[Any]) -> Bytes:
    halves = codes.astype(np.uint8).reshape(len(codes), 2, _BLOCK // 2)
    return halves[:, 0] + halves[:, 1] * np.uint8(16)


def _from_nibbles(data: Bytes) -> Bytes:
    return np.concatenate([(data >> shift) & 15 for shift in _HALVES], axis=1)


def _no_zero(scale: NDArray[np.float32]) -> NDArray[np.int32]:
    return np.zeros(scale.shape, np.int32)


def _pack_q8_0(codes: NDArray[Any], scale: NDArray[np.float32], zero: NDArray[Any], name: str) -> Bytes:
    return np.concatenate((_half(scale, "the scale", name), codes.astype(np.int8).view(np.uint8)), axis=1)


def _unpack_q8_0(data: Bytes) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[Any]]:
    scale = _from_half(data[:, :2])
    return np.ascontiguousarray(data[:, 2:]).view(np.int8), scale, _no_zero(scale)


def _pack_q4_0(codes: NDArray[Any], scale: NDArray[np.float32], zero: NDArray[Any], name: str) -> Bytes:
    return np.concatenate((_half(scale, "the scale", name), _nibbles(codes.astype(np.int16) + 8)), axis=1)


def _unpack_q4_0(data: Bytes) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[Any]]:
    scale = _from_half(data[:, :2])
    return (_from_nibbles(data[:, 2:]).astype(np.int16) - 8).astype(np.int8), scale, _no_zero(scale)


def _pack_q4_1(codes: NDArray[Any], scale: NDArray[np.float32], zero: NDArray[Any], name: str) -> Bytes:
    least = -(zero.astype(np.float32) + 8) * scale  # exact: at most 11 bits times 4
    parts = _half(scale, "the scale", name), _half(least + np.float32(0), "the offset of a group", name)
    return np.concatenate((*parts, _nibbles(codes.astype(np.int16) + 8)), axis=1)


def _unpack_q4_1(data: Bytes) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[Any]]:
    scale, least = _from_half(data[:, :2]), _from_half(data[:, 2:4])
    safe = np.where(scale == 0, np.float32(1), scale)
    zero = np.rint(-least / safe).astype(np.int32) - 8
    return (_from_nibbles(data[:, 4:]).astype(np.int16) - 8).astype(np.int8), scale, zero


def _pack_q5_0(codes: NDArray[Any], scale: NDArray[np.float32], zero: NDArray[Any], name: str) -> Bytes:
    unsigned = (codes.astype(np.int16) + 16).astype(np.uint8)
    high = np.packbits(unsigned >> 4, axis=1, bitorder="little")
    return np.concatenate((_half(scale, "the scale", name), high, _nibbles(unsigned & 15)), axis=1)


def _unpack_q5_0(data: Bytes) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[Any]]:
    scale, high = _from_half(data[:, :2]), np.unpackbits(data[:, 2:6], axis=1, bitorder="little")
    codes = _from_nibbles(data[:, 6:]).astype(np.int16) + high * np.int16(16) - 16
    return codes.astype(np.int8), scale, _no_zero(scale)


def _pack_mxfp4(codes: NDArray[Any], scale: NDArray[np.float32], zero: NDArray[Any], name: str) -> Bytes:
    exponent = (np.frexp(scale)[1] - 1 + 127).astype(np.uint8)
    return np.concatenate((exponent, _nibbles(codes)), axis=1)


def _unpack_mxfp4(data: Bytes) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[Any]]:
    scale = np.ldexp(np.float32(1), data[:, :1].astype(np.int32) - 127)
    return _from_nibbles(data[:, 1:]), scale, _no_zero(scale)


# ---- blocks of 256: a float16 number, and integers of 6 or 8 bits that make it the scale of a group


def _multiples(scale: NDArray[np.float32], common: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.rint(scale / common).astype(np.uint8)


def _fields(data: Bytes, rows: int, bits: int) -> Bytes:
    """Unpack numbers of ``bits`` bits from bytes: ``rows`` bytes hold the first of each, then the second, ..."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = data.reshape(len(data), -1, 1, rows) >> shifts[:, None]
    return np.asarray((parts & ((1 << bits) - 1)).reshape(len(data), -1), np.uint8)


def _from_fields(numbers: NDArray[Any], rows: int, bits: int) -> Bytes:
    """Pack the bytes that :func:`_fields` unpacks."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = numbers.reshape(len(numbers), -1, 8 // bits, rows) << shifts[:, None]
    return np.bitwise_or.reduce(parts, axis=2).reshape(len(numbers), -1)


def _pack_q6_k(codes: NDArray[Any], scale: NDArray[np.float32], common: NDArray[Any], name: str) -> Bytes:
    numbers = (codes.astype(np.int16) + 32).astype(np.uint8)
    low, high = _from_fields(numbers & 15, 64, 4), _from_fields(numbers >> 4, 32, 2)
    return np.concatenate((low, high, _multiples(scale, common), _half(common, "the number of a block", name)), axis=1)


def _unpack_q6_k(data: Bytes) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[Any]]:
    numbers = _fields(data[:, :128], 64, 4) | _fields(data[:, 128:192], 32, 2) << 4
    common = _from_half(data[:, 208:210])
    multiples = np.ascontiguousarray(data[:, 192:208]).view(np.int8)
    return (numbers.astype(np.int16) - 32).astype(np.int8), multiples * common, common


def _pack_q3_k(codes: NDArray[Any], scale: NDArray[np.float32], common: NDArray[Any], name: str) -> Bytes:
    numbers, multiples = (codes.astype(np.int16) + 4).astype(np.uint8), _multiples(scale, common) + np.uint8(32)
    bits = _from_fields(numbers >> 2, 32, 1)
    parts = _from_fields(multiples & 15, 8, 4), _from_fields(multiples >> 4, 4, 2)
    return np.concatenate(
        (bits, _from_fields(numbers & 3, 32, 2), *parts, _half(common, "the number of a block", name)), axis=1
    )


def _unpack_q3_k(data: Bytes) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[Any]]:
    numbers = _fields(data[:, 32:96], 32, 2) | _fields(data[:, :32], 32, 1) << 2
    multiples = (_fields(data[:, 96:104], 8, 4) | _fields(data[:, 104:108], 4, 2) << 4).astype(np.int8) - np.int8(32)
    common = _from_half(data[:, 108:110])
    return (numbers.astype(np.int16) - 4).astype(np.int8), multiples * common, common


def _six_bits(scales: NDArray[np.uint8], offsets: NDArray[np.uint8]) -> Bytes:
    """Eight multiples of 6 bits of scales, and as many of offsets, in 12 bytes."""
    first, second = scales[:, :4] | scales[:, 4:] >> 4 << 6, offsets[:, :4] | offsets[:, 4:] >> 4 << 6
    return np.concatenate((first, second, (scales[:, 4:] & 15) | (offsets[:, 4:] & 15) << 4), axis=1)


def _from_six_bits(data: Bytes) -> tuple[Bytes, Bytes]:
    """The numbers of :func:`_six_bits`."""
    first, second, rest = data[:, :4], data[:, 4:8], data[:, 8:12]
    scales = np.concatenate((first & 63, (rest & 15) | first >> 6 << 4), axis=1)
    return scales, np.concatenate((second & 63, rest >> 4 | second >> 6 << 4), axis=1)


def _unsigned_codes(numbers: NDArray[np.uint8], bits: int) -> list[Bytes]:
    high = [_from_fields(numbers >> 4, 32, 1)] if bits > 4 else []
    return [*high, _from_fields(numbers & 15, 32, 4)]


def _from_unsigned_codes(data: Bytes, bits: int) -> Bytes:
    numbers = _fields(data[:, -128:], 32, 4)
    return np.asarray(numbers | _fields(data[:, 16:48], 32, 1) << 4, np.uint8) if bits > 4 else numbers


def _pack_with_offsets(
    codes: NDArray[Any], scale: NDArray[np.float32], common: NDArray[Any], name: str, *, bits: int
) -> Bytes:
    middle = 1 << (bits - 1)
    numbers, multiples = (codes.astype(np.int16) + middle).astype(np.uint8), _multiples(scale, common)
    halves = _half(common, "the number of a block", name), _half(common * middle, "the offset of a block", name)
    return np.concatenate((*halves, _six_bits(multiples, multiples), *_unsigned_codes(numbers, bits)), axis=1)


def _pack_with_free_offsets(
    codes: NDArray[Any], scale: NDArray[np.float32], common: NDArray[Any], offset: NDArray[Any], name: str, *, bits: int
) -> Bytes:
    number, least = _shared_number(offset, name)
    halves = _half(common, "the number of a block", name), _half(number, "the offset of a block", name)
    sixes = _six_bits(_multiples(scale, common), least)
    return np.concatenate((*halves, sixes, *_unsigned_codes(codes.astype(np.uint8), bits)), axis=1)


def _shared_number(offset: NDArray[np.float64], name: str) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The float16 number that the offsets of each block, ``(blocks, 8)``, are multiples of, and the multiples, 0 to 63.

    Raises:
        ExportError: there is none.
    """
    largest = offset.max(axis=1, keepdims=True)
    number, multiples = np.zeros(largest.shape, np.float32), np.zeros(offset.shape, np.uint8)
    left = (largest > 0)[:, 0]
    for most in range(63, 0, -1):
        if not left.any():
            break
        found = (largest[left] / most).astype(np.float16).astype(np.float32)
        ratio = offset[left] / np.maximum(found, np.float32(2.0**-24))
        whole = np.rint(ratio)
        fits = (np.abs(ratio - whole) <= 2.0**-18 * np.maximum(whole, 1)).all(1) & (whole <= 63).all(1)
        rows = np.flatnonzero(left)[fits]
        number[rows], multiples[rows] = found[fits], whole[fits].astype(np.uint8)
        left[rows] = False
    if left.any():
        raise ExportError(
            name,
            "the offsets of its groups are not multiples of one float16 number for 256 weights",
            "quantize with scale_format='q4_k' (uint4) or 'q5_k' (uint5), as the presets q4_k_offset and q5_k_offset do",
        )
    return number, multiples


def _unpack_with_offsets(data: Bytes, *, bits: int) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[Any]] | None:
    """``None`` where the offsets are not zero points of a symmetric grid."""
    middle = 1 << (bits - 1)
    codes, scale, common, offset = _unpack_with_free_offsets(data, bits=bits)
    if not np.array_equal(offset, scale * middle):
        return None
    return (codes.astype(np.int16) - middle).astype(np.int8), scale, common


def _unpack_with_free_offsets(data: Bytes, *, bits: int) -> tuple[NDArray[Any], ...]:
    common, number = _from_half(data[:, :2]), _from_half(data[:, 2:4])
    multiples, offsets = _from_six_bits(data[:, 4:16])
    return _from_unsigned_codes(data, bits), multiples * common, common, offsets * number


_HALF = ("float16", "float12")
BLOCKS: dict[str, BlockType] = {
    row.name: row
    for row in (
        BlockType(8, "Q8_0", 34, IntFormat(8), True, _HALF, _pack_q8_0, _unpack_q8_0),
        BlockType(2, "Q4_0", 18, IntFormat(4), True, _HALF, _pack_q4_0, _unpack_q4_0),
        BlockType(3, "Q4_1", 20, IntFormat(4), False, ("float12",), _pack_q4_1, _unpack_q4_1),
        BlockType(6, "Q5_0", 22, IntFormat(5), True, _HALF, _pack_q5_0, _unpack_q5_0),
        BlockType(39, "MXFP4", 17, FLOAT4_E2M1, True, ("e8m0",), _pack_mxfp4, _unpack_mxfp4),
        BlockType(11, "Q3_K", 110, IntFormat(3), True, ("q3_k",), _pack_q3_k, _unpack_q3_k, 256, 16),
        *(
            BlockType(
                number,
                f"Q{bits}_K",
                size,
                IntFormat(bits),
                True,
                (f"q{bits}_k",),
                partial(_pack_with_offsets, bits=bits),
                partial(_unpack_with_offsets, bits=bits),
                256,
                free=(partial(_pack_with_free_offsets, bits=bits), partial(_unpack_with_free_offsets, bits=bits)),
            )
            for number, bits, size in ((12, 4, 144), (13, 5, 176))
        ),
        BlockType(14, "Q6_K", 210, IntFormat(6), True, ("q6_k",), _pack_q6_k, _unpack_q6_k, 256, 16),
    )
}
#: name of a torch dtype or of a float format -> number of the type, bytes of an element
FLOATS: dict[str, tuple[int, int]] = {"float32": (0, 4), "float16": (1, 2), "bfloat16": (30, 2)}
_FLOAT_OF_NUMBER = {number: name for name, (number, _) in FLOATS.items()}


def block_of(layout: Layout) -> BlockType | None:
    """The first type that holds weights of this layout."""
    return next((row for row in BLOCKS.values() if row.holds(layout)), None)


def to_blocks(weight: PackedWeight, row: BlockType) -> Bytes:
    """The bytes of a matrix, ``(rows, bytes of a row)``.

    Raises:
        ExportError: a scale is no number that the type stores.
    """
    codes, zero = signed(weight)
    rows, groups = weight.shape[0], row.size // row.group
    common = weight.encoding.common
    if weight.encoding.shift is not None:
        assert common is not None and row.free is not None
        offset = weight.scale * weight.encoding.zero.astype(np.float64)
        parts = [np.asarray(array).reshape(-1, groups) for array in (weight.scale, common, offset)]
        blocks = weight.codes.reshape(-1, row.size)
        return row.free[0](blocks, parts[0], parts[1][:, :1], parts[2], weight.name).reshape(rows, -1)
    scale, zero = (np.asarray(array).reshape(-1, groups) for array in (weight.scale, zero))
    if row.size > row.group:
        assert common is not None and common.shape == weight.scale.shape
        zero = common.reshape(-1, groups)[:, :1]
    return row.pack(codes.reshape(-1, row.size), scale, zero, weight.name).reshape(rows, -1)


def from_blocks(name: str, data: Bytes, shape: Sequence[int], row: BlockType) -> PackedWeight:
    """The weight that :func:`to_blocks` stored."""
    blocks = np.ascontiguousarray(data).reshape(-1, row.bytes)
    unpacked = row.unpack(blocks)
    if unpacked is None:
        return _with_free_offsets(name, blocks, shape, row)
    codes, scale, zero = unpacked
    per_block, granularity = _grouped(shape, row)
    fmt: ScaleFormat = parse_scale_format(row.scales[0])
    if fmt.shared == "blocks":
        common = np.broadcast_to(zero, scale.shape).reshape(per_block)
        scale = np.where(
            scale.reshape(per_block) > 0, scale.reshape(per_block), common
        )  # groups of zeros may have none
        made = Encoding(row.format, scale, np.zeros(per_block, np.int32), granularity, fmt, common)
        return PackedWeight(name, codes.reshape(shape), made)
    encoding = Encoding(row.format, scale.reshape(per_block), zero.reshape(per_block), granularity)
    return PackedWeight(name, codes.reshape(shape), with_scale(encoding, encoding.scale, fmt))


def _grouped(shape: Sequence[int], row: BlockType) -> tuple[tuple[int, ...], PerBlock]:
    per_block = (*shape[:-1], shape[-1] // row.group)
    return per_block, PerBlock(row.group, len(shape) - 1, tuple(range(len(shape) - 1)))


def _with_free_offsets(name: str, blocks: Bytes, shape: Sequence[int], row: BlockType) -> PackedWeight:
    """The weight of blocks whose zero points are real numbers."""
    assert row.free is not None and isinstance(row.format, IntFormat)
    codes, scale, common, offset = row.free[1](blocks)
    per_block, granularity = _grouped(shape, row)
    fmt = IntFormat(row.format.bits, signed=False)
    common = np.maximum(common, np.float32(2.0**-24))
    codes = np.where(scale.repeat(row.group, 1) > 0, codes, 0)  # groups without a scale are their offset
    scale = np.where(scale > 0, scale, common)
    zero = (offset.astype(np.float64) / scale).astype(np.float32)
    zero_point, shift = split_zero_point(zero.reshape(per_block), fmt)
    scale, common = (np.broadcast_to(part, scale.shape).reshape(per_block) for part in (scale, common))
    stored = parse_scale_format(row.scales[0])
    made = Encoding(fmt, scale, zero_point, granularity, stored, common, shift=shift)
    return PackedWeight(name, codes.astype(np.uint8).reshape(shape), made)


# ------------------------------------------------------------------------------------------------ the container

_KINDS: dict[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class Typed:
    """A value of a key with the type it has in the file; ``of`` is that of the elements of an array."""

    value: Any
    kind: int
    of: int = 0


def _text(text: str | bytes) -> bytes:
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any, kind: int, of: int = 0) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind != ARRAY:
        return struct.pack(_KINDS[kind], value)
    items = b"".join(_value(item, of) for item in value)
    return struct.pack("<IQ", of, len(value)) + items


class Writer:
    """Writes a GGUF file tensor by tensor; data are spooled beside it until the header is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spool: IO[bytes] = open(path.with_suffix(".data"), "wb")
        self._tensors: list[tuple[str, tuple[int, ...], int, int]] = []
        self.keys: dict[str, Typed] = {}

    def add(self, name: str, shape: Sequence[int], number: int, data: NDArray[Any]) -> None:
        """Take one tensor; ``shape`` counts elements, slowest axis first."""
        self._tensors.append((name, tuple(shape), number, self._spool.tell()))
        self._spool.write(np.ascontiguousarray(data).tobytes())
        self._spool.write(b"\0" * (-self._spool.tell() % ALIGNMENT))

    def finish(self) -> None:
        """Write header and data to the path, and remove the spool."""
        self._spool.close()
        with open(self.path, "wb") as file:
            file.write(MAGIC + struct.pack("<IQQ", VERSION, len(self._tensors), len(self.keys)))
            for key, typed in self.keys.items():
                file.write(_text(key) + struct.pack("<I", typed.kind) + _value(typed.value, typed.kind, typed.of))
            for name, shape, number, offset in self._tensors:
                dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
                file.write(_text(name) + dimensions + struct.pack("<IQ", number, offset))
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            with open(self._spool.name, "rb") as data:
                shutil.copyfileobj(data, file, 1 << 24)
        Path(self._spool.name).unlink()


class Reader:
    """Keys and tensors of a GGUF file; tensors are read from disk on demand.

    Raises:
        ExportError: it is no GGUF file of version 3, or ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path, ExportError) as file:
            if file.read(4) != MAGIC:
                raise self._damaged("it does not begin with GGUF")
            file.seek(0)
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 4
        try:
            version, tensors, keys = self._take("<IQQ")
            if version != VERSION:
                raise self._damaged(f"it is of version {version}, and version {VERSION} is read")
            self.keys = {self._string(): self._typed(self._take("<I")[0]) for _ in range(keys)}
            self.tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
            for _ in range(tensors):
                name, (count,) = self._string(), self._take("<I")
                shape = tuple(reversed(self._take(f"<{count}Q")))
                number, offset = self._take("<IQ")
                self.tensors[name] = shape, number, offset
        except (struct.error, UnicodeDecodeError, MemoryError, KeyError) as error:
            raise self._damaged(f"its header cannot be read ({type(error).__name__}: {error})") from error
        self._start = self._at + -self._at % int(self.keys.get("general.alignment", ALIGNMENT))

    def _damaged(self, problem: str) -> ExportError:
        return ExportError(str(self.path), problem, "copy or write the file again")

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def _string(self) -> str:
        (size,) = self._take("<Q")
        (raw,) = self._take(f"<{size}s")
        return str(raw, "utf-8", "surrogateescape")

    def _typed(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._take(_KINDS[kind])[0]
        of, count = self._take("<IQ")
        if of in (STRING, ARRAY):
            return [self._typed(of) for _ in range(count)]
        return list(self._take(f"<{count}{_KINDS[of][1]}"))

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def bytes_of(self, name: str) -> Bytes:
        """The bytes of a tensor.

        Raises:
            ExportError: the file ends before them, or the type is not one that is read.
        """
        shape, number, offset = self.tensors[name]
        elements = int(np.prod(shape, dtype=np.int64))
        row = next((row for row in BLOCKS.values() if row.number == number), None)
        if row is None and number not in _FLOAT_OF_NUMBER:
            known = ", ".join((*BLOCKS, "F32", "F16", "BF16"))
            raise ExportError(
                f"{self.path}: {name}", f"its type has the number {number}", f"types that are read: {known}"
            )
        size = elements * FLOATS[_FLOAT_OF_NUMBER[number]][1] if row is None else elements // row.size * row.bytes
        start = self._start + offset
        if start + size > len(self._data):
            raise self._damaged(f"it ends before the data of {name}")
        return np.frombuffer(self._data, np.uint8, size, start)

    def block_type(self, name: str) -> BlockType | None:
        """The type of a quantized tensor; ``None`` for floats."""
        number = self.tensors[name][1]
        return next((row for row in BLOCKS.values() if row.number == number), None)

    def dtype(self, name: str) -> str:
        """Name of the dtype of a float tensor."""
        return _FLOAT_OF_NUMBER[self.tensors[name][1]]


def typed(keys: Mapping[str, Any]) -> dict[str, Typed]:
    """Keys with the types that llama.cpp reads: whole numbers as uint32, others as float32."""
    found = {}
    for key, value in keys.items():
        if isinstance(value, Typed):
            found[key] = value
        elif isinstance(value, bool):
            found[key] = Typed(value, BOOL)
        elif isinstance(value, int):
            found[key] = Typed(value, U32)
        elif isinstance(value, float):
            found[key] = Typed(value, F32)
        else:
            found[key] = Typed(str(value), STRING)
    return found


HALF_FORMATS = {FLOAT16: "float16", BFLOAT16: "bfloat16"}
