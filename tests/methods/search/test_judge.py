"""Judging by outputs: which batches are held out, and what their signal-to-noise ratio counts."""

import math

import numpy as np
import pytest

from bitwright.recipes.judge import Judge


def twice(batch):
    return [np.float32([batch, -batch])]


@pytest.mark.parametrize(
    ("count", "kept", "held"),
    [(5, 4, [4]), (9, 8, [8]), (20, 16, [16, 17, 18, 19]), (200, 160, [161 + 5 * i // 2 for i in range(16)])],
)
@pytest.mark.parametrize("known", [True, False], ids=["of known length", "of unknown length"])
def test_the_last_fifth_is_held_out_and_batches_spread_over_it_judge(count, kept, held, known):
    data = range(count) if known else Unknown(count)
    judge, rest = Judge.of(data, twice)
    assert judge.batches == held and not judge.seen
    for _ in range(2):  # every method goes through them anew
        assert list(rest) == list(range(kept)) and len(rest) == kept


class Unknown:
    """Batches of which no one knows how many they are."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


@pytest.mark.parametrize("count", [1, 4])
def test_of_few_batches_none_is_held_out_and_that_is_said(count):
    judge, rest = Judge.of([3.0] * count, twice)
    assert judge.seen and judge.batches == [3.0] and list(rest) == [3.0] * count
    assert judge.where == "on a batch that the methods see too: give five or more"


def test_the_float_model_runs_once_and_only_when_asked():
    calls = []
    judge, _ = Judge.of([1.0, 2.0], lambda batch: calls.append(batch) or twice(batch))
    assert not calls
    assert judge.sqnr(twice) == judge.sqnr(twice) == math.inf
    assert calls == [1.0]


def test_outputs_count_alike_whatever_their_size():
    judge = Judge([0], lambda batch: [np.float32([1000.0] * 50), np.float32([1.0])])
    noisy = judge.sqnr(lambda batch: [np.float32([990.0] * 50), np.float32([0.9])])
    assert noisy == pytest.approx((40 + 20) / 2, abs=1e-4)


def test_an_output_is_not_traded_for_a_noisier_one():
    judge = Judge([0], lambda batch: [np.ones(9), np.ones(9)])
    before = judge.sqnr(lambda batch: [np.full(9, 1.001), np.full(9, 1.1)])  # 60 and 20 dB
    after = judge.sqnr(lambda batch: [np.full(9, 1.002), np.full(9, 1.09)])  # 54 and 21 dB
    assert after < before


def test_an_output_without_noise_counts_as_80_db():
    judge = Judge([0], lambda batch: [np.ones(9), np.ones(9)])
    assert judge.sqnr(lambda batch: [np.ones(9), np.full(9, 1.1)]) == pytest.approx((80 + 20) / 2)
    assert judge.sqnr(lambda batch: [np.ones(9), np.ones(9)]) == math.inf


def test_what_is_not_finite_in_float_is_left_out_and_new_nan_is_the_worst():
    judge = Judge([0], lambda batch: [np.float32([1.0, np.inf])])
    assert judge.sqnr(lambda batch: [np.float32([1.0, 5.0])]) == math.inf
    assert judge.sqnr(lambda batch: [np.float32([np.nan, np.inf])]) == -math.inf


def test_integers_and_lengths_that_depend_on_values_are_left_out():
    judge = Judge([0], lambda batch: [np.arange(3), np.float32([1, 2]), np.float32([4.0])])
    assert judge.possible
    assert judge.sqnr(lambda batch: [np.arange(3)[::-1], np.float32([1]), np.float32([4.0])]) == math.inf


def test_few_are_held_out_where_few_are_wanted():
    judge, rest = Judge.of(list(range(20)), lambda batch: [np.zeros(1)], 1)
    assert judge.batches == [18] and list(rest) == list(range(16))


def boxes_and_scores(noise_of_boxes=0.0, noise_of_scores=0.0):
    boxes, scores = np.full((1, 4, 50), 300.0), np.full((1, 3, 50), 0.5)
    return [np.concatenate([boxes + noise_of_boxes, scores + noise_of_scores], 1)]


def test_probabilities_are_not_hidden_behind_pixels_in_one_tensor():
    judge = Judge([0, 1], lambda batch: boxes_and_scores(), names=lambda: ["detections"])
    rating = judge.rate(lambda batch: boxes_and_scores(1.0, 0.5))
    assert [part.name for part in rating.parts] == ["detections[:, 0:4]", "detections[:, 4:7]"]
    assert rating.worst.name == "detections[:, 4:7]" and rating.worst.sqnr == pytest.approx(0, abs=1e-9)
    assert rating.sqnr == pytest.approx(20 * math.log10(300) / 2)


def test_a_step_that_kills_the_probabilities_loses():
    judge = Judge([0], lambda batch: boxes_and_scores())
    assert judge.sqnr(lambda batch: boxes_and_scores(1.0, 0.01)) > judge.sqnr(lambda batch: boxes_and_scores(0.9, 0.5))


def test_the_worst_of_several_outputs_has_its_name():
    judge = Judge([0], lambda batch: [np.ones(9), np.ones(9)], names=lambda: ["boxes", "scores"])
    rating = judge.rate(lambda batch: [np.full(9, 1.001), np.full(9, 1.1)])
    assert str(rating.worst) == "scores 20.0 dB (one sample: no interval)"
