"""Loops of one pass against the reference arithmetic: as plain Python, and compiled where numba is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bitwright.core.compiled import kernels
from bitwright.core.compiled.loops import loops
from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PER_TENSOR, PerChannel

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # plain Python, far beyond the grid
f32 = np.float32
HARD = f32([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-45, 3.4e38, -3.4e38, 0.5, 1.5, 2.5, 6.0, -1e-9])


def versions(name: str) -> list[Any]:
    """The plain function and its compiled form, where there is one."""
    compiled = loops()
    found = [getattr(kernels, name)]
    return found if compiled is None else [*found, getattr(compiled, name)]


def values(seed: int, n: int = 3001) -> np.ndarray[Any, Any]:
    x = (np.random.default_rng(seed).standard_normal(n) * 4).astype(np.float32)
    x[: HARD.size] = HARD
    x[100:164] = (np.arange(64) - 32) * f32(0.035)  # halves of a step, where ties are
    return x


def moderate(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``x`` with zeros in the place of NaN, infinities and numbers that leave nothing of others in a sum."""
    return np.where(np.abs(x) < 1e3, x, f32(0))


def grid(scale: float, zero: int, fmt: IntFormat) -> tuple[Encoding, tuple[np.float32, ...]]:
    encoding = Encoding(fmt, np.asarray(scale, np.float32), np.asarray(zero, np.float32), PER_TENSOR)
    return encoding, (f32(scale), f32(fmt.qmin - zero), f32(fmt.qmax - zero))


GRIDS = {
    "uint8": grid(0.07, 31, IntFormat(8, signed=False)),
    "int8": grid(0.07, 0, IntFormat(8)),
    "uint16": grid(3e-4, 12345, IntFormat(16, signed=False)),
    "int4": grid(0.9, 0, IntFormat(4)),
}


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Equal bit for bit, but for which NaN a NaN is."""
    return bool(((a.view(np.int32) == b.view(np.int32)) | (np.isnan(a) & np.isnan(b))).all())


@pytest.mark.parametrize("name", GRIDS)
def test_one_pass_is_the_reference(name: str) -> None:
    encoding, numbers = GRIDS[name]
    x = values(0)
    for function in versions("quantize_dequantize"):
        out = np.empty_like(x)
        function(x, out, *numbers)
        assert same_bits(out, fake_quantize(x, encoding))
        own = x.copy()
        function(own, own, *numbers)
        assert same_bits(own, out)


@pytest.mark.parametrize("ends", [(0.0, np.inf), (0.0, 6.0), (-1.0, 1.0)], ids=["relu", "relu6", "hardtanh"])
@pytest.mark.parametrize("name", GRIDS)
def test_an_activation_in_front(name: str, ends: tuple[float, float]) -> None:
    encoding, numbers = GRIDS[name]
    x, (low, high) = values(1), (f32(end) for end in ends)
    expected = fake_quantize(np.clip(x, low, high), encoding)
    for function in versions("clamp_quantize"):
        out = np.empty_like(x)
        function(x, out, low, high, *numbers)
        assert same_bits(out, expected)
    for function in versions("clamp_quantize_marked"):
        out, passed = np.empty_like(x), np.full(x.size, 7, np.uint8)
        first, last = (numbers[1] - f32(0.5)) * numbers[0], (numbers[2] + f32(0.5)) * numbers[0]
        function(x, out, passed, low, high, *numbers, first, last)
        assert same_bits(out, expected)
        y = np.clip(x, low, high)
        clipped = (x <= low) | (x >= high) | (y <= first) | (y >= last)
        assert np.array_equal(passed, (~clipped).astype(np.uint8))


@pytest.mark.parametrize("name", GRIDS)
def test_a_sum_in_front(name: str) -> None:
    encoding, numbers = GRIDS[name]
    x, other = values(2), values(3)[::-1].copy()
    expected = fake_quantize(x + other, encoding)
    for function in versions("add_quantize"):
        out = np.empty_like(x)
        function(x, other, out, *numbers)
        assert same_bits(out, expected)


def test_rows_with_scales_of_their_own() -> None:
    fmt, scale = IntFormat(8), f32([0.01, 0.2, 3.0])
    encoding = Encoding(fmt, scale, np.zeros(3, np.float32), PerChannel(0))
    x = values(4, 3 * 700).reshape(3, 700)
    for function in versions("quantize_rows"):
        out = np.empty(x.size, np.float32)
        function(x.reshape(-1), out, scale, f32(fmt.qmin), f32(fmt.qmax))
        assert same_bits(out, fake_quantize(x, encoding).reshape(-1))


def test_gradients_pass_where_they_may() -> None:
    grad = values(5)
    passed = (np.arange(grad.size) % 3 > 0).astype(np.uint8)
    for function in versions("pass_gradient"):
        out = np.empty_like(grad)
        function(grad, passed, out)
        assert same_bits(out, np.where(passed, grad, f32(0)))


@pytest.mark.parametrize("ends", [(-np.inf, np.inf), (0.0, 6.0)], ids=["alone", "relu6"])
@pytest.mark.parametrize("name", GRIDS)
def test_gradients_of_a_range_that_trains(name: str, ends: tuple[float, float]) -> None:
    _, (scale, lo, hi) = GRIDS[name]
    grad, x = values(6), values(7)
    low, high = (f32(end) for end in ends)
    first, last = (lo - f32(0.5)) * scale, (hi + f32(0.5)) * scale
    y = np.clip(x, low, high)
    outside = (y <= first) | (y >= last)
    code = np.clip(np.rint(y / scale), lo, hi)
    expected = np.where(outside, code, code - y / scale)
    for function in versions("learned_gradient"):
        inner, sums = np.empty_like(x), np.zeros(2)
        with np.errstate(invalid="ignore", over="ignore"):  # of the plain version
            function(grad, x, inner, sums, low, high, scale, lo, hi, first, last)
        assert same_bits(inner, np.where(outside | (x <= low) | (x >= high), f32(0), grad))
        assert np.isnan(sums).all()  # as the data holds NaN
        finite, sums = moderate(grad), np.zeros(2)
        function(finite, moderate(x), inner, sums, low, high, scale, lo, hi, first, last)
        terms = np.float64(finite) * np.where(np.abs(x) < 1e3, expected, f32(0)), np.float64(finite) - inner
        np.testing.assert_allclose(sums, [t.sum() for t in terms], atol=1e-6 * np.abs(terms).sum(1).max())


def test_gradients_of_rows_that_train() -> None:
    grad, x, scale = values(8, 2100), values(9, 2100), f32([0.01, 0.2, 4.0])
    lo, hi = f32(-128), f32(127)
    x[-2:] = (lo - f32(0.5)) * scale[-1], (hi + f32(0.5)) * scale[-1]  # half a step beyond the grid: outside
    ratio = (x.reshape(3, 700) / scale[:, None]).reshape(-1)
    outside = (ratio <= lo - f32(0.5)) | (ratio >= hi + f32(0.5))
    code = np.clip(np.rint(ratio), lo, hi)
    for function in versions("learned_rows_gradient"):
        inner, sums = np.empty_like(x), np.zeros((3, 2))
        with np.errstate(invalid="ignore", over="ignore"):  # of the plain version
            function(grad, x, inner, sums.reshape(-1), scale, lo, hi)
        assert same_bits(inner, np.where(outside, f32(0), grad))
        finite, sums = moderate(grad), np.zeros((3, 2))
        function(finite, moderate(x), inner, sums.reshape(-1), scale, lo, hi)
        part = np.where(np.abs(x) < 1e3, np.where(outside, code, code - ratio), f32(0))
        terms = np.float64(finite) * part, np.float64(finite) - inner
        expected = np.stack([t.reshape(3, 700).sum(1) for t in terms], 1)
        np.testing.assert_allclose(sums, expected, atol=1e-6 * np.abs(terms).sum(1).max())


def test_every_loop_has_a_signature() -> None:
    from bitwright.core.compiled.loops import LATE_PARTS, PARTS, SIGNATURES

    written: set[Callable[..., Any]] = {
        value
        for value in vars(kernels).values()
        if callable(value) and getattr(value, "__module__", "") == kernels.__name__
    }
    assert written <= SIGNATURES.keys() | {*PARTS, *LATE_PARTS} and len(written) > len(PARTS)
