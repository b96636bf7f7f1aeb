"""Float encodings as tensors."""

from __future__ import annotations

from typing import Any

import torch

from bitwright.aimet_torch._core import FLOAT_FORMATS, FloatFormat, functional
from bitwright.aimet_torch.quantization.base.encoding import EncodingBase

__all__ = ["FloatEncoding"]


def float_format(exponent_bits: int, mantissa_bits: int, finite: bool = False) -> FloatFormat:
    """Our format with these fields; one of our own formats where there is one with the same largest number.

    >>> float_format(5, 10).name, float_format(4, 3, finite=True).max, float_format(4, 3).max
    ('float16', 448.0, 240.0)
    """
    largest = float(2 ** (2 ** (exponent_bits - 1) - 1)) * (2 - 2.0**-mantissa_bits)
    for known in FLOAT_FORMATS.values():
        fields = (known.exponent_bits, known.mantissa_bits) == (exponent_bits, mantissa_bits)
        if fields and (finite or known.max == largest):
            return known
    if finite:  # the topmost exponent holds numbers too, all but the last one of which is NaN
        largest = float(2 ** (2 ** (exponent_bits - 1))) * (2 - 2.0 ** (1 - mantissa_bits))
    bits = exponent_bits + mantissa_bits + 1
    name = f"float{bits}_e{exponent_bits}m{mantissa_bits}"
    return FloatFormat(name, exponent_bits, mantissa_bits, largest, scaled=bits < 16)


class FloatEncoding(EncodingBase):
    """A float format with its scale."""

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
    def mapping(self) -> str:
        """``float``."""
        return "float"

    @property
    def maxval(self) -> torch.Tensor:
        """Largest representable value."""
        return self.scale * self.format.max

    @property
    def bitwidth(self) -> int:
        """Bits of the format."""
        return self.format.bits

    def to(self, *args: Any, **kwargs: Any) -> FloatEncoding:
        """The encoding with its scale moved as :meth:`torch.Tensor.to` moves it."""
        return FloatEncoding(
            self.mantissa_bits, self.exponent_bits, self.finite, self.unsigned_zero,
            self.scale.to(*args, **kwargs), self.block_size,
        )  # fmt: skip

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
        """The encoding as encodings files have it."""
        if encoding_version == "0.6.1":
            return [{"bitwidth": self.bitwidth, "dtype": "float"}]
        return {"bw": self.bitwidth, "dtype": "FLOAT", "enc_type": "PER_TENSOR"}
