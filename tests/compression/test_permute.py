"""Channels in another order: the model computes the same, and two of four neighbours hold more."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

from bitwright.compression.permute import better_order, kept_weight, permute_channels
from bitwright.compression.sparsify import sparsify_model
from bitwright.errors import ConfigError
from bitwright.methods.front_end import front_end_of
from bitwright.onnx import load_model

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A residual sum, a concatenation, a depthwise convolution, batch norm, a layer norm, a flattened head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.deep, self.point = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1)
        self.side, self.mix = nn.Conv2d(16, 8, 1), nn.Conv2d(24, 12, 1)
        self.layer_norm, self.fc, self.out = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        x = x + self.point(self.deep(x))
        x = self.mix(torch.cat([x, self.side(x)], 1)).mean((2, 3))
        return self.out(self.fc(self.layer_norm(x)).relu())


def made() -> Net:
    torch.manual_seed(0)
    model = Net().eval()
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    return model


def test_the_best_order_of_eight_columns_is_found() -> None:
    """Against all 35 ways to make two neighbourhoods of eight columns."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = np.abs(rng.standard_normal((1, 8)) ** 3)
        best = max(
            float(kept_weight(scores[:, [*four, *(set(range(8)) - set(four))]], 2, 4))
            for four in itertools.combinations(range(8), 4)
        )
        order = better_order(scores, 2, 4)
        assert sorted(order) == list(range(8))
        assert float(kept_weight(scores[:, order], 2, 4)) == pytest.approx(best)


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_the_model_computes_the_same(form: str, tmp_path: Path) -> None:
    model, source, x = made(), None, X.numpy()
    if form == "onnx":
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.onnx.export(model, (X,), str(tmp_path / "m.onnx"), dynamo=True, verbose=False)
        source = str(tmp_path / "m.onnx")
    structure = front_end_of(source or model).structured(source or model, X if source is None else x, None)
    before = structure.outputs(X if source is None else x)
    rows, refused = permute_channels(structure, X if source is None else x, 2, 4)
    np.testing.assert_allclose(structure.outputs(X if source is None else x)[0], before[0], atol=1e-5)
    assert len(rows) >= 4 and all(row.after > row.before for row in rows), (rows, refused)


def test_half_of_the_weights_at_zero_cost_less(tmp_path: Path) -> None:
    """Both front ends, by magnitude, from the same weights; a file is one of ONNX Runtime's."""
    errors: dict[bool, list[float]] = {}
    for permute in (False, True):
        model: Any = made()
        report = sparsify_model(
            model, [X], pattern="2:4", method="magnitude", permute=permute, include=["mix", "fc", "out"], progress=False
        )
        errors[permute] = [row.error for row in report.rows]
        assert bool(report.reordered) == permute
        assert all(row.sparsity == 0.5 for row in report.rows)
    assert sum(errors[True]) < 0.9 * sum(errors[False])
    torch.onnx.export(made(), (X,), str(tmp_path / "m.onnx"), dynamo=True, verbose=False)
    loaded = load_model(str(tmp_path / "m.onnx"))
    report = sparsify_model(loaded, [X.numpy()], pattern="2:4", method="magnitude", permute=True, progress=False)
    assert report.reordered
    session = ort.InferenceSession(ir.to_proto(loaded.model).SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, {session.get_inputs()[0].name: X.numpy()})[0].shape == (4, 5)


def test_an_order_means_nothing_without_neighbours() -> None:
    with pytest.raises(ConfigError, match="the order of channels does not matter for unstructured"):
        sparsify_model(made(), [X], permute=True, progress=False)
