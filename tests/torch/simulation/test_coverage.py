"""Coverage says of a value what the simulation does with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwright.torch import QuantizationSimModel


def simulated(model: nn.Module, *inputs: Tensor) -> QuantizationSimModel:
    sim = QuantizationSimModel(model.eval(), inputs)
    sim.compute_encodings([inputs], progress=False)
    return sim


def row_of(sim: QuantizationSimModel, name: str) -> Any:
    return next(row for row in sim.coverage() if row.name == name)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, p: Tensor, q: Tensor) -> Tensor:
        return self.out((self.enc(p) - self.enc(q)).abs())


def test_the_second_input_of_a_shared_encoder_is_quantized_where_the_first_is() -> None:
    torch.manual_seed(0)
    sim = simulated(Siamese(), torch.randn(4, 6), torch.randn(4, 6))
    for name in ("p", "q"):
        row = row_of(sim, name)
        assert row.status == "quantized" and row.how.endswith("at enc.input[0]"), row
    q = torch.randn(4, 6)
    grid = float(sim.quantizers["enc.input[0]"].encoding.scale)
    p = torch.randn(4, 6)
    assert torch.equal(sim.model(p, q), sim.model(p, q + 1e-6 * grid)) or (q / grid % 1 - 0.5).abs().min() < 1e-3
    second = sim.capture(["enc.input[0]"], (p, q))["enc.input[0]"][1]
    assert torch.allclose(second / grid, (second / grid).round(), atol=1e-3) and not torch.equal(second, q)


def test_a_table_that_is_looked_up_at_constant_positions_is_named_with_its_rows() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.fc = nn.Embedding(9, 6), nn.Embedding(5, 6), nn.Linear(6, 6)
            self.register_buffer("ids", torch.arange(5))

        def forward(self, i: Tensor) -> Tensor:
            return self.fc(self.words(i) + self.places(self.ids))

    row = row_of(simulated(Positions(), torch.randint(0, 9, (2, 5))), "places.weight")
    assert row.status == "float"
    assert "which is computed of it alike in every run; that is quantized at add.input[1]" in row.how, row


def test_complex_tensors_are_float() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.register_buffer("turns", torch.polar(torch.ones(3), torch.rand(3)))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.view_as_complex(self.fc(x).reshape(-1, 3, 2)) * self.turns
            return torch.view_as_real(x).flatten(-2)

    row = row_of(simulated(Rotary(), torch.randn(2, 6)), "turns")
    assert (row.status, row.how) == ("float", "complex64: quantizers take real numbers")


def test_a_layer_that_is_called_twice_on_one_value_verifies(tmp_path: Path) -> None:
    """The exporter makes one call of both, and the runs of the place are one fewer in the file."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
            return self.b(torch.relu(self.a(p) + self.a(q))), self.b(torch.relu(self.a(q)))

    torch.manual_seed(0)
    batch = (torch.randn(16, 6), torch.randn(16, 6))
    report = simulated(Twice(), *batch).verify(batch)
    assert report.ok and not report.failures and not report.unchecked, str(report)


@pytest.mark.parametrize("groups", [2, 4])
def test_a_transposed_convolution_that_sums_channels_has_a_scale_and_an_int32_bias_for_each_output(groups: int) -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(2 * groups, groups, 3, stride=2, groups=groups)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-2, 0, 2 * groups).reshape(-1, 1, 1, 1))
    x = torch.randn(2, 2 * groups, 5, 5)
    sim = simulated(nn.Sequential(layer), x)
    largest = layer.weight.detach().reshape(groups, 2, -1).abs().amax((1, 2))
    weight, bias = sim.quantizers["0.weight"].encoding, sim.quantizers["0.bias"].encoding
    assert torch.allclose(torch.as_tensor(weight.scale).flatten().float(), largest / 127.5, rtol=1e-2)
    data = float(sim.quantizers["0.input[0]"].encoding.scale)
    assert torch.allclose(torch.as_tensor(bias.scale).flatten(), torch.as_tensor(weight.scale).flatten() * data)
    assert sim.verify(x).ok
