"""Taking an exported model apart at its quantizers, so that each layer can be fed the simulation's own values.

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

from bitwright.compare.bodies import BORDER
from bitwright.core.graph.operators import TRAITS
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.integer_sums import largest_sum
from bitwright.export.qdq.forms import damaged_metadata, read_metadata
from bitwright.export.qdq.markers import Names, copy_model, move_uses

Array = NDArray[Any]
Values = Mapping[str, Array | Sequence[Array]]

OUTPUT_FORMAT = "float32"  # of graph outputs that end in no quantizer
OUTPUT_STEP = 1e-3  # what counts as one step there, relative to the largest value
#: epsilon of the types that round results so far that a step of eight bits is about as small
_HALF: Mapping[ir.DataType | None, float] = {ir.DataType.FLOAT16: 2.0**-10, ir.DataType.BFLOAT16: 2.0**-7}
_PLACES_AT_ONCE = 100
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
    """What lies between quantizers: operators that depend on each other without a cut between them.

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
        """What half precision may add to the results of a piece, in parts of the largest of them.

        Every operator rounds once in the simulation and once in the runtime, by half of ``epsilon`` each, and these errors are
        independent (Higham and Mary 2019, DOI 10.1137/18M1226312).
        """
        return self.epsilon * math.sqrt(self.halves)

    def add(self, node: ir.Node) -> None:
        """Take in one operator."""
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


def _off_grid(value: ir.Value | None) -> float:
    """Half a step of an int32 bias that no site of the simulation stands for; 0 of other values."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear" or read_metadata(node) is not None:
        return 0.0
    codes, scale = node.inputs[:2]
    if codes is None or scale is None or codes.dtype != ir.DataType.INT32 or scale.const_value is None:
        return 0.0
    return float(np.abs(scale.const_value.numpy()).max(initial=0.0)) / 2


def _accumulated(node: ir.Node) -> int:
    """The bound of :func:`~bitwright.core.numerics.integer_sums.largest_sum` for ``node``; 0 where no int32 sum is made."""
    if node.op_type not in _AXES or len(node.inputs) < 2:
        return 0
    weight, furthest = _centred_codes(node.inputs[1]), _furthest(node.inputs[0])
    if weight is None or not furthest or weight.ndim < 2:
        return 0
    axis = 0 if node.op_type == "Gemm" and node.attributes.get_int("transB", False) else _AXES[node.op_type]
    groups = node.attributes.get_int("group", 1) if node.op_type == "ConvTranspose" else 1
    return largest_sum(weight, axis, groups, furthest=furthest)


def _centred_codes(value: ir.Value | None) -> Array | None:
    """The codes that a DequantizeLinear reads from an initializer, minus their zero point; ``None`` for other values."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear":
        return None
    codes = _constant(node.inputs[0])
    if codes is None:
        return None
    zero = _constant(node.inputs[2]) if len(node.inputs) > 2 else None
    whole = codes.astype(np.int64)
    if zero is None or not zero.astype(np.int64).any():
        return whole
    if zero.size > 1:  # by channel: the furthest of all keeps the bound a bound
        return np.abs(whole) + np.abs(zero.astype(np.int64)).max()
    return whole - zero.astype(np.int64).reshape(())


def _furthest(value: ir.Value | None) -> int:
    """Largest absolute code minus zero point of an activation on an integer grid; 0 for other values."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear" or len(node.inputs) < 3:
        return 0
    zero, kind = _constant(node.inputs[2]), None if node.inputs[2] is None else node.inputs[2].dtype
    name = "" if kind is None else kind.name
    if zero is None or "INT" not in name or kind is None or kind.bitwidth > _WIDE:
        return 0
    fmt = IntFormat(int(kind.bitwidth), signed=not name.startswith("U"))
    whole = zero.astype(np.int64)
    return int(max((fmt.qmax - whole).max(), (whole - fmt.qmin).max()))


def _constant(value: ir.Value | None) -> Array | None:
    return None if value is None or value.const_value is None else value.const_value.numpy()


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
    feed: str = ""

    @property
    def codes(self) -> str:
        """Name of the tensor that an integer kernel would make: the codes, or the result itself."""
        if not self.chain:
            return str(self.result.name)
        # of half precision the result of DequantizeLinear is cast
        last = next((node for node in reversed(self.chain) if node.op_type != "Cast"), self.chain[-1])
        return "" if last.inputs[0] is None else str(last.inputs[0].name)

    def kernel(self, kernels: Mapping[str, str]) -> str:
        """What made it: the integer kernel of its codes, one that ends in floats in front of its quantizer, or ``float``.

        Args:
            kernels: tensor -> what a runtime's default mode made it with.
        """
        last = kernels.get(self.codes, "float")
        moved = last in MOVES and not MOVES.issuperset(self.piece.ops)  # what was quantized in front of it
        if self.chain and last not in _FLOAT_MAKERS and not moved:
            return last
        return next((kernels[name] for name in self.piece.made if kernels.get(name) in ENDS_IN_FLOATS), "float")


def _makers(node: ir.Node, cuts: Container[ir.Value], static: Container[ir.Node]) -> Iterator[ir.Node]:
    """What makes the inputs of ``node`` that are no ``cuts``, except for ``static`` nodes."""
    for value in node.inputs:
        maker = None if value is None or value in cuts else value.producer()
        if maker is not None and maker not in static:
            yield maker


class Cut:
    """A model taken apart at every activation quantizer that the simulation has a value for.

    Args:
        model: as ``to_qdq`` wrote it; it is left as it is.
        values: site or tensor name -> the simulation's value, or a list of them.
        outputs: graph output -> what the simulation returned.

    Attributes:
        places: the tensors that are to be compared.
        unchecked: site -> why it is not.
    """

    def __init__(self, model: ir.Model, values: Values, outputs: Mapping[str, Array]) -> None:
        self._model, self._values = copy_model(model), values
        self.places: list[Place] = []
        self.unchecked: dict[str, str] = {}
        self._runs: dict[str, int] = {}  # site -> how often it occurs
        self._find()
        self._find_outputs(outputs)
        self._open()

    @classmethod
    def at(cls, model: ir.Model, places: Sequence[Place]) -> Cut:
        """A cut of ``model``, which is changed by it, at ``places`` that were found in it otherwise."""
        made = cls.__new__(cls)
        made._model, made.places, made.unchecked = model, list(places), {}
        made._open()
        return made

    def _open(self) -> None:
        self._find_pieces()
        self._fed = self._apply()
        self._index = {node: i for i, node in enumerate(self._model.graph)}

    def parts(self) -> Iterator[tuple[ir.Model, list[Place], dict[str, Array]]]:
        """``(model, places it computes, what to feed beside the graph's inputs)``, until all places were handed out."""
        by_piece: dict[Piece, list[Place]] = {}
        for place in self.places:
            by_piece.setdefault(place.piece, []).append(place)
        group: list[Place] = []
        for i, places in enumerate(by_piece.values()):
            group += places
            if len(group) >= _PLACES_AT_ONCE or i == len(by_piece) - 1:
                model, feeds = self.part(group)
                yield model, group, feeds
                group = []

    def part(self, places: Sequence[Place]) -> tuple[ir.Model, dict[str, Array]]:
        """A model that computes ``places`` from the values fed at those in front of them; what to feed it."""
        return self._part([place.result for place in places])

    def before(self, places: Sequence[Place]) -> tuple[ir.Model, dict[str, Array]]:
        """A model that ends in front of the quantizers of ``places``, which must not be at the graph's inputs; its feeds."""
        return self._part(list(dict.fromkeys(place.entry for place in places)))

    def _part(self, results: list[ir.Value]) -> tuple[ir.Model, dict[str, Array]]:
        """What makes ``results``, and what to feed it beside the graph's inputs."""
        index = self._index
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
                stack.extend(_reads(node))
        graph = self._model.graph
        view = ir.GraphView(
            [value for value in ends if value.is_graph_input() and value.graph is graph],
            results,
            nodes=sorted(nodes, key=index.__getitem__),
            initializers=[v for v in ends if v.is_initializer() and v.graph is graph and not v.is_graph_input()],
            opset_imports=dict(graph.opset_imports),
            name=graph.name,
        )
        model = ir.Model(view.clone(), ir_version=self._model.ir_version)
        model.opset_imports.update(graph.opset_imports)
        needed = {str(value.name) for value in ends}
        return model, {name: self._feed(name) for name in needed & self._fed.keys()}

    def _feed(self, name: str) -> Array:
        place = self._fed[name]
        return np.ascontiguousarray(place.expected, (place.entry.dtype or ir.DataType.FLOAT).numpy())

    def _find(self) -> None:
        named = {str(v.name): v for v in self._model.graph.inputs}
        noted = [(node, read_metadata(node)) for node in self._model.graph.all_nodes()]
        for site, run in (place for _, facts in noted if facts for place in facts["places"]):
            self._runs[site] = max(self._runs.get(site, 0), run + 1)
        for node, facts in noted:
            named.update((str(v.name), v) for v in node.outputs)
            if facts is not None and facts["role"] == "activation":
                self._note_place(node, facts, named)

    def _note_place(self, node: ir.Node, facts: dict[str, Any], named: Mapping[str, ir.Value]) -> None:
        """Note what ``node`` ends, which was given, or why it is not checked."""
        expected, why = self._expected(node, facts)
        if expected is None:
            self.unchecked.update({site: why for site, _ in facts["places"]})
            return
        entry = named.get(facts["entry"])
        if entry is None:
            raise damaged_metadata(node)
        scale = self._model.graph.initializers.get(facts["scale"] or "")
        array = None if scale is None or scale.const_value is None else scale.const_value.numpy()
        chain = quantizer_chain(node, entry)
        self.places.append(Place(facts, chain, entry, node.outputs[0], expected, array))

    def _expected(self, node: ir.Node, facts: dict[str, Any]) -> tuple[Array | None, str]:
        """The simulation's value after ``node``, or why there is none to compare."""
        if node.graph is not self._model.graph:
            return None, "it lies inside the body of If, Loop or Scan"
        if node.outputs[0].dtype == ir.DataType.BFLOAT16:
            return None, "ONNX Runtime takes no bfloat16 from numpy"
        for name, run in (*facts["places"], (str(node.outputs[0].name), 0)):
            given, total = self._values.get(name), self._runs.get(name, 1)
            if given is None:
                continue
            several = [given] if isinstance(given, np.ndarray) else given
            if len(several) < total:
                return None, f"it runs {total} times in the file, and {len(several)} arrays were given"
            return np.asarray(several[run]), ""
        return None, "the simulation gave no value for it"

    def _find_outputs(self, outputs: Mapping[str, Array]) -> None:
        """Float outputs that end in no quantizer are places too: the only ones of a weight-only model."""
        quantized = {place.result for place in self.places}
        for value in self._model.graph.outputs:
            name, node = str(value.name), value.producer()
            expected = outputs.get(name)
            plain = node is not None and read_metadata(node) is None and value not in quantized
            if expected is None or not plain or not np.issubdtype(expected.dtype, np.floating):
                continue
            peak = float(np.abs(expected).max(initial=0.0))
            facts = {"places": [[name, 0]], "format": OUTPUT_FORMAT, "axis": None}
            step = np.array(OUTPUT_STEP * peak if np.isfinite(peak) and peak else OUTPUT_STEP)
            quantized.add(value)
            self.places.append(Place(facts, [], value, value, expected, step))

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
        for node in self._model.graph.all_nodes():
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


def _reads(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads, and what the graphs nested in it read; their own values among it do no harm."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            nested = [attribute.as_graph()]
        elif attribute.type == ir.AttributeType.GRAPHS:
            nested = list(attribute.as_graphs())
        else:
            continue
        for graph in nested:
            yield from graph.outputs
            for inner in graph.all_nodes():
                yield from (value for value in inner.inputs if value is not None)


def reads_constants(node: ir.Node, static: set[ir.Node]) -> bool:
    """Whether ``node`` is a Constant, or reads initializers and what ``static`` nodes make of them, only."""
    for value in node.inputs:
        if value is not None and (
            value.is_graph_input() or not (value.producer() is None or value.producer() in static)
        ):
            return False
    return bool(node.inputs) or node.op_type == "Constant"


def _root(parent: dict[ir.Node, ir.Node], node: ir.Node) -> ir.Node:
    while parent[node] is not node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


def copied_chain(chain: Iterable[ir.Node], entry: ir.Value, given: ir.Value, names: Names) -> list[ir.Node]:
    """The nodes of a :func:`quantizer_chain` once more, reading ``given`` in the place of ``entry``; in no graph yet."""
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
