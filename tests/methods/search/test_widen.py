"""Which activations get more bits, given an estimate of what each costs the outputs."""

import pytest
import torch
from torch import nn

from bitwright.errors import ConfigError
from bitwright.recipes import widen as search
from bitwright.recipes.site_cost import OutputErrors
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
