"""Granularities: parameter shapes, views that broadcast, refusals that help."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.errors import GranularityError

SHAPES = {
    "tensor": (PerTensor(), (8, 3, 5, 5), ()),
    "channel 0": (PerChannel(0), (8, 3, 5, 5), (8,)),
    "channel 1": (PerChannel(1), (16, 10), (10,)),
    "last channel": (PerChannel(-1), (16, 10), (10,)),
    "block of rows": (PerBlock(32, 1, 0), (8, 64), (8, 2)),
    "block of columns": (PerBlock(32, 0, 1), (64, 8), (2, 8)),
    "block of a convolution": (PerBlock(32, 1, 0), (8, 64, 3, 3), (8, 2, 1, 1)),
    "block without channels": (PerBlock(4, 0), (8, 3), (2, 1)),
    "block of stacked matrices": (PerBlock(32, 1, (0, 2)), (4, 64, 8), (4, 2, 8)),
    "block of picked rows": (PerBlock(32, -1, (0, 1)), (4, 8, 64), (4, 8, 2)),
}


@pytest.mark.parametrize("granularity, shape, expected", SHAPES.values(), ids=SHAPES)
def test_parameter_shapes(granularity, shape, expected):
    assert granularity.param_shape(shape) == expected


@pytest.mark.parametrize("granularity, shape, expected", SHAPES.values(), ids=SHAPES)
def test_parameters_broadcast_against_the_view(granularity, shape, expected):
    view, params = granularity.view_shape(shape), granularity.broadcast_shape(shape)
    assert np.broadcast_shapes(view, params) == view
    assert np.prod(view) == np.prod(shape) and np.prod(params) == np.prod(expected)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128])
def test_the_largest_block_that_divides_is_suggested_and_fits(size):
    shape = (4, 3 * size)
    with pytest.raises(GranularityError, match=rf"use PerBlock\({size}\),"):
        PerBlock(2 * size, 1, 0).param_shape(shape)
    assert PerBlock(size, 1, 0).param_shape(shape) == (4, 3)


def test_channel_axes_have_one_spelling():
    assert PerBlock(32, 1, (2, 0)) == PerBlock(32, 1, (0, 2, 2)) != PerBlock(32, 1, 0)
    assert PerBlock(32, 1, (0,)) == PerBlock(32, 1, 0) and PerBlock(32, 1, ()) == PerBlock(32, 1)
    assert [PerBlock(32, 1, c).channel_axes for c in (None, 0, (2, 0))] == [(), (0,), (0, 2)]
    with pytest.raises(GranularityError, match="axis 3 does not exist"):
        PerBlock(32, 1, (0, 3)).param_shape((4, 64, 8))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_block_covers_neighbours_of_one_channel(channels, blocks, size):
    granularity, shape = PerBlock(size, 1, 0), (channels, blocks * size)
    numbers = np.arange(channels * blocks).reshape(granularity.param_shape(shape))
    spread = np.broadcast_to(
        numbers.reshape(granularity.broadcast_shape(shape)), granularity.view_shape(shape)
    ).reshape(shape)
    row, column = np.indices(shape)
    assert (spread == row * blocks + column // size).all()


@pytest.mark.parametrize(
    "granularity, channel, block, expected",
    [
        (PerTensor(), 0, 1, PerTensor()),
        (PerChannel(), 0, 1, PerChannel(0)),
        (PerChannel(2), 0, 1, PerChannel(2)),
        (PerChannel(), None, None, PerTensor()),
        (PerBlock(32), 1, 0, PerBlock(32, 0, 1)),
        (PerBlock(32), None, None, PerTensor()),
        (PerBlock(32, 2), 0, 1, PerBlock(32, 2)),
    ],
)
def test_open_axes_come_from_the_operator(granularity, channel, block, expected):
    assert granularity.resolve(channel, block) == expected


@pytest.mark.parametrize(
    "granularity, shape, message",
    [
        (PerChannel(), (4, 4), "no axis yet.*PerChannel"),
        (PerBlock(4), (4, 4), "no axis yet.*PerBlock"),
        (PerChannel(2), (4, 4), "axis 2 does not exist in a tensor of rank 2"),
        (PerBlock(32, 1, 0), (4, 48), "axis 1 has 48 elements, which blocks of 32 do not divide.*PerBlock.16"),
        (PerBlock(2, 0), (5, 4), "axis 0 has 5 elements.*PerChannel"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_site_and_a_remedy(granularity, shape, message):
    with pytest.raises(GranularityError, match=f"^conv1.weight: .*{message}"):
        granularity.param_shape(shape, "conv1.weight")


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_an_empty_block_is_refused(size):
    with pytest.raises(GranularityError, match="needs at least one element.*use 16, 32"):
        PerBlock(size)
