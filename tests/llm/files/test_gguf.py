"""GGUF files: read by the gguf package, read back, and run by llama.cpp."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from bitwright import Preset, Rule
from bitwright.core.numerics.formats import SCALE_FORMATS
from bitwright.core.numerics.granularity import PerBlock, PerToken
from bitwright.core.numerics.spec import PRESETS, QuantSpec, dynamic_spec
from bitwright.core.placement.config import make_rules
from bitwright.errors import ExportError, GranularityError
from bitwright.llm import (
    FloatWeight,
    PackedWeight,
    packed_weights,
    quantize,
    read_checkpoint,
    write_checkpoint,
    write_simulation,
)
from bitwright.llm.files.gguf_blocks import BLOCKS, Reader, from_blocks, to_blocks
from bitwright.llm.packed import signed
from bitwright.torch import QuantizationSimModel, apply_reconstruction
from tests.llm.models import TOKENS, greedy, llama_cpp, prompts, tiny, weight_only, write_tokenizer
from tests.support.simulations import calibrated

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
MODELS = {
    "llama": (LlamaConfig, {}),
    "llama-tied-with-biases": (LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True}),
    "llama-3.1": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "mistral": (MistralConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "gemma": (GemmaConfig, {"head_dim": 16}),
    "gemma2": (Gemma2Config, {**GEMMA, "num_hidden_layers": 4}),
    "gemma3": (Gemma3TextConfig, {**GEMMA, "num_hidden_layers": 7}),
    "phi3": (Phi3Config, {}),
    "gpt2": (GPT2Config, {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
}
SPECS = {
    "Q8_0": QuantSpec("int8", PerBlock(32), scale_format="float16"),
    "Q4_0": QuantSpec("int4", PerBlock(32), scale_format="float16"),
    "Q4_1": QuantSpec("uint4", PerBlock(32), "asymmetric", scale_format="float12"),
    "Q5_0": QuantSpec("int5", PerBlock(32), scale_format="float16"),
    "MXFP4": PRESETS["mxfp4"].weight,
    **{f"Q{bits}_K": PRESETS[f"q{bits}_k"].weight for bits in (3, 4, 5, 6)},
    **{f"Q{bits}_K with offsets": PRESETS[f"q{bits}_k_offset"].weight for bits in (4, 5)},
}
_256 = {"hidden_size": 256, "intermediate_size": 256}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "n_embd": 256}


def _model(name, spec=None):
    config, changes = MODELS[name]
    if spec is not None and spec.scale_format.shared == "blocks":  # blocks of 256
        changes = {**changes, **{key: size for key, size in WIDE.items() if key in changes or key[0] in "hi"}}
    return tiny(config, attn_implementation="eager", vocab_size=TOKENS, **changes)


def _floats(model):
    return [FloatWeight(name, parameter.detach()) for name, parameter in model.named_parameters()]


@pytest.mark.engine
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_what_transformers_computes(name, tmp_path):
    """Names, numbers and forms of every architecture: in float32 both give the same tokens."""
    model = _model(name)
    tokenizer = write_tokenizer(tmp_path)
    write_checkpoint(tmp_path / "out", _floats(model), model.config.to_dict(), to="gguf", tokenizer=tokenizer)
    for stored, found in zip(_floats(model), read_checkpoint(tmp_path / "out"), strict=True):
        assert stored.name == found.name
        # of Gemma's norms the file holds the weight plus one
        torch.testing.assert_close(found.values, stored.values, rtol=0, atol=1e-6 if "gemma" in name else 0)
    tokens, first = llama_cpp(tmp_path / "out/model.gguf", prompts().tolist())
    with torch.no_grad():
        expected = model(prompts()).logits[:, -1].log_softmax(-1).gather(1, tokens[:, :1])[:, 0]
    assert (first - expected).abs().max() < 2e-3
    with torch.no_grad():
        logits = (
            model(torch.cat((prompts(), tokens), 1)).logits[:, 5:-1].index_fill(2, torch.tensor([2, 3]), -torch.inf)
        )
    behind = logits.max(-1).values - logits.gather(2, tokens[..., None])[..., 0]
    assert behind.max() < 2e-3
    if "gemma" not in name:  # whose activation llama.cpp looks up in a table of float16 numbers
        assert torch.equal(tokens, greedy(model, prompts()))


@pytest.mark.engine
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_blocks_hold_the_simulation(name, spec, tmp_path, request):
    """The gguf package unpacks the very numbers that the simulation computes with; codes come back."""
    model = _model(name, spec)
    sim = weight_only(model, spec, tables=True)
    write_checkpoint(tmp_path, packed_weights(sim), model.config.to_dict(), to="gguf")
    back = {weight.name: weight for weight in read_checkpoint(tmp_path)}
    for weight in packed_weights(sim):
        found = back.pop(weight.name)
        assert np.array_equal(found.dequantize(), weight.dequantize()), weight.name
        if isinstance(weight, PackedWeight):
            assert np.array_equal(signed(found)[0], signed(weight)[0])
            assert found.layout.group == weight.layout.group and found.layout.scale_format == weight.layout.scale_format
    assert not back
    gguf = pytest.importorskip("gguf")
    kind = request.node.callspec.id.removeprefix(f"{name}-").removesuffix(" with offsets")
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    up = read["blk.1.ffn_up.weight"]
    values = gguf.quants.dequantize(up.data, up.tensor_type)
    original = {"llama": "model.layers.1.mlp.up_proj.weight", "gpt2": "transformer.h.1.mlp.c_fc.weight"}[name]
    expected = next(w for w in packed_weights(sim) if w.name == original).dequantize()
    assert up.tensor_type.name == kind
    expected = expected if name == "llama" else expected.T
    if spec.symmetry == "float_zero_point":  # llama.cpp subtracts an offset where the simulation has a zero point
        np.testing.assert_allclose(values, expected, rtol=0, atol=2.0**-22 * np.abs(expected).max())
    else:
        assert np.array_equal(values, expected)


@pytest.mark.engine
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_llama_cpp_runs_the_quantized_model(spec, tmp_path):
    """It rounds the inputs of layers to 8 bits by itself: the probabilities are near, not equal."""
    model = _model("llama", spec)
    sim = weight_only(model, spec)
    write_checkpoint(
        tmp_path, packed_weights(sim), model.config.to_dict(), to="gguf", tokenizer=write_tokenizer(tmp_path)
    )
    tokens, first = llama_cpp(tmp_path / "model.gguf", prompts().tolist(), 4)
    with torch.no_grad():
        expected, floats = (m(prompts()).logits[:, -1].log_softmax(-1) for m in (sim.model, model))
    found = expected.gather(1, tokens[:, :1])[:, 0]
    assert (first - found).abs().max() < 0.2
    assert (expected - floats).abs().max() > 0.01


@pytest.mark.engine
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q5_0", "MXFP4", "Q6_K"])
def test_llama_cpp_generates_what_a_simulation_of_its_inputs_generates(name, tmp_path):
    """With inputs of layers rounded as llama.cpp rounds them nothing is left between the two.

    Sums have another order on some CPUs, so that an input on the border of two codes may take the other one: in one prompt of
    eight.
    """
    model, spec = _model("llama", SPECS[name]), SPECS[name]
    size, scales = BLOCKS[name].inputs
    inputs = dynamic_spec("int8", PerToken(size), scale_format=SCALE_FORMATS[scales])
    rules = make_rules(None, Preset(spec, inputs)).extended([Rule("role:embedding", quantized=False),
                                                             Rule("role:lm_head", quantized=False)])  # fmt: skip
    sim = calibrated(QuantizationSimModel(model, {"input_ids": prompts(1)}, config_file=rules))
    write_simulation(tmp_path / "out", sim, to="gguf", tokenizer=write_tokenizer(tmp_path))
    tokens, first = llama_cpp(tmp_path / "out/model.gguf", prompts().tolist())
    assert (tokens == greedy(sim.model, prompts())).sum(1).min() >= 30
    with torch.no_grad():
        expected = sim.model(prompts()).logits[:, -1].log_softmax(-1).gather(1, tokens[:, :1])[:, 0]
    assert (first - expected).abs().sort().values[-2] < 1e-4


def test_inputs_that_llama_cpp_does_not_compute_are_refused(tmp_path):
    preset = Preset(SPECS["Q4_0"], dynamic_spec("int8"))
    sim = calibrated(QuantizationSimModel(_model("llama"), {"input_ids": prompts(1)}, preset=preset))
    with pytest.raises(ExportError, match="rounds inputs of Q4_0 layers to int8 in blocks of 32 with float16 scales"):
        write_simulation(tmp_path, sim, to="gguf")


@pytest.mark.engine
def test_tokenizer_cuts_text_as_the_original(tmp_path):
    from tokenizers import Tokenizer

    files = write_tokenizer(tmp_path)
    model = _model("llama")
    write_checkpoint(tmp_path / "out", _floats(model), model.config.to_dict(), to="gguf", tokenizer=files)
    keys = Reader(tmp_path / "out/model.gguf").keys
    tokenizer = Tokenizer.from_file(str(files[0]))
    assert keys["tokenizer.ggml.tokens"][:128] == [tokenizer.id_to_token(i) for i in range(TOKENS)]
    assert keys["tokenizer.ggml.bos_token_id"] == 1 and keys["tokenizer.ggml.add_bos_token"] is False
    text = "then an onion, not  12 tents"
    with_text, _ = llama_cpp(tmp_path / "out/model.gguf", [text], 16)
    with_ids, _ = llama_cpp(tmp_path / "out/model.gguf", [tokenizer.encode(text).ids], 16)
    assert torch.equal(with_text, with_ids)


WRONG = {
    "group": (QuantSpec("int8", PerBlock(16), scale_format="float16"), ExportError, "groups of 16.*groups of 32, of 16 in Q3_K"),
    "scale": (QuantSpec("int8", PerBlock(32)), ExportError, "quantize with scale_format='float16'.*write compressed-tensors"),
    "offset": (
        QuantSpec("uint4", PerBlock(32), "asymmetric", scale_format="float16"), ExportError, "scale_format='float12'",
    ),
    "format": (PRESETS["fp8"].weight, ExportError, "write compressed-tensors or torchao, which hold it.*Q8_0, Q4_0"),
}  # fmt: skip


@pytest.mark.parametrize("spec, error, message", WRONG.values(), ids=WRONG)
def test_what_has_no_type_is_refused_before_anything_is_written(spec, error, message, tmp_path):
    model = _model("llama")
    with pytest.raises(error, match=message):
        write_checkpoint(tmp_path, list(packed_weights(weight_only(model, spec))), model.config.to_dict(), to="gguf")
    assert not list(tmp_path.iterdir())


def test_models_that_have_no_place_in_gguf_are_refused(tmp_path):
    model = _model("llama")
    config, weights = model.config.to_dict(), _floats(model)
    wrong = {
        "model_type 'mamba' is not written to GGUF.*llama, mistral": ({"model_type": "mamba"}, weights),
        "positions of type 'yarn'": (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            weights,
        ),
        "llama.cpp has no tensor for it": ({}, [FloatWeight("model.extra.weight", torch.zeros(2))]),
    }
    for message, (changes, held) in wrong.items():
        with pytest.raises(ExportError, match=message):
            write_checkpoint(tmp_path / "out", held, {**config, **changes}, to="gguf")
    files = write_tokenizer(tmp_path)
    with pytest.raises(ExportError, match="a token with id 127, and the model has 100 tokens"):
        write_checkpoint(tmp_path / "out", weights, {**config, "vocab_size": 100}, to="gguf", tokenizer=files)
    with pytest.raises(ExportError, match="no tokenizer.json among"):
        write_checkpoint(tmp_path / "out", weights, config, to="gguf", tokenizer=files[1:])
    document = json.loads(files[0].read_text())
    files[0].write_text(json.dumps({**document, "model": {"type": "Unigram", "vocab": []}}))
    with pytest.raises(ExportError, match="its model is Unigram, and only BPE"):
        write_checkpoint(tmp_path / "out", weights, config, to="gguf", tokenizer=files)
    assert not (tmp_path / "out").exists()


def test_fields_that_a_configuration_leaves_out_are_those_of_its_class(tmp_path):
    model = _model("llama")
    config = {name: value for name, value in model.config.to_dict().items() if name != "max_position_embeddings"}
    write_checkpoint(tmp_path / "out", _floats(model), config, to="gguf")
    assert Reader(tmp_path / "out" / "model.gguf").keys["llama.context_length"] == LlamaConfig().max_position_embeddings
    with pytest.raises(
        ExportError, match="config.json: transformers makes no configuration of it.*copy it from the original"
    ):
        write_checkpoint(tmp_path / "no", _floats(model), {**config, "num_attention_heads": 5}, to="gguf")


@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_windows_that_llama_cpp_does_not_compute_limit_the_context(name, tmp_path, caplog):
    config, _ = MODELS[name]
    model = tiny(config, vocab_size=TOKENS, sliding_window=48)
    write_checkpoint(tmp_path / "out", _floats(model), model.config.to_dict(), to="gguf")
    keys = Reader(tmp_path / "out" / "model.gguf").keys
    assert [keys[key] for key in keys if key.endswith("context_length")] == [48]
    assert "the context is limited to its 48 tokens" in caplog.text


def test_damaged_files_are_named(tmp_path):
    model = _model("llama")
    write_checkpoint(tmp_path, _floats(model), model.config.to_dict(), to="gguf")
    path = tmp_path / "model.gguf"
    whole = path.read_bytes()
    for content, message in (
        (b"GGML" + whole[4:], "does not begin with GGUF"),
        (whole[:200], "its header cannot be read"),
        (whole[:-100], "it ends before the data of lm_head|output"),
    ):
        path.write_bytes(content)
        with pytest.raises(ExportError, match=message):
            list(read_checkpoint(tmp_path))


def test_groups_that_do_not_divide_name_those_that_do(tmp_path):
    model = _model("llama")
    weight = next(w for w in packed_weights(weight_only(model, SPECS["Q8_0"])) if isinstance(w, PackedWeight))
    plan = dataclasses.replace(weight.plan, shape=(8, 80))
    with pytest.raises(GranularityError, match="sums over 80 elements, which groups of 32 do not divide.*groups of 16"):
        write_checkpoint(tmp_path, iter([]), model.config.to_dict(), to="gguf", plans=[plan])


@pytest.mark.parametrize(
    "preset, stored",
    [
        ("w4g32", "float16"),
        ("w4g32_asym", "float12"),
        ("w8g32", "float16"),
        ("w6g16", "q6_k"),
        ("q4_k", "q4_k"),
        ("w4g32_float_zero", "q4_k"),
        ("w5g32_float_zero", "q5_k"),
    ],
)
def test_presets_get_the_scales_of_the_file(preset, stored, tmp_path):
    quantize(_model("qwen2", PRESETS["q4_k"].weight), preset, to="gguf", out=tmp_path, progress=False)
    packed = [weight for weight in read_checkpoint(tmp_path) if isinstance(weight, PackedWeight)]
    assert len(packed) == 14 and {weight.layout.scale_format for weight in packed} == {stored}


@pytest.mark.parametrize(
    "preset, method",
    [("q3_k", "gptq"), ("q4_k_offset", "gptq"), ("q4_k_offset", "seq_mse"), ("q4_k_offset", "autoround")],
)
def test_methods_choose_codes_of_blocks_of_256(preset, method, tmp_path):
    """On scales that are multiples of one number for 256 weights: the file holds the codes, and the outputs gain."""
    model = tiny(LlamaConfig, attn_implementation="eager", vocab_size=TOKENS, num_hidden_layers=1, **_256)
    batches = [{"input_ids": prompts(8, 12)}]
    sim = weight_only(model, PRESETS[preset].weight)
    options = {"iterations": 20} if method == "autoround" else {}
    report = apply_reconstruction(sim, batches, method, progress=False, **options)
    assert report.gain < {"gptq": 0.9, "seq_mse": 0.999, "autoround": 0.999}[method]
    write_simulation(tmp_path, sim, to="gguf", tokenizer=write_tokenizer(tmp_path.parent))
    back = {weight.name: weight for weight in read_checkpoint(tmp_path)}
    assert all(np.array_equal(back[w.name].dequantize(), w.dequantize()) for w in packed_weights(sim))


def test_blocks_of_256_need_rows_of_their_size(tmp_path):
    sim = weight_only(_model("llama"), PRESETS["q6_k"].weight)
    with pytest.raises(ExportError, match="blocks of Q6_K have 256 elements, and it sums over 64"):
        write_simulation(tmp_path, sim, to="gguf")


@pytest.mark.engine
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K"])
def test_blocks_of_llama_cpp_are_read_with_their_offsets(name):
    """Scales and offsets that have nothing to do with each other, also where a group has none: written again, the same."""
    gguf = pytest.importorskip("gguf")
    row, generator = BLOCKS[name], np.random.default_rng(0)
    data = generator.integers(0, 256, (64, row.bytes), np.uint8)
    data[:, :4] = (2.0 ** generator.uniform(-12, -4, (64, 2))).astype(np.float16).view(np.uint8).reshape(64, 4)
    data[0, 4:16] = 0  # neither scales nor offsets
    data[1, 4:8] = 0  # the first groups have offsets alone
    weight = from_blocks("weight", data, (32, 512), row)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name]).reshape(32, 512)
    np.testing.assert_allclose(weight.dequantize(), expected, rtol=0, atol=2.0**-20 * np.abs(expected).max())
    again = from_blocks("weight", to_blocks(weight, row).reshape(64, -1), (32, 512), row)
    np.testing.assert_array_equal(again.dequantize(), weight.dequantize())


def test_offsets_that_share_no_number_are_refused():
    held = PackedWeight.nearest("up.weight", np.linspace(-1, 1, 512, dtype=np.float32).reshape(2, 256),
                                PRESETS["q4_k_offset"].weight)  # fmt: skip
    shift = np.array(held.encoding.shift) + np.float32(0.1)
    with pytest.raises(
        ExportError, match=r"up.weight: the offsets .* not multiples of one float16 number.*q4_k_offset"
    ):
        to_blocks(dataclasses.replace(held, encoding=dataclasses.replace(held.encoding, shift=shift)), BLOCKS["Q4_K"])
