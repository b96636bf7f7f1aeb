"""The parts below the public API that this layer needs, in one place."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.aimet_common.grids import (
    FLOAT32_SCALE,
    Encoding,
    FloatFormat,
    IntFormat,
    PerBlock,
    PerChannel,
    PerTensor,
    Preset,
    QuantSpec,
    RangeMethod,
    Site,
    activation_spec,
    find_range_method,
    grouped_bits,
    grouped_scale_format,
    scale_multiples,
    weight_spec,
)
from bitwright.core.graph.operators import block_axes
from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.arrays import to_numpy
from bitwright.onnx.model.data import input_specs, random_feeds
from bitwright.onnx.model.load import load_model

__all__ = [
    "FLOAT32_SCALE",
    "Encoding",
    "FloatFormat",
    "IntFormat",
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "Preset",
    "QuantSpec",
    "RangeMethod",
    "Site",
    "activation_spec",
    "example_feeds",
    "fake_quantize",
    "find_range_method",
    "grouped_bits",
    "grouped_scale_format",
    "quantized_constant",
    "scale_multiples",
    "block_axes",
    "weight_spec",
]


def example_feeds(model: Any) -> dict[str, Any]:
    """Random values for the inputs of a model."""
    return dict(next(random_feeds(input_specs(load_model(model).model))))


def quantized_constant(values: Any, encoding: Encoding) -> Any:
    """A constant on its grid, as numpy array of its dtype."""
    array = np.asarray(to_numpy(values))
    return np.asarray(fake_quantize(array, encoding)).astype(array.dtype)
