"""Inputs and outputs under names of the caller's, in every file of an export."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from bitwright.compare.verify import verify_folder
from bitwright.errors import ExportError
from bitwright.torch import QuantizationSimModel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.conv(x).relu() + shift
        return self.fc(features.flatten(1)), features


def simulated() -> tuple[QuantizationSimModel, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    batch = (torch.randn(2, 3, 4, 4), torch.randn(2, 4, 2, 2))
    sim = QuantizationSimModel(Net().eval(), batch)
    sim.compute_encodings([batch], progress=False)
    return sim, batch


def test_files_bear_the_names_and_agree(tmp_path: Path) -> None:
    sim, batch = simulated()
    inner = "conv2d"  # the exporter's name of a tensor inside
    made = sim.export(tmp_path, "net", batch, input_names=["image"], output_names=["logits", inner])
    for path in (made.qdq, made.float_model):
        graph = onnx.load(path).graph
        assert [value.name for value in graph.input] == ["image", "shift"]
        assert [value.name for value in graph.output] == ["logits", inner]
    assert verify_folder(tmp_path).ok
    other, _ = simulated()
    other.load_encodings(made.encodings)
    scales = [float(s.quantizers["conv.input[0]"].encoding.scale) for s in (sim, other)]
    assert scales[0] == scales[1]


@pytest.mark.quick_variants("inputs0-outputs0-input_names: 3 names for 2 tensors.*name x, shift")
@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (["a", "b", "c"], [], "input_names: 3 names for 2 tensors.*name x, shift"),
        (["a", "a"], [], "'a' names several tensors"),
        (["fc.weight"], [], "'fc.weight' is the name of a parameter"),
        ([], ["shift"], "'shift' names several tensors"),
    ],
)
def test_names_that_cannot_be(tmp_path: Path, inputs: list[str], outputs: list[str], message: str) -> None:
    sim, batch = simulated()
    with pytest.raises(ExportError, match=message):
        sim.export(tmp_path, "net", batch, input_names=inputs, output_names=outputs)
    assert not list(tmp_path.iterdir())
