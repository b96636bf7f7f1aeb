"""Learned ranges under ``torch.compile``: the numbers of the present parameters, and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.torch import QuantizationSimModel

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_compiled_training_has_the_numbers_and_gradients_of_the_eager_one():
    torch.manual_seed(0)
    sim = QuantizationSimModel(nn.Linear(6, 3), X, default_param_bw=4, default_output_bw=4)
    sim.compute_encodings([X])
    sim.learn_ranges()
    run = torch.compile(sim.model, backend="eager")
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
