"""What the table of functions says of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bitwright.torch import QuantizationSimModel
from bitwright.torch.calls.functions import FUNCTIONS


@pytest.mark.parametrize(
    "function, args, kwargs, ends",
    [
        (torch.clamp, (), {"max": 6.0}, (None, 6.0)),
        (torch.Tensor.clamp_, (), {"min": 0.0}, (0.0, None)),
        (torch.clip, (-2, 3), {}, (-2.0, 3.0)),
        (F.hardtanh, (), {}, (-1.0, 1.0)),
        (F.hardtanh, (), {"max_val": 4.0}, (-1.0, 4.0)),
        (F.relu6, (), {}, (0.0, 6.0)),
    ],
    ids=["above", "below", "both", "hardtanh", "hardtanh above", "relu6"],
)
def test_ends_of_a_clamp(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], ends: tuple[Any, Any]
) -> None:
    row = FUNCTIONS[function]
    assert row.attrs is not None
    attrs = row.attrs(row.bind((torch.zeros(3), *args), kwargs))
    assert (attrs["min"], attrs["max"]) == ends


def test_a_clamp_with_one_end_has_no_other_in_the_graph() -> None:
    class Clamped(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clamp(min=0) * 2

    sim = QuantizationSimModel(Clamped(), torch.randn(2, 3))
    (op,) = [op for op in sim.graph.ops if op.type == "Clip"]
    assert (op.attrs["min"], op.attrs["max"]) == (0.0, None)
