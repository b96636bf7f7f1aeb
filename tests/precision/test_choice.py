"""Choosing precisions: the Pareto points, groups that do more together than alone, measured milliseconds as a cost."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitwright import measure_times, mixed_precision
from bitwright.errors import BitwrightError
from bitwright.precision.candidates import as_candidates
from bitwright.precision.choice import Choice, Correction, Cost, Interactions, Knapsack, Pair, undominated
from bitwright.precision.costs import TIMES_FORMAT
from bitwright.runtimes.onnxruntime import _attributed
from tests.precision.nets import batches, model, simulation

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
    best = undominated(every(knapsack), cost.of, noise.of)[::-1]
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


INTERACTING = 24
WIDTHS = as_candidates(["w8a16", "w8a8", "w4a8", "w4a16"])
BASE = (0,) * INTERACTING


class World:
    """Groups with a noise of their own, and some that make noise together."""

    def __init__(self, seed: int, *together: tuple[int, ...], wrong: int | None = None) -> None:
        random = np.random.default_rng(seed)
        self.estimate = 10 ** random.uniform(-6, -4, (INTERACTING, 1)) * [[0.1, 1.0, 10.0, 9.0]]
        self.truth = Cost.noise(self.estimate * random.uniform(0.7, 1.4, (INTERACTING, 1)))
        self.members, self.wrong, self.count = together, wrong, 0
        self.loud = 50 * self.truth.of((2,) * INTERACTING)

    def noise(self, choice: Choice) -> float:
        """All members of a set at few bits of weights: the noise is there."""
        self.count += 1
        low = [WIDTHS[c].bits[0] == 4 for c in choice]
        extra = sum(self.loud for members in self.members if all(low[g] for g in members))
        return self.truth.of(choice) + extra + (self.loud if self.wrong is not None and low[self.wrong] else 0)

    def find(self, choice: Choice) -> tuple[Correction, tuple[int, ...], Interactions]:
        correction = Correction(self.estimate.copy())
        search = Interactions(correction, self.noise, BASE, [[g] for g in range(INTERACTING)], WIDTHS)
        return correction, search.find(choice), search


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_pair_is_found_in_few_measurements(seed: int) -> None:
    random = np.random.default_rng(seed)
    a, b = sorted(int(g) for g in random.choice(INTERACTING, 2, replace=False))
    world = World(seed, (a, b))
    correction, found, _ = world.find((2,) * INTERACTING)
    assert found == (a, b) and world.count <= 14
    # the estimates know it now, at candidates that are as coarse, and nowhere else
    (pair,) = correction.pairs
    assert (
        pair.extra[2, 2] == pytest.approx(world.loud, rel=0.01)
        and not pair.extra[0].any()
        and not pair.extra[:, 1].any()
    )
    both = tuple(2 if g in (a, b) else 0 for g in range(INTERACTING))
    assert correction.noise().of(both) == pytest.approx(world.noise(both), rel=0.05)


def test_an_estimate_that_was_far_too_low_is_corrected() -> None:
    world = World(0, wrong=7)
    correction, found, _ = world.find((2,) * INTERACTING)
    assert found == (7,) and not correction.pairs
    assert correction.estimate[7, 2] > 0.9 * world.loud and correction.estimate[7, 1] < 1e-3 * world.loud


def test_three_at_a_time_and_none_are_told_apart() -> None:
    world = World(0, (3, 9, 20))
    correction, found, _ = world.find((2,) * INTERACTING)
    assert found == () and not correction.pairs and np.array_equal(correction.estimate, world.estimate)
    quiet = World(0)
    assert quiet.find((2,) * INTERACTING)[1] == () and quiet.count == 1


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


PRESETS = ("w8a8", "w8a16")


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("times") / "times.json"
    found = measure_times(model("onnx"), batches("onnx"), PRESETS, path=path, rounds=3)
    assert json.loads(path.read_text()) == found
    return found, path


def test_every_layer_has_a_time_at_every_candidate(times: Any) -> None:
    found, path = times
    assert found["format"] == TIMES_FORMAT and {tuple(row) for row in found["layers"].values()} == {PRESETS}
    assert {"/stem/Conv", "/body/Conv", "/head/Gemm"} <= found["layers"].keys()
    for c in PRESETS:  # what belongs to no layer is in none of them
        assert 0 < sum(row[c] for row in found["layers"].values()) <= found["whole"][c] * (1 + 1e-9)
    # kept: the second call measures nothing, and so gives the same numbers
    assert measure_times(model("onnx"), batches("onnx"), PRESETS, path=path) == found


def fixed(found: Any, **milliseconds: Any) -> dict[str, Any]:
    """The same layers with times that a test knows."""
    table = {layer: {"w8a8": 1.0, "w8a16": 3.0} for layer in found["layers"]}
    reads = {layer: {"w8a8": 0.0, "w8a16": 0.25} for layer in found["layers"]}
    return {**found, "layers": table, "conversions": reads, "fixed": 0.5, **milliseconds}


def test_a_kernel_is_as_wide_as_what_it_reads_and_makes(times: Any) -> None:
    """A layer of 8 bits whose result is read at 16 takes as long as one of 16; the other way around it is converted."""
    data = batches("onnx")
    known = fixed(times[0])
    layers = len(known["layers"])
    result = mixed_precision(
        simulation("onnx"), data, PRESETS, cost="ms", times=known, min_sqnr=1.0, rounding=False, evaluations=3
    )
    assert result.chosen is not None and set(result.precisions.values()) == {"w8a8"}
    assert result.chosen.costs["ms"] == pytest.approx(0.5 + layers)
    by_group = {g.name: g for g in result.groups}
    for point in result.points:
        wide = [by_group[name] for name, c in point.choice.items() if c == "w8a16"]
        if len(wide) == 1 and "/head/Gemm" in wide[0].layers:  # what makes its input is as wide
            assert point.costs["ms"] >= 0.5 + layers + 2 * len(wide[0].layers) + 2 - 1e-9
        if len(wide) == len(result.groups):
            assert point.costs["ms"] == pytest.approx(0.5 + 3 * layers)


def test_a_search_with_measured_times_ends_on_what_is_fast(times: Any) -> None:
    result = mixed_precision(
        model("onnx"), batches("onnx"), PRESETS, cost="ms", times=times[1], budget=1.0, rounding=False, evaluations=2
    )
    assert result.chosen is not None and result.chosen.costs["ms"] > 0


@pytest.mark.parametrize("change, message", [
    (
        lambda found: {**found, "of": {**found["of"], "machine": "another"}},
        "its times are of another machine.*remove it to measure again",
    ),
    (lambda found: {**found, "of": {**found["of"], "graph": "x"}}, "its times are of another graph"),
    (lambda found: {"Conv": {"w8a8": 1.0}}, "it holds no times that were measured"),
    (lambda found: {**found, "of": 3}, "it holds no times that were measured.*remove it to measure again"),
], ids=["machine", "graph", "a table of a user", "of a number"])  # fmt: skip
def test_times_of_something_else_are_refused(change: Any, message: str, times: Any, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(change(times[0])))
    with pytest.raises(BitwrightError, match=message):
        measure_times(model("onnx"), batches("onnx"), PRESETS, path=path)
    path.unlink()
    assert measure_times(model("onnx"), batches("onnx"), PRESETS, path=path, rounds=2)["format"] == TIMES_FORMAT


def test_a_module_is_told_what_to_do() -> None:
    with pytest.raises(BitwrightError, match="layers of a module have other names.*export the module to ONNX"):
        measure_times(model("torch"), batches("torch"), PRESETS)


def node(name: str, op: str, inputs: list[Any], *outputs: Any) -> Any:
    made = SimpleNamespace(name=name, op_type=op, inputs=inputs, outputs=list(outputs))
    for value in outputs:
        value.producer = lambda: made
    for value in inputs:
        value.readers.append(SimpleNamespace(node=made))
    return made


def value() -> Any:
    readers: list[Any] = []
    return SimpleNamespace(readers=readers, uses=lambda: readers, producer=lambda: None)


def test_what_stands_between_layers_counts_for_the_one_that_reads_it() -> None:
    x, a, q, d, b, y = (value() for _ in range(6))
    graph = [
        node("one_nchwc", "Conv", [x], a), node("a_q", "QuantizeLinear", [a], q), node("a_dq", "DequantizeLinear", [q], d),
        node("two_token_7", "QLinearConv", [d], b), node("last", "Reorder", [b], y),
    ]  # fmt: skip
    taken = {"one_nchwc": 1.0, "a_q": 0.25, "a_dq": 0.25, "two_token_7": 2.0, "last": 0.5}
    found = _attributed(graph, taken, {"one", "two"}, 8.0)  # twice what the nodes say
    assert found.layers == {"one": 2.0, "two": 6.0} and found.conversions == {"one": 0.0, "two": 0.5} and not found.rest
