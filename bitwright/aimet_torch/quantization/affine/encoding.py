"""Affine encodings as tensors: scale, offset and grid."""

from __future__ import annotations

import math
from typing import Any

import torch

from bitwright.aimet_torch.quantization.affine import backends
from bitwright.aimet_torch.quantization.base.encoding import EncodingBase

__all__ = ["AffineEncoding", "GroupedBlockEncoding", "VectorEncoding"]


def split_grid(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]
) -> tuple[int, int, dict[str, Any]]:
    """``qmin``, ``qmax`` and the other arguments of ``(qmin, qmax, *names)`` or ``(bitwidth, *names)``.

    Raises:
        TypeError: neither form.
    """
    given = dict(kwargs)
    positional = list(args)
    by_ends = (
        "qmin" in given
        or "qmax" in given
        or (len(positional) > 1 and not isinstance(positional[1], bool) and isinstance(positional[1], int))
    )
    heads = ["qmin", "qmax"] if by_ends else ["bitwidth", *(["signed"] if names[0] == "symmetry" else [])]
    for name in [*heads, *names]:
        if positional and name not in given:
            given[name] = positional.pop(0)
    if positional:
        raise TypeError(f"too many arguments: {positional}")
    if by_ends:
        return int(given.pop("qmin")), int(given.pop("qmax")), given
    if "bitwidth" not in given:
        raise TypeError("give the grid as (qmin, qmax) or as (bitwidth)")
    signed = given.pop("signed", None)
    signed = bool(given.get("symmetric", False)) if signed is None else bool(signed)
    return *backends.derived_grid((1 << int(given.pop("bitwidth"))) - 1, signed), given


class AffineEncoding(EncodingBase):
    """``AffineEncoding(scale, offset, qmin, qmax, symmetry=False, block_size=None)``, or ``bitwidth, signed=False`` for the grid.

    Attributes:
        scale: input units per step.
        offset: minus our zero point.
        qmin, qmax: ends of the grid.
    """

    def __init__(self, scale: torch.Tensor, offset: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("producer", None)
        self.qmin, self.qmax, rest = split_grid(args, kwargs, ("symmetry", "block_size", "zero_point_shift"))
        backends.refuse_shift(rest.pop("zero_point_shift", None))
        self.scale, self.offset = scale, offset
        self._symmetry, self.block_size = bool(rest.pop("symmetry", False)), rest.pop("block_size", None)
        if rest:
            raise TypeError(f"unknown arguments {sorted(rest)}")

    @property
    def mapping(self) -> str:
        """``affine``."""
        return "affine"

    @property
    def zero_point_shift(self) -> float:
        """Always 0: codes between the integers are refused."""
        return 0.0

    @property
    def num_steps(self) -> int:
        """Intervals of the grid."""
        return self.qmax - self.qmin

    @property
    def min(self) -> torch.Tensor:
        """Lowest representable value."""
        return (self.qmin + self.offset) * self.scale

    @property
    def max(self) -> torch.Tensor:
        """Highest representable value."""
        return (self.qmax + self.offset) * self.scale

    @property
    def symmetry(self) -> bool:
        """Whether the zero point is kept in the middle."""
        return self._symmetry

    @property
    def bitwidth(self) -> int:
        """Bits of the grid."""
        return math.ceil(math.log2(self.num_steps + 1))

    @property
    def signed(self) -> bool:
        """Whether codes may be negative."""
        return self.qmin < 0

    @property
    def dtype(self) -> torch.dtype:
        """The smallest integer dtype of torch that holds the codes."""
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
            info = torch.iinfo(dtype)
            if info.min <= self.qmin and self.qmax <= info.max:
                return dtype
        return torch.int64

    def to(self, *args: Any, **kwargs: Any) -> AffineEncoding:
        """The encoding with its tensors moved as :meth:`torch.Tensor.to` moves them."""
        return AffineEncoding(
            self.scale.to(*args, **kwargs), self.offset.to(*args, **kwargs), self.qmin, self.qmax,
            self.symmetry, self.block_size,
        )  # fmt: skip

    def quantize(self, input: torch.Tensor) -> torch.Tensor:
        """Codes of ``input``."""
        return backends.quantize(input, self.scale, self.offset, self.qmin, self.qmax, self.block_size)

    def dequantize(self, input: torch.Tensor) -> torch.Tensor:
        """Values of codes."""
        return backends.dequantize(input, self.scale, self.offset, self.block_size)

    def quantize_dequantize(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` on the grid."""
        return backends.quantize_dequantize(input, self.scale, self.offset, self.qmin, self.qmax, self.block_size)

    def to_qnn_encoding_dict(self, encoding_version: str | None = None) -> Any:
        """The encoding as encodings files have it: a list of records (0.6.1), or one record (1.0.0)."""
        return qnn_dict(self, encoding_version or "1.0.0")

    def __repr__(self) -> str:
        return f"AffineEncoding({self.bitwidth} bits, scale {tuple(self.scale.shape)}, {self.granularity})"


def qnn_dict(encoding: AffineEncoding, version: str) -> Any:
    """An encoding in the form of AIMET's files; offsets are those of the unsigned grid there."""
    shift = encoding.qmin if encoding.signed else 0
    lo, hi, scale, offset = (
        t.detach().flatten().tolist() for t in (encoding.min, encoding.max, encoding.scale, encoding.offset + shift)
    )
    if version == "0.6.1":
        return [
            {
                "bitwidth": encoding.bitwidth,
                "dtype": "int",
                "is_symmetric": str(encoding.symmetry),
                "max": h,
                "min": low,
                "offset": int(o),
                "scale": s,
            }
            for low, h, s, o in zip(lo, hi, scale, offset, strict=True)
        ]
    kind = {"pertensor": "PER_TENSOR", "perchannel": "PER_CHANNEL", "blockwise": "PER_BLOCK"}
    record = {
        "bw": encoding.bitwidth,
        "dtype": "INT",
        "enc_type": kind[encoding.granularity],
        "is_sym": encoding.symmetry,
        "offset": [int(o) for o in offset],
        "scale": scale,
    }
    if encoding.block_size is not None:
        record["block_size"] = max(encoding.block_size)
    return record


class VectorEncoding(AffineEncoding):
    """An affine encoding of vectors; its vector fields are kept and not used."""

    def __init__(self, scale: torch.Tensor, offset: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        known = {"rows_per_block", "cols_per_block", "vector_dim", "vector_stride", "index_bw"}
        self.vector = {name: kwargs.pop(name) for name in tuple(kwargs) if name in known}
        super().__init__(scale, offset, *args, **kwargs)


class GroupedBlockEncoding(AffineEncoding):
    """An affine encoding whose block scales are integer multiples of one scale per channel (LPBQ)."""

    def __init__(self, scale: torch.Tensor, offset: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.block_grouping = kwargs.pop("block_grouping", None)
        self.decompressed_bw = kwargs.pop("decompressed_bw", None)
        self.per_channel_scale = kwargs.pop("per_channel_scale", None)
        super().__init__(scale, offset, *args, **kwargs)

    @property
    def per_block_int_scale(self) -> torch.Tensor:
        """How many times the channel's scale a block's scale is."""
        return torch.round(self.scale / self.per_channel_scale)
