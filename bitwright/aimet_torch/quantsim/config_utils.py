"""``aimet_torch.quantsim.config_utils``: other quantizers for many modules at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bitwright.aimet_torch.quantization.affine import GroupedBlockQuantizeDequantize, QuantizeDequantize
from bitwright.aimet_torch.quantization.float import FloatQuantizeDequantize
from bitwright.errors import ConfigError, GranularityError

__all__ = [
    "set_activation_quantizers_to_float",
    "set_blockwise_quantization_for_weights",
    "set_grouped_blockwise_quantization_for_weights",
]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _chosen(sim: Any, arg: Any) -> Iterator[tuple[str, Any]]:
    """The modules of a simulation that ``arg`` means: types, modules, or a condition."""
    condition = _condition(arg)
    return ((name, module) for name, module in sim.named_qmodules() if condition(module))


def _condition(arg: Any) -> Callable[[nn.Module], bool]:
    several = list(arg) if isinstance(arg, (list, tuple, set)) else [arg]
    if all(isinstance(item, type) for item in several):
        kinds = tuple(several)
        return lambda module: isinstance(module, kinds)
    if all(isinstance(item, nn.Module) for item in several):
        wanted = {id(module) for module in several}
        return lambda module: id(module) in wanted
    if callable(arg):
        condition: Callable[[nn.Module], bool] = arg
        return condition
    raise ConfigError("arg", f"{arg!r} names no modules", "give module types, modules of sim.model, or a condition")


def set_activation_quantizers_to_float(
    sim: Any,
    arg: Any,
    exponent_bits: int | None = None,
    mantissa_bits: int | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Make the input and output quantizers that are in effect float.

    Args:
        arg: types of modules, modules of ``sim.model``, or a condition on a module.
        exponent_bits, mantissa_bits: of the format; or its ``dtype``.
    """
    for _, module in _chosen(sim, arg):
        for quantizers in (module.input_quantizers, module.output_quantizers):
            for index, quantizer in enumerate(quantizers):
                if quantizer is not None:
                    quantizers[index] = FloatQuantizeDequantize(exponent_bits, mantissa_bits, dtype=dtype)


def _blocks(name: str, module: nn.Module, block_size: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of the scale, and block sizes axis by axis, for a weight."""
    weight: Any = module.weight
    transposed = isinstance(module, _TRANSPOSED)
    out_axis, in_axis = (1, 0) if transposed else (0, 1)
    if isinstance(block_size, int):
        sizes = [-1] * weight.dim()
        sizes[out_axis], sizes[in_axis] = 1, block_size
    else:
        sizes = list(block_size)
        if len(sizes) != weight.dim():
            raise GranularityError(
                f"{name}.weight", f"block_size {block_size} for a weight of shape {tuple(weight.shape)}",
                "give one size per axis",
            )  # fmt: skip
    whole = [n if size == -1 else size for n, size in zip(weight.shape, sizes, strict=True)]
    for axis, (n, size) in enumerate(zip(weight.shape, whole, strict=True)):
        if n % size:
            raise GranularityError(
                f"{name}.weight", f"axis {axis} has {n} elements, which blocks of {size} do not divide",
                "choose a size that divides it, or leave the layer out of arg",
            )  # fmt: skip
    return tuple(n // size for n, size in zip(weight.shape, whole, strict=True)), tuple(whole)


def _weights(sim: Any, arg: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in _chosen(sim, arg) if module.param_quantizers.get("weight") is not None]


def set_blockwise_quantization_for_weights(sim: Any, arg: Any, bitwidth: int, symmetric: bool, block_size: Any) -> None:
    """Give weights one scale per block.

    Args:
        arg: types of modules, modules of ``sim.model``, or a condition on a module.
        block_size: elements per block along the input channels; or one size per axis, ``-1`` for a whole axis.

    Raises:
        GranularityError: blocks that do not divide a weight; nothing is changed.
    """
    shapes = [(module, *_blocks(name, module, block_size)) for name, module in _weights(sim, arg)]
    for module, shape, blocks in shapes:
        module.param_quantizers["weight"] = QuantizeDequantize(shape, bitwidth, symmetric, block_size=blocks)


def set_grouped_blockwise_quantization_for_weights(
    sim: Any, arg: Any, bitwidth: int, symmetric: bool, decompressed_bw: int, block_size: Any, block_grouping: Any = -1
) -> None:
    """Give weights one scale per block that is an integer multiple of one per channel (LPBQ).

    Args:
        arg, block_size: as for :func:`set_blockwise_quantization_for_weights`.
        decompressed_bw: bits of code times multiple.
        block_grouping: blocks per channel's scale; ``-1``, all, is the only one.

    Raises:
        ConfigError: a ``block_grouping`` of less than all blocks, or widths without a scale format; nothing is changed.
        GranularityError: blocks that do not divide a weight; nothing is changed.
        ValueError: not symmetric.
    """
    made = []
    for name, module in _weights(sim, arg):
        shape, blocks = _blocks(name, module, block_size)
        grouping = block_grouping
        if isinstance(block_grouping, int):
            blocked = 0 if isinstance(module, _TRANSPOSED) else 1
            grouping = tuple(block_grouping if axis == blocked else 1 for axis in range(len(shape)))
        quantizer = GroupedBlockQuantizeDequantize(
            shape, bitwidth, symmetric, decompressed_bw, block_size=blocks, block_grouping=grouping
        )
        module.param_quantizers["weight"].check(quantizer)
        made.append((module, quantizer))
    for module, quantizer in made:
        module.param_quantizers["weight"] = quantizer
