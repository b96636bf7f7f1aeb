"""Compiled loops against the array functions and their definitions, bit for bit, and when they are used."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bitwright.core.compiled import counting, kernels
from bitwright.core.compiled.loops import Loops, flat, loops
from bitwright.core.graph import constant_channels
from bitwright.core.numerics import range_search, statistics
from bitwright.core.numerics.affine import SMALLEST_REACH, fake_quantize
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PER_TENSOR, PerChannel
from bitwright.core.numerics.ranges import RangeMethod, choose_range
from bitwright.core.numerics.spec import QuantSpec, Symmetry
from bitwright.torch.quantizers.fake_quantize import fake_quantize as quantize_tensor
from bitwright.torch.quantizers.fake_quantize import for_steps
from tests.support.processes import python

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
def test_constant_channels_are_those_of_the_array_functions(axis, make, monkeypatch):
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


pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # plain Python, far beyond the grid
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


@pytest.mark.parametrize("case", [*CASES, "negative", "empty range"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_range_chosen_at_run_time(case: str, bits: int) -> None:
    x = {"negative": -np.abs(data("normal", 700)), "empty range": np.zeros(700, np.float32)}.get(case)
    x = data(case, 700) if x is None else x
    encoding = Encoding(IntFormat(bits, signed=False), f32(1), np.int32(0), dynamic=True)
    expected = fake_quantize(x, encoding)
    for function in versions("quantize_by_own_range"):
        out = np.empty_like(x)
        function(x, out, f32(2**bits - 1), f32(SMALLEST_REACH))
        assert np.array_equal(out, expected, equal_nan=True)
    tensor = torch.from_numpy(x).reshape(7, 100)
    with torch.no_grad():
        steps = for_steps(tensor, encoding)
    assert steps is not None and for_steps(tensor, encoding) is None  # no gradient flows through it
    turned = tensor.reshape(100, 7).t()  # another layout of the same memory
    found = [quantize_tensor(tensor, encoding, None), steps(tensor), steps(turned).t()]
    for y in found:
        assert np.array_equal(y.numpy().reshape(-1), expected, equal_nan=True)


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


SAYS = "from bitwright.core.compiled.loops import loops; import sys; print(loops() is None, 'numba' in sys.modules)"


def says(program: str, **environment: str) -> str:
    run = python("-c", program, env=environment)
    return run.stdout.strip()


def test_the_switch_leaves_numba_unloaded() -> None:
    assert says(SAYS, BITWRIGHT_COMPILED="0") == "True False"


def test_without_numba_there_are_no_loops() -> None:
    assert says("import sys; sys.modules['numba'] = None; " + SAYS) == "True True"


def test_importing_the_package_loads_no_numba() -> None:
    program = "import bitwright.torch, bitwright.core.numerics.statistics, sys; print('numba' in sys.modules)"
    assert says(program) == "False"


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 3), np.float32),
        np.zeros((2, 3), np.float32).T,
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=["numpy", "fortran", "tensor", "channels-last"],
)
def test_memory_in_one_piece_is_shared(x: np.ndarray | torch.Tensor) -> None:
    found = flat(x)
    assert found is not None and found.ndim == 1
    found[:] = 1
    assert bool((x == 1).all())


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((4, 4), np.float32)[:, ::2],
        np.zeros(3),
        torch.zeros(4, 4)[:, ::2],
        torch.zeros(3, dtype=torch.float16),
        torch.zeros(3, device="meta"),
        torch.zeros(3, 3).to_sparse(),
    ],
    ids=["gaps", "float64", "tensor with gaps", "half", "meta", "sparse"],
)
def test_everything_else_is_left_to_array_functions(x: np.ndarray | torch.Tensor) -> None:
    assert flat(x) is None


EDGES = range_search._POOLED.edges
PLAIN = SimpleNamespace(edge_errors=kernels.edge_errors)  # the loops as Python runs them
SEARCHED_GRIDS: list[tuple[Symmetry, IntFormat]] = [
    ("symmetric", IntFormat(8)),
    ("asymmetric", IntFormat(4, signed=False)),
    ("asymmetric", IntFormat(16, signed=False)),
]


def searched_data(case: str) -> np.ndarray[Any, Any]:
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
@pytest.mark.parametrize(("symmetry", "fmt"), SEARCHED_GRIDS, ids=["int8", "uint4", "uint16"])
@pytest.mark.parametrize("gamma", [1.0, 3.0])
def test_errors_at_edges_are_those_of_array_functions(case, symmetry, fmt, gamma):
    grids, compiled = grids_of(searched_data(case), symmetry, fmt, gamma), loops()
    expected = range_search._edge_errors(grids, EDGES)
    if compiled is not None:
        np.testing.assert_array_equal(range_search._edge_errors_compiled(grids, EDGES, compiled), expected)
    if case == "normal" and symmetry == "symmetric":
        np.testing.assert_array_equal(range_search._edge_errors_compiled(grids, EDGES, PLAIN), expected)  # type: ignore[arg-type]


@pytest.mark.skipif(loops() is None, reason="the extra `fast` is not installed")
@pytest.mark.parametrize("method", ["sqnr", "mse"])
@pytest.mark.parametrize(("symmetry", "fmt"), SEARCHED_GRIDS, ids=["int8", "uint4", "uint16"])
def test_a_search_asks_the_loops_and_finds_the_same(method, symmetry, fmt, monkeypatch):
    stats = statistics.measure("histogram", searched_data("outlier"))
    assert isinstance(stats, statistics.Histogram)
    spec = QuantSpec(fmt, symmetry=symmetry, method=RangeMethod(method))
    with monkeypatch.context() as without:
        without.setattr(range_search, "loops", lambda: None)
        expected = choose_range(stats, spec)
    monkeypatch.setattr(range_search, "_edge_errors", None)
    assert choose_range(stats, spec) == expected
