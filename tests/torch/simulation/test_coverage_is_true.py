"""What coverage says of a value is what the simulation does to it, on random graphs of functions in the tables and in none."""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from bitwright.torch import QuantizationSimModel
from bitwright.torch.quantizers.quantizer import Quantizer

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


class Random(nn.Module):
    """A few calls of random functions and layers on inputs and on what came of others."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.steps: list[tuple[Binary, int, int]] = []
        for n in range(3, 3 + draw.randint(3, 7)):
            function = draw.choice([*LISTED, *UNLISTED, *self.layers])
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
    sim = QuantizationSimModel(model, batches[0], default_output_bw=5)
    sim.compute_encodings(batches, progress=False)
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
