"""Whatever a tensor holds, its encoding is finite and its values survive it to within half a step."""

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bitwright.core.numerics import affine, statistics
from bitwright.core.numerics.formats import FloatFormat, parse_format
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.ranges import RANGE_METHODS, choose_range, choose_range_of, needs
from bitwright.core.numerics.spec import SYMMETRIES, QuantSpec, RangeMethod

MAX = float(np.finfo(np.float32).max)
FORMATS = ("int8", "uint8", "int4", "uint4", "int2", "int16", "uint16", "int24", "int32", "int8n",
           "float8_e4m3", "float8_e5m2", "float4_e2m1", "float16", "bfloat16")  # fmt: skip
METHODS = (*map(RangeMethod, RANGE_METHODS), RangeMethod.of("percentile", {"percentile": 99.0}))
CLOSED = tuple(method for method in METHODS if method.name not in ("mse", "sqnr", "entropy"))
GRANULARITIES = {
    "per-tensor": PerTensor(),
    "per-channel": PerChannel(0),
    "per-block": PerBlock(4, axis=1, channel_axis=0),
}

ROW = np.linspace(-1, 2, 8)
FILLS = {
    "zero": np.zeros((4, 8)),
    "negative-zero": np.full((4, 8), -0.0),
    "constant": np.full((4, 8), 2.5),
    "negative-constant": np.full((4, 8), -0.7),
    "one-sided": np.stack([ROW + 5] * 4),
    "one-sided-below": np.stack([ROW - 5] * 4),
    "denormal": np.full((4, 8), 1e-42),
    "denormal-and-zero": np.stack([np.where(ROW > 0, 1e-45, 0)] * 4),
    "smallest-normal": np.full((4, 8), np.finfo(np.float32).tiny),
    "huge": np.full((4, 8), 1e38),
    "largest": np.full((4, 8), MAX),
    "smallest": np.full((4, 8), -MAX),
    "difference-overflows": np.stack([np.where(ROW > 0, 1e38, -3e38)] * 4),
    "whole-float32": np.stack([np.where(ROW > 0, MAX, -MAX)] * 4),
    "huge-and-tiny": np.stack([[3e38, -3e38, 1e-45, 0, 1, -1, 1e-20, 1e20]] * 4),
    "zero-channel": np.stack([ROW, 0 * ROW, ROW * 100, 0 * ROW - 3]),
    "channels-of-all-sizes": np.stack([ROW * 1e-40, ROW * 1e38, ROW, 0 * ROW]),
    "one-element": np.full((1, 4), 7.0),
}


def ranges_of(x, spec):
    """The two ways to a range: from statistics gathered in two batches, and from the tensor at hand."""
    shape = spec.granularity.param_shape(tuple(x.shape))
    stats = statistics.start(needs(spec.method), shape)
    for _ in range(2):
        stats = statistics.update(stats, x, spec.granularity)
    return choose_range(stats, spec), choose_range_of(x, spec, spec.granularity)


def half_step(enc, values):
    """Half the spacing of the grid of ``enc`` at ``values``, and ``values`` in the view of the granularity."""
    scale = enc.scale.astype(np.float64).reshape(enc.granularity.broadcast_shape(values.shape) or ())
    view = values.astype(np.float64).reshape(enc.granularity.view_shape(values.shape))
    if not isinstance(enc.format, FloatFormat):
        return scale / 2, view
    _, power = np.frexp(np.abs(view / scale))
    power = np.maximum(power - 1, enc.format.min_exponent)
    return np.ldexp(0.5 * scale, power - enc.format.mantissa_bits), view


def check(x, spec):
    """Both ranges give a valid encoding, without a warning; values inside it move by at most half a step."""
    with warnings.catch_warnings(), np.errstate(all="warn", under="ignore"):
        warnings.simplefilter("error")
        for lo, hi in ranges_of(x, spec):
            assert np.isfinite(lo).all() and np.isfinite(hi).all() and (lo <= hi).all()
            enc = affine.encode(lo, hi, spec, spec.granularity)
            assert np.isfinite(enc.scale).all() and (enc.scale > 0).all()
            assert np.isfinite(enc.min).all() and np.isfinite(enc.max).all()
            assert (np.abs(enc.min) <= MAX).all() and (np.abs(enc.max) <= MAX).all()
            back = affine.fake_quantize(x, enc)
            assert back.dtype == x.dtype and np.isfinite(np.asarray(back, np.float64)).all()
            check_error(x, back, enc, spec, exact=spec.method.name == "minmax")


def check_error(x, back, enc, spec, *, exact):
    values, result = np.asarray(x, np.float64), np.asarray(back, np.float64)
    bound, view = half_step(enc, values)
    result = result.reshape(view.shape)
    shape = enc.granularity.broadcast_shape(values.shape) or ()
    low, high = enc.min.reshape(shape), enc.max.reshape(shape)
    # a float32 scale has 24 bits; a result that is cast back to a half type has 8
    bits = 22 if np.asarray(x).dtype == np.float32 else 7
    least = 2.0**-25 if np.asarray(x).dtype == np.float16 else 2.0**-149 if bits == 22 else 2.0**-134
    rounding = np.maximum(np.abs(result), np.abs(view)) * 2.0**-bits + least
    if exact and not (isinstance(enc.format, FloatFormat) and not enc.format.scaled):
        # the grid ends where float32 does, and then holds the end of the data to a step
        capped = np.maximum(-low, high) > 0.999 * MAX
        inside = (view >= low - bound - rounding) & (view <= high + bound + rounding)
        assert (inside | capped).all(), "min-max covers the data"
    assert (np.abs(result - np.clip(view, low, high)) <= bound + rounding).all()


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES)
def test_degenerate_tensors(granularity, fill):
    whole = granularity == PerTensor()
    formats = (
        ("int8n", "uint8", "int2", "uint16", "int32", "float8_e4m3", "float16") if whole else ("uint4", "float4_e2m1")
    )
    for fmt in map(parse_format, formats):
        for symmetry in ("symmetric",) if isinstance(fmt, FloatFormat) else SYMMETRIES:
            # searches take most of the time, and depend on the grid by its number of codes only
            searched = symmetry != "asymmetric" and fmt.name in ("uint8", "uint4", "float8_e4m3", "float4_e2m1")
            for method in METHODS if searched else CLOSED:
                check(fill.astype(np.float32), QuantSpec(fmt, granularity, symmetry, method))


ELEMENTS = {
    "float32": (np.dtype(np.float32), st.floats(width=32, allow_nan=False, allow_infinity=False)),
    "float16": (np.dtype(np.float16), st.floats(width=16, allow_nan=False, allow_infinity=False)),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), st.floats(-(2.0**127), 2.0**127, width=32)),
}


def tensors(name):
    dtype, elements = ELEMENTS[name]
    plain = np.float32 if name == "bfloat16" else dtype
    return hnp.arrays(plain, st.sampled_from([(2, 8), (1, 4), (3, 12)]), elements=elements).map(
        lambda x: x.astype(dtype)
    )


@pytest.mark.slow_variants("float32", "float16")
@pytest.mark.parametrize("dtype", ELEMENTS)
@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_arbitrary_tensors(dtype, data):
    x = data.draw(tensors(dtype))
    spec = QuantSpec(
        parse_format(data.draw(st.sampled_from(FORMATS))),
        data.draw(st.sampled_from(list(GRANULARITIES.values()))),
        data.draw(st.sampled_from(SYMMETRIES)),
        data.draw(st.sampled_from(METHODS)),
    )
    check(x, spec)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_torch_gives_the_same_ranges(data):
    x = data.draw(tensors("float32"))
    spec = QuantSpec(
        parse_format("uint8"), data.draw(st.sampled_from(list(GRANULARITIES.values()))), "asymmetric",
        data.draw(st.sampled_from(METHODS)),
    )  # fmt: skip
    ours, theirs = ranges_of(x, spec), ranges_of(torch.from_numpy(x), spec)
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])
