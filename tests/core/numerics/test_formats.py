"""Number formats: the ends of every grid, names that read back, refusals that help."""

import ml_dtypes
import numpy as np
import pytest

from bitwright.core.numerics.formats import FLOAT_FORMATS, FloatFormat, IntFormat, parse_format
from bitwright.errors import FormatError

ML_DTYPES = {
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float6_e2m3": ml_dtypes.float6_e2m3fn,
    "float6_e3m2": ml_dtypes.float6_e3m2fn,
    "float4_e2m1": ml_dtypes.float4_e2m1fn,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


@pytest.mark.parametrize("bits", range(2, 33))
def test_integer_grids_have_two_to_the_bits_codes(bits):
    signed, unsigned = IntFormat(bits), IntFormat(bits, signed=False)
    assert signed.steps == unsigned.steps == 2**bits - 1
    assert (unsigned.qmin, signed.qmin + signed.qmax) == (0, -1)
    narrow = IntFormat(bits, narrow=True)
    assert narrow.qmin == -narrow.qmax and narrow.qmax == signed.qmax


@pytest.mark.parametrize(
    "fmt",
    [IntFormat(8), IntFormat(4, signed=False), IntFormat(16, narrow=True), *FLOAT_FORMATS.values()],
    ids=lambda f: f.name,
)
def test_names_read_back(fmt):
    assert parse_format(fmt.name) == fmt
    assert parse_format(fmt) is fmt


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_float_formats_agree_with_ml_dtypes(name):
    fmt, info = FLOAT_FORMATS[name], ml_dtypes.finfo(ML_DTYPES[name])
    assert fmt.max == float(info.max)
    assert 2.0**fmt.min_exponent == float(info.smallest_normal)
    assert 2.0 ** (fmt.min_exponent - fmt.mantissa_bits) == float(info.smallest_subnormal)
    assert fmt.bits == info.bits


@pytest.mark.parametrize(
    "alias, name", [("FP8", "float8_e4m3"), ("bf16", "bfloat16"), ("mxfp4", None), ("e2m1", "float4_e2m1")]
)
def test_aliases(alias, name):
    if name is None:
        with pytest.raises(FormatError, match="did you mean.*fp4"):
            parse_format(alias)
    else:
        assert parse_format(alias).name == name


@pytest.mark.parametrize("bits", [1, 33, 8.0, True, "8"])
def test_impossible_widths_are_refused_with_a_remedy(bits):
    with pytest.raises(FormatError, match="not a bit width between 2 and 32.*use 4, 8 or 16 bits"):
        IntFormat(bits)


def test_an_unsigned_grid_cannot_be_narrow():
    with pytest.raises(FormatError, match="only a signed grid can be narrow.*drop narrow=True"):
        IntFormat(8, signed=False, narrow=True)


def test_formats_are_values():
    assert IntFormat(8) == parse_format("int8") and hash(IntFormat(8)) == hash(parse_format("int8"))
    assert FloatFormat("float16", 5, 10, 65504.0, scaled=False) == parse_format("fp16")
