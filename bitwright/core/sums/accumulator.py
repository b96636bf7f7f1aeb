"""What the accumulators of an integer kernel may have to hold: 32 bits of a sum, 16 bits of two products.

The kernel adds ``(q_x - z_x) * (q_w - z_w)`` over the inner length of a product. Its sum is exact as long as it fits into
32 bits; beyond that it wraps around, and the output is wrong without a word. The bound below is static: it follows from
the codes of the weight and the grid of the input, whatever the data.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

INT32_MAX = (1 << 31) - 1
INT16_MIN, INT16_MAX = -(1 << 15), (1 << 15) - 1


def largest_sum(weight: NDArray[np.int64], axis: int, groups: int = 1, *, furthest: int) -> int:
    """The largest absolute sum of products that an output can have.

    Args:
        weight: codes minus zero point.
        axis: of the output channels; all others are summed over.
        groups: along axis 0, sums that are kept apart where this is not the axis of the output channels.
        furthest: largest absolute value of an input code minus its zero point.

    >>> largest_sum(np.full((3, 200_000), -127), 0, furthest=255) > INT32_MAX
    True
    """
    sizes = np.abs(weight.astype(np.int64))
    if axis != 0 and groups > 1:
        return max(largest_sum(part, axis, furthest=furthest) for part in np.split(sizes, groups))
    sums = sizes.sum(axis=tuple(i for i in range(sizes.ndim) if i != axis % sizes.ndim))
    return int(sums.max(initial=0)) * furthest


def largest_pair(weight: NDArray[np.int64], highest: int = 255) -> NDArray[np.int64]:
    """The furthest that two neighbouring products of a sum can go, whatever the input.

    CPUs without dot-product instructions (VNNI) add ``code[2i] * weight[2i] + code[2i + 1] * weight[2i + 1]`` in 16 bits that
    saturate (``vpmaddubsw``) before they widen: the codes are those that are stored, without the zero point taken off.

    Args:
        weight: stored codes, ``[K, M]``; K in the order in which the kernel adds.
        highest: largest input code, 255 for uint8.

    Returns:
        ``[ceil(K / 2), M]``: the sum of largest absolute value, negative where that is below zero.

    >>> largest_pair(np.array([[127], [127], [64], [64]])).ravel().tolist()
    [64770, 32640]
    """
    pairs = _paired(weight)
    above, below = (highest * np.clip(pairs * sign, 0, None).sum(1) for sign in (1, -1))
    return np.asarray(np.where(above >= below, above, -below), np.int64)


def paired_product(codes: NDArray[np.int64], weight: NDArray[np.int64]) -> NDArray[np.int64]:
    """``codes @ weight`` as a CPU without dot-product instructions adds it, see :func:`largest_pair`.

    Args:
        codes: of the input, as stored, ``[N, K]``.
        weight: as stored, ``[K, M]``.

    >>> paired_product(np.array([[255, 255]]), np.array([[127], [127]])).item(), 2 * 255 * 127
    (32767, 64770)
    """
    return codes @ weight - saturated(codes, weight)[0]


def saturated(codes: NDArray[np.int64], weight: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What saturation takes from ``codes @ weight``, and how many pairs saturate; both ``[N, M]``.

    Only pairs that can saturate are looked at.
    """
    pairs, given = _paired(weight), _paired(codes.T)
    lost = np.zeros((codes.shape[0], weight.shape[1]), np.int64)
    count = np.zeros_like(lost)
    bound = largest_pair(weight)
    risky = (bound > INT16_MAX) | (bound < INT16_MIN)
    for index in np.flatnonzero(risky.any(1)):
        columns = np.flatnonzero(risky[index])
        sums = given[index].T @ pairs[index][:, columns]
        over = sums - np.clip(sums, INT16_MIN, INT16_MAX)
        lost[:, columns] += over
        count[:, columns] += over != 0
    return lost, count


def _paired(matrix: NDArray[np.int64]) -> NDArray[np.int64]:
    """``[K, M]`` as ``[ceil(K / 2), 2, M]``; what is missing at the end is zero."""
    whole = matrix.astype(np.int64)
    whole = np.pad(whole, ((0, whole.shape[0] % 2), (0, 0)))
    return whole.reshape(-1, 2, whole.shape[1])
