"""Range methods: valid on any data, never worse than the full range by their measure, true to their names."""

from __future__ import annotations

import warnings
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bitwright.core.numerics import affine, range_search, statistics
from bitwright.core.numerics.affine import encode, fake_quantize, grid, round_to_float
from bitwright.core.numerics.formats import FloatFormat, IntFormat, parse_format
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.range_search import candidate_grids
from bitwright.core.numerics.ranges import (
    RANGE_METHODS,
    _settled,
    choose_range,
    choose_range_of,
    explained_range,
    explained_range_of,
    find_range_method,
    needs,
)
from bitwright.core.numerics.spec import SYMMETRIES, QuantSpec, RangeMethod
from bitwright.core.numerics.statistics import HALF_BINS, measure, merge, start, update
from bitwright.errors import CalibrationError, ConfigError, GranularityError

SEARCHES = ("mse", "sqnr")
METHODS = {
    **{name: RangeMethod(name) for name in RANGE_METHODS},
    "percentile-99": RangeMethod.of("percentile", {"percentile": 99}),
    "percentile-50": RangeMethod.of("percentile", {"percentile": 50}),
}
FORMATS = ["int2", "int8n", "uint8", "uint32", "float8_e4m3", "bfloat16"]
# further degenerate tensors, on all three granularities, are below
DEGENERATE = {
    "zero": np.zeros((3, 8)),
    "denormal": np.linspace(-1e-42, 1e-41, 24).reshape(3, 8),
    "one huge outlier": np.where(np.arange(24).reshape(3, 8) == 5, 3e38, 1e-3),
    "with non-finite": np.where(np.arange(24).reshape(3, 8) % 5 == 1, np.nan, np.linspace(-1, 1, 24).reshape(3, 8)),
}
DEGENERATE = {name: x.astype(np.float32) for name, x in DEGENERATE.items()}


def spec_of(method, fmt="int8", symmetry="symmetric"):
    method = METHODS[method] if isinstance(method, str) else method
    return QuantSpec(parse_format(fmt), symmetry=symmetry, method=method)


def heavy_tailed(size=100_000, seed=0):
    return np.random.default_rng(seed).standard_t(3, size).astype(np.float32)


#: symmetries of every format, whose zero points are whole numbers
WHOLE = tuple(symmetry for symmetry in SYMMETRIES if symmetry != "float_zero_point")


def error_of(x, lo, hi, spec, gamma=1.0):
    """Squared error of ``x`` on the grid of the range, clipped values weighing ``gamma`` times."""
    enc = encode(lo, hi, spec)
    noise = np.square(fake_quantize(x.astype(np.float64), enc) - x)
    return (noise * np.where((x < float(enc.min)) | (x > float(enc.max)), gamma, 1)).sum()


# ---- every method on every kind of data


@pytest.mark.parametrize("symmetry", WHOLE)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", DEGENERATE.values(), ids=DEGENERATE)
def test_every_method_gives_a_valid_range_on_degenerate_data(data, method, symmetry):
    for fmt in FORMATS:
        spec = spec_of(method, fmt, symmetry)
        for granularity in (PerTensor(), PerChannel(0)):
            for lo, hi in (
                choose_range(measure("histogram", data, granularity), spec),
                choose_range_of(data, spec, granularity),
            ):
                assert lo.dtype == hi.dtype == np.float64
                assert lo.shape == hi.shape == granularity.param_shape(data.shape)
                assert np.isfinite(lo).all() and np.isfinite(hi).all() and (lo <= hi).all()
                assert np.isfinite(encode(lo, hi, spec, granularity).scale).all()


@pytest.mark.parametrize("method", METHODS)
@given(hnp.arrays(np.float32, (2, 9), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
@settings(max_examples=40, deadline=None)
def test_every_method_is_valid_on_any_data(method, x):
    for fmt, symmetry in (("uint8", "asymmetric"), ("int4", "symmetric"), ("float8_e4m3", "symmetric")):
        spec = spec_of(method, fmt, symmetry)
        lo, hi = choose_range_of(x, spec, PerChannel(0))
        assert (lo <= hi).all() and np.isfinite(encode(lo, hi, spec, PerChannel(0)).scale).all()


@pytest.mark.parametrize("method", METHODS)
def test_ranges_do_not_depend_on_order_or_ranks(method):
    x = heavy_tailed(5000)
    parts = np.array_split(x, [10, 700, 701])
    stats = [measure("histogram", part) for part in parts]
    forward = merge(merge(stats[0], stats[1]), merge(stats[2], stats[3]))
    backward = merge(stats[3], merge(stats[2], merge(stats[1], stats[0])))
    assert choose_range(forward, spec_of(method)) == choose_range(backward, spec_of(method))
    assert choose_range(forward, spec_of(method)) == choose_range(measure("histogram", x), spec_of(method))


@pytest.mark.parametrize("symmetry", ["asymmetric", "symmetric", "unsigned_symmetric"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("columns", [60, 1500, 9000], ids=["by-value", "by-either", "by-histogram"])
def test_a_channel_has_the_range_it_has_alone(columns, method, symmetry):
    rng = np.random.default_rng(0)
    x = (rng.standard_t(4, (70, columns)) * rng.uniform(0.1, 10, (70, 1))).astype(np.float32)
    x[3], x[5] = np.abs(x[3]), -np.abs(x[5])
    spec = spec_of(method, "uint8" if symmetry == "asymmetric" else "int8", symmetry)
    lo, hi = choose_range_of(x, spec, PerChannel(0))
    alone = spec_of(method, "int8", "symmetric") if symmetry == "unsigned_symmetric" else spec
    for row in (0, 3, 5, 69):
        ends = choose_range_of(x[row], alone)
        assert (float(ends[0]), float(ends[1])) == (lo[row], hi[row])


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(1), PerBlock(16, 1, 0)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_numpy_and_torch_weights_have_the_same_range(method, granularity):
    x = heavy_tailed(64 * 64).reshape(64, 64)
    ours = choose_range_of(x, spec_of(method, "int4"), granularity)
    theirs = choose_range_of(torch.from_numpy(x), spec_of(method, "int4"), granularity)
    assert (ours[0] == theirs[0]).all() and (ours[1] == theirs[1]).all()


# ---- what each method promises


def test_minmax_is_everything_that_was_seen():
    x = heavy_tailed()
    assert choose_range(measure("minmax", x), spec_of("minmax")) == (x.min(), x.max())


@pytest.mark.parametrize("percentile", [50, 90, 99, 99.9, 99.99])
@pytest.mark.parametrize("make", [heavy_tailed, lambda: np.abs(heavy_tailed()), lambda: -np.exp(heavy_tailed() / 9)])
def test_percentiles_are_quantiles_within_a_bin(percentile, make):
    x = make()
    stats = measure("histogram", x)
    lo, hi = choose_range(stats, spec_of(RangeMethod.of("percentile", {"percentile": percentile})))
    width = 2.0 ** int(stats.exponent)
    assert abs(lo - np.quantile(x, 1 - percentile / 100)) <= 2 * width
    assert abs(hi - np.quantile(x, percentile / 100)) <= 2 * width


@pytest.mark.parametrize("columns", [9, 900])
def test_percentiles_of_small_groups_are_exact(columns):
    x = heavy_tailed(4 * columns).reshape(4, columns)
    lo, hi = choose_range_of(x, spec_of("percentile-99"), PerChannel(0))
    assert np.allclose(lo, np.quantile(x.astype(np.float64), 0.01, axis=1), rtol=1e-12, atol=1e-12)
    assert np.allclose(hi, np.quantile(x.astype(np.float64), 0.99, axis=1), rtol=1e-12, atol=1e-12)
    x[:, 3] = np.nan
    lo, hi = choose_range_of(x, spec_of("percentile-99"), PerChannel(0))
    assert np.allclose(hi, np.nanquantile(x.astype(np.float64), 0.99, axis=1), rtol=1e-12, atol=1e-12)


def test_percentile_100_is_the_exact_range():
    x = heavy_tailed()
    assert choose_range(measure("histogram", x), spec_of("percentile")) == (x.min(), x.max())


SEARCH_GRIDS = {
    "int4 symmetric": ("int4", "symmetric"),
    "int8 symmetric": ("int8", "symmetric"),
    "int8 strict": ("int8", "strict_symmetric"),
    "uint4 asymmetric": ("uint4", "asymmetric"),
    "uint8 asymmetric": ("uint8", "asymmetric"),
    "uint16 asymmetric": ("uint16", "asymmetric"),
    "int4 unsigned": ("int4", "unsigned_symmetric"),
    "fp8": ("float8_e4m3", "symmetric"),
    "fp4": ("float4_e2m1", "symmetric"),
}
SEARCH_DATA = {
    "heavy-tailed": heavy_tailed(20_000),
    "normal": np.random.default_rng(0).normal(size=20_000).astype(np.float32),
    "rectified": np.maximum(heavy_tailed(20_000), 0),
    "skewed": np.exp(np.random.default_rng(0).normal(size=20_000)).astype(np.float32) - 0.3,
    "uniform": np.random.default_rng(0).uniform(-1, 2, 20_000).astype(np.float32),
    "few values": np.random.default_rng(0).choice(np.float32([-1, 0.1, 0.4, 2]), 20_000),
}


@pytest.mark.parametrize("fmt, symmetry", SEARCH_GRIDS.values(), ids=SEARCH_GRIDS)
@pytest.mark.parametrize("data", SEARCH_DATA.values(), ids=SEARCH_DATA)
@pytest.mark.parametrize("method", SEARCHES)
def test_searches_are_not_worse_than_minmax(data, method, fmt, symmetry):
    spec, gamma = spec_of(method, fmt, symmetry), {"mse": 1, "sqnr": 3}[method]
    full = error_of(data, data.min(), data.max(), spec, gamma)
    # from a histogram the noise is known to within the shape of the data inside a bin
    assert error_of(data, *choose_range(measure("histogram", data), spec), spec, gamma) <= full * 1.1
    few = data[:1000]
    full = error_of(few, few.min(), few.max(), spec, gamma)
    assert error_of(few, *choose_range_of(few, spec), spec, gamma) <= full * (1 + 1e-6)


def brute_force_costs(x, fmt, symmetry, gamma):
    """Noise of the vector ``x`` on every candidate grid, all of it in float64, and the ends of these grids."""
    lo, hi = np.float64([min(x.min(), 0)]), np.float64([max(x.max(), 0)])
    chosen = grid(fmt, symmetry, lo)
    scale, lowest, highest = (part[0][:, None] for part in candidate_grids(chosen, symmetry, lo, hi))
    x = x.astype(np.float64)
    if isinstance(chosen, FloatFormat):
        codes = round_to_float(x / scale, chosen)
    else:
        codes = np.clip(np.rint(x / scale), lowest, highest)
    beyond = x - np.clip(x, lowest * scale, highest * scale)
    costs = (np.square(x - codes * scale) + (gamma - 1) * np.square(beyond)).sum(1)
    ends = np.concatenate([lowest * scale, highest * scale], axis=1)
    ends[0] = lo[0], hi[0]  # the full range is returned unsnapped
    return costs, ends


SMALL_ROWS = {
    **{f"{name}, {size}": data[:size] for name, data in SEARCH_DATA.items() for size in (3, 50, 1000)},
    "one outlier": np.append(heavy_tailed(999), np.float32(1000)),
    "on the grid": np.float32(0.03) * np.random.default_rng(0).integers(-127, 128, 1000).astype(np.float32),
    "on the grid, then an outlier": np.append(np.float32(0.5) * np.arange(-7, 8), np.float32(20)),
}


@pytest.mark.parametrize("fmt, symmetry", SEARCH_GRIDS.values(), ids=SEARCH_GRIDS)
@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_searches_by_value_agree_with_brute_force(gamma, fmt, symmetry):
    spec = spec_of(RangeMethod.of("sqnr", {"gamma": gamma}), fmt, symmetry)
    for name, x in SMALL_ROWS.items():
        costs, ends = brute_force_costs(x, spec.format, symmetry, gamma)
        found = np.flatnonzero((ends == np.array(choose_range_of(x, spec))).all(1))
        assert found.size, name
        # up to 8 bits candidates are compared in float32
        assert costs[found[0]] <= costs.min() * (1 + 1e-4) + 1e-12 * np.square(x.astype(np.float64)).sum(), name
        assert costs[found[0]] <= costs[0] * (1 + 1e-4) + 1e-12 * np.square(x.astype(np.float64)).sum(), name


@pytest.mark.parametrize("fmt", ["int4", "int8", "int12"])
def test_a_search_by_value_leaves_out_what_is_not_finite(fmt):
    x = heavy_tailed(600)
    spoilt = np.concatenate([x[:200], [np.nan, np.inf], x[200:], [-np.inf, np.nan]]).astype(np.float32)
    assert choose_range_of(spoilt, spec_of("sqnr", fmt)) == choose_range_of(x, spec_of("sqnr", fmt))


@pytest.mark.parametrize("fmt", ["int4", "int8"])
@pytest.mark.parametrize("columns", [2000, 4000])
def test_large_groups_on_symmetric_grids_are_searched_by_value(fmt, columns):
    rows = np.stack([heavy_tailed(columns, seed) for seed in range(3)])
    rows[1, 7] = 300
    lo, hi = choose_range_of(rows, spec_of("sqnr", fmt), PerChannel(0))
    for row, x in enumerate(rows):
        costs, ends = brute_force_costs(x, parse_format(fmt), "symmetric", 3)
        found = np.flatnonzero((ends == (lo[row], hi[row])).all(1))
        assert costs[found[0]] <= costs.min() * (1 + 1e-4)


@pytest.mark.parametrize("dtype, power", [("float16", 3), ("float32", -90), ("float32", 100), ("float64", -110)])
def test_a_search_by_value_does_not_depend_on_the_unit(dtype, power):
    x = (heavy_tailed(500) / 16).astype(np.float16).astype(dtype)
    unit = 2.0**power
    lo, hi = choose_range_of(x, spec_of("sqnr", "int4"))
    scaled = choose_range_of((x * unit).astype(dtype), spec_of("sqnr", "int4"))
    assert (float(scaled[0]), float(scaled[1])) == (lo * unit, hi * unit)


@pytest.mark.parametrize(
    "fmt, symmetry, share", [("int4", "symmetric", 0.25), ("uint4", "asymmetric", 0.25), ("int8", "symmetric", 0.8)]
)
@pytest.mark.parametrize("method", SEARCHES)
def test_searches_win_clearly_on_heavy_tails(method, fmt, symmetry, share):
    x, spec = heavy_tailed(), spec_of(method, fmt, symmetry)
    lo, hi = choose_range(measure("histogram", x), spec)
    assert error_of(x, lo, hi, spec) < error_of(x, x.min(), x.max(), spec) * share


# the grid of a float format is coarse where the few outliers lie, and a bin blurs where exactly they do
@pytest.mark.parametrize("fmt, slack", [("int3", 1.02), ("int4", 1.02), ("int8", 1.02), ("float8_e4m3", 1.1)])
def test_the_search_finds_the_best_of_itscandidate_grids(fmt, slack):
    x, spec = heavy_tailed(), spec_of("mse", fmt)
    found = error_of(x, *choose_range(measure("histogram", x), spec), spec)
    largest = float(np.abs(x).max())
    best = min(error_of(x, -largest * i / 101, largest * i / 101, spec) for i in range(1, 102))
    assert found <= best * slack


def test_a_larger_gamma_clips_less():
    stats = measure("histogram", heavy_tailed())
    widths = []
    for gamma in (1, 3, 30, 1000):
        lo, hi = choose_range(stats, spec_of(RangeMethod.of("sqnr", {"gamma": gamma}), "int4"))
        widths.append(float(hi - lo))
    assert widths == sorted(widths) and widths[0] < widths[-1]
    gamma_one = spec_of(RangeMethod.of("sqnr", {"gamma": 1}), "int4")
    assert choose_range(stats, gamma_one) == choose_range(stats, spec_of("mse", "int4"))


def test_sixteen_bits_keep_the_range_of_well_behaved_data():
    x = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    lo, hi = choose_range(measure("histogram", x), spec_of("sqnr", "uint16", "asymmetric"))
    assert lo == x.min() and hi == x.max()


def test_zeros_do_not_change_a_search():
    x = np.abs(heavy_tailed(20_000)) + np.float32(0.01)
    padded = np.concatenate([x, np.zeros(200_000, np.float32)])
    for method in SEARCHES:
        spec = spec_of(method, "uint8", "asymmetric")
        assert choose_range(measure("histogram", padded), spec) == choose_range(
            merge(measure("histogram", x), measure("histogram", np.float32([0]))), spec
        )


def test_a_rare_outlier_is_given_up_when_everything_else_would_vanish():
    stats = measure("histogram", np.random.default_rng(0).normal(size=100_000).astype(np.float32))
    for _ in range(14):  # 1.6e9 values
        stats = merge(stats, stats)
    stats = merge(stats, measure("histogram", np.float32([4000])))
    _, hi = choose_range(stats, spec_of("sqnr", "int4"))
    assert hi < 400


@pytest.mark.parametrize("sign", [1, -1])
def test_the_entropy_threshold_goes_with_the_unit(sign):
    """Of data on one side of zero, which use every code, as of data on both sides."""
    x = sign * (np.abs(heavy_tailed()) / 8 + np.float32(2**-6))
    lo, hi = (float(end) for end in choose_range(measure("histogram", x), spec_of("entropy", "uint8", "asymmetric")))
    for unit in (2.0**-8, 2.0**8):
        scaled = choose_range(measure("histogram", x * np.float32(unit)), spec_of("entropy", "uint8", "asymmetric"))
        assert (float(scaled[0]), float(scaled[1])) == (lo * unit, hi * unit)


def test_entropy_clips_the_tails_and_keeps_a_compact_distribution():
    stats = measure("histogram", heavy_tailed())
    lo, hi = choose_range(stats, spec_of("entropy"))
    assert lo == -hi and hi < stats.bounds.hi / 2
    uniform = np.random.default_rng(0).uniform(-1, 1, 100_000).astype(np.float32)
    _, hi = choose_range(measure("histogram", uniform), spec_of("entropy"))
    assert hi > 0.95


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_the_entropy_threshold_is_the_one_of_the_definition(bits: int) -> None:
    """Bin by bin: the merged distribution of every threshold that is tried, and its divergence."""
    generator = np.random.default_rng(bits)
    zeros = np.zeros(20_000)
    for values in (
        generator.standard_t(6, 50_000),
        generator.laplace(size=3000),
        np.append(generator.laplace(size=3000), zeros),
    ):
        stats = measure("histogram", values.astype(np.float32))
        bins = stats.counts[..., HALF_BINS - 1 :].reshape(-1).astype(np.float64)
        bins[1:] += stats.counts[..., HALF_BINS - 2 :: -1].reshape(-1)
        bins[0] -= stats.zeros
        levels = 2 ** (bits - 1)
        first = max(levels, HALF_BINS // 16)
        tried = {}
        for size in range(HALF_BINS, first - 1, -max(1, (HALF_BINS - first) // 100)):
            edges = np.arange(levels + 1) * size // levels
            held, filled = bins[:size].copy(), bins[:size] > 0
            level = np.add.reduceat(held, edges[:-1]) / np.maximum(np.add.reduceat(filled * 1, edges[:-1]), 1)
            merged = np.where(filled, np.repeat(level, np.diff(edges)), 0.0)
            held[-1] += bins[size:].sum()
            some = held > 0
            merged[some] = np.maximum(merged[some], 1e-4)
            p, q = held[some] / held.sum(), merged[some] / merged.sum()
            tried[size] = (p * np.log(p / q)).sum()
        best = max(size for size in tried if tried[size] <= min(tried.values()) + 1e-12)
        lo, hi = choose_range(stats, spec_of("entropy", f"int{bits}"))
        bounds, threshold = stats.bounds, np.ldexp(best, int(stats.exponent.item()))
        full = best == HALF_BINS
        assert hi == (bounds.hi if full else min(bounds.hi, threshold))
        assert lo == (bounds.lo if full else max(bounds.lo, -threshold))


# ---- names, options, refusals


@pytest.mark.parametrize(
    "alias, name",
    [
        ("tf", "minmax"),
        ("min_max", "minmax"),
        ("post_training_tf", "minmax"),
        ("training_range_learning_with_tf_init", "minmax"),
        ("tf_enhanced", "sqnr"),
        ("post_training_tf_enhanced", "sqnr"),
        ("training_range_learning_with_tf_enhanced_init", "sqnr"),
        ("post_training_percentile", "percentile"),
        ("Percentile", "percentile"),
    ],
)
def test_names_of_aimet_lead_to_ours(alias, name):
    assert find_range_method(alias) == RangeMethod(name)
    assert find_range_method(RangeMethod(alias, ())) == RangeMethod(name)


def test_options_given_beside_a_method_win():
    given_method = RangeMethod.of("percentile", {"percentile": 99})
    assert find_range_method(given_method, {"percentile": 98}) == RangeMethod.of("percentile", {"percentile": 98})


@pytest.mark.parametrize(
    "method, options, message",
    [
        ("minmx", {}, "range method 'minmx': there is no range method.*did you mean 'minmax'.*use one of minmax, perc"),
        ("percentile", {"percentle": 99}, "no option 'percentle' .did you mean 'percentile'"),
        ("minmax", {"percentile": 99}, "no option 'percentile'.*leave the options empty"),
        ("percentile", {"percentile": 49}, "percentile=49 is not between 50 and 100.*default, percentile=100"),
        ("percentile", {"percentile": float("nan")}, "percentile=nan is not between"),
        ("sqnr", {"gamma": -1}, "gamma=-1 is not between 0 and 1e.06"),
    ],
)
def test_misspelt_methods_and_options_are_refused_with_a_remedy(method, options, message):
    with pytest.raises(ConfigError, match=message):
        find_range_method(method, options)


def test_each_method_says_what_it_needs():
    assert {name: needs(name) for name in RANGE_METHODS} == {
        "minmax": "minmax",
        "percentile": "histogram",
        "mse": "histogram",
        "sqnr": "histogram",
        "entropy": "histogram",
        "hqq": "histogram",
    }


def test_a_histogram_method_refuses_bounds_alone():
    with pytest.raises(CalibrationError, match="conv1: range method 'sqnr' reads a histogram.*before calibration"):
        choose_range(measure("minmax", np.ones(3)), spec_of("sqnr"), site="conv1")


@pytest.mark.parametrize("method", METHODS)
def test_no_finite_data_is_refused_by_index(method):
    with pytest.raises(CalibrationError, match=r"conv1: calibration saw no finite value \(0 NaN, 0 infinite\)"):
        choose_range(start("histogram"), spec_of(method), site="conv1")
    x = np.float32([[1, 2], [np.nan, np.inf]])
    with pytest.raises(CalibrationError, match=r"conv1: .*no finite value for index 1 \(1 NaN, 1 infinite\)"):
        choose_range_of(x, spec_of(method), PerChannel(0), site="conv1")
    with pytest.raises(CalibrationError, match="no finite value"):
        choose_range_of(np.zeros((0, 3)), spec_of(method))


def test_a_granularity_that_does_not_fit_names_the_site():
    with pytest.raises(GranularityError, match="^conv1.weight: axis 2 does not exist"):
        choose_range_of(np.zeros((4, 48)), spec_of("minmax"), PerBlock(32, 2, 0), site="conv1.weight")


def test_the_choice_between_signed_and_unsigned_changes_nothing_else():
    spec = QuantSpec(
        IntFormat(8), symmetry="unsigned_symmetric", non_finite="clamp", scale_format="e8m0", method=RangeMethod("mse")
    )
    bounds = start("minmax")
    bounds = update(bounds, np.float32([-1, 2]))
    assert _settled(spec, bounds) == replace(spec, symmetry="symmetric")
    assert _settled(spec, update(start("minmax"), np.float32([0, 2]))) is spec
    mixed = update(start("minmax", (2,)), np.float32([[-1, 2], [0, 2]]), PerChannel(0))
    assert _settled(spec, mixed) == replace(spec, symmetry="symmetric"), "one negative channel is enough"


@pytest.mark.parametrize("fmt", [IntFormat(4), parse_format("float8_e4m3")], ids=str)
@pytest.mark.parametrize("gamma", [1.0, 3.0])
def test_the_noise_of_a_histogram_is_that_of_its_values(fmt, gamma):
    """Values spread evenly over bins, clipped ones weighted by ``gamma``: on integer grids the integral is exact."""
    random = np.random.default_rng(0)
    edges = range_search._POOLED.edges
    bins = np.sort(random.choice(len(edges) - 1, 12, replace=False))
    mass = np.zeros((1, len(edges) - 1))
    mass[0, bins] = random.integers(1, 9, 12)
    scale, ends = np.array([[17.0, 60.0]]), ((-8.0, 7.0) if isinstance(fmt, IntFormat) else (-448.0, 448.0))
    scale = scale if isinstance(fmt, IntFormat) else scale / 64
    grids = range_search._Grids(scale, *(np.full_like(scale, end) for end in ends), gamma)
    if isinstance(fmt, IntFormat):
        found, points = range_search._binned_noise(mass, grids, edges), (np.arange(20_000) + 0.5) / 20_000
    else:
        found, points = range_search._centred_noise(mass, grids, fmt, edges), np.array([0.5])
    for i, step in enumerate(scale[0]):
        expected = 0.0
        for n in bins:
            x = edges[n] + points * (edges[n + 1] - edges[n])
            inside = np.clip(x, ends[0] * step, ends[1] * step)
            codes = np.rint(inside / step) if isinstance(fmt, IntFormat) else round_to_float(x / step, fmt)
            error = np.square(x - codes * step) + (gamma - 1) * np.square(x - inside)
            expected += mass[0, n] * error.mean()
        assert found[0, i] == pytest.approx(expected, rel=1e-6)


def test_the_first_channel_without_a_finite_value_is_named():
    x = np.float32([[1, 2], [np.nan, np.inf], [3, 4], [np.nan, np.nan]])
    with pytest.raises(CalibrationError, match=r"no finite value for index 1 \(1 NaN, 1 infinite\)"):
        choose_range_of(x, spec_of("minmax"), PerChannel(0))


def values_of(kind, size=20_000):
    """Distributions that a method could take for something else."""
    random = np.random.default_rng(0)
    normal = random.standard_normal(size)
    made = {
        "normal": normal,
        "after a ReLU": np.maximum(normal, 0),
        "after a ReLU, 96 % zeros": np.maximum(normal - 1.75, 0),
        "90 % zeros": np.where(random.random(size) < 0.9, 0, normal),
        "one-sided": random.random(size) + 3,
        "one-sided below": -random.random(size),
        "after a GELU": normal * 0.5 * (1 + np.tanh(0.8 * normal)),
        "spiked at 0.5": np.where(random.random(size) < 0.9, 0.5, normal),
        "spiked near zero": np.where(random.random(size) < 0.9, 1e-3, normal),
        "two values": np.where(random.random(size) < 0.3, 0.1, 1.0),
        "a rare one": (random.random(size) < 0.001) * 1.0,
        "nine values": random.integers(-4, 5, size) / 4.0,
        "levels of a picture": random.integers(0, 256, size) / 255.0,
        "heavy tails": random.standard_t(1, size),
        "log-normal": np.exp(2 * normal),
        "one outlier": np.append(normal[1:], 1000.0),
        "constant": np.full(size, -0.7),
        "zeros": np.zeros(size),
        "tiny": normal * 1e-30,
    }
    return made[kind].astype(np.float32)


SHAPES = ("normal", "after a ReLU", "after a ReLU, 96 % zeros", "90 % zeros", "one-sided", "one-sided below", "after a GELU",
          "spiked at 0.5", "spiked near zero", "two values", "a rare one", "nine values", "levels of a picture",
          "heavy tails", "log-normal", "one outlier", "constant", "zeros", "tiny")  # fmt: skip
TRIED = ("mse", "sqnr", "entropy", *(RangeMethod.of("percentile", {"percentile": p}) for p in (99.0, 99.99)),
         RangeMethod.of("mse", {"gamma": 0.0}))  # fmt: skip


def decibel(x, lo, hi, spec):
    """Signal to noise of the rows of ``x`` on the grids of the ranges, 150 at most."""
    y = fake_quantize(x, encode(lo, hi, spec, spec.granularity)).astype(np.float64)
    noise, energy = np.square(y - x).sum(-1), np.square(x, dtype=np.float64).sum(-1)
    return np.where(
        noise <= 1e-15 * energy, 150.0, 10 * np.log10(np.maximum(energy, 1e-300) / np.maximum(noise, 1e-300))
    )


@pytest.mark.parametrize(
    "fmt, symmetry",
    [("uint8", "asymmetric"), ("int8", "symmetric"), ("uint4", "asymmetric"), ("int4", "strict_symmetric")],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_range_is_6_decibel_below_the_full_one_without_a_word(shape, fmt, symmetry):
    """Of activations and of weights with 9, 600 and 3,000 values a channel."""
    x = values_of(shape)
    weights = [np.resize(x[::-1], (4, n)) for n in (9, 600, 3000)]
    for method in TRIED:
        spec, full = spec_of(method, fmt, symmetry), spec_of("minmax", fmt, symmetry)
        stats = measure("histogram", x)
        found = [(x, explained_range(stats, spec), choose_range(stats, full), spec)]
        for weight in weights:
            per_channel = replace(spec, granularity=PerChannel(0))
            chosen = explained_range_of(weight, per_channel, PerChannel(0))
            found.append((weight, chosen, choose_range_of(weight, full, PerChannel(0)), per_channel))
        for values, chosen, bounds, used in found:
            lost = decibel(values, *bounds, used) - decibel(values, chosen.lo, chosen.hi, used)
            assert (lost <= 6).all() or (chosen.poor and "dB above that of the full range" in chosen.remark), (
                method,
                values.shape,
            )


def test_zeros_do_not_move_the_entropy_threshold():
    x = np.random.default_rng(0).standard_t(4, 50_000).astype(np.float32)
    spec = spec_of("entropy", "int4")
    alone = choose_range(measure("histogram", x), spec)
    assert choose_range(measure("histogram", np.append(x, np.zeros(450_000, np.float32))), spec) == alone
    assert alone[1] < x.max() / 2


def test_entropy_of_too_few_values_is_the_least_error_and_says_so():
    w = np.random.default_rng(0).standard_normal((50, 9)).astype(np.float32)
    chosen = explained_range_of(w, spec_of("entropy", "int4"), PerChannel(0))
    lo, hi = choose_range_of(w, spec_of("mse", "int4"), PerChannel(0))
    assert np.array_equal(chosen.lo, lo) and np.array_equal(chosen.hi, hi)
    assert chosen.remark.startswith("50 of 50 ranges have fewer than 2048 values other than zero") and not chosen.poor
    few = explained_range(measure("histogram", w), spec_of("entropy"))
    assert (
        few.remark
        == "it has fewer than 2048 values other than zero, too few for 'entropy': the least mean squared error is taken"
    )
    mixed = np.stack([np.resize(w, 3000), np.where(np.arange(3000) < 100, 1.0, 0.0)]).astype(np.float32)
    assert explained_range_of(mixed, spec_of("entropy"), PerChannel(0)).remark.startswith("1 of 2 ranges have")


MAX = float(np.finfo(np.float32).max)
ANY_FORMAT = ("int8", "uint8", "int4", "uint4", "int2", "int16", "uint16", "int24", "int32", "int8n",
           "float8_e4m3", "float8_e5m2", "float4_e2m1", "float16", "bfloat16")  # fmt: skip
ANY_METHOD = (*map(RangeMethod, RANGE_METHODS), RangeMethod.of("percentile", {"percentile": 99.0}))
CLOSED = tuple(method for method in ANY_METHOD if method.name not in ("mse", "sqnr", "entropy"))
GRANULARITIES = {
    "per-tensor": PerTensor(),
    "per-channel": PerChannel(0),
    "per-block": PerBlock(4, axis=1, channel_axis=0),
}

ROW = np.linspace(-1, 2, 8)
FILLS = {
    "zero": np.zeros((4, 8)),
    "negative-zero": np.full((4, 8), -0.0),
    "constant": np.full((4, 8), 2.5),
    "negative-constant": np.full((4, 8), -0.7),
    "one-sided": np.stack([ROW + 5] * 4),
    "one-sided-below": np.stack([ROW - 5] * 4),
    "denormal": np.full((4, 8), 1e-42),
    "denormal-and-zero": np.stack([np.where(ROW > 0, 1e-45, 0)] * 4),
    "smallest-normal": np.full((4, 8), np.finfo(np.float32).tiny),
    "huge": np.full((4, 8), 1e38),
    "largest": np.full((4, 8), MAX),
    "smallest": np.full((4, 8), -MAX),
    "difference-overflows": np.stack([np.where(ROW > 0, 1e38, -3e38)] * 4),
    "whole-float32": np.stack([np.where(ROW > 0, MAX, -MAX)] * 4),
    "huge-and-tiny": np.stack([[3e38, -3e38, 1e-45, 0, 1, -1, 1e-20, 1e20]] * 4),
    "zero-channel": np.stack([ROW, 0 * ROW, ROW * 100, 0 * ROW - 3]),
    "channels-of-all-sizes": np.stack([ROW * 1e-40, ROW * 1e38, ROW, 0 * ROW]),
    "one-element": np.full((1, 4), 7.0),
}


def ranges_of(x, spec):
    """The two ways to a range: from statistics gathered in two batches, and from the tensor at hand."""
    shape = spec.granularity.param_shape(tuple(x.shape))
    stats = statistics.start(needs(spec.method), shape)
    for _ in range(2):
        stats = statistics.update(stats, x, spec.granularity)
    return choose_range(stats, spec), choose_range_of(x, spec, spec.granularity)


def half_step(enc, values):
    """Half the spacing of the grid of ``enc`` at ``values``, and ``values`` in the view of the granularity."""
    scale = enc.scale.astype(np.float64).reshape(enc.granularity.broadcast_shape(values.shape) or ())
    view = values.astype(np.float64).reshape(enc.granularity.view_shape(values.shape))
    if not isinstance(enc.format, FloatFormat):
        return scale / 2, view
    _, power = np.frexp(np.abs(view / scale))
    power = np.maximum(power - 1, enc.format.min_exponent)
    return np.ldexp(0.5 * scale, power - enc.format.mantissa_bits), view


def check(x, spec):
    """Both ranges give a valid encoding, without a warning; values inside it move by at most half a step."""
    with warnings.catch_warnings(), np.errstate(all="warn", under="ignore"):
        warnings.simplefilter("error")
        for lo, hi in ranges_of(x, spec):
            assert np.isfinite(lo).all() and np.isfinite(hi).all() and (lo <= hi).all()
            enc = affine.encode(lo, hi, spec, spec.granularity)
            assert np.isfinite(enc.scale).all() and (enc.scale > 0).all()
            assert np.isfinite(enc.min).all() and np.isfinite(enc.max).all()
            assert (np.abs(enc.min) <= MAX).all() and (np.abs(enc.max) <= MAX).all()
            back = affine.fake_quantize(x, enc)
            assert back.dtype == x.dtype and np.isfinite(np.asarray(back, np.float64)).all()
            check_error(x, back, enc, spec, exact=spec.method.name == "minmax")


def check_error(x, back, enc, spec, *, exact):
    values, result = np.asarray(x, np.float64), np.asarray(back, np.float64)
    bound, view = half_step(enc, values)
    result = result.reshape(view.shape)
    shape = enc.granularity.broadcast_shape(values.shape) or ()
    low, high = enc.min.reshape(shape), enc.max.reshape(shape)
    # a float32 scale has 24 bits; a result that is cast back to a half type has 8
    bits = 22 if np.asarray(x).dtype == np.float32 else 7
    least = 2.0**-25 if np.asarray(x).dtype == np.float16 else 2.0**-149 if bits == 22 else 2.0**-134
    rounding = np.maximum(np.abs(result), np.abs(view)) * 2.0**-bits + least
    # symmetric grids of 2 and 3 bits clip positive values for the sake of their lowest code
    few = isinstance(enc.format, IntFormat) and enc.format.bits <= 3 and spec.symmetry != "asymmetric"
    if exact and not few and not (isinstance(enc.format, FloatFormat) and not enc.format.scaled):
        # the grid ends where float32 does, and then holds the end of the data to a step
        capped = np.maximum(-low, high) > 0.999 * MAX
        inside = (view >= low - bound - rounding) & (view <= high + bound + rounding)
        assert (inside | capped).all(), "min-max covers the data"
    assert (np.abs(result - np.clip(view, low, high)) <= bound + rounding).all()


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES)
def test_degenerate_tensors(granularity, fill):
    whole = granularity == PerTensor()
    formats = (
        ("int8n", "uint8", "int2", "uint16", "int32", "float8_e4m3", "float16") if whole else ("uint4", "float4_e2m1")
    )
    for fmt in map(parse_format, formats):
        for symmetry in ("symmetric",) if isinstance(fmt, FloatFormat) else WHOLE:
            # searches take most of the time, and depend on the grid by its number of codes only
            searched = symmetry != "asymmetric" and fmt.name in ("uint8", "uint4", "float8_e4m3", "float4_e2m1")
            for method in ANY_METHOD if searched else CLOSED:
                check(fill.astype(np.float32), QuantSpec(fmt, granularity, symmetry, method))


ELEMENTS = {
    "float32": (np.dtype(np.float32), st.floats(width=32, allow_nan=False, allow_infinity=False)),
    "float16": (np.dtype(np.float16), st.floats(width=16, allow_nan=False, allow_infinity=False)),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), st.floats(-(2.0**127), 2.0**127, width=32)),
}


def tensors(name):
    dtype, elements = ELEMENTS[name]
    plain = np.float32 if name == "bfloat16" else dtype
    return hnp.arrays(plain, st.sampled_from([(2, 8), (1, 4), (3, 12)]), elements=elements).map(
        lambda x: x.astype(dtype)
    )


@pytest.mark.parametrize("dtype", ELEMENTS)
@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_arbitrary_tensors(dtype, data):
    x = data.draw(tensors(dtype))
    spec = QuantSpec(
        parse_format(data.draw(st.sampled_from(ANY_FORMAT))),
        data.draw(st.sampled_from(list(GRANULARITIES.values()))),
        data.draw(st.sampled_from(WHOLE)),
        data.draw(st.sampled_from(ANY_METHOD)),
    )
    check(x, spec)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_torch_gives_the_same_ranges(data):
    x = data.draw(tensors("float32"))
    spec = QuantSpec(
        parse_format("uint8"), data.draw(st.sampled_from(list(GRANULARITIES.values()))), "asymmetric",
        data.draw(st.sampled_from(ANY_METHOD)),
    )  # fmt: skip
    ours, theirs = ranges_of(x, spec), ranges_of(torch.from_numpy(x), spec)
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


# ---- zero points that are real numbers


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES)
def test_free_zero_points_of_degenerate_tensors_leave_at_most_half_a_step(granularity, fill):
    x = fill.astype(np.float32)
    for method in ("minmax", "mse", "hqq"):
        spec = QuantSpec("uint4", granularity, "float_zero_point", RangeMethod(method))
        enc = encode(*choose_range_of(x, spec, granularity), spec, granularity)
        found = fake_quantize(x, enc)
        assert np.isfinite(found).all() and np.isfinite(enc.scale).all() and (enc.scale > 0).all()
        if method == "minmax":
            step = granularity.spread(enc.scale, x.shape).astype(np.float64)
            moved = np.abs(found.astype(np.float64) - x).reshape(granularity.view_shape(x.shape))
            assert (moved <= (0.501 + 2e-3 * (np.abs(x).max() > 3e38)) * step + 1e-6 * np.abs(x).max()).all()


def test_free_zero_points_hold_ends_of_the_range_that_zero_is_not_in():
    x = np.float32([[5.0, 5.25, 5.5, 5.75], [-2.0, -2.0, -2.0, -2.0]])
    spec = QuantSpec("uint2", PerChannel(0), "float_zero_point")
    enc = encode(*choose_range_of(x, spec, PerChannel(0)), spec, PerChannel(0))
    assert np.array_equal(fake_quantize(x, enc), x)
    assert enc.zero.tolist() == [-20.0, 1.0] and not enc.symmetric and enc.min.tolist() == [5.0, -2.0]
    theirs = fake_quantize(torch.from_numpy(x), enc)
    assert np.array_equal(theirs.numpy(), x)


def test_search_of_free_zero_points_beats_whole_ones_and_half_quadratic_lies_between():
    """Weights of a normal distribution, 4 and 3 bits in groups of 32, which do not divide the rows."""
    x = np.random.default_rng(0).standard_normal((64, 100)).astype(np.float32)
    where = PerBlock(32, 1, 0)

    def noise(bits, symmetry, method):
        spec = QuantSpec(f"uint{bits}", where, symmetry, RangeMethod(method))
        return float(np.square(fake_quantize(x, encode(*choose_range_of(x, spec, where), spec, where)) - x).sum())

    for bits in (4, 3):
        whole, free = noise(bits, "asymmetric", "mse"), noise(bits, "float_zero_point", "mse")
        plain, half = noise(bits, "float_zero_point", "minmax"), noise(bits, "float_zero_point", "hqq")
        assert free < 0.95 * whole and free < 0.9 * plain and free < half < 1.02 * plain


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"format": "int4"}, "int4 has none"),
        ({"format": "float8_e4m3"}, "float8_e4m3 has none"),
        ({"scale_format": "float16"}, "scales of float16 go with none"),
        ({"fixed_range": (0.0, 1.0)}, "chosen of weights at hand"),
    ],
)
def test_free_zero_points_are_refused_where_nothing_computes_with_them(change, problem):
    with pytest.raises(ConfigError, match=f"zero points that are real numbers: .*{problem}"):
        QuantSpec(**{"format": "uint4", "symmetry": "float_zero_point", **change})
