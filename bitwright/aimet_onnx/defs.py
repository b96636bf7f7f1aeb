"""``aimet_onnx.defs``: what a tensor is to be quantized to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bitwright.aimet_common.defs import qtype

__all__ = ["LPBQ", "Blockwise", "DataLoader", "Granularity", "PerChannel", "PerTensor", "QSpec"]


class Granularity:
    """Granularity of the scales."""


@dataclass(frozen=True)
class PerTensor(Granularity):
    """One scale."""


@dataclass(frozen=True)
class PerChannel(Granularity):
    """One scale per output channel."""


@dataclass(frozen=True)
class Blockwise(Granularity):
    """One scale per block along the input channels."""

    block_size: int


@dataclass(frozen=True)
class LPBQ(Blockwise):
    """Block scales in two factors."""

    block_size: int = 64
    scale_bits: int = 4


@dataclass(frozen=True)
class QSpec:
    """Number format, granularity and symmetry of a tensor; ``None`` leaves them as they are."""

    dtype: Any
    granularity: Granularity | None = None
    symmetric: bool | None = None
    shift_zero_point: bool = False

    @classmethod
    def per_tensor(cls, dtype: Any, *, symmetric: bool | None = None, shift_zero_point: bool = False) -> QSpec:
        """One scale."""
        return cls(qtype.as_qtype(dtype), PerTensor(), symmetric, shift_zero_point)

    @classmethod
    def per_channel(cls, dtype: Any, *, symmetric: bool | None = None, shift_zero_point: bool = False) -> QSpec:
        """One scale per output channel."""
        return cls(qtype.as_qtype(dtype), PerChannel(), symmetric, shift_zero_point)

    @classmethod
    def blockwise(
        cls, dtype: Any, block_size: int, *, symmetric: bool | None = None, shift_zero_point: bool = False
    ) -> QSpec:
        """One scale per block along the input channels."""
        return cls(qtype.as_qtype(dtype), Blockwise(block_size), symmetric, shift_zero_point)

    @classmethod
    def lpbq(cls, dtype: Any, block_size: int = 64, scale_bits: int = 4) -> QSpec:
        """Block scales in two factors."""
        return cls(qtype.as_qtype(dtype), LPBQ(block_size, scale_bits), True)


class DataLoader:
    """Batches of an array, which a subclass may cut otherwise; ``iterations`` of them."""

    def __init__(self, data: Any, batch_size: int, iterations: int) -> None:
        self._data, self.batch_size, self.iterations = data, batch_size, iterations

    def __iter__(self) -> Any:
        return (self._data[i * self.batch_size : (i + 1) * self.batch_size] for i in range(self.iterations))
