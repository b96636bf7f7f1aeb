"""Written folders in their engines, as `bitwright llm perplexity` and `bitwright llm generate` open them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import FalconConfig, LlamaConfig, Qwen2Config

from bitwright.llm import engines, open_engine, quantize, read_checkpoint
from bitwright.llm.checkpoint import assign
from bitwright.llm.packed import PackedWeight
from tests.llm.models import prompts, tiny, write_tokenizer

ROW = torch.randint(4, 96, (1, 6), generator=torch.Generator().manual_seed(3))


def _saved(folder: Path, config: type) -> torch.nn.Module:
    """A model whose likeliest tokens after some of ``ROW`` are the end of the text (2) and half a letter (97)."""
    model = tiny(config, vocab_size=128, tie_word_embeddings=False)
    with torch.no_grad():
        states = model.base_model(ROW).last_hidden_state[0]
        model.lm_head.weight[[2, 97]] = 40 * states[[2, 4]] / states[[2, 4]].square().sum(-1, keepdim=True)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"~"', '"Ã"'), encoding="utf-8")
    return model


def _simulated(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    for weight in read_checkpoint(folder):
        packed = isinstance(weight, PackedWeight)
        assign(model, weight.name, torch.from_numpy(weight.dequantize()) if packed else weight.values)
    return model


@pytest.mark.engine
@pytest.mark.parametrize(
    "to, preset, package, config",
    [
        ("gguf", "w8g32", "xllamacpp", LlamaConfig),
        ("compressed-tensors", "w4g32_asym", "compressed_tensors", Qwen2Config),
        ("compressed-tensors", "w8", "compressed_tensors", FalconConfig),
        ("torchao", "w4g32", "torchao", Qwen2Config),
    ],
)
def test_what_was_written_is_measured_and_run(
    to: str, preset: str, package: str, config: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    source, written = tmp_path / "model", tmp_path / "written"
    model = _saved(source, config)
    quantize(source, preset, to=to, out=written, progress=False)
    model = _simulated(model, written)
    engine = open_engine(written)
    with torch.no_grad():
        expected = model(ROW).logits
    found = engine.logits(ROW)
    near = 0.2 if to == "gguf" else 1e-4  # llama.cpp rounds the inputs of layers to 8 bits
    assert {2, 97} <= set(found[0].argmax(-1).tolist())
    assert (found.log_softmax(-1) - expected.log_softmax(-1)).abs().max() < near
    start = prompts(1)[0].tolist()
    made = engine.generate(start, 4)
    assert len(made) == 4 or made[-1] == 2
    assert 2 not in made[:-1]
    with torch.no_grad():
        chosen = model(torch.tensor([start + made])).logits[0, len(start) - 1 : -1].log_softmax(-1)
    assert (chosen.amax(-1) - chosen.gather(1, torch.tensor(made)[:, None])[:, 0]).max() < near
    if to == "gguf":
        monkeypatch.setattr(engines, "_MOST_LISTED", 9)
        some, following = engine.logits(ROW).log_softmax(-1), ROW[:, 1:, None]
        assert torch.allclose(
            some[:, :-1].gather(2, following), found.log_softmax(-1)[:, :-1].gather(2, following), atol=1e-4
        )
        assert torch.allclose(some.exp().sum(-1), torch.ones(ROW.shape), atol=1e-4)
