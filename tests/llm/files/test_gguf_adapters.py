"""Adapters of PEFT as GGUF files: read by the gguf package, read back, and added by llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from bitwright.errors import ConfigError, ExportError
from bitwright.llm import FloatWeight, read_gguf_adapter, write_checkpoint, write_gguf_adapters
from bitwright.torch.adapters import adapter_layers
from tests.llm.models import TOKENS, greedy, llama_cpp, prompts, tiny, write_tokenizer
from tests.support.lora import PeftLinear

LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")


def adapted(model: nn.Module) -> nn.Module:
    """Two adapters, ``near`` of one rank and ``far`` whose scales differ between layers; ``far`` is active."""
    for block in model.get_submodule("model.layers"):  # type: ignore[union-attr]
        for at, name in enumerate(LAYERS):
            parent, _, last = name.rpartition(".")
            layer = PeftLinear(block.get_submodule(name))  # type: ignore[arg-type]
            layer.add("near", 2, 4)
            layer.add("far", 4 - at % 2, 8 + 8 * at)
            layer.set_adapter(["far"])
            with torch.no_grad():
                layer.lora_B["far"].weight.mul_(3)  # type: ignore[operator, union-attr]
            setattr(block.get_submodule(parent), last, layer)
    return model.eval()


@pytest.mark.engine
@pytest.mark.parametrize("config", [LlamaConfig, MistralConfig, Qwen2Config])
def test_llama_cpp_adds_what_the_layers_add(config: Any, tmp_path: Path):
    model = tiny(config, attn_implementation="eager", vocab_size=TOKENS)
    tokenizer = write_tokenizer(tmp_path)
    weights = [FloatWeight(name, parameter.detach()) for name, parameter in model.named_parameters()]
    write_checkpoint(tmp_path / "base", weights, model.config.to_dict(), to="gguf", tokenizer=tokenizer)
    plain = greedy(model, prompts())
    made = write_gguf_adapters(adapted(model), tmp_path / "adapters")
    assert list(made) == ["near", "far"] and all(path.is_file() for path in made.values())
    expected = greedy(model, prompts())
    assert not torch.equal(plain, expected)
    tokens, _ = llama_cpp(tmp_path / "base/model.gguf", prompts().tolist(), adapter=made["far"])
    assert torch.equal(tokens, expected)


@pytest.mark.engine
def test_an_adapter_is_read_back_and_by_the_gguf_package(tmp_path: Path):
    model = adapted(tiny(LlamaConfig))
    path = write_gguf_adapters(model, tmp_path)["far"]
    found = read_gguf_adapter(path, model.config.to_dict())  # type: ignore[operator, union-attr]
    layers = adapter_layers(model)
    assert found.factors.keys() == layers.keys()
    for name, layer in layers.items():
        a, b = found.factors[name]
        wanted = layer.lora_B["far"].weight @ layer.lora_A["far"].weight * layer.scaling["far"]
        torch.testing.assert_close(found.alpha / len(a) * b @ a, wanted)
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    told = {key: reader.fields[key].contents() for key in ("general.type", "adapter.type", "general.architecture")}
    assert told == {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "llama"}
    shapes = {tensor.name: tensor.data.shape for tensor in reader.tensors}
    assert len(shapes) == 16
    assert shapes["blk.1.attn_k.weight.lora_a"] == (3, 64) and shapes["blk.1.attn_k.weight.lora_b"] == (32, 3)


def test_what_llama_cpp_does_not_add_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no layer of the model has an adapter of PEFT.*get_peft_model"):
        write_gguf_adapters(tiny(LlamaConfig), tmp_path)
    model = adapted(tiny(LlamaConfig))
    layer: Any = model.get_submodule("model.layers.1.mlp.down_proj")
    layer.lora_B["far"].bias = nn.Parameter(torch.zeros(64))
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj.*adapter far has a bias in B.*merge_adapters"):
        write_gguf_adapters(model, tmp_path)
    layer.lora_B["far"].bias = None
    layer.lora_magnitude_vector = {"far": 1}
    with pytest.raises(ConfigError, match=r"scales the sum \(DoRA\)"):
        write_gguf_adapters(model, tmp_path)
    assert not list(tmp_path.iterdir())
    del layer.lora_magnitude_vector
    path = write_gguf_adapters(model, tmp_path)["far"]
    with pytest.raises(ConfigError, match="the adapter is for llama, and the model is of type qwen2"):
        read_gguf_adapter(path, tiny(Qwen2Config).config.to_dict())
    for place in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ExportError, match="cannot be read: No such file|not a regular file|Is a directory"):
            read_gguf_adapter(place, model.config.to_dict())  # type: ignore[operator, union-attr]
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:100])
    with pytest.raises(ExportError, match="header cannot be read"):
        read_gguf_adapter(tmp_path / "cut.gguf", model.config.to_dict())  # type: ignore[operator, union-attr]
