"""Operators of LiteRT files, many in each net: every layer agrees with the simulation, on integers where it can."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.compare.litert import FlatFile
from bitwright.compare.verify import verify_folder
from tests.export.litert.test_convert import exported, few_differ, images, kinds


class Pictures(nn.Module):
    """Convolutions of all kinds, joins, pools, resizing, changes of the order of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(4, 8, 3, groups=2, padding=1)
        self.dilated = nn.Conv2d(8, 8, 3, dilation=2, padding=2)
        self.squeeze = nn.Conv2d(8, 8, 1)
        self.shuffled = nn.Conv2d(8, 16, 3, padding=1)
        self.joined = nn.Conv2d(17, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.grouped(x))
        y = x + F.relu(self.dilated(x))
        y = y * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(y, 1)))
        y = y.reshape(y.shape[0], 2, 4, y.shape[2], y.shape[3]).transpose(1, 2).flatten(1, 2)
        left, right = y.chunk(2, 1)
        up = F.pixel_shuffle(self.shuffled(y), 2)
        near = F.interpolate(left - right, scale_factor=2.0, mode="nearest")
        pooled = F.avg_pool2d(F.pad(up, (1, 1, 1, 1)), 3, 1)
        joined = torch.cat([up, near, pooled, y.repeat_interleave(1, 1)[:, :5].amax((2, 3), keepdim=True).expand(
            -1, 5, up.shape[2], up.shape[3])], 1)  # fmt: skip
        return self.joined(joined).clamp(-0.5, 0.75)[:, :, ::2, 1:-1]


class Encoder(nn.Module):
    """Attention, norms and a linear layer on a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.head(self.layer(self.embedding(tokens)).mean(1)))


class Recurrent(nn.Module):
    """A bidirectional LSTM whose last states are read, and one that returns its sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(6, 5, batch_first=True)
        self.both = nn.LSTM(5, 4, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        sequence, (last, _) = self.both(self.first(x)[0])
        return self.head(torch.cat([sequence[:, -1], last.transpose(0, 1).flatten(1)], 1))


@pytest.mark.slow
def test_pictures(tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = exported(Pictures(), images(rows=4, channels=4), tmp_path)
    report = verify_folder(tmp_path, runtime="litert")
    assert report.ok and few_differ(report), str(report)
    inner = [row for row in report.rows if row.ops[-1] != "QUANTIZE"]
    assert len(inner) >= 12
    found = kinds(tmp_path)
    assert found.count("QUANTIZE") <= 3, (found, result.exported.notes)
    assert {"CONV_2D", "HARD_SWISH", "LOGISTIC", "DEPTH_TO_SPACE", "RESIZE_NEAREST_NEIGHBOR"} <= set(found)


def test_an_encoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = [torch.randint(0, 11, (4, 9)) for _ in range(3)]
    result = exported(Encoder(), tokens, tmp_path)
    report = verify_folder(tmp_path, runtime="litert")
    assert report.ok and few_differ(report), str(report)
    assert {row.specified for row in report.rows} <= {1.0, None}
    assert {"BATCH_MATMUL", "SOFTMAX", "GELU", "TANH", "FULLY_CONNECTED"} <= set(kinds(tmp_path))
    told = [note for note in result.exported.notes if "computed in float in the LiteRT file" in note]
    assert told and all("LayerNormalization" in note or "Mul is computed" in note for note in told)


@pytest.mark.slow
def test_lstm_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    result = exported(Recurrent(), batches, tmp_path)
    report = verify_folder(tmp_path, runtime="litert")
    assert report.ok, str(report)
    assert kinds(tmp_path).count("UNIDIRECTIONAL_SEQUENCE_LSTM") == 3
    assert any("the states of an LSTM have a fixed batch" in note for note in result.exported.notes)
    file = FlatFile((tmp_path / "net.tflite").read_bytes())
    weights = [t for t in file.graph.tensors if t.type == 9 and list(t.shape) == [5, 6]]
    assert len(weights) == 4  # of the gates, one byte per number


def test_activations_of_16_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Sigmoid(), nn.Flatten(),
        nn.Linear(200, 4),
    )  # fmt: skip
    exported(net, images(), tmp_path, preset="w8a16")
    report = verify_folder(tmp_path, runtime="litert")
    assert report.ok, str(report)
    assert all(row.kernel.endswith("int16") for row in report.rows[1:])
    assert min(min(end.as_float, end.as_integer) for end in report.outputs) > 70


@pytest.mark.quick_variants("w8")
@pytest.mark.parametrize("preset", ["w8a8", "w8a16", "w8"])
def test_convolutions_without_a_bias(tmp_path: Path, preset: str) -> None:
    """The runtime refuses a CONV_2D of two inputs, on integers too."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2, bias=False), nn.ConvTranspose2d(8, 4, 2, bias=False), nn.Flatten(),
        nn.Linear(4 * 49, 4, bias=False),
    )  # fmt: skip
    exported(net, images(), tmp_path, preset=preset)
    report = verify_folder(tmp_path, runtime="litert")
    assert report.ok, str(report)
