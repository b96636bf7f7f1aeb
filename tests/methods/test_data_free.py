"""Data that a model makes itself have the statistics that it stored, and ranges nearer to those of real data than noise has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import bitwright
from bitwright.cli import app
from bitwright.errors import ConfigError

SHAPE = (16, 3, 12, 12)


def pictures(seed: int, rows: int = 16) -> Tensor:
    """Smooth pictures with correlated channels, unlike noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(rows, 1, 3, 3, generator=generator) + 0.2 * torch.randn(rows, 3, 3, 3, generator=generator)
    return 1 + 2 * nn.functional.interpolate(coarse, size=SHAPE[2:], mode="bilinear")


def network() -> nn.Module:
    """Its batch norms have the statistics of pictures."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i, o in ((3, 16), (16, 16), (16, 24)):
        layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o, momentum=None), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5))
    with torch.no_grad():
        for seed in range(8):
            model(pictures(seed))
    return model.eval()


def as_onnx(model: nn.Module, path: Path) -> Path:
    torch.onnx.export(model, (pictures(0),), path, dynamo=True, optimize=False, verbose=False)
    names = {node.op_type for node in onnx.load(path).graph.node}
    assert "BatchNormalization" in names
    return path


class Writer(nn.Module):
    """After token t comes t + 1 or t + 2."""

    def __init__(self, words: int = 11, sees_later: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(words, words)
        self.sees_later = sees_later
        with torch.no_grad():
            self.table.weight.fill_(-30.0)
            for token in range(words):
                self.table.weight[token, [(token + 1) % words, (token + 2) % words]] = 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.table(tokens)
        return logits + logits.flip(1) if self.sees_later else logits


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_pictures_have_the_statistics_of_batch_norms(front_end: str, tmp_path: Path) -> None:
    model: Any = network()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    given, example = (model, pictures(0)) if front_end == "torch" else (as_onnx(model, tmp_path / "net.onnx"), None)
    made = bitwright.generate_data(given, example, samples=32, batch_size=16, iterations=60, progress=False)
    assert made.samples == 32 and len(made) == 2 and made.kind == "pictures"
    assert made.distance is not None and made.noise is not None and made.distance < 0.3 * made.noise
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    again = bitwright.generate_data(given, example, samples=32, batch_size=16, iterations=60, progress=False)
    first, second = (list(one)[0] if front_end == "torch" else next(iter(one[0].values())) for one in (made, again))
    assert np.array_equal(np.asarray(first), np.asarray(second)) and tuple(first.shape) == SHAPE
    assert "pictures made from the statistics of 3 batch norms" in str(made)


def test_ranges_are_nearer_to_those_of_real_data_than_with_noise() -> None:
    model, real = network(), [pictures(seed) for seed in range(20, 24)]
    made = bitwright.generate_data(model, pictures(0), samples=64, batch_size=16, iterations=60, progress=False)
    noise = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    errors = {}
    for name, data in (("real", real), ("made", made), ("noise", noise)):
        result = bitwright.quantize(model, data, recipe=["fold"], progress=False)
        with torch.no_grad():
            errors[name] = float((result.sim.model(real[0]) - model(real[0])).square().mean())
        assert ("CALIBRATED WITHOUT DATA, on 64 pictures" in result.headline) == (name == "made")
        assert ("generated_data" in result.sim.origin) == (name == "made")
    assert errors["made"] < 0.5 * errors["noise"], errors


def test_text_is_what_the_model_would_write(tmp_path: Path) -> None:
    made = bitwright.generate_data(
        Writer(), torch.zeros(4, 9, dtype=torch.int64), samples=8, batch_size=4, progress=False
    )
    tokens = torch.cat(list(made)).numpy()
    steps = np.diff(tokens, axis=1) % 11
    assert tokens.shape == (8, 9) and set(np.unique(steps)) == {1, 2} and made.kind == "text"
    assert len(set(tokens[:, 0])) > 1
    begun = bitwright.generate_data(
        Writer(), {"tokens": torch.zeros(1, 9, dtype=torch.int32)}, samples=3, start=5, progress=False
    )
    assert begun[0]["tokens"].dtype == torch.int32 and set(begun[0]["tokens"][:, 0].tolist()) == {5}
    path = tmp_path / "writer.onnx"
    torch.onnx.export(Writer().eval(), (torch.zeros(4, 9, dtype=torch.int64),), path, dynamo=True, verbose=False)
    (feeds,) = bitwright.generate_data(path, samples=4, batch_size=4, progress=False)
    (written,) = feeds.values()
    assert set(np.unique(np.diff(written, axis=1) % 11)) <= {1, 2}


@pytest.mark.parametrize(
    ("model", "example", "options", "message"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3)), torch.zeros(1, 3, 8, 8), {}, "no batch norm with stored.*before batch norms"),
        (nn.Conv2d(3, 4, 3), None, {}, r"not say the shape of its input. Remedy: give an example: generate_data\("),
        (nn.Identity(), torch.zeros(3), {}, "no input is a batch of pictures or of token ids: torch.float32 of shape"),
        (nn.Embedding(5, 7), torch.zeros(3, 4, dtype=torch.int64), {"start": 9}, "9 is not one of the model's 7 tokens"),
        (nn.Bilinear(3, 3, 2), (torch.zeros(2, 3), torch.zeros(2, 3)), {}, "2 inputs of floating-point numbers"),
        (Writer(sees_later=True), torch.zeros(2, 4, dtype=torch.int64), {}, "depend on tokens after it.*cannot write text"),
        (nn.Flatten(), torch.zeros(2, 4, dtype=torch.int64), {}, "no output holds logits of the next token"),
        (network(), torch.zeros(1, 3, 8, 8), {"mean": [0.5, 0.5]}, r"mean: \[0.5, 0.5\] for an input of 3 channels"),
        (network(), torch.zeros(1, 3, 8, 8), {"std": 0.0}, "std above 0"),
        (network(), torch.zeros(1, 3, 8, 8), {"samples": 0}, "samples: 0 is below 1"),
        (network(), torch.zeros(1, 3, 8, 8), {"temperature": 0.0}, "temperature: 0.0 is not above 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused(model: nn.Module, example: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bitwright.generate_data(model.eval(), example, progress=False, **options)


def test_a_word_that_is_not_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'genrate' is not data. Remedy: give batches, or 'generate'"):
        bitwright.quantize(network(), "genrate", progress=False)


def test_the_command_makes_data(tmp_path: Path) -> None:
    path = as_onnx(network(), tmp_path / "net.onnx")
    arguments = [
        "quantize",
        str(path),
        "--data",
        "generate",
        "--limit",
        "16",
        "--recipe",
        "fold",
        "--out",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "CALIBRATED WITHOUT DATA, on 16 pictures made from the statistics of 3 batch norms" in " ".join(
        result.output.split()
    )
