"""Grids, shapes and ranges as AIMET describes them, in our terms; without any framework."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bitwright.core.numerics.affine import choose_qparams, encode, grid, scale_multiples, with_scale
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import (
    FLOAT32_SCALE,
    FloatFormat,
    Format,
    IntFormat,
    ScaleFormat,
    parse_scale_format,
)
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.ranges import find_range_method
from bitwright.core.numerics.spec import Preset, QuantSpec, RangeMethod, activation_spec, weight_spec
from bitwright.core.simulation.sites import Site, SiteMap
from bitwright.errors import ConfigError

__all__ = [
    "FLOAT32_SCALE",
    "Encoding",
    "FloatFormat",
    "Format",
    "Granularity",
    "IntFormat",
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "Preset",
    "QuantSpec",
    "RangeMethod",
    "Site",
    "SiteMap",
    "activation_spec",
    "aimet_blocks",
    "aimet_shape",
    "asked_format",
    "encode",
    "find_range_method",
    "granularity_of",
    "grouped_bits",
    "grouped_scale_format",
    "int_format",
    "range_encoding",
    "scale_multiples",
    "signed_as",
    "steps_format",
    "weight_spec",
]


def int_format(qmin: int, qmax: int) -> IntFormat | None:
    """The integer format whose codes are ``qmin`` to ``qmax``; ``None`` where there is none."""
    bits = int(qmax - qmin + 1).bit_length()
    for width in (bits - 1, bits):
        for signed, narrow in ((False, False), (True, False), (True, True)):
            if 2 <= width <= 32:
                fmt = IntFormat(width, signed, narrow)
                if (fmt.qmin, fmt.qmax) == (qmin, qmax):
                    return fmt
    return None


def steps_format(num_steps: float, *, signed: bool) -> IntFormat | None:
    """The integer format with ``num_steps`` intervals; a power of two counts as one less, as AIMET's examples write it."""
    steps = int(num_steps)
    bits = max(2, (steps - 1).bit_length())
    if steps in ((1 << bits) - 1, 1 << bits):
        return IntFormat(bits, signed)
    return IntFormat(bits, narrow=True) if steps == (1 << bits) - 2 else None


def range_encoding(lo: Any, hi: Any, spec: QuantSpec, granularity: Granularity) -> Encoding:
    """The encoding whose grid ends lie at ``lo`` and ``hi``, as AIMET's ``set_range`` means it.

    :func:`bitwright.core.numerics.affine.encode` instead widens a symmetric range until it holds both bounds.
    """
    if isinstance(spec.format, FloatFormat):
        return encode(lo, hi, spec, granularity)
    fmt = spec.format
    scale, zero_point = choose_qparams(lo, hi, fmt, symmetric=False)
    if spec.symmetry != "asymmetric":
        zero_point = np.full_like(zero_point, (fmt.qmin + fmt.qmax + 1) // 2)
    return with_scale(Encoding(fmt, scale, zero_point, granularity), scale, spec.scale_format)


def grouped_scale_format(bitwidth: int, decompressed_bw: int, site: str) -> ScaleFormat:
    """What block scales of LPBQ are stored as: multiples of ``decompressed_bw - bitwidth`` bits of one number per channel.

    Raises:
        ConfigError: multiples of this width are not supported.
    """
    bits = int(decompressed_bw) - int(bitwidth)
    if not 2 <= bits <= 12:
        raise ConfigError(
            site,
            f"LPBQ with bitwidth={bitwidth} and decompressed_bw={decompressed_bw} has multiples of {bits} bits",
            "choose decompressed_bw 2 to 12 above bitwidth, for example 8 for 4",
        )
    return parse_scale_format(f"uint{bits}")


def grouped_bits(scale_format: ScaleFormat) -> int | None:
    """Bits of the multiples where scales are stored as LPBQ has them; else ``None``."""
    multiples = scale_format.multiples
    return multiples.bits if scale_format.shared == "channel" and multiples is not None else None


def asked_format(spec: QuantSpec) -> Format:
    """The grid that ``spec`` makes of its format for a range that reaches below zero."""
    return grid(spec.format, spec.symmetry, -1.0)


def signed_as(encoding: Encoding, signed: bool) -> Encoding:
    """``encoding`` on the signed or the unsigned grid of its width: the same numbers under other codes."""
    fmt = encoding.format
    if isinstance(fmt, FloatFormat) or fmt.signed == signed or fmt.narrow:
        return encoding
    moved = replace(fmt, signed=signed)
    shift = moved.qmin - fmt.qmin
    return replace(encoding, format=moved, zero_point=encoding.zero_point + shift)


def granularity_of(
    params: tuple[int, ...], block_size: tuple[int, ...] | None, shape: tuple[int, ...]
) -> Granularity | None:
    """Our granularity for parameters of AIMET's shape on a tensor of ``shape``; ``None`` where we have none for it."""
    if int(np.prod(params)) == 1 and not block_size:
        return PerTensor()
    if len(params) != len(shape) or any(n < p or n % p for n, p in zip(shape, params, strict=True)):
        return None
    many = [axis for axis, count in enumerate(params) if count > 1]
    blocked = [axis for axis in many if shape[axis] > params[axis]]
    whole = tuple(axis for axis in many if axis not in blocked)
    if len(blocked) == 1:
        (axis,) = blocked
        return PerBlock(shape[axis] // params[axis], axis, whole)
    if blocked:
        return None
    if block_size is not None:
        return _of_one_block(block_size, shape, whole)
    return PerChannel(whole[0]) if len(whole) == 1 else None


def _of_one_block(block_size: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> Granularity | None:
    """Where the block is as long as its axis, which AIMET writes as -1."""
    if len(whole) < 2:
        return PerChannel(whole[0]) if whole else PerTensor()
    size = next((n for n, b in zip(shape, block_size, strict=True) if b in (-1, n) and n > 1), 0)
    axis = next((axis for axis, n in enumerate(shape) if axis not in whole and n == size), None)
    return PerBlock(size, axis, whole) if size and axis is not None else None


def aimet_shape(granularity: Granularity, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the parameters as AIMET has it."""
    if isinstance(granularity, PerChannel):
        return granularity.broadcast_shape(shape)
    return granularity.param_shape(shape)


def aimet_blocks(granularity: Granularity, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """AIMET's block size, one number per axis; ``None`` without blocks."""
    if not isinstance(granularity, PerBlock):
        return None
    return tuple(n // p for n, p in zip(shape, granularity.param_shape(shape), strict=True))
