"""Compile the functions of this package, and convert arrays to what they take."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.compiled import counting, kernels

logger = logging.getLogger("bitwright")

SWITCH = "BITWRIGHT_COMPILED"
"""Environment variable: ``0`` leaves the compiled loops unused."""

_F, _M, _B = "float32[::1]", "float32[:, ::1]", "uint8[::1]"
_MARKS, _PLANES = "uint8[:, ::1]", "float32[:, :, ::1]"
_D = "float64[::1]"
_READ = "Array({}, 1, 'C', readonly=True)"  # which takes writable arrays too
_GRID = "float32, float32, float32"
#: functions that loops call, which become part of them before types are inferred
PARTS: tuple[Callable[..., Any], ...] = (
    *(kernels.within, kernels.code, kernels.beyond, kernels.by_scale, kernels.through_activation),
    *(kernels.put_on_grid, kernels.add_lanes, counting.key_bounds),
)
#: or when machine code is made
LATE_PARTS: tuple[Callable[..., Any], ...] = (kernels.unless,)
SIGNATURES: dict[Callable[..., Any], str] = {
    kernels.quantize_dequantize: f"void({_F}, {_F}, {_GRID})",
    kernels.clamp_quantize: f"void({_F}, {_F}, float32, float32, {_GRID})",
    kernels.add_quantize: f"void({_F}, {_F}, {_F}, {_GRID})",
    kernels.clamp_quantize_marked: f"void({_F}, {_F}, {_B}, float32, float32, {_GRID}, float32, float32)",
    kernels.add_quantize_marked: f"void({_F}, {_F}, {_F}, {_B}, {_GRID}, float32, float32)",
    kernels.quantize_rows: f"void({_F}, {_F}, {_F}, float32, float32)",
    kernels.quantize_by_own_range: f"void({_F}, {_F}, float32, float32)",
    kernels.pass_gradient: f"void({_F}, {_B}, {_F})",
    kernels.learned_gradient: f"void({_F}, {_F}, {_F}, {_D}, float32, float32, {_GRID}, float32, float32)",
    kernels.learned_rows_gradient: f"void({_F}, {_F}, {_F}, {_D}, {_F}, float32, float32)",
    kernels.lstm_gates: f"void({_M}, {_M}, {_M}, {_F}, {_F}, {_F})",
    kernels.lstm_cell: f"void({_M}, {_M}, {_M}, {_F}, {_F}, {_F}, {_GRID})",
    kernels.lstm_hidden: f"void({_M}, {_M}, {_M}, {_F}, {_F}, {_F}, {_GRID}, {_GRID})",
    kernels.lstm_gates_marked: f"void({_M}, {_M}, {_M}, {_MARKS}, {_PLANES}, {_F}, {_F}, {_F}, {_F}, {_F})",
    kernels.lstm_states_backward: (
        f"void({_M}, {_M}, {_M}, {_M}, {_M}, {_M}, {_PLANES}, {_PLANES}, {_PLANES}, {_PLANES})"
    ),
    kernels.lstm_gates_backward: (f"void({_M}, {_MARKS}, {_M}, {_M}, {_PLANES}, {_PLANES}, {_PLANES}, {_M}, {_M})"),
    kernels.range_by_column: f"void({_M}, {_M}, {_F}, {_F}, {_GRID}, float32, float32)",
    kernels.lstm_next: f"void({_M}, {_PLANES}, int64, int64)",
    kernels.keys_by_column: "void(int32[:, :, ::1], int64, int32[::1], int32[::1])",
    kernels.round_block: f"void({', '.join([_PLANES] * 7)}, {_M})",
    kernels.edge_errors: f"void({_D}, {_D}, {_D}, {_D}, {_D}, float64, float64[:, ::1])",
    counting.key_bounds: f"UniTuple(int32, 2)({_READ.format('int32')})",
    counting.channels_hold: f"void({_READ.format('float32')}, int64, int64, int64[::1], {_F}, {_B})",
    counting.count_bins: (
        f"int64({_READ.format('float32')}, {_READ.format('int32')}, int64, int32, float32, uint16[::1], uint16[:, ::1], "
        "int64[::1], int64[::1])"
    ),
}


class Loops(SimpleNamespace):
    """The compiled functions by name; each releases the GIL."""


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
        import numba.extending
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        return None
    except ImportError as error:  # of another numpy than it was made for
        logger.warning("numba is installed and cannot be used, so loops run in array functions: %s", error)
        return None
    for part in PARTS:
        numba.extending.register_jitable(inline="always")(part)
    for part in LATE_PARTS:
        numba.extending.register_jitable(part)
    return Loops(**{function.__name__: _compiled(numba, function) for function in SIGNATURES})


def _compiled(numba: ModuleType, function: Callable[..., Any]) -> Callable[..., Any]:
    # without `fastmath`: the operations are those that are written down, in their order
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        made: Callable[..., Any] = numba.njit(SIGNATURES[function], cache=True, **options)(function)
    except RuntimeError as error:  # no folder for the cache can be written to
        logger.info("compiled loops are not kept: %s", error)
        made = numba.njit(SIGNATURES[function], **options)(function)
    return made


PART = 1 << 16
"""Elements that are worth a thread."""


def in_parts(loop: Callable[..., Any], arrays: Sequence[NDArray[Any]], numbers: Sequence[Any], threads: int) -> None:
    """Call an elementwise ``loop`` on equally long 1-D ``arrays``, which large ones share among up to ``threads`` threads."""
    size = arrays[0].size
    parts = min(threads, size // PART)
    if parts < 2:
        loop(*arrays, *numbers)
        return
    step = -(-size // parts)
    others = [
        _workers(os.getpid()).submit(loop, *(a[first : first + step] for a in arrays), *numbers)
        for first in range(step, size, step)
    ]
    loop(*(a[:step] for a in arrays), *numbers)
    for other in others:
        other.result()


@functools.cache
def _workers(process: int) -> ThreadPoolExecutor:
    """The thread pool of this process; a forked process gets a new one."""
    return ThreadPoolExecutor(os.cpu_count(), f"bitwright-{process}")


def flat(x: Any) -> NDArray[np.float32] | None:
    """A 1-D view of a float32 array or CPU tensor; ``None`` where that would need a copy.

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
