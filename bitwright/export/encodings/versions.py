"""Encodings files, versions 0.6.1, 1.0.0 and 2.0.0: written and read in the form AIMET 2.42 uses.

The files differ from `Encoding` in these ways, all of which are translated here:

- 0.6.1 and 1.0.0 store an ``offset`` on the *unsigned* grid: ``x = (code + offset) * scale``, codes from 0.
  So ``offset = qmin - zero_point``: int8 with zero point 0 has -128, its narrow form -127, uint8 with zero
  point 3 has -3. Where ``is_sym`` is true the grid is signed, or unsigned symmetric if the offset is 0.
- 0.6.1 and 1.0.0 store no axes. What is read has open axes (``PerChannel()``, ``PerBlock(size)``, flat
  scales) until `NamedEncoding.resolve` is told the tensor's shape and the axes of its operator.
- 2.0.0 stores ONNX dtypes, zero points and axes, but not which names are parameters, and no narrow grids.

Scales are written as float64 text of the float32 value, so that they come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from bitwright.errors import EncodingsError, close_matches
from bitwright.export.encodings.read import read_encodings
from bitwright.export.encodings.records import (
    VERSIONS,
    EncodingsFile,
    GroupedScale,
    Kind,
    NamedEncoding,
    NotExpressed,
    Version,
    WrittenEncodings,
)
from bitwright.export.encodings.write import write_encodings

__all__ = [
    "VERSIONS",
    "EncodingsFile",
    "GroupedScale",
    "Kind",
    "NamedEncoding",
    "NotExpressed",
    "Version",
    "WrittenEncodings",
    "compare_names",
    "names_error",
    "read_encodings",
    "write_encodings",
]


def compare_names(expected: Iterable[str], found: Iterable[str]) -> tuple[list[str], list[str]]:
    """``(missing, extra)``: expected names that were not found, and found ones that were not expected.

    Example:
        >>> compare_names(["conv1.weight", "fc.weight"], ["conv1.weight", "head.weight"])
        (['fc.weight'], ['head.weight'])
    """
    wanted, there = dict.fromkeys(expected), dict.fromkeys(found)
    return [name for name in wanted if name not in there], [name for name in there if name not in wanted]


def names_error(site: str, expected: Iterable[str], found: Iterable[str]) -> EncodingsError | None:
    """The error for a file whose names are not those of the model, or ``None`` when they are.

    Args:
        site: the file, or whatever the names come from.
        expected: names of the model.
        found: names of the file.

    Returns:
        An error to raise or to log; shows the first few names of both kinds, with close matches.
    """
    missing, extra = compare_names(expected, found)
    if not missing and not extra:
        return None
    parts = []
    if missing:
        parts.append(f"{len(missing)} names of the model are missing: {_some(missing, extra)}")
    if extra:
        parts.append(f"{len(extra)} of its names are not in the model: {_some(extra, ())}")
    return EncodingsError(
        site, "; ".join(parts), "use the encodings file that was exported with this model, or rename the entries"
    )


def _some(names: list[str], others: Iterable[str], shown: int = 3) -> str:
    """The first few ``names``, with close matches; finding these among all ``others`` could take minutes."""
    near = list(islice(others, 500))
    text = ", ".join(f"{name!r}{close_matches(name, near)}" for name in names[:shown])
    return f"{text} and {len(names) - shown} more" if len(names) > shown else text
