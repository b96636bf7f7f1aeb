"""Specs, presets and encodings: values that compare and cannot be changed, and the same back from JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from bitwright.core.numerics.affine import encode, fake_quantize
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT8_E4M3, IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.ranges import choose_range_of, find_range_method
from bitwright.core.numerics.serialize import encoding_from_json, encoding_to_json, spec_from_json, spec_to_json
from bitwright.core.numerics.spec import (
    PRESETS,
    Preset,
    QuantSpec,
    RangeMethod,
    activation_spec,
    find_preset,
    weight_spec,
)
from bitwright.errors import ConfigError, EncodingsError


def test_specs_are_values():
    method = RangeMethod.of("percentile", {"percentile": 99.9})
    assert QuantSpec(method=method) == QuantSpec(method=RangeMethod("percentile", (("percentile", 99.9),)))
    assert len({QuantSpec(), QuantSpec(IntFormat(8)), QuantSpec(IntFormat(4))}) == 2


def test_options_do_not_depend_on_their_order():
    assert RangeMethod.of("m", {"a": 1, "b": 2}) == RangeMethod.of("m", {"b": 2, "a": 1})


@pytest.mark.parametrize(
    "spec, text",
    [
        (QuantSpec(), "int8 symmetric per tensor, minmax"),
        (weight_spec("int4", PerBlock(32)), "int4 symmetric per block of 32, minmax"),
        (weight_spec(granularity=PerChannel(1)), "int8 symmetric per channel (axis 1), minmax"),
        (weight_spec(symmetry="strict_symmetric"), "int8 strict symmetric per channel, minmax"),
        (activation_spec("uint16"), "uint16 asymmetric per tensor, minmax"),
        (activation_spec("fp8"), "float8_e4m3 per tensor, minmax"),
    ],
)
def test_specs_describe_themselves(spec, text):
    assert spec.describe() == text


def test_a_misspelt_symmetry_gets_the_close_ones():
    with pytest.raises(ConfigError, match="'symetric' is not a symmetry .did you mean 'symmetric'.*use one of asym"):
        QuantSpec(symmetry="symetric")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_found_and_its_range_methods_exist(name):
    preset = find_preset(name)
    assert preset is PRESETS[name] and find_preset(preset) is preset
    for spec in (preset.weight, preset.activation):
        assert spec is None or find_range_method(spec.method) == spec.method


def test_a_misspelt_preset_gets_the_close_ones():
    with pytest.raises(ConfigError, match="preset 'w8a9': .*did you mean 'w8a8'.*a Preset of your own"):
        find_preset("w8a9")


@pytest.mark.parametrize(
    ("name", "meant"), [("int8", "w8a8"), ("INT4", "w4g32"), ("float16", "fp16"), ("dynamic", "w8a8_dynamic")]
)
def test_names_of_other_tools_get_the_preset_that_does_the_same(name, meant):
    with pytest.raises(ConfigError, match=f"there is no preset of this name .did you mean '{meant}'"):
        find_preset(name)
    assert find_preset(meant)


@pytest.mark.parametrize("name", ["int1", "binary"])
def test_binary_weights_are_plus_or_minus_their_mean_magnitude(name):
    """The scale of least squared error is the mean of magnitudes (Rastegari et al. 2016, eq. 6), within a step of the search."""
    w = np.random.default_rng(0).normal(size=(4, 500)).astype(np.float32)
    spec = weight_spec(name)
    assert spec.format.bits == 1 and spec.method.name == "mse"
    encoding = encode(*choose_range_of(w, spec, PerChannel(0)), spec, PerChannel(0))
    assert np.abs(encoding.scale / np.abs(w).mean(1) - 1).max() < 0.02
    assert np.array_equal(fake_quantize(w, encoding), np.where(w > 0, 1, -1) * encoding.scale[:, None])


def test_a_preset_of_ones_own_may_leave_a_kind_in_float():
    own = Preset(weight_spec("int3"), None)
    assert find_preset(own).activation is None


def encoding(scale=0.5, zero_point=3, fmt=IntFormat(8), **more):  # noqa: B008
    return Encoding(fmt, np.float32(scale), np.int32(zero_point), **more)


def test_ends_are_those_of_the_grid():
    assert (float(encoding().min), float(encoding().max)) == (-65.5, 62.0)
    assert float(Encoding(FLOAT8_E4M3, np.float32(2), np.int32(0)).max) == 896
    assert float(Encoding(FLOAT8_E4M3, np.float32(2), np.int32(0)).min) == -896


def test_equal_means_every_bit():
    assert encoding() == encoding() and hash(encoding()) == hash(encoding())
    assert encoding() != encoding(scale=np.nextafter(np.float32(0.5), np.float32(1)))
    assert encoding() != encoding(zero_point=4)
    assert encoding() != encoding(fmt=IntFormat(8, narrow=True))
    assert encoding() != "int8"
    one = Encoding(IntFormat(8), np.float32([0.5]), np.int32([3]), PerChannel(0))
    assert one != Encoding(IntFormat(8), np.float32([0.5]), np.int32([3]), PerChannel(1))


def test_an_encoding_does_not_follow_the_array_it_was_made_from():
    scale = np.float32([1, 2])
    enc = Encoding(IntFormat(8), scale, np.int32([0, 0]), PerChannel(0))
    scale[0] = 7
    assert enc.scale.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        enc.scale[0] = 7


@pytest.mark.parametrize(
    "fmt, zero_point, symmetric",
    [
        (IntFormat(8), 0, True),
        (IntFormat(8), 1, False),
        (IntFormat(8, signed=False), 0, True),
        (IntFormat(8, signed=False), 128, True),
        (IntFormat(8, signed=False), 127, False),
        (FLOAT8_E4M3, 0, True),
    ],
)
def test_symmetric_means_zero_in_the_middle_or_at_the_end(fmt, zero_point, symmetric):
    assert encoding(zero_point=zero_point, fmt=fmt).symmetric is symmetric


def test_zero_points_of_32_bits_fit():
    enc = Encoding(IntFormat(32, signed=False), np.float32(1), np.int64(2**32 - 1))
    assert int(enc.zero_point) == 2**32 - 1 and enc.zero_point.dtype == np.int64
    assert encoding().zero_point.dtype == np.int32


def test_text_names_format_and_scale():
    assert repr(encoding()) == "Encoding(int8, scale=0.5, zero_point=3)"
    many = Encoding(IntFormat(4), np.float32([0.5, 2]), np.int32([0, 0]), PerChannel(0))
    assert repr(many) == "Encoding(int4, PerChannel(axis=0), scale=0.5..2 (2,))"


CHANNELS = Encoding(IntFormat(8), np.float32([0.1, 3e-9]), np.int32([0, 0]), PerChannel(0))
BLOCKS = Encoding(IntFormat(4), np.full((2, 3), 0.5, np.float32), np.zeros((2, 3), np.int32), PerBlock(16, 1, 0))
STACK = Encoding(
    IntFormat(4), np.full((2, 3, 4), 0.5, np.float32), np.zeros((2, 3, 4), np.int32), PerBlock(16, 1, (0, 2))
)
TENSOR = Encoding(IntFormat(8, signed=False), np.float32(0.25), np.int32(128), PerTensor())


@pytest.mark.parametrize("encoding", [CHANNELS, BLOCKS, STACK, TENSOR], ids=["channels", "blocks", "stack", "tensor"])
def test_an_encoding_comes_back(encoding: Encoding) -> None:
    assert encoding_from_json(json.loads(json.dumps(encoding_to_json(encoding)))) == encoding


def test_a_spec_comes_back() -> None:
    spec = QuantSpec(method=RangeMethod.of("percentile", {"percentile": 99.5}), fixed_range=(0.0, None))
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


@pytest.mark.parametrize("axis", [-64, 63])
def test_every_axis_that_an_array_can_have_is_read(axis: int) -> None:
    data = {**encoding_to_json(CHANNELS), "granularity": {"kind": "per_channel", "axis": axis}}
    assert encoding_from_json(data, "conv.weight").granularity == PerChannel(axis)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"scale": [-1.0, 1.0]}, "a scale is not a positive finite number"),
        ({"scale": [float("nan"), 1.0]}, "a scale is not a positive finite number"),
        ({"scale": [1e-60, 1.0]}, "a scale is not a positive finite number"),
        ({"scale": [1.0]}, "cannot reshape array of size 1"),
        ({"scale": [True, 1.0]}, "is not a list of numbers"),
        ({"scale": "1"}, "'1' is not a list of numbers"),
        ({"zero_point": [0, 200]}, "a zero point lies outside -128 to 127, the grid of int8"),
        ({"zero_point": [0.5, 0]}, "is not a list of numbers"),
        ({"shape": [1, 2]}, r"parameters of shape \(1, 2\) are not PerChannel"),
        ({"shape": None}, "it is not an encoding"),
        ({"format": "int99"}, "not a bit width between 2 and 32"),
        ({"format": "int" + "9" * 9000}, "there is no number format of this name"),
        ({"granularity": {"kind": "per_thing"}}, "'per_thing' is not a granularity"),
        ({"granularity": {"kind": "per_channel", "axis": "x"}}, "'x' is not an axis"),
        ({"granularity": {"kind": "per_channel", "axis": 64}}, "64 is not an axis"),
        ({"granularity": {"kind": "per_channel", "axis": -65}}, "-65 is not an axis"),
        ({"granularity": {"kind": "per_block", "size": 1e9, "axis": 0}}, "the size 1000000000.0 is not a whole number"),
        ({"granularity": {"kind": "per_block", "size": 1, "axis": 0, "channel_axis": [1, "x"]}}, "'x' is not an axis"),
        ({"granularity": 3}, "it is not an encoding"),
    ],
)  # fmt: skip
def test_what_is_no_encoding_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(EncodingsError, match=f"^conv.weight: .*{problem}.* Remedy: export or save"):
        encoding_from_json({**encoding_to_json(CHANNELS), **changes}, "conv.weight")


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"method": "best"}, "there is no range method of this name"),
        ({"method": ["minmax"]}, "is not a range method"),
        ({"options": {"percentile": "high"}}, "is not a list of numbers"),
        ({"symmetry": []}, "is not a symmetry"),
        ({"fixed_range": [1, "2"]}, "is not a list of numbers"),
        ({"fixed_range": [1]}, "list index out of range"),
        ({"non_finite": "maybe"}, "is not a policy"),
    ],
)  # fmt: skip
def test_what_is_no_spec_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(EncodingsError, match=f"^conv.weight: .*{problem}"):
        spec_from_json({**spec_to_json(QuantSpec()), **changes}, "conv.weight")
    with pytest.raises(EncodingsError, match="it is not a spec: the key 'fixed_range' is missing"):
        spec_from_json({})
