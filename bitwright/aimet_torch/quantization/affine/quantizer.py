"""Affine quantizers as modules whose ranges are parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from bitwright.aimet_torch._core import functional
from bitwright.aimet_torch.quantization.affine import backends
from bitwright.aimet_torch.quantization.affine.encoding import (
    AffineEncoding,
    GroupedBlockEncoding,
    qnn_dict,
    split_grid,
)
from bitwright.aimet_torch.quantization.base.quantizer import QuantizerBase, check_input
from bitwright.aimet_torch.quantization.encoding_analyzer import EncodingAnalyzer, MinMaxEncodingAnalyzer
from bitwright.aimet_torch.quantization.tensor import DequantizedTensor, QuantizedTensor, with_encoding

__all__ = ["AffineQuantizerBase", "Dequantize", "GroupedBlockQuantizeDequantize", "Quantize", "QuantizeDequantize"]


class AffineQuantizerBase(QuantizerBase):
    """``(shape, qmin, qmax, symmetric, encoding_analyzer=None, block_size=None)``, or ``bitwidth`` for the two ends.

    Args:
        shape: of the parameters ``min`` and ``max``: ``()`` per tensor, ``(n, 1, 1, 1)`` per channel.
        bitwidth: instead of ``qmin, qmax``: the signed grid of this width if ``symmetric``, else the unsigned one.
        symmetric: keep the zero point in the middle of the grid.
        encoding_analyzer: how ranges are found; min-max by default.
        block_size: elements per block, axis by axis.

    Attributes:
        min, max: the range, parameters with gradients; ``None`` until it is known.
    """

    min: Any
    max: Any

    def __init__(self, shape: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        names = ("symmetric", "encoding_analyzer", "block_size", "zero_point_shift")
        self.qmin, self.qmax, rest = split_grid(args, kwargs, names)
        backends.refuse_shift(rest.pop("zero_point_shift", None))
        if "symmetric" not in rest:
            raise TypeError(f"{type(self).__name__} needs to be told whether it is symmetric")
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self._symmetric = bool(rest.pop("symmetric"))
        analyzer: EncodingAnalyzer | None = rest.pop("encoding_analyzer", None)
        self.block_size = rest.pop("block_size", None)
        if rest:
            raise TypeError(f"unknown arguments {sorted(rest)}")
        self.encoding_analyzer = analyzer or MinMaxEncodingAnalyzer(self.shape, self.block_size)
        self._overwrite = {"min": True, "max": True}
        self.register_parameter("min", None)
        self.register_parameter("max", None)

    # -- the grid

    @property
    def bitwidth(self) -> int:
        """Bits of the grid; setting it keeps the range."""
        return math.ceil(math.log2(self.qmax - self.qmin + 1)) if self.bound is None else self.bound.bitwidth

    @bitwidth.setter
    def bitwidth(self, bitwidth: int) -> None:
        self.qmin, self.qmax = backends.derived_grid((1 << int(bitwidth)) - 1, self.qmin < 0)
        if self.bound is not None:
            self.bound.bitwidth = bitwidth

    @property
    def symmetric(self) -> bool:
        """Whether the zero point is kept in the middle of the grid."""
        return self._symmetric if self.bound is None else self.bound.symmetric

    @symmetric.setter
    def symmetric(self, symmetric: bool) -> None:
        self._symmetric = bool(symmetric)
        if self.bound is not None:
            self.bound.symmetric = symmetric

    @property
    def signed(self) -> bool:
        """Whether codes may be negative."""
        return self.qmin < 0 if self.bound is None else self.bound.signed

    @signed.setter
    def signed(self, signed: bool) -> None:
        self.qmin, self.qmax = backends.derived_grid(self.qmax - self.qmin, bool(signed))
        if self.bound is not None:
            self.bound.signed = signed

    # -- the range

    def is_initialized(self) -> bool:
        """Whether there is a range."""
        if self.bound is not None:
            return bool(self.bound.is_initialized())
        return self.min is not None and self.max is not None

    def get_min(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Lowest representable value; ``None`` without a range."""
        return self._end("min", dtype)

    def get_max(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Highest representable value; ``None`` without a range."""
        return self._end("max", dtype)

    def _end(self, name: str, dtype: torch.dtype | None) -> torch.Tensor | None:
        if self.bound is not None:
            end: torch.Tensor | None = getattr(self.bound, f"get_{name}")(dtype)
            return end
        scale, offset = self.get_scale(dtype), self.get_offset(dtype)
        if scale is None or offset is None:
            return None
        return scale * ((self.qmin if name == "min" else self.qmax) + offset)

    def _grid(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._refuse_uninitialized()
        return functional.grid_of_range(self.min, self.max, self.qmin, self.qmax, symmetric=self._symmetric)

    def get_scale(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Input units per step; ``None`` without a range."""
        if self.bound is not None:
            scale: torch.Tensor | None = self.bound.get_scale(dtype)
            return scale
        return self._grid()[0].to(dtype or self.min.dtype) if self.is_initialized() else None

    def get_offset(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Minus the zero point; ``None`` without a range."""
        if self.bound is not None:
            offset: torch.Tensor | None = self.bound.get_offset(dtype)
            return offset
        return (-self._grid()[1]).to(dtype or self.min.dtype) if self.is_initialized() else None

    @torch.no_grad()
    def set_range(self, min: torch.Tensor | float | None, max: torch.Tensor | float | None) -> None:
        """Put the ends of the grid at ``min`` and ``max``; ``None`` forgets the range."""
        if self.bound is not None:
            self.bound.set_range(min, max)
            return
        for name, end in (("min", min), ("max", max)):
            if end is None:
                setattr(self, name, None)
                continue
            value = torch.as_tensor(end, dtype=torch.float32).detach().expand(self.shape).clone()
            own = getattr(self, name)
            if own is None:
                setattr(self, name, nn.Parameter(value))
            else:
                own.copy_(value)

    def get_encodings(self) -> AffineEncoding | None:
        """The encoding; ``None`` without a range."""
        if self.bound is not None:
            bound: AffineEncoding | None = self.bound.get_encodings()
            return bound
        if not self.is_initialized():
            return None
        scale, offset = self.get_scale(), self.get_offset()
        assert scale is not None and offset is not None
        return AffineEncoding(scale, offset, self.qmin, self.qmax, self.symmetric, self.block_size)

    def set_encodings(self, encodings: Any) -> None:
        """Take grid and range of an encoding."""
        if self.bound is not None:
            self.bound.set_encodings(encodings)
            return
        self.qmin, self.qmax, self._symmetric = encodings.qmin, encodings.qmax, encodings.symmetry
        self.block_size, self.shape = encodings.block_size, tuple(encodings.scale.shape)
        self.min = self.max = None
        self.set_range(encodings.min, encodings.max)

    @classmethod
    def from_encodings(cls, encodings: Any) -> Any:
        """A quantizer with the grid and range of an encoding; ``None`` for encodings of another kind."""
        if not isinstance(encodings, AffineEncoding):
            return None
        made = cls(
            tuple(encodings.scale.shape), encodings.qmin, encodings.qmax, encodings.symmetry,
            block_size=encodings.block_size,
        )  # fmt: skip
        made.set_range(encodings.min, encodings.max)
        return made

    def get_legacy_encodings(self) -> list[dict[str, Any]] | None:
        """The encoding as files of version 0.6.1 have it; ``None`` without a range."""
        encodings = self.get_encodings()
        return None if encodings is None else qnn_dict(encodings, "0.6.1")

    def set_legacy_encodings(self, encodings: list[dict[str, Any]]) -> None:
        """Take width, symmetry and range of records of version 0.6.1."""
        self.bitwidth = encodings[0]["bitwidth"]
        self.symmetric = str(encodings[0]["is_symmetric"]).lower() == "true"
        lo, hi = (torch.tensor([e[end] for e in encodings]).reshape(self.shape) for end in ("min", "max"))
        self.set_range(lo, hi)

    # -- calibration

    def _start(self) -> None:
        self.encoding_analyzer.reset_stats()

    def _finish(self) -> None:
        if self.encoding_analyzer._seen is None:
            return
        lo, hi = self.encoding_analyzer.compute_encodings(self.qmax - self.qmin, self._symmetric)
        self.encoding_analyzer.reset_stats()
        kept = {name: getattr(self, name) for name, free in self._overwrite.items() if not free}
        self.set_range(lo if kept.get("min") is None else kept["min"], hi if kept.get("max") is None else kept["max"])

    def _observed_grid(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point: of this input alone while ranges are being found."""
        if not self.observing:
            return self._grid()
        self.encoding_analyzer.update_stats(input)
        lo, hi = self.encoding_analyzer.compute_dynamic_encodings(input, self.qmax - self.qmin, self._symmetric)
        return functional.grid_of_range(lo, hi, self.qmin, self.qmax, symmetric=self._symmetric)

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """What a state dict keeps beside the range."""
        return {
            "symmetric": torch.tensor(self._symmetric),
            "min_overwrite": torch.tensor(self._overwrite["min"]),
            "max_overwrite": torch.tensor(self._overwrite["max"]),
        }

    def set_extra_state(self, state: Any) -> None:
        """Take what :meth:`get_extra_state` gave."""
        self._symmetric = bool(state["symmetric"])
        self._overwrite = {"min": bool(state["min_overwrite"]), "max": bool(state["max_overwrite"])}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("min", "max"):  # a quantizer without a range gets one
            value = state_dict.get(f"{prefix}{name}")
            if value is not None and getattr(self, name) is None:
                setattr(self, name, nn.Parameter(value.detach().clone()))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """Shape, grid and symmetry."""
        return f"shape={self.shape}, qmin={self.qmin}, qmax={self.qmax}, symmetric={self.symmetric}"


class Quantize(AffineQuantizerBase):
    """Quantizes to codes: a :class:`QuantizedTensor`."""

    def forward(self, input: torch.Tensor) -> QuantizedTensor:
        """Codes of ``input``.

        Raises:
            CalibrationError: (a RuntimeError) there is no range yet.
        """
        scale, zero_point = self._observed_grid(check_input(input, self))
        encoding = AffineEncoding(scale, -zero_point, self.qmin, self.qmax, self._symmetric, self.block_size)
        return with_encoding(QuantizedTensor, encoding.quantize(_plain(input)), encoding)


class QuantizeDequantize(AffineQuantizerBase):
    """Moves values onto the grid: a :class:`DequantizedTensor`."""

    def forward(self, input: torch.Tensor) -> DequantizedTensor:
        """``input`` on the grid.

        Raises:
            CalibrationError: (a RuntimeError) there is no range yet.
        """
        check_input(input, self)
        if self.bound is not None and not self.observing:
            return with_encoding(DequantizedTensor, self.bound(_plain(input)), self.bound.get_encodings())
        scale, zero_point = self._observed_grid(input)
        encoding = AffineEncoding(scale, -zero_point, self.qmin, self.qmax, self._symmetric, self.block_size)
        return with_encoding(DequantizedTensor, encoding.quantize_dequantize(_plain(input)), encoding)


class Dequantize(AffineQuantizerBase):
    """Turns codes back into values; takes a :class:`QuantizedTensor`."""

    def forward(self, input: QuantizedTensor) -> DequantizedTensor:
        """The values of ``input``."""
        return input.dequantize()


class GroupedBlockQuantizeDequantize(QuantizeDequantize):
    """Blocks whose scales are integer multiples of one scale per channel (LPBQ).

    Args:
        decompressed_bw: bits of ``code * multiple``; multiples have ``decompressed_bw - bitwidth`` bits.
        block_grouping: how many blocks share a channel's scale, axis by axis; ``-1``: all of the axis.
    """

    def __init__(
        self,
        shape: Any,
        bitwidth: int,
        symmetric: bool,
        decompressed_bw: int,
        encoding_analyzer: EncodingAnalyzer | None = None,
        block_size: tuple[int, ...] | None = None,
        block_grouping: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(shape, bitwidth, symmetric, encoding_analyzer, block_size)
        if not symmetric or decompressed_bw < bitwidth:
            raise ValueError(
                f"LPBQ is symmetric and decompresses to more bits: symmetric={symmetric}, bitwidth={bitwidth}, "
                f"decompressed_bw={decompressed_bw}"
            )
        self.decompressed_bw = decompressed_bw
        self.block_grouping = tuple(block_grouping) if block_grouping is not None else (1,) * len(self.shape)

    def get_per_channel_scale(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """The scale that those of the blocks are multiples of; ``None`` without a range."""
        if self.bound is not None:
            bound: torch.Tensor | None = self.bound.get_per_channel_scale(dtype)
            return bound
        if not self.is_initialized():
            return None
        return functional.grouped_scale(super()._grid()[0], self.block_grouping, self._multiples)[1].to(
            dtype or self.min.dtype
        )

    @property
    def _multiples(self) -> int:
        return int(2 ** (self.decompressed_bw - self.bitwidth))

    def _grid(self) -> tuple[torch.Tensor, torch.Tensor]:
        scale, zero_point = super()._grid()
        return functional.grouped_scale(scale, self.block_grouping, self._multiples)[0], zero_point

    def _observed_grid(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale, zero_point = super()._observed_grid(input)
        return functional.grouped_scale(scale, self.block_grouping, self._multiples)[0], zero_point

    def get_encodings(self) -> GroupedBlockEncoding | None:
        """The encoding; ``None`` without a range."""
        if self.bound is not None:
            bound: GroupedBlockEncoding | None = self.bound.get_encodings()
            return bound
        if not self.is_initialized():
            return None
        scale, zero_point = self._grid()
        return GroupedBlockEncoding(
            scale, -zero_point, self.qmin, self.qmax, self.symmetric, self.block_size,
            block_grouping=self.block_grouping, decompressed_bw=self.decompressed_bw,
            per_channel_scale=self.get_per_channel_scale(),
        )  # fmt: skip


def _plain(input: torch.Tensor) -> torch.Tensor:
    return input.as_subclass(torch.Tensor)
