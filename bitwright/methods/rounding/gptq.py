"""GPTQ: round a matrix column by column and let the columns still to come make up for each error.

Frantar et al. 2022, arXiv:2210.17323. Letters of the paper: ``W [O, K]``, ``H = 2 X X^T [K, K]``, and ``U``, the upper
Cholesky factor of the inverse of ``H``. Matrices of groups (grouped and depthwise convolutions) are done side by side:
``W [G, O, K]``, ``H [G, K, K]``.

GPTAQ (Li et al. 2025, arXiv:2504.02692) aims at the outputs of the float model on its own inputs: where a column is rounded, the
columns still to come also make up for what its input differs by from the float model's, ``P`` of eq. 15.

With a ``sparsity`` weights are set to zero in the same pass (SparseGPT; Frantar and Alistarh 2023, arXiv:2301.00774): those
of the least ``w^2 / U_kk^2`` among the columns of a block, or the least of every ``m`` neighbours for a pattern ``n:m``, and the
columns still to come make up for them as for errors of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods.rounding.driver import Choice, Task, check_finite, check_rows
from bitwright.methods.rounding.matrices import Grid, Moments


@dataclass(frozen=True)
class Settings:
    """Of the method.

    Attributes:
        damping: share of the mean diagonal that is added to the diagonal of ``H``, section 3.3, step 3.
        act_order: round columns in the order of falling diagonal of ``H``. Scales are those of the columns' own places,
            whatever the order ("static groups").
        block: columns between two updates of everything after them.
        match_float: aim at the outputs of the float model on its own inputs, and not at the float weights' outputs on the
            quantized predecessor's: the weights are first moved to the least-squares solution.
        sparsity: share of the weights that become zero; 0 rounds only.
        pattern: ``unstructured``, or ``n:m`` for ``n`` weights other than zero in every ``m`` along the inputs, which decides
            the sparsity; columns keep their order then.
        rows_per_input: as many rows of a layer's inputs as this, for each input of one output, are drawn evenly from the
            data; ``None`` takes all. A convolution has a row for each position of its output.
    """

    damping: float = 0.01
    act_order: bool = True
    block: int = 128
    match_float: bool = True
    sparsity: float = 0.0
    pattern: str = "unstructured"
    rows_per_input: int | None = None


@dataclass(frozen=True)
class AsymmetricSettings:
    """Of GPTAQ.

    Attributes:
        damping, act_order, block, rows_per_input: as of :class:`Settings`.
        share: of the correction that is made; 1 is the paper's equation. What differs between the inputs is known from the
            calibration data only, and less of it generalizes better where these are few.
    """

    damping: float = 0.01
    act_order: bool = True
    block: int = 128
    share: float = 1.0
    rows_per_input: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError("share", f"it is {self.share!r}", "give a number from 0 (GPTQ) to 1")


def round_columns(
    w: Tensor, hessian: Tensor, grid: Grid | None, settings: Settings, drift: Tensor | None = None
) -> Tensor:
    """Codes of ``w`` that keep ``(W - W_q) H (W - W_q)^T`` small.

    Args:
        w: ``[G, O, K]`` float32.
        hessian: ``[G, K, K]`` float64, symmetric and positive semidefinite; any factor before it is without effect.
        grid: of every weight; ``None`` rounds nothing, so that what is returned is weights: pruning alone.
        drift: ``sum of (x - x_q) x_q^T``, ``[G, K, K]`` float64, with the same factor as ``hessian``: GPTAQ.

    Returns:
        Codes, ``[G, O, K]`` float32. Columns whose inputs are all zero ("dead") are rounded to nearest.
    """
    every = group_of_pattern(settings.pattern)
    order = _order(hessian, by_diagonal=settings.act_order and every is None)
    columns = order[:, None, :].expand(w.shape)
    factor = inverse_factor(_permuted(hessian, order), settings.damping)
    moved = _correction(None if drift is None else _permuted(drift, order), factor)
    upper = factor.float().movedim(0, 2).contiguous()  # [K, K, G]
    diagonal = torch.diagonal(upper).t().contiguous()[:, :, None]  # [K, G, 1]
    w, grids = _by_column(w, columns), _grids(grid, columns)
    codes = torch.empty_like(w)
    n = len(w)
    size = settings.block if every is None else max(settings.block // every[1], 1) * every[1]
    for start in range(0, n, size):
        stop = min(start + size, n)
        block, errors = w[start:stop].clone(), torch.empty_like(w[start:stop])
        gone = _gone(block, diagonal[start:stop], settings, every)
        for j, k in enumerate(range(start, stop)):
            if every is not None and k % every[1] == 0:
                _drop_group(gone[j:], block[j:], diagonal[k:stop], every)
            column = block[j]
            codes[k], value = _rounded(column, gone[j] if len(gone) else None, grids[k])
            torch.div(column - value, diagonal[k], out=errors[j])
            block[j + 1 :].addcmul_(upper[k, k + 1 : stop, :, None], errors[j], value=-1)
            _correct(block[j + 1 :], block[j : j + 1], moved, slice(k, k + 1), slice(k + 1, stop))
            block[j] = value
        w[stop:] -= torch.einsum("jgo,jkg->kgo", errors, upper[start:stop, stop:])
        _correct(w[stop:], block, moved, slice(start, stop), slice(stop, n))
    return torch.empty_like(codes.permute(1, 2, 0)).scatter_(2, columns, codes.permute(1, 2, 0))


def _grids(grid: Grid | None, columns: Tensor) -> list[Grid | None]:
    """The grid of every column, ``[G, O]``, in the order of ``columns``."""
    if grid is None:
        return [None] * int(columns.shape[2])
    parts = (_by_column(t, columns) for t in (grid.scale, grid.lo, grid.hi))
    return [Grid(scale, lo, hi, format=grid.format, free=grid.free) for scale, lo, hi in zip(*parts, strict=True)]


def _gone(block: Tensor, diagonal: Tensor, settings: Settings, every: tuple[int, int] | None) -> Tensor:
    """Which weights of a block, ``[K, G, O]``, become zero as far as is known before it; of nothing where none do."""
    if every is None and settings.sparsity > 0:
        return _least(block / diagonal, settings.sparsity)
    return torch.zeros_like(block if every is not None else block[:0], dtype=torch.bool)


def _drop_group(gone: Tensor, block: Tensor, diagonal: Tensor, every: tuple[int, int]) -> None:
    """Mark the least of the first ``every[1]`` columns."""
    near = (block[: every[1]] / diagonal[: every[1]]).square()
    drop = max(len(near) - every[0], 0)
    gone[: every[1]].scatter_(0, near.argsort(0)[:drop], True)


def _by_column(t: Tensor, columns: Tensor) -> Tensor:
    """``[K, G, O]``: the columns of what broadcasts against ``[G, O, K]``, in another order."""
    return t.expand(columns.shape).gather(2, columns).permute(2, 0, 1).contiguous()


def _correction(drift: Tensor | None, factor: Tensor) -> Tensor | None:
    """``P`` of GPTAQ, what a unit of a column moves those after it by: strictly upper triangular, float32; eq. 15."""
    return None if drift is None else ((drift @ factor.transpose(1, 2)).triu(1) @ factor).float()


def _correct(w: Tensor, columns: Tensor, moved: Tensor | None, of: slice, on: slice) -> None:
    """Add to ``w``, columns ``on``, what ``P`` makes of the columns ``of``, both ``[columns, G, O]``; nothing without it."""
    if moved is not None:
        w += torch.einsum("jgo,gjk->kgo", columns, moved[:, of, on])


def group_of_pattern(pattern: str) -> tuple[int, int] | None:
    """``(n, m)`` of a pattern ``n:m``; ``None`` for ``unstructured``.

    Raises:
        ConfigError: it is neither.

    >>> group_of_pattern("2:4")
    (2, 4)
    """
    if pattern == "unstructured":
        return None
    n, _, m = pattern.partition(":")
    if not (n.isdigit() and m.isdigit() and 0 < int(n) < int(m)):
        raise ConfigError("pattern", f"{pattern!r} is no pattern of zeros", "use unstructured, or n:m as in 2:4")
    return int(n), int(m)


def _least(scores: Tensor, share: float) -> Tensor:
    """Where the least ``share`` of squares are, per matrix, ``[K, G, O]``."""
    flat = scores.square().transpose(0, 1).flatten(1)
    count = round(share * flat.shape[1])
    gone = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, flat.argsort(1)[:, :count], True)
    return gone.reshape(scores.transpose(0, 1).shape).transpose(0, 1).contiguous()


def _order(hessian: Tensor, *, by_diagonal: bool) -> Tensor:
    """Columns in the order in which they are rounded, ``[G, K]``: their own, or that of falling diagonal."""
    if by_diagonal:
        return torch.argsort(torch.diagonal(hessian, dim1=1, dim2=2), dim=1, descending=True, stable=True)
    return torch.arange(hessian.shape[2], device=hessian.device).expand(hessian.shape[0], -1)


def _rounded(column: Tensor, gone: Tensor | None, grid: Grid | None) -> tuple[Tensor, Tensor]:
    """Codes of a column and the weights that they stand for, ``[G, O]``; zero where ``gone``."""
    code = column if grid is None else grid.nearest(column)
    if gone is not None:
        code = code.masked_fill(gone, 0.0)
    return code, code if grid is None else code * grid.scale


def _permuted(hessian: Tensor, order: Tensor) -> Tensor:
    rows = hessian.gather(1, order[:, :, None].expand(hessian.shape))
    return rows.gather(2, order[:, None, :].expand(hessian.shape))


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped ``hessian``, ``[G, K, K]`` float64.

    Dead columns get a one on the diagonal: no error passes to or from them. Damping grows tenfold until the factor exists.
    """
    diagonal = torch.diagonal(hessian, dim1=1, dim2=2)
    dead = diagonal == 0
    mean = diagonal.sum(1) / (~dead).sum(1).clamp(min=1)
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))
    ones = torch.diag_embed(dead.to(hessian.dtype))
    while True:
        damped = hessian + ones + torch.diag_embed((damping * mean)[:, None].expand(diagonal.shape) * ~dead)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed.any():
            inverse, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed.any():
                return inverse
        damping = max(damping, 1e-8) * 10


def quadratic_error(delta: Tensor, hessian: Tensor) -> Tensor:
    """``delta H delta^T`` of every row: ``[G, O, K]``, ``[G, K, K]`` -> ``[G, O]`` float64."""
    wide = delta.double()
    return ((wide @ hessian) * wide).sum(2)


def solve(task: Task, settings: Settings) -> list[Choice]:
    """Choose the weights of a layer; nearest rounding stays where the layer saw no input or gains nothing."""
    (layer,) = task.layers.values()
    w = task.weight(layer)
    grid = task.grid(layer, w)
    found = task.moments(layer, settings.rows_per_input, weight=w if settings.match_float else None)
    hessian, rows = found.own, found.rows
    check_finite(layer, hessian)
    check_rows(task.walk, layer, rows, int(w.shape[2]))
    seen = bool(hessian.any())
    target = _least_squares(w, found, settings) if settings.match_float and seen else w
    nearest = grid.nearest(w)
    if settings.sparsity > 0 or group_of_pattern(settings.pattern) is not None:
        if grid.free:
            raise ConfigError(
                layer.name,
                "zeros are asked for, and its grid, whose zero points are real numbers, may have no code for zero",
                "quantize the weight with the symmetry 'asymmetric' or 'symmetric'",
            )
        if not seen:
            raise CalibrationError(
                layer.name, "its inputs are all zero, so that no weight is worth more", "give other data"
            )
        codes = round_columns(target.clone(), hessian, grid, settings)
        both = [quadratic_error(grid.values(c) - target, hessian).sum() / rows for c in (nearest, codes)]
        note = f"{float((codes == 0).float().mean()):.1%} of its weights are zero"
        weight = layer.tensor(grid.values(codes))
        return [Choice(layer.name, weight, task.encoding(layer), float(both[0]), float(both[1]), note)]
    codes = round_columns(target.clone(), hessian, grid, settings) if seen else nearest
    before, after = (quadratic_error(grid.values(c) - target, hessian).sum(1) / rows for c in (nearest, codes))
    worse = after > before
    if not layer.stack:  # one layer, whose groups are kept or rounded together
        worse = (after.sum() > before.sum()).expand_as(worse)
    codes = torch.where(worse[:, None, None], nearest, codes)
    after = torch.where(worse, before, after)
    note = _note(hessian, worse)
    return [
        Choice(
            layer.name, layer.tensor(grid.values(codes)), task.encoding(layer), float(before.sum()), float(after.sum()), note
        )
    ]  # fmt: skip


def _note(hessian: Tensor, worse: Tensor) -> str:
    """Where nearest rounding was kept: in all matrices, or in how many of them."""
    unseen = int((hessian.diagonal(dim1=1, dim2=2).sum(1) == 0).sum())
    count, kept = len(worse), int(worse.sum())
    if unseen == count:
        return "its inputs are all zero: nearest rounding kept"
    notes = [f"{unseen} of {count} matrices saw no input"] if unseen else []
    notes += [f"nearest rounding kept{f' in {kept} of {count} matrices' if kept < count else ''}"] if kept else []
    return "; ".join(notes)


def _least_squares(w: Tensor, found: Moments, settings: Settings) -> Tensor:
    """Weights whose outputs on the quantized predecessor's values come nearest to the float model's.

    Damping is at least the number of inputs over that of rows: of fewer rows than inputs every noise could be made up for, and
    nothing of it would hold on others.
    """
    hessian = found.own
    diagonal = torch.diagonal(hessian, dim1=1, dim2=2)
    share = (max(settings.damping, int(w.shape[2]) / found.rows) * diagonal.mean(1, keepdim=True)).expand(
        diagonal.shape
    )
    damped = hessian + torch.diag_embed(torch.where(diagonal > 0, share, torch.ones_like(share)))
    wide = w.double()
    # move from W along what the inputs differ by, so that directions without data stay as they are
    assert found.moved is not None
    return (wide + torch.linalg.solve(damped, found.moved.transpose(1, 2)).transpose(1, 2)).float()


def solve_asymmetric(task: Task, settings: AsymmetricSettings) -> list[Choice]:
    """Choose the weights of a layer by GPTAQ; nearest rounding stays where its output is as near to the float model's."""
    (layer,) = task.layers.values()
    w = task.weight(layer)
    grid = task.grid(layer, w)
    ones = torch.eye(int(w.shape[2]), device=w.device).expand(len(w), -1, -1)
    found = task.moments(layer, settings.rows_per_input, weight=ones)
    hessian, drift = found.own, found.moved
    assert drift is not None
    check_finite(layer, hessian)
    check_rows(task.walk, layer, found.rows, int(w.shape[2]))
    nearest = grid.nearest(w)
    plain = Settings(settings.damping, settings.act_order, settings.block)
    seen = bool(hessian.any())
    codes = round_columns(w.clone(), hessian, grid, plain, settings.share * drift) if seen else nearest
    # of |Q x_q - W x|^2 what weights change: the distance from the weights that come nearest to the float model's outputs
    moved = Moments(hessian, w.double() @ drift, found.rows)
    target = _least_squares(w, moved, plain) if seen else w
    before, after = (quadratic_error(grid.values(c) - target, hessian).sum(1) / found.rows for c in (nearest, codes))
    worse = after > before
    if not layer.stack:
        worse = (after.sum() > before.sum()).expand_as(worse)
    codes = torch.where(worse[:, None, None], nearest, codes)
    after = torch.where(worse, before, after)
    weight = layer.tensor(grid.values(codes))
    note = _note(hessian, worse)
    return [Choice(layer.name, weight, task.encoding(layer), float(before.sum()), float(after.sum()), note)]


def asymmetric_method(settings: AsymmetricSettings) -> Callable[[Task], Sequence[Choice]]:
    """:func:`solve_asymmetric` for :func:`bitwright.methods.rounding.driver.apply`."""
    return lambda task: solve_asymmetric(task, settings)


def method(settings: Settings) -> Callable[[Task], Sequence[Choice]]:
    """:func:`solve` for :func:`bitwright.methods.rounding.driver.apply`."""

    def choose(task: Task) -> Sequence[Choice]:
        return solve(task, settings)

    return choose
