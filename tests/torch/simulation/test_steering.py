"""What the code of a model reads to decide what it computes stays in float, and what comes of layers does not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitwright.torch import QuantizationSimModel


class Adaptive(nn.Module):
    """A neural ODE by Heun's method, which halves and doubles its step by an estimate of the error."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(8, 3)
        self.steps: list[float] = []

    def forward(self, y: Tensor) -> Tensor:
        t, step, self.steps = torch.tensor(0.0), y.abs().mean() * 0.9, []
        while t < 1.0:
            step = torch.minimum(step, 1.0 - t)
            first = self.f(y)
            second = self.f(y + step * first)
            error = ((second - first) * step / 2).pow(2).mean().sqrt() / (1e-5 + 1e-3 * y.abs().max())
            if error <= 1.0:
                self.steps.append(float(step))
                y, t = y + step / 2 * (first + second), t + step
            step = step * (0.9 / (error + 1e-9).sqrt()).clamp(0.2, 5.0)
            assert t + step > t, "underflow"
        return self.head(y)


def test_a_solver_that_chooses_its_steps_takes_those_of_the_float_model() -> None:
    torch.manual_seed(0)
    model, batches = Adaptive().eval(), [torch.randn(2, 8) for _ in range(3)]
    with torch.no_grad():
        for p in model.f.parameters():
            p.mul_(2)
    sim = QuantizationSimModel(model, batches[0])
    sim.compute_encodings(batches, progress=False)
    rows = {row.name: row for row in sim.coverage()}
    for row in rows.values():
        # a place of several calls may hand a state to a layer, which quantizes it there
        at_layer = row.how.partition(" at ")[2].startswith(("f.", "head."))
        assert row.status != "quantized" or at_layer or max(row.shape, default=1) > 1, f"{row.name} is a single number"
    assert any(row.how.startswith("float: the model's code decides by it") for row in rows.values())
    for name in ("f.0.weight", "f.0.output[0]", "f.1.output[0]", "f.2.output[0]", "head.output[0]"):
        assert sim.quantizers[name].enabled, name
    for x in batches:
        with torch.no_grad():
            y = model(x)
            noise = (y - sim.model(x)).pow(2).sum() / y.pow(2).sum()
        assert float(noise) < 1e-3
        assert abs(len(sim.model.steps) - len(model.steps)) <= 2


class Checked(nn.Module):
    """Residual layers with a look at every stream, a threshold from it, and an exit where the answer is sure."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.layers, self.head, self.asks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4), asks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
            if self.asks and (not bool(x.isfinite().all()) or x.abs().max().item() > 1e4):
                raise ValueError("it diverges")
            if self.asks and self.head(x).softmax(-1).max() > 0.999:
                break
        return self.head(x)


def test_a_question_about_a_stream_does_not_take_it_to_float() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    sims = [QuantizationSimModel(Checked(asks).eval(), x) for asks in (True, False)]
    asked, plain = ({n for n, s in sim.quantizers.items() if s.enabled} for sim in sims)
    streams = {name for name in plain if name.startswith(("add", "layers"))}
    assert streams and streams <= asked
