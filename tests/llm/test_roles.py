"""Roles of parameters, found from the graphs of many architectures."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from bitwright.errors import ConfigError
from bitwright.llm.roles import transformer
from tests.llm.models import tiny

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
