"""Layers as matrix products: the rows and matrices give what torch's own functions give."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.methods.rounding.matrices import Grid, Layer, grid_encoding, moments, sample_rows


def conv(shape: tuple[int, ...], group: int = 1, pads=None, strides=None, dilations=None) -> Layer:
    n = len(shape) - 2
    attrs = {
        "group": group, "pads": pads or (0,) * 2 * n, "strides": strides or (1,) * n, "dilations": dilations or (1,) * n
    }  # fmt: skip
    return Layer("conv", "conv", "Conv", attrs, shape, "conv.weight")


CONVS = [
    pytest.param(conv((6, 4, 3)), (2, 4, 9), id="1d"),
    pytest.param(conv((6, 4, 3, 3), pads=(1, 1, 1, 1)), (2, 4, 7, 5), id="2d-padded"),
    pytest.param(conv((6, 2, 3, 2), 2, (0, 1, 2, 1), (2, 1), (1, 2)), (2, 4, 8, 8), id="grouped-strided-dilated"),
    pytest.param(conv((4, 1, 3, 3), 4, (1, 1, 1, 1)), (3, 4, 6, 6), id="depthwise"),
    pytest.param(conv((3, 2, 2, 3, 2), strides=(1, 2, 1)), (2, 2, 4, 5, 4), id="3d"),
]


@pytest.mark.parametrize("layer, shape", CONVS)
def test_convolution(layer: Layer, shape):
    x, w = torch.randn(shape), torch.randn(layer.shape)
    n = len(shape) - 2
    pads = [p for i in reversed(range(n)) for p in (layer.attrs["pads"][i], layer.attrs["pads"][n + i])]
    function = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    expected = function(
        F.pad(x, pads), w, None, layer.attrs["strides"], 0, layer.attrs["dilations"], layer.attrs["group"]
    )
    (rows,) = layer.rows(x)
    assert rows.shape[1] == layer.positions(x)
    found = rows @ layer.matrix(w).transpose(1, 2)  # [G, N * L, O]
    found = found.reshape(layer.groups, shape[0], -1, layer.shape[0] // layer.groups).permute(1, 0, 3, 2)
    torch.testing.assert_close(found.reshape(expected.shape), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(layer.tensor(layer.matrix(w)), w)
    places = torch.arange(0, layer.positions(x), 3)
    assert torch.equal(torch.cat(list(layer.rows_at(x, places)), 1), rows[:, places])
    assert layer.fan_in == rows.shape[2]


@pytest.mark.parametrize(
    "layer",
    [
        Layer("l", "l", "Gemm", {"transB": 1}, (5, 7), "l.weight"),
        Layer("l", "l", "Gemm", {"transB": 0}, (7, 5), "l.weight"),
        Layer("l", "l", "MatMul", {}, (7, 5), "l.weight"),
    ],
    ids=["gemm-transposed", "gemm", "matmul"],
)
def test_linear(layer: Layer):
    x, w = torch.randn(2, 3, 7), torch.randn(layer.shape)
    (rows,) = layer.rows(x)
    places = torch.tensor([1, 4, 5])
    assert torch.equal(next(layer.rows_at(x, places)), rows[:, places]) and layer.fan_in == 7
    expected = x @ (w.t() if layer.attrs.get("transB") else w)
    torch.testing.assert_close((rows @ layer.matrix(w).transpose(1, 2)).reshape(expected.shape), expected)
    assert torch.equal(layer.tensor(layer.matrix(w)), w)


@pytest.mark.parametrize("group", [1, 2])
def test_transposed_convolution_is_a_product_before_its_outputs_are_added_up(group):
    layer = Layer("t", "t", "ConvTranspose", {"group": group}, (4, 3, 2, 2), "t.weight")
    x, w = torch.randn(2, 4, 5, 5), torch.randn(layer.shape)
    (rows,) = layer.rows(x)
    places = torch.tensor([0, 7, 24, 25, 49])
    assert torch.equal(next(layer.rows_at(x, places)), rows[:, places]) and layer.fan_in == 4 // group
    found = rows @ layer.matrix(w).transpose(1, 2)  # [G, N * L, O * kernel]
    columns = found.reshape(group, 2, 25, -1).permute(1, 0, 3, 2).reshape(2, -1, 25)
    folded = F.fold(columns, (10, 10), 2, stride=2)  # kernel = stride: nothing overlaps
    torch.testing.assert_close(folded, F.conv_transpose2d(x, w, stride=2, groups=group), atol=1e-5, rtol=1e-4)
    assert torch.equal(layer.tensor(layer.matrix(w)), w)


GRANULARITIES = [
    pytest.param(PerTensor(), (), id="per-tensor"),
    pytest.param(PerChannel(0), (6,), id="per-channel"),
    pytest.param(PerBlock(2, 1, 0), (6, 2, 1, 1), id="per-block"),
]


@pytest.mark.parametrize("granularity, shape", GRANULARITIES)
def test_a_grid_is_its_encoding(granularity, shape):
    layer = conv((6, 4, 3, 3))
    scale = np.float32(np.random.rand(*shape) + 0.1)
    encoding = Encoding(IntFormat(4, signed=False), scale, np.full(shape, 5), granularity)
    w = torch.randn(layer.shape)
    grid = Grid.of(encoding, layer, w.device)
    found = layer.tensor(grid.values(grid.nearest(layer.matrix(w))))
    assert torch.equal(found, fake_quantize(w, encoding))
    assert torch.equal(fake_quantize(found, encoding), found)  # on the grid: nothing moves again
    assert grid_encoding(grid, encoding, layer) == encoding


def test_moments_and_samples_see_every_row():
    layer = conv((4, 3, 3, 3), pads=(1, 1, 1, 1))
    batches = [(torch.randn(2, 3, 5, 5), torch.randn(2, 3, 5, 5)) for _ in range(3)]
    real = torch.cat([next(layer.rows(a)) for a, _ in batches], 1)
    quantized = torch.cat([next(layer.rows(b)) for _, b in batches], 1)
    found = moments(layer, [(*pair, 50) for pair in batches], torch.Generator())
    assert found.rows == 150
    torch.testing.assert_close(
        found.own, (quantized.double().transpose(1, 2) @ quantized.double()), rtol=1e-5, atol=1e-3
    )
    crossed = real.double().transpose(1, 2) @ quantized.double()
    torch.testing.assert_close(found.cross, crossed, rtol=1e-5, atol=1e-3)
    places = (torch.zeros(1, 150, 27), torch.zeros(1, 150, 27))
    sample_rows(layer, batches, 150, 150, torch.Generator(), places)
    assert torch.equal(places[0], real) and torch.equal(places[1], quantized)
    few = (torch.zeros(1, 10, 27), torch.zeros(1, 10, 27))
    sample_rows(layer, batches, 150, 10, torch.Generator().manual_seed(1), few)
    hits = (few[0][0][:, None] == real[0][None]).all(2)
    assert hits.any(1).all() and torch.equal(hits, (few[1][0][:, None] == quantized[0][None]).all(2))


def test_moments_of_drawn_rows_come_near_those_of_all_and_each_batch_has_its_share():
    layer, generator = conv((4, 3, 3, 3), pads=(1, 1, 1, 1)), torch.Generator().manual_seed(0)
    smooth = F.avg_pool2d(torch.randn(12, 3, 34, 34, generator=generator), 5, 1)
    real, quantized = smooth, smooth + 0.05 * torch.randn(smooth.shape, generator=generator)
    parts = [(real[:8], quantized[:8], 2400 * 8 / 12), (real[8:], quantized[8:], 2400 * 4 / 12)]
    few = moments(layer, parts, torch.Generator().manual_seed(1))
    every = moments(layer, [(a, b, math.inf) for a, b, _ in parts], torch.Generator())
    assert (few.rows, every.rows) == (2400, 12 * 30 * 30)
    for found, wanted in ((few.own, every.own), (few.cross, every.cross)):
        off = found / few.rows - wanted / every.rows
        assert float(off.norm()) < 0.05 * float((wanted / every.rows).norm())
    again = moments(layer, parts, torch.Generator().manual_seed(1))
    assert torch.equal(few.own, again.own) and torch.equal(few.cross, again.cross)
