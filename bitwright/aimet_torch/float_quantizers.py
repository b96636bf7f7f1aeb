"""``aimet_torch.quantization.float``: float encodings and quantizers."""

from __future__ import annotations

from typing import Any

import torch

from bitwright.aimet_torch.quantizers import (
    DequantizedTensor,
    EncodingAnalyzer,
    EncodingBase,
    MinMaxEncodingAnalyzer,
    QuantizerBase,
    is_float,
    plain_tensor,
    with_encoding,
)  # fmt: skip
from bitwright.core.numerics.formats import float_format
from bitwright.errors import FormatError, with_article
from bitwright.export.encodings.records import check_version
from bitwright.torch.quantizers import functional

__all__ = ["FloatEncoding", "FloatQuantizeDequantize", "QuantizeDequantize"]


# ------------------------------------------------------------------------------------ encodings


class FloatEncoding(EncodingBase):
    """A float format with its scale."""

    mapping = "float"

    def __init__(
        self,
        mantissa_bits: int,
        exponent_bits: int,
        finite: bool,
        unsigned_zero: bool,
        scale: torch.Tensor,
        block_size: tuple[int, ...] | None = None,
        *,
        producer: Any = None,
    ) -> None:
        self.mantissa_bits, self.exponent_bits = mantissa_bits, exponent_bits
        self.finite, self.unsigned_zero = finite, unsigned_zero
        self.scale, self.block_size = scale, block_size
        self.format = float_format(exponent_bits, mantissa_bits, finite)

    @property
    def maxval(self) -> torch.Tensor:
        """Largest representable value."""
        return self.scale * self.format.max

    @property
    def bitwidth(self) -> int:
        """Bits of the format."""
        return self.format.bits

    def quantize(self, input: torch.Tensor) -> torch.Tensor:
        """``input / scale`` rounded to the format."""
        view, broadcast = functional.blocked_shapes(input.shape, self.scale.shape, self.block_size)
        scaled = (input.reshape(view) / self.scale.reshape(broadcast)).reshape(input.shape)
        return functional.float_quantize_dequantize(scaled, self.format)

    def dequantize(self, input: torch.Tensor) -> torch.Tensor:
        """``input * scale``."""
        view, broadcast = functional.blocked_shapes(input.shape, self.scale.shape, self.block_size)
        return (input.reshape(view) * self.scale.reshape(broadcast)).reshape(input.shape)

    def quantize_dequantize(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` rounded to the format times the scale."""
        return functional.float_quantize_dequantize(input, self.format, self.scale, self.block_size)

    def to_qnn_encoding_dict(self, encoding_version: str | None = None) -> Any:
        """The encoding as encodings files have it; empty in version 2.0.0 for float16 and bfloat16, which have no scale.

        Raises:
            EncodingsError: (a RuntimeError) there is no such version.
        """
        version = check_version("to_qnn_encoding_dict", encoding_version or "1.0.0")
        if version == "0.6.1":
            return [{"bitwidth": self.bitwidth, "dtype": "float"}]
        if version == "2.0.0":
            name = {"float8_e4m3": "float8e4m3fn", "float8_e5m2": "float8e5m2", "float4_e2m1": "float4e2m1"}.get(
                self.format.name
            )
            return {} if name is None else {"output_dtype": name, "y_scale": self.scale.detach().tolist()}
        return {"bw": self.bitwidth, "dtype": "FLOAT", "enc_type": "PER_TENSOR"}


# ------------------------------------------------------------------------------------ quantizers


_TORCH = {
    torch.float16: (5, 10, False),
    torch.bfloat16: (8, 7, False),
    torch.float8_e4m3fn: (4, 3, True),
    torch.float8_e5m2: (5, 2, False),
}


class FloatQuantizeDequantize(QuantizerBase):
    """Rounds to a float format: ``exponent_bits, mantissa_bits``, or the ``dtype`` of torch.

    Formats of less than 16 bits have a scale, found in ``compute_encodings``; the wide ones have none.

    Raises:
        ValueError: neither or both of the forms.
        FormatError: (a ValueError) a format without a counterpart here (``fnuz``).
    """

    maxval: torch.Tensor

    def __init__(
        self,
        exponent_bits: int | None = None,
        mantissa_bits: int | None = None,
        finite: bool | None = None,
        unsigned_zero: bool | None = None,
        dtype: torch.dtype | None = None,
        shape: tuple[int, ...] | None = None,
        block_size: tuple[int, ...] | None = None,
        encoding_analyzer: EncodingAnalyzer | None = None,
    ) -> None:
        super().__init__()
        fields = (exponent_bits, mantissa_bits, finite, unsigned_zero)
        if dtype is not None:
            if any(field is not None for field in fields):
                raise ValueError("give either dtype, or exponent_bits and mantissa_bits")
            if dtype not in _TORCH:
                raise FormatError("dtype", f"{dtype} is not a float format here", f"use one of {list(_TORCH)}")
            exponent_bits, mantissa_bits, finite = _TORCH[dtype]
        if exponent_bits is None or mantissa_bits is None:
            raise ValueError("give dtype, or both exponent_bits and mantissa_bits")
        if unsigned_zero:
            raise FormatError("unsigned_zero", "formats without -0 are not formats here", "leave it out")
        self.exponent_bits, self.mantissa_bits, self.finite = exponent_bits, mantissa_bits, bool(finite)
        self.unsigned_zero, self.block_size = False, block_size
        given = encoding_analyzer.shape if encoding_analyzer is not None else ()
        self.shape = tuple(given if shape is None else shape)
        if encoding_analyzer is None and self.bitwidth < 16:
            encoding_analyzer = MinMaxEncodingAnalyzer(self.shape, block_size)
        self.encoding_analyzer = encoding_analyzer
        self._overwrite = {"maxval": True}
        self.register_buffer("maxval", torch.full(self.shape, self._format.max))

    @property
    def _format(self) -> Any:
        return float_format(self.exponent_bits, self.mantissa_bits, self.finite)

    @property
    def bitwidth(self) -> int:
        """Bits of the format."""
        return self.exponent_bits + self.mantissa_bits + 1

    def is_float16(self) -> bool:
        """Whether the format is IEEE half precision."""
        return (self.exponent_bits, self.mantissa_bits) == (5, 10)

    def is_bfloat16(self) -> bool:
        """Whether the format is bfloat16."""
        return (self.exponent_bits, self.mantissa_bits) == (8, 7)

    def is_initialized(self) -> bool:
        """Always: without calibration the scale is 1."""
        return True

    def get_scale(self) -> torch.Tensor:
        """Input units per unit of the format."""
        if self.bound is not None and self.bound.is_initialized():
            scale: torch.Tensor = self.bound.get_scale()
            return scale
        return self.maxval / self._format.max

    def get_encodings(self) -> FloatEncoding:
        """The encoding."""
        return FloatEncoding(
            self.mantissa_bits, self.exponent_bits, self.finite, False, self.get_scale(), self.block_size
        )

    def set_encodings(self, encodings: Any) -> None:
        """Set format and scale from an encoding.

        Raises:
            TypeError: it is not an encoding of a float format.
        """
        if not isinstance(encodings, FloatEncoding):
            raise TypeError(
                f"{type(self).__name__} takes a FloatEncoding, not {with_article(type(encodings).__name__)}"
            )
        if self.bound is not None:
            self.bound.set_encodings(encodings)
        self.exponent_bits, self.mantissa_bits = encodings.exponent_bits, encodings.mantissa_bits
        self.finite, self.block_size = encodings.finite, encodings.block_size
        self.shape, self.maxval = tuple(encodings.scale.shape), encodings.maxval.detach().clone()

    @classmethod
    def from_encodings(cls, encodings: Any) -> Any:
        """A quantizer with the format and scale of an encoding; ``None`` for encodings of another kind."""
        if not isinstance(encodings, FloatEncoding):
            return None
        made = cls(
            encodings.exponent_bits, encodings.mantissa_bits, encodings.finite,
            shape=tuple(encodings.scale.shape), block_size=encodings.block_size,
        )  # fmt: skip
        made.maxval.copy_(encodings.maxval)
        return made

    def set_legacy_encodings(self, encodings: list[dict[str, Any]]) -> None:
        """Load records of version 0.6.1, which have 16 bits.

        Raises:
            FormatError: they are not.
        """
        if encodings[0]["bitwidth"] != 16:
            raise FormatError("encodings", f"{encodings[0]['bitwidth']} bits", "records of 0.6.1 are float16")
        self.exponent_bits, self.mantissa_bits, self.finite = 5, 10, False

    def _start(self) -> None:
        if self.encoding_analyzer is not None:
            self.encoding_analyzer.reset_stats()

    def _finish(self) -> None:
        analyzer = self.encoding_analyzer
        if analyzer is None or analyzer._seen is None or not self._overwrite["maxval"]:
            return
        self.maxval = self._largest(analyzer)
        analyzer.reset_stats()

    def _largest(self, analyzer: EncodingAnalyzer) -> torch.Tensor:
        """Largest value of the grid that covers the observed values."""
        lo, hi = analyzer.compute_encodings(255, False)
        largest = torch.maximum(-lo, hi).reshape(self.shape)
        return torch.where(largest > 0, largest, torch.full_like(largest, self._format.max))

    def forward(self, input: torch.Tensor) -> DequantizedTensor:
        """``input`` rounded to the format."""
        if not is_float(input, self):
            return input  # type: ignore[return-value]
        plain = plain_tensor(input)
        if self.observing and self.encoding_analyzer is not None:
            self.encoding_analyzer.update_stats(plain)
            scale = self._largest(self.encoding_analyzer) / self._format.max
        else:
            scale = self.get_scale()
        encoding = FloatEncoding(self.mantissa_bits, self.exponent_bits, self.finite, False, scale, self.block_size)
        return with_encoding(DequantizedTensor, encoding.quantize_dequantize(plain), encoding)

    def extra_repr(self) -> str:
        """Fields of the format."""
        if self.is_float16() or self.is_bfloat16():
            return f"dtype=torch.{'float16' if self.is_float16() else 'bfloat16'}"
        return f"exponent_bits={self.exponent_bits}, mantissa_bits={self.mantissa_bits}, finite={self.finite}"


class QuantizeDequantize(FloatQuantizeDequantize):
    """:class:`FloatQuantizeDequantize` under its short name."""
