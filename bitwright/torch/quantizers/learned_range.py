"""Learned ranges: the scale and the zero point of a grid as parameters of an optimizer.

A range is learned as its distance from the calibrated one, in two numbers per scale that start at zero:

- ``log_scale``: ``scale = calibrated scale * exp(log_scale)``. The scale is positive whatever a step does, equal to the
  calibrated one bit for bit at the start, and weight decay pulls it back there instead of to zero;
- ``offset`` (asymmetric grids): ``zero_point = round(calibrated zero point - steps * offset)``, the way of the lower end in
  widths of the range.

The forward pass is that of a fixed range with the same encoding, bit for bit: the float32 scale and the integer zero point
that files hold are computed from the parameters first, and values are rounded with those.

The gradients are those of learned step sizes (LSQ, Esser et al. 2020, arXiv:1902.08153, eqs. 3 and 4, and for offsets LSQ+,
Bhalgat et al. 2020, arXiv:2004.09576, eq. 4), divided by the scale (by the width of the range for offsets). With that a step
of SGD moves the scale to first order as the same step does in the papers, and one of Adam moves every range by about its
learning rate in relative terms, however small the scale is. The true derivative by ``log_scale`` would be multiplied by the
scale, and lose the balance with the weights' gradients that the papers' factor ``1 / sqrt(N * Qp)`` is made for. Where the
scale is small against the gradient, as on small batches, one step of SGD would move it by orders of magnitude: in a simulation
the gradients of the parameters are at most 10 (:data:`STEEPEST`), which the papers do not have.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT32_SCALE, IntFormat
from bitwright.core.numerics.granularity import Granularity, PerBlock
from bitwright.core.numerics.statistics import rows_of
from bitwright.errors import ModelError
from bitwright.torch.quantizers.fake_quantize import (
    EVERYWHERE,
    Grid,
    clamp_on_grid,
    double,
    is_fast,
    is_plain,
    learned_gradients,
    on_grid,
    on_host,
    pass_on,
    serves,
)
from bitwright.torch.quantizers.functional import round_ste

_TINY, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
#: largest ``|log_scale|``: a range a million times wider or narrower than calibration found it holds nothing of the tensor
FARTHEST = math.log(2.0**20)
#: largest gradient of a distance in training: a step of SGD moves a scale by at most ten times its rate, in relative terms
STEEPEST = 10.0


def unlearnable(encoding: Encoding) -> str | None:
    """The reason why this range cannot be learned; ``None`` where it can."""
    if encoding.dynamic:
        return "every run chooses it of the tensor that passes"
    if encoding.shift is not None:
        return "its zero points are real numbers: methods that round weights move them, training does not"
    if not is_fast(encoding):
        return f"{encoding.format.name} is not an integer grid of up to 16 bits"
    if encoding.scale_format != FLOAT32_SCALE:
        return f"its scales are stored as {encoding.scale_format.name}, in steps too coarse to train"
    return None


def _call_with(parameter: weakref.ref[torch.Tensor], hook: Callable[[torch.Tensor], None], _: torch.Tensor) -> None:
    present = parameter()  # a hook that holds its own tensor would keep it
    if present is not None:
        hook(present)


def within_bounds(grad: torch.Tensor) -> torch.Tensor:
    """``grad``, clipped to :data:`STEEPEST`; non-finite values stay, so that checks find them."""
    return torch.where(grad.isinf(), grad, grad.clamp(-STEEPEST, STEEPEST))


class LearnedRange:
    """The trained range of one quantizer.

    Args:
        site: name, for messages.
        base: the calibrated encoding, which the parameters are distances from.
        offset: learn the zero point too.

    Attributes:
        log_scale: float32 parameter of the scale's shape.
        offset: float32 parameter of the same shape, or ``None``.
    """

    def __init__(self, site: str, base: Encoding, *, offset: bool) -> None:
        self.site = site
        self.base = base
        self.log_scale = nn.Parameter(torch.zeros(base.scale.shape))
        self.offset = nn.Parameter(torch.zeros(base.scale.shape)) if offset else None
        self._memory: tuple[list[int], list[np.ndarray[Any, Any]]] = ([], [])
        self._known: tuple[bytes, Encoding] = (self._content(), base)
        self._hooked = False

    #: whether gradients are kept within :data:`STEEPEST`
    bounded = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": ([], []), "_hooked": False}

    def call_with_gradients(
        self, before: Callable[[torch.Tensor], None], after: Callable[[torch.Tensor], None]
    ) -> None:
        """Register hooks that get each parameter in which a gradient accumulates; copies of the range have none."""
        if not self._hooked:
            self._hooked = True
            for parameter in self.parameters().values():
                if self.bounded:
                    parameter.register_hook(within_bounds)
                parameter.register_hook(partial(_call_with, weakref.ref(parameter), before))
                parameter.register_post_accumulate_grad_hook(after)

    @property
    def base(self) -> Encoding:
        """The encoding that the parameters are relative to."""
        return self._base

    @base.setter
    def base(self, encoding: Encoding) -> None:
        self._base = encoding
        # as tensors too: a compiler does not read arrays
        scale, zero_point = (np.array(values, np.float64) for values in (encoding.scale, encoding.zero_point))
        self._given = torch.from_numpy(scale), torch.from_numpy(zero_point)
        self._given_there: tuple[torch.device, tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def with_offset(self) -> bool:
        """Whether the zero point is learned too."""
        return self.offset is not None

    def parameters(self) -> dict[str, nn.Parameter]:
        """``log_scale`` and, where there is one, ``offset``."""
        found = {"log_scale": self.log_scale}
        return found if self.offset is None else {**found, "offset": self.offset}

    # -- the encoding that follows

    @property
    def encoding(self) -> Encoding:
        """The grid of the present parameters; the same object until they change.

        Raises:
            ModelError: a parameter is not finite, or the scale is far out of proportion.
        """
        content = self._content()
        known = self._known  # read once: other threads exchange it
        if known[0] != content:
            self._known = known = content, self._encode()
        return known[1]

    def _content(self) -> bytes:
        # compared by value: writes through `.data`, as an average of weights does them, leave no other trace
        return b"".join([values.tobytes() for values in self._read()])

    def values(self) -> list[np.ndarray[Any, Any]]:
        """``log_scale`` and, where there is one, ``offset`` as arrays."""
        return self._read()

    def _read(self) -> list[np.ndarray[Any, Any]]:
        """The parameters as arrays, read outside of active function modes and tracers."""
        with torch._C.DisableTorchFunction():
            found = list(self.parameters().values())
            if any(not on_host(p.device) for p in found):
                with _disable_current_modes():  # of an exporter, whose copies would hold no values
                    return [p.detach().cpu().numpy() for p in found]
            places = [p.data_ptr() for p in found]
            if self._memory[0] != places:
                self._memory = places, [p.detach().numpy() for p in found]
        return self._memory[1]

    def _encode(self) -> Encoding:
        if self.is_remote:  # what training there rounds with
            self._check(*(values.astype(np.float64) for values in self.values()))
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                scales, zero_points = (found.cpu().numpy() for found in self._present())
            return Encoding(self.base.format, scales, zero_points.astype(np.int64), self.base.granularity)
        log_scale, *rest = (values.astype(np.float64) for values in self.values())
        offset = rest[0] if rest else None
        self._check(log_scale, offset)
        fmt, base = self.base.format, self.base
        assert isinstance(fmt, IntFormat)
        zero_point = base.zero_point.astype(np.float64)
        if offset is not None:
            zero_point = np.clip(np.rint(zero_point - fmt.steps * offset), fmt.qmin, fmt.qmax)
        reach = np.maximum(np.maximum(fmt.qmax - zero_point, zero_point - fmt.qmin), 1.0)
        limit = (_LARGEST / reach).astype(np.float32)
        limit = np.where(limit * reach > _LARGEST, np.nextafter(limit, np.float32(0)), limit)
        scale = np.clip(base.scale.astype(np.float64) * np.exp(log_scale), _TINY, limit).astype(np.float32)
        return Encoding(fmt, scale, zero_point.astype(np.int64), base.granularity)

    def _check(self, log_scale: np.ndarray[Any, Any], offset: np.ndarray[Any, Any] | None = None) -> None:
        """Refuse parameters that have left the valid ranges."""
        finite = np.isfinite(log_scale).all() and (offset is None or np.isfinite(offset).all())
        if not finite:
            raise ModelError(
                self.site,
                "a parameter of its learned range is NaN or infinite",
                "take steps with TrainingGuard, which leaves out gradients that are not finite, and load the last "
                "checkpoint",
            )
        worst = float(np.abs(log_scale).max(initial=0.0))
        if worst > FARTHEST:
            grown = bool((log_scale > FARTHEST).any())
            raise ModelError(
                self.site,
                f"its learned scale is e^{worst:.1f} times {'larger' if grown else 'smaller'} than calibration found it: "
                "training moved the range off the tensor",
                "load the last checkpoint and lower the learning rate of sim.range_parameters()",
            )

    def accepts(self, encoding: Encoding) -> bool:
        """Whether the parameters fit ``encoding``."""
        same = encoding.format == self.base.format and encoding.granularity == self.base.granularity
        return same and encoding.scale.shape == self.base.scale.shape and unlearnable(encoding) is None

    def rebase(self, encoding: Encoding) -> None:
        """Continue from ``encoding``: the parameters stay the same objects, reset to zero."""
        self.base = encoding
        with torch.no_grad():
            for parameter in self.parameters().values():
                parameter.zero_()
        self._known = (self._content(), encoding)

    # -- on another device, without reading anything on the host

    @property
    def is_remote(self) -> bool:
        """Whether reading the parameters would wait for their device."""
        return not on_host(self.device)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(iter(self.parameters().values())).device

    def _present(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point, float32, on the device of the parameters."""
        return _scale_and_zero(self._there(), self.log_scale, self.offset, self.base)

    def _there(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point of :attr:`base`, float64, on the device of the parameters."""
        device, known = self.device, self._given_there
        if known is not None and known[0] == device:
            return known[1]
        found = self._given[0].to(device), self._given[1].to(device)
        if not torch.compiler.is_dynamo_compiling() and is_plain(found[0]):  # nor what is made of stand-ins
            self._given_there = device, found
        return found

    def present_scale(self) -> torch.Tensor:
        """The scale that :attr:`encoding` has, on the device of the parameters."""
        return self._present()[0]

    def present_grid(self, shape: tuple[int, ...]) -> Grid:
        """The grid of :attr:`encoding` for tensors of ``shape`` on the device of the parameters."""
        fmt, granularity, zeros = self.base.format, self.base.granularity, self.base.zero_point
        assert isinstance(fmt, IntFormat)
        view = granularity.view_shape(shape)
        scale, zero = (granularity.spread(found, shape) if found.ndim else found for found in self._present())
        low: torch.Tensor | float = fmt.qmin - zero
        high: torch.Tensor | float = fmt.qmax - zero
        compiled = torch.compiler.is_dynamo_compiling()  # which does not branch on arrays
        if not (self.with_offset or compiled) and (zeros == zeros.flat[0]).all():
            low, high = float(fmt.qmin - zeros.flat[0]), float(fmt.qmax - zeros.flat[0])
        nothing = torch.zeros((), device=scale.device)
        return Grid(scale, low, high, nothing, None if not scale.ndim or view == shape else view)

    def is_lost(self) -> torch.Tensor:
        """Whether :attr:`encoding` would be an error, as a tensor on the device of the parameters."""
        found = ~(self.log_scale.detach().abs() <= FARTHEST).all()
        return found if self.offset is None else found | ~self.offset.detach().isfinite().all()

    # -- its state

    def state(self) -> tuple[Encoding, dict[str, torch.Tensor]]:
        """The base and copies of the parameters."""
        return self.base, {name: p.detach().clone() for name, p in self.parameters().items()}

    def put(self, state: tuple[Encoding, dict[str, torch.Tensor]]) -> None:
        """Bring back what :meth:`state` gave; the parameters stay the same objects."""
        self.base, values = state
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                parameter.copy_(values[name])
        self._known = (b"", self.base)  # computed anew

    def to(self, device: torch.device | None) -> None:
        """Move the parameters to ``device``, as the same objects; ``None`` leaves them."""
        for parameter in self.parameters().values():
            parameter.data = parameter.data.to(device or parameter.device)

    # -- its work

    def __call__(self, x: torch.Tensor, grid: Grid | None, *, weight: bool) -> torch.Tensor:
        """Quantize ``x``, with gradients for ``x`` and for the parameters.

        Args:
            x: floating-point tensor; half precision is computed in float32.
            grid: of :attr:`encoding`, for the shape and device of ``x``.
            weight: a scale is shared by elements of all of ``x``; else by those of every example of a batch (axis 0).
        """
        assert grid is not None
        if x.dtype == torch.float64:
            grid = double(grid)
        elif x.dtype != torch.float32:
            return self(x.float(), grid, weight=weight).to(x.dtype)
        out: torch.Tensor = _OnLearnedGrid.apply(x, self.log_scale, self.offset, grid, self.scaling(x, weight))
        return out

    def clamped(self, x: torch.Tensor, grid: Grid, ends: tuple[float, float], *, in_place: bool) -> torch.Tensor | None:
        """Quantize ``clamp(x, *ends)``, with the gradient of ``hardtanh``.

        ``None`` where no compiled loop serves, or the zero point is learned too: what the activation clips has no part in it.
        """
        if self.offset is not None or (in_place and (x.is_leaf or x._is_view())):
            return None
        if not serves(x, grid):
            return None
        scaling = self.scaling(x, False)
        out: torch.Tensor = _ClampedOnLearnedGrid.apply(x, self.log_scale, grid, scaling, ends, in_place)
        return out

    def traced(self, x: torch.Tensor, *, weight: bool) -> torch.Tensor:
        """Quantize by plain operations on the parameters, for ``torch.compile``, which must not fix their values."""
        granularity, shape = self.base.granularity, tuple(x.shape)
        view = granularity.view_shape(shape)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        scaling, fmt = self.scaling(x, weight), self.base.format
        assert isinstance(fmt, IntFormat)
        given = self._given[0].to(x.device), self._given[1].to(x.device)
        scale, zero = _scale_and_zero(given, self.log_scale, self.offset, self.base)
        by_log_scale, by_offset = scaling.slopes(scale.double())
        if self.offset is not None:
            zero = _with_gradient(zero, -by_offset / scale.double(), self.offset)
        scale = _with_gradient(scale, by_log_scale, self.log_scale)
        scale, zero = granularity.spread(scale, shape).to(wide), granularity.spread(zero, shape).to(wide)
        codes = round_ste(x.to(wide).reshape(view) / scale)
        codes = codes.clamp(
            fmt.qmin - zero, fmt.qmax - zero
        )  # not minimum and maximum, which halve gradients at the ends
        return (codes * scale + 0.0).reshape(shape).to(x.dtype)

    def scaling(self, x: torch.Tensor, weight: bool) -> Scaling:
        """Factors of the parameters' gradients, for tensors of the shape of ``x``."""
        fmt, params = self.base.format, self.base.scale
        assert isinstance(fmt, IntFormat)
        examples = 1 if weight or not x.ndim else max(1, x.shape[0])
        shared = max(1.0, x.numel() / examples / max(1, params.size))
        positive = fmt.qmax if fmt.signed and self.offset is None else fmt.steps
        granularity, shape = self.base.granularity, tuple(x.shape)
        blocks = granularity if isinstance(granularity, PerBlock) and granularity.padding(shape) else None
        return Scaling(1.0 / math.sqrt(shared * positive), fmt.steps, params.shape, blocks)


class RangeEnds(LearnedRange):
    """The ends of a range as parameters, ``min`` and ``max``: there before calibration, they follow every encoding.

    Arithmetic and forward pass are those of :class:`LearnedRange`: its two distances are computed from the ends, and are zero
    where an end is what the encoding gave it. The gradients are the derivatives of the result by the ends, rounding passed
    straight through: a value that is clipped has the derivative 1 by the end that it is clipped to.

    Args:
        site: name, for messages.
        shape_of: the shape of the ends for a granularity.
        granularity: what is asked for before calibration.
        device: of the ends.

    Attributes:
        min, max: float32 parameters; -1 and 1 until there is an encoding.
    """

    bounded = False

    def __init__(
        self,
        site: str,
        shape_of: Callable[[Granularity], tuple[int, ...]],
        granularity: Granularity,
        device: torch.device | None,
    ) -> None:
        self.site, self._shape_of, self._shifts = site, shape_of, False
        shape = shape_of(granularity)
        self.min = nn.Parameter(-torch.ones(shape, device=device))
        self.max = nn.Parameter(torch.ones(shape, device=device))
        self._memory = ([], [])
        self._known: Any = (b"", None)
        self._hooked = False

    def parameters(self) -> dict[str, nn.Parameter]:
        """``min`` and ``max``."""
        return {"min": self.min, "max": self.max}

    def follow(self, encoding: Encoding, *, offset: bool) -> bool:
        """Take the ends of ``encoding``; whether they train, with the zero point if ``offset``."""
        self._shifts = offset
        self.rebase(encoding)
        if unlearnable(encoding) is None:
            return True
        for parameter in self.parameters().values():
            parameter.requires_grad_(False)
        return False

    def accepts(self, encoding: Encoding) -> bool:
        """Whether the ends train on ``encoding``."""
        return unlearnable(encoding) is None

    def rebase(self, encoding: Encoding) -> None:
        """Continue from ``encoding``; the parameters stay the same objects."""
        self.base = encoding
        self.show(encoding.min, encoding.max)

    def show(self, lo: Any, hi: Any) -> None:
        """Set the parameters to the ends that gave :attr:`base`, which may lie between its codes."""
        shape = self._shape_of(self.base.granularity)
        for parameter, values in ((self.min, lo), (self.max, hi)):
            given = torch.from_numpy(np.asarray(values, np.float32).reshape(shape).copy())
            if parameter.shape == given.shape:
                with torch.no_grad():
                    parameter.copy_(given)
            else:
                parameter.data = given.to(parameter)
        self._written = tuple(p.detach().cpu().float().clone() for p in self.parameters().values())
        self._known = (self._content(), self.base)

    def put(self, state: tuple[Encoding, dict[str, torch.Tensor]]) -> None:
        """Bring back what :meth:`state` gave; the parameters stay the same objects."""
        base, values = state
        self.rebase(base)
        for name, parameter in self.parameters().items():
            parameter.data.copy_(values[name])

    def values(self) -> list[np.ndarray[Any, Any]]:
        """The distances from :attr:`base`, float64."""
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            found = self._distances(torch.device("cpu"))
            return [values.numpy() for values in found if values is not None]

    @property
    def log_scale(self) -> torch.Tensor:  # type: ignore[override]
        """The logarithm of the scale over that of :attr:`base`, a function of the ends."""
        return self._distances(self.device)[0]

    @property
    def offset(self) -> torch.Tensor | None:  # type: ignore[override]
        """The shift of the lower end in widths of the range, a function of the ends."""
        return self._distances(self.device)[1]

    @property
    def with_offset(self) -> bool:
        """Whether the zero point is learned too."""
        return self._shifts

    def _distances(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        fmt, shape = self.base.format, self.base.scale.shape
        assert isinstance(fmt, IntFormat)
        lo, hi = (end.to(device).double().reshape(shape) for end in (self.min, self.max))
        scale, zero_point = (given.to(device) for given in self._given)
        with torch.no_grad():  # what nobody moved has the encoding that it was calibrated to, bit for bit
            there = [end.to(device).to(self.min.dtype).double().reshape(shape) for end in self._written]
            same = (lo == there[0]) & (hi == there[1])
        step = ((hi - lo) / fmt.steps).clamp_min(_TINY)
        log_scale = _zero_where(same, (step / scale).log())
        if not self._shifts:
            return log_scale, None
        return log_scale, _zero_where(same, (zero_point - fmt.qmin + lo / step) / fmt.steps)

    def scaling(self, x: torch.Tensor, weight: bool) -> Scaling:
        """Factors of the gradients: only those that convert to the ends of the range."""
        return replace(super().scaling(x, weight), by_ends=True)


def _zero_where(same: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``values`` with zeros where ``same``; the gradient passes everywhere."""
    return values - values.detach() + values.detach().masked_fill(same, 0.0)


def _scale_and_zero(
    given: tuple[torch.Tensor, torch.Tensor], log_scale: torch.Tensor, offset: torch.Tensor | None, base: Encoding
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The float32 arithmetic of ``LearnedRange.encoding`` on tensors, from ``base``, ``given`` in float64."""
    fmt = base.format
    assert isinstance(fmt, IntFormat)
    scale, zero = ((given[0] * log_scale.detach().double().exp()).clamp(_TINY, _LARGEST / (fmt.steps + 1)), given[1])
    if offset is not None:
        zero = (zero - fmt.steps * offset.detach().double()).round().clamp(fmt.qmin, fmt.qmax)
    return scale.float(), zero.float()


@dataclass(frozen=True)
class Scaling:
    """Constants of a range's gradients: LSQ's factor, steps of the grid, shape of the parameters.

    ``blocks`` is the granularity where the last block lacks elements, so that a scale stands for each index of an axis.
    ``by_ends``: the parameters of the optimizer are the ends of the range (:class:`RangeEnds`), without LSQ's factor.
    """

    factor: float
    steps: int
    shape: tuple[int, ...]
    blocks: PerBlock | None = None
    by_ends: bool = False

    def to_parameters(self, found: torch.Tensor) -> torch.Tensor:
        """Reduce gradients that broadcast against the tensor to the shape of the parameters."""
        if self.blocks is not None and self.blocks.axis is not None:
            axis = self.blocks.axis % found.ndim
            every = tuple(i for i in range(found.ndim) if i != axis)
            found = rows_of(found, PerBlock(self.blocks.size, axis, every)).sum(1)
        return found.reshape(self.shape).float()

    def slopes(self, scale: Any) -> tuple[Any, Any]:
        """Chain rule factors of the derivatives by scale and lower end, for ``log_scale`` and ``offset``."""
        if self.by_ends:  # the true derivatives, which those by the ends follow from
            return scale, scale * self.steps
        return self.factor / scale, self.factor / scale / self.steps


def _with_gradient(value: torch.Tensor, slope: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``value``, with ``slope`` as its derivative by ``parameter``.

    In float64: of the scale of values near nothing the square is zero in float32.
    """
    line = slope.detach().double() * parameter.double()
    return value.detach() + (line - line.detach()).to(value.dtype)


class _OnLearnedGrid(torch.autograd.Function):
    """Quantizes on a learned grid; saves only the input for the backward pass, which computes the codes again.

    The result is not kept: models write into it in place (``out += identity``).
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, log_scale: torch.Tensor, offset: torch.Tensor | None, grid: Grid, scaling: Scaling
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(x)
        ctx.grid, ctx.scaling, ctx.has_offset, ctx.home = grid, scaling, offset is not None, log_scale.device
        return on_grid(x, grid)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), grid, scaling = ctx.saved_tensors, ctx.grid, ctx.scaling
        dense = grad.to_dense() if grad.is_sparse else grad
        inner, step, clipped = range_gradients(dense, x, grid, scaling, offset=ctx.has_offset)
        by_log_scale, by_offset = scaling.slopes(grid.scale)
        to_scale = scaling.to_parameters(by_log_scale * step).to(ctx.home)
        to_offset = None if clipped is None else scaling.to_parameters(by_offset * clipped).to(ctx.home)
        if grad.is_sparse:
            inner = inner.sparse_mask(grad.coalesce())
        return inner if ctx.needs_input_grad[0] else None, to_scale, to_offset, None, None


class _ClampedOnLearnedGrid(torch.autograd.Function):
    """An activation and its learned grid; saves the activation's input instead of its result."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, log_scale: torch.Tensor, grid: Grid, scaling: Scaling, ends: tuple[float, float],
        in_place: bool,
    ) -> torch.Tensor:  # fmt: skip
        kept = x.clone() if in_place else x
        ctx.save_for_backward(kept)
        ctx.grid, ctx.scaling, ctx.ends = grid, scaling, ends
        result = clamp_on_grid(x, grid, ends, in_place=in_place)
        assert result is not None  # `serves` was asked before
        if in_place:
            ctx.mark_dirty(x)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), grid, scaling = ctx.saved_tensors, ctx.grid, ctx.scaling
        found = learned_gradients(grad, x, grid, ctx.ends)
        if found is not None:
            inner, step, _ = found
        else:
            low, high = ctx.ends
            inner, step, _ = range_gradients(grad, x.clamp(low, high), grid, scaling, offset=False)
            inner = torch.ops.aten.hardtanh_backward(inner, x, low, high)
        to_scale = (scaling.slopes(grid.scale)[0] * step).reshape(scaling.shape).float()
        return inner, to_scale, None, None, None, None


def check_ranges(ranges: Sequence[LearnedRange]) -> None:
    """Check the parameters of all ``ranges``, with one read per device.

    Raises:
        ModelError: one is not finite or far off its tensor; it is named.
    """
    there: dict[torch.device, list[LearnedRange]] = {}
    for learned in ranges:
        if learned.is_remote:
            there.setdefault(learned.log_scale.device, []).append(learned)
        else:
            learned.encoding  # noqa: B018, checks the parameters
    for group in there.values():
        lost = torch.stack([learned.is_lost() for learned in group])
        for learned, found in zip(group, lost.tolist(), strict=True):
            if found:
                learned.encoding  # noqa: B018


def learned_side_by_side(
    ranges: Sequence[LearnedRange], encodings: Sequence[Encoding], like: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """One function of tensors side by side, ``[B, len(encodings) * H]``, each with its own learned range.

    Args:
        ranges: of those that are learned, with one scale each.
        encodings: of all, in their order.
        like: ``[B, H]``, float32.

    Returns:
        ``None`` where some are not learned, or are learned on another grid.
    """
    first, count = ranges[0], len(encodings)
    fmt = first.base.format
    alike = all(type(r) is type(first) and r.with_offset == first.with_offset and r.base.format == fmt for r in ranges)
    if len(ranges) != count or not alike:
        return None
    assert isinstance(fmt, IntFormat)

    def column(values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor([float(v) for v in values], device=like.device).reshape(count, 1)

    lo, hi = ([end - int(e.zero_point) for e in encodings] for end in (fmt.qmin, fmt.qmax))
    low, high = (float(lo[0]), float(hi[0])) if len(set(lo)) == 1 else (column(lo), column(hi))
    zero = torch.zeros((), device=like.device)
    grid = Grid(column([e.scale for e in encodings]), low, high, zero, (-1, count, like.shape[-1]))
    log_scale = torch.stack([r.log_scale for r in ranges])
    offset = torch.stack([r.offset for r in ranges if r.offset is not None]) if first.with_offset else None
    scaling = replace(first.scaling(like, False), shape=tuple(log_scale.shape))

    def run(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _OnLearnedGrid.apply(x, log_scale, offset, grid, scaling)
        return out

    return run


def range_gradients(
    grad: torch.Tensor, x: torch.Tensor, grid: Grid, scaling: Scaling, *, offset: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients by the input, by the scale and by the lower end of the range.

    Inside the range the derivative of ``s * round(x / s)`` by ``s`` is ``round(x / s) - x / s``, outside it is the code
    at the end; the derivative by the lower end is 1 outside and 0 inside.

    Args:
        grad: of the result.
        x: what was quantized, of the dtype of ``grad``.
        grid, scaling: of the range.
        offset: compute the third.

    Returns:
        Of the shape of ``x``, and two of the shape that the scale broadcasts with.
    """
    found = learned_gradients(grad, x, grid, EVERYWHERE)
    if found is None:
        return _gradients_in_passes(grad, x, grid, scaling, offset)
    inner, step, left = found
    return inner, step, left if offset else None


def _gradients_in_passes(
    grad: torch.Tensor, x: torch.Tensor, grid: Grid, scaling: Scaling, offset: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """:func:`range_gradients` by operations of torch, each a pass over memory."""
    shape, axes = grid.view or tuple(x.shape), _shared_axes(grid, grid.view or x.shape)
    order: list[int] | None = None
    if axes is None and grad.stride() == x.stride() and not grad.is_contiguous():
        order = sorted(range(x.ndim), key=x.stride, reverse=True)  # channels last: elements in memory order
        flat_grad, flat = grad.permute(order).reshape(-1), x.permute(order).reshape(-1)
    else:
        wanted = (-1,) if axes is None else shape
        flat_grad, flat = grad.reshape(wanted), x.reshape(wanted)
    inner = torch.empty_like(flat_grad, memory_format=torch.contiguous_format)
    ratio = torch.div(flat, grid.scale)
    pass_on(flat_grad, flat, ratio, grid, inner)
    outside = _sums(flat_grad, axes) - _sums(inner, axes) if offset else None
    step = _for_scale(flat_grad, inner, ratio, grid, scaling, axes)
    if order is not None:
        back = [order.index(axis) for axis in range(x.ndim)]
        inner = inner.reshape([x.shape[axis] for axis in order]).permute(back)
    return inner.reshape(x.shape), step, outside


def _for_scale(
    grad: torch.Tensor, inner: torch.Tensor, ratio: torch.Tensor, grid: Grid, scaling: Scaling, axes: list[int] | None
) -> torch.Tensor:
    """The sum for the scale; ``ratio`` is overwritten."""
    if scaling.steps <= 0xFF:
        # two sums whose difference is taken: with more codes it would be lost in rounding
        passed_on = _products(inner, ratio, axes)
        return _products(grad, ratio.round_().clamp_(grid.lo, grid.hi), axes) - passed_on
    codes = ratio.round().clamp_(grid.lo, grid.hi)
    return _products(grad, codes.sub_(ratio), axes) + _products(grad - inner, ratio, axes)


def _shared_axes(grid: Grid, shape: Sequence[int]) -> list[int] | None:
    """The axes along which elements share a scale; ``None`` for all of them."""
    if not isinstance(grid.scale, torch.Tensor) or not grid.scale.ndim:
        return None
    own = (1,) * (len(shape) - grid.scale.ndim) + tuple(grid.scale.shape)
    return [axis for axis, size in enumerate(own) if size == 1]


def _products(a: torch.Tensor, b: torch.Tensor, axes: list[int] | None) -> torch.Tensor:
    if axes is None:
        return torch.dot(a.reshape(-1), b.reshape(-1))
    return (a * b).sum(axes, keepdim=True) if axes else a * b


def _sums(a: torch.Tensor, axes: list[int] | None) -> torch.Tensor:
    if axes is None:
        return a.sum()
    return a.sum(axes, keepdim=True) if axes else a
