"""Statistics and exact sums: exact, independent of order and grouping, blind to nothing."""

from __future__ import annotations

import sys
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.statistics import (
    HALF_BINS,
    ExactSum,
    Histogram,
    MinMax,
    bounds_of,
    from_arrays,
    histogram_exponent,
    kind_of,
    measure,
    merge,
    rows_of,
    start,
    to_arrays,
    update,
)

KINDS = ("minmax", "histogram", "moments")
EXACT = ("minmax", "histogram")
GRANULARITIES = {
    "per-tensor": PerTensor(),
    "per-channel-0": PerChannel(0),
    "per-channel-1": PerChannel(1),
    "per-block": PerBlock(2, axis=1, channel_axis=0),
}
FILLS = {
    "zero": np.zeros((3, 4)),
    "constant": np.full((3, 4), 2.5),
    "denormal": np.full((3, 4), -1e-42),
    "huge": np.full((3, 4), 3e38),
    "huge and tiny": np.array([[3e38, -1e-30, 1e-45, 0]] * 3),
    "one zero row": np.array([[0.0] * 4, [1.0] * 4, [-2.0] * 4]),
    "beyond float32": np.array([[1e300, -1e305, 1e-300, 0]] * 3),
}

any_float = st.floats(width=32)
batches = st.lists(hnp.arrays(np.float32, (3, 4), elements=any_float), min_size=1, max_size=5)


def all_of(kind, arrays, granularity):
    stats = start(kind, granularity.param_shape((3, 4)))
    for x in arrays:
        stats = update(stats, x, granularity)
    return stats


# ---- merging


@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES)
@pytest.mark.parametrize("kind", EXACT)
@given(batches, st.randoms())
@settings(max_examples=60, deadline=None)
def test_order_and_grouping_do_not_matter(kind, granularity, arrays, random):
    whole = all_of(kind, arrays, granularity)
    shuffled = list(arrays)
    random.shuffle(shuffled)
    cut = random.randint(0, len(arrays))
    ranks = [all_of(kind, part, granularity) for part in (shuffled[:cut], shuffled[cut:])]
    assert merge(*ranks) == merge(*ranks[::-1]) == whole


@pytest.mark.parametrize("kind", EXACT)
@given(batches)
@settings(max_examples=60, deadline=None)
def test_batches_count_as_their_concatenation(kind, arrays):
    assert all_of(kind, arrays, PerTensor()) == measure(kind, np.concatenate(arrays), PerTensor())
    assert all_of(kind, arrays, PerChannel(1)) == measure(kind, np.concatenate(arrays), PerChannel(1))


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES)
@given(hnp.arrays(np.float32, (3, 4), elements=any_float))
@settings(max_examples=60, deadline=None)
def test_numpy_and_torch_agree(kind, granularity, x):
    assert measure(kind, x, granularity) == measure(kind, torch.from_numpy(x), granularity)


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_extreme_data_is_counted_exactly_in_every_order(fill):
    parts = [fill, fill[:1] * 1e-5, np.float64([[0.25, -1e-9, 7, 0]])]
    stats = [measure("histogram", part) for part in parts]
    assert merge(merge(stats[0], stats[1]), stats[2]) == merge(stats[2], merge(stats[1], stats[0]))
    whole = measure("histogram", np.concatenate([part.reshape(-1) for part in parts]))
    assert merge(merge(stats[0], stats[1]), stats[2]) == whole
    assert whole.counts.sum() == whole.bounds.count == sum(part.size for part in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_the_empty_statistics_are_neutral(kind):
    stats = measure(kind, np.float32([1, -3, 2]))
    for merged in (merge(start(kind), stats), merge(stats, start(kind))):
        assert merged == stats
    assert update(stats, np.zeros((0, 7), np.float32)) == stats
    assert update(stats, torch.zeros(0)) == stats


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_pass_through_plain_arrays(kind):
    stats = measure(kind, np.float32([[1, -3], [2, np.nan]]), PerChannel(0))
    arrays = to_arrays(stats)
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
    assert from_arrays(kind, arrays) == stats
    assert stats != start(kind, (2,)) and stats != "statistics"


def test_histograms_of_rows_leave_out_what_is_not_finite():
    x = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    x[1, ::7] = 0
    spoilt = np.concatenate([x, np.float32([[np.nan, np.inf], [-np.inf, np.nan], [np.inf, np.inf]])], 1)
    clean, found = (measure("histogram", part, PerChannel(0)) for part in (x, spoilt))
    assert np.array_equal(found.counts, clean.counts) and np.array_equal(found.zeros, clean.zeros)
    assert np.array_equal(found.exponent, clean.exponent)
    one = measure("histogram", spoilt)
    assert np.array_equal(one.counts, measure("histogram", x).counts) and int(one.zeros) == 8


# ---- bounds


@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES)
@given(hnp.arrays(np.float32, (3, 4), elements=any_float))
@settings(deadline=None)
def test_bounds_are_those_of_the_finite_values(granularity, x):
    stats = measure("minmax", x, granularity)
    rows = rows_of(x, granularity).astype(np.float64)
    finite = np.isfinite(rows)
    assert (stats.lo.reshape(-1) == np.where(finite, rows, np.inf).min(1)).all()
    assert (stats.hi.reshape(-1) == np.where(finite, rows, -np.inf).max(1)).all()
    assert (stats.count.reshape(-1) == finite.sum(1)).all()
    assert (stats.nan_count.reshape(-1) == np.isnan(rows).sum(1)).all()
    assert (stats.inf_count.reshape(-1) == np.isinf(rows).sum(1)).all()
    assert stats.lo.shape == granularity.param_shape(x.shape)


@pytest.mark.parametrize("where", [0, 1, 17, 1000, 99_999])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_a_single_non_finite_value_is_never_missed(where, bad, library):
    x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    x[where] = bad
    stats = measure("minmax", library(x))
    assert (int(stats.nan_count), int(stats.inf_count)) == ((1, 0) if np.isnan(bad) else (0, 1))
    assert stats.count == 99_999 and stats.lo == np.nanmin(np.where(np.isfinite(x), x, np.nan))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "int64", "uint8", "bool"])
@pytest.mark.parametrize("kind", EXACT)
def test_every_real_dtype_is_read(dtype, kind):
    x = torch.tensor([0, 1, 1, 0, 1]).to(getattr(torch, dtype))
    stats = measure(kind, x)
    assert stats == measure(kind, np.float32([0, 1, 1, 0, 1]))
    as_numpy = np.array([0, 1, 1, 0, 1]).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert measure(kind, as_numpy) == stats


def test_gradients_and_strides_do_not_matter():
    x = torch.randn(4, 3, 5, requires_grad=True).transpose(0, 2)
    for kind in KINDS:
        assert measure(kind, x, PerChannel(1)) == measure(kind, x.detach().contiguous(), PerChannel(1))


# ---- histograms


def brute_force(x, exponent):
    """Bin counts by exact integer arithmetic on the bits of every number."""
    counts = np.zeros(2 * HALF_BINS - 1, np.int64)
    for value in np.asarray(x, np.float64).reshape(-1):
        numerator, denominator = abs(float(value)).as_integer_ratio()
        power = 2 ** abs(exponent)
        number = numerator // (denominator * power) if exponent >= 0 else numerator * power // denominator
        counts[(number if value > 0 else -number) + HALF_BINS - 1] += 1
    return counts


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
@settings(deadline=None)
def test_bins_are_exact(values):
    x = np.float32(values)
    stats = measure("histogram", x)
    assert (stats.counts == brute_force(x, int(stats.exponent))).all()
    assert stats.zeros == (x == 0).sum()
    assert merge(stats, measure("histogram", np.float32([3e38]))).counts.sum() == x.size + 1


@given(st.floats(width=32, min_value=2.0**-100, allow_infinity=False))
def test_the_width_is_the_smallest_that_holds_the_data(largest):
    exponent = int(histogram_exponent(np.float64(-largest), np.float64(0)))
    assert HALF_BINS * 2.0 ** (exponent - 1) <= largest < HALF_BINS * 2.0**exponent


def test_edges_belong_to_the_bin_away_from_zero():
    stats = measure("histogram", np.float32([1023, 1, -1, 0.9999, -0.9999, 0, -0.0]))
    assert int(stats.exponent) == -1
    bins = {int(i) - HALF_BINS + 1: int(stats.counts[i]) for i in np.flatnonzero(stats.counts)}
    assert bins == {2046: 1, 2: 1, -2: 1, 1: 1, -1: 1, 0: 2} and stats.zeros == 2


def test_large_tensors_are_counted_in_pieces_without_loss():
    x = np.random.default_rng(0).normal(size=300_001).astype(np.float32)
    x[7] = np.nan
    stats = measure("histogram", torch.from_numpy(x))
    assert stats == measure("histogram", x)
    width = 2.0 ** int(stats.exponent)
    expected = np.bincount(np.trunc(np.delete(x, 7) / width).astype(int) + HALF_BINS - 1, minlength=2 * HALF_BINS - 1)
    assert (stats.counts == expected).all()


@pytest.mark.parametrize("counter", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@given(st.lists(st.sampled_from([1e-42, 1e-5, 0.3, 1.0, 40.0, 1e4]), min_size=1, max_size=4), st.randoms())
@settings(max_examples=8, deadline=None)
def test_a_single_pass_counts_what_measuring_and_merging_do(counter, dtype, scales, random):
    """Long and short pieces, every kind of value, bins that widen on the way or are wide already."""
    with pytest.MonkeyPatch.context() as patch:
        if counter == "numpy":
            patch.delitem(sys.modules, "torch")
        generator, whole, parts = np.random.default_rng(random.randint(0, 99)), start("histogram"), []
        for scale in scales:
            x = (generator.normal(size=random.choice([5, 20_000, 150_000])) * scale).astype(dtype)
            for special in (0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 65504.0)[: random.randint(0, 7)]:
                x[generator.integers(1, x.size, 3)] = special  # the first stays finite
            whole = update(whole, x)
            parts.append(x.astype(np.float64))
        x = np.concatenate(parts)
    finite = x[np.isfinite(x)]
    bins = np.trunc(finite / 2.0 ** int(whole.exponent)).astype(int) + HALF_BINS - 1
    assert whole.exponent == histogram_exponent(finite.min(), finite.max())
    assert (whole.counts == np.bincount(bins, minlength=2 * HALF_BINS - 1)).all()
    assert whole.zeros == (finite == 0).sum() and whole.bounds == measure("minmax", x)


def test_non_finite_values_are_in_no_bin():
    stats = measure("histogram", np.float32([[np.nan, 1, np.inf, 0], [-np.inf, 0, 0, np.nan]]), PerChannel(0))
    assert stats.counts.sum(-1).tolist() == stats.bounds.count.tolist() == [2, 2]
    assert stats.zeros.tolist() == [1, 2]


def test_channels_of_the_first_and_of_another_axis_do_not_mix():
    x = np.random.default_rng(0).normal(size=(5, 3, 4)).astype(np.float32) * np.float32(
        [[[1]], [[10]], [[100]]]
    ).reshape(1, 3, 1)
    stats = update(update(start("histogram", (3,)), x, PerChannel(1)), x * 4, PerChannel(1))
    assert isinstance(stats, Histogram)
    for channel in range(3):
        alone = merge(measure("histogram", x[:, channel]), measure("histogram", x[:, channel] * 4))
        assert (stats.counts[channel] == alone.counts).all() and stats.exponent[channel] == alone.exponent


# ---- moments


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_moments_agree_with_numpy_however_they_are_merged(library):
    x = (np.random.default_rng(0).normal(size=(40, 3)) + [0, 1e4, -5]).astype(np.float32)
    stats = start("moments", (3,))
    for part in np.array_split(x, [1, 7, 30]):
        stats = update(stats, library(part), PerChannel(1))
    assert np.allclose(stats.mean, x.astype(np.float64).mean(0), rtol=1e-12, atol=0)
    assert np.allclose(stats.m2 / stats.count, x.astype(np.float64).var(0), rtol=1e-9, atol=0)


def test_moments_leave_non_finite_values_out():
    stats = measure("moments", np.float32([1, np.nan, 3, np.inf]))
    assert (int(stats.count), float(stats.mean), float(stats.m2)) == (2, 2, 2)


def test_updates_do_not_change_what_was_given():
    first = measure("histogram", np.float32([1, 2]))
    before = {key: array.copy() for key, array in to_arrays(first).items()}
    update(first, np.float32([100, -100]))
    assert all((to_arrays(first)[key] == before[key]).all() for key in before)
    assert isinstance(first.bounds, MinMax)


@pytest.mark.parametrize("granularity, shape", [(PerTensor(), ()), (PerChannel(0), (3,))], ids=["tensor", "channel"])
def test_energy_is_the_sum_of_squares_of_the_finite_values(granularity, shape):
    x = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    x[1, 3], x[2, 5] = np.nan, np.inf
    found = start("energy", shape)
    for part in (x[:, :15], torch.from_numpy(x[:, 15:])):
        found = update(found, part, granularity)
    expected = np.nansum(np.where(np.isinf(x), np.nan, x).astype(np.float64) ** 2, None if shape == () else 1)
    assert np.allclose(found.energy, expected, rtol=1e-6)
    assert found.nan_count.sum() == 1 and found.inf_count.sum() == 1
    assert from_arrays("energy", to_arrays(found)) == found and kind_of(found) == "energy"
    assert bounds_of(found) == found


def numbers() -> np.ndarray:
    rng = np.random.default_rng(0)
    found = rng.normal(size=(200, 3)) * 2.0 ** rng.integers(-1000, 1000, (200, 3))
    extremes = [5e-324, -5e-324, np.finfo(np.float64).max, -np.finfo(np.float64).max, 0.0, -0.0, 2.0**-1022, 1.0]
    found[: len(extremes), 0] = extremes
    return found


def summed(rows: np.ndarray) -> ExactSum:
    total = ExactSum(rows.shape[1])
    for row in rows:
        total.add(row)
    return total


def test_sums_are_those_of_fractions() -> None:
    rows = numbers()
    assert summed(rows).values() == [sum(map(Fraction, column.tolist())) for column in rows.T]


def test_order_and_division_do_not_matter() -> None:
    rows = numbers()
    whole, parts = summed(rows[::-1]), [summed(rows[i::3]) for i in range(3)]
    parts[0].limbs += parts[1].limbs + parts[2].limbs
    assert parts[0].values() == whole.values()
