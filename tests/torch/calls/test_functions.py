"""What the table of functions says of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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


NEUTRAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "times-one": lambda x: x * 1.0,
    "one-times": lambda x: 1 * x,
    "over-one": lambda x: x / 1,
    "plus-zero": lambda x: x + 0.0,
    "zero-plus": lambda x: 0 + x,
    "minus-zero": lambda x: x - 0,
    "power-of-one": lambda x: x**1,
    "in-place": lambda x: x.mul_(1.0),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "cast": lambda x: x.to(torch.float32),
}


class Wrapped(torch.nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.function = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.function(self.first(x)))


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_changes_nothing_has_no_grid_of_its_own(name: str) -> None:
    sim = QuantizationSimModel(Wrapped(NEUTRAL[name]).eval(), torch.randn(16, 8))
    assert [site.op for site in sim.quantizers.values() if site.role == "output"] == ["first", "second"]


def test_a_factor_of_one_that_the_exporter_removes(tmp_path: Path) -> None:
    """Two trained ranges would not be equal: the file would round twice what the simulation rounds after the product."""
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    sim = QuantizationSimModel(Wrapped(NEUTRAL["times-one"]).eval(), x)
    sim.compute_encodings([x], progress=False)
    for site, factor in zip([s for s in sim.quantizers.values() if s.role == "output"], (0.8, 0.9), strict=False):
        site.encoding = replace(site.encoding, scale=site.encoding.scale * np.float32(factor))
    sim.export(tmp_path, "model", x)
    result = sim.verify(x)
    assert result.ok and [row.site for row in result.rows if "mul" in row.site] == []


@pytest.mark.parametrize(
    ("function", "op_type"),
    [
        (lambda x: x * 2.0, "Mul"),
        (lambda x: 1.0 / x, "Div"),
        (lambda x: 0.0 - x, "Sub"),
        (lambda x: 1.0**x, "Pow"),
        (lambda x: x * 0.0, "Mul"),
        (lambda x: torch.div(x, 1.0, rounding_mode="floor"), "Div"),
        (lambda x: x * torch.ones(8), "Mul"),
        (lambda x: (x > 0).long() * 1.0 + x, "Mul"),
    ],
)
def test_what_changes_something_is_an_operator(function: Callable[..., Any], op_type: str) -> None:
    sim = QuantizationSimModel(Wrapped(function).eval(), torch.randn(4, 8))
    assert op_type in {op.type for op in sim.graph.ops}


@pytest.mark.parametrize("factors", [(1.0, 3.0), (3.0, 1.0)])
def test_a_factor_that_is_one_in_some_runs_is_a_factor(factors: tuple[float, ...]) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
            return torch.relu(self.layer(x) * factor)

    first, second = ((torch.randn(4, 8), f) for f in factors)
    sim = QuantizationSimModel(Scaled().eval(), first, examples=[second])
    assert "Mul" in {op.type for op in sim.graph.ops}
