"""Rows of the table of operators say what the operators do."""

from __future__ import annotations

import pytest
import torch

from bitwright.core.graph.operators import OPS

FIXED = {name: row.fixed_range for name, row in OPS.items() if row.fixed_range is not None}


@pytest.mark.parametrize("name", FIXED)
def test_fixed_ranges_are_what_the_operator_reaches_and_does_not_leave(name: str) -> None:
    x = torch.linspace(-100, 100, 20_001, dtype=torch.float64)
    rows = torch.stack([x, -x], 1)  # softmax reaches both ends over two unlike values
    y = rows.softmax(1) if name == "Softmax" else getattr(torch, name.lower())(rows)
    lo, hi = FIXED[name]
    assert lo <= y.min() < lo + 1e-4 and hi - 1e-4 < y.max() <= hi
