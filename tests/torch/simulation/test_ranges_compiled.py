"""Learned ranges under ``torch.compile``: the numbers of the present parameters, and their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerTensor
from bitwright.torch import QuantizationSimModel
from bitwright.torch.quantizers.learned_range import LearnedRange

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_compiled_training_has_the_numbers_and_gradients_of_the_eager_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    sim = QuantizationSimModel(model, X, default_param_bw=4, default_output_bw=4)
    sim.compute_encodings([X])
    sim.learn_ranges()
    run = torch.compile(sim.model, backend="eager", fullgraph=True)
    parameters = [*sim.model.parameters(), *sim.range_parameters()]
    for step in range(2):
        found = []
        for call in (sim.model, run):
            for p in parameters:
                p.grad = None
            out = call(X)
            out.square().mean().backward()
            found.append([out.detach(), *(p.grad for p in parameters)])
        assert torch.equal(found[0][0], found[1][0]), step
        for eager, compiled in zip(*found, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            for p in sim.range_parameters():
                p.add_(0.05)


def test_ranges_of_values_near_nothing_keep_finite_gradients():
    """The square of such a scale is zero in float32."""
    encoding = Encoding(IntFormat(4, signed=False), np.float32(1e-25), np.int64(7), PerTensor())
    learned = LearnedRange("here", encoding, offset=True)
    x = (X * 1e-24).requires_grad_()
    learned.traced(x, weight=False).sum().backward()
    found = [x.grad, *(p.grad for p in learned.parameters().values())]
    assert all(torch.isfinite(grad).all() and grad.any() for grad in found)
