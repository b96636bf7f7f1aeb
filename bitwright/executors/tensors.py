"""Tensors of codes, and one call of an operator on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Tensor:
    """Codes on a grid, or floats.

    Attributes:
        values: codes, or floats.
        scale: float32; empty of floats, one per channel of some weights.
        zero_point: of the first scale; others have the same.
    """

    values: Array
    scale: Array
    zero_point: int = 0

    @property
    def step(self) -> np.float32:
        """The only scale."""
        return np.float32(self.scale.reshape(-1)[0])

    @property
    def centred(self) -> Array:
        """Codes from zero on, int64."""
        return self.values.astype(np.int64) - self.zero_point

    @property
    def dequantized(self) -> Array:
        """``scale * (code - zero_point)`` in float32, of one scale."""
        return np.multiply((self.values.astype(np.int32) - self.zero_point).astype(np.float32), self.step)


@dataclass(frozen=True)
class Grid:
    """Grid of the codes that an operator writes.

    Attributes:
        dtype: of the codes.
        scale: float32.
        zero_point: code of zero.
    """

    dtype: np.dtype[Any]
    scale: np.float32
    zero_point: int = 0

    @property
    def ends(self) -> tuple[int, int]:
        """Lowest and highest code."""
        info = np.iinfo(self.dtype)
        return int(info.min), int(info.max)

    def store(self, whole: Array) -> Array:
        """Whole numbers counted from the zero point, as codes: they saturate at the ends."""
        low, high = self.ends
        return np.clip(whole, low - self.zero_point, high - self.zero_point).astype(np.int32).__add__(
            np.int32(self.zero_point)
        ).astype(self.dtype)  # fmt: skip

    def quantize(self, values: Array) -> Array:
        """Floats as codes: divided in float32, a half to even, saturated; NaN is the lowest code, as on x86.

        Example:
            >>> Grid(np.dtype(np.uint8), np.float32(0.5), 3).quantize(np.float32([0.25, 0.75, -9, np.nan])).tolist()
            [3, 5, 0, 0]
        """
        low, high = (float(end - self.zero_point) for end in self.ends)
        steps = np.divide(values, self.scale, dtype=np.float32)
        steps = np.where(np.isnan(steps), np.float32(low), np.clip(steps, low, high))
        return self.store(np.rint(steps))


@dataclass(frozen=True)
class Call:
    """One operator in one run.

    Attributes:
        inputs: ``None`` where one is left out.
        grid: of the codes that it writes.
        attributes: by name.
        variant: how the profile of the target computes it.
        pairs: products of uint8 and int8 are added in pairs of 16 bits, which saturate.
        accumulator: bits of the sum of products, which wraps around.
        float_bias: the bias is added after the sum is a float.
    """

    inputs: tuple[Tensor | None, ...]
    grid: Grid
    attributes: Mapping[str, Any] = field(default_factory=dict)
    variant: str = "once"
    pairs: bool = False
    accumulator: int = 32
    float_bias: bool = False

    def read(self, port: int) -> Tensor:
        """An input that must be there."""
        found = self.inputs[port]
        assert found is not None
        return found

    def optional(self, port: int) -> Tensor | None:
        """An input that may be left out."""
        return self.inputs[port] if port < len(self.inputs) else None
