"""Constants that are exchanged for a targeted run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from bitwright.compare.parameters import clear, parameters
from bitwright.compare.runtime import optimized_types, run_model
from bitwright.torch import QuantizationSimModel


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def test_a_cleared_bias_leaves_the_runtime_its_kernels(tmp_path: Path) -> None:
    """A bias of floats in the place of codes made a float Gemm of an integer product, which hid that its sums saturate."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    sim = QuantizationSimModel(Affine().eval(), x, default_param_bw=7)
    sim.compute_encodings([x])
    model = ir.load(sim.export(tmp_path, "net", x).qdq)
    before = sorted(optimized_types(model).values())
    assert "QGemm" in before
    keys = [key for key, one in parameters(model).items() if one.role == "bias"]
    clear(model, {key: np.zeros(8, np.float32) for key in keys})
    assert sorted(optimized_types(model).values()) == before
    with torch.no_grad():
        sim.model.layer.bias.zero_()
        expected = sim.model(x).numpy()
    found = run_model(model, {"x": x.numpy()}, "float")["output"]
    np.testing.assert_allclose(found, expected, atol=1e-6)
