"""Which values of a model are not finite, batch by batch, for :mod:`bitwright.onnx.health.check`.

A probe is a copy of the model, run as it is written: graph optimisation is off, so that no fused operator hides the
one that failed. Nothing but scalars leaves the runtime until someone asks for a tensor:

1. beside every float value stands its sum. ReduceSum carries NaN and Inf through, which ReduceMin and ReduceMax do
   not; a sum may overflow over finite values, so what it reports is a suspicion.
2. Of suspected values the sum of magnitudes, the maximum and the minimum are taken in a second run of the batch: the
   first shows every NaN, and where there is none the others show every infinity.
3. Tensors are fetched by name, the few that a diagnosis is about.

Half precision: ONNX Runtime computes chains of half operators on a CPU in float32 and drops the roundings between
them, so that an overflow would not be seen. An Identity after every half value keeps the rounding where it is.

Bodies of If, Loop and Scan are run step by step as models of their own (:class:`Frame`), with the tensors that they
read from around them as inputs; what a value of a body is at iteration 7 can then be asked like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.health.report import CLEAN, Flags
from bitwright.errors import BitwrightError, CalibrationError, ModelError
from bitwright.export.qdq.forms import Builder, after
from bitwright.export.verify.runtime import refusals
from bitwright.onnx.model.data import Feeds
from bitwright.onnx.model.instrument import Instrument
from bitwright.onnx.model.load import clone_model
from bitwright.onnx.model.session import Providers, first_line, open_session
from bitwright.progress import collector_paused
from bitwright.runtimes.outputs import arrays_of

Array = NDArray[Any]

_WIDE = frozenset((ir.DataType.FLOAT, ir.DataType.DOUBLE))
_FLOATS = frozenset(dtype for dtype in ir.DataType if dtype.is_floating_point())
_NARROW = _FLOATS - _WIDE
# what ONNX Runtime calls the types it infers itself
_RUNTIME_TYPES = {
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(double)": ir.DataType.DOUBLE,
    "tensor(float16)": ir.DataType.FLOAT16,
    "tensor(bfloat16)": ir.DataType.BFLOAT16,
}
_STANDARD = ("", "ai.onnx")
BODY_ATTRIBUTES = {"If": ("then_branch", "else_branch"), "Loop": ("body",), "Scan": ("body",)}


def flags_of(x: Any) -> Flags:
    """Which non-finite values an array, or a sequence or map with some, holds; of anything but floats it is none."""
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
    """The nodes of a graph and of the bodies in it that can be run step by step."""
    found: list[ir.Node] = []
    waiting = [graph]
    while waiting:
        nodes = list(waiting.pop())
        found += nodes
        waiting += [body for node in nodes if is_body_op(node, opset) for body in _bodies(node)]
    return found


def _made(nodes: Iterable[ir.Node]) -> Iterator[tuple[ir.Node, ir.Value]]:
    """What ``nodes`` make, each with its node."""
    for node in nodes:
        yield from ((node, value) for value in node.outputs if value.name)


def _is_float(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType) and value.dtype in _FLOATS


class Probe:
    """A model and the sessions that look into it.

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
        self._types: dict[str, ir.DataType] | None = None
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
        """What values of this graph that nodes make hold; infinities beside a NaN are not told."""
        key = tuple(names)
        if not names:
            return {}
        if key not in self._judging:
            self._judging = {key: self._judge(names)}
        session, outputs = self._judging[key]
        found = iter(session.run(outputs, self._fed(feeds)))
        return {name: _judge(*bounds) for name, *bounds in zip(names, found, found, found, strict=True)}

    def fetch(self, names: Iterable[str], feeds: Feeds) -> dict[str, Array]:
        """Inputs, constants and what nodes of this graph make, by name; types that numpy has not come as float32."""
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

    def _copy(self) -> _Copy:
        if self._types is None:
            self._types = self._ask_types()
        return _Copy(self.model, self._types)

    def _ask_types(self) -> dict[str, ir.DataType]:
        """Types of what shape inference did not know; the runtime does its own."""
        unknown = [v for node in self.model.graph for v in node.outputs if v.name and v.dtype is None]
        if not any(v.type is None for v in unknown):
            return {}
        names = [str(v.name) for v in unknown if v.type is None]
        copy = _Copy(self.model, {})
        session = self._open(copy, [copy.value(name) for name in names])
        types = {out.name: _RUNTIME_TYPES.get(out.type) for out in session.get_outputs()}
        return {name: found for name in names if (found := types.get(name)) is not None}

    @collector_paused()
    def _watch(self) -> tuple[Any, dict[str, str]]:
        copy = self._copy()
        sums = {str(value.name): copy.sum(value) for value in copy.floats}
        return self._open(copy, list(sums.values())), {name: str(v.name) for name, v in sums.items()}

    @collector_paused()
    def _judge(self, names: Sequence[str]) -> tuple[Any, list[str]]:
        copy = self._copy()
        scalars = [scalar for name in names for scalar in _bounds(copy, name)]
        return self._open(copy, scalars), [str(v.name) for v in scalars]

    @collector_paused()
    def _hand_out(self, names: Sequence[str]) -> tuple[Any, list[str]]:
        copy = self._copy()
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

    def __init__(self, model: ir.Model, types: dict[str, ir.DataType]) -> None:
        self.instrument = Instrument(clone_model(model))
        self.builder: Builder = self.instrument.builder
        self._values: dict[str, ir.Value] = {}
        self.floats: list[ir.Value] = []
        main = self.instrument.model.graph
        for node, value in _made(_nodes(main, opset_of(model))):
            name = str(value.name)
            if value.type is None and name in types:
                value.type = ir.TensorType(types[name])
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
        """``value`` in a type that everything is implemented for; after the Identity of a half."""
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
    """A sum of magnitudes is NaN if an element is; without one, the maximum and the minimum are exact."""
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
    """Make inputs of what ``graph`` reads from outside; their names."""
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
        """Whether anything that is not finite enters this run or is suspected in it."""
        return bool(self.suspects) or any(self.flags(name).bad for name in self.feeds)

    def flags(self, name: str) -> Flags:
        """What a value of this graph holds."""
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
        """What to judge: a body is run again and again, always with the same question."""
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
    """How many of the inputs of a Scan are taken apart."""
    return int(node.attributes["num_scan_inputs"].as_int())


def _integers(node: ir.Node, name: str, count: int) -> Sequence[int]:
    attribute = node.attributes.get(name)
    return [0] * count if attribute is None else list(attribute.as_ints())


_RUNS = {"If": _runs_if, "Loop": _runs_loop, "Scan": _runs_scan}
