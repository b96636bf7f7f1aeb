"""Values that stay in float: those that no integer grid represents well enough, those after the last layer, and masks.

A grid has the same absolute error everywhere. Some operators need something else: a divisor, a logarithm or a root needs
a small *relative* error down to the smallest value (a grid rounds these to zero, and the answer is infinite or NaN);
sine and cosine need a small error relative to one turn, however many turns the range has; a label that is compared must
keep its exact value; a position in an image needs a small error against an element of it, however large the image is; and
a routing decision (which expert, which codebook entry) must be the one that the unrounded
values give, where a grid creates ties. The operator table says which (``OpRow.exact``); here the requirement is followed
back to the operator that produces the value.

Detectors, key-point heads and classifiers end in post-processing: the outputs of the last layers become probabilities and
coordinates and are joined, sorted and thinned out. These operators are few, read small tensors, and cost runtimes no more
in float than in integers, so a grid there only loses accuracy. One grid for coordinates in pixels joined with
probabilities has a step larger than every probability.

Most attention masks are recognised directly before a softmax (:mod:`bitwright.core.placement.place`) and stay in float.
Others are added before a scale, joined with a sink, clamped, or passed through a sigmoid, and would ruin the range of a
quantizer: between -10000 and 7, eight bits have steps of 39. Such a value is recognised by its readers and by what
calibration saw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from bitwright.core.graph.attention import attention_sums
from bitwright.core.graph.graph import Graph, Op, reached
from bitwright.core.graph.operators import Need, OpRow, op_row
from bitwright.core.numerics.statistics import Histogram, MinMax, Statistics, bounds_of

WIDE = 1000.0
"""A range wider than this, before a softmax or a sigmoid, holds constants that are to vanish: ``exp(-WIDE)`` is 0."""

MASKED = "it carries mask constants to a softmax"

_FORGETS = frozenset(("Softmax", "Sigmoid", "Exp"))
_NEUTRAL = frozenset(("ReduceMax", "ArgMax"))  # read the largest values only; they tell nothing
_PASSES = frozenset(("Add", "Where", "MaskedFill", "Clip", "Min", "Max", "Mul", "Concat", "Stack", "LogSoftmax", "If"))
_FIRST = frozenset(("Sub", "Div"))  # pass on what they read at their first port


def mask_values(graph: Graph) -> set[str]:
    """The values used only as masks, by functions that turn a large negative number into zero; linear time.

    A value is one when it is not returned by the model and each of its readers is a softmax, a sigmoid or an exponential, or
    hands it on to values that are; in a loop, whose runs share operators, to itself.
    """
    found: set[str] = set()
    read: dict[str, list[str]] = {}  # by operators that hand it on
    for value in dict.fromkeys((*graph.inputs, *(v for op in graph.ops for v in op.outputs))):
        telling = [(op, port) for op, port in graph.consumers(value) if op.type not in _NEUTRAL and not asks(graph, op)]
        for op, _ in telling:
            read.setdefault(op.name, []).append(value)
        if _forgotten(graph, value, telling):
            found.add(value)
    _drop_before_others(graph, found, read)
    return found


def _drop_before_others(graph: Graph, found: set[str], read: dict[str, list[str]]) -> None:
    """Take out what operators hand on to values that are not in ``found``."""
    others = [op for op in graph.ops if not found.issuperset(op.outputs)]
    while others:
        op = others.pop()
        for value in read.pop(op.name, ()) if op.type not in _FORGETS else ():
            found.discard(value)
            maker = graph.producer(value)
            others += [maker] if maker is not None else []


def _forgotten(graph: Graph, value: str, readers: list[tuple[Op, int]]) -> bool:
    """Whether a large negative number is nothing to each reader, or to what reads its results.

    A running maximum begins at such a number (RWKV, softmax by parts), and is subtracted from what an exponential reads.
    """
    if not readers or graph.is_output(value) or not graph.values[value].is_float:
        return False
    maker = graph.producer(value)
    first = ("Sub",) if maker is not None and maker.type == "Max" else ()
    return all(op.type in first or _forgets(op, port) for op, port in readers)


def asks(graph: Graph, op: Op) -> bool:
    """Whether an operator returns booleans, such as the test for rows that are fully masked."""
    return bool(op.outputs) and all(graph.values[v].dtype == "bool" for v in op.outputs)


def _forgets(op: Op, port: int) -> bool:
    if op.type in _FORGETS:
        return True
    movement = op_row(op.type).kind == "movement" and port == 0
    return bool(op.outputs) and (op.type in _PASSES or movement or (op.type in _FIRST and port == 0))


def holds_mask(statistics: Statistics | None) -> bool:
    """Whether the data seen at a mask value contain mask constants: ``-inf``, or numbers far below the others."""
    if not isinstance(statistics, MinMax | Histogram):
        return False
    bounds = bounds_of(statistics)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = (bounds.count > 0) & ((bounds.hi - bounds.lo > WIDE) | (bounds.hi < -WIDE))
    return bool(wide.any() or bounds.neg_inf_count.any())


#: why a value stays in float, for the operator named
REASONS: dict[Need, str] = {
    "divisor": "float: {} divides by it, and an integer grid rounds its small values to zero",
    "magnitude": "float: {} needs its magnitude, of which an integer grid has only the large ones",
    "sum": "float: {} needs the magnitude of sums of it, and what has no sign uses the range of an integer grid badly",
    "quotient": "float: {} divides sums of it by sums of the same weights, and one grid has few codes for small sums",
    "domain": "float: {} has no answer beyond a bound that an integer grid may pass",
    "identity": "float: {} compares it or counts with it, and a grid has other numbers",
    "order": "float: {} decides by it what is computed next, and a grid makes ties of values that are nearly equal",
    "steering": "float: the model's code decides by it, or by what {} makes of it, what it computes",
    "state": "float: {} passes on a state from run to run, in which the errors of a grid add up",
    "phase": "float: {} takes it for an angle, and the steps of an integer grid are large against a turn",
    "position": "float: {} reads positions from it, and a step of an integer grid may be more than an element of the image",
}
_KEEPS = frozenset(("Neg", "Abs", "Square", "Pow", "Sqrt", "Clip", "Max", "Min", "Mul", "Div", "Reciprocal"))
_POSITIVE = frozenset(("Abs", "Square", "Sqrt", "Exp", "ReduceL1", "ReduceL2", "ReduceSumSquare"))
_KEEP_SIGN = frozenset(("Add", "Mul", "Div", "Pow", "Max", "Clip"))
_JOINS = frozenset(("Concat", "Stack", "Where", "MaskedFill", "Min", "Max"))
_ROUNDINGS = frozenset(("Floor", "Ceil", "Round", "trunc"))  # of a position to that of an element
_LINEAR = frozenset(("Neg", "Mul", "Div", "Add", "Sub"))
_PRODUCTS = frozenset(("MatMul", "Gemm", "Einsum"))
_SUMS = frozenset(("ReduceSum", "ReduceMean", "AveragePool", "GlobalAveragePool", "CumSum"))
_LENGTHS = frozenset(("ReduceL1", "ReduceL2", "ReduceSumSquare", "cdist"))
_WEIGHTED_SUMS = frozenset(("MatMul", "Gemm", "Conv"))  # followed for a logarithm: a spectrum by bands


def computed_values(graph: Graph) -> set[str]:
    """Values computed from products of tensors, without lookups by position."""
    computed: set[str] = set()
    for op in graph.ops:
        product = op_row(op.type).kind == "compute" and op.type != "Embedding"
        if product or any(value in computed for _, value in op.sources()):
            computed.update(op.outputs)
    return computed


def _positive_values(graph: Graph) -> set[str]:
    """Values that are never negative, so that adding one cancels nothing: squares, exponentials, sums of these."""
    found: set[str] = set()
    for op in graph.ops:
        row = op_row(op.type)
        square = op.type == "Mul" and len(set(op.inputs)) == 1
        square = square or (op.type == "Pow" and op.attrs.get("exponent", 2) % 2 != 1)
        keeps = row.kind in ("movement", "merge") or op.type in _SUMS or op.type in _KEEP_SIGN
        data = [v for v in op.inputs if v is not None and graph.values[v].is_float]
        if square or op.type in _POSITIVE or (keeps and data and found.issuperset(data)):
            found.update(op.outputs)
    return found


def _squared_lengths(graph: Graph, positive: set[str]) -> set[str]:
    """Sums of squares or magnitudes, and further sums and moves of them."""
    found: set[str] = set()
    for op in graph.ops:
        carries = op.type in ("Add", "Sub") or op_row(op.type).kind == "movement"
        adds = op.type in _LENGTHS or (op.type in _SUMS and op.inputs[0] in positive)
        if adds or (carries and any(value in found for _, value in op.sources())):
            found.update(op.outputs)
    return found


def reciprocals(graph: Graph, static: set[str]) -> dict[str, str]:
    """Reciprocals (a constant divided by values) and multiples of them -> the operator that divides.

    They are the larger the smaller the divisor is, so that one grid for all has few codes for most of them. A logistic function,
    whose divisor is an exponential plus one, is bounded.
    """
    found: dict[str, str] = {}
    for op in graph.ops:
        moving = [v for v in op.inputs if v is not None and v not in static and graph.values[v].is_float]
        if len(moving) != 1 or not op.outputs:
            continue
        value = moving[0]
        if _is_divisor(op, value) and not _is_shifted_exponential(graph, value):
            found[op.outputs[0]] = op.name
        elif value in found and (op_row(op.type).kind == "movement" or op.type in ("Mul", "Div", "Neg")):
            found[op.outputs[0]] = found[value]
    return found


def _is_divisor(op: Op, value: str) -> bool:
    """Whether ``op`` divides a constant by ``value``, or a power of it."""
    by_itself = op.type in ("Reciprocal", "Rsqrt") or _power(op, 0) == "divisor"
    return by_itself or (op.type == "Div" and op.inputs[0] != value)


def _is_shifted_exponential(graph: Graph, value: str) -> bool:
    maker = graph.producer(value)
    makers = () if maker is None or maker.type != "Add" else (graph.producer(v) for v in maker.inputs if v is not None)
    return any(m is not None and m.type == "Exp" for m in makers)


def exact_values(graph: Graph, static: set[str]) -> dict[str, tuple[Need, str]]:
    """Value -> the reason why it needs more precision, and the operator that needs it; one pass in reverse execution order.

    A need for small relative errors reaches back over products, powers and shifts by a constant, and over sums of
    squares, as the product of a value with itself is one; of another product, to an operand that is itself a product
    of computed values (the sums over keys and values of linear attention, of which a quotient divides one part by
    another). It stops at reductions, layers and activation functions, whose own output is the last value found; but
    where these add up squares, magnitudes or exponentials (an energy, a spectrum by bands), these have the need too:
    a square has twice the range of what it is a square of. A logarithm also needs the magnitude of what was squared;
    a normalisation, whose root weighs the largest most, does not. An angle is followed over scales and shifts, and
    where no layer has been before (coordinates, positions, times), over everything, the matrix that makes angles of
    them included. What is rounded to an index is a position, also where it is the output of a layer. Scores that decide
    are followed over functions of one value, joins, and the sums that make a distance (one operand adds up squares or
    magnitudes), and not over other sums of several values: a residual stream is not a score.

    Args:
        graph: the model.
        static: values that are the same in every run.
    """
    trace = _Trace(graph, static)
    for op in reversed(graph.ops):
        trace.visit(op)
    for value in steering_values(graph, static):
        readers = graph.consumers(value)
        maker = graph.producer(value)
        trace.found[value] = ("steering", readers[0][0].name if readers else maker.name if maker else value)
    for value in carried_states(graph, static):
        near = [*(op for op, _ in graph.consumers(value)), graph.producer(value)]
        by = next((op.name for op in near if op is not None and (_hands_on(op) or op.type == "LSTM")), value)
        trace.found.setdefault(value, ("state", by))
    for value, by in attention_sums(graph, static, reciprocals(graph, static)).items():
        trace.found.setdefault(value, ("quotient", by))
    return trace.found


def carried_states(graph: Graph, static: set[str]) -> list[str]:
    """Values of a state that a recurrence updates element by element and returns to the next run.

    A cell that runs once per step takes its state as an input and returns the next one: the cell state of an LSTM
    ``f * c + i * g``, the state of a GRU ``z * h + (1 - z) * n``, that of a state space model. Its rounding errors come back in
    the next run and accumulate; layers, whose outputs are bounded, forget them. The operator LSTM updates its cell state in the
    same way. The result has the sums, differences, products and movements between an input and an output of the same shape,
    if one product takes a computed gate and one sum adds a computed value.

    Args:
        graph: the model.
        static: values that are the same in every run.
    """
    path = _unlayered_path(graph)
    cells = [op for op in graph.ops if op.type == "LSTM" and not path.isdisjoint(op.outputs)]
    gates = [op for op in graph.ops if op.type == "Mul" and _meets(graph, op, path, static)]
    if not any(op.type in ("Add", "Sub") and _meets(graph, op, path, static) for op in graph.ops):
        gates = []

    def around(value: str) -> Iterator[str]:
        yield from (v for v in (*_handed_on(graph, value), *_taken_from(graph, value)) if v in path)

    found = reached([v for op in (*gates, *cells) for v in (*op.inputs, *op.outputs) if v in path], around)
    return sorted(v for v in found if graph.producer(v) is not None or not _is_split(graph, v))


def _unlayered_path(graph: Graph) -> set[str]:
    """Values between inputs and outputs of the same shape, if only sums, products, moves and cell states lie between."""
    given = [
        v
        for v in graph.inputs
        if graph.values[v].is_float and any(_fits(graph.values[v].shape, graph.values[o].shape) for o in graph.outputs)
    ]
    ends = [v for v in graph.outputs if graph.values[v].is_float] if given else []
    after = reached(given, lambda value: _handed_on(graph, value))
    return after & reached(ends, lambda value: _taken_from(graph, value))


def _fits(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes may be the same; a negative size is not known."""
    return len(one) == len(other) > 0 and all(a == b or min(a, b) < 0 for a, b in zip(one, other, strict=True))


def _handed_on(graph: Graph, value: str) -> Iterator[str]:
    for op, port in graph.consumers(value):
        if _hands_on(op) or op.type == "If":
            yield from op.outputs
        elif is_cell_state(op, port):
            yield from op.outputs[2:3]


def _taken_from(graph: Graph, value: str) -> Iterator[str]:
    maker = graph.producer(value)
    if maker is None:
        return
    if _hands_on(maker) or maker.type in ("Concat", "Stack", "If"):
        yield from (v for _, v in maker.sources())
    elif maker.type == "LSTM" and value in maker.outputs[2:3]:
        yield from (v for port, v in maker.sources() if is_cell_state(maker, port))


def _meets(graph: Graph, op: Op, path: set[str], static: set[str]) -> bool:
    """Whether ``op`` combines a value of ``path`` with a computed value that is not on it."""
    read = {v for _, v in op.sources() if graph.values[v].is_float}
    return not path.isdisjoint(op.outputs) and bool(read & path) and bool(read - path - static)


def is_cell_state(op: Op, port: int) -> bool:
    """Whether ``port`` takes the cell state of an LSTM, which no matrix multiplies."""
    return op.type == "LSTM" and port == _CELL


def _hands_on(op: Op) -> bool:
    alone = op.type in ("Concat", "Stack") and len(op.inputs) == 1  # one more axis
    return alone or op.type in ("Add", "Sub", "Mul") or op_row(op.type).kind == "movement"


def _is_split(graph: Graph, value: str) -> bool:
    """Whether a value is split into several states."""
    return all(op_row(op.type).kind == "movement" for op, _ in graph.consumers(value))


def steering_values(graph: Graph, static: set[str]) -> list[str]:
    """Values that a model's control flow reads, and their sources up to the outputs of layers.

    These are single numbers: thresholds, times and step sizes of a solver; and tensors that such numbers lead to and that
    lead to them again, as the states and error estimates of a solver that chooses its steps do. A tensor of which the code
    only asks something (whether it is finite) is none.
    """
    read = [value.name for value in graph.values.values() if value.read_by_code]
    if not read:
        return []
    before = reached(read, lambda value: _made_of(graph, value))
    numbers = [v for v in before if graph.values[v].is_float and math.prod(graph.values[v].shape) == 1]
    after = reached(numbers, lambda value: _made_into(graph, value))
    found = before & after
    single = {v for v in before | after if math.prod(graph.values[v].shape) == 1 and v not in static}
    return sorted(v for v in found | single if graph.values[v].is_float and not _is_of_layer(graph, v))


def _made_of(graph: Graph, value: str) -> Iterator[str]:
    maker = graph.producer(value)
    if maker is not None and op_row(maker.type).kind != "compute":
        yield from (v for _, v in maker.sources())


def _made_into(graph: Graph, value: str) -> Iterator[str]:
    for reader, _ in graph.consumers(value):
        if op_row(reader.type).kind != "compute":
            yield from reader.outputs


def _is_of_layer(graph: Graph, value: str) -> bool:
    maker = graph.producer(value)
    return maker is not None and op_row(maker.type).kind == "compute"


class _Trace:
    def __init__(self, graph: Graph, static: set[str]) -> None:
        self.graph, self.static = graph, static
        self.computed = computed_values(graph)
        self.positive = _positive_values(graph)
        self.lengths = _squared_lengths(graph, self.positive)
        self.steering: set[str] = set()  # values that a layer or product further on depends on
        self.found: dict[str, tuple[Need, str]] = {}

    def visit(self, op: Op) -> None:
        """Record the precision that ``op`` needs of its operands, for itself and for the readers of its outputs."""
        row = op_row(op.type)
        wanted = next((self.found[value] for value in op.outputs if value in self.found), None)
        asked = wanted is not None and wanted[0] == "magnitude" and self._is_logarithm(wanted[1])
        if not asked:  # a logarithm asks for more than a root in front of it, which stops at a sum of squares
            self._note_needs(op, row)
        if wanted is not None:
            through = _through(op, wanted, asked)
            for value in _FOLLOWED.get(wanted[0], _Trace._magnitudes)(self, op, row):
                self.found.setdefault(value, through)
        if asked:
            self._note_needs(op, row)
        if row.kind == "compute" or not self.steering.isdisjoint(op.outputs):
            self.steering.update(value for _, value in op.sources())

    def _is_logarithm(self, op: str) -> bool:
        return self.graph.op(op).type.lower().startswith("log")

    def _note_needs(self, op: Op, row: OpRow) -> None:
        for port, value in op.sources():
            need = row.exact.get(port) if op.type != "Pow" else _power(op, port)
            if need == "position" and self._is_output_of_layer(value):
                continue
            if need is not None and (need != "order" or self._steers(op)):
                self.found.setdefault(value, (need, op.name))

    def _steers(self, op: Op) -> bool:
        """Whether a layer or product depends on the indices that ``op`` finds, and not only the model's output."""
        return any(v in self.steering and not self.graph.values[v].is_float for v in op.outputs)

    def _data(self, op: Op, row: OpRow) -> list[str]:
        ports = row.activations
        return [
            value
            for port, value in op.sources()
            if (ports is None or port in ports) and self.graph.values[value].is_float
        ]

    def _magnitudes(self, op: Op, row: OpRow) -> Iterator[str]:
        data = [value for value in self._data(op, row) if value not in self.static]
        bands = op.type in _WEIGHTED_SUMS and len(data) == 1 and self._is_logarithm(self.found[op.outputs[0]][1])
        if op.type in _SUMS or bands:
            yield from (value for value in data if value in self.positive)
        elif row.kind in ("movement", "merge") or op.type in _KEEPS:
            yield from data
        elif op.type in _ROUNDINGS and self.found[op.outputs[0]][0] == "identity":
            yield from data
        elif op.type in _PRODUCTS and len(data) > 1 and len(set(data)) == 1:  # a sum of squares
            yield from data[:1]
        elif op.type in _PRODUCTS and len(data) > 1:  # linear attention: a query times sums over the positions
            yield from (value for value in data if self._is_product(value))
        elif op.type in ("Add", "Sub"):
            alone = len(data) == 1 or len(set(data)) == 1
            yield from (value for value in data if alone or value in self.positive)

    def _is_product(self, value: str) -> bool:
        """Whether ``value`` is a product of two values that are computed."""
        maker = _maker(self.graph, value)
        return (
            maker is not None
            and maker.type in _PRODUCTS
            and self.static.isdisjoint(self._data(maker, op_row(maker.type)))
        )

    def _added(self, op: Op, row: OpRow) -> Iterator[str]:
        if row.kind != "compute":
            yield from (v for v in self._data(op, row) if v not in self.static and v in self.positive)

    def _scores(self, op: Op, row: OpRow) -> Iterator[str]:
        moving = [value for value in self._data(op, row) if value not in self.static]
        joins = op.type in _JOINS or op.type in _PUTS_BACK  # the scores of several levels, or of several rounds
        distance = op.type in ("Add", "Sub") and not self.lengths.isdisjoint(moving)  # |x|^2 - 2 x.c + |c|^2
        if (
            row.kind == "movement"
            or joins
            or distance
            or (row.kind in ("merge", "pointwise") and len(set(moving)) == 1)
        ):
            yield from moving
        elif op.type == "Sub":  # between points that are given
            yield from (value for value in moving if value not in self.computed)
        elif op.type in _SUMS or op.type in _LENGTHS:  # (x - c)^2, added up
            yield from (value for value in moving if op.type in _LENGTHS or value in self.positive)

    def _angles(self, op: Op, row: OpRow) -> Iterator[str]:
        data = self._data(op, row)
        if row.kind == "compute":
            plain = not any(value in self.computed for value in data)
            yield from (v for _, v in op.sources() if plain and op.type in _PRODUCTS)
        elif row.kind in ("movement", "merge"):
            yield from data
        else:
            moving = [value for value in data if value not in self.static]
            yield from (v for v in data if v not in self.computed or (op.type in _LINEAR and len(moving) == 1))

    def _positions(self, op: Op, row: OpRow) -> Iterator[str]:
        if row.kind in ("movement", "merge", "pointwise") or is_expectation(self.graph, op, self.static):
            yield from (v for v in self._data(op, row) if not self._is_output_of_layer(v))

    def _is_output_of_layer(self, value: str) -> bool:
        maker = _maker(self.graph, value)
        layer = maker is not None and op_row(maker.type).kind in ("compute", "norm")
        return layer and maker is not None and not is_expectation(self.graph, maker, self.static)


#: need -> how it is followed back, where not as magnitudes are
_FOLLOWED = {"phase": _Trace._angles, "position": _Trace._positions, "order": _Trace._scores, "sum": _Trace._added}


def _through(op: Op, wanted: tuple[Need, str], asked: bool) -> tuple[Need, str]:
    """The need of the operands of ``op``, given the need ``wanted`` of its output; ``asked``: by a logarithm."""
    if op.type in _SUMS and wanted[0] in ("divisor", "magnitude") and not asked:
        return "sum", wanted[1]
    return ("position", op.name) if op.type in _ROUNDINGS and wanted[0] == "identity" else wanted


def _power(op: Op, port: int) -> Need | None:
    exponent = op.attrs.get("exponent")
    if port != 0 or exponent is None:
        return None
    return "divisor" if exponent < 0 else "magnitude" if 0 < exponent < 1 else None


_CELL = 6  # the port of an LSTM's cell state
_CONVERSION_SIDE = 4  # of a matrix that converts boxes, positions or colours


def tail_ops(graph: Graph, static: set[str]) -> list[Op]:
    """Operators after the last layers; empty where the graph has no layer.

    A layer is a product: of data with weights, or of two tensors. Two kinds of products are part of the post-processing, where
    nothing but post-processing follows: the expectation of a softmax (one output channel over stored positions), and the
    conversion of joined coordinates by a stored square matrix of at most four rows.

    Args:
        graph: the model.
        static: values that are the same in every run.
    """
    layers = [op for op in graph.ops if op_row(op.type).kind == "compute" and static.isdisjoint(op.outputs)]
    decoding = {op.name for op in layers if is_expectation(graph, op, static) or _converts(graph, op, static)}
    if len(decoding) == len(layers):
        return []
    proper = [op for op in layers if op.name not in decoding]
    before = _upstream(graph, proper) | {op.name for op in proper}
    return [op for op in graph.ops if op.name not in before]


#: operators that choose rows by what they hold, or bring them into another order, and those that put rows back in their places
_CHOOSES = frozenset(("TopK", "Sort", "NonMaxSuppression", "nms", "NonZero", "nonzero", "Compress", "masked_select"))
_PICKS = frozenset(("Gather", "GatherElements", "GatherND", "index"))
_PUTS_BACK = frozenset(("ScatterElements", "ScatterND", "scatter", "index_add", "index_put", "index_copy", "setitem"))


def chosen_outputs(graph: Graph, static: set[str]) -> tuple[set[str], list[Op]]:
    """Outputs of numbers whose rows are chosen after the last layer, and the last layers that compute rows in a fixed order.

    A detector returns the boxes that sorting and suppression leave. Which these are, and in which order, depends on the last
    digit of a score, so that row i of one run need not be row i of another.

    Args:
        graph: the model.
        static: values that are the same in every run.

    Returns:
        The values, and the layers that they are computed of and from which no other layer with rows in a fixed order is
        reached; of a detector with two stages these are the last ones of the first stage.
    """
    late = tail_ops(graph, static)
    tail, chosen = {op.name for op in late}, chosen_rows(late, static)
    outputs = {v for v in graph.outputs if v in chosen and graph.values[v].is_float}
    makers = [op for op in graph.ops if not outputs.isdisjoint(op.outputs)]
    before, moved = _upstream(graph, makers), chosen_rows(graph.ops, static)
    layers = [
        op
        for op in graph.ops
        if op.name in before - tail and op_row(op.type).kind == "compute" and moved.isdisjoint(op.outputs)
    ]
    earlier = _upstream(graph, layers)
    return outputs, [op for op in layers if op.name not in earlier]


def ordered_rows(graph: Graph, static: set[str]) -> tuple[str, dict[str, int]]:
    """The order of rows that an operator chose for later layers, and the outputs that have it.

    A detector of queries (RT-DETR, D-FINE) chooses rows of its encoder by a score, ``TopK`` and a gather, and computes further
    layers on them. Near ties change places from run to run, and the rows of the outputs with them.

    Args:
        graph: the model.
        static: values that are the same in every run.

    Returns:
        The value with the indices ``[samples, rows]``, and output -> axis of its rows; no output where there is none of at
        least three axes, of which exactly one has as many elements as rows were chosen.
    """
    chosen = [
        op.outputs[1] for op in graph.ops if op.type == "TopK" and static.isdisjoint(op.outputs) and op.outputs[1:]
    ]
    chosen = [value for value in chosen if len(graph.values[value].shape) == 2]
    rows = _picked_rows(graph, {value: i for i, value in enumerate(chosen)}) if chosen else {}
    last = max((rows[value] for value in graph.outputs if value in rows), default=None)
    if last is None:
        return "", {}
    shape = graph.values[chosen[last]].shape
    axes = {value: _axis_of_rows(graph, value, shape) for value in graph.outputs if rows.get(value) == last}
    return chosen[last], {value: axis for value, axis in axes.items() if axis}


def _picked_rows(graph: Graph, indices: dict[str, int]) -> dict[str, int]:
    """Value -> the last choice whose rows it is computed from; ``indices`` has the choice of every value of indices."""
    rows: dict[str, int] = {}
    for op in graph.ops:
        moved, picked = _latest(rows, op), _latest(indices, op)
        if picked is not None and _picks_from_floats(graph, op, indices):
            moved = max(picked, -1 if moved is None else moved)
        if moved is not None:
            rows.update(dict.fromkeys(op.outputs, moved))
        elif picked is not None:
            indices.update((value, picked) for value in op.outputs if not graph.values[value].is_float)
    return rows


def _latest(known: dict[str, int], op: Op) -> int | None:
    return max((known[value] for _, value in op.sources() if value in known), default=None)


def _picks_from_floats(graph: Graph, op: Op, indices: dict[str, int]) -> bool:
    data = op.inputs[0]
    return op.type in _PICKS and data is not None and data not in indices and graph.values[data].is_float


def _axis_of_rows(graph: Graph, value: str, chosen: Sequence[int]) -> int:
    """The axis of a tensor with as many elements as rows were ``chosen`` of each sample; 0 where it is not the only one."""
    shape, (count, most) = graph.values[value].shape, chosen
    axes = [axis for axis, size in enumerate(shape) if axis and size == most]
    same = len(shape) > 2 and (shape[0] == count or min(shape[0], count) < 0)
    return axes[0] if same and graph.values[value].is_float and len(axes) == 1 and most > 1 else 0


def chosen_rows(ops: Iterable[Op], static: set[str]) -> set[str]:
    """Values whose rows one of ``ops`` selected or sorted, and values computed from them.

    Rows that are put back are those of before the last choice: of a router's experts all tokens, of the levels of a detector
    its proposals, which another choice had picked.
    """
    choices = _Choices()
    for op in ops:
        choices.visit(op, op.type in _CHOOSES and static.isdisjoint(op.outputs))
    return set(choices.history)


class _Choices:
    """Operators that selected or sorted the rows of values.

    Attributes:
        history: value -> operators that chose before it; values without any are missing.
        picked: value -> those of them by whose indices rows of another tensor were picked.
    """

    def __init__(self) -> None:
        self.history: dict[str, frozenset[str]] = {}
        self.picked: dict[str, frozenset[str]] = {}
        self._before: dict[str, frozenset[str]] = {}  # operator that chooses -> those before it

    def visit(self, op: Op, chooses: bool) -> None:
        """Go on over an operator; ``chooses``: whether it selects or sorts rows."""
        read = [value for _, value in op.sources()]
        history, picked = self._of(self.history, read), self._of(self.picked, read)
        if op.type in _PUTS_BACK:
            last = {one for one in history if not any(one in self._before[other] for other in history)}
            history = picked = picked - last
        elif op.type in _PICKS:
            picked |= self._of(self.history, [value for value in read if value != op.inputs[0]])
        if chooses:
            self._before[op.name] = history
            history |= {op.name}
        if history:
            self.history.update(dict.fromkeys(op.outputs, history))
            self.picked.update(dict.fromkeys(op.outputs, picked))

    def _of(self, known: dict[str, frozenset[str]], values: Iterable[str]) -> frozenset[str]:
        return frozenset[str]().union(*(known[value] for value in values if value in known))


def _upstream(graph: Graph, ops: Iterable[Op]) -> set[str]:
    """The operators from which ``ops`` are reached, also over what later runs of a place read."""
    found: set[str] = set()
    stack = list(ops)
    while stack:
        makers = (graph.producer(value) for _, value in stack.pop().sources())
        new = {maker.name: maker for maker in makers if maker is not None and maker.name not in found}
        found |= new.keys()
        stack += new.values()
    return found


def is_expectation(graph: Graph, op: Op, static: set[str]) -> bool:
    """Whether ``op`` averages stored positions by the probabilities of a softmax: a product with one output channel."""
    if op.type not in ("Conv", "Gemm", "MatMul") or len(op.inputs) < 2 or op.inputs[1] not in static:
        return False
    maker = _maker(graph, op.inputs[0])
    return maker is not None and maker.type == "Softmax" and _has_one_output(graph, op)


def _converts(graph: Graph, op: Op, static: set[str]) -> bool:
    """Whether ``op`` converts coordinates that were joined: a product with a stored square matrix of few rows, and no bias."""
    if op.type not in ("Gemm", "MatMul") or len(op.inputs) < 2 or op.inputs[1] not in static:
        return False
    shape = graph.values[str(op.inputs[1])].shape
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] > _CONVERSION_SIDE or len(op.inputs) > 2:
        return False
    maker = _maker(graph, op.inputs[0])
    return maker is not None and op_row(maker.type).kind == "merge"


def _maker(graph: Graph, value: str | None) -> Op | None:
    """The operator that computed the elements of ``value``, skipping operators that only move them."""
    maker = None if value is None else graph.producer(value)
    while maker is not None and op_row(maker.type).kind == "movement" and maker.inputs and maker.inputs[0] is not None:
        maker = graph.producer(maker.inputs[0])
    return maker


def _has_one_output(graph: Graph, op: Op) -> bool:
    shape = graph.values[str(op.inputs[1])].shape
    if op.type == "Conv":
        return len(shape) > 2 and shape[0] == 1
    if len(shape) == 1:
        return op.type == "MatMul"
    return len(shape) == 2 and shape[0 if op.type == "Gemm" and op.attrs.get("transB") else 1] == 1
