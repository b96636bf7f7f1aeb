"""Run two executions on one input, end to end and operator by operator; each operator is fed the first execution's values.

Constants that operators read are compared as floats between the two models, and exchanged for targeted runs
(:class:`Parameter`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.agreement import Agreement, compare, spread
from bitwright.compare.cut import (
    QDQ,
    Cut,
    Place,
    array_of,
    constant_at,
    dequantizer,
    part_of,
    reads_constants,
    zero_points,
)
from bitwright.compare.points import Pair, Point, cut_at, match, observed, on_grids, points_of, read_alike, steps_of
from bitwright.compare.runtime import run_model
from bitwright.compare.sides import Side
from bitwright.core.graph.operators import TRAITS
from bitwright.export.qdq.forms import Builder
from bitwright.export.qdq.markers import copy_model

Array = NDArray[Any]
Key = tuple[str, int]  # name of an operator's first output, and the port

_FLOATS = frozenset((ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16))


@dataclass(frozen=True)
class Parameter:
    """A constant that an operator reads.

    Attributes:
        name: of the tensor.
        op: type of the operator.
        role: ``weight``, ``bias`` or ``constant``.
        value: in float.
        step: one step of its grid, broadcast against ``value``; ``None`` where it is stored in float.
    """

    name: str
    op: str
    role: str
    value: Array
    step: Array | None

    def apart(self, other: Array) -> float:
        """The largest difference to ``other``, in steps of the grid; in ten-thousandths of its largest value without one."""
        peak = float(np.abs(self.value).max(initial=0.0, where=np.isfinite(self.value))) or 1.0
        step = np.float64(1e-4 * peak) if self.step is None else self.step.astype(np.float64)
        with np.errstate(invalid="ignore"):
            gap = np.abs(self.value.astype(np.float64) - other.astype(np.float64)) / step
        gap = np.where(self.value == other, 0.0, gap)  # infinities too
        return float(np.nan_to_num(gap, nan=np.inf).max(initial=0.0))


def parameters(model: ir.Model) -> dict[Key, Parameter]:
    """Every float constant that an operator of the main graph reads beside values that depend on the input."""
    static: set[ir.Node] = set()
    read: list[tuple[ir.Node, int, ir.Value]] = []
    for node in model.graph:
        if reads_constants(node, static):
            static.add(node)
        elif node.op_type not in QDQ:
            read += [(node, port, value) for port, value in _constants_of(node, static)]
    values, found = _evaluated(model, dict.fromkeys(value for _, _, value in read)), {}
    for node, port, value in read:
        array = values.get(value)
        if array is not None and array.size:
            key, role = (str(node.outputs[0].name), port), role_of(node, port)
            found[key] = Parameter(str(value.name), node.op_type, role, array, _step(value, array))
    return found


def _constants_of(node: ir.Node, static: set[ir.Node]) -> Iterator[tuple[int, ir.Value]]:
    for port, value in enumerate(node.inputs):
        if value is not None and (value.is_initializer() or value.producer() in static):
            yield port, value


def _evaluated(model: ir.Model, values: Iterable[ir.Value]) -> dict[ir.Value, Array]:
    """Floats: initializers as they are, and what operators make of constants, computed in one run."""
    held = {value: array_of(value) for value in values}
    wanted = [v for v, array in held.items() if array is None and (v.dtype is None or v.dtype in _FLOATS)]
    made = run_model(part_of(model, wanted), {}, "float") if wanted else {}
    found = {value: made.get(str(value.name)) if array is None else array for value, array in held.items()}
    return {value: array for value, array in found.items() if array is not None and array.dtype.kind == "f"}


def role_of(node: ir.Node, port: int) -> str:
    """Role of the constant at ``port`` of ``node``."""
    if node.op_type in TRAITS["bias_port"] and port == 2:
        return "bias"
    if node.op_type in TRAITS["layer"]:
        return "weight"
    return "bias" if node.op_type == "Add" else "constant"


def _step(value: ir.Value, array: Array) -> Array | None:
    """One step of the grid that ``value`` was stored on."""
    maker = value.producer()
    while maker is not None and maker.op_type in ("Reshape", "Transpose", "Cast", "Identity"):
        source = maker.inputs[0]
        maker = None if source is None else source.producer()
    scale = constant_at(maker, 1) if maker is not None and maker.op_type in ("DequantizeLinear", "Mul") else None
    if maker is None or scale is None:
        return None
    if maker.op_type == "Mul" or maker is not value.producer():
        return np.asarray(scale.max())
    return spread(scale, maker.attributes.get_int("axis", 1), array)


def give(model: ir.Model, values: Mapping[Key, Array]) -> None:
    """Replace constants that operators of ``model`` read by float values; those of another shape stay."""
    builder = Builder(model)
    by_output = {str(node.outputs[0].name): node for node in model.graph if node.outputs}
    for (name, port), array in values.items():
        node = by_output.get(name)
        old = None if node is None or len(node.inputs) <= port else node.inputs[port]
        if node is None or old is None:
            continue
        dtype = old.dtype.numpy() if old.dtype is not None else np.dtype(np.float32)
        node.replace_input_with(port, builder.initializer(f"{old.name}_given", array.astype(dtype)))


def clear(model: ir.Model, zeros: Mapping[Key, Array]) -> None:
    """Let operators of ``model`` read zeros, in floats of the shape that is given, or as codes where they read codes.

    A runtime picks its kernels by what stands in the graph. With a float bias in place of codes it may compute in float
    what it computes on integers, and a difference is gone that the bias had no part in.
    """
    builder, stored = Builder(model), set[Key]()
    by_output = {str(node.outputs[0].name): node for node in model.graph if node.outputs}
    for name, port in zeros:
        maker = dequantizer(by_output[name].inputs[port]) if name in by_output else None
        codes = None if maker is None else constant_at(maker, 0)
        if maker is not None and codes is not None:
            cleared = np.broadcast_to(zero_points(maker), codes.shape).astype(codes.dtype)
            maker.replace_input_with(0, builder.initializer(f"{name}_{port}_cleared", cleared))
            stored.add((name, port))
    give(model, {key: array for key, array in zeros.items() if key not in stored})


def narrow(model: ir.Model, outputs: set[str], bits: int) -> bool:
    """Store the weights of the operators that make ``outputs`` with ``bits`` bits less, their biases to match.

    Returns:
        Whether any of them has integer codes.
    """
    builder, factor, changed = Builder(model), 2.0**bits, False
    layers = [node for node in model.graph if node.op_type in TRAITS["layer"]]
    made = [layer for layer in layers if not outputs.isdisjoint(str(v.name) for v in layer.outputs)]
    for maker in (maker for layer in made for maker in _dequantized(layer)):
        codes, scale, zero = constant_at(maker, 0), constant_at(maker, 1), zero_points(maker)
        if codes is not None and scale is not None:
            less = (np.rint((codes.astype(np.float64) - zero) / factor) + zero).astype(codes.dtype)
            maker.replace_input_with(0, builder.initializer("coarser_q", less))
            more = (scale * np.float32(factor)).astype(np.float32)
            maker.replace_input_with(1, builder.initializer("coarser_scale", more))
            changed = True
    return changed


def _dequantized(layer: ir.Node) -> Iterator[ir.Node]:
    """DequantizeLinear nodes of its weight and bias, also of a bias in a following Add, which runtimes fuse."""
    values = [*layer.inputs[1:]]
    for reader, port in layer.outputs[0].uses() if layer.op_type == "MatMul" else ():
        values += [reader.inputs[1 - port]] if reader.op_type == "Add" else []
    yield from filter(None, map(dequantizer, values))


Feeds = Mapping[str, Array]
Edit = Callable[[ir.Model], object]
_ROUNDED = 1.0 + 1e-3  # steps: a parameter this close was rounded, up or down


def unchanged(model: ir.Model) -> None:
    """The edit that changes nothing."""


@dataclass
class Lockstep:
    """Two executions, of which ``a`` is the one nearer to what was trained.

    Attributes:
        a, b: the sides.
        feeds_a, feeds_b: the input.
        pairs: the tensors that both have, in the order of ``b``.
        errors: codes -> how far the arithmetic of the kernels of ``b`` is known to bring a value, in steps.
    """

    a: Side
    b: Side
    feeds_a: Feeds
    feeds_b: Feeds
    pairs: list[Pair] = field(init=False)
    errors: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        known = frozenset(self.a.values or self.b.values) or None
        fine = not (self.a.in_runtime or self.b.in_runtime) and known is None
        found = match(
            points_of(self.a.model), points_of(self.b.model), known=known if self.a.values else None, fine=fine
        )
        # between quantizers of b only those count: a plain tensor there has no grid that could be missed
        quantized = any(pair.b.quantized or pair.a.quantized for pair in found)
        kept = [
            pair
            for pair in found
            if not quantized or pair.a.quantized or pair.b.quantized or pair.b.output or pair.b.between_floats
            if not self.b.values or known is None or known & set(pair.b.names)
        ]
        if (
            self.a.flat or self.b.flat
        ):  # whose files hold what follows from shapes as constants, and zeros of states not at all
            kept = [pair for pair in kept if not pair.b.of_shapes]
        self.pairs = read_alike(kept, self.b.model)

    # ------------------------------------------------------------------------------------------- free runs

    @cached_property
    def free_a(self) -> dict[Pair, Array]:
        """Values of ``a``, run end to end."""
        return self._free(self.a, self.feeds_a, [pair.a for pair in self.pairs])

    @cached_property
    def free_b(self) -> dict[Pair, Array]:
        """Values of ``b``, run end to end."""
        return self._free(self.b, self.feeds_b, [pair.b for pair in self.pairs])

    def _free(self, side: Side, feeds: Feeds, points: Sequence[Point]) -> dict[Pair, Array]:
        if side.values:
            names = [next(name for name in point.names if name in side.values) for point in points]
            return {pair: np.asarray(side.values[name][0]) for pair, name in zip(self.pairs, names, strict=True)}
        model, seen = observed(side.model, points)
        found = side.run(model, feeds)
        return {pair: found[seen[point]] for pair, point in zip(self.pairs, points, strict=True)}

    # ----------------------------------------------------------------------------------- operator by operator

    @cached_property
    def fed(self) -> dict[Pair, Array]:
        """``free_a`` on the grids of ``b``: the inputs of every operator."""
        return self.on_grid(self.free_a)

    @cached_property
    def rounded(self) -> dict[Key, Array]:
        """Parameters of ``b`` that are parameters of ``a`` rounded to a grid: at most one step apart."""
        if self.a.values:
            return {}
        ours, theirs = self.parameters
        same = ((key, ours[key], theirs[name]) for name, key in self.keys_in_a.items())
        return {
            key: b.value
            for key, a, b in same
            if a.step is None and b.step is not None and a.value.shape == b.value.shape and b.apart(a.value) <= _ROUNDED
        }

    @cached_property
    def parameters(self) -> tuple[dict[Key, Parameter], dict[Key, Parameter]]:
        """Constants that operators of ``a`` and of ``b`` read."""
        return parameters(self.a.model), parameters(self.b.model)

    @cached_property
    def keys_in_a(self) -> dict[Key, Key]:
        """Parameters of ``b`` -> their names in ``a``: matched by the output of their operator, else by order."""
        ours, theirs = self.parameters
        alias = {name: pair.a.entry for pair in self.pairs for name in (pair.b.entry, pair.b.result)}
        found = {(name, port): (alias.get(name, name), port) for name, port in theirs}
        found = {key: other for key, other in found.items() if other in ours and ours[other].op == theirs[key].op}
        taken, rest = set(found.values()), dict[Any, list[Key]]()
        for key, one in ours.items():
            if key not in taken:
                rest.setdefault((one.op, key[1], one.value.shape), []).append(key)
        for key, one in theirs.items():
            same = rest.get((one.op, key[1], one.value.shape), [])
            if key not in found and same:
                found[key] = same.pop(0)
        return found

    @cached_property
    def own_a(self) -> dict[Pair, Array]:
        """Outputs of the operators of ``a``, fed ``fed``, with parameters as ``b`` rounded them, on the grids of ``b``."""
        if self.a.values:
            return self.fed
        found, _ = self.locally(self.a, self.feeds_a, edit=lambda model: give(model, self.rounded))
        return self.on_grid(found)

    @cached_property
    def kernels(self) -> dict[Pair, str]:
        """The kernel with which the runtime of ``b`` computed each tensor."""
        return self._own_b[1]

    @cached_property
    def places(self) -> dict[Pair, Place]:
        """Every tensor in ``b``, with the operators that lead to it."""
        return self.cut_b[1]

    @property
    def own_b(self) -> dict[Pair, Array]:
        """Outputs of the operators of ``b``, fed the values of ``a``."""
        return self._own_b[0]

    @cached_property
    def cut_b(self) -> tuple[Cut, dict[Pair, Place]]:
        """The model of ``b`` cut at the pairs, with values of ``a`` as inputs; the place of each pair."""
        cut, places = cut_at(copy_model(self.b.model), {pair.b: self.free_a[pair] for pair in self.pairs})
        return cut, {pair: places[pair.b] for pair in self.pairs}

    @cached_property
    def _own_b(self) -> tuple[dict[Pair, Array], dict[Pair, str]]:
        return self.locally(self.b, self.feeds_b, run=partial(self.b.run, errors=self.errors))

    def in_the_whole(self, edit: Edit = unchanged) -> dict[Pair, tuple[Array, Array]]:
        """Outputs of the operators of ``b`` alone, fed the values of a run of the whole model, and their outputs in that run.

        Args:
            edit: changes a copy of the graph before.
        """
        side, free = self.b, self.free_b
        if edit is not unchanged:
            side = replace(side, model=copy_model(side.model))
            edit(side.model)
            free = self._free(side, self.feeds_b, [pair.b for pair in self.pairs])
        alone, _ = self.locally(side, self.feeds_b, source=free)
        return {pair: (alone[pair], free[pair]) for pair in self.pairs if pair in alone}

    def locally(
        self,
        side: Side,
        feeds: Feeds,
        pairs: Sequence[Pair] | None = None,
        *,
        edit: Edit = unchanged,
        source: Mapping[Pair, Array] | None = None,
        run: Callable[[ir.Model, Feeds, dict[str, str]], Mapping[str, Array] | None] | None = None,
    ) -> tuple[dict[Pair, Array], dict[Pair, str]]:
        """Outputs of the operators of ``side`` for given inputs, and the kernels that computed them.

        Args:
            side: ``a`` or ``b``.
            feeds: of its graph.
            pairs: only these; all by default.
            edit: changes a copy of the side's graph before.
            source: what they are fed; by default what ``a`` has there.
            run: runs a model instead of the side; empty results where it gives ``None``.
        """
        model = copy_model(side.model)
        edit(model)
        mine = {pair: pair.a if side is self.a else pair.b for pair in self.pairs}
        source = source or (self.fed if side is self.a else self.free_a)
        cut, places = cut_at(model, {point: source[pair] for pair, point in mine.items()})
        names = {pair: places[mine[pair]] for pair in (self.pairs if pairs is None else pairs)}
        groups = cut.groups() if pairs is None else [list(names.values())]
        execute = side.run if run is None else run
        found: dict[str, Array] = {}
        types: dict[str, str] = {}
        for part, more in map(cut.part, groups):
            found.update(execute(part, {**feeds, **more}, types) or {})
        values = {pair: found[str(p.result.name)] for pair, p in names.items() if str(p.result.name) in found}
        return values, {pair: p.kernel(types) for pair, p in names.items()}

    # ------------------------------------------------------------------------------------------- comparing

    def on_grid(self, values: Mapping[Pair, Array]) -> dict[Pair, Array]:
        """Values on the grid of ``b``, where it has one."""
        by_point = {pair.b: array for pair, array in values.items() if pair.b.quantized}
        if not by_point:
            return dict(values)
        model, feeds, names = on_grids(self.b.model, by_point)
        found = run_model(model, feeds, "float")
        return {pair: found[names[pair.b]] if pair.b in names else array for pair, array in values.items()}

    def agreement(self, pair: Pair, one: Array, other: Array) -> Agreement:
        """Agreement of two values of a tensor on its grid."""
        point, side = (pair.b, self.b) if pair.b.quantized or not pair.a.quantized else (pair.a, self.a)
        scale = steps_of(point, one, side.model)
        return compare(one, other, {**point.facts, "places": [[pair.name, 0]]}, scale)
