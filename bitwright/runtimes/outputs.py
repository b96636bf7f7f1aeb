"""What ONNX Runtime returns for an output: an array, or a sequence, a map, an optional value that hold some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def arrays_of(output: Any) -> list[NDArray[Any]]:
    """Every array in an output, in order; the numbers that maps hold are one array, after the others.

    Args:
        output: an array, or lists, maps and ``None`` around arrays and numbers. Keys of maps are left out.

    Example:
        >>> arrays_of([{1: 0.25, 2: 0.75}, {1: 0.5, 2: 0.5}])
        [array([0.25, 0.75, 0.5 , 0.5 ])]
    """
    arrays: list[NDArray[Any]] = []
    numbers: list[Any] = []
    open_parts = [output]
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, np.ndarray):
            arrays.append(part)
        elif isinstance(part, dict):
            open_parts.extend(reversed(part.values()))
        elif isinstance(part, (list, tuple)):
            open_parts.extend(reversed(part))
        elif part is not None:
            numbers.append(part)
    return arrays + ([np.array(numbers)] if numbers else [])


def one_array(output: Any) -> NDArray[Any]:
    """An output as one array: of a sequence or a map all floats in a row; empty and of integers where it holds none."""
    if isinstance(output, np.ndarray):
        return output
    floats = [array.ravel() for array in arrays_of(output) if array.dtype.kind == "f"]
    return np.concatenate(floats) if floats else np.empty(0, np.int64)


def named_arrays(outputs: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Outputs by name, where one that is not an array stands as its arrays: ``name[0]``, ``name[1]``, ..."""
    found: dict[str, NDArray[Any]] = {}
    for name, output in outputs.items():
        if isinstance(output, np.ndarray):
            found[name] = output
        else:
            found |= {f"{name}[{i}]": array for i, array in enumerate(arrays_of(output))}
    return found
