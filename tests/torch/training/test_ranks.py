"""Several processes calibrate and train one model: the same encodings, the same weights, and errors that name the rank."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.once import once
from tests.support.processes import python

ROOT = Path(__file__).parents[3]
Found = dict[str, list[Any]]

pytestmark = pytest.mark.slow  # every case starts processes


def run() -> Found:
    done = python("-m", "tests.torch.training.ranks", cwd=ROOT, timeout=3000)  # every case ends by itself, sooner
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return once("ranks", run, tmp_path_factory)


def test_two_ranks_find_the_encodings_of_one(found: Found) -> None:
    assert set(found["tf_enhanced 2"]) == set(found["tf_enhanced 1"])


def test_a_nan_on_one_rank_is_an_error_on_all_and_leaves_the_earlier_encodings(found: Found) -> None:
    healthy, failing = found["nan"]
    assert healthy.startswith(
        "rank 1 of 2: calibration failed there: CalibrationError: batch 1, x: the input is not finite"
    )
    assert failing.startswith("batch 1, x: the input is not finite")
    assert healthy.endswith("| True") and failing.endswith("| True")


def test_one_rank_may_calibrate_alone(found: Found) -> None:
    assert found["alone"][0] == found["tf_enhanced 1"][0] != found["alone"][1]


def test_ranges_have_the_gradients_of_the_whole_batch_on_every_rank(found: Found) -> None:
    """They lie beside the model, where DDP does not see them; after one pass, after two without a step, and in a copy."""
    one, two = found["ranges 1"][0], found["ranges 2"]
    assert two[0] == two[1]
    for of_two, expected in zip(two[0], one, strict=True):
        assert sum(any(values) for values in of_two.values()) >= 8
        assert of_two.keys() == expected.keys()
        for name, values in of_two.items():
            # float32 gradients of the halves are averaged: where they cancel, what is left has the roundings of both
            rounding = 4 * torch.finfo(torch.float32).eps * max(map(abs, expected[name]))
            assert max(abs(a - b) for a, b in zip(values, expected[name], strict=True)) <= rounding, name


def test_ranks_that_learn_other_ranges_are_told_so(found: Found) -> None:
    message = "CalibrationError: .*: its learned range is another one on another rank"
    assert all(re.match(message, text) for text in found["other ranges"])


def test_a_loss_that_is_bad_on_one_rank_is_left_out_on_all(found: Found) -> None:
    first, second = found["a bad loss"]
    assert first == second and first[0] == "TrainingGuard(3 steps, 1 skipped: 1 loss)"
    message = "training: 3 steps in a row had a loss that is not finite on rank 1 of 2. Remedy: "
    assert all(text.startswith(message) for text in found["bad losses"])


def test_every_rank_may_train_for_itself(found: Found) -> None:
    first, second = found["ranges alone"]
    assert first != second


@pytest.mark.parametrize("what", ["gptq", "norms"])
def test_two_ranks_find_the_weights_and_statistics_of_one(found: Found, what: str) -> None:
    (one,) = found[f"{what} 1"]
    assert found[f"{what} 2"] == [one, one]


@pytest.mark.parametrize(
    ("one", "several"),
    [
        ("gptq 1", ("gptq 4", "gptq 2 last", "gptq 2 all")),
        ("recipe 1", ("recipe 2",)),
        ("pruned 1", ("pruned 2",)),
        ("norms 1", ("norms 4", "norms 2 last")),
    ],
)
def test_methods_find_the_same_on_any_number_of_ranks(found: Found, one: str, several: tuple[str, ...]) -> None:
    for case in several:
        assert all(answer == found[one][0] for answer in found[case]), case


def test_a_rank_may_round_by_its_own_data(found: Found) -> None:
    first, second = found["gptq alone"]
    assert first != second


def test_batch_norms_that_cannot_be_estimated_on_one_rank_are_an_error_on_all(found: Found) -> None:
    for text in found["norms nan"]:
        assert re.match("CalibrationError: bn: its inputs have NaN or infinite values", text), text
    assert re.match("CalibrationError: rank 1 of 2: calibration failed there: ", found["norms fail"][0])
    assert re.match("(RuntimeError|ModelError|CalibrationError): ", found["norms fail"][1])


@pytest.mark.parametrize("scheme", ["min_max", "percentile", "mse"])
def test_every_range_method_reads_the_merged_statistics(found: Found, scheme: str) -> None:
    one = found[f"{scheme} 1"]
    assert set(found[f"{scheme} 2"]) == set(one)
    assert one != found["tf_enhanced 1"]


def test_it_does_not_matter_how_many_ranks_there_are_nor_who_saw_what(found: Found) -> None:
    one = set(found["tf_enhanced 1"])
    for case in ("tf_enhanced 2 last", "tf_enhanced 4", "in parts 1", "in parts 2"):
        assert set(found[case]) == one, case
    assert set(found["mse 4"]) == set(found["mse 1"])
    assert found["counts 1"] * 2 == found["counts 2"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("dies", "another rank ended, or did not come to merge what it saw: .*"),
        ("stays away", "another rank ended, or did not come to merge what it saw: .*Timed out"),
        ("ends in training", "another rank ended, or did not come to average the gradients of learned ranges: .*"),
        (
            "learns nothing",
            "another rank ended, or did not come to average the gradients of learned ranges: .*Timed out",
        ),
    ],
)
def test_a_rank_that_is_gone_ends_in_an_error_and_not_in_a_hang(found: Found, case: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^CalibrationError: rank 0 of 2: {message}"):
        raise RuntimeError(found[case][0])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("other weights", "CalibrationError: fc.weight: it has another encoding on another rank"),
        ("other model", "CalibrationError: the model: another rank simulates another model, or by other rules"),
        ("no data", "CalibrationError: calibrating: the model did not run in the block"),
        (
            "unused",
            "RuntimeError: Expected to have finished reduction .*parameters that were not used in producing loss",
        ),
    ],
)
def test_what_is_wrong_is_said_on_every_rank(found: Found, case: str, message: str) -> None:
    for text in found[case]:
        with pytest.raises(RuntimeError, match=f"^{message}"):
            raise RuntimeError(text)


def assert_close(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for name, values in found.items():
        # gradients of halves of a batch are summed in another order
        torch.testing.assert_close(torch.tensor(values), torch.tensor(expected[name]), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("how", ["replicated", "sharded"])
def test_training_on_two_ranks_is_that_of_one_process(found: Found, how: str) -> None:
    """Steps of the model and of learned ranges, by DDP and by FSDP2."""
    (one, _), two = found["one process"][0], found[how]
    assert two[0] == two[1]
    assert any(any(values) for name, values in one.items() if name.endswith("log_scale"))
    for values, unseen in two:
        assert not unseen
        assert_close(values, one)


def test_ddp_trains_as_one_process_does(found: Found) -> None:
    one, two = found["fixed 1"], found["fixed 2"]
    assert two[0] == two[1]
    assert_close(two[0], one[0])


def test_ranges_stay_equal_on_all_ranks(found: Found) -> None:
    first, second = found["trained 2"]
    assert first == second


@pytest.mark.parametrize("count", [1, 2])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(found: Found, count: int) -> None:
    for (_, after), whole in zip(found[f"resumed {count}"], found[f"trained {count}"], strict=True):
        assert after == whole
        assert any("log_scale" in name for name in after)


def test_a_checkpoint_of_two_ranks_loads_on_one(found: Found) -> None:
    written, _ = found["resumed 2"][0]
    assert found["two on one"] == [[written, True]]
