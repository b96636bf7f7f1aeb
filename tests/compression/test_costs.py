"""Costs of models, against what layers are known to cost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import bitwright
from bitwright import model_costs
from bitwright.compression.costs import compare_ms
from bitwright.errors import ConfigError


class Tied(nn.Module):
    """A module that runs twice, and a matrix that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1, stride=2), nn.Linear(4, 4)

    def forward(self, x):
        y = self.conv(x).mean((2, 3))
        return self.fc(self.fc(y))


def test_module_and_file_cost_what_their_layers_do(tmp_path):
    net, x = Tied().eval(), torch.zeros(2, 3, 8, 8)
    torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=False)
    macs, params = 2 * 16 * 4 * 27 + 2 * 2 * 16, 4 * 27 + 4 + 16 + 4
    for found in (model_costs(net, [x]), model_costs(tmp_path / "net.onnx")):
        assert found["macs"] == macs
        assert sum(r.params for r in found.rows if r.type in ("Conv", "Gemm")) == params
        assert found["activation_bytes"] == 4 * (2 * 3 * 64 + 2 * 4 * 16)  # of the convolution: what it reads and makes
        assert found["memory"] == found["activation_bytes"] + found["bytes"]
    with pytest.raises(ConfigError, match="milliseconds were not measured"):
        found["ms"]
    with pytest.raises(ConfigError, match="no cost 'mac' \\(did you mean 'macs'"):
        found["mac"]
    assert str(found).splitlines()[1].split() == ["operator", "type", "MACs", "params", "bytes", "activations"]


class Mixture(nn.Module):
    """Six experts, two for each token, in a list or as stacks of matrices; a table of biases beside the stacks."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.gate, self.stacked = nn.Linear(8, 6), stacked
        if stacked:
            self.up, self.offsets = nn.Parameter(torch.randn(6, 8, 8)), nn.Parameter(torch.randn(6, 8))
        else:
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates, chosen = self.gate(x).softmax(-1).topk(2)
        if self.stacked:
            made = (x[:, None, None] @ self.up[chosen])[:, :, 0] + self.offsets[chosen]
            return (made * gates[..., None]).sum(1)
        made = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, at = torch.where(chosen == i)
            made.index_add_(0, rows, expert(x[rows]) * gates[rows, at, None])
        return made


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacks"])
def test_a_token_reads_the_experts_that_it_chooses(stacked: bool, tmp_path: Path) -> None:
    """Layers that are called alike but read every token are no experts; the target counts what is chosen."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), Mixture(stacked), nn.Linear(8, 3)).eval()
    x = torch.randn(64, 8)
    found, experts = model_costs(net, [x]), 6 * (64 + 8)
    assert found["params"] == sum(p.numel() for p in net.parameters())
    assert found["active_params"] == pytest.approx(found["params"] - experts * 4 / 6)
    assert "active" in str(found).splitlines()[1]
    if stacked:
        torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=False)
        again = model_costs(tmp_path / "net.onnx")
        assert again["active_params"] == pytest.approx(again["params"] - experts * 4 / 6)
    small = bitwright.compress(net, [x], {"active_params": 0.8}, widths=1, progress=False)
    assert model_costs(small.model, [x])["active_params"] <= 0.8 * found["active_params"]


class Attention(nn.Module):
    """Two key/value heads of four numbers for four query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2).repeat_interleave(2, 1) for t in self.kv(x).chunk(2, -1))
        made = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        return self.o(made.transpose(1, 2).flatten(2))


def test_keys_and_values_count_once_however_often_heads_repeat(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Attention().eval(), torch.randn(3, 5, 16)
    torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=False)
    whole = 4 * 3 * 5 * 2 * (2 * 4)  # bytes, samples, tokens, keys and values, heads of numbers
    for found in (model_costs(net, [x]), model_costs(tmp_path / "net.onnx", [x.numpy()])):
        assert found["cache_bytes"] == whole
        assert "keys, values" in str(found).splitlines()[1]
    small = bitwright.compress(net, [x], {"cache_bytes": 0.5}, widths=1, progress=False)
    assert model_costs(small.model, [x])["cache_bytes"] == whole / 2
    assert small.after["cache_bytes"] == whole / 2 / 3  # of one sample
    with pytest.raises(ConfigError, match="the model has no attention.*leave cache_bytes out"):
        bitwright.compress(
            nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), [x[0, :, :4]], {"cache_bytes": 0.5}, progress=False
        )


def test_milliseconds_are_measured_node_by_node(tmp_path):
    net, x = Tied().eval(), torch.zeros(2, 3, 8, 8)
    torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=False)
    found = model_costs(tmp_path / "net.onnx", milliseconds=True, rounds=3)
    assert found["ms"] > 0 and next(r for r in found.rows if r.type == "Conv").ms > 0


def test_a_module_without_data_is_refused():
    with pytest.raises(ConfigError, match="does not say the shapes of its inputs"):
        model_costs(nn.Linear(2, 2))


def test_models_in_bfloat16_are_timed() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).bfloat16()
    ms = compare_ms({"one": model}, torch.randn(2, 8).bfloat16(), rounds=3)
    assert ms["one"] > 0 and model[0].weight.dtype == torch.bfloat16
