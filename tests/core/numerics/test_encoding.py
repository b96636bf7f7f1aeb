"""Encodings: values that compare bit for bit, cannot be changed, and know their ends."""

import numpy as np
import pytest

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT8_E4M3, IntFormat
from bitwright.core.numerics.granularity import PerChannel


def encoding(scale=0.5, zero_point=3, fmt=IntFormat(8), **more):  # noqa: B008
    return Encoding(fmt, np.float32(scale), np.int32(zero_point), **more)


def test_ends_are_those_of_the_grid():
    assert (float(encoding().min), float(encoding().max)) == (-65.5, 62.0)
    assert float(Encoding(FLOAT8_E4M3, np.float32(2), np.int32(0)).max) == 896
    assert float(Encoding(FLOAT8_E4M3, np.float32(2), np.int32(0)).min) == -896


def test_equal_means_every_bit():
    assert encoding() == encoding() and hash(encoding()) == hash(encoding())
    assert encoding() != encoding(scale=np.nextafter(np.float32(0.5), np.float32(1)))
    assert encoding() != encoding(zero_point=4)
    assert encoding() != encoding(fmt=IntFormat(8, narrow=True))
    assert encoding() != "int8"
    one = Encoding(IntFormat(8), np.float32([0.5]), np.int32([3]), PerChannel(0))
    assert one != Encoding(IntFormat(8), np.float32([0.5]), np.int32([3]), PerChannel(1))


def test_an_encoding_does_not_follow_the_array_it_was_made_from():
    scale = np.float32([1, 2])
    enc = Encoding(IntFormat(8), scale, np.int32([0, 0]), PerChannel(0))
    scale[0] = 7
    assert enc.scale.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        enc.scale[0] = 7


@pytest.mark.parametrize(
    "fmt, zero_point, symmetric",
    [
        (IntFormat(8), 0, True),
        (IntFormat(8), 1, False),
        (IntFormat(8, signed=False), 0, True),
        (IntFormat(8, signed=False), 128, True),
        (IntFormat(8, signed=False), 127, False),
        (FLOAT8_E4M3, 0, True),
    ],
)
def test_symmetric_means_zero_in_the_middle_or_at_the_end(fmt, zero_point, symmetric):
    assert encoding(zero_point=zero_point, fmt=fmt).symmetric is symmetric


def test_zero_points_of_32_bits_fit():
    enc = Encoding(IntFormat(32, signed=False), np.float32(1), np.int64(2**32 - 1))
    assert int(enc.zero_point) == 2**32 - 1 and enc.zero_point.dtype == np.int64
    assert encoding().zero_point.dtype == np.int32


def test_text_names_format_and_scale():
    assert repr(encoding()) == "Encoding(int8, scale=0.5, zero_point=3)"
    many = Encoding(IntFormat(4), np.float32([0.5, 2]), np.int32([0, 0]), PerChannel(0))
    assert repr(many) == "Encoding(int4, PerChannel(axis=0), scale=0.5..2 (2,))"
