"""Weights rounded to float4 in blocks of input channels: MXFP4 and NVFP4."""

from __future__ import annotations

import numpy as np
import torch

from bitwright.core.numerics.affine import power_of_two_scale
from bitwright.core.numerics.formats import FLOAT_FORMATS
from bitwright.errors import FormatError, GranularityError
from bitwright.torch.quantizers import functional

_FLOAT4 = FLOAT_FORMATS["float4_e2m1"]
_NVFP4_BLOCK = 16


def mxfp4_rounded(weight: torch.Tensor, block_size: int = 32) -> torch.Tensor:
    """A weight ``[O, I, ...]`` on the grid of MXFP4, whose blocks of input channels share a power of two.

    Raises:
        GranularityError: blocks that do not divide the input channels.
    """
    _check_blocks(weight, block_size, "mxfp4")
    return _rounded(weight, mxfp4_scales(weight, block_size), block_size)


def nvfp4_rounded(weight: torch.Tensor, scale_q: torch.Tensor, meta_scale: torch.Tensor | float) -> torch.Tensor:
    """A weight ``[O, I, ...]`` on the grid of NVFP4 with given scales.

    Args:
        weight: of a linear layer or a convolution.
        scale_q: float8_e4m3fn, ``[O, I / 16, 1, ...]``: one scale per block of 16.
        meta_scale: what all of them are multiplied by.

    Raises:
        FormatError: scales of another dtype.
        GranularityError: scales of another shape, or blocks that do not divide the input channels.
    """
    if scale_q.dtype != torch.float8_e4m3fn:
        raise FormatError("scale_q", f"it is {scale_q.dtype}", "give the scales as torch.float8_e4m3fn")
    _check_blocks(weight, _NVFP4_BLOCK, "nvfp4")
    wanted = (weight.shape[0], weight.shape[1] // _NVFP4_BLOCK, *(1 for _ in weight.shape[2:]))
    meta = torch.as_tensor(meta_scale, dtype=torch.float32, device=weight.device)
    if tuple(scale_q.shape) != wanted or meta.ndim:
        raise GranularityError(
            "scale_q",
            f"scales of shape {tuple(scale_q.shape)} and a meta scale of shape {tuple(meta.shape)}",
            f"give shape {wanted} and a single number",
        )
    return _rounded(weight, meta * scale_q.to(weight.device, torch.float32), _NVFP4_BLOCK)


def mxfp4_scales(weight: torch.Tensor, block_size: int) -> torch.Tensor:
    """The power of two of every block of ``block_size`` input channels: ``[O, I / block_size, 1, ...]``.

    Reference: OCP Microscaling Formats 1.0, section 6.3; a block of zeros has 1.
    """
    largest = weight.abs().flatten(2).amax(2) if weight.ndim > 2 else weight.abs()
    blocks = largest.reshape(largest.shape[0], -1, block_size).amax(2).double().cpu().numpy()
    scales = power_of_two_scale(np.where(blocks > 0, blocks, 4.0), _FLOAT4)
    shaped = np.asarray(scales, np.float32).reshape(*blocks.shape, *(1,) * (weight.ndim - 2))
    return torch.from_numpy(shaped).to(weight.device)


def _rounded(weight: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    return functional.float_quantize_dequantize(weight, _FLOAT4, scales, (1, size, *weight.shape[2:]))


def _check_blocks(weight: torch.Tensor, size: int, name: str) -> None:
    if size < 1 or weight.shape[1] % size:
        raise GranularityError(
            name, f"blocks of {size} do not divide {weight.shape[1]} input channels", "use another block size or layer"
        )
