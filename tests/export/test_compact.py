"""Files of models with small weights: never larger than float without a word, and equal in what they compute."""

import json
import logging
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from bitwright.compare.verify import verify_folder
from bitwright.export.artefacts import Exported
from bitwright.export.qdq.compact import _first_free
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel as TorchSim
from tests.support.simulations import calibrated


class _Gated(nn.Module):
    """Many small layers and products under long names."""

    def __init__(self) -> None:
        super().__init__()
        self.a_stem_with_a_long_name = nn.Conv2d(3, 8, 3)
        self.blocks_with_a_long_name = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a_stem_with_a_long_name(x)
        for layer in self.blocks_with_a_long_name:
            x = x + torch.sigmoid(layer(x)) * torch.tanh(layer(x))
        return x


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.TransformerEncoderLayer(16, 2, 64, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(16, 24, batch_first=True), nn.Linear(24, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0][:, -1])


_MODELS = {"gated": (_Gated, (2, 3, 12, 12)), "attention": (_Attention, (2, 5, 16)), "gru": (_Recurrent, (2, 5, 16))}


def _export(folder: Path, name: str, form: str) -> tuple[Exported, int]:
    """Files of a model of the table, and the size of what was quantized."""
    torch.manual_seed(0)
    make, shape = _MODELS[name]
    model, x = make().eval(), torch.randn(shape)
    if form == "torch":
        sim = calibrated(TorchSim(model, x), [x])
        exported = sim.export(folder, "net", x)
        return exported, exported.float_model.stat().st_size
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    source = folder / "source.onnx"
    torch.onnx.export(
        model,
        (x,),
        source,
        dynamo=form == "dynamo",
        verbose=False,
        **({"external_data": False} if form == "dynamo" else {}),
    )
    onnx_sim = calibrated(OnnxSim(source), [x.numpy()])
    return onnx_sim.export(folder, "net"), source.stat().st_size


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("gated", "torch"),
        ("gated", "dynamo"),
        ("gated", "script"),
        ("attention", "torch"),
        ("attention", "script"),
        ("gru", "torch"),
    ],
)
def test_a_file_is_not_larger_than_float(tmp_path: Path, name: str, form: str) -> None:
    exported, size = _export(tmp_path, name, form)
    assert exported.qdq.stat().st_size <= min(size, exported.float_model.stat().st_size)
    assert not [note for note in exported.notes if "its quantizers take more" in note]

    written = onnx.load(exported.qdq)
    sites = json.loads(exported.sites.read_text())["sites"]
    made = {value for node in written.graph.node for value in node.output} | {i.name for i in written.graph.initializer}
    assert {tensor for site in sites.values() for tensor in site["qdq_tensors"]} <= made | _of_bodies(written)
    onnx.checker.check_model(written, full_check=True)

    again = OnnxSim(exported.qdq)  # reads every quantizer back under the name of its site
    enabled = {site for site, facts in sites.items() if facts["enabled"] and facts["encoding"] and facts["qdq_tensors"]}
    assert len(again.quantizers) >= len(enabled)
    report = verify_folder(tmp_path, "net")
    assert report.ok, str(report)


def _of_bodies(model: onnx.ModelProto) -> set[str]:
    bodies = (attribute.g for node in model.graph.node for attribute in node.attribute if attribute.HasField("g"))
    return {value for body in bodies for node in body.node for value in node.output}


def test_short_names_pass_over_those_that_the_model_has_with_their_endings() -> None:
    assert _first_free(iter(["qa", "qb"]), "_zero_point", {"qa_zero_point"}) == "qb_zero_point"


def test_a_file_that_has_to_be_larger_says_so(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.randn(3, 4)
    sim = calibrated(TorchSim(model, x), [x])
    exported = sim.export(tmp_path, "net", x)
    size = exported.qdq.stat().st_size, exported.float_model.stat().st_size
    assert size[0] > size[1]
    assert any(f"the file has {size[0]} bytes and the float model {size[1]}" in note for note in exported.notes)
