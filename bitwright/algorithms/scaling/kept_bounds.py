"""Factors of channels under which activations may go on to cut all channels at the bounds that they have.

A ReLU6 between two equalized layers would have to cut each channel at a bound of its own, ``6 / s[c]``. No integer kernel does
that, while one bound for all channels is the end of the output's grid. With factors of at most 1 a channel grows until it fills
the range that is there for all: what was cut at 6 is cut as before where ``s[c]`` is 1, and where a channel never came near its
bound, the larger values do not reach it either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.algorithms.channels.layers import Array, Group, bounds_of
from bitwright.algorithms.channels.trial import Bar, no_bar
from bitwright.algorithms.scaling.smooth import observe
from bitwright.core.graph.graph import Op
from bitwright.core.simulation.protocols import FloatModel
from bitwright.errors import ConfigError

#: activation that cuts -> least and greatest value of each channel before it, float64, shape [channels]
Extremes = Mapping[str, tuple[Array, Array]]
#: values that other data may have, over the largest seen; costs a channel a bit at most
MARGIN = 2.0
#: no channel grows more: five bits of eight
LEAST = 1 / 32


def measured_extremes(
    view: FloatModel, groups: Sequence[Group], data: Iterable[Any] | None, bar: Bar = no_bar
) -> dict[str, tuple[Array, Array]]:
    """What the activations of ``groups`` that cut at fixed bounds read, per channel; the data is not run where there are none.

    Args:
        view: the model.
        groups: of layers that share channels.
        data: batches, run one by one.
        bar: shows them.

    Raises:
        ConfigError: there is no data.
        CalibrationError: no batch in it, or a value that is NaN or infinite.
    """
    if data is None:
        raise ConfigError("equalize", "which values a kept bound would cut is not known", "give data")
    found = {str(op.inputs[0]): (op.name, axis, group.channels) for group in groups for op, axis in group.clips}
    ends = {value: np.full((2, channels), -np.inf) for value, (_, _, channels) in found.items()}

    def note(value: str, rows: Array) -> None:
        seen = np.stack([-rows.min(axis=0), rows.max(axis=0)])
        np.maximum(ends[value], seen, out=ends[value])

    if found:
        axes = {value: axis for value, (_, axis, _) in found.items()}
        observe(view, axes, bar(data, "equalize: measuring activations"), note, "equalize")
    return {name: (-ends[value][0], ends[value][1]) for value, (name, _, _) in found.items()}


def within_bounds(group: Group, factors: Array, extremes: Extremes) -> Array:
    """The factors nearest to ``factors`` under which no bound cuts what it did not cut.

    Args:
        group: of layers that share channels.
        factors: what the channels of its value would best be divided by, positive, shape [channels].
        extremes: of the activations that cut.

    Returns:
        ``factors`` where nothing cuts; else none above 1, none below :data:`LEAST`, and none below :data:`MARGIN` times the
        share of the bound that the channel reached.
    """
    least = np.full(group.channels, LEAST)
    for op, _ in group.clips:
        np.maximum(least, _reached(op, *extremes[op.name]) * MARGIN, out=least)
    return np.clip(factors, np.minimum(least, 1.0), 1.0) if group.clips else factors


def _reached(op: Op, low: Array, high: Array) -> Array:
    """How far each channel came towards the nearer of the bounds, as a share; a bound at zero stays one under any factor."""
    share = np.zeros_like(high)
    for bound, end in zip(bounds_of(op), (low, high), strict=True):
        if np.isfinite(bound) and bound:
            np.maximum(share, end / bound, out=share)
    return share
