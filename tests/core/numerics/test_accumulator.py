"""The bound of an integer kernel's sum."""

from __future__ import annotations

import numpy as np
import pytest

from bitwright.core.numerics.integer_sums import INT32_MAX, largest_sum


@pytest.mark.parametrize("axis, shape", [(0, (3, 4, 5)), (1, (4, 3, 5)), (-1, (7, 3))])
def test_no_data_give_a_larger_sum(axis: int, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    weight = rng.integers(-127, 128, shape)
    rows = np.moveaxis(weight, axis, 0).reshape(shape[axis], -1)
    bound = largest_sum(weight, axis, furthest=200)
    worst = np.abs(rows @ (200 * np.sign(rows)).T).max()
    assert worst == bound
    for _ in range(20):
        assert np.abs(rows @ rng.integers(-200, 201, rows.shape[1])).max() <= bound


def test_groups_are_kept_apart() -> None:
    weight = np.ones((6, 2, 3), np.int64)
    assert largest_sum(weight, 1, furthest=1) == 18
    assert largest_sum(weight, 1, 3, furthest=1) == 6


def test_the_bound_is_that_of_int32() -> None:
    assert largest_sum(np.full((1, 66_311), -127), 0, furthest=255) <= INT32_MAX
    assert largest_sum(np.full((1, 66_312), -127), 0, furthest=255) > INT32_MAX
