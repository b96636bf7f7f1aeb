"""Decoders as one file for prefill and decode: names, attention, what stands beside the file, and the tokens it generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from bitwright.compare.generation import read_generation
from bitwright.compare.verify import verify_folder
from bitwright.errors import ConfigError, ExportError, ModelError
from bitwright.llm import export_decoder
from bitwright.llm.engines import open_engine
from bitwright.llm.openvino_export import _write_tokenizer as write_openvino_tokenizer
from bitwright.torch import QuantizationSimModel
from tests.llm.models import TOKENS, write_tokenizer
from tests.support.simulations import calibrated

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"vocab_size": 48, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 128}
OPT = {"vocab_size": 48, "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
       "max_position_embeddings": 128, "word_embed_proj_dim": 32}  # fmt: skip
WIDE = {"head_dim": 8}
#: class of the model, of its configuration, and what is in it
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SIZES),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SIZES | WIDE),
    "mistral": ("MistralForCausalLM", "MistralConfig", SIZES | {"sliding_window": 6}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", SIZES | WIDE),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", SIZES | WIDE | {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", SIZES),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
}


def decoder(name: str = "llama", **changes: Any) -> Any:
    """A small model with random weights, whose norms are not all one."""
    torch.manual_seed(0)
    model, config, sizes = MODELS[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes | changes)).eval()
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if "norm" in key or "ln_" in key:
                parameter += 0.5 * torch.rand(parameter.shape)
    return made


def simulation(model: nn.Module, preset: str = "w4g32") -> QuantizationSimModel:
    example = {"input_ids": torch.arange(3, 9)[None]}
    return calibrated(QuantizationSimModel(model, example, preset=preset), [example])


@pytest.mark.parametrize("name", MODELS)
def test_a_file_generates_what_its_simulation_generates(name: str, tmp_path: Path) -> None:
    made = export_decoder(simulation(decoder(name)), tmp_path)
    assert made.grouped and made.shared, made.notes
    model = onnx.load(tmp_path / "model.onnx")
    layers = range(len(read_generation(tmp_path / "model_generation.json").shapes))
    assert [i.name for i in model.graph.input] == [
        "input_ids", "attention_mask", "position_ids",
        *(f"past_key_values.{i}.{kind}" for i in layers for kind in ("key", "value")),
    ]  # fmt: skip
    assert [o.name for o in model.graph.output] == [
        "logits", *(f"present.{i}.{kind}" for i in layers for kind in ("key", "value"))
    ]  # fmt: skip
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("GroupQueryAttention") == len(layers) and "Softmax" not in kinds
    report = verify_folder(tmp_path)
    assert report.ok, report.to_text()
    assert [(row.tokens, row.equal + row.close) for row in report.generated] == [(32, 32)] * 4


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_genai_generates_the_same_tokens(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai")
    made = export_decoder(simulation(decoder(name, eos_token_id=None)), tmp_path)
    engine = open_engine(tmp_path)
    for generated in made.generated:
        found = tuple(engine.generate(generated.prompt, len(generated.tokens)))
        # the engine stops in front of token 0, which ends a text where the model names no other
        stop = next((i for i, token in enumerate(generated.tokens) if token == 0), len(generated.tokens))
        assert found[:stop] == generated.tokens[:stop] or min(generated.margins) < 1e-4


@pytest.mark.slow
def test_attention_with_quantizers_keeps_its_operators(tmp_path: Path) -> None:
    sim = simulation(decoder(num_hidden_layers=1), "w8a8")
    with pytest.raises(ExportError, match="attention of layer 0: in plain operators, because a quantizer stands at"):
        export_decoder(sim, tmp_path / "refused", attention="grouped")
    made = export_decoder(sim, tmp_path)
    assert not made.grouped and not made.shared
    assert any("a quantizer stands at" in note for note in made.notes)
    settings = json.loads((tmp_path / "genai_config.json").read_text())
    assert settings["search"]["past_present_share_buffer"] is False
    assert verify_folder(tmp_path).ok


@pytest.mark.slow
def test_a_module_is_written_in_float(tmp_path: Path) -> None:
    made = export_decoder(decoder(num_hidden_layers=1), tmp_path, attention="plain", prompts=[[5, 6], [7]], tokens=4)
    assert [(len(g.prompt), len(g.tokens)) for g in made.generated] == [(2, 4), (1, 4)]
    assert verify_folder(tmp_path).ok


@pytest.mark.slow
def test_a_model_in_float16_keeps_its_cache_in_float16(tmp_path: Path) -> None:
    made = export_decoder(simulation(decoder(num_hidden_layers=1).half()), tmp_path)
    assert made.grouped and made.shared, made.notes
    model = onnx.load(tmp_path / "model.onnx")
    cache = [port for port in (*model.graph.input, *model.graph.output) if port.name.endswith((".key", ".value"))]
    assert {port.type.tensor_type.elem_type for port in cache} == {onnx.TensorProto.FLOAT16}
    report = verify_folder(tmp_path)
    assert [(row.tokens, row.equal + row.close) for row in report.generated] == [(32, 32)] * 4


@pytest.mark.slow
def test_a_model_in_bfloat16_has_its_cache_in_float32_and_plain_attention(tmp_path: Path) -> None:
    made = export_decoder(simulation(decoder(num_hidden_layers=1).bfloat16()), tmp_path)
    assert not made.grouped and any("no bfloat16 kernel" in note for note in made.notes), made.notes
    model = onnx.load(tmp_path / "model.onnx")
    cache = [port for port in (*model.graph.input, *model.graph.output) if port.name.endswith((".key", ".value"))]
    assert {port.type.tensor_type.elem_type for port in cache} == {onnx.TensorProto.FLOAT}
    assert [(row.tokens, row.equal + row.close) for row in verify_folder(tmp_path).generated] == [(32, 32)] * 4


@pytest.mark.engine
@pytest.mark.slow
def test_openvino_keeps_the_cache_as_states(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    from bitwright.llm import AS_SIMULATED, export_openvino

    made = export_openvino(simulation(decoder()), tmp_path)
    model = openvino.Core().read_model(made.model)
    assert {name for port in model.inputs for name in port.get_names()} == {
        "input_ids", "attention_mask", "position_ids", "beam_idx"
    }  # fmt: skip
    assert len(model.get_sinks()) == 4, "a key and a value of each layer"
    weights = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    assert sum(node.get_output_element_type(0) == openvino.Type.i4 for node in weights) == 14
    assert not list(tmp_path.glob("*.onnx*"))
    compiled = openvino.compile_model(model, "CPU", AS_SIMULATED)
    for generated in made.generated:
        request, tokens, past = compiled.create_infer_request(), list(generated.prompt), 0
        for expected in generated.tokens:
            new = len(tokens)
            feeds = {
                "input_ids": np.array([tokens], np.int64),
                "attention_mask": np.ones((1, past + new), np.int64),
                "position_ids": np.arange(past, past + new)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            assert int(np.argmax(request.infer(feeds)["logits"][0, -1])) == expected
            tokens, past = [expected], past + new


@pytest.mark.engine
@pytest.mark.slow
def test_openvino_is_given_weights_of_half_precision_as_they_are(tmp_path: Path) -> None:
    """Mapped from the file of weights and not folded to float32: the IR has no larger constants than the model."""
    openvino = pytest.importorskip("openvino")
    from bitwright.llm import export_openvino

    made = export_openvino(simulation(decoder(num_hidden_layers=1, vocab_size=512).bfloat16()), tmp_path)
    model = openvino.Core().read_model(made.model)
    large = [n for n in model.get_ops() if n.get_type_name() == "Constant" and sum(n.get_output_shape(0)) > 512]
    assert {n.get_output_element_type(0) for n in large} == {openvino.Type.bf16} and len(large) == 2
    engine = open_engine(tmp_path)
    for generated in made.generated:
        found = tuple(engine.generate(generated.prompt, len(generated.tokens)))
        assert found == generated.tokens or min(generated.margins) < 1e-4


def _int8_cache(key: str, value: str, rotated: bool = False) -> dict[str, Any]:
    shared = {"format": "int8", "symmetric": True, "rotated": rotated}
    return {part: {**shared, "granularity": kind} for part, kind in (("key", key), ("value", value))}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    "key, value, rotated",
    [("per_channel", "per_tensor", False), ("per_head", "per_channel", True), ("per_tensor", "per_tensor", False)],
)
def test_a_cache_in_int8_is_stored_by_grouped_attention(key: str, value: str, rotated: bool, tmp_path: Path) -> None:
    tokens = torch.randint(3, 48, (4, 24), generator=torch.Generator().manual_seed(0))
    model = decoder(num_hidden_layers=1, eos_token_id=None)
    example = {"input_ids": tokens[:1]}
    sim = QuantizationSimModel(model, example, preset="w4g32", kv_cache=_int8_cache(key, value, rotated))
    sim.compute_encodings([{"input_ids": tokens}], progress=False)
    made = export_decoder(sim, tmp_path)
    assert made.grouped and made.shared and any("are stored in int8" in note for note in made.notes), made.notes
    ports = onnx.load(tmp_path / "model.onnx").graph
    cache = [port for port in (*ports.input, *ports.output) if port.name.endswith((".key", ".value"))]
    assert len(cache) == 4 and {port.type.tensor_type.elem_type for port in cache} == {onnx.TensorProto.INT8}
    report = verify_folder(tmp_path)
    assert report.ok, report.to_text()
    assert [(row.tokens, row.equal + row.close) for row in report.generated] == [(32, 32)] * 4
    pytest.importorskip("onnxruntime_genai")
    engine = open_engine(tmp_path)
    for generated in made.generated:
        found = tuple(engine.generate(generated.prompt, len(generated.tokens)))
        stop = next((i for i, token in enumerate(generated.tokens) if token == 0), len(generated.tokens))
        assert found[:stop] == generated.tokens[:stop] or min(generated.margins) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["per_tensor", "per_token"])
def test_a_cache_in_fp8_is_computed_by_plain_operators(kind: str, tmp_path: Path) -> None:
    tokens = torch.randint(3, 48, (2, 12), generator=torch.Generator().manual_seed(0))
    stored = {part: {"format": "fp8", "granularity": kind, "rotated": kind == "per_token"} for part in ("key", "value")}
    model = decoder(num_hidden_layers=1, eos_token_id=None)
    sim = QuantizationSimModel(model, {"input_ids": tokens[:1]}, preset="w4g32", kv_cache=stored)
    sim.compute_encodings([{"input_ids": tokens}], progress=False)
    with pytest.raises(ExportError, match="float8_e4m3"):
        export_decoder(sim, tmp_path / "grouped", attention="grouped")
    made = export_decoder(sim, tmp_path / "plain")
    assert not made.grouped and any("float8_e4m3" in note for note in made.notes), made.notes
    report = verify_folder(tmp_path / "plain")
    assert report.ok, report.to_text()


@pytest.mark.slow
def test_a_cache_of_which_only_keys_are_quantized_stays_in_plain_operators(tmp_path: Path) -> None:
    tokens = torch.randint(3, 48, (2, 12))
    kept = {"key": _int8_cache("per_tensor", "per_tensor")["key"]}
    model = decoder(num_hidden_layers=1)
    sim = QuantizationSimModel(model, {"input_ids": tokens[:1]}, preset="w4g32", kv_cache=kept)
    sim.compute_encodings([{"input_ids": tokens}], progress=False)
    made = export_decoder(sim, tmp_path)
    assert not made.grouped and any("only one of them is quantized" in note for note in made.notes), made.notes


@pytest.mark.engine
@pytest.mark.slow
def test_openvino_genai_generates_from_text_and_tokens_what_the_simulation_generates(tmp_path: Path) -> None:
    package = pytest.importorskip("openvino_genai")
    pytest.importorskip("openvino_tokenizers")
    import openvino

    from bitwright.llm import AS_SIMULATED, export_openvino

    write_tokenizer(tmp_path)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    file = str(tmp_path / "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file, **names)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    made = export_openvino(
        simulation(decoder(vocab_size=TOKENS)), tmp_path / "model", tokenizer=str(tmp_path / "tokenizer")
    )
    assert not any(note.startswith("tokenizer") for note in made.notes)
    pipeline = package.LLMPipeline(str(tmp_path / "model"), "CPU", **AS_SIMULATED)
    config = package.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.ignore_eos, config.apply_chat_template = 32, False, True, False
    for generated in made.generated:
        (found,) = pipeline.generate(openvino.Tensor(np.array([generated.prompt], np.int64)), config).tokens
        assert tuple(found) == generated.tokens
    prompt = "the other"
    ids = openvino.Tensor(np.array([tokenizer(prompt)["input_ids"]], np.int64))
    (found,) = pipeline.generate(ids, config).tokens
    assert pipeline.generate(prompt, config) == tokenizer.decode(found, skip_special_tokens=True)


@pytest.mark.engine
def test_a_tokenizer_that_openvino_cannot_convert_is_noted(tmp_path: Path) -> None:
    pytest.importorskip("openvino_tokenizers")
    empty = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    found = write_openvino_tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=empty), tmp_path)
    assert len(found) == 1 and "because its converter fails: " in found[0] and not list(tmp_path.iterdir())


def test_wrong_uses_are_told_before_any_work(tmp_path: Path) -> None:
    model = decoder(num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"attention: 'groupd' is none.*grouped"):
        export_decoder(model, tmp_path, attention="groupd")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="it has no config, so it is not a model of transformers"):
        export_decoder(nn.Linear(2, 2), tmp_path)
    with pytest.raises(ConfigError, match="prompt 1 holds 48, and the vocabulary has 48 tokens"):
        export_decoder(model, tmp_path, prompts=[[3], [48]])
    with pytest.raises(ConfigError, match="prompt 0 is a text, and there is no tokenizer"):
        export_decoder(model, tmp_path, prompts=["once"])
    with pytest.raises(ConfigError, match=r"there is no tokenizer.json"):
        export_decoder(model, tmp_path, tokenizer=tmp_path)
    bert = transformers.BertModel(transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(ModelError, match="BertModel"):
        export_decoder(bert, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_damaged_record_of_what_was_generated_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model_generation.json"
    path.write_text('{"model": "model.onnx"}')
    with pytest.raises(ExportError, match="model_generation.json: it is not what export_decoder writes: KeyError"):
        read_generation(path)


@pytest.mark.slow
def test_heads_of_a_size_without_a_kernel_stay_in_plain_operators(tmp_path: Path) -> None:
    sim = simulation(decoder(num_hidden_layers=1, head_dim=12))
    made = export_decoder(sim, tmp_path, tokens=2)
    assert not made.grouped
    assert "because heads of 12 channels are none of its kernel, which takes multiples of 8" in str(made.notes)
    assert verify_folder(tmp_path).ok
