"""Quantization of language models: a folder by tensors and by blocks, and modules in memory."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from transformers import (
    ApertusConfig,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3Config,
)

from bitwright.core.numerics.affine import stored_scale
from bitwright.core.numerics.spec import QuantSpec, find_preset
from bitwright.core.simulation.quantizer import Quantizer
from bitwright.errors import ConfigError, ExportError, GranularityError
from bitwright.llm import blocks, coded, decoder_export, quantize, quantized, simulated
from bitwright.llm.blocks import of_checkpoint, view_by_blocks
from bitwright.llm.checkpoint import open_checkpoint
from bitwright.llm.coded import CodedEmbedding, CodedLinear, StoredWeight
from bitwright.llm.files.table import read_checkpoint
from bitwright.llm.likelihood import perplexity, split_tokens, text_tokens
from bitwright.llm.opened import coded_model
from bitwright.llm.packed import FloatWeight, PackedWeight, of_rows
from bitwright.llm.quantized import spec_of
from bitwright.llm.roles import transformer
from bitwright.torch import QuantizationSimModel
from tests.llm.models import prompts, saved, text, tiny
from tests.support.lora import PeftLinear

ROW = 24
_FOUR_BITS = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)
_SMALL: dict[str, Any] = {"context": ROW, "samples": 6, "progress": False}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "gemma2": (Gemma2Config, {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "phi3": (Phi3Config, {}),
    "olmo2": (Olmo2Config, {}),
    "gpt2": (GPT2Config, {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "bloom": (BloomConfig, {"n_layer": 2, "n_head": 4}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    saved(folder, LlamaConfig)
    return folder


def _values(result: Any) -> dict[str, np.ndarray]:
    return {weight.name: weight.dequantize() for weight in result.weights}


def _codes(result: Any) -> dict[str, np.ndarray]:
    return {weight.name: weight.codes for weight in result.weights if isinstance(weight, PackedWeight)}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_give_the_perplexity_and_the_roles_of_the_whole_model(kind: str, tmp_path: Path):
    config, changes = KINDS[kind]
    model = saved(tmp_path, config, **changes)
    result = quantize(tmp_path, "w4g32", data=text(), **_SMALL)
    assert result.before is not None and result.after is not None
    tokens = text_tokens(open_checkpoint(tmp_path).tokenizer, text())
    held = torch.cat(split_tokens(tokens, ROW, most=6)[1], 1)
    assert result.before.value == pytest.approx(perplexity(model, held, context=ROW).value, rel=1e-4)
    whole = transformer(model)
    assert [(p.name, p.role, p.axis) for p in result.view.parts] == [(p.name, p.role, p.axis) for p in whole.parts]
    if result.model is None:  # else it is coded
        with torch.no_grad():
            for name, values in _values(result).items():
                model.get_parameter(name).copy_(torch.from_numpy(values))
    measured = perplexity(result.model or model, held, context=ROW)
    assert result.after.value == pytest.approx(measured.value, rel=1e-4) and result.after.value != result.before.value


def test_without_data_every_matrix_of_blocks_is_rounded_to_nearest(llama: Path):
    result = quantize(llama, "w4g32_asym", progress=False)
    opened = open_checkpoint(llama)
    expected = {
        part.name: PackedWeight.nearest(part.name, opened.read(part.name), spec_of("w4g32_asym")).codes
        for part in view_by_blocks(of_checkpoint(opened)).of("q", "k", "v", "o", "gate", "up", "down")
    }
    found = _codes(result)
    assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)
    assert result.before is None and "14 parameters quantized" in str(result)
    assert {weight.name for weight in result.weights} == set(opened.parameters)


@pytest.mark.parametrize("recipe", ["gptq", "seq_mse", "awq,gptq"])
def test_methods_bring_the_logits_nearer(recipe: str, llama: Path):
    nearest = quantize(llama, "w3g32", data=text(), **_SMALL)
    treated = quantize(llama, "w3g32", recipe=recipe, data=text(), **_SMALL)
    assert nearest.after is not None and treated.after is not None
    assert treated.after.divergence < nearest.after.divergence  # type: ignore[operator]
    assert all(recipe.split(",")[0] in note or "gptq" in note for note in treated.notes)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (FalconConfig, {"ffn_hidden_size": 96}),  # x @ weight.T
        (DeepseekV3Config, {  # stacks of experts that are turned
            "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 0, "num_hidden_layers": 1, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        }),
    ], ids=["falcon", "deepseek"],
)  # fmt: skip
def test_weights_that_a_block_reads_turned_are_rounded_too(
    config: Any, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny(config, **changes)
    given = torch.randint(0, model.config.vocab_size, (ROW * 20,), generator=torch.Generator().manual_seed(0))
    nearest = quantize(model, "w3g32", data=given, **_SMALL)
    treated = quantize(model, "w3g32", recipe="gptq", data=given, **_SMALL)
    assert "at nearest" not in caplog.text and "nothing in the model" not in caplog.text
    assert nearest.after is not None and treated.after is not None
    assert treated.after.divergence < nearest.after.divergence  # type: ignore[operator]
    before, after = _codes(nearest), _codes(treated)
    assert all((before[name] != after[name]).any() for name in before)


def test_a_run_that_was_ended_goes_on_and_gives_the_same(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = {"recipe": "gptq", "data": text(), **_SMALL}
    whole = quantize(llama, "w4g32", **options)
    put = blocks.Spill.put

    def ended(self: Any, index: int, *args: Any) -> None:
        put(self, index, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(blocks.Spill, "put", ended)
    with pytest.raises(KeyboardInterrupt):
        quantize(llama, "w4g32", work_dir=tmp_path / "work", **options)
    seen: list[int] = []

    def noted(self: Any, index: int, *args: Any) -> None:
        seen.append(index)
        put(self, index, *args)

    monkeypatch.setattr(blocks.Spill, "put", noted)
    again = quantize(llama, "w4g32", work_dir=tmp_path / "work", **options)
    assert seen == [1] and not (tmp_path / "work").exists()
    assert all(np.array_equal(codes, _codes(whole)[name]) for name, codes in _codes(again).items())
    assert again.after == whole.after and again.notes == whole.notes


@pytest.mark.parametrize("preset", ["nvfp4", "q3_k", "w4lpbq", "mxfp4", "w4g32"])
def test_finished_blocks_keep_the_scales_that_methods_chose(preset: str, tmp_path: Path):
    """A method may leave the largest scale below the largest multiple of the number that all of them are multiples of."""
    spec = find_preset(preset).weight
    assert spec is not None
    weight = PackedWeight.nearest("weight", torch.randn(8, 512), spec)
    encoding = weight.encoding
    half = stored_scale(encoding.scale * np.float32(0.61), encoding.scale_format, encoding.common)
    weight = replace(weight, encoding=replace(encoding, scale=half))
    spill = blocks.Spill(tmp_path, "one")
    spill.put(0, {"weight": weight})
    ((name, found),) = spill.get(0)
    assert name == "weight" and isinstance(found, PackedWeight)
    assert found.encoding == weight.encoding and np.array_equal(found.dequantize(), weight.dequantize())


_KILLED = """
import os, signal, sys
from bitwright.llm import blocks, quantize, quantized
from tests.llm.models import text

write = blocks.Spill._write

def killed(self, content):
    if sys.argv[3] == "after the journal":
        write(self, content)
    if content.get("done") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[3] != "after the journal":
        write(self, content)

blocks.Spill._write = killed
quantize(sys.argv[1], "w4g32", recipe="gptq", data=text(), context=24, samples=6, progress=False, work_dir=sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("when, blocks_left", [("after the journal", [1]), ("before the journal", [0, 1])])
def test_a_process_that_was_killed_goes_on_at_a_block(
    when: str, blocks_left: list[int], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    work = tmp_path / "work"
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(llama), str(work), when], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    put, seen = blocks.Spill.put, list[int]()

    def noted(self: Any, index: int, *args: Any) -> None:
        seen.append(index)
        put(self, index, *args)

    monkeypatch.setattr(blocks.Spill, "put", noted)
    options = {"recipe": "gptq", "data": text(), **_SMALL}
    again = quantize(llama, "w4g32", work_dir=work, **options)
    assert seen == blocks_left and not work.exists()
    whole = quantize(llama, "w4g32", **options)
    assert all(np.array_equal(codes, _codes(whole)[name]) for name, codes in _codes(again).items())
    assert again.after == whole.after


_KILLED_IN_A_GRAPH = """
import os, signal, sys
from bitwright.export import artefacts
from bitwright.llm import quantize
from tests.llm.models import text

artefacts.write_manifest = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
source, out, work = sys.argv[1:]
quantize(source, "w4g32", recipe="gptq", data=text(), context=24, samples=6, progress=False, to="onnx", out=out, work_dir=work)
"""


@pytest.mark.slow
def test_a_process_that_was_killed_while_it_wrote_a_graph_writes_whole_files_at_the_next_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Of GPT-2, whose weights are stored turned: the blocks are not treated again, and nothing half written is left."""
    from bitwright.compare.verify import verify_folder

    source, out, work = (tmp_path / name for name in ("model", "out", "work"))
    saved(source, GPT2Config, num_hidden_layers=1, n_embd=64, n_head=4, n_positions=128)
    command = [sys.executable, "-c", _KILLED_IN_A_GRAPH, str(source), str(out), str(work)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (left,) = out.iterdir()
    assert left.name.startswith(".") and work.exists()
    os.utime(left, (0, 0))  # as if it were old: another process might write there still
    with caplog.at_level("INFO", "bitwright"):
        quantize(source, "w4g32", recipe="gptq", data=text(), to="onnx", out=out, work_dir=work, **_SMALL)
    assert "going on at block 1 of 1" in caplog.text and not work.exists()
    assert not left.exists()
    report = verify_folder(out)
    assert report.ok, report
    assert [(row.tokens, row.equal + row.close) for row in report.generated] == [(32, 32)] * 4


def test_another_request_does_not_go_on_from_blocks_of_this_one(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    spill = blocks.Spill(tmp_path, "one")
    spill.put(0, {"weight": torch.ones(2)}, ["a note"])
    assert blocks.Spill(tmp_path, "one").done == 1 and blocks.Spill(tmp_path, "one").notes == [["a note"]]
    assert not caplog.text
    assert blocks.Spill(tmp_path, "other").done == 0 and not list(tmp_path.glob("block-*"))
    assert f"{tmp_path}: its finished blocks (1) are of another model, other data or other options" in caplog.text


@pytest.mark.parametrize("damage", ["missing", "cut off in its header", "cut off", "another number"])
def test_a_damaged_block_is_named(damage: str, tmp_path: Path):
    spill = blocks.Spill(tmp_path, "one")
    spill.put(0, {"weight": torch.ones(20)})
    assert torch.equal(dict(spill.get(0))["weight"], torch.ones(20))
    (path,) = tmp_path.glob("block-*")
    content = path.read_bytes()
    damaged = {"cut off in its header": content[:5], "cut off": content[:-60], "another number": content[:-1] + b"\0"}
    path.unlink()
    if damage in damaged:
        path.write_bytes(damaged[damage])
    with pytest.raises(ConfigError, match=r"block-0000.safetensors: a finished block cannot be read.*Remedy: remove "):
        dict(spill.get(0))


@pytest.mark.parametrize("kind", KINDS)
def test_the_structure_is_found_without_reading_large_weights(kind: str, monkeypatch: pytest.MonkeyPatch):
    config, changes = KINDS[kind]
    model = tiny(config, **changes).bfloat16()
    whole = view_by_blocks(quantized._of_module(model).runner)
    monkeypatch.setattr(blocks, "_SMALL", 256)  # routers have as many numbers, or fewer
    runner = quantized._of_module(model).runner
    names: list[str] = []
    read = runner.read
    monkeypatch.setattr(runner, "read", lambda name: names.append(name) or read(name))
    assert view_by_blocks(runner) == whole
    sizes = [model.get_parameter(name).numel() for name in names if name.startswith(runner.stack)]
    assert sum(sizes) <= 0.05 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("in_place", [True, False])
def test_a_module_computes_with_its_codes(in_place: bool):
    model = tiny(LlamaConfig)
    before = copy.deepcopy(model.state_dict())
    result = quantize(model, "w4g32", in_place=in_place, progress=False)
    layers = {name: module for name, module in result.model.named_modules() if isinstance(module, CodedLinear)}
    assert len(layers) == 14 and (result.model is model) == in_place
    for module in layers.values():
        codes = module.stored.codes
        assert codes.dtype == torch.uint8 and codes.shape[1] * 2 == module.in_features
    if not in_place:
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    reference = tiny(LlamaConfig)
    with torch.no_grad():
        for name, module in layers.items():
            reference.get_parameter(f"{name}.weight").copy_(module.weight)
        assert torch.equal(reference(prompts(1)).logits, result.model(prompts(1)).logits)


@pytest.mark.parametrize(
    "preset",
    ["w4g32", "w4g32_asym", "w4g32_float_zero", "w2g32", "w8", "w8g40", "nvfp4", "mxfp4", "fp8", "nf4", "q4_k_offset"],
)
def test_coded_layers_hold_what_the_codes_say(preset: str):
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    spec = spec_of(preset)
    packed = PackedWeight("weight", *_rounded(values, spec))
    layer = CodedLinear(StoredWeight(packed, torch.float32), None)
    again = layer.stored.packed()
    assert np.array_equal(again.codes, packed.codes) and again.encoding == packed.encoding
    assert np.array_equal(layer.weight, packed.dequantize())
    moved = copy.deepcopy(layer).half().stored.packed()  # the model's dtype is not that of the scales
    assert moved.encoding == packed.encoding


def _rounded(values: torch.Tensor, spec: QuantSpec) -> tuple[Any, Any]:
    quantizer = Quantizer("weight", "weight", replace(spec, granularity=of_rows(spec.granularity, 2)))
    quantizer.observe_once(values)
    found = PackedWeight.encoded("weight", values, quantizer.required)
    return found.codes, found.encoding


def test_layers_that_hold_codes_pass_gradients_and_keep_no_float_weight(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coded, "_AT_ONCE", 5 * 64)  # five rows at a time
    values = torch.randn(33, 64, generator=torch.Generator().manual_seed(0))
    layer = CodedLinear(
        StoredWeight(PackedWeight.nearest("w", values, spec_of("w4g32")), torch.float32), torch.ones(33)
    )
    reference = nn.Linear(64, 33)
    reference.weight.data, reference.bias.data = layer.weight, torch.ones(33)
    x = torch.randn(2, 7, 64, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        found = layer(x)
    assert not saved  # the gradient of the input needs the codes alone
    torch.testing.assert_close(found, reference(x))
    weight = torch.randn_like(found)
    (mine,) = torch.autograd.grad(found, x, weight)
    (expected,) = torch.autograd.grad(reference(x), x, weight)
    torch.testing.assert_close(mine, expected)


def test_adapters_train_beside_a_base_of_codes():
    """Adapters stay in float and trained; the base takes its codes and scales, and no more (QLoRA)."""
    model = tiny(LlamaConfig, hidden_size=128, intermediate_size=256)
    for block in model.model.layers:
        for owner, name in ((block.self_attn, "v_proj"), (block.mlp, "up_proj")):
            layer = PeftLinear(getattr(owner, name))
            layer.add("first", 4, 8)
            nn.init.normal_(layer.lora_A["first"].weight)
            nn.init.zeros_(layer.lora_B["first"].weight)
            layer.set_adapter(["first"])
            setattr(owner, name, layer)
    model.requires_grad_(False)
    adapters = [parameter for name, parameter in model.named_parameters() if ".lora_" in name]
    for parameter in adapters:
        parameter.requires_grad_(True)
    result = quantize(model, "w4g64", embedding="w4g64", lm_head="w4g64", in_place=True, progress=False)
    assert len(result.rows) == 16 and not any("lora_" in row.name for row in result.rows)
    mine = {id(parameter) for parameter in adapters}
    held = [t for t in (*result.model.parameters(), *result.model.buffers()) if id(t) not in mine]
    numbers = sum(
        part.shape[0] * part.shape[1] for part in result.view.parts if any(part.name == r.name for r in result.rows)
    )
    assert sum(t.nbytes for t in held) <= 1.3 * numbers * (4 + 16 / 64) / 8
    tokens = prompts(4)
    optimizer = torch.optim.Adam(adapters, 1e-2)
    losses = []
    for _ in range(8):
        loss = result.model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_a_table_that_the_output_layer_shares_is_held_once():
    model = tiny(LlamaConfig, tie_word_embeddings=True)
    result = quantize(model, "w4g32", embedding="w4g32", in_place=True, progress=False)
    table, output = result.model.get_input_embeddings(), result.model.lm_head
    assert isinstance(table, CodedEmbedding) and isinstance(output, CodedLinear) and table.stored is output.stored
    assert result.model(prompts(1)).logits.isfinite().all()


@pytest.mark.parametrize("to", ["compressed-tensors", "torchao", "gptq"])
def test_files_hold_the_buffers_that_a_checkpoint_holds(to: str, tmp_path: Path):
    """As the numbers of an activation function, or the corrections by which a router chooses."""
    model = saved(tmp_path / "model", ApertusConfig)
    quantize(tmp_path / "model", "w4g32", to=to, out=tmp_path / "out", progress=False)
    stored = {weight.name: weight for weight in read_checkpoint(tmp_path / "out")}
    assert stored.keys() == model.state_dict().keys()
    for index in range(2):
        name = f"model.layers.{index}.mlp.act_fn.beta"
        assert torch.equal(stored[name].values, model.get_buffer(name))  # type: ignore[union-attr]
    if to == "gptq":
        read = coded_model(tmp_path / "out")
        assert torch.equal(read.get_buffer(name), model.get_buffer(name))
        assert read(prompts(1)).logits.isfinite().all()


def test_rules_by_role_and_by_name_and_ends(llama: Path):
    rules = {"role:down": "w8", "model.layers.0.*": None, "*.0.self_attn.o_proj": "w8g32"}
    result = quantize(llama, "w4g32", rules=rules, lm_head="w8", progress=False)
    stored = {row.name: row.stored for row in result.rows}
    assert "model.layers.1.self_attn.q_proj.weight" in stored and "model.layers.0.mlp.up_proj.weight" not in stored
    assert stored["model.layers.1.mlp.down_proj.weight"] == "int8 symmetric per channel (axis 0), minmax"
    assert stored["model.layers.0.self_attn.o_proj.weight"].startswith("int8 symmetric per block of 32")
    assert stored["lm_head.weight"].startswith("int8") and "model.embed_tokens.weight" not in stored


def test_matrices_of_inputs_times_outputs_have_groups_along_the_inputs():
    config, changes = KINDS["gpt2"]
    result = quantize(tiny(config, **changes), "w4g32", progress=False)
    (row,) = [row for row in result.rows if row.name == "transformer.h.0.mlp.c_fc.weight"]  # [inputs, outputs]
    assert "per block of 32" in row.stored and "axis 0" in row.stored


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        pytest.param({"preset": "w4g33x"}, ConfigError, "no preset of this name", id="preset"),
        pytest.param({"recipe": "gtpq"}, ConfigError, r"no method 'gtpq' .*did you mean 'gptq'", id="method"),
        pytest.param(
            {"recipe": "awq"}, ConfigError, "awq chooses codes by what the layers read, and no data", id="data"
        ),
        pytest.param({"to": "gguf"}, ConfigError, "to and out go together", id="out"),
        pytest.param({"rules": {"role:wide": None}}, ConfigError, "there is no such role", id="role"),
        pytest.param(
            {"rules": {"model.layer.*": None}}, ConfigError, "no parameter of the model matches it", id="rule"
        ),
        pytest.param(
            {"rules": {"role:down": "w4g80"}, "to": "compressed-tensors", "out": "unused"},
            GranularityError,
            "down_proj.weight: it sums over 96 elements, which groups of 80 do not divide. Remedy: use groups of 32 or 16",
            id="groups",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: dict[str, Any], error: type[Exception], message: str, llama: Path):
    with pytest.raises(error, match=message):
        quantize(llama, **{"preset": "w4g32", "progress": False, **arguments})


@pytest.mark.parametrize("to", ["compressed-tensors", "torchao"])
def test_stacks_of_experts_are_refused_and_the_rule_of_the_message_leaves_them_in_float(to: str, tmp_path: Path):
    model = saved(tmp_path / "model", MixtralConfig, num_local_experts=4)
    arguments: dict[str, Any] = {"to": to, "out": tmp_path / "out", "progress": False}
    with pytest.raises(
        ExportError,
        match=r"experts.gate_up_proj.*Remedy: .*--rule 'role:expert=float' \(rules=\{'role:expert': None\}\)",
    ):
        quantize(tmp_path / "model", "w4g32", **arguments)
    assert not (tmp_path / "out").exists()
    result = quantize(tmp_path / "model", "w4g32", rules={"role:expert": None}, **arguments)
    assert {row.role for row in result.rows} == {"q", "k", "v", "o"}
    stored = {weight.name: weight for weight in read_checkpoint(tmp_path / "out")}
    experts = [part.name for part in result.view.of("expert")]
    assert len(experts) == 4
    for name in experts:
        weight = stored[name]
        assert isinstance(weight, FloatWeight) and torch.equal(weight.values, model.get_parameter(name))


def test_rows_are_as_long_as_the_model_has_positions(tmp_path: Path):
    config, changes = KINDS["gpt2"]
    saved(tmp_path, config, **{**changes, "n_positions": 48, "max_position_embeddings": 48})
    assert "max_position_embeddings" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    result = quantize(tmp_path, "w4g32", data=text(200), progress=False)
    assert result.before is not None and result.before.tokens == 47


@pytest.mark.parametrize(
    "preset, kinds", [("w4g32", "gguf"), ("w4g64", r"a graph, which holds it \(genai, onnx, openvino\)")]
)
def test_matrices_that_some_files_have_no_place_for_name_those_that_have(preset: str, kinds: str, tmp_path: Path):
    config, changes = KINDS["gpt2"]
    saved(tmp_path / "model", config, **changes)
    with pytest.raises(ExportError, match=rf"c_attn.*not a linear layer\. Remedy: write {kinds}"):
        quantize(tmp_path / "model", preset, to="compressed-tensors", out=tmp_path / "out", progress=False)


def test_numbers_of_codes_are_mapped_from_files_while_a_graph_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, maps = tmp_path / "model", Path("/proc/self/maps")
    saved(folder, LlamaConfig).bfloat16().save_pretrained(folder, max_shard_size="40KB")
    found: dict[str, tuple[str, torch.Tensor]] = {}

    def write(sim: Any, *_: Any) -> None:
        rows = [line.split() for line in maps.read_text().splitlines()] if maps.exists() else []
        spans = [(*(int(end, 16) for end in row[0].split("-")), row[5]) for row in rows if len(row) > 5]
        for name, parameter in sim.model.named_parameters():
            files = [file for first, end, file in spans if first <= parameter.data_ptr() < end]
            found[name] = ("".join(files), parameter.detach().clone())

    monkeypatch.setattr(quantized, "write_graph", write)
    quantize(folder, "w4g32", to="genai", out=tmp_path / "out", progress=False)
    packed = [w for w in quantize(folder, "w4g32", progress=False).weights if isinstance(w, PackedWeight)]
    for weight in packed:
        file, values = found[weight.name]
        assert torch.equal(values, torch.from_numpy(weight.dequantize()).bfloat16()), weight.name
        assert "/bitwright-" in file or not maps.exists(), (weight.name, file)
    assert len(packed) == 14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_on_its_grid_is_its_own_result(dtype: torch.dtype):
    layer, batch = nn.Linear(32, 4).to(dtype), torch.ones(1, 32, dtype=dtype)
    sim = QuantizationSimModel(layer, batch, preset="w4g32", in_place=True)
    sim.compute_encodings()
    quantizer, weight = sim.quantizers["weight"].quantizer, sim.model.weight
    with torch.no_grad():
        quantizer.hold(weight)
        assert not torch.equal(rounded := quantizer.constant(weight), weight)
        weight.copy_(rounded)
        quantizer.hold(weight)
        assert quantizer.constant(weight).data_ptr() == weight.data_ptr()
        assert torch.equal(quantizer.constant(weight), rounded)


@pytest.mark.parametrize("free, samples", [(2 * 4 * 12, None), (2 * 4 * 12 - 1, False)])
def test_samples_are_left_out_where_a_session_would_not_fit(
    free: int, samples: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A session has the weights of a file in float32, twice as many bytes as there may be."""
    asked: list[Any] = []
    monkeypatch.setattr(simulated, "free_memory", lambda: free)
    monkeypatch.setattr(decoder_export, "export_decoder", lambda *_, **options: asked.append(options.get("samples")))
    with caplog.at_level("INFO", "bitwright"):
        sim = SimpleNamespace(model=nn.Linear(4, 3, bias=False), quantizers={}, _read_parameters=dict)
        simulated.write_graph(sim, "genai", tmp_path, None)
    assert asked == [samples] and ("without samples" in caplog.text) == (samples is False)


@pytest.mark.slow
def test_a_file_of_a_graph_holds_stacks_of_experts_as_blocks_of_four_bits_and_runs(tmp_path: Path):
    from bitwright.compare.verify import verify_folder

    saved(tmp_path / "model", MixtralConfig, num_local_experts=4)
    result = quantize(tmp_path / "model", "w4g32", to="onnx", out=tmp_path / "out", progress=False)
    experts = {part.name for part in result.view.of("expert")}
    assert len(experts) == 4 and experts <= {row.name for row in result.rows}
    proto = onnx.load(tmp_path / "out" / "model.onnx")
    stacks = [held for held in proto.graph.initializer if len(held.dims) == 3 and held.data_type in _FOUR_BITS]
    assert len(stacks) == 4 and all(held.dims[0] == 4 for held in stacks)
    report = verify_folder(tmp_path / "out")
    assert [(row.tokens, row.equal + row.close) for row in report.generated] == [(32, 32)] * 4, report
