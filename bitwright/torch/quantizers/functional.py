"""Quantization of tensors by grids that are tensors themselves, with gradients for all of them.

The values are those of :mod:`bitwright.core.numerics.affine`, bit for bit: ``codes = clip(rint(x / scale) +
zero_point)``. Rounding has the identity as its gradient (Bengio et al. 2013, arXiv:1308.3432), clipping passes none
outside the grid, so that scale and zero point get the gradients of learned step sizes (Esser et al. 2020,
arXiv:1902.08153).

Scales may lie in blocks along any axes: a scale of shape ``(8, 2)`` for a tensor ``(8, 64)`` has one step per 32 neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from bitwright.core.numerics.affine import round_to_float
from bitwright.core.numerics.formats import FloatFormat
from bitwright.errors import FormatError, GranularityError


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def round_ste(x: torch.Tensor) -> torch.Tensor:
    """``x`` rounded to integers, ties to even; the gradient is the identity."""
    return _Round.apply(x)


def blocked_shapes(
    shape: Sequence[int], params: Sequence[int], block_size: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes in which a tensor and its blocked parameters broadcast.

    Args:
        shape: of the tensor.
        params: shape of scale and zero point; one number per block on every axis.
        block_size: elements per block, axis by axis; ``-1`` divides the axis evenly. ``None``: no blocks, the parameters
            broadcast against the tensor as they are.

    Raises:
        GranularityError: the blocks do not divide an axis, or ranks differ.

    >>> blocked_shapes((8, 64), (8, 2), (1, 32))
    ((8, 1, 2, 32), (8, 1, 2, 1))
    """
    if block_size is None:
        try:
            fits = tuple(torch.broadcast_shapes(tuple(shape), tuple(params))) == tuple(shape)
        except RuntimeError:
            fits = False
        if not fits:
            raise GranularityError(
                "scale",
                f"its shape {tuple(params)} does not broadcast against a tensor of shape {tuple(shape)}",
                "give one scale per tensor, (n, 1, ...) per channel, or a block_size",
            )
        return tuple(shape), tuple(params)
    leading = len(shape) - len(params)
    if leading < 0 or len(block_size) != len(params):
        raise GranularityError(
            "block_size",
            f"block_size {tuple(block_size)} and scale shape {tuple(params)} do not fit a tensor of shape {tuple(shape)}",
            "give one block size per axis of the scale",
        )
    view, broadcast = list(shape[:leading]), [1] * leading
    for axis, (count, blocks, size) in enumerate(zip(shape[leading:], params, block_size, strict=True)):
        if blocks * (count // max(blocks, 1)) != count or (size != -1 and blocks * size != count):
            raise GranularityError(
                "block_size",
                f"axis {axis + leading} has {count} elements, which {blocks} blocks of {size} do not fill",
                "choose a block size that divides the axis",
            )
        view += [blocks, count // blocks]
        broadcast += [blocks, 1]
    return tuple(view), tuple(broadcast)


def _wide(x: torch.Tensor, qmin: int, qmax: int) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64 and for codes that float32 cannot distinguish."""
    return torch.float64 if x.dtype == torch.float64 or qmax - qmin > 0xFFFF else torch.float32


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    qmin: int,
    qmax: int,
    block_size: Sequence[int] | None = None,
) -> torch.Tensor:
    """Codes of ``x`` on the grid ``qmin`` to ``qmax``, as floating-point numbers.

    Args:
        x: floating-point tensor.
        scale, zero_point: broadcast against ``x``, or have one number per block.
        qmin, qmax: ends of the grid.
        block_size: see :func:`blocked_shapes`.

    Returns:
        Shape of ``x``; float32, or float64 where float32 cannot hold the codes.

    Raises:
        FormatError: ``qmin`` is not below ``qmax``.
        GranularityError: the parameters do not fit ``x``.
    """
    codes = _codes(x, scale, zero_point, qmin, qmax, block_size)[0]
    return codes.reshape(x.shape)


def _codes(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    qmin: int,
    qmax: int,
    block_size: Sequence[int] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if qmin >= qmax:
        raise FormatError("grid", f"qmin={qmin} is not below qmax={qmax}", "give the ends of the grid, lowest first")
    view, broadcast = blocked_shapes(x.shape, scale.shape, block_size)
    dtype = _wide(x, qmin, qmax)
    s = scale.to(dtype).reshape(broadcast)
    z = zero_point.to(dtype).reshape(broadcast)
    codes = round_ste(x.to(dtype).reshape(view) / s) + z
    return codes.clamp(qmin, qmax), s, z


def dequantize(
    q: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, block_size: Sequence[int] | None = None
) -> torch.Tensor:
    """Values of the codes ``q``: ``(q - zero_point) * scale``, in the dtype of ``scale``.

    Args:
        q: codes, floating-point or integer.
        scale, zero_point, block_size: as for :func:`quantize`.
    """
    view, broadcast = blocked_shapes(q.shape, scale.shape, block_size)
    dtype = torch.float64 if torch.float64 in (q.dtype, scale.dtype) else torch.float32
    s, z = scale.to(dtype).reshape(broadcast), zero_point.to(dtype).reshape(broadcast)
    return ((q.to(dtype).reshape(view) - z) * s).reshape(q.shape).to(scale.dtype)


def quantize_dequantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    qmin: int,
    qmax: int,
    block_size: Sequence[int] | None = None,
) -> torch.Tensor:
    """:func:`dequantize` of :func:`quantize`, in the dtype of ``x``.

    >>> quantize_dequantize(torch.tensor([0.3, 70.0]), torch.tensor(0.5), torch.tensor(0.0), -128, 127)
    tensor([ 0.5000, 63.5000])
    """
    codes, s, z = _codes(x, scale, zero_point, qmin, qmax, block_size)
    return ((codes - z) * s).reshape(x.shape).to(x.dtype)


def grid_of_range(
    lo: torch.Tensor, hi: torch.Tensor, qmin: int, qmax: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of the grid with the ends ``lo`` and ``hi``; differentiable in both.

    Args:
        lo, hi: ends of the range, ``lo < hi``, of one shape; computed with in float32 at least.
        qmin, qmax: ends of the grid.
        symmetric: keep the zero point in the middle of the grid.

    >>> grid_of_range(torch.tensor(-1.0), torch.tensor(3.0), 0, 255, symmetric=False)[1]
    tensor(64.)
    """
    tiny = torch.finfo(torch.float32).tiny
    lo, hi = (end.to(torch.promote_types(end.dtype, torch.float32)) for end in (lo, hi))
    scale = ((hi - lo) / (qmax - qmin)).clamp(min=tiny)
    if symmetric:
        return scale, torch.full_like(scale, float((qmin + qmax + 1) // 2))
    return scale, (qmin - round_ste(lo / scale)).clamp(qmin, qmax)


class _RoundFloat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
        ctx.save_for_backward(x.abs() <= fmt.max)
        rounded: torch.Tensor = round_to_float(x, fmt)
        return rounded.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (inside,) = ctx.saved_tensors
        return grad * inside, None


def float_quantize_dequantize(
    x: torch.Tensor, fmt: FloatFormat, scale: torch.Tensor | None = None, block_size: Sequence[int] | None = None
) -> torch.Tensor:
    """``x`` rounded to the numbers of a float format times ``scale``, saturating; the gradient is zero beyond the largest.

    Args:
        x: floating-point tensor.
        fmt: the format.
        scale: ``None`` is 1.
        block_size: see :func:`blocked_shapes`.
    """
    if scale is None:
        return _RoundFloat.apply(x, fmt)
    view, broadcast = blocked_shapes(x.shape, scale.shape, block_size)
    s = scale.to(torch.float32 if x.dtype != torch.float64 else x.dtype).reshape(broadcast)
    return (_RoundFloat.apply(x.to(s.dtype).reshape(view) / s, fmt) * s).reshape(x.shape).to(x.dtype)


def block_rows(x: torch.Tensor, params: Sequence[int], block_size: Sequence[int] | None) -> torch.Tensor:
    """A matrix ``(groups, elements)`` whose rows are the elements that share a parameter, in the order of the parameters.

    Args:
        x: tensor.
        params: shape of the parameters.
        block_size: see :func:`blocked_shapes`; without blocks the axes of ``x`` where ``params`` has 1 are shared.

    >>> block_rows(torch.arange(8.0).reshape(2, 4), (2, 2), (1, 2)).tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    """
    view, broadcast = blocked_shapes(x.shape, params, block_size)
    broadcast = (1,) * (len(view) - len(broadcast)) + tuple(broadcast)
    kept = [axis for axis, size in enumerate(broadcast) if size != 1]
    shared = [axis for axis, size in enumerate(broadcast) if size == 1]
    groups = 1
    for axis in kept:
        groups *= broadcast[axis]
    return x.reshape(view).permute((*kept, *shared)).reshape(groups, -1)


def grouped_scale(scale: torch.Tensor, grouping: Sequence[int], multiples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block scales rounded to integer multiples of one scale per group of blocks (LPBQ).

    Args:
        scale: of the blocks.
        grouping: how many blocks share a scale, axis by axis; ``-1``: all of the axis.
        multiples: the largest multiple.

    Returns:
        The rounded block scales, shape of ``scale``, and those of the groups, with 1 for a whole axis.

    >>> grouped_scale(torch.tensor([[0.8, 0.31]]), (1, -1), 16)[0]
    tensor([[0.8000, 0.3000]])
    """
    sizes = [count if size == -1 else size for count, size in zip(scale.shape, grouping, strict=True)]
    if math.prod(sizes) == 1:  # every block is a group of its own
        return scale, scale / multiples
    groups = [count // size for count, size in zip(scale.shape, sizes, strict=True)]
    view, broadcast = blocked_shapes(scale.shape, groups, sizes)
    blocks = scale.reshape(view)
    largest = blocks.amax(dim=[axis for axis, size in enumerate(broadcast) if size == 1 and view[axis] > 1] or [-1],
                          keepdim=True)  # fmt: skip
    unit = largest / multiples
    rounded = round_ste(blocks / unit).clamp(1, multiples) * unit
    return rounded.reshape(scale.shape), unit.reshape(groups)
