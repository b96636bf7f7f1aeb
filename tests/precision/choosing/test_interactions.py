"""Groups that do more together than alone are found by measuring, and the choice then avoids them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitwright.precision.candidates import as_candidates
from bitwright.precision.choice import Choice, Correction, Interactions
from bitwright.precision.costs import Cost, Pair
from bitwright.precision.search import mixed_precision

GROUPS = 24
CANDIDATES = as_candidates(["w8a16", "w8a8", "w4a8", "w4a16"])
BASE = (0,) * GROUPS


class World:
    """Groups with a noise of their own, and some that make noise together."""

    def __init__(self, seed: int, *together: tuple[int, ...], wrong: int | None = None) -> None:
        random = np.random.default_rng(seed)
        self.estimate = 10 ** random.uniform(-6, -4, (GROUPS, 1)) * [[0.1, 1.0, 10.0, 9.0]]
        self.truth = Cost.noise(self.estimate * random.uniform(0.7, 1.4, (GROUPS, 1)))
        self.members, self.wrong, self.count = together, wrong, 0
        self.loud = 50 * self.truth.of((2,) * GROUPS)

    def noise(self, choice: Choice) -> float:
        """All members of a set at few bits of weights: the noise is there."""
        self.count += 1
        low = [CANDIDATES[c].bits[0] == 4 for c in choice]
        extra = sum(self.loud for members in self.members if all(low[g] for g in members))
        return self.truth.of(choice) + extra + (self.loud if self.wrong is not None and low[self.wrong] else 0)

    def find(self, choice: Choice) -> tuple[Correction, tuple[int, ...], Interactions]:
        correction = Correction(self.estimate.copy())
        search = Interactions(correction, self.noise, BASE, [[g] for g in range(GROUPS)], CANDIDATES)
        return correction, search.find(choice), search


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_pair_is_found_in_few_measurements(seed: int) -> None:
    random = np.random.default_rng(seed)
    a, b = sorted(int(g) for g in random.choice(GROUPS, 2, replace=False))
    world = World(seed, (a, b))
    correction, found, _ = world.find((2,) * GROUPS)
    assert found == (a, b) and world.count <= 14
    # the estimates know it now, at candidates that are as coarse, and nowhere else
    (pair,) = correction.pairs
    assert (
        pair.extra[2, 2] == pytest.approx(world.loud, rel=0.01)
        and not pair.extra[0].any()
        and not pair.extra[:, 1].any()
    )
    both = tuple(2 if g in (a, b) else 0 for g in range(GROUPS))
    assert correction.noise().of(both) == pytest.approx(world.noise(both), rel=0.05)


def test_an_estimate_that_was_far_too_low_is_corrected() -> None:
    world = World(0, wrong=7)
    correction, found, _ = world.find((2,) * GROUPS)
    assert found == (7,) and not correction.pairs
    assert correction.estimate[7, 2] > 0.9 * world.loud and correction.estimate[7, 1] < 1e-3 * world.loud


def test_three_at_a_time_and_none_are_told_apart() -> None:
    world = World(0, (3, 9, 20))
    correction, found, _ = world.find((2,) * GROUPS)
    assert found == () and not correction.pairs and np.array_equal(correction.estimate, world.estimate)
    quiet = World(0)
    assert quiet.find((2,) * GROUPS)[1] == () and quiet.count == 1


def test_what_was_seen_of_a_pair_is_scaled_with_the_rest() -> None:
    """A factor of all explains that everything is half as loud as measured before; factors of groups stay near 1."""
    estimate = np.full((4, 2), 1e-4) * [1, 10]
    correction = Correction(estimate.copy(), pairs=[Pair(0, 2, np.array([[0.0, 0.0], [0.0, 0.5]]))])
    for choice in [(1, 0, 1, 0), (1, 1, 1, 1), (0, 1, 0, 1)]:
        correction.see(choice, 0.5 * correction.plain.of(choice))
    found = correction.noise()
    for choice in [(1, 0, 1, 1), (0, 0, 0, 0), (1, 1, 0, 0)]:
        assert found.of(choice) == pytest.approx(0.5 * correction.plain.of(choice), rel=0.02)


class Product(nn.Module):
    """What two layers lose is multiplied: alone next to nothing of their errors reaches the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())))
        self.one, self.two = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 8)
        self.register_buffer("same_one", self.one.weight.detach().clone())
        self.register_buffer("same_two", self.two.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        first = self.one(x) - x @ self.same_one.T  # zero in float
        second = self.two(x) - x @ self.same_two.T
        return self.head(x) + 0.01 * (first + second)[:, :8] + 3e3 * (first * second)[:, :8]


def planted() -> Any:
    """A simulation in which only parameters are quantized, but for the two copies."""
    import bitwright.torch as bt

    net = Product().eval()
    data = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    sim = bt.QuantizationSimModel(net, data[0], "mse")
    for site in sim.quantizers.values():
        if site.role != "weight" or site.op.startswith("matmul"):
            site.enabled = False
    sim.compute_encodings(data, progress=False)
    return sim, data


def test_the_choice_avoids_a_planted_pair() -> None:
    sim, data = planted()
    result = mixed_precision(sim, data, ["w8a8", "w4a8"], min_sqnr=19.0, rounding=False)
    assert result.met and result.chosen is not None
    low = {name for name, c in result.chosen.choice.items() if c == "w4a8"}
    assert any("cost far more together than alone" in note for note in result.notes), result.notes
    assert len({"one", "two"} & {name.split(".")[0] for name in low}) == 1, low
    # one of the two layers is all that has to stay at eight bits
    assert len(low) == len(result.groups) - 1
