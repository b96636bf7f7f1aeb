"""What the ``save_pretrained`` of transformers writes of a simulated model, and its caches of keys and values."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.errors import ModelError
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated

transformers = pytest.importorskip("transformers")
IDS = torch.randint(0, 64, (1, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    config = transformers.LlamaConfig(num_hidden_layers=1, tie_word_embeddings=True, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def test_the_weights_on_their_grids_are_written(llama: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its float weights were, in silence."""
    sim = calibrated(QuantizationSimModel(llama, {"input_ids": IDS}, preset="w4g32"))
    sim.model.save_pretrained(tmp_path / "quantized")
    assert "weights as the simulation computes with them" in caplog.text
    with torch.no_grad():
        read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "quantized").eval()
        wanted = sim.model(input_ids=IDS).logits
        torch.testing.assert_close(read(IDS).logits, wanted, rtol=1e-4, atol=1e-5)
        assert (wanted - llama(IDS).logits).abs().max() > 1e-2
    other = copy.deepcopy(sim)
    assert vars(other.model)["save_pretrained"].sim is other
    plain = sim.remove()
    assert "save_pretrained" not in vars(plain)
    plain.save_pretrained(tmp_path / "float")
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "float").eval()
    with torch.no_grad():
        assert torch.equal(read(IDS).logits, llama(IDS).logits)


def test_what_no_state_dict_can_hold_is_refused() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.w * 2)

    sim = calibrated(QuantizationSimModel(Computed(), torch.randn(2, 4), preset="w4"))
    with pytest.raises(ModelError, match="computed of parameters in every run.*sim.export"):
        sim.dequantized_state_dict()


def test_generation_agrees_with_every_cache(llama: Any) -> None:
    sim = QuantizationSimModel(llama, {"input_ids": IDS}, preset="w8", kv_cache={"key": "int8", "value": "int4"})
    sim.compute_encodings([{"input_ids": IDS}])
    options: tuple[dict[str, Any], ...] = ({}, {"cache_implementation": "static"}, {"use_cache": False})
    found = [sim.model.generate(IDS, max_new_tokens=8, do_sample=False, **option).tolist() for option in options]
    assert found[0] == found[1] == found[2]
