"""The quantizer of torch tensors."""

from __future__ import annotations

import ctypes
import logging
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.rotations import random_rotation
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.placement.kv_cache import with_heads
from bitwright.core.placement.plan import Role
from bitwright.core.simulation import quantizer as core
from bitwright.core.simulation.float_model import Undo
from bitwright.torch.quantizers.fake_quantize import (
    Grid,
    columns,
    columns_grid,
    fake_quantize,
    for_steps,
    is_fast,
    is_plain,
    make_grid,
    on_host,
    round_within,
)
from bitwright.torch.quantizers.learned_range import LearnedRange, RangeEnds, learned_side_by_side

_INT32 = IntFormat(32)
logger = logging.getLogger("bitwright")


class Quantizer(core.Quantizer):
    """A :class:`bitwright.core.simulation.quantizer.Quantizer` that can be called on tensors.

    Attributes:
        learned: the parameters its range is trained by, from which :attr:`encoding` follows; ``None`` for a fixed range.
        ends: the parameters that every encoding is shown in, and trained by where it can be; ``None`` where none are.
        pivot: what is done to the gradients of its input (:mod:`bitwright.torch.training.oscillation`); ``None`` for nothing.
        correction: adds to a weight on its grid what trains beside it (:mod:`bitwright.torch.training.low_rank`).
    """

    _ATTRIBUTES = core.Quantizer._ATTRIBUTES | {
        "_columns", "_grids", "_kept", "_rotations", "_scales", "correction", "ends", "learned", "pivot",
    }  # fmt: skip

    def __init__(self, name: str, role: Role, spec: QuantSpec) -> None:
        super().__init__(name, role, spec)
        self._grids: dict[tuple[Any, ...], tuple[Encoding, Grid]] = {}
        self._scales: dict[torch.device, tuple[Encoding, torch.Tensor]] = {}
        self._kept: tuple[torch.Tensor, Encoding, torch.Tensor] | None = None
        self._columns: tuple[Any, tuple[Encoding, ...], tuple[Grid, bool]] | None = None
        self._rotations: dict[tuple[int, torch.device, torch.dtype], torch.Tensor] = {}
        self.learned: LearnedRange | None = None
        self.ends: RangeEnds | None = None
        self.pivot: Callable[[torch.Tensor, Grid], torch.Tensor] | None = None
        self.correction: Callable[[torch.Tensor], torch.Tensor] | None = None

    def learn(self, *, offset: bool) -> LearnedRange:
        """Make the range trainable from the present encoding on; existing parameters stay."""
        if self.learned is None or (self.ends is None and self.learned.with_offset != offset):
            self.learned = LearnedRange(self.name, self.required, offset=offset)
        return self.learned

    def take_over(self, other: Quantizer, encoding: Encoding | None = None) -> None:
        """Replace ``other``, with its learned range, but with ``encoding``."""
        self._spec, self._enabled, self.frozen = other._spec, other._enabled, other.frozen
        self.why_float, self.why_spec, self.statistics = other.why_float, other.why_spec, other.statistics
        self.pivot, self.correction = other.pivot, other.correction
        self.learned = self.ends = None
        self._set_encoding(other._encoding)
        self.range_note, self.poor_range = other.range_note, other.poor_range
        self.learned, self.ends = other.learned, other.ends
        if encoding is not None:
            self.encoding = encoding

    def _current(self) -> Encoding | None:
        return self._encoding if self.learned is None or self._encoding is None else self.learned.encoding

    def _set_encoding(self, encoding: Encoding | None) -> None:
        """Set the encoding. A learned range waits while it is ``None``, and ends when the new one has another kind."""
        super()._set_encoding(encoding)
        self._grids, self._scales, self._kept, self._columns = {}, {}, None, None
        if self.ends is not None:
            follows = encoding is not None and self.ends.follow(encoding, offset=self._spec.symmetry == "asymmetric")
            self.learned = self.ends if follows else None
            return
        if self.learned is None or encoding is None:
            return
        if self.learned.accepts(encoding):
            self.learned.rebase(encoding)
        else:
            self.learned = None
            logger.warning(
                "%s: its new encoding (%s) has another format or shape than the range that was learned, so the range is "
                "fixed again; call sim.learn_ranges() and give sim.range_parameters() to a new optimizer",
                self.name,
                encoding,
            )

    def remember(self) -> Undo:
        """Save the whole state with the learned range; the function returned restores it."""
        learned, restore = self.learned, super().remember()
        state = None if learned is None else learned.state()

        def bring_back() -> None:
            self.learned = None  # what follows sets encodings, none of which is for its parameters
            restore()
            self.learned = learned
            if learned is not None and state is not None:
                learned.put(state)

        return bring_back

    def __call__(self, x: torch.Tensor, overwrite: bool = False) -> torch.Tensor:
        """Quantize ``x``; ``overwrite`` lets the result use the memory of ``x``. Empty tensors need no grid."""
        if self._encoding is None and not x.numel():
            return x
        if self._spec.recent is not None:
            return self._without_recent(x, *self._spec.recent)
        return self._on_grid(x, overwrite)

    def turned(self, x: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """``x`` with its channels multiplied by the rotation of the spec, or by its transpose."""
        axis = self._spec.rotation
        assert axis is not None
        key = x.shape[axis], x.device, x.dtype
        R = self._rotations.get(key)
        if R is None:
            R = torch.tensor(random_rotation(key[0]), dtype=x.dtype, device=x.device)
            if is_plain(x) and not torch.compiler.is_dynamo_compiling():  # what is made of stand-ins must not be kept
                self._rotations[key] = R
        if axis == -1:
            return x @ (R.T if back else R)
        return (R if back else R.T) @ x

    def _without_recent(self, x: torch.Tensor, axis: int, count: int) -> torch.Tensor:
        """Quantize ``x`` except for the last ``count`` indices of ``axis``."""
        older = x.shape[axis] - count
        if older <= 0:
            return x
        return torch.cat([self._on_grid(x.narrow(axis, 0, older), False), x.narrow(axis, older, count)], axis)

    def _on_grid(self, x: torch.Tensor, overwrite: bool) -> torch.Tensor:
        x = self._pivoted(x)
        if self.learned is not None and self._encoding is not None and torch.compiler.is_dynamo_compiling():
            return self.learned.traced(x, weight=self.role == "weight")
        if self._trains_on(x.device):
            return self._trained_there(x)
        encoding = self.required
        if encoding.scale.ndim == 4 and self.role == "input" and x.ndim == 4 and x.shape[1] != encoding.scale.shape[1]:
            encoding = with_heads(encoding, x.shape[1])
        if self.role == "bias" and encoding.format == _INT32:
            return self._bias(x, self._bias_scale(encoding, x.device))
        if self.learned is not None and torch.is_grad_enabled():
            return self.learned(x, self._grid(x, encoding), weight=self.role == "weight")
        return fake_quantize(x, encoding, self._grid(x, encoding), overwrite=overwrite)

    def _trains_on(self, device: torch.device) -> bool:
        """Whether a training forward must use the range on ``device``, since reading it would wait."""
        if on_host(device) or self._encoding is None or not torch.is_grad_enabled():
            return False
        if torch.compiler.is_dynamo_compiling():
            return False  # the graph reads the parameters, and the grids of biases are those of its first run
        return any(learned is not None and learned.device == device for learned in self._sources())

    @property
    def trains_elsewhere(self) -> bool:
        """Whether the scale follows from a learned range on a device where reading it waits."""
        return any(learned is not None and learned.is_remote for learned in self._sources())

    def _sources(self) -> list[LearnedRange | None]:
        """The learned ranges that the scale follows from."""
        if self.derivation is None:
            return [self.learned]
        parts = (self.derivation.source, self.derivation.weight)
        return [part.learned for part in parts if isinstance(part, Quantizer)]

    def _trained_there(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize in training on a device other than the host, with the learned parameters on that device."""
        if self.learned is not None:
            return self.learned(x, self.learned.present_grid(tuple(x.shape)), weight=self.role == "weight")
        assert self.derivation is not None and isinstance(self._encoding, Encoding)
        scales = []
        for part in (self.derivation.source, self.derivation.weight):
            assert isinstance(part, Quantizer)
            scales.append(part._scale_on(x.device))
        return self._bias(x, (scales[0] * scales[1]).reshape(self._encoding.scale.shape))

    def _scale_on(self, device: torch.device) -> torch.Tensor:
        """The float32 scale in effect, on ``device``."""
        if self.learned is not None and self.learned.device == device:
            return self.learned.present_scale()
        return self._bias_scale(self.required, device)

    def _bias_scale(self, encoding: Encoding, device: torch.device) -> torch.Tensor:
        """The scale of a fixed ``encoding``, copied to ``device`` once."""
        known = self._scales.get(device)
        if known is None or known[0] is not encoding:
            scale = torch.from_numpy(np.array(encoding.scale)).to(device)
            if torch.compiler.is_dynamo_compiling() or not is_plain(scale):
                return scale  # what is made of stand-ins must not be kept
            self._scales[device] = known = encoding, scale
        return known[1]

    def for_steps(self, like: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """This quantizer for many tensors like ``like``, where looking up once what it depends on saves time; else ``None``."""
        if self._encoding is None or self._spec.recent is not None or self.role == "bias":
            return None
        return for_steps(like, self.required)

    def plain_grid(self, x: torch.Tensor, *, learned: bool = False) -> Grid | None:
        """The grid, where a call only rounds ``x`` to a grid with one scale; else ``None``.

        With ``learned`` also of a range that trains, whose gradient is then the caller's to compute.
        """
        if self._encoding is None or self.role == "bias" or not is_plain(x) or not on_host(x.device):
            return None
        trains = self.learned is not None and not learned
        if (trains or self.pivot is not None) and torch.is_grad_enabled():
            return None
        grid = self._grid(x, self.required)
        return grid if grid is not None and isinstance(grid.scale, float) else None

    def joined_with(self, x: torch.Tensor, ends: tuple[float, float], *, in_place: bool) -> torch.Tensor | None:
        """Quantize ``clamp(x, *ends)`` on a learned grid in one call; ``None`` where two calls are needed."""
        if self.learned is None or self._encoding is None or self.pivot is not None or not is_plain(x):
            return None
        if not on_host(x.device) or not torch.is_grad_enabled() or not x.requires_grad:
            return None
        grid = self._grid(x, self.required)
        return None if grid is None else self.learned.clamped(x, grid, ends, in_place=in_place)

    def _pivoted(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, with its gradient changed by :attr:`pivot`."""
        if self.pivot is None or not x.requires_grad or not torch.is_grad_enabled():
            return x
        there = torch.compiler.is_dynamo_compiling() or self._trains_on(x.device)  # compiled code reads no numbers
        if there and self.learned is not None and self._encoding is not None:
            return self.pivot(x, self.learned.present_grid(tuple(x.shape)))
        grid = self._grid(x, self.required)
        return x if grid is None or self.role == "bias" else self.pivot(x, grid)

    def _bias(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """``fake_quantize_bias`` of int32 codes in torch, the arithmetic of the artefact; the gradient is the identity."""
        codes = (x.detach().double() / scale.double()).round().clamp(_INT32.qmin, _INT32.qmax)
        out = (codes.float() * scale).to(x.dtype)
        return x + (out - x).detach() if torch.is_grad_enabled() and x.requires_grad else out

    def constant(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize a parameter, with its correction; the last result is cached while ``x`` is unchanged."""
        found = self._constant(x)
        return found if self.correction is None else self.correction(found)

    def hold(self, x: torch.Tensor) -> None:
        """Let a parameter be its own result, which is then no copy of it, if it is on the grid already.

        Args:
            x: does not change any more: a change would go unseen.
        """
        with torch.no_grad():
            found = self(x)
        if self.correction is None and torch.equal(found, x):
            self._kept = x.detach(), self.required, x.detach()

    def _constant(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or not on_host(x.device) or not is_plain(x):
            return self(x)
        if torch.is_grad_enabled() and (x.requires_grad or self.learned is not None):
            self._kept = None  # the next step changes the weight: two copies of it would be held for nothing
            return self(x)
        encoding, kept = self.required, self._kept  # read once: other threads exchange them
        if kept is None or kept[1] is not encoding or not _same(kept[0], x):
            source = x.detach().clone()
            self._kept = kept = (source, encoding, self(source))
        return kept[2]

    def _grid(self, x: torch.Tensor, encoding: Encoding) -> Grid | None:
        if not is_plain(x):  # an exporter's stand-in: what is made for it must not be kept
            return make_grid(encoding, tuple(x.shape), x.device) if is_fast(encoding) else None
        known = self._grids.get((x.shape if encoding.scale.ndim else None, x.device))
        if known is not None and known[0] is encoding:  # another thread may just have exchanged the encoding
            return known[1]
        if not is_fast(encoding):
            return None
        if torch.compiler.is_dynamo_compiling():  # what is made of stand-ins must not be kept
            return make_grid(encoding, tuple(x.shape), x.device)
        return self._new_grid(tuple(x.shape), x.device, encoding)

    def _new_grid(self, shape: tuple[int, ...], device: torch.device, encoding: Encoding) -> Grid:
        if len(self._grids) > 16:  # per-channel activations of ever new shapes
            self._grids.clear()
        grid = make_grid(encoding, shape, device)
        self._grids[shape if encoding.scale.ndim else None, device] = encoding, grid
        return grid

    def columns(
        self, encodings: tuple[Encoding, ...], like: torch.Tensor, within: Sequence[tuple[float, float]]
    ) -> tuple[Grid, bool]:
        """The grid of tensors side by side, this quantizer's first, and whether values must be clipped.

        Kept as long as the encodings are the same objects: making it reads and writes numbers of the device.
        """
        key, known = (like.device, like.shape[-1], tuple(within)), self._columns
        if known is not None and known[0] == key and all(map(operator.is_, known[1], encodings)):
            return known[2]
        grid = columns_grid(encodings, like)
        found = grid, not _stays_on_grid(grid, like, within)
        if not torch.compiler.is_dynamo_compiling():  # nor what is made of stand-ins
            self._columns = key, encodings, found
        return found

    def prepare(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Prepare the grid for tensors of ``shape``; a compiler cannot, since this reads scales and offsets."""
        encoding = self._encoding
        if encoding is None or self.learned is not None or not is_fast(encoding):
            return
        known = self._grids.get((shape if encoding.scale.ndim else None, device))
        if known is None or known[0] is not encoding:
            self._new_grid(shape, device, encoding)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_grids": {}, "_scales": {}, "_kept": None, "_columns": None, "_rotations": {}}


def side_by_side(
    quantizers: Sequence[Quantizer], like: torch.Tensor, within: Sequence[tuple[float, float]] = ()
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """One function that quantizes tensors side by side, each by its own quantizer, with the same codes.

    Args:
        quantizers: calibrated; the tensors of each are of the shape of ``like``.
        like: float32, ``[B, H]``.
        within: bounds of the values of each, where they are known.

    Returns:
        A function of ``[B, len(quantizers) * H]``, which may write over its argument. Zeros may come out as ``-0.0``.
        ``None`` where an encoding has more than one scale or no fast path, or ``like`` is traced; in training also where some
        of the ranges are learned and others are not.
    """
    if torch.is_grad_enabled() and any(q.pivot is not None or q.trains_elsewhere for q in quantizers):
        # the gradients at each are taken apart from the others, or what trains is read where it is: encodings are not
        return None
    encodings = tuple(quantizer.required for quantizer in quantizers)
    if not is_plain(like) or not all(e.scale.ndim == 0 and is_fast(e) for e in encodings):
        return None
    learned = [quantizer.learned for quantizer in quantizers if quantizer.learned is not None]
    if torch.is_grad_enabled() and learned:
        return learned_side_by_side(learned, encodings, like)
    grid, clamped = quantizers[0].columns(encodings, like, within)
    scale, lo, hi = grid.scale, grid.lo, grid.hi

    def run(x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return fake_quantize(x, encodings[0], grid) if clamped else round_within(x, grid)
        x.div_(scale).round_()
        return (x.clamp_(lo, hi) if clamped else x).mul_(scale)

    return run


def _stays_on_grid(grid: Grid, like: torch.Tensor, within: Sequence[tuple[float, float]]) -> bool:
    """Whether the values of each have known bounds that round to codes of its grid."""
    if not within:
        return False
    ends = (torch.round(columns(bounds, like) / grid.scale) for bounds in zip(*within, strict=True))
    return all(bool(((codes >= grid.lo) & (codes <= grid.hi)).all()) for codes in ends)


_memcmp = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None).memcmp
_memcmp.argtypes, _memcmp.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int


def _same(kept: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether ``x`` equals ``kept``, an earlier clone, bit for bit: writes through ``.data`` leave no other trace.

    0.1 to 0.3 ns per element; ``torch.equal`` takes ten times as long.
    """
    if kept.dtype != x.dtype or kept.shape != x.shape:
        return False
    if kept.stride() != x.stride():  # `x` has gaps
        return torch.equal(kept, x)
    return not _memcmp(kept.data_ptr(), x.data_ptr(), kept.numel() * kept.element_size())
