"""The encoding of one site: its grid and range."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.numerics.formats import FLOAT32_SCALE, FloatFormat, Format, IntFormat, ScaleFormat
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor, permuted, phrase


@dataclass(frozen=True, eq=False)
class Encoding:
    """A format with its scale and zero point: ``x ~ (q - zero_point) * scale``; with a ``shift``, that of ``zero`` instead.

    Attributes:
        format: integer grid or small float format.
        scale: float32, parameter shape P of ``granularity`` for the tensor, > 0, input units per step.
        zero_point: int32 (int64 for uint32 grids), shape P, within ``[qmin, qmax]``; zeros for float formats.
        granularity: concrete (axes filled in).
        scale_format: what the scales are stored as; ``scale`` holds only numbers that it can say.
        common: float32, the number of which the scales are multiples, where ``scale_format`` has one: shape P with 1 on
            every axis that shares it; else ``None``.
        dynamic: every run chooses scale and zero point of the tensor that passes (:func:`affine.quantize_at_run_time`); those
            here are 1 and 0 and mean nothing, and nothing lies beyond ``min`` and ``max``, which are infinite.
        shift: float32, shape P: what the zero points are above ``zero_point``, of grids whose zero points are real numbers
            (``symmetry="float_zero_point"``; unsigned integers); ``None`` of all others.
        vectors: ``(size, axis)`` of a weight whose codes are vectors of a codebook (:mod:`bitwright.methods.rounding.gptvq`):
            so many neighbours, in memory (-1) or along the last axis but one (-2), are one of at most 256 vectors. Files may
            store indices then; values do not depend on it.

    Two encodings are equal when every field is equal, bit for bit.
    """

    format: Format
    scale: NDArray[np.float32]
    zero_point: NDArray[np.int32 | np.int64]
    granularity: Granularity = PerTensor()
    scale_format: ScaleFormat = FLOAT32_SCALE
    common: NDArray[np.float32] | None = None
    dynamic: bool = False
    shift: NDArray[np.float32] | None = None
    vectors: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        scale = np.array(self.scale, np.float32)
        zero_point = np.array(self.zero_point, np.int64).astype(np.int32 if self._narrow() else np.int64)
        assert scale.shape == zero_point.shape, (scale.shape, zero_point.shape)
        scale.flags.writeable = zero_point.flags.writeable = False
        assert self.dynamic or (self.common is None) == (self.scale_format.shared == "none"), self.scale_format
        if self.common is not None:
            common = np.array(self.common, np.float32)
            common.flags.writeable = False
            object.__setattr__(self, "common", common)
        if self.shift is not None:
            shift = np.array(self.shift, np.float32)
            assert shift.shape == scale.shape and isinstance(self.format, IntFormat) and not self.format.signed
            shift.flags.writeable = False
            object.__setattr__(self, "shift", shift)
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "zero_point", zero_point)

    def _narrow(self) -> bool:
        return not (isinstance(self.format, IntFormat) and self.format.bits == 32 and not self.format.signed)

    @property
    def zero(self) -> NDArray[np.int32 | np.int64 | np.float32]:
        """Code of real zero: ``zero_point``, or float32 with the ``shift`` added."""
        return self.zero_point if self.shift is None else self.zero_point.astype(np.float32) + self.shift

    @property
    def symmetric(self) -> bool:
        """Whether real zero sits where a symmetric grid has it: code 0 if signed, 0 or the middle if unsigned."""
        if not isinstance(self.format, IntFormat):
            return True
        if self.shift is not None:
            return False
        if self.format.signed:
            return bool((self.zero_point == 0).all())
        middle = (self.format.qmax + 1) // 2
        return bool((self.zero_point == 0).all() or (self.zero_point == middle).all())

    @property
    def min(self) -> NDArray[np.float64]:
        """Lowest representable value, shape P."""
        if self.dynamic:
            return np.full(self.scale.shape, -np.inf)
        if isinstance(self.format, IntFormat):
            return (self.format.qmin - self.zero.astype(np.float64)) * self.scale
        return -self.format.max * self.scale.astype(np.float64)

    @property
    def max(self) -> NDArray[np.float64]:
        """Highest representable value, shape P."""
        if self.dynamic:
            return np.full(self.scale.shape, np.inf)
        if isinstance(self.format, IntFormat):
            return (self.format.qmax - self.zero.astype(np.float64)) * self.scale
        return self.format.max * self.scale.astype(np.float64)

    def permuted(self, axes: tuple[int, ...]) -> Encoding:
        """The encoding of the tensor with its axes permuted.

        >>> from bitwright.core.numerics.granularity import PerBlock
        >>> from bitwright.core.numerics.formats import IntFormat
        >>> found = Encoding(IntFormat(4), np.ones((8, 2)), np.zeros((8, 2)), PerBlock(32, 1, 0)).permuted((1, 0))
        >>> found.granularity, found.scale.shape
        (PerBlock(size=32, axis=0, channel_axis=1), (2, 8))
        """
        turned = permuted(self.granularity, axes)
        if isinstance(turned, PerChannel):
            return replace(self, granularity=turned, vectors=None)
        if not isinstance(turned, PerBlock):
            return self

        def moved(values: NDArray[Any]) -> NDArray[Any]:
            return np.ascontiguousarray(values.transpose(axes))

        scale, zero_point = moved(self.scale), moved(self.zero_point)
        common = moved(self.common) if self.common is not None and self.common.ndim else self.common
        shift = None if self.shift is None else moved(self.shift)
        return replace(self, scale=scale, zero_point=zero_point, granularity=turned, common=common, shift=shift)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Encoding):
            return NotImplemented
        return (
            self.format == other.format
            and self.granularity == other.granularity
            and np.array_equal(self.scale, other.scale)
            and np.array_equal(self.zero_point, other.zero_point)
            and self.scale_format == other.scale_format
            and self.dynamic == other.dynamic
            and self.vectors == other.vectors
            and (self.common is None) == (other.common is None)
            and (other.common is None or np.array_equal(np.asarray(self.common), other.common))
            and (self.shift is None) == (other.shift is None)
            and (other.shift is None or np.array_equal(np.asarray(self.shift), other.shift))
        )

    def __hash__(self) -> int:
        return hash((self.format, self.granularity, self.scale.tobytes(), self.zero.tobytes()))

    def __repr__(self) -> str:
        if self.dynamic:
            return f"Encoding({self.format.name}, {phrase(self.granularity)}, range at run time)"
        if self.scale.ndim == 0:
            zero = f"{int(self.zero_point)}" if self.shift is None else f"{float(self.zero):.6g}"
            return f"Encoding({self.format.name}, scale={float(self.scale):.6g}, zero_point={zero})"
        return (
            f"Encoding({self.format.name}, {self.granularity}, scale={self.scale.min():.4g}..{self.scale.max():.4g} "
            f"{self.scale.shape})"
        )


def signed_as(encoding: Encoding, signed: bool) -> Encoding:
    """``encoding`` on the signed or the unsigned grid of its width: the same numbers under other codes."""
    fmt = encoding.format
    if isinstance(fmt, FloatFormat) or fmt.signed == signed or fmt.narrow:
        return encoding
    moved = replace(fmt, signed=signed)
    shift = moved.qmin - fmt.qmin
    return replace(encoding, format=moved, zero_point=encoding.zero_point + shift)
