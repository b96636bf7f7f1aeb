"""Specs and presets: values, readable, refused when misspelt."""

import pytest

from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel
from bitwright.core.numerics.ranges import find_range_method
from bitwright.core.numerics.spec import (
    PRESETS,
    Preset,
    QuantSpec,
    RangeMethod,
    activation_spec,
    find_preset,
    weight_spec,
)
from bitwright.errors import ConfigError


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


def test_a_preset_of_ones_own_may_leave_a_kind_in_float():
    own = Preset(weight_spec("int3"), None)
    assert find_preset(own).activation is None
