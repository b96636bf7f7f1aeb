"""Small random language models of transformers. Norm weights are scaled at random: norms of ones would hide faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from bitwright.core.numerics.spec import Preset, QuantSpec
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
    preset = spec if isinstance(spec, str) else Preset(spec, None)
    sim = QuantizationSimModel(model, {"input_ids": prompts(1)}, preset=preset)
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


def write_tokenizer(folder: Path) -> list[Path]:
    """A tokenizer of byte-level BPE: printable characters, some pairs of them, and special tokens; returns its files."""
    special = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
    tokens = {token: i for i, token in enumerate((*special, *map(chr, range(33, 127)), "Ġ", "Ċ"))}
    merges = [(a, b) for a in "etaoin" for b in "nrsth"]
    tokens |= {a + b: len(tokens) + i for i, (a, b) in enumerate(merges) if len(tokens) + i < TOKENS}
    merges = [(a, b) for a, b in merges if a + b in tokens]
    tokenizer = Tokenizer(BPE(tokens, merges))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return [folder / "tokenizer.json", folder / "tokenizer_config.json"]
