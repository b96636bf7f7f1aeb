"""Specs and encodings as plain JSON values and back, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.core.encoding import Encoding
from bitwright.core.formats import parse_format
from bitwright.core.granularity import Granularity, PerBlock, PerChannel, PerTensor
from bitwright.core.spec import QuantSpec, RangeMethod

JsonDict = dict[str, Any]


def granularity_to_json(granularity: Granularity) -> JsonDict:
    """``{"kind": "per_channel", "axis": 0}``."""
    if isinstance(granularity, PerChannel):
        return {"kind": "per_channel", "axis": granularity.axis}
    if isinstance(granularity, PerBlock):
        return {
            "kind": "per_block",
            "size": granularity.size,
            "axis": granularity.axis,
            "channel_axis": granularity.channel_axis,
        }
    return {"kind": "per_tensor"}


def granularity_from_json(data: JsonDict) -> Granularity:
    """Inverse of :func:`granularity_to_json`."""
    if data["kind"] == "per_channel":
        return PerChannel(data["axis"])
    if data["kind"] == "per_block":
        return PerBlock(data["size"], data["axis"], data["channel_axis"])
    return PerTensor()


def encoding_to_json(encoding: Encoding) -> JsonDict:
    """Scales are written as the shortest decimals that give the same float32 back."""
    return {
        "format": encoding.format.name,
        "granularity": granularity_to_json(encoding.granularity),
        "shape": list(encoding.scale.shape),
        "scale": [float(s) for s in encoding.scale.ravel()],
        "zero_point": [int(z) for z in encoding.zero_point.ravel()],
    }


def encoding_from_json(data: JsonDict) -> Encoding:
    """Inverse of :func:`encoding_to_json`."""
    shape = tuple(data["shape"])
    return Encoding(
        parse_format(data["format"]),
        np.array(data["scale"], np.float32).reshape(shape),
        np.array(data["zero_point"], np.int64).reshape(shape),
        granularity_from_json(data["granularity"]),
    )


def spec_to_json(spec: QuantSpec) -> JsonDict:
    """The spec as it stands, nothing resolved."""
    return {
        "format": spec.format.name,
        "granularity": granularity_to_json(spec.granularity),
        "symmetry": spec.symmetry,
        "method": spec.method.name,
        "options": dict(spec.method.options),
        "fixed_range": None if spec.fixed_range is None else list(spec.fixed_range),
        **({} if spec.non_finite is None else {"non_finite": spec.non_finite}),
    }


def spec_from_json(data: JsonDict) -> QuantSpec:
    """Inverse of :func:`spec_to_json`."""
    fixed = data["fixed_range"]
    return QuantSpec(
        parse_format(data["format"]),
        granularity_from_json(data["granularity"]),
        data["symmetry"],
        RangeMethod.of(data["method"], data["options"]),
        None if fixed is None else (fixed[0], fixed[1]),
        data.get("non_finite"),
    )
