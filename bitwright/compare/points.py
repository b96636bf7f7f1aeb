"""Points at which two executions are compared: quantizers, tensors between float operators, outputs; matched by name.

A file that an export wrote keeps the names of the float model's tensors, and so do files of other tools: what a
QuantizeLinear reads has the name it has without it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.agreement import OUTPUT_FORMAT, output_step
from bitwright.compare.cut import (
    Cut,
    Place,
    array_of,
    copied_chain,
    dequantizer,
    part_of,
    quantizer_chain,
    reads_constants,
    values_by_name,
)
from bitwright.core.graph.operators import LENGTHS, TRAITS
from bitwright.export.qdq.forms import after, before, read_metadata
from bitwright.export.qdq.markers import Names, copy_model

Array = NDArray[Any]

_FLOATS = frozenset((ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16))
Read = tuple[str, int]  # the first tensor that a reader makes, and the port at which it reads


@dataclass(frozen=True)
class Point:
    """A tensor of a model: after a quantizer, or a plain one.

    Attributes:
        names: what it may be called: sites, the tensor in front of the quantizer, the one after it.
        entry, result: the tensors before and after it; equal where there is no quantizer.
        format: of the grid, or of a plain tensor.
        scale, axis: name of the initializer with the steps of the grid, and its axis.
        output: whether it is an output of the model.
        between_floats: whether no integer kernel could reach across it.
        passed_by: reads of the tensor that the other model does not round here: what the reader makes, and its port.
        of_shapes: whether its values follow from constants and from the shapes of the inputs alone.
    """

    names: tuple[str, ...]
    entry: str
    result: str
    format: str = OUTPUT_FORMAT
    scale: str | None = None
    axis: int | None = None
    output: bool = False
    between_floats: bool = True
    passed_by: frozenset[Read] = frozenset()
    of_shapes: bool = False

    @property
    def quantized(self) -> bool:
        """Whether it is the output of a quantizer."""
        return self.entry != self.result

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that :func:`bitwright.compare.agreement.compare` needs."""
        return {"places": [[self.names[0], 0]], "format": self.format, "axis": self.axis}


@dataclass(frozen=True)
class Pair:
    """One tensor in both models."""

    a: Point
    b: Point

    @property
    def name(self) -> str:
        """Name in reports."""
        return (self.b if self.b.quantized else self.a).names[0]


def run_name(site: str, run: int, *, pooled: bool = False) -> str:
    """Name a site in its ``run``-th run; a module that runs several times has the same sites every time.

    ``pooled`` where it is rounded after the pool that reads it: another tensor than where it is rounded at once.
    """
    return f"{site}{f', run {run + 1}' if run else ''}{', pooled' if pooled else ''}"


def points_of(model: ir.Model) -> list[Point]:
    """Every point of the main graph, in execution order; bodies of If, Loop and Scan are part of their operator."""
    named, inside, (static, shaped) = values_by_name(model), set[ir.Node](), _without_values(model)
    found: list[tuple[ir.Node | None, Point]] = [
        (None, _plain(value)) for value in model.graph.inputs if _is_float(value) and not value.is_initializer()
    ]
    for node in (node for node in model.graph if node not in static):
        point = _quantized(node, named)
        if point is not None:
            inside.update(quantizer_chain(node, named[point.entry]))
            found.append((node, replace(point, of_shapes=node in shaped)))
        else:
            found.extend((node, _plain(value)) for value in _told_values(node, node in shaped))
    return [p for node, p in found if node is None or p.quantized or node not in inside]


def _told_values(node: ir.Node, of_shapes: bool) -> list[ir.Value]:
    """Floats that ``node`` makes; lengths, and what is made of them before anything is rounded, only where they are returned."""
    found = [value for value in node.outputs if value.name and _is_float(value)]
    return [value for value in found if value.is_graph_output()] if of_shapes else found


def _without_values(model: ir.Model) -> tuple[set[ir.Node], set[ir.Node]]:
    """Operators that follow from constants alone, and those that follow from constants and shapes of the inputs."""
    static, shaped = set[ir.Node](), set[ir.Node]()
    for node in model.graph:
        if reads_constants(node, static):
            static.add(node)
        if node in static or node.op_type in LENGTHS or reads_constants(node, shaped):
            shaped.add(node)
    return static, shaped


def _is_float(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype in _FLOATS


def _plain(value: ir.Value) -> Point:
    maker, name = value.producer(), str(value.name)
    apart = not any(_is_code(given) for given in (maker.inputs if maker is not None else ()))
    apart = apart and not any(_ends_in_codes(use.node) for use in value.uses())
    return Point((name,), name, name, output=value.is_graph_output(), between_floats=apart)


def _is_code(value: ir.Value | None) -> bool:
    """Whether a DequantizeLinear of an activation makes ``value``."""
    maker = dequantizer(value)
    return maker is not None and maker.inputs[0] is not None and maker.inputs[0].producer() is not None


def _ends_in_codes(node: ir.Node) -> bool:
    if node.op_type == "QuantizeLinear":
        return True
    if node.op_type not in TRAITS["clamp"]:
        return False
    return any(use.node.op_type == "QuantizeLinear" for value in node.outputs for use in value.uses())


def _quantized(node: ir.Node, named: Mapping[str, ir.Value]) -> Point | None:
    """The point after ``node`` if it ends an activation quantizer, of ours or of another tool."""
    result, facts = node.outputs[0], read_metadata(node)
    if facts is not None and facts["role"] == "activation" and str(facts["entry"]) in named:
        entry = str(facts["entry"])
        late = facts["pooled"] > 0
        sites = [run_name(str(site), int(run), pooled=late) for site, run in facts["places"]]
        names = tuple(dict.fromkeys((*sites, entry, str(result.name))))
        return Point(
            names, entry, str(result.name), facts["format"], facts["scale"], facts["axis"], result.is_graph_output()
        )
    codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
    maker = None if codes is None else codes.producer()
    if maker is None or maker.op_type != "QuantizeLinear" or maker.inputs[0] is None or codes is None:
        return None
    entry, scale = str(maker.inputs[0].name), node.inputs[1]
    zero = maker.inputs[2] if len(maker.inputs) > 2 else None
    kind = codes.dtype if zero is None else zero.dtype
    rank = 0 if scale is None or scale.shape is None else len(scale.shape)
    return Point(
        (entry, str(result.name)), entry, str(result.name),
        "uint8" if kind is None else kind.name.lower(), None if scale is None else str(scale.name),
        node.attributes.get_int("axis", 1) if rank else None, result.is_graph_output(),
    )  # fmt: skip


def match(a: Sequence[Point], b: Sequence[Point], *, known: frozenset[str] | None = None, fine: bool) -> list[Pair]:
    """The points that both models have, in the order of ``b``.

    Args:
        a, b: of the two models.
        known: names of those of ``a`` whose values there are; all by default.
        fine: also plain tensors next to quantizers, which a runtime's integer kernels would not make.
    """
    ordered = sorted(a, key=lambda p: p.quantized)  # a quantizer's value goes before what it reads
    by_name = {name: point for point in ordered for name in point.names}
    pairs: dict[Point, Pair] = {}
    for point in b:
        same = next((by_name[name] for name in point.names if name in by_name), None)
        if same is None or (same.quantized and not point.quantized and not point.output):
            continue
        shown = point.quantized or point.output or point.between_floats or fine
        if shown and (known is None or not known.isdisjoint(same.names)):
            pairs[point] = Pair(same, point)
    return list(pairs.values())


def read_alike(pairs: Iterable[Pair], b: ir.Model) -> list[Pair]:
    """``pairs``, in which a plain tensor of ``a`` stands for those reads of it that its quantizer has in ``b``.

    A quantizer may round a tensor for some of its readers only, as that of a residual addition, and two may round it for
    different ones.
    """
    named, pairs = values_by_name(b), list(pairs)
    through: dict[str, dict[Point, set[Read]]] = {}
    inside: dict[str, set[ir.Node]] = {}
    for point in (pair.b for pair in pairs if pair.b.quantized):
        maker = named[point.result].producer()
        assert maker is not None
        through.setdefault(point.entry, {})[point] = set(_reads_of(named[point.result]))
        inside.setdefault(point.entry, set()).update(quantizer_chain(maker, named[point.entry]))
    direct = {entry: set(_reads_of(named[entry], chain)) for entry, chain in inside.items()}
    reads = {entry: direct[entry].union(*points.values()) for entry, points in through.items()}

    def alike(pair: Pair) -> Pair:
        if pair.a.quantized or not pair.b.quantized:
            return pair
        others = reads[pair.b.entry] - through[pair.b.entry][pair.b]
        return replace(pair, a=replace(pair.a, passed_by=frozenset(others))) if others else pair

    return [alike(pair) for pair in pairs]


def _reads_of(value: ir.Value, without: Container[ir.Node] = ()) -> Iterator[Read]:
    return ((str(node.outputs[0].name), port) for node, port in value.uses() if node not in without)


def observed(model: ir.Model, points: Sequence[Point]) -> tuple[ir.Model, dict[Point, str]]:
    """A copy that also returns every point, and under which name; integer kernels stay what they are.

    Codes are read by a DequantizeLinear of their own, because one whose result is an output joins no kernel.
    """
    copy, names = copy_model(model), Names(model)
    named, found = values_by_name(copy), dict[Point, str]()
    for point in dict.fromkeys(points):
        value = named[point.result]
        maker = value.producer()
        if maker is not None and maker.op_type == "DequantizeLinear":
            seen = _twin(maker, names.value(f"{point.result}_seen"), names)
        elif value.is_graph_output():
            seen = value
        elif maker is None:
            seen = _identity(copy, value, names)
        else:
            seen = value
        if not seen.is_graph_output():
            copy.graph.outputs.append(seen)
        found[point] = str(seen.name)
    return copy, found


def _twin(node: ir.Node, name: str, names: Names) -> ir.Value:
    twin = ir.Node("", node.op_type, list(node.inputs), node.attributes.values(), name=names.node(name))
    twin.outputs[0].name, twin.outputs[0].type = name, node.outputs[0].type
    after(node)(twin)
    return twin.outputs[0]


def _identity(model: ir.Model, value: ir.Value, names: Names) -> ir.Value:
    node = ir.Node("", "Identity", [value], name=names.node(f"{value.name}_border"))
    node.outputs[0].name = names.value(f"{value.name}_border")
    node.outputs[0].dtype, node.outputs[0].shape = value.dtype or ir.DataType.FLOAT, value.shape
    maker = value.producer()
    place = before(model.graph[0]) if maker is None else after(maker)
    place(node)
    return node.outputs[0]


def cut_at(model: ir.Model, values: Mapping[Point, Array]) -> tuple[Cut, dict[Point, Place]]:
    """``model``, which is changed by it, taken apart at points that are fed ``values`` in front of their quantizer."""
    names, named, places = Names(model), values_by_name(model), dict[Point, Place]()
    borders: set[ir.Node] = set()
    for point, array in values.items():
        entry, result = named[point.entry], named[point.result]
        if point.quantized:
            maker = result.producer()
            assert maker is not None
            chain = quantizer_chain(maker, entry)
        else:
            result = _identity(model, entry, names)
            maker = result.producer()
            assert maker is not None
            borders.add(maker)
            for node, port in tuple(entry.uses()):
                if node not in borders and (str(node.outputs[0].name), port) not in point.passed_by:
                    node.replace_input_with(port, result)
            chain = [maker]
        places[point] = Place(point.facts, chain, entry, result, array, steps_of(point, array, model))
    return Cut(model, list(places.values())), places


def steps_of(point: Point, array: Array, model: ir.Model) -> Array:
    """One step of the grid at ``point``; of a plain tensor a thousandth of its largest value."""
    scale = array_of(model.graph.initializers.get(point.scale or ""))
    return output_step(array) if scale is None else np.asarray(scale)


def on_grids(model: ir.Model, values: Mapping[Point, Array]) -> tuple[ir.Model, dict[str, Array], dict[Point, str]]:
    """A model of the quantizers of the points alone; what to feed it; what it calls their results."""
    copy = copy_model(model)
    named, names = values_by_name(copy), Names(copy)
    feeds, results = dict[str, Array](), dict[Point, ir.Value]()
    for point, array in values.items():
        if not point.quantized:
            continue
        entry, last = named[point.entry], named[point.result].producer()
        assert last is not None
        dtype = entry.dtype or ir.DataType.FLOAT
        given = ir.Value(name=names.value("given"), type=ir.TensorType(dtype), shape=ir.Shape(array.shape))
        copy.graph.inputs.append(given)
        chain = copied_chain(quantizer_chain(last, entry), entry, given, names)
        copy.graph.extend(chain)
        results[point] = chain[-1].outputs[0]
        results[point].dtype = results[point].dtype or ir.DataType.FLOAT
        feeds[str(given.name)] = np.asarray(array, dtype.numpy(), order="C")
    part = part_of(copy, list(results.values()))
    return part, feeds, {point: str(value.name) for point, value in results.items()}
