"""Coverage says of a value what the simulation does with it, on random graphs too."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from bitwright.torch import QuantizationSimModel
from bitwright.torch.quantizers.quantizer import Quantizer
from tests.support.simulations import calibrated


def simulated(model: nn.Module, *inputs: Tensor) -> QuantizationSimModel:
    return calibrated(QuantizationSimModel(model.eval(), inputs), [inputs])


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


@pytest.mark.parametrize("measured", [torch.zeros_like, lambda x: x.new_full(x.shape, 0.5), lambda x: (x > 0).sum()])
def test_the_reason_of_a_reader_of_values_comes_before_that_of_a_reader_of_the_shape(measured: Any) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return measured(x) + torch.sin(x) + y

    row = row_of(simulated(Both(), torch.randn(2, 6), torch.randn(2, 6)), "x")
    assert row.status == "float" and "sin takes it for an angle" in row.how, row


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


SHAPE = (4, 6, 8)
Binary = Callable[[Tensor, Tensor], Tensor]
EVEN = torch.arange(8) % 2 == 0


def written(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1] = y[:, 0]
    return x


def added_in_place(x: Tensor, y: Tensor) -> Tensor:
    return x.clone().index_add_(1, torch.tensor([0, 2]), y[:, :2])


LISTED: list[Binary] = [
    lambda x, y: x.relu(),
    lambda x, y: x.sigmoid(),
    lambda x, y: torch.tanh(x) * 2,
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: x - 0.5 * y,
    lambda x, y: x.softmax(-1),
    lambda x, y: torch.cat([x, y], 1)[:, 3:9],
    lambda x, y: x.transpose(1, 2).reshape(4, 6, 8),
    lambda x, y: (x @ y.transpose(1, 2)).softmax(-1) @ y,
    lambda x, y: torch.where(y > 0, x, y),
    lambda x, y: x.flip(1),
    lambda x, y: torch.maximum(x, y),
    lambda x, y: x.masked_fill(EVEN, 0.0),
    lambda x, y: torch.stack([x, y]).mean(0),
    lambda x, y: x.abs() / (1 + y.abs()),
]
MEASURED: list[Binary] = [  # these read the shape of one operand, or make a Boolean of it
    lambda x, y: y * x.new_full(x.shape, 0.5),
    lambda x, y: y + x.new_zeros(x.shape),
    lambda x, y: y * x.new_ones(8),
    lambda x, y: x.new_empty(x.shape).copy_(y),
    lambda x, y: y + torch.zeros_like(x),
    lambda x, y: y - torch.ones_like(x),
    lambda x, y: y * torch.full_like(x, 2.0),
    lambda x, y: torch.empty_like(x).copy_(y).relu(),
    lambda x, y: y.masked_fill(x > 0, 0.0),
    lambda x, y: y.reshape(x.size()) * x.shape[1],
    lambda x, y: y.view_as(x).expand_as(x).sigmoid(),
]
UNLISTED: list[Binary] = [
    lambda x, y: x.masked_scatter(EVEN.expand(x.shape), y),
    lambda x, y: x.index_add(1, torch.tensor([0, 2]), y[:, :2]),
    lambda x, y: x.index_put((torch.tensor([0, 1]),), y[:2]),
    lambda x, y: torch.hypot(x, y),
    lambda x, y: torch.copysign(x, y),
    lambda x, y: x.cumprod(1),
    lambda x, y: torch.nan_to_num(x),
    lambda x, y: torch.fft.rfft(x, dim=2).abs().repeat(1, 1, 2)[..., :8],
    lambda x, y: torch.logaddexp(x, y),
    lambda x, y: torch.cdist(x, y)[..., :6].repeat(1, 1, 2)[..., :8],
    written,
    added_in_place,
]


MEASURES = set("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty".split())


class Random(nn.Module):
    """A few calls of random functions and layers on inputs and on what came of others."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.steps: list[tuple[Binary, int, int]] = []
        for n in range(3, 3 + draw.randint(3, 7)):
            function = draw.choice([*LISTED, *UNLISTED, *(MEASURED * (1 + seed % 3)), *self.layers])
            if isinstance(function, nn.Module):
                layer = function
                function = lambda x, y, layer=layer: layer(x)  # type: ignore[misc]  # noqa: E731
            self.steps.append((function, draw.randrange(max(0, n - 4), n), draw.randrange(n)))
        self.returned = [-1, *draw.sample(range(-len(self.steps), 0), 1)]

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        values = [a, b, c]
        for function, x, y in self.steps:
            values.append(function(values[x], values[y]))
        return [values[i] for i in self.returned]


def off_grid(x: Tensor, quantizer: Quantizer) -> float:
    """The largest distance of an element from the grid, in steps."""
    encoding = quantizer.encoding
    assert encoding is not None
    codes = x.double() / float(encoding.scale) + float(encoding.zero_point)
    inside = codes.clamp(encoding.format.qmin, encoding.format.qmax)  # type: ignore[union-attr]
    return float(((codes - codes.round()).abs() + (codes - inside).abs()).max()) if x.numel() else 0.0


def check(seed: int) -> None:
    torch.manual_seed(seed)
    model = Random(seed).eval()
    batches = [tuple(torch.randn(SHAPE) for _ in range(3)) for _ in range(2)]
    with torch.no_grad():
        if not all(t.isfinite().all() for t in model(*batches[0])):
            return
    sim = calibrated(QuantizationSimModel(model, batches[0], default_output_bw=5), batches)
    enabled = {name: site for name, site in sim.quantizers.items() if site.enabled}
    assert not [name for name, site in enabled.items() if site.encoding is None], "calibration reaches every site"

    asked: set[int] = set()

    def noting(method: str) -> Callable[..., object]:
        original = getattr(Quantizer, method)

        def called(self: Quantizer, *args: object, **kwargs: object) -> object:
            asked.add(id(self))
            return original(self, *args, **kwargs)

        return called

    names = ("__call__", "plain_grid", "joined_with")
    with torch.no_grad(), patch.multiple(Quantizer, **{name: noting(name) for name in names}):
        sim.model(*batches[0])
    silent = [n for n, s in enabled.items() if s.role in ("input", "output") and id(s.quantizer) not in asked]
    assert not silent, "a site that stands in the plan is at work"

    rows = {row.name: row for row in sim.coverage()}
    held = {site.value for site in enabled.values()}
    for site in enabled.values():  # one place may run several times, and read another value each time
        if site.role == "input":
            held |= {value for port, value in sim.graph.op(site.op).sources() if port == site.port}
    for name, row in rows.items():
        assert (row.status == "quantized") == (name in held), f"{name}: {row.status}, {row.how}"
        if row.how.endswith(("reads only its shape", "makes no floating-point result of it", "complex numbers of it")):
            readers = {op.type for op, _ in sim.graph.consumers(name)}
            assert readers <= {"gt", "fft_rfft", *MEASURES}, f"{name}: {row.how}, though its readers are {readers}"
    outputs = [name for name, site in enabled.items() if site.role == "output"]
    found = sim.capture(outputs, batches[0])
    for name in outputs:
        for x in found[name]:
            assert off_grid(x, enabled[name].quantizer) < 1e-3, f"{name} is on its grid"
    shared = {name: group for name, group in sim.plan.shared.items() if rows[name].status == "shared"}
    found = sim.capture(list(shared), batches[0])
    for name, group in shared.items():
        # an input of the model that is moved before it is read has its quantizer at the reader
        sites = [
            enabled[site] for site in sim.plan.groups[group][:1] if site in enabled and enabled[site].role == "output"
        ]
        for x in found[name]:
            assert not sites or off_grid(x, sites[0].quantizer) < 1e-3, f"{name} is on the grid of {group}"


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_coverage_says_what_the_simulation_does(first: int) -> None:
    for seed in range(first, first + 10):
        check(seed)


@pytest.mark.slow
def test_coverage_says_what_the_simulation_does_on_many_graphs() -> None:
    for seed in range(1000, 1100):
        check(seed)
