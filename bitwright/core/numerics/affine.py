"""The reference arithmetic: range -> scale and zero point -> codes -> values.

Every faster path elsewhere is tested against these functions bit for bit. They take numpy arrays and torch
tensors and give the same bits for both, because only divide, round, add, clip and multiply occur, each
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bitwright.core.numerics.arrays import (
    Array,
    as_array,
    cast,
    dtype_name,
    is_floating,
    is_torch,
    like,
    namespace,
    padded,
    rint,
    to_numpy,
)
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import (
    FLOAT32_SCALE,
    FLOAT_FORMATS,
    FloatFormat,
    Format,
    IntFormat,
    ScaleFormat,
    largest_code,
)
from bitwright.core.numerics.granularity import PER_TENSOR, Granularity, PerBlock, PerChannel, PerToken
from bitwright.core.numerics.spec import QuantSpec, Symmetry
from bitwright.errors import RangeError

Float64s = NDArray[np.float64]

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)
_BITS_OF_LOWEST_CODE = 3  # symmetric grids up to this width use their lowest code
_PIECE = 1 << 17  # elements that are quantized at once: a few arrays of them fit into a core's cache


def grid(fmt: Format, symmetry: Symmetry, lo: ArrayLike) -> Format:
    """The grid of ``fmt`` under ``symmetry``, given the lower bounds ``lo`` of the range.

    ======================  ==============================================================
    symmetry                integer grid
    ======================  ==============================================================
    ``asymmetric``          as given
    ``symmetric``           signed, of the same width
    ``strict_symmetric``    signed without its lowest code
    ``unsigned_symmetric``  unsigned if no bound is negative, else signed
    ``float_zero_point``    as given
    ======================  ==============================================================

    Float formats are symmetric by nature and stay as they are.

    >>> [grid(IntFormat(8), "unsigned_symmetric", lo).name for lo in (0.0, -1.0)]
    ['uint8', 'int8']
    """
    if isinstance(fmt, FloatFormat) or symmetry in ("asymmetric", "float_zero_point"):
        return fmt
    if symmetry == "strict_symmetric":
        return IntFormat(fmt.bits, narrow=True)
    if symmetry == "unsigned_symmetric" and bool((np.asarray(lo) >= 0).all()):
        return IntFormat(fmt.bits, signed=False)
    return replace(fmt, signed=True)


def choose_qparams(
    lo: ArrayLike,
    hi: ArrayLike,
    fmt: Format,
    *,
    symmetric: bool,
    site: str = "tensor",
    scale_format: ScaleFormat = FLOAT32_SCALE,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Map the range ``[lo, hi]`` onto the grid of ``fmt``.

    The range is widened to contain zero, so that zero padding stays exact. An empty range gets scale 1, or,
    among several channels, the largest scale of the others. The arithmetic is float64; the scale is rounded
    to float32, and to the number format of ``scale_format``, before the zero point is taken, so that both describe one
    grid.

    - asymmetric: ``scale = (hi - lo) / steps``, ``zero_point = clip(rint(qmin - lo / scale), qmin, qmax)``;
    - symmetric, signed: ``scale = max(hi / qmax, lo / qmin)``, zero point 0; the grid has one code more below
      zero, so a range that is only negative may use it;
    - the same with 2 or 3 bits, where the range has a negative part: ``scale = max(-lo, hi) / -qmin``, so that the lowest
      code is used whichever end is the farther one; the largest positive value is clipped. Weights of normal distribution
      have 3 to 5 dB less noise with 2 bits, and 1 to 2 dB with 3 bits, than where nothing is clipped;
    - symmetric, unsigned: ``scale = hi / qmax``, zero point 0;
    - float formats: ``scale = max(-lo, hi) / fmt.max`` if scaled, else 1.

    The scale is never below the smallest normal float32 (below it hardware may flush to zero), nor so large
    that the ends of the grid overflow float32; bounds beyond float32 count as its largest number.

    Args:
        lo, hi: bounds, both of parameter shape P (see ``Granularity.param_shape``).
        fmt: the grid.
        symmetric: keep the zero point at code 0.
        site: name for error messages.
        scale_format: what scales are stored as; multiples of a shared number are left to :func:`with_scale`.

    Returns:
        ``scale``, shape P, float32, > 0, input units per step; ``zero_point``, shape P, int64, within
        ``[qmin, qmax]``.

    Raises:
        RangeError: a bound is NaN or infinite, ``lo > hi``, or a symmetric unsigned grid is asked to hold
            negative numbers; the message names the first such index.

    Example:
        >>> choose_qparams([-1.0], [3.0], IntFormat(8, signed=False), symmetric=False)[1]
        array([64])

    Reference: Jacob et al. 2018, arXiv:1712.05877, eq. 1; signs and rounding as in ONNX QuantizeLinear.
    """
    lower, upper = checked_bounds(lo, hi, site)
    empty = (lower == 0) & (upper == 0)
    zero_point = np.zeros(lower.shape)
    scale: Float64s
    if isinstance(fmt, FloatFormat):
        scale = np.maximum(-lower, upper) / fmt.max if fmt.scaled else np.ones(lower.shape)
        reach = np.full(lower.shape, fmt.max)
        return _finish(scale, empty, reach, scale_format), zero_point.astype(np.int64)
    if not symmetric:
        ones = np.ones(lower.shape)
        scale = _finish((upper - lower) / fmt.steps, empty, ones, scale_format).astype(np.float64)
        zero_point = np.clip(np.rint(fmt.qmin - lower / scale), fmt.qmin, fmt.qmax)
    elif fmt.signed:
        few = fmt.bits <= _BITS_OF_LOWEST_CODE and not fmt.narrow
        most = np.where((lower < 0) & few, -fmt.qmin, fmt.qmax)
        scale = np.maximum(upper / most, lower / fmt.qmin)
    else:
        problem = f"has a negative part, which the symmetric {fmt.name} grid lacks"
        _refuse(lower < 0, lower, upper, site, problem)
        scale = upper / fmt.qmax
    reach = np.maximum(fmt.qmax - zero_point, zero_point - fmt.qmin)
    return _finish(scale, empty, reach, scale_format), np.asarray(zero_point).astype(np.int64)


def _stored_numbers(scale: ArrayLike, scale_format: ScaleFormat) -> NDArray[np.float32]:
    """Float32 ``scale`` rounded to the numbers that ``scale_format`` has, none of which becomes zero."""
    number, scale = scale_format.number, np.asarray(scale, np.float32)
    if number is None:
        return scale
    stored: NDArray[np.float32] = round_to_float(scale, number)
    return np.maximum(stored, max(number.step, _FLOAT32_TINY)).astype(np.float32)


def checked_bounds(lo: ArrayLike, hi: ArrayLike, site: str = "tensor") -> tuple[Float64s, Float64s]:
    """``lo`` and ``hi`` in float64, widened to contain zero and cut to the range of float32.

    Raises:
        RangeError: a bound is NaN or infinite, or ``lo > hi``; the message names the first such index.
    """
    lower, upper = np.broadcast_arrays(np.asarray(lo, np.float64), np.asarray(hi, np.float64))
    _refuse(~(np.isfinite(lower) & np.isfinite(upper)), lower, upper, site, "is not finite")
    _refuse(lower > upper, lower, upper, site, "has its bounds exchanged")
    return np.clip(lower, -_FLOAT32_MAX, 0), np.clip(upper, 0, _FLOAT32_MAX)


def _refuse(bad: NDArray[np.bool_], lo: Float64s, hi: Float64s, site: str, problem: str) -> None:
    if not bad.any():
        return
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    where = f" of index {index if len(index) > 1 else index[0]}" if index else ""
    raise RangeError(
        site,
        f"the range{where}, lo={float(lo[index])!r} to hi={float(hi[index])!r}, {problem}",
        "find the operator that produced these values, leave the site in float, or give it a fixed range",
    )


def _finish(
    scale: Float64s, empty: NDArray[np.bool_], reach: Float64s, scale_format: ScaleFormat
) -> NDArray[np.float32]:
    """Give empty ranges a scale, and round scales to normal float32 numbers that are stored and finite times ``reach``."""
    largest = float(np.max(scale, where=~empty, initial=0.0))
    scale = np.where(empty, largest or 1.0, scale)
    rounded = np.maximum(scale, _FLOAT32_TINY).astype(np.float32)
    limit = _FLOAT32_MAX / reach
    floor = limit.astype(np.float32)
    floor = np.where(floor > limit, np.nextafter(floor, np.float32(0)), floor)
    return _stored_numbers(np.minimum(rounded, floor), scale_format)


def encode(
    lo: ArrayLike, hi: ArrayLike, spec: QuantSpec, granularity: Granularity = PER_TENSOR, site: str = "tensor"
) -> Encoding:
    """The encoding of the range ``[lo, hi]`` under ``spec``.

    The ends that ``spec.fixed_range`` gives take the place of ``lo`` and ``hi``; an end that is still
    calibrated then moves, if it must, so as not to pass the fixed one.

    Args:
        lo, hi: bounds, both of parameter shape P of ``granularity`` for the tensor.
        spec: format, symmetry and fixed range asked for.
        granularity: concrete (axes filled in).
        site: name for error messages.

    Raises:
        RangeError: see :func:`choose_qparams`.

    Example:
        >>> encode(-1.0, 2.0, QuantSpec(IntFormat(8)))
        Encoding(int8, scale=0.015748, zero_point=0)
    """
    lower, upper = _fixed(np.asarray(lo, np.float64), np.asarray(hi, np.float64), spec.fixed_range)
    fmt = grid(spec.format, spec.symmetry, lower)
    if spec.symmetry == "float_zero_point" and isinstance(fmt, IntFormat):
        lower = np.minimum(lower, 0.0) if spec.scale_format.offsets else lower  # offsets that are stored have no sign
        scale, zero_point, shift = choose_float_zero_point(lower, np.maximum(lower, upper), fmt, site)
        free = Encoding(fmt, scale, zero_point, granularity, shift=shift)
        return free if spec.scale_format == FLOAT32_SCALE else with_scale(free, scale, spec.scale_format)
    if spec.scale_format.name == "e8m0":  # decided on the exact bounds: at a power of two, rounding would matter
        lower, upper = checked_bounds(lower, upper, site)
        powers = power_of_two_scale(np.maximum(-lower, upper), fmt)
        upper = np.where((lower == 0) & (upper == 0), 0.0, powers * largest_code(fmt))
        lower = np.where(lower < 0, -upper, 0.0)
    symmetric, stored = spec.symmetry != "asymmetric", spec.scale_format
    scale, zero_point = choose_qparams(lower, upper, fmt, symmetric=symmetric, site=site, scale_format=stored)
    return with_scale(Encoding(fmt, scale, zero_point, granularity), scale, spec.scale_format)


def choose_float_zero_point(
    lo: ArrayLike, hi: ArrayLike, fmt: IntFormat, site: str = "tensor"
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Map the range ``[lo, hi]`` onto the grid of ``fmt`` so that its ends are those of the grid; zero may lie outside.

    Args:
        lo, hi: bounds, both of parameter shape P.
        fmt: the grid, unsigned.
        site: name for error messages.

    Returns:
        ``scale``, float32; ``zero_point``, int64, within ``[qmin, qmax]``; what the zero point is above it, float32: up to half
        a step, and more where zero lies beyond the grid. A range of one number has this number as its first code.

    Raises:
        RangeError: a bound is NaN or infinite, or ``lo > hi``.

    >>> choose_float_zero_point([-1.0, 1.0], [2.0, 1.0], IntFormat(2, signed=False))
    (array([1., 1.], dtype=float32), array([1, 0]), array([ 0., -1.], dtype=float32))

    Reference: Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models".
    """
    lower, upper = np.broadcast_arrays(np.asarray(lo, np.float64), np.asarray(hi, np.float64))
    checked_bounds(lower, upper, site)
    lower, upper = (
        np.clip(end, -_FLOAT32_MAX * (1 - 2.0**-12), _FLOAT32_MAX * (1 - 2.0**-12)) for end in (lower, upper)
    )
    one = upper == lower
    size = np.where(lower == 0, 1.0, np.abs(lower))
    # zero may be so far away that codes near it would be lost in float32: the grid is made wider, at most a millionth of that
    scale = np.where(one, size, np.maximum((upper - lower) / fmt.steps, size * 2.0**-20))
    scale = np.maximum(scale, _FLOAT32_TINY).astype(np.float32)
    zero = (fmt.qmin - lower / scale.astype(np.float64)).astype(np.float32)
    return scale, *split_zero_point(zero, fmt)


def split_zero_point(zero: ArrayLike, fmt: IntFormat) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Real zero points as the nearest codes of the grid, and what they are above these: ``zero_point`` and ``shift``."""
    real = np.asarray(zero)
    whole = np.clip(np.rint(real), fmt.qmin, fmt.qmax)
    return whole.astype(np.int64), (real - whole).astype(np.float32)


def power_of_two_scale(largest: ArrayLike, fmt: Format) -> Float64s:
    """The shared scale that the OCP Microscaling Formats give a block: ``2 ** (floor(log2(largest)) - emax)``.

    Args:
        largest: magnitude of the block, >= 0.
        fmt: of its elements; ``emax`` is the exponent of the largest number (2 for e2m1, 8 for e4m3). An integer
            element counts in codes, so that MXINT8's implied ``2 ** -6`` is part of the scale.

    Returns:
        A power of two from ``2 ** -126``, the smallest normal float32, to ``2 ** 127``. Values of the block above
        ``largest_code(fmt)`` times it saturate, as the text says.

    Example:
        >>> power_of_two_scale([6.0, 7.9, 8.0], FLOAT_FORMATS["float4_e2m1"])
        array([1., 1., 2.])

    Reference: OCP Microscaling Formats (MX) Specification 1.0, section 6.3.
    """
    _, exponent = np.frexp(np.asarray(largest, np.float64))
    _, emax = np.frexp(largest_code(fmt))
    return np.asarray(np.ldexp(1.0, np.clip(exponent - emax, -126, 127).astype(np.int32)), np.float64)


def with_scale(encoding: Encoding, scale: ArrayLike, scale_format: ScaleFormat | None = None) -> Encoding:
    """``encoding`` with other scales, each rounded to the nearest number of its scale format.

    Args:
        encoding: format, zero point and granularity stay.
        scale: > 0, of the shape of ``encoding.scale``.
        scale_format: another one than that of ``encoding``.

    Returns:
        ``float16`` and ``bfloat16`` round to the nearest number, ties to even, saturating; none becomes zero.
        For ``e8m0`` the largest magnitude keeps its place, see :func:`power_of_two_scale`. For ``e4m3`` the largest scale
        of the tensor becomes 448 of ``common``, and none becomes zero. For ``uint4`` the largest of a channel becomes 16 of
        ``common``, and none less than 1; for ``q6_k`` and alike the largest of the blocks that share a number, as nearly as that
        number is one of float16, and ``common`` has the shape of the scales. The product of a multiple and ``common`` is
        rounded to float32 once, as runtimes compute it. Zero points that are real numbers become those whose product with the
        scale ``scale_format`` can store, where it stores such products.
    """
    fmt = encoding.scale_format if scale_format is None else scale_format
    scale = np.asarray(scale, np.float32)
    if fmt.name == "e8m0":
        scale = power_of_two_scale(scale.astype(np.float64) * largest_code(encoding.format), encoding.format)
        return replace(encoding, scale=scale.astype(np.float32), scale_format=fmt, common=None)
    if fmt.multiples is None:
        return replace(encoding, scale=_stored_numbers(scale, fmt), scale_format=fmt, common=None)
    axis = encoding.granularity.axis if isinstance(encoding.granularity, PerBlock) else None
    if fmt.shared == "blocks" and axis is not None:
        largest = _largest_of_blocks(scale, fmt, axis)
    elif fmt.shared == "tensor" or axis is not None:
        largest = scale.max(axis=None if fmt.shared == "tensor" else axis, keepdims=True)
    else:
        largest = scale
    common = np.maximum(largest / np.float64(fmt.largest_multiple), _FLOAT32_TINY).astype(np.float32)
    common = common if fmt.number is None else _stored_numbers(common, fmt)
    multiples = _nearest_multiples(scale.astype(np.float64) / common, fmt)
    made = replace(encoding, scale=multiples * common, scale_format=fmt, common=common)
    return made if encoding.shift is None else _with_offset(made, scale)


def _largest_of_blocks(values: NDArray[Any], fmt: ScaleFormat, axis: int) -> NDArray[Any]:
    """The largest of every ``fmt.count`` neighbours along ``axis``, in the shape of ``values``."""
    starts = np.arange(0, values.shape[axis], fmt.count)
    largest: NDArray[Any] = np.maximum.reduceat(values, starts, axis)
    return largest.repeat(fmt.count, axis).take(range(values.shape[axis]), axis)


def stored_offset(offset: ArrayLike, fmt: ScaleFormat, axis: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Offsets as multiples of a float16 number that ``fmt.count`` neighbours along ``axis`` share.

    Args:
        offset: scale times zero point, of the shape of the scales; negative ones become 0.
        fmt: with ``offsets``, the largest multiple.
        axis: of the blocks.

    Returns:
        The multiples, 0 to ``fmt.offsets``, and the number, both of the shape of ``offset``; the offset is their product.
    """
    assert fmt.number is not None
    wanted = np.maximum(np.asarray(offset, np.float64), 0.0)
    common = _stored_numbers(_largest_of_blocks(wanted, fmt, axis) / fmt.offsets, fmt)
    return np.clip(np.rint(wanted / common), 0, fmt.offsets).astype(np.float32), common


def _with_offset(encoding: Encoding, scale: NDArray[Any]) -> Encoding:
    """``encoding`` with zero points whose products with its scales are the stored numbers nearest to theirs with ``scale``."""
    fmt, granularity = encoding.format, encoding.granularity
    assert isinstance(fmt, IntFormat) and isinstance(granularity, PerBlock) and granularity.axis is not None
    offset = scale.astype(np.float64) * encoding.zero.astype(np.float64)
    multiples, common = stored_offset(offset, encoding.scale_format, granularity.axis)
    zero = ((multiples * common).astype(np.float64) / encoding.scale).astype(np.float32)
    zero_point, shift = split_zero_point(zero, fmt)
    return replace(encoding, zero_point=zero_point, shift=shift)


def with_stored_scale(encoding: Encoding, scale: ArrayLike) -> Encoding:
    """:func:`with_scale` for scales that are stored already, which keep the number that they are multiples of."""
    same = replace(encoding, scale=np.asarray(scale, np.float32))
    if not _has_stored_scales(same):
        return with_scale(encoding, scale)
    free = same.shift is not None and same.scale_format.offsets > 0
    return _with_offset(same, same.scale) if free else same


def stored_scale(scale: Array, scale_format: ScaleFormat, common: Array | None = None) -> Array:
    """The numbers of ``scale_format`` nearest to ``scale``, for a given common factor.

    Other than :func:`with_scale`, which makes room for the largest scale, this is a function of each scale alone, so that a
    method may ask what a scale that it is about to choose will be.

    Args:
        scale: > 0, numpy array or torch tensor, float32.
        scale_format: of the encoding.
        common: float32, broadcasting against ``scale``, of formats that have multiples of one number.

    Returns:
        Like ``scale``; of ``e8m0`` the power of two that is nearest in the logarithm.

    >>> from bitwright.core.numerics.formats import SCALE_FORMATS
    >>> stored_scale(np.float32([0.3, 0.36]), SCALE_FORMATS["e8m0"])
    array([0.25, 0.5 ], dtype=float32)
    """
    xp = namespace(scale)
    if scale_format.name == "e8m0":
        return cast(xp.exp2(rint(xp.log2(cast(scale, "float64")))), "float32")
    number, multiples = scale_format.number, scale_format.multiples
    if number is not None and multiples is None:
        return cast(xp.clip(round_to_float(scale, number), max(number.step, _FLOAT32_TINY), None), "float32")
    if multiples is None:
        return scale
    ratio = cast(scale, "float64") / common
    if isinstance(multiples, IntFormat):
        return cast(xp.clip(rint(ratio), 1, scale_format.largest_multiple), "float32") * common
    return cast(xp.clip(round_to_float(ratio, multiples), multiples.step, None), "float32") * common


@cache
def format_numbers(fmt: FloatFormat) -> NDArray[np.float32]:
    """All numbers of a float format in ascending order.

    >>> format_numbers(FLOAT_FORMATS["float4_e2m1"])[7:]
    array([0. , 0.5, 1. , 1.5, 2. , 3. , 4. , 6. ], dtype=float32)
    """
    if fmt.codebook:
        return np.array(fmt.codebook, np.float32)
    pattern = np.arange(1 << (fmt.bits - 1))
    exponent, mantissa = pattern >> fmt.mantissa_bits, pattern & ((1 << fmt.mantissa_bits) - 1)
    lead = np.where(exponent == 0, 0.0, 1.0) + mantissa * 2.0**-fmt.mantissa_bits
    numbers = np.ldexp(lead, np.maximum(exponent - fmt.bias, fmt.min_exponent))
    numbers = numbers[numbers <= fmt.max]
    return np.concatenate((-numbers[:0:-1], numbers)).astype(np.float32)


def scale_multiples(encoding: Encoding) -> NDArray[np.float32] | None:
    """The stored multiple of ``encoding.common`` for each scale, in the shape of ``encoding.scale``.

    ``None`` where each scale is stored as itself. The float32 product of the two is ``encoding.scale``.
    """
    if encoding.common is None or encoding.scale_format.multiples is None:
        return None
    return _nearest_multiples(encoding.scale.astype(np.float64) / encoding.common, encoding.scale_format)


def is_sayable(encoding: Encoding) -> bool:
    """Whether the scale format of ``encoding`` represents its scales, and the offsets of its real zero points."""
    stores_offsets = encoding.shift is not None and encoding.scale_format.offsets > 0
    return _has_stored_scales(encoding) and (not stores_offsets or _has_stored_offsets(encoding))


def _has_stored_scales(encoding: Encoding) -> bool:
    if encoding.scale_format.name == "e8m0":
        return bool((np.frexp(encoding.scale)[0] == 0.5).all())
    multiples = scale_multiples(encoding)
    if multiples is None or encoding.common is None:
        return np.array_equal(_stored_numbers(encoding.scale, encoding.scale_format), encoding.scale)
    return np.array_equal(multiples * encoding.common, encoding.scale)


def _has_stored_offsets(encoding: Encoding) -> bool:
    """Whether the products of scales and zero points are numbers that the scale format stores."""
    kept = _with_offset(encoding, encoding.scale).zero
    return bool(np.allclose(kept, encoding.zero, rtol=2.0**-22, atol=2.0**-22))


def recognized(encoding: Encoding, scale_format: ScaleFormat) -> Encoding:
    """``encoding`` with ``scale_format``, if that represents its scales; files of other tools store only the product."""
    if encoding.scale_format != FLOAT32_SCALE or scale_format == FLOAT32_SCALE:
        return encoding
    stored = with_scale(encoding, encoding.scale, scale_format)
    return stored if np.array_equal(stored.scale, encoding.scale) else encoding


def _nearest_multiples(ratio: Float64s, fmt: ScaleFormat) -> NDArray[np.float32]:
    assert fmt.multiples is not None
    if isinstance(fmt.multiples, IntFormat):
        return np.clip(np.rint(ratio), 1, fmt.largest_multiple).astype(np.float32)
    rounded: Float64s = round_to_float(ratio, fmt.multiples)
    return np.maximum(rounded, fmt.multiples.step).astype(np.float32)


def _fixed(
    lo: Float64s, hi: Float64s, fixed_range: tuple[float | None, float | None] | None
) -> tuple[Float64s, Float64s]:
    low_end, high_end = fixed_range or (None, None)
    if low_end is not None:
        lo = np.full_like(lo, low_end)
        hi = np.maximum(hi, lo) if high_end is None else hi
    if high_end is not None:
        hi = np.full_like(hi, high_end)
        lo = np.minimum(lo, hi) if low_end is None else lo
    return lo, hi


def quantize(x: Array, enc: Encoding) -> Array:
    """Codes of ``x``: ``clip(rint(x / scale) + zero_point, qmin, qmax)``, ties to even.

    Of zero points that are real numbers: ``clip(rint(x / scale + zero), qmin, qmax)``.

    The arithmetic is float32, as in ONNX QuantizeLinear; it is float64 for float64 input and for grids of
    more than 16 bits, whose codes float32 cannot tell apart. Infinities saturate; NaN has no code and becomes
    ``qmin``.

    Args:
        x: numpy array or torch tensor, any floating dtype.
        enc: encoding whose granularity fits ``x``.

    Returns:
        Shape of ``x``. Integer formats: the smallest integer dtype that holds the grid (torch: int32 for
        unsigned 16 bits and int64 for unsigned 32, where its own unsigned types lack operators). Float
        formats: ``x / scale`` rounded to the format, float32 (float64 for float64 input); NaN stays NaN.

    Example:
        >>> enc = Encoding(IntFormat(8), np.float32(0.5), np.int32(0))
        >>> quantize(np.float32([0.25, 0.75, -100]), enc)
        array([   0,    2, -128], dtype=int8)
    """
    x = as_array(x)
    if enc.dynamic:
        return quantize_at_run_time(x, enc)[0]
    if _is_large(x, enc):
        return _in_pieces(quantize, x, enc)
    codes = _codes(x, enc).reshape(x.shape)
    if isinstance(enc.format, FloatFormat):
        return codes
    if is_torch(codes):
        codes = codes.nan_to_num_(enc.format.qmin)
    else:
        codes = np.where(np.isnan(codes), enc.format.qmin, codes)
    return cast(codes, storage_dtype(enc.format, torch=is_torch(x)))


def dequantize(q: Array, enc: Encoding, dtype: Any = "float32") -> Array:
    """Values of the codes ``q``: ``(q - zero_point) * scale``.

    Args:
        q: codes as :func:`quantize` returns them, or any integer array.
        enc: the encoding they were made with.
        dtype: of the result; ``"float64"`` also computes in float64, half types are computed in float32.

    Example:
        >>> dequantize(np.int8([-2, 3]), Encoding(IntFormat(8), np.float32(0.5), np.int32(1)))
        array([-1.5,  1. ], dtype=float32)
    """
    q = as_array(q)
    view = q.reshape(enc.granularity.view_shape(tuple(q.shape)))
    return _narrowed(_values(view, q, enc, wide="float64" in str(dtype)).reshape(q.shape), dtype)


def fake_quantize(x: Array, enc: Encoding) -> Array:
    """``x`` after a round trip through the grid: equal to ``dequantize(quantize(x))`` bit for bit.

    Equal also to ONNX QuantizeLinear followed by DequantizeLinear, except that NaN stays NaN. Values within
    the range move by at most half a step. Adding the zero point turns the ``-0.0`` of a small negative number
    into ``0.0``, also where the zero point is 0.

    Args:
        x: numpy array or torch tensor; float16 and bfloat16 are computed in float32 and cast back.
        enc: encoding whose granularity fits ``x``.

    Returns:
        Shape and dtype of ``x`` (float32 for integer input), without gradients.

    Example:
        >>> fake_quantize(np.float32([0.3, 70]), Encoding(IntFormat(8), np.float32(0.5), np.int32(0)))
        array([ 0.5, 63.5], dtype=float32)
    """
    x = as_array(x)
    if enc.dynamic:
        codes, scale, zero_point, restore = _chosen_at_run_time(x, enc)
        return _narrowed(restore((codes - zero_point) * scale), x.dtype if is_floating(x) else "float32")
    if _is_large(x, enc):
        return _in_pieces(fake_quantize, x, enc)
    values = _values(_codes(x, enc), x, enc, wide=dtype_name(x) == "float64").reshape(x.shape)
    return _narrowed(values, x.dtype if is_floating(x) else "float32")


def quantize_at_run_time(x: Array, enc: Encoding) -> tuple[Array, Array, Array]:
    """Codes of ``x`` with a scale and zero point computed from ``x``, in float32.

    - signed integers: ``scale = max|x| / qmax``, codes ``rint(x * (qmax / max|x|))`` from ``-qmax`` to ``qmax``: what ONNX
      Runtime's MatMulNBits computes at accuracy level 4 and llama.cpp as Q8_0 on x86, whose scales are then rounded to
      float16 (``enc.scale_format``), while the codes are those of the scale that is not rounded;
    - centred ones (``int8c``): ``scale = max|x| / 127.5``, codes ``rint(x / scale)`` from -128 to 127, as compressed-tensors
      computes them;
    - unsigned integers: as ONNX DynamicQuantizeLinear, whose zero point is that of a range widened to contain zero;
    - float formats: ``scale = max|x| / fmt.max``, or the power of two of OCP MX where scales are stored as ``e8m0``; codes are
      ``x / scale`` rounded to the format.

    Args:
        x: numpy array or torch tensor.
        enc: dynamic; its granularity says which elements are looked at together.

    Returns:
        Codes of the shape of ``x`` as :func:`quantize` gives them; scale and zero point with 1 in place of the elements
        that share them, blocks on an axis of their own after the token's.
    """
    codes, scale, zero_point, restore = _chosen_at_run_time(as_array(x), enc)
    codes = restore(codes)
    if isinstance(enc.format, IntFormat):
        codes = namespace(codes).where(namespace(codes).isnan(codes), enc.format.qmin, codes)
        codes = cast(codes, storage_dtype(enc.format, torch=is_torch(x)))
    return codes, scale, zero_point


#: of a range that is chosen at run time: reciprocals of smaller ones overflow
SMALLEST_REACH = 2.0**-100


def _together(x: Array, granularity: Granularity) -> tuple[Array, int, Callable[[Array], Array]]:
    """``x`` with the elements that share a scale along one axis, that axis, and a function that restores the shape of ``x``."""
    shape = tuple(x.shape)
    if not isinstance(granularity, PerToken) or not shape:
        return x.reshape(-1), 0, lambda y: y.reshape(shape)
    axis, size = granularity.axis % len(shape), granularity.block
    if not size:
        return x, axis, lambda y: y.reshape(shape)
    view = padded(x, axis, -shape[axis] % size) if shape[axis] % size else x
    view = view.reshape((*shape[:axis], -1, size, *shape[axis + 1 :]))
    cut = (*(slice(None),) * axis, slice(0, shape[axis]))
    return view, axis + 1, lambda y: y.reshape((*shape[:axis], -1, *shape[axis + 1 :]))[cut]


def _chosen_at_run_time(x: Array, enc: Encoding) -> tuple[Array, Array, Array, Callable[[Array], Array]]:
    """Codes in floating point, their scale and zero point, and a function that restores the shape of ``x``."""
    dtype, shape, fmt = "float64" if dtype_name(x) == "float64" else "float32", tuple(x.shape), enc.format
    view, axis, restore = _together(cast(x, dtype), enc.granularity)
    if 0 in shape:
        return view, view[:0], view[:0], lambda y: y.reshape(shape)
    xp = namespace(x)

    def end(name: str) -> Array:
        return (
            getattr(view, f"a{name}")(axis, keepdim=True) if is_torch(x) else getattr(view, name)(axis, keepdims=True)
        )

    def wide(value: Array) -> Array:
        return cast(value, dtype)

    def stored(scale: Array) -> Array:
        number = enc.scale_format.number
        return scale if number is None else xp.clip(wide(round_to_float(scale, number)), number.step, None)

    zero = like(np.zeros(()), x, dtype)
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        if isinstance(fmt, IntFormat) and not fmt.signed:
            lo, hi = xp.clip(end("min"), None, 0), xp.clip(end("max"), 0, None)
            scale = stored(xp.clip((hi - lo) / fmt.qmax, SMALLEST_REACH, None))
            zero_point = rint(xp.clip(0 - lo / scale, 0, fmt.qmax))
            return xp.clip(rint(view / scale) + zero_point, 0, fmt.qmax), scale, zero_point, restore
        low, high = end("min"), end("max")
        reach = xp.clip(xp.maximum(-low, high), SMALLEST_REACH, None)
        if isinstance(fmt, IntFormat):
            most = like(np.array(fmt.reach), x, dtype)
            scale = reach / most
            if fmt.centred:
                return xp.clip(rint(view / scale), fmt.qmin, fmt.qmax), stored(scale), zero, restore
            return rint(view * (most / reach)), stored(scale), zero, restore
        if enc.scale_format.name == "e8m0":
            scale = wide(like(power_of_two_scale(to_numpy(reach), fmt), x, dtype))
        else:
            scale = stored(reach / like(np.array(fmt.max), x, dtype))
        return wide(round_to_float(view / scale, fmt)), scale, zero, restore


def storage_dtype(fmt: IntFormat, *, torch: bool = False) -> str:
    """Name of the smallest integer dtype that holds the codes of ``fmt``.

    >>> storage_dtype(IntFormat(4, signed=False)), storage_dtype(IntFormat(16, signed=False), torch=True)
    ('uint8', 'int32')
    """
    bits = next(width for width in (8, 16, 32) if fmt.bits <= width)
    if fmt.signed:
        return f"int{bits}"
    if torch and bits > 8:
        return f"int{2 * bits if fmt.bits == bits else bits}"
    return f"uint{bits}"


def round_to_float(x: Array, fmt: FloatFormat) -> Array:
    """``x`` rounded to the numbers of ``fmt``, ties to even, saturating at ``fmt.max``; float64.

    Below ``2 ** fmt.min_exponent`` the spacing stays constant (subnormal numbers). Everything is exact in
    float64: the spacing at ``x`` is a power of two, found with ``frexp``. Of a codebook the nearest number is taken, and
    what lies in the middle of two (rounded to float32) goes to the lower one, as in the kernels of bitsandbytes.

    >>> round_to_float(np.array([5.1, 0.2, 100.0]), FloatFormat("float4_e2m1", 2, 1, 6.0, scaled=True))
    array([6., 0., 6.])
    """
    xp = namespace(x)
    if fmt.codebook:
        values = like(np.array(fmt.codebook, np.float32), x, "float64")
        found = values[codebook_indices(x, fmt)]
        return xp.where(xp.isnan(x), cast(x, "float64"), found)
    x = xp.clip(cast(x, "float64"), -fmt.max, fmt.max)
    mantissa, _ = xp.frexp(x)
    power = x / xp.where(mantissa == 0, 1.0, mantissa)  # the smallest power of two above |x|; exact
    spacing = xp.clip(power / 2, 2.0**fmt.min_exponent, None) * 2.0**-fmt.mantissa_bits
    return rint(x / spacing) * spacing


def codebook_indices(x: Array, fmt: FloatFormat) -> Array:
    """The index of the number of a codebook that ``x``, values divided by their scale, rounds to; int64.

    What :func:`quantize` returns for such a format is the number itself, which has its own index.

    >>> codebook_indices(np.float32([-1, 0.01, 2]), FLOAT_FORMATS["nf4"])
    array([ 0,  7, 15])
    """
    book = np.array(fmt.codebook, np.float32)
    middles = ((book[1:].astype(np.float64) + book[:-1]) / 2).astype(np.float32)
    xp, wide = namespace(x), cast(x, "float64")
    return xp.searchsorted(like(middles, x, "float64"), wide)


def _is_large(x: Array, enc: Encoding) -> bool:
    """Whether ``x`` is a numpy array large enough to process in pieces, with encodings that are slices of ``enc``."""
    if enc.dynamic or is_torch(x) or x.size <= _PIECE or len(x) == 1 or isinstance(enc.granularity, PerBlock):
        return False
    return enc.scale.shape == enc.granularity.param_shape(x.shape)


def _in_pieces(function: Callable[[Array, Encoding], Array], x: NDArray[Any], enc: Encoding) -> NDArray[Any]:
    """``function(x, enc)`` by slices of the first axis, so that temporaries stay in the cache."""
    axis = enc.granularity.axis if isinstance(enc.granularity, PerChannel) else None
    rows = max(1, _PIECE * len(x) // x.size)
    result: NDArray[Any] | None = None
    for first in range(0, len(x), rows):
        part, here = slice(first, first + rows), enc
        if axis is not None and axis % x.ndim == 0:
            shift = None if enc.shift is None else enc.shift[part]
            here = replace(enc, scale=enc.scale[part], zero_point=enc.zero_point[part], shift=shift)
        found = function(x[part], here)
        if result is None:
            result = np.empty(x.shape, found.dtype)
        result[part] = found
    assert result is not None
    return result


def _wide(fmt: Format) -> bool:
    """Whether codes of ``fmt`` need float64: float32, with its 24-bit mantissa, serves up to 16 bits."""
    return isinstance(fmt, IntFormat) and fmt.bits > 16


def _params(x: Array, enc: Encoding, dtype: str) -> tuple[Array, Array]:
    """Scale and zero point, shaped to broadcast against ``x`` in the view of the granularity."""
    spread = enc.granularity.spread
    scale, zero_point = (spread(param, tuple(x.shape)) for param in (enc.scale, enc.zero))
    return like(scale, x, dtype), like(zero_point, x, dtype)


def _codes(x: Array, enc: Encoding) -> Array:
    """Codes in floating point, in the view shape of the granularity; NaN stays NaN."""
    dtype = "float64" if dtype_name(x) == "float64" or _wide(enc.format) else "float32"
    scale, zero_point = _params(x, enc, dtype)
    view = cast(x, dtype).reshape(enc.granularity.view_shape(tuple(x.shape)))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # overflow saturates, NaN stays
        if isinstance(enc.format, FloatFormat):
            return cast(round_to_float(view / scale, enc.format), dtype)
        if is_torch(x):  # in the memory of the quotient: each new tensor costs more than what is computed in it
            codes = view / scale
            codes = codes.round_().add_(zero_point) if enc.shift is None else codes.add_(zero_point).round_()
            return codes.clamp_(enc.format.qmin, enc.format.qmax)
        if enc.shift is not None:
            return np.clip(rint(view / scale + zero_point), enc.format.qmin, enc.format.qmax)
        return np.clip(rint(view / scale) + zero_point, enc.format.qmin, enc.format.qmax)


def _values(codes: Array, x: Array, enc: Encoding, *, wide: bool) -> Array:
    """Values of ``codes`` (in view shape) for a tensor shaped like ``x``."""
    dtype = "float64" if wide or _wide(enc.format) else "float32"
    scale, zero_point = _params(x, enc, dtype)
    with np.errstate(under="ignore", invalid="ignore"):
        return (cast(codes, dtype) - zero_point) * scale


def _narrowed(values: Array, dtype: Any) -> Array:
    """``values`` in ``dtype``; half types saturate."""
    name = str(dtype).removeprefix("torch.")
    if name in ("float16", "bfloat16"):
        limit = FLOAT_FORMATS[name].max
        values = namespace(values).clip(values, -limit, limit)
    return cast(values, dtype)
