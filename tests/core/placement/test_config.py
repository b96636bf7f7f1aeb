"""Configuration files: our form in three languages, AIMET's, targets by name, mistakes with their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bitwright.core.graph.patterns import DEFAULT_SUPERGROUPS, MASKED_SOFTMAX, Pattern
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.spec import PRESETS, RangeMethod
from bitwright.core.placement.aimet_config import shipped_config
from bitwright.core.placement.config import load_config, read_config
from bitwright.core.placement.place import place
from bitwright.core.placement.rules import Rule, default_rules
from bitwright.errors import ConfigError
from tests.core.graphs import conv_chain, worked_example

YAML = """
preset: w4a8
rules:
  - {match: "0.*", op: Conv, weight: int8}
  - match: fc
    weight: {granularity: {per_block: 8}, method: {name: percentile, percentile: 99.9}}
    output: null
supergroups: [default, [Conv, Silu]]
"""
TOML = """
preset = "w4a8"
supergroups = ["default", ["Conv", "Silu"]]

[[rules]]
match = "0.*"
op = "Conv"
weight = "int8"

[[rules]]
match = "fc"
weight = {granularity = {per_block = 8}, method = {name = "percentile", percentile = 99.9}}
output = "float"
"""
DATA: dict[str, Any] = {
    "preset": "w4a8",
    "rules": [
        {"match": "0.*", "op": "Conv", "weight": "int8"},
        {
            "match": "fc",
            "weight": {"granularity": {"per_block": 8}, "method": {"name": "percentile", "percentile": 99.9}},
            "output": None,
        },
    ],
    "supergroups": ["default", ["Conv", "Silu"]],
}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "name, text",
    [("q.yaml", YAML), ("q.yml", YAML), ("q.toml", TOML), ("q.json", json.dumps(DATA)), ("Q.JSON", json.dumps(DATA))],
)
def test_the_same_rules_in_every_language(tmp_path, name, text):
    rules = load_config(write(tmp_path, name, text))
    assert rules.weight == PRESETS["w4a8"].weight
    assert rules.rules == load_config(DATA).rules
    assert rules.supergroups == (*DEFAULT_SUPERGROUPS, Pattern(("Conv", "Silu")))
    assert rules.source == name
    assert load_config(str(tmp_path / name)) == rules


def test_one_rule_per_kind_of_tensor():
    conv, weight, output = read_config(DATA).rules
    assert conv == Rule("0.*", op="Conv", port="weight", format=IntFormat(8))
    assert weight == Rule(
        "fc", port="weight", granularity=PerBlock(8), method=RangeMethod.of("percentile", {"percentile": 99.9})
    )
    assert output == Rule("fc", port="output", quantized=False)
    assert str(output) == "configuration: rules[1].output (name='fc', port='output')"


def test_rules_reach_the_plan():
    made = place(worked_example(), load_config(DATA))
    assert made.sites["fc.weight"].spec.granularity == PerBlock(8, 1, 0)
    assert made.floats["fc.output[0]"].startswith("float by rule configuration: rules[1].output")
    assert made.floats["dw.output[0]"] == "inside the supergroup Conv>Silu, quantized at silu.output[0]"
    assert len(made.unused) == 1 and made.unused[0].startswith("configuration: rules[0].weight")


@pytest.mark.parametrize(
    "value, expected",
    [
        (None, {"quantized": False}),
        ("float", {"quantized": False}),
        ("derived", {"quantized": "derived"}),
        ("int16", {"format": IntFormat(16)}),
        ({"quantized": True, "format": "int4"}, {"quantized": True, "format": IntFormat(4)}),
        ({"symmetry": "strict_symmetric"}, {"symmetry": "strict_symmetric"}),
        ({"granularity": "per_tensor"}, {"granularity": PerTensor()}),
        ({"granularity": "per_channel"}, {"granularity": PerChannel()}),
        ({"granularity": {"per_channel": 1}}, {"granularity": PerChannel(1)}),
        ({"method": "tf_enhanced"}, {"method": RangeMethod("sqnr")}),
        ({"fixed_range": [0, None]}, {"fixed_range": (0, None)}),
    ],
)
def test_values_of_a_rule(value, expected):
    (rule,) = read_config({"rules": [{"bias": value}]}).rules
    assert rule == Rule(port="bias", **expected)


def test_every_port_and_parameters_by_name():
    entry = {"all": "int8", "param": "int8", "model_input": "uint8", "params": {"running_mean": None}}
    every, param, model_input, mean = read_config({"rules": [{"op": ["Conv", "Gemm"], **entry}]}).rules
    assert (every.port, param.port, model_input.port) == ("*", "param", "model_input")
    assert mean == Rule(op=("Conv", "Gemm"), port="param", param="running_mean", quantized=False)


def test_nothing_at_all_is_the_default():
    assert load_config() == load_config(None) == default_rules()
    empty = load_config({})
    assert (empty.rules, empty.supergroups) == ((), DEFAULT_SUPERGROUPS)
    assert read_config({"supergroups": []}).supergroups == ()
    assert read_config({"supergroups": None}).supergroups == ()
    assert read_config({"supergroups": "masked_softmax"}).supergroups == MASKED_SOFTMAX


def test_the_preset_of_the_caller_serves_where_the_file_names_none():
    preset = PRESETS["w4a16"]
    for source in (None, {}, "htp_v73"):
        assert load_config(source, preset).weight == preset.weight
    assert load_config({"preset": "w8a8"}, preset).weight == PRESETS["w8a8"].weight


def test_aimets_form_is_told_by_its_keys(tmp_path):
    path = write(tmp_path, "quantsim.json", json.dumps(shipped_config("htp_v73")))
    assert load_config(path).rules == load_config("htp_v73").rules
    assert load_config(path).source == "quantsim.json"
    assert load_config("htp_quantsim_config_v73").source == "htp_quantsim_config_v73"


def test_a_target_by_name_describes_the_target_and_so_reports_no_unused_rules():
    assert place(conv_chain(1), load_config("enpu_v7")).unused == ()


# ---- mistakes


@pytest.mark.parametrize(
    "data, site, message",
    [
        ({"presets": "w8a8"}, "q", "unknown key 'presets' (did you mean 'preset'"),
        ({"preset": "w8a9"}, "preset 'w8a9'", "there is no preset of this name (did you mean 'w8a8'"),
        ({"rules": {"match": "*"}}, "q: rules", "it is a dict. Remedy: write a list of rules"),
        ({"rules": ["conv1"]}, "q: rules[0]", "it is a str, not keys and values"),
        ({"rules": [{"mach": "x", "weight": None}]}, "q: rules[0]", "unknown key 'mach' (did you mean 'match'?)"),
        ({"rules": [{"match": "x"}]}, "q: rules[0]", "the rule sets nothing. Remedy: add one of output, input"),
        ({"rules": [{"match": 3, "all": None}]}, "q: rules[0].match", "3 is not a name"),
        ({"rules": [{"op": 3, "all": None}]}, "q: rules[0].op", "3 is not an operator type"),
        ({"rules": [{"weight": "imt8"}]}, "q: rules[0].weight", "there is no number format of this name"),
        ({"rules": [{"weight": "derived"}]}, "q: rules[0].weight", "there is no number format of this name"),
        ({"rules": [{"weight": 8}]}, "q: rules[0].weight", "it is a int, not keys and values"),
        ({"rules": [{"weight": {"bits": 8}}]}, "q: rules[0].weight", "unknown key 'bits'"),
        ({"rules": [{"weight": {"format": "int1"}}]}, "q: rules[0].weight.format", "not a bit width between 2 and 32"),
        ({"rules": [{"weight": {"quantized": "no"}}]}, "q: rules[0].weight.quantized", "'no' is not a boolean"),
        (
            {"rules": [{"weight": {"symmetry": "symetric"}}]},
            "q: rules[0].weight.symmetry",
            "'symetric' is not a symmetry (did you mean 'symmetric'",
        ),
        (
            {"rules": [{"weight": {"granularity": "per_chanel"}}]},
            "q: rules[0].weight.granularity",
            "'per_chanel' is not a granularity (did you mean 'per_channel'",
        ),
        (
            {"rules": [{"weight": {"granularity": {"per_blok": 32}}}]},
            "q: rules[0].weight.granularity",
            "(did you mean 'per_block'",
        ),
        (
            {"rules": [{"weight": {"granularity": {"per_block": 0}}}]},
            "q: rules[0].weight.granularity",
            "a block needs at least one element",
        ),
        (
            {"rules": [{"weight": {"method": "percentil"}}]},
            "q: rules[0].weight.method",
            "there is no range method of this name (did you mean 'percentile'",
        ),
        (
            {"rules": [{"weight": {"method": {"percentile": 99}}}]},
            "q: rules[0].weight.method",
            "is not a range method with options",
        ),
        ({"rules": [{"output": {"fixed_range": [1]}}]}, "q: rules[0].output.fixed_range", "[1] is not a range"),
        ({"rules": [{"output": {"fixed_range": [1, 0]}}]}, "q: rules[0].output", "fixed_range (1, 0) is not a range"),
        ({"rules": [{"params": None}]}, "q: rules[0].params", "None is not a mapping"),
        ({"supergroups": [["Conv"]]}, "q: supergroups[0]", "['Conv'] is not a chain"),
        ({"supergroups": ["defalt"]}, "q: supergroups[0]", "'defalt' is not a set of chains (did you mean 'default'"),
        ({"supergroups": 3}, "q: supergroups", "it is a int"),
    ],
)
def test_mistakes_name_their_place(data, site, message):
    with pytest.raises(ConfigError) as caught:
        read_config(data, source="q")
    assert caught.value.site == site
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name, text, line",
    [
        ("q.json", '{\n "preset": "w8a8"\n "x": 1}', 3),
        ("q.yaml", "preset: w8a8\nrules:\n  - match: *all\n", 3),
        ("q.yaml", "preset: w8a8\nrules: [\n", 3),
        ("q.toml", 'preset = "w8a8"\nrules = = 3\n', 2),
        ("q.toml", "preset = [", 1),
    ],
)
def test_a_file_that_cannot_be_parsed_names_the_line(tmp_path, name, text, line):
    path = write(tmp_path, name, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.site == f"{path}, line {line}"
    assert caught.value.remedy.startswith("write this line as")


def test_files_that_are_not_there_or_not_files(tmp_path):
    with pytest.raises(ConfigError, match="the file cannot be read: No such file or directory. Remedy: check the path"):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="'.ini' is not a known kind of file. Remedy: use .json, .yaml, .yml, .toml"):
        load_config(write(tmp_path, "q.ini", ""))
    with pytest.raises(ConfigError, match=r"neither a file nor a shipped target \(did you mean 'htp_v7"):
        load_config("htp_v37")
    (tmp_path / "latin.json").write_bytes(b'{"preset": "\xe9"}')
    with pytest.raises(ConfigError, match=r"it is not JSON \('utf-8' codec"):
        load_config(tmp_path / "latin.json")


@pytest.mark.parametrize("name, text", [("q.json", "[1]"), ("q.yaml", "- 1"), ("q.yaml", "")])
def test_a_file_without_keys_says_what_it_holds(tmp_path, name, text):
    with pytest.raises(
        ConfigError, match="not keys and values. Remedy: write preset, rules, supergroups, recurrent, tail as keys"
    ):
        load_config(write(tmp_path, name, text))
