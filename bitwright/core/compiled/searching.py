"""What every candidate grid of a range search does to the edges of a histogram's bins."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]


def edge_errors(
    edges: Float64s,
    scale: Float64s,
    lowest: Float64s,
    highest: Float64s,
    cubes: Float64s,
    weight: float,
    out: Float64s,
) -> None:
    """The antiderivative of the squared error at every edge, for every grid; every operation is the array function's.

    Args:
        edges: where bins end.
        scale, lowest, highest: of the grids, and their codes counted from zero.
        cubes: ``scale ** 3 / 12``.
        weight: of the third power of what lies beyond a grid.
        out: takes the errors, ``[grids, edges]``.
    """
    for i in range(scale.size):
        s, lo, hi, cube, result = scale[i], lowest[i], highest[i], cubes[i], out[i]
        for j in range(edges.size):
            code = np.rint(edges[j] / s)
            code = lo if code < lo else code
            code = hi if code > hi else code
            rest = edges[j] - code * s
            result[j] = code * cube + rest * rest * rest / 3.0
        if weight != 0.0:
            first, last = lo * s, hi * s
            for j in range(edges.size):
                inside = first if edges[j] < first else edges[j]
                inside = last if inside > last else inside
                beyond = edges[j] - inside
                result[j] += beyond * beyond * beyond * weight
