"""Small calibrated simulations of both front ends for the tests of the analysis."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import bitwright.onnx
from bitwright.torch import QuantizationSimModel


class Net(nn.Module):
    """Convolutions with a residual sum, and a classifier of five classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.conv3, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(32, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv1(x))
        y = y + torch.relu(self.conv2(y))
        return self.head(torch.relu(self.conv3(y))[..., ::4, ::4].flatten(1))


def batches(count: int = 4, rows: int = 16, seed: int = 1) -> list[torch.Tensor]:
    """Random pictures."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 3, 8, 8, generator=generator) for _ in range(count)]


def exported(model: nn.Module, example: torch.Tensor) -> onnx.ModelProto:
    """The model as ONNX with a free batch axis."""
    file = io.BytesIO()
    torch.onnx.export(
        model, (example,), file, dynamo=False, opset_version=17, input_names=["x"], dynamic_axes={"x": {0: "n"}}
    )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


@dataclass
class Case:
    """A simulation, its data, and the names of its layers."""

    sim: Any
    data: list[Any]
    conv1: str
    conv2: str
    conv3: str
    head: str


def make(front_end: str, **options: Any) -> Case:
    """A calibrated simulation of :class:`Net`."""
    model, data = Net().eval(), batches()
    if front_end == "torch":
        sim = QuantizationSimModel(model, data[0], **options)
        names = ("conv1", "conv2", "conv3", "head")
    else:
        data = [x.numpy() for x in data]
        sim = bitwright.onnx.QuantizationSimModel(exported(model, torch.from_numpy(data[0])), data[0], **options)
        names = ("/conv1/Conv", "/conv2/Conv", "/conv3/Conv", "/head/MatMul")
    sim.compute_encodings(data, progress=False)
    return Case(sim, data, *names)


@pytest.fixture(params=["torch", "onnx"])
def case(request: pytest.FixtureRequest) -> Case:
    """A fresh simulation of each front end, 8 bits."""
    return make(request.param)


@pytest.fixture(scope="module")
def torch_case() -> Case:
    """A simulation that tests leave as it is."""
    return make("torch")


def noise_over_signal(wanted: np.ndarray, found: np.ndarray) -> float:
    """Of two outputs."""
    return float(np.square(wanted - found).sum() / np.square(wanted).sum())
