"""Bounds, histograms and constant channels of an array in one pass over memory.

Floats are compared by the integers their bits make: ``b ^ ((b >> 31) & 0x7fffffff)`` orders them as their values, minus zero
below zero, and puts NaN beyond both infinities. Integers have minima and maxima in vector units whatever a NaN may do.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.int32]
Floats = NDArray[np.float32]

HALF = 2047
"""Where bin 0 is in a table of counts: ``HALF_BINS - 1`` of :mod:`bitwright.core.numerics.statistics`."""


def value_of_key(key: int) -> float:
    """Convert an integer that sorts like a float32 back to the float32.

    >>> value_of_key(0), value_of_key(0x3F800000), value_of_key(~0x3F800000)
    (0.0, 1.0, -1.0)
    """
    bits = key if key >= 0 else (key ^ 0x7FFFFFFF) & 0xFFFFFFFF
    return float(struct.unpack("<f", struct.pack("<I", bits))[0]) + 0.0


def values_of_keys(keys: Bits) -> Floats:
    """Convert an array of keys, see :func:`value_of_key`.

    >>> values_of_keys(np.array([0x3F800000, ~0], np.int32)).tolist()
    [1.0, 0.0]
    """
    return np.where(keys >= 0, keys, keys ^ np.int32(0x7FFFFFFF)).view(np.float32) + np.float32(0)


NO_KEY = 2**31 - 1
"""Above the keys of all numbers; its complement lies below them."""


def key_bounds(bits: Bits) -> tuple[np.int32, np.int32]:
    """Least and largest key of an array of at least one float32 given as its bits."""
    lo, hi = np.int32(2147483647), np.int32(-2147483648)
    for i in range(bits.size):
        b = bits[i]
        key = np.int32(b ^ ((b >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        lo, hi = min(lo, key), max(hi, key)
    return lo, hi


def count_bins(
    x: Floats,
    bits: Bits,
    start: int,
    largest: int,
    inverse: np.float32,
    codes: NDArray[np.uint16],
    tables: NDArray[np.uint16],
    counts: NDArray[np.int64],
    found: NDArray[np.int64],
) -> int:
    """Count the elements of ``x`` from ``start`` on, up to a piece that holds a value that has no bin.

    Four neighbours are counted in four tables: an increment has to wait for the last one of the same bin. The tables hold 16
    bits, so that all four stay in the first-level cache, and are added to ``counts`` after every piece.

    Args:
        x, bits: the same array, as float32 and as its bits.
        start: a multiple of the length of ``codes``.
        largest: bits of the largest magnitude that has a bin.
        inverse: 1 / width of a bin.
        codes: room for the bins of one piece, at most 65,536.
        tables: zeros, shape ``(4, 4096)``; zeros again afterwards.
        counts: of each bin, shape ``(4096,)``; the elements are added.
        found: least key, largest key and zeros of what was counted so far.

    Returns:
        Where the first piece with such a value starts; ``x.size`` where there is none.
    """
    for first in range(start, x.size, codes.size):
        piece, seen = x[first : first + codes.size], bits[first : first + codes.size]
        code = codes[: piece.size]
        lo, hi = key_bounds(seen)
        zeros = np.int32(0)
        if hi > largest or lo < ~largest:
            return first
        for i in range(seen.size):
            zeros += np.int32((seen[i] & np.int32(0x7FFFFFFF)) == np.int32(0))
        for i in range(piece.size):
            code[i] = np.uint16(np.int32(piece[i] * inverse) + np.int32(HALF))
        whole = code.size // 4 * 4
        for i in range(0, whole, 4):
            tables[0, code[i]] += np.uint16(1)
            tables[1, code[i + 1]] += np.uint16(1)
            tables[2, code[i + 2]] += np.uint16(1)
            tables[3, code[i + 3]] += np.uint16(1)
        for i in range(whole, code.size):
            tables[0, code[i]] += np.uint16(1)
        for k in range(counts.size):
            counts[k] += np.int64(tables[0, k]) + tables[1, k] + tables[2, k] + tables[3, k]
        tables[:] = np.uint16(0)
        found[0], found[1], found[2] = min(found[0], lo), max(found[1], hi), found[2] + zeros
    return x.size


def channels_hold(
    x: Floats, channels: int, inner: int, index: NDArray[np.int64], value: Floats, same: NDArray[np.uint8]
) -> None:
    """Find the channels that hold a single value.

    Args:
        x: an array of shape ``(outer, channels, inner)``.
        channels, inner: of that shape.
        index: the channels that are looked at.
        value: what each of them should hold.
        same: 1 where it does, else 0; of the length of ``index``.
    """
    for k in range(index.size):
        expected, same[k] = value[k], np.uint8(1)
        for first in range(index[k] * inner, x.size, channels * inner):
            row, others = x[first : first + inner], np.int32(0)
            for i in range(row.size):
                others |= np.int32(row[i] != expected)
            if others:
                same[k] = np.uint8(0)
                break
