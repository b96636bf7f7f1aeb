"""Cut an exported model at its quantizers, so that each layer can be fed the simulation's own values.

The cut is made once, in one model: after each quantizer its readers read a new graph input instead,
through a copy of the quantizer, and the quantizer's own output becomes a graph output. The pieces between
the cuts do not touch each other. They are handed out in models of about a hundred places each, because the
runtime's time to load a model grows faster than its number of inputs and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.agreement import OUTPUT_FORMAT, OUTPUT_STEP, output_step, spread
from bitwright.core.graph.operators import TRAITS
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.integer_sums import largest_sum
from bitwright.export.files.onnx_file import all_nodes, array_of
from bitwright.export.qdq.forms import damaged_metadata, read_metadata
from bitwright.export.qdq.markers import Names, copy_model, move_uses
from bitwright.progress import collector_paused

Array = NDArray[Any]
Values = Mapping[str, Array | Sequence[Array]]

#: epsilon of the types that round results so far that a step of eight bits is about as small
_HALF: Mapping[ir.DataType | None, float] = {ir.DataType.FLOAT16: 2.0**-10, ir.DataType.BFLOAT16: 2.0**-7}
_PLACES_AT_ONCE = 100
BORDER = "bitwright.border"  # in the metadata of nodes that only stand for the way into a body, or out of it
# what turns floats into codes, or stands for its limits: no integer kernel
_FLOAT_MAKERS = frozenset(("QuantizeLinear", "Cast", "Clip", "Mul", "Min"))
#: integer kernels of ONNX Runtime whose results are floats
ENDS_IN_FLOATS = frozenset(("MatMulIntegerToFloat", "QGemm"))
#: operators that only move values; runtimes put them on either side of a quantizer
MOVES = frozenset((*TRAITS["reshape"], "Transpose"))
#: operators of a quantizer in a file
QDQ = frozenset(("QuantizeLinear", "DequantizeLinear"))
# operator -> axis of the output channels in its weight, where no attribute moves it
_AXES = {"Conv": 0, "ConvTranspose": 1, "MatMul": -1, "Gemm": 1}
_WIDE = 16  # bits; wider inputs have no integer kernel


@dataclass(eq=False)
class Piece:
    """A connected group of operators between quantizers.

    Attributes:
        ops: their types, in execution order, without QuantizeLinear and DequantizeLinear.
        made: names of the tensors they make.
        float_params: ``weight``, ``bias``: which of them a Conv or Gemm among them has in float.
        accumulated: the largest sum that an integer kernel among them may have to hold, see
            :mod:`bitwright.core.numerics.integer_sums`.
        halves: how many of them compute in float16 or bfloat16.
        epsilon: of the coarser of these types; 0 where there is none.
        bias: the most that the int32 grid of a bias moves it, where the simulation has that bias in float.
    """

    ops: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    float_params: set[str] = field(default_factory=set)
    accumulated: int = 0
    halves: int = 0
    epsilon: float = 0.0
    bias: float = 0.0

    @property
    def rounding(self) -> float:
        """Rounding error bound of half precision on the results of a piece, relative to the largest result.

        Every operator rounds once in the simulation and once in the runtime, by half of ``epsilon`` each, and these errors are
        independent (Higham and Mary 2019, DOI 10.1137/18M1226312).
        """
        return self.epsilon * math.sqrt(self.halves)

    def add(self, node: ir.Node) -> None:
        """Add one operator."""
        coarse = max((_HALF.get(v.dtype, 0.0) for v in (*node.inputs, *node.outputs) if v is not None), default=0.0)
        self.halves += coarse > 0
        self.epsilon = max(self.epsilon, coarse)
        self.ops.append(node.op_type)
        self.made.extend(str(value.name) for value in node.outputs)
        self.accumulated = max(self.accumulated, _accumulated(node))
        self.bias += sum(map(_off_grid, node.inputs))
        for port, name in ((1, "weight"), (2, "bias")) if node.op_type in TRAITS["bias_port"] else ():
            value = node.inputs[port] if len(node.inputs) > port else None
            if value is not None and value.is_initializer():
                self.float_params.add(name)


def values_by_name(model: ir.Model) -> dict[str, ir.Value]:
    """Every value of the main graph."""
    graph = model.graph
    found = {str(value.name): value for value in (*graph.inputs, *graph.initializers.values())}
    for node in graph:
        found.update((str(value.name), value) for value in node.outputs if value.name)
    return found


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Attributes of ``node`` as Python values."""
    return {key: attr.value for key, attr in node.attributes.items() if not attr.is_ref()}


def constant_at(node: ir.Node, port: int) -> Array | None:
    """The constant that an operator reads at a port, if there is one."""
    return array_of(node.inputs[port]) if len(node.inputs) > port else None


def dequantizer(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear that makes ``value``, if one does."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def zero_points(node: ir.Node) -> Array:
    """Zero points of a dequantized constant, shaped to broadcast against it."""
    codes, zero = constant_at(node, 0), constant_at(node, 2)
    return np.zeros(()) if codes is None or zero is None else spread(zero, node.attributes.get_int("axis", 1), codes)


def _off_grid(value: ir.Value | None) -> float:
    """Half a step of an int32 bias that no site of the simulation stands for; 0 of other values."""
    node = dequantizer(value)
    if node is None or read_metadata(node) is not None:
        return 0.0
    codes, scale = node.inputs[0], constant_at(node, 1)
    if codes is None or scale is None or codes.dtype != ir.DataType.INT32:
        return 0.0
    return float(np.abs(scale).max(initial=0.0)) / 2


def _accumulated(node: ir.Node) -> int:
    """The bound of :func:`~bitwright.core.numerics.integer_sums.largest_sum` for ``node``; 0 where no int32 sum is made."""
    stored = dequantizer(node.inputs[1]) if node.op_type in _AXES and len(node.inputs) > 1 else None
    codes = None if stored is None else constant_at(stored, 0)
    furthest = _furthest(node.inputs[0]) if codes is not None else 0
    if stored is None or codes is None or not furthest or codes.ndim < 2:
        return 0
    axis = 0 if node.op_type == "Gemm" and node.attributes.get_int("transB", False) else _AXES[node.op_type]
    groups = node.attributes.get_int("group", 1) if node.op_type == "ConvTranspose" else 1
    centred = codes.astype(np.int64) - zero_points(stored).astype(np.int64)
    return largest_sum(centred, axis, groups, furthest=furthest)


def _furthest(value: ir.Value | None) -> int:
    """Largest absolute code minus zero point of an activation on an integer grid; 0 for other values."""
    node = dequantizer(value)
    zero = None if node is None else constant_at(node, 2)
    kind = None if node is None or zero is None or node.inputs[2] is None else node.inputs[2].dtype
    if zero is None or kind is None or "INT" not in kind.name or kind.bitwidth > _WIDE:
        return 0
    fmt = IntFormat(int(kind.bitwidth), signed=not kind.name.startswith("U"))
    whole = zero.astype(np.int64)
    return int(max((fmt.qmax - whole).max(), (whole - fmt.qmin).max()))


@dataclass(eq=False)
class Place:
    """A tensor to compare: the result of an activation quantizer, or a graph output that ends in none.

    Attributes:
        facts: what ``to_qdq`` noted: ``places``, ``format``, ``axis``.
        chain: the nodes of the quantizer, from ``entry`` to ``result``; empty for a plain output.
        expected: the simulation's value.
        scale: one step of the grid.
        piece: what computes it.
    """

    facts: dict[str, Any]
    chain: list[ir.Node]
    entry: ir.Value
    result: ir.Value
    expected: Array
    scale: Array | None
    piece: Piece = field(default_factory=Piece)

    @property
    def codes(self) -> str:
        """Name of the tensor that an integer kernel would make: the codes, or the result itself."""
        if not self.chain:
            return str(self.result.name)
        # of half precision the result of DequantizeLinear is cast
        last = next((node for node in reversed(self.chain) if node.op_type != "Cast"), self.chain[-1])
        return "" if last.inputs[0] is None else str(last.inputs[0].name)

    def kernel(self, kernels: Mapping[str, str]) -> str:
        """Kernel that made the tensor: an integer kernel, one that returns floats to its quantizer, or ``float``.

        Args:
            kernels: tensor -> what a runtime's default mode made it with.
        """
        last = kernels.get(self.codes, "float")
        moved = last in MOVES and not MOVES.issuperset(self.piece.ops)  # what was quantized in front of it
        if self.chain and last not in _FLOAT_MAKERS and not moved:
            return last
        return next((kernels[name] for name in self.piece.made if kernels.get(name) in ENDS_IN_FLOATS), "float")


def _makers(node: ir.Node, cuts: Container[ir.Value], static: Container[ir.Node]) -> Iterator[ir.Node]:
    """The operators that make the inputs of ``node``; none for inputs in ``cuts`` and for ``static`` operators."""
    for value in node.inputs:
        maker = None if value is None or value in cuts else value.producer()
        if maker is not None and maker not in static:
            yield maker


class Cut:
    """A model cut at places.

    Args:
        model: it is changed.
        places: tensors of its main graph, each with the value that its readers are fed.
        unchecked: site -> why it is not among the places.
        nan_is_free: whether the simulation replaces every NaN of a place before anything is returned.

    Attributes:
        places, unchecked, nan_is_free: as given.
    """

    def __init__(
        self,
        model: ir.Model,
        places: Sequence[Place],
        unchecked: Mapping[str, str] | None = None,
        *,
        nan_is_free: bool = False,
    ) -> None:
        self._model, self.places, self.unchecked = model, list(places), dict(unchecked or {})
        self.nan_is_free = nan_is_free
        self._find_pieces()
        self._fed = self._apply()
        self._index = {node: i for i, node in enumerate(model.graph)}

    def groups(self) -> Iterator[list[Place]]:
        """All places, in groups that one model computes; those of one piece stay together."""
        by_piece: dict[Piece, list[Place]] = {}
        for place in self.places:
            by_piece.setdefault(place.piece, []).append(place)
        group: list[Place] = []
        for places in by_piece.values():
            group += places
            if len(group) >= _PLACES_AT_ONCE:
                yield group
                group = []
        if group:
            yield group

    def part(self, places: Sequence[Place]) -> tuple[ir.Model, dict[str, Array]]:
        """A model that computes ``places`` from the values fed at those in front of them; what to feed it."""
        return self._part([place.result for place in places])

    def before(self, places: Sequence[Place]) -> tuple[ir.Model, dict[str, Array]]:
        """A model that ends in front of the quantizers of ``places``, which must not be at the graph's inputs; its feeds."""
        return self._part(list(dict.fromkeys(place.entry for place in places)))

    def _part(self, results: list[ir.Value]) -> tuple[ir.Model, dict[str, Array]]:
        """The submodel that computes ``results``, with its feeds besides the graph's inputs."""
        model = part_of(self._model, results, self._index)
        feeds = {}
        for name in self._fed.keys() & {str(value.name) for value in model.graph.inputs}:
            place = self._fed[name]
            feeds[name] = np.asarray(place.expected, (place.entry.dtype or ir.DataType.FLOAT).numpy(), order="C")
        return model, feeds

    def _find_pieces(self) -> None:
        """Join operators that no cut lies between."""
        root_of, static = self._joined()
        apart = {node for place in self.places for node in place.chain} | static
        pieces: dict[ir.Node, Piece] = {}
        for node, root in root_of.items():
            piece = pieces.setdefault(root, Piece())
            if node not in apart and BORDER not in node.metadata_props and node.op_type not in QDQ:
                piece.add(node)
        for place in self.places:
            maker = place.result.producer()
            assert maker is not None
            place.piece = pieces[root_of[maker]]
            if not place.chain and place.scale is not None:
                # a step there is a part of the largest value, as what half precision rounds is
                place.scale = place.scale * max(1.0, 4 * place.piece.rounding / OUTPUT_STEP)

    def _joined(self) -> tuple[dict[ir.Node, ir.Node], set[ir.Node]]:
        """Node -> the node that stands for all that it is joined with, and the nodes that read constants alone.

        Union-find, one pass over the nodes.
        """
        cuts = {place.result for place in self.places if place.chain}
        owners: dict[ir.Node, ir.Node] = {}
        parent: dict[ir.Node, ir.Node] = {}
        static: set[ir.Node] = set()
        top = None
        for node in all_nodes(self._model.graph):
            top = node if node.graph is self._model.graph or top is None else top
            owners[node] = top
            parent.setdefault(top, top)
            if node is top and reads_constants(node, static):
                static.add(node)
                continue
            for maker in _makers(node, cuts, static):
                parent[_root(parent, owners[maker])] = _root(parent, top)
        return {node: _root(parent, owner) for node, owner in owners.items()}, static

    def _apply(self) -> dict[str, Place]:
        """Feed every piece from new graph inputs, through copies of the quantizers; name of the input -> place."""
        graph, names = self._model.graph, Names(self._model)
        fed: dict[str, Place] = {}
        copies: list[tuple[ir.Value, ir.Value]] = []
        first = graph[0] if len(graph) else None
        for place in self.places:
            if not place.chain or first is None:
                continue
            name = names.value(f"{place.entry.name}_simulated")
            dtype = place.entry.dtype or ir.DataType.FLOAT
            value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(place.expected.shape))
            chain = copied_chain(place.chain, place.entry, value, names)
            graph.insert_before(first, chain)
            copies.append((place.result, chain[-1].outputs[0]))
            graph.inputs.append(value)
            fed[name] = place
        for result, copy_result in copies:
            move_uses(result, copy_result)
        return fed


@collector_paused()
def cut_by_sites(model: ir.Model, values: Values, outputs: Mapping[str, Array]) -> Cut:
    """A copy of ``model``, cut at every activation quantizer for which the simulation has a value.

    Float outputs that end in no quantizer are places too: the only ones of a weight-only model.

    Args:
        model: as ``to_qdq`` wrote it; it is left as it is.
        values: site or tensor name -> the simulation's value, or a list of them.
        outputs: graph output -> what the simulation returned.
    """
    copy = copy_model(model)
    named = values_by_name(copy)
    noted = [(node, facts) for node in all_nodes(copy.graph) if (facts := read_metadata(node)) is not None]
    every = [(site, run) for _, facts in noted for site, run in facts["places"]]
    runs = {site: run + 1 for site, run in sorted(every)}  # site -> how often it occurs
    places: list[Place] = []
    unchecked: dict[str, str] = {}
    for node, facts in filter(lambda one: one[1]["role"] == "activation", noted):
        expected, entry = _expected(copy, node, facts["places"], values, runs), named.get(facts["entry"])
        if isinstance(expected, str):
            unchecked.update(dict.fromkeys((site for site, _ in facts["places"]), expected))
            continue
        if entry is None:
            raise damaged_metadata(node)
        step = _step(copy.graph, facts, expected)
        places.append(Place(facts, quantizer_chain(node, entry), entry, node.outputs[0], expected, step))
    places += _output_places(copy.graph, outputs, {place.result for place in places})
    return Cut(copy, places, unchecked, nan_is_free=_are_numbers(outputs.values()))


def _are_numbers(outputs: Iterable[Array]) -> bool:
    floats = [y for y in outputs if np.issubdtype(y.dtype, np.floating)]
    return bool(floats) and not any(np.isnan(y).any() for y in floats)


def _step(graph: ir.Graph, facts: Mapping[str, Any], expected: Array) -> Array | None:
    """The scale of a quantizer; where it is chosen at run time, that of the largest value: no step is longer."""
    if facts.get("reach"):
        return np.array(max(float(np.abs(expected).max(initial=0.0)), 1e-30) / facts["reach"])
    return array_of(graph.initializers.get(facts["scale"] or ""))


def _output_places(graph: ir.Graph, outputs: Mapping[str, Array], quantized: Container[ir.Value]) -> Iterator[Place]:
    for value in dict.fromkeys(graph.outputs):
        maker, given = value.producer(), outputs.get(str(value.name))
        if maker is None or given is None or read_metadata(maker) is not None or value in quantized:
            continue
        if np.issubdtype(given.dtype, np.floating):
            facts = {"places": [[str(value.name), 0]], "format": OUTPUT_FORMAT, "axis": None}
            yield Place(facts, [], value, value, given, output_step(given))


def _expected(
    model: ir.Model, node: ir.Node, sites: Iterable[tuple[str, int]], values: Values, runs: Mapping[str, int]
) -> Array | str:
    """The simulation's value after ``node``, or why there is none to compare."""
    if node.graph is not model.graph:
        return "it lies inside the body of If, Loop or Scan"
    if node.outputs[0].dtype == ir.DataType.BFLOAT16:
        return "ONNX Runtime takes no bfloat16 from numpy"
    for name, run in (*sites, (str(node.outputs[0].name), 0)):
        given, total = values.get(name), runs.get(name, 1)
        if given is None:
            continue
        several = [given] if isinstance(given, np.ndarray) else given
        if len(several) < total:
            return f"it runs {total} times in the file, and {len(several)} arrays were given"
        return np.asarray(several[run])
    return "the simulation gave no value for it"


@collector_paused()
def part_of(model: ir.Model, results: Sequence[ir.Value], index: Mapping[ir.Node, int] | None = None) -> ir.Model:
    """A model of the operators of the main graph that lead to ``results``, which are its outputs.

    Args:
        model: left as it is.
        results: values of its main graph.
        index: operator -> its place in the main graph, where that is known.
    """
    graph = model.graph
    index = {node: i for i, node in enumerate(graph)} if index is None else index
    nodes: set[ir.Node] = set()
    ends: dict[ir.Value, None] = {}
    stack = list(results)
    while stack:
        value = stack.pop()
        node = value.producer()
        if node is None:
            ends[value] = None
        elif node not in nodes and node in index:
            nodes.add(node)
            stack.extend(reads_of(node))
    view = ir.GraphView(
        [value for value in ends if value.is_graph_input() and value.graph is graph],
        results,
        nodes=sorted(nodes, key=index.__getitem__),
        initializers=[v for v in ends if v.is_initializer() and v.graph is graph and not v.is_graph_input()],
        opset_imports=dict(graph.opset_imports),
        name=graph.name,
    )
    made = ir.Model(view.clone(), ir_version=model.ir_version)
    made.opset_imports.update(graph.opset_imports)
    return made


def graphs_in(node: ir.Node) -> list[ir.Graph]:
    """The bodies of an If, Loop or Scan; none of other operators."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found.extend(attribute.as_graphs())
    return found


def reads_of(node: ir.Node) -> Iterator[ir.Value]:
    """Inputs of a node and of the graphs nested in it; may include values of these graphs."""
    yield from (value for value in node.inputs if value is not None)
    for graph in graphs_in(node):
        yield from graph.outputs
        for inner in all_nodes(graph):
            yield from (value for value in inner.inputs if value is not None)


def reads_constants(node: ir.Node, static: set[ir.Node]) -> bool:
    """Whether ``node`` is a Constant, or reads initializers and what ``static`` nodes make of them, only."""
    given = [value for value in node.inputs if value is not None]
    fixed = all(not v.is_graph_input() and (v.producer() is None or v.producer() in static) for v in given)
    return fixed and (bool(node.inputs) or node.op_type == "Constant")


def _root(parent: dict[ir.Node, ir.Node], node: ir.Node) -> ir.Node:
    while parent[node] is not node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


def copied_chain(chain: Iterable[ir.Node], entry: ir.Value, given: ir.Value, names: Names) -> list[ir.Node]:
    """Copy the nodes of a :func:`quantizer_chain` with ``given`` in place of ``entry``; not yet in a graph."""
    known: dict[ir.Value | None, ir.Value] = {entry: given}
    copies = []
    for node in chain:
        inputs = [known.get(value, value) for value in node.inputs]
        label = names.node(f"{given.name}/{node.op_type}")
        copy = ir.Node("", node.op_type, inputs, node.attributes.values(), name=label)
        copy.outputs[0].name = names.value(f"{given.name}_{node.op_type}")
        copy.outputs[0].type = node.outputs[0].type  # tells LiteRT's writer which codes these are
        known[node.outputs[0]] = copy.outputs[0]
        copies.append(copy)
    return copies


def quantizer_chain(last: ir.Node, entry: ir.Value) -> list[ir.Node]:
    """The nodes that lead from ``entry`` to ``last``, in execution order."""
    found: dict[ir.Node, None] = {}
    stack = [(last, False)]
    while stack:
        node, ready = stack.pop()
        if node in found:
            continue
        if ready:
            found[node] = None
            continue
        stack.append((node, True))
        makers = (v.producer() for v in node.inputs if v is not None and v is not entry)
        stack.extend((maker, False) for maker in makers if maker is not None)
    return list(found)
