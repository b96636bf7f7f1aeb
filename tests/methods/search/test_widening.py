"""What raising a quantizer costs, by the operators around it."""

import pytest
import torch
from torch import nn

from bitwright.core.graph.cost import KernelTimes
from bitwright.recipes import widen as search
from bitwright.recipes.judge import values_on_grids
from bitwright.recipes.site_cost import OutputErrors
from bitwright.recipes.widen import ByProducts, ByTime, Neighbours
from bitwright.torch import QuantizationSimModel
from bitwright.torch.program import TorchSimulation

#: nothing but products on codes costs 1, in float 3; a conversion costs 0.01 per number
TIMES = KernelTimes(
    product=(3.0, 1.0), result=(0.0, 0.0), depthwise=(1.0, 2.0), patch=0.0, conversion=0.01, operator=0.0
)


def simulated(net: nn.Module, *shape: int) -> TorchSimulation:
    torch.manual_seed(0)
    batches = [torch.randn(1, *shape)]
    sim = QuantizationSimModel(net.eval(), batches[0], preset="w8a8")
    sim.compute_encodings(batches, progress=False)
    return TorchSimulation(sim)


def costs(model: TorchSimulation, times: KernelTimes = TIMES) -> tuple[ByProducts, ByTime, dict[str, int]]:
    values = values_on_grids(model.sites(), model.shared())
    around = Neighbours(model.graph(), values)
    return ByProducts(around), ByTime(around, times), {n: id(s.quantizer) for n, s in model.sites().items()}


@pytest.fixture(scope="module")
def chain() -> TorchSimulation:
    """Layers of 48, 64 and 32 multiplications."""
    return simulated(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), 6)


def test_products_are_those_of_the_layers_that_read_a_value(chain):
    """One that makes it returns float as well."""
    products, _, key = costs(chain)
    assert products.share([key["1.output[0]"]]) == pytest.approx(64 / 144)
    assert products.share([key["0.input[0]"], key["1.output[0]"]]) == pytest.approx(112 / 144)
    assert products.share([key["4.output[0]"]]) == 0


def test_time_is_that_of_float_kernels_and_of_the_conversions_around_them(chain):
    """The second layer takes 64 x 2 longer, and its eight outputs are quantized."""
    _, time, key = costs(chain)
    assert time.share([key["1.output[0]"]]) == pytest.approx((64 * 2 + 8 * 0.01) / 144)


def test_a_value_between_two_raised_ones_is_converted_no_more(chain):
    _, time, key = costs(chain)
    alone, beside = time.share([key["1.output[0]"]]), time.share([key["1.output[0]"], key["3.output[0]"]])
    assert beside == pytest.approx(((64 + 32) * 2 + 4 * 0.01) / 144), "eight numbers are not quantized"
    assert beside - alone < time.share([key["3.output[0]"]])


def test_the_convolution_in_front_of_an_activation_is_counted():
    """Its kernel rounds what the Relu makes; it reads eight numbers of 4 x 4 on a grid."""
    net = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1))
    products, time, key = costs(simulated(net, 8, 4, 4))
    assert products.share([key["2.output[0]"]]) == pytest.approx(2 / 3)
    each = 8 * 8 * 16
    assert time.share([key["2.output[0]"]]) == pytest.approx((2 * 2 * each + 2 * 8 * 16 * 0.01) / (3 * each))


def test_depthwise_convolutions_may_be_faster_in_float():
    net = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.Conv2d(8, 8, 3, groups=8))
    _, time, key = costs(simulated(net, 8, 6, 6))
    assert time.share([key["1.output[0]"]]) < 0


def test_convolutions_of_three_channels_copy_their_patches_by_rows():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1))
    narrow = KernelTimes((1.0, 1.0), (0.0, 0.0), (1.0, 1.0), patch=1.0, conversion=0.0, operator=0.0)
    _, time, key = costs(simulated(net, 3, 6, 6), narrow)
    rows, products = 16 * 3, 16 * 27 * 8 + 16 * 64
    assert time.share([key["0.input[0]"]]) == pytest.approx(-rows / (products + rows))


def raised(model, monkeypatch, noises, measured=0.05, **options):
    found = OutputErrors(noises, {}, measured=measured)
    monkeypatch.setattr(search, "output_errors", lambda *_, **__: found)
    return search.widen(model, [], bits=None, times=TIMES, memory=1.0, **options)


WIDE = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 100), nn.ReLU(), nn.Linear(100, 4)]


def test_what_takes_most_noise_away_for_its_time_comes_first(monkeypatch):
    """The second layer does 800 of 1,248 multiplications for 3/5 of the noise, the first 48 for 2/5."""
    model = simulated(nn.Sequential(*WIDE), 6)
    report = raised(model, monkeypatch, {"1.output[0]": 3.0, "0.input[0]": 2.0}, allowance=0.2)
    assert [w.site for w in report.raised] == ["0.input[0]"] and [w.site for w in report.too_dear] == ["1.output[0]"]
    assert report.raised[0].now == "float" and report.raised[0].work == pytest.approx(96 / 1248, rel=0.01)


@pytest.mark.parametrize(("measured", "sites"), [(0.05, 2), (5e-6, 1)])
def test_clean_outputs_get_only_what_costs_no_time(monkeypatch, measured, sites):
    """The output of a product may be float on integer kernels."""
    model = simulated(nn.Sequential(*WIDE), 6)
    report = raised(model, monkeypatch, {"0.input[0]": 1.0, "4.output[0]": 1.0}, measured, allowance=0.2)
    assert len(report.raised) == sites and "4.output[0]" in {w.site for w in report.raised}


@pytest.mark.parametrize(("measured", "changed"), [(0.0051, True), (0.0049, False)])
def test_the_allowance_of_time_is_in_proportion_to_noise_that_is_little(monkeypatch, measured, changed):
    """The first layer in float takes 96 of 1,248 more: of an allowance of twice that, half is left at half of ``enough``."""
    options = {"measured": measured, "allowance": 2 * 96 / 1248, "enough": 0.01}
    report = raised(simulated(nn.Sequential(*WIDE), 6), monkeypatch, {"0.input[0]": 1.0}, **options)
    assert report.changed == changed and len(report.too_dear) == (not changed)


def test_no_allowance_is_kept_whatever_the_noise(monkeypatch):
    model = simulated(nn.Sequential(*WIDE), 6)
    report = raised(model, monkeypatch, {"0.input[0]": 1.0}, measured=10.0, allowance=0.0)
    assert not report.changed and len(report.too_dear) == 1
