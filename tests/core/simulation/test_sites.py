"""What sites tell of themselves."""

from __future__ import annotations

import torch

from bitwright.torch import QuantizationSimModel


def test_a_bias_tells_which_of_its_scales_are_missing() -> None:
    sim = QuantizationSimModel(torch.nn.Sequential(torch.nn.Linear(4, 3)).eval(), torch.ones(2, 4))
    sim.quantizers["0.weight"].enabled = False
    assert sim.quantizers.changes(sim.plan)["0.bias"] == "disabled, because 0.weight is in float"
    sim.quantizers["0.input[0]"].enabled = False
    changed = sim.quantizers.changes(sim.plan)["0.bias"]
    assert changed == "disabled, because 0.input[0] and 0.weight are in float"
