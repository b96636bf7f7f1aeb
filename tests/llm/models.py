"""Small random language models of transformers. Norm weights are scaled at random: norms of ones would hide faults."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from bitwright.core.numerics.spec import Preset, QuantSpec
from bitwright.core.placement.config import make_rules
from bitwright.torch import QuantizationSimModel

VOCABULARY = 96
TOKENS = 128  # of the tokenizer that is written here
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny(config: type[PretrainedConfig], **changes: Any) -> Any:
    """A model of that configuration in eval mode, whose answers depend on every weight."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(4)
    return model


def weight_only(model: Any, spec: QuantSpec | str, *, tables: bool = False) -> QuantizationSimModel:
    """A calibrated simulation of quantized weights of linear layers, of tables and the output layer too with ``tables``."""
    rules = replace(make_rules(None, spec if isinstance(spec, str) else Preset(spec, None)), ends="as others")
    sim = QuantizationSimModel(model, {"input_ids": prompts(1)}, config_file=rules)
    for site in sim.quantizers.values():
        if not tables and ("embed" in site.name or "lm_head" in site.name):
            site.enabled = False
    sim.compute_encodings(progress=False)
    return sim


def prompts(count: int = 8, length: int = 6) -> torch.Tensor:
    """Token ids without the special ones."""
    return torch.randint(4, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))


def greedy(model: Any, tokens: torch.Tensor, count: int = 32) -> torch.Tensor:
    """``count`` tokens after each prompt, the likeliest at each step."""
    with torch.no_grad():
        answer = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            suppress_tokens=[2, 3],  # tokens that end a text
        )
    return answer[:, tokens.shape[1] :]


def saved(folder: Path, config: type[PretrainedConfig], *, shard: str = "40KB", **changes: Any) -> Any:
    """A tiny model, written to ``folder`` in several shards with a tokenizer of one token a character."""
    model = tiny(config, **changes)
    model.save_pretrained(folder, max_shard_size=shard)
    vocabulary = {chr(32 + code): code for code in range(VOCABULARY - 1)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return model


def text(count: int = 1500) -> str:
    """Characters that are tokens, with a pattern in them."""
    return "".join(chr(40 + (i * i + i // 7) % 80) for i in range(count))


def write_tokenizer(folder: Path, size: int = TOKENS) -> list[Path]:
    """A tokenizer of byte-level BPE: printable characters, pairs of them, and special tokens; returns its files."""
    special = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
    tokens = {token: i for i, token in enumerate((*special, *map(chr, range(33, 127)), "Ġ", "Ċ"))}
    pairs = itertools.product("etaoinshrdlucm", "nrsthaeioudlcmfgpwyb")
    merges = list(itertools.islice(pairs, size - len(tokens)))
    tokens |= {a + b: len(tokens) + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(BPE(tokens, merges))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return [folder / "tokenizer.json", folder / "tokenizer_config.json"]


def llama_cpp(
    path: Path, given: list[Any], count: int = 32, adapter: Path | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The greedy tokens of llama.cpp after each prompt (text or token ids), and the logarithm of the first one's probability.

    Its cache holds float32 numbers, as that of transformers does.
    """
    engine = pytest.importorskip("xllamacpp")
    options = engine.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.n_gpu_layers = str(path), 128, 1, 0
    options.warmup, options.fit_params, options.verbosity, options.cpuparams.n_threads = False, False, -1, 1
    options.cache_type_k = options.cache_type_v = engine.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = engine.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if adapter is not None:
        options.lora_adapters = [engine.CommonAdapterLoraInfo(str(adapter), 1.0)]
    server = engine.Server(options)
    found, first = [], []
    for prompt in given:
        answer = server.handle_completions(
            {"prompt": prompt, "max_tokens": count, "temperature": 0, "top_k": 1, "n_probs": 1, "ignore_eos": True}
        )
        content = answer["choices"][0]["logprobs"]["content"]
        found.append([token["id"] for token in content])
        first.append(content[0]["logprob"])
    return torch.tensor(found), torch.tensor(first)
