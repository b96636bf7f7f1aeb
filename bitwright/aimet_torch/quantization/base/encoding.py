"""What all encodings of the building blocks offer."""

from __future__ import annotations

import abc
from typing import Any

import torch


class EncodingBase(abc.ABC):
    """A number format with its scale, as tensors."""

    scale: torch.Tensor
    block_size: tuple[int, ...] | None

    @property
    @abc.abstractmethod
    def bitwidth(self) -> int:
        """Bits of the format."""

    @property
    @abc.abstractmethod
    def mapping(self) -> str:
        """``affine`` or ``float``."""

    @property
    def granularity(self) -> str:
        """``pertensor``, ``perchannel`` or ``blockwise``."""
        if self.block_size is not None:
            return "blockwise"
        return "pertensor" if self.scale.numel() == 1 else "perchannel"

    @abc.abstractmethod
    def to(self, *args: Any, **kwargs: Any) -> EncodingBase:
        """The encoding with its tensors on another device."""

    @abc.abstractmethod
    def quantize(self, input: torch.Tensor) -> torch.Tensor:
        """Codes of ``input``."""

    @abc.abstractmethod
    def dequantize(self, input: torch.Tensor) -> torch.Tensor:
        """Values of codes."""

    @abc.abstractmethod
    def to_qnn_encoding_dict(self, encoding_version: str | None = None) -> Any:
        """The encoding as encodings files have it."""

    def quantize_dequantize(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` on the grid."""
        return self.dequantize(self.quantize(input)).to(input.dtype)
