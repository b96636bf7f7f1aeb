"""A mixture of experts that was trained: float, simulated and exported, on pictures that nothing was calibrated on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bitwright.torch import quantize
from tests.support.sessions import integer_session
from tests.torch.test_experts import EXPERTS, Experts

WIDTH = 32


class Classifier(nn.Module):
    """Rows of a picture as tokens; every token goes to two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = nn.Linear(8, WIDTH), nn.Parameter(torch.randn(8, WIDTH) * 0.1)
        self.experts, self.head = Experts("grouped", WIDTH, 64), nn.Linear(8 * WIDTH, 10)
        for weight in (self.experts.up, self.experts.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x) + self.position
        mixed = self.experts(tokens.reshape(-1, WIDTH)).reshape(tokens.shape)
        return self.head((tokens + mixed).flatten(1))


@pytest.fixture(scope="module")
def trained() -> tuple[Classifier, Tensor, Tensor, Tensor]:
    """The network, pictures to calibrate on, and others with their labels."""
    digits = load_digits()
    x, y = torch.from_numpy(digits.images.astype(np.float32) / 16), torch.from_numpy(digits.target)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for epoch in range(15):
        for at in torch.randperm(1000, generator=torch.Generator().manual_seed(epoch)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[at]), y[at]).backward()
            optimizer.step()
    return model.eval(), x[:256], x[1000:], y[1000:]


def accuracy(scores: Tensor, labels: Tensor) -> float:
    return 100 * float((scores.argmax(1) == labels).float().mean())


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "bits"), [("w8a8", 8), ("w4a8", 4)])
def test_the_default_recipe_keeps_what_the_experts_have_learned(
    preset: str, bits: int, trained: tuple[Classifier, Tensor, Tensor, Tensor], tmp_path: Path
) -> None:
    model, data, x, labels = trained
    with torch.no_grad():
        in_float = accuracy(model(x), labels)
    assert in_float > 85
    result = quantize(model, list(data.split(64)), preset, progress=False)
    experts = [
        site
        for site in result.sim.quantizers.values()
        if site.name in ("experts.up", "experts.down") or "grouped" in site.op
    ]
    experts = [site for site in experts if site.role == "weight"]
    assert len(experts) == 2 and all(site.enabled and site.spec.format.bits == bits for site in experts)
    assert all(site.encoding.scale.size >= EXPERTS * WIDTH for site in experts)
    with torch.no_grad():
        simulated = result.model(x)
    assert accuracy(simulated, labels) > in_float - (0.5 if bits == 8 else 2)
    result.sim.export(tmp_path, "experts", x)
    session = integer_session(tmp_path / "experts.onnx")
    exported = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    assert accuracy(exported, labels) == pytest.approx(accuracy(simulated, labels), abs=0.2)
    assert result.sim.verify(x).ok
