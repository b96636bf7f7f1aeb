"""Compare the memory that the results of a model need with the free memory."""

from __future__ import annotations

import math
from itertools import chain
from operator import itemgetter
from pathlib import Path

import onnx_ir as ir
import psutil

from bitwright.errors import ModelError
from bitwright.export.files.onnx_file import all_nodes

_SURELY_FREE = 1 << 26  # bytes up to which a result is assumed to fit


def check_results(model: ir.Model) -> None:
    """Refuse a model with a result that does not fit into the free memory twice; a simulation holds it in float and quantized.

    Raises:
        ModelError: naming the node. Otherwise a system that overcommits memory would kill the process without a message.
    """
    made = chain.from_iterable(node.outputs for node in all_nodes(model.graph))
    known = ((value, value.shape, value.dtype) for value in made if value.shape is not None and value.dtype is not None)
    sizes = (
        (math.prod(shape.numpy()) * dtype.bitwidth // 8, value)
        for value, shape, dtype in known
        if shape.is_static() and dtype not in (ir.DataType.STRING, ir.DataType.UNDEFINED)
    )
    size, value = max(sizes, key=itemgetter(0), default=(0, None))
    if value is None or size < _SURELY_FREE or 2 * size <= (free := free_memory()):
        return
    node = value.producer()
    assert node is not None and value.shape is not None
    raise ModelError(
        f"{node.name or value.name} ({node.op_type})",
        f"its result {value.name!r} of shape {list(value.shape.numpy())} takes {size / 2**30:.1f} GiB, a simulation holds it "
        f"twice, and {free / 2**30:.1f} GiB of memory are free",
        "check the constants that determine this shape, or use a machine with more memory",
    )


def free_memory() -> int:
    """Bytes that this process may still allocate: free memory of the machine, limited by its control group."""
    free = [psutil.virtual_memory().available]
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free.append(max(0, limit - used))
    return min(free)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return None
