"""Refit scales and zero points to fixed codes by coordinate descent on the least squares under ``H``.

Of codes ``C`` a row of weights is ``s_g (C - z_g)`` in each of its groups ``g``, so that its error under ``H``,
``(Q - W) H (Q - W)^T``, is a quadratic function of each scale and of each zero point alone. Each in turn goes to the number
nearest to its minimum that its format can store (coordinate descent), which never raises the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright.methods.rounding.matrices import FewRows, Grid

_SWEEPS = 6  # over all groups: what later ones gain is below a thousandth of the error
_CHUNK = 1 << 22  # numbers of rows, or of their systems, that are solved at once: 32 MiB
_FARTHEST = 2.0**20  # of a zero point that is a real number: codes near one farther away would be lost in float32


def groups_of_columns(grid: Grid, shape: torch.Size) -> Tensor | None:
    """The group of each column, ``[K]`` from 0, where every row has its own scales; ``None`` where rows share them."""
    if grid.index is None or not grid.own_rows:
        return None
    index = grid.index.expand(shape)
    groups = index[0, 0].unique(return_inverse=True)[1]
    count = shape[0] * shape[1] * (int(groups.max()) + 1)
    return groups if int(index.max()) + 1 == count else None


def refitted(grid: Grid, codes: Tensor, target: Tensor, hessian: Tensor | FewRows) -> tuple[Grid, Tensor]:
    """The grid whose values of ``codes`` are closest to ``target``, and the codes in that grid.

    Args:
        grid: of every weight; with ``index``.
        codes: ``[G, O, K]``, with real zero at 0.
        target: weights that are wanted, ``[G, O, K]``.
        hessian: ``[G, K, K]`` float64, symmetric and positive semidefinite.

    Returns:
        The grid with other scales, and zero points where it has them, and the codes less what zero moved by; as they were
        where rows share scales.
    """
    groups = groups_of_columns(grid, codes.shape)
    if groups is None:
        return grid, codes
    scale, zeros = grid.scale.expand(codes.shape).clone(), _has_zero_points(grid)
    moved = torch.zeros_like(codes) if zeros else None
    count = int(groups.max()) + 1
    unknowns = count * (2 if zeros else 1)
    firsts = torch.tensor([int((groups == g).nonzero()[0]) for g in range(count)], device=codes.device)
    members = [(groups == g).nonzero().flatten() for g in range(count)]
    size = max(1, _CHUNK // max(unknowns**2, int(codes.shape[2])))
    for at in _chunks(len(codes), int(codes.shape[1]), size):

        def rows_of(t: Tensor, at: tuple[slice, slice] = at) -> Tensor:
            return t.expand(codes.shape)[at][..., firsts].flatten(0, 1)

        common = None if grid.common is None else rows_of(grid.common)
        rows = _Rows(replace(grid, scale=rows_of(scale), lo=rows_of(grid.lo), hi=rows_of(grid.hi), common=common))
        rows.solve(codes[at].double(), target[at].double(), hessian[at[0]], members)
        scale[at] = rows.scale[:, groups].reshape(codes[at].shape)
        if moved is not None:
            moved[at] = rows.zero[:, groups].float().reshape(codes[at].shape)
    if moved is None:
        return replace(grid, scale=scale), codes
    return replace(grid, scale=scale, lo=grid.lo - moved, hi=grid.hi - moved), codes - moved


def _chunks(matrices: int, rows: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of matrices and of their rows with at most ``size`` rows in all: several matrices, or part of one."""
    if rows >= size:
        yield from ((slice(m, m + 1), slice(r, r + size)) for m in range(matrices) for r in range(0, rows, size))
    else:
        step = size // rows
        yield from ((slice(m, m + step), slice(None)) for m in range(0, matrices, step))


def _has_zero_points(grid: Grid) -> bool:
    return grid.free or grid.steps > 0


class _Rows:
    """Scales and zero points of some rows, ``[R, groups]``.

    Attributes:
        scale: float32, as stored.
        zero: by how much zero points have moved, float64: codes are less by that.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid, self.scale = grid, grid.scale
        self.zero = torch.zeros_like(grid.scale, dtype=torch.float64)

    def solve(self, codes: Tensor, target: Tensor, hessian: Tensor | FewRows, members: list[Tensor]) -> None:
        """Minimise over every scale and zero point in turn.

        Args:
            codes, target: of the rows of some matrices, ``[M, R / M, K]`` float64.
            hessian: of these matrices, ``[M, K, K]`` float64.
            members: of each group, its columns.
        """
        system, left = _system(codes, target, hessian, members, offsets=_has_zero_points(self.grid))
        count = len(members)
        if not _has_zero_points(self.grid):
            left -= torch.einsum("ojk,ok->oj", system, self.scale.double())
        else:
            left -= torch.einsum("ojk,ok->oj", system[:, :, :count], self.scale.double())
        for _ in range(_SWEEPS):
            for group in range(count):
                self._move_scale(system, left, group, count)
                if _has_zero_points(self.grid):
                    self._move_zero(system, left, group, count)

    def _move_scale(self, system: Tensor, left: Tensor, group: int, count: int) -> None:
        zero, old = self.zero[:, group], self.scale[:, group]
        slope, column = left[:, group], system[:, group]  # a row of a symmetric matrix, which is contiguous
        curve = column[:, group]
        if _has_zero_points(self.grid):
            column = column - zero[:, None] * system[:, count + group]
            slope = slope - zero * left[:, count + group]
            curve = column[:, group] - zero * column[:, count + group]
        wanted = (old.double() + slope / curve).float()
        usable = (curve > 0) & torch.isfinite(wanted) & (wanted > 0)
        common = None if self.grid.common is None else self.grid.common[:, group]
        new = replace(self.grid, common=common).stored(torch.where(usable, wanted, old))
        new = torch.where(usable & torch.isfinite(new) & (new > 0), new, old)
        step = new.double() - old.double()
        new = torch.where(step * (2 * slope - step * curve) > 0, new, old)  # only down, whatever the format rounds to
        left -= column * (new.double() - old.double())[:, None]
        self.scale[:, group] = new

    def _move_zero(self, system: Tensor, left: Tensor, group: int, count: int) -> None:
        scale, old = self.scale[:, group].double(), self.zero[:, group]
        column = system[:, count + group]
        wanted = old - left[:, count + group] / (column[:, count + group] * scale)
        lo, hi = self.grid.lo[:, group].double(), self.grid.hi[:, group].double()
        if self.grid.free:
            new = torch.where((lo - wanted).abs() < _FARTHEST, wanted.float().double(), old)
        else:  # zero itself stays a code
            new = torch.minimum(torch.maximum(wanted.round(), lo), hi)
        new = torch.where(torch.isfinite(wanted), new, old)
        left += column * (scale * (new - old))[:, None]
        self.zero[:, group] = new


def _system(
    codes: Tensor, target: Tensor, hessian: Tensor | FewRows, members: list[Tensor], *, offsets: bool
) -> tuple[Tensor, Tensor]:
    """``D^T H D`` and ``D^T H w`` of every row; ``D`` has the codes of a group in a column, then ones of it if ``offsets``.

    Args:
        codes, target: ``[M, O, K]``.
        hessian: ``[M, K, K]``.

    Returns:
        ``[M * O, n, n]`` and ``[M * O, n]``, float64.
    """
    sums = _Sums(codes, members, offsets=offsets)
    count, bases = len(members), len(sums.bases)
    if isinstance(hessian, FewRows):
        x = hessian.x.transpose(1, 2)
        parts = [basis[:, :, at] @ x[:, at] for basis in sums.bases for at in map(sums.columns, range(count))]
        outputs = torch.stack([part.expand(*codes.shape[:2], -1) for part in parts], 2).flatten(0, 1)
        return outputs @ outputs.transpose(1, 2), (outputs @ (target @ x).flatten(0, 1)[:, :, None])[:, :, 0]
    system = codes.new_zeros(codes.shape[0] * codes.shape[1], bases, count, bases, count)
    for b, basis in enumerate(sums.bases):
        for group in range(count):
            columns, first = sums.columns(group), sums.first(group)
            part = basis[:, :, columns] @ hessian[:, columns, first * sums.size :]
            system[:, b, group, :, first:] = sums(part, first)
    if sums.size:  # it is symmetric, and only the half above the diagonal was computed
        below = torch.ones(count, count, dtype=torch.bool, device=codes.device).tril(-1)[None, None, :, None, :]
        system = torch.where(below, system.permute(0, 3, 4, 1, 2), system)
    return system.reshape(len(system), bases * count, -1), sums(target @ hessian, 0).flatten(1)


class _Sums:
    """Products with the bases, ``codes`` and ones if ``offsets``, summed over the columns of each group.

    Attributes:
        bases: ``[M, O, K]``, ``[M, 1, K]``.
        size: number of columns of groups that follow each other, of which the last may have fewer; 0 of other groups.
    """

    def __init__(self, codes: Tensor, members: list[Tensor], *, offsets: bool) -> None:
        self.bases = [codes, torch.ones_like(codes[:, :1])] if offsets else [codes]
        self.size, self._members, self._shape = _neighbours(members, codes), members, codes.shape[:2]
        self._over_groups = _summed_by_group(members, codes, self.size)

    def columns(self, group: int) -> slice | Tensor:
        """Columns of a group."""
        return slice(group * self.size, (group + 1) * self.size) if self.size else self._members[group]

    def first(self, group: int) -> int:
        """The first group that a product with the columns of ``group`` is needed for."""
        return group if self.size else 0

    def __call__(self, part: Tensor, first: int) -> Tensor:
        """``[R, bases, groups]`` of ``part``, ``[M, O or 1, K]``, which begins at the group ``first`` and is overwritten."""
        found = [self._over_groups(part)] if len(self.bases) > 1 else []
        codes = self.bases[0][..., first * self.size :]
        found.insert(0, self._over_groups(part.mul_(codes) if part.shape == codes.shape else part * codes))
        return torch.stack([one.expand(*self._shape, -1) for one in found], 2).flatten(0, 1)


def _neighbours(members: list[Tensor], like: Tensor) -> int:
    """The number of columns of groups that follow each other, of which the last may have fewer; 0 of other groups."""
    columns, size = int(like.shape[-1]), len(members[0])
    in_order = torch.equal(torch.cat(members), torch.arange(columns, device=like.device))
    return size if in_order and all(len(own) == size for own in members[:-1]) and len(members[-1]) <= size else 0


def _summed_by_group(members: list[Tensor], like: Tensor, size: int) -> Callable[[Tensor], Tensor]:
    """A function that sums ``[..., K]`` over the columns of each group; of neighbours, ``K`` may begin at any group."""
    if size:
        return lambda values: F.pad(values, (0, -values.shape[-1] % size)).unflatten(-1, (-1, size)).sum(-1)
    sums = like.new_zeros(int(like.shape[-1]), len(members))
    for group, own in enumerate(members):
        sums[own, group] = 1.0
    return lambda values: values @ sums
