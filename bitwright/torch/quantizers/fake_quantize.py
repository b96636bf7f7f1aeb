"""Quantize-dequantize on torch tensors: bit for bit the reference of ``core/numerics/affine.py``, bound by memory bandwidth.

Four passes over one buffer: divide, round, clamp, multiply. ``round(x / s)`` clamped to ``[qmin - z, qmax - z]`` is the
reference's ``clamp(round(x / s) + z) - z`` without the two additions. The last pass is written as ``0 + s * q`` because
that turns the ``-0.0`` of a rounded small negative number into the ``+0.0`` an integer code dequantizes to.

Where the extra ``fast`` is installed, compiled loops make them one pass, with the ReLU or the sum in front; in training a byte
per element says where the gradient passes, so that neither the activation's input nor its result is kept.

Measured on one core, 401k floats: 90 us, against 1,250 us for ``torch.fake_quantize_per_tensor_affine`` and 34 us for
``relu``. Splitting large tensors into cache-sized chunks gained nothing here (1,021 against 1,031 us on 3.2 M floats).

This module also lists the devices on which reading a number makes the program wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bitwright.core.compiled.loops import Loops, flat, in_parts, loops
from bitwright.core.numerics import affine
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FloatFormat, IntFormat
from bitwright.core.numerics.granularity import PER_TENSOR


def on_host(device: torch.device) -> bool:
    """Whether tensors on ``device`` can be read without waiting for queued work."""
    return device.type == "cpu"


Scalar = Any  # float | torch.Tensor; torch's stubs of clamp take the two in separate overloads


@dataclass(frozen=True)
class Grid:
    """An encoding prepared for one tensor shape and device.

    ``scale`` is a number (per tensor, CPU) or a float32 tensor that broadcasts against the tensor viewed as ``view``.
    ``lo`` and ``hi`` are the clamp bounds ``qmin - zero_point`` and ``qmax - zero_point``: numbers where all zero points
    are equal, as in every symmetric encoding, else tensors like ``scale``.
    """

    scale: Scalar
    lo: Scalar
    hi: Scalar
    zero: torch.Tensor
    view: tuple[int, ...] | None


def is_fast(encoding: Encoding) -> bool:
    """Whether four float32 passes are exact: integer grids with integer zero points whose codes float32 holds exactly."""
    whole = isinstance(encoding.format, IntFormat) and encoding.shift is None
    return whole and encoding.format.bits <= 16 and not encoding.dynamic


def make_grid(encoding: Encoding, shape: tuple[int, ...], device: torch.device) -> Grid:
    """The clamp bounds and scale of an integer ``encoding`` for tensors of ``shape`` on ``device``."""
    assert isinstance(encoding.format, IntFormat)
    lo = (encoding.format.qmin - encoding.zero_point).astype(np.float32)
    hi = (encoding.format.qmax - encoding.zero_point).astype(np.float32)
    zero = torch.zeros((), device=device)
    if encoding.scale.ndim == 0 and on_host(device):
        return Grid(float(encoding.scale), float(lo), float(hi), zero, None)
    if encoding.scale.ndim == 0:
        # a tensor on the device: CUDA divides by a host number through its reciprocal, which is not the same division
        return Grid(torch.tensor(float(encoding.scale), device=device), float(lo), float(hi), zero, None)
    view = encoding.granularity.view_shape(shape)

    def place(values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(encoding.granularity.spread(values, shape).copy()).to(device)

    # a compiler has no values to look at
    equal = not torch.compiler.is_dynamo_compiling() and lo.size > 0 and bool((lo == lo.flat[0]).all())
    low, high = (float(lo.flat[0]), float(hi.flat[0])) if equal else (place(lo), place(hi))
    return Grid(place(np.asarray(encoding.scale)), low, high, zero, None if view == shape else view)


def columns(values: Sequence[Any], like: torch.Tensor) -> torch.Tensor:
    """Repeat each of ``values`` once for every column of ``like``."""
    return torch.tensor([float(v) for v in values], device=like.device).repeat_interleave(like.shape[-1])


def columns_grid(encodings: Sequence[Encoding], like: torch.Tensor) -> Grid:
    """The grid of tensors side by side, each shaped ``like`` and with its own per-tensor encoding."""
    bounds = []
    for encoding in encodings:
        assert isinstance(encoding.format, IntFormat)
        offset = int(encoding.zero_point)
        bounds.append((encoding.format.qmin - offset, encoding.format.qmax - offset))
    scale, zero = columns([e.scale for e in encodings], like), torch.zeros((), device=like.device)
    if len(set(bounds)) == 1:
        return Grid(scale, float(bounds[0][0]), float(bounds[0][1]), zero, None)
    lo, hi = (columns(ends, like) for ends in zip(*bounds, strict=True))
    return Grid(scale, lo, hi, zero, None)


def _passes(buffer: torch.Tensor, grid: Grid) -> torch.Tensor:
    if one_pass(buffer, grid, buffer) is not None:
        return buffer
    buffer.div_(grid.scale).round_().clamp_(grid.lo, grid.hi)
    if isinstance(grid.scale, float):
        return torch.add(grid.zero, buffer, alpha=grid.scale, out=buffer)
    return buffer.mul_(grid.scale).add_(grid.zero)


def on_grid(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """``x``, of the grid's dtype (float32 or float64), rounded to the grid; without gradient."""
    if torch.compiler.is_dynamo_compiling():
        return _functional(x, grid)
    done = one_pass(x, grid)
    if done is not None:
        return done
    buffer = (x if grid.view is None else x.reshape(grid.view)).div(grid.scale)
    buffer.round_().clamp_(grid.lo, grid.hi)
    if isinstance(grid.scale, float):
        torch.add(grid.zero, buffer, alpha=grid.scale, out=buffer)
    else:
        buffer.mul_(grid.scale).add_(grid.zero)
    return buffer if grid.view is None else buffer.reshape(x.shape)


# ---- in one pass, where compiled loops are at hand

#: elements from which a compiled loop is worth the microseconds of its call
LEAST = 4096
EVERYWHERE = (-math.inf, math.inf)


def _lies_ready(x: torch.Tensor, grid: Grid) -> Loops | None:
    """The compiled loops, if they apply to ``x``; :func:`flat` checks that it is contiguous."""
    if torch.compiler.is_dynamo_compiling() or x.numel() < LEAST or x.dtype != torch.float32:
        return None
    return loops() if is_plain(x) and on_host(x.device) and isinstance(grid.lo, float) else None


def serves(x: torch.Tensor, grid: Grid) -> bool:
    """Whether the compiled loops apply to ``x`` and a grid with one scale."""
    return isinstance(grid.scale, float) and _lies_ready(x, grid) is not None and flat(x) is not None


def one_pass(x: torch.Tensor, grid: Grid, out: torch.Tensor | None = None) -> torch.Tensor | None:
    """Quantize ``x`` in one pass over memory, into ``out`` or a new tensor; ``None`` where no compiled loop applies."""
    compiled = _lies_ready(x, grid)
    source = None if compiled is None else flat(x)
    if compiled is None or source is None:
        return None
    rows = _row_scales(x, grid)
    if rows is None and not isinstance(grid.scale, float):
        return None
    result, target = _room(x, source, out)
    if rows is not None:
        compiled.quantize_rows(source, target, rows, np.float32(grid.lo), np.float32(grid.hi))
    else:
        threads = torch.get_num_threads()
        in_parts(compiled.quantize_dequantize, (source, target), grid_numbers(grid), threads)
    return result


def clamp_on_grid(x: torch.Tensor, grid: Grid, ends: tuple[float, float], *, in_place: bool) -> torch.Tensor | None:
    """Quantize ``clamp(x, *ends)``, with the gradient of ``hardtanh``; ``None`` where no compiled loop applies."""
    compiled = _lies_ready(x, grid)
    source = None if compiled is None or not isinstance(grid.scale, float) else flat(x)
    if compiled is None or source is None:
        return None
    if torch.is_grad_enabled() and x.requires_grad:
        return _marked(x, grid, ends, in_place)
    result, target = _room(x, source, x if in_place else None)
    numbers = (np.float32(ends[0]), np.float32(ends[1]), *grid_numbers(grid))
    in_parts(compiled.clamp_quantize, (source, target), numbers, torch.get_num_threads())
    return result


def sum_on_grid(x: torch.Tensor, other: torch.Tensor, grid: Grid, *, in_place: bool) -> torch.Tensor | None:
    """Quantize ``x + other`` of the same shape and strides; ``None`` where no compiled loop applies."""
    compiled = _lies_ready(x, grid)
    if compiled is None or not isinstance(grid.scale, float) or not is_plain(other):
        return None
    if x.shape != other.shape or x.stride() != other.stride():
        return None
    source, second = flat(x), flat(other)
    if source is None or second is None:
        return None
    if torch.is_grad_enabled() and (x.requires_grad or other.requires_grad):
        if in_place and (x.is_leaf or x._is_view()):
            return None
        added: torch.Tensor = _MarkedSum.apply(x, other, grid, in_place)
        return added
    result, target = _room(x, source, x if in_place else None)
    in_parts(compiled.add_quantize, (source, second, target), grid_numbers(grid), torch.get_num_threads())
    return result


def learned_gradients(
    grad: torch.Tensor, x: torch.Tensor, grid: Grid, ends: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Gradient that :func:`clamp_on_grid` passes through, laid out as ``x``, and two sums of the shape of the scale.

    The sums are of ``grad`` times the derivative of the results by the scale, and of what of ``grad`` is not passed on.
    ``None`` where no compiled loop serves, or a gradient of the gradient is asked for. A grid with a scale per row is without an
    activation in front.
    """
    compiled, twice = _lies_ready(x, grid), torch.is_grad_enabled() and grad.requires_grad
    if twice or compiled is None or not is_plain(grad) or grad.stride() != x.stride():
        return None
    rows = _row_scales(x, grid)
    if rows is None and not isinstance(grid.scale, float):
        return None
    given, source = flat(grad), flat(x)
    if given is None or source is None:
        return None
    inner, target = _room(x, source, None)
    if rows is not None:
        sums = np.zeros((rows.size, 2))
        ends_of_grid = np.float32(grid.lo), np.float32(grid.hi)
        compiled.learned_rows_gradient(given, source, target, sums.reshape(-1), rows, *ends_of_grid)
        shape = tuple(grid.scale.shape)
    else:
        numbers = (np.float32(ends[0]), np.float32(ends[1]), *grid_numbers(grid), *codes_from_to(grid))
        sums, shape = _sums_in_parts(compiled, (given, source, target), numbers), ()
    step, left = (torch.from_numpy(part.astype(np.float32)).reshape(shape) for part in sums.T)
    return inner, step, left


def _sums_in_parts(
    compiled: Loops, arrays: Sequence[NDArray[np.float32]], numbers: Sequence[Any]
) -> NDArray[np.float64]:
    """The sums of ``learned_gradient``, ``[1, 2]``, deterministic over threads."""
    found: list[NDArray[np.float64]] = []

    def part(*given: Any) -> None:
        sums = np.zeros(2)
        compiled.learned_gradient(*given[:3], sums, *given[3:])
        found.append(sums)

    in_parts(part, arrays, numbers, torch.get_num_threads())
    return np.sort(np.stack(found), axis=0).sum(axis=0, keepdims=True)


def _row_scales(x: torch.Tensor, grid: Grid) -> NDArray[np.float32] | None:
    """The scales of a grid with one scale per row of ``x``; ``None`` for other grids."""
    if isinstance(grid.scale, float) or grid.view is not None or not x.is_contiguous():
        return None
    if not grid.scale.numel() == grid.scale.shape[0] == x.shape[0]:
        return None
    found: NDArray[np.float32] = grid.scale.reshape(-1).numpy()
    return found


def _marked(x: torch.Tensor, grid: Grid, ends: tuple[float, float], in_place: bool) -> torch.Tensor | None:
    """The same with a gradient, without in-place writes, which autograd restricts for leaves and views."""
    if in_place and (x.is_leaf or x._is_view()):
        return None
    out: torch.Tensor = _Marked.apply(x, grid, ends, in_place)
    return out


def grid_numbers(grid: Grid) -> tuple[np.float32, np.float32, np.float32]:
    """Scale and ends of a grid with one scale, as compiled loops take them."""
    return np.float32(grid.scale), np.float32(grid.lo), np.float32(grid.hi)


def codes_from_to(grid: Grid) -> tuple[np.float32, np.float32]:
    """Bounds of the values that round to a code of the grid."""
    return np.float32((grid.lo - 0.5) * grid.scale), np.float32((grid.hi + 0.5) * grid.scale)


def _room(
    x: torch.Tensor, source: NDArray[np.float32], out: torch.Tensor | None
) -> tuple[torch.Tensor, NDArray[np.float32]]:
    """The tensor for the result, laid out as ``x``, and its memory; ``out`` is ``x`` or ``None``."""
    if out is not None:
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)  # as every operation of torch in place does
        return out, source
    result = torch.empty_like(x)
    target = flat(result)
    assert target is not None
    return result, target


class _Marked(torch.autograd.Function):
    """An activation and its grid; saves one byte per element, where the gradient passes, instead of the inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: Grid, ends: tuple[float, float], in_place: bool) -> torch.Tensor:
        marks = torch.empty_like(x, dtype=torch.uint8)
        result = x if in_place else torch.empty_like(x)
        source, target, compiled = flat(x), flat(result), loops()
        assert source is not None and target is not None and compiled is not None
        numbers = (np.float32(ends[0]), np.float32(ends[1]), *grid_numbers(grid), *codes_from_to(grid))
        arrays = (source, target, _in_memory(marks))
        in_parts(compiled.clamp_quantize_marked, arrays, numbers, torch.get_num_threads())
        if in_place:
            ctx.mark_dirty(x)
        ctx.save_for_backward(marks)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _where_marked(grad, ctx.saved_tensors[0]), None, None, None


class _MarkedSum(torch.autograd.Function):
    """A sum and its grid, with saved bytes as :class:`_Marked`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor, grid: Grid, in_place: bool) -> torch.Tensor:
        marks = torch.empty_like(x, dtype=torch.uint8)
        result = x if in_place else torch.empty_like(x)
        source, second, target, compiled = flat(x), flat(other), flat(result), loops()
        assert source is not None and second is not None and target is not None and compiled is not None
        arrays = (source, second, target, _in_memory(marks))
        numbers = (*grid_numbers(grid), *codes_from_to(grid))
        in_parts(compiled.add_quantize_marked, arrays, numbers, torch.get_num_threads())
        if in_place:
            ctx.mark_dirty(x)
        ctx.save_for_backward(marks)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        found = _where_marked(grad, ctx.saved_tensors[0])
        return found, found, None, None


def _in_memory(marks: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor in memory order."""
    dense = marks if marks.is_contiguous() else marks.permute(0, 2, 3, 1)
    found: NDArray[np.uint8] = dense.reshape(-1).numpy()
    return found


def _where_marked(grad: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    if grad.is_sparse:
        return _sparse(grad, marks.bool())
    compiled, source = loops(), flat(grad)
    twice = torch.is_grad_enabled() and grad.requires_grad  # a gradient of the gradient is asked for
    if compiled is None or source is None or twice or grad.stride() != marks.stride():
        return grad.masked_fill(marks == 0, 0.0)
    result = torch.empty_like(grad)
    target = flat(result)
    assert target is not None
    arrays = (source, _in_memory(marks), target)
    in_parts(compiled.pass_gradient, arrays, (), torch.get_num_threads())
    return result


def passed(grad: torch.Tensor, x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The straight-through gradient: ``grad`` where ``x`` rounds to a code of the grid unclipped, else zero."""
    if isinstance(grid.lo, torch.Tensor):  # zero points that differ between channels
        code = x.reshape(grid.view or x.shape).div(grid.scale)
        inside = (code >= grid.lo - 0.5) & (code <= grid.hi + 0.5)
        return grad * inside.reshape(grad.shape)
    lo, hi = grid.lo - 0.5, grid.hi + 0.5  # what rounds to a code of the grid
    if isinstance(grid.scale, float):
        return _between(grad, x, lo * grid.scale, hi * grid.scale)
    code = x.reshape(grid.view or x.shape).div(grid.scale)
    return _between(grad.reshape(code.shape), code, lo, hi).reshape(grad.shape)


def pass_on(grad: torch.Tensor, x: torch.Tensor, ratio: torch.Tensor, grid: Grid, out: torch.Tensor) -> None:
    """Write :func:`passed` to ``out``; ``ratio`` is ``x / scale``, and all are of the shape that the grid is for."""
    if isinstance(grid.lo, torch.Tensor):
        torch.mul(grad, (ratio >= grid.lo - 0.5) & (ratio <= grid.hi + 0.5), out=out)
        return
    value, unit = (x, grid.scale) if isinstance(grid.scale, float) else (ratio, 1.0)
    ends = ((grid.lo - 0.5) * unit, (grid.hi + 0.5) * unit)
    torch.ops.aten.hardtanh_backward.grad_input(grad, value, *ends, grad_input=out)


def _between(grad: torch.Tensor, x: torch.Tensor, lo: float, hi: float) -> torch.Tensor:
    """``grad`` where ``x`` lies between ``lo`` and ``hi``, else zero."""
    # the strides of the kernel's result are not those that a compiler expects
    if torch.compiler.is_dynamo_compiling():
        return torch.where((x <= lo) | (x >= hi), 0.0, grad)
    return torch.ops.aten.hardtanh_backward(grad, x, lo, hi)


def _functional(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Quantize-dequantize without buffers, for ``torch.compile``, which plans memory itself."""
    codes = (x if grid.view is None else x.reshape(grid.view)).div(grid.scale).round().clamp(grid.lo, grid.hi)
    if isinstance(grid.scale, float):
        out = torch.add(grid.zero, codes, alpha=grid.scale)
    else:
        out = codes.mul(grid.scale).add(grid.zero)
    return out if grid.view is None else out.reshape(x.shape)


class _StraightThrough(torch.autograd.Function):
    """Identity gradient inside the range, zero outside (Bengio et al. 2013, arXiv:1308.3432).

    The input is kept rather than a mask: a parameter lives anyway and so does what ReLU returned, while a comparison
    to booleans costs as much as the four passes together (1.7 of 1.8 ms on 3.2 M floats), and the product with it more.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.grid = grid
        return on_grid(x, grid)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if grad.is_sparse:
            ones = torch.ones(grad.shape, dtype=grad.dtype, device=grad.device)
            return _sparse(grad, _StraightThrough.backward(ctx, ones)[0]), None
        (x,) = ctx.saved_tensors
        return passed(grad, x, ctx.grid), None


class _Within(torch.autograd.Function):
    """Straight-through for values that never leave the range: nothing is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        return on_grid(x, grid)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def round_within(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """``x``, float32 and within the grid's range, rounded to the grid; the gradient passes unchanged."""
    out: torch.Tensor = _Within.apply(x, grid)
    return out


class _StraightThroughAny(torch.autograd.Function):
    """Straight-through for formats without a fast path; the gradient is zero beyond the largest value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, encoding: Encoding) -> torch.Tensor:
        out = _slow(x, encoding)
        lo, hi = (
            torch.from_numpy(np.array(encoding.granularity.spread(v, tuple(x.shape)), np.float32)).to(x.device)
            for v in (encoding.min, encoding.max)
        )
        viewed = x.reshape(encoding.granularity.view_shape(tuple(x.shape)))
        ctx.save_for_backward(((viewed >= lo) & (viewed <= hi)).reshape(x.shape))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (inside,) = ctx.saved_tensors
        return _sparse(grad, inside) if grad.is_sparse else grad * inside, None


def _sparse(grad: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """``grad * inside`` for the sparse gradient of an embedding, which has only the gathered rows."""
    grad = grad.coalesce()
    rows = grad.indices()
    values = grad.values() * inside[tuple(rows)]
    return torch.sparse_coo_tensor(rows, values, grad.shape, is_coalesced=True, check_invariants=False)


def _slow(x: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    if isinstance(encoding.format, FloatFormat) and not encoding.format.scaled:
        dtype = getattr(torch, encoding.format.name)
        return x.clamp(-encoding.format.max, encoding.format.max).to(dtype).to(x.dtype)
    found = _by_own_range(x, encoding) if encoding.dynamic else None
    return affine.fake_quantize(x, encoding) if found is None else found


def _by_own_range(x: torch.Tensor, encoding: Encoding) -> torch.Tensor | None:
    """Quantize with one range chosen at run time, in one call; ``None`` where no compiled loop applies."""
    fmt = encoding.format
    if not isinstance(fmt, IntFormat) or fmt.signed or encoding.scale_format.number is not None:
        return None
    if encoding.granularity != PER_TENSOR or torch.compiler.is_dynamo_compiling():
        return None
    ready = is_plain(x) and on_host(x.device) and x.dtype == torch.float32 and x.numel() > 0
    source, compiled = (flat(x), loops()) if ready else (None, None)
    if source is None or compiled is None:
        return None
    out, target = _room(x, source, None)
    compiled.quantize_by_own_range(source, target, np.float32(fmt.qmax), np.float32(affine.SMALLEST_REACH))
    return out


def for_steps(like: torch.Tensor, encoding: Encoding) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """:func:`fake_quantize` for the tensors of many steps, which are like ``like`` and choose their ranges at run time.

    What it depends on is looked up once. ``None`` where a gradient is needed or no compiled loop applies.
    """
    if torch.is_grad_enabled() or not encoding.dynamic or _by_own_range(like, encoding) is None:
        return None
    compiled = loops()
    assert compiled is not None and isinstance(encoding.format, IntFormat)
    numbers = np.float32(encoding.format.qmax), np.float32(affine.SMALLEST_REACH)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        compiled.quantize_by_own_range(x.detach().numpy().reshape(-1), out.numpy().reshape(-1), *numbers)
        return out

    return run


def _without_fast_path(x: torch.Tensor, encoding: Encoding, grid: Grid | None, needs_grad: bool) -> torch.Tensor:
    if grid is not None:
        return _traced(x, grid)
    return _StraightThroughAny.apply(x, encoding) if needs_grad else _slow(x, encoding)


def _in_float64(x: torch.Tensor, grid: Grid, needs_grad: bool) -> torch.Tensor:
    """Compute as the reference, which divides float64 by the float32 scale in float64."""
    grid = double(grid)
    return _StraightThrough.apply(x, grid) if needs_grad else on_grid(x, grid)


def fake_quantize(x: torch.Tensor, encoding: Encoding, grid: Grid | None, *, overwrite: bool = False) -> torch.Tensor:
    """``x`` rounded to the grid.

    Args:
        x: floating-point tensor of any shape; half precision is computed in float32.
        encoding: the grid.
        grid: ``make_grid(encoding, x.shape, x.device)`` where :func:`is_fast`, else ``None``.
        overwrite: the caller owns ``x`` and nothing else reads it, so its memory may hold the result.

    Returns:
        Same shape and dtype as ``x``; differentiable by straight-through when ``x`` requires a gradient.
    """
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    if grid is None or not is_plain(x):
        return _without_fast_path(x, encoding, grid, needs_grad)
    single = x.dtype == torch.float32
    if single and needs_grad:
        kept = x.is_leaf or torch.compiler.is_dynamo_compiling()  # a parameter need not be marked
        marked = None if kept else clamp_on_grid(x, grid, EVERYWHERE, in_place=False)
        return _StraightThrough.apply(x, grid) if marked is None else marked
    if single and overwrite and grid.view is None and not torch.compiler.is_dynamo_compiling():
        return _passes(x, grid)
    if single:
        return on_grid(x, grid)
    if x.dtype == torch.float64:
        return _in_float64(x, grid, needs_grad)
    return fake_quantize(x.float(), encoding, grid, overwrite=not needs_grad).to(x.dtype)


def is_plain(x: torch.Tensor) -> bool:
    """Whether ``x`` holds values, unlike the fake tensor of an exporter or compiler."""
    return type(x) is torch.Tensor or type(x) is torch.nn.Parameter


def _traced(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The passes without buffers, for graphs that are traced rather than run."""
    wide = x if x.dtype == torch.float64 else x.float()
    codes = (wide if grid.view is None else wide.reshape(grid.view)).div(grid.scale).round().clamp(grid.lo, grid.hi)
    return (codes * grid.scale + 0.0).reshape(x.shape).to(x.dtype)


def double(grid: Grid) -> Grid:
    """The same grid for float64 tensors."""

    def wide(value: Scalar) -> Scalar:
        return value.double() if isinstance(value, torch.Tensor) else value

    return Grid(wide(grid.scale), wide(grid.lo), wide(grid.hi), grid.zero.double(), grid.view)
