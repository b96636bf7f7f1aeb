"""Verification inside If, Loop and Scan: the iterations that ran are unrolled into the main graph, recurrent steps side by side.

:mod:`bitwright.compare.cut` takes a main graph apart at its quantizers. So an If is replaced by the branch that the
simulation took, a Loop or Scan by one copy of its body per iteration of the simulation; each quantizer in a copy is a run of
its site. Which branch and how many iterations follow from the simulation's values alone: a site in a branch that was not
taken has an empty one, and those in a loop have all iterations along a first axis. What does not depend on the iteration
(stored weights above all) is there once.

In the file a body ends what a runtime optimises: two quantizers, or a quantizer and its kernel, stay apart when one is
inside and the other one is not. A Max of one tensor, which no optimiser removes, keeps them apart here. Float weights and
biases that a body reads from outside, and what a state begins with, are not constants to it: here they become inputs that are
fed, or ONNX Runtime would quantize them by itself, as it does in a main graph.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.cut import BORDER, graphs_in
from bitwright.compare.runtime import run_model
from bitwright.core.graph.operators import TRAITS
from bitwright.export.files.onnx_file import array_of, is_tensor
from bitwright.export.qdq.forms import METADATA, Builder, before, damaged_metadata, read_metadata
from bitwright.export.qdq.markers import STATES, copy_model, move_uses
from bitwright.export.qdq.trace import RANDOM
from bitwright.runtimes.onnxruntime import refusals

Array = NDArray[Any]
Values = Mapping[str, Array | Sequence[Array]]
Run = tuple[str, int]  # a site, and which of its runs


def runs_of(given: Array | Sequence[Array] | None) -> Sequence[Array]:
    """Values of a site in each of its runs."""
    return [given] if isinstance(given, np.ndarray) else list(given or ())


NOT_TAKEN = "its branch was not taken"
NO_ITERATION = "its loop had no iteration"
_FLOATS = frozenset((ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16))  # that Max takes
_MOST_NODES = 50_000  # copies of one loop's nodes; what would be longer stays a loop


@dataclass
class Opened:
    """A model whose bodies were inlined where the simulation gave values for them.

    Attributes:
        model: the model, a copy where something changed.
        values: the simulation's values, one array per run of a site, in the shapes that this model has.
        idle: site that did not run -> why.
        feeds: graph inputs that were added -> what to feed them.
        settled: graph outputs that are states of recurrent layers, which are compared where a step makes them.
    """

    model: ir.Model
    values: dict[str, Array | Sequence[Array]]
    idle: dict[str, str] = field(default_factory=dict)
    feeds: dict[str, Array] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)

    def feed(self, builder: Builder, base: str, array: Array, dtype: ir.DataType) -> ir.Value:
        """A new graph input that is fed ``array``."""
        name = builder.names.value(base)
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(array.shape))
        builder.graph.inputs.append(value)
        self.feeds[name] = np.asarray(array, dtype.numpy(), order="C")
        return value


def open_bodies(model: ir.Model, values: Values) -> Opened:
    """Inline the executed branches and iterations of every If, Loop and Scan into the main graph.

    A body without sites stays as it is, and so does one whose values do not tell what ran, a loop of more than 50,000
    copied nodes, one over optional values, and a Scan that is a recurrent layer (:func:`side_by_side`).

    Args:
        model: as ``to_qdq`` wrote it; left as it is.
        values: site -> the simulation's values, one array per place in the file; inside loops with an axis of iterations
            in front for each loop, in the order in which they read their data.
    """
    found = Opened(model, dict(values))
    if not any(_has_body(node) for node in model.graph):
        return found
    found.model = copy_model(model)
    opener = _Opener(found, Builder(found.model))
    opener.hoist()
    waiting = [node for node in found.model.graph if _has_body(node)]
    while waiting:
        node = waiting.pop()
        waiting += [inner for inner in opener.open(node) if _has_body(inner)]
    return found


def _has_body(node: ir.Node) -> bool:
    return not node.domain and node.op_type in ("If", "Loop", "Scan") and STATES not in node.metadata_props


@dataclass(frozen=True)
class _Copy:
    """An inlined copy of a body: the values that replace its inputs, its nodes, and its outputs."""

    inputs: dict[ir.Value, ir.Value]
    nodes: list[ir.Node]
    outputs: list[ir.Value]


@dataclass(frozen=True)
class _Opener:
    found: Opened
    builder: Builder

    def hoist(self) -> None:
        """Move the constants of all bodies into the main graph; what a body hands out is its input or made by its nodes."""
        bodies = [graph for graph in self.found.model.graphs() if graph is not self.builder.graph]
        for graph in bodies:
            for i, value in enumerate(list(graph.outputs)):
                if value.is_initializer() or value.graph is not graph:
                    graph.outputs[i] = self._handed_on(graph, value)
            for value in list(graph.initializers.values()):
                tensor = value.const_value
                assert tensor is not None
                own = copy(tensor)  # the other is the caller's, name and all; the elements are shared
                moved = self.builder.initializer_of(str(value.name), own)  # type: ignore[arg-type]
                move_uses(value, moved)
                graph.initializers.pop(str(value.name))

    def _handed_on(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        made = self.builder.emit(
            graph.append, "Identity", [value], f"{value.name}_out", value.dtype or ir.DataType.FLOAT
        )
        made.type = value.type or made.type
        return made

    def open(self, node: ir.Node) -> list[ir.Node]:
        """Replace ``node`` by what ran of it, if that is known; the nodes that are in the main graph now."""
        return self._branch(node) if node.op_type == "If" else self._loop(node)

    def _given(self, site: str, run: int) -> Array | None:
        several = runs_of(self.found.values.get(site))
        return np.asarray(several[run]) if run < len(several) else None

    # -- branches

    def _branch(self, node: ir.Node) -> list[ir.Node]:
        graphs = _branches(node)
        taken = _taken({key: self._ran(graph) for key, graph in graphs.items()})
        if taken is None:
            return []
        for key, graph in graphs.items():
            if key != taken:
                self.found.idle.update(dict.fromkeys((site for site, _ in places_in(graph)), NOT_TAKEN))
        self._fence(graphs[taken], node)
        part = self._copy(graphs[taken], node, {}, {})
        self._replace(node, part.outputs)
        return part.nodes

    def _ran(self, graph: ir.Graph) -> bool | None:
        """Whether a branch was taken; ``None`` where it has no site. A loop without iterations keeps its axes."""
        given = [array for place in places_in(graph) if (array := self._given(*place)) is not None]
        return any(array.shape != (0,) for array in given) if given else None

    # -- loops

    def _loop(self, node: ir.Node) -> list[ir.Node]:
        body = node.attributes["body"].as_graph()
        given = {place: array for place in places_in(body) if (array := self._given(*place)) is not None}
        lengths = {len(array) for array in given.values() if array.ndim}
        kinds = (v.type for v in (*node.outputs, *body.outputs))
        if len(lengths) != 1 or any(isinstance(t, ir.OptionalType) for t in kinds):
            return []
        (count,) = lengths
        if count == 0:
            self.found.idle.update(dict.fromkeys((site for site, _ in given), NO_ITERATION))
            return []
        if count * sum(1 for _ in body.all_nodes()) > _MOST_NODES:
            return []
        self._fence(body, node)
        shape = _loop_shape(node, body) if node.op_type == "Loop" else _scan_shape(node, body)
        copies = self._unroll(node, body, shape, given, count)
        self._replace(node, self._results(node, shape, copies))
        return [inner for part in copies for inner in part.nodes]

    def _unroll(
        self, node: ir.Node, body: ir.Graph, shape: _Shape, given: Mapping[Run, Array], count: int
    ) -> list[_Copy]:
        states = [self._entering(node, value) for value in shape.states]
        going = self.builder.initializer("going", np.array(True))
        copies: list[_Copy] = []
        skipped = _in_branches(body)
        places = range(count)[::-1] if shape.backwards else range(count)
        for i, at in enumerate(places):
            number = self.builder.initializer("iteration", np.array(i))
            counters = [number, going] if node.op_type == "Loop" else []
            slices = [self._slice(node, s, i, count) for s in shape.scanned]
            inputs = dict(zip(body.inputs, [*counters, *states, *slices], strict=True))
            part = self._copy(body, node, inputs, self._shares(given, at, skipped, first=not copies))
            copies.append(_share_constant(copies[0], part) if copies else part)
            first = int(node.op_type == "Loop")  # a Loop's own condition comes before its states
            made = copies[-1].outputs[first : first + len(states)]
            states = [v if v is old else self._border(node, v) for v, old in zip(made, states, strict=True)]
        return copies

    def _shares(self, given: Mapping[Run, Array], at: int, skipped: Set[Run], *, first: bool) -> dict[Run, int]:
        """The run that each site has in one iteration; the values of that run are those of iteration ``at``.

        Sites of ``skipped`` stand in branches: where they are NaN throughout, the iteration did not take theirs.
        """
        runs = {}
        for (site, run), array in given.items():
            kept, entry = [*runs_of(self.found.values[site])], array[at]
            if (site, run) in skipped and entry.dtype.kind == "f" and np.isnan(entry).all():
                entry = np.zeros(0, entry.dtype)
            if first:
                kept[run] = entry
            else:
                kept.append(entry)
            self.found.values[site] = kept
            runs[site, run] = run if first else len(kept) - 1
        return runs

    def _slice(self, node: ir.Node, scanned: _Scanned, i: int, count: int) -> ir.Value:
        at = self.builder.initializer("slice", np.array(count - 1 - i if scanned.backwards else i))
        name = f"{scanned.value.name}_{i}"
        return self._border(node, self._emit(node, "Gather", [scanned.value, at], name, axis=scanned.axis))

    def _results(self, node: ir.Node, shape: _Shape, copies: Sequence[_Copy]) -> list[ir.Value]:
        """Outputs of the loop: its states after the last iteration, and the stacked results of all iterations."""
        first = 1 if node.op_type == "Loop" else 0
        end = first + len(shape.states)
        results = copies[-1].outputs[first:end]
        for i, (axis, backwards) in enumerate(shape.stacked):
            axes = self.builder.initializer("stack_axis", np.array([axis]))
            parts = [self._emit(node, "Unsqueeze", [part.outputs[end + i], axes], "part") for part in copies]
            parts = parts[::-1] if backwards else parts
            results.append(self._emit(node, "Concat", parts, "stacked", axis=axis))
        return results

    def _emit(self, node: ir.Node, op: str, inputs: Sequence[ir.Value], name: str, **attributes: int) -> ir.Value:
        dtype = inputs[0].dtype or ir.DataType.FLOAT
        made = self.builder.emit(before(node), op, inputs, name, dtype, **attributes)
        maker = made.producer()
        assert maker is not None
        maker.metadata_props[BORDER] = ""
        made.shape = made.shape if len(inputs) == 1 and not attributes else None
        return made

    def _border(self, node: ir.Node, value: ir.Value) -> ir.Value:
        """``value`` behind a Max of one tensor, which no optimiser removes."""
        tensor = is_tensor(value)
        op = "Max" if tensor and value.dtype in _FLOATS else "Identity"
        made = self._emit(node, op, [value], f"{value.name}_beyond")
        made.type = made.type if tensor else value.type
        return made

    def _fence(self, body: ir.Graph, node: ir.Node) -> None:
        """Put a border before each value that a body reads from the main graph; constants stay, or become inputs."""
        known: dict[ir.Value, ir.Value] = {}
        reads = [(reader, i, value) for reader in body.all_nodes() for i, value in enumerate(reader.inputs)]
        for reader, i, value in reads:
            if value is None or value.graph is not self.builder.graph:
                continue
            parameter = i > 0 and reader.op_type in TRAITS["bias_port"] and _is_float_constant(value)
            if not value.is_initializer() or parameter:
                known[value] = known.get(value) or (self._fed(value) if parameter else self._border(node, value))
                reader.replace_input_with(i, known[value])

    def _entering(self, node: ir.Node, value: ir.Value) -> ir.Value:
        return self._fed(value) if _is_float_constant(value) else self._border(node, value)

    def _fed(self, value: ir.Value) -> ir.Value:
        """Make the constant ``value`` an input of the model."""
        assert value.const_value is not None and value.dtype is not None
        return self.found.feed(self.builder, f"{value.name}_fed", value.const_value.numpy(), value.dtype)

    # -- copies

    def _copy(
        self, body: ir.Graph, anchor: ir.Node, inputs: dict[ir.Value, ir.Value], runs: Mapping[Run, int]
    ) -> _Copy:
        """Put a copy of ``body`` before ``anchor``; ``inputs`` stand for its inputs, ``runs`` are those of its places."""
        clone = body.clone(allow_outer_scope_values=True)
        names = {str(v.name): str(outer.name) for v, outer in inputs.items()}
        given = dict(zip(clone.inputs, (inputs[v] for v in body.inputs), strict=True))
        outputs = [given.get(v, v) for v in clone.outputs]
        for value, outer in given.items():
            move_uses(value, outer)
        clone.outputs.clear()
        nodes = list(clone)
        self._rename(clone, names)
        for node in clone.all_nodes():
            _renumber(node, names, runs)
        clone.remove(nodes)
        assert anchor.graph is not None
        anchor.graph.insert_before(anchor, nodes)
        return _Copy(inputs, nodes, outputs)

    def _rename(self, clone: ir.Graph, names: dict[str, str]) -> None:
        """Give every value in ``clone`` except its inputs a new name, recorded in ``names``."""
        values = [v for graph in clone.subgraphs() for v in graph.inputs]
        for node in clone.all_nodes():
            node.name = self.builder.names.node(str(node.name))
            values += [v for v in node.outputs if v.name]
        for value in values:
            fresh = self.builder.names.value(str(value.name))
            names[str(value.name)] = value.name = fresh

    def _replace(self, node: ir.Node, results: Sequence[ir.Value]) -> None:
        """Replace the outputs of ``node`` by ``results``, which take their names, and remove the node."""
        for value, result in zip(node.outputs, results, strict=False):
            if value.uses() or value.is_graph_output():
                made = self._border(node, result)
                made.type = value.type or made.type
                move_uses(value, made)
                self.builder.outputs.replace(value, made)
                made.name = value.name
        assert node.graph is not None
        node.graph.remove(node, safe=True)


def _branches(node: ir.Node) -> dict[str, ir.Graph]:
    return {key: node.attributes[key].as_graph() for key in ("then_branch", "else_branch")}


def _in_branches(body: ir.Graph) -> set[Run]:
    """The places of a body that stand in branches of If."""
    branches = (graph for node in body.all_nodes() if node.op_type == "If" for graph in _branches(node).values())
    return {place for graph in branches for place in places_in(graph)}


def _is_float_constant(value: ir.Value) -> bool:
    return value.is_initializer() and not value.is_graph_input() and value.dtype in _FLOATS


def _taken(ran: Mapping[str, bool | None]) -> str | None:
    """The branch that was taken: one that ran, or the other of one that did not."""
    yes = [key for key, answer in ran.items() if answer]
    no = [key for key, answer in ran.items() if answer is False]
    if yes:
        return yes[0] if len(yes) == 1 else None
    return next(key for key in ran if key not in no) if len(no) == 1 else None


@dataclass(frozen=True)
class _Scanned:
    """A scanned input: its axis, and whether it is read in reverse."""

    value: ir.Value
    axis: int
    backwards: bool


@dataclass(frozen=True)
class _Shape:
    """Inputs and outputs of a loop.

    Attributes:
        states: before the first iteration.
        scanned: in the order of the body's inputs.
        stacked: axis, and whether the last iteration comes first, of each output with all iterations.
        backwards: whether the simulation's values stand in the opposite order of the iterations.
    """

    states: list[ir.Value]
    scanned: list[_Scanned]
    stacked: list[tuple[int, bool]]
    backwards: bool


def _loop_shape(node: ir.Node, body: ir.Graph) -> _Shape:
    states = [v for v in node.inputs[2:] if v is not None]
    return _Shape(states, [], [(0, False)] * (len(body.outputs) - 1 - len(states)), backwards=False)


def _scan_shape(node: ir.Node, body: ir.Graph) -> _Shape:
    values = [v for v in node.inputs if v is not None]
    scanned = node.attributes["num_scan_inputs"].as_int()
    states, count = values[:-scanned], len(body.outputs) - len(values) + scanned

    def numbers(name: str, length: int) -> list[int]:
        return list(node.attributes.get_ints(name, ())) or [0] * length

    directions = numbers("scan_input_directions", scanned)
    inputs = zip(values[-scanned:], numbers("scan_input_axes", scanned), directions, strict=True)
    outputs = zip(numbers("scan_output_axes", count), numbers("scan_output_directions", count), strict=True)
    return _Shape(
        states,
        [_Scanned(value, axis, bool(turned)) for value, axis, turned in inputs],
        [(axis, bool(turned)) for axis, turned in outputs],
        backwards=all(directions),
    )


def _share_constant(one: _Copy, other: _Copy) -> _Copy:
    """Drop the nodes of ``other`` whose results are those of ``one``, the first iteration."""
    varying = {value for key, value in other.inputs.items() if value is not one.inputs[key]}
    shared: dict[ir.Value, ir.Value] = {}
    left = []
    for first, node in zip(one.nodes, other.nodes, strict=True):
        fixed = node.op_type == "Constant" or (node.inputs and not varying.intersection(node.inputs))
        if not fixed or graphs_in(node) or node.op_type in RANDOM:
            varying.update(node.outputs)
            left.append(node)
            continue
        for value, same in zip(node.outputs, first.outputs, strict=True):
            move_uses(value, same)
            shared[value] = same
        node.graph.remove(node, safe=True)  # type: ignore[union-attr]
    return _Copy(other.inputs, left, [shared.get(v, v) for v in other.outputs])


def _renumber(node: ir.Node, names: Mapping[str, str], runs: Mapping[Run, int]) -> None:
    """Number the copy of a quantizer as a run of its own."""
    facts = read_metadata(node)
    if facts is not None:
        facts["entry"] = names.get(facts["entry"], facts["entry"])
        facts["places"] = [[site, runs.get((site, run), run)] for site, run in facts["places"]]
        node.metadata_props[METADATA] = json.dumps(facts)


def places_in(graph: ir.Graph) -> list[Run]:
    """Every activation quantizer in a body and its nested bodies."""
    noted = (read_metadata(node) for node in graph.all_nodes())
    return [
        (str(site), int(run))
        for facts in noted
        if facts is not None and facts["role"] == "activation"
        for site, run in facts["places"]
    ]


# ----------------------------------------------------------------------------------------------- recurrent layers


def side_by_side(opened: Opened, graph_inputs: Mapping[str, Array]) -> Opened:
    """Lay out every recurrent layer of the main graph whose states the simulation gave values for.

    What a step computes does not depend on how often the loop ran before, only on the states it is handed. So the body of
    a Scan that :mod:`bitwright.export.recurrent` wrote is put into the main graph once, for ``length * batch`` rows at a
    time: its slices are the scanned tensors with the two axes joined, its states those of the simulation one step earlier.
    A layer whose sequences have lengths that are computed inside the model stays as it is.

    Args:
        opened: its model is left as it is. Values of inner sites are of all steps in the order of time: ``[length, batch,
            hidden]``, perhaps with an axis of directions.
        graph_inputs: name -> value.
    """
    if not any(STATES in node.metadata_props for node in opened.model.graph):
        return opened
    found = replace(opened, model=copy_model(opened.model), values=dict(opened.values), feeds=dict(opened.feeds))
    builder = Builder(found.model)
    for node in [n for n in found.model.graph if STATES in n.metadata_props]:
        layer = _layer_of(node, opened.values, graph_inputs)
        if layer is not None:
            _lay_out(layer, builder, found)
    return found


@dataclass(frozen=True)
class _Layer:
    """A Scan and what the simulation says about it.

    Attributes:
        states: of every state what each step made, ``[length, batch, width]``.
        lengths: of the sequences, ``[batch]``; ``None`` where all have that of the input.
        places: (site, run) of every quantizer in the body.
    """

    scan: ir.Node
    body: ir.Graph
    states: tuple[Array, ...]
    lengths: Array | None
    places: tuple[Run, ...]

    @property
    def reverse(self) -> bool:
        directions = self.scan.attributes.get_ints("scan_input_directions", ())
        return bool(directions and directions[0])

    @property
    def ends(self) -> Array:
        """Number of steps of every sequence, ``[batch]``."""
        length, batch, _ = self.states[0].shape
        return np.full(batch, length) if self.lengths is None else self.lengths

    def sequence(self) -> Array:
        """The hidden states as the layer returns them: zero beyond the end of a sequence."""
        steps = np.arange(len(self.states[0]))[:, None, None]
        return np.where(steps < self.ends[:, None], self.states[0], np.float32(0))

    def last(self, index: int) -> Array:
        """A state after the last step, ``[batch, width]``."""
        state = self.states[index]
        rows = np.arange(state.shape[1])
        return state[0] if self.reverse else state[np.maximum(self.ends, 1) - 1, rows]

    def before_steps(self, index: int) -> tuple[Array, Array]:
        """A state before each step, ``[length, batch, width]``, and where it is the initial one, ``[length, batch, 1]``."""
        state, ends = self.states[index], self.ends
        length, batch, _ = state.shape
        steps, rows = np.arange(length)[:, None], np.arange(batch)[None]
        source = steps + 1 if self.reverse else np.minimum(steps, ends) - 1  # an ended sequence keeps its state
        first = source >= ends if self.reverse else source < 0
        return state[np.clip(source, 0, length - 1), rows], first[..., None]


def _layer_of(scan: ir.Node, values: Values, graph_inputs: Mapping[str, Array]) -> _Layer | None:
    """The layer, or ``None`` where a state has no values (it passes no site, or they were not given), or lengths are unknown."""
    try:
        noted = json.loads(scan.metadata_props[STATES])
        name, sites = noted["lengths"], list(noted["sites"])
    except (ValueError, TypeError, KeyError) as error:
        raise damaged_metadata(scan) from error
    stored = None if name is None or scan.graph is None else array_of(scan.graph.initializers.get(name))
    lengths = graph_inputs.get(name) if stored is None else stored
    if lengths is None and name is not None:
        return None
    body = scan.attributes["body"].as_graph()
    places = tuple(places_in(body))
    runs = dict(places)
    states = []
    for site in sites:
        several = runs_of(values.get(site or ""))
        if site not in runs or runs[site] >= len(several):
            return None
        given = several[runs[site]]
        states.append(given.reshape(given.shape[0], given.shape[-2], given.shape[-1]))  # without an axis of directions
    return _Layer(scan, body, tuple(states), lengths, places)


def _lay_out(layer: _Layer, builder: Builder, found: Opened) -> None:
    """Replace the Scan of one layer by its body."""
    scan, body, count = layer.scan, layer.body, len(layer.states)
    length, batch, _ = layer.states[0].shape
    assert scan.graph is not None

    entering = [_before_steps(layer, builder, found, i) for i in range(count)]
    rows = [_reshaped(builder, scan, v, (length * batch, -1)) for v in scan.inputs[count:] if v is not None]
    for value, outer in zip(list(body.inputs), [*entering, *rows], strict=True):
        move_uses(value, outer)
    body.outputs.clear()
    for value in list(body.initializers.values()):
        body.initializers.pop(str(value.name))
        builder.graph.register_initializer(value)
    nodes = list(body)
    body.remove(nodes)
    scan.graph.insert_before(scan, nodes)
    results = [layer.last(i)[None] for i in range(count)] + [layer.sequence()[:, None]]
    for value, array in zip(scan.outputs, results, strict=False):
        if not value.uses() and not value.is_graph_output():
            continue
        dtype = value.dtype or ir.DataType.FLOAT
        fed = found.feed(builder, f"{value.name}_simulated", array, dtype)
        made = builder.emit(before(scan), "Identity", [fed], f"{value.name}_fed", dtype)
        move_uses(value, made)
        if value.is_graph_output():
            found.settled.add(str(value.name))
        builder.outputs.replace(value, made)
    scan.graph.remove(scan, safe=True)
    for site, run in layer.places:
        several = [*runs_of(found.values.get(site))]
        if run < len(several):
            several[run] = several[run].reshape(1, length * batch, -1)
            found.values[site] = several


def _before_steps(layer: _Layer, builder: Builder, found: Opened, index: int) -> ir.Value:
    """A state before each step, ``[1, length * batch, width]``: the initial one, then those of the simulation."""
    initial = layer.scan.inputs[index]
    assert initial is not None
    dtype, name = initial.dtype or ir.DataType.FLOAT, str(initial.name)
    states, first = layer.before_steps(index)
    is_first = found.feed(builder, f"{name}_first", first, ir.DataType.BOOL)
    given = found.feed(builder, f"{name}_steps", states, dtype)
    joined = builder.emit(before(layer.scan), "Where", [is_first, initial, given], f"{name}_all_steps", dtype)
    joined.shape = ir.Shape(states.shape)
    return _reshaped(builder, layer.scan, joined, (1, -1, states.shape[-1]))


def _reshaped(builder: Builder, scan: ir.Node, value: ir.Value, shape: tuple[int, ...]) -> ir.Value:
    target = builder.initializer(f"{value.name}_rows_shape", np.asarray(shape, np.int64))
    dtype = value.dtype or ir.DataType.FLOAT
    made = builder.emit(before(scan), "Reshape", [value, target], f"{value.name}_rows", dtype)
    made.shape = None
    return made


# ---------------------------------------------------------------------------------- sites that are rounded after pools


def after_pools(model: ir.Model, values: Values) -> dict[str, Array | Sequence[Array]]:
    """``values``, of the shapes that the tensors of ``model`` have.

    The file rounds some sites after the pools that read them (:mod:`bitwright.export.qdq.rewrites`). The largest of quantized
    numbers is one of them, so that pools of the simulation's values give what the file has there.

    Args:
        model: as ``to_qdq`` wrote it.
        values: site -> the simulation's values, one array per run. Those of other sites, and those that the pools do not take
            because they have another number of axes, stay as they are.

    Raises:
        ExportError: what the export wrote on an operator is damaged.
    """
    found = dict(values)
    for (site, run), pools in pooled_places(model).items():
        several = list(runs_of(found.get(site)))
        if run < len(several):
            several[run] = _pooled(pools, several[run], model.opset_imports[""])
            found[site] = several
    return found


def pooled_places(model: ir.Model) -> dict[Run, tuple[ir.Node, ...]]:
    """(site, run) of every quantizer that stands after pools of what the site is -> these pools, in execution order.

    Raises:
        ExportError: what the export wrote on an operator is damaged.
    """
    noted = [(node, read_metadata(node)) for node in model.graph]
    found: dict[Run, tuple[ir.Node, ...]] = {}
    for node, facts in noted:
        if facts is not None and facts["pooled"]:
            pools = _pools_before(node, str(facts["entry"]), facts["pooled"])
            found.update(((site, run), pools) for site, run in facts["places"])
    return found


def _pools_before(node: ir.Node, entry: str, count: int) -> tuple[ir.Node, ...]:
    """The last ``count`` operators that lead to ``entry``, of the quantizer that ``node`` ends."""
    value: ir.Value | None = node.outputs[0]
    found: list[ir.Node] = []
    reached = False
    while value is not None and len(found) < count:
        reached = reached or value.name == entry
        maker = value.producer()
        if maker is not None and reached:
            found.insert(0, maker)
        value = maker.inputs[0] if maker is not None and maker.inputs else None
    if len(found) < count:
        raise damaged_metadata(node)
    return tuple(found)


def _pooled(pools: Sequence[ir.Node], array: Array, opset: int) -> Array:
    """Apply ``pools`` to ``array`` in order."""
    given = ir.Value(name="x", type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape))
    nodes: list[ir.Node] = []
    for pool in pools:
        read = nodes[-1].outputs[0] if nodes else given
        nodes.append(ir.Node("", pool.op_type, [read], list(pool.attributes.values()), num_outputs=1))
        nodes[-1].outputs[0].name, nodes[-1].outputs[0].type = f"y{len(nodes)}", given.type
    made = nodes[-1].outputs[0]
    graph = ir.Graph([given], [made], nodes=nodes, opset_imports={"": opset}, name="pools")
    model = ir.Model(graph, ir_version=10)
    try:
        return run_model(model, {"x": np.asarray(array, order="C")}, "float")[str(made.name)]
    except refusals():
        return array  # another number of axes: the comparison of shapes says so
