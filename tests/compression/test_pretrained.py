"""Models of transformers are saved and loaded as their own class after pruning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bitwright
from bitwright.torch import load_compressed

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
DATA = [{"input_ids": torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(i))} for i in range(2)]


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_saved_as_its_own_class(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made: Any = getattr(transformers, f"{name}ForCausalLM")
    model = made(made.config_class(**SIZES)).eval()
    result = bitwright.compress(model, DATA, {"macs": 0.75}, widths=2, reconstruction=False)
    config = result.model.config
    assert config.intermediate_size < 48 and config.num_attention_heads == 2 * config.num_key_value_heads
    assert model.config.intermediate_size == 48
    result.model.save_pretrained(tmp_path / "model")
    again = made.from_pretrained(tmp_path / "model").eval()
    torch.testing.assert_close(again(**DATA[0]).logits, result.model(**DATA[0]).logits)
    result.save(tmp_path / "plan")
    rebuilt = load_compressed(made(made.config_class(**SIZES)).eval(), tmp_path / "plan")
    torch.testing.assert_close(rebuilt(**DATA[0]).logits, result.model(**DATA[0]).logits)


def test_heads_whose_number_no_configuration_can_say() -> None:
    """BERT computes the width of a head from its number: the module works all the same, and its plan rebuilds it."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"})
    model = transformers.BertModel(config).eval()
    result = bitwright.compress(model, DATA, {"macs": 0.7}, widths=1, reconstruction=False)
    heads = {row.after for row in result.rows if row.kind == "heads"}
    assert len(heads) == 1 and heads.pop() < 4
    assert result.model.config.num_attention_heads == 4
    assert result.model(**DATA[0]).last_hidden_state.shape == (2, 9, 32)
