"""Quantization by grids that are tensors: the values of the reference, and gradients for all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitwright.core.numerics import affine
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT8_E4M3, IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.errors import FormatError, GranularityError
from bitwright.torch.quantizers import functional


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
