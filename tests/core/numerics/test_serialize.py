"""Specs and encodings as JSON: the same back, and an error with its place for what is neither."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.serialize import encoding_from_json, encoding_to_json, spec_from_json, spec_to_json
from bitwright.core.numerics.spec import QuantSpec, RangeMethod
from bitwright.errors import EncodingsError

CHANNELS = Encoding(IntFormat(8), np.float32([0.1, 3e-9]), np.int32([0, 0]), PerChannel(0))
BLOCKS = Encoding(IntFormat(4), np.full((2, 3), 0.5, np.float32), np.zeros((2, 3), np.int32), PerBlock(16, 1, 0))
STACK = Encoding(
    IntFormat(4), np.full((2, 3, 4), 0.5, np.float32), np.zeros((2, 3, 4), np.int32), PerBlock(16, 1, (0, 2))
)
TENSOR = Encoding(IntFormat(8, signed=False), np.float32(0.25), np.int32(128), PerTensor())


@pytest.mark.parametrize("encoding", [CHANNELS, BLOCKS, STACK, TENSOR], ids=["channels", "blocks", "stack", "tensor"])
def test_an_encoding_comes_back(encoding: Encoding) -> None:
    assert encoding_from_json(json.loads(json.dumps(encoding_to_json(encoding)))) == encoding


def test_a_spec_comes_back() -> None:
    spec = QuantSpec(method=RangeMethod.of("percentile", {"percentile": 99.5}), fixed_range=(0.0, None))
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


@pytest.mark.parametrize("axis", [-64, 63])
def test_every_axis_that_an_array_can_have_is_read(axis: int) -> None:
    data = {**encoding_to_json(CHANNELS), "granularity": {"kind": "per_channel", "axis": axis}}
    assert encoding_from_json(data, "conv.weight").granularity == PerChannel(axis)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"scale": [-1.0, 1.0]}, "a scale is not a positive finite number"),
        ({"scale": [float("nan"), 1.0]}, "a scale is not a positive finite number"),
        ({"scale": [1e-60, 1.0]}, "a scale is not a positive finite number"),
        ({"scale": [1.0]}, "cannot reshape array of size 1"),
        ({"scale": [True, 1.0]}, "is not a list of numbers"),
        ({"scale": "1"}, "'1' is not a list of numbers"),
        ({"zero_point": [0, 200]}, "a zero point lies outside -128 to 127, the grid of int8"),
        ({"zero_point": [0.5, 0]}, "is not a list of numbers"),
        ({"shape": [1, 2]}, r"parameters of shape \(1, 2\) are not PerChannel"),
        ({"shape": None}, "it is not an encoding"),
        ({"format": "int99"}, "not a bit width between 2 and 32"),
        ({"format": "int" + "9" * 9000}, "there is no number format of this name"),
        ({"granularity": {"kind": "per_thing"}}, "'per_thing' is not a granularity"),
        ({"granularity": {"kind": "per_channel", "axis": "x"}}, "'x' is not an axis"),
        ({"granularity": {"kind": "per_channel", "axis": 64}}, "64 is not an axis"),
        ({"granularity": {"kind": "per_channel", "axis": -65}}, "-65 is not an axis"),
        ({"granularity": {"kind": "per_block", "size": 1e9, "axis": 0}}, "the size 1000000000.0 is not a whole number"),
        ({"granularity": {"kind": "per_block", "size": 1, "axis": 0, "channel_axis": [1, "x"]}}, "'x' is not an axis"),
        ({"granularity": 3}, "it is not an encoding"),
    ],
)  # fmt: skip
def test_what_is_no_encoding_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(EncodingsError, match=f"^conv.weight: .*{problem}.* Remedy: export or save"):
        encoding_from_json({**encoding_to_json(CHANNELS), **changes}, "conv.weight")


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"method": "best"}, "there is no range method of this name"),
        ({"method": ["minmax"]}, "is not a range method"),
        ({"options": {"percentile": "high"}}, "is not a list of numbers"),
        ({"symmetry": []}, "is not a symmetry"),
        ({"fixed_range": [1, "2"]}, "is not a list of numbers"),
        ({"fixed_range": [1]}, "list index out of range"),
        ({"non_finite": "maybe"}, "is not a policy"),
    ],
)  # fmt: skip
def test_what_is_no_spec_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(EncodingsError, match=f"^conv.weight: .*{problem}"):
        spec_from_json({**spec_to_json(QuantSpec()), **changes}, "conv.weight")
    with pytest.raises(EncodingsError, match="it is not a spec: the key 'fixed_range' is missing"):
        spec_from_json({})
