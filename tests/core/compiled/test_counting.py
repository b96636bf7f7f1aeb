"""Compiled bounds and histograms against the array functions, and both against their definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bitwright.core.compiled import counting
from bitwright.core.compiled.loops import Loops, loops
from bitwright.core.graph import constant_channels
from bitwright.core.numerics import statistics

f32 = np.float32


class Plain:
    """The loops as plain Python, in the place of the compiled ones."""

    key_bounds = staticmethod(counting.key_bounds)
    channels_hold = staticmethod(counting.channels_hold)
    count_bins = staticmethod(counting.count_bins)


def engines() -> list[Any]:
    compiled: Loops | None = loops()
    return [Plain] if compiled is None else [Plain, compiled]


def data(case: str, n: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(len(case))
    x = (rng.standard_normal(n) * 3).astype(np.float32)
    if case == "relu":
        return np.maximum(x, 0)
    if case == "growing":
        return np.asarray(x * np.linspace(1e-3, 1e3, n), np.float32)
    if case == "not-finite":
        x[n // 2], x[n // 3], x[-1] = np.nan, np.inf, -np.inf
    if case == "minus-zero":
        x[::2] = -0.0
    if case == "tiny":
        x *= f32(1e-42)
    if case == "huge":
        x[5], x[7] = np.finfo(np.float32).max, np.finfo(np.float32).min
    return x


CASES = ["normal", "relu", "growing", "not-finite", "minus-zero", "tiny", "huge"]


@pytest.mark.parametrize("case", CASES)
def test_histograms_and_bounds_are_those_of_the_array_functions(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_PIECE", 512)
    first, second = data(case, 2051), data(case, 777)[::-1].copy()
    found = []
    for engine in [None, *engines()]:
        monkeypatch.setattr(statistics, "loops", lambda engine=engine: engine)
        stats = statistics.update(statistics.update(statistics.start("histogram"), first), second)
        minmax = statistics.update(statistics.start("minmax"), torch.from_numpy(first.reshape(7, -1)))
        found.append((stats, minmax))
    assert all(other == found[0] for other in found[1:])
    assert found[0][0].counts.sum() == found[0][0].bounds.count


def test_a_whole_tensor_of_the_default_size_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.maximum(np.random.default_rng(0).standard_normal(100_003), 0).astype(np.float32)
    compiled = statistics.measure("histogram", x)
    monkeypatch.setattr(statistics, "loops", lambda: None)
    assert statistics.measure("histogram", x) == compiled


@pytest.mark.parametrize(
    "x", [f32([1, -2, 3]), f32([-0.0, -1]), f32([5]), f32([1e-45, 3e38])], ids=["both", "zero", "one", "far"]
)
def test_keys_order_floats_as_their_values(x: np.ndarray[Any, Any]) -> None:
    for engine in engines():
        lo, hi = (counting.value_of_key(int(key)) for key in engine.key_bounds(x.view(np.int32)))
        assert (lo, hi) == (float(x.min()), float(x.max()))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_the_keys(bad: float) -> None:
    x = f32([1, bad, 2])
    for engine in engines():
        ends = [counting.value_of_key(int(key)) for key in engine.key_bounds(x.view(np.int32))]
        assert not np.isfinite(ends).all()


def test_the_table_is_centred_as_the_histogram() -> None:
    assert counting.HALF == statistics.HALF_BINS - 1


@pytest.mark.parametrize("kind", ["minmax", "histogram"])
def test_arrays_that_cannot_be_written_are_read(kind: Any) -> None:
    x = np.frombuffer(data("normal", 999).tobytes(), np.float32)
    assert not x.flags.writeable
    assert statistics.measure(kind, x) == statistics.measure(kind, x.copy())


@pytest.mark.parametrize("axis", [-1, -2, -3], ids=["features", "rows", "images"])
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_constant_channels_are_those_of_the_array_functions(
    axis: int, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [np.random.default_rng(seed).standard_normal((2, 9, 18, 20)).astype(np.float32) for seed in range(3)]
    for number, x in enumerate(batches):
        channels = np.moveaxis(x, axis, 0)
        channels[0], channels[1], channels[2], channels[3] = 0.0, 6.0, -0.0, number
        channels[4], channels[5] = 1.5, np.nan
        channels[6] = 0.25
    np.moveaxis(batches[2], axis, 0)[6, 1, 3, 4] = 0.5  # constant up to the last batch
    np.moveaxis(batches[1], axis, 0)[4, -1, -1, -1] = np.nan
    found = []
    for engine in [None, *engines()]:
        monkeypatch.setattr(constant_channels, "loops", lambda engine=engine: engine)
        known = None
        for x in batches:
            known = constant_channels.constant_channels(make(x), axis, known)
        found.append(known)
    assert found[0].zero == (0, 2) and found[0].constant == (1,)
    for other in found[1:]:
        assert (other.count, other.zero, other.constant) == (found[0].count, found[0].zero, found[0].constant)
        assert np.array_equal(other.value, found[0].value)
