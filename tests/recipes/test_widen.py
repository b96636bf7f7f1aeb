"""Which activations get more bits: what each costs the outputs, and what raising it costs in time."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import nn

from bitwright.core.graph.cost import KernelTimes
from bitwright.core.simulation.sites import values_on_grids
from bitwright.errors import ConfigError
from bitwright.recipes import site_cost as output_error
from bitwright.recipes import widen as search
from bitwright.recipes.site_cost import OutputErrors, output_errors
from bitwright.recipes.widen import ByProducts, ByTime, Neighbours
from bitwright.torch import QuantizationSimModel
from bitwright.torch.program import TorchSimulation


@pytest.fixture
def sim():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    batches = [torch.randn(16, 6) for _ in range(2)]
    sim = QuantizationSimModel(net.eval(), batches[0], preset="w8a8")
    sim.compute_encodings(batches, progress=False)
    return sim


def widened(sim, monkeypatch, activations, of_weights=None, **options):
    """What is raised where the estimate is ``activations``: noise of the sites ``0.input[0]``, ``1.output[0]``, ..."""
    found = OutputErrors(activations, of_weights or {}, measured=1e-3)
    monkeypatch.setattr(search, "output_errors", lambda *_, **__: found)
    return search.widen(TorchSimulation(sim), [], allowance=1.0, memory=1.0, **options)


def test_the_noisiest_are_raised_until_the_rest_is_little(sim, monkeypatch):
    noise = {"3.output[0]": 0.1, "0.input[0]": 6.0, "1.output[0]": 3.9}
    report = widened(sim, monkeypatch, noise, {"0.weight": 1.0}, least=0.5)
    assert [w.site for w in report.raised] == ["0.input[0]", "1.output[0]"]
    assert [w.share for w in report.raised] == pytest.approx([6 / 11, 3.9 / 5])


def test_weights_count_as_noise_that_stays(sim, monkeypatch):
    report = widened(sim, monkeypatch, {"0.input[0]": 1.0}, {"0.weight": 9.0}, least=0.2)
    assert not report.changed
    report = widened(sim, monkeypatch, {"0.input[0]": 1.0}, {"0.weight": 9.0}, least=0.2, weights=0.1)
    assert [w.share for w in report.raised] == pytest.approx([1 / 1.9])


@pytest.mark.parametrize("rest", [1.0, 1e3], ids=["one", "thousand"])
def test_noise_that_is_lost_in_the_rounding_of_the_sum_is_not_raised(sim, monkeypatch, rest):
    """1e20 + 1 is 1e20 in double precision: nothing is left after the first, and 1 is not a share of nothing."""
    report = widened(sim, monkeypatch, {"0.input[0]": 1e20, "1.output[0]": rest})
    assert [w.site for w in report.raised] == ["0.input[0]"]
    assert sim.quantizers["1.output[0]"].encoding.format.bits == 8


@pytest.mark.parametrize(("bits", "now"), [(16, "16 bits"), (None, "float")])
def test_what_a_layer_reads_gets_what_the_target_computes_it_in(sim, monkeypatch, bits, now):
    report = widened(sim, monkeypatch, {"0.input[0]": 2.0, "4.output[0]": 1.0}, bits=bits)
    assert [w.now for w in report.raised] == [now, "float"]
    assert sim.quantizers["0.input[0]"].enabled == (bits is not None)


@pytest.mark.parametrize("bits", [8, 0, 33])
def test_bits_that_raise_nothing_are_refused(sim, monkeypatch, bits):
    with pytest.raises(ConfigError, match=f"bits is {bits}.*9 to 16, or None for float"):
        widened(sim, monkeypatch, {"0.input[0]": 2.0}, bits=bits)


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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        y = torch.relu(self.conv1(x))
        y = y + torch.sigmoid(self.conv2(y))
        return self.head(y.mean((2, 3))), y


@pytest.fixture(scope="module")
def calibrated():
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(32, 3, 8, 8, generator=generator) for _ in range(4)]
    sim = QuantizationSimModel(Net().eval(), batches[0], preset="w4a8")
    sim.compute_encodings(batches, progress=False)
    return sim, batches


class Recurrent(nn.Module):
    """A bidirectional GRU and an LSTM, whose last states are outputs too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gru = nn.GRU(6, 8, bidirectional=True, batch_first=True)
        self.lstm, self.head = nn.LSTM(16, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x):
        y, (h, c) = self.lstm(self.gru(x)[0])
        return self.head(y), h, c


def noise(sim, batches):
    """Over signal, the mean of the outputs."""
    ratios = [[0.0, 0.0] for _ in sim.model(batches[0])]
    for batch in batches:
        with torch.no_grad():
            found = sim.model(batch)
            with sim.in_float():
                wanted = sim.model(batch)
        for ratio, f, w in zip(ratios, found, wanted, strict=True):
            ratio[0] += float((f - w).square().sum())
            ratio[1] += float(w.square().sum())
    return sum(n / s for n, s in ratios) / len(ratios)


def test_each_site_alone_makes_the_noise_that_was_estimated(calibrated):
    sim, batches = calibrated
    errors = output_errors(TorchSimulation(sim), batches, samples=128)
    assert not errors.unknown
    estimates = {**errors.activations, **errors.weights}
    restore = sim.remember()
    for name, estimate in estimates.items():
        for other in sim.quantizers.unique():
            other.enabled = other is sim.quantizers[name].quantizer
        assert 0.5 < estimate / noise(sim, batches) < 2, name
    restore()
    assert 0.5 < errors.total / noise(sim, batches) < 2
    assert errors.measured == pytest.approx(noise(sim, batches[: len(batches) // 4]), rel=1e-2)


@pytest.mark.parametrize("preset", ["w8a8", "w4a8"])
def test_sites_inside_recurrent_layers_are_estimated(preset):
    """Every tensor of a step, in both directions, and the weights, whose error goes on from step to step."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(32, 12, 6, generator=generator) for _ in range(3)]
    sim = QuantizationSimModel(Recurrent().eval(), batches[0], preset=preset)
    sim.compute_encodings(batches, progress=False)
    draws = [output_errors(TorchSimulation(sim), batches, samples=96, seed=seed) for seed in range(4)]
    assert not draws[0].unknown
    found = [{**errors.activations, **errors.weights} for errors in draws]
    inside = [name for name, site in sim.quantizers.items() if site.inner is not None]
    weights = [n for n, s in sim.quantizers.items() if s.role == "weight"]
    assert len(inside) > 20 and set(weights) <= found[0].keys()
    restore, compared = sim.remember(), 0
    for name in {*inside, *weights} & found[0].keys():
        for other in sim.quantizers.unique():
            other.enabled = other is sim.quantizers[name].quantizer
        estimate, measured = sum(f[name] for f in found) / len(found), noise(sim, batches)
        if measured > 1e-9:  # below, float32 itself rounds as much: what enters a gate has 16 bits
            assert 0.5 < estimate / measured < 2, name
            compared += 1
        else:
            assert estimate < 2e-9, name
    restore()
    assert compared > 20 and not set(inside) - found[0].keys(), "none is left out"


def test_same_seed_same_estimate_and_the_model_stays_as_it_is(calibrated):
    sim, batches = calibrated
    before = {name: p.detach().clone() for name, p in sim.model.named_parameters()}
    one, two, other = (output_errors(TorchSimulation(sim), batches, seed=s) for s in (0, 0, 1))
    assert one == two != other
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in sim.model.named_parameters())


def test_only_as_much_data_is_read_as_is_asked_for(calibrated):
    sim, batches = calibrated
    read = []

    def counted():
        for batch in batches:
            read.append(1)
            yield batch

    output_errors(TorchSimulation(sim), counted(), samples=40)
    assert len(read) == 2
    assert math.isfinite(output_errors(TorchSimulation(sim), []).total)


def test_constants_that_are_no_weights_are_estimated_beside_the_total():
    """A table that is multiplied with activations, as rotary angles are."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("table", torch.cos(torch.arange(8.0)))

        def forward(self, x):
            return self.last(self.layer(x) * self.table)

    data = [torch.randn(64, 8, generator=torch.Generator().manual_seed(0))]
    sim = QuantizationSimModel(Table().eval(), data[0])
    sim.compute_encodings(data, progress=False)
    (name,) = [name for name, site in sim.quantizers.items() if site.role == "constant"]
    errors = output_errors(TorchSimulation(sim), data, samples=64)
    assert errors.constants.keys() == {name} and name not in {**errors.activations, **errors.weights}
    restore = sim.remember()
    for other in sim.quantizers.unique():
        other.enabled = other is sim.quantizers[name].quantizer
    with torch.no_grad():
        found = sim.model(data[0])
        with sim.in_float():
            wanted = sim.model(data[0])
    restore()
    measured = float((found - wanted).square().sum() / wanted.square().sum())
    assert 0.5 < errors.constants[name] / measured < 2


class Watched(TorchSimulation):
    """Notes which quantizers run while derivatives are computed."""

    def quantize(self, site, x):
        if torch._C._current_graph_task_id() != -1:
            self.__dict__.setdefault("late", []).append(site)
        return super().quantize(site, x)


def test_errors_are_not_kept_from_the_run_forward(calibrated):
    sim, batches = calibrated
    watched, plain = Watched(sim), TorchSimulation(sim)
    errors = output_errors(watched, batches[:1])
    assert set(watched.late) == set(errors.activations) | set(errors.weights)
    assert errors == output_errors(plain, batches[:1])


class _Held:
    """Bytes that autograd keeps for the run back, and the most it kept."""

    def __init__(self):
        self.now = self.most = 0

    def keep(self, tensor):
        size = tensor.nbytes
        self.now += size
        self.most = max(self.now, self.most)
        kept = _Kept(tensor.detach())
        weakref.finalize(kept, self._released, size)
        return kept

    def _released(self, size):
        self.now -= size


class _Kept:
    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize("model", ["convolutions", "recurrent", "several readers"])
def test_the_run_forward_is_kept_in_parts(model, calibrated, monkeypatch):
    """The same estimate from parts of one step each as from the whole, with fewer values in memory."""
    if model == "convolutions":
        sim, (batch, *_) = calibrated
    else:
        batch = torch.randn(32, 12, 6, generator=torch.Generator().manual_seed(1))
        net = Recurrent() if model == "recurrent" else SeveralReaders()
        sim = QuantizationSimModel(net.eval(), batch)
        sim.compute_encodings([batch], progress=False)
    found, most = {}, {}
    for size in (0, 2**30):
        monkeypatch.setattr(output_error, "_PART", size)
        held = _Held()
        with torch.autograd.graph.saved_tensors_hooks(held.keep, lambda kept: kept.tensor):
            found[size] = output_errors(TorchSimulation(sim), [batch])
        most[size] = held.most
    parts, whole = found[0], found[2**30]
    assert parts.measured == whole.measured and parts.unknown == whole.unknown
    for one, other in ((parts.activations, whole.activations), (parts.weights, whole.weights)):
        assert one == pytest.approx(other, rel=1e-4) and one.keys() == other.keys()
    assert most[0] < 0.7 * most[2**30]


class SeveralReaders(nn.Module):
    """A value that layers read in several parts, an index that has no derivative, an output that is an input of the next."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = torch.relu(self.one(x))
        z = torch.tanh(self.two(y))
        first = z.gather(1, y.argsort(1))
        return self.three(first) * y + self.two(z), z


class Halves(nn.Module):
    """Two linear layers; ``kind`` says what the second one reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        if self.kind == "reads the mean of the batch":
            hidden = hidden - hidden.mean(0)
        elif self.kind == "takes 40 samples only":
            hidden = hidden.view(40, 32)
        return self.second(hidden)


@pytest.mark.parametrize(
    ("kind", "data", "ran"),
    [
        ("computes samples one by one", 1, [8, 8, 8, 8]),
        ("computes samples one by one", 2, [8, 8, 8, 8]),  # the second batch is not read
        ("reads the mean of the batch", 1, [40]),
        ("takes 40 samples only", 1, [40]),
    ],
)
def test_a_large_batch_is_divided_where_samples_are_independent(kind, data, ran, monkeypatch):
    torch.manual_seed(0)
    net, batches = Halves(kind).eval(), [torch.randn(40, 16) for _ in range(data)]
    sim = QuantizationSimModel(net, batches[0], preset="w8a8")
    sim.compute_encodings(batches, progress=False)
    model = TorchSimulation(sim)
    whole = output_errors(model, batches)
    one_sample = output_error._outputs(model, batches[0][:40]).nbytes // 40
    monkeypatch.setattr(output_error, "_SLICE", 8 * one_sample)
    seen, batch = [], output_error._Watch.batch

    def counted(watch, program, state):
        seen.append(batch(watch, program, state))
        return seen[-1]

    monkeypatch.setattr(output_error._Watch, "batch", counted)
    found = output_errors(model, batches)
    assert seen == ran
    assert found.measured == pytest.approx(whole.measured, rel=0.2)
    assert found.activations == pytest.approx(whole.activations, rel=0.5)
    assert found.weights == pytest.approx(whole.weights, rel=0.5)
