"""SeqMSE: choose every weight range by the error of the layer's output, one layer at a time.

The candidates of a channel (or block) are fractions of its range. The squared error of a layer's output is a quadratic form of
the weights' error, ``d H d^T`` with ``H`` the second moment of its inputs, so that the data is passed once and a candidate
costs a product of matrices. Other losses, and other inputs on the two sides of the comparison, are computed from outputs.

Counterpart: AIMET's ``apply_seq_mse`` with its ``inp_symmetry`` and ``loss_fn``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from bitwright.core.numerics.affine import (
    choose_float_zero_point,
    encode,
    is_sayable,
    split_zero_point,
    stored_scale,
    with_stored_scale,
)
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FloatFormat, IntFormat
from bitwright.core.numerics.granularity import PerBlock
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.numerics.statistics import rows_of
from bitwright.errors import ConfigError
from bitwright.methods.rounding.driver import Choice, Task, check_finite
from bitwright.methods.rounding.matrices import FewRows, Grid, Layer, paired_rows

LossName = Literal["mse", "l1", "sqnr"]
Symmetry = Literal["symqt", "symfp", "asym"]
_OUTPUT_ROWS = 8192  # of a layer whose outputs are computed for every candidate
_TINY = 1e-10  # of a signal or noise in a ratio


@dataclass(frozen=True)
class Settings:
    """Of the method.

    Attributes:
        num_candidates: fractions ``1/n, 2/n, ..., 1`` of the present range; of float formats on to ``1.5``. Where zero points
            are real numbers half as many, from ``0.65`` to ``1.1`` of it, each at five places.
        rows_per_input: as for GPTQ; at most 8192 rows are drawn where outputs are computed.
        loss_fn: ``mse``; ``l1``, the absolute error; ``sqnr``, noise over signal of every output channel, as the geometric mean
            over batches.
        inp_symmetry: what the two sides of the comparison read: ``symqt``, both what the quantized layers before made;
            ``symfp``, both what the float model made; ``asym``, the quantized weights the former and the float weights the
            latter.

    Raises:
        ConfigError: an unknown ``loss_fn`` or ``inp_symmetry``.
    """

    num_candidates: int = 20
    rows_per_input: int | None = None
    loss_fn: LossName = "mse"
    inp_symmetry: Symmetry = "symqt"

    def __post_init__(self) -> None:
        for name, known in (("loss_fn", get_args(LossName)), ("inp_symmetry", get_args(Symmetry))):
            if getattr(self, name) not in known:
                raise ConfigError(name, f"it is {getattr(self, name)!r}", f"use one of {', '.join(known)}")


Errors = Callable[[Encoding], np.ndarray]
"""Encoding of the weight -> loss that each of its scales is to blame for, in the shape of the scales."""


def solve(task: Task, settings: Settings) -> list[Choice]:
    """Choose the range of a layer's weights; the weights stay unrounded for later methods."""
    (layer,) = task.layers.values()
    start = task.encoding(layer)
    spec = task.walk.model.sites()[layer.site].spec
    assert spec is not None
    quadratic = settings.loss_fn == "mse" and settings.inp_symmetry == "symqt"
    errors_of = _squared(task, layer, settings) if quadratic else _of_outputs(task, layer, settings)
    candidates = _candidates(start, spec, settings.num_candidates)
    best, errors = next(candidates), None
    for candidate in (best, *candidates):
        found = errors_of(candidate)
        if errors is None:
            errors = before = found
            continue
        better = found < errors
        best, errors = _chosen(best, candidate, better), np.where(better, found, errors)
    assert errors is not None
    return [Choice(layer.name, None, best, float(before.sum()), float(errors.sum()))]


def _candidates(start: Encoding, spec: QuantSpec, count: int) -> Iterator[Encoding]:
    """``start``, and grids for fractions of its ranges.

    Of float formats also up to one and a half times as much, where the largest weight of a block lies at another of the
    coarse numbers at the end of the format (4 and not 6 of e2m1; Cook et al. 2025, arXiv:2512.02010). What scales are
    multiples of is doubled once, so that there is room for them, and then stays. Of powers of two these are twice, half and
    a quarter.
    """
    is_float = isinstance(start.format, FloatFormat)
    if start.shift is not None and not start.scale_format.offsets:
        yield from _moved(start, count)
        return
    if not is_float and start.common is None:
        yield from _fractions(start, spec, count)
        return
    if start.common is not None and is_float:
        wider = replace(start, common=np.float32(2) * start.common)
        start = wider if is_sayable(wider) else start
    yield start
    factors = [i / count for i in range(count + (count // 2 if is_float else 0), 0, -1) if i != count]
    yield from _scaled(start, [2.0, 0.5, 0.25] if start.scale_format.name == "e8m0" else factors)


def _scaled(start: Encoding, factors: Sequence[float]) -> Iterator[Encoding]:
    """``start`` with scales times each factor, where its format stores them."""
    for factor in factors:
        scale = stored_scale(start.scale * np.float32(factor), start.scale_format, start.common)
        candidate = replace(start, scale=scale) if start.shift is None else _with_same_offset(start, scale)
        if is_sayable(candidate):
            yield candidate


def _with_same_offset(start: Encoding, scale: np.ndarray) -> Encoding:
    """``start`` with other scales, whose lowest value stays, as it is stored."""
    assert isinstance(start.format, IntFormat)
    zero = (start.scale * start.zero.astype(np.float64) / scale).astype(np.float32)
    zero_point, shift = split_zero_point(zero, start.format)
    return replace(start, scale=scale, zero_point=zero_point, shift=shift)


def _moved(start: Encoding, count: int) -> Iterator[Encoding]:
    """``start``, and slightly wider, narrower and shifted grids, with real zero points."""
    yield start
    assert isinstance(start.format, IntFormat)
    centre, half = (start.max + start.min) / 2, (start.max - start.min) / 2
    for part in np.linspace(1.1, 0.65, max(2, count // 2)):
        for step in (-0.6, -0.3, 0.0, 0.3, 0.6):
            middle = centre + step * start.scale
            scale, zero_point, shift = choose_float_zero_point(middle - half * part, middle + half * part, start.format)
            yield replace(start, scale=scale, zero_point=zero_point, shift=shift)


def _fractions(start: Encoding, spec: QuantSpec, count: int) -> Iterator[Encoding]:
    """``start``, and grids for fractions of its range, each with its own zero point."""
    yield start
    for i in range(count - 1, 0, -1):
        part = i / count
        candidate = encode(start.min * part, start.max * part, spec, start.granularity)
        if candidate.format == start.format:
            yield candidate


def _squared(task: Task, layer: Layer, settings: Settings) -> Errors:
    """Squared errors on quantized inputs, from second moments."""
    w = task.weight(layer)
    moments = task.moments(layer, settings.rows_per_input, few=True)
    check_finite(layer, moments.own.diagonal(dim1=1, dim2=2))
    metric = _within_blocks(moments.own, task.encoding(layer), layer)

    def errors(encoding: Encoding) -> np.ndarray:
        delta = (_on_grid(w, encoding, layer) - w).double()
        return _per_scale(metric(delta) * delta, encoding, layer) / moments.rows

    return errors


def _of_outputs(task: Task, layer: Layer, settings: Settings) -> Errors:
    """Any loss of outputs; those of the float weights are computed once.

    Scales of blocks of inputs are compared block by block, as if each block's products were outputs of their own.
    """
    w = task.weight(layer)
    blocks = _blocks(task.encoding(layer), layer)
    batches = [
        [(x_q, [_product(x, w, block) for block in blocks]) for x, x_q in parts]
        for parts in _drawn_rows(task, layer, settings)
    ]
    loss = _LOSSES[settings.loss_fn]

    def errors(encoding: Encoding) -> np.ndarray:
        w_q = _on_grid(w, encoding, layer)
        share = torch.zeros(w.shape, dtype=torch.float64, device=w.device)
        for at, block in enumerate(blocks):
            share[:, :, block[0]] = loss(
                [[(_product(x_q, w_q, block), wanted[at]) for x_q, wanted in parts] for parts in batches]
            )
        return _per_scale(share, encoding, layer)

    return errors


def _drawn_rows(task: Task, layer: Layer, settings: Settings) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield drawn rows of the layer's inputs, float and quantized, batch by batch in parts."""
    per_input = settings.rows_per_input
    most = _OUTPUT_ROWS if per_input is None else min(_OUTPUT_ROWS, per_input * layer.fan_in)
    for real, quantized, share in task.walk.shares(layer):
        x = quantized if settings.inp_symmetry == "symqt" else real
        x_q = real if settings.inp_symmetry == "symfp" else quantized
        parts = list(paired_rows(layer, x, x_q, most * share, task.generator))
        for pair in parts:
            for rows in pair:
                check_finite(layer, rows)
        yield parts


def _product(x: Tensor, w: Tensor, block: Tensor) -> Tensor:
    """Outputs ``[G, P, O]`` of the inputs ``block``."""
    whole = len(block) == w.shape[2]
    return (x if whole else x[:, :, block]) @ (w if whole else w[:, :, block]).transpose(1, 2)


Compared = Sequence[Sequence[tuple[Tensor, Tensor]]]
"""Batches of parts of ``(outputs, wanted outputs)``, each ``[G, P, O]``; losses are ``[G, O]``, float64."""


def _mean(batches: Compared, error: Callable[[Tensor], Tensor]) -> Tensor:
    rows = sum(wanted.shape[1] for parts in batches for _, wanted in parts)
    total = [error(found.double() - wanted.double()).sum(1) for parts in batches for found, wanted in parts]
    return torch.stack(total).sum(0) / rows


def _noise_to_signal(batches: Compared) -> Tensor:
    logs = []
    for parts in batches:
        noise = torch.stack([(found.double() - wanted.double()).square().sum(1) for found, wanted in parts]).sum(0)
        signal = torch.stack([wanted.double().square().sum(1) for _, wanted in parts]).sum(0)
        rows = sum(wanted.shape[1] for _, wanted in parts)
        logs.append(torch.log((noise / rows + _TINY) / (signal / rows + _TINY)))
    return torch.exp(torch.stack(logs).mean(0))


_LOSSES: dict[str, Callable[[Compared], Tensor]] = {
    "mse": lambda batches: _mean(batches, torch.square),
    "l1": lambda batches: _mean(batches, torch.abs),
    "sqnr": _noise_to_signal,
}


def _on_grid(w: Tensor, encoding: Encoding, layer: Layer) -> Tensor:
    grid = Grid.of(encoding, layer, w.device)
    return grid.values(grid.nearest(w))


def _per_scale(share: Tensor, encoding: Encoding, layer: Layer) -> np.ndarray:
    """The loss of each weight, ``share`` ``[G, O, K]``, summed per scale."""
    rows = rows_of(layer.tensor(share).reshape(layer.shape), encoding.granularity)
    found: np.ndarray = rows.sum(1).cpu().numpy().reshape(encoding.scale.shape)
    return found


def _block_of_input(encoding: Encoding, layer: Layer, device: torch.device) -> Tensor | None:
    """Block of every input ``[G, K]``, where scales cover blocks of inputs."""
    granularity = encoding.granularity
    if not isinstance(granularity, PerBlock):
        return None
    size, axis = granularity.size, granularity.axis
    places = torch.arange(layer.shape[axis or 0]) // size
    shape = [1] * len(layer.shape)
    shape[axis or 0] = -1
    return layer.matrix(places.reshape(shape).expand(layer.shape).contiguous())[:, 0, :].to(device)


def _blocks(encoding: Encoding, layer: Layer) -> list[Tensor]:
    """Inputs that are compared together, at the same positions in every group."""
    found = _block_of_input(encoding, layer, torch.device("cpu"))
    if found is None:
        return [torch.arange(layer.fan_in)]
    first = found[0] - found[0, 0]
    return [torch.nonzero(first == block).flatten() for block in first.unique()]


def _as_slice(places: Tensor) -> slice | Tensor:
    """Ascending places as a slice, which copies nothing, where they follow each other."""
    start, stop = int(places[0]), int(places[-1]) + 1
    return slice(start, stop) if stop - start == len(places) else places


def _within_blocks(hessian: Tensor | FewRows, encoding: Encoding, layer: Layer) -> Callable[[Tensor], Tensor]:
    """``delta -> delta H``, with ``H`` restricted to blocks where scales cover blocks of inputs."""
    if not isinstance(encoding.granularity, PerBlock):
        return lambda delta: delta @ hessian
    if isinstance(hessian, Tensor):
        block = _block_of_input(encoding, layer, hessian.device)
        assert block is not None
        cut = hessian * (block[:, :, None] == block[:, None, :])
        return lambda delta: delta @ cut
    parts = [(block, hessian.x[:, :, block]) for block in map(_as_slice, _blocks(encoding, layer))]

    def product(delta: Tensor) -> Tensor:
        found = torch.empty_like(delta)
        for block, x in parts:
            found[:, :, block] = (delta[:, :, block] @ x.transpose(1, 2)) @ x
        return found

    return product


def _chosen(one: Encoding, other: Encoding, where: np.ndarray) -> Encoding:
    zero_point = np.where(where, other.zero_point, one.zero_point)
    shift = None if one.shift is None or other.shift is None else np.where(where, other.shift, one.shift)
    chosen = replace(one, zero_point=zero_point, shift=shift)
    return with_stored_scale(chosen, np.where(where, other.scale, one.scale))


def method(settings: Settings) -> Callable[[Task], Sequence[Choice]]:
    """:func:`solve` for :func:`bitwright.methods.rounding.driver.apply`."""

    def choose(task: Task) -> Sequence[Choice]:
        return solve(task, settings)

    return choose
