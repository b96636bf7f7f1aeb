"""The fast path equals the reference bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.core.numerics import affine
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat, parse_format
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.torch.quantizers.fake_quantize import fake_quantize, is_fast, make_grid


def bits(x: torch.Tensor) -> np.ndarray:
    return x.detach().contiguous().numpy().view(np.int32)


def apply(x: torch.Tensor, encoding: Encoding, overwrite: bool = False) -> torch.Tensor:
    grid = make_grid(encoding, tuple(x.shape), x.device) if is_fast(encoding) else None
    return fake_quantize(x, encoding, grid, overwrite=overwrite)


@pytest.mark.slow_variants("fp8")
@pytest.mark.parametrize(
    "name",
    [
        "int2",
        "int4",
        "uint4",
        "int8",
        "uint8",
        "int8n",
        "int13",
        "int16",
        "uint16",
        "int24",
        "uint32",
        "fp8",
        "e5m2",
        "fp4",
    ],
)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), log_scale=st.floats(-20, 20), spread=st.floats(0.1, 300))
def test_per_tensor_equals_the_reference(name: str, seed: int, log_scale: float, spread: float) -> None:
    rng = np.random.default_rng(seed)
    fmt = parse_format(name)
    scale = np.float32(np.exp(log_scale))
    zero_point = 0
    if isinstance(fmt, IntFormat) and not fmt.signed:
        zero_point = int(rng.integers(fmt.qmin, min(fmt.qmax, 60000)))
    encoding = Encoding(fmt, scale, np.int64(zero_point))
    x = (rng.standard_normal(512) * spread * scale).astype(np.float32)
    x[:64] = (np.arange(64) - 31.5).astype(np.float32) * scale  # exact ties
    expected = affine.fake_quantize(x, encoding)
    for overwrite in (False, True):
        got = apply(torch.from_numpy(x.copy()), encoding, overwrite)
        assert np.array_equal(bits(got), expected.view(np.int32))
    tracked = torch.from_numpy(x.copy()).requires_grad_()
    assert np.array_equal(bits(apply(tracked, encoding)), expected.view(np.int32))


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [
        (PerChannel(0), (6, 4, 3, 3)),
        (PerChannel(1), (5, 7)),
        (PerChannel(3), (2, 3, 4, 5)),
        (PerBlock(2, 1, 0), (6, 4, 3, 3)),
        (PerBlock(4, 0, 1), (8, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_every_granularity_and_dtype_equals_the_reference(granularity, shape, dtype) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    params = granularity.param_shape(shape)
    encoding = Encoding(
        IntFormat(4), rng.random(params).astype(np.float32) + 0.1, rng.integers(-3, 3, params), granularity
    )
    x = torch.from_numpy(rng.standard_normal(shape)).to(dtype)
    assert torch.equal(apply(x, encoding), affine.fake_quantize(x, encoding))
    assert apply(x, encoding).dtype == dtype


def test_small_negatives_become_positive_zero() -> None:
    encoding = Encoding(IntFormat(8), np.float32(1.0), np.int32(0))
    assert not torch.signbit(apply(torch.tensor([-0.25, -0.0]), encoding)).any()


def test_nan_stays_visible() -> None:
    encoding = Encoding(IntFormat(8), np.float32(1.0), np.int32(0))
    assert torch.isnan(apply(torch.tensor([float("nan")]), encoding)).all()


def test_the_gradient_passes_inside_the_range_and_stops_outside() -> None:
    encoding = Encoding(IntFormat(4), np.float32(0.5), np.int32(0), PerTensor())
    x = torch.tensor([-10.0, -4.0, 0.3, 3.5, 3.9, 100.0], requires_grad=True)
    apply(x, encoding).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerBlock(2, 1, 0)], ids=str)
@pytest.mark.parametrize("zero_points", ["equal", "different"])
def test_gradients_of_every_granularity_are_those_of_the_definition(granularity, zero_points) -> None:  # type: ignore[no-untyped-def]
    generator = np.random.default_rng(1)
    shape = (4, 6, 3)
    params = granularity.param_shape(shape)
    zero_point = np.zeros(params) if zero_points == "equal" else generator.integers(-3, 4, params)
    encoding = Encoding(IntFormat(4), generator.random(params).astype(np.float32) + 0.2, zero_point, granularity)
    x = torch.from_numpy(generator.standard_normal(shape).astype(np.float32) * 8).requires_grad_()
    weight = torch.from_numpy(generator.standard_normal(shape).astype(np.float32))
    (apply(x, encoding) * weight).sum().backward()
    codes = torch.from_numpy(
        np.rint(
            x.detach().numpy().reshape(granularity.view_shape(shape))
            / encoding.scale.reshape(granularity.broadcast_shape(shape))
        )
        + encoding.zero_point.reshape(granularity.broadcast_shape(shape))
    )
    inside = ((codes >= -8) & (codes <= 7)).reshape(shape)
    assert 0.1 < inside.float().mean() < 1.0
    assert torch.equal(x.grad, weight * inside)


def test_strided_input_is_read_correctly() -> None:
    encoding = Encoding(IntFormat(8), np.float32(0.1), np.int32(0))
    x = torch.randn(4, 6).t()
    assert torch.equal(apply(x, encoding), apply(x.contiguous(), encoding))
