"""Find the operator of an ONNX model that turned finite numbers into NaN or Inf, and the reason.

Every batch runs through a :class:`Probe`. If it suspects no value, the batch is done. Otherwise a
:class:`~bitwright.core.health.report.Tracker` reads the nodes around the values that are not finite, in execution order and
step by step inside loops, and decides which of them are faults. Only the tensors around those nodes are then fetched.

A probe is a copy of the model with graph optimisation switched off, so that no fused operator hides the one that failed.
Only scalars leave the runtime until a tensor is asked for:

1. ReduceSum of every float value. It carries NaN and Inf through, which ReduceMin and ReduceMax do not; but a sum of finite
   values may overflow, so a sum that is not finite is only a suspicion.
2. For suspected values a second run of the batch takes the sum of magnitudes, the maximum and the minimum: the first is NaN
   where a value is, and otherwise the other two show every infinity.
3. The few tensors that a diagnosis needs are fetched by name.

Half precision: ONNX Runtime computes chains of half operators on a CPU in float32 without the roundings between them, which
would hide an overflow. An Identity after every half value keeps these roundings.

Bodies of If, Loop and Scan run step by step as models of their own (:class:`Frame`), whose inputs are the outer tensors that
they read, so that a value of a body can be inspected at any iteration. In a recurrent node the first step, direction and gate
that is not finite is found by computing its equations (:func:`first_bad_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.graph.operators import TRAITS, op_row
from bitwright.core.graph.recurrence import CELLS, RECURRENT, Context, step, variant_of
from bitwright.core.health.diagnosis import diagnose, remedy
from bitwright.core.health.report import (
    CLEAN,
    HALVES,
    Culprit,
    Event,
    Flags,
    HealthReport,
    TensorHealth,
    TensorKind,
    Tracker,
    first_non_finite,
    measure_tensor,
)
from bitwright.core.simulation.calibration import refuse_empty, refuse_one_batch
from bitwright.errors import BitwrightError, CalibrationError, ModelError
from bitwright.export.files.onnx_file import is_tensor
from bitwright.export.qdq.forms import Builder, after
from bitwright.onnx.model.data import Feeds, InputSpec, as_feeds, input_specs, random_array
from bitwright.onnx.model.graph import canonical_op
from bitwright.onnx.model.instrument import Instrument
from bitwright.onnx.model.load import Source, clone_model, load_model
from bitwright.onnx.model.session import Providers, check_providers, first_line, open_session
from bitwright.progress import collector_paused
from bitwright.progress import progress as shown
from bitwright.runtimes.adapters import arrays_of
from bitwright.runtimes.onnxruntime import refusals

Array = NDArray[Any]

_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "Sigmoid": lambda x: 1 / (1 + np.exp(-np.clip(x, -88, 88))),
    "Tanh": np.tanh,
    "Relu": lambda x: np.maximum(x, 0),
    "Softsign": lambda x: x / (1 + abs(x)),
    "Softplus": lambda x: np.logaddexp(x, 0),
}


class Inside(NamedTuple):
    """The first non-finite tensor inside the steps of a recurrent node.

    Attributes:
        step: number of the time step, in the order of the data.
        direction: ``forward`` or ``reverse``.
        name: ``candidate.pre``, ``cell``, ``hidden``: see :data:`bitwright.core.graph.recurrence.CELLS`.
        sample: row of the batch.
    """

    step: int
    direction: str
    name: str
    sample: int

    def __str__(self) -> str:
        backwards = " of the reverse direction" if self.direction == "reverse" else ""
        return f"first in {self.name!r} at step {self.step}{backwards}"


@dataclass
class _Context(Context):
    """Computes a step in float32 and records the first non-finite inner tensor."""

    weights: Array
    bias: Array
    functions: Sequence[Callable[[Array], Array]]
    limit: float
    rows: dict[str, slice]
    bad: list[tuple[str, int]] = field(default_factory=list)

    def quantize(self, name: str, x: Array) -> Array:
        if name != RECURRENT and not np.isfinite(x).all():
            self.bad.append((name, int((~np.isfinite(x)).any(-1).argmax())))
        return x

    def activate(self, index: int, x: Array) -> Array:
        return self.functions[index](x)

    def clip(self, x: Array) -> Array:
        return np.clip(x, -self.limit, self.limit)

    def recur(self, h: Array, gates: Sequence[str]) -> list[Array]:
        return [h @ self.weights[self.rows[g]].T + self.bias[self.rows[g]] for g in gates]


def first_bad_step(op_type: str, attrs: Mapping[str, Any], operands: Sequence[Array | None]) -> Inside | None:
    """Compute an RNN, GRU or LSTM step by step until a value is not finite.

    Args:
        op_type, attrs: of the ONNX node.
        operands: in port order: X ``[steps, batch, inputs]`` (``[batch, steps, inputs]`` with ``layout=1``), W, R, B,
            sequence_lens, initial_h, initial_c, P; ``None`` for what is not connected.

    Returns:
        The place; ``None`` where every step is finite in float32, or an activation function is not known here.
    """
    names = [str(name) for name in attrs.get("activations") or CELLS[op_type].activations * 2]
    if not _FUNCTIONS.keys() >= set(names):
        return None
    given = [None if x is None else np.asarray(x, np.float32) for x in (*operands, *[None] * 8)]
    x = given[0]
    assert x is not None and given[1] is not None
    x = x.swapaxes(0, 1) if attrs.get("layout") else x
    with np.errstate(all="ignore"):
        for d in range(given[1].shape[0]):
            inside = _direction(op_type, attrs, x, given, d, names)
            if inside is not None:
                return inside
    return None


def _direction(
    op_type: str, attrs: Mapping[str, Any], x: Array, given: Sequence[Array | None], d: int, names: list[str]
) -> Inside | None:
    order, direction = range(len(x)), "forward"
    if d == 1 or attrs.get("direction") == "reverse":
        order, direction = order[::-1], "reverse"
    gates, per = CELLS[op_type].gates, len(CELLS[op_type].activations)
    w, r, b, h, c, p = (given[port] for port in (1, 2, 3, 5, 6, 7))
    assert w is not None and r is not None
    hidden, batch = r.shape[-1], x.shape[1]
    rows = {gate: slice(i * hidden, (i + 1) * hidden) for i, gate in enumerate(gates)}
    both = np.zeros(2 * len(gates) * hidden, np.float32) if b is None else b[d]
    limit = float(attrs.get("clip") or np.inf)
    functions = [_FUNCTIONS[name] for name in names[d * per : (d + 1) * per]]
    context = _Context(r[d], both[len(both) // 2 :], functions, limit, rows)
    start = np.zeros((batch, hidden), np.float32)
    axis = 1 if attrs.get("layout") else 0
    state = [start if s is None else np.take(s, d, axis) for s in (h, c)][: 2 if op_type == "LSTM" else 1]
    peepholes = {} if p is None else dict(zip(("input", "output", "forget"), np.split(p[d], 3), strict=True))
    for t in order:
        pre = {g: x[t] @ w[d][rows[g]].T + both[rows[g]] for g in gates}
        state = list(step(op_type, context, pre, state, variant_of(attrs), peepholes))
        if context.bad:
            return Inside(t, direction, *context.bad[0])
    return None


_WIDE = frozenset((ir.DataType.FLOAT, ir.DataType.DOUBLE))
_FLOATS = frozenset(dtype for dtype in ir.DataType if dtype.is_floating_point())
_NARROW = _FLOATS - _WIDE
_STANDARD = ("", "ai.onnx")
BODY_ATTRIBUTES = {"If": ("then_branch", "else_branch"), "Loop": ("body",), "Scan": ("body",)}


def flags_of(x: Any) -> Flags:
    """Kinds of non-finite values in an array, sequence or map; none for other types than floats."""
    if not isinstance(x, np.ndarray):
        return Flags(*map(any, zip(CLEAN, *map(flags_of, arrays_of(x)), strict=True)))
    if x.dtype.kind != "f" or np.isfinite(x).all():
        return CLEAN
    return Flags(*(bool(bad.any()) for bad in (np.isnan(x), x == np.inf, x == -np.inf)))


def is_body_op(node: ir.Node, opset: int) -> bool:
    """Whether ``node`` is an If, Loop or Scan over tensors and sequences, whose steps can be run one by one."""
    if node.op_type not in BODY_ATTRIBUTES or node.domain not in _STANDARD:
        return False
    if node.op_type == "Scan" and opset < 9:  # it had a batch axis then, and lengths
        return False
    values = [v for v in (*node.inputs, *node.outputs) if v is not None]
    return all(v.type is None or isinstance(v.type, ir.TensorType | ir.SequenceType) for v in values)


def opset_of(model: ir.Model) -> int:
    """Version of the standard operators."""
    return max((model.opset_imports.get(domain, 0) for domain in _STANDARD), default=0)


def _bodies(node: ir.Node) -> list[ir.Graph]:
    return [node.attributes[name].as_graph() for name in BODY_ATTRIBUTES[node.op_type]]


def _nodes(graph: ir.Graph, opset: int) -> list[ir.Node]:
    """The nodes of a graph, and of its bodies that can be run step by step."""
    found: list[ir.Node] = []
    waiting = [graph]
    while waiting:
        nodes = list(waiting.pop())
        found += nodes
        waiting += [body for node in nodes if is_body_op(node, opset) for body in _bodies(node)]
    return found


def _made(nodes: Iterable[ir.Node]) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Outputs of ``nodes``, each with its node."""
    for node in nodes:
        yield from ((node, value) for value in node.outputs if value.name)


def _is_float(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType) and value.dtype in _FLOATS


class Probe:
    """A model, and sessions that return its inner values.

    Args:
        model: names unique over all its graphs, as :func:`bitwright.onnx.model.load.load_model` leaves them; not changed.
        providers, threads: of the sessions.
    """

    def __init__(self, model: ir.Model, providers: Providers | None = None, threads: int = 0) -> None:
        self.model, self.providers, self.threads = model, providers, threads
        graph = model.graph
        self.place = {node: i for i, node in enumerate(graph)}
        self.maker = {str(v.name): node for node, v in _made(graph)}
        self.inputs = {str(v.name) for v in graph.inputs}
        self.outputs = [str(v.name) for v in graph.outputs]
        self.constants = {str(v.name): v for v in graph.initializers.values()}
        self.opset = opset_of(model)
        self.floats = [str(v.name) for _, v in _made(graph) if _is_float(v)]
        self.sequences = {str(v.name) for _, v in _made(graph) if isinstance(v.type, ir.SequenceType)}
        self.bodies = {node for node in graph if is_body_op(node, self.opset)}
        self.owner = {  # value of a body -> the node of this graph that holds the body
            str(v.name): node
            for node in self.bodies
            for body in _bodies(node)
            for _, v in _made(_nodes(body, self.opset))
        }
        self._watched: tuple[Any, dict[str, str]] | None = None  # value -> its sum
        self._fetching: dict[tuple[str, ...], Any] = {}
        self._judging: dict[tuple[str, ...], Any] = {}
        self._bodies: dict[tuple[ir.Node, str], Body] = {}

    # -- runs

    def run(self, feeds: Feeds) -> tuple[dict[str, Array], list[str]]:
        """Outputs by name, and the values (those of bodies included) whose sum is not finite."""
        if self._watched is None:
            self._watched = self._watch()
        session, sums = self._watched
        outputs = list(dict.fromkeys(self.outputs))
        found = session.run([*outputs, *sums.values()], self._fed(feeds))
        totals = zip(sums, found[len(outputs) :], strict=True)
        suspects = [name for name, total in totals if not np.isfinite(total).all()]
        return dict(zip(outputs, found[: len(outputs)], strict=True)), suspects

    def flags(self, names: Sequence[str], feeds: Feeds) -> dict[str, Flags]:
        """Non-finite kinds of this graph's node outputs; infinities beside a NaN are not listed."""
        key = tuple(names)
        if not names:
            return {}
        if key not in self._judging:
            self._judging = {key: self._judge(names)}
        session, outputs = self._judging[key]
        found = iter(session.run(outputs, self._fed(feeds)))
        return {name: _judge(*bounds) for name, *bounds in zip(names, found, found, found, strict=True)}

    def fetch(self, names: Iterable[str], feeds: Feeds) -> dict[str, Array]:
        """Inputs, constants and node outputs of this graph by name; types that numpy lacks as float32."""
        wanted = list(dict.fromkeys(names))
        found = {name: feeds[name] for name in wanted if name in feeds}
        for name in wanted:
            if name not in found and name in self.constants:
                found[name] = array_of(self.constants[name])
        made = tuple(name for name in wanted if name not in found)
        if made:
            if made not in self._fetching:
                self._fetching = {made: self._hand_out(made)}
            session, outputs = self._fetching[made]
            found.update(zip(made, session.run(outputs, self._fed(feeds)), strict=True))
        return found

    def body(self, node: ir.Node, attribute: str) -> Body:
        """The body of ``node`` as a model of its own, made once."""
        key = (node, attribute)
        if key not in self._bodies:
            self._bodies[key] = Body.of(self, node, attribute)
        return self._bodies[key]

    def _fed(self, feeds: Feeds) -> Feeds:
        return {name: array for name, array in feeds.items() if name in self.inputs}

    # -- sessions

    @collector_paused()
    def _watch(self) -> tuple[Any, dict[str, str]]:
        copy = _Copy(self.model)
        sums = {str(value.name): copy.sum(value) for value in copy.floats}
        return self._open(copy, list(sums.values())), {name: str(v.name) for name, v in sums.items()}

    @collector_paused()
    def _judge(self, names: Sequence[str]) -> tuple[Any, list[str]]:
        copy = _Copy(self.model)
        scalars = [scalar for name in names for scalar in _bounds(copy, name)]
        return self._open(copy, scalars), [str(v.name) for v in scalars]

    @collector_paused()
    def _hand_out(self, names: Sequence[str]) -> tuple[Any, list[str]]:
        copy = _Copy(self.model)
        values = [_readable(copy, copy.value(name)) for name in names]
        return self._open(copy, values), [str(v.name) for v in values]

    def _open(self, copy: _Copy, wanted: Sequence[ir.Value]) -> Any:
        return copy.instrument.open(
            wanted, lambda m: open_session(m, self.providers, threads=self.threads, order="written", arena=False)
        )


def array_of(value: ir.Value) -> Array:
    """The elements of a constant; bfloat16 and narrower floats as float32."""
    tensor = value.const_value
    assert tensor is not None, value.name
    array = tensor.numpy()
    return array.astype(np.float32) if array.dtype.kind == "V" else array


class _Copy:
    """A private copy of a model to add nodes to; half values are followed by an Identity."""

    def __init__(self, model: ir.Model) -> None:
        self.instrument = Instrument(clone_model(model))
        self.builder: Builder = self.instrument.builder
        self._values: dict[str, ir.Value] = {}
        self.floats: list[ir.Value] = []
        main = self.instrument.model.graph
        for node, value in _made(_nodes(main, opset_of(model))):
            name = str(value.name)
            if node.graph is main:
                self._values[name] = value
            if _is_float(value):
                self.floats.append(value)
                if value.dtype in _NARROW:
                    self._keep_rounding(node, value)

    def value(self, name: str) -> ir.Value:
        return self._values[name]

    def _keep_rounding(self, node: ir.Node, value: ir.Value) -> None:
        uses = list(value.uses())
        assert value.dtype is not None
        kept = self.builder.emit(after(node), "Identity", [value], f"{value.name}_kept", value.dtype)
        for user, port in uses:
            user.replace_input_with(port, kept)

    def wide(self, value: ir.Value) -> ir.Value:
        """``value`` in a type that all operators support."""
        if value.dtype in _WIDE:
            return value
        kept = next((n.outputs[0] for n, _ in value.uses() if n.op_type == "Identity"), value)
        place = after(_producer(kept))
        name = f"{value.name}_wide"
        return self.builder.emit(place, "Cast", [kept], name, ir.DataType.FLOAT, to=int(ir.DataType.FLOAT))

    def sum(self, value: ir.Value) -> ir.Value:
        """The sum of a value of any graph, as a scalar of the main graph."""
        wide = self.wide(value)
        node = _producer(wide)
        graph = node.graph
        assert isinstance(graph, ir.Graph) and wide.dtype is not None
        total = self.reduce("ReduceSum", wide)
        lifted, _ = self.instrument.lift(total, graph, np.zeros((), wide.dtype.numpy()), "ReduceSum")
        return lifted

    def reduce(self, op: str, x: ir.Value) -> ir.Value:
        """A scalar of the main graph, made right after ``x``."""
        assert x.dtype is not None
        scalar = self.builder.emit(after(_producer(x)), op, [x], f"{x.name}_{op}", x.dtype, keepdims=0)
        scalar.shape = ir.Shape([])
        return scalar

    def magnitude(self, x: ir.Value) -> ir.Value:
        """``|x|``."""
        assert x.dtype is not None
        return self.builder.emit(after(_producer(x)), "Abs", [x], f"{x.name}_abs", x.dtype)


def _bounds(copy: _Copy, name: str) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The sum of magnitudes, the maximum and the minimum of a value of the main graph."""
    x = copy.wide(copy.value(name))
    return (copy.reduce("ReduceSum", copy.magnitude(x)), copy.reduce("ReduceMax", x), copy.reduce("ReduceMin", x))


def _judge(total: Array, largest: Array, smallest: Array) -> Flags:
    """Judge a value by its sum of magnitudes, which is NaN if an element is, and by its maximum and minimum."""
    if np.isnan(total):
        return Flags(nan=True)
    return Flags(pos_inf=bool(largest == np.inf), neg_inf=bool(smallest == -np.inf))


def _readable(copy: _Copy, value: ir.Value) -> ir.Value:
    readable = value.dtype in _WIDE or value.dtype == ir.DataType.FLOAT16
    return value if readable or not _is_float(value) else copy.wide(value)


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None, value.name
    return node


def run_wide(node: ir.Node, operands: Sequence[Array | None], probe: Probe) -> float | None:
    """Largest magnitude that a node with half operands computes in float32; ``None`` where no kernel does it.

    Args:
        node: of any graph; without bodies.
        operands: in port order, ``None`` for what is not connected.
        probe: for its opset and providers.
    """
    if node.op_type == "Cast":
        return max((float(np.abs(x).max()) for x in operands if x is not None and x.size), default=None)
    if any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values()):
        return None
    feeds = {
        f"x{i}": x.astype(np.float32) if x.dtype == np.float16 else x for i, x in enumerate(operands) if x is not None
    }
    failures: tuple[type[Exception], ...] = (ModelError, *refusals())
    try:
        session = open_session(_alone(node, feeds, probe), probe.providers)
        (found,) = session.run(None, feeds)
    except failures:
        return None
    found = found[found != -np.inf]  # masks aside
    return float(np.abs(found).max()) if found.size else None


def _alone(node: ir.Node, feeds: Mapping[str, Array], probe: Probe) -> ir.Model:
    """A model of one operator like ``node``, whose inputs ``x0``, ``x1``, ... have the types of ``feeds``."""
    inputs = {
        name: ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(x.dtype))) for name, x in feeds.items()
    }
    copy = ir.Node(
        node.domain, node.op_type, [inputs.get(f"x{port}") for port in range(len(node.inputs))],
        list(node.attributes.values()), num_outputs=len(node.outputs),
    )  # fmt: skip
    copy.outputs[0].name = "wide"
    graph = ir.Graph(
        list(inputs.values()), copy.outputs[:1], nodes=[copy], name="wide",
        opset_imports=probe.model.opset_imports,
    )  # fmt: skip
    return ir.Model(graph, ir_version=probe.model.ir_version or 8)


# ---------------------------------------------------------------------------------------------------- bodies


@dataclass(eq=False)
class Body:
    """The body of an If, Loop or Scan as a model of its own.

    Attributes:
        probe: of the body; its inputs are those of the body, then ``captured``.
        attribute: name of the attribute that holds it.
        formal: names of the body's own inputs.
        captured: names of the values that it reads from the graphs around it.
    """

    probe: Probe
    attribute: str
    formal: list[str]
    captured: list[str]

    @classmethod
    def of(cls, outer: Probe, node: ir.Node, attribute: str) -> Body:
        """The body of a node of ``outer``'s model."""
        graph = node.attributes[attribute].as_graph().clone(allow_outer_scope_values=True)
        formal = [str(v.name) for v in graph.inputs]
        captured = _close(graph)
        graph.opset_imports.update(outer.model.opset_imports)
        for value in _all_values(graph):
            value.shape = None
        model = ir.Model(graph, ir_version=outer.model.ir_version)
        return cls(Probe(model, outer.providers, outer.threads), attribute, formal, captured)


def _all_values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph.all_nodes():
        yield from node.outputs


def _close(graph: ir.Graph) -> list[str]:
    """Turn values that ``graph`` reads from outside into inputs; returns their names."""
    inside = {*_all_values(graph), *graph.initializers.values()}
    for nested in graph.subgraphs():
        inside.update(nested.inputs, nested.initializers.values())
    given: dict[ir.Value, ir.Value] = {}

    def inner(value: ir.Value) -> ir.Value:
        return given.setdefault(value, ir.Value(name=value.name, type=value.type))

    for node in list(graph.all_nodes()):
        for port, value in enumerate(node.inputs):
            if value is not None and value not in inside:
                node.replace_input_with(port, inner(value))
    for part in (graph, *graph.subgraphs()):
        for i, value in enumerate(part.outputs):
            if value not in inside:
                part.outputs[i] = inner(value)
    graph.inputs.extend(given.values())
    return [str(v.name) for v in given.values()]


@dataclass(eq=False)
class Frame:
    """One run of a graph: of the model on a batch, or of a body at one iteration.

    Attributes:
        probe: of the graph.
        feeds: what it was fed.
        owner, parent, index: of a body: the node that holds it, the run of the graph that holds the node, and the
            iteration (``None`` for an If).
        body: of a body.
        outputs: what came out, by name.
        suspects: values whose sum was not finite, those of bodies inside included.
    """

    probe: Probe
    feeds: Feeds
    parent: Frame | None = None
    owner: ir.Node | None = None
    index: int | None = None
    body: Body | None = None
    outputs: dict[str, Array] = field(init=False)
    suspects: list[str] = field(init=False)
    _made: dict[str, Flags] | None = None
    _given: dict[str, Flags] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self.outputs, self.suspects = self.probe.run(self.feeds)
        except BitwrightError:
            raise
        except refusals() as error:
            raise CalibrationError(
                "check_model",
                f"the model fails on a batch: {first_line(error)}",
                "run the model in ONNX Runtime on the same batch, and repair what it refuses first",
            ) from error

    @property
    def where(self) -> str:
        """``iteration 3 of loop (Loop)``, from the inside out; empty for the model itself."""
        parts, frame = [], self
        while frame.parent is not None and frame.owner is not None and frame.body is not None:
            inside = frame.body.attribute if frame.index is None else f"iteration {frame.index}"
            parts.append(f"{inside} of {frame.owner.name} ({frame.owner.op_type})")
            frame = frame.parent
        return ", in ".join(parts)

    @property
    def touched(self) -> bool:
        """Whether non-finite values enter this run or are suspected in it."""
        return bool(self.suspects) or any(self.flags(name).bad for name in self.feeds)

    def flags(self, name: str) -> Flags:
        """Non-finite kinds of a value of this graph."""
        given = self.feeds.get(name)
        if given is None and name in self.probe.sequences and name not in self._given:
            given = self.fetch([name])[name]
        if given is None and name in self.probe.constants:
            given = array_of(self.probe.constants[name])
        if given is not None and name not in self._given:
            self._given[name] = flags_of(given)
        if name in self._given:
            return self._given[name]
        if self._made is None:
            self._made = self.probe.flags(self._asked(), self.feeds)
        return self._made.get(name, CLEAN)

    def _asked(self) -> list[str]:
        """Values to check; in a body, which runs repeatedly, always the same ones."""
        own = [name for name in self.suspects if name in self.probe.maker]
        return own if self.parent is None or not own else self.probe.floats

    def fetch(self, names: Iterable[str]) -> dict[str, Array]:
        """Tensors by name."""
        return self.probe.fetch(names, self.feeds)

    def runs(self, node: ir.Node) -> Iterator[Frame]:
        """The runs of the body of ``node``, an If, Loop or Scan, one after the other."""
        attribute = BODY_ATTRIBUTES[node.op_type][0]
        if node.op_type == "If":
            (condition,) = self.fetch([_name(node.inputs[0])]).values()
            attribute = BODY_ATTRIBUTES["If"][0 if bool(condition.all()) else 1]
        body = self.probe.body(node, attribute)
        names = [None if v is None else _name(v) for v in node.inputs]
        values = self.fetch([*(name for name in names if name), *body.captured])
        given = [values[name] if name else None for name in names]
        around = {name: values[name] for name in body.captured}
        yield from _RUNS[node.op_type](self, node, body, given, around)


def _name(value: ir.Value | None) -> str:
    return "" if value is None or value.name is None else value.name


def _run(
    frame: Frame, node: ir.Node, body: Body, own: Sequence[Any], around: Feeds, index: int | None
) -> tuple[Frame, list[Array]]:
    feeds = {**around, **dict(zip(body.formal, own, strict=True))}
    child = Frame(body.probe, feeds, frame, node, index, body)
    return child, [child.outputs[name] for name in body.probe.outputs]


def _runs_if(frame: Frame, node: ir.Node, body: Body, given: Sequence[Any], around: Feeds) -> Iterator[Frame]:
    yield _run(frame, node, body, (), around, None)[0]


def _runs_loop(frame: Frame, node: ir.Node, body: Body, given: Sequence[Any], around: Feeds) -> Iterator[Frame]:
    times = None if given[0] is None else int(given[0].reshape(-1)[0])
    going = len(given) < 2 or given[1] is None or bool(given[1].all())
    states, index = list(given[2:]), 0
    while going and (times is None or index < times):
        own = [np.asarray(index, np.int64), np.asarray(going), *states]
        child, found = _run(frame, node, body, own, around, index)
        yield child
        going, states = bool(found[0].all()), found[1 : 1 + len(states)]
        index += 1


def _runs_scan(frame: Frame, node: ir.Node, body: Body, given: Sequence[Any], around: Feeds) -> Iterator[Frame]:
    count = scan_inputs(node)
    states, scanned = list(given[: len(given) - count]), given[len(given) - count :]
    axes = _integers(node, "scan_input_axes", count)
    backwards = _integers(node, "scan_input_directions", count)
    length = scanned[0].shape[axes[0]]
    for index in range(length):
        slices = [
            np.asarray(np.take(x, length - 1 - index if back else index, axis))
            for x, axis, back in zip(scanned, axes, backwards, strict=True)
        ]
        child, found = _run(frame, node, body, [*states, *slices], around, index)
        yield child
        states = found[: len(states)]


def scan_inputs(node: ir.Node) -> int:
    """Number of scanned inputs of a Scan."""
    return int(node.attributes["num_scan_inputs"].as_int())


def _integers(node: ir.Node, name: str, count: int) -> Sequence[int]:
    attribute = node.attributes.get(name)
    return [0] * count if attribute is None else list(attribute.as_ints())


_RUNS = {"If": _runs_if, "Loop": _runs_loop, "Scan": _runs_scan}


_NOTES = 16
# Operators that hand a constant on as it is, to what reads it.
_CARRIES = frozenset((*TRAITS["one_element"], "Flatten", "Transpose", "Expand", "Slice", "Concat"))


def check_health(model: Source, data: Any, providers: Providers | None, threads: int, progress: bool) -> HealthReport:
    """See :func:`bitwright.methods.stabilize.check_model`."""
    check_providers(providers)
    loaded = load_model(model)
    name = loaded.path.name if loaded.path is not None else loaded.model.graph.name or "model"
    doctor = Doctor(loaded.model, name, providers, threads)
    if not doctor.bad_params:
        doctor.run(_batches(data, doctor.specs), progress)
    return doctor.report()


def _batches(data: Iterable[Any] | None, specs: Sequence[InputSpec]) -> Iterable[Any]:
    if data is None:
        rng = np.random.default_rng(0)
        return [{spec.name: random_array(spec, rng) for spec in specs}]
    refuse_one_batch(data, "check_model", "check_model(model, [batch])")
    return data


@dataclass(eq=False)
class _Origin:
    """Position of an event of the tracker."""

    frame: Frame
    node: ir.Node | None
    name: str  # of the input or constant, where there is no node


@dataclass(eq=False)
class Doctor:
    """The health check of one model.

    Args:
        model: normalised by :func:`~bitwright.onnx.model.load.load_model`; not changed.
        name: for the report.
        providers, threads: of the sessions.
    """

    model: ir.Model
    name: str
    providers: Providers | None = None
    threads: int = 0
    batches: int = 0
    specs: tuple[InputSpec, ...] = field(init=False)
    bad_params: tuple[TensorHealth, ...] = field(init=False)
    _culprits: dict[tuple[str, str], Culprit] = field(default_factory=dict)
    _last: dict[tuple[str, str], int] = field(default_factory=dict)  # culprit -> the last batch that showed it
    _bad_inputs: list[TensorHealth] = field(default_factory=list)
    _harmless: dict[str, str] = field(default_factory=dict)  # operator -> the note about it
    _notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.specs = input_specs(self.model)
        self.probe = Probe(self.model, self.providers, self.threads)
        self.bad_params, self._constants = _bad_constants(self.model)
        for tensor in self.bad_params:
            self._accuse_param(tensor)

    def run(self, data: Iterable[Any], show: bool = False) -> None:
        """Check batches; Ctrl-C ends the run and keeps what was found."""
        try:
            for batch in shown(data, "checking", show):
                self.check(batch)
        except KeyboardInterrupt:
            self._notes.append(f"interrupted after {self.batches} batches")
            return
        if not self.batches:
            raise CalibrationError(
                "check_model", "the data held no batch", "pass a non-empty list (a generator can be used only once)"
            )

    def check(self, batch: Any) -> None:
        """Check one batch."""
        where = f"batch {self.batches}"
        feeds = as_feeds(batch, self.specs, where)
        refuse_empty(self.batches, {name: array.shape for name, array in feeds.items()})
        root = Frame(self.probe, feeds)
        bad = {name: array for name, array in root.feeds.items() if root.flags(name).bad}
        self._bad_inputs += [
            replace(measure_tensor(name, array, "input"), name=f"{name}, {where}") for name, array in bad.items()
        ]
        outputs = {name: flags_of(array) for name, array in root.outputs.items()}
        if bad or root.suspects or any(flags.bad for flags in outputs.values()):
            self._follow(root, outputs)
        self.batches += 1

    def report(self) -> HealthReport:
        """The findings."""
        reported = {culprit.op for culprit in self._culprits.values()}
        notes = [note for op, note in self._harmless.items() if op not in reported]
        calls = sum(1 for _ in self.model.graph.all_nodes()) * self.batches
        return HealthReport(
            self.name,
            tuple(self._culprits.values()),
            tuple(self._bad_inputs),
            self.bad_params,
            (*self._notes, *notes),
            self.batches,
            calls,
        )

    # -- one batch

    def _follow(self, root: Frame, outputs: Mapping[str, Flags]) -> None:
        tracker, origins = Tracker(), {}
        kinds: list[tuple[str, TensorKind]] = [(name, "input") for name in root.feeds]
        for name, kind in (*kinds, *self._constants.items()):
            event = tracker.source(name, name, kind, root.flags(name))
            if event is not None:
                origins[event.index] = _Origin(root, None, name)
        _Replay(tracker, origins).run(root)
        for name, flags in outputs.items():
            tracker.output(name, name, flags)
        for event in tracker.events:
            if event.reported:
                self._accuse(event, origins[event.index], root)
            elif len(self._harmless) < _NOTES:
                self._harmless.setdefault(event.op, _harmless(event, origins[event.index]))

    def _accuse(self, event: Event, origin: _Origin, root: Frame) -> None:
        key = (event.op, event.op_type)
        known = self._culprits.get(key)
        if known is not None:  # at a later batch, or at a later step of a loop
            more = self._last[key] != self.batches
            self._culprits[key], self._last[key] = replace(known, batches=known.batches + more), self.batches
            return
        record = self._of_input(event, origin) if origin.node is None else self._of_node(event, origin)
        sample = record.sample
        if record.op_type not in CELLS:  # their rows are time steps
            sample = _sample(record.outputs or record.inputs, origin.frame, root)
        self._culprits[key] = replace(
            record,
            batch=self.batches,
            sample=sample,
            spread=event.spread,
            spread_names=tuple(event.names),
            reached=tuple(event.reached),
        )
        self._last[key] = self.batches

    def _of_input(self, event: Event, origin: _Origin) -> Culprit:
        kind: TensorKind = "input" if event.op_type == "input" else "constant"
        array = origin.frame.fetch([origin.name])[origin.name]
        tensor = measure_tensor(origin.name, array, kind)
        cause = "bad input data" if kind == "input" else "NaN constant" if tensor.nan else "mask constant"
        problem = f"it holds {tensor.nan} NaN and {tensor.inf} Inf, the first at {list(tensor.first_bad or ())}"
        return Culprit(event.op, event.op_type, "", cause, problem, remedy(cause), inputs=(tensor,))

    def _of_node(self, event: Event, origin: _Origin) -> Culprit:
        frame, node = origin.frame, origin.node
        assert node is not None
        reads = [_readable_name(v) for v in node.inputs]
        writes = [v.name for v in node.outputs if v.name and is_tensor(v)]
        arrays = frame.fetch([*filter(None, reads), *writes])
        ports = [measure_tensor(n, arrays[n], self._kind(n)) if n else None for n in reads]
        written = [measure_tensor(name, arrays[name]) for name in writes]
        op_type, attrs = canonical_op(node, self.probe.opset)
        given = [arrays.get(name) for name in reads]
        halves = {t.dtype for t in written}.intersection(HALVES)
        needed = run_wide(node, given, self.probe) if halves else None
        finding = diagnose(op_type, attrs, ports, written, needed, "onnx")
        operands = list(filter(None, ports))
        has_steps = op_type in CELLS and all(t.finite for t in operands)
        inside = first_bad_step(op_type, attrs, given) if has_steps else None
        return Culprit(
            event.op,
            op_type,
            frame.where or event.op,
            finding.cause,
            finding.problem if inside is None else f"{finding.problem}; {inside}",
            finding.remedy,
            sample=None if inside is None else inside.sample,
            inputs=tuple(t for t in operands if t.kind != "param"),
            params=tuple(t for t in operands if t.kind == "param"),
            outputs=tuple(written),
        )

    def _kind(self, name: str) -> TensorKind:
        if name in self.probe.inputs:
            return "input"
        if name in self.probe.constants:
            return self._constants.get(name, "param")
        return "activation"

    def _accuse_param(self, tensor: TensorHealth) -> None:
        value = self.probe.constants[tensor.name]
        reader = next((node for node, _ in value.uses()), None)
        index = list(tensor.first_bad or ())
        problem = f"it holds {tensor.nan} NaN and {tensor.inf} Inf, the first at {index}"
        where = "" if reader is None else f"{reader.name} ({reader.op_type})"
        self._culprits[tensor.name, "param"] = Culprit(
            tensor.name, "param", where, "bad parameter", problem, remedy("bad parameter"), params=(tensor,)
        )


def _harmless(event: Event, origin: _Origin) -> str:
    where = f" in {origin.frame.where}" if origin.frame.where else ""
    left = "nothing of them is left at the end" if not event.reached else "they reach an output"
    if event.op_type in ("input", "param", "constant"):
        what = "a mask or a bound: its values are not finite" if event.meant else "not finite"
        return f"the {event.op_type} {event.op} is {what}; {left}"
    return f"{event.op} ({event.op_type}){where} makes values that are not finite; {left}"


def _sample(tensors: Sequence[TensorHealth], frame: Frame, root: Frame) -> int | None:
    """The first bad row of the batch, if the operator's rows are those of the batch."""
    rows = {array.shape[0] for array in root.feeds.values() if array.ndim}
    if len(rows) != 1:
        return None
    (count,) = rows
    for tensor in tensors if frame is root else ():
        if tensor.first_bad and tensor.shape[0] == count:
            return tensor.first_bad[0]
    for array in root.outputs.values():
        if array.ndim and array.shape[0] == count and (found := first_non_finite(array)) is not None:
            return found[0][0]
    return None


# --------------------------------------------------------------------------------------------------- the replay


class _Replay:
    """Passes the operands and results of nodes near non-finite values to a tracker, in execution order."""

    def __init__(self, tracker: Tracker, origins: dict[int, _Origin]) -> None:
        self.tracker, self.origins = tracker, origins

    def run(self, root: Frame) -> None:
        """Replay a run of the model; runs of bodies are put on a stack."""
        stack = [self._frame(root)]
        while stack:
            inner = next(stack[-1], None)
            if inner is None:
                stack.pop()
            else:
                stack.append(inner)

    def _frame(self, frame: Frame) -> Iterator[Any]:
        """Replay the nodes of one run; yields the runs of bodies that come first."""
        probe = frame.probe
        entered = {probe.owner[name] for name in frame.suspects if name in probe.owner}
        for node in probe.model.graph:
            touched = any(_flags(frame, v).bad for v in (*node.inputs, *node.outputs))
            if node in probe.bodies:
                if touched or node in entered:
                    yield self._body(frame, node)
            elif touched:
                self._call(frame, node)

    def _call(self, frame: Frame, node: ir.Node) -> None:
        op_type, _ = canonical_op(node, frame.probe.opset)
        event = self.tracker.call(
            str(node.name),
            op_type,
            [(str(v.name), _flags(frame, v)) for v in node.inputs if v is not None],
            [(str(v.name), _flags(frame, v)) for v in node.outputs if v.name],
        )
        if event is not None:
            self.origins[event.index] = _Origin(frame, node, "")

    def _body(self, frame: Frame, node: ir.Node) -> Iterator[Any]:
        """Replay all runs of the body of ``node``; tensors that enter and leave it get second names."""
        before, results = list(map(_name, node.inputs)), list(map(_name, node.outputs))
        states, leaving = _states(node)
        sources = [before[port] for port in states]
        for child in frame.runs(node):
            assert child.body is not None
            own, made = child.body.formal, child.body.probe.outputs
            for inner, source in zip(own[_FIRST_STATE[node.op_type] :], sources, strict=False):
                self.tracker.move(source, inner)
            for inner, port in _slices(node, own):
                self.tracker.move(before[port], inner)
            if child.touched:
                yield self._frame(child)
            sources = made[leaving : leaving + len(states)]
            self._gather(child, results[len(states) :], made[leaving + len(states) :])
        for name, source in zip(results, sources, strict=False):
            if name:
                self.tracker.move(source, name)

    def _gather(self, child: Frame, results: Sequence[str], made: Sequence[str]) -> None:
        """Append one run's part to the ``results`` that collect all runs."""
        for name, inner in zip(results, made, strict=True):
            if name and not self.tracker.knows(name) and flags_of(child.outputs[inner]).bad:
                self.tracker.move(inner, name)


_FIRST_STATE = {"If": 0, "Loop": 2, "Scan": 0}


def _states(node: ir.Node) -> tuple[range, int]:
    """Ports of the initial states, and how many outputs of the body come before the states."""
    if node.op_type == "If":
        return range(0), 0
    if node.op_type == "Loop":
        return range(2, len(node.inputs)), 1
    return range(len(node.inputs) - scan_inputs(node)), 0


def _slices(node: ir.Node, own: Sequence[str]) -> list[tuple[str, int]]:
    """``(input of the body, port of the Scan that it is a slice of)``."""
    if node.op_type != "Scan":
        return []
    first = len(node.inputs) - scan_inputs(node)
    return [(own[port], port) for port in range(first, len(node.inputs))]


def _readable_name(value: ir.Value | None) -> str:
    """Readable name of a tensor; empty for an unused port or a sequence."""
    tensor = value is not None and value.name and is_tensor(value)
    return str(value.name) if value is not None and tensor else ""


def _flags(frame: Frame, value: ir.Value | None) -> Flags:
    return CLEAN if value is None or not value.name else frame.flags(value.name)


# ---------------------------------------------------------------------------------------------------- constants


def _bad_constants(model: ir.Model) -> tuple[tuple[TensorHealth, ...], dict[str, TensorKind]]:
    """Non-finite parameters; and non-finite constants by name: masks, bounds, fill values."""
    bad: list[TensorHealth] = []
    meant: dict[str, TensorKind] = {}
    for value in model.graph.initializers.values():
        if value.dtype is None or not value.dtype.is_floating_point() or value.const_value is None:
            continue
        array = array_of(value)
        if first_non_finite(array) is None:
            continue
        name = str(value.name)
        if _is_weight(value) or (np.isnan(array).any() and array.size > 1):
            bad.append(measure_tensor(name, array, "param"))
        else:
            meant[name] = "constant"
    return tuple(bad), meant


def _is_weight(value: ir.Value) -> bool:
    """Whether an operator reads ``value`` as a parameter, perhaps after changes of shape and type."""
    waiting, seen = [value], {value}
    while waiting:
        for node, port in waiting.pop().uses():
            if node.op_type in _CARRIES:
                fresh = [v for v in node.outputs if v not in seen]
                seen.update(fresh)
                waiting.extend(fresh)
            elif _reads_weight(node, port):
                return True
    return False


def _reads_weight(node: ir.Node, port: int) -> bool:
    row = op_row(node.op_type)
    return row is not None and (port in row.params or port == row.weight)
