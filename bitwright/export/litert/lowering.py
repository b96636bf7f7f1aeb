"""State of a conversion to LiteRT: every value as codes or floats, its axis order, its shape and whether it is constant.

A value is written once, by the operator that produces it. Other forms (dequantized floats, another axis order) are
added where an operator first needs them and reused afterwards.

Shapes are observed, not derived: the model runs in ONNX Runtime, with two batch sizes where the batch is free. Values that
depend on input shapes but not on input values are constants too; a file format without dynamic shapes needs no operators
for them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.errors import ExportError
from bitwright.export.files.atomic import temporary_room
from bitwright.export.litert.flat import FlatModel, Grid
from bitwright.export.qdq.forms import read_metadata
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
    """Run ``model`` on ``feeds`` and record shapes.

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
    """Shapes at a batch of one from those at two and three, or the reason why that fails."""
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
    """Names of values that do not depend on fed values: constants, and results of shapes."""
    steady = {str(v.name) for v in model.graph.initializers.values() if not v.is_graph_input()}
    for node in model.graph:
        read = [str(v.name) for v in node.inputs if v is not None]
        nested = any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values())
        if node.op_type in _SHAPE_ONLY or (not nested and all(name in steady for name in read)):
            steady.update(str(v.name) for v in node.outputs)
    return steady


Perm = tuple[int, ...]

_ACTIVATION_TYPES = ("int8", "int16")
_SMALL = 256  # numbers of a constant that is written in float where floats are asked for
NO_ACTIVATION, RELU, RELU_N1_TO_1, RELU6 = 0, 1, 2, 3
# operators that kernels compute on the codes of their input, whatever it is
_CHANGES_NO_GRID = frozenset(
    ("Relu", "Clip", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "MaxPool")
)
_CLIPS = {(0.0, 6.0): RELU6, (-1.0, 1.0): RELU_N1_TO_1, (0.0, np.inf): RELU}


def channels_last(rank: int) -> Perm:
    """The order of axes that kernels of images read: ``(0, 2, 3, 1)`` of rank 4."""
    return (0, *range(2, rank), 1) if rank > 2 else tuple(range(rank))


class FreeBatchError(ExportError):
    """Raised where an operator has no form with a free batch."""


@dataclass
class Held:
    """One value of the ONNX model.

    Attributes:
        name: of the value.
        shape: with 1 on free axes, in ONNX's order.
        free: which axes follow the batch.
        dtype: numpy's name of its type in ONNX.
        grid: of its codes, if it lies on a grid.
        codes, plain: order of axes -> tensor that holds it.
        array: of a constant, in ONNX's order; codes where ``grid`` is given.
    """

    name: str
    shape: tuple[int, ...]
    free: tuple[bool, ...]
    dtype: str
    grid: Grid | None = None
    codes: dict[Perm, int] = field(default_factory=dict)
    plain: dict[Perm, int] = field(default_factory=dict)
    array: Array | None = None

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def identity(self) -> Perm:
        """ONNX's own order of axes."""
        return tuple(range(self.rank))

    @property
    def constant(self) -> bool:
        """Whether the value is the same in every run."""
        return self.array is not None

    def floats(self) -> Array:
        """The numbers of a constant."""
        assert self.array is not None
        return self.array if self.grid is None else dequantized(self.array, self.grid)

    def orders(self) -> list[Perm]:
        """Orders of axes that it lies in already."""
        return list(self.codes) or list(self.plain)


def dequantized(codes: Array, grid: Grid) -> Array:
    """Float values of ``codes``, in float32 as DequantizeLinear computes them."""
    shape = [1] * codes.ndim
    if grid.axis is not None:
        shape[grid.axis] = -1
    scale = np.asarray(grid.scale, np.float32).reshape(shape if grid.axis is not None else ())
    zero = np.asarray(grid.zero_point, np.int64).reshape(shape if grid.axis is not None else ())
    return ((codes.astype(np.int64) - zero).astype(np.float32) * scale).astype(np.float32)


@dataclass(frozen=True)
class Domain:
    """The numbers in which an operator computes: grids of its operands and its result.

    Attributes:
        integer: on codes.
        result: the value that it makes, after a fused activation.
        activation: fused activation function.
        grid: of the result.
        why: what keeps it from integers, where something does that is worth telling.
    """

    integer: bool
    result: str
    activation: int
    grid: Grid | None = None
    why: str | None = None


class Lowering:
    """The state of one conversion.

    Attributes:
        flat: the file.
        trace: facts of the ONNX model's values.
        notes: what runs in float though its neighbours are codes, and the like.
    """

    def __init__(self, model: ir.Model, trace: Trace) -> None:
        self.model, self.trace = model, trace
        self.flat = FlatModel()
        self.notes: dict[str, None] = dict.fromkeys(trace.notes)
        self.held: dict[str, Held] = {}
        self.done: set[ir.Node] = set()
        self.outputs = {str(v.name) for v in model.graph.outputs}
        self.sites: list[dict[str, Any]] = []
        self._length: int | None = None
        self._one: int | None = None
        self.ends: set[int] = set()  # tensors that are inputs or outputs of the file

    # ------------------------------------------------------------------------------------------------ values

    def get(self, value: ir.Value | str | None) -> Held:
        """Facts about a value; constants are added at first use."""
        assert value is not None
        name = value if isinstance(value, str) else str(value.name)
        if name not in self.held:
            array = self.trace.constants.get(name)
            assert array is not None or name in self.trace.shapes, name
            self.held[name] = self.fresh(name)
            self.held[name].array = array
        return self.held[name]

    def fresh(self, name: str) -> Held:
        """A value without any form yet."""
        known = self.trace
        return Held(name, known.shapes[name], known.free[name], known.dtypes[name])

    def known(self, value: ir.Value | None) -> Array | None:
        """The array of a constant, dequantized; ``None`` for computed values."""
        if value is None:
            return None
        held = self.get(value)
        return held.floats() if held.constant else None

    def made(self, name: str, perm: Perm, grid: Grid | None = None) -> int:
        """A new tensor that holds the value ``name`` in the order ``perm``: codes of ``grid``, or plain."""
        held = self.held.setdefault(name, self.fresh(name))
        tensor = self._tensor(held, perm, grid)
        if grid is None:
            held.plain[perm] = tensor
        else:
            held.grid = grid
            held.codes[perm] = tensor
        return tensor

    def _tensor(self, held: Held, perm: Perm, grid: Grid | None, name: str | None = None) -> int:
        axis = None if grid is None or grid.axis is None else perm.index(grid.axis)
        return self.flat.tensor(
            name or held.name,
            [held.shape[i] for i in perm],
            held.dtype if grid is None else grid.dtype,
            grid,
            axis=axis,
            free=[held.free[i] for i in perm],
        )

    def scratch(
        self, name: str, shape: Sequence[int], free: Sequence[bool], dtype: str = "float32", grid: Grid | None = None
    ) -> int:
        """A tensor without a counterpart in the ONNX model."""
        return self.flat.tensor(name, shape, grid.dtype if grid else dtype, grid, free=free)

    # ----------------------------------------------------------------------------------------- forms of a value

    def plain(self, value: ir.Value | str | None, perm: Perm | None = None) -> int:
        """The tensor of the float values, in the order ``perm`` (by default ONNX's)."""
        held = self.get(value)
        perm = held.identity if perm is None else perm
        if perm in held.plain:
            return held.plain[perm]
        if held.name in self.trace.linear and not held.plain:
            held.plain[held.identity] = self._from_batch(held)
            return self.plain(held.name, perm)
        if held.constant and (held.grid is None or held.shape == () or held.floats().size <= _SMALL):
            held.plain[perm] = self._constant(held, held.floats(), perm, None)
        elif held.grid is not None and (perm in held.codes or not held.plain):
            codes = self.codes(held.name, perm)
            held.plain[perm] = self._tensor(held, perm, None, f"{held.name}_float")
            self.flat.op("DEQUANTIZE", [codes], [held.plain[perm]], {"table": "DequantizeOptions"})
        else:
            held.plain[perm] = self._moved(held, held.plain, perm, None)
        return held.plain[perm]

    def _from_batch(self, held: Held) -> int:
        """Integers that depend on the batch length ``n`` at run time: ``base + n * per row``."""
        base, per_row = (np.asarray(a, np.int32) for a in self.trace.linear[held.name])
        wide = base.reshape(-1).shape
        parts = [self.scratch(f"{held.name}_{part}", wide, (False,), "int32") for part in ("rows", "sum")]
        factors = [self.flat.constant("factor", a.reshape(-1)) for a in (per_row, base)]
        options = {"table": "MulOptions"}, {"table": "AddOptions", "potScaleInt16": False}
        self.flat.op("MUL", [self._batch(), factors[0]], [parts[0]], options[0])
        self.flat.op("ADD", [parts[0], factors[1]], [parts[1]], options[1])
        found = parts[1]
        if held.dtype != "int32":
            found = self.scratch(f"{held.name}_wide", wide, (False,), held.dtype)
            self.flat.op("CAST", [parts[1]], [found], {"table": "CastOptions"})
        if base.shape != wide:
            shaped = self.scratch(held.name, base.shape, (False,) * base.ndim, held.dtype)
            self.reshape(found, shaped, base.shape)
            found = shaped
        return found

    def _batch(self) -> int:
        """The length of the batch, ``[1]``, int32."""
        if self._length is None:
            source = self.held[self.trace.batched[0]]
            sizes = self.scratch("batch_shape", (source.rank,), (False,), "int32")
            self.flat.op("SHAPE", [self.plain(source.name)], [sizes], {"table": "ShapeOptions", "outType": 2})
            self._length = self.scratch("batch", (1,), (False,), "int32")
            ends = [self.flat.constant("ends", np.asarray([n], np.int32)) for n in (0, 1)]
            self.flat.op("SLICE", [sizes, *ends], [self._length], {"table": "SliceOptions"})
        return self._length

    def dims(self, value: ir.Value | None) -> int:
        """A shape as kernels read it, int32."""
        held = self.get(value)
        if held.array is not None:
            return self.flat.constant("shape", held.array.astype(np.int32))
        made = self.scratch(f"{held.name}_int32", held.shape, (False,), "int32")
        self.flat.op("CAST", [self.plain(held.name)], [made], {"table": "CastOptions"})
        return made

    def requantized(self, tensor: int, source: Grid, target: Grid, out: int) -> None:
        """Codes of one grid on another: QUANTIZE, or the product with 1 where that rounds once.

        QUANTIZE of 8-bit codes rounds twice where the step grows. The factor 1 is code 127 of a grid of 127 steps, so that the
        first rounding of MUL is 127 times as fine.
        """
        if (source.dtype, target.dtype) != ("int8", "int8"):
            self.flat.op("QUANTIZE", [tensor], [out], {"table": "QuantizeOptions"})
            return
        one = Grid("int8", (1 / 127,), (0,))
        if self._one is None:
            self._one = self.flat.tensor("one", (), "int8", one, data=np.asarray(127, np.int8))
        self.flat.op("MUL", [tensor, self._one], [out], {"table": "MulOptions"})

    def codes(self, value: ir.Value | str | None, perm: Perm | None = None) -> int:
        """The tensor of the codes, in the order ``perm`` (by default ONNX's)."""
        held = self.get(value)
        perm = held.identity if perm is None else perm
        if perm not in held.codes:
            assert held.grid is not None, held.name
            if held.array is not None:
                held.codes[perm] = self._constant(held, held.array, perm, held.grid)
            else:
                held.codes[perm] = self._moved(held, held.codes, perm, held.grid)
        return held.codes[perm]

    def _constant(self, held: Held, array: Array, perm: Perm, grid: Grid | None) -> int:
        stored = array.transpose(perm) if perm else array
        axis = None if grid is None or grid.axis is None else perm.index(grid.axis)
        dtype = array.dtype.name if grid is None else grid.dtype
        return self.flat.tensor(held.name, stored.shape, dtype, grid, axis=axis, data=stored.astype(dtype))

    def _moved(self, held: Held, forms: Mapping[Perm, int], perm: Perm, grid: Grid | None) -> int:
        """A copy with its axes in another order; of axes of length 1 alone a change of shape."""
        start, source = next(iter(forms.items()))
        tensor = self._tensor(held, perm, grid)
        steps = [start.index(axis) for axis in perm]
        if _keeps_order(held, start, perm):
            shape = [-1 if held.free[i] else held.shape[i] for i in perm]
            self.reshape(source, tensor, shape)
        else:
            argument = self.flat.constant("perm", np.asarray(steps, np.int32))
            self.flat.op("TRANSPOSE", [source, argument], [tensor], {"table": "TransposeOptions"})
        return tensor

    def reshape(self, source: int, target: int, shape: Sequence[int]) -> None:
        """RESHAPE with at most one -1 in ``shape``."""
        array = np.asarray(shape, np.int32)
        argument = self.flat.constant("shape", array)
        self.flat.op("RESHAPE", [source, argument], [target], {"table": "ReshapeOptions", "newShape": array})

    def order(self, values: Iterable[ir.Value | None], rank: int) -> Perm:
        """The order of axes that most of ``values`` of this rank lie in; ONNX's where none does."""
        found: dict[Perm, int] = {}
        for value in values:
            held = None if value is None else self.get(value)
            if held is not None and held.rank == rank and not held.constant:
                for perm in held.orders():
                    found[perm] = found.get(perm, 0) + int(np.prod(held.shape))
        return max(found, key=lambda perm: found[perm]) if found else tuple(range(rank))

    # ------------------------------------------------------------------------------------------- what it is done on

    def domain(
        self,
        node: ir.Node,
        data: Sequence[ir.Value | None],
        *,
        fuses: bool = True,
        accepts: Callable[[Grid, Sequence[Grid]], str | None] = lambda out, ins: None,
        unless: str | None = None,
    ) -> Domain:
        """The domain in which ``node`` is computed.

        Args:
            node: the operator, with one output that counts.
            data: its inputs that codes are read from.
            fuses: whether the kernel takes an activation function.
            accepts: ``(grid of the output, grids of the inputs) -> why not``, beside what holds for all.
            unless: a reason against integers that the caller found.
        """
        result, activation, last = self._fused(node) if fuses else (node.outputs[0], NO_ACTIVATION, None)
        held = [self.get(v) for v in data if v is not None]
        target = self._target(result)
        wanted, why = (False, unless) if target is None else _on_codes(target, held, accepts, unless)
        if last is not None:
            self.done.add(last)
        name = str(result.name)
        if wanted and why is None:
            return Domain(True, name, activation, target)
        if wanted:
            self.note(node, why or "")
        return Domain(False, name, activation, None, why)

    def carried(self, node: ir.Node, value: ir.Value | None) -> Domain:
        """The domain of operators that only move elements of ``value``: its codes, if any."""
        grid = self.get(value).grid
        integer = grid is not None and grid.per_tensor
        return Domain(integer, str(node.outputs[0].name), NO_ACTIVATION, grid if integer else None)

    def read(self, domain: Domain, value: ir.Value | str | None, perm: Perm | None = None) -> int:
        """An input in the numbers of ``domain``."""
        return self.codes(value, perm) if domain.integer else self.plain(value, perm)

    def write(self, domain: Domain, perm: Perm) -> int:
        """The tensor of the result."""
        return self.made(domain.result, perm, domain.grid)

    def as_float(self, node: ir.Node, domain: Domain, why: str) -> Domain:
        """``domain``, changed to floats."""
        self.note(node, why)
        return replace(domain, integer=False, grid=None, why=why)

    def _fused(self, node: ir.Node) -> tuple[ir.Value, int, ir.Node | None]:
        """The value after an activation function that alone reads the output of ``node``, and the function."""
        made = node.outputs[0]
        readers = {use.node for use in made.uses()}
        if len(readers) != 1 or str(made.name) in self.outputs:
            return made, NO_ACTIVATION, None
        reader = next(iter(readers))
        activation = self.activation_of(reader)
        if activation is None:
            return made, NO_ACTIVATION, None
        return reader.outputs[0], activation, reader

    def activation_of(self, node: ir.Node) -> int | None:
        """The fusible activation function of a Relu or Clip, or ``None``."""
        if node.domain or node.op_type not in ("Relu", "Clip"):
            return None
        if node.op_type == "Relu":
            return RELU
        low, high = clip_bounds(self, node)
        return _CLIPS.get((low, high))

    def _target(self, value: ir.Value) -> Grid | None:
        """The grid that all readers of ``value`` put it on, perhaps after a clip or a change of shape; or ``None``."""
        while str(value.name) not in self.outputs:
            passed = _passed_on(value)
            if passed is None:
                grids = {self.grid_of(use.node) if use.idx == 0 else None for use in value.uses()}
                return grids.pop() if len(grids) == 1 else None
            value = passed
        return None

    def grid_of(self, node: ir.Node) -> Grid | None:
        """The grid of a QuantizeLinear or DequantizeLinear with constant parameters; ``None`` for other nodes."""
        if node.domain or node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            return None
        if node.attributes.get_int("block_size", 0):
            return None
        codes = node.outputs[0] if node.op_type == "QuantizeLinear" else node.inputs[0]
        scale = self.trace.constants.get(str(node.inputs[1].name)) if node.inputs[1] is not None else None
        given = node.inputs[2] if len(node.inputs) > 2 else None
        zero = None if given is None else self.trace.constants.get(str(given.name))
        if scale is None or codes is None:
            return None
        shift, dtype = (None, "") if codes.dtype is None else _TYPES.get(codes.dtype, (None, ""))
        if shift is None:
            return None
        zeros = (np.zeros(scale.shape, np.int64) if zero is None else zero.astype(np.int64)) - shift
        axis = node.attributes.get_int("axis", 1) if scale.ndim else None
        rank = len(self.trace.shapes[str(codes.name)])
        axis = None if axis is None else axis % rank
        return Grid(dtype, tuple(map(float, np.atleast_1d(scale))), tuple(map(int, np.atleast_1d(zeros))), axis)

    # ------------------------------------------------------------------------------------------------- messages

    def site(self, node: ir.Node) -> str:
        """Name of ``node`` for messages: the site after it, also behind a reshape, else its own name."""
        uses = chain.from_iterable(_last(value).uses() for value in node.outputs)
        codes = (use.node.outputs[0] for use in uses if use.node.op_type == "QuantizeLinear")
        for reader in chain.from_iterable(value.uses() for value in codes):
            facts = read_metadata(reader.node)
            if facts is not None and facts["places"]:
                return str(facts["places"][0][0])
        return str(node.name or node.outputs[0].name)

    def note(self, node: ir.Node, why: str) -> None:
        """Record the reason why ``node`` runs in float between codes."""
        self.notes[f"{self.site(node)}: {node.op_type} is computed in float in the LiteRT file: {why}"] = None

    def refuse_batch(self, node: ir.Node, problem: str) -> NoReturn:
        """Raise an error that a fixed batch avoids.

        Raises:
            FreeBatchError: always.
        """
        raise FreeBatchError(f"{self.site(node)} ({node.op_type})", problem, "export with a fixed batch")

    def refuse(self, node: ir.Node, problem: str, remedy: str) -> NoReturn:
        """Raise an error with the name of the place.

        Raises:
            ExportError: always.
        """
        raise ExportError(f"{self.site(node)} ({node.op_type})", problem, remedy)


# ONNX type of codes -> what is subtracted to count them from the middle, type in the file
_TYPES: dict[Any, tuple[int, str]] = {
    ir.DataType.UINT8: (128, "int8"), ir.DataType.INT8: (0, "int8"), ir.DataType.INT4: (0, "int8"),
    ir.DataType.UINT4: (8, "int8"), ir.DataType.UINT16: (32768, "int16"), ir.DataType.INT16: (0, "int16"),
    ir.DataType.INT32: (0, "int32"),
}  # fmt: skip
SHIFTS = {dtype: shift for dtype, (shift, _) in _TYPES.items()}


def _keeps_order(held: Held, start: Perm, perm: Perm) -> bool:
    """Whether both orders have the longer axes in one sequence, so that the numbers lie in memory alike."""

    def longer(order: Perm) -> list[int]:
        return [i for i in order if held.shape[i] != 1 or held.free[i]]

    return longer(start) == longer(perm)


def _unfit(target: Grid, inputs: Sequence[Grid]) -> str | None:
    """The reason why no integer kernel accepts these activation grids."""
    if target.dtype not in _ACTIVATION_TYPES or not target.per_tensor:
        return "the grid of its output is not one of 8 or 16 bits with one scale"
    for grid in inputs:
        if not grid.per_tensor:
            return "an input has several scales"
        if grid.dtype != target.dtype:
            return f"its input has {grid.dtype[3:]} bits, its output {target.dtype[3:]}"
    if target.dtype == "int16" and not all(grid.symmetric for grid in (target, *inputs)):
        return "kernels of 16 bits take symmetric activations"
    return None


def clip_bounds(low: Lowering, node: ir.Node) -> tuple[float, float]:
    """Bounds of a Clip, as floats; NaN where one is computed."""
    bounds = [-np.inf, np.inf]
    for i, (port, key) in enumerate(((1, "min"), (2, "max"))):
        if len(node.inputs) > port and node.inputs[port] is not None:
            array = low.known(node.inputs[port])
            bounds[i] = float("nan") if array is None else float(array)
        elif key in node.attributes:
            bounds[i] = float(node.attributes.get_float(key))
    return bounds[0], bounds[1]


def _on_codes(
    target: Grid, held: Sequence[Held], accepts: Callable[[Grid, Sequence[Grid]], str | None], unless: str | None
) -> tuple[bool, str | None]:
    """Whether an operator reads and writes codes, and the reason why it is not computed on them."""
    grids = [one.grid for one in held if one.grid is not None]
    floats = [one for one in held if one.grid is None]
    if not floats:
        return True, unless or _unfit(target, grids) or accepts(target, grids)
    if grids and all(one.constant for one in floats):
        return True, unless or f"its constant {floats[0].name} is in float"
    return False, unless


def _last(value: ir.Value) -> ir.Value:
    """The last value after ``value`` along single readers that keep its grid."""
    while (passed := _passed_on(value)) is not None:
        value = passed
    return value


def _passed_on(value: ir.Value) -> ir.Value | None:
    """The output of the only reader of ``value``, where it keeps the grid."""
    use = next(iter(value.uses())) if len(value.uses()) == 1 else None
    if use is None or use.idx != 0 or use.node.domain or use.node.op_type not in _CHANGES_NO_GRID:
        return None
    return use.node.outputs[0]
