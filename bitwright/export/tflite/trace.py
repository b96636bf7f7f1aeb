"""What a model computes on one example: the shape of every value, which axes follow the batch, and what is constant.

Shapes are observed, not derived: the model runs in ONNX Runtime, with two lengths of the batch where that is free. What does
not depend on the numbers fed to the model, only on their shapes, is constant too; the files of a format without
dynamic shapes need no operators for it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.errors import ExportError
from bitwright.export.files.temporary import temporary_room
from bitwright.export.qdq.markers import copy_model
from bitwright.runtimes.adapters import open_file

Array = NDArray[Any]
_TWO = (2, 3)  # lengths of the batch that are compared
_SHAPE_ONLY = frozenset(("Shape", "Size"))


@dataclass(frozen=True)
class Trace:
    """Facts of every value of the main graph, by name.

    Attributes:
        shapes: with 1 on the axis of the batch, or its multiple.
        free: which axes follow the batch.
        constants: values that do not depend on the data fed.
        batched: inputs whose first axis is the batch, if that is free.
        zeros: values that are zero whatever is fed.
        linear: integers that follow from the length ``n`` of the batch alone -> ``(base, per row)``: ``base + n * per row``.
        dtypes: numpy's names of types.
        notes: why the batch is fixed, where it was not.
    """

    shapes: Mapping[str, tuple[int, ...]]
    free: Mapping[str, tuple[bool, ...]]
    constants: Mapping[str, Array]
    dtypes: Mapping[str, str]
    notes: tuple[str, ...] = ()
    linear: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    batched: tuple[str, ...] = ()
    zeros: frozenset[str] = frozenset()


def trace_model(model: ir.Model, feeds: Mapping[str, Array], *, fixed: bool = False) -> Trace:
    """Run ``model`` on ``feeds`` and note shapes.

    Args:
        model: ONNX; left as it is.
        feeds: by name of graph input.
        fixed: keep the batch of ``feeds`` in any case.

    Raises:
        ExportError: the model does not run.
    """
    _check_inputs(model, feeds)
    steady = _independent(model)
    batched = [] if fixed else list(_batched(model, feeds))
    if not batched:
        return _single(model, feeds, steady, ())
    try:
        one, other = (_run(model, _resized(feeds, batched, n)) for n in _TWO)
    except ExportError as error:
        return _single(model, feeds, steady, (f"the batch is fixed to that of the example: {error.problem}",))
    shapes, free, why = _compared(one, other)
    if why is not None:
        return _single(model, feeds, steady, (f"the batch is fixed to that of the example: {why}",))
    constants = {name: one[name] for name in steady if name in one and _same(one[name], other.get(name))}
    linear = {
        name: (one[name] - 2 * (other[name] - one[name]), other[name] - one[name])
        for name in steady - constants.keys()
        if name in one and one[name].dtype.kind == "i" and one[name].shape == other[name].shape
    }
    dtypes = {name: array.dtype.name for name, array in one.items()}
    zeros = frozenset(name for name in steady if name in one and not np.any(one[name]) and not np.any(other[name]))
    return Trace(shapes, free, constants, dtypes, (), linear, tuple(batched), zeros)


def _single(model: ir.Model, feeds: Mapping[str, Array], steady: set[str], notes: tuple[str, ...]) -> Trace:
    found = _run(model, feeds)
    shapes = {name: array.shape for name, array in found.items()}
    free = {name: (False,) * array.ndim for name, array in found.items()}
    constants = {name: array for name, array in found.items() if name in steady}
    return Trace(shapes, free, constants, {name: array.dtype.name for name, array in found.items()}, notes)


def _same(one: Array, other: Array | None) -> bool:
    return other is not None and one.shape == other.shape and np.array_equal(one, other)


def _compared(
    one: Mapping[str, Array], other: Mapping[str, Array]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[bool, ...]], str | None]:
    """Shapes at a batch of one from those at two and three, and why that cannot be."""
    shapes, free = {}, {}
    for name, array in one.items():
        first, second = array.shape, other[name].shape
        if len(first) != len(second):
            return {}, {}, f"the rank of {name} depends on it"
        per_row = [b - a for a, b in zip(first, second, strict=True)]
        if any(step and a != 2 * step for a, step in zip(first, per_row, strict=True)):
            return {}, {}, f"the shape of {name} is not a multiple of it"
        shapes[name] = tuple(step or a for a, step in zip(first, per_row, strict=True))
        free[name] = tuple(step != 0 for step in per_row)
    return shapes, free, None


def _check_inputs(model: ir.Model, feeds: Mapping[str, Array]) -> None:
    for value in model.graph.inputs:
        if str(value.name) not in feeds and not value.is_initializer():
            raise ExportError(str(value.name), "no example of this input was given", "give one for every graph input")


def _batched(model: ir.Model, feeds: Mapping[str, Array]) -> Iterator[str]:
    """Inputs whose first axis is free and called as that of the first of them."""
    name: str | None = None
    for value in model.graph.inputs:
        first = value.shape[0] if value.shape is not None and len(value.shape) else 0
        if isinstance(first, int) or value.is_initializer() or not feeds[str(value.name)].ndim:
            continue
        name = str(first) if name is None else name
        if str(first) == name:
            yield str(value.name)


def _resized(feeds: Mapping[str, Array], batched: list[str], rows: int) -> dict[str, Array]:
    return {
        name: np.take(array, np.arange(rows) % max(1, array.shape[0]), axis=0) if name in batched else array
        for name, array in feeds.items()
    }


def _run(model: ir.Model, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Every value of the main graph on ``feeds``, by name."""
    copied = copy_model(model)
    graph = copied.graph
    known = {value.name for value in graph.outputs}
    wanted = [v for node in graph for v in node.outputs if v.name and v.name not in known]
    graph.outputs.extend(wanted)
    given = (value for value in graph.inputs if not value.is_initializer())
    for value in chain(given, *(node.outputs for node in graph)):
        value.shape = None  # sizes that the exporter wrote down must not contradict the batch
    with temporary_room(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        ir.save(copied, path, external_data=f"{path.name}.data")
        found = open_file("onnxruntime", path, reference=True).run(feeds)
    constants = {
        str(v.name): v.const_value.numpy()
        for v in model.graph.initializers.values()
        if v.const_value is not None and not v.is_graph_input()
    }
    fed = {str(v.name): np.asarray(feeds[str(v.name)]) for v in model.graph.inputs if str(v.name) in feeds}
    return {**constants, **fed, **{k: v for k, v in found.items() if isinstance(v, np.ndarray)}}


def _independent(model: ir.Model) -> set[str]:
    """Names of values that do not depend on numbers fed to the model: constants, and what follows from shapes."""
    steady = {str(v.name) for v in model.graph.initializers.values() if not v.is_graph_input()}
    for node in model.graph:
        read = [str(v.name) for v in node.inputs if v is not None]
        nested = any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values())
        if node.op_type in _SHAPE_ONLY or (not nested and all(name in steady for name in read)):
            steady.update(str(v.name) for v in node.outputs)
    return steady
