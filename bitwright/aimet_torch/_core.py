"""The parts below the public API that this layer needs, in one place: encodings, ranges and number formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitwright.aimet_common.grids import (
    FLOAT32_SCALE,
    Encoding,
    FloatFormat,
    Format,
    Granularity,
    IntFormat,
    PerBlock,
    PerChannel,
    PerTensor,
    QuantSpec,
    RangeMethod,
    Site,
    SiteMap,
    aimet_blocks,
    aimet_shape,
    encode,
    find_range_method,
    granularity_of,
    grouped_bits,
    grouped_scale_format,
    int_format,
    steps_format,
)
from bitwright.analysis.layer_outputs import names_of_export
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.numerics.affine import power_of_two_scale
from bitwright.core.numerics.formats import FLOAT_FORMATS
from bitwright.core.numerics.ranges import choose_range, needs
from bitwright.core.numerics.statistics import Statistics, start, update
from bitwright.export.encodings.read import read_encodings
from bitwright.export.encodings.write import write_encodings
from bitwright.tables import Tabular, html_table
from bitwright.torch.calls.inputs import walk_modules
from bitwright.torch.quantizers import functional
from bitwright.torch.quantizers.fake_quantize import Grid as TensorGrid
from bitwright.torch.training.oscillation import PivotGradient

__all__ = [
    "FLOAT32_SCALE",
    "FLOAT_FORMATS",
    "Encoding",
    "FloatFormat",
    "Format",
    "Granularity",
    "Graph",
    "IntFormat",
    "Op",
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "PivotGradient",
    "QuantSpec",
    "RangeMethod",
    "Site",
    "SiteMap",
    "Statistics",
    "Tabular",
    "TensorGrid",
    "aimet_blocks",
    "aimet_shape",
    "broadcastable",
    "encode",
    "exported_names",
    "find_range_method",
    "functional",
    "granularity_of",
    "grouped_bits",
    "grouped_scale_format",
    "html_table",
    "int_format",
    "mxfp4_scales",
    "range_of_rows",
    "rewrite_encodings",
    "start_rows",
    "steps_format",
    "update_rows",
    "walk_modules",
]


def start_rows(method: RangeMethod, groups: int) -> Statistics:
    """Empty statistics of ``groups`` rows, of the kind that ``method`` reads."""
    return start(needs(method), (groups,))


def update_rows(seen: Statistics, rows: torch.Tensor) -> Statistics:
    """``seen`` with the values of a matrix, one group per row."""
    return update(seen, rows.detach(), PerChannel(0))  # type: ignore[type-var]


def range_of_rows(
    seen: Statistics, method: RangeMethod, fmt: Format, *, symmetric: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Lowest and highest value per group of the grid that ``method`` finds."""
    spec = QuantSpec(fmt, PerChannel(0), "symmetric" if symmetric else "asymmetric", method)
    lo, hi = choose_range(seen, spec)  # type: ignore[arg-type]
    encoding = encode(lo, hi, spec, PerChannel(0))
    return encoding.min, encoding.max


def broadcastable(values: Any, granularity: Granularity, shape: tuple[int, ...]) -> torch.Tensor:
    """Parameters of an encoding for a tensor of ``shape`` as AIMET shapes them: ``(8, 1, 1, 1)`` for 8 channels."""
    values = np.asarray(values)
    if isinstance(granularity, PerChannel):
        values = values.reshape(granularity.broadcast_shape(shape))
    return torch.from_numpy(np.array(values, np.float32))


def mxfp4_scales(weight: torch.Tensor, block_size: int) -> torch.Tensor:
    """The power of two of every block of ``block_size`` input channels: ``[O, I / block_size, 1, ...]``.

    Reference: OCP Microscaling Formats 1.0, section 6.3; a block of zeros has 1.
    """
    largest = weight.abs().flatten(2).amax(2) if weight.ndim > 2 else weight.abs()
    blocks = largest.reshape(largest.shape[0], -1, block_size).amax(2).double().cpu().numpy()
    scales = power_of_two_scale(np.where(blocks > 0, blocks, 4.0), FLOAT_FORMATS["float4_e2m1"])
    shaped = np.asarray(scales, np.float32).reshape(*blocks.shape, *(1,) * (weight.ndim - 2))
    return torch.from_numpy(shaped).to(weight.device)


def exported_names(folder: str) -> dict[str, str]:
    """Layer -> tensor of the exported model, of the one export in ``folder``."""
    return names_of_export(Path(folder), None)


def rewrite_encodings(path: Path, version: str) -> None:
    """Write an encodings file of parameters anew, in the layout of another version."""
    records = [replace(record, kind="param") for record in read_encodings(path).records]
    write_encodings(path, records, version, quantizer_args={})
