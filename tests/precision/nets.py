"""A small network with a layer that needs its bits, and data that it classifies; as a module and as ONNX."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

import bitwright.onnx as bo
import bitwright.torch as bt
from tests.support.simulations import calibrated


class Net(nn.Module):
    """Two convolutions with a residual sum, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8 * 4, 4)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        x = self.relu(x + self.body(x))
        x = nn.functional.adaptive_avg_pool2d(x, 2)
        return self.head(x.flatten(1))


@cache
def trained() -> Net:
    """Trained to tell four corners apart, in a second."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for i in range(60):
        x, y = samples(i, 64)
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


def samples(seed: int, n: int) -> tuple[Tensor, Tensor]:
    """Noise with a faint square in one of the four corners, and which."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 8, 8, generator=generator)
    y = torch.randint(0, 4, (n,), generator=generator)
    for i, corner in enumerate(y.tolist()):
        x[i, :, 4 * (corner // 2) :, 4 * (corner % 2) :][:, :4, :4] += 0.5
    return x, y


@cache
def as_onnx() -> bytes:
    """The network as ONNX."""
    file = io.BytesIO()
    torch.onnx.export(
        trained(), (samples(0, 2)[0],), file, dynamo=False, opset_version=17, input_names=["x"],
        dynamic_axes={"x": {0: "rows"}},
    )  # fmt: skip
    return file.getvalue()


FRONTS = ("torch", "onnx")


def model(front: str) -> Any:
    """The float model."""
    return trained() if front == "torch" else onnx.load_from_string(as_onnx())


def batches(front: str, n: int = 6, rows: int = 16) -> list[Any]:
    """Calibration data."""
    found = [samples(100 + i, rows)[0] for i in range(n)]
    return found if front == "torch" else [x.numpy() for x in found]


def simulation(front: str, **options: Any) -> Any:
    """Calibrated."""
    data = batches(front)
    kind = bt.QuantizationSimModel if front == "torch" else bo.QuantizationSimModel
    return calibrated(kind(model(front), data[0], "mse", **options), data)


def accuracy(front: str, n: int = 400, seed: int = 7) -> Any:
    """Right or wrong per sample, as a metric of the front end's model."""
    x, y = samples(seed, n)

    def of_module(module: nn.Module) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            return (module(x).argmax(1) == y).numpy().astype(float)

    def of_session(session: Any) -> np.ndarray[Any, Any]:
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        return (found.argmax(1) == y.numpy()).astype(float)

    return of_module if front == "torch" else of_session
