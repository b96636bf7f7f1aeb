"""Encodings files: what is read back is what was written, and AIMET's layout is met key by key."""

from __future__ import annotations

import errno
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from bitwright import __version__
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT_FORMATS, FloatFormat, IntFormat, parse_format
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.errors import EncodingsError, ExportError
from bitwright.export.encodings.read import read_encodings
from bitwright.export.encodings.records import VERSIONS, GroupedScale, NamedEncoding, NotExpressed
from bitwright.export.encodings.write import compare_names, json_lines, names_error, write_encodings
from bitwright.onnx import QuantizationSimModel
from tests.support.simulations import calibrated

TENSOR = PerTensor()
ARGS = {
    "quant_scheme": "min_max",
    "param_bitwidth": 8,
    "activation_bitwidth": 8,
    "dtype": "int",
    "is_symmetric": True,
    "per_channel_quantization": True,
}


def encoding(fmt, scale, zero_point=0, granularity=TENSOR):
    scale = np.array(scale, np.float32)
    return Encoding(parse_format(fmt), scale, np.broadcast_to(zero_point, scale.shape), granularity)


def record(name, fmt, scale, zero_point=0, granularity=TENSOR, kind="param", grouped=None):
    return NamedEncoding(name, kind, encoding(fmt, scale, zero_point, granularity), grouped)


def lpbq(axis=1, decompressed_bits=8):
    """Two channels of two blocks, as in the reference's examples; ``axis`` is the block axis."""
    grouped = GroupedScale(np.array([[12, 16], [9, 3]]), np.float32([[0.004], [0.005]]), decompressed_bits)
    if axis == 0:
        grouped = GroupedScale(grouped.block.T, grouped.channel.T, decompressed_bits)
    return record("m.weight", "int4", grouped.product(), 0, PerBlock(64, axis, 1 - axis), grouped=grouped)


def write(folder, records, version="1.0.0", **options):
    return write_encodings(folder / "m.encodings", records, version, **{"quantizer_args": ARGS, **options})


def content(written):
    return json.loads(written.path.read_text())


# ---- the layout of each version ----------------------------------------------------------------------------


def f32(x):
    """The float64 that a file holds for the float32 nearest to ``x``."""
    return float(np.float32(x))


EXAMPLES = [
    record("x", "uint8", 0.02, 3, kind="activation"),
    record("c.weight", "int8", [0.01, 0.02], 0, PerChannel(0)),
    record("c.bias", "int32", [0.0002, 0.0004], 0, PerChannel(0)),
    record("l.weight", "int4", [[0.1, 0.2], [0.1, 0.3]], 0, PerBlock(64, 1, 0)),
    lpbq(),
    record("half.weight", "fp16", 1.0),
    record("w8.weight", "fp8_e4m3", [0.5, 0.25], 0, PerChannel(0)),
    record("strict.weight", "int8n", 0.01),
]


def test_version_0_6_1(tmp_path):
    written = write(tmp_path, EXAMPLES, "0.6.1", excluded_layers=["head"])

    def row(offset, bits, scale, symmetric, low, high):
        return {
            "bitwidth": bits,
            "dtype": "int",
            "is_symmetric": symmetric,
            "min": low * f32(scale),
            "max": high * f32(scale),
            "scale": f32(scale),
            "offset": offset,
        }

    top = 2**31
    assert content(written) == {
        "version": "0.6.1",
        "activation_encodings": {"x": [row(-3, 8, 0.02, "False", -3, 252)]},
        "param_encodings": {
            "c.weight": [row(-128, 8, s, "True", -128, 127) for s in (0.01, 0.02)],
            "c.bias": [row(-top, 32, s, "True", -top, top - 1) for s in (0.0002, 0.0004)],
            "half.weight": [{"bitwidth": 16, "dtype": "float"}],
            "strict.weight": [row(-127, 8, 0.01, "True", -127, 127)],
        },
        "excluded_layers": ["head"],
        "quantizer_args": ARGS,
        "producer": {"package": "bitwright", "version": __version__},
    }
    assert written.not_expressed == (
        NotExpressed("l.weight", "version 0.6.1 has no blocks; left out", written=False),
        NotExpressed("m.weight", "version 0.6.1 has no blocks; left out", written=False),
        NotExpressed("w8.weight", "version 0.6.1 cannot describe float8_e4m3; left out", written=False),
    )


def test_version_1_0_0(tmp_path):
    written = write(tmp_path, EXAMPLES, excluded_layers=["head"])
    integer = {"dtype": "INT", "is_sym": True}
    assert content(written) == {
        "version": "1.0.0",
        "activation_encodings": [
            {"name": "x", "dtype": "INT", "bw": 8, "is_sym": False, "enc_type": "PER_TENSOR",
             "scale": [f32(0.02)], "offset": [-3]},
        ],
        "param_encodings": [
            {"name": "c.weight", **integer, "bw": 8, "enc_type": "PER_CHANNEL",
             "scale": [f32(0.01), f32(0.02)], "offset": [-128, -128]},
            {"name": "c.bias", **integer, "bw": 32, "enc_type": "PER_CHANNEL",
             "scale": [f32(0.0002), f32(0.0004)], "offset": [-(2**31)] * 2},
            {"name": "l.weight", **integer, "bw": 4, "enc_type": "PER_BLOCK", "block_size": 64,
             "scale": [f32(0.1), f32(0.2), f32(0.1), f32(0.3)], "offset": [-8] * 4},
            {"name": "m.weight", **integer, "bw": 8, "compressed_bw": 4, "enc_type": "LPBQ",
             "block_size": 64, "scale": [f32(0.004), f32(0.005)], "offset": [-128, -128],
             "per_block_int_scale": [12, 16, 9, 3]},
            {"name": "half.weight", "dtype": "FLOAT", "bw": 16, "enc_type": "PER_TENSOR"},
            {"name": "strict.weight", **integer, "bw": 8, "enc_type": "PER_TENSOR",
             "scale": [f32(0.01)], "offset": [-127]},
        ],
        "excluded_layers": ["head"],
        "quantizer_args": ARGS,
        "producer": {"package": "bitwright", "version": __version__},
    }  # fmt: skip
    assert written.not_expressed == (
        NotExpressed("w8.weight", "version 1.0.0 cannot describe float8_e4m3; left out", written=False),
    )


def test_version_2_0_0(tmp_path):
    written = write(tmp_path, EXAMPLES, "2.0.0", excluded_layers=["head"])
    assert content(written) == {
        "version": "2.0.0",
        "encodings": [
            {"name": "x", "output_dtype": "uint8", "y_scale": f32(0.02), "y_zero_point": 3},
            {"name": "c.weight", "output_dtype": "int8", "y_scale": [f32(0.01), f32(0.02)], "axis": 0},
            {"name": "c.bias", "output_dtype": "int32", "y_scale": [f32(0.0002), f32(0.0004)], "axis": 0},
            {"name": "l.weight", "output_dtype": "int4", "axis": 1, "block_size": 64,
             "y_scale": [[f32(0.1), f32(0.2)], [f32(0.1), f32(0.3)]]},
            {"name": "m.weight", "output_dtype": "int4", "axis": 1, "block_size": 64,
             "per_block_int_scale": [[12, 16], [9, 3]],
             "per_channel_float_scale": [[f32(0.004)], [f32(0.005)]]},
            {"name": "w8.weight", "output_dtype": "float8e4m3fn", "y_scale": [0.5, 0.25], "axis": 0},
            {"name": "strict.weight", "output_dtype": "int8", "y_scale": f32(0.01)},
        ],
        "producer": {"package": "bitwright", "version": __version__},
    }  # fmt: skip
    assert written.not_expressed == (
        NotExpressed("half.weight", "version 2.0.0 does not count float16 as quantized; left out", written=False),
        NotExpressed(
            "strict.weight", "version 2.0.0 has no narrow grids; written as int8, code -128 can now occur", written=True
        ),
        NotExpressed("excluded_layers", "version 2.0.0 has no excluded_layers; left out", written=False),
        NotExpressed("quantizer_args", "version 2.0.0 has no quantizer_args; left out", written=False),
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_one_line_per_entry(tmp_path, version):
    records = [record(f"w{i}", "int8", 0.5) for i in range(20)]
    lines = write(tmp_path, records, version).path.read_text().splitlines()
    assert sum('w1"' in line for line in lines) == 1
    assert len(lines) < 20 + 12


def test_blocks_of_a_transposed_matrix_are_listed_by_output_channel_in_1_0_0(tmp_path):
    by_rows = record("w", "int4", [[1, 2], [3, 4], [5, 6]], 0, PerBlock(4, 1, 0))
    by_columns = record("v", "int4", [[1, 3, 5], [2, 4, 6]], 0, PerBlock(4, 0, 1))
    first, second = content(write(tmp_path, [by_rows, by_columns]))["param_encodings"]
    assert first["scale"] == second["scale"] == [1, 2, 3, 4, 5, 6]


def test_an_asymmetric_signed_grid_becomes_its_unsigned_twin(tmp_path):
    original = record("x", "int8", 0.5, -28, kind="activation")
    for version in ("0.6.1", "1.0.0"):
        written = write(tmp_path, [original], version)
        (back,) = read_encodings(written).records
        assert back.encoding == encoding("uint8", 0.5, 100)
        assert (back.encoding.min, back.encoding.max) == (original.encoding.min, original.encoding.max)
        reason = "an asymmetric int8 grid is written as uint8: same scale, same values, codes larger by 128"
        assert written.not_expressed == (NotExpressed("x", reason, written=True),)
    assert read_encodings(write(tmp_path, [original], "2.0.0")).records[0].encoding == original.encoding


def test_widths_outside_the_list_of_2_0_0_are_written_and_reported(tmp_path):
    original = record("w", "int5", 0.5)
    written = write(tmp_path, [original], "2.0.0", quantizer_args={})
    assert read_encodings(written).records[0].encoding == original.encoding
    reason = "int5 is not a dtype of version 2.0.0; written by this name, compilers may refuse it"
    assert written.not_expressed == (NotExpressed("w", reason, written=True),)


# ---- round trips -------------------------------------------------------------------------------------------

SHAPE = (4, 8)  # of every tensor below: 4 output channels, 8 input channels, or the other way round
INT_FORMATS = st.builds(IntFormat, st.integers(2, 32), st.just(False)) | st.builds(
    IntFormat, st.integers(2, 32), st.just(True), st.booleans()
)
FORMATS = INT_FORMATS | st.sampled_from(sorted(FLOAT_FORMATS.values(), key=lambda f: f.name))
GRANULARITIES = st.sampled_from(
    [PerTensor(), PerChannel(0), PerChannel(1), PerBlock(2, 1, 0), PerBlock(2, 0, 1), PerBlock(4, 1, None)]
)
SCALES = st.floats(min_value=2**-149, max_value=3.4028234663852886e38, width=32)


@st.composite
def encodings(draw):
    fmt, granularity = draw(FORMATS), draw(GRANULARITIES)
    shape = granularity.param_shape(SHAPE)
    n = int(np.prod(shape, dtype=int))
    if isinstance(fmt, FloatFormat) and not fmt.scaled:
        return Encoding(fmt, np.float32(1.0), np.int32(0))
    scale = np.array(draw(st.lists(SCALES, min_size=n, max_size=n)), np.float32).reshape(shape)
    zeros = [0] * n
    if isinstance(fmt, IntFormat) and not fmt.narrow and draw(st.booleans()):
        zeros = draw(st.lists(st.integers(fmt.qmin, fmt.qmax), min_size=n, max_size=n))
    return Encoding(fmt, scale, np.array(zeros, np.int64).reshape(shape), granularity)


def axes(granularity):
    """``(channel_axis, block_axis)`` of the operator that owns a tensor of this granularity."""
    if isinstance(granularity, PerChannel):
        return granularity.axis, 1 - granularity.axis
    return (1 - granularity.axis, granularity.axis) if isinstance(granularity, PerBlock) else (0, 1)


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(originals=st.lists(encodings(), max_size=4))
def test_round_trip_is_bit_exact(tmp_path, version, originals):
    records = [NamedEncoding(f"w{i}", "param", e) for i, e in enumerate(originals)]
    written = write(tmp_path, records, version)
    notes = {note.name: note for note in written.not_expressed}
    found = read_encodings(written, params=[r.name for r in records])
    left_out = {name for name, note in notes.items() if not note.written}
    assert {r.name for r in records} - left_out == found.by_name.keys()
    for original in records:
        if original.name in left_out:
            continue
        back = found.by_name[original.name].resolve(SHAPE, *axes(original.encoding.granularity))
        if original.name not in notes:
            assert back == original
        # Also in the nearest form: same bits in every scale, and the same values behind the codes.
        assert back.encoding.scale.tobytes() == original.encoding.scale.tobytes()
        if isinstance(original.encoding.format, IntFormat) and not original.encoding.format.narrow:
            assert np.array_equal(back.encoding.min, original.encoding.min)
            assert np.array_equal(back.encoding.max, original.encoding.max)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_usual_encodings_are_expressed_by_every_version(tmp_path, version):
    usual = [
        record("a", "uint8", 0.1, 7, kind="activation"),
        record("b", "uint8", 0.1, 0, kind="activation"),
        record("c", "uint16", 0.1, 30000, kind="activation"),
        record("d", "uint8", 0.1, 128, kind="activation"),
        record("e", "int8", [0.1, 0.2], 0, PerChannel(0)),
        record("f", "int4", 0.1),
    ]
    written = write(tmp_path, usual, version, quantizer_args={})
    assert written.not_expressed == ()
    found = read_encodings(written, params={"e", "f"})
    assert found.version == version
    assert [r.resolve((2, 3), 0, 1) for r in found.records] == usual


@pytest.mark.parametrize("axis", [0, 1], ids=["block-axis-0", "block-axis-1"])
@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
def test_two_factor_scales_round_trip(tmp_path, version, axis):
    original = lpbq(axis)
    (back,) = read_encodings(write(tmp_path, [original], version), params={"m.weight"}).records
    shape = (2, 128) if axis == 1 else (128, 2)
    assert back.resolve(shape, 1 - axis, axis) == original


def test_two_factor_scales_of_other_widths_become_plain_blocks_in_2_0_0(tmp_path):
    original = lpbq(decompressed_bits=6)
    written = write(tmp_path, [original], "2.0.0", quantizer_args={})
    (note,) = written.not_expressed
    assert note.written
    assert note.reason == "version 2.0.0 has no two-factor scales from 4 to 6 bits; written as plain block scales"
    (back,) = read_encodings(written).records
    assert back.encoding == original.encoding


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
def test_two_factor_scales_of_a_narrow_grid_become_plain_blocks(tmp_path, version):
    narrow = replace(lpbq(), encoding=replace(lpbq().encoding, format=IntFormat(4, narrow=True)))
    written = write(tmp_path, [narrow], version, quantizer_args={})
    (note,) = written.not_expressed
    assert note.written
    assert "need a full symmetric integer grid; written as plain block scales" in note.reason
    (back,) = read_encodings(written, params={"m.weight"}).records
    assert np.array_equal(back.resolve((2, 128), 0, 1).encoding.scale, narrow.encoding.scale)


def test_global_settings_round_trip(tmp_path):
    found = read_encodings(write(tmp_path, EXAMPLES, "0.6.1", excluded_layers=["a", "b"]))
    assert (found.quantizer_args, found.excluded_layers) == (ARGS, ("a", "b"))
    assert found.producer == {"package": "bitwright", "version": __version__}


def test_open_records_can_be_written_again(tmp_path):
    first = content(write(tmp_path, EXAMPLES))
    again = content(write(tmp_path, read_encodings(first).records))
    assert again["param_encodings"] == first["param_encodings"]


def test_kind_is_unknown_in_2_0_0_unless_parameters_are_named(tmp_path):
    written = write(tmp_path, EXAMPLES[:2], "2.0.0")
    assert [r.kind for r in read_encodings(written).records] == ["unknown", "unknown"]
    assert [r.kind for r in read_encodings(written, params=["c.weight"]).records] == ["activation", "param"]


# ---- files of AIMET ----------------------------------------------------------------------------------------


def test_file_keyed_by_module():
    def row(offset):
        return {"bitwidth": 8, "dtype": "int", "is_symmetric": "False", "min": 0, "max": 5.1, "scale": 0.02,
                "offset": offset}  # fmt: skip

    found = read_encodings(
        {
            "version": "0.6.1",
            "activation_encodings": {"c": {"input": {"0": row(0), "1": row(-1)}, "output": {"0": [row(-2)]}}},
            "param_encodings": {"c.weight": [{**row(-128), "is_symmetric": True}]},
        }
    )
    assert [(r.name, r.kind) for r in found.records] == [
        ("c.input[0]", "activation"),
        ("c.input[1]", "activation"),
        ("c.output[0]", "activation"),
        ("c.weight", "param"),
    ]
    assert [int(r.encoding.zero_point) for r in found.records] == [0, 1, 2, 0]
    assert found.records[3].encoding.format == IntFormat(8)


ENTRY = {"name": "w", "dtype": "INT", "bw": 8, "is_sym": True, "enc_type": "PER_TENSOR", "scale": [0.5]}


@pytest.mark.parametrize(
    "is_sym, offset, fmt, zero_point",
    [
        pytest.param(True, -128.0, "int8", 0, id="symmetric"),
        pytest.param(True, -127, "int8n", 0, id="strict-symmetric"),
        pytest.param(True, 0, "uint8", 0, id="unsigned-symmetric"),
        pytest.param(True, -100, "int8", -28, id="off-centre"),
        pytest.param(False, -128, "uint8", 128, id="asymmetric"),
    ],
)
def test_meaning_of_is_sym_and_offset(is_sym, offset, fmt, zero_point):
    entry = {**ENTRY, "is_sym": is_sym, "offset": [offset]}
    (found,) = read_encodings({"version": "1.0.0", "param_encodings": [entry]}).records
    assert found.encoding == encoding(fmt, 0.5, zero_point)


def test_effective_scale_of_lpbq():
    """From the file's two factors; a matrix of any orientation lists its blocks by output channel."""
    entry = {**ENTRY, "enc_type": "LPBQ", "compressed_bw": 4, "block_size": 64, "scale": [0.004, 0.005],
             "offset": [-128, -128], "per_block_int_scale": [12, 16, 9, 3]}  # fmt: skip
    (found,) = read_encodings({"version": "1.0.0", "param_encodings": [entry]}).records
    expected = np.float32([[12, 16], [9, 3]]) * np.float32([[0.004], [0.005]])
    assert found.is_open
    assert np.array_equal(found.encoding.scale, expected.ravel())
    rows = found.resolve((2, 128), 0, 1).encoding
    assert (rows.format, rows.granularity) == (IntFormat(4), PerBlock(64, 1, 0))
    assert np.array_equal(rows.scale, expected)
    columns = found.resolve((128, 2), 1, 0).encoding
    assert columns.granularity == PerBlock(64, 0, 1)
    assert np.array_equal(columns.scale, expected.T)
    # Tensors of higher rank are listed in their own order: here blocks first, then channels.
    deep = found.resolve((128, 2, 3, 3), 1, 0).encoding
    assert np.array_equal(deep.scale[:, :, 0, 0], np.float32([[12, 16], [9, 3]]) * np.float32([0.004, 0.005]))


def test_negative_axes_and_single_numbers_of_2_0_0():
    entries = [
        {"name": "a", "output_dtype": "int8", "y_scale": [0.1, 0.2], "axis": -1},
        {"name": "b", "output_dtype": "int4", "y_scale": [[0.1, 0.2]], "axis": -1, "block_size": 2},
        {"name": "c", "output_dtype": "uint8", "y_scale": [0.1], "y_zero_point": [3], "axis": None},
    ]
    a, b, c = read_encodings({"version": "2.0.0", "encodings": entries}).records
    assert a.resolve((3, 2), 1, 0).encoding.granularity == PerChannel(1)
    assert b.resolve((1, 4), 0, 1).encoding.granularity == PerBlock(2, 1, 0)
    assert c.encoding == encoding("uint8", 0.1, 3)


def test_blocks_of_stacked_matrices_come_back(tmp_path):
    scale = np.float32(1) / np.arange(1, 25, dtype=np.float32).reshape(3, 2, 4)
    stack = Encoding(IntFormat(4), scale, np.zeros((3, 2, 4), np.int32), PerBlock(16, 1, (0, 2)))
    for version in ("1.0.0", "2.0.0"):
        path = tmp_path / f"{version}.encodings"
        write_encodings(path, [NamedEncoding("experts", "param", stack)], version, quantizer_args=ARGS)
        (found,) = read_encodings(path).records
        assert found.resolve((3, 32, 4), (0, 2), 1).encoding == stack, version


# ---- resolve -----------------------------------------------------------------------------------------------


def test_resolve_without_channel_axis_takes_one_channel_as_per_tensor():
    entry = {**ENTRY, "enc_type": "PER_CHANNEL", "offset": [-128]}
    (found,) = read_encodings({"version": "1.0.0", "param_encodings": [entry]}).records
    assert found.resolve((7,)).encoding == encoding("int8", 0.5)


@pytest.mark.parametrize(
    "shape, channel_axis, block_axis",
    [
        pytest.param((3, 8), 0, 1, id="other-number-of-channels"),
        pytest.param((2, 8), 5, 1, id="no-such-axis"),
        pytest.param((2, 8), None, None, id="no-channel-axis"),
    ],
)
def test_scales_that_do_not_fit(shape, channel_axis, block_axis):
    entry = {**ENTRY, "enc_type": "PER_CHANNEL", "scale": [0.5, 0.25], "offset": [-128, -128]}
    (found,) = read_encodings({"version": "1.0.0", "param_encodings": [entry]}).records
    with pytest.raises(EncodingsError) as caught:
        found.resolve(shape, channel_axis, block_axis)
    assert str(caught.value) == (
        f"w: its 2 scales, per channel, do not fit a tensor of shape {shape} with channel axis "
        f"{channel_axis} and block axis {block_axis}. "
        "Remedy: use the encodings file that was exported with this model"
    )


@pytest.mark.parametrize("shape", [(7, 8), (4, 8), (2, 16)], ids=str)
def test_two_factor_scales_of_another_shape(shape):
    """Two channels of two blocks, also where the number of blocks alone would fit."""
    entry = {**LPBQ, "scale": [0.1, 0.2], "per_block_int_scale": [1, 2, 3, 4]}
    (found,) = read_encodings(only("1.0.0", entry)).records
    with pytest.raises(EncodingsError, match="its 4 scales, per block of 2, do not fit a tensor"):
        found.resolve(shape, 0, 1)
    assert found.resolve((2, 4), 0, 1).encoding.scale.shape == (2, 2)


def test_one_two_factor_scale_may_be_per_tensor():
    (found,) = read_encodings(only("1.0.0", {**LPBQ, "per_block_int_scale": [3]})).records
    assert found.resolve((5,)) == NamedEncoding("w", "param", encoding("int4", 1.5))


def test_blocks_that_do_not_divide():
    found = record("w", "int4", [[0.1, 0.2]], 0, PerBlock(64, 1, 0))
    assert found.resolve((1, 100), 0, 1).encoding.scale.shape == (1, 2)
    with pytest.raises(EncodingsError, match=r"its 2 scales, per block of 64 \(axis 1\), do not fit a tensor"):
        found.resolve((1, 129), 0, 1)


# ---- malformed files ---------------------------------------------------------------------------------------


def failure(document, **options):
    with pytest.raises(EncodingsError) as caught:
        read_encodings(document, **options)
    return caught.value


def file_failure(tmp_path, content, **options):
    path = tmp_path / "m.encodings"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    error = failure(path, **options)
    assert error.site.startswith(str(path))
    return error


@pytest.mark.parametrize(
    "text, problem",
    [
        pytest.param("not json", "it is not JSON (Expecting value: line 1 column 1 (char 0))", id="text"),
        pytest.param('{"version": ', "it is not JSON (Expecting value: line 1 column 13 (char 12))", id="cut-off"),
        pytest.param(b"\x80\x04\x95", "it is not JSON ('utf-8' codec can't decode byte 0x80", id="binary"),
        pytest.param("9" * 5000, "it is not JSON (Exceeds the limit", id="number-of-5000-digits"),
        pytest.param("[1]", "it holds a list, not an object with a version", id="list"),
        pytest.param("[" * 100_000, "it is nested too deeply, beyond 64 lists and mappings", id="nested"),
        pytest.param('{"a": 1, "a": 2}', "the key 'a' occurs twice in one object", id="repeated-key"),
    ],
)
def test_not_an_encodings_file(tmp_path, text, problem):
    assert problem in str(file_failure(tmp_path, text))


def test_a_file_larger_than_allowed(tmp_path):
    error = file_failure(tmp_path, "{}" + " " * 99, max_bytes=100)
    assert error.problem == "it has 101 bytes, more than 100"
    assert error.remedy == "pass a larger max_bytes if you trust the file"


def test_missing_version():
    error = failure({"param_encodings": {}})
    assert error.problem == "it has no version"
    assert '{"version": "0.6.1", "param_encodings": ...}' in error.remedy


@pytest.mark.parametrize(
    "version, problem",
    [
        ("2.1.0", "version '2.1.0' is not known (did you mean '2.0.0'"),
        ("1.0", "version '1.0' is not known (did you mean '1.0.0'"),
    ],
)
def test_unknown_version(version, problem):
    error = failure({"version": version})
    assert error.problem.startswith(problem)
    assert error.remedy == "use one of the versions 0.6.1, 1.0.0, 2.0.0"


@pytest.mark.parametrize("version, kind", [(1, "a number"), ([[]], "a list"), (None, "null")])
def test_version_that_is_no_text(version, kind):
    error = failure({"version": version})
    assert (error.site, error.problem) == ("encodings, key 'version'", f"it is {kind}, not a text")


def test_no_entries():
    assert failure({"version": "2.0.0", "param_encodings": []}).problem == (
        "version 2.0.0 keeps its entries under 'encodings'; there are none"
    )


V1 = {**ENTRY, "offset": [-128]}
BLOCK = {**V1, "enc_type": "PER_BLOCK", "block_size": 2}
LPBQ = {**V1, "enc_type": "LPBQ", "compressed_bw": 4, "block_size": 2, "per_block_int_scale": [1, 2]}
V2 = {"name": "w", "output_dtype": "int8", "y_scale": 0.5}
V2_LPBQ = {"name": "w", "output_dtype": "int4", "axis": 1, "block_size": 2,
           "per_block_int_scale": [[1, 2], [3, 4]], "per_channel_float_scale": [[0.1], [0.2]]}  # fmt: skip
POSITIVE = "is not a positive finite number in float32"
GONE = object()

# A well-formed entry, and what spoils it: (changes, key in the message, problem). GONE removes a key.
MALFORMED = [
    ("1.0.0", V1, {
        "missing-key": ({"bw": GONE}, "bw", "it is missing"),
        "misspelt-key": ({"scale": GONE, "scales": 1}, "scale", "it is missing (did you mean 'scales'?)"),
        "width": ({"bw": 64}, "bw", "it is 64, not a whole number from 2 to 32"),
        "width-list": ({"bw": [8]}, "bw", "it is a list, not a whole number from 2 to 32"),
        "dtype": ({"dtype": "int"}, "dtype", "'int' is not known"),
        "enc-type": ({"enc_type": "PERCHANNEL"}, "enc_type", "'PERCHANNEL' is not known (did you mean"),
        "vector": ({"enc_type": "VECTOR"}, "enc_type", "vector quantization is not supported"),
        "symmetry": ({"is_sym": "maybe"}, "is_sym", "it is 'maybe', neither true nor false"),
        "float8": ({"dtype": "FLOAT"}, "bw", "a float format of 8 bits is ambiguous in this version"),
        "scale-text": ({"scale": "0.5"}, "scale", "it is a text, not a number or a list of numbers"),
        "scale-of-texts": ({"scale": ["0.5"]}, "scale", "it is a list, not a number or a list of numbers"),
        "scale-of-bools": ({"scale": [True]}, "scale", "it is a list, not a number or a list of numbers"),
        "scale-empty": ({"scale": []}, "scale", "it is a list, not a number or a list of numbers"),
        "scale-ragged": ({"scale": [[1], [1, 2]]}, "scale", "its rows differ in length"),
        "scale-zero": ({"scale": [0]}, "scale", f"0.0 at position 0 {POSITIVE}"),
        "scale-negative": ({"scale": [-0.5]}, "scale", f"-0.5 at position 0 {POSITIVE}"),
        "scale-nan": ({"scale": [float("nan")]}, "scale", f"nan at position 0 {POSITIVE}"),
        "scale-infinite": ({"scale": [float("inf")]}, "scale", f"inf at position 0 {POSITIVE}"),
        "scale-underflows": ({"scale": [1e-60]}, "scale", f"1e-60 at position 0 {POSITIVE}"),
        "scale-overflows": ({"scale": [1e60]}, "scale", f"1e+60 at position 0 {POSITIVE}"),
        "scale-huge": ({"scale": [10**400]}, "scale", "or a number is too large"),
        "two-scales": ({"scale": [1, 2], "offset": [-1, -1]}, "scale", "has 2 numbers, but a PER_TENSOR"),
        "lengths": ({"scale": [1, 2]}, "offset", "it has 1 numbers, but 'scale' has 2"),
        "half-step": ({"zero_point_shift": [0.5]}, "zero_point_shift", "grids shifted by half a step are"),
        "offset-half": ({"offset": [-1.5]}, "offset", "-1.5 is not a whole number"),
        "offset-nan": ({"offset": [float("nan")]}, "offset", "nan is not a whole number"),
        "offset-outside": ({"offset": [-300]}, "offset", "-300 puts zero outside of the int8 grid"),
    }),
    ("1.0.0", BLOCK, {
        "block-size": ({"block_size": 0}, "block_size", "it is 0, not a whole number from 1"),
    }),
    ("1.0.0", LPBQ, {
        "block-scale": ({"per_block_int_scale": [0]}, "per_block_int_scale", "is not a whole number from 1"),
        "block-count": ({"scale": [1, 2, 3]}, "per_block_int_scale", "2 numbers cannot be shared by the 3"),
        "block-overflow": ({"scale": [3e38]}, "per_block_int_scale", f"inf at position 1 {POSITIVE}"),
    }),
    ("2.0.0", V2, {
        "output-dtype": ({"output_dtype": "int88"}, "output_dtype", "'int88' is not a supported dtype (did"),
        "fnuz": ({"output_dtype": "float8e4m3fnuz"}, "output_dtype", "did you mean 'float8e4m3fn'"),
        "zero-point-shape": ({"y_zero_point": [0]}, "y_zero_point", "shape (1,), but 'y_scale' has shape ()"),
        "zero-point-half": ({"y_zero_point": -0.5}, "y_zero_point", "-0.5 is not a whole number"),
        "zero-point-outside": ({"y_zero_point": 200}, "y_zero_point", "200 puts zero outside of the int8"),
        "zero-point-of-float": (
            {"output_dtype": "float8e5m2", "y_zero_point": 1}, "y_zero_point", "float8_e5m2 grid has no zero",
        ),
        "axis-missing": ({"y_scale": [1, 2]}, "axis", "it is missing, but there are 2 scales"),
        "axis-rank": ({"y_scale": [[1]], "axis": 2, "block_size": 2}, "axis", "whole number from -2 to 1"),
        "channels-nested": ({"y_scale": [[1, 2]], "axis": 0}, "y_scale", "without 'block_size' it is a"),
        "blocks-scalar": ({"axis": 0, "block_size": 2}, "block_size", "blocks need a nested list"),
    }),
    ("2.0.0", V2_LPBQ, {
        "lpbq-float": ({"output_dtype": "float8e5m2"}, "output_dtype", "need an integer grid"),
        "lpbq-shape": (
            {"per_channel_float_scale": [[0.1, 0.2]]}, "per_channel_float_scale",
            "it has shape (1, 2), but 'per_block_int_scale' has shape (2, 2)",
        ),
    }),
]  # fmt: skip


def only(version, entry):
    """A file with this one entry."""
    return {"version": version, "encodings" if version == "2.0.0" else "param_encodings": [entry]}


@pytest.mark.parametrize(
    "version, entry, changes, key, problem",
    [pytest.param(v, e, *case, id=name) for v, e, cases in MALFORMED for name, case in cases.items()],
)
def test_malformed_entry(version, entry, changes, key, problem):
    error = failure(only(version, {k: v for k, v in {**entry, **changes}.items() if v is not GONE}))
    assert error.site == f"encodings: 'w', key {key!r}"
    assert problem in error.problem
    assert error.remedy


def test_the_examples_of_malformed_entries_are_well_formed_without_the_change():
    for version, entry, _ in MALFORMED:
        assert len(read_encodings(only(version, entry)).records) == 1


ROW = {"bitwidth": 8, "dtype": "int", "is_symmetric": "True", "scale": 0.5, "offset": -128}


@pytest.mark.parametrize(
    "rows, site, problem",
    [
        ([], "'w'", "it is an empty list"),
        (5, "'w'", "it is a number, not an object"),
        ([[ROW]], "'w'[0]", "it is a list, not an object"),
        ([ROW, None], "'w'[1]", "it is null, not an object"),
        ([ROW, {**ROW, "bitwidth": 4}], "'w'[1], key 'bitwidth'", "4 differs from 8 of the first channel"),
        ([ROW, {k: v for k, v in ROW.items() if k != "offset"}], "'w'[1], key 'offset'", "it is missing"),
        ([{**ROW, "zero_point_shift": 0.5}], "'w', key 'zero_point_shift'", "grids shifted by half a step"),
        ([{"bitwidth": 8, "dtype": "float"}], "'w', key 'bitwidth'", "a float format of 8 bits is ambiguous"),
    ],
)  # fmt: skip
def test_malformed_rows_of_0_6_1(rows, site, problem):
    error = failure({"version": "0.6.1", "param_encodings": {"w": rows}})
    assert error.site == f"encodings: {site}"
    assert error.problem.startswith(problem)


ONE = {"param_encodings": [V1]}


@pytest.mark.parametrize(
    "document, site, problem",
    [
        ({"param_encodings": 5}, "encodings, key 'param_encodings'", "it is a number, not a list or object"),
        ({"param_encodings": [5]}, "encodings: param_encodings[0]", "it is a number, not an object"),
        ({"param_encodings": [{}]}, "encodings: param_encodings[0], key 'name'", "it is missing"),
        ({"param_encodings": [{**V1, "name": ""}]}, "encodings", "an entry has an empty text for a name"),
        ({"param_encodings": [V1, V1]}, "encodings: 'w'", "two entries have this name"),
        ({**ONE, "excluded_layers": "w"}, "encodings, key 'excluded_layers'", "it is a text, not a list"),
        ({**ONE, "quantizer_args": 1}, "encodings, key 'quantizer_args'", "it is a number, not an object"),
    ],
)  # fmt: skip
def test_malformed_document(document, site, problem):
    error = failure({"version": "1.0.0", **document})
    assert (error.site, error.problem) == (site, problem)


def mutated(rng, value):
    """``value`` with one random part replaced: what a fuzzer would try."""
    poison = [None, True, -1, 0, 2**70, 1e300, float("nan"), "", "x" * 50, [], [[]], {}, {"a": []}, [1, [2]], [None]]
    path, at = [], value
    while isinstance(at, (dict, list)) and at and (not path or rng.random() < 0.8):
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        path.append((at, key))
        at = at[key]
    owner, key = path[-1]
    owner[key] = rng.choice(poison)
    return value


@pytest.mark.parametrize("version", VERSIONS)
def test_damaged_files_are_read_or_refused_by_name(tmp_path, version):
    text = write(tmp_path, EXAMPLES, version).path.read_text()
    rng = random.Random(0)
    for _ in range(1500):
        document = mutated(rng, json.loads(text))
        try:
            found = read_encodings(document)
        except EncodingsError as error:
            assert error.site.startswith("encodings")
        else:
            for r in found.records:
                assert np.isfinite(r.encoding.scale).all()
                assert (r.encoding.scale > 0).all()


def test_names_of_texts_in_a_number_list_cost_no_memory():
    """numpy would pad every text to the length of the longest: 4 TB here."""
    entry = {**V1, "scale": ["x" * 1_000_000] + ["y"] * 1_000_000}
    assert "not a number or a list of numbers" in failure({"version": "1.0.0", "param_encodings": [entry]}).problem


# ---- refusing to write -------------------------------------------------------------------------------------


def write_failure(tmp_path, records, version="1.0.0", **options):
    (tmp_path / "m.encodings").write_text("old")
    with pytest.raises(EncodingsError) as caught:
        write(tmp_path, records, version, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["m.encodings"]
    assert (tmp_path / "m.encodings").read_text() == "old"
    return caught.value


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_scale(tmp_path, scale):
    error = write_failure(tmp_path, [record("w", "int8", [0.5, scale], 0, PerChannel(0))])
    assert error.site == "w"
    assert error.problem == f"scale {np.float32(scale)} at position 1 is not a positive finite number"
    assert error.remedy.startswith("calibrate this tensor again")


def test_two_records_of_one_name(tmp_path):
    error = write_failure(tmp_path, [record("w", "int8", 0.5), record("w", "int8", 0.5)])
    assert str(error) == "w: two records have this name. Remedy: give every record a name of its own"


def test_unknown_kind_before_2_0_0(tmp_path):
    error = write_failure(tmp_path, [record("w", "int8", 0.5, kind="unknown")])
    assert error.problem == "version 1.0.0 needs to know whether this is an activation or a parameter"
    assert error.remedy == "set kind to 'activation' or 'param', or pass params= to read_encodings"


def test_open_axes_in_2_0_0(tmp_path):
    error = write_failure(tmp_path, [record("w", "int8", [0.5, 1], 0, PerChannel())], "2.0.0")
    assert error.problem == "version 2.0.0 stores the axis, and this per channel entry has none yet"
    assert error.remedy == "call resolve(shape, channel_axis, block_axis) on the record first"


def test_unknown_version_to_write(tmp_path):
    error = write_failure(tmp_path, [], "1.0")
    assert error.problem.startswith("version '1.0' is not known (did you mean '1.0.0'")


def test_settings_that_are_not_json(tmp_path):
    error = write_failure(tmp_path, [], quantizer_args={"a": {1, 2}})
    assert error.site == "quantizer_args"
    assert error.problem == "cannot be written as JSON (Object of type set is not JSON serializable)"


def test_a_missing_folder_and_a_missing_file(tmp_path):
    with pytest.raises(ExportError, match="there is no such file or folder. Remedy: create the folder first"):
        write(tmp_path / "absent", EXAMPLES)
    with pytest.raises(ExportError, match="m.encodings: there is no such file or folder"):
        read_encodings(tmp_path / "m.encodings")


def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "m.encodings").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ExportError, match="m.encodings: the disk is full. Remedy: free some space"):
        write(tmp_path, EXAMPLES)
    assert [p.name for p in tmp_path.iterdir()] == ["m.encodings"]
    assert (tmp_path / "m.encodings").read_text() == "old"


# ---- names of another model --------------------------------------------------------------------------------


def test_compare_names():
    assert compare_names(["a", "b", "c"], ["c", "d", "a"]) == (["b"], ["d"])


def test_names_of_another_model():
    assert names_error("m.encodings", ["a"], ["a"]) is None
    model = ["stem.weight", "layer1.conv.weight", "fc.weight", "fc.bias", "x1", "x2"]
    error = names_error("m.encodings", model, ["stem.weight", "layer1.conv1.weight"])
    assert str(error) == (
        "m.encodings: 5 names of the model are missing: "
        "'layer1.conv.weight' (did you mean 'layer1.conv1.weight'?), "
        "'fc.weight' (did you mean 'layer1.conv1.weight'?), 'fc.bias' and 2 more; "
        "1 of its names are not in the model: 'layer1.conv1.weight'. "
        "Remedy: use the encodings file that was exported with this model, or rename the entries"
    )


def test_comparing_many_names_takes_no_time():
    model = [f"model.layers.{i}.weight" for i in range(100_000)]
    other = [f"transformer.layers.{i}.weight" for i in range(100_000)]
    assert "99997 more" in str(names_error("m.encodings", model, other))


@pytest.mark.parametrize(
    "document",
    [
        {"version": 1, "sites": {"a.b": {"x": [1, 2]}, 'q"': None}, "float": {}, "carried": ["n"]},
        {"sites": {}, "list": [{"a": 1}, 2], "last": float("inf")},
    ],
)
def test_lines_are_the_document(document):
    text = "".join(json_lines(document, ("sites", "list", "float"), allow_nan=True))
    assert json.loads(text) == document
    assert (
        len(text.splitlines())
        == sum(1 + len(v) + 1 if k in ("sites", "list", "float") and v else 1 for k, v in document.items()) + 2
    )


def model() -> onnx.ModelProto:
    """A layer, movement of many kinds, and what must not be taken for it."""
    rng = np.random.default_rng(0)
    constants = {
        "w": rng.normal(size=(4, 3, 3, 3)).astype(np.float32),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "seven": np.float32(7),
        "shape": np.array([0, -1]),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("MaxPool", ["r"], ["pool"], "pool", kernel_shape=[2, 2]),
        helper.make_node("Pad", ["pool", "pads"], ["zeros"], "pad0"),
        helper.make_node("Pad", ["pool", "pads", "seven"], ["sevens"], "pad7"),
        helper.make_node("Transpose", ["zeros"], ["moved"], "transpose", perm=[0, 2, 3, 1]),
        helper.make_node("Concat", ["pool", "pool"], ["same"], "same", axis=1),
        helper.make_node("Sigmoid", ["pool"], ["s"], "sigmoid"),
        helper.make_node("Concat", ["pool", "s"], ["mixed"], "mixed", axis=1),
        helper.make_node("Reshape", ["same", "shape"], ["flat"], "reshape"),
    ]
    outputs = ("flat", "moved", "sevens", "mixed")
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def simulated() -> QuantizationSimModel:
    rng = np.random.default_rng(1)
    return calibrated(QuantizationSimModel(model()), [{"x": rng.normal(size=(2, 3, 8, 8)).astype(np.float32)}])


def entries(path: Path) -> dict[str, Any]:
    return {entry["name"]: entry for entry in json.loads(path.read_text())["activation_encodings"]}


def test_what_carries_elements_has_an_entry_when_asked_for(tmp_path: Path) -> None:
    sim = simulated()
    plain = entries(sim.export(tmp_path / "plain", "net", samples=False).encodings)
    found = entries(sim.export(tmp_path / "all", "net", samples=False, every_tensor=True).encodings)
    assert set(found) - set(plain) == {"pool", "zeros", "moved", "same", "flat"}
    for name in set(found) - set(plain):
        assert {**found[name], "name": "r"} == plain["r"]
    assert all(found[name] == entry for name, entry in plain.items())


@pytest.mark.parametrize("version", ["0.6.1", "1.0.0", "2.0.0"])
def test_the_file_is_read_back_strictly(tmp_path: Path, version: str) -> None:
    sim = simulated()
    made = sim.export(tmp_path, "net", samples=False, every_tensor=True, encoding_version=version)
    other = QuantizationSimModel(model())
    other.load_encodings(made.encodings)
    scales = {n: float(s.encoding.scale) for n, s in sim.quantizers.items() if s.role == "output" and s.encoding}
    assert scales == {n: float(other.quantizers[n].encoding.scale) for n in scales}  # type: ignore[union-attr]
    document = json.loads(made.sites.read_text())
    document["carried"] = [3]
    made.sites.write_text(json.dumps(document))
    with pytest.raises(EncodingsError, match="key 'carried': it is 3, not a text.*export the model again"):
        QuantizationSimModel(model()).load_encodings(made.encodings)


def test_a_record_whose_name_is_a_pattern_is_of_no_site(tmp_path: Path) -> None:
    made = simulated().export(tmp_path, "net", samples=False, encoding_version="1.0.0")
    document = json.loads(made.encodings.read_text())
    document["activation_encodings"][0]["name"] = "*"
    with pytest.raises(EncodingsError, match=r"'\*'"):
        QuantizationSimModel(model()).load_encodings(document)
