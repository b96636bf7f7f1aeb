"""Intervals of paired differences cover the truth, and say when they cannot tell."""

import math

import numpy as np
import pytest
from scipy import stats

from bitwright.analysis.intervals import compare, without_samples
from bitwright.errors import ConfigError


def answers(n, lost, won, seed=0):
    """Right or wrong: `lost` became wrong, `won` became right."""
    before = np.ones(n, bool)
    before[:won] = False
    after = before.copy()
    after[:won] = True
    after[won : won + lost] = False
    order = np.random.default_rng(seed).permutation(n)
    return before[order], after[order]


@pytest.mark.parametrize("lost, won", [(6, 0), (5, 0), (10, 1), (10, 4), (0, 9), (40, 25), (1, 1)])
def test_right_and_wrong_are_told_apart_exactly_where_mcnemars_exact_test_does(lost, won):
    found = compare(*answers(200, lost, won))
    p = stats.binomtest(won, won + lost).pvalue
    assert found.test == "mcnemar" and found.n == 200
    assert found.estimate == pytest.approx((won - lost) / 200)
    assert found.distinguishable == (p < 0.05) == (not found.low <= 0 <= found.high)
    assert found.low <= found.estimate <= found.high


def test_no_changed_answer_leaves_the_bound_that_so_many_samples_allow():
    found = compare(*answers(300, 0, 0))
    assert (found.estimate, found.distinguishable, found.needed) == (0, False, None)
    assert 0.5 * 3 / 300 < found.high < 2 * 3 / 300  # the rule of three
    assert found.text == f"no difference with 300 samples (95 % interval {found.low:.3g} to {found.high:.3g})"


def test_what_is_not_distinguishable_says_how_many_samples_would_tell():
    found = compare(*answers(200, 5, 2))
    assert not found.distinguishable and found.needed > 200
    assert "not distinguishable from zero with 200 samples" in found.text and "would be needed" in found.text
    more = [compare(*answers(found.needed, round(found.needed * 5 / 200), round(found.needed * 2 / 200)))]
    assert more[0].distinguishable, "with as many samples as were named, the same difference is told"


@pytest.mark.slow_variants("numbers")
@pytest.mark.parametrize("kind", ["binary", "numbers"])
def test_intervals_cover_the_truth_about_as_often_as_they_say(kind):
    generator = np.random.default_rng(3)
    hits, runs = 0, 150
    for seed in range(runs):
        if kind == "binary":
            before, flip = generator.random(150) < 0.7, generator.random(150)
            after = np.where(flip < 0.1, ~before, before)
            truth = 0.1 * 0.3 - 0.1 * 0.7
        else:
            before, truth = generator.normal(size=60), 0.2
            after = before + 0.2 + (generator.exponential(size=60) - 1)
        found = compare(before, after, seed=seed)
        hits += found.low <= truth <= found.high
    assert 0.90 <= hits / runs <= 0.99


def test_numbers_by_bootstrap_the_same_for_the_same_seed():
    generator = np.random.default_rng(0)
    before = generator.normal(size=200)
    after = before - 0.3 + 0.2 * generator.normal(size=200)
    one, two = compare(before, after), compare(before, after)
    assert one == two and one.test == "bootstrap" and one.distinguishable
    assert one.text.startswith("worse by 0.3") and compare(before, after, better="lower").text.startswith("better by")
    sloppy = compare(before, before + 0.001 * (1 + 30 * generator.normal(size=200)))
    assert not sloppy.distinguishable and sloppy.needed > 200


def test_a_difference_that_is_the_same_for_every_sample_is_certain():
    found = compare([0.5, 0.25, 3.0], [1.5, 1.25, 4.0])
    assert (found.low, found.high, found.distinguishable) == (1.0, 1.0, True)


def test_one_number_for_all_has_no_interval():
    found = without_samples(0.9, 0.8)
    assert found.low is found.high is found.distinguishable is None
    assert found.text.startswith("worse by 0.1; no interval, because the metric returns one number")


@pytest.mark.parametrize(
    "before, after, problem",
    [
        pytest.param([1.0], [1.0], r"1 sample\(s\) have no interval", id="one-sample"),
        pytest.param([1.0, 2.0], [1.0, math.nan], "of the quantized model it is nan for sample 1", id="nan"),
        pytest.param([1.0, 2.0], [1.0, 2.0, 3.0], "2 values of the float model and 3 of the quantized", id="lengths"),
        pytest.param(["a", "b"], ["a", "b"], "values are of type", id="text"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(before, after, problem):
    with pytest.raises(ConfigError, match=problem):
        compare(before, after)


def test_a_confidence_outside_of_reason_is_refused():
    with pytest.raises(ConfigError, match="confidence: 1.5 is not between"):
        compare([1, 0], [1, 1], confidence=1.5)
