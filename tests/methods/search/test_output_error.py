"""The estimate of what each quantizer costs the output, against what it does cost."""

import math
import weakref

import pytest
import torch
from torch import nn

from bitwright.recipes import site_cost as output_error
from bitwright.recipes.site_cost import output_errors
from bitwright.torch import QuantizationSimModel
from bitwright.torch.program import TorchSimulation


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
    assert errors.measured == pytest.approx(noise(sim, batches), rel=1e-2)


@pytest.mark.slow_variants("w8a8")
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
