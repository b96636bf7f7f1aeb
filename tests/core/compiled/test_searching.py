"""The compiled part of a range search against its array functions, bit for bit, and the ranges that follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bitwright.core.compiled import kernels
from bitwright.core.compiled.loops import loops
from bitwright.core.numerics import range_search, statistics
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.ranges import RangeMethod, choose_range
from bitwright.core.numerics.spec import QuantSpec, Symmetry

EDGES = range_search._POOLED.edges
PLAIN = SimpleNamespace(edge_errors=kernels.edge_errors)  # the loops as Python runs them
GRIDS: list[tuple[Symmetry, IntFormat]] = [
    ("symmetric", IntFormat(8)),
    ("asymmetric", IntFormat(4, signed=False)),
    ("asymmetric", IntFormat(16, signed=False)),
]


def data(case: str) -> np.ndarray[Any, Any]:
    x = np.random.default_rng(len(case)).standard_normal(5000).astype(np.float32)
    factor = {"tiny": 1e-37, "huge": 1e36}.get(case, 1.0)
    if case == "relu":
        x = np.maximum(x, 0)
    if case == "outlier":
        x[3] = 1000.0
    return np.asarray(x * np.float32(factor))


def grids_of(x: np.ndarray[Any, Any], symmetry: Symmetry, fmt: IntFormat, gamma: float) -> range_search._Grids:
    stats = statistics.measure("histogram", x)
    assert isinstance(stats, statistics.Histogram)
    lo, hi = np.minimum(stats.bounds.lo.reshape(-1), 0), np.maximum(stats.bounds.hi.reshape(-1), 0)
    scales, lowest, highest = range_search.candidate_grids(fmt, symmetry, lo, hi)
    unit = np.ldexp(scales, -stats.exponent.reshape(-1, 1).astype(np.int32))
    return range_search._Grids(unit, lowest, highest, gamma)


@pytest.mark.parametrize("case", ["normal", "relu", "outlier", "tiny", "huge"])
@pytest.mark.parametrize(("symmetry", "fmt"), GRIDS, ids=["int8", "uint4", "uint16"])
@pytest.mark.parametrize("gamma", [1.0, 3.0])
def test_errors_at_edges_are_those_of_array_functions(
    case: str, symmetry: Symmetry, fmt: IntFormat, gamma: float
) -> None:
    grids, compiled = grids_of(data(case), symmetry, fmt, gamma), loops()
    expected = range_search._edge_errors(grids, EDGES)
    if compiled is not None:
        np.testing.assert_array_equal(range_search._edge_errors_compiled(grids, EDGES, compiled), expected)
    if case == "normal" and symmetry == "symmetric":
        np.testing.assert_array_equal(range_search._edge_errors_compiled(grids, EDGES, PLAIN), expected)  # type: ignore[arg-type]


@pytest.mark.skipif(loops() is None, reason="the extra `fast` is not installed")
@pytest.mark.parametrize("method", ["sqnr", "mse"])
@pytest.mark.parametrize(("symmetry", "fmt"), GRIDS, ids=["int8", "uint4", "uint16"])
def test_a_search_asks_the_loops_and_finds_the_same(
    method: str, symmetry: Symmetry, fmt: IntFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = statistics.measure("histogram", data("outlier"))
    assert isinstance(stats, statistics.Histogram)
    spec = QuantSpec(fmt, symmetry=symmetry, method=RangeMethod(method))
    with monkeypatch.context() as without:
        without.setattr(range_search, "loops", lambda: None)
        expected = choose_range(stats, spec)
    monkeypatch.setattr(range_search, "_edge_errors", None)
    assert choose_range(stats, spec) == expected
