"""The choice of ratios, on a space of arithmetic: what is best is known."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bitwright.compression.ratios import (
    Curve,
    Option,
    Part,
    Space,
    choose,
    front,
    greedy,
    load_scores,
    measure_scores,
    monotonic,
    save_scores,
)
from bitwright.errors import CalibrationError, ConfigError

LOSS = (1.0, 8.0, 2.0)  # of a part that is halved


class Additive(Space):
    """Three parts of 100 multiplications; noise adds up, and the metric is what it leaves of 1."""

    def __init__(self, loss=LOSS):
        self.loss, self.choice, self.calls = loss, (0,) * len(loss), 0
        ratios = (0.75, 0.5, 0.25)
        self.parts = [
            Part(f"layer{i}", (
                Option("as it is", {"macs": 100.0, "params": 10.0}, 0.0),
                *(Option(f"{r}", {"macs": 100 * r, "params": 10 * r}, (1 - r) ** 2, r) for r in ratios),
            ))
            for i in range(len(loss))
        ]  # fmt: skip
        self.fixed = {"macs": 20.0, "params": 0.0}

    def apply(self, choice):
        before, self.choice = self.choice, tuple(choice)
        return lambda: setattr(self, "choice", before)

    def noise(self):
        return sum(w * p.options[k].error for w, p, k in zip(self.loss, self.parts, self.choice, strict=True)) * 1e-3

    def runnable(self):
        self.calls += 1
        return self

    def metric(self, model):
        return 1.0 - self.noise()


def test_the_choice_is_the_best_of_all():
    space = Additive()
    found = choose(space, {"macs": 0.6}, progress=False)
    every = [(i, j, k) for i in range(4) for j in range(4) for k in range(4)]
    cost = {c: 20 + sum(p.options[k].costs["macs"] for p, k in zip(space.parts, c, strict=True)) for c in every}

    def noise(choice):
        undo = space.apply(choice)
        value = space.noise()
        undo()
        return value

    best = min((c for c in every if cost[c] <= 0.6 * 320), key=noise)
    assert noise(found.best.choice) == pytest.approx(noise(best)) and space.choice == (0, 0, 0)
    assert found.best.costs["macs"] <= 0.6 * 320


class Breaking(Additive):
    """Two parts; the noise of the first grows with the fourth power of what goes, once more than half does."""

    def __init__(self):
        super().__init__((0.9, 1.0))
        shares = np.arange(10) / 10
        options = tuple(Option(f"{1 - s:.1f}", {"macs": 100 * (1 - s)}, s, 1 - s) for s in shares)
        self.parts, self.fixed = [Part("breaks", options), Part("even", options)], {"macs": 0.0}

    def noise(self):
        first, second = (p.options[k].error for p, k in zip(self.parts, self.choice, strict=True))
        return 0.9 * min(first, 0.5) * max(first / 0.5, 1.0) ** 4 + second


def test_a_part_that_breaks_when_nearly_all_of_it_goes_is_spared_at_once():
    """What the part makes at half says nothing of that: from there on it would lose 80 % and make a noise of 2.9."""
    found = choose(Breaking(), {"macs": 0.6}, rounds=1, progress=False)
    assert found.best.noise == pytest.approx(0.9 * 0.5 + 0.3) and found.best.choice == (5, 3)


def test_a_curve_passes_through_what_was_measured():
    errors = np.array([0.0, 0.1, 0.2, 0.4, 0.8])
    found = Curve.through((0.2, 0.05), (0.8, 0.05 * 4**1.9)).of(errors)
    np.testing.assert_allclose(found, [0, 0.025, 0.05, 0.05 * 2**1.9, 0.05 * 4**1.9])
    np.testing.assert_allclose(Curve.through((0.2, 0.05)).of(errors), errors / 4)
    np.testing.assert_allclose(Curve.through((0.2, 0.0), (0.8, 0.4)).of(errors), errors / 2)
    np.testing.assert_allclose(Curve.through((0.2, 0.1), (0.8, 0.05)).of(errors[2:]), 0.1)


def test_a_front_is_not_worse_than_the_greedy_search_with_a_fifth_of_its_evaluations():
    space = Additive(loss=(1.0, 8.0, 2.0, 0.5, 4.0, 3.0, 1.5))
    baseline = space.metric(space)
    space.calls = 0
    scores = measure_scores(space, space.metric, progress=False)
    spent = space.calls

    def cost_of(ratios):
        return space.fixed["macs"] + sum(100 * r for r in ratios.values())

    space.calls = 0
    points = front(space, points=4, metric=space.metric, progress=False)
    assert space.calls <= spent / 5
    for point in points:
        most = point.costs["macs"]
        ratios = greedy(scores, cost_of, most, baseline)
        steps = [
            min((k for k, o in enumerate(p.options) if o.ratio <= ratios[p.name] + 1e-9), default=3)
            for p in space.parts
        ]
        undo = space.apply(steps)  # the options that exist at its ratios
        assert point.score >= space.metric(space) - 1e-12
        undo()


def test_several_costs_are_met_together():
    found = choose(Additive(), {"macs": 0.9, "params": 0.5}, progress=False)
    assert found.best.costs["params"] <= 15 and found.best.costs["macs"] <= 0.9 * 320


def test_the_metric_is_asked_of_few_choices_and_decides():
    space = Additive()
    found = choose(space, {"macs": 0.6}, metric=space.metric, progress=False)
    assert found.evaluations <= 4 and found.best.score == max(t.score for t in found.tried if t.score is not None)


def test_after_the_deadline_no_further_choice_is_measured():
    space, late = Additive(), ("the search ended because time was used up",)
    for deadline, evaluations, notes in ((None, 3, ()), (0.0, 2, late)):  # of the original, and of one choice or both
        found = choose(space, {"macs": 0.6}, metric=space.metric, start=(2, 2, 2), deadline=deadline, progress=False)
        assert (found.evaluations, found.notes) == (evaluations, notes) and found.best.costs["macs"] <= 0.6 * 320


def test_greedy_gives_every_part_the_same_score():
    scores = {"a": {0.5: 0.9, 0.25: 0.5}, "b": {0.5: 0.5, 0.25: 0.1}}
    ratios = greedy(scores, lambda r: 100 * (r["a"] + r["b"]), 120, 1.0)
    assert ratios["a"] < ratios["b"] and 118 <= 100 * sum(ratios.values()) <= 120
    with pytest.raises(ConfigError, match="cannot be met: with every layer at its smallest ratio the cost is 50"):
        greedy(scores, lambda r: 100 * (r["a"] + r["b"]), 40, 1.0)


def test_monotonic_scores_never_fall_and_keep_their_mean():
    row = {0.1: 0.4, 0.2: 0.6, 0.3: 0.5, 0.4: 0.9}
    found = monotonic(row)
    assert list(found.values()) == sorted(found.values()) and np.isclose(sum(found.values()), sum(row.values()))


def test_scores_are_kept_and_those_of_another_model_are_refused(tmp_path):
    space = Additive()
    scores = measure_scores(space, space.metric, progress=False)
    save_scores(tmp_path / "data" / "scores.json", scores)
    known = load_scores(tmp_path / "data" / "scores.json", ["layer0"])
    space.calls = 0
    assert measure_scores(space, space.metric, known, progress=False) == scores and space.calls == 0
    with pytest.raises(ConfigError, match="its scores are of another model: it knows layer0"):
        load_scores(tmp_path / "data" / "scores.json", ["conv1"])
    with pytest.raises(ConfigError, match="pickles are not read"):
        load_scores("scores.pkl", ["conv1"])
    (tmp_path / "other.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="it holds no scores of layers by ratio"):
        load_scores(tmp_path / "other.json", ["conv1"])


@pytest.mark.parametrize(
    "target, message",
    [
        (
            {"macs": 0.2},
            r"0.2 of the macs cannot be met: the nearest that can is 0\.297, as 6\.2%|nearest that can is 0\.297",
        ),
        ({"macs": 0}, "0 of the macs is not a part between 0 and 1"),
        ({"mcas": 0.5}, "no cost 'mcas' \\(did you mean 'macs'"),
        ({"ms": 0.5}, "ms of single layers is not known here"),
        ({}, "it names no cost"),
    ],
)
def test_targets_that_cannot_be_met_say_what_can(target, message):
    with pytest.raises(ConfigError, match=message):
        choose(Additive(), target, progress=False)


@pytest.mark.parametrize("value, message", [(None, "None, which is not a number"), (float("nan"), "NaN")])
def test_a_metric_that_is_no_number_ends_the_search_before_any_work(value, message):
    space = Additive()
    with pytest.raises(CalibrationError, match=message):
        choose(space, {"macs": 0.6}, metric=lambda model: value, progress=False)
