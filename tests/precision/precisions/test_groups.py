"""Kernels that read one grid share its precision and have weights of their own."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitwright.torch as bt
from bitwright.analysis.subject import open_subject
from bitwright.errors import BitwrightError
from bitwright.precision.candidates import as_candidates, coarser, find_groups, ties, without
from bitwright.precision.library import noise_table
from bitwright.precision.search import Explorer, mixed_precision
from bitwright.recipes.site_cost import OutputErrors

CANDIDATES = as_candidates(["w8a8", "w8a16", "w4a8", "w4a16"])


class Branches(nn.Module):
    """Two layers that read one tensor, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.left(x)) * torch.sigmoid(self.right(x)))


class Sum(nn.Module):
    """Two layers and a sum, which has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) + torch.sigmoid(x))


class Chosen(nn.Module):
    """A layer whose outputs choose rows of a table: no derivative leads through that."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.table, self.last = nn.Linear(16, 8), nn.Embedding(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(self.scores(x).argmax(-1)) + x)


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(16, 16, generator=generator) for _ in range(6)]


def simulation(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    sim = bt.QuantizationSimModel(kind().eval(), data()[0], "mse")
    sim.compute_encodings(data(), progress=False)
    return sim


def test_candidates_that_make_the_same_of_a_group_are_one() -> None:
    """Widths of weights mean nothing to a sum: a search would measure one model twice, and find one of them quieter."""
    found = explorer(Sum)
    bare = [g for g in found.groups if not g.weights]
    assert bare and all(len(g.candidates) == 2 for g in bare if not g.tie)
    assert all(len(g.candidates) == 4 for g in found.groups if g.weights and g.activations)
    result = mixed_precision(simulation(Sum), data(), CANDIDATES, min_sqnr=1.0, rounding=False)
    assert [p.name for p in result.points if p.sqnr_db is not None] == ["w4a16"]
    assert {*result.precisions.values()} == {"w4a16"}  # and the sum is told as its neighbours are


def test_tied_groups_keep_a_candidate_per_precision_of_activations() -> None:
    found = explorer(Branches)
    tied = [found.groups[i] for members in ties(found.groups) for i in members]
    assert any(g.weights and not g.activations for g in tied)
    for group in tied:
        assert {CANDIDATES[c].activation for c in group.candidates} == {c.activation for c in CANDIDATES}
        assert len(group.candidates) == (4 if group.weights else 2)


@pytest.mark.parametrize(
    ("one", "other", "is_coarser"),
    [("w4a8", "w8a8", True), ("w4a8", "w4a16", True), ("w8a8", "w4a16", False), ("w8a8", "w8a8", False)],
)
def test_fewer_bits_are_coarser(one: str, other: str, is_coarser: bool) -> None:
    assert coarser(*as_candidates([one]), *as_candidates([other])) is is_coarser


def test_formats_of_other_kinds_have_no_order() -> None:
    pairs = [((bits, kind), (bits, kind)) for bits, kind in ((8, "int"), (16, "float"), (32, "float"))]
    eight, floating, plain = as_candidates(pairs)
    assert not coarser(eight, floating) and not coarser(floating, eight)
    assert coarser(eight, plain) and coarser(floating, plain) and not coarser(plain, eight)


def explorer(kind: type[nn.Module]) -> Explorer:
    subject = open_subject(simulation(kind))
    return Explorer(subject, CANDIDATES, data(), time.monotonic(), None, True, 32, 0, None)


def test_layers_that_read_one_grid_have_weights_of_their_own() -> None:
    sim = simulation(Branches)
    (joined,) = [g for g in find_groups(sim, CANDIDATES) if "left.weight" in g.weights]
    assert set(joined.weights) == {"left.weight", "right.weight"} and not joined.tie
    groups = find_groups(sim, CANDIDATES, tied=True)
    of = {weight: g for g in groups for weight in g.weights}
    left, right = of["left.weight"], of["right.weight"]
    assert left.weights == ("left.weight",) and not left.activations and left.layers == ("left",)
    assert left.tie == right.tie != "" and not of["last.weight"].tie
    shared = next(g for g in groups if g.tie == left.tie and not g.weights)
    assert set(shared.activations) == set(joined.activations)
    assert [sorted(groups[i].name for i in tie) for tie in ties(groups)] == [
        sorted((left.name, right.name, shared.name))
    ]
    assert len({g.name for g in groups}) == len(groups)


def test_a_search_gives_them_widths_of_their_own_and_activations_of_one() -> None:
    both = sum(v.numel() for n, v in Branches().named_parameters() if "last" not in n and "weight" in n)
    total = sum(v.numel() for v in Branches().parameters())
    share = 1 - (both / 2 + 40) / 2 / total  # room for one of the two at four bits, not for both in eight
    result = mixed_precision(simulation(Branches), data(), CANDIDATES, budget={"weight_bytes": share, "bit_ops": 0.7})
    assert result.chosen is not None
    found = result.precisions
    assert found["left"][-2:] == found["right"][-2:]  # activations
    sites = result.sim.quantizers
    widths = [sites[f"{name}.weight"].quantizer.spec.format.bits for name in ("left", "right")]
    assert [int(found[name][1]) for name in ("left", "right")] == widths


def test_a_candidate_that_a_tied_group_cannot_have_takes_its_activations_from_the_others() -> None:
    groups = find_groups(simulation(Branches), CANDIDATES, tied=True)
    left = next(i for i, g in enumerate(groups) if g.weights == ("left.weight",))
    right = next(i for i, g in enumerate(groups) if g.weights == ("right.weight",))
    found = without(groups, {left: {1: "no kernel", 3: "no kernel"}}, CANDIDATES)
    assert found[right].candidates == (0, 2) and "activations are not possible" in found[right].refused["w8a16"]
    with pytest.raises(BitwrightError, match="none of the candidates is possible"):
        without(groups, {left: {1: "no", 3: "no"}, right: {0: "no", 2: "no"}}, CANDIDATES)


def test_what_no_derivative_tells_is_measured() -> None:
    found = explorer(Chosen)
    assert any("measured one group at a time" in note for note in found.notes)
    place = next(i for i, g in enumerate(found.groups) if "scores.weight" in g.weights)
    noise = found.correction().noise().table[0, place]
    four, eight = (noise[[c.name for c in CANDIDATES].index(name)] for name in ("w4a16", "w8a16"))
    assert four > 3 * eight > 0
    assert not any(site.frozen for site in found._subject.sites.values())


def test_weights_are_rounded_for_the_choice_they_are_part_of() -> None:
    """What was set before does not matter; and weights that make up for earlier layers stay where they are better."""
    found = explorer(Branches)
    n = len(found.groups)
    low, high = (3,) * n, (1,) * n
    found.library.fit(low)
    fitted = found.measure()
    found.library.fit(high)
    found.library.fit(low)
    assert found.measure() == fitted
    alone = found.noise(low, fitted=False)
    assert fitted != alone
    assert found.noise(low) == min(fitted, alone)
    found.noise(high)
    assert found.noise(low) == min(fitted, alone)


def test_weights_without_an_estimate_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of an ONNX LSTM with states that are given: at no estimate they would cost nothing at any width."""
    library = explorer(Branches).library
    real = library.errors

    def errors(candidate: int, *args: Any, **options: Any) -> OutputErrors:
        found = real(candidate, *args, **options)
        return replace(found, weights={n: v for n, v in found.weights.items() if n != "left.weight"})

    assert noise_table(library, data(), samples=16, seed=0)[1] == ()
    monkeypatch.setattr(library, "errors", errors)
    assert noise_table(library, data(), samples=16, seed=0)[1] == ("left.weight",)
