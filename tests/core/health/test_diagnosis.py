"""Causes by what an operator read and wrote."""

from __future__ import annotations

import numpy as np
import pytest

from bitwright.core.health.diagnosis import diagnose
from bitwright.core.health.report import measure_tensor


@pytest.mark.parametrize(
    ("epsilon", "cause"), [(0.0, "zero variance"), (1e-5, "unknown"), (0.5, "unknown"), (None, "unknown")]
)
def test_rows_without_a_variance_are_the_cause_where_nothing_is_added_to_it(epsilon: float | None, cause: str) -> None:
    attrs = {} if epsilon is None else {"epsilon": epsilon}
    row, nan = measure_tensor("x", np.ones((2, 4))), measure_tensor("y", np.full((2, 4), np.nan))
    found = diagnose("LayerNormalization", attrs, [row], [nan])
    assert found.cause == cause
    if cause != "unknown":
        assert found.problem == "epsilon is 0, and a group of x has no variance"
