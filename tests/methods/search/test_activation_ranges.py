"""Ranges chosen anew: from the statistics at hand the same as from another calibration."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.core.numerics.statistics import Histogram, MinMax
from bitwright.methods.activation_ranges import activation_ranges, keep_histograms
from bitwright.torch import QuantizationSimModel


def simulated(keep: bool, but=()):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    data = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    sim = QuantizationSimModel(model, data[0], preset="w8a8")
    if keep:
        keep_histograms(sim, but)
    calls = []

    def calibrate(sim):
        calls.append(1)
        sim.compute_encodings(data, progress=False)

    calibrate(sim)
    return sim, calibrate, calls


def encodings(sim):
    sim.model(torch.zeros(1, 3, 8, 8))  # biases follow from the others when they are next used
    return {name: site.encoding for name, site in sim.quantizers.items()}


@pytest.mark.parametrize("method", ["mse", "sqnr", "percentile", "entropy"])
def test_kept_histograms_tell_what_another_calibration_tells(method):
    once, calibrate, calls = simulated(keep=True)
    plain, again, twice = simulated(keep=False)
    assert encodings(once) == encodings(plain)
    reports = [activation_ranges(once, calibrate, method=method), activation_ranges(plain, again, method=method)]
    assert reports[0] == reports[1] and reports[0].changed
    assert (len(calls), len(twice)) == (1, 2)
    assert encodings(once) == encodings(plain)


def test_sites_that_will_be_in_float_keep_their_bounds_alone():
    plain, _, _ = simulated(keep=False)
    (first, *_) = [s.quantizer.name for s in plain.quantizers.values() if s.role == "input"]
    sim, _, _ = simulated(keep=True, but=(first,))
    kinds = {
        s.quantizer.name: type(s.quantizer.statistics) for s in sim.quantizers.values() if s.role in ("input", "output")
    }
    assert kinds.pop(first) is MinMax and set(kinds.values()) == {Histogram}
