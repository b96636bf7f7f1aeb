"""Roles of parameters, found from the graphs of many architectures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification

from bitwright import Rule
from bitwright.errors import ConfigError
from bitwright.llm.roles import transformer
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel
from tests.llm.models import SIZES, prompts, tiny

GATED = {"embedding": 1, "q": 2, "k": 2, "v": 2, "o": 2, "gate": 2, "up": 2, "down": 2}
PLAIN = {"embedding": 1, "q": 2, "k": 2, "v": 2, "o": 2, "up": 2, "down": 2}
JOINT = {"embedding": 1, "qkv": 2, "o": 2, "up": 2, "down": 2}
ROUTED = {"embedding": 1, "q": 2, "k": 2, "v": 2, "o": 2, "router": 2, "expert": 4}
_N = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
# architecture -> changes of the configuration, roles of its matrices
ARCHITECTURES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    **{
        kind: ({}, {**GATED, "lm_head": 1})
        for kind in (
            "llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "olmo3", "stablelm", "granite", "exaone4", "helium",
            "seed_oss", "hunyuan_v1_dense", "bitnet",
        )
    },
    # the output layer is the table of tokens
    **{kind: ({}, GATED) for kind in ("gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "smollm3", "ernie4_5")},
    **{kind: ({}, {**PLAIN, "lm_head": 1}) for kind in ("phi", "nemotron", "arcee")},
    "starcoder2": ({}, PLAIN),
    "gptj": ({**_N, "rotary_dim": 8}, {**PLAIN, "lm_head": 1}),
    "gpt_neo": ({"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}, {**PLAIN, "position": 1}),
    "opt": ({"ffn_dim": 96, "word_embed_proj_dim": 64}, {**PLAIN, "position": 1}),
    "gpt2": (_N, {**JOINT, "position": 1}),
    "gpt_bigcode": (_N, {**JOINT, "position": 1}),
    "gpt_neox": ({}, {**JOINT, "lm_head": 1}),
    "bloom": (_N, JOINT),
    "mpt": ({"d_model": 64, "n_heads": 4, "n_layers": 2}, JOINT),
    "codegen": ({**_N, "rotary_dim": 8}, {**JOINT, "lm_head": 1}),
    "phi3": ({}, {"embedding": 1, "qkv": 2, "o": 2, "gate_up": 2, "down": 2, "lm_head": 1}),
    "glm": ({}, {"embedding": 1, "q": 2, "k": 2, "v": 2, "o": 2, "gate_up": 2, "down": 2, "lm_head": 1}),
    "mixtral": (_EXPERTS, {**ROUTED, "lm_head": 1}),
    "qwen3_moe": ({**_EXPERTS, "moe_intermediate_size": 32}, {**ROUTED, "lm_head": 1}),
    "olmoe": (_EXPERTS, {**ROUTED, "lm_head": 1}),
    "granitemoe": (_EXPERTS, {**ROUTED, "lm_head": 1}),
}  # fmt: skip

WITH_HEAD_DIM = (
    "helium",
    "seed_oss",
    "hunyuan_v1_dense",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "qwen3_moe",
)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_matrix_has_its_role(kind: str):
    changes, expected = ARCHITECTURES[kind]
    view = transformer(tiny(CONFIG_MAPPING[kind], **{"head_dim": 16, **changes} if kind in WITH_HEAD_DIM else changes))
    matrices = [part for part in view.parts if len(part.shape) > 1]
    assert Counter(part.role for part in matrices) == expected
    assert all(part.axis is not None for part in matrices if part.role not in ("embedding", "position"))
    assert {part.role for part in view.parts if len(part.shape) == 1} <= {"norm", "bias"}
    assert not view.unrecognised and len(view.cache) == 2
    assert {part.block for part in matrices} == {None, 0, 1}


class _Odd(nn.Module):
    """A recurrent model of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.decay = nn.Parameter(torch.rand(8))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cumsum(self.table(tokens) * self.decay, 1))


def test_what_is_not_recognised_is_named_with_what_reads_it():
    view = transformer(_Odd())
    assert [(part.name, part.role) for part in view.parts] == [
        ("decay", "other"),
        ("table.weight", "embedding"),
        ("head.weight", "lm_head"),
        ("head.bias", "bias"),
    ]
    assert "read by model.mul (Mul)" in str(view) and view.stack == ""


def test_patterns_mean_roles_or_names():
    view = transformer(tiny(CONFIG_MAPPING["llama"]))
    assert [part.name for part in view.matching("role:down")] == [
        f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1)
    ]
    assert len(view.matching("model.layers.0.mlp.*")) == 3 and view.role("lm_head.weight") == "lm_head"
    assert [part.name for part in view.matching("lm_head")] == ["lm_head.weight"]
    with pytest.raises(ConfigError, match=r"role:dwn: there is no such role \(did you mean 'down'"):
        view.matching("role:dwn")
    with pytest.raises(ConfigError, match="no such parameter"):
        view.role("lm_heed.weight")


def _stored(sim: Any) -> dict[str, str]:
    return {name: site.spec.describe() for name, site in sim.quantizers.items()}


class _Decoder(nn.Module):
    """One block with a gated network."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.attend = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        q, k, v, o = self.attend
        h = self.norms[0](x)
        keys, values = (layer(h).view(1, -1, 4, 16).transpose(1, 2) for layer in (k, v))
        scores = q(h).view(1, -1, 4, 16).transpose(1, 2) @ keys.transpose(2, 3) / 4
        scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -1e9)
        x = x + o((scores.softmax(-1) @ values).transpose(1, 2).reshape(1, -1, 64))
        h = self.norms[1](x)
        gate = self.gate(h)
        x = x + self.down(gate * torch.sigmoid(gate) * self.up(h))
        return self.head(self.norms[2](x))


def test_rules_name_roles_in_both_front_ends(tmp_path: Path):
    model, tokens = _Decoder().eval(), torch.arange(8)[None]
    entries = [
        {"match": "role:v", "weight": {"format": "int8"}},
        {"match": "role:down", "weight": {"quantized": False}},
        {"match": "role:gate", "weight": {"format": "int3"}},
        {"match": "role:lm_head", "weight": {"format": "int6"}},
        {"match": "role:key_cache", "input": {"format": "int8"}},
        {"match": "role:value_cache", "input": {"format": "int5", "dynamic": True}},
    ]
    config = {"preset": "w4g32", "rules": entries}
    torch.onnx.export(model, (tokens,), str(tmp_path / "model.onnx"), dynamo=False, verbose=False)
    sims = (
        QuantizationSimModel(model, tokens, config_file=config),
        OnnxSim(onnx.load(tmp_path / "model.onnx"), config_file=config),
    )
    for sim in sims:
        stored = [text.replace("axis 0", "axis 1") for text in _stored(sim).values()]
        blocks = "symmetric per block of 32 (axis 1), minmax"
        assert sorted(stored) == sorted([
            *[f"int4 {blocks}"] * 4, f"int8 {blocks}", f"int6 {blocks}", f"int3 {blocks}",
            "int8 asymmetric per tensor, minmax", "int5 symmetric per token, range at run time",
        ])  # fmt: skip
    with pytest.raises(ConfigError, match=r"role:valu_cache: there is no such role \(did you mean 'value_cache'"):
        Rule("role:valu_cache", quantized=False)


@pytest.mark.parametrize(
    "preset, expected",
    [
        ("w4g128", {}),
        ("w4a8_dynamic", {}),
        ("nvfp4", {}),
        ("w4a8", dict.fromkeys(("embedding", "lm_head"), "int8 symmetric per channel (axis 0), minmax")),
        ("w8", dict.fromkeys(("embedding", "lm_head"), "int8 symmetric per channel (axis 0), minmax")),
    ],
)
def test_presets_below_eight_bits_leave_out_table_and_output_layer(preset: str, expected: dict[str, str]):
    model = tiny(CONFIG_MAPPING["llama"], num_hidden_layers=1)
    sim = QuantizationSimModel(model, {"input_ids": prompts(1)}, preset=preset)
    names = {"embedding": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
    found = _stored(sim)
    assert {role: found[name] for role, name in names.items() if name in found} == expected
    if not expected:
        why = {row.name: row.how for row in sim.coverage().rows}
        assert "makes the logits, and weights have fewer than 8 bits" in why["lm_head.weight"]


def test_a_rule_takes_table_and_output_layer_below_eight_bits_and_a_classifier_has_no_ends():
    model = tiny(CONFIG_MAPPING["llama"], num_hidden_layers=1)
    config = {"preset": "w4", "rules": [{"match": "*", "weight": {"quantized": True}}]}
    sim = QuantizationSimModel(model, {"input_ids": prompts(1)}, config_file=config)
    assert _stored(sim)["lm_head.weight"] == _stored(sim)["model.embed_tokens.weight"]
    assert _stored(sim)["lm_head.weight"].startswith("int4")
    config = CONFIG_MAPPING["bert"](**SIZES, num_labels=3)
    classifier = AutoModelForSequenceClassification.from_config(config).eval()
    sim = QuantizationSimModel(classifier, {"input_ids": prompts(1)}, preset="w4")
    assert _stored(sim)["bert.embeddings.word_embeddings.weight"].startswith("int4")
    assert _stored(sim)["classifier.weight"].startswith("int4")
