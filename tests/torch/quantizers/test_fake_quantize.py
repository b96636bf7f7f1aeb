"""Fast quantization equals the reference bit for bit; grids that are tensors have gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.core.numerics import affine
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT8_E4M3, IntFormat, parse_format
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.errors import FormatError, GranularityError
from bitwright.torch.quantizers import functional
from bitwright.torch.quantizers.fake_quantize import fake_quantize, is_fast, make_grid


def bits(x: torch.Tensor) -> np.ndarray:
    return x.detach().contiguous().numpy().view(np.int32)


def apply(x: torch.Tensor, encoding: Encoding, overwrite: bool = False) -> torch.Tensor:
    grid = make_grid(encoding, tuple(x.shape), x.device) if is_fast(encoding) else None
    return fake_quantize(x, encoding, grid, overwrite=overwrite)


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


@pytest.mark.parametrize("bits", [2, 4, 8, 16, 24])
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_values_are_those_of_the_reference(bits, signed):
    fmt = IntFormat(bits, signed)
    x = torch.randn(2000, generator=torch.Generator().manual_seed(bits)) * 3
    scale, zero_point = affine.choose_qparams(-2.0, 1.5, fmt, symmetric=False)
    encoding = Encoding(fmt, scale, zero_point, PerTensor())
    s, z = torch.tensor(float(scale)), torch.tensor(float(zero_point), dtype=torch.float64)
    assert functional.quantize(x, s, z, fmt.qmin, fmt.qmax).long().equal(affine.quantize(x, encoding).long())
    assert functional.quantize_dequantize(x, s, z, fmt.qmin, fmt.qmax).equal(affine.fake_quantize(x, encoding))


@pytest.mark.parametrize(
    "granularity, params, blocks",
    [
        pytest.param(PerChannel(0), (8, 1), None, id="per-channel"),
        pytest.param(PerBlock(16, 1, 0), (8, 4), (1, 16), id="per-block"),
    ],
)
def test_channels_and_blocks_are_those_of_the_reference(granularity, params, blocks):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    scale = np.linspace(0.01, 0.05, int(np.prod(params)), dtype=np.float32).reshape(granularity.param_shape(x.shape))
    encoding = Encoding(IntFormat(4), scale, np.zeros_like(scale, np.int32), granularity)
    s = torch.from_numpy(scale.copy()).reshape(params)
    got = functional.quantize_dequantize(x, s, torch.zeros(params), -8, 7, blocks)
    assert got.equal(affine.fake_quantize(x, encoding))


def test_gradient_of_the_scale_is_that_of_learned_step_sizes():
    """Esser et al. 2020, eq. 3: round(x/s) - x/s inside the grid, its ends outside."""
    x = torch.tensor([0.3, 0.9, 10.0, -10.0])
    scale = torch.tensor(0.5, requires_grad=True)
    for element, value in enumerate(x):
        (grad,) = torch.autograd.grad(
            functional.quantize_dequantize(x, scale, torch.tensor(0.0), -8, 7)[element], scale
        )
        v = value / 0.5
        expected = v.round() - v if -8 <= v <= 7 else v.clamp(-8, 7)
        assert torch.isclose(grad, expected)


def test_gradient_of_the_input_is_one_inside_the_grid_and_zero_outside():
    x = torch.tensor([0.3, 100.0], requires_grad=True)
    functional.quantize_dequantize(x, torch.tensor(0.5), torch.tensor(0.0), -8, 7).sum().backward()
    assert x.grad.tolist() == [1.0, 0.0]


def test_blocks_along_several_axes():
    x = torch.arange(16.0).reshape(4, 4)
    assert functional.block_rows(x, (2, 2), (2, 2)).tolist()[1] == [2.0, 3.0, 6.0, 7.0]
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    out = functional.quantize_dequantize(x, scale, torch.zeros(2, 2), -128, 127, (2, 2))
    assert out[0].tolist() == [0, 1, 2, 4] and out[3].tolist() == [12, 12, 16, 16]


def test_ends_of_a_range_become_the_ends_of_the_grid():
    lo, hi = torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 5.1])
    scale, zero_point = functional.grid_of_range(lo, hi, 0, 255, symmetric=False)
    assert torch.allclose((0 - zero_point) * scale, lo, atol=0.02)
    assert torch.allclose((255 - zero_point) * scale, hi, atol=0.02)
    assert functional.grid_of_range(lo, hi, -128, 127, symmetric=True)[1].tolist() == [0.0, 0.0]
    assert functional.grid_of_range(lo, hi, 0, 255, symmetric=True)[1].tolist() == [128.0, 128.0]


def test_block_scales_become_multiples_of_their_channels():
    scale = torch.tensor([[0.8, 0.31, 0.001], [0.4, 0.4, 0.2]])
    rounded, unit = functional.grouped_scale(scale, (1, -1), 16)
    assert unit.shape == (2, 1)
    assert torch.allclose(rounded / unit, torch.tensor([[16.0, 6.0, 1.0], [16.0, 16.0, 8.0]]))


def test_float_formats_are_those_of_the_reference():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), requires_grad=True)
    encoding = Encoding(FLOAT8_E4M3, np.float32(0.01), np.int32(0), PerTensor())
    got = functional.float_quantize_dequantize(x, FLOAT8_E4M3, torch.tensor(0.01))
    assert got.equal(affine.fake_quantize(x.detach(), encoding))
    got.sum().backward()
    assert set(x.grad.tolist()) <= {0.0, 1.0} and x.grad.sum() > 900


def test_what_does_not_fit_is_refused():
    x, zero = torch.zeros(4, 6), torch.tensor(0.0)
    with pytest.raises(GranularityError, match="2 blocks of 4 do not fill"):
        functional.quantize(x, torch.ones(4, 2), torch.zeros(4, 2), 0, 15, (1, 4))
    with pytest.raises(GranularityError, match="does not broadcast"):
        functional.quantize(x, torch.ones(5), torch.zeros(5), 0, 15)
    with pytest.raises(GranularityError, match="do not fit a tensor"):
        functional.quantize(x, torch.ones(4), torch.zeros(4), 0, 15, (1, 6))
    with pytest.raises(FormatError, match="qmin=3 is not below qmax=3"):
        functional.quantize(x, torch.tensor(1.0), zero, 3, 3)
