"""What the int32 accumulator of an integer kernel may have to hold.

The kernel adds ``(q_x - z_x) * (q_w - z_w)`` over the inner length of a product. Its sum is exact as long as it fits into
32 bits; beyond that it wraps around, and the output is wrong without a word. The bound below is static: it follows from
the codes of the weight and the grid of the input, whatever the data.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

INT32_MAX = (1 << 31) - 1


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
