"""SeqMSE: choose every weight range by the error of the layer's output, layer after layer.

The candidates of a channel (or block) are fractions of its range. A layer's output error is a quadratic form of the
weights' error, ``d H d^T`` with ``H`` the second moment of its inputs, so that the data is passed once and a candidate
costs a product of matrices. Counterpart: AIMET's ``apply_seq_mse``; both sides of the comparison read the quantized
predecessor's values there ("symqt") and here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bitwright.algorithms.rounding.driver import Choice, Task, check_finite
from bitwright.algorithms.rounding.matrices import Grid, Layer
from bitwright.core.numerics.affine import encode, with_scale
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.granularity import PerBlock


@dataclass(frozen=True)
class Settings:
    """Of the method.

    Attributes:
        num_candidates: fractions ``1/n, 2/n, ..., 1`` of the range in force.
        rows_per_input: as for GPTQ.
    """

    num_candidates: int = 20
    rows_per_input: int | None = None


def solve(task: Task, settings: Settings) -> list[Choice]:
    """Choose the range of a layer's weights; the weights stay as they are, and later methods may round them."""
    (layer,) = task.layers.values()
    w = task.weight(layer)
    moments = task.moments(layer, settings.rows_per_input, crossed=False)
    hessian, rows = moments.own, moments.rows
    check_finite(layer, hessian)
    start = task.encoding(layer)
    spec = task.walk.model.sites()[layer.site].spec
    assert spec is not None
    metric = _within_blocks(hessian, start, layer)
    best, errors, before = start, None, None
    for i in range(settings.num_candidates, 0, -1):
        part = i / settings.num_candidates
        candidate = (
            start if part == 1 else encode(start.min * part, start.max * part, spec, start.granularity)
        )
        if candidate.format != start.format:
            candidate = start
        found = _errors(w, metric, candidate, layer) / rows
        if errors is None:
            best, errors, before = candidate, found, found
        else:
            better = found < errors
            best, errors = _chosen(best, candidate, better), np.where(better, found, errors)
    assert errors is not None and before is not None
    return [Choice(layer.name, None, best, float(before.sum()), float(errors.sum()))]


def _errors(w: Tensor, metric: Callable[[Tensor], Tensor], encoding: Encoding, layer: Layer) -> np.ndarray:
    """Output error that each scale of ``encoding`` is to blame for, in the shape of its scales."""
    grid = Grid.of(encoding, layer, w.device)
    delta = (grid.values(grid.nearest(w)) - w).double()
    share = layer.tensor(metric(delta) * delta)
    granularity = encoding.granularity
    view, broadcast = granularity.view_shape(layer.shape), granularity.broadcast_shape(layer.shape)
    if not broadcast:
        return np.asarray(float(share.sum()))
    summed = share.reshape(view)
    axes = [i for i, (n, m) in enumerate(zip(broadcast, view, strict=True)) if n != m]
    return summed.sum(axes).cpu().numpy().reshape(encoding.scale.shape)


def _within_blocks(hessian: Tensor, encoding: Encoding, layer: Layer) -> Callable[[Tensor], Tensor]:
    """``delta -> delta H``, where scales cover blocks of inputs with ``H`` cut to what lies within one block."""
    granularity = encoding.granularity
    if not isinstance(granularity, PerBlock):
        return lambda delta: delta @ hessian
    size, axis = granularity.size, granularity.axis
    places = torch.arange(layer.shape[axis or 0]) // size
    shape = [1] * len(layer.shape)
    shape[axis or 0] = -1
    block = layer.matrix(places.reshape(shape).expand(layer.shape).contiguous())[:, 0, :].to(hessian.device)
    cut = hessian * (block[:, :, None] == block[:, None, :])
    return lambda delta: delta @ cut


def _chosen(one: Encoding, other: Encoding, where: np.ndarray) -> Encoding:
    zero_point = np.where(where, other.zero_point, one.zero_point)
    return with_scale(replace(one, zero_point=zero_point), np.where(where, other.scale, one.scale))


def method(settings: Settings) -> Callable[[Task], Sequence[Choice]]:
    """:func:`solve` for :func:`bitwright.algorithms.rounding.driver.apply`."""

    def choose(task: Task) -> Sequence[Choice]:
        return solve(task, settings)

    return choose
