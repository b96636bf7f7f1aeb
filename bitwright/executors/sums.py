"""Exact sums of integer products, by float matrix products where these are exact.

A float32 product of whole numbers is exact while no partial sum passes ``2 ** 24``, a float64 one below ``2 ** 53``. The bound is
taken from the weights at hand: the largest sum of their absolute values times the largest code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.numerics.integer_sums import pair_losses

Array = NDArray[Any]
_SINGLE, _DOUBLE = float(1 << 24), float(1 << 53)
_PIECE = 1 << 23  # elements of unfolded windows that are held at once


def kind_for(bound: float) -> type[np.floating[Any]] | type[np.int64]:
    """The type in which sums of whole numbers up to ``bound`` are exact.

    >>> kind_for(2.0**24).__name__, kind_for(2.0**25).__name__, kind_for(2.0**60).__name__
    ('float32', 'float64', 'int64')
    """
    if bound <= _SINGLE:
        return np.float32
    return np.float64 if bound <= _DOUBLE else np.int64


def wrapped(sums: Array, bits: int, bound: float) -> Array:
    """Sums wrapped to an accumulator of ``bits`` bits; unchanged where none can overflow.

    >>> wrapped(np.array([40000.0, -40000.0]), 16, 40000.0).tolist()
    [-25536.0, 25536.0]
    """
    half = 1 << (bits - 1)
    if bound < half or bits >= 64:
        return sums
    whole = np.mod(sums.astype(np.int64) + half, 1 << bits) - half
    return whole if sums.dtype == np.int64 else whole.astype(np.float64)


def matmul(a: Array, b: Array, bias: Array | None = None, *, accumulator: int = 32) -> Array:
    """``a @ b + bias`` of whole numbers.

    Args:
        a, b: codes from zero on, of any axes in front that broadcast.
        bias: whole numbers, one per last axis of ``b``.
        accumulator: bits that sums wrap around at.

    Returns:
        Whole numbers in float32, float64 or int64, whichever holds them all.
    """
    largest = float(np.abs(a).max(initial=0))
    bound = largest * float(np.abs(b).sum(-2, dtype=np.int64).max(initial=0)) + _largest(bias)
    kind = kind_for(bound)
    sums = np.matmul(a.astype(kind), b.astype(kind))
    if bias is not None:
        sums += bias.astype(kind)
    return wrapped(sums, accumulator, bound)


def _largest(bias: Array | None) -> float:
    return 0.0 if bias is None else float(np.abs(bias.astype(np.int64)).max(initial=0))


def convolution(
    x: Array,
    zero: int,
    weight: Array,
    bias: Array | None = None,
    *,
    strides: Sequence[int],
    pads: Sequence[tuple[int, int]],
    dilations: Sequence[int],
    groups: int = 1,
    pairs: bool = False,
    accumulator: int = 32,
) -> Array:
    """Sums of a convolution of codes, channels in front.

    Args:
        x: stored codes, ``[N, C, *S]``.
        zero: code of zero in ``x``, with which it is padded.
        weight: codes from zero on, ``[M, C / groups, *K]``.
        bias: ``[M]``.
        strides, pads, dilations: per spatial axis; pads before and after.
        groups: of channels.
        pairs: products are added in pairs of 16 bits, which saturate; of ``x`` as uint8, see
            :func:`bitwright.core.numerics.integer_sums.largest_pair`. ``zero`` counts from the same place then.
        accumulator: bits that sums wrap around at.

    Returns:
        ``[N, M, *O]``, whole numbers in float32, float64 or int64.
    """
    rank, kernel = x.ndim - 2, weight.shape[2:]
    axes = tuple(range(1, weight.ndim))
    largest = float(max(abs(int(x.max(initial=zero)) - zero), abs(int(x.min(initial=zero)) - zero)))
    bound = largest * float(np.abs(weight).sum(axes, dtype=np.int64).max(initial=0)) + _largest(bias)
    kind = kind_for(bound)
    centred = x.astype(kind)
    centred -= kind(zero)
    centred = np.pad(centred, [(0, 0), (0, 0), *pads])
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    sizes = tuple((n - r) // s + 1 for n, r, s in zip(centred.shape[2:], reach, strides, strict=True))
    out = np.empty((x.shape[0], weight.shape[0], *sizes), kind)
    w = weight.astype(kind)
    if weight.shape[1] == 1 and groups == x.shape[1] and not (pairs and weight.shape[0] != groups):
        _depthwise(centred, w, out, strides, dilations)
    else:
        each, made = x.shape[1] // groups, weight.shape[0] // groups
        for images, g in _pieces(x.shape[0], groups, each * int(np.prod(kernel)) * int(np.prod(sizes))):
            part = centred[images, g * each : (g + 1) * each]
            rows = slice(g * made, (g + 1) * made)
            columns = _unfolded(part, kernel, strides, dilations, sizes)  # [n, C, K, O]
            n = columns.shape[0]
            sums = np.matmul(w[rows].reshape(made, -1), columns.reshape(n, -1, columns.shape[-1]))
            sums -= _lost(columns, zero, weight[rows]) if pairs else 0
            out[images, rows] = sums.reshape(n, made, *sizes)
    if bias is not None:
        out += bias.astype(kind).reshape(-1, *(1,) * rank)
    return wrapped(out, accumulator, bound)


def _pieces(count: int, groups: int, each: int) -> Iterator[tuple[slice, int]]:
    """Yield slices of images to unfold at once, with every group of channels."""
    step = max(1, _PIECE // max(each, 1))
    yield from ((slice(i, i + step), g) for i in range(0, count, step) for g in range(groups))


def window_steps(kernel: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Positions of a kernel, the last axis first to move."""
    yield from np.ndindex(*kernel)


def shifted(
    x: Array, at: Sequence[int], strides: Sequence[int], dilations: Sequence[int], sizes: Sequence[int]
) -> Array:
    """Elements that kernel position ``at`` reads at every output: a view of ``x``, spatial axes from the third on."""
    steps = tuple(
        slice(p * d, p * d + (n - 1) * s + 1, s) for p, d, s, n in zip(at, dilations, strides, sizes, strict=True)
    )
    return x[(slice(None), slice(None), *steps)]


def _depthwise(x: Array, weight: Array, out: Array, strides: Sequence[int], dilations: Sequence[int]) -> None:
    times, rank = weight.shape[0] // x.shape[1], x.ndim - 2
    out[:] = 0
    for at in window_steps(weight.shape[2:]):
        read = shifted(x, at, strides, dilations, out.shape[2:])
        read = np.repeat(read, times, 1) if times > 1 else read
        place: tuple[Any, ...] = (slice(None), 0, *at)
        out += read * weight[place].reshape(-1, *(1,) * rank)


def _unfolded(
    x: Array, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], sizes: Sequence[int]
) -> Array:
    """Windows of ``[n, C, *S]`` as ``[n, C, positions, outputs]``."""
    places = list(window_steps(kernel))
    if len(places) == 1 and all(s == 1 for s in strides):
        return x.reshape(*x.shape[:2], 1, -1)
    columns = np.empty((*x.shape[:2], len(places), *sizes), x.dtype)
    for i, at in enumerate(places):
        columns[:, :, i] = shifted(x, at, strides, dilations, sizes)
    return columns.reshape(*x.shape[:2], len(places), -1)


def _lost(columns: Array, zero: int, weight: Array) -> Array:
    """Loss of the sums by pair saturation, ``[n, M, O]``; kernels go through positions, then channels."""
    n, channels, places, outputs = columns.shape
    ordered = np.moveaxis(weight.reshape(weight.shape[0], channels, places), 1, 2).reshape(weight.shape[0], -1)

    def column(k: int) -> Array:
        return (columns[:, k % channels, k // channels] + columns.dtype.type(zero)).reshape(-1)

    lost = pair_losses(column, n * outputs, ordered.T.astype(np.int64))[0]
    return lost.reshape(n, outputs, -1).swapaxes(1, 2)


def paired_matmul(codes: Array, zero: int, weight: Array, bias: Array | None = None, *, accumulator: int = 32) -> Array:
    """:func:`matmul` of ``codes - zero`` with a matrix, whose products are added in pairs of 16 bits that saturate.

    Args:
        codes: as uint8 holds them, ``[..., K]``.
        zero: code of zero among them.
        weight: int8 codes, ``[K, M]``.
        bias, accumulator: see :func:`matmul`.
    """
    flat = codes.reshape(-1, codes.shape[-1]).astype(np.int64)
    sums = matmul(flat - zero, weight, bias, accumulator=accumulator)
    lost = pair_losses(lambda k: flat[:, k], len(flat), weight.astype(np.int64))[0]
    return (sums - lost.astype(sums.dtype)).reshape(*codes.shape[:-1], weight.shape[1])
