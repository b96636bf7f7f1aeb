"""Blocks replaced by what was fitted to them: a block that is linear is replaced without loss, and the target is met."""

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
from bitwright.errors import CalibrationError, ConfigError, ExportError
from bitwright.onnx import load_model
from bitwright.report import report_document
from bitwright.torch import rebuild, replace_blocks


class Branch(nn.Module):
    """Its results are steep in ``bend``: 0 makes it linear."""

    def __init__(self, bend: float) -> None:
        super().__init__()
        self.bend = bend
        self.up, self.down = nn.Linear(8, 48), nn.Linear(48, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h + self.bend * h.square())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.branches = nn.ModuleList([Branch(1.0), Branch(0.0), Branch(2.0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.head(x)


DATA = [torch.randn(32, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def test_a_linear_block_becomes_a_linear_layer_without_loss(net: Net, tmp_path: Path) -> None:
    whole = copy.deepcopy(net)
    report = replace_blocks(net, DATA, params=0.75, progress=False)
    assert [row.variant for row in report.rows] == ["", "linear", ""]
    assert report.rows[1].error < 1e-3 < report.rows[0].error
    unseen = torch.randn(16, 6)
    torch.testing.assert_close(net(unseen), whole(unseen), atol=1e-3, rtol=1e-3)
    assert report.after["params"] == sum(p.numel() for p in net.parameters()) <= 0.75 * report.before["params"]
    assert report.after["macs"] == bitwright.model_costs(net, DATA)["macs"]
    assert "1 of 3 blocks replaced" in str(report)
    again = rebuild(copy.deepcopy(whole), report.plan)
    again.load_state_dict(net.state_dict())
    assert torch.equal(again(unseen), net(unseen))
    quantized = bitwright.quantize(net, DATA, recipe=["bias_correction"], progress=False)
    assert quantized.sim.export(tmp_path, "net", DATA[0])


def test_images_keep_their_channels() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(4, 16, 1), nn.Conv2d(16, 4, 1))
    net = nn.Sequential(nn.Conv2d(3, 4, 1), block, nn.Conv2d(4, 2, 1)).eval()
    data = [torch.randn(4, 3, 6, 6)]
    wanted = net(data[0])
    report = replace_blocks(net, data, macs=0.6, progress=False)
    assert [row.variant for row in report.rows] == ["linear"]
    torch.testing.assert_close(net(data[0]), wanted, atol=1e-3, rtol=1e-3)


def test_attention_of_a_language_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2
    )
    model: Any = transformers.LlamaForCausalLM(config).eval()
    data = [{"input_ids": torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(i))} for i in range(2)]
    report = replace_blocks(model, data, params=0.9, include=["*self_attn"], progress=False)
    assert report.refused == {"model.layers.0.self_attn": "caches count the tokens of the first layer"}
    assert any(row.variant for row in report.rows)
    tokens = data[0]["input_ids"]
    cached = model.generate(tokens, max_new_tokens=5, do_sample=False)
    assert torch.equal(cached, model.generate(tokens, max_new_tokens=5, do_sample=False, use_cache=False))
    with pytest.raises(ExportError, match="blocks are replaced"):
        model.save_pretrained(tmp_path)


def test_bad_input(net: Net) -> None:
    with pytest.raises(ConfigError, match="needs a target"):
        replace_blocks(net, DATA)
    with pytest.raises(CalibrationError, match="held no batch"):
        replace_blocks(net, [], macs=0.5)
    with pytest.raises(ConfigError, match="'cubic' is not a variant"):
        replace_blocks(net, DATA, macs=0.5, variants=["cubic"])
    with pytest.raises(ConfigError, match=r"0.01 of the macs cannot be met: the nearest that can is 0\.0"):
        replace_blocks(net, DATA, macs=0.01, progress=False)
    with pytest.raises(ConfigError, match="no block that can be replaced: no module has several layers"):
        replace_blocks(nn.Sequential(nn.Linear(6, 6)), DATA, macs=0.5)
    with pytest.raises(ConfigError, match="what stands in place of a block"):
        rebuild(net, {"format": 1, "steps": [{"kind": "replace", "module": "branches.0"}]})
    options = {"variant": "none", "width": 8, "images": False, "results": 0, "reads": ""}
    with pytest.raises(ConfigError, match="no such block"):
        rebuild(net, {"format": 1, "steps": [{"kind": "replace", "module": "other", "with": options}]})


def test_a_step_of_a_recipe_says_in_the_report_what_it_did(net: Net, tmp_path: Path) -> None:
    """The same blocks as the function replaces, and the page names them, the choices and what was not touched."""
    recipe = [{"replace_blocks": {"params": 0.75, "include": ["branches.*"]}}, "bias_correction"]
    result = bitwright.quantize(net, DATA, recipe=recipe, progress=False)
    assert "1 of 3 blocks replaced" in result.report[0].note
    done = report_document(recipe=result.report)["compression"][0]
    assert [row[1] for row in done["table"]["rows"]].count("linear") == 1
    assert {name: after / before for name, before, after in done["costs"]}["params"] <= 0.75
    assert sum(one["chosen"] for one in done["tried"]) == 1 and done["step"].startswith("replace_blocks")
    page = result.report_html(tmp_path / "page.html", DATA[:1]).read_text()
    assert "branches.1" in page and "1 of 3 blocks replaced" in page
    assert isinstance(net.branches[1], Branch)


def test_branches_of_a_file_are_replaced_too(net: Net, tmp_path: Path) -> None:
    """The linear branch goes without loss, the file costs what the report says, and a step of a recipe does the same."""
    torch.onnx.export(
        net, (DATA[0],), tmp_path / "net.onnx", dynamo=False, dynamic_axes={"x": {0: "n"}}, input_names=["x"]
    )
    data = [x.numpy() for x in DATA]
    model = load_model(tmp_path / "net.onnx")
    report = bitwright.onnx.replace_blocks(model, data, params=0.75, progress=False)
    assert [row.variant for row in report.rows] == ["", "linear", ""] and report.plan == {}
    assert report.rows[1].error < 1e-3 < report.rows[0].error
    unseen = torch.randn(16, 6)
    proto = ir.to_proto(model.model)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": unseen.numpy()})[0], net(unseen).detach(), atol=1e-3, rtol=1e-3)
    costs = bitwright.model_costs(proto, [data[0]])
    assert report.after["params"] == costs["params"] <= 0.75 * report.before["params"]
    assert report.after["macs"] == costs["macs"]
    recipe = [{"replace_blocks": {"params": 0.75}}]
    result = bitwright.quantize(tmp_path / "net.onnx", data, recipe=recipe, progress=False)
    assert "1 of 3 blocks replaced" in result.report[0].note
    with pytest.raises(ConfigError, match="no block that can be replaced: it has no residual sum"):
        bitwright.onnx.replace_blocks(load_model(tmp_path / "net.onnx"), data, params=0.75, include=["no_such"])


def test_the_command_replaces_branches(net: Net, tmp_path: Path) -> None:
    torch.onnx.export(net, (DATA[0],), tmp_path / "net.onnx", dynamo=False, input_names=["x"])
    np.savez(tmp_path / "data.npz", x=DATA[0].numpy())
    command = [
        "compress",
        str(tmp_path / "net.onnx"),
        "--data",
        str(tmp_path / "data.npz"),
        "--out",
        str(tmp_path / "out"),
    ]
    done = CliRunner().invoke(app, [*command, "--method", "replace_blocks", "--params", "0.75"])
    assert done.exit_code == 0 and "1 of 3 blocks replaced" in done.output, done.output
    costs = [bitwright.model_costs(tmp_path / folder / "net.onnx") for folder in (".", "out")]
    assert costs[1]["params"] <= 0.75 * costs[0]["params"]
    refused = CliRunner().invoke(app, [*command, "--method", "replace_blocks", "--bytes", "0.5"])
    assert refused.exit_code == 2 and "blocks are chosen by --macs and --params" in refused.output


@pytest.mark.parametrize("variant", ["linear", "none", "identity"])
def test_a_branch_of_convolutions_in_a_file(variant: str, tmp_path: Path) -> None:
    """Channels of images are the second axis; what stands in place of the branch is what its name says."""

    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
            self.up, self.down = nn.Conv2d(4, 32, 1), nn.Conv2d(32, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return self.head(x + self.down(self.up(x)))

    torch.manual_seed(0)
    net, x = Image().eval(), torch.randn(4, 3, 6, 6)
    torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=False)
    model = load_model(tmp_path / "net.onnx")
    report = bitwright.onnx.replace_blocks(model, [x.numpy()], macs=0.6, variants=[variant], progress=False)
    assert [row.variant for row in report.rows] == [variant]
    held = net.stem(x)
    with torch.no_grad():
        wanted = net.head({"linear": held + net.down(net.up(held)), "none": held, "identity": 2 * held}[variant])
    session = ort.InferenceSession(ir.to_proto(model.model).SerializeToString(), providers=["CPUExecutionProvider"])
    made = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    np.testing.assert_allclose(made, wanted, atol=1e-3, rtol=1e-3)


def test_files_have_no_experts(net: Net, tmp_path: Path) -> None:
    torch.onnx.export(net, (DATA[0],), tmp_path / "net.onnx", dynamo=False)
    with pytest.raises(ConfigError, match="no TopK behind a product with a row per expert"):
        bitwright.quantize(
            tmp_path / "net.onnx", [DATA[0].numpy()], recipe=[{"drop_experts": {"keep": 0.5}}], progress=False
        )
