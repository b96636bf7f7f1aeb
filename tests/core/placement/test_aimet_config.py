"""AIMET's quantsim configuration: each statement of the file, its order, and its mistakes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bitwright.core.graph.graph import Graph
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.spec import PRESETS
from bitwright.core.placement import aimet_config
from bitwright.core.placement.aimet_config import ALIASES, SHIPPED, is_aimet_config, read_aimet_config, shipped_config
from bitwright.core.placement.place import place
from bitwright.core.placement.plan import Plan
from bitwright.errors import ConfigError
from tests.core.graphs import Build, worked_example

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
