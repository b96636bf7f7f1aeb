"""What scales are stored as: powers of two (MX), float8 multiples (NVFP4), integer multiples (LPBQ)."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwright.core.numerics.affine import (
    encode,
    fake_quantize,
    is_sayable,
    power_of_two_scale,
    quantize,
    scale_multiples,
    with_scale,
)
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT_FORMATS, SCALE_FORMATS, IntFormat, largest_code, parse_scale_format
from bitwright.core.numerics.granularity import PerBlock, PerChannel
from bitwright.core.numerics.ranges import choose_range_of
from bitwright.core.numerics.serialize import encoding_from_json, encoding_to_json, spec_from_json, spec_to_json
from bitwright.core.numerics.spec import PRESETS, QuantSpec
from bitwright.errors import ConfigError, EncodingsError, FormatError

ELEMENTS = {
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp8": ml_dtypes.float8_e4m3fn,
}
SCALED = [name for name, preset in PRESETS.items() if preset.weight and preset.weight.scale_format.name != "float32"]
W = (np.random.default_rng(0).normal(size=(12, 128)) * np.exp2(np.arange(-6, 6))[:, None]).astype(np.float32)


def block_encoding(preset: str, weight: np.ndarray = W) -> Encoding:
    spec = PRESETS[preset].weight
    assert spec is not None and isinstance(spec.granularity, PerBlock)
    granularity = PerBlock(spec.granularity.size, 1, 0)
    return encode(*choose_range_of(weight, spec, granularity), spec, granularity)


@pytest.mark.parametrize("preset", ELEMENTS)
def test_mx_is_the_text_of_the_specification_with_the_casts_of_ml_dtypes(preset):
    """Section 6.3: X is the largest power of two in the block over the largest in the element format; P_i = V_i / X."""
    element = ELEMENTS[preset]
    blocks = W.reshape(12, -1, 32)
    emax = int(np.floor(np.log2(float(ml_dtypes.finfo(element).max))))
    exponent = np.floor(np.log2(np.abs(blocks).max(axis=2, keepdims=True))) - emax
    x = np.exp2(exponent).astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    most = float(ml_dtypes.finfo(element).max)
    expected = np.clip(blocks / x, -most, most).astype(element).astype(np.float32) * x
    encoding = block_encoding(preset)
    np.testing.assert_array_equal(encoding.scale, x[:, :, 0])
    np.testing.assert_array_equal(fake_quantize(W, encoding), expected.reshape(W.shape))


def test_mxint8_has_an_implied_scale_of_a_64th():
    encoding = block_encoding("mxint8")
    largest = np.abs(W.reshape(12, -1, 32)).max(axis=2)
    np.testing.assert_array_equal(encoding.scale, np.exp2(np.floor(np.log2(largest)) - 6))
    assert np.abs(quantize(W, encoding)).max() <= 127


@given(st.floats(2.0**-100, 2.0**100, width=32), st.sampled_from(["float4_e2m1", "float8_e4m3", "float6_e3m2"]))
def test_a_power_of_two_scale_brings_the_largest_value_into_the_top_binade(largest, name):
    fmt = FLOAT_FORMATS[name]
    x = float(power_of_two_scale(largest, fmt))
    top = 2.0 ** np.floor(np.log2(fmt.max))
    assert np.frexp(x)[0] == 0.5 and top <= largest / x < 2 * top


def test_the_smallest_and_largest_power_stay_within_float32():
    x = power_of_two_scale([0.0, 1e-45, 3e38], FLOAT_FORMATS["float8_e4m3"])
    assert x.astype(np.float32).min() == np.finfo(np.float32).tiny and np.isfinite(x.astype(np.float32)).all()


def test_nvfp4_scales_are_float8_times_one_number_of_the_tensor():
    encoding = block_encoding("nvfp4")
    largest = np.abs(W.reshape(12, -1, 16)).max(axis=2)
    common = np.float32(np.float32(largest.max() / np.float64(6)) / np.float64(448))
    assert encoding.common is not None and encoding.common.shape == (1, 1) and encoding.common == common
    stored = scale_multiples(encoding)
    cast = (largest / np.float32(6) / common).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(stored, np.maximum(cast, 2.0**-9))
    np.testing.assert_array_equal(encoding.scale, stored * common)
    assert stored.max() == 448


def test_lpbq_scales_are_whole_multiples_of_one_number_of_the_channel():
    encoding = block_encoding("w4lpbq")
    plain = encode(
        *choose_range_of(W, PRESETS["w4g32"].weight, PerBlock(64, 1, 0)), PRESETS["w4g32"].weight, PerBlock(64, 1, 0)
    )
    stored = scale_multiples(encoding)
    assert encoding.common.shape == (12, 1) and stored.dtype == np.float32
    np.testing.assert_array_equal(encoding.common, (plain.scale.max(axis=1, keepdims=True) / 16.0).astype(np.float32))
    np.testing.assert_array_equal(stored, np.clip(np.rint(plain.scale / encoding.common.astype(np.float64)), 1, 16))
    np.testing.assert_array_equal(encoding.scale, stored * encoding.common)
    assert (stored.max(axis=1) == 16).all()


@pytest.mark.parametrize("preset", SCALED)
def test_scales_on_the_format_stay_where_they_are_and_read_back(preset):
    encoding = block_encoding(preset)
    assert is_sayable(encoding)
    again = with_scale(encoding, encoding.scale)
    np.testing.assert_allclose(again.scale, encoding.scale, rtol=3e-7)
    np.testing.assert_array_equal(scale_multiples(again), scale_multiples(encoding))
    data = json.loads(json.dumps(encoding_to_json(encoding)))
    assert encoding_from_json(data) == encoding
    spec = PRESETS[preset].weight
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec
    data["scale"][3] *= 1.01
    with pytest.raises(EncodingsError, match="scales are not of the format"):
        encoding_from_json(data, "w")


@pytest.mark.parametrize("preset", SCALED)
def test_other_scales_are_moved_to_ones_that_can_be_said(preset):
    encoding = block_encoding(preset)
    moved = with_scale(encoding, encoding.scale * np.float32(0.3))
    assert is_sayable(moved) and moved.scale_format == encoding.scale_format and moved != encoding


def test_per_channel_scales_are_multiples_too():
    spec = QuantSpec(IntFormat(4), PerChannel(0), scale_format="uint4")
    encoding = encode(*choose_range_of(W, spec, PerChannel(0)), spec, PerChannel(0))
    assert is_sayable(encoding) and (scale_multiples(encoding) == 16).all()


@pytest.mark.parametrize(
    "make, message",
    [
        pytest.param(
            lambda: QuantSpec(IntFormat(8), symmetry="asymmetric", scale_format="e8m0"), "uint8|int8 has a zero point",
            id="asymmetric",
        ),
        pytest.param(
            lambda: QuantSpec(FLOAT_FORMATS["float16"], scale_format="e8m0"), "float16 has no scale", id="unscaled"
        ),
    ],
)  # fmt: skip
def test_formats_without_a_symmetric_scale_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_unknown_names_are_refused_with_those_that_exist():
    with pytest.raises(FormatError, match="e8m0"):
        parse_scale_format("e8m1")
    assert parse_scale_format("float32") is SCALE_FORMATS["float32"]


def test_the_largest_code():
    assert [largest_code(f) for f in (IntFormat(8), FLOAT_FORMATS["float4_e2m1"])] == [127, 6]
