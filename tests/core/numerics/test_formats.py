"""Number formats, granularities, and formats of scales: the ends of every grid, shapes, refusals that help."""

from __future__ import annotations

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitwright.core import registry
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
from bitwright.core.numerics.formats import (
    FLOAT_FORMATS,
    SCALE_FORMATS,
    FloatFormat,
    IntFormat,
    largest_code,
    parse_format,
    parse_scale_format,
)
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.ranges import choose_range_of
from bitwright.core.numerics.serialize import encoding_from_json, encoding_to_json, spec_from_json, spec_to_json
from bitwright.core.numerics.spec import PRESETS, QuantSpec
from bitwright.errors import ConfigError, EncodingsError, FormatError, GranularityError

ML_DTYPES = {
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float6_e2m3": ml_dtypes.float6_e2m3fn,
    "float6_e3m2": ml_dtypes.float6_e3m2fn,
    "float4_e2m1": ml_dtypes.float4_e2m1fn,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


@pytest.mark.parametrize("bits", range(2, 33))
def test_integer_grids_have_two_to_the_bits_codes(bits):
    signed, unsigned = IntFormat(bits), IntFormat(bits, signed=False)
    assert signed.steps == unsigned.steps == 2**bits - 1
    assert (unsigned.qmin, signed.qmin + signed.qmax) == (0, -1)
    narrow = IntFormat(bits, narrow=True)
    assert narrow.qmin == -narrow.qmax and narrow.qmax == signed.qmax


@pytest.mark.parametrize(
    "fmt",
    [IntFormat(8), IntFormat(4, signed=False), IntFormat(16, narrow=True), *FLOAT_FORMATS.values()],
    ids=lambda f: f.name,
)
def test_names_read_back(fmt):
    assert parse_format(fmt.name) == fmt
    assert parse_format(fmt) is fmt


@pytest.mark.parametrize("name", ML_DTYPES)
def test_float_formats_agree_with_ml_dtypes(name):
    fmt, info = FLOAT_FORMATS[name], ml_dtypes.finfo(ML_DTYPES[name])
    assert fmt.max == float(info.max)
    assert 2.0**fmt.min_exponent == float(info.smallest_normal)
    assert 2.0 ** (fmt.min_exponent - fmt.mantissa_bits) == float(info.smallest_subnormal)
    assert fmt.bits == info.bits


@pytest.mark.parametrize(
    "alias, name", [("FP8", "float8_e4m3"), ("bf16", "bfloat16"), ("mxfp4", None), ("e2m1", "float4_e2m1")]
)
def test_aliases(alias, name):
    if name is None:
        with pytest.raises(FormatError, match="did you mean.*fp4"):
            parse_format(alias)
    else:
        assert parse_format(alias).name == name


def test_integer_formats_are_read_without_a_search_for_plug_ins(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda **_: pytest.fail("entry points are searched"))
    assert [parse_format(name).name for name in ("int8", "uint4", "int8n", "int1", "nf4")] == [
        "int8",
        "uint4",
        "int8n",
        "binary",
        "nf4",
    ]


@pytest.mark.parametrize("bits", [1, 33, 8.0, True, "8"])
def test_impossible_widths_are_refused_with_a_remedy(bits):
    with pytest.raises(FormatError, match="not a bit width between 2 and 32.*use 4, 8 or 16 bits"):
        IntFormat(bits)


def test_an_unsigned_grid_cannot_be_narrow():
    with pytest.raises(FormatError, match="only a signed grid can be narrow.*drop narrow=True"):
        IntFormat(8, signed=False, narrow=True)


def test_formats_are_values():
    assert IntFormat(8) == parse_format("int8") and hash(IntFormat(8)) == hash(parse_format("int8"))
    assert FloatFormat("float16", 5, 10, 65504.0, scaled=False) == parse_format("fp16")


SHAPES = {
    "tensor": (PerTensor(), (8, 3, 5, 5), ()),
    "channel 0": (PerChannel(0), (8, 3, 5, 5), (8,)),
    "channel 1": (PerChannel(1), (16, 10), (10,)),
    "last channel": (PerChannel(-1), (16, 10), (10,)),
    "block of rows": (PerBlock(32, 1, 0), (8, 64), (8, 2)),
    "block of columns": (PerBlock(32, 0, 1), (64, 8), (2, 8)),
    "block of a convolution": (PerBlock(32, 1, 0), (8, 64, 3, 3), (8, 2, 1, 1)),
    "block without channels": (PerBlock(4, 0), (8, 3), (2, 1)),
    "block of stacked matrices": (PerBlock(32, 1, (0, 2)), (4, 64, 8), (4, 2, 8)),
    "block of picked rows": (PerBlock(32, -1, (0, 1)), (4, 8, 64), (4, 8, 2)),
    "block that lacks elements": (PerBlock(32, 1, 0), (8, 70), (8, 3)),
    "block longer than its axis": (PerBlock(32, 0, 1), (5, 8), (1, 8)),
}


@pytest.mark.parametrize("granularity, shape, expected", SHAPES.values(), ids=SHAPES)
def test_parameter_shapes(granularity, shape, expected):
    assert granularity.param_shape(shape) == expected


@pytest.mark.parametrize("granularity, shape, expected", SHAPES.values(), ids=SHAPES)
def test_parameters_broadcast_against_the_view(granularity, shape, expected):
    view, params = granularity.view_shape(shape), granularity.broadcast_shape(shape)
    assert np.broadcast_shapes(view, params) == view
    assert np.prod(view) == np.prod(shape)
    numbers = np.arange(np.prod(expected)).reshape(expected)
    for param in (numbers, torch.from_numpy(numbers)):
        spread = granularity.spread(param, shape)
        assert tuple(spread.shape) == params
        full = np.broadcast_to(np.asarray(spread), view).reshape(shape)
        assert np.array_equal(full[granularity.firsts(shape)].reshape(expected), numbers)
    assert sorted(np.unique(full)) == list(range(int(np.prod(expected))))


def test_a_last_block_that_lacks_elements_is_as_if_padded_with_zeros():
    w = np.random.default_rng(1).normal(size=(6, 70)).astype(np.float32)
    full = np.pad(w, ((0, 0), (0, 26)))
    for name in ("w4g32", "mxfp4", "nf4", "w4lpbq"):
        spec = PRESETS[name].weight
        granularity = PerBlock(32, 1, 0)
        encodings = [encode(*choose_range_of(x, spec, granularity), spec, granularity) for x in (w, full)]
        assert encodings[0] == encodings[1]
        wanted = fake_quantize(full, encodings[1])[:, :70]
        np.testing.assert_array_equal(fake_quantize(w, encodings[0]), wanted)
        np.testing.assert_array_equal(fake_quantize(torch.from_numpy(w), encodings[0]).numpy(), wanted)


def test_channel_axes_have_one_spelling():
    assert PerBlock(32, 1, (2, 0)) == PerBlock(32, 1, (0, 2, 2)) != PerBlock(32, 1, 0)
    assert PerBlock(32, 1, (0,)) == PerBlock(32, 1, 0) and PerBlock(32, 1, ()) == PerBlock(32, 1)
    assert [PerBlock(32, 1, c).channel_axes for c in (None, 0, (2, 0))] == [(), (0,), (0, 2)]
    with pytest.raises(GranularityError, match="axis 3 does not exist"):
        PerBlock(32, 1, (0, 3)).param_shape((4, 64, 8))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_a_block_covers_neighbours_of_one_channel(channels, blocks, size, missing):
    granularity, shape = PerBlock(size, 1, 0), (channels, blocks * size - min(missing, size - 1))
    numbers = np.arange(channels * blocks).reshape(granularity.param_shape(shape))
    spread = np.broadcast_to(granularity.spread(numbers, shape), granularity.view_shape(shape)).reshape(shape)
    row, column = np.indices(shape)
    assert (spread == row * blocks + column // size).all()


@pytest.mark.parametrize(
    "granularity, channel, block, expected",
    [
        (PerTensor(), 0, 1, PerTensor()),
        (PerChannel(), 0, 1, PerChannel(0)),
        (PerChannel(2), 0, 1, PerChannel(2)),
        (PerChannel(), None, None, PerTensor()),
        (PerBlock(32), 1, 0, PerBlock(32, 0, 1)),
        (PerBlock(32), None, None, PerTensor()),
        (PerBlock(32, 2), 0, 1, PerBlock(32, 2)),
    ],
)
def test_open_axes_come_from_the_operator(granularity, channel, block, expected):
    assert granularity.resolve(channel, block) == expected


@pytest.mark.parametrize(
    "granularity, shape, message",
    [
        (PerChannel(), (4, 4), "no axis yet.*PerChannel"),
        (PerBlock(4), (4, 4), "no axis yet.*PerBlock"),
        (PerChannel(2), (4, 4), "axis 2 does not exist in a tensor of rank 2"),
        (PerBlock(32, 2, 0), (4, 48), "axis 2 does not exist in a tensor of rank 2"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_site_and_a_remedy(granularity, shape, message):
    with pytest.raises(GranularityError, match=f"^conv1.weight: .*{message}"):
        granularity.param_shape(shape, "conv1.weight")


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_an_empty_block_is_refused(size):
    with pytest.raises(GranularityError, match="needs at least one element.*use 16, 32"):
        PerBlock(size)


ELEMENTS = {
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp8": ml_dtypes.float8_e4m3fn,
}
SCALED = [
    name
    for name, preset in PRESETS.items()
    if preset.weight
    and preset.weight.scale_format.name != "float32"
    and isinstance(preset.weight.granularity, PerBlock)
]
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


@pytest.mark.parametrize("name, dtype", [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("symmetry", ["symmetric", "asymmetric"])
def test_scales_of_half_types_are_the_casts_of_ml_dtypes(name, dtype, symmetry):
    """Zero points follow from the stored scale, and everything reads back."""
    fmt = IntFormat(4, signed=symmetry == "symmetric")
    spec, granularity = QuantSpec(fmt, PerBlock(32), symmetry, scale_format=name), PerBlock(32, 1, 0)
    lo, hi = choose_range_of(W, spec, granularity)
    encoding = encode(lo, hi, spec, granularity)
    plain = encode(lo, hi, replace(spec, scale_format="float32"), granularity)
    np.testing.assert_array_equal(encoding.scale, plain.scale.astype(dtype).astype(np.float32))
    if symmetry == "asymmetric":
        zero = np.clip(np.rint(-np.minimum(lo, 0) / encoding.scale.astype(np.float64)), 0, 15)
        np.testing.assert_array_equal(encoding.zero_point, zero)
    assert is_sayable(encoding) and encoding_from_json(json.loads(json.dumps(encoding_to_json(encoding)))) == encoding
    assert spec_from_json(spec_to_json(spec)) == spec and not is_sayable(
        replace(plain, scale_format=encoding.scale_format)
    )
    tiny = with_scale(encoding, np.full_like(encoding.scale, 1e-12))
    assert (tiny.scale > 0).all() and is_sayable(tiny)


def test_unknown_names_are_refused_with_those_that_exist():
    with pytest.raises(FormatError, match="e8m0"):
        parse_scale_format("e8m1")
    assert parse_scale_format("float32") is SCALE_FORMATS["float32"]


def test_the_largest_code():
    assert [largest_code(f) for f in (IntFormat(8), FLOAT_FORMATS["float4_e2m1"])] == [127, 6]
