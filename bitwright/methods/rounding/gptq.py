"""GPTQ: round a matrix column by column, and compensate each error in the remaining columns.

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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from bitwright.core.compiled.loops import loops
from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods.rounding.driver import Choice, Task, check_finite, check_rows
from bitwright.methods.rounding.matrices import FewRows, Grid, Layer, Moments, grid_encoding
from bitwright.methods.rounding.refit import refitted

_COARSE = 4  # bits up to which a refit of the grid lowers the error by more than it costs
_REFITS = 3
#: damping from which on few rows stand for their matrix; with less, rounding errors fill the inverse of one without full rank
LEAST_DAMPING = 1e-3
_KEPT = 1 << 27  # columns squared up to which rows of a factor, half of these numbers, are kept: 256 MiB
_WIDENED = 1 << 22  # weights that are widened to float64 at once: 32 MiB
_WIDE = 2048  # columns from which on errors are products in float32: two thirds of the time, 1e-7 of their value


@dataclass(frozen=True)
class Settings:
    """Options of GPTQ.

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
        refit: how often scales, and zero points where there are any, are refitted to the codes by least squares under ``H``,
            with a new rounding in between; what is best under ``H`` is kept. 0 leaves the grid as it is, and so do weights
            whose rows share scales and ones that become zero. ``None``: 3 times for formats of up to 4 bits, where it pays, and
            not at all for others.
    """

    damping: float = 0.01
    act_order: bool = True
    block: int = 128
    match_float: bool = True
    sparsity: float = 0.0
    pattern: str = "unstructured"
    rows_per_input: int | None = None
    refit: int | None = None

    def __post_init__(self) -> None:
        check_refit(self.refit)


def check_refit(refit: int | None) -> None:
    """Refuse an invalid number of refits.

    Raises:
        ConfigError: it is below 0.
    """
    if refit is not None and refit < 0:
        raise ConfigError(
            "refit", f"it is {refit}", "give 0 to keep the scales, or how often they are refitted, such as 3"
        )


@dataclass(frozen=True)
class AsymmetricSettings:
    """Options of GPTAQ.

    Attributes:
        damping, act_order, block, rows_per_input, refit: as of :class:`Settings`.
        share: of the correction that is made; 1 is the paper's equation. What differs between the inputs is known from the
            calibration data only, and less of it generalizes better where these are few.
    """

    damping: float = 0.01
    act_order: bool = True
    block: int = 128
    share: float = 1.0
    rows_per_input: int | None = None
    refit: int | None = None

    def __post_init__(self) -> None:
        check_refit(self.refit)
        if not 0 <= self.share <= 1:
            raise ConfigError("share", f"it is {self.share!r}", "give a number from 0 (GPTQ) to 1")


Hessian = Tensor | FewRows


class Factored(ABC):
    """What rounding reads of the inputs, which is the same for every grid.

    Attributes:
        order: of the columns, ``[G, K]``.
        moved: ``P`` of GPTAQ in that order, ``[G, K, K]`` float32.
    """

    order: Tensor
    moved: Tensor | None = None

    @abstractmethod
    def blocks(self, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield ``size`` columns at a time, and their rows of ``U`` from the first of them on: ``[columns, rest, G]`` float32."""


class FactoredMatrix(Factored):
    """:class:`Factored` of a matrix: ``U`` is kept whole."""

    def __init__(self, hessian: Tensor, settings: Settings, drift: Tensor | None = None) -> None:
        self.order = _order(hessian, settings)
        factor = inverse_factor(_permuted(hessian, self.order), settings.damping)
        self.moved = _correction(None if drift is None else _permuted(drift, self.order), factor)
        self._upper = factor.float().movedim(0, 2).contiguous()

    def blocks(self, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Slices of the matrix."""
        count = len(self._upper)
        for start in range(0, count, size):
            here = slice(start, min(start + size, count))
            yield here, self._upper[here, start:]


class FactoredRows(Factored):
    """:class:`Factored` of few rows: neither the matrix nor ``U`` is made.

    The inverse of the damped matrix of the columns still to come is ``(I - X^T S X) / d`` with ``S = (X X^T + d I)^-1``, as small
    as the rows are few (Woodbury's identity); the first rows of its factor follow from its first rows.
    """

    def __init__(self, hessian: FewRows, settings: Settings) -> None:
        self.order = _order(hessian, settings)
        self._x = hessian.x.gather(2, self.order[:, None, :].expand(hessian.x.shape))
        diagonal = hessian.diagonal()
        mean = diagonal.sum(1) / (diagonal > 0).sum(1).clamp(min=1)
        self._damping = settings.damping * torch.where(mean > 0, mean, torch.ones_like(mean))[:, None]
        self._kept: dict[int, list[tuple[slice, Tensor]]] = {}

    def blocks(self, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Computed one after the other, once where they are small in all, else anew in every call."""
        if size not in self._kept and self._x.shape[0] * self._x.shape[2] ** 2 <= _KEPT:
            self._kept[size] = list(self._computed(size))
        yield from self._kept[size] if size in self._kept else self._computed(size)

    def _computed(self, size: int) -> Iterator[tuple[slice, Tensor]]:
        inner, count = self._x @ self._x.transpose(1, 2), int(self._x.shape[2])
        for start in range(0, count, size):
            here = slice(start, min(start + size, count))
            x, rest = self._x[:, :, here], self._x[:, :, start:]
            damped = inner.clone()
            torch.diagonal(damped, dim1=1, dim2=2).add_(self._damping)
            inverse = -torch.cholesky_solve(x, torch.linalg.cholesky(damped)).transpose(1, 2) @ rest
            torch.diagonal(inverse, dim1=1, dim2=2).add_(1.0)
            inverse /= self._damping[:, :, None]
            lower = torch.linalg.cholesky(inverse[:, :, : here.stop - start])
            yield here, torch.linalg.solve_triangular(lower, inverse, upper=False).float().movedim(0, 2).contiguous()
            inner -= x @ x.transpose(1, 2)


def factored(hessian: Hessian, settings: Settings) -> Factored:
    """:class:`Factored` of ``H``; of few rows with a damping of at least :data:`LEAST_DAMPING`."""
    return FactoredRows(hessian, settings) if isinstance(hessian, FewRows) else FactoredMatrix(hessian, settings)


def round_columns(
    w: Tensor, hessian: Tensor | Factored, grid: Grid | None, settings: Settings, drift: Tensor | None = None
) -> Tensor:
    """Codes of ``w`` that keep ``(W - W_q) H (W - W_q)^T`` small.

    Args:
        w: ``[G, O, K]`` float32.
        hessian: ``[G, K, K]`` float64, symmetric and positive semidefinite; any factor before it is without effect. Or what
            was made of it, and of ``drift``, before.
        grid: of every weight; ``None`` rounds nothing, so that what is returned is weights: pruning alone.
        drift: ``sum of (x - x_q) x_q^T``, ``[G, K, K]`` float64, with the same factor as ``hessian``: GPTAQ.

    Returns:
        Codes, ``[G, O, K]`` float32. Columns whose inputs are all zero ("dead") are rounded to nearest.
    """
    found = hessian if isinstance(hessian, Factored) else FactoredMatrix(hessian, settings, drift)
    every, moved = group_of_pattern(settings.pattern), found.moved
    columns = found.order[:, None, :].expand(w.shape)
    compiled = _compiled(w, grid, settings, moved)
    w = _by_column(w, columns)
    codes = torch.empty_like(w)
    rounded: Callable[[Tensor, slice, Tensor, Tensor, Tensor], None]
    if compiled is not None and grid is not None:
        numbers = tuple(_by_column(t, columns) for t in _numbers(grid))
        rounded = partial(_round_compiled, compiled, numbers)
    else:
        rounded = partial(_round_block, _grids(grid, columns), settings, moved)
    n = len(w)
    size = settings.block if every is None else max(settings.block // every[1], 1) * every[1]
    for here, upper in found.blocks(size):
        block, errors = w[here].clone(), torch.empty_like(w[here])
        rounded(block, here, codes[here], errors, upper[:, : len(block)])
        w[here.stop :] -= torch.einsum("jgo,jkg->kgo", errors, upper[:, len(block) :])
        _correct(w[here.stop :], block, moved, here, slice(here.stop, n))
    return torch.empty_like(codes.permute(1, 2, 0)).scatter_(2, columns, codes.permute(1, 2, 0))


def _round_compiled(
    compiled: Callable[..., None], numbers: Sequence[Tensor], block: Tensor, here: slice, codes: Tensor, errors: Tensor,
    upper: Tensor,
) -> None:  # fmt: skip
    """:func:`_round_block` in one call."""
    own = (*(t[here] for t in numbers), upper.contiguous(), torch.diagonal(upper).t().contiguous())
    compiled(*(t.numpy() for t in (block, codes, errors, *own)))


def _round_block(
    grids: Sequence[Grid | None], settings: Settings, moved: Tensor | None, block: Tensor, here: slice, codes: Tensor,
    errors: Tensor, upper: Tensor,
) -> None:  # fmt: skip
    """Round the columns ``here`` in place to dequantized values; fills in ``codes`` and ``errors``.

    ``upper`` is ``U`` of these columns, ``[columns, columns, G]``.
    """
    every = group_of_pattern(settings.pattern)
    diagonal = torch.diagonal(upper).t().contiguous()[:, :, None]  # [columns, G, 1]
    gone = _gone(block, diagonal, settings, every)
    for j, k in enumerate(range(here.start, here.stop)):
        if every is not None and k % every[1] == 0:
            _drop_group(gone[j:], block[j:], diagonal[j:], every)
        column = block[j]
        codes[j], value = _rounded(column, gone[j] if len(gone) else None, grids[k])
        torch.div(column - value, diagonal[j], out=errors[j])
        block[j + 1 :].addcmul_(upper[j, j + 1 :, :, None], errors[j], value=-1)
        _correct(block[j + 1 :], block[j : j + 1], moved, slice(k, k + 1), slice(k + 1, here.stop))
        block[j] = value


def _numbers(grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    return grid.scale, grid.lo, grid.hi


def _compiled(w: Tensor, grid: Grid | None, settings: Settings, moved: Tensor | None) -> Callable[..., None] | None:
    """The compiled loop over the columns of a block, where integer codes are rounded on the CPU without further options."""
    zeros = settings.sparsity > 0 or group_of_pattern(settings.pattern) is not None
    plain = grid is not None and grid.format is None and not grid.free
    if not plain or zeros or moved is not None or w.device.type != "cpu" or w.dtype != torch.float32:
        return None
    found = loops()
    return None if found is None else found.round_block


def _grids(grid: Grid | None, columns: Tensor) -> list[Grid | None]:
    """The grid of every column, ``[G, O]``, in the order of ``columns``."""
    if grid is None:
        return [None] * int(columns.shape[2])
    parts = (_by_column(t, columns) for t in _numbers(grid))
    return [Grid(scale, lo, hi, format=grid.format, free=grid.free) for scale, lo, hi in zip(*parts, strict=True)]


def _gone(block: Tensor, diagonal: Tensor, settings: Settings, every: tuple[int, int] | None) -> Tensor:
    """The weights of a block, ``[K, G, O]``, known to become zero before it is rounded; empty where there are none."""
    if every is None and settings.sparsity > 0:
        return _least(block / diagonal, settings.sparsity)
    return torch.zeros_like(block if every is not None else block[:0], dtype=torch.bool)


def _drop_group(gone: Tensor, block: Tensor, diagonal: Tensor, every: tuple[int, int]) -> None:
    """Mark the smallest of the first ``every[1]`` columns."""
    near = (block[: every[1]] / diagonal[: every[1]]).square()
    drop = max(len(near) - every[0], 0)
    gone[: every[1]].scatter_(0, near.argsort(0)[:drop], True)


def _by_column(t: Tensor, columns: Tensor) -> Tensor:
    """``[K, G, O]``: the reordered columns of a tensor that broadcasts against ``[G, O, K]``."""
    return t.expand(columns.shape).gather(2, columns).permute(2, 0, 1).contiguous()


def _correction(drift: Tensor | None, factor: Tensor) -> Tensor | None:
    """``P`` of GPTAQ, eq. 15, the effect of each column on those after it: strictly upper triangular, float32."""
    return None if drift is None else ((drift @ factor.transpose(1, 2)).triu(1) @ factor).float()


def _correct(w: Tensor, columns: Tensor, moved: Tensor | None, of: slice, on: slice) -> None:
    """Add the correction by ``moved`` (``P``), if given, from the columns ``of`` to the columns ``on``, ``[columns, G, O]``."""
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
        raise ConfigError("pattern", f"{pattern!r} is not a pattern of zeros", "use unstructured, or n:m as in 2:4")
    return int(n), int(m)


def _least(scores: Tensor, share: float) -> Tensor:
    """A mask of the smallest ``share`` of squares per matrix, ``[K, G, O]``."""
    flat = scores.square().transpose(0, 1).flatten(1)
    count = round(share * flat.shape[1])
    gone = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, flat.argsort(1)[:, :count], True)
    return gone.reshape(scores.transpose(0, 1).shape).transpose(0, 1).contiguous()


def _order(hessian: Hessian, settings: Settings) -> Tensor:
    """The order in which columns are rounded, ``[G, K]``: natural, or by descending diagonal."""
    diagonal = hessian.diagonal(dim1=1, dim2=2)
    if settings.act_order and group_of_pattern(settings.pattern) is None:
        return torch.argsort(diagonal, dim=1, descending=True, stable=True)
    return torch.arange(diagonal.shape[1], device=diagonal.device).expand(diagonal.shape)


def _rounded(column: Tensor, gone: Tensor | None, grid: Grid | None) -> tuple[Tensor, Tensor]:
    """Codes of a column and their dequantized weights, ``[G, O]``; zero where ``gone``."""
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
    while True:
        # one matrix of so many columns may take half a GiB: no more than two are held at a time
        found = hessian.clone()
        torch.diagonal(found, dim1=1, dim2=2).add_(dead + damping * mean[:, None] * ~dead)
        found, failed = torch.linalg.cholesky_ex(found)
        if not failed.any():
            found = torch.cholesky_inverse(found)
            found, failed = torch.linalg.cholesky_ex(found, upper=True)
            if not failed.any():
                return found
        damping = max(damping, 1e-8) * 10


def quadratic_error(delta: Tensor, hessian: Hessian) -> Tensor:
    """``delta H delta^T`` of every row: ``[G, O, K]``, ``[G, K, K]`` -> ``[G, O]`` float64."""
    if isinstance(hessian, FewRows):
        inputs, rows = hessian.x.transpose(1, 2), max(1, _WIDENED // int(delta.shape[2]))
        return torch.cat([(part.double() @ inputs).square().sum(2) for part in delta.split(rows, 1)], 1)
    if delta.shape[2] >= _WIDE:
        return ((delta @ hessian.float()) * delta).sum(2, dtype=torch.float64).clamp(min=0)
    wide = delta.double()
    return ((wide @ hessian) * wide).sum(2)


def solve(task: Task, settings: Settings) -> list[Choice]:
    """Choose the weights of a layer; nearest rounding stays where the layer had no input or gains nothing."""
    (layer,) = task.layers.values()
    w = task.weight(layer)
    few = settings.damping >= LEAST_DAMPING
    found = task.moments(layer, settings.rows_per_input, weight=w if settings.match_float else None, few=few)
    hessian, rows = found.own, found.rows
    check_finite(layer, hessian.diagonal(dim1=1, dim2=2))
    check_rows(task.walk, layer, rows, int(w.shape[2]))
    seen = bool(hessian.any())
    target = least_squares(w, found, settings) if settings.match_float and seen else w
    if settings.sparsity > 0 or group_of_pattern(settings.pattern) is not None:
        grid = task.grid(layer, w)
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
        codes = round_columns(target.clone(), factored(hessian, settings), grid, settings)
        both = [quadratic_error(grid.values(c) - target, hessian).sum() / rows for c in (grid.nearest(w), codes)]
        note = f"{float((codes == 0).float().mean()):.1%} of its weights are zero"
        weight = layer.tensor(grid.values(codes))
        return [Choice(layer.name, weight, task.encoding(layer), float(both[0]), float(both[1]), note)]
    problem, once = Problem(task, layer, hessian, rows, target), cache(lambda: factored(hessian, settings))
    return [problem.choice(w, settings.refit, lambda grid: round_columns(target.clone(), once(), grid, settings))]


@dataclass(frozen=True)
class Problem:
    """Target weights of a layer, and the error measure.

    Attributes:
        task, layer: whose they are.
        hessian: ``[G, K, K]`` float64.
        rows: how many it is the sum of.
        target: ``[G, O, K]`` float32.
    """

    task: Task
    layer: Layer
    hessian: Hessian
    rows: int
    target: Tensor

    def errors(self, weight: Tensor) -> Tensor:
        """The error of every matrix, ``[G]``; the sum over layers that are kept or rounded together."""
        found = quadratic_error(weight - self.target, self.hessian).sum(1) / self.rows
        return found if self.layer.stack else found.sum().expand_as(found) / len(found)

    def choice(self, w: Tensor, refit: int | None, round_on: Callable[[Grid], Tensor]) -> Choice:
        """Round, and refit the grid to the codes; nearest rounding of ``w`` stays where it is as good.

        Args:
            w: the float weights, ``[G, O, K]``.
            refit: how often, each time followed by a new rounding except for the last; see :class:`Settings`.
            round_on: the codes on a grid.
        """
        encoding = self.task.encoding(self.layer)
        if refit is None:
            refit = _REFITS if encoding.format.bits <= _COARSE else 0
        first = Grid.of(encoding, self.layer, w.device)
        best = nearest = (first.values(first.nearest(w)), first)
        before = errors = self.errors(nearest[0])
        kept = torch.ones_like(before, dtype=torch.bool)
        for grid, weight in self._tries(first, refit, round_on) if bool(self.hessian.any()) else ():
            found = self.errors(weight)
            better = found <= errors
            best, errors, kept = better_of((weight, grid), best, better), torch.minimum(found, errors), kept & ~better
        weight, grid = best
        if grid is not first:
            encoding = grid_encoding(grid, encoding, self.layer)
        note = _note(self.hessian, kept)
        after = float(errors.sum())
        return Choice(self.layer.name, self.layer.tensor(weight), encoding, float(before.sum()), after, note)

    def _tries(self, grid: Grid, refit: int, round_on: Callable[[Grid], Tensor]) -> Iterator[tuple[Grid, Tensor]]:
        """Candidate grids with weights on them, starting with the given grid."""
        codes = round_on(grid)
        yield grid, grid.values(codes)
        encoding = self.task.encoding(self.layer)
        for turn in range(refit):
            moved, codes = refitted(grid, codes, self.target, self.hessian)
            kept = Grid.of(grid_encoding(moved, encoding, self.layer), self.layer, codes.device, index=grid.index)
            if moved is grid or not torch.equal(kept.scale.expand_as(moved.scale), moved.scale):
                return  # rows share scales, or the format has no room for these
            grid = kept if grid.stores_offsets else moved
            if not grid.stores_offsets:
                yield grid, grid.values(codes)
            if turn < refit - 1 or grid.stores_offsets:
                codes = round_on(grid)
                yield grid, grid.values(codes)


def better_of(one: tuple[Tensor, Grid], other: tuple[Tensor, Grid], where: Tensor) -> tuple[Tensor, Grid]:
    """Weights and grids of ``one`` for the matrices ``where``, ``[G]``, and of ``other`` for the rest."""
    if bool(where.all()) or not bool(where.any()):
        return one if bool(where.all()) else other
    mask = where[:, None, None]
    weight, grid = torch.where(mask, one[0], other[0]), one[1]
    if grid is other[1]:
        return weight, grid
    pairs = ((grid.scale, other[1].scale), (grid.lo, other[1].lo), (grid.hi, other[1].hi))
    scale, lo, hi = (torch.where(mask, a, b) for a, b in pairs)
    return weight, replace(grid, scale=scale, lo=lo, hi=hi)


def _note(hessian: Hessian, nearest: Tensor) -> str:
    """A note on the number of matrices that keep nearest rounding."""
    unseen = int((hessian.diagonal(dim1=1, dim2=2).sum(1) == 0).sum())
    count, kept = len(nearest), int(nearest.sum())
    if unseen == count:
        return "its inputs are all zero: nearest rounding kept"
    notes = [f"{unseen} of {count} matrices saw no input"] if unseen else []
    notes += [f"nearest rounding kept{f' in {kept} of {count} matrices' if kept < count else ''}"] if kept else []
    return "; ".join(notes)


def least_squares(w: Tensor, found: Moments, settings: Settings) -> Tensor:
    """Weights whose outputs on quantized inputs are closest to the float outputs.

    Damping is at least the number of inputs over that of rows: of fewer rows than inputs every noise could be made up for, and
    nothing of it would hold on others.
    """
    hessian = found.own
    diagonal = hessian.diagonal(dim1=1, dim2=2)
    share = max(settings.damping, int(w.shape[2]) / found.rows) * diagonal.mean(1, keepdim=True)
    wide = w.double()
    # move from W along what the inputs differ by, so that directions without data stay as they are
    assert found.moved is not None
    if isinstance(hessian, FewRows):  # D X (X^T X + d I)^-1 = D (X X^T + d I)^-1 X
        inner = hessian.x @ hessian.x.transpose(1, 2)
        torch.diagonal(inner, dim1=1, dim2=2).add_(torch.where(share > 0, share, torch.ones_like(share)))
        return wide.add_(torch.linalg.solve(inner, found.moved, left=False) @ hessian.x).float()
    damped = hessian.clone()
    torch.diagonal(damped, dim1=1, dim2=2).add_(torch.where(diagonal > 0, share, torch.ones_like(diagonal)))
    return (wide + torch.linalg.solve(damped, found.moved.transpose(1, 2)).transpose(1, 2)).float()


def solve_asymmetric(task: Task, settings: AsymmetricSettings) -> list[Choice]:
    """Choose the weights of a layer by GPTAQ; nearest rounding stays where its output error is not larger."""
    (layer,) = task.layers.values()
    w = task.weight(layer)
    ones = torch.eye(int(w.shape[2]), device=w.device).expand(len(w), -1, -1)
    found = task.moments(layer, settings.rows_per_input, weight=ones)
    hessian, drift = found.matrix, found.moved
    assert drift is not None
    check_finite(layer, hessian)
    check_rows(task.walk, layer, found.rows, int(w.shape[2]))
    plain = Settings(settings.damping, settings.act_order, settings.block)
    # of |Q x_q - W x|^2 what weights change: the distance from the weights that come nearest to the float model's outputs
    target = least_squares(w, Moments(hessian, w.double() @ drift, found.rows), plain) if hessian.any() else w
    problem = Problem(task, layer, hessian, found.rows, target)
    once = cache(lambda: FactoredMatrix(hessian, plain, settings.share * drift))
    return [problem.choice(w, settings.refit, lambda grid: round_columns(w.clone(), once(), grid, plain))]


def asymmetric_method(settings: AsymmetricSettings) -> Callable[[Task], Sequence[Choice]]:
    """:func:`solve_asymmetric` for :func:`bitwright.methods.rounding.driver.apply`."""
    return lambda task: solve_asymmetric(task, settings)


def method(settings: Settings) -> Callable[[Task], Sequence[Choice]]:
    """:func:`solve` for :func:`bitwright.methods.rounding.driver.apply`."""

    def choose(task: Task) -> Sequence[Choice]:
        return solve(task, settings)

    return choose
