"""The compiled form of the functions beside this file, and the arrays they can be given."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.compiled import counting, elementwise

logger = logging.getLogger("bitwright")

SWITCH = "BITWRIGHT_COMPILED"
"""Environment variable: ``0`` leaves the compiled loops unused."""

_F, _B = "float32[::1]", "uint8[::1]"
_READ = "Array({}, 1, 'C', readonly=True)"  # which takes writable arrays too
_GRID = "float32, float32, float32"
SIGNATURES: dict[Callable[..., Any], str] = {
    elementwise.quantize_dequantize: f"void({_F}, {_F}, {_GRID})",
    elementwise.clamp_quantize: f"void({_F}, {_F}, float32, float32, {_GRID})",
    elementwise.add_quantize: f"void({_F}, {_F}, {_F}, {_GRID})",
    elementwise.clamp_quantize_marked: f"void({_F}, {_F}, {_B}, float32, float32, {_GRID}, float32, float32)",
    elementwise.quantize_rows: f"void({_F}, {_F}, {_F}, float32, float32)",
    elementwise.pass_gradient: f"void({_F}, {_B}, {_F})",
    counting.key_bounds: f"UniTuple(int32, 2)({_READ.format('int32')})",
    counting.count_bins: (
        f"int64({_READ.format('float32')}, {_READ.format('int32')}, int64, int32, float32, uint16[::1], uint16[:, ::1], "
        "int64[::1], int64[::1])"
    ),
}


class Loops:
    """The compiled functions under their own names; each lets other Python threads run."""

    def __init__(self, numba: ModuleType) -> None:
        self.quantize_dequantize = _compiled(numba, elementwise.quantize_dequantize)
        self.clamp_quantize = _compiled(numba, elementwise.clamp_quantize)
        self.add_quantize = _compiled(numba, elementwise.add_quantize)
        self.clamp_quantize_marked = _compiled(numba, elementwise.clamp_quantize_marked)
        self.quantize_rows = _compiled(numba, elementwise.quantize_rows)
        self.pass_gradient = _compiled(numba, elementwise.pass_gradient)
        self.key_bounds = _compiled(numba, counting.key_bounds)
        self.count_bins = _compiled(numba, counting.count_bins)


@functools.cache
def loops() -> Loops | None:
    """The compiled loops; ``None`` without numba, or where :data:`SWITCH` says no.

    The first call of a process loads numba; the first one of an installation compiles, which takes some seconds, and keeps the
    machine code in numba's cache.
    """
    if os.environ.get(SWITCH, "1") == "0":
        return None
    try:
        import numba
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        return None
    except ImportError as error:  # of another numpy than it was made for
        logger.warning("numba is installed and cannot be used, so loops run in array functions: %s", error)
        return None
    return Loops(numba)


def _compiled(numba: ModuleType, function: Callable[..., Any]) -> Callable[..., Any]:
    # without `fastmath`: the operations are those that are written down, in their order
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        made: Callable[..., Any] = numba.njit(SIGNATURES[function], cache=True, **options)(function)
    except RuntimeError as error:  # no folder for the cache can be written to
        logger.info("compiled loops are not kept: %s", error)
        made = numba.njit(SIGNATURES[function], **options)(function)
    return made


def flat(x: Any) -> NDArray[np.float32] | None:
    """The elements of a float32 array or CPU tensor as a 1-D array that shares its memory; ``None`` where that cannot be.

    The order of the elements is that of memory.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _flat_tensor(torch, x)
    if x.dtype != np.float32 or not x.dtype.isnative:
        return None
    if x.flags.c_contiguous:
        return np.asarray(x.reshape(-1))
    return np.asarray(x.ravel(order="K")) if x.flags.f_contiguous else None


def _flat_tensor(torch: Any, x: Any) -> NDArray[np.float32] | None:
    if x.dtype is not torch.float32 or x.device.type != "cpu" or x.layout is not torch.strided:
        return None
    if not x.is_contiguous():
        if x.ndim != 4 or not x.is_contiguous(memory_format=torch.channels_last):
            return None
        x = x.permute(0, 2, 3, 1)
    found: NDArray[np.float32] = x.detach().reshape(-1).numpy()
    return found
