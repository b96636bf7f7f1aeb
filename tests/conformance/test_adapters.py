"""Low-rank adapters beside layers stay in float while the layers are quantized, whatever module they are written as."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated


class Adapted(nn.Module):
    """A layer with adapters beside it, as PEFT computes them."""

    def __init__(self, outputs: int, adapters: int, rank: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = nn.Linear(32, outputs), scale
        self.down = nn.ModuleList(nn.Linear(32, rank, bias=False) for _ in range(adapters))
        self.up = nn.ModuleList(nn.Linear(rank, outputs, bias=False) for _ in range(adapters))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        for down, up in zip(self.down, self.up, strict=True):
            result = result + up(down(self.drop(x.to(result.dtype)))) * self.scale
        return result


def quantized_weights(sim: Any) -> set[str]:
    return {name for name, site in sim.quantizers.items() if site.role == "weight" and site.enabled}


@pytest.mark.parametrize("adapters, scale", [(1, 2.0), (2, 2.0), (3, 1.0)])
@pytest.mark.parametrize("preset", ["w4", "w8a8"])
def test_adapters_are_in_float_unless_a_rule_asks_for_them(preset: str, adapters: int, scale: float) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Adapted(24, adapters, scale=scale), nn.ReLU(), nn.Linear(24, 8)).eval(), torch.randn(4, 32)
    sim = QuantizationSimModel(model, x, preset=preset)
    assert quantized_weights(sim) == {"0.base.weight", "2.weight"}
    row = next(row for row in sim.coverage() if row.name == "0.up.0.weight")
    assert row.status == "float" and "0.down.0 and 0.up.0 are an adapter beside 0.base" in row.how
    rules = {"preset": preset, "rules": [{"match": "0.up.*", "weight": {"format": "int8"}}]}
    asked = quantized_weights(QuantizationSimModel(model, x, config_file=rules))
    assert asked == {"0.base.weight", "2.weight", *(f"0.up.{i}.weight" for i in range(adapters))}


def test_adapters_beside_a_layer_that_reads_rows_in_two_axes_are_in_float() -> None:
    class Rows(nn.Linear):
        """As the layers of GPT-2 compute: ``addmm`` on a view of two axes."""

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight.t()).view(*x.shape[:-1], -1)

    torch.manual_seed(0)
    model = nn.Sequential(Adapted(24, 2), nn.ReLU(), nn.Linear(24, 8)).eval()
    model[0].base = Rows(32, 24)
    sim = QuantizationSimModel(model, torch.randn(2, 4, 32), preset="w4")
    assert len(quantized_weights(sim)) == 2
    row = next(row for row in sim.coverage() if row.name == "0.up.1.weight")
    assert row.status == "float" and "are an adapter beside 0.base" in row.how


def test_adapters_of_files_are_in_float(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Adapted(24, 2), nn.ReLU(), nn.Linear(24, 8)).eval(), torch.randn(4, 32)
    torch.onnx.export(model, (x,), tmp_path / "m.onnx", input_names=["x"], dynamo=False)
    sim = OnnxSim(onnx.load(tmp_path / "m.onnx"), preset="w4")
    kept = {row.name for row in sim.coverage() if row.status == "float" and "are an adapter beside" in row.how}
    assert (
        len(quantized_weights(sim)) == 2 and len([name for name in kept if "weight" in name or "MatMul" in name]) >= 4
    )


@pytest.mark.parametrize("rank", [4, 16])
def test_narrow_layers_that_stand_beside_nothing_are_quantized(rank: int) -> None:
    class Bottleneck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down, self.up = nn.Linear(32, 32), nn.Linear(32, rank), nn.Linear(rank, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.up(self.down(self.base(x)))

    model = nn.Sequential(Bottleneck(), Bottleneck()).eval()
    assert len(quantized_weights(QuantizationSimModel(model, torch.randn(2, 32), preset="w4"))) == 6


def test_adapters_are_switched_and_taken_off_and_train_alone() -> None:
    torch.manual_seed(0)
    model, x = Adapted(24, 1).eval(), torch.randn(16, 32)
    sim = calibrated(QuantizationSimModel(model, x, preset="w4"))
    with torch.no_grad():
        with_first, base = sim.model(x), sim.model.base(x)
        sim.model.scale, kept = 0.0, sim.model.scale
        assert torch.allclose(sim.model(x), base, atol=1e-6)
        sim.model.scale = kept
        assert torch.equal(sim.model(x), with_first)
    sim.model.base.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in sim.model.parameters() if p.requires_grad], 1e-2)
    target, grid = model(x).detach(), sim.model.base.weight.detach().clone()
    losses = []
    for _ in range(40):
        loss = (sim.model(x) - target).square().mean()
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0] and torch.equal(sim.model.base.weight, grid)
