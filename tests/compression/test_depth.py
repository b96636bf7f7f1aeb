"""Blocks that change nothing go first, in both front ends; the others stay."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import bitwright
from bitwright.cli import app
from bitwright.compression.depth import drop_blocks
from bitwright.errors import CalibrationError, ConfigError, ModelError
from bitwright.torch import rebuild


class Block(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        with torch.no_grad():
            self.down.weight *= scale
            self.down.bias *= scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block(scale) for scale in (1.0, 0.01, 1.0, 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def exported(net: nn.Module, x: torch.Tensor, tmp_path: Path) -> onnx.ModelProto:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.onnx.export(net, (x,), str(tmp_path / "net.onnx"), dynamo=True, verbose=False)
    return onnx.load(tmp_path / "net.onnx")


def test_modules_lose_the_blocks_that_matter_least(net: Net) -> None:
    wanted = net(X)
    report = drop_blocks(net, [X], count=2, progress=False)
    assert [row.name for row in report.rows] == ["blocks.3", "blocks.1"] and report.rows[0].noise == 0
    assert report.kept == ("blocks.0", "blocks.2") and len(net.blocks) == 2
    torch.testing.assert_close(net(X), wanted, rtol=0.05, atol=0.02)
    assert report.after["macs"] == report.before["macs"] - 2 * 16 * 2 * 8 * 16
    again = rebuild(Net(), json.loads(json.dumps(report.plan)))
    again.load_state_dict(net.state_dict())
    torch.testing.assert_close(again(X), net(X))


def test_files_lose_the_branches_of_sums(net: Net, tmp_path: Path) -> None:
    wanted = net(X).detach().numpy()
    model = exported(net, X, tmp_path)
    size = sum(np.prod(t.dims) for t in model.graph.initializer)
    report = drop_blocks(model, [X.numpy()], count=2, progress=False)
    assert len(report.kept) == 2 and report.rows[0].noise == 0
    onnx.checker.check_model(model, full_check=True)
    assert sum(np.prod(t.dims) for t in model.graph.initializer) <= size - 2 * (8 * 16 * 2 + 16)
    again = drop_blocks(model, [X.numpy()], count=1, progress=False)
    assert again.before == report.after and again.rows[0].noise > 0.01
    assert wanted.shape == (16, 3)


def test_a_target_and_a_model_of_transformers(tmp_path: Path) -> None:
    """The number of layers in the configuration follows, so that the class itself loads what is saved."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=50)).eval()
    tokens = torch.arange(10)[None]
    report = drop_blocks(model, [tokens], params=0.8, progress=False)
    assert report.after["params"] <= 0.8 * report.before["params"]
    assert model.config.num_hidden_layers == 4 - len(report.rows) == len(model.model.layers)
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
    assert again.generate(tokens, max_new_tokens=3, do_sample=False).shape == (1, 13)


class Counted(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for i in range(4):
            x = self.blocks[i](x)
        return self.head(x)


@pytest.mark.parametrize(
    "options, kind, message",
    [
        ({}, ConfigError, "it needs a count or a target"),
        ({"count": 9}, ConfigError, "9 blocks cannot go: 4 can.*write a count from 1 to 4"),
        ({"macs": 0.01}, ConfigError, r"0.01 of the macs cannot be met: without any of the 4 blocks 0\.\d+ are left"),
        (
            {"count": 1, "exclude": ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]},
            ConfigError,
            "no block that can be",
        ),
    ],
)
def test_bad_input(net: Net, options: dict, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        drop_blocks(net, [X], progress=False, **options)
    assert len(net.blocks) == 4


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_recipes_take_blocks_out_before_they_quantize(net: Net, form: str, tmp_path: Path) -> None:
    """Two of four blocks change next to nothing: 8 bits on what is left stay near the whole model, in half of the file."""
    model = net if form == "torch" else exported(net, X, tmp_path)
    data = [X] if form == "torch" else [X.numpy()]
    recipe = [{"drop_blocks": {"count": 2}}, "bias_correction"]
    result = bitwright.quantize(model, data, recipe=recipe, progress=False, path=tmp_path / "out")
    assert result.report[0].step.startswith("drop_blocks") and "2 of 4 blocks taken out" in result.report[0].note
    assert result.sim.verify(data[0]).ok and len(net.blocks) == 4
    whole, left = (bitwright.model_costs(m, data)["macs"] for m in (model, str(tmp_path / "out" / "model.onnx")))
    assert left == whole - 2 * 16 * 2 * 8 * 16
    wanted = net(X).detach().numpy()
    got = result.sim.model(X).detach().numpy() if form == "torch" else result.sim.run({"x": X.numpy()})[0]
    assert np.square(got - wanted).sum() < 1e-2 * np.square(wanted).sum()


def test_the_command_takes_branches_out(net: Net, tmp_path: Path) -> None:
    exported(net, X, tmp_path)
    np.savez(tmp_path / "x.npz", x=X.numpy())
    start = [
        "compress",
        str(tmp_path / "net.onnx"),
        "--data",
        str(tmp_path / "x.npz"),
        "--out",
        str(tmp_path / "small"),
    ]
    done = CliRunner().invoke(app, [*start, "--method", "drop_blocks", "--count", "2"])
    assert done.exit_code == 0 and "2 of 4 blocks taken out" in done.output
    costs = [
        bitwright.model_costs(str(p), [X.numpy()])["params"]
        for p in (tmp_path / "net.onnx", tmp_path / "small" / "net.onnx")
    ]
    assert costs[1] < 0.65 * costs[0]
    for wrong, message in (
        (["--method", "drop_blocks"], "--count 2 or --macs 0.7"), (["--count", "1"], "prune takes no blocks out"),
        (["--method", "drop_blocks", "--ms", "0.5"], "blocks are chosen by --macs and --params"),
        (["--method", "drop_blocks", "--count", "9"], "9 blocks cannot go: 4 can"),
    ):  # fmt: skip
        refused = CliRunner().invoke(app, [*start, *wrong])
        assert refused.exit_code != 0 and message in " ".join(refused.output.split())


def test_what_cannot_be_taken_out_is_as_it_was(net: Net, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="held no batch"):
        drop_blocks(net, [], count=1)
    torch.manual_seed(0)
    counted = Counted().eval()
    with pytest.raises(ModelError, match=r"the model without blocks.3: it fails.*exclude these blocks"):
        drop_blocks(counted, [X], count=1, progress=False)
    torch.testing.assert_close(counted(X), net(X))
    with pytest.raises(ModelError, match="cannot be changed in place"):
        drop_blocks("net.onnx", [X.numpy()], count=1)
    with pytest.raises(ConfigError, match="which members of a container"):
        rebuild(Net(), {"format": 1, "steps": [{"kind": "drop", "container": "blocks"}]})
    with pytest.raises(ConfigError, match="has no such members"):
        rebuild(Net(), {"format": 1, "steps": [{"kind": "drop", "container": "blocks", "indices": [7]}]})
