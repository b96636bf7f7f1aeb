"""Configuration files and rules: our form in three languages, AIMET's, targets by name, mistakes with their place."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bitwright.core.graph.graph import Graph
from bitwright.core.graph.patterns import DEFAULT_SUPERGROUPS, MASKED_SOFTMAX, Pattern
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.spec import PRESETS, QuantSpec, RangeMethod, weight_spec
from bitwright.core.placement import aimet_config
from bitwright.core.placement.aimet_config import ALIASES, SHIPPED, is_aimet_config, read_aimet_config, shipped_config
from bitwright.core.placement.config import load_config, read_config
from bitwright.core.placement.place import place
from bitwright.core.placement.plan import Plan
from bitwright.core.placement.rules import Resolver, Rule, Setting, default_rules, name_pattern
from bitwright.errors import ConfigError, FormatError
from tests.core.graphs import Build, conv_chain, worked_example

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
        ({"rules": [{"weight": 8}]}, "q: rules[0].weight", "it is an int, not keys and values"),
        ({"rules": [{"weight": {"bits": 8}}]}, "q: rules[0].weight", "unknown key 'bits'"),
        ({"rules": [{"weight": {"format": "int33"}}]}, "q: rules[0].weight.format", "not a bit width between 2 and 32"),
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
        ({"supergroups": 3}, "q: supergroups", "it is an int"),
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
    with pytest.raises(ConfigError, match="not keys and values. Remedy: write preset, rules, supergroups, recurrent,"):
        load_config(write(tmp_path, name, text))


CONFIGS = Path(aimet_config.__file__).parents[2] / "configs"

MINIMAL: dict[str, Any] = {
    "defaults": {"ops": {"is_output_quantized": "True"}, "params": {"is_quantized": "True", "is_symmetric": "True"}},
    "params": {},
    "op_type": {},
    "supergroups": [],
    "model_input": {"is_input_quantized": "True"},
    "model_output": {},
}


def config(**changes: Any) -> dict[str, Any]:
    """The smallest file, with values at dotted paths (``op_type__Conv`` for ``op_type.Conv``) exchanged."""
    made = copy.deepcopy(MINIMAL)
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = made
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return made


def net() -> Graph:
    b = Build()
    y = b.conv(b.input(), "conv", inputs=3)
    relu = b.op("Relu", y, name="relu")
    pooled = b.op("MaxPool", relu, name="pool")
    table = b.param("norm.weight", (8,))
    normed = b.op("LayerNormalization", b.op("Exp", pooled, name="exp"), table, b.param("norm.bias", (8,)), name="norm")
    return b.graph(b.op("Tanh", b.linear(normed, "fc"), name="tanh"))


def placed(data: dict[str, Any], graph: Graph | None = None, preset: str = "w8a8") -> Plan:
    return place(graph or net(), read_aimet_config(data, PRESETS[preset], "quant.json"))


def activations(plan: Plan) -> list[str]:
    return [site.name for site in plan.sites.values() if site.role in ("input", "output")]


# ---- what is quantized


def test_every_output_is_quantized_but_those_that_only_move_data():
    made = placed(config())
    assert activations(made) == ["conv.input[0]", *(f"{n}.output[0]" for n in "conv relu exp norm fc tanh".split())]
    assert made.shared == {"pool.output[0]": "relu.output[0]"}
    assert not made.unused


def test_without_defaults_nothing_is_quantized():
    data = config(defaults={"ops": {}, "params": {}}, model_input={})
    made = placed(data)
    assert not made.sites
    assert made.floats["x"] == "float by rule defaults.ops.is_input_quantized=False (quant.json)"


def test_parameters_by_default_by_name_and_by_type():
    off = {"is_quantized": "False"}
    assert placed(config()).sites.keys() >= {"conv.weight", "conv.bias", "norm.weight", "norm.bias", "fc.bias"}
    by_name = placed(config(params={"weight": off}))
    assert by_name.floats["conv.weight"] == "float by rule params.weight.is_quantized=False (quant.json)"
    by_type = placed(config(op_type__LayerNormalization={"params": {"weight": off}}))
    assert "norm.weight" in by_type.floats and "conv.weight" in by_type.sites


def test_an_unquantized_bias_is_the_int32_of_the_kernel_and_float_where_there_is_none():
    made = placed(config(params={"bias": {"is_quantized": "False"}}))
    assert made.sites["conv.bias"].follows == ("conv.input[0]", "conv.weight")
    assert made.sites["conv.bias"].spec.format == IntFormat(32)
    assert made.floats["norm.bias"] == "normalisation parameters stay in float"


def test_a_quantized_bias_is_a_parameter_like_others():
    bias = placed(config()).sites["conv.bias"]
    assert (bias.follows, bias.spec.format, bias.spec.granularity) == (None, IntFormat(8), PerTensor())


def test_a_type_can_lose_its_output_or_gain_an_input():
    made = placed(config(op_type__Exp={"is_output_quantized": "False"}))
    assert made.floats["exp.output[0]"] == ("float by rule op_type.Exp.is_output_quantized=False (quant.json)")
    assert "norm.input[0]" not in made.sites, "its reader does not quantize it instead"
    op_type = {"Exp": {"is_output_quantized": "False"}, "LayerNormalization": {"is_input_quantized": "True"}}
    assert "norm.input[0]" in placed(config(op_type=op_type)).sites


def test_a_movement_operator_that_the_file_names_has_its_own_quantizer():
    made = placed(config(op_type__MaxPool={"is_output_quantized": "True"}))
    assert "pool.output[0]" in made.sites


def test_supergroups_and_the_ends_of_the_model():
    made = placed(config(supergroups=[{"op_list": ["Conv", "Relu"]}], model_input={}))
    assert made.floats["conv.output[0]"] == "inside the supergroup Conv>Relu, quantized at relu.output[0]"
    assert "conv.input[0]" not in made.sites
    op_type = {"Tanh": {"is_output_quantized": "False"}}
    assert "tanh.output[0]" in placed(config(op_type=op_type, model_output={"is_output_quantized": "True"})).sites


def test_supergroups_spare_depthwise_convolutions():
    b = Build()
    graph = b.graph(b.op("Relu", b.conv(b.input(), "dw", group=8), name="relu"))
    assert "dw.output[0]" in placed(config(supergroups=[{"op_list": ["Conv", "Relu"]}]), graph).sites


def test_a_batch_norm_that_can_be_folded_has_no_quantizers():
    made = placed(config(), worked_example())
    assert made.floats["b1.weight"] == "it can be folded into c1, which leaves nothing of it"
    assert made.sites.keys().isdisjoint({"c1.output[0]", "b1.running_mean"})
    assert "b1.output[0]" in made.sites


def lone_batch_norm() -> Graph:
    b = Build()
    x = b.op("Relu", b.input(), name="relu")
    params = [b.param(f"bn.{name}", (8,)) for name in ("weight", "bias", "running_mean", "running_var")]
    return b.graph(b.op("BatchNormalization", x, *params, name="bn"))


def test_the_statistics_of_norms_are_no_parameters_like_others():
    made = placed(config(), lone_batch_norm())
    assert made.sites["bn.weight"].spec.granularity == PerTensor()
    for name in ("bn.running_mean", "bn.running_var"):
        assert made.floats[name] == "statistics of a normalisation stay in float unless a rule names them"
    named = placed(config(params={"running_var": {"is_quantized": "True"}}), lone_batch_norm())
    assert "bn.running_var" in named.sites and "bn.running_mean" not in named.sites


def test_per_channel_reaches_batch_norms():
    for changes in (
        {"defaults__per_channel_quantization": "True"},
        {"op_type__BatchNormalization": {"per_channel_quantization": "True"}},
    ):
        made = placed(config(**changes), lone_batch_norm())
        assert made.sites["bn.weight"].spec.granularity == PerChannel(0)


# ---- how


def test_per_channel_by_default_and_by_type():
    assert placed(config()).sites["conv.weight"].spec.granularity == PerTensor()
    every = placed(config(defaults__per_channel_quantization="True"))
    assert every.sites["fc.weight"].spec.granularity == PerChannel(0)
    conv = placed(config(op_type__Conv={"per_channel_quantization": "True"}))
    assert conv.sites["conv.weight"].spec.granularity == PerChannel(0)
    assert conv.sites["fc.weight"].spec.granularity == PerTensor()


def test_blocks_that_the_user_chose_stay():
    b = Build()
    made = placed(config(), b.graph(b.linear(b.input(shape=(1, 64)), "fc", 4, 64)), "w4g32")
    assert made.sites["fc.weight"].spec.granularity == PerBlock(32, 1, 0)


@pytest.mark.parametrize(
    "flags, word",
    [
        ({}, "symmetric"),
        ({"strict_symmetric": "True"}, "strict_symmetric"),
        ({"unsigned_symmetric": "True"}, "unsigned_symmetric"),
        ({"strict_symmetric": "True", "unsigned_symmetric": "True"}, "strict_symmetric"),
    ],
)
def test_the_kind_of_symmetry(flags, word):
    data = config(**{f"defaults__{k}": v for k, v in flags.items()})
    made = placed(data)
    assert made.sites["conv.weight"].spec.symmetry == word
    assert made.sites["conv.output[0]"].spec.symmetry == "asymmetric"
    both = "defaults.unsigned_symmetric has no effect beside defaults.strict_symmetric"
    assert (both in made.notes) is (len(flags) == 2)


def test_symmetric_activations():
    made = placed(config(defaults__ops={"is_output_quantized": "True", "is_symmetric": "True"}))
    assert {made.sites[name].spec.symmetry for name in activations(made)} == {"symmetric"}


def test_the_symmetry_of_a_type_is_also_that_of_what_it_reads():
    made = placed(config(op_type__Exp={"is_symmetric": "True"}))
    symmetric = [name for name in activations(made) if made.sites[name].spec.symmetry == "symmetric"]
    assert symmetric == ["relu.output[0]", "exp.output[0]"], "through the pool that only moves data"


@pytest.mark.parametrize(
    "constraints, fixed, symmetry",
    [
        ({"min": 0.0, "max": 1.0}, (0.0, 1.0), "asymmetric"),
        ({"min": 0}, (0.0, None), "asymmetric"),
        ({"min": -1, "max": 1}, (-1.0, 1.0), "symmetric"),
    ],
)
def test_constraints_pin_the_range(constraints, fixed, symmetry):
    spec = placed(config(op_type__Tanh={"encoding_constraints": constraints})).sites["tanh.output[0]"].spec
    assert (spec.fixed_range, spec.symmetry) == (fixed, symmetry)


def test_ranges_are_pinned_by_the_file_alone():
    assert placed(config()).sites["tanh.output[0]"].spec.fixed_range is None


@pytest.mark.parametrize("preset, symmetry", [("w8a8", "asymmetric"), ("w8a16", "asymmetric")])
def test_scales_of_layer_normalisations_are_asymmetric(preset, symmetry):
    assert placed(config(), preset=preset).sites["norm.weight"].spec.symmetry == symmetry


def test_weights_follow_their_output_on_newer_hardware():
    b = Build()
    ids = b.input("ids", (4,), "int64")
    graph = b.graph(b.op("Embedding", b.param("table", (10, 8)), ids, name="embed", shape=(4, 8)))
    old = placed(config(defaults__hw_version="V72"), graph, "w8a16").sites["table"].spec
    new = placed(config(defaults__hw_version="V73"), graph, "w8a16").sites["table"].spec
    assert (old.format, old.symmetry) == (IntFormat(8), "symmetric")
    assert (new.format, new.symmetry) == (IntFormat(16, signed=False), "asymmetric")


# ---- what has no effect is told


def test_what_is_accepted_without_effect_is_noted():
    kernel = {"activation": {"bitwidth": 8, "dtype": "int"}, "param": {"bitwidth": 8, "dtype": "int"}}
    data = config(
        defaults__supported_kernels=[kernel],
        defaults__hw_version="V73",
        op_type__Convv={"is_output_quantized": "True"},
        supergroup_pass_list=["LayerNormalization", "MatmulAdd", "MatmulAd"],
    )
    notes = "\n".join(read_aimet_config(data).notes)
    assert "defaults.supported_kernels is for mixed precision: widths of a simulation come from the preset" in notes
    assert "op_type: no operator of type 'Convv' is known (did you mean 'Conv'" in notes
    assert "supergroup_pass_list: 'MatmulAd' has no effect here (did you mean 'MatmulAdd'" in notes
    assert "special cases of V73 for products of two activations" in notes
    assert len(notes.splitlines()) == 4


def test_passes_that_are_chains_become_supergroups():
    groups = read_aimet_config(config(supergroup_pass_list=["MatmulAdd", "MaskedSoftmax"])).supergroups
    assert {str(g) for g in groups} >= {"MatMul>Add", "Add>Softmax"}
    assert not read_aimet_config(config()).supergroups


# ---- mistakes


@pytest.mark.parametrize(
    "changes, site, message",
    [
        ({"op_typ": {}}, "quant.json", "unknown key 'op_typ' (did you mean 'op_type'"),
        ({"defaults": {"ops": {}}}, "quant.json: defaults", "the key 'params' is missing. Remedy: add"),
        ({"defaults": []}, "quant.json: defaults", "it is a list, not an object"),
        (
            {"defaults__ops": {"is_output_quantised": "True"}},
            "quant.json: defaults.ops",
            "unknown key 'is_output_quantised' (did you mean 'is_output_quantized'",
        ),
        (
            {"defaults__ops": {"is_output_quantized": "yes"}},
            "quant.json: defaults.ops.is_output_quantized",
            '\'yes\' is not a boolean. Remedy: write the string "True" or "False"',
        ),
        (
            {"defaults__ops": {"is_output_quantized": "False"}},
            "quant.json: defaults.ops.is_output_quantized",
            'it may only be "True"',
        ),
        (
            {"defaults__ops": {"is_input_quantized": "False"}},
            "quant.json: defaults.ops.is_input_quantized",
            'it may only be "True"',
        ),
        ({"params__weight": "True"}, "quant.json: params.weight", "it is a str, not an object"),
        (
            {"op_type__Conv": {"params": {"weight": {"is_quantized": 1}}}},
            "quant.json: op_type.Conv.params.weight.is_quantized",
            "1 is not a boolean",
        ),
        (
            {"op_type__Conv": {"is_input_quantized": "False"}},
            "quant.json: op_type.Conv.is_input_quantized",
            'it may only be "True"',
        ),
        (
            {"op_type__Conv": {"encoding_constraints": {"max": 1}}},
            "quant.json: op_type.Conv.encoding_constraints",
            "the key 'min' is missing",
        ),
        (
            {"op_type__Conv": {"encoding_constraints": {"min": "0"}}},
            "quant.json: op_type.Conv.encoding_constraints.min",
            "'0' is not a number",
        ),
        (
            {"op_type__Conv": {"encoding_constraints": {"min": 2, "max": 1}}},
            "op_type.Conv.encoding_constraints (quant.json)",
            "fixed_range (2.0, 1.0) is not a range",
        ),
        ({"supergroups": {}}, "quant.json: supergroups", "it is a dict"),
        ({"supergroups": [{"op_list": ["Conv"]}]}, "quant.json: supergroups[0].op_list", "['Conv'] is not a chain"),
        (
            {"supergroups": [{"ops": ["Conv"]}]},
            "quant.json: supergroups[0]",
            "unknown key 'ops' (did you mean 'op_list'",
        ),
        ({"model_input": {"is_input_quantized": "False"}}, "quant.json: model_input.is_input_quantized", "only"),
        ({"defaults__hw_version": 73}, "quant.json: defaults.hw_version", "73 is not a version"),
        ({"defaults__supported_kernels": []}, "quant.json: defaults.supported_kernels", "[] is not a list of kernels"),
        ({"supergroup_pass_list": "MatmulAdd"}, "quant.json: supergroup_pass_list", "is not a list of names"),
    ],
)
def test_mistakes_name_the_key(changes, site, message):
    with pytest.raises(ConfigError) as caught:
        read_aimet_config(config(**changes), source="quant.json")
    assert caught.value.site == site
    assert message in str(caught.value)


def test_real_booleans_are_understood_too():
    data = config(defaults__ops={"is_output_quantized": True})
    assert activations(placed(data)) == activations(placed(config()))


# ---- shipped targets


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_targets_are_valid_files(name):
    made = shipped_config(name)
    assert json.loads((CONFIGS / f"{name}.json").read_text()) == made, "write the file anew from shipped_config"
    assert is_aimet_config(made)
    assert not [note for note in read_aimet_config(made).notes if "no operator of type" in note]


def test_no_other_files_are_shipped():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(SHIPPED)


@pytest.mark.parametrize(
    "name, groups, per_channel",
    [
        ("default", 5, {"Conv", "ConvTranspose", "Gemm", "MatMul", "PRelu"}),
        ("default_per_tensor", 5, set()),
        ("htp_v66", 3, set()),
        ("htp_v68", 3, {"Conv", "ConvTranspose", "PRelu"}),
        ("htp_v69", 3, {"Conv", "ConvTranspose", "Gemm", "MatMul", "PRelu"}),
        ("htp_v85", 14, {"Conv", "ConvTranspose", "Gemm", "MatMul", "PRelu"}),
        ("enpu_v6", 95, set()),
        ("enpu_v7_per_channel", 95, {"Conv", "ConvTranspose", "Gemm", "MatMul"}),
    ],
)
def test_facts_of_the_targets(name, groups, per_channel):
    made = shipped_config(name)
    assert len(made["supergroups"]) == groups
    on = {op for op, entry in made["op_type"].items() if entry.get("per_channel_quantization") == "True"}
    assert on == per_channel


def test_newer_targets_differ_in_their_version_alone():
    made = [shipped_config(f"htp_v{n}") for n in (73, 75, 79, 81, 85)]
    versions = [m["defaults"].pop("hw_version") for m in made]
    assert versions == ["V73", "V75", "V79", "V81", "V85"]
    assert all(m == made[0] for m in made)


def test_a_target_is_a_value_of_its_own():
    shipped_config("default")["op_type"].clear()
    assert shipped_config("default")["op_type"]


def test_aliases_lead_to_targets():
    assert set(ALIASES.values()) <= set(SHIPPED)
    assert shipped_config("htp_quantsim_config_v73") == shipped_config("htp_v73")
    with pytest.raises(ConfigError, match=r"there is no target of this name \(did you mean 'htp_v7"):
        shipped_config("htp_v74")


def test_supported_kernels_say_which_precisions_an_operator_may_have():
    def kernel(activation, weight):
        return {"activation": {"bitwidth": activation, "dtype": "int"}, "param": {"bitwidth": weight, "dtype": "int"}}

    rules = read_aimet_config(
        config(
            defaults__supported_kernels=[kernel(8, 8), kernel(16, 8)],
            op_type__Conv={"is_output_quantized": "True", "supported_kernels": [kernel(8, 4)]},
        )
    )
    allowed = rules.allowed_kernels
    assert allowed is not None
    assert allowed("Gemm", PRESETS["w8a8"]) is allowed("Gemm", PRESETS["w8a16"]) is None
    assert allowed("Conv", PRESETS["w4a8"]) is None
    assert "the target runs Conv with activations int8, weights int4 only" in str(allowed("Conv", PRESETS["w8a8"]))
    assert "int16" in str(allowed("Gemm", PRESETS["w4a8"]))
    assert read_aimet_config(config()).allowed_kernels is None


def test_a_kernel_without_bits_is_an_error():
    with pytest.raises(ConfigError, match=r"supported_kernels\.activation.*names no bits and kind.*bitwidth"):
        read_aimet_config(config(defaults__supported_kernels=[{"activation": {"bitwidth": "8"}}]))


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
