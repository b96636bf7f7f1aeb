"""Folders for compressed-tensors: read back, and loaded by transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, Qwen2Config

from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat, parse_format
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.spec import PRESETS, Preset, QuantSpec, activation_spec, dynamic_spec, weight_spec
from bitwright.core.placement.rules import Rule, default_rules
from bitwright.errors import ConfigError, ExportError, GranularityError
from bitwright.llm import PackedWeight, packed_weights, read_checkpoint, write_checkpoint, write_simulation
from bitwright.llm.files.compressed_tensors import pack_int32, unpack_int32
from bitwright.llm.packed import signed
from bitwright.torch import QuantizationSimModel
from tests.llm.models import greedy, prompts, tiny, weight_only
from tests.support.simulations import calibrated

SPECS = {
    "int4-g32": PRESETS["w4g32"].weight,
    "int4-g32-asymmetric": QuantSpec("uint4", PerBlock(32), "asymmetric"),
    "int4-per-channel-asymmetric": QuantSpec("int4", PerChannel(), "asymmetric"),
    "int3-g32": QuantSpec("int3", PerBlock(32)),
    "int8-per-channel": PRESETS["w8"].weight,
    "int8-per-tensor": QuantSpec("int8", PerTensor()),
    "fp8-per-channel": PRESETS["fp8"].weight,
    "fp8-per-tensor": QuantSpec("float8_e4m3", PerTensor()),
    "nvfp4": PRESETS["nvfp4"].weight,
    "mxfp4": PRESETS["mxfp4"].weight,
    "mxfp8": PRESETS["mxfp8"].weight,
}


@pytest.mark.engine
@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_is_undone(bits):
    codes = np.random.default_rng(bits).integers(-(1 << (bits - 1)), 1 << (bits - 1), (5, 37)).astype(np.int8)
    assert np.array_equal(unpack_int32(pack_int32(codes, bits), bits, 37), codes)
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    assert np.array_equal(library.pack_to_int32(torch.from_numpy(codes), bits).numpy(), pack_int32(codes, bits))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_codes_come_back(spec, tmp_path):
    sim = weight_only(tiny(LlamaConfig), spec)
    write_checkpoint(tmp_path / "out", packed_weights(sim), sim.model.config.to_dict())
    back = {weight.name: weight for weight in read_checkpoint(tmp_path / "out")}
    for weight in packed_weights(sim):
        found = back.pop(weight.name)
        assert type(found) is type(weight)
        if isinstance(weight, PackedWeight):
            assert np.array_equal(signed(found)[0], signed(weight)[0])
            assert found.layout.group == weight.layout.group
        if spec is SPECS["nvfp4"] and isinstance(weight, PackedWeight):
            # the file holds the reciprocal of a number that is not always the reciprocal of a float32
            np.testing.assert_allclose(found.scale, weight.scale, rtol=2**-22)
        else:
            assert np.array_equal(found.dequantize(), weight.dequantize())
    assert not back


@pytest.mark.engine
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_transformers_answers_as_the_simulation(spec, tmp_path, caplog, request):
    """In float32, in which both compute the same sums; formats that the library unpacks to bfloat16 are exact there too."""
    pytest.importorskip("compressed_tensors")
    model = tiny(Qwen2Config, tie_word_embeddings=True)
    sim = weight_only(model, spec)
    write_checkpoint(tmp_path, packed_weights(sim), model.config.to_dict())
    # transformers 5.23 makes no room for packed zero points and loads such layers unpacked
    unpacked = (
        {"quantization_config": CompressedTensorsConfig(dequantize=True)}
        if "asymmetric" in request.node.callspec.id
        else {}
    )
    engine = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", **unpacked).eval()
    exact = engine.dtype == torch.float32
    with torch.no_grad():
        engine(prompts(1))  # unpacks the weights
        for weight in packed_weights(sim):
            if isinstance(weight, PackedWeight):
                used = engine.get_parameter(weight.name)
                values = torch.from_numpy(weight.dequantize())
                assert torch.equal(used, values.to(used.dtype)) or spec is SPECS["nvfp4"], weight.name
        if not exact:
            assert "will compute in bfloat16, not in float32" in caplog.text
            return
        expected, found = sim.model(prompts()).logits, engine(prompts()).logits
    assert (expected - found).abs().max() < 1e-4 < (expected - model(prompts()).logits).abs().max()
    assert torch.equal(greedy(engine, prompts()), greedy(sim.model, prompts()))


@pytest.mark.engine
def test_tied_tables_and_layers_of_another_format(tmp_path, caplog):
    """A table is written in float, the output layer tied to it as codes; layers may have formats of their own."""
    pytest.importorskip("compressed_tensors")
    model = tiny(LlamaConfig, tie_word_embeddings=True, intermediate_size=80)
    sim = weight_only(model, "w4g32", tables=True)
    with pytest.raises(GranularityError, match=r"down_proj.weight: it sums over 80 elements.*use groups of 16"):
        write_simulation(tmp_path, sim)
    for layer in (0, 1):
        sim.quantizers[f"model.layers.{layer}.mlp.down_proj.weight"].spec = QuantSpec("int4", PerBlock(16))
    sim.quantizers["model.layers.1.mlp.up_proj.weight"].enabled = False
    sim.compute_encodings(progress=False)
    write_simulation(tmp_path, sim)
    assert "model.embed_tokens.weight: stored in float" in caplog.text
    config = json.loads((tmp_path / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    assert [group["weights"]["group_size"] for group in groups.values()] == [32, 16]
    assert groups["group_1"]["targets"] == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
    assert config["quantization_config"]["ignore"] == ["model.layers.1.mlp.up_proj"]
    engine = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    with torch.no_grad():
        assert (sim.model(prompts()).logits - engine(prompts()).logits).abs().max() < 1e-4
    assert torch.equal(greedy(engine, prompts()), greedy(sim.model, prompts()))


def _with_inputs(model, weight, inputs, symmetry):
    """A simulation of linear layers whose inputs are quantized, and nothing else."""
    rules = default_rules(weight_spec(weight), activation_spec(inputs, symmetry=symmetry)).extended(
        [
            Rule("*", port="output", quantized=False),
            Rule("*", port="input", quantized=False),
            Rule("*", op="Gemm", port="input", format=inputs),
            Rule("lm_head", quantized=False),
            Rule("model.embed_tokens", quantized=False),
        ]
    )
    return calibrated(QuantizationSimModel(model, {"input_ids": prompts(1)}, config_file=rules), [prompts(8, 12)])


INPUTS = {
    "w8a8": ("int8", "int8", "symmetric", "int-quantized"),
    "w8a8-asymmetric": ("int8", "uint8", "asymmetric", "int-quantized"),
    "fp8": ("float8_e4m3", "float8_e4m3", "symmetric", "float-quantized"),
}


@pytest.mark.engine
@pytest.mark.parametrize("weight, inputs, symmetry, stored", INPUTS.values(), ids=INPUTS)
def test_static_inputs_are_those_of_the_simulation(weight, inputs, symmetry, stored, tmp_path):
    """Weights, inputs and biases: transformers computes the same sums of the same numbers.

    In another order on some CPUs, so that an input on the border of two codes may take the other one: in one prompt of eight.
    """
    model = tiny(Qwen2Config)
    sim = _with_inputs(model, weight, inputs, symmetry)
    write_simulation(tmp_path, sim)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["format"] == stored
    names = [name for name, _ in sim.model.named_parameters()]
    assert sorted(weight.name for weight in read_checkpoint(tmp_path)) == sorted(names)
    pytest.importorskip("compressed_tensors")
    engine = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    with torch.no_grad():
        expected, found = sim.model(prompts()).logits, engine(prompts()).logits
        off, rounded = (expected - found).abs().amax((1, 2)), (expected - model(prompts()).logits).abs().max()
    assert off.sort().values[-2] < 1e-4 < rounded and off.max() < rounded / 10
    assert torch.equal(greedy(engine, prompts()), greedy(sim.model, prompts()))


@pytest.mark.engine
@pytest.mark.parametrize("weight, inputs", [("int8", "uint8"), ("int8", "int8c"), ("float8_e4m3", "float8_e4m3")])
def test_inputs_per_token_are_those_of_the_simulation(weight, inputs, tmp_path):
    """Ranges that both choose at run time: the largest magnitude of a token, or its range with a zero point."""
    pytest.importorskip("compressed_tensors")
    model = tiny(Qwen2Config)
    sim = QuantizationSimModel(
        model, {"input_ids": prompts(1)}, preset=Preset(weight_spec(weight), dynamic_spec(inputs))
    )
    for site in sim.quantizers.values():
        if "embed" in site.name or "lm_head" in site.name:
            site.enabled = False
    sim.compute_encodings(progress=False)
    write_simulation(tmp_path, sim)
    engine = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    with torch.no_grad():
        expected, found = sim.model(prompts()).logits, engine(prompts()).logits
        off, rounded = (expected - found).abs().amax((1, 2)), (expected - model(prompts()).logits).abs().max()
    assert off.sort().values[-2] < 1e-4 < rounded and off.max() < rounded / 10  # one prompt on the border of two codes
    assert (greedy(engine, prompts()) == greedy(sim.model, prompts())).all(1).sum() >= 7


@pytest.mark.engine
@pytest.mark.parametrize("name, kind", [("int8", "int"), ("fp8", "float")])
def test_scales_of_the_cache_are_stored(name, kind, tmp_path):
    model = tiny(LlamaConfig)
    sim = weight_only(model, "w8")
    stored = parse_format(name)
    pair = Encoding(stored, np.float32(0.02), np.int32(0)), Encoding(stored, np.float32(0.01), np.int32(0))
    cache = {f"model.layers.{layer}.self_attn": pair for layer in (0, 1)}
    write_checkpoint(tmp_path, packed_weights(sim), model.config.to_dict(), cache=cache)
    scheme = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["type"], scheme["strategy"]) == (8, kind, "tensor")
    pytest.importorskip("compressed_tensors")
    engine = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert engine.model.layers[1].self_attn.k_scale.item() == pair[0].scale
    with torch.no_grad():
        cached = engine(prompts(1), use_cache=True).past_key_values.layers[0].values
    assert torch.equal(cached, fake_quantize(cached, pair[1])) and len(cached.unique()) > 20
    bad = {"model.layers.0.self_attn": (pair[0], Encoding(IntFormat(4), np.float32(1), np.int32(0)))}
    with pytest.raises(ExportError, match="keys and values of the cache are not of one format, symmetric"):
        write_checkpoint(tmp_path, packed_weights(sim), model.config.to_dict(), cache=bad)


CACHES = {"int8": ("int8", "per_tensor"), "fp8": ("fp8", "per_tensor"), "int4-per-head": ("int4", "per_head")}


@pytest.mark.engine
@pytest.mark.parametrize("name, granularity", CACHES.values(), ids=CACHES)
def test_transformers_runs_the_quantized_cache_of_the_simulation(name, granularity, tmp_path):
    """With compressed-tensors it rounds keys and values before they enter the cache, which the simulation does as they leave."""
    pytest.importorskip("compressed_tensors")
    model = tiny(Qwen2Config)
    part = {"format": name, "granularity": granularity, "symmetric": name != "fp8"}
    sim = QuantizationSimModel(model, {"input_ids": prompts(1)}, preset="w8", kv_cache={"key": part, "value": part})
    sim.compute_encodings([{"input_ids": prompts(8, 12)}], progress=False)
    write_simulation(tmp_path, sim)
    scheme = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert scheme["strategy"] == ("attn_head" if granularity == "per_head" else "tensor")
    engine = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    expected = greedy(sim.model, prompts())
    assert (greedy(engine, prompts()) == expected).all(1).sum() >= 7  # one prompt on the border of two codes
    for site in sim.quantizers.values():
        site.enabled = site.role == "weight"
    assert not torch.equal(greedy(sim.model, prompts()), expected), "the cache would not matter"
    with pytest.raises(ExportError, match="the cache: they are quantized, and torchao files say nothing of them"):
        sim = QuantizationSimModel(model, {"input_ids": prompts(1)}, preset="w8", kv_cache={"key": part, "value": part})
        sim.compute_encodings([{"input_ids": prompts()}], progress=False)
        write_simulation(tmp_path / "torchao", sim, to="torchao")


@pytest.mark.parametrize(
    "kv_cache, why",
    [
        ({"key": "fp8"}, "only one of keys and values is quantized"),
        ({"key": "fp8", "value": "fp8", "recent": 4}, "the newest tokens of the cache stay in float there"),
        ({part: {"format": "fp8", "rotated": True} for part in ("key", "value")}, "the cache is rotated there"),
        ({"key": "int8", "value": "int8"}, "keys and values of the cache are not of one format, symmetric"),
    ],
    ids=["keys", "window", "rotated", "per-token"],
)
def test_caches_that_files_cannot_say_are_refused(kv_cache, why, tmp_path):
    sim = QuantizationSimModel(tiny(LlamaConfig), {"input_ids": prompts(1)}, preset="w8", kv_cache=kv_cache)
    sim.compute_encodings([{"input_ids": prompts()}], progress=False)
    with pytest.raises((ConfigError, ExportError), match=why):
        write_simulation(tmp_path, sim)
    assert not list(tmp_path.iterdir())


def test_activations_that_files_cannot_say_are_refused(tmp_path):
    sim = calibrated(QuantizationSimModel(tiny(LlamaConfig), {"input_ids": prompts(1)}, preset="w8a8"), [prompts()])
    with pytest.raises(
        ConfigError, match=r"embed_tokens.output\[0\]: the simulation quantizes this output.*Rule\('\*'"
    ):
        write_simulation(tmp_path, sim)
    inputs = _with_inputs(tiny(LlamaConfig), "int8", "int8", "symmetric")
    for kind in ("gguf", "torchao"):
        with pytest.raises(
            ExportError, match="they are quantized, and .* files say nothing of them|blocks of its types"
        ):
            write_simulation(tmp_path, inputs, to=kind)
    assert not list(tmp_path.iterdir())
