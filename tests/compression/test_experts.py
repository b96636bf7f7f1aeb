"""Experts of mixtures: saliencies by their definition, in lists and in stacks, and removal as if they were never chosen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import bitwright
from bitwright.cli import app
from bitwright.errors import CalibrationError, ConfigError, ModelError
from bitwright.onnx import load_model
from bitwright.torch import drop_experts, rebuild
from bitwright.torch.experts import mixtures, saliencies


class Routed(nn.Module):
    """A mixture of 6 experts in a list, each token to two of them."""

    def __init__(self, sums_up: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 6, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(6))
        self.num_experts, self.sums_up = 6, sums_up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates, chosen = self.gate(x).softmax(-1).topk(2)
        gates = gates / gates.sum(-1, keepdim=True) if self.sums_up else gates
        made = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, at = torch.where(chosen == i)
            made.index_add_(0, rows, expert(x[rows]) * gates[rows, at, None])
        return x + made


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = (
            nn.Linear(8, 8),
            nn.Sequential(Routed(**options), Routed(**options)),
            nn.Linear(8, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)))


DATA = [torch.randn(40, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def _by_hand(block: Routed, x: torch.Tensor) -> np.ndarray[Any, Any]:
    """Equation 9 of the paper."""
    gates, chosen = block.gate(x).softmax(-1).topk(2)
    gates = gates / gates.sum(-1, keepdim=True)
    found = []
    for i, expert in enumerate(block.experts):
        rows, at = torch.where(chosen == i)
        found.append(float((gates[rows, at] * expert(x[rows]).norm(dim=-1)).mean()))
    return np.array(found)


def test_the_saliency_is_the_mean_of_gates_times_norms() -> None:
    torch.manual_seed(0)
    net = Net().eval()
    measured = saliencies(net, mixtures(net), DATA, False)
    with torch.no_grad():
        x = net.stem(torch.cat(DATA))
        np.testing.assert_allclose(measured[0][0], _by_hand(net.blocks[0], x), rtol=1e-4)
        np.testing.assert_allclose(measured[1][0], _by_hand(net.blocks[1], net.blocks[0](x)), rtol=1e-4)
    assert measured[0][1].sum() == 2 * 120


def test_an_expert_that_says_nothing_goes_first() -> None:
    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        net.blocks[0].experts[4][2].weight.mul_(1e-3)
        net.blocks[0].experts[4][2].bias.zero_()
    whole = copy.deepcopy(net)
    report = drop_experts(net, DATA, keep=0.8, progress=False)
    assert [len(block.experts) for block in net.blocks] == [5, 5] == [block.num_experts for block in net.blocks]
    assert report.rows[0].kept == (0, 1, 2, 3, 5) and net.blocks[0].gate.out_features == 5
    assert "10 of 12 experts left" in str(report)
    again = rebuild(copy.deepcopy(whole), report.plan)
    again.load_state_dict(net.state_dict())
    assert torch.equal(again(DATA[0]), net(DATA[0]))
    with pytest.raises(ConfigError, match="has no such experts"):
        rebuild(nn.Sequential(nn.Linear(3, 3)), report.plan)
    with pytest.raises(ConfigError, match="which experts are kept"):
        rebuild(whole, {"format": 1, "steps": [{"kind": "experts", "kept": {"blocks.0.experts": [-1]}}]})


def _language_model(name: str, own: dict[str, Any]) -> Any:
    """A class of transformers with mixtures, in a small size."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "num_experts_per_tok": 2,
    }  # fmt: skip
    made: Any = getattr(transformers, name)
    model = made(made.config_class(**{**sizes, **own})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def test_least_saliency_makes_less_noise_than_chance() -> None:
    torch.manual_seed(1)
    whole = Net().eval()
    with torch.no_grad():
        for block in whole.blocks:
            for i, expert in enumerate(block.experts):
                expert[2].weight.mul_(0.3 * (i + 1))

    @torch.no_grad()
    def noise(importance: str, seed: int = 0) -> float:
        net = copy.deepcopy(whole)
        drop_experts(net, DATA, keep=0.6, importance=importance, seed=seed, progress=False)
        return float((net(torch.cat(DATA)) - whole(torch.cat(DATA))).square().mean())

    assert noise("reap") < 0.9 * np.mean([noise("random", 10 * seed) for seed in range(8)])


@pytest.mark.parametrize(
    ("name", "own"),
    [("MixtralForCausalLM", {"num_local_experts": 4}),
     ("Qwen3MoeForCausalLM", {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}),
     ("DeepseekV3ForCausalLM", {"n_routed_experts": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1,
                                "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
                                "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4}),
     ("GptOssForCausalLM", {"num_local_experts": 4, "head_dim": 8}),
     ("JambaForCausalLM", {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
                           "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4})],
)  # fmt: skip
def test_models_of_transformers_load_as_their_class(name: str, own: dict[str, Any], tmp_path: Path) -> None:
    model = _language_model(name, own)
    data = [{"input_ids": torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(i))} for i in range(2)]
    report = drop_experts(model, data, keep=0.75, progress=False)
    assert {len(row.kept) for row in report.rows} == {3} and report.after["params"] < report.before["params"]
    assert report.not_in_config == ""
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**data[0]).logits, model(**data[0]).logits)


def _made(model: Any, x: torch.Tensor) -> np.ndarray[Any, Any]:
    session = ort.InferenceSession(ir.to_proto(model.model).SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.parametrize("dynamo", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["traced", "exported"])
def test_files_lose_the_branches_that_modules_lose(dynamo: bool, tmp_path: Path) -> None:
    """Both exporters; saliencies are those of the module, and so are the outputs without its least salient experts."""
    torch.manual_seed(0)
    net = Net().eval()
    torch.onnx.export(net, (DATA[0],), tmp_path / "m.onnx", dynamo=dynamo, verbose=False, external_data=False)
    file = load_model(tmp_path / "m.onnx")
    found = bitwright.onnx.drop_experts(file, [x.numpy() for x in DATA], keep=0.5, progress=False)
    report = drop_experts(net, DATA, keep=0.5, progress=False)
    for one, other in zip(found.rows, report.rows, strict=True):
        assert one.kept == other.kept and one.tokens == other.tokens
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4)
    with torch.no_grad():
        np.testing.assert_allclose(_made(file, DATA[1]), net(DATA[1]), atol=1e-5)
    assert found.after["params"] < 0.6 * found.before["params"]


class Stacked(nn.Module):
    """Five experts as stacks of matrices, each token to two of them; biases of the router are added behind the sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.offset = nn.Linear(8, 5), nn.Parameter(0.1 * torch.randn(5))
        self.up, self.bias = nn.Parameter(torch.randn(5, 8, 8)), nn.Parameter(torch.randn(5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x).sigmoid()
        chosen = (logits + self.offset).topk(2)[1]
        gates = logits.gather(1, chosen)
        made = (x[:, None, None] @ self.up[chosen])[:, :, 0] + self.bias[chosen]
        return (made * gates[..., None]).sum(1)


def test_files_lose_entries_of_stacks(tmp_path: Path) -> None:
    """Saliencies by their definition; a file whose experts cannot be told apart counts tokens; a step of a recipe."""
    torch.manual_seed(0)
    net, x = Stacked().eval(), torch.cat(DATA)
    torch.onnx.export(net, (x,), tmp_path / "m.onnx", dynamo=False)
    file = load_model(tmp_path / "m.onnx")
    report = bitwright.onnx.drop_experts(file, [x.numpy()], keep=0.6, progress=False)
    with torch.no_grad():
        logits = net.gate(x).sigmoid()
        chosen = (logits + net.offset).topk(2)[1]
        norms = logits * torch.stack([(x @ net.up[i] + net.bias[i]).norm(dim=-1) for i in range(5)], 1)
        saliency = [float(norms[(chosen == i).any(1), i].mean()) for i in range(5)]
    np.testing.assert_allclose(report.rows[0].scores, saliency, rtol=1e-4)
    kept = sorted(np.argsort(saliency)[2:].tolist())
    assert report.rows[0].kept == tuple(kept)
    with torch.no_grad():
        for own in (net.gate.weight, net.gate.bias, net.offset, net.up, net.bias):
            own.data = own[kept]
        np.testing.assert_allclose(_made(file, x), net(x), atol=1e-5)
    with pytest.raises(ModelError, match=r"with fewer experts in /TopK: it fails"):  # a token needs two
        bitwright.onnx.drop_experts(file, [x.numpy()], keep=0.2, progress=False)
    recipe = [{"drop_experts": {"keep": 0.6, "importance": "frequency"}}, "bias_correction"]
    result = bitwright.quantize(tmp_path / "m.onnx", [x.numpy()], recipe=recipe, progress=False)
    assert "3 of 5 experts left" in result.report[0].note
    np.savez(tmp_path / "data.npz", **{file.model.graph.inputs[0].name: x.numpy()})
    command = ["compress", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "data.npz"), "--out", str(tmp_path / "small"),
               "--method", "drop_experts", "--batch-size", "120"]  # fmt: skip
    out = CliRunner().invoke(app, [*command, "--keep", "0.6"])
    assert out.exit_code == 0 and "3 of 5 experts left" in out.output, out.output
    assert load_model(tmp_path / "small" / "m.onnx").model.graph.initializers["up"].shape == (3, 8, 8)
    assert "experts are taken out by their number" in CliRunner().invoke(app, [*command, "--macs", "0.5"]).output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "own"),
    [("GptOssForCausalLM", {"num_local_experts": 4, "head_dim": 8}),
     ("DeepseekV3ForCausalLM", {"n_routed_experts": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1,
                                "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
                                "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4})],
)  # fmt: skip
def test_exports_of_transformers(name: str, own: dict[str, Any], tmp_path: Path) -> None:
    """Stacks that are read by product of batches, and a router whose experts are in groups."""
    model = _language_model(name, own)
    model.set_experts_implementation("batched_mm")

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=ids, use_cache=False).logits

    net, ids = Logits().eval(), torch.randint(1, 64, (2, 9))
    torch.onnx.export(net, (ids,), tmp_path / "m.onnx", dynamo=True, verbose=False, external_data=False)
    file = load_model(tmp_path / "m.onnx")
    found = bitwright.onnx.drop_experts(file, [ids.numpy()], keep=0.75, progress=False)
    report = drop_experts(net, [ids], keep=0.75, progress=False)
    assert [row.kept for row in found.rows] == [row.kept for row in report.rows]
    with torch.no_grad():
        np.testing.assert_allclose(_made(file, ids), net(ids), atol=1e-4)


class Numbered(Routed):
    """Takes the number of experts from its code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.gate(x).reshape(-1, 6).mean()


def test_bad_input() -> None:
    net = Net()
    with pytest.raises(CalibrationError, match="held no batch"):
        drop_experts(net, [], keep=0.5)
    with pytest.raises(ConfigError, match="1 is not a part of the experts"):
        drop_experts(net, DATA, keep=1)
    with pytest.raises(ConfigError, match="no criterion 'reep'.*did you mean 'reap'"):
        drop_experts(net, DATA, keep=0.5, importance="reep")
    with pytest.raises(ConfigError, match="no module with experts"):
        drop_experts(nn.Sequential(nn.Linear(8, 8)), DATA, keep=0.5)
    with pytest.raises(ModelError, match="it fails"):  # a token needs two
        drop_experts(net, DATA, keep=0.1, progress=False)
    assert len(net.blocks[0].experts) == 6 == net.blocks[0].num_experts == net.blocks[0].gate.weight.shape[0]
    with pytest.raises(ModelError, match="fewer experts in experts"):
        drop_experts(Numbered(), DATA, keep=0.5, progress=False)


def test_a_step_of_a_recipe() -> None:
    torch.manual_seed(0)
    net = Net().eval()
    result = bitwright.quantize(net, DATA, recipe=[{"drop_experts": {"keep": 0.5}}, "bias_correction"], progress=False)
    assert "6 of 12 experts left" in result.report[0].note and result.report[0].details is not None
    assert result.report[0].details["table"]["rows"][0][1:3] == ["6", "3"]
    with pytest.raises(ConfigError, match="drop_experts: the option 'keep' is not given. Remedy: give a number"):
        bitwright.quantize(net, DATA, recipe=["drop_experts"], progress=False)
    assert len(result.sim.model.blocks[0].experts) == 3 and len(net.blocks[0].experts) == 6
