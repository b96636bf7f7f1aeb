"""Encodings of recurrent weights between torch's layout and ONNX's: another order of gates, an axis of directions.

Torch has ``[gates * hidden, columns]``, ONNX ``[1, gates * hidden, columns]``. An ``order`` says which gate of the one
stands at each place of the other; it is empty for a projection, whose rows keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor

#: ports of W and R, whose rows are gates
GATED = (1, 2)


def gate_order(have: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...]:
    """Which gate of ``have`` stands at each place of ``wanted``.

    Example:
        >>> gate_order(("reset", "update", "candidate"), ("update", "reset", "candidate"))
        (1, 0, 2)
    """
    return tuple(have.index(gate) for gate in wanted)


def to_onnx_order(encoding: Encoding, order: Sequence[int], shape: tuple[int, ...]) -> Encoding:
    """The encoding of a weight ``[rows, columns]`` as it stands in ONNX; one scale per gate becomes one per row.

    Args:
        encoding: of the weight in torch's layout.
        order: place of a gate in ONNX -> its place in torch; empty for a projection.
        shape: of the weight in torch.
    """
    granularity, scale, zero_point = encoding.granularity, encoding.scale, encoding.zero_point
    if isinstance(granularity, PerTensor):
        return encoding
    assert granularity.axis is not None
    axis = granularity.axis % 2
    if isinstance(granularity, PerBlock) and granularity.channel_axis is None and axis == 0:  # per gate
        granularity = PerChannel(0)
        size = shape[0] // len(scale)
        scale, zero_point = np.repeat(scale[:, 0], size), np.repeat(zero_point[:, 0], size)
    wanted: Granularity = PerChannel(axis + 1)
    if isinstance(granularity, PerBlock):
        wanted = PerBlock(granularity.size, axis + 1, tuple(c % 2 + 1 for c in granularity.channel_axes))

    def moved(values: NDArray[Any]) -> NDArray[Any]:
        if axis == 0 or isinstance(granularity, PerBlock):
            values = _reordered(values, order)
        return values if isinstance(wanted, PerChannel) else values[None]

    return replace(encoding, granularity=wanted, scale=moved(scale), zero_point=moved(zero_point))


def from_onnx_order(encoding: Encoding, order: Sequence[int]) -> Encoding:
    """The encoding of a weight ``[1, rows, columns]`` of ONNX as it stands in torch; inverse of :func:`to_onnx_order`.

    Args:
        encoding: of the weight in ONNX, with concrete axes, none of them the axis of directions.
        order: place of a gate in torch -> its place in ONNX; empty for a projection.
    """
    granularity = encoding.granularity
    if isinstance(granularity, PerTensor):
        return encoding
    assert granularity.axis is not None
    axis = granularity.axis % 3 - 1
    wanted: Granularity = PerChannel(axis)
    if isinstance(granularity, PerBlock):
        channels = tuple(c % 3 - 1 for c in granularity.channel_axes if c % 3)
        wanted = PerBlock(granularity.size, axis, channels)

    def moved(values: NDArray[Any]) -> NDArray[Any]:
        values = values if isinstance(wanted, PerChannel) else values[0]
        return _reordered(values, order) if axis == 0 or isinstance(wanted, PerBlock) else values

    return replace(encoding, granularity=wanted, scale=moved(encoding.scale), zero_point=moved(encoding.zero_point))


def _reordered(values: NDArray[Any], order: Sequence[int]) -> NDArray[Any]:
    """``values`` per row, or per block of rows, with their gates in ``order``; a single row holds for all gates."""
    if not order or len(values) == 1:
        return values
    parts = np.array_split(values, len(order))
    return np.concatenate([parts[i] for i in order])
