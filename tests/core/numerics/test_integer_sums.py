"""The bound of an integer kernel's sum, and the int32 bias grid that keeps it from wrapping."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT16, IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.integer_sums import (
    BIAS_LIMIT,
    INT32_MAX,
    derive_bias_encoding,
    fake_quantize_bias,
    floor_weight_scale,
    largest_sum,
    quantize_bias,
    underivable,
)
from bitwright.errors import EncodingsError, RangeError

X = Encoding(IntFormat(8, signed=False), np.float32(0.02), np.int32(3))


def weight(scale: object, granularity: object = None, bits: int = 8) -> Encoding:
    scale = np.asarray(scale, np.float32)
    granularity = granularity or (PerChannel(0) if scale.ndim else PerTensor())
    return Encoding(IntFormat(bits), scale, np.zeros(scale.shape, np.int32), granularity)


def test_scale_is_the_float32_product_per_channel() -> None:
    w = weight([0.1, 0.003])
    found = derive_bias_encoding(X, w, [1.0, -2.0])
    assert found == Encoding(IntFormat(32), np.float32(0.02) * w.scale, np.zeros(2, np.int32), PerChannel(0))


def test_per_tensor_weight_gives_one_bias_scale() -> None:
    assert derive_bias_encoding(X, weight(0.5), [1.0, 2.0, 3.0]).scale.shape == ()


def test_grouped_transposed_convolution_has_one_scale_per_output_channel() -> None:
    grouped = weight(np.float32([[0.1, 0.2], [0.3, 0.4]]).reshape(2, 2, 1, 1), PerBlock(3, axis=0, channel_axis=1))
    np.testing.assert_array_equal(
        derive_bias_encoding(X, grouped, np.ones(4)).scale, np.float32(0.02) * np.float32([0.1, 0.2, 0.3, 0.4])
    )


def test_bias_is_within_half_a_step() -> None:
    bias = np.random.default_rng(0).normal(size=64).astype(np.float32)
    encoding = derive_bias_encoding(X, weight(np.full(64, 0.01)), bias)
    assert np.abs(fake_quantize_bias(bias, encoding) - bias).max() <= 0.5001 * encoding.scale.max()


def test_a_scale_that_fits_is_left_alone() -> None:
    w = weight([0.1, 0.2])
    assert floor_weight_scale(w, X, [5.0, -7.0]) is w


def test_only_the_channel_that_overflows_is_raised() -> None:
    w = weight([0.1, 1e-14])
    floored = floor_weight_scale(w, X, [1.0, -1.0])
    assert floored.scale[0] == w.scale[0] and floored.scale[1] > w.scale[1]
    assert np.abs(quantize_bias([1.0, -1.0], derive_bias_encoding(X, floored, [1.0, -1.0]))).max() <= BIAS_LIMIT


def test_the_limit_is_half_of_int32() -> None:
    x, w = Encoding(IntFormat(8), np.float32(0.5), np.int32(0)), weight([0.25])
    assert floor_weight_scale(w, x, [2.0**27]) is w, "2**30 steps of 1/8 fit"
    floored = floor_weight_scale(w, x, [np.nextafter(np.float32(2.0**27), np.float32(np.inf))])
    assert floored.scale[0] == np.nextafter(np.float32(0.25), np.float32(1))


def test_the_widest_input_and_weight_that_allow_a_bias() -> None:
    def why(input_bits: int, weight_bits: int) -> str | None:
        x = Encoding(IntFormat(input_bits, signed=False), np.float32(0.02), np.int32(0))
        return underivable(x, weight(0.1, bits=weight_bits), 1)

    assert why(16, 8) is None
    for bits in ((17, 8), (16, 9)):
        assert "more than 16 bits or its weight more than 8" in (why(*bits) or "")


@given(
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=5),
    st.floats(2.0**-90, 2.0**60, width=32),
    st.floats(2.0**-100, 2.0**60, width=32),
)
def test_flooring_always_makes_the_bias_fit_and_is_idempotent(bias: list[float], s_x: float, s_w: float) -> None:
    x = Encoding(IntFormat(8), np.float32(s_x), np.int32(0))
    for w in (weight(np.full(len(bias), s_w)), weight(s_w)):
        floored = floor_weight_scale(w, x, bias)
        assert floor_weight_scale(floored, x, bias) is floored
        assert (floored.scale >= w.scale).all()
        codes = quantize_bias(bias, derive_bias_encoding(x, floored, bias)).astype(np.int64)
        assert np.abs(codes).max() <= BIAS_LIMIT


def test_a_product_below_the_normal_numbers_is_raised() -> None:
    x = Encoding(IntFormat(8), np.float32(1e-30), np.int32(0))
    floored = floor_weight_scale(weight([1e-30]), x, [0.0])
    assert derive_bias_encoding(x, floored, [0.0]).scale[0] >= np.finfo(np.float32).tiny


def test_unfloored_weight_is_refused_with_the_remedy() -> None:
    with pytest.raises(EncodingsError, match=r"conv\.bias: .*accumulator would wrap.*floor_weight_scale"):
        derive_bias_encoding(X, weight([1e-20]), [1.0], site="conv.bias")


@pytest.mark.parametrize(
    ("x", "w", "reason"),
    [
        pytest.param(Encoding(FLOAT16, np.float32(1), np.int32(0)), weight(0.1), "integer grid", id="float-input"),
        pytest.param(X, weight(0.1, bits=16), "more than 8", id="wide-weight"),
        pytest.param(X, weight([[0.1, 0.2]], PerBlock(4, 1, 0)), "several scales per output", id="blocks"),
        pytest.param(X, weight([0.1, 0.2, 0.3]), "3 scales for 1 output channels", id="wrong-count"),
        pytest.param(
            Encoding(IntFormat(8), np.ones(2), np.zeros(2), PerChannel(1)),
            weight(0.1),
            "more than one",
            id="input-axis",
        ),
    ],
)
def test_underivable_says_why(x: Encoding, w: Encoding, reason: str) -> None:
    assert reason in str(underivable(x, w, 1))
    with pytest.raises(EncodingsError, match="no int32 bias can be derived"):
        derive_bias_encoding(x, w, [1.0])


def test_a_bias_beyond_every_scale_is_refused() -> None:
    x = Encoding(IntFormat(8), np.float32(1e-30), np.int32(0))
    with pytest.raises(RangeError, match=r"b: its largest entry, 1e\+30, .*would overflow float32"):
        floor_weight_scale(weight(1.0), x, [1e30], site="b")


def test_bias_must_be_one_entry_per_channel() -> None:
    with pytest.raises(EncodingsError, match=r"shape \(2, 1\), not one entry per output channel"):
        derive_bias_encoding(X, weight(0.1), [[1.0], [2.0]])
    leading = derive_bias_encoding(X, weight([0.1, 0.2]), [[1.0, 2.0]])
    assert leading.granularity == PerChannel(1)


def test_nan_bias_names_the_channel() -> None:
    with pytest.raises(RangeError, match=r"fc\.bias: the bias of channel 1 is nan"):
        floor_weight_scale(weight(0.1), X, [1.0, np.nan], site="fc.bias")


@pytest.mark.parametrize("axis, shape", [(0, (3, 4, 5)), (1, (4, 3, 5)), (-1, (7, 3))])
def test_no_data_give_a_larger_sum(axis: int, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    weight = rng.integers(-127, 128, shape)
    rows = np.moveaxis(weight, axis, 0).reshape(shape[axis], -1)
    bound = largest_sum(weight, axis, furthest=200)
    worst = np.abs(rows @ (200 * np.sign(rows)).T).max()
    assert worst == bound
    for _ in range(20):
        assert np.abs(rows @ rng.integers(-200, 201, rows.shape[1])).max() <= bound


def test_groups_are_kept_apart() -> None:
    weight = np.ones((6, 2, 3), np.int64)
    assert largest_sum(weight, 1, furthest=1) == 18
    assert largest_sum(weight, 1, 3, furthest=1) == 6


def test_the_bound_is_that_of_int32() -> None:
    assert largest_sum(np.full((1, 66_311), -127), 0, furthest=255) <= INT32_MAX
    assert largest_sum(np.full((1, 66_312), -127), 0, furthest=255) > INT32_MAX
