"""What statistics tell about a site."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.core.health.site_health import site_health
from bitwright.core.numerics.granularity import PerChannel, PerTensor
from bitwright.core.numerics.statistics import measure, start
from bitwright.torch import QuantizationSimModel


@pytest.mark.parametrize("kind", ["minmax", "histogram"])
def test_channels_that_are_zero_or_constant_are_counted(kind):
    x = np.float32([[0, 0, 0], [2, 2, 2], [1, np.nan, np.inf], [-1, 1, -np.inf]])
    found = site_health("w", measure(kind, x, PerChannel(0)))
    assert (found.groups, found.zero, found.constant) == (4, (0,), (1, 2))
    assert (found.count, found.nan, found.pos_inf, found.neg_inf) == (9, 1, 1, 1)
    assert (found.lo, found.hi) == (-1, 2)


@pytest.mark.parametrize(
    "values, dtype, note",
    [
        ([0.0, 65504.0], "float16", "it reaches the largest number of float16"),
        ([0.0, 3e-6], "float16", "all its values are below the smallest normal number of float16"),
        ([0.0, 0.0], "float32", "it is zero throughout"),
        ([3.0, 3.0], "float32", "it is constant"),
        ([np.nan, np.nan], "float32", "no finite value was seen"),
    ],
)
def test_notes(values, dtype, note):
    found = site_health("s", measure("minmax", np.array(values, dtype), PerTensor()), dtype)
    assert note in found.notes and note in str(found)


def test_a_healthy_site_has_none():
    found = site_health("s", measure("minmax", np.float32([-1, 2])))
    assert found.notes == () and str(found) == "s: in [-1, 2]"
    assert "no finite value was seen" in site_health("s", start("minmax")).notes


def test_a_simulation_reports_its_sites():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        model[0].weight[2] = 0
        model[2].weight[:], model[2].bias[:] = 0, 0
    sim = QuantizationSimModel(model, torch.randn(3, 4))
    sim.compute_encodings([torch.randn(8, 4)])
    found = {health.site: health for health in sim.health()}
    assert found["0.weight"].notes == ("1 of 6 channels is zero throughout: 2",)
    assert found["2.weight"].zero == (0, 1) and found["2.output[0]"].notes == ("it is zero throughout",)
    assert found["0.input[0]"].notes == () and found["0.input[0]"].count == 32


def test_empty_tensors_are_counted():
    assert site_health("s", measure("minmax", np.float32([-1, 2])), empty=2).notes == ("2 empty tensors",)

    class Rows(nn.Module):
        """A layer on the rows that a condition finds."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x):
            return self.layer(x[x[:, 0] > 0])

    some = torch.cat([torch.randn(8, 4).abs(), -torch.ones(2, 4)])
    sim = QuantizationSimModel(Rows(), some)
    sim.compute_encodings([some, -some.abs()])
    found = {health.site: health for health in sim.health()}
    assert found["layer.input[0]"].notes == ("1 empty tensor",) and found["layer.input[0]"].count == 32
    assert found["layer.weight"].empty == 0
    sim.compute_encodings([some])
    assert not any(health.empty for health in sim.health()), "a new calibration starts from nothing"


def test_an_empty_tensor_in_a_batch_that_is_left_out_is_not_counted():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, y):
            return self.a(x), self.b(y)

    sim = QuantizationSimModel(Parts(), (torch.randn(3, 4), torch.randn(3, 4)))
    good, bad, none = torch.randn(3, 4), torch.full((3, 4), torch.nan), torch.zeros(0, 4)
    sim.compute_encodings([(good, good), (bad, none), (good, none)], non_finite="skip")
    found = {health.site: health for health in sim.health()}
    assert found["b.input[0]"].empty == 1 and found["a.input[0]"].empty == 0


def test_channels_of_an_activation_with_one_scale_are_named_with_their_layer():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4)).eval()
    with torch.no_grad():
        net[1].bias[:11] = -100
        net[1].weight[[12, 15]], net[1].bias[[12, 15]] = 0, 0.5
    sim = QuantizationSimModel(net, torch.randn(2, 3, 6, 6))
    sim.compute_encodings([torch.randn(4, 3, 6, 6) for _ in range(3)])
    found = {health.site: health for health in sim.health()}
    assert found["2.output[0]"].notes == (
        "11 of 16 channels of 1 are zero throughout: 0, 1, 2, 3, 4, 5, 6, 7 and 3 more",
        "2 of 16 channels of 1 are constant: 12, 15",
    )
    assert found["2.output[0]"].groups == 16 and found["4.output[0]"].notes == ()
    sim.quantizers["0.weight"].spec = replace(sim.quantizers["0.weight"].spec, granularity=PerTensor())
    sim.compute_encodings([torch.randn(4, 3, 6, 6)])
    assert {h.site: h.groups for h in sim.health()}["0.weight"] == 16, "weights with one scale are looked at too"


class Paths(nn.Module):
    """Two layers whose outputs are joined, and so have one encoding; each has another dead channel."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 1)
        with torch.no_grad():
            self.a.weight[0], self.a.bias[0] = 0, -1
            self.b.weight[2], self.b.bias[2] = 0, -1

    def forward(self, x):
        return torch.cat([torch.relu(self.a(x)), torch.relu(self.b(x))], 1)


def test_sites_that_share_an_encoding_have_channels_of_their_own():
    torch.manual_seed(0)
    sim = QuantizationSimModel(Paths(), torch.randn(2, 2, 3, 3))
    sim.compute_encodings([torch.randn(2, 2, 3, 3)])
    zero = {health.site: health.zero for health in sim.health() if health.zero}
    assert zero["relu.output[0]"] == (0,) and zero["relu_1.output[0]"] == (2,)


def test_a_batch_that_is_left_out_tells_nothing_of_channels():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, y):
            return self.a(x), self.b(y)

    sim = QuantizationSimModel(Parts(), (torch.randn(3, 4), torch.randn(3, 4)))
    same, other, bad = torch.ones(3, 4), torch.randn(3, 4), torch.full((3, 4), torch.nan)
    sim.compute_encodings([(bad, other), (other, same), (bad, other)], non_finite="skip")
    found = {health.site: health for health in sim.health()}
    assert found["b.input[0]"].constant == (0, 1, 2, 3) and not found["a.input[0]"].constant


def test_what_was_seen_is_brought_back():
    class Rows(nn.Module):
        """Two layers; the rows of the second may be none, as of a cache that is still empty."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.first(x), self.second(rows)

    some, none = torch.ones(2, 4), torch.zeros(0, 4)
    sim = QuantizationSimModel(Rows(), (torch.randn(3, 4), torch.randn(3, 4)))
    sim.compute_encodings([(some, some), (some, none)])
    before = sim.health()
    (found,) = [row for row in before if row.empty and row.notes[0] == "it is constant"]
    assert found.empty == 1 and found.notes == ("it is constant", "1 empty tensor")
    restore = sim.quantizers.remember()
    sim.compute_encodings([(torch.randn(8, 4), torch.randn(8, 4))])
    assert sim.health() != before
    restore()
    assert sim.health() == before


def test_a_simulation_in_half_precision_reports_saturation_and_underflow():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).half()
    with torch.no_grad():
        net[0].weight[:], net[0].bias[:] = torch.eye(2), 0
        net[2].weight[:], net[2].bias[:] = 0, 1e-6
    sim = QuantizationSimModel(net, torch.ones(3, 2, dtype=torch.half))
    sim.compute_encodings([torch.tensor([[65504.0, 1.0]], dtype=torch.half)])
    found = {health.site: health for health in sim.health()}
    assert found["0.input[0]"].saturated and found["0.input[0]"].dtype == "float16"
    assert found["2.output[0]"].underflow and not found["2.output[0]"].saturated
