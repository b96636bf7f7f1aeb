"""Rules: what they select, how they add up, how they are cited."""

from __future__ import annotations

import pytest

from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel
from bitwright.core.numerics.spec import QuantSpec, RangeMethod, weight_spec
from bitwright.core.placement.rules import Resolver, Rule, Setting, default_rules, name_pattern
from bitwright.errors import ConfigError, FormatError

WEIGHT = frozenset(("weight", "param"))
OUTPUT = frozenset(("output",))


def setting(*rules: Rule, op: str = "Conv", ports: frozenset[str] = WEIGHT, name: str = "layer1.conv") -> Setting:
    param = "weight" if "param" in ports else None
    return Resolver(rules).setting(op, ports, param, (name, f"{name}.weight"))


@pytest.mark.parametrize(
    "pattern, name, expected",
    [
        ("layer1", "layer1", True),
        ("layer1", "layer1.0.conv1", True),
        ("layer1", "layer10", False),
        ("layer1", "layer1_extra", False),
        ("layer1.*", "layer1.0.conv1", True),
        ("layer?.0", "layer2.0.conv1", True),
        ("*.conv1", "layer1.0.conv1", True),
        ("*.conv1", "layer1.0.conv10", False),
        ("conv1.output[0]", "conv1.output[0]", True),
        ("conv1.output[0]", "conv1.output0", False),
        ("conv1.weight", "conv1.weight", True),
    ],
)
def test_names_select_what_is_below_them_and_no_look_alikes(pattern, name, expected):
    assert bool(name_pattern(pattern).fullmatch(name)) is expected


def test_a_rule_selects_by_type_port_and_parameter():
    rule = Rule(op=("Conv", "Gemm"), port="weight", format="int4")
    assert setting(rule).format == IntFormat(4)
    assert setting(rule, op="MatMul").format is None
    assert setting(rule, ports=OUTPUT).format is None
    assert setting(Rule(port="param", param="weight", format="int4")).format == IntFormat(4)
    assert setting(Rule(port="param", param="running_mean", format="int4")).format is None
    assert setting(Rule(format="int4"), ports=OUTPUT).format == IntFormat(4)


def test_later_rules_win_facet_by_facet():
    found = setting(
        Rule(format="int4", symmetry="symmetric"),
        Rule("layer1", format="int16", method="mse"),
        Rule("layer2", format="int2"),
    )
    assert found.format == IntFormat(16)
    assert found.symmetry == "symmetric"
    assert found.method == RangeMethod("mse")
    assert found.matched == (0, 1)


def test_a_format_takes_back_an_earlier_float():
    assert setting(Rule(quantized=False)).quantized is False
    assert setting(Rule(quantized=False), Rule("layer1", format="int8")).quantized is None
    assert setting(Rule(quantized=True), Rule("layer1", format="int8")).quantized is True


def test_the_rule_that_decided_is_remembered():
    off = Rule("layer1", quantized=False)
    assert setting(Rule(quantized=True), off, Rule(symmetry="symmetric")).decided_by == off


def test_a_setting_changes_only_what_was_said():
    base = weight_spec("int8")
    assert Setting().apply(base, weight=True) == base
    assert Setting().apply(None, weight=True) is None
    changed = setting(Rule(granularity=PerBlock(32), fixed_range=(-1.0, None))).apply(base, weight=True)
    assert changed == QuantSpec(IntFormat(8), PerBlock(32), "symmetric", fixed_range=(-1.0, None))
    calibrated = setting(Rule(fixed_range=(-1.0, 1.0)), Rule(fixed_range=(None, None))).apply(base, weight=True)
    assert calibrated is not None and calibrated.fixed_range is None


def test_a_format_makes_a_spec_where_the_preset_has_none():
    found = setting(Rule(format="int4"))
    assert found.apply(None, weight=True) == weight_spec("int4")
    activation = setting(Rule(format="uint8"), ports=OUTPUT).apply(None, weight=False)
    assert activation is not None and activation.symmetry == "asymmetric"
    assert isinstance(weight_spec("int4").granularity, PerChannel)


def test_tensors_that_no_rule_names_share_one_answer():
    resolver = Resolver([Rule(format="int4"), Rule("head", format="int8")])
    first = resolver.setting("Conv", WEIGHT, "weight", ("a",))
    assert resolver.setting("Conv", WEIGHT, "weight", ("b",)) is first
    assert resolver.setting("Conv", WEIGHT, "weight", ("head",)) is not first


def test_a_rule_prints_as_it_is_written_or_as_its_place():
    rule = Rule("head", op="Gemm", port="weight", format="int4", method=RangeMethod("mse"))
    assert str(rule) == "Rule('head', op='Gemm', port='weight', format='int4', method='mse')"
    assert str(Rule(quantized=False)) == "Rule('*', quantized=False)"
    assert str(Rule("head", origin="rules[0] of quant.yaml")) == "rules[0] of quant.yaml"


@pytest.mark.parametrize(
    "facets, message",
    [
        ({"port": "wieght"}, "'wieght' is not a port (did you mean 'weight'?). Remedy: use one of output, input"),
        ({"symmetry": "symetric"}, "'symetric' is not a symmetry (did you mean 'symmetric'"),
        ({"fixed_range": (1.0, -1.0)}, "fixed_range (1.0, -1.0) is not a range of finite numbers, lowest first"),
        ({"fixed_range": (0.0, float("nan"))}, "fixed_range (0.0, nan) is not a range of finite numbers"),
        ({"quantized": "derived", "port": "weight"}, "'derived' is not a value of quantized for port 'weight'"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(facets, message):
    with pytest.raises(ConfigError) as caught:
        Rule("head", **facets)
    assert caught.value.site == "Rule('head')"
    assert message in str(caught.value)


def test_a_format_that_does_not_exist_is_refused_when_the_rule_is_written():
    with pytest.raises(FormatError, match="there is no number format of this name"):
        Rule(format="imt8")


def test_rules_are_values():
    rules = default_rules()
    assert rules == default_rules()
    assert rules.extended([Rule("head", quantized=False)]).rules == (Rule("head", quantized=False),)
    assert not rules.rules
