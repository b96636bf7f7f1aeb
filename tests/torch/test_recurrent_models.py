"""Recurrent models of every kind: they run, keep their sites at any length, keep their accuracy, and are exported."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.core.model import sqnr
from bitwright.torch import QuantizationSimModel, prepare_model
from tests.recurrent_zoo import RECURRENT_ZOO, Recurrent, Stateful

CASES = [pytest.param(case, id=name) for name, case in RECURRENT_ZOO.items()]


def build(case: Recurrent) -> nn.Module:
    torch.manual_seed(1)
    return case.build().eval()


def simulated(case: Recurrent, model: nn.Module, length: int = 5) -> QuantizationSimModel:
    sim = QuantizationSimModel(model, case.example(length, 0))
    sim.compute_encodings([case.example(length, seed) for seed in range(4)])
    return sim


@pytest.mark.parametrize("case", CASES)
def test_it_runs_at_any_length_with_the_same_sites(case: Recurrent) -> None:
    model = build(case)
    sim = simulated(case, model)
    for length in (5, 1, 8):
        example = case.example(length, 9)
        found = sim.model(*copy.deepcopy(example)).detach()
        assert found.shape == build(case)(*example).shape
    assert not sim._simulator.unseen
    for length in (2, 7):
        assert list(simulated(case, build(case), length).quantizers) == list(sim.quantizers)


@pytest.mark.parametrize("case", CASES)
def test_it_stays_near_the_float_model(case: Recurrent) -> None:
    sim = simulated(case, build(case))
    ratios = []
    for seed in range(10, 14):
        example = case.example(5, seed)
        expected = build(case)(*example).detach()
        if isinstance(sim.model, Stateful):
            sim.model.state = None
        ratios.append(sqnr(expected.numpy(), sim.model(*example).detach().numpy()))
    assert np.median(ratios) > case.sqnr, ratios


@pytest.mark.parametrize("case", CASES)
def test_it_can_be_trained(case: Recurrent) -> None:
    sim = simulated(case, build(case))
    sim.model.train()
    sim.model(*case.example(4, 3)).square().mean().backward()
    reached = [name for name, p in sim.model.named_parameters() if p.grad is not None and bool(p.grad.any())]
    assert {"weight_hh", "weight_hh_l0", "weight"} & {name.rpartition(".")[2] for name in reached}


@pytest.mark.parametrize("case", CASES)
def test_prepare_model_returns_the_same_function(case: Recurrent) -> None:
    example = case.example(4, 2)
    assert torch.equal(prepare_model(build(case))(*example), build(case)(*example))


def test_both_sides_of_teacher_forcing_share_the_decoder() -> None:
    case = RECURRENT_ZOO["attention"]
    forced = RECURRENT_ZOO["teacher-forcing"].example(5, 0)
    one = QuantizationSimModel(build(case), case.example(5, 0))
    both = QuantizationSimModel(build(case), case.example(5, 0), examples=[forced])
    assert set(one.quantizers) == set(both.quantizers)


def test_a_longer_example_adds_nothing_to_a_halting_model() -> None:
    case = RECURRENT_ZOO["halting"]
    model = build(case)
    sim = simulated(case, model)
    model.halt.bias.data.fill_(-6.0)  # never sure: eight steps
    with torch.no_grad():
        sim.model.halt.bias.fill_(-6.0)
        expected, found = model(*case.example(1, 5)), sim.model(*case.example(1, 5))
    assert sqnr(expected.numpy(), found.numpy()) > 20 and not sim._simulator.unseen
