"""An ONNX simulation as a :class:`bitwright.algorithms.rounding.program.SimulatedModel`: its nodes as steps on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.algorithms.rounding.program import Program, Quantize, State, Step, run
from bitwright.core.graph.graph import Graph
from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.simulation.protocols import sqnr
from bitwright.core.simulation.sites import Site
from bitwright.core.sums.int32_bias import fake_quantize_bias
from bitwright.errors import ModelError
from bitwright.export.files.value_types import is_tensor
from bitwright.export.qdq.markers import Names, is_site, remove_unread, site_of
from bitwright.onnx.adapters.recurrent import RecurrentLayer
from bitwright.onnx.adapters.to_torch import as_torch
from bitwright.onnx.model.data import as_feeds
from bitwright.onnx.model.graph import UNKNOWN
from bitwright.onnx.model.session import open_session
from bitwright.onnx.model.view import measure_shapes
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.onnx.simulation.simulate import simulation_model

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
        self._program: Program | None = None
        self._inputs: dict[str, int] = {}
        self._source_of: dict[str, int] = {}  # site of a constant -> the value in the program
        self._names: Names | None = None
        self._markers = {site_of(node): node for node in sim.marked.graph if is_site(node)}
        self._first: Mapping[str, NDArray[Any]] | None = None  # batch
        self._observed: Graph | None = None
        for site in sim.quantizers.values():
            if site.name in sim.constants and site.enabled and not site.quantizer.derived:
                site.quantizer.observe_once(sim.constants[site.name])

    def graph(self) -> Graph:
        """The graph of the simulation."""
        return self.sim.graph

    def observed_graph(self) -> Graph:
        """The graph with the lengths of the first batch, or before there was one of the example input, where they are open."""
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
        """What the plan says of values that are only moved."""
        return self.sim.plan.shared

    def weight(self, site: str) -> Tensor:
        """A copy of the initializer at a weight site."""
        return to_tensor(self.sim.constants[site]).clone()

    def why_fixed(self, site: str) -> str | None:
        """Weights of the main graph can be written, also those that nodes compute from initializers."""
        known = site in self.sim.constants and site in self._markers
        return None if known else "its weight is computed from the input, or belongs to a body of If, Loop or Scan"

    def set_weight(self, site: str, value: Tensor) -> None:
        """Replace an initializer of the simulation's model."""
        param = self.sim.graph.values[self.sim.plan.sites[site].value].param
        array = value.detach().cpu().numpy()
        if param is not None:
            self.sim.set_parameter(param, array)
        else:
            self._set_computed(site, array)
        if self._program is not None and site in self._source_of:
            constant = self._program.constants[self._source_of[site]]
            constant.copy_(value.to(constant.dtype))

    def _set_computed(self, site: str, array: NDArray[Any]) -> None:
        """Let the operator read an initializer of its own in the place of what nodes computed from others."""
        marker = self._markers[site]
        source, before = marker.inputs[0], self.sim.constants[site]
        assert source is not None
        if self._names is None:
            self._names = Names(self.sim.marked)
        name = self._names.value(f"{source.name}_chosen")
        tensor = ir.Tensor(np.ascontiguousarray(array).astype(before.dtype), name=name)
        new = ir.Value(name=name, shape=source.shape, type=source.type, const_value=tensor)
        self.sim.marked.graph.register_initializer(new)
        marker.replace_input_with(0, new)
        remove_unread(source)
        self.sim.constants[site] = tensor.numpy()
        self.sim.forget_simulations()

    def quantize(self, site: str, x: Tensor) -> Tensor:
        """``x`` as the quantizer of ``site`` leaves it."""
        quantizer = self.sim.quantizers[site].quantizer
        encoding = quantizer.encoding
        if not quantizer.enabled or encoding is None or not x.is_floating_point():
            return x
        if quantizer.role == "bias" and encoding.format == IntFormat(32):
            return to_tensor(fake_quantize_bias(x.detach().cpu().numpy(), encoding)).to(x)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return torch.as_tensor(fake_quantize(x, encoding))
        shape = encoding.granularity.broadcast_shape(tuple(x.shape))
        lo, hi = (
            torch.from_numpy(np.asarray(v, np.float32).reshape(shape)).to(x) for v in (encoding.min, encoding.max)
        )
        return _StraightThrough.apply(x, lambda t: torch.as_tensor(fake_quantize(t, encoding)), lo, hi)

    def program(self, batch: Any) -> tuple[Program, State]:
        """The steps of the model, the same for every batch, and the batch's own inputs.

        Raises:
            ModelError: the batch does not fit, or the steps do not compute what ONNX Runtime computes.
        """
        feeds = as_feeds(batch, self.sim.specs)
        first = self._program is None
        if self._program is None:
            self._program = self._build()
        state = {self._inputs[name]: to_tensor(array) for name, array in feeds.items() if name in self._inputs}
        if first:
            self._first = feeds
            self._check(self._program, state, feeds)
        return self._program, state

    # -- building

    def _build(self) -> Program:
        steps = _Steps(self.sim)
        program = steps.program()
        self._inputs = {str(v.name): steps.ids(v) for v in self.sim.marked.graph.inputs}
        self._source_of.update(steps.source_of)
        return program

    def _check(self, program: Program, inputs: State, feeds: Mapping[str, NDArray[Any]]) -> None:
        whole = Program((*program.steps, Step("", program.outputs, (), lambda tensors: ())), program.constants, ())
        state = dict(inputs)
        run(whole, state, 0, len(program.steps))
        session = open_session(simulation_model(self.sim.marked, {}).model, self.sim.providers)
        outputs = zip(self.sim.marked.graph.outputs, self.sim.output_names, strict=True)
        names = [name for value, name in outputs if is_tensor(value)]
        # tensors come first among the outputs of the program; what sequences and maps are made of follows
        for value, name, expected in zip(
            program.outputs, names, session.run(names, dict(feeds)) if names else (), strict=False
        ):
            found = state.get(value, program.constants.get(value))
            if found is None or expected.dtype.kind != "f":
                continue
            finite = np.isfinite(expected)
            agreement = sqnr(expected[finite], found.numpy()[finite])
            if agreement < _CLOSE_ENOUGH.get(expected.dtype.name, 50.0):
                raise ModelError(
                    name,
                    f"its operators, run one by one, agree with ONNX Runtime to {agreement:.0f} dB only",
                    "report the model; its other methods (calibration, export) do not depend on this",
                )


class _Steps:
    """The nodes of a marked model as steps, in their order; what constants alone make is computed here.

    Attributes:
        ids: the numbers of values.
        source_of: site of a constant -> the number of that.
    """

    def __init__(self, sim: QuantizationSimModel) -> None:
        self._sim, self._graph, self.ids = sim, sim.marked.graph, _Ids()
        self.source_of: dict[str, int] = {}
        self._constants = {
            self.ids(value): to_tensor(value.const_value.numpy()).clone()
            for value in self._graph.initializers.values()
            if value.const_value is not None and not value.is_graph_input()
        }
        self._ops = {op.name for op in sim.graph.ops}
        self._fixed = _constants_of(sim.marked)
        self._steps: list[Step] = []
        self._made: dict[int, tuple[int, int]] = {}  # value -> step and index that made it
        self._pending: dict[ir.Value, str] = {}  # marked operand -> its site
        self._results: dict[int, list[tuple[int, str]]] = {}  # step -> index and site of what it makes

    def program(self) -> Program:
        for value in self._graph.inputs:
            self.ids(value)
        for node in self._graph:
            if is_site(node):
                self._note_site(node)
                continue
            step = self._step(node)
            if not self._is_known(step, node):
                self._made.update((v, (len(self._steps), i)) for i, v in enumerate(step.writes))
                self._steps.append(step)
        steps = [replace_results(step, self._results.get(i, ())) for i, step in enumerate(self._steps)]
        return Program(tuple(steps), self._constants, tuple(self.ids(v) for v in _returned(self._graph)))

    def _note_site(self, marker: ir.Node) -> None:
        source, site = marker.inputs[0], site_of(marker)
        assert source is not None
        number = self.ids(source)
        if self._sim.plan.sites[site].role != "output":
            self._pending[marker.outputs[0]] = site
            if number in self._constants:
                self.source_of[site] = number
        elif number in self._made:
            at, index = self._made[number]
            self._results.setdefault(at, []).append((index, site))
        self.ids.alias(marker.outputs[0], source)

    def _is_known(self, step: Step, node: ir.Node) -> bool:
        """Whether a step makes tensors of constants alone, which are constants then."""
        if step.operands or node_has_graphs(node) or any(v not in self._constants for v in step.reads):
            return False
        values = step.function([self._constants[v] for v in step.reads])
        if not all(isinstance(value, Tensor) for value in values):  # an empty sequence is none
            return False
        self._constants.update(zip(step.writes, values, strict=True))
        return True

    def _step(self, node: ir.Node) -> Step:
        outputs = [v for v in node.outputs if v.name]
        name = str(node.name) if str(node.name) in self._ops else ""
        attrs: dict[str, Any] = {a.name: a.value for a in node.attributes.values()}
        attrs |= {"opset": self._graph.opset_imports.get("", 1), "outputs": len(node.outputs)}
        function = None if node.domain else as_torch(node.op_type, attrs, len(outputs))
        if function is None:
            opaque = _Opaque(self._sim, node, self._fixed)
            ports = {port: opaque.inputs.index(v) for port, v in enumerate(node.inputs) if v in opaque.inputs}
            layer = RecurrentLayer.of(node)
            traced = None if layer is None else self._through(name, node, layer.real, layer.inside)
            return Step(
                name, self._numbers(opaque.inputs), self._numbers(outputs), opaque.real, ports,
                self._operands(opaque.inputs), (), False, opaque.quantized, traced,
            )  # fmt: skip
        there = [port for port, v in enumerate(node.inputs) if v is not None]
        return self._through(name, node, _Ports(function, there, len(node.inputs)))

    def _through(self, name: str, node: ir.Node, function: Any, inside: Any = None) -> Step:
        """A step through which gradients flow, also to constants."""
        given = {port: v for port, v in enumerate(node.inputs) if v is not None}
        values = list(given.values())
        return Step(
            name, self._numbers(values), self._numbers([v for v in node.outputs if v.name]), function,
            {port: slot for slot, port in enumerate(given)}, self._operands(values), inside=inside,
        )  # fmt: skip

    def _numbers(self, values: Sequence[ir.Value]) -> tuple[int, ...]:
        return tuple(map(self.ids, values))

    def _operands(self, values: Sequence[ir.Value]) -> tuple[tuple[int, str], ...]:
        return tuple((slot, self._pending[v]) for slot, v in enumerate(values) if v in self._pending)


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
    """What a sequence or a map is made of."""
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

    def __call__(self, value: ir.Value) -> int:
        return self._ids.setdefault(value, len(self._ids))

    def alias(self, value: ir.Value, source: ir.Value) -> None:
        """Let ``value`` be the same as ``source``."""
        self._ids[value] = self(source)


class _Ports:
    """A row of the table as a function of the inputs that are there."""

    def __init__(self, function: Callable[[Sequence[Any]], Sequence[Tensor]], ports: Sequence[int], size: int) -> None:
        self._function, self._ports, self._size = function, tuple(ports), size

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        given: list[Tensor | None] = [None] * self._size
        for port, tensor in zip(self._ports, tensors, strict=True):
            given[port] = tensor
        return self._function(given)


class _Opaque:
    """A node that ONNX Runtime runs: control flow, recurrent layers, operators without a row in torch."""

    def __init__(self, sim: QuantizationSimModel, node: ir.Node, fixed: Container[ir.Value]) -> None:
        self._sim, self._node = sim, node
        read = [v for v in (*node.inputs, *_captured(node)) if v is not None and v not in fixed]
        self.inputs = list(dict.fromkeys(read))
        self._sites = [name for name, site in sim.quantizers.items() if site.op == str(node.name)]
        self._sessions: dict[str, tuple[list[Any], Any]] = {}

    def real(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """In float."""
        return self._run("real", tensors)

    def quantized(self, tensors: Sequence[Tensor], quantize: Quantize) -> Sequence[Tensor]:
        """With the quantizers of the simulation inside it."""
        return self._run("quantized", tensors)

    def _run(self, kind: str, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        state = [] if kind == "real" else self._state()
        built = self._sessions.get(kind)
        if built is None or any(one is not other for one, other in zip(built[0], state, strict=True)):
            sim = self._sim
            outputs = [v for v in self._node.outputs if v.name]
            part = ir.convenience.extract(sim.marked.graph, self.inputs, outputs)
            part.opset_imports.update(sim.marked.graph.opset_imports)
            piece = ir.Model(part, ir_version=sim.marked.ir_version)
            encodings = {} if kind == "real" else _encodings(sim)
            session = open_session(simulation_model(piece, encodings, _biases(sim)).model, sim.providers)
            built = self._sessions[kind] = (state, session)
        session = built[1]
        feeds = {i.name: _to_runtime(t) for i, t in zip(session.get_inputs(), tensors, strict=True)}
        return [_from_runtime(found) for found in session.run(None, feeds)]

    def _state(self) -> list[Any]:
        """Weights and encodings that a session with quantizers is built with; others stand there after a choice."""
        sim = self._sim
        sites = [sim.quantizers[name] for name in self._sites]
        encodings = [site.encoding if site.enabled else None for site in sites]
        return [*encodings, *(sim.constants.get(name) for name in self._sites)]


def _to_runtime(held: Any) -> Any:
    """A value of a step as ONNX Runtime takes it; a sequence is a tuple of tensors, as only such nodes read it."""
    if isinstance(held, tuple):
        return [tensor.detach().cpu().numpy() for tensor in held]
    return held.detach().cpu().numpy() if isinstance(held, Tensor) else held


def _from_runtime(found: Any) -> Any:
    """What ONNX Runtime returned as the value of a step; what is neither tensor nor a sequence of some stays as it is."""
    if isinstance(found, list) and all(isinstance(part, np.ndarray) for part in found):
        return tuple(to_tensor(array) for array in found)
    return to_tensor(found) if isinstance(found, np.ndarray) else found


def _encodings(sim: QuantizationSimModel) -> dict[str, Any]:
    return {s.name: s.encoding for s in sim.quantizers.values() if s.enabled and s.encoding is not None}


def _biases(sim: QuantizationSimModel) -> set[str]:
    return {s.name for s in sim.quantizers.values() if s.quantizer.derived}


def _constants_of(model: ir.Model) -> set[ir.Value]:
    """Initializers, and what markers and other nodes make of constants alone."""
    known = {v for v in model.graph.initializers.values() if v.const_value is not None and not v.is_graph_input()}
    for node in model.graph:
        if node.inputs and all(v is None or v in known for v in node.inputs) and not node_has_graphs(node):
            known.update(node.outputs)
    return known


def node_has_graphs(node: ir.Node) -> bool:
    """Whether a node has bodies."""
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attribute.type in graphs for attribute in node.attributes.values())


def _captured(node: ir.Node) -> list[ir.Value]:
    """Values from outside that the bodies of a node read."""
    bodies = [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
    found = []
    for body in bodies:
        for inner in body.all_nodes():
            found += [v for v in inner.inputs if v is not None and v.graph is node.graph]
        found += [v for v in body.outputs if v.graph is node.graph]
    return found


def replace_results(step: Step, results: Sequence[tuple[int, str]]) -> Step:
    """``step`` with quantizers after it."""
    if not results:
        return step
    traced = step.traced and replace_results(step.traced, results)
    return replace(step, results=tuple(results), traced=traced)


def to_tensor(array: NDArray[Any]) -> Tensor:
    """A numpy array as a tensor that owns its numbers."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
