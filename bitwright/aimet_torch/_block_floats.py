"""Weights on the grids of block formats (MXFP4, NVFP4) that run as int8 per channel: AIMET's helpers of quantized modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bitwright.aimet_torch._core import mxfp4_scales
from bitwright.aimet_torch.quantization.affine import QuantizeDequantize
from bitwright.aimet_torch.quantization.float import FloatEncoding
from bitwright.errors import FormatError, GranularityError

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NVFP4_BLOCK = 16


def set_weight_quantizer_to_mxfp4_int8(module: nn.Module, params: Any, block_size: int = 32) -> None:
    """Round a module's weight to MXFP4 and give it a symmetric int8 quantizer per channel, for what runs it that way.

    Args:
        module: a Linear or convolution; others without a weight stay as they are.
        params: its ``param_quantizers``.
        block_size: input channels that share a power of two as their scale.

    Raises:
        FormatError: (a ValueError) another kind of layer.
        GranularityError: (a ValueError) blocks that do not divide its input channels.
    """
    weight = _weight_of(module, params, "MXFP4")
    if weight is not None:
        _check_blocks(weight, block_size, "mxfp4")
        _set(module, params, weight, mxfp4_scales(weight.detach(), block_size), block_size)


def set_weight_quantizer_to_nvfp4_int8(
    module: nn.Module, params: Any, scale_q: torch.Tensor, meta_scale: torch.Tensor | float
) -> None:
    """Round a module's weight to NVFP4 with given scales and give it a symmetric int8 quantizer per channel.

    Args:
        module, params: as for :func:`set_weight_quantizer_to_mxfp4_int8`.
        scale_q: float8_e4m3fn, ``(out_channels, in_channels // 16, 1, ...)``: one scale per block of 16.
        meta_scale: what all of them are multiplied by.

    Raises:
        FormatError, GranularityError: as there; or scales of another dtype or shape.
    """
    weight = _weight_of(module, params, "NVFP4")
    if weight is None:
        return
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
    _set(module, params, weight, meta * scale_q.to(weight.device, torch.float32), _NVFP4_BLOCK)


def _weight_of(module: Any, params: Any, name: str) -> torch.Tensor | None:
    weight = getattr(module, "weight", None)
    if weight is None or "weight" not in params:
        return None
    if not isinstance(module, _LAYERS):
        raise FormatError(type(module).__name__, f"{name} is for Linear and convolutions", "leave this module out")
    found: torch.Tensor = weight
    return found


def _check_blocks(weight: torch.Tensor, size: int, name: str) -> None:
    if size < 1 or weight.shape[1] % size:
        raise GranularityError(
            name, f"blocks of {size} do not divide {weight.shape[1]} input channels", "use another block size or layer"
        )


@torch.no_grad()
def _set(module: Any, params: Any, weight: torch.Tensor, scales: torch.Tensor, size: int) -> None:
    grid = FloatEncoding(1, 2, True, False, scales, (1, size, *weight.shape[2:]))
    quantizer = QuantizeDequantize((weight.shape[0], *(1,) * (weight.ndim - 1)), -128, 127, True)
    params["weight"] = quantizer  # first: it refuses where the place has none
    weight.copy_(grid.quantize_dequantize(weight.detach()).as_subclass(torch.Tensor))
