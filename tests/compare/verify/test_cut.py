"""What an exported model is taken apart into, and what is told of its pieces."""

from __future__ import annotations

import torch
from torch import nn

from bitwright.torch import QuantizationSimModel


def test_the_kernel_is_what_computed_and_not_what_moved_its_codes() -> None:
    """ONNX Runtime puts a product of three axes between two Reshapes; one of floats is quantized in front of the second."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    sim = QuantizationSimModel(net.eval(), x)
    sim.quantizers["3.output[0]"].enabled = False  # the product behind it reads floats
    sim.compute_encodings([x])
    kernels = {row.site: row.kernel for row in sim.verify(x).rows}
    assert kernels["0.output[0]"] == "QGemm" and kernels["4.output[0]"] == "float"
    sim.quantizers["3.output[0]"].enabled = True
    sim.quantizers["2.output[0]"].enabled = False  # the integer product ends in floats
    sim.compute_encodings([x])
    assert {row.site: row.kernel for row in sim.verify(x).rows}["3.output[0]"] == "QGemm"
