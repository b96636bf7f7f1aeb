"""Folders that other tools quantized: packed here by the loops of AutoGPTQ and AutoAWQ, opened, simulated, written anew."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    StableLmConfig,
)
from transformers.pytorch_utils import Conv1D

from bitwright.errors import BitwrightError, ConfigError, ExportError, ModelError
from bitwright.llm import (
    PackedWeight,
    convert,
    open_engine,
    packed_weights,
    quantize,
    read_checkpoint,
    simulate_quantized,
)
from tests.llm.models import SIZES, prompts, tiny, write_tokenizer


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """AutoGPTQ's loop: codes ``[n, m]`` to words along axis 0."""
    words = np.zeros((codes.shape[0] * bits // 32, codes.shape[1]), np.uint64)
    for row in range(codes.shape[0]):
        word, shift = divmod(row * bits, 32)
        words[word] |= (codes[row].astype(np.uint64) << np.uint64(shift)) & np.uint64(0xFFFFFFFF)
        if shift + bits > 32:  # three bits only
            words[word + 1] |= codes[row].astype(np.uint64) >> np.uint64(32 - shift)
    return words.astype(np.uint32).view(np.int32)


def _awq_words(codes: np.ndarray) -> np.ndarray:
    """AutoAWQ's loop: eight columns in one word, in its order."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for column in range(words.shape[1]):
        for place, which in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words[:, column] |= codes[:, column * 8 + which].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


@dataclass
class Foreign:
    """A folder as another tool writes it, and the numbers that its codes stand for."""

    folder: Path
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def change(self, **changes: Any) -> None:
        """Other tensors in the place of those whose names end so."""
        path = self.folder / "model.safetensors"
        tensors = load_file(path)
        for ending, made in changes.items():
            name = next(name for name in tensors if name.endswith(ending))
            tensors[name] = made(tensors[name]).contiguous()
        save_file(tensors, path)

    def configure(self, **changes: Any) -> None:
        """Other fields of the configuration."""
        config = json.loads((self.folder / "config.json").read_text())
        config["quantization_config"] |= changes
        (self.folder / "config.json").write_text(json.dumps(config))


def _layer(weight: torch.Tensor, kind: str, bits: int, group: int, order: np.ndarray | None, version: int, sym: bool):
    outputs, inputs = weight.shape
    size = inputs if group == -1 else group
    groups = math.ceil(inputs / size)
    place = np.arange(inputs) // size if order is None else order // size
    real = weight.detach().numpy().T.astype(np.float64)
    scales, zeros = np.zeros((groups, outputs), np.float16), np.zeros((groups, outputs), np.int64)
    top = 2**bits - 1
    for number in range(groups):
        part = real[place == number]
        low, high = np.minimum(part.min(0), 0), np.maximum(part.max(0), 0)
        if sym:
            scales[number], zeros[number] = np.maximum(-low, high) / (top // 2), (top + 1) // 2
        else:
            scales[number] = (high - low) / top
            zeros[number] = np.clip(np.round(-low / scales[number]), 1, top)
    codes = np.clip(np.round(real / scales[place]) + zeros[place], 0, top).astype(np.int64)
    values = (codes - zeros[place]) * scales[place].astype(np.float32)
    if kind == "awq":
        parts = {"qweight": _awq_words(codes), "qzeros": _awq_words(zeros), "scales": scales}
    else:
        stored = (zeros - (version == 1)) & top
        parts = {"qweight": _words(codes, bits), "qzeros": _words(stored.T, bits).T, "scales": scales}
        parts["g_idx"] = place.astype(np.int32)
    made = {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}
    return made, torch.from_numpy(values.T.astype(np.float32))


def foreign(
    folder: Path, model: Any, kind: str, *, bits: int = 4, group: int = 32, desc_act: bool = False, version: int = 1,
    sym: bool = True, older: bool = False, extra: bool = False,
) -> Foreign:  # fmt: skip
    """Write ``model`` as AutoGPTQ or AutoAWQ does; with the configuration of their older versions."""
    made = Foreign(folder)
    tensors = {
        name: t.detach().clone()
        for name, t in model.state_dict().items()
        if name != "lm_head.weight" or not _tied(model)
    }
    layers = {
        n: m
        for n, m in model.named_modules()
        if isinstance(m, torch.nn.Linear | Conv1D) and "head" not in n and n != "embed_out"
    }
    generator = np.random.default_rng(0)
    for name, module in layers.items():
        weight = tensors.pop(f"{name}.weight")
        weight = weight.T if isinstance(module, Conv1D) else weight
        order = generator.permutation(weight.shape[1]) if desc_act else None
        parts, values = _layer(weight, kind, bits, group, order, version, sym and kind == "gptq")
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        made.values[f"{name}.weight"] = values.T if isinstance(module, Conv1D) else values
        if extra and module.bias is None:
            tensors[f"{name}.bias"] = torch.zeros(weight.shape[0])
    config = model.config.to_dict()
    if kind == "gptq":
        own = {"bits": bits, "group_size": group, "desc_act": desc_act, "sym": sym, "quant_method": "gptq"}
        own |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    else:
        own = {"bits": 4, "group_size": group, "zero_point": True, "version": "GEMM", "quant_method": "awq"}
    if older:
        names = {"bits": "w_bit", "group_size": "q_group_size"} if kind == "awq" else {}
        own = {names.get(key, key): value for key, value in own.items() if key != "quant_method"}
        (folder / ("quant_config.json" if kind == "awq" else "quantize_config.json")).write_text(json.dumps(own))
    else:
        config["quantization_config"] = own
    (folder / "config.json").write_text(json.dumps(config))
    stem = f"gptq_model-{bits}bit-{group}g" if older and kind == "gptq" else "model"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / f"{stem}.safetensors")
    return made


def _tied(model: Any) -> bool:
    return bool(model.config.tie_word_embeddings)


CASES = {
    "llama": (LlamaConfig, "gptq", {}),
    "llama-asymmetric-v1": (LlamaConfig, "gptq", {"sym": False}),
    "llama-asymmetric-v2-8-bits": (LlamaConfig, "gptq", {"sym": False, "version": 2, "bits": 8}),
    "llama-channel-3-bits": (LlamaConfig, "gptq", {"group": -1, "bits": 3}),
    "llama-2-bits-short-last-group": (LlamaConfig, "gptq", {"group": 40, "bits": 2}),
    "llama-desc_act": (LlamaConfig, "gptq", {"desc_act": True}),
    "llama-older-biases-of-zeros": (LlamaConfig, "gptq", {"older": True, "extra": True}),
    "llama-awq": (LlamaConfig, "awq", {}),
    "llama-awq-older": (LlamaConfig, "awq", {"older": True}),
    "qwen2-awq-tied-biases": (Qwen2Config, "awq", {"tie": True}),
    "gemma2-scaled-table": (Gemma2Config, "gptq", {"tie": True}),
    "phi3-one-projection": (Phi3Config, "gptq", {}),
    "gpt2-columns": (GPT2Config, "gptq", {"sym": False}),
    "gpt_neox": (GPTNeoXConfig, "gptq", {"sym": False, "version": 2}),
    "olmo2": (Olmo2Config, "awq", {}),
    "granite": (GraniteConfig, "gptq", {"bits": 8}),
    "stablelm": (StableLmConfig, "awq", {}),
    "bloom": (BloomConfig, "gptq", {}),
}  # fmt: skip


#: families whose weights lie as those of another case
LATER = ("llama-asymmetric-v1", "llama-awq-older", "phi3-one-projection", "olmo2", "granite", "stablelm", "bloom")
PARAMETERS = [
    pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in LATER else []) for name, case in CASES.items()
]


@pytest.mark.parametrize("config, kind, options", PARAMETERS)
def test_a_foreign_folder_is_simulated_with_its_own_numbers(config, kind, options, tmp_path):
    """The simulation and the layers of codes compute what a float model with the dequantized weights computes."""
    options = dict(options)
    model = tiny(config, tie_word_embeddings=options.pop("tie", False), **_sizes(config))
    made = foreign(tmp_path, model, kind, **options)
    sim = simulate_quantized(tmp_path)
    weights = {weight.name: weight for weight in packed_weights(sim) if isinstance(weight, PackedWeight)}
    assert weights.keys() == made.values.keys() and len(weights) >= 8
    for name, values in made.values.items():
        assert np.array_equal(weights[name].dequantize(), values.numpy()), name
    with torch.no_grad():
        for name, values in made.values.items():
            model.get_parameter(name).copy_(values)
        expected = model(prompts(2)).logits
        assert torch.allclose(sim.model(prompts(2)).logits, expected, atol=1e-4, rtol=1e-4)
        assert torch.allclose(open_engine(tmp_path).logits(prompts(2)), expected, atol=1e-4, rtol=1e-4)


def _sizes(config: Any) -> dict[str, Any]:
    if config is Gemma2Config:
        return {"head_dim": 16}
    if config is BloomConfig:
        return {"n_layer": 2, "n_head": 4}
    return {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256} if config is GPT2Config else {}


@pytest.mark.parametrize(
    "kind, options, to",
    [
        ("gptq", {}, "gguf"),  # groups of 64 become two of 32
        ("gptq", {"group": -1}, "gguf"),
        ("gptq", {"sym": False}, "awq"),
        ("gptq", {"desc_act": True}, "compressed-tensors"),
        ("awq", {}, "compressed-tensors"),
        ("awq", {}, "gptq"),
        ("awq", {}, "torchao"),
    ],
)
def test_a_foreign_folder_is_written_as_other_files_with_the_same_codes(kind, options, to, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    made = foreign(source, tiny(LlamaConfig, intermediate_size=128, vocab_size=128), kind, **{"group": 64} | options)
    write_tokenizer(source)
    convert(source, to, out)
    back = {weight.name: weight for weight in read_checkpoint(out)}
    own = {weight.name: weight for weight in read_checkpoint(source)}
    assert back.keys() == own.keys()
    for name, values in made.values.items():
        assert np.array_equal(back[name].dequantize(), values.numpy()), name
        assert isinstance(back[name], PackedWeight) and back[name].layout.bits == 4
    assert all(torch.equal(back[name].values, own[name].values) for name in own.keys() - made.values.keys())


@pytest.mark.slow
def test_a_foreign_folder_is_written_as_a_graph_and_run(tmp_path):
    import onnxruntime

    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    made = foreign(source, tiny(LlamaConfig), "awq")
    convert(source, "onnx", out)
    session = onnxruntime.InferenceSession(str(out / "model.onnx"))
    tokens = prompts(1)
    empty = {
        port.name: np.zeros((1, 2, 0, 16), np.float32) for port in session.get_inputs() if port.name.startswith("past")
    }
    given = {"input_ids": tokens.numpy(), "attention_mask": np.ones((1, tokens.shape[1]), np.int64)}
    given["position_ids"] = np.arange(tokens.shape[1])[None]
    wanted = {port.name for port in session.get_inputs()}
    logits = session.run(["logits"], {k: v for k, v in {**given, **empty}.items() if k in wanted})[0]
    expected = open_engine(source).logits(tokens)
    assert torch.allclose(torch.from_numpy(logits), expected, atol=1e-3, rtol=1e-3) and made.values


BAD = {
    "truncated": (lambda f: _cut(f.folder / "model.safetensors"), ExportError, "model.safetensors: it is damaged"),
    "config": (lambda f: (f.folder / "config.json").unlink(), ModelError, "config.json is missing"),
    "group": (lambda f: _without_index(f, 48), ExportError, "groups of 48 do not divide its 96 inputs into 3 groups"),
    "bits": (lambda f: f.configure(bits=8), ExportError, "hold codes of 4 bits, and the configuration says 8"),
    "index": (lambda f: f.change(g_idx=lambda t: t + 9), ExportError, r"g_idx has 96 entries from 9 to 11, for 96 inputs in 3"),
    "short": (lambda f: f.change(qweight=lambda t: t[:-1]), ExportError, r"g_idx has 96 entries.*for 88 inputs"),
    "zeros": (lambda f: f.change(qzeros=lambda t: t[:1]), ExportError, "of different layers or truncated: qweight"),
    "words": (lambda f: f.change(qzeros=lambda t: t[:, :-1]), ExportError, "hold no codes of 2 or 3 or 4 or 8 bits"),
    "scales": (lambda f: f.change(scales=torch.zeros_like), ExportError, "a scale is 0.0, which no step of a grid is"),
    "dtype": (lambda f: f.change(qweight=torch.Tensor.float), ExportError, "qweight has shape .*float32, where gptq"),
    "marlin": (lambda f: f.configure(checkpoint_format="marlin"), ExportError, "checkpoint_format is 'marlin'.*gptq_v2"),
    "awq": (lambda f: f.configure(quant_method="awq", version="gemv"), ExportError, "version is 'gemv'.*as gemm"),
    "shape": (lambda f: f.change(**{"norm.weight": lambda t: t[:5]}), ModelError, r"has shape \(5,\), where"),
    "method": (lambda f: f.configure(quant_method="bitsandbytes"), ExportError, "no quantized checkpoint of a kind"),
}  # fmt: skip


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _without_index(made: Foreign, group: int) -> None:
    path = made.folder / "model.safetensors"
    save_file({name: t for name, t in load_file(path).items() if not name.endswith("g_idx")}, path)
    made.configure(group_size=group)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gptq")
    foreign(place, tiny(LlamaConfig, num_hidden_layers=1), "gptq")
    return place


@pytest.mark.parametrize("damage, error, problem", BAD.values(), ids=BAD)
def test_what_is_wrong_with_a_foreign_folder_is_said(folder, damage, error, problem, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(Foreign(tmp_path))
    with pytest.raises(error, match=problem):
        simulate_quantized(tmp_path)


def test_other_refusals(folder, tmp_path):
    with pytest.raises(ConfigError, match="quantized already, by gptq.*bitwright.llm.convert"):
        quantize(folder, "w4g32", progress=False)
    with pytest.raises(ConfigError, match="no kind of files 'ggml'"):
        convert(folder, "ggml", tmp_path / "out")
    (tmp_path / "moe").mkdir()
    moe = tiny(MixtralConfig, num_local_experts=2, num_hidden_layers=1)
    foreign(tmp_path / "moe", moe, "gptq")
    tensors = load_file(tmp_path / "moe/model.safetensors")
    stacks = [name for name in tensors if "experts" in name]
    for name in stacks:
        tensors.pop(name)
    layer, _ = _layer(torch.randn(96, 64), "gptq", 4, 32, None, 1, True)
    tensors |= {f"model.layers.0.block_sparse_moe.experts.0.w1.{part}": tensor for part, tensor in layer.items()}
    save_file(tensors, tmp_path / "moe/model.safetensors")
    with pytest.raises(BitwrightError, match="no place for .*w1.weight, which transformers joins"):
        simulate_quantized(tmp_path / "moe")
    assert SIZES["hidden_size"] == 64
