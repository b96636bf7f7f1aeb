"""What statistics tell about a site."""

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.core.granularity import PerChannel, PerTensor
from bitwright.core.site_health import site_health
from bitwright.core.statistics import measure, start
from bitwright.torch import QuantizationSimModel


@pytest.mark.parametrize("kind", ["minmax", "histogram"])
def test_channels_that_are_zero_or_constant_are_counted(kind):
    x = np.float32([[0, 0, 0], [2, 2, 2], [1, np.nan, np.inf], [-1, 1, -np.inf]])
    found = site_health("w", measure(kind, x, PerChannel(0)))
    assert (found.groups, found.zero, found.constant) == (4, 1, 2)
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
    assert found["0.weight"].notes == ("1 of 6 channels or blocks are zero throughout",)
    assert found["2.weight"].zero == 2 and found["2.output[0]"].notes == ("it is zero throughout",)
    assert found["0.input[0]"].notes == () and found["0.input[0]"].count == 32


def test_empty_tensors_are_counted():
    assert site_health("s", measure("minmax", np.float32([-1, 2])), empty=2).notes == ("2 empty tensors",)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    sim = QuantizationSimModel(model, torch.randn(3, 4))
    sim.compute_encodings([torch.randn(8, 4), torch.zeros(0, 4)])
    found = {health.site: health for health in sim.health()}
    assert found["0.input[0]"].notes == ("1 empty tensor",) and found["0.input[0]"].count == 32
    assert found["0.weight"].empty == 0
    sim.compute_encodings([torch.randn(8, 4)])
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
