"""The integer program finds what trying all choices finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bitwright.precision.choice import Correction, Knapsack, undominated
from bitwright.precision.costs import Cost, Pair

GROUPS, CANDIDATES = 5, 3


def problem(seed: int, rows: int = 1, pairs: int = 0) -> tuple[Knapsack, Cost]:
    random = np.random.default_rng(seed)
    noise = 10 ** random.uniform(-8, -1, (GROUPS, CANDIDATES))
    table = random.uniform(1, 100, (rows, GROUPS, CANDIDATES))
    allowed = [[0, 1, 2]] * (GROUPS - 1) + [[0, 2]]
    cost = Cost("bytes", "bytes", table, random.uniform(0, 20, rows), some_pairs(random, pairs, 50.0))
    return Knapsack(allowed, {"bytes": cost}), Cost.noise(noise, some_pairs(random, pairs, 0.05))


def some_pairs(random: np.random.Generator, count: int, most: float) -> tuple[Pair, ...]:
    """What pairs of neighbouring groups add; the last pair stands there twice."""
    found = [Pair(g, g + 1, random.uniform(0, most, (CANDIDATES, CANDIDATES))) for g in range(count)]
    return tuple(found + found[-1:])


def every(knapsack: Knapsack) -> list[tuple[int, ...]]:
    return list(itertools.product(*knapsack.allowed))


@pytest.mark.slow_variants("1-the largest of four sums", "3-the largest of four sums", "5-the largest of four sums")
@pytest.mark.parametrize(
    "rows, pairs", [(1, 0), (4, 0), (1, 4), (4, 2)], ids=["a sum", "the largest of four sums", "pairs", "both"]
)
@pytest.mark.parametrize("seed", range(6))
def test_the_cheapest_choice_below_a_bound_on_the_noise(seed: int, rows: int, pairs: int) -> None:
    knapsack, noise = problem(seed, rows, pairs)
    cost = knapsack.costs["bytes"]
    for most in np.geomspace(1e-6, 0.4, 7):
        found = knapsack.cheapest(noise, most, "bytes", {})
        fits = [c for c in every(knapsack) if noise.of(c) <= most]
        assert (found is None) == (not fits)
        if found is not None:
            assert cost.of(found) == pytest.approx(min(map(cost.of, fits)), rel=1e-6)
            assert noise.of(found) <= most * (1 + 1e-5)


@pytest.mark.parametrize("rows, pairs", [(1, 0), (4, 0), (1, 4), (4, 2)])
@pytest.mark.parametrize("seed", range(6))
def test_the_quietest_choice_within_a_budget(seed: int, rows: int, pairs: int) -> None:
    knapsack, noise = problem(seed, rows, pairs)
    cost = knapsack.costs["bytes"]
    costs = sorted(map(cost.of, every(knapsack)))
    for budget in (costs[0], costs[len(costs) // 3], costs[-1]):
        found = knapsack.quietest(noise, {"bytes": budget})
        best = min(noise.of(c) for c in every(knapsack) if cost.of(c) <= budget * (1 + 1e-12))
        assert found is not None and noise.of(found) == pytest.approx(best, rel=1e-4)
    assert knapsack.quietest(noise, {"bytes": costs[0] * 0.9}) is None
    least = knapsack.least("bytes", {})
    assert least is not None and cost.of(least) == pytest.approx(costs[0])
    assert knapsack.least("bytes", {"bytes": costs[0] * 0.9}) is None


def test_the_front_holds_no_dominated_choice() -> None:
    knapsack, noise = problem(1)
    cost = knapsack.costs["bytes"]
    front = knapsack.front(noise, "bytes", {}, 24)
    best = undominated(every(knapsack), noise, cost)
    assert len(front) > 4 and {tuple(c) for c in front} <= set(best)
    assert [cost.of(c) for c in front] == sorted((cost.of(c) for c in front), reverse=True)


def test_neighbours_of_a_choice_keep_ties() -> None:
    """Groups 0 and 1 share the kind of their candidates: both leave it, or one moves within it."""
    table = np.array([[1.0, 5.0, 2.0, 6.0]] * 3)
    cost = Cost("bytes", "bytes", table[None], np.zeros(1))
    knapsack = Knapsack([[0, 1, 2, 3], [0, 1, 2, 3], [0, 3]], {"bytes": cost}, [[0, 1]], ["a", "a", "b", "b"])
    found = knapsack.neighbours((0, 1, 3), Cost.noise(table))
    assert sorted(found) == [(0, 0, 3), (0, 1, 0), (1, 1, 3), (2, 2, 3), (3, 3, 3)]


def test_equal_costs_are_settled_by_the_noise() -> None:
    noise = Cost.noise(np.array([[1e-2, 1e-3, 1e-5]]))
    knapsack = Knapsack([[0, 1, 2]], {"bytes": Cost("bytes", "bytes", np.ones((1, 1, 3)), np.zeros(1))})
    assert knapsack.cheapest(noise, 1.0, "bytes", {}) == (2,)


def test_corrections_keep_the_order_of_candidates() -> None:
    """A candidate that no point had does not look better than a finer one that was found to be loud."""
    estimate = np.array([[1e-5, 1e-3, 1.1e-3]] * 4)
    correction = Correction(estimate, coarser=[[1, 2], [2], []])
    correction.see((0, 0, 0, 0), 4e-5)  # as estimated
    correction.see((1, 0, 0, 0), 0.1)  # a hundred times as loud
    found = correction.noise().table[0]
    assert (np.diff(found, axis=1) >= 0).all()
    assert found[0, 1] > 5 * estimate[0, 1] and found[0, 2] == found[0, 1]
    assert np.array_equal(Correction(estimate[:, ::-1], coarser=[[], [0], [0, 1]]).plain.table[0], estimate[:, ::-1])


def test_measurements_correct_the_estimates() -> None:
    """Where the truth differs from the estimates by factors of groups and candidates, few measurements show it."""
    random = np.random.default_rng(3)
    estimate = 10 ** random.uniform(-6, -2, (8, 3))
    truth = Cost.noise(estimate * np.exp(random.normal(0, 0.7, (8, 1))) * np.array([4.0, 1.0, 1.0]))
    correction = Correction(estimate)
    choices = [tuple(random.integers(0, 3, 8).tolist()) for _ in range(40)]
    error = lambda noise: np.mean([abs(np.log(noise.of(c) / truth.of(c))) for c in choices[20:]])  # noqa: E731
    before = error(correction.noise())
    for choice in [(0,) * 8, (1,) * 8, (2,) * 8, *choices[:9]]:
        correction.see(choice, truth.of(choice))
    assert error(correction.noise()) < before / 3
    assert np.array_equal(Correction(estimate).noise().table[0], np.exp(np.log(estimate)))
