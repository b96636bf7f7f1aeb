"""An ONNX simulation as a :class:`bitwright.methods.rounding.program.SimulatedModel`.

Steps are the nodes of the marked model on torch tensors: of the main graph, and what a batch runs of the bodies in it. An If
is the branch that a batch takes, a Loop or Scan one iteration of its body after the other, so that methods reach the layers
inside as they reach layers that are called several times. Which branch and how many iterations is asked of the batch: of the
values that lead there, nothing else is computed. Batches with the same answers have the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.core.graph.graph import Graph
from bitwright.core.graph.operators import TRAITS
from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.integer_sums import fake_quantize_bias
from bitwright.core.simulation.float_model import sqnr
from bitwright.core.simulation.sites import Site
from bitwright.errors import ModelError
from bitwright.export.files.onnx_file import is_tensor, let_go
from bitwright.export.qdq.markers import Names, is_site, remove_unread, site_nodes, site_of
from bitwright.methods.rounding.driver import Store
from bitwright.methods.rounding.program import Program, Quantize, State, Step, run, run_step
from bitwright.onnx.model.data import as_feeds
from bitwright.onnx.model.graph import UNKNOWN
from bitwright.onnx.model.session import is_large, open_session, run_session
from bitwright.onnx.model.view import measure_shapes
from bitwright.onnx.simulation.marked_model import simulation_model
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.onnx.to_torch import RecurrentLayer, as_torch

_MOST_STEPS = 20_000  # of one loop; a longer one is run by ONNX Runtime, as a single step
_HELD = 1 << 26  # bytes of weights that are held in memory; the others are mapped from files
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


@dataclass(frozen=True)
class Answer:
    """The branches and iterations that a batch takes.

    Attributes:
        value: number of the value that was asked.
        axis: whose length; ``None`` for the element of the value itself.
        found: the element or length.
    """

    value: int
    axis: int | None
    found: int


@dataclass(frozen=True)
class Recorded:
    """The steps of batches with the same branches and iterations.

    Attributes:
        program: the steps.
        inputs: name of a graph input -> number of its value.
        source_of: site of a constant -> number of its value.
        made: value -> step and index that made it.
        answers: in the order of the questions.
    """

    program: Program
    inputs: Mapping[str, int]
    source_of: Mapping[str, int]
    made: Mapping[int, tuple[int, int]]
    answers: tuple[Answer, ...]

    def state(self, feeds: Mapping[str, NDArray[Any]]) -> State:
        """Initial state of the program."""
        return {self.inputs[name]: to_tensor(array) for name, array in feeds.items() if name in self.inputs}

    def suits(self, state: State) -> bool:
        """Whether a batch takes these branches and iterations."""
        values = _Values(self.program.steps, self.made, self.program.constants, state)
        return all(values.answer(a.value, a.axis) == a.found for a in self.answers)


class _Values:
    """Float values of one batch, computed on demand."""

    def __init__(
        self, steps: Sequence[Step], made: Mapping[int, tuple[int, int]], constants: Mapping[int, Tensor], state: State
    ) -> None:
        self._steps, self._made, self._constants, self._known = steps, made, constants, dict(state)

    def answer(self, number: int, axis: int | None) -> int:
        """The only element of a value, or the length of one of its axes."""
        self._compute(number)
        tensor = self._known[number] if number in self._known else self._constants[number]
        return int(tensor.reshape(-1)[0]) if axis is None else int(tensor.shape[axis])

    def _compute(self, number: int) -> None:
        wanted: set[int] = set()
        waiting = [number]
        while waiting:
            value = waiting.pop()
            if value in self._known or value in self._constants:
                continue
            at, _ = self._made[value]
            if at not in wanted:
                wanted.add(at)
                waiting.extend(self._steps[at].reads)
        with torch.no_grad():
            for at in sorted(wanted):
                step = self._steps[at]
                self._known.update(zip(step.writes, run_step(step, self._known, self._constants), strict=True))


class _Turns:
    """The iterations of a loop, and their results.

    Attributes:
        states: after the last one.
        stacked: of each further output, what every iteration made.
        count: how many there were.
    """

    def __init__(self, states: Sequence[int]) -> None:
        self.states, self.count = list(states), 0
        self.stacked: list[list[int]] = []

    def add(self, made: Sequence[int]) -> None:
        """Add the results of one iteration: states, then the further outputs."""
        rest = made[len(self.states) :]
        self.states = list(made[: len(self.states)])
        self.stacked = self.stacked or [[] for _ in rest]
        for parts, number in zip(self.stacked, rest, strict=True):
            parts.append(number)
        self.count += 1


class Steps:
    """Builds the steps of a model for one batch; values of constants are computed once.

    Args:
        sim: the simulation.
        constants: the initializers of its marked model, which all programs of it share.
        feeds: the batch.
    """

    def __init__(
        self, sim: QuantizationSimModel, constants: Mapping[ir.Value, Tensor], feeds: Mapping[str, NDArray[Any]]
    ) -> None:
        self._sim, self._graph, self._ids = sim, sim.marked.graph, _Ids()
        self._source_of: dict[str, int] = {}
        self._constants = {self._ids(value): tensor for value, tensor in constants.items()}
        self._computed: dict[tuple[ir.Node, tuple[int, ...]], tuple[int, ...]] = {}
        self._ops = {op.name for op in sim.graph.ops}
        self._fixed = _constants_of(sim.marked)
        self._steps: list[Step] = []
        self._made: dict[int, tuple[int, int]] = {}
        self._pending: dict[ir.Value, str] = {}  # marked operand -> its site
        self._results: dict[int, list[tuple[int, str]]] = {}  # step -> index and site of what it makes
        self._answers: list[Answer] = []
        self._inputs = {str(value.name): self._ids(value) for value in self._graph.inputs}
        given = {self._inputs[name]: to_tensor(array) for name, array in feeds.items() if name in self._inputs}
        self._values = _Values(self._steps, self._made, self._constants, given)

    def record(self) -> Recorded:
        """Record the steps that the batch runs."""
        waiting: list[Iterator[ir.Node]] = [iter(self._graph)]
        while waiting:
            node = next(waiting[-1], None)
            if node is None:
                waiting.pop()
            elif is_site(node):
                self._note_site(node)
            elif (inside := self._opened(node)) is not None:
                waiting.append(inside)
            else:
                self._add(self._step(node), node)
        steps = [replace_results(step, self._results.get(i, ())) for i, step in enumerate(self._steps)]
        outputs = tuple(self._ids(v) for v in _returned(self._graph))
        program = Program(tuple(steps), self._constants, outputs)
        return Recorded(program, self._inputs, self._source_of, self._made, tuple(self._answers))

    def _note_site(self, marker: ir.Node) -> None:
        source, site = marker.inputs[0], site_of(marker)
        assert source is not None
        number = self._ids(source)
        enters = source.producer() is None and source.graph is not self._graph
        if self._sim.plan.sites[site].role != "output":
            self._pending[marker.outputs[0]] = site
            if number in self._constants:
                self._source_of[site] = number
        elif enters and number not in self._constants:  # other readers of the same value see it without the quantizer
            self._ids.alias(source, self._pass(number))
            self._results.setdefault(len(self._steps) - 1, []).append((0, site))
        elif number in self._made:
            at, index = self._made[number]
            self._results.setdefault(at, []).append((index, site))
        self._ids.alias(marker.outputs[0], self._ids(source))

    def _add(self, step: Step, node: ir.Node) -> None:
        """Add a step; one on constants alone becomes constants."""
        key = node, step.reads
        fixed = not step.operands and not node_has_graphs(node) and all(v in self._constants for v in step.reads)
        if fixed and key in self._computed:  # in another iteration
            self._renumber(node, self._computed[key])
            return
        if fixed:
            values = step.function([self._constants[v] for v in step.reads])
            if all(isinstance(value, Tensor) for value in values):  # an empty sequence is none
                self._constants.update(zip(step.writes, values, strict=True))
                self._computed[key] = step.writes
                return
        self._append(step)

    def _renumber(self, node: ir.Node, numbers: Sequence[int]) -> None:
        for value, number in zip((v for v in node.outputs if v.name), numbers, strict=True):
            self._ids.alias(value, number)

    def _append(self, step: Step) -> None:
        self._made.update((v, (len(self._steps), i)) for i, v in enumerate(step.writes))
        self._steps.append(step)

    # -- single operators

    def _step(self, node: ir.Node) -> Step:
        outputs = [v for v in node.outputs if v.name]
        name = self._name(str(node.name))
        attrs: dict[str, Any] = {a.name: a.value for a in node.attributes.values()}
        attrs |= {"opset": self._graph.opset_imports.get("", 1), "outputs": len(node.outputs)}
        function = None if node.domain else as_torch(node.op_type, attrs, len(outputs))
        if function is None:
            opaque = _Opaque(self._sim, node, self._fixed)
            reads, operands = self._numbers(opaque.inputs), self._operands(opaque.inputs)
            ports = {port: opaque.inputs.index(v) for port, v in enumerate(node.inputs) if v in opaque.inputs}
            layer = RecurrentLayer.of(node)
            traced = None if layer is None else self._through(name, node, layer.real, layer.inside)
            writes = self._fresh(outputs) if traced is None else traced.writes
            return Step(name, reads, writes, opaque.real, ports, operands, (), False, opaque.quantized, traced)
        there = [port for port, v in enumerate(node.inputs) if v is not None]
        return self._through(name, node, _Ports(function, there, len(node.inputs)))

    def _through(self, name: str, node: ir.Node, function: Any, inside: Any = None) -> Step:
        """A step through which gradients flow, also to constants."""
        given = {port: v for port, v in enumerate(node.inputs) if v is not None}
        values = list(given.values())
        reads = self._numbers(values)
        return Step(
            name, reads, self._fresh([v for v in node.outputs if v.name]), function,
            {port: slot for slot, port in enumerate(given)}, self._operands(values), inside=inside,
        )  # fmt: skip

    def _name(self, name: str) -> str:
        """``name`` if the graph has an operator of that name."""
        return name if name in self._ops else ""

    def _numbers(self, values: Sequence[ir.Value]) -> tuple[int, ...]:
        return tuple(map(self._ids, values))

    def _fresh(self, values: Sequence[ir.Value]) -> tuple[int, ...]:
        return tuple(map(self._ids.fresh, values))

    def _operands(self, values: Sequence[ir.Value]) -> tuple[tuple[int, str], ...]:
        return tuple((slot, self._pending[v]) for slot, v in enumerate(values) if v in self._pending)

    # -- bodies

    def _opened(self, node: ir.Node) -> Iterator[ir.Node] | None:
        """The nodes that the batch runs inside ``node``; ``None`` where it is an operator without bodies."""
        if node.op_type not in TRAITS["bodies"] or node.domain:
            return None
        return {"If": self._branch, "Loop": self._loop, "Scan": self._scan}[node.op_type](node)

    def _ask(self, number: int, axis: int | None = None) -> int:
        """Read an element or a length of a value from the batch, and record it; constants are not recorded."""
        found = self._values.answer(number, axis)
        if number not in self._constants:
            self._answers.append(Answer(number, axis, found))
        return found

    def _pass(self, number: int, op: str = "", site: str | None = None) -> int:
        """Add an identity step, whose readers may see the value through a quantizer of their own."""
        made = self._ids.another()
        self._append(Step(op, (number,), (made,), _handed_on, {}, () if site is None else ((0, site),)))
        return made

    def _entering(self, value: ir.Value) -> int:
        """The number of a value that enters a body."""
        site = self._pending.get(value)
        return self._ids(value) if site is None else self._pass(self._ids(value), site=site)

    def _hand_out(self, node: ir.Node, i: int, value: ir.Value) -> None:
        """Set output ``i`` of ``node`` to a body's result."""
        if node.outputs[i].name:
            op = self._name(str(node.name) if i == 0 else f"{node.name}.{i}")
            self._ids.alias(node.outputs[i], self._pass(self._ids(value), op, self._pending.get(value)))

    def _branch(self, node: ir.Node) -> Iterator[ir.Node]:
        condition = node.inputs[0]
        assert condition is not None
        taken = "then_branch" if self._ask(self._ids(condition)) else "else_branch"
        graph = node.attributes[taken].as_graph()
        yield from graph
        for i, value in enumerate(graph.outputs):
            self._hand_out(node, i, value)

    def _loop(self, node: ir.Node) -> Iterator[ir.Node]:
        body, undo = node.attributes["body"].as_graph(), self._mark()
        limit, going = (node.inputs[i] if i < len(node.inputs) else None for i in (0, 1))
        most = math.inf if limit is None else self._ask(self._ids(limit))
        goes = going is None or bool(self._ask(self._ids(going)))
        turns = _Turns([self._entering(v) for v in node.inputs[2:] if v is not None])
        while goes and turns.count < most and self._is_short(undo):
            for value, number in zip(body.inputs[:2], (turns.count, True), strict=True):
                self._constants[self._ids.fresh(value)] = torch.tensor(number).reshape((1,) * _rank(value))
            self._bind(body.inputs[2:], turns.states)
            yield from body
            turns.add([self._entering(v) for v in body.outputs[1:]])
            goes = bool(self._ask(self._ids(body.outputs[0])))
        ended = not goes or turns.count >= most
        self._close(node, turns, undo, ended, [(0, False)] * (len(body.outputs) - 1 - len(turns.states)))

    def _scan(self, node: ir.Node) -> Iterator[ir.Node]:
        body, undo = node.attributes["body"].as_graph(), self._mark()
        scanned = node.attributes["num_scan_inputs"].as_int()
        given = [self._entering(v) for v in node.inputs if v is not None]
        turns, rows = _Turns(given[:-scanned]), given[-scanned:]
        kinds = [self._name(f"{node.name}.{value.name}") for value in body.inputs[-scanned:]]
        axes, turned = _ints(node, "scan_input_axes", scanned), _ints(node, "scan_input_directions", scanned)
        count = self._ask(rows[0], axes[0])
        while turns.count < count and self._is_short(undo):
            at = [count - 1 - turns.count if backwards else turns.count for backwards in turned]
            slices = [self._sliced(*part) for part in zip(kinds, rows, axes, at, strict=True)]
            self._bind(body.inputs, [*turns.states, *slices])
            yield from body
            turns.add([self._entering(v) for v in body.outputs])
        outputs = len(body.outputs) - len(turns.states)
        ways = zip(
            _ints(node, "scan_output_axes", outputs), _ints(node, "scan_output_directions", outputs), strict=True
        )
        self._close(node, turns, undo, turns.count == count, [(axis, bool(back)) for axis, back in ways])

    def _is_short(self, since: tuple[int, int]) -> bool:
        return len(self._steps) - since[0] <= _MOST_STEPS

    def _sliced(self, op: str, row: int, axis: int, at: int) -> int:
        made = self._ids.another()
        self._append(Step(op, (row,), (made,), partial(_slice, axis=axis, at=at)))
        return made

    def _bind(self, values: Sequence[ir.Value], numbers: Sequence[int]) -> None:
        for value, number in zip(values, numbers, strict=True):
            self._ids.alias(value, number)

    def _close(
        self, node: ir.Node, turns: _Turns, undo: tuple[int, int], ended: bool, ways: Sequence[tuple[int, bool]]
    ) -> None:
        """Outputs of a loop: its states, and the stacked results of iterations; ``ways`` are axes and directions."""
        if not ended or (ways and not turns.count):  # no shape is known of the results of no iteration
            self._whole(node, undo)
            return
        names = [self._name(str(node.name) if i == 0 else f"{node.name}.{i}") for i in range(len(node.outputs))]
        named = [(value, op) for value, op in zip(node.outputs, names, strict=True)]
        for (value, op), number in zip(named, turns.states, strict=False):
            self._ids.alias(value, self._pass(number, op))
        for (value, op), made, (axis, back) in zip(named[len(turns.states) :], turns.stacked, ways, strict=False):
            parts = tuple(made[::-1] if back else made)
            self._append(Step(op, parts, (self._ids.fresh(value),), partial(_stacked, axis=axis)))

    def _mark(self) -> tuple[int, int]:
        return len(self._steps), len(self._answers)

    def _whole(self, node: ir.Node, undo: tuple[int, int]) -> None:
        """Add ``node`` as one step."""
        del self._steps[undo[0] :], self._answers[undo[1] :]
        for at in [at for at in self._results if at >= undo[0]]:
            del self._results[at]
        for value in [value for value, (at, _) in self._made.items() if at >= undo[0]]:
            del self._made[value]
        self._append(self._step(node))


def _rank(value: ir.Value) -> int:
    return 0 if value.shape is None else len(value.shape)


def _ints(node: ir.Node, name: str, length: int) -> list[int]:
    return list(node.attributes.get_ints(name, ())) or [0] * length


def _handed_on(tensors: Sequence[Any]) -> list[Any]:
    return [t.view_as(t) if isinstance(t, Tensor) else t for t in tensors]


def _slice(tensors: Sequence[Tensor], axis: int, at: int) -> list[Tensor]:
    return [tensors[0].select(axis, at)]


def _stacked(tensors: Sequence[Tensor], axis: int) -> list[Tensor]:
    return [torch.stack(list(tensors), axis)]


#: operators whose result is the tensors that they read, under another type
_HOLDERS = frozenset(("SequenceConstruct", "SequenceInsert", "Optional", "Identity", "ZipMap"))


def _returned(graph: ir.Graph) -> list[ir.Value]:
    """The tensors that a model returns, then those that the sequences and maps it returns are made of."""
    found = dict.fromkeys(value for value in graph.outputs if is_tensor(value))
    held = [value for value in graph.outputs if not is_tensor(value)]
    seen = set(held)
    for value in held:  # grows inside the loop
        fresh = [read for read in _held_by(value) if read not in seen]
        seen.update(fresh)
        held += [read for read in dict.fromkeys(fresh) if not is_tensor(read)]
        found.update((read, None) for read in fresh if is_tensor(read) and _is_floating(read))
    return list(found)


def _held_by(value: ir.Value) -> list[ir.Value]:
    """Elements of a sequence or map."""
    node = value.producer()
    if node is None or node.op_type not in _HOLDERS:
        return []
    return [read for read in node.inputs if read is not None]


def _is_floating(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


class _Ids:
    """Numbers for values."""

    def __init__(self) -> None:
        self._ids: dict[ir.Value, int] = {}
        self._count = 0

    def __call__(self, value: ir.Value) -> int:
        return self._ids[value] if value in self._ids else self.fresh(value)

    def another(self) -> int:
        """A number that no value had."""
        self._count += 1
        return self._count

    def fresh(self, value: ir.Value) -> int:
        """A new number for ``value``, which has another one in every iteration of a loop."""
        self._ids[value] = self.another()
        return self._ids[value]

    def alias(self, value: ir.Value, number: int) -> None:
        """Give ``value`` an existing ``number``."""
        self._ids[value] = number


class _Ports:
    """A row of the table as a function of the connected inputs."""

    def __init__(self, function: Callable[[Sequence[Any]], Sequence[Tensor]], ports: Sequence[int], size: int) -> None:
        self._function, self._ports, self._size = function, tuple(ports), size

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        given: list[Tensor | None] = [None] * self._size
        for port, tensor in zip(self._ports, tensors, strict=True):
            given[port] = tensor
        return self._function(given)


class _Opaque:
    """A node that ONNX Runtime runs: recurrent layers, operators without a row in torch, loops that are not opened."""

    def __init__(self, sim: QuantizationSimModel, node: ir.Node, fixed: Container[ir.Value]) -> None:
        self._sim, self._node = sim, node
        self._inside = node.graph is not sim.marked.graph
        read = [v for v in (*node.inputs, *_captured(node)) if v is not None and (self._inside or v not in fixed)]
        self.inputs = list(dict.fromkeys(read))
        ops = {str(one.name) for one in (node, *_nodes_inside(node))}
        self._sites = [name for name, site in sim.quantizers.items() if site.op in ops]
        self._sessions: dict[str, tuple[list[Any], Any]] = {}

    def real(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """In float."""
        return self._run("real", tensors)

    def quantized(self, tensors: Sequence[Tensor], quantize: Quantize) -> Sequence[Tensor]:
        """Run the step with the simulation's quantizers inside it."""
        return self._run("quantized", tensors)

    def _run(self, kind: str, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        state = [] if kind == "real" else self._state()
        built = self._sessions.get(kind)
        if built is None or any(one is not other for one, other in zip(built[0], state, strict=True)):
            sim = self._sim
            piece = ir.Model(self._part(), ir_version=sim.marked.ir_version)
            encodings = {} if kind == "real" else _encodings(sim)
            session = open_session(simulation_model(piece, encodings, _biases(sim)).model, sim.providers)
            built = self._sessions[kind] = (state, session)
        session = built[1]
        feeds = {i.name: _to_runtime(t) for i, t in zip(session.get_inputs(), tensors, strict=True)}
        return [_from_runtime(found) for found in run_session(session, feeds, str(self._node.name))]

    def _part(self) -> ir.Graph:
        """A model of the node; in a body all values read become inputs."""
        graph, outputs = self._sim.marked.graph, [v for v in self._node.outputs if v.name]
        if self._inside:
            part = ir.GraphView(self.inputs, outputs, nodes=[self._node], name="part").clone()
        else:
            part = ir.convenience.extract(graph, self.inputs, outputs)
        part.opset_imports.update(graph.opset_imports)
        return part

    def _state(self) -> list[Any]:
        """The weights and encodings that a session with quantizers is built with, as a key."""
        sim = self._sim
        sites = [sim.quantizers[name] for name in self._sites]
        encodings = [site.encoding if site.enabled else None for site in sites]
        return [*encodings, *(sim.constants.get(name) for name in self._sites)]


def _to_runtime(held: Any) -> Any:
    """Convert a value of a step for ONNX Runtime; a sequence is a tuple of tensors."""
    if isinstance(held, tuple):
        return [tensor.detach().cpu().numpy() for tensor in held]
    return held.detach().cpu().numpy() if isinstance(held, Tensor) else held


def _from_runtime(found: Any) -> Any:
    """Convert a result of ONNX Runtime to tensors; values other than tensors and sequences stay as they are."""
    if isinstance(found, list) and all(isinstance(part, np.ndarray) for part in found):
        return tuple(to_tensor(array) for array in found)
    return to_tensor(found) if isinstance(found, np.ndarray) else found


def _encodings(sim: QuantizationSimModel) -> dict[str, Any]:
    return {s.name: s.encoding for s in sim.quantizers.values() if s.enabled and s.encoding is not None}


def _biases(sim: QuantizationSimModel) -> set[str]:
    return {s.name for s in sim.quantizers.values() if s.quantizer.derived}


def _constants_of(model: ir.Model) -> set[ir.Value]:
    """Initializers, and values that markers and other nodes compute from constants alone."""
    known = {v for v in model.graph.initializers.values() if v.const_value is not None and not v.is_graph_input()}
    for node in model.graph:
        if node.inputs and all(v is None or v in known for v in node.inputs) and not node_has_graphs(node):
            known.update(node.outputs)
    return known


def node_has_graphs(node: ir.Node) -> bool:
    """Whether a node has bodies."""
    return any(attribute.type in _GRAPHS for attribute in node.attributes.values())


def _graphs_of(node: ir.Node) -> list[ir.Graph]:
    return [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]


def _nodes_inside(node: ir.Node) -> Iterator[ir.Node]:
    for body in _graphs_of(node):
        yield from body.all_nodes()


def _captured(node: ir.Node) -> list[ir.Value]:
    """Values from outside that the bodies of a node read."""
    graphs = _graphs_of(node)
    own = {graph for body in graphs for graph in (body, *body.subgraphs())}
    read = [v for inner in _nodes_inside(node) for v in inner.inputs if v is not None]
    read += [v for body in graphs for v in body.outputs]
    return [v for v in read if v.graph not in own]


def replace_results(step: Step, results: Sequence[tuple[int, str]]) -> Step:
    """``step`` followed by quantizers."""
    if not results:
        return step
    traced = step.traced and replace_results(step.traced, results)
    return replace(step, results=tuple(results), traced=traced)


def to_tensor(array: NDArray[Any]) -> Tensor:
    """A numpy array as a tensor that owns its numbers."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


# dB between ONNX Runtime and torch: the two sum in different orders, and round in different places in half precision
_CLOSE_ENOUGH = {"float16": 25.0}


class _StraightThrough(torch.autograd.Function):
    """The reference arithmetic, with the identity as its gradient inside the range and zero outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantize: Callable[[Tensor], Tensor], lo: Tensor, hi: Tensor) -> Tensor:
        ctx.save_for_backward((x >= lo) & (x <= hi))
        return quantize(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0] * ctx.saved_tensors[0], None, None, None


class OnnxSimulation:
    """A :class:`QuantizationSimModel` of ONNX as reconstruction sees it.

    Args:
        sim: calibrated or not; weights without an encoding get theirs.
    """

    def __init__(self, sim: QuantizationSimModel) -> None:
        self.sim = sim
        self._recorded: list[Recorded] = []  # programs, the last one used first
        self._weights = Store(_HELD)
        self._initializers = {
            value: self._kept(value.const_value)
            for value in sim.marked.graph.initializers.values()
            if value.const_value is not None and not value.is_graph_input()
        }
        self._names: Names | None = None
        self._markers = {site_of(node): node for node in site_nodes(sim.marked)}
        self._first: Mapping[str, NDArray[Any]] | None = None  # batch
        self._observed: Graph | None = None
        for site in sim.quantizers.values():
            if site.name in sim.constants and site.enabled and not site.quantizer.derived:
                site.quantizer.observe_once(sim.constants[site.name])
                let_go(sim.constants[site.name])

    def _kept(self, tensor: ir.TensorProtocol) -> Tensor:
        """A copy of an initializer, which :meth:`set_weight` may write into; of a large model it is mapped from a file."""
        kept = self._weights.keep(to_tensor(tensor.numpy()))
        let_go(tensor)
        return kept

    def graph(self) -> Graph:
        """The graph of the simulation."""
        return self.sim.graph

    def observed_graph(self) -> Graph:
        """The graph with open lengths taken from the first batch, or before it from the example input."""
        if self._observed is None:
            graph = self.sim.graph
            open_ones = {
                name for name, value in graph.values.items() if value.kind == "activation" or value.kind == "input"
                if not value.shape or UNKNOWN in value.shape
            }  # fmt: skip
            shapes = self._shapes() if open_ones else {}
            values = {
                name: replace(value, shape=shapes[name]) if name in open_ones & shapes.keys() else value
                for name, value in graph.values.items()
            }
            self._observed = Graph(graph.ops, values, graph.inputs, graph.outputs)
        return self._observed

    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        feeds = self.sim.example() if self._first is None else self._first
        return measure_shapes(simulation_model(self.sim.marked, {}).model, feeds, self.sim.providers)

    def sites(self) -> Mapping[str, Site]:
        """The sites of the simulation."""
        return self.sim.quantizers

    def shared(self) -> Mapping[str, str]:
        """The plan's groups of values that are only moved."""
        return self.sim.plan.shared

    def weight(self, site: str) -> Tensor:
        """A copy of the initializer at a weight site."""
        return to_tensor(self.sim.constants[site]).clone()

    def why_fixed(self, site: str) -> str | None:
        """Weights can be written, also in bodies, and those that nodes compute from initializers."""
        known = site in self.sim.constants and site in self._markers
        return None if known else "its weight is computed from the input"

    def set_weight(self, site: str, value: Tensor) -> None:
        """Replace an initializer of the simulation's model."""
        param = self.sim.graph.values[self.sim.plan.sites[site].value].param
        array = value.detach().cpu().numpy()
        if param is not None:
            self.sim.set_parameter(param, array)
        else:
            self._set_computed(site, array)
        for recorded in self._recorded:
            if site in recorded.source_of:
                constant = recorded.program.constants[recorded.source_of[site]]
                constant.copy_(value.to(constant.dtype))

    def _set_computed(self, site: str, array: NDArray[Any]) -> None:
        """Replace a computed weight of the operator by an initializer."""
        marker = self._markers[site]
        source, before = marker.inputs[0], self.sim.constants[site]
        assert source is not None
        if self._names is None:
            self._names = Names(self.sim.marked)
        name = self._names.value(f"{source.name}_chosen")
        tensor = ir.Tensor(np.asarray(array, order="C").astype(before.dtype), name=name)
        new = ir.Value(name=name, shape=source.shape, type=source.type, const_value=tensor)
        self.sim.marked.graph.register_initializer(new)
        self._initializers[new] = self._kept(tensor)
        marker.replace_input_with(0, new)
        remove_unread(source)
        self.sim.constants[site] = tensor.numpy()
        self.sim.forget_simulations()

    def quantize(self, site: str, x: Tensor) -> Tensor:
        """``x`` as the quantizer of ``site`` leaves it; the grid of a bias follows from those of its layer as they are now."""
        quantizer = self.sim.quantizers[site].quantizer
        if quantizer.derivation is not None:
            quantizer.derivation.refresh()
        encoding = quantizer.encoding
        if not quantizer.enabled or encoding is None or not x.is_floating_point():
            return x
        if quantizer.role == "bias" and encoding.format == IntFormat(32):
            return to_tensor(fake_quantize_bias(x.detach().cpu().numpy(), encoding)).to(x)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return torch.as_tensor(fake_quantize(x, encoding))
        granularity, shape = encoding.granularity, tuple(x.shape)
        lo, hi = (
            torch.from_numpy(np.array(granularity.spread(v, shape), np.float32))
            .to(x)
            .expand(granularity.view_shape(shape))
            .reshape(shape)
            for v in (encoding.min, encoding.max)
        )
        return _StraightThrough.apply(x, lambda t: torch.as_tensor(fake_quantize(t, encoding)), lo, hi)

    def program(self, batch: Any) -> tuple[Program, State]:
        """The steps of the model, the same for batches that take the same branches and iterations, and the batch's own inputs.

        Raises:
            ModelError: the batch does not fit, or the steps do not compute what ONNX Runtime computes.
        """
        feeds = as_feeds(batch, self.sim.specs)
        self._first = feeds if self._first is None else self._first
        for i, known in enumerate(self._recorded):
            state = known.state(feeds)
            if known.suits(state):
                self._recorded.insert(0, self._recorded.pop(i))
                return known.program, state
        recorded = Steps(self.sim, self._initializers, feeds).record()
        state = recorded.state(feeds)
        self._check(recorded.program, state, feeds)
        self._recorded.insert(0, recorded)
        return recorded.program, state

    @cached_property
    def _session(self) -> Any:
        packed = not is_large(self.sim.marked)
        return open_session(simulation_model(self.sim.marked, {}).model, self.sim.providers, packed=packed)

    def _check(self, program: Program, inputs: State, feeds: Mapping[str, NDArray[Any]]) -> None:
        whole = Program((*program.steps, Step("", program.outputs, (), lambda tensors: ())), program.constants, ())
        state = dict(inputs)
        run(whole, state, 0, len(program.steps))
        outputs = zip(self.sim.marked.graph.outputs, self.sim.output_names, strict=True)
        names = [name for value, name in outputs if is_tensor(value)]
        # tensors come first among the outputs of the program; what sequences and maps are made of follows
        for value, name, expected in zip(
            program.outputs,
            names,
            run_session(self._session, feeds, "the float model", names) if names else (),
            strict=False,
        ):
            found = state.get(value, program.constants.get(value))
            if found is None or expected.dtype.kind != "f":
                continue
            if tuple(found.shape) != expected.shape:
                raise ModelError(
                    name,
                    f"its operators, run one by one, give it the shape {list(found.shape)}, and ONNX Runtime "
                    f"{list(expected.shape)}",
                    "report the model; its other methods (calibration, export) do not depend on this",
                )
            finite = np.isfinite(expected)
            agreement = sqnr(expected[finite], found.numpy()[finite])
            if agreement < _CLOSE_ENOUGH.get(expected.dtype.name, 50.0):
                raise ModelError(
                    name,
                    f"its operators, run one by one, agree with ONNX Runtime to {agreement:.0f} dB only",
                    "report the model; its other methods (calibration, export) do not depend on this",
                )
